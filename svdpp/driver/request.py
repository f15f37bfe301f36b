"""`PipelineRequest`: a user's options, from which `resolve` makes a `PipelineConfig`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from svdpp.config import (
    DEMO_MODELS,
    DUMMY_MODEL,
    Dtype,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    SamplingConfig,
)
from svdpp.config.cost_files import find_costs
from svdpp.config.limits import is_number, require
from svdpp.errors import RequestError
from svdpp.launch.world import World
from svdpp.plan.costs import CostModel
from svdpp.plan.parallel import LayoutName, check_choices, layout_options
from svdpp.plan.split import largest_world

if TYPE_CHECKING:
    from svdpp.models.checkpoint import Checkpoint
    from svdpp.plan.choose import Choice

#: Name of the costs that are assumed if the user gives no costs. They were measured on one kind of
#: GPU, but are used for all: the best layout depends mainly on the ratio of decode to step time.
ASSUMED_COSTS = "svd-xt-a100"


def assumed_costs(*, decodes: bool, family: str) -> CostModel:
    """Return the costs to assume if the user gives no costs.

    For SVD, these are published costs. For other models, only steps have a cost.

    Args:
        decodes: Whether the model decodes clips. The dummy model does so only if it sleeps to
            imitate a real model.
        family: Family of the model.
    """
    return find_costs(ASSUMED_COSTS) if decodes and family == "svd" else CostModel()


def with_hosts_of(costs: CostModel, launched: World | None) -> CostModel:
    """Return a copy of costs that also has the number of ranks on each host.

    Args:
        costs: Costs without this number, such as those from a costs file.
        launched: World of the launcher; None: all ranks are on this host.
    """
    return replace(costs, ranks_per_host=None if launched is None else launched.ranks_per_host)


def describe_assumed_costs(costs: CostModel) -> str:
    """Return a sentence that tells the user which costs were assumed.

    Args:
        costs: Costs that are assumed because the user gave none.
    """
    if costs.device:
        of = f"computed with the costs of {ASSUMED_COSTS} ({costs.device}), not of your device"
        return f"{of}; svdpp profile measures your device"
    return "no times are known: a step counts as 1 s, all else as 0 s; --costs gives real times"


def find_device(device: str, model_name: str, *, any_on_cpu: bool = False) -> str:
    """Return the device; `auto` becomes `cuda` if there is a GPU, else `cpu` for small models.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        model_name: Name of the model.
        any_on_cpu: Whether the CPU is acceptable for every model, as for a check without a run.

    Raises:
        RequestError: The machine has no GPU, and the model is too slow for a CPU.
    """
    if device != "auto":
        return device
    from svdpp.launch.gpus import visible_gpus

    if visible_gpus():
        import torch

        # `is_available` is false if the installed torch is a CPU build, which cannot use the GPU.
        if torch.cuda.is_available():
            return "cuda"
    if any_on_cpu or model_name in (*DEMO_MODELS, DUMMY_MODEL):
        return "cpu"
    raise RequestError(
        "there is no GPU, and this model takes minutes for each step on a CPU",
        "use `device` cpu to run the model anyway, or use the small `model` demo or demo-text",
    )


def default_dtype(device: str, family: str) -> Dtype:
    """Return the default dtype: on GPUs as in diffusers' examples for the family, on CPUs fp32.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        family: Family of the model.
    """
    if not device.startswith("cuda"):
        return "fp32"
    return "fp16" if family == "svd" else "bf16"


@dataclass(frozen=True, kw_only=True)
class PipelineRequest:
    """Pipeline that a user requests; `resolve` chooses the values that the user leaves open.

    The command line, benchmarks and `Pipeline(config, layout=...)` each create such a request.

    Raises:
        RequestError: `parallel` sets a field that `layout` chooses.
    """

    model: ModelConfig
    sampling: SamplingConfig
    device: str
    """Device of the ranks: `cpu`, `cuda` or `cuda:N`."""
    layout: LayoutName | None = None
    """Name of the layout. None: `pipeline`, or for a server the server's default."""
    parallel: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ParallelConfig` that the user has set; `cfg_parallel_size` can also be `auto`."""
    num_ranks: int | None = None
    """Number of ranks that the user gave; None: see `world_size`."""
    num_threads: int | None = None
    """Number of CPU threads of each rank. None: 1 on CUDA; on the CPU, the number of cores divided
    by the number of ranks."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of `PipelineConfig`, such as `timeout_seconds`."""
    num_clips: int | None = None
    """Number of clips of the run. None: not known in this process, because only rank 0 knows it."""
    launched: World | None = None
    """World that a launcher gave this process; None: this process starts the ranks."""
    serves: bool = False
    """Whether a server makes the clips. Then a user waits for each clip, and the number of steps
    may differ between requests."""
    steps_vary: bool = False
    """Whether clips have different numbers of steps. Then the steps of some clips may not be
    divisible by the number of ranks."""
    time_scale: float | None = None
    """Factor by which costs are multiplied to get the seconds that the dummy model sleeps; None:
    the model does not sleep."""
    costs: CostModel | None = None
    """Costs for forecasts, with the number of ranks on each host; None: `assumed_costs`."""
    expert_boundary: int | None = None
    """Number of steps that the high-noise expert (the first of two denoisers) computes. It is set
    if the model's configs cannot be read. None: the number is computed from the configs."""
    memory_gib: tuple[float, ...] | None = None
    """Memory of each device in GiB, for the choice of a layout. None: the free memory of this
    machine's devices."""
    default_world: int | None = None
    """Largest number of ranks to use if neither the user nor a launcher gives a number. None: one
    rank for each GPU of this machine, or 2 on the CPU."""
    checkpoint: Checkpoint | None = None
    """Checkpoint of the model; None: the model's configs are read if they are needed."""

    @staticmethod
    def of(config: PipelineConfig, **more: Any) -> PipelineRequest:
        """Return the `PipelineRequest` for a configuration from the Python API.

        Args:
            config: Configuration from a user of the Python API. If its costs are the default,
                assumed costs are used.
            more: Further fields, such as `layout` and `num_clips`.
        """
        given = {
            each.name: value
            for each in fields(ParallelConfig)
            if (value := getattr(config.parallel, each.name)) != each.default
        }
        own = {each.name for each in fields(PipelineRequest)} | {"world_size"}
        settings = {each.name: getattr(config, each.name) for each in fields(PipelineConfig)}
        return PipelineRequest(
            model=config.model,
            sampling=config.sampling,
            device=config.device,
            parallel=given,
            num_ranks=config.world_size,
            num_threads=config.num_threads,
            settings={name: value for name, value in settings.items() if name not in own},
            costs=None if config.costs == CostModel() else config.costs,
            expert_boundary=config.expert_boundary,
            **more,
        )

    def __post_init__(self) -> None:
        check_choices(self.layout, self.parallel)

    def resolve(self) -> tuple[PipelineConfig, str]:
        """Choose ranks and layout; return the pipeline's configuration, and why they were chosen.

        Returns:
            Configuration, and a sentence on the choice of ranks and layout; "" if nothing was
            chosen.

        Raises:
            RequestError: The fields contradict each other, the model or the machine.
            OutOfMemoryError: No layout fits into the memory of the devices.
        """
        self._check_time_scale()
        parallel, costs, reason = self._chosen()
        why = "; ".join(filter(None, (self._note, reason)))
        # The scaled costs are the seconds of encodes, steps and decodes, for which the dummy model
        # sleeps. Its transfers and files are real.
        if self.time_scale is not None:
            costs = costs.scaled(self.time_scale)
        config = PipelineConfig(
            world_size=self.world_size,
            model=self.model,
            sampling=self.sampling,
            device=self.device,
            num_threads=self._threads,
            parallel=parallel,
            costs=costs,
            expert_boundary=self._boundary,
            **self.settings,
        )
        return config, why

    def _check_time_scale(self) -> None:
        scale = self.time_scale
        if scale is None:
            return
        only = "--time-scale works only with the dummy model"
        require(self.model.is_dummy, only, "leave --model out")
        is_scale = is_number(scale) and scale > 0
        wrong = f"--time-scale must be a finite number above 0, got {scale}"
        require(is_scale, wrong, above=0, value=scale)

    def with_one_step_per_rank(self) -> PipelineRequest:
        """Return a copy of the request for a short test run: one denoising step for each rank.

        The copy has at least two steps, because some schedulers need two, and more if the model's
        family needs more. If the family has a fixed number of steps, the copy keeps this number.
        """
        world_size = self.world_size
        sampling = self.sampling.with_few_steps(max(world_size, 2), world_size)
        return replace(self, sampling=sampling, num_ranks=world_size)

    @property
    def _threads(self) -> int:
        if self.num_threads is not None:
            return self.num_threads
        # A GPU rank uses one CPU thread, so that bits do not depend on the number of ranks.
        if self.device.startswith("cuda"):
            return 1
        num_local = self.world_size if self.launched is None else self.launched.local_size
        return max(1, len(os.sched_getaffinity(0)) // max(num_local, 1))

    # --- facts about the model ------------------------------------------------------------------

    @property
    def _decodes(self) -> bool:
        return self.model.dummy_sleeps or not self.model.is_dummy

    @cached_property
    def _read_checkpoint(self) -> Checkpoint:
        if self.checkpoint is not None:
            return self.checkpoint
        from svdpp.models.checkpoint import find_checkpoint

        return find_checkpoint(self.model, weights=False)

    @cached_property
    def _checkpoint_and_sampling(self) -> tuple[Checkpoint | None, SamplingConfig]:
        """Checkpoint of the model, and sampling parameters with the model's defaults.

        For SVD, the checkpoint is not read. Then the first value is None, and the second has the
        sampling parameters without the model's defaults.
        """
        if self.sampling.family == "svd":
            return None, self.sampling
        return self._read_checkpoint, self._read_checkpoint.resolve_sampling(self.sampling)

    @cached_property
    def _boundary(self) -> int | None:
        """Number of steps of the high-noise expert; None: the model has one denoiser."""
        boundary = self.expert_boundary
        if boundary is None:
            checkpoint, sampling = self._checkpoint_and_sampling
            boundary = None if checkpoint is None else checkpoint.expert_boundary(sampling)
        is_shared = bool(self.parallel.get("share_experts"))
        only = "`share_experts` is for models with two experts"
        require(boundary is not None or not is_shared, only, "leave `share_experts` out")
        return boundary

    # --- choice of the number of ranks, and of the split ------------------------------------------

    @property
    def uses_auto(self) -> bool:
        """Whether the layout, or a field of the layout, is `auto`, which a forecast resolves."""
        return "auto" in (self.layout, self.parallel.get("cfg_parallel_size"))

    @property
    def _pair_size(self) -> int:
        """Number of ranks that share each step: 2 if the user sets `cfg_parallel` 2, else 1."""
        size = self.parallel.get("cfg_parallel_size", 1)
        return 1 if size == "auto" else int(size)

    def _overrides(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the user's values for layout fields that `auto` would otherwise choose."""
        options = layout_options()
        return {name: each for name, each in given.items() if "auto" in options[name].chosen_by}

    def _requires_even_steps(self, given: Mapping[str, Any]) -> bool:
        """Whether the number of steps must be divisible by the number of ranks."""
        is_pipeline = self.layout in (None, "pipeline") and "data_parallel_size" not in given
        return is_pipeline and given.get("split", "uniform") == "uniform"

    @cached_property
    def _given(self) -> Mapping[str, Any]:
        """Layout fields that the user has set, and a default split if the user has set no split."""
        split = self._default_split
        return self.parallel if split is None else {**self.parallel, "split": split}

    @property
    def _default_split(self) -> str | None:
        """Division of the steps between the ranks if the user gives none, such as `balanced`.

        None: the default of `ParallelConfig` is used.
        """
        given = self.parallel
        can_be_balanced = self._requires_even_steps(given) and "split" not in given
        # A uniform split gives each rank the same number of steps. It rarely fits a model with two
        # experts, because the experts rarely have the same number of steps.
        if self._boundary is not None:
            if can_be_balanced and self.expert_boundary is None:
                return "balanced"
        elif (self.serves or self.steps_vary) and not self.layout and not self._overrides(given):
            return "alternating"
        if can_be_balanced and self._uses_all_devices and self._has_remainder:
            return "balanced"
        return None

    @property
    def _uses_all_devices(self) -> bool:
        """Whether the run uses all devices: neither user nor launcher sets the number of ranks."""
        return self.launched is None and self.num_ranks is None

    @cached_property
    def _num_devices(self) -> int:
        """Number of devices: `default_world` if set, else the number of GPUs for `cuda`, else 2."""
        if self.default_world is not None:
            return self.default_world
        if self.device != "cuda":
            return 2
        import torch

        return torch.cuda.device_count()

    @property
    def _has_remainder(self) -> bool:
        """Whether the steps cannot be divided evenly between the stages if all devices are used."""
        return self.sampling.num_inference_steps % self._max_stages > 0

    @property
    def _num_turns(self) -> int:
        """Number of additional ranks (or pairs) for the last stage; 0 if there is one decoder.

        With several decoders, `num_decoders` ranks (or pairs) take turns as the last stage: each
        runs the last steps and the decode of every `num_decoders`-th clip.
        """
        return max(1, int(self.parallel.get("num_decoders", 1))) - 1

    @property
    def _max_stages(self) -> int:
        """Number of stages if one pipeline uses all devices; 1 if there are too few devices."""
        return max(1, self._num_devices // self._pair_size - self._num_turns)

    @property
    def _even_world(self) -> int:
        """Largest number of ranks with which every stage has the same number of steps.

        It is at most the number of devices, unless these are too few for even one stage.
        """
        stages = largest_world(self.sampling.num_inference_steps, self._max_stages)
        return self._pair_size * (stages + self._num_turns)

    @cached_property
    def _note(self) -> str:
        """Sentence on why the number of ranks or the split was chosen; "" if neither was chosen."""
        if not self._uses_all_devices or self.uses_auto:
            return ""
        count, used, steps = self._num_devices, self.world_size, self.sampling.num_inference_steps
        kind = "GPUs" if self.device.startswith("cuda") else "ranks"
        # Stages are pairs or, with several decoders, fewer than the ranks.
        is_rank = self._pair_size == 1 and not self._num_turns
        between = f"{count} {kind}" if is_rank else f"{self._max_stages} stages"
        problem = f"{steps} steps cannot be divided evenly between {between}"
        if used < count:
            if used > count - self._pair_size:
                problem = "--cfg-parallel 2 needs an even number"
            return f"using {used} of {count} {kind}: {problem}"
        was_uniform = self._requires_even_steps(self.parallel) and "split" not in self.parallel
        is_odd = was_uniform and self._boundary is None
        if is_odd and self._given.get("split") == "balanced":
            return f"using --split balanced: {problem}; with --gpus {self._even_world} they can"
        return ""

    @cached_property
    def world_size(self) -> int:
        """Number of ranks: given by the launcher, else by the user, else chosen for the devices.

        Raises:
            RequestError: `num_ranks` disagrees with the launcher.
        """
        launched, requested = self.launched, self.num_ranks
        if launched is not None:
            require(
                requested in (None, launched.size),
                f"`world_size` {requested} disagrees with the launcher's, which is {launched.size}",
                "leave `world_size` out",
                gpus=requested,
                world_size=launched.size,
            )
            return launched.size
        if requested is not None:
            return requested
        largest = self._pair_size * max(1, self._num_devices // self._pair_size)
        # The user has requested a uniform split, so the number of stages must divide the number of
        # steps.
        if self._requires_even_steps(self._given) and "split" in self._given:
            return min(largest, self._even_world)
        return largest

    # --- choice of the layout -------------------------------------------------------------------

    @cached_property
    def _planned_costs(self) -> CostModel:
        if self.costs is not None:
            return self.costs
        costs = assumed_costs(decodes=self._decodes, family=self.sampling.family)
        return with_hosts_of(costs, self.launched)

    @cached_property
    def allows_pairs(self) -> bool:
        """Whether `auto` may choose `cfg_parallel` 2: only if this choice changes no bits."""
        # `expert_boundary` is only set for models with two experts. In each step, these models call
        # the denoiser twice: for the conditional and for the unconditional prediction. In a pair of
        # ranks, each rank makes one of these calls, with the same inputs, so no bits change.
        if self.expert_boundary is not None:
            return True
        if self.settings.get("allow_mixed_devices"):
            return False
        if self.model.is_dummy:
            return True
        checkpoint, sampling = self._checkpoint_and_sampling
        is_exact = checkpoint is not None and checkpoint.spec.pairs_are_exact
        return bool(is_exact and sampling.uses_guidance)

    @cached_property
    def forecast_arguments(self) -> dict[str, Any]:
        """Arguments of `choose_layout` and `compare_layouts`, except the layout itself.

        Raises:
            RequestError: The number of clips is not known.
        """
        world_size, clips, given = self.world_size, self.num_clips, self._given
        if clips is None:
            raise RequestError(
                "auto needs the number of clips, and under a launcher only rank 0 knows it",
                "svdpp plan --layout auto --clips M shows which options to give",
                details={"rank": 0},
            )
        needs, limits = self._memory()
        # With `cfg_parallel_size` 2, a server cannot make clips without guidance. So for a server,
        # the search may choose 2 only if the user set the field to "auto".
        size = given.get("cfg_parallel_size")
        may_pair = self.uses_auto and size in (None, "auto") and not (self.serves and size is None)
        # If `chosen_by` of a layout field is empty, the search never chooses this field. So all
        # layouts that the search compares get the user's value.
        kept = {name for name, option in layout_options().items() if not option.chosen_by}
        return {
            **{name: value for name, value in given.items() if name in kept},
            "expert_boundary": self._boundary,
            "costs": replace(self._planned_costs, **needs),
            "num_steps": self.sampling.num_inference_steps,
            "world_size": world_size,
            "num_clips": clips,
            "memory_gib": limits,
            "pairs": may_pair and self.allows_pairs,
            "minimize_latency": self.serves or clips < world_size,
        }

    def _memory(self) -> tuple[dict[str, Any], tuple[float, ...]]:
        """Return the memory of the model's parts (fields of `CostModel`) and of each device in GiB.

        The first value is empty if the user gives `memory_gib`: the costs then have the memory of
        the parts. Both values are empty on the CPU and for the dummy model, whose layout does not
        depend on memory.
        """
        if self.memory_gib is not None:
            return {}, self.memory_gib
        if self.device == "cpu" or self.model.is_dummy:
            return {}, ()
        # This imports diffusers, which takes seconds.
        from svdpp.driver.resolve import memory_of_devices

        return memory_of_devices(
            self.model, self.sampling, self.device, self.world_size, checkpoint=self.checkpoint
        )

    @cached_property
    def choice(self) -> Choice | None:
        """Layout that `auto` chooses; None if the user gives the layout.

        Raises:
            OutOfMemoryError: No layout fits into the memory of the devices.
        """
        from svdpp.plan.choose import choose_layout

        if not self.uses_auto:
            return None
        fixed = None
        if self.layout == "data-parallel":
            fixed = {}
        elif self.layout != "auto":
            fixed = {"data_parallel_size": 1, **self._overrides(self._given)}
        return choose_layout(
            **self.forecast_arguments,
            cfg_parallel_size=self._pair_size,
            fixed=fixed,
            decodes=self._decodes,
        )

    def _chosen(self) -> tuple[ParallelConfig, CostModel, str]:
        """Return the layout's fields, the costs, and a sentence on why `auto` chose the layout.

        The sentence is empty if the user chose the layout.
        """
        choice = self.choice
        if choice is None:
            given = dict(self._given)
            if self.layout == "data-parallel":
                given["data_parallel_size"] = max(1, self.world_size // self._pair_size)
            return ParallelConfig(**given), self._planned_costs, ""
        # The number of ranks that decode is determined later, from the model.
        parallel = replace(choice.layout.parallel, decode_parallel_size=None)
        why = f"layout: {choice.reason}"
        if self.costs is None:
            why += f"; {describe_assumed_costs(self._planned_costs)}"
        return parallel, choice.layout.costs, why
