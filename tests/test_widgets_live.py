"""The widgets that show agents: the rollout viewer, the board over a training, the scaling laboratory."""
import dataclasses
import threading
import time
from html import unescape
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from xland_minigrid.baselines import live, rl2
from xland_minigrid.baselines.agents import open_box
from xland_minigrid.baselines.checkpoint import CheckpointError
from xland_minigrid.baselines.evaluation import RandomPolicy, belief_over, watch
from xland_minigrid.baselines.networks import NetworkConfig
from xland_minigrid.baselines.ppo import PPOConfig
from xland_minigrid.benchmarks import generate_benchmark
from xland_minigrid.core.language import describe_goal
from xland_minigrid.core.tiles import Tiles
from xland_minigrid.viz import Bars, play
from xland_minigrid.viz.player import Curve
from xland_minigrid.viz.widgets import RolloutViewer, ScalingLab, TrainingDashboard
from xland_minigrid.viz.widgets import scaling
from xland_minigrid.viz.widgets.base import VIEW
from xland_minigrid.viz.widgets.rollout import objects_in, over_objects
from xland_minigrid.viz.widgets.training import Panel, png_of, sentence_of, span_of

widgets = pytest.importorskip("ipywidgets")
pytest.importorskip("matplotlib")

PANELS = [Panel("Success", {"success_first": "early", "success_last": "late"}, share=True), Panel("Return", {"return": ""})]


# The player's new panels -------------------------------------------------------------------------------------------------------------

def frames(n=6):
    return np.random.default_rng(0).integers(0, 256, (n, 16, 16, 3), dtype=np.uint8)


def test_several_panels_and_rows_without_numbers():
    bars = [Bars(["a", "b"], np.where(np.arange(6)[:, None] == 5, np.nan, [[.5, .5]]), truth=[0] * 5 + [-1], top=None), Bars(["c"], np.ones((6, 1)))]
    player = play(frames(), bars=[*bars, Curve([0, 1, np.nan, 3, 2, 1], dots=[2])], chips={0: "<b>first</b>", 3: "second"}, start=3)
    html = player._repr_html_()
    assert "xmg-chips" in html and "<b>first</b>" not in html and "&amp;lt;b&amp;gt;first" in html.replace("&amp;amp;", "&amp;")
    assert player.picture(5).shape == player.picture(0).shape and player.picture(0).shape[1] == 16 + 2 * 250
    assert [v for v in player._kind(Curve)[0].points()[:, 1]][3] == 4 and np.isnan(player._kind(Curve)[0].points()[2, 1])


def test_panels_that_do_not_fit_are_refused():
    table = [
        (lambda: play(frames(), bars=[Curve([1, 2])]), "6 frames but 2 points"), (lambda: play(frames(), start=6), "from 0 to 5"), (lambda: Curve([np.nan]), "at least one"),
        (lambda: play(frames(), bars=[Bars(["a"], np.ones((6, 1))), Bars(["a"], np.ones((5, 1)))]), "6 frames but 5 rows"),
    ]
    for wrong, says in table:
        with pytest.raises(ValueError, match=says):
            wrong()


# The rollout viewer -----------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def tasks():
    return generate_benchmark("trivial", n=60, goal_kinds=(1,))


@pytest.fixture(scope="module")
def moments(tasks):
    return watch(open_box("r1-9x9-trivial"), tasks.get_ruleset(3), num_trials=3, seed=2)


def test_moments_say_what_was_decided(moments):
    for before, after in zip(moments, moments[1:]):
        if before.timestep.last():
            assert before.value is before.probabilities is before.action is None and before.belief.shape == (5, 16)
            continue
        assert isinstance(before.value, float) and before.probabilities.shape == (6,) and isinstance(before.action, int)
        np.testing.assert_allclose(before.probabilities.sum(), 1, atol=1e-5)
        turned = int(after.timestep.state.agent.direction) - int(before.timestep.state.agent.direction)
        assert turned % 4 == {1: 1, 2: 3}.get(before.action, 0), "the action recorded is the one that was done"


