"""LoRAs that requests may name. The name of a LoRA is its file name without the suffix."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from svdpp.config import Lora, parse_loras
from svdpp.errors import RequestError, nearest
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.lora_files import LoraFile, check_loras, lora_stem


class LoraCatalog:
    """LoRAs that a server offers for clips. Clients see the names of LoRAs, but no paths.

    A job stores the hashes of its LoRAs' files. Another server makes the job only if it has files
    with the same hashes; the names of the files may differ.

    Args:
        checkpoint: Checkpoint whose `clip_loras` are offered; None for the dummy model, which has
            no LoRAs.
    """

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        self._checkpoint = checkpoint
        files = {} if checkpoint is None else checkpoint.clip_loras
        self._hashes = {lora_stem(lora): str(file.lora.sha256) for lora, file in files.items()}
        self._files = {(file.lora.sha256, file.lora.expert): file for file in files.values()}

    @property
    def names(self) -> list[str]:
        """Names of the LoRAs that the server offers, in alphabetical order."""
        return sorted(self._hashes)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the name and hash of each LoRA that the server offers, for `/v1/models`."""
        return [{"name": name, "sha256": self._hashes[name]} for name in self.names]

    @property
    def hashes(self) -> dict[str, str]:
        """SHA-256 of the file of each LoRA that the server offers, by name."""
        return dict(self._hashes)

    @property
    def fits_model(self) -> bool:
        """Whether svdpp supports LoRAs for the model. The server may offer none nevertheless."""
        return self._checkpoint is not None and self._checkpoint.spec.loras

    def find(
        self,
        value: object,
        hashes: Mapping[str, Collection[str]] | None = None,
        *,
        holder: str = "this server",
    ) -> tuple[Lora, ...]:
        """Return the LoRAs that a request names, with the hashes of their files.

        Args:
            value: Field `lora` of the request; see `parse_loras`.
            hashes: SHA-256 of the LoRAs that the request may name, by name. A name with several
                hashes stands for different files at different servers. None: the LoRAs of this
                server.
            holder: Subject of error messages: the server or fleet that has the LoRAs, such as "this
                server".

        Raises:
            RequestError: The value is malformed, a LoRA is not in `hashes` or has several hashes
                there, or the value names an expert (`high` or `low`) that the model does not have.
        """
        if hashes is None:
            hashes = {name: (sha256,) for name, sha256 in self._hashes.items()}
        loras = parse_loras(value)
        for lora in loras:
            _check_known(lora.name, hashes, holder)
        if self._checkpoint is not None:
            check_loras(loras, self._checkpoint)
        return tuple(replace(lora, sha256=min(hashes[lora.name])) for lora in loras)

    def missing_reason(self, loras: Iterable[Lora]) -> str | None:
        """Return why this server cannot make a job with these LoRAs; None if it can."""
        for lora in loras:
            if (lora.sha256, lora.expert) not in self._files:
                return f"this server does not have the job's LoRA {lora.name}"
        return None

    def files(self, loras: Iterable[Lora]) -> tuple[LoraFile, ...]:
        """Return the files of a job's LoRAs.

        Raises:
            RequestError: The server does not have one of the LoRAs.
        """
        loras = tuple(loras)
        if (reason := self.missing_reason(loras)) is not None:
            raise RequestError(f"the job cannot be made: {reason}")
        return tuple(
            self._files[lora.sha256, lora.expert].with_weight(lora.weight) for lora in loras
        )


def _check_known(name: str, hashes: Mapping[str, Collection[str]], holder: str) -> None:
    """Raise a `RequestError` unless a LoRA's name exists and stands for one file only."""
    known = sorted(hashes)
    details = {"field": "loras", "name": name[:60]}
    if name not in hashes:
        listed = (
            f"it has {', '.join(known)}" if known else f"leave `loras` out: {holder} offers none"
        )
        raise RequestError(
            f"{holder} has no LoRA {name[:60]!r}",
            nearest(name, known, listed),
            details={**details, "known": known},
        )
    if len(hashes[name]) > 1:
        raise RequestError(
            f"`loras` {name[:60]!r} is not the same file on all servers",
            "name another LoRA, or leave `loras` out",
            details={**details, "sha256": sorted(hashes[name])},
        )
