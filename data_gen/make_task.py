"""From nothing to a labelled preference file: trains the expert, selects four policies, rolls them out, labels pairs.

    python data_gen/make_task.py --task door-open # -> data/door-open.npz

What exists is not made again, so after a kill the same command continues.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass
class Args:
    task: str = "door-open"
    """one of the fourteen tasks"""
    seed: int = 1
    """seeds training, measurements and preferences"""
    total_steps: int | None = None
    """most environment steps of the expert [train_sac.py's default]"""
    workers: int = 2
    """processes for rollouts"""
    experts: str = "experts"
    """parent of the expert's folder"""
    data: str = "data"
    """folder of the result <data>/<task>.npz and of policies/<task>/"""


def run(script: str, args: Args, *options: str) -> None:
    options = ("--task", args.task, "--seed", str(args.seed), *options)
    print(f"\n{script} {' '.join(options)}", flush=True)
    code = subprocess.run([sys.executable, str(Path(__file__).with_name(script)), *options]).returncode
    if code:
        sys.exit(f"error: {script} ended with status {code}: see above; the same command continues from there")


def main(args: Args) -> None:
    expert, policies = Path(args.experts, args.task), Path(args.data, "policies")
    trained, selected = expert / "trained", policies / args.task / "policies.json"
    out = Path(args.data, f"{args.task}.npz")
    workers = ("--workers", str(args.workers))
    if not out.exists():
        if not selected.exists():
            if not trained.exists():
                steps = () if args.total_steps is None else ("--total-steps", str(args.total_steps))
                resume = ("--resume",) if (expert / "state.pt").exists() else ()
                run("train_sac.py", args, "--out", args.experts, *steps, *resume)
                trained.touch()
            run("select_policies.py", args, "--experts", args.experts, "--out", str(policies), *workers)
        run("make_preferences.py", args, "--policies", str(policies), "--out", str(out), *workers)
    print(f"{out} is complete")


if __name__ == "__main__":
    main(tyro.cli(Args))
