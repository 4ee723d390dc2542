"""The fourteen tasks, as the algorithm scripts simulate them, and what SAC, demonstrations, replay and pools need.

The scripts are read and copied, never imported: these simulators are the same ones again, and a test compares the two.
"""

import multiprocessing
import os
import sys
import threading
import time
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import numpy as np
from scipy.spatial.transform import Rotation

METAWORLD_TASKS = (
    "button-press", "door-open", "drawer-open", "faucet-close", "lever-pull",
    "peg-insert-side", "plate-slide", "push-back", "sweep-into", "window-close",
)  # fmt: skip
LOCOMOTION_TASKS = {  # without early termination: an episode always has HORIZON steps
    "ant": dict(id="Ant-v5", terminate_when_unhealthy=False, include_cfrc_ext_in_observation=False),
    "half-cheetah": dict(id="HalfCheetah-v5"),
    "hopper": dict(id="Hopper-v5", terminate_when_unhealthy=False),
    "walker2d": dict(id="Walker2d-v5", terminate_when_unhealthy=False),
}
TASKS = (*METAWORLD_TASKS, *LOCOMOTION_TASKS)
HORIZON = 250
# The rewards of these two are nearly full before success: lever-pull's once the lever's tip is within 4 cm of its
# target, 11.5 degrees from upright, while success is within 7.5 degrees. SAC may learn to stop between the two.
# So it is paid for success as well.
SUCCESS_REWARD = {"lever-pull": 10.0, "push-back": 10.0}


class MetaWorldEnv:
    """A Meta-World v3 task with CPL's changes: visible goal, new at each reset; random hand start; 35 observations."""

    obs_dim, act_dim = 35, 4
    HAND_NOISE = np.array([0.25, 0.15, 0.2])

    def __init__(self, task: str):
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        self.env = ALL_V3_ENVIRONMENTS[f"{task}-v3"]()
        # Its quaternions without scipy's test that a matrix is a rotation, which takes a third of a step.
        unchecked = SimpleNamespace(from_matrix=partial(Rotation.from_matrix, assume_valid=True))
        sys.modules[type(self.env).__module__].Rotation = unchecked
        self.env._partially_observable = False
        # The cached space was built while the goal was hidden, and step() clips observations to it: goal = (0, 0, 0).
        del self.env.sawyer_observation_space
        self.env._freeze_rand_vec = False
        self.env._set_task_called = True
        self.env.seeded_rand_vec = True  # goals from env.np_random; reset(seed=...) is ignored by Meta-World

    def _trim(self, full_obs: np.ndarray) -> np.ndarray:
        self.full_obs = full_obs  # (39,): what scripted experts read
        return np.concatenate((full_obs[:18], full_obs[22:])).astype(np.float32)  # without the previous hand position

    def reset(self, seed: int) -> np.ndarray:
        env, self.steps = self.env, 0
        env.seed(int(seed))
        mujoco.mj_resetData(env.model, env.data)  # nothing of the last episode may reach into this one
        env.reset()
        hand = env.hand_init_pos + env.np_random.uniform(-self.HAND_NOISE, self.HAND_NOISE)
        for _ in range(50):  # env.init_tcp stays as it was: rewards need the unmoved one
            env.data.mocap_pos[0] = np.clip(hand, env.mocap_low, env.mocap_high)
            env.data.mocap_quat[0] = (1, 0, 1, 0)
            env.do_simulation([-1, 1], env.frame_skip)
        env._prev_obs = env._get_curr_obs_combined_no_goal()
        return self._trim(env._get_obs())

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, float, bool]:
        """Observation, reward, success, whether the episode ends here."""
        full_obs, reward, _, _, info = self.env.step(np.clip(action, -1.0, 1.0))
        self.steps += 1
        return self._trim(full_obs), float(reward), float(info["success"]), self.steps >= HORIZON


class GymEnv:
    """Any Gymnasium environment with bounded continuous actions; [-1, 1] is rescaled to its action space."""

    def __init__(self, **spec):
        try:
            env = gym.make(**spec)
            if env.spec.max_episode_steps is None:
                print(f"warning: {spec['id']} has no time limit: episodes end after 1,000 steps")
                env = gym.wrappers.TimeLimit(env, 1_000)
            self.env = gym.wrappers.FlattenObservation(env)
        except Exception as e:  # an unknown name, a missing package, whatever its constructor raises
            reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
            sys.exit(f"error: --env-id {spec['id']}: Gymnasium cannot make it ({reason}); is its package installed?")
        space = self.env.action_space
        if not isinstance(space, gym.spaces.Box) or not space.is_bounded():
            sys.exit(f"error: --env-id {spec['id']}: needs a bounded continuous (Box) action space, found {space}")
        self.low, self.high, self.shape = space.low.ravel(), space.high.ravel(), space.shape
        self.obs_dim, self.act_dim = self.env.observation_space.shape[0], self.low.size

    def reset(self, seed: int) -> np.ndarray:
        return np.asarray(self.env.reset(seed=int(seed))[0], np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, float, bool]:
        """Observation, reward, success (NaN: the environment has no such notion), whether the episode ends here."""
        # The data files were made with the rounding of this very line: written otherwise, ant would not replay.
        action = self.low + (np.clip(action, -1.0, 1.0) + 1.0) * 0.5 * (self.high - self.low)
        obs, reward, terminated, truncated, info = self.env.step(action.reshape(self.shape).astype(np.float32))
        success = float(info.get("success", info.get("is_success", np.nan)))
        return np.asarray(obs, np.float32), float(reward), success, bool(terminated or truncated)


