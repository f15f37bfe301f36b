"""Verification of finished clips, by recomputing each clip on one device.

There are three checks:
- Does diffusers compute a latent with the recorded hash?
- Does diffusers compute frames (and sound) with the recorded hashes?
- Does the file on disk contain the clip that the metadata describe?
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from svdpp.config import (
    DUMMY_MODEL,
    ClipRequest,
    Denoiser,
    Lora,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
)
from svdpp.config.pipeline import LAST_IMAGE, reference_names, repeats_bits
from svdpp.config.tolerance import BITWISE, Tolerance
from svdpp.driver.clip_metadata import recorded_sampling
from svdpp.driver.supervisor import Observer
from svdpp.errors import ModelError, OutOfMemoryError, RequestError, SvdppError
from svdpp.launch import process_group
from svdpp.launch.gpus import Gpu, visible_gpus
from svdpp.launch.process_lifetime import temp_folder
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.files import display_name
from svdpp.models.repositories import component_revisions
from svdpp.verification.clip_distance import has_other_bits, measure_distances
from svdpp.verification.clip_files import (
    ClipCheck,
    ClipOnDisk,
    check_file,
    find_input_file,
    read_clip,
)
from svdpp.verification.clip_result import ClipVerification, VerificationTask
from svdpp.verification.verify import run_reference
from svdpp.worker.messages import ClipDone, Event
from svdpp.worker.tensor_files import TensorStore


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


def verify_clips(
    tasks: Sequence[VerificationTask],
    observers: Sequence[Observer] = (),
    tolerance: Tolerance = BITWISE,
) -> list[ClipVerification]:
    """Recompute finished clips with the same configuration on one device, and compare the results.

    Args:
        tasks: Tasks with equal configurations, at least one.
        observers: Callbacks that get (0, event) for each event of the process that recomputes.
        tolerance: Allowed difference of each element. It has an effect only on tensors that are
            available (see `clip_distance`), such as frames in PNG files. All other tensors must
            have the recorded hash.

    Returns:
        Result for each clip. If an error ends the process that recomputes, this error is the result
        of all clips that were not recomputed.
    """
    results = [ClipVerification(path=task.clip.path) for task in tasks]
    files: dict[int, Future[ClipCheck]] = {}
    with (
        temp_folder("svdpp-verify-") as folder,
        # Files are checked in another thread, because this thread must keep reading the heartbeats
        # of the process that recomputes. Otherwise that process would seem to have stalled.
        ThreadPoolExecutor(max_workers=1) as executor,
    ):

        def compare(rank: int, event: Event) -> None:  # noqa: ARG001
            if isinstance(event, ClipDone):
                index = event.clip
                results[index].checks = list(compare_hashes(tasks[index].clip, event.metadata))
                is_kept = not tolerance.is_bitwise and has_other_bits(results[index].checks)
                clip = tasks[index].clip
                files[index] = executor.submit(_check_file, clip, folder, index, is_kept)

        try:
            run_reference(
                tasks[0].config,
                [task.request for task in tasks],
                steps=() if tolerance.is_bitwise else (tasks[0].num_steps,),
                tensor_folder=folder,
                observers=(compare, *observers),
            )
        except SvdppError as error:
            if isinstance(error, OutOfMemoryError):
                error.hint = "verify the clip on a machine with more memory"
            for result in results:
                result.error = None if result.checks else error
        for index, check in files.items():
            try:
                results[index].checks.append(check.result())
            # the check of a file fails if this machine has no ffmpeg, for example
            except SvdppError as error:
                results[index].error = error
        if not tolerance.is_bitwise:
            measure_distances(tasks, results, TensorStore(folder), tolerance)
    return results


def compare_hashes(clip: ClipOnDisk, recomputed: dict[str, Any]) -> Iterator[ClipCheck]:
    """Compare recorded hashes of a clip's latent, frames and sound with recomputed hashes.

    Args:
        clip: Finished clip.
        recomputed: Metadata of the recomputed clip, with the hashes of its tensors.
    """
    exact = clip.metadata["exact"]
    reason = (
        ""
        if exact is True
        else 'the metadata of the clip say "exact": "unproven", so bits may differ'
    )
    if clip.metadata.get("memory_pressure"):
        reason = "GPU memory was short when the clip was made: cuDNN may have used other kernels"
    elif recomputed.get("memory_pressure"):
        reason = "GPU memory was short in the reference: cuDNN may have used other kernels"
    elif reason and clip.metadata.get("cfg_parallel", 1) > 1:
        reason = "a pair of ranks divided batches, so bits may differ: use a tolerance (atol)"
    elif reason and not repeats_bits(clip.metadata.get("conditions", {})):
        backend = clip.metadata.get("attention_backend")
        reason = (
            f"the attention backend {backend} gave different bits for equal inputs: use a "
            "tolerance (atol)"
        )

    def check(what: Literal["latent", "frames", "audio"], name: str) -> ClipCheck:
        recorded, found = clip.metadata.get(name), recomputed.get(name)
        is_equal = recorded == found
        return ClipCheck(what=what, equal=is_equal, recorded=recorded, found=found, detail=reason)

    yield check("latent", "latents_sha256")
    yield check("frames", "frames_sha256")
    # Clips without sound, and all clips of svdpp 0.4, have no hash of the sound.
    if clip.metadata.get("audio_sha256") is not None:
        yield check("audio", "audio_sha256")


def _check_file(clip: ClipOnDisk, folder: Path, index: int, is_kept: bool) -> ClipCheck:
    store, sound = TensorStore(folder), None
    try:
        if store.has(index, "audio") and (rate := clip.metadata.get("audio_sample_rate")):
            sound = store.load(index, "audio")["audio"].numpy(), rate
        return check_file(clip, store.load(index, "frames")["frames"].numpy(), sound)
    finally:
        if not is_kept:
            store.forget(index, "frames", "audio")


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
        process_group.check_devices(config.device, config.world_size)
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
