"""A Minari data set on disk becomes a preference file, labelled by return; with --render also clips to label yourself.

    python data_gen/import_minari.py mujoco/pusher/expert-v0 --segment-length 64 --segments 400 --pairs 200

Writes labels/<name>/pairs.npz (and labels/<name>/clips/<segment>.mp4), and prints the commands that follow.
Observations stay as they are and actions are rescaled from the action space, so that --env-id evaluates in the data
set's own environment. docs/own_data.md
"""

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import gymnasium as gym
import minari
import numpy as np
import tyro
from minari import MinariDataset
from segments import choose_segments, pair_segments, rescale, study_name, write_pairs
from tqdm import tqdm


@dataclass
class Args:
    dataset: tyro.conf.Positional[str]  # id of a data set in Minari's local folder, or the data set's own folder
    segment_length: int = 64  # T: steps in a segment
    segments: int = 400  # K: segments, cut inside episodes without overlap, chosen at random
    pairs: int | None = None  # n: pairs, each segment in at most one [segments / 2]
    render: bool = False  # replay the episodes in the data set's environment and write clips for label.py
    name: str = ""  # of the study [the data set's id]
    labels_dir: str = "labels"  # parent of <name>/pairs.npz and <name>/clips
    seed: int = 1  # seeds the choice of segments and pairs


def load(name: str) -> MinariDataset:
    try:
        return MinariDataset(Path(name, "data")) if Path(name, "data").is_dir() else minari.load_dataset(name)
    except FileNotFoundError:
        sys.exit(f"error: {name}: no such Minari data set on disk; get it with: minari download {name}")
    except Exception as e:  # damaged metadata, another version of Minari, h5py not installed
        sys.exit(f"error: {name}: Minari cannot read it ({type(e).__name__}: {e})".replace("\n", " "))


def flatten(space: gym.Space, values) -> np.ndarray:
    """Many elements of a space at once, in the order of Gymnasium's FlattenObservation. (steps, dim)"""
    if isinstance(space, gym.spaces.Box):
        return np.asarray(values, np.float64).reshape(len(values), -1)
    if isinstance(space, gym.spaces.Dict):
        return np.concatenate([flatten(part, values[key]) for key, part in space.spaces.items()], axis=1)
    if isinstance(space, gym.spaces.Tuple):
        return np.concatenate([flatten(part, value) for part, value in zip(space.spaces, values, strict=True)], axis=1)
    sys.exit(f"error: observations are {type(space).__name__}; Box, and Dict or Tuple of Box, are read")


def read_episodes(source: str, dataset: MinariDataset) -> list[dict[str, np.ndarray]]:
    """obs (steps, o), act (steps, a), reward (steps,) of each episode."""
    episodes = []
    try:
        for episode in tqdm(dataset.iterate_episodes(), total=dataset.total_episodes, desc="reading", disable=None):
            obs = flatten(dataset.observation_space, episode.observations)[: len(episode)]  # without the last
            act = np.asarray(episode.actions, np.float64).reshape(len(episode), -1)
            episodes.append(dict(obs=obs, act=act, reward=episode.rewards))
    except (OSError, KeyError, ValueError) as e:
        sys.exit(f"error: {source}: Minari cannot read its episodes ({type(e).__name__}: {e})".replace("\n", " "))
    if not all(np.isfinite(value).all() for episode in episodes for value in episode.values()):
        sys.exit(
            f"error: {source}: NaN or infinity in observations, actions or rewards; repair or filter these episodes"
        )
    return episodes


