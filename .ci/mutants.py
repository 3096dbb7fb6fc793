"""Seed faults into the package one at a time, and see whether the fast tests notice.

    python .ci/mutants.py [--seed 0] [--each 12] [--lanes 2] [--only NUMBER ...]

From each of five subpackages the seed draws `--each` places in function bodies, and changes each of them a little (`OPERATORS`). A fault is put into a copy of the tree, into the module and
its chapter, and the checks that the module reaches run there, nearest first, until one fails. Results are kept in `.cache/mutants.jsonl`, so an interrupted run goes on where it was;
when all are known, the table `docs/results/mutants.md` is written. Reasons for survivors are written into that table by hand, and are kept. `--only` runs some faults again.
"""
import argparse
import ast
import itertools
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from graph import Graph
from quick import command
from settings import ROOT, settings

PACKAGE = settings["lib_name"]
TABLE, JOURNAL = ROOT / "docs" / "results" / "mutants.md", ROOT / ".cache" / "mutants.jsonl"
ROOMS = ("core", "envs", "benchmarks", "baselines", "pool")
MEASURING = {"demo", "device"}  # programs that write tables
HANG = 300  # seconds after which one check counts as hanging: many times what the longest of them takes
BOUNDED = ("sh", "-c", 'ulimit -d 8000000; exec "$@"', "sh")  # a fault that makes a loop endless may fill the memory: 8 GB end it

BINARY = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "//", ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<"}
COMPARE = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"}


# Each operator takes a node and the text of any node, and returns the text that stands in the node's place, or None where it has nothing to change.

def other_arithmetic(node, text):
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY and not any(isinstance(side, (ast.JoinedStr, ast.List)) or isinstance(getattr(side, "value", None), str) for side in (node.left, node.right)):
        return f"({text(node.left)} {BINARY[type(node.op)]} {text(node.right)})"


def other_comparison(node, text):
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
        return f"({text(node.left)} {COMPARE[type(node.ops[0])]} {text(node.comparators[0])})"


def other_connective(node, text):
    if isinstance(node, ast.BoolOp):
        return "(" + (" or " if isinstance(node.op, ast.And) else " and ").join(f"({text(value)})" for value in node.values) + ")"


def no_negation(node, text):
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert, ast.USub)) and not isinstance(node.operand, ast.Constant):
        return f"({text(node.operand)})"


def other_branch(node, text):
    if isinstance(node, ast.IfExp):
        return f"({text(node.orelse)} if {text(node.test)} else {text(node.body)})"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "where" and len(node.args) == 3 and not node.keywords:
        return f"{text(node.func)}({text(node.args[0])}, {text(node.args[2])}, {text(node.args[1])})"


def one_more(node, text):
    if isinstance(node, ast.Constant) and type(node.value) is int and 0 <= node.value < 8:
        return str(node.value + 1)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return str(not node.value)


def nothing(node, text):
    if isinstance(node, ast.AugAssign) or isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
        return "pass"


OPERATORS = (other_arithmetic, other_comparison, other_connective, no_negation, other_branch, one_more, nothing)


def places(tree):
    "The nodes of function bodies that do something: no annotations, defaults, decorators, texts, errors or drawings of oneself."
    def walk(node, name):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if not (node.name.startswith("_repr") or node.name in ("__repr__", "main")):
                for child in node.body:
                    yield from walk(child, f"{name}.{node.name}".strip("."))
        elif isinstance(node, (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)):
            return
        else:
            if name:
                yield name, node
            for field, child in ast.iter_fields(node):
                if field not in ("annotation", "returns"):
                    for one in child if isinstance(child, list) else [child]:
                        if isinstance(one, ast.AST):
                            yield from walk(one, name)
    return walk(tree, "")


@cache
def faults_of(module):
    "Every fault that the operators know for a module: `(module, function, line, operator, lines before, lines after)`."
    lines, found = (ROOT / module).read_bytes().splitlines(), []  # columns of the syntax tree count bytes

    def text(node):
        rows = lines[node.lineno - 1:node.end_lineno]
        rows[-1] = rows[-1][:node.end_col_offset]
        rows[0] = rows[0][node.col_offset:]
        return b"\n".join(rows).decode()

    for function, node in places(ast.parse(b"\n".join(lines))):
        for operator in OPERATORS:
            if (new := operator(node, text)) is not None:
                old = lines[node.lineno - 1:node.end_lineno]
                after = old[0][:node.col_offset] + new.encode() + old[-1][node.end_col_offset:]
                found.append((module, function, node.lineno, operator.__name__, [line.decode() for line in old], after.decode().splitlines()))
    return found


