"""Data generation from a real, tiny training to a validated preference file."""

import contextlib
import csv
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from conftest import ROOT, write_preferences

sys.path.insert(0, str(ROOT / "data_gen"))
import data_card
import make_preferences
import select_policies
import train_sac
from actors import ACTION_CLAMP, Actor, save_actor
from envs import HORIZON, SacEnv, make_env, set_sim_state

TASK = "button-press"  # the fastest simulator of Meta-World
# Saves at step 2,530 and dies like a killed process at 2,570: updates start after step 2,500.
KILLED_TRAINING = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import train_sac
step = train_sac.Checkpoints._on_step
def on_step(self):
    if self.num_timesteps == 2530:
        self.save_state()
    if self.num_timesteps == 2570:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self)
train_sac.Checkpoints._on_step = on_step
train_sac.main(train_sac.Args(task=sys.argv[2], out=sys.argv[3], total_steps=2600, demo_episodes=2,
                              checkpoint_every=20, eval_episodes=1, batch_size=32))
"""


def run(script: str, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "ignore", str(ROOT / "data_gen" / script), *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="session")
def experts(tmp_path_factory):
    """A training of a few updates, killed and resumed; (folder, state at the kill)."""
    folder = tmp_path_factory.mktemp("experts")
    command = [sys.executable, "-W", "ignore", "-c", KILLED_TRAINING, str(ROOT / "data_gen"), TASK, str(folder)]
    killed = subprocess.run(command, capture_output=True, text=True)
    assert killed.returncode == -9, killed.stderr
    state = torch.load(folder / TASK / "state.pt", weights_only=True)
    resumed = run("train_sac.py", "--task", TASK, "--out", folder, "--resume", "--batch-size", 32)
    assert resumed.returncode == 0, resumed.stderr
    return folder, state


def error_of(main, *args) -> str:
    """The one line with which it ends."""
    with pytest.raises(SystemExit) as error:
        main(*args)
    assert str(error.value).startswith("error: ") and "\n" not in str(error.value)
    return str(error.value)


def parsed(module, *options: str):
    return tyro.cli(module.Args, args=[str(option) for option in options])


@pytest.fixture(scope="session")
def policies(experts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("policies")
    result = run("select_policies.py", *f"--task {TASK} --shortlist-episodes 2 --episodes 3".split(),
                 "--experts", experts[0], "--out", folder)  # fmt: skip
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def preference_file(policies, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / f"{TASK}.npz"
    arguments = make_preferences.Args(task=TASK, segments=16, policies=str(policies), out=str(path), workers=2)
    make_preferences.main(arguments)
    return path


@pytest.fixture(scope="session")
def data(preference_file):
    with np.load(preference_file, allow_pickle=False) as file:
        return dict(file)


# ---- training and actors ----


def test_training_updates_and_resumes_after_a_kill(experts):
    folder, killed = experts[0] / TASK, experts[1]
    state = torch.load(folder / "state.pt", weights_only=True)
    assert killed["step"] == 2530 and state["step"] == 2600
    assert 20 <= killed["updates"] <= 30 and state["updates"] == killed["updates"] + 70
    assert killed["minutes"] <= state["minutes"]
    with open(folder / "checkpoints.csv") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == [2520, 2540, 2560, 2580, 2600]  # none before the first update
    before, after = (Actor(folder / "actors" / f"step_{step:07d}.pt") for step in (2520, 2600))
    assert after.info == {"format_version": 1, "task": TASK, "step": 2600, "seed": 1}
    assert np.any(before.layers[0][0] != after.layers[0][0])  # it learned something
    with np.load(folder / "buffer.npz", allow_pickle=False) as buffer:
        # One less: a callback comes before the buffer has its step's transition, so resuming loses that one.
        assert int(buffer["pos"]) == 2599 and buffer["observations"].shape == (2599, 1, 35)
    assert any((folder / "tensorboard").rglob("events*"))


@pytest.fixture(scope="module")
def sb3_actor(tmp_path_factory):
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", SacEnv("hopper", 0), seed=0, device="cpu", buffer_size=10)
    with torch.no_grad():
        model.actor.log_std.bias += torch.tensor([-1.5, -1.0, 25.0])  # the third one is clipped
    path = tmp_path_factory.mktemp("actor") / "actor.pt"
    save_actor(path, model.actor, task="hopper", step=0, seed=0)
    return model.actor, Actor(path)


@pytest.mark.slow
def test_training_stops_when_a_good_checkpoint_stays_good_in_more_episodes(tmp_path):
    common = "--demo-episodes 1 --total-steps 2520 --checkpoint-every 10 --eval-episodes 1".split()
    for stop_at, rows in (("0", [("2510", "5")]), ("1.1", [("2510", "1"), ("2520", "1")])):
        out = tmp_path / stop_at
        done = run("train_sac.py", "--task", TASK, "--out", out, "--stop-at", stop_at, *common)
        assert done.returncode == 0, done.stderr
        with open(out / TASK / "checkpoints.csv") as file:
            assert [(row["step"], row["episodes"]) for row in csv.DictReader(file)] == rows


@pytest.mark.parametrize("flag, value, words", [
    ("--total-steps", "3000", "learning starts after 2500 steps"),
    ("--total-steps", "-5", "at least 1"),
    ("--checkpoint-every", "0", "at least 1"),
    ("--batch-size", "0", "at least 2"),
    ("--eval-episodes", "0", "at least 1"),
    ("--update-every", "0", "at least 1"),
    ("--demo-episodes", "-1", "at least 0"),
    ("--seed", "-1", "at least 0"),
    ("--learning-rate", "nan", "at least"),
    ("--gamma", "1", "less than 1"),
])  # fmt: skip
def test_trainings_that_cannot_be_are_refused(flag, value, words, tmp_path):
    line = error_of(train_sac.main, parsed(train_sac, "--task", TASK, "--out", tmp_path / "experts", flag, value))
    assert line.startswith(f"error: {flag} {value}") and words in line and not (tmp_path / "experts").exists()


def test_defaults_by_task(tmp_path):
    def values(task):
        train_sac.complete(args := train_sac.Args(task=task), tmp_path)
        return args.demo_episodes, args.gamma, args.batch_size, args.stop_at, args.seed

    assert values("door-open") == (40, 0.99, 128, 0.97, 1)
    assert values("lever-pull") == values("push-back") == (100, 0.97, 128, 0.97, 1)
    assert values("ant") == (0, 0.99, 256, 935.0, 1)
    assert values("walker2d") == (0, 0.99, 128, 1093.0, 1)
    assert values("reacher") == (0, 0.99, 256, np.inf, 1)  # a new task, of which the paper has no return


def test_a_training_keeps_its_flags_and_its_folder(experts):
    """What `experts` resumed without its flags had them all; others are refused, and so is a second beginning."""
    common = ("--task", TASK, "--out", experts[0])
    before = (experts[0] / TASK / "args.json").read_bytes()
    flags = json.loads(before)
    assert (flags["total_steps"], flags["demo_episodes"], flags["checkpoint_every"]) == (2600, 2, 20)
    line = error_of(train_sac.main, parsed(train_sac, *common, "--resume", "--batch-size", 64))
    assert "--batch-size 64: this training has 32" in line
    assert "continue it with --resume" in error_of(train_sac.main, parsed(train_sac, *common))
    assert (experts[0] / TASK / "args.json").read_bytes() == before


def test_a_killed_make_task_leaves_no_training_behind(tmp_path):
    command = [sys.executable, "-W", "ignore", str(ROOT / "data_gen" / "make_task.py"), "--task", TASK]
    process = subprocess.Popen(
        [*command, "--experts", tmp_path, "--data", tmp_path / "data"], stderr=subprocess.DEVNULL
    )
    flags, end = tmp_path / TASK / "args.json", time.monotonic() + 120
    while not flags.exists() and time.monotonic() < end:
        time.sleep(0.1)
    line = error_of(train_sac.main, parsed(train_sac, "--task", TASK, "--out", tmp_path))
    assert "another process is training there" in line
    process.kill()
    process.wait()
    with open(tmp_path / TASK / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it any more


ENDLESS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import make_preferences

class Endless:
    obs_dim = act_dim = 1
    def reset(self, seed):
        open(sys.argv[2], "w").write(str(os.getpid()))
        while True:
            pass

def endless(_):
    make_preferences.ENVS = [Endless()]
    make_preferences.rollout((None, [0], [()], True))

if __name__ == "__main__":
    list(make_preferences.start_pool("hopper", 1).map(endless, [0]))
"""


