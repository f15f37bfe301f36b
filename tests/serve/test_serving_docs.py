"""docs/serving.md, the dashboard and the OpenAPI document agree with a real server.

The examples run, and the server responds as documented to generated requests.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from svdpp.serve.job import JobState
from tests.support.http_server import HANG_SECONDS, PHOTO, HttpServer
from tests.support.markdown_pages import code_blocks, code_spans, table_rows
from tests.support.shell import ROOT

TEXT = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
DASHBOARD = json.loads((ROOT / "docs/grafana-dashboard.json").read_text(encoding="utf-8"))
ROWS = table_rows(TEXT)
#: Method, path and curl example of each route in docs/serving.md.
ROUTES = [
    (*row[0].strip("`").split(" "), row[2].strip("`"))
    for row in ROWS
    if row[-1].startswith("`curl ")
]
#: Name, type and labels of each metric in docs/serving.md.
METRICS = [(row[0].strip("`"), row[1], row[2]) for row in ROWS if row[0].startswith("`svdpp_")]


# --- routes ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_route_and_field_is_named(demo: HttpServer) -> None:
    paths = demo.client.get("/openapi.json").json()["paths"]
    routes = {(method.upper(), path) for path, known in paths.items() for method in known}
    assert {(method, path) for method, path, _ in ROUTES} == routes
    names = [*demo.form_schema()["properties"], *JobState]
    assert {*names} <= {*code_spans(TEXT)}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_every_line_of_the_table_and_the_python_client_run(
    demo: HttpServer, tmp_path: Path
) -> None:
    (tmp_path / "photo.jpg").write_bytes(PHOTO)
    body = {"input_reference": b64encode(PHOTO).decode(), "steps": 8}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/videos", "body": body}
    (tmp_path / "jobs.jsonl").write_text(json.dumps(line))
    environment = {**os.environ, "U": demo.url, "ID": "none"}

    def run(*command: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, (command, done.stderr)
        assert (tmp_path / "clip.mp4").read_bytes()[4:8] == b"ftyp"
        return done.stdout

    (tmp_path / "clip.mp4").write_bytes(b"    ftyp")  # replaced when the download runs
    for method, path, line in ROUTES:
        said = run("bash", "-c", f'curl() {{ command curl -sS --fail "$@"; }}; {line}')
        if (method, path) == ("POST", "/v1/videos"):
            environment["ID"] = json.loads(said)["id"]
        if (method, path) == ("POST", "/v1/files"):
            environment["FILE"] = json.loads(said)["id"]
        if (method, path) == ("POST", "/v1/batches"):
            environment["BATCH"] = json.loads(said)["id"]
    program = code_blocks(TEXT, "python")[0].text
    (tmp_path / "client.py").write_text(program)
    (tmp_path / "clip.mp4").unlink()
    said = run(sys.executable, "client.py", demo.url, "photo.jpg", "clip.mp4")
    assert "completed 100% ETA None" in said
    head = program.partition("\nvideo = send")[0]
    (tmp_path / "gone.py").write_text(f'{head}\nlist(follow("none"))\n')
    command = [sys.executable, "gone.py", demo.url, "", ""]
    gone = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (gone.returncode, gone.stderr) == (1, "there is no video 'none'\n")


# --- limits ---------------------------------------------------------------------------------------


def test_the_fixed_limits_have_these_values() -> None:
    rows = [row for row in ROWS if len(row) == 3 and "." in row[2] and row[1].isdigit()]
    assert len(rows) > 5
    for what, value, constant in rows:
        module, _, name = constant.strip("`").partition(".")
        found: Any = importlib.import_module(f"svdpp.serve.{module}")
        for part in name.split("."):
            found = getattr(found, part)
        assert found / (2**20 if "MiB" in what else 1) == int(value), what


# --- metrics --------------------------------------------------------------------------------------


def exposed_metrics(demo: HttpServer) -> dict[str, tuple[str, set[str]]]:
    """Return the type and the labels of each metric at a server's /metrics, by name."""
    found = {}
    for family in text_string_to_metric_families(demo.client.get("/metrics").text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if "_gpu_" in name and not family.samples:
            labels = {"rank"}  # the machine has no GPU, so the metric has no series
        found[name] = (family.type, labels)
    return found


@pytest.mark.slow
def test_the_table_and_the_dashboard_have_the_metrics_of_the_server(demo: HttpServer) -> None:
    demo.wait_for(demo.add()[0], "completed")  # some metrics exist only after a clip
    metrics = exposed_metrics(demo)
    documented = {name: (kind, {*code_spans(labels)}) for name, kind, labels in METRICS}
    assert documented == metrics
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            asked = re.findall(r"svdpp_\w+", target["expr"])
            assert asked, target
            labels: set[str] = set()
            for name in asked:
                base = re.sub(r"_(bucket|sum|count)$", "", name)
                kind, its_labels = metrics.get(name) or metrics[base]
                assert (kind == "histogram") == (base != name), name
                labels |= its_labels
            used = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert used <= labels, target


# --- the OpenAPI document -------------------------------------------------------------------------


@pytest.mark.slow
def test_every_answer_is_as_documented(server: HttpServer) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 12
    # One clip is finished, one is in progress, and one waits.
    ids = server.add(1, steps=1) + server.add(2, steps=1000)
    server.wait_for(ids[0], "completed")
    for operation in operations:
        check_operation(schemathesis, operation, ids)
    assert server.client.get("/health").status_code == 200
    for status in ("queued", "in_progress"):
        path = f"/v1/videos?limit=100&status={status}"
        while open_ones := server.client.get(path).json()["data"]:
            for video in open_ones:
                server.client.delete(f"/v1/videos/{video['id']}")


def check_operation(schemathesis: Any, operation: Any, ids: list[str]) -> None:
    """Send generated requests of one HTTP operation, also invalid ones, and check the responses."""
    checks = importlib.import_module("schemathesis.specs.openapi.checks")
    # These checks are left out. They expect that the document alone decides whether a request is
    # valid, but the server has further limits.
    excluded = [checks.positive_data_acceptance, checks.negative_data_rejection]
    ends_clips = operation.method == "delete" or operation.path.endswith("/events")
    cases = st.one_of(*map(operation.as_strategy, schemathesis.GenerationMode))

    @given(case=cases, id=st.sampled_from(ids), has_id=st.booleans())
    @settings(max_examples=12, derandomize=True, suppress_health_check=list(HealthCheck))
    def send(case: Any, id: str, has_id: bool) -> None:
        if "id" in (case.path_parameters or {}) and has_id and not ends_clips:
            case.path_parameters["id"] = id
        if isinstance(case.body, dict) and has_id:
            is_json = case.media_type == "application/json"
            case.body["input_reference"] = b64encode(PHOTO).decode() if is_json else PHOTO
        case.call_and_validate(timeout=HANG_SECONDS, excluded_checks=excluded)

    send()
