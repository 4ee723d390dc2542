"""How near rollouts come to bare simulation: steps/s of rollout workers against processes that only step the simulator.

    python benchmark/speed_rollouts.py --task door-open

Both play the same episodes in as many processes, in turn, so that other load on the machine meets both. The bare ones
have the actions beforehand (physics costs what it costs: it depends on what the arm touches), keep nothing, and use one
simulator each, which they reset once in 250 steps, as rollouts do.
"""

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data_gen"))
import make_preferences
from actors import Actor
from envs import HORIZON
from make_preferences import episodes_per_job, rollout, segment_starts, start_pool


@dataclass
class Args:
    task: str = "door-open"
    """one of the fourteen tasks"""
    policy: str | None = None
    """actor file [data/policies/<task>/policy_4.pt]"""
    workers: int = 2
    """processes"""
    rounds: int = 5
    """times that each way is measured"""
    episodes: int = 24
    """episodes of each worker in each round"""


def only_step(episodes: dict[str, np.ndarray]) -> None:
    env = make_preferences.ENVS[0]
    for seed, actions in zip(episodes["episode"], episodes["act"], strict=True):
        env.reset(seed)
        for action in actions:
            env.step(action)


def main(args: Args) -> None:
    path = Path(args.policy or f"data/policies/{args.task}/policy_4.pt")
    if not path.exists():
        sys.exit(f"error: {path} is missing: run data_gen/select_policies.py --task {args.task}, or give --policy")
    actor, size = Actor(path), episodes_per_job(args.task)
    count = args.workers * max(1, args.episodes // size)
    starts = [segment_starts(64, 0)] * size
    jobs = [(actor, [(0, 0, job, i) for i in range(size)], starts, True) for job in range(count)]
    rates = {"rollouts": [], "only stepping": []}
    with start_pool(args.task, args.workers) as pool:
        played = list(pool.map(rollout, jobs))  # also waits until the workers are up
        for _ in range(args.rounds):
            for name, function, inputs in (("rollouts", rollout, jobs), ("only stepping", only_step, played)):
                started = time.perf_counter()
                list(pool.map(function, inputs))
                rates[name].append(count * size * HORIZON / (time.perf_counter() - started))
    rollouts, bare = np.median(rates["rollouts"]), np.median(rates["only stepping"])
    ratio = np.median(np.divide(rates["rollouts"], rates["only stepping"]))
    print(f"{args.task}, {args.workers} workers: rollouts {rollouts:.0f} steps/s, only stepping {bare:.0f} steps/s")
    print(f"ratio {ratio:.1%} (median of {args.rounds} rounds)")


if __name__ == "__main__":
    main(tyro.cli(Args))
