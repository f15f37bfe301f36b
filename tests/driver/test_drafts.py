"""Drafts by real ranks: the exact clip bit for bit, every rank's result, and failures."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.config import (
    ClipRequest,
    DraftConfig,
    LatentSpec,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    SvdSampling,
)
from svdpp.diagnostics.draft_sweep import DraftSimulator
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import NotFiniteError, RequestError
from svdpp.media.distance import distance
from svdpp.media.examples import example_photos
from svdpp.media.video import frames_sha256, read_frames
from svdpp.models.base import LATENTS
from svdpp.models.dummy import DummyModel
from svdpp.plan.actions import Kind
from svdpp.plan.draft_starts import default_start_steps
from svdpp.verification.verify import compare, run_pipelined, run_sequential, verify
from svdpp.worker.messages import ClipFailed, DraftDone, DraftLost, Event
from svdpp.worker.tensor_store import TensorStore, tensor_sha256
from tests.faults.damage import Damage
from tests.faults.stops import InjectedStop
from tests.models.builders import save_tiny_checkpoint

SHAPE = (1, 4, 2, 8, 8)
STARTS = {2: (0, 14), 4: (0, 8, 12, 17), 7: (0, 6, 9, 12, 15, 18, 21)}


def _dummy(start_steps: tuple[int, ...], num_steps: int = 28) -> PipelineConfig:
    return PipelineConfig(
        world_size=len(start_steps),
        model=ModelConfig(name="dummy", dummy_latent_shape=SHAPE),
        sampling=SvdSampling(num_inference_steps=num_steps),
        draft=DraftConfig(start_steps=start_steps),
    )


def _svd(
    model: str, start_steps: tuple[int, ...], num_steps: int, *, accept_psnr_db: float | None = None
) -> PipelineConfig:
    sampling = SvdSampling(
        num_inference_steps=num_steps, height=64, width=64, num_frames=2, max_guidance_scale=1.1
    )
    return PipelineConfig(
        world_size=len(start_steps),
        model=ModelConfig(name=model),
        sampling=sampling,
        draft=DraftConfig(start_steps=start_steps, accept_psnr_db=accept_psnr_db),
    )


def _request(folder: Path | None = None, *, photo: int = 0) -> ClipRequest:
    image = example_photos()[photo]
    output = None if folder is None else OutputConfig(path=str(folder / f"{image.stem}_0.mp4"))
    return ClipRequest(seed=0, image=str(image), output=output)


class _Heard:
    """Collects events."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.events: list[tuple[int, Event]] = []
        pipeline.observe(lambda rank, event: self.events.append((rank, event)))

    def of(self, kind: type) -> list[tuple[int, Any]]:
        return [(rank, event) for rank, event in self.events if isinstance(event, kind)]


@pytest.mark.processes
@pytest.mark.parametrize("world_size", STARTS)
def test_ranks_do_what_the_plan_counts(world_size: int, tmp_path: Path) -> None:
    """Rounds, evaluations and messages; and each rank gets the result of a single process."""
    config = _dummy(STARTS[world_size])
    draft_plan, seeds = config.draft_plan, [3, 4]
    pipeline = Pipeline(config, tensor_folder=str(tmp_path))
    with pipeline:
        results = pipeline.run([ClipRequest(seed=seed) for seed in seeds])
    trace = pipeline.trace

    steps = Counter((step.rank, step.clip) for step in trace.steps)
    for rank, start in enumerate(draft_plan.start_steps):
        assert [steps[rank, clip] for clip in (0, 1)] == [draft_plan.num_steps - start] * 2
        assert steps[rank, 0] + rank == draft_plan.rounds(rank)
    assert len(trace.steps) == 2 * draft_plan.num_evaluations
    for direction in ("send", "recv"):
        transfers = [transfer for transfer in trace.transfers if transfer.direction == direction]
        assert len(transfers) == 2 * draft_plan.num_messages
    kept = TensorStore(tmp_path)
    for clip, seed in enumerate(seeds):
        lab = _lab(config, seed)
        for rank in range(world_size):
            alone = lab.latent(draft_plan.start_steps[: rank + 1])
            assert torch.equal(kept.latent(clip, draft_plan.num_steps, draft_rank=rank), alone)
        record = results[clip].metadata
        assert record["exact"] is True
        assert record["latents_sha256"] == tensor_sha256(lab.latent((0,)))
        assert [each["rank"] for each in record["draft"]["results"]] == list(
            range(world_size - 1, 0, -1)
        )


