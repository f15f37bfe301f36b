"""The files in deploy/ start the server with valid options, and give it enough time to stop."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from svdpp.cli.app import load_command
from tests.support.shell import parsed

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
UNIT = (DEPLOY / "svdpp.service").read_text(encoding="utf-8").replace("\\\n", "")


def _services(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text("utf-8"))["services"]


def _manifests(name: str) -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / name).read_text("utf-8"))
    return {each["kind"]: each for each in documents}


FLEET = _services("compose.fleet.yaml")
SERVERS = {"server": _services("compose.yaml")["server"]}
SERVERS |= {name: FLEET[name] for name in ("first", "second")}
KUBERNETES = {name: _manifests(f"{name}.yaml") for name in ("kubernetes", "kubernetes-fleet")}


def _pod(manifests: dict[str, Any]) -> Any:
    return manifests["Deployment"]["spec"]["template"]["spec"]


def _container(manifests: dict[str, Any]) -> Any:
    (container,) = _pod(manifests)["containers"]
    return container


_START, _STOP = (
    re.findall(pattern, UNIT, re.MULTILINE)[0]
    for pattern in (r"^ExecStart=\S+/svdpp (.*)$", r"^TimeoutStopSec=(\d+)$")
)
COMMANDS = {
    "systemd": (_START.split(), _STOP),
    **{
        f"compose {name}": (server["command"], server["stop_grace_period"].removesuffix("s"))
        for name, server in SERVERS.items()
    },
    **{
        name: (_container(each)["args"], _pod(each)["terminationGracePeriodSeconds"])
        for name, each in KUBERNETES.items()
    },
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_server_takes_the_command_and_ends_in_time(name: str) -> None:
    (command, *arguments), seconds = COMMANDS[name]
    assert command == "serve"
    options = parsed(shlex.join(["svdpp", "serve", *arguments]))["options"]
    # After the grace period, the ranks may take 30 s more, and the last webhooks 10 s.
    assert int(seconds) >= options.grace + 60
    assert options.api_key_file is not None
    assert name == "systemd" or options.host == "0.0.0.0"


PORT = parsed("svdpp serve")["options"].port


@pytest.mark.parametrize("name", SERVERS)
def test_compose_publishes_the_port_of_the_server_to_its_machine_only(name: str) -> None:
    (published,) = SERVERS[name]["ports"]
    assert published == f"127.0.0.1:{PORT + (name == 'second')}:{PORT}"
    assert f":{PORT}/health" in " ".join(SERVERS[name]["healthcheck"]["test"])


@pytest.mark.parametrize("name", KUBERNETES)
def test_kubernetes_finds_the_port_and_sets_no_option(name: str) -> None:
    manifests = KUBERNETES[name]
    (exposed,) = _container(manifests)["ports"]
    assert (exposed["containerPort"], exposed["name"]) == (PORT, "http")
    (offered,) = manifests["Service"]["spec"]["ports"]
    probe = _container(manifests)["readinessProbe"]["httpGet"]["port"]
    assert (offered["port"], offered["targetPort"], probe) == (PORT, "http", "http")
    # Kubernetes would set a variable for each service, which svdpp might read as an option's
    # default.
    assert _pod(manifests)["enableServiceLinks"] is False


def test_the_servers_of_a_fleet_share_queue_and_folder() -> None:
    (queue,) = (option for option in load_command("serve").params if option.opts == ["--queue"])
    assert queue.envvar == "SVDPP_QUEUE"
    assert FLEET["first"]["environment"]["SVDPP_QUEUE"].endswith("@database/svdpp")
    assert FLEET["first"]["volumes"] == FLEET["second"]["volumes"]
    (one,), (other,) = (
        FLEET[name]["deploy"]["resources"]["reservations"]["devices"]
        for name in ("first", "second")
    )
    assert not set(one["device_ids"]) & set(other["device_ids"])
    fleet = KUBERNETES["kubernetes-fleet"]
    assert "SVDPP_QUEUE" in {each["name"] for each in _container(fleet)["env"]}
    assert fleet["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "svdpp.service"
    unit.write_text(UNIT.replace("/opt/svdpp/.venv/bin/svdpp", "/bin/true"), encoding="utf-8")
    run = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
