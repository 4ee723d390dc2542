"""BC, P-IQL, CPL and CPL-KL: losses against numpy, schedules at their boundaries, one whole update, the scripts."""

import json
import shutil
import sys
import time

import numpy as np
import pytest
import torch
from test_paws import ROOT, only_run, run_script, same_weights, write_file

sys.path.insert(0, str(ROOT / "baselines"))
import bc
import cpl
import cpl_kl
import p_iql

MODULES = (bc, p_iql, cpl, cpl_kl)
names = pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    return write_file(tmp_path_factory.mktemp("data") / "toy.npz")


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ---- losses ----
def test_bc_loss_is_the_squared_error():
    mu, act = rng().uniform(-1, 1, (2, 6, 5, 3))
    log_prob = torch.tensor(-((mu - act) ** 2).sum(-1))
    expected = np.mean([np.linalg.norm(mu[b, t] - act[b, t]) ** 2 for b in range(6) for t in range(5)])
    for module in (bc, cpl, cpl_kl):
        assert module.bc_loss(log_prob).item() == pytest.approx(expected)


@pytest.mark.parametrize("bias", [0.5, 1.0])
def test_cpl_loss(bias):
    log_prob, reference = -rng().uniform(0, 2, (2, 8, 5))
    alpha, expected, expected_kl = 0.3, [], []
    for i in range(0, 8, 2):  # e^{A+} / (e^{A+} + e^{bias A-}), one pair at a time
        better, worse = alpha * log_prob[i].sum(), alpha * log_prob[i + 1].sum()
        expected.append(-np.log(np.exp(better) / (np.exp(better) + np.exp(bias * worse))))
        better, worse = better - alpha * reference[i].sum(), worse - alpha * reference[i + 1].sum()
        expected_kl.append(-np.log(np.exp(better) / (np.exp(better) + np.exp(bias * worse))))
    log_prob, reference = torch.tensor(log_prob), torch.tensor(reference)
    assert cpl.cpl_loss(log_prob, alpha, bias).item() == pytest.approx(np.mean(expected))
    assert cpl_kl.cpl_loss(log_prob, reference, alpha, bias).item() == pytest.approx(np.mean(expected_kl))
    assert cpl_kl.cpl_loss(log_prob, log_prob, alpha, bias).item() == pytest.approx(np.log(2))  # pi = pi_ref


def test_p_iql_losses():
    rewards = rng().normal(size=(8, 5))
    returns = rewards.sum(1)
    expected = -np.log(1 / (1 + np.exp(returns[1::2] - returns[0::2]))).mean()
    assert p_iql.preference_loss(torch.tensor(rewards)).item() == pytest.approx(expected)
    error = rng(1).normal(size=50)
    expected = np.mean([abs(0.7 - (u < 0)) * u**2 for u in error])
    assert p_iql.expectile_loss(torch.tensor(error), 0.7).item() == pytest.approx(expected)
    advantage = np.array([-1.0, 0.0, 0.5, 1.0, 1.6, 500.0])
    weights = p_iql.policy_weights(torch.tensor(advantage), 1 / 3, 100.0)
    np.testing.assert_allclose(weights, [np.exp(-3), 1, np.exp(1.5), np.exp(3), 100, 100])
    rewards = np.array([[1.0, 1.0], [3.0, 0.0], [0.0, 0.0]])
    assert p_iql.accuracy(torch.tensor(rewards), torch.tensor([[1, 0], [2, 0], [0, 2]])) == pytest.approx(2 / 3)


