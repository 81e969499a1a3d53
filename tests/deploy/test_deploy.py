"""What deploy/ ships, against the program and against the schemas and programs of those who will read it."""

from __future__ import annotations

import configparser
import copy
import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import chairlift
from chairlift import config
from chairlift.server import process, service
from chairlift.server.http_errors import Interrupted, error_response
from support.async_tests import run
from support.in_process_server import CHAT, HELLO, fake_app, serving
from support.paths import ROOT
from support.proxies import haproxy_file, nginx_files, tool

DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd/chairlift@.service"
ALERTS = DEPLOY / "prometheus/chairlift-alerts.yml"
BOARD = DEPLOY / "grafana/chairlift.json"

LONGEST_END_S = config.Config().drain_seconds + service._LAST_WORDS_S + process.LAST_CALL_S + process.LINGER_S
"""From SIGTERM to the end of the process, at most."""


def loaded_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


# -- figures ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exposition() -> dict[str, dict[str, set[str]]]:
    """Every name that a server exports, with its labels and their values; what the scraper adds is there too."""

    async def scrape() -> str:
        async with serving(fake_app()) as http:
            await http.post(CHAT, json=HELLO)
            return (await http.get("/metrics")).text

    scraper = {"job": {"chairlift"}, "instance": {"127.0.0.1:8000"}}
    names: dict[str, dict[str, set[str]]] = {"up": dict(scraper)}
    for line in run(scrape()).splitlines():
        found = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ", line)
        if found and not line.startswith("#"):
            labels = names.setdefault(found[1], dict(scraper))
            for label, value in re.findall(r'(\w+)="([^"]*)"', found[2] or ""):
                labels.setdefault(label, set()).add(value)
    return names


