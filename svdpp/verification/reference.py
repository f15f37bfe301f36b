"""Reference process, which runs diffusers' unmodified pipeline on one device.

The process applies the same settings of torch as a rank, and reports times as a rank does. For the
dummy model, the reference is a plain loop over the same network.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from svdpp.comm.streams import SideStream, record_event
from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, SamplingConfig
from svdpp.config.families.spec import FamilySpec
from svdpp.errors import ModelError
from svdpp.media import video
from svdpp.media.inputs import read_input
from svdpp.media.video import Frames
from svdpp.models.base import LATENTS, PREDICTION, STATE, Audio, ModelInput, Tensors
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.attention import as_process_default, set_attention_backend
from svdpp.models.engine.call import step_callback
from svdpp.models.engine.gguf_denoisers import load_denoiser
from svdpp.models.engine.hooks import hooked
from svdpp.models.engine.load import (
    apply_memory_options,
    component_class,
    component_dtype,
    load_processor,
    silence_blocks,
    silence_libraries,
    text_processors,
)
from svdpp.models.engine.loras import PipelineLoras
from svdpp.models.engine.model import call_arguments, to_audio
from svdpp.models.engine.modular_blocks import denoising_loops
from svdpp.models.engine.modular_state import StatePacker
from svdpp.models.engine.records import (
    Packer,
    patch_methods,
    scheduler_changes,
    snapshot_attributes,
    step_latent,
    tensors_in,
)
from svdpp.models.files import library_errors
from svdpp.plan.actions import Action, Kind
from svdpp.plan.roles import Roles
from svdpp.verification.reference_setup import ReferenceSetup
from svdpp.worker.background import Reporter
from svdpp.worker.device import MemoryPressure, device_name, out_of_memory_named
from svdpp.worker.messages import ActionDone, ClipDone, Joined, StepDone
from svdpp.worker.rank import load_rank_model
from svdpp.worker.tensor_files import (
    TensorStore,
    audio_hashes,
    solver_history,
    store_result,
    tensor_sha256,
)


def compute_all(device: str, reporter: Reporter, setup: ReferenceSetup) -> None:
    """Compute all clips of a verification with the reference, and report each to the parent.

    Args:
        device: Name of the device, such as `cuda:1`.
        reporter: Sender of events to the parent.
        setup: Clips to compute, and tensors to keep.

    Raises:
        OutOfMemoryError: The model or a clip does not fit into memory.
        InputError: A clip's input cannot be read.
    """
    begun, checkpoint, sampling = time.monotonic(), setup.checkpoint, setup.config.sampling
    reference: Reference | _DummyReference
    with out_of_memory_named(None, device):
        if checkpoint is None:
            reference = _DummyReference(setup.config, device)
        else:
            from_image = sampling.from_image
            reference = Reference(checkpoint, setup.config.model, device, from_image=from_image)
    seconds = time.monotonic() - begun
    reporter.send(Joined(device=device, load_seconds=seconds, device_name=device_name(device)))
    recorder = _Recorder(setup, device, reporter)
    for clip, request in enumerate(setup.requests):
        recorder.begin(clip)
        with out_of_memory_named("reference", device):
            made = reference.run(
                request,
                read_input(request, sampling),
                sampling,
                before_steps=recorder.before_steps,
                after_step=recorder.after_step,
            )
        recorder.end(*made)


class _Recorder:
    """Recorder of the reference's work: reports times to the parent, and writes tensors to files.

    If the setup has no folder, no tensors are written.
    """

    def __init__(self, setup: ReferenceSetup, device: str, reporter: Reporter) -> None:
        self._setup, self._reporter = setup, reporter
        self._num_steps = setup.config.sampling.num_inference_steps
        self._device = torch.device(device)
        self._copies = SideStream(self._device)
        # As in a rank, a shortage of GPU memory is detected, because it can change the bits.
        self._memory_pressure = MemoryPressure(self._device)
        self._store = None if setup.folder is None else TensorStore(setup.folder)

    def begin(self, clip: int) -> None:
        self._clip = clip
        self._begun = self._mark = time.monotonic()

    def before_steps(self) -> None:
        self._report(Action.at(Kind.ENCODE, self._clip, 0), self._synchronized_now())

    def after_step(self, step: int, tensors: Tensors) -> None:
        now = self._synchronized_now()
        self._reporter.send(StepDone(clip=self._clip, step=step, seconds=now - self._mark))
        self._mark = now
        if step + 1 == self._num_steps:
            self._report(Action(Kind.DENOISE, self._clip, 0, self._num_steps), now)
        if self._store is not None:
            self._keep(self._store, step, tensors)

    def end(self, latent: torch.Tensor, frames: Frames | None, audio: Audio | None) -> None:
        if frames is not None:
            self._report(
                Action.at(Kind.DECODE, self._clip, self._num_steps), self._synchronized_now()
            )
        audio = audio and Audio(self._on_host(audio.samples), audio.rate)
        if self._store is not None and frames is not None:
            store_result(self._store, self._clip, frames, audio)
        pressed = {"memory_pressure": True} if self._memory_pressure.has_occurred() else {}
        metadata = {
            **pressed,
            "latents_sha256": tensor_sha256(self._on_host(latent)),
            "frames_sha256": None if frames is None else video.frames_sha256(frames),
            **audio_hashes(audio),
        }
        self._reporter.send(ClipDone(clip=self._clip, metadata=metadata))

    def _keep(self, store: TensorStore, step: int, tensors: Tensors) -> None:
        if step + 1 in self._setup.steps:
            kept = {LATENTS: tensors[LATENTS], **solver_history(tensors)}
            on_host = {name: self._on_host(tensor) for name, tensor in kept.items()}
            store.keep(self._clip, f"step{step + 1}", on_host)
        for name, tensor in tensors.items() if self._setup.predictions else ():
            if name.startswith(PREDICTION):
                branch = int(name.removeprefix(PREDICTION))
                on_host = {PREDICTION: self._on_host(tensor)}
                store.keep(self._clip, f"step{step}_branch{branch}", on_host)

    def _on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._copies.to_host(tensor, record_event(tensor.device))

    def _report(self, action: Action, now: float) -> None:
        self._reporter.send(ActionDone(action=action, start=self._begun, end=now, waited=0.0))
        self._begun = self._mark = now

    def _synchronized_now(self) -> float:
        """Wait until the reference's device has finished its work, and return the current time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()


