"""Owns a rank that torchrun or srun have started, and that is not rank 0: its line, its end."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn, Protocol

from svdpp.errors import RankError, RequestError, exit_code_of
from svdpp.launch import clock, connections, process_group, process_lifetime
from svdpp.launch.channel import PipeChannel
from svdpp.launch.connections import ASK, BEGIN, END, FILE, RankHello
from svdpp.launch.group import Entry, RankContext
from svdpp.launch.world import World

# Rank 0 ends first, so that launchers, which show the first to fail, show the one that says why.
_AFTER_YOU_SECONDS = 2.0
_REPORT_SECONDS = 4.0
_LAST_WORD_SECONDS = 0.3


class RankHooks(Protocol):
    """What happens beside a member's work, which its own process has to know of."""

    def sent(self, message: bytes) -> None:
        """Takes note of what the rank reports."""

    def answer(self, question: bytes) -> bytes:
        """What rank 0 wants to know of this host before the work begins."""

    def interrupted(self, number: int) -> bytes:
        """What rank 0 is to hear when signal `number` ends this process."""

    def ended(self, error: dict[str, Any] | None) -> None:
        """Takes note that rank 0 ends the run, and of why, as a record."""

    def lost(self, reason: str) -> None:
        """Says that rank 0 is gone or out of reach; the process ends afterwards."""


def serve_joined(
    entry: Entry,
    argument: Any,
    *,
    world: World,
    backend: str,
    shared_settings: Mapping[str, str],
    start_timeout: float,
    silence: float,
    hooks: RankHooks,
) -> None:
    """Runs `entry` as a rank other than 0 of the launcher's world, to its end.

    Returns only when all was done; the process of a rank that fails, or whose run does, ends here.

    Raises:
        RankError: there is no rank 0.
    """
    process_lifetime.end_with_parent()
    process_lifetime.exit_on_signals(_exit_on_signal)
    hello = _hello(world, shared_settings)
    _, store = process_group.open_store(world, start_timeout)
    deadline = time.monotonic() + start_timeout
    line = connections.call(store, hello, silence=silence, deadline=deadline)
    parent = _ParentLink(line, hooks, silence, world.local_rank, start_timeout)
    _parents[:] = [parent]
    parent.wait_for_begin()
    context = RankContext(
        world,
        backend,
        parent,
        join=lambda: process_group.join_store(world, backend, store, parent.token),
        leave=lambda: process_group.destroy(process_group.LEAVE_SECONDS),
        host=hello.host,
        clock=parent.clock,
        fetch=None if world.on_first_host else parent.files.get,
    )
    try:
        entry(context, argument)
    except BaseException as error:
        # Rank 0 has been told, and ends this process in a moment.
        time.sleep(_REPORT_SECONDS)
        process_lifetime.exit_process(exit_code_of(error))
    parent.hang_up()


def report_failure(world: World, error: dict[str, Any], *, timeout: float) -> bool:
    """Tells rank 0 why this rank cannot even begin; whether rank 0 was there to hear it.

    Args:
        world: of this rank.
        error: a record.
        timeout: seconds to look for rank 0.
    """
    try:
        _, store = process_group.open_store(world, timeout)
        hello = _hello(world, {}, error)
        deadline = time.monotonic() + timeout
        connections.call(store, hello, silence=timeout, deadline=deadline)
    except (RankError, RequestError):
        return False
    return True


# The line in use, for the thread that ends this process by a signal.
_parents: list[_ParentLink] = []


def _exit_on_signal(number: int) -> NoReturn:
    """Ends this process by signal `number`, and says so first: else it would look like dead."""
    for parent in _parents:
        parent.say_last(number)
    process_lifetime.exit_with_signal_code(number)


def _hello(
    world: World, shared_settings: Mapping[str, str], error: dict[str, Any] | None = None
) -> RankHello:
    return RankHello(
        rank=world.rank,
        local_rank=world.local_rank,
        host=socket.gethostname(),
        host_index=world.host,
        shared_settings=dict(shared_settings),
        error=error,
    )


