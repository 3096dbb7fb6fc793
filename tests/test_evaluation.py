"""How agents are tested: every task weighs the same, intervals hold what they promise, devices change nothing, reports parse back, experiments go on where they stopped."""
import argparse
import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid.baselines import evaluation as ev
from xland_minigrid.baselines.evaluation import (Evaluation, NetworkPolicy, RandomPolicy, Tasks, bootstrap_mean, bootstrap_quantile, evaluate, labels_of,
                                                 load_evaluation, save_evaluation, watch)
from xland_minigrid.baselines.networks import NetworkConfig
from xland_minigrid.baselines.ppo import PPOConfig
from xland_minigrid.baselines.report import (Evaluator, Protocol, curve_over_seeds, interquartile_mean, markdown, over_seeds, per_trial_over_seeds,
                                             read_evaluations, report, student_interval, table, table_rows, told,
                                             with_anchors)
from xland_minigrid.baselines.rl2 import TrainConfig, new_agent
from xland_minigrid.benchmarks import generate_benchmark
from xland_minigrid.benchmarks.difficulty import difficulty
from xland_minigrid.envs.registration import make
from xland_minigrid.envs.wrappers import GymAutoResetWrapper
from xland_minigrid.measure import experiments
from xland_minigrid.viz.plots import adaptation_curve, generalization_curves, group_bars, learning_curves

pytestmark = pytest.mark.newest

TINY = TrainConfig(size=5, max_steps=12, total_steps=2 * 960, num_envs=16, steps_per_task=60, steps_per_update=60,
                   devices=1, loggers=("jsonl",), ppo=PPOConfig(num_minibatches=4),
                   network=NetworkConfig(embedding=4, encoder_width=16, event=4, memory=16, head=16))


@pytest.fixture(scope="module")
def tasks():
    return generate_benchmark("trivial", n=96, goal_kinds=(1, 3))


@pytest.fixture(scope="module")
def world():
    "The one that agents of this configuration bring along, so that all evaluations in this file are of one world."
    return ev._world_of(TINY)


@pytest.fixture(scope="module")
def agent():
    return new_agent(TINY)


@pytest.fixture(scope="module")
def played(tasks, world):
    return evaluate(RandomPolicy(), tasks, world=world, num_trials=2, num_tasks=None, batch=16)


def made(returns, labels=None, **more):
    "An evaluation with these returns `(tasks, N)`."
    returns = np.asarray(returns, np.float64)
    return Evaluation((returns > 0).astype(float), np.where(returns > 0, 4.0, 12.0), returns, np.arange(len(returns)), labels=labels or {}, **more)


# What an evaluation says ----------------------------------------------------------------------------------------------------------------

def test_summary_by_hand():
    returns = np.array([[0.0, 0.0], [0.4, 0.0], [0.9, 0.7], [0.0, 0.0], [0.2, 0.6], [1.0, 0.8], [0.0, 0.5]])
    said, each = made(returns).summary(), returns.mean(1)
    wanted = {"return": each.mean(), "return_p20": np.quantile(each, 0.2), "return_median": np.median(each), "return_p80": np.quantile(each, 0.8),
              "return_sum": returns.sum(1).mean(), "return_sum_p20": np.quantile(returns.sum(1), 0.2), "return_sum_median": np.median(returns.sum(1)),
              "return_sum_p80": np.quantile(returns.sum(1), 0.8), "success": (returns > 0).mean(), "steps": np.where(returns > 0, 4, 12).mean(), "zero_return": 2 / 7}
    assert set(said) == set(wanted)
    for name, value in wanted.items():
        assert said[name][0] == pytest.approx(value, abs=1e-12), name
        assert said[name][1] <= said[name][0] <= said[name][2], name
    assert set(made(returns).overall()) == {"return", "return_p20", "success"}


def test_a_task_that_goes_fast_weighs_no_more():
    "One task is solved in every trial, nine in none: whatever the steps, the mean return is a tenth."
    returns = np.zeros((10, 25))
    returns[0] = 0.9
    said = made(returns).summary()
    assert said["return"][0] == pytest.approx(0.09) and said["return_sum"][0] == pytest.approx(25 * 0.09) and said["zero_return"][0] == pytest.approx(0.9)
    assert said["return_p80"][0] == 0


def test_sums_over_the_first_trials_are_comparable_with_published_ones():
    returns = np.random.default_rng(0).random((40, 25))
    assert made(returns).part(slice(None), slice(10)).summary()["return_sum"][0] == pytest.approx(returns[:, :10].sum(1).mean())
    with pytest.raises(ValueError, match="No task or no trial"):
        made(returns).part(slice(None), slice(0))


