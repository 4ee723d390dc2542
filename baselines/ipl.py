# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch>=2.6", "tyro>=0.9", "numpy>=2", "tensorboard", "tqdm",
#   "gymnasium[mujoco]>=1.1", "mujoco==3.3.0", "metaworld==3.1.1", "imageio", "imageio-ffmpeg",
# ]
# ///
"""IPL: Inverse Preference Learning (Hejna and Sadigh, NeurIPS 2023), a reward hidden in the Q function, with IQL.

    python baselines/ipl.py --task door-open --n-pref 50                    (the published sizes)
    python baselines/ipl.py --task door-open --n-pref 50 --preset quick     (sized for a CPU)

The inverse Bellman operator turns Q into the reward that it is optimal for, so preferences train Q itself:
    r_i(s, a, s') = Q_i(s, a) - gamma V(s')                        for both critics i; no gradient to V
    L_Q  = -mean log sigmoid(sum_t r_i(tau+) - sum_t r_i(tau-)) + chi2 mean r_i^2
    L_V  = mean |expectile - 1(u < 0)| u^2                         u = min_i Q'_i(s, a) - V(s), Q' the target network
    L_pi = -mean min(exp(u / beta), 100) log pi(a | s)
Each update: V; Q with the new V; policy with the new V and the Q' that V saw; Q' <- tau Q + (1 - tau) Q'.

Choices where the PAWS paper is silent: chi2 = 3, IPL's value for Meta-World, on all tasks; its value for locomotion is
0.5 with clipped targets (--chi2 0.5 --clip-target). Whole segments in minibatches of 96 pairs, as CPL: 63 transitions
of 64 steps, none terminal. The policy is the one of all methods, with log pi = -||a - mu(s)||^2. 500,000 updates as for
the other baselines. The quick preset, with few and small updates, has IPL's own learning rate (3e-4) and crops (16
steps at the same place of both segments) and a policy whose learning rate falls to 0 along a cosine, as P-IQL's; it
learns V and policy from transitions of all segments. One tenth of the pairs is held out of the preference term, to
report a validation accuracy; their segments stay in all other terms.
"""

import copy
import hashlib
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
import zipfile
import zlib
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy only runs small evaluation forwards, one process per core

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import nn
from tqdm import tqdm

PRESETS = {
    "paper": dict(
        total_steps=500_000, batch_size=96, crop=0, transitions=0, eval_every=5_000,
        learning_rate=1e-4, policy_decay=False,
    ),
    "quick": dict(
        total_steps=4_800, batch_size=32, crop=16, transitions=512, eval_every=120,
        learning_rate=3e-4, policy_decay=True,
    ),
}  # fmt: skip


@dataclass
class Args:
    exp_name: str = "ipl"
    """name of the method in the run directory and in tables"""
    preset: Literal["paper", "quick"] = "paper"
    """sizes where a flag does not give them: the published ones, or small ones for a CPU"""
    total_steps: int | None = None
    """updates [paper 500,000; quick 4,800]"""
    eval_every: int | None = None
    """updates between two evaluations [paper 5,000; quick 120]"""
    batch_size: int | None = None
    """pairs in an update [paper 96; quick 32]"""
    crop: int | None = None
    """steps of each pair's segments in an update, from a random one on; 0: whole segments [paper 0; quick 16]"""
    transitions: int | None = None
    """transitions in an update of V and policy, drawn from all segments; 0: those of the pairs [paper 0; quick 512]"""
    learning_rate: float | None = None
    """Adam of value, critics and policy [paper 1e-4; quick 3e-4]"""
    policy_decay: bool | None = None
    """the policy's learning rate falls to 0 along a cosine [paper no; quick yes]"""
    gamma: float = 0.99
    """discount factor"""
    expectile: float = 0.75
    """expectile of the value function"""
    beta: float = 0.3333
    """policy weights are exp(advantage / beta), at most 100"""
    tau: float = 0.005
    """step of the target critics towards the critics, each update"""
    chi2: float = 3.0
    """weight of the mean squared implicit reward"""
    clip_target: bool = False
    """clip V(s') in the implicit reward to +-1 / (chi2 (1 - gamma))"""
    critic_width: int = 512
    """hidden units in both layers of critics and value"""
    # ---- shared: flags (identical in every script; `python tests/test_shared_blocks.py --fix` copies it) ----
    task: str | None = None
    """one of the 14 tasks, or any name for your own data"""
    data: str | None = None
    """preference file [data/<task>.npz]"""
    n_pref: int | None = None
    """number of preference pairs to use, a seeded choice [all in the file]"""
    seed: int = 1
    """seeds the choice of pairs, networks, minibatches, dropout and evaluation episodes"""
    cuda: bool = True
    """use a GPU if there is one"""
    eval: bool = True
    """evaluate in the simulator; --no-eval needs no simulator"""
    eval_episodes: int = 25
    """episodes in each evaluation"""
    eval_workers: int = min(4, os.cpu_count() or 1)
    """processes that run evaluation episodes; 0 runs them in this process"""
    env_id: str | None = None
    """evaluate in this Gymnasium environment; actions in [-1, 1] are rescaled to its action space"""
    runs_dir: str = "runs"
    """parent of the run directory"""
    resume: str | None = None
    """RUN_DIR of a killed run: continue it with its own flags to exactly the result it would have had"""
    capture_video: bool = False
    """write RUN_DIR/video.mp4 of the final policy"""
    track: bool = False
    """log to Weights & Biases too (needs wandb)"""
    # ---- end shared ----


# ---- shared: environment (identical in every script; `python tests/test_shared_blocks.py --fix` copies it) ----
METAWORLD_TASKS = (
    "button-press", "door-open", "drawer-open", "faucet-close", "lever-pull",
    "peg-insert-side", "plate-slide", "push-back", "sweep-into", "window-close",
)  # fmt: skip
LOCOMOTION_TASKS = {  # without early termination: an episode always has HORIZON steps
    "ant": ("Ant-v5", dict(terminate_when_unhealthy=False, include_cfrc_ext_in_observation=False)),
    "half-cheetah": ("HalfCheetah-v5", {}),
    "hopper": ("Hopper-v5", dict(terminate_when_unhealthy=False)),
    "walker2d": ("Walker2d-v5", dict(terminate_when_unhealthy=False)),
}
HORIZON = 250


