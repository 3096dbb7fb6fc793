"""Thirty hand-made tasks: each can be won, none sooner than its par, and each is lost in the way it says."""
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xland_minigrid import load_benchmark, make_ruleset
from xland_minigrid.baselines import score_probes
from xland_minigrid.benchmarks import Benchmark, benchmark_file, benchmark_info, exact
from xland_minigrid.benchmarks.planner import solve_from
from xland_minigrid.benchmarks.probes import (
    PROBES, ProbeEnv, ProbeScores, draw_starts, named_tile, probe, probe_worlds, probes_benchmark,
)
from xland_minigrid.core.rules import AgentHoldRule
from xland_minigrid.core.tiles import COLOR_NAMES, FLOOR, TILE_NAMES, WALL, Tiles, pack
from xland_minigrid.envs.wrappers import DirectionObservationWrapper, DmEnvAutoResetWrapper, GymAutoResetWrapper
from worlds import refusals

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / ".ci"))
from gallery import draw_gallery, gallery_html, play_plans, probe_players, save_gallery

pytestmark = pytest.mark.newest

DOCS = Path(__file__).resolve().parent.parent / "docs"
ENV = ProbeEnv()
NAMES = [p.name for p in PROBES]
APART = ("cue-and-fork", "where-it-was", "through-rooms", "maze", "two-ways")  # of another size or time limit: programs of their own
by_name = pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in APART)) for n in NAMES])


@functools.lru_cache(maxsize=None)
def worlds():
    return probe_worlds()


@functools.lru_cache(maxsize=None)
def _played(alone):
    few = [p for p in PROBES if (p.name in APART) == alone]
    return dict(zip([p.name for p in few], play_plans(few)))


def solution(name):
    "The time steps of a reference solution. Those of most probes are one program."
    return _played(name in APART)[name]


def params_of(name):
    "The parameters of a probe out of its batch."
    for numbers, params in worlds():
        for row, number in enumerate(numbers):
            if PROBES[number].name == name:
                return jax.tree.map(lambda x: x[row], params)


@jax.jit
def step(params, timestep, action):
    return ENV.step(params, timestep, action)


@jax.jit
def reset(params, key):
    return ENV.reset(params, key)


def walk(name, actions, key=0, params=None):
    "The last time step of a walk; it must not end before."
    params = params_of(name) if params is None else params
    timestep = reset(params, jax.random.key(key))
    for action in actions:
        assert not timestep.last()
        timestep = step(params, timestep, jnp.int32(int(action)))
    return timestep


def exists(timestep, words):
    "Whether a thing is on the grid or in the pocket."
    state, tile = timestep.state, int(pack(*named_tile(words)))
    return bool((state.cells == tile).any()) or tuple(map(int, state.agent.pocket)) == named_tile(words)


# What they are ------------------------------------------------------------------------------------------------------------------------

def test_there_are_thirty():
    assert len(PROBES) == len(set(NAMES)) == len({p.task for p in PROBES}) == len({p.probes for p in PROBES}) == 30
    counts = {c: sum(p.category == c for p in PROBES) for c in {p.category for p in PROBES}}
    assert len(counts) == 10 and min(counts.values()) >= 2 and max(counts.values()) <= 4
    assert sum(p.start is None for p in PROBES) >= 8
    assert sum(p.ruleset.extended is not None for p in PROBES) == 5


def test_the_text_says_what_the_task_is():
    for p in PROBES:
        text = p.describe()
        assert text.startswith(f"{p.name} ({p.category}): {p.task}\n{p.probes}\n") and p.ruleset.describe() in text and f"par {p.par}." in text
        assert "An agent" in p.probes and p.task.endswith(".") and p.probes.endswith(".")
        assert repr(p) == f"Probe({p.name}: {p.task} Par {p.par})"


