"""Statistics against scipy and by hand; the sweep with tiny real runs that are killed, fail, or meet another sweep."""

import contextlib
import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from conftest import load_script
from scipy import stats

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmark"))
import figures
import imitation
import paper
import significance
import spearman
import speed
import sweep
import tables


# ---- statistics ----
def test_peak_of_the_mean_of_smoothed_curves():
    curves = np.random.default_rng(0).uniform(size=(3, 20))
    runs = [
        dict(task="door-open", seed=s, path="", curve=[[i, v, 0] for i, v in enumerate(c)])
        for s, c in enumerate(curves)
    ]
    figure = tables.figure_of(runs)
    smooth = np.array([[100 * curve[i : i + 8].mean() for i in range(13)] for curve in curves])
    best = max(range(13), key=lambda i: smooth[:, i].mean())
    assert figure.mean == pytest.approx(smooth[:, best].mean())
    assert figure.two_se == pytest.approx(2 * stats.sem(smooth[:, best]))
    assert figure.last == pytest.approx(100 * curves[:, -8:].mean())
    assert figure.last_two_se == pytest.approx(2 * stats.sem(100 * curves[:, -8:].mean(1)))
    assert figure.scores == pytest.approx(smooth[:, best])


def test_the_peak_of_the_mean_is_not_the_mean_of_peaks():
    early, late = np.zeros(20), np.zeros(20)
    early[:8], late[-8:] = 1.0, 1.0
    assert tables.smooth(np.stack((early, late))).mean(0).max() == 0.5
    assert np.isnan(tables.two_standard_errors(np.ones(1)))
    assert tables.smooth(np.array([[1.0, 3.0]])) == 2.0  # fewer than 8 evaluations: all of them


def test_interquartile_mean_and_its_interval():
    scores = [np.array([0.0, 10.0, 20.0, 30.0]), np.array([40.0, 50.0, 60.0, 1000.0])]
    assert tables.interquartile_mean(scores) == pytest.approx((20 + 30 + 40 + 50) / 4)
    rng = np.random.default_rng(1)
    scores = [rng.normal(level, 1.0, size=12) for level in (0.0, 50.0)]
    low, high = tables.bootstrap_interval(scores)

    def trimmed(a, b, axis):
        return stats.trim_mean(np.concatenate((a, b), axis=axis), 0.25, axis=axis)

    expected = stats.bootstrap(scores, trimmed, n_resamples=4000, method="percentile", rng=0).confidence_interval
    assert (low, high) == pytest.approx(tuple(expected), abs=0.6)
    assert low < tables.interquartile_mean(scores) < high


def test_averages_take_the_seeds_that_all_methods_of_a_task_have():
    def figure(**levels):
        curves = {int(seed[1:]): [[i, level / 100, None] for i in range(9)] for seed, level in levels.items()}
        return tables.figure_of([dict(task="door-open", seed=s, path="", curve=c) for s, c in curves.items()])

    figures = {("bc", 50, "door-open"): figure(s1=40, s2=60, s3=80), ("cpl", 50, "door-open"): figure(s1=10, s3=30)}
    figures |= {("bc", 50, "push-back"): figure(s2=70), ("cpl", 50, "push-back"): None}
    figures |= {("data_best", 50, "door-open"): tables.Figure(99)}
    shared = tables.on_shared_seeds(figures)
    assert shared["bc", 50, "door-open"].mean == pytest.approx(60)  # seeds 1 and 3
    assert shared["cpl", 50, "door-open"].mean == pytest.approx(20)
    assert shared["bc", 50, "push-back"].mean == pytest.approx(70) and shared["cpl", 50, "push-back"] is None
    assert shared["data_best", 50, "door-open"].mean == 99


def test_mean_over_tasks_needs_every_task():
    mean = tables.mean_over_tasks([tables.Figure(40, 3, 30, 0), tables.Figure(60, 4, 50, 0)])
    assert (mean.mean, mean.two_se, mean.last) == (50, 2.5, 40)  # sqrt(3^2 + 4^2) / 2
    assert tables.mean_over_tasks([tables.Figure(40), None]) is None