def anchor(returns, steps=4.0):
    "What another player of the same trials did, with these returns `(tasks, N)`, unknown where they are NaN."
    returns = np.asarray(returns, np.float64)
    return np.stack([returns > 0, np.where(np.isnan(returns), np.nan, steps), returns], axis=-1)


def test_compared_with_an_oracle_that_does_not_know_all_starts():
    returns, reference = np.array([[0.5, 0.0], [0.8, 0.4], [0.2, 0.2]]), np.array([[1.0, 1.0], [0.8, np.nan], [np.nan, np.nan]])
    said = made(returns, anchors={"oracle": anchor(reference)}).summary()
    assert said["normalised"][0] == pytest.approx((0.25 + 1.0) / 2) and said["regret"][0] == pytest.approx((0.75 + 0) / 2)
    assert said["normalised_p20"][0] == pytest.approx(np.quantile([0.25, 1.0], 0.2)) and said["return"][0] == pytest.approx(returns.mean())


@settings(max_examples=25)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0, 1))
def test_quantiles_are_numpys(values, q):
    at, low, high = bootstrap_quantile(values, q, resamples=40)
    assert at == pytest.approx(np.quantile(values, q)) and min(values) - 1e-9 <= low <= high <= max(values) + 1e-9
    three = bootstrap_quantile(values, [0.1, q, 0.9], resamples=40)
    assert np.shape(three) == (3, 3) and three[0][1] == pytest.approx(at) and three[1][1] == pytest.approx(low) and three[2][1] == pytest.approx(high)


def test_intervals_over_tasks_hold_what_they_promise():
    "Mean, percentiles and share of zeros of skewed scores; and an interval that is too narrow would be found out."
    random, hits = np.random.default_rng(0), np.zeros(4)
    for i in range(300):
        score = np.maximum(random.random(150) * 1.4 - 0.4, 0)
        (_, low, high), (_, *ends) = bootstrap_mean(np.stack([score, score == 0], axis=1), 300, seed=i), bootstrap_quantile(score, [0.5, 0.8], 300, seed=i)
        low, high = np.append(low, ends[0]), np.append(high, ends[1])
        hits += (low <= [0.5 / 1.4, 0.4 / 1.4, 0.3, 0.72]) & (high >= [0.5 / 1.4, 0.4 / 1.4, 0.3, 0.72])
    assert (hits >= 270).all() and (hits <= 296).all(), hits
    narrow = sum(low <= 0.5 <= high for low, high in (bootstrap_mean(random.random(150), 300, level=0.5, seed=i)[1:] for i in range(100)))
    assert narrow < 70


# Groups ---------------------------------------------------------------------------------------------------------------------------------

@settings(max_examples=25)
@given(st.lists(st.tuples(st.floats(0, 1), st.sampled_from([0.0, 1.0, 2.5, float("nan")])), min_size=1, max_size=40))
def test_groups_weighed_by_their_tasks_give_the_whole(rows):
    returns, depth = np.array([[r] for r, _ in rows]), np.array([d for _, d in rows])
    parts = made(returns, {"depth": depth}).grouped("depth")
    assert sorted(np.concatenate([p.task_ids for p in parts.values()])) == list(range(len(rows))), "every task is in one group"
    assert sum(p.returns.mean() * len(p.returns) for p in parts.values()) == pytest.approx(returns.sum(), abs=1e-9)
    assert ("unknown" in parts) == np.isnan(depth).any()


def test_labels_are_those_of_the_task(tasks, played):
    known, labels = difficulty(tasks), labels_of(tasks, played.task_ids[:10])
    for row, task in enumerate(played.task_ids[:10]):
        name = {1: "AgentHoldGoal", 3: "AgentNearGoal"}[int(np.asarray(tasks.goals)[task, 0])]
        assert labels["goal kind"][row] == played.labels["goal kind"][row] == name
        assert labels["depth"][row] == known.depth[task]


def test_fractional_labels_become_strata():
    parts = made(np.ones((50, 1)), {"hardness": np.linspace(0, 1, 50)}).grouped("hardness", bins=5)
    assert len(parts) == 5 and [len(p.returns) for p in parts.values()] == [10] * 5 and list(parts)[0] == "0 – 0.184"


