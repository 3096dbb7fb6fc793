"""The form of the tutorials: what a reader may expect of each, and that exercises have one source."""
import importlib
import json
import re
import statistics
import sys
from pathlib import Path

import pytest

from xland_minigrid.tutor import EXERCISES, all_exercises
from xland_minigrid.tutor.exercise import MODULES, SHORT

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".ci"))
import colab
import exercises

pytestmark = pytest.mark.newest

NAMES = ("00_five_minutes", "01_anatomy_of_a_ruleset", "02_the_environment", "03_benchmarks", "04_scaling_with_vmap", "05_ppo_from_scratch", "06_rl2",
         "07_what_has_it_learned", "08_many_sessions_at_once", "09_grpo", "10_make_it_yours", "11_learning_from_histories", "12_a_world_of_your_own")
APPENDICES = ("appendix_jax",)  # they count on: the exercises of this one are 13.1 and 13.2
NUMBERED = [ROOT / "tutorials" / f"{name}.ipynb" for name in NAMES]
PATHS = NUMBERED + [ROOT / "tutorials" / f"{name}.ipynb" for name in APPENDICES]
HEADING = re.compile(r"^### Exercise (\d+\.\d+) · (.+)\n\n(●○○ easy|●●○ medium|●●● hard) · (\d+) minutes\n\n", re.MULTILINE)
LEVELS = {"●○○ easy": 1, "●●○ medium": 2, "●●● hard": 3}

each = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def cells(path, kind=None):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if kind in (None, cell["cell_type"])]


def source(cell):
    return "".join(cell["source"])


def known_in(path):
    "The exercises that a tutorial's module has for it, by number. (One module serves tutorials 10 and 12.)"
    importlib.import_module(f"xland_minigrid.tutor.{MODULES[PATHS.index(path)]}")
    return {number: exercise for number, exercise in sorted(EXERCISES.items()) if number.split(".")[0] == str(PATHS.index(path))}


def prose(path):
    return "\n\n".join(source(cell) for cell in cells(path, "markdown"))


def test_there_are_thirteen_and_an_appendix():
    assert sorted(path.stem for path in (ROOT / "tutorials").glob("*.ipynb")) == [*NAMES, *APPENDICES] and len(MODULES) == len(PATHS)


def test_each_short_size_stands_in_one_tutorial():
    "Behind the cell that imports the checker. Otherwise tests would silently run the sizes of a reader."
    code = {path.stem: [source(cell) for cell in cells(path, "code")] for path in NUMBERED}
    found = {long: [name for name, texts in code.items() if any(long in text for text in texts[1:])] for long in SHORT}
    assert {long: names for long, names in found.items() if len(names) != 1} == {}
    assert all("import" in code[name][0] and "as check" in code[name][0] for (name,) in found.values())


@each
def test_it_says_what_it_is_about(path):
    first = source(cells(path)[0])
    assert cells(path)[0]["cell_type"] == "markdown" and first.startswith("# ")
    assert re.search(r"\*.*(\d+|Five) minutes? to (read|watch).*comput", first, re.DOTALL), "say how long it takes, for a reader and for a machine"
    assert re.search(r"\bneed\b", first), "say what a reader needs to know"
    assert re.search(r"\*\*You will learn\*\*\n\n1\. ", prose(path))
    numbers = [int(number) for number in re.findall(r"^## (\d+)\. ", prose(path), re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1)), "a section is missing"
    assert "## What to read next" in source([cell for cell in cells(path) if cell["cell_type"] == "markdown"][-1])


@each
def test_cells_are_short_and_text_comes_first(path):
    lines = [source(cell).count("\n") + 1 for cell in cells(path, "code")]
    assert statistics.median(lines) <= 6 and max(lines) <= 25
    kinds = "".join(cell["cell_type"][0] for cell in cells(path))
    assert kinds.startswith("m") and "cccc" not in kinds, "a fourth cell of code without a word between"


@each
def test_questions_and_answers_fold(path):
    text = prose(path)
    assert text.count("<details>") == text.count("</details>") == text.count("<summary>")
    for inside in re.findall(r"<details>(.*?)</details>", text, re.DOTALL):
        assert re.match(r"<summary>[^<]+</summary>\n\n.+\n\n$", inside, re.DOTALL), "Markdown inside wants empty lines around it"


