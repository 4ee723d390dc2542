"""Human preferences: renders the segments of a preference file's pairs and serves a page on which people compare them.

    python data_gen/label.py --task door-open --labeler NAME        label 50 pairs in the browser
    python data_gen/label.py --task door-open --report              agreement, position bias, time per answer
    python data_gen/label.py --task door-open --export              a preference file that every script takes
    python data_gen/label.py --data my.npz --videos FOLDER ...      own videos, FOLDER/<segment index>.mp4: no simulator

Answers are appended to labels/<task>/<labeler>.jsonl, and on disk before the page shows the next pair. The server holds
no state besides that file: it can be killed at any moment, and several servers may share it. docs/labelling.md
"""

import base64
import fcntl
import hashlib
import hmac
import io
import json
import logging
import math
import os
import re
import secrets
import socket
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import flask
import numpy as np
import tyro
from scipy.stats import binomtest
from validate import load_preference_file
from werkzeug.exceptions import HTTPException
from werkzeug.serving import WSGIRequestHandler, make_server

METAWORLD = {  # the paper's words, appendix "Meta-World Task Descriptions"; it has none for locomotion
    "button-press": "Press a small button on the panel until it activates.",
    "door-open": "Open a hinged door by pulling the handle to a target angle.",
    "drawer-open": "Pull the drawer along its rail until it reaches the goal extension.",
    "faucet-close": "Rotate the faucet handle clockwise until it is fully off.",
    "lever-pull": "Pull the short lever down through a quarter turn.",
    "peg-insert-side": "Insert a cylindrical peg into a horizontal side hole without jamming.",
    "plate-slide": "Push the plate across the table into the marked goal region.",
    "push-back": "Push the movable puck backward to the target position.",
    "sweep-into": "Sweep a small object across the surface into a container opening.",
    "window-close": "Push the sliding window pane along its track until fully closed.",
}
RUNNERS = ("ant", "half-cheetah", "hopper", "walker2d")
DESCRIPTIONS = METAWORLD | dict.fromkeys(RUNNERS, "Run forward, to the right, as fast as possible without falling.")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
MAX_BODY = 1024


@dataclass
class Args:
    task: str | None = None
    """one of the 14 tasks, or any name for your own data [the task that --data names; else door-open]"""
    data: str | None = None
    """preference file [data/<task>.npz]"""
    labeler: tuple[str, ...] = ()
    """one or more names: who may label [the page asks for any name]; whose answers to report or export [everybody's]"""
    n_pref: int = 0
    """number of pairs to label, chosen as the training scripts choose them [50; with --data all in the file]"""
    seed: int = 1
    """seeds the choice of pairs, and with the labeler's name their order and sides"""
    repeat: float = 0.1
    """share of the pairs, at most 0.5, that is shown a second time, later and with sides swapped"""
    description: str | None = None
    """what the robot should do, shown above the videos [the paper's words for the 14 tasks]"""
    videos: str | None = None
    """folder of your own videos, <segment index>.mp4, instead of rendered ones"""
    workers: int = min(8, os.cpu_count() or 1)
    """processes that render"""
    labels_dir: str = "labels"
    """parent of <task>/<labeler>.jsonl and of the rendered videos"""
    host: str = "127.0.0.1"
    """address to listen on; any but loopback needs a token"""
    port: int = 8000
    """port to listen on; 0 takes a free one"""
    token: str | None = None
    """secret that the browser must present, at least 16 characters [a random one, unless --host is loopback]"""
    report: bool = False
    """print agreement, position bias and times instead of serving"""
    export: bool = False
    """write the answers as a preference file instead of serving"""
    out: str | None = None
    """file that --export writes [labels/<task>/export.npz]"""


