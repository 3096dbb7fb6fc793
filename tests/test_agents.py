"""The agents in the box: they are what their cards say."""
import jax
import numpy as np
import pytest

from xland_minigrid.baselines import agents, load_agent
from xland_minigrid.baselines.checkpoint import CheckpointError
from xland_minigrid.baselines.report import Protocol
from xland_minigrid.baselines.rl2 import load_tasks
from xland_minigrid.benchmarks import digest, load_benchmark
from xland_minigrid.benchmarks.splits import named_split

NAME = "r1-9x9-trivial"
HARD = "r4-13x13-high"


@pytest.mark.parametrize("name", (NAME, "r1-9x9-small", HARD))
def test_it_comes_out_of_the_box(name):
    agent, card = load_agent(name), agents.read_card(name)
    assert name in agents.boxed_agents()
    assert (agents.the_box() / f"{name}.safetensors").stat().st_size == card["bytes"] <= 3_000_000
    assert agent.steps == card["steps"] > 1_000_000 and agent.config.seed == card["seed"]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(agent.parameters))
    assert {"command", "versions", "config", "curve", "evaluation"} <= card.keys() and len(card["curve"]["steps"]) > 7
    curve = card["evaluation"]["agent"]["per_trial"]
    trials, more = (10, 0.0) if name == HARD else (25, 0.1)
    assert len(curve["success"]) == trials and curve["success_lo"][-1] > curve["success_hi"][0] + more, "it adapts, intervals apart"
    assert max(card["evaluation"]["random"]["per_trial"]["success"]) < curve["success_lo"][0]


@pytest.mark.parametrize("name", (NAME, "r1-9x9-small"))
def test_it_is_tested_on_the_named_split(name):
    "The goals on its card, those that its training held out, are those that every table holds out."
    config = load_agent(name).config
    tasks, (trained, unseen) = load_benchmark(config.benchmark), load_tasks(config)
    split = named_split(config.benchmark, tasks.goal_ids())
    assert digest(unseen) == digest(tasks.take(split.test)) and digest(trained) == digest(tasks.take(split.train))
    assert len(split.left_out) == 0 and set(unseen.goal_ids()).isdisjoint(trained.goal_ids())
    assert agents.read_card(name)["evaluation"]["agent"]["tasks"] >= 1024


def test_a_damaged_box_is_not_opened(tmp_path, monkeypatch):
    for name in (f"{NAME}.json", f"{NAME}.safetensors"):
        (tmp_path / name).write_bytes((agents.the_box() / name).read_bytes())
    monkeypatch.setattr(agents, "the_box", lambda: tmp_path)
    assert agents.open_box(NAME).steps == agents.read_card(NAME)["steps"]
    data = bytearray((tmp_path / f"{NAME}.safetensors").read_bytes())
    data[-100] ^= 1
    (tmp_path / f"{NAME}.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="install the package again"):
        agents.open_box(NAME)
    (tmp_path / f"{NAME}.safetensors").unlink()
    with pytest.raises(CheckpointError):
        agents.open_box(NAME)


def test_who_is_not_in_the_box():
    for name in ("nobody", "", "R1-9x9-trivial"):
        with pytest.raises(ValueError, match="in the box"):
            agents.read_card(name)


@pytest.mark.slow
def test_its_evaluation_is_that_of_its_card():
    "Other starts and actions than those of the card, tasks of the same held-out goals: means must agree within both intervals, and it must adapt again."
    agent, card = load_agent(NAME), agents.read_card(NAME)["evaluation"]["agent"]["per_trial"]
    again = agents.examine(agent, Protocol(num_tasks=512, seed=123, by=(), anchors=("random",)))
    curve = again["agent"].per_trial()
    for name in ("success", "steps"):
        off = np.abs(curve[name] - np.array(card[name]))
        wide = (curve[f"{name}_hi"] - curve[f"{name}_lo"] + np.array(card[f"{name}_hi"]) - np.array(card[f"{name}_lo"])) / 2
        assert (off < 1.5 * wide).all() and off.mean() < wide.mean(), name
    assert curve["success_lo"][-1] > curve["success_hi"][0] + 0.1 and curve["steps_hi"][-1] < curve["steps_lo"][0]
    assert again["random"].success.mean() < 0.1
