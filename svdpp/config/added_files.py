"""Weight files that users add to a checkpoint: the base class `AddedFile`, and GGUF denoisers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from svdpp.config.limits import check_type, require

#: Name of an expert, in a model with two denoisers that divide the steps: `high` runs the first
#: steps, where the noise is high, and `low` runs the later steps.
Expert = Literal["high", "low"]


@dataclass(frozen=True, kw_only=True)
class AddedFile:
    """Requested file with weights that are not in the checkpoint: a LoRA or a GGUF file."""

    config_field: ClassVar[str]
    """Name of the field of `ModelConfig` that lists files of this kind."""
    noun: ClassVar[str]
    """Word for files of this kind in messages, such as LoRA."""
    suffix: ClassVar[str]
    """Suffix that the file's name must have, such as `.gguf`."""

    name: str
    """Path of a local file, or `OWNER/NAME/PATH` of a file on the hub."""
    expert: Expert | None = None
    """Expert (one of two denoisers) whose weights the file changes or replaces; None: the model has
    only one denoiser."""
    revision: str | None = None
    """Branch, tag or commit of a file on the hub; None: its main branch."""
    sha256: str | None = None
    """SHA-256, in hex, that the file must have; None: the content is not checked."""

    def __post_init__(self) -> None:
        check_type(self.config_field, self.name, str)
        kind = self.suffix.removeprefix(".")
        is_named = bool(self.name.strip())
        require(is_named, f"`{self.config_field}` is empty", f"name a {kind} file")

    @property
    def part(self) -> str:
        """Component name of the denoiser that the LoRA or GGUF file changes or replaces."""
        return "transformer_2" if self.expert == "low" else "transformer"


@dataclass(frozen=True, kw_only=True)
class Denoiser(AddedFile):
    """Requested GGUF file, whose quantised denoiser replaces a denoiser of the checkpoint."""

    config_field, noun, suffix = "denoisers", "denoiser", ".gguf"


def parse_denoiser(text: str) -> Denoiser:
    """Return the `Denoiser` that a value of `--denoiser` requests, such as `a.gguf:low`.

    Args:
        text: Path of a GGUF file. In a model with two denoisers, `:high` or `:low` at the end of
            the path says which denoiser the file replaces, such as `a.gguf:low`.
    """
    for expert in ("high", "low"):
        if text.endswith(f":{expert}"):
            return Denoiser(name=text.removesuffix(f":{expert}"), expert=expert)
    return Denoiser(name=text)
