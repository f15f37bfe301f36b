"""Options of a pipeline: ranks, layout and costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_type_hints

from svdpp.cli.options import complete
from svdpp.cli.options.declare import (
    DIAGNOSTICS,
    LAYOUT,
    RECOVERY,
    flag,
    option,
    options_field,
)
from svdpp.cli.options.model import ModelOptions
from svdpp.config import Lora, ParallelConfig
from svdpp.config.cost_files import find_costs
from svdpp.driver.request import ASSUMED_COSTS, PipelineRequest, find_device, with_hosts_of
from svdpp.plan.costs import PRESETS
from svdpp.plan.parallel import (
    LayoutName,
    LayoutOption,
    check_choices,
    layout_fields,
    layout_options,
)


def layout_options_field(**shown_defaults: str) -> Any:
    """Return a dataclass field that adds an option for each field of `ParallelConfig`.

    Args:
        shown_defaults: Defaults to show in the help, as text, by the option's name. Other options
            show their usual default, such as `uniform` for the option `split`.
    """
    kinds = get_type_hints(ParallelConfig)
    options = {}
    for name, about in layout_options().items():
        default = shown_defaults.get(about.name, about.shown_default)
        options[about.name] = _layout_option(kinds[name], about, default)
    return options_field(options)


def _layout_option(kind: Any, about: LayoutOption, shown_default: str) -> Any:
    """Return Typer's annotation for an option of the layout."""
    if kind is bool:
        return Annotated[bool | None, flag(about.flag, panel=LAYOUT, help=about.help)]
    choices: Any = Literal[about.choices] if about.choices else kind
    described = option(
        panel=LAYOUT, metavar=about.metavar, help=about.help, show_default=shown_default
    )
    return Annotated[choices | None, described]


#: Names of the parameters whose options contradict `plan --compare`, which tries all their values.
COMPARED = (
    "layout",
    *(about.name for about in layout_options().values() if "compare" in about.chosen_by),
)


def gpus_option(default: str) -> Any:
    """Return the option `--gpus`, the number of ranks, for a command's option group.

    Args:
        default: Default, in words.
    """
    return option(
        "--gpus",
        panel=LAYOUT,
        metavar="W",
        help=f"Number of ranks; by default {default}.",
        common=True,
    )


def seconds_option(name: str, help: str) -> Any:
    """Return an option for a time limit in seconds, for a command's option group.

    Args:
        name: Name of the option, with its dashes.
        help: Sentence about the effect of the limit.
    """
    return option(name, panel=RECOVERY, metavar="SECONDS", help=help)


def costs_option(default: str) -> Any:
    """Return the option `--costs`, the costs for plans, for a command's option group.

    Args:
        default: Default, in words.
    """
    return option(
        panel=LAYOUT,
        metavar="FILE|PRESET",
        help="Costs for splits and forecasts: a file of svdpp profile, the run.json of an earlier "
        f"run, or published costs: {', '.join(PRESETS)}.",
        show_default=default,
        autocompletion=complete.presets,
    )


#: Annotation of `--device`, for commands that change its default.
Device = Annotated[
    str,
    option(
        panel=LAYOUT,
        metavar="DEVICE",
        help="cuda: rank r on GPU r, over NCCL. cpu or cuda:N: all ranks share that device, over "
        "gloo. auto: GPUs if there are any; else the CPU, but only for the demo and dummy models, "
        "and in verify and doctor.",
        envvar="SVDPP_DEVICE",
        show_envvar=False,
        autocompletion=complete.devices,
    ),
]

