"""The grader: what students send is judged by running it, and nothing that a student does keeps the others from being judged."""
import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nbclient")
from xland_minigrid.cli import main
from xland_minigrid.tutor import grade as module
from xland_minigrid.tutor.grade import Grade, Grades, NotGraded, exercises_in, find_exercise, find_notebooks, grade, grade_notebook, read_notebook

pytestmark = pytest.mark.newest

ROOT = Path(__file__).resolve().parent.parent
TASK, NEXT = "### Exercise 9.1 · Advantages by hand\n\n●○○ easy · 10 minutes", "### Exercise 8.4 · Means over thin ice"
GOOD = ("def advantages(returns, floor):\n    rs = [r for r in returns if r is not None]\n    mean = sum(rs) / len(rs) if rs else 0\n"
        "    size = (sum((r - mean)**2 for r in rs) / max(len(rs), 1))**0.5 + floor\n    return [0 if r is None else (r - mean) / size for r in returns]")
CHECK = "from xland_minigrid.tutor import grpo as check"


def write(path, *cells, **more):
    "A notebook whose texts begin with #, without cell ids, as old files are."
    cells = [{"cell_type": "markdown" if text.startswith("#") else "code", "metadata": {}, "source": text.splitlines(keepends=True)} for text in cells]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5} | more), encoding="utf-8")
    return path


def only(rows):
    (row,) = rows
    return row


SHORT = 2  # seconds for what never ends; everything else has its time, however busy the machine is


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    "A class that does what classes do, graded at once; student -> row."
    folder = tmp_path_factory.mktemp("class")
    write(folder / "loops.ipynb", CHECK, TASK, GOOD, "import time\nwhile True: time.sleep(0.1)")
    write(folder / "cheats.ipynb", CHECK, TASK, "advantages = lambda returns, floor: [r or 0 for r in returns]", "import xland_minigrid.tutor.exercise as e\n"
          "e.Exercise.__call__ = lambda self, answer: e.Verdict(self, True, 'Right.')\ncheck.advantages.check = lambda answer: 'Right.'\nimport sys\nsys.modules['xland_minigrid.tutor.grpo'] = e\n"
          "class check:\n    advantages = print\nprint, list, len = 1, 2, 3\n'✓ 9.1 Advantages by hand: Right.'",
          metadata={"widgets": {"application/vnd.jupyter.widget-state+json": {"ab": {}}}, "colab": {"provenance": []}})
    write(folder / "crashes.ipynb", TASK, GOOD, "import os\nos._exit(3)")
    write(folder / "later" / "loops_when_asked.ipynb", CHECK, TASK, "import time\ndef advantages(returns, floor):\n    while True: time.sleep(0.1)", "open('left_behind.txt', 'w')",
          NEXT, "async def mean_rewards(pool, rollout, tasks):\n    raise KeyError('no')")
    write(folder / "stumbles.ipynb", TASK, "y = nowhere + 1", "def advantages(returns) return 1", "%magic of no kind", NEXT, "async def mean_rewards(pool, rollout, tasks):\n    ...  # your answer here")
    write(folder / ".ipynb_checkpoints" / "solved.ipynb", "1/0")
    (folder / "text.ipynb").write_text("# no notebook")
    before = {path: path.read_bytes() for path in folder.rglob("*.ipynb")}

    async def cell(self, cell, at, name, real=module._Run.cell):
        endless = "while True" in cell.source or name == "The check of 9.1" and any("floor):\n    while True" in cell.source for cell in self.nb.cells)
        self.timeout = SHORT if endless else 600
        await real(self, cell, at, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Run, "cell", cell)
        rows = grade(folder, jobs=2)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before, "nothing is written beside or into what students sent"
    assert rows.status == 2 and len({row.notebook for row in rows}) == 6
    return {re.sub(r".*/(\w+)\.ipynb", r"\1", row.notebook) + (" 8.4" if row.exercise == "8.4" else ""): row for row in rows}


