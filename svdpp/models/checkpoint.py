"""Checkpoints in diffusers' format: search, downloads, checks, and the facts that ranks need.

A checkpoint is untrusted: sizes in the configs are limited, checkpoints with code are refused, and
every error is a `ModelError` that names the file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from svdpp.config import (
    DEFAULT_MODEL,
    DEMO_MODELS,
    ClipRequest,
    Lora,
    ModelConfig,
    SamplingConfig,
)
from svdpp.config.families.registry import (
    FAMILY_SPECS,
    check_references,
    check_takes_last_image,
)
from svdpp.config.families.spec import IMAGE_ENCODERS, CheckpointFacts, FamilySpec
from svdpp.config.limits import require
from svdpp.config.sampling import PromptedSampling, check_sides, extra_params
from svdpp.errors import ModelError, RequestError, redact_tokens
from svdpp.models.checkpoint_configs import Configs, read_index
from svdpp.models.files import (
    MODEL_HINT,
    QUANTISED_HINT,
    ComponentFolder,
    display_name,
    fingerprint,
    has_weights,
    library_errors,
    read_dtypes,
    variant_of,
    weight_files,
)
from svdpp.models.gguf_files import DenoiserFile, check_denoisers, find_denoisers
from svdpp.models.hashes import hash_files
from svdpp.models.hub import download_configs, snapshot_commit
from svdpp.models.image_sizes import check_image_size
from svdpp.models.lora_files import LoraFile, check_loras, find_lora
from svdpp.models.repositories import (
    component_revisions,
    download_missing_weights,
)
from svdpp.models.torchao_files import check_int8_weights, check_torchao
from svdpp.plan.roles import Roles

#: Folder of the files that svdpp includes, such as the demo models.
_ASSETS = Path(__file__).resolve().parents[1] / "assets"
#: Dtypes that safetensors files use for quantised weights, which cannot be used without scales.
_QUANTISED = {"I8", "U8", "F8_E4M3", "F8_E5M2"}
#: Suffixes of single-file models. svdpp does not read models in this format.
_SINGLE_FILES = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin", ".sft")
#: Classes of VAEs for which diffusers does not implement `enable_tiling`. The only one is SVD's.
_UNTILED_VAES = frozenset({"AutoencoderKLTemporalDecoder"})

#: Rule for an input such as an image or a prompt: a clip needs, may have, or must not have the
#: input.
InputUse = Literal["needed", "optional", "refused"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoint in diffusers' format, of a supported family, with checked configs."""

    name: str
    """Name of the model as the user typed it."""
    folder: Path
    """Folder with `model_index.json` or `modular_model_index.json`; for a hub model, the snapshot
    folder in the hub's cache."""
    component_folders: tuple[ComponentFolder, ...] = ()
    """Folders of those components whose files are not simply in `folder/NAME`: components in
    another place, such as another repository, and components for which a modular pipeline's index
    names a variant, such as fp16. All other components are in `folder/NAME`."""
    revision: str | None
    """Commit hash of a hub model; None for a local folder."""
    fingerprint: str | None = None
    """SHA-256 of the weight files' headers and of some bytes of each tensor, in hex. None until
    `with_weights` is called. Always None for hub models, which `revision` identifies, and for demo
    models, whose weights never change."""
    variant: str | None
    """Variant of the weight files, such as fp16; None: the plain files."""
    loras: tuple[LoraFile, ...] = ()
    """LoRA files for all clips of the model; empty until `with_weights` has found them."""
    clip_loras: Mapping[Lora, LoraFile] = field(default_factory=dict, hash=False)
    """LoRA files that single clips may use (`ModelConfig.clip_loras`), by requested LoRA. The keys
    ignore the weight that a clip gives its LoRA: all of them have the weight 1. Empty until
    `with_weights` has found the files."""
    denoisers: tuple[DenoiserFile, ...] = ()
    """GGUF files that replace denoisers of the checkpoint; empty until `with_weights` has found
    them."""
    int8_denoisers: tuple[str, ...] = ()
    """Names of the denoisers whose weights TorchAO has quantised to int8."""
    family: str
    """Name of the model's family, such as `wan`."""
    classes: tuple[tuple[str, str], ...]
    """(Component name, class name) pairs of all components except the scheduler."""
    scheduler_class: str | None
    """Class name of the scheduler; None: the family's pipelines have no scheduler."""
    scheduler_config: Mapping[str, Any] = field(hash=False)
    """Values of the scheduler's config; empty if there is no scheduler."""
    size_multiple: tuple[int, int]
    """Numbers of pixels of which a frame's height (first number) and width (second number) must be
    multiples."""
    model_frames: int = 1
    """Default number of frames of a clip."""
    frames: tuple[int, int, str]
    """Smallest and largest number of frames of a clip, and the reason for these limits, which error
    messages quote."""
    image_sizes: tuple[int, int] | None = None
    """Limits for the size of a clip that is made from an image, in pixels: the side of a square
    clip (clips of other shapes must have about the same area), and a number of which height and
    width must be multiples. `check_image_size` takes the two numbers as `target` and `unit`. None:
    the model makes clips of any size."""
    image_use: InputUse
    """Rule for the input image (or video, for video-to-video families): a clip needs, may have, or
    must not have an image."""
    last_image_use: InputUse
    """Rule for the last image, with which the clip ends: a clip from an image needs, may have, or
    must not have a last image."""
    last_image_reason: str = ""
    """Reason why this checkpoint takes no last image, although other checkpoints of the family do;
    empty if there is no such reason."""
    unused_parameters: tuple[str, ...] = ()
    """Names of the family's sampling parameters that have no effect on this model."""
    boundary_ratio: float | None = None
    """Boundary between the model's two experts, as a fraction of the number of training timesteps.
    Steps with a timestep below the boundary run on `transformer_2`, the low-noise expert. None: the
    model has only one denoiser."""
    decode_draws_noise: bool = False
    """Whether decoding a clip draws random numbers."""
    vae_tile_side: int | None = None
    """Side of the square tiles that the VAE decodes, in pixels; None: it decodes whole frames."""
    has_image_projection: bool = False
    """Whether the denoiser has layers for an image embedding, as in Wan 2.1 image-to-video."""

    @property
    def label(self) -> str:
        """Name of the checkpoint's model in messages."""
        return f"model {display_name(self.name)}"

    @property
    def spec(self) -> FamilySpec:
        """`FamilySpec` of the checkpoint's family."""
        return FAMILY_SPECS[self.family]

    @property
    def remarks(self) -> list[str]:
        """Sentences for the user, one for each LoRA file with tensors that the model ignores."""
        files = (*self.loras, *self.clip_loras.values())
        return [file.remark for file in files if file.remark]

    @property
    def prompt_use(self) -> InputUse:
        """Rule for prompts: a clip needs a prompt, or must not have a prompt."""
        return "needed" if self.spec.takes_prompt else "refused"

    @property
    def num_experts(self) -> int:
        """Number of denoisers that share the steps, such as 2 for Wan 2.2 A14B; usually 1."""
        return 1 if self.boundary_ratio is None else 2

    @property
    def weighted_components(self) -> tuple[str, ...]:
        """Names of the checkpoint's components that have weights."""
        return tuple(part for part, _ in self.classes if has_weights(part))

    @property
    def external_components(self) -> dict[str, str]:
        """Repository and commit of each component that comes from another repository.

        The keys are component names, and the values are texts such as `OWNER/NAME@COMMIT`.
        Components in the checkpoint's own folder or repository are left out.
        """
        return {
            each.part: f"{each.repository}@{snapshot_commit(each.root)}"
            for each in self.component_folders
            if each.repository is not None
        }

    def component_folder(self, part: str) -> ComponentFolder:
        """Return the folder with the files of one component.

        The folder is in the checkpoint's own folder, or in the snapshot of another repository.

        Args:
            part: Name of the component.
        """
        usual = ComponentFolder(part, self.folder, part)
        return next((each for each in self.component_folders if each.part == part), usual)

    def denoiser_file(self, part: str) -> DenoiserFile | None:
        """Return the GGUF file that replaces a component's weights; None if there is no such file.

        Args:
            part: Name of the component.
        """
        return next((file for file in self.denoisers if file.part == part), None)

    def components_of(self, roles: Roles, sampling: SamplingConfig) -> frozenset[str]:
        """Return the names of all components that a rank loads for its roles, such as encode."""
        spec = self.spec
        needed = {*spec.shared_components, *spec.own_guiders}
        if roles.encode:
            needed |= {*spec.encode_components, *(IMAGE_ENCODERS if sampling.from_image else ())}
        if roles.decode:
            needed.update(spec.decode_components)
        if roles.denoise:
            needed |= {name for place, name in enumerate(spec.denoisers) if place in roles.experts}
        return frozenset(part for part, _ in self.classes if part in needed)

    def weighted_components_of(self, roles: Roles, sampling: SamplingConfig) -> frozenset[str]:
        """Return the names of the components with weights that a rank loads for its roles."""
        return frozenset(filter(has_weights, self.components_of(roles, sampling)))

    def check_request(self, sampling: SamplingConfig, request: ClipRequest) -> None:
        """Check that a clip has all inputs that the model needs, and no input that it would ignore.

        Args:
            sampling: Resolved sampling parameters of the clip.
            request: Request of the clip.

        Raises:
            RequestError: The model needs an image, video or prompt that the request lacks, or would
                ignore one that the request has. Or the request and `sampling` disagree on whether
                the clip has such an input.
        """
        visual, image = "a video" if sampling.from_video else "an image", request.image is not None
        for what, is_given, use, hint in (
            (visual, image, self.image_use, f"name {visual}"),
            ("a prompt", request.prompt is not None, self.prompt_use, 'give `prompt` "..."'),
        ):
            if use == "needed" and not is_given:
                raise RequestError(f"{self.label} needs {what}", hint, details={"needs": what})
            if use == "refused" and is_given:
                raise RequestError(f"{self.label} takes no {what.split()[-1]}", "leave it out")
        if self.prompt_use == "needed" and not (request.prompt or "").strip():
            raise RequestError("`prompt` is empty", 'describe the clip, as in `prompt` "a wave"')
        if request.negative_prompt is not None and not (request.prompt and sampling.uses_guidance):
            raise RequestError(
                "`negative_prompt` has no effect without a prompt and guidance",
                "leave `negative_prompt` out, or use a `guidance_scale` above 1",
            )
        sampling.check_videos(request.videos)
        if isinstance(sampling, PromptedSampling) and image != sampling.from_image:
            raise RequestError(
                f"the clip has {'an' if image else 'no'} image, but its sampling parameters "
                f"have from_image={sampling.from_image}",
                f"set from_image={image}",
            )
        has_last = request.last_image is not None
        if has_last != sampling.has_last_image:
            raise RequestError(
                f"the clip has {'a' if has_last else 'no'} `last_image`, but its sampling "
                f"parameters have has_last_image={sampling.has_last_image}",
                f"set has_last_image={has_last}",
            )
        count = len(request.references)
        if count != sampling.num_references:
            raise RequestError(
                f"the clip has {count} `references`, but its sampling parameters have "
                f"num_references={sampling.num_references}",
                f"set num_references={count}",
                details={"count": count, "num_references": sampling.num_references},
            )

    def resolve_sampling(self, sampling: SamplingConfig) -> SamplingConfig:
        """Check sampling parameters against the model; return them with defaults in place of None.

        Raises:
            RequestError: The parameters are for another family, or out of the range of this model.
        """
        if sampling.family != self.family:
            raise RequestError(
                f"{self.label} is of the family {self.family}, not {sampling.family}",
                details={"family": self.family, "requested_family": sampling.family},
            )
        sampling = sampling.with_model_defaults(model_frames=self.model_frames)
        check_sides(sampling, self.size_multiple)
        kind: Any = type(sampling)
        for name in extra_params(kind).keys() & {*self.unused_parameters}:
            is_default = getattr(sampling, name) == getattr(kind, name)
            require(is_default, f"`{name}` has no effect on {self.label}", field=name)
        fewest, most, why = self.frames
        limits = str(most) if fewest == most else f"{fewest} to {most}"
        require(
            fewest <= sampling.frames <= most,
            f"`num_frames` must be {limits}, {why}, got {sampling.frames}",
            frames=sampling.frames,
            lowest=fewest,
            highest=most,
            reason=why,
        )
        self._check_last_image(sampling)
        check_references(self.family, sampling.num_references)
        if self.image_sizes is not None and sampling.from_image:
            check_image_size(*self.image_sizes, sampling.height, sampling.width)
        self.spec.check_sampling(self, sampling)
        return sampling

    def _check_last_image(self, sampling: SamplingConfig) -> None:
        if self.last_image_use == "needed" and not sampling.has_last_image:
            hint = "the model makes clips between a first and a last image: give `last_image`, too"
            wrong = f"{self.label} needs a `last_image`"
            raise RequestError(wrong, hint, details={"needs": "a last image"})
        if self.last_image_use == "refused" and sampling.has_last_image:
            check_takes_last_image(self.family)
            reason = self.last_image_reason or "the model makes clips from text alone"
            wrong = f"{self.label} takes no `last_image`: {reason}"
            raise RequestError(wrong, "leave `last_image` out", details={"reason": reason})

    def weight_files(self, part: str) -> Mapping[Path, list[str]]:
        """Return the weight files of a component: each file's path, with the dtypes of its tensors.

        Raises:
            ModelError: A file is missing or damaged, or the weights are quantised.
        """
        component, files = self.component_folder(part), {}
        for path in weight_files(component, self.variant):
            try:
                files[path] = read_dtypes(path)
            except ModelError as error:
                if component.repository is None:
                    raise
                message = f"{part} of the repository {component.repository}: {error.message}"
                hint = error.hint or component.hint(path.name)
                raise ModelError(message, hint, details=error.details) from error
        quantised = sorted(_QUANTISED.intersection(chain(*files.values())))
        if quantised and part not in self.int8_denoisers:
            raise ModelError(
                f"{part} has quantised weights of the dtype {quantised[0]}",
                QUANTISED_HINT,
                details={"component": part, "dtype": quantised[0]},
            )
        return files

    def file_hashes(self, parts: Iterable[str] | None = None) -> dict[str, str]:
        """Return the SHA-256 of each weight file, in hex, by name of component and file.

        A name is, for example, `vae/model.safetensors`. The name of a GGUF file begins with the
        component that it replaces. The first call reads the files completely, which takes about a
        second for each GB. Later calls, also in other processes, read only files that have changed.

        Args:
            parts: Names of the components whose files are hashed; None: all components.

        Raises:
            ModelError: A file is missing or cannot be read.
        """
        parts = {*(self.weighted_components if parts is None else parts)}
        added = {file.part: file.path for file in self.denoisers if file.part in parts}
        files = self._named_weight_files(parts - added.keys())
        names = {path: name for name, path in sorted(files.items())}
        names |= {path: f"{part}/{path.name}" for part, path in sorted(added.items())}
        try:
            hashes = hash_files(names)
        except OSError as error:
            problem = error.strerror
            raise ModelError(f"{self.label}: a weight file cannot be read ({problem})") from error
        return {name: hashes[path] for path, name in names.items()}

    def _named_weight_files(self, parts: Iterable[str]) -> dict[str, Path]:
        """Return the weight files of components, by name such as `vae/model.safetensors`."""
        return {f"{part}/{path.name}": path for part in parts for path in self.weight_files(part)}

    def own_weight_files(self, parts: Iterable[str]) -> dict[str, Path]:
        """Return the weight files of those components that are in the checkpoint's own folder.

        Components that come from another repository are left out.

        Args:
            parts: Names of components with weights.

        Returns:
            Paths by name of component and file, such as `vae/model.safetensors`.

        Raises:
            ModelError: A file is missing or damaged, or the weights are quantised.
        """
        elsewhere = self.external_components.keys()
        return self._named_weight_files(part for part in parts if part not in elsewhere)

    def variant_of(self, part: str) -> str | None:
        """Return the variant of a component's weight files, such as fp16; None: the plain files."""
        return variant_of(self.component_folder(part), self.variant)

    def build_scheduler(self, sampling: SamplingConfig | None) -> Any:
        """Return a new scheduler with the checkpoint's config; None if the checkpoint has none.

        Args:
            sampling: Sampling parameters, whose `flow_shift` replaces the value in the config.
                None: the config is used unchanged.

        Raises:
            ModelError: The scheduler's class rejects the config.
        """
        import diffusers  # not at the top of the module, because this import takes seconds

        if self.scheduler_class is None:
            return None
        name, values = self.scheduler_class, dict(self.scheduler_config)
        if (shift := getattr(sampling, "flow_shift", None)) is not None:
            values["flow_shift" if "flow_shift" in values or "UniPC" in name else "shift"] = shift
        with library_errors("scheduler", self):
            return getattr(diffusers, name).from_config(values)

    def timesteps(self, sampling: SamplingConfig) -> Any:
        """Return the timesteps of a clip's denoising steps: a tensor of shape (steps,) on the CPU.

        Args:
            sampling: Resolved sampling parameters.

        Raises:
            ModelError: The scheduler does not support this number of steps.
        """
        scheduler = self.build_scheduler(sampling)
        with library_errors("scheduler", self):
            steps = sampling.num_inference_steps
            every = self.spec.call_arguments(sampling).get("num_inference_steps", steps)
            scheduler.set_timesteps(every, device="cpu")
        return scheduler.timesteps[-steps:]

    def expert_boundary(self, sampling: SamplingConfig) -> int | None:
        """Return the number of steps of the high-noise expert; None if the model has one denoiser.

        As in `WanPipeline.__call__`, the high-noise expert runs the steps whose timestep is at
        least `boundary_ratio` times the number of training timesteps.

        Args:
            sampling: Resolved sampling parameters.

        Raises:
            ModelError: The scheduler does not support this number of steps.
        """
        if self.boundary_ratio is None:
            return None
        boundary = self.boundary_ratio * self.scheduler_config.get("num_train_timesteps", 1000)
        return int((self.timesteps(sampling) >= boundary).sum())


