"""The command line, from the outside: what it prints, what it leaves behind, and how it fails."""
import dataclasses
import importlib
import json
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from xland_minigrid import cli
from xland_minigrid.baselines import agents, rl2
from xland_minigrid.baselines.report import Protocol, table
from xland_minigrid.benchmarks import Recipe, benchmark_file, digest, generate_benchmark, load_benchmark_from_path
from xland_minigrid.benchmarks.files import read_file
from xland_minigrid.cli import main
from xland_minigrid.measure.tables.box import put_into_box

pytestmark = pytest.mark.newest

TINY = ["--size", "5", "--max-steps", "6", "--num-envs", "16", "--steps-per-task", "12", "--steps-per-update", "12", "--total-steps", "1920",
        "--network.encoder-width", "16", "--network.memory", "16", "--network.head", "16", "--ppo.num-minibatches", "2"]


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
    assert main(["evaluate", str(run), "--tasks", "20", "--trials", "3", "--wiped", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "table.json").read_text())["per_trial"]
    assert {"RL² agent", "random", "reference", "memory wiped"} == set(found) and all(len(curve["success"]) == 3 for curve in found.values())
    assert found["random"]["score"] == [0] * 3 and found["reference"]["score"] == [1] * 3
    said = capsys.readouterr().out
    assert (tmp_path / "adaptation.png").exists() and (tmp_path / "by_depth.png").exists() and "| trial" in said and "score" in said


def test_a_run_goes_into_a_box(run, tmp_path, monkeypatch):
    "With what the card says of it next to a random policy and the reference player, as plain JSON."
    found = agents.examine(agents.load_agent(run), Protocol(num_tasks=20, num_trials=3, by=()))
    monkeypatch.setattr(agents, "the_box", lambda: tmp_path)
    put_into_box(run, "tiny", "train", found)
    card = json.loads((tmp_path / "tiny.json").read_text(), parse_constant=lambda c: pytest.fail(f"{c} is no JSON"))
    said = card["evaluation"]
    assert list(said) == ["agent", "random", "reference"] and said["reference"]["overall"]["score"] == [1, 1, 1]
    assert "score" in table(said) and agents.boxed_agents() == ["tiny"]
    assert agents.open_box("tiny").steps == 1920


@pytest.mark.slow
def test_evaluate_on_another_benchmark(run, tasks, capsys):
    assert main(["evaluate", str(run), "--benchmark", str(tasks), "--tasks", "8", "--trials", "2", "--no-score"]) == 0
    assert "random" in capsys.readouterr().out


def test_a_finished_folder_is_not_overwritten(run, tasks, capsys):
    assert main(["train", "--benchmark", str(tasks), "--held-out", "0.2", "--out", str(run), *TINY]) == 1
    assert "holds a run already" in capsys.readouterr().err