def test_the_papers_figures_give_the_papers_averages():
    assert len(paper.FIGURES) == 14 * 9 * 2 + 10 * 2 * 2  # the State updates on Meta-World alone
    methods = [m for m in paper.METHODS if m != "dppo"]
    for n, expected in (
        (50, [46.2, 48.9, 42.9, 42.1, 50.1, 45.7, 51.6, 50.8]),  # the paper's row "Avg. over tasks"
        (500, [57.3, 70.7, 67.6, 67.3, 73.5, 59.8, 78.2, 78.3]),
    ):
        means = [np.mean([paper.FIGURES[task, m, n][0] for task in paper.METAWORLD]) for m in methods]
        assert means == pytest.approx(expected)
    assert np.mean(paper.SPEARMAN["paws_transformer"]) == pytest.approx(0.217)
    assert np.mean(paper.SPEARMAN["paws_transformer_state"]) == pytest.approx(0.054)


# ---- tables ----
def write_result(folder, method, task, n_pref, seed, level, options=(), data="", **changes) -> None:
    cell = sweep.Cell(method, task, n_pref, seed, tuple(options), data)
    row = [level / 100, None] if task in paper.METAWORLD else [None, level]
    result = dict(algorithm=cell.exp_name, task=task, n_pref=n_pref, seed=seed, success_peak=0, return_peak=None)
    result |= dict(curve=[[500 * (i + 1), *row] for i in range(20)], seconds=dict(total=60.0), machine="a machine")
    result |= dict(method=method, options=dict(options), data=data, flags="", preset="quick", commit="abc", **{})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{cell.name}.json").write_text(json.dumps(result | changes))


def make_page(tmp_path, **flags) -> str:
    where = dict(results=str(tmp_path), markdown=str(tmp_path / "docs" / "page.md"), csv=str(tmp_path / "t.csv"))
    tables.main(tables.Args(**where, **flags))
    return (tmp_path / "docs" / "page.md").read_text()


def test_page(tmp_path):
    folder = tmp_path / "quick"
    for task in paper.METAWORLD:
        for method, level in (("bc", 50), ("paws_mlp", 90), ("paws_oracle", 95)):
            for seed, shift in ((1, -4), (2, 4)):
                write_result(folder, method, task, 50, seed, level + shift)
    write_result(folder, "bc", "hopper", 500, 1, 410)
    for share, level in (("0.2", 70), ("0.3", 60)):
        for task in sweep.N_EFF_TASKS:
            write_result(folder, "paws_mlp", task, 500, 1, level, [("n-eff", share)])
    for i, labeler in enumerate(("anna", "ben"), 1):
        write_result(folder, "bc", "door-open", 50, i, 70 + i, data=labeler)
    write_result(folder, "paws_mlp", "drawer-open", 500, 1, 80, flags=tables.PAPERS_SIZE)
    write_result(folder, "paws_mlp", "drawer-open", 500, 2, 10, flags="--batch-size 1")  # in no table
    page = make_page(tmp_path)
    door = next(line for line in page.split("\n") if line.startswith("| Door Open | 50±8 (48±6) |"))
    assert "| **90±8** (65±15) |" in door and "| 95±8 |" in door  # SE of 46 and 54: 4 sqrt(2) / sqrt(2)
    assert "| Avg. over tasks | 50.0±2.5 (46.2) | – (48.9) |" in page and "| **90.0±2.5** (50.8) |" in page
    assert "| Improvement over BC (%) | 0.0 (0.0) |" in page and "| 80.0 (10.0) |" in page
    assert "| Avg. of last 8 | 50.0±2.5 |" in page and "| IQM [95 %] | 50.0 [" in page
    assert "| Hopper | 410 (401±22) |" in page  # nothing to compare with: not bold
    assert "| 20% | – | 70.0 |" in page and "| 30% | – | 60.0 |" in page and "| 40% | – | – |" in page
    assert "| Door Open | 72±1 (74±2) |" in page  # human labels
    assert "| Drawer Open | – (75±3) | 80 |" in page  # the paper's advantage model
    assert (
        "`python benchmark/sweep.py --preset quick`; preset quick; seeds per figure: 2; commit abc; a machine." in page
    )
    rows = list(csv.DictReader(open(tmp_path / "t.csv")))
    (found,) = (row for row in rows if (row["method"], row["task"], row["data"]) == ("bc", "door-open", ""))
    assert [found[key] for key in ("peak", "peak_2se", "last8", "paper", "seeds")] == [
        "50.0",
        "8.0",
        "50.0",
        "48.0",
        "2",
    ]
    written = tmp_path / "docs" / "page.md"
    written.write_text(page.replace("<!-- notes -->\n", "<!-- notes -->\nOurs differ.\n"))
    assert "<!-- notes -->\nOurs differ.\n<!-- end -->" in make_page(tmp_path)


