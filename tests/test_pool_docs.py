"""docs/pool.md and the files beside it say what the code does: every setting, default, status, code and bound."""
import argparse
import asyncio
import configparser
import inspect
import json
import os
import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from xland_minigrid.pool import EnvPool, errors
from xland_minigrid.pool.server import ServerConfig, config_of, server_arguments

pytestmark = pytest.mark.newest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "pool.md").read_text(encoding="utf-8")
DEPLOY = ROOT / "docs" / "deploy"


def section(title):
    "The text under a heading, up to the next one of the same rank or a higher one."
    rank, rest = re.search(rf"^(#+) {re.escape(title)}\n(.*)", PAGE, re.MULTILINE | re.DOTALL).groups()
    return re.split(rf"^#{{1,{len(rank)}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text):
    "The rows of all tables in a text, as lists of cells."
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if line.startswith("|") and not line.startswith(("|---", "| field", "| setting"))]


def ticked(cell):
    return re.findall(r"`([^`]+)`", cell)


def parser(monkeypatch=None, **environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = argparse.ArgumentParser()
    server_arguments(made)
    return made


SETTINGS = {ticked(row[0])[0]: row for row in rows(section("Of a server"))}


@pytest.fixture(autouse=True)
def no_settings_of_the_caller(monkeypatch):
    import os
    for name in [name for name in os.environ if name.startswith("XLAND_POOL_")]:
        monkeypatch.delenv(name)


def test_every_field_and_every_option_is_in_the_table():
    assert list(SETTINGS) and set(SETTINGS) == {field.name for field in fields(ServerConfig)}
    options = {option for action in parser()._actions for option in action.option_strings} - {"-h", "--help"}
    assert options == set(re.findall(r"--[a-z][a-z-]+", section("Of a server")))


@pytest.mark.parametrize("name", [field.name for field in fields(ServerConfig)])
def test_the_default_in_the_table_is_the_default(name):
    (field,) = [field for field in fields(ServerConfig) if field.name == name]
    default = field.default if field.default is not MISSING else field.default_factory()
    said = SETTINGS[name][3]
    assert said == ("made at random" if name == "token" else "none" if default in (None, (), {}) else f"`{default}`")


VALUES = {"env": "MiniGrid-Empty-5x5", "benchmark": "trivial-21k", "host": "::1", "text": "frozen_lake,sudoku", "origins": "https://a.example,https://b.example", "token": "secret", "playground": "1", "max_size": "300"}


@pytest.mark.parametrize("name", [name for name, row in SETTINGS.items() if row[2]])
def test_each_variable_sets_its_field(name, monkeypatch):
    (variable,) = ticked(SETTINGS[name][2])
    value = VALUES.get(name, "3")
    config = config_of(parser(monkeypatch, **{variable: value}).parse_args([]))
    found = getattr(config, name)
    assert (",".join(found) if isinstance(found, tuple) else "1" if found is True else f"{found:g}" if isinstance(found, float) else str(found)) == value
    assert variable == f"XLAND_POOL_{name.upper()}"


@pytest.mark.parametrize("name", [name for name, row in SETTINGS.items() if not row[2]])
def test_no_variable_is_left_out(name, monkeypatch):
    before = config_of(parser().parse_args([]))
    after = config_of(parser(monkeypatch, **{f"XLAND_POOL_{name.upper()}": "0"}).parse_args([]))
    assert getattr(after, name) == getattr(before, name)


def test_an_option_wins_over_its_variable(monkeypatch):
    assert config_of(parser(monkeypatch, XLAND_POOL_SLOTS="5").parse_args(["--slots", "6"])).slots == 6


def test_the_settings_of_a_client():
    table = {ticked(row[0])[0]: row[1].strip("`") for row in rows(section("Of a client"))}
    signature = {name: parameter.default for name, parameter in inspect.signature(EnvPool.connect).parameters.items()}
    assert table == {name: "" if default is inspect.Parameter.empty else str(default) for name, default in signature.items()}
    of_a_group = set(inspect.signature(EnvPool.run_group).parameters) - {"self", "rollout_fn", "task"}
    of_a_local_pool = set(inspect.signature(EnvPool.local).parameters) - set(signature) - {"params", "slots"}
    assert all(f"`{name}`" in section("Of a client") for name in of_a_group | (of_a_local_pool - {"env"}))


def test_every_error_code_is_in_the_table():
    table = {ticked(row[0])[0]: row for row in rows(section("Protocol")) if row[0].startswith("`") and len(row) == 3 and row[1].startswith("`")}
    assert {code: ticked(row[1])[0] for code, row in table.items()} == {code: kind.__name__ for code, kind in errors.CODES.items()}
    assert {code: row[2].startswith("yes") for code, row in table.items()} == {code: kind.retryable for code, kind in errors.CODES.items()}


def test_statuses_codes_and_paths_are_those_of_the_server():
    import xland_minigrid.pool.server as server
    source = Path(server.__file__).read_text(encoding="utf-8")
    said = {row[0] for row in rows(section("Protocol")) if re.fullmatch(r"\d{3}", row[0])}
    assert said == set(re.findall(r"_refuse\(connection, (\d{3})", source)) | {"404"}
    closing = re.search(r"Codes with which the server closes:(.*?)\n\n", PAGE, re.DOTALL)[1]
    assert set(re.findall(r"\b[14]0\d\d\b", closing)) == set(re.findall(r"\.close\((\d{4})", source))
    assert {path for row in rows(section("Protocol")) for path in ticked(row[0]) if re.fullmatch(r"/[a-z]+", path)} == set(re.findall(r'"(/[a-z]+)"', source)) - {"/session", "/ws"}


def test_the_bounds_follow_from_the_defaults():
    c = ServerConfig(token="x")
    look = min(min(c.grace, c.idle) / 4, 5.0)
    row = {line[0]: line[2] for line in rows(section("What is promised"))}
    assert f"{c.grace + look:g} s" in row["P5"] and f"{2 * c.ping + c.grace + look:g} s" in row["P5"]
    assert f"{c.drain + 10:g} s" in row["P7"] and "10 s" in row["P7"]
    assert [name for name in row if name] == [f"P{i}" for i in range(1, 13)]


def test_the_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#][^)]*)\)", PAGE)
    assert links and [link for link in links if not (ROOT / "docs" / link).exists()] == []
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", PAGE)) <= anchors


# The files to deploy with ------------------------------------------------------------------------------------------------------------

def configured(environment, arguments, monkeypatch, tmp_path):
    "The settings that a deployment ends up with."
    token = tmp_path / "token"
    token.write_text("secret\n")
    arguments = [str(token) if "CREDENTIALS_DIRECTORY" in word else word for word in arguments]
    return config_of(parser(monkeypatch, **environment).parse_args(arguments))


def known(environment):
    "Every XLAND_POOL_ variable of a deployment is one that the server knows."
    names = {variable for row in SETTINGS.values() for variable in ticked(row[2])}
    return {name for name in environment if name.startswith("XLAND_POOL_")} <= names


def test_the_systemd_unit(monkeypatch, tmp_path):
    unit = configparser.RawConfigParser(strict=False, interpolation=None)
    unit.optionxform = str
    text = (DEPLOY / "xland-pool.service").read_text()
    unit.read_string(text)
    service = unit["Service"]
    environment = dict(re.findall(r"^Environment=(\w+)=(.+)$", text, re.MULTILINE))
    program, verb, *arguments = shlex.split(service["ExecStart"])
    config = configured(environment, arguments, monkeypatch, tmp_path)
    assert known(environment) and program.endswith("/xland-minigrid") and verb == "serve" and config.token == "secret" and config.slots == 64
    assert int(service["TimeoutStopSec"]) >= config.drain + 10 and service["KillSignal"] == "SIGTERM"
    assert unit["Unit"]["Description"] and unit["Install"]["WantedBy"]


def test_the_dockerfile(monkeypatch, tmp_path):
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    entry = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)[1])   # the list form: signals arrive
    assert entry[:2] == ["xland-minigrid", "serve"]
    environment = dict(re.findall(r"(\w+)=(\S+)", re.search(r"^ENV (.*)$", text, re.MULTILINE)[1]))
    config = configured(environment | {"XLAND_POOL_TOKEN": "secret"}, entry[2:], monkeypatch, tmp_path)
    assert known(environment) and (config.host, config.port) == ("0.0.0.0", 8000) and "EXPOSE 8000" in text
    assert "--no-token" not in text and re.search(r"^USER pool$", text, re.MULTILINE)
    for source in re.search(r"^COPY (.*) \./$", text, re.MULTILINE)[1].split():
        assert (ROOT / source).exists(), source
    check = json.loads(re.search(r"^\s*HEALTHCHECK .*? CMD (\[.*\])$", text, re.MULTILINE)[1])
    compile(check[2], "HEALTHCHECK", "exec")
    assert "/healthz" in check[2]


