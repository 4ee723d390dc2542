"""The environments: Meta-World's traps stay closed, episodes repeat, states restore."""

import functools
import importlib.metadata
import re
import sys
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "data_gen")]
import envs
from envs import HORIZON, LOCOMOTION_TASKS, METAWORLD_TASKS, TASKS, get_sim_state, set_sim_state

import paws_mlp

make_env = functools.cache(envs.make_env)  # building one costs more than 100 ms


def play(env, seed: int, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    obs, rewards = [env.reset(seed)], []
    for action in actions:
        next_obs, reward, _, _ = env.step(action)
        obs.append(next_obs), rewards.append(reward)
    return np.array(obs), np.array(rewards)


def random_actions(env, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (steps, env.act_dim)).astype(np.float32)


@pytest.mark.parametrize("task", METAWORLD_TASKS)
def test_goal_stays_visible_after_step(task):
    env = make_env(task)
    for obs in play(env, 3, random_actions(env, 3))[0]:
        assert obs.shape == (35,) and obs.dtype == np.float32
        np.testing.assert_allclose(obs[-3:], env.env._target_pos, atol=1e-6)
    assert np.any(obs[-3:] != 0)


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_episode_bit_for_bit(task):
    env = make_env(task)
    actions = random_actions(env, 40)
    np.random.seed(1)
    first = play(env, 7, actions)
    other = play(env, 8, actions[::-1])
    np.random.seed(2)  # the global generator has no say
    again = play(env, 7, actions)
    fresh = play(envs.make_env(task), 7, actions)
    for repeated in (again, fresh):
        np.testing.assert_array_equal(first[0], repeated[0])
        np.testing.assert_array_equal(first[1], repeated[1])
    assert np.any(first[0][0] != other[0][0])


@pytest.mark.parametrize("task", TASKS)
def test_the_scripts_play_the_same_episodes_bit_for_bit(task):
    ours, theirs = make_env(task), paws_mlp.make_env(task)
    actions = random_actions(ours, HORIZON, seed=3)
    assert (ours.obs_dim, ours.act_dim) == (theirs.observation_space.shape[0], theirs.action_space.shape[0])
    for seed in (11, 12):
        np.testing.assert_array_equal(ours.reset(seed), np.float32(theirs.reset(seed=seed)[0]))
        for step, action in enumerate(actions, start=1):
            obs, reward, success, ended = ours.step(action)
            their_obs, their_reward, terminated, truncated, info = theirs.step(action)
            np.testing.assert_array_equal(obs, np.float32(their_obs))
            assert reward == their_reward and ended == (terminated or truncated) == (step == HORIZON)
            assert success == info["success"] if task in METAWORLD_TASKS else np.isnan(success)


@pytest.mark.parametrize("task", ["door-open", "ant", "half-cheetah"])
def test_shipped_segments_replay_bit_for_bit(task):
    env = make_env(task)
    with np.load(ROOT / "data" / f"{task}.npz", allow_pickle=False) as file:
        data = {key: file[key] for key in ("obs", "act", "reward", "episode", "sim_state")}
    for i in (0, 500):
        set_sim_state(env, data["episode"][i], data["sim_state"][i])
        replayed = [env.step(action)[:2] for action in data["act"][i]]
        np.testing.assert_array_equal([obs for obs, _ in replayed[:-1]], data["obs"][i, 1:])
        # Not the first: Ant's reward reads body positions, which MuJoCo has from before the state was taken.
        np.testing.assert_array_equal(np.float32([reward for _, reward in replayed[1:]]), data["reward"][i, 1:])


class Wheel(gym.Env):
    """An environment of one's own: no render_mode, no time limit, an odd action space, two kinds of observations."""

    observation_space = gym.spaces.Dict(
        angle=gym.spaces.Box(-9, 9, (2,), np.float64), speed=gym.spaces.Box(-9, 9, (1, 1), np.float64)
    )
    action_space = gym.spaces.Box(np.float32([[0, -4]]), np.float32([[1, 4]]))

    def reset(self, *, seed=None, options=None):
        return {"angle": np.ones(2), "speed": np.zeros((1, 1))}, {}

    def step(self, action):
        assert action.shape == (1, 2) and action.dtype == np.float32
        return self.reset()[0], float(action.sum()), False, False, {"is_success": True}


def test_own_environments_are_rescaled_flattened_and_limited(capsys):
    gym.register("Wheel-v0", Wheel)
    env = envs.make_env("own", "Wheel-v0")
    assert "no time limit" in capsys.readouterr().out
    assert (env.obs_dim, env.act_dim) == (3, 2)
    np.testing.assert_array_equal(env.reset(1), np.float32([1, 1, 0]))
    steps = [env.step(np.float32([0.5, -0.5])) for _ in range(1000)]
    assert steps[0][1:] == (0.75 - 2.0, 1.0, False) and [s[3] for s in steps] == [False] * 999 + [True]


@pytest.mark.parametrize(
    "task, env_id, words",
    [
        ("no-such", "", "use one of"),
        ("own", "Nothing-v9", "cannot make it"),
        ("own", "CartPole-v1", "bounded continuous"),
    ],
)
def test_environments_that_cannot_be_used_get_one_line(task, env_id, words):
    with pytest.raises(SystemExit, match=words) as error:
        envs.make_env(task, env_id)
    assert str(error.value).startswith("error: ") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "path", sorted([*(ROOT / "data_gen").glob("*.py"), *(ROOT / "benchmark").glob("*.py")]), ids=str
)
def test_nothing_imports_a_script(path):
    scripts = {script.stem for script in [*ROOT.glob("*.py"), *(ROOT / "baselines").glob("*.py")]}
    imports = re.findall(r"^\s*(?:import|from)\s+(?:baselines\.)?(\w+)", path.read_text(), re.MULTILINE)
    assert not scripts & set(imports)


