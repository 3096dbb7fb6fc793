"""`xland_minigrid.compat` against xminigrid 0.9.3, byte by byte: its own states go in, and what comes out is compared as it is. No test here translates a number."""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xland_minigrid.compat as ours
from xland_minigrid.benchmarks import generate_benchmark
from xland_minigrid.compat import benchmarks, types
from xland_minigrid.compat.rendering import text_render

xminigrid = pytest.importorskip("xminigrid", reason="pip install xminigrid==0.9.3")
from xminigrid.benchmarks import Benchmark as TheirBenchmark
from xminigrid.rendering import text_render as their_text_render

pytestmark = pytest.mark.newest

FAST = ("XLand-MiniGrid-R4-9x9", "MiniGrid-DoorKey-5x5", "MiniGrid-MemoryS8")
WORLDS, STEPS = 64, 60


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.safetensors"
    generate_benchmark("medium", WORLDS).save(path)
    return benchmarks.load_benchmark_from_path(path)


def given(state):
    "A state of 0.9.3 as a program would build it with the classes of `compat`."
    agent = types.AgentState(position=state.agent.position, direction=state.agent.direction, pocket=state.agent.pocket)
    return types.State(key=state.key, step_num=state.step_num, grid=state.grid, agent=agent, goal_encoding=state.goal_encoding, rule_encoding=state.rule_encoding, carry=state.carry)


def facts(timestep):
    state = timestep.state
    return dict(grid=state.grid, observation=timestep.observation, pocket=state.agent.pocket, position=state.agent.position, direction=state.agent.direction,
                goal=state.goal_encoding, rules=state.rule_encoding, step_num=state.step_num, step_type=timestep.step_type, discount=timestep.discount)


def play_both(name, tasks):
    "Where the two differ, bool by name; the last time step of 0.9.3; how often a pocket was full and a goal was reached."
    env, params = ours.make(name)
    their_env, their_params = xminigrid.make(name)
    axes = their_axes = None
    if name.startswith("XLand"):
        arrays = {field: getattr(tasks, field) for field in ("goals", "rules", "init_tiles", "num_rules")}
        params = params.replace(ruleset=jax.vmap(tasks.get_ruleset)(jnp.arange(WORLDS)))
        their_params = their_params.replace(ruleset=jax.vmap(TheirBenchmark(**arrays).get_ruleset)(jnp.arange(WORLDS)))
        axes = their_axes = 0
    step, their_step = jax.vmap(env.step, (axes, 0, 0)), jax.vmap(their_env.step, (their_axes, 0, 0))

    def both(theirs, action):
        begun = types.TimeStep(state=given(theirs.state), step_type=theirs.step_type, reward=theirs.reward, discount=theirs.discount, observation=theirs.observation)
        mine, theirs = step(params, begun, action), their_step(their_params, theirs, action)
        differ = jax.tree.map(lambda a, b: (a != b).any(), facts(mine), facts(theirs))
        return theirs, (differ, (theirs.state.agent.pocket[:, 0] > 0).sum(), (theirs.reward > 0).sum())

    first = jax.jit(jax.vmap(their_env.reset, (their_axes, 0)))(their_params, jax.random.split(jax.random.PRNGKey(0), WORLDS))
    actions = jax.random.choice(jax.random.key(1), jnp.array([0, 0, 0, 1, 2, 3, 4, 5]), (STEPS, WORLDS))
    last, (differ, carried, reached) = jax.jit(lambda start: jax.lax.scan(both, start, actions))(first)
    return {field: bool(bad.any()) for field, bad in differ.items()}, last, int(carried.sum()), int(reached.sum())


def check(names, tasks):
    carried = reached = 0
    for name in names:
        differ, last, full, won = play_both(name, tasks)
        assert not any(differ.values()), (name, differ)
        theirs, mine = jax.tree.map(lambda x: x[0], last.state), jax.tree.map(lambda x: x[0], given(last.state))
        assert text_render.render(mine.grid, mine.agent) == their_text_render.render(theirs.grid, theirs.agent), name
        carried, reached = carried + full, reached + won
    assert carried > 20 * len(names) and reached > 5, "too little happened to compare anything"


def test_steps_like_xminigrid_to_the_byte(tasks):
    check(FAST, tasks)


@pytest.mark.slow
def test_other_environments_step_like_xminigrid_to_the_byte(tasks):
    "Every sixth: the steps of all are compared in test_parity.py and test_minigrid.py, and `compat` changes only the numbers."
    assert set(ours.registered_environments()) == set(xminigrid.registered_environments())
    check([name for name in xminigrid.registered_environments() if name not in FAST][::6], tasks)


def test_rulesets_print_alike(tasks, capsys):
    for number in range(0, WORLDS, 4):
        task = tasks.get_ruleset(number)
        text_render.print_ruleset(task)
        mine = capsys.readouterr().out
        their_text_render.print_ruleset(task)
        assert mine == capsys.readouterr().out


def test_trials_begin_in_its_numbers(tasks):
    "Where trials begin is compared in test_parity.py; here, that what is seen is in the numbers of 0.9.3."
    env, params = ours.make("XLand-MiniGrid-R9-16x16", ruleset=tasks.get_ruleset(0))
    timestep = jax.jit(jax.vmap(env.reset, (None, 0)))(params, jax.random.split(jax.random.key(0), 100))
    grid, placed = np.asarray(timestep.state.grid), np.asarray(tasks.get_ruleset(0).init_tiles)
    assert set(np.unique(grid[..., 0])) == {1, 2, 9, *placed[placed[:, 0] > 0][:, 0]} and grid[..., 1].max() < 12
    assert np.asarray(timestep.observation)[..., 0].max() < 13 and (np.asarray(timestep.state.agent.pocket) == 0).all()
