"""Agents: what they see, what they learn from, and that a run can be trusted to be what it says."""
import dataclasses
import functools
import json
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from xland_minigrid.baselines import demo, ppo, rl2
from xland_minigrid.baselines.checkpoint import CheckpointError, Checkpoints
from xland_minigrid.baselines.evaluation import (Evaluation, NetworkPolicy, RandomPolicy, belief_over, bootstrap_mean,
                                                 bootstrap_quantile, evaluate, watch)
from xland_minigrid.baselines.agents import load_agent
from xland_minigrid.baselines import belief as beliefs
from xland_minigrid.baselines.belief import (NOTHING, SUCCESS, EventHead, choose_try, conditions, no_notes, no_tries, same_condition, take_note, take_try,
                                             to_try, what_happened)
from xland_minigrid.baselines.report import table
from xland_minigrid.baselines.encoders import Inputs, first_inputs, next_inputs
from xland_minigrid.baselines.metrics import read_metrics
from xland_minigrid.baselines.networks import ActorCritic, NetworkConfig
from xland_minigrid.baselines.ppo import PPOConfig
from xland_minigrid.baselines.rl2 import TrainConfig, make_world, train
from xland_minigrid.benchmarks import generate_benchmark
from xland_minigrid.core.goals import AgentNearUpGoal, TileNearGoal, TileNearUpGoal
from xland_minigrid.core.tiles import Tiles, pack_pairs

SMALL = NetworkConfig(embedding=4, encoder_width=32, event=8, memory=16, head=32)
# Every training in this file runs the one program of this configuration on benchmarks of one shape: 300 tasks of four objects.
TINY = TrainConfig(size=5, max_steps=12, total_steps=20_000, num_envs=32, steps_per_task=60, steps_per_update=20,
                   devices=1, loggers=("jsonl",), network=SMALL,
                   ppo=PPOConfig(num_minibatches=4, schedule="constant", lr=3e-3))


@pytest.fixture(scope="module")
def tasks():
    return demo.hold_tasks(demo.OBJECTS, 300)


@pytest.fixture(scope="module")
def finished(tasks, tmp_path_factory):
    "A run that nobody interrupted."
    return train(dataclasses.replace(TINY, out=str(tmp_path_factory.mktemp("runs") / "whole")), tasks, progress=False)


def equal(a, b):
    return all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def some_inputs(t, b, view_size=5, seed=0):
    random = np.random.default_rng(seed)
    return Inputs(
        view=jnp.asarray(random.integers(0, 15, (t, b, view_size, view_size, 2)), jnp.uint8), direction=jnp.asarray(random.integers(0, 4, (t, b)), jnp.int32),
        action=jnp.asarray(random.integers(0, 7, (t, b)), jnp.int32), reward=jnp.asarray(random.random((t, b)), jnp.float32),
        done=jnp.asarray(random.random((t, b)) < 0.2), front=jnp.asarray(random.integers(0, 15, (t, b, 2)), jnp.uint8))


@functools.cache
def network_of(**changes):
    "Structure and parameters of the small network with these changes, for a view of 5 cells."
    return nnx.split(ActorCritic(dataclasses.replace(SMALL, **changes), 5, 6, rngs=nnx.Rngs(0)))


def start(batch):
    "The memory of the small network when a task begins."
    return jnp.zeros((batch, SMALL.memory))


# The network --------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("view_size, event, attention", [(3, 8, False), (7, 0, True)])
def test_shapes_and_one_step_at_a_time(view_size, event, attention):
    config, inputs = dataclasses.replace(SMALL, event=event, attention=attention), some_inputs(4, 3, view_size)

    @jax.jit
    def both_ways(inputs):
        structure, parameters = nnx.split(ActorCritic(config, view_size, 6, rngs=nnx.Rngs(0)))
        think = lambda memory, x: ((out := ppo.policy_step(nnx.merge(structure, parameters), x, memory)).memory, out)
        return nnx.merge(structure, parameters)(inputs, start(3)), jax.lax.scan(think, start(3), inputs)

    out, (memory, single) = both_ways(inputs)
    assert (out.logits.shape, out.value.shape, out.belief.shape, out.memory.shape) == ((4, 3, 6), (4, 3), (4, 3, 5, 16), (3, 16))
    for a, b in ((single.logits, out.logits), (single.value, out.value), (memory, out.memory)):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_every_input_counts_and_memory_carries():
    "A network that ignored one of its inputs would still train, only badly."
    inputs = some_inputs(1, 1)
    structure, parameters = network_of()
    network_value = jax.jit(lambda inputs, memory: nnx.merge(structure, parameters)(inputs, memory).value)
    base = network_value(inputs, start(1))
    changes = dict(view=inputs.view.at[0, 0, 0, 0].set(9), direction=(inputs.direction + 1) % 4, action=(inputs.action + 1) % 7, reward=inputs.reward + 1,
                   done=~inputs.done, front=inputs.front + 1)
    for name, value in changes.items():
        assert network_value(inputs.replace(**{name: value}), start(1)) != base, name
    assert network_value(inputs, start(1) + 0.5) != base


def test_the_policy_never_sees_the_goal(tasks):
    "The same worlds with other goals: everything the agent perceives and decides is the same until somebody reaches a goal."
    env, params = make_world(TINY)
    structure, parameters = network_of()
    network, rulesets = nnx.merge(structure, parameters), tasks.get_rulesets(np.arange(64))
    changed = rulesets.replace(goal=rulesets.goal.at[:, 1:3].set(rulesets.init_tiles[:, 1]))

    @jax.jit
    def ten_steps(rulesets):
        timestep, step = rl2.begin(env, params, rulesets, jax.random.split(jax.random.key(0), 64))
        play = ppo.RolloutState(timestep, first_inputs(timestep, 6), network.start(64), jax.random.key(1))
        return ppo.collect(network, step, play, 10)[1]

    seen = [ten_steps(r) for r in (rulesets, changed)]
    untouched = ~(np.cumsum(seen[0].done | seen[1].done, 0) - (seen[0].done | seen[1].done) > 0)
    assert untouched[5:].any() and (np.asarray(seen[0].goal) != np.asarray(seen[1].goal)).any()
    for name in ("log_prob", "value", "action"):
        a, b = (np.asarray(getattr(s, name))[untouched] for s in seen)
        np.testing.assert_array_equal(a, b)


