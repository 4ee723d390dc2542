"""The mathematics of PAWS to the digit, and what both scripts learn."""

import numpy as np
import pytest
import scipy.optimize
import scipy.special
import scipy.stats
import torch
from conftest import load_script, only_run, write_preferences
from hypothesis import given, settings
from hypothesis import strategies as st

paws, transformer = load_script("paws_mlp"), load_script("paws_transformer")


def normal(seed: int, n: int, scale: float) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=n) * scale


def linear_weights(advantages: np.ndarray, n_eff: float) -> np.ndarray:
    return paws.segment_weights(advantages, paws.solve_lambda(advantages, n_eff, trust_region="chi2"), "chi2")


# ---- exponential weights ----
def test_exponential_weights_against_scipy():
    a = normal(0, 100, 3.0)
    for lam in (0.01, 1.0, 50.0):
        w = paws.segment_weights(a, lam)
        np.testing.assert_allclose(w, scipy.special.softmax(a / lam), rtol=1e-12)
        assert paws.kl_divergence(w) == pytest.approx(scipy.stats.entropy(w, np.full(100, 0.01)), rel=1e-10)
    assert paws.segment_weights(a * 1e8, 1e-8).max() == 1.0  # no overflow


def test_effective_samples_by_hand():
    assert paws.effective_samples(np.full(7, 3.0)) == pytest.approx(7)
    assert paws.effective_samples(np.array([1.0, 0.0, 0.0])) == 1
    assert paws.effective_samples(np.array([2.0, 1.0])) == pytest.approx(9 / 5)
    # two advantages 0 and -3: n_eff = (1 + e)^2 / (1 + e^2) = 1.5 with e = exp(-3 / lambda)
    e = (1 - np.sqrt(1 - 0.5**2)) / 0.5
    assert paws.solve_lambda(np.array([0.0, -3.0]), 1.5) == pytest.approx(-3 / np.log(e), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 10**6), n=st.integers(2, 400), exponent=st.floats(-8, 8), where=st.floats(0.001, 0.999),
    ties=st.integers(1, 4), shift=st.floats(-1e3, 1e3), stretch=st.floats(1e-3, 1e3),
)  # fmt: skip
def test_both_shapes_reach_n_eff_at_any_scale_and_are_invariant(seed, n, exponent, where, ties, shift, stretch):
    a = normal(seed, n, 10.0**exponent)
    a[:ties] = a.max()
    best = int((a == a.max()).sum())
    if best == n:
        return
    target = best + where * (n - best)
    exponential = paws.segment_weights(a, paws.solve_lambda(a, target))
    linear = linear_weights(a, target)
    assert paws.effective_samples(exponential) == pytest.approx(target, rel=1e-6)
    assert paws.effective_samples(linear) == pytest.approx(target, rel=1e-6)
    assert (linear >= 0).all() and linear.sum() == pytest.approx(1)
    assert np.dot(linear, a) >= np.dot(exponential, a) - 1e-9 * np.abs(a).max()  # linear ones are optimal for n_eff
    changed = stretch * a / np.abs(a).max() + shift
    np.testing.assert_allclose(linear_weights(changed, target), linear, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(
        paws.segment_weights(changed, paws.solve_lambda(changed, target)), exponential, rtol=1e-4, atol=1e-7
    )


def test_what_cannot_be_had_gets_the_nearest_end():
    a = np.array([5.0, 5.0, 1.0, -2.0])
    for target, expected in ((1.0, [0.5, 0.5, 0, 0]), (2.0, [0.5, 0.5, 0, 0]), (4.0, [0.25] * 4), (9.0, [0.25] * 4)):
        weights = paws.segment_weights(a, paws.solve_lambda(a, target))
        np.testing.assert_allclose(weights, expected, atol=1e-8)
        np.testing.assert_allclose(linear_weights(a, target), expected, atol=1e-8)
    same = np.full(5, 3.0)
    np.testing.assert_allclose(paws.segment_weights(same, paws.solve_lambda(same, 2.0)), np.full(5, 0.2))
    np.testing.assert_allclose(linear_weights(same, 2.0), np.full(5, 0.2))
    nearly_tied = np.array([1.0, 1.0 - 1e-15, 0.0, 0.0])
    weights = paws.segment_weights(nearly_tied, paws.solve_lambda(nearly_tied, 1.5))
    assert paws.effective_samples(weights) == pytest.approx(1.5, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.01, 0.5, 2.0, 3.5])