def test_unsolved(graded):
    row = graded["stumbles 8.4"]
    assert not row.ok and "return" in row.message, row


def test_a_changed_checker_and_a_printed_tick_gain_nothing(graded):
    assert not graded["cheats"].ok and "[1.0, 0.0]" in graded["cheats"].message


def test_a_cell_that_loops_is_interrupted_and_the_answer_still_counts(graded):
    assert graded["loops"].ok and graded["loops"][1:4] == ("9.1", "Advantages by hand", True) and graded["loops"].minutes == 10


def test_an_answer_that_loops_is_told_so(graded):
    assert not graded["loops_when_asked"].ok and re.search(f"took longer than {SHORT} s.*come to an end", graded["loops_when_asked"].message)


def test_a_dead_kernel_is_told_so(graded):
    assert graded["crashes"].message == "Cell 3 ended the kernel, so nothing could be checked."


def test_what_is_missing_and_why(graded):
    assert graded["stumbles"].message == "The notebook does not define `advantages`. Cell 2 stopped with NameError: name 'nowhere' is not defined."


def test_an_answer_that_raises(graded):
    assert not graded["loops_when_asked 8.4"].ok and "KeyError" in graded["loops_when_asked 8.4"].message


def test_what_is_no_notebook_has_a_row(graded):
    assert graded["text"][1:3] == ("", "") and "not JSON" in graded["text"].message


@pytest.mark.slow
def test_a_cell_that_will_not_be_interrupted(tmp_path):
    stubborn = write(tmp_path / "a.ipynb", TASK, "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: time.sleep(1)")
    row = only(grade_notebook(stubborn, timeout=2))
    assert re.fullmatch(r"Cell 2 took longer than 2 s and could not be interrupted, so nothing could be checked\.", row.message)


@pytest.mark.slow
def test_the_whole_time_is_bounded(tmp_path, monkeypatch):
    "By a clock that stands at 0, at 58 when the second cell begins, at 61 after it: the kernel of a busy machine needs no seconds of it."
    now, real = [0.0], module._Run.cell

    async def cell(self, cell, at, name):
        now[0] = {2: 58.0, 3: 61.0}.get(at, now[0])
        await real(self, cell, at, name)
    monkeypatch.setattr(module._Run, "cell", cell)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    row = only(grade_notebook(write(tmp_path / "a.ipynb", TASK, "advantages = 7", "import time; time.sleep(3600)", "advantages = 'eight'"), timeout=600, total=60))
    assert not row.ok and "int," in row.message


@pytest.mark.slow
def test_a_tutorials_solutions_pass_and_their_stubs_do_not():
    path = ROOT / "tutorials" / "09_grpo.ipynb"
    solved, opened = grade_notebook(path, timeout=600), grade_notebook(ROOT / "colab" / path.name, timeout=600)
    assert len(solved) >= 3 and solved.status == 0, solved
    assert [row.exercise for row in opened] == [row.exercise for row in solved] and not any(row.ok for row in opened), opened


# Reading -----------------------------------------------------------------------------------------------------------------------------

def test_what_cannot_be_graded_is_told_in_a_sentence(tmp_path):
    table = [
        ("", "not JSON"), ("# x", "not JSON"), ("[]", "no list of cells"), ("{}", "no list of cells"), ('{"cells": 3}', "no list of cells"), ('{"worksheets": []}', "no list of cells"), ('{"cells": []}', "no code"),
        ('{"cells": [{"cell_type": "code", "source": "  "}]}', "no code"), ('{"cells": [7, null]}', "no code"), ("[" * 100_000, "not JSON"),
        ('{"cells": [{"cell_type": "code", "source": "1"}], "metadata": {"kernelspec": {"language": "R"}}}', "written in R"),
    ]
    for text, says in table:
        (tmp_path / "a.ipynb").write_text(text)
        row = only(grade_notebook(tmp_path / "a.ipynb"))
        assert not row.ok and row.exercise == "" and says in row.message and row.message.endswith("."), (text[:80], row)


