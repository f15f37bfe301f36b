"""`FamilySpec`: the differences between the diffusers pipelines of the model families.

`docs/new-model.md` describes how to add a family. This module does not import torch, so that
`svdpp --help` is fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from svdpp.config.limits import MAX_FRAMES
from svdpp.config.sampling import CommonSampling
from svdpp.errors import ModelError

#: Facts that `FamilySpec.checkpoint_facts` reads from a checkpoint's configs. They become fields of
#: `models.checkpoint.Checkpoint`; the keys are the names of the fields.
CheckpointFacts = dict[str, Any]

#: Components that can take part in encoding an image. Most checkpoints have only some of them.
IMAGE_ENCODERS = ("vae", "image_encoder", "image_processor", "feature_extractor")
#: Value of `FamilySpec.encode_components` for families with two text encoders.
TWO_TEXT_ENCODERS = ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2")
#: Value of `FamilySpec.schedulers` for Wan and SkyReels-V2.
FLOW_SCHEDULERS = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")


class ConfigFile(Protocol):
    """Interface of a JSON file in a checkpoint; `models.files.JsonFile` implements it."""

    @property
    def values(self) -> Mapping[str, Any]:
        """Top-level values of a checkpoint's JSON file, by key."""

    def error(
        self, message: str, hint: str = "", *, details: Mapping[str, Any] | None = None
    ) -> ModelError:
        """Return a `ModelError` that names this JSON file of a checkpoint.

        Args:
            message: Sentence without the file's name.
            hint: Fix; empty if there is none.
            details: Values of the message by name; None: no values.
        """

    def positive_int(self, key: str, largest: int) -> int:
        """Return the integer at a key of a checkpoint's JSON file, which must be 1 to `largest`."""

    def require(self, key: str, expected: object, reason: str) -> None:
        """Raise a `ModelError` unless a key of a checkpoint's JSON file has the expected value.

        Args:
            key: Key of the config.
            expected: Value that the key must have.
            reason: Reason why svdpp needs this value, for the error message.
        """

    def refuse(self, key: str, reason: str) -> None:
        """Raise a `ModelError` if a checkpoint's JSON file sets a key that svdpp does not support.

        A key that is null, false, 0 or empty counts as not set.

        Args:
            key: Key of the config.
            reason: Effect of the key, such as "draws noise". The message is "the key KEY is not
                supported: it draws noise".
        """


class CheckpointConfigs(Protocol):
    """Interface of a checkpoint's configs; `models.checkpoint_configs.Configs` implements it."""

    @property
    def index(self) -> ConfigFile:
        """File `model_index.json` of the checkpoint, which lists the components."""

    @property
    def classes(self) -> Mapping[str, str]:
        """Class name of each component of the checkpoint, by component name."""

    def of(self, part: str, **defaults: Any) -> ConfigFile:
        """Return the config of a checkpoint's component, with `defaults` for missing keys."""


class CheckedCheckpoint(Protocol):
    """Interface of a checked checkpoint; `models.checkpoint.Checkpoint` implements it."""

    @property
    def scheduler_class(self) -> str | None:
        """Class name of the checkpoint's scheduler; None: the family's pipelines have none."""

    @property
    def scheduler_config(self) -> Mapping[str, Any]:
        """Values of the checkpoint's scheduler config, by key; empty without a scheduler."""

    @property
    def decode_draws_noise(self) -> bool:
        """Whether decoding a clip of this checkpoint draws random numbers."""

    @property
    def image_sizes(self) -> tuple[int, int] | None:
        """Sizes that clips from an image may have, as (target, unit) in pixels; None: any size.

        A square clip has sides of `target` pixels, and clips of other shapes have about the same
        area. Height and width are multiples of `unit`.
        """

    @property
    def vae_tile_side(self) -> int | None:
        """Side of the square tiles that the model's VAE decodes, in pixels; None: no tiles."""

    def timesteps(self, sampling: Any) -> Any:
        """Return the timesteps of a clip's denoising steps: a tensor of shape (steps,).

        Args:
            sampling: Resolved sampling parameters of the clip.
        """


def two_images(first: Any, last: Any, _: Any) -> dict[str, Any]:
    """Return a pipeline's arguments `image` and `last_image`, for a clip's first and last frame.

    See `FamilySpec.last_image_arguments`.
    """
    return {"image": first, "last_image": last}


