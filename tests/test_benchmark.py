"""The sweep's commands, resuming and failures, with tiny real runs; the tables' statistics by hand."""

import fcntl
import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from test_paws import ROOT, write_file

sys.path.insert(0, str(ROOT / "benchmark"))
import sweep
import tables


# ---- statistics ----
def test_peak_of_the_mean_of_smoothed_curves():
    curves = np.random.default_rng(0).uniform(size=(3, 40))
    smooth = np.array([[curve[i : i + 8].mean() for i in range(33)] for curve in curves])
    best = max(range(33), key=lambda i: smooth[:, i].mean())
    a, b, c = smooth[:, best]
    mean = (a + b + c) / 3
    deviation = (((a - mean) ** 2 + (b - mean) ** 2 + (c - mean) ** 2) / 2) ** 0.5
    assert tables.peak_of_mean(curves) == pytest.approx((mean, 2 * deviation / 3**0.5, best + 7))


def test_peak_of_mean_is_not_the_mean_of_peaks():
    early, late = np.zeros(40), np.zeros(40)
    early[:8], late[-8:] = 1.0, 1.0
    assert tables.peak_of_mean(np.stack((early, late)))[:2] == pytest.approx((0.5, 1.0))
    mean, two_se, last = tables.peak_of_mean(early[None])  # one seed: no standard error
    assert (mean, last) == (1.0, 7) and np.isnan(two_se)
    assert tables.peak_of_mean(np.array([[1.0, 3.0]]))[0] == 2.0  # fewer than 8 evaluations: all of them


def test_the_papers_figures_give_the_papers_averages():
    paper = tables.paper_cells()
    assert len(paper) == 14 * 9 * 2 + 10 * 2 * 2  # two State ablations, on Meta-World
    assert {key[1] for key in paper} == set(tables.METHODS) == set(sweep.METHODS)
    tasks = [task for task in dict.fromkeys(key[0] for key in paper) if task not in tables.LOCOMOTION]
    methods = ("bc", "p_iql", "cpl", "cpl_kl", "preference_transformer", "ipl", "paws_transformer", "paws_mlp")
    for n, expected in (
        (50, [46.2, 48.9, 42.9, 42.1, 50.1, 45.7, 51.6, 50.8]),  # the paper's row "Avg. over tasks"
        (500, [57.3, 70.7, 67.6, 67.3, 73.5, 59.8, 78.2, 78.3]),
    ):
        assert tables.means(paper, tasks, [(m, n) for m in methods]) == pytest.approx(expected)


def write_result(folder, method, task, n_pref, seed, values, column=1, **changes) -> None:
    curve = [[250 * (i + 1), None if column == 2 else v, v if column == 2 else 0.0] for i, v in enumerate(values)]
    result = dict(algorithm=method, task=task, n_pref=n_pref, seed=seed, steps=250 * len(values), curve=curve)
    result |= dict(seconds={"total": 60.0}, git="abc", preset="quick", machine="a machine, 2 threads", **changes)
    folder.mkdir(exist_ok=True)
    (folder / f"{method}__{task}__n{n_pref}__s{seed}.json").write_text(json.dumps(result))


def test_table(tmp_path):
    folder = tmp_path / "results"
    for method, level in (("bc", 0.5), ("paws_mlp", 0.9)):
        for seed, shift in ((1, -0.04), (2, 0.04)):
            for task in ("door-open", "button-press"):
                write_result(folder, method, task, 50, seed, [level + shift] * 10)
    write_result(folder, "bc", "hopper", 500, 1, [410.0] * 10, column=2)
    args = tables.Args(str(folder), markdown=str(tmp_path / "t.md"), csv=str(tmp_path / "t.csv"))
    page = tables.main(args)
    assert (tmp_path / "t.md").read_text() == page + "\n"
    assert "| Task | BC 50 | PAWS (MLP) 50 |" in page
    assert "| Door Open | 50±8 (48±6) | 90±8 (65±15) |" in page  # SE of 46 and 54: 4 sqrt(2) / sqrt(2)
    assert "| Avg. over tasks | 50.0 (58.5) | 90.0 (73.5) |" in page
    assert "| Improvement over BC (%) | 0.0 (0.0) | 80.0 (25.6) |" in page
    assert "on hopper" in page and "| method | 500 preferences | seeds |" in page  # one task: methods in rows
    assert "| BC | 410 (401±22) | 1 |" in page
    assert "Preset quick; seeds per figure: 1, 2 (the paper: 10); commit abc; machine a machine, 2 threads." in page
    lines = (tmp_path / "t.csv").read_text().splitlines()
    assert "quick,door-open,bc,50,success,50.0,8.0,48.0,6.0,2,2500,2000,60.0" in lines
    assert "quick,hopper,bc,500,return,410.0,,401.0,22.0,1,2500,2000,60.0" in lines and len(lines) == 6
    first = tables.main(tables.Args(str(folder), seeds=(1,)))
    assert "| Door Open | 46 (48±6) | 86 (65±15) |" in first and "seeds per figure: 1 (the paper: 10)" in first


