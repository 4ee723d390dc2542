"""What drawing segments with probability w_i saves against drawing uniformly and weighting the loss by w_i.

    python benchmark/minibatch.py --run runs/door-open__paws_mlp__n500__s1__<time>

Both are unbiased for the gradient of Algorithm 1. Their variance at equal batch size, measured at the finished run's
weights and a fresh policy, tells how many times larger a uniform batch must be for an equally good gradient.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import torch
import tyro
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import paws_mlp as paws


@dataclass
class Args:
    run: str
    """directory of a finished run of paws_mlp.py"""
    draws: int = 200
    """minibatches drawn in each way"""
    batch_size: int = 16
    """segments in a minibatch"""


def main(args: Args) -> None:
    flags = json.loads((Path(args.run) / "args.json").read_text())
    run_args = paws.Args(**{**flags, "resume": None})
    obs, act, _ = paws.load_segments(run_args)
    saved = torch.load(Path(args.run) / "model.pt", weights_only=True)
    model = paws.AdvantageModel(run_args, obs.shape[2], act.shape[2], obs.shape[1])
    model.load_state_dict(saved["advantage"])
    advantages = paws.piece_advantages(model, obs, act).double().numpy()
    weights = paws.segment_weights(advantages, saved["lambda"])
    generator = torch.Generator().manual_seed(0)
    policy = paws.Policy(obs.shape[2], act.shape[2], generator).eval()  # without dropout: the sampling noise alone

    def gradient(index: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        loss = -(scale * policy.log_prob(obs[index], act[index]).mean(1)).sum()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, policy.parameters())]).double()

    full = gradient(torch.arange(len(weights)), torch.from_numpy(weights).float())
    variance = {}
    for mode in ("resample", "weight"):
        minibatches, errors = paws.Minibatches(weights, mode, torch.device("cpu")), []
        for _ in tqdm(range(args.draws), desc=mode):
            index, scale = minibatches.draw(args.batch_size, generator)
            errors.append((gradient(index, scale / args.batch_size) - full).square().sum().item())
        variance[mode] = np.mean(errors) / full.square().sum().item()
    n_eff = paws.effective_samples(weights)
    print(f"n_eff {n_eff:.0f} of {len(weights)} segments, {args.draws} minibatches of {args.batch_size}")
    print("relative variance of the gradient: " + ", ".join(f"{mode} {value:.3f}" for mode, value in variance.items()))
    print(f"a uniform batch must be {variance['weight'] / variance['resample']:.1f} times larger")


if __name__ == "__main__":
    main(tyro.cli(Args))