def test_viewer_tells_what_happened(moments):
    viewer = RolloutViewer(moments)
    ends = [m.timestep for m in moments if m.timestep.last()]
    assert [row["steps"] for row in viewer.trials] == [int(t.state.step_num) for t in ends]
    assert [row["success"] for row in viewer.trials] == [bool(t.reward > 0) for t in ends]
    assert [row["reward"] for row in viewer.trials] == pytest.approx([float(t.reward) for t in ends])
    assert list(viewer.player.chips) == [k for k, m in enumerate(moments) if int(m.timestep.state.step_num) == 0] == list(viewer.player.markers)
    assert viewer.goal.startswith("hold a") and viewer.goal in viewer.title and str(len(moments)) in repr(viewer)


def test_viewer_shows_belief_actions_and_value(moments):
    objects_bars, *_, actions = RolloutViewer(moments).player._kind(Bars)
    objects, goal = objects_in(moments), moments[0].timestep.state.goal_encoding
    assert tuple(objects[objects_bars.truth[0]]) == tuple(goal[1:3]) and not np.isin(objects[:, 0], [Tiles.FLOOR, Tiles.WALL, Tiles.EMPTY]).any()
    np.testing.assert_allclose(objects_bars.values[4], belief_over(moments[4].belief, objects), rtol=1e-5)
    np.testing.assert_allclose(over_objects(moments[4].belief, objects), belief_over(moments[4].belief, objects))
    np.testing.assert_allclose(actions.values[0], moments[0].probabilities, rtol=1e-5)
    assert actions.truth[0] == moments[0].action and np.isnan(actions.values[-1]).all() and actions.truth[-1] == -1
    curve, = RolloutViewer(moments).player._kind(Curve)
    assert curve.values[0] == moments[0].value and all(moments[k].timestep.reward > 0 for k in curve.dots)


def test_viewer_shows_the_goals_that_a_player_has_left(moments):
    "One by one when they are few, those about unseen objects together; how many there are, always."
    goal, unseen = moments[0].timestep.state.goal_encoding, [[1, 0, 0, 0, 0], [4, 5, 3, 0, 0]]
    many = np.array([[3, tile, color, 0, 0] for tile in (5, 6, 7) for color in (3, 4, 5, 6)], np.uint8)
    few = np.concatenate([goal[None], many[:1], unseen])
    bare = [m._replace(belief=None, value=None, probabilities=None) for m in moments]
    viewer = RolloutViewer([m._replace(remaining=many if m.trial == 1 else few) for m in bare])
    bars, count = viewer.player.panels
    assert np.isnan(bars.values[0]).all() and count.values[0] == 12 and "12 goals possible" in viewer.player.captions[0]
    shown = {bars.labels[k]: share for k, share in bars.at(len(moments) - 1)}
    assert shown == {viewer.goal: .25, describe_goal(many[0]): .25, "about something unseen": .5}
    assert bars.labels[bars.truth[0]] == viewer.goal and count.values[-1] == 4
    crowded = RolloutViewer([m._replace(remaining=many) for m in bare])
    assert crowded.player._kind(Bars) == [] and len(crowded.player.panels) == 1, "too many to be listed"


def test_viewer_needs_no_kernel_and_no_extras(moments):
    bundle = RolloutViewer(moments)._repr_mimebundle_()
    assert VIEW not in bundle and "data-player=" in bundle["text/html"] and "http" not in bundle["text/html"] and len(bundle["text/html"]) < 150_000
    bare = RolloutViewer([SimpleNamespace(timestep=m.timestep, belief=None, trial=m.trial) for m in moments])
    assert bare.player.panels == [] and "data-player=" in bare._repr_mimebundle_()["text/html"]
    cut = RolloutViewer(moments[:3])
    assert cut.trials[0]["success"] is None and "not over" in cut.player.chips[0]


def test_viewer_opens_where_it_is_told(moments):
    viewer = RolloutViewer(moments, frame=2)
    assert viewer.frame == 2 == viewer.player.start
    viewer.frame = len(moments) - 1
    assert viewer.player.start == len(moments) - 1 and f'"start":{viewer.frame}' in html(viewer)
    for wrong in (len(moments), -1, 1.5, True, "1"):
        with pytest.raises(IndexError, match="an integer from 0"):
            viewer.frame = wrong


