"""Who is blamed, from what was said and when; no process, no clock."""

from __future__ import annotations

import pytest

from svdpp.driver.liveness import Watch
from svdpp.worker.messages import Beat, ClipDone, Finished, Joined, StepDone

JOINED = Joined(device="cpu", load_seconds=0.1)
COMPUTING = Beat(action="DENOISE c0 0:4", step=2)
WAITING = Beat(action="DENOISE c0 4:8", waiting=True)
STEP = StepDone(clip=0, step=1, seconds=1.0)


def _watch(world_size: int = 3, *, joined: bool = True) -> Watch:
    watch = Watch(world_size, 0.0, start_timeout=60, stale=10, timeout=100)
    for rank in range(world_size if joined else 0):
        watch.heard(rank, JOINED, 0.0)
    return watch


def _beat_until(watch: Watch, end: int, beats: dict[int, Beat]) -> None:
    for second in range(end + 1):
        for rank, beat in beats.items():
            watch.heard(rank, beat, float(second))


def test_all_is_well_while_ranks_beat_and_progress() -> None:
    watch = _watch()
    for second in range(300):
        for rank in range(3):
            watch.heard(rank, STEP, float(second))
        assert watch.stall(float(second)) is None


def test_a_frozen_rank_is_named_and_not_its_waiting_neighbour() -> None:
    watch = _watch()
    watch.heard(1, COMPUTING, 1.0)
    _beat_until(watch, 12, {0: WAITING, 2: WAITING})
    stall = watch.stall(12.0)
    assert stall is not None
    assert stall.rank == 1
    assert "frozen for 11 s" in stall.reason
    assert watch.place(1) == COMPUTING


def test_a_slow_rank_that_beats_is_left_alone_until_the_timeout() -> None:
    watch = _watch()
    beats = {0: WAITING, 1: COMPUTING, 2: WAITING}
    _beat_until(watch, 99, beats)
    assert watch.stall(99.0) is None
    _beat_until(watch, 101, beats)
    stall = watch.stall(101.0)
    assert stall is not None
    assert stall.rank == 1
    assert "no progress for 101 s" in stall.reason


def test_idle_ranks_have_no_progress_to_make() -> None:
    watch = _watch()
    _beat_until(watch, 500, dict.fromkeys(range(3), Beat()))
    assert watch.stall(500.0) is None


IDLE_BUT_WRITING = Beat(writing=True)
DELIVERING = Beat(action="DELIVER c3 @8", waiting=True, writing=True)


@pytest.mark.parametrize("last", [IDLE_BUT_WRITING, DELIVERING])
@pytest.mark.parametrize("other", [Beat(), WAITING])
def test_a_rank_whose_disk_hangs_is_named_whatever_the_others_do(other: Beat, last: Beat) -> None:
    watch = _watch()
    beats = {0: other, 1: other, 2: last}
    _beat_until(watch, 100, beats)
    assert watch.stall(100.0) is None
    _beat_until(watch, 101, beats)
    stall = watch.stall(101.0)
    assert stall is not None
    assert (stall.rank, stall.reason) == (2, "has waited for its disk for 101 s")


def test_a_rank_that_writes_clip_after_clip_is_left_alone() -> None:
    watch = _watch()
    for second in range(300):
        for rank, beat in enumerate((Beat(), Beat(), IDLE_BUT_WRITING)):
            watch.heard(rank, beat, float(second))
        if second % 90 == 0:
            watch.heard(2, ClipDone(clip=second, record={}), float(second))
        assert watch.stall(float(second)) is None


def test_when_all_that_are_not_idle_wait_one_of_them_is_named() -> None:
    watch = _watch()
    _beat_until(watch, 101, {0: Beat(), 1: WAITING, 2: WAITING})
    stall = watch.stall(101.0)
    assert stall is not None
    assert stall.rank == 1


def test_when_all_wait_one_is_named_all_the_same() -> None:
    watch = _watch(2)
    _beat_until(watch, 101, {0: WAITING, 1: WAITING})
    assert watch.stall(101.0) is not None


def test_a_rank_that_never_starts_is_named_before_one_that_loads() -> None:
    watch = _watch(joined=False)
    _beat_until(watch, 61, {0: Beat(), 2: Beat()})
    watch.heard(0, JOINED, 61.0)
    stall = watch.stall(61.0)
    assert stall is not None
    assert stall.rank == 1
    assert stall.reason == "never started within 60 s"


def test_a_rank_that_loads_for_too_long_is_named() -> None:
    watch = _watch(joined=False)
    _beat_until(watch, 61, {0: Beat(), 1: Beat(), 2: Beat()})
    watch.heard(0, JOINED, 61.0)
    watch.heard(1, JOINED, 61.0)
    stall = watch.stall(61.0)
    assert stall is not None
    assert (stall.rank, stall.reason) == (2, "did not get ready within 60 s")


def test_the_place_follows_the_steps() -> None:
    watch = _watch()
    watch.heard(1, COMPUTING, 1.0)
    watch.heard(1, StepDone(clip=0, step=2, seconds=0.1), 1.1)
    assert watch.place(1).step == 3
    watch.heard(1, StepDone(clip=0, step=3, seconds=0.1), 1.2)
    assert watch.place(1) == Beat(action="DENOISE c0 0:4", step=3)
    watch.heard(2, STEP, 1.2)
    assert watch.place(2) == Beat()


def test_finished_ranks_may_fall_silent() -> None:
    watch = _watch(2)
    watch.heard(0, Finished(), 1.0)
    _beat_until(watch, 50, {1: COMPUTING})
    assert watch.stall(50.0) is None
    assert not watch.all_finished
    watch.heard(1, Finished(), 51.0)
    assert watch.all_finished


def test_the_time_in_which_the_parent_was_stopped_is_nobodys_fault() -> None:
    watch = _watch()
    beats = {0: WAITING, 1: COMPUTING, 2: WAITING}
    _beat_until(watch, 5, beats)
    assert watch.stall(1000.0) is None
    watch.heard(0, WAITING, 1001.0)
    watch.heard(2, WAITING, 1001.0)
    assert watch.stall(1002.0) is None
    for second in range(1003, 1012):
        watch.heard(0, WAITING, float(second))
        watch.heard(2, WAITING, float(second))
    stall = watch.stall(1012.0)
    assert stall is not None
    assert stall.rank == 1
