"""Robot data in, labels in a real browser, training, weights out: a LeRobotDataset v3 and a Minari data set."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import imageio_ffmpeg
import minari
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from minari.data_collector.episode_buffer import EpisodeBuffer

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "data_gen"), str(ROOT / "benchmark")]
import export_weights
import import_lerobot
import import_minari
import label
import segments
import validate
from test_label import Process, browser, wait, wait_for_pair  # noqa: F401 (browser is a fixture)

CAMERA, FPS, LENGTHS = "observation.images.front", 10, (20, 5, 33, 16, 25)  # frames of each episode


def write_video(path: Path, grey: np.ndarray) -> None:
    """Each frame is one shade of grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = np.broadcast_to(grey.astype(np.uint8)[:, None, None, None], (len(grey), 48, 64, 3))
    source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", "64x48", "-r", str(FPS), "-i", "-"]
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-v", "error", *source, "-c:v", "libx264", "-pix_fmt", "yuv420p"]
    subprocess.run([*command, str(path)], input=frames.tobytes(), check=True)


def grey_of(index: np.ndarray) -> np.ndarray:
    return 20 + 2 * index  # of the frame with this global index


def write_robot(root: Path) -> Path:
    """A LeRobotDataset v3 in its published layout: two data files, two video files, many episodes in each."""
    rng, frames = np.random.default_rng(0), sum(LENGTHS)
    ends = np.cumsum(LENGTHS)
    begins, file = ends - LENGTHS, np.array([0, 0, 0, 1, 1])  # the file that each episode is in
    state = rng.normal(50, 20, (frames, 3)).astype(np.float32)
    action = np.column_stack((rng.uniform(-180, 90, (frames, 2)), np.full(frames, 7))).astype(np.float32)
    episode = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    frame = np.arange(frames) - begins[episode]
    vector = dict(dtype="float32", shape=[3], names=None)
    video = dict(dtype="video", shape=[48, 64, 3], names=["height", "width", "channels"], info={"video.fps": FPS})
    info = dict(
        codebase_version="v3.0",
        robot_type="so101",
        total_episodes=len(LENGTHS),
        total_frames=frames,
        total_tasks=1,
        chunks_size=1000,
        fps=FPS,
        splits={"train": f"0:{len(LENGTHS)}"},
        data_path="data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        video_path="videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        features={"observation.state": vector, "action": vector, CAMERA: video},
    )
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    (root / "data/chunk-000").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/stats.json").write_text("{}")
    pq.write_table(pa.table({"task_index": [0], "task": ["Fold the towel."]}), root / "meta/tasks.parquet")
    first_of_file = np.array([0, begins[3]])
    episodes = {
        "episode_index": np.arange(len(LENGTHS)),
        "tasks": [["Fold the towel."]] * len(LENGTHS),
        "length": LENGTHS,
        "data/chunk_index": [0] * len(LENGTHS),
        "data/file_index": file,
        "dataset_from_index": begins,
        "dataset_to_index": ends,
        f"videos/{CAMERA}/chunk_index": [0] * len(LENGTHS),
        f"videos/{CAMERA}/file_index": file,
        f"videos/{CAMERA}/from_timestamp": (begins - first_of_file[file]) / FPS,
        f"videos/{CAMERA}/to_timestamp": (ends - first_of_file[file]) / FPS,
    }
    pq.write_table(pa.table(episodes), root / "meta/episodes/chunk-000/file-000.parquet")
    for number in range(2):
        rows = np.flatnonzero(file[episode] == number)
        table = {
            "observation.state": pa.FixedSizeListArray.from_arrays(state[rows].ravel(), 3),
            "action": pa.FixedSizeListArray.from_arrays(action[rows].ravel(), 3),
            "timestamp": (frame[rows] / FPS).astype(np.float32),
            "frame_index": frame[rows],
            "episode_index": episode[rows],
            "index": rows,
            "task_index": np.zeros(len(rows), int),
        }
        pq.write_table(pa.table(table), root / f"data/chunk-000/file-{number:03d}.parquet")
        write_video(root / f"videos/{CAMERA}/chunk-000/file-{number:03d}.mp4", grey_of(rows))
    return root