def test_players_of_the_same_starts_stand_side_by_side(tasks, moments):
    world = rl2.make_world(open_box("r1-9x9-trivial").config)
    others = watch(RandomPolicy(), tasks.get_ruleset(3), num_trials=3, seed=2, world=world)
    longest = [max(sum(m.trial == k for m in some) for some in (moments, others)) for k in (1, 2, 3)]
    viewer = RolloutViewer({"agent": moments, "random": others}, frame=1)
    starts = [0, longest[0], longest[0] + longest[1]]
    for name, some in (("agent", moments), ("random", others)):
        assert [row["frame"] for row in viewer.trials[name]] == starts == list(viewer.player.chips)
        assert [row["steps"] for row in viewer.trials[name]] == [row["steps"] for row in RolloutViewer(some).trials]
        assert [row["reward"] for row in viewer.trials[name]] == pytest.approx([row["reward"] for row in RolloutViewer(some).trials])
    assert len(viewer.player) == sum(longest) and viewer.player.names == ["agent", "random"]
    assert all(caption.count("\t") == 1 for caption in viewer.player.captions) and [c.count("step 0") for c in viewer.player.captions].count(2) == 3
    one, two = RolloutViewer(moments).player.frames, RolloutViewer(others).player.frames
    assert (viewer.player.frames[1] == np.hstack([one[1], 0 * one[1][:, :32], two[1]])).all()
    assert (viewer.player.frames[longest[0] - 1, :, :288] == one[sum(m.trial == 1 for m in moments) - 1]).all(), "the one that is done waits"
    assert viewer.player.panels[0].title.startswith("agent:\n") and " | " in repr(viewer) and "<b>random</b>" in html(viewer) and viewer.player.picture(1).shape[0] > 288
    with pytest.raises(ValueError, match="begin differently"):
        RolloutViewer({"a": moments, "b": watch(RandomPolicy(), tasks.get_ruleset(3), num_trials=3, seed=3, world=world)})
    with pytest.raises(ValueError, match="moments is empty"):
        RolloutViewer({})


def html(viewer):
    return unescape(unescape(viewer._repr_mimebundle_()["text/html"]))


def test_viewer_refuses_what_are_no_moments():
    for given, error, says in (([], ValueError, "moments is empty"), (3, TypeError, "give the list"), ([1], TypeError, "lacks timestep, belief, trial"), (None, TypeError, "give the list")):
        with pytest.raises(error, match=says):
            RolloutViewer(given)


# The board, over trainings that only pretend ------------------------------------------------------------------------------------------

class Pretended:
    "A training of some rounds, each of which waits until it is let go on; its checkpoint is the number of the last round."

    def __init__(self, rounds=6, fail_at=None, free=True):
        self.rounds, self.fail_at, self.saved, self.calls = rounds, fail_at, 0, []
        self.go = threading.Semaphore(10**6 if free else 0)

    def __call__(self, report, should_stop, resume):
        self.calls.append(resume)
        self.saved = self.saved if resume else 0
        while self.saved < self.rounds:
            assert self.go.acquire(timeout=120)
            if self.saved + 1 == self.fail_at:
                self.fail_at = None
                raise FloatingPointError("Learning diverged: lower the learning rate.")
            self.saved += 1
            report({"steps": 100 * self.saved, "success_first": .1, "success_last": self.saved / self.rounds, "return": .5}, [.1, .2] if self.saved == 3 else None)
            if should_stop():
                break
        return self.saved


def until(true, seconds=120):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(.005)


def test_a_board_from_start_to_done():
    board = TrainingDashboard(run := Pretended(), 600, PANELS)
    assert board.state == "idle" and board.rows == [] and "0 of 600" in board.still()
    assert board.run_until_done() == 6 == board.result and board.state == "done" and run.calls == [False]
    assert [r["steps"] for r in board.rows] == [100, 200, 300, 400, 500, 600] and board.curves == [(300, [.1, .2])]
    still = board.still()
    assert still.count("<img") == 3 and "100%" in still and "<script" not in still
    board.rows.clear()
    assert len(board.rows) == 6, "what is given out is a copy"


