"""GRPO against plain numpy, against itself alone and in company, and against everything that interrupts it."""
import asyncio
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_faults import HANG
from worlds import refusals

from xland_minigrid.baselines.checkpoint import CheckpointError, Checkpoints
from xland_minigrid.baselines.language_model import END, PAD, TURN, ModelConfig, Transformer, Turn, Vocabulary, chosen, log_policy, mixed, pack
from xland_minigrid.measure.tables.grpo import report, unseen
from xland_minigrid.measure.report import run as run_program
from xland_minigrid.pool import grpo
from xland_minigrid.pool.episodes import Env
from xland_minigrid.pool.text.frozen_lake import FrozenLakeEnv
from xland_minigrid.core.helpers import read_jsonl
from xland_minigrid.pool.grpo import (
    Generator, GRPOConfig, Learner, SomeSolve, advantages, beta_at, evaluate, grpo_loss, grpo_step, lake_baselines, lake_learner, lake_tasks, test_tasks as maps_of_the_test, train)
from xland_minigrid.pool.pool import EnvPool

WORDS = Vocabulary(["S", "F", "H", "G", "P", "up", "down", "left", "right"])
TINY = GRPOConfig(steps=4, groups=4, group_size=4, max_turns=4, minibatches=2, warmup=2, learning_rate=5e-3, beta=0.05, model=ModelConfig(context=5, width=16, layers=1, heads=2))


@functools.cache
def opinionated(config=ModelConfig(context=12, width=16, heads=2), size=WORDS.size, seed=0) -> Transformer:
    "A model that thinks tokens differently likely, as no fresh one does."
    return nnx.jit(lambda: Transformer(config, size, opinion=3.0, rngs=nnx.Rngs(seed)))()


@functools.cache
def compiled(temperature: float):
    return Generator(opinionated(), temperature=temperature)._forward


def speaker(temperature=1.0, **settings) -> Generator:
    "A generator of the opinionated model that need not be compiled anew."
    generator = Generator(opinionated(), temperature=temperature, **settings)
    generator._forward = compiled(temperature)
    return generator


# ---- words

@given(st.lists(st.sampled_from(WORDS.list)), st.lists(st.sampled_from(["ice", "Player", "x", "?"]), max_size=3))
def test_words_come_back_and_others_are_not_seen(known, unknown):
    ids = WORDS.encode(" ".join(known + unknown))
    assert WORDS.decode(ids) == " ".join(known) and len(ids) == len(known)
    assert WORDS.decode([TURN, *ids, END, PAD]) == " ".join(known)


def test_words_and_tokens_that_cannot_be():
    lists, tokens = ([], ["a", "a"], ["two words"], [""], ["a-b"]), ([-1], [12], [3, 99])
    found = refusals({repr(words): (functools.partial(Vocabulary, words), ValueError, "leave out") for words in lists})
    assert found | refusals({repr(ids): (functools.partial(WORDS.decode, ids), ValueError, "tokens") for ids in tokens}) == {}


# ---- the loss

def k3(logprobs, reference):
    "An estimate of the divergence, as some number for each token."
    d = reference - logprobs
    return jnp.exp(d) - d - 1


def plain_loss(logprobs, old, advantage, kl, weights, clip, beta):
    "Token by token."
    total = count = 0.0
    for lp, o, a, d, w in zip(*map(np.ravel, (logprobs, old, advantage, kl, weights))):
        if w > 0:
            ratio = np.exp(lp - o)
            total += w * (beta * d - min(ratio * a, min(max(ratio, 1 - clip), 1 + clip) * a))
            count += w
    return total / count if count else 0.0


@jax.jit
def jitted_loss(logprobs, old, advantage, reference, weights, clip, beta):
    return grpo_loss(logprobs, old, advantage, k3(logprobs, reference), weights, clip=clip, beta=beta)[0]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 0.5), st.floats(0, 1))
def test_loss_is_that_of_plain_numpy(seed, clip, beta):
    rng = np.random.default_rng(seed)
    logprobs, old, reference = rng.uniform(-3, 0, (3, 4, 7)).astype(np.float32)
    weights = (rng.random((4, 7)) < 0.6).astype(np.float32)
    advantage = np.repeat(rng.normal(size=(4, 1)), 7, 1).astype(np.float32)
    d = reference - logprobs
    found = jitted_loss(logprobs, old, advantage, reference, weights, clip, beta)
    np.testing.assert_allclose(found, plain_loss(logprobs, old, advantage, np.exp(d) - d - 1, weights, clip, beta), rtol=2e-4, atol=1e-5)


