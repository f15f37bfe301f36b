"""The model of one rank: every stage is a call of diffusers' pipeline."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from PIL import Image

from svdpp.config import ClipRequest, Dtype, ModelConfig, SamplingConfig
from svdpp.config.clip import IMAGE
from svdpp.errors import InputError, NotFiniteError
from svdpp.models.base import AfterStep, Audio, Partner, Source, Tensors
from svdpp.models.checkpoint import Checkpoint
from svdpp.models.engine.branches import Branches
from svdpp.models.engine.call import STRUCTURE, RangeCall
from svdpp.models.engine.load import load_pipeline, new_pipeline, set_up
from svdpp.models.engine.patches import replaced
from svdpp.models.engine.rows import Row
from svdpp.models.engine.values import Node
from svdpp.plan.actions import FrameRange
from svdpp.plan.layout import Roles

_MAX_CACHED_TEXTS = 16
_SMALL = (16, 16)


class EngineModel:
    """The model of one rank: any family that has a row, with resolved sampling parameters."""

    def __init__(
        self,
        pipe: Any,
        checkpoint: Checkpoint,
        dtype: Dtype,
        sampling: Any,
        texts: dict[Any, Any] | None = None,
    ) -> None:
        self.device: torch.device = pipe.device
        self.audio: Audio | None = None
        """Of the clip that was decoded last; None: the model makes no sound."""
        self._pipe, self._checkpoint, self._row = pipe, checkpoint, checkpoint.row
        self._dtype, self._sampling = dtype, sampling
        # Embeddings of the last prompts, so that each distinct prompt is encoded once.
        self._texts = {} if texts is None else texts
        self._outputs: list[Node] = []  # see `Branches`

    def with_sampling(self, sampling: SamplingConfig) -> EngineModel:
        """The same loaded components with other sampling parameters."""
        pipe = self._pipe
        if sampling.from_image != self._sampling.from_image:
            assert self._sampling.from_image, "a rank for clips from text has no encoder of images"
            pipe = new_pipeline(self._checkpoint, False, pipe.components, self.device)
        return EngineModel(pipe, self._checkpoint, self._dtype, sampling, self._texts)

    def prepare(self, source: Source) -> Tensors:
        """What the row prepares, or the pixels by name: uint8 (H, W, 3), of a video (F, H, W, 3).

        On the CPU; it may run in a thread while the rank denoises another clip.
        """
        if self._row.prepare is not None:
            made: Tensors = self._row.prepare(self._pipe, source, self._sampling)
            return made
        named = source if isinstance(source, dict) else {IMAGE: source}
        return {name: _pixels(each) for name, each in named.items()}

    def encode(self, prepared: Tensors, request: ClipRequest) -> Tensors:
        """The packet before the first step: what later steps and the decode need.

        Encodes the prompts and the image, which is `prepared`, and draws the noise.
        """
        assert bool(prepared) == self._sampling.from_image
        source = blank_source(self._sampling)
        if prepared and self._row.prepare is None:
            found = {name: _pictures(pixels) for name, pixels in prepared.items()}
            source = found if self._sampling.videos else found[IMAGE]
        generator = torch.Generator(self._generator_device).manual_seed(request.seed)
        call = self._call(None, 0, 0, generator)
        with ExitStack() as patches:
            patches.enter_context(self._row.prepared(self._pipe, prepared))
            for name in self._row.texts:
                cached = self._cached(name, getattr(self._pipe, name))
                patches.enter_context(replaced(self._pipe, **{name: cached}))
            call.run(
                call_arguments(self._pipe, self._checkpoint, self._sampling)
                | request_arguments(self._row, self._sampling, request, source, generator)
                | {"output_type": "latent"}
            )
        given = {"negative_prompt": request.negative_prompt is not None}
        return _packet(call, {"given": given})

    def denoise(
        self,
        tensors: Tensors,
        start: int,
        end: int,
        after_step: AfterStep,
        partner: Partner | None = None,
    ) -> Tensors:
        """Runs steps `start` to `end` (exclusive); returns the packet after them.

        Does not change `tensors`, the packet before them. With a partner each step evaluates one
        branch of the guidance, and both get the same result.
        """
        assert start < end
        structure, tensors = self._opened(tensors, start)
        generator = torch.Generator(self._generator_device)
        branches = None
        if partner is not None:
            assert self._row.branches is not None
            branches = Branches(self._row.branches, partner, self.device, self._outputs)
        call = self._call(
            (structure, tensors), start, end, generator, after_step=after_step, branches=branches
        )
        call.run(self._later_arguments(structure, generator) | {"output_type": "latent"})
        return _packet(call, {"given": structure["given"]})

    def decode(self, tensors: Tensors, frames: FrameRange | None = None) -> torch.Tensor:
        """Frames (F, H, W, 3) uint8 RGB of the packet after the last step, on the device.

        With `frames`, whole chunks of them, the pipeline's own decode gets the latents of these.
        """
        postprocess = self._pipe.video_processor.postprocess_video

        def check_and_postprocess(video: torch.Tensor, **options: Any) -> Any:
            if not bool(torch.isfinite(video).all()):  # as colours they would become black
                raise NotFiniteError("the VAE returned values that are not finite")
            return postprocess(video, **options)

        decode = self._pipe.decode_latents if frames else None

        def decode_part(latents: torch.Tensor, _: int, chunk_size: int) -> Any:
            assert decode is not None
            assert frames is not None
            part = latents[:, frames.first : frames.end]
            return decode(part, frames.end - frames.first, chunk_size)

        with replaced(self._pipe, **({"decode_latents": decode_part} if frames else {})):
            video, *audio = self.decode_by(tensors, check_and_postprocess)
        self.audio = audio_of(self._pipe, self._row, *audio)
        return to_bytes(video[0])  # from (F, 3, H, W), 0 to 1

    def decode_by(self, tensors: Tensors, postprocess: Callable[..., Any]) -> Any:
        """The pipeline's result, with `postprocess` in place of its own for the decoded video."""
        steps = self._sampling.num_inference_steps
        structure, tensors = self._opened(tensors, steps)
        generator = torch.Generator(self._generator_device)
        call = self._call((structure, tensors), steps, None, generator)
        with replaced(self._pipe.video_processor, postprocess_video=postprocess):
            arguments = self._later_arguments(structure, generator)
            result = call.run(arguments | {"output_type": "pt"})
        return result if isinstance(result, tuple) else (result,)

    def probe_packet(self, *, has_stepped: bool = False) -> Tensors:
        """A made-up packet with a real one's shapes, dtypes and devices, to measure without encode.

        With `has_stepped` it is one to decode, otherwise one before the first step.
        """
        from svdpp.models.memory import probe_packet  # imports this module

        model = ModelConfig(name=self._checkpoint.name, dtype=self._dtype)
        made = probe_packet(self._checkpoint, model, self._sampling, has_stepped=has_stepped)
        generator = torch.Generator().manual_seed(0)
        return {
            name: tensor
            if tensor.dtype == torch.uint8  # in host memory in real packets too
            else torch.randn(tensor.shape, generator=generator).to(self.device, tensor.dtype)
            for name, tensor in made.items()
        }

    @property
    def frames_shape(self) -> tuple[int, int, int, int]:
        """F, H, W, 3."""
        return self._sampling.num_frames, self._sampling.height, self._sampling.width, 3

    def removed_text(self, prompt: str) -> str:
        """The end of `prompt` that does not fit in `max_sequence_length`; on the encoding rank."""
        if not self._row.takes_prompt:
            return ""
        tokenizer, length = self._pipe.tokenizer, self._sampling.max_sequence_length
        tokens = tokenizer(prompt).input_ids
        if len(tokens) <= length:
            return ""
        # If the last token ends the text, it stays.
        has_end = int(tokens[-1] == tokenizer.eos_token_id)
        return str(tokenizer.decode(tokens[length - has_end : len(tokens) - has_end]))

    @property
    def _generator_device(self) -> str:
        return self._row.generator_device(self._checkpoint, self._sampling, str(self.device))

    def _call(
        self,
        packet: tuple[Node, Tensors] | None,
        start: int,
        end: int | None,
        generator: torch.Generator,
        **more: Any,
    ) -> RangeCall:
        set_up(self._pipe, self._checkpoint, self._sampling)
        given = {"packet": packet, "start": start, "end": end, "generators": [generator], **more}
        return RangeCall(pipe=self._pipe, row=self._row, **given)

    def _later_arguments(self, structure: Node, generator: torch.Generator) -> dict[str, Any]:
        """Arguments for a rank that has no prompt and no image: what they give is replayed."""
        arguments = call_arguments(self._pipe, self._checkpoint, self._sampling)
        negative = "" if structure["given"]["negative_prompt"] else None
        prompt = "" if self._row.takes_prompt else None
        request = ClipRequest(seed=0, prompt=prompt, negative_prompt=negative)
        source = blank_source(self._sampling)
        given = request_arguments(self._row, self._sampling, request, source, generator)
        return arguments | given

    def _opened(self, tensors: Tensors, steps: int) -> tuple[Node, Tensors]:
        """The structure and the tensors of a packet after `steps`."""
        if STRUCTURE in tensors:
            assert tensors[STRUCTURE].is_cpu
            return json.loads(tensors[STRUCTURE].numpy().tobytes()), tensors
        if self._row.old_packet is None:
            raise InputError(
                "the latent checkpoint was written by svdpp 0.3 or earlier, which kept less of a "
                "clip",
                "delete it: the clip then starts again",
            )
        opened: tuple[Node, Tensors] = self._row.old_packet(tensors, self._sampling, steps)
        return opened

    def _cached(self, name: str, encode: Any) -> Any:
        texts = self._texts
        signature = inspect.signature(encode)

        def embeds(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs).arguments
            if IMAGE in arguments:
                return encode(*args, **kwargs)
            # Values such as prompts, lengths and dtypes, whose text is all that matters of them.
            key = (name, repr(arguments))
            if key not in texts:
                while len(texts) >= _MAX_CACHED_TEXTS:
                    del texts[next(iter(texts))]
                texts[key] = encode(*args, **kwargs)
            return texts[key]

        return embeds


