"""What every script promises: same seed, same bits; exact resume; evaluation that changes nothing; one-line errors."""

import json
import multiprocessing
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from conftest import ROOT, load_script, only_run, write_preferences
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_shared import SCRIPTS

paws = load_script("paws_mlp")
NAMES = [path.stem for path in SCRIPTS]
SMALL = {  # flags that make a run of each script short, and its phases
    "paws_mlp": ("--advantage-width 32 --advantage-layers 1 --advantage-steps 60 --stop-accuracy 1.1", "advantage"),
    "paws_transformer": (
        "--advantage-width 16 --advantage-layers 1 --advantage-heads 2 --advantage-steps 40 --stop-accuracy 1.1",
        "advantage",
    ),
    "bc": ("--batch-size 32", None),
    "cpl": ("--batch-size 4", None),
    "cpl_kl": ("--batch-size 4", None),
    "p_iql": ("--batch-size 4 --critic-width 16 --reward-width 16", None),
    "ipl": ("--batch-size 4 --critic-width 16", None),
    "preference_transformer": (
        "--batch-size 16 --reward-batch-size 4 --reward-steps 30 --critic-width 16 --reward-width 16 --reward-heads 2",
        "reward",
    ),
    "dppo": (
        "--batch-size 4 --predictor-batch-size 4 --predictor-steps 30 --predictor-width 16 --predictor-heads 2",
        "predictor",
    ),
}


def flags_of(name: str, toy: Path, steps: int = 40) -> str:
    return f"--data {toy} --no-eval --no-cuda --total-steps {steps} --eval-every 20 {SMALL[name][0]}"


def run_in_process(name: str, flags: str) -> dict:
    """The result of a script's main, without the seconds that a process of its own takes to import torch."""
    module = load_script(name)
    return module.main(tyro.cli(module.Args, args=flags.split()))


@pytest.mark.parametrize("name", NAMES)
def test_help_tells_the_method(name, monkeypatch, capsys):
    path = next(path for path in SCRIPTS if path.stem == name)
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(path), run_name="__main__")
    text = capsys.readouterr().out
    assert load_script(name).__doc__.partition("\n")[0] in text
    assert f"python {path.relative_to(ROOT)} --task door-open" in text and "--n-pref" in text


def model_of(folder: Path) -> dict:
    return torch.load(folder / "model.pt", weights_only=True)


def equal(one: dict, two: dict) -> bool:
    """The same learned tensors."""
    modules = [key for key, value in one.items() if isinstance(value, dict) and key != "args"]
    assert "policy" in modules
    return all(torch.equal(one[m][k], two[m][k]) for m in modules for k in one[m])


def main_in_process(toy: Path, runs: Path, **changes) -> tuple[dict, Path]:
    flags = dict(
        data=str(toy), env_id="Pendulum-v1", n_eff=0.2, advantage_width=32, advantage_layers=1, advantage_steps=60,
        total_steps=24, eval_every=8, eval_episodes=2, eval_workers=1, cuda=False, runs_dir=str(runs),
    )  # fmt: skip
    result = paws.main(paws.Args(**{**flags, **changes}))
    return result, Path(changes.get("resume") or only_run(runs))


