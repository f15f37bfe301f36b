"""Which rank counts as stalled, from events and their times; no process, no clock."""

from __future__ import annotations

import pytest

from svdpp.driver.liveness import Liveness
from svdpp.worker.messages import ClipDone, Finished, GpuSample, Heartbeat, Joined, StepDone

JOINED = Joined(device="cpu", load_seconds=0.1)
COMPUTING = Heartbeat(action="DENOISE c0 0:4", step=2)
WAITING = Heartbeat(action="DENOISE c0 4:8", waiting=True)
STEP = StepDone(clip=0, step=1, seconds=1.0)


def _liveness(world_size: int = 3, *, joined: bool = True) -> Liveness:
    liveness = Liveness(world_size, 0.0, start_timeout=60, heartbeat_timeout=10, timeout=100)
    for rank in range(world_size if joined else 0):
        liveness.heard(rank, JOINED, 0.0)
    return liveness


def _heartbeats_until(liveness: Liveness, end: int, heartbeats: dict[int, Heartbeat]) -> None:
    for second in range(end + 1):
        for rank, heartbeat in heartbeats.items():
            liveness.heard(rank, heartbeat, float(second))


def test_all_is_well_while_ranks_beat_and_progress() -> None:
    liveness = _liveness()
    for second in range(300):
        for rank in range(3):
            liveness.heard(rank, STEP, float(second))
        assert liveness.stall(float(second)) is None


def test_a_frozen_rank_is_named_and_not_its_waiting_neighbour() -> None:
    liveness = _liveness()
    liveness.heard(1, COMPUTING, 1.0)
    _heartbeats_until(liveness, 12, {0: WAITING, 2: WAITING})
    stall = liveness.stall(12.0)
    assert stall is not None
    assert stall.rank == 1
    assert stall.reason == "has sent no heartbeat for 11 s"
    assert liveness.position(1) == COMPUTING


def test_a_slow_rank_that_beats_is_left_alone_until_the_timeout() -> None:
    liveness = _liveness()
    heartbeats = {0: WAITING, 1: COMPUTING, 2: WAITING}
    _heartbeats_until(liveness, 99, heartbeats)
    assert liveness.stall(99.0) is None
    _heartbeats_until(liveness, 101, heartbeats)
    stall = liveness.stall(101.0)
    assert stall is not None
    assert stall.rank == 1
    assert "no progress for 101 s" in stall.reason


def test_samples_of_a_gpu_are_no_sign_of_life() -> None:
    liveness = _liveness()
    for second in range(12):
        for rank in (0, 2):
            liveness.heard(rank, COMPUTING, float(second))
        liveness.heard(1, GpuSample(when=float(second)), float(second))
    stall = liveness.stall(12.0)
    assert stall is not None
    assert (stall.rank, stall.silent) == (1, True)


def test_a_rank_that_waited_long_has_all_its_time_once_it_begins() -> None:
    """Its neighbour has sent its packet and is idle before the rank says that it computes."""
    liveness = _liveness(2)
    sent = 400
    for second in range(sent + 104):
        if second < sent:
            liveness.heard(0, STEP, float(second))
        liveness.heard(0, COMPUTING if second < sent else Heartbeat(), float(second))
        liveness.heard(1, WAITING if second < sent + 2 else COMPUTING, float(second))
        stall = liveness.stall(float(second))
        assert (stall is None) == (second <= sent + 102), second
    assert stall is not None
    assert "no progress for 101 s" in stall.reason


def test_idle_ranks_have_no_progress_to_make() -> None:
    liveness = _liveness()
    _heartbeats_until(liveness, 500, dict.fromkeys(range(3), Heartbeat()))
    assert liveness.stall(500.0) is None


IDLE_BUT_WRITING = Heartbeat(writing=True)
DELIVERING = Heartbeat(action="FINISH c3 @8", waiting=True, writing=True)


@pytest.mark.parametrize("last", [IDLE_BUT_WRITING, DELIVERING])
@pytest.mark.parametrize("other", [Heartbeat(), WAITING])
def test_a_rank_whose_disk_hangs_is_named_whatever_the_others_do(
    other: Heartbeat, last: Heartbeat
) -> None:
    liveness = _liveness()
    heartbeats = {0: other, 1: other, 2: last}
    _heartbeats_until(liveness, 100, heartbeats)
    assert liveness.stall(100.0) is None
    _heartbeats_until(liveness, 101, heartbeats)
    stall = liveness.stall(101.0)
    assert stall is not None
    assert (stall.rank, stall.reason) == (2, "has waited for its disk for 101 s")


def test_a_rank_that_writes_clip_after_clip_is_left_alone() -> None:
    liveness = _liveness()
    for second in range(300):
        for rank, heartbeat in enumerate((Heartbeat(), Heartbeat(), IDLE_BUT_WRITING)):
            liveness.heard(rank, heartbeat, float(second))
        if second % 90 == 0:
            liveness.heard(2, ClipDone(clip=second, metadata={}), float(second))
        assert liveness.stall(float(second)) is None


def test_when_all_that_are_not_idle_wait_one_of_them_is_named() -> None:
    liveness = _liveness()
    _heartbeats_until(liveness, 101, {0: Heartbeat(), 1: WAITING, 2: WAITING})
    stall = liveness.stall(101.0)
    assert stall is not None
    assert stall.rank == 1


