"""Faults of a rank: it raises, is killed, stopped, slow or interrupted, or never starts.

Most tests run a pipeline in this process, whose fork server starts ranks quickly. Commands use the
same pipeline, and end with the error that it raises.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import util
from pathlib import Path

import pytest

from svdpp.config import ClipRequest, ModelConfig, ParallelConfig, PipelineConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import OutOfMemoryError, RankError
from svdpp.plan.costs import CostModel
from svdpp.worker.messages import ClipDone, Event, Heartbeat
from svdpp.worker.tensor_files import saved_steps
from tests.faults.conftest import NUM_FRAMES, RUN, WORLD_SIZE, StartCommand
from tests.support.damage import TOO_MUCH, Damage
from tests.support.processes import allowing_for_others, is_there, ranks_below, wait_until
from tests.support.shell import PHOTO

pytestmark = [pytest.mark.slow, pytest.mark.timing]

DUMMY = PipelineConfig(
    world_size=WORLD_SIZE,
    model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
    sampling=SvdSampling(num_inference_steps=6),
)
DEMO = replace(
    DUMMY,
    model=ModelConfig(name="demo"),
    sampling=SvdSampling(
        num_inference_steps=3, num_frames=NUM_FRAMES, height=64, width=64, max_guidance_scale=1.1
    ),
)
FIRST, MIDDLE, LAST = range(WORLD_SIZE)


@pytest.fixture(scope="module", autouse=True)
def _warm_fork_server() -> None:
    """Start the fork server first, so that its imports do not delay the start of ranks."""
    with Pipeline(replace(DEMO, world_size=1)):
        pass


@pytest.fixture
def temporary_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Temporary folder of a test and its ranks. Check after the test that nothing is left."""
    ranks_before, before = set(_ranks().values()), _temporary_names()
    with monkeypatch.context() as patches:  # undone before the checks below
        patches.setattr(tempfile, "tempdir", str(home))
        yield home
    assert set(_ranks().values()) <= ranks_before
    left = {path.name for path in home.iterdir()} - {"gate", "out"}
    assert not left, left
    assert _temporary_names() <= before


def _ranks() -> dict[int, int]:
    """Return the process ids of the ranks that this process has started, by rank."""
    return ranks_below(_folder_of_runs())


def _folder_of_runs() -> Path:
    """Return the folder in which each run has a subfolder for its store and its ranks' output."""
    return Path(util.get_temp_dir())


def _temporary_names() -> set[str]:
    return {*os.listdir(os.environ["TMPDIR"]), *os.listdir(_folder_of_runs())}


def _clips(image: str | None = None) -> list[ClipRequest]:
    return [ClipRequest(seed=seed, image=image) for seed in range(3)]


def _is_at(stop: Damage, rank: int, event: Event) -> bool:
    """Return whether an event shows that the faulty rank has reached the place of its fault."""
    if not isinstance(event, Heartbeat) or stop.place == "start":
        return isinstance(event, Heartbeat)  # another rank's, because a rank at "start" sends none
    if rank != stop.rank:
        return False
    action = str(event.action)
    if stop.place.startswith("step"):
        at_clip = action.startswith(f"DENOISE c{stop.clip} ")
        return at_clip and event.step == int(stop.place.removeprefix("step"))
    return stop.place == "load" or action.startswith(f"{stop.place.upper()} c{stop.clip}")


DECODING = replace(
    DUMMY,
    model=replace(DUMMY.model, dummy_sleeps=True, dummy_latent_shape=(1, 4, 3, 8, 8)),
    sampling=replace(DUMMY.sampling, decode_chunk_size=1),
    costs=CostModel(step_seconds=0.005, decode_seconds=0.03),
    parallel=ParallelConfig(decode_parallel_size=WORLD_SIZE),
)
PAIRS = replace(
    DECODING, world_size=4, parallel=ParallelConfig(cfg_parallel_size=2, decode_parallel_size=2)
)
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP
STRUCK = [
    *((DEMO, MIDDLE, "start", KILLED), (DEMO, LAST, "load", KILLED)),
    *((DEMO, FIRST, "step0", KILLED), (DUMMY, FIRST, "step0", STOPPED)),
    (DUMMY, MIDDLE, "step2", signal.SIGINT),
    *((PAIRS, 1, "step2", KILLED), (PAIRS, 3, "step5", STOPPED)),
    *((DECODING, FIRST, "decode", KILLED), (DECODING, LAST, "decode", STOPPED)),
]
OTHERS_STRUCK = [
    *((DEMO, rank, place, KILLED) for rank in (FIRST, LAST) for place in ("start", "load")),
    *((DEMO, MIDDLE, place, KILLED) for place in ("load", "step1")),
    *((DEMO, LAST, place, KILLED) for place in ("step2", "decode")),
    (DUMMY, MIDDLE, "step2", STOPPED),
    *((PAIRS, rank, place, KILLED) for rank, place in ((0, "step0"), (2, "step3"), (3, "step5"))),
    *((PAIRS, rank, place, STOPPED) for rank, place in ((0, "step0"), (1, "step2"), (2, "step3"))),
    *((DECODING, rank, "decode", KILLED) for rank in (MIDDLE, LAST)),
    *((DECODING, rank, "decode", STOPPED) for rank in (FIRST, MIDDLE)),
]


