"""Pictures, players and drawings: what they show is what the arrays say."""
import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from xland_minigrid.core.actions import AgentState
from xland_minigrid.core.observation import look
from xland_minigrid.core.ruleset import RuleSet
from xland_minigrid.core.tiles import NUM_COLORS, NUM_TILES, Colors, Tiles, pack_pairs
from xland_minigrid.envs.environment import State
from xland_minigrid.envs.registration import make
from xland_minigrid.envs.wrappers import (DirectionObservationWrapper, DmEnvAutoResetWrapper, GymAutoResetWrapper,
                                          RulesAndGoalsObservationWrapper)
from xland_minigrid.viz import RGBImgObservationWrapper, images_from_observations
from xland_minigrid.viz import (Bars, adaptation_curve, describe_grid, draw_ruleset, draw_tile, field_of_view, grid_html, play, play_rollout,
                                render, render_observation, render_text, show, task_tree, to_png, training_curve, view_to_world)
from xland_minigrid.viz.images import tile_table

RED_BALL, BLUE_STAR, GREEN_SQUARE, PINK_KEY, GREY_HEX = (5, 3), (14, 5), (6, 4), (9, 13), (13, 8)


def agent(row=1, col=1, direction=0, pocket=(Tiles.EMPTY, Colors.EMPTY)):
    return AgentState(position=jnp.array([row, col], jnp.int32), direction=jnp.int32(direction), pocket=jnp.array(pocket, jnp.uint8))


def random_grid(rng, height=7, width=9):
    return np.stack([rng.integers(2, NUM_TILES, (height, width)), rng.integers(2, NUM_COLORS, (height, width))], -1).astype(np.uint8)


# Pictures ----------------------------------------------------------------------------------------------------------------------------

EYES = {  # Machado, Oliveira and Fernandes (2009), severity 1
    "protanopia": [[.152286, 1.052583, -.204868], [.114503, .786281, .099216], [-.003882, -.048116, 1.051998]],
    "deuteranopia": [[.367322, .860646, -.227968], [.280085, .672501, .047413], [-.011820, .042940, .968881]],
    "tritanopia": [[1.255528, -.076749, -.178779], [-.078411, .930809, .147602], [.004733, .691367, .303900]]}


def as_light(image):
    c = np.asarray(image) / 255
    return np.where(c <= .04045, c / 12.92, ((c + .055) / 1.055) ** 2.4)


