"""Trains one expert with Stable-Baselines3's SAC and keeps its checkpoints, to choose the four data policies from.

    python data_gen/train_sac.py --task door-open          # -> experts/door-open/{actors/*.pt, checkpoints.csv}
    python data_gen/train_sac.py --task door-open --resume # after a kill

Meta-World: half of each minibatch comes from scripted demonstrations and the critics have LayerNorm (RLPD, Ball et
al. 2023), which needs far fewer steps than plain SAC (`--demo-episodes 0`). It is still SAC with
the same tanh-Gaussian actor. Locomotion: plain SAC.
"""

import csv
import fcntl
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import tyro
from actors import Actor, save_actor
from data_card import PAPER
from envs import METAWORLD_TASKS, SUCCESS_REWARD, TASKS, SacEnv, make_env, sac_reward, scripted_episode
from stable_baselines3 import SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import ContinuousCritic
from stable_baselines3.common.torch_layers import create_mlp
from stable_baselines3.common.type_aliases import ReplayBufferSamples
from stable_baselines3.sac.policies import SACPolicy
from torch import nn
from tqdm import tqdm

BUFFER_KEYS = ("observations", "next_observations", "actions", "rewards", "dones", "timeouts")
CSV_FIELDS = ("step", "success", "return", "episodes", "minutes")
DEFAULTS = {  # of flags that are not given: every task's, then those of its kind, then its own
    "every task": dict(seed=1, eval_episodes=10, early_termination=False),
    "Meta-World": dict(
        total_steps=200_000, demo_episodes=40, checkpoint_every=2_000, stop_at=0.97,
        batch_size=128, update_every=1, learning_rate=3e-4, gamma=0.99,
    ),
    "locomotion": dict(
        total_steps=2_000_000, demo_episodes=0, checkpoint_every=10_000,
        batch_size=256, update_every=4, learning_rate=1e-3, gamma=0.99,
    ),
    **{task: dict(demo_episodes=100, gamma=0.97) for task in SUCCESS_REWARD},
    "walker2d": dict(
        total_steps=500_000, batch_size=128, update_every=1, learning_rate=5e-4, early_termination=True,
    ),
}  # fmt: skip
LEAST = dict(
    seed=0, total_steps=1, demo_episodes=0, checkpoint_every=1, eval_episodes=1, batch_size=2, update_every=1,
    learning_rate=1e-12, gamma=0.0,
)  # fmt: skip


@dataclass
class Args:
    task: str = "door-open"
    """one of the fourteen tasks"""
    seed: int | None = None
    """seeds networks, exploration and episodes [1]"""
    total_steps: int | None = None
    """most environment steps [Meta-World: 200,000; walker2d: 500,000; other locomotion: 2,000,000]"""
    demo_episodes: int | None = None
    """episodes of the scripted expert in half of each minibatch; 0 is plain SAC
    [Meta-World: 40, lever-pull and push-back: 100; locomotion: 0]"""
    checkpoint_every: int | None = None
    """steps between saved and evaluated actors [Meta-World: 2,000; locomotion: 10,000]"""
    eval_episodes: int | None = None
    """episodes with sampled actions for each checkpoint [10]"""
    stop_at: float | None = None
    """stop once a checkpoint has this in 5 times as many episodes: success [0.97], locomotion: return [the paper's]"""
    batch_size: int | None = None
    """transitions in each minibatch [Meta-World, walker2d: 128; other locomotion: 256]"""
    update_every: int | None = None
    """environment steps for each update; an update costs far more than a step
    [Meta-World, walker2d: 1; other locomotion: 4]"""
    learning_rate: float | None = None
    """Adam, for actor, critics, temperature; falls to a tenth over the last half of total_steps
    [Meta-World: 3e-4; walker2d: 5e-4; other locomotion, which has fewer updates: 1e-3]"""
    gamma: float | None = None
    """discount [0.99; lever-pull and push-back: 0.97]"""
    early_termination: bool | None = None
    """end episodes of ant, hopper, walker2d once the robot has fallen, in training alone [walker2d: True]"""
    out: str = "experts"
    """parent of the output folder <out>/<task>"""
    resume: bool = False
    """continue with the flags of <out>/<task>/args.json from the last saved state, at most a few minutes old"""