def test_bytes_and_folders_are_no_notebooks(tmp_path):
    (tmp_path / "a.ipynb").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.ipynb").mkdir()
    for name in "abc":
        with pytest.raises(NotGraded):
            read_notebook(tmp_path / f"{name}.ipynb")


def test_odd_metadata_is_no_reason_to_refuse(tmp_path):
    for metadata in [{}, None, 7, {"kernelspec": None}, {"kernelspec": "python3"}, {"kernelspec": {}}, {"kernelspec": {"language": "python"}}]:
        assert read_notebook(write(tmp_path / "a.ipynb", "1", metadata=metadata)) == [("code", "1")], metadata


def test_exercises_are_those_of_the_headings():
    assert exercises_in([("markdown", f"{NEXT}\n\ntext\n\n{TASK}"), ("code", "### Exercise 8.1 · in code")]) == ["8.4", "9.1"]
    for cells in ([("code", "check.advantages(1)")], [("markdown", "### Exercise · none"), ("code", CHECK)]):
        with pytest.raises(NotGraded, match="No exercise"):
            exercises_in(cells)


def test_an_exercise_that_does_not_exist(tmp_path):
    for number in ["8.99", "77.1", "eight", "", "8", "-1.1"]:
        with pytest.raises(NotGraded, match="no exercise"):
            find_exercise(number)
        assert "no exercise" in only(grade_notebook(write(tmp_path / "a.ipynb", "1"), exercises=[number])).message, number


# Many, and the table -----------------------------------------------------------------------------------------------------------------

def test_paths(tmp_path):
    a, b = write(tmp_path / "x" / "a.ipynb", "1"), write(tmp_path / "x" / "y" / "b.ipynb", "1")
    assert list(find_notebooks(tmp_path).values()) == [a, b] == list(find_notebooks([a, tmp_path / "x" / "y", b]).values())
    for wrong in (tmp_path / "nowhere", []):
        if wrong:
            with pytest.raises(ValueError, match="does not exist"):
                find_notebooks(wrong)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="contains no notebook"):
        find_notebooks(tmp_path / "none")


@pytest.mark.parametrize("wrong", [dict(timeout=0), dict(total=-1), dict(jobs=0)])
def test_times_and_jobs_are_positive(wrong, tmp_path):
    with pytest.raises(ValueError, match="positive"):
        grade(write(tmp_path / "a.ipynb", "1"), **wrong)


def test_tables(tmp_path):
    rows = Grades([Grade("a", "1.1", "<The forge>", True, "Right, \"all\" of it.", 10), Grade("a", "1.2", "More", False, "Not\nyet.", 5)])
    assert rows.status == 1 and rows.totals() == {"a": (1, 2)} and Grades(rows[:1]).status == 0
    assert "a: 1 of 2 solved" in repr(rows) and "✓ 1.1 <The forge>: Right" in repr(rows)
    with (rows.save(tmp_path / "g.csv")).open(newline="") as file:
        assert list(csv.reader(file)) == [list(Grade._fields), *[[str(x) for x in row] for row in rows]]
    assert [Grade(**row) for row in json.loads(rows.save(tmp_path / "g.json").read_text())] == rows
    with pytest.raises(ValueError, match="csv"):
        rows.save(tmp_path / "g.xlsx")


def test_the_command(tmp_path, capsys):
    (tmp_path / "a.ipynb").write_text("no")
    assert main(["grade", str(tmp_path / "a.ipynb"), "--out", str(tmp_path / "g.csv")]) == 2
    out = capsys.readouterr().out
    assert "not graded" in out and "1 notebook, 0 of 0 exercises solved" in out and "not JSON" in (tmp_path / "g.csv").read_text()
    assert main(["grade", str(tmp_path / "b.ipynb")]) == 1 and "does not exist" in capsys.readouterr().err
    assert main(["grade", str(tmp_path / "a.ipynb"), "--out", "g.xlsx"]) == 1 and "csv" in capsys.readouterr().err