@pytest.mark.parametrize("eye", EYES)
def test_things_of_two_colours_differ_for_the_colour_blind(eye):
    "Balls drawn at 16 pixels, all pairs of colours: the mean difference in L*a*b* over the pixels of the ball."
    balls = np.stack([draw_tile(Tiles.BALL, c, 16) for c in range(3, NUM_COLORS)])
    xyz = np.clip(as_light(balls) @ np.array(EYES[eye]).T, 0, 1) @ np.array([[.4339, .2126, .0178], [.3762, .7152, .1095], [.1899, .0722, .8727]])
    f = np.where(xyz > .008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    lab = np.stack([116 * f[..., 1] - 16, 500 * (f[..., 0] - f[..., 1]), 200 * (f[..., 1] - f[..., 2])], -1)
    apart = [np.linalg.norm(a - b, axis=-1)[5:11, 5:11].mean() for i, a in enumerate(lab) for b in lab[:i]]
    assert min(apart) > 19


@pytest.mark.parametrize("tile", [5, 6, 7, 9, 13, 14, 10, 11, 12, 15])
def test_every_thing_stands_out_from_the_floor(tile):
    "Its brightest tenth has a contrast of 3 to the floor (WCAG 2), in the dark and in the field of view."
    for light in (lambda i: i, lambda i: i + (255 - i) // 4):
        floor = as_light(light(np.uint8([8, 8, 9]))) @ [.2126, .7152, .0722]
        for color in range(3, NUM_COLORS):
            bright = np.sort((as_light(light(draw_tile(tile, color, 32))) @ [.2126, .7152, .0722]).ravel())[-60]
            assert (bright + .05) / (floor + .05) >= 3, (tile, color)


@pytest.mark.parametrize("size", [8, 16, 32])
def test_no_two_sprites_look_alike(size):
    sprites = np.stack([draw_tile(t, c, size) for t in range(NUM_TILES) for c in range(NUM_COLORS)]).astype(int)
    closest = min(np.abs(sprites[i + 1:] - s).mean((1, 2, 3)).min() for i, s in enumerate(sprites[:-1]))
    assert closest > 2.5


def test_every_cell_of_a_picture_is_its_sprite():
    grid = random_grid(np.random.default_rng(0))
    image = render(grid, tile_size=12)
    for (r, c), _ in np.ndenumerate(grid[..., 0]):
        assert (image[r * 12:r * 12 + 12, c * 12:c * 12 + 12] == draw_tile(*map(int, grid[r, c]), 12)).all()


def test_packed_jax_and_numpy_grids_look_the_same():
    grid = random_grid(np.random.default_rng(1))
    image = render(grid, agent(3, 4), 5, 10)
    for other in (pack_pairs(grid), jnp.asarray(grid), jnp.asarray(pack_pairs(grid))):
        assert (render(other, agent(3, 4), 5, 10) == image).all()


def test_agent_points_where_it_looks():
    floor = np.full((3, 3), 0x39, np.uint8)
    for direction, (row, col) in enumerate([(0, .5), (.5, 1), (1, .5), (.5, 0)]):
        cell = render(floor, agent(1, 1, direction), tile_size=40)[40:80, 40:80].astype(int)
        red = (cell[..., 0] > 180) & (cell[..., 1] < 120)
        middle = np.argwhere(red).mean(0) / 39
        away = -(np.array([row, col]) - .5)  # the broad side, where most of the red is, lies behind
        assert (middle - .5) @ away > .02, direction


def test_what_is_carried_is_on_the_back():
    floor = np.full((3, 4), 0x39, np.uint8)
    empty, full = agent(), agent(pocket=BLUE_STAR)
    changed = (render(floor, full, tile_size=16) != render(floor, empty, tile_size=16)).any(-1)
    assert changed[16:32, 16:32].any() and not changed[:16].any() and not changed[32:].any()


def test_highlight_is_what_the_environment_observes():
    "Every cell has a number of its own; the lit ones are those that `look` brings back, for every direction and at every edge."
    height, width, view = 6, 8, 5
    numbers = np.arange(16, 16 + height * width, dtype=np.uint8).reshape(height, width)
    watch = jax.jit(lambda position, direction: look(jnp.asarray(numbers), position, direction, view))
    for row in range(height):
        for col in range(width):
            for direction in range(4):
                seen = np.asarray(watch(np.array([row, col]), np.int32(direction)))[:-1]
                lit = field_of_view((height, width), SimpleNamespace(position=(row, col), direction=direction), view)
                assert set(numbers[lit].tolist()) == set(seen[seen != 0].tolist()), (row, col, direction)


def test_visible_mask_is_turned_with_the_agent():
    numbers = np.arange(16, 16 + 49, dtype=np.uint8).reshape(7, 7)
    rng = np.random.default_rng(2)
    for direction in range(4):
        mask = rng.random((5, 5)) < .5
        seen = np.asarray(look(jnp.asarray(numbers), jnp.array([3, 3]), jnp.int32(direction), 5))[:-1].reshape(5, 5)
        lit = view_to_world(mask, agent(3, 3, direction), (7, 7))
        assert set(numbers[lit].tolist()) == set(seen[mask].tolist()) - {0}
        floor = np.full((7, 7), 0x39, np.uint8)
        changed = (render(floor, tile_size=8, visible=lit) != render(floor, tile_size=8)).any(-1)
        assert (changed.reshape(7, 8, 7, 8).any((1, 3)) == lit).all()


def test_observation_shows_the_agent_at_the_bottom_centre():
    view = np.full((5, 5, 2), (Tiles.FLOOR, Colors.BLACK), np.uint8)
    changed = (render_observation(view, 10) != render(view, tile_size=10)).any(-1)
    assert changed[40:, 20:30].any() and changed.sum() == changed[40:, 20:30].sum()


def test_png_keeps_every_pixel(tmp_path):
    rng = np.random.default_rng(3)
    for image in (render(random_grid(rng), agent(), 5, 16), rng.integers(0, 256, (40, 30, 3), dtype=np.uint8)):
        path = tmp_path / "a.png"
        path.write_bytes(to_png(image))
        assert (np.asarray(Image.open(path).convert("RGB")) == image).all()
    assert np.asarray(show(np.zeros((4, 4, 3), np.uint8), np.zeros((6, 2, 3), np.uint8), gap=1)).shape == (6, 7, 3)


def test_wrong_input_is_refused_in_words():
    table = [
        (lambda: render(np.zeros((3, 3, 3), np.uint8)), "height, width, 2"),
        (lambda: render(np.full((3, 3), 0xFF, np.uint8)), "tiles are 0 to 15"),
        (lambda: render(np.full((3, 3), 0x39, np.uint8), agent(3, 0)), "outside this grid"),
        (lambda: draw_tile(5, 3, 1), "at least 4"),
        (lambda: render(np.full((3, 3), 0x39, np.uint8), tile_size=7.5), "at least 4"),
        (lambda: render(np.full((3, 3), 0x39, np.uint8), visible=np.ones((5, 5))), "view_to_world"),
        (lambda: render_text(np.full((3, 3), 0x3F, np.uint8)), "tiles are 0 to 15"),
        (lambda: render_text(np.full((3, 3), 0x39, np.uint8), agent(-1, 0)), "outside this grid"),
        (lambda: images_from_observations(np.zeros((3, 5, 2), np.uint8)), "(..., V, V, 2)"),
        (lambda: images_from_observations(np.zeros((3, 3, 2))), "(..., V, V, 2)"),
        (lambda: RGBImgObservationWrapper(make("MiniGrid-Empty-5x5")[0], tile_size=2), "at least 4"),
        (lambda: RGBImgObservationWrapper(GymAutoResetWrapper(RGBImgObservationWrapper(make("MiniGrid-Empty-5x5")[0]))), "images already"),
        (lambda: to_png(np.zeros((3, 3), np.uint8)), "(height, width, 3)"),
        (lambda: Bars(["a"], np.zeros((3, 2))), "one column per label"),
        (lambda: Bars(["a"], np.zeros((3, 1)), sprites=[(5, 3), (5, 4)]), "one sprite per label"),
        (lambda: play(np.zeros((3, 8, 8), np.uint8)), "(time, height, width, 3)"),
        (lambda: play(np.zeros((0, 8, 8, 3), np.uint8)), "(time, height, width, 3)"),
        (lambda: play(np.zeros((3, 8, 8, 3), np.uint8), ["a"]), "3 frames but 1 captions"),
        (lambda: play(np.zeros((3, 8, 8, 3), np.uint8), fps=0), "above 0"),
        (lambda: adaptation_curve({"a": {"success": np.zeros((3, 2))}}, what=["success"]), "one number per trial"),
        (lambda: training_curve([]), "no numbers"),
    ]
    missed = []
    for i, (call, words) in enumerate(table):
        try:
            missed.append((i, words, call()))
        except ValueError as error:
            missed += [] if words in str(error) else [(i, words, str(error))]
    assert missed == []


def test_text_has_one_character_a_cell():
    from rich.cells import cell_len
    from rich.text import Text
    grid = np.stack(np.meshgrid(np.arange(NUM_TILES), np.arange(NUM_COLORS), indexing="ij"), -1).astype(np.uint8)
    lines = Text.from_markup(render_text(grid, agent(4, 6, 3))).plain.split("\n")
    assert len(lines) == NUM_TILES and all(cell_len(line) == NUM_COLORS for line in lines)
    assert lines[4][6] == "<" and len({line[0] for line in lines}) == NUM_TILES, "every tile has a character of its own"
    spans = Text.from_markup(render_text(grid)).spans
    assert {str(s.style) for s in spans if s.start == 5 * 15 + 3} == {"bold #f3323a"}, "a red ball is red"
    seen = np.zeros(grid.shape[:2], bool)
    seen[5, 3] = True
    lines = Text.from_markup(render_text(grid, agent(4, 6, 3), wide=True, visible=seen))
    assert all(cell_len(line) == 2 * NUM_COLORS for line in lines.plain.split("\n"))
    assert [lines.plain[s.start:s.end] for s in lines.spans if "on #3a3a3a" in str(s.style)] == ["● "]


def test_html_of_a_grid_says_what_it_shows():
    grid = np.full((5, 5), 0x39, np.uint8)
    grid[1, 3] = 0x53
    html = grid_html(grid, agent(2, 2, 1, PINK_KEY), 3, caption="a < b")
    figure = ET.fromstring(html.replace('">', '"/>', 2).replace('inline-block;color:inherit"/>', 'inline-block;color:inherit">'))
    assert figure.find("img").attrib["alt"] == describe_grid(grid, agent(2, 2, 1, PINK_KEY))
    assert "red ball (1, 3)" in html and "facing right carrying pink key" in html and "a &lt; b" in html


# Images ------------------------------------------------------------------------------------------------------------------------------

def test_bytes_that_are_no_cell_catch_the_eye():
    table = tile_table(8)[0]
    assert (table[0x5E] == table[0xFF]).all() and {tuple(p) for p in table[0x5E].reshape(-1, 3)} == {(255, 0, 255), (90, 0, 90)}
    assert not (table.reshape(16, 16, 8, 8, 3)[:, :14] == (255, 0, 255)).all(-1).any()


WRAPPINGS = {
    "alone": lambda env, images: images(env),
    "over gym": lambda env, images: images(GymAutoResetWrapper(env)),
    "under gym": lambda env, images: GymAutoResetWrapper(images(env)),
    "over dm": lambda env, images: images(DmEnvAutoResetWrapper(env)),
    "under all": lambda env, images: RulesAndGoalsObservationWrapper(DirectionObservationWrapper(images(GymAutoResetWrapper(env)))),
    "over all": lambda env, images: images(DirectionObservationWrapper(GymAutoResetWrapper(RulesAndGoalsObservationWrapper(env)))),
}


# The last order passes through most wrappers; each order is two programs, so the others are slow.
@pytest.mark.newest
@pytest.mark.parametrize("order", [o if o == "over all" else pytest.param(o, marks=pytest.mark.slow) for o in WRAPPINGS])
def test_image_observations_say_what_symbols_say(order):
    "In lockstep with the same world without images, across resets: observation and terminal observation, walls in the way."
    settings = dict(height=5, width=5, view_size=3, max_steps=4, see_through_walls=order == "under all")
    (env, params), wrap = make("XLand-MiniGrid-R1-9x9", **settings), WRAPPINGS[order]
    sides = [wrap(env, lambda e: e), wrap(env, lambda e: RGBImgObservationWrapper(e, tile_size=8))]
    draw = jax.vmap(lambda view: images_from_observations(view, 8))
    picture = lambda seen: {**seen, "img": draw(seen["img"])} if isinstance(seen, dict) else draw(seen)
    step = jax.jit(lambda now, a: [jax.vmap(e.step, (None, 0, None))(params, t, a) for e, t in zip(sides, now)])
    now = jax.jit(lambda keys: [jax.vmap(e.reset, (None, 0))(params, keys) for e in sides])(jax.random.split(jax.random.key(0), 3))
    for action in (0, 1, 0, 0, 2, 0):
        now = step(now, action)
        for name in ("observation", "final_observation"):
            symbols, images = getattr(now[0], name), getattr(now[1], name)
            assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), None if symbols is None else picture(symbols), images)), (name, action)
    shape = sides[1].observation_shape(params)
    assert (shape["img"] if isinstance(shape, dict) else shape) == (24, 24, 3)
    assert isinstance(now[1].observation, dict) == isinstance(shape, dict)
    assert "gym" not in order or now[1].final_observation.shape == (3, 24, 24, 3)