def test_differences_are_of_the_same_task_and_seed(tmp_path):
    levels = {("paws_mlp", ()): (10, 50, 30), ("paws_mlp", (("n-eff", "0.3"),)): (14, 60), ("paws_mlp_chi2", ()): (90,)}
    for (method, options), seeds in levels.items():
        for seed, level in enumerate(seeds, 1):
            write_result(tmp_path / "quick", method, "door-open", 50, seed, level, options)
    page = make_page(tmp_path)
    assert "30 % - 10 % | +7.0 ± 6.0 (2) | – |" in page  # 4 and 10; one pair has no standard error
    assert "30 % - exponential, 30 % | – | – |" in page and "exponential, 10 % | – | – |" in page


def test_the_results_page_is_that_of_the_collected_results(tmp_path, monkeypatch):
    """tables.py was run after the last result was added."""
    for folder in ("docs", "benchmark/results"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    tables.main(tables.Args(results="benchmark/results", markdown="docs/results.md"))
    for page in ("docs/results.md", "benchmark/results/tables.csv"):
        assert Path(page).read_text() == (ROOT / page).read_text(), page


def test_an_incomplete_method_does_not_cut_the_seeds_of_others(tmp_path):
    """A method that has no average itself has no say in which seeds the averages take."""
    for task in paper.METAWORLD:
        for method, level in (("bc", 50), ("paws_mlp", 90)):
            for seed, shift in ((1, -4), (2, 4)):
                write_result(tmp_path / "quick", method, task, 500, seed, level + shift)
    write_result(tmp_path / "quick", "cpl", "door-open", 500, 1, 10)
    page = make_page(tmp_path)
    assert "| Avg. over tasks | 50.0±2.5 (57.3) | – (70.7) | – (67.6) |" in page
    empty = page.partition("### Shorter pieces")[2].partition("###")[0]
    assert "No runs yet" in empty and "commit" not in empty


def test_the_human_study_takes_each_labeler_with_50_answers(tmp_path, capsys):
    folder = tmp_path / "button-press"
    folder.mkdir()
    for name, answers in (("anna", 50), ("ben", 51), ("export", 121), ("me", 20)):
        np.savez(folder / f"{name}.npz", prefs=np.zeros((answers, 2), int))
    cells = sweep.study_cells(sweep.Args(study="human", tasks=("button-press",), labels_dir=str(tmp_path)))
    assert {Path(cell.data).stem for cell in cells} == {"anna", "ben"} and len({cell.seed for cell in cells}) == 2
    assert "me.npz: left out, it has 20 answers of 50" in capsys.readouterr().out


def test_page_refuses_what_cannot_be_averaged(tmp_path):
    folder = tmp_path / "quick"
    write_result(folder, "bc", "door-open", 50, 1, 50)
    write_result(folder, "cpl", "door-open", 50, 1, 50, commit="def")
    with pytest.raises(SystemExit, match="results of 2 commits .*bc__door-open.*cpl__door-open.*--mixed"):
        make_page(tmp_path)
    assert "commit abc, def" in make_page(tmp_path, mixed=True)
    write_result(folder, "bc", "door-open", 50, 2, 50, curve=[[100, 0.5, None]])
    with pytest.raises(SystemExit, match="different updates"):
        make_page(tmp_path)


# ---- significance, spearman, imitation ----
def test_significance_is_welch_with_both_corrections():
    rng = np.random.default_rng(0)
    groups = {name: rng.normal(level, 5, size=10) for name, level in (("paws_mlp", 86), ("bc", 74), ("cpl", 80))}
    rows = significance.compare({"door-open": groups})
    assert [(row.variant, row.baseline) for row in rows] == [("paws_mlp", "bc"), ("paws_mlp", "cpl")]
    for row in rows:
        a, b = groups["paws_mlp"], groups[row.baseline]
        va, vb = a.var(ddof=1) / 10, b.var(ddof=1) / 10
        t = (a.mean() - b.mean()) / np.sqrt(va + vb)
        df = (va + vb) ** 2 / (va**2 / 9 + vb**2 / 9)  # Welch-Satterthwaite
        assert row.p == pytest.approx(2 * stats.t.sf(abs(t), df))
        assert row.bonferroni == pytest.approx(min(1, 2 * row.p))
    low, high = sorted(row.p for row in rows)
    assert sorted(row.benjamini_hochberg for row in rows) == pytest.approx(sorted((min(2 * low, high), high)))
    (same,) = significance.compare({"door-open": {"paws_mlp": np.full(2, 100.0), "bc": np.full(2, 98.0)}})
    assert same.p == 1  # two equal seeds of each prove nothing


def test_spearman_is_per_segment_then_averaged():
    rng = np.random.default_rng(0)
    ours, expert = rng.normal(size=(2, 5, 64))
    expected = np.mean([stats.spearmanr(a, b).statistic for a, b in zip(ours, expert, strict=True)])
    assert spearman.mean_rank_correlation(ours, expert) == pytest.approx(expected)
    assert spearman.mean_rank_correlation(ours, np.exp(3 * ours)) == pytest.approx(1)


def test_weights_and_errors_by_data_policy():
    """Four segments of two steps, the last two by the best policy."""
    obs, act = torch.zeros(4, 2, 1), torch.tensor([0.0, 0.5, 1.0, -1.0])[:, None, None].expand(4, 2, 1)
    policy = {
        f"net.{i}.{part}": torch.zeros(shape) for i in (0, 3, 6) for part, shape in (("weight", (1, 1)), ("bias", 1))
    }
    segments = torch.tensor([0, 2, 3])  # of four
    paws = dict(policy=policy, weights=torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64), segments=segments)
    found = imitation.measures(paws, obs.numpy(), act.numpy(), np.array([0, 0, 1, 1]), np.array([0, 1, 2, 1]))
    assert found["error_best"] == 1.0 and found["error_others"] == 0.125  # the policy's action is 0
    assert found["weight_best"] == pytest.approx(0.9)
    assert found["weight_early"] == pytest.approx(0.7)  # the one with 0.3 starts at step 2, when a segment is over
    assert found["n_eff"] == pytest.approx(1 / (2 * (0.05**2 + 0.15**2 + 0.3**2)) / 6)  # of three segments

    def critic(slope):  # slope * act + 2, as two layers
        return [torch.tensor([[0.0, slope]]), torch.tensor([2.0]), torch.eye(1), torch.zeros(1)]

    value = dict(enumerate([torch.zeros(1, 1), torch.tensor([2.0]), torch.eye(1), torch.zeros(1)]))  # 2
    iql = dict(policy=policy, value=value, args={"temperature": 10.0})
    iql["critics"] = dict(enumerate([*critic(1.0), *critic(0.1)]))
    u = np.array([0.0, 0.05, 0.1, -1.0])  # min(act, 0.1 act): a ReLU of a positive sum changes nothing
    expected = np.exp(10 * u) / np.exp(10 * u).sum()
    rest = obs.numpy(), act.numpy(), np.arange(4), np.zeros(4)
    assert imitation.measures(iql, *rest)["weight_best"] == pytest.approx(expected[-1], rel=1e-5)
    assert imitation.measures(dict(policy=policy), *rest)["n_eff"] is None


