"""What ranks on several hosts must have in common, and when silence counts."""

from __future__ import annotations

import json
from dataclasses import replace

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.ranks import shared_settings
from svdpp.driver.stalls import silence_limit
from svdpp.models.checkpoint import find_checkpoint

CONFIG = PipelineConfig(
    world_size=2,
    model=ModelConfig(name="demo"),
    sampling=SvdSampling(num_inference_steps=2, height=32, width=32, num_frames=2),
)


def test_terms_are_what_bits_and_lists_depend_on() -> None:
    ours = shared_settings(CONFIG, None)
    assert json.loads(json.dumps(ours)) == ours
    for other in (
        replace(CONFIG, num_threads=2),
        replace(CONFIG, split="alternating"),
        replace(CONFIG, model=ModelConfig(name="demo", dtype="fp16")),
        replace(CONFIG, sampling=replace(CONFIG.sampling, fps=8)),
    ):
        assert shared_settings(other, None) != ours
    assert shared_settings(replace(CONFIG, start_timeout_seconds=5), None) == ours
    assert {"torch", "svdpp", "model", "num threads"} <= ours.keys()
    here = find_checkpoint(CONFIG.model)
    there = replace(here, fingerprint="of other weights")
    assert shared_settings(CONFIG, there) != shared_settings(CONFIG, here)


def test_silence_is_noticed_before_slowness() -> None:
    assert silence_limit(CONFIG) == CONFIG.heartbeat_timeout_seconds
    assert silence_limit(replace(CONFIG, timeout_seconds=5)) == 4
