"""Checks preference files against the format, your own ones too: `python data_gen/validate.py data/*.npz`."""

import io
import json
import math
import os
import sys
import zipfile

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

REQUIRED = ("obs", "act", "prefs", "format_version")
FLOATS, INTS = ("reward", "expert_logp", "sim_state"), ("policy", "episode", "start")
REPLAY = ("sim_state", "episode", "start")
READ_HEADER = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array whose sizes are credible, before memory is taken for them, and whose checksum is right."""
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError("compressed in another way than numpy does")
    if info.file_size > 1_032 * info.compress_size + 64:  # deflate cannot do better
        raise ValueError(f"declares {info.file_size} bytes, more than the file can hold")
    with archive.open(name) as member:
        content = member.read(info.file_size)  # to its end, where zipfile compares the checksum; np.load may stop early
    stream = io.BytesIO(content)
    shape, fortran_order, dtype = READ_HEADER[np.lib.format.read_magic(stream)](stream)
    found = len(content) - stream.tell()
    if dtype.hasobject:
        raise ValueError("holds Python objects; store plain arrays")
    if math.prod(shape) * dtype.itemsize != found:
        raise ValueError(f"declares {dtype} of shape {shape}, but holds {found} bytes")
    array = np.frombuffer(content, dtype, offset=stream.tell())
    return array.reshape(shape, order="F" if fortran_order else "C")


def load_preference_file(path: str) -> dict:
    """All keys of the format that the file has, checked; `meta` as a dict. A bad file ends in one line."""

    def fail(key: str, problem: str, fix: str):
        sys.exit(" ".join(f"error: {path}: {key}: {problem}; {fix}".split()))

    data, reading = {}, "file"
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            for key in (*REQUIRED, *FLOATS, *INTS, "meta"):
                reading = f"key '{key}'"
                if f"{key}.npy" in names:
                    data[key] = read_member(archive, f"{key}.npy")
    except FileNotFoundError:
        fail("file", "not found", "give an existing file with --data, or a --task whose data is in data/")
    except Exception as e:  # whatever numpy, zipfile or zlib make of the bytes
        reason = f"({type(e).__name__}: {e})"[:200]
        fail(reading, f"not a readable npz of plain arrays {reason}", "copy or write it again")
    for key in REQUIRED:
        if key not in data:
            fail(f"key '{key}'", "missing", f"a preference file holds {', '.join(REQUIRED)}")

    def found(key: str) -> str:
        return f"found {data[key].dtype} of shape {data[key].shape}"

    version = data["format_version"]
    if version.shape != () or version.dtype.kind not in "iu" or int(version) != 1:
        fail("key 'format_version'", found("format_version"), "expected the integer 1; convert the file")
    for key in ("obs", "act"):
        if data[key].ndim != 3 or data[key].dtype.kind != "f" or 0 in data[key].shape:
            fail(f"key '{key}'", f"{found(key)}, expected float32 of shape (K, T, dim)", "stack the segments so")
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite
            data[key] = np.ascontiguousarray(data[key], np.float32)
        if not np.isfinite(data[key].sum(dtype=np.float64)):  # a sum: no temporary of the size of the data
            first = tuple(np.argwhere(~np.isfinite(data[key]))[0].tolist())
            fail(f"key '{key}'", f"NaN or infinity at {first}", "remove or repair that segment")
    obs, act, prefs = data["obs"], data["act"], data["prefs"]
    if obs.shape[:2] != act.shape[:2]:
        fail("key 'act'", f"has (K, T) = {act.shape[:2]} but obs has {obs.shape[:2]}", "store one action per step")
    if max(act.max(), -act.min()) > 1.0:
        fail("key 'act'", f"values in [{act.min():g}, {act.max():g}]", "rescale actions to [-1, 1]")
    if prefs.ndim != 2 or prefs.shape[1] != 2 or len(prefs) == 0 or prefs.dtype.kind not in "iu":
        fail("key 'prefs'", f"{found('prefs')}, expected int (n, 2)", "rows are (preferred index, other index)")
    if prefs.min() < 0 or prefs.max() >= len(obs):
        indices = f"indices from {prefs.min()} to {prefs.max()}"
        fail("key 'prefs'", indices, f"they must be between 0 and {len(obs) - 1}: there are {len(obs)} segments")
    if (prefs[:, 0] == prefs[:, 1]).any():
        row = int(np.argmax(prefs[:, 0] == prefs[:, 1]))
        fail("key 'prefs'", f"row {row} compares segment {prefs[row, 0]} with itself", "remove that row")
    data["prefs"] = prefs.astype(np.int64)
    check_optional(data, lambda key, problem, fix: fail(f"key '{key}'", problem, fix))
    return data


def check_optional(data: dict, fail) -> None:
    """Parses `meta`; calls fail(key, problem, fix) if an optional key is there but not as the format has it."""
    segments, length = data["obs"].shape[:2]
    for key in (*FLOATS, *INTS):
        if key not in data:
            continue
        value = data[key]
        width = () if key in INTS else value.shape[-1:] if key == "sim_state" else (length,)
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
        data["meta"] = json.loads(str(data["meta"]))
    except Exception as e:  # no JSON, numbers of 5,000 digits, 1,000 brackets, characters that do not exist
        fail("meta", f"not JSON ({type(e).__name__})", "store np.array(json.dumps({...}))")
    if not isinstance(data["meta"], dict):
        fail("meta", f"JSON {type(data['meta']).__name__}", "store an object: np.array(json.dumps({...}))")
    horizon = data["meta"].get("horizon", math.inf)
    if not isinstance(horizon, int | float):
        fail("meta", f"horizon is a {type(horizon).__name__}", "store the number of steps of an episode")
    if "start" in data and int(data["start"].max()) + length > horizon:
        last = f"segment from {data['start'].max()} to {int(data['start'].max()) + length}"
        fail("start", f"{last}, but the horizon is {horizon}", "correct start, or horizon in meta")


def describe(data: dict[str, np.ndarray]) -> str:
    (segments, length, obs_dim), act_dim = data["obs"].shape, data["act"].shape[2]
    line = f"OK  K {segments}  T {length}  n {len(data['prefs'])}  obs {obs_dim}  act {act_dim}"
    if "policy" in data:
        counts = np.unique(data["policy"], return_counts=True)[1].tolist()
        line += f"  segments by policy {'/'.join(map(str, counts))}" + ("" if len(set(counts)) == 1 else " (not equal)")
    largest = np.abs(data["obs"]).max()
    if largest > 1e6:
        line += f"  obs up to {largest:.1e} (far from 1: learning may diverge, rescale them)"
    uses = np.bincount(data["prefs"].ravel(), minlength=segments)
    return line + f"  pairs by segment {uses.min()}" + (f" to {uses.max()}" if uses.max() > uses.min() else "")


def main(paths: list[str]) -> int:
    """One line per file; 1 if any is bad."""
    failed = 0
    for path in paths:
        try:
            print(f"{path}: {describe(load_preference_file(path))}")
        except SystemExit as e:
            print(e)
            failed = 1
    return failed


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("error: no file given: python data_gen/validate.py data/*.npz")
    sys.exit(main(sys.argv[1:]))
