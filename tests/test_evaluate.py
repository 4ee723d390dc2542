"""benchmark/evaluate.py: the numbers of the scripts' own evaluation, intervals against closed forms, a video."""

import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark"), str(ROOT / "data_gen")]
import envs
import evaluate

import paws_mlp


def write_model(folder: Path, task: str, env_id: str, obs_dim: int, act_dim: int) -> Path:
    torch.manual_seed(0)
    policy = paws_mlp.Policy(obs_dim, act_dim).state_dict()
    args = asdict(paws_mlp.Args(task=task, env_id=env_id))
    folder.mkdir(exist_ok=True)
    torch.save({"format_version": 1, "args": args, "policy": policy}, folder / "model.pt")
    return folder


def test_a_run_s_own_evaluation_is_repeated(toy, tmp_path):
    """The mean return of evals.csv, from the saved model and the seeds that the scripts document, to the last digit."""
    flags = dict(total_steps=4, eval_every=4, eval_episodes=3, eval_workers=1, advantage_steps=2, n_eff=0.5, seed=5)
    paws_mlp.main(paws_mlp.Args(task="toy", data=str(toy), env_id="Pendulum-v1", runs_dir=str(tmp_path), **flags))
    (folder,) = tmp_path.iterdir()
    with open(folder / "evals.csv") as file:
        (row,) = csv.DictReader(file)
    task, env_id, layers = evaluate.load_model(folder / "model.pt")
    assert (task, env_id) == ("toy", "Pendulum-v1")
    seeds, env = np.random.SeedSequence([5, 4]).generate_state(3) >> 1, envs.make_env(task, env_id)
    assert float(row["episodic_return"]) == np.mean([evaluate.play(env, layers, int(seed))[1] for seed in seeds])
    assert not set(seeds.tolist()) & set(evaluate.episode_seeds(5, 1000))


def test_an_episode_is_the_script_s(tmp_path):
    task, env_id, layers = evaluate.load_model(write_model(tmp_path, "button-press", "", 35, 4) / "model.pt")
    ours = evaluate.play(envs.make_env(task), layers, 7)
    args, weights = paws_mlp.Args(task=task, env_id=env_id), [array for layer in layers for array in layer]
    assert ours[:2] == paws_mlp.run_episode(args, weights, seed=7) and ours[2].shape == (250, 4)


def test_intervals_against_closed_forms():
    found = evaluate.summarise(np.array([1.0] * 8 + [0.0] * 2), np.arange(10.0))
    z, n, p = 1.959963985, 10, 0.8
    middle, half = p + z**2 / (2 * n), z * np.sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    wilson = [(middle - half) / (1 + z**2 / n), (middle + half) / (1 + z**2 / n)]
    assert [found["success_low"], found["success_high"]] == pytest.approx(wilson)
    margin = 2.262157163 * np.sqrt(82.5 / 9) / np.sqrt(10)  # t of 9 degrees of freedom; squared deviations sum to 82.5
    assert [found["return_low"], found["return"], found["return_high"]] == pytest.approx(
        [4.5 - margin, 4.5, 4.5 + margin]
    )
    unknown = evaluate.summarise(np.array([np.nan]), np.array([3.0]))
    assert unknown == dict.fromkeys(unknown, None) | {"return": 3.0}


@pytest.mark.slow
def test_many_episodes_and_a_video(tmp_path, capsys):
    import imageio_ffmpeg

    folder = write_model(tmp_path / "run", "button-press", "", 35, 4)
    result = evaluate.main(evaluate.Args(run=str(folder), episodes=3, workers=2, video=True))
    env, (_, _, layers) = envs.make_env("button-press"), evaluate.load_model(folder / "model.pt")
    played = [evaluate.play(env, layers, seed)[:2] for seed in evaluate.episode_seeds(1, 3)]
    assert [result["success"], result["return"]] == np.mean(played, axis=0).tolist()
    assert json.loads((folder / "evaluation.json").read_text()) == result
    assert capsys.readouterr().out.startswith("button-press, 3 episodes: success 0.0% [0.0%, 56.1%], return ")
    frames = imageio_ffmpeg.read_frames(str(folder / "video.mp4"))
    assert next(frames)["size"] == (320, 240) and len(list(frames)) == 1 + 250 // 2
    assert sorted(path.name for path in folder.iterdir()) == ["evaluation.json", "model.pt", "video.mp4"]


@pytest.mark.parametrize("damage, words", [
    ("no file", "give the directory of a finished run"),
    ("no model", "not the model of a run"),
    ("ant", "does not fit ant"),
])  # fmt: skip
def test_errors_on_one_line(damage, words, tmp_path):
    if damage != "no file":
        write_model(tmp_path, damage, "", 35, 4)
    if damage == "no model":
        (tmp_path / "model.pt").write_bytes(b"no model")
    with pytest.raises(SystemExit, match=words) as error:
        evaluate.main(evaluate.Args(run=str(tmp_path), episodes=1))
    assert str(error.value).startswith("error: ") and "\n" not in str(error.value)
