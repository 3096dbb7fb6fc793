"""What agents perceive, are told, and believe: every input counts, nothing hidden gets through, and rules do what the belief is asked to guess."""
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from xland_minigrid import make
from xland_minigrid.baselines import belief, encoders
from xland_minigrid.baselines.belief import (EffectLogits, Effects, GoalHead, belief_loss, effects_accuracy, effects_loss, effects_of, effects_table,
                                             goal_kind_probabilities, goal_table, objects_of, plot_goal_kinds)
from xland_minigrid.baselines.encoders import (Attention, ConvEncoder, Event, FlatEncoder, ImageEncoder, Inputs, TaskEncoder, Told, check_tellable,
                                               first_inputs, make_eyes, next_inputs, squares, tell)
from xland_minigrid.benchmarks.benchmark import generate_benchmark
from xland_minigrid.core.actions import Actions, AgentState
from xland_minigrid.core.compose import AllOf, several
from xland_minigrid.core.goals import AgentHoldGoal, AgentOnPositionGoal, TileOnPositionGoal
from xland_minigrid.core.grid import DIRECTIONS, room
from xland_minigrid.core.rules import (AgentHoldRule, AgentNearRule, EmptyRule, TileNearRule, TwoTileRule, check_rule, on_cells, register_rule,
                                       rule_kinds)
from xland_minigrid.core.ruleset import RuleSet, make_ruleset, stack_rulesets
from xland_minigrid.core.tiles import Colors, Tiles
from xland_minigrid.envs.wrappers import DirectionObservationWrapper, GymAutoResetWrapper, RulesAndGoalsObservationWrapper
from xland_minigrid.viz.images import RGBImgObservationWrapper, images_from_observations

VIEWS = {"flat": (5, 5, 2), "conv": (5, 5, 2), "image": (48, 48, 3)}
BALL, KEY, STAR, HEX = ((Tiles.BALL, Colors.RED), (Tiles.KEY, Colors.BLUE), (Tiles.STAR, Colors.GREEN), (Tiles.HEX, Colors.PINK))
GONE = (Tiles.FLOOR, Colors.BLACK)


def some_inputs(*lead, shape=(5, 5, 2), seed=0):
    random = np.random.default_rng(seed)
    most = 256 if shape[-1] == 3 else 14
    return Inputs(
        view=np.asarray(random.integers(0, most, (*lead, *shape)), np.uint8), direction=np.asarray(random.integers(0, 4, lead), np.int32),
        action=np.asarray(random.integers(0, 7, lead), np.int32), reward=np.asarray(random.random(lead), np.float32),
        done=np.asarray(random.random(lead) < 0.3), front=np.asarray(random.integers(0, 14, (*lead, 2)), np.uint8))


def built(make):
    "A module as structure and parameters, made in one compiled program."
    structure = nnx.split(nnx.eval_shape(make))[0]
    return structure, jax.jit(lambda: nnx.split(make())[1])()


def compiled(make):
    structure, parameters = built(make)
    return jax.jit(lambda *args: nnx.merge(structure, parameters)(*args))