def test_listing_4():
    from xland_minigrid.experimental.img_obs import RGBImgObservationWrapper as Images
    plain, params = make("XLand-MiniGrid-R9-25x25", view_size=7)
    env = Images(plain)
    assert env.observation_shape(params) == (224, 224, 3)
    timestep, symbols = jax.jit(lambda key: (env.reset(params, key), plain.reset(params, key).observation))(jax.random.key(0))
    assert (timestep.observation == images_from_observations(symbols)).all() and env.render(params, timestep).shape == (800, 800, 3)


@pytest.mark.newest
def test_nothing_happens_at_import(tmp_path):
    "Of the room and of all widgets: no sprites are drawn, nothing is written, nothing large is loaded."
    code = """
import os, sys
import xland_minigrid.viz, xland_minigrid.viz.widgets as w
from xland_minigrid.viz.widgets import base, env_player, explorer
import xland_minigrid.experimental.img_obs
from xland_minigrid.viz.images import _table
from xland_minigrid.viz.render import draw_tile
try: w.Nothing
except AttributeError as error: assert 'EnvPlayer' in str(error) and 'EnvPlayer' in dir(w)
loaded = [m for m in ('matplotlib', 'IPython', 'ipywidgets', 'anywidget', 'rich', 'flax') if m in sys.modules]
print(_table.cache_info().currsize, draw_tile.cache_info().currsize, os.listdir(os.environ['XLAND_MINIGRID_CACHE']), loaded)
"""
    env = {**os.environ, "XLAND_MINIGRID_CACHE": str(tmp_path), "XLAND_MINIGRID_RELOAD_CACHE": "True"}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env).stdout.strip() == "0 0 [] []"


