"""The tensors that a run keeps for comparison: their hashes, and a folder of files."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save

from svdpp.media.video import Frames
from svdpp.models.base import LATENTS, PREDICTION, STATE, Audio, Tensors

_NAME = re.compile(r"clip\d+_((step\d+(_branch\d)?|audio)\.safetensors|frames\.npy)", re.ASCII)


def tensor_sha256(tensor: torch.Tensor) -> str:
    """The sha256 of a CPU tensor's contiguous little-endian bytes, in its dtype."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def audio_hashes(audio: Audio | None) -> dict[str, Any]:
    """What a clip's metadata say of its sound, in host memory; nothing if it has none."""
    if audio is None:
        return {}
    return {"audio_sha256": tensor_sha256(audio.samples), "audio_sample_rate": audio.rate}


class TensorStore:
    """A folder with the latents of each clip at certain steps, and its frames.

    `send` gets each file's name and content, for another process to pass to `put`; None: files
    are written to `folder`, which exists.
    """

    def __init__(self, folder: Path, send: Callable[[str, bytes], None] | None = None) -> None:
        self._folder = folder
        self._keep = self.put if send is None else send

    def put(self, name: str, data: bytes) -> None:
        """Writes a file that another process has sent; ValueError if its name is not valid."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a tensor store's file")
        (self._folder / name).write_bytes(data)

    def keep_latent(
        self, clip: int, step: int, latent: torch.Tensor, history: Tensors | None = None
    ) -> None:
        """Keeps CPU tensors of `clip` after `step` steps."""
        self._save(f"clip{clip}_step{step}", {LATENTS: latent, **(history or {})})

    def latent(self, clip: int, step: int) -> torch.Tensor:
        """The kept latent; FileNotFoundError if there is none."""
        return self._load(f"clip{clip}_step{step}")[LATENTS]

    def history(self, clip: int, step: int) -> Tensors:
        """The kept history of a multistep solver; empty if there is none."""
        return solver_history(self._load(f"clip{clip}_step{step}"))

    def keep_prediction(self, clip: int, step: int, branch: int, prediction: torch.Tensor) -> None:
        """Keeps what `step` of `clip` predicts for one branch of the guidance, in host memory."""
        self._save(f"clip{clip}_step{step}_branch{branch}", {PREDICTION: prediction})

    def has_prediction(self, clip: int) -> bool:
        """Whether the predictions of the clip's steps are kept."""
        return (self._folder / f"clip{clip}_step0_branch0.safetensors").exists()

    def prediction(self, clip: int, step: int, branch: int) -> torch.Tensor:
        """The kept prediction; FileNotFoundError if there is none."""
        return self._load(f"clip{clip}_step{step}_branch{branch}")[PREDICTION]

    def keep_frames(self, clip: int, frames: Frames) -> None:
        """Keeps the frames of `clip`."""
        buffer = io.BytesIO()
        np.save(buffer, frames, allow_pickle=False)
        self._keep(f"clip{clip}_frames.npy", buffer.getvalue())

    def frames(self, clip: int) -> Frames:
        """The kept frames; FileNotFoundError if there are none."""
        frames: Frames = np.load(self._folder / f"clip{clip}_frames.npy", allow_pickle=False)
        return frames

    def keep_audio(self, clip: int, audio: Audio | None) -> None:
        """Keeps the sound of `clip`, in host memory, if it has any."""
        if audio is not None:
            self._save(f"clip{clip}_audio", {"samples": audio.samples})

    def has_audio(self, clip: int) -> bool:
        """Whether the clip has sound."""
        return (self._folder / f"clip{clip}_audio.safetensors").exists()

    def audio(self, clip: int) -> torch.Tensor:
        """The kept samples, (N, channels); FileNotFoundError if there are none."""
        return self._load(f"clip{clip}_audio")["samples"]

    def forget_frames(self, clip: int) -> None:
        """Removes the kept frames and sound of `clip`, if there are any."""
        for name in (f"clip{clip}_frames.npy", f"clip{clip}_audio.safetensors"):
            (self._folder / name).unlink(missing_ok=True)

    def _save(self, name: str, tensors: Tensors) -> None:
        data = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
        self._keep(f"{name}.safetensors", data)

    def _load(self, name: str) -> Tensors:
        tensors: Tensors = load_file(self._folder / f"{name}.safetensors")
        return tensors


def solver_history(tensors: Tensors) -> Tensors:
    """Those tensors of a packet that hold earlier samples or outputs of a multistep solver."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(STATE) and tensor.is_floating_point()
    }