def test_runs_with_further_flags_are_left_out_or_methods_of_their_own(tmp_path):
    for i, (method, flags) in enumerate(
        [("cpl", ""), ("cpl", tables.LONGER), ("paws_mlp_chi2", tables.PAPERS_SIZE), ("bc", "--x 1")]
    ):
        run = dict(method=method, flags=flags, task="door-open", curve=[[1, 0.5, None]])
        (tmp_path / f"{i}.json").write_text(json.dumps(run))
    assert [run["method"] for run in tables.load_results(tmp_path)] == ["cpl", "cpl_longer", "paws_mlp_chi2_512"]


def test_imitation_is_compared_on_the_tasks_that_all_methods_have(tmp_path):
    lines = ["method,task,n_pref,seed,error_best,error_others,weight_best,n_eff,commit"]
    lines += ["cpl,door-open,500,1,0.2,0.4,,,abc", "cpl,sweep-into,500,1,9,9,,,abc"]
    lines += [f"p_iql,door-open,500,{seed},{error},0.5,0.25,1,abc" for seed, error in ((1, 0.1), (2, 0.3))]
    (tmp_path / "imitation.csv").write_text("\n".join(lines))
    table = tables.imitation_table(tmp_path / "imitation.csv", 500)
    assert "| CPL | 0.20 | 0.40 | – | – | 1 |" in table and "| P-IQL | 0.20 | 0.50 | 0.25 | 1.00 | 2 |" in table
    assert "over door-open; commit abc" in table
    assert "| CPL |" not in tables.imitation_table(tmp_path / "nothing.csv", 500)