# Players -----------------------------------------------------------------------------------------------------------------------------

class Tags(HTMLParser):
    "Attributes of all elements of a class."

    def __init__(self, html):
        super().__init__()
        self.found = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def data(self):
        return json.loads(next(a["data-player"] for _, a in self.found if "data-player" in a))


def decode_uri(uri):
    import base64
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))).convert("RGB"))


def frames_of(data, shape):
    "Put the frames together as the page's script does."
    sheet, s, frame, out = decode_uri(data["sheet"]), data["size"], np.zeros((shape[1] + 64, shape[2] + 64, 3), np.uint8), []
    for changes in data["frames"]:
        for place, block in zip(changes[::2], changes[1::2]):
            (r, c), (i, j) = divmod(place, data["columns"]), divmod(block, 16)
            frame[r * s:(r + 1) * s, c * s:(c + 1) * s] = sheet[i * s:(i + 1) * s, j * s:(j + 1) * s]
        out.append(frame[:shape[1], :shape[2]].copy())
    return np.stack(out)


def rollout(length=60, side=13, seed=0, tile_size=16):
    rng, grid = np.random.default_rng(seed), np.full((side, side), 0x39, np.uint8)
    grid[[0, -1]] = grid[:, [0, -1]] = 0x48
    for r, c, byte in zip(rng.integers(1, side - 1, 9), rng.integers(1, side - 1, 9), (0x53, 0x64, 0x75, 0xD6, 0xE7, 0x9D, 0x5A, 0x8B, 0x5C)):
        grid[r, c] = byte
    return [render(grid, SimpleNamespace(position=rng.integers(1, side - 1, 2), direction=t % 4), 7, tile_size) for t in range(length)]


