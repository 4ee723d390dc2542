"""How fast the parts of PAWS are, each against the least it could take, in one run.

    python benchmark/speed.py --task door-open

evaluation: two workers against two processes that play the same episodes from recorded actions, so that they only step
(and reset) the simulator. lambda: seconds to solve for n_eff among a million segments. memory: one policy update of
100,000 segments of 64 x 39 floats may not copy the data.
"""

import multiprocessing
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # as in the scripts

import numpy as np
import torch
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import paws_mlp as paws


@dataclass
class Args:
    task: str = "door-open"
    """task of the evaluation"""
    workers: int = 2
    """evaluation workers, and as many processes that only step"""
    rounds: int = 5
    """times that each way is measured, in turn"""
    segments: int = 100_000
    """segments in the test of memory; 0 leaves it out"""


def only_step(connection, task: str) -> None:
    env = paws.make_env(task)
    while (episodes := connection.recv()) is not None:
        for seed, actions in episodes:
            env.reset(seed)
            for action in actions:
                env.step(action)
        connection.send(len(episodes))


def recorded_episodes(env, policy: paws.Policy, seeds: list[int]) -> list[tuple[int, list[np.ndarray]]]:
    """The actions that the policy takes in the episode of each seed."""
    episodes = []
    for seed in seeds:
        obs, actions, ended = env.reset(seed), [], False
        while not ended:
            with torch.no_grad():
                actions.append(policy(torch.from_numpy(obs)).numpy())
            obs, _, _, ended = env.step(actions[-1])
        episodes.append((seed, actions))
    return episodes


def evaluation_speed(args: Args) -> None:
    env = paws.make_env(args.task)
    run_args = paws.Args(task=args.task, eval_workers=args.workers)
    policy = paws.Policy(env.obs_dim, env.act_dim, torch.Generator().manual_seed(0)).eval()
    episodes = recorded_episodes(env, policy, paws.episode_seeds(run_args.seed, 0, run_args.eval_episodes))
    steps = sum(len(actions) for _, actions in episodes)

    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pipes = [context.Pipe() for _ in range(args.workers)]
    for _, there in pipes:
        context.Process(target=only_step, args=(there, args.task), daemon=True).start()
    evaluator = paws.Evaluator(run_args, env.obs_dim, env.act_dim)

    def bare():
        for i, (here, _) in enumerate(pipes):
            here.send(episodes[i :: args.workers])
        for here, _ in pipes:
            here.recv()

    ways = {"evaluation": lambda: evaluator.evaluate(policy, step=0), "only stepping": bare}
    rates = {name: [] for name in ways}
    for round_number in range(args.rounds + 1):  # the first one builds environments
        for name, run in ways.items():
            started = time.perf_counter()
            run()
            if round_number:
                rates[name].append(steps / (time.perf_counter() - started))
    evaluator.close()
    medians = {name: np.median(values) for name, values in rates.items()}
    ratio = np.median(np.divide(rates["evaluation"], rates["only stepping"]))
    print(f"{args.task}, {args.workers} workers, steps/s: " + ", ".join(f"{k} {v:.0f}" for k, v in medians.items()))
    print(f"ratio {ratio:.1%} (median of {args.rounds} rounds)")


def lambda_speed() -> None:
    advantages = np.random.default_rng(0).normal(size=1_000_000)
    started = time.perf_counter()
    lam = paws.solve_lambda(advantages, 100_000)
    print(f"lambda among 1,000,000 segments: {time.perf_counter() - started:.2f} s (lambda {lam:.4f})")


def memory(args: Args) -> None:
    generator = torch.Generator().manual_seed(0)
    obs = torch.rand(args.segments, 64, 35, generator=generator)
    act = torch.rand(args.segments, 64, 4, generator=generator)
    policy = paws.Policy(35, 4, generator, generator)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    minibatches = paws.Minibatches(np.full(args.segments, 1 / args.segments), "resample", torch.device("cpu"))

    def update():
        index, scale = minibatches.draw(16, generator)
        loss = -(scale * policy.log_prob(obs[index], act[index]).mean(1)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    update()
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    for _ in range(50):
        update()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    took = (time.perf_counter() - started) / 50 * 1000
    size = (obs.nbytes + act.nbytes) / 2**20
    print(f"{args.segments} segments ({size:.0f} MiB): {took:.1f} ms an update, peak memory grew by {grown:.0f} MiB")


def main(args: Args) -> None:
    evaluation_speed(args)
    lambda_speed()
    if args.segments:
        memory(args)


if __name__ == "__main__":
    main(tyro.cli(Args))