def test_coverage_is_binned_and_correlated_within_tasks(tmp_path):
    lines = ["method,task,n_pref,seed,weight_best,weight_early,success,commit"]
    lines += [f"a,door-open,50,1,{0.9 - w},{w},{w},abc" for w in (0.05, 0.15, 0.17, 0.3)]
    lines += [f"a,sweep-into,50,1,{w},{w - 0.1},{w - 0.1},abc" for w in (0.1, 0.12)]  # lower in both
    (tmp_path / "coverage.csv").write_text("\n".join(lines))
    table = tables.coverage_table(tmp_path / "coverage.csv")
    for line in ("below 0.1 | 2 (3)", "0.1 to 0.2 | 16 (2)", "0.2 to 0.3 | –", "0.3 and more | 30 (1)"):
        assert f"| {line} | – |" in table
    assert "success with this weight | 1.00 | – |" in table and "commit abc" in table
    success = np.array([0.05, 0.15, 0.17, 0.3]) - 0.1675, np.array([-0.01, 0.01])
    expected = stats.spearmanr([*-success[0], *success[1]], [*success[0], *success[1]]).statistic
    assert f"that on the best policy | {expected:.2f} | – |" in table
    assert "below 0.1 | – | – |" in tables.coverage_table(tmp_path / "nothing.csv")


def test_n_eff_of_a_temperature_is_the_definition():
    advantages, lam = np.random.default_rng(0).normal(size=200), 0.7
    weights = np.exp(advantages / lam) / np.exp(advantages / lam).sum()
    for factor in (0.5, 1.0, 3.0):
        w = np.exp(advantages / (factor * lam))
        expected = 1 / np.square(w / w.sum()).sum()
        assert figures.n_eff_of_temperature(weights, np.array([factor]))[0] == pytest.approx(expected)


def test_figures_are_drawn_from_results(tmp_path):
    for seed, method in ((s, m) for s in (1, 2) for m in ("bc", "paws_mlp")):
        for task in paper.METAWORLD:
            write_result(tmp_path / "quick", method, task, 500, seed, 40 + 5 * seed)
    for task in sweep.WEIGHTS_TASKS:
        write_result(tmp_path / "quick", "paws_mlp", task, 500, 1, 70, [("n-eff", "0.3")])
        for n in (20, 100):
            write_result(tmp_path / "quick", "paws_mlp", task, n, 1, 30)
    figures.main(figures.Args(results=str(tmp_path), out=str(tmp_path / "out")))
    names = (
        "quick_effective_samples",
        "quick_shape_of_weights",
        "quick_number_of_preferences",
        "quick_curves_metaworld_500",
        "quick_performance_profile_500",
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        f"{n}.{end}" for n in names for end in ("png", "pdf")
    }


def test_every_kind_of_minibatch_is_unbiased():
    torch.manual_seed(0)
    values, weights = torch.rand(6, 4), torch.softmax(2 * torch.randn(6, dtype=torch.float64), 0)
    expected = (weights * values.mean(1)).sum().item()
    for name, draw in speed.minibatches(weights, 4).items():
        drawn = []
        for _ in range(2000):
            segments, steps, factor = draw()
            drawn.append((factor * values[segments, steps]).mean().item())
        assert np.mean(drawn) == pytest.approx(expected, abs=4 * stats.sem(drawn)), name


# ---- what a sweep consists of ----
def cells_of(**flags) -> list[sweep.Cell]:
    return sweep.all_cells(sweep.Args(**flags))


def test_order_of_the_runs():
    cells = cells_of(seeds=(1, 2))
    assert len(cells) == len(set(cells)) == 2 * 2 * 10 * len(sweep.COMPARED)
    quarter = len(cells) // 4
    assert {(c.seed, c.n_pref) for c in cells[:quarter]} == {(1, 500)}
    assert {(c.seed, c.n_pref) for c in cells[quarter : 2 * quarter]} == {(1, 50)}
    first = cells[2 * quarter : 2 * quarter + 10 * len(sweep.NOISY_WITH_50)]
    assert {(c.seed, c.n_pref) for c in first} == {(2, 50)} and {c.method for c in first} == set(sweep.NOISY_WITH_50)


