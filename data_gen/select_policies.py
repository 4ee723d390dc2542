"""Chooses a task's four data policies among its expert's checkpoints: worst, a third, two thirds of the range, best.

    python data_gen/select_policies.py --task door-open # experts/door-open -> data/policies/door-open

checkpoints.csv has a few noisy episodes per row. So: smooth over neighbouring checkpoints to shortlist candidates (for
the best place also the highest as they are: an expert that wavers has good checkpoints between bad ones), measure
these again, choose, and measure the four chosen ones once more, on episodes that had no part in choosing them.
"""

import csv
import json
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from actors import Actor
from envs import METAWORLD_TASKS, TASKS
from make_preferences import POLICIES, episodes_per_job, rollout, start_pool
from tqdm import tqdm

WORST_SUCCESS = 0.05  # of the best policy's; the paper's worst policies have 0-16 %
TRAINING = ("seed", "total_steps", "demo_episodes", "batch_size", "update_every", "learning_rate", "gamma",
            "early_termination")  # fmt: skip
TOLERANCE = 0.05  # of the range: checkpoints nearer to each other than this count as equal


@dataclass
class Args:
    task: str = "door-open"
    """one of the fourteen tasks"""
    seed: int = 1
    """seeds the episodes"""
    shortlist: int = 4
    """candidates for each of the four places"""
    shortlist_episodes: int = 100
    """episodes to choose among the candidates"""
    episodes: int = 100
    """other, fresh episodes to measure the four chosen policies"""
    workers: int = 2
    """processes"""
    experts: str = "experts"
    """parent of <task>/{actors/*.pt, checkpoints.csv} (train_sac.py)"""
    out: str = "data/policies"
    """parent of the output folder <out>/<task>"""


def smooth(scores: list[float]) -> list[float]:
    """Mean over each checkpoint and its two neighbours."""
    return [float(np.mean(scores[max(0, i - 1) : i + 2])) for i in range(len(scores))]


def nearest(scores: dict[int, float], target: float, tolerance: float) -> list[int]:
    """Steps ordered by distance of their score from the target; the earlier one first among equals."""
    return sorted(scores, key=lambda step: (round(abs(scores[step] - target) / tolerance), step))


def targets_below(best: float, worst: float | None) -> list[float]:
    """Scores wanted of policies 1 to 3. `worst` is the lowest return of a locomotion task; None: success rates."""
    if worst is None:
        return [best * share for share in (WORST_SUCCESS, 1 / 3, 2 / 3)]
    return [worst + (best - worst) * share for share in (0.0, 1 / 3, 2 / 3)]


def measure(pool: ProcessPoolExecutor, actors: dict[int, Actor], episodes: int, stream: tuple) -> dict[int, tuple]:
    """(success, return) of each actor over `episodes` episodes, actions sampled; success is NaN where there is none."""
    jobs, steps = [], []
    for step, actor in actors.items():
        size = episodes_per_job(actor.info["task"])
        for first in range(0, episodes, size):
            count = min(size, episodes - first)
            jobs.append((actor, [(*stream, step, first + i) for i in range(count)], [()] * count, True))
            steps.append(step)
    found = {step: [] for step in actors}
    with tqdm(total=episodes * len(actors), unit="episode") as bar:
        for step, result in zip(steps, pool.map(rollout, jobs), strict=True):
            found[step] += zip(result["success"].max(axis=1), result["reward"].sum(axis=1, dtype=float), strict=True)
            bar.update(len(result["success"]))
    return {step: tuple(np.mean(rows, axis=0, dtype=float)) for step, rows in found.items()}


