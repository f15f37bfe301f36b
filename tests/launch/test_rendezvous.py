"""Ranks of a launcher: connections, handshake, clocks and channels; every wait for rank 0 ends."""

from __future__ import annotations

import contextlib
import errno
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore

from svdpp.errors import OutputError, RankError, RequestError
from svdpp.launch import process_group, process_lifetime, rendezvous
from svdpp.launch.rendezvous import RankListener, RendezvousConfig, join_ranks
from svdpp.launch.worker_group import END, ControlChannel, QueuedChannel, WorkerGroup
from svdpp.launch.world import World
from svdpp.worker import secondary_rank
from svdpp.worker.messages import Heartbeat
from tests.support.processes import allowing_for_others

CONFIG = RendezvousConfig(
    world=World(rank=1, local_rank=1, size=2, local_size=2, launcher="torchrun"),
    shared_settings={"dtype": "fp16"},
    start_timeout=20,
    peer_timeout=5,
)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """In-memory store for the rendezvous of ranks that are simulated in this process."""
    store = HashStore()
    monkeypatch.setattr(process_group, "open_store", lambda *_: ("127.0.0.1", store))
    monkeypatch.setattr(process_lifetime, "end_with_parent", lambda: None)
    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    return store


def test_silent_connections_delay_no_rank(store: HashStore) -> None:
    """Connections that send nothing do not delay the start.

    Anybody on the network can open such connections, and each one could block the start for 10 s.
    """
    listener = RankListener(store, "127.0.0.1", peer_timeout=5)
    target = listener.endpoint.address, listener.endpoint.port
    with contextlib.ExitStack() as silent, ThreadPoolExecutor() as rank:
        for _ in range(5):
            silent.enter_context(socket.create_connection(target))
        begun = time.monotonic()
        rank.submit(rendezvous.connect, store, CONFIG.hello(), CONFIG)
        hello, _ = next(filter(None, (listener.accept() for _ in range(200))))
        assert hello.rank == 1
        assert time.monotonic() - begun < allowing_for_others(5)
    listener.close()


