"""What every test run shares: the machine the tests see, and peace between nbval and nbdev."""
import configparser
import gc
import os
import re
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).resolve().parent / "tests"))
from colab_sizes import shortened

ROOT = Path(__file__).resolve().parent

# Before anything imports JAX.
for name, value in re.findall(r"^export (\w+) \?= (.*)$", (ROOT / ".ci" / "test.mk").read_text(encoding="utf-8"), re.MULTILINE):
    os.environ.setdefault(name, value.replace("$(CURDIR)", str(ROOT)).replace("$(HOME)", str(Path.home())))
if (flags := Path(sys.prefix) / "xla-flags").exists():
    os.environ.setdefault("XLA_FLAGS", flags.read_text())

settings.register_profile("here", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("here"), derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "here")

ini = configparser.ConfigParser()
ini.read(ROOT / "settings.ini", encoding="utf-8")
FLAGS = set(ini["DEFAULT"]["tst_flags"].split())


def pytest_configure(config):
    "Tests see four devices, so that sharding is tested on any machine; notebooks see what their readers see."
    if not (getattr(config.option, "nbval", False) or getattr(config.option, "nbval_lax", False)):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
    else:
        config.option.nbval_kernel_startup_timeout = 600  # seconds: on a busy machine the 60 of nbval may pass (and on its command line they become text)


# Traces are made of many small objects that live long: looking through them for garbage as often as Python does takes 7 % of the time.
gc.set_threshold(50_000, 20, 100)

MAPS, MOST_MAPS, EVERY = Path("/proc/self/maps"), 25_000, 20
done = 0


def pytest_runtest_teardown():
    """Forget compiled programs before there are too many.

    XLA maps each of them into memory, Linux allows 65,530 maps a process (`vm.max_map_count`), and one more ends the process with a segmentation fault.
    """
    global done
    done += 1
    if done % EVERY == 0 and "jax" in sys.modules and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        sys.modules["jax"].clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items):
    """Two habits of nbdev that nbval does not know, and short sizes for the notebooks that exist only in colab/.

    `nbdev_clean` forgets execution counts and keeps outputs, which nbval takes for a cell that never ran; and cells marked
    `#| eval: false` or with a test flag are not run.
    """
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is None:
            continue
        if cell.execution_count is None and cell.outputs:
            cell.execution_count = 0
        directives = {m[1]: m[2].strip().lower() for m in re.finditer(r"^#\|\s*([\w-]+):?(.*)$", cell.source, re.MULTILINE)}
        if directives.get("eval") == "false" or FLAGS & directives.keys():
            item.options["skip"] = True
        if os.environ.get("XLAND_FAST") and getattr(item, "path", ROOT).parent == ROOT / "colab":
            cell.source = shortened(item.path.stem, cell.source)
