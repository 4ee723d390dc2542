"""DPPO: whole updates against the published ones written out again, windows, label budget, resume."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import in_double, load_script, only_run, run_script, write_preferences

dppo = load_script("dppo")
SMALL = dict(predictor_width=8, predictor_heads=2, predictor_steps=12, predictor_batch_size=7, batch_size=9)
SMALL |= dict(total_steps=8, eval_every=4, smoothness=0.5, smoothness_shift=3.0, window_stride=3, dropout=0.25)


def train(folder, data, **changes) -> tuple[dict, dict]:
    args = dppo.Args(**(SMALL | dict(data=str(data), eval=False, cuda=False, runs_dir=str(folder)) | changes))
    result = dppo.main(args)
    run = Path(args.resume) if args.resume else only_run(folder)
    return result, torch.load(run / "model.pt", weights_only=True)


def same(one: dict, two: dict) -> bool:
    return all(torch.equal(one[part][key], two[part][key]) for part in ("policy", "predictor") for key in one[part])


# ---- three whole updates ----
def score(p: dict, obs: torch.Tensor, act: torch.Tensor, n: int) -> torch.Tensor:
    """f of the first n of T steps, token by token: a_1, s_1, ..., zeros with timestep 0 where the window has ended."""

    def dense(x, name, weight=".weight", bias=".bias"):
        return x @ p[name + weight].T + p[name + bias]

    def norm(x, name):
        x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * p[name + ".weight"] + p[name + ".bias"]

    tokens = []
    for t in range(len(obs)):
        time = p["timestep.weight"][t + 1 if t < n else 0]
        for x, name in ((act[t], "embed_act"), (obs[t], "embed_obs")):
            tokens.append(dense(x if t < n else torch.zeros_like(x), name) + time)
    x, layer, heads = norm(torch.stack(tokens), "norm"), "encoder.layers.0.", []
    q, k, v = dense(norm(x, layer + "norm1"), layer + "self_attn.in_proj_", "weight", "bias").chunk(3, dim=-1)
    for h in (slice(0, 4), slice(4, 8)):  # width 8, two heads
        logits = q[:, h] @ k[: 2 * n, h].T / 2
        heads.append(logits.exp() / logits.exp().sum(1, keepdim=True) @ v[: 2 * n, h])
    x = x + dense(torch.cat(heads, 1), layer + "self_attn.out_proj")
    x = x + dense(dense(norm(x, layer + "norm2"), layer + "linear1").clamp(min=0), layer + "linear2")
    x = norm(x, "encoder.norm")[1::2]
    return dense(dense(x, "head.0").clamp(min=0), "head.2").mean()


def adam(p: dict, losses: list, rates: list[float], decay: float = 0.0) -> dict:
    """The parameters after an update for each loss(p); decay: AdamW's."""
    p = {key: value.clone().requires_grad_() for key, value in p.items()}
    first, second = ({key: torch.zeros_like(value) for key, value in p.items()} for _ in range(2))
    for t, (loss, rate) in enumerate(zip(losses, rates, strict=True), 1):
        gradients = dict(zip(p, torch.autograd.grad(loss(p), list(p.values())), strict=True))
        for key, g in gradients.items():
            first[key] = 0.9 * first[key] + 0.1 * g
            second[key] = 0.999 * second[key] + 0.001 * g**2
            step = first[key] / (1 - 0.9**t) / ((second[key] / (1 - 0.999**t)).sqrt() + 1e-8)
            p[key] = (p[key] - rate * (step + decay * p[key])).detach().requires_grad_()
    return {key: value.detach() for key, value in p.items()}


@pytest.fixture
def float64_without_dropout(monkeypatch):
    """main() in float64, without the predictor's dropout; a list of what was drawn, in order."""
    drawn, load = [], dppo.load_data

    def double(*args):
        return tuple(in_double(part) for part in load(*args))

    class WithoutDropout(dppo.Predictor):
        def __init__(self, *args):
            super().__init__(*args)
            for module in self.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
                if isinstance(module, torch.nn.MultiheadAttention):
                    module.dropout = 0.0

    def recorded(name):
        function = getattr(dppo, name)

        def call(*args):
            result = function(*args)
            drawn.append((name, args, result))
            return result

        monkeypatch.setattr(dppo, name, call)

    monkeypatch.setattr(dppo, "load_data", double)
    monkeypatch.setattr(dppo, "Predictor", WithoutDropout)
    for name in ("minibatch", "shifted_windows", "window_distance"):
        recorded(name)
    torch.set_default_dtype(torch.float64)
    yield drawn
    torch.set_default_dtype(torch.float32)