class LeanCritic(ContinuousCritic):
    """The actor's loss needs no gradients of the critics' weights."""

    def forward(self, obs, actions):
        self.requires_grad_(not actions.requires_grad)
        return super().forward(obs, actions)


class LayerNormCritic(LeanCritic):
    """Q-networks with LayerNorm after each hidden linear layer: values stay bounded on actions not in the data."""

    def __init__(self, observation_space, action_space, net_arch, *args, **kwargs):
        super().__init__(observation_space, action_space, net_arch, *args, **kwargs)
        in_dim = observation_space.shape[0] + action_space.shape[0]
        self.q_networks = []
        for i in range(self.n_critics):
            q_net = nn.Sequential(*create_mlp(in_dim, 1, net_arch, nn.ReLU, post_linear_modules=[nn.LayerNorm]))
            self.add_module(f"qf{i}", q_net)
            self.q_networks.append(q_net)


class LeanPolicy(SACPolicy):
    critic_class = LeanCritic

    def make_critic(self, features_extractor=None):
        kwargs = self._update_features_extractor(self.critic_kwargs, features_extractor)
        return self.critic_class(**kwargs).to(self.device)


class LayerNormPolicy(LeanPolicy):
    critic_class = LayerNormCritic


class DemoReplayBuffer(ReplayBuffer):
    """Half of every sample comes from `self.demos`, a ReplayBuffer of demonstrations."""

    demos: ReplayBuffer | None = None

    def sample(self, batch_size, env=None):
        if self.demos is None:
            return super().sample(batch_size, env)
        parts = (super().sample(batch_size // 2, env), self.demos.sample(batch_size - batch_size // 2, env))
        fields = [torch.cat(pair) for pair in zip(*(part[:5] for part in parts), strict=True)]
        return ReplayBufferSamples(*fields)


def demonstrations(task: str, episodes: int, seed: int, buffer_args: tuple) -> ReplayBuffer:
    """Scripted episodes with action noise 0, 0.1, 0.3 in turn."""
    env, rng = make_env(task), np.random.default_rng([seed, 1])
    buffer = ReplayBuffer(episodes * 250, *buffer_args)
    successes = []
    for i in range(episodes):
        demo = scripted_episode(env, task, int(rng.integers(2**31)), (0.0, 0.1, 0.3)[i % 3], rng)
        successes.append(demo["success"].max())
        for t in range(len(demo["act"])):
            reward = sac_reward(task, demo["reward"][t], demo["success"][t])
            buffer.add(demo["obs"][t], demo["obs"][t + 1], demo["act"][t], reward, False, [{}])
    tqdm.write(f"{episodes} scripted episodes, success {np.mean(successes):.0%}")
    return buffer


def evaluate_actor(actor: Actor, env, episodes: int, rng: np.random.Generator) -> tuple[float, float]:
    """Mean success (at any step; NaN where there is none) and mean unscaled return, with sampled actions."""
    successes, returns = [], []
    for _ in range(episodes):
        obs, rewards, reached, ended = env.reset(int(rng.integers(2**31))), [], [], False
        while not ended:
            obs, reward, success, ended = env.step(actor.act(obs, rng.standard_normal(env.act_dim)))
            rewards.append(reward), reached.append(success)
        successes.append(max(reached)), returns.append(sum(rewards))
    return float(np.mean(successes)), float(np.mean(returns))


class Checkpoints(BaseCallback):
    """Saves and measures actors, saves the training state, shows progress, stops when good enough for long enough."""

    def __init__(self, args: Args, folder: Path, rows: list[dict], minutes: float):
        super().__init__()
        self.args, self.folder, self.rows, self.minutes_before = args, folder, rows, minutes
        self.eval_env = make_env(args.task)
        self.started = self.saved = time.time()

    def _on_training_start(self):
        self.bar = tqdm(total=self.args.total_steps, initial=self.num_timesteps, unit="step", smoothing=0.05)

    def _on_step(self) -> bool:
        self.bar.update(1)
        if time.time() - self.saved > 240:
            self.save_state()
        if self.num_timesteps % self.args.checkpoint_every or not self.model._n_updates:  # not yet, or still untrained
            return True
        args, step = self.args, self.num_timesteps
        path = self.folder / "actors" / f"step_{step:07d}.pt"
        save_actor(path, self.model.actor, task=args.task, step=step, seed=args.seed)
        rng, episodes = np.random.default_rng([args.seed, 2, step]), args.eval_episodes
        success, ret = evaluate_actor(Actor(path), self.eval_env, episodes, rng)
        if self.good(success, ret):  # by luck? More episodes tell.
            more = evaluate_actor(Actor(path), self.eval_env, 4 * episodes, rng)
            success, ret, episodes = 0.2 * success + 0.8 * more[0], 0.2 * ret + 0.8 * more[1], 5 * episodes
        minutes = round(self.minutes_before + (time.time() - self.started) / 60, 1)
        row = dict(zip(CSV_FIELDS, (step, round(success, 4), round(ret, 1), episodes, minutes), strict=True))
        self.rows.append(row)
        write_csv(self.folder / "checkpoints.csv", self.rows)
        self.logger.record("eval/success_rate", success)
        self.logger.record("eval/episodic_return", ret)
        self.bar.set_postfix_str(described(success, ret))
        if episodes > args.eval_episodes and self.good(success, ret):
            tqdm.write(f"{args.task}: {described(success, ret)} in {episodes} episodes: enough at {step}")
            return False
        return True

    def good(self, success: float, ret: float) -> bool:
        return (success if self.args.task in METAWORLD_TASKS else ret) >= self.args.stop_at

    def _on_training_end(self):
        self.bar.close()
        self.save_state()

    def save_state(self):
        """Everything that learning needs, as tensors and arrays, never pickled objects."""
        buffer, model = self.model.replay_buffer, self.model
        size = buffer.buffer_size if buffer.full else buffer.pos
        temporary = self.folder / "buffer.tmp.npz"
        np.savez(temporary, pos=buffer.pos, full=buffer.full, **{k: getattr(buffer, k)[:size] for k in BUFFER_KEYS})
        os.replace(temporary, self.folder / "buffer.npz")
        state = {"parameters": model.get_parameters(), "step": model.num_timesteps, "updates": model._n_updates}
        state["log_ent_coef"] = model.log_ent_coef.detach()
        state["minutes"] = self.minutes_before + (time.time() - self.started) / 60
        temporary = self.folder / "state.tmp.pt"
        torch.save(state, temporary)
        os.replace(temporary, self.folder / "state.pt")
        self.saved = time.time()


def described(success: float, ret: float) -> str:
    return f"return {ret:.0f}" if np.isnan(success) else f"success {success:.0%}, return {ret:.0f}"


def write_csv(path: Path, rows: list[dict]) -> None:
    temporary = path.with_suffix(".tmp")
    with open(temporary, "w", newline="") as file:
        writer = csv.DictWriter(file, CSV_FIELDS)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(temporary, path)


def complete(args: Args, folder: Path) -> None:
    """Fills in the flags that are not given, from the training that is resumed or else from DEFAULTS; checks all."""
    kind = "Meta-World" if args.task in METAWORLD_TASKS else "locomotion"
    values = DEFAULTS["every task"] | DEFAULTS[kind] | DEFAULTS.get(args.task, {})
    best = PAPER[args.task][-1][1] if args.task in PAPER else np.inf  # the return of the paper's best policy
    values.setdefault("stop_at", float(best))  # locomotion
    if args.resume:
        try:
            saved = json.loads((folder / "args.json").read_text())
            values |= {name: saved[name] for name in values if name in saved}
        except (OSError, ValueError, TypeError) as e:
            sys.exit(f"error: --resume: cannot read {folder / 'args.json'} ({type(e).__name__}); train without it")
    for name, value in values.items():
        given, flag = getattr(args, name), f"--{name.replace('_', '-')}"
        if given is None:
            setattr(args, name, value)
        elif args.resume and given != value:
            sys.exit(f"error: {flag} {given}: this training has {value}; resume without the flag, or use another --out")
        if name in LEAST and not getattr(args, name) >= LEAST[name]:
            sys.exit(f"error: {flag} {getattr(args, name)}: must be at least {LEAST[name]:g}")
    if args.gamma >= 1:
        sys.exit(f"error: --gamma {args.gamma}: must be less than 1")
    if args.early_termination and args.task not in ("ant", "hopper", "walker2d"):
        sys.exit(f"error: --early-termination: {args.task} does not fall; it is for ant, hopper and walker2d")
    starts, every = learning_starts(args), args.checkpoint_every
    if args.total_steps // every * every <= starts:
        sys.exit(
            f"error: --total-steps {args.total_steps}: learning starts after {starts} steps, checkpoints come"
            f" every {every}, so none would be trained: give more steps"
        )


def learning_starts(args: Args) -> int:
    return 2_500 if args.demo_episodes else 10_000


def main(args: Args) -> None:
    if args.task not in TASKS:
        sys.exit(f"error: --task {args.task}: use one of {', '.join(TASKS)}")
    folder, metaworld = Path(args.out) / args.task, args.task in METAWORLD_TASKS
    complete(args, folder)
    (folder / "actors").mkdir(parents=True, exist_ok=True)
    lock = open(folder / "lock", "w")  # held until the training ends, however it ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"error: {folder}: another process is training there; wait for it, or choose another --out")
    if (folder / "state.pt").exists() and not args.resume:
        sys.exit(f"error: {folder} holds a training: continue it with --resume, or choose another --out")
    if not args.resume:
        (folder / "args.tmp").write_text(json.dumps(asdict(args), indent=1))
        os.replace(folder / "args.tmp", folder / "args.json")
    torch.set_num_threads(1)

    model = SAC(
        LayerNormPolicy if args.demo_episodes else LeanPolicy,
        SacEnv(args.task, args.seed, args.early_termination),
        seed=args.seed,
        batch_size=args.batch_size,
        train_freq=args.update_every,
        gamma=args.gamma,
        learning_rate=lambda left: args.learning_rate * min(1.0, 0.1 + 1.8 * left),  # `left` falls from 1 to 0
        buffer_size=min(args.total_steps, 1_000_000),
        learning_starts=learning_starts(args),
        ent_coef="auto_0.1",
        replay_buffer_class=DemoReplayBuffer,
        policy_kwargs=dict(net_arch=[256, 256], optimizer_kwargs=dict(fused=True)),
        tensorboard_log=str(folder / "tensorboard"),
        device="cpu",
    )
    if args.demo_episodes:
        spaces = (model.observation_space, model.action_space, "cpu")
        model.replay_buffer.demos = demonstrations(args.task, args.demo_episodes, args.seed, spaces)
    rows, minutes = [], 0.0
    if args.resume and (folder / "state.pt").exists():  # else it was killed before its first save: start again
        state = torch.load(folder / "state.pt", weights_only=True)
        model.set_parameters(state["parameters"])
        model.num_timesteps, model._n_updates, minutes = state["step"], state["updates"], state["minutes"]
        with torch.no_grad():
            model.log_ent_coef.copy_(state["log_ent_coef"])
        with np.load(folder / "buffer.npz", allow_pickle=False) as saved:
            for key in BUFFER_KEYS:
                getattr(model.replay_buffer, key)[: len(saved[key])] = saved[key]
            model.replay_buffer.pos, model.replay_buffer.full = int(saved["pos"]), bool(saved["full"])
        if (folder / "checkpoints.csv").exists():
            with open(folder / "checkpoints.csv") as file:
                rows = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
            rows = [row | {"step": int(row["step"])} for row in rows if row["step"] <= state["step"]]
        model.env.envs[0].env.rng = np.random.default_rng([args.seed, state["step"]])
        tqdm.write(f"continuing {args.task} at step {state['step']}")

    callback = Checkpoints(args, folder, rows, minutes)
    remaining = args.total_steps - model.num_timesteps
    model.learn(remaining, callback=callback, log_interval=20, reset_num_timesteps=False)
    best = max(callback.rows, key=lambda row: row["success"] if metaworld else row["return"])
    measured = described(best["success"], best["return"])
    print(f"{args.task}: {len(callback.rows)} checkpoints in {folder}, best {measured} at step {best['step']}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
