"""The life of a launcher's rank other than 0: its connection to rank 0, its work, its exit."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from svdpp.errors import Interrupted, RankError, RequestError, error_to_dict, exit_code_of
from svdpp.launch import joined, process_group, process_lifetime
from svdpp.launch.group import END, Channel, Clock, Entry, RankContext
from svdpp.launch.joined import Terms
from svdpp.launch.world import World
from svdpp.worker.messages import Event, Failed, Heartbeat, describe_position, parse

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
    _, store = process_group.open_store(terms.world, terms.start_timeout)
    connection, endpoint = joined.connect(store, terms.hello(), terms)
    clock = _compared_clock(connection, terms.start_timeout)
    parent = _ParentLink(connection, endpoint.host, terms, device, observers, say)
    _parents[:] = [parent]
    while parent.receive(_EXIT_DELAY_SECONDS) is None:
        pass  # until rank 0 lets all ranks begin; if the connection is lost, the process exits
    context = RankContext(
        terms.world,
        terms.backend,
        parent,
        join=lambda: process_group.join_store(terms.world, terms.backend, store, endpoint.token),
        host=socket.gethostname(),
        clock=clock,
    )
    try:
        entry(context, argument)
    except BaseException as error:
        # The entry has reported the error, and rank 0 normally ends this process before that.
        time.sleep(_REPORT_SECONDS)
        process_lifetime.exit_process(exit_code_of(error))
    parent.disconnect()


def _compared_clock(connection: Connection, seconds: float) -> Clock:
    try:
        return joined.compare_clocks(connection, time.monotonic() + seconds)
    except TimeoutError as error:
        raise RankError(
            "rank 0 does not answer", "check whether it is stopped or its host is down"
        ) from error
    except (OSError, EOFError) as error:
        raise RankError(
            "rank 0 ended before the work began", "see the output of rank 0 on its host"
        ) from error


def report_failure(world: World, error: dict[str, Any], *, timeout: float) -> bool:
    """Reports to rank 0 why this rank cannot start; returns whether rank 0 could be reached."""
    terms = Terms(world=world, start_timeout=timeout, peer_timeout=timeout)
    try:
        _, store = process_group.open_store(world, timeout)
        joined.connect(store, terms.hello(error), terms)
    except (RankError, RequestError):
        return False
    return True


# The link in use, for the thread that handles signals.
_parents: list[_ParentLink] = []


def _exit_on_signal(number: int) -> NoReturn:
    for parent in _parents:
        parent.report_signal(number)
    process_lifetime.exit_with_signal_code(number)


class _ParentLink(Channel):
    """A joined rank's channel to rank 0; its thread ends this process if rank 0 says so or goes."""

    def __init__(
        self,
        connection: Connection,
        host_of_rank_0: str,
        terms: Terms,
        device: str,
        observers: Sequence[Callable[[int, Event], None]],
        say: Callable[[str, bool], None],
    ) -> None:
        super().__init__(connection)
        self._observers, self._say = observers, say
        self._world, self._peer_timeout = terms.world, terms.peer_timeout
        self._name = f"rank {terms.world.rank} ({device} of {socket.gethostname()})"
        self._rank_0 = f"rank 0 ({host_of_rank_0})"
        self._heartbeat = Heartbeat()
        self._commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_disconnected = self._has_timed_out = False
        threading.Thread(target=self._listen, name="parent-link", daemon=True).start()

    def send(self, message: bytes) -> None:
        event = parse(message)
        if isinstance(event, Heartbeat):
            self._heartbeat = event
        for observer in self._observers:
            observer(self._world.rank, event)
        with self._lock:
            try:
                super().send(message)
            except OSError as error:
                # The kernel says once that nothing reaches the other host; after that, a read only
                # finds the end of the data.
                self._has_timed_out |= not isinstance(error, ConnectionError)
                raise

    def receive(self, timeout: float) -> bytes | None:
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=timeout)
        return None

    def disconnect(self) -> None:
        self._is_disconnected = True
        with socket.socket(fileno=self.connection.fileno()) as own:
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_WR)  # rank 0 first reads the messages still in flight
            own.detach()

    def report_signal(self, number: int) -> None:
        """Reports the signal that ends this process to rank 0, if that succeeds at once."""
        if self._is_disconnected:
            return
        action, step = self._heartbeat.action, self._heartbeat.step
        failed = Failed(
            error=error_to_dict(Interrupted(number)), traceback="", action=action, step=step
        )

        def send() -> None:
            with contextlib.suppress(OSError):
                super(_ParentLink, self).send(failed.to_bytes())

        thread = threading.Thread(target=send, name="report-signal", daemon=True)
        thread.start()
        thread.join(_SIGNAL_REPORT_SECONDS)

    def _listen(self) -> None:
        try:
            while True:
                message = self.connection.recv_bytes()
                if message.startswith(END):
                    self._end(**json.loads(message[1:]))
                self._commands.put(message)
        except (EOFError, OSError) as error:
            reason = f"nothing has reached {self._rank_0} for {self._peer_timeout:.0f} s"
            with self._lock:  # a send in another thread may learn it first
                if isinstance(error, (EOFError, ConnectionError)) and not self._has_timed_out:
                    reason = f"{self._rank_0} is gone"
            self._exit_without_rank_0(reason)
        except Exception as error:  # without this thread the process would never end
            self._exit_without_rank_0(f"{self._rank_0} sent an invalid message ({error!r})")

    def _end(self, code: int, error: str | None) -> NoReturn:
        if error is not None:  # rank 0 has told the user
            self._say(f"{self._name} ends with the run: {error}", False)
            time.sleep(_EXIT_DELAY_SECONDS)
        process_lifetime.exit_process(code)

    def _exit_without_rank_0(self, reason: str) -> None:
        if not self._is_disconnected:
            where = describe_position(self._heartbeat.action, self._heartbeat.step)
            self._say(f"{reason}: {self._name} ends{where}", True)
            if self._world.local_rank:  # the launcher ends all ranks of a host after the first one
                time.sleep(_EXIT_DELAY_SECONDS)
            process_lifetime.exit_process(RankError.exit_code)
