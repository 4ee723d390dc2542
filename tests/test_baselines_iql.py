"""P-IQL, IPL and Preference Transformer: whole updates against the published ones, in float64, and their parts."""

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import in_double, load_script, only_run, write_preferences
from torch import nn

p_iql, ipl, pt = (load_script(name) for name in ("p_iql", "ipl", "preference_transformer"))


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_preferences(tmp_path_factory.mktemp("data") / "toy.npz", segments=24, length=6, act_dim=2)


@pytest.fixture
def exact(file, tmp_path, monkeypatch):
    """exact(module, flag=...) -> weights before, data, drawn transitions, model.pt: in float64, without dropout."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Ctrl-C stays pytest's
    torch.set_default_dtype(torch.float64)

    def run(module, **flags):
        before, data, drawn = {}, [], []
        load_data, init, draw = module.load_data, module.Run.__init__, module.random_transitions

        def load_double(args, device):
            data.extend(in_double(p) for p in load_data(args, device))
            return data

        def remember(self, args, **parts):
            for name, part in parts.items():
                if isinstance(part, nn.Module):
                    before[name] = {k: p.detach().clone().requires_grad_() for k, p in part.named_parameters()}
                    for layer in part.modules():
                        if isinstance(layer, nn.Dropout):
                            layer.p = 0.0
                        if isinstance(layer, nn.MultiheadAttention):
                            layer.dropout = 0.0
            init(self, args, **parts)

        monkeypatch.setattr(module, "load_data", load_double)
        monkeypatch.setattr(module.Run, "__init__", remember)
        monkeypatch.setattr(module, "random_transitions", lambda *sizes: drawn.append(draw(*sizes)) or drawn[-1])
        flags = dict(total_steps=3, eval=False, cuda=False, runs_dir=str(tmp_path / "runs")) | flags
        module.main(module.Args(data=str(file), **flags))
        return before, data[0], drawn, torch.load(only_run(tmp_path / "runs") / "model.pt", weights_only=True)

    yield run
    torch.set_default_dtype(torch.float32)


# ---- the transcriptions ----
class Adam:
    def __init__(self, theta: dict, decay: float = 0.0):
        self.theta, self.t, self.decay = list(theta.values()), 0, decay
        self.m, self.v = [0.0] * len(theta), [0.0] * len(theta)

    def descend(self, loss: torch.Tensor, rate: float) -> None:
        self.t += 1
        for i, gradient in enumerate(torch.autograd.grad(loss, self.theta)):
            self.m[i] = 0.9 * self.m[i] + 0.1 * gradient
            self.v[i] = 0.999 * self.v[i] + 0.001 * gradient**2
            m, v = self.m[i] / (1 - 0.9**self.t), self.v[i] / (1 - 0.999**self.t)
            self.theta[i].data -= rate * (m / (v.sqrt() + 1e-8) + self.decay * self.theta[i].data)


def mlp(theta, *inputs: torch.Tensor) -> torch.Tensor:
    w1, b1, w2, b2, w3, b3 = theta
    hidden = torch.clamp(torch.cat(inputs, -1) @ w1.T + b1, min=0)
    return torch.clamp(hidden @ w2.T + b2, min=0) @ w3.T + b3


class Transcription:
    """V, Q_1, Q_2, their targets and the policy's squared error, from the weights before."""

    def __init__(self, before: dict):
        self.weights = before
        self.adam = {name: Adam(before[name]) for name in ("value", "critics", "policy")}

    def v(self, s):
        return mlp(self.weights["value"].values(), s)[..., 0]

    def q(self, s, a, which="critics"):
        theta = list(self.weights[which].values())
        return [mlp(theta[:6], s, a)[..., 0], mlp(theta[6:], s, a)[..., 0]]

    def squared_error(self, s, a):
        return ((torch.tanh(mlp(self.weights["policy"].values(), s)) - a) ** 2).sum(-1)

    def expectile_loss(self, s, a, expectile):
        """The loss of V, the smaller Q' and V of before."""
        q, v = torch.minimum(*self.q(s, a, "targets")).detach(), self.v(s)
        return (torch.abs(expectile - (q - v < 0).double()) * (q - v) ** 2).mean(), q, v.detach()

    def move_targets(self):
        for slow, fast in zip(self.weights["targets"].values(), self.weights["critics"].values(), strict=True):
            slow.data = 0.995 * slow.data + 0.005 * fast.data

    def check(self, model: dict, *names: str):
        for name in names:
            for key, expected in self.weights[name].items():
                np.testing.assert_allclose(model[name][key], expected.detach(), rtol=1e-8, atol=1e-9, err_msg=key)


