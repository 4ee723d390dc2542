"""A LeRobotDataset v3 on disk becomes pairs of segments to label, with the videos cut into clips.

    python data_gen/import_lerobot.py DATASET_DIR --segment-length 64 --segments 400 --pairs 200

Writes labels/<name>/pairs.npz and labels/<name>/clips/<segment>.mp4, and prints the commands that label and train.
Needs pyarrow and ffmpeg (imageio-ffmpeg), not the lerobot package. docs/own_data.md
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from segments import choose_segments, pair_segments, rescale, study_name, write_pairs
from tqdm import tqdm


@dataclass
class Args:
    dataset: tyro.conf.Positional[str]  # folder of the data set, with meta/, data/ and videos/
    segment_length: int = 64  # T: frames in a segment
    segments: int = 400  # K: segments, cut inside episodes without overlap, chosen at random
    pairs: int | None = None  # n: pairs to compare, each segment in at most one [segments / 2]
    observations: tuple[str, ...] = ("observation.state",)  # features that make up an observation, joined in this order
    camera: str = ""  # video feature to show [the first]
    name: str = ""  # of the study [the folder's name]
    labels_dir: str = "labels"  # parent of <name>/pairs.npz and <name>/clips
    seed: int = 1  # seeds the choice of segments and pairs


def read_info(root: Path) -> dict:
    try:
        info = json.loads((root / "meta/info.json").read_text())
        version = info["codebase_version"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        sys.exit(f"error: {root}: no readable meta/info.json of a LeRobotDataset there ({type(e).__name__}: {e})")
    if not str(version).startswith("v3."):
        sys.exit(f"error: {root}: is LeRobotDataset {version}, v3 is read; convert it with lerobot's own converter")
    missing = [key for key in ("fps", "features", "data_path", "total_frames") if key not in info]
    if missing:
        sys.exit(f"error: {root}/meta/info.json: lacks {', '.join(missing)}; download the data set again")
    return info


def read_table(path: Path, columns: list[str]) -> pa.Table:
    try:
        return pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowException) as e:
        reason = str(e).splitlines()[0]
        sys.exit(f"error: {path}: cannot read {', '.join(columns)} ({reason}); download it again")


def to_numpy(column: pa.ChunkedArray) -> np.ndarray:
    """A column of numbers or of lists of equal length. (n, d)"""
    array = column.combine_chunks()
    rows = len(array)
    while pa.types.is_nested(array.type):
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False).reshape(rows, -1)


def read_episodes(root: Path, camera: str) -> dict[str, list]:
    """The columns of meta/episodes, in the order of the episodes."""
    files = sorted((root / "meta/episodes").glob("chunk-*/file-*.parquet"))
    if not files:
        sys.exit(f"error: {root}/meta/episodes: no chunk-*/file-*.parquet there; download the data set again")
    columns = ["episode_index", "tasks", "length", "data/chunk_index", "data/file_index", "dataset_from_index"]
    columns += [f"videos/{camera}/{key}" for key in ("chunk_index", "file_index", "from_timestamp", "to_timestamp")]
    return pa.concat_tables(read_table(file, columns) for file in files).sort_by("episode_index").to_pydict()


def read_frames(root: Path, info: dict, episodes: dict[str, list], keys: Iterable[str]) -> dict[str, np.ndarray]:
    """All frames of the data set by their global index: each key (F, d)."""
    tables = []
    for chunk, file in sorted(set(zip(episodes["data/chunk_index"], episodes["data/file_index"], strict=True))):
        path = root / info["data_path"].format(chunk_index=chunk, file_index=file)
        tables.append(read_table(path, ["index", *keys]))
    table = pa.concat_tables(tables).sort_by("index")
    frames = info["total_frames"]
    if not np.array_equal(to_numpy(table["index"])[:, 0], np.arange(frames)):
        sys.exit(f"error: {root}/data: frames are not numbered 0 to {frames - 1}; download the data set again")
    values = {}
    for key in keys:
        try:
            values[key] = to_numpy(table[key]).astype(np.float64)
        except ValueError:  # lists of different length, or no numbers
            sys.exit(f"error: {root}/data: {key}: not the same number of numbers in each frame; choose another feature")
        if not np.isfinite(values[key]).all():
            sys.exit(f"error: {root}/data: {key}: NaN or infinity; repair or remove these frames")
    return values


def check_features(root: Path, info: dict, observations: tuple[str, ...], camera: str) -> str:
    """The camera; a one-line error if a feature that is needed is not there."""
    features = info["features"]
    for key in ("action", *observations):
        if key not in features:
            numeric = [k for k, f in features.items() if f.get("dtype", "").startswith("float") and k != "timestamp"]
            fix = "a robot's actions are needed" if key == "action" else f"choose --observations from {numeric}"
            sys.exit(f"error: {root}: no feature {key}; {fix}")
    cameras = [key for key, f in features.items() if f.get("dtype") == "video" and info.get("video_path")]
    if camera and camera not in cameras:
        sys.exit(f"error: --camera {camera}: the data set has {', '.join(cameras) or 'no videos'}")
    if not cameras:
        sys.exit(f"error: {root}: no video feature, so nothing to show to a labeler; record or convert with videos")
    return camera or cameras[0]


def cut_clip(video: Path, seconds: float, frames: int, fps: float, clip: Path) -> None:
    """`frames` frames from `seconds` on, as H.264 that every browser plays, at most 480 pixels wide."""
    unfinished = clip.with_name(f".{clip.stem}.{os.getpid()}.mp4")
    source = [
        "-ss",
        f"{max(0.0, seconds - 0.5 / fps):.6f}",
        "-i",
        str(video),
    ]  # half a frame early: rounded time stamps
    filters = f"setpts=N/({fps}*TB),scale=trunc(min(480\\,iw)/2)*2:-2"
    target = ["-vf", filters, "-frames:v", str(frames), "-r", str(fps), "-an", "-c:v", "libx264", "-preset", "veryfast"]
    target += ["-crf", "21", "-pix_fmt", "yuv420p", "-threads", "1", "-movflags", "+faststart", str(unfinished)]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *source, *target]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        unfinished.unlink(missing_ok=True)
        sys.exit(f"error: {video}: ffmpeg cannot cut it ({done.stderr.strip().splitlines()[-1:]}); download it again")
    os.replace(unfinished, clip)


def find_videos(root: Path, info: dict, episodes: dict[str, list], camera: str) -> list[Path]:
    """The video file of each episode; an error if one is missing or ends too early."""
    ends = {}
    videos = []
    for e in range(len(episodes["length"])):
        chunk, file, end = (
            episodes[f"videos/{camera}/{key}"][e] for key in ("chunk_index", "file_index", "to_timestamp")
        )
        path = root / info["video_path"].format(video_key=camera, chunk_index=chunk, file_index=file)
        if path not in ends:
            if not path.is_file():
                sys.exit(f"error: {path}: missing, episode {episodes['episode_index'][e]} is shown there; download it")
            try:
                ends[path] = imageio_ffmpeg.count_frames_and_secs(path)[0] / info["fps"]
            except RuntimeError:
                sys.exit(f"error: {path}: not a readable video; download it again")
        if end > ends[path] + 0.5 / info["fps"]:
            sys.exit(
                f"error: {path}: ends after {ends[path]:.1f} s, an episode in it after {end:.1f}; download it again"
            )
        videos.append(path)
    return videos


def main(args: Args) -> None:
    root = Path(args.dataset)
    info = read_info(root)
    camera = check_features(root, info, args.observations, args.camera)
    episodes = read_episodes(root, camera)
    chosen = choose_segments(args.dataset, episodes["length"], args.segment_length, args.segments, args.seed)
    prefs = pair_segments(args.segments, args.pairs)
    videos = find_videos(root, info, episodes, camera)
    frames = read_frames(root, info, episodes, dict.fromkeys((*args.observations, "action")))

    first = np.array(episodes["dataset_from_index"])[chosen[:, 0]] + chosen[:, 1]  # (K,) global frame index
    rows = first[:, None] + np.arange(args.segment_length)  # (K, T)
    observations = np.concatenate([frames[key] for key in args.observations], axis=1)  # (F, o)
    mean, std = observations.mean(axis=0), observations.std(axis=0)
    std[std == 0] = 1.0
    low, high = frames["action"].min(axis=0), frames["action"].max(axis=0)  # (a,)

    name = study_name(args.name or root.resolve().name)
    folder = Path(args.labels_dir, name)
    (folder / "clips").mkdir(parents=True, exist_ok=True)
    (folder / "pairs.npz").unlink(missing_ok=True)  # an earlier import's: its clips are overwritten now
    for i in tqdm(range(2 * len(prefs)), desc="cutting clips", unit="clip", disable=None):
        episode, start = chosen[i]
        seconds = episodes[f"videos/{camera}/from_timestamp"][episode] + start / info["fps"]
        cut_clip(videos[episode], seconds, args.segment_length, info["fps"], folder / "clips" / f"{i}.mp4")

    meta = dict(
        task=name,
        source=dict(format=f"LeRobotDataset {info['codebase_version']}", camera=camera, fps=info["fps"]),
        recipe=dict(label="none: pairs to be labelled, in no order", seed=args.seed),
        frames=dict(total=info["total_frames"], first=first.tolist()),
        scale=dict(obs_mean=mean.tolist(), obs_std=std.tolist(), act_low=low.tolist(), act_high=high.tolist()),
    )
    obs = ((observations[rows] - mean) / std).astype(np.float32)
    out = folder / "pairs.npz"
    write_pairs(out, meta, obs=obs, act=rescale(frames["action"][rows], low, high), prefs=prefs)
    short = sum(length < args.segment_length for length in episodes["length"])
    print(f"{out}: {args.segments} segments of {args.segment_length} frames, {len(prefs)} pairs, clips of {camera}")
    if short:
        print(f"left out: {short} of {len(episodes['length'])} episodes, shorter than a segment")
    task = next((text for tasks in episodes["tasks"] for text in tasks or ()), "What the robot should do.")
    label = f"python data_gen/label.py --data {out} --videos {folder}/clips --n-pref {len(prefs)}"
    print(f"label:  {label} --labeler me --description {shlex.quote(task)}")
    print(f"export: python data_gen/label.py --data {out} --labeler me --export --out {folder}/me.npz")
    print(f"train:  python paws_mlp.py --task {name} --data {folder}/me.npz --no-eval")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
