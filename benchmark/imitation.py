"""Whom does a policy imitate? Its distance from the data's policies, and where the weights of its loss lie.

    python benchmark/sweep.py
    python benchmark/imitation.py
    python benchmark/imitation.py --methods paws_mlp_n-eff-0.2 --out results/quick/coverage.csv    # of a study's runs

For every complete run of a sweep, on all segments of the preference file, also those that the run has not seen:
  error_best, error_others   mean ||a - mu(s)||^2 on the segments of the best data policy, and on those of the others
  weight_best                share of the loss's weights on the best policy's segments; 0.25 is no preference
  weight_early               share on segments that start within an episode's first steps, as many as a segment has
  n_eff                      effective sample size of the weights of single steps, as a share of them
  success                    smoothed peak of the run
PAWS has weights of the segments it has seen. Those of P-IQL, IPL and Preference Transformer are min(exp(temperature
(min_i Q_i - V)), 100) with the critics at the end of the run (the slow copies that the loss takes are not saved). The
others have none.
Writes results/PRESET/imitation.csv, which tables.py reads, as it reads coverage.csv.
"""

import csv
import io
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))
import paper
import sweep
from spearman import log_likelihood


@dataclass
class Args:
    preset: str = "quick"  # whose runs
    methods: tuple[str, ...] = paper.METHODS  # which methods
    tasks: tuple[str, ...] = paper.METAWORLD  # which tasks
    n_prefs: tuple[int, ...] = (50, 500)  # numbers of preferences
    runs_dir: str = "runs/sweep"  # of benchmark/sweep.py
    out: str = ""  # file to write [results/PRESET/imitation.csv]


def mlp(parameters: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Linear layers with ReLU between them, from weight, bias, weight, bias, ... (..., n) -> (...)"""
    for i in range(0, len(parameters), 2):
        x = torch.nn.functional.linear(x.relu() if i else x, parameters[i], parameters[i + 1])
    return x.squeeze(-1)


def step_weights(model: dict, obs: torch.Tensor, act: torch.Tensor) -> np.ndarray | None:
    """Weight of each step in the policy's loss, with sum 1; None of a method without weights. (K, T)"""
    weights = torch.zeros(obs.shape[:2], dtype=torch.float64)
    if "weights" in model:  # PAWS: of a segment, or of its pieces
        segments = model["segments"]
        pieces = model["weights"].view(len(segments), -1)  # (n, pieces)
        weights[segments] = pieces.repeat_interleave(obs.shape[1] // pieces.shape[1], dim=1)
    elif "critics" in model:
        values, both = list(model["value"].values()), list(model["critics"].values())
        inputs, half = torch.cat((obs, act), dim=-1), len(both) // 2
        advantage = torch.minimum(mlp(both[:half], inputs), mlp(both[half:], inputs)) - mlp(values, obs)
        weights += (model["args"]["temperature"] * advantage.double()).exp().clamp(max=100.0)
    else:
        return None
    return (weights / weights.sum()).numpy()


def measures(model: dict, obs, act, policy, start) -> dict[str, float | None]:
    """All but success. obs (K, T, o), act (K, T, a); policy, start: who made a segment, and its step in the episode."""
    best, early = policy == policy.max(), start < obs.shape[1]
    error = -log_likelihood(model["policy"], obs, act).mean(1)  # (K,)
    weights = step_weights(model, torch.from_numpy(obs), torch.from_numpy(act))
    steps = len(model.get("segments", obs)) * obs.shape[1]  # that have a weight
    return {
        "error_best": float(error[best].mean()),
        "error_others": float(error[~best].mean()),
        "weight_best": None if weights is None else float(weights[best].sum()),
        "weight_early": None if weights is None else float(weights[early].sum()),
        "n_eff": None if weights is None else float(1 / np.square(weights).sum() / steps),
    }


def main(args: Args) -> None:
    rows = []
    for task in args.tasks:
        with np.load(ROOT / "data" / f"{task}.npz", allow_pickle=False) as file:
            arrays = [file[key] for key in ("obs", "act", "policy", "start")]
        for n_pref, method in product(args.n_prefs, args.methods):
            for folder, run, result in sweep.complete_runs(args.runs_dir, args.preset, method, task, n_pref):
                model = torch.load(run / "model.pt", map_location="cpu", weights_only=True)
                names = dict(method=method, task=task, n_pref=n_pref, seed=result["seed"])
                found = measures(model, *arrays) | {"success": result["success_peak"]}
                found = {key: None if x is None else round(x, 4) for key, x in found.items()}
                rows.append({**names, **found, "commit": sweep.read_json(folder / "sweep.json").get("commit")})
                print(", ".join(f"{key} {value}" for key, value in rows[-1].items() if value is not None))
    if not rows:
        sys.exit(f"error: {args.runs_dir}/{args.preset}: no complete runs; run benchmark/sweep.py first")
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    path = Path(args.out or f"results/{args.preset}/imitation.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    sweep.write(path, text.getvalue())
    print(f"wrote {path}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(tyro.cli(Args, description=__doc__))