@each
def test_exercises_have_a_head_a_hint_a_solution_and_a_check(path):
    module, found = MODULES[PATHS.index(path)], HEADING.findall(prose(path))
    assert len(found) >= 2 and len(found) == len(re.findall(r"^#+ Exercise \d", prose(path), re.MULTILINE))
    assert f"from xland_minigrid.tutor import {module} as check" in "\n".join(map(source, cells(path, "code")))
    known = known_in(path)
    assert [number for number, *_ in found] == list(known), "every exercise with a checker is in the tutorial, in order"
    assert {exercise.check.__module__ for exercise in known.values()} == {f"xland_minigrid.tutor.{module}"}
    for number, title, level, minutes in found:
        assert number.split(".")[0] == str(PATHS.index(path))
        assert (title, LEVELS[level], int(minutes)) == (known[number].title, known[number].level, known[number].minutes)
    for exercise in known.values():
        before, answer, check = around(path, exercise)
        assert "<summary>Hint</summary>" in source(before)
        assert colab.is_exercise(answer) and colab.SOLUTION.search(source(answer))
        assert any("✓" in "".join(output.get("data", {}).get("text/plain", "")) for output in check["outputs"]), "the kept verdict on our own solution"


def around(path, exercise):
    "The text before an exercise, its cell, and the cell that checks it."
    all_cells = cells(path)
    at = next(i for i, cell in enumerate(all_cells) if cell["cell_type"] == "code" and re.search(rf"^check\.{exercise.__name__}\(", source(cell), re.MULTILINE))
    answer = max(i for i in range(at) if colab.is_exercise(all_cells[i]))
    text = next(all_cells[i] for i in range(answer, -1, -1) if all_cells[i]["cell_type"] == "markdown")
    return text, all_cells[answer], all_cells[at]


@each
def test_the_students_copy_is_open(path):
    copy = [source(cell) for cell in cells(ROOT / "colab" / path.name)]
    tags = [cell for cell in cells(ROOT / "colab" / path.name, "code") if colab.is_exercise(cell)]
    assert not any("SOLUTION" in text for text in copy) and all("# your answer here" in source(cell) for cell in tags)
    assert sum("<summary>Solution</summary>" in text for text in copy) == len(tags)


@each
def test_every_checker_is_shown_wrong_answers(path):
    "The library chapter does it, by `rejects`, which asks for three."
    module = MODULES[PATHS.index(path)]
    (chapter,) = (ROOT / "nbs" / "tutor").glob(f"*_{module}.ipynb")
    text = "\n".join(map(source, cells(chapter, "code")))
    for exercise in known_in(path).values():
        assert re.search(rf"\brejects\({exercise.__name__},", text), exercise


@pytest.mark.parametrize("name", APPENDICES)
def test_a_list_links_each_appendix(name):
    assert f"(tutorials/{name}.ipynb)" in (ROOT / "README.md").read_text(encoding="utf-8")


@each
def test_figures_and_outputs_are_kept(path):
    code = cells(path, "code")
    assert sum(bool(cell["outputs"]) for cell in code) >= len(code) / 3
    assert not [cell for cell in code for output in cell["outputs"] if output["output_type"] == "error" and "raises-exception" not in cell["metadata"].get("tags", ())]
    assert path.stat().st_size <= 1_500_000


def test_what_is_not_solved_is_no_error():
    "As in a student's copy that is run from top to bottom. (`rejects` tries functions that do nothing, in the chapters.)"
    for exercise in all_exercises().values():
        for answer in (..., None):
            verdict = exercise(answer)
            assert not verdict and "Nothing here yet" in verdict.message and "\n" not in repr(verdict), verdict


# The instructor's guide --------------------------------------------------------------------------------------------------------------

GUIDE = (ROOT / exercises.GUIDE).read_text(encoding="utf-8")
TUTORIALS = exercises.numbered()


def listed(numbers):
    "The sections that a text such as `1, 4 to 6 and 8` lists."
    for first, last in re.findall(r"(\d+)(?: to (\d+))?", numbers):
        yield from map(str, range(int(first), int(last or first) + 1))


LIST = r"(\d+(?:(?:, | and | to )\d+)*)"
MENTION = re.compile(rf"tutorial (\d+)|(?<![\d:.])([01]\d)(?![\d:.])|sections? {LIST}")


def mentioned(line):
    "Tutorial and section for each section that a line names; a section belongs to the tutorial named last."
    tutorial = None
    for named, short, sections in MENTION.findall(line):
        tutorial = (named or short).zfill(2) if named or short else tutorial
        yield from ((tutorial, section) for section in listed(sections))


def misplaced(line):
    "Exercises of a line whose tutorial is given with sections that do not contain them."
    for tutorial, sections in re.findall(rf"\b([01]\d), sections? {LIST}", line):
        place = {number: section for number, *_, section in exercises.exercises(TUTORIALS[tutorial])}
        yield from (number for number in re.findall(r"\b\d+\.\d+\b", line) if number in place and place[number] not in listed(sections))


