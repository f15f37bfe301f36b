"""How rank 0 joins the ranks that torchrun or srun started.

Each rank has one connection to rank 0 (`connections`), over which both first check what they share.
At the end, or after a failure, rank 0 sends an END message to each rank: no rank outlives the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from svdpp.errors import OutputError, RankError, RequestError, error_from_dict
from svdpp.launch import connections, process_group, process_lifetime
from svdpp.launch.connections import RankHello, RankListener, Terms
from svdpp.launch.group import BEGIN, Channel, Entry, Group, Member, QueuedChannel, RankContext


def join_ranks(terms: Terms, entry: Entry, argument: Any) -> Group:
    """Joins the ranks of a launcher's world, and has them begin; `entry` is that of rank 0.

    It runs in a thread of this process.
    """
    process_lifetime.end_with_parent()
    address, store = process_group.open_store(terms.world, terms.start_timeout)
    joined: dict[int, Member] = {}
    try:
        with _probes(terms.shared_paths if terms.world.spans_hosts else ()) as probes:
            listener = RankListener(store, address, terms.peer_timeout, probes)
            _accept_all(joined, listener, terms)
    except BaseException as error:
        Group(list(joined.values())).kill(error)
        raise
    host, token = listener.endpoint.host, listener.endpoint.token
    ours, theirs = multiprocessing.Pipe(duplex=True)
    context = RankContext(
        terms.world,
        terms.backend,
        Channel(theirs),
        join=lambda: process_group.join_store(terms.world, terms.backend, store, token),
        host=host,
    )
    thread = _RankThread(partial(entry, context, argument))
    first = Member(host, terms.world.local_rank, QueuedChannel(ours), thread)
    others = [joined[rank] for rank in range(1, terms.world.size)]
    for member in others:
        member.channel.send(BEGIN)
    thread.start()
    return Group([first, *others])


class _RankThread(threading.Thread):
    """Rank 0 in a thread of this process, with the exit code that a process would have."""

    exitcode: int | None = None
    pid = None

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(name="rank-0", daemon=True)
        self._work = work

    def run(self) -> None:
        code = 1
        try:
            self._work()
            code = 0
        except BaseException:
            pass  # the entry has reported the error itself
        finally:
            self.exitcode = code


def _accept_all(joined: dict[int, Member], listener: RankListener, terms: Terms) -> None:
    deadline = time.monotonic() + terms.start_timeout
    try:
        while missing := [r for r in range(1, terms.world.size) if r not in joined]:
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank {missing[0]} never started within {terms.start_timeout:.0f} s"
                    + (f", nor did {len(missing) - 1} others" if missing[1:] else ""),
                    "check that its host is up and can reach this one, or raise --start-timeout",
                )
            if (accepted := listener.accept()) is not None:
                _welcome(joined, *accepted, terms, deadline)
    finally:
        listener.close()


def _welcome(
    joined: dict[int, Member],
    hello: RankHello,
    connection: Connection,
    terms: Terms,
    deadline: float,
) -> None:
    if hello.error is not None:
        error = error_from_dict(hello.error)
        error.message = f"rank {hello.rank} ({hello.host}): {error.message}"
        raise error
    try:
        connections.answer_clock(connection, deadline)
    except TimeoutError as error:
        raise RankError(
            f"rank {hello.rank} ({hello.host}) connected, but does not respond",
            f"check whether the process is stopped or {hello.host} is down",
        ) from error
    except (OSError, EOFError):
        connection.close()  # the rank has ended, or connects again
        return
    joined[hello.rank] = Member(hello.host, hello.local_rank, QueuedChannel(connection))
    if hello.missing:
        raise RequestError(
            f"{hello.host} cannot use {str(Path(hello.missing[0]).parent)!r} of rank 0's host",
            "images, --out and --latents-dir must be in folders that all hosts share, under one "
            "path",
        )
    for name, value in hello.shared_settings.items():
        if (ours := terms.shared_settings.get(name)) != value:
            raise RequestError(
                f"rank {hello.rank} ({hello.host}) was started with {name} {value}, rank 0 "
                f"({socket.gethostname()}) with {ours}",
                "use the same command, with --threads, and the same versions on every host",
            )


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
