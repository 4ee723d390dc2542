"""The mathematics of PAWS to the digit, and both scripts from file to evaluated policy."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import imageio.v3
import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import paws_mlp as paws
import paws_transformer

SCRIPTS = ("paws_mlp", "paws_transformer")
SMALL = ["--advantage-width", "32", "--advantage-layers", "1", "--no-cuda"]


# ---- weights and lambda ----
def advantages_of(seed: int, n: int, scale: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n) * scale


def test_weights_against_scipy():
    a = advantages_of(0, 100, 3.0)
    for lam in (0.01, 1.0, 50.0):
        w = paws.segment_weights(a, lam)
        np.testing.assert_allclose(w, scipy.special.softmax(a / lam), rtol=1e-12)
        assert paws.kl_divergence(w) == pytest.approx(scipy.stats.entropy(w, np.full(100, 0.01)), rel=1e-10)
        assert paws.effective_samples(w) == pytest.approx(w.sum() ** 2 / (w**2).sum())
    np.testing.assert_allclose(paws.segment_weights(a * 1e8, 1e-8).max(), 1.0)  # no overflow


def test_effective_samples_closed_forms():
    assert paws.effective_samples(np.full(7, 3.0)) == pytest.approx(7)
    assert paws.effective_samples(np.array([1.0, 0.0, 0.0])) == 1
    assert paws.effective_samples(np.array([2.0, 1.0])) == pytest.approx(9 / 5)
    # two advantages 0 and -g: n_eff = (1 + e)^2 / (1 + e^2) with e = exp(-g / lambda), solved by hand
    e = (1 - np.sqrt(1 - 0.5**2)) / 0.5  # n_eff = 1.5  <=>  e^2 - 2 e / 0.5 + 1 = 0
    assert paws.solve_lambda(np.array([0.0, -3.0]), 1.5) == pytest.approx(-3 / np.log(e), rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(2, 400), exponent=st.floats(-8, 8), where=st.floats(0.001, 0.999),
    ties=st.integers(1, 4), shift=st.floats(-1e3, 1e3), stretch=st.floats(1e-3, 1e3),
)  # fmt: skip
def test_lambda_is_exact_and_invariant(seed, n, exponent, where, ties, shift, stretch):
    a = advantages_of(seed, n, 10.0**exponent)
    a[:ties] = a.max()
    best = int((a == a.max()).sum())
    if best == n:
        assert paws.solve_lambda(a, 1.0) == np.inf
        return
    target = best + where * (n - best)
    lam = paws.solve_lambda(a, target)
    w = paws.segment_weights(a, lam)
    assert paws.effective_samples(w) == pytest.approx(target, rel=1e-6)
    b = a / np.abs(a).max()  # an affine change of the advantages leaves the weights alone
    changed = stretch * b + shift
    weights = paws.segment_weights(changed, paws.solve_lambda(changed, target))
    np.testing.assert_allclose(weights, w, rtol=1e-4, atol=1e-7)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(2, 300), low=st.floats(0.05, 20), factor=st.floats(1.01, 50))
def test_n_eff_rises_and_kl_falls_with_lambda(seed, n, low, factor):
    a = advantages_of(seed, n, 1.0)
    cold, warm = paws.segment_weights(a, low), paws.segment_weights(a, low * factor)
    assert paws.effective_samples(cold) <= paws.effective_samples(warm) * (1 + 1e-12)
    assert paws.kl_divergence(cold) >= paws.kl_divergence(warm) - 1e-12


def test_lambda_at_the_ends():
    a = np.array([5.0, 5.0, 1.0, -2.0])
    assert paws.solve_lambda(a, 2) == 0 and paws.solve_lambda(a, 4) == np.inf
    np.testing.assert_allclose(paws.segment_weights(a, 0.0), [0.5, 0.5, 0, 0])
    np.testing.assert_allclose(paws.segment_weights(a, np.inf), [0.25] * 4)
    for target in (1.999, 4.001):
        with pytest.raises(ValueError, match="choose --n-eff between 0.5 and 1"):
            paws.solve_lambda(a, target)
    for near in (2 * (1 + 1e-7), 4 * (1 - 1e-7)):
        w = paws.segment_weights(a, paws.solve_lambda(a, near))
        assert paws.effective_samples(w) == pytest.approx(near, rel=1e-8)
    assert paws.solve_lambda(np.zeros(5), 2) == np.inf  # identical advantages: uniform
    nearly_tied = np.array([1.0, 1.0 - 1e-15, 0.0, 0.0])
    w = paws.segment_weights(nearly_tied, paws.solve_lambda(nearly_tied, 1.5))
    assert paws.effective_samples(w) == pytest.approx(1.5, rel=1e-6)


def test_lambda_for_a_million_segments():
    a = advantages_of(1, 1_000_000, 30.0)
    w = paws.segment_weights(a, paws.solve_lambda(a, 100_000))
    assert paws.effective_samples(w) == pytest.approx(100_000, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 2.0, 3.5])
def test_kl_bound_minimises_the_dual(epsilon):
    a = advantages_of(2, 100, 4.0)

    def dual(log_lam):  # Eq. 9, by scipy
        lam = np.exp(log_lam)
        return lam * epsilon + lam * (scipy.special.logsumexp(a / lam) - np.log(len(a)))

    minimum = scipy.optimize.minimize_scalar(dual, bounds=(-6, 8), method="bounded", options={"xatol": 1e-10})
    lam = paws.solve_lambda_kl(a, epsilon)
    assert lam == pytest.approx(np.exp(minimum.x), rel=1e-4)
    assert paws.kl_divergence(paws.segment_weights(a, lam)) == pytest.approx(epsilon, rel=1e-9)
    with pytest.raises(ValueError, match="choose between 0 and"):
        paws.solve_lambda_kl(a, 4.7)


# ---- losses, minibatches, networks ----
def test_preference_loss_is_bradley_terry():
    rng = np.random.default_rng(0)
    better, worse = rng.normal(size=(2, 9)) * 5
    probability = np.exp(better) / (np.exp(better) + np.exp(worse))  # Eq. 1
    loss = paws.preference_loss(torch.tensor(better), torch.tensor(worse))
    assert loss.item() == pytest.approx(-np.log(probability).mean(), rel=1e-10)


@pytest.mark.parametrize("mode", ["resample", "weight"])
def test_minibatch_gradient_is_unbiased(mode):
    n, generator = 12, torch.Generator().manual_seed(0)
    obs, act = torch.randn(n, 5, 3, generator=generator), torch.rand(n, 5, 2, generator=generator) * 2 - 1
    weights = paws.segment_weights(advantages_of(3, n, 2.0), 1.5)
    policy = paws.Policy(3, 2, generator).eval()

    def gradient(index, scale):
        loss = -(scale * policy.log_prob(obs[index], act[index]).mean(1)).mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, policy.parameters())]).double()

    # Algorithm 1's full gradient: sum_i w_i grad_i
    full = sum(w * gradient(torch.tensor([i]), torch.ones(1)) for i, w in enumerate(weights))
    index, scale = paws.Minibatches(weights, mode, torch.device("cpu")).draw(400_000, generator)
    # E[scale 1(index = i)] = w_i
    mass = torch.zeros(n, dtype=torch.float64).index_add_(0, index, scale.double()) / len(index)
    np.testing.assert_allclose(mass, weights, atol=5 * np.sqrt(weights.max() * n * weights.max() / len(index)))
    estimate = sum(m * gradient(torch.tensor([i]), torch.ones(1)) for i, m in enumerate(mass))
    assert (estimate - full).norm() < 0.02 * full.norm()
    batch = gradient(index[:50], scale[:50])  # and one batch's loss is the mean of its scaled parts
    parts = sum(s * gradient(index[i : i + 1], torch.ones(1)) for i, s in enumerate(scale[:50].double())) / 50
    assert (batch - parts).norm() < 1e-4 * parts.norm()


def test_zero_weight_segments_are_never_drawn():
    weights = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    index, _ = paws.Minibatches(weights, "resample", torch.device("cpu")).draw(10_000, torch.Generator().manual_seed(0))
    assert set(index.tolist()) == {1, 3}


def test_policy_log_prob_and_numpy_forward():
    generator = torch.Generator().manual_seed(0)
    policy = paws.Policy(6, 3, generator, generator).eval()
    obs, act = torch.randn(4, 6, generator=generator), torch.rand(4, 3, generator=generator)
    np.testing.assert_allclose(
        policy.log_prob(obs, act).detach(), -((act - policy(obs)) ** 2).sum(1).detach(), rtol=1e-6
    )  # fmt: skip

    class Recorder:  # an environment that shows which action it was given
        def reset(self, seed):
            return obs[seed].numpy().copy()

        def step(self, action):
            self.action = action
            return obs[0].numpy(), 1.0, 0.0, True

    envs = [Recorder() for _ in range(4)]
    layers = [(m.weight.detach().numpy().T, m.bias.detach().numpy()) for m in policy.net if hasattr(m, "weight")]
    assert paws.run_episodes(envs, layers, [0, 1, 2, 3]) == [[0.0, 1.0]] * 4
    np.testing.assert_allclose(np.stack([e.action for e in envs]), policy(obs).detach(), atol=1e-6)


def test_an_episode_does_not_depend_on_those_beside_it():
    """InvertedPendulum's episodes end at different steps, so environments are taken up again one by one."""
    envs = [paws.GymEnv("InvertedPendulum-v5") for _ in range(paws.LOCKSTEP)]
    layers = paws.policy_layers(paws.Policy(4, 1, torch.Generator().manual_seed(3)))
    seeds = paws.episode_seeds(1, 0, 11)
    alone = [paws.run_episodes(envs[:1], layers, [seed])[0] for seed in seeds]
    assert len({returned for _, returned in alone}) > 3
    for n in (1, 2, 3, paws.LOCKSTEP):
        np.testing.assert_array_equal(paws.run_episodes(envs[:n], layers, seeds), alone)


