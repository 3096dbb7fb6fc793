"""Cores: one promise, held by four kinds of memory, against plain references, differences and wrong input."""
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from xland_minigrid.baselines import cores
from xland_minigrid.baselines.cores import (CORES, CHRONO_HORIZON, Window, affine, dense, fold, heads_of, make_core, recur, recur_plain, skew, standardise,
                                            windows)

INPUTS, UNITS, CONTEXT, STEPS, BATCH = 5, 8, 4, 9, 3  # more steps than context, and no multiple of it


@functools.cache
def core(name, layers=1, dtype="float32", context=CONTEXT, units=UNITS):
    """A core with parameters drawn by NumPy, and its compiled call.

    No parameter is where it begins, since zeros would hide mistakes, and nothing is compiled to draw them.
    """
    structure, shapes = nnx.split(nnx.eval_shape(lambda: make_core(name, INPUTS, units, layers=layers, context=context, dtype=dtype, rngs=nnx.Rngs(1))))
    random = np.random.default_rng(2)

    def draw(path, p):
        special = {"log_step": (-2.0, 0.5), "log_fade": (-1.0, 0.5), "angle": (1.5, 0.5), "scale": (1.0, 0.1)}
        mean, spread = next((special[part] for part in map(str, path) if part in special), (0.0, 1 / np.sqrt(p.shape[0]) if len(p.shape) > 1 else 0.3))
        return (mean + spread * random.normal(size=p.shape)).astype(np.float32)

    names = lambda path: [str(getattr(part, "key", getattr(part, "name", part))) for part in path]
    parameters = jax.tree_util.tree_map_with_path(lambda path, p: draw(names(path), p), shapes)
    return structure, parameters, jax.jit(lambda parameters, x, memory: nnx.merge(structure, parameters)(x, memory))


@functools.cache
def sloped(name, layers=2, dtype="float32"):
    "Value and gradients of a weighted mean of a core's outputs, compiled: `(parameters, x, memory, weights)`."
    structure, _, _ = core(name, layers, dtype)
    return jax.jit(jax.value_and_grad(lambda parameters, x, memory, weights: (nnx.merge(structure, parameters)(x, memory)[0] * weights).mean(), (0, 1)))


def start(name, batch=BATCH, **kwargs):
    structure, parameters, _ = core(name, **kwargs)
    return nnx.merge(structure, parameters).start(batch)


def some(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X = some(STEPS, BATCH, INPUTS)
WEIGHTS = some(STEPS, BATCH, UNITS, seed=7)


def moved(x, *at):
    "The same numbers, with 1 added at these places."
    x = x.copy()
    x[at] += 1
    return x


def close(a, b, **tolerance):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), **{"rtol": 1e-5, "atol": 1e-5, **tolerance})


# The promise --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", CORES)
def test_a_sequence_is_its_steps(name):
    "However it is cut: in one, step by step, or in pieces as long as the window and shorter. The sequence itself is longer."
    _, parameters, live = core(name, 2)
    begin = start(name, layers=2)
    for t in range(2):  # a window half full
        begin = live(parameters, some(2, BATCH, INPUTS, seed=3)[t:t + 1], begin)[1]
    whole = live(parameters, X, begin)
    for cuts in ((1,) * STEPS, (4, 1, 4)):
        memory, at, parts = begin, 0, []
        for length in cuts:
            y, memory = live(parameters, X[at : at + length], memory)
            parts.append(np.asarray(y))
            at += length
        close((np.concatenate(parts), memory), (np.asarray(whole[0]), whole[1]))
    assert whole[0].shape == (STEPS, BATCH, UNITS) and whole[0].dtype == jnp.float32
    assert all(leaf.shape[0] == BATCH for leaf in jax.tree.leaves(whole[1]))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), begin) == jax.tree.map(lambda a: (a.shape, a.dtype), whole[1])


