"""Files of tensors: latent checkpoints of clips, and tensors that are kept for verification."""

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
from svdpp.config.pipeline import ATTENTION_REPEATS
from svdpp.errors import InputError, OutputError
from svdpp.media import output_files
from svdpp.media.video import Frames
from svdpp.models.base import STATE, Audio, Tensors

#: Schema version of latent checkpoints. Version 2 was used only during development.
_SCHEMA_VERSION = 3
_KEY = re.compile(r"[0-9a-f]{64}")
_CHECKPOINT = re.compile(r"([0-9a-f]{64})_step(\d{1,6})\.safetensors", re.ASCII)


class LatentCheckpoints:
    """Folder of latent checkpoints, from which clips can resume after an interruption.

    A latent checkpoint is a file with a clip's packet between two steps. The file is named by a key
    and the number of finished steps. The key is a hash of everything in a clip's request on which
    the bits depend. `load` rejects a packet that was written under other conditions or with other
    weights.

    Args:
        folder: Folder of the files, which is created when the first packet is saved.
        conditions: Conditions of the rank; see `worker.device.conditions_of`.
        weights: SHA-256, in hex, of the weight files on this host, by file name. `load` compares
            them, because the key contains only times and sizes of these files. None: `load` does
            not compare weights.
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
        """Write a clip's packet to a latent checkpoint; remove the clip's earlier checkpoints.

        Args:
            key: Key of the clip; see `config.pipeline.latents_key`.
            packet: Packet whose tensors are on the CPU.
            in_host_memory: Names of the tensors that `load` does not move to the rank's device.

        Raises:
            OutputError: The folder cannot be written.
        """
        metadata = {
            "schema_version": _SCHEMA_VERSION,
            "next_step": packet.next_step,
            # Unix time is stored, because the monotonic clock starts again when the machine
            # reboots.
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
                # `save_file` is not used, because it first writes to a further temporary file,
                # which would remain if the rank were killed.
                temporary.write_bytes(save(packet.tensors, metadata=text))
            for step in saved_steps(self._folder, key):
                if step < packet.next_step:
                    checkpoint_path(self._folder, key, step).unlink(missing_ok=True)
        except (OutputError, SafetensorError, OSError) as error:
            reason = output_files.error_reason(error.__cause__ or error)
            raise OutputError(
                f"latent checkpoints cannot be written to {str(self._folder)!r}: {reason}",
                "check the folder's permissions and free space; clips go on without latent "
                "checkpoints, but cannot be resumed",
                details={
                    "folder": str(self._folder),
                    "clip": packet.clip,
                    "step": packet.next_step,
                },
            ) from error

    def unfit_error(
        self, key: str, clip: int, step: int, name: str, why: str, **details: object
    ) -> InputError:
        """Return the error for a latent checkpoint from which a clip cannot resume.

        The hint of the error is a command that removes the clip's latent checkpoints.

        Args:
            key: Key of the clip; see `config.pipeline.latents_key`.
            clip: Index of the clip in this run.
            step: Number of finished steps in the packet.
            name: Name of the clip for the message; "": the clip's index is used.
            why: Reason, as the end of a sentence that begins with "the latent checkpoint".
            details: Further details of the error.
        """
        path = checkpoint_path(self._folder, key, step)
        return InputError(
            f"{name or f'clip {clip}'} cannot go on after step {step}: the latent checkpoint {why}",
            f"rm {shlex.quote(str(self._folder))}/{key[:12]}*: the clip then starts again",
            details={"clip": clip, "step": step, "path": str(path), **details},
        )

    def load(self, key: str, clip: int, step: int, device: torch.device, name: str = "") -> Packet:
        """Return a clip's packet from the latent checkpoint that was written after `step` steps.

        Args:
            key: Key of the clip; see `config.pipeline.latents_key`.
            clip: Index of the clip in this run.
            step: Number of finished steps in the packet.
            device: Device for the tensors. Tensors that `save` got as `in_host_memory` stay on the
                CPU.
            name: Name of the clip for errors; "": the clip's index is used.

        Raises:
            InputError: The file is missing or damaged, or was written under other conditions or
                with other weights.
        """
        path = checkpoint_path(self._folder, key, step)
        unfit_error = partial(self.unfit_error, key, clip, step, name)
        if not path.exists():
            raise unfit_error("is missing")
        try:
            tensors, metadata = _read(path)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise unfit_error(f"cannot be read: {output_files.error_reason(error)}") from error
        if metadata["sha256"] != _sha256(tensors):
            raise unfit_error("is damaged: the hash of its tensors is wrong")
        for kind, current in (("conditions", self._conditions), ("weights", self._weights)):
            before = metadata.get(kind, {})
            # `ATTENTION_REPEATS` (whether attention gives equal bits for equal inputs) is not
            # compared. It is measured, so its values may differ between equal machines.
            names = (current.keys() | before.keys()) - {ATTENTION_REPEATS}
            # Hosts without a shared folder have only the weights of their own ranks, so a weight
            # file is compared only if the checkpoint and this host both have its hash.
            if kind == "weights":
                names = current.keys() & before.keys()
            for each in sorted(names):
                was, now = before.get(each), current.get(each)
                if was != now:
                    raise unfit_error(
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
    """Return the path of a clip's latent checkpoint after `step` steps, whether or not it exists.

    Args:
        folder: Folder of the latent checkpoints.
        key: Name of the clip's latent checkpoints; see `ClipRequest.latents_key`.
        step: Number of finished steps.
    """
    assert _KEY.fullmatch(key), f"not a key: {key!r}"
    return folder / f"{key}_step{step}.safetensors"


def list_checkpoints(folder: Path) -> set[tuple[str, int]]:
    """Return (key, finished steps) of all latent checkpoints in a folder, which need not exist."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return {(match[1], int(match[2])) for match in map(_CHECKPOINT.fullmatch, names) if match}


