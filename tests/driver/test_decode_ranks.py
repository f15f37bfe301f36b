"""One clip's decode by several ranks: the bits of one, and all clips however others end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SamplingConfig, WanSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolve
from svdpp.errors import RankError, RequestError
from svdpp.media.inputs import example_photos
from svdpp.plan.actions import Kind
from svdpp.plan.costs import Costs
from svdpp.verification.verify import verify
from tests.driver.dummies import config as dummy
from tests.faults.damage import Damage
from tests.models.builders import small_svd
from tests.models.tiny_families import save_tiny_wan

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decode_ranks": 3}, "--decode-ranks must be 1 to 2, the ranks of a replica, got 3"),
        ({"decode_ranks": 0}, "--decode-ranks must be 1 to 2, .* got 0"),
        ({"decode_ranks": 2, "cfg_parallel": 1, "replicas": 2}, "1 to 1, the ranks of a replica"),
        ({"cfg_parallel": 1, "decoders": 2, "decode_ranks": 2}, "1 to 1, the ranks of each of 2"),
    ],
)
def test_what_cannot_decode_together_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        dummy(2, steps=8, **{"cfg_parallel": 2, **changes})


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