def test_inputs_follow_the_end_of_a_trial(tasks):
    env, params = make_world(TINY)

    @jax.jit
    def turn_on_the_spot(keys):
        timestep, step = rl2.begin(env, params, tasks.get_rulesets(np.arange(8)), keys)

        def turn(carry, _):
            timestep = step(carry[0], jnp.full(8, 1))
            carry = timestep, next_inputs(carry[1], jnp.full(8, 1), timestep)
            return carry, carry

        first = first_inputs(timestep, 6)
        return first, jax.lax.scan(turn, (timestep, first), length=12)[1]

    first, (timesteps, inputs) = turn_on_the_spot(jax.random.split(jax.random.key(0), 8))
    assert (first.action == 6).all() and not first.done.any() and (inputs.action == 1).all()
    assert (inputs.done == (jnp.arange(12) == 11)[:, None]).all()
    assert (inputs.front[1:] == inputs.view[:-1, :, 3, 2]).all() and (inputs.front[0] == first.view[:, 3, 2]).all()
    assert (timesteps.state.step_num[-1] == 0).all() and (inputs.view == timesteps.observation).all(), "what is seen belongs to the new trial"


# Learning -----------------------------------------------------------------------------------------------------------------------------

def test_advantages_equal_their_definition():
    random, advantages = np.random.default_rng(0), jax.jit(ppo.advantages)
    reward, value, last = random.random((20, 3)), random.random((20, 3)), random.random(3)
    following = np.vstack([value[1:], last])
    for gamma, gae_lambda in [(0.97, 0.95), (1.0, 1.0), (0.9, 0.0), (0.0, 0.5)]:
        expected = np.zeros((20, 3))
        for t in range(20):
            for k in range(t, 20):
                expected[t] += (gamma * gae_lambda) ** (k - t) * (reward[k] + gamma * following[k] - value[k])
        np.testing.assert_allclose(advantages(reward, value, last, gamma, gae_lambda), expected, atol=1e-5)


def test_who_learns_from_which_part_of_the_loss():
    random, (t, b) = np.random.default_rng(1), (6, 8)
    inputs, noise = some_inputs(t, b), lambda: random.normal(size=(t, b)).astype(np.float32)
    batch = ppo.Transition(
        inputs=inputs, action=random.integers(0, 6, (t, b)), log_prob=noise() * 0.1 - 1.8, value=noise(), reward=noise(), done=inputs.done,
        success=inputs.done, goal=random.integers(0, 15, (t, b, 5)).astype(np.uint8))
    structure, parameters = network_of()
    network = lambda p: nnx.merge(structure, p)
    losses = [lambda p, advantage, target, config=config: ppo.loss(network(p), config, start(b), None, batch, advantage, target)[0]
              for config in (PPOConfig(), PPOConfig(belief_coef=0.0), PPOConfig(vf_coef=0.0, belief_coef=0.0))]
    losses.append(lambda p, *_: ppo.belief_loss(network(p)(batch.inputs, start(b)).belief, batch.goal))
    slopes = jax.jit(lambda p, *args: [jax.grad(loss)(p, *args) for loss in losses])(parameters, noise(), noise())
    touched = [{name for name in slope if any(np.asarray(x).any() for x in jax.tree.leaves(slope[name]))} for slope in slopes]
    shared = {"encoder", "event", "core"}
    everything = shared | {"attention", "shared", "actor", "critic", "belief"}
    assert touched == [everything, everything - {"belief"}, everything - {"belief", "critic"}, {"belief"}], "the memory does not learn to please a belief on which nobody acts"


def test_gradients_in_float16_lose_nothing_to_underflow():
    "A whole gradient step in float16 moves the encoder as one in float32 does; with advantages of 10⁻⁴ only a scaled loss does so."
    random, (t, b) = np.random.default_rng(1), (6, 8)
    noise = lambda scale: (scale * random.normal(size=(t, b))).astype(np.float32)
    inputs, config = some_inputs(t, b), PPOConfig(num_minibatches=1, update_epochs=1, normalise=False, clip_value=False, ent_coef=0.0, vf_coef=0.0, belief_coef=0.0)
    batch = ppo.Transition(inputs=inputs, action=random.integers(0, 6, (t, b)), log_prob=noise(0.1) - 1.8, value=noise(1), reward=noise(1), done=inputs.done,
                           success=inputs.done, goal=random.integers(0, 15, (t, b, 5)).astype(np.uint8))
    batch, advantage = jax.tree.map(jnp.asarray, (batch, noise(1e-4)))
    play, optimizer = ppo.RolloutState(None, inputs, start(b), jax.random.key(0)), optax.sgd(1e5)

    def moved(dtype):
        structure, parameters = network_of(dtype=dtype)
        learned, _ = jax.jit(lambda p: ppo.run_epochs(structure, config, optimizer, (p, optimizer.init(p)), play, batch, advantage, jax.random.key(1)))(parameters)
        return np.concatenate([np.ravel(x - y) for x, y in zip(jax.tree.leaves(learned[0]["encoder"]), jax.tree.leaves(parameters["encoder"]))])

    full, half = moved("float32"), moved("float16")
    assert np.linalg.norm(full - half) < 0.05 * np.linalg.norm(full)