#: Annotation of `--peak-tflops`, for commands that show the utilisation.
PeakTflops = Annotated[
    float | None,
    option(
        panel=DIAGNOSTICS,
        metavar="X",
        help="Peak TFLOP/s of each device in the model's dtype, for the utilisation of devices "
        "whose peak svdpp does not know.",
        common=True,
    ),
]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(ModelOptions):
    """Options of a pipeline: model, ranks, layout and costs. None means the default."""

    world: Annotated[int | None, gpus_option("all GPUs, or 2 on the CPU")] = None
    device: Device = "auto"
    threads: Annotated[
        int | None,
        option(
            panel=LAYOUT,
            metavar="T",
            help="CPU threads of each rank, at most 16 per core. Bits depend on this number.",
            show_default="cores divided by ranks; on CUDA 1",
        ),
    ] = None
    timeout: Annotated[
        float, seconds_option("--timeout", "End the run if a rank makes no progress for this long.")
    ] = 600.0
    start_timeout: Annotated[
        float,
        seconds_option("--start-timeout", "End the run if ranks are not ready after this long."),
    ] = 600.0
    checksum: Annotated[
        bool,
        flag(
            "--checksum",
            panel=DIAGNOSTICS,
            help="Send a crc32 with each packet and compare it on arrival.",
        ),
    ] = False
    allow_mixed_devices: Annotated[
        bool,
        flag(
            "--allow-mixed-devices",
            panel=LAYOUT,
            help="Accept ranks on different GPUs or library versions; their clips are not marked "
            "as exact.",
        ),
    ] = False
    layout: Annotated[
        LayoutName | None,
        option(
            panel=LAYOUT,
            metavar="NAME",
            help="pipeline (default): ranks share each clip's steps; data-parallel: each rank "
            "makes whole clips; auto: the layout with the best forecast.",
            common=True,
        ),
    ] = None
    parallel: Mapping[str, Any] = layout_options_field()
    costs: Annotated[str | None, costs_option(ASSUMED_COSTS)] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self.layout, self.parallel_fields)

    @property
    def parallel_fields(self) -> dict[str, Any]:
        """Values of the layout options that the user gave, by field of `ParallelConfig`.

        The value of `cfg_parallel_size`, if it is given, is a number or `auto`.
        """
        given = layout_fields(self.parallel)
        if (size := given.get("cfg_parallel_size", "auto")) != "auto":
            given["cfg_parallel_size"] = int(size)
        return given

    def device_name(self, *, any_on_cpu: bool = False) -> str:
        """Return the device of `--device`; `auto` depends on this machine's GPUs and the model.

        Args:
            any_on_cpu: Whether `auto` may choose the CPU for every model, not only for small ones.

        Raises:
            RequestError: The machine has no GPU, and the model is too slow for a CPU.
        """
        return find_device(self.device, self.model, any_on_cpu=any_on_cpu)

    def request(
        self,
        *,
        device: str = "",
        from_image: bool | None = None,
        has_last_image: bool | None = None,
        num_references: int = 0,
        clip_loras: Iterable[Lora] = (),
        settings: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> PipelineRequest:
        """Convert the options to a `PipelineRequest`, which chooses what the user leaves open.

        Args:
            device: Device, if it is already decided; "": the device of the options.
            from_image: Whether clips start from an image; None: only if the model needs one.
            has_last_image: Whether clips end at an image; None: only if the model needs one.
            num_references: Number of reference images of each clip, besides its input image.
            clip_loras: LoRAs that some of the clips have.
            settings: Further fields of the `PipelineConfig`.
            more: Further fields of the request.

        Raises:
            RequestError: The options contradict each other, or the model.
        """
        sampling = self.sampling_config(
            from_image=self.needs_image if from_image is None else from_image,
            has_last_image=has_last_image,
            num_references=num_references,
        )
        device = device or self.device_name()
        if self.costs is not None and "costs" not in more:
            more["costs"] = with_hosts_of(find_costs(self.costs), more.get("launched"))
        sleeps = more.get("time_scale") is not None
        model = self.model_config(
            device, sampling.family, dummy_sleeps=sleeps, clip_loras=tuple(clip_loras)
        )
        return PipelineRequest(
            model=model,
            sampling=sampling,
            device=device,
            layout=self.layout,
            parallel=self.parallel_fields,
            num_ranks=self.world,
            num_threads=self.threads,
            settings={
                "timeout_seconds": self.timeout,
                "start_timeout_seconds": self.start_timeout,
                "checksum": self.checksum,
                "deterministic": self.deterministic,
                "allow_mixed_devices": self.allow_mixed_devices,
                **(settings or {}),
            },
            checkpoint=self.checkpoint,
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class WithoutLayout(PipelineOptions):
    """Pipeline options without layout options, for commands that always use the same layout."""

    layout: LayoutName | None = None
    parallel: Mapping[str, Any] = field(default_factory=dict)
    costs: str | None = None