def test_wrong_questions(played):
    e = played
    for call, says in [
            (lambda: e.grouped("colour"), "label 'colour'"), (lambda: e.part([]), "No task or"), (lambda: e.part(np.zeros(len(e.returns), bool)), "No task or"),
            (lambda: over_seeds([]), "at least one"), (lambda: over_seeds([e, e.part([0, 1])]), "different tasks"),
            (lambda: over_seeds([e, e.part(slice(None), slice(1))]), "different tasks"), (lambda: table_rows({}), "nothing to report"),
            (lambda: over_seeds([e, dataclasses.replace(e, anchors={"oracle": anchor(e.returns)})]), "same anchors"),
            (lambda: student_interval([]), "at least one")]:
        with pytest.raises(ValueError, match=says):
            call()


# Over seeds -----------------------------------------------------------------------------------------------------------------------------

def test_over_seeds_by_hand():
    random = np.random.default_rng(0)
    runs = [made(random.random((30, 4)) * share) for share in (0.4, 0.8, 0.9)]
    said = over_seeds(runs)
    for name, number in (("return", lambda e: e.returns.mean()), ("return_p20", lambda e: np.quantile(e.returns.mean(1), 0.2))):
        each = np.array([number(e) for e in runs])
        half = 4.302652729911275 * each.std(ddof=1) / np.sqrt(3)  # Student's t, two degrees of freedom
        assert said[name].seeds == pytest.approx(each) and said[name].mean == pytest.approx(each.mean()) and said[name].std == pytest.approx(each.std(ddof=1))
        assert (said[name].low, said[name].high) == pytest.approx((each.mean() - half, each.mean() + half))
    assert 0 <= said["zero_return"].low and said["success"].high <= 1
    pooled = np.sort(np.concatenate([e.returns.mean(1) for e in runs]))
    assert said["return_iqm"].mean == pytest.approx(pooled[22:-22].mean()) and said["return_iqm"].low < said["return_iqm"].mean < said["return_iqm"].high
    one = over_seeds(runs[0])
    assert (one["return"].low, one["return"].high) == runs[0].summary()["return"][1:] and np.isnan(one["return"].std)


