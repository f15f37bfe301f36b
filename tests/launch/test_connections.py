"""Lines between rank 0 and a launcher's ranks, over loopback: secrets, strangers, clocks, ends."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from svdpp.errors import RankError, RequestError
from svdpp.launch import clock, connections
from svdpp.launch.connections import RankHello, RankListener
from svdpp.launch.network import choose_interface

CALLER = RankHello(
    rank=1, local_rank=1, host="here", host_index=0, shared_settings={"dtype": "fp16"}
)


class Board:
    """A store in this process."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    @property
    def place(self) -> dict[str, str]:
        (value,) = self.values.values()
        found: dict[str, str] = json.loads(value)
        return found


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def listener(board: Board) -> Iterator[RankListener]:
    made = RankListener(board, "127.0.0.1", silence=5)
    yield made
    made.close()


def _accepted(
    listener: RankListener, seconds: float = 20
) -> tuple[RankHello, connections.Connection]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (found := listener.accept()) is not None:
            return found
    raise AssertionError("nobody called")


def _calling(board: Board, found: list[connections.Connection]) -> threading.Thread:
    def work() -> None:
        found.append(connections.call(board, CALLER, silence=5, deadline=time.monotonic() + 20))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_rank_calls_and_says_who_it_is(board: Board, listener: RankListener) -> None:
    theirs: list[connections.Connection] = []
    thread = _calling(board, theirs)
    hello, line = _accepted(listener)
    thread.join()
    assert hello == CALLER
    line.send_bytes(b"{}")
    assert theirs[0].recv_bytes() == b"{}"
    line.close()
    with pytest.raises(EOFError):
        theirs[0].recv_bytes()


def test_it_listens_on_one_address(board: Board, listener: RankListener) -> None:  # noqa: ARG001
    assert board.place["address"] == "127.0.0.1"


def test_strangers_are_turned_away(
    board: Board, listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_HANDSHAKE_SECONDS", 1)
    target = "127.0.0.1", int(board.place["port"])
    silent = socket.create_connection(target)
    loud = socket.create_connection(target)
    loud.sendall(b"\0\0\0\x20" + b"x" * 32)
    assert [listener.accept(), listener.accept()] == [None, None]
    theirs: list[connections.Connection] = []
    thread = _calling(board, theirs)
    assert _accepted(listener)[0] == CALLER, "and the others are heard all the same"
    thread.join()
    silent.close()
    loud.close()


def test_what_an_earlier_attempt_left_is_passed_by(board: Board) -> None:
    earlier = RankListener(board, "127.0.0.1", silence=5)
    earlier.close()
    theirs: list[connections.Connection] = []
    thread = _calling(board, theirs)
    time.sleep(0.3)  # it has tried in vain
    now = RankListener(board, "127.0.0.1", silence=5)
    assert _accepted(now)[0] == CALLER
    thread.join()
    now.close()


def test_a_rank_without_rank_0_gives_up_in_time(board: Board) -> None:
    with pytest.raises(RankError, match=r"rank 1 \(here\) found no rank 0"):
        connections.call(board, CALLER, silence=5, deadline=time.monotonic() + 0.3)


def test_clocks_are_compared(board: Board, listener: RankListener) -> None:
    theirs: list[connections.Connection] = []
    thread = _calling(board, theirs)
    _, line = _accepted(listener)
    thread.join()
    deadline = time.monotonic() + 20
    teller = threading.Thread(target=clock.tell, args=(line, deadline))
    teller.start()
    found = clock.compare(theirs[0], deadline)
    teller.join()
    assert abs(found.monotonic_ahead) < 0.05
    assert abs(found.wall_ahead) < 0.05


def test_the_chosen_interface_is_gloos_and_nccls() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "lo"}
    assert choose_interface("10.0.0.1", spans_hosts=False, environment=environment) == "127.0.0.1"
    assert environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def test_without_a_choice_it_is_the_one_towards_the_store() -> None:
    environment: dict[str, str] = {}
    assert choose_interface("127.0.0.1", spans_hosts=False, environment=environment) == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"GLOO_SOCKET_IFNAME": "none0"}, "GLOO_SOCKET_IFNAME names 'none0'"),
        ({"GLOO_SOCKET_IFNAME": "lo"}, "127.0.0.1, which other hosts cannot reach"),
        ({}, "which other hosts cannot reach"),
    ],
)
def test_interfaces_that_lead_nowhere_are_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        choose_interface("127.0.0.1", spans_hosts=True, environment=environment)
