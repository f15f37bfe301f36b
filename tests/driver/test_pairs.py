"""Ranks that share a step or a decode, and ranks of two experts: the bits of diffusers' own."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.config import (
    ClipRequest,
    LtxSampling,
    ModelConfig,
    PipelineConfig,
    SamplingConfig,
    WanSampling,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import ClipWork, resolve
from svdpp.errors import NotFiniteError, RankError, RequestError
from svdpp.media.inputs import example_photos
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs
from svdpp.verification.verify import Check, verify
from tests.driver.dummies import clips, hashes, plain_hashes
from tests.driver.dummies import config as dummy
from tests.faults.damage import Damage
from tests.models.builders import small_svd
from tests.models.tiny_families import save_tiny_ltx, save_tiny_wan

pytestmark = pytest.mark.usefixtures("one_thread")

WAN: dict[str, Any] = {
    **{"num_inference_steps": 6, "height": 32, "width": 32, "num_frames": 5},
    "max_sequence_length": 8,
}
LTX: dict[str, Any] = {**WAN, "height": 64, "width": 64, "num_frames": 9}
REQUESTS = [
    ClipRequest(seed=1, prompt="the sea at night"),
    ClipRequest(seed=2, prompt="a cat", negative_prompt="blurred"),
    ClipRequest(seed=3, prompt="the sea at night"),
]
MORE = [pytest.mark.long, pytest.mark.full]

#: How each model is saved, and whether clips are made from an image.
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "t2v-two-experts": ({"boundary_ratio": 0.875}, False),
    "i2v": ({"image": True}, True),
    "5b": ({"expand_timesteps": True}, False),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def config_of(name: str, folder: Path, dtype: Any = "fp32", **changes: Any) -> PipelineConfig:
    saved, from_image = MODELS[name]
    save_tiny_wan(folder, **saved, dtype=DTYPES[dtype])
    return PipelineConfig(
        model=ModelConfig(name=str(folder), dtype=dtype),
        sampling=WanSampling(**WAN, from_image=from_image),
        **{"world_size": 2, "cfg_parallel": 2, **changes},
    )


def requests_of(config: PipelineConfig) -> list[ClipRequest]:
    from_image = isinstance(config.sampling, WanSampling) and config.sampling.from_image
    return [
        replace(each, image=str(example_photos()[0]) if from_image else None) for each in REQUESTS
    ]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "dtype", "layout"),
    [
        ("t2v-two-experts", "fp32", {"world_size": 4, "split": "alternating"}),
        ("i2v", "bf16", {"world_size": 4, "replicas": 2}),
        ("5b", "fp32", {"share_experts": False}),
        ("t2v-two-experts", "fp32", {"cfg_parallel": 1, "share_experts": True}),
        ("t2v-two-experts", "fp32", {"cfg_parallel": 1, "world_size": 3, "split": "alternating"}),
        *(
            pytest.param(*case, marks=MORE)
            for case in [
                ("t2v-two-experts", "fp32", {}),
                ("t2v-two-experts", "bf16", {}),
                ("t2v-two-experts", "bf16", {"world_size": 4, "split": "balanced"}),
                ("t2v-two-experts", "fp32", {"world_size": 4, "share_experts": True}),
                ("t2v-two-experts", "fp32", {"world_size": 6, "split": "balanced"}),
                ("i2v", "fp32", {}),
                ("i2v", "bf16", {}),
                ("i2v", "fp32", {"world_size": 4, "split": "uniform"}),
                ("i2v", "bf16", {"world_size": 4, "split": "balanced"}),
                ("i2v", "fp32", {"world_size": 4, "split": "alternating"}),
                ("5b", "bf16", {}),
                ("5b", "bf16", {"world_size": 4, "split": "uniform"}),
                ("5b", "fp32", {"world_size": 4, "split": "balanced"}),
                ("5b", "bf16", {"world_size": 4, "split": "alternating"}),
                ("5b", "fp32", {"world_size": 6, "decoders": 2, "split": "balanced"}),
            ]
        ),
    ],
)
def test_verify_finds_equal_bits(
    tmp_path: Path, name: str, dtype: str, layout: dict[str, Any]
) -> None:
    config, _ = resolve(config_of(name, tmp_path, dtype, **layout))
    result = verify(config, requests_of(config))
    assert result.bitwise
    assert {check.what for check in result.checks} == {"latent", "final_latent", "frames"} - (
        {"latent"} if config.layout.num_stages == 1 else set()
    )


def _first_difference(config: PipelineConfig, fault: Damage) -> Check:
    first = verify(config, REQUESTS[:1], fault=fault).first_difference
    assert first is not None
    return first


@pytest.mark.processes
@pytest.mark.parametrize("rank", [2, 3])
def test_the_proof_names_the_branch_that_differs(tmp_path: Path, rank: int) -> None:
    config = config_of("5b", tmp_path / "model", world_size=4)
    first = _first_difference(config, Damage("prediction", rank, 0))
    assert (first.what, first.rank, first.step, first.branch) == ("prediction", rank, 3, rank - 2)
    assert f"branch {rank - 2} in step 3, done by rank {rank}" in str(first)
    assert first.max_ulp == 1


@pytest.mark.processes
def test_the_proof_names_the_solvers_history_if_it_differs_first(tmp_path: Path) -> None:
    changes = {"world_size": 3, "cfg_parallel": 1, "split": "balanced"}
    config = config_of("t2v-two-experts", tmp_path / "model", **changes)
    first = _first_difference(config, Damage("state", 0, 0))
    assert (first.rank, first.max_ulp) == (0, 1)
    assert "the solver's history" in str(first)


def test_ranks_without_an_encoder_of_images_refuse_photographs(tmp_path: Path) -> None:
    config, checkpoint = resolve(config_of("t2v-two-experts", tmp_path))
    assert isinstance(config.sampling, WanSampling)
    asked = replace(REQUESTS[0], sampling=replace(config.sampling, from_image=True))
    with pytest.raises(RequestError, match="started for clips from text alone"):
        ClipWork(config, checkpoint).resolved(asked)


@pytest.mark.processes
@pytest.mark.parametrize("first", [1, 2])
def test_a_clip_resumes_in_another_layout(tmp_path: Path, first: int) -> None:
    """From one rank to a pair, or back, when the second half of the first run is lost."""
    config = config_of(
        "t2v-two-experts", tmp_path / "model", world_size=2 * first, cfg_parallel=first
    )
    asked = replace(REQUESTS[0], latents_key="ab" * 32)
    latents = tmp_path / "latents"
    latents.mkdir()
    whole = replace(config, world_size=1, cfg_parallel=1)
    with Pipeline(whole) as pipeline:
        expected = pipeline.run(REQUESTS[0]).metadata
    last = config.world_size - 1
    fault = Damage("nan", last - (first - 1), 0)
    with Pipeline(config, latents_folder=str(latents), fault=fault) as pipeline:
        assert pipeline.submit(asked).exception() is not None
    (kept,) = latents.iterdir()
    done = int(kept.stem.rpartition("step")[2])
    again = replace(whole, world_size=3 - first, cfg_parallel=3 - first)
    with Pipeline(again, latents_folder=str(latents)) as pipeline:
        found = pipeline.run(replace(asked, done_steps=done)).metadata
    assert found["latents_sha256"] == expected["latents_sha256"]
    assert found["frames_sha256"] == expected["frames_sha256"]


@pytest.mark.processes
def test_a_batch_of_two_is_divided_but_not_proven(tmp_path: Path) -> None:
    config = PipelineConfig(
        world_size=2,
        model=ModelConfig(name=str(save_tiny_ltx(tmp_path))),
        sampling=LtxSampling(**LTX),
        cfg_parallel=2,
    )
    with Pipeline(config) as pipeline:
        assert pipeline.run(REQUESTS[0]).metadata["exact"] == "unproven"
    result = verify(config, REQUESTS[:1])
    assert result.max_abs_diff <= 2 / 255
    ((latent, _),) = [result.checks]
    assert latent.equal or (latent.psnr_db is not None and latent.psnr_db > 80)


#: Each clip is decoded in two chunks of a frame.
CHUNKS = replace(dummy(steps=8).sampling, decode_chunk_size=1)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, {"cfg_parallel": 2}),
        (2, {"cfg_parallel": 2, "sampling": CHUNKS}),
        (2, {"decode_ranks": 2, "sampling": CHUNKS}),
    ],
    ids=str,
)
def test_cancelled_and_lost_clips_leave_the_ranks_in_step(
    world_size: int, layout: dict[str, Any]
) -> None:
    config = dummy(world_size, steps=8, **layout)
    for rank in range(world_size):
        with Pipeline(config, fault=Damage("nan", rank, 1)) as pipeline:
            first, lost, cancelled, last = pipeline.submit(clips(1, 2, 3, 4))
            cancelled.cancel()
            found = hashes([first.result(), last.result()])
        with pytest.raises(NotFiniteError, match="not finite after step"):
            lost.result()
        assert found == plain_hashes(8, 1, 4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"world_size": 3}, "needs pairs of ranks, got 3"),
        ({"cfg_parallel": 3}, "must be 1 or 2, got 3"),
        ({"replicas": 2}, "1 pairs of ranks cannot form 2 replicas"),
        ({"allow_mixed_devices": True}, "cannot be used with --allow-mixed-devices"),
        ({"decode_ranks": 3}, "1 to 2, the ranks of a replica or decoder, got 3"),
        ({"decode_ranks": 0}, "--decode-ranks must be 1 to 2, .* got 0"),
        ({"decode_ranks": 2, "cfg_parallel": 1, "replicas": 2}, "1 to 1, the ranks of a replica"),
        (
            {"cfg_parallel": 1, "decoders": 2, "decode_ranks": 2},
            "1 to 1, the ranks of a replica or",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        replace(dummy(2, steps=6), **{"cfg_parallel": 2, **changes})


@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_guidance_that_is_off_is_refused(tmp_path: Path, scale: float) -> None:
    config = config_of("5b", tmp_path)
    sampling: SamplingConfig = WanSampling(**WAN, guidance_scale=scale)
    with pytest.raises(RequestError, match="the guidance is off: each step has one branch"):
        resolve(replace(config, sampling=sampling))


@pytest.mark.processes
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_halves_of_svds_batch_are_close(dtype: Any) -> None:
    config = small_svd(2, cfg_parallel=2)
    config = replace(config, model=replace(config.model, dtype=dtype))
    request = ClipRequest(seed=1, image=str(example_photos()[0]))
    result = verify(config, [request])
    (latent,) = (check for check in result.checks if check.what == "final_latent")
    assert latent.equal or (latent.psnr_db is not None and latent.psnr_db > 80)


# --- one decode by several ranks ----------------------------------------------------------------


def svd(world_size: int, **changes: Any) -> PipelineConfig:
    """Five frames in chunks of two: the last one is shorter."""
    config = small_svd(1, steps=4)
    sampling = replace(config.sampling, num_frames=5, decode_chunk_size=2)
    return replace(config, sampling=sampling, world_size=world_size, **changes)


@pytest.mark.processes
def test_both_ranks_of_a_pair_decode_the_bits_of_one() -> None:
    requests = [ClipRequest(seed=seed, image=str(example_photos()[0])) for seed in (1, 2)]
    found = []
    for decode_ranks in (1, None):
        with Pipeline(svd(2, cfg_parallel=2, decode_ranks=decode_ranks)) as pipeline:
            found.append([result.metadata for result in pipeline.run(requests)])
        decodes = [span for span in pipeline.trace.spans if span.action.kind is Kind.DECODE]
        assert {span.rank for span in decodes} == ({0, 1} if decode_ranks is None else {0})
    for alone, together in zip(*found, strict=True):
        assert together["frames_sha256"] == alone["frames_sha256"]
        assert together["latents_sha256"] == alone["latents_sha256"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (3, {"split": "alternating", "decode_ranks": 3}),
        (4, {"replicas": 2, "decode_ranks": 2}),
    ],
)
def test_ranks_of_a_pipeline_decode_the_bits_of_one(
    world_size: int, layout: dict[str, Any]
) -> None:
    config, _ = resolve(svd(world_size, **layout))
    requests = [ClipRequest(seed=seed, image=str(example_photos()[0])) for seed in (1, 2, 3, 4)]
    result = verify(config, requests)
    assert result.bitwise
    assert {check.what for check in result.checks} == {"latent", "final_latent", "frames"}


@pytest.mark.processes
def test_clips_with_parameters_of_their_own_are_decoded_by_as_many_as_have_chunks() -> None:
    """Three chunks, two, and one."""
    config = svd(3, split="balanced", decode_ranks=3)
    own = [config.sampling, *(replace(config.sampling, num_frames=frames) for frames in (3, 2))]
    requests = [
        ClipRequest(seed=1, image=str(example_photos()[0]), sampling=sampling) for sampling in own
    ]
    with Pipeline(config) as pipeline:
        found = [result.metadata["frames_sha256"] for result in pipeline.run(requests)]
    decodes = [span for span in pipeline.trace.spans if span.action.kind is Kind.DECODE]
    assert Counter(span.action.clip for span in decodes) == {0: 3, 1: 2, 2: 1}
    with Pipeline(svd(1)) as pipeline:
        alone = [result.metadata["frames_sha256"] for result in pipeline.run(requests)]
    assert found == alone


@pytest.mark.processes
def test_a_clip_that_only_lacks_its_decode_is_decoded_by_both(tmp_path: Path) -> None:
    """The second rank of the pair then gets the latent to decode."""
    request = ClipRequest(seed=1, image=str(example_photos()[0]), latents_key="ab" * 32)
    with Pipeline(svd(1)) as pipeline:
        expected = pipeline.run(request).metadata
    apart = svd(2, split="balanced", costs=Costs(step_seconds=1, decode_seconds=100))
    kept = tmp_path / f"{request.latents_key}_step4.safetensors"
    fault = Damage("raise", 1, 0, place="decode", until=str(kept))
    with (
        pytest.raises(RankError, match="an injected fault"),
        Pipeline(apart, latents_folder=str(tmp_path), fault=fault) as pipeline,
    ):
        pipeline.run(request)
    with Pipeline(svd(2, cfg_parallel=2), latents_folder=str(tmp_path)) as pipeline:
        found = pipeline.run(replace(request, done_steps=4)).metadata
    assert found["frames_sha256"] == expected["frames_sha256"]
    assert found["latents_sha256"] == expected["latents_sha256"]


def test_too_few_chunks_are_refused() -> None:
    config = svd(2, cfg_parallel=2, decode_ranks=2)
    config = replace(config, sampling=replace(config.sampling, decode_chunk_size=None))
    with pytest.raises(RequestError, match="a clip of 5 frames is decoded in 1") as caught:
        resolve(config)
    assert "--decode-ranks 1 or fewer, or a smaller --decode-chunk-size" in caught.value.hint
    assert resolve(replace(config, decode_ranks=None))[0].decode_ranks == 1


def test_a_decode_that_is_not_in_chunks_is_refused(tmp_path: Path) -> None:
    model = ModelConfig(name=str(save_tiny_wan(tmp_path, expand_timesteps=True)))
    sampling: SamplingConfig = WanSampling(
        num_inference_steps=4, height=32, width=32, num_frames=5, max_sequence_length=8
    )
    config = PipelineConfig(
        world_size=2, model=model, sampling=sampling, cfg_parallel=2, decode_ranks=2
    )
    with pytest.raises(RequestError, match="--decode-ranks 2 cannot divide the decode of"):
        resolve(config)
    assert resolve(replace(config, decode_ranks=None))[0].decode_ranks == 1
