"""Videos of segments and of whole episodes, by exact replay in worker processes: headless, the right way up, the goal
ringed in green."""

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from pathlib import Path

import numpy as np
from tqdm import tqdm

WIDTH, HEIGHT = 320, 240
STEPS_PER_SECOND, STEPS_PER_FRAME = 20, 2  # 64 steps last 3.2 s: a quarter of the real speed of Meta-World
# azimuth, elevation, distance: upright, unlike Meta-World's own cameras (upside down, rolled or on the hand)
ARM_CAMERA, ARM_LOOKAT = (150, -35, 1.3), (-0.05, 0.6, 0.15)
RUNNER_CAMERA = (90, -20, 4)  # follows the torso
GREEN = (60, 255, 60)


def choose_gl() -> None:
    """Sets MUJOCO_GL to the first of EGL and OSMesa that starts; what the user has set stays."""
    candidates = [os.environ["MUJOCO_GL"]] if os.environ.get("MUJOCO_GL") else ["egl", "osmesa"]
    for gl in candidates:
        probe = [sys.executable, "-c", "import mujoco; mujoco.GLContext(8, 8).make_current()"]
        if subprocess.run(probe, env={**os.environ, "MUJOCO_GL": gl}, capture_output=True).returncode == 0:
            os.environ["MUJOCO_GL"] = gl
            return
    sys.exit(
        f"error: no headless OpenGL (tried MUJOCO_GL={', '.join(candidates)}): install the Debian package libosmesa6 "
        "(any machine) or libegl1 with the graphics driver's EGL"
    )


def cache_name(task: str, segments: dict[str, np.ndarray]) -> str:
    """Names the videos' folder by all that decides what they show."""
    settings = [task, WIDTH, HEIGHT, STEPS_PER_SECOND, STEPS_PER_FRAME, ARM_CAMERA, ARM_LOOKAT, RUNNER_CAMERA]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for key in ("act", "episode", "sim_state"):
        digest.update(np.ascontiguousarray(segments[key]).tobytes())
    return digest.hexdigest()[:16]


class Renderer:
    """One simulator and one OpenGL context, kept for many videos."""

    def __init__(self, task: str, env_id: str = ""):
        import envs
        import mujoco

        self.set_sim_state, self.own_frame = envs.set_sim_state, None
        self.env = envs.make_env(task, env_id, **({"render_mode": "rgb_array"} if env_id else {}))
        if env_id:  # somebody's own environment knows best how to show itself
            self.own_frame = self.env.env.render
            return
        self.sim = self.env.env.unwrapped
        self.sim.model.vis.quality.offsamples = 0  # and no shadows, no reflections: far faster in software
        self.renderer = mujoco.Renderer(self.sim.model, HEIGHT, WIDTH)
        self.renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = False
        self.renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = False
        self.camera = mujoco.MjvCamera()
        self.has_goal = task in envs.METAWORLD_TASKS
        if self.has_goal:
            self.camera.azimuth, self.camera.elevation, self.camera.distance = ARM_CAMERA
            self.camera.lookat[:] = ARM_LOOKAT
        else:
            self.camera.azimuth, self.camera.elevation, self.camera.distance = RUNNER_CAMERA
            self.camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
            self.camera.trackbodyid = 1

    def project(self, point: np.ndarray) -> tuple[float, float]:
        """Row and column at which the camera of the last frame sees a point of the world."""
        left_eye, right_eye = self.renderer.scene.camera
        offset = np.asarray(point) - (left_eye.pos + right_eye.pos) / 2
        scale = left_eye.frustum_near / (offset @ left_eye.forward)
        up, right = offset @ left_eye.up * scale, offset @ np.cross(left_eye.forward, left_eye.up) * scale
        pixels = HEIGHT / (left_eye.frustum_top - left_eye.frustum_bottom)
        return (left_eye.frustum_top - up) * pixels, WIDTH / 2 + right * pixels

    def frame(self) -> np.ndarray:  # (HEIGHT, WIDTH, 3) uint8
        if self.own_frame:
            return self.own_frame()
        self.renderer.update_scene(self.sim.data, self.camera)
        image = self.renderer.render()
        if self.has_goal:  # a ring over the picture: seen even where the goal is behind or inside something
            row, column = self.project(self.sim._target_pos)
            distance = np.hypot(*np.ogrid[-row : HEIGHT - row, -column : WIDTH - column][:2])
            image[(distance > 8) & (distance < 10.5)] = GREEN
        return image

    def replay(self, act: np.ndarray, seed: int, obs=None, sim_state=None) -> tuple[list[np.ndarray], float]:
        """The frames of a segment (of an episode from its start, without sim_state), and how far its observations are
        from the recorded ones, if given."""
        if sim_state is None:
            self.env.reset(seed)
        else:
            self.set_sim_state(self.env, seed, sim_state)
        frames, deviation = [self.frame()], 0.0
        for t in range(len(act)):
            replayed = self.env.step(act[t])[0]
            if obs is not None and t + 1 < len(act):
                deviation = max(deviation, float(np.abs(replayed - obs[t + 1]).max()))
            if (t + 1) % STEPS_PER_FRAME == 0 or t + 1 == len(act):
                frames.append(self.frame())
        return frames, deviation