def test_whole_updates_of_predictor_and_policy(tmp_path, float64_without_dropout):
    drawn = float64_without_dropout
    file = write_preferences(tmp_path / "toy.npz", segments=12, length=5)
    changes = dict(predictor_steps=10, total_steps=3, predictor_batch_size=4, batch_size=6, window_stride=1)
    changes |= dict(dropout=0.0, conservativeness=0.5, temperature=0.1, learning_rate=0.01)
    _, model = train(tmp_path / "runs", file, **changes)
    segments, _ = dppo.load_data(dppo.Args(data=str(file), n_pref=6), torch.device("cpu"))
    obs, act, prefs = segments.obs, segments.act, segments.prefs
    torch.manual_seed(1)  # what the run started from
    predictor, policy = (dict(m.state_dict()) for m in (dppo.Predictor(3, 1, 5, 8, 1, 2), dppo.Policy(3, 1)))

    def predictor_loss(rows, i, n, moved):
        def loss(p):
            terms = []
            for better, worse in prefs[rows].tolist():
                e = [score(p, obs[k], act[k], 5).exp() for k in (better, worse)]
                terms.append(-(e[0] / (e[0] + e[1])).log())
            changed = [
                (score(p, obs[k], act[k], a) - score(p, obs[k], act[k], b)) ** 2
                for k, a, b in zip(i.tolist(), n.tolist(), moved.tolist(), strict=True)
            ]
            return sum(terms) / len(terms) + 0.5 * sum(changed) / len(changed)

        return loss

    pairs, windows = (
        [result for name, _, result in drawn if name == kind] for kind in ("minibatch", "shifted_windows")
    )
    losses = [predictor_loss(rows, *window) for rows, window in zip(pairs, windows, strict=True)]
    cosine = [1e-4 + 9e-4 * (1 + math.cos(math.pi * k / 9)) / 2 for k in range(9)]
    predictor = adam(predictor, losses, [1e-4, *cosine], decay=1e-4)  # the first of ten warms up
    for key, value in model["predictor"].items():
        np.testing.assert_allclose(value, predictor[key], rtol=1e-7, atol=1e-10, err_msg=key)

    def policy_loss(obs, act, n):
        scores = [score(predictor, *window) for window in zip(obs, act, n.tolist(), strict=True)]

        def loss(p):
            distances, terms = [], []
            for o, a, steps in zip(obs, act, n.tolist(), strict=True):
                h = (o[:steps] @ p["net.0.weight"].T + p["net.0.bias"]).clamp(min=0)
                h = (h @ p["net.3.weight"].T + p["net.3.bias"]).clamp(min=0)
                error = (h @ p["net.6.weight"].T + p["net.6.bias"]).tanh() - a[:steps]
                distances.append((error / 2).square().sum(1).sqrt().mean() / 0.1)
            for i, better in enumerate(scores):
                for j, worse in enumerate(scores):
                    if better > worse:
                        e = (-distances[i]).exp()
                        terms.append(-(e / (e + (-0.5 * distances[j]).exp())).log())
            assert len(terms) == 15
            return sum(terms) / len(terms)

        return loss

    losses = [policy_loss(*args[1:]) for name, args, _ in drawn if name == "window_distance"]
    policy = adam(policy, losses, [0.01] * 3)
    for key, value in model["policy"].items():
        np.testing.assert_allclose(value, policy[key], rtol=1e-7, atol=1e-10, err_msg=key)


# ---- predictor, windows ----
def test_predictor_has_the_published_size_and_initialisation():
    predictor = dppo.Predictor(35, 4, 64, 256, 1, 4)
    layer = 4 * 256 * 257 + 2 * 256 * 1024 + 1024 + 256 + 4 * 256  # attention, MLP, two norms
    rest = 36 * 256 + 5 * 256 + 65 * 256 + 4 * 256 + 257 * 128 + 129  # embeddings, timesteps, norms, head
    assert sum(p.numel() for p in predictor.parameters()) == layer + rest
    block = predictor.encoder.layers[0]
    assert block.linear1.weight.std().item() == pytest.approx(256**-0.5, rel=0.01)
    assert block.linear2.weight.abs().max() <= 2 / 32 / 0.8796 + 1e-6 and not block.self_attn.in_proj_bias.any()


