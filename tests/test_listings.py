"""Code that people already have must run: the paper's listings, and an environment written for xminigrid, with the import lines changed.

Corrected in the listings are their own slips only: in Listing 3 `jax.tree_utils` does not exist and `jnp` is never imported, and `action=0` is
written where a key that was never made would be needed. Each listing runs as a script would, in a namespace of its own.
"""
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xland_minigrid.benchmarks import generate_benchmark, registry

LISTING_1 = """
import jax
import xland_minigrid as xminigrid

reset_key = jax.random.key(0)
# to list available environments:
xminigrid.registered_environments()

# create env instance
env, env_params = xminigrid.make("XLand-MiniGrid-R9-25x25")
# change some default params
env_params = env_params.replace(max_steps=100)

# fully jit-compatible step and reset methods
timestep = jax.jit(env.reset)(env_params, reset_key)
timestep = jax.jit(env.step)(env_params, timestep, action=0)

# optionally render the state
image = env.render(env_params, timestep)
"""

LISTING_2 = """
import jax.random
import xland_minigrid as xminigrid
from xland_minigrid.benchmarks import Benchmark

benchmark: Benchmark = xminigrid.load_benchmark(name="trivial-1m")
# reusing cached on the second use
benchmark: Benchmark = xminigrid.load_benchmark(name="trivial-1m")

# users can sample or get specific rulesets
benchmark.sample_ruleset(jax.random.PRNGKey(0))
benchmark.get_ruleset(ruleset_id=benchmark.num_rulesets() - 1)

# or split them for train & test
train, test = benchmark.shuffle(key=jax.random.PRNGKey(0)).split(prop=0.8)

# usage with the environment
key = jax.random.PRNGKey(0)
reset_key, ruleset_key = jax.random.split(key)

benchmark = xminigrid.load_benchmark(name="trivial-1m")
# choosing a ruleset, see section on rules and goals
ruleset = benchmark.sample_ruleset(ruleset_key)

# to list available environments: xminigrid.registered_environments()
env, env_params = xminigrid.make("XLand-MiniGrid-R9-25x25")
env_params = env_params.replace(ruleset=ruleset)

# fully jit-compatible step and reset methods
timestep = jax.jit(env.reset)(env_params, reset_key)
timestep = jax.jit(env.step)(env_params, timestep, action=0)

# optionally render the state
image = env.render(env_params, timestep)
"""

LISTING_3 = """
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import xland_minigrid as xminigrid
from xland_minigrid.wrappers import GymAutoResetWrapper

# alternatively, users can provide step_fn and reset_fn instead
# of closure, but this way is simpler to use after creation
def build_rollout(env, env_params, num_steps):
    def rollout(rng):
        def _step_fn(carry, _):
            rng, timestep = carry
            rng, _rng = jax.random.split(rng)
            action = jax.random.randint(
                _rng,
                shape=(),
                minval=0,
                maxval=env.num_actions(env_params)
            )
            timestep = env.step(env_params, timestep, action)
            return (rng, timestep), timestep

        rng, _rng = jax.random.split(rng)

        timestep = env.reset(env_params, _rng)
        rng, transitions = jax.lax.scan(
            _step_fn, (rng, timestep), None, length=num_steps
        )
        return transitions

    return rollout

env, env_params = xminigrid.make("MiniGrid-EmptyRandom-8x8")
# do not forget to use auto reset wrapper!
env = GymAutoResetWrapper(env)

# jiting the entire rollout
rollout_fn = jax.jit(build_rollout(env, env_params, num_steps=1000))

# first execution will compile
transitions = rollout_fn(jax.random.PRNGKey(0))

print("Transitions shapes: \\n", jtu.tree_map(jnp.shape, transitions))
"""

