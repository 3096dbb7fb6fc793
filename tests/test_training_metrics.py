"""What training says about itself: tasks counted in NumPy, an update's figures, time limits, what curricula hear."""
import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from xland_minigrid.baselines import belief, demo, ppo, rl2
from xland_minigrid.baselines.curriculum import CurriculumConfig, Uniform
from xland_minigrid.baselines.device import Device, config_for
from xland_minigrid.baselines.evaluation import evaluate
from xland_minigrid.baselines.networks import NetworkConfig
from xland_minigrid.baselines.ppo import PPOConfig
from xland_minigrid.baselines.rl2 import TrainConfig, make_world
from xland_minigrid.benchmarks import generate_benchmark, load_benchmark, steps_to_go, task_plan
from xland_minigrid.core.goals import TileNearGoal

pytestmark = pytest.mark.newest

CPU, GPU = Device("cpu", "cpu", 8, "float32"), Device("gpu", "NVIDIA L4", 16.5, "bfloat16")
SMALL = NetworkConfig(embedding=4, encoder_width=16, event=4, memory=16, head=16)
FIXED = TrainConfig(  # whose policy stays what it is
    size=5, max_steps=12, num_envs=256, steps_per_task=40, steps_per_update=20, total_steps=256 * 40, devices=1,
    ppo=PPOConfig(num_minibatches=4, update_epochs=1, lr=1e-12), network=SMALL)


@pytest.fixture(scope="module")
def tasks():
    return generate_benchmark("trivial", n=400)