@functools.lru_cache(None)
def eyes(name, dtype=jnp.float32, shape=None):
    "A compiled function that looks through these eyes."
    return compiled(lambda: make_eyes(name, shape or VIEWS[name], 6, 8, 32, dtype=dtype, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def benchmark():
    return generate_benchmark("medium", 60, seed=3, progress=False)


@pytest.fixture(scope="module")
def task_encoder():
    return compiled(lambda: TaskEncoder(24, embedding=8, width=32, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def world():
    env, params = make("XLand-MiniGrid-R1-9x9", ruleset=make_ruleset(AgentHoldGoal(BALL), [AgentNearRule(KEY, STAR)], [BALL, KEY]))
    return GymAutoResetWrapper(env), params


# As before ------------------------------------------------------------------------------------------------------------------------------

class OldCell(nnx.Module):
    def __init__(self, features, rngs):
        init = nnx.initializers.normal(0.5)
        self.tile = nnx.Embed(16, features, embedding_init=init, rngs=rngs)
        self.color = nnx.Embed(16, features, embedding_init=init, rngs=rngs)

    def __call__(self, cells):
        return self.tile(cells[..., 0].astype(jnp.int32)) + self.color(cells[..., 1].astype(jnp.int32))


class Old(nnx.Module):
    "Encoder, event, attention and belief as they were in the first network, in its order of parameters."

    def __init__(self, rngs):
        orthogonal = nnx.initializers.orthogonal
        self.cell = OldCell(8, rngs)
        self.mix = nnx.Linear(26 * 8 + 4 + 7 + 2, 32, kernel_init=orthogonal(np.sqrt(2)), rngs=rngs)
        self.what = OldCell(12, rngs)
        self.how = nnx.Linear(9, 12, kernel_init=nnx.initializers.normal(1.0), rngs=rngs)
        self.wanted = nnx.Linear(32, 32, kernel_init=orthogonal(1.0), rngs=rngs)
        self.belief = nnx.Linear(32, 80, kernel_init=orthogonal(0.1), rngs=rngs)

    def __call__(self, x):
        cells = jnp.concatenate([x.view.reshape(*x.view.shape[:-3], -1, 2), x.front[..., None, :]], axis=-2)
        action = jax.nn.one_hot(x.action, 7)
        seen = jax.nn.relu(self.mix(jnp.concatenate([
            self.cell(cells).reshape(*cells.shape[:-2], -1), jax.nn.one_hot(x.direction, 4), action, x.reward[..., None],
            x.done[..., None].astype(jnp.float32)], axis=-1)))
        outcome = jnp.stack([x.reward > 0, x.done], axis=-1).astype(jnp.float32)
        event = self.what(x.front) * self.how(jnp.concatenate([action, outcome], axis=-1))
        tile, color = jnp.split(self.wanted(seen), 2, axis=-1)
        flat = x.view.reshape(*x.view.shape[:-3], -1, 2).astype(jnp.int32)
        return seen, event, jnp.take_along_axis(tile, flat[..., 0], -1) + jnp.take_along_axis(color, flat[..., 1], -1), self.belief(seen)


class New(nnx.Module):
    def __init__(self, rngs):
        self.encoder = FlatEncoder(5, 6, 8, 32, rngs=rngs)
        self.event = Event(6, 12, rngs=rngs)
        self.attention = Attention(32, rngs=rngs)
        self.belief = GoalHead(32, rngs=rngs)

    def __call__(self, x):
        seen = self.encoder(x)
        return seen, self.event(x), self.attention(seen, x.view), self.belief(seen).reshape(*seen.shape[:-1], 80)


def test_the_first_network_stays_what_it_was_bit_for_bit():
    x = some_inputs(3, 7)
    answers, slopes = [], []
    for cls in (Old, New):
        structure, parameters = built(lambda: cls(nnx.Rngs(11)))
        call = lambda p: nnx.merge(structure, p)(x)
        loss = lambda p: sum((y * jnp.cos(jnp.arange(y.shape[-1]))).sum() for y in call(p))
        answer, slope = jax.device_get(jax.jit(lambda p: (call(p), jax.grad(loss)(p)))(parameters))
        answers.append(answer)
        slopes.append(sorted(jax.tree.leaves(slope), key=lambda g: (g.shape, g.tobytes())))
    for old, new in zip(*answers, strict=True):
        assert (old == new).all()
    for old, new in zip(*slopes, strict=True):
        assert old.shape == new.shape and np.array_equal(old, new)
    names = {"/".join(map(str, path)) for path in nnx.to_flat_state(nnx.state(nnx.eval_shape(lambda: New(nnx.Rngs(0))))).paths}
    assert {"encoder/cell/tile/embedding", "encoder/mix/kernel", "event/how/bias", "attention/wanted/kernel", "belief/kernel", "belief/bias"} <= names
    assert encoders.Encoder is FlatEncoder


# Eyes -----------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, shape", [(n, (v, v, 2)) for n in ("flat", "conv") for v in (3, 4, 5, 7, 9)] +
                         [("image", (s, s, 3)) for s in (12, 28, 80, 112, 120, 160, 168, 224, 225, 288)] + [("image", (64, 96, 3))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shapes_and_types(name, shape, dtype):
    "No numbers are computed: shapes of every size, on any leading axes, in both types."
    structure, parameters = nnx.split(nnx.eval_shape(lambda: make_eyes(name, shape, 6, 8, 24, dtype=dtype, rngs=nnx.Rngs(0))))
    assert {x.dtype for x in jax.tree.leaves(parameters)} == {jnp.dtype(jnp.float32)}
    for lead in ((), (2,), (3, 2)):
        x = jax.tree.map(lambda a: np.broadcast_to(a, (*lead, *a.shape)), some_inputs(shape=shape))
        out = jax.eval_shape(lambda p, x: nnx.merge(structure, p)(x), parameters, x)
        assert out.shape == (*lead, 24) and out.dtype == dtype


@pytest.mark.parametrize("name", VIEWS)
def test_every_input_counts(name):
    look = eyes(name)
    x = some_inputs(16, shape=VIEWS[name])
    before = np.asarray(look(x))
    changes = dict(direction=(x.direction + 1) % 4, action=(x.action + 1) % 7, reward=x.reward + 0.5, done=~x.done)
    if name != "image":
        changes |= dict(front=(x.front + np.array([1, 0], np.uint8)) % 14)
    for field, value in changes.items():
        assert (np.asarray(look(x.replace(**{field: value}))) != before).any(-1).all(), field
    if name != "image":
        assert (np.asarray(look(x.replace(front=(x.front + np.array([0, 1], np.uint8)) % 14))) != before).any(-1).all()
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(before))


@pytest.mark.parametrize("name", VIEWS)
def test_every_place_in_view_counts(name):
    "One cell is changed at a time (tile, then colour); in an image every square of 4 x 4 pixels, in each of the three channels."
    look = eyes(name)
    one = some_inputs(shape=VIEWS[name], seed=4)
    step = 4 if name == "image" else 1
    side, channels = VIEWS[name][0], VIEWS[name][2]
    views = []
    for i, j, c in itertools.product(range(0, side, step), range(0, side, step), range(channels)):
        view = np.array(one.view)
        view[i:i + step, j:j + step, c] = 255 - view[i:i + step, j:j + step, c] if name == "image" else (view[i, j, c] + 3) % 14
        views.append(view)
    views = np.stack([np.asarray(one.view), *views])
    answers = np.asarray(look(jax.tree.map(lambda a: np.broadcast_to(a, (len(views), *a.shape)), one).replace(view=views)))
    assert (answers[1:] != answers[:1]).any(-1).all()


def test_convolutions_are_those_of_the_formula():
    "The convolutional eyes against loops in NumPy."
    module = nnx.merge(*built(lambda: ConvEncoder(4, 6, 3, 10, rngs=nnx.Rngs(2))))
    x = some_inputs(2, shape=(4, 4, 2))
    embed = lambda cells: np.concatenate([np.asarray(module.cell.tile.embedding[...])[cells[..., 0]], np.asarray(module.cell.color.embedding[...])[cells[..., 1]]], -1)
    y = embed(np.asarray(x.view)).astype(np.float64)
    for layer in module.layers:
        kernel, n = np.asarray(layer.kernel[...], np.float64), y.shape[1] - 1
        new = np.zeros((len(y), n, n, kernel.shape[-1]))
        for b, i, j in np.ndindex(len(y), n, n):
            new[b, i, j] = np.tensordot(y[b, i:i + 2, j:j + 2], kernel, 3) + np.asarray(layer.bias[...])
        y = np.maximum(new, 0)
    assert y.shape[1:] == (1, 1, 64)
    joined = np.concatenate([y.reshape(2, -1), np.eye(4)[x.direction], np.asarray(module.senses.action.embedding[...])[x.action], x.reward[:, None],
                             x.done[:, None], embed(np.asarray(x.front))], -1)
    expected = np.maximum(joined @ np.asarray(module.mix.kernel[...], np.float64) + np.asarray(module.mix.bias[...]), 0)
    structure, parameters = nnx.split(module)
    assert np.allclose(jax.jit(lambda p: nnx.merge(structure, p)(x))(parameters), expected, atol=1e-5) and expected.max() > 0.1


def test_halving_ends_at_the_cells():
    for view, tile in itertools.product((3, 5, 7, 9, 11, 13), (4, 8, 16, 32)):
        assert np.prod(squares(view * tile, view * tile)) == tile, (view, tile)
    for side in range(12, 300, 7):
        assert 2 <= -(-side // np.prod(squares(side, side))) <= encoders.MOST_POSITIONS or side <= 4 * encoders.MOST_POSITIONS


@pytest.mark.parametrize("name", VIEWS)
def test_half_precision_is_close(name):
    x = some_inputs(64, shape=VIEWS[name])
    full, half = (np.asarray(eyes(name, dtype)(x), np.float32) for dtype in (jnp.float32, jnp.bfloat16))
    assert 0 < np.abs(full - half).max() < 0.05 * np.abs(full).max() + 0.02


def test_eyes_that_do_not_fit_are_refused():
    for wrong, says in [
            (("pixels", (5, 5, 2)), "choose 'flat', 'conv', 'image'"), (("image", (5, 5, 2)), "RGBImgObservationWrapper"), (("image", (8, 8, 3)), "at least 12"),
            (("flat", (80, 80, 3)), "eyes 'image'"), (("conv", (2, 2, 2)), "at least 3"), (("conv", (5, 7, 2)), "square"), (("flat", (5,)), "square"),
            (("flat", (5, 5, 2), 0), "num_actions is 0"), (("flat", (5, 5, 2), 6, 0), "embedding is 0"), (("image", (48, 48, 3), 6, 8, -1), "features is -1")]:
        with pytest.raises(ValueError, match=says):
            make_eyes(*wrong, *(6, 8, 32)[len(wrong) - 2:], rngs=nnx.Rngs(0))


def test_attention_answers_cell_by_cell_and_refuses_images():
    attention = nnx.merge(*built(lambda: Attention(8, rngs=nnx.Rngs(0))))
    x, memory = some_inputs(3, 4), np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    answers, table = jax.device_get(jax.jit(lambda memory, view: (attention(memory, view), attention.wanted(memory)))(memory, x.view))
    view = np.asarray(x.view).reshape(3, 4, 25, 2)
    t, b = np.indices((3, 4, 25))[:2]
    assert np.allclose(answers, table[t, b, view[..., 0]] + table[t, b, 16 + view[..., 1]], atol=1e-6)
    with pytest.raises(ValueError, match="attention=False"):
        attention(memory[0, 0], some_inputs(shape=(48, 48, 3)).view)


# Inputs ---------------------------------------------------------------------------------------------------------------------------------

def played(env, params, n, seed=0):
    "Fresh time steps `(n,)`, actions, and the time steps after them."
    start = jax.jit(jax.vmap(env.reset, (None, 0)))(params, jax.random.split(jax.random.key(seed), n))
    actions = np.arange(n) % 6
    return jax.device_get((start, actions, jax.jit(jax.vmap(env.step, (None, 0, 0)))(params, start, actions)))


@pytest.fixture(scope="module")
def plain(world):
    return played(*world, 12)


@jax.jit
def inputs_of(start, actions, then):
    return next_inputs(first_inputs(start, 6), actions, then)


def another_task(step):
    "The same time step with another goal and other rules, in the state and wherever a wrapper shows them."
    plus = lambda x: np.asarray(x) + 1
    seen = {k: v if k in ("img", "direction") else jax.tree.map(plus, v) for k, v in step.observation.items()}
    return step.replace(observation=seen, state=step.state.replace(
        goal_encoding=plus(step.state.goal_encoding), rule_encoding=plus(step.state.rule_encoding)))


def test_inputs_leave_out_what_a_wrapper_shows_of_the_task(plain, world):
    "What the inputs are is asserted in the chapter; here the observation holds goal and rules as well."
    wrapper, (start, actions, then) = RulesAndGoalsObservationWrapper(world[0]), plain
    telling = lambda step: step.replace(observation={"img": step.observation, **wrapper.extra(step.state)})
    expected = inputs_of(start, actions, then)
    for change in (lambda step: step, another_task):
        found = inputs_of(change(telling(start)), actions, change(telling(then)))
        assert all((np.asarray(a) == np.asarray(b)).all() for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True))
    assert expected.reward.dtype == jnp.float32


def test_an_observation_without_a_picture_is_refused(plain):
    start = plain[0]
    with pytest.raises(ValueError, match="direction but no 'img'"):
        first_inputs(start.replace(observation={"direction": jnp.zeros(2)}), 6)
    with pytest.raises(ValueError, match="agents read cells"):
        first_inputs(start.replace(observation=jnp.zeros((2, 5, 5, 4), jnp.uint8)), 6)


def images(world, tile_size):
    return RGBImgObservationWrapper(DirectionObservationWrapper(world[0]), tile_size=tile_size), world[1]


def test_eyes_for_images_in_a_rendered_world(plain):
    start, actions, then = plain
    draw = jax.jit(lambda step: step.replace(observation={"img": images_from_observations(step.observation, 16)}))
    look = eyes("image", shape=(80, 80, 3))
    first, following = first_inputs(draw(start), 6), inputs_of(draw(start), actions, draw(then))
    assert first.view.shape == (12, 80, 80, 3) and first.view.dtype == jnp.uint8 and not np.asarray(following.front).any()
    assert (np.asarray(following.direction) == then.state.agent.direction).all()
    out = np.asarray(look(jax.tree.map(lambda a, b: np.stack([a, b]), first, following)))
    assert out.shape == (2, 12, 32) and len(np.unique(out[0].round(6), axis=0)) > 3


@pytest.mark.slow
@pytest.mark.optimized
def test_eyes_for_images_learn_what_lies_ahead(world):
    "Trained on rendered views, the eyes name the cell ahead in views they have not seen."
    size = 8
    def batch(n, seed):
        (cells, *_), (start, *_) = played(*world, n, seed), played(*images(world, size), n, seed)
        assert (cells.state.grid == start.state.grid).all()
        return jax.tree.map(jnp.asarray, (first_inputs(start, 6), next_inputs(first_inputs(cells, 6), jnp.zeros(n, int), cells).front[:, 0]))
    structure, parameters = built(lambda: nnx.Sequential(ImageEncoder(5 * size, 5 * size, 6, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 16, rngs=nnx.Rngs(1))))
    logits = lambda p, x: nnx.merge(structure, p)(x)
    optimizer = optax.adam(1e-3)
    x, y = batch(4096, 0)
    @jax.jit
    def train(p):
        def step(carry, key):
            p, state = carry
            rows = jax.random.randint(key, (128,), 0, 4096)
            slope = jax.grad(lambda p: optax.softmax_cross_entropy_with_integer_labels(logits(p, jax.tree.map(lambda a: a[rows], x)), y[rows]).mean())(p)
            change, state = optimizer.update(slope, state)
            return (optax.apply_updates(p, change), state), None
        return jax.lax.scan(step, (p, optimizer.init(p)), jax.random.split(jax.random.key(0), 600))[0][0]
    x_new, y_new = batch(1024, 1)
    guess = np.asarray(logits(train(parameters), x_new).argmax(-1))
    commonest = np.bincount(y_new).max() / len(y_new)
    assert (guess == y_new).mean() > 0.99 > commonest + 0.1, ((guess == y_new).mean(), commonest)


# Told -----------------------------------------------------------------------------------------------------------------------------------

tell_all = jax.jit(tell)


def all_told(benchmark, n=24):
    return jax.device_get(tell_all(jax.random.split(jax.random.key(0), n), benchmark.get_rulesets(np.arange(n)), 1.0, 1.0))


def test_tell_shows_what_it_should(benchmark):
    numbers = np.random.default_rng(5).integers(0, 60, 4000)
    tasks, keys = jax.tree.map(np.asarray, benchmark.get_rulesets(numbers)), jax.random.split(jax.random.key(6), 4000)
    told = jax.device_get(tell_all(keys, tasks, 0.7, 0.2))
    assert told.goal.dtype == told.rules.dtype == np.uint8 and told.goal_shown.dtype == told.rules_shown.dtype == bool
    shares = [told.goal_shown.mean(), told.rules_shown.mean(), (told.goal_shown & told.rules_shown).mean()]
    assert np.allclose(shares, [0.7, 0.2, 0.14], atol=0.03)
    assert (told.goal == np.where(told.goal_shown[:, None], tasks.goal, 0)).all()
    assert (told.rules == np.where(told.rules_shown[:, None, None], tasks.rules, 0)).all()
    part = tell_all(keys[100:108], jax.tree.map(lambda x: x[100:108], tasks), 0.7, 0.2)
    assert all((np.asarray(a) == b[100:108]).all() for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(told), strict=True)), "a task's flags depend on its key alone"
    raw = tell_all(jax.random.key_data(keys[100:108]), jax.tree.map(lambda x: x[100:108], tasks), 0.7, 0.2)
    assert (np.asarray(raw.goal_shown) == told.goal_shown[100:108]).all()
    for goal, rules in itertools.product((0.0, 1.0), repeat=2):
        told = jax.device_get(tell_all(keys, tasks, goal, rules))
        assert (told.goal_shown == bool(goal)).all() and (told.rules_shown == bool(rules)).all()


def test_tasks_that_cannot_be_told_are_refused(benchmark):
    keys = jax.random.split(jax.random.key(0), 2)
    plain = make_ruleset(AgentHoldGoal(BALL), [AgentNearRule(KEY, STAR)], [BALL, KEY])
    composed = make_ruleset(AllOf(AgentHoldGoal(BALL), AgentHoldGoal(KEY)), [], [BALL, KEY])
    more = make_ruleset(AgentHoldGoal(BALL), [several(AgentNearRule(KEY, STAR), HEX)], [BALL, KEY])
    with pytest.raises(ValueError, match="composed goals"):
        tell(keys, stack_rulesets([plain, composed]))
    with pytest.raises(ValueError, match="composed goals"):
        jax.jit(tell)(keys, stack_rulesets([plain, composed]))
    with pytest.raises(ValueError, match="several products"):
        tell(keys, stack_rulesets([plain, more]))
    with pytest.raises(ValueError, match="composed goals"):
        check_tellable(composed)
    opened = stack_rulesets([plain.opened(), plain])
    assert opened.open is not None and (jax.jit(tell)(keys, opened).goal == opened.goal).all()
    with pytest.raises(ValueError, match="stack_rulesets"):
        tell(keys[0], plain)
    for wrong in (dict(show_goal=1.2), dict(show_rules=-0.1), dict(show_goal=float("nan"))):
        with pytest.raises(ValueError, match="from 0 to 1"):
            tell(keys, opened, **wrong)


def test_what_is_hidden_is_hidden(benchmark, task_encoder):
    "Even where the bytes are left in, a hidden part changes nothing; a shown one does."
    told = all_told(benchmark)
    other = told.replace(goal=told.goal[::-1], rules=told.rules[::-1])
    no, yes = np.zeros(24, bool), np.ones(24, bool)
    for goal, rules in itertools.product((no, yes), repeat=2):
        shown = dict(goal_shown=goal, rules_shown=rules)
        whole = np.asarray(task_encoder(told.replace(**shown)))
        same = (np.asarray(task_encoder(told.replace(goal=other.goal, **shown))) == whole).all(-1)
        assert same.all() if not goal[0] else (same == (told.goal == other.goal).all(-1)).all()
        same = (np.asarray(task_encoder(told.replace(rules=other.rules, **shown))) == whole).all(-1)
        assert same.all() if not rules[0] else (same == (told.rules == other.rules).all((1, 2))).all()
        assert np.isfinite(whole).all()
    unknown, none = (np.asarray(task_encoder(told.replace(goal_shown=flag, goal=np.zeros_like(told.goal)))) for flag in (no, yes))
    assert (unknown != none).any(-1).all(), "a hidden goal is another thing than no goal"
    hidden, empty = (np.asarray(task_encoder(told.replace(rules_shown=flag, rules=np.zeros_like(told.rules)))) for flag in (no, yes))
    assert (hidden != empty).any(-1).all(), "hidden rules are another thing than no rules"


@settings(max_examples=25)
@given(st.integers(0, 59), st.randoms(use_true_random=False))
def test_padding_does_not_matter(benchmark, task_encoder, number, random):
    "Rows of zeros may stand anywhere between the rules."
    task = benchmark.get_ruleset(number)
    rules = np.asarray(task.rules)[np.asarray(task.rules)[:, 0] != 0]
    def told(places):
        rows = np.zeros((1, 12, 7), np.uint8)
        rows[0, places] = rules
        return Told(goal=np.asarray(task.goal)[None], rules=rows, goal_shown=np.ones(1, bool), rules_shown=np.ones(1, bool))
    scattered = sorted(random.sample(range(12), len(rules)))
    assert np.allclose(task_encoder(told(list(range(len(rules))))), task_encoder(told(scattered)), atol=1e-5)


def test_the_order_of_rules_and_every_byte_matter(task_encoder):
    "A chain read backwards is another task; any other kind, tile, colour or position is another vector."
    chain = make_ruleset(AgentHoldGoal(STAR), [AgentNearRule(BALL, KEY), TileNearRule(KEY, HEX, STAR)], [BALL, HEX])
    def read(goals, rules):
        n = max(len(goals), len(rules))
        goals, rules = (np.asarray(np.broadcast_to(x, (n, *np.shape(x)[1:])), np.uint8) for x in (goals, rules))
        return np.asarray(task_encoder(Told(goal=goals, rules=rules, goal_shown=np.ones(n, bool), rules_shown=np.ones(n, bool))))
    goal, rules = np.asarray(chain.goal), np.asarray(chain.rules)
    many = [rules, rules[::-1]]
    for i, j in np.ndindex(2, 7):
        changed = rules.copy()
        changed[i, j] = changed[i, j] % 11 + 1
        many.append(changed)
    registered = rules.copy()
    registered[0, 0] = 200
    apart = read([goal], many + [registered])
    assert len(np.unique(apart.round(4), axis=0)) == len(apart)
    goals = [np.asarray(g.encode()) for g in (AgentOnPositionGoal((3, 20)), AgentOnPositionGoal((3, 21)), AgentOnPositionGoal((20, 3)), AgentOnPositionGoal((255, 21)),
                                             TileOnPositionGoal(BALL, (3, 20)), TileOnPositionGoal(BALL, (3, 200)), TileOnPositionGoal(KEY, (3, 20)))]
    goals += [np.array([kind, *BALL, *KEY], np.uint8) for kind in (1, 4, 7, 14, 15, 16, 253)] + [np.array([4, *BALL, *HEX], np.uint8)]
    apart = read(goals, [rules])
    assert len(np.unique(apart.round(4), axis=0)) == len(apart) and np.isfinite(apart).all()


@pytest.mark.slow
@pytest.mark.optimized
def test_task_encoder_in_half_precision_and_its_gradient(benchmark, task_encoder):
    structure, parameters = built(lambda: TaskEncoder(24, embedding=8, width=32, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert {x.dtype for x in jax.tree.leaves(parameters)} == {jnp.dtype(jnp.float32)}
    told = all_told(benchmark)
    out = jax.jit(lambda p: nnx.merge(structure, p)(told))(parameters)
    full = np.asarray(task_encoder(told))
    assert out.dtype == jnp.bfloat16 and np.abs(np.asarray(out, np.float32) - full).max() < 0.1 * np.abs(full).max()
    structure, parameters = built(lambda: TaskEncoder(24, embedding=8, width=32, rngs=nnx.Rngs(0)))
    slope = jax.jit(jax.grad(lambda p, told: (nnx.merge(structure, p)(told) ** 2).sum()))
    shown, hidden = slope(parameters, told), slope(parameters, told.replace(goal_shown=jnp.zeros(24, bool), rules_shown=jnp.zeros(24, bool)))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((shown, hidden)))
    size = lambda x: sum(float(jnp.abs(leaf).sum()) for leaf in jax.tree.leaves(x))
    assert size(shown["goal"]) > 0 < size(shown["rules"]) and size(shown["unknown_goal"]) == 0
    assert size(hidden["goal"]) == 0 == size(hidden["rules"]) and size(hidden["unknown_goal"]) > 0


def test_task_encoders_of_wrong_sizes_are_refused():
    for wrong, says in [(dict(features=0), "features is 0"), (dict(width=63), "width is 63"), (dict(width=64, heads=3), "multiple of heads"),
                        (dict(layers=0), "layers is 0"), (dict(embedding=0), "embedding is 0")]:
        with pytest.raises(ValueError, match=says):
            TaskEncoder(**{"features": 8, **wrong}, rngs=nnx.Rngs(0))


def test_a_single_task_is_refused_by_the_task_encoder(benchmark, task_encoder):
    with pytest.raises(ValueError, match="axis of the batch"):
        task_encoder(jax.tree.map(lambda x: x[0], all_told(benchmark)))


# The goal -------------------------------------------------------------------------------------------------------------------------------

def test_belief_loss_from_ignorance_to_certainty():
    draw, loss, sure = np.random.default_rng(0), jax.jit(belief_loss), lambda goals: 60 * np.eye(16, dtype=np.float32)[goals]
    goals = draw.integers(0, 16, (4, 6, 5)).astype(np.uint8)
    assert np.isclose(loss(np.zeros((4, 6, 5, 16), np.float32), goals), 5 * np.log(16)) and loss(sure(goals), goals) < 1e-6
    far, near = goals.copy(), goals.copy()
    far[..., 3], near[..., 3] = 200, 15
    assert np.isclose(loss(sure(near), far), 0, atol=1e-6), "larger bytes count as 15"
    random = draw.normal(size=(4, 6, 5, 16)).astype(np.float32)
    p = np.take_along_axis(np.exp(random) / np.exp(random).sum(-1, keepdims=True), goals.astype(int)[..., None], -1)
    assert np.isclose(loss(random, goals), -np.log(p).sum((2, 3)).mean(), rtol=1e-5)
    for wrong in (goals[0], goals[..., :4], goals[:, :1]):
        with pytest.raises(ValueError, match="same leading axes"):
            belief_loss(random, wrong)


def test_a_belief_can_be_read():
    assert len(belief.GOAL_KIND_NAMES) == 16 and belief.GOAL_KIND_NAMES[:6] == ("empty", "agent hold", "agent on tile", "agent near", "tile near", "agent on position")
    logits = np.random.default_rng(0).normal(size=(7, 5, 16)) * 3
    p = goal_kind_probabilities(logits)
    assert p.shape == (7, 16) and np.allclose(p, jax.nn.softmax(logits[:, 0]), atol=1e-6) and np.allclose(p.sum(-1), 1, atol=1e-6)
    sure = 60 * np.eye(16)[[1, Tiles.BALL, Colors.RED, 0, 0]]
    lines = goal_table(sure).splitlines()
    assert [line.split(None, 1)[0] for line in lines] == ["kind", "tile", "colour", "second", "second"]
    assert [line.rsplit("  ", 1)[1].strip() for line in lines] == ["agent hold 100%", "ball 100%", "red 100%", "none 100%", "none 100%"]
    figure = plot_goal_kinds(np.stack([sure, sure]), truth=4)
    assert {text.get_text() for text in figure.axes[0].get_legend().get_texts()} == {"agent hold", "tile near"}
    for wrong in (lambda: goal_kind_probabilities(logits[..., :15]), lambda: goal_table(logits), lambda: plot_goal_kinds(sure), lambda: goal_table(sure[:4])):
        with pytest.raises(ValueError):
            wrong()


# What rules do --------------------------------------------------------------------------------------------------------------------------

def by_hand(rules, objects):
    "What `effects_of` promises, in loops, from Table 3."
    known, consumed, product = [], [], []
    for thing in map(tuple, objects.tolist()):
        found = None
        for kind, *rest in rules.tolist():
            a, b, c = tuple(rest[:2]), tuple(rest[2:4]), tuple(rest[4:])
            if kind and found is None and thing in ((a, b) if 3 <= kind <= 7 else (a,)):
                found = c if 3 <= kind <= 7 else b
        exists = thing[0] != 0
        known.append(exists)
        consumed.append(exists and found is not None)
        product.append(found if exists and found is not None else (0, 0))
    return np.array(known), np.array(consumed), np.array(product, np.uint8)


compiled_effects = jax.jit(effects_of)
pairs = st.sampled_from([BALL, KEY, STAR, HEX, GONE, (0, 0)])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 11), pairs, pairs, pairs), min_size=6, max_size=6), st.lists(pairs, min_size=5, max_size=5))
def test_effects_of_any_rules_and_objects(rows, objects):
    rules = np.array([[kind, *a, *b, *c] for kind, a, b, c in rows], np.uint8)
    objects = np.array([o if o != GONE else (0, 0) for o in objects], np.uint8)
    for ours, expected in zip(compiled_effects(rules, objects), by_hand(rules, objects), strict=True):
        assert (np.asarray(ours) == expected).all()


