"""Preference Transformer, IPL and DPPO: losses, networks, schedules and updates to the digit, and the scripts."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_paws import ROOT, only_run, run_script, same_weights, write_file

sys.path.insert(0, str(ROOT / "baselines"))
import dppo
import ipl
import preference_transformer as pt

MODULES = (pt, ipl, dppo)
SMALL = {
    pt: dict(
        reward_width=16, reward_heads=2, reward_steps=20, reward_batch_size=7, batch_size=16, critic_width=16,
        reward_check_every=3,
    ),
    ipl: dict(critic_width=16, batch_size=3),
    dppo: dict(
        predictor_width=16, predictor_heads=2, predictor_steps=20, predictor_batch_size=7, batch_size=9,
        window_stride=3,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def data_file(tmp_path_factory) -> Path:
    return write_file(tmp_path_factory.mktemp("data") / "toy.npz", segments=44)


def rng_tensors(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.normal(size=shape)) for shape in shapes]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# ---- losses ----
@pytest.mark.parametrize("module", [pt, dppo])
def test_preference_loss_is_bradley_terry_on_mean_scores(module):
    z = np.random.default_rng(0).normal(size=(2, 9, 5)) * 3  # (better or worse, pairs, steps)
    better, worse = z.mean(2)
    expected = np.mean([-np.log(np.exp(b) / (np.exp(b) + np.exp(w))) for b, w in zip(better, worse, strict=True)])
    assert module.preference_loss(torch.tensor(better), torch.tensor(worse)).item() == pytest.approx(expected)


def test_preference_attention_is_unscaled_and_sees_the_whole_segment():
    q, k, r = rng_tensors(1, (3, 6, 4), (3, 6, 4), (3, 6))
    expected = np.zeros((3, 6))
    for b in range(3):
        for t in range(6):
            e = [np.exp(float(q[b, t] @ k[b, s])) for s in range(6)]
            expected[b, t] = sum(e[s] * float(r[b, s]) for s in range(6)) / sum(e)
    np.testing.assert_allclose(pt.preference_attention(q, k, r), expected, rtol=1e-10)


@pytest.mark.parametrize("attention", [True, False])
def test_reward_model_head(attention):
    """Score and rewards from the trunk's outputs by numpy, with and without preference attention."""
    generator = torch.Generator().manual_seed(0)
    args = pt.Args(reward_width=8, reward_heads=2, preference_attention=attention)
    model = pt.RewardModel(args, 3, 2, 6, generator, generator).eval()
    obs, act = torch.randn(4, 6, 3, generator=generator), torch.rand(4, 6, 2, generator=generator)
    with torch.no_grad():
        reward, score = (y.numpy() for y in model(obs, act))
        x = model.trunk(obs, act).numpy()
    state = {k: v.numpy() for k, v in model.head.state_dict().items()}
    if attention:
        y = x @ state["weight"].T + state["bias"]
        q, k, r = y[..., :8], y[..., 8:16], y[..., 16]
        logits = np.einsum("btw,bsw->bts", q, k)
        w = np.exp(logits) / np.exp(logits).sum(2, keepdims=True)
        expected = np.einsum("bts,bs->bt", w, r).mean(1)
    else:
        hidden = np.maximum(x @ state["0.weight"].T + state["0.bias"], 0)
        r = (hidden @ state["2.weight"].T + state["2.bias"])[..., 0]
        expected = r.mean(1)
    np.testing.assert_allclose(reward, r, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(score, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("module", [pt, ipl])
def test_expectile_loss(module):
    u = np.random.default_rng(2).normal(size=50)
    expected = np.mean([(0.7 if x > 0 else 0.3) * x**2 for x in u])
    assert module.expectile_loss(torch.tensor(u), 0.7).item() == pytest.approx(expected)


def test_ipl_implicit_reward_and_loss():
    q, v = rng_tensors(3, (2, 5, 2, 7), (5, 2, 7))
    args = ipl.Args(gamma=0.9, chi2=0.5)
    r = ipl.implicit_reward(q, v, args)
    np.testing.assert_allclose(r, q.numpy() - 0.9 * v.numpy())
    labelled = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    terms = [
        -np.log(sigmoid(r[i, b, 0].sum().item() - r[i, b, 1].sum().item())) for i in range(2) for b in (0, 2, 3)
    ]  # fmt: skip
    assert ipl.preference_loss(r, labelled).item() == pytest.approx(np.mean(terms))
    assert ipl.preference_loss(r, torch.zeros(5)).item() == 0  # a minibatch of held-out pairs alone
    args.clip_target = True  # to +-1 / (0.5 * 0.1) = +-20
    np.testing.assert_allclose(ipl.implicit_reward(q, 100 * v, args), q - 0.9 * np.clip(100 * v.numpy(), -20, 20))


def test_dppo_ranking_loss_by_double_loop():
    rng = np.random.default_rng(4)
    d, score, lam, temperature = rng.uniform(0, 2, 12), rng.normal(size=12), 0.5, 0.1
    terms = [
        np.logaddexp(0, (d[i] - lam * d[j]) / temperature) for i in range(12) for j in range(12) if score[i] > score[j]
    ]
    assert len(terms) == 66
    loss = dppo.ranking_loss(torch.tensor(d), torch.tensor(score), lam, temperature)
    assert loss.item() == pytest.approx(np.mean(terms))


def test_dppo_distance_of_prefixes_and_its_gradient():
    generator = torch.Generator().manual_seed(0)
    policy = dppo.Policy(3, 2, generator).eval()
    obs, act = torch.randn(4, 6, 3, generator=generator), torch.rand(4, 6, 2, generator=generator)
    lengths = (6, 1, 3, 4)
    d = dppo.window_distance(policy, obs, act, torch.tensor(lengths))
    error = (policy(obs) - act).square().sum(2).sqrt()  # (4, 6)
    expected = torch.stack([error[b, :n].mean() / 2 for b, n in enumerate(lengths)])
    np.testing.assert_allclose(d.detach(), expected.detach(), rtol=1e-5)
    for one, two in zip(*(torch.autograd.grad(x @ x, policy.parameters()) for x in (d, expected)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-6)


def test_dppo_smoothness():
    f, g = np.random.default_rng(5).normal(size=(2, 8))
    assert dppo.smoothness_loss(torch.tensor(f), torch.tensor(g)).item() == pytest.approx(((f - g) ** 2).mean())


def test_dppo_shifted_window_is_the_part_inside():
    x = torch.arange(10).view(1, 10, 1)
    for shift in (-30, -9, -4, 0, 1, 9, 30):
        k = int(np.clip(shift, -9, 9))
        expected = [t for t in range(k, k + 10) if 0 <= t < 10]
        assert dppo.shifted_window(x, shift).flatten().tolist() == expected


# ---- networks ----
def random_trunk(causal: bool, layers: int = 2) -> pt.Trunk:
    generator = torch.Generator().manual_seed(0)
    trunk = pt.Trunk(3, 2, 7, 16, layers, 4, causal, pt.Dropout(0.1, generator), generator).eval()
    for p in trunk.parameters():
        torch.nn.init.normal_(p, std=0.4, generator=generator)
    return trunk


@pytest.mark.parametrize("causal", [True, False])
def test_trunk_sees_the_past_alone_only_if_causal(causal):
    trunk = random_trunk(causal)
    obs, act = (x.float() for x in rng_tensors(6, (2, 7, 3), (2, 7, 2)))
    act = act.tanh()
    with torch.no_grad():
        before = trunk(obs, act)
        changed_obs, changed_act = obs.clone(), act.clone()
        changed_obs[:, 4] += 1
        changed_act[:, 5] -= 0.5
        after = trunk(changed_obs, changed_act)
        moved = (after - before).abs().amax((0, 2)) > 1e-6
        prefix = trunk(obs[:, :4], act[:, :4])
    assert moved.tolist() == ([False] * 4 + [True] * 3 if causal else [True] * 7)
    # what a causal trunk says of a step is what it says of the window that ends there: relabelling in one pass
    assert torch.allclose(prefix, before[:, :4], atol=1e-5) == causal


@pytest.mark.parametrize("causal", [True, False])
def test_trunk_equals_torch_encoder_on_interleaved_tokens(causal):
    trunk = random_trunk(causal)
    obs, act = (x.float() for x in rng_tensors(7, (2, 7, 3), (2, 7, 2)))
    tokens = []
    for t in range(7):
        tokens += [trunk.embed_act(act[:, t].clamp(-0.999, 0.999)) + trunk.timestep[t]]
        tokens += [trunk.embed_obs(obs[:, t]) + trunk.timestep[t]]
    x = trunk.norm_in(torch.stack(tokens, 1))
    mask = torch.nn.Transformer.generate_square_subsequent_mask(14) if causal else None
    for block in trunk.blocks:
        layer = torch.nn.TransformerEncoderLayer(16, 4, 64, norm_first=True, batch_first=True).eval()
        state = {
            "self_attn.in_proj_weight": torch.cat((block.query.weight, block.key_value.weight)),
            "self_attn.in_proj_bias": torch.cat((block.query.bias, block.key_value.bias)),
            "self_attn.out_proj.weight": block.out.weight, "self_attn.out_proj.bias": block.out.bias,
            "linear1.weight": block.mlp[0].weight, "linear1.bias": block.mlp[0].bias,
            "linear2.weight": block.mlp[2].weight, "linear2.bias": block.mlp[2].bias,
            "norm1.weight": block.norm_attention.weight, "norm1.bias": block.norm_attention.bias,
            "norm2.weight": block.norm_mlp.weight, "norm2.bias": block.norm_mlp.bias,
        }  # fmt: skip
        layer.load_state_dict(state)
        x = layer(x, src_mask=mask)
    np.testing.assert_allclose(
        trunk(obs, act).detach(), trunk.norm_out(x)[:, 1::2].detach(), rtol=1e-3, atol=1e-5
    )  # fmt: skip


def test_networks_have_the_published_sizes():
    def parameters(model):
        return sum(p.numel() for p in model.parameters())

    layer = 4 * 256 * 257 + 2 * 256 * 1024 + 1024 + 256 + 4 * 256  # attention, MLP, two norms
    trunk = 36 * 256 + 5 * 256 + 64 * 256 + layer + 4 * 256  # embeddings, timesteps, layer, norms before and after
    assert parameters(pt.RewardModel(pt.Args(), 35, 4, 64)) == trunk + 257 * (2 * 256 + 1)
    head = 257 * 128 + 129
    assert parameters(pt.RewardModel(pt.Args(preference_attention=False), 35, 4, 64)) == trunk + head
    assert parameters(dppo.Predictor(dppo.Args(), 35, 4, 64)) == trunk + head
    for module, width in ((pt, 256), (ipl, 512)):
        assert parameters(module.mlp(35, module.Args().critic_width)) == 36 * width + (width + 1) * width + width + 1


def test_dense_is_lecun_normal():
    weight = pt.dense(400, 300, torch.Generator().manual_seed(0)).weight.detach()
    assert weight.std().item() == pytest.approx(400**-0.5, rel=0.01) and weight.abs().max() <= 2.0001 / 20 / 0.8796


# ---- schedules, minibatches, relabelling ----
def test_learning_rates_at_their_boundaries():
    rates = [pt.warmup_cosine(step, 1000, 1e-3) for step in (1, 51, 101, 551, 1000, 1001)]
    np.testing.assert_allclose(rates[:4], [1e-4, 5.5e-4, 1e-3, 5.5e-4])
    assert rates[4] == pytest.approx(1e-4, rel=1e-4) and rates[5] == pytest.approx(1e-4, rel=1e-12)
    assert [pt.warmup_cosine(1, n, 1e-3) for n in (1, 5)] == [1e-3, 1e-3]  # too short to warm up
    np.testing.assert_allclose([pt.cosine(step, 100, 3e-4) for step in (1, 51, 101)], [3e-4, 1.5e-4, 0], atol=1e-12)


@pytest.mark.parametrize("decay, rates", [(True, [2e-3, 1e-3]), (False, [2e-3, 2e-3])])
def test_ipl_policy_decay(decay, rates, tmp_path, data_file, monkeypatch):
    seen, update = [], ipl.IPL.update

    def recording(self, *batch):
        optimizers = (self.policy_optimizer, self.value_optimizer, self.critics_optimizer)
        seen.append([optimizer.param_groups[0]["lr"] for optimizer in optimizers])
        return update(self, *batch)

    monkeypatch.setattr(ipl.IPL, "update", recording)
    train(ipl, tmp_path, data_file, total_steps=2, learning_rate=2e-3, policy_decay=decay)
    np.testing.assert_allclose(seen, [[rate, 2e-3, 2e-3] for rate in rates])


def test_ipl_crops_are_windows_at_the_same_place_of_both_segments():
    obs, act = torch.arange(5 * 2 * 9 * 3).view(5, 2, 9, 3), torch.arange(5 * 2 * 9 * 2).view(5, 2, 9, 2)
    seen = set()
    for seed in range(20):
        o, a = ipl.cropped(obs, act, 4, torch.Generator().manual_seed(seed))
        assert o.shape == (5, 2, 4, 3) and a.shape == (5, 2, 4, 2)
        for b in range(5):
            start = (o[b, 0, 0, 0].item() - obs[b, 0, 0, 0].item()) // 3
            assert torch.equal(o[b], obs[b, :, start : start + 4]) and torch.equal(a[b], act[b, :, start : start + 4])
            seen.add(start)
    assert seen == set(range(6))
    assert all(ipl.cropped(obs, act, steps, torch.Generator())[0] is obs for steps in (0, 9, 16))  # short segments too


def test_an_epoch_is_a_permutation():
    for n, size in ((450, 256), (45, 256), (20, 7)):
        per_epoch = -(-n // size)
        for epoch in (0, 3):
            rows = [pt.minibatch(n, size, 1, epoch * per_epoch + i + 1) for i in range(per_epoch)]
            assert sorted(torch.cat(rows).tolist()) == list(range(n)) and len(rows[0]) == min(n, size)
    assert not torch.equal(pt.minibatch(50, 50, 1, 1), pt.minibatch(50, 50, 1, 2))


def test_normalised_returns_span_the_range():
    (rewards,) = rng_tensors(8, (6, 5))
    new = pt.normalise_rewards(rewards, 64.0, 0.5)
    returns = rewards.numpy().sum(1)
    np.testing.assert_allclose(new, rewards.numpy() / (returns.max() - returns.min()) * 64 + 0.5)
    spread = (new - 0.5).sum(1)
    assert (spread.max() - spread.min()).item() == pytest.approx(64)
    assert torch.isfinite(pt.normalise_rewards(torch.ones(3, 4), 64.0, 0.0)).all()  # all returns equal


@pytest.mark.parametrize("module", MODULES)
def test_presets(module):
    def filled(**changes):
        args = module.Args(**changes)
        module.apply_preset(args)
        return args

    paper, quick = filled(), filled(preset="quick")
    assert (paper.total_steps, paper.eval_every) == (500_000, 5_000)
    assert quick.total_steps == 40 * quick.eval_every
    own = filled(preset="quick", total_steps=7, eval_every=2, batch_size=3)
    assert (own.total_steps, own.eval_every, own.batch_size) == (7, 2, 3)
    if module is not ipl:
        prefix = "reward" if module is pt else "predictor"
        for n, updates in ((450, 20_000), (45, 10_000)):  # 10,000 epochs of 256 pairs
            args = filled()
            module.fill_in(args, n, 64)
            assert getattr(args, f"{prefix}_steps") == updates
        # the same share of the updates as in the paper with 500 preferences
        assert getattr(quick, f"{prefix}_steps") / quick.total_steps == 20_000 / 500_000


def test_relabelling_shift_and_range_follow_the_task():
    for task, shift in (("hopper", 0.5), ("half-cheetah", 0.5), ("walker2d", 0.5), ("ant", 0.0), ("door-open", 0.0)):
        args = pt.Args(task=task, reward_batch_size=256, batch_size=256)
        pt.fill_in(args, 450, 64)
        assert (args.reward_shift, args.return_range) == (shift, 64.0) and args.reward_check_every == 10


# ---- one whole update against one written by hand ----
def forward(params: list[np.ndarray], x: np.ndarray) -> np.ndarray:
    """MLP of (weight, bias) pairs with ReLU between them."""
    for i in range(0, len(params) - 2, 2):
        x = np.maximum(x @ params[i].T + params[i + 1], 0)
    return x @ params[-2].T + params[-1]


def numbers(module: torch.nn.Module) -> list[np.ndarray]:
    return [p.detach().double().numpy().copy() for p in module.parameters()]


def first_adam_step(params: list[np.ndarray], loss, lr: float) -> list[np.ndarray]:
    """Adam's first step moves each number by lr g / (|g| + eps); g by automatic differentiation of `loss`."""
    leaves = [torch.tensor(p, requires_grad=True) for p in params]
    gradients = torch.autograd.grad(loss(leaves), leaves)
    return [p - lr * (g / (g.abs() + 1e-8)).numpy() for p, g in zip(params, gradients, strict=True)]


def torch_forward(params, x):
    x = torch.as_tensor(x)
    for i in range(0, len(params) - 2, 2):
        x = torch.relu(x @ params[i].T + params[i + 1])
    return x @ params[-2].T + params[-1]


def agent_for_test(module, cls, **changes):
    args = module.Args(critic_width=8, learning_rate=0.02, tau=0.3, total_steps=10, **changes)
    generator = torch.Generator().manual_seed(3)
    agent = cls(args, 3, 2, generator, generator, "cpu")
    for net in nets_of(agent):
        net.double()
    agent.policy.eval()  # dropout off
    for p in agent.targets.parameters():  # targets that differ from the critics
        p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return agent


def nets_of(agent) -> tuple:
    return agent.value, agent.policy, agent.critics, agent.targets


def assert_numbers(agent, *expected: list[np.ndarray]) -> None:
    for net, wanted in zip(nets_of(agent), expected, strict=True):
        for one, two in zip(numbers(net), wanted, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-7, atol=1e-9)


def expectile_by_hand(q, v, expectile):
    u = torch.as_tensor(q) - v.squeeze(-1)
    return (torch.where(u > 0, expectile, 1 - expectile) * u**2).mean()


def squared_error(policy, obs, act):
    return ((torch.tanh(torch_forward(policy, obs)) - torch.as_tensor(act)) ** 2).sum(-1)


def test_iql_update_of_preference_transformer():
    """V from target Q; policy with the new V; Q with the new V; then the targets."""
    agent = agent_for_test(pt, pt.IQL)
    rng = np.random.default_rng(9)
    obs, next_obs, act, reward = (rng.normal(size=s) for s in ((11, 3), (11, 3), (11, 2), (11,)))
    x = np.concatenate((obs, act), 1)
    value, policy, critics, targets = (
        numbers(net) for net in (agent.value, agent.policy, agent.critics, agent.targets)
    )
    agent.update(*(torch.from_numpy(a) for a in (obs, act, reward, next_obs)), step=1)
    q = np.minimum(forward(targets[:6], x), forward(targets[6:], x))[:, 0]
    value = first_adam_step(value, lambda p: expectile_by_hand(q, torch_forward(p, obs), 0.7), 0.02)
    weight = np.minimum(np.exp(3.0 * (q - forward(value, obs)[:, 0])), 100)
    policy = first_adam_step(policy, lambda p: (torch.as_tensor(weight) * squared_error(p, obs, act)).mean(), 0.02)
    y = torch.as_tensor(reward + 0.99 * forward(value, next_obs)[:, 0])

    def critics_loss(p):
        return sum(((torch_forward(part, x)[:, 0] - y) ** 2).mean() for part in (p[:6], p[6:]))

    critics = first_adam_step(critics, critics_loss, 0.02)
    targets = [0.3 * c + 0.7 * t for c, t in zip(critics, targets, strict=True)]
    assert_numbers(agent, value, policy, critics, targets)
    assert agent.policy_optimizer.param_groups[0]["lr"] == 0.02  # cosine, first update
    agent.update(*(torch.from_numpy(a) for a in (obs, act, reward, next_obs)), step=6)
    assert agent.policy_optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_ipl_update():
    """V from target Q; Q by preferences with the new V; policy with the new V and that target Q; then targets."""
    agent = agent_for_test(ipl, ipl.IPL, chi2=0.7)
    rng = np.random.default_rng(10)
    obs, act = rng.normal(size=(4, 2, 6, 3)), rng.normal(size=(4, 2, 6, 2))
    labelled = np.array([1.0, 1.0, 0.0, 1.0])
    x = np.concatenate((obs, act), -1)[:, :, :5]
    value, policy, critics, targets = (
        numbers(net) for net in (agent.value, agent.policy, agent.critics, agent.targets)
    )
    agent.update(torch.from_numpy(obs), torch.from_numpy(act), torch.from_numpy(labelled))
    q = np.minimum(forward(targets[:6], x), forward(targets[6:], x))[..., 0]  # (4, 2, 5)
    value = first_adam_step(value, lambda p: expectile_by_hand(q, torch_forward(p, obs[:, :, :5]), 0.75), 0.02)
    v = forward(value, obs)[..., 0]  # (4, 2, 6)

    def critics_loss(p):
        total = 0.0
        for part in (p[:6], p[6:]):
            r = torch_forward(part, x)[..., 0] - 0.99 * torch.as_tensor(v[:, :, 1:])
            logit = r[:, 0].sum(1) - r[:, 1].sum(1)
            total = total - torch.log(torch.sigmoid(logit[[0, 1, 3]])).mean() / 2 + 0.7 * (r**2).mean() / 2
        return total

    critics = first_adam_step(critics, critics_loss, 0.02)
    weight = torch.as_tensor(np.minimum(np.exp((q - v[:, :, :5]) / 0.3333), 100))
    inputs = obs[:, :, :5], act[:, :, :5]
    policy = first_adam_step(policy, lambda p: (weight * squared_error(p, *inputs)).mean(), 0.02)
    targets = [0.3 * c + 0.7 * t for c, t in zip(critics, targets, strict=True)]
    assert_numbers(agent, value, policy, critics, targets)


# ---- the scripts, end to end ----
def flags_of(changes: dict) -> list[str]:
    return [text for key, value in changes.items() for text in (f"--{key.replace('_', '-')}", str(value))]


@pytest.mark.parametrize("module", MODULES)
def test_copied_out_alone_it_runs(module, tmp_path, data_file):
    name = module.__name__
    shutil.copy(ROOT / "baselines" / f"{name}.py", tmp_path)
    shutil.copy(data_file, tmp_path / "mine.npz")
    flags = "--data mine.npz --env-id Pendulum-v1 --n-pref 20 --total-steps 30 --eval-every 10 --eval-episodes 2"
    flags += " --eval-workers 1 --no-cuda"
    done = run_script(tmp_path / f"{name}.py", *flags.split(), *flags_of(SMALL[module]), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = only_run(tmp_path / "runs")
    assert folder.name.startswith(f"Pendulum-v1__{name}__n20__s1__")
    result = json.loads((folder / "result.json").read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == result
    assert result["algorithm"] == name and result["n_segments"] == 40 and result["steps"] == 30
    assert result["lambda"] is None and result["n_eff"] is None
    assert 0 <= result["pref_acc_train"] <= 1 and result["pref_acc_val"] in (0, 0.5, 1)
    assert [row[0] for row in result["curve"]] == [10, 20, 30]
    assert json.loads((folder / "args.json").read_text())["total_steps"] == 30
    assert module.load_policy(folder / "model.pt")(torch.zeros(3)).shape == (1,)


def train(module, folder: Path, data_file: Path, **changes) -> tuple[dict, dict]:
    defaults = dict(data=str(data_file), total_steps=12, eval_every=6, eval=False, cuda=False, runs_dir=str(folder))
    args = module.Args(**{**defaults, **SMALL[module], **changes})
    result = module.main(args)
    run = Path(args.resume) if args.resume else only_run(folder)
    return result, torch.load(run / "model.pt", weights_only=True)


def stop_after(monkeypatch, module, calls: int) -> None:
    """The run dies right after its so many-th checkpoint call, which is saved."""
    original, count = module.Run.checkpoint, iter(range(1, 10**9))

    def checkpoint(self, force=False, **done):
        last = next(count) == calls
        original(self, force=last, **done)
        if last:
            raise KeyboardInterrupt

    monkeypatch.setattr(module.Run, "checkpoint", checkpoint)


@pytest.mark.parametrize("module", MODULES)
def test_resume_is_exact_in_each_phase_and_runs_are_deterministic(module, tmp_path, data_file, monkeypatch):
    result, model = train(module, tmp_path / "whole", data_file)
    _, evaluated = train(
        module, tmp_path / "evaluated", data_file, eval=True, env_id="Pendulum-v1", eval_workers=0, eval_episodes=1
    )  # fmt: skip
    assert same_weights(model, evaluated)  # the same seed gives the same bits, and evaluating changes nothing
    _, other = train(module, tmp_path / "other", data_file, seed=2)
    assert not same_weights(model, other)
    for calls in (5,) if module is ipl else (8, 20, 25):  # before, at and after the end of the first phase
        with monkeypatch.context() as patch:
            stop_after(patch, module, calls)
            with pytest.raises(KeyboardInterrupt):
                train(module, tmp_path / f"killed{calls}", data_file)
        folder = only_run(tmp_path / f"killed{calls}")
        assert not (folder / "result.json").exists()
        # its own flags come from args.json
        args = module.Args(resume=str(folder), cuda=False)
        resumed, model_resumed = module.main(args), torch.load(folder / "model.pt", weights_only=True)
        assert model_resumed.keys() == model.keys()
        for key in model.keys() - {"args"}:
            if isinstance(model[key], dict):
                assert all(torch.equal(model[key][k], model_resumed[key][k]) for k in model[key]), key
        for key in result.keys() - {"seconds"}:
            assert resumed[key] == result[key], key


def test_options(tmp_path, data_file):
    for i, (module, changes) in enumerate(
        (
            (pt, dict(preference_attention=False, reward_layers=2)),
            (pt, dict(n_pref=4)),  # nothing held out: the best checkpoint is that of the training pairs
            (ipl, dict(chi2=0.5, clip_target=True)),
            (ipl, dict(n_pref=4, crop=2)),
            (dppo, dict(min_seq_len=16)),
            (dppo, dict(n_pref=4, batch_size=10**6, predictor_layers=2)),
        )
    ):
        result, _ = train(module, tmp_path / str(i), data_file, total_steps=2, **changes)
        assert (result["pref_acc_val"] is None) == ("n_pref" in changes)


def test_bad_flags_end_with_one_line(tmp_path, data_file):
    one_step = write_file(tmp_path / "one.npz", length=1)
    for module, changes, words in (
        (pt, dict(reward_heads=3), "--reward-width 16: must be a multiple"),
        (pt, dict(reward_batch_size=0), "--reward-batch-size 0"),
        (pt, dict(data=str(one_step)), "at least 2"),
        (ipl, dict(data=str(one_step)), "at least 2"),
        (ipl, dict(batch_size=0), "--batch-size 0"),
        (ipl, dict(crop=1), "--crop 1: IPL needs transitions"),
        (dppo, dict(min_seq_len=17), "--min-seq-len 17: segments have 16 steps"),
        (dppo, dict(batch_size=1), "--batch-size 1"),
        (dppo, dict(window_stride=0), "--window-stride 0"),
    ):
        with pytest.raises(SystemExit) as stopped:
            train(module, tmp_path / "runs", data_file, **changes)
        assert words in str(stopped.value) and "\n" not in str(stopped.value), stopped.value
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("module", MODULES)
def test_utility_learns_to_rank(module, tmp_path):
    """A feature of the actions that decides every pair is found, also on held-out pairs."""
    path = tmp_path / "easy.npz"
    rng = np.random.default_rng(0)
    act = np.clip(rng.normal(size=(200, 8, 1)) * 0.3 + rng.uniform(-0.5, 0.5, (200, 1, 1)), -1, 1).astype(np.float32)
    pairs = np.arange(200).reshape(-1, 2)
    mean = act.mean((1, 2))[pairs]
    prefs = np.where((mean[:, 0] > mean[:, 1])[:, None], pairs, pairs[:, ::-1])
    write_file(path, segments=200, length=8, act=act, prefs=prefs, policy=None)
    longer = {
        pt: dict(reward_steps=200, reward_batch_size=30, total_steps=1),
        ipl: dict(total_steps=150, batch_size=30, learning_rate=2e-3, critic_width=32),
        dppo: dict(predictor_steps=80, predictor_batch_size=30, total_steps=1),
    }[module]
    result, _ = train(module, tmp_path / "runs", path, **longer)
    assert result["pref_acc_train"] > 0.9 and result["pref_acc_val"] >= 0.8