def load_model(
    checkpoint: Checkpoint,
    model: ModelConfig,
    sampling: SamplingConfig,
    device: str,
    roles: Roles,
) -> EngineModel:
    """Loads only the components for one rank."""
    pipe = load_pipeline(checkpoint, model, sampling=sampling, roles=roles, device=device)
    return EngineModel(pipe, checkpoint, model.dtype, sampling)


def call_arguments(pipe: Any, checkpoint: Checkpoint, sampling: Any) -> dict[str, Any]:
    """Arguments of `__call__` that only depend on the sampling parameters."""
    accepted = inspect.signature(type(pipe).__call__).parameters
    renamed = checkpoint.row.renamed
    fields = {name: renamed.get(name, name) for name in accepted}
    values = vars(sampling)
    # None stands for the default of `__call__`.
    given = {
        name: value for name, each in fields.items() if (value := values.get(each)) is not None
    }
    return {**given, **checkpoint.row.arguments(sampling)}


def request_arguments(
    row: Row,
    sampling: Any,
    request: ClipRequest,
    source: Source | None,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Arguments of `__call__` for one clip; without those that it does not have."""
    if isinstance(source, Image.Image) and row.size_from_image:
        source = source.resize((sampling.width, sampling.height), Image.Resampling.LANCZOS)
    given = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        **(source if isinstance(source, dict) else {row.image_argument: source}),
        "generator": generator,
    }
    return {name: value for name, value in given.items() if value is not None}


def blank_source(sampling: Any, *, whole: bool = False) -> Source | None:
    """Black pictures in place of what a clip starts from; None if it starts from text alone.

    Unless they are `whole`, the frames of videos are as few or as small as the pipelines take.
    """
    if not sampling.from_image:
        return None
    width, height = sampling.width, sampling.height
    image = Image.new("RGB", (width, height))
    if not sampling.videos:
        return [image] * (sampling.frames if whole else 1) if sampling.from_video else image
    sizes = {name: (side or width, side or height) for name, side in sampling.videos.items()}
    frames = {name: Image.new("RGB", size if whole else _SMALL) for name, size in sizes.items()}
    return {IMAGE: image, **{name: [frame] * sampling.frames for name, frame in frames.items()}}


def _pixels(pictures: Any) -> torch.Tensor:
    if isinstance(pictures, list):
        return torch.from_numpy(np.stack([np.asarray(frame) for frame in pictures]))
    return torch.from_numpy(np.array(pictures.convert("RGB")))


def _pictures(pixels: torch.Tensor) -> Any:
    if pixels.dim() == 3:
        return Image.fromarray(pixels.numpy())
    return [Image.fromarray(frame) for frame in pixels.numpy()]


def to_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """(F, 3, H, W) in [0, 1] to (F, H, W, 3) uint8, as diffusers' processor, but on the device."""
    return (pixels.float() * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def audio_of(pipe: Any, row: Row, audio: torch.Tensor | None = None) -> Audio | None:
    """The sound that a pipeline returned, (1, channels, N), as diffusers writes it into files."""
    if row.vocoder is None or audio is None:
        return None
    if not bool(torch.isfinite(audio).all()):
        raise NotFiniteError(f"the {row.vocoder} returned values that are not finite")
    samples = (audio[0].float().clamp(-1.0, 1.0) * 32767.0).to(torch.int16)
    rate = getattr(pipe, row.vocoder).config.output_sampling_rate
    return Audio(samples.T.contiguous(), rate)


def _packet(call: RangeCall, more: Node) -> Tensors:
    text = json.dumps({**call.structure, **more}, separators=(",", ":"))
    structure = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return {**call.tensors, STRUCTURE: structure}
