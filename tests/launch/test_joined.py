"""The ranks of a launcher: connections, handshake, clocks, channels; every wait for rank 0 ends."""

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
from torch.distributed import HashStore

from svdpp.errors import Interrupted, OutputError, RankError, RequestError
from svdpp.launch import joined, process_group, process_lifetime
from svdpp.launch.group import BEGIN, END, Channel, Group, QueuedChannel, RankContext
from svdpp.launch.joined import RankHello, RankListener, Terms, join_ranks
from svdpp.launch.process_group import choose_interface
from svdpp.launch.world import World
from svdpp.worker import rank as rank_module
from svdpp.worker.messages import Heartbeat
from tests.faults.processes import allowing_for_others

# The tests replace the exit of a process by SystemExit, also in threads.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

TERMS = Terms(
    world=World(rank=1, local_rank=1, size=2, local_size=2, launcher="torchrun"),
    shared_settings={"dtype": "fp16"},
    start_timeout=20,
    peer_timeout=5,
)
HELLO = TERMS.hello()._replace(host="here")


@pytest.fixture
def bare_store() -> HashStore:
    """Stands in for the launcher's store, within this process."""
    return HashStore()


@pytest.fixture
def listener(bare_store: HashStore) -> Iterator[RankListener]:
    listener = RankListener(bare_store, "127.0.0.1", peer_timeout=5)
    yield listener
    listener.close()


def _accept(listener: RankListener) -> RankHello:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if (accepted := listener.accept()) is not None:
            return accepted[0]
    raise AssertionError("no rank connected")


def test_clients_without_the_secret_are_rejected(
    bare_store: HashStore, listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined, "_HANDSHAKE_SECONDS", 1)
    target = listener.endpoint.address, listener.endpoint.port
    with socket.create_connection(target), socket.create_connection(target) as loud:
        loud.sendall(b"\0\0\0\x20" + b"x" * 32)
        assert [listener.accept(), listener.accept()] == [None, None]
        with ThreadPoolExecutor() as rank:
            rank.submit(joined.connect, bare_store, HELLO, TERMS)
            assert _accept(listener) == HELLO, "a rank with the secret must still be accepted"