class QuaternionOfMatrix:
    """Stands in for scipy's Rotation, slow inside a Meta-World step: the same bits for one (3, 3) rotation matrix."""

    def __init__(self, matrix: np.ndarray):
        self.matrix = matrix

    @classmethod
    def from_matrix(cls, matrix: np.ndarray) -> "QuaternionOfMatrix":
        return cls(matrix)

    def as_quat(self) -> np.ndarray:
        """(x, y, z, w), from the largest of the four, so that nothing cancels."""
        m = self.matrix.tolist()
        trace = m[0][0] + m[1][1] + m[2][2]
        i = max(range(3), key=lambda axis: m[axis][axis])
        if trace > m[i][i]:
            q = [m[2][1] - m[1][2], m[0][2] - m[2][0], m[1][0] - m[0][1], 1 + trace]
        else:
            j, k = (i + 1) % 3, (i + 2) % 3
            q = [0.0, 0.0, 0.0, m[k][j] - m[j][k]]
            q[i], q[j], q[k] = 1 - trace + 2 * m[i][i], m[j][i] + m[i][j], m[k][i] + m[i][k]
        return np.array(q) / np.sqrt(q[0] * q[0] + q[1] * q[1] + q[2] * q[2] + q[3] * q[3])


class MetaWorldEnv:
    """A Meta-World v3 task with CPL's changes: visible goal, new at each reset; random hand start; 35 observations."""

    obs_dim, act_dim = 35, 4
    HAND_NOISE = np.array([0.25, 0.15, 0.2])

    def __init__(self, task: str):
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        self.env = ALL_V3_ENVIRONMENTS[f"{task}-v3"]()
        sys.modules[type(self.env).__module__].Rotation = QuaternionOfMatrix
        self.env._partially_observable = False
        # The cached space was built while the goal was hidden, and step() clips observations to it: goal = (0, 0, 0).
        del self.env.sawyer_observation_space
        self.env._freeze_rand_vec = False
        self.env._set_task_called = True
        self.env.seeded_rand_vec = True  # goals from env.np_random; reset(seed=...) is ignored by Meta-World

    def _observe(self, full_obs: np.ndarray) -> np.ndarray:
        self.full_obs = full_obs  # (39,): what scripted experts read
        self.steps += 1
        return np.concatenate((full_obs[:18], full_obs[22:])).astype(np.float32)  # drop the previous hand position

    def reset(self, seed: int) -> np.ndarray:
        import mujoco

        env = self.env
        env.seed(int(seed))
        mujoco.mj_resetData(env.model, env.data)  # nothing of the last episode may reach into this one
        env.reset()
        hand = env.hand_init_pos + env.np_random.uniform(-self.HAND_NOISE, self.HAND_NOISE)
        hand = np.clip(hand, env.mocap_low, env.mocap_high)
        for _ in range(50):  # env.init_tcp stays as it was: rewards need the unmoved one
            env.data.mocap_pos[0] = hand
            env.data.mocap_quat[0] = (1, 0, 1, 0)
            env.do_simulation([-1, 1], env.frame_skip)
        env._prev_obs = env._get_curr_obs_combined_no_goal()
        self.steps = -1
        return self._observe(env._get_obs())

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, float, bool]:
        full_obs, reward, _, _, info = self.env.step(np.clip(action, -1.0, 1.0))
        obs = self._observe(full_obs)
        return obs, float(reward), float(info["success"]), self.steps >= HORIZON

    def render(self) -> np.ndarray:
        import mujoco

        if not hasattr(self, "renderer"):  # an upright camera: Meta-World's own are upside down, rolled or on the hand
            self.renderer, self.camera = mujoco.Renderer(self.env.model, 480, 640), mujoco.MjvCamera()
            self.camera.azimuth, self.camera.elevation, self.camera.distance = 150, -35, 1.3
            self.camera.lookat[:] = (-0.05, 0.6, 0.15)
        self.renderer.update_scene(self.env.data, self.camera)
        return self.renderer.render()


class GymEnv:
    """Any Gymnasium environment with Box observations and bounded actions; [-1, 1] is rescaled to its action space."""

    def __init__(self, env_id: str, render: bool = False, **kwargs):
        import gymnasium as gym

        try:
            self.env = gym.make(env_id, render_mode="rgb_array" if render else None, **kwargs)
        except gym.error.Error as e:
            sys.exit(f"error: --env-id {env_id}: Gymnasium cannot make it ({e}); is its package installed?")
        action_space, obs_space = self.env.action_space, self.env.observation_space
        if not isinstance(action_space, gym.spaces.Box) or not action_space.is_bounded():
            sys.exit(f"error: --env-id {env_id}: needs a bounded continuous (Box) action space, found {action_space}")
        if not isinstance(obs_space, gym.spaces.Box):
            sys.exit(f"error: --env-id {env_id}: needs a Box observation space, found {obs_space}; wrap it")
        self.low, self.high, self.shape = action_space.low.ravel(), action_space.high.ravel(), action_space.shape
        self.obs_dim, self.act_dim = int(np.prod(obs_space.shape)), int(np.prod(action_space.shape))

    def reset(self, seed: int) -> np.ndarray:
        obs, _ = self.env.reset(seed=int(seed))
        return np.asarray(obs, np.float32).ravel()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, float, bool]:
        action = self.low + (np.clip(action, -1.0, 1.0) + 1.0) * 0.5 * (self.high - self.low)
        obs, reward, terminated, truncated, info = self.env.step(action.reshape(self.shape).astype(np.float32))
        success = float(info.get("success", info.get("is_success", np.nan)))  # NaN: the environment does not say
        return np.asarray(obs, np.float32).ravel(), float(reward), success, bool(terminated or truncated)

    def render(self) -> np.ndarray:
        return self.env.render()


