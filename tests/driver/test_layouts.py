"""For all cuts and decoding ranks, real ranks give the bits of one device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.media.examples import example_photos
from svdpp.plan.costs import Costs
from svdpp.verification.verify import verify
from svdpp.worker.messages import ActionDone
from tests.models.builders import save_tiny_checkpoint

pytestmark = pytest.mark.processes

HEAVY_DECODE = Costs(step_seconds=1.0, encode_seconds=0.2, decode_seconds=4.1)
UNLIKE_RANKS = Costs(step_seconds=(1.0, 3.0, 2.0), encode_seconds=0.5)
DUMMY = PipelineConfig(
    world_size=1,
    model=ModelConfig(name="dummy", dummy_latent_shape=(1, 4, 2, 8, 8)),
    sampling=SvdSampling(num_inference_steps=7),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "more ranks than steps": {"world_size": 9, "split": "balanced"},
    "unlike ranks": {"world_size": 3, "split": "balanced", "costs": UNLIKE_RANKS},
    "cuts that walk": {"world_size": 3, "split": "dithered", "costs": UNLIKE_RANKS},
    "decoders in turn": {"world_size": 4, "split": "dithered", "decoders": 2},
    "two replica_ranks": {"world_size": 6, "split": "dithered", "replicas": 2, "decoders": 2},
    "data parallel": {"world_size": 3, "replicas": 3},
}


@pytest.fixture(scope="module")
def alone() -> list[str]:
    return _hashes(DUMMY)


def _hashes(config: PipelineConfig) -> list[str]:
    with Pipeline(config) as pipeline:
        results = pipeline.run([ClipRequest(seed=seed) for seed in range(5)])
    return [result.metadata["latents_sha256"] for result in results]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_bits_of_one_rank(name: str, alone: list[str]) -> None:
    assert _hashes(replace(DUMMY, **LAYOUTS[name])) == alone


def test_ranks_do_what_their_layout_says() -> None:
    config = replace(DUMMY, **LAYOUTS["two replica_ranks"])
    done: dict[int, set[str]] = {}
    pipeline = Pipeline(config)

    def see(rank: int, event: object) -> None:
        if isinstance(event, ActionDone):
            done.setdefault(event.action.clip, set()).add(f"{rank} {event.action}")

    pipeline.observe(see)
    with pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(5)])
    for clip, seen in done.items():
        route = config.layout.route(clip)
        steps = {
            f"{part.rank} DENOISE c{clip} {part.start}:{part.end}"
            for part in route.ranges
            if part.num_steps
        }
        assert seen == {f"{route.ranges[0].rank} ENCODE c{clip} @0", *steps}
    assert sorted(done) == list(range(5))


@pytest.mark.parametrize(
    "layout",
    [
        {"world_size": 3, "split": "dithered", "decoders": 2, "costs": HEAVY_DECODE},
        {"world_size": 3, "split": "balanced", "costs": Costs(decode_seconds=9.0)},
        {"world_size": 2, "replicas": 2},
    ],
    ids=["decoders in turn", "a rank that decodes alone", "data parallel"],
)
def test_svd_is_bitwise_diffusers(
    layout: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
    config = PipelineConfig(
        model=ModelConfig(name=str(folder)),
        sampling=SvdSampling(num_inference_steps=4, height=64, width=64, num_frames=3),
        **layout,
    )
    photo = str(example_photos()[0])
    verdict = verify(config, [ClipRequest(seed=seed, image=photo) for seed in range(3)])
    assert verdict.bitwise
    for clip in range(3):
        ranges = [p for p in config.layout.route(clip).ranges if p.num_steps]
        checks = [check for check in verdict.checks if check.clip == clip]
        assert [(c.step, c.rank) for c in checks[:-1]] == [(p.end, p.rank) for p in ranges]
        assert checks[-1].what == "frames"
        assert checks[-1].rank == config.layout.route(clip).ranges[-1].rank