def find_checkpoint(model: ModelConfig, *, weights: bool = True) -> Checkpoint:
    """Find the checkpoint of `model`, download missing files of a hub model, and check all files.

    Args:
        model: Model, named by a folder, a hub id, or the name of a demo model.
        weights: Whether weights are downloaded and the headers of weight files are checked. False:
            only configs are downloaded and checked.

    Raises:
        ModelError: The checkpoint is missing, incomplete or damaged, or svdpp cannot run it.
        RequestError: The options contradict the checkpoint.
    """
    with _located(model) as local:
        if local is not None and model.revision is not None:
            raise RequestError(
                f"`revision` is for hub models; {display_name(model.name)} is a folder"
            )
        if (model.name, model.revision) == (DEFAULT_MODEL, None):
            # svdpp includes a copy of the default model's configs, so reading them needs no
            # network.
            local = local or _ASSETS / "svd-xt"
        folder = local or download_configs(model)
        checkpoint = _check_configs(model, folder, is_local=local is not None)
    if not weights:
        return checkpoint
    return with_weights(checkpoint, model, checkpoint.weighted_components)


def with_weights(
    checkpoint: Checkpoint, model: ModelConfig, components: Collection[str]
) -> Checkpoint:
    """Return `checkpoint` after downloading and checking the weights of `components`.

    For a local folder, all weights in the folder are checked, even those of components that are not
    in `components`, because the fingerprint covers all of them. The fingerprint does not cover
    components in other repositories, which their commits identify, so only those in `components`
    are downloaded and checked. A denoiser that a GGUF file replaces is not downloaded or checked.

    Args:
        checkpoint: Checkpoint that was found without weights.
        model: Model of the checkpoint.
        components: Names of components with weights.

    Raises:
        ModelError: Weights or LoRAs are missing, damaged, quantised, or do not fit the model.
        RequestError: The model cannot load the requested LoRAs, or its quantised layers compute in
            another dtype than requested.
    """
    check_loras(model.clip_loras, checkpoint)
    clip_loras = dict.fromkeys(each.source for each in model.clip_loras)
    files = {
        lora: find_lora(lora, local_files_only=model.local_files_only, checkpoint=checkpoint)
        for lora in (*model.loras, *clip_loras)
    }
    denoisers = find_denoisers(model)
    replaced = {file.part for file in denoisers}
    components = [part for part in components if part not in replaced]
    with _located(model) as local:
        # The weights must come from the same commits as the configs, even if the repositories on
        # the hub have changed since.
        commits = component_revisions(checkpoint.external_components)
        model = replace(model, component_revisions=commits)
        if local is None:
            model = replace(model, revision=checkpoint.revision or model.revision)
            # `find_checkpoint` may have read the configs from svdpp's own copy (the default model).
            # So the configs that are in the repository beside the weights still need a check.
            checkpoint = _check_configs(model, download_configs(model), is_local=False)
        elsewhere = checkpoint.external_components.keys()
        absent = [part for part in components if local is None or part in elsewhere]
        download_missing_weights(model, map(checkpoint.component_folder, absent))
        if local is not None:
            every = {*checkpoint.weighted_components} - {*elsewhere} - replaced
            components = [*absent, *sorted(every)]
        for part in components:
            files_of_part = checkpoint.weight_files(part)  # the call also checks the files
            if part in checkpoint.int8_denoisers:
                check_int8_weights(part, files_of_part, model.dtype)
        may_change = local is not None and model.name not in DEMO_MODELS
        own = checkpoint.own_weight_files(components) if may_change else {}
        return replace(
            checkpoint,
            loras=tuple(files[lora] for lora in model.loras),
            clip_loras={lora: files[lora] for lora in clip_loras},
            denoisers=denoisers,
            fingerprint=fingerprint(own) if may_change else None,
        )


