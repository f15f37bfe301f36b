"""Run of a secondary rank: a rank other than 0 that a launcher such as torchrun has started.

A secondary rank connects to rank 0 and ends when rank 0 ends. The module is not in the package
`launch`, because it uses the event classes of `worker.messages`, and `launch` must not import
`worker`.
"""

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
from svdpp.launch import process_group, process_lifetime, rendezvous
from svdpp.launch.rendezvous import RendezvousConfig
from svdpp.launch.worker_group import END, ClockOffset, ControlChannel, EntryPoint, LaunchContext
from svdpp.launch.world import World
from svdpp.worker.messages import (
    Event,
    Failed,
    Heartbeat,
    describe_position,
    parse,
)

# Seconds that a rank other than 0 waits before it exits. A launcher shows the output of the rank
# that fails first, which should be rank 0.
_EXIT_DELAY_SECONDS = 2.0
_REPORT_SECONDS = 4.0
_SIGNAL_REPORT_SECONDS = 1.0


def run_secondary_rank(
    entry: EntryPoint,
    argument: Any,
    config: RendezvousConfig,
    *,
    device: str,
    observers: Sequence[Callable[[int, Event], None]],
    say: Callable[[str, bool], None],
    ignores_signals: bool = False,
) -> None:
    """Run a rank other than 0 of a launcher's world; exit the process unless all work succeeded.

    Args:
        entry: Entry point of the rank, such as `rank_main`.
        argument: Second argument of `entry`, after the `LaunchContext`, such as a `RankSetup`.
        config: Configuration of the rendezvous. Only `config.world` differs between ranks.
        device: Name of the rank's device, for messages.
        observers: Callbacks that get (rank number, event) for each event that this rank reports.
        say: Function that prints the rank's last message; see `Pipeline.serve`.
        ignores_signals: Whether the process ignores INT, TERM and HUP. Rank 0 gets the same
            signals, and decides when the run ends.

    Raises:
        RankError: Rank 0 cannot be reached, or does not respond in time.
        RequestError: This rank's command line differs from that of rank 0.
    """
    process_lifetime.end_with_parent()
    if ignores_signals:
        process_lifetime.ignore_signals()
    else:
        process_lifetime.exit_on_signals(_exit_on_signal)
    _, store = process_group.open_store(config.world, config.start_timeout)
    connection, endpoint = rendezvous.connect(store, config.hello(), config)
    clock = _measure_clock_offset(connection, config.start_timeout)
    parent = _ParentChannel(connection, endpoint.host, config, device, observers, say)
    _parents[:] = [parent]
    while parent.receive(_EXIT_DELAY_SECONDS) is None:
        pass  # Wait until rank 0 sends BEGIN. If the connection is lost, a thread ends the process.
    launch = LaunchContext(
        config.world,
        config.backend,
        parent,
        join=lambda: process_group.join_store(config.world, config.backend, store, endpoint.token),
        host=socket.gethostname(),
        clock=clock,
    )
    try:
        entry(launch, argument)
    except BaseException as error:
        # `entry` has reported the error to rank 0, which normally ends this process before the
        # sleep is over.
        time.sleep(_REPORT_SECONDS)
        process_lifetime.exit_process(exit_code_of(error))
    parent.disconnect()


def _measure_clock_offset(connection: Connection, seconds: float) -> ClockOffset:
    try:
        return rendezvous.measure_clock_offset(connection, time.monotonic() + seconds)
    except (OSError, EOFError) as error:
        hint = "check whether rank 0 has ended or is stopped, and whether its host is down"
        raise RankError(
            "rank 0 does not respond", hint, details={"peer": 0, "timeout_seconds": seconds}
        ) from error


def report_start_failure(world: World, error: dict[str, Any], *, timeout: float) -> bool:
    """Report to rank 0 the error that prevents the start of this rank, which a launcher started.

    Args:
        world: World that the launcher gives this process.
        error: Error as a dict, from `errors.error_to_dict`.
        timeout: Limit in seconds for reaching rank 0.

    Returns:
        Whether rank 0 could be reached.
    """
    config = RendezvousConfig(world=world, start_timeout=timeout, peer_timeout=timeout)
    try:
        _, store = process_group.open_store(world, timeout)
        rendezvous.connect(store, config.hello(error), config)
    except (RankError, RequestError):
        return False
    return True