def test_page_holds_every_frame_exactly():
    frames = np.stack(rollout(25))
    assert (frames_of(Tags(play(frames, tile_size=16)._repr_html_()).data(), frames.shape) == frames).all()
    for height, width in ((30, 45), (31, 37), (5, 3)):
        odd = np.random.default_rng(0).integers(0, 256, (4, height, width, 3), dtype=np.uint8)
        assert (frames_of(Tags(play(odd)._repr_html_()).data(), odd.shape) == odd).all()


def test_page_is_small_and_alone():
    values = np.random.default_rng(0).dirichlet(np.ones(60), 60)
    sprites = [(t, c) for t in (5, 6, 7, 9, 13, 14) for c in range(3, 13)]
    player = play(rollout(), [f"step {t}" for t in range(60)], dict(labels=[str(s) for s in sprites], values=values, sprites=sprites, truth=3))
    html = player._repr_html_()
    assert len(html) < 100_000
    assert "http" not in html and not any("id" in a for _, a in Tags(html).found)
    assert html == play(rollout(), player.captions, player.panels)._repr_html_()


@pytest.mark.slow
def test_a_real_rollout_fits_a_hundred_kilobytes():
    "Sixty steps through rooms with doors and objects, the field of view lit and cut short by walls."
    from xland_minigrid.viz.control import figure_task
    env, params = make("XLand-MiniGrid-R4-13x13", ruleset=figure_task(), view_size=7, see_through_walls=False)
    def walk(timestep, action):
        following = env.step(params, timestep, action)
        return following, following
    actions = jnp.asarray(np.random.default_rng(1).choice(6, 60, p=[.5, .12, .12, .1, .06, .1]))
    _, film = jax.jit(lambda key: jax.lax.scan(walk, env.reset(params, key), actions))(jax.random.key(3))
    assert len(film.reward) == 60
    for tile_size in (16, 32):
        assert len(play_rollout(film, view_size=7, tile_size=tile_size)._repr_html_()) < 100_000


