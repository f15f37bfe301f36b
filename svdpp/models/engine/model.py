"""`EngineModel`: encode, any range of denoising steps, and decode of diffusers' pipelines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch.nn import functional
from transformers.processing_utils import ProcessorMixin

from svdpp.config import ClipRequest, LatentSpec, Lora, SamplingConfig
from svdpp.config.families.spec import FamilySpec
from svdpp.config.pipeline import IMAGE, LAST_IMAGE, Dtype, reference_names
from svdpp.errors import ModelError, NotFiniteError
from svdpp.models.base import (
    FRAMES,
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
from svdpp.models.engine.load import build_pipeline
from svdpp.models.engine.loras import PipelineLoras
from svdpp.models.engine.records import Node, named_tensors, patch_methods, read_structure
from svdpp.models.engine.tiles import PartDecoder, TilePlayer, TileShape, tile_specs
from svdpp.plan.actions import DecodeRange


class _TilesDecoded(Exception):
    """Exception that ends a pipeline's call when this rank's tiles of the decode are finished."""


class EngineModel:
    """Loaded model of one rank. It encodes, denoises and decodes clips with equal parameters.

    Families with modular pipelines use the subclass `ModularModel`.
    """

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
        """Sound of the clip that was decoded last; None before the first decode, and if the model
        makes no sound."""
        self._pipe, self._checkpoint, self._spec = pipe, checkpoint, checkpoint.spec
        self._sampling, self._dtype, self._loras = sampling, dtype, loras
        # Structures (shapes and dtypes) of the denoiser's results. A rank of a pair needs them to
        # create zeros in place of results that the other rank computes, and learns them in its
        # first steps; see `outputs` in `GuidanceBranches` and in `SharedCalls`.
        self._outputs: dict[torch.Size, Node] = {}
        self._shared_outputs: list[Node] = []
        # Shapes of the VAE's tiles, the same for every clip; empty until the first `decode_part`.
        self._tile_shapes: list[TileShape] = []

    def with_sampling(self, sampling: SamplingConfig) -> EngineModel:
        """Return a model with the same loaded components and other sampling parameters.

        Args:
            sampling: Resolved parameters of the same family. A model for clips from an image can
                also make clips from text. A model for clips from text cannot use an image.
        """
        pipe = self._pipe
        if sampling.from_image != self._sampling.from_image:
            assert self._sampling.from_image, "a rank for clips from text has no image encoder"
            pipe = build_pipeline(self._checkpoint, False, pipe.components, self.device)
        return type(self)(pipe, self._checkpoint, sampling, self._dtype, self._loras)

    def use_loras(self, loras: tuple[Lora, ...]) -> None:
        """Load the LoRAs that are not loaded yet, and activate the model's and the clip's LoRAs.

        The LoRAs become active in all `EngineModel`s that share the loaded components.

        Args:
            loras: LoRAs of the clip; empty: only the model's LoRAs are active.

        Raises:
            ModelError: A file is missing, damaged or has changed, or does not fit the model.
        """
        assert self._loras is not None, "a model without weights loads no LoRAs"
        self._loras.activate(loras)

    def latent_spec(self, step: int) -> LatentSpec:
        """Return shape and dtype of a clip's latent after `step` steps."""
        return latent_spec(self._pipe, self._checkpoint, self._sampling, self._dtype, step)

    def tensor_specs(self, tensors: Tensors) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype, by name, of all tensors that a received packet must have.

        The tensor `structure` of the packet lists all other tensors. If the packet lacks it, the
        result lists the packet's tensors and a `structure`, so that the caller, which compares the
        result with the packet, finds that the structure is missing.

        Args:
            tensors: Tensors of the received packet.

        Raises:
            ValueError: The structure cannot be read.
        """
        if STRUCTURE not in tensors:
            present = {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
            return {**present, STRUCTURE: ((0,), torch.uint8)}
        try:
            named = named_tensors(read_structure(tensors))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError("the structure of a packet cannot be read") from error
        return {**named, STRUCTURE: (tuple(tensors[STRUCTURE].shape), torch.uint8)}

    def prepare(self, source: ModelInput) -> PreparedInput:
        """Prepare a clip's image on the CPU. Another thread can call this method during steps.

        Args:
            source: Image or frames, fitted to the clip's size.

        Returns:
            For SVD, float32 pixels for CLIP, (1, 3, 224, 224) in [0, 1], and float32 pixels for the
            VAE, (1, 3, H, W) in [-1, 1]. For other families, `source` unchanged.
        """
        if not self._spec.resizes_early:
            return source
        assert isinstance(source, Image.Image)
        return _resized(self._pipe, source, self._sampling)

    def encode(self, prepared: PreparedInput, request: ClipRequest) -> Tensors:
        """Encode a clip's prompts and image, draw its noise, and return the clip's packet.

        Args:
            prepared: Result of `prepare`; empty for clips from text.
            request: Clip with its prompts and seed.

        Returns:
            Packet (state of the clip) before the first step, with all tensors that the steps and
            the decode need.

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
        """Run steps `start` to `end` (exclusive) of a clip, and return the clip's new packet.

        Args:
            tensors: Packet (state of the clip) before step `start`. Its tensors are not changed.
            start: Index of the first step.
            end: Index after the last step, above `start`.
            after_step: Callback that gets each step's index and its latent.
            partner: Other rank of a pair. Each rank evaluates one branch of the guidance, and both
                ranks get the same result. None: this rank evaluates both branches.

        Returns:
            Packet before step `end`.

        Raises:
            ModelError: The pipeline behaves differently than the family's spec describes.
        """
        assert start < end
        branches = None
        if partner is not None:
            assert self._spec.branches is not None
            branches = GuidanceBranches(self._spec, partner, self.device, self._outputs)
        more = {"after_step": after_step, "branches": branches}
        call, _ = self._later_call(tensors, start, end, **more)
        return call.packet()

    def decode(self, tensors: Tensors) -> torch.Tensor:
        """Decode a clip to frames, and set `audio` to the clip's sound, if the model makes any.

        Args:
            tensors: Tensors of the packet (state of the clip) after the last step.

        Returns:
            Frames (F, H, W, 3) uint8 RGB, on the device.

        Raises:
            NotFiniteError: The VAE or the vocoder returned NaN or infinity.
        """
        postprocess = self._pipe.video_processor.postprocess_video

        def check_and_postprocess(video: torch.Tensor, **options: Any) -> Any:
            # Check before the postprocessing, which turns NaN into black pixels.
            if not bool(torch.isfinite(video).all()):
                raise NotFiniteError("the VAE returned values that are not finite")
            return postprocess(video, **options)

        video, *audio = self.decode_with(tensors, check_and_postprocess)
        self.audio = to_audio(self._pipe, *audio, rate=self._spec.audio_rate)
        return to_uint8(video[0])  # video[0] is (F, 3, H, W), from 0 to 1

    def decode_part(self, tensors: Tensors, part: DecodeRange) -> Tensors:
        """Decode a part of a clip. Other ranks decode other parts, and `join_parts` joins them.

        Args:
            tensors: Tensors of the packet after the last step.
            part: Range to decode: whole chunks of frames for families that decode in chunks, or
                else whole tiles of the VAE.

        Returns:
            Frames of the part, as from `decode`; or its tiles, (B, C, F, H, W) each, by name, such
            as `tile.0`.

        Raises:
            NotFiniteError: The VAE returned NaN or infinity for these frames.
            ModelError: The clip's tiles do not have the planned number of latent positions.
        """
        if self._spec.decodes_in_chunks:
            decode, frames = self._pipe.decode_latents, slice(part.first, part.end)

            def decode_latents(latents: torch.Tensor, _: int, chunk_size: int) -> torch.Tensor:
                video: torch.Tensor = decode(
                    latents[:, frames], frames.stop - frames.start, chunk_size
                )
                return video

            with patch_methods(self._pipe, decode_latents=decode_latents):
                return {FRAMES: self.decode(tensors)}

        def stop(*_: Any, **__: Any) -> Any:
            raise _TilesDecoded

        vae = self._pipe.vae
        decoder = PartDecoder(vae.decoder.forward, part)
        with patch_methods(vae.decoder, forward=decoder), suppress(_TilesDecoded):
            self.decode_with(tensors, stop)
        self._tile_shapes = decoder.shapes
        positions = sum(shape.positions for shape in decoder.shapes)
        if positions != part.total:
            raise ModelError(
                f"the tiles of the decode have {positions} latent positions in all, but "
                f"{part.total} were planned",
                "use `decode_ranks` 1",
                details={"positions": positions, "planned": part.total},
            )
        return decoder.tiles

    def part_specs(
        self, own: Tensors, part: DecodeRange
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return shape and dtype of the tensors that another rank's `decode_part` returns.

        Args:
            own: Result of `decode_part` on this rank, with the clip's first frames or tiles.
            part: Part that the other rank decodes.
        """
        first = next(iter(own.values()))
        if self._spec.decodes_in_chunks:
            return {FRAMES: ((part.end - part.first, *first.shape[1:]), first.dtype)}
        return tile_specs(self._tile_shapes, part, first)

    def join_parts(self, tensors: Tensors, parts: Sequence[Tensors]) -> torch.Tensor:
        """Join the parts that several ranks have decoded, and return the frames, as `decode` does.

        Args:
            tensors: Tensors of the packet after the last step.
            parts: Results of `decode_part` for all parts, in order. Tiles are changed in place,
                because the VAE blends their edges.

        Returns:
            Frames (F, H, W, 3) uint8 RGB, on the device.

        Raises:
            NotFiniteError: The VAE or the vocoder returned NaN or infinity.
        """
        if self._spec.decodes_in_chunks:
            return torch.cat([part[FRAMES] for part in parts])
        tiles = {name: tile for part in parts for name, tile in part.items()}
        with patch_methods(self._pipe.vae.decoder, forward=TilePlayer(tiles)):
            return self.decode(tensors)

    def decode_with(self, tensors: Tensors, postprocess: Callable[..., Any]) -> Any:
        """Decode a clip, with `postprocess` in place of the pipeline's own postprocessing.

        Args:
            tensors: Tensors of the packet after the last step.
            postprocess: Function that gets the arguments of the pipeline's own postprocessing: the
                VAE's result, (1, 3, F, H, W), and options such as `output_type`.

        Returns:
            Tuple of the postprocessed video and, if the model makes sound, the sound.
        """
        with patch_methods(self._pipe.video_processor, postprocess_video=postprocess):
            steps = self._sampling.num_inference_steps
            _, result = self._later_call(tensors, steps, None)
        return result if isinstance(result, tuple) else (result,)

    def truncated_text(self, prompt: str) -> str:
        """Return the text that is cut off from a prompt after `max_sequence_length` tokens.

        The result is empty if the whole prompt fits, or if the pipeline does not truncate prompts.
        Only ranks that encode can call this method, because only they have the tokenizer.
        """
        if not self._spec.cuts_prompts:
            return ""
        tokenizer, length = self._pipe.tokenizer, self._sampling.max_sequence_length
        # A processor for text and images would take the prompt for an image, so use only its
        # tokenizer.
        if isinstance(tokenizer, ProcessorMixin):
            tokenizer = tokenizer.tokenizer
        tokens = tokenizer(prompt).input_ids
        if len(tokens) <= length:
            return ""
        # diffusers cuts off text tokens, and keeps the end-of-text token as the last one.
        has_end = int(tokens[-1] == tokenizer.eos_token_id)
        return str(tokenizer.decode(tokens[length - has_end : len(tokens) - has_end]))

    def _call(
        self, request: ClipRequest, source: ModelInput | None, *, end: int | None, **of_call: Any
    ) -> tuple[RangeCall, Any]:
        """Run the pipeline's encode, steps or decode; return the `RangeCall` and its result."""
        pipe = self._pipe
        arguments = call_arguments(pipe, self._checkpoint, self._sampling, request, source)
        generator = arguments["generator"]
        call = RangeCall(pipe=pipe, spec=self._spec, generator=generator, end=end, **of_call)
        return call, call.run({**arguments, "output_type": "pt" if end is None else "latent"})

    def _later_call(
        self, tensors: Tensors, start: int, end: int | None, **more: Any
    ) -> tuple[RangeCall, Any]:
        """Call the pipeline for steps or the decode, with a packet in place of the encode."""
        structure = read_structure(tensors)
        request = ClipRequest(
            seed=0,
            prompt="" if self._spec.takes_prompt else None,
            negative_prompt="" if structure["given"]["negative_prompt"] else None,
        )
        of_call = {"given": structure, "received": tensors, "start": start, "end": end, **more}
        return self._call(request, blank_input(self._sampling), **of_call)


def call_arguments(
    pipe: Any,
    checkpoint: Checkpoint,
    sampling: Any,
    request: ClipRequest,
    source: ModelInput | None,
) -> dict[str, Any]:
    """Set a pipeline's scheduler and guiders for a clip, and return the arguments of the call.

    Arguments that are None are left out.

    Args:
        pipe: Pipeline of diffusers, which is changed.
        checkpoint: Checkpoint of the pipeline.
        sampling: Resolved sampling parameters.
        request: Request of the clip, with prompts and seed.
        source: Images, frames or videos that the clip starts from; None: the clip starts from text.
    """
    spec = checkpoint.spec
    set_scheduler_and_guiders(pipe, checkpoint, sampling)
    device = spec.generator_device(checkpoint, sampling, str(pipe.device))
    if isinstance(source, Image.Image) and spec.size_from_image:
        source = source.resize((sampling.width, sampling.height), Image.Resampling.LANCZOS)
    given = {
        **{
            name: vars(sampling).get(spec.renamed_arguments.get(name, name))
            for name in _accepted_arguments(pipe, spec)
        },
        **{"prompt": request.prompt, "negative_prompt": request.negative_prompt},
        **_input_arguments(pipe, spec, source, sampling),
        "generator": torch.Generator(device).manual_seed(request.seed),
    }
    known = {name: value for name, value in given.items() if value is not None}
    return {**known, **spec.call_arguments(sampling)}


def set_scheduler_and_guiders(pipe: Any, checkpoint: Checkpoint, sampling: Any) -> None:
    """Replace a pipeline's scheduler and guiders by new ones with the parameters of a clip.

    A guider is diffusers' object that applies the guidance. Many pipelines have none.

    Args:
        pipe: Pipeline of diffusers, which is changed.
        checkpoint: Checkpoint of the pipeline.
        sampling: Resolved sampling parameters of the clip.
    """
    scheduler = checkpoint.build_scheduler(sampling)
    if scheduler is not None:
        pipe.scheduler = scheduler
    modular = checkpoint.spec.modular
    guiders = {"guider": "guidance_scale"} if modular is None else modular.guiders
    configs = {} if modular is None else modular.guider_configs(sampling)
    for name, parameter in guiders.items():
        if (guider := getattr(pipe, name, None)) is not None:
            own = getattr(sampling, parameter)
            scale = sampling.guidance_scale if own is None else own
            config = {**guider.config, **configs.get(name, {}), "guidance_scale": scale}
            setattr(pipe, name, type(guider).from_config(config))


def _accepted_arguments(pipe: Any, spec: FamilySpec) -> Iterable[str]:
    """Return the names of the arguments that a pipeline's `__call__` takes."""
    if spec.modular is not None:
        return {*pipe.default_call_parameters} - {None}
    return inspect.signature(type(pipe).__call__).parameters


def _input_arguments(
    pipe: Any, spec: FamilySpec, source: ModelInput | None, sampling: Any
) -> Mapping[str, Any]:
    """Return those arguments of a pipeline's `__call__` that are a clip's images or videos."""
    if spec.references_argument is not None and source is not None:
        return _reference_arguments(pipe, spec, source)
    if isinstance(source, dict) and LAST_IMAGE in source:
        assert spec.last_image_arguments is not None
        return spec.last_image_arguments(source[IMAGE], source[LAST_IMAGE], sampling)
    if source is not None and spec.image_arguments is not None:
        return spec.image_arguments(source, sampling)
    return source if isinstance(source, dict) else {spec.image_argument: source}


def _reference_arguments(pipe: Any, spec: FamilySpec, source: ModelInput) -> dict[str, Any]:
    """Return a pipeline's arguments for a clip's reference images, and for its video, if any."""
    files = source if isinstance(source, dict) else {IMAGE: source}
    references: list[Any] = [each for each in files.values() if isinstance(each, Image.Image)]
    if spec.modular is not None and spec.modular.reference_class is not None:
        package = import_module(type(pipe).__module__.rpartition(".")[0])
        references = [getattr(package, spec.modular.reference_class)(each) for each in references]
    given = {} if isinstance(files[IMAGE], Image.Image) else {spec.image_argument: files[IMAGE]}
    return {**given, str(spec.references_argument): references or None}


def blank_input(sampling: Any, *, whole: bool = False) -> ModelInput | None:
    """Return black images or videos in place of a clip's real ones; None for clips from text.

    Args:
        sampling: Resolved sampling parameters.
        whole: Whether videos have their real size and number of frames. Otherwise videos have as
            few frames or pixels as the pipelines accept. Images always have the clip's size.
    """
    if not sampling.from_image:
        return None
    width, height = sampling.width, sampling.height
    image = Image.new("RGB", (width, height))
    first: Any = image
    if sampling.from_video:
        first = [image] * (sampling.video_frames if whole else 1)
    others: dict[str, Any] = dict.fromkeys(reference_names(sampling.num_references), image)
    if sampling.has_last_image:
        others[LAST_IMAGE] = image
    for name, side in sampling.videos.items():
        size = (side or width, side or height) if whole else (16, 16)
        others[name] = [Image.new("RGB", size)] * sampling.frames
    return {IMAGE: first, **others} if others else first


def to_uint8(pixels: torch.Tensor) -> torch.Tensor:
    """Convert pixels to bytes on their device, bitwise equal to diffusers' video processor.

    Args:
        pixels: Frames, (F, 3, H, W), from 0 to 1.

    Returns:
        Frames, (F, H, W, 3) uint8, contiguous.
    """
    return (pixels.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def to_audio(
    pipe: Any, audio: torch.Tensor | None = None, *, rate: Callable[[Any], int]
) -> Audio | None:
    """Convert a clip's sound to int16, as diffusers does for files; return None without sound.

    Args:
        pipe: Pipeline whose vocoder made the sound.
        audio: Sound, (1, channels, N) or (1, N), from -1 to 1; None: the pipeline makes no sound.
        rate: Function that returns the samples per second of a loaded pipeline's sound.

    Raises:
        NotFiniteError: The vocoder returned NaN or infinity.
    """
    if audio is None:
        return None
    if not bool(torch.isfinite(audio).all()):
        raise NotFiniteError("the vocoder returned values that are not finite")
    samples = (audio[0].float().clamp(-1.0, 1.0) * 32767.0).to(torch.int16)
    return Audio(torch.atleast_2d(samples).T.contiguous(), rate(pipe))


# --- resize of the input image of SVD, before the encode -----------------------------------------
#
# diffusers' `_resize_with_antialiasing` blurs the whole image, which takes 9 GiB for 50 megapixels,
# and then resizes it to 224 x 224 pixels by bicubic interpolation. For each of the 224 rows and
# columns of the result, the interpolation reads only four rows and columns of the blurred image. So
# the functions below blur only the rows and columns that are read, one band of rows at a time. The
# result is bitwise equal to that of diffusers, because the same convolution computes each pixel, in
# the same order.

_CLIP_PIXELS, _VAE_PIXELS = "clip_pixels", "vae_pixels"
_SIDE = 224
_CHANNELS = 3
_BAND_ROWS = 256
_HEIGHT, _WIDTH = -2, -1
# Bicubic interpolation reads four positions: from one before the rounded-down coordinate to two
# after it. One more position is added on both sides, because torch's coordinates have rounding
# errors (single precision).
_BEFORE, _AFTER = 2, 3


def _resized(pipe: Any, image: Image.Image, sampling: Any) -> Tensors:
    """Resize an image for SVD's CLIP (pixels from 0 to 1) and for its VAE (from -1 to 1)."""
    processor = pipe.video_processor
    # Take the method from the class: a pipeline call in another thread may have replaced the
    # object's method.
    preprocess = type(processor).preprocess
    return {
        # Convert from [-1, 1] to [0, 1], as diffusers' `_encode_image` does.
        _CLIP_PIXELS: (resize_for_clip(image) + 1.0) / 2.0,
        _VAE_PIXELS: preprocess(processor, image, height=sampling.height, width=sampling.width),
    }


@contextmanager
def _resized_before(pipe: Any, pixels: Tensors) -> Iterator[None]:
    """Make SVD's pipeline encode pixels that are already resized, during the `with` block."""
    encode = pipe._encode_image

    def encode_image(_: Image.Image, *args: Any) -> Any:
        return encode(pixels[_CLIP_PIXELS], *args)

    with (
        patch_methods(pipe, _encode_image=encode_image),
        patch_methods(pipe.video_processor, preprocess=lambda *_, **__: pixels[_VAE_PIXELS]),
    ):
        yield


def resize_for_clip(image: Image.Image) -> torch.Tensor:
    """Resize an image for SVD's CLIP, bitwise equal to diffusers' `_resize_with_antialiasing`.

    Args:
        image: Image in RGB, of any size.

    Returns:
        Pixels, (1, 3, 224, 224) float32 in [-1, 1].
    """
    tops = range(0, image.height, _BAND_ROWS)
    across = torch.cat([_blurred(_pixels(image, top), _WIDTH) for top in tops], dim=_HEIGHT)
    down = _blurred(across, _HEIGHT)
    # Put the blurred pixels at their places in a tensor of the image's size, because `interpolate`
    # computes from this size which pixels it reads. The other pixels of these rows become NaN, so
    # that a wrong read would be noticed. Rows that are never written take no physical memory.
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
    return (pixels * 2.0 - 1.0).contiguous()  # from [0, 1] to [-1, 1], as diffusers does


def _blurred(pixels: torch.Tensor, dim: int) -> torch.Tensor:
    """Blur an image along one dimension, only at positions that the resize for CLIP reads later."""
    # Imported here, because other families do not need the module, and because `silence_libraries`
    # must run before the import.
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
    """Return the positions along an image's side that the bicubic resize for CLIP reads.

    Args:
        size: Length of the side in pixels.

    Returns:
        Ranges (start, stop) in order, with gaps between them. `stop` is exclusive.
    """
    spans: list[tuple[int, int]] = []
    for index in range(_SIDE):
        below = index * (size - 1) // (_SIDE - 1)
        start, stop = max(0, below - _BEFORE), min(size, below + _AFTER + 1)
        if spans and start <= spans[-1][1]:
            start = spans.pop()[0]
        spans.append((start, stop))
    return spans
