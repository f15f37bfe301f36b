"""Rank 0 and a launcher's rank before the work begins: every wait for the other ends."""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest

from svdpp.errors import Interrupted, OutputError, RankError, RequestError
from svdpp.launch import connections, process_group, process_lifetime
from svdpp.launch.connections import Terms
from svdpp.launch.group import BEGIN, END, Group, RankContext
from svdpp.launch.joined import join_ranks
from svdpp.launch.world import World
from svdpp.worker import joined_rank
from svdpp.worker.messages import Heartbeat
from tests.faults.processes import allowing_for_others
from tests.launch.test_connections import TERMS, InMemoryStore

# The tests replace the exit of a process by SystemExit, also in threads.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

WORLD = World(rank=0, local_rank=0, size=2, local_size=1, num_hosts=2, launcher="torchrun")
RANK_1 = replace(WORLD, rank=1, host=1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemoryStore]:
    """The store of a world within this process; nothing ends the process."""

    def exit_process(code: int) -> NoReturn:
        raise SystemExit(code)

    store = InMemoryStore()
    monkeypatch.setattr(process_group, "open_store", lambda *_: ("127.0.0.1", store))
    monkeypatch.setattr(process_lifetime, "end_with_parent", lambda: None)
    monkeypatch.setattr(process_lifetime, "exit_process", exit_process)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    yield store
    _join_links()  # they would end this process when the patches are undone


def _join_links() -> None:
    for thread in threading.enumerate():
        if thread.name == "parent-link":
            thread.join(20)
            assert not thread.is_alive()


def _terms(world: World, start_timeout: float = 20) -> Terms:
    return replace(TERMS, world=world, start_timeout=start_timeout)


def _rank_0(_context: RankContext, _argument: object) -> None:
    """Rank 0 has nothing to do."""


def _link(connection: Any, said: list[str]) -> joined_rank._ParentLink:
    say = lambda sentence, _: said.append(sentence)  # noqa: E731
    return joined_rank._ParentLink(connection, "there", _terms(RANK_1), "cpu", (), say)


def _connected(store: Any, rank: int, **settings: str) -> Connection:
    terms = replace(_terms(replace(RANK_1, rank=rank)), shared_settings=settings)
    connection, _ = connections.connect(store, terms.hello(), terms)
    joined_rank._compared_clock(connection, 20)
    return connection


def _group_of_two(
    store: InMemoryStore, start_timeout: float = 20, shared_paths: tuple[str, ...] = ()
) -> Group:
    """Rank 0's group and, in `joined_rank._parents`, the link of rank 1."""

    def connect() -> None:
        joined_rank._parents[:] = [_link(_connected(store, 1), [])]

    with ThreadPoolExecutor() as rank:
        rank.submit(connect)
        terms = replace(_terms(WORLD, start_timeout), shared_paths=shared_paths)
        return join_ranks(terms, _rank_0, None)


@pytest.mark.long
@pytest.mark.timing
def test_a_rank_that_stops_after_it_connected_is_named(store: InMemoryStore) -> None:
    with ThreadPoolExecutor() as rank:
        connected = rank.submit(connections.connect, store, TERMS.hello(), TERMS)
        with pytest.raises(RankError, match=r"rank 1 \(here\) connected, but does not respond"):
            join_ranks(_terms(WORLD, allowing_for_others(1)), _rank_0, None)
        connected.result()[0].close()  # it was open until now


def test_ranks_that_come_after_one_with_another_option_hear_of_it(store: InMemoryStore) -> None:
    world = replace(WORLD, size=3)
    with ThreadPoolExecutor() as ranks:
        group = ranks.submit(join_ranks, _terms(world), _rank_0, None)
        first = ranks.submit(_connected, store, 1, steps="9").result(20)
        others = [first, ranks.submit(_connected, store, 2).result(20)]
        with pytest.raises(RequestError, match=r"rank 1 \(here\) was started with steps 9"):
            group.result(20)
    for connection in others:
        end = connections.receive(connection, time.monotonic() + 20)
        assert json.loads(end.removeprefix(END))["code"] == RequestError.exit_code