def test_stop_is_heard_at_once_and_resume_goes_on():
    board = TrainingDashboard(run := Pretended(free=False), 600, PANELS)
    board.widget
    board.start()
    run.go.release()
    until(lambda: len(board.rows) == 1)
    board.buttons["stop"].click()
    assert board.state == "stopping" and board.buttons["stop"].disabled and board.buttons["stop"].description == "Stopping …", "before the round has ended"
    assert 'data-state="stopping"' in board._parts["board"].value
    board.stop()
    for call in (board.start, board.resume):
        with pytest.raises(RuntimeError, match="still finishing"):
            call()
    run.go.release()
    assert board.wait(120) == 2 and board.state == "stopped" and not board.buttons["resume"].disabled and board.buttons["start"].disabled
    board.stop()
    with pytest.raises(RuntimeError, match="resume it"):
        board.start()
    run.go.release(10)
    board.buttons["resume"].click()
    assert board.wait(120) == 6 and board.state == "done" and run.calls == [False, True]
    assert [r["steps"] for r in board.rows] == [100, 200, 300, 400, 500, 600]
    for call in (board.start, board.resume):
        with pytest.raises(RuntimeError, match="is done"):
            call()


def test_a_stop_in_the_last_round_is_done():
    board = TrainingDashboard(run := Pretended(rounds=1, free=False), 100, PANELS)
    board.start()
    board.stop()
    run.go.release()
    assert board.wait(120) == 1 and board.state == "done"


def test_calls_out_of_turn():
    board = TrainingDashboard(run := Pretended(free=False), 600, PANELS)
    with pytest.raises(RuntimeError, match="start the training first"):
        board.stop()
    with pytest.raises(RuntimeError, match="Nothing was started"):
        board.wait()
    board.start()
    for call in (board.start, board.resume, board.run_until_done):
        with pytest.raises(RuntimeError, match="running already"):
            call()
    with pytest.raises(TimeoutError, match="still runs"):
        board.wait(.01)
    run.go.release(10)
    assert board.wait(120) == 6 and run.calls == [False]


def test_two_clicks_start_one_training():
    board = TrainingDashboard(run := Pretended(free=False), 600, PANELS)
    board.widget
    board.buttons["start"].click()
    board.buttons["start"].click()
    assert "running already" in board._parts["said"].value
    run.go.release(10)
    board.wait(120)
    assert run.calls == [False]


def test_an_error_is_said_and_raised_and_one_can_go_on():
    board = TrainingDashboard(run := Pretended(fail_at=3), 600, PANELS)
    board.widget
    board.start()
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="diverged"):
            board.wait(120)
    assert board.state == "failed" and "Learning diverged" in board._parts["board"].value and "Learning diverged" in board.still()
    run.saved = 1                                            # the checkpoint is older than the last row
    board.resume()
    assert board.wait(120) == 6 and [r["steps"] for r in board.rows] == [100, 200, 300, 400, 500, 600] and board.error is None


def test_errors_become_sentences():
    assert sentence_of(ValueError("Say what is wrong.")) == "Say what is wrong."
    assert sentence_of(KeyError("x")) == "Training ended with KeyError: 'x'" and sentence_of(MemoryError()) == "Training ended with MemoryError."


def test_two_boards_at_once():
    runs = [Pretended(free=False) for _ in range(2)]
    boards = [TrainingDashboard(run, 600, PANELS) for run in runs]
    for board in boards:
        board.widget
        board.start()
    runs[1].go.release(10)
    assert boards[1].wait(120) == 6 and boards[0].state == "running" and boards[0].rows == []
    boards[0].stop()
    runs[0].go.release()
    assert boards[0].wait(120) == 1 and boards[0].state == "stopped" and len(boards[1].rows) == 6


def test_a_row_without_steps_ends_it():
    board = TrainingDashboard(lambda report, should_stop, resume: report({"return": 1}), 600, PANELS)
    with pytest.raises(ValueError, match="needs its steps"):
        board.run_until_done()


def test_interrupting_wait_stops_in_order(monkeypatch):
    board = TrainingDashboard(run := Pretended(free=False), 600, PANELS)
    board.start()
    join, pressed = board._thread.join, []

    def interrupted(timeout=None):
        if not pressed:
            pressed.append(1)
            run.go.release()
            raise KeyboardInterrupt
        join(timeout)
    monkeypatch.setattr(board._thread, "join", interrupted)
    assert board.wait(120) == 1 and board.state == "stopped"