def _lab(config: PipelineConfig, seed: int) -> DraftSimulator:
    num_steps = config.sampling.num_inference_steps
    spec = LatentSpec(shape=SHAPE, dtype="fp32", dims="BCFHW")
    model = DummyModel(spec, num_steps, torch.device("cpu"))
    torch.set_num_threads(config.num_threads)
    return DraftSimulator(model, model.encode({}, ClipRequest(seed=seed)), num_steps)


@pytest.mark.processes
def test_the_exact_clip_is_diffusers_own() -> None:
    config = _svd("demo", (0, 3, 5), 8)
    verdict = verify(config, [_request(), _request(photo=1)])
    assert verdict.bitwise, verdict.first_difference
    # For two clips: after each of rank 0's ranges, at the end, and the frames.
    assert [check.step for check in verdict.checks] == [1, 4, 8, 8] * 2
    drafts = [(each.clip, each.rank, each.start, each.rounds) for each in verdict.drafts]
    assert drafts == [(0, 2, 5, 5), (0, 1, 3, 6), (1, 2, 5, 5), (1, 1, 3, 6)]
    assert all(each.frames and each.frames.whole.psnr_db > 40 for each in verdict.drafts)


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize(
    ("world_size", "num_steps"),
    [
        *((2, 14), (7, 28)),
        *(
            pytest.param(*counts, marks=pytest.mark.full)
            for counts in ((2, 25), (2, 28), (4, 14), (4, 25), (4, 28), (7, 14), (7, 25))
        ),
    ],
)
def test_the_exact_clip_whatever_the_wave(world_size: int, num_steps: int) -> None:
    config = _svd("demo", default_start_steps(num_steps, world_size), num_steps)
    verdict = verify(config, [_request()])
    assert verdict.bitwise, verdict.first_difference
    assert len(verdict.drafts) == world_size - 1