def board_queries() -> Iterator[tuple[str, str]]:
    """Panel title and expression."""
    for panel in json.loads(BOARD.read_text())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def alert_queries() -> Iterator[tuple[str, str]]:
    """Alert and expression."""
    for group in loaded_yaml(ALERTS)["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


QUERIES = [*board_queries(), *alert_queries()]


def used(expression: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Metric names in an expression, each with the labels and values that it is asked for."""
    for name, selector in re.findall(r"\b(chairlift:\w+|process_\w+|up)\b(?:\{([^}]*)\})?", expression):
        yield name, {label: values.split("|") for label, values in re.findall(r'(\w+)=~?"([^"]*)"', selector)}


@pytest.mark.parametrize(("title", "expression"), QUERIES, ids=[title for title, _ in QUERIES])
def test_every_figure_exists(title: str, expression: str, exposition: dict[str, dict[str, set[str]]]) -> None:
    """A panel that stays empty and an alert that never fires, because a metric, label or reason was renamed."""
    found = list(used(expression))
    assert found
    for name, labels in found:
        assert name in exposition
        for label, values in labels.items():
            assert {value for value in values if not value.startswith("$")} <= exposition[name].get(label, set())
            assert label in exposition[name]
        for by in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
            assert {label.strip() for label in by.split(",")} <= exposition[name].keys() | {"le"}


def test_the_board_shows_what_must_be_watched() -> None:
    """A board without the figure that one needs at night."""
    names = {name.removeprefix("chairlift:") for _, expression in board_queries() for name, _ in used(expression)}
    assert names >= {
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "e2e_request_latency_seconds_bucket", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prompt_tokens_total", "generation_tokens_total", "prefix_cache_hits_total", "num_preemptions_total",
        "step_time_seconds_count", "requests_refused_total",
    }  # fmt: skip


def test_the_board_is_laid_out() -> None:
    """Panels that lie on each other or share an id, which the viewer silently mends by losing one."""
    board = json.loads(BOARD.read_text())
    assert board["uid"]
    assert board["title"]
    assert board["schemaVersion"] >= 36
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert all(0 <= x < 24 for x, _ in cells)
    variables = {variable["name"] for variable in board["templating"]["list"]}
    for panel in panels:
        assert panel["title"]
        assert panel["description"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        asked = set(re.findall(r"\$\{?(\w+)", json.dumps(panel)))
        assert asked <= variables | {"__rate_interval"}


def test_every_alert_is_explained() -> None:
    """An alert at night that nobody knows what to do about."""
    page = (ROOT / "docs/deploy.md").read_text()
    for group in loaded_yaml(ALERTS)["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"]
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert f"`{rule['alert']}`" in page


def test_prometheus_accepts_rules_and_configuration(tmp_path: Path) -> None:
    """A misspelt function or field; an alert that does not fire when it should."""
    promtool = tool("promtool")
    folder = DEPLOY / "prometheus"
    subprocess.run([promtool, "check", "config", "prometheus.yml"], cwd=folder, check=True)
    subprocess.run([promtool, "test", "rules", "chairlift-alerts.test.yml"], cwd=folder, check=True)
    rules = [
        {"record": f"board:{i}", "expr": re.sub(r"\$__rate_interval", "5m", expression)}
        for i, (_, expression) in enumerate(board_queries())
    ]
    (tmp_path / "board.yml").write_text(yaml.safe_dump({"groups": [{"name": "board", "rules": rules}]}))
    subprocess.run([promtool, "check", "rules", "board.yml"], cwd=tmp_path, check=True)


def test_every_alert_is_tried() -> None:
    """An alert that was never seen to fire."""
    tries = loaded_yaml(DEPLOY / "prometheus/chairlift-alerts.test.yml")["tests"]
    fired = {case["alertname"] for each in tries for case in each["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {name for name, _ in alert_queries()}


# -- settings ---------------------------------------------------------------------------------------------------------


def environ_file() -> dict[str, str]:
    """The example file, with what stands in comments too."""
    lines = (DEPLOY / "systemd/chairlift.env").read_text().splitlines()
    return dict(line.lstrip("#").split("=", 1) for line in lines if re.match(r"#?[A-Z_]+=", line))


def test_settings_in_deploy_are_settings() -> None:
    """A variable that was renamed: the service does not start on the machine of somebody who did all by the book."""
    assert config.load(environ=environ_file()).model
    assert re.search(r"^Environment=CHAIRLIFT_API_KEY_FILE=%d/keys$", UNIT.read_text(), re.MULTILINE)
    for variable in re.findall(r"^Environment=(CHAIRLIFT_\w+)=", UNIT.read_text(), re.MULTILINE):
        config.load(environ={variable: "/somewhere"})
    compose = loaded_yaml(DEPLOY / "docker/compose.yaml")["services"]["chairlift"]["environment"]
    dockerfile = dict(re.findall(r"(CHAIRLIFT_\w+)=(\S+)", (DEPLOY / "docker/Dockerfile").read_text().split("FROM")[2]))
    pod = {entry["name"]: entry.get("value", "x") for entry in container()["env"]}
    for variables in (compose | dockerfile, pod | dockerfile):
        values = {k: re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", v).replace(" ", "-") for k, v in variables.items()}
        config.load(environ=values).require_safe_host()


def test_nobody_serves_with_the_key_of_an_example(tmp_path: Path) -> None:
    """A key that everybody can read in this repository, and that opens the server of whoever forgot to change it."""
    example = tmp_path / "keys"
    example.write_text((DEPLOY / "systemd/keys").read_text())
    example.chmod(0o600)
    with pytest.raises(chairlift.ChairliftError, match="holds no key"):
        config.load(environ={"CHAIRLIFT_API_KEY_FILE": str(example)}).keyring()
    example.write_text(example.read_text() + "anna 0123456789abcdef\n")
    assert config.load(environ={"CHAIRLIFT_API_KEY_FILE": str(example)}).keyring()


def test_a_user_without_a_home_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback before the first line, for the user of a service or a container whom no passwd file knows."""

    def no_home(_: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    assert config._cache().is_absolute()
    with pytest.raises(chairlift.ChairliftError, match="CHAIRLIFT_CACHE_DIR"):
        config.load(environ={"CHAIRLIFT_CACHE_DIR": "~/models"})


def test_versions_are_the_programs() -> None:
    """An image called by last year's version."""
    for file in ("docker/Dockerfile", "docker/compose.yaml", "kubernetes/chairlift.yaml"):
        assert set(re.findall(r"chairlift:(\d\S*)", (DEPLOY / file).read_text())) == {chairlift.__version__}


def test_a_proxy_lets_the_server_say_what_is_too_large() -> None:
    """A page of HTML for a body that the server would have taken, or refused in words."""
    megabytes = re.findall(r"^client_max_body_size (\d+)m;", (DEPLOY / "nginx/chairlift-proxy.conf").read_text(), re.M)
    assert int(megabytes[0]) * 2**20 > config.Config().body_limit_bytes


def test_503_means_that_nothing_was_begun() -> None:
    """A proxy that repeats, on the word of a 503, work that the server had begun and cut."""
    assert error_response(Interrupted("x")).status_code == 500


# -- systemd ----------------------------------------------------------------------------------------------------------


def unit() -> dict[str, str]:
    """The [Service] section; of what is given twice, the last."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT)
    return dict(parser["Service"])


def test_the_service_has_time_to_drain() -> None:
    """Answers cut because systemd loses patience first; a failing start that is tried for ever."""
    section = unit()
    assert section["Type"] == "notify"
    assert int(section["TimeoutStopSec"].removesuffix("s")) > LONGEST_END_S
    assert section["RestartPreventExitStatus"] == "2"


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """A misspelt directive, which systemd ignores with a warning; hardening that was lost."""
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/sh", UNIT.read_text(), flags=re.MULTILINE)
    (tmp_path / UNIT.name).write_text(text)
    analyze = tool("systemd-analyze")
    instance = str(tmp_path / "chairlift@8000.service")
    shutil.copy(tmp_path / UNIT.name, instance)
    verified = subprocess.run([analyze, "verify", "--man=no", instance], text=True, capture_output=True)
    assert "chairlift" not in verified.stderr, verified.stderr
    assert verified.returncode == 0
    security = [analyze, "security", "--offline=true", "--threshold=15", "--no-pager", instance]
    subprocess.run(security, check=True, stdout=subprocess.DEVNULL)


# -- containers -------------------------------------------------------------------------------------------------------


def manifests() -> dict[str, dict[str, Any]]:
    """The Kubernetes objects by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / "kubernetes/chairlift.yaml").read_text())}


