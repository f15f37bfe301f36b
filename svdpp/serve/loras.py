"""LoRAs that requests may name, by the stems of the files in the server's folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from svdpp.config import Lora, parse_loras
from svdpp.errors import RequestError, nearest
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.lora_files import LoraFile, check_loras, lora_stem


class LoraCatalog:
    """LoRAs that clips of a server may have. Clients name them, and never see a path.

    A job names them by their hashes as well: another server makes it only if it has the same
    files, whatever they are called there.

    Args:
        checkpoint: Checkpoint with the LoRAs of clips; None for the dummy model, which takes none.
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
        """Return the LoRAs as `/v1/models` lists them."""
        return [{"name": name, "sha256": self._hashes[name]} for name in self.names]

    def find(self, value: object) -> tuple[Lora, ...]:
        """Return the LoRAs that a request names, with the hashes of their files.

        Args:
            value: Field `lora` of the request; see `parse_loras`.

        Raises:
            RequestError: The value names no LoRAs, or such as the server does not have, or experts
                that the model does not have.
        """
        loras = parse_loras(value)
        for lora in loras:
            if lora.name not in self._hashes:
                known = ", ".join(self.names)
                raise RequestError(
                    f"this server has no `loras` {lora.name[:60]!r}",
                    nearest(lora.name, self.names, f"it has {known}"),
                    details={"field": "loras", "name": lora.name[:60], "known": self.names},
                )
        if self._checkpoint is not None:
            check_loras(loras, self._checkpoint)
        return tuple(replace(lora, sha256=self._hashes[lora.name]) for lora in loras)

    def missing_reason(self, loras: Iterable[Lora]) -> str | None:
        """Return the reason why this server cannot make a job with these LoRAs; None if it can."""
        for lora in loras:
            if (lora.sha256, lora.expert) not in self._files:
                return f"it has the LoRA {lora.name}, which this server does not have"
        return None

    def files(self, loras: Iterable[Lora]) -> tuple[LoraFile, ...]:
        """Return the files of a job's LoRAs.

        Raises:
            RequestError: The server does not have one of them.
        """
        loras = tuple(loras)
        if (reason := self.missing_reason(loras)) is not None:
            raise RequestError(f"the job cannot be made: {reason}")
        return tuple(
            self._files[lora.sha256, lora.expert].with_weight(lora.weight) for lora in loras
        )