ENVIRONMENT = '''
from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from xland_minigrid.core.constants import NUM_ACTIONS, TILES_REGISTRY, Colors, Tiles
from xland_minigrid.core.goals import AgentHoldGoal
from xland_minigrid.core.grid import (
    cartesian_product_1d, check_walkable, coordinates_mask, equal, horizontal_line, room, sample_coordinates, sample_direction, vertical_line,
)
from xland_minigrid.core.rules import EmptyRule
from xland_minigrid.environment import Environment, EnvParams, EnvParamsT
from xland_minigrid.registration import make, register
from xland_minigrid.types import AgentState, EnvCarry, EnvCarryT, GridState, IntOrArray, State, TimeStep
from xland_minigrid.wrappers import GymAutoResetWrapper, Wrapper

_goal_encoding = AgentHoldGoal(tile=TILES_REGISTRY[Tiles.BALL, Colors.RED]).encode()
_rule_encoding = EmptyRule().encode()[None, ...]
_door_colors = jnp.array((Colors.RED, Colors.GREEN), dtype=jnp.uint8)
_doors = cartesian_product_1d(jnp.array((Tiles.DOOR_CLOSED,), dtype=jnp.uint8), _door_colors)

class FetchParams(EnvParams):
    num_squares: int = struct.field(pytree_node=False, default=3)
    prize: jax.Array = struct.field(pytree_node=True, default_factory=lambda: jnp.asarray(1.0))

class FetchCarry(EnvCarry):
    door_column: IntOrArray

class Fetch(Environment[FetchParams, FetchCarry]):
    def default_params(self, **kwargs) -> FetchParams:
        params = FetchParams(height=9, width=11)
        params = params.replace(**kwargs)
        if params.max_steps is None:
            params = params.replace(max_steps=4 * (params.height * params.width))
        return params

    def _generate_problem(self, params: FetchParams, key: jax.Array) -> State[FetchCarry]:
        key, *keys = jax.random.split(key, num=6)
        column = jax.random.randint(keys[0], shape=(), minval=4, maxval=6)

        grid = room(params.height, params.width)
        grid = vertical_line(grid, column, 0, params.height, TILES_REGISTRY[Tiles.WALL, Colors.GREY])
        grid = grid.at[params.height // 2, column].set(jax.random.choice(keys[1], _doors))
        left = coordinates_mask(grid, (params.height, column), comparison_fn=jnp.less)

        coords = sample_coordinates(keys[2], grid, num=params.num_squares + 2, mask=left)
        for i in range(params.num_squares):
            grid = grid.at[coords[i][0], coords[i][1]].set(TILES_REGISTRY[Tiles.SQUARE, Colors.BLUE])
        grid = grid.at[coords[-2][0], coords[-2][1]].set(TILES_REGISTRY[Tiles.BALL, Colors.RED])
        agent = AgentState(position=coords[-1], direction=sample_direction(keys[3]))

        return State(key=key, step_num=jnp.asarray(0), grid=grid, agent=agent, goal_encoding=_goal_encoding,
                     rule_encoding=_rule_encoding, carry=FetchCarry(door_column=column))

class PaidFetch(Wrapper):
    def step(self, params, timestep, action):
        timestep = self._env.step(params, timestep, action)
        return timestep.replace(reward=timestep.reward * params.prize)

register(id="MiniGrid-Fetch-9x11", entry_point=f"{__name__}:Fetch", num_squares=4)
'''


def test_listing_1():
    ran = {}
    exec(LISTING_1, ran)
    assert ran["timestep"].state.step_num == 1 and ran["env_params"].max_steps == 100
    assert ran["image"].ndim == 3 and ran["image"].dtype == np.uint8


def run_listing_2(size):
    ran = {}
    exec(LISTING_2, ran)
    assert ran["benchmark"].num_rulesets() == size
    assert (ran["train"].num_rulesets(), ran["test"].num_rulesets()) == (round(0.8 * size), size - round(0.8 * size))
    assert (ran["timestep"].state.goal_encoding == ran["ruleset"].goal).all() and ran["image"].ndim == 3


def test_listing_2_with_fewer_tasks(tmp_path, monkeypatch):
    "As printed, but `trivial-1m` has two thousand tasks here; the second use reads what the first one made."
    monkeypatch.setenv("XLAND_MINIGRID_DATA", str(tmp_path))
    small = registry._REGISTERED["trivial-1m"]._replace(n=2000, digest=registry.digest(generate_benchmark("trivial", n=2000)))
    monkeypatch.setitem(registry._REGISTERED, "trivial-1m", small)
    run_listing_2(2000)
    assert [f.name.startswith("trivial-1m") for f in tmp_path.iterdir()] == [True]


@pytest.mark.slow
def test_listing_2():
    run_listing_2(1_000_000)


def test_listing_3(capsys):
    ran = {}
    exec(LISTING_3, ran)
    assert ran["transitions"].observation.shape == (1000, 7, 7, 2) and ran["transitions"].last().sum() > 0
    assert "Transitions shapes" in capsys.readouterr().out


