"""A server, its ranks or its fork server are killed: no job is lost, and nothing is left.

`tests/soak/serve_soak.py` does the same for minutes, at random moments.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch

from svdpp.config import ClipRequest, LatentSpec
from svdpp.models.base import LATENTS
from svdpp.models.dummy import DummyModel
from svdpp.serve.database import RESERVE
from svdpp.worker.tensor_files import tensor_sha256
from tests.faults.processes import MARK
from tests.serve.engines import dummy_config, serving
from tests.serve.http_server import QUICK, HttpServer, wait
from tests.soak.serve_server import belonging, fork_server_of, ranks_of
from tests.soak.serve_soak import soak

pytestmark = pytest.mark.processes

_STEPS = 40
_SHAPE = (1, 4, 2, 8, 8)  # with --time-scale
_SEEDS = (3, 1, 4)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data folder; at the end no process and no temporary file of its servers may be left."""
    temporary, data = tmp_path / "t", tmp_path / "data"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setenv(MARK, str(tmp_path))
    yield data
    wait(lambda: not belonging(str(tmp_path), data), lambda: "processes are left")
    assert list(temporary.iterdir()) == []
    found = {str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()}
    assert found == {
        "lock",
        "queue.sqlite3",
        RESERVE,
        *(f"photos/{photo}" for photo in _photos(data)),
    }


def _photos(data: Path) -> list[str]:
    with closing(sqlite3.connect(data / "queue.sqlite3")) as database:
        return [name for (name,) in database.execute("SELECT photo FROM jobs")]


def _begin(server: HttpServer, request: str = "request") -> list[str]:
    """The ids of clips, the first of which is begun."""
    server.wait_ready()
    ids = [_id(server, seed, request) for seed in _SEEDS]
    wait(lambda: server.video(ids[0])["step"] > 0)
    return ids


def _id(server: HttpServer, seed: int, request: str = "request") -> str:
    return server.add(seed=seed, steps=_STEPS, key=f"{request}-{seed}")[0]


def _assert_all_made(server: HttpServer, ids: list[str], *, before: Sequence[str] = ()) -> None:
    """There are no other clips but those made `before`."""
    wait_made(server, dict(zip(ids, _SEEDS, strict=True)))
    assert sorted(server.all_ids()) == sorted([*ids, *before])


def wait_made(server: HttpServer, ids: dict[str, int]) -> None:
    """Waits for clips, each of which has the latents of a plain loop from its seed."""
    for id, seed in ids.items():
        server.wait_for(id, "completed")
        metadata = server.client.get(f"/v1/videos/{id}/metadata").json()
        assert metadata["latents_sha256"] == _expected_latents(seed, server.video(id)["steps"])


def _expected_latents(seed: int, steps: int) -> str:
    spec = LatentSpec(shape=_SHAPE)
    model = DummyModel(spec, steps, torch.device("cpu"))
    latent = model.encode({}, ClipRequest(seed=seed))[LATENTS]
    latent = model.denoise({LATENTS: latent}, 0, steps, lambda *_: None)[LATENTS]
    return tensor_sha256(latent)


@pytest.mark.long
@pytest.mark.timing
def test_a_server_its_ranks_and_its_fork_server_are_killed_in_turn(folder: Path) -> None:
    """And a server beside a rank that is stopped."""
    with HttpServer(folder, *QUICK) as server:
        ids = _begin(server)
        server.stop(signal.SIGKILL)
    with HttpServer(folder, *QUICK) as server:
        assert [_id(server, seed) for seed in _SEEDS] == ids  # a client tries again
        _assert_all_made(server, ids)
        second = _begin(server, "second")
        ranks, fork_server = ranks_of(server.process.pid), fork_server_of(server.process.pid)
        assert fork_server is not None
        os.kill(fork_server, signal.SIGKILL)
        os.kill(ranks[0], signal.SIGKILL)
        _assert_all_made(server, second, before=ids)
        assert server.client.get("/health").json()["restarts"] >= 1
        assert fork_server_of(server.process.pid) not in (None, fork_server)
        last = _begin(server, "last")
        os.kill(ranks_of(server.process.pid)[0], signal.SIGSTOP)
        server.stop(signal.SIGKILL)
    with HttpServer(folder, *QUICK) as server:
        _assert_all_made(server, last, before=[*ids, *second])


def test_checkpoints_of_a_killed_server_are_removed_after_the_last_clip(tmp_path: Path) -> None:
    left = tmp_path / LATENTS / f"{'0' * 64}_step3.safetensors"
    with serving(tmp_path, dummy_config(2), stop=(0, 1, 1)) as service:
        ids = service.add(0, 1)
        service.wait_for_step(ids[1], 1)  # the queue is empty, and a clip runs
        left.write_bytes(b"late")
        service.go_on()
        service.wait_final(ids)
        service.wait(lambda: not left.exists(), "the checkpoint stays")


@pytest.mark.long
@pytest.mark.full
def test_a_short_soak(tmp_path: Path) -> None:
    asked = argparse.Namespace(jobs=20, clients=10, faults=8, servers=1, seed=1)
    summary = soak(tmp_path, asked)
    assert summary["wrong"] == {}, summary["faults"]
