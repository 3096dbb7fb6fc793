"""Programs written for xminigrid, class by class: each test uses the interface as such programs do, under both import lines."""
import ast
import contextlib
import importlib
import importlib.util
import io
from pathlib import Path
from types import SimpleNamespace

import chex
import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xland_minigrid.compat import worlds
from xland_minigrid.envs import registration

PACKAGES = ("xland_minigrid", "xland_minigrid.compat")
PATHS = ("core.actions", "core.constants", "core.goals", "core.grid", "core.observation", "core.rules", "benchmarks", "environment", "envs", "envs.xland", "registration",
         "rendering.text_render", "rendering.rgb_render", "rendering.utils", "experimental.img_obs", "types", "wrappers")

DRAWN = {"experimental.img_obs": ("TILE_CACHE", "TILE_W_AGENT_CACHE")}  # made when they are asked for, so `dir` does not list them


@pytest.fixture(scope="module", params=PACKAGES)
def xm(request):
    "Every name of a package, as `from xminigrid.PATH import ...` would bring them in."
    names = SimpleNamespace(root=request.param)
    for path in PATHS:
        module = importlib.import_module(f"{request.param}.{path}")
        names.__dict__.update({name: getattr(module, name) for name in [*dir(module), *DRAWN.get(path, ())] if not name.startswith("__")})
        setattr(names, path.split(".")[-1], module)
    return names


@pytest.fixture(scope="module")
def task(xm):
    "Picking up the red ball makes it a blue key, which is the goal."
    ball, key = xm.TILES_REGISTRY[xm.Tiles.BALL, xm.Colors.RED], xm.TILES_REGISTRY[xm.Tiles.KEY, xm.Colors.BLUE]
    return xm.RuleSet(goal=xm.AgentHoldGoal(tile=key).encode(), rules=xm.AgentHoldRule(tile=ball, prod_tile=key).encode()[None], init_tiles=ball[None])


def begun_by_hand(xm, task):
    "A time step made of Python numbers: the agent faces the ball."
    agent = xm.AgentState(position=jnp.array((2, 2)), direction=jnp.asarray(1), pocket=xm.TILES_REGISTRY[xm.Tiles.EMPTY, xm.Colors.EMPTY])
    grid = xm.room(9, 9).at[1, 2].set(task.init_tiles[0])
    state = xm.State(key=jax.random.PRNGKey(0), step_num=jnp.asarray(0), grid=grid, agent=agent, goal_encoding=task.goal, rule_encoding=task.rules, carry=xm.EnvCarry())
    return xm.TimeStep(state=state, step_type=xm.StepType.FIRST, reward=jnp.asarray(0.0), discount=jnp.asarray(1.0), observation=jnp.zeros((5, 5, 2), jnp.uint8))


def test_every_module_and_function_has_its_path():
    "Private names and a few constants of its own machinery are not kept, save those that programs import."
    spared = {"ActionOutput", "CACHE_PATH", "FORCE_RELOAD", "HF_REPO_ID", "TILES_FN_MAP", "build_cache", "cache_path", "get_highlight_mask", "Color", "Point"}
    spared_here = {"COLOR_NAMES", "PLAYER_STR", "RULE_TILE_STR", "TILE_STR"}  # tables by 0.9.3's identifiers
    wanted = {"_text_encode_goal", "_text_encode_rule", "_encode_tile", "_render_obs", "_REGISTRY"}
    root = Path(importlib.util.find_spec("xminigrid").origin).parent
    found = 0
    for path in sorted(root.rglob("*.py")):
        module = ".".join(part for part in path.relative_to(root).with_suffix("").parts if part != "__init__")
        names = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.ImportFrom) and node.level and "envs.minigrid." in module:   # programs derive environments from these, and import what they import
                names |= {alias.name for alias in node.names}
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                names |= {target.id for target in getattr(node, "targets", [getattr(node, "target", None)]) if isinstance(target, ast.Name)}
        for package in PACKAGES:
            ours = importlib.import_module(".".join(filter(None, (package, module))))
            missing = {n for n in names - spared - (spared_here if package == PACKAGES[0] else set()) if (n[0] != "_" or n in wanted) and not hasattr(ours, n)}
            assert not missing, f"{ours.__name__} lacks {sorted(missing)}"
            found += len(names)
    assert found > 400


