"""The memory of the parts of a model, and that of a rank, which does some of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from svdpp.plan.layout import Roles


class PartMemory(NamedTuple):
    """Memory of one part on its device: the weights, and the peak of the activations above them."""

    weight_bytes: int
    activation_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Weights and activations together."""
        return self.weight_bytes + self.activation_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of each part of a model; None for a part that the model does not have."""

    encode: PartMemory | None
    """Encoders of text and image, and the VAE's, at the clip's size; without the original image."""
    denoise: PartMemory
    """The denoiser, or one of two experts, for one step."""
    decode: PartMemory | None
    """The VAE's decoder, for `decode_chunk_size` frames at a time."""

    def of_rank(self, roles: Roles) -> PartMemory:
        """Memory of a rank with these roles: the sum of the weights, the largest activations."""
        held = (getattr(self, name) for name, has_role in roles.parts.items() if has_role)
        loaded = [part for part in held if part is not None]
        other_experts = max(0, len(roles.experts) - 1)
        return PartMemory(
            sum(part.weight_bytes for part in loaded) + other_experts * self.denoise.weight_bytes,
            max((part.activation_bytes for part in loaded), default=0),
        )

    def as_costs(self) -> dict[str, float]:
        """The memory fields of `plan.costs.Costs` by name, in GiB; missing parts are omitted."""
        parts = {"encode": self.encode, "denoise": self.denoise, "decode": self.decode}
        return {
            f"{name}_{kind}_gib": size / 2**30
            for name, part in parts.items()
            if part is not None
            for kind, size in (("weights", part.weight_bytes), ("work", part.activation_bytes))
        }
