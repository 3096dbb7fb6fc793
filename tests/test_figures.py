"""What the docs build draws of the world: the paper's figures."""
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / ".ci"))
import figures

from xland_minigrid.core.tiles import Colors, Tiles, pack
from xland_minigrid.envs.registration import registered_environments

pytestmark = pytest.mark.newest

PYRAMID, SQUARE, RED = (Tiles.PYRAMID, Colors.BLUE), (Tiles.SQUARE, Colors.PURPLE), (Tiles.BALL, Colors.RED)


def places(timestep, thing):
    return np.argwhere(np.asarray(timestep.state.cells) == pack(*thing)).tolist()


def test_the_rule_of_figure_1_fires():
    film = figures.rule_film()
    assert places(film[0], PYRAMID) == [[2, 2]] and places(film[0], SQUARE) == [[2, 4]] and not places(film[0], RED)
    assert tuple(film[1].state.agent.pocket) == PYRAMID and places(film[4], SQUARE) == [[2, 4]]
    assert places(film[5], RED) == [[2, 4]] and not places(film[5], SQUARE) and not places(film[5], PYRAMID)


def test_a_stage_has_one_agent():
    with pytest.raises(ValueError, match="one agent"):
        figures.stage("### #.# ###")


def test_figure_15_shows_every_family():
    families = figures._families()
    assert {"Empty", "EmptyRandom"} <= set(families) and set(families.values()) <= set(registered_environments())


@pytest.mark.slow
def test_all_figures_are_written(tmp_path):
    plan, film = figures.path_film()
    assert film[-1].last() and film[-1].reward > 0 and not any(t.last() for t in film[:-1]) and len(film) == len(plan) + 1
    assert [words for _, _, words in figures._events(film)] == ["pick up blue pyramid", "put down blue pyramid: a red ball appears", "pick up red ball", "put down red ball"]
    for path in figures.save_figures(tmp_path):
        assert 1000 < path.stat().st_size < 100_000
