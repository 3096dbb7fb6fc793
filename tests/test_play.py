"""Playing by hand: keys in a terminal, words in a pipe, and a terminal that is given back as it was."""
import io
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time

import pytest

from xland_minigrid.cli import main
from xland_minigrid.envs.registration import make
from xland_minigrid.viz.control import KEYS, Session, control, play_keys, play_lines, read_line

pytestmark = pytest.mark.newest

# A game whose terminal is its controlling one, so that Ctrl-C in it becomes a signal; programs started in the background ignore that signal, and hand this on.
GAME = "import fcntl, signal, sys, termios; signal.signal(signal.SIGINT, signal.default_int_handler); fcntl.ioctl(0, termios.TIOCSCTTY, 0); from xland_minigrid.cli import main; sys.exit(main())"
SHOWN = [""]  # what the last call of `keys` put on the screen
SOLUTION = "wwdww"  # MiniGrid-Empty-5x5 from its corner to the goal


@pytest.fixture(scope="module")
def world():
    return make("MiniGrid-Empty-5x5")


@pytest.fixture(scope="module")
def session_of(world):
    "Sessions that share their compiled functions."
    first = Session(*world, name="room")
    def fresh(**settings):
        session = Session.__new__(Session)
        session.__dict__.update(first.__dict__, trial=0, trials=[], moments=[], show_task=False, show_help=False, **settings)
        session.begin_trial()
        return session
    return fresh


# Words -------------------------------------------------------------------------------------------------------------------------------

def test_lines_are_understood():
    table = [
        ("forward", [0]), ("FORWARD, left", [0, 2]), ("wwdp", [0, 0, 1, 3]), ("0 5", [0, 5]), ("", []), ("# nothing", []), ("pick up", [3]),
        ("put down # comment", [4]), ("reset quit", ["reset", "quit"]), ("turn counter-clockwise turn clockwise", [2, 1]), ("h", ["task"]), ("up", [0]), ("down", [4]),
    ]
    assert [(line, read_line(line)) for line, commands in table if read_line(line) != commands] == []


def test_a_line_that_is_not_understood_says_what_would_be():
    for line in ["jump", "6", "-1", "forwardd", "wwz", "1.5", "１２", "forward;left"]:
        with pytest.raises(ValueError, match=f"{line.split(';')[0]}.* is not a command: use forward"):
            read_line(line)


def test_every_action_has_a_key_and_every_key_a_meaning():
    assert {c for c in KEYS.values() if isinstance(c, int)} == set(range(6))
    assert {c for c in KEYS.values() if isinstance(c, str)} == {"reset", "quit", "task", "help"}


# Sessions ----------------------------------------------------------------------------------------------------------------------------

def test_a_trial_ends_and_the_next_one_begins_with_the_next_action(session_of):
    session = session_of()
    for command in read_line(SOLUTION):
        assert session.do(command)
    assert session.timestep.last() and session.rewards == [pytest.approx(1 - .9 * 5 / 100)] and session.trial == 1
    session.do(0)
    assert session.trial == 2 and session.timestep.first() and len(session.rewards) == 1


def test_a_frame_shows_grid_agent_pocket_and_counts(session_of):
    from rich.text import Text
    session = session_of()
    session.do(0)
    plain = Text.from_markup(session.frame()).plain.splitlines()
    assert plain[0].startswith("room  trial 1, step 1 of 100")
    assert plain[1:6] == ["██████████", "██· > · ██", "██· · · ██", "██· · ▣ ██", "██████████"] and plain[6] == "carrying: nothing"
    session.view = True
    view = Text.from_markup(session.frame()).plain.splitlines()[1:8]
    assert view[6] == "××××██^ · · ██" and all(len(line) == 14 for line in view)


def test_the_task_is_hidden_until_asked_for(session_of):
    session = session_of()
    assert "goal" not in session.frame().lower()
    session.do("task")
    assert "goal" in session.frame().lower()
    session.do("task")
    assert "goal" not in session.frame().lower()


def test_the_same_seed_plays_the_same_world():
    frames = []
    for seed in (7, 7, 8):
        out = io.StringIO()
        control("XLand-MiniGrid-R1-9x9", seed=seed, file_in=io.StringIO("w\nr\nw"), file_out=out)
        frames.append(out.getvalue())
    assert frames[0] == frames[1] != frames[2]


# A pipe ------------------------------------------------------------------------------------------------------------------------------

def test_lines_play_and_quit_ends(session_of):
    from rich.console import Console
    out = io.StringIO()
    play_lines(session_of(), ["forward", "", "q", "jump"], Console(file=out, force_terminal=False))
    assert out.getvalue().count("step") == 2 and "\x1b" not in out.getvalue()


