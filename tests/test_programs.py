"""Programs written for xminigrid, class by class: each test uses the interface as such programs do."""
import chex
import flax
import jax
import jax.numpy as jnp
import pytest

from xland_minigrid.core.constants import TILES_REGISTRY, Colors, Tiles
from xland_minigrid.core.grid import room
from xland_minigrid.environment import EnvParams
from xland_minigrid.registration import make
from xland_minigrid.types import AgentState, EnvCarry, State, StepType, TimeStep


class GoalParams(EnvParams, flax.struct.PyTreeNode):
    "Parameters of a program's own, which derive from Flax's base as well."
    bonus: jax.Array = flax.struct.field(default=0.5)


class OwnParams(flax.struct.PyTreeNode):
    "Parameters that derive from Flax's base alone, with the fields that 0.9.3 has."
    height: int = flax.struct.field(pytree_node=False, default=9)
    width: int = flax.struct.field(pytree_node=False, default=9)
    view_size: int = flax.struct.field(pytree_node=False, default=5)
    max_steps: int = flax.struct.field(pytree_node=False, default=30)


@pytest.fixture(scope="module")
def world():
    return make("XLand-MiniGrid-R1-9x9")


@pytest.fixture
def begun(world):
    "A time step built by hand, from Python numbers."
    _, params = world
    agent = AgentState(position=jnp.array((1, 1)), direction=jnp.asarray(1), pocket=TILES_REGISTRY[Tiles.EMPTY, Colors.EMPTY])
    state = State(key=jax.random.PRNGKey(0), step_num=jnp.asarray(0), grid=room(9, 9), agent=agent, goal_encoding=params.ruleset.goal,
                  rule_encoding=params.ruleset.rules, carry=EnvCarry())
    return TimeStep(state=state, step_type=StepType.FIRST, reward=jnp.asarray(0.0), discount=jnp.asarray(1.0), observation=jnp.zeros((5, 5, 2), jnp.uint8))


def test_parameters_that_also_derive_from_flax():
    params = GoalParams(bonus=jnp.float32(2.0)).replace(height=11)
    assert (params.height, params.view_size) == (11, 7) and isinstance(params, EnvParams)
    assert jax.tree.leaves(jax.tree.map(lambda x: x + 1, params)) == [3.0]


def test_a_state_built_from_python_numbers_compiles_one_step(world, begun):
    "Also with parameters of a program's own class, which know nothing of `see_through_walls`."
    env, _ = world
    step = jax.jit(chex.assert_max_traces(env.step, 1))
    for action in (0, 1, 0):
        begun = step(OwnParams(), begun, action)
    assert begun.state.agent.position.tolist() == [2, 2] and begun.observation.shape == (5, 5, 2)


def test_rulesets_whose_leaves_are_no_arrays_have_a_repr(world):
    _, params = world
    assert repr(jax.tree.map(jnp.shape, params.ruleset)) == "RuleSet(goal=(5,), rules=(1, 7), init_tiles=(1, 2))"
    assert repr(jax.tree.map(lambda x: 0, params.ruleset)) == "RuleSet(goal=0, rules=0, init_tiles=0)"