def test_a_state_built_from_python_numbers_compiles_one_step(xm, task):
    "Also with parameters of a program's own class, which know nothing of options that 0.9.3 has not."

    class Params(flax.struct.PyTreeNode):
        height: int = flax.struct.field(pytree_node=False, default=9)
        width: int = flax.struct.field(pytree_node=False, default=9)
        view_size: int = flax.struct.field(pytree_node=False, default=5)
        max_steps: int = flax.struct.field(pytree_node=False, default=30)

    env, _ = xm.make("XLand-MiniGrid-R1-9x9")
    step, timestep = jax.jit(chex.assert_max_traces(env.step, 1)), begun_by_hand(xm, task)
    for action in (0, 2, 3):
        timestep = step(Params(), timestep, action)
    assert timestep.state.agent.position.tolist() == [2, 3] and timestep.observation.shape == (5, 5, 2)


def test_parameters_that_also_derive_from_flax(xm):
    class GoalParams(xm.EnvParams, flax.struct.PyTreeNode):
        bonus: jax.Array = flax.struct.field(default=0.5)

    params = GoalParams(bonus=jnp.float32(2.0)).replace(height=11)
    assert (params.height, params.view_size) == (11, 7) and isinstance(params, xm.EnvParams)
    assert jax.tree.leaves(jax.tree.map(lambda x: x + 1, params)) == [3.0]


def test_records_that_a_program_extends(xm, task):
    "With fields that have no default, as for transitions; the new record is stacked by `scan` like any other."
    class Transition(xm.TimeStep):
        action: jax.Array

    class Own(xm.State):
        seen: jax.Array

    class Numbered(xm.RuleSet):
        number: jax.Array

    begun = begun_by_hand(xm, task)
    fields = {name: getattr(begun, name) for name in ("state", "step_type", "reward", "discount", "observation")}
    _, made = jax.lax.scan(lambda carry, action: (carry, Transition(**fields, action=action)), 0, jnp.arange(3))
    assert made.action.tolist() == [0, 1, 2] and made.state.grid.shape == (3, 9, 9, 2)
    state = begun.state
    own = Own(key=state.key, step_num=state.step_num, grid=state.grid, agent=state.agent, goal_encoding=state.goal_encoding, rule_encoding=state.rule_encoding, carry=state.carry,
              seen=jnp.zeros(4))
    assert (own.replace(seen=own.seen + 1).seen == 1).all() and (own.grid == state.grid).all()
    with pytest.raises(TypeError, match="no field 'gird'"):
        state.replace(gird=state.grid)
    assert Numbered(task.goal, task.rules, task.init_tiles, number=jnp.int32(7)).number == 7


def test_the_laws_called_directly(xm, task):
    "As a program does that writes its own step: action, rules, goal, view, one after another."
    start = begun_by_hand(xm, task).state
    agent = start.agent.replace(direction=jnp.asarray(0))
    grid, agent, place = xm.take_action(start.grid, agent, 3)
    assert agent.pocket.tolist() == [xm.Tiles.BALL, xm.Colors.RED] and place.tolist() == [1, 2]
    grid, agent = xm.check_rule(task.rules, grid, agent, 3, place)
    assert agent.pocket.tolist() == [xm.Tiles.KEY, xm.Colors.BLUE] and xm.check_goal(task.goal, grid, agent, 3, place)
    view = xm.transparent_field_of_view(grid, agent, 5, 5)
    assert view[4, 2].tolist() == [xm.Tiles.FLOOR, xm.Colors.BLACK] and view[2, 2].tolist() == [xm.Tiles.WALL, xm.Colors.GREY] and not view[0].any()
    state = start.replace(grid=grid, agent=agent, step_num=start.step_num + 1)
    assert (state.grid == grid).all() and (state.rule_encoding == task.rules).all() and (state.goal_encoding == task.goal).all()