def draw(seed, each):
    "`each` faults from each subpackage: its modules in turn, the operators in turn, no function twice."
    rng, graph, found = random.Random(seed), Graph(), []
    for room in ROOMS:
        modules = sorted(module for module in graph.chapters if module.startswith(f"{PACKAGE}/{room}/") and Path(module).stem not in MEASURING)
        rng.shuffle(modules)
        kinds = [operator.__name__ for operator in OPERATORS]
        chosen = []
        for module in itertools.islice(itertools.cycle(modules), 20 * each):
            taken = {fault[:2] for fault in chosen}
            faults = [fault for fault in faults_of(module) if fault[3] == kinds[len(chosen) % len(kinds)] and fault[:2] not in taken]
            if faults and len(chosen) < each:
                chosen.append(rng.choice(faults))
        found += chosen
    return found


def plant(tree, fault, chapter):
    "Put a fault into the module and the chapter of a tree; returns their texts as they were."
    module, _, line, _, old, after = fault
    before = {name: (tree / name).read_text(encoding="utf-8") for name in (module, chapter)}
    lines = before[module].splitlines()
    cell_id = next(line.rpartition("#")[2].strip() for line in reversed(lines[:line]) if line.startswith("# %% "))
    nb = json.loads(before[chapter])
    cell = next(cell for cell in nb["cells"] if cell["id"] == cell_id)
    source = "".join(cell["source"])
    first = next(i for i in range(line - 1, -1, -1) if lines[i].startswith("# %% "))
    turn = "\n".join(lines[first:line - 1]).count("\n".join(old))
    pieces = source.split("\n".join(old))
    assert len(pieces) > turn + 1, (module, line)
    cell["source"] = "\n".join(old).join(pieces[:turn + 1]) + "\n".join(after) + "\n".join(old).join(pieces[turn + 1:])
    lines[line - 1:line - 1 + len(old)] = after
    (tree / module).write_text("\n".join(lines) + "\n", encoding="utf-8")
    (tree / chapter).write_text(json.dumps(nb), encoding="utf-8")
    return before


def batches(checks, root, function, public):
    """The chapter itself, then the checks that name the function, then those that name most often what its module exports, nearest first.

    Test files further off share a process, since each start costs seconds.
    """
    function, exported = function.rpartition(".")[2], re.compile(rf"\b({'|'.join(public) or function})\b")

    def rank(check):
        distance, file = check
        text = (root / file).read_text(encoding="utf-8")
        return distance > 0, re.search(rf"\b{function}\b", text) is None, file.startswith("tutorials/"), -len(exported.findall(text)), distance, file

    ordered = [file for _, file in sorted(checks, key=rank)]
    size, batch = 1, []
    for file in ordered:
        if file.startswith("tests/"):
            batch.append(file)
            if len(batch) >= size:
                yield batch
                size, batch = min(2 * size, 16), []
        else:
            yield [file]
    if batch:
        yield batch


