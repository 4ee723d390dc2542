"""What several test files need. One thread per process: many small runs share the cores."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]


def pytest_addoption(parser):
    parser.addoption("--fuzz-cases", type=int, default=2000, help="damaged preference files that test_fuzz.py tries")


def load_script(name: str):
    """The module of a script: paws_mlp, paws_transformer, or a baseline."""
    path = ROOT / f"{name}.py" if name.startswith("paws_") else ROOT / "baselines" / f"{name}.py"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)  # workers find their functions by this name
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def write_preferences(path: Path, segments=40, length=16, obs_dim=3, act_dim=1, seed=0, **changes) -> Path:
    """Segments of uniform actions; better is closer to tanh of the first observation. Four pretended policies."""
    rng = np.random.default_rng(seed)
    act = rng.uniform(-1, 1, (segments, length, act_dim)).astype(np.float32)
    obs = rng.normal(size=(segments, length, obs_dim)).astype(np.float32)
    logp = -np.abs(act[..., 0] - np.tanh(obs[..., 0]))
    pairs = rng.permutation(segments).reshape(-1, 2)
    prefs = np.array([(i, j) if logp[i].sum() > logp[j].sum() else (j, i) for i, j in pairs])
    arrays = dict(obs=obs, act=act, prefs=prefs, format_version=1, policy=np.arange(segments) % 4, expert_logp=logp)
    arrays.update(changes)
    np.savez_compressed(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


@pytest.fixture(scope="session")
def toy(tmp_path_factory) -> Path:
    """40 segments of 16 steps with the dimensions of Pendulum-v1, 20 pairs."""
    return write_preferences(tmp_path_factory.mktemp("data") / "toy.npz")


def run_script(name: str, flags: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, load_script(name).__file__, *flags.split()]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd)


def only_run(runs: Path) -> Path:
    (folder,) = Path(runs).iterdir()
    return folder


def in_double(part: SimpleNamespace) -> SimpleNamespace:
    """What load_data returns, in float64."""
    return SimpleNamespace(**{**vars(part), "obs": part.obs.double(), "act": part.act.double()})
