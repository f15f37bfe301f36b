"""Owns packets kept on disk at their hand-overs, from which an interrupted clip goes on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from svdpp.comm.transport import Packet, tensor_spec
from svdpp.config import TensorSpec
from svdpp.errors import InputError
from svdpp.media import output_files
from svdpp.worker.bounded_executor import BoundedExecutor

_SCHEMA_VERSION = 2
_KEY = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"([0-9a-f]{64})_step(\d{1,6})\.safetensors", re.ASCII)


class LatentCheckpoints:
    """A folder of packets, named by what makes a clip's bits and by the steps that are done.

    Since the name is made of a hash of every parameter, a packet of another request is never taken
    for this one's.

    Args:
        folder: made when the first packet is kept.
        conditions: what bits depend on beside the request; a packet made under others is refused.
    """

    def __init__(self, folder: Path, conditions: Mapping[str, Any]) -> None:
        self._folder = folder
        self._conditions = dict(conditions)

    def keep(self, key: str, packet: Packet) -> None:
        """Writes `packet` whole or not at all, and removes those of earlier steps.

        Raises:
            OutputError: it cannot be written.
        """
        tensors = {name: _on_host(tensor) for name, tensor in packet.tensors.items()}
        said = {
            "schema_version": _SCHEMA_VERSION,
            "next_step": packet.next_step,
            "begun_at": packet.begun_at,
            "compute_seconds": packet.compute_seconds,
            "conditions": self._conditions,
            "sha256": _sha256(tensors),
        }
        path = self._path(key, packet.next_step)
        with output_files.atomic_output(str(path), ".safetensors") as temporary:
            save_file(tensors, temporary, metadata={"svdpp": json.dumps(said)})
        for step in saved_steps(self._folder, key):
            if step < packet.next_step:
                self._path(key, step).unlink(missing_ok=True)

    def load(
        self,
        key: str,
        clip: int,
        step: int,
        expected: Mapping[str, TensorSpec],
        device: torch.device,
    ) -> Packet:
        """The packet kept after `step` steps, as `clip` of this run.

        Raises:
            InputError: it is gone, damaged, or was made under other conditions.
        """
        path = self._path(key, step)
        try:
            tensors, said = _read(path)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            what = f"the hand-over {path.name!r} cannot be read: {output_files.reason(error)}"
            raise InputError(what, f"delete {path.name!r}, and the clip is made anew") from error
        found = {name: tensor_spec(tensor) for name, tensor in tensors.items()}
        same = {
            "conditions": (said["conditions"], self._conditions),
            "tensors": (found, dict(expected)),
            "sha256": (_sha256(tensors), said["sha256"]),
        }
        for what, (there, here) in same.items():
            if there != here:
                raise InputError(
                    f"the hand-over {path.name!r} does not fit: its {what} are {there}, not {here}",
                    f"delete {path.name!r}, and the clip is made anew",
                )
        in_order = {name: tensors[name].to(device) for name in expected}
        return Packet(
            *(clip, step, float(said["begun_at"]), in_order),
            compute_seconds=float(said["compute_seconds"]),
        )

    def _path(self, key: str, step: int) -> Path:
        assert _KEY.fullmatch(key), f"not a key: {key!r}"
        return self._folder / f"{key}_step{step}.safetensors"


class LatentCheckpointWriter:
    """Keeps packets in a thread beside the denoising.

    Args:
        checkpoints: where they go.
        on_failed: called from the thread with what went wrong.
    """

    def __init__(
        self, checkpoints: LatentCheckpoints, on_failed: Callable[[BaseException], None]
    ) -> None:
        self._checkpoints = checkpoints
        self._on_failed = on_failed
        self._executor = BoundedExecutor(self._keep, "checkpoints")

    def put(self, key: str, packet: Packet) -> None:
        """Takes a packet, whose tensors nobody changes any more; blocks while two others wait.

        Raises:
            OutputError: an earlier one could not be kept.
        """
        self._executor.put(key, packet)

    def finish(self) -> None:
        """Waits until everything given is kept.

        Raises:
            OutputError: a packet could not be kept.
        """
        self._executor.finish()

    def is_busy(self) -> bool:
        """Whether something given is not kept yet; for any thread to ask."""
        return self._executor.is_busy()

    def _keep(self, key: str, packet: Packet) -> None:
        try:
            self._checkpoints.keep(key, packet)
        except BaseException as error:
            self._on_failed(error)
            raise


def saved_keys(folder: Path) -> set[str]:
    """The keys of all packets under `folder`."""
    with contextlib.suppress(FileNotFoundError):
        matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
        return {match[1] for match in matches if match}
    return set()


def saved_steps(folder: Path, key: str) -> list[int]:
    """Steps after which a packet of `key` is kept under `folder`, rising."""
    with contextlib.suppress(FileNotFoundError):
        matches = (_NAME.fullmatch(path.name) for path in folder.iterdir())
        return sorted(int(match[2]) for match in matches if match and match[1] == key)
    return []


def prune(folder: Path, key: str) -> None:
    """Removes every packet of `key`: its clip is finished."""
    for step in saved_steps(folder, key):
        (folder / f"{key}_step{step}.safetensors").unlink(missing_ok=True)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy in host memory, made beside the kernels of the steps."""
    if not tensor.is_cuda:
        return tensor.contiguous()
    with torch.cuda.stream(torch.cuda.Stream(tensor.device)):
        return tensor.contiguous().cpu()


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A kept packet's tensors, in memory of their own, and what the file says of them."""
    with safe_open(path, framework="pt") as file:
        said = json.loads((file.metadata() or {})["svdpp"])
        if said["schema_version"] != _SCHEMA_VERSION:
            raise ValueError(f"schema version {said['schema_version']}")
        return {name: file.get_tensor(name).clone() for name in file.keys()}, said  # noqa: SIM118


def _sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
