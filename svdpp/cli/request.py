"""The step from options to one configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from svdpp.cli.options.layout import LayoutOptions, Memory, ShareOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.ranks import RankOptions
from svdpp.cli.options.sampling import SamplingOptions
from svdpp.config import ModelConfig, PipelineConfig, SamplingConfig
from svdpp.errors import RequestError
from svdpp.launch.world import World
from svdpp.plan.choose import Pairs
from svdpp.plan.split import largest_world

if TYPE_CHECKING:
    from svdpp.models.checkpoint import Use


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The option groups that together give one configuration.

    Args:
        launched: the launcher's world; None: this command starts the ranks.
        on_cpu: default number of ranks that share the CPU, or one GPU.
        device_as_for: the model by which `--device auto` is decided; empty: the own one.
        default_split: split of a model with one expert if the user gives no layout; None: uniform.
            With two experts it is balanced, because they rarely have equal steps.
        serves: whether the clips are those of a server, whose users wait for each.
        time_scale: the dummy model sleeps for the time of the costs times this; None: it does not.
    """

    launched: World | None
    ranks: RankOptions
    model: ModelOptions
    sampling: SamplingOptions
    layout: LayoutOptions
    experts: ShareOptions
    from_image: bool
    on_cpu: int = 2
    device_as_for: str = ""
    default_split: str | None = None
    serves: bool = False
    time_scale: float | None = None

    @cached_property
    def device(self) -> str:
        """The name of the device, where `auto` is decided."""
        return self.ranks.device_for(self.device_as_for or self.model.model)


def resolve(
    options: PipelineOptions,
    num_clips: int | Callable[[int], int] | None,
    *,
    memory: Memory | None = None,
    **more: Any,
) -> tuple[PipelineConfig, str]:
    """The configuration, and a remark on the choice of the layout; "" for none.

    Args:
        options: of the command.
        num_clips: of the run, or a function of its number of ranks; None if only another process
            knows it.
        memory: tells `--layout auto` what fits; None: everything fits.
        more: further fields of the configuration.
    """
    model, scale = options.model, options.time_scale
    _check_scale(scale, is_dummy=model.is_dummy)
    sampled = options.sampling.to_config(model, from_image=options.from_image)
    experts = experts_of(
        model.to_config(options.device, sampled.family),
        sampled,
        share=options.experts.share_experts,
    )
    layout = options.layout
    if experts is None and options.default_split and not (layout.refined or layout.layout):
        layout = replace(layout, split=options.default_split)
    elif experts is not None and layout.must_divide and not layout.split:
        layout = replace(layout, split="balanced")
    steps, world_size = sampled.num_inference_steps, options.ranks.world
    world_size = joined_world(options.launched, world_size)
    if world_size is None:
        divide, size = layout.must_divide, layout.pair_size
        on_cpu = max(size, options.on_cpu)
        world_size = default_world(
            options.device, steps, on_cpu=on_cpu, divide=divide, multiple=size
        )
    clips = num_clips(world_size) if callable(num_clips) else num_clips
    pairs, no_pairs = (
        pairs_of(model, sampled, options.ranks) if layout.chooses_pairs else ("no", "")
    )
    shape, why = layout.settings(
        num_steps=steps,
        world_size=world_size,
        num_clips=clips,
        decodes=scale is not None or not model.is_dummy,
        ranks_per_host=None if options.launched is None else options.launched.ranks_per_host,
        memory=memory,
        experts=experts,
        family=sampled.family,
        # A server without pairs also takes clips without guidance: only the user gives that up.
        pairs="no" if options.serves and layout.cfg_parallel is None else pairs,
        sooner=options.serves or (clips or 0) < world_size,
    )
    if no_pairs and layout.cfg_parallel == "auto":
        why = f"{why}; {no_pairs}"
    if scale is not None:  # transfers and files take their real time
        shape["costs"] = shape["costs"].scaled(scale)
    config = pipeline_config(
        options.launched,
        options.ranks,
        model,
        options.sampling,
        device=options.device,
        # `auto` may let a rank hold both experts although the options do not.
        plan={"world_size": world_size, **(experts or {}), **shape, **more},
        from_image=options.from_image,
        family=sampled.family,
        dummy_sleeps=scale is not None,
    )
    return config, why


def _check_scale(scale: float | None, *, is_dummy: bool) -> None:
    if scale is not None and not is_dummy:
        raise RequestError("--time-scale works only with the dummy model", "leave --model out")
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise RequestError(f"--time-scale must be a finite number above 0, got {scale}")