def test_an_environment_written_for_xminigrid(tmp_path, monkeypatch):
    "A module in xminigrid's own style, `xminigrid` replaced by `xland_minigrid` in its imports: it registers, runs in batches and resets itself."
    from xland_minigrid.envs import registration
    (tmp_path / "fetch_the_ball.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registration.registry, "specs", dict(registration.registry.specs))
    import fetch_the_ball as fetch

    env, params = fetch.make("MiniGrid-Fetch-9x11", max_steps=40)
    env = fetch.GymAutoResetWrapper(fetch.PaidFetch(env))
    params = params.replace(prize=jnp.asarray(2.0))
    assert params.num_squares == 4 and params.height == 9

    def play(key):
        start = env.reset(params, key)
        actions = jax.random.choice(jax.random.fold_in(key, 1), jnp.array([0, 0, 1, 2, 3]), (400,))
        return start, jax.lax.scan(lambda t, a: (lambda n: (n, n))(env.step(params, t, a)), start, actions)[1]

    starts, steps = jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), 32))
    tile = starts.state.grid[..., 0]
    for kind, number in ((fetch.Tiles.SQUARE, 4), (fetch.Tiles.BALL, 1), (fetch.Tiles.DOOR_CLOSED, 1)):
        assert ((tile == kind).sum((1, 2)) == number).all()
    assert set(starts.state.carry.door_column.tolist()) == {4, 5}
    success = steps.discount == 0
    assert success.sum() > 10 and (steps.reward[success] > 0.2 * 0.9).all() and float(steps.reward.max()) > 1
    assert (steps.state.step_num[steps.last()] == 0).all()


def test_names_of_xminigrid_are_reachable():
    "Every public name of the modules that its users import exists here under the same path."
    import importlib
    import types
    pytest.importorskip("xminigrid")
    imported_there = {"Any", "Generic", "Optional", "TypeVar", "Union", "Callable", "TypeAlias", "Type", "annotations", "abc", "struct", "jax", "jnp", "np",
                      "importlib", "dataclass", "field", "tile_id", "color_id", "rgb_render", "text_render", "load", "ActionOutput",
                      "crop_field_of_view"}  # the last: an intermediate step of its view, not yet turned
    home = {}     # a name imported by a module over there is only required where it is defined
    missing = []
    for path in ("core.constants", "types", "core.grid", "core.actions", "core.observation", "core.rules", "core.goals", "environment", "registration",
                 "wrappers"):
        there, here = (importlib.import_module(f"{package}.{path}") for package in ("xminigrid", "xland_minigrid"))
        for name, value in vars(there).items():
            if name.startswith("_") or name in imported_there or isinstance(value, types.ModuleType) or name in home:
                continue
            home[name] = path
            if not hasattr(here, name):
                missing.append(f"{path}.{name}")
    assert missing == []


def test_promised_names_are_at_the_top():
    import xland_minigrid
    from xland_minigrid.core.goals import GOALS
    from xland_minigrid.core.rules import RULES
    names = ["make", "register", "registered_environments", "load_benchmark", "registered_benchmarks", "load_benchmark_from_path", "Benchmark", "RuleSet", "TimeStep", "EnvParams",
             "GymAutoResetWrapper", "DmEnvAutoResetWrapper", "DirectionObservationWrapper", "RulesAndGoalsObservationWrapper", "RGBImgObservationWrapper", "check_rule", "check_goal"]
    assert [name for name in [*names, *(kind.__name__ for kind in (*GOALS, *RULES))] if not hasattr(xland_minigrid, name)] == []


def test_constants_are_those_of_the_tables():
    from xland_minigrid.core import constants
    registry = constants.TILES_REGISTRY
    assert registry.shape == (16, 14, 2) and registry.dtype == jnp.uint8
    assert registry[constants.Tiles.STAR, constants.Colors.PINK].tolist() == [14, 13]
    assert constants.DIRECTIONS.tolist() == [[-1, 0], [0, 1], [1, 0], [0, -1]] and constants.NUM_ACTIONS == 6 and constants.NUM_LAYERS == 2
    assert constants.WALKABLE.tolist() == [3, 8, 12, 15] and constants.LOS_BLOCKING.tolist() == [4, 10, 11]
