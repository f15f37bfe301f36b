"""Comparison of the tensors of a finished clip with the tensors of the reference.

A finished clip usually stores only hashes of its tensors, which show whether bits differ, but not
by how much. The tensors themselves are available in two cases:
- Frames that are stored as PNG files, which are lossless, can be read.
- A clip that was made by two ranks which divided each batch of the denoiser (`cfg_parallel` 2) is
  made again in the same way. Its new tensors are used only if they have the recorded hashes. The
  reference does not divide batches, so its bits can differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from svdpp.config.tolerance import Tolerance
from svdpp.errors import SvdppError
from svdpp.launch.process_lifetime import temp_folder
from svdpp.media import video
from svdpp.models.base import LATENTS
from svdpp.verification.clip_files import ClipCheck, ClipOnDisk
from svdpp.verification.clip_result import ClipVerification, VerificationTask
from svdpp.verification.result import CheckLocation, TensorKind, compare_tensors
from svdpp.verification.verify import run_pipelined
from svdpp.worker.tensor_files import TensorStore, tensor_sha256

_HASHES = {"latent": "latents_sha256", "frames": "frames_sha256", "audio": "audio_sha256"}


def measure_distances(
    tasks: Sequence[VerificationTask],
    results: Sequence[ClipVerification],
    reference: TensorStore,
    tolerance: Tolerance,
) -> None:
    """Compare the tensors of finished clips with the reference's, where hashes differ.

    If only the hash of a tensor is stored, the tensor cannot be compared, and its check stays
    failed. There is one exception: if the clip's frames can be compared but its latent cannot, the
    check of the latent becomes unknown (`equal` is None).

    Args:
        tasks: Finished clips with the same configuration.
        results: Results of the clips so far, in the order of `tasks`. They are changed in place.
        reference: Store with the final latent, frames and sound that the reference computed, for
            each clip whose hashes differ, by the index of the clip in `tasks`.
        tolerance: Allowed difference of each element.
    """
    pending = [index for index, result in enumerate(results) if has_other_bits(result.checks)]
    by_pairs = [index for index in pending if tasks[index].pair_config is not None]
    with temp_folder("svdpp-verify-") as folder:
        error = _remake_clips([tasks[index] for index in by_pairs], folder)
        remade = TensorStore(folder)
        for index in pending:
            is_remade = index in by_pairs and error is None
            remade_index = by_pairs.index(index) if is_remade else None
            task = tasks[index]
            stored = _StoredTensors(task.clip, remade, remade_index, steps=task.num_steps)
            checks = results[index].checks
            results[index].checks = [
                _measure_check(check, stored, index, reference, tolerance, error)
                for check in checks
            ]
            _mark_latent_unknown(results[index])


def has_other_bits(checks: Sequence[ClipCheck]) -> bool:
    """Whether the recomputed latent, frames or sound has another hash than the clip's metadata."""
    return any(check.what in _HASHES and not check.equal for check in checks)


def _remake_clips(tasks: Sequence[VerificationTask], folder: Path) -> SvdppError | None:
    """Make finished clips again with a pair of ranks (`cfg_parallel` 2).

    Return the error if this fails, else None.
    """
    if not tasks:
        return None
    config = tasks[0].pair_config
    assert config is not None
    try:
        run_pipelined(config, [task.request for task in tasks], folder)
    except SvdppError as error:  # for example, this machine has only one GPU, and a pair needs two
        return error
    return None


class _StoredTensors:
    """Stored tensors of a finished clip, from its PNG files or from a run that made the clip again.

    Args:
        clip: Finished clip.
        remade: Store with the tensors of clips that were made again.
        remade_index: Index of the clip in `remade`; None: the clip was not made again.
        steps: Number of steps of the clip.
    """

    def __init__(
        self, clip: ClipOnDisk, remade: TensorStore, remade_index: int | None, steps: int
    ) -> None:
        self._clip, self._remade, self._remade_index = clip, remade, remade_index
        self.steps = steps

    def tensor(self, what: str) -> torch.Tensor | None:
        """Return the clip's stored latent, frames or sound.

        None: the tensor is not available, or its hash is not the hash in the clip's metadata.

        Args:
            what: `latent`, `frames` or `audio`.
        """
        recorded = self._clip.metadata.get(_HASHES[what])
        found = None
        if self._remade_index is not None:
            found = load_stored_tensor(self._remade, self._remade_index, what, self.steps)
        if found is None and what == "frames" and self._clip.metadata["format"] == "frames":
            found = torch.from_numpy(video.read_frames(self._clip.path, "frames"))
        return found if found is not None and tensor_sha256(found) == recorded else None


def load_stored_tensor(store: TensorStore, clip: int, what: str, steps: int) -> torch.Tensor | None:
    """Return a clip's final latent, frames or audio from a tensor store; None if it is not there.

    Args:
        store: Store of the clip's tensors.
        clip: Index of the clip in the store.
        what: `latent`, `frames` or `audio`.
        steps: Number of steps of the clip, after which the latent is final.

    Returns:
        Latent, with the shape that the model gives it; frames, uint8 of shape (F, H, W, 3); or
        audio, int16 of shape (N, channels).
    """
    name, key = (f"step{steps}", LATENTS) if what == "latent" else (what, what)
    return store.load(clip, name)[key] if store.has(clip, name) else None


def _measure_check(
    check: ClipCheck,
    stored: _StoredTensors,
    index: int,
    reference: TensorStore,
    tolerance: Tolerance,
    error: SvdppError | None,
) -> ClipCheck:
    if check.what not in _HASHES or check.equal:
        return check
    expected = load_stored_tensor(reference, index, check.what, stored.steps)
    ours = stored.tensor(check.what)
    if expected is None or ours is None or ours.shape != expected.shape:
        why = "only the hash is stored, and the clip cannot be made again here"
        return replace(check, detail=why if error is None else f"{why}: {error}")
    kinds: dict[str, TensorKind] = {"latent": "final_latent", "frames": "frames", "audio": "audio"}
    location, axes = CheckLocation(index, stored.steps, 0), "FHWC" if check.what == "frames" else ""
    found = compare_tensors(kinds[check.what], ours, expected, location, axes, tolerance)
    word = "within tolerance" if found.equal else f"beyond {tolerance}"
    return replace(
        check,
        equal=found.equal,
        within=found.equal,
        max_abs_diff=found.max_abs_diff,
        max_ulp=found.max_ulp,
        detail=f"{word} (largest difference {found.distance})",
    )


def _mark_latent_unknown(result: ClipVerification) -> None:
    """Set the check of a clip's latent to unknown if only the clip's frames could be compared."""
    by_name = {check.what: check for check in result.checks}
    latent, frames = by_name["latent"], by_name["frames"]
    if frames.max_abs_diff is not None and latent.max_abs_diff is None and not latent.equal:
        result.checks[result.checks.index(latent)] = replace(latent, equal=None)