def played(config, tasks):
    "The `Transition (steps_per_task, B)` of a first round whose policy does not change, and who is shown the goal."
    env, params = make_world(config)
    agent = rl2.new_agent(config)

    @jax.jit
    def run(parameters):
        number, network = jnp.arange(config.num_envs), nnx.merge(agent.structure, parameters)
        _, draw, begin = jax.random.split(rl2.start_run(config).key, 3)
        rows = rl2.uniform_tasks(len(tasks), jax.vmap(jax.random.fold_in, (None, 0))(draw, number))
        rollout, step = rl2.enter(config, env, params, network, jax.vmap(tasks.get_ruleset)(rows), number, begin)
        batches = []
        for _ in range(config.steps_per_task // config.steps_per_update):
            rollout, batch = ppo.collect(network, step, rollout, config.steps_per_update)
            rollout = rollout.replace(key=jax.random.split(rollout.key)[0])
            batches.append(batch.replace(inputs=None))
        shown = None if rollout.told is None else rollout.told.goal_shown
        return jax.tree.map(lambda *x: jnp.concatenate(x), *batches), shown
    return jax.tree.map(np.asarray, run(agent.parameters))


def counted(batch, count: int):
    "Success (B, count) in the first trials of each task; their reward and steps (B,), and trials ended (B,)."
    steps, agents = batch.done.shape
    success, ended = np.zeros((agents, count)), np.zeros(agents, int)
    reward, length = np.zeros(agents), np.zeros(agents)
    for b in range(agents):
        for t in range(steps):
            if ended[b] < count:
                success[b, ended[b]] += batch.success[t, b]
                reward[b], length[b] = reward[b] + batch.reward[t, b], length[b] + 1
            ended[b] += batch.done[t, b]
    return success, reward, length, ended


@pytest.mark.parametrize("changes, count", [
    ({}, 3),
    (dict(steps_per_task=8, steps_per_update=4, total_steps=256 * 8), 1),  # no time for a whole trial
    (dict(show_goal=0.5, network=dataclasses.replace(SMALL, neighbors=True, goal_conditioned_core=8)), 3)])
def test_the_log_is_a_count_of_tasks(tasks, changes, count):
    config = dataclasses.replace(FIXED, **changes)
    row = rl2.metrics_row(rl2.make_round(config)(rl2.start_run(config), tasks)[1])
    batch, shown = played(config, tasks)
    success, reward, length, ended = counted(batch, count)
    told_nothing = np.ones(len(success), bool) if shown is None else ~shown
    mine = success[told_nothing]
    expected = {
        "tasks": len(mine), "trials": ended[told_nothing].sum(), "unfinished": (ended[told_nothing] < count).mean(),
        "success": mine.mean(), "success_first": mine[:, 0].mean(), "success_last": mine[:, -1].mean(),
        "return": reward[told_nothing].mean() / count, "trial_steps": length[told_nothing].mean() / count,
        **{f"success_trial/{k + 1}": mine[:, k].mean() for k in range(count)}}
    kinds = batch.goal[0, :, 0]
    for kind in np.unique(kinds[told_nothing]):
        name, here = rl2.goal_kinds.classes[kind].__name__, success[told_nothing & (kinds == kind)]
        expected |= {f"success_first/{name}": here[:, 0].mean(), f"success_last/{name}": here[:, -1].mean()}
    if shown is not None:
        assert 0.3 < shown.mean() < 0.7
        expected["success_shown"] = success[shown].mean()
    assert {name for name in row if "success" in name or name in expected} == expected.keys()
    for name, x in expected.items():
        assert np.isclose(row[name], x, atol=1e-6), (name, row[name], x)
    assert (row["unfinished"] > 0.5) == (count == 1), "only a task without time for one trial"


def test_the_log_agrees_with_an_evaluation():
    "Of the same agent, on other draws of the same tasks, within the error of sampling."
    config = dataclasses.replace(FIXED, num_envs=1024, steps_per_task=120, steps_per_update=60, total_steps=1024 * 120)
    tasks = demo.hold_tasks(demo.OBJECTS, 400)
    row = rl2.metrics_row(rl2.make_round(config)(rl2.start_run(config), tasks)[1])
    found = evaluate(rl2.new_agent(config), tasks, num_trials=10, num_tasks=1024, world=make_world(config))
    for k in (1, 2, 3, 5, 10):
        mean = found.success[:, k - 1].mean()
        assert abs(row[f"success_trial/{k}"] - mean) < 4 * np.sqrt(2 * mean * (1 - mean) / 1024), k
    assert abs(row["success"] - found.success.mean()) < 0.03 and abs(row["trial_steps"] - found.steps.mean()) < 0.4


def test_figures_of_an_update():
    "Approximate KL, clip fraction and the gradient's norms of a gradient step, on a batch of another policy."
    random, (t, b) = np.random.default_rng(1), (6, 8)
    noise = lambda scale=1.0: (scale * random.normal(size=(t, b))).astype(np.float32)
    env, params = make_world(FIXED)
    inputs = rl2.first_inputs(jax.vmap(env.reset, (None, 0))(params, jax.random.split(jax.random.key(0), t * b)), 6)
    inputs = jax.tree.map(lambda x: x.reshape(t, b, *x.shape[1:]), inputs)
    agent, config = rl2.new_agent(FIXED), PPOConfig(num_minibatches=1, update_epochs=1, normalise=False)
    batch = ppo.Transition(
        inputs=inputs, action=random.integers(0, 6, (t, b)), log_prob=noise(0.3) - 1.8, value=noise(), reward=noise(),
        done=inputs.done, success=inputs.done, goal=random.integers(0, 15, (t, b, 5)).astype(np.uint8))
    batch, advantage, optimizer = jax.tree.map(jnp.asarray, batch), jnp.asarray(noise()), optax.sgd(1.0)
    rollout = ppo.RolloutState(None, inputs, agent.network().start(b), jax.random.key(0))
    given = rollout, batch, advantage, jax.random.key(1)
    learn = jax.jit(lambda p: ppo.run_epochs(agent.structure, config, optimizer, (p, optimizer.init(p)), *given))
    (after, _), found = learn(agent.parameters)
    logits = np.asarray(agent.network()(inputs, rollout.memory).logits, np.float64)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    log_prob = np.take_along_axis(logits, np.asarray(batch.action)[..., None], -1)[..., 0]
    ratio = np.exp(log_prob - batch.log_prob)
    assert np.isclose(found["approx_kl"], (ratio - 1 - np.log(ratio)).mean(), rtol=1e-4)
    assert found["clip_fraction"] == (np.abs(ratio - 1) > 0.2).mean() and 0.1 < found["clip_fraction"] < 0.9
    change = jax.tree.map(lambda x, y: np.asarray(x - y, np.float64), agent.parameters, after)
    gradient = {name: jax.tree.leaves(change[name]) for name in change}
    norm = lambda *names: np.sqrt(sum((x**2).sum() for name in names for x in gradient[name]))
    parts = {"policy": ["actor"], "value": ["critic"], "belief": ["belief"], "memory": ["core"],
             "encoder": ["encoder", "event", "attention", "shared"]}
    assert sorted(sum(parts.values(), [])) == sorted(gradient)
    for part, names in {"": list(gradient), **{f"_{part}": names for part, names in parts.items()}}.items():
        assert found[f"grad_norm{part}"] > 0 and np.isclose(found[f"grad_norm{part}"], norm(*names), rtol=1e-3), part


def test_explained_variance():
    random = np.random.default_rng(0)
    target, value = random.normal(size=(5, 4)) + 3, random.normal(size=(5, 4))
    share = jax.jit(ppo.explained_variance)
    assert np.isclose(share(value, target), 1 - (target - value).var() / target.var(), atol=1e-5)
    assert np.isclose(share(target + 7, target), 1) and share(value, np.ones((5, 4))) == 0


# Time limits ----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module", params=[False, True], ids=["separate episodes", "across trials"])
def one_update(request):
    "An update in a room where most episodes run out of time: its config, its record, and its steps once more."
    config = rl2.preset("laptop", "MiniGrid-EmptyRandom-5x5", num_envs=32, steps_per_task=30, steps_per_update=30,
                        total_steps=32 * 30, devices=1, max_steps=7, view_size=5)
    settings = dataclasses.replace(config.ppo, across_trials=request.param, num_minibatches=1)
    config = dataclasses.replace(config, ppo=settings)
    (env, params), agent, optimizer = make_world(config), rl2.new_agent(config), optax.sgd(0.1)

    @jax.jit
    def run(parameters):
        network = nnx.merge(agent.structure, parameters)
        rollout, step = rl2.enter(config, env, params, network, None, jnp.arange(32), jax.random.key(3))
        learned = parameters, optimizer.init(parameters)
        record = ppo.update(agent.structure, config.ppo, optimizer, step, 30, learned, rollout)[-1]
        later, batch = ppo.collect(network, step, rollout, 30, config.ppo.across_trials)
        again = jax.lax.scan(lambda now, action: (step(now, action),) * 2, rollout.timestep, batch.action)[1]
        remember = lambda memory, inputs: (ppo.policy_step(network, inputs, memory).memory,) * 2
        memories = jax.lax.scan(remember, rollout.memory, batch.inputs)[1]
        return record, batch, again, memories, ppo.policy_step(network, later.inputs, later.memory).value
    return config, agent, *run(agent.parameters)


def test_a_time_limit_is_not_an_end(one_update):
    """The advantages of an update are those of a plain loop.

    After a time limit the critic's value of the last observation stands for what was cut off, unless rewards flow on.
    """
    config, agent, record, batch, again, memories, last_value = one_update
    cut = np.asarray(again.last() & (again.discount == 1))
    assert cut.sum() > 40 and np.asarray(batch.success).sum() > 3
    value, reward, done = (np.asarray(x, np.float64) for x in (batch.value, batch.reward, batch.done))
    turned = np.asarray(batch.inputs.direction) + np.array([0, 1, -1, 0, 0, 0])[np.asarray(batch.action)]
    seen = batch.inputs.replace(
        view=again.final_observation, direction=jnp.asarray(turned % 4), action=batch.action, reward=batch.reward,
        done=jnp.zeros_like(batch.done), front=batch.inputs.view[..., 3, 2, :])
    cut_off = np.asarray(jax.jit(jax.vmap(lambda x, m: ppo.policy_step(agent.network(), x, m).value))(seen, memories))
    gamma, across = config.ppo.gamma, config.ppo.across_trials
    expected, later, decay = np.zeros((30, 32)), np.zeros(32), gamma * config.ppo.gae_lambda
    for t in reversed(range(30)):
        following = np.asarray(last_value) if t == 29 else value[t + 1]
        onward = following if across else np.where(cut[t], cut_off[t], np.where(done[t] == 1, 0, following))
        later = reward[t] + gamma * onward - value[t] + decay * later * (1 if across else 1 - done[t])
        expected[t] = later
    np.testing.assert_allclose(record.positive_value_loss, np.maximum(expected, 0).mean(0), atol=1e-5)
    if across:
        assert batch.cut_off_value is None
    else:
        np.testing.assert_allclose(batch.cut_off_value, np.where(cut, cut_off, 0), atol=1e-5)
        assert np.abs(cut_off[cut]).mean() > 0.01, "values of zero would show nothing"


# Shaping --------------------------------------------------------------------------------------------------------------

PAID = dataclasses.replace(FIXED, ppo=dataclasses.replace(FIXED.ppo, shaping_coef=5.0))


def test_shaping_adds_up_to_a_constant_whatever_the_agent_does(tasks):
    "Random actions through many ends of trials; the potential against its definition, and progress step by step."
    (env, params), (steps, agents) = make_world(PAID), (40, 256)
    actions = np.random.default_rng(0).integers(0, 6, (steps, agents))
    progress = dataclasses.replace(PAID, ppo=dataclasses.replace(PAID.ppo, shaping="progress"))

    @jax.jit
    def walk(rulesets):
        timestep, step = rl2.begin(env, params, rulesets, jax.random.split(jax.random.key(0), agents))
        experts = [rl2.expert_of(config, params, rulesets) for config in (PAID, progress)]
        to_go = lambda state: jax.vmap(steps_to_go)(state.replace(key=None), jax.vmap(task_plan)(rulesets))
        seen = lambda x: (x.state.step_num, to_go(x.state), *[expert(x.state)["potential"] for expert in experts])

        def go(timestep, action):
            after = step(timestep, action)
            return after, (seen(timestep), after.last(), (after.discount == 0) & (after.reward > 0))
        last, (path, done, success) = jax.lax.scan(go, timestep, actions)
        return jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), path, seen(last)), done, success
    (at, to_go, had, away), done, success = jax.tree.map(np.asarray, walk(tasks.get_rulesets(np.arange(agents))))
    assert done.sum() > 3 * agents * 0.8 and success.sum() > 100 and (done & ~success).sum() > 100
    assert np.isinf(to_go).any(), "states from which nothing leads to the goal"
    limit = params.max_steps
    np.testing.assert_allclose(had, np.where(at + to_go <= limit, 1 - 0.9 * np.minimum(at + to_go, limit) / limit, 0), atol=1e-6)
    np.testing.assert_allclose(away, -np.minimum(to_go, limit), atol=1e-5)
    discounts = 0.97 ** np.arange(steps + 1)
    paid = np.asarray(ppo.shaping_reward("potential", had, done, success, 0.97), np.float64)
    np.testing.assert_allclose(discounts[:-1] @ paid, discounts[-1] * had[-1] - had[0], atol=1e-5)
    paid = np.asarray(ppo.shaping_reward("progress", away, done, success, 0.97))
    np.testing.assert_allclose(paid[~done], (away[1:] - away[:-1])[~done], atol=1e-5)
    np.testing.assert_allclose(paid[success], -away[:-1][success], atol=1e-5)
    assert (paid[done & ~success] == 0).all() and (paid[success] >= 1).all()