def test_dropout_is_seeded_and_unbiased():
    drop = paws.Dropout(0.25, torch.Generator().manual_seed(1)).train()
    x = torch.ones(200_000)
    y = drop(x)
    assert y.unique().tolist() == pytest.approx([0.0, 4 / 3]) and y.mean().item() == pytest.approx(1.0, abs=0.01)
    again = paws.Dropout(0.25, torch.Generator().manual_seed(1)).train()
    assert torch.equal(again(x), y) and torch.equal(drop.eval()(x), x)


def test_transformer_equals_torch_encoder():
    """Our blocks against nn.TransformerEncoderLayer(norm_first=True) with the same weights."""
    args = paws_transformer.Args(advantage_width=16, advantage_heads=4, advantage_layers=2)
    generator = torch.Generator().manual_seed(0)
    model = paws_transformer.AdvantageModel(args, 5, 2, 7, generator, generator).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    obs, act = torch.randn(3, 7, 5, generator=generator), torch.randn(3, 7, 2, generator=generator)
    x = model.embed(torch.cat((obs, act), -1)) + model.position
    for block in model.blocks:
        layer = torch.nn.TransformerEncoderLayer(16, 4, 64, norm_first=True, batch_first=True).eval()
        state = {
            "self_attn.in_proj_weight": block.qkv.weight, "self_attn.in_proj_bias": block.qkv.bias,
            "self_attn.out_proj.weight": block.out.weight, "self_attn.out_proj.bias": block.out.bias,
            "linear1.weight": block.mlp[0].weight, "linear1.bias": block.mlp[0].bias,
            "linear2.weight": block.mlp[3].weight, "linear2.bias": block.mlp[3].bias,
            "norm1.weight": block.norm_attention.weight, "norm1.bias": block.norm_attention.bias,
            "norm2.weight": block.norm_mlp.weight, "norm2.bias": block.norm_mlp.bias,
        }  # fmt: skip
        layer.load_state_dict(state)
        x = layer(x)
    expected = model.head(x).squeeze(-1)
    np.testing.assert_allclose(model(obs, act).detach(), expected.detach(), rtol=1e-4, atol=1e-5)


