# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.6", "tyro>=0.9", "numpy>=2", "scipy>=1.17", "tensorboard", "tqdm",
#                 "gymnasium[mujoco]>=1.1", "mujoco==3.3.0", "metaworld==3.1.1"]
# ///
"""PAWS, Transformer advantage model: Preference Learning with Advantage-Weighted Segments (ICML 2026). MIT licence.

    python paws_transformer.py --task door-open --n-pref 50 --n-eff 0.1

1. Advantage: an encoder-only Transformer reads a segment, an MLP head gives A_t of each step;
   A(tau) = sum_t A_t is fitted to pairs by Bradley-Terry.                                     Eq. 1
       L_pref = -mean log sigmoid(A(tau+) - A(tau-))                                           Eq. 2
2. Weights: max_p E_p[A] with KL(p || data) <= epsilon has p* ~ data * exp(A / lambda).        Eq. 3, 4
       w_i = exp(A(tau_i) / lambda) / sum_j exp(A(tau_j) / lambda)                             Eq. 7
   lambda is the one at which n_eff = (sum w)^2 / sum w^2 has the wanted value,                Eq. 10
   or (--kl-bound) the one that minimises the dual g(lambda) for a given epsilon.              Eq. 9
   --trust-region chi2 bounds n_eff itself instead of the KL: w_i ~ max(0, A(tau_i) - c).      docs/beyond.md
3. Policy: weighted maximum likelihood with whole segments' weights, never single steps'.
       max sum_i w_i sum_t log pi(a_t | s_t)                                                   Eq. 8

The method is lines 25 to 277. Below it is what every script of this repository has in common: data, policy,
simulators, evaluation, run directory. Choices where the paper is silent: docs/paws_transformer.md.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy only runs small forward passes, in one process per core

import numpy as np
import torch
from scipy.optimize import brentq, minimize
from torch import nn


@dataclass
class Args:
    task: str = ""  # one of the 14 tasks, or any name for your own data
    n_pref: int = 0  # preference pairs to learn from, a seeded choice [all in the file]
    n_eff: float = 0.0  # effective sample size: a share of the segments, above 1 a number [0.1; locomotion, chi2 0.3]
    seed: int = 1  # of the choice of pairs, networks, minibatches, dropout and evaluation episodes
    trust_region: Literal["kl", "chi2"] = "kl"  # exponential weights (the paper), or the linear ones, optimal for n_eff
    cover_starts: bool = False  # with chi2: the weighted segments begin in such states as all of them do
    kl_bound: float | None = None  # epsilon: choose lambda by the dual (Eq. 9) for this bound instead of by n_eff
    update: Literal["segment", "state"] = "segment"  # what gets a weight: segments, or steps (the paper's ablation)
    update_segment_length: int = 0  # cut segments into pieces of this length for weights and policy [whole segments]
    minibatch: Literal["resample", "weight"] = "resample"  # draw with probability w_i, or uniformly and weight the loss
    # advantage model
    advantage_from: str = ""  # run directory whose advantage model to take; "oracle": the file's expert_logp instead
    advantage_steps: int = 3_000  # at most so many updates
    advantage_batch_size: int = 16  # pairs
    advantage_learning_rate: float = 3e-4  # Adam
    advantage_width: int = 512  # of the tokens; the feed-forward part has four times as many units
    advantage_layers: int = 4  # of the encoder
    advantage_heads: int = 8  # attention heads in each layer
    advantage_dropout: float = 0.1  # of tokens and encoder
    state_context: bool = False  # judge pieces and steps within their segment, not as sequences of their own
    stop_accuracy: float = 0.995  # stop once so many of the pairs are ranked correctly
    # policy
    total_steps: int = 10_000  # updates
    batch_size: int = 256  # steps in an update; for each a segment is drawn anew
    learning_rate: float = 3e-4  # Adam
    eval_every: int = 250  # updates between two evaluations
    exp_name: str = "paws_transformer"  # name of the method in run directory and tables
    # the same in every script
    data: str = ""  # preference file [data/<task>.npz]
    cuda: bool = True  # use a GPU if there is one
    eval: bool = True  # evaluate in the simulator; --no-eval needs none
    eval_episodes: int = 25  # in each evaluation
    eval_return: bool = True  # --no-eval-return ends an episode at its first success: faster, same success rates
    eval_workers: int = min(4, os.cpu_count() or 1)  # processes
    env_id: str = ""  # evaluate in this Gymnasium environment; actions in [-1, 1] are rescaled to its action space
    runs_dir: str = "runs"  # parent of the run directory
    resume: str = ""  # run directory of a killed run: continue it with its own flags, to exactly the same result
    track: bool = False  # log to Weights & Biases too (needs wandb)


class AdvantageModel(nn.Module):
    """Tokens (s_t, a_t) with learned positions -> Transformer encoder -> MLP head -> an advantage A_t for each step."""

    def __init__(self, obs_dim: int, act_dim: int, length: int, width: int, layers: int, heads: int, dropout: float):
        super().__init__()
        self.embed, self.dropout = nn.Linear(obs_dim + act_dim, width), nn.Dropout(dropout)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(torch.cat((obs, act), dim=-1)) + self.position[: obs.shape[1]]  # (B, L, W)
        return self.head(self.encoder(self.dropout(tokens))).squeeze(-1)  # (B, L)


# ---- shared by the PAWS scripts ----
def preference_loss(better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """Eq. 2: -mean log sigmoid(A(tau+) - A(tau-)). (B,), (B,) -> ()"""
    return -nn.functional.logsigmoid(better - worse).mean()


def effective_samples(weights: np.ndarray) -> float:
    """Eq. 10: n_eff = (sum w)^2 / sum w^2."""
    return float(weights.sum() ** 2 / np.dot(weights, weights))


def kl_divergence(weights: np.ndarray) -> float:
    """KL(p* || data) = sum w log(N w) of normalised weights."""
    positive = weights[weights > 0]
    return float(np.dot(positive, np.log(len(weights) * positive)))


def segment_weights(advantages: np.ndarray, lam: float, trust_region: str = "kl") -> np.ndarray:
    """Eq. 7: w_i ~ exp(A_i / lambda); linear ones for chi2: w_i ~ max(0, A_i - c), c = max A - lambda. (N,) -> (N,)"""
    scaled = (advantages - advantages.max()) / lam  # minus the maximum: no overflow
    weights = np.exp(scaled) if trust_region == "kl" else np.maximum(1.0 + scaled, 0.0)
    return weights / weights.sum()


def solve_lambda(advantages: np.ndarray, n_eff: float, kl_bound: float | None = None, trust_region="kl") -> float:
    """The lambda that gives n_eff (rises with lambda), or the KL bound (falls; the dual has g' = epsilon - KL)."""
    below = advantages.max() - advantages
    if not below.any():
        return 1.0  # identical advantages: uniform weights with any lambda

    def gap(log_lam: float) -> float:
        weights = segment_weights(-below, np.exp(log_lam), trust_region)
        return np.log(effective_samples(weights) / n_eff) if kl_bound is None else kl_bound - kl_divergence(weights)

    low, high = np.log(below[below > 0].min() / 700), np.log(below.max()) + 19  # the best alone; uniform weights
    if gap(low) >= 0 or gap(high) <= 0:  # cannot be had: the nearest end
        return float(np.exp(low if gap(low) >= 0 else high))
    return float(np.exp(brentq(gap, low, high, xtol=1e-13, rtol=1e-13)))


def start_features(states: np.ndarray) -> np.ndarray:
    """phi: first three principal components of standardised first states, mean 0 and variance 1. (N, o) -> (N, 3)"""
    standardised = (states - states.mean(0)) / np.maximum(states.std(0), 1e-6)
    components, sizes, _ = np.linalg.svd(standardised, full_matrices=False)
    return components[:, :3] * np.sqrt(len(states)) * (sizes[:3] > 1e-6)  # zeros where all states are the same


def cover_starts(advantages: np.ndarray, states: np.ndarray, n_eff: float) -> np.ndarray:
    """A_i / sd(A) - m . phi_i, whose linear weights maximise E_w[A] / sd(A) - |m|^2 / 2 with m = E_w[phi]. -> (N,)"""
    features, scaled = start_features(states), advantages / (advantages.std() or 1.0)

    def dual(m: np.ndarray) -> tuple[float, np.ndarray]:  # max_w E_w[A / sd(A) - m . phi] + |m|^2 / 2, and its gradient
        shifted = scaled - features @ m
        weights = segment_weights(shifted, solve_lambda(shifted, n_eff, None, "chi2"), "chi2")
        return weights @ shifted + m @ m / 2, m - weights @ features

    return scaled - features @ minimize(dual, np.zeros(features.shape[1]), jac=True).x


@torch.no_grad()
def step_advantages(model: nn.Module, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
    """A(s_t, a_t) without dropout, about 16,000 steps at a time. (K, L, o), (K, L, a) -> (K, L)"""
    if not len(obs):  # a Transformer on a GPU refuses an empty batch
        return obs.new_zeros(obs.shape[:2])
    model.eval()
    size = max(1, 16_384 // obs.shape[1])
    advantages = [model(o, a) for o, a in zip(obs.split(size), act.split(size), strict=True)]
    model.train()
    return torch.cat(advantages)


def accuracy(advantages: torch.Tensor, prefs: torch.Tensor) -> float:
    """Share of pairs whose preferred segment has the larger advantage; NaN of none. (K,), (n, 2)"""
    return (advantages[prefs[:, 0]] > advantages[prefs[:, 1]]).double().mean().item()


def oracle_advantages(path: str, rows: torch.Tensor) -> torch.Tensor:
    """--advantage-from oracle: what the labels were made from, log pi*(a_t | s_t) of the data's best policy. (K, T)"""
    with explain(f"{path}: has no expert_logp, which --advantage-from oracle needs"):
        return torch.from_numpy(np.load(path, allow_pickle=False)["expert_logp"]).to(rows.device)[rows]


def take_advantage_model(model: nn.Module, args: Args) -> None:
    """--advantage-from RUN_DIR: the advantage model of another run, which must have learned from the same pairs."""
    path = Path(args.advantage_from, "model.pt")
    with explain(f"{path}: has no advantage model that fits the --advantage-... flags"):
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(saved["advantage"])
        same = all(saved["args"][key] == getattr(args, key) for key in ("data_sha256", "n_pref", "seed"))
    require(same, f"{path}: learned from other data or pairs; use the same --data, --n-pref and --seed")


# ---- end ----


def main(args: Args) -> dict:
    device = prepare(args)
    data, unused = load_data(args, device)
    obs, act, prefs = data.obs, data.act, data.prefs  # (K, T, o), (K, T, a), (n, 2): preferred first
    (K, T, obs_dim), act_dim = obs.shape, act.shape[-1]
    L = 1 if args.update == "state" else args.update_segment_length or T  # an ablation may weight shorter pieces
    require(T % L == 0, f"--update-segment-length {L}: must divide the segment length {T}")
    require(args.kl_bound is None or args.trust_region == "kl", "--kl-bound: goes with --trust-region kl")
    require(not args.cover_starts or args.trust_region == "chi2", "--cover-starts: goes with --trust-region chi2")
    divisible = args.advantage_width % args.advantage_heads == 0
    require(divisible, f"--advantage-width {args.advantage_width}: must be a multiple of --advantage-heads")
    size = (args.advantage_width, args.advantage_layers, args.advantage_heads, args.advantage_dropout)
    model = AdvantageModel(obs_dim, act_dim, T, *size).to(device)
    if args.advantage_from == "oracle":
        oracle = [oracle_advantages(args.data, part.rows) for part in (data, unused)]
    elif args.advantage_from:
        take_advantage_model(model, args)
    policy = Policy(obs_dim, act_dim).to(device)
    model_optimizer = torch.optim.Adam(model.parameters(), lr=args.advantage_learning_rate, fused=True)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate, fused=True)
    run = Run(args, model=model, model_optimizer=model_optimizer, policy=policy, optimizer=optimizer)

    # 1. Advantage learning on preference data
    advantage_steps = 0 if args.advantage_from else args.advantage_steps
    for step in run.steps("advantage", advantage_steps):
        pairs = prefs[torch.randint(len(prefs), (args.advantage_batch_size,), device=device)]  # (B, 2)
        better, worse = model(obs[pairs].flatten(0, 1), act[pairs].flatten(0, 1)).sum(1).view(-1, 2).unbind(1)
        loss = preference_loss(better, worse)
        model_optimizer.zero_grad()
        loss.backward()
        model_optimizer.step()
        if step % 100 == 0 or (step < 100 and step % 10 == 0):
            pref_acc_train = accuracy(step_advantages(model, obs, act).sum(1), prefs)
            run.log(step, losses__advantage=loss.item(), charts__pref_acc_train=pref_acc_train)
            if pref_acc_train >= args.stop_accuracy:
                break
    run.done["advantage"] = advantage_steps  # it may have stopped early
    if args.advantage_from == "oracle":
        advantages, held_out = oracle
    else:
        advantages, held_out = (step_advantages(model, part.obs, part.act) for part in (data, unused))  # (K, T)
    pref_acc_train, pref_acc_val = accuracy(advantages.sum(1), prefs), accuracy(held_out.sum(1), unused.prefs)
    print(f"advantage: accuracy {pref_acc_train:.3f} on {len(prefs)} pairs, {pref_acc_val:.3f} on the unused ones")

    # 2. Weights of the N segments, or of their N pieces of L steps
    if L == T or args.state_context or args.advantage_from == "oracle":
        per_piece = advantages.view(-1, L)  # (N, L)
    else:  # each piece is read alone
        per_piece = step_advantages(model, obs.view(-1, L, obs_dim), act.view(-1, L, act_dim))
    pieces = per_piece.sum(1).double().cpu().numpy()  # (N,)
    wanted = args.n_eff or (0.3 if args.task in LOCOMOTION_TASKS or args.trust_region == "chi2" else 0.1)
    n_eff_target = wanted * (len(pieces) if wanted <= 1 else T // L)  # a share of the pieces, or so many segments
    if args.cover_starts:
        pieces = cover_starts(pieces, obs.reshape(-1, L, obs_dim)[:, 0].double().cpu().numpy(), n_eff_target)
    lam = solve_lambda(pieces, n_eff_target, args.kl_bound, args.trust_region)
    weights = segment_weights(pieces, lam, args.trust_region)  # (N,), sum 1
    n_eff, kl = effective_samples(weights), kl_divergence(weights)
    run.log(0, weights__lambda=lam, weights__n_eff=n_eff, weights__kl=kl, weights__max=weights.max())
    print(f"weights: lambda {lam:.4g}, n_eff {n_eff:.1f} of {len(pieces)}, KL {kl:.3f}, largest {weights.max():.4f}")
    if args.kl_bound is None and abs(n_eff / n_eff_target - 1) > 0.01:
        print(f"n_eff {n_eff_target:g} cannot be had with these advantages: this is the nearest")

    # 3. Policy: weighted maximum likelihood (Eq. 8). Both ways to draw a minibatch are unbiased.
    probabilities = torch.from_numpy(weights).to(device)
    obs_steps, act_steps = obs.flatten(0, 1), act.flatten(0, 1)  # (N L, o), (N L, a)
    for step in run.steps("policy", args.total_steps):
        if args.minibatch == "resample":
            i, scale = torch.multinomial(probabilities, args.batch_size, replacement=True), 1.0
        else:
            i = torch.randint(len(probabilities), (args.batch_size,), device=device)
            scale = (probabilities[i] * len(probabilities)).float()  # (B,)
        row = i * L + torch.randint(L, (args.batch_size,), device=device)  # one step of each drawn piece
        loss = -(scale * policy.log_prob(obs_steps[row], act_steps[row])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.eval_every == 0 or step == args.total_steps:
            run.log(step, losses__policy=loss.item())
            run.evaluate(policy, step)
    learned = {"policy": policy, "weights": probabilities, "segments": data.rows}
    return run.finish(
        learned if args.advantage_from == "oracle" else {**learned, "advantage": model},
        n_segments=K, n_eff=n_eff, n_eff_target=n_eff_target if args.kl_bound is None else None, kl=kl,
        pref_acc_train=pref_acc_train, pref_acc_val=pref_acc_val,
        **{"lambda": lam if args.trust_region == "kl" else None},
    )  # fmt: skip


# ======== The rest is the same in every script: python tests/test_shared.py --fix copies it ========
import hashlib
import json
import multiprocessing
import signal
import threading
import time
from collections import Counter
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from importlib import metadata
from types import SimpleNamespace

import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


def require(condition: bool, problem: str) -> None:
    """A mistake of the user's ends the program with one line that names the fix."""
    if not condition:
        sys.exit(f"error: {problem}")


@contextmanager
def explain(problem: str, error: type[Exception] = Exception):
    """So does what fails inside, with the reason behind it."""
    try:
        yield
    except error as e:
        sys.exit(f"error: {problem} ({e!r:.200})")


# ---- data ----
def load_data(args: Args, device: torch.device) -> tuple[SimpleNamespace, SimpleNamespace]:
    """The segments of n_pref chosen pairs, to learn from, and those of the unused pairs, only to report an accuracy."""
    name = args.data
    with explain(f"{name}: cannot read obs, act (floats), prefs (integers), format_version from it"):
        digest = hashlib.sha256(Path(name).read_bytes()).hexdigest()
        with np.load(name, allow_pickle=False) as file:
            require(file.zip.testzip() is None, f"{name}: a checksum is wrong; copy it again")  # np.load reads none
            require(np.array_equal(file["format_version"], 1), f"{name}: format_version must be the integer 1")
            obs, act = (file[key].astype(np.float32, casting="same_kind") for key in ("obs", "act"))
            prefs = file["prefs"].astype(np.int64, casting="same_kind")
            policy = np.asarray(file["policy"]) if "policy" in file else np.zeros(obs.shape[:1])
    resumed = vars(args).setdefault("data_sha256", digest)  # a resumed run has it from args.json
    require(resumed == digest, f"{name}: not the file this run started with; restore it, or start a new run")
    fits = obs.ndim == act.ndim == 3 and obs.shape[:2] == act.shape[:2] and obs.size * act.size > 0
    require(fits, f"{name}: obs and act must be (K, T, dim) with the same K and T, not {obs.shape} and {act.shape}")
    require(np.isfinite(obs).all(), f"{name}: obs has NaN or infinity; remove those segments")
    require(np.abs(act).max() <= 1, f"{name}: act must be in [-1, 1], without NaN; rescale the actions")
    fits = prefs.shape[1:] == (2,) and (prefs[:, 0] != prefs[:, 1]).all() and np.isin(prefs, np.arange(len(obs))).all()
    require(fits, f"{name}: prefs must be (n, 2), in each row two different segments of {len(obs)}")
    require(policy.shape == obs.shape[:1], f"{name}: policy must have {len(obs)} entries, or be absent")
    args.n_pref = args.n_pref or len(prefs)
    require(1 <= args.n_pref <= len(prefs), f"{name}: prefs has {len(prefs)} rows; choose --n-pref from 1 to that")

    def segments(pairs: np.ndarray) -> SimpleNamespace:
        """obs (K, T, o), act (K, T, a), prefs (n, 2): preferred and other segment, rows (K,): segments in the file."""
        rows, place = np.unique(pairs, return_inverse=True)
        parts = dict(obs=obs[rows], act=act[rows], prefs=place.reshape(-1, 2), rows=rows)
        return SimpleNamespace(**{key: torch.from_numpy(x).to(device) for key, x in parts.items()})

    chosen = choose_pairs(prefs, args.n_pref, args.seed, policy)
    return segments(prefs[chosen]), segments(np.delete(prefs, chosen, axis=0))


def choose_pairs(prefs: np.ndarray, n: int, seed: int, policy: np.ndarray) -> np.ndarray:
    """n rows in random order, in which each of the policies that made the segments has its equal share, if possible."""
    quota, counts, chosen, left = -(-2 * n // len(set(policy.tolist()))), Counter(), [], []
    for row in np.random.default_rng([seed, 0]).permutation(len(prefs)):
        after = counts + Counter(policy[prefs[row]].tolist())
        fits = max(after.values()) <= quota
        (chosen if fits else left).append(row)
        counts = after if fits else counts
    return np.array((chosen + left)[:n])


# ---- policy ----
def linear(n_in: int, n_out: int) -> nn.Linear:
    """Orthogonal weights and zero bias: CPL's initialisation."""
    layer = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Dropout(nn.Dropout):
    """With torch.rand, which on a CPU takes less than half the time of nn.Dropout's Bernoulli numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand_like(x).ge_(self.p).div_(1 - self.p) if self.training else x


class Policy(nn.Module):
    """CPL's actor: deterministic mu(s) in (-1, 1), two hidden layers of 512, dropout 0.25 before each ReLU."""

    def __init__(self, obs_dim: int, act_dim: int):
        super().__init__()
        hidden = [linear(obs_dim, 512), Dropout(0.25), nn.ReLU(), linear(512, 512), Dropout(0.25), nn.ReLU()]
        self.net = nn.Sequential(*hidden, linear(512, act_dim), nn.Tanh())

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.net(obs)  # (..., o) -> (..., a)

    def log_prob(self, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
        """A unit-variance Gaussian up to constants: log pi(a | s) = -||a - mu(s)||^2. (..., o), (..., a) -> (...)"""
        return -(self(obs) - act).square().sum(-1)


# ---- simulators ----
LOCOMOTION_TASKS = {  # without early termination
    "ant": dict(id="Ant-v5", terminate_when_unhealthy=False, include_cfrc_ext_in_observation=False),
    "half-cheetah": dict(id="HalfCheetah-v5"),
    "hopper": dict(id="Hopper-v5", terminate_when_unhealthy=False),
    "walker2d": dict(id="Walker2d-v5", terminate_when_unhealthy=False),
}
HORIZON = 250


def make_metaworld(task: str):
    """A Meta-World v3 task with CPL's changes: visible goal, new at each reset; random hand start; 35 observations."""
    import gymnasium as gym
    import mujoco
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
    from scipy.spatial.transform import Rotation

    env = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-v3-goal-observable"]()
    env.max_path_length = HORIZON
    env._freeze_rand_vec, env.seeded_rand_vec = False, True  # goals from env.np_random
    # Its quaternions without scipy's test that a matrix is a rotation, which takes a third of a step.
    unchecked = SimpleNamespace(from_matrix=partial(Rotation.from_matrix, assume_valid=True))
    sys.modules[type(env).__base__.__module__].Rotation = unchecked
    env.touching_object = lambda geom: False  # info alone tells it, and it takes half of a step of sweep-into
    reset_scene, hand_noise = env.reset, np.array([0.25, 0.15, 0.2])

    def reset(seed: int, options: None = None) -> tuple[np.ndarray, dict]:
        env.seed(seed)
        mujoco.mj_resetData(env.model, env.data)  # nothing of the last episode may reach into this one
        reset_scene()
        hand = env.hand_init_pos + env.np_random.uniform(-hand_noise, hand_noise)
        for _ in range(50):  # env.init_tcp stays as it was: rewards need the unmoved one
            env.data.mocap_pos[0] = np.clip(hand, env.mocap_low, env.mocap_high)
            env.data.mocap_quat[0] = (1, 0, 1, 0)
            env.do_simulation([-1, 1], env.frame_skip)
        env._prev_obs = env._get_curr_obs_combined_no_goal()
        return env._get_obs(), {}

    env.reset = reset  # Meta-World's ignores the seed
    kept = np.r_[0:18, 22:39]  # of 39 observations: all but the previous position of the hand
    return gym.wrappers.TransformObservation(env, lambda obs: obs[kept], gym.spaces.Box(-np.inf, np.inf, (35,)))


@cache  # one per process
def make_env(task: str, env_id: str = ""):
    """A task's simulator, or any Gymnasium environment with bounded actions, which become [-1, 1]."""
    import gymnasium as gym

    if not env_id and task not in LOCOMOTION_TASKS:
        return make_metaworld(task)
    env = gym.make(env_id) if env_id else gym.make(**LOCOMOTION_TASKS[task], max_episode_steps=HORIZON)
    if env.spec.max_episode_steps is None:  # episodes would not end
        env = gym.wrappers.TimeLimit(env, 1_000)
    assert env.action_space.is_bounded(), "actions must be bounded"
    low, high = env.action_space.low, env.action_space.high  # RescaleAction would round differently from the data's
    unit = gym.spaces.Box(-1.0, 1.0, low.shape)
    env = gym.wrappers.TransformAction(env, lambda a: low + (a + 1.0) * 0.5 * (high - low), unit)
    return gym.wrappers.FlattenObservation(env)


# ---- evaluation ----
def start_worker() -> None:
    """An evaluation process leaves Ctrl-C to its parent and ends with it, in the middle of an episode too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def run_episode(args: Args, weights: list[np.ndarray], seed: int) -> tuple[float, float]:
    """(success at any step, return) of one episode of the policy's mean, in a worker, which keeps its simulator."""
    env, success, returned, ended = make_env(args.task, args.env_id), np.nan, 0.0, False
    w1, b1, w2, b2, w3, b3 = weights
    obs, _ = env.reset(seed=seed)
    while not ended:
        hidden = np.maximum(np.asarray(obs, np.float32) @ w1 + b1, 0.0)
        hidden = np.maximum(hidden @ w2 + b2, 0.0)
        obs, reward, terminated, truncated, info = env.step(np.tanh(hidden @ w3 + b3))
        returned += float(reward)
        success = np.fmax(success, info.get("success", info.get("is_success", np.nan)))  # NaN: no such notion
        ended = terminated or truncated or (success == 1 and not args.eval_return)
    return float(success), returned


# ---- run directory ----
def prepare(args: Args) -> torch.device:
    """Flags of a resumed run, flags that others imply, checks, the seed, the device."""
    args.script = Path(__file__).name  # stands in args.json beside the flags
    if args.resume:
        folder, here = Path(args.resume), dict(resume=args.resume, cuda=args.cuda, eval_workers=args.eval_workers)
        with explain(f"--resume {folder}: no readable args.json there; give a run directory, runs/<name>"):
            vars(args).update({**json.loads((folder / "args.json").read_text()), **here})
        require(args.script == Path(__file__).name, f"--resume {folder}: not a run of this script but of {args.script}")
        if (folder / "result.json").is_file():
            print(f"{folder} is complete already")
            sys.exit(0)
    require(args.task or args.data, "give --task (for example door-open), or --data with --env-id or --no-eval")
    args.task = args.task or Path(args.data).stem
    args.data = args.data or f"data/{args.task}.npz"
    for name, default in vars(Args()).items():  # a number is above 0, or 0 where that is its default
        value, zero = getattr(args, name), not default or name == "seed" or "dropout" in name
        top = 1 if name == "expectile" or "dropout" in name else np.inf
        if type(value) in (int, float) and not (0 < value < top or (value == 0 and zero)):
            sys.exit(f"error: --{name.replace('_', '-')} {value}: must be {'>=' if zero else '>'} 0 and < {top}")
    if args.cuda and not torch.cuda.is_available():
        print("no GPU found: running on the CPU")
    torch.manual_seed(args.seed)
    return torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")


def write(path: Path, content: str | dict) -> None:
    """A file appears only when it is complete: text, or a dict of tensors by torch.save."""
    temporary = path.with_name(f"{path.name}.tmp")
    with explain(f"{path}: cannot be written, is the disk full? Make room, then --resume {path.parent}"):
        temporary.write_text(content) if isinstance(content, str) else torch.save(content, temporary)
        os.replace(temporary, path)


class Run:
    """args.json, TensorBoard, evals.csv, checkpoint.pt while it lasts; model.pt and result.json once complete."""

    CHECKPOINT_SECONDS = 60

    def __init__(self, args: Args, **parts):
        """`parts`: modules and optimizers; a resumed run restores them, and the random state, here."""
        self.args, self.parts, self.phase, self.done, self.curve = args, parts, "data", {}, []
        self.seconds, self.clock = dict.fromkeys(("data", "utility", "policy", "evaluation"), 0.0), time.monotonic()
        self.pool = ProcessPoolExecutor(args.eval_workers, initializer=start_worker)
        if args.eval:
            with explain(f"{args.env_id or args.task}: no simulator that fits {args.data}; use --env-id or --no-eval"):
                env, net = make_env(args.task, args.env_id), parts["policy"].net  # forked workers inherit the simulator
                dims = env.observation_space.shape + env.action_space.shape
                assert dims == (net[0].in_features, net[-2].out_features), f"it has {dims} dimensions"
            self.pool.submit(os.getpid).result()  # starts them before TensorBoard's threads, which are not to be forked
        name = f"{args.task}__{args.exp_name}__n{args.n_pref}__s{args.seed}__{int(time.time())}"
        self.folder = Path(args.resume) if args.resume else Path(args.runs_dir, name)
        while self.folder.exists() and not args.resume:  # a run started in the same second
            self.folder = Path(f"{self.folder}-2")
        if args.track:
            with explain("--track: needs wandb: pip install wandb"):
                import wandb
            wandb.init(project="paws", name=self.folder.name, config=vars(args), sync_tensorboard=True)
        if not args.resume:
            with explain(f"{self.folder}: no folder can be made there; choose another --runs-dir", OSError):
                self.folder.mkdir(parents=True)
            write(self.folder / "args.json", json.dumps(vars(args), indent=1))
        self.checkpoint = self.folder / "checkpoint.pt"
        if self.checkpoint.is_file():
            with explain(f"{self.checkpoint}: damaged; delete it, then --resume starts this run anew"):
                state = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
                for key, part in parts.items():
                    part.load_state_dict(state["parts"][key])
                torch.set_rng_state(state["rng"]["cpu"])
                torch.cuda.set_rng_state_all(state["rng"]["cuda"][: torch.cuda.device_count()])
                self.done, self.curve, self.seconds = state["done"], state["curve"], state["seconds"]
            print(f"continuing after {self.done}")
        self.writer, self.saved = SummaryWriter(self.folder), time.monotonic()
        stopped = f"\nstopped; continue with: python {sys.argv[0]} --resume {self.folder}\n".encode()
        signal.signal(signal.SIGINT, lambda *_: (os.write(2, stopped), os._exit(1)))  # at once; workers follow
        print(f"run directory: {self.folder}")

    def tick(self, phase: str) -> None:
        """`phase` begins; the time since the last call was spent on the one before."""
        self.seconds[self.phase] += time.monotonic() - self.clock
        self.phase, self.clock = phase, time.monotonic()

    def steps(self, phase: str, total: int):
        """1 ... total, or from where a killed run was; once a minute a checkpoint of all that the rest depends on."""
        self.tick("policy" if phase == "policy" else "utility")
        for step in tqdm(range(self.done.get(phase, 0) + 1, total + 1), desc=phase, unit="update", disable=None):
            yield step
            self.done[phase] = step
            if time.monotonic() - self.saved > self.CHECKPOINT_SECONDS:
                self.tick(self.phase)
                states = {key: part.state_dict() for key, part in self.parts.items()}
                rng = {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all()}
                rest = {"done": self.done, "curve": self.curve, "seconds": self.seconds}
                write(self.checkpoint, {"parts": states, "rng": rng, **rest})
                self.saved = time.monotonic()

    def log(self, step: int, **values: float | None) -> None:
        for key, value in values.items():
            if value is not None:
                require(np.isfinite(value), f"step {step}: {key} is not finite; lower the learning rate or rescale obs")
                self.writer.add_scalar(key.replace("__", "/"), value, step)

    def evaluate(self, policy: Policy, step: int) -> None:
        """A row of the curve. The episodes depend on (seed, step) alone: evaluating more or less changes no run."""
        args = self.args
        if not args.eval:
            return
        self.tick("evaluation")
        weights = [p.detach().cpu().numpy().T.copy() for p in policy.parameters()]  # (in, out), (out,) of each layer
        seeds = np.random.SeedSequence([args.seed, step]).generate_state(args.eval_episodes) >> 1
        share = -(-args.eval_episodes // args.eval_workers)  # of a worker
        with explain("an evaluation process died: out of memory? --resume with fewer --eval-workers", BrokenExecutor):
            episodes = list(self.pool.map(partial(run_episode, args, weights), seeds.tolist(), chunksize=share))
        success, returned = np.mean(episodes, axis=0).tolist()
        success = None if np.isnan(success) else success
        returned = returned if args.eval_return or success is None else None  # None: episodes were cut short
        self.tick("policy")
        self.curve.append([step, success, returned, round(sum(self.seconds.values()), 1)])
        rows = [",".join("" if value is None else str(value) for value in row) for row in self.curve]
        write(self.folder / "evals.csv", "\n".join(["step,success_rate,episodic_return,seconds", *rows, ""]))
        speed = step / (self.seconds["policy"] + self.seconds["evaluation"])
        self.log(step, eval__success_rate=success, eval__episodic_return=returned, charts__SPS=speed)
        tqdm.write(f"update {step}/{args.total_steps}: success {success}, return {returned}")

    def finish(self, learned: dict[str, nn.Module | torch.Tensor], **summary) -> dict:
        """model.pt with what was learned, result.json, and the same on the last line of standard output."""
        args = self.args
        states = {k: dict(v.cpu().state_dict()) if isinstance(v, nn.Module) else v.cpu() for k, v in learned.items()}
        write(self.folder / "model.pt", {"format_version": 1, "args": vars(args), **states})
        keys = "algorithm task n_pref seed steps n_segments lambda n_eff n_eff_target kl pref_acc_train pref_acc_val"
        known = {**vars(args), "algorithm": args.exp_name, "steps": args.total_steps, **summary}
        result = {key: known.get(key) for key in keys.split()}
        for name, column in (("success", 1), ("return", 2)):  # smoothed over 8 adjacent evaluations
            values = [row[column] for row in self.curve if row[column] is not None]
            window = min(8, len(values))
            smooth = np.convolve(values, np.ones(window) / window, "valid").tolist() if values else [None]
            result[f"{name}_peak"], result[f"{name}_last"] = max(smooth), smooth[-1]
        self.tick("policy")
        result["curve"] = [row[:3] for row in self.curve]
        result["seconds"] = {**self.seconds, "total": sum(self.seconds.values())}
        installed = {package.name: package.version for package in metadata.distributions()}
        packages = ("torch", "numpy", "mujoco", "metaworld", "gymnasium")
        result["versions"] = {"python": sys.version.split()[0], **{name: installed.get(name) for name in packages}}
        result = json.loads(json.dumps(result), parse_constant=lambda _: None)  # null, not NaN: an accuracy of no pairs
        self.log(args.total_steps, charts__pref_acc_val=result["pref_acc_val"])
        write(self.folder / "result.json", json.dumps(result, indent=1))
        self.checkpoint.unlink(missing_ok=True)
        self.writer.close()
        self.pool.shutdown()
        print(json.dumps(result))
        return result


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