class _DummyReference:
    """Reference run of the dummy model, with the same method `run` as `Reference`."""

    def __init__(self, config: PipelineConfig, device: str) -> None:
        self._model = load_rank_model(config, None, device, Roles(encode=True, denoise=True))

    def run(
        self,
        request: ClipRequest,
        _: ModelInput | None,
        sampling: SamplingConfig,
        *,
        before_steps: Callable[[], None],
        after_step: Callable[[int, Tensors], None],
    ) -> tuple[torch.Tensor, None, None]:
        tensors = self._model.encode({}, request)
        before_steps()
        end = sampling.num_inference_steps
        tensors = self._model.denoise(
            tensors, 0, end, lambda step, latent: after_step(step, {LATENTS: latent})
        )
        return tensors[LATENTS], None, None


class Reference:
    """Unmodified pipeline of diffusers on one device, loaded as a user of diffusers would."""

    def __init__(
        self, checkpoint: Checkpoint, model: ModelConfig, device: str, *, from_image: bool
    ) -> None:
        silence_libraries()
        self._checkpoint = checkpoint
        load = _load_pipeline if checkpoint.spec.modular is None else _load_modular_pipeline
        self.pipe: Any = load(checkpoint, model, from_image)
        self.pipe.set_progress_bar_config(disable=True)
        self.pipe.to(device)
        self._loras = PipelineLoras(self.pipe, checkpoint, local_files_only=model.local_files_only)
        for part in {"vae", *checkpoint.spec.denoisers} & self.pipe.components.keys():
            apply_memory_options(checkpoint, part, getattr(self.pipe, part), model)
        self._attention_backend = model.attention_backend
        if self._attention_backend is not None:
            for part in {*checkpoint.spec.denoisers} & {*checkpoint.weighted_components}:
                set_attention_backend(getattr(self.pipe, part), self._attention_backend)

    def run(
        self,
        request: ClipRequest,
        source: ModelInput | None,
        sampling: SamplingConfig,
        *,
        before_steps: Callable[[], None],
        after_step: Callable[[int, Tensors], None],
    ) -> tuple[torch.Tensor, Frames, Audio | None]:
        """Make one clip with the reference pipeline's unmodified `__call__`, and report each step.

        Args:
            request: Seed, prompts and LoRAs of the clip.
            source: Image or frames, fitted to the clip's size; None: the clip starts from text.
            sampling: Sampling parameters, with all defaults filled in.
            before_steps: Callback before the denoiser's first call.
            after_step: Callback after each step. It gets the index of the step, and a dict of
                tensors: the latent, the solver's history and the predictions.

        Returns:
            Final latent in the model's shape; frames, uint8 of shape (F, H, W, 3); and sound,
            or None if the model makes no sound.
        """
        pipe, spec = self.pipe, self._checkpoint.spec
        self._loras.activate(request.loras)
        arguments = call_arguments(pipe, self._checkpoint, sampling, request, source)
        steps = _StepObserver(pipe, spec, before_steps, after_step)
        callback = step_callback(pipe, steps.end)
        with ExitStack() as patches:
            if not spec.schedulers:
                for loop in denoising_loops(pipe, spec.denoisers):
                    patches.enter_context(hooked(loop, steps, {"loop_step": "run_iteration"}))
            elif not callback:
                patches.enter_context(hooked(pipe.scheduler, steps, {"step": "step"}))
            for module in filter(None, (getattr(pipe, part, None) for part in spec.denoisers)):
                patches.enter_context(patch_methods(module, forward=steps.forward(module.forward)))
            # The backend becomes the default of the whole process, because diffusers' own
            # `set_attention_backend` has this effect, too. So the reference computes what a user's
            # script computes.
            patches.enter_context(as_process_default(self._attention_backend))
            output = pipe(**arguments, **callback, output_type="pil")
        if spec.modular is None:
            frames, audio = output.frames[0], output.get("audio")
        else:
            frames = output.values[spec.modular.videos]
            audio = output.values.get(spec.modular.audio)
            if spec.modular.has_batch:
                frames = frames[0]
            elif audio is not None:
                audio = audio[None]
        sound = to_audio(pipe, audio, rate=spec.audio_rate)
        return steps.latent, stack_frames(frames), sound