def test_the_endpoint_of_an_earlier_attempt_is_skipped(
    bare_store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_failed, connect = threading.Event(), socket.create_connection

    def connecting(*arguments: Any, **options: Any) -> socket.socket:
        try:
            return connect(*arguments, **options)
        except OSError:
            has_failed.set()
            raise

    monkeypatch.setattr(socket, "create_connection", connecting)
    RankListener(bare_store, "127.0.0.1", peer_timeout=5).close()
    with ThreadPoolExecutor() as rank:
        rank.submit(joined.connect, bare_store, HELLO, TERMS)
        assert has_failed.wait(20)
        now = RankListener(bare_store, "127.0.0.1", peer_timeout=5)
        assert _accept(now) == HELLO
        now.close()


def test_a_rank_0_of_another_version_is_told(bare_store: HashStore) -> None:
    bare_store.set(joined._KEY, '{"address": "127.0.0.1", "port": 1, "secret": "00"}')
    with pytest.raises(RankError, match="and rank 0 have different versions of svdpp"):
        joined.connect(bare_store, HELLO, TERMS)


def test_a_rank_without_rank_0_gives_up_in_time(bare_store: HashStore) -> None:
    with pytest.raises(RankError, match=r"rank 1 \(here\) could not connect to rank 0 in time"):
        joined.connect(bare_store, HELLO, replace(TERMS, start_timeout=0.3))


@pytest.mark.parametrize("num_pauses", [0, joined._NUM_ROUNDS // 2])
def test_clocks_are_compared(monkeypatch: pytest.MonkeyPatch, num_pauses: int) -> None:
    """Also by a thread that is paused, at first, before it reads its wall clock."""
    pauses, own, wall_clock = iter(range(num_pauses)), threading.current_thread(), time.time

    def read() -> float:
        if threading.current_thread() is own and next(pauses, None) is not None:
            time.sleep(0.1)
        return wall_clock()

    (ours, theirs), deadline = Pipe(), time.monotonic() + 20
    with ThreadPoolExecutor() as rank_0:
        rank_0.submit(joined.answer_clock, theirs, deadline)
        monkeypatch.setattr(time, "time", read)
        offset = joined.compare_clocks(ours, deadline)
    assert abs(offset.monotonic_ahead) < 0.05
    assert abs(offset.wall_ahead) < 0.05


@pytest.mark.parametrize(
    ("peer", "given"), [("10.0.0.1", {"GLOO_SOCKET_IFNAME": "lo"}), ("127.0.0.1", {})]
)
def test_gloo_and_nccl_use_the_interface_that_is_chosen_or_leads_to_the_store(
    peer: str, given: dict[str, str]
) -> None:
    environment = dict(given)
    assert choose_interface(peer, spans_hosts=False, environment=environment) == "127.0.0.1"
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    with pytest.raises(RequestError, match=r"127\.0\.0\.1, which other hosts cannot reach"):
        choose_interface("127.0.0.1", spans_hosts=True, environment=given)
    with pytest.raises(RequestError, match="GLOO_SOCKET_IFNAME names 'none0'"):
        choose_interface(peer, spans_hosts=False, environment={"GLOO_SOCKET_IFNAME": "none0"})


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


# --- rank 0 and a rank before the work begins ---------------------------------------------------

WORLD = World(rank=0, local_rank=0, size=2, local_size=1, num_hosts=2, launcher="torchrun")
RANK_1 = replace(WORLD, rank=1, host=1)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[HashStore]:
    """The store of a world within this process; nothing ends the process."""

    def exit_process(code: int) -> NoReturn:
        raise SystemExit(code)

    store = HashStore()
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


def _link(connection: Any, said: list[str]) -> rank_module._ParentLink:
    say = lambda sentence, _: said.append(sentence)  # noqa: E731
    return rank_module._ParentLink(connection, "there", _terms(RANK_1), "cpu", (), say)


def _connected(store: Any, rank: int, **settings: str) -> Connection:
    terms = replace(_terms(replace(RANK_1, rank=rank)), shared_settings=settings)
    connection, _ = joined.connect(store, terms.hello(), terms)
    rank_module._compared_clock(connection, 20)
    return connection


def _group_of_two(
    store: HashStore, start_timeout: float = 20, shared_paths: tuple[str, ...] = ()
) -> Group:
    """Rank 0's group and, in `rank_module._parents`, the link of rank 1."""

    def connect() -> None:
        rank_module._parents[:] = [_link(_connected(store, 1), [])]

    with ThreadPoolExecutor() as rank:
        rank.submit(connect)
        terms = replace(_terms(WORLD, start_timeout), shared_paths=shared_paths)
        return join_ranks(terms, _rank_0, None)


@pytest.mark.long
@pytest.mark.timing
def test_a_rank_that_stops_after_it_connected_is_named(store: HashStore) -> None:
    with ThreadPoolExecutor() as rank:
        connected = rank.submit(joined.connect, store, TERMS.hello(), TERMS)
        with pytest.raises(RankError, match=r"rank 1 \(here\) connected, but does not respond"):
            join_ranks(_terms(WORLD, allowing_for_others(1)), _rank_0, None)
        connected.result()[0].close()  # it was open until now


def test_ranks_that_come_after_one_with_another_option_hear_of_it(store: HashStore) -> None:
    world = replace(WORLD, size=3)
    with ThreadPoolExecutor() as ranks:
        group = ranks.submit(join_ranks, _terms(world), _rank_0, None)
        first = ranks.submit(_connected, store, 1, steps="9").result(20)
        others = [first, ranks.submit(_connected, store, 2).result(20)]
        with pytest.raises(RequestError, match=r"rank 1 \(here\) was started with steps 9"):
            group.result(20)
    for connection in others:
        end = joined.receive(connection, time.monotonic() + 20)
        assert json.loads(end.removeprefix(END))["code"] == RequestError.exit_code


def test_a_second_process_of_the_same_rank_ends_the_first(store: HashStore) -> None:
    """It would wait for rank 0 as long as that one runs."""
    world = replace(WORLD, size=3)
    with ThreadPoolExecutor() as ranks:
        group = ranks.submit(join_ranks, _terms(world), _rank_0, None)
        first, second, _ = (ranks.submit(_connected, store, rank).result(20) for rank in (1, 1, 2))
        with pytest.raises(EOFError):
            joined.receive(first, time.monotonic() + 20)
        assert joined.receive(second, time.monotonic() + 20) == BEGIN
        group.result(20).kill()


def test_what_all_hosts_share_is_looked_for_there(
    store: HashStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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


def test_a_rank_reports_the_signal_that_ends_it(store: HashStore) -> None:
    group = _group_of_two(store)
    (parent,) = rank_module._parents
    assert parent.receive(20) is not None, "the sign to begin"
    with pytest.raises(SystemExit) as end:
        rank_module._exit_on_signal(2)
    assert end.value.code == 128 + 2
    ((rank, message),) = group.poll(20)
    assert rank == 1
    assert json.loads(message)["error"]["type"] == Interrupted.__name__
    group.kill()


def test_a_rank_gives_up_if_rank_0_does_not_answer() -> None:
    ours, theirs = Pipe()
    with pytest.raises(RankError, match="rank 0 does not answer"):
        rank_module._compared_clock(theirs, 0.1)
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
