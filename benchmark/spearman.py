"""Does the policy rank the steps of a segment as the expert does? Rank correlation of log-likelihoods within segments.

    python benchmark/sweep.py --study state --n-prefs 500
    python benchmark/spearman.py

For every segment of the preference file: Spearman's correlation over its steps of log pi(a_t | s_t) and of the expert's
(`expert_logp`); then the mean over segments. Writes results/PRESET/spearman.csv, which tables.py reads.
"""

import csv
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from scipy.stats import rankdata

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))
import paper
import sweep


@dataclass
class Args:
    preset: str = "quick"  # whose runs
    methods: tuple[str, ...] = ("paws_transformer", "paws_transformer_state", "paws_mlp", "paws_mlp_state")
    tasks: tuple[str, ...] = paper.METAWORLD  # which tasks
    n_pref: int = 500  # number of preferences
    runs_dir: str = "runs/sweep"  # of benchmark/sweep.py
    out: str = ""  # file to write [results/PRESET/spearman.csv]


def log_likelihood(policy: dict[str, torch.Tensor], obs: np.ndarray, act: np.ndarray) -> np.ndarray:
    """-||a - mu(s)||^2 of a model.pt's policy. (K, T, o), (K, T, a) -> (K, T)"""
    x = torch.from_numpy(obs)
    for layer in ("net.0", "net.3", "net.6"):
        x = torch.nn.functional.linear(x, policy[f"{layer}.weight"], policy[f"{layer}.bias"])
        x = torch.tanh(x) if layer == "net.6" else torch.relu(x)
    return -(x - torch.from_numpy(act)).square().sum(-1).numpy()


def mean_rank_correlation(ours: np.ndarray, expert: np.ndarray) -> float:
    """Mean over segments of the correlation of ranks; segments of equal values have none. (K, T), (K, T) -> ()"""
    a, b = (rankdata(x, axis=1) for x in (ours, expert))
    a, b = (x - x.mean(1, keepdims=True) for x in (a, b))
    scale = np.sqrt((a**2).sum(1) * (b**2).sum(1))
    return float(((a * b).sum(1)[scale > 0] / scale[scale > 0]).mean())


def main(args: Args) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "task", "n_pref", "seed", "correlation", "commit"])
    found = 0
    for task in args.tasks:
        with np.load(ROOT / "data" / f"{task}.npz", allow_pickle=False) as file:
            obs, act, expert = (file[key] for key in ("obs", "act", "expert_logp"))
        for method in args.methods:
            for folder, run, result in sweep.complete_runs(args.runs_dir, args.preset, method, task, args.n_pref):
                policy = torch.load(run / "model.pt", map_location="cpu", weights_only=True)["policy"]
                value = mean_rank_correlation(log_likelihood(policy, obs, act), expert)
                commit = sweep.read_json(folder / "sweep.json").get("commit")
                writer.writerow([method, task, args.n_pref, result["seed"], round(value, 4), commit])
                print(f"{method} {task} seed {result['seed']}: {value:.3f}")
                found += 1
    if not found:
        sys.exit(f"error: {args.runs_dir}/{args.preset}: no complete runs; run benchmark/sweep.py --study state first")
    path = Path(args.out or f"results/{args.preset}/spearman.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep.write(path, text.getvalue())
    print(f"wrote {path}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
