"""Owns the connections between rank 0 and ranks that others have started: one each, both ends.

They listen on one address, and begin with a secret that went through the launcher's store. A
neighbour that is gone without a word, or cannot be reached, is noticed by the kernel: each end
sends something every second, and what nobody acknowledges ends the connection.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Protocol

from svdpp.errors import RankError

#: What a message of rank 0's begins with, where it is no command; those begin with a brace.
ASK, BEGIN, FILE, END = b"?", b"!", b"#", b"."

_KEY = "svdpp/line"
_HANDSHAKE_SECONDS = 10
_POLL_SECONDS = 0.1
_BACKLOG = 4096


class Store(Protocol):
    """What is needed of the launcher's store."""

    def set(self, key: str, value: str) -> None:
        """Keeps `value`, in place of an older one."""

    def check(self, keys: list[str]) -> bool:
        """Whether all of `keys` are kept."""

    def get(self, key: str) -> bytes:
        """What is kept."""


@dataclass(frozen=True, kw_only=True)
class RankHello:
    """Who is at the other end of rank 0's line, in its own words.

    Args:
        rank: which one.
        local_rank: its number on its host.
        host: the host's name.
        host_index: the host's number.
        shared settings: what must be the same on every rank, by name.
        error: why it cannot even begin, as a record; None where it can.
    """

    rank: int
    local_rank: int
    host: str
    host_index: int
    shared_settings: dict[str, str] = field(default_factory=dict)
    error: dict[str, Any] | None = None


class RankListener:
    """Rank 0's end: listens on one address, and takes each rank's line.

    Args:
        store: where the ranks look for the address and the secret.
        address: of this host.
        silence: seconds after which a line on which nothing is acknowledged is given up.
    """

    def __init__(self, store: Store, address: str, silence: float) -> None:
        self._silence = silence
        self._secret = secrets.token_bytes(32)
        self._socket = socket.create_server(
            (address, 0), family=_family(address), backlog=_BACKLOG, dualstack_ipv6=False
        )
        self._socket.settimeout(_POLL_SECONDS)
        port = self._socket.getsockname()[1]
        place = {"address": address, "port": port, "secret": self._secret.hex()}
        store.set(_KEY, json.dumps(place))

    def accept(self) -> tuple[RankHello, Connection] | None:
        """The next rank to call; None where none has for a moment, or it was none of ours."""
        try:
            accepted, _ = self._socket.accept()
        except TimeoutError:
            return None
        line = _line(accepted, self._silence)
        try:
            with _in_time(line):
                deliver_challenge(line, self._secret)
                answer_challenge(line, self._secret)
                return RankHello(**json.loads(line.recv_bytes())), line
        except (OSError, EOFError, AuthenticationError, ValueError, TypeError):
            line.close()
            return None

    def close(self) -> None:
        """Listens no longer; the lines stay."""
        self._socket.close()


def call(store: Store, hello: RankHello, *, silence: float, deadline: float) -> Connection:
    """This rank's line to rank 0, whose listener may yet have to open.

    What an earlier attempt of the launcher's has left in the store leads nowhere, and is tried
    until rank 0 has put its own in the place.

    Args:
        store: the launcher's.
        hello: this rank.
        silence: as for `RankListener`.
        deadline: of the monotonic clock.

    Raises:
        RankError: rank 0 is not there in time, or the launcher's store is gone.
    """
    while time.monotonic() < deadline:
        try:
            place = json.loads(store.get(_KEY)) if store.check([_KEY]) else None
        except RuntimeError as error:
            raise RankError(
                f"rank {hello.rank} ({hello.host}) lost the launcher's store before rank 0 was "
                "there",
                "the host of rank 0 says why",
            ) from error
        if place is not None and (line := _try_to_call(place, hello, silence)) is not None:
            return line
        time.sleep(_POLL_SECONDS)
    raise RankError(
        f"rank {hello.rank} ({hello.host}) found no rank 0 to report to",
        "raise --start-timeout, or look for what keeps rank 0 from starting on its host",
    )


def receive(line: Connection, deadline: float, size: int | None = None) -> bytes:
    """The next message, where both ends talk in turns.

    A process that is stopped goes on acknowledging: its silence is no matter of the kernel's.

    Args:
        line: to the other end.
        deadline: of the monotonic clock.
        size: the most that it can have, in bytes.

    Raises:
        TimeoutError: none has come by then.
        OSError, EOFError: none will, or it is larger.
    """
    if not line.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError
    return line.recv_bytes(size)


def _try_to_call(place: dict[str, Any], hello: RankHello, silence: float) -> Connection | None:
    target, secret = (place["address"], place["port"]), bytes.fromhex(place["secret"])
    try:
        connected = socket.create_connection(target, timeout=_HANDSHAKE_SECONDS)
    except OSError:
        return None
    connected.settimeout(None)
    line = _line(connected, silence)
    try:
        with _in_time(line):
            answer_challenge(line, secret)
            deliver_challenge(line, secret)
            line.send_bytes(json.dumps(asdict(hello)).encode())
    except (OSError, EOFError, AuthenticationError):
        line.close()
        return None
    return line


def _line(connected: socket.socket, silence: float) -> Connection:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(silence * 1000))
    # For the end that only listens.
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(silence / 3)))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(silence / 6)))
    connected.setblocking(True)
    return Connection(connected.detach())


@contextlib.contextmanager
def _in_time(line: Connection) -> Iterator[None]:
    """Bounds each read in the block: a stranger could connect and say nothing."""
    _set_read_timeout(line, _HANDSHAKE_SECONDS)
    yield
    _set_read_timeout(line, 0)


def _set_read_timeout(line: Connection, seconds: int) -> None:
    with socket.socket(fileno=line.fileno()) as view:
        view.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
        view.detach()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
