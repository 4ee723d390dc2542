"""Is PAWS better than each baseline? Welch's t-tests over seeds, corrected for their number, as in the human study.

    python benchmark/significance.py --n-pref 50
    python benchmark/significance.py --human    # runs of sweep.py --study human: a labeler for each seed

A test compares the figures of benchmark/tables.py, over their seeds, of one PAWS variant and one baseline on one task.
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
    results: str = "benchmark/results"  # folder with a folder of collected results for each preset


@dataclass
class Row:
    task: str
    variant: str
    baseline: str
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
                p = float(stats.ttest_ind(a, b, equal_var=False).pvalue)
                if np.isnan(p):  # no variance at all: equal, or certainly different
                    p = float(a.mean() == b.mean())
                rows.append(Row(task, variant, baseline, float(a.mean() - b.mean()), p))
    if rows:
        adjusted = stats.false_discovery_control([row.p for row in rows])
        for row, value in zip(rows, adjusted, strict=True):
            row.bonferroni, row.benjamini_hochberg = min(1.0, row.p * len(rows)), float(value)
    return rows


def main(args: Args) -> None:
    figures = tables.figures_of(tables.load_results(Path(args.results, args.preset)))
    data, tasks = ("human", sweep.HUMAN_TASKS) if args.human else ("", args.tasks)
    methods = (*paper.METHODS, "paws_mlp_chi2", "paws_transformer_chi2")
    found = {task: {m: figures.get((m, task, args.n_pref, data)) for m in methods} for task in tasks}
    rows = compare({t: {m: f.scores for m, f in of.items() if f and len(f.scores) > 1} for t, of in found.items()})
    if not rows:
        sys.exit(f"error: {args.results}/{args.preset}: no task has two seeds of PAWS and of a baseline; run sweep.py")
    print(f"{len(rows)} Welch's t-tests; Bonferroni level 0.05 / {len(rows)} = {0.05 / len(rows):.2g}\n")
    print(
        "| Task | PAWS variant | baseline | difference | p | p Bonferroni | p Benjamini-Hochberg |\n" + "|---" * 7 + "|"
    )
    for row in sorted(rows, key=lambda row: (row.task, row.variant, row.p)):
        ps = [f"**{p:.2g}**" if p < 0.05 else f"{p:.2g}" for p in (row.p, row.bonferroni, row.benjamini_hochberg)]
        names = [tables.NAMES[row.variant], tables.NAMES[row.baseline]]
        print(tables.row([row.task, *names, f"{row.difference:+.1f}", *ps]))


if __name__ == "__main__":
    main(tyro.cli(Args))