# The channel to rank 0 while it is open, for the signal handler. The list has at most one element.
_parents: list[_ParentChannel] = []


def _exit_on_signal(number: int) -> NoReturn:
    for parent in _parents:
        parent.report_signal(number)
    process_lifetime.exit_with_signal_code(number)


class _ParentChannel(ControlChannel):
    """Channel to rank 0, with a thread that exits this process when rank 0 sends END or is lost."""

    def __init__(
        self,
        connection: Connection,
        host_of_rank_0: str,
        config: RendezvousConfig,
        device: str,
        observers: Sequence[Callable[[int, Event], None]],
        say: Callable[[str, bool], None],
    ) -> None:
        super().__init__(connection)
        self._observers, self._say = observers, say
        self._world, self._peer_timeout = config.world, config.peer_timeout
        self._name = f"rank {config.world.rank} ({device} of {socket.gethostname()})"
        self._rank_0 = f"rank 0 ({host_of_rank_0})"
        self._heartbeat = Heartbeat()
        self._commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._is_disconnected = self._has_timed_out = False
        threading.Thread(target=self._listen, name="parent-channel", daemon=True).start()

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
                # If rank 0 does not acknowledge data within `peer_timeout`, only one call on the
                # socket fails with ETIMEDOUT. If this `send` is that call, later reads return the
                # end of the stream, as if rank 0 had closed the connection. So `_listen` needs this
                # flag to tell the two causes apart.
                self._has_timed_out |= not isinstance(error, ConnectionError)
                raise

    def receive(self, timeout: float) -> bytes | None:
        with contextlib.suppress(queue.Empty):
            return self._commands.get(timeout=timeout)
        return None

    def disconnect(self) -> None:
        self._is_disconnected = True
        with socket.socket(fileno=self.connection.fileno()) as duplicate:
            with contextlib.suppress(OSError):
                # Only writing is shut down, so that rank 0 still reads the messages in flight.
                duplicate.shutdown(socket.SHUT_WR)
            duplicate.detach()

    def report_signal(self, number: int) -> None:
        """Report to rank 0 the signal that ends this process; wait at most a second."""
        if self._is_disconnected:
            return
        action, step = self._heartbeat.action, self._heartbeat.step
        error = error_to_dict(Interrupted(number))
        failed = Failed(error=error, traceback="", action=action, step=step)

        def send() -> None:
            with contextlib.suppress(OSError):
                super(_ParentChannel, self).send(failed.to_bytes())

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
            with self._lock:  # a `send` in another thread may be setting `_has_timed_out`
                if isinstance(error, (EOFError, ConnectionError)) and not self._has_timed_out:
                    reason = f"{self._rank_0} is gone"
            self._exit_without_rank_0(reason)
        # without this clause, the process would not end after an unexpected error
        except Exception as error:
            self._exit_without_rank_0(f"{self._rank_0} sent an invalid message ({error!r})")

    def _end(self, code: int, error: str | None) -> NoReturn:
        # Rank 0 has printed the error for the user, so this rank only logs it.
        if error is not None:
            self._say(f"{self._name} ends with the run: {error}", False)
            time.sleep(_EXIT_DELAY_SECONDS)
        process_lifetime.exit_process(code)

    def _exit_without_rank_0(self, reason: str) -> None:
        if not self._is_disconnected:
            where = describe_position(self._heartbeat.action, self._heartbeat.step)
            self._say(f"{reason}: {self._name} ends{where}", True)
            # When one rank of a host exits, the launcher shows its output and ends the host's other
            # ranks. The other ranks wait, so that this is always the host's first rank.
            if self._world.local_rank:
                time.sleep(_EXIT_DELAY_SECONDS)
            process_lifetime.exit_process(RankError.exit_code)