def situations(rules, objects):
    "Every situation in which one of the rules could consume one of the objects: (rule, object), world, agent's pocket, action, position."
    floor = np.asarray(room(7, 7))
    for (r, rule), (k, thing) in itertools.product(enumerate(rules), enumerate(objects)):
        if not rule[0] or not thing[0]:
            continue
        yield r, k, floor, thing, Actions.PICK_UP, (3, 2)
        for row, column in DIRECTIONS:
            grid = floor.copy()
            grid[3 + row, 3 + column] = thing
            yield r, k, grid, (2, 2), Actions.MOVE_FORWARD, (3, 3)
            for partner, swap in itertools.product((rule[1:3], rule[3:5]), (False, True)):
                if tuple(partner) in (tuple(thing), GONE) or not partner[0]:
                    continue
                grid = floor.copy()
                grid[1, 5], grid[1 + row, 5 + column] = (partner, thing) if swap else (thing, partner)
                if 0 < 1 + row < 6 and 0 < 5 + column < 6:
                    yield r, k, grid, (2, 2), Actions.PUT_DOWN, (1, 5)


def test_effects_are_what_the_world_does(benchmark):
    "Objects are really held, approached and put beside each other, under one rule at a time: what disappears is consumed, what appears is the product."
    tasks = [benchmark.get_ruleset(i) for i in np.flatnonzero(np.asarray(benchmark.num_rules) > 1)[:12]]
    tasks.append(make_ruleset(AgentHoldGoal(STAR), [TileNearRule(BALL, KEY, GONE), AgentHoldRule(HEX, GONE), AgentNearRule(STAR, HEX)], [BALL, KEY]))
    cases = []
    for t, task in enumerate(tasks):
        objects = np.asarray(objects_of(task))
        cases += [(t, *case) for case in situations(np.asarray(task.rules), objects)]
    rules = np.stack([np.asarray(tasks[t].rules)[r] for t, r, *_ in cases])
    known_objects = [np.asarray(objects_of(task)) for task in tasks]
    grids, pockets = np.stack([c[3] for c in cases]), np.array([c[4] for c in cases], np.uint8)
    actions, positions = np.array([c[5] for c in cases]), np.array([c[6] for c in cases])
    @jax.jit
    @jax.vmap
    def act(rule, grid, pocket, action, position):
        agent = AgentState(position=jnp.array([3, 3], jnp.int32), direction=jnp.int32(3), pocket=pocket)
        grid, agent = check_rule(rule[None], grid, agent, action, position)
        return jnp.concatenate([grid.reshape(-1, 2), agent.pocket[None]])
    before = np.concatenate([grids.reshape(len(cases), -1, 2), pockets[:, None]], 1)
    after = np.asarray(act(rules, grids, pockets, actions, positions))
    found = {}
    for i, (t, r, k, *_) in enumerate(cases):
        thing = known_objects[t][k]
        count = lambda cells: (cells == thing).all(-1).sum()
        if count(after[i]) < count(before[i]):
            new = [tuple(c) for c in after[i][(after[i] != before[i]).any(-1)].tolist() if c[0] > Tiles.FLOOR]
            found.setdefault((t, k), []).append((r, new[0] if new else GONE))
    compared = 0
    for t, task in enumerate(tasks):
        known, consumed, product = jax.device_get(compiled_effects(task.rules, known_objects[t]))
        for k in np.flatnonzero(known):
            really = min(found.get((t, k), [(99, None)]))[1]
            assert bool(consumed[k]) == (really is not None) and (really is None or tuple(product[k].tolist()) == really), (t, k, task)
            compared += 1
    assert compared > 60 and len(found) > 30 and any(p == GONE for rows in found.values() for _, p in rows)


