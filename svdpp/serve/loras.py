"""LoRAs that requests may name. The name of a LoRA is its file name without the suffix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from svdpp.config import Lora, parse_loras
from svdpp.errors import RequestError, nearest
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.lora_files import LoraFile, check_loras, lora_stem


class LoraCatalog:
    """LoRAs that a server offers for clips. Clients use their names, and never see a path.

    A job also has the hashes of its LoRAs' files. Another server makes the job only if it has files
    with these hashes; the names of the files may differ.

    Args:
        checkpoint: Checkpoint whose `clip_loras` are offered; None for the dummy model, which has
            no LoRAs.
    """

    def __init__(self, checkpoint: Checkpoint | None = None) -> None:
        self._checkpoint = checkpoint
        files = {} if checkpoint is None else checkpoint.clip_loras
        self._hashes = {lora_stem(lora): file.lora.sha256 for lora, file in files.items()}
        self._files = {(file.lora.sha256, file.lora.expert): file for file in files.values()}

    @property
    def names(self) -> list[str]:
        """Names of the LoRAs, in alphabetical order."""
        return sorted(self._hashes)

    def to_json(self) -> list[dict[str, Any]]:
        """Return name and hash of each LoRA, for the response of `/v1/models`."""
        return [{"name": name, "sha256": self._hashes[name]} for name in self.names]

    def find(self, value: object) -> tuple[Lora, ...]:
        """Return the LoRAs that a request names, with the hashes of their files.

        Args:
            value: Field `lora` of the request; see `parse_loras`.

        Raises:
            RequestError: The value is malformed, or names a LoRA that the server lacks or an expert
                that the model lacks.
        """
        loras = parse_loras(value)
        for lora in loras:
            if lora.name not in self._hashes:
                known = ", ".join(self.names)
                raise RequestError(
                    f"this server has no `loras` {lora.name[:60]!r}",
                    nearest(lora.name, self.names, f"the server has {known}"),
                    details={"field": "loras", "name": lora.name[:60], "known": self.names},
                )
        if self._checkpoint is not None:
            check_loras(loras, self._checkpoint)
        return tuple(replace(lora, sha256=self._hashes[lora.name]) for lora in loras)

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