def test_preset_paper_runs_dppo_once():
    assert "dppo_defaults" in {c.method for c in cells_of()} - {c.method for c in cells_of(preset="paper")}


def test_every_segment_length_has_as_many_steps_in_an_update():
    setup = sweep.Setup("quick", Path("runs"), "abc")
    for cell in cells_of(study="segment-length", tasks=("door-open",), seeds=(1,)):
        flags = sweep.flags_of(cell, setup)
        pairs = int(flags[flags.index("--advantage-batch-size") + 1])
        assert pairs * int(Path(cell.data).stem.removeprefix("length")) == 1024


@pytest.mark.parametrize("study", ["", "weights", "segment-length"])
def test_shards_are_a_partition_and_keep_a_run_with_its_advantage_model(study):
    shards = [cells_of(study=study, shard=f"{i}/3", flags="--no-eval") for i in range(3)]
    assert sorted(c.name for shard in shards for c in shard) == sorted(
        c.name for c in cells_of(study=study, flags="--no-eval")
    )
    assert max(map(len, shards)) - min(map(len, shards)) <= 9
    for shard in shards:
        assert {c.advantage_from for c in shard} - {""} <= {c.name for c in shard}


def test_the_study_of_weights_is_complete():
    cells = cells_of(study="weights")
    assert len(cells) == 2 * 6 * 3 * (4 + 8)  # KL 10 % is paws_mlp, chi2 30 % paws_mlp_chi2
    cell = next(c for c in cells if c.exp_name == "paws_mlp_trust-region-chi2_n-eff-0.2")
    assert cell.advantage_from == f"paws_mlp__{cell.task}__n{cell.n_pref}__s{cell.seed}"
    setup = sweep.Setup("quick", Path("runs"), "abc")
    assert "--trust-region chi2 --n-eff 0.2 --advantage-from runs/" in " ".join(sweep.flags_of(cell, setup))


@pytest.mark.parametrize("script", sorted({script for script, _ in sweep.METHODS.values()}))
def test_every_command_is_one_that_its_script_takes(script):
    module = load_script(Path(script).stem)
    studies = [
        cells_of(study=study, seeds=(1,))
        for study in ("", "n-eff", "update-segment-length", "state", "weights", "starts")
    ]
    cells = [*cells_of(methods=tuple(sweep.METHODS), tasks=("door-open", "hopper")), *sum(studies, [])]
    for preset in sweep.PRESETS:
        setup = sweep.Setup(preset, Path("runs"), "abc")
        commands = {tuple(sweep.flags_of(c, setup)): c for c in cells if sweep.METHODS[c.method][0] == script}
        for flags, cell in commands.items():
            args = tyro.cli(module.Args, args=flags)
            assert (args.task, args.n_pref, args.exp_name) == (cell.task, cell.n_pref, cell.exp_name)
            if preset == "quick" and not cell.advantage_from:
                assert args.total_steps // args.eval_every == 20


def test_shorter_segments(tmp_path):
    sweep.write_shorter_segments(tmp_path / "a" / "length16.npz", "door-open", 16)
    with np.load(tmp_path / "a" / "length16.npz") as file:
        short, prefs = file["obs"], file["prefs"]
    with np.load(ROOT / "data" / "door-open.npz") as file:
        whole, logp = file["obs"], file["expert_logp"]
    assert short.shape == (1000, 16, 35) and len(prefs) == 40_000 and (prefs[:, 0] != prefs[:, 1]).all()
    scores = []
    for i in range(100):
        (start,) = (k for k in range(49) if (whole[i, k : k + 16] == short[i]).all())
        scores.append(logp[i, start : start + 16].sum())
    known = prefs[(prefs < 100).all(1)]
    assert len(known) > 100 and all(scores[a] >= scores[b] for a, b in known)


# ---- runs ----
TINY = "--total-steps 20 --no-eval --no-cuda"


def arguments(*flags: str, tiny: str = TINY) -> list[str]:
    grid = ["--methods", "bc", "--tasks", "door-open", "--n-prefs", "10", "--workers", "1", "--dirty"]
    return [sys.executable, str(ROOT / "benchmark" / "sweep.py"), *grid, f"--flags={tiny}", *flags]


