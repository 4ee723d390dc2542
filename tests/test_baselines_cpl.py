"""BC, CPL and CPL+KL: losses against numpy, whole updates against the published ones, labels, schedules, resuming."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import in_double

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "baselines"))
import bc
import cpl
import cpl_kl

every_script = pytest.mark.parametrize("module", [bc, cpl, cpl_kl], ids=lambda module: module.__name__)
both_cpl = pytest.mark.parametrize("module", [cpl, cpl_kl], ids=lambda module: module.__name__)


def write_file(path: Path, segments: int = 40, length: int = 6, **changes) -> Path:
    """Uniform actions; better is closer to tanh of the first observation; four pretended policies."""
    rng = np.random.default_rng(0)
    act = rng.uniform(-1, 1, (segments, length, 1)).astype(np.float32)
    obs = rng.normal(size=(segments, length, 3)).astype(np.float32)
    pairs = rng.permutation(segments).reshape(-1, 2)
    score = -np.abs(act - np.tanh(obs[..., :1])).sum((1, 2))
    prefs = np.where((score[pairs[:, 0]] > score[pairs[:, 1]])[:, None], pairs, pairs[:, ::-1])
    arrays = dict(obs=obs, act=act, prefs=prefs, policy=np.arange(segments) % 4, format_version=1) | changes
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    return path


@pytest.fixture(scope="module")
def data_file(tmp_path_factory) -> Path:
    return write_file(tmp_path_factory.mktemp("data") / "toy.npz")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """run(module, file, flag=...) -> (result, model.pt) of 9 updates: 4 of cloning, 5 of CPL, warm-up 3."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Ctrl-C stays pytest's

    def run(module, data_file, **changes) -> tuple[dict, dict]:
        runs = tmp_path / f"runs{len(list(tmp_path.glob('runs*')))}"
        flags = dict(data=str(data_file), total_steps=9, batch_size=6, eval=False, cuda=False, runs_dir=str(runs))
        flags |= {} if module is bc else dict(bc_steps=4, warmup_steps=3)
        args = module.Args(**(flags | changes))
        result = module.main(args)
        (folder,) = [Path(args.resume)] if args.resume else runs.iterdir()
        return result, torch.load(folder / "model.pt", weights_only=True)

    return run


def same(one: dict, two: dict, key: str = "policy") -> bool:
    return all(torch.equal(one[key][name], two[key][name]) for name in one[key])


# ---- mathematics ----
@pytest.mark.parametrize("bias", [0.5, 1.0])
def test_cpl_loss(bias):
    log_prob, reference = -np.random.default_rng(0).uniform(0, 2, (2, 4, 2, 5))

    def expected(advantage):  # e^{A+} / (e^{A+} + e^{bias A-}), one pair at a time
        return -np.mean([np.log(np.exp(a) / (np.exp(a) + np.exp(bias * b))) for a, b in advantage])

    one, two = torch.tensor(log_prob), torch.tensor(reference)
    assert cpl.cpl_loss(one, 0.3, bias).item() == pytest.approx(expected(0.3 * log_prob.sum(2)))
    ratio = expected(0.3 * (log_prob - reference).sum(2))
    assert cpl_kl.cpl_loss(one, two, 0.3, bias).item() == pytest.approx(ratio)
    assert cpl_kl.cpl_loss(one, one, 0.3, bias).item() == pytest.approx(np.log(2))  # pi = pi_ref


def test_the_losses_of_a_hopeless_pair_are_finite():
    log_prob = torch.tensor([[[-4e4], [0.0]]])
    assert cpl.cpl_loss(log_prob, 1.0, 1.0).item() == pytest.approx(4e4)


