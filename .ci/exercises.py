"""The table of all exercises in the instructor's guide: number, title, level, minutes and section, read from the tutorials.

    python .ci/exercises.py    write it
"""
import json
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from settings import ROOT

GUIDE = Path("docs") / "instructors.md"
SECTION = re.compile(r"^## (?:(\d+)\. )?(.+)$", re.MULTILINE)
EXERCISE = re.compile(r"^### Exercise (\d+\.\d+) · (.+)\n\n(\S+) \w+ · (\d+) minutes$", re.MULTILINE)
HEADING = "\n## All exercises\n\n"


def text(path):
    "The prose of a notebook."
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def numbered(root=ROOT):
    "The tutorials by number: '00', '01', …"
    return {path.name[:2]: path for path in sorted((root / "tutorials").glob("[0-9][0-9]_*.ipynb"))}


def sections(path):
    "The sections of a tutorial: position in its text -> number, or title of one without a number."
    return {found.start(): found[1] or found[2] for found in SECTION.finditer(text(path))}


def exercises(path):
    "The exercises of a tutorial: number, title, level, minutes, section."
    heads = sections(path)
    return [(*found.groups(), heads[max(at for at in heads if at < found.start())]) for found in EXERCISE.finditer(text(path))]


def table(root=ROOT):
    rows = ["| exercise | level | minutes | section |", "|---|---|--:|---|"]
    for path in (*numbered(root).values(), root / "tutorials" / "appendix_jax.ipynb"):
        for number, title, level, minutes, section in exercises(path):
            rows.append(f"| {number} {title} | {level} | {minutes} | {section if section.isdigit() else f'*{section}*'} |")
    return "\n".join(rows)


def main(root=ROOT):
    guide = root / GUIDE
    old = guide.read_text(encoding="utf-8")
    before, heading, rest = old.partition(HEADING)
    if not heading:
        sys.exit(f"{GUIDE} needs the heading{HEADING.rstrip()} and a sentence below it.")
    about, after = rest.split("\n\n", 1)[0], rest[rest.index("\n## "):]
    new = f"{before}{heading}{about}\n\n{table(root)}\n{after}"
    if new != old:
        guide.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