def _load_pipeline(checkpoint: Checkpoint, model: ModelConfig, from_image: bool) -> Any:
    """Load a pipeline that is not modular, in the way in which a user of diffusers loads it."""
    dtype = model.dtype
    dtypes = {
        part: component_dtype(checkpoint, part, dtype) for part in checkpoint.spec.fp32_components
    }
    cls = getattr(diffusers, checkpoint.spec.pipeline(from_image))
    classes, denoisers = dict(checkpoint.classes), {}
    for file in checkpoint.denoisers:
        kind = component_class(file.part, classes[file.part])
        own = component_dtype(checkpoint, file.part, dtype)
        with library_errors(file.part, checkpoint):
            denoisers[file.part] = load_denoiser(checkpoint.folder, file, kind, own)
    with library_errors("the pipeline"):
        return cls.from_pretrained(
            checkpoint.folder,
            dtype={"default": component_dtype(checkpoint, "", dtype), **dtypes},
            variant=checkpoint.variant,
            use_safetensors=True,
            local_files_only=True,
            **text_processors(checkpoint),
            **denoisers,
        )


def _load_modular_pipeline(checkpoint: Checkpoint, model: ModelConfig, from_image: bool) -> Any:
    """Load a modular pipeline, in the way in which a user of diffusers loads it.

    Raises:
        ModelError: A component was not loaded. diffusers only logs the reason.
    """
    cls = getattr(diffusers, checkpoint.spec.pipeline(from_image))
    weighted = checkpoint.weighted_components
    folders = checkpoint.component_folders
    pipe = cls(pretrained_model_name_or_path=str(checkpoint.folder), local_files_only=True)
    silence_blocks(pipe._blocks)
    with library_errors("the pipeline"):
        pipe.load_components(
            names=[*weighted],
            dtype={part: component_dtype(checkpoint, part, model.dtype) for part in weighted},
            variant={part: checkpoint.variant_of(part) for part in weighted},
            use_safetensors=dict.fromkeys(weighted, True),
            # The paths are local snapshots of known commits. With names of repositories, diffusers
            # could load a component at a newer commit.
            pretrained_model_name_or_path={each.part: str(each.root) for each in folders},
            subfolder={each.part: each.subfolder for each in folders},
            revision={each.part: None for each in folders},
            local_files_only=True,
        )
    # The processors are loaded by the same function as on a rank, because without torchvision,
    # transformers lacks some of the classes that `load_components` would load.
    processors = {
        part: load_processor(checkpoint, part, component_class(part, name))
        for part, name in checkpoint.classes
        if part not in weighted
    }
    pipe.update_components(**processors)
    missing = sorted({*pipe.null_component_names} & {*weighted})
    if missing:
        raise ModelError(
            f"diffusers could not load {', '.join(missing)}; its log messages give the reason",
            details={"components": missing},
        )
    return pipe