def make_env(task: str, env_id: str = "", **options) -> MetaWorldEnv | GymEnv:
    """`options` go to gym.make, such as render_mode."""
    if env_id:
        return GymEnv(id=env_id, **options)
    if task in METAWORLD_TASKS:
        return MetaWorldEnv(task)
    if task in LOCOMOTION_TASKS:
        return GymEnv(**LOCOMOTION_TASKS[task], max_episode_steps=HORIZON, **options)
    sys.exit(f"error: --task {task}: no simulator of that name; use one of {', '.join(TASKS)}, or --env-id")


def end_with_parent() -> None:
    """For pool workers: one whose parent was killed ends too, even inside an endless episode."""
    parent = multiprocessing.parent_process().pid

    def watch():
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def sac_reward(task: str, reward: float, success: float) -> float:
    """What SAC learns from: on Meta-World a tenth of the reward, and of what is paid for success."""
    return 0.1 * (reward + SUCCESS_REWARD.get(task, 0.0) * success) if task in METAWORLD_TASKS else reward


class SacEnv(gym.Env):
    """A task for Stable-Baselines3, with `sac_reward`; each reset draws a new episode seed.

    `early_termination`: an episode of ant, hopper or walker2d ends, without a value, once the robot has fallen.
    """

    def __init__(self, task: str, seed: int, early_termination: bool = False):
        self.task, self.sim, self.early_termination = task, make_env(task), early_termination
        self.rng = np.random.default_rng(seed)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self.sim.obs_dim,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (self.sim.act_dim,), np.float32)

    def reset(self, *, seed=None, options=None):
        return self.sim.reset(int(self.rng.integers(2**31))), {}

    def step(self, action):
        obs, reward, success, ended = self.sim.step(action)
        fallen = self.early_termination and not self.sim.env.unwrapped.is_healthy
        return obs, sac_reward(self.task, reward, success), fallen, ended, {"success": success}


def scripted_episode(env: MetaWorldEnv, task: str, seed: int, noise: float, rng: np.random.Generator) -> dict:
    """A scripted expert's episode with Gaussian action noise: obs (T+1, 35), act (T, 4), reward and success (T,)."""
    from metaworld.policies import ENV_POLICY_MAP

    expert = ENV_POLICY_MAP[f"{task}-v3"]()
    obs, act, rewards, successes, ended = [env.reset(seed)], [], [], [], False
    while not ended:
        action = np.asarray(expert.get_action(env.full_obs), np.float64)
        action = np.clip(action + rng.normal(0.0, noise, action.shape), -1.0, 1.0).astype(np.float32)
        next_obs, reward, success, ended = env.step(action)
        obs.append(next_obs), act.append(action), rewards.append(reward), successes.append(success)
    return dict(obs=np.array(obs), act=np.array(act), reward=np.array(rewards), success=np.array(successes))


def get_sim_state(env: MetaWorldEnv | GymEnv) -> np.ndarray:
    """MuJoCo's full integration state and, on Meta-World, the previous observation, which the next contains. (S,)"""
    unwrapped = env.env.unwrapped
    state = np.empty(mujoco.mj_stateSize(unwrapped.model, mujoco.mjtState.mjSTATE_INTEGRATION))
    mujoco.mj_getState(unwrapped.model, unwrapped.data, state, mujoco.mjtState.mjSTATE_INTEGRATION)
    return np.concatenate((state, unwrapped._prev_obs)) if isinstance(env, MetaWorldEnv) else state


def set_sim_state(env: MetaWorldEnv | GymEnv, seed: int, state: np.ndarray) -> None:
    """Back to where `get_sim_state` was called in the episode of `seed`: its reset places goal and objects."""
    env.reset(seed)
    unwrapped = env.env.unwrapped
    size = mujoco.mj_stateSize(unwrapped.model, mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_setState(unwrapped.model, unwrapped.data, state[:size], mujoco.mjtState.mjSTATE_INTEGRATION)
    mujoco.mj_forward(unwrapped.model, unwrapped.data)  # positions for rendering; it changes the warm start, so again:
    mujoco.mj_setState(unwrapped.model, unwrapped.data, state[:size], mujoco.mjtState.mjSTATE_INTEGRATION)
    if isinstance(env, MetaWorldEnv):
        unwrapped._prev_obs = state[size:].copy()