def make_env(task: str, env_id: str | None = None, render: bool = False) -> MetaWorldEnv | GymEnv:
    if env_id is not None:
        return GymEnv(env_id, render)
    if task in METAWORLD_TASKS:
        return MetaWorldEnv(task)
    if task in LOCOMOTION_TASKS:
        gym_id, kwargs = LOCOMOTION_TASKS[task]
        return GymEnv(gym_id, render, max_episode_steps=HORIZON, **kwargs)
    known = ", ".join((*METAWORLD_TASKS, *LOCOMOTION_TASKS))
    sys.exit(f"error: --task {task}: no simulator of that name; use one of {known}, or --env-id, or --no-eval")


# ---- end shared ----


# ---- shared: data (identical in every script; `python tests/test_shared_blocks.py --fix` copies it) ----
def load_preference_file(path: str) -> dict[str, np.ndarray]:
    """obs (K, T, o), act (K, T, a) float32, prefs (n, 2) int64, policy (K,) if there. A bad file ends in one line."""

    def fail(key: str, problem: str, fix: str):
        sys.exit(f"error: {path}: {key}: {problem}; {fix}")

    try:
        with np.load(path, allow_pickle=False) as file:
            names = set(file.files)
            for key in ("obs", "act", "prefs", "format_version"):
                if key not in names:
                    fail(f"key '{key}'", "missing", "a preference file holds obs, act, prefs and format_version")
            arrays = {k: file[k] for k in ("obs", "act", "prefs", "format_version", "policy") if k in names}
    except FileNotFoundError:
        fail("file", "not found", "give an existing file with --data, or a --task whose data is in data/")
    except (OSError, EOFError, ValueError, KeyError, TypeError, RuntimeError, zipfile.BadZipFile, zlib.error) as e:
        fail("file", f"not a readable npz of plain arrays ({type(e).__name__})", "write it with np.savez_compressed")
    version = arrays.pop("format_version")
    if version.shape != () or version.dtype.kind not in "iu" or int(version) != 1:
        fail("key 'format_version'", f"is {version}, expected the integer 1", "convert the file, or update this script")
    for key in ("obs", "act"):
        if arrays[key].ndim != 3 or arrays[key].dtype.kind != "f" or 0 in arrays[key].shape:
            found = f"{arrays[key].dtype} of shape {arrays[key].shape}"
            fail(f"key '{key}'", f"found {found}, expected float32 of shape (K, T, dim)", "stack the segments so")
        arrays[key] = np.ascontiguousarray(arrays[key], np.float32)
        if not np.isfinite(arrays[key].sum(dtype=np.float64)):  # a sum: no temporary of the size of the data
            first = tuple(int(i) for i in np.argwhere(~np.isfinite(arrays[key]))[0])
            fail(f"key '{key}'", f"NaN or infinity at {first}", "remove or repair that segment")
    obs, act, prefs = arrays["obs"], arrays["act"], arrays["prefs"]
    if obs.shape[:2] != act.shape[:2]:
        fail("key 'act'", f"has (K, T) = {act.shape[:2]} but obs has {obs.shape[:2]}", "store one action per step")
    if max(act.max(), -act.min()) > 1.0:
        fail("key 'act'", f"values in [{act.min():g}, {act.max():g}]", "rescale actions to [-1, 1]")
    if prefs.ndim != 2 or prefs.shape[1] != 2 or len(prefs) == 0 or prefs.dtype.kind not in "iu":
        found = f"{prefs.dtype} of shape {prefs.shape}"
        fail("key 'prefs'", f"found {found}, expected int of shape (n, 2)", "rows are (preferred index, other index)")
    if prefs.min() < 0 or prefs.max() >= len(obs):
        found = f"indices from {prefs.min()} to {prefs.max()}"
        fail("key 'prefs'", found, f"they must be between 0 and {len(obs) - 1}: there are {len(obs)} segments")
    if (prefs[:, 0] == prefs[:, 1]).any():
        row = int(np.argmax(prefs[:, 0] == prefs[:, 1]))
        fail("key 'prefs'", f"row {row} compares segment {prefs[row, 0]} with itself", "remove that row")
    arrays["prefs"] = prefs.astype(np.int64)
    if "policy" in arrays and (arrays["policy"].shape != (len(obs),) or arrays["policy"].dtype.kind not in "iu"):
        fail("key 'policy'", f"shape {arrays['policy'].shape}, expected ({len(obs)},) int", "drop the key or repair it")
    return arrays


def choose_pairs(prefs: np.ndarray, n: int, seed: int, policy: np.ndarray | None = None) -> np.ndarray:
    """n rows: a seeded random choice, then swaps until the data policies are as equally represented as they can be."""
    rng = np.random.default_rng([seed, 0])
    order = rng.permutation(len(prefs))
    if policy is None or n == len(prefs):
        return order[:n]
    members = policy[prefs]  # (rows, 2)
    kinds, kind_of = np.unique(np.sort(members, axis=1), axis=0, return_inverse=True)  # which two policies meet
    per_kind = np.stack([(kinds == p).sum(1) for p in np.unique(policy)], axis=1)  # (kinds, policies)
    chosen = [[row for row in order[:n] if kind_of[row] == k] for k in range(len(kinds))]
    others = [[row for row in order[n:] if kind_of[row] == k] for k in range(len(kinds))]
    counts = sum(len(rows) * per_kind[k] for k, rows in enumerate(chosen))
    while True:
        swaps = [(i, j) for i in range(len(kinds)) for j in range(len(kinds)) if i != j and chosen[i] and others[j]]
        spreads = [((counts - per_kind[i] + per_kind[j]) ** 2).sum() for i, j in swaps]
        if not swaps or min(spreads) >= (counts**2).sum():
            return np.sort(np.concatenate([np.array(rows, dtype=np.int64) for rows in chosen]))
        i, j = swaps[int(np.argmin(spreads))]
        chosen[i], others[j], out, new = chosen[i][:-1], others[j][:-1], chosen[i][-1], others[j][-1]
        chosen[j], others[i] = chosen[j] + [new], others[i] + [out]
        counts = counts - per_kind[i] + per_kind[j]


