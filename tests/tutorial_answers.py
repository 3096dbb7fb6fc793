"What stands in the exercises of a tutorial."
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / ".ci"))
import colab


def answers(tutorial, how, **scope):
    "By name: our solutions (`colab.solution`), or what students find (`colab.stub`). scope: names that the answers use."
    for cell in json.loads((ROOT / "tutorials" / f"{tutorial}.ipynb").read_text(encoding="utf-8"))["cells"]:
        if colab.is_exercise(cell):
            exec(how("".join(cell["source"])), scope)
    return scope
