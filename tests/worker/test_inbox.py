"""Actions come in order, cancellations at once, and the inbox keeps neither for ever."""

from __future__ import annotations

import multiprocessing

import pytest

from svdpp.config import SAMPLING_CLASSES, ClipRequest, own_params
from svdpp.launch.group import PipeChannel
from svdpp.worker.messages import Cancel, ClipJob, Stop, Work, parse_command
from svdpp.worker.rank import Inbox


def _work(clip: int) -> Work:
    return Work(actions=(f"ENCODE c{clip} @0", f"FINISH c{clip} @0"), jobs=())


def test_cancellations_are_taken_between_steps_and_forgotten_with_their_clips() -> None:
    ours, theirs = multiprocessing.Pipe()
    parent, inbox = PipeChannel(ours), Inbox(PipeChannel(theirs))
    expected: list[Work] = []
    rests: list[int] = []
    actions = inbox.actions(expected.append, lambda: rests.append(len(expected)))
    for command in (_work(0), _work(1)):
        parent.send(command.to_bytes())
    assert str(next(actions)) == "ENCODE c0 @0"
    assert expected == [_work(0), _work(1)]
    for cancelled in (0, 1, 7):
        parent.send(Cancel(clip=cancelled).to_bytes())
    assert inbox.is_cancelled(0)
    assert str(next(actions)) == "FINISH c0 @0"
    assert inbox.is_cancelled(0)
    assert str(next(actions)) == "ENCODE c1 @0"
    assert not inbox.is_cancelled(0)
    assert inbox.is_cancelled(1)
    assert not inbox.is_cancelled(7)
    assert str(next(actions)) == "FINISH c1 @0"
    assert rests == []
    for last in (_work(2), Cancel(clip=1), Stop()):
        parent.send(last.to_bytes())
    assert [str(action) for action in actions] == ["ENCODE c2 @0", "FINISH c2 @0"]
    assert rests == [3]
    for late in (Cancel(clip=2), Stop()):
        parent.send(late.to_bytes())
    inbox.wait_for_stop()
    assert not theirs.poll()
    assert not any(map(inbox.is_cancelled, range(8)))


@pytest.mark.parametrize("family", SAMPLING_CLASSES)
def test_a_clips_parameters_reach_the_ranks_whole(family: str) -> None:
    kind = SAMPLING_CLASSES[family]
    own = dict.fromkeys(own_params(kind), 1)
    own |= {"guidance_scale_2": 3.0, "flow_shift": 5.0} if family == "wan" else {}
    sampling = kind(**own, num_inference_steps=7)
    request = ClipRequest(seed=0, sampling=sampling)
    work = Work(actions=(), jobs=(ClipJob(clip=0, request=request),))
    back = parse_command(work.to_bytes())
    assert isinstance(back, Work)
    each = back.jobs[0].request.sampling
    assert each == sampling
    assert type(each) is type(sampling)
