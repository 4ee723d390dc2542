"""From nothing to a labelled preference file: trains the expert, selects four policies, rolls them out, labels pairs.

    python data_gen/make_task.py --task door-open # -> data/door-open.npz

What exists is not made again, so after a kill the same command continues.
"""

import os
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # workers inherit it: one thread each

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


def main(args: Args) -> None:
    expert, policies = Path(args.experts, args.task), Path(args.data, "policies")
    trained, selected = expert / "trained", policies / args.task / "policies.json"
    out = Path(args.data, f"{args.task}.npz")
    common = dict(task=args.task, seed=args.seed)
    # All in this process: no training goes on when it is killed. Imported here: workers need none of it.
    if not out.exists() and not selected.exists() and not trained.exists():
        import train_sac

        resume = (expert / "state.pt").exists()
        train_sac.main(train_sac.Args(**common, total_steps=args.total_steps, out=args.experts, resume=resume))
        trained.touch()
    if not out.exists() and not selected.exists():
        import select_policies

        options = dict(experts=args.experts, out=str(policies), workers=args.workers)
        select_policies.main(select_policies.Args(**common, **options))
    if not out.exists():
        import make_preferences

        options = dict(policies=str(policies), out=str(out), workers=args.workers)
        make_preferences.main(make_preferences.Args(**common, **options))
    print(f"{out} is complete")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