@pytest.mark.parametrize("name", CORES)
def test_the_past_is_closed_rows_are_strangers_and_memory_counts(name):
    _, parameters, live = core(name, 2)
    run = lambda x, memory: jax.device_get(live(parameters, x, memory))
    memory = run(some(STEPS, BATCH, INPUTS, seed=3), start(name, layers=2))[1]
    y, after = run(X, memory)
    later, _ = run(moved(X, slice(6, None)), memory)
    assert (later[:6] == y[:6]).all() and (np.abs(later[6] - y[6]).max(-1) > 1e-3).all()
    other, other_after = run(moved(X, slice(None), 1), memory)
    for row in (0, 2):
        assert (other[:, row] == y[:, row]).all()
        assert all((a[row] == b[row]).all() for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(other_after)))
    turned = np.array([2, 0, 1])
    close(run(X[:, turned], jax.tree.map(lambda m: m[turned], memory)), (y[:, turned], jax.tree.map(lambda m: m[turned], after)))
    fresh, _ = run(X, start(name, layers=2))
    assert (np.abs(fresh[0] - y[0]).max(-1) > 1e-3).all()


# Against plain references -------------------------------------------------------------------------------------------------------------

sigmoid = lambda x: 1 / (1 + np.exp(-x))


def numbers(name, **kwargs):
    "The parameters of the first layer, and of the entrance where there is one, in float64."
    structure, parameters, _ = core(name, **kwargs)
    made = nnx.merge(structure, parameters)
    full = lambda p: np.asarray(p[...], np.float64)
    linear = lambda layer: (full(layer.kernel), 0 if layer.bias is None else full(layer.bias))
    return made, full, lambda layer, x: x @ linear(layer)[0] + linear(layer)[1]


def plain_gru(made, full, linear, x):
    h, out = np.zeros((BATCH, UNITS)), []
    for now in x:
        (x_r, x_z, x_n), (u_r, u_z, u_n) = (np.split(linear(part, v), 3, -1) for part, v in ((made.layer0.from_input, now), (made.layer0.from_memory, h)))
        r, z = sigmoid(x_r + u_r), sigmoid(x_z + u_z)
        h = (1 - z) * np.tanh(x_n + r * u_n) + z * h
        out.append(h)
    return np.stack(out)


def plain_mingru(made, full, linear, x):
    h, out = np.zeros((BATCH, UNITS)), []
    for now in x:
        keep, new = np.split(linear(made.layer0.from_input, now), 2, -1)
        h = sigmoid(keep) * h + (1 - sigmoid(keep)) * new
        out.append(h)
    return np.stack(out)


def plain_norm(x):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-6)


