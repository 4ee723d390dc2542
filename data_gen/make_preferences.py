"""Rolls out the four policies of a task, cuts segments, labels pairs with the best policy: `data/<task>.npz`.

    python data_gen/make_preferences.py --task door-open

A segment's score is the best policy's summed log-probability of its actions; the higher score of a pair is preferred.
The same seed and policies give the same file, byte for byte, whatever the number of workers.
"""

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # workers inherit it: one thread each

import numpy as np
import tyro
from actors import ACTION_CLAMP, Actor
from envs import HORIZON, METAWORLD_TASKS, TASKS, end_with_parent, get_sim_state, make_env
from tqdm import tqdm

POLICIES = 4


@dataclass
class Args:
    task: str = "door-open"
    """one of the fourteen tasks"""
    seed: int = 1
    """seeds episodes, actions, shuffling, pairs and flips"""
    segments: int = 1000
    """K: segments in the file, the same number of each policy"""
    segment_length: int = 64
    """T: steps in a segment"""
    pairs: int | None = None
    """n: labelled pairs [segments / 2]"""
    pairing: Literal["halves", "uniform"] = "halves"
    """halves: the shuffled pool's first half against its second; uniform: segments drawn with replacement"""
    flip: float = 0.0
    """share of labels that are turned round"""
    deterministic: bool = False
    """the policies' modes instead of sampled actions"""
    workers: int = 2
    """processes; the file does not depend on their number"""
    policies: str = "data/policies"
    """parent of <task>/policy_1.pt .. policy_4.pt (select_policies.py)"""
    out: str | None = None
    """output file [data/<task>.npz]"""


def episodes_per_job(task: str) -> int:
    """Does not depend on the number of workers: another batch may change the last bit of a product, and so the file.

    More Meta-World simulators would push each other out of the cache; on locomotion, the policy's share is larger.
    """
    return 4 if task in METAWORLD_TASKS else 12


def start_worker(task: str) -> None:
    global ENVS
    end_with_parent()
    ENVS = [make_env(task) for _ in range(episodes_per_job(task))]  # built once: each costs more than 100 ms


def start_pool(task: str, workers: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker, initargs=(task,))


def rollout(job: tuple) -> dict[str, np.ndarray]:
    """Plays E episodes in lockstep, each with a random stream of its own; runs in a worker.

    `job`: the actor, the E streams' seeds, the steps of each episode at which to keep the simulator's state, whether
    actions are sampled. Returns obs (E, H, obs), act (E, H, act), reward and success (E, H), the reset seeds `episode`
    (E,) and sim_state (E, starts, S).
    """
    actor, streams, starts, sample = job
    envs, rngs = ENVS[: len(streams)], [np.random.default_rng(stream) for stream in streams]
    episode = np.array([rng.integers(2**31) for rng in rngs])
    noise = np.stack([rng.standard_normal((HORIZON, envs[0].act_dim)) for rng in rngs])
    obs = np.empty((len(envs), HORIZON + 1, envs[0].obs_dim), np.float32)
    act = np.empty(noise.shape, np.float32)
    reward, success = np.empty((2, len(envs), HORIZON), np.float32)
    sim_state = [[] for _ in envs]
    for i, env in enumerate(envs):
        obs[i, 0] = env.reset(episode[i])
    for t in range(HORIZON):
        act[:, t] = actor.act(obs[:, t], noise[:, t] if sample else None)
        for i, env in enumerate(envs):
            if t in starts[i]:
                sim_state[i].append(get_sim_state(env))
            obs[i, t + 1], reward[i, t], success[i, t], _ = env.step(act[i, t])
    sim_state = np.array(sim_state)
    return dict(obs=obs[:, :-1], act=act, reward=reward, success=success, episode=episode, sim_state=sim_state)


def segment_starts(length: int, slot: int) -> list[int]:
    """Where to cut an episode into H // length segments, the steps that are left over standing before segment `slot`.

    Over all slots, 0 to H // length (after the last), each step is left out at most once: coverage is about equal.
    """
    count = HORIZON // length
    left_over = HORIZON - count * length
    return [i * length + (left_over if i >= slot else 0) for i in range(count)]