def test_the_kubernetes_manifest(monkeypatch, tmp_path):
    yaml = pytest.importorskip("yaml")
    text = (DEPLOY / "kubernetes.yaml").read_text()
    servers, service = list(yaml.safe_load_all(text))
    assert (servers["kind"], service["kind"]) == ("StatefulSet", "Service")
    pod = servers["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {item["name"]: item.get("value", "secret") for item in container["env"]}
    config = configured(environment, container.get("args", []), monkeypatch, tmp_path)
    assert known(environment) and config.host == "0.0.0.0" and config.token == "secret"
    (port,) = container["ports"]
    assert port["containerPort"] == config.port == service["spec"]["ports"][0]["port"]
    assert service["spec"]["selector"] == servers["spec"]["selector"]["matchLabels"] == servers["spec"]["template"]["metadata"]["labels"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {"startup": "/healthz", "readiness": "/readyz", "liveness": "/healthz"}
    assert all(probe["port"] == port["name"] for probe in probes.values())
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= pause + config.drain + 10
    assert service["spec"]["clusterIP"] == "None" and servers["spec"]["serviceName"] == service["metadata"]["name"]      # one address for all would lose sessions that come back
    urls = eval(re.search(r"urls = (\[.*\])", text)[1])
    assert urls == [f"ws://{servers['metadata']['name']}-{i}.{service['metadata']['name']}:{port['containerPort']}" for i in range(servers["spec"]["replicas"])]
    size, group_size = (int(re.search(rf"{name}=(\d+)", text)[1]) for name in (" size", "group_size"))
    assert size <= config.slots * len(urls) and size % group_size == 0
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    assert "--uid 10001" in (DEPLOY / "Dockerfile").read_text()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.slow
def test_a_server_on_every_ray_node(monkeypatch):
    "Three nodes of Ray on this machine. An actor is killed in the middle of a group: its server ends, and only the episodes there are lost."
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster
    monkeypatch.syspath_prepend(DEPLOY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(DEPLOY)]))
    cluster = Cluster()
    try:
        try:
            for _ in range(3):
                cluster.add_node(num_cpus=1)
            ray.init(cluster.address, log_to_driver=False)
        except Exception as error:                           # a node of Ray gives its own agent 15 s to start
            pytest.skip(f"Ray itself does not start here: {error}")
        from ray_pool import start_servers
        actors, urls, token = start_servers(env=None, text=("frozen_lake",), text_slots=4)
        nodes = {actor["NodeID"] for actor in ray.nodes() if actor["Alive"]}
        assert len(actors) == len(set(urls)) == len(nodes) == 3
        asyncio.run(play_and_lose_one(ray, dict(zip(urls, actors)), token))
        assert [ray.get(actor.stop.remote()) for actor in actors[1:]] == [0, 0]
    finally:
        ray.shutdown()
        cluster.shutdown()


async def play_and_lose_one(ray, actors, token):
    first, killed = list(actors)[0], []
    async with EnvPool.connect(list(actors), 12, group_size=4, token=token, resume_for=1.0, connect_timeout=1.0) as pool:
        assert {session.endpoint for session in pool.sessions} == set(actors)

        async def rollout(episode):
            await episode.step("<action>up</action>")
            if episode.session.endpoint == first and not killed:
                killed.append(first)
                ray.kill(actors[first])
            while not killed:
                await asyncio.sleep(0.01)
            while episode.session.endpoint == first:         # until its server is gone
                await episode.step("no move")
                await asyncio.sleep(0.01)
        groups = await pool.run_groups(rollout, [{"seed": 1}] * 3, 4)
        (lost,) = [group for group in groups if None in group.rewards]
        assert lost.rewards == [None] * 4 and all("SessionLost" in error for error in lost.errors.values())
        assert [group.rewards for group in groups if group is not lost] == [[0.0] * 4] * 2
        assert all(group.valid.all() for group in await pool.run_groups(rollout, [{"seed": 1}] * 3, 4))
