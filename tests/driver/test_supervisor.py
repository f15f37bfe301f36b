"""A run that fails reports the cause, whichever rank reports first; no process."""

from __future__ import annotations

import re
import signal
from types import SimpleNamespace

import pytest

from svdpp.driver import supervisor
from svdpp.driver.supervisor import Supervisor
from svdpp.errors import (
    BrokenLinkError,
    Interrupted,
    OutOfMemoryError,
    RankError,
    TransportError,
    error_to_dict,
)
from svdpp.worker.messages import Event, Failed, Finished, Joined
from tests.driver.dummies import config


def _failed(error: BaseException) -> Failed:
    return Failed(error=error_to_dict(error), traceback="", action=None, step=-1)


INTERRUPTED = _failed(Interrupted(signal.SIGTERM))
LINK_BROKE = _failed(BrokenLinkError("could not receive"))
REFUSED = _failed(TransportError("sent 7, expected 8"))
RAISED = _failed(RuntimeError("of its own"))


class Group:
    """Ranks with prescribed messages and exit codes."""

    world_size = 3
    members = [SimpleNamespace(host="here", local_rank=rank) for rank in range(3)]  # noqa: RUF012

    def __init__(self, said: list[tuple[int, Event]], exited: dict[int, int | None]) -> None:
        self._said = [(rank, event.to_bytes()) for rank, event in said]
        self._exited = exited
        self.sent: list[tuple[int, int]] = []
        """The rank of each message sent, and how many messages of the ranks were unread then."""
        self.output: str | None = "its last output"

    def poll(self, timeout: float) -> list[tuple[int, bytes]]:  # noqa: ARG002
        said, self._said = self._said, []
        return said

    def exited(self) -> dict[int, int | None]:
        return self._exited

    def send(self, rank: int, message: bytes) -> None:  # noqa: ARG002
        self.sent.append((rank, len(self._said)))

    def output_tail(self, rank: int) -> str | None:  # noqa: ARG002
        return self.output

    def end(self, timeout: float) -> bool:  # noqa: ARG002
        return True

    def kill(self, error: BaseException | None = None) -> None:
        """There is no process to kill."""


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_REPORT_SECONDS", 0.0)


def _group(said: list[tuple[int, Event]], exited: dict[int, int | None]) -> Group:
    joined = [(rank, Joined(device="cpu", load_seconds=0.0)) for rank in range(3)]
    return Group([*joined, *said], exited)


def _of(group: Group) -> Supervisor:
    return Supervisor(group, config(3, steps=6))


def _supervisor(said: list[tuple[int, Event]], exited: dict[int, int | None]) -> Supervisor:
    return _of(_group(said, exited))


@pytest.mark.parametrize(
    "said",
    [
        [(1, INTERRUPTED), (2, INTERRUPTED)],
        [(2, LINK_BROKE), (1, INTERRUPTED), (0, LINK_BROKE)],
        [],
    ],
)
def test_after_a_signal_to_all_nobody_is_to_blame(said: list[tuple[int, Event]]) -> None:
    gone = {rank: None for rank, event in said if event is INTERRUPTED}
    assert _supervisor(said, gone).late_cause() is None


@pytest.mark.parametrize(
    ("said", "gone", "words"),
    [
        ([(2, INTERRUPTED), (0, LINK_BROKE)], [2, 1], "rank 1 .* is gone"),
        ([(1, RAISED), (2, INTERRUPTED)], [1, 2], "rank 1 .* failed: RuntimeError: of its own"),
        ([(1, RAISED), (1, INTERRUPTED)], [1], "rank 1 .* failed: RuntimeError: of its own"),
        ([(1, LINK_BROKE)], [], "rank 1 .* failed: could not receive"),
        ([(0, LINK_BROKE), (1, REFUSED)], [], "rank 1 .* failed: sent 7, expected 8"),
    ],
)
def test_a_signal_that_came_because_of_another_rank_is_told_as_that_rank(
    said: list[tuple[int, Event]], gone: list[int], words: str
) -> None:
    cause = _supervisor(said, dict.fromkeys(gone)).late_cause()
    assert isinstance(cause, RankError)
    assert re.search(words, cause.message)


def test_an_error_whose_message_is_complete_has_its_rank_in_the_details() -> None:
    """So that a server knows whose clip it was."""
    full = _failed(OutOfMemoryError("full", details={"gib": 3}))
    cause = _supervisor([(0, LINK_BROKE), (1, full)], {}).late_cause()
    assert isinstance(cause, OutOfMemoryError)
    assert cause.details == {"gib": 3, "rank": 1}


def test_a_signal_to_one_rank_is_told_rather_than_its_neighbours_broken_link() -> None:
    signalled = _supervisor([(2, LINK_BROKE), (1, INTERRUPTED)], {1: None})
    with pytest.raises(RankError, match=r"rank 1 .* failed: Interrupted: ended by SIGTERM") as told:
        signalled.step()
    assert signalled.interruption is told.value, "if this process is signalled too, that is told"


def test_another_failure_is_no_interruption() -> None:
    failed = _supervisor([(1, RAISED), (2, INTERRUPTED)], {1: None, 2: None})
    with pytest.raises(RankError, match="of its own"):
        failed.step()
    assert failed.interruption is None


@pytest.mark.parametrize("code", [0, None])
def test_a_rank_that_ended_in_order_is_not_blamed_for_anothers_link(code: int | None) -> None:
    said: list[tuple[int, Event]] = [(0, Finished()), (1, LINK_BROKE)]
    with pytest.raises(RankError, match=r"rank 1 .* could not receive"):
        _supervisor(said, {0: code}).stop()


def test_ranks_may_end_when_all_have_what_was_sent_to_them() -> None:
    """A rank that ends takes with it what NCCL has not delivered."""
    said: list[tuple[int, Event]] = [(rank, Finished()) for rank in range(3)]
    group = _group(said, {})
    _of(group).stop()
    assert group.sent == [(rank, unread) for unread in (6, 0) for rank in range(3)]


def test_a_rank_that_ends_badly_after_its_last_word_is_blamed() -> None:
    said: list[tuple[int, Event]] = [(rank, Finished()) for rank in (0, 1)]
    with pytest.raises(RankError, match=r"rank 1 .* ended with exit code 1"):
        _supervisor(said, {0: 0, 1: 1}).stop()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            None,
            r'could not import your script: put what it does under `if __name__ == "__main__":`',
        ),
        ("", "ended with exit code 1 without a report"),
    ],
)
def test_only_a_rank_that_never_began_could_not_import_the_script(
    output: str | None, words: str
) -> None:
    group = Group([], {1: 1})
    group.output = output
    with pytest.raises(RankError, match=f"rank 1 .* {words}") as told:
        _of(group).step()
    assert told.value.trace == ""


def test_before_it_joins_a_rank_is_named_by_its_planned_device() -> None:
    on_gpus = config(3, steps=6, device="cuda")
    planned = Supervisor(Group([], {}), on_gpus)
    names = [planned._name(rank).split()[2] for rank in range(3)]
    assert names == ["(cuda:0", "(cuda:1", "(cuda:2"]
