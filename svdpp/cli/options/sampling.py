"""The options for sampling: steps, seeds, size, motion, guidance."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Annotated, get_type_hints

from svdpp.cli.console import Console
from svdpp.cli.options.declare import PROMPTS, VIDEO, option
from svdpp.cli.options.model import ModelOptions
from svdpp.config import (
    SAMPLING_CLASSES,
    PipelineConfig,
    SamplingConfig,
    own_params,
    sampling_defaults,
)
from svdpp.errors import RequestError

#: The value of --decode-chunk-size that measures how many frames fit.
AUTO_CHUNK = "auto"
#: The value of --seed that draws a seed.
RANDOM_SEED = "random"

_MAX_SEEDS = 100_000
# Frames that --memory-opt decodes at a time: from diffusers' low-memory recipe for SVD.
_LOW_MEMORY_CHUNK = 2
# Size of a drawn seed: short enough to type again.
_DRAWN_BITS = 32


#: The fields for the families that take prompts, which few commands have.
PROMPT_FIELDS = (
    *("guidance_scale", "guidance_scale_2", "guidance_rescale", "flow_shift"),
    *("decode_timestep", "decode_noise_scale", "max_sequence_length"),
)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """The arguments of diffusers' `__call__`; None stands for the model's default."""

    steps: Annotated[
        int | None,
        option(
            *("--steps", "--num-inference-steps", "--total-steps"),
            panel=VIDEO,
            metavar="N",
            help="Denoising steps of each clip.",
            default="28 or 50",
        ),
    ] = None
    num_frames: Annotated[
        int | None,
        option(
            *("--frames", "--num-frames"),
            panel=VIDEO,
            metavar="F",
            help="Frames of each clip.",
            default="the model's own",
        ),
    ] = None
    decode_chunk_size: Annotated[
        str | None,
        option(
            "--decode-chunk-size",
            panel=VIDEO,
            metavar="F|auto",
            help="Frames to decode at a time; bits and memory depend on it. auto measures how many "
            "fit.",
            default="all",
        ),
    ] = None
    seed: Annotated[
        str | None,
        option(
            "--seed",
            panel=VIDEO,
            metavar="N|random",
            help="Seed of every clip, 0 to 2^63 - 1; random draws one and prints it.",
            default="0",
        ),
    ] = None
    height: Annotated[
        int | None,
        option(
            "--height",
            panel=VIDEO,
            metavar="PIXELS",
            help="Frame height, a multiple of 8.",
            default="576; demo 128",
        ),
    ] = None
    width: Annotated[
        int | None,
        option(
            "--width",
            panel=VIDEO,
            metavar="PIXELS",
            help="Frame width, a multiple of 8.",
            default="1024; demo 128",
        ),
    ] = None
    fit: Annotated[
        str,
        option(
            "--fit",
            panel=VIDEO,
            metavar="stretch|crop|pad",
            choices=("stretch", "crop", "pad"),
            help="How to fit a photograph of another shape to the frame; diffusers stretches it.",
        ),
    ] = "stretch"
    fps: Annotated[
        int | None,
        option(
            "--fps",
            panel=VIDEO,
            metavar="FPS",
            help="Frames per second, 1 to 240; the model gets this number minus 1.",
            default="7",
        ),
    ] = None
    motion_bucket_id: Annotated[
        int | None,
        option(
            "--motion-bucket-id",
            panel=VIDEO,
            metavar="N",
            help="Amount of motion, 0 to 1023.",
            default="127; demo 40",
        ),
    ] = None
    noise_aug_strength: Annotated[
        float | None,
        option(
            "--noise-aug-strength",
            panel=VIDEO,
            metavar="X",
            help="Noise added to the photograph.",
            default="0.02",
        ),
    ] = None
    min_guidance_scale: Annotated[
        float | None,
        option(
            "--min-guidance-scale",
            panel=VIDEO,
            metavar="X",
            help="Guidance of the first frame.",
            default="1.0",
        ),
    ] = None
    max_guidance_scale: Annotated[
        float | None,
        option(
            "--max-guidance-scale",
            panel=VIDEO,
            metavar="X",
            help="Guidance of the last frame; 1 or less turns guidance off.",
            default="3.0; demo 1.1",
        ),
    ] = None
    guidance_scale: Annotated[
        float | None,
        option(
            "--guidance-scale",
            panel=PROMPTS,
            metavar="X",
            help="Guidance by the prompt; 1 or less turns guidance off.",
            default="the family's",
        ),
    ] = None
    guidance_scale_2: Annotated[
        float | None,
        option(
            "--guidance-scale-2",
            panel=PROMPTS,
            metavar="X",
            help="Guidance in the steps of Wan's low-noise expert.",
            default="--guidance-scale",
        ),
    ] = None
    flow_shift: Annotated[
        float | None,
        option(
            "--flow-shift",
            panel=PROMPTS,
            metavar="X",
            help="Shift of Wan's noise levels, for example 3 at 480p and 5 at 720p.",
            default="that of the model's scheduler",
        ),
    ] = None
    guidance_rescale: Annotated[
        float | None,
        option(
            "--guidance-rescale",
            panel=PROMPTS,
            metavar="X",
            help="Rescaling of LTX's guided prediction, 0 to 1.",
            default="0",
        ),
    ] = None
    decode_timestep: Annotated[
        float | None,
        option(
            "--decode-timestep",
            panel=PROMPTS,
            metavar="X",
            help="Noise level of LTX's decode, 0 to 1.",
            default="0",
        ),
    ] = None
    decode_noise_scale: Annotated[
        float | None,
        option(
            "--decode-noise-scale",
            panel=PROMPTS,
            metavar="X",
            help="Noise added before LTX's decode, 0 to 1.",
            default="--decode-timestep",
        ),
    ] = None
    max_sequence_length: Annotated[
        int | None,
        option(
            *("--max-prompt-tokens", "--max-sequence-length"),
            panel=PROMPTS,
            metavar="N",
            help="Tokens of a prompt that the model reads; the rest is cut off.",
            default="the family's",
        ),
    ] = None

    param: Annotated[
        list[str] | None,
        option(
            "--param",
            panel=PROMPTS,
            metavar="NAME=VALUE",
            help="A parameter of the model's family, repeatable; svdpp models FAMILY lists them.",
        ),
    ] = None

    @property
    def measures_chunk(self) -> bool:
        """Whether the number of frames decoded at a time is to be measured."""
        return self.decode_chunk_size == AUTO_CHUNK

    def one_seed(self) -> int:
        """The seed of every clip."""
        return parse_seeds(self.seed, None)[0]

    def num_steps(self, family: str = "svd") -> int:
        """The number of steps, by default that of the family."""
        default: int = SAMPLING_CLASSES[family]().num_inference_steps
        return default if self.steps is None else self.steps

    def to_config(
        self, model: ModelOptions, *, from_image: bool = True, family: str | None = None
    ) -> SamplingConfig:
        """The given values, else the model's defaults, else those of diffusers."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        given.pop("seed", None)
        given.pop("param", None)
        if "steps" in given:
            given["num_inference_steps"] = given.pop("steps")
        if (chunk := parse_decode_chunk(self.decode_chunk_size)) is None:
            given.pop("decode_chunk_size", None)
        else:
            given["decode_chunk_size"] = chunk
        if model.memory_opt:
            given.setdefault("decode_chunk_size", _LOW_MEMORY_CHUNK)
        family = family or model.family
        kind = SAMPLING_CLASSES[family]
        known = {field.name for field in fields(kind)}
        if "from_image" in known:
            given["from_image"] = from_image
        given |= parse_params(self.param or (), family)
        for name in given.keys() - known:
            option_name = _OPTIONS[name]
            raise RequestError(
                f"{option_name} is not for {model.model}, a model of the family {family}",
                f"leave {option_name} out",
            )
        sampling: SamplingConfig = kind(**{**sampling_defaults(model.model), **given})
        return sampling


