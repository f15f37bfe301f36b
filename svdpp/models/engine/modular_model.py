"""`ModularModel`: encode, steps and decode of diffusers' modular pipelines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svdpp.config import ClipRequest
from svdpp.config.families.spec import ModularSpec
from svdpp.models.base import AfterStep, Partner, PreparedInput, Tensors
from svdpp.models.engine.call import GuidanceBranches
from svdpp.models.engine.model import EngineModel, call_arguments, set_scheduler_and_guiders
from svdpp.models.engine.modular_call import ModularCall
from svdpp.models.engine.records import patch_methods, read_structure
from svdpp.models.engine.shared_calls import SharedCalls


class ModularModel(EngineModel):
    """Loaded model of one rank, as `EngineModel`, for families whose pipelines are modular."""

    @property
    def _modular(self) -> ModularSpec:
        assert self._spec.modular is not None
        return self._spec.modular

    def encode(self, prepared: PreparedInput, request: ClipRequest) -> Tensors:
        """Encode a clip's prompts and image, and draw its noise; see `EngineModel.encode`."""
        assert bool(prepared) == self._sampling.from_image
        source: Any = prepared or None
        inputs = call_arguments(self._pipe, self._checkpoint, self._sampling, request, source)
        call = ModularCall(
            pipe=self._pipe,
            spec=self._spec,
            given=None,
            received={},
            end=0,
            blank=self.latent_spec(0),
        )
        call.run({**inputs, "output_type": "pt"})
        return call.packet()

    def denoise(
        self,
        tensors: Tensors,
        start: int,
        end: int,
        after_step: AfterStep,
        partner: Partner | None = None,
    ) -> Tensors:
        """Run steps `start` to `end` (exclusive) of a clip; see `EngineModel.denoise`."""
        assert start < end
        branches = shared = None
        if partner is not None and self._spec.branches == "replay":
            shared = SharedCalls(partner, self.device, self._shared_outputs)
        elif partner is not None:
            assert self._spec.branches == "calls"
            branches = GuidanceBranches(self._spec, partner, self.device, self._outputs)
        call = self._later_modular_call(
            tensors, end, after_step=after_step, branches=branches, shared=shared
        )
        call.run({})
        return call.packet()

    def decode_with(self, tensors: Tensors, postprocess: Callable[..., Any]) -> Any:
        """Decode a clip, with `postprocess` in place of the pipeline's own postprocessing.

        Args:
            tensors: Tensors of the packet (state of the clip) after the last step.
            postprocess: Function that gets the arguments of the pipeline's own postprocessing: the
                VAE's result, (1, 3, F, H, W), and options such as `output_type`.

        Returns:
            Tuple of the postprocessed video and, if the model makes sound, the sound.
        """
        with patch_methods(self._pipe.video_processor, postprocess_video=postprocess):
            state = self._later_modular_call(tensors, None).run({})
        names = (self._modular.videos, self._modular.audio)
        results = tuple(state.values[name] for name in names if name is not None)
        return results if self._modular.has_batch else tuple(each[None] for each in results)

    def _later_modular_call(self, tensors: Tensors, end: int | None, **more: Any) -> ModularCall:
        set_scheduler_and_guiders(self._pipe, self._checkpoint, self._sampling)
        return ModularCall(
            pipe=self._pipe,
            spec=self._spec,
            given=read_structure(tensors),
            received=tensors,
            end=end,
            **more,
        )
