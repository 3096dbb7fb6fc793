"""The checks nearest to a change, for three minutes.

    python .ci/quick.py [--since COMMIT] [--seconds 180]

Runs the chapters, tests and tutorials that the files changed since COMMIT reach through imports (`graph.py`), nearest first, two at a time, without what is slow. COMMIT
is by default where this branch left its upstream, or else the last commit. When the time is up, it lists the checks that did not run. Fails if one of those that ran failed.
"""
import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from graph import Graph, changed_since
from settings import ROOT

BIN = Path(sys.executable).parent
if (flags := Path(sys.prefix) / "xla-flags").exists():
    os.environ.setdefault("XLA_FLAGS", flags.read_text())
# Files that steer every test: a change to one of them is known only to the whole of `make test`.
EVERYWHERE = ("conftest.py", "tests/conftest.py", "pyproject.toml", "Makefile")
PYTEST = (sys.executable, "-m", "pytest", "--quiet", "--no-header", "-x")


def command(file):
    "How one check is run by itself."
    if file.startswith("nbs/"):
        return (BIN / "nbdev_test", "--path", file, "--n_workers", "0")
    if file.startswith("tutorials/"):
        return (*PYTEST, "--nbval", "--nbval-current-env", "--nbval-cell-timeout", "600", "--nbval-sanitize-with", "tests/nbval_sanitize.cfg", file)
    return (*PYTEST, "-m", "not slow", file)


def upstream():
    "The commit where this branch left its upstream; the last commit where it has none or is level with it."
    done = subprocess.run(["git", "merge-base", "HEAD", "@{upstream}"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "HEAD"


class Lanes:
    "Runs checks two at a time until the time is up; `results` has `(distance, file, seconds, outcome)`, in the order in which they ended."

    def __init__(self, checks, seconds, lanes=2):
        self.waiting, self.results, self.lock = list(checks), [], threading.Lock()
        self.end = time.monotonic() + seconds
        threads = [threading.Thread(target=self.work) for _ in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def work(self):
        while True:
            with self.lock:
                if not self.waiting or time.monotonic() >= self.end:
                    return
                distance, file = self.waiting.pop(0)
            began = time.monotonic()
            outcome, said = run(command(file), self.end - began)
            with self.lock:
                self.results.append((distance, file, time.monotonic() - began, outcome))
                print(f"{outcome:>8}  {file}  {time.monotonic() - began:.0f} s", flush=True)
                if outcome == "FAILED":
                    print(said[-8000:], flush=True)


def run(words, seconds):
    "`(outcome, output)` of one command: passed, FAILED, or cut off when its seconds were used up."
    process = subprocess.Popen([str(word) for word in words], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    try:
        said, _ = process.communicate(timeout=seconds)
        return ("passed" if process.returncode in (0, 5) else "FAILED"), said  # 5: nothing in this file is fast
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return "cut off", process.communicate()[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--since", default=None, metavar="COMMIT", help="what the working tree is compared with")
    parser.add_argument("--seconds", type=float, default=180)
    options = parser.parse_args()
    began = time.monotonic()
    since = options.since or upstream()
    changed = changed_since(since)
    if not changed:
        print(f"Nothing differs from {since}: nothing to run. `make quick SINCE=COMMIT` compares with another commit.")
        return 0
    print(f"{len(changed)} files differ from {since}.")
    failed = subprocess.run([sys.executable, ".ci/sync.py", "--check"], cwd=ROOT).returncode != 0
    checks = Graph().checks(changed)
    lanes = Lanes(checks, options.seconds - (time.monotonic() - began))
    count = lambda outcome: sum(result[3] == outcome for result in lanes.results)
    left = sorted([(distance, f"{file} (cut off)") for distance, file, _, outcome in lanes.results if outcome == "cut off"] + lanes.waiting)
    print(f"\n{count('passed')} passed, {count('FAILED')} failed in {time.monotonic() - began:.0f} s; {len(left)} of {len(checks)} left out.")
    if left:
        print("Left out, nearest first (the distance counts imports): " + ", ".join(f"{distance} {file}" for distance, file in left))
    if steering := [file for file in changed if file in EVERYWHERE]:
        print(f"{', '.join(steering)} changed, which steers every test: run `make test` as well.")
    if other := [file for file in changed if file not in EVERYWHERE and file not in Graph().files]:
        print(f"Not Python, so no import leads to them: {', '.join(other)}. tests/test_docs.py and tests/test_project.py read such files.")
    return int(failed or count("FAILED") > 0)


if __name__ == "__main__":
    sys.exit(main())