def test_no_credit_beyond_the_clip():
    "Ratios that have moved far enough in the good direction get no gradient; in the bad direction they still do."
    old, advantage = jnp.zeros((1, 4)), jnp.array([[1., 1., -1., -1.]])
    slope = jax.jit(jax.grad(lambda lp: ppo.actor_loss(lp, old, advantage, 0.2)))(np.log([[1.3, 0.7, 1.3, 0.7]]))
    assert slope[0, 0] == 0 and slope[0, 3] == 0 and slope[0, 1] < 0 < slope[0, 2]


def test_belief_loss_of_certainty_and_of_ignorance():
    goal, loss = np.array([[[1, 5, 3, 0, 200]]], np.uint8), jax.jit(ppo.belief_loss)
    assert np.isclose(loss(np.zeros((1, 1, 5, 16)), goal), 5 * np.log(16), atol=1e-4)
    assert loss(100 * np.eye(16)[np.minimum(goal, 15)], goal) < 1e-4


def test_every_agent_is_in_every_epoch_once():
    config = PPOConfig(num_minibatches=4, update_epochs=3)
    parts = np.asarray(ppo.minibatch_indices(jax.random.key(0), config, jnp.arange(32))).reshape(3, 32)
    assert (np.sort(parts) == np.arange(32)).all() and (parts[0] != parts[1]).any()


@pytest.mark.slow
def test_it_learns_to_fetch_the_one_object(tasks):
    "The same object is wanted in every task: an agent that learns at all soon solves most trials of every task."
    one = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), tasks)
    (state, one), one_round, metrics = rl2.replicate((rl2.start_run(TINY), one), rl2.mesh_of(TINY)), rl2.make_round(TINY), []
    for _ in range(60):
        state, row = one_round(state, one)
        metrics.append(rl2.metrics_row(row))
    last = {name: np.mean([row[name] for row in metrics[-5:]]) for name in metrics[0]}
    assert metrics[0]["success"] < 0.5 and last["success"] > 0.7
    assert last["belief_nats"] < 0.2 * metrics[0]["belief_nats"] and last["trial_steps"] < 0.7 * metrics[0]["trial_steps"]


# Runs ---------------------------------------------------------------------------------------------------------------------------------

def test_a_run_keeps_what_it_promises(finished):
    out, config = Path(finished.agent.config.out), finished.agent.config
    rows = read_metrics(out / "metrics.jsonl")
    assert rows == finished.metrics and [r["steps"] for r in rows] == [config.steps_per_round * (i + 1) for i in range(config.rounds)]
    assert finished.checkpoint == out.absolute() / "checkpoints" / f"{rows[-1]['steps']}.safetensors" and finished.checkpoint.is_file()
    assert (out / "training.png").stat().st_size > 5000 and rl2.from_dict(json.loads((out / "config.json").read_text())) == config
    assert all(0 <= r["success"] <= 1 and r["trials"] > 0 for r in rows)


def test_another_seed_gives_another_agent(finished, tasks, tmp_path):
    "That the same seed gives the same agent is asserted below, of a run that was interrupted."
    other = train(dataclasses.replace(TINY, out=str(tmp_path / "other"), seed=1), tasks, progress=False).agent
    assert not equal(other.parameters, finished.agent.parameters)


@pytest.mark.parametrize("how", ["signal", "exception"])
def test_interrupted_and_resumed_is_uninterrupted(how, finished, tasks, tmp_path, capsys):
    config = dataclasses.replace(TINY, out=str(tmp_path / "run"))

    def stop(row):
        if row["steps"] == 5 * config.steps_per_round:
            if how == "exception":
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    resume = {"signal": True, "exception": "auto"}[how]
    half = train(config, tasks, progress=False, on_round=stop, resume=resume == "auto" and resume)  # "auto" begins where nothing is
    assert half.interrupted and half.agent.steps == 5 * config.steps_per_round and str(half.checkpoint) in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before
    assert equal(load_agent(config.out).parameters, half.agent.parameters)
    with open(tmp_path / "run" / "metrics.jsonl", "a") as file:
        file.write('{"steps": 6400, "ret')
    whole = train(config, tasks, progress=False, resume=resume)
    assert not whole.interrupted and equal(whole.agent.parameters, finished.agent.parameters)
    timeless = lambda rows: [{k: v for k, v in r.items() if k != "seconds"} for r in rows]
    assert timeless(read_metrics(tmp_path / "run" / "metrics.jsonl")) == timeless(finished.metrics)
    seconds = [r["seconds"] for r in whole.metrics]
    assert seconds == sorted(seconds)


def test_a_second_ctrl_c_leaves_the_checkpoints_before_it(tasks, tmp_path):
    config = dataclasses.replace(TINY, out=str(tmp_path / "run"), checkpoint_minutes=0.0)

    def twice(row):
        if row["steps"] == 4 * config.steps_per_round:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    stopped = train(config, tasks, progress=False, on_round=twice)
    assert stopped.interrupted
    steps = Checkpoints(tmp_path / "run" / "checkpoints").steps()
    assert steps == [config.steps_per_round * k for k in (2, 3, 4)], "the last three stay"
    assert load_agent(config.out, steps[0]).steps == steps[0]


def test_a_run_that_diverges_says_so_and_keeps_the_good_checkpoint(tasks, tmp_path, monkeypatch):
    config = dataclasses.replace(TINY, out=str(tmp_path / "run"), checkpoint_minutes=0.0)
    good, calls = rl2.make_round(config), []

    def broken(state, benchmark):
        state, metrics = good(state, benchmark)
        calls.append(1)
        return state, {**metrics, "critic_loss": jnp.where(len(calls) == 3, jnp.nan, metrics["critic_loss"])}

    monkeypatch.setattr(rl2, "make_round", lambda *_: broken)
    with pytest.raises(FloatingPointError, match="lower ppo.lr"):
        train(config, tasks, progress=False)
    assert load_agent(config.out).steps == 2 * config.steps_per_round