@dataclass(frozen=True)
class Study:
    """What is labelled: one data file, one choice of pairs."""

    task: str
    description: str
    folder: Path
    prefs: np.ndarray  # (n, 2) of the data file; the page never learns their order
    rows: tuple[int, ...]  # the chosen rows of prefs
    settings: dict  # an answers file continues only under the settings that it was begun with

    def plan(self, labeler: str) -> list[dict]:
        """Pairs as this labeler sees them, in random order and on random sides; repeats come in the last quarter."""
        name_hash = int.from_bytes(hashlib.sha256(labeler.encode()).digest()[:8], "big")
        rng = np.random.default_rng([self.settings["seed"], name_hash])
        pairs = []
        for row, flip in zip(rng.permutation(self.rows).tolist(), rng.integers(2, size=len(self.rows)), strict=True):
            left, right = (int(self.prefs[row, side]) for side in (flip, 1 - flip))
            pairs.append(dict(pair=row, left=left, right=right, repeat=False))
        count, late = round(self.settings["repeat"] * len(pairs)), len(pairs) * 3 // 4
        again = [pairs[i] for i in rng.choice(math.ceil(len(pairs) / 2), count, replace=False)]
        again = [dict(pair, left=pair["right"], right=pair["left"], repeat=True) for pair in again]
        return pairs[:late] + [(pairs[late:] + again)[i] for i in rng.permutation(len(pairs) - late + count)]


class Refused(Exception):
    """A request that does not fit the answers file: nothing was written."""