@dataclass(frozen=True, kw_only=True)
class ModularSpec:
    """Part of a `FamilySpec`: facts that svdpp needs to run the family's modular pipeline.

    A modular pipeline of diffusers is a tree of blocks, which run in order and share a state.
    """

    blocks: tuple[str, ...]
    """Supported values of `_blocks_class_name` in a checkpoint's index: the class of the pipeline's
    tree of blocks. svdpp's tests cover only these classes, so checkpoints with another
    class are refused."""
    videos: str = "videos"
    """Name of the decoded video in the state after the last block."""
    has_batch: bool = True
    """Whether the decoded video and sound have a batch axis, which has length one."""
    audio: str | None = None
    """Name of the decoded sound in the state after the last block; None: the pipeline makes no
    sound."""
    guiders: Mapping[str, str] = field(default_factory=lambda: {"guider": "guidance_scale"})
    """Guiders of the pipeline. A key is a guider's name. Its value is the name of the sampling
    parameter that sets the guider's scale; if that parameter is None, `guidance_scale` sets the
    guider's scale."""
    guider_configs: Callable[[Any], Mapping[str, Mapping[str, Any]]] = lambda _: {}
    """Function that gets the sampling parameters and returns further arguments for the guiders'
    classes, such as `{"guider": {"stg_scale": 1.0}}`."""
    reference_class: str | None = None
    """Name of the class in which each reference image must be wrapped for the pipeline, such as
    `MiniMaxH3ImageReference`. The class is defined in the pipeline's package. None: the pipeline
    takes plain images."""
    rewritten: frozenset[str] = frozenset()
    """Names of values in the pipeline's state that packets between ranks need not contain, because
    each iteration of the denoising loop writes them before it reads them, and nothing reads them
    after a step. The engine finds most such values itself. This field lists only those that it
    cannot find: tensors in lists, and tensors that a block reads only because it reads all values
    of the state."""
    latent_divisor: Callable[[Any, int], int] = lambda *_: 1
    """Function that returns how many times smaller the latent's height and width are than those of
    the final latent. Its arguments are the sampling parameters and the number of finished steps."""