@pytest.fixture
def robot(tmp_path) -> Path:
    return write_robot(tmp_path / "fold towel")


def import_robot(robot: Path, **flags) -> Path:
    """The file of pairs: 8 segments of 8 frames unless told otherwise."""
    flags = dict(segment_length=8, segments=8, labels_dir=str(robot.parent / "labels")) | flags
    import_lerobot.main(import_lerobot.Args(str(robot), **flags))
    return robot.parent / "labels" / "fold-towel" / "pairs.npz"


def frames_of(robot: Path) -> dict[str, np.ndarray]:
    table = pa.concat_tables(pq.read_table(file) for file in sorted(robot.glob("data/*/*.parquet")))
    return {key: np.array(table[key].to_pylist()) for key in ("observation.state", "action", "episode_index")}


def read_grey(clip: Path) -> np.ndarray:
    frames = imageio_ffmpeg.read_frames(str(clip))
    assert next(frames)["codec"] == "h264"
    return np.array([np.frombuffer(frame, np.uint8).mean() for frame in frames])


def test_segments_are_the_frames_and_clips_of_the_data_set(robot):
    data = validate.load_preference_file(str(import_robot(robot)))
    meta, frames = data["meta"], frames_of(robot)
    scale = {key: np.array(value) for key, value in meta["scale"].items()}
    assert data["obs"].shape == data["act"].shape == (8, 8, 3)
    assert data["prefs"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]] and meta["task"] == "fold-towel"
    used = [index for first in meta["frames"]["first"] for index in range(first, first + 8)]
    assert len(set(used)) == len(used) == 64 and meta["frames"]["total"] == sum(LENGTHS)  # no overlap
    assert np.abs(data["act"]).max() <= 1 and (data["act"][..., 2] == 0).all()  # the constant dimension
    for i, first in enumerate(meta["frames"]["first"]):
        rows = np.arange(first, first + 8)
        assert len(set(frames["episode_index"][rows])) == 1
        assert data["obs"][i] * scale["obs_std"] + scale["obs_mean"] == pytest.approx(
            frames["observation.state"][rows], abs=1e-3
        )
        actions = scale["act_low"] + (data["act"][i] + 1) / 2 * (scale["act_high"] - scale["act_low"])
        assert actions == pytest.approx(frames["action"][rows], abs=1e-3)
        assert read_grey(robot.parent / f"labels/fold-towel/clips/{i}.mp4") == pytest.approx(grey_of(rows), abs=1)


def test_features_are_joined_in_the_given_order(robot):
    one = validate.load_preference_file(str(import_robot(robot, pairs=1)))
    two = validate.load_preference_file(str(import_robot(robot, pairs=1, observations=("action", "observation.state"))))
    assert two["obs"].shape == (8, 8, 6) and np.array_equal(two["obs"][..., 3:], one["obs"])
    assert len(list(robot.parent.glob("labels/fold-towel/clips/*.mp4"))) == 2  # of the one pair alone


def test_every_step_is_covered_about_equally():
    for steps, length in ((250, 64), (64, 64), (65, 64), (130, 64)):
        count = steps // length
        covered = np.zeros(steps, int)
        for slot in range(count + 1):
            starts = segments.segment_starts(steps, length, slot)
            assert len(starts) == count and starts[-1] + length <= steps and (np.diff(starts) >= length).all()
            for start in starts:
                covered[start : start + length] += 1
        assert covered.min() >= count and covered.max() <= count + 1


def damage_info(**changes):
    def damage(root: Path) -> None:
        path = root / "meta/info.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return damage


def drop_feature(key: str):
    def damage(root: Path) -> None:
        features = json.loads((root / "meta/info.json").read_text())["features"]
        damage_info(features={k: v for k, v in features.items() if k != key})(root)

    return damage


def drop_column(root: Path) -> None:
    path = root / "data/chunk-000/file-001.parquet"
    pq.write_table(pq.read_table(path).drop_columns("action"), path)


def shorten_video(root: Path) -> None:
    write_video(root / f"videos/{CAMERA}/chunk-000/file-001.mp4", np.arange(30))


