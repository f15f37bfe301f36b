"""Supervision from the events of ranks: stalled ranks, causes of failures, and measurements."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from svdpp.driver import supervisor
from svdpp.driver.supervisor import Stall, StallDetector, Supervisor
from svdpp.driver.trace import StepSpan, Trace, WaitSpan
from svdpp.errors import (
    BrokenLinkError,
    Interrupted,
    OutOfMemoryError,
    RankError,
    TransportError,
    error_to_dict,
)
from svdpp.launch.start_deadline import NO_FURTHER_THREAD
from svdpp.plan.actions import Action, Kind
from svdpp.plan.costs import CostModel
from svdpp.worker.messages import (
    ActionDone,
    ClipDone,
    Event,
    Failed,
    Finished,
    Heartbeat,
    Joined,
    RankStats,
    StepDone,
    TransferDone,
)
from tests.support.dummies import config

JOINED = Joined(device="cpu", load_seconds=0.1)
IDLE = Heartbeat()
COMPUTING = Heartbeat(action="DENOISE c0 0:4", step=2)
WAITING = Heartbeat(action="DENOISE c0 4:8", waiting=True)
STEP = StepDone(clip=0, step=1, seconds=1.0)
IDLE_BUT_WRITING = Heartbeat(writing=True)
DELIVERING = Heartbeat(action="FINISH c3 @8", waiting=True, writing=True)
LOADING = Heartbeat(phase="loading the model")
JOINING = Heartbeat(phase="joining the other ranks", waiting=True)
ALL_STEP, ALL_IDLE = dict.fromkeys(range(3), STEP), dict.fromkeys(range(3), IDLE)


def _opening(peer: int) -> Heartbeat:
    return Heartbeat(phase=f"opening its link with rank {peer}", peer=peer)


OPENING = {0: _opening(1), 1: _opening(0), 2: _opening(1)}


def _detector(
    world_size: int = 3, *, joined: bool = True, start_timeout: float = 60
) -> StallDetector:
    limits = {"heartbeat_timeout_seconds": 10.0, "timeout_seconds": 100.0}
    deadlines = config(world_size, steps=6, start_timeout_seconds=start_timeout, **limits)
    detector = StallDetector(deadlines, 0.0)
    for rank in range(world_size if joined else 0):
        detector.record(rank, JOINED, 0.0)
    return detector


def _hear(detector: StallDetector, second: float, events: Mapping[int, Event]) -> Stall | None:
    for rank, event in events.items():
        detector.record(rank, event, second)
    return detector.find_stall(second)


def _assert_stalled(stall: Stall | None, rank: int, reason: str) -> None:
    assert stall is not None
    assert (stall.rank, stall.reason) == (rank, reason)


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
    detector = _detector()
    assert {_hear(detector, second, beats) for second in range(fine + 1)} == {None}
    _assert_stalled(_hear(detector, fine + 1, beats), rank, reason)


def test_samples_for_monitoring_are_no_sign_of_life() -> None:
    """Monitoring samples do not count as progress, because their thread continues in a hanging
    rank.
    """
    sample, detector = RankStats(sent_bytes=0, received_bytes=0, resident_bytes=1), _detector()
    beats: Mapping[int, Event] = {0: WAITING, 1: COMPUTING, 2: WAITING}
    for second in range(101):
        detector.record(1, sample, second)
        assert _hear(detector, second, beats) is None
    detector.record(1, sample, 101)
    _assert_stalled(_hear(detector, 101, beats), 1, "has made no progress for 101 s")


@pytest.mark.parametrize(
    ("beats", "joined", "rank", "reason"),
    [
        ({0: IDLE, 2: IDLE}, (0,), 1, "never started within 60 s"),
        (ALL_IDLE, (0, 1), 2, "did not get ready within 60 s"),
        (OPENING, (2,), 0, "did not finish opening its link with rank 1 within 60 s"),
        ({**OPENING, 1: LOADING}, (), 1, "did not get ready within 60 s (loading the model)"),
        (
            *({0: JOINING, 1: LOADING, 2: JOINING}, (), 1),
            "did not get ready within 60 s (loading the model)",
        ),
        ({0: JOINING, 2: JOINING}, (), 1, "never started within 60 s"),
    ],
)
def test_the_rank_that_delays_the_start_is_named(
    beats: Beats, joined: Sequence[int], rank: int, reason: str
) -> None:
    detector = _detector(joined=False)
    for second in range(61):
        assert _hear(detector, second, beats) is None
    stall = _hear(detector, 61, {**beats, **dict.fromkeys(joined, JOINED)})
    _assert_stalled(stall, rank, reason)
    if stall and "link" in reason:
        assert "NCCL_P2P_DISABLE=1" in stall.hint
        assert "PIPELINE_BACKEND=gloo" in stall.hint


def test_a_rank_may_be_silent_for_longer_before_it_has_joined() -> None:
    """A rank that has not joined yet has a longer heartbeat limit, because CUDA may hold the GIL.

    After the longer limit, the error names that rank, and not the rank that waits for it.
    """
    detector = _detector(2, joined=False, start_timeout=600)
    detector.record(1, _opening(0), 0.0)
    for second in range(81):
        assert _hear(detector, second, {0: _opening(1)}) is None
    stall = _hear(detector, 81, {0: _opening(1)})
    _assert_stalled(stall, 1, "has sent no heartbeat for 81 s")


def _writes_clip_after_clip(second: int) -> Mapping[int, Event]:
    done = ClipDone(clip=second, metadata={})
    return {0: IDLE, 1: IDLE, 2: done if second % 90 == 0 else IDLE_BUT_WRITING}


@pytest.mark.parametrize(
    "events", [lambda _: ALL_STEP, lambda _: ALL_IDLE, _writes_clip_after_clip]
)
def test_all_is_well_while_ranks_progress_or_have_no_work(
    events: Callable[[int], Mapping[int, Event]],
) -> None:
    detector = _detector()
    assert {_hear(detector, second, events(second)) for second in range(500)} == {None}


def test_a_rank_that_waited_long_has_all_its_time_once_it_begins() -> None:
    """The time limit of a rank that has waited for long starts when the rank begins to compute.

    Its neighbour is already idle when the rank reports that it computes.
    """
    detector = _detector(2)
    sent = 400
    for second in range(sent + 104):
        if second < sent:
            detector.record(0, STEP, float(second))
        now = {0: COMPUTING if second < sent else IDLE, 1: WAITING}
        stall = _hear(detector, second, now if second < sent + 2 else {**now, 1: COMPUTING})
        assert (stall is None) == (second <= sent + 102), second
    _assert_stalled(stall, 1, "has made no progress for 101 s")


def test_the_place_follows_the_steps() -> None:
    detector = _detector()
    detector.record(1, COMPUTING, 1.0)
    detector.record(1, StepDone(clip=0, step=2, seconds=0.1), 1.1)
    assert detector.states[1].heartbeat.step == 3
    detector.record(1, StepDone(clip=0, step=3, seconds=0.1), 1.2)
    assert detector.states[1].heartbeat == Heartbeat(action="DENOISE c0 0:4", step=3)
    detector.record(2, STEP, 1.2)
    assert detector.states[2].heartbeat == Heartbeat()


def test_finished_ranks_may_fall_silent() -> None:
    detector = _detector(2)
    detector.record(0, Finished(), 1.0)
    assert {_hear(detector, second, {1: COMPUTING}) for second in range(51)} == {None}
    assert not detector.all_finished
    detector.record(1, Finished(), 51.0)
    assert detector.all_finished


def test_the_time_in_which_the_parent_was_stopped_is_nobodys_fault() -> None:
    detector, waiting = _detector(), {0: WAITING, 2: WAITING}
    for second in range(6):
        _hear(detector, second, {**waiting, 1: COMPUTING})
    assert detector.find_stall(1000.0) is None
    for second in range(1001, 1011):
        assert _hear(detector, second, waiting) is None
    _assert_stalled(detector.find_stall(1012.0), 1, "has sent no heartbeat for 12 s")


# --- the cause of a failure ---------------------------------------------------------------------


def _failed(error: BaseException) -> Failed:
    return Failed(error=error_to_dict(error), traceback="", action=None, step=-1)


INTERRUPTED = _failed(Interrupted(signal.SIGTERM))
LINK_BROKE = _failed(BrokenLinkError("could not receive"))
REFUSED = _failed(TransportError("sent 7, expected 8", details={"sent": 7, "expected": 8}))
RAISED = _failed(RuntimeError("of its own"))


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_REPORT_SECONDS", 0.0)


def _fake_group(said: list[tuple[int, Event]], exited: dict[int, int | None]) -> Mock:
    """Return a stand-in for a `WorkerGroup` of three joined ranks that sends events and exits."""
    joined = [(rank, JOINED) for rank in range(3)]
    messages = [(rank, event.to_bytes()) for rank, event in [*joined, *said]]
    workers = [SimpleNamespace(host="here", local_rank=rank) for rank in range(3)]
    group = Mock(world_size=3, workers=workers)
    group.poll.side_effect = itertools.chain([messages], itertools.repeat([]))
    group.exited.return_value = exited
    group.output_tail.return_value = "its last output"
    return group


def _supervisor(said: list[tuple[int, Event]], exited: dict[int, int | None]) -> Supervisor:
    return Supervisor(_fake_group(said, exited), config(3, steps=6))


def test_after_a_signal_to_all_nobody_is_to_blame() -> None:
    links_broke = [(2, LINK_BROKE), (1, INTERRUPTED), (0, LINK_BROKE)]
    for said in ([(1, INTERRUPTED), (2, INTERRUPTED)], links_broke, []):
        gone = {rank: None for rank, event in said if event is INTERRUPTED}
        assert _supervisor(said, gone).find_root_cause() is None


FINISHED = Finished()
OF_ITS_OWN = "failed: RuntimeError: of its own"
GONE = None


@pytest.mark.parametrize(
    ("said", "exited", "words"),
    [
        ([(2, INTERRUPTED), (0, LINK_BROKE)], {2: GONE, 1: GONE}, "is gone"),
        ([(1, RAISED), (2, INTERRUPTED)], {1: GONE, 2: GONE}, OF_ITS_OWN),
        ([(1, RAISED), (1, INTERRUPTED)], {1: GONE}, OF_ITS_OWN),
        ([(1, LINK_BROKE)], {}, "failed: could not receive"),
        ([(0, LINK_BROKE), (1, REFUSED)], {}, "failed: sent 7, expected 8"),
        # A rank that ended normally is not the cause of another rank's broken link.
        ([(0, FINISHED), (1, LINK_BROKE)], {0: 0}, "could not receive"),
        ([(0, FINISHED), (1, LINK_BROKE)], {0: GONE}, "could not receive"),
        ([(0, FINISHED), (1, FINISHED)], {0: 0, 1: 1}, "ended with exit code 1 without a report"),
    ],
)
def test_the_rank_that_is_the_cause_is_named_and_none_that_ended_because_of_it(
    said: list[tuple[int, Event]], exited: dict[int, int | None], words: str
) -> None:
    failed = _supervisor(said, exited)
    with pytest.raises(RankError, match=rf"rank 1 .* {words}"):
        failed.step()
    assert failed.interruption is None


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("libgomp: Thread creation failed: Resource temporarily unavailable", NO_FURTHER_THREAD),
        ("RuntimeError: can't start new thread", NO_FURTHER_THREAD),
        ("MemoryError", "ended with exit code 1 without a report"),
        (None, "could not import your script"),
    ],
)
def test_a_rank_that_got_no_thread_says_so(output: str | None, words: str) -> None:
    """If the system gives a rank no further thread, the error says so.

    libgomp ends the process before the rank can report anything, so the parent searches the rank's
    output.
    """
    group = _fake_group([], {1: 1})
    group.output_tail.return_value = output
    with pytest.raises(RankError, match=words) as ended:
        Supervisor(group, config(3, steps=6)).step()
    assert ("ulimit -u" in ended.value.hint) is (words == NO_FURTHER_THREAD)
    assert ended.value.details["exit_code"] == 1


def test_a_signal_to_one_rank_is_told_rather_than_its_neighbours_broken_link() -> None:
    signalled = _supervisor([(2, LINK_BROKE), (1, INTERRUPTED)], {1: GONE})
    with pytest.raises(RankError, match=r"rank 1 .* failed: Interrupted: ended by SIGTERM") as told:
        signalled.step()
    assert signalled.interruption is told.value, "if this process is signalled too, that is told"


def test_an_error_whose_message_is_complete_has_its_rank_in_the_details() -> None:
    """An error of a rank gets the rank in its `details`, even if its message needs no addition.

    A server uses the rank to find the clip.
    """
    full = _failed(OutOfMemoryError("full", details={"gib": 3}))
    cause = _supervisor([(0, LINK_BROKE), (1, full)], {}).find_root_cause()
    assert isinstance(cause, OutOfMemoryError)
    assert cause.details == {"gib": 3, "rank": 1}


def test_ranks_may_end_when_all_have_what_was_sent_to_them() -> None:
    """`Stop` is sent once to end the work, and again when all ranks are finished.

    A rank ends only after the second `Stop`, because NCCL loses data that it has not delivered when
    the sending rank ends.
    """
    said: list[tuple[int, Event]] = [(rank, FINISHED) for rank in range(3)]
    group = _fake_group(said, {})
    Supervisor(group, config(3, steps=6)).stop()
    calls = [name for name, *_ in group.method_calls if name in ("poll", "send")]
    assert calls == ["send"] * 3 + ["poll"] + ["send"] * 3
    assert [call.args[0] for call in group.send.call_args_list] == [0, 1, 2] * 2


# --- measurements -------------------------------------------------------------------------------


def test_a_clips_measurements_are_placed_and_summed_up() -> None:
    """The trace gives steps, waits and transfers of a clip their times, and sums them up.

    The steps of an action follow each other without gaps until its end. The time that a sender
    waits does not count as sending.
    """
    trace = Trace(2)
    trace(0, Joined(device="cpu", load_seconds=0.5))
    trace(0, ActionDone(action="ENCODE c0 @0", start=10.0, end=11.0, waited=0.0))
    _add_steps(trace, 0, 1.5, 2.5)
    trace(0, ActionDone(action="DENOISE c0 0:2", start=11.0, end=15.0, waited=0.5))
    _add_steps(trace, 1, 1.5, 2.0)
    trace(1, ActionDone(action="DENOISE c0 2:4", start=15.5, end=19.0, waited=5.0))
    trace(1, ActionDone(action="DECODE c0 @4", start=19.0, end=20.0, waited=0.0))
    transfer = {"clip": 0, "next_step": 2, "num_bytes": 8, "seconds": 0.25, "end": 15.5}
    trace(0, TransferDone(direction="send", peer=1, waited=3.75, **transfer))
    trace(1, TransferDone(direction="recv", peer=0, **transfer))

    assert trace.steps == [
        StepSpan(0, 0, 0, 11.0, 12.5),
        StepSpan(0, 0, 1, 12.5, 15.0),
        StepSpan(1, 0, 2, 15.5, 17.0),
        StepSpan(1, 0, 3, 17.0, 19.0),
    ]
    assert trace.waits == [WaitSpan(0, 0, 10.5, 11.0), WaitSpan(1, 0, 10.5, 15.5)]
    times = [(transfer.start, transfer.end, transfer.waited) for transfer in trace.transfers]
    assert times == [(15.25, 15.5, 3.75), (15.25, 15.5, 0.0)]
    costs = CostModel(step_seconds=1.875, encode_seconds=1, decode_seconds=1, transfer_seconds=0.25)
    assert trace.costs() == costs
    summary = trace.summary()
    assert (summary.clips, summary.makespan, summary.first_clip) == (1, 10.0, 10.0)
    assert summary.bubble == pytest.approx(1 - 9.5 / 20)


def _add_steps(trace: Trace, rank: int, *seconds: float) -> None:
    for index, each in enumerate(seconds):
        trace(rank, StepDone(clip=0, step=2 * rank + index, seconds=each))


def test_steps_of_a_pair_cost_what_a_forecast_halves() -> None:
    trace = Trace(2)
    for rank in (0, 1):
        trace(rank, StepDone(clip=0, step=0, seconds=0.7))
        action = Action(Kind.DENOISE, 0, 0, 1, 1 - rank)
        trace(rank, ActionDone(action=action, start=0.0, end=0.7, waited=0.0))
    transfer = {"clip": 0, "next_step": 0, "num_bytes": 1, "seconds": 0.2, "end": 0.0}
    trace(1, TransferDone(direction="recv", peer=0, **transfer))
    assert trace.costs().step_seconds == pytest.approx(1.0)
    assert trace.costs().action_seconds(action, 0) == pytest.approx(0.7)


def test_steps_of_an_action_that_was_broken_off_are_in_no_other() -> None:
    trace = Trace(1)
    trace(0, StepDone(clip=0, step=0, seconds=1.0))
    trace(0, ActionDone(action="ENCODE c1 @0", start=2.0, end=3.0, waited=0.0))
    trace(0, StepDone(clip=1, step=0, seconds=1.0))  # an action that was broken off
    trace(0, StepDone(clip=2, step=0, seconds=1.5))
    trace(0, ActionDone(action="DENOISE c2 0:1", start=5.0, end=6.5, waited=0.0))
    assert trace.steps == [StepSpan(0, 2, 0, 5.0, 6.5)]
