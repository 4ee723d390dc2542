"""Measures the policy of a finished run, of whatever method, in many episodes, and films one.

    python benchmark/evaluate.py runs/door-open__paws_mlp__n50__s1__1700000000 --episodes 1000 --video

Writes evaluation.json, with 95 % intervals, and video.mp4 next to the run's model.pt. No evaluation during training has
played these episodes, and all runs of a task play the same ones.
"""

import json
import multiprocessing
import os
import signal
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # workers inherit it: one thread each

import numpy as np
import tyro
from scipy.stats import binomtest, t
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data_gen"))
from envs import end_with_parent, make_env
from render import render_videos

Layers = list[tuple[np.ndarray, np.ndarray]]  # (in, out) weights and (out,) bias of each


@dataclass
class Args:
    run: tyro.conf.Positional[str]  # run directory, with a model.pt
    episodes: int = 1000
    seed: int = 1  # of the episodes
    workers: int = min(4, os.cpu_count() or 1)  # processes
    video: bool = False  # film the first episode


def load_model(path: Path) -> tuple[str, str, Layers]:
    """Task, Gymnasium environment (empty: the task's own) and policy of a model.pt."""
    import torch  # here: the workers need none

    if not path.is_file():
        sys.exit(f"error: {path}: not found; give the directory of a finished run, such as runs/<name>")
    try:
        model = torch.load(path, map_location="cpu", weights_only=True)
        policy = {key: value.float().numpy() for key, value in model["policy"].items()}
        numbers = sorted({int(key.split(".")[1]) for key in policy})
        layers = [(policy[f"net.{i}.weight"].T.copy(), policy[f"net.{i}.bias"]) for i in numbers]
        return model["args"]["task"], model["args"]["env_id"] or "", layers
    except Exception as e:
        sys.exit(f"error: {path}: not the model of a run ({type(e).__name__}); train it again")


def play(env, layers: Layers, seed: int) -> tuple[float, float, np.ndarray]:
    """Success at any step (NaN: no such notion), return and actions (T, a) of one episode of the policy's mean."""
    obs, success, returned, actions, ended = env.reset(seed), np.nan, 0.0, [], False
    while not ended:
        x = obs
        for weight, bias in layers[:-1]:
            x = np.maximum(x @ weight + bias, 0.0)
        actions.append(np.tanh(x @ layers[-1][0] + layers[-1][1]))
        obs, reward, now, ended = env.step(actions[-1])
        success, returned = np.fmax(success, now), returned + reward
    return float(success), returned, np.array(actions)


def start_worker(task: str, env_id: str, layers: Layers) -> None:
    global ENV, LAYERS
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    ENV, LAYERS = make_env(task, env_id), layers


def play_in_worker(seed: int) -> tuple[float, float]:
    return play(ENV, LAYERS, seed)[:2]


def episode_seeds(seed: int, episodes: int) -> list[int]:
    """Others than those of training, SeedSequence([seed, step])."""
    return (np.random.SeedSequence(seed, spawn_key=(1,)).generate_state(episodes) >> 1).tolist()


def summarise(success: np.ndarray, returns: np.ndarray) -> dict[str, float | None]:
    """Means with 95 % intervals: Wilson's for the success rate, Student's for the return."""
    n, rate, mean = len(returns), success.mean(), returns.mean()
    margin = t.ppf(0.975, n - 1) * returns.std(ddof=1) / np.sqrt(n) if n > 1 else np.nan
    low, high = (np.nan, np.nan) if np.isnan(rate) else binomtest(int(success.sum()), n).proportion_ci(method="wilson")
    numbers = {"success": rate, "success_low": low, "success_high": high}
    numbers |= {"return": mean, "return_low": mean - margin, "return_high": mean + margin}
    return {key: float(value) if np.isfinite(value) else None for key, value in numbers.items()}


def main(args: Args) -> dict:
    if args.episodes < 1 or args.workers < 1 or args.seed < 0:
        sys.exit("error: --episodes and --workers must be at least 1, --seed at least 0")
    folder = Path(args.run)
    task, env_id, layers = load_model(folder / "model.pt")
    env, name = make_env(task, env_id), env_id or task
    if (env.obs_dim, env.act_dim) != (layers[0][0].shape[0], layers[-1][0].shape[1]):
        sys.exit(
            f"error: {folder}: its policy does not fit {name}, with {env.obs_dim} observations, {env.act_dim} actions"
        )
    seeds, context = episode_seeds(args.seed, args.episodes), multiprocessing.get_context("spawn")
    workers, simulator = min(args.workers, args.episodes), (task, env_id, layers)
    try:
        with ProcessPoolExecutor(workers, context, start_worker, simulator) as pool:
            played = list(tqdm(pool.map(play_in_worker, seeds), total=len(seeds), unit="episode", disable=None))
    except KeyboardInterrupt:
        sys.exit("stopped: nothing is written")
    except BrokenProcessPool:
        sys.exit("error: an evaluation process died (out of memory?); try fewer --workers")
    result = {"task": task, "env_id": env_id, "episodes": args.episodes, "seed": args.seed}
    result |= summarise(*np.array(played).T)
    (folder / "evaluation.tmp").write_text(json.dumps(result, indent=1, allow_nan=False))
    os.replace(folder / "evaluation.tmp", folder / "evaluation.json")
    text = "return {return:.1f}".format(**result)
    if result["return_low"] is not None:
        text += " [{return_low:.1f}, {return_high:.1f}]".format(**result)
    if result["success"] is not None:
        text = "success {success:.1%} [{success_low:.1%}, {success_high:.1%}], ".format(**result) + text
    print(f"{name}, {args.episodes} episodes: {text}")
    if args.video:
        actions = play(env, layers, seeds[0])[2]
        render_videos({folder / "video.mp4": dict(act=actions, seed=seeds[0])}, task, env_id)
        print(f"{folder / 'video.mp4'}: its first episode")
    return result


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