@pytest.mark.parametrize(
    ("damage", "flags", "message"),
    [
        (lambda root: (root / f"videos/{CAMERA}/chunk-000/file-001.mp4").unlink(), {}, "file-001.mp4: missing"),
        (lambda root: (root / f"videos/{CAMERA}/chunk-000/file-001.mp4").write_bytes(b"x"), {}, "not a readable video"),
        (shorten_video, {}, "ends after 3.0 s"),
        (damage_info(codebase_version="v2.1"), {}, "is LeRobotDataset v2.1, v3 is read"),
        (lambda root: (root / "meta/info.json").write_text("{"), {}, "no readable meta/info.json"),
        (drop_feature("action"), {}, "no feature action"),
        (drop_feature("observation.state"), {}, "no feature observation.state; choose --observations"),
        (drop_feature(CAMERA), {}, "no video feature"),
        (drop_column, {}, "cannot read index, observation.state, action"),
        (
            lambda root: (root / "data/chunk-000/file-000.parquet").write_bytes(b"x"),
            {},
            "file-000.parquet: cannot read",
        ),
        (damage_info(total_frames=98), {}, "not numbered 0 to 97"),
        (lambda root: None, dict(segment_length=40), "no episode has 40 steps; choose --segment-length up to 33"),
        (lambda root: None, dict(segments=12), "hold 11 segments of 8 steps; choose --segments up to 11"),
        (lambda root: None, dict(pairs=5), "--pairs 5: 8 segments make 1 to 4 pairs"),
        (lambda root: None, dict(camera="wrist"), f"--camera wrist: the data set has {CAMERA}"),
    ],
)
def test_a_bad_lerobot_data_set_gets_one_line(robot, damage, flags, message):
    damage(robot)
    with pytest.raises(SystemExit) as stop:
        import_robot(robot, **flags)
    assert str(stop.value).startswith("error: ") and message in str(stop.value) and "\n" not in str(stop.value)
    assert not list(robot.parent.glob("labels/*/*.npz"))


# ---- Minari ----


