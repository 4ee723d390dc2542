"""Runs methods x tasks x budgets x seeds, each as a process of its own; started again, it continues.

    python benchmark/sweep.py --preset quick --workers 2            # the paper's Meta-World table, one seed
    python benchmark/sweep.py --seeds 1 2 3 --dry-run               # what is left to run, and the hours it takes
    python benchmark/sweep.py --study n-eff                         # an ablation: n-eff | segment-length | ...
    sbatch --array 0-9 --wrap 'python benchmark/sweep.py --shard $SLURM_ARRAY_TASK_ID/10 --workers 1'
    python benchmark/sweep.py --ray auto                            # on a Ray cluster (requirements-cluster.txt)

A run has a folder RUNS_DIR/PRESET/<name>/ with sweep.json (flags, commit), log.txt and its run directory. A run that is
complete is not run again, an unfinished one is resumed. Every result.json is copied to RESULTS/PRESET/<name>.json, with
preset, machine and commit, where benchmark/tables.py reads it. After a change of code use another --runs-dir. The
results of docs/results.md are in benchmark/results.
"""

import fcntl
import hashlib
import json
import os
import platform
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
import zlib
from collections import Counter, defaultdict
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))
import paper

# ---- what is run ----
METHODS = {  # name in tables: script, flags that make the method
    "bc": ("baselines/bc.py", ""),
    "p_iql": ("baselines/p_iql.py", ""),
    "cpl": ("baselines/cpl.py", ""),
    "cpl_kl": ("baselines/cpl_kl.py", ""),
    "preference_transformer": ("baselines/preference_transformer.py", ""),
    "ipl": ("baselines/ipl.py", ""),
    "dppo": ("baselines/dppo.py", ""),
    "paws_transformer": ("paws_transformer.py", ""),
    "paws_mlp": ("paws_mlp.py", ""),
    "paws_transformer_chi2": ("paws_transformer.py", "--trust-region chi2"),
    "paws_mlp_chi2": ("paws_mlp.py", "--trust-region chi2"),
    "paws_mlp_starts": ("paws_mlp.py", "--trust-region chi2 --cover-starts"),
    "paws_transformer_state": ("paws_transformer.py", "--update state --no-state-context"),
    "paws_transformer_state_context": ("paws_transformer.py", "--update state --state-context"),
    "paws_mlp_state": ("paws_mlp.py", "--update state"),
    "dppo_defaults": (  # its authors' code
        "baselines/dppo.py",
        "--conservativeness 1 --smoothness 0 --smoothness-shift 0 --dropout 0",
    ),
    "preference_transformer_250": ("baselines/preference_transformer.py", "--return-range 250"),  # the other reading
    "bc_preferred": ("baselines/bc.py", "--data-used preferred"),
    # Oracles, which tell what was possible: they know which policy made a segment, or the labeler's own scores.
    "bc_best": ("baselines/bc.py", "--data-used best"),
    "paws_oracle": ("paws_mlp.py", "--advantage-from oracle"),
}
COMPARED = (*paper.METHODS, "paws_mlp_chi2", "dppo_defaults", "bc_best", "paws_oracle")
PRESETS = {  # flags of each script; its own defaults are the paper's
    "paper": {},
    "quick": {  # 6,000 updates and 20 evaluations; sized for one thread
        "paws_mlp": "--advantage-width 128 --advantage-layers 2 --advantage-learning-rate 1e-3 --advantage-steps 1000",
        "paws_transformer": "--advantage-width 128 --advantage-layers 2 --advantage-heads 4 --advantage-steps 1000",
        "bc": "--batch-size 256",
        "cpl": "--batch-size 8",
        "cpl_kl": "--batch-size 8",
        "p_iql": "--batch-size 16 --transitions 256",
        "preference_transformer": "--batch-size 256 --reward-batch-size 16 --reward-steps 400",
        "ipl": "--batch-size 4 --transitions 256",
        "dppo": "--batch-size 16 --predictor-steps 240 --predictor-batch-size 16 --window-stride 8 "
        "--conservativeness 0.5 --smoothness 1 --smoothness-shift 20 --dropout 0.25",
    },
}
QUICK = "--total-steps 6000 --eval-every 300"  # of every method in preset quick
NOISY_WITH_50 = ("paws_mlp", "paws_transformer", "bc", "preference_transformer", "p_iql")  # their further seeds first
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)  # n_eff; 0.1 is the paper's, so paws_mlp itself
N_EFF_TASKS = ("peg-insert-side", "sweep-into", "drawer-open")
WEIGHTS_TASKS = ("drawer-open", "peg-insert-side", "sweep-into", "plate-slide", "door-open", "button-press")
COUNTS = (20, 50, 100, 200, 500)  # preferences, on the tasks of the study of weights
LENGTHS = (1, 2, 4, 8, 16, 32, 64)
HUMAN_TASKS = ("button-press", "door-open")
THREADS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []  # Linux: a run is pinned to one


