"""Tables of results in the paper's layout, the paper's figure beside ours, as Markdown and CSV.

    python benchmark/tables.py --results benchmark/results/quick --markdown table.md --csv table.csv

Statistic: smooth each seed's curve over 8 adjacent evaluations, average over seeds, take the peak of that mean curve;
+- 2 standard errors over seeds (standard deviation with n - 1) at the peak. Success in % on Meta-World, episodic return
on locomotion tasks and wherever an environment knows no success.
"""

import csv
import json
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

PAPER = Path(__file__).resolve().parent / "paper_results.csv"
METHODS = {
    "bc": "BC", "p_iql": "P-IQL", "cpl": "CPL", "cpl_kl": "CPL+KL", "preference_transformer": "Pref Trans.",
    "ipl": "IPL", "dppo": "DPPO", "paws_transformer_state": "State (Trans.)", "paws_mlp_state": "State (MLP)",
    "paws_transformer": "PAWS (Trans.)", "paws_mlp": "PAWS (MLP)",
}  # fmt: skip
LOCOMOTION = ("ant", "half-cheetah", "hopper", "walker2d")
WINDOW = 8


@dataclass
class Args:
    results: str = "benchmark/results/quick"
    """folder with result files (of benchmark/sweep.py, or run directories)"""
    seeds: tuple[int, ...] = ()
    """only these seeds [all there are]"""
    markdown: str | None = None
    """write the table there too"""
    csv: str | None = None
    """write the figures there"""


@dataclass
class Cell:
    mean: float
    two_se: float  # NaN for a single seed
    peak_step: int = 0
    seeds: int = 0
    steps: int = 0
    seconds: float = float("nan")

    def __str__(self) -> str:
        return f"{self.mean:.0f}" if np.isnan(self.two_se) else f"{self.mean:.0f}±{self.two_se:.0f}"


def peak_of_mean(curves: np.ndarray) -> tuple[float, float, int]:
    """(seeds, evaluations) -> peak of the seeds' smoothed mean curve, 2 SE there, index of its last evaluation."""
    window = min(WINDOW, curves.shape[1])
    smooth = np.lib.stride_tricks.sliding_window_view(curves, window, axis=1).mean(-1)  # (seeds, evaluations - 7)
    best = int(smooth.mean(0).argmax())
    at_peak = smooth[:, best]
    two_se = 2 * at_peak.std(ddof=1) / np.sqrt(len(at_peak)) if len(at_peak) > 1 else np.nan
    return float(at_peak.mean()), float(two_se), best + window - 1


def load_results(folder: Path, seeds: tuple[int, ...] = ()) -> list[dict]:
    found = []
    for path in sorted(folder.rglob("*.json")):
        result = json.loads(path.read_text())
        if isinstance(result, dict) and result.get("curve") and (not seeds or result["seed"] in seeds):
            found.append({**result, "path": str(path)})
    if not found:
        sys.exit(f"error: {folder}: no result files with evaluations; run benchmark/sweep.py first")
    return found


def metric_of(task: str, results: list[dict]) -> str:
    no_success = any(row[1] is None for r in results if r["task"] == task for row in r["curve"])
    return "return" if task in LOCOMOTION or no_success else "success"


def our_cells(results: list[dict]) -> dict[tuple[str, str, int], Cell]:
    """(task, method, n_pref) -> our figure over all seeds found."""
    groups = defaultdict(list)
    for result in results:
        groups[result["task"], result["algorithm"], result["n_pref"]].append(result)
    cells = {}
    for key, runs in groups.items():
        if len({r["seed"] for r in runs}) < len(runs):
            sys.exit(f"error: two runs of one seed: {', '.join(r['path'] for r in runs)}; remove one")
        steps = [[row[0] for row in r["curve"]] for r in runs]
        if any(s != steps[0] for s in steps):
            sys.exit(f"error: seeds evaluated at different updates: {', '.join(r['path'] for r in runs)}")
        column, scale = (1, 100) if metric_of(key[0], results) == "success" else (2, 1)
        curves = scale * np.array([[row[column] for row in r["curve"]] for r in runs], float)
        mean, two_se, last = peak_of_mean(curves)
        seconds = float(np.mean([r["seconds"]["total"] for r in runs]))
        cells[key] = Cell(mean, two_se, steps[0][last], len(runs), runs[0]["steps"], seconds)
    return cells


def paper_cells() -> dict[tuple[str, str, int], Cell]:
    with open(PAPER, newline="") as file:
        rows = list(csv.DictReader(file))
    return {(r["task"], r["method"], int(r["n_pref"])): Cell(float(r["mean"]), float(r["two_se"])) for r in rows}


def means(cells: dict, tasks: list[str], columns: list) -> list[float | None]:
    """Average over tasks of each (method, n_pref), where every task has a figure."""
    found = [[cells.get((task, *column)) for task in tasks] for column in columns]
    return [None if None in column else float(np.mean([cell.mean for cell in column])) for column in found]


