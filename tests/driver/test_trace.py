"""The measurements add up to the figures in the table."""

from __future__ import annotations

import pytest

from svdpp.driver.trace import StepSpan, Trace, WaitSpan
from svdpp.plan.actions import Action, Kind
from svdpp.worker.messages import ActionDone, Joined, StepDone, TransferDone


def _trace() -> Trace:
    trace = Trace(2)
    _add_clip(trace)
    return trace


def _add_clip(trace: Trace) -> None:
    trace(0, Joined(device="cpu", load_seconds=0.5))
    trace(0, ActionDone(action="ENCODE c0 @0", start=10.0, end=11.0, waited=0.0))
    _add_steps(trace, 0, 1.5, 2.5)
    trace(0, ActionDone(action="DENOISE c0 0:2", start=11.0, end=15.0, waited=0.5))
    _add_steps(trace, 1, 1.5, 2.0)
    trace(1, ActionDone(action="DENOISE c0 2:4", start=15.5, end=19.0, waited=5.0))
    trace(1, ActionDone(action="DECODE c0 @4", start=19.0, end=20.0, waited=0.0))
    transfer = {"clip": 0, "next_step": 2, "num_bytes": 8}
    trace(
        0, TransferDone(direction="send", peer=1, seconds=0.25, waited=3.75, end=15.5, **transfer)
    )
    trace(1, TransferDone(direction="recv", peer=0, seconds=0.25, end=15.5, **transfer))


def _add_steps(trace: Trace, rank: int, *seconds: float) -> None:
    for index, each in enumerate(seconds):
        trace(rank, StepDone(clip=0, step=2 * rank + index, seconds=each))


def test_steps_are_placed_back_to_back_before_their_actions_end() -> None:
    assert _trace().steps == [
        StepSpan(0, 0, 0, 11.0, 12.5),
        StepSpan(0, 0, 1, 12.5, 15.0),
        StepSpan(1, 0, 2, 15.5, 17.0),
        StepSpan(1, 0, 3, 17.0, 19.0),
    ]


def test_waits_end_where_the_action_begins() -> None:
    assert _trace().waits == [WaitSpan(0, 0, 10.5, 11.0), WaitSpan(1, 0, 10.5, 15.5)]


def test_a_sender_that_waits_is_not_yet_sending() -> None:
    send, recv = _trace().transfers
    assert (send.start, send.end, send.waited) == (15.25, 15.5, 3.75)
    assert (recv.start, recv.end, recv.waited) == (15.25, 15.5, 0.0)


def test_costs_are_the_means_and_the_hop_is_the_receivers() -> None:
    costs = _trace().costs()
    assert costs.step_seconds == pytest.approx(1.875)
    assert costs.encode_seconds == 1.0
    assert costs.decode_seconds == 1.0
    assert costs.transfer_seconds == 0.25


def test_steps_of_a_pair_cost_what_a_forecast_halves() -> None:
    trace = Trace(2)
    for rank in (0, 1):
        trace(rank, StepDone(clip=0, step=0, seconds=0.7))
        action = Action(Kind.DENOISE, 0, 0, 1, 1 - rank)
        trace(rank, ActionDone(action=action, start=0.0, end=0.7, waited=0.0))
    trace(
        1,
        TransferDone(
            direction="recv", clip=0, next_step=0, peer=0, num_bytes=1, seconds=0.2, end=0.0
        ),
    )
    assert trace.costs().step_seconds == pytest.approx(1.0)
    assert trace.costs().of(action, 0) == pytest.approx(0.7)


def test_summary_is_in_the_forecasts_terms() -> None:
    summary = _trace().summary()
    assert (summary.clips, summary.makespan, summary.first_clip) == (1, 10.0, 10.0)
    assert summary.bubble == pytest.approx(1 - 9.5 / 20)


def test_a_run_without_spans_has_no_summary() -> None:
    with pytest.raises(ValueError, match="no spans to sum up"):
        Trace(2).summary()


def test_steps_of_an_action_that_was_broken_off_are_in_no_other() -> None:
    trace = Trace(1)
    trace(0, StepDone(clip=0, step=0, seconds=1.0))
    trace(0, ActionDone(action="ENCODE c1 @0", start=2.0, end=3.0, waited=0.0))
    trace(0, StepDone(clip=1, step=0, seconds=1.0))  # not finite, as before
    trace(0, StepDone(clip=2, step=0, seconds=1.5))
    trace(0, ActionDone(action="DENOISE c2 0:1", start=5.0, end=6.5, waited=0.0))
    assert trace.steps == [StepSpan(0, 2, 0, 5.0, 6.5)]


def _bounded(last_clips: int, num_clips: int) -> Trace:
    """One rank and two steps per clip; each step of clip n takes n + 1 seconds."""
    trace = Trace(1, last_clips)
    end = 0.0
    for clip in range(num_clips):
        start, end = end + 0.5, end + 0.5 + 2 * (clip + 1)
        for step in range(2):
            trace(0, StepDone(clip=clip, step=step, seconds=clip + 1))
        trace(0, ActionDone(action=f"DENOISE c{clip} 0:2", start=start, end=end, waited=0.5))
        transfer = {"clip": clip, "next_step": 2, "num_bytes": 8, "peer": 0}
        trace(0, TransferDone(direction="recv", seconds=0.25, end=end, **transfer))
    return trace


def test_a_bounded_trace_keeps_the_last_clips_and_the_means_of_all() -> None:
    trace, whole = _bounded(3, 10), _bounded(10, 10)
    assert {span.action.clip for span in trace.spans} == {7, 8, 9}
    assert {step.clip for step in trace.steps} == {7, 8, 9}
    assert {transfer.clip for transfer in trace.transfers} == {7, 8, 9}
    assert trace.waits == [
        WaitSpan(0, span.clip, span.start - 0.5, span.start) for span in trace.spans
    ]
    assert (trace.spans, trace.steps) == (whole.spans[7:], whole.steps[14:])
    assert trace.costs() == whole.costs()
    assert trace.costs().step_seconds == pytest.approx(5.5)
    assert trace.summary().clips == 3


def test_an_old_clip_that_comes_late_is_not_kept() -> None:
    trace = _bounded(2, 10)
    kept = list(trace.spans)
    trace(0, StepDone(clip=3, step=2, seconds=1.0))
    trace(0, ActionDone(action="DENOISE c3 2:3", start=200.0, end=201.0, waited=0.0))
    assert trace.spans == kept
    assert {step.clip for step in trace.steps} == {8, 9}
