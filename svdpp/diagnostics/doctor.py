"""The checks of a machine before a run: everything that a run needs is actually tried.

The cut test makes a clip with a tiny copy of the model: its configs with small sizes, and random
weights. The classes, the scheduler, the tokenizers and all switches are the model's own. Sizes that
are equal in two components stay equal, because a key has the same limit in all of them.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from svdpp.config import (
    DUMMY_MODEL,
    ClipRequest,
    ModelConfig,
    OutputConfig,
    PipelineConfig,
    SamplingConfig,
    SvdSampling,
)
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import estimate_ranks, free_memory, resolve
from svdpp.errors import (
    OutOfMemoryError,
    OutputError,
    RequestError,
    SvdppError,
    VerificationError,
)
from svdpp.launch import process_group
from svdpp.launch.process_lifetime import temp_folder
from svdpp.media import output_files, video
from svdpp.media.inputs import example_requests
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.models.engine.load import component_class, silence_libraries
from svdpp.verification.verify import VerificationResult, verify

_GIB = 2**30
#: Enough for about a hundred clips and the log.
_MIN_FREE_BYTES = 2**28
# Small and quick, but real work for libx264.
_TRIAL_FRAMES, _TRIAL_SIDE = 4, 64


@dataclass(frozen=True, kw_only=True)
class Check:
    """The result of one check; `fix` is a hint if it failed."""

    name: str
    verdict: Literal["ok", "failed", "skipped"]
    detail: str
    fix: str = ""
    exit_code: int = 0


@dataclass
class Examination:
    """What is examined."""

    config: PipelineConfig
    out: Path
    checkpoint: Checkpoint | None = None
    """Of the model, once that check has found it."""


class _Skipped(Exception):
    """The check does not apply, or depends on a failed one; the text says which."""


def examine(examination: Examination) -> Iterator[Check]:
    """Runs the checks one after the other, and yields each result."""
    passed = set()
    for name, (check, fix, needed) in _CHECKS.items():
        try:
            if missing := [other for other in needed if other not in passed]:
                raise _Skipped(f"needs {missing[0]}")
            detail = check(examination)
        except _Skipped as reason:
            yield Check(name=name, verdict="skipped", detail=str(reason))
        except SvdppError as error:
            fix, code = error.hint or fix, error.exit_code
            yield Check(name=name, verdict="failed", detail=error.message, fix=fix, exit_code=code)
        else:
            passed.add(name)
            yield Check(name=name, verdict="ok", detail=detail)


def _devices(examination: Examination) -> str:
    config = examination.config
    process_group.check_devices(config.device, config.world_size)
    backend = process_group.choose_backend(config.device, config.world_size)
    ranks = f"{config.world_size} rank{'s' if config.world_size > 1 else ''}"
    if config.device == "cpu":
        threads = f"{config.num_threads} thread{'s' if config.num_threads > 1 else ''}"
        return f"{ranks} on the CPU, {threads} each, over {backend}"
    return f"{ranks} on {config.device}, over {backend}"


def _transfers(examination: Examination) -> str:
    if examination.config.world_size == 1:
        raise _Skipped("one rank has no neighbour")
    config = _dummy_run(examination.config)
    with Pipeline(config) as pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(3)])
    packets = pipeline.trace.transfers
    arrived = [packet for packet in packets if packet.direction == "recv" and packet.clip]
    slowest = max(arrived, key=lambda packet: packet.end - packet.start)
    milliseconds = (slowest.end - slowest.start) * 1000
    links = len(config.layout.links)
    return (
        f"{links} link{'s' * (links > 1)} with checksums, at worst {slowest.peer} -> "
        f"{slowest.rank}: {slowest.num_bytes / 1e6:.3f} MB in {milliseconds:.2f} ms"
    )


def _dummy_run(config: PipelineConfig) -> PipelineConfig:
    """The ranks of `config`, each with one step of the dummy model."""
    return PipelineConfig(
        world_size=config.world_size,
        model=ModelConfig(name=DUMMY_MODEL),
        sampling=SvdSampling(num_inference_steps=config.world_size),
        device=config.device,
        num_threads=config.num_threads,
        checksum=True,
        timeout_seconds=config.timeout_seconds,
        start_timeout_seconds=config.start_timeout_seconds,
        allow_mixed_devices=config.allow_mixed_devices,
    )


def _ffmpeg(examination: Examination) -> str:  # noqa: ARG001
    """Encodes some frames; the writer reads them back and counts them."""
    video.find_ffmpeg()
    frames = np.zeros((_TRIAL_FRAMES, _TRIAL_SIDE, _TRIAL_SIDE, 3), np.uint8)
    frames[:, :, :, 0] = np.arange(_TRIAL_SIDE)
    with temp_folder("svdpp-doctor-") as folder:
        path = folder / "clip.mp4"
        video.write_clip(frames, OutputConfig(path=str(path)), fps=7, metadata={"trial": True})
        size = path.stat().st_size
    return f"{_TRIAL_FRAMES} frames encoded and read back, {size} bytes"


def _output(examination: Examination) -> str:
    folder = examination.out
    output_files.check_writable(folder)
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < _MIN_FREE_BYTES:
        raise OutputError(
            f"{str(folder)!r} has {free / 2**20:.0f} MiB free",
            "free some space, or name another folder with --out",
        )
    return f"{str(folder)!r} can be written, {free / _GIB:.1f} GiB free"


def _model(examination: Examination) -> str:
    if examination.config.model.is_dummy:
        raise _Skipped("the dummy model has no files")
    # A check of a few seconds must not download; `run` does.
    local = replace(examination.config.model, local_files_only=True)
    examination.config, examination.checkpoint = resolve(replace(examination.config, model=local))
    assert examination.checkpoint is not None
    files = map(examination.checkpoint.weight_files, examination.checkpoint.weighted)
    num_weights = sum(len(header) for headers in files for header in headers.values())
    return f"{local.name}: {num_weights} weights complete, safetensors, no code, no pickle"


def _memory(examination: Examination) -> str:
    """The plan's estimate for each rank, against the free memory of its device."""
    config = examination.config
    if examination.checkpoint is None and not config.model.is_dummy:
        raise _Skipped("needs model")
    needed = estimate_ranks(config)
    if config.device == "cuda":
        devices = {f"cuda:{rank}": size for rank, size in enumerate(needed)}
    else:
        devices = {config.device: sum(needed)}
    for device, size in sorted(devices.items(), key=lambda item: item[1]):
        free = free_memory(device)
        text = f"{size / _GIB:.2f} GiB estimated for {device}, {free / _GIB:.2f} GiB free"
        if size > free:
            raise OutOfMemoryError(
                text,
                "--decode-chunk-size 2, --memory-opt, fewer ranks, or no --dtype fp32 lower it",
                details={"asked": size, "free": free},
            )
    return text