@pytest.mark.processes
@pytest.mark.long
@pytest.mark.parametrize("dtype", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_the_exact_clip_of_another_checkpoint(dtype: str, tmp_path: Path) -> None:
    folder = save_tiny_checkpoint(tmp_path / "model")
    config = _svd(str(folder), (0, 2, 4, 5), 7)
    config = replace(config, model=replace(config.model, dtype=dtype))  # type: ignore[arg-type]
    verdict = verify(config, [_request()])
    assert verdict.bitwise, verdict.first_difference


@pytest.mark.processes
def test_a_planted_ulp_is_found_where_it_is(tmp_path: Path) -> None:
    config = _dummy((0, 3, 5), 8)
    requests = [ClipRequest(seed=0), ClipRequest(seed=1)]
    run_pipelined(config, requests, tmp_path, fault=Damage("ulp", 0, 1))
    run_sequential(config, requests, tmp_path)
    verdict = compare(config, 2, tmp_path)
    assert not verdict.equal
    first = verdict.first_difference
    assert first is not None
    assert (first.clip, first.rank, first.step, first.max_ulp) == (1, 0, 1, 1)


@pytest.mark.processes
def test_the_draft_comes_first_and_the_exact_clip_takes_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    config, request = _svd("demo", (0, 9), 12), _request(folder)
    seen: dict[str, Any] = {}
    looked = tmp_path / "looked"

    def look(rank: int, event: Event) -> None:  # noqa: ARG001
        if isinstance(event, DraftDone):
            seen["record"] = event.metadata
            seen["frames"] = read_frames(folder / event.metadata["output"], "mp4")
            names = (path.name for path in folder.iterdir())
            seen["files"] = sorted(name for name in names if not name.startswith("."))
            looked.touch()

    # The exact clip waits for the look.
    pipeline = Pipeline(config, fault=InjectedStop("hang", 0, 0, place="step11", until=str(looked)))
    pipeline.observe(look)
    record = {"output": "astronaut_0.mp4"}
    with pipeline:
        result = pipeline.run([request], [record])[0].metadata

    assert seen["files"] == ["astronaut_0.draft.mp4", "astronaut_0.draft.mp4.json"]
    assert seen["record"]["exact"] is False
    assert len(seen["frames"]) == 2
    about = seen["record"]["draft"]
    assert (about["rank"], about["rounds"], about["start_steps"]) == (1, 4, [0, 9])
    assert sorted(path.name for path in folder.iterdir()) == [
        "astronaut_0.mp4",
        "astronaut_0.mp4.json",
    ]
    written = json.loads((folder / "astronaut_0.mp4.json").read_text())
    assert written == result
    assert written["exact"] is True
    (draft,) = written["draft"]["results"]
    assert draft["max_levels"] >= 1
    assert 20 < draft["psnr_db"] < 90
    assert [set(each) for each in draft["frames"]] == [{"psnr_db", "max_levels"}] * 2
    assert seen["record"]["frames_sha256"] != written["frames_sha256"]


@pytest.mark.processes
@pytest.mark.long
def test_distances_in_the_record_are_those_of_the_frames(tmp_path: Path) -> None:
    config = _svd("demo", (0, 3, 5), 8)
    with Pipeline(config, tensor_folder=str(tmp_path)) as pipeline:
        record = pipeline.run([_request()])[0].metadata
    kept = TensorStore(tmp_path)
    exact = kept.frames(0, draft_rank=0)
    assert frames_sha256(exact) == record["frames_sha256"]
    for each in record["draft"]["results"]:
        apart = distance(kept.frames(0, draft_rank=each["rank"]), exact)
        told = {name: each[name] for name in ("psnr_db", "max_levels", "frames")}
        assert apart.to_json() == told
        latent = kept.latent(0, 8, draft_rank=each["rank"])
        difference = (latent.double() - kept.latent(0, 8, draft_rank=0).double()).abs().max()
        assert each["latent_max_abs_diff"] == float(difference)


@pytest.mark.processes
def test_an_accepted_draft_ends_the_clip_and_never_calls_itself_exact(tmp_path: Path) -> None:
    """Ranks 3 and 2 agree at any PSNR above 1 dB, so the remaining steps are skipped."""
    config = _svd("demo", (0, 30, 34, 37), 40, accept_psnr_db=1.0)
    requests = [_request(tmp_path), _request(tmp_path, photo=1)]
    outputs = [each.output for each in requests]
    records = [{"output": Path(each.path).name} for each in outputs if each]
    gate = tmp_path / "gate"
    stop = InjectedStop("hang", 0, 0, place="step20", until=str(gate))
    with Pipeline(config, fault=stop) as pipeline:
        pipeline.submit(requests, records)
        results = [next(pipeline.results())]
        gate.touch()
        results += pipeline.results()
    gate.unlink()
    for result in results:
        assert result.metadata["exact"] is False
        about = result.metadata["draft"]
        assert (about["rank"], about["accept_psnr_db"]) == (2, 1.0)
        assert about["agreement"]["with_rank"] == 3
        assert about["agreement"]["max_levels"] >= 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("astronaut_0.draft.mp4", "astronaut_0.draft.mp4.json"),
        *("chelsea_0.draft.mp4", "chelsea_0.draft.mp4.json"),
    ]
    done = Counter(step.rank for step in pipeline.trace.steps)
    assert done[0] <= 20 + 40
    assert done[3] == 2 * 3