def test_kl_bound_minimises_the_dual(epsilon):
    a = normal(2, 100, 4.0)

    def dual(log_lam):  # Eq. 9, by scipy
        lam = np.exp(log_lam)
        return lam * epsilon + lam * (scipy.special.logsumexp(a / lam) - np.log(len(a)))

    minimum = scipy.optimize.minimize_scalar(dual, bounds=(-6, 8), method="bounded", options={"xatol": 1e-10})
    lam = paws.solve_lambda(a, 0, epsilon)
    assert lam == pytest.approx(np.exp(minimum.x), rel=1e-4)
    assert paws.kl_divergence(paws.segment_weights(a, lam)) == pytest.approx(epsilon, rel=1e-9)


# ---- linear weights ----
def trust_region(n: int, n_eff: float) -> tuple[dict, dict]:
    """sum w = 1 and sum w^2 <= 1 / n_eff, for scipy's SLSQP."""
    return (
        dict(type="eq", fun=lambda w: w.sum() - 1, jac=lambda w: np.ones(n)),
        dict(type="ineq", fun=lambda w: 1 / n_eff - w @ w, jac=lambda w: -2 * w),
    )


@pytest.mark.parametrize(("n", "n_eff"), [(20, 4.0), (35, 20.0), (50, 45.0)])
def test_linear_weights_are_the_constrained_optimum(n, n_eff):
    """max E_w[A] with sum w = 1, w >= 0, sum w^2 <= 1 / n_eff, by scipy's SLSQP."""
    a = normal(n, n, 2.0)
    found = scipy.optimize.minimize(
        lambda w: -w @ a, np.full(n, 1 / n), jac=lambda w: -a, bounds=[(0, 1)] * n, constraints=trust_region(n, n_eff),
        method="SLSQP", options=dict(maxiter=500, ftol=1e-14),
    )  # fmt: skip
    weights = linear_weights(a, n_eff)
    np.testing.assert_allclose(weights, found.x, atol=2e-5)
    assert weights @ a == pytest.approx(found.x @ a, rel=1e-7)