def test_loss_by_hand():
    # an episode that did better (A=1): ratio 1.5 counts as 1.2; one that did worse (A=-1): ratio 1.5 counts in full, 0.5 as 0.8
    ratio, advantage, kl = np.float32([1.5, 1.5, 0.5]), np.float32([1, -1, -1]), np.float32([0.3, 0, 0])
    loss, numbers = jax.jit(functools.partial(grpo_loss, beta=0.5))(np.log(ratio), np.zeros(3, np.float32), advantage, kl, np.ones(3, np.float32))
    assert float(loss) == pytest.approx((-1.2 + 1.5 + 0.8 + 0.15) / 3, abs=1e-6)
    assert float(numbers["clipped"]) == 1 and float(numbers["kl"]) == pytest.approx(0.1)


def test_padding_has_no_gradient():
    logprobs = np.log(np.float32([0.5, 0.4, 0.3]))
    slope = jax.jit(jax.value_and_grad(lambda x, old, advantage, weights: grpo_loss(x, old, advantage, k3(x, -jnp.ones_like(x)), weights, beta=0.1)[0]))
    clean, plain = map(np.asarray, slope(logprobs[::2], np.float32([-0.7, -1]), np.ones(2, np.float32), np.ones(2, np.float32)))
    for rubbish in (0.0, 50.0, -1e9, np.nan, np.inf):
        value, gradient = map(np.asarray, slope(logprobs, np.float32([-0.7, rubbish, -1]), np.float32([1, rubbish, 1]), np.float32([1, 0, 1])))
        assert np.isfinite(value) and gradient[1] == 0 and (gradient[::2] != 0).all(), rubbish
        np.testing.assert_allclose(value, clean, rtol=1e-6)
        np.testing.assert_allclose(gradient[::2], plain, rtol=1e-6)


def test_advantages_leave_out_what_cannot_be_scored():
    np.testing.assert_allclose(advantages([1, None, 0, 0], floor=0), np.array([2, 0, -1, -1]) / np.sqrt(2), rtol=1e-5)
    assert not advantages([None, 1]).any() and not advantages([0.5] * 4).any() and advantages([1, None])[1] == 0
    small, large = advantages([0.97, 0.94]), advantages([1, 0])
    assert 0 < small[0] < 0.2 < 0.8 < large[0]  # a shorter way counts, but not like success against failure


# ---- the model

def test_padding_changes_nothing_and_positions_count():
    "With a single layer, which finds the same words wherever they stand but for their positions."
    structure, parameters = nnx.split(opinionated(ModelConfig(context=9, width=16, heads=2, layers=1)))
    model = jax.jit(lambda tokens: nnx.merge(structure, parameters)(tokens))
    tokens = np.random.default_rng(1).integers(3, 12, (2, 9)).astype(np.int32)
    whole = np.asarray(model(tokens))
    np.testing.assert_allclose(whole[:, :5], model(np.where(np.arange(9) < 5, tokens, PAD))[:, :5], atol=1e-5)
    np.testing.assert_allclose(whole[:, :5], model(tokens[:, :5]), atol=1e-5)
    assert np.abs(model(tokens[:, [1, 0, *range(2, 9)]])[:, -1] - whole[:, -1]).max() > 1e-3