def table_of_one_task(title: str, task: str, ours: dict, paper: dict) -> str:
    """A method in each row, a number of preferences in each column."""
    names, budgets = methods_in(ours, [task]), sorted({n for t, _, n in ours if t == task})
    lines = [f"**{title} on {task}: ours ± 2 SE (paper), seeds**", ""]
    lines += ["| method | " + " | ".join(f"{n} preferences | seeds" for n in budgets) + " |"]
    lines += ["|---" * (2 * len(budgets) + 1) + "|"]
    for method in names:
        cells = []
        for n in budgets:
            mine, theirs = ours.get((task, method, n)), paper.get((task, method, n))
            cells += [("–" if mine is None else f"{mine}") + ("" if theirs is None else f" ({theirs})")]
            cells += ["" if mine is None else f"{mine.seeds}"]
        lines.append(f"| {METHODS.get(method, method)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def methods_in(ours: dict, tasks: list[str]) -> list[str]:
    """In the paper's order, others behind."""
    present = {method for task, method, _ in ours if task in tasks}
    return [m for m in METHODS if m in present] + sorted(present - set(METHODS))


def markdown_table(title: str, tasks: list[str], ours: dict, paper: dict, averages: bool) -> str:
    if len(tasks) == 1:
        return table_of_one_task(title, tasks[0], ours, paper)
    present = {key[1:] for key in ours if key[0] in tasks}
    names = methods_in(ours, tasks)
    columns = [(m, n) for m in names for n in sorted({n for method, n in present if method == m})]
    lines = [f"**{title}: ours ± 2 SE (paper)**", ""]
    lines.append("| Task | " + " | ".join(f"{METHODS.get(m, m)} {n}" for m, n in columns) + " |")
    lines.append("|---" * (len(columns) + 1) + "|")

    def row(name, mine, theirs):
        both = [("–" if a is None else a) + ("" if b is None else f" ({b})") for a, b in zip(mine, theirs, strict=True)]
        lines.append(f"| {name} | " + " | ".join(both) + " |")

    def text(values, form):
        return [None if value is None else form.format(value) for value in values]

    for task in tasks:
        row(
            task.replace("-", " ").title(),
            *([str(cells[task, *c]) if (task, *c) in cells else None for c in columns] for cells in (ours, paper)),
        )  # fmt: skip
    if averages:
        both = [means(cells, tasks, columns) for cells in (ours, paper)]
        row("Avg. over tasks", *(text(values, "{:.1f}") for values in both))
        gains = []
        for values in both:
            bc = {n: value for (m, n), value in zip(columns, values, strict=True) if m == "bc"}
            pairs = [(value, bc.get(n)) for (_, n), value in zip(columns, values, strict=True)]
            gains.append([None if v is None or not b else 100 * (v / b - 1) for v, b in pairs])
        row("Improvement over BC (%)", *(text(values, "{:.1f}") for values in gains))
    return "\n".join(lines)


def main(args: Args) -> str:
    results, paper, parts, rows = load_results(Path(args.results), args.seeds), paper_cells(), [], []
    for preset in sorted({r.get("preset") or "unknown" for r in results}):
        mine = [r for r in results if (r.get("preset") or "unknown") == preset]
        ours = our_cells(mine)
        order = list(dict.fromkeys(key[0] for key in paper))
        tasks = sorted({key[0] for key in ours}, key=lambda t: (order.index(t) if t in order else len(order), t))
        for title, metric in (("Success (%)", "success"), ("Episodic return", "return")):
            chosen = [task for task in tasks if metric_of(task, mine) == metric]
            if chosen:
                averages = metric == "success" and len(chosen) > 1
                parts.append(markdown_table(title, chosen, ours, paper, averages))
            for (task, method, n), cell in sorted(ours.items()):
                if task in chosen:
                    theirs = paper.get((task, method, n), Cell(float("nan"), float("nan")))
                    figures = [cell.mean, cell.two_se, theirs.mean, theirs.two_se]
                    figures = ["" if np.isnan(x) else round(x, 2) for x in figures]
                    extra = [cell.seeds, cell.steps, cell.peak_step, round(cell.seconds, 1)]
                    rows.append([preset, task, method, n, metric, *figures, *extra])
        counts = sorted({cell.seeds for cell in ours.values()})
        commits, machines = (", ".join(sorted({str(r.get(key)) for r in mine})) for key in ("git", "machine"))
        parts.append(
            f"Preset {preset}; seeds per figure: {', '.join(map(str, counts))} (the paper: 10); commit {commits}; "
            f"machine {machines}. Peak of the seeds' mean curve, smoothed over {WINDOW} evaluations."
        )
    page = "\n\n".join(parts)
    if args.markdown:
        Path(args.markdown).write_text(page + "\n")
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            header = "preset task method n_pref metric ours ours_2se paper paper_2se seeds steps peak_step seconds"
            writer.writerows([header.split(), *rows])
    return page


if __name__ == "__main__":
    print(main(tyro.cli(Args)))
