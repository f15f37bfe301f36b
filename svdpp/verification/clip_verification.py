"""Verification of finished clips, by recomputing each clip on one device.

There are three checks:
- Does diffusers compute a latent with the recorded hash?
- Does diffusers compute frames (and sound) with the recorded hashes?
- Does the file on disk contain the clip that the metadata describe?
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from svdpp.config.pipeline import repeats_bits
from svdpp.config.tolerance import BITWISE, Tolerance
from svdpp.driver.supervisor import Observer
from svdpp.errors import OutOfMemoryError, SvdppError
from svdpp.launch.process_lifetime import temp_folder
from svdpp.verification.clip_distance import has_other_bits, measure_distances
from svdpp.verification.clip_files import ClipCheck, ClipOnDisk, check_file
from svdpp.verification.clip_result import ClipVerification, VerificationTask
from svdpp.verification.verify import run_reference
from svdpp.worker.messages import ClipDone, Event
from svdpp.worker.tensor_files import TensorStore


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