def test_shaping_reaches_the_learner_alone(tasks):
    "Agents perceive and do the same and every metric of tasks stays; only what the critic has to explain differs."
    rows = [rl2.metrics_row(rl2.make_round(config)(rl2.start_run(config), tasks)[1]) for config in (FIXED, PAID)]
    differ = {name for name in rows[0] if rows[0][name] != rows[1][name]}
    assert {"critic_loss", "explained_variance"} <= differ
    assert not [name for name in differ if name.startswith(("success", "return", "tr", "tasks", "unfinished"))]
    assert {"belief_nats", "entropy"}.isdisjoint(differ)


def test_agents_that_see_their_goal_imitate_the_expert_ever_less(tasks):
    "The loss of a round against what the expert says about its states, at the start and when training is over; without a goal in sight there is nothing to imitate."
    network = dataclasses.replace(SMALL, neighbors=True, goal_conditioned_core=8)
    config = dataclasses.replace(FIXED, show_goal=0.5, network=network, ppo=dataclasses.replace(FIXED.ppo, imitation_coef=0.3, num_minibatches=1))
    start, one_round = rl2.start_run(config), rl2.make_round(config)
    row = rl2.metrics_row(one_round(start, tasks)[1])
    over = rl2.metrics_row(one_round(rl2.start_run(config).replace(round=jnp.int32(config.rounds)), tasks)[1])
    assert 0.35 < row["imitation_loss"] / np.log(6) < 0.65 and over["imitation_loss"] == 0    # half of the agents; an untrained one knows nothing
    with pytest.raises(ValueError, match="show_goal above 0, or ppo.imitation_coef to 0"):
        dataclasses.replace(config, show_goal=0.0)


