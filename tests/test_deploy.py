"""The files in deploy/ start the server with options that it has, and stop it late enough."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from svdpp.cli.serve import serve

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
UNIT = (DEPLOY / "svdpp.service").read_text(encoding="utf-8").replace("\\\n", "")
SERVER = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["server"]
MANIFESTS: dict[str, Any] = {
    each["kind"]: each
    for each in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
}
POD = MANIFESTS["Deployment"]["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


def _only(pattern: str) -> str:
    (found,) = re.findall(pattern, UNIT, re.MULTILINE)
    return str(found)


COMMANDS = {
    "systemd": (_only(r"^ExecStart=\S+/svdpp (.*)$").split(), _only(r"^TimeoutStopSec=(\d+)$")),
    "compose": (SERVER["command"], SERVER["stop_grace_period"].removesuffix("s")),
    "kubernetes": (CONTAINER["args"], POD["terminationGracePeriodSeconds"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_server_takes_the_command_and_ends_in_time(name: str) -> None:
    (command, *arguments), seconds = COMMANDS[name]
    assert command == "serve"
    options = serve.make_context("svdpp serve", arguments).params
    # The ranks may take 30 s longer, and the last webhooks 10 s.
    assert int(seconds) >= options["grace"] + 60
    assert options["api_key_file"] is not None
    assert name == "systemd" or options["host"] == "0.0.0.0"


def test_the_ports_are_that_of_the_server() -> None:
    port = serve.make_context("svdpp serve", []).params["port"]
    (published,) = SERVER["ports"]
    (exposed,) = CONTAINER["ports"]
    (offered,) = MANIFESTS["Service"]["spec"]["ports"]
    assert published == f"127.0.0.1:{port}:{port}"
    assert f":{port}/health" in " ".join(SERVER["healthcheck"]["test"])
    assert (exposed["containerPort"], offered["port"]) == (port, port)
    assert offered["targetPort"] == CONTAINER["readinessProbe"]["httpGet"]["port"] == "http"


def test_what_the_manifests_name_exists() -> None:
    labels = MANIFESTS["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert MANIFESTS["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFESTS["Service"]["spec"]["selector"] == labels
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    claim = volumes["data"]["persistentVolumeClaim"]["claimName"]
    assert claim == MANIFESTS["PersistentVolumeClaim"]["metadata"]["name"]
    # Kubernetes sets a variable for each service, which would be taken for an option's default.
    assert POD["enableServiceLinks"] is False


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "svdpp.service"
    unit.write_text(UNIT.replace("/opt/svdpp/.venv/bin/svdpp", "/bin/true"), encoding="utf-8")
    run = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
