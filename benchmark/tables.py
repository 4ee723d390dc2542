"""The paper's tables from collected results, its figures beside ours: RESULTS/results.md and RESULTS/tables.csv.

    python benchmark/tables.py                                                          # of your own sweep
    python benchmark/tables.py --results benchmark/results --markdown docs/results.md   # of this repository's

A figure: smooth each seed's curve over 8 adjacent evaluations, average over seeds, take the peak of that mean curve; +-
2 standard errors over seeds (standard deviation with n - 1) there. Beside it the mean of the last 8 evaluations, and
the interquartile mean over tasks and seeds with a 95 % interval of a bootstrap that draws seeds within tasks.
"""

import csv
import io
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tyro
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmark"), str(ROOT / "data_gen")]
import paper
import sweep

NAMES = {
    "bc": "BC", "p_iql": "P-IQL", "cpl": "CPL", "cpl_kl": "CPL+KL", "preference_transformer": "Pref Trans.",
    "ipl": "IPL", "dppo": "DPPO", "dppo_defaults": "DPPO (code's defaults)", "bc_preferred": "BC (preferred)",
    "paws_transformer": "PAWS (Trans.)", "paws_mlp": "PAWS (MLP)", "paws_transformer_chi2": "PAWS-χ² (Trans.)",
    "paws_mlp_chi2": "PAWS-χ² (MLP)", "paws_transformer_state": "State (Trans., step alone)",
    "paws_transformer_state_context": "State (Trans., in context)", "paws_mlp_state": "State (MLP)",
    "preference_transformer_250": "Pref Trans. (returns span 250)",
    "paws_mlp_512": "PAWS (MLP, 3 x 512)", "paws_mlp_chi2_512": "PAWS-χ² (MLP, 3 x 512)",
    "paws_mlp_n-eff-0.3": "PAWS (MLP, n_eff 30 %)",
    "paws_mlp_chi2_n-eff-0.3": "PAWS-χ² (MLP)", "paws_mlp_starts_n-eff-0.3": "PAWS-χ² (MLP, covered starts)",
    "bc_best": "*BC (best policy's segments)*", "paws_oracle": "*PAWS (oracle's advantages)*",
    "data_best": "*best data policy*",
}  # fmt: skip
ORACLES = ("bc_best", "paws_oracle", "data_best")  # know what no method may know
# --flags of the sweep for PAWS (MLP) with the paper's advantage model, which preset quick has smaller
PAPERS_SIZE = "--advantage-width 512 --advantage-layers 3 --advantage-learning-rate 3e-4 --advantage-steps 3000"
LONGER = "--total-steps 30000 --eval-every 1500"  # five times as many updates as preset quick has
WINDOW = 8


@dataclass
class Args:
    results: str = "results"  # of benchmark/sweep.py: folder with a folder of results for each preset
    markdown: str = ""  # page to write; its part between "<!-- notes -->" and "<!-- end -->" stays [RESULTS/results.md]
    csv: str = ""  # every figure in one row [RESULTS/tables.csv]
    mixed: bool = False  # allow a table of results of several commits


# ---- statistics ----
def smooth(curves: np.ndarray) -> np.ndarray:
    """Mean of 8 adjacent evaluations. (seeds, evaluations) -> (seeds, evaluations - 7)"""
    window = min(WINDOW, curves.shape[1])
    return np.lib.stride_tricks.sliding_window_view(curves, window, axis=1).mean(-1)


