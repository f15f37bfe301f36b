"""The choice of the number of ranks and their layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from svdpp.cli.options.layout import LayoutOptions, Memory
from svdpp.cli.rank_count import default_world, joined_world
from svdpp.config import ModelConfig, SamplingConfig
from svdpp.errors import RequestError
from svdpp.launch.world import World


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """The options that decide the number of ranks and how they share the work.

    Args:
        launched: the launcher's world; None without a launcher.
        experts: from `experts_of`; None: the model has one expert.
        on_cpu: default number of ranks that share the CPU, or one GPU.
    """

    launched: World | None
    layout: LayoutOptions
    experts: Mapping[str, Any] | None
    world: int | None
    on_cpu: int
    steps: int
    family: str
    device: str

    def world_size(self) -> int:
        """The launcher's number of ranks, the user's or the default."""
        asked = joined_world(self.launched, self.world)
        if asked is not None:
            return asked
        divide = self.layout.must_divide
        return default_world(self.device, self.steps, on_cpu=self.on_cpu, divide=divide)

    def settings(
        self, *, num_clips: int | None, decodes: bool, memory: Memory | None = None
    ) -> tuple[dict[str, Any], str]:
        """Fields of a `PipelineConfig`, and a remark on the layout, empty for none."""
        world_size = self.world_size()
        shape, why = self.layout.settings(
            num_steps=self.steps,
            world_size=world_size,
            num_clips=num_clips,
            decodes=decodes,
            ranks_per_host=None if self.launched is None else self.launched.ranks_per_host,
            memory=memory,
            experts=self.experts,
            family=self.family,
        )
        # `auto` may let a rank hold both experts although the options do not.
        return {"world_size": world_size, **(self.experts or {}), **shape}, why


def experts_of(
    model: ModelConfig, sampling: SamplingConfig, *, share: bool
) -> dict[str, Any] | None:
    """The fields of a `PipelineConfig` for a model with two experts; None for other models.

    Args:
        model: its configs are read, and downloaded if needed.
        sampling: decides at which step the model changes its expert.
        share: whether one rank may hold both.
    """
    boundary = None
    if sampling.family != "svd":
        from svdpp.models.checkpoint import find_checkpoint

        checkpoint = find_checkpoint(model, weights=False)
        boundary = checkpoint.expert_boundary(checkpoint.resolve(sampling))
    if boundary is None:
        if share:
            raise RequestError(
                "--share-experts is for models with two experts, such as Wan 2.2 A14B",
                "leave it out",
            )
        return None
    return {"expert_boundary": boundary, "share_experts": share}
