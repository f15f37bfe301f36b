"""Rendezvous of ranks that torchrun or srun started: each rank connects to rank 0 by TCP.

Rank 0 listens on one address, and writes its endpoint and a secret to the launcher's store. Both
ends of a connection prove that they know the secret. Each end sends a message every second, and the
kernel closes a connection if the other host does not acknowledge the messages. When all work is
done or a rank has failed, rank 0 sends END to all ranks, so that no rank outlives the run.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch.distributed import Store

from svdpp.errors import RankError, RequestError, error_from_dict
from svdpp.launch import process_group, process_lifetime
from svdpp.launch.worker_group import (
    BEGIN,
    ClockOffset,
    ControlChannel,
    EntryPoint,
    LaunchContext,
    QueuedChannel,
    WorkerGroup,
    WorkerHandle,
)
from svdpp.launch.world import World
from svdpp.media.output_files import disk_errors

_KEY = "svdpp/rank_0"
_HANDSHAKE_SECONDS = 10
_POLL_SECONDS = 0.1
_BACKLOG = 4096
# Largest number of concurrent handshakes. Each handshake occupies a thread for up to
# `_HANDSHAKE_SECONDS`.
_MAX_HANDSHAKES = 256


class RankHello(NamedTuple):
    """First message of a rank to rank 0, if a launcher (torchrun or srun) started the ranks."""

    rank: int
    local_rank: int
    host: str
    """Name of the rank's host."""
    shared_settings: dict[str, str]
    """Settings of the rank, which must equal the settings of rank 0."""
    missing: list[str]
    """Paths in `Endpoint.probes` that do not exist on this host, although all hosts must share
    them."""
    error: dict[str, Any] | None
    """Error that keeps the rank from starting, from `error_to_dict`; None: no error."""


class Endpoint(NamedTuple):
    """Address on which rank 0 listens, with the data that other ranks need to connect."""

    address: str
    port: int
    secret: str
    """Secret in hex, which both ends of a connection must know."""
    token: str
    """Identifier of this start of the ranks. It changes if the launcher restarts the ranks. Unlike
    the secret, it may appear in messages."""
    host: str
    """Name of rank 0's host."""
    probes: list[str]
    """Paths of files on rank 0's host. If they also exist on another host, that host shares
    the folders of these files."""


@dataclass(frozen=True, kw_only=True)
class RendezvousConfig:
    """Configuration of the rendezvous of ranks that a launcher started."""

    world: World
    """Number of the rank, number of ranks, and host of the rank."""
    backend: str = "gloo"
    shared_settings: dict[str, str] = field(default_factory=dict)
    """Settings that must be equal on all ranks, by name."""
    shared_paths: tuple[str, ...] = ()
    """Files and folders of rank 0 that all hosts must share."""
    start_timeout: float
    """Seconds within which all ranks must connect to rank 0."""
    peer_timeout: float
    """Seconds without a TCP acknowledgement after which a host counts as lost."""

    def hello(self, error: dict[str, Any] | None = None) -> RankHello:
        """Return the first message of this process's rank to rank 0.

        Args:
            error: Error that keeps the rank from starting, from `error_to_dict`; None: no error.
        """
        world, host = self.world, socket.gethostname()
        return RankHello(world.rank, world.local_rank, host, self.shared_settings, [], error)