def test_a_second_process_of_the_same_rank_ends_the_first(store: InMemoryStore) -> None:
    """It would wait for rank 0 as long as that one runs."""
    world = replace(WORLD, size=3)
    with ThreadPoolExecutor() as ranks:
        group = ranks.submit(join_ranks, _terms(world), _rank_0, None)
        first, second, _ = (ranks.submit(_connected, store, rank).result(20) for rank in (1, 1, 2))
        with pytest.raises(EOFError):
            connections.receive(first, time.monotonic() + 20)
        assert connections.receive(second, time.monotonic() + 20) == BEGIN
        group.result(20).kill()


def test_what_all_hosts_share_is_looked_for_there(
    store: InMemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process stands for both hosts; the second sees no folder named `private`."""
    image, out = tmp_path / "photo.jpg", tmp_path / "out"
    image.touch()
    group = _group_of_two(store, shared_paths=(str(image), str(out)))
    group.kill()
    assert not list(out.iterdir()), "the probe is gone"

    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: "private" not in path and exists(path))
    (tmp_path / "private").mkdir()
    (tmp_path / "private/photo.jpg").touch()
    for path in ("private/out", "private/photo.jpg"):
        shared = str(tmp_path / path)
        folder = shared.removesuffix("/photo.jpg")
        with pytest.raises(RequestError, match=f"here cannot use '{folder}' of rank 0's host"):
            _group_of_two(store, shared_paths=(str(out), shared))
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        # Before it listens, so without another rank, which would look for it in vain.
        join_ranks(
            replace(_terms(WORLD), shared_paths=(str(tmp_path / "file/out"),)), _rank_0, None
        )


def test_a_rank_reports_the_signal_that_ends_it(store: InMemoryStore) -> None:
    group = _group_of_two(store)
    (parent,) = joined_rank._parents
    assert parent.receive(20) is not None, "the sign to begin"
    with pytest.raises(SystemExit) as end:
        joined_rank._exit_on_signal(2)
    assert end.value.code == 128 + 2
    ((rank, message),) = group.poll(20)
    assert rank == 1
    assert json.loads(message)["error"]["type"] == Interrupted.__name__
    group.kill()


def test_a_rank_gives_up_if_rank_0_does_not_answer() -> None:
    ours, theirs = Pipe()
    with pytest.raises(RankError, match="rank 0 does not answer"):
        joined_rank._compared_clock(theirs, 0.1)
    ours.close()


@pytest.mark.usefixtures("store")
def test_an_invalid_message_ends_a_rank() -> None:
    ours, theirs = Pipe()
    said: list[str] = []
    ours.send_bytes(b".no JSON")
    _link(theirs, said)
    _join_links()
    (reason,) = said
    assert "sent an invalid message" in reason


@pytest.mark.parametrize(
    ("of_send", "reason"),
    [
        (TimeoutError(errno.ETIMEDOUT, "timed out"), "nothing has reached rank 0 (there) for 5 s"),
        (OSError(errno.EHOSTUNREACH, "no route"), "nothing has reached rank 0 (there) for 5 s"),
        (BrokenPipeError(errno.EPIPE, "closed"), "rank 0 (there) is gone"),
    ],
)
@pytest.mark.usefixtures("store")
def test_a_silent_host_is_named_even_if_a_heartbeat_finds_it(of_send: OSError, reason: str) -> None:
    """Linux tells one system call of the timeout; after it, a read finds the end of the data."""
    sent, said = threading.Event(), list[str]()

    def receive() -> NoReturn:
        sent.wait(20)
        raise EOFError

    connection: Any = Mock(
        send_bytes=Mock(side_effect=[of_send, BrokenPipeError]), recv_bytes=receive
    )
    parent = _link(connection, said)
    for _ in range(2):
        with pytest.raises(OSError):  # noqa: PT011
            parent.send(Heartbeat().to_bytes())
    sent.set()
    _join_links()
    assert said[0].startswith(reason)
