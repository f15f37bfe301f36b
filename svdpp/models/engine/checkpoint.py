"""The check of a checkpoint against its family's row; knows no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdpp.config import SAMPLING_CLASSES, CommonSampling, SamplingConfig
from svdpp.config.limits import require
from svdpp.config.sampling import PromptedSampling, check_frames, check_sides
from svdpp.errors import RequestError
from svdpp.models.checkpoint import Checkpoint, Use
from svdpp.models.engine.configs import Configs, SchedulerConfig, check_class, class_of
from svdpp.models.engine.rows import FAMILIES, ROWS, Row
from svdpp.models.engine.wan import boundary_step
from svdpp.models.safetensors_header import JsonFile
from svdpp.plan.layout import Roles


@dataclass(frozen=True, kw_only=True)
class RowCheckpoint(Checkpoint):
    """A checkpoint of a family that has a row."""

    row_name: str
    classes: tuple[tuple[str, str], ...]
    """Each component and its class; the scheduler is not among them."""
    scheduler: SchedulerConfig
    size_multiple: tuple[int, int]
    """Height and width of a frame are multiples of these."""
    frames_multiple: int
    """The number of frames is a multiple of this plus 1."""
    fixed_frames: int | None = None
    """The only number of frames that the model makes; None: any."""
    image_sizes: tuple[tuple[int, int], ...] = ()
    """Heights and widths of clips from an image; empty: any."""
    image_use: Use = "refused"
    unused_parameters: tuple[str, ...] = ()
    boundary_ratio: float | None = None
    """Share of the training timesteps below which `transformer_2` runs; None for one expert."""
    decode_draws: bool = False
    """Whether the decode draws noise."""

    @property
    def family(self) -> str:
        """See `Checkpoint`."""
        return self.row_name

    @property
    def row(self) -> Row:
        """Of the family."""
        return ROWS[self.row_name]

    @property
    def fp32_components(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return self.row.fp32

    @property
    def num_experts(self) -> int:
        """See `Checkpoint`."""
        return 1 if self.boundary_ratio is None else 2

    @property
    def takes_loras(self) -> bool:
        """See `Checkpoint`."""
        return self.row.loras

    @property
    def weighted(self) -> tuple[str, ...]:
        """See `Checkpoint`."""
        return tuple(part for part, _ in self.classes if has_weights(part))

    def parts_of(self, roles: Roles, sampling: SamplingConfig) -> frozenset[str]:
        """The components that a rank with these roles loads, with and without weights."""
        assert isinstance(sampling, PromptedSampling)
        row, needed = self.row, set(self.row.everywhere)
        if roles.encode:
            needed |= {*row.encode, *(row.encode_image if sampling.from_image else ())}
        if roles.decode:
            needed.update(row.decode)
        if roles.denoise:
            needed |= {name for place, name in enumerate(row.denoisers) if place in roles.experts}
        return frozenset(part for part, _ in self.classes if part in needed)

    def components_of(self, roles: Roles, sampling: SamplingConfig) -> frozenset[str]:
        """See `Checkpoint`."""
        return frozenset(filter(has_weights, self.parts_of(roles, sampling)))

    @property
    def prompt_use(self) -> Use:
        """See `Checkpoint`."""
        return "needed"

    def resolve(self, sampling: SamplingConfig) -> SamplingConfig:
        """See `Checkpoint`."""
        if sampling.family != self.family:
            raise RequestError(
                f"{self.label} is of the family {self.family}, not {sampling.family}"
            )
        assert isinstance(sampling, CommonSampling)
        check_frames(sampling, self.frames_multiple)
        require(
            self.fixed_frames in (None, sampling.frames),
            f"{self.label} makes clips of {self.fixed_frames} frames, not {sampling.frames}",
        )
        check_sides(sampling, self.size_multiple)
        self.row.check(self, sampling)
        return sampling

    def scheduler_of(self, sampling: SamplingConfig) -> SchedulerConfig:
        """The scheduler, with the changes that the sampling parameters ask for."""
        return self.scheduler.shifted(getattr(sampling, "flow_shift", None))

    def expert_boundary(self, sampling: SamplingConfig) -> int | None:
        """See `Checkpoint`."""
        if self.boundary_ratio is None:
            return None
        scheduler = self.scheduler_of(sampling)
        return boundary_step(scheduler, self.boundary_ratio, sampling.num_inference_steps)


_WITHOUT_WEIGHTS = ("processor", "extractor", "guider")


def has_weights(part: str) -> bool:
    """Whether a component has weights; tokenizers, processors and guiders have none."""
    return not part.startswith("tokenizer") and not part.endswith(_WITHOUT_WEIGHTS)


def check(index: JsonFile, *, folder: Path, **common: Any) -> RowCheckpoint:
    """Checks the configs of a folder.

    Args:
        index: its `model_index.json`.
        folder: of the checkpoint.
        common: further fields of `Checkpoint`.

    Raises:
        ModelError: a config is missing, has unsupported values, or does not fit the others.
    """
    pipeline = str(index.values["_class_name"])
    family = FAMILIES[pipeline]
    row = ROWS[family]
    for part, allowed in row.components.items():
        check_class(index, part, allowed, optional=part in row.optional)
    configs = Configs(folder, index, row.schedulers)
    found = {part: class_of(index, part) for part in row.components}
    for part, name in found.items():
        if name is not None and has_weights(part):
            configs.of(part)
    use: Use = "optional" if row.both else "needed" if pipeline == row.image else "refused"
    kind = SAMPLING_CLASSES[family]
    facts: dict[str, Any] = {
        "image_use": use,
        "size_multiple": (kind.side_unit, kind.side_unit),
        "frames_multiple": kind.frames_unit,
    }
    return RowCheckpoint(
        folder=folder,
        row_name=family,
        classes=tuple((part, name) for part, name in found.items() if name is not None),
        scheduler=configs.scheduler,
        **{**facts, **row.facts(configs)},
        **common,
    )