def test_clients_without_the_secret_are_rejected(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_HANDSHAKE_SECONDS", 1)
    listener = RankListener(store, "127.0.0.1", peer_timeout=5)
    target = listener.endpoint.address, listener.endpoint.port
    with socket.create_connection(target), socket.create_connection(target) as loud:
        loud.sendall(b"\0\0\0\x20" + b"x" * 32)
        assert [listener.accept(), listener.accept()] == [None, None]
        with ThreadPoolExecutor() as rank:
            rank.submit(rendezvous.connect, store, CONFIG.hello(), CONFIG)
            # Each call of `accept` waits only for a moment.
            hello, _ = next(filter(None, (listener.accept() for _ in range(200))))
            assert hello == CONFIG.hello(), "a rank with the secret must still be accepted"
    listener.close()


def test_a_rank_0_of_another_version_is_told(store: HashStore) -> None:
    store.set(rendezvous._KEY, '{"address": "127.0.0.1", "port": 1, "secret": "00"}')
    with pytest.raises(RankError, match="and rank 0 have different versions of svdpp"):
        rendezvous.connect(store, CONFIG.hello(), CONFIG)


@pytest.mark.parametrize("was_restarted", [False, True])
def test_a_rank_without_rank_0_gives_up_in_time(store: HashStore, was_restarted: bool) -> None:
    """A rank gives up in time if there is no rank 0, even if the store has an outdated endpoint."""
    if was_restarted:
        RankListener(store, "127.0.0.1", peer_timeout=5).close()
    with pytest.raises(RankError, match=r"rank 1 \(here\) could not connect to rank 0 in time"):
        rendezvous.connect(store, CONFIG.hello(), replace(CONFIG, start_timeout=0.3))


def test_clocks_are_compared() -> None:
    (ours, theirs), deadline = Pipe(), time.monotonic() + 20
    with ThreadPoolExecutor() as rank_0:
        rank_0.submit(rendezvous.serve_clock, theirs, deadline)
        offset = rendezvous.measure_clock_offset(ours, deadline)
    assert abs(offset.monotonic_ahead) < 0.05


def test_a_rank_gives_up_if_rank_0_does_not_answer() -> None:
    ours, theirs = Pipe()
    with pytest.raises(RankError, match="rank 0 does not respond"):
        secondary_rank._measure_clock_offset(theirs, 0.1)
    ours.close()


MESSAGES = [bytes([number]) * 2**20 for number in range(3)]


@pytest.mark.parametrize("rank_is", ["reading", "busy", "gone"])
def test_messages_to_a_rank_are_queued_in_order_and_dropped_at_the_end(rank_is: str) -> None:
    """Messages to a rank are sent in order; at the end, messages that were not sent are dropped.

    Neither `send` nor `close` waits for the rank, and no thread is left.
    """
    ours, theirs = Pipe()
    parent, rank = QueuedChannel(ours), ControlChannel(theirs)
    if rank_is == "gone":
        theirs.close()
    for message in MESSAGES:
        parent.send(message)  # a message is larger than a pipe's buffer
    if rank_is == "reading":
        rank.send(b"busy")
        assert parent.receive(10) == b"busy"
        assert [rank.receive(10) for _ in MESSAGES] == MESSAGES
    parent.close()
    assert parent.connection.closed
    assert not parent._sender.is_alive()
    theirs.close()


WORLD = World(rank=0, local_rank=0, size=2, local_size=1, num_hosts=2, launcher="torchrun")


def _join(world: World, **config: Any) -> WorkerGroup:
    """Join the ranks of a launcher from rank 0, whose stage does nothing; return their group."""
    return join_ranks(
        replace(CONFIG, world=world, **config), lambda _context, _argument: None, None
    )


def _connected(store: HashStore, rank: int, **settings: str) -> Connection:
    world = replace(WORLD, rank=rank, host=1)
    config = replace(CONFIG, world=world, shared_settings=settings)
    connection, _ = rendezvous.connect(store, config.hello(), config)
    secondary_rank._measure_clock_offset(connection, 20)
    return connection


@pytest.mark.slow
@pytest.mark.timing
def test_a_rank_that_stops_after_it_connected_is_named(store: HashStore) -> None:
    with ThreadPoolExecutor() as rank:
        connected = rank.submit(rendezvous.connect, store, CONFIG.hello(), CONFIG)
        with pytest.raises(RankError, match=r"rank 1 \(here\) connected, but does not respond"):
            _join(WORLD, start_timeout=allowing_for_others(1))
        connected.result()[0].close()  # the rank's connection was open until now


def test_ranks_that_come_after_one_with_another_option_hear_of_it(store: HashStore) -> None:
    with ThreadPoolExecutor() as ranks:
        group = ranks.submit(_join, replace(WORLD, size=3))
        first = ranks.submit(_connected, store, 1, steps="9").result(20)
        others = [first, ranks.submit(_connected, store, 2).result(20)]
        with pytest.raises(RequestError, match=r"rank 1 \(here\) was started with steps 9"):
            group.result(20)
    for connection in others:
        end = rendezvous.receive(connection, time.monotonic() + 20)
        assert json.loads(end.removeprefix(END))["code"] == RequestError.exit_code


@pytest.mark.usefixtures("store")
def test_a_shared_folder_that_cannot_be_made_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written: Not a directory"):
        _join(WORLD, shared_paths=(str(tmp_path / "file/out"),))


@pytest.mark.usefixtures("store")
def test_a_silent_host_is_named_if_a_heartbeat_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent host is named, even if the heartbeat gets the timeout, and the read does not.

    Linux reports the timeout of a connection to only one system call. Later reads see the end of
    the data.
    """
    sent, ended, say = threading.Event(), threading.Event(), Mock()
    monkeypatch.setattr(process_lifetime, "exit_process", lambda _: ended.set())
    connection = Mock(**{"send_bytes.side_effect": OSError(errno.EHOSTUNREACH, "no route")})

    def receive() -> NoReturn:
        sent.wait(20)
        raise EOFError

    connection.recv_bytes = receive
    config = replace(CONFIG, world=replace(WORLD, rank=1, host=1))
    parent = secondary_rank._ParentChannel(connection, "there", config, "cpu", (), say)
    with pytest.raises(OSError, match="no route"):
        parent.send(Heartbeat().to_bytes())
    sent.set()
    assert ended.wait(20)
    assert say.call_args.args[0].startswith("nothing has reached rank 0 (there) for 5 s")
