"""The paper's pictures, redrawn from the running environment: a rule that fires, an optimal path, a task tree, all layouts, all ported tasks.

    python .ci/figures.py [FOLDER]   write figures 1, 2, 3, 14 and 15 (default: docs/figures)
"""
import functools
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from xland_minigrid.benchmarks.exact import shortest
from xland_minigrid.core.actions import ACTION_NAMES, AgentState
from xland_minigrid.core.tiles import FLOOR, WALL, Colors, Tiles, pack, pack_pairs, tile_name
from xland_minigrid.core.walls import DIRECTIONS
from xland_minigrid.envs.registration import make, registered_environments
from xland_minigrid.viz.control import figure_task
from xland_minigrid.viz.render import Picture, render, view_to_world
from xland_minigrid.viz.tree import Drawing, draw_ruleset

_CELLS = {"#": WALL, "p": pack(Tiles.PYRAMID, Colors.BLUE), "s": pack(Tiles.SQUARE, Colors.PURPLE),
          "r": pack(Tiles.BALL, Colors.RED), "g": pack(Tiles.BALL, Colors.GREEN), "y": pack(Tiles.BALL, Colors.YELLOW)}


@functools.lru_cache(maxsize=None)
def _room(height: int, width: int):
    "A room with the figures' task, and its compiled reset; always the same object, so that what is compiled for it is compiled once."
    env, params = make("XLand-MiniGrid-R1-9x9", height=height, width=width, ruleset=figure_task(), view_size=5)
    return env, params, jax.jit(env.reset)(params, jax.random.key(0))


def stage(drawing: str):
    "The figures' task on a grid drawn as text: `(env, params, timestep)`; raises `ValueError` unless there is one agent, `^`, `>`, `v` or `<`."
    rows = drawing.split()
    places = [(r, c, "^>v<".index(x)) for r, row in enumerate(rows) for c, x in enumerate(row) if x in "^>v<"]
    if len(places) != 1:
        raise ValueError(f"A stage has one agent, ^, >, v or <; this one has {len(places)}.")
    (row, col, direction), = places
    env, params, timestep = _room(len(rows), len(rows[0]))
    cells = np.array([[_CELLS.get(x, FLOOR) for x in line] for line in rows], np.uint8)
    agent = AgentState(position=jnp.array([row, col], jnp.int32), direction=jnp.int32(direction))
    return env, params, timestep.replace(state=timestep.state.replace(cells=jnp.asarray(cells), agent=agent))


def play_out(env, params, timestep, actions) -> list:
    "The time steps of a list of actions, the one given first."
    step = jax.jit(env.step)
    return functools.reduce(lambda film, action: [*film, step(params, film[-1], action)], actions, [timestep])


def _picture(timestep, tile_size: int, view_size: int | None = None) -> np.ndarray:
    return render(timestep.state.cells, jax.tree.map(np.asarray, timestep.state.agent), view_size, tile_size)


_INK = "#1c2230"


def _words(draw, xy, text: str, size: int, anchor: str = "ma"):
    draw.multiline_text(xy, text, _INK, ImageFont.load_default(size), anchor=anchor, align="center" if anchor[0] == "m" else "left")


