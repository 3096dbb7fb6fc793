"""The thirty probes on one sheet, each of them solved to watch, and the page that describes them.

    python .ci/gallery.py [FOLDER]   write probes.md and figures/probes.png (default: docs)
"""
import sys
import textwrap
from html import escape
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from xland_minigrid.baselines.evaluation import score_probes
from xland_minigrid.benchmarks.probes import PROBES, Probe, ProbeEnv, ProbeScores, probe_worlds
from xland_minigrid.core.actions import ACTION_NAMES
from xland_minigrid.viz.player import Player, play_rollout
from xland_minigrid.viz.render import Picture, render

_ENV = ProbeEnv()


def play_plans(probes) -> list:
    "Play the plans of probes: NumPy time steps `(par + 1,)` of each, from `reset(jax.random.key(0))`."
    played = {}
    for numbers, params in probe_worlds(probes):
        actions = np.full((len(numbers), max(probes[i].par for i in numbers)), -1, np.int32)
        for row, i in enumerate(numbers):
            actions[row, :probes[i].par] = probes[i].plan
        steps = jax.tree.map(np.asarray, _play(params, actions))
        played |= {i: jax.tree.map(lambda x: x[row, :probes[i].par + 1], steps) for row, i in enumerate(numbers)}
    return [played[i] for i in range(len(probes))]


@jax.jit
def _play(params, actions):
    def one(params, actions):
        first = _ENV.reset(params, jax.random.key(0))
        first = first.replace(state=first.state.replace(key=jax.random.key_data(first.state.key)))
        def step(timestep, action):
            timestep = _ENV.step(params, timestep, action)
            return timestep, timestep
        rest = jax.lax.scan(step, first, actions)[1]
        return jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, rest)
    return jax.vmap(one)(params, actions)