def test_settings_that_make_no_sense():
    models = [dict(width=0), dict(heads=3), dict(context=True)]
    generators = [dict(temperature=0), dict(rows=(8, 2)), dict(allowed=[]), dict(allowed=[99])]
    curricula = [dict(tasks=[]), dict(again=1.0), dict(most=0), dict(keep=0)]
    runs = [dict(steps=0), dict(group_size=1), dict(discount=1.5), dict(beta=-1.0), dict(learning_rate=float("nan")), dict(temperature=0.0),
            dict(minibatches=True), dict(clip=float("inf"))]
    kinds = {"model": (ModelConfig, models), "generator": (functools.partial(Generator, opinionated()), generators), "curriculum": (lambda **wrong: SomeSolve(**{"tasks": [1], **wrong}), curricula),
             "run": (GRPOConfig, runs)}
    cases = {f"{kind} {wrong}": (functools.partial(make, **wrong), ValueError, next(iter(wrong)) if kind == "run" else "") for kind, (make, wrongs) in kinds.items() for wrong in wrongs}
    prompts = {f"prompt {prompt}": (functools.partial(speaker().generate, [prompt], [0]), ValueError, "1 to 12 tokens") for prompt in ([], [3] * 13)}
    longer = {"too many tokens": (lambda: jax.eval_shape(opinionated(), jax.ShapeDtypeStruct((1, 13), jnp.int32)), ValueError, "larger context")}
    maps = {"a map too large": (lambda: lake_learner(TINY, size=3), ValueError, "model.context"), "too many maps": (lambda: lake_tasks(grpo.TEST_SEED + 1), ValueError, "fewer")}
    assert refusals(cases | prompts | longer | maps) == {}


# ---- generation

def some_prompts(n, most=9, seed=0):
    rng = np.random.default_rng(seed)
    return [[*rng.integers(3, 12, rng.integers(1, most)).tolist(), TURN] for _ in range(n)]


@pytest.mark.parametrize("greedy", [False, True])
def test_company_changes_nothing(greedy):
    generator, prompts, keys = speaker(greedy=greedy, rows=(1, 32)), some_prompts(40), mixed(3, np.arange(40)).tolist()
    together = generator.generate(prompts, keys)
    order = np.random.default_rng(1).permutation(40)
    shuffled = generator.generate([prompts[i] for i in order], [keys[i] for i in order])
    for i in range(0, 40, 3):
        alone = generator.generate([prompts[i]], [keys[i]])[0]
        assert alone.token == together[i].token == shuffled[list(order).index(i)].token
        assert alone.logprob == pytest.approx(together[i].logprob, abs=1e-5)


def test_keys_decide():
    generator, prompt = speaker(), some_prompts(1)[0]
    said = [c.token for c in generator.generate([prompt] * 300, mixed(0, np.arange(300)))]
    assert len(set(said)) > 3 and said == [c.token for c in generator.generate([prompt] * 300, mixed(0, np.arange(300)))]
    assert generator.computed == 2  # 600 were asked for, and they are all alike


def test_tokens_are_drawn_as_likely_as_they_are():
    probabilities = np.array([0.05, 0.0, 0.6, 0.35])
    with np.errstate(divide="ignore"):
        drawn = chosen(np.log(probabilities)[None].repeat(50_000, 0), mixed(9, np.arange(50_000)))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 50_000, probabilities, atol=0.01)
    assert not (drawn == 1).any()


def test_probabilities_are_those_that_the_learner_sees():
    generator, prompts = speaker(allowed=[4, 5, 6], temperature=0.7), some_prompts(5)
    look = jax.jit(lambda *args: log_policy(generator.structure, generator.parameters, *args, generator.allowed, 0.7))
    for prompt, completion in zip(prompts, generator.generate(prompts, range(5))):
        tokens = np.array([prompt + [PAD] * (12 - len(prompt))], np.int32)
        logprobs = look(tokens, np.array([[len(prompt) - 1]]))[0, 0]
        assert completion.logprob == pytest.approx(float(logprobs[completion.token]), abs=1e-5)
        assert float(np.exp(logprobs).sum()) == pytest.approx(1, abs=1e-5) and (np.exp(logprobs)[[0, 1, 2, 3, 7]] == 0).all()


def test_few_shapes():
    generator, shapes = Generator(opinionated(), rows=(2, 8)), set()
    def forward(parameters, tokens, at, allowed):
        shapes.add(tokens.shape)
        return np.full((len(tokens), 1, WORDS.size), -2.0)
    generator._forward = forward
    for n in range(1, 30):
        generator.generate(some_prompts(n, seed=n), range(n))
    assert shapes == {(2, 12), (8, 12)}


def test_concurrent_rollouts_share_batches():
    generator, prompts = speaker(patience=HANG), some_prompts(30)

    async def rollout(i):
        said = []
        for turn in range(1 + i % 3):
            await asyncio.sleep(0.002 * ((i * 7 + turn) % 4))
            said.append((await generator(prompts[i], mixed(i, turn))).token)
        generator.over()
        return said

    async def main():
        generator.expect(30)
        return await asyncio.gather(*map(rollout, range(30)))

    said = asyncio.run(main())
    assert generator.batches == 3 and generator.asked == 60
    assert said == [[generator.generate([prompts[i]], [mixed(i, turn)])[0].token for turn in range(1 + i % 3)] for i in range(30)]