# --- search for a checkpoint's folder -------------------------------------------------------------


@contextmanager
def _located(model: ModelConfig) -> Iterator[Path | None]:
    """Yield a model's local folder (None for a hub id).

    Any `ModelError` of the `with` block is raised again with the model's name and a hint.
    """
    local = _local_folder(model.name)
    try:
        yield local
    except ModelError as error:
        hint = "copy or download the folder again, or use `model` demo"
        if local is None:
            # The hint's command downloads only the damaged file, because a whole model can be up to
            # 126 GB.
            file = str(error.details.get("file", ""))
            one = f" {shlex.quote(file)}" if file else ""
            hint = f"hf download {shlex.quote(redact_tokens(model.name))}{one} --force-download"
        message = f"model {display_name(model.name)}: {error.message}"
        raise ModelError(message, error.hint or hint, details=error.details) from error


def _local_folder(name: str) -> Path | None:
    """Return the local folder of the model `name`; None if the name can only be a hub id.

    Raises:
        ModelError: The name is that of a single file, or of a folder that does not exist.
    """
    if name in DEMO_MODELS:
        return _ASSETS / DEMO_MODELS[name].folder
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return Path(path).resolve()
    if path.endswith(_SINGLE_FILES):
        raise ModelError(
            f"{display_name(name)} is a single file, but svdpp reads only folders and hub models",
            "use `denoisers` FILE.gguf, with `model` for the checkpoint that the file was made from"
            if path.endswith(".gguf")
            else "in diffusers, call PIPELINE.from_single_file(FILE).save_pretrained(FOLDER), then "
            "use `model` FOLDER",
        )
    is_path = os.path.exists(path) or name.startswith((".", "~", "/")) or "\\" in name
    if is_path or name.count("/") > 1:
        raise ModelError(f"there is no folder {display_name(name)}", MODEL_HINT)
    return None