@pytest.mark.parametrize("rows", [[], [{"steps": 100}], [{"steps": 100, "return": float("nan")}], [{"steps": 100 * k, "return": .1, "success_last": .2} for k in range(1, 200)]])
def test_whatever_the_rows_it_can_be_drawn(rows):
    board = TrainingDashboard(Pretended(), 20_000, PANELS, rows=rows)
    assert board.state == ("stopped" if rows else "idle") and board.still() and board._repr_mimebundle_()["text/html"]
    assert all(png[:4] == b"\x89PNG" for png in board._pictures().values())


def test_words_cannot_break_the_page():
    nasty = "</div><script>alert(1)</script>"
    board = TrainingDashboard(Pretended(), 600, [Panel(nasty, {"return": nasty})], title=nasty)
    board.run_until_done()
    assert "<script" not in board.still() and board.widget and "<script" not in board._parts["board"].value


def test_boards_that_cannot_be():
    for given, error in (((None, 10), TypeError), ((print, 0), ValueError), ((print, 1.5), ValueError), ((print, True), ValueError)):
        with pytest.raises(error):
            TrainingDashboard(*given)


def test_forms():
    bundle = TrainingDashboard(Pretended(), 600, PANELS)._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html", VIEW} and len(bundle["text/html"]) < 20_000
    assert [span_of(s, 1000) for s in (0, 1, 500, 501)][1] < 2 and span_of(500, 1000) == 500 and span_of(501, 1000) == 1000


# The board over real trainings -------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return rl2.TrainConfig(size=5, max_steps=12, num_envs=32, steps_per_task=60, steps_per_update=30, total_steps=10 * 32 * 60, held_out=0, loggers=("jsonl",), devices=1,
                           out=str(tmp_path_factory.mktemp("live") / "run"), ppo=PPOConfig(num_minibatches=2), network=NetworkConfig(embedding=4, encoder_width=16, event=4, memory=16, head=16))


def equal(a, b):
    return all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def looked_at(agent, anchors, **numbers):
    "An evaluation that takes no time."
    return SimpleNamespace(success=np.array([[0., 1.], [1., 1.]]), anchors={"random": np.full((2, 2, 3), .25)} if anchors else {})


@pytest.fixture
def pretended(monkeypatch, config):
    "`train` replaced by rounds that wait to be let go; it listens to `on_round` as the real one does."
    go, calls = threading.Semaphore(0), []

    def train(config, tasks, *, resume, progress, on_round, par):
        calls.append((tasks, resume, progress))
        for k in range(1, config.rounds + 1):
            assert go.acquire(timeout=120)
            try:
                on_round(*(["agent"] if on_round.wants_agent else []), {"steps": k * config.steps_per_round, "success_first": .1, "success_last": .2, "return": .3, "belief_nats": 2.0})
            except rl2.EndTraining:
                return SimpleNamespace(interrupted=True, agent="agent")
        return SimpleNamespace(interrupted=False, agent="last agent")
    monkeypatch.setattr(live, "train", train)
    monkeypatch.setattr(live, "evaluate", lambda agent, tasks, **numbers: looked_at(agent, **numbers))
    return SimpleNamespace(go=go, calls=calls)


def test_a_cell_that_is_run_again_gives_the_board_at_work(config, tasks, pretended):
    board = live.dashboard(config, tasks)
    assert live.dashboard(config, tasks) is not board, "nothing runs yet"
    board.start()
    assert live.dashboard(config, tasks) is board
    with pytest.raises(ValueError, match="another configuration"):
        live.dashboard(dataclasses.replace(config, seed=7), tasks)
    other = live.dashboard(dataclasses.replace(config, out=config.out + "-2"), tasks)
    assert other is not board and other.state == "idle"
    board.stop()
    assert live.dashboard(config, tasks) is board, "it is still finishing its round"
    pretended.go.release()
    assert board.wait(120).interrupted and live.dashboard(config, tasks) is not board


