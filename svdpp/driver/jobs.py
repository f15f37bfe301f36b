"""The jobs of a run: inputs x seeds as clips, checked first, without those that are finished."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from svdpp.config import ClipRequest, OutputConfig, PipelineConfig, SamplingConfig, VideoFormat
from svdpp.config.limits import LARGE_MEGAPIXELS, MAX_CLIPS, check_whole
from svdpp.config.pipeline import identity, latents_key, parameters_sha256
from svdpp.driver.run_manifest import NAME, RunManifest, check_replaceable, how_made
from svdpp.errors import InputError, OutputError, RequestError
from svdpp.media import output_files, video
from svdpp.media.inputs import ClipInput
from svdpp.models.checkpoint import Checkpoint
from svdpp.worker import tensor_files
from svdpp.worker.clip_metadata import (
    checked_clip_metadata,
    clip_metadata,
    of_seed,
    read_clip_metadata,
    weights_identity,
)

_REPLACE_OR_KEEP = "--overwrite replaces it; another --out folder keeps both"


@dataclass(frozen=True, kw_only=True)
class OutputPolicy:
    """Where clips are written, and what happens to existing files.

    `resume` keeps finished clips and resumes others from `latents_folder`. So does a run that a
    launcher has restarted (`is_restarted`); with `overwrite` it still replaces clips with other
    parameters.
    """

    folder: Path
    single_clip: str = ""
    """The name of the run's only clip, without the suffix; empty if it makes a folder of clips."""
    format: VideoFormat = "mp4"
    crf: int = 18
    overwrite: bool = False
    resume: bool = False
    is_restarted: bool = False
    latents_folder: Path | None = None

    @property
    def keeps_finished(self) -> bool:
        """Whether existing clips that are as requested are kept."""
        return self.resume or self.is_restarted

    @property
    def manifest(self) -> Path:
        """The path of the run's manifest: one for a folder of clips, or for a single clip."""
        return self.folder / (f"{self.single_clip}.{NAME}" if self.single_clip else NAME)


@dataclass
class ClipPlan:
    """The clips still to be made, in order, and those that are finished already."""

    requests: list[ClipRequest] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)


def check_outputs(
    inputs: Sequence[ClipInput],
    seeds: Sequence[int],
    policy: OutputPolicy,
) -> int:
    """Checks outputs and encoder before the model is searched for; returns how many exist."""
    if policy.overwrite and policy.resume:
        raise RequestError("--overwrite and --resume contradict each other")
    check_whole("inputs x seeds", len(inputs) * len(seeds), 1, MAX_CLIPS)
    for _, _, error in _shared_names(inputs, seeds, policy):
        raise error
    # One listing, because a run may have 100,000 clips.
    with output_files.disk_errors(f"cannot look into {str(policy.folder)!r}"):
        there = set(os.listdir(policy.folder) if policy.folder.is_dir() else ())
    places: list[OutputConfig] = []
    existing: list[Path] = []
    for _, _, output in _outputs(inputs, seeds, policy):
        files = (output.path, output.json_path)
        if not there.isdisjoint(map(os.path.basename, files)):
            existing += [path for path in map(Path, files) if path.exists()][:1]
            places.append(output)
    if existing and not (policy.overwrite or policy.keeps_finished):
        first, others = str(existing[0]), len(existing) - 1
        raise RequestError(
            f"{len(existing)} outputs exist already, the first is {first!r}"
            if others
            else f"1 output exists already: {first!r}",
            "--resume keeps what is finished, --overwrite replaces it",
            details={"existing": len(existing), "asked": len(inputs) * len(seeds)},
        )
    for output in places:
        video.check_output(output)
        output_files.check_free(output.json_path)
    if not policy.overwrite:
        check_replaceable(policy.manifest)
    output_files.check_writable(policy.folder)
    if policy.latents_folder is not None:
        output_files.check_writable(policy.latents_folder)
    if policy.format == "mp4":
        video.find_ffmpeg()
    return len(existing)


def without_shared_names(
    inputs: Sequence[ClipInput], seeds: Sequence[int], policy: OutputPolicy
) -> tuple[list[ClipInput], list[RequestError]]:
    """`inputs` without those whose clips share a name with an earlier one's; their errors."""
    refused: dict[ClipInput, RequestError] = {}
    for made_from, first, error in _shared_names(inputs, seeds, policy):
        if first != made_from:
            refused.setdefault(made_from, error)
    return [made_from for made_from in inputs if made_from not in refused], list(refused.values())