@both_cpl
@pytest.mark.parametrize(("n", "size"), [(50, 96), (500, 96), (20, 6), (20, 5), (1, 8)])
def test_an_epoch_is_a_permutation_of_the_pairs(module, n, size):
    count = -(-n // size)
    batches = [module.minibatch(n, size, 3, step) for step in range(1, 2 * count + 1)]
    assert [len(batch) for batch in batches[:count]] == [min(size, n - size * i) for i in range(count)]
    epochs = [torch.cat(batches[:count]).tolist(), torch.cat(batches[count:]).tolist()]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n > 1:
        assert epochs[0] != epochs[1] and module.minibatch(n, n, 4, 1).tolist() != epochs[0]


def test_defaults_are_the_published_settings():
    assert bc.Args().batch_size == 96 * 2 * 64
    for module, alpha, bias in ((cpl, 0.1, 0.5), (cpl_kl, 0.2, 0.75)):
        args = module.Args()
        assert (args.alpha, args.contrastive_bias, args.batch_size) == (alpha, bias, 96)
        assert (args.learning_rate, args.total_steps, args.eval_every) == (1e-4, 500_000, 5_000)


def test_learning_rates():
    for module, peak in ((cpl, 1e-4), (cpl_kl, 1e-5)):
        args = module.Args(bc_steps=200_000, warmup_steps=10_000)
        assert module.learning_rate(1, args) == module.learning_rate(200_000, args) == 1e-4
        rates = [module.learning_rate(step, args) for step in (200_001, 205_000, 210_000, 210_001, 500_000)]
        assert rates == pytest.approx([peak / 10_000, peak / 2, peak, peak, peak], rel=1e-12)


@both_cpl
def test_phases_keep_their_shares(module, run, data_file):
    _, model = run(module, data_file, total_steps=50, bc_steps=0, warmup_steps=0)
    assert (model["args"]["bc_steps"], model["args"]["warmup_steps"]) == (20, 1)


# ---- whole updates against the published ones, in float64 and without dropout ----
@pytest.fixture
def exact(monkeypatch):
    torch.set_default_dtype(torch.float64)
    for module in (bc, cpl, cpl_kl):
        monkeypatch.setattr(module, "Dropout", lambda _: torch.nn.Identity())

        def load_double(args, device, load_data=module.load_data):
            return [in_double(part) for part in load_data(args, device)]

        monkeypatch.setattr(module, "load_data", load_double)
    yield
    torch.set_default_dtype(torch.float32)


def initial(module) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [p.detach().clone().requires_grad_() for p in module.Policy(3, 1).parameters()]


def log_prob(theta: list, obs: torch.Tensor, act: torch.Tensor) -> torch.Tensor:
    w1, b1, w2, b2, w3, b3 = theta
    hidden = torch.clamp(torch.clamp(obs @ w1.T + b1, min=0) @ w2.T + b2, min=0)
    return -((act - torch.tanh(hidden @ w3.T + b3)) ** 2).sum(-1)


class Adam:
    def __init__(self, theta: list):
        self.theta, self.t, self.m, self.v = theta, 0, [0.0] * len(theta), [0.0] * len(theta)

    def descend(self, loss: torch.Tensor, rate: float) -> None:
        self.t += 1
        for i, gradient in enumerate(torch.autograd.grad(loss, self.theta)):
            self.m[i] = 0.9 * self.m[i] + 0.1 * gradient
            self.v[i] = 0.999 * self.v[i] + 0.001 * gradient**2
            unbiased = self.m[i] / (1 - 0.9**self.t), self.v[i] / (1 - 0.999**self.t)
            self.theta[i].data -= rate * unbiased[0] / (unbiased[1].sqrt() + 1e-8)


def close(weights: dict, theta: list) -> None:
    for value, expected in zip(weights.values(), theta, strict=True):
        np.testing.assert_allclose(value, expected.detach(), rtol=1e-9, atol=1e-12)


def test_three_updates_of_bc(run, data_file, exact):
    _, model = run(bc, data_file, total_steps=3, batch_size=7, learning_rate=1e-3)
    file = np.load(data_file)
    obs, act = (torch.from_numpy(file[key]).double().reshape(240, -1) for key in ("obs", "act"))
    theta = initial(bc)
    adam = Adam(theta)
    for _ in range(3):
        rows = torch.randint(240, (7,))
        adam.descend(-log_prob(theta, obs[rows], act[rows]).sum() / 7, 1e-3)
    close(model["policy"], theta)


@both_cpl
def test_three_updates_of_cloning_and_three_of_cpl(module, run, data_file, exact):
    """Batches of all pairs, given as CPL's code has them: segments 1 and 2, and y = 1 where 2 is preferred."""
    flags = dict(total_steps=6, bc_steps=3, warmup_steps=2, batch_size=96, learning_rate=1e-3)
    _, model = run(module, data_file, **flags)
    file = np.load(data_file)
    obs, act, prefs = (torch.from_numpy(file[key]) for key in ("obs", "act", "prefs"))
    obs, act = obs.double(), act.double()
    one, two = prefs.min(1).values, prefs.max(1).values
    y = (prefs[:, 0] == two).double()
    assert 0.2 < y.mean() < 0.8
    theta = initial(module)
    adam = Adam(theta)
    for _ in range(3):
        both = torch.stack([log_prob(theta, obs[i], act[i]) for i in (one, two)])
        adam.descend(-both.mean(), 1e-3)
    reference = [tensor.detach().clone() for tensor in theta]
    alpha, bias, peak = {cpl: (0.1, 0.5, 1e-3), cpl_kl: (0.2, 0.75, 1e-4)}[module]
    adam = Adam(theta)
    for k in (1, 2, 3):
        lp1, lp2 = (log_prob(theta, obs[i], act[i]) for i in (one, two))
        if module is cpl_kl:
            lp1, lp2 = lp1 - log_prob(reference, obs[one], act[one]), lp2 - log_prob(reference, obs[two], act[two])
        a1, a2 = alpha * lp1.sum(1), alpha * lp2.sum(1)
        loss = y * torch.log1p(torch.exp(bias * a1 - a2)) + (1 - y) * torch.log1p(torch.exp(bias * a2 - a1))
        adam.descend(loss.mean(), peak * min(1, k / 2))
    close(model["policy"], theta)
    if module is cpl_kl:
        close(model["reference"], reference)


def test_the_reference_is_the_cloned_policy_without_dropout(run, data_file, monkeypatch):
    seen = []
    loss = cpl_kl.cpl_loss
    monkeypatch.setattr(cpl_kl, "cpl_loss", lambda *inputs: (seen.append(inputs[1]), loss(*inputs))[1])
    _, model = run(cpl_kl, data_file, batch_size=96)
    _, cloned = run(cpl_kl, data_file, batch_size=96, total_steps=4)
    assert all(torch.equal(model["reference"][name], value) for name, value in cloned["policy"].items())
    policy = cpl_kl.Policy(3, 1).eval()
    policy.load_state_dict(cloned["policy"])
    file = np.load(data_file)
    expected = policy.log_prob(torch.from_numpy(file["obs"]), torch.from_numpy(file["act"])).detach()
    assert len(seen) == 5
    for used in seen:  # (n, 2, T), the pairs in another order
        np.testing.assert_allclose(used.flatten().sort().values, expected.flatten().sort().values, rtol=1e-5)


# ---- which segments and labels reach the loss ----
@both_cpl
def test_labels_outside_the_chosen_pairs_change_nothing(module, run, data_file, tmp_path):
    file = dict(np.load(data_file))
    chosen = module.choose_pairs(file["prefs"], 8, 1, file["policy"])
    others = np.delete(np.arange(20), chosen)
    flipped, one_flipped = file["prefs"].copy(), file["prefs"].copy()
    flipped[others] = flipped[others, ::-1]
    one_flipped[chosen[0]] = one_flipped[chosen[0], ::-1]
    obs = file["obs"].copy()
    obs[flipped[others]] = 0
    result, model = run(module, data_file, n_pref=8)
    assert result["n_segments"] == 16
    unseen = write_file(tmp_path / "unseen.npz", **(file | dict(prefs=flipped, obs=obs)))
    assert same(model, run(module, unseen, n_pref=8)[1])
    seen = write_file(tmp_path / "seen.npz", **(file | dict(prefs=one_flipped)))
    assert not same(model, run(module, seen, n_pref=8)[1])


def test_bc_clones_the_segments_it_is_told_to(run, data_file, tmp_path):
    """Segments that it does not use can be anything; with `all` the labels can."""
    file = dict(np.load(data_file))
    flipped = write_file(tmp_path / "flipped.npz", **(file | dict(prefs=file["prefs"][:, ::-1])))
    models = {}
    for used, unused, n_segments in (("all", [], 40), ("preferred", file["prefs"][:, 1], 20), ("best", None, 10)):
        act = file["act"].copy()
        act[file["policy"] < 3 if unused is None else unused] = 0.5
        other = write_file(tmp_path / f"{used}.npz", **(file | dict(act=act)))
        (result, models[used]), (_, changed) = (run(bc, path, data_used=used) for path in (data_file, other))
        assert result["n_segments"] == n_segments and same(models[used], changed)
    assert same(models["all"], run(bc, flipped)[1])
    assert not same(models["all"], models["preferred"]) and not same(models["all"], models["best"])


def test_best_needs_to_know_the_policies(run, data_file, tmp_path):
    file = write_file(tmp_path / "unknown.npz", policy=None)
    with pytest.raises(SystemExit, match="error: .*unknown.npz: has no key policy, which --data-used best needs"):
        run(bc, file, data_used="best")
    prefs = np.load(data_file)["prefs"]
    policy = np.isin(np.arange(40), prefs[0]).astype(int)  # only the first pair's segments are the best policy's
    file = write_file(tmp_path / "rare.npz", policy=policy, prefs=prefs[1:])
    with pytest.raises(SystemExit, match="no segment of the best policy in 5 pairs; raise --n-pref"):
        run(bc, file, data_used="best", n_pref=5)


# ---- the scripts ----
@every_script
def test_copied_out_alone_it_runs(module, tmp_path, data_file):
    shutil.copy(module.__file__, tmp_path)
    shutil.copy(data_file, tmp_path / "mine.npz")
    flags = "--data mine.npz --env-id Pendulum-v1 --n-pref 18 --total-steps 50 --batch-size 8 --eval-every 20"
    flags += " --eval-episodes 1 --eval-workers 1 --no-cuda --exp-name mine"
    command = [sys.executable, Path(module.__file__).name, *flags.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("mine__mine__n18__s1__") and not (folder / "checkpoint.pt").exists()
    result = json.loads((folder / "result.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result
    assert [row[0] for row in result["curve"]] == [20, 40, 50] and result["return_last"] < 0
    assert result["n_segments"] == 36 and result["steps"] == 50 and result["pref_acc_train"] is None


class Killed(Exception):
    pass


@every_script
def test_a_killed_run_resumes_to_the_same_bits(module, run, data_file, tmp_path, monkeypatch):
    """Killed in the first phase, at its end, in the second; somebody else's random numbers do not matter."""
    result, model = run(module, data_file)
    assert not same(model, run(module, data_file, seed=2)[1])
    write = module.write
    monkeypatch.setattr(module.Run, "CHECKPOINT_SECONDS", -1)
    for last in (2, 4, 7):

        def write_and_die(path, content, last=last):
            write(path, content)
            if path.name == "checkpoint.pt" and content["done"]["policy"] == last:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(module, "write", write_and_die)
            with pytest.raises(Killed):
                run(module, data_file, runs_dir=str(tmp_path / f"killed{last}"))
        (folder,) = (tmp_path / f"killed{last}").iterdir()
        torch.rand(3)
        resumed, model_resumed = run(module, data_file, resume=str(folder))
        assert all(same(model, model_resumed, name) for name in ("policy", "reference") if name in model)
        assert {**resumed, "seconds": 0} == {**result, "seconds": 0}


@both_cpl
def test_learns_the_rule_behind_the_preferences(module, run, tmp_path):
    """Better is closer to tanh of the first observation, and the actions are uniform: cloning cannot find that."""
    path = write_file(tmp_path / "many.npz", segments=400)
    flags = dict(total_steps=200, bc_steps=20, warmup_steps=10, alpha=1.0, batch_size=16, learning_rate=1e-3)
    _, model = run(module, path, **flags, **(dict(learning_rate_factor=1.0) if module is cpl_kl else {}))
    policy = module.Policy(3, 1)
    policy.load_state_dict(model["policy"])
    obs = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    mu = policy.eval()(obs)[:, 0].detach().numpy()
    assert np.corrcoef(mu, np.tanh(obs[:, 0].numpy()))[0, 1] > 0.5