def saved_steps(folder: Path, key: str) -> list[int]:
    """Return the number of finished steps of each of a clip's latent checkpoints, sorted."""
    return sorted(step for other, step in list_checkpoints(folder) if other == key)


def remove_checkpoints(folder: Path, key: str) -> None:
    """Remove all latent checkpoints with `key` (of one clip) from a folder."""
    for step in saved_steps(folder, key):
        checkpoint_path(folder, key, step).unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        metadata = json.loads((file.metadata() or {})["svdpp"])
        if metadata["schema_version"] != _SCHEMA_VERSION:
            found = metadata["schema_version"]
            raise ValueError(f"its schema version is {found}, not {_SCHEMA_VERSION}")
        return {name: file.get_tensor(name).clone() for name in file.keys()}, metadata  # noqa: SIM118


def _sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + _bytes_of(tensors[name]))
    return digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Return the SHA-256, in hex, of a CPU tensor's contiguous little-endian bytes.

    Args:
        tensor: Tensor of any shape and dtype, in host memory. Its shape is not hashed.
    """
    return hashlib.sha256(_bytes_of(tensor)).hexdigest()


# --- tensors for verification -------------------------------------------------------------------

_STORED = re.compile(r"clip\d+_(step\d+(_branch\d)?|audio|frames)", re.ASCII)


def audio_hashes(audio: Audio | None) -> dict[str, Any]:
    """Return the hash and the sample rate of a clip's sound, as fields of the clip's metadata.

    Args:
        audio: Sound in host memory, int16 of shape (N, channels). None: the clip has no sound, and
            the result is empty.
    """
    if audio is None:
        return {}
    return {"audio_sha256": tensor_sha256(audio.samples), "audio_sample_rate": audio.rate}


class TensorStore:
    """Folder of tensors that a run keeps for verification, by clip and name.

    The names are:
    - `step7`: latent after seven steps, and the history of a multistep solver;
    - `step7_branch0`: prediction of the step with index 7 for guidance branch 0;
    - `frames` and `audio`.

    Args:
        folder: Existing folder.
        send: Callback that gets the name and the content of each file, and passes both to `put` in
            another process. None: this process writes the files itself.
    """

    def __init__(self, folder: Path, send: Callable[[str, bytes], None] | None = None) -> None:
        self._folder = folder
        self._keep = self.put if send is None else send

    def put(self, name: str, data: bytes) -> None:
        """Write a file of tensors, which another process has sent, to the store for verification.

        Raises:
            ValueError: `name` is not the name of a file in a tensor store.
        """
        if not _STORED.fullmatch(name):
            raise ValueError(f"{name!r} is not a file name of a tensor store, such as clip0_step7")
        (self._folder / name).write_bytes(data)

    def keep(self, clip: int, name: str, tensors: Tensors) -> None:
        """Store CPU tensors of a clip for verification, under a name such as `step7`.

        Args:
            clip: Index of the clip.
            name: Name under which `load` finds the tensors.
            tensors: Tensors by name, of any shape and dtype.
        """
        contiguous = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        self._keep(f"clip{clip}_{name}", save(contiguous))

    def load(self, clip: int, name: str) -> Tensors:
        """Return the tensors of a clip that are kept for verification under a name such as `step7`.

        Raises:
            FileNotFoundError: No tensors of this clip were stored under this name.
        """
        tensors: Tensors = load_file(self._folder / f"clip{clip}_{name}")
        return tensors

    def has(self, clip: int, name: str) -> bool:
        """Whether tensors of a clip are kept for verification under a name such as `step7`."""
        return (self._folder / f"clip{clip}_{name}").exists()

    def forget(self, clip: int, *names: str) -> None:
        """Remove a clip's tensors that were kept for verification under the given names, if any."""
        for name in names:
            (self._folder / f"clip{clip}_{name}").unlink(missing_ok=True)


def store_result(store: TensorStore, clip: int, frames: Frames, audio: Audio | None) -> None:
    """Store a clip's frames, and its sound if there is any, for verification.

    Args:
        store: Store that keeps the tensors.
        clip: Index of the clip.
        frames: Frames of the clip, uint8 of shape (F, H, W, 3).
        audio: Sound of the clip; None: the clip has no sound.
    """
    store.keep(clip, "frames", {"frames": torch.from_numpy(frames)})
    if audio is not None:
        store.keep(clip, "audio", {"audio": audio.samples})


def solver_history(tensors: Tensors) -> Tensors:
    """Return the tensors of a packet that contain the history of a multistep solver."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.startswith(STATE) and tensor.is_floating_point()
    }