def experts_of(
    model: ModelConfig, sampling: SamplingConfig, *, share: bool
) -> dict[str, Any] | None:
    """The fields of a `PipelineConfig` for a model with two experts; None for other models.

    Args:
        model: its configs are read, and downloaded if needed.
        sampling: decides at which step the model changes its expert.
        share: whether one rank may hold both.
    """
    boundary = None
    if sampling.family != "svd":
        from svdpp.models.checkpoint import find_checkpoint

        checkpoint = find_checkpoint(model, weights=False)
        boundary = checkpoint.expert_boundary(checkpoint.resolve(sampling))
    if boundary is None:
        if share:
            raise RequestError(
                "--share-experts is for models with two experts, such as Wan 2.2 A14B",
                "leave it out",
            )
        return None
    return {"expert_boundary": boundary, "share_experts": share}


def pairs_of(model: ModelOptions, sampled: SamplingConfig, ranks: RankOptions) -> tuple[Pairs, str]:
    """Whether `auto` may choose pairs of ranks for clips with these parameters, and why not."""
    if ranks.allow_mixed_devices:
        return "no", "no pairs: devices may differ"
    if model.is_dummy:
        return "exact", ""
    from svdpp.models.checkpoint import find_checkpoint
    from svdpp.models.engine.rows import ROWS

    if sampled.family != "svd":
        checkpoint = find_checkpoint(model.to_config("cpu", sampled.family), weights=False)
        sampled = checkpoint.resolve(sampled)
    if not sampled.guided:
        return "no", "no pairs: the guidance is off"
    answers: Mapping[str | None, tuple[Pairs, str]] = {
        "calls": ("exact", ""),
        "batch": ("unproven", ""),
        None: ("no", "no pairs: the model's steps have other evaluations than two branches"),
    }
    return answers[ROWS[sampled.family].branches]


def pipeline_config(
    launched: World | None,
    ranks: RankOptions,
    model: ModelOptions,
    sampling: SamplingOptions,
    *,
    device: str,
    plan: Mapping[str, Any],
    from_image: bool,
    family: str | None = None,
    dummy_sleeps: bool = False,
) -> PipelineConfig:
    """One checked configuration of all options."""
    if launched is not None and sampling.measures_chunk:  # another host's rank may decode
        raise RequestError(
            "--decode-chunk-size auto is chosen before ranks start, and torchrun has started them",
            "give a number of frames",
        )
    family = family or model.family
    num_local = plan["world_size"] if launched is None else launched.local_size
    try:
        return PipelineConfig(
            model=model.to_config(device, family, dummy_sleeps=dummy_sleeps),
            sampling=sampling.to_config(model, from_image=from_image, family=family),
            device=device,
            num_threads=ranks.threads_on(device, num_local),
            timeout_seconds=ranks.timeout,
            start_timeout_seconds=ranks.start_timeout,
            checksum=ranks.checksum,
            deterministic=model.deterministic,
            allow_mixed_devices=ranks.allow_mixed_devices,
            **plan,
        )
    except RequestError as error:
        if launched is not None:
            error.hint = without_world(error.hint)
        raise


def image_use(model: ModelOptions) -> Use:
    """What clips of the model do with a photograph; reads its configs only if it takes prompts."""
    if model.family == "svd":
        return "needed"
    from svdpp.models.checkpoint import find_checkpoint

    return find_checkpoint(model.to_config("cpu"), weights=False).image_use


def needs_image(model: ModelOptions) -> bool:
    """Whether clips of the model need a photograph."""
    return image_use(model) == "needed"


def joined_world(
    launched: World | None,
    asked: int | None,
    option: str = "--world",
    leave_out: str = "leave --world and --gpus out",
) -> int | None:
    """The number of ranks of torchrun or srun; without a launcher `asked`."""
    if launched is None:
        return asked
    if asked is not None and asked != launched.size:
        raise RequestError(
            f"{option} {asked} disagrees with {launcher_name(launched)}'s world of {launched.size}",
            f"{leave_out} under {launcher_name(launched)}",
            details={"asked": asked, "found": launched.size},
        )
    return launched.size


def launcher_name(world: World) -> str:
    """The name of the launcher."""
    return "Slurm" if world.launcher == "slurm" else "torchrun"


def without_world(hint: str) -> str:
    """`hint` without its advice on `--world`, for when something else sets the number of ranks."""
    return re.sub(r",? or --world \d+(?: or fewer)?", "", hint)


def default_world(
    device: str, num_steps: int, *, on_cpu: int = 2, divide: bool = True, multiple: int = 1
) -> int:
    """The default number of ranks: all GPUs on CUDA, else `on_cpu`; a multiple of `multiple`.

    With `divide` it is the largest up to that whose number of stages divides the steps.
    """
    count = on_cpu
    if device == "cuda":
        import torch

        count = max(torch.cuda.device_count(), 1)
    stages = max(1, count // max(1, multiple))
    return multiple * (largest_world(max(num_steps, 1), stages) if divide else stages)
