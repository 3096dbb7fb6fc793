"""The throughput figures and the profile: nothing here depends on how fast the machine is."""
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid.baselines.networks import NetworkConfig
from xland_minigrid.baselines.ppo import PPOConfig
from xland_minigrid.baselines.rl2 import TrainConfig, make_round, start_run, table_6
from xland_minigrid.benchmarks.benchmark import generate_benchmark
from xland_minigrid.measure import scaling
from xland_minigrid.measure.tables import profile
from xland_minigrid.measure.scaling import FIGURES, Point, draw_figure, lines_of, measure_figure, sizes_for
from xland_minigrid.measure.report import run
from xland_minigrid.measure.throughput import Case, Stepper, engine_named, sample_tasks
from xland_minigrid.viz.widgets.scaling import lab_task

pytestmark = pytest.mark.newest

TINY = TrainConfig(size=5, max_steps=12, num_envs=8, steps_per_task=8, steps_per_update=8, total_steps=10_000, devices=1, ppo=PPOConfig(num_minibatches=2),
                   network=NetworkConfig(embedding=4, encoder_width=16, event=8, memory=16, head=16))
POINT = Point(9.0, "xland_minigrid", Case("XLand-MiniGrid-R1-9x9", num_envs=64, num_steps=16), 1e6, 9e5, 1.1e6)


# ---------------------------------------------------------------- measured once


@pytest.fixture
def fake(monkeypatch):
    "Measuring without running anything: every call is noted, and the third one is interrupted."
    calls = []

    def measured(case, engines, repeats):
        calls.append([(engine, case) for engine in engines])
        if len(calls) == 3:
            raise KeyboardInterrupt
        return [(1.0, 0.5, 2.0) for _ in engines]

    monkeypatch.setattr(scaling, "measured", measured)
    monkeypatch.setattr(scaling, "peers", lambda: ("xland_minigrid", "xminigrid"))
    return calls