# --- checks of the configs ------------------------------------------------------------------------


def _check_configs(model: ModelConfig, folder: Path, *, is_local: bool) -> Checkpoint:
    """Read and check the configs of a checkpoint, and return the checkpoint without weights.

    Args:
        model: Model of the checkpoint.
        folder: Folder of the checkpoint.
        is_local: Whether the model is a local folder, and not a hub model.
    """
    index, family = read_index(folder, model.family)
    spec = FAMILY_SPECS[family]
    unit = spec.sampling.side_unit
    configs = Configs(index, spec, folder, model, is_local=is_local)
    image_pipelines = {spec.image_pipeline, *spec.aliases} - {*spec.text_aliases}
    from_image = index.values["_class_name"] in image_pipelines
    facts: CheckpointFacts = {
        "image_use": "optional" if spec.text_and_image else "needed" if from_image else "refused",
        "last_image_use": "refused" if spec.last_image_arguments is None else "optional",
        "size_multiple": (unit, unit),
        "frames": spec.frame_limits,
        **spec.checkpoint_facts(configs),
    }
    facts["size_multiple"] = configs.whole_latents(
        facts["size_multiple"], spec.sampling.frames_unit
    )
    if facts["image_use"] == "refused":
        facts["last_image_use"] = "refused"
    checkpoint = Checkpoint(
        name=model.name,
        folder=folder,
        component_folders=configs.folders,
        revision=None if is_local else snapshot_commit(folder),
        variant=model.variant,
        family=family,
        classes=tuple(configs.classes.items()),
        scheduler_class=configs.scheduler_class,
        scheduler_config=configs.scheduler_config,
        int8_denoisers=configs.int8_denoisers,
        **facts,
    )
    check_torchao(checkpoint.label, checkpoint.int8_denoisers)
    check_loras(model.loras, checkpoint)
    check_denoisers(model, checkpoint)
    vae = configs.classes.get("vae")
    if model.vae_tiling and vae in _UNTILED_VAES:
        raise RequestError(
            f"`vae_tiling` is not for {checkpoint.label}: diffusers has no tiling for {vae}",
            "leave `vae_tiling` out; a smaller `decode_chunk_size` lowers the memory of a decode",
            details={"family": family, "vae": vae},
        )
    return checkpoint