def test_page_cannot_be_broken_by_words(tmp_path):
    nasty = '</script><script>alert("x")</script>\'&'
    player = play(rollout(3), [nasty] * 3, dict(labels=[nasty], values=np.ones((3, 1)), title=nasty), markers={1: nasty}, title=nasty)
    tags = Tags(player._repr_html_())
    assert [t for t, _ in tags.found].count("script") == 1
    assert tags.data()["captions"] == [nasty] * 3
    player.save(tmp_path / "p.html")
    assert (tmp_path / "p.html").read_text().count("<script>") == 1


def test_bars_keep_the_largest_and_the_truth():
    bars = Bars(list("abcd"), [[.1, .2, .3, .4], [.7, .1, .1, .1]], truth=[0, 1], top=2)
    assert [[i for i, _ in bars.at(t)] for t in (0, 1)] == [[3, 2], [0, 1]]
    data = Tags(play(rollout(2, 5), bars=bars)._repr_html_()).data()["bars"][0]
    assert data["frames"] == [[3, 400, 2, 300], [0, 700, 1, 100]] and data["truth"] == [0, 1]
    assert [i for i, _ in Bars(list("ab"), [[.1, .9]], top=None).at(0)] == [0, 1], "all bars stay in order"


def test_gif_has_every_frame(tmp_path):
    frames = rollout(12, 7)
    play(frames, [f"frame {t}" for t in range(12)], Bars(["a"], np.linspace(0, 1, 12)[:, None]), fps=5).gif(tmp_path / "a.gif", scale=2)
    film = Image.open(tmp_path / "a.gif")
    assert film.n_frames == 12 and film.info["loop"] == 0
    for t, frame in enumerate(frames):
        film.seek(t)
        error = np.abs(np.asarray(film.convert("RGB"))[:224:2, :224:2].astype(int) - frame)
        assert error.mean() < .2 and (error.max(-1) > 0).mean() < .05, "only rare colours of smooth edges may move"
        assert film.info["duration"] == (200 if t < 11 else 1000)


def stacked(length=6):
    grids = np.full((length, 5, 5), 0x39, np.uint8)
    grids[3:, 2, 2] = 0x53
    return SimpleNamespace(cells=jnp.asarray(grids), step_num=jnp.array([0, 1, 2, 0, 1, 2]),
                           agent=AgentState(position=jnp.tile(jnp.array([[1, 1]]), (length, 1)), direction=jnp.arange(length) % 4,
                                            pocket=jnp.full((length, 2), 2, jnp.uint8)))


def test_rollouts_of_states_time_steps_and_pairs_agree():
    states = stacked()
    steps = SimpleNamespace(state=states, reward=jnp.array([0, 0, .5, 0, 0, 0]))
    agents = [jax.tree.map(lambda x: x[t], states.agent) for t in range(6)]
    films = [play_rollout(r, view_size=3).frames for r in (states, steps, (states.cells, states.agent), (states.cells, agents))]
    assert all((film == films[0]).all() for film in films)
    assert (films[0][4] == render(states.cells[4], agents[4], 3, 16)).all()
    player = play_rollout(steps)
    assert player.markers == {0: "trial 1", 3: "2"} and player.captions[2] == "trial 1, step 2, reward 0.50"


def test_a_state_draws_itself_and_a_batch_does_not():
    assert "<img" in State._repr_html_(SimpleNamespace(**jax.tree.map(lambda x: x[0], vars(stacked()))))
    assert State._repr_html_(stacked()) is None
    assert jax.jit(lambda cells: State._repr_html_(SimpleNamespace(cells=cells)) is None)(stacked().cells[0]), "nor does one that is traced"


def test_a_batch_of_rollouts_is_refused():
    states = stacked()
    batch = jax.tree.map(lambda x: jnp.stack([x, x], 1), states.agent)
    with pytest.raises(ValueError, match="pick one environment"):
        play_rollout((states.cells, batch))


# Task trees --------------------------------------------------------------------------------------------------------------------------

def task(goal, rules=(), tiles=()):
    return RuleSet(goal=np.array(goal, np.uint8), rules=np.array([*rules, [0] * 7], np.uint8), init_tiles=np.array([*tiles, (0, 0)], np.uint8))