def test_networks_have_the_papers_sizes():
    def parameters(model):
        return sum(p.numel() for p in model.parameters())

    mlp = paws.AdvantageModel(paws.Args(), 35, 4, 64)
    assert parameters(mlp) == (39 + 1) * 512 + 2 * (512 + 1) * 512 + 513
    transformer = paws_transformer.AdvantageModel(paws_transformer.Args(), 35, 4, 64)
    assert len(transformer.blocks) == 4 and transformer.blocks[0].heads == 8 and transformer.position.shape == (64, 512)
    policy = paws.Policy(35, 4)
    assert parameters(policy) == (35 + 1) * 512 + 513 * 512 + 513 * 4


# ---- data ----
def write_file(path: Path, segments=40, length=16, obs_dim=3, act_dim=1, seed=0, **changes) -> Path:
    """Segments of uniform actions; better is closer to tanh of the first observation. Four pretended policies."""
    rng = np.random.default_rng(seed)
    act = rng.uniform(-1, 1, (segments, length, act_dim)).astype(np.float32)
    obs = rng.normal(size=(segments, length, obs_dim)).astype(np.float32)
    score = -np.abs(act[..., 0] - np.tanh(obs[..., 0])).sum(1)
    pairs = rng.permutation(segments).reshape(-1, 2)
    prefs = np.array([(i, j) if score[i] > score[j] else (j, i) for i, j in pairs])
    arrays = dict(obs=obs, act=act, prefs=prefs, policy=np.arange(segments) % 4, format_version=1)
    arrays.update(changes)
    np.savez_compressed(path, **{k: v for k, v in arrays.items() if v is not None})
    return path