def test_resuming_something_else_is_refused(finished, tasks):
    config = finished.agent.config
    with pytest.raises(CheckpointError, match=r"another network.memory, ppo.lr, seed"):
        train(dataclasses.replace(config, seed=3, ppo=dataclasses.replace(config.ppo, lr=1e-4), network=dataclasses.replace(config.network, memory=8)), tasks, resume=True)
    with pytest.raises(CheckpointError, match="other tasks"):
        train(config, demo.hold_tasks(demo.OBJECTS, 20), resume=True)
    with pytest.raises(FileExistsError, match="resume it"):
        train(config, tasks)
    assert read_metrics(config.out + "/metrics.jsonl") == finished.metrics, "a refusal changes nothing"


def test_a_finished_run_can_be_prolonged(finished, tasks):
    longer = dataclasses.replace(finished.agent.config, total_steps=40_000, keep=7)
    state = rl2._resumed(Checkpoints(Path(longer.out) / "checkpoints"), longer, rl2.digest(tasks), rl2.start_run(longer))
    assert int(state.round) == finished.agent.config.rounds < longer.rounds and equal(state.parameters, finished.agent.parameters)


def test_wrong_configurations():
    for changes, words in [(dict(steps_per_task=50), "multiple of steps_per_update"), (dict(num_envs=30), "multiple of ppo.num_minibatches"),
                           (dict(total_steps=100), "raise the one"), (dict(held_out=1.5), r"lie in \[0, 1\)"), (dict(num_envs=0), "lie in")]:
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(TINY, **changes)


def test_wrong_worlds_and_benchmarks():
    with pytest.raises(ValueError, match="trivial-1m"):
        rl2.load_tasks(dataclasses.replace(TINY, benchmark="no-such"))
    with pytest.raises(ValueError, match="no rulesets"):
        make_world(dataclasses.replace(TINY, env_id="MiniGrid-Empty-8x8"))


def test_held_out_goals_are_not_trained_on(tmp_path):
    from xland_minigrid.benchmarks import generate_benchmark
    generate_benchmark("trivial", n=1000).save(tmp_path / "tasks.safetensors")
    training, test = rl2.load_tasks(dataclasses.replace(TINY, benchmark=str(tmp_path / "tasks.safetensors"), held_out=0.2))
    assert len(training) + len(test) == 1000 and 0.15 < len(test) / 1000 < 0.25
    assert not set(training.goal_ids()) & set(test.goal_ids())


def test_only_shallow_tasks_are_trained_on(tmp_path):
    from xland_minigrid.benchmarks import generate_benchmark
    generate_benchmark("medium", n=1000).save(tmp_path / "tasks.safetensors")
    config = dataclasses.replace(TINY, benchmark=str(tmp_path / "tasks.safetensors"), held_out=0.2)
    every, test = rl2.load_tasks(config)
    for depth in (0, 1, 2):
        few, same = rl2.load_tasks(dataclasses.replace(config, max_depth=depth))
        shallow = every.plans().depth <= depth
        assert 0 < len(few) == shallow.sum() and set(few.ruleset_ids()) == set(every.take(np.flatnonzero(shallow)).ruleset_ids())
        assert np.array_equal(same.ruleset_ids(), test.ruleset_ids())
    every.take(np.flatnonzero(every.plans().depth > 0)).save(tmp_path / "deep.safetensors")
    with pytest.raises(ValueError, match="have a depth of 1 or more"):
        rl2.load_tasks(dataclasses.replace(config, benchmark=str(tmp_path / "deep.safetensors"), max_depth=0))
    with pytest.raises(ValueError, match="max_depth"):
        dataclasses.replace(TINY, max_depth=-1)


def test_the_command_line_sets_every_field():
    import argparse

    from xland_minigrid.baselines.options import add_options, chosen, options_of, with_options
    parser = argparse.ArgumentParser()
    add_options(parser, TrainConfig())
    read = lambda *words: with_options(TrainConfig(), chosen(TrainConfig(), parser.parse_args(words)))
    assert read() == TrainConfig()
    config = read("--num-envs", "64", "--ppo.lr", "3e-4", "--network.memory", "32", "--max-steps", "20", "--ppo.schedule", "constant", "--rooms", "5", "6", "--no-ppo.clip-value", "--devices", "None")
    assert (config.num_envs, config.ppo.lr, config.network.memory, config.max_steps, config.ppo.schedule) == (64, 3e-4, 32, 20, "constant")
    assert config.rooms == (5, 6) and config.ppo.clip_value is False and config.devices is None
    assert all(option.about for option in options_of(TrainConfig()) if option.name != "seed"), "every setting says what it is"


# Checkpoints --------------------------------------------------------------------------------------------------------------------------

def test_a_checkpoint_is_whole_or_refused(tmp_path):
    tree = {"w": jnp.arange(1000.), "key": jax.random.key(1), "n": jnp.int32(2)}
    kept = Checkpoints(tmp_path / "c", keep=2)
    for step in (10, 20, 30):
        kept.save(step, tree, {"step": step})
    assert kept.steps() == [20, 30] and kept.record()["about"] == {"step": 30} and "jax" in kept.record()["versions"]
    content = bytearray(kept.path(30).read_bytes())
    content[-160:-100] = bytes(60)
    kept.path(30).write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged.*older"):
        kept.load(tree)
    loaded, _ = kept.load(tree, 20)
    assert equal(loaded["w"], tree["w"]) and equal(jax.random.key_data(loaded["key"]), jax.random.key_data(tree["key"]))
    kept.path(20).write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        kept.load(tree, 20)