class RankListener:
    """Listener of rank 0, which accepts the connection of each other rank.

    Args:
        store: Store to which the endpoint of rank 0 is written.
        address: Address of this host, IPv4 or IPv6.
        peer_timeout: Seconds without a TCP acknowledgement after which a connection is closed.
        probes: Paths of files that must exist on all hosts.

    Raises:
        OSError: The system cannot listen on the address.
    """

    def __init__(
        self, store: Store, address: str, peer_timeout: float, probes: Sequence[str] = ()
    ) -> None:
        self._peer_timeout = peer_timeout
        self._secret = secrets.token_bytes(32)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._socket.settimeout(_POLL_SECONDS)
        self._greeted: queue.SimpleQueue[tuple[RankHello, Connection]] = queue.SimpleQueue()
        self._handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)
        port, token = self._socket.getsockname()[1], secrets.token_hex(8)
        secret, host = self._secret.hex(), socket.gethostname()
        self.endpoint = Endpoint(address, port, secret, token, host, list(probes))
        store.set(_KEY, json.dumps(self.endpoint._asdict()))

    def accept(self) -> tuple[RankHello, Connection] | None:
        """Return the next rank that has connected to rank 0 and proved that it knows the secret.

        The handshake of each connection runs in its own thread, so that a silent connection does
        not delay other connections.

        Returns:
            First message of the rank, and the connection to it; None if no rank is ready yet.
        """
        with contextlib.suppress(TimeoutError):
            accepted, _ = self._socket.accept()
            if self._handshakes.acquire(blocking=False):
                run = threading.Thread(target=self._greet, args=[accepted], daemon=True)
                run.start()
            else:
                accepted.close()  # too many handshakes are open; the rank will connect again
        with contextlib.suppress(queue.Empty):
            return self._greeted.get_nowait()
        return None

    def _greet(self, accepted: socket.socket) -> None:
        try:
            if (greeted := self._handshake(accepted)) is not None:
                self._greeted.put(greeted)
        finally:
            self._handshakes.release()

    def _handshake(self, accepted: socket.socket) -> tuple[RankHello, Connection] | None:
        connection = _to_connection(accepted, self._peer_timeout)
        try:
            with _handshake_deadline(connection):
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                return RankHello(**json.loads(connection.recv_bytes())), connection
        except (OSError, EOFError, AuthenticationError, ValueError, TypeError):
            connection.close()
            return None

    def close(self) -> None:
        """Stop listening for ranks on rank 0. Accepted connections stay open."""
        self._socket.close()


def connect(
    store: Store, hello: RankHello, config: RendezvousConfig
) -> tuple[Connection, Endpoint]:
    """Connect this rank to rank 0, with retries until rank 0 listens.

    Retries are needed, because until rank 0 listens, the store may have no endpoint, or the
    endpoint of an earlier start of the ranks.

    Args:
        store: Store that `process_group.open_store` returned.
        hello: First message of this rank.
        config: Configuration with the timeouts.

    Returns:
        Connection to rank 0, and the endpoint of rank 0.

    Raises:
        RankError: Rank 0 cannot be reached in time, has ended, or has another version of svdpp.
    """
    deadline = time.monotonic() + config.start_timeout
    while time.monotonic() < deadline:
        try:
            endpoint = Endpoint(**json.loads(store.get(_KEY))) if store.check([_KEY]) else None
        except RuntimeError as error:
            raise RankError(
                f"rank {hello.rank} ({hello.host}) lost the launcher's store before rank 0 started",
                "see the output of rank 0 on its host",
                details={"rank": hello.rank, "host": hello.host},
            ) from error
        # A TypeError means that the endpoint in the store does not have the fields of `Endpoint`.
        except TypeError as error:
            raise RankError(
                f"rank {hello.rank} ({hello.host}) and rank 0 have different versions of svdpp",
                "install the same version of svdpp on every host",
                details={"rank": hello.rank, "host": hello.host},
            ) from error
        if endpoint is not None:
            connection = _try_to_connect(endpoint, hello, config.peer_timeout)
            if connection is not None:
                return connection, endpoint
        time.sleep(_POLL_SECONDS)
    raise RankError(
        f"rank {hello.rank} ({hello.host}) could not connect to rank 0 in time",
        "raise `start_timeout_seconds`, or check on the host of rank 0 why it does not start",
        details={
            **{"rank": hello.rank, "host": hello.host, "peer": 0},
            "timeout_seconds": config.start_timeout,
        },
    )


def receive(connection: Connection, deadline: float, max_bytes: int | None = None) -> bytes:
    """Return the next message of a connection between ranks; raise `TimeoutError` at a deadline.

    The deadline is needed, because the kernel's timeout does not detect a stopped process.

    Args:
        connection: Connection to another rank.
        deadline: Time on the monotonic clock, in seconds.
        max_bytes: Largest size of the message; None: any size.

    Raises:
        TimeoutError: No message has arrived by the deadline.
        OSError: The connection is broken, or the message is larger than `max_bytes`.
        EOFError: The other end has closed the connection.
    """
    if not connection.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError
    return connection.recv_bytes(max_bytes)