@pytest.fixture(scope="module")
def data_file(tmp_path_factory) -> Path:
    return write_file(tmp_path_factory.mktemp("data") / "toy.npz")


def broken(**changes):
    return lambda path: write_file(path, **changes)


def with_nan(path):
    obs = np.zeros((40, 16, 3), np.float32)
    obs[7, 3, 1] = np.nan
    write_file(path, obs=obs)


def truncated(path):
    write_file(path)
    path.write_bytes(path.read_bytes()[:2000])


def pickled(path):
    write_file(path, obs=np.array([{"a": 1}], dtype=object))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (broken(obs=None), ("key 'obs'", "missing")),
        (broken(format_version=None), ("key 'format_version'", "missing")),
        (broken(format_version=2), ("key 'format_version'", "expected the integer 1")),
        (broken(obs=np.zeros((40, 16), np.float32)), ("key 'obs'", "shape (K, T, dim)")),
        (broken(act=np.zeros((40, 16, 1), np.int32)), ("key 'act'", "int32")),
        (broken(act=np.zeros((40, 15, 1), np.float32)), ("key 'act'", "one action per step")),
        (broken(act=np.full((40, 16, 1), 1.5, np.float32)), ("key 'act'", "rescale actions to [-1, 1]")),
        (broken(prefs=np.array([[0, 40]])), ("key 'prefs'", "between 0 and 39")),
        (broken(prefs=np.array([[0, 1], [5, 5]])), ("key 'prefs'", "row 1 compares segment 5 with itself")),
        (broken(prefs=np.array([[0.0, 1.0]])), ("key 'prefs'", "float64")),
        (broken(prefs=np.zeros((0, 2), int)), ("key 'prefs'", "shape (0, 2)")),
        (with_nan, ("key 'obs'", "NaN or infinity at (7, 3, 1)")),
        (truncated, ("np.savez_compressed",)),
        (pickled, ("np.savez_compressed",)),
        (lambda path: path.write_text("not a zip"), ("np.savez_compressed",)),
        (lambda path: np.save(path.open("wb"), np.zeros(3)), ("np.savez_compressed",)),
        (lambda path: None, ("not found", "--data")),
    ],
)
def test_bad_file_ends_with_one_line(tmp_path, make, words):
    path = tmp_path / "bad.npz"
    make(path)
    with pytest.raises(SystemExit) as stopped:
        paws.main(paws.Args(data=str(path), eval=False, cuda=False, runs_dir=str(tmp_path / "runs")))
    message = str(stopped.value)
    assert message.startswith(f"error: {path}: ") and "\n" not in message
    assert all(word in message for word in words), message
    assert not (tmp_path / "runs").exists()


