"""Checks preference files against the format, your own ones too: `python data_gen/validate.py data/*.npz`."""

import json
import os
import sys
import zipfile
import zlib
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paws_mlp import load_preference_file  # noqa: E402

FLOATS, INTS = ("reward", "expert_logp", "sim_state"), ("policy", "episode", "start")
REPLAY = ("sim_state", "episode", "start")


def load_optional(path: str) -> dict[str, np.ndarray]:
    data = {}
    with np.load(path, allow_pickle=False) as file:
        for key in (*FLOATS, *INTS, "meta"):
            try:
                if key in file:
                    data[key] = file[key]
            except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as e:
                sys.exit(f"error: {path}: key '{key}': unreadable ({e}); store a plain array, not objects")
    return data


def check_optional(path: str, data: dict[str, np.ndarray]) -> None:
    """Ends with a one-line error if an optional key is there but not as the format has it."""

    def fail(key: str, problem: str, fix: str):
        sys.exit(f"error: {path}: key '{key}': {problem}; {fix}")

    segments, length = data["obs"].shape[:2]
    for key in (*FLOATS, *INTS):
        if key not in data:
            continue
        value = data[key]
        width = () if key in INTS else (value.shape[-1],) if key == "sim_state" and value.ndim else (length,)
        if value.shape != (segments, *width):
            fail(key, f"shape {value.shape}, expected {(segments, *width)}", "store one row per segment")
        if value.dtype.kind not in ("f" if key in FLOATS else "iu"):
            fail(key, f"type {value.dtype}", f"store it as {'float' if key in FLOATS else 'int'}")
        if not np.isfinite(value).all():
            fail(key, "NaN or infinity", "remove or repair these segments")
        if key in INTS and value.min() < 0:
            fail(key, f"negative value {value.min()}", "count from 0")
    present = [key for key in REPLAY if key in data]
    if present and len(present) < len(REPLAY):
        missing = next(key for key in REPLAY if key not in data)
        fail(missing, "missing", f"replay needs all of {', '.join(REPLAY)}: store all or none")
    if "meta" not in data:
        return
    try:
        meta = json.loads(str(data["meta"]))
    except json.JSONDecodeError as e:
        fail("meta", f"not JSON ({e})", "store np.array(json.dumps({...}))")
    if not isinstance(meta, dict):
        fail("meta", f"JSON {type(meta).__name__}", "store an object: np.array(json.dumps({...}))")
    if "start" in data and "horizon" in meta and data["start"].max() + length > meta["horizon"]:
        last = f"segment from {data['start'].max()} to {data['start'].max() + length}"
        fail("start", f"{last}, but the horizon is {meta['horizon']}", "correct start, or horizon in meta")


def describe(data: dict[str, np.ndarray]) -> str:
    (segments, length, obs_dim), act_dim = data["obs"].shape, data["act"].shape[2]
    line = f"OK  K {segments}  T {length}  n {len(data['prefs'])}  obs {obs_dim}  act {act_dim}"
    if "policy" in data:
        counts = np.bincount(data["policy"])
        line += f"  segments by policy {'/'.join(map(str, counts))}" + ("" if len(set(counts)) == 1 else " (not equal)")
    uses = np.bincount(data["prefs"].ravel(), minlength=segments)
    return line + f"  pairs by segment {uses.min()}" + (f" to {uses.max()}" if uses.max() > uses.min() else "")


def main(paths: list[str]) -> int:
    """One line per file; 1 if any is bad."""
    failed = 0
    for path in paths:
        try:
            data = load_preference_file(path) | load_optional(path)
            check_optional(path, data)
            print(f"{path}: {describe(data)}")
        except SystemExit as e:
            print(e)
            failed = 1
    return failed


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("error: no file given: python data_gen/validate.py data/*.npz")
    sys.exit(main(sys.argv[1:]))