@pytest.mark.filterwarnings("ignore:A trial takes")
def test_who_learns_to_take_notes_keeps_all_else():
    "Only the head for events changes, its loss falls within a round, and it has nothing to say about composed goals."
    network = dataclasses.replace(SMALL, neighbors=True, goal_conditioned_core=8)
    noting = dataclasses.replace(FIXED, network=dataclasses.replace(network, events=8), ppo=dataclasses.replace(FIXED.ppo, lr=1e-2))
    small, start = generate_benchmark("small", n=400), rl2.new_agent(dataclasses.replace(FIXED, network=network, seed=5)).parameters
    state = rl2.start_run(noting)
    before = jax.tree.map(np.array, rl2.with_weights(state.parameters, start))
    state, one_round = state.replace(parameters=jax.tree.map(jnp.array, before)), rl2.make_round(noting)
    rows = []
    for _ in range(2):
        state, metrics = one_round(state, small)
        rows.append(rl2.metrics_row(metrics))
    changed = {name for name in before if any((np.asarray(x) != y).any() for x, y in zip(jax.tree.leaves(state.parameters[name]), jax.tree.leaves(before[name]), strict=True))}
    assert changed == {"events"} and all((np.asarray(x) == y).all() for name in start for x, y in zip(jax.tree.leaves(start[name]), jax.tree.leaves(before[name]), strict=True))
    assert rows[1]["belief_nats"] < rows[0]["belief_nats"] < np.log(belief.SLOTS * belief.CONDITIONS + 1)
    with pytest.raises(ValueError, match="events to 0"):
        rl2.train(noting, small.replace(extended=small), progress=False)
    with pytest.raises(ValueError, match="goal_conditioned_core above 0"):
        dataclasses.replace(SMALL, events=8)