def test_objects_of_a_task(benchmark):
    of_all = jax.jit(jax.vmap(objects_of))
    for task, ours in zip(map(benchmark.get_ruleset, range(60)), np.asarray(of_all(benchmark.get_rulesets(np.arange(60)))), strict=True):
        rows = [tuple(x) for x in np.asarray(task.init_tiles).tolist()]
        rows += [tuple(r[5:7] if 3 <= r[0] <= 7 else r[3:5]) for r in np.asarray(task.rules).tolist() if r[0]]
        ours = [tuple(x) for x in ours.tolist() if x[0]]
        assert len(ours) == len(set(ours)) and set(ours) == {x for x in rows if x[0] > Tiles.FLOOR}
        assert len(rows) <= objects_of(task).shape[0] == task.init_tiles.shape[0] + task.rules.shape[0]
    more = make_ruleset(AgentHoldGoal(BALL), [several(AgentNearRule(KEY, STAR), HEX, BALL)], [BALL, KEY])
    assert {tuple(x) for x in objects_of(more).tolist()} == {BALL, KEY, STAR, HEX, (0, 0)}
    with pytest.raises(ValueError, match="jax.vmap"):
        objects_of(benchmark.get_rulesets(np.arange(3)))
    for wrong in ((np.zeros((2, 3, 7)), np.zeros((4, 2))), (np.zeros((3, 7)), np.zeros(2)), (np.zeros((3, 6)), np.zeros((4, 2)))):
        with pytest.raises(ValueError):
            effects_of(*wrong)