@by_name
def test_objects_of_the_picture_are_those_of_the_task(name):
    p = probe(name)
    state = solution(name).state
    tiles = sorted((t, c) for t, c in p.ruleset.init_tiles.tolist() if t)
    lying = sorted((int(b) >> 4, int(b) & 15) for b in state.cells[0].ravel() if int(b) >> 4 in (5, 6, 7, 8, 9, 13, 14))
    assert lying == tiles


def test_twins_differ_in_the_answer_alone():
    one, other = probe("same-shape"), probe("same-shape-swapped")
    a, b = (solution(p.name).state for p in (one, other))
    assert (a.cells[0] == b.cells[0]).all() and (a.agent.position[0] == b.agent.position[0]).all()
    assert one.ruleset.goal.tolist() != other.ruleset.goal.tolist()
    assert one.ruleset.rules.tolist() == other.ruleset.rules.tolist() and one.ruleset.init_tiles.tolist() == other.ruleset.init_tiles.tolist()


# The plans ----------------------------------------------------------------------------------------------------------------------------

@by_name
def test_plan_wins_at_par_and_not_before(name):
    p, steps = probe(name), solution(name)
    assert steps.discount.shape == (p.par + 1,)
    assert steps.discount[-1] == 0 and steps.step_type[-1] == 2 and (steps.discount[:-1] == 1).all() and (steps.step_type[1:-1] == 1).all()
    limit = p.make()[1].max_steps
    assert steps.reward[-1] == pytest.approx(1 - .9 * p.par / limit) and not steps.reward[:-1].any()
    assert set(p.plan.tolist()) <= set(range(6)) and p.par <= limit


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[::5])
def test_plan_wins_in_the_environment_of_its_own(name):
    "Unbatched and unpadded, as a user would play it: a program for each, so one in five."
    p = probe(name)
    env, params = p.make()
    play, timestep = jax.jit(env.step), p.reset(jax.random.key(0))
    for action in p.plan:
        assert not timestep.last()
        timestep = play(params, timestep, action)
    assert timestep.last() and timestep.reward > 0
    assert (timestep.state.cells == solution(name).state.cells[-1]).all()


CHUNK = 256


@jax.jit
def _expand(params, timesteps):
    "All six actions from each of many moments."
    return jax.vmap(lambda t: jax.vmap(lambda a: ENV.step(params, t, a))(jnp.arange(6)))(timesteps)


def shortest(params, key=0):
    "Length of a shortest solution by breadth-first search with the environment itself; None where none exists within the time limit."
    bare = lambda t: t.replace(state=t.state.replace(key=jax.random.key_data(t.state.key)))
    dressed = lambda t: t.replace(state=t.state.replace(key=jax.random.wrap_key_data(t.state.key)))
    first = jax.tree.map(lambda x: np.asarray(x)[None], bare(reset(params, jax.random.key(key))))
    identity = lambda s: [np.asarray(x).reshape(len(x), -1) for x in jax.tree.leaves((s.cells, s.agent, None if s.extended is None else (s.extended.pairs, s.extended.done)))]
    rows = lambda s: np.ascontiguousarray(np.concatenate([a.astype(np.int32) for a in identity(s)], axis=1))
    seen, layer = {r.tobytes() for r in rows(first.state)}, first
    for depth in range(1, params.max_steps + 1):
        found = []
        for start in range(0, len(layer.reward), CHUNK):
            at = np.minimum(np.arange(start, start + CHUNK), len(layer.reward) - 1)
            out = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), bare(_expand(params, dressed(jax.tree.map(lambda x: jnp.asarray(x[at]), layer)))))
            if (out.reward > 0).any():
                return depth
            fresh = []
            for i, r in enumerate(rows(out.state)):
                if out.step_type[i] != 2 and r.tobytes() not in seen:
                    seen.add(r.tobytes())
                    fresh.append(i)
            found.append(jax.tree.map(lambda x: x[fresh], out))
        layer = jax.tree.map(lambda *x: np.concatenate(x), *found)
        if not len(layer.reward):
            return None
    return None


