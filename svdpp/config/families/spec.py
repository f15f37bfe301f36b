"""The spec of a family: what is special about its pipelines of diffusers; knows no torch.

`docs/new-model.md` says how to add one. All else is the same for all families.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from svdpp.config.limits import MAX_FRAMES
from svdpp.config.sampling import CommonSampling
from svdpp.errors import ModelError

#: Facts that a family's configs tell of a checkpoint: fields of `Checkpoint`.
CheckpointFacts = dict[str, Any]

#: Components that an encode of an image uses. A checkpoint may lack some of these components.
IMAGE_ENCODERS = ("vae", "image_encoder", "image_processor", "feature_extractor")
#: `encode_components` of the families with two encoders of prompts.
TWO_TEXT_ENCODERS = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
#: `schedulers` of Wan and its relatives.
FLOW_SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")


class ConfigFile(Protocol):
    """A JSON file of a checkpoint, of which a spec reads values; `models.files.JsonFile`."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Values by key."""

    def error(
        self, message: str, hint: str = "", *, details: Mapping[str, Any] | None = None
    ) -> ModelError:
        """Return an error that names the file."""

    def positive_int(self, key: str, largest: int) -> int:
        """Return the integer at `key`, from 1 to `largest`."""

    def require(self, key: str, expected: object, reason: str) -> None:
        """Check that the value at `key` is the expected one."""

    def refuse(self, key: str, reason: str) -> None:
        """Check that `key` is not set."""


class CheckpointConfigs(Protocol):
    """The configs of a checkpoint; `models.checkpoint.Configs`."""

    @property
    def index(self) -> ConfigFile:
        """`model_index.json`."""

    @property
    def classes(self) -> Mapping[str, str]:
        """Class of each component by the component's name."""

    def of(self, part: str, **defaults: Any) -> ConfigFile:
        """Return the config of one component."""


class CheckedCheckpoint(Protocol):
    """A checkpoint whose configs are checked; `models.checkpoint.Checkpoint`."""

    @property
    def scheduler_config(self) -> Mapping[str, Any]:
        """Config of the scheduler."""

    @property
    def decode_draws_noise(self) -> bool:
        """Whether the decode draws noise."""

    @property
    def image_sizes(self) -> tuple[int, int] | None:
        """Sizes of clips from an image: the side of a square one, and the unit of sides."""

    def timesteps(self, sampling: Any) -> Any:
        """Return the timesteps of a clip's steps, a tensor of shape (steps,)."""


def two_images(first: Any, last: Any, _: Any) -> dict[str, Any]:
    """Return the arguments of most pipelines that take a last image; see `FamilySpec`."""
    return {"image": first, "last_image": last}