@pytest.mark.processes
def test_no_agreement_ends_in_the_exact_clip() -> None:
    config = _svd("demo", (0, 3, 5), 8, accept_psnr_db=200.0)
    with Pipeline(config) as pipeline:
        record = pipeline.run([_request()])[0].metadata
    assert record["exact"] is True


@pytest.mark.processes
@pytest.mark.parametrize("victim", [1, 2, 3])
def test_a_walk_that_comes_to_harm_costs_drafts_and_not_the_clip(victim: int) -> None:
    config = _dummy((0, 3, 5, 7), 10)
    pipeline = Pipeline(config, fault=Damage("nan", victim, 0))
    heard = _Heard(pipeline)
    with pipeline:
        results = pipeline.run([ClipRequest(seed=0), ClipRequest(seed=1)])

    assert results[0].metadata["latents_sha256"] == tensor_sha256(_lab(config, 0).latent((0,)))
    ranks = [[each["rank"] for each in r.metadata["draft"]["results"]] for r in results]
    # The ranks that depend on it lose the clip too; the ranks before it do not.
    assert ranks == [list(range(victim - 1, 0, -1)), [3, 2, 1]]
    (lost,) = heard.of(DraftLost)
    assert (lost[0], lost[1].clip) == (victim, 0)
    assert "not finite" in lost[1].error["message"]
    assert not heard.of(ClipFailed)


@pytest.mark.processes
def test_harm_to_the_exact_path_is_the_clips() -> None:
    config = _dummy((0, 3, 5), 8)
    pipeline = Pipeline(config, fault=Damage("nan", 0, 0))
    with pipeline:
        pipeline.submit([ClipRequest(seed=0), ClipRequest(seed=1)])
        results = list(pipeline.results())
    assert [result.clip for result in results] == [1]
    assert [failure.clip for failure in pipeline.failures] == [0]
    assert isinstance(pipeline.failures[0].error, NotFiniteError)


def test_the_forecast_replays_the_wave() -> None:
    config = _dummy((0, 14))
    (first, second) = Pipeline(config).schedule([ClipRequest(seed=0)])
    assert [action.kind for action in first if action.peer >= 0] == [
        *(Kind.SEND_START, Kind.SEND_STATE, Kind.SEND_RESULT),
    ]
    assert Kind.CORRECT in {action.kind for action in second}


def test_requests_that_are_no_draft() -> None:
    with pytest.raises(RequestError, match="--draft-starts names 2 ranks, but there are 3"):
        replace(_dummy((0, 14)), world_size=3)
    with pytest.raises(RequestError, match="--draft-psnr needs 3 ranks or more"):
        replace(_dummy((0, 14)), draft=DraftConfig(start_steps=(0, 14), accept_psnr_db=60.0))
    with pytest.raises(RequestError, match="--draft-psnr must be a finite PSNR above 0"):
        DraftConfig(start_steps=(0, 1, 2), accept_psnr_db=0.0)
    alone = _dummy((0, 14)).alone()
    assert alone.draft is None
    assert alone.world_size == 1


def test_a_drafts_files_are_named_for_what_they_are() -> None:
    output = OutputConfig(path="out/a.b_0.mp4")
    assert output.draft.path == "out/a.b_0.draft.mp4"
    assert output.draft.json_path == "out/a.b_0.draft.mp4.json"
    assert OutputConfig(path="out/a_0", format="frames").draft.path == "out/a_0.draft"


def test_latents_are_what_travels_first() -> None:
    """The packet of SEND_START is a clip's whole packet: a rank can begin from it alone."""
    spec = LatentSpec(shape=SHAPE, dtype="fp32", dims="BCFHW")
    assert list(DummyModel(spec, 4, torch.device("cpu")).probe_packet()) == [LATENTS]
