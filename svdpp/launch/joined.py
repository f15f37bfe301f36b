"""Owns rank 0's view of ranks that torchrun or srun have started.

Each rank has one line to rank 0 (`lines`). Before the work begins rank 0 may ask one rank of each
host; then all begin, and the line carries what `Channel` says. At the end, or when something
breaks, rank 0 says so to all, so that no rank outlives the run.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection, wait
from typing import Any

from svdpp.errors import RankError, RequestError, error_from_dict, exit_code_of
from svdpp.launch import clock, process_group, process_lifetime
from svdpp.launch.channel import PipeChannel, QueuedChannel
from svdpp.launch.connections import ASK, BEGIN, END, RankHello, RankListener, receive
from svdpp.launch.group import Entry, RankContext, RankLocation
from svdpp.launch.world import World


class JoinedGroup:
    """The launcher's world, seen from its rank 0, whose own entry runs in a thread of this process.

    Args:
        world: of rank 0.
        backend: of the latents' wire.
        shared settings: what must be the same on every rank, by name.
        start_timeout: seconds for all ranks to call, and for each to answer what it is asked.
        silence: seconds after which a host that acknowledges nothing is given up.

    Raises:
        RequestError: no address that the hosts share, or a rank was started in another way.
        RankError: a rank does not call in time.
        SvdppError: what kept a rank from beginning.
    """

    def __init__(
        self,
        *,
        world: World,
        backend: str,
        shared_settings: Mapping[str, str],
        start_timeout: float,
        silence: float,
    ) -> None:
        process_lifetime.end_with_parent()
        self.world_size = world.size
        self._world, self._backend = world, backend
        own = RankHello(
            rank=0,
            local_rank=world.local_rank,
            host=socket.gethostname(),
            host_index=world.host,
            shared_settings=dict(shared_settings),
        )
        self._start_timeout = start_timeout
        self._address, self._store = process_group.open_store(world, start_timeout)
        self._hellos: dict[int, RankHello] = {0: own}
        self._lines: dict[int, PipeChannel] = {}
        self._gone: dict[int, int | None] = {}
        self._token = secrets.token_hex(8)
        self._thread: threading.Thread | None = None
        self._failed = False
        try:
            self._gather(time.monotonic() + start_timeout, silence)
            self._check_shared_settings()
        except BaseException as error:
            self.kill(error)
            raise

    def _gather(self, deadline: float, silence: float) -> None:
        listener = RankListener(self._store, self._address, silence)
        try:
            while missing := [r for r in range(self.world_size) if r not in self._hellos]:
                if time.monotonic() > deadline:
                    raise RankError(
                        f"rank {missing[0]} never started within {self._start_timeout:.0f} s"
                        + (f", nor did {len(missing) - 1} others" if missing[1:] else ""),
                        "is its host up, and can it reach this one? or raise --start-timeout",
                    )
                if (accepted := listener.accept()) is not None:
                    self._welcome(*accepted, deadline)
        finally:
            listener.close()

    def _welcome(self, hello: RankHello, line: Connection, deadline: float) -> None:
        if hello.error is not None:
            error = error_from_dict(hello.error)
            error.message = f"rank {hello.rank} ({hello.host}): {error.message}"
            raise error
        welcome = {"token": self._token, "host": self._hellos[0].host}
        try:
            line.send_bytes(json.dumps(welcome).encode())
            clock.tell(line, deadline)
        except TimeoutError as error:
            raise RankError(
                f"rank {hello.rank} ({hello.host}) called, and does not go on",
                f"is it stopped, or {hello.host} down?",
            ) from error
        except (OSError, EOFError):
            line.close()  # it has ended again, or calls once more
            return
        self._hellos[hello.rank], self._lines[hello.rank] = hello, PipeChannel(line)

    def _check_shared_settings(self) -> None:
        ours = self._hellos[0].shared_settings
        for rank, hello in sorted(self._hellos.items()):
            for name, value in hello.shared_settings.items():
                if ours.get(name) != value:
                    raise RequestError(
                        f"rank {rank} ({hello.host}) was started with {name} {value}, rank 0 "
                        f"({self._hellos[0].host}) with {ours.get(name)}",
                        "give every host one command line, with --threads, and the same versions",
                    )

    def location(self, rank: int) -> RankLocation:
        """See `Group`."""
        hello = self._hellos[rank]
        return RankLocation(hello.host, hello.local_rank)

    @property
    def hosts(self) -> list[int]:
        """The index of each rank's host, by rank."""
        return [self._hellos[rank].host_index for rank in range(self.world_size)]

    def ask(self, question: bytes) -> dict[str, bytes]:
        """The answer of one rank on each other host, by the host's name; before `begin`.

        Raises:
            RankError: one of them is gone, or does not answer.
        """
        answers = {}
        for rank in self._one_of_each_other_host():
            line, host = self._lines[rank].connection, self._hellos[rank].host
            try:
                line.send_bytes(ASK + question)
                answers[host] = receive(line, time.monotonic() + self._start_timeout)
            except TimeoutError as error:
                raise RankError(
                    f"rank {rank} ({host}) does not say what lies in its folders",
                    f"is it stopped, or does a folder that it was given not answer on {host}?",
                ) from error
            except (OSError, EOFError) as error:
                raise RankError(f"rank {rank} ({host}) is gone before the work began") from error
        return answers

    def check_there(self) -> None:
        """Looks whether all ranks still wait for the work; before `begin`.

        Raises:
            RankError: one of them does not.
        """
        self.poll(0)
        for rank, channel in self._lines.items():
            if channel.connection.closed:
                host = self._hellos[rank].host
                how = "is gone" if rank in self._gone else "has not been heard of"
                raise RankError(
                    f"rank {rank} ({host}) {how} while it waited for work",
                    f"what its launcher says on {host} tells how it ended",
                )

    def _one_of_each_other_host(self) -> list[int]:
        first = {host: rank for rank, host in reversed(list(enumerate(self.hosts)))}
        return sorted(rank for host, rank in first.items() if host != self._world.host)

    def begin(self, entry: Entry, argument: Any) -> None:
        """Has all ranks begin, this one in a thread of its own."""
        for channel in self._lines.values():
            with contextlib.suppress(OSError):  # one that is gone is noticed by `poll`
                channel.send(BEGIN)
        ours, theirs = multiprocessing.Pipe(duplex=True)
        self._lines[0] = QueuedChannel(ours)
        context = RankContext(
            self._world,
            self._backend,
            PipeChannel(theirs),
            join=lambda: process_group.join_store(
                self._world, self._backend, self._store, self._token
            ),
            leave=lambda: process_group.destroy(process_group.LEAVE_SECONDS),
            host=self._hellos[0].host,
        )
        self._thread = threading.Thread(
            target=self._run, args=(entry, context, argument), name="rank-0", daemon=True
        )
        self._thread.start()

    def _run(self, entry: Entry, context: RankContext, argument: Any) -> None:
        try:
            entry(context, argument)
        except BaseException:
            self._failed = True  # it has reported why

    def send(self, rank: int, message: bytes) -> None:
        """See `Group`."""
        with contextlib.suppress(OSError):
            self._lines[rank].send(message)

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:
        """See `Group`."""
        by_connection: dict[Any, int] = {
            channel.connection: rank
            for rank, channel in self._lines.items()
            if not channel.connection.closed
        }
        messages: list[tuple[int, bytes]] = []
        for ready in wait(list(by_connection), timeout):
            messages += self._read_all(by_connection[ready])
        return messages

    def _read_all(self, rank: int) -> list[tuple[int, bytes]]:
        channel = self._lines[rank]
        connection = channel.connection
        messages = []
        try:
            while connection.poll():
                messages.append((rank, connection.recv_bytes()))
        except (EOFError, ConnectionError):
            channel.close()
            self._gone[rank] = None
        except OSError:
            channel.close()  # nobody acknowledges anything: its silence is noticed elsewhere
        return messages

    def exited(self) -> dict[int, int | None]:
        """See `Group`; how another rank ended only its own launcher knows."""
        if self._thread is not None and not self._thread.is_alive():
            self._gone[0] = int(self._failed)
        return dict(self._gone)

    def last_words(self, rank: int) -> str:  # noqa: ARG002
        """See `Group`; the launcher's ranks print to its own terminal or log folder."""
        return ""

    def end(self, timeout: float) -> bool:
        """See `Group`: waits for rank 0's thread, and until the others have hung up."""
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._thread.join(timeout)
        others = range(1, self.world_size)
        while not all(rank in self._gone for rank in others) and time.monotonic() < deadline:
            self.poll(0.1)
        is_over = self._thread is None or not self._thread.is_alive()
        return is_over and not self._failed and all(rank in self._gone for rank in others)

    def kill(self, error: BaseException | None = None) -> None:
        """Tells every rank that is still there to end, and why."""
        code = 0 if error is None else exit_code_of(error)
        message = str(getattr(error, "message", error))
        said = None if error is None else {"type": "", "message": message, "hint": ""}
        for channel in self._lines.values():
            with contextlib.suppress(OSError):
                if not channel.connection.closed:
                    channel.send(END + json.dumps({"code": code, "error": said}).encode())
                    channel.close()
