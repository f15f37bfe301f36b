"""Tasks that recompute finished clips: each has the configuration and request of one clip.

This module does not import torch, so that a command can start the fork server of the ranks first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from svdpp.config import (
    DUMMY_MODEL,
    ClipRequest,
    Denoiser,
    Lora,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
)
from svdpp.config.pipeline import LAST_IMAGE, reference_names
from svdpp.driver.clip_metadata import recorded_sampling
from svdpp.errors import ModelError, RequestError, SvdppError
from svdpp.launch.gpus import Gpu, visible_gpus
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.files import display_name
from svdpp.models.repositories import component_revisions
from svdpp.verification.clip_files import ClipOnDisk, find_input_file, read_clip
from svdpp.verification.clip_result import ClipVerification, VerificationTask


@dataclass(frozen=True, kw_only=True)
class VerificationSettings:
    """User's options for verifying finished clips. Other settings come from the clips' metadata."""

    image: Path | None = None
    """Path of the clip's input image, or of a folder with all inputs. None: the inputs are searched
    for at their recorded paths and in the clip's folder."""
    local_files_only: bool = False
    """Whether only files on this machine are used, so that nothing is downloaded."""
    timeout: float = 600.0
    """Seconds without progress after which the process that recomputes clips counts as stalled."""
    start_timeout: float = 600.0
    """Seconds within which the process that recomputes clips must have loaded the model."""


def plan_verification(
    paths: Iterable[Path], settings: VerificationSettings
) -> tuple[list[list[VerificationTask]], list[ClipVerification]]:
    """Read and check finished clips, and group them by configuration into verification tasks.

    Args:
        paths: Path of each clip's file or JSON.
        settings: User's options for the verification.

    Returns:
        Two lists. The first has groups of tasks with equal configurations, so that the model is
        loaded once for each group. The second has a result with an error for each clip that cannot
        be recomputed.
    """
    groups: dict[PipelineConfig, list[VerificationTask]] = {}
    failed = []
    # The free memory of GPUs is read only once. Otherwise clips with equal settings could be put on
    # different GPUs, and so into different groups.
    gpus = functools.cache(visible_gpus)
    for path in paths:
        try:
            task = _new_task(path, settings, gpus)
        except SvdppError as error:
            failed.append(ClipVerification(path=path, error=error))
        else:
            groups.setdefault(task.config, []).append(task)
    return list(groups.values()), failed


def _new_task(
    path: Path, settings: VerificationSettings, gpus: Callable[[], list[Gpu]]
) -> VerificationTask:
    clip = read_clip(path)
    metadata, name = clip.metadata, clip.path.name
    if not metadata["exact"]:
        raise RequestError(
            f"{name!r} is marked as not exact: an earlier svdpp made it by an approximation",
            "svdpp run makes an exact clip with the same settings",
            details={"clip": str(path)},
        )
    config = _config(clip, settings, gpus)
    try:
        _check_device(config)
    except RequestError as error:
        raise RequestError(
            f"{name!r} was made on a CUDA device, but torch finds too few here: {error.message}",
            "other devices give other bits: verify the clip on a machine with a CUDA device",
            details={"clip": str(path), **error.details},
        ) from error
    image = None if metadata["input"] is None else str(find_input_file(clip, settings.image))
    hashes = metadata.get("videos_sha256", {})
    videos = {name: str(find_input_file(clip, settings.image, name)) for name in hashes}
    last_sha256, last_image = metadata.get("last_image_sha256"), None
    if last_sha256 is not None:
        last_image = str(find_input_file(clip, settings.image, LAST_IMAGE))
    references_sha256 = tuple(metadata.get("references_sha256", ()))
    references = [
        str(find_input_file(clip, settings.image, name))
        for name in reference_names(len(references_sha256))
    ]
    _check_weights(clip, config)
    request = ClipRequest(
        seed=metadata["seed"],
        image=image,
        image_sha256=metadata["input_sha256"],
        last_image=last_image,
        last_image_sha256=last_sha256,
        references=tuple(references),
        references_sha256=references_sha256,
        videos=videos,
        videos_sha256=hashes,
        prompt=metadata.get("prompt"),
        negative_prompt=metadata.get("negative_prompt"),
    )
    size, pair = metadata.get("cfg_parallel", 1), None
    if size == 2 and metadata["exact"] is not True:
        parallel = ParallelConfig(cfg_parallel_size=size)
        pair = replace(config, world_size=size, parallel=parallel, device=metadata["device"])
    return VerificationTask(clip=clip, config=config, request=request, pair_config=pair)


