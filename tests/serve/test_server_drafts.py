"""A clip that finds all ranks idle is drafted first; others take the pipeline."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.http_server import HttpServer, error_of, stream

#: So many steps follow the draft that it is written and seen before the exact clip replaces it.
DEMO = ("--model", "demo", "--device", "cpu", "--world", "2", "--threads", "1", "--steps", "24")

pytestmark = [pytest.mark.processes, pytest.mark.long]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    folder = tmp_path_factory.mktemp("drafts") / "data"
    with HttpServer(folder, *DEMO, "--frames", "2", "--draft", "--draft-starts", "0,22") as found:
        found.wait_ready()
        yield found


def test_the_draft_is_shown_until_the_exact_clip_takes_its_place(server: HttpServer) -> None:
    (id,) = server.add(seed=3)
    drafts = []
    with stream(server, id) as events:
        for event in events:
            if event["has_draft"]:
                drafts.append(server.client.get(f"/v1/videos/{id}/content?variant=draft"))
    done = server.video(id)
    assert (done["status"], done["draft"], done["has_draft"]) == ("completed", "auto", False)
    assert drafts, "no event says that there is a draft"
    error_of(server.client.get(f"/v1/videos/{id}/content?variant=draft"), 404, "no_draft")
    exact = server.client.get(f"/v1/videos/{id}/content")
    assert exact.content[4:8] == b"ftyp"
    assert all(draft.content != exact.content for draft in drafts if draft.status_code == 200)

    (again,) = server.add(seed=3, draft="off")
    server.wait_for(again, "completed")
    hashes = [
        server.client.get(f"/v1/videos/{each}/metadata").json()["latents_sha256"]
        for each in (id, again)
    ]
    assert hashes[0] == hashes[1]


def test_clips_that_wait_are_not_drafted(server: HttpServer) -> None:
    ids = server.add(3, steps=4, draft="off") + server.add(2)
    for id in ids:
        server.wait_for(id, "completed")
    drafted = ["draft" in server.client.get(f"/v1/videos/{id}/metadata").json() for id in ids]
    assert not any(drafted[:-1])  # the last one may find the ranks idle


def test_other_steps_have_no_draft(server: HttpServer) -> None:
    (id,) = server.add(steps=4)
    assert server.wait_for(id, "completed")["draft"] == "auto"
    assert "draft" not in server.client.get(f"/v1/videos/{id}/metadata").json()