def test_tools_and_unknown_kinds():
    "A tool that is only carried stays; one that is used up is consumed; a kind that nobody registered does nothing."
    number = max(rule_kinds.classes) + 1
    def registered(identifier, used_up):
        cls = type(f"Tool{identifier}", (TwoTileRule,), {"__module__": __name__, "__annotations__": {}, "when": (Actions.TOGGLE,),
                                                          "looks": on_cells("ahead").while_carrying(used_up)})
        return register_rule(cls, id=identifier)
    objects = np.array([BALL, KEY, STAR], np.uint8)
    row = lambda kind: np.array([[kind, *BALL, *KEY, *STAR]], np.uint8)
    try:
        for identifier, used_up in ((number, False), (number + 1, True)):
            registered(identifier, used_up)
            _, consumed, product = effects_of(row(identifier), objects)
            assert consumed.tolist() == [True, used_up, False] and product[0].tolist() == list(STAR)
    finally:
        for identifier in (number, number + 1):
            rule_kinds.classes.pop(identifier, None)
            rule_kinds.sets[identifier], rule_kinds.two[identifier] = 0, False
    for kind in (EmptyRule.ID, number, 255):
        known, consumed, product = effects_of(row(kind), objects)
        assert known.all() and not consumed.any() and not product.any()