def test_scores_are_those_of_training_without_dropout():
    predictor, obs, act = dppo.Predictor(3, 1, 16, 8, 1, 2), torch.randn(5, 16, 3), torch.rand(5, 16, 1)
    n = torch.tensor([16, 1, 7, 2, 12])
    expected = predictor.eval()(obs, act, n)  # with gradients: torch's slower path
    for i, steps in enumerate(n.tolist()):
        torch.testing.assert_close(dppo.scores(predictor, obs, act, steps)[i], expected[i])
    assert predictor.training and len(dppo.scores(predictor, obs[:0], act[:0], 16)) == 0


def test_shifted_windows():
    torch.manual_seed(0)
    i, n, moved = dppo.shifted_windows(40, 3, 16, 21, 4.0, torch.device("cpu"))
    assert len(i) == len(n) == len(moved) == 21
    assert (n[:10] == 16).all() and len(set(i[:10].tolist())) == 10  # ten whole segments
    assert len(set(zip(i[10:].tolist(), n[10:].tolist(), strict=True))) == 11
    assert moved.min() >= 3 and moved.max() <= 16 and n.min() >= 3
    i, n, moved = dppo.shifted_windows(400, 1, 1000, 800, 20.0, torch.device("cpu"))
    inside = (n > 100) & (n < 900)
    shift = (moved - n)[inside].double()
    assert shift.std().item() == pytest.approx(20, rel=0.2) and abs(shift.mean().item()) < 4
    assert (moved[:400] == 1000).double().mean().item() == pytest.approx(0.5, abs=0.1)  # clipped at the last window
    i, n, moved = dppo.shifted_windows(5, 16, 16, 4, 9.0, torch.device("cpu"))
    assert (n == 16).all() and (moved == 16).all()  # whole segments alone


def test_the_policy_draws_no_window_twice(tmp_path, toy, monkeypatch):
    batches, distance = [], dppo.window_distance
    monkeypatch.setattr(
        dppo, "window_distance", lambda policy, obs, act, n: batches.append((obs, n)) or distance(policy, obs, act, n)
    )
    train(tmp_path, toy, n_pref=4, batch_size=1000, min_seq_len=2, window_stride=4)
    for obs, n in batches:  # 8 segments, windows of 16, 12, 8 and 4 steps
        assert len({(o.sum().item(), k.item()) for o, k in zip(obs, n, strict=True)}) == len(n) == 32
        assert sorted(n.tolist()) == sorted([4, 8, 12, 16] * 8)


def test_distance_and_its_gradient_are_those_with_padding():
    torch.manual_seed(0)
    policy, obs, act, lengths = dppo.Policy(3, 2).eval(), torch.randn(4, 6, 3), torch.rand(4, 6, 2), (6, 1, 3, 4)
    d = dppo.window_distance(policy, obs, act, torch.tensor(lengths))
    error = (policy(obs) - act).square().sum(2).sqrt()
    expected = torch.stack([error[b, :n].mean() / 2 for b, n in enumerate(lengths)])
    torch.testing.assert_close(d, expected)
    for one, two in zip(*(torch.autograd.grad(x @ x, policy.parameters()) for x in (d, expected)), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-6)


def test_learning_rate_at_its_boundaries():
    rates = [dppo.warmup_cosine(step, 1000, 1e-3) for step in (1, 51, 101, 551, 1001)]
    np.testing.assert_allclose(rates, [1e-4, 5.5e-4, 1e-3, 5.5e-4, 1e-4])
    assert [dppo.warmup_cosine(1, n, 1e-3) for n in (1, 5)] == [1e-3, 1e-3]  # too short to warm up


def test_defaults_are_those_of_the_authors_code():
    args = dppo.Args()
    assert (args.conservativeness, args.temperature, args.dropout) == (1.0, 0.1, 0.0)
    assert (args.smoothness, args.smoothness_shift, args.min_seq_len, args.window_stride) == (0.0, 0.0, 1, 1)
    assert (args.batch_size, args.predictor_batch_size, args.learning_rate) == (256, 256, 3e-4)
    assert (args.total_steps, args.eval_every) == (500_000, 5_000)  # of all baselines here


