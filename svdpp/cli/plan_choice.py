"""Owns how many ranks a command takes, and whether they share clips or draft one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from svdpp.cli.options.draft import DraftOptions
from svdpp.cli.options.layout import LayoutOptions, Memory
from svdpp.cli.request import default_draft_world, default_world, joined_world, launcher_name
from svdpp.errors import RequestError
from svdpp.launch.world import find_world


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """What the options say of the ranks, and of how they share the work.

    Args:
        draft: whether all ranks draft the same clip, and from where.
        layout: how they share the clips, where they do not.
        world: number of ranks; None where the user names none.
        steps: of each clip.
        device: as a `PipelineConfig` has it.
        default_world: ranks where nobody names a number; None: by device and plan.
        no_draft: other options without an effect on a draft, by name.

    Raises:
        RequestError: options contradict each other.
    """

    draft: DraftOptions
    layout: LayoutOptions
    world: int | None
    steps: int
    device: str
    default_world: int | None = None
    no_draft: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draft.refuse_beside({**self.layout.given, **self.no_draft})

    def world_size(self) -> int:
        """The launcher's number of ranks, the user's, the starts' or the default.

        Raises:
            RequestError: the launcher's and the user's disagree; InputError: as
            `parse_start_steps`.
        """
        asked = joined_world(self.world)
        if asked is None:
            asked = self.draft.world(self.steps)
        if asked is not None:
            return asked
        if self.default_world is not None:
            return self.default_world
        if self.draft.draft:
            return default_draft_world(self.device, self.steps)
        return default_world(self.device, self.steps, on_cpu=2, divide=self.layout.must_divide)

    def settings(
        self, *, num_clips: int | None, decodes: bool, memory: Memory | None = None
    ) -> tuple[dict[str, Any], str]:
        """Fields of a `PipelineConfig`, and why, where the choice was left to `auto`.

        Args:
            num_clips: None where only another process knows it.
            decodes: whether clips become frames.
            memory: asked by `auto` what fits; None: everything does.

        Raises:
            RequestError: as `LayoutOptions.settings` and `DraftOptions.settings` have it; or the
                launcher's ranks are not those that the starts name.
        """
        world_size = self.world_size()
        shape, why = self.layout.settings(
            num_steps=self.steps,
            world_size=world_size,
            num_clips=num_clips,
            decodes=decodes,
            memory=memory,
        )
        drafting = self.draft.settings(self.steps, world_size)
        if drafting:
            _check_joined(len(drafting["draft"].start_steps))
        return {"world_size": world_size, **shape, **drafting}, why


def _check_joined(num_start_steps: int) -> None:
    """Elsewhere the configuration itself compares them, and says which --world to give."""
    world = find_world()
    if world is not None and world.size != num_start_steps:
        raise RequestError(
            f"--draft-starts names {num_start_steps} ranks, "
            f"{launcher_name(world)} has {world.size}",
            f"name {world.size} start steps, or have {launcher_name(world)} start "
            f"{num_start_steps} ranks",
            details={"asked": num_start_steps, "found": world.size},
        )
