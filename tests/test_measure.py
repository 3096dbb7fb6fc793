"""The measuring programs at tiny sizes: what their pages say, and what they refuse. No test looks at how fast something is."""
import numpy as np
import pytest

import xland_minigrid.benchmarks.registry as keeping
from xland_minigrid.benchmarks import generate_benchmark
from xland_minigrid.benchmarks.statistics import benchmark_statistics
from xland_minigrid.measure import statistics, throughput
from xland_minigrid.measure.tables import exact, expert, layouts, load, oracle, single_tasks
from xland_minigrid.measure.report import run, script
from xland_minigrid.measure.statistics import PAPER_TABLE_5, figure_4, mean_of, plot_statistics, save_figures, statistics_page

pytestmark = pytest.mark.newest


def page_of(program, words, tmp_path):
    "What a program writes with `--out`."
    out = tmp_path / "deep" / "page.md"
    run(program, [*words.split(), "--out", str(out)])
    return out.read_text(encoding="utf-8")


# ---------------------------------------------------------------- small programs


@pytest.mark.slow
def test_oracle(tmp_path):
    text = page_of(oracle.report, "--pairs 3 --presets trivial", tmp_path)
    assert "python -m xland_minigrid.measure.tables.oracle --pairs 3 --presets trivial" in text and text.count("| trivial |") == 2


@pytest.mark.slow
def test_expert(tmp_path):
    text = page_of(expert.report, "--pairs 3 --presets trivial --reference-tasks 0", tmp_path)
    assert "python -m xland_minigrid.measure.tables.expert --pairs 3 --presets trivial --reference-tasks 0" in text and text.count("| trivial |") == 3


# ---------------------------------------------------------------- statistics


@pytest.fixture(scope="module")
def bench():
    return generate_benchmark("medium", n=400, seed=3).to_numpy()


@pytest.fixture
def tiny(monkeypatch):
    "The only named benchmark: 300 tasks."
    made = generate_benchmark("small", n=300).to_numpy()
    monkeypatch.setattr(statistics, "generated_names", lambda: ["tiny"])
    monkeypatch.setattr(statistics, "load_benchmark", lambda name, **_: made)
    return made


def test_figures_show_what_was_counted(bench):
    named = {"trivial": benchmark_statistics(generate_benchmark("trivial", n=200)), "medium": benchmark_statistics(bench)}
    figure = figure_4(named)
    axis = figure.axes[0]
    assert "rules" in axis.get_xlabel() and "share" in axis.get_ylabel()
    for line, found in zip(axis.lines, named.values()):
        drawn = dict(zip(line.get_xdata(), line.get_ydata()))
        assert {k: round(v * found["num_rulesets"]) for k, v in drawn.items() if v} == found["rules_per_task"]
    assert [t.get_text() for t in axis.texts] == ["100%: trivial"] and axis.get_ylim()[1] < 0.6
    shown = plot_statistics(named["medium"] | {"depth": {0: 3, "none": 1}}, "medium")
    assert all(a.get_xlabel() and a.get_ylabel() for a in shown.axes if a.axison) and shown.get_suptitle() == "medium"
    assert [t.get_text() for t in shown.axes[1].get_xticklabels()] == ["0", "none"]


