"""What settings.ini says, and the tables of CONTRIBUTING.md about subpackages and their imports, for the tools in this folder."""
import configparser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_ini = configparser.ConfigParser()
_ini.read(ROOT / "settings.ini", encoding="utf-8")
settings = dict(_ini["DEFAULT"])

_imports = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### Allowed imports")[2].partition("\n## ")[0]
_rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in _imports.splitlines() if line.startswith("| `")]
ROOMS = {row[0].strip("`"): row[1] for row in _rows if len(row) == 2}  # from top to bottom: name -> contents
EXCEPTIONS = [(row[0].strip("`"), row[1].strip("`")) for row in _rows if len(row) == 3]  # (module, subpackage that it may import)

GITHUB = f"{settings['user']}/{settings['repo']}"


def badge_url(name):
    "Where Colab opens colab/NAME.ipynb of this repository."
    return f"https://colab.research.google.com/github/{GITHUB}/blob/{settings['branch']}/colab/{name}.ipynb"


def badge(name):
    "The badge, as Markdown."
    return f"[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]({badge_url(name)})"