def rollout_jobs(actors: list[Actor], args: Args) -> list[tuple]:
    """Enough episodes of each policy for its share of the segments; every job belongs to one policy."""
    per_episode = HORIZON // args.segment_length
    episodes = -(-args.segments // POLICIES // per_episode)
    jobs, size = [], episodes_per_job(args.task)
    for policy, actor in enumerate(actors):
        for first in range(0, episodes, size):
            numbers = range(first, min(first + size, episodes))
            streams = [(args.seed, 0, policy, number) for number in numbers]
            starts = [segment_starts(args.segment_length, (policy + number) % (per_episode + 1)) for number in numbers]
            jobs.append((actor, streams, starts, not args.deterministic))
    return jobs


def cut(episodes: dict[str, np.ndarray], starts: list[list[int]], length: int) -> list[dict]:
    segments = []
    for i, episode_starts in enumerate(starts):
        for j, start in enumerate(episode_starts):
            segment = {key: episodes[key][i, start : start + length] for key in ("obs", "act", "reward")}
            segment |= dict(sim_state=episodes["sim_state"][i, j], episode=episodes["episode"][i], start=start)
            segments.append(segment)
    return segments


def draw_pairs(segments: int, n: int, pairing: str, rng: np.random.Generator) -> np.ndarray:
    """(n, 2) indices into the shuffled pool, not yet in order of preference."""
    if pairing == "halves":
        return np.stack((np.arange(n), np.arange(n) + segments // 2), axis=1)
    first = rng.integers(segments, size=n)
    second = (first + rng.integers(1, segments, size=n)) % segments  # any other segment
    return np.stack((first, second), axis=1)


def label_pairs(pairs: np.ndarray, score: np.ndarray, flip: float, rng: np.random.Generator) -> np.ndarray:
    """Puts the segment with the higher score first (equal scores keep their order), then turns a share `flip` round."""
    swap = score[pairs[:, 1]] > score[pairs[:, 0]]
    swap[rng.choice(len(pairs), round(flip * len(pairs)), replace=False)] ^= True
    return np.where(swap[:, None], pairs[:, ::-1], pairs)


def policy_agreement(prefs: np.ndarray, policy: np.ndarray) -> float:
    """How often the better policy's segment is the preferred one, among pairs of different policies."""
    won, lost = policy[prefs].T
    return float(np.mean(won[won != lost] > lost[won != lost])) if np.any(won != lost) else float("nan")


def check(args: Args) -> tuple[list[Actor], list[dict]]:
    """The four policies, worst to best, and what policies.json says of them, or a one-line error."""
    folder, n = Path(args.policies) / args.task, args.segments // 2 if args.pairs is None else args.pairs
    if args.task not in TASKS:
        sys.exit(f"error: --task {args.task}: use one of {', '.join(TASKS)}")
    for name in (*(f"policy_{i + 1}.pt" for i in range(POLICIES)), "policies.json"):
        if not (folder / name).exists():
            sys.exit(f"error: {folder / name} is missing: run data_gen/select_policies.py --task {args.task} first")
    if not 1 <= args.segment_length <= HORIZON:
        sys.exit(f"error: --segment-length {args.segment_length}: an episode has {HORIZON} steps; use 1 to {HORIZON}")
    if args.segments < POLICIES or args.segments % POLICIES:
        sys.exit(f"error: --segments {args.segments}: each policy makes the same number; use a multiple of {POLICIES}")
    if n < 1 or (args.pairing == "halves" and n > args.segments // 2):
        most = args.segments // 2
        sys.exit(f"error: --pairs {n}: {args.segments} segments make 1 to {most} pairs; or use --pairing uniform")
    if not 0.0 <= args.flip <= 1.0:
        sys.exit(f"error: --flip {args.flip}: use a share between 0 and 1")
    if args.workers < 1 or args.seed < 0:
        sys.exit(f"error: --workers {args.workers} --seed {args.seed}: use at least 1 worker, and no negative seed")
    actors = [Actor(folder / f"policy_{i + 1}.pt") for i in range(POLICIES)]
    strangers = {actor.info.get("task") for actor in actors} - {args.task}
    if strangers:
        sys.exit(f"error: {folder}: has policies for {strangers.pop()}, not for {args.task}; select them again")
    try:
        return actors, json.loads((folder / "policies.json").read_text())["policies"]
    except (ValueError, KeyError, TypeError):
        sys.exit(f"error: {folder / 'policies.json'}: damaged: run data_gen/select_policies.py again")


def main(args: Args) -> None:
    actors, policies = check(args)
    jobs = rollout_jobs(actors, args)
    share, segments = args.segments // POLICIES, []
    bar = tqdm(total=sum(len(job[1]) for job in jobs), unit="episode")
    with start_pool(args.task, args.workers) as pool, bar:
        for (_, streams, starts, _), episodes in zip(jobs, pool.map(rollout, jobs), strict=True):
            policy = streams[0][2]
            segments += [segment | {"policy": policy} for segment in cut(episodes, starts, args.segment_length)]
            segments = segments[: (policy + 1) * share]
            bar.update(len(streams))

    order = np.random.default_rng([args.seed, 1]).permutation(args.segments)
    data = {key: np.stack([segments[i][key] for i in order]) for key in segments[0]}
    logp = [actors[-1].log_prob(obs, act) for obs, act in zip(data["obs"], data["act"], strict=True)]
    data["expert_logp"] = np.array(logp, np.float32)  # (K, T)
    score = data["expert_logp"].sum(axis=1, dtype=np.float64)
    n = args.segments // 2 if args.pairs is None else args.pairs
    pairs = draw_pairs(args.segments, n, args.pairing, np.random.default_rng([args.seed, 2]))
    data["prefs"] = label_pairs(pairs, score, args.flip, np.random.default_rng([args.seed, 3]))
    agreement = policy_agreement(data["prefs"], data["policy"])

    meta = dict(
        task=args.task,
        horizon=HORIZON,
        seed=args.seed,
        segment_length=args.segment_length,
        recipe=dict(
            actions="mode" if args.deterministic else "sampled",
            label=f"sum over the segment of the best policy's log-probability, actions clamped to +-{ACTION_CLAMP}",
            pairing=args.pairing,
            flip=args.flip,
        ),
        policies=policies,
        agreement=None if np.isnan(agreement) else round(agreement, 4),
        versions={name: version(name) for name in ("numpy", "mujoco", "metaworld", "gymnasium")},
    )
    out = Path(args.out or f"data/{args.task}.npz")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(out.name + ".tmp")
    with open(temporary, "wb") as file:
        np.savez_compressed(file, format_version=np.int64(1), meta=np.array(json.dumps(meta)), **data)
    os.replace(temporary, out)
    megabytes = out.stat().st_size / 1e6
    print(f"{out}: {args.segments} segments, {n} pairs, better policy preferred in {agreement:.1%}, {megabytes:.1f} MB")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