@pytest.mark.parametrize("name", sorted(FIGURES))
def test_an_interrupted_figure_goes_on_and_measures_nothing_twice(name, fake, tmp_path):
    sizes = dataclasses.replace(sizes_for(quick=True), rules=(1, 3, 6, 9))
    jobs = FIGURES[name].jobs(sizes)
    if len(jobs) > 2:
        with pytest.raises(KeyboardInterrupt):
            measure_figure(name, sizes, tmp_path, progress=False)
        assert len(json.loads((tmp_path / f"{name}.json").read_text())) == len(fake[0]) + len(fake[1])
    points = measure_figure(name, sizes, tmp_path, progress=False)
    assert [(p.engine, p.case) for p in points] == [(engine, job.case) for job in jobs for engine in job.engines]
    done = [c for i, call in enumerate(fake) if not (i == 2 and len(jobs) > 2) for c in call]
    assert len(done) == len(set(map(str, done))) == len(points)  # nothing twice
    count = len(fake)
    assert measure_figure(name, sizes, tmp_path, progress=False) == points and len(fake) == count
    draw_figure(name, points, path=tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 3000


def test_other_circumstances_are_measured_again(fake, tmp_path):
    sizes = dataclasses.replace(sizes_for(quick=True), grids=(9,), num_envs=(16,))
    measure_figure("5b", sizes, tmp_path, progress=False)
    measure_figure("5b", dataclasses.replace(sizes, num_steps=17), tmp_path, progress=False)
    assert len(fake) == 2 and len(json.loads((tmp_path / "5b.json").read_text())) == 4


def test_with_ours_known_only_the_peer_is_measured(fake, tmp_path, monkeypatch):
    sizes = dataclasses.replace(sizes_for(quick=True), grids=(9,), num_envs=(16,))
    with monkeypatch.context() as patch:
        patch.setattr(scaling, "peers", lambda: ("xland_minigrid",))
        measure_figure("5b", sizes, tmp_path, progress=False)
    measure_figure("5b", sizes, tmp_path, progress=False)
    assert [[engine for engine, _ in call] for call in fake] == [["xland_minigrid"], ["xminigrid"]]


# ---------------------------------------------------------------- what is measured


def test_figures_hold_what_the_paper_shows():
    sizes = sizes_for()
    cases = {name: [job.case for job in figure.jobs(sizes)] for name, figure in FIGURES.items()}
    assert {c.num_envs for c in cases["5a"]} == set(sizes.num_envs)
    assert max(c.size for c in cases["5b"]) >= 25 and len({c.num_envs for c in cases["5b"]}) > 1
    assert max(c.rules for c in cases["5c"]) == 24 and {(c.tasks, c.size) for c in cases["5c"]} == {("near", 16)}
    for name in ("5d", "5e", "5f"):
        assert {c.devices for c in cases[name]} == {1, 2, 4}
    assert all(isinstance(c, TrainConfig) and c.steps_per_update == 256 for c in cases["5f"])
    assert [getattr(c, "network", None) and c.network.dtype for c in cases["10"]] == [None, "float32", "bfloat16"]
    assert all(c.images for c in cases["13"])
    assert scaling.training_config(16_384, dataclasses.replace(sizes_for(), units=1024)).network == table_6().network


def test_the_rule_of_5c_really_is_there_as_often_as_said():
    tasks = sample_tasks(Case("XLand-MiniGrid-R1-9x9", "near", rules=24, num_envs=3))
    assert tasks.rules.shape == (3, 24, 7) and (tasks.rules == lab_task(1).rules[0]).all() and tasks.rules[0, 0, 0] == 3


def test_several_devices_step_all_worlds():
    "Four devices: the worlds lie on all of them, their tasks with them, and no two devices draw the same actions."
    case = Case("XLand-MiniGrid-R1-9x9", "near", 1, num_envs=8, num_steps=4, devices=4)
    stepper = Stepper(engine_named("xland_minigrid", case, sample_tasks(case)))
    assert stepper.carry.observation.shape[0] == 8 and len(stepper.carry.observation.sharding.device_set) == 4
    stepper()
    grids = np.asarray(stepper.carry.state.grid)
    assert len({grid.tobytes() for grid in grids}) == 8


def test_averages_and_lines():
    points = [dataclasses.replace(POINT, case=dataclasses.replace(POINT.case, env=env), x=8.0, rate=rate, low=rate / 2, high=rate * 2) for env, rate in (("a", 10.0), ("b", 30.0))]
    assert lines_of("5a", points) == {"xland_minigrid": [(8.0, 20.0, 10.0, 40.0)]} and "Mean over 2 environments" in scaling.note(points, 3)
    both = [POINT, dataclasses.replace(POINT, engine="xminigrid", rate=1e5)]
    assert "| 10.0 |" in scaling.figure_table("5b", both)
    assert "forced host devices" in scaling.note([dataclasses.replace(POINT, case=dataclasses.replace(POINT.case, devices=2))], 3) and "forced" not in scaling.note([POINT], 3)


# ---------------------------------------------------------------- counting


@settings(max_examples=25)
@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_products_are_counted_wherever_they_hide(m, k, n, batch, length):
    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    assert profile.matrix_flops(lambda a, b: jax.vmap(jnp.matmul, (0, None))(a, b).sum() + 1, shape(batch, m, k), shape(k, n)) == 2 * batch * m * k * n
    looped = lambda x, w: jax.lax.scan(lambda h, _: (jax.jit(jnp.matmul)(h, w), None), x, length=length)[0]
    assert profile.matrix_flops(looped, shape(m, k), shape(k, k)) == 2 * length * m * k * k
    assert profile.matrix_flops(jax.grad(lambda x, w: looped(x, w).sum(), argnums=(0, 1)), shape(m, k), shape(k, k)) == 3 * 2 * length * m * k * k
    branch = lambda p, x, w: jax.lax.cond(p, lambda: x @ w, lambda: x)
    assert profile.matrix_flops(branch, jax.ShapeDtypeStruct((), bool), shape(m, k), shape(k, k)) == 2 * m * k * k
    conv = lambda x, w: jax.lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    assert profile.matrix_flops(conv, shape(batch, 6, 6, k), shape(2, 2, k, n)) == 2 * batch * 25 * 4 * k * n


@pytest.mark.parametrize("changes", [{"encoder_kind": "conv", "core": "mingru"}, {"layers": 2, "dtype": "bfloat16"}])
def test_the_networks_flops_are_counted_for_every_kind(changes):
    config = dataclasses.replace(TINY, network=dataclasses.replace(TINY.network, **changes))
    count, plain = profile.network_flops(config), profile.network_flops(TINY)
    second_layer = 2 * (16 * 3 * 16 + 16 * 3 * 16)
    assert count == plain + second_layer if "layers" in changes else count > 0.7 * plain and count != plain


def test_a_round_does_the_products_that_the_profile_needs_and_little_more():
    "The program that trains, counted whole: collect once, and three times the network per epoch. Backwards nothing flows below the first layer, so a little less."
    tasks = generate_benchmark("trivial", n=16)
    whole = profile.matrix_flops(lambda state, tasks: make_round(TINY)(state, tasks), jax.eval_shape(lambda: start_run(TINY)), tasks)
    needed = (1 + 3 * TINY.ppo.update_epochs) * profile.network_flops(TINY) * TINY.num_envs * TINY.steps_per_task
    assert 0.85 < whole / needed < 1.15


def test_the_share_of_the_peak_by_hand():
    parts = {"update": profile.Part(0, None, 100), "environment": profile.Part(1, None)}
    found = profile.Profile(TINY, parts, {"update": np.array([2.0, 4.0]), "environment": np.array([0.1, 0.2])}, np.array([100.0, 50.0]), 7)
    assert found.shares().tolist() == [0.5, 0.5] and "| &nbsp;&nbsp;&nbsp;&nbsp;environment | 150.0 | 5% |  |  |" in profile.profile_table(found)


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize("words, says", [
    (["--figure", "6"], "choose from 5a"), (["--figure", "5a", "7"], "Unknown figure '7'")])
def test_wrong_words_are_refused_before_anything_is_written(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=says):
        run(scaling.report, words)
    assert not list(tmp_path.iterdir())


def test_wrong_circumstances_are_refused():
    for wrong, says in ((dict(devices=3), "multiple of devices"), (dict(devices=0), "at least 1"), (dict(devices=64), "from 1 to 4")):
        with pytest.raises(ValueError, match=says):
            Case("XLand-MiniGrid-R1-9x9", num_envs=64, **wrong)
    with pytest.raises(ValueError, match="preset 'toaster'"):
        next(profile.report(("laptop", "toaster")))
    with pytest.raises(ValueError, match="turns is 0"):
        profile.profile_update(TINY, turns=0)


# ---------------------------------------------------------------- the commands, whole


@pytest.mark.slow
def test_figures_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "sizes_for", lambda *a, **k: dataclasses.replace(
        scaling._SIZES["quick"], num_envs=(4,), num_steps=2, repeats=1, environments=1, grids=(9,), rules=(2,), images=(4,), image_steps=1, training=(8,), sequence=4, units=8))
    monkeypatch.setattr(scaling, "peers", lambda: ("xland_minigrid",))
    run(scaling.report, ["--figure", "all", "--out", str(tmp_path / "found.md")])
    text = (tmp_path / "found.md").read_text()
    for name in FIGURES:
        assert f"## Figure {name}:" in text and f"(found/{name}.png)" in text
        assert (tmp_path / "found" / f"{name}.png").stat().st_size > 3000 and (tmp_path / "found" / f"{name}.json").exists()
    assert "forced host devices" in text and "training in bfloat16" in text


@pytest.mark.slow
def test_a_profile_from_the_command_line(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "config_named", lambda name: TINY)
    run(profile.report, ["--preset", "laptop", "demo", "--turns", "1", "--out", str(tmp_path / "profile.md")])
    text = (tmp_path / "profile.md").read_text()
    assert text.count("of that peak") == 2 and "| update |" in text and "## demo" in text