@dataclass(frozen=True, kw_only=True)
class FamilySpec:
    """Family of models: its pipelines in diffusers, and their differences from other families."""

    sampling: type[Any]
    """Class of the sampling parameters. Its field `family` has the family's name as default."""
    title: str
    """Name of the family for users, such as "Wan 2.1 and 2.2"."""
    example: str
    """Hub id of a published checkpoint of the family."""
    example_remark: str = ""
    """Remark that follows `example` in the list of models, such as "a denoiser, which must first be
    saved with the other components"; empty: no remark."""
    license: str
    """Name of the license of the example's weights."""
    denoiser: str
    """Name of the denoisers' class. Checkpoints with another class are refused: a class that is
    unknown to svdpp may keep state between steps, and packets between ranks would lack it."""
    text_pipeline: str | None = None
    """Name of the pipeline class for clips from text alone; None: there is none."""
    image_pipeline: str | None = None
    """Name of the pipeline class for clips from an image or a video; None: there is none."""
    image_argument: str = "image"
    """Name of the argument of the pipeline's `__call__` for the input image or the video's
    frames."""
    image_arguments: Callable[[Any, Any], Mapping[str, Any]] | None = None
    """Function that gets a clip's input and the sampling parameters, and returns arguments of the
    pipeline's `__call__`. The input is an image or the frames of a video. If the family takes
    further videos, the input is a dict of images and frames by name. None: the input is passed as
    `image_argument`, and each further video as the argument of its name."""
    last_image_arguments: Callable[[Any, Any, Any], Mapping[str, Any]] | None = None
    """Function that returns the arguments of the pipeline's `__call__` for a first and a last
    image. Its arguments are the first image, the last image and the sampling parameters. None: the
    pipeline takes no last image."""
    references_argument: str | None = None
    """Name of the argument of the pipeline's `__call__` for a list of references. The first
    reference is the input image. None: the input image is passed as `image_argument`, and clips
    have no references."""
    max_references: int = 0
    """Largest number of references of a clip, besides its input image."""
    aliases: tuple[str, ...] = ()
    """Names of further pipeline classes whose checkpoints this family can run. If a class is also
    the pipeline of another family, that other family is the default, and users choose this family
    by `family`."""
    text_aliases: tuple[str, ...] = ()
    """Names of the classes in `aliases` whose checkpoints make clips from text; checkpoints of the
    other classes in `aliases` need an image."""
    size_from_image: bool = False
    """Whether the pipeline computes the clip's size from the size of the image. If so, svdpp first
    resizes the image to the requested height and width."""
    text_and_image: bool = False
    """Whether every checkpoint can make clips from text and from an image, because the text
    pipeline and the image pipeline have the same components."""
    takes_prompt: bool = True
    cuts_prompts: bool = True
    """Whether the pipeline cuts prompts at `max_sequence_length` tokens."""
    schedulers: tuple[str, ...] = ("FlowMatchEulerDiscreteScheduler",)
    """Names of the supported scheduler classes: with these, svdpp's clips have been shown to be
    bitwise equal to diffusers'. Empty: the family's pipelines are modular and have no scheduler, so
    each iteration of their denoising loop is a step."""
    steps_use_generator: bool = False
    """Whether the pipeline passes the clip's generator to `scheduler.step`. If so, schedulers that
    draw noise in every step (`stochastic_sampling`) are allowed."""
    denoisers: tuple[str, ...] = ("transformer",)
    encode_components: tuple[str, ...] = ("tokenizer", "text_encoder")
    """Names of the components that every encode uses. An encode of an image also uses
    `IMAGE_ENCODERS`."""
    decode_components: tuple[str, ...] = ("vae",)
    shared_components: tuple[str, ...] = ()
    """Names of the components without weights that every rank loads."""
    component_classes: Mapping[str, str] = field(default_factory=dict)
    """Regular expressions that the class names of components must match, by component name. Common
    components have a default in `models.checkpoint_configs`; an entry replaces the default, or is
    for a component that has none."""
    pipeline_package: str | None = None
    """Subpackage of `diffusers.pipelines` with the component classes that cannot be imported from
    `diffusers` itself; None: all classes can be imported from `diffusers`."""
    needs_vae_tiling: bool = False
    """Whether the VAE decodes in tiles only: diffusers' own call fails without `enable_tiling`."""
    fp32_components: frozenset[str] = frozenset()
    """Names of the components that are loaded in float32, whatever the model's dtype is."""
    loras: bool = True
    """Whether the pipeline in diffusers can load LoRAs."""
    loras_as_wan: bool = False
    """Whether diffusers loads LoRAs with its code for Wan, which silently ignores tensors for
    layers that the denoiser lacks."""
    gguf: bool = False
    """Whether diffusers can load the denoiser from a GGUF file."""
    record_uses: Mapping[str, Literal["unused", "first step", "recomputed"] | int] = field(
        default_factory=dict
    )
    """Parts of a run that use the results of a pipeline method, by the method's name. The rank that
    encodes a clip calls the method and records its results. Packets carry the recorded results to
    later ranks, where calls of the method return these results (`models.engine.records`). Results
    that no later rank uses are not sent. `unused`: no step and no decode uses the results, so later
    ranks get placeholders of the same shapes. `first step`: only the first step uses the results.
    `recomputed`: nothing is recorded, and every rank calls the method itself, because its result
    is large but cheap. A number n: the pipeline calls the method several times, and only the result
    of call n (from 0) is used. A method that is not listed counts as `unused` if it only
    preprocesses images; the results of any other method may be used by all steps and the decode."""
    initial_latent_source: str | None = None
    """Name of the tensor in a packet that serves as the initial latent on later ranks, in place of
    the result of `prepare_latents`. `latents`: the current latent. This works if steps after the
    first read only parts of the initial latent that no step changes, such as the latent of the
    input image. Another name: a copy of the initial latent, which packets contain under this name.
    None: only the first step uses the initial latent, so packets after this step lack it."""
    num_results_equal_latents: int = 0
    """Number n of schedulers whose `step` returns exactly the latent that the packet contains, so
    that packets need not contain the result of `step` as well. These are the first n schedulers of
    the pipeline, in the order of their first `step`."""
    branches: Literal["calls", "batch", "replay"] | None = None
    """How two ranks can share a step with classifier-free guidance, which evaluates the denoiser
    for two branches. `calls`: each branch is a call of the denoiser, and no result is used before
    both calls are done, so each rank does one call. `batch`: both branches are one call with a
    batch of two, so each rank does half of the batch; the halves may be rounded differently than
    the whole batch. `replay`, for modular pipelines: the denoiser calls of a block in the denoising
    loop do not depend on each other's results, so the ranks can divide any number of calls. None:
    two ranks cannot share a step."""
    batched_arguments: frozenset[str] = frozenset({"hidden_states", "encoder_hidden_states"})
    """Names of the denoiser's arguments whose first axis is the batch of the two guidance
    branches."""
    shared_arguments: frozenset[str] = frozenset()
    """Names of the denoiser's arguments that have no batch axis, although their first axis can have
    length two; both guidance branches get them whole."""
    latent_channels: Callable[[Any], int] = lambda pipe: int(pipe.transformer.config.in_channels)
    """Function that returns the number of channels of the latent for a loaded pipeline, as the
    pipeline's `prepare_latents` computes it."""
    latent_frames: Callable[[Any, Any, int], int] = lambda _, __, frames: frames
    """Function that returns the number of frames of the latent. Its arguments are the loaded
    pipeline, the sampling parameters, and the number of latent frames to which the VAE compresses
    the clip."""
    first_frames: Callable[[Any], int] = lambda _: 0
    """Function that gets the sampling parameters and returns how many more frames the latent has
    before the first step than after it. The additional frames are images, which no step changes.
    -1: the latent first has one frame fewer, because the pipeline appends an image after the
    encode."""
    appended_positions: Callable[[Any, Any], int] = lambda *_: 0
    """Function that returns the number of positions (axis N) that a latent has in addition to those
    of its frames, such as the positions of a reference. Its arguments are the loaded pipeline and
    the sampling parameters."""
    latent_dtype: (
        Literal["fp32", "model", "stepped", "stepped from text"]
        | Callable[[Any, int], Literal["fp32", "model"]]
    ) = "fp32"
    """dtype of the latent. `fp32`: float32. `model`: the denoiser's dtype. `stepped`: float32
    before the first step, and after it the denoiser's dtype if the scheduler is
    `FlowMatchEulerDiscreteScheduler`, else float32. `stepped from text`: as `stepped` for clips
    from text, and float32 for clips from an image. A function returns `fp32` or `model`, given the
    sampling parameters and the number of finished steps."""
    audio_rate: Callable[[Any], int] = lambda pipe: int(pipe.vocoder.config.output_sampling_rate)
    """Function that returns the samples per second of the sound, given a loaded pipeline that makes
    sound."""
    decodes_in_chunks: bool = False
    """Whether the pipeline's `decode_latents` decodes independent chunks of `decode_chunk_size`
    frames."""
    decodes_in_tiles: bool = False
    """Whether the decode is a single call of the VAE. If so, and with `vae_tiling`, several ranks
    can each decode some tiles of a clip."""
    memory_options: bool = False
    """Whether the options `memory_opt` and `channels_last` of `ModelConfig` can be used."""
    frame_limits: tuple[int, int, str] = (1, MAX_FRAMES, "the limits of svdpp")
    """Smallest and largest number of frames of a clip, and the reason for these limits, which the
    error message names."""
    checkpoint_facts: Callable[[CheckpointConfigs], CheckpointFacts] = lambda _: {}
    """Function that returns values for fields of `Checkpoint`, which it reads from a checkpoint's
    configs. It raises `ModelError` for configs that svdpp does not support in this family."""
    check_sampling: Callable[[CheckedCheckpoint, Any], None] = lambda *_: None
    """Function that raises `RequestError` if diffusers cannot run a checkpoint (first argument)
    with the given sampling parameters (second argument)."""
    renamed_arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the pipeline's `__call__` whose names differ from the sampling parameters', each
    with the parameter that sets it. `{"frame_rate": "fps"}`: the argument `frame_rate` gets
    `fps`."""
    call_arguments: Callable[[Any], Mapping[str, Any]] = lambda _: {}
    """Function that returns further arguments of the pipeline's `__call__`, given the sampling
    parameters. A further argument replaces another argument of the same name."""
    generator_device: Callable[[CheckedCheckpoint, Any, str], str] = lambda *_: "cpu"
    """Function that returns the device of the clip's random generator, given the checkpoint, the
    sampling parameters and the pipeline's device. The CPU is used wherever diffusers allows this,
    so that the noise does not depend on the kind of GPU."""
    modular: ModularSpec | None = None
    """Facts about the family's modular pipelines; None: the pipelines are not modular."""
    resizes_early: bool = False
    """Whether svdpp's own code resizes the input image for the encoders, in place of the pipeline.
    `EngineModel.prepare` can then do this ahead of the encode, in another thread."""

    def __post_init__(self) -> None:
        assert issubclass(self.sampling, CommonSampling)

    @property
    def name(self) -> str:
        """Name of the family, as in the option `--family`."""
        return str(self.sampling.family)

    @property
    def pairs_are_exact(self) -> bool:
        """Whether pairs of ranks, which share each step, compute the same bits as single ranks.

        The bits are the same if a pair divides whole calls of the denoiser. If a pair divides the
        batch of one call, the results may be rounded differently.
        """
        return self.branches in ("calls", "replay")

    @property
    def components(self) -> frozenset[str]:
        """Names of all components of the family's pipelines that any of the ranks may load."""
        return self.required_components.union(IMAGE_ENCODERS, self.denoisers, self.own_guiders)

    @property
    def own_guiders(self) -> frozenset[str]:
        """Names of the guiders that a modular checkpoint may configure.

        For every other guider of the pipeline, svdpp supports only the default that diffusers
        creates if a checkpoint does not configure the guider.
        """
        guiders = {} if self.modular is None else self.modular.guiders
        return frozenset(name for name in guiders if name in self.component_classes)

    @property
    def required_components(self) -> frozenset[str]:
        """Names of the components that every checkpoint of the family must have."""
        encode_and_decode = (*self.encode_components, *self.decode_components)
        return frozenset((*encode_and_decode, self.denoisers[0], *self.shared_components))

    def pipeline(self, from_image: bool) -> str:
        """Return the name of the family's pipeline class for clips from an image, or from text."""
        name = self.image_pipeline if from_image else self.text_pipeline
        assert name is not None
        return name