def test_batched_parameters_with_one_axis_for_all(xm, task):
    "`in_axes=0` for parameters, as programs for meta-learning write it: only the ruleset has arrays."
    env, params = xm.make("XLand-MiniGrid-R4-9x9")
    env = xm.GymAutoResetWrapper(env)
    batch = params.replace(ruleset=jax.tree.map(lambda x: jnp.stack([x] * 3), task))
    timestep = jax.jit(jax.vmap(env.reset))(batch, jax.random.split(jax.random.key(0), 3))
    timestep = jax.jit(jax.vmap(env.step))(batch, timestep, jnp.array([0, 1, 2]))
    assert timestep.observation.shape == (3, 5, 5, 2) and (timestep.state.goal_encoding == task.goal).all()


def test_an_environment_that_overrides_where_trials_begin(xm, task):
    class InTheCorner(xm.XLandMiniGrid):
        def _generate_problem(self, params, key):
            state = super()._generate_problem(params, key)
            agent = xm.AgentState(position=jnp.array([1, 1]), direction=jnp.asarray(2))
            return state.replace(grid=xm.room(params.height, params.width).at[2, 1].set(params.ruleset.init_tiles[0]), agent=agent)

    env = InTheCorner()
    params = env.default_params(ruleset=task)
    timestep = jax.jit(env.reset)(params, jax.random.key(0))
    assert timestep.observation[3, 2].tolist() == task.init_tiles[0].tolist()
    assert jax.jit(env.step)(params, timestep, 3).last()


class Corridor:
    "Stands in for a program's module: `make` finds it by its path."


def test_an_environment_of_a_program_by_its_entry_point(xm, task, monkeypatch):
    class Own(xm.Environment):
        def default_params(self, **kwargs):
            return xm.EnvParams(height=3, width=6, view_size=3, max_steps=20).replace(**kwargs)

        def _generate_problem(self, params, key):
            grid = xm.room(params.height, params.width).at[1, 4].set(xm.TILES_REGISTRY[xm.Tiles.GOAL, xm.Colors.GREEN])
            agent = xm.AgentState(position=jnp.array([1, 1]), direction=jnp.asarray(1))
            return xm.State(key=key, step_num=jnp.asarray(0), grid=grid, agent=agent, carry=xm.EnvCarry(), rule_encoding=xm.EmptyRule().encode()[None],
                            goal_encoding=xm.AgentOnTileGoal(xm.TILES_REGISTRY[xm.Tiles.GOAL, xm.Colors.GREEN]).encode())

    monkeypatch.setattr(f"{__name__}.Corridor", Own)
    for registry in (registration.registry, worlds.registry):
        monkeypatch.setattr(registry, "specs", dict(registry.specs))
    identifier = f"MiniGrid-Corridor-{xm.root}"
    xm.register(identifier, f"{__name__}:Corridor")
    env, params = xm.make(identifier)
    timestep, step = env.reset(params, jax.random.key(0)), jax.jit(env.step)
    for _ in range(3):
        timestep = step(params, timestep, 0)
    assert timestep.last() and timestep.reward > 0.8
    assert xm.load(f"{xm.root}.envs.minigrid.empty:EmptyRandom") is xm.EmptyRandom


def test_a_wrapper_that_looks_at_values(xm):
    "Outside of `jit` a program may ask whether a trial is over; the step around it then runs as it is written."
    class Counts(xm.Wrapper):
        ended = 0

        def step(self, params, timestep, action):
            following = self._env.step(params, timestep, action)
            Counts.ended += bool(following.last())
            return following

    env, params = xm.make("MiniGrid-Empty-5x5", max_steps=2)
    env = xm.GymAutoResetWrapper(Counts(env))
    timestep = env.reset(params, jax.random.key(0))
    for _ in range(4):
        timestep = env.step(params, timestep, 1)
    assert Counts.ended == 2


def test_rulesets_whose_leaves_are_no_arrays_have_a_repr(xm, task):
    assert "(5,)" in repr(jax.tree.map(jnp.shape, task)) and repr(jax.tree.map(lambda x: 0, task))


