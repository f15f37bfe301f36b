"""The step from options to one configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from svdpp.cli.options.layout import LayoutOptions, Memory, ShareOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.ranks import RankOptions
from svdpp.cli.options.sampling import SamplingOptions
from svdpp.cli.plan_choice import PlanChoice, experts_of
from svdpp.cli.rank_count import without_world
from svdpp.config import PipelineConfig
from svdpp.errors import RequestError
from svdpp.launch.world import World

if TYPE_CHECKING:
    from svdpp.models.checkpoint import Use


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """The option groups that together give one configuration.

    Args:
        launched: the launcher's world; None: this command starts the ranks.
        device: as decided by `RankOptions.device_for`.
        on_cpu: default number of ranks that share the CPU, or one GPU.
        default_split: split of a model with one expert if the user gives no layout; None: uniform.
            With two experts it is balanced, because they rarely have equal steps.
        time_scale: the dummy model sleeps for the time of the costs times this; None: it does not.
    """

    launched: World | None
    ranks: RankOptions
    model: ModelOptions
    sampling: SamplingOptions
    layout: LayoutOptions
    experts: ShareOptions
    device: str
    from_image: bool
    on_cpu: int = 2
    default_split: str | None = None
    time_scale: float | None = None

    def __post_init__(self) -> None:
        if (scale := self.time_scale) is None:
            return
        if not self.model.is_dummy:
            raise RequestError("--time-scale works only with the dummy model", "leave --model out")
        if not (math.isfinite(scale) and scale > 0):
            raise RequestError(f"--time-scale must be a finite number above 0, got {scale}")

    @cached_property
    def plan(self) -> PlanChoice:
        """The number of ranks, and how they share the work."""
        sampled = self.sampling.to_config(self.model, from_image=self.from_image)
        experts = experts_of(
            self.model.to_config(self.device, sampled.family),
            sampled,
            share=self.experts.share_experts,
        )
        layout = self.layout
        if experts is None and self.default_split and not layout.given:
            layout = replace(layout, split=self.default_split)
        elif experts is not None and layout.must_divide and not layout.split:
            layout = replace(layout, split="balanced")
        return PlanChoice(
            launched=self.launched,
            layout=layout,
            experts=experts,
            world=self.ranks.world,
            on_cpu=self.on_cpu,
            steps=sampled.num_inference_steps,
            family=sampled.family,
            device=self.device,
        )

    def config(
        self, num_clips: int | None, *, memory: Memory | None = None, **more: Any
    ) -> tuple[PipelineConfig, str]:
        """The configuration, and a remark on the choice of the layout; "" for none.

        `num_clips` and `memory` are as in `LayoutOptions.settings`; `more` are further fields.
        """
        sleeps = self.time_scale is not None
        shape, why = self.plan.settings(
            num_clips=num_clips,
            decodes=sleeps or not self.model.is_dummy,
            memory=memory,
        )
        if self.time_scale is not None:
            # Transfers and files take their real time.
            shape["costs"] = shape["costs"].scaled(self.time_scale)
        config = pipeline_config(
            self.launched,
            self.ranks,
            self.model,
            self.sampling,
            device=self.device,
            plan={**shape, **more},
            from_image=self.from_image,
            family=self.plan.family,
            dummy_sleeps=sleeps,
        )
        return config, why


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
            "--decode-chunk-size auto measures before ranks start, and torchrun has started them",
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
