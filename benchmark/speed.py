"""Where the seconds of a PAWS run go, and what a minibatch of single steps saves against whole segments.

    python benchmark/speed.py                                    # runs README's command first
    python benchmark/speed.py --run runs/<name of a PAWS run>    # or reads a complete run

The second table is at the run's weights and its trained policy without dropout: for each way to draw a minibatch, how
far its gradient is from the full one (squared distance over the squared length of that), the milliseconds of an update,
and their product, the variance that is left for equal time.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))
import sweep


@dataclass
class Args:
    run: str = ""  # run directory of a complete PAWS run [runs README's command]
    runs_dir: str = "runs"  # parent of the run directory
    draws: int = 200  # minibatches of each kind


def run_readme_command(runs_dir: str) -> Path:
    """`python paws_mlp.py --task door-open --n-pref 50 --n-eff 0.1`, with the seconds from start to end."""
    started = time.perf_counter()
    command = [sys.executable, "paws_mlp.py", "--task", "door-open", "--n-pref", "50", "--n-eff", "0.1"]
    command += ["--exp-name", "speed", "--runs-dir", str(Path(runs_dir).resolve())]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    print(f"{' '.join(command[1:])}: {time.perf_counter() - started:.0f} s from start to end")
    return max(Path(runs_dir).glob("door-open__speed__*"), key=lambda path: path.stat().st_mtime)


def print_shares(result: dict) -> None:
    """Seconds of each part of the run."""
    seconds, curve = result["seconds"], result["curve"]
    print("| part | seconds | share |\n|---|---|---|")
    for part in ("data", "utility", "policy", "evaluation", "total"):
        print(f"| {part} | {seconds[part]:.1f} | {seconds[part] / seconds['total']:.0%} |")
    if curve:
        print(f"\n{len(curve)} evaluations of {seconds['evaluation'] / len(curve):.2f} s; ", end="")
    print(f"{1000 * seconds['policy'] / result['steps']:.2f} ms a policy update")


def load_run(folder: Path) -> tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The trained policy without dropout, the weights of the segments (N,), obs (N, T, o) and act (N, T, a)."""
    saved = torch.load(folder / "model.pt", map_location="cpu", weights_only=True)
    if "weights" not in saved or len(saved["weights"]) != len(saved["segments"]):
        sys.exit(f"error: {folder}: not a PAWS run with a weight for each segment")
    with np.load(ROOT / saved["args"]["data"], allow_pickle=False) as file:
        obs, act = (torch.from_numpy(file[key][saved["segments"].numpy()]) for key in ("obs", "act"))
    layers = []
    for name in ("net.0", "net.3", "net.6"):
        weight = saved["policy"][f"{name}.weight"]
        layers += [nn.Linear(weight.shape[1], weight.shape[0]), nn.Tanh() if name == "net.6" else nn.ReLU()]
        layers[-2].load_state_dict({"weight": weight, "bias": saved["policy"][f"{name}.bias"]})
    return nn.Sequential(*layers), saved["weights"], obs, act


def minibatches(weights: torch.Tensor, length: int) -> dict:
    """Name -> function that draws (segments (B, 1), steps (B, 1 or T), factor of the loss (B, 1)) of a minibatch."""
    whole, uniform = torch.arange(length)[None], torch.full_like(weights, 1 / len(weights))

    def draw(probabilities: torch.Tensor, size: int, single: bool):
        i = torch.multinomial(probabilities, size, replacement=True)
        steps = torch.randint(length, (size, 1)) if single else whole.expand(size, length)
        return i[:, None], steps, (weights[i] / probabilities[i]).float()[:, None]

    return {
        "256 steps, segments drawn with probability w": lambda: draw(weights, 256, True),
        "256 steps, drawn uniformly, loss weighted by w": lambda: draw(uniform, 256, True),
        "4 whole segments (256 steps), drawn by w": lambda: draw(weights, 4, False),
        "16 whole segments (1,024 steps), drawn by w": lambda: draw(weights, 16, False),
    }


def print_gradient_variance(folder: Path, draws: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy, weights, obs, act = load_run(folder)
    parameters = list(policy.parameters())

    def gradient(segments, steps, factor) -> torch.Tensor:
        error = (policy(obs[segments, steps]) - act[segments, steps]).square().sum(-1)  # (B, steps)
        grads = torch.autograd.grad((factor * error).mean(), parameters)
        return torch.cat([grad.flatten() for grad in grads])

    n, length = obs.shape[:2]
    full = gradient(torch.arange(n)[:, None], torch.arange(length)[None], (weights * n).float()[:, None])
    print("\n| minibatch | relative variance | ms | variance x ms |\n|---|---|---|---|")
    for name, draw in minibatches(weights, length).items():
        gradient(*draw())
        started = time.perf_counter()
        gradients = [gradient(*draw()) for _ in range(draws)]
        ms = 1000 * (time.perf_counter() - started) / draws
        variance = float(np.mean([(g - full).square().sum().item() for g in gradients]) / full.square().sum())
        print(f"| {name} | {variance:.3g} | {ms:.2f} | {variance * ms:.3g} |")


def main(args: Args) -> None:
    folder = Path(args.run) if args.run else run_readme_command(args.runs_dir)
    result = sweep.read_json(folder / "result.json")
    if not result:
        sys.exit(f"error: {folder}: no result.json; give the run directory of a complete PAWS run")
    print(f"{result['algorithm']}, {result['task']}, {result['n_pref']} preferences, {sweep.machine()}\n")
    print_shares(result)
    print_gradient_variance(folder, args.draws)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