class Answers:
    """The append-only file of one labeler. Events are numbered; who writes must know the number of the next one."""

    def __init__(self, study: Study, labeler: str):
        self.study, self.labeler = study, labeler
        self.path = study.folder / f"{labeler}.jsonl"

    def parse(self, content: bytes, continuing: bool = True) -> tuple[list[dict], int]:
        """Events without the header, and the length of the complete lines. A torn last line was never acknowledged."""
        complete = content.rfind(b"\n") + 1
        if not complete:
            return [], 0
        try:
            header, *events = [json.loads(line) for line in content[:complete].splitlines()]
            begun = {key: header["settings"][key] for key in self.study.settings}
            if header["labeler"] != self.labeler or any(event["seq"] != i for i, event in enumerate(events)):
                raise ValueError
            if begun["data"] == self.study.settings["data"]:
                for answer in standing(events):
                    segments = {answer["left"], answer["right"]}
                    if segments != set(self.study.prefs[answer["pair"]].tolist()) or chosen(answer) not in segments:
                        raise ValueError
        except (ValueError, KeyError, TypeError, IndexError):
            raise Refused(f"{self.path} is damaged: repair or move it, or take another --labeler") from None
        if begun["data"] != self.study.settings["data"]:
            raise Refused(f"{self.path} belongs to another data file: give that --data, or another --labels-dir")
        if continuing and begun != self.study.settings:
            flags = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in begun.items() if key != "data")
            raise Refused(f"{self.path} was begun with {flags}: start with the same, or take another --labeler")
        return events, complete

    def read(self, continuing: bool = True) -> list[dict]:
        return self.parse(self.path.read_bytes(), continuing)[0] if self.path.exists() else []

    def read_at(self, seq: int) -> list[dict]:
        """The standing answers, if seq is the number of the next event."""
        events = self.read()
        if seq != len(events):
            raise Refused("this was already answered or undone")
        return standing(events)

    def append(self, seq: int, event: dict) -> None:
        """Writes event number seq and returns when it is on disk; Refused if another request was first."""
        new = not self.path.exists()
        self.study.folder.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # against other threads and other servers; closing releases it
            file.seek(0)
            events, complete = self.parse(file.read())
            if seq != len(events):
                raise Refused("this was already answered or undone")
            header = dict(type="start", labeler=self.labeler, settings=self.study.settings, time=now())
            event = dict(event, seq=seq, labeler=self.labeler, time=now())
            lines = "".join(json.dumps(line) + "\n" for line in ([event] if complete else [header, event])).encode()
            try:
                file.truncate(complete)  # a torn line of a killed server
                if file.write(lines) != len(lines):
                    raise OSError(f"{self.path}: disk full")
                os.fsync(file.fileno())
            except OSError:
                file.truncate(complete)
                raise
        if new:  # the directory entry must survive too
            folder = os.open(self.study.folder, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def standing(events: list[dict]) -> list[dict]:
    """The answers that were not undone."""
    answers = []
    for event in events:
        if event["type"] == "undo":
            answers.pop()
        else:
            answers.append(event)
    return answers


def chosen(answer: dict) -> int:
    return answer[answer["choice"]]


# ---- the server ----


def create_app(study: Study, labelers: tuple[str, ...], videos: Path, host: str, token: str | None) -> flask.Flask:
    app = flask.Flask(__name__, static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    page = (Path(__file__).parent / "label.html").read_bytes()
    hashes = {}
    for tag in ("script", "style"):  # the page's own script and style, no other
        digest = hashlib.sha256(re.search(f"<{tag}>(.*)</{tag}>".encode(), page, re.DOTALL)[1]).digest()
        hashes[tag] = f"{tag}-src 'sha256-{base64.b64encode(digest).decode()}'"
    policy = f"default-src 'self'; {hashes['script']}; {hashes['style']}; frame-ancestors 'none'; base-uri 'none'"
    segments = {int(i) for row in study.rows for i in study.prefs[row]}

    def is_token(given: str | None) -> bool:
        return token is None or (given is not None and hmac.compare_digest(given.encode(), token.encode()))

    def cookie_name() -> str:  # browsers share cookies between the ports of a host
        return f"label-token-{flask.request.environ['SERVER_PORT']}"

    @app.before_request
    def guard():
        request = flask.request
        try:
            hostname = urlsplit(f"//{request.headers.get('Host', '')}").hostname
            origin = urlsplit(request.headers.get("Origin", f"http://{request.headers.get('Host', '')}")).netloc
        except ValueError:
            flask.abort(400, "bad Host or Origin")
        if host in LOOPBACK and hostname not in LOOPBACK:  # another site's name that resolves to this machine
            flask.abort(403, "open this page under 127.0.0.1 or localhost")
        if origin != request.headers.get("Host", ""):
            flask.abort(403, "requests from other sites are not answered")
        if request.path == "/" and token is not None and is_token(request.args.get("token")):
            rest = {key: value for key, value in request.args.items() if key != "token"}
            response = flask.redirect("/" + ("?" + urlencode(rest) if rest else ""))
            response.set_cookie(cookie_name(), token, httponly=True, samesite="Lax")
            return response
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not is_token(request.cookies.get(cookie_name())) and not is_token(bearer):
            flask.abort(401, "open the address, with its token, that the server printed")

    @app.after_request
    def secure(response):
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["Referrer-Policy"] = "same-origin"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    @app.errorhandler(HTTPException)
    def explain(error):
        return flask.jsonify(error=error.description), error.code

    @app.errorhandler(Refused)
    def refuse(error):
        return flask.jsonify(error=str(error)), 409

    @app.errorhandler(OSError)
    def disk(error):
        return flask.jsonify(error=f"the answer could not be stored ({error.strerror or error})"), 500

    def answers_of(name) -> Answers:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            flask.abort(400, "a name has 1 to 40 letters, digits, - or _")
        if labelers and name not in labelers:
            flask.abort(403, "the server was not started for a labeler of this name")
        return Answers(study, name)

    def body(*keys: str) -> dict:
        if flask.request.mimetype != "application/json":  # no form of another site can send this
            flask.abort(415, "send JSON")
        if flask.request.content_length is None:  # chunks would pass the limit: Werkzeug cuts them off silently
            flask.abort(411, "send Content-Length")
        try:
            fields = json.loads(flask.request.get_data())
        except (ValueError, RecursionError):
            flask.abort(400, "not JSON")
        if not isinstance(fields, dict) or set(fields) != set(keys):
            flask.abort(400, f"expected the fields {', '.join(keys)}")
        if type(fields["seq"]) is not int or fields["seq"] < 0:
            flask.abort(400, "seq is the number that /state gave")
        return fields

    def state_of(answers: Answers) -> flask.Response:
        events, plan = answers.read(), study.plan(answers.labeler)
        done = len(standing(events))
        pair = {key: plan[done][key] for key in ("pair", "left", "right")} if done < len(plan) else None
        about = dict(labeler=answers.labeler, task=study.task, description=study.description)
        return flask.jsonify(**about, seq=len(events), done=done, total=len(plan), pair=pair)

    @app.get("/")
    def index():
        return flask.Response(page, mimetype="text/html")

    @app.get("/state")
    def state():
        return state_of(answers_of(flask.request.args.get("labeler")))

    @app.get("/video/<int:segment>.mp4")
    def video(segment: int):
        path = videos / f"{segment}.mp4"
        if segment not in segments or not path.is_file():
            flask.abort(404, "no such video")
        return flask.send_file(path, mimetype="video/mp4", conditional=True)

    @app.post("/answer")
    def answer():
        fields = body("labeler", "seq", "pair", "choice", "seconds")
        answers, seconds = answers_of(fields["labeler"]), fields["seconds"]
        if fields["choice"] not in ("left", "right"):
            flask.abort(400, "choice is left or right")
        if type(seconds) not in (int, float) or not 0 <= seconds < 1e6:
            flask.abort(400, "seconds is a number")
        if type(fields["pair"]) is not int or fields["pair"] not in study.rows:
            flask.abort(404, "no such pair")
        plan, done = study.plan(answers.labeler), len(answers.read_at(fields["seq"]))
        if done == len(plan) or plan[done]["pair"] != fields["pair"]:
            raise Refused("this pair is not the one to answer now")
        answers.append(fields["seq"], dict(type="answer", **plan[done], choice=fields["choice"], seconds=seconds))
        return state_of(answers)

    @app.post("/undo")
    def undo():
        fields = body("labeler", "seq")
        answers = answers_of(fields["labeler"])
        if not answers.read_at(fields["seq"]):
            raise Refused("there is nothing to undo")
        answers.append(fields["seq"], dict(type="undo"))
        return state_of(answers)

    return app


class QuietHandler(WSGIRequestHandler):
    timeout = 30  # seconds that a silent connection may hold a thread

    def log(self, type: str, message: str, *args) -> None:  # addresses may hold the token
        if type == "error":
            super().log(type, message, *args)


def serve(study: Study, args: Args, videos: Path) -> None:
    if args.token is not None and len(args.token) < 16:
        sys.exit("error: --token: needs at least 16 characters; leave it out and a random one is made")
    token = args.token or (None if args.host in LOOPBACK else secrets.token_urlsafe(24))
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        listener = socket.create_server((args.host, args.port), family=family)
    except (OSError, OverflowError) as e:
        sys.exit(f"error: cannot listen on --host {args.host} --port {args.port} ({e}); choose another --port")
    port = listener.getsockname()[1]
    app = create_app(study, args.labeler, videos, args.host, token)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server(args.host, port, app, threaded=True, request_handler=QuietHandler, fd=listener.fileno())
    shown = socket.gethostname() if args.host in ("0.0.0.0", "::") else args.host
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
    for name in args.labeler or (None,):
        query = urlencode({key: value for key, value in (("labeler", name), ("token", token)) if value})
        print(f"open {address}{'?' + query if query else ''}", flush=True)
    print(f"answers go to {study.folder}/<labeler>.jsonl; stop with Ctrl-C, go on with the same command", flush=True)
    server.serve_forever()


# ---- the answers ----


def load_answers(study: Study, labelers: tuple[str, ...]) -> dict[str, list[dict]]:
    """The standing answers of each labeler; of everybody in the folder if none is named."""
    names = labelers or sorted(path.stem for path in study.folder.glob("*.jsonl"))
    answers = {name: standing(Answers(study, name).read(continuing=False)) for name in names}
    empty = [name for name in names if not answers[name]]
    if not names or empty:
        who = ", ".join(empty) or "anybody"
        sys.exit(f"error: {study.folder}: no answers of {who} yet; label first, or choose others with --labeler")
    return answers


def export(study: Study, answers: dict[str, list[dict]], source: str, out: Path) -> None:
    """The same segments with the labelers' preferences: a row for each answer to the first showing of a pair."""
    if out.exists() and out.samefile(source):
        sys.exit(f"error: --out {out}: is the data file itself; choose another name")
    rows = []
    for each in answers.values():
        for answer in (a for a in each if not a["repeat"]):
            rows.append((chosen(answer), answer["left"] + answer["right"] - chosen(answer)))
    arrays = load_preference_file(source)
    counts = {name: sum(not a["repeat"] for a in each) for name, each in answers.items()}
    meta = {**arrays.get("meta", {}), "task": study.task, "labelers": counts}
    arrays.update(prefs=np.array(rows), meta=json.dumps(meta))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    with open(unfinished, "wb") as file:
        file.write(buffer.getbuffer())
        os.fsync(file.fileno())
    os.replace(unfinished, out)
    print(f"{out}: {len(rows)} preferences of {', '.join(answers)}")


def share(flags: list[bool]) -> dict:
    """A share with its 95 % interval (Wilson); None where there is nothing to count."""
    if not flags:
        return dict(n=0, share=None, low=None, high=None)
    result = binomtest(sum(flags), len(flags))
    low, high = result.proportion_ci(method="wilson")
    return dict(n=len(flags), share=result.statistic, low=float(low), high=float(high))


def bias_and_error(study: Study, answers: list[dict]) -> tuple[float, float] | None:
    """Why a labeler disagrees with the oracle: |b| of the answers blindly left (right if b < 0), e of the others wrong.

    P(right | oracle left) = (1 - b) e and P(left | oracle right) = b + (1 - b) e for b >= 0; mirrored for b < 0.
    """
    left = {side: [] for side in ("left", "right")}
    for answer in answers:
        oracle = "left" if study.prefs[answer["pair"], 0] == answer["left"] else "right"
        left[oracle].append(answer["choice"] == "left")
    if not left["left"] or not left["right"]:
        return None
    missed, false = 1 - np.mean(left["left"]), np.mean(left["right"])
    bias = false - missed
    return float(bias), float(min(missed, false) / (1 - abs(bias))) if abs(bias) < 1 else 0.0


def make_report(study: Study, answers: dict[str, list[dict]]) -> dict:
    labelers, first = {}, {}
    for name, each in answers.items():
        first[name] = {a["pair"]: chosen(a) for a in each if not a["repeat"]}
        seconds = [a["seconds"] for a in each]
        labelers[name] = dict(
            answers=len(each),
            oracle=share([choice == study.prefs[pair, 0] for pair, choice in first[name].items()]),
            itself=share([chosen(a) == first[name][a["pair"]] for a in each if a["repeat"]]),
            left=share([a["choice"] == "left" for a in each]),
            bias_and_error=bias_and_error(study, each),
            seconds=[float(q) for q in np.percentile(seconds, (25, 50, 75))],
        )
    between = {}
    for one, other in combinations(answers, 2):
        common = first[one].keys() & first[other].keys()
        between[f"{one}, {other}"] = share([first[one][pair] == first[other][pair] for pair in common])
    return dict(task=study.task, labelers=labelers, between=between)


def print_report(report: dict) -> None:
    def text(s: dict) -> str:
        return f"{s['share']:4.0%} of {s['n']} [{s['low']:.0%}, {s['high']:.0%}]" if s["n"] else "none"

    print(f"{report['task']}: shares with 95 % confidence intervals")
    for name, r in report["labelers"].items():
        print(f"\n{name}: {r['answers']} answers")
        print(f"  agrees with the oracle       {text(r['oracle'])}")
        print(f"  with itself on repeats       {text(r['itself'])}")
        print(f"  chose left                   {text(r['left'])}")
        if r["bias_and_error"] is not None:
            bias, error = r["bias_and_error"]
            side = "left" if bias >= 0 else "right"
            print(f"  estimated                    {abs(bias):.0%} blindly {side}, {error:.0%} errors in the others")
        print("  seconds per answer           {1:.1f} (quartiles {0:.1f}, {2:.1f})".format(*r["seconds"]))
    if report["between"]:
        print("\nagreement between labelers")
    for names, s in report["between"].items():
        print(f"  {names:28} {text(s)}")


# ---- main ----


def make_study(args: Args) -> tuple[Study, str]:
    """Checks flags and data file; the second result is the data file's path."""
    source = args.data or f"data/{args.task or 'door-open'}.npz"
    arrays = load_preference_file(source)
    prefs, policy = arrays["prefs"], arrays.get("policy")
    task = args.task or arrays.get("meta", {}).get("task") or Path(source).stem
    for flag, name in (("--task", task), *(("--labeler", name) for name in args.labeler)):
        if not isinstance(name, str) or not NAME.fullmatch(name):
            sys.exit(f"error: {flag} {name}: must be 1 to 40 letters, digits, - or _")
    args.n_pref = args.n_pref or (len(prefs) if args.data else 50)
    if args.report or args.export:
        args.n_pref = min(args.n_pref, len(prefs))  # answers say themselves which pairs they are about
    if not 1 <= args.n_pref <= len(prefs):
        sys.exit(f"error: {source}: has {len(prefs)} pairs; choose --n-pref from 1 to that, not {args.n_pref}")
    if not 0 <= args.repeat <= 0.5:
        sys.exit(f"error: --repeat {args.repeat}: must be between 0 and 0.5")
    if args.seed < 0:
        sys.exit(f"error: --seed {args.seed}: must not be negative")
    digest = hashlib.sha256()
    for key in ("obs", "act", "prefs"):
        digest.update(str(arrays[key].shape).encode() + arrays[key].tobytes())
    settings = dict(data=digest.hexdigest()[:16], n_pref=args.n_pref, seed=args.seed, repeat=args.repeat)
    description = args.description or DESCRIPTIONS.get(task, "")
    if args.videos is None and task in METAWORLD:
        description += " The green ring marks the goal."
    rows = tuple(int(row) for row in choose_pairs(prefs, args.n_pref, args.seed, policy))
    return Study(task, description.strip(), Path(args.labels_dir, task), prefs, rows, settings), source


def choose_pairs(prefs: np.ndarray, n: int, seed: int, policy: np.ndarray | None = None) -> np.ndarray:
    """n rows in random order; where the data policies are known, each has its equal share as far as possible."""
    order = np.random.default_rng([seed, 0]).permutation(len(prefs))
    if policy is None:
        return order[:n]
    quota, counts, chosen, left = -(-2 * n // len(np.unique(policy))), Counter(), [], []
    for row in order:
        one, other = policy[prefs[row]].tolist()
        fits = max(counts[one], counts[other]) + 1 + (one == other) <= quota
        (chosen if fits else left).append(row)
        counts.update((one, other) if fits else ())
    return np.array((chosen + left)[:n])


def find_videos(study: Study, args: Args, source: str) -> Path:
    """The folder with a video of every segment to be shown, rendered if need be."""
    indices = sorted({int(i) for row in study.rows for i in study.prefs[row]})
    if args.videos is not None:
        missing = [i for i in indices if not Path(args.videos, f"{i}.mp4").is_file()]
        if missing:
            sys.exit(f"error: --videos {args.videos}: {len(missing)} of {len(indices)} missing, e.g. {missing[0]}.mp4")
        return Path(args.videos).resolve()
    if study.task not in DESCRIPTIONS:
        sys.exit(f"error: --task {study.task}: no simulator of that name; give your own videos with --videos FOLDER")
    data = load_preference_file(source)
    if "sim_state" not in data:
        sys.exit(f"error: {source}: key 'sim_state': missing, needed to render; give videos with --videos FOLDER")
    from render import cache_name, render_segments

    folder = (study.folder / "videos" / cache_name(study.task, data)).resolve()
    render_segments(study.task, data, indices, folder, max(1, args.workers))
    return folder


def main(args: Args) -> None:
    study, source = make_study(args)
    try:
        if args.report:
            print_report(make_report(study, load_answers(study, args.labeler)))
        elif args.export:
            export(study, load_answers(study, args.labeler), source, Path(args.out or study.folder / "export.npz"))
        else:
            for name in args.labeler:
                Answers(study, name).read()
            serve(study, args, find_videos(study, args, source))
    except Refused as e:
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit("stopped: what is rendered and answered is kept")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