def load_segments(args) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """obs (K, T, o), act (K, T, a) and prefs (n, 2) of the chosen pairs: their segments, no others, renumbered."""
    arrays = load_preference_file(args.data)
    available = len(arrays["prefs"])
    n = available if args.n_pref is None else args.n_pref
    if not 1 <= n <= available:
        sys.exit(f"error: {args.data}: key 'prefs': has {available} rows; choose --n-pref from 1 to that, not {n}")
    args.n_pref = n
    rows = choose_pairs(arrays["prefs"], n, args.seed, arrays.get("policy"))
    used, prefs = np.unique(arrays["prefs"][rows], return_inverse=True)
    obs, act = (arrays[k] if len(used) == len(arrays[k]) else arrays[k][used] for k in ("obs", "act"))
    return torch.from_numpy(obs), torch.from_numpy(act), torch.from_numpy(prefs.reshape(n, 2))


# ---- end shared ----


# ---- shared: policy (identical in every script; `python tests/test_shared_blocks.py --fix` copies it) ----
class Dropout(nn.Module):
    """nn.Dropout with a generator of its own: nothing else in the process can change what is learned."""

    def __init__(self, p: float, generator: torch.Generator | None):
        super().__init__()
        self.p, self.generator = p, generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        keep = torch.rand(x.shape, generator=self.generator, device=x.device).ge_(self.p)  # 1 with probability 1 - p
        return x * keep.mul_(1 / (1 - self.p))


def linear(n_in: int, n_out: int, generator: torch.Generator | None, gain: float = 1.0) -> nn.Linear:
    """A linear layer with orthogonal weights and zero bias (CPL's initialisation)."""
    layer = nn.utils.skip_init(nn.Linear, n_in, n_out)
    weight = torch.empty(n_out, n_in)
    nn.init.orthogonal_(weight, gain, generator=generator)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.zero_()
    return layer


