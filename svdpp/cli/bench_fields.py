"""How fields of a bench become options of `svdpp run`, and the options in errors fields again."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

from svdpp.cli.options.layout import LayoutOptions, RankOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.sampling import SamplingOptions
from svdpp.cli.request import PipelineOptions, PipelineRequest
from svdpp.config import DUMMY_MODEL, PipelineConfig
from svdpp.errors import RequestError, SvdppError

if TYPE_CHECKING:
    from svdpp.bench.config import BenchConfig


#: Options of `svdpp run` with another name than the field.
_OTHER_NAMES = {
    "gpus": "pipeline.world",
    "dtype": "precision",
    "model": "model.name",
    "prompt": "workload.prompts",
    "max-prompt-tokens": "workload.max_sequence_length",
}
# Fields of a workload that are no sampling parameters, or have another name or type there.
_NOT_SAMPLING = {
    *("clips", "images", "prompts", "negative_prompt", "frames", "decode_chunk_size"),
}


def pipeline_config(point: BenchConfig) -> PipelineConfig:
    """The configuration that `svdpp run` makes of the same options."""
    asked, model, sampling = point.pipeline, _model(point), _sampling(point)
    for name in ("prompts", "negative_prompt"):
        if getattr(point.workload, name) is not None and model.family == "svd":
            raise RequestError(
                f"workload.{name} is not for {model.model}, a model of the family svd",
                f"leave workload.{name} out",
            )
    of_ranks = {"world", "device", "threads", "timeout", "start_timeout", "checksum"} | {
        "allow_mixed_devices"
    }
    of_layout = {"split", "replicas", "decoders", "costs", "share_experts"}
    options = PipelineOptions(
        ranks=RankOptions(**asked.model_dump(include=of_ranks)),
        model=model,
        sampling=sampling,
        layout=LayoutOptions(
            cfg_parallel=str(asked.cfg_parallel),
            **asked.model_dump(include=of_layout, exclude_defaults=True),
        ),
    )
    from_image = True if point.workload.images else None
    request = PipelineRequest(
        options=options, num_clips=point.workload.clips, from_image=from_image
    )
    return request.resolve()[0]


def family(point: BenchConfig) -> str | None:
    """The family of the model; None for the dummy."""
    return None if point.model.name == DUMMY_MODEL else _model(point).family


def _model(point: BenchConfig) -> ModelOptions:
    about = point.model.model_dump()
    return ModelOptions(
        model=about.pop("name"),
        as_family=about.pop("family"),
        dtype=point.precision,
        latent_shape=tuple(about.pop("latent_shape")),
        deterministic=point.pipeline.deterministic,
        **about,
    )


def _sampling(point: BenchConfig) -> SamplingOptions:
    values = point.workload.model_dump(exclude=_NOT_SAMPLING)
    shared = {field.name for field in fields(SamplingOptions)} & values.keys()
    own = {name: values[name] for name in values.keys() - shared if values[name] is not None}
    chunk = point.workload.decode_chunk_size
    return SamplingOptions(
        num_frames=point.workload.frames,
        decode_chunk_size=None if chunk is None else str(chunk),
        param=[f"{name}={value}" for name, value in own.items()],
        **{name: values[name] for name in shared},
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
    """`text` with fields in the place of options, and with `=` before their values."""
    from svdpp.bench.config import FIELDS

    names = {name.rpartition(".")[2].replace("_", "-"): name for name in FIELDS} | _OTHER_NAMES

    def field(match: re.Match[str]) -> str:
        name, value = names.get(match[1]), match[2]
        if name is None:
            return match[0]
        if value is None and FIELDS[name] is bool:
            value = "true"
        return f"--{name}" if value is None else f"--{name}={value}"

    text = re.sub(r"--param (\w+)", lambda name: f"--{name[1].replace('_', '-')}", text)
    option = r"--([a-z][a-z-]*[a-z](?:-2)?)"
    value = r"(?: ([\w:]*\d[\w:]*|demo|cpu|cuda|dithered|balanced))?"
    return re.sub(option + value, field, text)