@pytest.mark.parametrize("task", METAWORLD_TASKS)
def test_each_seed_has_its_own_scene_and_hand(task):
    env = make_env(task)
    starts = np.array([env.reset(seed) for seed in range(6)])
    scenes = (
        starts[:, -3:] if task != "sweep-into" else starts[:, 4:7]
    )  # goal; sweep-into: a fixed hole, the object moves
    assert len(np.unique(scenes, axis=0)) == 6
    assert np.all(np.ptp(starts[:, :3], axis=0) > 0.05)  # hand: randomised in all three directions


def test_hand_randomisation_leaves_the_reward_intact():
    env = make_env("push-back")
    env.reset(0)
    tcp = env.env.init_tcp.copy()
    for seed in range(1, 9):  # with init_tcp recomputed: "margin must be non-negative"
        rewards = play(env, seed, random_actions(env, 15, seed))[1]
        np.testing.assert_allclose(env.env.init_tcp, tcp, atol=1e-6)  # the unmoved hand's
        assert np.isfinite(rewards).all() and np.all(rewards >= 0)


def test_unchecked_quaternions_have_the_bits_of_the_checked_ones():
    quaternions = np.random.default_rng(0).normal(size=(2_000, 4))
    quaternions[::3] = np.round(quaternions[::3])  # ties between the four components
    for q in quaternions[np.any(quaternions != 0, axis=1)]:
        matrix = np.empty(9)
        mujoco.mju_quat2Mat(matrix, q / np.linalg.norm(q))
        matrix = matrix.reshape(3, 3)
        unchecked = Rotation.from_matrix(matrix, assume_valid=True).as_quat()
        np.testing.assert_array_equal(unchecked, Rotation.from_matrix(matrix).as_quat())


def test_mujoco_is_the_version_that_metaworld_was_made_for():
    assert importlib.metadata.version("mujoco") == "3.3.0"