def test_checkpoints_that_are_not_there_or_do_not_fit(tmp_path):
    kept = Checkpoints(tmp_path / "c")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        kept.load({})
    assert not (tmp_path / "c").exists(), "looking makes no folders"
    kept.save(1, {"w": jnp.zeros(3)})
    (tmp_path / "c" / ".7.safetensors.x.part").touch()
    assert kept.steps() == [1], "a half-written checkpoint does not count"
    for like, words in (({"w": jnp.zeros(4)}, r"\(3,\) in the checkpoint"), ({"v": jnp.zeros(3)}, "has no"), ({"w": jnp.zeros(3, jnp.int32)}, "float32")):
        with pytest.raises(CheckpointError, match=words):
            kept.load(like)
    with pytest.raises(CheckpointError, match="there are 1"):
        kept.load({"w": jnp.zeros(3)}, 5)
    with pytest.raises(ValueError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)


# Evaluation ---------------------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Slow:
    "Solves even-numbered columns of the batch by chance only and never acts in the others: half of the tasks take all the time there is."
    def start(self, batch):
        return jnp.arange(batch) % 2 == 0

    def act(self, parameters, inputs, memory, keys):
        random = jax.vmap(lambda key: jax.random.randint(key, (), 0, 6))(keys)
        return jnp.where(memory, random, 1), memory


def test_slow_tasks_count_as_much_as_fast_ones(tasks):
    world = make_world(TINY)
    found = evaluate(Slow(), tasks, world=world, num_trials=3, num_tasks=100)
    assert found.steps.shape == (100, 3) and len(set(found.task_ids)) == 100
    assert (found.steps[1::2] == 12).all() and (found.success[1::2] == 0).all() and found.success[::2].any()


def test_evaluation_equals_playing_every_task_by_hand(tasks):
    "One task at a time, without batch and auto-reset, with the same random numbers."
    env, params = make_world(TINY)
    found = evaluate(RandomPolicy(), tasks, world=(env, params), num_trials=3, num_tasks=12, seed=4)
    reset, step = jax.jit(env._env.reset), jax.jit(env._env.step)
    draw = jax.jit(lambda key, t: jax.random.randint(jax.random.fold_in(key, t), (), 0, 6))
    for row, (task, key) in enumerate(zip(found.task_ids[:6], jax.random.split(jax.random.key(4), 12))):
        reset_key, act_key = jax.random.split(key)
        own = params.replace(ruleset=tasks.get_ruleset(task))
        timestep, t = reset(own, reset_key), 0
        for trial in range(3):
            while not timestep.last():
                timestep, t = step(own, timestep, draw(act_key, t)), t + 1
            assert found.steps[row, trial] == timestep.state.step_num and found.success[row, trial] == (timestep.discount == 0)
            np.testing.assert_allclose(found.returns[row, trial], timestep.reward, rtol=1e-6)
            timestep = reset(own, timestep.state.key)


def test_greedy_is_greedy():
    structure, parameters = network_of()
    policy, inputs = NetworkPolicy(structure, greedy=True), jax.tree.map(lambda x: x[0], some_inputs(1, 5))

    @jax.jit
    def both(parameters):
        action, _ = policy.act(parameters, inputs, start(5), jax.random.split(jax.random.key(0), 5))
        return action, ppo.policy_step(nnx.merge(structure, parameters), inputs, start(5)).logits

    action, logits = both(parameters)
    assert (np.asarray(action) == np.asarray(logits).argmax(-1)).all()


def test_intervals_cover_the_truth():
    random = np.random.default_rng(0)
    covered = [low <= 0.3 <= high for low, high in (bootstrap_mean(random.random(200) < 0.3, 400, seed=i)[1:] for i in range(200))]
    assert 0.90 <= np.mean(covered) <= 0.99
    covered = [low <= 0.2 <= high for low, high in (bootstrap_quantile(random.random(200), 0.2, 400, seed=i)[1:] for i in range(200))]
    assert 0.88 <= np.mean(covered) <= 0.99
    mean, low, high = bootstrap_mean(np.ones((30, 4)))
    assert (mean == 1).all() and (low == 1).all() and (high == 1).all()


def test_per_trial_and_overall():
    won = np.array([[0., 1.], [1., 1.], [0., 1.], [1., 1.]])
    e = Evaluation(won, 12 - 6 * won, 0.5 * won, np.arange(4))
    curve, overall = e.per_trial(), e.overall()
    assert curve["success"].tolist() == [0.5, 1.0] and curve["steps"].tolist() == [9, 6] and curve["success_lo"][1] == 1 > curve["success_lo"][0]
    assert overall["return"][0] == 0.375 and overall["return_p20"][0] == 0.25
    lines = table({"a": e, "b": e}).splitlines()
    assert lines[2].split()[:4] == ["|", "1", "|", "50%"] and len(lines) == 2 + 2 + 1 + 2 + 2


def test_wrong_evaluations(finished, tasks):
    import xland_minigrid
    from xland_minigrid.envs.wrappers import DirectionObservationWrapper
    env, params = xland_minigrid.make("XLand-MiniGrid-R1-9x9", max_steps=5)
    played = lambda raw: evaluate(RandomPolicy(), tasks, world=(raw, params), num_trials=2, num_tasks=4)
    for call, words in [(lambda: evaluate(RandomPolicy(), tasks), "make_world"), (lambda: evaluate(finished.agent, tasks, num_trials=0), "at least one"),
                        (lambda: evaluate(finished.agent, tasks, num_tasks=0), "at least one"), (lambda: bootstrap_mean([]), "no tasks"),
                        (lambda: bootstrap_quantile([]), "no tasks"), (lambda: played(env), "GymAutoResetWrapper"),
                        (lambda: played(DirectionObservationWrapper(env)), "GymAutoResetWrapper")]:
        with pytest.raises(ValueError, match=words):
            call()


