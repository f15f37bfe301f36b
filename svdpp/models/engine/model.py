"""Model of one rank: every stage is a call of diffusers' pipeline."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch.nn import functional
from transformers.processing_utils import ProcessorMixin

from svdpp.config import ClipRequest, LatentSpec, Lora, ModelConfig, SamplingConfig
from svdpp.config.families.spec import FamilySpec
from svdpp.config.pipeline import IMAGE, LAST_IMAGE, Dtype
from svdpp.errors import NotFiniteError
from svdpp.models.base import (
    STRUCTURE,
    AfterStep,
    Audio,
    ModelInput,
    Partner,
    PreparedInput,
    Tensors,
)
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.call import GuidanceBranches, RangeCall
from svdpp.models.engine.latents import latent_spec
from svdpp.models.engine.load import build_pipeline, load_pipeline
from svdpp.models.engine.loras import PipelineLoras
from svdpp.models.engine.records import Node, named_tensors, patch_methods, read_structure
from svdpp.plan.actions import FrameRange
from svdpp.plan.roles import Roles


class EngineModel:
    """Model of one rank: any family that has a spec, with resolved sampling parameters."""

    def __init__(
        self,
        pipe: Any,
        checkpoint: Checkpoint,
        sampling: Any,
        dtype: Dtype,
        loras: PipelineLoras | None = None,
    ) -> None:
        self.device: torch.device = pipe.device
        self.audio: Audio | None = None
        """Sound of the clip that was decoded last; None: the model makes no sound."""
        self._pipe, self._checkpoint, self._spec = pipe, checkpoint, checkpoint.spec
        self._sampling, self._dtype, self._loras = sampling, dtype, loras
        self._outputs: list[Node] = []  # see `GuidanceBranches`

    def with_sampling(self, sampling: SamplingConfig) -> EngineModel:
        """Return a model of the same loaded components with other sampling parameters.

        Args:
            sampling: Resolved parameters of the same family. They may be for clips from text alone
                where this model's are for clips from an image, not the other way round.
        """
        pipe = self._pipe
        if sampling.from_image != self._sampling.from_image:
            assert self._sampling.from_image, "a rank for clips from text has no encoder of images"
            pipe = build_pipeline(self._checkpoint, False, pipe.components, self.device)
        return EngineModel(pipe, self._checkpoint, sampling, self._dtype, self._loras)

    def use_loras(self, loras: tuple[Lora, ...]) -> None:
        """Have later steps use a clip's LoRAs, besides the model's own; load them if needed.

        It holds for all models of the same loaded components.

        Args:
            loras: LoRAs of the clip; empty: none but the model's.

        Raises:
            ModelError: A file is missing, damaged or has changed, or does not fit the model.
        """
        assert self._loras is not None, "a model without weights loads no LoRAs"
        self._loras.activate(loras)

    def latent_spec(self, step: int) -> LatentSpec:
        """Return shape and dtype of a clip's latent after `step` steps."""
        return latent_spec(self._pipe, self._checkpoint, self._sampling, self._dtype, step)

    def tensor_specs(self, tensors: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of all tensors that a packet must have, by name.

        Args:
            tensors: Tensors of the packet; its structure names the others.

        Raises:
            ValueError: The structure cannot be read.
        """
        if STRUCTURE not in tensors:
            present = {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
            return {**present, STRUCTURE: ((0,), torch.uint8)}
        try:
            named = named_tensors(read_structure(tensors))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError("the structure of its tensors cannot be read") from error
        return {**named, STRUCTURE: (tuple(tensors[STRUCTURE].shape), torch.uint8)}

    def prepare(self, source: ModelInput) -> PreparedInput:
        """Do the part of an encode that needs no device; a thread may run it beside the steps.

        Args:
            source: Image or frames, fitted to the clip's shape.

        Returns:
            For SVD the pixels for CLIP, (1, 3, 224, 224) in [0, 1], and for the VAE, (1, 3, H, W)
            in [-1, 1], both fp32; for other families `source`.
        """
        if not self._spec.resizes_early:
            return source
        assert isinstance(source, Image.Image)
        return _resized(self._pipe, source, self._sampling)

    def encode(self, prepared: PreparedInput, request: ClipRequest) -> Tensors:
        """Encode a clip's prompts and image, and draw its noise.

        Args:
            prepared: Result of `prepare`; empty for clips from text.
            request: Clip with its prompts and seed.

        Returns:
            The packet before the first step: what later steps and the decode need.

        Raises:
            ModelError: The pipeline draws random numbers from torch's global generator.
        """
        assert bool(prepared) == self._sampling.from_image
        source: Any = prepared or None
        with ExitStack() as patches:
            if self._spec.resizes_early:
                patches.enter_context(_resized_before(self._pipe, source))
                source = blank_input(self._sampling)
            call, _ = self._call(request, source, given=None, received={}, start=0, end=0)
        return call.packet({"negative_prompt": request.negative_prompt is not None})

    def denoise(
        self,
        tensors: Tensors,
        start: int,
        end: int,
        after_step: AfterStep,
        partner: Partner | None = None,
    ) -> Tensors:
        """Run steps `start` to `end` (exclusive).

        Args:
            tensors: Tensors of the packet before these steps, which stay unchanged.
            start: First step.
            end: Step before which the range ends; above `start`.
            after_step: Callback that gets each step's index and its latent.
            partner: Other rank of a pair: each evaluates one branch of the guidance, and both get
                the same result. None: this rank evaluates both.

        Returns:
            The packet after them.

        Raises:
            ModelError: The pipeline does not run as its spec says.
        """
        assert start < end
        branches = None
        if partner is not None:
            assert self._spec.branches is not None
            branches = GuidanceBranches(self._spec, partner, self.device, self._outputs)
        more = {"after_step": after_step, "branches": branches}
        call, _ = self._later_call(tensors, start, end, **more)
        return call.packet()

    def decode(self, tensors: Tensors, frames: FrameRange | None = None) -> torch.Tensor:
        """Decode the packet after the last step; its sound, if any, is then in `audio`.

        Args:
            tensors: Tensors of the packet.
            frames: Range of whole chunks of frames, whose latents the pipeline's own decode gets;
                None: all frames.

        Returns:
            Frames (F, H, W, 3) uint8 RGB, on the device.

        Raises:
            NotFiniteError: The VAE or the vocoder returned NaN or infinity, which would become
                black.
        """
        postprocess = self._pipe.video_processor.postprocess_video

        def check_and_postprocess(video: torch.Tensor, **options: Any) -> Any:
            if not bool(torch.isfinite(video).all()):  # as colours they would become black
                raise NotFiniteError("the VAE returned values that are not finite")
            return postprocess(video, **options)

        own = {}
        if frames is not None:
            decode, part = self._pipe.decode_latents, slice(frames.first, frames.end)
            own["decode_latents"] = lambda latents, _, chunk_size: decode(
                latents[:, part], part.stop - part.start, chunk_size
            )
        with patch_methods(self._pipe, **own):
            video, *audio = self.decode_with(tensors, check_and_postprocess)
        self.audio = to_audio(self._pipe, *audio)
        return to_uint8(video[0])  # from (F, 3, H, W), 0 to 1

    def decode_with(self, tensors: Tensors, postprocess: Callable[..., Any]) -> Any:
        """Return the pipeline's result, a tuple, with another postprocessing of the decoded video.

        Args:
            tensors: Packet after the last step.
            postprocess: Function of the video, (1, 3, F, H, W), that replaces the pipeline's own
                method.
        """
        with patch_methods(self._pipe.video_processor, postprocess_video=postprocess):
            steps = self._sampling.num_inference_steps
            _, result = self._later_call(tensors, steps, None)
        return result if isinstance(result, tuple) else (result,)

    def truncated_text(self, prompt: str) -> str:
        """Return the end of `prompt` that does not fit in `max_sequence_length` tokens.

        It is empty if all of the prompt fits. Only a rank that encodes has the tokenizer.
        """
        tokenizer, length = self._pipe.tokenizer, self._sampling.max_sequence_length
        if isinstance(tokenizer, ProcessorMixin):  # its first argument is an image
            tokenizer = tokenizer.tokenizer
        tokens = tokenizer(prompt).input_ids
        if len(tokens) <= length:
            return ""
        # If the last token ends the text, it stays.
        has_end = int(tokens[-1] == tokenizer.eos_token_id)
        return str(tokenizer.decode(tokens[length - has_end : len(tokens) - has_end]))

    def _call(
        self, request: ClipRequest, source: ModelInput | None, *, end: int | None, **of_call: Any
    ) -> tuple[RangeCall, Any]:
        """Make a call, and return it with the pipeline's result."""
        pipe = self._pipe
        arguments = call_arguments(pipe, self._checkpoint, self._sampling, request, source)
        generator = arguments["generator"]
        call = RangeCall(pipe=pipe, spec=self._spec, generator=generator, end=end, **of_call)
        return call, call.run({**arguments, "output_type": "pt" if end is None else "latent"})

    def _later_call(
        self, tensors: Tensors, start: int, end: int | None, **more: Any
    ) -> tuple[RangeCall, Any]:
        """Make a call without prompt and image, which replays the records of the encode."""
        structure = read_structure(tensors)
        request = ClipRequest(
            seed=0,
            prompt="" if self._spec.takes_prompt else None,
            negative_prompt="" if structure["given"]["negative_prompt"] else None,
        )
        of_call = {"given": structure, "received": tensors, "start": start, "end": end, **more}
        return self._call(request, blank_input(self._sampling), **of_call)


def load_engine_model(
    checkpoint: Checkpoint, model: ModelConfig, sampling: SamplingConfig, device: str, roles: Roles
) -> EngineModel:
    """Load the components that one rank needs.

    Args:
        checkpoint: Checked checkpoint, with weights.
        model: Model that it belongs to.
        sampling: Resolved sampling parameters.
        device: Device of the rank, such as `cuda:1`.
        roles: Roles of the rank.

    Raises:
        ModelError: The files do not fit together.
        OutOfMemoryError: A component does not fit on the device.
    """
    pipe = load_pipeline(checkpoint, model, sampling=sampling, roles=roles, device=device)
    loras = PipelineLoras(pipe, checkpoint, local_files_only=model.local_files_only)
    return EngineModel(pipe, checkpoint, sampling, model.dtype, loras)


def call_arguments(
    pipe: Any,
    checkpoint: Checkpoint,
    sampling: Any,
    request: ClipRequest,
    source: ModelInput | None,
) -> dict[str, Any]:
    """Return the arguments of `__call__` for one clip, without those whose default it takes.

    The pipeline gets the clip's scheduler and, if it has a guider, one with the clip's scale.

    Args:
        pipe: Pipeline, which is changed.
        checkpoint: Checkpoint that it belongs to.
        sampling: Resolved sampling parameters.
        request: Clip with its prompts and seed.
        source: Images, frames or videos that the clip starts from; None: text alone.
    """
    spec = checkpoint.spec
    pipe.scheduler = checkpoint.build_scheduler(sampling)
    if (guider := getattr(pipe, "guider", None)) is not None:
        scale = {"guidance_scale": sampling.guidance_scale}
        pipe.guider = type(guider).from_config({**guider.config, **scale})
    device = spec.generator_device(checkpoint, sampling, str(pipe.device))
    if isinstance(source, Image.Image) and spec.size_from_image:
        source = source.resize((sampling.width, sampling.height), Image.Resampling.LANCZOS)
    accepted = inspect.signature(type(pipe).__call__).parameters
    given = {
        **{name: vars(sampling).get(spec.renamed_arguments.get(name, name)) for name in accepted},
        **{"prompt": request.prompt, "negative_prompt": request.negative_prompt},
        **_input_arguments(spec, source, sampling),
        "generator": torch.Generator(device).manual_seed(request.seed),
    }
    known = {name: value for name, value in given.items() if value is not None}
    return {**known, **spec.call_arguments(sampling)}


def _input_arguments(
    spec: FamilySpec, source: ModelInput | None, sampling: Any
) -> Mapping[str, Any]:
    """Return the arguments of `__call__` for what a clip starts from."""
    if not isinstance(source, dict):
        return {spec.image_argument: source}
    if LAST_IMAGE not in source:
        return source
    assert spec.last_image_arguments is not None
    return spec.last_image_arguments(source[IMAGE], source[LAST_IMAGE], sampling)


def blank_input(sampling: Any, *, whole: bool = False) -> ModelInput | None:
    """Return black pictures in place of what a clip starts from; None if it starts from text alone.

    Args:
        sampling: Resolved sampling parameters.
        whole: Whether they have the true size and number; otherwise the frames of videos are as few
            or as small as the pipelines take.
    """
    if not sampling.from_image:
        return None
    width, height = sampling.width, sampling.height
    image = Image.new("RGB", (width, height))
    if sampling.has_last_image:
        return {IMAGE: image, LAST_IMAGE: image}
    if not sampling.videos:
        return [image] * (sampling.frames if whole else 1) if sampling.from_video else image
    sizes = {name: (side or width, side or height) for name, side in sampling.videos.items()}
    frames = {name: Image.new("RGB", size if whole else (16, 16)) for name, size in sizes.items()}
    return {IMAGE: image, **{name: [frame] * sampling.frames for name, frame in frames.items()}}


def to_uint8(pixels: torch.Tensor) -> torch.Tensor:
    """Convert pixels as diffusers' processor does, but on the device.

    Args:
        pixels: (F, 3, H, W), from 0 to 1.

    Returns:
        (F, H, W, 3) uint8, contiguous.
    """
    return (pixels.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def to_audio(pipe: Any, audio: torch.Tensor | None = None) -> Audio | None:
    """Return the sound of a clip, as diffusers writes it into files; None if there is none.

    Args:
        pipe: Pipeline whose vocoder made it.
        audio: (1, channels, N), from -1 to 1; None: the pipeline makes no sound.

    Raises:
        NotFiniteError: The vocoder returned NaN or infinity.
    """
    if audio is None:
        return None
    if not bool(torch.isfinite(audio).all()):
        raise NotFiniteError("the vocoder returned values that are not finite")
    samples = (audio[0].float().clamp(-1.0, 1.0) * 32767.0).to(torch.int16)
    return Audio(samples.T.contiguous(), pipe.vocoder.config.output_sampling_rate)


# --- SVD's image, resized before the encode ------------------------------------------------------
#
# With the bits of diffusers' `_resize_with_antialiasing`, which blurs the whole image (9 GiB for 50
# megapixels) and then interpolates it. The interpolation reads four rows and columns for each of
# the 224 of its result. These functions blur only those, a band of rows at a time, by the same
# convolutions: they sum each pixel in the same order, whichever others they compute.

_CLIP_PIXELS, _VAE_PIXELS = "clip_pixels", "vae_pixels"
_SIDE = 224
_CHANNELS = 3
_BAND_ROWS = 256
_HEIGHT, _WIDTH = -2, -1
# Bicubic interpolation reads from one position before to two after the one below its own. One more
# on both sides, because torch computes its own in single precision.
_BEFORE, _AFTER = 2, 3


def _resized(pipe: Any, image: Image.Image, sampling: Any) -> Tensors:
    """Return the pixels of an image for CLIP, in [0, 1], and for the VAE, in [-1, 1]."""
    processor = pipe.video_processor
    # A call of the pipeline, perhaps in another thread, replaces the processor's own method.
    preprocess = type(processor).preprocess
    return {
        # As in `_encode_image`: from [-1, 1], in which it is resized, to [0, 1].
        _CLIP_PIXELS: (resize_for_clip(image) + 1.0) / 2.0,
        _VAE_PIXELS: preprocess(processor, image, height=sampling.height, width=sampling.width),
    }


@contextmanager
def _resized_before(pipe: Any, pixels: Tensors) -> Iterator[None]:
    """While it lasts, the pipeline encodes `pixels`, of `_resized`, in place of its image."""
    encode = pipe._encode_image

    def encode_image(_: Image.Image, *args: Any) -> Any:
        return encode(pixels[_CLIP_PIXELS], *args)

    with (
        patch_methods(pipe, _encode_image=encode_image),
        patch_methods(pipe.video_processor, preprocess=lambda *_, **__: pixels[_VAE_PIXELS]),
    ):
        yield


def resize_for_clip(image: Image.Image) -> torch.Tensor:
    """Blur and interpolate an image for CLIP: the bits of `_resize_with_antialiasing`.

    Args:
        image: RGB, of any size.

    Returns:
        (1, 3, 224, 224) fp32 in [-1, 1].
    """
    tops = range(0, image.height, _BAND_ROWS)
    across = torch.cat([_blurred(_pixels(image, top), _WIDTH) for top in tops], dim=_HEIGHT)
    down = _blurred(across, _HEIGHT)
    # Each pixel at its place, because the interpolation depends on the image's size. Rows that it
    # does not read take no memory.
    whole = torch.empty(1, _CHANNELS, image.height, image.width)
    rows, columns = (
        torch.cat([torch.arange(*span) for span in _spans(size)])
        for size in (image.height, image.width)
    )
    whole[..., rows, :] = torch.nan
    whole[..., rows[:, None], columns] = down
    return functional.interpolate(whole, size=(_SIDE, _SIDE), mode="bicubic", align_corners=True)


def _pixels(image: Image.Image, top: int) -> torch.Tensor:
    band = image.crop((0, top, image.width, min(top + _BAND_ROWS, image.height)))
    pixels: torch.Tensor = VaeImageProcessor.numpy_to_pt(VaeImageProcessor.pil_to_numpy(band))
    return (pixels * 2.0 - 1.0).contiguous()  # the layout in which diffusers' convolutions run


def _blurred(pixels: torch.Tensor, dim: int) -> torch.Tensor:
    """`pixels` blurred along `dim`, where the interpolation reads."""
    # At the top, other families would import it too, and before `silence_libraries`.
    from diffusers.pipelines.stable_video_diffusion import pipeline_stable_video_diffusion as svd

    size = pixels.shape[dim]
    sigma = max((size / _SIDE - 1.0) / 2.0, 0.001)
    taps = int(max(4.0 * sigma, 3)) // 2 * 2 + 1
    shape = [1, 1]
    shape[dim] = taps
    kernel = (
        svd._gaussian(taps, torch.tensor([[sigma]])).view(1, 1, *shape).repeat(_CHANNELS, 1, 1, 1)
    )
    padded = functional.pad(pixels, svd._compute_padding(shape), mode="reflect")
    parts = [
        functional.conv2d(
            padded.narrow(dim, start, stop - start + taps - 1), kernel, groups=_CHANNELS
        )
        for start, stop in _spans(size)
    ]
    return torch.cat(parts, dim)


def _spans(size: int) -> list[tuple[int, int]]:
    """Return the positions along a side of `size` pixels that the interpolation reads.

    They are ranges (start, stop) that do not touch.
    """
    spans: list[tuple[int, int]] = []
    for index in range(_SIDE):
        below = index * (size - 1) // (_SIDE - 1)
        start, stop = max(0, below - _BEFORE), min(size, below + _AFTER + 1)
        if spans and start <= spans[-1][1]:
            start = spans.pop()[0]
        spans.append((start, stop))
    return spans
