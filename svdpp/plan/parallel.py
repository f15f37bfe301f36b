"""`ParallelConfig`: how ranks share the work, and the command-line option for each field."""

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
    """Return the current name of a split; `dithered` is the former name of `alternating`.

    Args:
        split: Value from a user or a file. Any value except `dithered` is returned unchanged.
    """
    return "alternating" if split == "dithered" else split


@dataclass(frozen=True, kw_only=True)
class LayoutOption:
    """Name, help and values of a field of `ParallelConfig` on the command line and in JSON."""

    name: str
    """Name of the option in JSON, benchmarks and messages, such as `decode_ranks`. The command line
    has dashes in place of underscores."""
    help: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    """Values that the command line accepts; empty: any value of the field's type."""
    shown_default: str = ""
    """Description of the default for the help text; empty for a flag."""
    chosen_by: tuple[Literal["auto", "data-parallel", "compare"], ...] = ()
    """Settings under which svdpp chooses the value of this field, so users must not set it: values
    of `--layout`, or `compare` for `plan --compare`."""
    in_json: bool = True
    """Whether the JSON of every clip and plan has the field. False: only the JSON of plans for
    models with two experts (denoisers) has it."""

    @property
    def flag(self) -> str:
        """Command-line option of a layout field, such as `--decode-ranks`."""
        return f"--{self.name.replace('_', '-')}"


_ALL_CHOOSE: Any = ("auto", "data-parallel", "compare")


def _option(**about: Any) -> dict[str, LayoutOption]:
    """Return the dataclass metadata of a layout field: a `LayoutOption` with the given fields."""
    return {"option": LayoutOption(**about)}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Configuration of how the ranks share the work; `Layout` applies it to ranks and clips.

    To add a way to share work, add a field here and implement it in `Layout`. The command-line
    option, the field of benchmarks, and the key in the JSON of clips, plans and `/v1/engine` are
    derived from the field.
    """

    split: Split = field(
        default="uniform",
        metadata=_option(
            name="split",
            metavar="NAME",
            help="How a pipeline divides the steps among its ranks. uniform: equally; balanced: so "
            "that the slowest rank is as fast as possible; alternating: differently from clip to "
            "clip, so that all ranks have equal work on average.",
            shown_default="uniform",
            chosen_by=_ALL_CHOOSE,
        ),
    )
    """Rule that divides the steps of each clip into ranges, one for each stage."""
    data_parallel_size: int = field(
        default=1,
        metadata=_option(
            name="replicas",
            metavar="R",
            help="Number of independent pipelines, each with the same number of ranks.",
            shown_default="1",
            chosen_by=_ALL_CHOOSE,
        ),
    )
    """Number of replicas R, which are pipelines that each make whole clips. R must divide the
    number of ranks, or the number of pairs if `cfg_parallel_size` is 2."""
    num_decoders: int = field(
        default=1,
        metadata=_option(
            name="decoders",
            metavar="K",
            help="Number of ranks at the end of each pipeline that take turns in decoding clips.",
            shown_default="1",
            chosen_by=_ALL_CHOOSE,
        ),
    )
    """Number of ranks (or of CFG pairs, which count as one) at the end of each replica that run
    the last steps of the replica's clips and decode them, in turn: with 2, the first takes even
    clips and the second odd clips."""
    cfg_parallel_size: int = field(
        default=1,
        metadata=_option(
            name="cfg_parallel",
            metavar="N",
            help="Number of ranks that run each step of a clip together: auto, 1 or 2. 2: two "
            "ranks form a pair, and each evaluates one branch of the guidance, so a clip takes "
            "about half as long. auto: 2 if this is better by forecast and does not change the "
            "bits, else 1.",
            choices=("auto", "1", "2"),
            shown_default="1, but auto with --layout auto",
            chosen_by=("compare",),
        ),
    )
    """Number of ranks that run each step together: 1 or 2. With 2, ranks 2u and 2u + 1 are a pair,
    which takes the place of a single rank: both run the same steps, and each evaluates one branch
    of the guidance."""
    decode_parallel_size: int | None = field(
        default=None,
        metadata=_option(
            name="decode_ranks",
            metavar="N",
            help="Number of ranks that decode each clip together. Each rank decodes some of the "
            "chunks of --decode-chunk-size frames (SVD), or some of the tiles (--vae-tiling).",
            shown_default="both ranks of a pair, if there are several chunks or tiles, else 1",
            chosen_by=("compare",),
        ),
    )
    """Largest number of ranks that decode a clip together. Each rank decodes at least one chunk of
    frames or one tile, so a clip may need fewer ranks. None: decided when the configuration is
    resolved; 2 if the ranks form pairs and a clip has several chunks or tiles, else 1."""
    share_experts: bool = field(
        default=False,
        metadata=_option(
            name="share_experts",
            help="Let a rank hold both experts (the two denoisers of some models), so that the "
            "steps can be divided anywhere.",
            in_json=False,
        ),
    )
    """Whether ranks may hold both experts (denoisers) of a model, so that the steps can be divided
    anywhere. False: the steps are divided where the expert changes, except in replicas of one
    rank."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", canonical_split(self.split))

    def to_json(self) -> dict[str, Any]:
        """Return the layout options by name, as in the JSON of a clip."""
        options = layout_options().items()
        return {option.name: getattr(self, name) for name, option in options if option.in_json}


@cache
def layout_options() -> Mapping[str, LayoutOption]:
    """Return the `LayoutOption` of each field of a `ParallelConfig`, by the field's name."""
    return {each.name: each.metadata["option"] for each in fields(ParallelConfig)}


def layout_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename layout options to fields of `ParallelConfig`: `replicas` to `data_parallel_size`.

    Args:
        options: Values by the name of the option. A name that is not an option of `ParallelConfig`
            is not changed.

    Returns:
        The same values by the name of the field.
    """
    field_of = {option.name: name for name, option in layout_options().items()}
    return {field_of.get(name, name): value for name, value in options.items()}


def check_choices(layout: LayoutName | None, given: Mapping[str, Any]) -> None:
    """Raise a `RequestError` if the user has set a field that the requested layout determines.

    Args:
        layout: Name of the requested layout; None: no layout is requested.
        given: Fields of `ParallelConfig` that the user has set; `cfg_parallel_size` can also be
            `auto`.

    Raises:
        RequestError: The layout determines one of the given fields.
    """
    for name, option in layout_options().items():
        if name in given and layout in option.chosen_by:
            raise RequestError(
                f"`layout` {layout} chooses `{option.name}`: leave it out",
                details={"layout": layout, "option": option.flag},
            )
    if "auto" in (layout, given.get("cfg_parallel_size")) and "decode_parallel_size" in given:
        raise RequestError(
            "`layout` auto and `cfg_parallel` auto choose `decode_ranks`, too: leave it out",
            details={"option": "--decode-ranks"},
        )