def test_the_board_draws_what_training_reports(config, tasks, pretended):
    pretended.go.release(100)
    board = live.dashboard(config, tasks, every=1000)
    assert not board.run_until_done().interrupted and board.state == "done" and pretended.calls == [(tasks, False, False)]
    assert board.total_steps == 10 * 32 * 60 == board.rows[-1]["steps"] and board.curves == [(32 * 60, [.5, 1.]), (board.total_steps, [.5, 1.])]
    assert board.others == {"random": [.25, .25]} and len(board.rows) == 10, "other players play once, and the curve ends on the last state"
    assert list(board._pictures()) == ["Success", "Return", "Belief", "Adaptation"]


def test_without_a_benchmark_the_configuration_names_it(config, tasks, pretended, monkeypatch):
    ours, others = tasks.split(.5)
    monkeypatch.setattr(live, "load_tasks", lambda config: (ours, others))
    pretended.go.release(100)
    looked = []
    monkeypatch.setattr(live, "evaluate", lambda agent, tasks, **numbers: looked.append(tasks) or looked_at(agent, **numbers))
    live.dashboard(config).run_until_done()
    assert pretended.calls[0][0] is ours and looked[0] is others


@pytest.mark.slow
def test_stopped_and_resumed_is_uninterrupted(config, tasks, tmp_path, capsys):
    whole = rl2.train(config, tasks, progress=False)
    again = dataclasses.replace(config, out=str(tmp_path / "again"))
    board = live.dashboard(again, tasks, num_tasks=8, num_trials=3, every=0)
    board.start()
    assert live.dashboard(again, tasks) is board, "the cell was run again"
    with pytest.raises(ValueError, match="another configuration"):
        live.dashboard(dataclasses.replace(again, seed=7), tasks)
    until(lambda: len(board.rows) >= 2, 120)
    board.stop()
    half = board.wait(60)
    assert half.interrupted and 2 <= len(board.rows) < 10 and board.state == "stopped" and len(board.curves[0][1]) == 3
    later = live.dashboard(again, tasks, num_tasks=0)
    assert later is not board and later.state == "stopped" and later.steps == half.agent.steps == board.steps
    rest = later.run_until_done()
    assert equal(rest.agent.parameters, whole.agent.parameters) and not rest.interrupted and later.state == "done" and len(later.rows) == 10
    assert capsys.readouterr().out == "", "the board says it, nothing else does"
    done = live.dashboard(again, tasks)
    with pytest.raises(RuntimeError, match="resume it"):
        done.start()


@pytest.mark.slow
def test_nothing_to_resume(config, tasks, tmp_path):
    board = live.dashboard(dataclasses.replace(config, out=str(tmp_path / "nowhere")), tasks)
    board.resume()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        board.wait(60)
    assert board.state == "failed" and "no checkpoint" in board.still()


def test_a_glance_is_taken_when_it_is_due(monkeypatch):
    monkeypatch.setattr(live, "evaluate", lambda agent, tasks, **numbers: looked_at(agent, **numbers))
    rows, stop = [], threading.Event()
    glance = live.Glance(lambda *given: rows.append(given), stop.is_set, "tasks", 2, 2, every=1000)
    assert glance.wants_agent
    glance("agent", {"steps": 1})
    assert not glance.wants_agent
    glance({"steps": 2})
    assert rows == [({"steps": 1}, [.5, 1.], {"random": [.25, .25]}), ({"steps": 2},)]
    glance.end("agent")
    assert rows[2:] == [({"steps": 2}, [.5, 1.], {})]
    glance.due_at = 0
    glance("agent", {"steps": 2})
    glance.end("agent")
    assert len(rows) == 4, "the last row came with a curve"
    stop.set()
    with pytest.raises(rl2.EndTraining):
        glance({"steps": 3})
    glance.end("agent")
    assert rows[4:] == [({"steps": 3},)], "the row of the last round is not lost"
    assert not live.Glance(None, stop.is_set, None, 2, 2, 0).wants_agent


def test_boards_over_what_cannot_be_trained(config, tasks):
    table = [
        (dict(config={}), TypeError, "give a TrainConfig"), (dict(benchmark=[1]), TypeError, "give a Benchmark"), (dict(num_tasks=-1), ValueError, "at least 0"), (dict(num_trials=0), ValueError, "at least 0"),
        (dict(every=-1), ValueError, "at least 0"),
    ]
    for change, error, says in table:
        with pytest.raises(error, match=says):
            live.dashboard(**{"config": config, "benchmark": tasks, **change})


