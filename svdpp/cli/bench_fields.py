"""Owns the translation of a bench's fields into options of `svdpp run`, and back in errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from svdpp.cli import request
from svdpp.cli.options.draft import DraftOptions
from svdpp.cli.options.layout import LayoutOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.ranks import RankOptions
from svdpp.cli.options.sampling import SamplingOptions
from svdpp.cli.plan_choice import PlanChoice
from svdpp.config import DUMMY_MODEL, PipelineConfig
from svdpp.errors import RequestError, SvdppError

if TYPE_CHECKING:
    from svdpp.bench.config import BenchConfig

# Fields of a configuration, by the equivalent option of `svdpp run`.
_FIELDS = {
    **dict.fromkeys(("world", "gpus"), "pipeline.world"),
    **{name: f"pipeline.{name}" for name in ("device", "split", "replicas", "decoders", "costs")},
    **{name: f"pipeline.{name}" for name in ("draft", "threads", "timeout", "checksum")},
    **{name: f"workload.{name}" for name in ("steps", "frames", "height", "width", "fps", "fit")},
    **{"draft-starts": "pipeline.start_steps", "start-timeout": "pipeline.start_timeout"},
    **{"decode-chunk-size": "workload.decode_chunk_size", "memory-opt": "model.memory_opt"},
    **{"motion-bucket-id": "workload.motion_bucket_id", "clips": "workload.clips"},
    **{"min-guidance-scale": "workload.min_guidance_scale", "dtype": "precision"},
    **{"max-guidance-scale": "workload.max_guidance_scale", "model": "model.name"},
    **{"noise-aug-strength": "workload.noise_aug_strength", "variant": "model.variant"},
    **{"latent-shape": "model.latent_shape", "revision": "model.revision"},
    **{"channels-last": "model.channels_last", "deterministic": "pipeline.deterministic"},
    **{"allow-mixed-devices": "pipeline.allow_mixed_devices"},
}
_SWITCHES = (
    *("pipeline.draft", "pipeline.checksum", "pipeline.deterministic"),
    *("pipeline.allow_mixed_devices", "model.memory_opt", "model.channels_last"),
)


def pipeline_config(point: BenchConfig) -> PipelineConfig:
    """The configuration that `svdpp run` makes of the same options."""
    ranks, workload, about = point.pipeline, point.workload, point.model.model_dump()
    knobs = workload.model_dump(exclude={"clips", "images", "frames", "decode_chunk_size"})
    chunk = workload.decode_chunk_size
    shared = {"device", "threads", "timeout", "start_timeout", "checksum", "allow_mixed_devices"}
    return request.pipeline_config(
        RankOptions(**ranks.model_dump(include=shared)),
        ModelOptions(
            model=about.pop("name"),
            dtype=point.precision,
            latent_shape=tuple(about.pop("latent_shape")),
            deterministic=ranks.deterministic,
            **about,
        ),
        SamplingOptions(
            num_frames=workload.frames,
            decode_chunk_size=None if chunk is None else str(chunk),
            **knobs,
        ),
        device=ranks.device,
        plan=_plan(point),
    )


def _plan(point: BenchConfig) -> dict[str, Any]:
    """Number of ranks, and how they share the work."""
    ranks = point.pipeline
    if ranks.start_steps is not None and not ranks.draft:
        raise RequestError("pipeline.start_steps needs a draft", "add --pipeline.draft=true")
    shared = {"split", "replicas", "decoders", "costs"}
    plan = PlanChoice(
        draft=DraftOptions(draft=ranks.draft, draft_starts=ranks.start_steps),
        layout=LayoutOptions(**ranks.model_dump(include=shared, exclude_defaults=True)),
        world=request.joined_world(ranks.world, "pipeline.world", "give --pipeline.world=null"),
        steps=point.workload.steps,
        device=ranks.device,
        no_draft={"costs": ranks.costs},
    )
    decodes = point.model.name != DUMMY_MODEL
    return plan.settings(num_clips=point.workload.clips, decodes=decodes)[0]


@contextlib.contextmanager
def named() -> Iterator[None]:
    """Errors in the block name options of `svdpp run`; makes them name the fields instead."""
    try:
        yield
    except SvdppError as error:
        error.message = _as_fields(error.message)
        needs_gpu = "without a GPU" in error.hint
        error.hint = "svdpp bench smoke needs no GPU" if needs_gpu else _as_fields(error.hint)
        raise


def _as_fields(text: str) -> str:
    def field(match: re.Match[str]) -> str:
        name, value = _FIELDS.get(match[1]), match[2]
        if name is None:
            return match[0]
        if value is not None:
            return f"--{name}={value}"
        return f"--{name}=true" if name in _SWITCHES else f"--{name}"

    return re.sub(
        r"--([a-z][a-z-]*[a-z])(?: ([\w:]*\d[\w:]*|demo|cpu|cuda|dithered|balanced))?", field, text
    )