SMALL = ("first-step", "same-colour", "wrong-neighbour", "lava-on-the-way", "keep-your-distance", "full-hands")  # one program for all


@pytest.mark.parametrize("name", SMALL)
def test_no_solution_is_shorter(name):
    assert shortest(params_of(name)) == probe(name).par


@pytest.mark.slow
def test_exact_search_confirms_all_thirty():
    "The search of `benchmarks.exact`, which shares no line with the one above."
    for numbers, params in worlds():
        firsts = jax.jit(jax.vmap(ENV.reset, (0, None)))(params, jax.random.key(0))
        found = exact.shortest(None, firsts.state, ENV, jax.tree.map(lambda x: x[0], params))
        assert found.solved.all() and found.steps.tolist() == [PROBES[i].par for i in numbers]


def test_planner_finds_nothing_shorter():
    plain = [p for p in PROBES if p.ruleset.extended is None and p.name not in APART]
    found = [(p.par, solve_from(p.ruleset, jax.tree.map(lambda x: x[0], solution(p.name)), p.make()[1])) for p in plain]
    assert all(len(answer.actions) >= par for par, answer in found if answer.solved)
    assert sum(answer.solved for _, answer in found) >= 18


# That they ask what they say ------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_time_suffices_for_the_short_way_only():
    p, params = probe("two-ways"), params_of("two-ways")
    ways = [without(p.ruleset, 0), without(p.ruleset, 1, 2)]
    first = reset(params, jax.random.key(0)).state
    long, short = (int(exact.shortest(way, first, ENV, params).steps) for way in ways)
    assert short == p.par < params.max_steps < long


def without(ruleset, *numbers):
    "The task without some of its rules."
    return ruleset.replace(rules=np.where(np.isin(np.arange(len(ruleset.rules)), numbers)[:, None], np.uint8(0), np.asarray(ruleset.rules)))


def test_fork_gives_one_try():
    params, plan = params_of("cue-and-fork"), probe("cue-and-fork").plan
    cue = lambda key: bool(reset(params, jax.random.key(key)).state.cells[3, 1] == pack(*named_tile("white hex")))
    same, other = (next(k for k in range(1, 40) if cue(k) is wanted) for wanted in (cue(0), not cue(0)))
    assert walk("cue-and-fork", plan, same).reward > 0
    wrong = walk("cue-and-fork", plan, other)
    assert wrong.reward == 0 and not wrong.last()
    turned = np.where(np.isin(plan, (1, 2)), 3 - plan, plan)
    assert walk("cue-and-fork", turned, other).reward > 0
    assert len(plan) + 2 + 4 > params.max_steps              # turn round and walk to the other end: too late


@pytest.mark.slow  # a program of its own
def test_cue_is_out_of_sight_at_the_fork():
    p = probe("cue-and-fork")
    hex_seen = [(steps[..., 0] == Tiles.HEX).any() for steps in solution(p.name).observation]
    assert hex_seen[0] and not any(hex_seen[3:])


def test_walking_up_to_the_pyramid_loses_it():
    assert exists(walk("keep-your-distance", "00200"), "green pyramid")
    lost = walk("keep-your-distance", "002000")
    assert not exists(lost, "green pyramid") and not lost.last()


def test_lifting_the_ball_loses_it():
    params = params_of("carry-the-other")
    timestep = reset(params, jax.random.key(0))
    row, col = map(int, np.argwhere(np.asarray(timestep.state.cells) == pack(*named_tile("red ball")))[0])
    where, facing = ((row + 1, col), 0) if row < 7 else ((row - 1, col), 2)
    agent = timestep.state.agent.replace(position=jnp.array(where, jnp.int32), direction=jnp.int32(facing))
    timestep = step(params, timestep.replace(state=timestep.state.replace(agent=agent)), jnp.int32(3))
    assert not exists(timestep, "red ball") and not timestep.last()


