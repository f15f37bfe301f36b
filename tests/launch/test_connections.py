"""Channels and connections: what a rank that does not read holds up, handshake, clocks, address."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing import Pipe
from typing import Any

import pytest

from svdpp.errors import RankError, RequestError
from svdpp.launch import connections
from svdpp.launch.connections import RankHello, RankListener, Terms
from svdpp.launch.group import Channel, QueuedChannel
from svdpp.launch.process_group import choose_interface
from svdpp.launch.world import World

WORLD = World(rank=1, local_rank=1, size=2, local_size=2, launcher="torchrun")
TERMS = Terms(world=WORLD, shared_settings={"dtype": "fp16"}, start_timeout=20, peer_timeout=5)
HELLO = replace(TERMS.hello(), host="here")


class InMemoryStore:
    """Stands in for the launcher's store, within this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


@pytest.fixture
def store() -> InMemoryStore:
    return InMemoryStore()


@pytest.fixture
def listener(store: InMemoryStore) -> Iterator[RankListener]:
    listener = RankListener(store, "127.0.0.1", peer_timeout=5)
    yield listener
    listener.close()


def _accept(listener: RankListener) -> RankHello:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (accepted := listener.accept()) is not None:
            return accepted[0]
    raise AssertionError("no rank connected")


def test_clients_without_the_secret_are_rejected(
    store: InMemoryStore, listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_HANDSHAKE_SECONDS", 1)
    target = listener.endpoint.address, listener.endpoint.port
    with socket.create_connection(target), socket.create_connection(target) as loud:
        loud.sendall(b"\0\0\0\x20" + b"x" * 32)
        assert [listener.accept(), listener.accept()] == [None, None]
        with ThreadPoolExecutor() as rank:
            rank.submit(connections.connect, store, HELLO, TERMS)
            assert _accept(listener) == HELLO, "a rank with the secret must still be accepted"


def test_the_endpoint_of_an_earlier_attempt_is_skipped(
    store: InMemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed, connect = threading.Event(), socket.create_connection

    def connecting(*arguments: Any, **options: Any) -> socket.socket:
        try:
            return connect(*arguments, **options)
        except OSError:
            has_failed.set()
            raise

    monkeypatch.setattr(socket, "create_connection", connecting)
    RankListener(store, "127.0.0.1", peer_timeout=5).close()
    with ThreadPoolExecutor() as rank:
        rank.submit(connections.connect, store, HELLO, TERMS)
        assert has_failed.wait(20)
        now = RankListener(store, "127.0.0.1", peer_timeout=5)
        assert _accept(now) == HELLO
        now.close()


def test_a_rank_without_rank_0_gives_up_in_time(store: InMemoryStore) -> None:
    with pytest.raises(RankError, match=r"rank 1 \(here\) could not connect to rank 0 in time"):
        connections.connect(store, HELLO, replace(TERMS, start_timeout=0.3))


@pytest.mark.parametrize("num_pauses", [0, connections._NUM_ROUNDS // 2])
def test_clocks_are_compared(monkeypatch: pytest.MonkeyPatch, num_pauses: int) -> None:
    """Also by a thread that is paused, at first, before it reads its wall clock."""
    pauses, own, wall_clock = iter(range(num_pauses)), threading.current_thread(), time.time

    def read() -> float:
        if threading.current_thread() is own and next(pauses, None) is not None:
            time.sleep(0.1)
        return wall_clock()

    (ours, theirs), deadline = Pipe(), time.monotonic() + 20
    with ThreadPoolExecutor() as rank_0:
        rank_0.submit(connections.answer_clock, theirs, deadline)
        monkeypatch.setattr(time, "time", read)
        offset = connections.compare_clocks(ours, deadline)
    assert abs(offset.monotonic_ahead) < 0.05
    assert abs(offset.wall_ahead) < 0.05


@pytest.mark.parametrize(
    ("peer", "environment"), [("10.0.0.1", {"GLOO_SOCKET_IFNAME": "lo"}), ("127.0.0.1", {})]
)
def test_gloo_and_nccl_use_the_interface_that_is_chosen_or_leads_to_the_store(
    peer: str, environment: dict[str, str]
) -> None:
    assert choose_interface(peer, spans_hosts=False, environment=environment) == "127.0.0.1"
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"GLOO_SOCKET_IFNAME": "none0"}, "GLOO_SOCKET_IFNAME names 'none0'"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "127.0.0.1, which other hosts cannot reach"),
        ({}, "which other hosts cannot reach"),
    ],
)
def test_unusable_interfaces_are_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        choose_interface("127.0.0.1", spans_hosts=True, environment=environment)


MESSAGES = [bytes([number]) * 2**20 for number in range(3)]


def _senders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sender"]


def test_messages_to_a_busy_rank_are_queued_in_order() -> None:
    ours, theirs = Pipe()
    parent, rank = QueuedChannel(ours), Channel(theirs)
    for message in MESSAGES:
        parent.send(message)  # each is larger than a pipe's buffer
    rank.send(b"busy")
    assert parent.receive(10) == b"busy"
    assert [rank.receive(10) for _ in MESSAGES] == MESSAGES
    parent.close()
    parent.close()
    theirs.close()


@pytest.mark.parametrize("has_ended", [False, True])
def test_send_and_close_do_not_wait_for_the_rank_and_leave_no_thread(has_ended: bool) -> None:
    before = _senders()
    ours, theirs = Pipe()
    parent = QueuedChannel(ours)
    if has_ended:
        theirs.close()
    for message in MESSAGES:
        parent.send(message)
    parent.close()
    assert parent.connection.closed
    assert _senders() == before
    theirs.close()