@dataclass
class Args:
    preset: Literal["quick", "paper"] = "quick"  # quick: sized for a CPU; paper: the scripts' defaults
    # an ablation instead of the table of methods
    study: Literal["", "n-eff", "segment-length", "update-segment-length", "state", "human", "weights", "starts"] = ""
    methods: tuple[str, ...] = COMPARED  # which methods (without --study)
    tasks: tuple[str, ...] = ()  # which tasks [the ten of Meta-World, or the study's]
    n_prefs: tuple[int, ...] = ()  # which numbers of preferences [500 50, or the study's]
    seeds: tuple[int, ...] = ()  # which seeds [1; studies 1 2 3]
    workers: int = len(THREADS) or 1  # runs at the same time, one thread each
    shard: str = "0/1"  # i/n: every n-th run, from the i-th (0 to n-1), for a job array
    ray: str = ""  # address of a Ray cluster, on whose nodes this checkout and --runs-dir have the same paths
    flags: str = ""  # further flags of every run, as in --flags="--total-steps 1000"; the run's name carries them
    labels_dir: str = "labels"  # study human: exports of label.py, LABELS_DIR/<task>/<labeler>.npz
    runs_dir: str = "runs/sweep"  # parent of the runs' folders
    results: str = "results"  # parent of the folder of collected results, named as the preset
    dirty: bool = False  # run although the checkout has uncommitted code, which no commit can name
    dry_run: bool = False  # print the commands that are left to run and the hours they take, and end


@dataclass(frozen=True)
class Cell:
    method: str
    task: str
    n_pref: int
    seed: int
    options: tuple[tuple[str, str], ...] = ()  # further flags of a study: (("n-eff", "0.3"), ...)
    data: str = ""  # preference file, if not data/<task>.npz
    advantage_from: str = ""  # name of the run whose advantage model this one takes
    flags: str = ""

    @property
    def exp_name(self) -> str:
        return self.method + "".join(f"_{key}-{value}" for key, value in self.options)

    @property
    def name(self) -> str:
        parts = [self.exp_name, self.task, f"n{self.n_pref}", f"s{self.seed}"]
        if self.data:
            parts.append(Path(self.data).stem)
        if self.flags:
            text = re.sub(r"[^\w.]+", "-", self.flags).strip("-")
            parts.append(text if len(text) < 60 else f"{text[:50]}-{hashlib.sha1(text.encode()).hexdigest()[:8]}")
        return "__".join(parts)