def test_interquartile_mean():
    for n in (1, 2, 3, 4, 7, 100):
        values = np.random.default_rng(n).random(n)
        assert interquartile_mean(values) == pytest.approx(np.sort(values)[n // 4:n - n // 4].mean())


def test_students_interval_covers_and_one_run_has_none():
    mean, low, high = student_interval(np.random.default_rng(0).normal(2, 1, (4, 20_000)))
    assert abs(((low < 2) & (2 < high)).mean() - 0.95) < 0.01
    assert np.isnan(student_interval([3.0])[1])


def test_trials_over_seeds():
    runs = [made([[0.0, 0.5], [0.0, 0.7]]), made([[0.2, 0.9], [0.2, 0.9]])]
    curve = per_trial_over_seeds(runs)
    assert curve["return"] == pytest.approx([0.1, 0.75]) and (curve["return_lo"] < curve["return"]).all()
    assert per_trial_over_seeds(runs[0])["return_lo"] == pytest.approx(runs[0].per_trial()["return_lo"])


# Playing --------------------------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Counting:
    "Its memory is a tree, and begins from what the task is: it turns as often as its task's key says, then walks."
    def begin(self, parameters, tasks: Tasks):
        return {"left": jax.random.randint(tasks.keys[0], (len(tasks.keys),), 1, 4), "seen": (tasks.rulesets.goal[:, 0].astype(jnp.int32),)}

    def act(self, parameters, inputs, memory, keys):
        return jnp.where(memory["left"] > 0, 1, 0), {"left": memory["left"] - 1, "seen": memory["seen"]}


def test_memories_may_be_trees_and_know_their_tasks(tasks, world):
    found = evaluate(Counting(), tasks, world=world, num_trials=2, num_tasks=16)
    assert found.steps.shape == (16, 2)
    with pytest.raises(AttributeError):
        evaluate(Counting(), None, world=world, num_trials=2, num_tasks=16)  # there, tasks.rulesets is None


class Recorder:
    "Keeps what it is asked, and counts its steps."
    def start(self, batch):
        return jnp.zeros((batch, 2), jnp.int32)

    def act(self, parameters, inputs, memory, keys):
        self.asked = inputs, memory
        return inputs.action, memory + 1


def test_a_forgetful_agent_begins_every_trial_anew(agent, tasks):
    agent = dataclasses.replace(agent, parameters=jax.tree.map(lambda x: 4 * x, agent.parameters))  # that it does not act at random
    found = evaluate(agent, tasks, num_trials=3, num_tasks=24, batch=24, anchors=("memory wiped",))
    alone, wiped = evaluate(agent, tasks, num_trials=3, num_tasks=24, batch=24, wipe_each_trial=True), found.anchor("memory wiped")
    assert (alone.steps == wiped.steps).all() and (alone.returns == wiped.returns).all()
    assert (found.steps[:, 0] == wiped.steps[:, 0]).all() and (found.steps[:, 1:] != wiped.steps[:, 1:]).any()
    env, params = make("XLand-MiniGrid-R1-9x9", view_size=5)
    first = ev.first_inputs(jax.vmap(env.reset, (None, 0))(params, jax.random.split(jax.random.key(0), 2)), 6, neighbors=True)
    later = first.replace(action=jnp.array([2, 2]), reward=jnp.ones(2), done=jnp.array([True, False]), front=first.front + 3,
                          neighbors=first.neighbors + 3, held=first.held + 3)
    recorder = Recorder()
    forgetful = ev.Forgetful(recorder, 6)
    memory = forgetful.begin(None, Tasks(jax.random.split(jax.random.key(0), 2), None))
    _, memory = forgetful.act(None, first, (memory[0], memory[1] + 7), None)
    _, memory = forgetful.act(None, later, memory, None)
    for x, begun, going_on in zip(*map(jax.tree.leaves, (recorder.asked, (first, memory[0]), (later, memory[0] + 8)))):
        assert (x[0] == begun[0]).all() and (x[1] == going_on[1]).all()
    assert np.asarray(memory[1]).tolist() == [[1, 1], [9, 9]]


def test_network_policy_asks_the_network_for_its_memory(agent, tasks):
    policy = NetworkPolicy(agent.structure)
    memory = policy.begin(agent.parameters, Tasks(jax.random.split(jax.random.key(0), 5), None))
    assert jax.tree.map(jnp.shape, memory) == jax.tree.map(jnp.shape, agent.network().start(5))


def test_a_world_with_one_task():
    env, params = make("MiniGrid-Empty-5x5", max_steps=30)
    world = GymAutoResetWrapper(env), params
    found = evaluate(RandomPolicy(), None, world=world, num_trials=2, num_tasks=24, batch=16)
    assert found.steps.shape == (24, 2) and found.task_ids.tolist() == list(range(24)) and len(np.unique(found.steps[:, 0])) > 2 and found.labels == {}
    for wrong in (dict(num_tasks=None), dict(anchors="oracle"), dict(show_goal=1.0)):
        with pytest.raises(ValueError, match="Without a benchmark"):
            evaluate(RandomPolicy(), None, world=world, **wrong)
    found = evaluate(RandomPolicy(), None, world=world, num_trials=2, num_tasks=24, batch=16, anchors=True)
    assert list(found.anchors) == ["random"], "there is no reference player"


def test_refused_before_anything_is_compiled(agent, tasks, monkeypatch):
    monkeypatch.setattr(ev, "play_trials", None)
    for more, says in [(dict(mesh="gpu"), "row of devices"), (dict(mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))), "row of devices"),
                       (dict(show_goal=True), "told nothing"), (dict(num_trials=0), "at least one"),
                       (dict(batch=0), "at least one"), (dict(num_tasks=0), "at least one")]:
        with pytest.raises(ValueError, match=says):
            evaluate(agent, tasks, **more)


def test_watching_is_the_same_world(agent, tasks):
    moments = watch(agent, tasks.get_ruleset(1), num_trials=2)
    assert moments[-1].trial == 2 and moments[0].belief.shape == (5, 16) and int(moments[0].timestep.state.step_num) == 0
    with pytest.raises(ValueError, match="at least one"):
        watch(agent, tasks.get_ruleset(1), num_trials=0)


def test_four_devices_play_what_one_plays(agent, tasks, world, monkeypatch):
    "Tasks are split, not repeated, and every number is the same, bit for bit."
    mesh, played, inner = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("agents",)), [], ev._spread

    def spread(*args):
        def counted(*args, together=inner(*args)):
            tally, finished = together(*args)
            played.append([s.data.shape[0] for s in finished.addressable_shards])
            return tally, finished
        return counted

    monkeypatch.setattr(ev, "_spread", spread)
    for policy in (RandomPolicy(), agent):
        one, four = (evaluate(policy, tasks, world=world, num_trials=2, num_tasks=70, batch=16, mesh=m) for m in (None, mesh))
        for name in ("success", "steps", "returns", "task_ids"):
            assert np.array_equal(getattr(one, name), getattr(four, name)), name
        assert one.summary() == four.summary() and one.returns.any()
    assert played == [[16] * 4] * 4, "70 tasks: two blocks of 64 for each policy, each task on one device"
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    spread_out = dataclasses.replace(agent, parameters=jax.device_put(agent.parameters, everywhere))  # as the trainer's parameters lie
    assert (evaluate(spread_out, tasks, num_trials=2, num_tasks=70, batch=16).steps == one.steps).all()