def test_table_refuses_what_cannot_be_averaged(tmp_path):
    with pytest.raises(SystemExit, match="no result files"):
        tables.main(tables.Args(str(tmp_path)))
    write_result(tmp_path, "bc", "door-open", 50, 1, [0.5] * 10)
    write_result(tmp_path, "bc", "door-open", 50, 2, [0.5] * 9)
    with pytest.raises(SystemExit, match="different updates"):
        tables.main(tables.Args(str(tmp_path)))
    (tmp_path / "copy.json").write_text((tmp_path / "bc__door-open__n50__s1.json").read_text())
    with pytest.raises(SystemExit, match="two runs of one seed"):
        tables.main(tables.Args(str(tmp_path)))


# ---- sweep ----
def run_sweep(tmp_path, *flags: str, **popen):
    command = [sys.executable, str(ROOT / "benchmark" / "sweep.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, **popen)


def test_dry_run_has_every_method_of_the_table(tmp_path):
    commands = run_sweep(tmp_path, "--dry-run", "--tasks", "door-open", "--seeds", "1", "2").stdout.splitlines()
    assert len(commands) == 9 * 2 * 2
    for method in sweep.COMPARED:
        script = sweep.METHODS[method][0]
        (command,) = (c for c in commands if f"{method}__door-open__n50__s2 " in c)
        assert f"{ROOT / script} --task door-open --n-pref 50 --seed 2" in command and "--eval-workers 1" in command
        assert ("--preset quick" in command) == script.startswith("baselines/")
    assert not list(tmp_path.iterdir())
    paper = run_sweep(tmp_path, "--dry-run", "--preset", "paper", "--seeds", "1").stdout
    assert "--advantage-width" not in paper and paper.count("--preset paper") == 7 * 2
    state = run_sweep(tmp_path, "--dry-run", "--methods", "paws_mlp_state", "--seeds", "1").stdout
    assert state.count("--update state --exp-name paws_mlp_state") == 2
    done = run_sweep(tmp_path, "--methods", "bc", "nonsense")
    assert done.returncode != 0 and done.stderr.startswith("error: unknown ['nonsense']")


def test_sweep_continues_where_it_was_killed(tmp_path):
    """Kill a sweep in its first run: started again it resumes that run, and a third time does nothing."""
    data = write_file(tmp_path / "toy.npz")
    tiny = f"--data {data} --env-id Pendulum-v1 --eval-episodes 1 --no-cuda --batch-size 4"
    flags = ["--methods", "bc", "cpl", "--tasks", "toy", "--n-prefs", "10", "--seeds", "1", "--workers", "1"]
    flags += [f"--flags={tiny} --total-steps 160 --eval-every 20"]
    command = [sys.executable, str(ROOT / "benchmark" / "sweep.py"), *flags]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    folder = tmp_path / "runs" / "sweep" / "quick" / "bc__toy__n10__s1"
    deadline = time.time() + 60
    while time.time() < deadline and not list(folder.glob("*/evals.csv")):
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    assert first.wait() == 143 and not list(folder.glob("*/result.json"))
    (run,) = folder.glob("toy__bc__*")
    left = run_sweep(tmp_path, *flags, "--dry-run").stdout.splitlines()
    assert len(left) == 2 and f"--resume {run} --eval-workers 1" in left[0] and "--resume" not in left[1]

    second = run_sweep(tmp_path, *flags)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "2 runs, 0 of them complete" in second.stdout and "[2/2] cpl__toy__n10__s1: return -" in second.stdout
    assert (run / "result.json").exists() and len(list(folder.glob("toy__bc__*"))) == 1
    collected = json.loads((tmp_path / "benchmark" / "results" / "quick" / "bc__toy__n10__s1.json").read_text())
    assert collected["preset"] == "quick" and collected["machine"] and len(collected["curve"]) == 8
    before = (run / "result.json").stat().st_mtime
    third = run_sweep(tmp_path, *flags)
    assert "2 runs, 2 of them complete" in third.stdout and (run / "result.json").stat().st_mtime == before
    page = tables.main(tables.Args(str(tmp_path / "benchmark" / "results" / "quick")))
    assert "on toy" in page and "| BC | -" in page and "| CPL | -" in page


def test_failures_are_reported_and_locked_runs_left_alone(tmp_path):
    flags = ["--methods", "bc", "--n-prefs", "10", "--seeds", "1", "--workers", "1", "--flags=--data nowhere.npz"]
    done = run_sweep(tmp_path, *flags)
    assert done.returncode == 1
    assert "FAILED bc__door-open__n10__s1: error: nowhere.npz: file: not found" in done.stdout.splitlines()[-1]
    args = sweep.Args(methods=("bc",), n_prefs=(10,), seeds=(1,), runs_dir=str(tmp_path / "runs" / "sweep"))
    (job,) = sweep.all_jobs(args)
    with open(job.folder / "log.txt", "ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        done = run_sweep(tmp_path, *flags)
    assert "bc__door-open__n10__s1: another process is at it" in done.stdout and done.returncode == 0