def _config(
    clip: ClipOnDisk, settings: VerificationSettings, gpus: Callable[[], list[Gpu]]
) -> PipelineConfig:
    metadata = clip.metadata
    if metadata["model"] == DUMMY_MODEL:
        message = (
            f"{clip.path.name!r} cannot be a clip of a run: its model is 'dummy', which writes no "
            "files"
        )
        raise RequestError(message, details={"clip": str(clip.path)})
    same = ("family", "revision", "variant", "dtype", "memory_opt", "channels_last")
    return PipelineConfig(
        world_size=1,
        model=ModelConfig(
            name=metadata["model"],
            **{name: metadata[name] for name in same},
            component_revisions=component_revisions(_recorded_components(metadata)),
            vae_tiling=metadata.get("vae_tiling", False),
            local_files_only=settings.local_files_only,
            loras=tuple(map(lora_from_metadata, metadata.get("lora", ()))),
            denoisers=tuple(Denoiser(**each) for each in metadata.get("denoiser", ())),
            attention_backend=metadata.get("attention_backend"),
        ),
        sampling=recorded_sampling(metadata),
        device=choose_device(metadata, gpus()) if metadata["device"] == "cuda" else "cpu",
        num_threads=metadata["num_threads"],
        deterministic=metadata["deterministic"],
        timeout_seconds=settings.timeout,
        start_timeout_seconds=settings.start_timeout,
    )


def _check_device(config: PipelineConfig) -> None:
    if config.device != "cpu":
        from svdpp.launch.process_group import check_devices  # imports torch

        check_devices(config.device, config.world_size)


def _recorded_components(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return OWNER/NAME@COMMIT of each component that is not from the model's repository.

    The values are from the clip's JSON. The keys are names of components.
    """
    return dict(metadata.get("components", {}))


def lora_from_metadata(recorded: Mapping[str, Any]) -> Lora:
    """Return a LoRA from its entry in a clip's metadata.

    Args:
        recorded: Entry of the JSON's list `lora`. Its keys are names of fields of `Lora`.
    """
    return Lora(**{name: value for name, value in recorded.items() if name != "ignored"})


def choose_device(metadata: Mapping[str, Any], gpus: Iterable[Gpu]) -> str:
    """Choose the device on which a clip that was made on a GPU is recomputed.

    Other processes, such as a server's ranks, may use some GPUs, so free memory decides.

    Args:
        metadata: Metadata of the clip.
        gpus: GPUs of this machine.

    Returns:
        GPU with the most free memory among the GPUs of the recorded type, such as "NVIDIA H200".
        `cuda:0` if this machine has no GPU of this type.
    """
    kind = metadata["conditions"].get("gpu")
    fitting = [gpu for gpu in gpus if kind in (None, gpu.name)]
    freest = max(fitting, key=lambda gpu: gpu.free_bytes, default=None)
    return "cuda:0" if freest is None else f"cuda:{freest.index}"


def _check_weights(clip: ClipOnDisk, config: PipelineConfig) -> None:
    recorded = clip.metadata["weights_fingerprint"]
    components = _recorded_components(clip.metadata)
    model = config.model
    if recorded is None and not components and not model.loras and not model.denoisers:
        return
    found = find_checkpoint(model)
    if found.fingerprint != recorded or found.external_components != components:
        raise ModelError(
            f"the weights of model {display_name(clip.metadata['model'])} have changed since "
            f"{clip.path.name!r} was made",
            "restore the weights, or make the clip again: svdpp run --overwrite",
            details={
                "clip": str(clip.path),
                "weights_fingerprint": recorded,
                "components": components,
            },
        )