@pytest.mark.parametrize("way, lost", [("3004", True), ("3000", False), ("300004", False)])
def test_beside_a_pyramid_the_ball_vanishes(way, lost):
    timestep = walk("wrong-neighbour", way)
    assert exists(timestep, "red ball") is not lost
    assert (timestep.reward > 0) == (way == "300004")


def test_wrong_side_makes_rubbish():
    timestep = walk("wrong-side-spoils", "02314")   # straight to the ball: the square comes to lie left of it
    assert not exists(timestep, "blue square") and exists(timestep, "grey hex") and not exists(timestep, "white star")


def test_bridge_burns():
    solved = solution("one-way-bridge").state
    orange, lava = int(pack(*named_tile("orange goal"))), int(pack(*named_tile("red lava")))
    crossed = (solved.agent.position[:, 1] >= 5).argmax()
    assert (solved.cells[:crossed, 4, 4] == orange).all() and (solved.cells[crossed:, 4, 4] == lava).all()


def test_star_made_too_early_leaves_the_door_locked():
    timestep = walk("key-twice", "103114")
    assert exists(timestep, "white star") and not exists(timestep, "yellow key") and exists(timestep, "yellow door locked")


def test_lava_is_no_success():
    straight = walk("lava-on-the-way", "00")
    assert straight.last() and straight.reward == 0 and straight.discount == 0


def test_lifting_the_ball_is_not_yet_it():
    steps = solution("hold-and-leave")
    holds = (steps.state.agent.pocket == np.array(named_tile("red ball"))).all(-1)
    assert holds[-1] and holds.sum() >= 2 and (steps.reward[:-1] == 0).all()


def test_two_things_from_one():
    state = solution("two-from-one").state
    lifted = (np.asarray(state.agent.pocket) == named_tile("red ball")).all(-1).argmax()
    assert not (state.cells[lifted - 1] == pack(*named_tile("yellow key"))).any() and (state.cells[lifted] == pack(*named_tile("yellow key"))).any()


# Starts -------------------------------------------------------------------------------------------------------------------------------

LETTERS = {"r": "red ball", "Y": "yellow door locked", "g": "blue goal", "w": "brown wall"}


@given(st.integers(3, 9), st.integers(3, 9), st.data())
def test_pictures_are_read_back(height, width, data):
    cells = data.draw(st.lists(st.lists(st.sampled_from("#.~rYgw"), min_size=width, max_size=width), min_size=height, max_size=height))
    y, x, facing = data.draw(st.tuples(st.integers(0, height - 1), st.integers(0, width - 1), st.integers(0, 3)))
    cells[y][x] = "^>v<"[facing]
    made = draw_starts("\n".join("   " + "".join(row) for row in cells), LETTERS)
    assert made.position.tolist() == [[y, x]] and made.direction.tolist() == [facing] and made.num == 1
    back = {int(WALL): "#", int(FLOOR): ".", int(pack(*named_tile("red lava"))): "~", **{int(pack(*named_tile(w))): c for c, w in LETTERS.items()}}
    text = [[back[int(b)] for b in row] for row in made.cells[0]]
    text[y][x] = "^>v<"[facing]
    assert text == cells


@given(st.integers(3, 15), st.integers(3, 13))
def test_things_by_name(tile, color):
    words = "floor" if (tile, color) == (Tiles.FLOOR, 9) else f"{COLOR_NAMES[color]} {TILE_NAMES[tile]}"
    assert named_tile(words) == (tile, color)


def test_bad_pictures_are_refused():
    assert refusals({
        0: (lambda: draw_starts("...", {}), ValueError, "0 agents"),
        1: (lambda: draw_starts(">.<", {}), ValueError, "2 agents"),
        2: (lambda: draw_starts(">..\n..", {}), ValueError, r"rows of \[2, 3\]"),
        3: (lambda: draw_starts(">.q", {"r": "red ball"}), ValueError, "'q'"),
        4: (lambda: draw_starts(">.r", {"r": "red bal"}), ValueError, "'red bal'"),
        5: (lambda: draw_starts(">.r", {"r": "nothing"}), ValueError, "'nothing'"),
    }) == {}