def test_bad_flags_end_with_one_line(tmp_path, data_file):
    common = dict(data=str(data_file), eval=False, cuda=False, runs_dir=str(tmp_path / "runs"))
    for changes, words in (
        (dict(n_pref=21), "has 20 rows"),
        (dict(n_eff=0.001), "--n-eff 0.001"),
        (dict(n_eff=41.0), "--n-eff 41"),
        (dict(update_segment_length=5), "--update-segment-length 5: must divide"),
        (dict(resume=str(tmp_path)), "no args.json"),
        (dict(eval_every=0), "--eval-every 0"),
        (dict(eval=True, task="door-open"), "the environment door-open has 35 and 4"),
        (dict(eval=True, task="my-robot"), "or --no-eval"),
        (dict(eval=True, env_id="Nonsense-v0"), "--env-id Nonsense-v0"),
        (dict(eval=True, env_id="CartPole-v1"), "bounded continuous"),
    ):
        with pytest.raises(SystemExit) as stopped:
            paws.main(paws.Args(**{**common, **changes}))
        assert words in str(stopped.value) and "\n" not in str(stopped.value), stopped.value
    assert not (tmp_path / "runs").exists()
    with pytest.raises(SystemExit, match="give --task"):
        paws.main(paws.Args(cuda=False))


def test_choice_of_pairs_is_seeded_and_balanced():
    rng = np.random.default_rng(0)
    policy = np.repeat(np.arange(4), 250)
    prefs = rng.permutation(1000).reshape(500, 2)
    for n in (10, 50, 51, 333):
        rows = paws.choose_pairs(prefs, n, 3, policy)
        assert len(set(rows)) == n
        counts = np.bincount(policy[prefs[rows]].ravel(), minlength=4)
        assert counts.max() - counts.min() <= 1
    assert np.array_equal(paws.choose_pairs(prefs, 50, 3, policy), paws.choose_pairs(prefs, 50, 3, policy))
    assert not np.array_equal(paws.choose_pairs(prefs, 50, 3, policy), paws.choose_pairs(prefs, 50, 4, policy))
    assert sorted(paws.choose_pairs(prefs, 500, 0, policy)) == list(range(500))
    assert len(paws.choose_pairs(prefs, 50, 0)) == 50


def test_only_segments_of_chosen_pairs_are_used(data_file):
    args = paws.Args(data=str(data_file), n_pref=5)
    obs, act, prefs = paws.load_segments(args)
    assert obs.shape == (10, 16, 3) and sorted(prefs.flatten().tolist()) == list(range(10))
    file = np.load(data_file)
    rows = paws.choose_pairs(file["prefs"], 5, args.seed, file["policy"])
    np.testing.assert_array_equal(obs[prefs[:, 0]], file["obs"][file["prefs"][rows, 0]])
    np.testing.assert_array_equal(act[prefs[:, 1]], file["act"][file["prefs"][rows, 1]])


# ---- the scripts, end to end ----
def run_script(script: Path, *flags: str, **popen) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, **popen)


