"""Owns what commands make of the options of layout and costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from svdpp.cli.request import default_world
from svdpp.errors import RequestError
from svdpp.launch.world import find_world
from svdpp.plan.choose import choose_layout
from svdpp.plan.costs import Costs
from svdpp.plan.presets import find_costs

# What a layout goes by where no costs are given: the ratio of decode to step is what matters.
_ASSUMED_COSTS = "svd-xt-a100"

#: What the model's parts need, as fields of `Costs`, and what each rank's device has, in GiB.
Memory = Callable[[], tuple[dict[str, float], tuple[float, ...]]]


@dataclass(frozen=True, kw_only=True)
class LayoutChoice:
    """What the options say of how the ranks share the work; None where they say nothing."""

    split: str | None = None
    replicas: int | None = None
    decoders: int | None = None
    layout: str | None = None
    costs: str | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        """What is named outright, by option; None where it is not."""
        return {"split": self.split, "replicas": self.replicas, "decoders": self.decoders}

    @property
    def given(self) -> dict[str, Any]:
        """The same, without what is not."""
        return {name: each for name, each in self.chosen.items() if each is not None}

    @property
    def is_auto(self) -> bool:
        """Whether the choice is left to `auto`.

        Raises:
            RequestError: that is asked for beside a choice, or by another word.
        """
        if self.layout is None:
            return False
        if self.layout != "auto":
            raise RequestError(f"--layout must be auto, got {self.layout!r}")
        self.leave_to("--layout auto", self.given)
        return True

    @staticmethod
    def leave_to(option: str, given: Mapping[str, Any]) -> None:
        """Refuses choices beside an option that makes them itself.

        Raises:
            RequestError: naming the first of them.
        """
        for name in given:
            raise RequestError(f"{option} picks for itself: leave out --{name}")

    def settings(
        self,
        *,
        num_steps: int,
        world_size: int,
        num_clips: int | None,
        decodes: bool,
        memory: Memory | None = None,
    ) -> tuple[dict[str, Any], str]:
        """The layout's fields of a `PipelineConfig`, and why, where the choice was left to `auto`.

        Args:
            num_steps: of each clip.
            world_size: number of ranks.
            num_clips: None where only another process knows it.
            decodes: whether clips become frames.
            memory: asked by `auto` what fits; None: everything does.

        Raises:
            RequestError: `auto` is asked for beside a choice, or where nobody can tell the clips.
        """
        costs = self._costs(decodes)
        if not self.is_auto:
            return {**self.given, "costs": costs}, ""
        if num_clips is None:
            raise RequestError(
                "--layout auto counts the clips, and under torchrun rank 0 alone knows them",
                "svdpp plan --layout auto --clips M tells what to give as --split and --replicas",
            )
        needs, has = memory() if memory is not None else ({}, ())
        costs = replace(costs, **needs)  # type: ignore[arg-type]
        choice = choose_layout(
            num_steps=num_steps,
            world_size=world_size,
            num_clips=num_clips,
            costs=costs,
            decodes=decodes,
            memory_gib=has,
        )
        said = f"layout: {choice.reason}"
        if self.costs is None and decodes:
            said += f"; with the costs of {_ASSUMED_COSTS}, svdpp profile measures yours"
        return {
            **{name: getattr(choice.layout, name) for name in self.chosen},
            "costs": costs,
        }, said

    def _costs(self, decodes: bool) -> Costs:
        """Without any, published ones, for the weight of a decode beside a step.

        Replicas are laid along the hosts that the ranks are on, wherever the costs were measured.
        """
        if self.costs is not None:
            costs = find_costs(self.costs)
        else:
            costs = find_costs(_ASSUMED_COSTS) if decodes else Costs()
        world = find_world()
        return replace(costs, ranks_per_host=None if world is None else world.ranks_per_host)

    def world(self, device: str, num_steps: int) -> int:
        """Ranks where the user names none: as `default_world`, or all where nothing must divide."""
        divides = self.split in (None, "uniform") and self.layout is None and self.replicas is None
        return default_world(device, num_steps, on_cpu=2, divide=divides)