# ---- the script ----
def test_labels_outside_the_chosen_pairs_change_nothing(tmp_path, toy):
    with np.load(toy) as file:
        arrays = dict(file)
    chosen = dppo.choose_pairs(arrays["prefs"], 8, 1, arrays["policy"])
    models = []
    for name, rows in (("as it is", []), ("others", np.delete(np.arange(20), chosen)), ("chosen", chosen[:1])):
        prefs = arrays["prefs"].copy()
        prefs[rows] = prefs[rows, ::-1]
        np.savez(tmp_path / f"{name}.npz", **arrays | dict(prefs=prefs))
        models.append(train(tmp_path / name, tmp_path / f"{name}.npz", n_pref=8)[1])
    assert same(models[0], models[1]) and not same(models[0], models[2])


class Killed(BaseException):
    pass


def test_a_killed_run_resumes_to_the_same_bits(tmp_path, toy, monkeypatch):
    """Killed in the predictor's phase, at its end, in the policy's."""
    whole, model = train(tmp_path / "whole", toy, n_pref=10)
    write = dppo.write
    monkeypatch.setattr(dppo.Run, "CHECKPOINT_SECONDS", -1)  # a checkpoint after each update
    for last in ({"predictor": 5}, {"predictor": 12}, {"predictor": 12, "policy": 3}):

        def write_and_die(path, content, last=last):
            write(path, content)
            if path.name == "checkpoint.pt" and content["done"] == last:
                raise Killed

        killed = tmp_path / str(last)
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(dppo, "write", write_and_die)
            train(killed, toy, n_pref=10)
        assert not (only_run(killed) / "result.json").exists()
        resumed, resumed_model = train(None, toy, resume=str(only_run(killed)))
        assert same(model, resumed_model) and {**whole, "seconds": 0} == {**resumed, "seconds": 0}


def test_the_command_runs_through_both_phases(tmp_path, toy):
    flags = f"--data {toy} --env-id Pendulum-v1 --n-pref 12 --eval-episodes 2 --eval-workers 1 --no-cuda "
    flags += " ".join(f"--{key.replace('_', '-')} {value}" for key, value in SMALL.items())
    done = run_script("dppo", flags, tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads((only_run(tmp_path / "runs") / "result.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result
    assert result["algorithm"] == "dppo" and result["n_segments"] == 24 and result["steps"] == 8
    assert 0 <= result["pref_acc_train"] <= 1 and 0 <= result["pref_acc_val"] <= 1
    assert [row[0] for row in result["curve"]] == [4, 8] and result["lambda"] is None


def test_predictor_learns_to_rank(tmp_path):
    """A feature of the actions that decides every pair is found, also on pairs that were not chosen."""
    rng = np.random.default_rng(0)
    act = np.clip(rng.normal(size=(200, 8, 1)) * 0.3 + rng.uniform(-0.5, 0.5, (200, 1, 1)), -1, 1).astype(np.float32)
    pairs = np.arange(200).reshape(-1, 2)
    prefs = np.array([sorted(pair, key=lambda k: -act[k].mean()) for pair in pairs])
    file = write_preferences(tmp_path / "easy.npz", segments=200, length=8, act=act, prefs=prefs, policy=None)
    changes = dict(n_pref=80, predictor_width=16, predictor_steps=120, predictor_batch_size=30, smoothness=0.0)
    result, _ = train(tmp_path / "runs", file, total_steps=1, **changes)
    assert result["pref_acc_train"] > 0.9 and result["pref_acc_val"] >= 0.8


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(min_seq_len=17), "--min-seq-len 17: segments have 16 steps"),
        (dict(batch_size=1), "--batch-size 1"),
        (dict(window_stride=0), "--window-stride 0"),
        (dict(dropout=1.0), "--dropout 1.0"),
        (dict(predictor_heads=3), "--predictor-width 8: must be a multiple"),
    ],
)
def test_bad_flags_end_with_one_line(changes, words, tmp_path, toy):
    with pytest.raises(SystemExit, match=words) as stopped:
        train(tmp_path / "runs", toy, **changes)
    assert str(stopped.value).startswith("error: ") and "\n" not in str(stopped.value)
    assert not (tmp_path / "runs").exists()