@pytest.mark.parametrize("task", METAWORLD_TASKS)
def test_scripted_expert_solves_most_episodes(task):
    from metaworld.policies import ENV_POLICY_MAP

    env, expert, solved = make_env(task), ENV_POLICY_MAP[f"{task}-v3"](), 0
    for seed in range(8):
        env.reset(seed)
        success = ended = False
        while not (success or ended):
            _, _, success, ended = env.step(np.asarray(expert.get_action(env.full_obs), np.float32))
        solved += bool(success)
    assert solved >= 5


def test_scripted_episode_is_what_the_replay_buffer_needs():
    env = make_env("button-press")
    demo = envs.scripted_episode(env, "button-press", 1, 0.1, np.random.default_rng(0))
    assert demo["obs"].shape == (HORIZON + 1, 35) and demo["act"].shape == (HORIZON, 4)
    assert demo["reward"].shape == (HORIZON,) and np.abs(demo["act"]).max() <= 1.0
    assert demo["success"].shape == (HORIZON,) and demo["success"].max() == 1.0


@pytest.mark.parametrize("task", TASKS)
def test_an_episode_has_250_steps(task):
    env = make_env(task)
    env.reset(1)
    ended = [env.step(action)[3] for action in random_actions(env, HORIZON)]
    assert HORIZON == 250 and ended == [False] * 249 + [True]


@pytest.mark.parametrize(
    "task, obs_dim, act_dim", [("ant", 27, 8), ("half-cheetah", 17, 6), ("hopper", 11, 3), ("walker2d", 17, 6)]
)
def test_locomotion_dimensions(task, obs_dim, act_dim):
    env = make_env(task)
    assert (env.obs_dim, env.act_dim) == (obs_dim, act_dim) and task in LOCOMOTION_TASKS
    assert env.reset(0).shape == (obs_dim,)


@pytest.mark.parametrize("task", TASKS)
def test_restored_state_replays_exactly(task):
    env, steps, start = make_env(task), 60, 35
    actions = random_actions(env, steps)
    states, obs = [], [env.reset(5)]
    for action in actions:
        states.append(get_sim_state(env))
        obs.append(env.step(action)[0])
    for begin in (0, start):
        play(env, 6, actions[:10])  # another episode in between
        set_sim_state(env, 5, states[begin])
        for t in range(begin, steps):
            np.testing.assert_array_equal(env.step(actions[t])[0], obs[t + 1])


def test_sac_environment_scales_metaworld_rewards():
    env, sac = make_env("door-open"), envs.SacEnv("door-open", seed=4)
    first, _ = sac.reset()
    seed = int(np.random.default_rng(4).integers(2**31))
    np.testing.assert_array_equal(first, env.reset(seed))
    action = np.full(4, 0.5, np.float32)
    assert sac.step(action)[1] == pytest.approx(env.step(action)[1] / 10)


def test_sac_is_paid_for_success_on_lever_pull_and_push_back():
    """There, and there alone: their own rewards are nearly full before success."""
    assert envs.sac_reward("lever-pull", 10.0, 1.0) == envs.sac_reward("push-back", 10.0, 1.0) == pytest.approx(2.0)
    assert envs.sac_reward("lever-pull", 10.0, 0.0) == envs.sac_reward("door-open", 10.0, 1.0) == pytest.approx(1.0)
    assert envs.sac_reward("hopper", 3.0, np.nan) == 3.0


def test_a_fall_ends_an_episode_of_training_alone():
    """Walker2d falls under random actions: then, and only with early termination, the episode has no further value."""
    ends = {}
    for early in (False, True):
        sac, rng = envs.SacEnv("walker2d", seed=0, early_termination=early), np.random.default_rng(0)
        sac.reset()
        fallen, ended, steps = False, False, 0
        while not fallen and not ended:
            _, _, fallen, ended, _ = sac.step(rng.uniform(-1, 1, 6).astype(np.float32))
            steps += 1
            assert fallen == (early and not sac.sim.env.unwrapped.is_healthy)
        ends[early] = steps
    assert ends[False] == HORIZON and ends[True] < 100
