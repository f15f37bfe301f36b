"""Options of a pipeline: ranks, layout and costs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from svdpp.cli.options import complete
from svdpp.cli.options.declare import DIAGNOSTICS, LAYOUT, RECOVERY, flag, option
from svdpp.cli.options.model import ModelOptions
from svdpp.config import DEMO_MODEL, DUMMY_MODEL
from svdpp.config.cost_files import find_costs
from svdpp.config.limits import require
from svdpp.errors import RequestError
from svdpp.plan.costs import PRESETS, CostModel
from svdpp.plan.layout import Split

if TYPE_CHECKING:
    pass

#: The options that the choice of a layout replaces.
LAYOUT_FIELDS = ("layout", "split", "replicas", "decoders", "cfg_parallel", "decode_ranks")
#: The default costs; a layout depends mainly on the ratio of a decode to a step.
ASSUMED_COSTS = "svd-xt-a100"
SPLIT_HELP = (
    "How a pipeline divides the steps. uniform: equally; balanced: so that the slowest rank is as "
    "fast as possible; alternating: differently from clip to clip, for equal work."
)


def gpus_option(default: str) -> Any:
    """Return the option for the number of ranks.

    Args:
        default: text for the default.
    """
    return option(
        "--gpus",
        panel=LAYOUT,
        metavar="W",
        help=f"Number of ranks; by default {default}.",
        common=True,
    )


def seconds_option(name: str, help: str) -> Any:
    """Return an option for a time limit.

    Args:
        name: with its dashes.
        help: what happens after that time.
    """
    return option(name, panel=RECOVERY, metavar="SECONDS", help=help)


def costs_option(default: str) -> Any:
    """Return the option for costs.

    Args:
        default: text for the default.
    """
    return option(
        panel=LAYOUT,
        metavar="FILE|PRESET",
        help="Costs for splits and forecasts: a file of svdpp profile, the run.json of an earlier "
        f"run, or published costs: {', '.join(PRESETS)}.",
        show_default=default,
        autocompletion=complete.presets,
    )


#: `--device`, for commands with another default.
Device = Annotated[
    str,
    option(
        panel=LAYOUT,
        metavar="DEVICE",
        help="cuda: rank r on GPU r, over NCCL. cpu or cuda:N: all ranks share that device, over "
        "gloo. auto: GPUs if there are any, else the CPU for demo and dummy, verify and doctor.",
        envvar="SVDPP_DEVICE",
        show_envvar=False,
        autocompletion=complete.devices,
    ),
]

#: `--peak-tflops`, for commands that show the utilisation.
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
    """Options that together give one configuration; None stands for the default."""

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
        Literal["auto", "pipeline", "data-parallel"] | None,
        option(
            panel=LAYOUT,
            metavar="NAME",
            help="pipeline, the default: ranks share steps; data-parallel: each makes whole "
            "clips; auto: best forecast.",
            common=True,
        ),
    ] = None
    split: Annotated[
        Split | None,
        option(
            panel=LAYOUT,
            metavar="NAME",
            help=SPLIT_HELP,
            show_default="uniform",
        ),
    ] = None
    replicas: Annotated[
        int | None,
        option(
            panel=LAYOUT,
            metavar="R",
            help="Independent pipelines of W/R ranks; R divides W.",
            show_default="1",
        ),
    ] = None
    decoders: Annotated[
        int | None,
        option(
            panel=LAYOUT,
            metavar="K",
            help="Ranks at the end of each pipeline that decode clips in turn.",
            show_default="1",
        ),
    ] = None
    cfg_parallel: Annotated[
        Literal["auto", "1", "2"] | None,
        option(
            panel=LAYOUT,
            metavar="N",
            help="Ranks that do each step of a clip together: auto, 1 or 2. 2: pairs of ranks, "
            "each for one branch of the guidance; a clip takes about half as long. auto: by "
            "forecast, if the bits are equal.",
            show_default="1; with --layout auto auto",
        ),
    ] = None
    decode_ranks: Annotated[
        int | None,
        option(
            panel=LAYOUT,
            metavar="N",
            help="Ranks that decode each clip of SVD together, each some of its "
            "--decode-chunk-size chunks.",
            show_default="both ranks of a pair, if there are several chunks, else 1",
        ),
    ] = None
    costs: Annotated[str | None, costs_option(ASSUMED_COSTS)] = None
    share_experts: Annotated[
        bool,
        flag(
            "--share-experts",
            panel=LAYOUT,
            help="Let one rank hold both experts, so that the steps can be cut anywhere.",
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.layout_overrides if self.layout in ("auto", "data-parallel") else ():
            raise RequestError(
                f"--layout {self.layout} chooses the layout: leave out --{name}",
                details={"layout": self.layout, "option": f"--{name}"},
            )
        is_twice = self.uses_auto and self.decode_ranks is not None
        require(not is_twice, "auto chooses the layout: leave out --decode-ranks")

    @property
    def layout_overrides(self) -> dict[str, Any]:
        """Given refinements of a layout, as fields of a `PipelineConfig`."""
        names = "split", "replicas", "decoders"
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def cfg_parallel_size(self) -> int:
        """Ranks that do each step together; 1 where that is left to `auto`."""
        return 2 if self.cfg_parallel == "2" else 1

    @property
    def uses_auto(self) -> bool:
        """Whether the forecast decides something."""
        return "auto" in (self.layout, self.cfg_parallel)

    @property
    def requires_even_steps(self) -> bool:
        """Whether the number of ranks must divide the steps."""
        is_pipeline = self.layout in (None, "pipeline") and self.replicas is None
        return is_pipeline and self.split in (None, "uniform")

    def assumed_costs(self, *, decodes: bool = True, family: str = "svd") -> CostModel:
        """Return the costs of `--costs`, or else published ones if clips of SVD are decoded.

        Args:
            decodes: whether the model decodes; the dummy does not, unless it sleeps.
            family: of the model.

        Raises:
            RequestError: `--costs` is neither a file nor a preset.
            InputError: the file cannot be read.
        """
        if self.costs is None and not (decodes and family == "svd"):
            return CostModel()
        return find_costs(self.costs or ASSUMED_COSTS)

    def device_name(self, *, any_on_cpu: bool = False) -> str:
        """Return the device; `auto` is decided by the GPUs of this machine and the model.

        Args:
            any_on_cpu: whether the CPU is acceptable for every model, as it is for a check.

        Raises:
            RequestError: there is no GPU, and the model is too slow for a CPU.
        """
        if self.device != "auto":
            return self.device
        from svdpp.launch.gpus import visible_gpus

        if visible_gpus():
            import torch

            if torch.cuda.is_available():  # False for a CPU build of torch
                return "cuda"
        if any_on_cpu or self.model in (DEMO_MODEL, DUMMY_MODEL):
            return "cpu"
        raise RequestError(
            "there is no GPU, and this model takes minutes for each step on a CPU",
            "--device cpu runs it there anyway; --model demo is small enough for a CPU",
        )

    def threads_on(self, device: str, num_local: int) -> int:
        """Return the CPU threads of each rank.

        Args:
            device: `cpu`, `cuda` or `cuda:N`; on CUDA one thread, so that bits do not depend on it.
            num_local: ranks on this machine, which share its cores.
        """
        if self.threads is not None:
            return self.threads
        if device.startswith("cuda"):  # bits then do not depend on the number of ranks
            return 1
        return max(1, len(os.sched_getaffinity(0)) // max(num_local, 1))


@dataclass(frozen=True, kw_only=True)
class WithoutLayout(PipelineOptions):
    """Pipeline options of commands for which each rank does the same."""

    layout: Literal["auto", "pipeline", "data-parallel"] | None = None
    split: Split | None = None
    replicas: int | None = None
    decoders: int | None = None
    cfg_parallel: Literal["auto", "1", "2"] | None = None
    decode_ranks: int | None = None
    costs: str | None = None
    share_experts: bool = False