def _option_names() -> dict[str, str]:
    hints = get_type_hints(SamplingOptions, include_extras=True)
    return {name: hint.__metadata__[0].names[0] for name, hint in hints.items()}


_OPTIONS = _option_names()


def parse_params(texts: Iterable[str], family: str) -> dict[str, float]:
    """The values of `--param NAME=VALUE` by name, in the types of the family's parameters."""
    known = own_params(SAMPLING_CLASSES[family])
    values: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise RequestError(f"--param takes NAME=VALUE, got {text!r}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"svdpp models {family} lists them"
            raise RequestError(f"the family {family} has no parameter {name!r}", hint)
        kind = type(known[name].default)
        try:
            values[name] = kind(value)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise RequestError(f"--param {name} must be {what}, got {value!r}") from None
    return values


def parse_seeds(seed: str | None, seeds: str | None) -> list[int]:
    """The seeds of `--seed 7` or `--seeds 1,3,5-7`; a drawn one for `random`; 0 by default."""
    if seed is not None and seeds is not None:
        raise RequestError("--seed and --seeds contradict each other")
    if RANDOM_SEED in (seed, seeds):
        import secrets

        return [secrets.randbits(_DRAWN_BITS)]
    if seeds is None:
        return [_one_seed(seed or "0")]
    result: dict[int, None] = {}  # a set that keeps its order
    for part in seeds.split(","):
        match = re.fullmatch(r"\s*(\d{1,19})(?:-(\d{1,19}))?\s*", part, re.ASCII)
        if match is None:
            raise RequestError(
                f"--seeds takes numbers and ranges such as 1-8 or 1,3,5-7, got {seeds!r}"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _MAX_SEEDS or len(result) >= _MAX_SEEDS:
            raise RequestError(
                f"--seeds {part.strip()}: a range rises, and has at most {_MAX_SEEDS} seeds"
            )
        _check_seed(last)
        result.update(dict.fromkeys(range(first, last + 1)))
    return list(result)


def _one_seed(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,20}", text, re.ASCII):
        raise RequestError(f"--seed must be a whole number or random, got {text!r}")
    _check_seed(int(text))
    return int(text)


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**63:
        raise RequestError(f"a seed must be 0 to 2^63 - 1, got {seed}")


def parse_decode_chunk(text: str | None) -> int | None:
    """The number of frames; None for the default and for `auto`."""
    if text is None or text == AUTO_CHUNK:
        return None
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        raise RequestError(f"--decode-chunk-size must be a number or auto, got {text!r}")
    return int(text)


def fit_chunk(
    console: Console, sampling: SamplingOptions, config: PipelineConfig
) -> PipelineConfig:
    """`config` with the number of frames that can be decoded at a time, if it is to be measured."""
    if not (sampling.measures_chunk and config.decodes):
        return config
    from svdpp.diagnostics.decode_chunk import measure_decode

    memory = measure_decode(config)
    fitting = replace(config.sampling, decode_chunk_size=memory.largest_chunk())
    console.info(f"decode: {memory}")
    return replace(config, sampling=fitting)
