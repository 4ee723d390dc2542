"""Is PAWS better than each baseline? Welch's t-tests over seeds, corrected for their number, as in the human study.

    python benchmark/significance.py --n-pref 50
    python benchmark/significance.py --human    # runs of sweep.py --study human: a labeler for each seed

A test compares the figures of benchmark/tables.py, over their seeds, of one PAWS variant and one baseline on one task.
It needs two seeds of each; with few seeds their variance is hardly known, so read p with the number of seeds.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent))
import paper
import sweep
import tables


@dataclass
class Args:
    preset: str = "quick"  # whose results
    n_pref: int = 50  # number of preferences
    tasks: tuple[str, ...] = paper.METAWORLD  # which tasks
    human: bool = False  # the human study: its two tasks, 50 comparisons of each labeler
    results: str = "results"  # of benchmark/sweep.py: folder with a folder of results for each preset
    mixed: bool = False  # allow results of several commits


@dataclass
class Row:
    task: str
    variant: str
    baseline: str
    seeds: str  # of both
    difference: float
    p: float
    bonferroni: float = 1.0  # p times the number of tests
    benjamini_hochberg: float = 1.0


def compare(scores: dict[str, dict[str, np.ndarray]]) -> list[Row]:
    """{task: {method: (seeds,)}} -> each PAWS variant against each baseline; all tests are one family."""
    rows = []
    for task, groups in scores.items():
        for variant in (m for m in groups if m.startswith("paws")):
            for baseline in (m for m in groups if not m.startswith("paws")):
                a, b = groups[variant], groups[baseline]
                varied = a.std() > 0 or b.std() > 0  # a handful of equal seeds does not tell the variance
                p = float(stats.ttest_ind(a, b, equal_var=False).pvalue) if varied else 1.0
                rows.append(Row(task, variant, baseline, f"{len(a)}, {len(b)}", float(a.mean() - b.mean()), p))
    if rows:
        adjusted = stats.false_discovery_control([row.p for row in rows])
        for row, value in zip(rows, adjusted, strict=True):
            row.bonferroni, row.benjamini_hochberg = min(1.0, row.p * len(rows)), float(value)
    return rows


def main(args: Args) -> None:
    figures = tables.figures_of(tables.load_results(Path(args.results, args.preset)))
    data, tasks = ("human", sweep.HUMAN_TASKS) if args.human else ("", args.tasks)
    left_out = (*tables.ORACLES, "dppo_defaults")  # not methods to be compared with
    methods = [m for m in dict.fromkeys((*sweep.COMPARED, "paws_transformer_chi2")) if m not in left_out]
    found = {task: {m: figures.get((m, task, args.n_pref, data)) for m in methods} for task in tasks}
    tested = {t: {m: f for m, f in of.items() if f and len(f.scores) > 1} for t, of in found.items()}
    rows = compare({task: {m: f.scores for m, f in of.items()} for task, of in tested.items()})
    if not rows:
        sys.exit(f"error: {args.results}/{args.preset}: no task has two seeds of PAWS and of a baseline; run sweep.py")
    print(f"{len(rows)} Welch's t-tests; Bonferroni level 0.05 / {len(rows)} = {0.05 / len(rows):.2g}\n")
    heads = ["Task", "PAWS variant", "baseline", "seeds", "difference", "p", "p Bonferroni", "p Benjamini-Hochberg"]
    print(tables.row(heads) + "\n" + "|---" * len(heads) + "|")
    for row in sorted(rows, key=lambda row: (row.task, row.variant, row.p)):
        ps = [f"**{p:.2g}**" if p < 0.05 else f"{p:.2g}" for p in (row.p, row.bonferroni, row.benjamini_hochberg)]
        names = [tables.NAMES.get(name, name) for name in (row.variant, row.baseline)]
        print(tables.row([row.task, *names, row.seeds, f"{row.difference:+.1f}", *ps]))
    untested = [task for task in tasks if task not in {row.task for row in rows}]
    print(f"\nToo few seeds for a test on {', '.join(untested)}." if untested else "")
    command = f"python benchmark/sweep.py --preset {args.preset} --seeds 1 2 3 --n-prefs {args.n_pref}"
    command = f"python benchmark/sweep.py --preset {args.preset} --study human" if args.human else command
    used = [figure for of in tested.values() for figure in of.values()]
    print(tables.provenance("significance", command, used, args.mixed))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