def test_lava_is_no_success():
    from xland_minigrid.baselines.evaluation import Tally, add
    from xland_minigrid.envs.environment import StepType, TimeStep
    ended = TimeStep(state=None, observation=None, step_type=np.full(3, StepType.LAST), discount=np.array([0., 0., 1.]), reward=np.array([0., .7, 0.]))
    assert add(Tally(*[np.zeros((3, 2))] * 3), np.zeros(3, int), ended).success[:, 0].tolist() == [0, 1, 0], "lava, the goal, out of time"


def test_watching_shows_what_an_agent_lives_through(finished, tasks):
    moments = watch(finished.agent, tasks.get_ruleset(3), num_trials=3, seed=1)
    assert [m.trial for m in moments] == sorted(m.trial for m in moments) and sum(m.timestep.last() for m in moments) == 3
    for before, after in zip(moments, moments[1:]):
        steps = int(before.timestep.state.step_num), int(after.timestep.state.step_num)
        assert steps[1] == (0 if before.timestep.last() else steps[0] + 1)
    np.testing.assert_allclose(belief_over(moments[0].belief, demo.OBJECTS).sum(), 1)


# A single task ------------------------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.optimized
def test_a_single_task_is_solved(tmp_path):
    from xland_minigrid.measure.tables.single_tasks import time_to_solve
    found = time_to_solve(rl2.preset("laptop", "MiniGrid-DoorKey-5x5", out=str(tmp_path / "run")), progress=False)
    assert found["solved"] and found["tested"] >= 0.95, found


def test_left_out_objects_are_not_missed():
    "What `vary_distractors` leaves out is in no plan, and the rest is as it was."
    from xland_minigrid.benchmarks import generate_benchmark
    from xland_minigrid.benchmarks.solve import prove
    tasks = generate_benchmark("high", 256, seed=5, progress=False)
    rulesets = tasks.get_rulesets(np.arange(256))
    fewer = np.asarray(jax.jit(jax.vmap(rl2.leave_out))(rulesets, jax.random.split(jax.random.key(0), 256)).init_tiles)
    gone = (fewer != tasks.init_tiles).any(-1)
    assert 0 < gone.any(1).mean() < 1 and not fewer[gone].any()
    plans, before = prove(tasks.goals, tasks.rules, fewer), tasks.plans()
    assert plans.solvable.all() and np.array_equal(plans.num_steps, before.num_steps)


def test_presets():
    assert rl2.preset() == rl2.finding_out(0.3, total_steps=13_312_000) and set(rl2.PRESETS) == {"laptop", "colab-t4", "colab-tpu", "gpu", "paper", "box", "doors", "rules"}
    paper = rl2.preset("paper")
    table_6 = {"rnn_hidden_dim": paper.network.memory, "rnn_num_layers": paper.network.layers, "head_hidden_dim": paper.network.head, "num_envs": paper.num_envs,
               "num_steps_per_env": paper.steps_per_task, "num_steps_per_update": paper.steps_per_update, "update_epochs": paper.ppo.update_epochs,
               "num_minibatches": paper.ppo.num_minibatches, "total_timesteps": paper.total_steps, "lr": paper.ppo.lr, "clip_eps": paper.ppo.clip_eps,
               "gamma": paper.ppo.gamma, "gae_lambda": paper.ppo.gae_lambda, "ent_coef": paper.ppo.ent_coef, "vf_coef": paper.ppo.vf_coef,
               "max_grad_norm": paper.ppo.max_grad_norm, "train_seed": paper.seed, "embedding": paper.network.embedding}
    assert table_6 == {"rnn_hidden_dim": 1024, "rnn_num_layers": 1, "head_hidden_dim": 256, "num_envs": 16384, "num_steps_per_env": 12800, "num_steps_per_update": 256,
                       "update_epochs": 1, "num_minibatches": 32, "total_timesteps": 10**10, "lr": 0.001, "clip_eps": 0.2, "gamma": 0.99, "gae_lambda": 0.95,
                       "ent_coef": 0.01, "vf_coef": 0.5, "max_grad_norm": 0.5, "train_seed": 42, "embedding": 16}
    for name in rl2.PRESETS:
        alone = rl2.preset(name, "MiniGrid-DoorKey-5x5")
        assert not alone.benchmark and not alone.ppo.across_trials and alone.ppo.belief_coef == 0
    with pytest.raises(ValueError, match="choose from laptop"):
        rl2.preset("supercomputer")
    with pytest.raises(ValueError, match="DoorKey"):
        rl2.preset("laptop", "MiniGrid-DoorKey-555")
    for wrong in (dict(show_goal=0.5), dict(rooms=(2,)), dict(grow=0.0), dict(benchmark="", vary_distractors=True), dict(benchmark="", network=dataclasses.replace(SMALL, neighbors=True, goal_conditioned_core=8))):
        with pytest.raises(ValueError):
            dataclasses.replace(TINY, **wrong)


def test_heads_that_only_guess_do_not_move_the_policy():
    "Logits and value do not depend on what the belief's head is made of, where no second memory acts on the belief."
    def slope(inputs, value=1.0, policy=1.0, belief=0.0, **changes):
        structure, parameters = network_of(**changes)
        memory, weigh = nnx.merge(structure, parameters).start(2), lambda out: policy * out.logits.sum() + value * out.value.sum() + belief * (out.belief**2).sum()
        out = jax.jit(jax.grad(lambda p: weigh(nnx.merge(structure, p)(inputs, memory))))(parameters)
        return {name: any(np.asarray(x).any() for x in jax.tree.leaves(part)) for name, part in out.items()}

    inputs = some_inputs(3, 2)
    found = slope(inputs)
    assert not found["belief"] and found["actor"] and found["critic"]
    cells = lambda *shape: jnp.zeros((3, 2, *shape, 2), jnp.uint8)
    two, inputs = {"neighbors": True, "goal_conditioned_core": 8}, inputs.replace(neighbors=cells(4), held=cells(), pocket=cells())
    found = slope(inputs, 0.0, **two)
    assert found["goal_conditioned_core"] and not found["belief"], "no gradient passes through what is believed"
    found = slope(inputs, 0.0, 0.0, 1.0, **two)
    assert found["belief"] and found["core"] and found["encoder"] and not found["goal_conditioned_core"], "the first memory learns to say what is wanted"