def test_tree_takes_a_ruleset_apart():
    tree = task_tree(task([4, *GREEN_SQUARE, *PINK_KEY],
                          [[3, *RED_BALL, *BLUE_STAR, *GREEN_SQUARE], [1, *PINK_KEY, 3, 9, 0, 0]], [RED_BALL, BLUE_STAR, PINK_KEY, GREY_HEX]))
    square, key = tree.roots
    assert square.object_ == GREEN_SQUARE and not square.initial and key.initial and key.makers == ()
    assert [n.object_ for n in square.makers[0][1]] == [RED_BALL, BLUE_STAR]
    assert tree.distractor_rules == (1,) and tree.distractor_objects == (GREY_HEX,)


def test_dead_ends_and_missing_objects_are_marked():
    svg = draw_ruleset(task([1, *RED_BALL, 0, 0], [[1, *RED_BALL, 3, 9, 0, 0], [1, *GREY_HEX, *BLUE_STAR, 0, 0]], [RED_BALL, GREY_HEX])).svg
    assert svg.count("dead end") == 1 and "vanishes · dead end: uses up red ball" in svg and "nowhere" not in svg
    assert "Not part of the plan" in svg, "a dead end may show objects that the plan needs"
    assert "red ball (nowhere)" in draw_ruleset(task([1, *RED_BALL, 0, 0])).svg


def test_any_ruleset_can_be_drawn():
    "Also those that make no sense: circles, several makers of one object, every goal and rule."
    rng = np.random.default_rng(0)
    for i in range(30):
        things = [(int(t), int(c)) for t, c in zip(rng.integers(5, 8, 6), rng.integers(3, 6, 6))]
        pick = lambda: things[rng.integers(6)]
        rules = [[k, *pick(), *pick(), *(pick() if 3 <= k <= 7 else (0, 0))] for k in rng.integers(1, 12, rng.integers(0, 12))]
        ruleset = task([i % 15, *pick(), *pick()], rules, things[:3])
        drawing = draw_ruleset(ruleset)
        root = ET.fromstring(drawing.svg)
        width = float(root.attrib["width"])
        for image in root.iter("{http://www.w3.org/2000/svg}image"):
            assert 0 <= float(image.attrib["x"]) and float(image.attrib["x"]) + 36 <= width
            assert float(image.attrib["y"]) + 36 <= float(root.attrib["height"])
        tree = task_tree(ruleset)
        shown = []
        def walk(node):
            for rule, inputs in node.makers:
                shown.append(rule)
                [walk(n) for n in inputs]
        [walk(n) for n in tree.roots]
        assert sorted([*shown, *tree.distractor_rules]) == list(range(len(rules))), "every rule is drawn once"
        assert drawing.svg == draw_ruleset(ruleset).svg


# Figures and paths -------------------------------------------------------------------------------------------------------------------

def test_figures_show_their_numbers(tmp_path):
    figure = adaptation_curve({"agent": dict(success=[.2, .9], success_lo=[.1, .8], success_hi=[.3, 1], steps=[9, 3]), "random": dict(success=[.2, .2])})
    success, steps = figure.axes
    assert [line.get_label() for line in success.lines] == ["agent", "random"] and len(success.collections) == 1
    assert steps.lines[0].get_ydata().tolist() == [9, 3] and steps.lines[0].get_xdata().tolist() == [1, 2]
    assert all(a.get_xlabel() == "trial" and a.get_ylabel() for a in figure.axes) and figure.get_suptitle()
    rows = [dict(steps=0, loss=np.float32(2), note="x"), dict(steps=10), dict(steps=20, loss=1.0, fps=None)]
    line = training_curve(rows).axes[0].lines[0]
    assert line.get_xdata().tolist() == [0, 20] and line.get_ydata().tolist() == [2, 1]
    figure.savefig(tmp_path / "figure.png")
    assert Image.open(tmp_path / "figure.png").size[0] > 400


def test_paths_of_xminigrid_lead_here():
    from xland_minigrid.core.ruleset import print_ruleset
    from xland_minigrid.rendering import rgb_render, text_render
    assert rgb_render.render is render and text_render.render is render_text and text_render.print_ruleset is print_ruleset