def plain_ssm(made, full, linear, x):
    layer, s, out = made.layer0, np.zeros((BATCH, UNITS // 2), complex), []
    rate = np.exp(np.exp(full(layer.log_step)) * (-np.exp(full(layer.log_fade)) + 1j * full(layer.angle)))
    for now in linear(made.enter, x):
        v = plain_norm(now)
        push = linear(layer.write, v)
        s = rate * s + np.sqrt(1 - abs(rate) ** 2) * (push[:, : UNITS // 2] + 1j * push[:, UNITS // 2 :])
        y = linear(layer.read, np.concatenate([s.real, s.imag], -1)) + full(layer.skip) * v
        y = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        value, gate = np.split(linear(layer.out, y), 2, -1)
        out.append(now + value * sigmoid(gate))
    return np.stack(out)


def plain_gate(gate, linear, x, y):
    (y_r, y_z, y_n), (x_r, x_z) = np.split(linear(gate.news, y), 3, -1), np.split(linear(gate.stream, x), 2, -1)
    r, z = sigmoid(y_r + x_r), sigmoid(y_z + x_z)
    return (1 - z) * x + z * np.tanh(y_n + linear(gate.proposal, r * x))


def plain_transformer(made, full, linear, x):
    "One query, one row, one head at a time, over a list of what was seen."
    layer, ask, out = made.layer0, made.layer0.attention, []
    x = linear(made.enter, x)
    units = x.shape[-1]
    width = units // ask.heads
    for t in range(len(x)):
        found = np.zeros(x.shape[1:])
        for row in range(x.shape[1]):
            seen = [plain_norm(x[j, row]) for j in range(max(0, t - made.context), t + 1)]
            for head in range(ask.heads):
                part = slice(head * width, (head + 1) * width)
                query, scores, values = linear(ask.query, seen[-1])[part], [], []
                for ago, entry in zip(reversed(range(len(seen))), seen):
                    angle = ago / 10_000 ** (np.arange(0, units, 2) / units)
                    place = linear(ask.distance, np.concatenate([np.sin(angle), np.cos(angle)]))[part]
                    key, value = np.split(linear(ask.key_value, entry), 2)
                    scores.append(((query + full(ask.by_content)[head]) @ key[part] + (query + full(ask.by_distance)[head]) @ place) / np.sqrt(width))
                    values.append(value[part])
                weights = np.exp(scores - np.max(scores))
                found[row, part] = weights @ np.array(values) / weights.sum()
        y = plain_gate(layer.gate_attention, linear, x[t], np.maximum(linear(ask.out, found), 0))
        inner = np.maximum(linear(layer.widen, plain_norm(y)), 0)
        out.append(plain_gate(layer.gate_network, linear, y, np.maximum(linear(layer.narrow, inner), 0)))
    return np.stack(out)


@pytest.mark.parametrize("name, plain, units", [("gru", plain_gru, 8), ("mingru", plain_mingru, 8), ("ssm", plain_ssm, 8),
                                                ("transformer", plain_transformer, 64)])  # two heads
def test_plain_reference(name, plain, units):
    structure, parameters, live = core(name, units=units)
    y, _ = live(parameters, X, nnx.merge(structure, parameters).start(BATCH))
    np.testing.assert_allclose(y, plain(*numbers(name, units=units), np.asarray(X, np.float64)), rtol=1e-4, atol=2e-5)


# Gradients ----------------------------------------------------------------------------------------------------------------------------

def parts(x):
    "Real and imaginary part."
    return np.stack([np.real(x), np.imag(x)])


def gradients(f, *args):
    "Of a sum in which every output has another weight."
    weights = some(*jax.eval_shape(f, *args).shape, seed=9)
    return jax.grad(lambda *args: (f(*args) ** 2 * weights).sum(), argnums=tuple(range(len(args))))(*args)


@pytest.mark.parametrize("steps", [1, 2])
def test_handwritten_gradients(steps):
    "The shortest sequences; longer ones are compared in the chapter."
    x, h, u = some(steps, 5, 12), some(5, 4, seed=1), some(4, 12, seed=2)
    a, b = sigmoid(some(steps, 5, 4, seed=3)), some(steps, 5, 4, seed=4)
    turning, pushed, turned = (np.array(0.9 * np.exp(1j * np.arange(2)), np.complex64)[None, None].repeat(steps, 0), b[..., :2] + 1j * b[..., 2:], h[..., :2] - 1j * h[..., 2:])
    plain = lambda a, b, h, fold=cores._fold_steps: fold(a, b.at[0].add(a[0] * h))
    size = lambda f: lambda *args: jnp.abs(f(*args))

    @jax.jit
    def every_way(x, h, u, *states):
        pairs = [(gradients(recur, x, h, u), gradients(recur_plain, x, h, u))]
        for state in (states[:3], states[3:]):
            pairs += [(gradients(size(fold), *state), gradients(size(plain), *state)),
                      (plain(*state, cores._fold_pairs), plain(*state))]  # what accelerators run, on the CPU
        return pairs

    for ours, theirs in every_way(x, h, u, a, b, h, turning, pushed, turned):
        close(jax.tree.map(parts, ours), jax.tree.map(parts, theirs), rtol=1e-4, atol=1e-4)


def test_gradient_of_affine():
    x, kernel, bias = some(7, 3, 4), some(4, 6, seed=1), some(6, seed=2)
    ours, plain = jax.jit(lambda *args: (gradients(affine, *args), gradients(lambda x, k, b: x @ k + b, *args)))(x, kernel, bias)
    close(ours, plain, rtol=1e-4)
    ones = jnp.ones((4096, 1), jnp.bfloat16)  # a sum in bfloat16 would stop at 256
    slope = jax.jit(jax.grad(lambda *args: affine(*args).astype(jnp.float32).sum(), (0, 1, 2)))
    _, d_kernel, d_bias = slope(ones, np.ones((1, 1), np.float32), np.zeros(1, np.float32))
    assert d_kernel.item() == d_bias.item() == 4096


@pytest.mark.newest
@pytest.mark.parametrize("name", CORES)
def test_gradient_by_differences(name):
    "Along random directions in the space of all parameters and inputs together."
    (_, parameters, _), memory, f = core(name, 2), start(name, layers=2), sloped(name)
    slope = jax.device_get(f(parameters, X, memory, WEIGHTS)[1])
    for seed in range(3):
        random = np.random.default_rng(seed)
        direction = jax.tree.map(lambda p: random.normal(size=p.shape).astype(np.float32), (parameters, X))
        at = lambda e: float(f(*jax.tree.map(lambda p, d: p + np.float32(e) * d, (parameters, X), direction), memory, WEIGHTS)[0])
        fine, coarse = ((at(e) - at(-e)) / (2 * e) for e in (1e-3, 2e-3))
        expected = sum(float((a * b).sum()) for a, b in zip(jax.tree.leaves(slope), jax.tree.leaves(direction)))
        size = float(np.sqrt(sum((a**2).sum() for a in jax.tree.leaves(slope))))
        assert abs((4 * fine - coarse) / 3 - expected) < 0.02 * abs(expected) + 0.02 * size, (fine, coarse, expected)


@pytest.mark.parametrize("name", CORES)
def test_a_gradient_crosses_the_sequence(name):
    "The gradient of the last step reaches the first one; in the transformer through two layers, each of which looks four steps back."
    last = np.zeros_like(WEIGHTS)
    last[-1] = 1
    d_x = np.asarray(sloped(name)(core(name, 2)[1], X, start(name, layers=2), last)[1][1])
    assert (np.abs(d_x).max(-1) > 1e-8).all() and np.isfinite(d_x).all()


# What is special about each -----------------------------------------------------------------------------------------------------------

def test_the_gru_of_old():
    "The same random numbers in the same order: what was trained with a seed before can be trained again."
    ours, theirs = nnx.Rngs(3), nnx.Rngs(3)
    made = make_core("gru", 6, 4, rngs=ours)
    bias = lambda key, shape, dtype, *_: jnp.zeros(shape, dtype).at[4:8].set(np.log(np.linspace(1, CHRONO_HORIZON, 4)))
    from_input = nnx.Linear(6, 12, kernel_init=nnx.initializers.orthogonal(1.0), bias_init=bias, rngs=theirs)
    from_memory = dense(4, 12, 1.0, rngs=theirs, bias=False)
    assert (made.layer0.from_input.kernel[...] == from_input.kernel[...]).all() and (made.layer0.from_input.bias[...] == from_input.bias[...]).all()
    assert (made.layer0.from_memory.kernel[...] == from_memory.kernel[...]).all() and ours.params() == theirs.params()
    x, h = some(7, 3, 6), some(3, 4, seed=1)
    y, memory = jax.jit(made.run)(x, h)
    assert (y == jax.jit(recur)(from_input(x), h, from_memory.kernel[...])).all() and (memory == y[-1]).all()


def test_the_window_slides():
    "A step is seen for exactly `context` steps more, whether it lies in the sequence or in the memory; no gradient goes into the memory."
    structure, parameters, live = core("transformer")
    run = lambda x, memory: jax.device_get(live(parameters, x, memory))
    empty = start("transformer")
    y, memory = run(X, empty)
    touched = np.abs(run(moved(X, 2), empty)[0] - y).max((1, 2)) > 0
    assert touched.tolist() == [2 <= t <= 2 + CONTEXT for t in range(STEPS)]
    again, _ = run(X, memory)
    for i in range(CONTEXT):  # entry i is CONTEXT - i steps old when the next sequence begins
        changed = memory.replace(entries=(moved(memory.entries[0], slice(None), i),))
        touched = np.abs(run(X, changed)[0] - again).max((1, 2)) > 0
        assert touched.tolist() == [t <= i for t in range(STEPS)]
    d_entries = jax.jit(jax.grad(lambda e: nnx.merge(structure, parameters)(X, memory.replace(entries=(e,)))[0].sum()))(memory.entries[0])
    assert not np.asarray(d_entries).any()


@pytest.mark.parametrize("steps", [1, STEPS])
def test_what_is_not_real_is_never_read(steps):
    "Rows that began at different times, with garbage in front."
    _, parameters, live = core("transformer")
    run = lambda memory: jax.device_get(live(parameters, X[:steps], memory))
    entries, count = some(BATCH, CONTEXT, UNITS, seed=5), np.array([0, 1, CONTEXT], np.int32)
    unreal = (np.arange(CONTEXT) < CONTEXT - count[:, None])[..., None]
    clean, dirty = (Window(entries=(np.where(unreal, np.float32(garbage), entries),), count=count) for garbage in (0.0, 1e6))
    (a, after), (b, _) = run(clean), run(dirty)
    assert (a == b).all() and after.count.tolist() == np.minimum(count + steps, CONTEXT).tolist()
    assert np.abs(a[:, 1] - run(clean.replace(count=np.array([0, 0, CONTEXT], np.int32)))[0][:, 1]).max() > 1e-4


def test_pieces_of_the_transformer():
    scores = some(2, 3, 5)  # three queries, four steps back and now
    skewed = np.asarray(jax.jit(skew)(scores))
    assert skewed.shape == (2, 3, 7)
    for i in range(3):
        assert (skewed[:, i, i : i + 5] == scores[:, i]).all()
    entries = np.arange(12)[None, :, None]
    assert windows(entries, 4, 4)[0, :, :, 0].tolist() == [list(range(8)), list(range(4, 12))]
    assert windows(entries, 4, 8)[0, 0, :, 0].tolist() == list(range(12))
    assert [heads_of(n) for n in (1, 7, 63, 64, 96, 128, 192, 256, 1024)] == [1, 1, 1, 2, 2, 4, 4, 8, 8]


@pytest.mark.newest
def test_a_fresh_transformer_lets_most_pass_and_a_fresh_ssm_is_stable():
    @jax.jit
    def fresh(x):
        made = make_core("transformer", INPUTS, 32, layers=2, context=8, rngs=nnx.Rngs(0))
        return cores.apply(made.enter, x, jnp.float32), made(x, made.start(BATCH))[0], make_core("ssm", INPUTS, 256, rngs=nnx.Rngs(0)).layer0.rates()

    entered, y, (rate, gamma) = jax.device_get(fresh(X))
    assert np.corrcoef(y.ravel(), entered.ravel())[0, 1] > 0.8
    memory = -1 / np.log(abs(rate))
    assert 15 < memory.min() < 40 and 1000 < memory.max() < 2100 and (gamma > 0).all()
    close(gamma**2 + abs(rate)**2, np.ones(128))
    close(np.asarray(jax.jit(standardise)(3 + 5 * some(4, 16))).std(-1), np.ones(4), rtol=1e-3)


# Types and devices --------------------------------------------------------------------------------------------------------------------

@pytest.mark.newest
@pytest.mark.parametrize("name, dtype", [*((name, "bfloat16") for name in CORES), ("gru", "float16")])
def test_in_16_bits(name, dtype):
    _, parameters, live = core(name, 2)
    _, _, small = core(name, 2, dtype)
    begin, short = start(name, layers=2), start(name, layers=2, dtype=dtype)
    y, (z, memory) = live(parameters, X, begin)[0], small(parameters, X, short)
    assert z.dtype == jnp.float32 and 0 < np.abs(np.asarray(y) - np.asarray(z)).max() < 0.1
    carried = {leaf.dtype for leaf in jax.tree.leaves(memory)}
    assert carried == ({jnp.dtype("bfloat16"), jnp.dtype("int32")} if name == "transformer" else {jnp.dtype("float32")})
    exact, near = (f(parameters, X, memory, WEIGHTS)[1][0] for f, memory in ((sloped(name), begin), (sloped(name, dtype=dtype), short)))
    flat = lambda tree: np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(near))
    assert np.linalg.norm(flat(exact) - flat(near)) < 0.05 * np.linalg.norm(flat(exact))


@pytest.mark.parametrize("name, dtype, computed", [*((name, "float32", True) for name in CORES), ("gru", "bfloat16", True),
                                                   *((name, "bfloat16", False) for name in CORES if name != "gru")])
def test_gradients_over_devices(name, dtype, computed):
    "Rows spread over devices, parameters the same on all: the gradient is that of one device, with JAX's own check (when it traces) of what differs where."
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    structure, parameters, _ = core(name, dtype=dtype)
    x, memory = some(2, 4, INPUTS), start(name, batch=4, dtype=dtype)
    slope = jax.grad(lambda parameters, x, memory: (nnx.merge(structure, parameters)(x, memory)[0] ** 2).sum())
    rows = PartitionSpec("agents")
    spread = jax.shard_map(slope, mesh=Mesh(np.array(jax.devices()[:2]), ("agents",)), in_specs=(PartitionSpec(), PartitionSpec(None, "agents"), rows),
                           out_specs=PartitionSpec())
    if computed:
        close(jax.jit(spread)(parameters, x, memory), jax.jit(slope)(parameters, x, memory), **(dict(rtol=1e-4, atol=1e-4) if dtype == "float32" else dict(rtol=0.05, atol=0.05)))
    else:
        # Not `==` of the trees: older Flax and JAX note in them where each leaf lies.
        kinds = lambda f: [(path, leaf.shape, leaf.dtype) for path, leaf in jax.tree.leaves_with_path(jax.eval_shape(f, parameters, x, memory))]
        assert kinds(spread) == kinds(slope)


# Wrong input --------------------------------------------------------------------------------------------------------------------------

def test_wrong_sizes():
    for wrong, says in [
            (dict(name="lstm"), "gru, mingru, ssm, transformer"), (dict(inputs=0), "inputs"), (dict(units=-1), "units"), (dict(units=8.0), "units"),
            (dict(layers=0), "layers"), (dict(layers=True), "layers"), (dict(context=0), "context"), (dict(dtype="float64"), "float32, bfloat16 or float16"),
            (dict(dtype="many"), "float32, bfloat16"), (dict(dtype=jnp.int32), "float32, bfloat16")]:
        for name in CORES:
            with pytest.raises(ValueError, match=says):
                make_core(**{**dict(name=name, inputs=5, units=8, rngs=nnx.Rngs(0)), **wrong})


@pytest.mark.parametrize("name", CORES)
def test_wrong_inputs_and_memories(name):
    structure, parameters, _ = core(name)
    made, memory = nnx.merge(structure, parameters), start(name)
    for x in (X[0], X[..., :4], X[:0], X.astype(jnp.int32)):
        with pytest.raises(ValueError, match="takes floats of shape"):
            made(x, memory)
    for wrong in (start(name, batch=4), start(name, layers=2), {"memory": memory}, jax.tree.map(lambda m: m.astype(jnp.float16), memory), None):
        with pytest.raises(ValueError, match=r"core.start\(3\)"):
            made(X, wrong)


# Learning -----------------------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("name, dtype", [*((name, "float32") for name in CORES), ("gru", "bfloat16")])
def test_recalls_a_bit(name, dtype):
    "Shown once, asked for 20 steps later, noise in between."
    made = make_core(name, 3, 32, context=32, dtype=dtype, rngs=nnx.Rngs(0))
    structure, parameters = nnx.split((made, dense(32, 1, 0.1, rngs=nnx.Rngs(1))))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))

    def answers(parameters, key):
        keys = jax.random.split(key)
        bit = jax.random.bernoulli(keys[0], shape=(128,)) * 2.0 - 1
        x = jax.random.normal(keys[1], (21, 128, 3)).at[..., 1:].set(0).at[0].set(0).at[0, :, 1].set(bit).at[-1, :, 2].set(1)
        net, read = nnx.merge(structure, parameters)
        return bit, read(net(x, net.start(128))[0][-1])[:, 0]

    @jax.jit
    def learn(parameters, state, keys):
        def update(carry, key):
            def error(parameters):
                bit, answer = answers(parameters, key)
                return jax.nn.softplus(-bit * answer).mean()
            change, state = optimizer.update(jax.grad(error)(carry[0]), carry[1])
            return (optax.apply_updates(carry[0], change), state), None
        return jax.lax.scan(update, (parameters, state), keys)[0]

    parameters, _ = learn(parameters, optimizer.init(parameters), jax.random.split(jax.random.key(0), 300))
    bit, answer = jax.jit(answers)(parameters, jax.random.key(1))
    assert (bit * answer > 0).mean() > 0.98
