"""Finding a checkpoint, and what the engine asks of it; knows no torch.

A checkpoint is untrusted. The values of its configs are checked against limits, and every error is
a `ModelError` that names the file.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from svdpp.config import (
    DEFAULT_MODEL,
    DEMO_MODEL,
    DUMMY_MODEL,
    SAMPLING_CLASSES,
    ClipRequest,
    ModelConfig,
    SamplingConfig,
)
from svdpp.config.limits import require
from svdpp.config.sampling import PromptedSampling, check_sides, own_params
from svdpp.errors import ModelError, RequestError, redact_tokens
from svdpp.models.engine.configs import (
    Configs,
    JsonFile,
    SchedulerConfig,
    has_weights,
    library_errors,
    read_json,
    short_repr,
)
from svdpp.models.engine.rows import FAMILIES, IMAGE_ENCODERS, REFUSED, ROWS, Row
from svdpp.models.files import (
    MODEL_HINT,
    Header,
    LoraFile,
    check_loras,
    commit_of,
    download,
    find_lora,
    fingerprint,
    read_safetensors_header,
    show_name,
    weight_files,
)
from svdpp.plan.layout import Roles

#: What a model does with an input of a clip.
Use = Literal["needed", "optional", "refused"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checked folder in diffusers' format, of a family that has a row."""

    name: str
    """As the user typed it."""
    folder: Path
    revision: str | None
    """Commit hash of a hub model; None for a folder."""
    fingerprint: str | None = None
    """Of the weights in a user's folder, which may change; None for hub models and the demo."""
    variant: str | None
    loras: tuple[LoraFile, ...] = ()
    """Those of the model, if it was found with its weights."""
    family: str
    """As in its sampling parameters."""
    classes: tuple[tuple[str, str], ...]
    """Each component and its class; the scheduler is not among them."""
    scheduler: SchedulerConfig
    size_multiple: tuple[int, int]
    """Height and width of a frame are multiples of these."""
    model_frames: int = 1
    """Frames of a clip whose request does not say how many."""
    fixed_frames: int | None = None
    """The only number of frames that the model makes; None: any."""
    image_sizes: tuple[int, int] | None = None
    """Of clips from an image: the side of a square one, and the unit of sides; None: any."""
    image_use: Use
    unused_parameters: tuple[str, ...] = ()
    """Sampling parameters of the family that have no effect on this model."""
    boundary_ratio: float | None = None
    """Share of the training timesteps below which `transformer_2` runs; None for one expert."""
    decode_draws: bool = False
    """Whether the decode draws noise."""

    @property
    def label(self) -> str:
        """The model's name in messages."""
        return f"model {show_name(self.name)}"

    @property
    def row(self) -> Row:
        """Of the family."""
        return ROWS[self.family]

    @property
    def prompt_use(self) -> Use:
        """What a clip has to do with prompts."""
        return "needed" if self.row.takes_prompt else "refused"

    @property
    def num_experts(self) -> int:
        """2 for Wan 2.2 A14B, otherwise 1."""
        return 1 if self.boundary_ratio is None else 2

    @property
    def weighted(self) -> tuple[str, ...]:
        """The components that have weights."""
        return tuple(part for part, _ in self.classes if has_weights(part))

    def parts_of(self, roles: Roles, sampling: SamplingConfig) -> frozenset[str]:
        """The components that a rank with these roles loads, with and without weights."""
        row, needed = self.row, set(self.row.everywhere)
        if roles.encode:
            needed |= {*row.encode, *(IMAGE_ENCODERS if sampling.from_image else ())}
        if roles.decode:
            needed.update(row.decode)
        if roles.denoise:
            needed |= {name for place, name in enumerate(row.denoisers) if place in roles.experts}
        return frozenset(part for part, _ in self.classes if part in needed)

    def components_of(self, roles: Roles, sampling: SamplingConfig) -> frozenset[str]:
        """The components of `weighted` that a rank with these roles loads."""
        return frozenset(filter(has_weights, self.parts_of(roles, sampling)))

    def check_inputs(
        self,
        sampling: SamplingConfig,
        *,
        image: bool,
        prompt: str | None,
        negative_prompt: str | None,
        videos: Collection[str] = (),
    ) -> None:
        """Checks that a clip has what the model needs, and nothing that it ignores; None: none."""
        visual = "a video" if sampling.from_video else "an image"
        for what, is_given, use, hint in (
            (visual, image, self.image_use, f"name {visual}"),
            ("a prompt", prompt is not None, self.prompt_use, 'give --prompt "..."'),
        ):
            if use == "needed" and not is_given:
                raise RequestError(f"{self.label} needs {what}", hint)
            if use == "refused" and is_given:
                raise RequestError(f"{self.label} takes no {what.split()[-1]}", "leave it out")
        if self.prompt_use == "needed" and not (prompt or "").strip():
            raise RequestError("--prompt is empty", 'say what happens, as in --prompt "a wave"')
        if negative_prompt is not None and not (prompt and sampling.guided):
            raise RequestError(
                "--negative-prompt has no effect without a prompt and guidance",
                "leave it out, or use a --guidance-scale above 1",
            )
        sampling.check_videos(videos)
        if isinstance(sampling, PromptedSampling) and image != sampling.from_image:
            raise RequestError(
                f"the clip has {'an' if image else 'no'} image, but its sampling parameters "
                f"have from_image={sampling.from_image}",
                "set from_image accordingly",
            )

    def check_request(self, sampling: SamplingConfig, request: ClipRequest) -> None:
        """`check_inputs` of a clip."""
        prompts = {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
        image = request.image is not None
        self.check_inputs(sampling, image=image, videos=request.videos, **prompts)

    def resolve(self, sampling: SamplingConfig) -> SamplingConfig:
        """`sampling` with the model's own values in place of None."""
        if sampling.family != self.family:
            raise RequestError(
                f"{self.label} is of the family {self.family}, not {sampling.family}"
            )
        sampling = sampling.resolved(model_frames=self.model_frames)
        require(
            self.fixed_frames in (None, sampling.frames),
            f"{self.label} makes clips of {self.fixed_frames} frames, not {sampling.frames}",
        )
        check_sides(sampling, self.size_multiple)
        kind: Any = type(sampling)
        for name in own_params(kind).keys() & {*self.unused_parameters}:
            is_default = getattr(sampling, name) == getattr(kind, name)
            require(is_default, f"--param {name} has no effect on {self.label}")
        fewest, most, why = self.row.frames
        require(
            fewest <= sampling.frames <= most,
            f"--frames must be {fewest} to {most}, {why}, got {sampling.frames}",
        )
        self.row.check(self, sampling)
        return sampling

    def weight_files(self, part: str) -> Mapping[Path, Header]:
        """The files with a component's weights, and the header of each."""
        names = weight_files(self.folder, part, self.variant)
        return {self.folder / name: read_safetensors_header(self.folder / name) for name in names}

    def new_scheduler(self, sampling: SamplingConfig | None) -> Any:
        """diffusers' scheduler of the checkpoint, as the sampling parameters change it."""
        import diffusers  # seconds

        name, values = self.scheduler.name, dict(self.scheduler.values)
        if (shift := getattr(sampling, "flow_shift", None)) is not None:
            values["flow_shift" if "flow_shift" in values or "UniPC" in name else "shift"] = shift
        with library_errors("scheduler", self):
            return getattr(diffusers, name).from_config(values)

    def timesteps(self, sampling: SamplingConfig) -> Any:
        """Those of a clip's steps, as a tensor."""
        scheduler = self.new_scheduler(sampling)
        with library_errors("scheduler", self):
            steps = sampling.num_inference_steps
            every = self.row.arguments(sampling).get("num_inference_steps", steps)
            scheduler.set_timesteps(every, device="cpu")
        return scheduler.timesteps[-steps:]

    def expert_boundary(self, sampling: SamplingConfig) -> int | None:
        """The number of steps of the first expert, of resolved `sampling`; None: one expert."""
        if self.boundary_ratio is None:
            return None
        boundary = self.boundary_ratio * self.scheduler.values.get("num_train_timesteps", 1000)
        return int((self.timesteps(sampling) >= boundary).sum())  # as in `WanPipeline.__call__`


def find_checkpoint(model: ModelConfig, *, weights: bool = True) -> Checkpoint:
    """Finds the checkpoint of `model`, downloads missing files of a hub model, and checks it.

    It reads only configs and, with `weights`, safetensors headers of all components. A name that is
    neither `demo` nor a folder is a hub id; the settings of the hub's library (HF_HOME,
    HF_HUB_OFFLINE, a login) apply.
    """
    with _located(model) as local:
        if local is not None and model.revision is not None:
            raise RequestError(f"--revision is for hub models; {show_name(model.name)} is a folder")
        if (model.name, model.revision) == (DEFAULT_MODEL, None):
            local = local or _ASSETS / "svd-xt"  # as published, and there without a network
        checkpoint = _check_configs(model, local or download(model), local)
    return with_weights(checkpoint, model, checkpoint.weighted) if weights else checkpoint


def with_weights(
    checkpoint: Checkpoint, model: ModelConfig, components: Collection[str]
) -> Checkpoint:
    """`checkpoint`, of `model`, with the weights of `components`, downloaded and checked.

    Of a folder all components are checked: its fingerprint is that of all weights.
    """
    loras = [find_lora(lora, local_files_only=model.local_files_only) for lora in model.loras]
    with _located(model) as local:
        if local is None:
            pinned = replace(model, revision=checkpoint.revision or model.revision)
            folder = download(pinned, components)
            # The default model's configs have not been downloaded before.
            checkpoint = _check_configs(model, folder, local)
        checked = components if local is None else checkpoint.weighted
        files = [path for part in checked for path in checkpoint.weight_files(part)]
        changes = local is not None and model.name != DEMO_MODEL
        return replace(
            checkpoint,
            loras=tuple(loras),
            fingerprint=fingerprint(checkpoint.folder, files) if changes else None,
        )


def family_of_model(model: ModelConfig) -> str:
    """The family of a model, from its `model_index.json`; downloads at most the configs."""
    if model.family is None and model.name in (DEFAULT_MODEL, DEMO_MODEL, DUMMY_MODEL):
        return "svd"
    with _located(model) as local:
        return _read_index(local or download(model), model.family)[1]


# 1. Find the folder.


@contextmanager
def _located(model: ModelConfig) -> Iterator[Path | None]:
    """The model's folder; None: the hub has it. Adds its name and a hint to the block's errors."""
    local = _local_folder(model.name)
    try:
        yield local
    except ModelError as error:
        hint = "copy or download the folder again, or --model demo"
        if model.name == DEMO_MODEL:
            hint = "reinstall svdpp, which includes the demo model"
        elif local is None:
            hint = f"hf download {shlex.quote(redact_tokens(model.name))} --force-download"
        message = f"model {show_name(model.name)}: {error.message}"
        raise ModelError(message, error.hint or hint) from error


def _local_folder(name: str) -> Path | None:
    """The folder that `name` refers to; None if it can only be a hub id."""
    if name == DEMO_MODEL:
        return _ASSETS / "demo-model"
    path, shown = os.path.expanduser(name), show_name(name)
    if os.path.isdir(path):
        return Path(path).resolve()
    if name.lower() in (DEMO_MODEL, DUMMY_MODEL):
        raise ModelError(f"there is no model {shown}", f"--model {name.lower()}")
    is_path = os.path.exists(path) or name.startswith((".", "~", "/")) or "\\" in name
    if is_path or name.count("/") > 1:
        raise ModelError(f"there is no folder {shown}", MODEL_HINT)
    return None


# 2. Check its contents.


def _check_configs(model: ModelConfig, folder: Path, local: Path | None) -> Checkpoint:
    index, family = _read_index(folder, model.family)
    row, kind = ROWS[family], SAMPLING_CLASSES[family]
    configs = Configs(folder, index, row)
    from_image = index.values["_class_name"] in (row.image, *row.also)
    facts = {
        "image_use": "optional" if row.both else "needed" if from_image else "refused",
        "size_multiple": (kind.side_unit, kind.side_unit),
        **row.facts(configs),
    }
    checkpoint = Checkpoint(
        name=model.name,
        folder=folder,
        revision=None if local else commit_of(folder),
        variant=model.variant,
        family=family,
        classes=tuple(configs.classes.items()),
        scheduler=configs.scheduler,
        **facts,
    )
    check_loras(model, checkpoint)
    return checkpoint


def _read_index(folder: Path, asked: str | None) -> tuple[JsonFile, str]:
    """`model_index.json`, and the family of the pipeline that it names, or the one asked for."""
    if not (folder / _INDEX_FILE).is_file():
        raise ModelError(f"{_INDEX_FILE} is missing", MODEL_HINT)
    index = read_json(folder, _INDEX_FILE)
    name = index.values.get("_class_name")
    if not isinstance(name, str) or name not in FAMILIES:
        reason = REFUSED.get(str(name), "svdpp does not run")
        raise index.error(
            f"the pipeline is {short_repr(name)}, which {reason}",
            "svdpp models lists those that it runs",
        )
    family = FAMILIES[name]
    if asked in (None, family) or (asked in ROWS and name in ROWS[asked].also):
        return index, asked or family
    others = [each for each, row in ROWS.items() if name in row.also]
    raise RequestError(
        f"{_INDEX_FILE} names a {name}, which --family {short_repr(asked)} does not run",
        f"--family {' or '.join((family, *others))}",
    )


_ASSETS = Path(__file__).resolve().parents[1] / "assets"
_INDEX_FILE = "model_index.json"
