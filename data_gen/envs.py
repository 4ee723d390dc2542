"""The fourteen tasks for data generation: the scripts' own environments, and what SAC, demonstrations, replay need."""

import sys
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from paws_mlp import HORIZON, LOCOMOTION_TASKS, METAWORLD_TASKS, GymEnv, MetaWorldEnv, make_env  # noqa: E402, F401

TASKS = (*METAWORLD_TASKS, *LOCOMOTION_TASKS)
# lever-pull's reward is full once the lever's tip is within 4 cm of its target, 11.5 degrees from upright; success is
# within 7.5 degrees, and SAC may learn to stop between the two. So it is paid for success as well.
SUCCESS_REWARD = {"lever-pull": 10.0}


def sac_reward(task: str, reward: float, success: float) -> float:
    """What SAC learns from: on Meta-World a tenth of the reward."""
    return 0.1 * (reward + SUCCESS_REWARD.get(task, 0.0) * success) if task in METAWORLD_TASKS else reward


class SacEnv(gym.Env):
    """A task for Stable-Baselines3, with `sac_reward`; each reset draws a new episode seed."""

    def __init__(self, task: str, seed: int):
        self.task, self.sim = task, make_env(task)
        self.rng = np.random.default_rng(seed)
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (self.sim.obs_dim,), np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (self.sim.act_dim,), np.float32)

    def reset(self, *, seed=None, options=None):
        return self.sim.reset(int(self.rng.integers(2**31))), {}

    def step(self, action):
        obs, reward, success, ended = self.sim.step(action)
        return obs, sac_reward(self.task, reward, success), False, ended, {"success": success}


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