def pod() -> dict[str, Any]:
    found: dict[str, Any] = manifests()["Deployment"]["spec"]["template"]["spec"]
    return found


def container() -> dict[str, Any]:
    found: dict[str, Any] = pod()["containers"][0]
    return found


@pytest.mark.parametrize("kind", ["PersistentVolumeClaim", "Service", "Deployment"])
def test_kubernetes_accepts_the_manifests(kind: str) -> None:
    """A field in the wrong place, which the cluster drops or refuses."""
    import kubernetes_validate

    manifest, newest = manifests()[kind], kubernetes_validate.latest_version()
    kubernetes_validate.validate(manifest, newest, strict=True)
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["misspelt"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, newest, strict=True)


def test_the_manifests_hang_together() -> None:
    """A service that finds no pod, a volume nobody claims, a probe of a path that is not served."""
    found = manifests()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert found["Service"]["spec"]["selector"].items() <= labels
    assert found["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels
    ports = {port["name"] for port in container()["ports"]}
    assert {port["targetPort"] for port in found["Service"]["spec"]["ports"]} <= ports
    claims = {v["persistentVolumeClaim"]["claimName"] for v in pod()["volumes"] if "persistentVolumeClaim" in v}
    assert claims == {found["PersistentVolumeClaim"]["metadata"]["name"]}
    assert {m["name"] for m in container()["volumeMounts"]} == {v["name"] for v in pod()["volumes"]}
    paths = {kind: container()[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/live"}
    assert set(paths.values()) <= {route.path for route in fake_app().routes if hasattr(route, "path")}


def test_the_pod_drains_and_is_confined() -> None:
    """A pod killed while it answers; one that runs as root."""
    pause_s = int(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] > pause_s + LONGEST_END_S
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} == set(container()["resources"]["limits"])


def test_a_cluster_sets_no_variables_of_ours() -> None:
    """A pod that refuses to start since the cluster set CHAIRLIFT_PORT=tcp://... for the service's name."""
    name = manifests()["Service"]["metadata"]["name"].upper()
    with pytest.raises(chairlift.ChairliftError):
        config.load(environ={f"{name}_PORT": "tcp://10.0.0.1:8000"})
    assert pod()["enableServiceLinks"] is False


def test_compose_accepts_the_file() -> None:
    """A key that Compose does not know, and a file that it refuses as a whole."""
    from check_jsonschema.builtin_schemas import get_builtin_schema
    from jsonschema import Draft202012Validator, ValidationError

    schema = Draft202012Validator(get_builtin_schema("vendor.compose-spec"))
    file = loaded_yaml(DEPLOY / "docker/compose.yaml")
    schema.validate(file)
    file["services"]["chairlift"]["misspelt"] = 1
    with pytest.raises(ValidationError):
        schema.validate(file)


def test_the_composed_service_drains_and_is_confined() -> None:
    """A container killed while it answers; one that may write everywhere."""
    service = loaded_yaml(DEPLOY / "docker/compose.yaml")["services"]["chairlift"]
    assert int(service["stop_grace_period"].removesuffix("s")) > LONGEST_END_S
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert {"cpus", "mem_limit", "healthcheck"} <= service.keys()


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile, one instruction each."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "docker/Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def test_the_image_is_built_from_what_is_there() -> None:
    """A file that was moved: the build stops, or an extension compiled for another machine is shipped."""
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().split()
    assert {"*", "**/*.so"} <= set(ignored)
    for word, rest in instructions():
        if word == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source
                assert f"!{source}" in ignored
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {wanted["readme"], *wanted["license-files"]} <= {name.removeprefix("!") for name in ignored}


def test_the_image_runs_as_nobody_and_says_how_it_is() -> None:
    """A container that runs as root, with two Pythons, or that is called healthy as soon as it has a process."""
    found = instructions()
    bases = [rest.split(" AS ")[0] for word, rest in found if word == "FROM"]
    assert len(bases) == 2
    assert len(set(bases)) == 1
    last = found[max(i for i, (word, _) in enumerate(found) if word == "FROM") :]
    words = dict(last)
    assert words["USER"] == "10001:10001"
    assert json.loads(words["ENTRYPOINT"]) == ["chairlift"]
    health = re.search(r"CMD (\[.*\])$", words["HEALTHCHECK"])
    assert health is not None
    assert json.loads(health[1])[:2] == ["chairlift", "wait"]
    assert json.loads(words["CMD"]) == ["serve"]


# -- proxies: what they do is in test_proxies.py ----------------------------------------------------------------------


def test_nginx_accepts_its_files(tmp_path: Path) -> None:
    """A directive in the wrong place."""
    main = nginx_files(tmp_path, 8443, (8000, 8001))
    command = [tool("nginx"), "-t", "-p", str(tmp_path), "-c", str(main), "-e", f"{tmp_path}/error.log"]
    tested = subprocess.run(command, text=True, capture_output=True)
    assert tested.returncode == 0, tested.stderr
    assert "warn" not in tested.stderr


def test_haproxy_accepts_its_file(tmp_path: Path) -> None:
    """A keyword that this version does not know, or a warning that nobody reads."""
    command = [tool("haproxy"), "-c", "-f", str(haproxy_file(tmp_path, 8443, (8000, 8001)))]
    tested = subprocess.run(command, text=True, capture_output=True)
    assert tested.returncode == 0, tested.stderr
    assert "WARNING" not in tested.stdout + tested.stderr