# ---- the run directory ----
def test_copied_out_alone_it_runs(toy, tmp_path):
    shutil.copy(ROOT / "paws_mlp.py", tmp_path)
    shutil.copy(toy, tmp_path / "mine.npz")
    flags = (
        "--data mine.npz --env-id Pendulum-v1 --n-pref 18 --n-eff 0.2 --advantage-steps 50 --total-steps 30 --no-cuda"
    )
    flags += " --eval-every 10 --eval-episodes 3 --eval-workers 2 --advantage-width 32 --advantage-layers 1"
    command = [sys.executable, "paws_mlp.py", *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith("mine__paws_mlp__n18__s1__")
    result = json.loads((folder / "result.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result
    keys = "algorithm task n_pref seed steps n_segments lambda n_eff n_eff_target kl pref_acc_train pref_acc_val"
    keys += " success_peak success_last return_peak return_last curve seconds versions"
    assert list(result) == keys.split()
    assert list(result["seconds"]) == ["data", "utility", "policy", "evaluation", "total"]
    assert list(result["versions"]) == ["python", "torch", "numpy", "mujoco", "metaworld", "gymnasium"]
    assert result["n_segments"] == 36 and result["n_eff"] == pytest.approx(7.2, rel=1e-6)
    assert [row[0] for row in result["curve"]] == [10, 20, 30] and result["success_peak"] is None
    assert result["return_last"] == pytest.approx(np.mean([row[2] for row in result["curve"]]))
    lines = (folder / "evals.csv").read_text().splitlines()
    assert lines[0] == "step,success_rate,episodic_return,seconds" and len(lines) == 4
    assert json.loads((folder / "args.json").read_text())["n_pref"] == 18
    assert not (folder / "checkpoint.pt").exists()
    events = EventAccumulator(str(folder)).Reload()
    tags = "losses/advantage losses/policy charts/pref_acc_train charts/pref_acc_val charts/SPS eval/episodic_return"
    tags += " weights/lambda weights/n_eff weights/kl weights/max"
    assert set(events.Tags()["scalars"]) == set(tags.split())
    assert events.Scalars("charts/pref_acc_val")[-1].value == pytest.approx(result["pref_acc_val"])
    assert model_of(folder)["policy"].keys() == paws.Policy(3, 1).state_dict().keys()


def test_smoothed_over_eight_evaluations(toy, tmp_path):
    result, _ = main_in_process(toy, tmp_path / "runs", eval_every=2)
    returns = [row[2] for row in result["curve"]]
    means = [np.mean(returns[i : i + 8]) for i in range(len(returns) - 7)]
    assert len(means) == 5
    assert result["return_peak"] == pytest.approx(max(means)) and result["return_last"] == pytest.approx(means[-1])


def test_same_seed_same_bits_and_evaluation_changes_nothing(toy, tmp_path):
    result, folder = main_in_process(toy, tmp_path / "a")
    again, folder_again = main_in_process(toy, tmp_path / "b", eval_workers=2)
    assert equal(model_of(folder), model_of(folder_again)) and again["curve"] == result["curve"]
    for i, changes in enumerate((dict(eval_every=3, eval_episodes=3), dict(eval=False))):
        assert equal(model_of(folder), model_of(main_in_process(toy, tmp_path / f"c{i}", **changes)[1]))
    assert not equal(model_of(folder), model_of(main_in_process(toy, tmp_path / "d", seed=2, eval=False)[1]))


def test_needs_no_simulator(toy, tmp_path):
    code = "import sys, runpy; sys.modules.update(dict.fromkeys(('gymnasium', 'mujoco', 'metaworld'))); "
    code += f"sys.argv[1:] = {flags_of('paws_mlp', toy)!r}.split(); runpy.run_path({str(ROOT / 'paws_mlp.py')!r}, "
    code += "run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["curve"] == [] and result["return_peak"] is None


def test_two_runs_in_the_same_second_have_folders_of_their_own(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    for seed in (1, 1):
        flags = dict(data=str(toy), eval=False, cuda=False, advantage_steps=5, total_steps=3, runs_dir=str(tmp_path))
        paws.main(paws.Args(seed=seed, **flags))
    assert len([folder for folder in tmp_path.iterdir() if (folder / "result.json").exists()]) == 2


# ---- evaluation ----
def test_shipped_data_and_metaworld_evaluation(tmp_path):
    flags = dict(task="door-open", env_id="", n_pref=10, advantage_steps=3, total_steps=2, eval_every=1, n_eff=0.5)
    result, _ = main_in_process(ROOT / "data" / "door-open.npz", tmp_path, **flags)
    assert [row[0] for row in result["curve"]] == [1, 2] and 0 <= result["success_peak"] <= 1
    assert result["return_peak"] > 0 and 0 < result["pref_acc_val"] < 1


class Scripted:
    """An environment whose k-th step has success 0, 0, 1, 0 and reward 1; it ends after four steps."""

    def reset(self, seed):
        self.k = 0
        return np.zeros(2), {}

    def step(self, action):
        self.k += 1
        self.action = action
        return np.full(2, self.k), 1.0, False, self.k == 4, {"success": float(self.k == 3)}


def test_an_episode_ends_at_success_only_where_no_return_is_wanted(monkeypatch):
    policy, env = paws.Policy(2, 1).eval(), Scripted()
    monkeypatch.setattr(paws, "make_env", lambda task, env_id: env)
    weights = [p.detach().numpy().T for p in policy.parameters()]
    assert paws.run_episode(paws.Args(), weights, 0) == (1.0, 4.0)
    np.testing.assert_allclose(env.action, policy(torch.full((2,), 3.0)).detach(), atol=1e-6)
    assert paws.run_episode(paws.Args(eval_return=False), weights, 0) == (1.0, 3.0)


def test_success_rates_are_the_same_without_returns(toy, tmp_path):
    """On Meta-World the curve's successes do not depend on --eval-return; returns are then null."""
    flags = dict(task="door-open", env_id="", n_pref=10, advantage_steps=3, total_steps=2, eval_every=2, n_eff=0.5)
    data = ROOT / "data" / "door-open.npz"
    whole, cut = (main_in_process(data, tmp_path / str(r), eval_return=r, **flags)[0] for r in (True, False))
    assert [row[1] for row in whole["curve"]] == [row[1] for row in cut["curve"]]
    assert cut["return_peak"] is None and cut["curve"][0][2] is None


def test_environment_without_a_time_limit_gets_one():
    import gymnasium as gym
    from gymnasium.envs.classic_control import PendulumEnv

    gym.register("Endless-v0", entry_point=PendulumEnv)
    env = paws.make_env("mine", "Endless-v0")
    env.reset(seed=0)
    assert sum(1 for _ in iter(lambda: env.step(np.zeros(1))[3], True)) == 999


def children(pid: int) -> list[int]:
    return [int(i) for i in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def start_endless(toy, tmp_path) -> tuple[subprocess.Popen, list[int]]:
    """A run that evaluates for long, and its workers."""
    flags = f"--data {toy} --env-id Pendulum-v1 --no-cuda --advantage-steps 1 --total-steps 2 --eval-every 1"
    flags += f" --eval-episodes 100000 --eval-workers 2 --runs-dir {tmp_path / 'runs'}"
    command = [sys.executable, str(ROOT / "paws_mlp.py"), *flags.split()]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    for line in run.stdout:
        if line.startswith("weights"):
            time.sleep(2)
            return run, children(run.pid)
    raise AssertionError(run.stderr.read())


def gone(pids: list[int], seconds: float = 20) -> bool:
    def alive(pid: int) -> bool:
        status = Path(f"/proc/{pid}/status")
        return status.exists() and "(zombie)" not in status.read_text()

    end = time.time() + seconds
    while any(alive(pid) for pid in pids) and time.time() < end:
        time.sleep(0.2)
    return not any(alive(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_workers_end_with_their_parent_and_the_run_with_a_worker(toy, tmp_path):
    run, workers = start_endless(toy, tmp_path)
    run.kill()
    assert len(workers) == 2 and gone(workers)
    shutil.rmtree(tmp_path / "runs")
    run, workers = start_endless(toy, tmp_path)
    os.kill(workers[0], signal.SIGKILL)
    assert run.wait(60) == 1
    assert run.stderr.read().strip().splitlines()[-1].startswith("error: an evaluation process died")


def test_a_worker_that_dies_between_evaluations_ends_the_run_with_one_line(toy, tmp_path, monkeypatch):
    evaluate = paws.Run.evaluate

    def kill_first(run, policy, step):
        evaluate(run, policy, step)
        for pid in list(run.pool._processes):
            os.kill(pid, signal.SIGKILL)
        time.sleep(1)

    monkeypatch.setattr(paws.Run, "evaluate", kill_first)
    with pytest.raises(SystemExit, match="error: an evaluation process died"):
        main_in_process(toy, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_interrupted_run_says_how_to_continue(toy, tmp_path):
    run, workers = start_endless(toy, tmp_path)
    for pid in (run.pid, *workers):  # as Ctrl-C in a terminal
        os.kill(pid, signal.SIGINT)
    assert run.wait(60) == 1
    message = run.stderr.read().strip().splitlines()[-1]
    assert message == f"stopped; continue with: python {ROOT / 'paws_mlp.py'} --resume {only_run(tmp_path / 'runs')}"
    assert gone(workers)


# ---- resume ----
def kill_and_continue(name: str, toy: Path, tmp_path: Path, moment, steps: int = 40) -> dict:
    """Runs in a fork until moment(checkpoint's `done`) is true, kills -9, continues; returns the model."""
    runs = tmp_path / "killed"

    def child() -> None:
        load_script(name).Run.CHECKPOINT_SECONDS = -1  # a checkpoint after each update
        run_in_process(name, f"{flags_of(name, toy, steps)} --runs-dir {runs}")

    run = multiprocessing.get_context("fork").Process(target=child)
    run.start()
    while run.is_alive():
        time.sleep(0.02)
        for path in runs.glob("*/checkpoint.pt"):
            try:
                if moment(torch.load(path, weights_only=True)["done"]):
                    run.kill()
            except (OSError, RuntimeError, EOFError):
                continue
    run.join()
    assert run.exitcode == -signal.SIGKILL
    folder = only_run(runs)
    assert (folder / "checkpoint.pt").exists()
    run_in_process(name, f"--resume {folder} --no-cuda")
    return model_of(folder)


@pytest.mark.parametrize("name", NAMES)
def test_every_script_runs_and_resumes_to_the_same_bits(name, toy, tmp_path):
    result = run_in_process(name, f"{flags_of(name, toy)} --runs-dir {tmp_path / 'whole'}")
    whole = model_of(only_run(tmp_path / "whole"))
    assert result["algorithm"] == name and result["n_segments"] == 40
    killed = kill_and_continue(name, toy, tmp_path, lambda done: done.get("policy", 0) >= 10)
    assert equal(whole, killed)


@pytest.mark.slow
def test_twenty_kills_at_random_moments(toy, tmp_path):
    """In every phase of every script, with bit-equal ends."""
    rng, whole = random.Random(0), {}
    for i in range(20):
        name = NAMES[i % len(NAMES)]
        if name not in whole:
            run_in_process(name, f"{flags_of(name, toy)} --runs-dir {tmp_path / name}")
            whole[name] = model_of(only_run(tmp_path / name))
        phase = rng.choice([phase for phase in ("policy", SMALL[name][1]) if phase])
        least = rng.randint(1, 25)
        folder = tmp_path / f"kill{i}"
        folder.mkdir()
        killed = kill_and_continue(name, toy, folder, lambda done, p=phase, n=least: done.get(p, 0) >= n)
        assert equal(whole[name], killed), (name, phase, least)


@pytest.fixture(scope="module")
def finished(toy, tmp_path_factory) -> Path:
    """The folder of a complete run."""
    return main_in_process(toy, tmp_path_factory.mktemp("finished") / "runs", eval=False)[1]


def unfinished(finished: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    (folder / "result.json").unlink()
    return folder


def fails(words: str, **flags) -> None:
    with pytest.raises(SystemExit) as stopped:
        paws.main(paws.Args(cuda=False, **flags))
    message = str(stopped.value)
    assert message.startswith("error: ") and "\n" not in message and words in message, message


def test_what_cannot_be_resumed(finished, toy, tmp_path):
    with pytest.raises(SystemExit) as stopped:
        paws.main(paws.Args(resume=str(finished)))
    assert stopped.value.code == 0  # complete already
    folder = unfinished(finished, tmp_path)
    with pytest.raises(SystemExit, match="not a run of this script"):
        load_script("bc").main(load_script("bc").Args(resume=str(folder)))
    fails("no readable args.json", resume=str(tmp_path))
    for content in (b"", b"PK\x03\x04 torn", b"[]"):
        (folder / "checkpoint.pt").write_bytes(content)
        fails("damaged", resume=str(folder))
    (folder / "checkpoint.pt").unlink()
    flags = json.loads((folder / "args.json").read_text())
    (folder / "args.json").write_text(json.dumps({**flags, "data_sha256": "another"}))
    fails("not the file this run started with", resume=str(folder))
    for content in ("", "[]", "{"):
        (folder / "args.json").write_text(content)
        fails("", resume=str(folder))


# ---- one-line errors ----
def nan_in_obs(path):
    obs = np.zeros((40, 16, 3), np.float32)
    obs[7, 3, 1] = np.nan
    write_preferences(path, obs=obs)


def flipped_bit(path):
    """A changed shape in the header of prefs (400 pairs become 40): only the checksum can tell."""
    import zipfile

    write_preferences(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    content = path.read_bytes()
    assert content.count(b"(20, 2)") == 1
    path.write_bytes(content.replace(b"(20, 2)", b"(10, 2)"))


def huge(path):
    """A header that declares more than the file, or the machine, can hold."""
    import zipfile

    write_preferences(path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["obs.npy"] = members["obs.npy"].replace(b"(40, 16, 3)", b"(40000000, 16, 3)"[:11].ljust(11))
    members["act.npy"] = members["act.npy"][:60] + members["act.npy"][60:].replace(b"(40, 16, 1)", b"(9**9**9,1)")
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def with_arrays(**changes):
    return lambda path: write_preferences(path, **changes)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (with_arrays(obs=None), "obs"),
        (with_arrays(format_version=None), "format_version"),
        (with_arrays(format_version=2), "format_version must be the integer 1"),
        (with_arrays(format_version=[1, 1]), "format_version must be the integer 1"),
        (with_arrays(obs=np.zeros((40, 16), np.float32)), "(K, T, dim)"),
        (with_arrays(act=np.full((40, 16, 1), "a")), "Cannot cast"),
        (with_arrays(act=np.zeros((40, 15, 1), np.float32)), "(40, 15, 1)"),
        (with_arrays(act=np.full((40, 16, 1), 1.5, np.float32)), "rescale the actions"),
        (with_arrays(act=np.full((40, 16, 1), np.nan, np.float32)), "act"),
        (with_arrays(obs=np.full((40, 16, 3), 1e300)), "obs has NaN or infinity"),
        (with_arrays(prefs=np.array([[0, 40]])), "two different segments of 40"),
        (with_arrays(prefs=np.array([[0, 1], [5, 5]])), "two different segments of 40"),
        (with_arrays(prefs=np.array([[0.0, 1.0]])), "prefs (integers)"),
        (with_arrays(prefs=np.zeros((0, 2), int)), "0 rows"),
        (with_arrays(policy=np.zeros(3, int)), "policy must have 40 entries"),
        (with_arrays(obs=np.array([{"a": 1}], dtype=object)), "cannot read"),
        (nan_in_obs, "obs has NaN or infinity"),
        (flipped_bit, "checksum"),
        (huge, "cannot read"),
        (lambda path: write_preferences(path) and path.write_bytes(path.read_bytes()[:2000]), "cannot read"),
        (lambda path: path.write_text("not a zip"), "cannot read"),
        (lambda path: np.save(path.open("wb"), np.zeros(3)), "cannot read"),
        (lambda path: None, "cannot read"),
    ],
)
def test_bad_file_ends_with_one_line(tmp_path, make, words):
    path = tmp_path / "bad.npz"
    make(path)
    fails(words, data=str(path), eval=False, runs_dir=str(tmp_path / "runs"))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (dict(n_pref=21), "has 20 rows"),
        (dict(update_segment_length=5), "--update-segment-length 5: must divide"),
        (dict(trust_region="chi2", kl_bound=0.5), "--kl-bound"),
        (dict(cover_starts=True), "--cover-starts"),
        (dict(total_steps=0), "--total-steps 0: must be > 0 and < inf"),
        (dict(batch_size=-1), "--batch-size -1"),
        (dict(learning_rate=float("nan")), "--learning-rate nan"),
        (dict(seed=-3), "--seed -3"),
        (dict(n_eff=-0.1), "--n-eff -0.1"),
        (dict(track=True), "wandb"),
        (dict(eval=True, task="door-open"), "it has (35, 4) dimensions"),
        (dict(eval=True, task="my-robot"), "--no-eval"),
        (dict(eval=True, env_id="Nonsense-v0"), "Nonsense-v0: no simulator"),
        (dict(eval=True, env_id="CartPole-v1"), "CartPole-v1: no simulator"),
    ],
)
def test_bad_flags_end_with_one_line(toy, tmp_path, flags, words):
    fails(words, **{**dict(data=str(toy), eval=False, runs_dir=str(tmp_path / "runs")), **flags})
    assert not (tmp_path / "runs").exists()


def test_no_task_and_a_runs_dir_that_is_a_file(toy, tmp_path):
    fails("give --task")
    (tmp_path / "file").touch()
    fails("no folder", data=str(toy), eval=False, runs_dir=str(tmp_path / "file"))


def test_divergence_ends_the_run_with_one_line(toy, tmp_path):
    flags = dict(data=str(toy), eval=False, total_steps=50, eval_every=10, runs_dir=str(tmp_path / "runs"))
    fails("losses__policy is not finite", **flags, advantage_steps=5, learning_rate=1e30)
    assert not list(tmp_path.glob("runs/*/model.pt"))
    fails("losses__advantage is not finite", **flags, advantage_steps=100, advantage_learning_rate=1e30)


def test_full_disk_is_named(toy, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    fails("is the disk full?", data=str(toy), eval=False, runs_dir=str(tmp_path / "runs"))


# ---- the choice of pairs ----
def test_choice_of_pairs_is_seeded_and_balanced():
    policy = np.repeat(np.arange(4), 250)
    prefs = np.random.default_rng(0).permutation(1000).reshape(500, 2)
    for n in (10, 50, 51, 333):
        rows = paws.choose_pairs(prefs, n, 3, policy)
        assert len(set(rows)) == n
        counts = np.bincount(policy[prefs[rows]].ravel(), minlength=4)
        assert counts.max() - counts.min() <= max(2, 0.05 * n)
    assert np.array_equal(paws.choose_pairs(prefs, 50, 3, policy), paws.choose_pairs(prefs, 50, 3, policy))
    assert not np.array_equal(paws.choose_pairs(prefs, 50, 3, policy), paws.choose_pairs(prefs, 50, 4, policy))
    assert sorted(paws.choose_pairs(prefs, 500, 0, policy)) == list(range(500))
    order = np.random.default_rng([0, 0]).permutation(500)  # all segments of one policy: no quota
    assert np.array_equal(paws.choose_pairs(prefs, 50, 0, np.zeros(1000, int)), order[:50])


def test_choice_of_pairs_takes_linear_time():
    prefs = np.random.default_rng(0).permutation(20_000).reshape(-1, 2)
    start = time.perf_counter()
    paws.choose_pairs(prefs, 5_000, 0, np.arange(20_000) % 200)
    assert time.perf_counter() - start < 5


def test_chosen_and_unused_pairs_are_the_files(toy):
    args = paws.Args(data=str(toy), n_pref=5)
    data, unused = paws.load_data(args, torch.device("cpu"))
    file = np.load(toy)
    rows = paws.choose_pairs(file["prefs"], 5, args.seed, file["policy"])
    assert data.obs.shape == (10, 16, 3) and len(unused.prefs) == 15
    for part, expected in ((data, file["prefs"][rows]), (unused, np.delete(file["prefs"], rows, 0))):
        np.testing.assert_array_equal(part.rows[part.prefs], expected)
        np.testing.assert_array_equal(part.obs, file["obs"][part.rows])
        np.testing.assert_array_equal(part.act, file["act"][part.rows])


@pytest.mark.parametrize("name", NAMES)
def test_labels_outside_the_chosen_pairs_change_nothing(name, toy, tmp_path):
    """n_pref pairs and no others reach any loss."""
    file = dict(np.load(toy))
    chosen = paws.choose_pairs(file["prefs"], 8, 1, file["policy"])
    others = np.setdiff1d(np.arange(20), chosen)
    file["prefs"][others] = file["prefs"][others][:, ::-1]
    np.savez(tmp_path / "flipped.npz", **file)
    models = []
    for data in (toy, tmp_path / "flipped.npz"):
        runs = tmp_path / data.stem
        run_in_process(name, f"{flags_of(name, data, 6)} --n-pref 8 --runs-dir {runs}")
        models.append(model_of(only_run(runs)))
    assert equal(*models)