# Notes of events ----------------------------------------------------------------------------------------------------------------------

def test_what_is_noticed_is_what_rules_do():
    """Random play, and every step once more in a world without rules: where the two differ, a rule was triggered. What is noticed is that, as far as it is near
    the agent; and among the conditions of an event is the one that made it happen."""
    config = TrainConfig(num_envs=256)
    env, params = make_world(config)
    rulesets = generate_benchmark("small", 256, seed=5).get_rulesets(np.arange(256))
    asked = jnp.concatenate([rl2.condition_of(rulesets.rules), rulesets.goal[:, None]], axis=1)

    @jax.jit
    def play(key):
        timestep, step = rl2.begin(env, params, rulesets, jax.random.split(key, 256))

        def one(now, key):
            timestep, inputs = now
            action = jax.random.choice(key, jnp.array([0, 0, 0, 1, 2, 3, 3, 4, 4]), (256,))
            lawless = timestep.replace(state=timestep.state.replace(rules=jnp.zeros_like(timestep.state.rules)))
            after, without = step(timestep, action), step(lawless, action)
            differ = lambda part: (part(after.state) != part(without.state)).any(tuple(range(1, part(after.state).ndim)))
            triggered = (differ(lambda s: s.cells) | differ(lambda s: s.agent.pocket)) & ~after.last() & ~without.last()
            inputs = next_inputs(inputs, action, after)
            event, kind = what_happened(inputs)
            cause = same_condition(conditions(event)[:, :, None], asked[:, None]) & (asked[:, None, :, 0] > 0)
            return (after, inputs), (kind, triggered, after.reward > 0, cause.any((1, 2)))
        start = timestep, first_inputs(timestep, 6, neighbors=True)
        return jax.lax.scan(one, start, jax.random.split(key, 300))[1]

    kind, triggered, rewarded, explained = map(np.asarray, play(jax.random.key(0)))
    assert triggered.sum() > 200 and rewarded.sum() > 20 and ((kind == SUCCESS) == rewarded).all()
    noticed = (kind != NOTHING) & (kind != SUCCESS)
    assert (noticed & triggered).sum() > 0.95 * triggered.sum() and (noticed & ~triggered).sum() < 0.02 * noticed.sum(), (noticed.sum(), triggered.sum(), (noticed & triggered).sum())
    assert explained[noticed & triggered].mean() > 0.97 and explained[rewarded].mean() > 0.8, "a trial may begin next to the object of its goal"
    assert explained[~noticed & ~rewarded].mean() < 0.1, "a condition is seldom met without an event"


def test_conditions_are_the_same_in_either_order_and_all_that_hold_are_weighed(monkeypatch):
    rng = np.random.default_rng(0)
    pair = lambda *shape: np.stack([rng.choice([Tiles.FLOOR, Tiles.BALL, Tiles.KEY, Tiles.STAR], shape), rng.choice([1, 2], shape)], axis=-1)
    kind, first, second = rng.choice([1, 3, 4, *range(7, 15)], 4000), pair(4000), pair(4000)
    one = np.concatenate([kind[:, None], first, second], axis=-1)
    two_objects = (kind >= TileNearGoal.ID) & (kind < AgentNearUpGoal.ID)
    side = np.where(kind == TileNearGoal.ID, kind, (kind - TileNearUpGoal.ID + 2) % 4 + TileNearUpGoal.ID)
    turned = np.where(two_objects[:, None], np.concatenate([side[:, None], second, first], axis=-1), one)
    other = np.where(rng.random((4000, 1)) < 0.5, turned, np.roll(one, 1, axis=0))
    assert np.array_equal(same_condition(one, other), (one == other).all(-1) | (turned == other).all(-1))

    notes, batch = no_notes(16), 16
    events = np.concatenate([pair(batch, 8, 2, 6).reshape(batch, 8, 2, 12), rng.integers(0, 5, (batch, 8, 2, 1)),
                             rng.integers(0, 4, (batch, 8, 2, 1))], axis=-1).astype(np.uint8)
    notes = notes._replace(events=jnp.asarray(events), kind=notes.kind.at[:, 1:].set(rng.integers(2, 300, (batch, 7))), count=notes.count + 2)
    head = EventHead(8, 16, rngs=nnx.Rngs(0))
    given = jnp.asarray(rng.normal(size=(batch, 8)), jnp.float32), jnp.asarray(rng.normal(size=(batch, 5, 16)), jnp.float32), notes
    hold = (np.asarray(conditions(notes.events[:, :, 1]))[..., 0] > 0).sum((1, 2))
    few = head(*given)
    monkeypatch.setattr(beliefs, "FEW", 80)
    every = head(*given)
    assert 20 < hold.max() < 32 and np.array_equal(few.goal, every.goal) and np.array_equal(few.goal_shown, every.goal_shown)