def _try_to_connect(endpoint: Endpoint, hello: RankHello, peer_timeout: float) -> Connection | None:
    target, secret = (endpoint.address, endpoint.port), bytes.fromhex(endpoint.secret)
    missing = [path for path in endpoint.probes if not os.path.exists(path)]
    try:
        connected = socket.create_connection(target, timeout=_HANDSHAKE_SECONDS)
    except OSError:
        return None
    connection = _to_connection(connected, peer_timeout)
    try:
        with _handshake_deadline(connection):
            answer_challenge(connection, secret)
            deliver_challenge(connection, secret)
            greeting = hello._replace(missing=missing)._asdict()
            connection.send_bytes(json.dumps(greeting).encode())
    except (OSError, EOFError, AuthenticationError):
        connection.close()
        return None
    return connection


def _to_connection(connected: socket.socket, peer_timeout: float) -> Connection:
    options = {
        socket.TCP_NODELAY: 1,
        socket.TCP_USER_TIMEOUT: int(peer_timeout * 1000),
        # TCP_USER_TIMEOUT covers only unacknowledged data. An end that only reads needs keepalive.
        socket.TCP_KEEPIDLE: max(1, int(peer_timeout / 3)),
        socket.TCP_KEEPINTVL: max(1, int(peer_timeout / 6)),
    }
    for option, value in options.items():
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setblocking(True)
    return Connection(connected.detach())


@contextlib.contextmanager
def _handshake_deadline(connection: Connection) -> Iterator[None]:
    """In the `with` block, raise an error if a read from the connection takes too long.

    A process that connects may never send data.
    """
    with socket.socket(fileno=os.dup(connection.fileno())) as view:
        option = socket.SOL_SOCKET, socket.SO_RCVTIMEO
        view.setsockopt(*option, struct.pack("ll", _HANDSHAKE_SECONDS, 0))
        yield
        view.setsockopt(*option, struct.pack("ll", 0, 0))


_NUM_ROUNDS = 8
_TIME = struct.Struct("<d")


def measure_clock_offset(connection: Connection, deadline: float) -> ClockOffset:
    """Measure the offset of this host's clock to that of rank 0, which runs `serve_clock`.

    The offset is computed by Cristian's algorithm (Probabilistic clock synchronization, 1989): only
    the fastest of several round trips is used, and rank 0 is assumed to have read its clock halfway
    through the round trip.

    Args:
        connection: Connection to rank 0.
        deadline: Time on the monotonic clock, in seconds.

    Raises:
        OSError, EOFError: Rank 0 does not respond in time, or has ended.
    """
    rounds: list[tuple[float, ClockOffset]] = []
    for _ in range(_NUM_ROUNDS):
        start = time.monotonic()
        connection.send_bytes(b"?")
        (of_rank_0,) = _TIME.unpack(receive(connection, deadline, _TIME.size))
        seconds = time.monotonic() - start
        rounds.append((seconds, ClockOffset(start + seconds / 2 - of_rank_0)))
    return min(rounds)[1]


def serve_clock(connection: Connection, deadline: float) -> None:
    """Send this host's clock to another rank, which runs `measure_clock_offset`.

    Args:
        connection: Connection to the rank.
        deadline: Time on the monotonic clock, in seconds.

    Raises:
        OSError, EOFError: The rank sends no request in time, or has ended.
    """
    for _ in range(_NUM_ROUNDS):
        receive(connection, deadline, 1)
        connection.send_bytes(_TIME.pack(time.monotonic()))


# --- rendezvous on rank 0 -----------------------------------------------------------------------


def join_ranks(config: RendezvousConfig, entry: EntryPoint, argument: Any) -> WorkerGroup:
    """Wait for the ranks of a launcher's world, and run rank 0 in a thread of this process.

    Args:
        config: Configuration of rank 0.
        entry: Entry point of all ranks.
        argument: Second argument of `entry`.

    Raises:
        RankError: A rank has not connected in time, or does not respond.
        RequestError: A rank has other settings than rank 0, or a shared path does not exist on its
            host.
        SvdppError: A rank could not start. The error is the one that the rank has sent.
    """
    process_lifetime.end_with_parent()
    address, store = process_group.open_store(config.world, config.start_timeout)
    joined: dict[int, WorkerHandle] = {}
    try:
        with _probes(config.shared_paths if config.world.spans_hosts else ()) as probes:
            listener = RankListener(store, address, config.peer_timeout, probes)
            _accept_all(joined, listener, config)
    except BaseException as error:
        WorkerGroup(list(joined.values())).kill(error)
        raise
    endpoint = listener.endpoint
    ours, theirs = multiprocessing.Pipe(duplex=True)
    context = LaunchContext(
        config.world,
        config.backend,
        ControlChannel(theirs),
        lambda: process_group.join_store(config.world, config.backend, store, endpoint.token),
        endpoint.host,
    )
    # Rank 0 runs in a thread, so its `WorkerHandle` gets this object in place of a process.
    process = SimpleNamespace(pid=None, exitcode=None)

    def run() -> None:
        code = 1
        with contextlib.suppress(BaseException):  # `entry` has already reported the error
            entry(context, argument)
            code = 0
        process.exitcode = code

    first = WorkerHandle(endpoint.host, config.world.local_rank, QueuedChannel(ours), process)
    others = [joined[rank] for rank in range(1, config.world.size)]
    for worker in others:
        worker.channel.send(BEGIN)
    threading.Thread(target=run, name="rank-0", daemon=True).start()
    return WorkerGroup([first, *others])


