"""The labelling page: real HTTP, real kills, a real browser, a simulated labeler whose rates the report recovers."""

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from selenium import webdriver
from werkzeug.serving import make_server

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "data_gen")]
import label
import render

import paws_mlp

TOKEN = "a-token-of-24-characters"


def write_file(path: Path, n: int = 12, **changes) -> Path:
    """n pairs of tiny random segments, four policies."""
    rng = np.random.default_rng(0)
    arrays = dict(
        obs=rng.normal(size=(2 * n, 3, 5)).astype(np.float32),
        act=rng.uniform(-1, 1, (2 * n, 3, 2)).astype(np.float32),
        prefs=rng.permutation(2 * n).reshape(n, 2),
        policy=np.arange(2 * n) % 4,
        format_version=1,
        meta=json.dumps({"task": "my-robot", "recipe": "random"}),
    )
    arrays.update(changes)
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


def write_videos(folder: Path, count: int) -> Path:
    folder.mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (5, 48, 64, 3), dtype=np.uint8)
    render.write_mp4(folder / "0.mp4", list(noise))
    for i in range(1, count):
        os.link(folder / "0.mp4", folder / f"{i}.mp4")
    return folder


@pytest.fixture
def own(tmp_path):
    """Flags for a study with one's own data and videos."""
    data, videos = write_file(tmp_path / "my.npz"), write_videos(tmp_path / "clips", 24)
    return dict(data=str(data), videos=str(videos), n_pref=8, repeat=0.25, labels_dir=str(tmp_path / "labels"), port=0)


