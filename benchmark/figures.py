"""Figures from collected results, as PNG and PDF: RESULTS/figures/<name>.{png,pdf}.

python benchmark/figures.py                      # learning curves, ablations, performance profiles
python benchmark/figures.py --weights RUN_DIR    # weights of a PAWS run, and n_eff of every temperature
python benchmark/figures.py --readme RUN_DIR     # four frames of its video.mp4 beside its curve: learned.png
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).resolve().parent))
import paper
import sweep
import tables

# Okabe and Ito's colours, which the colour-blind tell apart; dashes tell methods apart in print.
STYLES = {
    "paws_mlp": ("#D55E00", "-"), "paws_transformer": ("#E69F00", "-"), "paws_mlp_chi2": ("#CC79A7", "-"),
    "bc": ("#000000", "--"), "p_iql": ("#0072B2", "--"), "preference_transformer": ("#009E73", "--"),
    "cpl": ("#56B4E9", "-."), "cpl_kl": ("#0072B2", ":"), "ipl": ("#009E73", ":"), "dppo": ("#999999", ":"),
    "bc_best": ("#999999", "-"),
}  # fmt: skip
plt.rcParams.update(
    {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
     "legend.frameon": False, "savefig.bbox": "tight", "savefig.dpi": 160, "pdf.fonttype": 42}
)  # fmt: skip


@dataclass
class Args:
    preset: str = "quick"  # whose results
    results: str = "results"  # of benchmark/sweep.py: folder with a folder of results for each preset
    out: str = ""  # where the figures go [RESULTS/figures]
    weights: str = ""  # run directory of a PAWS run: draw its weights instead
    readme: str = ""  # run directory with a video.mp4 (benchmark/evaluate.py RUN_DIR --video): README's picture instead


def save(figure, out: Path, name: str) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for ending in ("png", "pdf"):
        figure.savefig(out / f"{name}.{ending}", metadata={"CreationDate": None} if ending == "pdf" else None)
    plt.close(figure)
    print(f"wrote {out / name}.png and .pdf")


def style(method: str) -> dict:
    color, dashes = STYLES[method]
    return dict(color=color, linestyle=dashes, linewidth=1.8 if "paws" in method else 1.1)


def band(axes, x, curves: np.ndarray, method: str, label: str = "") -> None:
    """Mean over seeds and +- 2 standard errors. (seeds, len(x))"""
    mean = curves.mean(0)
    axes.plot(x, mean, **style(method), label=label)
    if len(curves) > 1:
        spread = 2 * curves.std(0, ddof=1) / np.sqrt(len(curves))
        axes.fill_between(x, mean - spread, mean + spread, color=STYLES[method][0], alpha=0.15, linewidth=0)


def learning_curves(figures: dict, tasks: tuple[str, ...], n: int):
    """A panel for each task; x is the share of the run, as methods differ in their number of updates."""
    present = [task for task in tasks if any((m, task, n, "") in figures for m in STYLES)]
    if not present:
        return None
    columns = min(5, len(present))
    rows = -(-len(present) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(2.1 * columns, 1.9 * rows), sharex=True, squeeze=False)
    for axes, task in zip(grid.flat, present, strict=False):
        for method in STYLES:
            if (method, task, n, "") in figures:
                raw = np.array([tables.curve_of(run) for run in figures[method, task, n, ""].runs], float)
                curves = tables.smooth(raw)
                x = 100 * (1 + np.arange(raw.shape[1])[-curves.shape[1] :]) / raw.shape[1]
                band(axes, x, curves, method, tables.NAMES[method].strip("*"))
        axes.set_title(task.replace("-", " ").title(), fontsize=8)
        if task in paper.METAWORLD:
            axes.set_ylim(0, 103)  # comparable panels; a band may reach beyond what is possible
    for axes in grid.flat[len(present) :]:
        axes.set_axis_off()
    for axes in grid[-1]:
        axes.set_xlabel("updates (%)")
    for axes in grid[:, 0]:
        axes.set_ylabel("success (%)" if tasks == paper.METAWORLD else "return")
    handles = {line.get_label(): line for axes in grid.flat for line in axes.get_lines()}
    figure.legend(handles.values(), handles.keys(), loc="upper center", bbox_to_anchor=(0.5, 0.0), ncol=6)
    figure.tight_layout()
    return figure


def effective_samples(figures: dict, tasks: tuple[str, ...]):
    """Success against n_eff, mean over tasks, both budgets, both shapes of weights; BC as a line."""
    figure, panels = plt.subplots(1, 2, figsize=(6.2, 2.4), sharey=True)
    shapes = {
        "paws_mlp": ("exponential (KL)", "paws_mlp_n-eff-"),
        "paws_mlp_chi2": ("linear (χ²)", "paws_mlp_trust-region-chi2_n-eff-"),
    }
    drawn = False
    defaults = {("paws_mlp", 0.1): "paws_mlp", ("paws_mlp_chi2", 0.3): "paws_mlp_chi2"}
    names = {(m, share): defaults.get((m, share), f"{shapes[m][1]}{share}") for m in shapes for share in sweep.SHARES}
    means = tables.means_of(figures, tasks, [(name, n, "") for name in (*names.values(), "bc") for n in (50, 500)])
    for axes, n in zip(panels, (50, 500), strict=True):
        for method, (label, _) in shapes.items():
            found = {share: means.get((names[method, share], n, "")) for share in sweep.SHARES}
            points = [(100 * share, mean.mean, np.nan_to_num(mean.two_se)) for share, mean in found.items() if mean]
            if len(points) > 1:
                color, dashes = STYLES[method]
                axes.errorbar(*np.array(points).T, color=color, linestyle=dashes, marker="o", markersize=3, label=label)
                drawn = True
        bc = means.get(("bc", n, ""))
        if bc:
            axes.axhline(bc.mean, color=STYLES["bc"][0], linestyle=STYLES["bc"][1], linewidth=1, label="BC")
        axes.set(title=f"{n} preferences", xlabel="n_eff (% of the segments)")
        axes.legend(*axes.get_legend_handles_labels())
    panels[0].set_ylabel(f"success (%), mean of {len(tasks)} tasks")
    figure.tight_layout()
    return figure if drawn else None


def number_of_preferences(figures: dict):
    """Success against the number of preferences, the paper's weights and the linear ones, mean over tasks."""
    methods = {"paws_mlp": "exponential, n_eff 10 %", "paws_mlp_chi2": "linear (χ²), n_eff 30 %"}
    settings = [(method, n, "") for method in methods for n in sweep.COUNTS]
    means = tables.means_of(figures, sweep.WEIGHTS_TASKS, settings)
    figure, axes = plt.subplots(figsize=(3.4, 2.4))
    for method, label in methods.items():
        found = {n: means[method, n, ""] for n in sweep.COUNTS if (method, n, "") in means}
        points = [(n, mean.mean, np.nan_to_num(mean.two_se)) for n, mean in found.items()]
        if len(points) > 2:  # more than the two budgets of the other tables
            color, dashes = STYLES[method]
            axes.errorbar(*np.array(points).T, color=color, linestyle=dashes, marker="o", markersize=3, label=label)
    if not axes.get_lines():
        plt.close(figure)
        return None
    axes.set_xscale("log")
    axes.set_xticks(sweep.COUNTS, sweep.COUNTS)
    axes.minorticks_off()
    axes.set(xlabel="preferences", ylabel=f"success (%), mean of {len(sweep.WEIGHTS_TASKS)} tasks", ylim=(0, 100))
    axes.legend(loc="lower right")
    return figure


