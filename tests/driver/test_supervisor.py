"""Which rank counts as stalled, and why a run failed; no process, no clock."""

from __future__ import annotations

import itertools
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from svdpp.driver import supervisor
from svdpp.driver.supervisor import Liveness, Stall, Supervisor
from svdpp.errors import (
    BrokenLinkError,
    Interrupted,
    OutOfMemoryError,
    RankError,
    TransportError,
    error_to_dict,
)
from svdpp.worker.messages import (
    ClipDone,
    Event,
    Failed,
    Finished,
    Heartbeat,
    Joined,
    StepDone,
)
from tests.driver.dummies import config

JOINED = Joined(device="cpu", load_seconds=0.1)
IDLE = Heartbeat()
COMPUTING = Heartbeat(action="DENOISE c0 0:4", step=2)
WAITING = Heartbeat(action="DENOISE c0 4:8", waiting=True)
STEP = StepDone(clip=0, step=1, seconds=1.0)
IDLE_BUT_WRITING = Heartbeat(writing=True)
DELIVERING = Heartbeat(action="FINISH c3 @8", waiting=True, writing=True)
LOADING = Heartbeat(phase="loading the model")


def _opening(peer: int) -> Heartbeat:
    return Heartbeat(phase=f"opening its link with rank {peer}", peer=peer)


def _liveness(world_size: int = 3, *, joined: bool = True, start_timeout: float = 60) -> Liveness:
    limits = {"heartbeat_timeout_seconds": 10.0, "timeout_seconds": 100.0}
    deadlines = config(world_size, steps=6, start_timeout_seconds=start_timeout, **limits)
    liveness = Liveness(deadlines, 0.0)
    for rank in range(world_size if joined else 0):
        liveness.heard(rank, JOINED, 0.0)
    return liveness


def _hear(liveness: Liveness, second: float, events: Mapping[int, Event]) -> Stall | None:
    for rank, event in events.items():
        liveness.heard(rank, event, second)
    return liveness.stall(second)


Beats = Mapping[int, Heartbeat]


@pytest.mark.parametrize(
    ("beats", "fine", "rank", "reason"),
    [
        ({0: WAITING, 2: WAITING}, 10, 1, "has sent no heartbeat for 11 s"),
        ({0: WAITING, 1: COMPUTING, 2: WAITING}, 100, 1, "has made no progress for 101 s"),
        *(
            ({0: other, 1: other, 2: last}, 100, 2, "has waited for its disk for 101 s")
            for other in (IDLE, WAITING)
            for last in (IDLE_BUT_WRITING, DELIVERING)
        ),
        ({0: IDLE, 1: WAITING, 2: WAITING}, 100, 1, "has made no progress for 101 s"),
        (dict.fromkeys(range(3), WAITING), 100, 0, "has made no progress for 101 s"),
    ],
)
def test_after_the_limit_the_rank_that_is_the_cause_is_named(
    beats: Beats, fine: int, rank: int, reason: str
) -> None:
    liveness = _liveness()
    assert [_hear(liveness, second, beats) for second in range(fine + 1)] == [None] * (fine + 1)
    stall = _hear(liveness, fine + 1, beats)
    assert stall is not None
    assert (stall.rank, stall.reason) == (rank, reason)


@pytest.mark.parametrize(
    ("beats", "joined", "rank", "reason"),
    [
        ({0: IDLE, 2: IDLE}, (0,), 1, "never started within 60 s"),
        (dict.fromkeys(range(3), IDLE), (0, 1), 2, "did not get ready within 60 s"),
        (
            {0: _opening(1), 1: _opening(0)},
            (2,),
            0,
            "did not finish opening its link with rank 1 within 60 s",
        ),
        (
            {0: _opening(1), 1: LOADING, 2: _opening(1)},
            (),
            1,
            "did not get ready within 60 s (loading the model)",
        ),
    ],
)
def test_the_rank_that_delays_the_start_is_named(
    beats: Beats, joined: Sequence[int], rank: int, reason: str
) -> None:
    liveness = _liveness(joined=False)
    for second in range(61):
        assert _hear(liveness, second, beats) is None
    stall = _hear(liveness, 61, {**beats, **dict.fromkeys(joined, JOINED)})
    assert stall is not None
    assert (stall.rank, stall.reason) == (rank, reason)
    if "link" in reason:
        assert "NCCL_P2P_DISABLE=1" in stall.hint
        assert "PIPELINE_BACKEND=gloo" in stall.hint


def test_a_rank_may_be_silent_for_longer_before_it_has_joined() -> None:
    """CUDA's initialisation may hold the GIL for long; at last it is named, not who waits."""
    liveness = _liveness(2, joined=False, start_timeout=600)
    liveness.heard(1, _opening(0), 0.0)
    for second in range(81):
        assert _hear(liveness, second, {0: _opening(1)}) is None
    stall = _hear(liveness, 81, {0: _opening(1)})
    assert stall is not None
    assert (stall.rank, stall.reason) == (1, "has sent no heartbeat for 81 s")


def _all_step(_: int) -> Mapping[int, Event]:
    return dict.fromkeys(range(3), STEP)


def _idle(_: int) -> Mapping[int, Event]:
    return dict.fromkeys(range(3), IDLE)