class _ParentLink:
    """A member's end of its line: a channel, and a thread that hears what is no command.

    Args:
        line: to rank 0.
        hooks: told of what happens beside the work.
        silence: what the line was given.
        local_rank: of this rank; 0 says for its host that rank 0 is lost.
        start_timeout: seconds for rank 0 to answer the call.

    Raises:
        RankError: rank 0 has ended meanwhile, or does not answer.
    """

    def __init__(
        self,
        line: Connection,
        hooks: RankHooks,
        silence: float,
        local_rank: int,
        start_timeout: float,
    ) -> None:
        self._local_rank = local_rank
        self._channel = PipeChannel(line)
        self._hooks = hooks
        self._silence = silence
        self._commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        #: What rank 0 was asked for; whoever waits for it ends with the line.
        self.files: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._begun = threading.Event()
        self._hung_up = False
        deadline = time.monotonic() + start_timeout
        try:
            welcome = json.loads(connections.receive(line, deadline))
            self.clock = clock.compare(line, deadline)
        except TimeoutError as error:
            raise RankError("rank 0 does not answer", "is it stopped, or its host down?") from error
        except (OSError, EOFError, ValueError) as error:
            raise RankError("rank 0 ended before the work began", "its host says why") from error
        self.token: str = welcome["token"]
        self._rank_0 = f"rank 0 ({welcome['host']})"
        threading.Thread(target=self._listen, name="line", daemon=True).start()

    def wait_for_begin(self) -> None:
        """Waits until rank 0 has planned the work; the line ends this process if it never does."""
        self._begun.wait()

    def send(self, message: bytes) -> None:
        """See `Channel`."""
        self._hooks.sent(message)
        self._channel.send(message)

    def receive(self, timeout: float) -> bytes | None:
        """See `Channel`."""
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=timeout)
        return None

    def hang_up(self) -> None:
        """Ends the line, when all is done."""
        self._hung_up = True
        connection = self._channel.connection
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as own:
            own.shutdown(socket.SHUT_WR)  # rank 0 reads what is left before it notices

    def say_last(self, number: int) -> None:
        """Tells rank 0 of the signal that ends this process, if that takes but a moment."""
        if not self._begun.is_set() or self._hung_up:
            return
        word = self._hooks.interrupted(number)

        def send() -> None:
            with contextlib.suppress(OSError):
                self._channel.send(word)

        thread = threading.Thread(target=send, name="last-word", daemon=True)
        thread.start()
        thread.join(_LAST_WORD_SECONDS)

    def _listen(self) -> None:
        answers: Mapping[bytes, Callable[[bytes], None]] = {
            ASK: self._answer,
            FILE: lambda message: self.files.put(message[1:]),
            BEGIN: lambda _: self._begun.set(),
            END: self._end,
        }
        try:
            while True:
                message = self._channel.connection.recv_bytes()
                answers.get(message[:1], self._commands.put)(message)
        except (EOFError, ConnectionError):
            self._lose(f"{self._rank_0} is gone")
        except OSError:
            self._lose(f"nothing has reached {self._rank_0} for {self._silence:.0f} s")
        except Exception as error:  # without this thread the process would wait for ever
            self._lose(f"what {self._rank_0} says is not understood ({error!r})")

    def _answer(self, message: bytes) -> None:
        try:
            answer = self._hooks.answer(message[1:])
        except Exception as error:
            self._lose(f"what {self._rank_0} asked cannot be answered ({error!r})")
            return
        self._channel.send(answer)

    def _end(self, message: bytes) -> NoReturn:
        said = json.loads(message[1:])
        self._hooks.ended(said["error"])
        if said["error"] is not None:
            time.sleep(_AFTER_YOU_SECONDS)
        process_lifetime.exit_process(said["code"])

    def _lose(self, reason: str) -> None:
        if not self._hung_up:
            self._hooks.lost(reason)
            if self._local_rank:  # the launcher ends all ranks of a host when the first one does
                time.sleep(_AFTER_YOU_SECONDS)
            process_lifetime.exit_process(RankError.exit_code)