def test_a_file_of_tasks_is_written_and_read(xm, tmp_path, task):
    many = {"goals": task.goal[None], "rules": task.rules[None], "init_tiles": task.init_tiles[None], "num_rules": jnp.ones(1, jnp.uint8)}
    xm.save_bz2_pickle(many, str(tmp_path / "tasks"))
    read = xm.load_bz2_pickle(str(tmp_path / "tasks"))
    assert read.keys() == many.keys() and (xm.get_ruleset(read["goals"], read["rules"], read["init_tiles"], 0).goal == task.goal).all()


def test_images_are_laid_out_from_the_table_of_tiles(xm):
    view = jnp.full((3, 3, 2), xm.TILES_REGISTRY[xm.Tiles.FLOOR, xm.Colors.BLACK]).at[0, 1].set(xm.TILES_REGISTRY[xm.Tiles.BALL, xm.Colors.RED])
    image, size = np.asarray(xm._render_obs(view)), xm.TILE_SIZE
    number = lambda tile, color: int(tile) * xm.NUM_COLORS + int(color)
    assert (image[:size, size : 2 * size] == xm.TILE_CACHE[number(xm.Tiles.BALL, xm.Colors.RED)]).all()
    assert (image[-size:, size : 2 * size] == xm.TILE_W_AGENT_CACHE[number(xm.Tiles.FLOOR, xm.Colors.BLACK)]).all()
    assert (xm.render_tile((xm.Tiles.BALL, xm.Colors.RED)) == xm.TILE_CACHE[number(xm.Tiles.BALL, xm.Colors.RED)]).all()
    env, params = xm.make("MiniGrid-Empty-5x5")
    wrapped = importlib.import_module(f"{xm.root}.experimental.img_obs").RGBImgObservationWrapper(env)
    key = jax.random.key(0)
    assert (wrapped.reset(params, key).observation == xm._render_obs(env.reset(params, key).observation)).all()


@pytest.mark.newest
def test_embeddings_of_the_size_of_xminigrid(monkeypatch):
    "A program that holds 13 tiles and 12 colours as literals: through `compat` no number is beyond them."
    xm = importlib.import_module("xland_minigrid.compat")
    wrappers = importlib.import_module("xland_minigrid.compat.wrappers")
    env, params = xm.make("XLand-MiniGrid-R9-16x16", ruleset=xm.load_benchmark("trivial-21k").get_ruleset(3))
    env = wrappers.GymAutoResetWrapper(env)
    timestep = jax.jit(jax.vmap(env.reset, (None, 0)))(params, jax.random.split(jax.random.key(0), 256))
    step = jax.jit(jax.vmap(env.step, (None, 0, 0)))
    tiles, colors = jnp.eye(13), jnp.eye(12)
    for t in range(8):
        timestep = step(params, timestep, jax.random.randint(jax.random.key(t), (256,), 0, 6))
        features = tiles.at[timestep.observation[..., 0]].get(mode="fill", fill_value=jnp.nan).sum() + colors.at[timestep.observation[..., 1]].get(
            mode="fill", fill_value=jnp.nan).sum()
        assert features == 2 * 256 * 25


def test_playing_by_hand(xm, tmp_path):
    "A program's own player begins where it likes and is told of every step."
    home = importlib.import_module(f"{xm.root}.manual_control")
    env, params = xm.make("MiniGrid-Empty-5x5")

    class Again(home.ManualControl):
        def reset(self):
            self.timestep, self.done = self._reset(self.env_params, jax.random.key(7)), getattr(self, "done", [])
            self.render()

        def step(self, action):
            super().step(action)
            self.done.append((action, float(self.timestep.reward)))

    shown = io.StringIO()
    control = Again(env=env, env_params=params, agent_view=True, save_video=True, video_path=tmp_path, video_format=".gif", video_fps=5)
    control.start(io.StringIO("wwdw\nw quit w"), shown)
    assert [action for action, _ in control.done] == [0, 0, 1, 0, 0] and int(control.timestep.state.step_num) == 0, "the next trial has begun"
    assert shown.getvalue().count("StepType: 2 | Discount: 0.0 | Reward: 0.9") == 1 and len(control.frames) == 7
    assert (tmp_path / "manual_control_rollout.gif").read_bytes()[:3] == b"GIF"