def cosine(k: int, updates: int) -> float:
    return (1 + np.cos(np.pi * (k - 1) / updates)) / 2


def batches(data, drawn: list, transitions: int):
    """(s, a, s') and the rewards' index of each update: the drawn transitions, or all of the pairs' (here of all)."""
    for k in (1, 2, 3):
        i, t = drawn[k - 1] if transitions else torch.meshgrid(torch.arange(24), torch.arange(5), indexing="ij")
        yield k, data.obs[i, t], data.act[i, t], data.obs[i, t + 1], (i, t)


@pytest.mark.parametrize("transitions", [0, 7])
def test_three_updates_of_p_iql(exact, transitions):
    """Every pair in every minibatch; the reward model learns in two of three updates."""
    before, data, drawn, model = exact(p_iql, reward_steps=2, transitions=transitions)
    iql, reward_adam = Transcription(before), Adam(before["reward"])
    for k, s, a, s2, where in batches(data, drawn, transitions):
        r = mlp(before["reward"].values(), data.obs, data.act)[..., 0]  # (K, T)
        if k <= 2:
            returns = r.sum(1)[data.prefs]  # (n, 2)
            reward_adam.descend(torch.log1p(torch.exp(returns[:, 1] - returns[:, 0])).mean(), 3e-4)
        loss, q, v = iql.expectile_loss(s, a, 0.7)
        iql.adam["value"].descend(loss, 3e-4)
        weights = torch.clamp(torch.exp((q - v) / (1 / 3)), max=100)  # V of before its update
        iql.adam["policy"].descend((weights * iql.squared_error(s, a)).mean(), 3e-4 * cosine(k, 3))
        y = (r[where] + 0.99 * iql.v(s2)).detach()  # V of after it; r of before the reward model's update
        q1, q2 = iql.q(s, a)
        iql.adam["critics"].descend((((q1 - y) ** 2).mean() + ((q2 - y) ** 2).mean()) / 2, 3e-4)
        iql.move_targets()
    iql.check(model, "policy", "reward", "critics", "value")


@pytest.mark.parametrize(("transitions", "flags"), [(0, {}), (7, dict(clip_target=True, gamma=0.5, chi2=50.0))])
def test_three_updates_of_ipl(exact, transitions, flags):
    before, data, drawn, model = exact(ipl, transitions=transitions, **flags)
    iql, gamma, chi2 = Transcription(before), flags.get("gamma", 0.99), flags.get("chi2", 3.0)
    better, worse = data.prefs.T
    clipped = 0
    for _, s, a, _, _ in batches(data, drawn, transitions):
        loss, q, _ = iql.expectile_loss(s, a, 0.75)
        iql.adam["value"].descend(loss, 1e-4)
        v2 = iql.v(data.obs[:, 1:]).detach()
        if flags:
            clipped += (v2.abs() > 1 / (50 * 0.5)).sum()
            v2 = v2.clamp(-1 / (50 * 0.5), 1 / (50 * 0.5))
        losses = []
        for q_i in iql.q(data.obs[:, :-1], data.act[:, :-1]):
            r = q_i - gamma * v2  # (K, T - 1)
            logits = r[better].sum(1) - r[worse].sum(1)
            losses.append(torch.log1p(torch.exp(-logits)).mean() + chi2 * (r[data.prefs] ** 2).mean())
        iql.adam["critics"].descend((losses[0] + losses[1]) / 2, 1e-4)
        weights = torch.clamp(torch.exp((q - iql.v(s).detach()) / (1 / 3)), max=100)  # the new V
        iql.adam["policy"].descend((weights * iql.squared_error(s, a)).mean(), 1e-4)
        iql.move_targets()
    assert bool(clipped) == bool(flags)
    iql.check(model, "policy", "critics", "value")


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * weight + bias