# ---- minibatches and schedules ----
@names
@pytest.mark.parametrize(("n", "batch_size"), [(50, 96), (500, 96), (20, 6), (20, 5), (1, 8)])
def test_an_epoch_is_a_permutation_of_the_pairs(module, n, batch_size):
    per_epoch = -(-n // batch_size)
    batches = [module.minibatch(n, batch_size, 3, step) for step in range(1, 2 * per_epoch + 1)]
    assert [len(b) for b in batches[:per_epoch]] == [batch_size] * (n // batch_size) + [n % batch_size] * (
        n % batch_size > 0
    )
    epochs = [torch.cat(batches[:per_epoch]).tolist(), torch.cat(batches[per_epoch:]).tolist()]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n > 1:
        assert epochs[0] != epochs[1] and module.minibatch(n, n, 4, 1).tolist() != epochs[0]


@names
def test_presets(module):
    args = module.Args()
    module.apply_preset(args)
    assert (args.total_steps, args.batch_size, args.eval_every) == (500_000, 96, 5_000)
    quick = module.Args(preset="quick")
    module.apply_preset(quick)
    assert quick.total_steps == 40 * quick.eval_every
    given = module.Args(preset="quick", total_steps=77, batch_size=3, eval_every=11)
    module.apply_preset(given)
    assert (given.total_steps, given.batch_size, given.eval_every) == (77, 3, 11)
    with pytest.raises(SystemExit, match="--batch-size 0: must be at least 1"):
        module.apply_preset(module.Args(batch_size=0))


@pytest.mark.parametrize("preset", ["paper", "quick"])
def test_phases_keep_their_shares(preset):
    for module in (cpl, cpl_kl):
        args = module.Args(preset=preset)
        module.apply_preset(args)
        assert args.bc_steps / args.total_steps == 0.4 and args.warmup_steps / args.total_steps == 0.02
    args = p_iql.Args(preset=preset)
    p_iql.apply_preset(args)
    assert args.reward_steps / args.total_steps == 0.1


def test_warm_up():
    for module, peak in ((cpl, 1e-4), (cpl_kl, 1e-5)):
        args = module.Args()
        module.apply_preset(args)
        assert (args.bc_steps, args.warmup_steps) == (200_000, 10_000)
        rates = [module.warmup(step, args) for step in (200_001, 205_000, 210_000, 210_001, 500_000)]
        assert rates == pytest.approx([peak / 10_000, peak / 2, peak, peak, peak], rel=1e-12)
    assert cpl.warmup(1, cpl.Args(bc_steps=0, warmup_steps=0)) == 1e-4


def test_cosine_is_torchs():
    args = p_iql.Args(total_steps=200)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.Adam([parameter], lr=args.learning_rate)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    for step in range(1, 202):
        assert p_iql.cosine(step, args) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-15)
        optimizer.step()
        scheduler.step()
    assert p_iql.cosine(1, args) == 3e-4 and p_iql.cosine(201, args) == 0


# ---- one update of P-IQL, written out a second time ----
def forward(layers: list, x: torch.Tensor) -> torch.Tensor:
    for weight, bias in layers[:-1]:
        x = (x @ weight.T + bias).clamp(min=0)
    return x @ layers[-1][0].T + layers[-1][1]


def copy_of(net: torch.nn.Module) -> list:
    tensors = [p.detach().clone().requires_grad_() for p in net.parameters()]
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def descend(layers: list, loss: torch.Tensor) -> None:
    tensors = [t for layer in layers for t in layer]
    for tensor, gradient in zip(tensors, torch.autograd.grad(loss, tensors), strict=True):
        tensor.data -= 1e-3 * gradient


def test_one_update_of_p_iql():
    generator = torch.Generator().manual_seed(0)
    args = p_iql.Args(total_steps=10, tau=0.3)
    nets = {
        "policy": p_iql.Policy(3, 2, generator).eval(),  # no dropout: the second implementation has none
        "reward": p_iql.RewardModel(3, 2, generator),
        "critic": p_iql.Critics(3, 2, generator),
        "target": p_iql.Critics(3, 2, generator),  # not equal to the critics: which one is used where must show
        "value": p_iql.mlp(3, generator),
    }
    nets = {name: net.double() for name, net in nets.items()}
    learning = ("policy", "reward", "critic", "value")
    # plain gradient descent: V before and after its update must differ
    optimizers = {name: torch.optim.SGD(nets[name].parameters(), lr=1e-3) for name in learning}
    obs, act = torch.randn(4, 6, 3, generator=generator), torch.rand(4, 6, 2, generator=generator) * 2 - 1
    obs, act = 30 * obs.double(), act.double()  # 30: advantages of the order of beta
    policy, value, reward_model = copy_of(nets["policy"]), copy_of(nets["value"]), copy_of(nets["reward"].net)
    critics, targets = ([copy_of(net) for net in nets[name].nets] for name in ("critic", "target"))

    # the script's update
    reward = nets["reward"](obs, act)
    losses = {"reward": p_iql.descend(optimizers["reward"], p_iql.preference_loss(reward))}
    losses |= p_iql.iql_update(
        nets, optimizers, obs[:, :-1], act[:, :-1], reward[:, :-1].detach(), obs[:, 1:], args
    )

    # the same by hand
    r = forward(reward_model, torch.cat((obs, act), -1))[..., 0]
    by_hand = {"reward": -torch.log(torch.sigmoid(r[0::2].sum(1) - r[1::2].sum(1))).mean()}
    descend(reward_model, by_hand["reward"])
    s, a, s_next, r = obs[:, :5], act[:, :5], obs[:, 1:], r[:, :5].detach()
    sa = torch.cat((s, a), -1)
    q = torch.minimum(*(forward(target, sa)[..., 0] for target in targets)).detach()
    v = forward(value, s)[..., 0]
    by_hand["value"] = (abs(0.7 - (q - v < 0).double()) * (q - v) ** 2).mean()
    descend(value, by_hand["value"])
    weight = torch.exp(3 * (q - v.detach())).clamp(max=100)
    assert weight.min() < 0.5 and weight.max() > 1  # both sides of the expectile
    by_hand["policy"] = (weight * ((torch.tanh(forward(policy, s)) - a) ** 2).sum(-1)).mean()
    descend(policy, by_hand["policy"])
    assert (forward(value, s)[..., 0] - v).abs().max() > 1e-3
    y = r + 0.99 * forward(value, s_next)[..., 0].detach()
    by_hand["critic"] = sum(((forward(c, sa)[..., 0] - y) ** 2).mean() for c in critics) / 2
    descend([layer for c in critics for layer in c], by_hand["critic"])

    for name in by_hand:
        assert losses[name].item() == pytest.approx(by_hand[name].item(), rel=1e-9), name

    def close(net, layers):
        for p, q in zip(net.parameters(), [t for layer in layers for t in layer], strict=True):
            np.testing.assert_allclose(p.detach(), q.detach(), rtol=1e-9, atol=1e-12)

    close(nets["reward"], reward_model)
    close(nets["value"], value)
    close(nets["policy"], policy)
    close(nets["critic"], critics[0] + critics[1])
    blended = [
        (0.7 * old[0] + 0.3 * new[0], 0.7 * old[1] + 0.3 * new[1])
        for target, critic in zip(targets, critics, strict=True)
        for old, new in zip(target, critic, strict=True)
    ]
    close(nets["target"], blended)


