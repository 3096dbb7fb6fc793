"""Many devices and many hosts: who computes an agent must not matter."""
import dataclasses
import json
import os
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

from xland_minigrid.baselines import demo, ppo, rl2, scale
from xland_minigrid.baselines.curriculum import CurriculumConfig
from xland_minigrid.baselines.metrics import read_metrics
from xland_minigrid.baselines.networks import NetworkConfig
from xland_minigrid.baselines.ppo import PPOConfig

SMALL = NetworkConfig(embedding=4, encoder_width=16, event=8, memory=16, head=16)
TINY = rl2.TrainConfig(size=5, max_steps=12, total_steps=3 * 64 * 24, num_envs=64, steps_per_task=24, steps_per_update=12,
                       ppo=PPOConfig(num_minibatches=4), network=SMALL, loggers=("jsonl",), devices=1)

# The same for processes of their own.
COMMON = """
import dataclasses, json, sys
import jax, numpy as np
from xland_minigrid.baselines import demo, rl2
from xland_minigrid.baselines.curriculum import CurriculumConfig
from xland_minigrid.baselines.networks import NetworkConfig
from xland_minigrid.baselines.ppo import PPOConfig
from xland_minigrid.baselines.scale import initialize

SMALL = NetworkConfig(embedding=4, encoder_width=16, event=8, memory=16, head=16)
TINY = rl2.TrainConfig(size=5, max_steps=12, total_steps=3 * 64 * 24, num_envs=64, steps_per_task=24, steps_per_update=12,
                       ppo=PPOConfig(num_minibatches=4), network=SMALL, loggers=("jsonl",), devices=1)
make_tasks = lambda: demo.hold_tasks(demo.OBJECTS, 100)
flat = lambda agent: np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(agent.parameters)])
"""


def start(script, *words, devices=1):
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return subprocess.Popen([sys.executable, "-c", COMMON + textwrap.dedent(script), *map(str, words)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(process, timeout=400):
    out, err = process.communicate(timeout=timeout)
    assert process.returncode == 0, err[-3000:]
    return out


# One process, many devices ------------------------------------------------------------------------------------------------------------

def alike_on_one_and_four(folder, network=SMALL, **changes):
    "Train on one device and on four, in this process; the rows of metrics of the former."
    config, tasks = dataclasses.replace(TINY, network=network, **changes), demo.hold_tasks(demo.OBJECTS, 100)
    flat = lambda run: np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(run.agent.parameters)])
    one, four = (rl2.train(dataclasses.replace(config, devices=n, out=str(folder / str(n))), tasks, progress=False) for n in (1, 4))
    np.testing.assert_allclose(flat(one), flat(four), atol=2e-4)
    assert len(one.metrics) == 3 and one.metrics[0]["trials"] > 0
    for a, b in zip(one.metrics, four.metrics, strict=True):
        assert a.keys() == b.keys()
        np.testing.assert_allclose(*([row[k] for k in a if k != "seconds"] for row in (a, b)), rtol=2e-3, atol=2e-3)
    return one.metrics


def test_four_devices_train_as_one_does(tmp_path):
    "Parameters and metrics."
    alike_on_one_and_four(tmp_path, ppo=PPOConfig(num_minibatches=4, update_epochs=1))


@pytest.mark.slow
def test_four_devices_train_as_one_does_whatever_is_asked(tmp_path):
    "A curriculum that tries candidates, growing worlds, agents that are shown their goal, and a second memory."
    rows = alike_on_one_and_four(tmp_path, dataclasses.replace(SMALL, neighbors=True, goal_conditioned_core=8), size=6, rooms=(5,), show_goal=0.5,
                                 curriculum=CurriculumConfig(kind="sfl", buffer=16, candidates=32, period=2, trials=2))
    assert {"success_shown", "curriculum_filled"} <= rows[0].keys()


def test_agents_act_alike_wherever_they_are_computed():
    logits, draw = np.random.default_rng(0).normal(size=(40, 6)), jax.jit(ppo.draw_actions)
    whole = np.asarray(draw(jax.random.key(1), np.arange(40), logits))
    for part in (slice(0, 7), slice(13, 14), slice(30, 40)):
        assert (np.asarray(draw(jax.random.key(1), np.arange(40)[part], logits[part])) == whole[part]).all()