def segment_length(figures: dict):
    """Success against segment length, and against the length of the pieces in the update."""
    figure, panels = plt.subplots(1, 2, figsize=(6.2, 2.4), sharey=True)
    series = [
        (panels[0], "segment update", "paws_mlp", {k: ("paws_mlp", 640_000 // k, f"length{k}") for k in sweep.LENGTHS}),
        (panels[0], "state update", "bc", {k: ("paws_mlp_state", 640_000 // k, f"length{k}") for k in sweep.LENGTHS}),
        (panels[1], "ours", "paws_transformer",
         {k: (f"paws_transformer_update-segment-length-{k}" if k < 64 else "paws_transformer", 500, "")
          for k in paper.UPDATE_SEGMENT_LENGTH}),
    ]  # fmt: skip
    drawn = False
    for axes, label, method, keys in series:
        means = tables.means_of(figures, paper.METAWORLD, keys.values())
        found = {k: means[key] for k, key in keys.items() if key in means}
        points = np.array([(k, mean.mean, np.nan_to_num(mean.two_se)) for k, mean in found.items()])
        if len(points) > 1:
            color, dashes = STYLES[method]
            axes.errorbar(*points.T, color=color, linestyle=dashes, marker="o", markersize=3, label=label)
            drawn = True
    lengths, published = zip(*paper.UPDATE_SEGMENT_LENGTH.items(), strict=True)
    panels[1].plot(lengths, published, color="#999999", linestyle=":", marker="s", markersize=3, label="paper")
    for axes, title in zip(panels, ("steps of a segment", "steps of a piece in the update"), strict=True):
        axes.set_xscale("log", base=2)
        axes.set_xticks([1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64])
        axes.set_xlabel(title)
        axes.legend(*axes.get_legend_handles_labels())
    panels[0].set_ylabel("success (%), mean of Meta-World")
    figure.tight_layout()
    return figure if drawn else None


def performance_profile(figures: dict, n: int):
    """Share of runs above each success rate; each task counts the same, whatever its number of seeds."""
    figure, axes = plt.subplots(figsize=(4.2, 2.6))
    levels = np.linspace(0, 100, 201)
    for method in STYLES:
        found = [figures.get((method, task, n, "")) for task in paper.METAWORLD]
        if None not in found:
            share = np.mean([(figure.scores[:, None] > levels).mean(0) for figure in found], axis=0)
            axes.step(levels, 100 * share, **style(method), label=tables.NAMES[method].strip("*"))
    axes.set(xlabel="success rate τ (%)", ylabel="runs above τ (%)", title=f"Meta-World, {n} preferences")
    if not axes.get_lines():
        plt.close(figure)
        return None
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def n_eff_of_temperature(weights: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """n_eff had lambda been `factors` times as large: exponential weights become w^(1 / factor). (N,), (F,) -> (F,)"""
    logs = np.log(np.maximum(weights, np.finfo(float).tiny))[None] / factors[:, None]
    powers = np.exp(logs - logs.max(1, keepdims=True))
    return powers.sum(1) ** 2 / (powers**2).sum(1)


def weights_of_a_run(folder: Path):
    """Sorted weights, how fast they add up, and n_eff(lambda)."""
    import torch

    model = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
    weights, exponential = model["weights"].numpy(), model["args"]["trust_region"] == "kl"
    result = sweep.read_json(folder / "result.json")
    figure, panels = plt.subplots(1, 3 if exponential else 2, figsize=(7.4, 2.2))
    ranks, color = np.arange(1, len(weights) + 1), STYLES["paws_mlp"][0]
    panels[0].plot(ranks, np.sort(weights)[::-1] * len(weights), color=color)
    panels[0].axhline(1, color="#999999", linestyle=":")
    panels[0].set(xlabel="rank of the segment", ylabel="weight / uniform", xscale="log")
    panels[1].plot(100 * ranks / len(weights), 100 * np.cumsum(np.sort(weights)[::-1]), color=color)
    panels[1].axvline(100 * result["n_eff"] / len(weights), color="#999999", linestyle=":")
    panels[1].set(xlabel="best segments (%); dotted: n_eff", ylabel="share of the weight (%)")
    if exponential:
        factors = np.logspace(-2, 2, 200)
        share = 100 * n_eff_of_temperature(weights, factors) / len(weights)
        panels[2].plot(factors * result["lambda"], share, color=color)
        panels[2].plot(result["lambda"], 100 * result["n_eff"] / len(weights), "o", color="#000000")
        panels[2].set(xlabel="λ", ylabel="n_eff (%)", xscale="log")
    figure.tight_layout()
    return figure


def readme_picture(folder: Path):
    """Four frames of the run's video beside its learning curve."""
    import imageio.v3 as imageio

    video, result = folder / "video.mp4", sweep.read_json(folder / "result.json")
    if not video.exists() or not result.get("curve"):
        sys.exit(f"error: {folder}: needs result.json with evaluations, and video.mp4 of evaluate.py {folder} --video")
    frames = imageio.imread(video)  # (F, height, width, 3)
    figure, panels = plt.subplots(1, 5, figsize=(11, 1.8), width_ratios=[4, 4, 4, 4, 5], layout="constrained")
    for axes, share in zip(panels, np.linspace(0, 1, 4) ** 2, strict=False):  # most happens early
        axes.imshow(frames[int(share * (len(frames) - 1))], aspect="auto")
        axes.set_axis_off()
    steps, values = [row[0] for row in result["curve"]], tables.curve_of(result)
    panels[4].plot(steps, values, color="#999999", linewidth=0.8)
    smoothed = tables.smooth(np.array([values], float))[0]
    panels[4].plot(steps[-len(smoothed) :], smoothed, color=STYLES["paws_mlp"][0], linewidth=2)
    panels[4].set(xlabel="policy updates", ylabel="success (%)" if result["task"] in paper.METAWORLD else "return")
    return figure


def main(args: Args) -> None:
    out = Path(args.out or f"{args.results}/figures")
    if args.readme:
        out.mkdir(parents=True, exist_ok=True)
        readme_picture(Path(args.readme)).savefig(out / "learned.png")
        print(f"wrote {out / 'learned.png'}")
        return
    if args.weights:
        save(weights_of_a_run(Path(args.weights)), out, "weights")
        return
    figures = tables.figures_of(tables.load_results(Path(args.results, args.preset)))
    drawn = {
        "effective_samples": effective_samples(figures, sweep.N_EFF_TASKS),
        "shape_of_weights": effective_samples(figures, sweep.WEIGHTS_TASKS),
        "number_of_preferences": number_of_preferences(figures),
        "segment_length": segment_length(figures),
    }
    for n in (500, 50):
        drawn[f"curves_metaworld_{n}"] = learning_curves(figures, paper.METAWORLD, n)
        drawn[f"curves_locomotion_{n}"] = learning_curves(figures, paper.LOCOMOTION, n)
        drawn[f"performance_profile_{n}"] = performance_profile(figures, n)
    for name, figure in drawn.items():
        if figure:
            save(figure, out, f"{args.preset}_{name}")
        else:
            print(f"{name}: no results")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