def test_figure_files_are_reproducible(bench, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(statistics, "plot_statistics", lambda found, title: drawn.append(title) or figure_4({"x": found}))  # drawn by others
    found = {"medium-1m": benchmark_statistics(bench)}
    paths, again = save_figures(found, tmp_path), save_figures(found, tmp_path / "again")
    assert all(x.read_bytes() == y.read_bytes() for x, y in zip(paths, again) if x.suffix == ".svg") and drawn == ["medium-1m, 400 tasks"] * 2
    assert {p.name for p in paths} == {"figure_04_rules.svg", "figure_04_rules.png", "statistics_medium_1m.svg", "statistics_medium_1m.png"}
    for path in paths:
        assert path.stat().st_size > 2_000


def test_statistics(tiny, tmp_path, capsys):
    text = page_of(statistics.report, f"--all --figures {tmp_path}/figures", tmp_path)
    assert "tiny: 300 tasks, 0 repeated, 0 not canonical" in capsys.readouterr().out
    assert "| tiny | 300 | 0 | 0 |" in text and "--all --figures PATH" in text and "## Sizes" not in text
    assert (tmp_path / "figures" / "figure_04_rules.png").exists()
    run(statistics.report, ["--names", "tiny", "--sizes"])
    assert "| tiny | 300 |  | 0.0 | 0.0 |  | 0.0" in capsys.readouterr().out


def test_statistics_fail_when_a_task_is_spoiled(tiny, monkeypatch, capsys):
    twice = tiny.take(np.array([*range(300), 0]))
    tiles = tiny.init_tiles.copy()
    tiles[3] = tiles[3, ::-1]
    for spoiled, says in ((twice, "1 repeated"), (tiny.replace(init_tiles=tiles), "1 not canonical")):
        monkeypatch.setattr(statistics, "load_benchmark", lambda name, **_: spoiled)
        with pytest.raises(SystemExit) as caught:
            script(statistics.report, ["--names", "tiny"])
        said = capsys.readouterr()
        assert caught.value.code == 2 and says in said.out and "# Contents of the benchmarks" in said.out and "tiny: a task is repeated" in said.err


@pytest.mark.parametrize("words, says", [([], "--all"), (["--names", "huge-9m"], "No recipe makes the benchmark huge-9m"), (["--names", "high-1m", "probes-30"], "No recipe makes the benchmark probes-30")])
def test_statistics_refuse(words, says, capsys):
    with pytest.raises(SystemExit) as caught:
        script(statistics.report, words)
    assert caught.value.code == 2 and says in capsys.readouterr().err


def test_sizes_stand_beside_the_paper():
    found, measured = benchmark_statistics(generate_benchmark("trivial", n=100)), {"tasks": 100, "memory": 23.04, "cache": 23.456, "packed": 5.7 * 1.05, "load": 0.01, "unpack": 0.2}
    text = statistics_page({"trivial-1m": found, "trivial-21k": found}, {"trivial-1m": measured, "trivial-21k": measured}).text("")
    assert "| trivial-1m | 100 | 38.0 | 23.0 | 23.5 | 5.7 | 5.99 | 1.05 | 0.010 | 0.20 |" in text and "| trivial-21k | 100 |  | 23.0 | 23.5 |  | 5.99 |  | 0.010 | 0.20 |" in text
    assert "| rules | trivial-1m | trivial-21k |" in text and "| 0 | 100.00 | 100.00 |" in text
    assert {*PAPER_TABLE_5, "trivial-21k"} == set(statistics.generated_names()) <= set(keeping.registered_benchmarks())


def test_nothing_to_draw_is_refused():
    for draw, what in ((figure_4, {}), (plot_statistics, {}), (figure_4, {"x": {}})):
        with pytest.raises(ValueError, match="nothing to draw"):
            draw(what)


# ---------------------------------------------------------------- the other programs, with made-up measurements


def row(engine, env="", tasks=None):
    return throughput.Row(throughput.Case(env, tasks), engine, np.array([0.26, 0.131072, 0.065]), 1.1, 2.0, 1.0, 0.01)


def made_up(module, name, found):
    return lambda monkeypatch: monkeypatch.setattr(module, name, lambda *_, **__: found)


POOL = {"sockets": {"64 sessions, uvloop": {"per_second": 10.0, "p50": 1.0, "p99": 2.0, "lost": 0}}, "batches": 5e4, "latency": {"serial": 2.0, "together": 0.5, "ratio": 4.0},
        "memory": {"sessions": 1000, "kilobytes": 20.0, "per_second": 10.0, "p50": 1.0, "p99": 2.0, "lost": 0}, "servers": 7e3}

PAGES = {
    "layouts": (layouts.report, "--envs 8 --repeats 2", made_up(layouts, "compare", [row("R1")]), "| R1 | 1.000 M | 0.504 – 2.016 M | 1.10 | 0.0100 |"),
    "tasks beyond the tables": (layouts.report, "--what tasks --envs 8", made_up(layouts, "compare", [row("plain")]), "| plain | 1.000 M | 0.504 – 2.016 M | 1.10 |"),
    "single tasks": (single_tasks.report, "--envs MiniGrid-Empty-5x5 MiniGrid-Empty-8x8 --seeds 7", made_up(single_tasks, "time_to_solve", {"seconds": 1.5, "steps": 4096, "solved": False, "tested": 0.5, "random": 0.1, "steps in the test": 9.0}), "| MiniGrid-Empty-8x8 | 7 | 1.5 | 4,096 | no | 50.0% | 10.0% | 9.0 |"),
    "pool": (load.report, "--repeats 1", lambda monkeypatch: [made_up(load, f"measure_{name}", found)(monkeypatch) for name, found in POOL.items()], "| 1,024 | 50,000 |"),
    "throughput": (throughput.report, "--env MiniGrid-Empty-5x5", made_up(throughput, "measure", [row("xland_minigrid", "MiniGrid-Empty-5x5")]), "| MiniGrid-Empty-5x5 | none | 1024 | xland_minigrid |")}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_was_measured_by_which_command(name, tmp_path, monkeypatch):
    program, words, prepare, line = PAGES[name]
    prepare(monkeypatch)
    text = page_of(program, words, tmp_path)
    assert line in text and f"`python -m {program.__module__} {words} --out PATH`" in text and "jax" in text
    assert all(row.count("|") == head.count("|") for head, row in zip(text.splitlines(), text.splitlines()[1:]) if head.startswith("|") and row.startswith("|"))


def test_exact(tmp_path, monkeypatch):
    monkeypatch.setattr(exact, "SMALL", ())
    monkeypatch.setattr(exact, "JUDGED", ())
    text = page_of(exact.report, "--seed 3", tmp_path)
    assert "measure.tables.exact --seed 3" in text and "## The prover" in text and text.endswith("### Surprises\n\nNone.\n")