def reward_transformer(theta: dict, obs, act, heads: int, attention: bool = True):
    """GPT-2 on a_1, s_1, a_2, s_2, ... and preference attention, without torch's modules: r_t (B, T) and f (B,)."""

    def linear(x, name):
        return x @ theta[f"{name}.weight"].T + theta[f"{name}.bias"]

    tokens = []
    for t in range(obs.shape[1]):
        for x in (linear(act[:, t].clamp(-0.999, 0.999), "embed_act"), linear(obs[:, t], "embed_obs")):
            tokens.append(x + theta["timestep.weight"][t])
    x = layer_norm(torch.stack(tokens, 1), theta["norm.weight"], theta["norm.bias"])  # (B, 2T, W)
    layers = {key.split(".")[2] for key in theta if key.startswith("encoder.layers.")}
    for layer in (f"encoder.layers.{i}" for i in sorted(layers)):
        h = layer_norm(x, theta[f"{layer}.norm1.weight"], theta[f"{layer}.norm1.bias"])
        qkv = h @ theta[f"{layer}.self_attn.in_proj_weight"].T + theta[f"{layer}.self_attn.in_proj_bias"]
        out = []
        for q, k, v in zip(*(part.chunk(heads, -1) for part in qkv.chunk(3, -1)), strict=True):
            logits = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
            seen = torch.exp(logits) * torch.ones(logits.shape[1:]).tril()
            out.append(seen / seen.sum(-1, keepdim=True) @ v)
        x = x + linear(torch.cat(out, -1), f"{layer}.self_attn.out_proj")
        h = layer_norm(x, theta[f"{layer}.norm2.weight"], theta[f"{layer}.norm2.bias"])
        x = x + linear(torch.clamp(linear(h, f"{layer}.linear1"), min=0), f"{layer}.linear2")
    x = layer_norm(x, theta["encoder.norm.weight"], theta["encoder.norm.bias"])[:, 1::2]
    if not attention:
        r = linear(torch.clamp(linear(x, "head.0"), min=0), "head.2")[..., 0]
        return r, r.mean(1)
    y, width = linear(x, "head"), x.shape[-1]
    q, k, r = y[..., :width], y[..., width : 2 * width], y[..., 2 * width]
    e = torch.exp(torch.einsum("btw,bsw->bts", q, k))  # no 1 / sqrt(width)
    return r, torch.einsum("bts,bs->bt", e / e.sum(2, keepdim=True), r).mean(1)


def test_three_updates_of_the_preference_transformer_and_three_of_iql(exact):
    sizes = dict(reward_width=8, reward_heads=2, reward_layers=2)
    before, data, drawn, model = exact(pt, reward_steps=3, reward_learning_rate=0.1, **sizes)
    theta, adam = before["reward"], Adam(before["reward"], decay=1e-4)
    losses, best = [], None
    for rate in (0.1, 0.01 + 0.09 * 3 / 4, 0.01 + 0.09 / 4):  # cosine: 1, cos(60 degrees), cos(120 degrees)
        _, f = reward_transformer(theta, data.obs, data.act, 2)
        adam.descend(-torch.log(torch.softmax(f[data.prefs], 1)[:, 0]).mean(), rate)
        _, f = reward_transformer(theta, data.obs, data.act, 2)
        losses.append(-torch.log(torch.softmax(f[data.prefs[-2:]], 1)[:, 0]).mean().item())  # a tenth of 12 pairs
        if losses[-1] == min(losses):
            best = {key: value.detach().clone() for key, value in theta.items()}
    assert losses.index(min(losses)) == 0  # so the checkpoint is not the last
    r, _ = reward_transformer(best, data.obs, data.act, 2)
    r = r / (r.sum(1).max() - r.sum(1).min()) * data.obs.shape[1]
    before["reward"] = best
    iql = Transcription(before)
    for k, s, a, s2, where in batches(data, drawn, transitions=256):
        loss, q, _ = iql.expectile_loss(s, a, 0.7)
        iql.adam["value"].descend(loss, 3e-4)
        weights = torch.clamp(torch.exp(3 * (q - iql.v(s).detach())), max=100)  # the new V
        iql.adam["policy"].descend((weights * iql.squared_error(s, a)).mean(), 3e-4 * cosine(k, 3))
        y, (q1, q2) = (r[where] + 0.99 * iql.v(s2)).detach(), iql.q(s, a)
        iql.adam["critics"].descend(((q1 - y) ** 2).mean() + ((q2 - y) ** 2).mean(), 3e-4)
        iql.move_targets()
    iql.check(model, "reward", "policy", "critics", "value")