def test_info_counts_what_is_there(tasks, capsys):
    assert main(["benchmark", "info", str(tasks)]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["num_rulesets"] == 300 and info["recipe"]["random_seed"] == 1


def test_throughput_writes_its_circumstances(tmp_path, capsys):
    report = tmp_path / "throughput.md"
    assert main(["throughput", "--env", "XLand-MiniGrid-R1-9x9", "--num-envs", "16", "--num-steps", "8", "--repeats", "1", "--out", str(report)]) == 0
    text = report.read_text()
    assert text.count("| XLand-MiniGrid-R1-9x9 |") == 1 and "observations summed" in text and "jax " in text
    assert "steps/s" in capsys.readouterr().err, "with a file to write, the table is shown as it grows"


@pytest.mark.slow
def test_throughput_against_xminigrid_is_a_ratio(capsys):
    pytest.importorskip("xminigrid")
    assert main(["throughput", "--env", "XLand-MiniGrid-R1-9x9", "--num-envs", "64", "--num-steps", "32", "--repeats", "3", "--against", "xminigrid"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if "| xminigrid |" in line]
    assert len(rows) == 1 and float(rows[0][7]) > 0


# ---------------------------------------------------------------- benchmark


def test_every_field_of_a_recipe_is_an_option(tmp_path, capsys):
    "Each is given another value than the preset's, and each arrives."
    changed = {"chain_depth": 2, "sample_depth": True, "prune_chain": False, "prune_prob": 0.25, "num_distractor_rules": 1, "sample_distractor_rules": False,
               "num_distractor_objects": 4, "random_seed": 7, "goal_kinds": (1, 3), "rule_kinds": (1, 2, 3), "even_goals": True, "solvable": False}
    assert set(changed) == {field.name for field in dataclasses.fields(Recipe)}
    words = []
    for name, value in changed.items():
        option = name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{option}"] if isinstance(value, bool) else [f"--{option}", ",".join(map(str, value)) if isinstance(value, tuple) else str(value)]
    path = tmp_path / "tasks"
    assert main(["benchmark", "generate", "--preset", "high", "--n", "200", "--packed", "--out", str(path), *words]) == 0
    assert capsys.readouterr().out.startswith("200 tasks made") and [p.name for p in tmp_path.iterdir()] == ["tasks"]
    manifest = read_file(path)[1]
    assert manifest["recipe"] == json.loads(json.dumps(changed)) and manifest["form"] == "packed" and manifest["distinct_ruleset_ids"] == 200
    assert digest(load_benchmark_from_path(path)) == digest(generate_benchmark("high", n=200, **changed))


def test_an_interrupted_generate_goes_on(tmp_path, monkeypatch, capsys):
    import xland_minigrid.benchmarks.generate as making
    monkeypatch.setattr(making, "_ROUND", 64)
    real, rounds = making._candidates, []

    def counted(recipe, start, *rest):
        rounds.append(start)
        if len(rounds) == 3:
            raise KeyboardInterrupt
        return real(recipe, start, *rest)

    monkeypatch.setattr(making, "_candidates", counted)
    words = ["benchmark", "generate", "--preset", "small", "--n", "300", "--out", str(tmp_path / "tasks")]
    assert main(words) == 130 and "the same command continues" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["tasks.part"]
    assert main([*words, "--seed", "5"]) == 1 and "another recipe" in capsys.readouterr().err
    assert main(words) == 0 and rounds[3] == rounds[2] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["tasks"]
    assert main([*words, "--seed", "5"]) == 1 and "tasks exists" in capsys.readouterr().err  # and is not replaced
    assert digest(load_benchmark_from_path(tmp_path / "tasks")) == digest(generate_benchmark("small", n=300))


def test_convert_there_and_back(tasks, tmp_path, capsys):
    there, back = tmp_path / "packed", tmp_path / "back"
    assert main(["benchmark", "convert", str(tasks), str(there)]) == main(["benchmark", "convert", str(there), str(back)]) == 0
    assert [read_file(p)[1]["form"] for p in (tasks, there, back)] == ["cache", "packed", "cache"] and back.read_bytes() == tasks.read_bytes()
    assert "packed" in capsys.readouterr().out
    before, words = back.read_bytes(), ["benchmark", "convert", str(tasks), str(back), "--packed"]
    assert main(words) == 1 and "--force" in capsys.readouterr().err and back.read_bytes() == before
    assert main([*words, "--force"]) == 0 and back.read_bytes() == there.read_bytes()
    assert main(["benchmark", "convert", "probes-30", str(tmp_path / "probes")]) == 1 and "composed goals" in capsys.readouterr().err


def test_convert_from_xminigrid(tasks, tmp_path, capsys):
    from xland_minigrid.interop.upstream import benchmark_to_upstream
    ours = load_benchmark_from_path(tasks)
    (tmp_path / "theirs").write_bytes(pickle.dumps(benchmark_to_upstream(ours)))
    assert main(["benchmark", "convert", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert load_benchmark_from_path(tmp_path / "ours").ruleset_ids().tolist() == ours.ruleset_ids().tolist()


def test_deduplicate_says_what_was_there_twice(tasks, tmp_path, capsys):
    twice = load_benchmark_from_path(tasks).take([0, 1, 0, 2, 1]).save(tmp_path / "twice")
    assert main(["benchmark", "deduplicate", str(twice), str(tmp_path / "once")]) == 0
    out = capsys.readouterr().out
    assert "5 tasks, 3 distinct" in out and "3 tasks saved" in out
    assert load_benchmark_from_path(tmp_path / "once").ruleset_ids().tolist() == load_benchmark_from_path(tasks).ruleset_ids()[:3].tolist()


def test_list_stats_and_sizes(tasks, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLAND_MINIGRID_DATA", str(tmp_path / "data"))
    assert main(["benchmark", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9 and lines[0].startswith("trivial-1m") and "first use" in lines[0] and "with the package" in lines[7]
    path = benchmark_file("trivial-1m")
    path.parent.mkdir()
    path.write_bytes(tasks.read_bytes())
    assert main(["benchmark", "list"]) == 0 and path.name in capsys.readouterr().out
    assert main(["benchmark", "stats", str(tasks)]) == 0 and "| 300 |" in capsys.readouterr().out
    assert main(["benchmark", "sizes", str(tasks)]) == 0
    row = capsys.readouterr().out.splitlines()[2].split("|")
    assert row[2].strip() == "300" and float(row[7]) < float(row[5]) + 0.02


@pytest.mark.parametrize("verb", ["info", "convert", "deduplicate", "stats", "sizes"])
def test_a_wrong_file_is_one_sentence_and_status_2(verb, tasks, tmp_path, capsys):
    out = [str(tmp_path / "out")] if verb in ("convert", "deduplicate") else []
    whole, pickled = tasks.read_bytes(), pickle.dumps({"goals": __import__("os").system})
    for content in (b"", b"hello", whole[:-1], whole[:200], whole[:-9] + b"x" + whole[-8:], pickled, b"BZh91AY", b"[" * 9000):
        (tmp_path / "wrong").write_bytes(content)
        assert main(["benchmark", verb, str(tmp_path / "wrong"), *out]) == 2
        err = capsys.readouterr().err
        assert err.startswith("xland-minigrid: ") and "Traceback" not in err and err.count("\n") == 1, err
    for source in (tmp_path / "nowhere", tmp_path):
        assert main(["benchmark", verb, str(source), *out]) == 2 and capsys.readouterr().err.startswith("xland-minigrid: ")
    assert {p.name for p in tmp_path.iterdir()} == {"wrong"}
    if out:
        assert main(["benchmark", verb, str(tasks), "/proc/nowhere/file"]) == 2 and "Traceback" not in capsys.readouterr().err


def test_foreseeable_mistakes_end_in_one_sentence(capsys, monkeypatch, tmp_path):
    table = [
        (["benchmark", "generate", "--preset", "huge", "--out", "x"], "trivial"),
        (["evaluate", "no-such-run"], "no-such-run"),
        (["throughput", "--env", "MiniGrid-Nowhere"], "choose one of"),
        (["train", "--benchmark", "no-such-benchmark", "--out", "nowhere"], "neither a file nor a benchmark"),
    ]
    monkeypatch.chdir(tmp_path)
    for words, said in table:
        assert main(words) == 1, words
        err = capsys.readouterr().err
        assert err.startswith("xland-minigrid: ") and said in err and "Traceback" not in err and err.strip().endswith((".", "`")), (words, err)
        assert not list(tmp_path.iterdir()), f"nothing is left behind by {words}"


def test_a_world_without_rulesets_cannot_be_trained_on(tasks, capsys, tmp_path):
    assert main(["train", "--env-id", "MiniGrid-Empty-8x8", "--benchmark", str(tasks), "--out", str(tmp_path / "run"), *TINY[2:]]) == 1
    assert "has no rulesets" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_single_task_arrives_with_its_preset(monkeypatch, tmp_path, capsys):
    "What `train` would train is looked at; that it trains is slow."
    seen = []
    monkeypatch.setattr(rl2, "train", lambda config, resume, start: seen.append((config, resume, start)) or SimpleNamespace(interrupted=True))
    assert main(["train", "--env", "MiniGrid-Empty-5x5", "--total-steps", "65536", "--out", str(tmp_path / "run"), "--network.memory", "24", "--resume"]) == 0
    (config, resume, start), = seen
    assert main(["train", "--resume", "auto", "--preset", "rules", "--start", "r1-9x9-trivial"]) == 0 and start is None
    other, how, start = seen.pop()
    assert how == "auto" and other == rl2.preset("rules") and start.steps == agents.read_card("r1-9x9-trivial")["steps"]
    expected = rl2.preset("laptop", "MiniGrid-Empty-5x5")
    assert resume and config == dataclasses.replace(expected, total_steps=65536, out=str(tmp_path / "run"), network=dataclasses.replace(expected.network, memory=24))
    assert config.env_id == "MiniGrid-Empty-5x5" and capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_single_task_from_the_command_line(tmp_path, capsys):
    run = tmp_path / "run"
    small = ["--num-envs", "32", "--steps-per-task", "32", "--steps-per-update", "16", "--network.encoder-width", "16", "--network.memory", "16", "--network.head", "16"]
    assert main(["train", "--env", "MiniGrid-Empty-5x5", "--total-steps", "4096", "--out", str(run), *small, "--ppo.num-minibatches", "4"]) == 0
    assert main(["evaluate", str(run), "--tasks", "16", "--trials", "2", "--no-score", "--out", str(tmp_path / "report")]) == 0
    assert "random" in capsys.readouterr().out and (tmp_path / "report" / "table.csv").exists()


def test_what_cannot_be_trained_is_refused_in_a_sentence(capsys):
    table = [
        (["train", "--preset", "supercomputer"], "choose from laptop"), (["train", "--env", "MiniGrid-Emtpy-8x8"], "Empty-8x8"),
        (["train", "--device", "tpu", "--out", "nowhere"], "finds no tpu"), (["train", "--devices", "99", "--out", "nowhere"], "choose from 1"),
        (["train", "--processes", "2"], "coordinator"), (["evaluate", "no-such-agent"], "in the box"),
    ]
    for words, sentence in table:
        assert main(words) == 1, words
        assert sentence in capsys.readouterr().err, words


def test_commands_without_a_parser_of_their_own_are_programs_that_measure():
    names = [name for name, (_, add) in cli._COMMANDS.items() if add is None]
    assert names == ["grpo", "throughput", "compiled"]
    for module in ("tables.grpo", "throughput", "compiled", "tables.compiled"):
        assert callable(importlib.import_module(f"xland_minigrid.measure.{module}").report)


@pytest.mark.parametrize("name", ["grpo", "compiled"])
def test_programs_that_only_a_clone_has_say_so(name, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    assert main([name]) == 1 and f"Only a clone of the repository has {name}" in capsys.readouterr().err
