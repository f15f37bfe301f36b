"""Latent checkpoints: packets written to disk at each transfer, also as svdpp 0.3 wrote them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from svdpp.comm.packet import Packet
from svdpp.config import SamplingConfig
from svdpp.errors import InputError, OutputError
from svdpp.media import output_files
from svdpp.models.base import GENERATOR, LATENTS, STRUCTURE, Tensors

_SCHEMA_VERSION = 2
_KEY = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"([0-9a-f]{64})_step(\d{1,6})\.safetensors", re.ASCII)


class LatentCheckpoints:
    """A folder of packets, each named by a key and the number of steps done.

    The key is a hash of everything that the latent's bits depend on, so a request never gets the
    packet of another one.

    `conditions` are what bits depend on besides the request; `load` refuses a packet written
    under other ones.
    """

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        self._folder = folder
        self._conditions = dict(conditions)

    def save(self, key: str, packet: Packet, in_host_memory: Sequence[str] = ()) -> None:
        """Writes `packet`, whose tensors are on the CPU; removes those of earlier steps.

        `load` leaves the tensors named in `in_host_memory` on the CPU.
        """
        metadata = {
            "schema_version": _SCHEMA_VERSION,
            "next_step": packet.next_step,
            "begun_at": packet.begun_at,
            "compute_seconds": packet.compute_seconds,
            "memory_pressure": packet.memory_pressure,
            "conditions": self._conditions,
            "in_host_memory": list(in_host_memory),
            "sha256": _sha256(packet.tensors),
        }
        path = path_of(self._folder, key, packet.next_step)
        text = {"svdpp": json.dumps(metadata)}
        try:
            with output_files.atomic_output(str(path), ".safetensors") as temporary:
                # Not by `save_file`, which writes under a name of its own and then replaces the
                # locked file: a killed rank would leave it behind.
                temporary.write_bytes(save(packet.tensors, metadata=text))
            for step in saved_steps(self._folder, key):
                if step < packet.next_step:
                    path_of(self._folder, key, step).unlink(missing_ok=True)
        except (OutputError, SafetensorError, OSError) as error:
            raise OutputError(
                f"no latent checkpoints in {str(self._folder)!r}: {_reason(error)}",
                "clips go on without them, but cannot be resumed",
            ) from error

    def load(self, key: str, clip: int, step: int, device: torch.device) -> Packet:
        """The packet written after `step` steps, as `clip` of this run, on `device`."""
        path = path_of(self._folder, key, step)
        hint = f"delete {path.name!r}: the clip then starts again"
        try:
            tensors, metadata = _read(path)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            reason = output_files.reason(error)
            raise InputError(
                f"the latent checkpoint {path.name!r} cannot be read: {reason}", hint
            ) from error
        pairs = {
            "conditions": (metadata["conditions"], self._conditions),
            "sha256": (_sha256(tensors), metadata["sha256"]),
        }
        for name, (actual, needed) in pairs.items():
            if actual != needed:
                raise InputError(
                    f"the latent checkpoint {path.name!r} does not fit: its {name} are {actual}, "
                    f"not {needed}",
                    hint,
                )
        stays = metadata.get("in_host_memory", ())
        placed = {
            name: tensor if name in stays else tensor.to(device) for name, tensor in tensors.items()
        }
        return Packet(
            clip,
            step,
            float(metadata["begun_at"]),
            placed,
            memory_pressure=bool(metadata["memory_pressure"]),
            compute_seconds=float(metadata["compute_seconds"]),
        )


def path_of(folder: Path, key: str, step: int) -> Path:
    """The file of the packet of `key` after `step` steps; it may not exist."""
    assert _KEY.fullmatch(key), f"not a key: {key!r}"
    return folder / f"{key}_step{step}.safetensors"


def saved(folder: Path) -> set[tuple[str, int]]:
    """The keys and steps of all packets in `folder`."""
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return {(match[1], int(match[2])) for match in map(_NAME.fullmatch, names) if match}


def saved_steps(folder: Path, key: str) -> list[int]:
    """The numbers of steps after which `folder` has a packet of `key`, ascending."""
    return sorted(step for other, step in saved(folder) if other == key)


def prune(folder: Path, key: str) -> None:
    """Removes every packet of `key`, whose clip is finished."""
    for step in saved_steps(folder, key):
        path_of(folder, key, step).unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        metadata = json.loads((file.metadata() or {})["svdpp"])
        if metadata["schema_version"] != _SCHEMA_VERSION:
            raise ValueError(f"schema version {metadata['schema_version']}")
        return {name: file.get_tensor(name).clone() for name in file.keys()}, metadata  # noqa: SIM118


def _reason(error: Exception) -> str:
    cause = error.__cause__ if isinstance(error, OutputError) else error
    return output_files.reason(cause if isinstance(cause, Exception) else error)


def _sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def upgraded(tensors: Tensors, sampling: SamplingConfig, steps: int) -> Tensors:
    """The tensors of a checkpoint after `steps` as a packet of this version has them."""
    if STRUCTURE in tensors or tensors.keys() == {LATENTS}:  # the second are the dummy's
        return tensors
    if sampling.family != "svd":
        raise InputError(
            "the latent checkpoint was written by svdpp 0.3 or earlier, which kept less of a clip",
            "delete it: the clip then starts again",
        )
    return _of_svd(tensors, sampling, steps)


def _of_svd(tensors: Tensors, sampling: Any, steps: int) -> Tensors:
    """The results that SVD's call replays; 0.3 kept them without their unconditional halves."""
    from diffusers.schedulers.scheduling_euler_discrete import EulerDiscreteSchedulerOutput

    from svdpp.models.engine.values import Packer, describe

    def both(tensor: torch.Tensor, *, same: bool = False) -> torch.Tensor:
        other = tensor if same else torch.zeros_like(tensor)
        return torch.cat([other, tensor]) if sampling.guided else tensor

    packer, latents = Packer(), tensors[LATENTS]
    packed = packer.pack(latents, LATENTS)
    pixels = torch.empty(1, 3, sampling.height, sampling.width, device="meta")
    embedding, ids = both(tensors["image_embedding"]), both(tensors["added_time_ids"], same=True)
    results = {
        "_encode_image": packer.pack(embedding, "record.0"),
        "video_processor.preprocess": describe(pixels),
        "_encode_vae_image": packer.pack(both(tensors["image_latents"]), "record.2"),
        "_get_add_time_ids": packer.pack(ids, "record.3"),
        "prepare_latents": describe(latents) if steps else packed,
    }
    result = EulerDiscreteSchedulerOutput(prev_sample=latents, pred_original_sample=None)
    step = {
        "latents": packed,
        "chunks": [[[describe(result)]]],
        "states": [{"kind": "dict", "items": {"_step_index": {"kind": "plain", "value": steps}}}],
        "outputs": [describe((both(latents),))],
        "generators": packer.pack([torch.Generator().get_state()], GENERATOR),
    }
    records = [{"name": name, "result": each, "drew": None} for name, each in results.items()]
    structure = {"records": records, "step": step if steps else None}
    return packer.packet({**structure, "given": {"negative_prompt": False}})