@contextlib.contextmanager
def serving(args: label.Args, token: str | None = None, host: str = "127.0.0.1"):
    """The server in a thread of this process; gives its port."""
    study, source = label.make_study(args)
    app = label.create_app(study, args.labeler, label.find_videos(study, args, source), host, token)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=label.QuietHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Process:
    """The server as a user starts it."""

    def __init__(self, *flags: str, env: dict | None = None):
        command = [sys.executable, str(ROOT / "data_gen" / "label.py"), "--port", "0", *flags]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
        )
        self.url = self.process.stdout.readline().removeprefix("open ").strip()
        if not self.url:
            pytest.fail(self.process.stderr.read())
        self.port = int(re.search(r":(\d+)/", self.url)[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self) -> str:
        """kill -9; what it had written to standard error."""
        self.process.send_signal(signal.SIGKILL)
        return self.process.communicate()[1]


def call(port: int, path: str, body: object = None, headers: dict | None = None, method: str | None = None):
    """Status and content of the answer; a body is sent as JSON unless it is bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers = {} if headers is None else dict(headers)
    if body is not None:
        headers.setdefault("Content-Type", "application/json")
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    return response.status, json.loads(content) if response.headers["Content-Type"] == "application/json" else content


def state_of(port: int, name: str) -> dict:
    status, state = call(port, f"/state?labeler={name}")
    assert status == 200, state
    return state


def answer(port: int, state: dict, choice: str = "left", seconds: float = 1.0):
    fields = dict(
        labeler=state["labeler"], seq=state["seq"], pair=state["pair"]["pair"], choice=choice, seconds=seconds
    )
    return call(port, "/answer", fields)


def lines(args: dict, name: str, task: str = "my-robot") -> list[dict]:
    path = Path(args["labels_dir"], task, f"{name}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def everything(folder: Path) -> dict:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# ---- the plan ----


def test_pairs_are_the_training_scripts_choice_and_the_sides_tell_nothing(own):
    study, source = label.make_study(label.Args(**own))
    arrays = label.load_preference_file(source)
    for n in range(1, 13):
        ours, theirs = (f(arrays["prefs"], n, 1, arrays["policy"]) for f in (label.choose_pairs, paws_mlp.choose_pairs))
        assert ours.tolist() == theirs.tolist() and (n != 8 or study.rows == tuple(ours))
    plans = [study.plan(f"labeler{i}") for i in range(200)]
    better_is_left = [study.prefs[p["pair"], 0] == p["left"] for plan in plans for p in plan]
    assert abs(np.mean(better_is_left) - 0.5) < 4 * 0.5 / np.sqrt(len(better_is_left))
    assert study.plan("anna") == study.plan("anna") != study.plan("ben")
    for plan in plans:
        first = [p for p in plan if not p["repeat"]]
        again = [p for p in plan if p["repeat"]]
        assert sorted(p["pair"] for p in first) == sorted(study.rows)
        assert len(again) == len({p["pair"] for p in again}) == 2
        for p in again:
            earlier = next(q for q in first if q["pair"] == p["pair"])
            assert (p["left"], p["right"]) == (earlier["right"], earlier["left"])
            assert plan.index(p) - plan.index(earlier) > 1


def test_the_page_is_told_no_more_than_it_shows(own):
    with serving(label.Args(**own)) as port:
        state = state_of(port, "anna")
    assert set(state) == {"labeler", "task", "description", "seq", "done", "total", "pair"}
    assert set(state["pair"]) == {"pair", "left", "right"}


# ---- answers ----


def test_answers_undo_and_repeats(own):
    with serving(label.Args(**own)) as port:
        start = state_of(port, "anna")
        assert (start["done"], start["total"], start["seq"]) == (0, 10, 0)
        assert not Path(own["labels_dir"]).exists()  # looking writes nothing
        status, second = answer(port, start, "right", 2.5)
        assert (status, second["done"], second["seq"]) == (200, 1, 1)
        assert answer(port, start)[0] == 409  # the same again: sent twice, or from a second tab
        status, undone = call(port, "/undo", dict(labeler="anna", seq=1))
        assert (status, undone["done"], undone["seq"], undone["pair"]) == (200, 0, 2, start["pair"])
        assert answer(port, start)[0] == 409  # a late copy from before the undo
        assert call(port, "/undo", dict(labeler="anna", seq=2))[0] == 409  # nothing left to undo
        state = undone
        while state["pair"] is not None:
            status, state = answer(port, state)
            assert status == 200
        assert (state["done"], state["total"]) == (10, 10)
        assert (
            call(port, "/answer", dict(labeler="anna", seq=12, pair=start["pair"]["pair"], choice="left", seconds=1))[0]
            == 409
        )
    header, first, undo, *rest = lines(own, "anna")
    assert header["type"] == "start" and header["settings"]["n_pref"] == 8
    assert first | dict(time=0) == dict(
        type="answer", **start["pair"], repeat=False, choice="right", seconds=2.5, seq=0, labeler="anna", time=0
    )
    assert undo["type"] == "undo" and len(rest) == 10 and [e["seq"] for e in rest] == list(range(2, 12))


def test_killed_servers_lose_and_double_nothing(own, tmp_path):
    blocked = tmp_path / "blocked"  # one's own videos need no simulator
    blocked.mkdir()
    for package in ("mujoco", "metaworld", "gymnasium"):
        (blocked / f"{package}.py").write_text("raise ImportError('no simulator here')\n")
    own = dict(own, n_pref=0)  # all 12
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in own.items() if key != "port"]
    confirmed = 0
    for delay in (0.01, 0.05, 0.15):
        with Process(*flags, "--labeler", "anna", env={"PYTHONPATH": str(blocked)}) as server:
            state = state_of(server.port, "anna")
            assert confirmed <= state["done"] <= confirmed + 1  # +1: stored, but killed before it could say so
            confirmed = state["done"]
            killer = threading.Timer(delay, server.process.kill)
            killer.start()
            with contextlib.suppress(OSError, http.client.HTTPException):
                while confirmed < 13:
                    status, state = answer(server.port, state)
                    assert status == 200
                    confirmed = state["done"]
            killer.join()
    with serving(label.Args(**own)) as port:
        state = state_of(port, "anna")
        assert confirmed <= state["done"] <= confirmed + 1
        stored = lines(own, "anna")[1:]
        plan = label.make_study(label.Args(**own))[0].plan("anna")
        assert [e["seq"] for e in stored] == list(range(len(stored)))
        assert [e["pair"] for e in stored] == [p["pair"] for p in plan[: len(stored)]]


def test_a_torn_last_line_is_as_if_never_written(own):
    with serving(label.Args(**own)) as port:
        state = answer(port, answer(port, state_of(port, "anna"))[1])[1]
        path = Path(own["labels_dir"], "my-robot", "anna.jsonl")
        whole = path.read_bytes()
        path.write_bytes(whole + whole.splitlines()[-1][:25])
        assert state_of(port, "anna") == state
        assert answer(port, state)[0] == 200
        assert path.read_bytes().startswith(whole) and len(lines(own, "anna")) == 4
        path.write_bytes(whole[:30])  # not even the header is complete
        assert state_of(port, "anna")["done"] == 0
        assert answer(port, state_of(port, "anna"))[0] == 200 and len(lines(own, "anna")) == 2
        path.write_bytes(whole.replace(b"choice", b"chance"))
        status, refusal = call(port, "/state?labeler=anna")
        assert status == 409 and "damaged" in refusal["error"]


def test_labelers_work_at_once_and_two_servers_share_one(own, monkeypatch):
    args = label.Args(**own)
    monkeypatch.setattr(
        label, "now", lambda: time.sleep(0.02)
    )  # between reading and writing: without the lock, all win
    with serving(args) as one, serving(args) as other:

        def work(port, name):
            state = state_of(port, name)
            while state["pair"] is not None:
                state = answer(port, state, "left" if name == "anna" else "right")[1]

        threads = [threading.Thread(target=work, args=(one, name)) for name in ("anna", "ben")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name, choice in (("anna", "left"), ("ben", "right")):
            written = lines(own, name)[1:]
            assert len(written) == 10 and {(e["labeler"], e["choice"]) for e in written} == {(name, choice)}

        for _ in range(5):  # a race for each of carol's pairs, through two servers
            state, statuses = state_of(one, "carol"), []
            racers = [
                threading.Thread(target=lambda port=port, s=state, out=statuses: out.append(answer(port, s)[0]))
                for port in (one, other) * 3
            ]
            for racer in racers:
                racer.start()
            for racer in racers:
                racer.join()
            assert sorted(statuses) == [200] + [409] * 5
        assert len(lines(own, "carol")) == 1 + 5


def test_an_answers_file_continues_only_under_its_own_settings(own, tmp_path):
    with serving(label.Args(**own)) as port:
        answer(port, state_of(port, "anna"))
    with pytest.raises(SystemExit, match="begun with --n-pref 8 --seed 1 --repeat 0.25"):
        label.main(label.Args(**dict(own, n_pref=9), labeler=("anna",)))
    other = write_file(tmp_path / "other.npz", act=np.zeros((24, 3, 2), np.float32))
    with pytest.raises(SystemExit, match="belongs to another data file"):
        label.main(label.Args(**dict(own, data=str(other)), labeler=("anna",)))


# ---- bad requests ----

GOOD = dict(labeler="anna", seq=1, pair=None, choice="left", seconds=1.0)  # pair: filled in
BAD_ANSWERS = [
    (dict(pair=999), 404), (dict(pair=-1), 404), (dict(pair="0"), 404), (dict(pair=True), 404), (dict(pair=None), 404),
    (dict(seq=0), 409), (dict(seq=2), 409), (dict(seq=-1), 400), (dict(seq="1"), 400), (dict(seq=True), 400),
    (dict(choice="both"), 400), (dict(choice=None), 400), (dict(choice=["left"]), 400),
    (dict(seconds=-1), 400), (dict(seconds=1e9), 400), (dict(seconds=float("nan")), 400), (dict(seconds="1"), 400),
    (dict(labeler="../anna"), 400), (dict(labeler="anna\n"), 400), (dict(labeler=""), 400), (dict(labeler=7), 400),
    (dict(labeler="a" * 41), 400), (dict(labeler="stranger"), 403), (dict(extra=1), 400),
]  # fmt: skip


def test_bad_requests_get_4xx_and_change_nothing(own, tmp_path):
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (tmp_path / "clips" / "extra.mp4").write_bytes(b"secret")
    with serving(label.Args(**own, labeler=("anna", "ben"))) as port:
        state = answer(port, state_of(port, "anna"))[1]
        good = dict(GOOD, pair=state["pair"]["pair"])
        study = label.make_study(label.Args(**own))[0]
        unused = next(i for i in range(24) if i not in {int(s) for row in study.rows for s in study.prefs[row]})
        before = everything(tmp_path)

        for change, expected in BAD_ANSWERS:
            status, body = call(port, "/answer", good | change)
            assert (status, "error" in body) == (expected, True), change
        assert call(port, "/answer", {k: v for k, v in good.items() if k != "seconds"})[0] == 400
        assert call(port, "/answer", [good])[0] == 400
        for raw in (b"", b"{", b"\xff", b"[" * 1000):
            assert call(port, "/answer", raw)[0] == 400, raw
        assert call(port, "/undo", dict(labeler="anna", seq=0))[0] == 409
        assert call(port, "/undo", dict(labeler="anna"))[0] == 400

        body = json.dumps(good).encode()
        assert call(port, "/answer", body + b" " * 20_000)[0] == 413
        chunked = {"Transfer-Encoding": "chunked"}
        assert call(port, "/answer", b"5000\r\n" + body.ljust(0x5000) + b"\r\n0\r\n\r\n", chunked)[0] == 411
        assert call(port, "/answer", body, {"Content-Type": "text/plain"})[0] == 415
        assert call(port, "/answer", body, {"Content-Type": "application/x-www-form-urlencoded"})[0] == 415
        assert call(port, "/answer")[0] == 405 and call(port, "/answer", good, method="PUT")[0] == 405
        for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", "http://["):
            assert call(port, "/answer", good, {"Origin": origin})[0] in (400, 403), origin
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "["):
            assert call(port, "/state?labeler=anna", headers={"Host": host})[0] in (400, 403), host

        assert call(port, "/state")[0] == 400 and call(port, "/state?labeler=..%2Fanna")[0] == 400
        for name in (
            "../secret",
            "..%2fsecret",
            "%2e%2e/secret",
            "/etc/passwd",
            "extra",
            "-1",
            "999",
            str(unused),
            "1.mp4%00",
        ):
            assert call(port, f"/video/{name}.mp4")[0] == 404, name
        assert call(port, "/labels/my-robot/anna.jsonl")[0] == 404 and call(port, "/label.py")[0] == 404

        assert everything(tmp_path) == before
        assert call(port, "/answer", good, {"Origin": f"http://127.0.0.1:{port}"})[0] == 200  # and the good one passes
        assert call(port, "/state?labeler=anna", headers={"Host": "localhost:9000"})[0] == 200  # an ssh tunnel


def test_other_hosts_need_the_token(own):
    with serving(label.Args(**own), TOKEN, "0.0.0.0") as port:
        for path in ("/", "/state?labeler=anna", "/video/0.mp4", "/?token=wrong", f"/state?labeler=anna&token={TOKEN}"):
            assert call(port, path)[0] == 401, path
        wrong = [
            {},
            {"Authorization": "Bearer wrong"},
            {"Cookie": f"label-token-{port}=wrong"},
            {"Authorization": "Bearer é"},
        ]
        fields = dict(labeler="anna", seq=0, pair=0, choice="left", seconds=1)
        for headers in wrong:
            assert call(port, "/answer", fields, headers)[0] == 401
        assert not Path(own["labels_dir"]).exists()

        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", f"/?labeler=anna&token={TOKEN}")
        response = connection.getresponse()
        assert (response.status, response.headers["Location"]) == (
            302,
            "/?labeler=anna",
        )  # the token leaves the address
        cookie = response.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
        connection.close()
        assert call(port, "/", headers={"Cookie": cookie.split(";")[0]})[0] == 200
        assert call(port, "/state?labeler=anna", headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200


def test_security_headers_and_ranges(own):
    with serving(label.Args(**own)) as port:
        left = state_of(port, "anna")["pair"]["left"]
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("GET", f"/video/{left}.mp4", headers={"Range": "bytes=0-9"})
        response = connection.getresponse()
        assert response.status == 206 and len(response.read()) == 10  # without ranges, iOS plays nothing
        assert response.headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        connection.close()
    page = (ROOT / "data_gen" / "label.html").read_text()
    assert not re.search(r"https?://|//[a-z]|@import|url\(", page.replace("// ", ""))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(labeler=("a/b",)), "--labeler a/b: must be"),
        (dict(task="../x"), "--task ../x: must be"),
        (dict(n_pref=13), "has 12 pairs; choose --n-pref"),
        (dict(n_pref=-1), "choose --n-pref"),
        (dict(repeat=0.6), "--repeat 0.6"),
        (dict(seed=-1), "--seed -1"),
        (dict(data="nowhere.npz"), "nowhere.npz: file: not found"),
        (dict(videos="nowhere"), "--videos nowhere: 16 of 16 missing"),
        (dict(videos=None), "no simulator of that name; give your own videos with --videos"),
        (dict(videos=None, task="ant"), "key 'sim_state': missing"),
        (dict(token="short"), "at least 16 characters"),
        (dict(host="192.0.2.1"), "cannot listen on --host 192.0.2.1"),
        (dict(port=70_000), "choose another --port"),
        (dict(export=True), "no answers of anybody"),
        (dict(report=True, labeler=("anna",)), "no answers of anna"),
    ],
)
def test_errors_name_the_fix_on_one_line(own, change, message):
    with pytest.raises(SystemExit, match=re.escape(message)) as error:
        label.main(label.Args(**{**own, **change}))
    assert str(error.value).startswith("error: ") and "\n" not in str(error.value)


@pytest.mark.parametrize("meta", ["[" * 100_000, "1" * 5_000, "{", '{"horizon": "x"}', "[1]"])
def test_odd_meta_gets_one_line(own, meta):
    write_file(Path(own["data"]), meta=np.array(meta))
    with pytest.raises(SystemExit, match="key 'meta'") as error:
        label.main(label.Args(**own))
    assert "\n" not in str(error.value)


def test_labelling_and_validating_import_no_torch_and_no_script(own):
    code = "import sys, label, validate; validate.main(sys.argv[1:]); print({'torch', 'paws_mlp'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code, own["data"]], cwd=ROOT / "data_gen", capture_output=True, text=True
    )
    assert done.stdout.splitlines()[1:] == ["set()"], done.stderr


def test_a_machine_without_opengl_is_told_the_package(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "none-such")
    with pytest.raises(SystemExit, match="libosmesa6"):
        render.choose_gl()


# ---- report and export ----


def test_report_recovers_a_simulated_labelers_rates(tmp_path, capsys):
    blind_left, error, rng = 0.2, 0.1, np.random.default_rng(1)
    own = dict(
        data=str(write_file(tmp_path / "my.npz", 400)), labels_dir=str(tmp_path / "labels"), n_pref=400, repeat=0.25
    )
    own["videos"] = str(write_videos(tmp_path / "clips", 800))
    study = label.make_study(label.Args(**own))[0]
    with serving(label.Args(**own)) as port:
        state = state_of(port, "robot")
        for _ in range(500):
            oracle = "left" if study.prefs[state["pair"]["pair"], 0] == state["pair"]["left"] else "right"
            wrong = "right" if oracle == "left" else "left"
            choice = "left" if rng.random() < blind_left else wrong if rng.random() < error else oracle
            status, state = answer(port, state, choice, seconds=float(rng.uniform(1, 3)))
            assert status == 200
        assert state["pair"] is None
    report = label.make_report(study, label.load_answers(study, ()))["labelers"]["robot"]
    bias, errors = report["bias_and_error"]
    assert abs(bias - blind_left) < 3 * 0.033  # three standard errors: sqrt((.28 * .72 + .08 * .92) / 250)
    assert abs(errors - error) < 3 * 0.021  # sqrt(.08 * .92 / 250) / .8
    assert report["left"]["low"] < 0.6 < report["left"]["high"] and report["left"]["n"] == 500
    assert report["oracle"]["low"] < 0.82 < report["oracle"]["high"] and report["oracle"]["n"] == 400
    # Agreement of the two showings: with L, the oracle's side, 0.92 correct on the left and 0.72 on the right.
    assert (
        report["itself"]["low"] < 0.92 * 0.72 + 0.08 * 0.28 < report["itself"]["high"] and report["itself"]["n"] == 100
    )
    assert 1.8 < report["seconds"][1] < 2.2
    label.main(label.Args(**own, report=True))
    assert "robot: 500 answers" in capsys.readouterr().out


def event(study: label.Study, row: int, better: int, repeat: bool = False) -> dict:
    """An answer, left segment = first of the row, that prefers `better`."""
    left, right = (int(i) for i in study.prefs[row])
    choice = "left" if better == left else "right"
    return dict(type="answer", pair=row, left=left, right=right, repeat=repeat, choice=choice, seconds=row + 1.0)


def test_report_and_export_by_hand(own, tmp_path, capsys):
    study, source = label.make_study(label.Args(**own))
    a, b, c = study.rows[:3]
    (good_a, bad_a), (good_b, bad_b), (good_c, bad_c) = (tuple(map(int, study.prefs[row])) for row in (a, b, c))
    anna, ben = label.Answers(study, "anna"), label.Answers(study, "ben")
    first = [event(study, a, good_a), event(study, b, bad_b), dict(type="undo"), event(study, b, good_b)]
    for i, each in enumerate([*first, event(study, c, bad_c), event(study, a, bad_a, repeat=True)]):
        anna.append(i, each)
    for i, each in enumerate([event(study, a, bad_a), event(study, b, good_b)]):
        ben.append(i, each)
    report = label.make_report(study, label.load_answers(study, ()))
    assert report["labelers"]["anna"]["oracle"] | dict(low=0, high=0) == dict(n=3, share=2 / 3, low=0, high=0)
    assert report["labelers"]["anna"]["itself"]["share"] == 0.0 and report["labelers"]["ben"]["itself"]["n"] == 0
    assert report["labelers"]["anna"]["left"]["share"] == 0.5  # a, b left; c, a again right
    assert report["labelers"]["ben"]["seconds"][1] == (a + b + 2) / 2
    assert report["between"]["anna, ben"]["n"] == 2 and report["between"]["anna, ben"]["share"] == 0.5

    label.main(label.Args(**own, export=True))
    label.main(label.Args(**dict(own, n_pref=50), export=True, labeler=("ben",), out=str(tmp_path / "ben.npz")))
    rows_anna, rows_ben = [(good_a, bad_a), (good_b, bad_b), (bad_c, good_c)], [(bad_a, good_a), (good_b, bad_b)]
    for path, rows in ((study.folder / "export.npz", rows_anna + rows_ben), (tmp_path / "ben.npz", rows_ben)):
        arrays = label.load_preference_file(str(path))
        assert arrays["prefs"].tolist() == [list(row) for row in rows]
        with np.load(path, allow_pickle=False) as file, np.load(source) as original:
            assert set(file.files) == set(original.files)
            assert all(np.array_equal(file[k], original[k]) for k in ("obs", "act", "policy", "format_version"))
            meta = json.loads(str(file["meta"]))
        assert meta["task"] == "my-robot" and meta["recipe"] == "random" and meta["labelers"]["ben"] == 2
    with pytest.raises(SystemExit, match="is the data file itself"):
        label.main(label.Args(**own, export=True, out=own["data"]))
    assert not list(tmp_path.rglob(".*.npz*"))


# ---- the browser, with rendered videos ----


@pytest.fixture(scope="module")
def door_open(tmp_path_factory) -> Path:
    """Eight segments of door-open: the hand straight up, straight down, and the scripted expert, ever noisier."""
    import envs
    from metaworld.policies import ENV_POLICY_MAP

    env, expert, rng, steps = envs.make_env("door-open"), ENV_POLICY_MAP["door-open-v3"](), np.random.default_rng(0), 16
    segments = {key: [] for key in ("obs", "act", "sim_state", "episode", "start")}
    for episode in range(8):
        obs = env.reset(episode)
        start = 0 if episode < 2 else 20
        for _ in range(start):
            obs = env.step(expert.get_action(env.full_obs))[0]
        recorded = dict(obs=[], act=[], sim_state=envs.get_sim_state(env), episode=episode, start=start)
        for _ in range(steps):
            action = (0, 0, (1, -1)[episode], 0) if episode < 2 else expert.get_action(env.full_obs)
            action = np.clip(np.array(action) + rng.normal(0, 0.1 * max(0, episode - 2), 4), -1, 1).astype(np.float32)
            recorded["obs"].append(obs), recorded["act"].append(action)
            obs = env.step(action)[0]
        for key, value in recorded.items():
            segments[key].append(value)
    path = tmp_path_factory.mktemp("door") / "door-open.npz"
    prefs, meta = np.array([(2, 0), (3, 1), (4, 6), (5, 7)]), json.dumps({"task": "door-open"})
    np.savez(path, **{k: np.array(v) for k, v in segments.items()}, prefs=prefs, format_version=1, meta=meta)
    return path


def read_video(path: Path) -> np.ndarray:  # (frames, rows, columns, 3)
    import imageio_ffmpeg

    frames = imageio_ffmpeg.read_frames(str(path))
    about = next(frames)
    assert about["codec"] == "h264" and about["pix_fmt"].startswith("yuv420p") and about["fps"] == 10
    width, height = about["size"]
    return np.stack([np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in frames]).astype(int)


def check_videos(folder: Path) -> None:
    """The right way up, with the goal in view: read from the pixels alone."""
    for segment, direction in ((0, -1), (1, 1)):
        red, green, blue = np.moveaxis(read_video(folder / f"{segment}.mp4"), -1, 0)
        assert red.shape[0] == 1 + 16 // render.STEPS_PER_FRAME
        finger = (green > 130) & (blue > 130) & (red < 90)  # the cyan finger of the gripper
        row = [np.nonzero(frame)[0].mean() for frame in finger]
        assert direction * (row[-1] - row[0]) > 10  # hand up is up in the picture, down is down
        is_green = (green > 150) & (red < 140) & (blue < 140)
        rows, columns = np.nonzero(is_green[0])
        assert len(rows) > 60  # the painted ring ...
        middle = int(rows.mean().round()), int(columns.mean().round())
        around = np.s_[0, middle[0] - 1 : middle[0] + 2, middle[1] - 1 : middle[1] + 2]
        assert (green[around] > red[around] + 60).all()  # ... is around the simulator's own green goal
        assert np.ptp(rows) < 26 and np.ptp(columns) < 26


@pytest.fixture(scope="module")
def browser():
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("needs the Debian packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1100,800"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


def wait(browser, script: str, seconds: float = 30.0):
    """Until a JavaScript expression is true."""
    end = time.monotonic() + seconds
    while not (value := browser.execute_script(f"return {script}")):
        assert time.monotonic() < end, f"{script} never true; message: {browser.find_element('id', 'message').text}"
        time.sleep(0.05)
    return value


def wait_for_pair(browser, text: str) -> None:
    wait(browser, f"count.textContent === '{text}' && !document.getElementById('choose-left').disabled")


def test_from_rendered_videos_through_the_browser_to_a_trained_policy(door_open, browser, tmp_path):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(key):
        ActionChains(browser).send_keys(key).perform()

    own = dict(data=str(door_open), labels_dir=str(tmp_path / "labels"), n_pref=4, repeat=0.5)
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in own.items()]
    with Process(*flags, "--workers", "1") as server:
        (folder,) = (tmp_path / "labels" / "door-open" / "videos").iterdir()
        assert sorted(path.name for path in folder.iterdir()) == [f"{i}.mp4" for i in range(8)]
        check_videos(folder)
        browser.get(server.url)
        browser.find_element("id", "name").send_keys("anna", Keys.ENTER)  # the server was started for any name
        wait_for_pair(browser, "1 of 6")
        assert "Open a hinged door" in browser.find_element("id", "description").text
        sources = wait(browser, "[left.src, right.src]")
        expected = state_of(server.port, "anna")["pair"]
        assert [int(re.search(r"(\d+)\.mp4", s)[1]) for s in sources] == [expected["left"], expected["right"]]
        wait(browser, "left.ended && right.ended")  # they start together by themselves
        assert browser.execute_script("return left.videoWidth") == render.WIDTH

        for side, other in (("left", "right"), ("right", "left")):  # Play, Pause and Stop of each
            button = {b.text: b for b in browser.find_elements("css selector", f"[data-video={side}]")}
            button["Play"].click()
            wait(browser, f"!{side}.paused && {side}.currentTime > 0 && {other}.paused")
            button["Pause"].click()
            assert browser.execute_script(f"return {side}.paused && {side}.currentTime > 0")
            button["Stop"].click()
            assert browser.execute_script(f"return {side}.paused && {side}.currentTime === 0")
        browser.execute_script("left.pause(); right.pause(); document.activeElement.blur()")
        press(" ")
        wait(browser, "!left.paused && !right.paused")
        press(" ")
        assert browser.execute_script("return left.paused && right.paused")

        browser.find_element("id", "choose-right").click()
        wait_for_pair(browser, "2 of 6")
        press(Keys.ARROW_LEFT)
        wait_for_pair(browser, "3 of 6")
        browser.refresh()
        wait_for_pair(browser, "3 of 6")
        press("z")
        wait_for_pair(browser, "2 of 6")
        browser.find_element("id", "undo").click()
        wait_for_pair(browser, "1 of 6")
        press(Keys.ARROW_RIGHT)
        wait_for_pair(browser, "2 of 6")
        for width, height in ((390, 844), (844, 390)):  # a phone: nothing sticks out sideways
            metrics = dict(width=width, height=height, deviceScaleFactor=2, mobile=True)
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
            box = browser.find_element("id", "choose-left").rect
            assert box["height"] >= 44 and box["width"] >= 120
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        assert "replay differently" not in server.kill()
        press(Keys.ARROW_LEFT)  # nobody there: the page says so and stays
        wait(browser, "document.getElementById('message').textContent.includes('does not answer')")

    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    (folder / "3.mp4").unlink()
    with Process(*flags, "--labeler", "anna") as server:  # renders what is missing, continues where it was
        again = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        assert {name for name in times if times[name] != again[name]} == {"3.mp4"}
        browser.get(server.url)
        for i, key in enumerate((Keys.ARROW_LEFT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT, Keys.ARROW_LEFT, Keys.ARROW_LEFT)):
            wait_for_pair(browser, f"{i + 2} of 6")
            press(key)
        wait(browser, "!finished.hidden && pair.hidden")
        problems = [e["message"] for e in browser.get_log("browser") if e["level"] == "SEVERE"]
        assert all("favicon" in text or "/answer" in text for text in problems), (
            problems
        )  # /answer: to the killed server
    standing = label.standing(lines(own, "anna", "door-open")[1:])
    assert [e["choice"] for e in standing] == ["right", "left", "right", "left", "left", "left"]
    assert all(0.2 < e["seconds"] < 100 for e in standing)

    export = tmp_path / "anna.npz"
    label.main(label.Args(**own, export=True, labeler=("anna",), out=str(export)))
    preferred = [e[e["choice"]] for e in standing if not e["repeat"]]
    assert label.load_preference_file(str(export))["prefs"][:, 0].tolist() == preferred
    run = [sys.executable, str(ROOT / "paws_mlp.py"), "--task", "door-open", "--data", str(export), "--n-pref", "4"]
    run += ["--n-eff", "0.5", "--advantage-steps", "20", "--total-steps", "20", "--no-eval", "--runs-dir", "runs"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    (result,) = (tmp_path / "runs").glob("*/result.json")
    assert json.loads(result.read_text())["n_segments"] == 8