def test_workers_end_with_their_killed_parent_even_in_an_endless_episode(tmp_path):
    script, pid = tmp_path / "endless.py", tmp_path / "pid"
    script.write_text(ENDLESS)
    parent = subprocess.Popen([sys.executable, "-W", "ignore", script, ROOT / "data_gen", pid])
    end = time.monotonic() + 120
    while not (pid.exists() and pid.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    status, end = Path(f"/proc/{pid.read_text()}/status"), time.monotonic() + 10
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            if "State:\tZ" not in status.read_text():
                time.sleep(0.1)
                continue
        return  # it is gone, or a zombie that nobody has waited for
    os.kill(int(pid.read_text()), 9)
    pytest.fail("the worker outlived its parent")


@pytest.mark.parametrize("policy", [train_sac.LeanPolicy, train_sac.LayerNormPolicy])
def test_leaving_out_unused_critic_gradients_changes_no_bit(policy, monkeypatch):
    def trained():
        sac = train_sac.SAC(policy, SacEnv("hopper", 1), seed=1, learning_starts=20, policy_kwargs={"net_arch": [16]})
        return sac.learn(40).policy.state_dict()

    ours = trained()
    monkeypatch.delattr(train_sac.LeanCritic, "forward")
    for name, original in trained().items():
        assert torch.equal(ours[name], original), name


def test_numpy_actor_equals_stable_baselines(sb3_actor):
    theirs, ours = sb3_actor
    obs = np.random.default_rng(0).normal(0, 2, (64, 11)).astype(np.float32)
    with torch.no_grad():
        mean, log_std, _ = theirs.get_action_dist_params(torch.as_tensor(obs))
        mode = theirs(torch.as_tensor(obs), deterministic=True).numpy()
        sample, log_prob = theirs.action_log_prob(torch.as_tensor(obs))
    our_mean, our_log_std = ours.mean_and_log_std(obs)
    np.testing.assert_allclose(our_mean, mean, atol=1e-5)
    np.testing.assert_allclose(our_log_std, log_std, atol=1e-5)
    np.testing.assert_allclose(ours.act(obs), mode, atol=1e-5)
    assert ours.act(obs).dtype == np.float32
    noise = np.random.default_rng(1).standard_normal(our_mean.shape)
    np.testing.assert_allclose(ours.act(obs, noise), np.tanh(mean.numpy() + log_std.exp().numpy() * noise), atol=1e-5)
    inner = np.abs(sample.numpy()).max(1) < 0.9  # SB3 adds 1e-6 inside its logarithm: compare where that is small
    assert inner.sum() > 3
    np.testing.assert_allclose(ours.log_prob(obs, sample.numpy())[inner], log_prob[inner], atol=1e-4)


def test_log_prob_equals_torch_distributions(sb3_actor):
    _, actor = sb3_actor
    rng = np.random.default_rng(2)
    obs, act = rng.normal(0, 2, (64, 11)).astype(np.float32), rng.uniform(-1, 1, (64, 3)).astype(np.float32)
    act[0], act[1] = 1.0, -1.0  # saturated: clamped
    mean, log_std = map(torch.as_tensor, actor.mean_and_log_std(obs.astype(np.float64)))
    squash = torch.distributions.transforms.TanhTransform()
    squashed = torch.distributions.TransformedDistribution(torch.distributions.Normal(mean, log_std.exp()), squash)
    expected = squashed.log_prob(torch.as_tensor(act, dtype=torch.float64).clamp(-ACTION_CLAMP, ACTION_CLAMP)).sum(-1)
    np.testing.assert_allclose(actor.log_prob(obs, act), expected, rtol=1e-10, atol=1e-5)


# ---- selection ----


def test_selection_writes_four_policies(policies, experts):
    folder = policies / TASK
    info = json.loads((folder / "policies.json").read_text())
    assert info["task"] == TASK and info["training"]["steps"] == 2600 and info["training"]["seed"] == 1
    assert len({policy["step"] for policy in info["policies"]}) == 4
    success = [policy["success"] for policy in info["policies"]]
    assert success == sorted(success) and all(policy["episodes"] == 3 for policy in info["policies"])
    for number, policy in enumerate(info["policies"], start=1):
        path = folder / f"policy_{number}.pt"
        assert policy["file"] == path.name and path.stat().st_size < 500 * 1024
        assert torch.load(path, weights_only=True)["step"] == policy["step"]
    assert sorted(path.name for path in folder.iterdir()) == ["policies.json", *(f"policy_{i}.pt" for i in range(1, 5))]


def test_selection_prefers_near_then_early():
    scores = {10: 0.0, 20: 0.3, 30: 0.34, 40: 0.33, 50: 0.7, 60: 1.0}
    assert select_policies.nearest(scores, 1 / 3, 0.05)[:2] == [30, 40]  # equal within the tolerance: the earlier one
    assert select_policies.nearest(scores, 2 / 3, 0.05)[0] == 50
    assert select_policies.smooth([0.0, 3.0, 6.0, 3.0]) == [1.5, 3.0, 4.0, 4.5]
    np.testing.assert_allclose(select_policies.targets_below(0.9, None), [0.045, 0.3, 0.6])
    np.testing.assert_allclose(select_policies.targets_below(700.0, 100.0), [100, 300, 500])


@pytest.mark.parametrize("damage", ["args.json", "the third copy"])
def test_selection_keeps_the_old_policies_until_all_new_ones_are_written(
    damage, experts, policies, tmp_path, monkeypatch
):
    shutil.copytree(policies, tmp_path / "policies")
    shutil.copytree(experts[0], tmp_path / "experts")
    monkeypatch.setattr(select_policies, "start_pool", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(select_policies, "measure", lambda _, actors, *__: {step: (step, step) for step in actors})
    args = select_policies.Args(task=TASK, experts=str(tmp_path / "experts"), out=str(tmp_path / "policies"))
    if damage == "args.json":
        (tmp_path / "experts" / TASK / "args.json").write_text("{")
        assert "args.json" in error_of(select_policies.main, args)
    else:
        copies, copy = [], shutil.copyfile

        def full_disk(*paths):
            copies.append(paths)
            if len(copies) == 3:
                raise OSError("disk full")
            copy(*paths)

        monkeypatch.setattr(shutil, "copyfile", full_disk)
        with pytest.raises(OSError, match="disk full"):
            select_policies.main(args)
    for path in (policies / TASK).iterdir():
        assert (tmp_path / "policies" / TASK / path.name).read_bytes() == path.read_bytes()


# ---- preference files ----


def test_file_has_the_contract_s_arrays(data, policies):
    kinds = {key: (value.shape, str(value.dtype)) for key, value in data.items() if key not in ("meta", "sim_state")}
    assert kinds == dict(
        obs=((16, 64, 35), "float32"),
        act=((16, 64, 4), "float32"),
        prefs=((8, 2), "int64"),
        format_version=((), "int64"),
        reward=((16, 64), "float32"),
        expert_logp=((16, 64), "float32"),
        policy=((16,), "int64"),
        episode=((16,), "int64"),
        start=((16,), "int64"),
    )
    assert data["sim_state"].shape[0] == 16 and data["sim_state"].dtype == np.float64
    assert np.abs(data["act"]).max() <= 1.0
    np.testing.assert_array_equal(np.bincount(data["policy"]), [4, 4, 4, 4])
    meta = json.loads(str(data["meta"]))
    assert (meta["task"], meta["horizon"], meta["seed"], meta["segment_length"]) == (TASK, 250, 1, 64)
    assert meta["policies"] == json.loads((policies / TASK / "policies.json").read_text())["policies"]
    assert meta["versions"]["mujoco"] == "3.3.0"


def test_labels_are_the_best_policy_s_log_probability(data, policies):
    best = Actor(policies / TASK / "policy_4.pt")
    np.testing.assert_allclose(data["expert_logp"], best.log_prob(data["obs"], data["act"]), rtol=1e-4, atol=1e-4)
    score = data["expert_logp"].sum(1, dtype=np.float64)
    assert np.all(score[data["prefs"][:, 0]] > score[data["prefs"][:, 1]])
    np.testing.assert_array_equal(np.sort(data["prefs"], axis=1), [(i, i + 8) for i in range(8)])  # the two halves
    assert np.any(np.diff(data["policy"]) < 0)  # shuffled


@pytest.mark.slow
def test_same_seed_same_bytes_whatever_the_workers(preference_file, policies, tmp_path):
    options = ("--task", TASK, "--segments", 16, "--policies", policies)
    outs = [tmp_path / "one.npz", tmp_path / "other.npz"]
    one = run("make_preferences.py", *options, "--workers", 1, "--out", outs[0])
    assert one.returncode == 0, one.stderr
    assert outs[0].read_bytes() == preference_file.read_bytes()
    other = run("make_preferences.py", *options, *"--segments 8 --seed 2 --deterministic --segment-length 100".split(),
                *"--pairs 6 --pairing uniform --flip 0.5".split(), "--out", outs[1])  # fmt: skip
    assert other.returncode == 0, other.stderr
    with np.load(outs[1], allow_pickle=False) as file:
        assert file["obs"].shape == (8, 100, 35) and file["prefs"].shape == (6, 2)
        score = file["expert_logp"].sum(1, dtype=np.float64)
        assert (score[file["prefs"][:, 0]] < score[file["prefs"][:, 1]]).sum() == 3
        modes = [Actor(policies / TASK / f"policy_{policy + 1}.pt") for policy in file["policy"]]
        modes = [actor.act(obs) for actor, obs in zip(modes, file["obs"], strict=True)]
        np.testing.assert_allclose(file["act"], modes, atol=1e-5)
    assert sorted(tmp_path.iterdir()) == sorted(outs)  # no temporary file is left


def test_segments_replay_exactly(data):
    env = make_env(TASK)
    for i in (0, 7, 15):
        set_sim_state(env, data["episode"][i], data["sim_state"][i])
        replayed = [env.step(action)[:2] for action in data["act"][i]]
        np.testing.assert_array_equal([obs for obs, _ in replayed[:-1]], data["obs"][i, 1:])
        np.testing.assert_array_equal(np.float32([reward for _, reward in replayed]), data["reward"][i])
        if data["start"][i] == 0:
            np.testing.assert_array_equal(env.reset(data["episode"][i]), data["obs"][i, 0])


@pytest.mark.parametrize(
    "length, segments", [(64, 1000), (64, 96), (16, 400), (32, 400), (100, 200), (128, 200), (250, 40)]
)
def test_every_step_is_covered_about_equally(length, segments):
    args = make_preferences.Args(segments=segments, segment_length=length)
    jobs = make_preferences.rollout_jobs([None] * 4, args)
    streams = [stream for job in jobs for stream in job[1]]
    assert len(set(streams)) == len(streams)
    coverage, counts = np.zeros(HORIZON), []
    for policy in range(4):
        starts = [start for job in jobs if job[1][0][2] == policy for episode in job[2] for start in episode]
        starts = starts[: segments // 4]
        counts.append(len(starts))
        for start in starts:
            assert 0 <= start <= HORIZON - length
            coverage[start : start + length] += 1
    assert counts == [segments // 4] * 4
    ratio = coverage / coverage.mean()
    assert ratio.min() > 0.8 and np.quantile(ratio, 0.95) < 1.5
    if (length, segments) == (64, 1000):
        assert ratio.min() > 0.95 and ratio.max() < 1.5 and np.median(ratio) < 1.01  # as shipped


def test_an_episode_s_segments_do_not_overlap():
    for length in (16, 64, 100):
        for slot in range(HORIZON // length + 1):
            assert np.all(np.diff(make_preferences.segment_starts(length, slot)) >= length)
    assert [make_preferences.segment_starts(64, slot) for slot in range(4)] == [
        [58, 122, 186], [0, 122, 186], [0, 64, 186], [0, 64, 128],
    ]  # fmt: skip


def test_pairing():
    rng = np.random.default_rng(0)
    halves = make_preferences.draw_pairs(40, 20, "halves", rng)
    np.testing.assert_array_equal(np.sort(halves.ravel()), np.arange(40))  # each segment in exactly one pair
    uniform = make_preferences.draw_pairs(10, 20_000, "uniform", rng)
    assert np.all(uniform[:, 0] != uniform[:, 1])
    counts = np.zeros((10, 10))
    np.add.at(counts, tuple(uniform.T), 1)
    off_diagonal = counts[~np.eye(10, dtype=bool)]  # 90 ordered pairs, about 222 times each
    assert off_diagonal.min() > 150 and off_diagonal.max() < 300


def test_labels_ties_and_flips():
    pairs, score = np.array([[0, 1], [2, 3], [4, 5], [1, 4]]), np.array([1.0, 2.0, 5.0, 5.0, 3.0, 0.0])
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(
        make_preferences.label_pairs(pairs, score, 0.0, rng), [[1, 0], [2, 3], [4, 5], [4, 1]]
    )
    np.testing.assert_array_equal(
        make_preferences.label_pairs(pairs, score, 1.0, rng), [[0, 1], [3, 2], [5, 4], [1, 4]]
    )
    many, value = np.arange(200).reshape(100, 2), np.arange(200.0)
    assert (make_preferences.label_pairs(many, value, 0.3, rng)[:, 0] % 2 == 0).sum() == 30
    policy = np.array([0, 3, 1, 1, 2, 0])
    assert make_preferences.policy_agreement(np.array([[1, 0], [2, 3], [5, 4], [4, 0]]), policy) == pytest.approx(2 / 3)


@pytest.mark.parametrize("options, words", [
    ("--task no-such-task", "use one of"),
    ("--task ant", "select_policies.py"),
    ("--segments 10", "multiple of 4"),
    ("--segments 16 --pairs 9", "1 to 8 pairs"),
    ("--segment-length 251", "250 steps"),
    ("--flip 1.5", "between 0 and 1"),
])  # fmt: skip
def test_wrong_options_get_one_line(options, words, policies):
    args = parsed(make_preferences, "--task", TASK, "--policies", policies, *options.split())
    assert words in error_of(make_preferences.main, args)


@pytest.mark.parametrize("name, content, words", [
    ("policy_4.pt", b"no actor", "policy_4.pt: not an actor"),
    ("policy_4.pt", None, "has policies for ant"),
    ("policies.json", b"{", "policies.json: damaged"),
    ("policies.json", b"[]", "policies.json: damaged"),
])  # fmt: skip
def test_policies_are_checked_before_the_rollouts(name, content, words, policies, tmp_path, monkeypatch):
    shutil.copytree(policies, tmp_path / "policies")
    path = tmp_path / "policies" / TASK / name
    path.write_bytes(content or (ROOT / "data" / "policies" / "ant" / name).read_bytes())
    monkeypatch.setattr(make_preferences, "start_pool", lambda *_: pytest.fail("began rollouts"))
    args = parsed(make_preferences, "--task", TASK, "--policies", tmp_path / "policies")
    assert words in error_of(make_preferences.main, args)


# ---- the validator ----


def broken_files(data: dict[str, np.ndarray]) -> dict[str, dict]:
    """What is wrong -> a file's arrays; the first word is named in the error."""

    def changed(key, index, value):
        array = data[key].copy()
        array[index] = value
        return data | {key: array}

    def without(key):
        return {name: value for name, value in data.items() if name != key}

    return {
        "obs missing": without("obs"),
        "prefs missing": without("prefs"),
        "format_version missing": without("format_version"),
        "format_version of tomorrow": data | {"format_version": np.int64(2)},
        "obs without steps": data | {"obs": data["obs"][:, 0]},
        "obs with NaN": changed("obs", (3, 5, 2), np.nan),
        "act of another length": data | {"act": data["act"][:, :-1]},
        "act too large": changed("act", (0, 0, 0), 1.5),
        "prefs out of range": changed("prefs", (2, 1), 16),
        "prefs negative": changed("prefs", (2, 1), -1),
        "prefs with itself": changed("prefs", 2, 4),
        "prefs of floats": data | {"prefs": data["prefs"].astype(float)},
        "reward of another shape": data | {"reward": data["reward"][:, :5]},
        "reward infinite": changed("reward", (1, 1), np.inf),
        "expert_logp of integers": data | {"expert_logp": data["expert_logp"].astype(int)},
        "policy too short": data | {"policy": data["policy"][:-1]},
        "policy negative": changed("policy", 0, -1),
        "sim_state missing": without("sim_state"),
        "sim_state of other segments": data | {"sim_state": data["sim_state"][:5]},
        "start after the end": changed("start", 0, 200),
        "episode of floats": data | {"episode": data["episode"].astype(float)},
        "meta not JSON": data | {"meta": np.array("task: door-open")},
        "meta a list": data | {"meta": np.array("[1]")},
        "meta an object": data | {"meta": np.array({"task": 1}, dtype=object)},
        "meta of many brackets": data | {"meta": np.array("[" * 100_000)},
        "meta of many digits": data | {"meta": np.array("1" * 5_000)},
        "meta with a horizon in words": data | {"meta": np.array('{"horizon": "long"}')},
        "format_version of two lines": data | {"format_version": np.ones((2, 2), int)},
        "start of the end of time": data | {"start": np.full(16, 2**64 - 1, np.uint64)},
    }


def test_validator_names_what_is_wrong_and_goes_on(data, preference_file, tmp_path):
    required = {key: data[key] for key in ("obs", "act", "prefs", "format_version")}
    np.savez(tmp_path / "own.npz", **required)  # somebody's own file has no more
    paths, words = [], []
    for name, arrays in broken_files(data).items():
        paths.append(tmp_path / f"{len(paths)}.npz")
        words.append(name.split()[0])
        np.savez(paths[-1], **arrays)
    for name, content in (("text", b"hello"), ("empty", b""), ("cut", preference_file.read_bytes()[:3000])):
        paths.append(tmp_path / f"{name}.npz")
        words.append("npz")
        paths[-1].write_bytes(content)
    # In the header of prefs, 8 rows become 4, 10^12 or a tangle of brackets: np.load may read a part, or take memory.
    plain = (tmp_path / "own.npz").read_bytes()
    assert plain.count(b"(8, 2), }") == 1
    for i, shape in enumerate((b"(4, 2), }", b"(9**9, 2)", b"((((((((((")):
        for checksum in ("wrong", "right"):
            paths.append(tmp_path / f"header-{i}-{checksum}.npz")
            words.append("prefs")
            paths[-1].write_bytes(plain.replace(b"(8, 2), }", shape.ljust(9)[:9]))
            if checksum == "right":
                with zipfile.ZipFile(tmp_path / "own.npz") as old, zipfile.ZipFile(paths[-1], "w") as new:
                    for member in old.namelist():
                        new.writestr(member, old.read(member).replace(b"(8, 2), }", shape.ljust(9)[:9]))
    paths.append(tmp_path / "far.npz")
    words.append("prefs")
    with zipfile.ZipFile(tmp_path / "own.npz") as old, zipfile.ZipFile(paths[-1], "w") as new:
        for member in old.namelist():
            new.writestr(member, old.read(member).replace(b"(8, 2), }        ", b"(10000000000, 2)}"))
    paths.append(tmp_path / "nowhere.npz")
    words.append("not found")

    result = run("validate.py", *paths, preference_file, tmp_path / "own.npz")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == len(paths) + 2
    for path, word, line in zip(paths, words, lines, strict=False):
        assert line.startswith(f"error: {path}: ") and word in line.split(f"{path}: ")[1], (path, word, line)
    assert lines[-2].startswith(f"{preference_file}: OK  K 16  T 64  n 8  obs 35  act 4  segments by policy 4/4/4/4")
    assert lines[-1].startswith(f"{tmp_path / 'own.npz'}: OK")
    assert run("validate.py", preference_file).returncode == 0


def test_validator_names_far_observations(tmp_path):
    path = write_preferences(tmp_path / "far.npz", obs=np.full((40, 16, 3), -2e6, np.float32))
    result = run("validate.py", path)
    assert result.returncode == 0 and "obs up to 2.0e+06" in result.stdout


# ---- the one command ----


def test_make_task_skips_what_exists(experts, policies, preference_file, tmp_path):
    folder = tmp_path / "data"
    (folder / "policies").mkdir(parents=True)
    (folder / f"{TASK}.npz").write_bytes(preference_file.read_bytes())
    done = run("make_task.py", "--task", TASK, "--data", folder, "--experts", experts[0])
    assert done.returncode == 0 and "complete" in done.stdout and ".py --task" not in done.stdout
    wrong = run("make_task.py", "--task", "no-such-task", "--data", folder, "--experts", tmp_path / "experts")
    assert wrong.returncode == 1 and "error: --task no-such-task" in wrong.stderr and "Traceback" not in wrong.stderr


def test_data_card_is_what_data_holds_and_takes_a_new_task(tmp_path, monkeypatch):
    shipped, card = ROOT / "data", tmp_path / "README.md"
    (tmp_path / "policies").mkdir()
    for path in (*shipped.glob("*.npz"), *shipped.glob("policies/*")):
        (tmp_path / path.relative_to(shipped)).symlink_to(path)
    before = (shipped / "README.md").read_text()
    card.write_text(before)
    monkeypatch.setattr(data_card, "DATA", tmp_path)
    data_card.main()
    assert card.read_text() == before

    (tmp_path / "policies" / "window-open").symlink_to(shipped / "policies" / "window-close")
    (tmp_path / "window-open.npz").symlink_to(shipped / "window-close.npz")
    for name in ("TASKS", "METAWORLD_TASKS"):
        monkeypatch.setattr(data_card, name, (*getattr(data_card, name), "window-open"))
    data_card.main()
    policies, file = sorted(set(card.read_text().splitlines()) - set(before.splitlines()))
    assert policies.startswith("| window-open | here |") and file.startswith("| window-open.npz |")
