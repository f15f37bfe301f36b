"""The step from a command's options to one configuration: number of ranks, layout, costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from svdpp.cli.options.pipeline import ASSUMED_COSTS, PipelineOptions
from svdpp.config import ModelConfig, PipelineConfig, SamplingConfig
from svdpp.config.limits import is_number, require
from svdpp.errors import RequestError
from svdpp.launch.world import World
from svdpp.plan.costs import CostModel
from svdpp.plan.split import largest_world

if TYPE_CHECKING:
    from svdpp.models.checkpoint import Checkpoint
    from svdpp.plan.choose import Choice


def describe_assumed_costs(costs: CostModel) -> str:
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
    """Number of clips of the run; None: only another process knows it."""
    launched: World | None = None
    """The launcher's world; None: this command starts the ranks."""
    device: str = ""
    """Type of the device, `cuda` or `cpu`, if it is decided; "": decide it here."""
    from_image: bool | None = None
    """Whether clips start from an image; None: if the model needs one."""
    serves: bool = False
    """Whether the clips are those of a server: its users wait for each, and choose its steps."""
    time_scale: float | None = None
    """The dummy model sleeps for the time of the costs times this; None: it does not."""
    costs: CostModel | None = None
    """Costs to plan by, with the ranks on each host; None: those of the options."""
    expert_boundary: int | None = None
    """Number of steps of the first expert, if no configs are at hand; None: read them."""
    memory_gib: tuple[float, ...] | None = None
    """Memory of each device in GiB, to choose a layout by; None: that of this machine's devices."""
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
        plan, reason = self._layout_fields()
        why = "; ".join(filter(None, (self._note, reason)))
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

    def with_one_step_per_rank(self) -> PipelineRequest:
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
    def _checkpoint_and_sampling(self) -> tuple[Checkpoint | None, SamplingConfig]:
        """The model's configs and the parameters with its values; of SVD none, and as they are."""
        if self._sampling.family == "svd":
            return None, self._sampling
        from svdpp.models.checkpoint import find_checkpoint

        checkpoint = find_checkpoint(self._model, weights=False)
        return checkpoint, checkpoint.resolve_sampling(self._sampling)

    @cached_property
    def _expert_fields(self) -> dict[str, Any]:
        """The fields of a `PipelineConfig` for a model with two experts; empty for others."""
        share, boundary = self.options.share_experts, self.expert_boundary
        if boundary is None:
            checkpoint, sampling = self._checkpoint_and_sampling
            boundary = None if checkpoint is None else checkpoint.expert_boundary(sampling)
        if boundary is not None:
            return {"expert_boundary": boundary, "share_experts": share}
        require(not share, "--share-experts is for models with two experts", "leave it out")
        return {}

    @cached_property
    def _layout(self) -> PipelineOptions:
        """The options, with a split if the uniform one, their default, cannot be meant."""
        layout = self.options
        if self._expert_fields:  # which rarely have equal steps
            is_of_model = self.expert_boundary is None
            if is_of_model and layout.requires_even_steps and not layout.split:
                return replace(layout, split="balanced")
        elif self.serves and not (layout.layout_overrides or layout.layout):
            return replace(layout, split="alternating")
        if (
            self._uses_all_devices
            and layout.requires_even_steps
            and not layout.split
            and self._has_remainder(layout)
        ):
            return replace(layout, split="balanced")
        return layout

    @property
    def _uses_all_devices(self) -> bool:
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

    def _has_remainder(self, layout: PipelineOptions) -> bool:
        """Whether the stages of all devices do not divide the steps."""
        stages = max(1, self._devices // layout.cfg_parallel_size - (layout.decoders or 1) + 1)
        return self._sampling.num_inference_steps % stages > 0

    @cached_property
    def _note(self) -> str:
        """Remark on the number of ranks, or the split, where all devices are to be used."""
        if not self._uses_all_devices or self._layout.uses_auto:
            return ""
        count, used, steps = self._devices, self.world_size, self._sampling.num_inference_steps
        kind = "GPUs" if self._device.startswith("cuda") else "ranks"
        if used < count:
            pairs = "pairs need an even number" if self._layout.split != "uniform" else ""
            return f"{used} of {count} {kind}: {pairs or f'{count} do not divide {steps} steps'}"
        is_odd = (
            self.options.requires_even_steps and not self.options.split and not self._expert_fields
        )
        if is_odd and self._layout.split == "balanced":
            best = self._layout.cfg_parallel_size * largest_world(
                steps, count // self._layout.cfg_parallel_size
            )
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
        launched, requested = self.launched, self.options.world
        if launched is not None:
            require(
                requested in (None, launched.size),
                f"`world_size` {requested} disagrees with the launcher's world of {launched.size}",
                "leave it out",
                gpus=requested,
                world_size=launched.size,
            )
            return launched.size
        if requested is not None:
            return requested
        size = self._layout.cfg_parallel_size
        stages = max(1, self._devices // size)
        # The user asks for a uniform split.
        if self._layout.requires_even_steps and self._layout.split:
            stages = largest_world(self._sampling.num_inference_steps, stages)
        return size * stages

    @cached_property
    def _costs(self) -> CostModel:
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
        checkpoint, sampling = self._checkpoint_and_sampling
        return (
            checkpoint is not None
            and sampling.uses_guidance
            and checkpoint.spec.branches == "calls"
        )

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
                details={"rank": 0},
            )
        needs, limits = self._memory()
        # A server without pairs also takes clips without guidance: only the user gives that up.
        is_open = layout.uses_auto and layout.cfg_parallel in (None, "auto")
        may_pair = is_open and not (self.serves and layout.cfg_parallel is None)
        return {
            **self._expert_fields,
            "costs": replace(self._costs, **needs),
            "num_steps": self._sampling.num_inference_steps,
            "world_size": world_size,
            "num_clips": clips,
            "memory_gib": limits,
            "pairs": may_pair and self.pairs,
            "minimize_latency": self.serves or clips < world_size,
        }

    def _memory(self) -> tuple[dict[str, Any], tuple[float, ...]]:
        """Memory that the model's parts need, as fields of `CostModel`, and GiB of each device."""
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
        from svdpp.plan.layout import layout_fields

        layout = self._layout
        if not layout.uses_auto:
            return None
        fixed = (
            {} if layout.layout == "data-parallel" else {"replicas": 1, **layout.layout_overrides}
        )
        return choose_layout(
            **self.counts,
            cfg_parallel_size=layout.cfg_parallel_size,
            fixed=None if layout.layout == "auto" else layout_fields(fixed),
            decodes=self._decodes,
        )

    def _layout_fields(self) -> tuple[dict[str, Any], str]:
        """The layout and its costs as fields of a `PipelineConfig`, and a remark."""
        layout, choice, why = self._layout, self.choice, ""
        plan = {**self._expert_fields, "costs": self._costs}
        if choice is None:
            plan |= layout.layout_overrides
            if layout.layout == "data-parallel":
                plan["replicas"] = max(1, self.world_size // layout.cfg_parallel_size)
            if layout.cfg_parallel is not None:
                plan["cfg_parallel"] = layout.cfg_parallel_size
            if layout.decode_ranks is not None:
                plan["decode_ranks"] = layout.decode_ranks
        else:
            chosen = choice.layout.options()
            del chosen["decode_ranks"]  # follows from the model
            plan |= {**chosen, "costs": choice.layout.costs}
            if choice.layout.share_experts:  # also if the options do not say so
                plan["share_experts"] = True
            why = f"layout: {choice.reason}"
            if layout.costs is None:
                why += f"; {describe_assumed_costs(self._costs)}"
        if self.time_scale is not None:  # transfers and files take their real time
            plan["costs"] = plan["costs"].scaled(self.time_scale)
        return plan, why
