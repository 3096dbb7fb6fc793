"""What settings.ini says, for the tools in this folder."""
import configparser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_ini = configparser.ConfigParser()
_ini.read(ROOT / "settings.ini", encoding="utf-8")
settings = dict(_ini["DEFAULT"])

GITHUB = f"{settings['user']}/{settings['repo']}"


def badge_url(name):
    "Where Colab opens colab/NAME.ipynb of this repository."
    return f"https://colab.research.google.com/github/{GITHUB}/blob/{settings['branch']}/colab/{name}.ipynb"


def badge(name):
    "The badge, as Markdown."
    return f"[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]({badge_url(name)})"