def make_minari(folder: Path, monkeypatch, data_format: str = "arrow", seeds: bool = True, rewarded: int = 3) -> str:
    """Three episodes of random actions in [-2, 2], recorded with Minari itself, so many with a reward; its id."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder / "minari"))
    env, buffers = gym.make("Pusher-v5", max_episode_steps=30), []
    for seed in range(3):
        env.action_space.seed(seed)
        (obs, _), ended = env.reset(seed=seed), False
        episode = EpisodeBuffer(id=seed, seed=seed if seeds else None, observations=[obs], actions=[])
        while not ended:
            action = env.action_space.sample()
            obs, reward, terminated, ended, _ = env.step(action)
            episode.observations.append(obs), episode.actions.append(action)
            episode.rewards.append(float(reward) if seed < rewarded else 0.0)
            episode.terminations.append(terminated), episode.truncations.append(ended)
        buffers.append(episode)
    minari.create_dataset_from_buffers("pusher/random-v0", buffers, env=env, data_format=data_format)
    return "pusher/random-v0"


@pytest.mark.parametrize("data_format", ["arrow", "hdf5"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_segments_are_labelled_by_return(tmp_path, monkeypatch, data_format):
    if data_format == "hdf5":
        pytest.importorskip("h5py")
    name = make_minari(tmp_path, monkeypatch, data_format)
    import_minari.main(import_minari.Args(name, segment_length=7, segments=10, labels_dir=str(tmp_path)))
    data = validate.load_preference_file(str(tmp_path / "pusher-random-v0" / "pairs.npz"))
    meta = data["meta"]
    episodes = list(minari.load_dataset(name).iterate_episodes())
    obs, act = (np.concatenate([getattr(e, key)[: len(e)] for e in episodes]) for key in ("observations", "actions"))
    reward = np.concatenate([e.rewards for e in episodes])
    rows = np.array(meta["frames"]["first"])[:, None] + np.arange(7)
    assert meta["frames"]["total"] == len(act) and len(set(rows.ravel())) == 70
    assert data["obs"] == pytest.approx(obs[rows], abs=1e-6)  # as they are: --env-id gives the same
    assert data["act"] == pytest.approx(act[rows] / 2, abs=1e-6)
    assert meta["scale"] == dict(act_low=[-2.0] * 7, act_high=[2.0] * 7)
    better, worse = reward[rows].sum(axis=1)[data["prefs"]].T
    assert (better >= worse).all() and sorted(data["prefs"].ravel()) == list(range(10))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_pairs_of_equal_returns_get_no_label(tmp_path, monkeypatch, capsys):
    flags = dict(segment_length=7, segments=10, labels_dir=str(tmp_path))
    import_minari.main(import_minari.Args(make_minari(tmp_path, monkeypatch, rewarded=1), **flags))
    data = validate.load_preference_file(str(tmp_path / "pusher-random-v0" / "pairs.npz"))
    better, worse = data["reward"].sum(axis=1)[data["prefs"]].T
    assert (better > worse).all() and 0 < len(better) < 5
    assert f"{5 - len(better)} pairs of equal returns were left out" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "minari")
    with pytest.raises(SystemExit, match="all pairs have equal returns"):
        import_minari.main(import_minari.Args(make_minari(tmp_path, monkeypatch, rewarded=0), **flags))


def test_minari_spaces_are_flattened_as_gymnasium_does():
    box = gym.spaces.Box(-1, 1, (2, 3))
    space = gym.spaces.Dict(z=box, a=gym.spaces.Tuple((box, gym.spaces.Box(0, 1, (1,)))))
    space.seed(0)
    elements = [space.sample() for _ in range(5)]
    stacked = dict(
        z=np.stack([e["z"] for e in elements]), a=tuple(np.stack([e["a"][i] for e in elements]) for i in (0, 1))
    )
    expected = np.stack([gym.spaces.flatten(space, element) for element in elements])
    assert import_minari.flatten(space, stacked) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("flags", "seeds", "message"),
    [
        (dict(dataset="nothing/there-v0"), True, "no such Minari data set on disk"),
        (dict(segment_length=31), True, "no episode has 31 steps; choose --segment-length up to 30"),
        (dict(segment_length=7, segments=13), True, "hold 12 segments of 7 steps"),
        (dict(segment_length=7, segments=4, render=True), False, "has no seed"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_bad_minari_data_set_gets_one_line(tmp_path, monkeypatch, flags, seeds, message):
    name = make_minari(tmp_path, monkeypatch, seeds=seeds)
    with pytest.raises(SystemExit) as stop:
        import_minari.main(import_minari.Args(**dict(dataset=name, labels_dir=str(tmp_path)) | flags))
    assert str(stop.value).startswith("error: ") and message in str(stop.value) and "\n" not in str(stop.value)
    assert not list(tmp_path.glob("*/pairs.npz"))


# ---- weights out ----


def write_run(folder: Path, data: Path, weights: list[float], chosen: list[int]) -> str:
    folder.mkdir()
    digest = hashlib.sha256(data.read_bytes()).hexdigest()
    model = dict(format_version=1, args=dict(data=str(data), data_sha256=digest), policy={})
    model |= dict(weights=torch.tensor(weights, dtype=torch.float64), segments=torch.tensor(chosen))
    torch.save(model, folder / "model.pt")
    return str(folder)


@pytest.mark.parametrize("pieces", [1, 2])
def test_the_weight_of_a_frame_is_its_piece_of_a_segments(robot, tmp_path, pieces):
    data = import_robot(robot)
    first = json.loads(str(np.load(data)["meta"]))["frames"]["first"]
    weights = np.random.default_rng(0).dirichlet(np.ones(6 * pieces))
    chosen = [4, 5, 0, 1, 7, 6]  # pair 2, 3 was not chosen
    run = write_run(tmp_path / "run", data, weights.tolist(), chosen)
    export_weights.main(export_weights.Args(run))
    table = pq.read_table(tmp_path / "run" / "sample_weights.parquet").to_pydict()
    assert list(table) == ["index", "weight"] and table["index"] == list(range(sum(LENGTHS)))
    expected = np.zeros(sum(LENGTHS))
    for row, segment in enumerate(chosen):
        for t in range(8):
            expected[first[segment] + t] = weights[row * pieces + t * pieces // 8]
    assert table["weight"] == pytest.approx(expected / expected.sum() * sum(LENGTHS)) and expected.any()
    assert np.mean(table["weight"]) == pytest.approx(1)


def test_bad_runs_get_one_line(robot, tmp_path):
    data = import_robot(robot)
    run = write_run(tmp_path / "run", data, [0.5, 0.5], [0, 1])
    bare = tmp_path / "bare.npz"
    np.savez(bare, obs=np.zeros((2, 3, 1)), meta=json.dumps({"task": "towel"}))
    of_bare = write_run(tmp_path / "of bare", bare, [0.5, 0.5], [0, 1])
    outside = tmp_path / "outside.npz"
    np.savez(outside, obs=np.zeros((2, 3, 1)), meta=json.dumps({"frames": dict(total=9, first=[-1, 3])}))
    of_outside = write_run(tmp_path / "of outside", outside, [0.5, 0.5], [0, 1])
    (tmp_path / "bc").mkdir()
    torch.save(dict(args=dict(data=str(data)), policy={}), tmp_path / "bc" / "model.pt")
    for args, message in (
        (dict(run=str(tmp_path)), "not a finished run's model"),
        (dict(run=str(tmp_path / "bc")), "holds no segment weights"),
        (dict(run=run, data=str(bare)), "is not the file that the run learned from"),
        (dict(run=of_bare), "its meta has no frame numbers"),
        (dict(run=of_outside), "first in its frames must be 2 numbers from 0 to 6"),
        (dict(run=run, data="nowhere.npz"), "cannot be read"),
    ):
        with pytest.raises(SystemExit, match="error: ") as stop:
            export_weights.main(export_weights.Args(**args))
        assert message in str(stop.value)


# ---- from a data set to weights ----


@pytest.mark.slow
@pytest.mark.skipif(
    not shutil.which("chromium") or not shutil.which("chromedriver"), reason="needs a browser: chromium"
)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("source", ["lerobot", "minari"])
def test_import_label_train_export(source, request, browser, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    if source == "lerobot":
        data = import_robot(request.getfixturevalue("robot"), segments=6)
    else:
        name = make_minari(tmp_path, monkeypatch)
        import_minari.main(import_minari.Args(name, segment_length=8, segments=6, render=True))
        data = tmp_path / "labels/pusher-random-v0/pairs.npz"
    with Process("--data", str(data), "--videos", str(data.parent / "clips"), "--n-pref=3", "--labeler=me") as server:
        browser.get(server.url)
        for done in range(3):
            wait_for_pair(browser, f"{done + 1} of 3")
            browser.find_element("id", "choose-right").click()
        wait(browser, "!finished.hidden")
    labels = [json.loads(line) for line in (data.parent / "me.jsonl").read_text().splitlines()[1:]]

    label.main(label.Args(data=str(data), labeler=("me",), export=True, out="me.npz"))
    assert np.load("me.npz")["prefs"].tolist() == [[answer["right"], answer["left"]] for answer in labels]
    train = [sys.executable, str(ROOT / "paws_mlp.py"), "--data=me.npz", "--no-eval", "--n-eff=0.5"]
    done = subprocess.run([*train, "--advantage-steps=9", "--total-steps=5"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = Path("runs").iterdir()
    export_weights.main(export_weights.Args(str(folder)))
    frames = json.loads(str(np.load("me.npz")["meta"]))["frames"]
    model = torch.load(folder / "model.pt", weights_only=True)
    weights = np.array(pq.read_table(folder / "sample_weights.parquet")["weight"].to_pylist())
    assert len(weights) == frames["total"] and weights.mean() == pytest.approx(1)
    assert np.count_nonzero(weights) <= 6 * 8 and sorted(model["segments"].tolist()) == list(range(6))
    for segment, weight in zip(model["segments"].tolist(), model["weights"].tolist(), strict=True):
        first = frames["first"][segment]
        assert weights[first : first + 8] == pytest.approx(weight * frames["total"] / 8)
