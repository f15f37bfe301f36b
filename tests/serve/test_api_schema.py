"""The API against its own OpenAPI document: no request is a fault, no answer has another shape."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("schemathesis")

import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.serve.http_server import HANG_SECONDS, PHOTO, HttpServer

pytestmark = [pytest.mark.processes, pytest.mark.long]

EXAMPLES = 12
#: The document does not say all that decides about a request.
NOT_CHECKED = [positive_data_acceptance, negative_data_rejection]


@pytest.fixture
def ids(server: HttpServer) -> Iterator[list[str]]:
    """Clips that paths may name: one finished, one in progress, one that waits."""
    ids = server.add(1, steps=1) + server.add(2, steps=1000)
    server.wait_for(ids[0], "completed")
    yield ids
    for status in ("queued", "in_progress"):
        path = f"/v1/videos?limit=100&status={status}"
        while open_ones := server.client.get(path).json()["data"]:
            for video in open_ones:
                server.client.delete(f"/v1/videos/{video['id']}")


def test_every_answer_is_as_documented(server: HttpServer, ids: list[str]) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations: list[Any] = [found.ok() for found in schema.get_all_operations()]  # type: ignore[union-attr]
    assert len(operations) >= 12
    for operation in operations:
        check(operation, ids)
    assert server.client.get("/health").status_code == 200


def check(operation: Any, ids: list[str]) -> None:
    """Sends requests that the document allows, and others, and checks the answers."""
    ends_clips = operation.method == "delete" or operation.path.endswith("/events")
    cases = st.one_of(*map(operation.as_strategy, GenerationMode))

    @given(case=cases, id=st.sampled_from(ids), has_id=st.booleans())
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any, id: str, has_id: bool) -> None:
        if "id" in (case.path_parameters or {}) and has_id and not ends_clips:
            case.path_parameters["id"] = id
        if isinstance(case.body, dict) and has_id:
            is_json = case.media_type == "application/json"
            case.body["input_reference"] = b64encode(PHOTO).decode() if is_json else PHOTO
        case.call_and_validate(timeout=HANG_SECONDS, excluded_checks=NOT_CHECKED)

    send()
