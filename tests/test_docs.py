"""Every command and every Python block of the documentation runs, at a reduced size; every link leads somewhere."""

import glob
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import sys
import time
import traceback
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch._dynamo  # noqa: F401 (what takes long to import is imported once: commands run in forks of this process)
import torch.utils.tensorboard  # noqa: F401
import tyro  # noqa: F401
from conftest import ROOT, write_preferences
from test_import import make_minari, write_robot

PAGES = sorted(
    str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "data/README.md")
)
NOT_RUN = {  # what a part of a command begins with: why it is not run
    "git clone": "needs the network",
    "python3 -m venv": "installation: .ci/run",
    ". .venv": "installation: .ci/run",
    "pip install": "installation: .ci/run",
    "apt-get": "installation: .ci/run",
    "ruff": ".ci/run",
    "python -m pytest": "this is it",
    "uv run": "installs",
    "tensorboard": "serves for ever",
    "sbatch": "needs a cluster",
    "python benchmark/sweep.py --study human": "needs 50 answers; tests/test_benchmark.py",
    "python data_gen/train_sac.py": "hours; tests/test_data_gen.py runs it",
    "python data_gen/make_task.py": "hours; tests/test_data_gen.py runs it",
    "python data_gen/select_policies.py": "minutes; tests/test_data_gen.py runs it",
    "python data_gen/make_preferences.py": "minutes; tests/test_data_gen.py runs it",
}
TINY = "--n-pref 2 --total-steps 4 --batch-size 4 --no-eval"
SMALLER = {  # what a script gets behind its own flags; the last of a repeated flag counts
    "paws_mlp.py": f"{TINY} --advantage-steps 2 --advantage-width 8",
    "paws_transformer.py": f"{TINY} --advantage-steps 2 --advantage-width 8 --advantage-heads 2",
    "baselines/bc.py": TINY,
    "baselines/cpl.py": TINY,
    "baselines/cpl_kl.py": TINY,
    "baselines/p_iql.py": f"{TINY} --reward-width 8 --critic-width 8",
    "baselines/preference_transformer.py": f"{TINY} --reward-steps 2 --reward-width 8 --critic-width 8",
    "baselines/ipl.py": f"{TINY} --critic-width 8",
    "baselines/dppo.py": f"{TINY} --predictor-steps 2 --predictor-width 8",
    "benchmark/sweep.py": "--dry-run",
    "benchmark/tables.py": "--results benchmark/results",
    "benchmark/evaluate.py": "--episodes 2 --workers 1",
    "data_gen/import_lerobot.py": "--segment-length 8 --segments 6 --pairs 3",
    "data_gen/import_minari.py": "--segment-length 8 --segments 6 --pairs 3",
    "data_gen/label.py": "--n-pref 2 --repeat 0 --workers 1 --port 0",
}


def blocks(page: str) -> list[tuple[str, str]]:
    """The language and the text of each, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def commands(block: str) -> list[str]:
    """The parts of the block's command lines; none of a block that shows something else than commands."""
    if not re.match(r"([A-Z_]+=\S+ )*(python3?|pip|git|apt-get|uv|ruff|sbatch|tensorboard) ", block):
        return []
    lines = [re.sub(r"(^|\s)#.*", "", line).strip() for line in block.replace("\\\n", " ").splitlines()]
    return [part for line in lines if line for part in re.split(r"\s+&&\s+", line)]


def write_small_task(source: Path, path: Path) -> None:
    """The first 8 pairs of a shipped file."""
    with np.load(source, allow_pickle=False) as file:
        arrays = dict(file)
    segments = arrays["prefs"][:8].ravel()
    count = len(arrays["obs"])
    arrays = {key: a[segments] if a.ndim and len(a) == count and key != "prefs" else a for key, a in arrays.items()}
    np.savez(path, **arrays | dict(prefs=np.arange(16).reshape(8, 2)))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """The repository with little data, and what the pages call my.npz, mine.npz, clips and DATASET_DIR."""
    folder = tmp_path_factory.mktemp("docs") / "checkout"
    leave_out = shutil.ignore_patterns(".*", "__pycache__", "*.npz", "*.pt", "runs", "labels", "experts")
    shutil.copytree(ROOT, folder, ignore=leave_out)
    for path in ROOT.glob("data/*.npz"):
        write_small_task(path, folder / "data" / path.name)
    for name in ("my.npz", "mine.npz"):
        write_preferences(folder / name, segments=16)
    write_robot(folder / "DATASET_DIR")
    (folder / "clips").mkdir()
    video = next((folder / "DATASET_DIR/videos").rglob("*.mp4"))
    for i in range(16):
        shutil.copy(video, folder / f"clips/{i}.mp4")
    return folder