def _writes_clip_after_clip(second: int) -> Mapping[int, Event]:
    done = ClipDone(clip=second, metadata={})
    return {0: IDLE, 1: IDLE, 2: done if second % 90 == 0 else IDLE_BUT_WRITING}


@pytest.mark.parametrize("events", [_all_step, _idle, _writes_clip_after_clip])
def test_all_is_well_while_ranks_progress_or_have_no_work(
    events: Callable[[int], Mapping[int, Event]],
) -> None:
    liveness = _liveness()
    assert {_hear(liveness, second, events(second)) for second in range(500)} == {None}


def test_a_rank_that_waited_long_has_all_its_time_once_it_begins() -> None:
    """Its neighbour has sent its packet and is idle before the rank says that it computes."""
    liveness = _liveness(2)
    sent = 400
    for second in range(sent + 104):
        if second < sent:
            liveness.heard(0, STEP, float(second))
        now = {0: COMPUTING if second < sent else IDLE, 1: WAITING}
        stall = _hear(liveness, second, now if second < sent + 2 else {**now, 1: COMPUTING})
        assert (stall is None) == (second <= sent + 102), second
    assert stall is not None
    assert "no progress for 101 s" in stall.reason


def test_the_place_follows_the_steps() -> None:
    liveness = _liveness()
    liveness.heard(1, COMPUTING, 1.0)
    liveness.heard(1, StepDone(clip=0, step=2, seconds=0.1), 1.1)
    assert liveness.seen[1].heartbeat.step == 3
    liveness.heard(1, StepDone(clip=0, step=3, seconds=0.1), 1.2)
    assert liveness.seen[1].heartbeat == Heartbeat(action="DENOISE c0 0:4", step=3)
    liveness.heard(2, STEP, 1.2)
    assert liveness.seen[2].heartbeat == Heartbeat()


def test_finished_ranks_may_fall_silent() -> None:
    liveness = _liveness(2)
    liveness.heard(0, Finished(), 1.0)
    assert {_hear(liveness, second, {1: COMPUTING}) for second in range(51)} == {None}
    assert not liveness.all_finished
    liveness.heard(1, Finished(), 51.0)
    assert liveness.all_finished


def test_the_time_in_which_the_parent_was_stopped_is_nobodys_fault() -> None:
    liveness, waiting = _liveness(), {0: WAITING, 2: WAITING}
    for second in range(6):
        _hear(liveness, second, {**waiting, 1: COMPUTING})
    assert liveness.stall(1000.0) is None
    for second in range(1001, 1011):
        assert _hear(liveness, second, waiting) is None
    stall = liveness.stall(1012.0)
    assert stall is not None
    assert stall.rank == 1


# --- the cause of a failure ---------------------------------------------------------------------


def _failed(error: BaseException) -> Failed:
    return Failed(error=error_to_dict(error), traceback="", action=None, step=-1)


INTERRUPTED = _failed(Interrupted(signal.SIGTERM))
LINK_BROKE = _failed(BrokenLinkError("could not receive"))
REFUSED = _failed(TransportError("sent 7, expected 8"))
RAISED = _failed(RuntimeError("of its own"))


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_REPORT_SECONDS", 0.0)


def _group(said: list[tuple[int, Event]], exited: dict[int, int | None]) -> Mock:
    """Ranks that have joined, with prescribed messages and exit codes."""
    joined = [(rank, JOINED) for rank in range(3)]
    messages = [(rank, event.to_bytes()) for rank, event in [*joined, *said]]
    members = [SimpleNamespace(host="here", local_rank=rank) for rank in range(3)]
    group = Mock(world_size=3, members=members)
    group.poll.side_effect = itertools.chain([messages], itertools.repeat([]))
    group.exited.return_value = exited
    group.output_tail.return_value = "its last output"
    return group


def _supervisor(said: list[tuple[int, Event]], exited: dict[int, int | None]) -> Supervisor:
    return Supervisor(_group(said, exited), config(3, steps=6))


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
    assert _supervisor(said, gone).find_cause() is None


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
    cause = _supervisor(said, dict.fromkeys(gone)).find_cause()
    assert isinstance(cause, RankError)
    assert re.search(words, cause.message)


def test_an_error_whose_message_is_complete_has_its_rank_in_the_details() -> None:
    """So that a server knows whose clip it was."""
    full = _failed(OutOfMemoryError("full", details={"gib": 3}))
    cause = _supervisor([(0, LINK_BROKE), (1, full)], {}).find_cause()
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
    Supervisor(group, config(3, steps=6)).stop()
    calls = [name for name, *_ in group.method_calls if name in ("poll", "send")]
    assert calls == ["send"] * 3 + ["poll"] + ["send"] * 3
    assert [call.args[0] for call in group.send.call_args_list] == [0, 1, 2] * 2


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
    group = _group([], {1: 1})
    group.output_tail.return_value = output
    with pytest.raises(RankError, match=f"rank 1 .* {words}") as told:
        Supervisor(group, config(3, steps=6)).step()
    assert told.value.trace == ""


def test_before_it_joins_a_rank_is_named_by_its_planned_device() -> None:
    on_gpus = config(3, steps=6, device="cuda")
    planned = Supervisor(_group([], {}), on_gpus)
    names = [planned._name(rank).split()[2] for rank in range(3)]
    assert names == ["(cuda:0", "(cuda:1", "(cuda:2"]