class _StepObserver:
    """Observer of all denoising steps of one call of a pipeline. It changes no tensor."""

    latent: torch.Tensor

    def __init__(
        self,
        pipe: Any,
        spec: FamilySpec,
        before_steps: Callable[[], None],
        after_step: Callable[[int, Tensors], None],
    ) -> None:
        self._spec = spec
        self._pipe, self._before_steps, self._after_step = pipe, before_steps, after_step
        self._keeps = spec.pairs_are_exact
        self._count = 0
        self._has_begun = self._has_evaluated = False
        self._state: dict[str, Any] = {}
        self._outputs: list[Any] = []

    def forward(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the reference's denoiser: report its first call, and keep its predictions."""

        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._has_begun:
                self._has_begun = True
                if self._spec.schedulers:
                    self._state = snapshot_attributes(self._pipe.scheduler)
                self._before_steps()
            output = real(*args, **kwargs)
            self._has_evaluated = True
            if self._keeps:
                self._outputs.append(output)
            return output

        return forward

    def __deepcopy__(self, memo: Any) -> _StepObserver:
        # A pipeline may copy its scheduler. The copy must report to the same observer.
        return self

    def step(self, _: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the reference's `scheduler.step`; call `after_step` if this ends a denoising step.

        The first call of `scheduler.step` after a call of the denoiser finishes a denoising step.
        """
        result = real(*args, **kwargs)
        if self._has_evaluated:
            self.end(None, 0, None, {LATENTS: step_latent(result)})
        return result

    def run_iteration(self, _: Any, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run one iteration of a modular pipeline's denoising loop; report it to `after_step`.

        In a modular pipeline without a scheduler, each iteration is one denoising step.
        """
        components, block_state = real(*args, **kwargs)
        self.end(None, 0, None, {LATENTS: block_state.latents})
        return components, block_state

    def end(self, _: Any, __: int, ___: Any, values: Tensors) -> Tensors:
        packer = Packer() if self._spec.modular is None else StatePacker({})
        if self._spec.schedulers:
            packer.pack(scheduler_changes(self._state, self._pipe.scheduler), STATE)
        for branch, output in enumerate(self._outputs):
            # Only the first tensor is kept, because ranks, too, keep only the first tensor of a
            # prediction that they receive (`Denoising.exchange`).
            packer.pack(tensors_in(output)[0], f"{PREDICTION}{branch}")
        self._outputs.clear()
        self._has_evaluated = False
        self.latent = values[LATENTS]
        self._after_step(self._count, {**packer.tensors, LATENTS: self.latent})
        self._count += 1
        return {}


def stack_frames(images: list[Image.Image]) -> Frames:
    """Convert a list of PIL images to one array, uint8 of shape (F, H, W, 3)."""
    return np.stack([np.asarray(image, dtype=np.uint8) for image in images])
