"""Damaged preference files: a loader takes what numpy reads once the checksums are right, or ends in one line.

2,000 files in the ordinary run; `pytest tests/test_fuzz.py --fuzz-cases 50000` tries more.
"""

import io
import re
import resource
import sys
import zipfile
from collections import Counter
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "data_gen")]
import validate

import paws_mlp

RNG = np.random.default_rng(0)
ARRAYS = dict(
    obs=RNG.normal(size=(8, 4, 3)).astype(np.float32),
    act=RNG.uniform(-1, 1, (8, 4, 2)).astype(np.float32),
    prefs=np.arange(8).reshape(4, 2),
    format_version=np.int64(1),
    policy=np.arange(8) % 4,
    reward=RNG.normal(size=(8, 4)).astype(np.float32),
    meta=np.array('{"task": "my-robot", "horizon": 250}'),
)


def saved(save=np.savez, **changes) -> bytes:
    buffer = io.BytesIO()
    save(buffer, **(ARRAYS | changes))
    return buffer.getvalue()


def load_validate(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    data = validate.load_preference_file(str(path))
    validate.describe(data)
    return data["obs"], data["act"], data["prefs"]


def load_script(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    chosen, _ = paws_mlp.load_data(paws_mlp.Args(task="my-robot", data=str(path)), torch.device("cpu"))
    return chosen.obs.numpy(), chosen.act.numpy(), chosen.prefs.numpy()


def load_numpy(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    with zipfile.ZipFile(path) as archive:  # read() compares the checksum
        members = [io.BytesIO(archive.read(f"{key}.npy")) for key in ("obs", "act", "prefs")]
    obs, act, prefs = (np.lib.format.read_array(member, allow_pickle=False) for member in members)
    return obs.astype(np.float32), act.astype(np.float32), prefs


LOADERS = {"validate.py": load_validate, "paws_mlp.py": load_script}


def comparisons(obs: np.ndarray, act: np.ndarray, prefs: np.ndarray) -> list[bytes]:
    """What the pairs say, however segments and rows are numbered."""
    segments = [o.tobytes() + a.tobytes() for o, a in zip(obs, act, strict=True)]
    return sorted(segments[int(better)] + segments[int(worse)] for better, worse in prefs)


class Fuzz:
    def __init__(self, path: Path):
        self.path, self.counts = path, Counter()

    def check(self, content: bytes) -> None:
        self.path.write_bytes(content)
        for name, load in LOADERS.items():
            try:
                loaded = load(self.path)
            except SystemExit as e:
                line = str(e)
                assert line.startswith("error: ") and len(line.splitlines()) == 1, (name, line)
                assert name == "paws_mlp.py" or "MemoryError" not in line, line  # sizes are compared before
                self.counts[name, "refused"] += 1
            else:
                assert comparisons(*loaded) == comparisons(*load_numpy(self.path)), name
                self.counts[name, "accepted"] += 1

    def __str__(self) -> str:
        return "; ".join(f"{name} {what} {n}" for (name, what), n in sorted(self.counts.items()))


@pytest.fixture
def fuzz(tmp_path, capsys, request):
    """Address space for one more gigabyte, warnings as errors; the counts in the test's output."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**30, limits[1]))
    fuzz = Fuzz(tmp_path / "fuzz.npz")
    yield fuzz
    resource.setrlimit(resource.RLIMIT_AS, limits)
    with capsys.disabled():
        print(f"\n{request.node.name}: {fuzz}")


@pytest.mark.parametrize("loader", LOADERS)
def test_a_changed_digit_cannot_turn_400_pairs_into_40(loader, tmp_path):
    prefs = np.random.default_rng(0).permuted(np.tile(np.arange(8), (400, 1)), axis=1)[:, :2]
    content, path = saved(prefs=prefs), tmp_path / "changed.npz"
    assert content.count(b"(400, 2), }") == 1
    path.write_bytes(content.replace(b"(400, 2), }", b"(40, 2),  }"))
    with np.load(path) as file:
        assert len(file["prefs"]) == 40  # it stops before the end, where the checksum would tell
    with pytest.raises(SystemExit, match="prefs|checksum"):
        LOADERS[loader](path)


# ---- the mutator: bytes of the file, bytes of its members, members ----


def mutate_bytes(rng: np.random.Generator, content: bytes) -> bytes:
    content = bytearray(content)
    for _ in range(rng.integers(1, 4)):
        at, length = int(rng.integers(len(content) + 1)), int(rng.integers(1, 40))
        how = rng.integers(5)
        if how == 0 and at < len(content):
            content[at] ^= 1 << int(rng.integers(8))
        elif how == 1:
            content[at : at + length] = rng.bytes(len(content[at : at + length]))
        elif how == 2:
            del content[at : at + length]
        elif how == 3:
            content[at:at] = rng.bytes(length)
        elif how == 4 and rng.random() < 0.2:
            del content[at:]
    return bytes(content)


HEADER_WORDS = [
    b"1000000000000", b"9999999999999999999999", b"4000000000", b"-1", b"0", b"1e9", b"9**9**9", b"L", b"True", b"None",
    b"(", b")", b"((((((((", b"[", b"{", b"'", b"\\", b"\n", b"\x00", b",",
    b"|O", b"<f8", b"<i4", b">f4", b"<U9", b"|V3", b"<c16", b"<M8[s]",
]  # fmt: skip
METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


def mutate_header(rng: np.random.Generator, member: bytes) -> bytes:
    """In the description that stands before an array's data: other numbers, types, brackets."""
    header, data = member[:128], member[128:]
    places = list(re.finditer(rb"\d+|<\w\d+|True|False|[(){},']", header))
    place = places[rng.integers(len(places))]
    header = header[: place.start()] + HEADER_WORDS[rng.integers(len(HEADER_WORDS))] + header[place.end() :]
    return header[:127].rstrip().ljust(127) + b"\n" + data


def mutate(rng: np.random.Generator) -> bytes:
    content = saved(np.savez_compressed if rng.random() < 0.5 else np.savez)
    if rng.random() < 0.4:
        return mutate_bytes(rng, content)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = list(members)[rng.integers(len(members))]
    how = rng.random()
    if how < 0.6:
        members[name] = mutate_header(rng, members[name])
    elif how < 0.9:
        members[name] = mutate_bytes(rng, members[name])
    elif how < 0.95:
        del members[name]
    method = int(rng.choice(METHODS, p=[0.5, 0.3, 0.1, 0.1]))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for each, data in members.items():
            archive.writestr(each, data)
    return buffer.getvalue()


@pytest.mark.filterwarnings("ignore")
def test_damaged_bytes(fuzz, request):
    fuzz.check(saved())
    assert set(fuzz.counts) == {(name, "accepted") for name in LOADERS}
    for case in range(request.config.getoption("--fuzz-cases") * 3 // 4):
        fuzz.check(mutate(np.random.default_rng([1, case])))
    assert all(fuzz.counts[name, what] for name in LOADERS for what in ("accepted", "refused"))


# ---- well-formed files with other arrays ----


def other_arrays(key: str) -> st.SearchStrategy:
    value = np.asarray(ARRAYS[key])
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=8)
    return st.one_of(hnp.arrays(value.dtype, value.shape), hnp.arrays(hnp.scalar_dtypes(), shapes))


@pytest.mark.filterwarnings("ignore")
def test_other_arrays(fuzz, request):
    changes = st.sampled_from(sorted(ARRAYS)).flatmap(lambda key: st.tuples(st.just(key), other_arrays(key)))

    @settings(
        max_examples=request.config.getoption("--fuzz-cases") // 4, derandomize=True, database=None, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(changes)
    def run(change):
        fuzz.check(saved(**dict([change])))

    run()
