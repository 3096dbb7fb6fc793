"""The command line, from the outside: what it prints, what it leaves behind, and how it fails."""
import json

import pytest

from xland_minigrid.cli import main

TINY = ["--size", "5", "--max-steps", "6", "--num-envs", "16", "--steps-per-task", "12", "--steps-per-update", "12", "--total-steps", "1920",
        "--network.encoder", "16", "--network.memory", "16", "--network.head", "16", "--ppo.num-minibatches", "2"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "tasks.safetensors"
    assert main(["benchmark", "generate", "--preset", "trivial", "--n", "300", "--seed", "1", "--out", str(path)]) == 0
    return path


@pytest.fixture(scope="module")
def run(tasks, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "rl2"
    assert main(["train", "--benchmark", str(tasks), "--held-out", "0.2", "--out", str(out), *TINY]) == 0
    return out


def test_train_leaves_metrics_config_and_checkpoint(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["steps"] == 1920 and all(a["steps"] < b["steps"] for a, b in zip(rows, rows[1:]))
    assert json.loads((run / "config.json").read_text())["network"]["memory"] == 16
    assert any((run / "checkpoints").iterdir()) and (run / "training.png").stat().st_size > 1000


def test_evaluate_plays_held_out_tasks(run, tmp_path, capsys):
    assert main(["evaluate", str(run), "--tasks", "20", "--trials", "3", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert {"RL² agent", "random"} == set(found) and all(len(curve["success"]) == 3 for curve in found.values())
    assert (tmp_path / "adaptation.png").exists() and "trial" in capsys.readouterr().out


@pytest.mark.slow
def test_evaluate_on_another_benchmark(run, tasks, capsys):
    assert main(["evaluate", str(run), "--benchmark", str(tasks), "--tasks", "8", "--trials", "2"]) == 0
    assert "random" in capsys.readouterr().out


def test_a_finished_folder_is_not_overwritten(run, tasks, capsys):
    assert main(["train", "--benchmark", str(tasks), "--held-out", "0.2", "--out", str(run), *TINY]) == 1
    assert "holds a run already" in capsys.readouterr().err


def test_info_counts_what_is_there(tasks, capsys):
    assert main(["benchmark", "info", str(tasks)]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["num_rulesets"] == 300 and info["recipe"]["random_seed"] == 1


@pytest.mark.slow
def test_demo_in_small_leaves_everything(tmp_path, capsys):
    assert main(["demo", "--fast", "--out", str(tmp_path / "demo")]) == 0
    out = capsys.readouterr().out
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert len(results["per_trial"]["RL² agent"]["success"]) == 5 and results["sentence"] in out
    for name in ("adaptation.png", "one_task.html", "one_task.gif", "metrics.jsonl"):
        assert (tmp_path / "demo" / name).stat().st_size > 500, name


def test_throughput_writes_its_circumstances(tmp_path, capsys):
    report = tmp_path / "throughput.md"
    assert main(["throughput", "--env", "XLand-MiniGrid-R1-9x9", "--num-envs", "16", "--num-steps", "8", "--repeats", "1", "--out", str(report)]) == 0
    text = report.read_text()
    assert text.count("| XLand-MiniGrid-R1-9x9 |") == 1 and "observations summed" in text and "jax " in text
    assert "steps/s" in capsys.readouterr().out


@pytest.mark.slow
def test_throughput_against_xminigrid_is_a_ratio(capsys):
    pytest.importorskip("xminigrid")
    assert main(["throughput", "--env", "XLand-MiniGrid-R1-9x9", "--num-envs", "64", "--num-steps", "32", "--repeats", "3", "--against", "xminigrid"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "| xminigrid |" in line]
    assert len(rows) == 1 and float(rows[0][7]) > 0


@pytest.mark.parametrize("words, said", [
    (["benchmark", "info", "no-such-benchmark"], "neither a file nor one of"),
    (["benchmark", "generate", "--preset", "huge", "--out", "x"], "trivial"),
    (["evaluate", "no-such-run"], "no-such-run"),
    (["throughput", "--env", "MiniGrid-Nowhere"], "choose one of"),
    (["train", "--benchmark", "no-such-benchmark", "--out", "nowhere"], "neither a file nor a benchmark"),
])
def test_foreseeable_mistakes_end_in_one_sentence(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 1
    err = capsys.readouterr().err
    assert err.startswith("xland-minigrid: ") and said in err and "Traceback" not in err and err.strip().endswith((".", "`"))
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_world_without_rulesets_cannot_be_trained_on(tasks, capsys, tmp_path):
    assert main(["train", "--env-id", "MiniGrid-Empty-8x8", "--benchmark", str(tasks), "--out", str(tmp_path / "run"), *TINY[2:]]) == 1
    assert "has no rulesets" in capsys.readouterr().err and not list(tmp_path.iterdir())
