"""Parallel configuration: the choices of a layout, and the option of each on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, get_args

from svdpp.errors import RequestError

Split = Literal["uniform", "balanced", "alternating"]
SPLITS: tuple[Split, ...] = get_args(Split)

#: Names of layouts; `pipeline` is the default.
LayoutName = Literal["auto", "pipeline", "data-parallel"]


def canonical_split(split: Any) -> Any:
    """Return the present name of a split; `dithered` is a former name of `alternating`.

    Args:
        split: Value from a user or a file, which need not be the name of a split.
    """
    return "alternating" if split == "dithered" else split


@dataclass(frozen=True, kw_only=True)
class LayoutOption:
    """Option for a field of `ParallelConfig`, for the command line, benchmarks and JSON."""

    name: str
    """Name in Python, JSON and benchmarks; the command line has dashes in place of underscores."""
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    """Values on the command line; empty: any of the field's type."""
    shown_default: str = ""
    """Default, in words, for the help; empty for a flag."""
    chosen_by: tuple[Literal["auto", "data-parallel", "compare"], ...] = ()
    """Settings that choose the field, so that a user cannot: a name of `--layout`, or `compare` for
    `plan --compare`."""

    in_json: bool = True
    """Whether JSON always has the field; `plan` adds others for models that they concern."""

    @property
    def flag(self) -> str:
        """Option as users type it, such as `--decode-ranks`."""
        return f"--{self.name.replace('_', '-')}"


_ALL_CHOOSE: Any = ("auto", "data-parallel", "compare")


def _option(**about: Any) -> dict[str, LayoutOption]:
    """Return the metadata of a field with this option."""
    return {"option": LayoutOption(**about)}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Choices of a layout: how the ranks share the work. A `Layout` applies them to clips.

    To add a choice, add a field here, and its meaning in `Layout`. The option of the command line,
    the field of benchmarks, and the key in the JSON of clips, plans and `/v1/engine` are derived.
    """

    split: Split = field(
        default="uniform",
        metadata=_option(
            name="split",
            metavar="NAME",
            help="How a pipeline divides the steps. uniform: equally; balanced: so that the "
            "slowest rank is as fast as possible; alternating: differently from clip to clip, for "
            "equal work.",
            shown_default="uniform",
            chosen_by=_ALL_CHOOSE,
        ),
    )
    """Rule that cuts each clip's steps into ranges."""
    data_parallel_size: int = field(
        default=1,
        metadata=_option(
            name="replicas",
            metavar="R",
            help="Independent pipelines of W/R ranks; R divides W.",
            shown_default="1",
            chosen_by=_ALL_CHOOSE,
        ),
    )
    """Number of replicas R: a divisor of the number of ranks, or of pairs."""
    num_decoders: int = field(
        default=1,
        metadata=_option(
            name="decoders",
            metavar="K",
            help="Ranks at the end of each pipeline that decode clips in turn.",
            shown_default="1",
            chosen_by=_ALL_CHOOSE,
        ),
    )
    """Number of ranks, or pairs, at the end of each replica that finish its clips in turn."""
    cfg_parallel_size: int = field(
        default=1,
        metadata=_option(
            name="cfg_parallel",
            metavar="N",
            help="Ranks that do each step of a clip together: auto, 1 or 2. 2: pairs of ranks, "
            "each for one branch of the guidance; a clip takes about half as long. auto: by "
            "forecast, if the bits are equal.",
            choices=("auto", "1", "2"),
            shown_default="1; with --layout auto auto",
            chosen_by=("compare",),
        ),
    )
    """Number of ranks that do each step together. With 2, ranks 2u and 2u + 1 are a pair, which
    takes the place of a single rank: both do the same steps, each one branch of the guidance."""
    decode_parallel_size: int | None = field(
        default=None,
        metadata=_option(
            name="decode_ranks",
            metavar="N",
            help="Ranks that decode each clip of SVD together, each some of its "
            "--decode-chunk-size chunks.",
            shown_default="both ranks of a pair, if there are several chunks, else 1",
            chosen_by=("compare",),
        ),
    )
    """Number of ranks that decode each clip together, or as many as the clip has chunks of frames.
    None: both ranks of a pair if a clip has several chunks, else one; decided when the
        configuration
    is resolved."""
    share_experts: bool = field(
        default=False,
        metadata=_option(
            name="share_experts",
            help="Let one rank hold both experts, so that the steps can be cut anywhere.",
            in_json=False,
        ),
    )
    """Whether a rank of a longer replica can hold both experts; clips are then cut anywhere."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", canonical_split(self.split))

    def to_json(self) -> dict[str, Any]:
        """Return the fields by the names of their options, as the JSON of a clip has them."""
        options = layout_options().items()
        return {option.name: getattr(self, name) for name, option in options if option.in_json}


@cache
def layout_options() -> Mapping[str, LayoutOption]:
    """Return the option of each field of a `ParallelConfig`, by the field's name."""
    return {each.name: each.metadata["option"] for each in fields(ParallelConfig)}


def layout_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename options to the fields of a `ParallelConfig`.

    Args:
        options: Values by the names of options, such as `replicas`; other names are kept.
    """
    field_of = {option.name: name for name, option in layout_options().items()}
    return {field_of.get(name, name): value for name, value in options.items()}


def check_choices(layout: LayoutName | None, given: Mapping[str, Any]) -> None:
    """Check that no given field is one that the requested layout chooses itself.

    Args:
        layout: Name of the layout; None: none is requested.
        given: Given fields of a `ParallelConfig`; `cfg_parallel_size` can also be `auto`.

    Raises:
        RequestError: The layout chooses one of the given fields.
    """
    for name, option in layout_options().items():
        if name in given and layout in option.chosen_by:
            raise RequestError(
                f"`layout` {layout} chooses the layout: leave out `{option.name}`",
                details={"layout": layout, "option": option.flag},
            )
    if "auto" in (layout, given.get("cfg_parallel_size")) and "decode_parallel_size" in given:
        raise RequestError(
            "auto chooses the layout: leave out `decode_ranks`",
            details={"option": "--decode-ranks"},
        )