# The laboratory -----------------------------------------------------------------------------------------------------------------------

@pytest.fixture
def pretend(monkeypatch):
    "Measurements that take no time."
    def throughput(num_envs, size, rules, steps, repeats, *, on_repeat):
        for k in range(repeats + 1):
            if on_repeat(k):
                return None
            if steps == 13:
                raise MemoryError("too large")
        return {"num_envs": num_envs, "size": size, "rules": rules, "steps": steps, "repeats": repeats, "steps_per_second": 1e4 * num_envs, "slowest": 9e3 * num_envs,
                "fastest": 2e4 * num_envs, "compile_seconds": .5, "bytes_per_env": 200.0, "checksum": 1}
    monkeypatch.setattr(scaling, "throughput", throughput)


def test_the_laboratory_keeps_and_draws_what_was_measured(pretend):
    lab = ScalingLab(num_envs=(1, 4))
    assert lab.rows == [] and "<img" not in lab.still()
    lab.measure(num_envs=4)
    lab.measure(num_envs=1, size=7, rules=0)
    assert [r["num_envs"] for r in lab.rows] == [4, 1] and lab.still().count("<img") == 1 and "10 k" in lab.still() and set(lab._repr_mimebundle_()) == {"text/plain", "text/html", VIEW}
    assert list(scaling.series_of(lab.rows)) == ["7 × 7, 0 rules", "9 × 9, 1 rule"] and "2 measurements" in repr(lab)
    assert png_of(scaling.draw_scaling(lab.rows * 3))[:4] == b"\x89PNG"


def test_its_button_measures_in_a_thread(pretend):
    lab = ScalingLab(num_envs=(1, 4))
    lab.widget
    lab._sliders["num_envs"].value, lab._sliders["rules"].value = 4, 9
    lab.buttons["measure"].click()
    lab.wait(120)
    assert [(r["num_envs"], r["rules"]) for r in lab.rows] == [(4, 9)] and not lab.buttons["measure"].disabled and lab.buttons["stop"].disabled and "4 worlds" in lab._parts["said"].value


def test_one_measurement_at_a_time_and_stop(monkeypatch):
    held = threading.Event()

    def slow(*numbers, on_repeat):
        assert held.wait(120)
        return None if on_repeat(1) else {}
    monkeypatch.setattr(scaling, "throughput", slow)
    lab = ScalingLab()
    lab.widget
    lab.start()
    for call in (lab.start, lab.measure, ScalingLab().measure):
        with pytest.raises(RuntimeError, match="already"):
            call()
    lab.buttons["stop"].click()
    assert lab.buttons["stop"].description == "Stopping …" and lab.buttons["stop"].disabled and lab.state == "stopping"
    held.set()
    lab.wait(120)
    assert lab.rows == [] and lab.state == "idle" and lab.words.startswith("Stopped") and not lab.buttons["measure"].disabled
    lab.stop()


def test_what_goes_wrong_in_it_is_said_and_frees_it(pretend):
    lab = ScalingLab()
    lab.start(steps=13)
    with pytest.raises(MemoryError):
        lab.wait(120)
    assert "MemoryError" in lab.words and lab.state == "idle" and lab.measure(num_envs=1)["num_envs"] == 1


def test_numbers_that_cannot_be_measured(pretend):
    lab = ScalingLab()
    for wrong in (dict(num_envs=0), dict(num_envs=2**21), dict(size=4), dict(rules=-1), dict(steps=0), dict(steps=1.5), dict(num_envs=True)):
        for call in (lab.measure, lab.start):
            with pytest.raises(ValueError, match="an integer from"):
                call(**wrong)
    assert lab.measure(num_envs=1), "a refused one blocks nothing"


def test_laboratories_that_cannot_be():
    for wrong in (dict(num_envs=()), dict(num_envs=(0,)), dict(repeats=0)):
        with pytest.raises(ValueError, match="an integer from"):
            ScalingLab(**wrong)