@pytest.mark.filterwarnings("ignore:A trial takes")
def test_shaping_needs_plans(tasks):
    with pytest.raises(ValueError, match="shaping_coef to 0"):
        dataclasses.replace(rl2.preset("laptop", "MiniGrid-DoorKey-5x5"), ppo=PAID.ppo)
    with pytest.raises(ValueError, match="across_trials"):
        dataclasses.replace(PAID, ppo=dataclasses.replace(PAID.ppo, across_trials=False))
    composed = tasks.replace(extended=tasks)
    with pytest.raises(ValueError, match="omposed goals.*shaping_coef, ppo.imitation_coef and network.events to 0"):
        rl2.train(PAID, composed, progress=False)


@pytest.mark.slow
@pytest.mark.optimized
def test_two_minutes_teach_an_agent_to_bring_two_objects_together(tmp_path):
    "On goals it never trained on, and far more often than chance does."
    benchmark = load_benchmark("trivial-21k")
    pairs = benchmark.take(np.flatnonzero(np.asarray(benchmark.goals)[:, 0] == TileNearGoal.ID))
    training, unseen = pairs.split(0.8, by="random")
    network = NetworkConfig(event=16, encoder_width=64, memory=96, head=64, neighbors=True, goal_conditioned_core=64, chrono_horizon=200)
    config = rl2.finding_out(size=6, max_steps=25, rooms=(), steps_per_task=250, steps_per_update=125, total_steps=2_400_000, devices=1, out=str(tmp_path / "run"),
                             loggers=("jsonl",), network=network)
    config = dataclasses.replace(config, ppo=dataclasses.replace(config.ppo, lr=2e-3, gamma=0.95, gae_lambda=0.8))
    agent = rl2.train(config, training, progress=False).agent
    found = evaluate(agent, unseen, num_trials=10, num_tasks=256, anchors=("random",))
    success, chance = found.success.mean(0), found.anchor("random").success.mean()
    assert chance < 0.12 and success[-1] > chance + 0.25 and success[-1] > success[0] + 0.05, (chance, success)


