"""The tensors that a run keeps for comparison: their hashes, and a folder of files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from svdpp.media.video import Frames
from svdpp.models.base import STATE, Audio, Tensors

_NAME = re.compile(r"clip\d+_(step\d+(_branch\d)?|audio|frames)", re.ASCII)


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
    """A folder with what a run keeps of each clip, in host memory, by name.

    The names are `step7` (the latent after seven steps, and a multistep solver's history),
    `step7_branch0` (what step 7 predicts for a branch of the guidance), `frames` and `audio`.

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

    def keep(self, clip: int, name: str, tensors: Tensors) -> None:
        """Keeps tensors of `clip`."""
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        self._keep(f"clip{clip}_{name}", save(contiguous))

    def load(self, clip: int, name: str) -> Tensors:
        """The kept tensors; FileNotFoundError if there are none."""
        tensors: Tensors = load_file(self._folder / f"clip{clip}_{name}")
        return tensors

    def has(self, clip: int, name: str) -> bool:
        """Whether tensors of `clip` are kept by that name."""
        return (self._folder / f"clip{clip}_{name}").exists()

    def forget(self, clip: int, *names: str) -> None:
        """Removes the kept tensors, if there are any."""
        for name in names:
            (self._folder / f"clip{clip}_{name}").unlink(missing_ok=True)


def keep_result(store: TensorStore, clip: int, frames: Frames, audio: Audio | None) -> None:
    """Keeps the frames of `clip`, and its sound if it has any."""
    store.keep(clip, "frames", {"frames": torch.from_numpy(frames)})
    if audio is not None:
        store.keep(clip, "audio", {"audio": audio.samples})


def solver_history(tensors: Tensors) -> Tensors:
    """Those tensors of a packet that hold earlier samples or outputs of a multistep solver."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(STATE) and tensor.is_floating_point()
    }