# Asking about objects -------------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def effects(benchmark):
    @jax.jit
    def all_effects(rulesets):
        objects = jax.vmap(objects_of)(rulesets)
        return objects, jax.vmap(effects_of)(rulesets.rules, objects)

    return jax.device_get(all_effects(benchmark.get_rulesets(np.arange(60))))


lost, right, nudge = jax.jit(effects_loss), jax.jit(effects_accuracy), jax.jit(jax.grad(effects_loss))


def surely(consumed, product):
    "Logits of a head that knows the answers."
    one_hot = 60 * np.eye(16, dtype=np.float32)
    return EffectLogits(np.where(consumed, np.float32(60), np.float32(-60)), one_hot[product[..., 0]], one_hot[product[..., 1]])


def test_effects_loss_from_ignorance_to_certainty(effects):
    objects, (known, consumed, product) = effects
    blank, sure = jax.tree.map(np.zeros_like, surely(consumed, product)), surely(consumed, product)
    share = float(consumed.sum() / known.sum())
    assert np.isclose(lost(blank, known, consumed, product), np.log(2) + share * 2 * np.log(16), rtol=1e-5)
    assert lost(sure, known, consumed, product) < 1e-6 and right(sure, known, consumed, product) == 1
    wrong = sure._replace(consumed=-sure.consumed)
    assert np.isclose(lost(wrong, known, consumed, product), 60, rtol=1e-4) and right(wrong, known, consumed, product) == 0
    for part in ("tile", "colour"):
        off = sure._replace(**{part: np.roll(getattr(sure, part), 1, -1)})
        assert np.isclose(right(off, known, consumed, product), 1 - share, atol=1e-6)
    nothing = np.zeros_like(known)
    assert lost(wrong, nothing, consumed, product) == 0 == right(wrong, nothing, consumed, product)


