"""The options of a pipeline, and the step from them to one configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from svdpp.cli.options import complete
from svdpp.cli.options.declare import DIAGNOSTICS, LAYOUT, RECOVERY, flag, option
from svdpp.cli.options.model import ModelOptions
from svdpp.config import DEMO_MODEL, DUMMY_MODEL, ModelConfig, PipelineConfig, SamplingConfig
from svdpp.config.limits import find_costs, is_number, require
from svdpp.errors import RequestError
from svdpp.launch.world import World
from svdpp.plan.costs import PRESETS, Costs
from svdpp.plan.layout import Split
from svdpp.plan.split import largest_world

if TYPE_CHECKING:
    from svdpp.models.checkpoint import Checkpoint
    from svdpp.plan.choose import Choice

#: The options that the choice of a layout replaces.
OF_LAYOUT = ("layout", "split", "replicas", "decoders", "cfg_parallel", "decode_ranks")
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
        help="Number of ranks, one on each GPU.",
        show_default=default,
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


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(ModelOptions):
    """Options that together give one configuration; None stands for the default."""

    world: Annotated[int | None, gpus_option("all GPUs; on the CPU 2")] = None
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
            help="pipeline, the default: each rank does some steps of all clips; data-parallel: "
            "each makes whole clips; auto: the best forecast.",
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
        for name in self.refined if self.layout in ("auto", "data-parallel") else ():
            raise RequestError(
                f"--layout {self.layout} chooses the layout: leave out --{name}",
                details={"layout": self.layout, "option": f"--{name}"},
            )
        is_twice = self.chooses and self.decode_ranks is not None
        require(not is_twice, "auto chooses the layout: leave out --decode-ranks")

    @property
    def refined(self) -> dict[str, Any]:
        """Given refinements of a layout, as fields of a `PipelineConfig`."""
        names = "split", "replicas", "decoders"
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def pair_size(self) -> int:
        """Ranks that do each step together; 1 where that is left to `auto`."""
        return 2 if self.cfg_parallel == "2" else 1

    @property
    def chooses(self) -> bool:
        """Whether the forecast decides something."""
        return "auto" in (self.layout, self.cfg_parallel)

    @property
    def must_divide(self) -> bool:
        """Whether the number of ranks must divide the steps."""
        is_pipeline = self.layout in (None, "pipeline") and self.replicas is None
        return is_pipeline and self.split in (None, "uniform")

    def assumed_costs(self, *, decodes: bool = True, family: str = "svd") -> Costs:
        """Return the costs of `--costs`, or else published ones if clips of SVD are decoded.

        Args:
            decodes: whether the model decodes; the dummy does not, unless it sleeps.
            family: of the model.

        Raises:
            RequestError: `--costs` is neither a file nor a preset.
            InputError: the file cannot be read.
        """
        if self.costs is None and not (decodes and family == "svd"):
            return Costs()
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


def remark_on(costs: Costs) -> str:
    """Return a remark on costs that the user did not give.

    Args:
        costs: assumed instead.
    """
    if costs.device:
        of = f"by the costs of {ASSUMED_COSTS} ({costs.device}), not of your device"
        return f"{of}; svdpp profile measures yours"
    return "no times are known: a step counts as 1 s, and all else as 0 s; --costs gives them all"


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """Options of a command with what it knows besides them."""

    options: PipelineOptions
    num_clips: int | None
    """Of the run; None if only another process knows it."""
    launched: World | None = None
    """The launcher's world; None: this command starts the ranks."""
    device: str = ""
    """Its name, where `auto` is decided; "": decide it here."""
    from_image: bool | None = None
    """Whether clips start from an image; None: if the model needs one."""
    serves: bool = False
    """Whether the clips are those of a server: its users wait for each, and choose its steps."""
    time_scale: float | None = None
    """The dummy model sleeps for the time of the costs times this; None: it does not."""
    costs: Costs | None = None
    """To plan by, with the ranks on each host; None: those of the options."""
    expert_boundary: int | None = None
    """Of a model whose configs are not at hand; None: read them."""
    memory_gib: tuple[float, ...] | None = None
    """Of each device, to choose a layout by; None: that of this machine's."""
    default_world: int | None = None
    """Ranks without `--gpus`; None: one for each GPU of this machine, or 2 on the CPU."""

    def resolve(self, **more: Any) -> tuple[PipelineConfig, str]:
        """Return the configuration, and a remark on the choice of ranks and layout.

        Args:
            more: further fields of the configuration.

        Returns:
            The configuration, and the remark; "" if nothing was chosen.

        Raises:
            RequestError: the options contradict each other, the model or the machine.
            OutOfMemoryError: no layout fits the devices' memory.
        """
        options, launched, scale = self.options, self.launched, self.time_scale
        if scale is not None:
            only = "--time-scale works only with the dummy model"
            require(options.is_dummy, only, "leave --model out")
            is_scale = is_number(scale) and scale > 0
            wrong = f"--time-scale must be a finite number above 0, got {scale}"
            require(is_scale, wrong, above=0, value=scale)
        plan, reason = self._plan()
        why = "; ".join(filter(None, (self._remark, reason)))
        num_local = self.world_size if launched is None else launched.local_size
        config = PipelineConfig(
            world_size=self.world_size,
            model=self._model,
            sampling=self._sampling,
            device=self._device,
            num_threads=options.threads_on(self._device, num_local),
            timeout_seconds=options.timeout,
            start_timeout_seconds=options.start_timeout,
            checksum=options.checksum,
            deterministic=options.deterministic,
            allow_mixed_devices=options.allow_mixed_devices,
            **plan,
            **more,
        )
        return config, why

    def with_a_step_each(self) -> PipelineRequest:
        """Return the same request with a step for each rank, two at least for some schedulers."""
        world_size = self.world_size
        options = replace(self.options, steps=max(world_size, 2), world=world_size)
        return replace(self, options=options)

    @property
    def _decodes(self) -> bool:
        return self.time_scale is not None or not self.options.is_dummy

    @cached_property
    def _device(self) -> str:
        return self.device or self.options.device_name()

    @cached_property
    def _sampling(self) -> SamplingConfig:
        from_image = self.options.needs_image if self.from_image is None else self.from_image
        return self.options.sampling_config(from_image=from_image)

    @cached_property
    def _model(self) -> ModelConfig:
        sleeps = self.time_scale is not None
        family = self._sampling.family
        return self.options.model_config(self._device, family, dummy_sleeps=sleeps)

    @cached_property
    def _read(self) -> tuple[Checkpoint | None, SamplingConfig]:
        """The model's configs and the parameters with its values; of SVD none, and as they are."""
        if self._sampling.family == "svd":
            return None, self._sampling
        from svdpp.models.checkpoint import find_checkpoint

        checkpoint = find_checkpoint(self._model, weights=False)
        return checkpoint, checkpoint.resolve(self._sampling)

    @cached_property
    def _experts(self) -> dict[str, Any]:
        """The fields of a `PipelineConfig` for a model with two experts; empty for others."""
        share, boundary = self.options.share_experts, self.expert_boundary
        if boundary is None:
            checkpoint, sampling = self._read
            boundary = None if checkpoint is None else checkpoint.expert_boundary(sampling)
        if boundary is not None:
            return {"expert_boundary": boundary, "share_experts": share}
        require(not share, "--share-experts is for models with two experts", "leave it out")
        return {}

    @cached_property
    def _layout(self) -> PipelineOptions:
        """The options, with a split if the uniform one, their default, cannot be meant."""
        layout = self.options
        if self._experts:  # which rarely have equal steps
            is_of_model = self.expert_boundary is None
            if is_of_model and layout.must_divide and not layout.split:
                return replace(layout, split="balanced")
        elif self.serves and not (layout.refined or layout.layout):
            return replace(layout, split="alternating")
        if self._takes_all and layout.must_divide and not layout.split and self._odd_steps(layout):
            return replace(layout, split="balanced")
        return layout

    @property
    def _takes_all(self) -> bool:
        """Whether nobody says how many ranks there are, so that all devices are used."""
        return self.launched is None and self.options.world is None

    @cached_property
    def _devices(self) -> int:
        """The number of ranks for which there are devices."""
        if self.default_world is not None:
            return self.default_world
        if self._device != "cuda":
            return 2
        import torch

        return torch.cuda.device_count()

    def _odd_steps(self, layout: PipelineOptions) -> bool:
        """Whether the stages of all devices do not divide the steps."""
        stages = max(1, self._devices // layout.pair_size - (layout.decoders or 1) + 1)
        return self._sampling.num_inference_steps % stages > 0

    @cached_property
    def _remark(self) -> str:
        """Remark on the number of ranks, or the split, where all devices are to be used."""
        if not self._takes_all or self._layout.chooses:
            return ""
        count, used, steps = self._devices, self.world_size, self._sampling.num_inference_steps
        kind = "GPUs" if self._device.startswith("cuda") else "ranks"
        if used < count:
            pairs = "pairs need an even number" if self._layout.split != "uniform" else ""
            return f"{used} of {count} {kind}: {pairs or f'{count} do not divide {steps} steps'}"
        is_odd = self.options.must_divide and not self.options.split and not self._experts
        if is_odd and self._layout.split == "balanced":
            best = self._layout.pair_size * largest_world(steps, count // self._layout.pair_size)
            return (
                f"--split balanced: {count} {kind} do not divide {steps} steps; --gpus {best} does"
            )
        return ""

    @cached_property
    def world_size(self) -> int:
        """Number of ranks.

        Raises:
            RequestError: `--gpus` disagrees with the launcher.
        """
        launched, asked = self.launched, self.options.world
        if launched is not None:
            require(
                asked in (None, launched.size),
                f"--gpus {asked} disagrees with the launcher's world of {launched.size}",
                "leave it out",
                gpus=asked,
                world_size=launched.size,
            )
            return launched.size
        if asked is not None:
            return asked
        size = self._layout.pair_size
        stages = max(1, self._devices // size)
        if self._layout.must_divide and self._layout.split:  # the user asks for a uniform split
            stages = largest_world(self._sampling.num_inference_steps, stages)
        return size * stages

    @cached_property
    def _costs(self) -> Costs:
        if self.costs is not None:
            return self.costs
        costs = self._layout.assumed_costs(decodes=self._decodes, family=self._sampling.family)
        # The launcher, not the costs, knows which ranks share a host.
        per_host = None if self.launched is None else self.launched.ranks_per_host
        return replace(costs, ranks_per_host=per_host)

    @cached_property
    def pairs(self) -> bool:
        """Whether `auto` may choose pairs of ranks: if their bits are equal."""
        if self.expert_boundary is not None:  # such a model has two calls in each step
            return True
        if self.options.allow_mixed_devices:
            return False
        if self.options.is_dummy:
            return True
        checkpoint, sampling = self._read
        return checkpoint is not None and sampling.guided and checkpoint.row.branches == "calls"

    @cached_property
    def counts(self) -> dict[str, Any]:
        """Arguments of `choose_layout` and `compare_layouts` besides the layout itself.

        Raises:
            RequestError: the number of clips is not known.
        """
        layout, world_size, clips = self._layout, self.world_size, self.num_clips
        if clips is None:
            raise RequestError(
                "auto needs the number of clips, and under a launcher only rank 0 knows it",
                "svdpp plan --layout auto --clips M shows which options to give",
            )
        needs, limits = self._memory()
        # A server without pairs also takes clips without guidance: only the user gives that up.
        is_open = layout.chooses and layout.cfg_parallel in (None, "auto")
        may_pair = is_open and not (self.serves and layout.cfg_parallel is None)
        return {
            **self._experts,
            "costs": replace(self._costs, **needs),
            "num_steps": self._sampling.num_inference_steps,
            "world_size": world_size,
            "num_clips": clips,
            "memory_gib": limits,
            "pairs": may_pair and self.pairs,
            "sooner": self.serves or clips < world_size,
        }

    def _memory(self) -> tuple[dict[str, Any], tuple[float, ...]]:
        """Memory that the model's parts need, as fields of `Costs`, and GiB of each device."""
        if self.memory_gib is not None:
            return {}, self.memory_gib
        if self._device == "cpu" or self.options.is_dummy:
            return {}, ()
        from svdpp.driver.resolve import memory_of_devices  # diffusers: seconds

        return memory_of_devices(self._model, self._sampling, self._device, self.world_size)

    @cached_property
    def choice(self) -> Choice | None:
        """Layout that `auto` chooses; None if the options give the layout.

        Raises:
            OutOfMemoryError: no layout fits the devices' memory.
        """
        from svdpp.plan.choose import choose_layout

        layout = self._layout
        if not layout.chooses:
            return None
        fixed = {} if layout.layout == "data-parallel" else {"replicas": 1, **layout.refined}
        return choose_layout(
            **self.counts,
            cfg_parallel=layout.pair_size,
            fixed=None if layout.layout == "auto" else fixed,
            decodes=self._decodes,
        )

    def _plan(self) -> tuple[dict[str, Any], str]:
        """The layout and its costs as fields of a `PipelineConfig`, and a remark."""
        layout, choice, why = self._layout, self.choice, ""
        plan = {**self._experts, "costs": self._costs}
        if choice is None:
            plan |= layout.refined
            if layout.layout == "data-parallel":
                plan["replicas"] = max(1, self.world_size // layout.pair_size)
            if layout.cfg_parallel is not None:
                plan["cfg_parallel"] = layout.pair_size
            if layout.decode_ranks is not None:
                plan["decode_ranks"] = layout.decode_ranks
        else:
            names = ("split", "replicas", "decoders", "cfg_parallel", "costs")
            plan |= {name: getattr(choice.layout, name) for name in names}
            if choice.layout.share_experts:  # also if the options do not say so
                plan["share_experts"] = True
            why = f"layout: {choice.reason}"
            if layout.costs is None:
                why += f"; {remark_on(self._costs)}"
        if self.time_scale is not None:  # transfers and files take their real time
            plan["costs"] = plan["costs"].scaled(self.time_scale)
        return plan, why