# Settings -------------------------------------------------------------------------------------------------------------

def test_settings_that_cannot_show_adaptation_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in rl2.PRESETS:
            config = rl2.preset(name)
            rl2.warn_if_short(config)
            assert config.steps_per_task // make_world(config)[1].max_steps >= 5
        long = dataclasses.replace(FIXED, steps_per_task=60, total_steps=60 * 256)
        single = rl2.preset("laptop", "MiniGrid-DoorKey-5x5")
        for config in (demo.demo_plan().config, demo.demo_plan(fast=True).config, single, long,
                       config_for(CPU), config_for(GPU), config_for(CPU, True)):
            rl2.warn_if_short(config)
    says = r"up to 12 steps and a task 40, .*: raise steps_per_task to at least 60, or lower max_steps\.$"
    with pytest.warns(UserWarning, match=says):
        rl2.warn_if_short(FIXED)


# Curricula ------------------------------------------------------------------------------------------------------------

@dataclasses.dataclass(frozen=True)
class Listener(Uniform):
    "A curriculum whose state is the last outcome that it heard of."
    config: CurriculumConfig = CurriculumConfig(kind="sfl", buffer=8, candidates=64, period=1, trials=2)

    def start(self, num_tasks):
        return None

    def draw(self, state, keys):
        return state, rl2.uniform_tasks(400, keys)

    def propose(self, state, keys):
        return rl2.uniform_tasks(400, keys)

    def record(self, state, tasks, outcome):
        return outcome

    refresh = record


def test_curricula_hear_of_agents_that_were_told_nothing_in_the_worlds_of_training(tasks, monkeypatch):
    config = dataclasses.replace(FIXED, size=None, num_envs=64, total_steps=64 * 40 * 10, show_goal=0.5, rooms=(5,),
                                 network=dataclasses.replace(SMALL, neighbors=True, goal_conditioned_core=8))
    entered, enter = [], rl2.enter

    def listen(config, env, params, *rest):
        entered.append((config.show_goal, params.layout))
        return enter(config, env, params, *rest)

    monkeypatch.setattr(rl2, "enter", listen)
    rl2._compiled.cache_clear()
    (state, metrics), refreshed = (rl2.make_round(config, Listener())(rl2.start_run(config), tasks),
                                   rl2.make_refresh(config, Listener())(rl2.start_run(config), tasks))
    shown = 64 - int(metrics["tasks"].sum())
    trials = np.asarray(state.curriculum.trials)
    assert 16 < shown < 48 and (trials == 0).sum() == shown == np.isnan(state.curriculum.success).sum()
    assert (np.asarray(refreshed.curriculum.trials) >= 2).all()
    (share, layout), (none, same) = entered
    assert share == 0.5 and none == 0.0 and layout is not None
    assert jax.tree.structure(layout) == jax.tree.structure(same)
    rl2._compiled.cache_clear()