def probe_picture(probe: Probe, size: int = 396, state=None) -> Picture:
    "A start of a probe, that of `reset(jax.random.key(0))` unless given: about `size` pixels a side."
    state = probe.reset(jax.random.key(0)).state if state is None else state
    return Picture(render(state.cells, jax.tree.map(np.asarray, state.agent), tile_size=max(8, size // max(state.cells.shape))), probe.task)


_INKS = ("#4c566a", "#3b6fb6", "#7a4fa3", "#2b8a8a", "#b23a48", "#a06a1c", "#4f7f2a", "#b0508f", "#3d7d5a", "#8a5a44")


def _ink_of(probes) -> dict[str, str]:
    "A colour for each category, in the order in which they appear."
    return {category: _INKS[i % len(_INKS)] for i, category in enumerate(dict.fromkeys(p.category for p in probes))}


def _small_print(probe: Probe) -> str:
    start = {"fixed": "always this start", "random": "random start"}.get(probe.starts, f"one of {probe.starts.split()[0]} starts")
    return f"par {probe.par} · {start}"


def draw_gallery(probes=None, columns: int = 6):
    "All starts on one sheet: a matplotlib figure. Raises `ValueError` where there are no probes or no columns."
    from matplotlib.figure import Figure
    probes = list(PROBES if probes is None else probes)
    if not probes or columns < 1:
        raise ValueError("A gallery needs at least one probe and one column: check probes and columns.")
    rows, inks = -(-len(probes) // columns), _ink_of(probes)
    figure = Figure(figsize=(2.6 * columns, 3.5 * rows), dpi=110, facecolor="white")
    axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw=dict(left=.012, right=.988, top=1 - .5 / (3.5 * rows), bottom=.62 / (3.5 * rows), wspace=.07, hspace=.46))
    for axis in axes.flat:
        axis.axis("off")
    for number, (axis, p, steps) in enumerate(zip(axes.flat, probes, play_plans(probes)), 1):
        _hang(axis, number, p, inks[p.category], jax.tree.map(lambda x: x[0], steps.state))
    return figure


def _hang(axis, number: int, probe: Probe, ink: str, state) -> None:
    "One probe on its axis."
    axis.imshow(probe_picture(probe, state=state).pixels)
    say = lambda x, y, text, **style: axis.annotate(text, (x, y), xycoords="axes fraction", annotation_clip=False, **style)
    say(0, 1.125, probe.category.upper(), color=ink, fontsize=6.5, fontweight="bold", va="bottom")
    say(0, 1.025, f"{number}  {probe.name}", color="#1c2230", fontsize=10, fontweight="bold", va="bottom")
    say(0, -.03, "\n".join(textwrap.wrap(probe.task, 42)), color="#1c2230", fontsize=8, va="top", linespacing=1.2)
    say(1, 1.125, _small_print(probe), color="#6b7280", fontsize=6.5, va="bottom", ha="right")


def _captions(probe: Probe) -> list[str]:
    "One line a frame."
    moves = [f"{t}. {ACTION_NAMES[a]}" for t, a in enumerate(probe.plan, 1)]
    return ["start", *moves[:-1], f"{moves[-1]}: solved"]


def probe_players(probes=None) -> list[Player]:
    "The reference solutions of probes (all unless given) as players, all about equally wide."
    probes = list(PROBES if probes is None else probes)
    tile_size = lambda steps: 16 if steps.state.cells.shape[-1] <= 9 else 288 // steps.state.cells.shape[-1]  # a player doubles small frames
    return [play_rollout(steps, _captions(p), tile_size=tile_size(steps), fps=4, title=p.name) for p, steps in zip(probes, play_plans(probes))]


def gallery_html(probes=None) -> str:
    "Cards with name, task, question and a player each, as a piece of HTML that needs nothing else."
    probes = list(PROBES if probes is None else probes)
    inks, cards = _ink_of(probes), []
    for number, (p, player) in enumerate(zip(probes, probe_players(probes)), 1):
        cards.append(f'<section style="width:300px"><div style="font:600 11px system-ui;letter-spacing:.04em;color:{inks[p.category]}">{escape(p.category.upper())}</div>'
                     f'<h3 style="margin:0 0 4px;font:600 15px system-ui">{number} {escape(p.name)}</h3>{player._repr_html_()}'
                     f'<p style="font:13px/1.4 system-ui;margin:6px 0 0">{escape(p.task)} <span style="opacity:.7">{escape(p.probes)} {escape(_small_print(p).capitalize())}.</span></p></section>')
    return f'<div style="display:flex;flex-wrap:wrap;gap:26px 22px;align-items:flex-start">{"".join(cards)}</div>'


def save_gallery(path, probes=None, title: str = "Thirty probes") -> Path:
    "Write `gallery_html` as a page of its own, which opens in any browser; returns its path."
    page = ('<!doctype html>\n<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<title>{escape(title)}</title>\n<style>:root{{color-scheme:light dark}}body{{background:Canvas;color:CanvasText;margin:24px}}</style>\n'
            f'<h1 style="font:600 20px system-ui">{escape(title)}</h1>\n{gallery_html(probes)}\n</html>\n')
    Path(path).write_text(page, encoding="utf-8")
    return Path(path)


def probes_table(scores: ProbeScores) -> str:
    "All probes as a Markdown table with the success of `scores` in its first trial."
    lines = ["| | probe | category | task | what it probes | start | par | random actions |", "|---|---|---|---|---|---|---|---|"]
    for number, (p, row) in enumerate(zip(scores.probes, scores.rows()), 1):
        lines.append(f"| {number} | `{p.name}` | {p.category} | {p.task} | {p.probes} | {p.starts} | {p.par} | {row['success'][0]:.1%} |")
    return "\n".join(lines)


_PAGE = """# Thirty probes

Each of these small, hand-made tasks asks one question about an agent. They are in `xland_minigrid.benchmarks.probes`:
`probe("key-twice")` returns one, `PROBES` lists all, `probes_benchmark()` has their rulesets, and `score_probes(agent)`
plays them. `python .ci/gallery.py` makes this page.

![The starts of all thirty probes](figures/probes.png)

*Par* is the length of a shortest solution from `reset(jax.random.key(0))` for a player who knows rules, goal and map.
A breadth-first search over everything that the agent can do found it. The solution is `probe.plan`, and a test plays
it. A fixed start is the same in every trial. Random starts differ in par.

*Random actions* is the share of trials in which uniformly random actions reach the goal in time ({copies} trials for
each probe, seed {seed}). The standard error is at most {error:.1%}.

{table}

{categories}

The time limits are those of the environments (243 steps on 9x9, 507 on 13x13). The exceptions are `cue-and-fork` (12)
and `two-ways` (14), where the limit is part of the question.
"""


def write_page(folder="docs", copies: int = 1024, seed: int = 0, progress: bool = True) -> Path:
    "Write `probes.md` and `figures/probes.png` into a folder; returns the path of the page."
    scores = score_probes(copies=copies, num_trials=1, seed=seed, progress=progress)
    folder = Path(folder)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    draw_gallery().savefig(folder / "figures" / "probes.png")
    means = ", ".join(f"{name} {success[0]:.0%}" for name, success in scores.by_category().items())
    categories = textwrap.fill(f"Means over the probes of each category, for random actions: {means}.", 120)
    text = _PAGE.format(copies=copies, seed=seed, error=.5 / copies**.5, table=probes_table(scores), categories=categories)
    (folder / "probes.md").write_text(text, encoding="utf-8")
    return folder / "probes.md"


if __name__ == "__main__":
    print(write_page(*(sys.argv[1:] or ["docs"])))