def study_cells(args: Args) -> list[Cell]:
    """The runs of a study, those that others take the advantage model from included."""
    seeds, cells = args.seeds or (1, 2, 3), []

    def grid(tasks, n_prefs):
        return product(seeds, args.n_prefs or n_prefs, args.tasks or tasks)

    def reusing(method, task, n, seed, **options):  # differs from `method` after its advantage model alone
        base = Cell(method, task, n, seed, flags=args.flags)
        return Cell(
            method, task, n, seed,
            tuple((key.replace("_", "-"), str(value)) for key, value in options.items()),
            advantage_from=base.name, flags=args.flags,
        )  # fmt: skip

    if args.study == "n-eff":
        for seed, n, task in grid(N_EFF_TASKS, (500, 50)):
            cells += [Cell(method, task, n, seed) for method in ("bc", "paws_mlp")]
            cells += [reusing("paws_mlp", task, n, seed, n_eff=share) for share in SHARES if share != 0.1]
    elif args.study == "weights":
        for seed, n, task in grid(WEIGHTS_TASKS, (50, 500)):
            names = ("paws_mlp", "paws_mlp_chi2", "bc", "bc_preferred", "bc_best", "paws_oracle")
            cells += [Cell(method, task, n, seed) for method in names]  # KL with n_eff 10 %, chi2 with 30 %
            cells += [reusing("paws_mlp", task, n, seed, n_eff=share) for share in (0.2, 0.3, 0.5)]
            for share in (0.1, 0.2, 0.5):
                cells.append(reusing("paws_mlp", task, n, seed, trust_region="chi2", n_eff=share))
    elif args.study == "starts":  # both have the same advantage model, learned with the same seed
        for seed, n, task in grid(WEIGHTS_TASKS, (50, 500)):
            cells += [Cell(m, task, n, seed, (("n-eff", "0.3"),)) for m in ("paws_mlp_chi2", "paws_mlp_starts")]
    elif args.study == "state":
        names = ("paws_mlp", "paws_transformer", "paws_mlp_state", "paws_transformer_state")
        for seed, n, task in grid(paper.METAWORLD, (500, 50)):
            cells += [Cell(method, task, n, seed) for method in (*names, "paws_transformer_state_context")]
    elif args.study == "update-segment-length":
        for seed, n, task in grid(paper.METAWORLD, (500,)):
            cells.append(Cell("paws_transformer", task, n, seed))
            cells += [reusing("paws_transformer", task, n, seed, update_segment_length=k) for k in (32, 16, 8)]
    elif args.study == "segment-length":
        for seed, task, length in product(seeds, args.tasks or paper.METAWORLD, LENGTHS):
            data = str(Path(args.runs_dir, "data", task, f"length{length}.npz").resolve())
            for method in ("paws_mlp", "paws_mlp_state"):
                cells.append(Cell(method, task, 640_000 // length, seed, data=data))
    elif args.study == "human":
        methods = [method for method in paper.METHODS if method != "dppo"]
        for task in args.tasks or HUMAN_TASKS:
            folder = Path(args.labels_dir, task)
            files = []
            for path in sorted(set(folder.glob("*.npz")) - {folder / "export.npz"}):  # that one is of everybody
                with np.load(path, allow_pickle=False) as file:
                    answers = len(file["prefs"])
                if answers >= 50:
                    files.append(path)
                else:
                    print(f"{path}: left out, it has {answers} answers of 50")
            if not files:
                make = f"data_gen/label.py --task {task} --labeler NAME --export --out {folder}/NAME.npz"
                sys.exit(f"error: {folder}: no labeler's file of 50 answers; make one for each with {make}")
            for path in files:  # one run per labeler, whose seed no other labeler's file changes
                seed = zlib.crc32(path.stem.encode())
                cells += [Cell(method, task, 50, seed, data=str(path.resolve())) for method in methods]
    return cells


def all_cells(args: Args) -> list[Cell]:
    """First seed: all tasks with 500, then 50 preferences. Then further seeds, first where one seed says little."""
    unknown = [name for name in args.methods if name not in METHODS]
    if unknown:
        sys.exit(f"error: --methods {' '.join(unknown)}: choose from {', '.join(METHODS)}")
    index, _, count = args.shard.partition("/")
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        sys.exit(f"error: --shard {args.shard}: give i/n with i from 0 to n-1, for example 0/4")
    if args.study:
        cells = study_cells(args)
    else:
        seeds, n_prefs = args.seeds or (1,), args.n_prefs or (500, 50)
        methods = [m for m in args.methods if (args.preset, m) != ("paper", "dppo_defaults")]  # there it is dppo itself
        grid = product(seeds, n_prefs, args.tasks or paper.METAWORLD, methods)
        cells = [Cell(method, task, n, seed) for seed, n, task, method in grid]

        def later(cell: Cell) -> int:
            return (cell.seed != seeds[0]) * (1 if cell.n_pref == 50 and cell.method in NOISY_WITH_50 else 2)

        cells.sort(key=later)
    cells = list(dict.fromkeys(replace(cell, flags=args.flags) for cell in cells))
    shard_of, load = {}, [0] * int(count)
    for family, size in Counter(c.advantage_from or c.name for c in cells).items():  # one advantage model, one shard
        shard_of[family] = load.index(min(load))
        load[shard_of[family]] += size
    return [c for c in cells if shard_of[c.advantage_from or c.name] == int(index)]


def write_shorter_segments(path: Path, task: str, length: int) -> None:
    """A window of each segment of data/<task>.npz and 640,000 / length pairs, labelled by the expert's likelihood."""
    rng = np.random.default_rng(length)
    with np.load(ROOT / "data" / f"{task}.npz", allow_pickle=False) as file:
        obs, act, logp = (file[key] for key in ("obs", "act", "expert_logp"))
    rows = np.arange(len(obs))[:, None]
    steps = rng.integers(obs.shape[1] - length + 1, size=len(obs))[:, None] + np.arange(length)  # (K, length)
    first = rng.integers(len(obs), size=640_000 // length)
    second = (first + rng.integers(1, len(obs), size=len(first))) % len(obs)
    score = logp[rows, steps].sum(1)
    prefs = np.where((score[first] >= score[second])[:, None], np.c_[first, second], np.c_[second, first])
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{uuid.uuid4()}.npz")  # several machines may write it
    np.savez_compressed(temporary, obs=obs[rows, steps], act=act[rows, steps], prefs=prefs, format_version=1)
    os.replace(temporary, path)


# ---- one run ----
@dataclass
class Setup:
    """What all runs of a sweep share."""

    preset: str
    runs: Path  # RUNS_DIR/PRESET
    commit: str


def flags_of(cell: Cell, setup: Setup) -> list[str]:
    script, method_flags = METHODS[cell.method]
    flags = ["--task", cell.task, "--n-pref", str(cell.n_pref), "--seed", str(cell.seed), "--exp-name", cell.exp_name]
    preset = f"{QUICK if setup.preset == 'quick' else ''} {PRESETS[setup.preset].get(Path(script).stem, '')}"
    flags += shlex.split(preset) + shlex.split(method_flags)
    if setup.preset == "quick" and cell.task in paper.METAWORLD:
        flags.append("--no-eval-return")
    for key, value in cell.options:
        flags += [f"--{key}", value]
    flags += ["--data", cell.data] if cell.data else []
    length = re.fullmatch(r"length(\d+)", Path(cell.data).stem)
    if length:  # as many steps in each update of the advantage model, whatever the length
        flags += ["--advantage-batch-size", str(1024 // int(length[1]))]
    if cell.advantage_from:
        base = finished(setup.runs / cell.advantage_from)
        flags += ["--advantage-from", str(base[0] if base else setup.runs / cell.advantage_from / "...")]
    return flags + shlex.split(cell.flags)


def read_json(path: Path) -> dict:
    """{} if it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def finished(folder: Path) -> tuple[Path, dict] | None:
    """Run directory and result of a complete run."""
    found = ((path.parent, read_json(path)) for path in sorted(folder.glob("*/result.json")))
    return next(((run, result) for run, result in found if "curve" in result), None)


def complete_runs(runs_dir: str, preset: str, method: str, task: str, n_pref: int):
    """Sweep's folder, run directory and result of every seed, without those that have further flags."""
    for folder in sorted(Path(runs_dir, preset).glob(f"{method}__{task}__n{n_pref}__s*")):
        if folder.name.rpartition("__s")[2].isdigit() and finished(folder):
            yield folder, *finished(folder)


def collected(cell: Cell, setup: Setup, results: Path) -> bool:
    """The same commit was run on another machine, whose result is here without its run directory."""
    result = read_json(results / f"{cell.name}.json")
    return not (setup.runs / cell.name).exists() and "curve" in result and result.get("commit") == setup.commit


def command(cell: Cell, setup: Setup, anew: bool = False) -> list[str]:
    """Resumes what the same flags and commit have left a checkpoint of."""
    folder, flags = setup.runs / cell.name, flags_of(cell, setup)
    start = [sys.executable, str(ROOT / METHODS[cell.method][0])]
    left = sorted(folder.glob("*/checkpoint.pt"))
    before = read_json(folder / "sweep.json")
    if left and not anew and (before.get("flags"), before.get("commit")) == (flags, setup.commit):
        return [*start, "--resume", str(left[-1].parent), "--eval-workers", "1"]
    return [*start, *flags, "--runs-dir", str(folder), "--eval-workers", "1"]


BUSY = "another sweep is at it"
LAUNCH = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL: the run ends with the sweep, however that ends
    if sys.argv[1]:
        os.sched_setaffinity(0, [int(sys.argv[1])])
os.execv(sys.argv[2], sys.argv[2:])
"""


def execute(arguments: list[str], log, cpu: str, stop: threading.Event) -> int:
    """Exit status of a run, which `stop` ends."""
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, cpu, *arguments],
        cwd=ROOT, env={**os.environ, **threads}, stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip
    try:
        while process.poll() is None and not stop.wait(0.1):
            pass
    finally:
        try:
            os.killpg(process.pid, signal.SIGTERM)  # with its evaluation processes
        except ProcessLookupError:
            pass
    return process.wait()


def run_cell(cell: Cell, setup: Setup, patient: bool, cpu: str = "", stop: threading.Event | None = None) -> dict:
    """Runs a cell unless it is complete, a second time if it fails -> its result, or {"problem": why there is none}."""
    stop = stop or threading.Event()
    folder = setup.runs / cell.name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "ab") as log:
        while True:
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not patient or stop.wait(0.5):
                    return {"problem": BUSY}
        if cell.advantage_from and not finished(setup.runs / cell.advantage_from):
            return {"problem": f"needs {cell.advantage_from}, which is not complete"}
        anew = False
        for _ in range(2):
            if finished(folder) or stop.is_set():
                break
            if commit(True) != setup.commit:
                return {"problem": f"the checkout is no longer at {setup.commit}; start the sweep again"}
            arguments = command(cell, setup, anew)
            if "--resume" not in arguments:
                for run in folder.glob("*/"):
                    shutil.rmtree(run)
            sweep = {"flags": flags_of(cell, setup), "commit": setup.commit, "machine": machine()}
            write(folder / "sweep.json", json.dumps(sweep))
            execute(arguments, log, cpu, stop)
            anew = "--resume" in arguments  # its checkpoint may be what is wrong
    if not finished(folder):
        return {"problem": last_error(folder / "log.txt")}
    sweep = read_json(folder / "sweep.json")
    added = {"method": cell.method, "options": dict(cell.options), "data": Path(cell.data).stem, "preset": setup.preset}
    return finished(folder)[1] | added | {"flags": cell.flags, **{k: sweep.get(k) for k in ("commit", "machine")}}


def last_error(log: Path) -> str:
    """The last line of a log that names an error, without tyro's frame; or the last line."""
    lines = [line.strip("│╭╮╰╯─ ") for line in re.split(r"[\r\n]", log.read_text(errors="replace"))]
    lines = [line for line in lines if line] or ["no output"]
    return next((line for line in reversed(lines) if re.search("error|unrecognized", line, re.I)), lines[-1])


def write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


# ---- the sweep ----
def machine() -> str:
    """For example "AMD EPYC 7B13, 2 threads"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} threads"


def commit(dirty_allowed: bool) -> str:
    """Of this checkout, whose code and data must be committed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout

    try:
        name = git("rev-parse", "--short=10", "HEAD").strip()
        changed = git("diff", "--name-only", "HEAD", "--", "*.py", "*.npz").split()
        changed += git("ls-files", "--others", "--exclude-standard", "--", "baselines/*.py").split()
    except (OSError, subprocess.CalledProcessError):
        name, changed = "unknown", ["no git checkout"]
    if changed and not dirty_allowed:
        sys.exit(f"error: {ROOT}: uncommitted code ({', '.join(changed[:3])}): commit it, or run with --dirty")
    return f"{name}-dirty" if changed else name


def expected_seconds(results: Path) -> dict[str, float]:
    """Mean of the measured seconds of each method that has results, here or else in benchmark/results."""
    expected = {}
    for folder in (ROOT / "benchmark" / "results" / results.name, results):
        seconds = defaultdict(list)
        for path in folder.glob("*.json"):
            result = read_json(path)
            if "curve" in result and not result.get("flags"):
                seconds[result["method"]].append(result["seconds"]["total"])
        expected |= {method: float(np.mean(values)) for method, values in seconds.items()}
    return expected


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def print_plan(cells: list[Cell], setup: Setup, results: Path, workers: int) -> None:
    for cell in cells:
        print(shlex.join(command(cell, setup)))
    seconds = expected_seconds(results)
    unknown = [cell.method for cell in cells if cell.method not in seconds]
    total = sum(seconds.get(cell.method, 0.0) for cell in cells)
    print(
        f"# {len(cells)} runs, {total / 3600:.1f} h of one thread, {total / 3600 / workers:.1f} h with {workers}",
        end="",
    )
    names = ", ".join(dict.fromkeys(unknown))
    print(f", without {len(unknown)} runs of methods that {results} has no time of: {names}" if unknown else "")


def outcomes(cells: list[Cell], setup: Setup, args: Args, patient: bool):
    """Runs the cells and yields each with what `run_cell` returned, as they end."""
    if args.ray:
        import ray

        remote = ray.remote(num_cpus=1, max_retries=3)(run_cell)
        waiting = {remote.remote(cell, setup, patient): cell for cell in cells}
        while waiting:
            (done, *_), _ = ray.wait(list(waiting))
            try:
                result = ray.get(done)
            except ray.exceptions.RayError as problem:  # its worker died more often than it is retried
                result = {"problem": str(problem).partition("\n")[0]}
            yield waiting.pop(done), result
        return
    stop, cpus = threading.Event(), queue.SimpleQueue()
    first = int(args.shard.partition("/")[0]) * args.workers  # shards on one machine take different cores
    for i in range(first, first + args.workers):
        cpus.put(str(THREADS[i % len(THREADS)]) if THREADS else "")

    def pinned(cell: Cell) -> dict:
        cpu = cpus.get()
        try:
            return run_cell(cell, setup, patient, cpu, stop)
        finally:
            cpus.put(cpu)

    pool = ThreadPoolExecutor(args.workers)
    try:
        waiting = {pool.submit(pinned, cell): cell for cell in cells}
        while waiting:
            for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(done), done.result()
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def summary(result: dict) -> str:
    figures = {"success": result["success_peak"], "return": result["return_peak"]}
    text = ", ".join(f"{key} {value:.2f}" for key, value in figures.items() if value is not None)
    return f"{text or 'not evaluated'}, {duration(result['seconds']['total'])}"


def end_at_signals() -> None:
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

    def end(number: int, _) -> None:
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        print("stopped; the same command continues", flush=True)
        sys.exit(128 + number)

    for number in signals:
        signal.signal(number, end)


def main(args: Args) -> int:
    if args.workers < 1:
        sys.exit(f"error: --workers {args.workers}: at least 1")
    runs = Path(args.runs_dir).resolve() / args.preset
    results = Path(args.results, args.preset).resolve()
    cells = all_cells(args)
    setup = Setup(args.preset, runs, commit(args.dirty or args.dry_run))
    for cell in cells:
        before = read_json(runs / cell.name / "sweep.json").get("flags")
        if finished(runs / cell.name) and before != flags_of(cell, setup):
            sys.exit(f"error: {runs / cell.name} was run with other flags ({shlex.join(before or [])}): remove it")
    done = [cell for cell in cells if finished(runs / cell.name)]
    elsewhere = [cell for cell in cells if collected(cell, setup, results)]
    needed = {cell.advantage_from for cell in cells if cell not in done and cell not in elsewhere}
    left = [c for c in cells if c not in done and (c not in elsewhere or c.name in needed)]
    if args.dry_run:
        print_plan(left, setup, results, args.workers)
        return 0
    end_at_signals()
    if args.ray:
        import ray

        ray.init(address=args.ray, log_to_driver=False, logging_level="warning")
    print(f"{len(cells)} runs, {len(cells) - len(left)} of them complete, commit {setup.commit}", flush=True)
    older = [cell for cell in done if read_json(runs / cell.name / "sweep.json").get("commit") != setup.commit]
    if older:
        print(f"{len(older)} of them are of other commits; for new ones give another --runs-dir", flush=True)
    results.mkdir(parents=True, exist_ok=True)
    for cell in left if args.study == "segment-length" else []:
        path, source = Path(cell.data), ROOT / "data" / f"{cell.task}.npz"
        if not path.exists() or path.stat().st_mtime < source.stat().st_mtime:
            write_shorter_segments(path, cell.task, 640_000 // cell.n_pref)
    measured = expected_seconds(results)
    guess = np.mean(list(measured.values())) if measured else 1.0
    work = {cell: measured.get(cell.method, guess) for cell in left}  # what is left; only proportions matter
    all_work, begun, failed, ended = sum(work.values()), time.monotonic(), {}, 0
    # Complete runs are collected at once; runs that others take the advantage model from come before those.
    waves = [done, *([c for c in left if bool(c.advantage_from) == b] for b in (0, 1))]
    for wave in waves:
        for patient in (False, True):  # what another sweep is at is left to that, and collected in the end
            busy = []
            for cell, result in outcomes(wave, setup, args, patient):
                if result.get("problem") == BUSY:
                    busy.append(cell)
                    continue
                if "problem" in result:
                    failed[cell.name] = result["problem"]
                else:
                    write(results / f"{cell.name}.json", json.dumps(result) + "\n")
                if work.pop(cell, None):
                    ended += 1
                    rest = sum(work.values())
                    to_go = duration((time.monotonic() - begun) * rest / (all_work - rest))
                    text = f"FAILED: {result['problem']}" if "problem" in result else summary(result)
                    print(f"[{ended}/{len(left)}] {cell.name}: {text}; {to_go} left", flush=True)
            wave = busy
    for name, problem in failed.items():
        print(f"FAILED {name}: {problem} (see {runs / name / 'log.txt'})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args, description=__doc__)))
