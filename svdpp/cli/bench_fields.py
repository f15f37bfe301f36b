"""Owns the translation of a bench's fields into options of `svdpp run`, and back in errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from svdpp.cli import request
from svdpp.cli.options.draft import DraftOptions
from svdpp.cli.options.layout import LayoutOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.ranks import RankOptions
from svdpp.cli.options.sampling import PROMPT_FIELDS, SamplingOptions
from svdpp.cli.plan_choice import PlanChoice, balanced_by_default, experts_of
from svdpp.config import DUMMY_MODEL, PipelineConfig, SamplingConfig
from svdpp.config.sampling import PromptedSampling
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
    **{"share-experts": "pipeline.share_experts", "prompt": "workload.prompts"},
    **{"negative-prompt": "workload.negative_prompt"},
    **{name.replace("_", "-"): f"workload.{name}" for name in PROMPT_FIELDS},
    **{"max-prompt-tokens": "workload.max_sequence_length"},
}
# Fields of a workload that are no sampling parameters, or have another name or type there.
_NOT_SAMPLING = {
    *("clips", "images", "prompts", "negative_prompt", "frames", "decode_chunk_size"),
}
_SWITCHES = (
    *("pipeline.draft", "pipeline.checksum", "pipeline.deterministic"),
    *("pipeline.allow_mixed_devices", "model.memory_opt", "model.channels_last"),
    "pipeline.share_experts",
)


def pipeline_config(point: BenchConfig) -> PipelineConfig:
    """The configuration that `svdpp run` makes of the same options.

    Raises:
        RequestError: a field is for another family than the model's, or values contradict.
    """
    ranks, model, sampling = point.pipeline, _model(point), _sampling(point)
    from_image = bool(point.workload.images) or request.needs_image(model)
    sampled = sampling.to_config(model, from_image=from_image)
    for name in ("prompts", "negative_prompt"):
        if not isinstance(sampled, PromptedSampling) and getattr(point.workload, name) is not None:
            raise RequestError(
                f"workload.{name} is not for {model.model}, a model of the family {sampled.family}",
                f"leave workload.{name} out",
            )
    experts = experts_of(model.to_config(ranks.device), sampled, share=ranks.share_experts)
    shared = {"device", "threads", "timeout", "start_timeout", "checksum", "allow_mixed_devices"}
    return request.pipeline_config(
        RankOptions(**ranks.model_dump(include=shared)),
        model,
        sampling,
        device=ranks.device,
        plan=_plan(point, sampled, experts),
        from_image=from_image,
    )


def family(point: BenchConfig) -> str | None:
    """The family of the model; None for the dummy.

    Raises:
        ModelError: there is no such model, or its family is not known.
    """
    return None if point.model.name == DUMMY_MODEL else _model(point).family


def _model(point: BenchConfig) -> ModelOptions:
    about = point.model.model_dump()
    return ModelOptions(
        model=about.pop("name"),
        dtype=point.precision,
        latent_shape=tuple(about.pop("latent_shape")),
        deterministic=point.pipeline.deterministic,
        **about,
    )


def _sampling(point: BenchConfig) -> SamplingOptions:
    workload = point.workload
    chunk = workload.decode_chunk_size
    return SamplingOptions(
        num_frames=workload.frames,
        decode_chunk_size=None if chunk is None else str(chunk),
        **workload.model_dump(exclude=_NOT_SAMPLING),
    )


def _plan(
    point: BenchConfig, sampled: SamplingConfig, experts: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Number of ranks, and how they share the work."""
    ranks = point.pipeline
    if ranks.start_steps is not None and not ranks.draft:
        raise RequestError("pipeline.start_steps needs a draft", "add --pipeline.draft=true")
    shared = {"split", "replicas", "decoders", "costs"}
    draft = DraftOptions(draft=ranks.draft, draft_starts=ranks.start_steps)
    layout = LayoutOptions(**ranks.model_dump(include=shared, exclude_defaults=True))
    if experts is not None and "split" not in ranks.model_fields_set:
        layout = balanced_by_default(layout, draft)
    plan = PlanChoice(
        draft=draft,
        layout=layout,
        world=request.joined_world(ranks.world, "pipeline.world", "give --pipeline.world=null"),
        steps=sampled.num_inference_steps,
        family=sampled.family,
        device=ranks.device,
        no_draft={"costs": ranks.costs},
    )
    decodes = point.model.name != DUMMY_MODEL
    return plan.settings(num_clips=point.workload.clips, decodes=decodes, experts=experts)[0]


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

    option = r"--([a-z][a-z-]*[a-z](?:-2)?)"
    value = r"(?: ([\w:]*\d[\w:]*|demo|cpu|cuda|dithered|balanced))?"
    return re.sub(option + value, field, text)
