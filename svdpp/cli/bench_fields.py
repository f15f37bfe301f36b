"""The options of `svdpp bench`, and how its fields become options of `svdpp run` and back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from svdpp.cli.options.declare import DIAGNOSTICS, LAYOUT, flag, option
from svdpp.cli.options.layout import LayoutOptions, ShareOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.ranks import RankOptions
from svdpp.cli.options.sampling import SamplingOptions
from svdpp.cli.rank_count import joined_world
from svdpp.cli.request import PipelineOptions, needs_image, resolve
from svdpp.config import (
    DUMMY_MODEL,
    LtxSampling,
    PipelineConfig,
    PromptedSampling,
    WanSampling,
    own_params,
)
from svdpp.errors import RequestError, SvdppError
from svdpp.launch.world import World

if TYPE_CHECKING:
    from svdpp.bench.config import BenchConfig


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure or compare."""

    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG [--SECTION.FIELD=VALUE]...",
            help="A YAML file, or a configuration that comes with svdpp: smoke (CPU, a minute or "
            "two), svd-xt (all GPUs) or wan-a14b (4 GPUs). If a field has a list, each of its "
            "values is measured.",
            show_default=False,
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        option(
            "--set",
            panel=LAYOUT,
            metavar="SECTION.FIELD=VALUE",
            help="Override a field, as --SECTION.FIELD=VALUE does; the value is YAML. Can be "
            "repeated.",
        ),
    ] = None
    compare: Annotated[
        tuple[Path, Path] | None,
        option(
            "--compare",
            panel=DIAGNOSTICS,
            metavar="A B",
            help="Compare the results in folder B with those in folder A; measure nothing.",
        ),
    ] = None
    baseline: Annotated[
        Path | None,
        option(
            "--baseline",
            panel=DIAGNOSTICS,
            metavar="DIR",
            help="After measuring, compare with the earlier results in DIR. The exit code is 10 if "
            "svdpp became slower by more than noise.",
        ),
    ] = None
    results: Annotated[
        Path,
        option(
            "--results",
            panel=DIAGNOSTICS,
            metavar="DIR",
            help="Write results to DIR/EXPERIMENT/RUN/.",
        ),
    ] = Path("results")
    torch_profile: Annotated[
        bool,
        flag(
            "--profile",
            panel=DIAGNOSTICS,
            help="As profile=true: at the end, profile one clip on rank 0 with torch.profiler.",
        ),
    ] = False


# Fields of a workload that `--param` sets.
_OWN = (*own_params(WanSampling), *own_params(LtxSampling))
# Fields of a configuration, by the equivalent option of `svdpp run`.
_FIELDS = {
    **dict.fromkeys(("world", "gpus"), "pipeline.world"),
    **{name: f"pipeline.{name}" for name in ("device", "split", "replicas", "decoders", "costs")},
    **{name: f"pipeline.{name}" for name in ("threads", "timeout", "checksum")},
    **{name: f"workload.{name}" for name in ("steps", "frames", "height", "width", "fps", "fit")},
    **{"start-timeout": "pipeline.start_timeout"},
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
    **{name.replace("_", "-"): f"workload.{name}" for name in ("guidance_scale", *_OWN)},
    **{"max-prompt-tokens": "workload.max_sequence_length"},
}
# Fields of a workload that are no sampling parameters, or have another name or type there.
_NOT_SAMPLING = {
    *("clips", "images", "prompts", "negative_prompt", "frames", "decode_chunk_size"),
}
_SWITCHES = (
    *("pipeline.checksum", "pipeline.deterministic"),
    *("pipeline.allow_mixed_devices", "model.memory_opt", "model.channels_last"),
    "pipeline.share_experts",
)


def pipeline_config(point: BenchConfig, launched: World | None = None) -> PipelineConfig:
    """The configuration that `svdpp run` makes of the same options."""
    asked, model, sampling = point.pipeline, _model(point), _sampling(point)
    from_image = bool(point.workload.images) or needs_image(model)
    sampled = sampling.to_config(model, from_image=from_image)
    for name in ("prompts", "negative_prompt"):
        if not isinstance(sampled, PromptedSampling) and getattr(point.workload, name) is not None:
            raise RequestError(
                f"workload.{name} is not for {model.model}, a model of the family {sampled.family}",
                f"leave workload.{name} out",
            )
    of_ranks = {"device", "threads", "timeout", "start_timeout", "checksum", "allow_mixed_devices"}
    of_layout = {"split", "replicas", "decoders", "costs"}
    world = joined_world(launched, asked.world, "pipeline.world", "give --pipeline.world=null")
    options = PipelineOptions(
        launched=launched,
        ranks=RankOptions(world=world, **asked.model_dump(include=of_ranks)),
        model=model,
        sampling=sampling,
        layout=LayoutOptions(**asked.model_dump(include=of_layout, exclude_defaults=True)),
        experts=ShareOptions(share_experts=asked.share_experts),
        from_image=from_image,
    )
    return resolve(options, point.workload.clips)[0]


def family(point: BenchConfig) -> str | None:
    """The family of the model; None for the dummy."""
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
    chunk, own = workload.decode_chunk_size, workload.model_dump(include={*_OWN})
    return SamplingOptions(
        num_frames=workload.frames,
        decode_chunk_size=None if chunk is None else str(chunk),
        param=[f"{name}={value}" for name, value in own.items() if value is not None],
        **workload.model_dump(exclude={*_NOT_SAMPLING, *_OWN}),
    )


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

    text = re.sub(r"--param (\w+)", lambda name: f"--{name[1].replace('_', '-')}", text)
    option = r"--([a-z][a-z-]*[a-z](?:-2)?)"
    value = r"(?: ([\w:]*\d[\w:]*|demo|cpu|cuda|dithered|balanced))?"
    return re.sub(option + value, field, text)