def test_the_guide_names_sections_that_exist():
    known = {number: exercises.sections(path).values() for number, path in TUTORIALS.items()}
    found = [pair for line in GUIDE.splitlines() for pair in mentioned(line)]
    assert len(found) >= 20 and [pair for pair in found if pair[1] not in known.get(pair[0], ())] == []
    titles = re.findall(r"\| ([01]\d)(?:,| to) \*(.+?)\*", GUIDE)
    assert titles and [pair for pair in titles if pair[1] not in known[pair[0]]] == []


def test_the_guide_says_where_exercises_stand():
    plans = GUIDE[GUIDE.index("## Schedules"):GUIDE.index("## All exercises")]
    numbers = {number for path in TUTORIALS.values() for number, *_ in exercises.exercises(path)}
    assert set(re.findall(r"(?<=[ |])\d{1,2}\.\d(?=[ ,.;|])", plans)) <= numbers
    assert [(line, wrong) for line in plans.splitlines() if (wrong := list(misplaced(line)))] == []


def test_the_guide_lists_every_exercise():
    assert exercises.table() in GUIDE and exercises.table().count("\n") == len(all_exercises()) + 1


def test_places_that_are_wrong_are_found():
    assert list(mentioned("| 01 | a, section 2 and sections 3 to 5 | tutorial 7, section 9; 10:45 |")) == [
        ("01", "2"), ("01", "3"), ("01", "4"), ("01", "5"), ("07", "9")]
    assert list(mentioned("06, sections 1, 2 and 4")) == [("06", "1"), ("06", "2"), ("06", "4")]
    assert list(misplaced("| 06, sections 3 to 5 | 6.1, 0.1 |")) == ["6.1"] and not list(misplaced("| 06, section 2 | 6.1 |"))


# What makes the copies ---------------------------------------------------------------------------------------------------------------

def code(text, tags=("exercise",), id="a"):
    return {"cell_type": "code", "id": id, "metadata": {"tags": list(tags)}, "source": text.splitlines(keepends=True), "outputs": [], "execution_count": None}


FUNCTION = "def double(n):\n    ### BEGIN SOLUTION\n    m = n\n    return m + n\n    ### END SOLUTION\n"
VALUE = "### BEGIN SOLUTION: forge = ...\nforge = 1\n### END SOLUTION\nprint(forge)"


def test_stub_and_solution():
    table = [
        (FUNCTION, "def double(n):\n    ...  # your answer here", "def double(n):\n    m = n\n    return m + n"),
        (VALUE, "forge = ...  # your answer here\nprint(forge)", "forge = 1\nprint(forge)"),
        ("a = 1\n### BEGIN SOLUTION\nb = 2\n### END SOLUTION", "a = 1\n...  # your answer here", "a = 1\nb = 2"),
        (FUNCTION + "\n" + VALUE, "def double(n):\n    ...  # your answer here\n\nforge = ...  # your answer here\nprint(forge)", "def double(n):\n    m = n\n    return m + n\n\nforge = 1\nprint(forge)"),
    ]
    for text, stub, solution in table:
        assert colab.stub(text) == stub and colab.solution(text) == solution


def test_links_of_a_copy_lead_somewhere_from_anywhere():
    table = [("01_anatomy_of_a_ruleset.ipynb", "colab/01_anatomy_of_a_ruleset.ipynb"), ("../docs/pool.md", "/blob/main/docs/pool.md"), ("../nbs/core/06_rules.ipynb#x", "/nbs/core/06_rules.ipynb#x"),
             ("https://jax.dev", "](https://jax.dev)"), ("#here", "](#here)")]
    for link, leads in table:
        cell = {"cell_type": "markdown", "id": "t", "metadata": {}, "source": [f"See [this]({link}) and `f(x)[1](../y)`."]}
        made = source(colab.copied(cell))
        assert leads in made and ("](https://" in made or link.startswith("#"))


def test_solutions_follow_their_checks():
    text = {"cell_type": "markdown", "id": "t", "metadata": {}, "source": ["Next."]}
    first, second = code(FUNCTION, id="one"), code(VALUE, id="two")
    made = colab.opened([first, code("check.a(double)", ()), text, second, code("check.b(forge)", ())])
    assert [cell["id"] for cell in made] == ["one", "a", "one-solution", "t", "two", "a", "two-solution"]
    assert colab.opened([first, second])[1]["id"] == "one-solution" and colab.opened([first])[-1]["id"] == "one-solution"
    assert colab.opened([text]) == [text]
    assert "m = n" in "".join(made[2]["source"]) and "m = n" not in "".join(made[0]["source"])