def _cut_test(examination: Examination) -> str:
    config, checkpoint = examination.config, examination.checkpoint
    assert checkpoint is not None
    device = "cuda:0" if config.device == "cuda" else config.device
    with temp_folder("svdpp-doctor-") as folder:
        result = cut_test(checkpoint, folder, replace(config, device=device))
    if (found := result.first_difference) is not None:
        raise VerificationError(f"other bits than diffusers' whole call: {found}")
    return (
        f"a tiny copy of {config.model.name} on a rank for each of its {_NUM_STEPS} steps: bitwise "
        f"equal to diffusers' whole call ({config.model.dtype})"
    )


_REPORT = "report it with the output of svdpp env"

#: Each check, a hint for its errors without one, and the checks that must have passed before.
_CHECKS: dict[str, tuple[Callable[[Examination], str], str, tuple[str, ...]]] = {
    "devices": (_devices, "svdpp env shows the devices; --device cpu --model demo needs none", ()),
    "ffmpeg": (_ffmpeg, "pip install --force-reinstall imageio-ffmpeg", ()),
    "output folder": (_output, "name another folder with --out", ()),
    "model": (_model, "copy or download the model again, or --model demo", ()),
    "memory": (_memory, "fewer ranks, or a smaller clip", ("devices",)),
    "transfers": (_transfers, f"on GPUs try PIPELINE_BACKEND=gloo; {_REPORT}", ("devices",)),
    "cut test": (_cut_test, _REPORT, ("devices", "model")),
}


# --- the cut test ---------------------------------------------------------------------------------

#: Steps of the tiny copy's clips.
_NUM_STEPS = 4
_SIDE, _FRAMES = 64, 16

