"""docs/serving.md and the dashboard say what the real server does, and their examples run."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from svdpp.serve.job import JobState
from tests.cli.shell import ROOT
from tests.serve.http_server import PHOTO, HttpServer, schema_of_form

TEXT = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "docs/grafana-dashboard.json").read_text(encoding="utf-8"))
ROUTES = re.findall(r"^\| `([A-Z]+) (/\S*)` \| [^|]+ \| `(curl [^`]+)` \|$", TEXT, re.MULTILINE)
#: The options of the command and their defaults, from the reference that is written from the code.
OPTIONS = dict(
    re.findall(
        r"^- `(--[\w-]+)[^`]*`: .* \[default: \(?([^;)\]]+)\)?(?:; .*)?\]$",
        (ROOT / "docs/cli.md")
        .read_text(encoding="utf-8")
        .split("\n## `svdpp serve`\n")[1]
        .split("\n## ")[0]
        .replace("\n  ", " "),
        re.MULTILINE,
    )
)
METRICS = re.findall(r"^\| `(svdpp_\w+)` \| (\w+) \|([^|]*)\| [^|]+ \|$", TEXT, re.MULTILINE)


# --- routes ---------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.long
def test_every_route_and_field_is_named(demo: HttpServer) -> None:
    paths = demo.client.get("/openapi.json").json()["paths"]
    routes = {(method.upper(), path) for path, known in paths.items() for method in known}
    assert {(method, path) for method, path, _ in ROUTES} == routes
    names = [*schema_of_form(demo)["properties"], *JobState]
    assert [name for name in names if f"`{name}`" not in TEXT] == []


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_line_of_the_table_and_the_python_client_run(
    demo: HttpServer, tmp_path: Path
) -> None:
    (tmp_path / "photo.jpg").write_bytes(PHOTO)
    environment = {**os.environ, "U": demo.url, "ID": "none"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        assert (tmp_path / "clip.mp4").read_bytes()[4:8] == b"ftyp"
        return done.stdout

    (tmp_path / "clip.mp4").write_bytes(b"    ftyp")  # until there is one
    for method, path, line in ROUTES:
        said = run("bash", "-c", f'curl() {{ command curl -sS --fail "$@"; }}; {line}')
        if (method, path) == ("POST", "/v1/videos"):
            environment["ID"] = json.loads(said)["id"]
    program = re.search(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert program is not None
    (tmp_path / "client.py").write_text(program[1])
    (tmp_path / "clip.mp4").unlink()
    said = run(sys.executable, "client.py", demo.url, "photo.jpg", "clip.mp4")
    assert "completed 100% ETA None" in said


# --- limits ---------------------------------------------------------------------------------------


def test_every_option_that_limits_something_is_in_the_table() -> None:
    rows = re.findall(r"^\| [^|]+ \| `(--[\w-]+)` \| ([^|]+) \| [^|]+ \|$", TEXT, re.MULTILINE)
    documented = {option: default.strip().replace("`", "") for option, default in rows}

    assert documented == {
        option: default for option, default in OPTIONS.items() if _LIMITS.fullmatch(option)
    }


_LIMITS = re.compile(
    r"--(max-(queue|upload-mb|megapixels|steps|frames)|keep-.*|sizes|grace|(.*-)?timeout)"
)


def test_the_fixed_limits_have_these_values() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| `(\w+)\.([\w.]+)` \|$", TEXT, re.MULTILINE)
    assert len(rows) > 5
    for what, value, module, name in rows:
        found: Any = importlib.import_module(f"svdpp.serve.{module}")
        for part in name.split("."):
            found = getattr(found, part)
        assert found / (2**20 if "MiB" in what else 1) == int(value), what


# --- metrics --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exposed(demo: HttpServer) -> dict[str, tuple[str, set[str]]]:
    """The type and the labels of each metric, by name.

    The server has made a clip and refused one, so that it has all metrics.
    """
    demo.wait_for(demo.add()[0], "completed")
    endless = demo.add(2, steps=1000)
    assert demo.request().status_code == 429
    for id in endless:
        assert demo.client.delete(f"/v1/videos/{id}").status_code == 200
    text = demo.client.get("/metrics").text
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels[name] |= {label for sample in family.samples for label in sample.labels} - {"le"}
    return {
        name: (kind, labels[name])
        for name, kind in re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE)
    }


@pytest.mark.processes
@pytest.mark.long
def test_every_metric_is_in_the_table(exposed: dict[str, tuple[str, set[str]]]) -> None:
    documented = {
        name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in METRICS
    }

    assert documented == exposed


@pytest.mark.processes
@pytest.mark.long
def test_the_dashboard_asks_for_metrics_that_exist(
    exposed: dict[str, tuple[str, set[str]]],
) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            asked = re.findall(r"svdpp_\w+", target["expr"])
            assert asked, target
            labels: set[str] = set()
            for name in asked:
                base = re.sub(r"_(bucket|sum|count)$", "", name)
                kind, its_labels = exposed.get(name) or exposed[base]
                assert (kind == "histogram") == (base != name), name
                labels |= its_labels
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert used <= labels, target
