"""What agents perceive, are told, and believe: every input counts, and nothing hidden gets through."""
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from xland_minigrid import make
from xland_minigrid.baselines.belief import GoalHead, belief_loss
from xland_minigrid.baselines.encoders import (Attention, ConvEncoder, Event, FlatEncoder, Inputs, check_tellable, first_inputs,
                                               layer_plan, make_encoder, next_inputs, tell)
from xland_minigrid.benchmarks.benchmark import generate_benchmark
from xland_minigrid.core.compose import AllOf
from xland_minigrid.core.goals import AgentHoldGoal
from xland_minigrid.core.rules import AgentNearRule
from xland_minigrid.core.ruleset import make_ruleset, stack_rulesets
from xland_minigrid.core.tiles import Colors, Tiles
from xland_minigrid.envs.wrappers import DirectionObservationWrapper, GymAutoResetWrapper, RulesAndGoalsObservationWrapper
from xland_minigrid.viz.images import RGBImgObservationWrapper, images_from_observations

VIEWS = {"flat": (5, 5, 2), "conv": (5, 5, 2), "image": (48, 48, 3)}
BALL, KEY, STAR = ((Tiles.BALL, Colors.RED), (Tiles.KEY, Colors.BLUE), (Tiles.STAR, Colors.GREEN))
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
    return compiled(lambda: make_encoder(name, shape or VIEWS[name], 6, 8, 32, dtype=dtype, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def benchmark():
    return generate_benchmark("medium", 60, seed=3, progress=False)


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


# Eyes -----------------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name, shape", [(n, (v, v, 2)) for n in ("flat", "conv") for v in (3, 4, 5, 7, 9)] +
                         [("image", (s, s, 3)) for s in (24, 40, 80, 112, 160, 192, 224, 288)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_shapes_and_types(name, shape, dtype):
    "No numbers are computed: shapes of every size, on any leading axes, in both types."
    structure, parameters = nnx.split(nnx.eval_shape(lambda: make_encoder(name, shape, 6, 8, 24, dtype=dtype, rngs=nnx.Rngs(0))))
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
    module = nnx.merge(*built(lambda: ConvEncoder((4, 4, 2), 6, 3, 10, rngs=nnx.Rngs(2))))
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
    for view, tile in itertools.product((3, 5, 7, 9, 11, 13), (8, 16, 32, 64)):
        *squares, last = layer_plan((view * tile, view * tile, 3), 8)
        assert np.prod([stride for *_, stride in squares]) == tile and last == (squares[-1][1], 64, 2, 1), (view, tile)


@pytest.mark.parametrize("name", VIEWS)
def test_half_precision_is_close(name):
    x = some_inputs(64, shape=VIEWS[name])
    full, half = (np.asarray(eyes(name, dtype)(x), np.float32) for dtype in (jnp.float32, jnp.bfloat16))
    assert 0 < np.abs(full - half).max() < 0.05 * np.abs(full).max() + 0.02


def test_eyes_that_do_not_fit_are_refused():
    for wrong, says in [
            (("pixels", (5, 5, 2)), "choose 'flat', 'conv', 'image'"), (("image", (5, 5, 2)), "RGBImgObservationWrapper"), (("image", (8, 8, 3)), "at least 3"), (("image", (100, 100, 3)), "64 pixels a cell"),
            (("flat", (80, 80, 3)), "encoder 'image'"), (("conv", (2, 2, 2)), "at least 3"), (("conv", (5, 7, 2)), "square"), (("flat", (5,)), "square"),
            (("flat", (5, 5, 2), 0), "num_actions is 0"), (("flat", (5, 5, 2), 6, 0), "embedding is 0"), (("image", (48, 48, 3), 6, 8, -1), "features is -1")]:
        with pytest.raises(ValueError, match=says):
            make_encoder(*wrong, *(6, 8, 32)[len(wrong) - 2:], rngs=nnx.Rngs(0))


def test_attention_answers_cell_by_cell():
    attention = nnx.merge(*built(lambda: Attention(8, rngs=nnx.Rngs(0))))
    x, memory = some_inputs(3, 4), np.random.default_rng(0).normal(size=(3, 4, 8)).astype(np.float32)
    answers, table = jax.device_get(jax.jit(lambda memory, view: (attention(memory, view), attention.wanted(memory)))(memory, x.view))
    view = np.asarray(x.view).reshape(3, 4, 25, 2)
    t, b = np.indices((3, 4, 25))[:2]
    assert np.allclose(answers, table[t, b, view[..., 0]] + table[t, b, 16 + view[..., 1]], atol=1e-6)


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
    structure, parameters = built(lambda: nnx.Sequential(ConvEncoder((5 * size, 5 * size, 3), 6, 8, 64, rngs=nnx.Rngs(0)), nnx.Linear(64, 16, rngs=nnx.Rngs(1))))
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
        return jax.lax.scan(step, (p, optimizer.init(p)), jax.random.split(jax.random.key(0), 250))[0][0]
    x_new, y_new = batch(1024, 1)
    guess = np.asarray(logits(train(parameters), x_new).argmax(-1))
    commonest = np.bincount(y_new).max() / len(y_new)
    assert (guess == y_new).mean() > 0.99 > commonest + 0.1, ((guess == y_new).mean(), commonest)


# Told -----------------------------------------------------------------------------------------------------------------------------------

tell_all = jax.jit(tell)


def test_tell_shows_what_it_should(benchmark):
    numbers = np.random.default_rng(5).integers(0, 60, 4000)
    tasks, keys = jax.tree.map(np.asarray, benchmark.get_rulesets(numbers)), jax.random.split(jax.random.key(6), 4000)
    told = jax.device_get(tell_all(keys, tasks, 0.7))
    assert told.goal.dtype == np.uint8 and told.goal_shown.dtype == bool and abs(told.goal_shown.mean() - 0.7) < 0.03
    assert (told.goal == np.where(told.goal_shown[:, None], tasks.goal, 0)).all()
    part = tell_all(keys[100:108], jax.tree.map(lambda x: x[100:108], tasks), 0.7)
    assert all((np.asarray(a) == b[100:108]).all() for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(told), strict=True)), "a task's flag depends on its key alone"
    raw = tell_all(jax.random.key_data(keys[100:108]), jax.tree.map(lambda x: x[100:108], tasks), 0.7)
    assert (np.asarray(raw.goal_shown) == told.goal_shown[100:108]).all()
    for share in (0.0, 1.0):
        assert (tell_all(keys, tasks, share).goal_shown == bool(share)).all()


def test_tasks_that_cannot_be_told_are_refused(benchmark):
    keys = jax.random.split(jax.random.key(0), 2)
    plain = make_ruleset(AgentHoldGoal(BALL), [AgentNearRule(KEY, STAR)], [BALL, KEY])
    composed = make_ruleset(AllOf(AgentHoldGoal(BALL), AgentHoldGoal(KEY)), [], [BALL, KEY])
    with pytest.raises(ValueError, match="composed goals"):
        tell(keys, stack_rulesets([plain, composed]))
    with pytest.raises(ValueError, match="composed goals"):
        jax.jit(tell)(keys, stack_rulesets([plain, composed]))
    with pytest.raises(ValueError, match="composed goals"):
        check_tellable(composed)
    opened = stack_rulesets([plain.extend(), plain])
    assert opened.extended is not None and (jax.jit(tell)(keys, opened).goal == opened.goal).all()
    with pytest.raises(ValueError, match="stack_rulesets"):
        tell(keys[0], plain)
    for wrong in (dict(show_goal=1.2), dict(show_goal=-0.1), dict(show_goal=float("nan"))):
        with pytest.raises(ValueError, match="from 0 to 1"):
            tell(keys, opened, **wrong)


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
        with pytest.raises(ValueError, match="and the goals"):
            belief_loss(random, wrong)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_head_answers_in_float32(dtype):
    memory = np.random.default_rng(0).normal(size=(3, 60, 20)).astype(dtype)
    part = built(lambda: GoalHead(20, dtype=dtype, rngs=nnx.Rngs(0)))
    belief = jax.jit(lambda x: nnx.merge(*part)(x))(memory)
    assert belief.shape == (3, 60, 5, 16) and {x.dtype for x in (belief, *jax.tree.leaves(part[1]))} == {jnp.dtype(jnp.float32)}