def run_sweep(tmp_path, *flags: str, tiny: str = TINY):
    return subprocess.run(arguments(*flags, tiny=tiny), capture_output=True, text=True, cwd=tmp_path, timeout=300)


def job(tmp_path, seed: int = 1, tiny: str = TINY) -> Path:
    return tmp_path / "runs" / "sweep" / "quick" / sweep.Cell("bc", "door-open", 10, seed, flags=tiny).name


def collected(tmp_path) -> list[dict]:
    return [json.loads(path.read_text()) for path in (tmp_path / "results" / "quick").glob("*.json")]


@pytest.fixture
def no_git(monkeypatch):
    """Commits that others make meanwhile do not turn into "another commit, start anew"."""
    monkeypatch.setenv("GIT_DIR", "nowhere")


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def processes(folder: Path) -> list[str]:
    """Command lines that name the folder."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            lines.append(path.read_text(errors="replace"))
    return [line for line in lines if str(folder) in line]


def test_mistakes_end_with_one_line(tmp_path):
    for flags, message in (
        (["--workers", "0"], "error: --workers 0: at least 1"),
        (["--methods", "nonsense"], "error: --methods nonsense: choose from bc, "),
        (["--shard", "3/3"], "error: --shard 3/3: give i/n"),
        (["--study", "human"], "error: labels/door-open: no labeler's file"),
    ):
        done = run_sweep(tmp_path, *flags)
        assert done.returncode == 1 and done.stderr.startswith(message) and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_uncommitted_code_is_refused(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="no git checkout"):
        sweep.commit(False)
    for name in ("script.py", "page.md"):
        (tmp_path / name).write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    (tmp_path / "page.md").write_text("2")  # pages do not change results
    assert git("rev-parse", "HEAD").startswith(sweep.commit(False))
    new = tmp_path / "baselines" / "new.py"
    new.parent.mkdir()
    new.write_text("1")
    with pytest.raises(SystemExit, match=r"uncommitted code \(baselines/new.py\)"):
        sweep.commit(False)
    new.unlink()
    (tmp_path / "script.py").write_text("2")
    with pytest.raises(SystemExit, match=r"uncommitted code \(script.py\): commit it, or run with --dirty"):
        sweep.commit(False)
    assert sweep.commit(True).endswith("-dirty")


def test_dry_run_tells_the_hours(tmp_path):
    write_result(tmp_path / "results" / "quick", "bc", "push-back", 50, 1, 50, seconds={"total": 7200.0})
    flags = ("--dry-run", "--methods", "bc", "paws_transformer_chi2", "--workers", "2")
    lines = run_sweep(tmp_path, *flags, tiny="").stdout.splitlines()
    assert len(lines) == 3 and lines[0].startswith(
        shlex.join([sys.executable, str(ROOT / "baselines" / "bc.py"), "--task"])
    )
    assert lines[2].startswith("# 2 runs, 2.0 h of one thread, 1.0 h with 2, without 1 runs of methods that")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_every_signal_ends_the_runs_too(tmp_path):
    endless = "--total-steps 1000000 --no-eval --no-cuda"
    folder = job(tmp_path, tiny=endless)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGKILL):
        process = subprocess.Popen(arguments(tiny=endless), cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        try:
            wait_for(lambda: processes(folder) and list(folder.glob("*/args.json")))
            process.send_signal(number)
            output, _ = process.communicate(timeout=20)
            wait_for(lambda: not processes(folder), 10)
        finally:
            process.kill()
        if number != signal.SIGKILL:
            assert process.returncode == 128 + number and "the same command continues" in output
    assert len(list(folder.glob("*/args.json"))) == 1 and not list(folder.glob("*/result.json"))


@pytest.mark.slow
def test_sweep_resumes_collects_and_repeats_only_what_is_damaged(tmp_path, no_git):
    # A run that ended after its last update, before its result: leave out what follows.
    folder = job(tmp_path)
    cell = sweep.Cell("bc", "door-open", 10, 1, flags=TINY)
    setup = sweep.Setup("quick", folder.parent, sweep.commit(True))
    leave = (
        "import bc; bc.Run.CHECKPOINT_SECONDS = 0; bc.Run.finish = lambda *_, **__: {}; bc.main(bc.tyro.cli(bc.Args))"
    )
    first = [*sweep.command(cell, setup)[2:]]
    subprocess.run(
        [sys.executable, "-c", leave, *first], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": "baselines"}
    )
    (run,) = (path.parent for path in folder.glob("*/checkpoint.pt"))
    sweep.write(folder / "sweep.json", json.dumps({"flags": sweep.flags_of(cell, setup), "commit": setup.commit}))
    assert f"--resume {run}" in run_sweep(tmp_path, "--dry-run").stdout
    done = run_sweep(tmp_path)
    assert done.returncode == 0 and "1 runs, 0 of them complete" in done.stdout, done.stdout + done.stderr
    assert "continuing after {'policy': 20}" in (folder / "log.txt").read_text()
    (result,) = collected(tmp_path)
    assert (
        result["preset"] == "quick" and result["commit"] == setup.commit and result["machine"] and result["steps"] == 20
    )

    again = run_sweep(tmp_path)
    assert "1 runs, 1 of them complete" in again.stdout and (folder / "log.txt").read_text().count("run directory") == 1

    moved = folder.rename(tmp_path / "moved")  # as on another machine, which has the collected result alone
    assert "1 runs, 1 of them complete" in run_sweep(tmp_path).stdout and not folder.exists()
    moved.rename(folder)

    (run / "result.json").unlink()
    (run / "checkpoint.pt").write_bytes(b"garbage")  # resuming fails, so the second attempt starts anew
    done = run_sweep(tmp_path)
    assert done.returncode == 0 and "checkpoint.pt: damaged" in (folder / "log.txt").read_text(), done.stdout
    (second,) = (path.parent for path in folder.glob("*/result.json"))
    assert second != run and not run.exists()

    (second / "result.json").write_text('{"curve": [')  # torn: as if it were not there
    done = run_sweep(tmp_path)
    assert done.returncode == 0 and "1 runs, 0 of them complete" in done.stdout, done.stdout + done.stderr
    assert not second.exists() and len(list(folder.glob("*/result.json"))) == 1 and len(collected(tmp_path)) == 1

    changed = json.loads((folder / "sweep.json").read_text())
    sweep.write(folder / "sweep.json", json.dumps({**changed, "flags": ["--seed", "7"]}))
    assert "was run with other flags (--seed 7): remove it" in run_sweep(tmp_path).stderr


@pytest.mark.slow
def test_a_failing_run_is_tried_twice_and_leaves_the_others_alone(tmp_path):
    bad = "--data nowhere.npz --no-eval --no-cuda"
    done = run_sweep(tmp_path, tiny=bad)
    assert done.returncode == 1 and done.stdout.splitlines()[-1].startswith("FAILED bc__door-open__n10__s1")
    log = (job(tmp_path, tiny=bad) / "log.txt").read_text()
    assert log.count("error: nowhere.npz") == 2 and "error: nowhere.npz" in done.stdout
    done = run_sweep(tmp_path, tiny="--no-such-flag")
    assert "Unrecognized options: --no-such-flag" in done.stdout


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_runs(tmp_path):
    command = arguments("--seeds", "1", "2", "3")
    sweeps = [subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in sweeps]
    assert [process.returncode for process in sweeps] == [0, 0], outputs
    for seed in (1, 2, 3):
        assert (job(tmp_path, seed) / "log.txt").read_text().count("run directory") == 1
    assert sorted(result["seed"] for result in collected(tmp_path)) == [1, 2, 3]


@pytest.mark.slow
def test_ray_cluster_loses_a_worker_and_no_result(tmp_path):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    seeds, long = ("1", "2", "3"), "--total-steps 300 --no-eval --no-cuda"

    def run_of(seed: str) -> list[Path]:
        """/proc folders of the script that a worker runs."""
        folder = os.fsencode(job(tmp_path, int(seed), long)) + b"\0"
        return [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if folder in read(path)]

    def read(path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError:  # ended meanwhile
            return b""

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        command = arguments("--seeds", *seeds, "--ray", cluster.address, tiny=long)
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        wait_for(lambda: run_of("1") and run_of("2"), 120)
        (script,) = run_of("1")
        worker = int((script / "stat").read_text().rpartition(")")[2].split()[1])  # its parent
        os.kill(worker, signal.SIGKILL)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
    finally:
        cluster.shutdown()
    assert not script.exists() and sorted(str(result["seed"]) for result in collected(tmp_path)) == list(seeds)
    for seed in seeds:
        assert len(list(job(tmp_path, int(seed), long).glob("*/result.json"))) == 1
