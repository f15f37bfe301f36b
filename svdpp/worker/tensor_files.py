"""Files of tensors: latent checkpoints at each transfer, and tensors kept for verification."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from svdpp.comm.packet import Packet
from svdpp.errors import InputError, OutputError
from svdpp.media import output_files
from svdpp.media.video import Frames
from svdpp.models.base import STATE, Audio, Tensors

#: Version of the files. Version 2 was used during development, partly with less content.
_SCHEMA_VERSION = 3
_KEY = re.compile(r"[0-9a-f]{64}")
_CHECKPOINT = re.compile(r"([0-9a-f]{64})_step(\d{1,6})\.safetensors", re.ASCII)


class LatentCheckpoints:
    """Folder of packets, each named by a key and by the number of steps done.

    The key is a hash of all that bits depend on in the request. `load` refuses a packet that was
    written under other conditions or with other weights.

    Args:
        folder: Folder, created when the first packet is saved.
        conditions: Conditions of the rank; see `worker.device.conditions_of`.
        weights: SHA-256, in hex, of the weight files on this host, by name; the key depends only on
            their times and sizes. None: not compared.
    """

    def __init__(
        self,
        folder: Path,
        conditions: Mapping[str, Any],
        weights: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = folder
        self._conditions = dict(conditions)
        self._weights = dict(weights or {})

    def save(self, key: str, packet: Packet, in_host_memory: Sequence[str] = ()) -> None:
        """Write a packet, and remove those of earlier steps of its clip.

        Args:
            key: Key of the clip; see `config.pipeline.latents_key`.
            packet: Packet whose tensors are on the CPU.
            in_host_memory: Names of the tensors that `load` keeps on the CPU.

        Raises:
            OutputError: The folder cannot be written.
        """
        metadata = {
            "schema_version": _SCHEMA_VERSION,
            "next_step": packet.next_step,
            # Unix time, because a monotonic clock starts again with the machine.
            "begun_at": time.time() - (time.monotonic() - packet.begun_at),
            "compute_seconds": packet.compute_seconds,
            "memory_pressure": packet.memory_pressure,
            "conditions": self._conditions,
            "weights": self._weights,
            "in_host_memory": list(in_host_memory),
            "sha256": _sha256(packet.tensors),
        }
        path = checkpoint_path(self._folder, key, packet.next_step)
        text = {"svdpp": json.dumps(metadata)}
        try:
            with output_files.atomic_output(str(path), ".safetensors") as temporary:
                # Not by `save_file`, which writes to a file of its own and then replaces the locked
                # one; a killed rank would leave that file behind.
                temporary.write_bytes(save(packet.tensors, metadata=text))
            for step in saved_steps(self._folder, key):
                if step < packet.next_step:
                    checkpoint_path(self._folder, key, step).unlink(missing_ok=True)
        except (OutputError, SafetensorError, OSError) as error:
            reason = output_files.error_reason(error.__cause__ or error)
            raise OutputError(
                f"no latent checkpoints in {str(self._folder)!r}: {reason}",
                "clips go on without them, but cannot be resumed",
                details={
                    "folder": str(self._folder),
                    "clip": packet.clip,
                    "step": packet.next_step,
                },
            ) from error

    def unfit(
        self, key: str, clip: int, step: int, name: str, why: str, **details: object
    ) -> InputError:
        """Return the error for a packet that a clip cannot resume from, with a hint to remove it.

        Args:
            key: Key of the clip; see `config.pipeline.latents_key`.
            clip: Index of the clip in this run.
            step: Number of steps that were done.
            name: Name of the clip; "": its index.
            why: Reason, as the end of a sentence that begins with "its latent checkpoint".
            details: Further details of the error.
        """
        path = checkpoint_path(self._folder, key, step)
        return InputError(
            f"{name or f'clip {clip}'} cannot go on after step {step}: its latent checkpoint {why}",
            f"rm {shlex.quote(str(self._folder))}/{key[:12]}*: the clip then starts again",
            details={"clip": clip, "step": step, "path": str(path), **details},
        )

    def load(self, key: str, clip: int, step: int, device: torch.device, name: str = "") -> Packet:
        """Return the packet that was written after `step` steps.

        Args:
            key: Key of the clip; see `config.pipeline.latents_key`.
            clip: Index of the clip in this run.
            step: Number of steps that were done.
            device: Device of the tensors, except those that were in host memory.
            name: Name of the clip in errors; "": its index.

        Raises:
            InputError: The file is missing or damaged, or was written under other conditions or
                with other weights.
        """
        path = checkpoint_path(self._folder, key, step)
        unfit = partial(self.unfit, key, clip, step, name)
        if not path.exists():
            raise unfit("is not there")
        try:
            tensors, metadata = _read(path)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise unfit(f"cannot be read: {output_files.error_reason(error)}") from error
        if metadata["sha256"] != _sha256(tensors):
            raise unfit("is damaged: its tensors have another hash")
        for kind, current in (("conditions", self._conditions), ("weights", self._weights)):
            before = metadata.get(kind, {})
            # Hosts without a common folder have only the weights of their own ranks, so only names
            # that both have are compared.
            names = current.keys() | before.keys()
            if kind == "weights":
                names = current.keys() & before.keys()
            for each in sorted(names):
                if (was := before.get(each)) != (now := current.get(each)):
                    raise unfit(
                        f"was written with another {each}: {was}, now {now}", before=was, now=now
                    )
        stays = metadata["in_host_memory"]
        placed = {name: t if name in stays else t.to(device) for name, t in tensors.items()}
        age = max(0.0, time.time() - float(metadata["begun_at"]))
        packet = Packet(clip, step, time.monotonic() - age, placed)
        packet.memory_pressure = bool(metadata["memory_pressure"])
        packet.compute_seconds = float(metadata["compute_seconds"])
        return packet


def checkpoint_path(folder: Path, key: str, step: int) -> Path:
    """Return the path of a packet after `step` steps, which need not exist."""
    assert _KEY.fullmatch(key), f"not a key: {key!r}"
    return folder / f"{key}_step{step}.safetensors"


def list_checkpoints(folder: Path) -> set[tuple[str, int]]:
    """Return (key, steps done) of all packets in a folder, which need not exist."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return {(match[1], int(match[2])) for match in map(_CHECKPOINT.fullmatch, names) if match}


