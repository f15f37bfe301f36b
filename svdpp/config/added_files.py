"""Files of weights that are added to a checkpoint, as they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from svdpp.config.limits import check_type, require

#: One of two experts: that of the steps with high noise, which come first, or with low noise.
Expert = Literal["high", "low"]


@dataclass(frozen=True, kw_only=True)
class AddedFile:
    """File of weights beside those of the checkpoint."""

    config_field: ClassVar[str]
    """Field of `ModelConfig` with files of this kind."""
    noun: ClassVar[str]
    """Name of the kind for users."""
    suffix: ClassVar[str]
    """End of the files' names."""

    name: str
    """Path of a file, or `OWNER/NAME/PATH` of one on the hub."""
    expert: Expert | None = None
    """Expert that the file is for; None: the model has one denoiser."""
    revision: str | None = None
    """Branch, tag or commit of a file on the hub; None: its main branch."""
    sha256: str | None = None
    """SHA-256 that the file must have; None: any."""

    def __post_init__(self) -> None:
        check_type(self.config_field, self.name, str)
        kind = self.suffix.removeprefix(".")
        is_named = bool(self.name.strip())
        require(is_named, f"`{self.config_field}` is empty", f"name a {kind} file")

    @property
    def part(self) -> str:
        """Name of the denoiser that the file is for."""
        return "transformer_2" if self.expert == "low" else "transformer"


@dataclass(frozen=True, kw_only=True)
class Denoiser(AddedFile):
    """Quantised denoiser in a GGUF file, which takes the place of the checkpoint's own."""

    config_field, noun, suffix = "denoisers", "denoiser", ".gguf"


def parse_denoiser(text: str) -> Denoiser:
    """Parse a denoiser as a user gives it.

    Args:
        text: Text `FILE.gguf[:high|:low]`.
    """
    for expert in ("high", "low"):
        if text.endswith(f":{expert}"):
            return Denoiser(name=text.removesuffix(f":{expert}"), expert=expert)
    return Denoiser(name=text)