def test_only_what_exists_and_is_consumed_is_taught(effects):
    objects, (known, consumed, product) = effects
    random = np.random.default_rng(0)
    logits = EffectLogits(*(random.normal(size=shape).astype(np.float32) for shape in (known.shape, (*known.shape, 16), (*known.shape, 16))))
    slope = jax.device_get(nudge(logits, known, consumed, product))
    assert ((slope.consumed != 0) == known).all()
    for part in (slope.tile, slope.colour):
        assert ((part != 0).any(-1) == consumed).all()
    three = jax.tree.map(lambda x: np.stack([x, x, x]), logits)
    assert np.isclose(lost(three, known, consumed, product), lost(logits, known, consumed, product), rtol=1e-6), "targets (B, K), logits (T, B, K)"
    assert np.isclose(right(three, known, consumed, product), right(logits, known, consumed, product))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_heads_answer_in_float32_from_memory_and_question_alone(effects, dtype):
    objects, _ = effects
    memory = np.random.default_rng(0).normal(size=(3, 60, 20)).astype(dtype)
    parts = built(lambda: Effects(20, dtype=dtype, rngs=nnx.Rngs(0))), built(lambda: GoalHead(20, dtype=dtype, rngs=nnx.Rngs(0)))
    head, goal = (jax.jit(lambda *x, part=part: nnx.merge(*part)(*x)) for part in parts)
    logits = head(memory, objects)
    assert logits.consumed.shape == (3, *objects.shape[:2]) and logits.tile.shape == logits.colour.shape == (3, *objects.shape[:2], 16)
    assert goal(memory).shape == (3, 60, 5, 16) and {x.dtype for x in (*logits, goal(memory))} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in jax.tree.leaves([p for _, p in parts])} == {jnp.dtype(jnp.float32)}
    alone = head(memory[1, 7], objects[7, 2:3])
    for all_, one in zip(logits, alone, strict=True):
        assert np.allclose(all_[1, 7, 2:3], one, atol=1e-5 if dtype == jnp.float32 else 0.02), "an answer depends on this object and this memory"
    other = head(memory + 1, objects)
    assert (np.asarray(other.tile) != np.asarray(logits.tile)).any(-1).all()
    with pytest.raises(ValueError, match="objects_of"):
        head(memory, objects[..., :1])


def test_effects_can_be_read(effects):
    objects, (known, consumed, product) = effects
    sure, number = surely(consumed, product), int(np.argmax(consumed.sum(1)))
    lines = effects_table(jax.tree.map(lambda x: x[number], sure), objects[number]).splitlines()
    assert len(lines) == known[number].sum() and sum("consumed 100%" in line and "becomes" in line for line in lines) == consumed[number].sum()
    with pytest.raises(ValueError, match="one task"):
        effects_table(sure, objects)


def test_a_batch_may_have_no_rules_at_all():
    bare = RuleSet(goal=np.zeros(5, np.uint8), rules=np.zeros((0, 7), np.uint8), init_tiles=np.array([BALL, KEY], np.uint8))
    known, consumed, product = effects_of(bare.rules, objects_of(bare))
    assert known.tolist() == [True, True] and not consumed.any() and not product.any()
    told = tell(jax.random.split(jax.random.key(0), 2), jax.tree.map(lambda x: np.stack([x, x]), bare))
    assert jax.eval_shape(lambda: TaskEncoder(8, rngs=nnx.Rngs(0))(told)).shape == (2, 8)