def in_fork(function, log: Path) -> multiprocessing.Process:
    """Runs a function as a command: in a process of its own, without the seconds that importing torch takes."""

    def child() -> None:
        with open(log, "w") as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
        for name in [name for name, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(ROOT))]:
            del sys.modules[name]  # the checkout has its own
        status = 0
        try:
            function()
        except SystemExit as e:
            status = e.code if isinstance(e.code, int) else int(e.code is not None)
            print(e.code if isinstance(e.code, str) else "", file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)

    log.unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    return process


def run_python(words: list[str]) -> None:
    if "--render" in words:  # draws in its own process, and OpenGL may not work in a fork
        os.execv(sys.executable, [sys.executable, *words])
    sys.argv = words
    sys.path[0] = str(Path(words[0]).parent.resolve())
    runpy.run_path(words[0], run_name="__main__")


def answer_all(log: Path, process: multiprocessing.Process) -> None:
    """What a labeler does on the page: always the left one."""
    end = time.monotonic() + 120
    while not (address := re.search(r"open (http\S+/)\S*labeler=(\w+)", log.read_text() if log.exists() else "")):
        assert process.is_alive() and time.monotonic() < end, log.read_text()
        time.sleep(0.05)
    url, name = address.groups()
    with urllib.request.urlopen(f"{url}state?labeler={name}") as response:
        state = json.load(response)
    while state["pair"]:
        body = dict(labeler=name, seq=state["seq"], pair=state["pair"]["pair"], choice="left", seconds=1)
        request = urllib.request.Request(
            f"{url}answer", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            state = json.load(response)


def run(command: str, log: Path) -> None:
    """In the current folder, as small as the tables above say."""
    words = shlex.split(command)
    while "=" in words[0]:  # VARIABLE=value
        words.pop(0)
    assert words[0] == "python", f"{command}: give it a line in NOT_RUN, or write it with python"
    words = [found for word in words[1:] for found in (sorted(glob.glob(word)) if "*" in word else [word])]
    words += SMALLER.get(words[0], "").split() if "--resume" not in words else []
    process = in_fork(lambda: run_python(words), log)
    try:
        if words[0] == "data_gen/label.py" and not {"--report", "--export"} & set(words):
            answer_all(log, process)
        else:
            process.join(120)
            assert process.exitcode == 0, f"{command}\nas {' '.join(words)}\n{log.read_text()[-2000:]}"
    finally:
        process.kill()
        process.join()


def run_block(code: str, names: dict) -> None:
    sys.path[0] = os.getcwd()
    exec(code, names)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if "```" in (ROOT / page).read_text()])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_commands_and_python_blocks_run(page, checkout, tmp_path, monkeypatch):
    monkeypatch.chdir(shutil.copytree(checkout, tmp_path / "checkout"))
    dataset = make_minari(tmp_path, monkeypatch) if "import_minari" in (ROOT / page).read_text() else ""
    log, seen = tmp_path / "log", set()

    def filled(text: str) -> str:
        newest = max(Path("runs").glob("*"), key=os.path.getmtime, default=Path("runs/none"))
        for placeholder, value in (
            ("RUN_DIR", str(newest)),
            ("runs/<run>", str(newest)),
            ("mujoco/pusher/expert-v0", dataset),
        ):
            text = text.replace(placeholder, value)
        return text

    for language, block in blocks(page):
        if language == "python":
            recording = dict(states=np.zeros((300, 3)), actions=np.zeros((300, 2)))
            names = dict(np=np, dataset=[0] * 99, **recording, **np.load("my.npz"))
            names["obs"] = np.zeros(35, np.float32) if page == "README.md" else names["obs"]
            code = filled(block)
            process = in_fork(lambda code=code, names=names: run_block(code, names), log)
            process.join(60)
            assert process.exitcode == 0, f"{block}\n{log.read_text()}"
        for command in commands(block) if language in ("", "bash") else ():
            if command not in seen and not any(command.startswith(prefix) for prefix in NOT_RUN):
                run(filled(command), log)
            seen.add(command)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text()):
        if "://" not in target:
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"