def test_start_must_fit_the_grid():
    with pytest.raises(ValueError, match="draw them in the size of the grid"):
        probe("first-step").make(height=11, width=11)
    with pytest.raises(ValueError, match="draw them in the size"):
        ENV.default_params(height=5, width=5, starts=probe("swap").start)
    env, params = probe("fetch").make(height=11, width=11)     # a random one takes any size
    assert params.height == 11 and params.max_steps == 3 * 121


def test_fixed_starts_come_back_after_every_trial_and_random_ones_differ():
    "Two trials by auto-reset, in one batch of fixed and random probes."
    wanted = [probe(n) for n in ("full-hands", "fetch", "first-step")]
    (numbers, params), = probe_worlds(wanted)
    env = GymAutoResetWrapper(ENV)
    begin = jax.jit(jax.vmap(env.reset))
    firsts = [begin(params, jax.random.split(jax.random.key(k), 3)) for k in range(4)]
    same = lambda row: all((f.state.cells[row] == firsts[0].state.cells[row]).all() and (f.state.agent.position[row] == firsts[0].state.agent.position[row]).all() for f in firsts)
    assert same(0) and not same(1) and same(2)
    timestep = jax.jit(jax.vmap(env.step))(params, firsts[0], jnp.array([0, 0, 0]))
    assert timestep.last().tolist() == [False, False, True]
    assert (timestep.state.cells[2] == firsts[0].state.cells[2]).all() and timestep.state.agent.position[2].tolist() == [4, 3]


def test_both_cues_are_drawn_equally_often():
    params = params_of("cue-and-fork")
    cells = jax.jit(jax.vmap(lambda params, key: ENV.reset(params, key).state.cells[3, 1], (None, 0)))(params, jax.random.split(jax.random.key(5), 400))
    share = float((cells == pack(*named_tile("white hex"))).mean())
    assert .4 < share < .6


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [DirectionObservationWrapper, DmEnvAutoResetWrapper])
def test_wrappers_work(wrap):
    _, params = probe("full-hands").make()
    env = wrap(ENV)
    timestep = jax.jit(env.reset)(params, jax.random.key(0))
    for action in probe("full-hands").plan:
        timestep = jax.jit(env.step)(params, timestep, action)
    assert timestep.last() and timestep.reward > 0


def test_view_size_is_the_users():
    env, params = probe("wrong-neighbour").make(view_size=7)
    assert jax.eval_shape(env.reset, params, jax.random.key(0)).observation.shape == (7, 7, 2)
    assert all(params.view_size == 3 for _, params in probe_worlds(PROBES[:3], view_size=3))


def test_batches_hold_everything_once():
    numbers = np.concatenate([n for n, _ in worlds()])
    assert sorted(numbers.tolist()) == list(range(30)) and len(worlds()) <= 6


# Names --------------------------------------------------------------------------------------------------------------------------------

def test_wrong_names_are_met_with_the_nearest():
    near = {"keytwice": "key-twice", "Swap": "swap", "full_hands": "full-hands", "lava on the way": "lava-on-the-way"}
    assert refusals({wrong: (lambda wrong=wrong: probe(wrong), ValueError, f"is unknown.*did you mean '{right}'") for wrong, right in near.items()}) == {}
    assert refusals({"": (lambda: probe(""), ValueError, "is unknown")}) == {}


# As a benchmark -----------------------------------------------------------------------------------------------------------------------

@functools.lru_cache(maxsize=None)
def thirty():
    return probes_benchmark()