def _accept_all(
    joined: dict[int, WorkerHandle], listener: RankListener, config: RendezvousConfig
) -> None:
    deadline = time.monotonic() + config.start_timeout
    hellos: dict[int, RankHello] = {}
    try:
        while missing := [rank for rank in range(1, config.world.size) if rank not in joined]:
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank {missing[0]} never started within {config.start_timeout:.0f} s",
                    "check that the host of the rank is up and can reach this host, or raise "
                    "`start_timeout_seconds`",
                    details={"rank": missing[0], "timeout_seconds": config.start_timeout},
                )
            if (accepted := listener.accept()) is not None:
                _register(joined, *accepted, deadline)
                hellos[accepted[0].rank] = accepted[0]
    finally:
        listener.close()
    # Settings are checked after all ranks have connected. Otherwise an error could end rank 0
    # before a late rank has connected, and the late rank would wait until its deadline.
    for _, hello in sorted(hellos.items()):
        _check_settings(hello, config)


def _register(
    joined: dict[int, WorkerHandle], hello: RankHello, connection: Connection, deadline: float
) -> None:
    if hello.error is not None:
        error = error_from_dict(hello.error)
        error.message = f"rank {hello.rank} ({hello.host}): {error.message}"
        error.details |= {"rank": hello.rank, "host": hello.host}
        raise error
    try:
        serve_clock(connection, deadline)
    except TimeoutError as error:
        raise RankError(
            f"rank {hello.rank} ({hello.host}) connected, but does not respond",
            f"check whether the process is stopped or {hello.host} is down",
            details={"rank": hello.rank, "host": hello.host},
        ) from error
    except (OSError, EOFError):
        connection.close()  # the rank has ended, or will connect again
        return
    # If a rank has connected twice, the later connection counts.
    if (earlier := joined.get(hello.rank)) is not None:
        earlier.channel.close()
    joined[hello.rank] = WorkerHandle(hello.host, hello.local_rank, QueuedChannel(connection))
    if hello.missing:
        raise RequestError(
            f"{hello.host} cannot use {str(Path(hello.missing[0]).parent)!r} of rank 0's host",
            "put images, clips and latent checkpoints into folders that all hosts share, with the "
            "same path on each host",
            details={"rank": hello.rank, "host": hello.host, "path": hello.missing[0]},
        )


def _check_settings(hello: RankHello, config: RendezvousConfig) -> None:
    for name, value in hello.shared_settings.items():
        if (ours := config.shared_settings.get(name)) != value:
            raise RequestError(
                f"rank {hello.rank} ({hello.host}) was started with {name} {value}, rank 0 "
                f"({socket.gethostname()}) with {ours}",
                "use the same command and the same versions on every host; set `num_threads`",
                details={
                    **{"rank": hello.rank, "host": hello.host, "setting": name},
                    **{"value": value, "rank_0_value": ours, "rank_0": 0},
                },
            )


@contextlib.contextmanager
def _probes(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yield paths of files that exist on another host only if that host shares `paths`.

    For a file in `paths`, this is the file itself; for a folder, a new temporary file in it.
    """
    probes = []
    with contextlib.ExitStack() as made:
        for path in paths:
            if os.path.isfile(path):
                probes.append(path)
                continue
            with disk_errors(f"{path!r} cannot be written"):
                os.makedirs(path, exist_ok=True)
                probe = made.enter_context(NamedTemporaryFile(prefix=".svdpp-probe-", dir=path))
            probes.append(probe.name)
        yield probes
