"""The weights that a PAWS run gave to the frames of an imported data set, for weighted training of any other policy.

    python benchmark/export_weights.py RUN_DIR

Writes RUN_DIR/sample_weights.parquet with one row for each frame of the data set: `index`, its global frame index, and
`weight`, that of the segment it is in. The weights have mean 1 over all frames; frames of no chosen segment have 0.
docs/own_data.md
"""

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tyro


@dataclass
class Args:
    run: tyro.conf.Positional[str]  # run directory of paws_mlp.py or paws_transformer.py
    data: str = ""  # the preference file of the run, if it has moved [as the run was given it]
    out: str = ""  # parquet file to write [RUN_DIR/sample_weights.parquet]


def load_model(run: str) -> dict:
    path = Path(run, "model.pt")
    try:
        model = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # not there, not finished, not a checkpoint
        sys.exit(f"error: {path}: not a finished run's model ({type(e).__name__}); give a run directory")
    if "weights" not in model:
        sys.exit(f"error: {path}: holds no segment weights; give a run of paws_mlp.py or paws_transformer.py")
    return model


def load_frames(path: str, sha256: str) -> tuple[int, np.ndarray, int]:
    """Frames in the imported data set, the first frame of each segment (K,), frames in a segment."""
    try:
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                sys.exit(f"error: {path}: is not the file that the run learned from; name that one with --data")
        with np.load(path, allow_pickle=False) as file:
            frames, (segments, length) = json.loads(str(file["meta"]))["frames"], file["obs"].shape[:2]
        total, first = frames["total"], np.array(frames["first"])
        if first.shape != (segments,) or first.min() < 0 or first.max() + length > total:
            sys.exit(f"error: {path}: first in its frames must be {segments} numbers from 0 to {total - length}")
        return total, first, length
    except OSError as e:
        sys.exit(f"error: {path}: cannot be read ({e}); name the preference file of the run with --data")
    except (KeyError, TypeError, ValueError):
        sys.exit(f"error: {path}: its meta has no frame numbers; docs/own_data.md tells how to write them")


def frame_weights(weights: np.ndarray, segments: np.ndarray, first: np.ndarray, length: int, total: int) -> np.ndarray:
    """(n, pieces), (n,), (K,) -> (total,): each frame has its piece's weight, scaled to mean 1 over all frames."""
    rows = first[segments][:, None] + np.arange(length)  # (n, T)
    per_frame = np.zeros(total)
    np.add.at(per_frame, rows, np.repeat(weights, length // weights.shape[1], axis=1))
    return per_frame / per_frame.mean()


def main(args: Args) -> None:
    model = load_model(args.run)
    total, first, length = load_frames(args.data or model["args"]["data"], model["args"]["data_sha256"])
    segments = model["segments"].numpy()  # (n,) rows of the file
    weights = model["weights"].numpy().reshape(len(segments), -1)  # (n, pieces of a segment)
    per_frame = frame_weights(weights, segments, first, length, total)
    out = Path(args.out or Path(args.run, "sample_weights.parquet"))
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    pq.write_table(pa.table({"index": np.arange(total), "weight": per_frame.astype(np.float32)}), unfinished)
    os.replace(unfinished, out)
    covered = np.count_nonzero(per_frame)
    print(f"{out}: {total} frames, {covered} of them with a weight above 0, the largest {per_frame.max():.3g}, mean 1")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