def two_standard_errors(values: np.ndarray) -> float:
    """NaN for a single seed."""
    return float(2 * values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else float("nan")


def interquartile_mean(scores: list[np.ndarray]) -> float:
    return float(stats.trim_mean(np.concatenate(scores), 0.25))


def bootstrap_interval(scores: list[np.ndarray], draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the interquartile mean; `scores`: one array over seeds for each task, resampled one by one."""
    rng = np.random.default_rng(0)
    drawn = np.concatenate([s[rng.integers(len(s), size=(draws, len(s)))] for s in scores], axis=1)  # (draws, runs)
    low, high = np.quantile(stats.trim_mean(drawn, 0.25, axis=1), (0.025, 0.975))
    return float(low), float(high)


@dataclass
class Figure:
    """What the seeds of one cell come to."""

    mean: float
    two_se: float = float("nan")
    last: float = float("nan")  # mean of the last 8 evaluations
    last_two_se: float = float("nan")
    scores: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (seeds,) whose mean is `mean`
    runs: list[dict] = field(default_factory=list)

    def text(self, digits: int = 0) -> str:
        spread = "" if np.isnan(self.two_se) else f"±{self.two_se:.{digits}f}"
        return f"{self.mean:.{digits}f}{spread}"


def curve_of(run: dict) -> list[float | None]:
    """Success in % on Meta-World, returns elsewhere."""
    column, scale = (1, 100) if run["task"] in paper.METAWORLD else (2, 1)
    return [None if row[column] is None else scale * row[column] for row in run["curve"]]


def figure_of(runs: list[dict]) -> Figure:
    names = ", ".join(run["path"] for run in runs)
    if len({tuple(row[0] for row in run["curve"]) for run in runs}) > 1:
        sys.exit(f"error: seeds evaluated at different updates: {names}; remove one")
    if len({run["seed"] for run in runs}) < len(runs):
        sys.exit(f"error: two runs of one seed: {names}; remove one")
    smoothed = smooth(np.array([curve_of(run) for run in runs], float))
    scores, last = smoothed[:, smoothed.mean(0).argmax()], smoothed[:, -1]
    spreads = two_standard_errors(scores), two_standard_errors(last)
    return Figure(float(scores.mean()), spreads[0], float(last.mean()), spreads[1], scores, runs)


def on_shared_seeds(figures: dict[tuple, Figure | None]) -> dict[tuple, Figure | None]:
    """Each figure of the seeds that all methods of its task have, so that means over tasks compare like with like.

    Keys: (method, then what the compared ones have in common: budget, task, ...).
    """
    seeds = defaultdict(list)
    for (_, *group), figure in figures.items():
        if figure and figure.runs:
            seeds[*group].append({run["seed"] for run in figure.runs})
    shared = {}
    for (method, *group), figure in figures.items():
        if figure and figure.runs:
            common = set.intersection(*seeds[*group])
            runs = [run for run in figure.runs if run["seed"] in common]
            figure = figure_of(runs) if runs else None
        shared[method, *group] = figure
    return shared


def mean_over_tasks(figures: list[Figure | None]) -> Figure | None:
    """None unless every task has a figure. The tasks' errors are independent."""
    if not figures or None in figures:
        return None
    two_se, last_two_se = (
        float(np.sqrt(np.square([getattr(f, key) for f in figures]).sum()) / len(figures))
        for key in ("two_se", "last_two_se")
    )
    mean, last = (float(np.mean([getattr(f, key) for f in figures])) for key in ("mean", "last"))
    return Figure(mean, two_se, last, last_two_se, runs=[run for f in figures for run in f.runs])


# ---- results ----
def load_results(folder: Path) -> list[dict]:
    """Evaluated runs with the preset's own flags; PAPERS_SIZE and LONGER make methods of their own."""
    found = [{**sweep.read_json(path), "path": str(path)} for path in sorted(folder.glob("*.json"))]
    for run in found:
        if run.get("flags") == PAPERS_SIZE:
            run |= {"method": f"{run['method']}_512", "flags": ""}
        elif run.get("flags") == LONGER:
            run |= {"method": f"{run['method']}_longer", "flags": ""}
    return [run for run in found if run.get("curve") and not run["flags"] and curve_of(run)[0] is not None]


def figures_of(results: list[dict]) -> dict[tuple, Figure]:
    """(method with its options, task, n_pref, data) -> figure; data: "", "length16" or "human", one labeler a seed."""
    groups = defaultdict(list)
    for run in results:
        data = run["data"] if not run["data"] or run["data"].startswith("length") else "human"
        name = sweep.Cell(run["method"], "", 0, 0, tuple(run["options"].items())).exp_name
        groups[name, run["task"], run["n_pref"], data].append(run)
    return {key: figure_of(runs) for key, runs in groups.items()}


def add_best_data_policy(figures: dict[tuple, Figure]) -> None:
    for task in (*paper.METAWORLD, *paper.LOCOMOTION):
        policies = sweep.read_json(ROOT / "data" / "policies" / task / "policies.json").get("policies")
        if policies:
            best = policies[-1]
            value = best["return"] if best["success"] is None else 100 * best["success"]
            for n in (50, 500):
                figures["data_best", task, n, ""] = Figure(value, last=value)


# ---- tables ----
def provenance(title: str, command: str, used: list[Figure | None], mixed: bool) -> str:
    """Which command, preset, seeds, commit, machine made a table; ends if that is more than one commit."""
    runs = [run for figure in used if figure for run in figure.runs]
    if not runs:
        return f"No runs yet. To make it: `{command}`."
    found = {key: sorted({str(run[key]) for run in runs}) for key in ("preset", "commit", "machine")}
    if len(found["commit"]) > 1 and not mixed:
        examples = ", ".join(next(run["path"] for run in runs if str(run["commit"]) == c) for c in found["commit"])
        sys.exit(f"error: {title}: results of {len(found['commit'])} commits ({examples}): remove some, or use --mixed")
    seeds = sorted({len({run["seed"] for run in figure.runs if run["task"] == task})
                    for figure in used if figure for task in {run["task"] for run in figure.runs}})  # fmt: skip
    count = f"{seeds[0]}" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    preset, commits, machines = (", ".join(found[key]) for key in ("preset", "commit", "machine"))
    text = f"`{command}`; preset {preset}; seeds per figure: {count}; commit {commits}; {machines}."
    return text + (" Of several commits." if len(found["commit"]) > 1 else "")


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cell(ours: Figure | None, theirs: float | tuple | None, best: bool = False, digits: int = 0) -> str:
    text = "–" if ours is None else f"**{ours.text(digits)}**" if best else ours.text(digits)
    if theirs is None:
        return text
    return f"{text} ({Figure(*theirs).text(digits) if isinstance(theirs, tuple) else f'{theirs:.{digits}f}'})"


def best_of(figures: list[Figure | None], rounded=float) -> float | None:
    """The largest mean of at least two; None unless all have the same seeds: one seed's peak is more optimistic."""
    found = [figure for figure in figures if figure]
    seeds = {tuple(sorted({(run["task"], run["seed"]) for run in figure.runs})) for figure in found}
    return max(rounded(figure.mean) for figure in found) if len(found) > 1 and len(seeds) == 1 else None


def task_table(title, command, figures, tasks, columns, mixed, data="", published=paper.FIGURES) -> str:
    """A task in each row, a (method, n_pref) in each column: ours (the paper's); averages below, for success."""
    budgets = {n for _, n in columns}
    heads = [NAMES.get(m, m) + (f" {n}" if len(budgets) > 1 else "") for m, n in columns]
    lines = [f"### {title}", "", row(["Task", *heads]), "|---" * (len(columns) + 1) + "|"]
    used = {(m, n, task): figures.get((m, task, n, data)) for m, n in columns for task in tasks}
    for task in tasks:
        best = {}
        for n in budgets:
            best[n] = best_of([used[m, k, task] for m, k in columns if k == n and m not in ORACLES], round)
        cells = []
        for m, n in columns:
            ours = used[m, n, task]
            bold = ours is not None and m not in ORACLES and round(ours.mean) == best[n]
            cells.append(cell(ours, published.get((task, m, n)), bold))
        lines.append(row([task.replace("-", " ").title(), *cells]))
    if set(tasks) <= set(paper.METAWORLD):
        lines += averages(used, tasks, columns, published)
    return "\n".join([*lines, "", provenance(title, command, list(used.values()), mixed)])


def averages(used: dict, tasks, columns, published) -> list[str]:
    """Rows over all tasks: mean, gain over BC, mean of the last evaluations, interquartile mean."""
    complete = {column for column in columns if all(used[*column, task] for task in tasks)}  # others have no average
    used = on_shared_seeds({key: figure if key[:2] in complete else None for key, figure in used.items()})
    ours = {column: mean_over_tasks([used[*column, task] for task in tasks]) for column in columns}
    theirs = {}
    for m, n in columns:
        values = [published.get((task, m, n)) for task in tasks]
        theirs[m, n] = None if None in values else float(np.mean([mean for mean, _ in values]))
    compared = [column for column in columns if column[0] not in ORACLES]
    best = {n: best_of([ours[c] for c in compared if c[1] == n]) for _, n in columns}
    rows = {"Avg. over tasks": [], "Improvement over BC (%)": [], "Avg. of last 8": [], "IQM [95 %]": []}
    for column in columns:
        figure, n = ours[column], column[1]
        bold = column in compared and figure is not None and figure.mean == best[n]
        rows["Avg. over tasks"].append(cell(figure, theirs[column], bold, digits=1))
        bc = ours.get(("bc", n)), theirs.get(("bc", n))
        gain = Figure(100 * (figure.mean / bc[0].mean - 1)) if figure and bc[0] and bc[0].mean else None
        gain_theirs = 100 * (theirs[column] / bc[1] - 1) if theirs[column] and bc[1] else None
        rows["Improvement over BC (%)"].append(cell(gain, gain_theirs, digits=1))
        rows["Avg. of last 8"].append(cell(Figure(figure.last, figure.last_two_se) if figure else None, None, digits=1))
        scores = [used[*column, task].scores for task in tasks if used[*column, task]]
        if len(scores) < len(tasks) or not all(map(len, scores)):
            rows["IQM [95 %]"].append("–")
        elif min(map(len, scores)) < 2:  # nothing to resample
            rows["IQM [95 %]"].append(f"{interquartile_mean(scores):.1f}")
        else:
            low, high = bootstrap_interval(scores)
            rows["IQM [95 %]"].append(f"{interquartile_mean(scores):.1f} [{low:.1f}, {high:.1f}]")
    if not any(column[0] == "bc" for column in columns):
        del rows["Improvement over BC (%)"]
    return [row([name, *cells]) for name, cells in rows.items()]


def means_of(figures: dict[tuple, Figure], tasks, settings) -> dict[tuple, Figure]:
    """(method with options, n_pref, data) -> mean over tasks, of those in `settings` that have all tasks.

    All are of the same seeds: of each task those that every setting has.
    """
    cells = {(key, task): figures.get((key[0], task, *key[1:])) for key in settings for task in tasks}
    complete = [key for key in dict.fromkeys(settings) if all(cells[key, task] for task in tasks)]
    used = on_shared_seeds({cell: figure for cell, figure in cells.items() if cell[0] in complete})
    means = {key: mean_over_tasks([used[key, task] for task in tasks]) for key in complete}
    return {key: mean for key, mean in means.items() if mean}


def setting_table(title, command, figures, tasks, heads, rows, mixed) -> str:
    """Means over tasks. `rows`: label -> for each column (method with options, n_pref, data, the paper's or None)."""
    lines = [f"### {title}", "", row(heads), "|---" * len(heads) + "|"]
    means = means_of(figures, tasks, [tuple(key) for keys in rows.values() for *key, _ in keys])
    for label, keys in rows.items():
        lines.append(row([label, *(cell(means.get(tuple(key)), theirs, digits=1) for *key, theirs in keys)]))
    return "\n".join([*lines, "", provenance(title, command, list(means.values()), mixed)])


def difference_table(title, command, figures, tasks, rows, mixed) -> str:
    """Of two methods on the same task and seed: mean over tasks and seeds, and +- 2 standard errors over these.

    `rows`: label -> (method with options, the one that is subtracted).
    """
    lines = [f"### {title}", "", row(["Difference", "50 preferences", "500 preferences"]), "|---|---|---|"]
    used = []

    def scores(method: str, n: int) -> dict[tuple, float]:
        found = [figures[method, task, n, ""] for task in tasks if (method, task, n, "") in figures]
        used.extend(found)
        runs = [pair for figure in found for pair in zip(figure.runs, figure.scores, strict=True)]
        return {(run["task"], run["seed"]): score for run, score in runs}

    for label, (method, other) in rows.items():
        cells = []
        for n in (50, 500):
            ours, theirs = scores(method, n), scores(other, n)
            gains = np.array([ours[key] - theirs[key] for key in ours if key in theirs])
            enough = len(gains) > 1
            cells.append(f"{gains.mean():+.1f} ± {two_standard_errors(gains):.1f} ({len(gains)})" if enough else "–")
        lines.append(row([label, *cells]))
    explained = "In brackets: pairs of runs, which have task, seed and advantage model in common."
    return "\n".join([*lines, "", f"{explained} {provenance(title, command, used, mixed)}"])


def spearman_table(path: Path) -> str:
    """Of spearman.csv, which benchmark/spearman.py writes."""
    values, seeds, commits = defaultdict(list), set(), set()
    if path.exists():
        with open(path, newline="") as file:
            for line in csv.DictReader(file):
                if line["n_pref"] == "500":
                    values[line["method"], line["task"]].append(float(line["correlation"]))
                    seeds.add(line["seed"]), commits.add(line["commit"])
    title = "Spearman: rank correlation of policy and expert log-likelihoods within segments, 500 preferences"
    heads = ["Update", *(task.replace("-", " ").title() for task in paper.METAWORLD), "Mean"]
    lines = [f"### {title}", "", row(heads), "|---" * len(heads) + "|"]
    for method in ("paws_transformer_state", "paws_transformer", "paws_mlp_state", "paws_mlp"):
        means = [np.mean(values[method, task]) if values[method, task] else np.nan for task in paper.METAWORLD]
        theirs = paper.SPEARMAN.get(method)
        pairs = zip([*means, np.mean(means)], [*theirs, np.mean(theirs)] if theirs else [None] * 11, strict=True)
        cells = [cell(None if np.isnan(ours) else Figure(float(ours)), other, digits=2) for ours, other in pairs]
        lines.append(row([NAMES[method], *cells]))
    made = f" Seeds {', '.join(sorted(seeds))}; commit {', '.join(sorted(commits))}." if seeds else ""
    return "\n".join([*lines, "", f"`python benchmark/spearman.py`, from the runs of `sweep.py --study state`.{made}"])


def imitation_table(path: Path, n_pref: int) -> str:
    """Of imitation.csv, which benchmark/imitation.py writes: means over the tasks that all methods have."""
    runs, columns = defaultdict(list), ("error_best", "error_others", "weight_best", "n_eff")
    if path.exists():
        with open(path, newline="") as file:
            for line in csv.DictReader(file):
                if line["n_pref"] == str(n_pref):
                    runs[line["method"]].append(line)
    tasks = [task for task in paper.METAWORLD if all(any(r["task"] == task for r in rs) for rs in runs.values())]
    runs = {method: [run for run in found if run["task"] in tasks] for method, found in runs.items() if tasks}
    heads = ["Method", "Error on the best policy", "Error on the others", "Weight on the best", "n_eff", "Runs"]
    title = f"### Whom the policies imitate, Meta-World, {n_pref} preferences"
    lines = [title, "", row(heads), "|---" * len(heads) + "|"]
    for method in (name for name in NAMES if name in runs):
        numbers = {task: [] for task in tasks}  # of each task its runs
        for run in runs[method]:
            numbers[run["task"]].append([float(run[key] or "nan") for key in columns])
        means = np.mean([np.mean(found, axis=0) for found in numbers.values()], axis=0)
        cells = ["–" if np.isnan(mean) else f"{mean:.2f}" for mean in means]
        lines.append(row([NAMES[method], *cells, str(len(runs[method]))]))
    commits = sorted({run["commit"] for method in runs for run in runs[method]})
    made = f" Means over {', '.join(tasks)}; commit {', '.join(commits)}." if runs else ""
    explained = (
        "Error: mean ||a - mu(s)||². Weights: of the policy's loss, 0.25 on the best is no preference; n_eff: of"
    )
    explained += ' single steps\' weights, as a share of the steps; "–": a loss without weights.'
    return "\n".join([*lines, "", f"{explained} `python benchmark/imitation.py`.{made}"])


def coverage_table(path: Path) -> str:
    """Of coverage.csv, which benchmark/imitation.py writes: success of runs by their weight on episodes' beginnings."""
    runs = []
    if path.exists():
        with open(path, newline="") as file:
            runs = list(csv.DictReader(file))
    bins = {"below 0.1": (0, 0.1), "0.1 to 0.2": (0.1, 0.2), "0.2 to 0.3": (0.2, 0.3), "0.3 and more": (0.3, 1.01)}
    correlations = [f"rank correlation of success with {what}" for what in ("this weight", "that on the best policy")]
    columns = []
    for n in (50, 500):
        chosen = [run for run in runs if run["n_pref"] == str(n)]
        keys = ("weight_early", "weight_best", "success")
        numbers = np.array([[float(run[key]) for key in keys] for run in chosen]).reshape(-1, 3)
        early, success, cells = numbers[:, 0], numbers[:, 2], []
        for low, high in bins.values():
            inside = success[(low <= early) & (early < high)]
            cells.append(f"{100 * inside.mean():.0f} ({len(inside)})" if len(inside) else "–")
        tasks = np.array([run["task"] for run in chosen])
        for task in set(tasks):  # they differ in how hard they are
            numbers[tasks == task] -= numbers[tasks == task].mean(0)
        for weight in numbers.T[:2]:
            cells.append(f"{stats.spearmanr(weight, numbers[:, 2]).statistic:.2f}" if len(chosen) > 2 else "–")
        columns.append(cells)
    heads = ["Weight on beginnings", "50 preferences (runs)", "500 preferences (runs)"]
    lines = ["### Weight on the beginnings of episodes, and success (%)", "", row(heads), "|---|---|---|"]
    lines += [row(cells) for cells in zip((*bins, *correlations), *columns, strict=True)]
    methods, commits = (sorted({run[key] for run in runs}) for key in ("method", "commit"))
    explained = (
        "Weight on segments that start within an episode's first 64 steps; a third of the data does. Correlations: of "
        "differences from the mean of a task."
    )
    command = f"python benchmark/imitation.py --methods {' '.join(methods)} --out results/quick/coverage.csv"
    made = f"`{command}`, from the runs of `sweep.py --study weights`; commit {', '.join(commits)}." if runs else ""
    return "\n".join([*lines, "", f"{explained} {made}".strip()])


def cost_table(results: list[dict]) -> str:
    """Mean seconds of a run, and what the paper's grid would take."""
    parts = ("utility", "policy", "evaluation", "total")
    lines = ["### Seconds of one thread for a run", "", row(["Method", *parts, "runs"]), "|---" * 6 + "|"]
    mean = {}
    for method in NAMES:
        runs = [run for run in results if run["method"] == method and run["n_pref"] in (50, 500)]
        runs = [run for run in runs if not run["options"] and not run["data"]]
        if runs:
            mean[method] = np.mean([[run["seconds"].get(part) or 0 for part in parts] for run in runs], axis=0)
            lines.append(row([NAMES[method], *(f"{value:.0f}" for value in mean[method]), str(len(runs))]))
    if set(paper.METHODS) <= set(mean):
        hours = sum(mean[method][-1] for method in paper.METHODS) * 14 * 2 * 10 / 3600
        lines += [
            "",
            f"The paper's grid (14 tasks, 9 methods, 2 budgets, 10 seeds: 2,520 runs) with this preset's sizes: "
            f"{hours:.0f} hours of one thread, if all tasks take as long as the mean of these runs.",
        ]
    return "\n".join(lines)


def preset_sections(preset: str, results: list[dict], folder: Path, mixed: bool) -> list[str]:
    figures = figures_of(results)
    add_best_data_policy(figures)
    run = f"python benchmark/sweep.py --preset {preset}"
    both, methods = (500, 50), [m for m in sweep.COMPARED if m not in ORACLES]
    locomotion = f"{run} --tasks {' '.join(paper.LOCOMOTION)}"
    sections = [f"## Preset {preset}"]
    for n in both:
        columns = [(m, n) for m in (*methods, *ORACLES)]
        sections.append(
            task_table(f"Meta-World, {n} preferences: success (%)", run, figures, paper.METAWORLD, columns, mixed)
        )
    names, tasks = ("paws_mlp", "paws_mlp_512", "paws_mlp_chi2", "paws_mlp_chi2_512"), ("door-open", "drawer-open")
    for n in both:
        title = f"Size of the advantage model, PAWS (MLP), {n} preferences: success (%)"
        command = f"{run} --methods paws_mlp paws_mlp_chi2 --n-prefs {n} --tasks {' '.join(tasks)} --seeds 1 2 3"
        columns = [(m, n) for m in names]
        sections.append(task_table(title, f'{command} [--flags="{PAPERS_SIZE}"]', figures, tasks, columns, mixed))
    title = "Range of the Preference Transformer's returns, 500 preferences: success (%)"
    columns = [(m, 500) for m in ("bc", "preference_transformer", "preference_transformer_250")]
    command = f"{run} --methods {' '.join(m for m, _ in columns)} --n-prefs 500"
    tasks = [task for task in paper.METAWORLD if (columns[-1][0], task, 500, "") in figures] or paper.METAWORLD
    sections.append(task_table(title, command, figures, tasks, columns, mixed))
    title = "Five times as many updates, drawer-open, 500 preferences: success (%)"
    command = f'{run} --methods bc cpl cpl_kl --tasks drawer-open --n-prefs 500 [--flags="{LONGER}"]'
    rows, task = {}, "drawer-open"
    for method in (m for m in NAMES if (f"{m}_longer", task, 500, "") in figures):
        theirs = paper.FIGURES.get((task, method, 500))
        rows[NAMES[method]] = [(method, 500, "", None), (f"{method}_longer", 500, "", theirs)]
    heads = ["Method", "6,000 updates", "30,000 updates (the paper)"]
    if rows:
        sections.append(setting_table(title, command, figures, (task,), heads, rows, mixed))
    for n in both:
        columns = [(m, n) for m in (*methods, *ORACLES)]
        title = f"Locomotion, {n} preferences: episodic return"
        sections.append(task_table(title, locomotion, figures, paper.LOCOMOTION, columns, mixed))
    names = ("paws_mlp", "paws_transformer", *(m for m in NAMES if m.startswith("paws") and "state" in m))
    for n in both:
        title = f"Segment against state update, {n} preferences: success (%)"
        columns = [(m, n) for m in names]
        sections.append(task_table(title, f"{run} --study state", figures, paper.METAWORLD, columns, mixed))
    sections.append(
        setting_table(
            "Shorter pieces of segments in the update, Transformer, 500 preferences: success (%), mean of Meta-World",
            f"{run} --study update-segment-length", figures, paper.METAWORLD, ["Steps", "Success"],
            {
                str(k): [("paws_transformer" + ("" if k == 64 else f"_update-segment-length-{k}"), 500, "", theirs)]
                for k, theirs in paper.UPDATE_SEGMENT_LENGTH.items()
            },
            mixed,
        )
    )  # fmt: skip
    sections.append(
        setting_table(
            "Segment length, the same number of steps in all pairs: success (%), mean of Meta-World",
            f"{run} --study segment-length", figures, paper.METAWORLD, ["Steps", "PAWS (MLP)", "State (MLP)"],
            {
                str(k): [(m, 640_000 // k, f"length{k}", None) for m in ("paws_mlp", "paws_mlp_state")]
                for k in sweep.LENGTHS
            },
            mixed,
        )
    )  # fmt: skip

    def shares(values, prefix="paws_mlp_n-eff-", label="{:.0%}"):
        own = {"paws_mlp_n-eff-0.1": "paws_mlp", "paws_mlp_trust-region-chi2_n-eff-0.3": "paws_mlp_chi2"}  # defaults
        names = {s: own.get(f"{prefix}{s}", f"{prefix}{s}") for s in values}
        return {label.format(s): [(name, n, "", None) for n in (50, 500)] for s, name in names.items()}

    heads = ["n_eff", "50 preferences", "500 preferences"]
    sections.append(
        setting_table(
            f"Effective samples, MLP: success (%), mean of {', '.join(sweep.N_EFF_TASKS)}",
            f"{run} --study n-eff", figures, sweep.N_EFF_TASKS, heads,
            {**shares(sweep.SHARES), "BC": [("bc", n, "", None) for n in (50, 500)]}, mixed,
        )
    )  # fmt: skip
    title = "Exponential weights (n_eff 10 %, the paper, and 30 %) against linear ones (30 %), MLP: success (%)"
    small, large, linear = "paws_mlp", "paws_mlp_n-eff-0.3", "paws_mlp_chi2"
    columns = [(m, n) for n in (50, 500) for m in (small, large, linear)]
    sections.append(task_table(title, f"{run} --study weights", figures, sweep.WEIGHTS_TASKS, columns, mixed))
    rows = {
        "the larger share alone: exponential, 30 % - 10 %": (large, small),
        "the shape alone: linear, 30 % - exponential, 30 %": (linear, large),
        "both: linear, 30 % - exponential, 10 %": (linear, small),
    }
    title = f"What share and shape of the weights gain, MLP: success (%), {len(sweep.WEIGHTS_TASKS)} tasks"
    sections.append(difference_table(title, f"{run} --study weights", figures, sweep.WEIGHTS_TASKS, rows, mixed))
    plain, covered = "paws_mlp_chi2_n-eff-0.3", "paws_mlp_starts_n-eff-0.3"
    columns = [(m, n) for n in (50, 500) for m in (plain, covered)]
    title, command = "Linear weights (30 %) without and with --cover-starts, MLP: success (%)", f"{run} --study starts"
    sections.append(task_table(title, command, figures, sweep.WEIGHTS_TASKS, columns, mixed))
    title, rows = "What --cover-starts gains, MLP: success (%)", {"with - without": (covered, plain)}
    sections.append(difference_table(title, command, figures, sweep.WEIGHTS_TASKS, rows, mixed))
    six = ", ".join(sweep.WEIGHTS_TASKS)
    sections.append(
        setting_table(
            f"Shape of the weights, MLP: success (%), mean of {six}",
            f"{run} --study weights", figures, sweep.WEIGHTS_TASKS, ["Weights", *heads[1:]],
            {
                **shares((0.1, 0.2, 0.3, 0.5), label="exponential (KL), n_eff {:.0%}"),
                **shares((0.1, 0.2, 0.3, 0.5), "paws_mlp_trust-region-chi2_n-eff-", "linear (χ²), n_eff {:.0%}"),
                "BC": [("bc", n, "", None) for n in (50, 500)],
            },
            mixed,
        )
    )  # fmt: skip
    compared = ("bc", "bc_preferred", "paws_mlp", "paws_mlp_chi2", "bc_best", "paws_oracle", "data_best")
    sections.append(
        setting_table(
            f"Weights beside cloning and oracles: success (%), mean of {six}",
            f"{run} --study weights", figures, sweep.WEIGHTS_TASKS, ["Method", *heads[1:]],
            {NAMES[m]: [(m, n, "", None) for n in (50, 500)] for m in compared}, mixed,
        )
    )  # fmt: skip
    names, counts = ("paws_mlp", "paws_mlp_chi2"), f"--n-prefs {' '.join(map(str, sweep.COUNTS))} --seeds 1 2 3"
    sections.append(
        setting_table(
            f"Number of preferences: success (%), mean of {six}",
            f"{run} --methods {' '.join(names)} --tasks {' '.join(sweep.WEIGHTS_TASKS)} {counts}",
            figures, sweep.WEIGHTS_TASKS, ["Preferences", *(NAMES[m] for m in names)],
            {str(n): [(m, n, "", None) for m in names] for n in sweep.COUNTS}, mixed,
        )
    )  # fmt: skip
    sections.append(spearman_table(folder / "spearman.csv"))
    sections.append(coverage_table(folder / "coverage.csv"))
    sections += [imitation_table(folder / "imitation.csv", n) for n in both]
    columns = [(m, n) for n in both for m in ("dppo", "dppo_defaults")]
    for name, tasks, command in (("success (%)", paper.METAWORLD, run), ("return", paper.LOCOMOTION, locomotion)):
        sections.append(task_table(f"DPPO: {name}", command, figures, tasks, columns, mixed))
    columns = [(m, 50) for m in paper.METHODS if m != "dppo"]
    title, command = "Human labels, 50 comparisons of each labeler: success (%)", f"{run} --study human"
    sections.append(task_table(title, command, figures, sweep.HUMAN_TASKS, columns, mixed, "human", paper.HUMAN))
    sections.append(cost_table(results))
    return sections


def data_quality() -> str:
    import data_card

    parts = ["## Data quality", "Training step in thousands, return and success of the four policies of each task."]
    parts += [data_card.table([t for t in tasks if (ROOT / "data" / f"{t}.npz").exists()]) for tasks in
              (paper.METAWORLD, paper.LOCOMOTION)]  # fmt: skip
    return "\n\n".join([*parts, "`python data_gen/data_card.py`"])


def csv_text(presets: dict[str, list[dict]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = "preset method task n_pref data metric peak peak_2se last8 last8_2se paper paper_2se seeds seconds commit"
    writer.writerow(head.split())
    for preset, results in presets.items():
        for (method, task, n, data), figure in sorted(figures_of(results).items()):
            theirs = (paper.HUMAN if data == "human" else {} if data else paper.FIGURES).get(
                (task, method, n), ("", "")
            )
            ours = [figure.mean, figure.two_se, figure.last, figure.last_two_se]
            numbers = ["" if np.isnan(value) else round(value, 2) for value in ours]
            seconds = round(float(np.mean([run["seconds"]["total"] for run in figure.runs])), 1)
            commits = " ".join(sorted({str(run["commit"]) for run in figure.runs}))
            metric = "success" if task in paper.METAWORLD else "return"
            writer.writerow(
                [preset, method, task, n, data, metric, *numbers, *theirs, len(figure.runs), seconds, commits]
            )
    return text.getvalue()


INTRODUCTION = """# Results

This page is made by `python benchmark/tables.py --results benchmark/results --markdown docs/results.md` from what
`benchmark/sweep.py --results benchmark/results` has collected. Only the part under *Notes* is written by hand.

A figure is ours ± 2 standard errors over seeds, and in brackets the paper's, which was measured on its authors' data:
ours are made anew ([data card](../data/README.md)). Ours: each seed's curve smoothed over 8 evaluations of 25 episodes,
averaged over seeds; the figure is the peak of that mean curve, as in the paper. A peak is optimistic, so the mean of
the last 8 evaluations stands below, and the interquartile mean (IQM) of the same figures over tasks and seeds with a
bootstrap interval that resamples seeds within tasks. An average over tasks uses, on each task, only the seeds that
every averaged method of that table has, so one method may have different averages in two tables. Bold: the best of a
row whose methods all have the same seeds. "–": no runs, or not all tasks of an average. Columns in italics are oracles,
which tell what was possible: they know which policy made a segment, or use the labeler's own scores; the best data
policy is measured on 100 episodes of sampled actions.

Preset `paper` has the scripts' defaults: published sizes where there are any, CPL's 500,000 updates for all baselines,
10,000 for PAWS (the paper gives no totals; [fidelity](fidelity.md)). `quick` is sized for one thread (both in
`benchmark/sweep.py`): 6,000 updates for all, smaller batches for the baselines, smaller advantage models, for PAWS
(MLP) with another learning rate, and DPPO with other settings than its code's; *DPPO (code's defaults)* is what preset
`paper` calls DPPO.

On a cluster: `sbatch --array 0-9 --wrap 'python benchmark/sweep.py --shard $SLURM_ARRAY_TASK_ID/10 --workers 1'`, or
`python benchmark/sweep.py --ray ADDRESS` after `pip install -r requirements-cluster.txt`."""


def main(args: Args) -> None:
    folders = [Path(args.results, preset) for preset in sweep.PRESETS if Path(args.results, preset).is_dir()]
    if not folders:
        sys.exit(f"error: --results {args.results}: has no folder quick or paper; give their parent")
    presets = {folder.name: load_results(folder) for folder in folders}
    page, path = [INTRODUCTION], Path(args.markdown or f"{args.results}/results.md")
    old = path.read_text() if path.exists() else ""
    notes = old.partition("<!-- notes -->\n")[2].partition("<!-- end -->")[0]
    page.append(f"## Notes\n\n<!-- notes -->\n{notes}<!-- end -->")
    pictures = sorted(path.parent.glob("figures/*.png"))
    if pictures:
        page += ["## Figures", *(f"![{p.stem.replace('_', ' ')}](figures/{p.name})" for p in pictures)]
        page.append(f"`python benchmark/figures.py --results {args.results} --out {path.parent}/figures`")
    for folder in folders:
        page += preset_sections(folder.name, presets.get(folder.name, []), folder, args.mixed)
    page.append(data_quality())
    for target, text in (
        (path, "\n\n".join(page) + "\n"),
        (Path(args.csv or f"{args.results}/tables.csv"), csv_text(presets)),
    ):
        target.parent.mkdir(parents=True, exist_ok=True)
        sweep.write(target, text)
        print(f"wrote {target}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