def test_a_generator_outlives_its_loop_and_lost_rollouts():
    generator = speaker(patience=0.02)

    async def main():
        generator.expect(5)  # of which two never ask
        asked = [asyncio.ensure_future(generator(prompt, 1)) for prompt in some_prompts(3)]
        await asyncio.sleep(0)
        asked[0].cancel()
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), HANG)

    for _ in range(2):
        lost, *found = asyncio.run(main())
        assert isinstance(lost, asyncio.CancelledError) and len(found) == 2 and all(said.logprob <= 0 for said in found)


def test_an_error_reaches_all_who_wait():
    generator = speaker(patience=0.01)

    async def main():
        first = await asyncio.gather(*(generator(prompt, 0) for prompt in [[3], [3] * 50]), return_exceptions=True)
        return first, await generator([3, TURN], 0)

    bad, good = asyncio.run(main())
    assert all(isinstance(error, ValueError) for error in bad) and good.logprob <= 0


# ---- from episodes to arrays

def test_rows_that_are_shared_give_the_same_loss():
    rng, generator = np.random.default_rng(0), speaker()
    prompts = some_prompts(6)
    turns = [Turn(prompts[i % 6], int(rng.integers(3, 12)), float(rng.uniform(-2, 0))) for i in range(40)]
    worth = rng.normal(size=40).tolist()
    rows = pack(turns, worth, 12)
    table = jax.jit(lambda *args: log_policy(generator.structure, *args))(generator.parameters, rows.tokens, rows.at, generator.allowed)[:, 0]
    found = grpo_loss(table[rows.row, rows.target], rows.old, rows.advantage, jnp.zeros(len(rows.row)), rows.weight)[0]
    alone = [generator.next_logprobs([turn.prompt])[0, turn.token] for turn in turns]
    plain = plain_loss(alone, [turn.logprob for turn in turns], worth, np.zeros(40), np.ones(40), 0.2, 0.0)
    assert float(found) == pytest.approx(plain, rel=1e-4)
    assert int((rows.tokens != PAD).any(1).sum()) == 6


# ---- training

@functools.cache
def compiled_parts(config):
    learner = lake_learner(config, size=2, count=20)
    return learner._update, learner.generator._forward


def lake(config=TINY, curriculum=None) -> Learner:
    "A learner of 2x2 lakes that need not be compiled anew."
    learner = lake_learner(config, size=2, count=60)
    learner.curriculum = curriculum or learner.curriculum
    learner._update, forward = compiled_parts(config)
    learner.generator._forward = learner.greedy._forward = forward
    return learner


def run(config=TINY, env="frozen_lake", learner=None, **options):
    learner = learner or lake(config)

    async def main():
        async with EnvPool.local(env, slots=config.groups * config.group_size) as pool:
            return await train(learner, pool, progress=False, **options)

    return learner, asyncio.run(main())