def judge(tree, fault, graph, most=None):
    "Plant a fault, run its checks (at most so many processes), take it out again; `(caught by, seconds)`, where nothing caught it None."
    began = time.monotonic()
    public = [name for name, modules in graph.public.items() if fault[0] in modules]
    before = plant(tree, fault, graph.chapters[fault[0]])
    env = {**os.environ, "PYTHONPATH": str(tree), "XLAND_MINIGRID_DATA": str(tree / ".cache" / "data")}
    env.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path.home() / ".cache" / "xland_minigrid" / "jax"))
    try:
        for batch in itertools.islice(batches(graph.checks([fault[0]]), tree, fault[1], public), most):
            words = [str(word) for word in (*BOUNDED, *command(batch[0]), *batch[1:])]
            process = subprocess.Popen(words, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
            try:
                said, _ = process.communicate(timeout=HANG * len(batch))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.communicate()
                return f"{batch[0]} (hangs)", time.monotonic() - began
            if process.returncode not in (0, 5):
                failed = [line.split(" ", 2)[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR ")) and "::" in line]
                return (failed or batch)[0], time.monotonic() - began
        return None, time.monotonic() - began
    finally:
        for name, text in before.items():
            (tree / name).write_text(text, encoding="utf-8")


def key(fault):
    "What names a fault as long as its function and its line say what they say."
    module, function, _, operator, old, after = fault
    return json.dumps([module, function, operator, old, after])


def short(fault):
    "The change in a table: the first line that differs, before and after."
    old, after = next(((a.strip(), b.strip()) for a, b in zip(fault[4], fault[5]) if a != b), (fault[4][0].strip(), fault[5][0].strip()))
    quoted = lambda text: "`" + text.replace("|", "\\|")[:90] + "`"
    return f"{quoted(old)} → {quoted(after)}"


def write_table(faults, known, seed, reasons):
    caught = sum(known[key(fault)]["by"] is not None for fault in faults)
    rows = [f"| {i} | {fault[0].removeprefix(PACKAGE + '/')} | `{fault[1]}` | {short(fault)} | {known[key(fault)]['by'] or '**survives**: ' + reasons.get(short(fault), 'no reason given yet')} |"
            for i, fault in enumerate(faults)]
    TABLE.write_text("\n".join([
        "# Seeded faults", "", f"Made by `make mutants` (seed {seed}): {caught} of {len(faults)} faults are caught by the fast tests.", "",
        "A tool draws places in function bodies, equally many from each of five subpackages and from its modules in turn. It",
        "changes each a little: another operator, comparison or connective, a missing negation, swapped branches, a constant one larger,",
        "a statement left out. One fault at a time goes into a copy of the package. The chapters, tests and tutorials that import",
        "the module run, nearest first, until one fails. Programs that only measure are left out.", "",
        "| | module | function | fault | caught by |", "|---|---|---|---|---|", *rows, ""]), encoding="utf-8")
    print(f"{caught} of {len(faults)} caught; {TABLE.relative_to(ROOT)} is written.")


def copy_tree(to):
    names = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=12, help="faults from each subpackage")
    parser.add_argument("--lanes", type=int, default=2, help="faults that are judged at the same time")
    parser.add_argument("--batches", type=int, help="give a fault up after so many processes, without calling it a survivor: a first look")
    parser.add_argument("--only", type=int, nargs="*", metavar="NUMBER", help="judge these again, known or not")
    options = parser.parse_args()
    faults, graph = draw(options.seed, options.each), Graph()
    reasons = {}
    if TABLE.exists():
        for row in TABLE.read_text(encoding="utf-8").splitlines():
            cells = row.split(" | ")
            if len(cells) == 5 and "**survives**: " in cells[4]:
                reasons[cells[3]] = cells[4].partition("**survives**: ")[2].removesuffix(" |")
    known = {}
    if JOURNAL.exists():
        known = {entry["fault"]: entry for entry in map(json.loads, JOURNAL.read_text(encoding="utf-8").splitlines())}
    JOURNAL.parent.mkdir(exist_ok=True)
    waiting, lock = queue.Queue(), threading.Lock()
    for number, fault in enumerate(faults):
        if number in (options.only or ()) or options.only is None and key(fault) not in known:
            waiting.put((number, fault))
    graph.uses, graph.public

    def lane():
        with tempfile.TemporaryDirectory() as tree:
            tree = Path(tree).resolve()
            copy_tree(tree)
            while True:
                try:
                    number, fault = waiting.get_nowait()
                except queue.Empty:
                    return
                by, seconds = judge(tree, fault, graph, options.batches)
                with lock:
                    if by or not options.batches:
                        known[key(fault)] = {"fault": key(fault), "by": by, "seconds": round(seconds)}
                        with open(JOURNAL, "a", encoding="utf-8") as file:
                            file.write(json.dumps(known[key(fault)]) + "\n")
                    print(f"{number:3} {'caught  ' if by else 'SURVIVES'} {seconds:5.0f} s  {fault[0]}:{fault[2]} {fault[1]}  {short(fault)}  {by or ''}", flush=True)

    lanes = [threading.Thread(target=lane) for _ in range(options.lanes)]
    for thread in lanes:
        thread.start()
    for thread in lanes:
        thread.join()
    if all(key(fault) in known for fault in faults):
        write_table(faults, known, options.seed, reasons)
    return 0


if __name__ == "__main__":
    sys.exit(main())