def write_mp4(path: Path, frames: list[np.ndarray]) -> None:
    """H.264 as every browser and phone plays it; the file appears only when it is complete."""
    import imageio_ffmpeg

    height, width, _ = frames[0].shape
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.mp4")
    source = f"-f rawvideo -pix_fmt rgb24 -s {width}x{height} -r {STEPS_PER_SECOND // STEPS_PER_FRAME} -i -"
    target = "-c:v libx264 -preset veryfast -crf 21 -pix_fmt yuv420p -threads 1 -movflags +faststart"
    even = "-vf pad=ceil(iw/2)*2:ceil(ih/2)*2"  # yuv420p has half as many colours in each direction
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *f"{source} {even} {target}".split()]
    subprocess.run([*command, str(unfinished)], input=np.stack(frames).tobytes(), capture_output=True, check=True)
    os.replace(unfinished, path)


def start_worker() -> None:
    import envs

    envs.end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    warnings.simplefilter("ignore")


make_renderer = cache(Renderer)  # one in each worker


def render_video(path: Path, task: str, env_id: str, replayed: dict) -> float:
    frames, deviation = make_renderer(task, env_id).replay(**replayed)
    write_mp4(path, frames)
    return deviation


def render_videos(videos: dict[Path, dict], task: str, env_id: str = "", workers: int = 1) -> list[float]:
    """Writes a video for each path: of Renderer.replay with these arguments, whose deviations it returns."""
    choose_gl()
    for name in ("OMP_NUM_THREADS", "LP_NUM_THREADS"):  # one thread per worker, also in Mesa's software renderer
        os.environ.setdefault(name, "1")
    spawn = multiprocessing.get_context("spawn")  # an OpenGL context does not survive a fork
    pool = ProcessPoolExecutor(min(workers, len(videos)), spawn, initializer=start_worker)
    try:
        jobs = [pool.submit(render_video, path, task, env_id, replayed) for path, replayed in videos.items()]
        return [job.result() for job in tqdm(as_completed(jobs), total=len(jobs), desc="rendering", unit="video")]
    except BrokenProcessPool:
        sys.exit("error: a rendering process died (out of memory?); what is done is kept: start again, or --workers 1")
    except subprocess.CalledProcessError as e:
        sys.exit(f"error: ffmpeg could not write a video ({e.stderr.decode().strip()}); is the disk full?")
    except Exception as e:
        reason = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        fix = "install what it asks for" if env_id else "label.py takes your own videos with --videos FOLDER"
        sys.exit(f"error: {env_id or task}: its simulator here cannot replay or show this ({reason}); {fix}")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():  # idle, or no longer needed
            worker.terminate()


def render_segments(task: str, data: dict[str, np.ndarray], indices: list[int], folder: Path, workers: int) -> None:
    """Writes folder/<index>.mp4 for each index that is not there yet."""
    missing = [i for i in indices if not (folder / f"{i}.mp4").exists()]
    if not missing:
        return
    folder.mkdir(parents=True, exist_ok=True)
    videos = {}
    for i in missing:
        state = dict(seed=int(data["episode"][i]), sim_state=data["sim_state"][i])
        videos[folder / f"{i}.mp4"] = dict(act=data["act"][i], obs=data["obs"][i], **state)
    deviations = render_videos(videos, task, workers=workers)
    differing = sum(deviation > 0.01 for deviation in deviations)
    if differing:
        print(
            f"warning: {differing} of {len(missing)} segments replay differently from the file (by up to "
            f"{max(deviations):.2g}): it was made with other versions of the simulator; compare its meta",
            file=sys.stderr,
        )
