"""Runs methods x tasks x budgets x seeds, each as a process of its own; started again, it continues.

    python benchmark/sweep.py --preset quick --tasks door-open --seeds 1 2 --workers 2

A run has a folder RUNS_DIR/PRESET/METHOD__TASK__nN__sSEED/ with its log.txt and its run directory. A run that has a
result.json is not run again, an unfinished one is resumed. Every result.json is copied, with preset and machine, to
RESULTS_DIR/PRESET/METHOD__TASK__nN__sSEED.json, which benchmark/tables.py reads.
"""

import fcntl
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parents[1]
BASELINES = ("bc", "p_iql", "cpl", "cpl_kl", "preference_transformer", "ipl", "dppo")
SMALL_TRANSFORMER = "--advantage-width 128 --advantage-layers 2 --advantage-heads 4".split()
METHODS = {  # script, and its flags in each preset
    **{name: (f"baselines/{name}.py", {p: ["--preset", p] for p in ("paper", "quick")}) for name in BASELINES},
    "paws_transformer": ("paws_transformer.py", {"paper": [], "quick": SMALL_TRANSFORMER}),
    "paws_mlp": ("paws_mlp.py", {"paper": [], "quick": []}),
}
COMPARED = tuple(METHODS)
for name in ("paws_transformer", "paws_mlp"):  # the "State" ablation: weights of single steps
    script, flags = METHODS[name]
    state = ["--update", "state", "--exp-name", f"{name}_state"]
    METHODS[f"{name}_state"] = (script, {preset: [*flags[preset], *state] for preset in flags})


@dataclass
class Args:
    preset: str = "quick"
    """quick: sized for a CPU; paper: the published numbers of updates and batch sizes"""
    methods: tuple[str, ...] = COMPARED
    """which methods; also paws_mlp_state and paws_transformer_state"""
    tasks: tuple[str, ...] = ("door-open",)
    """which tasks"""
    n_prefs: tuple[int, ...] = (50, 500)
    """which numbers of preferences"""
    seeds: tuple[int, ...] = (1, 2)
    """which seeds"""
    workers: int = os.cpu_count() or 1
    """runs at the same time, one thread each"""
    flags: str = ""
    """further flags of every run, as in --flags="--total-steps 1000" (then use another --runs-dir and --results-dir)"""
    runs_dir: str = "runs/sweep"
    """parent of the runs' folders"""
    results_dir: str = "benchmark/results"
    """parent of the collected result files"""
    dry_run: bool = False
    """print the commands that are left to run, and end"""


@dataclass
class Job:
    method: str
    task: str
    n_pref: int
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return self.folder.name

    def result(self) -> Path | None:
        return next(self.folder.glob("*/result.json"), None)

    def command(self, preset: str, flags: str) -> list[str]:
        script, preset_flags = METHODS[self.method]
        start = [sys.executable, str(ROOT / script)]
        unfinished = sorted(self.folder.glob("*/args.json"))
        if unfinished:  # its other flags are in there
            return [*start, "--resume", str(unfinished[-1].parent), "--eval-workers", "1"]
        what = ["--task", self.task, "--n-pref", str(self.n_pref), "--seed", str(self.seed)]
        where = ["--runs-dir", str(self.folder), "--eval-workers", "1"]
        return [*start, *what, *preset_flags[preset], *where, *shlex.split(flags)]


def all_jobs(args: Args) -> list[Job]:
    """Seed by seed, so that a table of few seeds is complete early."""
    unknown = [name for name in args.methods if name not in METHODS]
    if unknown or args.preset not in ("paper", "quick"):
        sys.exit(f"error: unknown {unknown or args.preset}: methods are {', '.join(METHODS)}; presets paper and quick")
    folder = Path(args.runs_dir).resolve() / args.preset
    cells = product(args.seeds, args.tasks, args.n_prefs, args.methods)
    return [Job(m, t, n, s, folder / f"{m}__{t}__n{n}__s{s}") for s, t, n, m in cells]


def machine() -> str:
    """For example "AMD EPYC 7B13, 2 threads"."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} threads"


def collect(job: Job, args: Args) -> dict:
    """Copies a finished run's result.json, with what it cannot know, to the results."""
    path = Path(args.results_dir) / args.preset / f"{job.name}.json"
    result = {**json.loads(job.result().read_text()), "preset": args.preset, "machine": machine()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(result) + "\n")
    os.replace(temporary, path)
    return result


def start(job: Job, args: Args) -> subprocess.Popen | None:
    """The process keeps the log locked while it lives: no other sweep starts or resumes the same run."""
    job.folder.mkdir(parents=True, exist_ok=True)
    threads = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    with open(job.folder / "log.txt", "ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        command, environment = job.command(args.preset, args.flags), {**os.environ, **threads}
        # its own session: its evaluation process, which holds the log too, can be ended with it
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)


def last_line(job: Job) -> str:
    lines = (job.folder / "log.txt").read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def minutes(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def main(args: Args) -> int:
    jobs = all_jobs(args)
    waiting = [job for job in jobs if job.result() is None]
    if args.dry_run:
        for job in waiting:
            print(shlex.join(job.command(args.preset, args.flags)))
        return 0
    for job in jobs:
        if job not in waiting:
            collect(job, args)
    finished, failed, busy, running, times = len(jobs) - len(waiting), [], [], {}, []
    print(f"{len(jobs)} runs, {finished} of them complete, {args.workers} at a time", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while waiting or running:
            while waiting and len(running) < args.workers:
                job = waiting.pop(0)
                process = start(job, args)
                if process is None:
                    busy.append(job)
                else:
                    running[job.name] = (job, process, time.monotonic())
            time.sleep(0.2)
            for job, process, since in list(running.values()):
                if process.poll() is None:
                    continue
                del running[job.name]
                times.append(time.monotonic() - since)
                if process.returncode == 0 and job.result():
                    finished += 1
                    result = collect(job, args)
                    peak = result["success_peak"]
                    text = f"return {result['return_peak']}" if peak is None else f"success {peak:.0%}"
                else:
                    failed.append(job)
                    text = f"FAILED: {last_line(job)}"
                now = time.monotonic()
                mean = sum(times) / len(times)
                left = len(waiting) * mean + sum(max(0.0, mean - (now - begun)) for _, _, begun in running.values())
                left = minutes(left / max(1, min(args.workers, len(waiting) + len(running))))
                print(f"[{finished}/{len(jobs)}] {job.name}: {text}, {minutes(times[-1])}; {left} left", flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command continues")
        return 130
    finally:
        for _, process, _ in running.values():
            os.killpg(process.pid, signal.SIGTERM)
        for _, process, _ in running.values():
            process.wait()
    for job in busy:
        print(f"{job.name}: another process is at it; left to that")
    for job in failed:
        print(f"FAILED {job.name}: {last_line(job)} (see {job.folder / 'log.txt'})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