def same(a, b) -> bool:
    return all((np.asarray(x) == np.asarray(y)).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_resumed_run_is_the_run(tmp_path):
    whole, rows = run(out=tmp_path / "a", save_every=1, log_every=2)
    run(out=tmp_path / "b", until=2)
    resumed, later = run(out=tmp_path / "b", resume=True)
    assert same(whole.state, resumed.state) and whole.curriculum.state_dict() == resumed.curriculum.state_dict() and whole.env_steps == resumed.env_steps
    untimed = lambda rows: [{k: v for k, v in row.items() if "seconds" not in k} for row in rows]
    assert untimed(rows) == untimed(later) and [row["step"] for row in later] == [1, 2, 3, 4]
    assert len(read_jsonl(tmp_path / "a" / "completions.jsonl")) == 2 * TINY.group_size
    with pytest.raises(FileExistsError, match="resume"):
        run(out=tmp_path / "a")
    with pytest.raises(CheckpointError, match="learning_rate"):
        run(dataclasses.replace(TINY, learning_rate=1e-3), out=tmp_path / "a", resume=True)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        run(out=tmp_path / "c", resume=True)


def test_fewer_places_than_episodes_change_nothing():
    def once(slots):
        learner = lake()

        async def main():
            async with EnvPool.local("frozen_lake", slots=slots) as pool:
                return await grpo_step(learner, pool)

        _, groups = asyncio.run(main())
        return [[(r.reward, r.num_turns, [m["content"] for m in r.messages]) for r in group] for group in groups]

    assert once(16) == once(5)


class Cracking(FrozenLakeEnv):
    "Ice that breaks the machine: on every second map, after the first step of an episode, now and then."
    count = 0

    async def step(self, action):
        Cracking.count += 1
        if Cracking.count % 5 == 0:
            raise OSError("the machine broke")
        return await super().step(action)


def test_broken_machines_teach_nothing():
    learner, rows = run(env=Cracking, until=3)
    assert sum(row["unscorable"] for row in rows) > 3 and all(np.isfinite(row["loss"]) for row in rows) and int(learner.state.step) == 3


class Broken(Env):
    async def reset(self, config):
        return "P G F F", {}, ""

    async def step(self, action):
        raise OSError("always")

    async def close(self):
        pass


def test_when_nothing_can_be_scored_nothing_changes():
    learner = lake()
    before, tasks = jax.tree.map(np.array, learner.state.parameters), learner.curriculum.state_dict()
    _, rows = run(env=Broken, learner=learner, until=2)
    assert same(before, learner.state.parameters) and learner.curriculum.state_dict() == tasks and [row["unscorable"] for row in rows] == [16, 16]

    async def main():
        async with EnvPool.local(Broken, slots=4) as pool:
            await evaluate(learner, pool, maps_of_the_test(4, size=2))

    with pytest.raises(RuntimeError, match="could not be scored"):
        asyncio.run(main())


def test_other_curricula_do():
    from xland_minigrid.pool.curriculum import TierCurriculum
    tasks = lake_tasks(40, size=2)
    curriculum = TierCurriculum({"warmup": tasks[:20], "expert": tasks[20:]})
    learner, rows = run(learner=lake(curriculum=curriculum), until=2)
    assert curriculum.stats()["episodes"] == 8 and len(rows) == 2


def test_a_first_prompt_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="1 to 5 tokens"):
        run(learner=lake(), env=Wide)


class Wide(Broken):
    async def reset(self, config):
        return "P G F F F F", {}, ""


def test_beta_falls_over_the_second_half():
    config = GRPOConfig(steps=100, beta=0.4)
    assert [round(beta_at(config, step), 3) for step in (0, 50, 75, 99)] == [0.4, 0.4, 0.2, 0.008]


def test_test_maps_are_others():
    trained, tested = lake_tasks(30_000), maps_of_the_test()
    assert not {t["seed"] for t in trained} & {t["seed"] for t in tested} and {t["p"] for t in tested} == {0.8} and len(tested) == 500
    learner = lake_learner(TINY, size=2, count=60)
    assert unseen(learner, lake_tasks(60, size=2)).all()  # nothing was played yet
    for task in learner.curriculum.next_tasks(60):
        learner.curriculum.record_result(task, 0.0)
    assert not unseen(learner, lake_tasks(60, size=2)).any()


def test_baselines():
    found = lake_baselines(maps_of_the_test(60), 20)
    assert 0.05 < found["random"] < 0.4 and found["shortest path"] == 1.0


@pytest.mark.slow
@pytest.mark.optimized
def test_the_command_learns_clearly_more_than_chance(tmp_path):
    out = tmp_path / "docs" / "results" / "grpo.md"
    run_program(report, ["--size", "3", "--steps", "50", "--groups", "16", "--group-size", "8", "--tests", "100", "--test-every", "25", "--quiet", "--runs", str(tmp_path / "run"), "--out", str(out)])
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    chance = lake_baselines(maps_of_the_test(100, size=3), 20)["random"]
    assert rows[-1]["test"] > chance + 0.15 and rows[-1]["test"] > rows[0]["test"] + 0.3
    assert "| random moves (exact) |" in out.read_text() and "| shortest path |" in out.read_text() and (tmp_path / "docs" / "figures" / "grpo_frozen_lake.png").stat().st_size > 10_000
    assert Checkpoints(tmp_path / "run" / "checkpoints").check()["about"]["config"]["steps"] == 50
