"The comparison with xminigrid's own trainer: what is said, counted and refused; nothing here trains."
import sys
import time

import numpy as np
import pytest

from xland_minigrid.measure.tables import trainers
from xland_minigrid.measure.report import run, script
from xland_minigrid.measure.tables.trainers import Trainer, TrainerRow, load_theirs, our_config, report, take_turns, trainers_page, trainers_table

pytestmark = pytest.mark.newest


def row(gru=64, theirs=(100, 200, 300), ours=(400, 600, 1500), epochs=1):
    return TrainerRow(gru, epochs, np.array(theirs, float), np.array(ours, float), np.full(3, 1e9), 250_000, 500_000)


def fake(folder, text="TrainConfig = 1"):
    for name in ("nn", "utils"):
        (folder / f"{name}.py").write_text(f"mark = {str(folder)!r}\n")
    (folder / "train_meta_task.py").write_text(f"import pyrallis, wandb, nn, utils\n@pyrallis.wrap()\ndef command(config: object): pass\ndef train(): return nn.mark, utils.mark\n{text}\n")
    return folder


def test_ratio_is_the_median_of_pairs_and_not_the_ratio_of_medians():
    r = row(theirs=(100, 200, 1000), ours=(500, 300, 1000))
    assert r.ratio == 1.5 != np.median(r.ours) / np.median(r.theirs)


def test_share_counts_one_pass_for_acting_and_three_an_epoch():
    assert row().share("theirs") == pytest.approx(250_000 * 4 * 200 / 1e9)
    assert row(epochs=2).share("ours") == pytest.approx(500_000 * 7 * 600 / 1e9)


def test_table_says_ratio_range_and_shares():
    head, rule, line = trainers_table([row()]).split("\n")
    assert "**4.00** | 3.00 – 5.00 |" in line and head.count("|") == rule.count("|") == line.count("|") == 8


def test_report_has_command_circumstances_and_every_row():
    text = trainers_page([row(), row(1024)], our_config(64), 3).text("the command")
    assert "`the command`" in text and "jax" in text and "| 64 |" in text and "| 1024 |" in text and "512 agents" in text


@pytest.mark.parametrize("missing", ["train_meta_task", "nn", "utils"])
def test_wrong_folder_is_one_sentence_before_anything_is_compiled(tmp_path, missing, monkeypatch, capsys):
    (fake(tmp_path) / f"{missing}.py").unlink()
    monkeypatch.setattr(trainers, "our_trainer", None)
    with pytest.raises(FileNotFoundError, match=f"no {missing}.py in .*: pass the folder training/") as caught:
        next(report(tmp_path))
    with pytest.raises(SystemExit) as left:
        script(report, ["--folder", str(tmp_path)])
    said = capsys.readouterr().err.strip().split("\n")
    assert left.value.code == 2 and said == [str(caught.value)]


def test_their_modules_leave_no_trace(tmp_path):
    folder, path = fake(tmp_path), list(sys.path)
    before = set(sys.modules)
    assert load_theirs(folder).train() == (str(folder), str(folder))
    assert sys.path == path and not {"nn", "utils", "train_meta_task"} & (set(sys.modules) - before)


def test_two_folders_are_two_trainers(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    assert [load_theirs(fake(folder)).train()[0] for folder in folders] == [str(folder) for folder in folders]


def test_missing_package_is_named(tmp_path):
    with pytest.raises(ModuleNotFoundError, match="needs the package no_such_package: pip install"):
        load_theirs(fake(tmp_path, "import no_such_package"))
    assert "train_meta_task" not in sys.modules


def test_array_defaults_are_explained(tmp_path):
    with pytest.raises(ValueError, match="default_factory"):
        load_theirs(fake(tmp_path, "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: list = []"))


@pytest.mark.parametrize("changes", [{"num_envs": 0}, {"steps": 0}, {"minibatches": 0}, {"num_envs": 10, "minibatches": 4}])
def test_impossible_work_is_refused(changes):
    with pytest.raises(ValueError):
        our_config(64, **changes)


@pytest.mark.parametrize("sizes, repeats", [((), 3), ((64, 0), 3), ((64,), 0)])
def test_impossible_plans_are_refused(tmp_path, sizes, repeats):
    with pytest.raises(ValueError, match="numbers from 1 on"):
        next(report(fake(tmp_path), sizes, repeats))


def test_turns_alternate_after_one_call_each(monkeypatch):
    monkeypatch.setattr(trainers, "matmul_peak", lambda seconds: 1e9)
    calls, clock = [], [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[-1])
    theirs, ours = (Trainer(lambda name=name: (calls.append(name), clock.append(clock[-1] + 0.001)), flops) for name, flops in (("theirs", 1), ("ours", 2)))
    r = take_turns(theirs, ours, our_config(64), repeats=2)
    assert calls == ["theirs", "ours"] * 3 and (r.their_flops, r.our_flops, r.gru) == (1, 2, 64)
    assert np.allclose(r.ours, 512 * 32 / 0.001)


def test_each_size_is_written_when_it_is_done(tmp_path, monkeypatch):
    out, sizes = tmp_path / "more" / "table.md", []

    def turns(theirs, ours, config, repeats):
        gru = config.network.memory
        sizes.append(gru)
        if gru == 256:
            assert "| 64 |" in out.read_text()
            raise KeyboardInterrupt
        return row(gru)
    monkeypatch.setattr(trainers, "take_turns", turns)
    monkeypatch.setattr(trainers, "our_trainer", lambda *_: None)
    monkeypatch.setattr(trainers, "their_trainer", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        run(report, ["--folder", str(fake(tmp_path)), "--sizes", "64", "256", "--envs", "16", "--out", str(out)])
    assert sizes == [64, 256] and "--folder PATH --sizes 64 256 --envs 16 --out PATH`" in out.read_text()


def test_our_side_is_plain():
    config = our_config(40, 96, 8, 3)
    assert (config.num_envs, config.steps_per_update, config.steps_per_task, config.steps_per_round) == (96, 8, 8, 768)
    assert (config.ppo.num_minibatches, config.network.memory) == (3, 40)
    assert config.network.encoder_kind == "conv" and not config.network.event and not config.network.attention and not config.ppo.belief_coef


@pytest.mark.slow
def test_our_trainer_does_update_after_update(monkeypatch):
    monkeypatch.setattr(trainers, "TASKS", 20)
    trainer = trainers.our_trainer(our_config(8, 8, 4, 2))
    state = trainer.once.__closure__[trainer.once.__code__.co_freevars.index("state")]
    for number in (1, 2):
        assert trainer.once() is None and int(state.cell_contents.round) == number
    assert trainer.flops > 0