def plan_clips(
    inputs: Sequence[ClipInput],
    seeds: Sequence[int],
    policy: OutputPolicy,
    config: PipelineConfig,
    checkpoint: Checkpoint,
) -> ClipPlan:
    """One clip for each input and seed, without the finished ones that `resume` keeps."""
    plan, are_large = ClipPlan(), []
    folder = policy.latents_folder
    saved = {key for key, _ in tensor_files.saved(folder)} if folder else set()
    weights = None if folder is None else weights_identity(checkpoint)
    last, metadata = None, {}
    for made_from, seed, output in _outputs(inputs, seeds, policy):
        request = made_from.request(seed)
        if made_from is last:
            metadata = of_seed(metadata, seed, output)
        else:
            checkpoint.check_request(config.sampling, request)
            last, metadata = made_from, clip_metadata(made_from, seed, output, config, checkpoint)
        key = None if folder is None else latents_key(metadata, weights)
        finished = _finished_clip(output, metadata, policy)
        if finished is not None:
            plan.skipped.append(finished)
            if folder is not None and key in saved:
                tensor_files.prune(folder, key)  # of a run killed before it removed them
            continue
        steps = []
        if folder is not None and policy.keeps_finished and key in saved:
            steps = tensor_files.saved_steps(folder, key)
        photo = made_from.photo
        are_large.append(
            photo is not None and photo.width * photo.height > LARGE_MEGAPIXELS * 10**6
        )
        plan.metadata.append(metadata)
        plan.requests.append(
            replace(
                request,
                output=output,
                latents_key=key,
                done_steps=max(steps, default=0),
            )
        )
    _put_small_first(plan, are_large, config.replicas)
    check_space(policy.folder, len(plan.requests), policy.format, policy.crf, config.sampling)
    return plan


def _put_small_first(plan: ClipPlan, are_large: Sequence[bool], count: int) -> None:
    """Moves `count` clips without large images to the front.

    All ranks wait for the first images; the others are prepared while the ranks work.
    """
    small = [index for index, is_large in enumerate(are_large) if not is_large][:count]
    order = small + sorted(set(range(len(are_large))) - set(small))
    plan.requests = [plan.requests[index] for index in order]
    plan.metadata = [plan.metadata[index] for index in order]


def open_manifest(
    path: Path,
    config: PipelineConfig,
    clips: ClipPlan,
    lost: Sequence[Mapping[str, Any]],
) -> RunManifest:
    """The manifest of a run that is about to begin.

    `lost` has an entry for each input that could not be read.
    """
    run = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": config.model.name,
        "world_size": config.world_size,
        "device": config.device,
        "num_inference_steps": config.sampling.num_inference_steps,
    }
    before = [
        {**_entry(metadata), **how_made(metadata), "state": "done"} for metadata in clips.skipped
    ]
    before += [{**entry, "state": "failed"} for entry in lost]
    begun = [
        {**_entry(metadata), "from_step": request.done_steps}
        for metadata, request in zip(clips.metadata, clips.requests, strict=True)
    ]
    return RunManifest(path, run, begun, before)


def _entry(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metadata[name] for name in ("output", "input", "seed", "parameters_sha256")}


def _outputs(
    inputs: Sequence[ClipInput], seeds: Sequence[int], policy: OutputPolicy
) -> Iterator[tuple[ClipInput, int, OutputConfig]]:
    folder, single = policy.folder.absolute(), policy.single_clip
    for made_from, seed in itertools.product(inputs, seeds):
        path = folder / f"{single}{video.SUFFIXES[policy.format]}"
        if not single:
            path = video.clip_path(folder, made_from.name, seed, policy.format)
        yield made_from, seed, OutputConfig(path=str(path), format=policy.format, crf=policy.crf)


def _shared_names(
    inputs: Sequence[ClipInput], seeds: Sequence[int], policy: OutputPolicy
) -> Iterator[tuple[ClipInput, ClipInput, RequestError]]:
    owners: dict[str, tuple[ClipInput, str]] = {}
    for made_from, seed, output in _outputs(inputs, seeds, policy):
        owner = f"{made_from} with seed {seed}"
        if output.path in owners:
            first, name = owners[output.path]
            both = f"{name} and {owner} would both become {Path(output.path).name!r}"
            hint = "name a folder as --out" if policy.single_clip else "use another --out for one"
            yield made_from, first, RequestError(both, hint)
        else:
            owners[output.path] = made_from, owner


def _finished_clip(
    output: OutputConfig,
    metadata: dict[str, Any],
    policy: OutputPolicy,
) -> dict[str, Any] | None:
    """The JSON of an existing clip that `policy` keeps; None if the clip must be made."""
    if not policy.keeps_finished:
        return None
    try:
        return clip_as_asked(output, metadata)
    except (RequestError, InputError):
        if policy.overwrite:
            return None
        raise