def test_a_mistake_names_its_line_and_ends_with_status_1(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("forward\nhop"))
    assert main(["play", "MiniGrid-Empty-5x5"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("xland-minigrid: Line 2: 'hop' is not a command") and err.count("\n") == 1 and "step 1" in out


def test_wrong_settings_end_in_one_sentence(monkeypatch, capsys):
    table = [
        (["MiniGrid-Nowhere"], "Unknown environment"),
        (["MiniGrid-Empty-5x5", "--ruleset", "0"], "has no rulesets"),
        (["XLand-MiniGrid-R1-9x9", "--ruleset", "0"], "--benchmark NAME"),
        (["XLand-MiniGrid-R1-9x9", "--benchmark", "none-such"], "neither a file nor one of"),
        (["MiniGrid-Empty-5x5", "--save", "film.mp4"], ".html or .gif"),
        (["MiniGrid-Empty-5x5", "--view-size", "4"], "odd number"),
    ]
    for words, said in table:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        assert main(["play", *words]) == (2 if "none-such" in words else 1), words  # 2 is for files of tasks
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1, (words, err)


def test_a_task_of_a_benchmark_by_number(tmp_path, monkeypatch, capsys):
    path = str(tmp_path / "tasks.safetensors")
    assert main(["benchmark", "generate", "--preset", "trivial", "--n", "20", "--out", path]) == 0
    from xland_minigrid.benchmarks import load_benchmark_from_path
    monkeypatch.setattr(sys, "stdin", io.StringIO("h"))
    assert main(["play", "XLand-MiniGrid-R1-9x9", "--benchmark", path, "--ruleset", "3"]) == 0
    goal = load_benchmark_from_path(path).get_ruleset(3).describe().splitlines()[0]
    assert goal in " ".join(capsys.readouterr().out.split())
    assert main(["play", "XLand-MiniGrid-R1-9x9", "--benchmark", path, "--ruleset", "20"]) == 1
    assert "has 0 to 19" in capsys.readouterr().err


def test_what_was_played_can_be_kept(tmp_path):
    for name in ("film.html", "film.gif"):
        session = control("MiniGrid-Empty-5x5", save=str(tmp_path / name), file_in=io.StringIO(SOLUTION + "w"), file_out=io.StringIO())
        assert len(session.moments) == 7 and (tmp_path / name).stat().st_size > 1000
    assert "trial 2" in (tmp_path / "film.html").read_text()


# A terminal --------------------------------------------------------------------------------------------------------------------------

def drain(master, until=None, game=None, seconds=120.0):
    "What the terminal shows until some words appear, or until nothing more comes, or nothing more can: the game is over."
    text, end = "", time.monotonic() + seconds
    while time.monotonic() < end and (until is None or until not in text):
        if select.select([master], [], [], .2 if until is None else 1)[0]:
            try:
                text += os.read(master, 65536).decode(errors="replace")
            except OSError:
                break
        elif until is None or (game is not None and game.poll() is not None):
            break
    assert until is None or until in text, text
    return text


@pytest.fixture
def terminal():
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    yield master, slave, before
    os.close(master)
    os.close(slave)


def restored(slave, before):
    now = termios.tcgetattr(slave)
    return now[:4] == before[:4] and now[6] == before[6]


def keys(master, slave, session, pressed: bytes):
    "Play until `pressed` is used up or the game ends; what is shown is read at the same time, as a terminal does."
    shown, done = [], threading.Event()
    def show():
        while not done.is_set() or select.select([master], [], [], .1)[0]:
            if select.select([master], [], [], .1)[0]:
                shown.append(os.read(master, 65536).decode(errors="replace"))
    reader = threading.Thread(target=show)
    reader.start()
    os.write(master, pressed)
    try:
        with open(slave, "r", closefd=False) as stdin, open(slave, "w", closefd=False) as stdout:
            play_keys(session, stdin.fileno(), stdout)
    finally:
        done.set()
        reader.join()
        SHOWN[:] = ["".join(shown)]


def test_keys_move_the_agent_and_quit_gives_the_terminal_back(terminal, session_of):
    master, slave, before = terminal
    session = session_of()
    keys(master, slave, session, b"\x1b[A\x1bOAd\x1b[Bzq")
    assert int(session.timestep.state.step_num) == 4 and tuple(session.timestep.state.agent.position) == (1, 3)
    shown, = SHOWN
    assert restored(slave, before) and shown.endswith("\x1b[?25h\x1b[?1049l")
    assert "step 4 of 100" in shown and "'z' does nothing" in shown


def test_an_error_gives_the_terminal_back(terminal, session_of):
    master, slave, before = terminal
    session = session_of()
    session._step = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        keys(master, slave, session, b"w")
    assert restored(slave, before) and SHOWN[0].endswith("\x1b[?25h\x1b[?1049l")


@pytest.mark.parametrize("how, status", [("\x03", 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)])
def test_interrupted_from_outside_the_terminal_is_given_back(how, status, terminal):
    master, slave, before = terminal
    env = {**os.environ, "TERM": "xterm-256color", "JAX_PLATFORMS": "cpu"}
    game = subprocess.Popen([sys.executable, "-c", GAME, "play", "MiniGrid-Empty-5x5"], stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=env)
    try:
        drain(master, until="press ? for help", game=game)
        os.write(master, b"w")
        drain(master, until="move forward", game=game)
        assert not restored(slave, before)
        os.write(master, how.encode()) if isinstance(how, str) else game.send_signal(how)
        rest = drain(master, until="\x1b[?1049l", game=game)
        assert game.wait(120) == status and restored(slave, before) and "Traceback" not in rest + drain(master)
    finally:
        game.kill()
        game.wait()