# ---- resuming ----
class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("module", "phase", "last"),
    [(p_iql, "policy", 2), (p_iql, "policy", 6), (ipl, "policy", 2), (pt, "reward", 3), (pt, "reward", 8)],
)
def test_killed_in_any_phase_it_resumes_to_the_same_bits(module, phase, last, file, tmp_path, monkeypatch):
    """Rewards still learned or frozen, the best checkpoint behind or ahead; others draw random numbers meanwhile."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    flags = dict(data=str(file), total_steps=8, batch_size=5, eval=False, cuda=False, critic_width=8)
    flags |= {p_iql: dict(reward_steps=4, reward_width=8), ipl: dict(transitions=9), pt: dict(reward_steps=8)}[module]
    flags |= dict(reward_width=8, reward_heads=2, reward_batch_size=5) if module is pt else {}
    write = module.write

    def write_and_die(path, content):
        write(path, content)
        if path.name == "checkpoint.pt" and content["done"].get(phase) == last:
            raise Killed

    whole = module.main(module.Args(**flags, runs_dir=str(tmp_path / "whole")))
    monkeypatch.setattr(module.Run, "CHECKPOINT_SECONDS", -1)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, "write", write_and_die)
        module.main(module.Args(**flags, runs_dir=str(tmp_path / "killed")))
    torch.rand(3)
    resumed = module.main(module.Args(resume=str(only_run(tmp_path / "killed")), cuda=False))
    assert {**resumed, "seconds": 0} == {**whole, "seconds": 0}
    one, two = (torch.load(only_run(tmp_path / x) / "model.pt", weights_only=True) for x in ("whole", "killed"))
    for part in ("policy", "critics", "value", *(["reward"] if "reward" in one else [])):
        assert all(torch.equal(two[part][key], weight) for key, weight in one[part].items()), part


# ---- parts ----
def test_the_critics_of_preference_transformer_start_as_iqls(exact):
    before, *_ = exact(pt, reward_steps=1, reward_width=8, reward_heads=2, total_steps=1)
    for name, theta in (("critics", before["critics"]), ("value", before["value"]), ("targets", before["targets"])):
        for key, w in theta.items():
            small = w @ w.T if w.ndim == 2 and w.shape[0] <= w.shape[1] else w.T @ w if w.ndim == 2 else w
            expected = 2 * torch.eye(len(small)) if w.ndim == 2 else torch.zeros(len(w))
            np.testing.assert_allclose(small.detach(), expected, atol=1e-9, err_msg=f"{name} {key}")
    assert all(torch.equal(before["targets"][key], w) for key, w in before["critics"].items())


def reward_model(attention: bool) -> nn.Module:
    args = pt.Args(reward_width=8, reward_heads=2, reward_layers=2, preference_attention=attention)
    torch.manual_seed(0)
    model = pt.RewardModel(3, 2, 7, args).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.4)
    return model


@pytest.mark.parametrize("attention", [True, False])
@torch.no_grad()
def test_reward_model_and_its_rewards_of_the_past(attention):
    model, obs, act = reward_model(attention), torch.randn(4, 7, 3), torch.rand(4, 7, 2) * 2 - 1
    for mine, expected in zip(
        model(obs, act), reward_transformer(dict(model.named_parameters()), obs, act, 2, attention), strict=True
    ):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
    # r_t of a step is what the model says of the window that ends there: relabelling takes one pass
    np.testing.assert_allclose(model(obs[:, :4], act[:, :4])[0], model(obs, act)[0][:, :4], rtol=1e-4, atol=1e-5)


def test_published_sizes_and_settings():
    def parameters(model):
        return sum(p.numel() for p in model.parameters())

    layer = 4 * 256 * 257 + 2 * 256 * 1024 + 1024 + 256 + 4 * 256  # attention, MLP, two norms
    trunk = 36 * 256 + 5 * 256 + 64 * 256 + layer + 4 * 256  # embeddings, timesteps, layer, norms before and after
    assert parameters(pt.RewardModel(35, 4, 64, pt.Args())) == trunk + 257 * (2 * 256 + 1)
    without = pt.RewardModel(35, 4, 64, pt.Args(preference_attention=False))
    assert parameters(without) == trunk + 257 * 128 + 129
    weight = without.encoder.layers[0].linear2.weight
    assert weight.std().item() == pytest.approx(1024**-0.5, rel=0.01)  # LeCun
    assert weight.abs().max() <= 2.0001 * 1024**-0.5 / 0.8796
    assert [m.p for m in without.modules() if isinstance(m, nn.Dropout)] == [0.1, 0.0, 0.1, 0.1]
    for module, width, rate, expectile in ((p_iql, 512, 3e-4, 0.7), (ipl, 512, 1e-4, 0.75), (pt, 256, 3e-4, 0.7)):
        args = module.Args()
        assert (args.critic_width, args.learning_rate, args.expectile) == (width, rate, expectile)
        assert (args.gamma, args.temperature, args.target_rate, args.total_steps) == (0.99, 3.0, 0.005, 500_000)
        assert parameters(module.mlp(35, width)) == 36 * width + (width + 1) * width + width + 1
    assert p_iql.Args().batch_size == ipl.Args().batch_size == 96 and ipl.Args().chi2 == 3.0
    assert pt.Args().batch_size == pt.Args().reward_batch_size == 256


def test_warm_up_and_cosine_at_their_boundaries():
    rates = [pt.warmup_cosine(step, 1000, 1e-3) for step in (1, 51, 101, 551, 1001)]
    np.testing.assert_allclose(rates, [1e-4, 5.5e-4, 1e-3, 5.5e-4, 1e-4])


def test_transitions_stay_inside_their_segments_and_are_drawn_evenly():
    i, t = p_iql.random_transitions(3, 5, 12_000, torch.device("cpu"))
    counts = torch.bincount(i * 5 + t, minlength=15).view(3, 5)
    assert (counts[:, 4] == 0).all() and (counts[:, :4] - 1000).abs().max() < 150  # 5 standard deviations


def test_normalised_returns_span_the_range():
    rewards = torch.tensor([[1.0, 2.0], [0.0, -1.0], [2.0, 0.0]])  # returns 3, -1, 2
    np.testing.assert_allclose(pt.normalise_rewards(rewards, 8.0, "door-open"), 2 * rewards)
    np.testing.assert_allclose(pt.normalise_rewards(rewards, 8.0, "hopper"), 2 * rewards + 0.5)
    assert pt.normalise_rewards(torch.ones(3, 2), 8.0, "ant").isfinite().all()  # equal returns


@pytest.mark.parametrize("module", [p_iql, ipl, pt], ids=lambda module: module.__name__)
def test_segments_of_one_step_have_no_transitions(module, tmp_path):
    path = write_preferences(tmp_path / "short.npz", length=1)
    with pytest.raises(SystemExit, match="error: .*short.npz: segments of 1 step have no transitions"):
        module.main(module.Args(data=str(path), eval=False, runs_dir=str(tmp_path / "runs")))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("script", "flags", "words"),
    [
        ("p_iql", dict(expectile=1.0), "--expectile 1.0: must be > 0 and < 1"),
        ("paws_transformer", dict(advantage_dropout=1.5), "--advantage-dropout 1.5: must be >= 0 and < 1"),
        ("ipl", dict(gamma=1.0, clip_target=True), "--gamma 1.0: must be below 1 with --clip-target"),
    ],
)
def test_shares_are_below_one(file, tmp_path, script, flags, words):
    module = load_script(script)
    with pytest.raises(SystemExit, match=f"error: {words}"):
        module.main(module.Args(data=str(file), eval=False, runs_dir=str(tmp_path / "runs"), **flags))
    assert not (tmp_path / "runs").exists()


def test_width_must_be_a_multiple_of_the_heads(file, tmp_path):
    with pytest.raises(SystemExit, match="error: --reward-width 10: must be a multiple of --reward-heads"):
        pt.main(pt.Args(data=str(file), eval=False, reward_width=10, runs_dir=str(tmp_path)))
