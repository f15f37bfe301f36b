"""The check that the ranks can make a requested clip, before it is stored."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.driver.memory_check import check_memory
from svdpp.driver.resolve import resolved_for
from svdpp.driver.work import ClipWork
from svdpp.errors import OutOfMemoryError, RequestError
from svdpp.launch.gpus import visible_gpus
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.costs import Costs

_MAX_SHAPES = 256
_ROUTES = 4


class Admission:
    """Refuses clips that the ranks cannot make. Any thread may call it.

    A clip of the sampling of `config`, which is resolved, fits.
    """

    def __init__(self, config: PipelineConfig, checkpoint: Checkpoint | None) -> None:
        self._config, self._checkpoint = config, checkpoint
        # At the start, because the ranks take it.
        self._free = {f"cuda:{gpu.index}": gpu.free_bytes for gpu in visible_gpus()}
        self._problem = functools.lru_cache(_MAX_SHAPES)(self._new_problem)
        self._check_route = functools.lru_cache(_MAX_SHAPES)(self._check_new_route)

    def check(self, sampling: SamplingConfig) -> None:
        """Refuses a clip that could only fail: it has no route through the ranks, or no memory."""
        self._check_route(sampling)
        self._check_memory(sampling)

    def why_no_route(self, sampling: SamplingConfig) -> str | None:
        """Why the ranks cannot make a clip that another server has accepted; None if they can.

        Memory does not count: what is free at the start of a server says little of later.
        """
        try:
            self._check_route(sampling)
        except RequestError as error:
            return error.message
        return None

    def check_inputs(
        self,
        sampling: SamplingConfig,
        *,
        image: bool,
        prompt: str | None,
        negative_prompt: str | None,
    ) -> None:
        """Refuses a clip that lacks an input that the model needs, or has one that it ignores.

        Arguments as for `Checkpoint.check_inputs`.
        """
        ClipRequest(seed=0, prompt=prompt, negative_prompt=negative_prompt)  # checks them
        if self._checkpoint is not None:
            self._checkpoint.check_inputs(
                sampling, image=image, prompt=prompt, negative_prompt=negative_prompt
            )

    def _check_new_route(self, sampling: SamplingConfig) -> None:
        work = ClipWork(self._config, self._checkpoint)
        request = work.resolved(ClipRequest(seed=0, sampling=sampling))
        try:
            for clip in range(_ROUTES * self._config.world_size):  # `dithered` has many
                work.route(clip, request)
        except RequestError as error:
            own = self._config.sampling.num_inference_steps
            hint, field = f"use {own} steps", "steps"
            if sampling.num_inference_steps == own:
                hint, field = "leave flow_shift out", "flow_shift"
            raise RequestError(error.message, hint, details={"field": field}) from error

    def _check_memory(self, sampling: SamplingConfig) -> None:
        own = self._config.sampling
        is_no_larger = (
            sampling.width * sampling.height <= own.width * own.height
            and sampling.frames <= own.frames
            and (sampling.decode_chunk_size or 0) <= (own.decode_chunk_size or 0)
            and sampling.guided <= own.guided
        )
        if is_no_larger or self._checkpoint is None:
            return
        if self._config.device == "cpu":
            config = resolved_for(sampling, self._config, self._checkpoint)
            check_memory(config, self._checkpoint, self._config.layout.roles)
            return
        if problem := self._problem(_shape_only(sampling)):
            raise OutOfMemoryError(
                problem, "request fewer frames or a smaller size", details={"device": "cuda"}
            )

    def _new_problem(self, sampling: SamplingConfig) -> str:
        """Why a clip does not fit on the GPUs; empty if it does."""
        from svdpp.diagnostics.memory_estimate import memory_of_devices  # diffusers: seconds

        needs, has = memory_of_devices(
            self._config.model,
            sampling,
            self._config.device,
            self._config.world_size,
            lambda device: self._free.get(device, 0),
        )
        costs = Costs(**needs)  # type: ignore[arg-type]
        for roles, gib in zip(self._config.layout.roles, has, strict=True):
            need = costs.peak_gib(**roles.parts, num_experts=len(roles.experts))
            if need is not None and need > gib:
                return (
                    f"a clip of {sampling.frames} frames of {sampling.width}x{sampling.height} "
                    f"needs {need:.1f} GiB on a GPU that has {gib:.1f} GiB"
                )
        return ""


#: What memory depends on, beside guidance.
_SHAPE = ("height", "width", "num_frames", "decode_chunk_size", "max_sequence_length", "from_image")


def _shape_only(sampling: SamplingConfig) -> SamplingConfig:
    """`sampling` with only what memory depends on, so that few sizes are estimated."""
    names = {field.name for field in fields(sampling)}
    shape: dict[str, Any] = {name: getattr(sampling, name) for name in _SHAPE if name in names}
    scale = "guidance_scale" if "guidance_scale" in names else "max_guidance_scale"
    shape[scale] = 2.0 if sampling.guided else 1.0
    return type(sampling)(**shape)