def test_the_agent_tries_what_it_has_not_tried():
    """Random play on tasks of the benchmark with the longest chains. The agent is told to try only what has not been true after any of its actions, with objects
    that it saw in this trial, and gives up in time."""
    env, params = make_world(TrainConfig(num_envs=64))
    rulesets = generate_benchmark("high", 64, seed=5).get_rulesets(np.arange(64))

    @jax.jit
    def play(key):
        timestep, step = rl2.begin(env, params, rulesets, jax.random.split(key, 64))

        def one(now, key):
            timestep, inputs, notes, tries = now
            notes = take_note(notes, inputs)
            tries = choose_try(take_try(tries, inputs), inputs, notes)
            action = jax.random.choice(key, jnp.array([0, 0, 0, 1, 2, 3, 3, 4, 4]), (64,))
            after = step(timestep, action)
            seen = pack_pairs(jnp.concatenate([inputs.view.reshape(64, -1, 2), inputs.pocket[:, None]], axis=1))
            out = to_try(tries), conditions(what_happened(inputs)[0]), seen, inputs.done, tries
            return (after, next_inputs(inputs, action, after), notes, tries), out
        start = timestep, first_inputs(timestep, 6, neighbors=True), no_notes(64), no_tries(64)
        return jax.lax.scan(one, start, jax.random.split(key, 200))[1]

    hint, held, seen, done, tries = jax.device_get(play(jax.random.key(0)))
    pack_all = lambda x: x[..., 0].astype(int) << 16 | x[..., 1].astype(int) << 12 | x[..., 2].astype(int) << 8 | x[..., 3].astype(int) << 4 | x[..., 4]
    def either(x):
        kind, a, b = x >> 16, x >> 8 & 255, x & 255
        other = np.where(kind == TileNearGoal.ID, kind, (kind - TileNearUpGoal.ID + 2) % 4 + TileNearUpGoal.ID)
        return np.where((kind >= TileNearGoal.ID) & (kind < AgentNearUpGoal.ID), np.minimum(x, other << 16 | b << 8 | a), x)
    asked, was = either(pack_all(hint.goal)), either(pack_all(held))
    told = 0
    for agent in range(64):
        before, here = set(), set()
        for t in range(200):
            here = (set() if done[t, agent] else here) | set(seen[t, agent].tolist())
            known = set(tries.thing[t, agent].tolist()) | {0}
            before |= {x for x in was[t, agent].tolist() if {x >> 8 & 255, x & 255} <= known}    # one new object is added per step
            if hint.goal_shown[t, agent]:
                told += 1
                x = hint.goal[t, agent].astype(int)
                assert asked[t, agent] not in before
                assert {x[1] << 4 | x[2]} | ({x[3] << 4 | x[4]} - {0}) <= here
    assert told > 4000 and tries.age[tries.wish > 0].max() == beliefs.PATIENCE + 1
    assert len({tuple(x) for x in hint.goal[hint.goal_shown]}) > 200



# The demonstration --------------------------------------------------------------------------------------------------------------------

def test_no_training_task_contains_a_held_out_object():
    held = demo.held_out_objects()
    training, test = demo.hold_tasks(demo.OBJECTS[~held], 5000), demo.hold_tasks(demo.OBJECTS[held], 1000)
    names = lambda b: {tuple(o) for o in np.asarray(b.init_tiles).reshape(-1, 2)}
    assert len(names(training)) == 48 and len(names(test)) == 12 and not names(training) & names(test)
    counts = np.unique(np.asarray(training.goals)[:, 1:3], axis=0, return_counts=True)[1]
    assert len(counts) == 48 and counts.min() > 60, "every object is wanted about equally often"
    with pytest.raises(ValueError, match="needs 4 different ones"):
        demo.hold_tasks(demo.OBJECTS[:2], 10)


def test_demo_resumes_what_was_interrupted_and_replaces_what_was_finished(tmp_path, monkeypatch):
    plan = demo.Plan(dataclasses.replace(TINY, out=str(tmp_path / "demo")), train_tasks=300, test_tasks=10)
    monkeypatch.setattr(demo, "demo_plan", lambda *_: plan)
    real, stop = demo.train, lambda row: signal.raise_signal(signal.SIGINT)
    monkeypatch.setattr(demo, "_report", lambda plan, training, unseen, begun: training)
    monkeypatch.setattr(demo, "train", lambda *args, **kwargs: real(*args, **kwargs, on_round=stop))
    with pytest.raises(KeyboardInterrupt):
        demo.run_demo(tmp_path / "demo", fast=True, progress=False)
    monkeypatch.setattr(demo, "train", real)
    assert demo._make_way(plan.config), "unfinished: go on"
    training = demo.run_demo(tmp_path / "demo", fast=True, progress=False)
    assert training.agent.steps == plan.config.rounds * plan.config.steps_per_round and len(training.metrics) == plan.config.rounds
    (tmp_path / "demo" / "mine.txt").write_text("not the demo's")
    assert not demo._make_way(plan.config), "finished: begin anew"
    assert sorted(p.name for p in (tmp_path / "demo").iterdir()) == ["mine.txt"]


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory):
    "The results of `make demo` after half of its training, and where they are."
    out = tmp_path_factory.mktemp("runs") / "demo"
    return demo.run_demo(out, steps=1_250_000, progress=False), out


@pytest.mark.slow
@pytest.mark.optimized
def test_the_demonstration_adapts(demonstration):
    results, _ = demonstration
    curve = results["per_trial"]["RL² agent"]
    assert results["adapted"], results["sentence"]
    assert curve["success"][-1] >= curve["success"][0] + 0.15 and curve["steps"][-1] <= 0.7 * curve["steps"][0]
    assert curve["success_lo"][-1] > curve["success_hi"][0] and curve["steps_hi"][-1] < curve["steps_lo"][0]
    assert max(results["per_trial"]["random"]["success"]) < 0.25


@pytest.mark.slow
@pytest.mark.optimized
def test_without_memory_there_is_no_adaptation(demonstration):
    "The same agent, its memory wiped after every trial: the later trials are like the first."
    plan, agent, held = demo.demo_plan(demonstration[1]), load_agent(demonstration[1]), demo.held_out_objects()
    test, world = demo.hold_tasks(demo.OBJECTS[held], 500, seed=1), make_world(plan.config)
    wiped = evaluate(agent, test, world=world, wipe_each_trial=True).success.mean(0)
    whole = evaluate(agent, test, world=world).success.mean(0)
    assert whole[-3:].mean() > whole[0] + 0.1 and abs(wiped[-3:].mean() - wiped[:3].mean()) < 0.06