def main(args: Args) -> None:
    if args.task not in TASKS:
        sys.exit(f"error: --task {args.task}: use one of {', '.join(TASKS)}")
    expert, folder = Path(args.experts) / args.task, Path(args.out) / args.task
    if not (expert / "checkpoints.csv").exists():
        sys.exit(f"error: {expert}/checkpoints.csv is missing: run data_gen/train_sac.py --task {args.task} first")
    with open(expert / "checkpoints.csv") as file:
        rows = list(csv.DictReader(file))
    if len(rows) < POLICIES:
        sys.exit(f"error: {expert}/checkpoints.csv has {len(rows)} rows, four policies need more: train for longer")
    for name in ("shortlist", "shortlist_episodes", "episodes", "workers"):
        if getattr(args, name) < 1:
            sys.exit(f"error: --{name.replace('_', '-')} {getattr(args, name)}: use 1 or more")
    try:
        flags = json.loads((expert / "args.json").read_text())
        training = {key: flags[key] for key in TRAINING}
        training |= {"steps": int(rows[-1]["step"]), "minutes": float(rows[-1]["minutes"])}
    except (OSError, ValueError, KeyError, TypeError) as e:
        sys.exit(f"error: {expert}: args.json or checkpoints.csv is damaged ({type(e).__name__}: {e}); train again")
    metaworld = args.task in METAWORLD_TASKS
    column = 0 if metaworld else 1  # of (success, return)
    paths = {int(row["step"]): expert / "actors" / f"step_{int(row['step']):07d}.pt" for row in rows}
    single = [float(row["success" if metaworld else "return"]) for row in rows]
    single, scores = dict(zip(paths, single, strict=True)), dict(zip(paths, smooth(single), strict=True))

    with start_pool(args.task, args.workers) as pool:
        lowest = None if metaworld else min(scores.values())
        scale = max(scores.values()) - (lowest or 0.0)
        tolerance = TOLERANCE * scale or 1.0
        top = set(sorted(scores, key=lambda step: (-scores[step], step))[: 2 * args.shortlist])
        top |= set(sorted(single, key=lambda step: (-single[step], step))[: args.shortlist])
        candidates = set(top)
        for target in targets_below(max(scores.values()), lowest):
            candidates |= set(nearest(scores, target, tolerance)[: args.shortlist])
        shortlisted = {step: Actor(paths[step]) for step in sorted(candidates)}
        measured = measure(pool, shortlisted, args.shortlist_episodes, (args.seed, 3))

        # Success rates are often equal at the top: the return then says which policy is better.
        best = max(top, key=lambda step: (measured[step][column], measured[step][1], -step))
        chosen, left = [], {step: values[column] for step, values in measured.items() if step != best}
        worst = None if metaworld else min(left.values())
        for target in targets_below(measured[best][column], worst):
            chosen.append(nearest(left, target, tolerance)[0])
            del left[chosen[-1]]
        chosen.append(best)
        final = measure(pool, {step: shortlisted[step] for step in chosen}, args.episodes, (args.seed, 4))

    chosen.sort(key=lambda step: final[step][column])  # stable: equal ones stay in the order of their places
    new, policies = Path(args.out) / f".{args.task}.tmp", []
    new.mkdir(parents=True, exist_ok=True)
    for number, step in enumerate(chosen, start=1):
        path = folder / f"policy_{number}.pt"
        shutil.copyfile(paths[step], new / path.name)
        success, ret = final[step]
        numbers = {"success": round(success, 4) if metaworld else None, "return": round(ret, 1)}
        policies.append({"file": path.name, "step": step, **numbers, "episodes": args.episodes, "seed": args.seed})
        print(f"{path}: step {step}, " + (f"success {success:.0%}, " if metaworld else "") + f"return {ret:.0f}")
    about = {"task": args.task, "training": training, "policies": policies}
    (new / "policies.json").write_text(json.dumps(about, indent=1) + "\n")
    folder.mkdir(exist_ok=True)
    (folder / "policies.json").unlink(missing_ok=True)  # it moves last: if it is there, the folder is complete
    for name in (*(policy["file"] for policy in policies), "policies.json"):
        os.replace(new / name, folder / name)
    new.rmdir()


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