def saved_steps(folder: Path, key: str) -> list[int]:
    """Return the numbers of steps of the packets of `key` in a folder, ascending."""
    return sorted(step for other, step in list_checkpoints(folder) if other == key)


def remove_checkpoints(folder: Path, key: str) -> None:
    """Remove all packets of `key`."""
    for step in saved_steps(folder, key):
        checkpoint_path(folder, key, step).unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        metadata = json.loads((file.metadata() or {})["svdpp"])
        if metadata["schema_version"] != _SCHEMA_VERSION:
            raise ValueError(f"schema version {metadata['schema_version']}")
        return {name: file.get_tensor(name).clone() for name in file.keys()}, metadata  # noqa: SIM118


def _sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + _bytes_of(tensors[name]))
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Return the SHA-256, in hex, of a CPU tensor's contiguous little-endian bytes."""
    return hashlib.sha256(_bytes_of(tensor)).hexdigest()


# --- tensors for verification -------------------------------------------------------------------

_STORED = re.compile(r"clip\d+_(step\d+(_branch\d)?|audio|frames)", re.ASCII)


def audio_hashes(audio: Audio | None) -> dict[str, Any]:
    """Return the hash and the sample rate of a clip's sound, as metadata.

    Args:
        audio: Sound in host memory, int16 of shape (N, channels). None: the clip has none, and the
            result is empty.
    """
    if audio is None:
        return {}
    return {"audio_sha256": tensor_sha256(audio.samples), "audio_sample_rate": audio.rate}


class TensorStore:
    """Folder of tensors that a run keeps for verification, by clip and name.

    The names are `step7` (the latent after seven steps, and a multistep solver's history),
    `step7_branch0` (the prediction of step 7 for a branch of the guidance), `frames` and `audio`.

    Args:
        folder: Existing folder.
        send: Callback that gets the name and content of each file, to pass them to `put` in another
            process. None: this process writes the files.
    """

    def __init__(self, folder: Path, send: Callable[[str, bytes], None] | None = None) -> None:
        self._folder = folder
        self._keep = self.put if send is None else send

    def put(self, name: str, data: bytes) -> None:
        """Write a file that another process has sent.

        Raises:
            ValueError: `name` is not that of a tensor store's file.
        """
        if not _STORED.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of a tensor store's file")
        (self._folder / name).write_bytes(data)

    def keep(self, clip: int, name: str, tensors: Tensors) -> None:
        """Keep CPU tensors of a clip under a name such as `step7`."""
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        self._keep(f"clip{clip}_{name}", save(contiguous))

    def load(self, clip: int, name: str) -> Tensors:
        """Return the tensors that were kept under a name.

        Raises:
            FileNotFoundError: No tensors of this clip and name were kept.
        """
        tensors: Tensors = load_file(self._folder / f"clip{clip}_{name}")
        return tensors

    def has(self, clip: int, name: str) -> bool:
        """Whether tensors of a clip are kept under a name."""
        return (self._folder / f"clip{clip}_{name}").exists()

    def forget(self, clip: int, *names: str) -> None:
        """Remove the tensors that are kept under these names, if there are any."""
        for name in names:
            (self._folder / f"clip{clip}_{name}").unlink(missing_ok=True)


def store_result(store: TensorStore, clip: int, frames: Frames, audio: Audio | None) -> None:
    """Keep the frames of a clip, uint8 of shape (F, H, W, 3), and its sound, if it has any."""
    store.keep(clip, "frames", {"frames": torch.from_numpy(frames)})
    if audio is not None:
        store.keep(clip, "audio", {"audio": audio.samples})


def solver_history(tensors: Tensors) -> Tensors:
    """Return the tensors of a packet that hold earlier samples or outputs of a multistep solver."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(STATE) and tensor.is_floating_point()
    }
