"""Owns what a run leaves behind for comparison: hashes, and latents and frames kept in a folder."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from svdpp.models.interface import LATENTS, Frames


def tensor_sha256(tensor: torch.Tensor) -> str:
    """sha256 of the tensor's contiguous little-endian bytes, in its own dtype and shape order."""
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


class Evidence:
    """A folder with the latents of each clip at chosen steps, and its frames.

    Args:
        folder: exists; one process writes a given clip and step.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def keep_latent(
        self, clip: int, step: int, latent: torch.Tensor, *, walker: int | None = None
    ) -> None:
        """Keeps the latent of `clip` with `step` steps done; of a draft, that which a rank has."""
        path = self._path(clip, walker, f"step{step}.safetensors")
        save_file({LATENTS: latent.detach().cpu().contiguous()}, path)

    def latent(self, clip: int, step: int, *, walker: int | None = None) -> torch.Tensor:
        """The kept latent; FileNotFoundError where there is none."""
        path = self._path(clip, walker, f"step{step}.safetensors")
        latent: torch.Tensor = load_file(path)[LATENTS]
        return latent

    def keep_frames(self, clip: int, frames: Frames, *, walker: int | None = None) -> None:
        """Keeps the frames of `clip`; of a draft, those that a rank came to."""
        np.save(self._path(clip, walker, "frames.npy"), frames, allow_pickle=False)

    def frames(self, clip: int, *, walker: int | None = None) -> Frames:
        """The kept frames; FileNotFoundError where there are none."""
        path = self._path(clip, walker, "frames.npy")
        frames: Frames = np.load(path, allow_pickle=False)
        return frames

    def _path(self, clip: int, walker: int | None, what: str) -> Path:
        whose = "" if walker is None else f"_rank{walker}"
        return self._folder / f"clip{clip}{whose}_{what}"
