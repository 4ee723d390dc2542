"""SAC's tanh-Gaussian actor as a plain file and in plain numpy: small, fast, loads with `weights_only=True`."""

import os
import sys
from pathlib import Path

import numpy as np
import torch

LOG_STD_MIN, LOG_STD_MAX = -20.0, 2.0  # Stable-Baselines3's bounds
ACTION_CLAMP = 0.999  # CPL's: atanh(1) would make the log-probability of a saturated action minus infinity


def save_actor(path: Path, actor: torch.nn.Module, **info) -> None:
    """Writes weights and `info` (task, step, seed: builtins only) of a Stable-Baselines3 SAC actor."""
    linears = [m for m in actor.latent_pi if isinstance(m, torch.nn.Linear)]
    layers = [*linears, actor.mu, actor.log_std]
    tensors = [(layer.weight.detach().clone(), layer.bias.detach().clone()) for layer in layers]
    temporary = path.with_suffix(".tmp")
    torch.save({"format_version": 1, "layers": tensors, **info}, temporary)
    os.replace(temporary, path)


class Actor:
    """log pi(a | s) and samples of a = tanh(mean(s) + std(s) * noise); all methods take (..., obs_dim) arrays."""

    def __init__(self, path: str | Path):
        try:
            self.info = torch.load(path, weights_only=True)
            self.layers = [(w.numpy().T.copy(), b.numpy()) for w, b in self.info.pop("layers")]
        except Exception as e:
            sys.exit(f"error: {path}: not an actor of train_sac.py ({type(e).__name__}); copy or train it again")

    def mean_and_log_std(self, obs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = obs
        for weight, bias in self.layers[:-2]:
            x = np.maximum(x @ weight + bias, 0.0)
        (w_mean, b_mean), (w_std, b_std) = self.layers[-2:]
        return x @ w_mean + b_mean, np.clip(x @ w_std + b_std, LOG_STD_MIN, LOG_STD_MAX)

    def act(self, obs: np.ndarray, noise: np.ndarray | None = None) -> np.ndarray:
        """The mode, or with standard normal `noise` of the action's shape a sample."""
        mean, log_std = self.mean_and_log_std(obs)
        return np.tanh(mean if noise is None else mean + np.exp(log_std) * noise).astype(np.float32)

    def log_prob(self, obs: np.ndarray, act: np.ndarray) -> np.ndarray:
        """Change of variables: log N(atanh a; mean, std) - sum log(1 - a^2). (..., obs), (..., act) -> (...)"""
        mean, log_std = self.mean_and_log_std(obs.astype(np.float64))
        act = np.clip(act.astype(np.float64), -ACTION_CLAMP, ACTION_CLAMP)
        gaussian = -0.5 * ((np.arctanh(act) - mean) / np.exp(log_std)) ** 2 - log_std - 0.5 * np.log(2 * np.pi)
        return (gaussian - np.log1p(-(act**2))).sum(-1)