@dataclass(frozen=True, kw_only=True)
class ModularSpec:
    """How svdpp runs a family whose pipelines are modular: trees of blocks that share a state."""

    blocks: tuple[str, ...]
    """Class names of the trees of blocks that are proven; one of them is the pipeline's default."""
    videos: str = "videos"
    """Name of the decoded video in the final state."""
    audio: str | None = None
    """Name of the decoded sound in the final state; None: the pipeline makes no sound."""
    audio_rate: Callable[[Any], int] = lambda pipe: int(pipe.vocoder.config.output_sampling_rate)
    """Returns the samples per second of the sound, from a loaded pipeline."""
    guiders: Mapping[str, str] = field(default_factory=lambda: {"guider": "guidance_scale"})
    """Sampling parameter with the guidance scale of each guider, by the guider's name."""


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """One family of models, and what the engine does otherwise for it."""

    sampling: type[Any]
    """Class of the sampling parameters, of which `family` is the family's name."""
    title: str
    """Name that users know."""
    example: str
    """Hub id of a published checkpoint."""
    example_remark: str = ""
    """Remark on the example that users need before they can name it; empty: none."""
    license: str
    """License of the example's weights, as its publisher calls it."""
    denoiser: str
    """Class of the denoisers: others may keep state that no packet carries."""
    text_pipeline: str | None = None
    """Pipeline's class for clips from text alone."""
    image_pipeline: str | None = None
    """Pipeline's class for clips from an image."""
    image_argument: str = "image"
    """Argument of `__call__` for that image, or for the frames of a video."""
    last_image_arguments: Callable[[Any, Any, Any], Mapping[str, Any]] | None = None
    """Returns the arguments of `__call__` for a first and a last image, from both and the sampling
    parameters; None: the pipeline takes no last image."""
    aliases: tuple[str, ...] = ()
    """Other pipelines whose checkpoints the family runs, too. If a pipeline belongs to another
    family, the user has to ask for this one by name."""
    text_aliases: tuple[str, ...] = ()
    """Those of `aliases` whose checkpoints make clips from text; the others need an image."""
    size_from_image: bool = False
    """Whether the image's shape sets the clip's size; the image is then resized to it first."""
    text_and_image: bool = False
    """Whether a checkpoint of either class has all components of the other one."""
    takes_prompt: bool = True
    schedulers: tuple[str, ...] = ("FlowMatchEulerDiscreteScheduler",)
    denoisers: tuple[str, ...] = ("transformer",)
    encode_components: tuple[str, ...] = ("tokenizer", "text_encoder")
    """Components that an encode uses."""
    decode_components: tuple[str, ...] = ("vae",)
    shared_components: tuple[str, ...] = ()
    """Components without weights that every rank uses."""
    component_classes: Mapping[str, str] = field(default_factory=dict)
    """Patterns of the classes of components that only this family has, or has of other classes."""
    pipeline_package: str | None = None
    """Package of `diffusers.pipelines` with classes of components that diffusers does not export;
    None: it exports all of them."""
    fp32_components: frozenset[str] = frozenset()
    """Components in float32, whatever the model's dtype is."""
    loras: bool = True
    """Whether diffusers' pipeline loads LoRAs."""
    loras_as_wan: bool = False
    """Whether diffusers converts LoRAs as those of Wan, and drops tensors without a place."""
    gguf: bool = False
    """Whether diffusers loads the denoiser from a GGUF file."""
    record_uses: Mapping[str, Literal["unused", "first step"] | int] = field(default_factory=dict)
    """Users of a record that are not all steps and the decode: none, as of images before they are
    encoded, or the first step alone; of several with one name, the number of the one in use."""
    initial_latent_source: str | None = None
    """Tensor of later packets that gives their steps the first latent. `latents`: they use parts
    which no step changes; None: only the first step uses it."""
    num_results_equal_latents: int = 0
    """Number of schedulers, by their first steps, whose results are part of the latent; these do
    not travel."""
    branches: Literal["calls", "batch"] | None = None
    """A guided step evaluates its two branches by two calls whose results are used after both, or
    by one call with a batch of two, which two ranks may round differently; None: otherwise."""
    batched_arguments: frozenset[str] = frozenset({"hidden_states", "encoder_hidden_states"})
    """Arguments of the denoiser whose first axis is the batch of the two branches."""
    shared_arguments: frozenset[str] = frozenset()
    """Arguments of the denoiser that both branches share, although an axis of theirs may be two."""
    latent_channels: Callable[[Any], int] = lambda pipe: int(pipe.transformer.config.in_channels)
    """Channels of the latent, from a loaded pipeline, as its `prepare_latents` counts them."""
    latent_frames: Callable[[Any, Any, int], int] = lambda _, __, frames: frames
    """Frames of the latent, from the pipeline, the sampling parameters, and the frames that the VAE
    makes of a clip's."""
    latent_dtype: Literal["fp32", "model", "stepped", "stepped from text"] = "fp32"
    """dtype of the latent: `fp32`; that of the denoiser (`model`); or float32 until the first step,
    from which on `FlowMatchEulerDiscreteScheduler` returns that of the denoiser (`stepped`), except
    for clips from an image (`stepped from text`)."""
    decodes_in_chunks: bool = False
    """Whether `decode_latents` decodes `decode_chunk_size` frames at a time, each on their own."""
    memory_options: bool = False
    """Whether the denoiser and the VAE take `memory_opt` and `channels_last`."""
    frame_limits: tuple[int, int, str] = (1, MAX_FRAMES, "all that svdpp makes")
    """Fewest and most frames of a clip, and the reason."""
    checkpoint_facts: Callable[[CheckpointConfigs], CheckpointFacts] = lambda _: {}
    """Returns what the configs of a checkpoint say; refuses what the spec does not cover."""
    check_sampling: Callable[[CheckedCheckpoint, Any], None] = lambda *_: None
    """Refuses sampling parameters (second) that diffusers cannot run with a checkpoint (first)."""
    renamed_arguments: Mapping[str, str] = field(default_factory=dict)
    """Sampling parameters by those arguments of `__call__` that have other names."""
    call_arguments: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    """Arguments of `__call__` that are not sampling parameters, from those that are."""
    generator_device: Callable[[CheckedCheckpoint, Any, str], str] = lambda *_: "cpu"
    """Device on which noise is drawn: the CPU where diffusers accepts it, for equal clips."""
    modular: ModularSpec | None = None
    """How the family's modular pipelines run; None: its pipelines are not modular."""
    resizes_early: bool = False
    """Whether an image is resized before the encode: see `models.engine.model`."""

    def __post_init__(self) -> None:
        assert issubclass(self.sampling, CommonSampling)

    @property
    def name(self) -> str:
        """Name of the family, by which users ask for it."""
        return str(self.sampling.family)

    @property
    def components(self) -> frozenset[str]:
        """Names of the components that a rank may need."""
        return self.required_components.union(IMAGE_ENCODERS, self.denoisers)

    @property
    def required_components(self) -> frozenset[str]:
        """Names of those of `components` that every checkpoint has."""
        encode_and_decode = (*self.encode_components, *self.decode_components)
        return frozenset((*encode_and_decode, self.denoisers[0], *self.shared_components))

    def pipeline(self, from_image: bool) -> str:
        """Return the name of the pipeline's class for a clip from an image or from text."""
        name = self.image_pipeline if from_image else self.text_pipeline
        assert name is not None
        return name