def panels(images, captions, columns: int, gap: int = 20, size: int = 13, arrows: bool = False) -> Picture:
    "Pictures in rows of `columns`, each with its caption below (lines separated by newlines), as one picture on white; arrows lead from one to the next if asked for."
    images = [Image.fromarray(np.asarray(i)) for i in images]
    width, height = max(i.width for i in images), max(i.height for i in images)
    below = 12 + (size + 5) * max(c.count("\n") + 1 for c in captions)
    rows = -(-len(images) // columns)
    page = Image.new("RGB", (gap + (width + gap) * min(columns, len(images)), gap + (height + below + gap // 2) * rows - gap // 2), "white")
    draw = ImageDraw.Draw(page)
    for k, (image, caption) in enumerate(zip(images, captions)):
        x, y = gap + (width + gap) * (k % columns), gap + (height + below + gap // 2) * (k // columns)
        page.paste(image, (x + (width - image.width) // 2, y + (height - image.height) // 2))
        _words(draw, (x + width / 2, y + height + 7), caption, size)
        if arrows and k % columns:
            tip, mid = x - 3, y + height / 2
            draw.polygon([(tip, mid), (tip - 9, mid - 6), (tip - 9, mid + 6)], _INK)
    return Picture(np.asarray(page), "; ".join(c.replace("\n", " ") for c in captions))


_RULE_STAGE = "####### #.....# #.p.s.# #.^...# #.....# #######"
_RULE_ACTIONS = (3, 1, 0, 2, 4)


def rule_film() -> list:
    "The time steps of figure 1, from the real environment."
    return play_out(*stage(_RULE_STAGE), _RULE_ACTIONS)


def figure_rule(tile_size: int = 24) -> Picture:
    "Figure 1: the near rule, step by step."
    film = rule_film()
    captions = ["blue pyramid and\npurple square", *(f"{t}. {ACTION_NAMES[a]}" for t, a in enumerate(_RULE_ACTIONS, 1))]
    captions[1] += ":\nthe pyramid is carried"
    captions[-1] += ": the rule\nmakes a red ball of both"
    return panels([_picture(t, tile_size) for t in film], captions, columns=3, gap=26, arrows=True)


_PATH_STAGE = "####### #g..y.# #.....# #....s# #.p...# #^....# #######"
_PATH = (0, 1, 3, 0, 0, 0, 4, 0, 2, 3, 0, 0, 2, 0, 0, 0, 4)  # one of the shortest ways, the one with the fewest events


@functools.lru_cache(maxsize=1)
def path_film() -> tuple[tuple[int, ...], list]:
    "The plan of figure 2 and its time steps. Raises `ValueError` if the exact search finds a shorter plan."
    env, params, start = stage(_PATH_STAGE)
    if (steps := shortest(None, start, env, params).steps) != len(_PATH):
        raise ValueError(f"The plan of figure 2 has {len(_PATH)} actions; the shortest has {steps}.")
    return _PATH, play_out(env, params, start, _PATH)


def _events(film) -> list[tuple[int, tuple, str]]:
    "What the agent does besides walking: step, the cell in front of it, and in words what comes of it."
    events = []
    for t, (a, b) in enumerate(zip(film, film[1:])):
        spot = tuple(int(v) for v in np.asarray(a.state.agent.position) + DIRECTIONS[int(a.state.agent.direction)])
        before, after = (pack_pairs(np.asarray(x.state.agent.pocket)) for x in (a, b))
        if before != after:
            thing = tile_name(int(max(before, after)) >> 4, int(max(before, after)) & 15)
            was, now = (np.asarray(x.state.cells).ravel().tolist() for x in (a, b))
            new = [v for v in now if now.count(v) > was.count(v) and v not in (int(before), int(FLOOR))]
            put = f"put down {thing}" + "".join(f": a {tile_name(v >> 4, v & 15)} appears" for v in new[:1])
            events.append((t, spot, f"pick up {thing}" if after > before else put))
    return events


def _track(film) -> list[list]:
    "Cells that the agent walks through, one list for each stretch between two events."
    stops, tracks = {t for t, _, _ in _events(film)}, [[]]
    for t, step in enumerate(film):
        cell = tuple(int(v) for v in step.state.agent.position)
        tracks[-1] += [cell] if tracks[-1][-1:] != [cell] else []
        if t in stops:
            tracks.append([cell])
    return tracks


_TRAIL = ("#FFFFFF", "#56B4E9", "#E69F00", "#CC79A7", "#F0E442")


def _draw_path(image: np.ndarray, film, tile: int) -> Image.Image:
    "The way of a film and its numbered events on a picture of its first frame; drawn larger and shrunk, for smooth lines."
    k = 4
    page = Image.fromarray(image).resize((image.shape[1] * k, image.shape[0] * k), Image.Resampling.NEAREST)
    draw, size = ImageDraw.Draw(page), tile * k
    for i, track in enumerate(_track(film)):
        off = (.5, .66, .34, .58, .42)[i % 5]
        line = [((c + off) * size, (r + off) * size) for r, c in track]
        if len(line) > 1:
            draw.line(line, _TRAIL[i % 5], size // 12, joint="curve")
            _arrow(draw, line[-2], line[-1], size / 5, _TRAIL[i % 5])
    for i, (_, (r, c), _) in enumerate(_events(film)):
        x, y, radius = (c + .8) * size, (r + .2) * size, size * .19
        draw.ellipse([x - radius, y - radius, x + radius, y + radius], "white", _INK, size // 30)
        draw.text((x, y), str(i + 1), _INK, ImageFont.load_default(size * .3), anchor="mm")
    return page.resize((image.shape[1], image.shape[0]), Image.Resampling.BOX)


def _arrow(draw, a, b, size, color):
    "A head at `b` for a line from `a`."
    way = np.subtract(b, a) / max(np.hypot(*np.subtract(b, a)), 1e-9)
    side, b = np.array([-way[1], way[0]]), np.asarray(b) + way * size * .5
    draw.polygon([tuple(b), tuple(b - size * way + .6 * size * side), tuple(b - size * way - .6 * size * side)], color)


def figure_path(tile_size: int = 48) -> Picture:
    "Figure 2: a task and the optimal path through it, found by exhaustive search."
    plan, film = path_film()
    grid = _draw_path(_picture(film[0], tile_size), film, tile_size)
    events = [f"{i}.  {words}" for i, (_, _, words) in enumerate(_events(film), 1)]
    goal, text = "goal: red ball next to green ball", [*events, "", f"{len(plan)} actions; no shorter plan exists"]
    page = Image.new("RGB", (grid.width + 16 + 330, grid.height + 20), "white")
    page.paste(grid, (10, 10))
    draw = ImageDraw.Draw(page)
    _words(draw, (grid.width + 28, 24), goal, 17, "la")
    for i, line in enumerate(text):
        y = 66 + 30 * i
        if i < len(events):
            draw.line([(grid.width + 28, y + 9), (grid.width + 44, y + 9)], {"#FFFFFF": "#9aa0ac"}.get(_TRAIL[i], _TRAIL[i]), 4)
        _words(draw, (grid.width + (52 if i < len(events) else 28), y), line, 14, "la")
    return Picture(np.asarray(page), f"{goal}; optimal path of {len(plan)} actions: {'; '.join(events)}")


def figure_tree() -> Drawing:
    "Figure 3: the task tree, goal at the top, the distractor rule below, as SVG."
    return draw_ruleset(figure_task())


_LAYOUTS = {"R1": (13, "one room"), "R2": (13, "two rooms"), "R4": (13, "four rooms"), "R6": (13, "six rooms"), "R9": (16, "nine rooms")}


def figure_layouts(side: int = 208, seed: int = 0) -> Picture:
    "Figure 14: a reset of every layout, drawn to the same size."
    images, captions = [], []
    for kind, (n, words) in _LAYOUTS.items():
        env, params = make(f"XLand-MiniGrid-{kind}-{n}x{n}", ruleset=figure_task())
        images.append(_picture(jax.jit(env.reset)(params, jax.random.key(seed)), side // n, params.view_size))
        captions.append(f"{kind}: {words}, {n} x {n}")
    return panels(images, captions, columns=5, gap=14)


def _families() -> dict[str, str]:
    "Task name to the id that shows it, for everything registered under MiniGrid."
    families: dict = {}
    for name in registered_environments():
        if name.startswith("MiniGrid-"):
            family = re.sub(r"-?([SNR]\d|\d+x\d|v\d).*$", "", name[9:])  # without the size at its end
            families.setdefault(family or name[9:], []).append(name)
    def suits(name):
        height, width = (getattr(make(name)[1], side) for side in ("height", "width"))
        return (True, height * width) if max(height, width) <= 10 else (False, -height * width)
    return {family: max(names, key=suits) for family, names in families.items()}


def _first_view(name: str, side: int, seed: int) -> np.ndarray:
    "The first moment of an environment with what its agent sees, at most `side` pixels large."
    env, params = make(name)
    timestep = jax.jit(env.reset)(params, jax.random.key(seed))
    seen = timestep.observation["img"] if isinstance(timestep.observation, dict) else timestep.observation
    agent, shape = jax.tree.map(np.asarray, timestep.state.agent), timestep.state.cells.shape
    visible = view_to_world(np.asarray(seen)[..., 0] != Tiles.UNSEEN, agent, shape)
    return render(timestep.state.cells, agent, tile_size=max(4, min(24, side // max(shape))), visible=visible)


def figure_minigrid(side: int = 176, seed: int = 0) -> Picture:
    "Figure 15: the first moment of every task ported from MiniGrid."
    families = _families()
    return panels([_first_view(name, side, seed) for name in families.values()], list(families), columns=5, gap=12)


FIGURES = {"figure_01_rule.png": figure_rule, "figure_02_path.png": figure_path, "figure_03_tree.svg": figure_tree,
           "figure_14_layouts.png": figure_layouts, "figure_15_minigrid.png": figure_minigrid}


def save_figures(folder) -> list[Path]:
    "Write figures 1, 2, 3, 14 and 15 into `folder`, which is made if need be; returns the paths."
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, make_figure in FIGURES.items():
        make_figure().save(folder / name)
    return [folder / name for name in FIGURES]


if __name__ == "__main__":
    for path in save_figures(*(sys.argv[1:] or ["docs/figures"])):
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