# ---- the scripts ----
def in_process(tmp_path, data_file, module, **changes) -> tuple[dict, dict]:
    """25 updates of 6 of 20 pairs: BC 10, CPL 15 with a warm-up of 4; the reward model learns in 10."""
    phases = {bc: {}, p_iql: dict(reward_steps=10)}.get(module, dict(bc_steps=10, warmup_steps=4))
    defaults = dict(
        data=str(data_file), env_id="Pendulum-v1", total_steps=25, batch_size=6, eval_every=10, eval_episodes=2,
        eval_workers=0, cuda=False, runs_dir=str(tmp_path / str(time.time())), **phases,
    )  # fmt: skip
    args = module.Args(**{**defaults, **changes})
    result = module.main(args)
    folder = only_run(tmp_path / args.runs_dir) if args.resume is None else tmp_path / args.resume
    return result, torch.load(folder / "model.pt", weights_only=True)


@names
def test_copied_out_alone_it_runs(module, tmp_path, data_file):
    name = module.__name__
    shutil.copy(ROOT / "baselines" / f"{name}.py", tmp_path)
    shutil.copy(data_file, tmp_path / "mine.npz")
    flags = "--data mine.npz --env-id Pendulum-v1 --n-pref 18 --preset quick --total-steps 50 --eval-every 20"
    flags += " --eval-episodes 3 --eval-workers 2 --no-cuda"
    done = run_script(tmp_path / f"{name}.py", *flags.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith(f"Pendulum-v1__{name}__n18__s1__")
    result = json.loads((folder / "result.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result
    assert [row[0] for row in result["curve"]] == [20, 40, 50]
    assert result["n_segments"] == 36 and result["lambda"] is None and result["steps"] == 50
    assert (result["pref_acc_train"] is not None) == (name == "p_iql")
    saved = json.loads((folder / "args.json").read_text())
    phases = {"bc": {}, "p_iql": {"reward_steps": 5}}.get(name, {"bc_steps": 20, "warmup_steps": 1})
    assert {key: saved[key] for key in phases} == phases


@names
def test_same_seed_same_bits_and_evaluation_changes_nothing(module, tmp_path, data_file):
    _, model = in_process(tmp_path, data_file, module)
    torch.rand(3)  # somebody else's random numbers do not matter
    assert same_weights(model, in_process(tmp_path, data_file, module, eval_every=3)[1])
    assert same_weights(model, in_process(tmp_path, data_file, module, eval=False)[1])
    assert not same_weights(model, in_process(tmp_path, data_file, module, eval=False, seed=2)[1])


class Killed(Exception):
    pass


@names
@pytest.mark.parametrize("when", [7, 10, 17])  # in the first phase, at its end, in the second
def test_killed_run_resumes_to_the_same_result(module, when, tmp_path, data_file, monkeypatch):
    result, model = in_process(tmp_path, data_file, module)
    checkpoint = module.Run.checkpoint

    def then_die(self, **done):
        checkpoint(self, force=True, **done)
        if done["policy"] == when:
            raise Killed

    monkeypatch.setattr(module.Run, "checkpoint", then_die)
    with pytest.raises(Killed):
        in_process(tmp_path, data_file, module, runs_dir=str(tmp_path / "killed"))
    monkeypatch.undo()
    folder = only_run(tmp_path / "killed")
    resumed, model_resumed = in_process(tmp_path, data_file, module, resume=str(folder))
    for name in set(model) - {"args", "format_version", "algorithm", "task", "obs_dim", "act_dim"}:
        assert all(torch.equal(model[name][k], model_resumed[name][k]) for k in model[name]), name
    for key in set(result) - {"seconds"}:
        assert resumed[key] == result[key], key


def test_bc_uses_the_data_it_is_told_to(tmp_path, data_file):
    """With --data-used preferred the other segments can be anything; with all they matter."""
    file = dict(np.load(data_file))
    act = file["act"].copy()
    act[file["prefs"][:, 1]] = 0.5
    changed = write_file(tmp_path / "changed.npz", **{**file, "act": act})
    for used, same in (("preferred", True), ("all", False)):
        one, two = (in_process(tmp_path, path, bc, eval=False, data_used=used)[1] for path in (data_file, changed))
        assert same_weights(one, two) == same


def test_cpl_starts_as_bc_and_forgets_its_moments(tmp_path, data_file):
    """Up to bc_steps CPL and BC are the same bits; the first CPL update is Adam's first, of known size."""
    common = dict(eval=False, total_steps=10)
    _, cloned = in_process(tmp_path, data_file, bc, **common)
    for module in (cpl, cpl_kl):
        assert same_weights(cloned, in_process(tmp_path, data_file, module, **common)[1])
        _, after = in_process(tmp_path, data_file, module, eval=False, total_steps=11)
        args = module.Args(bc_steps=10, warmup_steps=4)
        module.apply_preset(args)
        rate = module.warmup(11, args)
        assert rate == pytest.approx({cpl: 1e-4, cpl_kl: 1e-5}[module] / 4)
        step = (after["policy"]["net.6.bias"] - cloned["policy"]["net.6.bias"]).abs()
        np.testing.assert_allclose(step, rate, rtol=0.02)  # m / sqrt(v) = +-1 with fresh moments
    for key, value in after["reference"].items():  # CPL-KL's reference is the cloned policy
        assert torch.equal(value, cloned["policy"][key])


def test_reference_has_no_dropout(data_file):
    args = cpl_kl.Args(data=str(data_file))
    obs, act, _ = cpl_kl.load_segments(args)
    policy = cpl_kl.Policy(3, 1, torch.Generator().manual_seed(0), torch.Generator().manual_seed(0))
    reference = cpl_kl.Policy(3, 1).eval()
    reference.load_state_dict(policy.state_dict())
    log_prob = cpl_kl.all_log_probs(reference, obs, act, size=7)
    np.testing.assert_allclose(log_prob, policy.eval().log_prob(obs, act).detach(), rtol=1e-5, atol=1e-6)
    assert not log_prob.requires_grad


def test_the_reward_model_is_frozen_after_its_steps(tmp_path, data_file):
    common = dict(eval=False, reward_steps=5)
    _, early = in_process(tmp_path, data_file, p_iql, total_steps=5, **common)
    _, late = in_process(tmp_path, data_file, p_iql, total_steps=9, **common)
    assert all(torch.equal(early["reward"][k], late["reward"][k]) for k in early["reward"])
    assert not same_weights(early, late)


def test_p_iql_needs_transitions(tmp_path):
    path = write_file(tmp_path / "short.npz", length=1)
    with pytest.raises(SystemExit, match="segments of 1 step have no transitions"):
        in_process(tmp_path, path, p_iql, eval=False)


@pytest.mark.parametrize("module", [cpl, p_iql], ids=lambda module: module.__name__)
def test_learns_the_rule_behind_the_preferences(module, tmp_path):
    """Better is closer to tanh of the first observation, and the actions are uniform: cloning cannot find that."""
    path = write_file(tmp_path / "many.npz", segments=400, length=8)
    extra = dict(bc_steps=20, warmup_steps=10, alpha=1.0) if module is cpl else dict(reward_steps=150)
    _, model = in_process(
        tmp_path, path, module, eval=False, total_steps=200, batch_size=16, learning_rate=1e-3, **extra
    )  # fmt: skip
    policy = module.Policy(3, 1)
    policy.load_state_dict(model["policy"])
    obs = torch.randn(500, 3, generator=torch.Generator().manual_seed(0))
    mu = policy.eval()(obs).flatten().detach().numpy()
    assert np.corrcoef(mu, np.tanh(obs[:, 0].numpy()))[0, 1] > 0.5