@pytest.mark.parametrize(
    ("config", "rank", "place", "number"),
    [*STRUCK, *(pytest.param(*case, marks=pytest.mark.full) for case in OTHERS_STRUCK)],
)
@pytest.mark.usefixtures("temporary_files")
def test_a_rank_is_named_and_no_other(
    config: PipelineConfig, rank: int, place: str, number: signal.Signals
) -> None:
    """The error names the rank that was killed or stopped, and no rank that waits for it.

    The neighbours of that rank wait for it. The other rank of the same pair, or ranks that share
    the decode, may wait too.
    """
    stop, limit, bound = Damage("hang", rank, 1, place=place), 0.0, 4
    if number is STOPPED:
        limit, bound = allowing_for_others(2.5), 5
        config = replace(config, heartbeat_timeout_seconds=limit)
    pids: dict[int, int] = {}
    struck_at: list[float] = []

    def strike(of_rank: int, event: Event) -> None:
        if not struck_at and _is_at(stop, of_rank, event):
            wait_until(lambda: len(_ranks()) == config.world_size, 60, "ranks")
            pids.update(_ranks())
            struck_at.append(time.monotonic())
            os.kill(pids[rank], number)

    pipeline = Pipeline(config, fault=stop)
    pipeline.observe(strike)
    with pytest.raises(RankError) as caught, pipeline:
        pipeline.run(_clips(PHOTO if config.model == DEMO.model else None))
    error = caught.value
    assert time.monotonic() - struck_at[0] <= limit + allowing_for_others(bound)
    assert not any(map(is_there, pids.values()))
    how = "has sent no heartbeat for" if number is STOPPED else f"was killed by {number.name}"
    assert re.match(rf"rank {rank} \(cpu of .*\) {how}", error.message)
    assert error.exit_code == 6
    if number is KILLED:
        assert "memory" in error.hint
    if place.startswith("step"):
        assert f"at clip 1, step {place.removeprefix('step')} (DENOISE c1 " in error.message
    if place == "decode":
        assert "at clip 1 (DECODE c1 @" in error.message


@pytest.mark.parametrize(
    "attempt", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(1, 20))]
)
def test_clips_survive_what_happens_to_pairs(temporary_files: Path, attempt: int) -> None:
    """All clips are made, although a rank of a pair is killed, stopped or interrupted at a random
    time.

    A run with another layout makes the missing clips.
    """
    dice = random.Random(attempt)
    left = dice.randrange(10, 150)
    rank, number = dice.randrange(4), dice.choice((KILLED, STOPPED, signal.SIGINT))
    latents = temporary_files / "out"
    latents.mkdir()
    requests = [replace(each, latents_key=f"{each.seed:064x}") for each in _clips()]
    found: dict[int, str] = {}
    struck: list[int] = []

    def see(_: int, event: Event) -> None:
        nonlocal left
        left -= 1
        if isinstance(event, ClipDone):
            found[event.clip] = event.metadata["latents_sha256"]
        if left < 0 and not struck and len(_ranks()) == PAIRS.world_size:
            struck.append(rank)
            with contextlib.suppress(ProcessLookupError):
                os.kill(_ranks()[rank], number)

    config = replace(PAIRS, heartbeat_timeout_seconds=allowing_for_others(2.5))
    pipeline = Pipeline(config, latents_folder=str(latents))
    pipeline.observe(see)
    with contextlib.suppress(RankError), pipeline:
        pipeline.run(requests)
    error = pipeline.run_error
    assert error is None or (struck and f"rank {rank} " in str(error)), error
    rest = [clip for clip in range(len(requests)) if clip not in found]
    begun = [clip for clip in rest if saved_steps(latents, f"{clip:064x}")]
    again = [replace(requests[clip], done_steps=3 * (clip in begun)) for clip in rest]
    with Pipeline(dice.choice((DECODING, PAIRS)), latents_folder=str(latents)) as other:
        for clip, result in zip(rest, other.run(again), strict=True):
            found[clip] = result.metadata["latents_sha256"]
    assert [found[clip] for clip in range(len(requests))] == _of_one_rank()
    latents.rmdir()


@functools.cache
def _of_one_rank() -> list[str]:
    with Pipeline(
        replace(DECODING, world_size=1, parallel=ParallelConfig(decode_parallel_size=1))
    ) as alone:
        return [result.metadata["latents_sha256"] for result in alone.run(_clips())]


