"""Owns the options about how ranks share the work, and the costs that this is decided by."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any

from svdpp.cli.console import counted
from svdpp.cli.options.declare import LAYOUT, option
from svdpp.errors import RequestError
from svdpp.launch.world import find_world
from svdpp.plan.costs import Costs
from svdpp.plan.layout import SPLITS, Layout
from svdpp.plan.presets import PRESETS, find_costs

#: The costs where none are given: what counts is how much a decode weighs beside a step.
ASSUMED_COSTS = "svd-xt-a100"

# Layouts that are faster by less than this are not worth a line.
_WORTH_A_REMARK = 1.05

_LAYOUTS = ("auto", "pipeline", "data-parallel")

#: What the model's parts need, as fields of `Costs`, and what each rank's device has, in GiB.
Memory = Callable[[], tuple[dict[str, float], tuple[float, ...]]]


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """How the ranks share the work; None leaves a choice open."""

    layout: Annotated[
        str | None,
        option(
            "--layout",
            panel=LAYOUT,
            metavar="auto|pipeline|data-parallel",
            choices=_LAYOUTS,
            help="How ranks share clips: each does some steps of every clip, each does whole "
            "clips, or what is fastest by forecast.",
            default="pipeline",
        ),
    ] = None
    split: Annotated[
        str | None,
        option(
            "--split",
            panel=LAYOUT,
            metavar="uniform|balanced|dithered",
            choices=SPLITS,
            help="Where a pipeline cuts clips: into equal ranges; into whole ranges that make the "
            "slowest rank fastest; or for each clip separately, so that all ranks have the same "
            "work.",
            default="uniform",
        ),
    ] = None
    replicas: Annotated[
        int | None,
        option(
            "--replicas",
            panel=LAYOUT,
            metavar="R",
            help="Independent pipelines of W/R ranks; R divides W.",
            default="1",
        ),
    ] = None
    decoders: Annotated[
        int | None,
        option(
            "--decoders",
            panel=LAYOUT,
            metavar="K",
            help="Ranks at the end of each pipeline that take turns to finish and decode clips.",
            default="1",
        ),
    ] = None
    costs: Annotated[
        str | None,
        option(
            "--costs",
            panel=LAYOUT,
            metavar="FILE|PRESET",
            choices=tuple(PRESETS),
            help="Costs that splits and forecasts go by: a file of svdpp profile, or published "
            f"ones: {', '.join(PRESETS)}.",
            default=ASSUMED_COSTS,
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.layout is not None and self.layout not in _LAYOUTS:
            names = f"{', '.join(_LAYOUTS[:-1])} or {_LAYOUTS[-1]}"
            raise RequestError(f"--layout must be {names}, got {self.layout!r}")
        if self.layout in ("auto", "data-parallel"):
            self.leave_to(f"--layout {self.layout}")

    @property
    def refined(self) -> dict[str, Any]:
        """The refinements that are given, as fields of a `PipelineConfig`."""
        named = {"split": self.split, "replicas": self.replicas, "decoders": self.decoders}
        return {name: value for name, value in named.items() if value is not None}

    @property
    def given(self) -> dict[str, Any]:
        """All that is given about the layout, by option."""
        return {**self.refined, **({"layout": self.layout} if self.layout else {})}

    @property
    def must_divide(self) -> bool:
        """Whether the number of ranks must divide the steps."""
        return (
            self.split in (None, "uniform")
            and self.layout in (None, "pipeline")
            and (self.replicas is None)
        )

    def leave_to(self, option: str) -> None:
        """Refuses refinements beside an option that makes the choice itself.

        Raises:
            RequestError: naming the first of them.
        """
        for name in self.refined:
            raise RequestError(f"{option} picks for itself: leave out --{name}")

    def fields(self, world_size: int) -> dict[str, Any]:
        """The layout as fields of a `PipelineConfig`, where the choice is not left to `auto`."""
        return {"replicas": world_size} if self.layout == "data-parallel" else self.refined

    def remark(self, layout: Layout, num_clips: int, *, is_real: bool) -> str:
        """Says which option would be faster, where the user has left the layout to the default.

        Args:
            layout: that is taken.
            num_clips: to be made.
            is_real: whether the model is one that the assumed costs are like.
        """
        if self.given or (self.costs is None and not is_real):
            return ""
        from svdpp.plan.choose import faster_layout

        faster = faster_layout(layout, num_clips, by=_WORTH_A_REMARK)
        if faster is None:
            return ""
        other, times = faster
        whose = f"the costs of {ASSUMED_COSTS}" if self.costs is None else "these costs"
        fits = ", if each device has room for the whole model" if other.replica_size == 1 else ""
        return (
            f"layout: by {whose} {options_for(other)} would be {times:.2f} times as fast for "
            f"{counted(num_clips, 'clip')}{fits}"
        )

    def assumed_costs(self, *, decodes: bool = True) -> Costs:
        """The costs asked for; without any, published ones.

        Args:
            decodes: whether clips become frames; without decoding a step is 1 and all else 0.

        Raises:
            InputError: the file cannot be read.
            RequestError: there are no such costs.
        """
        if self.costs is not None:
            return find_costs(self.costs)
        return find_costs(ASSUMED_COSTS) if decodes else Costs()

    def settings(
        self,
        *,
        num_steps: int,
        world_size: int,
        num_clips: int | None,
        decodes: bool,
        memory: Memory | None = None,
    ) -> tuple[dict[str, Any], str]:
        """The layout's fields of a `PipelineConfig`, and a remark on the choice; "" for none.

        Args:
            num_steps: of each clip.
            world_size: number of ranks.
            num_clips: None where only another process knows it.
            decodes: whether clips become frames.
            memory: asked by `auto` what fits; None: everything does.

        Raises:
            RequestError: `auto` is asked for where this process does not know the clips.
        """
        launched = find_world()
        costs = replace(
            self.assumed_costs(decodes=decodes),
            # Replicas are laid along the hosts that the ranks are on, wherever costs are from.
            ranks_per_host=None if launched is None else launched.ranks_per_host,
        )
        if self.layout != "auto":
            return {**self.fields(world_size), "costs": costs}, ""
        if num_clips is None:
            raise RequestError(
                "--layout auto counts the clips, and under torchrun rank 0 alone knows them",
                "svdpp plan --layout auto --clips M tells what to give as --split and --replicas",
            )
        from svdpp.plan.choose import choose_layout

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
        why = f"layout: {choice.reason}"
        if self.costs is None and decodes:
            why += f"; with the costs of {ASSUMED_COSTS}, svdpp profile measures yours"
        return {**_fields(choice.layout), "costs": costs}, why


def options_for(layout: Layout) -> str:
    """The options that take `layout`."""
    if layout.replica_size == 1:
        return "--layout data-parallel"
    simple = {"split": "uniform", "replicas": 1, "decoders": 1}
    chosen = {name: value for name, value in _fields(layout).items() if value != simple[name]}
    return " ".join(f"--{name} {value}" for name, value in chosen.items()) or "--layout pipeline"


def _fields(layout: Layout) -> Mapping[str, Any]:
    return {"split": layout.split, "replicas": layout.replicas, "decoders": layout.decoders}
