"""Rewrites the tables of data/README.md from what data/ holds: `python data_gen/data_card.py`."""

import json
import os
import re
from pathlib import Path

import numpy as np
from envs import METAWORLD_TASKS, TASKS

DATA = Path(__file__).resolve().parents[1] / "data"
# The paper's tables "Dataset quality": (training step in thousands, return, success in % or None) of each policy.
PAPER = {
    "button-press": ((40, 509, 16), (70, 1335, 73), (150, 1320, 74), (240, 1709, 96)),
    "door-open": ((30, 462, 2), (50, 708, 41), (70, 1314, 83), (830, 1994, 100)),
    "drawer-open": ((210, 1279, 8), (270, 1535, 61), (290, 1640, 76), (350, 1786, 91)),
    "faucet-close": ((30, 849, 1), (60, 1346, 36), (90, 1451, 51), (140, 2124, 98)),
    "lever-pull": ((30, 204, 0), (190, 265, 23), (300, 382, 52), (640, 720, 80)),
    "peg-insert-side": ((340, 735, 4), (390, 1201, 33), (410, 1507, 86), (480, 1760, 97)),
    "plate-slide": ((50, 487, 9), (60, 448, 8), (120, 1543, 78), (250, 2006, 99)),
    "push-back": ((280, 47, 12), (290, 102, 20), (410, 573, 57), (600, 1622, 97)),
    "sweep-into": ((50, 142, 0), (150, 490, 52), (300, 1176, 81), (910, 1958, 97)),
    "window-close": ((30, 240, 5), (70, 669, 48), (80, 906, 14), (120, 1524, 99)),
    "ant": ((10, 245, None), (500, 376, None), (1000, 660, None), (2000, 935, None)),
    "half-cheetah": ((30, 76, None), (90, 1071, None), (200, 1583, None), (300, 2499, None)),
    "hopper": ((30, 339, None), (160, 289, None), (260, 693, None), (400, 788, None)),
    "walker2d": ((60, 59, None), (280, 260, None), (340, 527, None), (500, 1093, None)),
}


def cell(step: float, ret: float, success: float | None) -> str:
    return f"{step:g}k: {ret:.0f}" + ("" if success is None else f", {success:.0f} %")


def table(tasks: list[str]) -> str:
    if not tasks:
        return "None yet."
    lines = ["| task | | policy 1 | policy 2 | policy 3 | best |", "|---|---|---|---|---|---|"]
    for task in tasks:
        chosen = json.loads((DATA / "policies" / task / "policies.json").read_text())["policies"]
        ours = [(p["step"] / 1000, p["return"], None if p["success"] is None else 100 * p["success"]) for p in chosen]
        lines.append(f"| {task} | here | " + " | ".join(cell(*policy) for policy in ours) + " |")
        if task in PAPER:
            lines.append("| | paper | " + " | ".join(cell(*policy) for policy in PAPER[task]) + " |")
    return "\n".join(lines)


def files(tasks: list[str]) -> str:
    head = "| file | MB | segments | pairs | obs, act | better policy's segment preferred | expert: steps (of), hours |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for task in tasks:
        path = DATA / f"{task}.npz"
        training = json.loads((DATA / "policies" / task / "policies.json").read_text())["training"]
        with np.load(path, allow_pickle=False) as file:
            (k, _, obs_dim), act_dim, n = file["obs"].shape, file["act"].shape[-1], len(file["prefs"])
            agreement = json.loads(str(file["meta"]))["agreement"]
        size = f"{path.stat().st_size / 1e6:.1f}"
        effort = f"{training['steps']:,} ({training['total_steps']:,}), {training['minutes'] / 60:.1f}"
        lines.append(f"| {path.name} | {size} | {k} | {n} | {obs_dim}, {act_dim} | {agreement:.1%} | {effort} |")
    return "\n".join(lines)


def main() -> None:
    tasks = [task for task in TASKS if (DATA / f"{task}.npz").exists()]
    tables = {
        "files": files(tasks),
        "Meta-World": table([task for task in tasks if task in METAWORLD_TASKS]),
        "locomotion": table([task for task in tasks if task not in METAWORLD_TASKS]),
    }
    card = DATA / "README.md"
    text = card.read_text()
    for name, rows in tables.items():
        marker = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text = marker.sub(lambda match, rows=rows: f"{match[1]}{rows}\n{match[2]}", text)
    temporary = card.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, card)


if __name__ == "__main__":
    main()