def only_run(runs: Path) -> Path:
    (folder,) = runs.iterdir()
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_copied_out_alone_it_runs(name, tmp_path, data_file):
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    shutil.copy(data_file, tmp_path / "mine.npz")
    flags = "--data mine.npz --env-id Pendulum-v1 --n-pref 18 --n-eff 0.2 --advantage-steps 150 --total-steps 30"
    flags += " --eval-every 10 --eval-episodes 3 --eval-workers 2"
    done = run_script(tmp_path / f"{name}.py", *flags.split(), *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith(f"Pendulum-v1__{name}__n18__s1__")
    result = json.loads((folder / "result.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result
    keys = "algorithm task n_pref seed steps n_segments lambda n_eff n_eff_target kl pref_acc_train pref_acc_val"
    keys += " success_peak return_peak success_last return_last curve seconds versions git"
    assert list(result) == keys.split()
    assert result["n_segments"] == 36 and result["n_eff"] == pytest.approx(7.2, rel=1e-6)
    assert [row[0] for row in result["curve"]] == [10, 20, 30] and result["success_peak"] is None
    assert result["return_peak"] == pytest.approx(np.mean([row[2] for row in result["curve"]]))
    lines = (folder / "evals.csv").read_text().splitlines()
    assert lines[0] == "step,success_rate,episodic_return,seconds" and len(lines) == 4
    assert json.loads((folder / "args.json").read_text())["n_pref"] == 18
    assert list(folder.glob("events.out.tfevents.*")) and not (folder / "checkpoint.pt").exists()
    model = torch.load(folder / "model.pt", weights_only=True)
    assert model["lambda"] == result["lambda"] and model["obs_dim"] == 3
    code = f"import torch, {name} as m; print(m.load_policy('{folder}/model.pt')(torch.zeros(3)).shape)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "torch.Size([1])", done.stderr


def in_process(tmp_path, data_file, module=paws, **changes) -> tuple[dict, dict]:
    defaults = dict(
        data=str(data_file), env_id="Pendulum-v1", n_eff=0.2, advantage_width=32, advantage_layers=1,
        advantage_steps=120, total_steps=24, eval_every=8, eval_episodes=2, eval_workers=0, cuda=False,
        runs_dir=str(tmp_path / str(time.time())),
    )  # fmt: skip
    args = module.Args(**{**defaults, **changes})
    result = module.main(args)
    folder = only_run(Path(args.runs_dir)) if args.resume is None else Path(args.resume)
    return result, torch.load(folder / "model.pt", weights_only=True)


def same_weights(one: dict, two: dict) -> bool:
    return all(torch.equal(one["policy"][k], two["policy"][k]) for k in one["policy"])


def test_same_seed_same_bits_and_evaluation_changes_nothing(tmp_path, data_file):
    result, model = in_process(tmp_path, data_file)
    _, again = in_process(tmp_path, data_file)
    assert same_weights(model, again)
    often, model_often = in_process(tmp_path, data_file, eval_every=3, eval_episodes=3, eval_workers=1)
    assert same_weights(model, model_often)
    assert same_weights(model, in_process(tmp_path, data_file, eval=False)[1])
    rows, rows_often = ({row[0]: row[1:] for row in r["curve"]} for r in (result, often))
    assert {8, 16, 24} == rows.keys() and {3, 6, 9, 12, 15, 18, 21, 24} == rows_often.keys()
    parallel, _ = in_process(tmp_path, data_file, eval_workers=2)
    assert parallel["curve"] == result["curve"]
    assert not same_weights(model, in_process(tmp_path, data_file, seed=2)[1])


def test_learns_to_rank_and_to_imitate(tmp_path):
    """With plenty of pairs the advantage generalises, and the policy approaches the rule that made the preferences."""
    path = write_file(tmp_path / "many.npz", segments=400, length=8)
    result, model = in_process(
        tmp_path, path, eval=False, advantage_steps=1000, advantage_width=64, stop_accuracy=0.98, total_steps=400
    )  # fmt: skip
    assert result["pref_acc_train"] > 0.85 and result["pref_acc_val"] > 0.75
    policy = paws.Policy(3, 1)
    policy.load_state_dict(model["policy"])
    obs = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    mu = policy.eval()(obs).flatten().detach().numpy()
    assert np.corrcoef(mu, np.tanh(obs[:, 0].numpy()))[0, 1] > 0.5


@pytest.mark.parametrize("module", [paws, paws_transformer])
def test_options(tmp_path, data_file, module):
    for changes, pieces, target in (
        (dict(update="state"), 640, 128),
        (dict(update="state", n_eff=8.0), 640, 128),
        (dict(update_segment_length=4), 160, 32),
        (dict(n_eff=8.0, minibatch="weight"), 40, 8),
        (dict(kl_bound=0.7), 40, None),
    ):
        heads = {} if module is paws else {"advantage_heads": 4}
        result, _ = in_process(tmp_path, data_file, module, eval=False, advantage_steps=20, **heads, **changes)
        assert result["n_eff_target"] == target and result["n_segments"] == 40
        if target is None:
            assert result["kl"] == pytest.approx(0.7, rel=1e-6)
        else:
            assert result["n_eff"] == pytest.approx(target, rel=1e-6)
            assert 0 <= result["kl"] <= np.log(pieces)


def test_identical_advantages_give_uniform_weights(tmp_path):
    obs, act = np.ones((40, 16, 3), np.float32), np.ones((40, 16, 1), np.float32)
    result, _ = in_process(tmp_path, write_file(tmp_path / "same.npz", obs=obs, act=act), eval=False)
    assert result["lambda"] is None and result["n_eff"] == pytest.approx(40)
    assert result["kl"] == pytest.approx(0, abs=1e-9)


def test_needs_no_simulator(tmp_path, data_file):
    code = "import sys, runpy; sys.modules.update(dict.fromkeys(('gymnasium', 'mujoco', 'metaworld', 'imageio'))); "
    code += f"sys.argv[1:] = '--data {data_file} --no-eval --no-cuda --advantage-steps 5 --total-steps 5'.split(); "
    code += f"runpy.run_path({str(ROOT / 'paws_mlp.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["curve"] == [] and result["return_peak"] is None


@pytest.mark.parametrize("phase", ["advantage", "policy"])
def test_killed_run_resumes_to_the_same_result(tmp_path, data_file, phase):
    """kill -9 in each phase; the continued run ends with the bits of an uninterrupted one."""
    flags = dict(advantage_steps=700, total_steps=300, eval_every=100, stop_accuracy=1.1)
    result, model = in_process(tmp_path, data_file, **flags)
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import paws_mlp as m; m.CHECKPOINT_SECONDS = 0; "
    code += f"m.main(m.Args(data={str(data_file)!r}, env_id='Pendulum-v1', n_eff=0.2, advantage_width=32, "
    code += "advantage_layers=1, advantage_steps=700, total_steps=300, eval_every=100, stop_accuracy=1.1, "
    code += f"eval_episodes=2, eval_workers=1, cuda=False, runs_dir={str(tmp_path / 'killed')!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.time() + 120
    while time.time() < deadline:  # until a checkpoint of that phase is there
        for path in (tmp_path / "killed").glob("*/checkpoint.pt"):
            try:
                done = torch.load(path, weights_only=True)["done"]
            except (FileNotFoundError, RuntimeError, EOFError):
                continue
            if done.get(phase, 0) > 10:
                process.send_signal(signal.SIGKILL)
        if process.poll() is not None:
            break
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    folder = only_run(tmp_path / "killed")
    assert not (folder / "result.json").exists()
    resumed, model_resumed = in_process(tmp_path, data_file, resume=str(folder))
    assert same_weights(model, model_resumed)
    for key in set(result) - {"seconds"}:
        assert resumed[key] == result[key], key
    with pytest.raises(SystemExit) as stopped:  # a second resume says that there is nothing to do
        in_process(tmp_path, data_file, resume=str(folder))
    assert stopped.value.code == 0


def test_resume_refuses_other_data(tmp_path, data_file):
    path = tmp_path / "toy.npz"
    shutil.copy(data_file, path)
    in_process(tmp_path, path, eval=False, runs_dir=str(tmp_path / "runs"))
    folder = only_run(tmp_path / "runs")
    (folder / "result.json").unlink()
    torch.save({"data": "another digest"}, folder / "checkpoint.pt")
    with pytest.raises(SystemExit, match="not the file this run started with"):
        in_process(tmp_path, path, resume=str(folder))


def test_shipped_data_and_metaworld_evaluation(tmp_path):
    result, _ = in_process(
        tmp_path, ROOT / "data" / "door-open.npz", task="door-open", env_id=None, n_pref=10, advantage_steps=3,
        total_steps=2, eval_every=1, eval_episodes=2, eval_workers=2,
    )  # fmt: skip
    assert [row[0] for row in result["curve"]] == [1, 2] and 0 <= result["success_peak"] <= 1
    assert result["return_peak"] > 0


def test_smoothing_is_the_mean_of_eight():
    values = list(np.random.default_rng(0).uniform(size=20))
    expected = [np.mean(values[i : i + 8]) for i in range(13)]
    np.testing.assert_allclose(paws.smoothed(values), expected)
    np.testing.assert_allclose(paws.smoothed(values[:3]), [np.mean(values[:3])])
    assert len(paws.smoothed([])) == 0


def test_video_of_a_locomotion_policy(tmp_path):
    """Real headless rendering: 250 frames, not black, and the run survives where nothing can render."""
    path = write_file(tmp_path / "hopper.npz", obs_dim=11, act_dim=3)
    common = dict(task="hopper", env_id=None, advantage_steps=5, total_steps=2, eval=False, capture_video=True)
    in_process(tmp_path, path, runs_dir=str(tmp_path / "runs"), **common)
    frames = imageio.v3.imread(only_run(tmp_path / "runs") / "video.mp4")
    assert len(frames) == 250 and frames[100].std() > 10