def test_start_features_are_principal_components():
    states = normal(1, 200, 1.0).reshape(50, 4) @ np.array([[3.0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 2, 1], [0, 0, 0, 0.1]])
    states = np.c_[states, np.full(50, 7.0)]  # one that never changes
    phi = paws.start_features(states)
    np.testing.assert_allclose(phi.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(phi.T @ phi / 50, np.eye(3), atol=1e-12)
    correlation, standardised = np.corrcoef(states[:, :4].T), scipy.stats.zscore(states[:, :4])
    _, vectors = np.linalg.eigh(correlation)
    for k in range(3):
        assert abs(np.corrcoef(phi[:, k], standardised @ vectors[:, -1 - k])[0, 1]) == pytest.approx(1)
    assert not paws.start_features(np.full((6, 4), 0.1)).any()


@pytest.mark.parametrize(("n", "n_eff"), [(20, 4.0), (40, 15.0)])
def test_covered_starts_are_the_constrained_optimum(n, n_eff):
    """max E_w[A] / sd(A) - |E_w[phi]|^2 / 2 with sum w = 1, w >= 0, sum w^2 <= 1 / n_eff, by scipy's SLSQP."""
    states = normal(n, 5 * n, 1.0).reshape(n, 5)
    a = 30 * (states[:, 0] + normal(n + 1, n, 1.0))  # the best segments begin elsewhere
    phi, scaled = paws.start_features(states), a / a.std()
    found = scipy.optimize.minimize(
        lambda w: np.square(w @ phi).sum() / 2 - w @ scaled, np.full(n, 1 / n), jac=lambda w: phi @ (w @ phi) - scaled,
        bounds=[(0, 1)] * n, constraints=trust_region(n, n_eff), method="SLSQP", options=dict(maxiter=500, ftol=1e-14),
    )  # fmt: skip
    weights = linear_weights(paws.cover_starts(a, states, n_eff), n_eff)
    np.testing.assert_allclose(weights, found.x, atol=1e-4)
    plain = linear_weights(a, n_eff)
    assert np.linalg.norm(weights @ phi) < 0.8 * np.linalg.norm(plain @ phi)
    np.testing.assert_allclose(linear_weights(paws.cover_starts(7 * a + 3, states, n_eff), n_eff), weights, atol=1e-5)
    same = linear_weights(paws.cover_starts(a, np.ones((n, 5)), n_eff), n_eff)  # nothing to cover
    np.testing.assert_allclose(same, plain, atol=1e-9)


def test_linear_weights_by_hand():
    # c = 0: weights proportional to 3, 1, 0, so n_eff = 16 / 10
    np.testing.assert_allclose(linear_weights(np.array([3.0, 1.0, 0.0]), 1.6), [0.75, 0.25, 0.0], atol=1e-12)
    # all above c = -1: proportional to 3, 2, 1, so n_eff = 36 / 14
    np.testing.assert_allclose(linear_weights(np.array([2.0, 1.0, 0.0]), 36 / 14), np.array([3, 2, 1]) / 6)


# ---- losses and networks ----
def test_preference_loss_is_bradley_terry():
    better, worse = np.random.default_rng(0).normal(size=(2, 9)) * 5
    probability = np.exp(better) / (np.exp(better) + np.exp(worse))  # Eq. 1
    loss = paws.preference_loss(torch.tensor(better), torch.tensor(worse))
    assert loss.item() == pytest.approx(-np.log(probability).mean(), rel=1e-10)


def test_networks_have_the_papers_sizes():
    def parameters(model):
        return sum(p.numel() for p in model.parameters())

    mlp = paws.AdvantageModel(35, 4, paws.Args.advantage_width, paws.Args.advantage_layers)
    assert parameters(mlp) == (39 + 1) * 512 + 2 * (512 + 1) * 512 + 513
    assert parameters(paws.Policy(35, 4)) == (35 + 1) * 512 + 513 * 512 + 513 * 4
    flags = transformer.Args
    size = (flags.advantage_width, flags.advantage_layers, flags.advantage_heads, flags.advantage_dropout)
    model = transformer.AdvantageModel(35, 4, 64, *size)
    assert len(model.encoder.layers) == 4 and model.encoder.layers[0].self_attn.num_heads == 8
    attention, feed_forward, norms = 4 * 513 * 512, 513 * 2048 + 2049 * 512, 4 * 512
    assert parameters(model.encoder) == 4 * (attention + feed_forward + norms)


def test_dropout_is_unbiased_and_off_in_evaluation():
    drop, x = paws.Dropout(0.25), torch.ones(200_000)
    kept = drop(x)
    assert kept.unique().tolist() == pytest.approx([0.0, 4 / 3]) and kept.mean().item() == pytest.approx(1.0, abs=0.01)
    assert torch.equal(drop.eval()(x), x) and torch.equal(paws.Dropout(0.0)(x), x)


def test_log_prob_is_a_gaussian_of_half_unit_precision():
    """-||a - mu||^2 is log N(a; mu, 1/2) up to its constant."""
    policy = paws.Policy(6, 3).eval()
    obs, act = torch.randn(4, 6), torch.rand(4, 3)
    expected = scipy.stats.norm(policy(obs).detach().numpy(), np.sqrt(0.5)).logpdf(act.numpy()) + 0.5 * np.log(np.pi)
    np.testing.assert_allclose(policy.log_prob(obs, act).detach(), expected.sum(1), rtol=1e-4)


# ---- the scripts ----
def learn(module, toy, tmp_path, **changes) -> tuple[dict, dict]:
    """(result, model.pt) of a short run without a simulator."""
    flags = dict(
        data=str(toy), n_eff=0.2, advantage_width=32, advantage_layers=1, advantage_steps=20, total_steps=8,
        eval=False, cuda=False, runs_dir=str(tmp_path / f"runs{len(list(tmp_path.iterdir()))}"),
    )  # fmt: skip
    flags |= {} if module is paws else {"advantage_heads": 4}
    args = module.Args(**{**flags, **changes})
    result = module.main(args)
    return result, torch.load(only_run(args.runs_dir) / "model.pt", weights_only=True)


def policy_gradients(monkeypatch, module, toy, tmp_path, **changes):
    """The policy's gradient in 60 minibatches at one and the same place, (60, parameters), and the model."""
    seen = []
    original = torch.optim.Adam.step

    def step(optimizer, *args, **kwargs):
        if (
            optimizer.param_groups[0]["lr"] == 1e-30
        ):  # the policy's: it does not move, so all gradients are at one place
            seen.append(torch.cat([p.grad.flatten() for p in optimizer.param_groups[0]["params"]]).double())
        return original(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", step)
    monkeypatch.setattr(module.Dropout, "forward", lambda self, x: x)
    _, model = learn(module, toy, tmp_path, learning_rate=1e-30, total_steps=60, batch_size=1000, **changes)
    return torch.stack(seen), model


@pytest.mark.parametrize(
    "changes", [{}, dict(minibatch="weight"), dict(update="state"), dict(update_segment_length=4, trust_region="chi2")]
)
def test_minibatches_are_unbiased_for_equation_8(monkeypatch, toy, tmp_path, changes):
    """The mean gradient is that of -sum_i w_i mean_t log pi(a_t | s_t), pieces of L steps being cut in order."""
    gradients, model = policy_gradients(monkeypatch, paws, toy, tmp_path, **changes)
    file, policy = np.load(toy), paws.Policy(3, 1)
    policy.load_state_dict(model["policy"])
    obs, act = (torch.from_numpy(file[key][model["segments"].numpy()]) for key in ("obs", "act"))
    weights = model["weights"]  # (N,)
    length = 40 * 16 // len(weights)
    log_prob = -((policy.net(obs) - act) ** 2).sum(-1).view(-1, length).double()  # (N, L)
    exact = torch.autograd.grad(-(weights * log_prob.mean(1)).sum(), list(policy.parameters()))
    exact = torch.cat([g.flatten() for g in exact]).double()
    standard_error = (gradients.var(0) / len(gradients)).sum().sqrt()
    assert standard_error < 0.15 * exact.norm()
    assert (gradients.mean(0) - exact).norm() < 2 * standard_error


def test_weights_are_of_the_learned_advantages(toy, tmp_path):
    """model.pt's weights again, from its advantage model by plain sums and scipy."""
    result, model = learn(paws, toy, tmp_path)
    file = np.load(toy)
    net = paws.AdvantageModel(3, 1, 32, 1)
    net.load_state_dict(model["advantage"])
    inputs = np.concatenate((file["obs"], file["act"]), -1)[model["segments"].numpy()]
    advantages = net.net(torch.from_numpy(inputs)).sum((1, 2)).detach().double().numpy()
    np.testing.assert_allclose(model["weights"], scipy.special.softmax(advantages / result["lambda"]), rtol=1e-4)
    score = dict(zip(model["segments"].tolist(), advantages, strict=True))
    right = np.mean([score[i] > score[j] for i, j in file["prefs"]])
    assert result["pref_acc_train"] == right and result["pref_acc_val"] is None


@pytest.mark.parametrize("module", [paws, transformer])
def test_options(toy, tmp_path, module):
    for changes, target in (
        (dict(update="state"), 128),
        (dict(update="state", n_eff=8.0), 128),
        (dict(update_segment_length=4), 32),
        (dict(n_eff=8.0, minibatch="weight"), 8),
        (dict(trust_region="chi2", n_eff=0.0), 12),
        (dict(trust_region="chi2", n_eff=8.0, cover_starts=True, update_segment_length=4), 32),
        (dict(n_eff=0.0), 4),
        (dict(kl_bound=0.7), None),
    ):
        result, model = learn(module, toy, tmp_path, **changes)
        assert result["n_eff_target"] == target and result["n_segments"] == 40
        if target is None:
            assert result["kl"] == pytest.approx(0.7, rel=1e-6)
        else:
            assert result["n_eff"] == pytest.approx(target, rel=1e-6)
        assert (result["lambda"] is None) == (changes.get("trust_region") == "chi2")
        assert model["weights"].sum().item() == pytest.approx(1)


def test_a_step_alone_or_in_its_segment(toy, tmp_path):
    """The Transformer's advantage of a step depends on whether it is asked about it alone."""
    alone, context = (learn(transformer, toy, tmp_path, update="state", state_context=c)[1] for c in (False, True))
    assert all(torch.equal(alone["advantage"][k], context["advantage"][k]) for k in alone["advantage"])
    assert not torch.allclose(alone["weights"], context["weights"])


def test_advantage_from_another_run(toy, tmp_path):
    first, model = learn(paws, toy, tmp_path, n_pref=10, runs_dir=str(tmp_path / "first"))
    folder = str(only_run(tmp_path / "first"))
    other, reused = learn(paws, toy, tmp_path, n_pref=10, advantage_from=folder, n_eff=0.5)
    assert all(torch.equal(model["advantage"][k], reused["advantage"][k]) for k in model["advantage"])
    assert other["pref_acc_train"] == first["pref_acc_train"] and other["n_eff"] == pytest.approx(10)
    for changes in (dict(n_pref=10, seed=2), dict(n_pref=9), dict(n_pref=10, advantage_width=16)):
        with pytest.raises(SystemExit, match="error: .*model.pt: "):
            learn(paws, toy, tmp_path, advantage_from=folder, runs_dir=str(tmp_path / "refused"), **changes)
    assert not (tmp_path / "refused").exists()


def test_oracle_advantages_are_the_files_expert_logp(toy, tmp_path):
    runs = tmp_path / "oracle"
    result, model = learn(paws, toy, tmp_path, n_pref=15, advantage_from="oracle", runs_dir=str(runs))
    logp = np.load(toy)["expert_logp"][model["segments"].numpy()].sum(1, dtype=np.float64)
    np.testing.assert_allclose(model["weights"], scipy.special.softmax(logp / result["lambda"]), rtol=1e-4)
    assert result["pref_acc_train"] == result["pref_acc_val"] == 1
    covered = dict(trust_region="chi2", cover_starts=True, n_eff=6.0, seed=2)
    _, model = learn(paws, toy, tmp_path, n_pref=15, advantage_from="oracle", **covered)
    rows = model["segments"].numpy()
    logp, states = np.load(toy)["expert_logp"][rows].sum(1), np.load(toy)["obs"][rows, 0].astype(float)
    np.testing.assert_allclose(model["weights"], linear_weights(paws.cover_starts(logp, states, 6.0), 6.0), atol=1e-4)
    with pytest.raises(SystemExit, match="has no advantage model"):  # none was learned
        learn(paws, toy, tmp_path, n_pref=15, advantage_from=str(only_run(runs)))
    plain = write_preferences(tmp_path / "plain.npz", expert_logp=None)
    with pytest.raises(SystemExit, match="plain.npz: has no expert_logp"):
        learn(paws, plain, tmp_path, advantage_from="oracle", runs_dir=str(tmp_path / "refused"))
    assert not (tmp_path / "refused").exists()


def test_learns_to_rank_and_to_imitate(tmp_path):
    """With plenty of pairs the advantage generalises, and the policy approaches the rule that made the preferences."""
    path = write_preferences(tmp_path / "many.npz", segments=400, length=8)
    sizes = dict(n_pref=180, advantage_steps=1000, advantage_width=64, stop_accuracy=0.98, total_steps=300)
    result, model = learn(paws, path, tmp_path, **sizes)
    assert result["pref_acc_train"] > 0.85 and result["pref_acc_val"] > 0.7
    policy = paws.Policy(3, 1)
    policy.load_state_dict(model["policy"])
    obs = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    mu = policy.eval()(obs).flatten().detach().numpy()
    assert np.corrcoef(mu, np.tanh(obs[:, 0].numpy()))[0, 1] > 0.5