@pytest.mark.usefixtures("temporary_files")
def test_a_rank_frozen_at_the_very_end_is_named() -> None:
    """A rank that is stopped after all clips are done, when it only has to report its end, is
    named.
    """
    config = replace(DUMMY, heartbeat_timeout_seconds=allowing_for_others(2.5))
    with pytest.raises(RankError) as caught, Pipeline(config) as pipeline:
        pipeline.run(_clips())
        os.kill(_ranks()[MIDDLE], signal.SIGSTOP)
        begun = time.monotonic()
    assert time.monotonic() - begun <= config.heartbeat_timeout_seconds + allowing_for_others(5)
    assert re.match(r"rank 1 \(cpu of .*\) has sent no heartbeat for", caught.value.message)


def test_a_slow_rank_is_waited_for(temporary_files: Path) -> None:
    """A rank whose step takes over three times the heartbeat timeout does not count as dead."""
    gate, heartbeat_timeout = temporary_files / "gate", allowing_for_others(2.0)
    stop = Damage("hang", MIDDLE, 1, place="step2", until=str(gate))
    heartbeats: list[float] = []

    def release(rank: int, event: Event) -> None:
        if rank == MIDDLE and isinstance(event, Heartbeat) and event.step == 2:
            heartbeats.append(time.monotonic())
            if heartbeats[-1] - heartbeats[0] > 3 * heartbeat_timeout:
                gate.touch()

    pipeline = Pipeline(replace(DUMMY, heartbeat_timeout_seconds=heartbeat_timeout), fault=stop)
    pipeline.observe(release)
    with pipeline:
        results = pipeline.run(_clips())
    assert heartbeats[-1] - heartbeats[0] > 3 * heartbeat_timeout
    assert [result.clip for result in results] == [0, 1, 2]


@pytest.mark.parametrize(("place", "part"), [("load", "loading the model"), ("step2", "step")])
@pytest.mark.usefixtures("temporary_files")
def test_a_lack_of_memory_says_what_was_requested_and_free(place: str, part: str) -> None:
    damage = Damage("memory", MIDDLE, 1, place=place)
    with (
        pytest.raises(OutOfMemoryError, match=part) as caught,
        Pipeline(DUMMY, fault=damage) as own,
    ):
        own.run(_clips())
    details = caught.value.details
    assert details["requested_bytes"] == TOO_MUCH
    assert 2**20 < details["free_bytes"] < TOO_MUCH
    assert (details["device"], details["rank"]) == ("cpu", MIDDLE)
    assert caught.value.exit_code == 4


@pytest.mark.usefixtures("temporary_files")
def test_a_rank_that_never_starts() -> None:
    rank, limit = LAST, 2.0
    config = replace(DUMMY, start_timeout_seconds=limit)
    begun = time.monotonic()
    with pytest.raises(RankError) as caught:
        Pipeline(config, fault=Damage("hang", rank, 0, place="start")).__enter__()
    assert time.monotonic() - begun <= limit + allowing_for_others(2)
    assert re.match(rf"rank {rank} \(cpu of .*\) never started within 2 s", caught.value.message)
    assert "`start_timeout_seconds`" in caught.value.hint


@pytest.mark.full
def test_a_rank_killed_while_it_writes_an_mp4(start: StartCommand, home: Path) -> None:
    """After a kill of a rank during the writing of an mp4, only complete files are left."""
    command = start(*RUN, str(home / "out"), out=home / "out", plan={})
    writing = command.process_with("libx264")
    os.kill(writing, signal.SIGSTOP)
    fault = time.monotonic()
    os.kill(ranks_below(command.home)[LAST], signal.SIGKILL)
    os.kill(writing, signal.SIGCONT)
    assert command.end(fault, 4) == 6
    assert "error: rank 2 " in command.errors
    assert "was killed by SIGKILL" in command.errors
    assert "memory" in command.errors


@pytest.mark.full
def test_a_rank_that_raises(start: StartCommand, home: Path) -> None:
    """A rank that raises an error at the second clip ends the command, and the first clip stays."""
    gate = home / "gate"
    stop = {"kind": "raise", "rank": MIDDLE, "clip": 1, "place": "step1", "until": str(gate)}
    command = start(*RUN, str(home / "out"), "--debug", out=home / "out", plan={"stop": stop})
    command.event(kind="ClipDone", clip=0)
    fault = time.monotonic()
    gate.touch()
    assert command.end(fault, 6) == 6
    place = r"rank 1 \(cpu of .*\) failed at clip 1, step 1 \(DENOISE c1 1:2\): .*injected fault"
    assert re.search(place, command.errors.replace("\n", " "))
    assert "in reach" in command.errors, "the rank's own traceback"
    assert "<-- rank 1 failed here" in command.errors
    assert (home / "out" / "rocket_0.mp4").exists()