def test_devices_deal_as_one_does():
    config, agents = PPOConfig(num_minibatches=4, update_epochs=3), 32
    deal = jax.jit(lambda part: ppo.minibatch_indices(jax.random.key(0), config, part))
    whole = np.asarray(deal(np.arange(agents)))
    assert (np.sort(whole.reshape(3, -1), 1) == np.arange(agents)).all(), "every agent is in every epoch once"
    assert len({tuple(row) for row in np.sort(whole, 1)}) > 8, "epochs deal anew"
    for devices in (2, 4):
        parts = np.concatenate([part[np.asarray(deal(part))] for part in np.split(np.arange(agents), devices)], axis=1)
        assert (np.sort(whole, 1) == np.sort(parts, 1)).all()


def test_devices_that_do_not_fit_are_refused():
    config = dict(num_envs=32, steps_per_task=40, steps_per_update=20, network=SMALL)
    for wrong, sentence in [(dict(devices=10_000), "there are"), (dict(device="tpu"), "finds no tpu"), (dict(devices=0), "choose from 1")]:
        with pytest.raises(ValueError, match=sentence):
            rl2.train(rl2.TrainConfig(**config, **wrong, ppo=PPOConfig(num_minibatches=4)))

    class Three:
        size = 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rl2, "make_mesh", lambda *_: Three)
        with pytest.raises(ValueError, match="shared equally by 3 devices"):
            rl2.mesh_of(rl2.TrainConfig(**config, ppo=PPOConfig(num_minibatches=4)))


# Many processes -----------------------------------------------------------------------------------------------------------------------

def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.mark.slow
def test_two_processes_train_as_one_does(tmp_path):
    "Gloo on loopback: parameters bit for bit the same on both, and near those of one process; Ctrl-C in one stops both; a resume goes on."
    script = """
        number, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
        joined = initialize(f"127.0.0.1:{port}", 2, number, timeout=120) if port != "0" else False
        tasks = make_tasks()
        config = dataclasses.replace(TINY, devices=None, out=out)

        def stop(row):  # the other process has to learn of it
            if number == 0 and row["steps"] == 2 * config.steps_per_round:
                raise KeyboardInterrupt

        half = rl2.train(config, tasks, progress=False, on_round=stop)
        run = rl2.train(config, tasks, progress=False, resume=True)
        np.save(f"{out}-{number}", flat(run.agent))  # too much for a pipe that is read later
        print(json.dumps([joined, jax.process_count(), len(jax.devices()), len(run.metrics), half.interrupted, half.agent.steps, run.agent.steps]))
    """
    port = free_port()
    both = [start(script, i, port, tmp_path / "both") for i in range(2)]
    first, second = (json.loads(finished(p).splitlines()[-1]) for p in both)
    alone = json.loads(finished(start(script, 0, 0, tmp_path / "alone")).splitlines()[-1])
    assert first[:3] == second[:3] == [True, 2, 2] and alone[:3] == [False, 1, 1]
    parameters = [np.load(tmp_path / f"{name}.npy") for name in ("both-0", "both-1", "alone-0")]
    assert (parameters[0] == parameters[1]).all(), "bit for bit"
    np.testing.assert_allclose(parameters[0], parameters[2], atol=2e-4)
    assert first[3] == 3 and first[4] and first[4:] == second[4:] == alone[4:]
    rows = [[{k: v for k, v in r.items() if k != "seconds"} for r in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("both", "alone")]
    for a, b in zip(*rows, strict=True):
        np.testing.assert_allclose([a[k] for k in a], [b[k] for k in a], rtol=2e-3, atol=2e-3)


@pytest.mark.slow
def test_a_process_that_never_comes_is_not_waited_for_for_ever(tmp_path):
    process = start("""
        try:
            initialize(f"127.0.0.1:{sys.argv[1]}", 2, 1, timeout=5)
        except RuntimeError as error:
            print(error)
    """, free_port())
    out, err = process.communicate(timeout=120)
    assert "could not be joined" in out or process.returncode != 0, (out, err)


def test_clusters_are_recognised():
    assert not scale.on_cluster({}) and not scale.on_cluster({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "1"}) and not scale.on_cluster({"TPU_WORKER_HOSTNAMES": "localhost"})
    for there in [{"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}, {"OMPI_COMM_WORLD_SIZE": "2"}, {"TPU_WORKER_HOSTNAMES": "a,b"},
                  {"KUBERNETES_SERVICE_HOST": "h", "JOB_COMPLETION_INDEX": "1"}]:
        assert scale.on_cluster(there), there


def test_half_an_address_is_refused():
    for wrong in [dict(processes=2), dict(coordinator="h:1"), dict(coordinator="h:1", processes=2), dict(coordinator="h:1", processes=2, process=2),
                  dict(coordinator="h:1", processes=2, process=-1)]:
        with pytest.raises(ValueError):
            scale.initialize(**wrong)