def clip_as_asked(output: OutputConfig, metadata: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON of an existing clip that is complete and as requested; None if it must be made.

    A run that is killed between a file and its JSON leaves a clip without JSON; this function
    writes the JSON.
    """
    path, json_path = Path(output.path), Path(output.json_path)
    if json_path.exists():
        existing = read_clip_metadata(json_path)
        _check_same(path, existing, metadata)
        return existing if path.exists() and _is_whole(path, output, existing) else None
    if not path.exists():
        return None
    existing = _embedded(path)
    _check_same(path, existing, metadata)
    if not _is_whole(path, output, existing):
        return None
    existing["file_sha256"] = video.file_sha256(path)
    output_files.write_json(json_path, existing)
    return existing


def _check_same(path: Path, existing: dict[str, Any], metadata: dict[str, Any]) -> None:
    if parameters_sha256(existing) == metadata["parameters_sha256"]:
        return
    names = (*identity(metadata), *identity(existing))
    name = next(name for name in names if existing.get(name) != metadata.get(name))
    # The default number of threads depends on the number of ranks.
    before, now = existing.get(name), metadata.get(name)
    same = f"--threads {before} keeps it; " if name == "num_threads" else ""
    raise RequestError(
        f"{path.name!r} exists with another {name}: {before!r}, now {now!r}",
        same + _REPLACE_OR_KEEP,
    )


def _embedded(path: Path) -> dict[str, Any]:
    try:
        return checked_clip_metadata(video.read_metadata(path), f"{path.name!r} is not a clip")
    except InputError as error:
        raise RequestError(
            f"{path.name!r} exists without a JSON, and svdpp did not write it",
            _REPLACE_OR_KEEP,
        ) from error


def _is_whole(path: Path, output: OutputConfig, existing: dict[str, Any]) -> bool:
    """Whether the file is the one that its JSON describes; False if it is damaged."""
    recorded = existing["file_sha256"]
    try:
        if recorded is not None and video.file_sha256(path) == recorded:
            return True
        is_readable = bool(len(video.read_frames(path, output.format)) == existing["num_frames"])
    except InputError:
        return False
    if recorded is not None and is_readable:
        raise RequestError(
            f"{path.name!r} is not the file that its JSON describes: it was changed or replaced",
            _REPLACE_OR_KEEP,
        )
    return is_readable


# --- disk space -----------------------------------------------------------------------------------

# Bytes for each pixel of each frame: the maximum that `write_clip` used for clips of the four
# photographs of svdpp, zoomed by 2% a frame, with 14 frames of 128x128 and of 1024x576. The maximum
# always came from a photograph with camera grain of 6 levels, which compresses worst. Clips of the
# demo model need a tenth to a half of it. Frames of pure noise need 3 times as much as mp4, 1.8
# times as webp and 1.3 times as gif or png; they are ignored, so that a disk with enough space for
# photographs is not refused.
_BYTES_PER_PIXEL = {"gif": 1.11, "webp": 0.48, "frames": 2.34}
#: The same for mp4, by the largest measured --crf that is not above the requested one.
_MP4_BYTES_PER_PIXEL = {0: 0.83, 6: 0.66, 12: 0.44, 18: 0.24, 24: 0.094, 36: 0.024, 51: 0.012}

#: For a file's container, its metadata, and the rounding of the file system.
_BYTES_PER_FILE = 8 * 1024


def estimated_bytes(format: VideoFormat, crf: int, sampling: SamplingConfig) -> int:
    """Estimated disk space of one clip and its metadata, by the factors above."""
    if format == "mp4":
        factor = _MP4_BYTES_PER_PIXEL[max(each for each in _MP4_BYTES_PER_PIXEL if each <= crf)]
    else:
        factor = _BYTES_PER_PIXEL[format]
    frames, pixels = sampling.frames, sampling.height * sampling.width
    num_files = 1 + (frames if format == "frames" else 1)
    return round(factor * frames * pixels) + num_files * _BYTES_PER_FILE


def free_bytes(folder: Path) -> int:
    """Free bytes for this user on the file system of `folder`, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        return shutil.disk_usage(there).free
    except OSError as error:
        raise OutputError(f"cannot write into {str(folder)!r}: {error.strerror}") from error


def check_space(
    folder: Path, num_clips: int, format: VideoFormat, crf: int, sampling: SamplingConfig
) -> None:
    """Checks by an estimate that `num_clips` clips fit into `folder`.

    A clip that is replaced exists until the new one is complete, so its space does not count.
    """
    one = estimated_bytes(format, crf, sampling)
    free = free_bytes(folder)
    if num_clips * one <= free:
        return
    clips = f"{num_clips} clip{'s' if num_clips > 1 else ''}"
    raise OutputError(
        f"{clips} of {sampling.frames} frames, {sampling.width}x{sampling.height}, as {format} "
        "need about "
        f"{size(num_clips * one)} in {str(folder)!r}, where {size(free)} are free",
        "name a folder on another disk with --out, or ask for fewer clips",
        details={"asked": num_clips * one, "free": free},
    )


def size(num_bytes: int) -> str:
    """Bytes as text, such as `1.5 GB`."""
    for unit, each in (("GB", 10**9), ("MB", 10**6)):
        if num_bytes >= each:
            return f"{num_bytes / each:.1f} {unit}"
    return f"{num_bytes / 1000:.1f} kB"