def test_benchmark_holds_the_thirty():
    b = thirty()
    assert len(b) == 30
    assert b.get_ruleset(-1).describe() == PROBES[-1].ruleset.describe()
    assert "30 rulesets" in repr(b) and "30 rulesets" in b._repr_html_()


def test_benchmark_has_a_name():
    at_home = load_benchmark("probes-30", as_numpy=True)
    assert len(at_home) == 30 and all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(at_home))
    assert benchmark_info("probes-30")["distinct_ruleset_ids"] == 30
    with pytest.raises(ValueError, match="no file"):
        benchmark_file("probes-30")
    b = load_benchmark("probes-30").pad_to(rules=9)
    assert b.rules.shape[:2] == (30, 9) and b.get_ruleset(23).validate().describe() == probe("swap").ruleset.describe()


def test_benchmark_keeps_composed_goals_through_every_method():
    b, number = thirty(), NAMES.index("swap")
    text = PROBES[number].ruleset.describe()
    assert jax.jit(lambda b, i: b.get_ruleset(i))(b, number).describe() == text
    assert b.pad_to(rules=9, tiles=8).get_ruleset(number).validate().describe() == text
    assert b.to_numpy().get_ruleset(number).describe() == text
    first, second = b.split(.5)
    assert second.get_ruleset(number - 15).describe() == text and isinstance(second, Benchmark)
    assert sorted(s.get_ruleset(i).describe() for s in [b.shuffle(jax.random.key(0))] for i in range(30)) == sorted(p.ruleset.describe() for p in PROBES)
    train, test = b.split(.5, by="random")
    assert not set(train.goal_ids().tolist()) & set(test.goal_ids().tolist())


def test_identities_see_what_the_tables_do_not_say():
    b = thirty()
    composed = [NAMES.index(n) for n in ("in-order", "swap", "hold-and-leave", "cue-and-fork")]
    assert len(set(b.goal_ids()[composed].tolist())) == 4
    plain = Benchmark.from_rulesets([probe("two-from-one").ruleset, make_ruleset(probe_goal("two-from-one"), [AgentHoldRule(np.array(named_tile("green hex"), np.uint8), np.array(named_tile("red ball"), np.uint8))],
                                                                         [named_tile("blue square"), named_tile("green hex")])])
    assert plain.goal_ids()[0] != plain.goal_ids()[1]         # with and without the second product
    kept = [i for i, p in enumerate(PROBES) if p.ruleset.extended is None]
    import xland_minigrid.benchmarks.generate as generate
    assert (b.ruleset_ids()[kept] == generate.identities(b.goals, b.rules, b.init_tiles)[0][kept]).all()


def probe_goal(name):
    from xland_minigrid.core.goals import decode_goal
    return decode_goal(np.asarray(probe(name).ruleset.goal))


def test_benchmark_says_that_it_cannot_be_saved(tmp_path):
    with pytest.raises(ValueError, match="no room for composed goals"):
        thirty().save(tmp_path / "probes.safetensors")
    assert not list(tmp_path.iterdir())


def test_benchmark_refuses_other_numbers():
    assert refusals({number: (lambda number=number: thirty().get_ruleset(number), IndexError, "") for number in (30, -31)}) == {}


# Scores -------------------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class ByHeart:
    "Plays one list of actions in every trial."
    actions: tuple

    def start(self, batch):
        return jnp.zeros(batch, jnp.int32)

    def act(self, parameters, inputs, memory, keys):
        at = jnp.where(inputs.done, 0, memory)
        return jnp.asarray(self.actions, jnp.int32)[jnp.minimum(at, len(self.actions) - 1)], at + 1


def test_knowing_the_plan_scores_all_of_it_and_burning_nothing():
    "A trial that ends in lava ends with discount 0, as a won one does."
    p = probe("full-hands")
    scores = score_probes(ByHeart(tuple(p.plan.tolist())), [p, probe("lava-on-the-way")], num_trials=3, copies=2)
    assert scores.success.shape == (2, 2, 3)
    assert (scores.success[0] == 1).all() and (scores.steps[0] == p.par).all() and scores.rows()[0]["ratio"].tolist() == [1, 1, 1]
    assert not scores.success[1].any() and (scores.steps[1] == 3).all()


