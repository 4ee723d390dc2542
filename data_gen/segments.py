"""What the importers share: cut segments inside episodes, pair them, rescale actions, write labels/<name>/pairs.npz."""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np


def segment_starts(steps: int, length: int, slot: int) -> list[int]:
    """Cuts an episode into steps // length segments; the steps left over stand before segment `slot`.

    Over all slots, 0 to steps // length (after the last), each step is left out at most once: coverage is about equal.
    """
    count = steps // length
    left_over = steps - count * length
    return [i * length + (left_over if i >= slot % (count + 1) else 0) for i in range(count)]


def choose_segments(source: str, episode_steps: list[int], length: int, segments: int, seed: int) -> np.ndarray:
    """A seeded choice of segments that do not overlap, in random order: rows (episode, first step). (K, 2)"""
    if length < 1 or segments < 2:
        sys.exit(f"error: --segment-length {length} --segments {segments}: use at least 1 and 2")
    if max(episode_steps, default=0) < length:
        longest = max(episode_steps, default=0)
        sys.exit(f"error: {source}: no episode has {length} steps; choose --segment-length up to {longest}")
    cut = [
        (episode, start)
        for episode, steps in enumerate(episode_steps)
        for start in segment_starts(steps, length, slot=episode)
    ]
    if len(cut) < segments:
        problem = f"its {len(episode_steps)} episodes hold {len(cut)} segments of {length} steps"
        sys.exit(f"error: {source}: {problem}; choose --segments up to {len(cut)}, or a smaller --segment-length")
    return np.array(cut)[np.random.default_rng([seed, 0]).permutation(len(cut))[:segments]]


def pair_segments(segments: int, pairs: int | None) -> np.ndarray:
    """Each segment in at most one pair; segments are already in random order. (n, 2)"""
    pairs = segments // 2 if pairs is None else pairs
    if not 1 <= pairs <= segments // 2:
        sys.exit(f"error: --pairs {pairs}: {segments} segments make 1 to {segments // 2} pairs")
    return np.arange(2 * pairs).reshape(pairs, 2)


def rescale(actions: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """[low, high] to [-1, 1]; a constant dimension to 0. Back: low + (a + 1) / 2 * (high - low)."""
    width = np.where(high > low, high - low, 1.0)
    return np.where(high > low, np.clip(2 * (actions - low) / width - 1, -1, 1), 0.0).astype(np.float32)


def study_name(source: str) -> str:
    """A name as label.py takes it for --task."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", source).strip("-")[:40] or "imported"


def write_pairs(path: Path, meta: dict, **arrays: np.ndarray) -> None:
    """A preference file that appears only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with open(unfinished, "wb") as file:
        np.savez_compressed(file, format_version=np.int64(1), meta=np.array(json.dumps(meta)), **arrays)
    os.replace(unfinished, path)
