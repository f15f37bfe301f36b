"""Rank 0's view of ranks that torchrun or srun started.

Each rank has one connection to rank 0 (`connections`), over which both first check what they share.
When the work begins, each connection carries the messages of a `Channel`. At the end, or after a
failure, rank 0 sends an END message to each rank: no rank outlives the run.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from svdpp.errors import OutputError, RankError, RequestError, error_from_dict, exit_code_of
from svdpp.launch import connections, process_group, process_lifetime
from svdpp.launch.connections import BEGIN, END, RankHello, RankListener, Terms, receive
from svdpp.launch.group import Entry, Group, PipeChannel, QueuedChannel, RankContext, RankLocation


class JoinedGroup(Group):
    """A launcher's ranks, seen from rank 0; its own entry runs in a thread of this process."""

    def __init__(self, terms: Terms) -> None:
        process_lifetime.end_with_parent()
        super().__init__(terms.world.size)
        self._world, self._backend = terms.world, terms.backend
        self._start_timeout = terms.start_timeout
        self._address, self._store = process_group.open_store(terms.world, terms.start_timeout)
        self._hellos: dict[int, RankHello] = {0: terms.hello()}
        self._token = secrets.token_hex(8)
        self._thread: threading.Thread | None = None
        self._failed = False
        try:
            with _probes(terms.shared_paths if terms.world.spans_hosts else ()) as self._probes:
                self._accept_all(time.monotonic() + terms.start_timeout, terms.peer_timeout)
            self._check_shared_settings()
        except BaseException as error:
            self.kill(error)
            raise

    def _accept_all(self, deadline: float, peer_timeout: float) -> None:
        listener = RankListener(self._store, self._address, peer_timeout)
        try:
            while missing := [r for r in range(self.world_size) if r not in self._hellos]:
                if time.monotonic() > deadline:
                    raise RankError(
                        f"rank {missing[0]} never started within {self._start_timeout:.0f} s"
                        + (f", nor did {len(missing) - 1} others" if missing[1:] else ""),
                        "check that its host is up and can reach this one, or raise "
                        "--start-timeout",
                    )
                if (accepted := listener.accept()) is not None:
                    self._welcome(*accepted, deadline)
        finally:
            listener.close()

    def _welcome(self, hello: RankHello, connection: Connection, deadline: float) -> None:
        if hello.error is not None:
            error = error_from_dict(hello.error)
            error.message = f"rank {hello.rank} ({hello.host}): {error.message}"
            raise error
        welcome = {"token": self._token, "host": self._hellos[0].host, "probes": self._probes}
        try:
            connection.send_bytes(json.dumps(welcome).encode())
            connections.answer_clock(connection, deadline)
            missing = json.loads(receive(connection, deadline))
        except TimeoutError as error:
            raise RankError(
                f"rank {hello.rank} ({hello.host}) connected, but does not respond",
                f"check whether the process is stopped or {hello.host} is down",
            ) from error
        except (OSError, EOFError):
            connection.close()  # the rank has ended, or connects again
            return
        self._hellos[hello.rank], self._channels[hello.rank] = hello, PipeChannel(connection)
        if missing:
            raise RequestError(
                f"{hello.host} cannot use {str(Path(missing[0]).parent)!r} of rank 0's host",
                "images, --out and --latents-dir must be in folders that all hosts share, under "
                "one path",
            )

    def _check_shared_settings(self) -> None:
        ours = self._hellos[0].shared_settings
        for rank, hello in sorted(self._hellos.items()):
            for name, value in hello.shared_settings.items():
                if ours.get(name) != value:
                    raise RequestError(
                        f"rank {rank} ({hello.host}) was started with {name} {value}, rank 0 "
                        f"({self._hellos[0].host}) with {ours.get(name)}",
                        "use the same command, with --threads, and the same versions on every host",
                    )

    def location(self, rank: int) -> RankLocation:
        """See `Group`."""
        hello = self._hellos[rank]
        return RankLocation(hello.host, hello.local_rank)

    def begin(self, entry: Entry, argument: Any) -> None:
        """Starts the work on all ranks; on rank 0 in a thread."""
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # `poll` notices a rank that has ended
                channel.send(BEGIN)
        ours, theirs = multiprocessing.Pipe(duplex=True)
        self._channels[0] = QueuedChannel(ours)
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
            self._failed = True  # the entry has reported the error itself

    def exited(self) -> dict[int, int | None]:
        """See `Group`; only the launcher knows the exit codes of the other ranks."""
        if self._thread is not None and not self._thread.is_alive():
            self._exit_codes[0] = int(self._failed)
        return dict(self._exit_codes)

    def end(self, timeout: float) -> bool:
        """See `Group`; waits for rank 0's thread and until the other ranks have disconnected."""
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._thread.join(timeout)
        others = range(1, self.world_size)
        while not all(rank in self._exit_codes for rank in others) and time.monotonic() < deadline:
            self.poll(0.1)
        is_over = self._thread is None or not self._thread.is_alive()
        return is_over and not self._failed and all(rank in self._exit_codes for rank in others)

    def kill(self, error: BaseException | None = None) -> None:
        """See `Group`; sends every connected rank the END message with the exit code and error."""
        code = 0 if error is None else exit_code_of(error)
        message = str(getattr(error, "message", error))
        record = None if error is None else {"type": "", "message": message, "hint": ""}
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                if not channel.connection.closed:
                    channel.send(END + json.dumps({"code": code, "error": record}).encode())
                    channel.close()


@contextlib.contextmanager
def _probes(paths: Sequence[str]) -> Iterator[list[str]]:
    """Files that other hosts must see: those of `paths`, and a new one in each of its folders."""
    probes = []
    with contextlib.ExitStack() as made:
        for path in paths:
            if os.path.isfile(path):
                probes.append(path)
                continue
            try:
                os.makedirs(path, exist_ok=True)
                probe = made.enter_context(NamedTemporaryFile(prefix=".svdpp-probe-", dir=path))
            except OSError as error:
                raise OutputError(f"{path!r} cannot be written: {error.strerror}") from error
            probes.append(probe.name)
        yield probes