@pytest.mark.slow
def test_random_actions_fail_where_thought_is_needed():
    few = [probe(n) for n in ("first-step", "key-twice")]
    scores = score_probes(None, few, num_trials=2, copies=16)
    easy, hard = scores.success.mean((1, 2))
    assert easy > .5 and hard < .1
    again = score_probes(None, few, num_trials=2, copies=16)
    assert (scores.success == again.success).all() and (scores.steps == again.steps).all()


def test_tables_of_scores():
    few = tuple(probe(n) for n in ("first-step", "fetch", "key-twice"))
    success = np.zeros((3, 4, 2), np.float32)
    success[0, :3, 0] = success[0, :, 1] = success[1, :1, 0] = 1
    scores = ProbeScores(few, success, np.full((3, 4, 2), 44, np.float32))
    lines = scores.table().split("\n")
    assert len(lines) == 4 and lines[1].split() == ["first-step", "75%", "100%", "1", "44.0"] and lines[3].split() == ["key-twice", "0%", "0%", "22", "2.0"]


def test_scores_need_something_to_score():
    wrong = [dict(copies=0), dict(num_trials=0), dict(probes=[])]
    assert refusals({i: (lambda more=more: score_probes(None, **{"probes": PROBES[:1], **more}), ValueError, "at least one") for i, more in enumerate(wrong)}) == {}


@pytest.mark.slow
def test_all_thirty_can_be_scored():
    scores = score_probes(copies=4, num_trials=2)
    assert isinstance(scores, ProbeScores) and scores.success.shape == (30, 4, 2) and ((scores.success == 0) | (scores.success == 1)).all()
    assert (scores.steps >= 1).all() and not scores.success[NAMES.index("key-twice")].all()


# Pictures -----------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("few, places", [([probe("first-step"), probe("full-hands")], 7), pytest.param(PROBES, 35, marks=pytest.mark.slow)], ids=["two", "all"])
def test_gallery_shows_each_of_them(few, places):
    figure = draw_gallery(few, columns=7)
    assert len(figure.axes) == places and sum(bool(a.images) for a in figure.axes) == len(few)
    written = " ".join(t.get_text().replace("\n", " ") for a in figure.axes for t in a.texts)
    assert all(p.name in written and p.task in written for p in few)
    for wrong in (dict(probes=[]), dict(columns=0)):
        with pytest.raises(ValueError, match="at least one"):
            draw_gallery(**{"probes": PROBES[:1], **wrong})


def test_players_play_the_plans(tmp_path):
    few = [probe(n) for n in ("first-step", "full-hands")]
    players = probe_players(few)
    assert [len(p) for p in players] == [p.par + 1 for p in few] and players[0].captions == ["start", "1. move forward: solved"]
    page = save_gallery(tmp_path / "g.html", few).read_text()
    assert page.count('class="xmg"') == 2 and all(p.task in page for p in few) and gallery_html(few) in page


def test_page_in_the_docs_is_up_to_date():
    rows = re.findall(r"^\| (\d+) \| `([a-z-]+)` \| ([a-z ]+) \| (.+?) \| (.+?) \| ([a-z0-9 ]+) \| (\d+) \| ([\d.]+)% \|$", (DOCS / "probes.md").read_text(), re.MULTILINE)
    assert [(n, c, t, q, s, int(par)) for _, n, c, t, q, s, par, _ in rows] == [(p.name, p.category, p.task, p.probes, p.starts, p.par) for p in PROBES]
    assert float(rows[NAMES.index("lava-on-the-way")][-1]) < 20
    assert (DOCS / "figures" / "probes.png").stat().st_size > 100_000