class Policy(nn.Module):
    """CPL's actor: deterministic mu(s) in (-1, 1), two hidden layers of 512, dropout 0.25 before each ReLU."""

    def __init__(self, obs_dim: int, act_dim: int, init=None, noise=None):
        """`init` and `noise`: torch generators of the initial weights (on the CPU) and of dropout (on the device)."""
        super().__init__()
        self.net = nn.Sequential(
            linear(obs_dim, 512, init), Dropout(0.25, noise), nn.ReLU(),
            linear(512, 512, init), Dropout(0.25, noise), nn.ReLU(),
            linear(512, act_dim, init), nn.Tanh(),
        )  # fmt: skip

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs)  # (..., o) -> (..., a)

    def log_prob(self, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        """log pi(a | s) = -||a - mu(s)||^2: a unit-variance Gaussian up to constants. (..., o), (..., a) -> (...)"""
        return -(self.net(obs) - act).square().sum(-1)


def load_policy(path: str | Path) -> Policy:
    """The trained policy of a model.pt, ready to act: `load_policy(path)(torch.as_tensor(obs))`."""
    model = torch.load(path, map_location="cpu", weights_only=True)
    policy = Policy(model["obs_dim"], model["act_dim"])
    policy.load_state_dict(model["policy"])
    return policy.eval()


# ---- end shared ----


# ---- shared: evaluation (identical in every script; `python tests/test_shared_blocks.py --fix` copies it) ----
LOCKSTEP = 8  # episodes that a process plays side by side: enough to share a pass through the policy, few for the cache


def policy_layers(policy: Policy) -> list[tuple[np.ndarray, np.ndarray]]:
    """The policy's (weight, bias) for numpy."""
    layers = [layer for layer in policy.net if isinstance(layer, nn.Linear)]
    return [(m.weight.detach().cpu().numpy().T.copy(), m.bias.detach().cpu().numpy()) for m in layers]


def episode_seeds(seed: int, step: int, episodes: int) -> list[int]:
    """Evaluation has random numbers of its own, which depend on the run's seed and the update alone."""
    return [int(state) >> 1 for state in np.random.SeedSequence([seed, step]).generate_state(episodes)]


def run_episodes(envs: list, layers: list[tuple[np.ndarray, np.ndarray]], seeds: list[int]) -> list[list[float]]:
    """One episode per seed, in lockstep: [success at any step, return] of each. The policy's mean acts, no dropout."""
    success, returns = np.full(len(seeds), -np.inf), np.zeros(len(seeds))
    # Always LOCKSTEP rows, used or not: then an episode's bits do not depend on how many run beside it.
    obs = np.zeros((LOCKSTEP, layers[0][0].shape[0]), np.float32)
    waiting, playing = list(range(len(seeds)))[::-1], {}  # episodes; the episode of each environment
    while waiting or playing:
        while waiting and len(playing) < len(envs):
            free = next(i for i in range(len(envs)) if i not in playing)
            playing[free] = waiting.pop()
            obs[free] = envs[free].reset(seeds[playing[free]])
        x = obs
        for weight, bias in layers[:-1]:
            x = np.maximum(x @ weight + bias, 0.0)
        actions = np.tanh(x @ layers[-1][0] + layers[-1][1])
        for i, episode in list(playing.items()):
            obs[i], reward, now, ended = envs[i].step(actions[i])
            returns[episode] += reward
            success[episode] = max(success[episode], now)  # a NaN (no such notion) stays -inf
            if ended:
                del playing[i]
    success[np.isneginf(success)] = np.nan
    return np.stack((success, returns), axis=1).tolist()


def evaluation_worker(connection, task: str, env_id: str | None, parent: int) -> None:
    """Keeps its environments; answers each job (layers, seeds) with the episodes' results; None, or an orphan, ends."""
    envs = []
    try:
        envs.append(make_env(task, env_id))
        connection.send((envs[0].obs_dim, envs[0].act_dim))
        while True:
            while not connection.poll(timeout=5):
                if os.getppid() != parent:
                    return
            job = connection.recv()
            if job is None:
                return
            while len(envs) < min(LOCKSTEP, len(job[1])):
                envs.append(make_env(task, env_id))
            connection.send(run_episodes(envs, *job))
    except (KeyboardInterrupt, EOFError, BrokenPipeError):
        pass
    except BaseException as e:  # the parent ends with this text
        connection.send(str(e) if isinstance(e, SystemExit) else f"error: evaluation failed: {type(e).__name__}: {e}")


class Evaluator:
    """Long-lived worker processes that keep their environments; no message per step."""

    def __init__(self, args, obs_dim: int, act_dim: int):
        self.args, self.connections, self.processes, self.envs = args, [], [], []
        if args.eval_workers > 0:
            context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
            for _ in range(min(args.eval_workers, args.eval_episodes)):
                here, there = context.Pipe()
                job = (there, args.task, args.env_id, os.getpid())
                worker = context.Process(target=evaluation_worker, args=job, daemon=True)
                worker.start()
                there.close()
                self.connections.append(here)
                self.processes.append(worker)
            dims = [self._receive(connection) for connection in self.connections][0]
        else:
            self.envs = [make_env(args.task, args.env_id) for _ in range(min(LOCKSTEP, args.eval_episodes))]
            dims = (self.envs[0].obs_dim, self.envs[0].act_dim)
        if dims != (obs_dim, act_dim):
            self.close()
            sys.exit(
                f"error: {args.data}: obs and act have {obs_dim} and {act_dim} dimensions, the environment "
                f"{args.env_id or args.task} has {dims[0]} and {dims[1]}; fix --task/--env-id, or use --no-eval"
            )

    def _receive(self, connection):
        try:
            answer = connection.recv()
        except EOFError:
            answer = "error: an evaluation process died (out of memory?); try fewer --eval-workers"
        if isinstance(answer, str):
            self.close()
            sys.exit(answer)
        return answer

    def evaluate(self, policy: Policy, step: int) -> tuple[float, float]:
        """(success rate, mean return) over eval_episodes episodes; success is NaN where there is no such notion."""
        layers, seeds = policy_layers(policy), episode_seeds(self.args.seed, step, self.args.eval_episodes)
        if self.envs:
            results = run_episodes(self.envs, layers, seeds)
        else:
            n = len(self.connections)
            for i, connection in enumerate(self.connections):
                connection.send((layers, seeds[i::n]))
            results = [result for connection in self.connections for result in self._receive(connection)]
        success, returns = np.array(results).mean(0)
        return float(success), float(returns)

    def close(self) -> None:
        for process, connection in zip(self.processes, self.connections, strict=True):
            try:
                connection.send(None)
            except OSError:  # it has ended by itself, with the error that is being reported
                pass
            connection.close()
            process.join()


def smoothed(values: list[float], window: int = 8) -> np.ndarray:
    """Mean over `window` adjacent evaluations (over all while there are fewer)."""
    window = min(window, len(values))
    return np.convolve(values, np.ones(window) / window, "valid") if window else np.array([])


def record_video(path: Path, model_path: Path, task: str, env_id: str | None, seed: int) -> None:
    """Renders one episode of the saved policy; runs in a process of its own, whose MUJOCO_GL chooses the renderer."""
    import imageio

    policy, env = load_policy(model_path), make_env(task, env_id, render=True)
    scene = getattr(env.env.unwrapped, "model", None)
    if hasattr(scene, "light_castshadow"):  # much faster where the CPU renders
        scene.vis.quality.offsamples, scene.light_castshadow[:], scene.mat_reflectance[:] = 0, 0, 0
    temporary, obs, ended = path.with_suffix(".tmp.mp4"), env.reset(seed), False
    with imageio.get_writer(temporary, fps=40, macro_block_size=2) as video:
        while not ended:
            video.append_data(env.render())
            with torch.no_grad():
                action = policy(torch.from_numpy(obs)).numpy()
            obs, _, _, ended = env.step(action)
    os.replace(temporary, path)


def capture_video(path: Path, model_path: Path, args) -> None:
    """Tries the renderers in turn (no display: EGL, then OSMesa); a failure costs the video, not the run."""
    script = Path(__file__).resolve()
    code = f"import sys; sys.path.insert(0, {str(script.parent)!r}); from {script.stem} import Path, record_video; "
    code += f"record_video(Path({str(path)!r}), Path({str(model_path)!r}), {args.task!r}, {args.env_id!r}, {args.seed})"
    for renderer in [os.environ["MUJOCO_GL"]] if "MUJOCO_GL" in os.environ else ["egl", "osmesa", "glfw"]:
        environment = {**os.environ, "MUJOCO_GL": renderer}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
        if done.returncode == 0:
            return
    reason = done.stderr.decode().strip().splitlines()[-1:] or ["no message"]
    print(f"no video: {reason[0]} (headless rendering needs a GPU with EGL, or Debian's libosmesa6)", file=sys.stderr)


# ---- end shared ----


# ---- shared: run directory (identical in every script; `python tests/test_shared_blocks.py --fix` copies it) ----
CHECKPOINT_SECONDS = 60


def prepare(args) -> torch.device:
    """Fills in what other flags imply, takes a resumed run's flags from its args.json, chooses the device."""
    args.started = time.monotonic()  # not a field, so not among the saved flags
    if args.resume is not None:
        folder = Path(args.resume)
        if not (folder / "args.json").is_file():
            sys.exit(f"error: --resume {folder}: no args.json there; give a run directory such as runs/<name>")
        saved = json.loads((folder / "args.json").read_text())
        here = {k: getattr(args, k) for k in ("resume", "cuda", "eval_workers")}
        for key, value in {**saved, **here}.items():
            setattr(args, key, value)
        if (folder / "result.json").is_file():
            print(f"{folder} is complete already")
            print(json.dumps(json.loads((folder / "result.json").read_text())))
            sys.exit(0)
    if args.task is None:
        if args.env_id is None and args.data is None:
            sys.exit("error: give --task (for example --task door-open), or --data with --env-id or --no-eval")
        args.task = args.env_id.split("/")[-1] if args.env_id else Path(args.data).stem
    args.data = args.data or f"data/{args.task}.npz"
    for flag in ("total_steps", "eval_every", "eval_episodes"):
        if getattr(args, flag) < 1:
            sys.exit(f"error: --{flag.replace('_', '-')} {getattr(args, flag)}: must be at least 1")
    if args.cuda and not torch.cuda.is_available():
        print("no GPU found: running on the CPU")
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


class Run:
    """The run directory: flags, curve, TensorBoard, exact checkpoints, model.pt and, once complete, result.json."""

    def __init__(self, args, **parts):
        """`parts`: modules, optimizers and generators that a checkpoint must hold; a resumed run restores them here."""
        from torch.utils.tensorboard import SummaryWriter

        self.args, self.parts, self.curve, self.done = args, parts, [], {}
        self.seconds = {"data": 0.0, "advantage": 0.0, "policy": 0.0, "evaluation": 0.0}
        self.clock_name, self.clock_start = "data", args.started
        name = f"{args.task}__{args.exp_name}__n{args.n_pref}__s{args.seed}__{int(time.time())}"
        self.folder = Path(args.resume or Path(args.runs_dir) / name)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(args.data, "rb") as file:
            self.data_digest = hashlib.file_digest(file, "sha256").hexdigest()
        if args.resume is None:
            write_atomically(self.folder / "args.json", json.dumps(asdict(args), indent=1))
        elif (self.folder / "checkpoint.pt").is_file():
            self._restore()
        if args.track:
            import wandb

            wandb.init(project="paws", name=self.folder.name, config=asdict(args), sync_tensorboard=True)
        self.writer = SummaryWriter(self.folder)
        self.saved = time.monotonic()
        self.evaluator = None
        print(f"run directory: {self.folder}")

    def start_clock(self, name: str) -> str:
        """Time from now on counts as `name`; returns what it counted as before."""
        now, before = time.monotonic(), self.clock_name
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self.clock_start
        self.clock_name, self.clock_start = name, now
        return before

    def log(self, key: str, value: float, step: int) -> None:
        self.writer.add_scalar(key, value, step)

    def checkpoint(self, force: bool = False, **done: int) -> None:
        """Saves everything that the rest of the run depends on, once a minute; `done` counts the finished updates."""
        self.done.update(done)
        if not force and time.monotonic() - self.saved < CHECKPOINT_SECONDS:
            return
        self.start_clock(self.clock_name)
        states = {k: p.get_state() if isinstance(p, torch.Generator) else p.state_dict() for k, p in self.parts.items()}
        state = {"parts": states, "done": self.done, "curve": self.curve, "seconds": self.seconds}
        torch.save({**state, "data": self.data_digest}, self.folder / "checkpoint.tmp")
        os.replace(self.folder / "checkpoint.tmp", self.folder / "checkpoint.pt")
        self.saved = time.monotonic()

    def _restore(self) -> None:
        state = torch.load(self.folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        if state["data"] != self.data_digest:
            sys.exit(f"error: {self.args.data}: not the file this run started with; restore it, or start a new run")
        for key, part in self.parts.items():
            if isinstance(part, torch.Generator):
                part.set_state(state["parts"][key])
            else:
                part.load_state_dict(state["parts"][key])
        self.done, self.curve, self.seconds = state["done"], state["curve"], state["seconds"]
        print(f"continuing {self.folder} after {self.done}")

    def evaluate(self, policy: Policy, step: int) -> None:
        """Every eval_every updates and at the end: a row of the curve, and a line for the reader with the time left."""
        args = self.args
        if self.evaluator is None or (step % args.eval_every and step != args.total_steps):
            return
        before = self.start_clock("evaluation")
        success, returned = self.evaluator.evaluate(policy, step)
        self.start_clock(before)
        elapsed = sum(self.seconds.values())
        self.curve.append([step, None if np.isnan(success) else success, returned, round(elapsed, 1)])
        rows = ["step,success_rate,episodic_return,seconds"]
        rows += [",".join("" if value is None else str(value) for value in row) for row in self.curve]
        write_atomically(self.folder / "evals.csv", "\n".join(rows) + "\n")
        self.log("eval/episodic_return", returned, step)
        text = f"return {returned:.0f}"
        if not np.isnan(success):
            self.log("eval/success_rate", success, step)
            text = f"success {success:.0%}, {text}"
        in_loop = self.seconds["policy"] + self.seconds["evaluation"]
        left = in_loop / step * (args.total_steps - step) / 60
        tqdm.write(f"update {step}/{args.total_steps}: {text}, {left:.1f} min left", file=sys.stdout)
        self.log("charts/SPS", step / in_loop, step)

    def finish(self, policy: Policy, model: dict, **summary) -> dict:
        """model.pt, the video if wanted, result.json, and the same summary as the last line on standard output."""
        args = self.args
        self.start_clock("policy")
        common = {"format_version": 1, "algorithm": args.exp_name, "task": args.task, "args": asdict(args)}
        dims = {"obs_dim": policy.net[0].in_features, "act_dim": policy.net[-2].out_features}
        weights = {k: v.cpu() for k, v in policy.state_dict().items()}
        torch.save({**common, **dims, "policy": weights, **model}, self.folder / "model.tmp")
        os.replace(self.folder / "model.tmp", self.folder / "model.pt")
        if args.capture_video:
            capture_video(self.folder / "video.mp4", self.folder / "model.pt", args)
        successes, returns = ([row[i] for row in self.curve] for i in (1, 2))
        success = smoothed([] if None in successes else successes)
        returns = smoothed(returns)
        git = ["git", "-C", str(Path(__file__).resolve().parent), "describe", "--always", "--dirty", "--abbrev=12"]
        try:
            commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            commit = None
        versions = {"python": sys.version.split()[0]}
        for package in ("torch", "numpy", "mujoco", "metaworld", "gymnasium"):
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = None
        result = {
            "algorithm": args.exp_name, "task": args.task, "n_pref": args.n_pref, "seed": args.seed,
            "steps": args.total_steps, "n_segments": None,
            "lambda": None, "n_eff": None, "n_eff_target": None, "kl": None,
            "pref_acc_train": None, "pref_acc_val": None,
            "success_peak": float(success.max()) if len(success) else None,
            "return_peak": float(returns.max()) if len(returns) else None,
            "success_last": float(success[-1]) if len(success) else None,
            "return_last": float(returns[-1]) if len(returns) else None,
            **{k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in summary.items()},
            "curve": [row[:3] for row in self.curve],
            "seconds": {k: round(v, 2) for k, v in (*self.seconds.items(), ("total", sum(self.seconds.values())))},
            "versions": versions, "git": commit,
        }  # fmt: skip
        write_atomically(self.folder / "result.json", json.dumps(result, indent=1))
        (self.folder / "checkpoint.pt").unlink(missing_ok=True)
        self.writer.close()
        if self.evaluator is not None:
            self.evaluator.close()
        print(json.dumps(result))
        return result


# ---- end shared ----


# ---- shared: minibatches (identical in every baseline; `python tests/test_shared_blocks.py --fix` copies it) ----
def set_defaults(args: Args, defaults: dict, **least: int) -> None:
    """Flags that were not given get their default; none may be below its least value."""
    for key, value in defaults.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    for key, value in least.items():
        if getattr(args, key) < value:
            sys.exit(f"error: --{key.replace('_', '-')} {getattr(args, key)}: must be at least {value}")


def minibatch(n: int, batch_size: int, seed: int, step: int) -> torch.Tensor:
    """Rows of update `step` = 1, 2, ...: each epoch is a permutation of the n pairs, its last batch may be smaller."""
    epoch, i = divmod(step - 1, math.ceil(n / batch_size))
    order = np.random.default_rng([seed, 2, epoch]).permutation(n)  # the step tells all: exact resume
    return torch.from_numpy(order[i * batch_size : (i + 1) * batch_size])


# ---- end shared ----


# ---- shared: transitions (identical where it stands; `python tests/test_shared_blocks.py --fix` copies it) ----
def random_transitions(segments: int, length: int, size: int, generator: torch.Generator) -> tuple:
    """Segments i and steps t of `size` transitions (s_t, a_t, s_t+1), drawn from all: (size,), (size,)"""
    index = torch.randint(segments * (length - 1), (size,), generator=generator, device=generator.device)
    return index // (length - 1), index % (length - 1)


# ---- end shared ----


# ---- shared: critics (identical where it stands; `python tests/test_shared_blocks.py --fix` copies it) ----
class Critics(nn.Module):
    """Two independent Q functions."""

    def __init__(self, obs_dim: int, act_dim: int, width: int, init=None):
        super().__init__()
        self.nets = nn.ModuleList([mlp(obs_dim + act_dim, width, init) for _ in range(2)])

    def forward(self, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        x = torch.cat((obs, act), dim=-1)
        return torch.stack([net(x) for net in self.nets])  # (2, ...)


def expectile_loss(u: torch.Tensor, expectile: float) -> torch.Tensor:
    """mean |expectile - 1(u < 0)| u^2, u = Q - V."""
    return ((expectile - (u < 0).float()).abs() * u.square()).mean()


def cosine(step: int, total: int, peak: float) -> float:
    """Learning rate of update `step` = 1, 2, ...: peak -> 0 after `total` updates."""
    return peak * 0.5 * (1 + math.cos(math.pi * (step - 1) / total))


# ---- end shared ----


def mlp(n_in: int, width: int, init=None) -> nn.Sequential:
    """Two hidden layers, one output, orthogonal."""
    sizes = (n_in, width, width)
    layers = [m for a, b in zip(sizes, sizes[1:], strict=False) for m in (linear(a, b, init), nn.ReLU())]
    return nn.Sequential(*layers, linear(width, 1, init), nn.Flatten(-2))  # (..., n_in) -> (...)


def implicit_reward(q: torch.Tensor, next_value: torch.Tensor, args: Args) -> torch.Tensor:
    """r = Q(s, a) - gamma V(s'). (2, ..., T - 1), (..., T - 1) -> (2, ..., T - 1)"""
    if args.clip_target:
        limit = 1 / (args.chi2 * (1 - args.gamma))
        next_value = next_value.clamp(-limit, limit)
    return q - args.gamma * next_value


def preference_loss(rewards: torch.Tensor, labelled: torch.Tensor) -> torch.Tensor:
    """-mean log sigmoid(sum_t r(tau+) - sum_t r(tau-)) over critics and labelled pairs. (2, B, 2, T - 1), (B,) -> ()"""
    better, worse = rewards.sum(-1).unbind(-1)  # each (2, B)
    return (F.softplus(worse - better).mean(0) * labelled).sum() / labelled.sum().clamp(min=1)


def accuracy(scores: torch.Tensor) -> float:
    """Share of pairs whose preferred segment, the first, has the larger score. (n, 2)"""
    return (scores[:, 0] > scores[:, 1]).double().mean().item()


class IPL:
    """Value, two critics and their targets, policy, one Adam each."""

    def __init__(self, args: Args, obs_dim: int, act_dim: int, init, noise, device):
        self.args = args
        self.policy = Policy(obs_dim, act_dim, init, noise).to(device)
        self.value = mlp(obs_dim, args.critic_width, init).to(device)
        self.critics = Critics(obs_dim, act_dim, args.critic_width, init).to(device)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.policy_optimizer = torch.optim.Adam(self.policy.parameters(), lr=args.learning_rate)
        self.value_optimizer = torch.optim.Adam(self.value.parameters(), lr=args.learning_rate)
        self.critics_optimizer = torch.optim.Adam(self.critics.parameters(), lr=args.learning_rate)

    def parts(self) -> dict:
        return {k: v for k, v in vars(self).items() if k != "args"}

    def update(self, segments, act, labelled, drawn: tuple | None = None) -> dict[str, torch.Tensor]:
        """Pairs (B, 2, T, o), (B, 2, T, a), preferred first; labelled (B,): 1 where the preference may be used.

        V and policy learn from the pairs' own steps, or from those `drawn`: (M, o), (M, a)."""
        args = self.args
        obs, act = segments[..., :-1, :], act[..., :-1, :]  # the last state is only a successor
        own_obs, own_act = (obs, act) if drawn is None else drawn
        with torch.no_grad():
            q = self.targets(own_obs, own_act).amin(0)  # (B, 2, T - 1) or (M,)
        value_loss = expectile_loss(q - self.value(own_obs), args.expectile)
        self.value_optimizer.zero_grad()
        value_loss.backward()
        self.value_optimizer.step()

        with torch.no_grad():
            value, next_value = self.value(own_obs), self.value(segments[..., 1:, :])  # of the new V
        rewards = implicit_reward(self.critics(obs, act), next_value, args)  # (2, B, 2, T - 1)
        preference, chi2 = preference_loss(rewards, labelled), rewards.square().mean()
        self.critics_optimizer.zero_grad()
        (preference + args.chi2 * chi2).backward()
        self.critics_optimizer.step()

        weight = ((q - value) / args.beta).exp().clamp(max=100.0)
        policy_loss = -(weight * self.policy.log_prob(own_obs, own_act)).mean()
        self.policy_optimizer.zero_grad()
        policy_loss.backward()
        self.policy_optimizer.step()
        with torch.no_grad():
            for target, source in zip(self.targets.parameters(), self.critics.parameters(), strict=True):
                target.lerp_(source, args.tau)
        losses = {"value": value_loss, "preference": preference, "chi2": chi2, "policy": policy_loss}
        return {**losses, "weight": weight.mean()}

    @torch.no_grad()
    def score_segments(self, obs: torch.Tensor, act: torch.Tensor, size: int = 64) -> torch.Tensor:
        """Sum of a segment's implicit rewards, mean of both critics. (K, T, o), (K, T, a) -> (K,)"""
        scores = []
        for o, a in zip(obs.split(size), act.split(size), strict=True):
            rewards = implicit_reward(self.critics(o[:, :-1], a[:, :-1]), self.value(o[:, 1:]), self.args)
            scores.append(rewards.mean(0).sum(1))
        return torch.cat(scores)


def cropped(obs: torch.Tensor, act: torch.Tensor, steps: int, generator: torch.Generator) -> tuple:
    """A window of `steps` (0, T or more: all) of each pair, the same of both. (B, 2, T, ...) -> (B, 2, steps, ...)"""
    pairs, _, length = obs.shape[:3]
    if not 0 < steps < length:
        return obs, act
    start = torch.randint(length - steps + 1, (pairs, 1), generator=generator, device=obs.device)
    window = start + torch.arange(steps, device=obs.device)  # (B, steps)
    row = torch.arange(pairs, device=obs.device).unsqueeze(1)
    return tuple(x.transpose(1, 2)[row, window].transpose(1, 2) for x in (obs, act))


def apply_preset(args: Args) -> None:
    """Fills in the flags that were not given."""
    set_defaults(args, PRESETS[args.preset], batch_size=1, crop=0, transitions=0)


def main(args: Args) -> dict:
    apply_preset(args)
    device = prepare(args)
    obs, act, prefs = load_segments(args)  # (K, T, o), (K, T, a), (n, 2)
    (n_segments, length, obs_dim), act_dim = obs.shape, act.shape[-1]
    if length < 2:
        sys.exit(f"error: {args.data}: key 'obs': segments of 1 step; IPL needs transitions, so at least 2")
    if args.crop == 1:
        sys.exit("error: --crop 1: IPL needs transitions, so at least 2 steps, or 0 for whole segments")
    evaluator = Evaluator(args, obs_dim, act_dim) if args.eval else None

    init = torch.Generator().manual_seed(args.seed)
    noise = torch.Generator(device).manual_seed(args.seed)  # dropout and transitions
    ipl = IPL(args, obs_dim, act_dim, init, noise, device)
    run = Run(args, noise=noise, **ipl.parts())
    run.evaluator = evaluator
    obs, act, prefs = obs.to(device), act.to(device), prefs.to(device)
    prefs = prefs[torch.from_numpy(np.random.default_rng([args.seed, 1]).permutation(len(prefs))).to(device)]
    n_val = len(prefs) // 10  # held out of the preference term
    val, train = prefs[:n_val], prefs[n_val:]

    run.start_clock("policy")
    start = run.done.get("policy", 0)
    with tqdm(total=args.total_steps, initial=start, desc="policy", unit="update", disable=None) as bar:
        for step in range(start + 1, args.total_steps + 1):
            rows = minibatch(len(prefs), args.batch_size, args.seed, step).to(device)
            pairs, labelled = prefs[rows], (rows >= n_val).float()  # (B, 2), (B,)
            drawn = None
            if args.transitions:
                at = random_transitions(n_segments, length, args.transitions, noise)
                drawn = obs[at], act[at]
            if args.policy_decay:
                ipl.policy_optimizer.param_groups[0]["lr"] = cosine(step, args.total_steps, args.learning_rate)
            losses = ipl.update(*cropped(obs[pairs], act[pairs], args.crop, noise), labelled, drawn)
            bar.update()
            if step % args.eval_every == 0:
                for key, value in losses.items():
                    run.log(f"losses/{key}", value.item(), step)
            run.evaluate(ipl.policy, step)
            run.checkpoint(policy=step)
    scores = ipl.score_segments(obs, act)
    acc_train, acc_val = accuracy(scores[train]), accuracy(scores[val])
    run.log("charts/pref_acc_train", acc_train, args.total_steps)
    if n_val:
        run.log("charts/pref_acc_val", acc_val, args.total_steps)
    print(f"implicit reward: accuracy {acc_train:.3f} on {len(train)} pairs, {acc_val:.3f} on {n_val} held-out pairs")
    saved = {
        key: {k: v.cpu() for k, v in part.state_dict().items()}
        for key, part in (("value", ipl.value), ("critics", ipl.critics))
    }
    return run.finish(ipl.policy, saved, n_segments=n_segments, pref_acc_train=acc_train, pref_acc_val=acc_val)


if __name__ == "__main__":
    main(tyro.cli(Args))