# Files ----------------------------------------------------------------------------------------------------------------------------------

def test_an_evaluation_comes_back_from_its_file(played, tmp_path):
    whole = dataclasses.replace(played, anchors={"oracle": anchor(np.where(played.success > 0, 0.9, np.nan))})
    path = save_evaluation(whole, tmp_path / "a" / "e.npz", {"steps": np.int64(7), "score": np.nan})
    back, about = load_evaluation(path)
    assert about == {"steps": 7, "score": None} and list(back.labels) == list(whole.labels) and (back.labels["goal kind"] == whole.labels["goal kind"]).all()
    assert not list(path.parent.glob("*.part"))
    for name in ("success", "steps", "returns", "task_ids"):
        np.testing.assert_array_equal(getattr(back, name), getattr(whole, name))
    np.testing.assert_array_equal(back.anchors["oracle"], whole.anchors["oracle"])


def test_damaged_files_are_one_sentence(played, tmp_path):
    path = save_evaluation(played, tmp_path / "e.npz")
    good = path.read_bytes()
    for bad in (good[:100], b"", b"{}", good[:len(good) // 2] + bytes(40) + good[len(good) // 2 + 40:]):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="delete it and evaluate again"):
            load_evaluation(path)
    np.savez(path, about=np.array({"a": 1}, dtype=object))
    with pytest.raises(ValueError, match="delete it"):
        load_evaluation(path)  # a pickle is not opened
    with pytest.raises(FileNotFoundError):
        load_evaluation(tmp_path / "nothing.npz")


def rows_of(seed, keys=("return", "return_p20"), tasks="t"):
    random = np.random.default_rng(seed)
    return [{"steps": s, "tasks": tasks, **{k: random.random() for k in keys}, **{f"{k}_lo": 0.0 for k in keys}, **{f"{k}_hi": 1.0 for k in keys}} for s in (100, 200, 300)]


def test_a_report_parses_back(played, tmp_path):
    other = dataclasses.replace(played, success=1 - played.success, returns=1 - played.returns)
    found = {"two runs": [played, other], "one | run": played}
    protocol = Protocol(num_tasks=96, num_trials=2, by=("goal kind", "depth"))
    curves = {name: curve_over_seeds([rows_of(i), rows_of(i + 5)]) for i, name in enumerate(("trivial", "high"))}
    files = report(found, tmp_path / "out", protocol=protocol, learning=curves, generalization={"trivial": curves, "small": curves}, about={"command": "x"}, title="T")
    assert {p.name for p in (tmp_path / "out").iterdir()} == set(files) == {
        "table.csv", "table.json", "table.md", "adaptation.png", "by_goal_kind.png", "learning.png", "generalization.png"}, "no label depth, no figure of it"
    with open(files["table.csv"]) as file:
        rows = list(csv.DictReader(file))
    kinds = np.unique(played.labels["goal kind"])
    assert [r["group"] for r in rows if r["agent"] == "two runs"] == ["all", *kinds] and rows[0]["runs"] == "2"
    assert float(rows[0]["return"]) == over_seeds([played, other])["return"].mean and rows[-1]["return_std"] == ""
    record = json.loads(files["table.json"].read_text(), parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    assert record["protocol"]["num_trials"] == 2 and record["about"] == {"command": "x"} and len(record["rows"]) == len(rows)
    assert record["runs"]["two runs"]["return"] == pytest.approx([played.summary()["return"][0], other.summary()["return"][0]])
    assert len(record["per_trial"]["two runs"]["success"]) == 2 and record["rows"][0]["return_lo"] == pytest.approx(float(rows[0]["return_lo"]))
    page = files["table.md"].read_text()
    lines = [line for line in page.splitlines() if line.startswith("|")]
    assert page.startswith("# T\n") and len(lines) == 2 + len(rows) and "2 trials of each task" in page and "* command: x" in page
    assert all(path.stat().st_size > 5000 for name, path in files.items() if name.endswith(".png"))
    assert len({line.replace("\\|", "").count("|") for line in lines}) == 1, "a bar in a name makes no column"


def test_markdown_of_what_is_not_known():
    unknown = made(np.zeros((4, 2)), anchors={"oracle": anchor(np.full((4, 2), np.nan))})
    kept = json.loads(json.dumps(told(unknown), allow_nan=False))
    for text in (markdown(table_rows({"a": unknown})), table({"a": unknown}), table({"a": kept})):
        assert "–" in text and "nan" not in text


def test_reports_stand_between_random_and_reference(tmp_path):
    "Anchors have rows and curves of their own, unless an agent has their name or the tasks differ; scores by hand."
    played = {"random": anchor(np.full((6, 2), 0.1)), "reference": anchor([[0.5, 0.9]] * 6)}
    e = made([[0.3, 0.5]] * 6, anchors=played)
    found = with_anchors({"agent": [e, e]})
    assert list(found) == ["agent", "random", "reference"]
    assert [x.score()[0] for x in (e, *e.players().values())] == pytest.approx([0.5, 0, 1])
    assert e.per_trial()["score"] == pytest.approx([0.5, 0.5]) and with_anchors({"random": e})["random"] is e
    assert list(with_anchors({"a": e, "b": e.part([0])})) == ["a", "b"]
    files = report({"agent": e}, tmp_path, title="T")
    rows, page = list(csv.DictReader(files["table.csv"].open())), files["table.md"].read_text()
    scores = {r["agent"]: round(float(r["score"]), 3) for r in rows}
    assert scores == {"agent": 0.5, "random": 0, "reference": 1}
    assert "| score" in page and "1 the reference player" in page
    assert per_trial_over_seeds(found["agent"])["score"] == pytest.approx([0.5, 0.5])
    text = table({"agent": e, **e.players()})
    lines = [line for line in text.splitlines() if line.startswith(("| 1 ", "| 2 ", "| agent"))]
    assert len(lines) == 3 and all("0.50" in line for line in lines)
    figure = adaptation_curve({name: x.per_trial() for name, x in with_anchors({"agent": e}).items()})
    assert [a.get_ylabel() for a in figure.axes] == ["trials solved", "steps per trial", "score"]
    lines = {line.get_label(): line for line in figure.axes[2].lines}
    assert lines["random"].get_ydata() == pytest.approx([0, 0])
    assert lines["reference"].get_ydata() == pytest.approx([1, 1])
    assert lines["random"].get_linestyle() != lines["agent"].get_linestyle()


# Testing while training -----------------------------------------------------------------------------------------------------------------

def test_evaluator_and_a_resumed_one(agent, tasks, tmp_path):
    config = dataclasses.replace(TINY, total_steps=10 * 960, out=str(tmp_path / "run"))
    evaluator = lambda: Evaluator(config, {"a": tasks, "b": tasks.take(np.arange(16))}, num_tasks=16, num_trials=2, every_steps=4000)
    whole, path = evaluator(), tmp_path / "run" / "evaluation.jsonl"
    for steps in range(960, 9601, 960):
        whole(agent, {"steps": steps})
    rows = read_evaluations(path.parent)
    assert [(r["steps"], r["tasks"]) for r in rows] == [(s, t) for s in (960, 4800, 8640, 9600) for t in "ab"]
    direct = evaluate(agent, tasks, num_tasks=16, num_trials=2).summary()
    assert rows[0]["return"] == direct["return"][0] and rows[0]["trial_steps"] == direct["steps"][0] and rows[0]["return_p20_hi"] == direct["return_p20"][2]
    with open(path, "a") as file:
        file.write('{"steps": 9600, "ret')  # the machine went down
    half = evaluator()
    for steps in range(5760, 9601, 960):  # back to the checkpoint of 4,800 steps
        half(agent, {"steps": steps})
    timeless = lambda rows: [{k: v for k, v in r.items() if k != "seconds"} for r in rows]
    assert timeless(read_evaluations(path)) == timeless(rows)
    assert Evaluator.wants_agent and read_evaluations(tmp_path / "nowhere") == []


def test_an_evaluator_plays_anchors_once(agent, tasks, tmp_path, monkeypatch):
    calls, real = [], ev.evaluate
    counted = lambda *args, **more: calls.append(more["anchors"]) or real(*args, **more)
    monkeypatch.setattr("xland_minigrid.baselines.report.evaluate", counted)
    evaluator = Evaluator(dataclasses.replace(TINY, out=str(tmp_path)), tasks, num_tasks=16, num_trials=2,
                          every_steps=960, anchors=("random",))
    for steps in (960, 1920):
        evaluator(agent, {"steps": steps})
    assert calls == [("random",), False] and len(read_evaluations(tmp_path)) == 2


def test_wrong_evaluators(tasks):
    for given, wrong in [(tasks, dict(num_tasks=0)), (tasks, dict(num_trials=0)), (tasks, dict(every_steps=0)), ({"none": tasks.take(np.arange(0))}, {})]:
        with pytest.raises(ValueError, match="An evaluator needs tasks"):
            Evaluator(TINY, given, **wrong)


def test_curves_over_seeds():
    runs = [rows_of(0), rows_of(1)[:2], rows_of(2, tasks="other") + rows_of(2)]
    curve = curve_over_seeds(runs, "t")
    assert [r["steps"] for r in curve] == [100, 200], "only what all runs have reached"
    values = [run[-3:][0]["return"] if len(run) > 2 else run[0]["return"] for run in runs]
    mean, low, high = student_interval(values)
    assert curve[0]["return"] == pytest.approx(mean) and curve[0]["return_lo"] == pytest.approx(low) and curve[0]["return_seeds"] == pytest.approx(values)
    assert curve_over_seeds([rows_of(0)])[0]["return_hi"] == 1.0, "a single run keeps its interval over tasks"
    for wrong in ([], [rows_of(0), []]):
        with pytest.raises(ValueError, match="no step"):
            curve_over_seeds(wrong)


# Figures --------------------------------------------------------------------------------------------------------------------------------

def test_figures_have_axes_and_bands():
    curves = {"a": curve_over_seeds([rows_of(0), rows_of(1), rows_of(2)]), "b": rows_of(3)}
    figure = learning_curves(curves)
    for axis, name in zip(figure.axes, ("mean return", "20th percentile of return")):
        assert axis.get_xlabel() == "environment steps" and axis.get_ylabel() == name
        assert [t.get_text() for t in axis.get_legend().get_texts()] == ["a", "b"] and len(axis.collections) == 2
        assert len(axis.lines) == 2 + 3, "three seeds as thin lines"
    line = figure.axes[0].lines[0]
    assert line.get_xdata().tolist() == [100, 200, 300] and line.get_ydata() == pytest.approx([r["return"] for r in curves["a"]])
    two = generalization_curves({"x": curves, "y": {"a": rows_of(9)}})
    assert [a.get_title() for a in two.axes] == ["x", "y"] and two.axes[0].get_ylim() == two.axes[1].get_ylim()
    bars = group_bars({"a": {"g": (0.5, 0.4, 0.6)}, "b": {"h": (0.2, 0.1, 0.3)}}, what="success", by="depth")
    assert bars.axes[0].get_xlabel() == "depth" and bars.axes[0].get_ylabel() == "trials solved" and [p.get_height() for p in bars.axes[0].patches] == [0.5, 0.2]


def test_figures_of_nothing_are_refused():
    for draw in [lambda: learning_curves({}), lambda: learning_curves({"a": []}), lambda: learning_curves({"a": [{"steps": 1}]}), lambda: generalization_curves({}),
                 lambda: generalization_curves({"a": {"b": [{"return": 1}]}}), lambda: group_bars({}), lambda: group_bars({"a": {"g": 0.5}})]:
        with pytest.raises(ValueError):
            draw()


# Experiments ----------------------------------------------------------------------------------------------------------------------------

FEW = Protocol(num_tasks=16, num_trials=2, by=(), anchors=("random",))


def test_experiments_refuse_before_they_train(tasks, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "train", lambda *_, **__: pytest.fail("trained"))
    sides = tasks.split(0.5, by="random")
    do = lambda configs, seeds=1, **more: experiments.compare(configs, seeds, tmp_path / "x", **{"tasks": sides, "protocol": FEW, "progress": False, **more})
    wrong = [(lambda: do({}), "nothing to compare"), (lambda: do({"a": TINY, "b": dataclasses.replace(TINY, total_steps=960)}), "environment steps"),
             (lambda: do({"a": TINY, "b": dataclasses.replace(TINY, view_size=3)}), "view_size"), (lambda: do({"a": TINY}, 0), "different whole numbers"),
             (lambda: do({"a": TINY}, [1, 1]), "different whole numbers"), (lambda: do({"a": TINY}, True), "different whole numbers"),
             (lambda: do({"a": TINY}, tasks=(sides[0], sides[1].take(np.arange(0)))), "held out"), (lambda: experiments.core_configs(TINY, cores=()), "at least one core"),
             (lambda: experiments.run_generalization(dataclasses.replace(TINY, benchmark="")), "name a benchmark"),
             (lambda: Protocol(num_trials=0), "at least one task")]
    for call, says in wrong:
        with pytest.raises(ValueError, match=says):
            call()
    assert not (tmp_path / "x").exists()


def test_sides_of_generalization_leak_nothing():
    sides = experiments.generalization_sides(*generate_benchmark("small", n=600).split(0.8, by="random"))
    kinds = {name: set(np.asarray(side.goals)[:, 0].tolist()) for name, side in sides.tests.items()}
    assert kinds[experiments.TRAINED] | kinds[experiments.NEW_TASKS] <= {1, 3, 4} and kinds[experiments.NEW_KINDS].isdisjoint({1, 3, 4})
    ids = [set(side.goal_ids().tolist()) for side in sides.tests.values()]
    assert not (ids[0] & ids[1] or ids[0] & ids[2] or ids[1] & ids[2])


@pytest.mark.slow
def test_generalization_from_a_command_and_again(tmp_path, monkeypatch, capsys):
    "The whole experiment on tiny numbers; what is finished is not trained again, and one seed more joins it."
    generate_benchmark("trivial", n=400).save(tmp_path / "mine.safetensors")
    parser = argparse.ArgumentParser()
    experiments.experiment_parser(parser.add_subparsers())
    words = (f"experiment generalization --benchmark {tmp_path}/mine.safetensors --total-steps 1920 --tasks 16 --trials 2 --curve-tasks 16 --quiet --out {tmp_path}/out --size 5 --max-steps 12 --num-envs 16 "
             "--steps-per-task 60 --steps-per-update 60 --ppo.num-minibatches 4 --network.embedding 4 "
             "--network.encoder-width 16 --network.event 4 --network.memory 16 --network.head 16 --devices 1").split()
    do = lambda *more: experiments.run_experiment(parser.parse_args([*words, *more]))
    do("--seeds", "1")
    out = tmp_path / "out"
    assert "Generalization to new kinds of goals, mine" in capsys.readouterr().out
    assert {"table.csv", "table.json", "table.md", "generalization.png", "learning.png", "adaptation.png", "experiment.json"} <= {p.name for p in out.iterdir()}
    record = json.loads((out / "table.json").read_text())
    assert list(record["generalization"]["mine"]) == [experiments.TRAINED, experiments.NEW_TASKS, experiments.NEW_KINDS]
    assert {row["agent"]: row["by"] for row in record["rows"]}.keys() == set(record["generalization"]["mine"])
    trained, real = [], experiments.train
    monkeypatch.setattr(experiments, "train", lambda config, *args, **more: trained.append((config.seed, more["resume"])) or real(config, *args, **more))
    monkeypatch.setattr(experiments.Protocol, "play", lambda *_, **__: pytest.fail("evaluated again"))
    before = {p: p.stat().st_mtime_ns for p in out.glob("agent/seed-0/checkpoints/[0-9]*")}
    do("--seeds", "1")
    assert trained == [(0, "auto")] and {p: p.stat().st_mtime_ns for p in out.glob("agent/seed-0/checkpoints/[0-9]*")} == before
    monkeypatch.undo()
    do("--seeds", "2")
    assert json.loads((out / "table.json").read_text())["rows"][0]["runs"] == 2
    with pytest.raises(ValueError, match="another configs.agent.ppo.lr"):
        do("--ppo.lr", "0.5")


@pytest.mark.slow
def test_cores_are_compared_with_and_without_belief(tasks, tmp_path):
    cores = ("gru", "ssm")
    sides = tasks.split(0.5, by="random")
    found = experiments.compare(experiments.core_configs(TINY, cores), 2, tmp_path, tasks=sides, protocol=FEW, progress=False, curve_tasks=16)
    assert len(found["found"]) == 2 * len(cores) and all(len(said["return"].seeds) == 2 for said in found["found"].values())
    half = tmp_path / "gru" / "seed-1" / "final-held-out.npz"
    half.write_bytes(half.read_bytes()[:50])  # damaged: made again
    again = experiments.compare(experiments.core_configs(TINY, cores), 2, tmp_path, tasks=sides, protocol=FEW, progress=False, curve_tasks=16)
    assert again["found"]["gru"]["return"].seeds == found["found"]["gru"]["return"].seeds and load_evaluation(half)
