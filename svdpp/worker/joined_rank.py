"""The life of a launcher's rank other than 0: its connection to rank 0, its work, its exit."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from svdpp.errors import Interrupted, RankError, RequestError, error_to_dict, exit_code_of
from svdpp.launch import connections, process_group, process_lifetime
from svdpp.launch.connections import BEGIN, END, Terms
from svdpp.launch.group import Entry, PipeChannel, RankContext
from svdpp.launch.world import World
from svdpp.worker.messages import Event, Failed, Heartbeat, describe_position, parse_event

# A launcher shows the output of the rank that fails first. That should be rank 0, which prints the
# error, so other ranks wait this long before they exit.
_EXIT_DELAY_SECONDS = 2.0
_REPORT_SECONDS = 4.0
_SIGNAL_REPORT_SECONDS = 1.0


def serve_joined(
    entry: Entry,
    argument: Any,
    terms: Terms,
    *,
    device: str,
    observers: Sequence[Callable[[int, Event], None]],
    say: Callable[[str, bool], None],
    ignores_signals: bool = False,
) -> None:
    """Runs `entry` as a rank other than 0 of a launcher's world.

    Returns only if all work succeeded; otherwise the process exits. `observers` get this rank's
    events. For `say` see `Pipeline.serve`. With `ignores_signals` the rank survives
    INT, TERM and HUP, which its launcher also sends to rank 0: that one ends the run in its own
    time.
    """
    process_lifetime.end_with_parent()
    if ignores_signals:
        process_lifetime.ignore_signals()
    else:
        process_lifetime.exit_on_signals(_exit_on_signal)
    world, hello = terms.world, terms.hello()
    _, store = process_group.open_store(world, terms.start_timeout)
    parent = _ParentLink(connections.connect(store, hello, terms), terms, device)
    parent.observers, parent.say = observers, say
    parent.listen()
    _parents[:] = [parent]
    parent.wait_for_begin()
    context = RankContext(
        world,
        terms.backend,
        parent,
        join=lambda: process_group.join_store(world, terms.backend, store, parent.token),
        leave=lambda: process_group.destroy(process_group.LEAVE_SECONDS),
        host=hello.host,
        clock=parent.clock,
    )
    try:
        entry(context, argument)
    except BaseException as error:
        # The entry has reported the error, and rank 0 normally ends this process before that.
        time.sleep(_REPORT_SECONDS)
        process_lifetime.exit_process(exit_code_of(error))
    parent.disconnect()


def report_failure(world: World, error: dict[str, Any], *, timeout: float) -> bool:
    """Reports to rank 0 why this rank cannot start; returns whether rank 0 could be reached."""
    terms = Terms(world=world, start_timeout=timeout, peer_timeout=timeout)
    try:
        _, store = process_group.open_store(world, timeout)
        connections.connect(store, terms.hello(error), terms)
    except (RankError, RequestError):
        return False
    return True


# The link in use, for the thread that handles signals.
_parents: list[_ParentLink] = []


def _exit_on_signal(number: int) -> NoReturn:
    for parent in _parents:
        parent.report_signal(number)
    process_lifetime.exit_with_signal_code(number)


class _ParentLink:
    """A joined rank's channel to rank 0, and the thread that handles rank 0's control messages."""

    def __init__(
        self,
        connection: Connection,
        terms: Terms,
        device: str,
    ) -> None:
        self.observers: Sequence[Callable[[int, Event], None]] = ()
        self.say: Callable[[str, bool], None] = lambda _sentence, _is_loud: None
        self._world = terms.world
        self._name = f"rank {terms.world.rank} ({device} of {socket.gethostname()})"
        self._channel = PipeChannel(connection)
        self._peer_timeout = terms.peer_timeout
        self._heartbeat = Heartbeat()
        self._commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._begun = threading.Event()
        self._is_disconnected = False
        deadline = time.monotonic() + terms.start_timeout
        try:
            welcome = json.loads(connections.receive(connection, deadline))
            self.clock = connections.compare_clocks(connection, deadline)
            missing = [probe for probe in welcome["probes"] if not os.path.exists(probe)]
            connection.send_bytes(json.dumps(missing).encode())
        except TimeoutError as error:
            raise RankError(
                "rank 0 does not answer", "check whether it is stopped or its host is down"
            ) from error
        except (OSError, EOFError, ValueError) as error:
            raise RankError(
                "rank 0 ended before the work began", "see the output of rank 0 on its host"
            ) from error
        self.token: str = welcome["token"]
        self._rank_0 = f"rank 0 ({welcome['host']})"

    def listen(self) -> None:
        threading.Thread(target=self._listen, name="parent-link", daemon=True).start()

    def wait_for_begin(self) -> None:
        """Waits until rank 0 starts the work; if the connection is lost, the process exits."""
        self._begun.wait()

    def send(self, message: bytes) -> None:
        event = parse_event(message)
        if isinstance(event, Heartbeat):
            self._heartbeat = event
        for observer in self.observers:
            observer(self._world.rank, event)
        self._channel.send(message)

    def receive(self, timeout: float) -> bytes | None:
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=timeout)
        return None

    def disconnect(self) -> None:
        self._is_disconnected = True
        connection = self._channel.connection
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as own:
            own.shutdown(socket.SHUT_WR)  # rank 0 first reads the messages still in flight

    def report_signal(self, number: int) -> None:
        """Reports the signal that ends this process to rank 0, if that succeeds at once."""
        if not self._begun.is_set() or self._is_disconnected:
            return
        action, step = self._heartbeat.action, self._heartbeat.step
        error = error_to_dict(Interrupted(number))
        failed = Failed(error=error, traceback="", action=action, step=step)

        def send() -> None:
            with contextlib.suppress(OSError):
                self._channel.send(failed.to_bytes())

        thread = threading.Thread(target=send, name="report-signal", daemon=True)
        thread.start()
        thread.join(_SIGNAL_REPORT_SECONDS)

    def _listen(self) -> None:
        handlers: Mapping[bytes, Callable[[bytes], None]] = {
            BEGIN: lambda _: self._begun.set(),
            END: self._end,
        }
        try:
            while True:
                message = self._channel.connection.recv_bytes()
                handlers.get(message[:1], self._commands.put)(message)
        except (EOFError, OSError) as error:
            if isinstance(error, (EOFError, ConnectionError)) and not self._channel.has_timed_out():
                reason = f"{self._rank_0} is gone"
            else:
                reason = f"nothing has reached {self._rank_0} for {self._peer_timeout:.0f} s"
            self._exit_without_rank_0(reason)
        except Exception as error:  # without this thread the process would never end
            self._exit_without_rank_0(f"{self._rank_0} sent an invalid message ({error!r})")

    def _end(self, message: bytes) -> NoReturn:
        end = json.loads(message[1:])
        if end["error"] is not None:  # rank 0 has told the user
            self.say(f"{self._name} ends with the run: {end['error']['message']}", False)
            time.sleep(_EXIT_DELAY_SECONDS)
        process_lifetime.exit_process(end["code"])

    def _exit_without_rank_0(self, reason: str) -> None:
        if not self._is_disconnected:
            where = describe_position(self._heartbeat.action, self._heartbeat.step)
            self.say(f"{reason}: {self._name} ends{where}", True)
            if self._world.local_rank:  # the launcher ends all ranks of a host after the first one
                time.sleep(_EXIT_DELAY_SECONDS)
            process_lifetime.exit_process(RankError.exit_code)
