"""Owns one pipeline's configuration: model, sampler, and the ranks that share the steps."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from svdpp.config.limits import (
    MAX_CUDA_INDEX,
    check_seconds,
    check_type,
    check_whole,
    is_number,
    max_threads,
    require,
    shown,
)
from svdpp.config.model import ModelConfig
from svdpp.config.sampling import SamplingConfig
from svdpp.plan.costs import Costs
from svdpp.plan.layout import Layout, Split
from svdpp.plan.limits import MAX_RANKS

if TYPE_CHECKING:
    from svdpp.plan.draft import DraftPlan


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """One clip sooner: an approximation first, the exact clip after it.

    Raises:
        RequestError: a PSNR that no two clips can have.
    """

    start_steps: tuple[int, ...]
    """The step at which each rank starts, by rank; see `plan.draft.DraftPlan`."""
    accept_psnr_db: float | None = None
    """If the frames of two successive ranks agree to this PSNR, in dB, the clip ends there and
    stays approximate. None: the exact clip ends it."""

    def __post_init__(self) -> None:
        psnr_db = self.accept_psnr_db
        require(
            psnr_db is None or (is_number(psnr_db) and psnr_db > 0),
            f"--draft-psnr must be a finite PSNR above 0 dB, got {shown(psnr_db)}",
        )


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """One pipeline: a model, the knobs of its sampler, and the ranks that share its steps.

    Raises:
        RequestError: anything in it that cannot be done, at construction, before any work.
    """

    world_size: int
    """Number of ranks W."""
    model: ModelConfig = field(default_factory=ModelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    device: str = "cpu"
    """`cpu`; `cuda` (rank r on cuda:r); or one device such as `cuda:0` shared by all ranks."""
    num_threads: int = 1
    """Intra-op threads of each CPU rank; bits depend on it, so the reference uses the same."""
    timeout_seconds: float = 600.0
    """A rank that makes no progress for this long is named and the run ends."""
    start_timeout_seconds: float = 600.0
    """Ranks have this long to load their model and join."""
    heartbeat_timeout_seconds: float = 15.0
    """A rank that sends no heartbeat for this long counts as stalled."""
    split: Split = "uniform"
    """The rule that cuts each clip's steps."""
    replicas: int = 1
    """Number of replicas R that the ranks form, a divisor of W; W of them is data parallel."""
    decoders: int = 1
    """Ranks at the end of each replica that take turns to finish clips."""
    costs: Costs = field(default_factory=Costs)
    """What the splits but `uniform` cut by."""
    draft: DraftConfig | None = None
    """All ranks denoise the same clip from several start steps, instead of sharing its steps."""
    checksum: bool = False
    """Whether packets carry a crc32 of their payload."""
    deterministic: bool = False
    """torch's strict mode in ranks and reference; False: torch's own settings, as in a script."""
    allow_mixed_devices: bool = False
    """Whether ranks may differ in what the bits depend on; their clips are not called exact."""
    decode: bool = True
    """False leaves the clips at their final latents: for measuring the engine alone."""

    def __post_init__(self) -> None:
        check_whole("--world", self.world_size, 1, MAX_RANKS)
        self.plan  # noqa: B018  it checks W against the steps by itself
        if self.draft is not None:
            self._check_draft()
        check_whole("--threads", self.num_threads, 1, max_threads(), " on this machine")
        self._check_rounded_guidance()
        _check_device(self.device)
        check_seconds("--timeout", self.timeout_seconds)
        check_seconds("--start-timeout", self.start_timeout_seconds)
        check_seconds("--heartbeat-timeout", self.heartbeat_timeout_seconds)
        check_type("--checksum", self.checksum, bool)
        for name in ("deterministic", "allow_mixed_devices"):
            check_type(f"--{name.replace('_', '-')}", getattr(self, name), bool)
        check_type("decode", self.decode, bool)

    def _check_rounded_guidance(self) -> None:
        # diffusers compares the guidance as a tensor of the model's dtype in its loop, but as a
        # number when it encodes: a maximum that rounds to 1 would give it two answers.
        rounding = {"fp32": 2.0**-24, "fp16": 2.0**-11, "bf16": 2.0**-8}[self.model.dtype]
        require(
            not 1 < self.sampling.max_guidance_scale <= 1 + rounding,
            f"--max-guidance-scale {self.sampling.max_guidance_scale} rounds to 1 in "
            f"{self.model.dtype}: diffusers cannot run that",
            "--max-guidance-scale 1 switches guidance off",
        )

    def _check_draft(self) -> None:
        assert self.draft is not None
        num_starts = len(self.draft_plan.start_steps)
        require(
            num_starts == self.world_size,
            f"--draft-starts names {num_starts} ranks, but there are {self.world_size}",
            f"use --world {num_starts}, or name {self.world_size} starts",
        )
        require(
            not self.draft.accept_psnr_db or num_starts > 2,
            "--draft-psnr compares two successive ranks before the exact one is done: of 2 ranks "
            "one is the exact one",
            "use --world 3 or more, and as many --draft-starts where they are named",
        )

    @property
    def plan(self) -> Layout | DraftPlan:
        """Who does what: of many clips, or of one."""
        return self.layout if self.draft is None else self.draft_plan

    @cached_property
    def draft_plan(self) -> DraftPlan:
        """Where each rank starts in a clip's steps, where that is what was asked for."""
        assert self.draft is not None
        from svdpp.plan.draft import DraftPlan  # few commands need it

        return DraftPlan(
            num_steps=self.sampling.num_inference_steps,
            start_steps=self.draft.start_steps,
            decodes=self.decodes,
        )

    @cached_property
    def layout(self) -> Layout:
        """Which way each clip takes through the ranks."""
        return Layout(
            num_steps=self.sampling.num_inference_steps,
            world_size=self.world_size,
            split=self.split,
            replicas=self.replicas,
            decoders=self.decoders,
            costs=self.costs,
            decodes=self.decodes,
        )

    def alone(self) -> PipelineConfig:
        """The same work on one device."""
        plain: dict[str, Any] = {"split": "uniform", "replicas": 1, "decoders": 1, "draft": None}
        return replace(self, world_size=1, costs=Costs(), **plain)

    @property
    def decodes(self) -> bool:
        """Whether clips become frames; the dummy model only pretends to, where it sleeps."""
        return self.decode and (not self.model.is_dummy or self.model.dummy_sleeps)


def _check_device(device: object) -> None:
    match = re.fullmatch(r"cpu|cuda(?::([0-9]{1,9}))?", device) if isinstance(device, str) else None
    require(
        match is not None and int(match[1] or 0) <= MAX_CUDA_INDEX,
        f"--device must be cpu, cuda or cuda:N, got {shown(device)}",
    )