_WIDTH = 64
#: The largest values of sizes, by the pattern of their names.
_LIMITS = (
    (1, r"num_(single_layers|refiner_layers|res_blocks|key_value_heads|text_blocks)|depth"),
    (1, "inject_face_latents_blocks"),
    (1, r"(video|audio)_connector_num_layers|(decoder_)?layers_per_block|ch_mult"),
    (2, r"(num|n|num_decoder)_layers|num_(heads|visual_blocks|attention_heads)"),
    (2, r"(audio|(video|audio)_connector)_num_attention_heads"),
    (3, "num_hidden_layers"),  # encoders of prompts give the third last of their hidden states,
    (4, "text_proj_in_factor"),  # or all of them at once
    (_SIDE // 8, "(decoder_)?base_dim|sample_(height|width)|motion_encoder_size"),
    (9, "sample_frames"),
    (_WIDTH // 2, "((video|audio)_connector_attention_)?head_dim"),
    (_WIDTH, r"hidden_(size|channels)|d_model|caption_channels|(pooled_)?projection_dim"),
    (_WIDTH, r"(text|image|cross_attention|text_embed|text_embed_2)_dim|in_text_dim2?"),
    (_WIDTH, r"motion_(style|encoder)_dim|face_encoder_hidden_dim"),
    (_WIDTH, r"out_hidden_size|d_ff|(ff|ffn)_dim|intermediate_size|target_size"),
    (2 * _WIDTH, "model_dim"),
)
_ALL_ONE = ("layers_per_block", "decoder_layers_per_block", "ch_mult")
_ROTARY_SECTIONS = [4, 6, 6]
# Most normalise groups of channels, of which there are 32.
_WITHOUT_GROUPS = ("AutoencoderKLHunyuanVideo15", "AutoencoderKLLTX2Video")
_WIDTHS_OF_HEADS = ("cross_attention_dim", "added_kv_proj_dim")


def cut_test(original: Checkpoint, folder: Path, config: PipelineConfig) -> VerificationResult:
    """Compares a tiny copy's clip, cut after every step, with diffusers' whole call.

    Args:
        folder: empty; gets the tiny copy.
        config: of one rank; its device, dtype and threads apply.
    """
    _write_tiny_copy(original, folder)
    model = ModelConfig(name=str(folder), family=original.family, dtype=config.model.dtype)
    sampling = _tiny_sampling(find_checkpoint(model, weights=False), config.sampling)
    config, _ = resolve(
        replace(
            config.alone(),
            world_size=_NUM_STEPS,
            model=model,
            sampling=sampling,
            expert_boundary=None,  # of fewer steps
        )
    )
    return verify(config, example_requests(config, 1))


def _write_tiny_copy(checkpoint: Checkpoint, folder: Path) -> None:
    """Writes the tiny copy of a checked checkpoint to an empty folder, a few megabytes."""
    silence_libraries()
    index = json.loads((checkpoint.folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in checkpoint.folder.iterdir():
            if part.name in checkpoint.weighted and index.get(part.name, [None])[0]:
                config = json.loads((part / "config.json").read_text())
                cls = component_class(part.name, index[part.name][1])
                _new(cls, _tiny(config)).save_pretrained(folder / part.name)
            elif part.is_dir() and part.name in index:
                shutil.copytree(part, folder / part.name)


def _tiny_sampling(checkpoint: Checkpoint, sampling: SamplingConfig) -> SamplingConfig:
    """The first small clip of the kind of `sampling` that the tiny copy `checkpoint` can make."""
    unit, frames = sampling.side_unit, sampling.frames_unit
    known = {each.name for each in fields(sampling) if each.init}
    kind: Any = type(sampling)
    for side, number in itertools.product((_SIDE, _SIDE // 2, _SIDE // 4), range(1, 1 + _FRAMES)):
        rounded = unit * -(-side // unit)
        wanted = {
            **{"num_inference_steps": _NUM_STEPS, "height": rounded, "width": rounded},
            **{"num_frames": frames * number + 1, "stg_block": 1},
            "from_image": getattr(sampling, "from_image", None),
        }
        with contextlib.suppress(RequestError):
            found: SamplingConfig = kind(**{key: wanted[key] for key in wanted if key in known})
            return checkpoint.resolve(found)
    raise RequestError(f"{checkpoint.label} makes no small clip")


def _tiny(config: Mapping[str, Any]) -> dict[str, Any]:
    """A component's config with small sizes."""
    small = {key: _limited(key, value) for key, value in config.items()}
    unit = 8 if config.get("_class_name") in _WITHOUT_GROUPS else 32
    for key, value in config.items():
        if key.endswith("block_out_channels"):
            small[key] = _with_smallest(unit, value)
    if isinstance(types := small.get("layer_types"), list):
        small["layer_types"] = types[: small["num_hidden_layers"]]
    for prefix in ("", "audio_"):
        names = f"{prefix}num_attention_heads", f"{prefix}attention_head_dim"
        heads, size = (config.get(name) for name in names)
        if not (isinstance(heads, int) and isinstance(size, int)):
            continue
        for key in (prefix + name for name in _WIDTHS_OF_HEADS):
            if config.get(key) == heads * size:
                small[key] = small[names[0]] * small[names[1]]
    return small


def _limited(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return _tiny(value)
    if isinstance(value, list):
        if key == "num_attention_heads":
            return _with_smallest(1, value)
        if key == "mrope_section":
            return [min(pair) for pair in zip(value, _ROTARY_SECTIONS, strict=True)]
        return [1] * len(value) if key in _ALL_ONE else value
    limits = (limit for limit, names in _LIMITS if re.fullmatch(names, key))
    return min(value, next(limits, value)) if isinstance(value, int) else value


def _with_smallest(unit: int, value: list[int]) -> list[int]:
    """Multiples of `unit` with about the ratios of `value`, whose smallest one becomes `unit`."""
    divisor = max(1, min(value) // unit)
    return value if divisor == 1 else [max(unit, v // divisor // unit * unit) for v in value]


def _new(cls: Any, config: Mapping[str, Any]) -> Any:
    if hasattr(cls, "from_config") and cls.__module__.startswith("diffusers"):
        return cls.from_config(config)
    return cls(cls.config_class.from_dict(config))