def test_when_all_wait_one_is_named_all_the_same() -> None:
    liveness = _liveness(2)
    _heartbeats_until(liveness, 101, {0: WAITING, 1: WAITING})
    assert liveness.stall(101.0) is not None


def test_a_rank_that_never_starts_is_named_before_one_that_loads() -> None:
    liveness = _liveness(joined=False)
    _heartbeats_until(liveness, 61, {0: Heartbeat(), 2: Heartbeat()})
    liveness.heard(0, JOINED, 61.0)
    stall = liveness.stall(61.0)
    assert stall is not None
    assert stall.rank == 1
    assert stall.reason == "never started within 60 s"


def test_a_rank_that_loads_for_too_long_is_named() -> None:
    liveness = _liveness(joined=False)
    _heartbeats_until(liveness, 61, {0: Heartbeat(), 1: Heartbeat(), 2: Heartbeat()})
    liveness.heard(0, JOINED, 61.0)
    liveness.heard(1, JOINED, 61.0)
    stall = liveness.stall(61.0)
    assert stall is not None
    assert (stall.rank, stall.reason) == (2, "did not get ready within 60 s")


def test_a_rank_that_freezes_before_it_has_joined_is_named_and_not_those_that_wait_for_it() -> None:
    liveness = Liveness(2, 0.0, start_timeout=600, heartbeat_timeout=10, timeout=100)
    liveness.heard(1, Heartbeat(phase="opening its link with rank 0", peer=0), 0.0)
    opening = Heartbeat(phase="opening its link with rank 1", peer=1)
    _heartbeats_until(liveness, 80, {0: opening})
    assert liveness.stall(80.0) is None
    _heartbeats_until(liveness, 81, {0: opening})
    stall = liveness.stall(81.0)
    assert stall is not None
    assert (stall.rank, stall.reason) == (1, "has sent no heartbeat for 81 s")


def test_a_rank_may_be_silent_for_longer_before_it_has_joined() -> None:
    """CUDA's initialisation may hold the GIL for long."""
    liveness = _liveness(joined=False)
    liveness.heard(2, Heartbeat(), 0.0)
    _heartbeats_until(liveness, 59, {0: Heartbeat(), 1: Heartbeat()})
    assert liveness.stall(59.0) is None
    liveness.heard(0, JOINED, 59.0)
    liveness.heard(1, JOINED, 59.0)
    stall = liveness.stall(61.0)
    assert stall is not None
    assert stall.rank == 2
    assert stall.reason.startswith("did not get ready within 60 s")


def test_a_link_that_does_not_open_is_named_with_both_ends() -> None:
    liveness = _liveness(joined=False)
    opening = {
        0: Heartbeat(phase="opening its link with rank 1", peer=1),
        1: Heartbeat(phase="opening its link with rank 0", peer=0),
    }
    _heartbeats_until(liveness, 61, opening)
    liveness.heard(2, JOINED, 61.0)
    stall = liveness.stall(61.0)
    assert stall is not None
    assert stall.rank == 0
    assert stall.reason == "did not finish opening its link with rank 1 within 60 s"
    assert "NCCL_P2P_DISABLE=1" in stall.hint
    assert "PIPELINE_BACKEND=gloo" in stall.hint


def test_a_rank_that_still_loads_is_named_before_those_that_wait_for_its_link() -> None:
    liveness = _liveness(joined=False)
    heartbeats = {
        0: Heartbeat(phase="opening its link with rank 1", peer=1),
        1: Heartbeat(phase="loading the model"),
        2: Heartbeat(phase="opening its link with rank 1", peer=1),
    }
    _heartbeats_until(liveness, 61, heartbeats)
    stall = liveness.stall(61.0)
    assert stall is not None
    assert (stall.rank, stall.reason) == (
        1,
        "did not get ready within 60 s (loading the model)",
    )


def test_the_place_follows_the_steps() -> None:
    liveness = _liveness()
    liveness.heard(1, COMPUTING, 1.0)
    liveness.heard(1, StepDone(clip=0, step=2, seconds=0.1), 1.1)
    assert liveness.position(1).step == 3
    liveness.heard(1, StepDone(clip=0, step=3, seconds=0.1), 1.2)
    assert liveness.position(1) == Heartbeat(action="DENOISE c0 0:4", step=3)
    liveness.heard(2, STEP, 1.2)
    assert liveness.position(2) == Heartbeat()


def test_finished_ranks_may_fall_silent() -> None:
    liveness = _liveness(2)
    liveness.heard(0, Finished(), 1.0)
    _heartbeats_until(liveness, 50, {1: COMPUTING})
    assert liveness.stall(50.0) is None
    assert not liveness.all_finished
    liveness.heard(1, Finished(), 51.0)
    assert liveness.all_finished


def test_the_time_in_which_the_parent_was_stopped_is_nobodys_fault() -> None:
    liveness = _liveness()
    heartbeats = {0: WAITING, 1: COMPUTING, 2: WAITING}
    _heartbeats_until(liveness, 5, heartbeats)
    assert liveness.stall(1000.0) is None
    liveness.heard(0, WAITING, 1001.0)
    liveness.heard(2, WAITING, 1001.0)
    assert liveness.stall(1002.0) is None
    for second in range(1003, 1012):
        liveness.heard(0, WAITING, float(second))
        liveness.heard(2, WAITING, float(second))
    stall = liveness.stall(1012.0)
    assert stall is not None
    assert stall.rank == 1