def action_bounds(space: gym.spaces.Box, episodes: list[dict[str, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The action space's, or the data's where it has none. (a,), (a,)"""
    actions = np.concatenate([episode["act"] for episode in episodes])
    low, high = space.low.ravel().astype(float), space.high.ravel().astype(float)
    low = np.where(np.isfinite(low), low, actions.min(axis=0))
    return low, np.where(np.isfinite(high), high, actions.max(axis=0))


def render_clips(dataset: MinariDataset, chosen: np.ndarray, length: int, folder: Path) -> None:
    """folder/<i>.mp4 for each row (episode, start) of `chosen`, by replay of its episode from the recorded seed."""
    from render import STEPS_PER_FRAME, choose_gl, write_mp4

    choose_gl()
    try:
        env = dataset.recover_environment(render_mode="rgb_array")
    except (gym.error.Error, ImportError, ValueError, TypeError) as e:
        sys.exit(f"error: --render: the environment does not start here ({e}); install it, or leave --render out")
    folder.mkdir(parents=True, exist_ok=True)
    about = list(dataset.storage.get_episode_metadata(dataset.episode_indices))
    for number in tqdm(np.unique(chosen[:, 0]), desc="rendering", unit="episode", disable=None):
        if about[number].get("seed") is None:
            sys.exit(f"error: --render: episode {number} has no seed, so it cannot be replayed; leave --render out")
        (episode,) = dataset.iterate_episodes([dataset.episode_indices[number]])
        recorded = flatten(dataset.observation_space, episode.observations)
        clips = {int(start): int(i) for i, (e, start) in enumerate(chosen) if e == number}
        shown = {t: i for start, i in clips.items() for t in range(start, start + length, STEPS_PER_FRAME)}
        frames = {i: [] for i in clips.values()}
        obs, _ = env.reset(seed=int(about[number]["seed"]), options=about[number].get("options"))
        for t in range(max(shown) + 1):
            replayed = gym.spaces.flatten(dataset.observation_space, obs)
            if not np.allclose(replayed, recorded[t], atol=1e-2):
                problem = f"episode {number} replays differently from step {t} on"
                sys.exit(f"error: --render: {problem}: other versions, or an unusual reset; leave --render out")
            if t in shown:
                frames[shown[t]].append(env.render())
            obs = env.step(episode.actions[t])[0]
        for i, clip in frames.items():
            write_mp4(folder / f"{i}.mp4", clip)
    env.close()


def main(args: Args) -> None:
    warnings.simplefilter("ignore")  # Minari's remarks on versions
    dataset = load(args.dataset)
    if not isinstance(dataset.action_space, gym.spaces.Box):
        sys.exit(
            f"error: {args.dataset}: actions are {type(dataset.action_space).__name__}; continuous ones are needed"
        )
    episodes = read_episodes(args.dataset, dataset)
    lengths = [len(episode["act"]) for episode in episodes]
    chosen = choose_segments(args.dataset, lengths, args.segment_length, args.segments, args.seed)
    pairs = pair_segments(args.segments, args.pairs)
    arrays = {
        key: np.stack([episodes[e][key][start : start + args.segment_length] for e, start in chosen])
        for key in ("obs", "act", "reward")
    }
    low, high = action_bounds(dataset.action_space, episodes)
    first, second = arrays["reward"].sum(axis=1)[pairs].T  # (n,), (n,): returns
    prefs = np.where((first >= second)[:, None], pairs, pairs[:, ::-1])  # preferred first
    if not args.render:
        prefs = prefs[first != second]
        if not len(prefs):
            sys.exit(f"error: {args.dataset}: all pairs have equal returns; label them yourself, with --render")

    name = study_name(args.name or dataset.id)
    folder = Path(args.labels_dir, name)
    (folder / "pairs.npz").unlink(missing_ok=True)  # an earlier import's: its clips are overwritten now
    if args.render:
        render_clips(dataset, chosen[: 2 * len(pairs)], args.segment_length, folder / "clips")
    begins = np.cumsum([0, *lengths[:-1]])
    meta = dict(
        task=name,
        source=dict(format=f"Minari {dataset.spec.minari_version}", dataset=dataset.id),
        recipe=dict(label="the larger return of the two segments", seed=args.seed),
        frames=dict(total=sum(lengths), first=(begins[chosen[:, 0]] + chosen[:, 1]).tolist()),
        scale=dict(act_low=low.tolist(), act_high=high.tolist()),
    )
    obs, reward = arrays["obs"].astype(np.float32), arrays["reward"].astype(np.float32)
    out = folder / "pairs.npz"
    write_pairs(out, meta, obs=obs, act=rescale(arrays["act"], low, high), prefs=prefs, reward=reward)
    print(f"{out}: {args.segments} segments of {args.segment_length} steps, {len(prefs)} pairs labelled by return")
    if len(prefs) < len(pairs):
        print(f"{len(pairs) - len(prefs)} pairs of equal returns were left out")
    evaluate = f"--env-id {dataset.env_spec.id}" if dataset.env_spec and not dataset.env_spec.kwargs else "--no-eval"
    if args.render:
        label = f"python data_gen/label.py --data {out} --videos {folder}/clips --n-pref {len(prefs)}"
        print(f"label:  {label} --labeler me")
        print(f"export: python data_gen/label.py --data {out} --labeler me --export --out {folder}/me.npz")
    print(f"train:  python paws_mlp.py --task {name} --data {folder}/{'me' if args.render else 'pairs'}.npz {evaluate}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
