"""The jobs of a run: inputs x seeds as clips, and those that are finished."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from svdpp.config import OutputConfig, PipelineConfig, VideoFormat
from svdpp.config.limits import LARGE_MEGAPIXELS, MAX_CLIPS, require
from svdpp.config.pipeline import identity_fields, latents_key, parameters_sha256
from svdpp.driver.clip_metadata import (
    check_clip_metadata,
    clip_metadata,
    metadata_of_seed,
    parse_clip_json,
    weights_identity,
)
from svdpp.driver.clip_names import clip_names
from svdpp.driver.manifest import MANIFEST, read_manifest
from svdpp.driver.run_plan import RunPlan
from svdpp.errors import InputError, RequestError
from svdpp.media import output_files, video
from svdpp.media.ffmpeg import find_ffmpeg
from svdpp.media.inputs import ClipInput
from svdpp.models.checkpoint import Checkpoint

_REPLACE_OR_KEEP = "`overwrite` replaces it; another `out` folder keeps both"


@dataclass(frozen=True, kw_only=True)
class OutputPolicy:
    """Folder and names of the clips, and what happens to existing files.

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
        """Path of the run's manifest: one for a folder of clips, or for a single clip."""
        return self.folder / (f"{self.single_clip}.{MANIFEST}" if self.single_clip else MANIFEST)


def check_outputs(inputs: Sequence[ClipInput], seeds: Sequence[int], policy: OutputPolicy) -> int:
    """Check outputs and encoder before the model is searched for.

    Args:
        inputs: inputs of the clips.
        seeds: seeds of the clips of each input.
        policy: folder, and what happens to existing files.

    Returns:
        The number of outputs that exist.

    Raises:
        RequestError: outputs exist that `policy` neither keeps nor replaces, two clips would have
            one name, or there are too many.
        OutputError: a folder cannot be written, or there is no ffmpeg.
    """
    if policy.overwrite and policy.resume:
        raise RequestError("`overwrite` and `resume` contradict each other")
    num_clips = len(inputs) * len(seeds)
    require(
        1 <= num_clips <= MAX_CLIPS,
        f"inputs x seeds must be 1 to {MAX_CLIPS}, got {num_clips}",
        value=num_clips,
        lowest=1,
        highest=MAX_CLIPS,
    )
    _check_names(inputs, seeds, policy)
    # One listing, because a run may have 100,000 clips.
    with output_files.disk_errors(f"cannot look into {str(policy.folder)!r}"):
        there = set(os.listdir(policy.folder) if policy.folder.is_dir() else ())
    existing = [
        output
        for _, _, output in _outputs(inputs, seeds, policy)
        if not there.isdisjoint(map(os.path.basename, (output.path, output.json_path)))
    ]
    if existing and not (policy.overwrite or policy.keeps_finished):
        both = (existing[0].path, existing[0].json_path)
        first = next(path for path in both if os.path.basename(path) in there)
        noun = "output exists" if len(existing) == 1 else "outputs exist"
        raise RequestError(
            f"{len(existing)} {noun} already, the first is {first!r}",
            "`resume` keeps what is finished, `overwrite` replaces it",
            details={"existing": len(existing), "asked": len(inputs) * len(seeds)},
        )
    for output in existing:
        video.check_output(output)
        output_files.check_replaceable(output.json_path)
    if not policy.overwrite and policy.manifest.exists():
        _check_is_manifest(policy.manifest)
    output_files.check_writable(policy.folder)
    if policy.latents_folder is not None:
        output_files.check_writable(policy.latents_folder)
    if policy.format == "mp4":
        find_ffmpeg()
    return len(existing)


def _check_is_manifest(path: Path) -> None:
    try:
        read_manifest(path)
    except InputError as error:
        raise RequestError(
            f"{str(path)!r} exists and is not a run's manifest",
            _REPLACE_OR_KEEP,
            details={"path": str(path)},
        ) from error


def plan_clips(
    inputs: Sequence[ClipInput],
    seeds: Sequence[int],
    policy: OutputPolicy,
    config: PipelineConfig,
    checkpoint: Checkpoint,
) -> RunPlan:
    """Return one clip for each input and seed, without the finished ones that `resume` keeps.

    Args:
        inputs: inputs of the clips.
        seeds: seeds of the clips of each input.
        policy: folder, and what happens to existing files.
        config: resolved configuration of the pipeline.
        checkpoint: checkpoint of its model.

    Raises:
        RequestError: the model cannot make a clip, or an existing one has other parameters.
        InputError: an existing clip's JSON is none.
    """
    from svdpp.worker import tensor_files  # torch, which `svdpp report` does not need

    plan, are_large = RunPlan(), []
    folder = policy.latents_folder
    saved = {key for key, _ in tensor_files.list_checkpoints(folder)} if folder else set()
    weights = None if folder is None else weights_identity(checkpoint)
    last, metadata = None, {}
    for made_from, seed, output in _outputs(inputs, seeds, policy):
        request = made_from.request(seed)
        if made_from is last:
            metadata = metadata_of_seed(metadata, seed, output)
        else:
            checkpoint.check_request(config.sampling, request)
            last, metadata = made_from, clip_metadata(made_from, seed, output, config, checkpoint)
        key, done_steps = None if folder is None else latents_key(metadata, weights), 0
        finished = _kept_clip(output, metadata, policy)
        if finished is not None:
            plan.skipped.append(finished)
            if folder is not None and key in saved:
                # A run was killed before it removed them.
                tensor_files.remove_checkpoints(folder, key)
            continue
        if folder is not None and policy.keeps_finished and key in saved:
            done_steps = max(tensor_files.saved_steps(folder, key), default=0)
        media_file = made_from.media_file
        are_large.append(
            media_file is not None
            and media_file.width * media_file.height > LARGE_MEGAPIXELS * 10**6
        )
        plan.metadata.append(metadata)
        plan.requests.append(
            replace(request, output=output, latents_key=key, done_steps=done_steps)
        )
    # All ranks wait for the first images; the others are prepared while the ranks work.
    num_first = config.parallel.data_parallel_size
    small = [index for index, is_large in enumerate(are_large) if not is_large][:num_first]
    order = small + sorted(set(range(len(are_large))) - set(small))
    plan.requests = [plan.requests[index] for index in order]
    plan.metadata = [plan.metadata[index] for index in order]
    return plan


def _outputs(
    inputs: Sequence[ClipInput], seeds: Sequence[int], policy: OutputPolicy
) -> Iterator[tuple[ClipInput, int, OutputConfig]]:
    folder, single = policy.folder.absolute(), policy.single_clip
    names = clip_names(inputs)
    for (made_from, name), seed in itertools.product(zip(inputs, names, strict=True), seeds):
        path = folder / f"{single}{video.FORMAT_SUFFIXES[policy.format]}"
        if not single:
            path = video.clip_path(folder, name, seed, policy.format)
        yield made_from, seed, OutputConfig(path=str(path), format=policy.format, crf=policy.crf)


def _check_names(inputs: Sequence[ClipInput], seeds: Sequence[int], policy: OutputPolicy) -> None:
    owners: dict[str, tuple[str, int]] = {}
    for made_from, seed, output in _outputs(inputs, seeds, policy):
        owner = f"{made_from} with seed {seed}"
        if output.path in owners:
            other, other_seed = owners[output.path]
            raise RequestError(
                f"{other} and {owner} would both become {Path(output.path).name!r}",
                "`out` takes a folder for several clips"
                if policy.single_clip
                else "make them in two runs, each with an `out` folder of its own",
                details={"output": output.path, "seed": seed, "other_seed": other_seed},
            )
        owners[output.path] = owner, seed


def _kept_clip(
    output: OutputConfig, metadata: dict[str, Any], policy: OutputPolicy
) -> dict[str, Any] | None:
    """Return the JSON of an existing clip that `policy` keeps; None if it must be made."""
    try:
        return _finished_clip(output, metadata) if policy.keeps_finished else None
    except (RequestError, InputError):
        if policy.overwrite:
            return None
        raise


def _finished_clip(output: OutputConfig, metadata: dict[str, Any]) -> dict[str, Any] | None:
    """Return the JSON of an existing clip that is complete and as requested; None: make it.

    If a run was killed between the file and its JSON, this writes the JSON.
    """
    path, json_path = Path(output.path), Path(output.json_path)
    has_file, has_json = path.exists(), json_path.exists()
    if has_json:
        fault = f"{str(json_path)!r} is not a clip's JSON"
        existing = check_clip_metadata(parse_clip_json(json_path), fault)
    elif has_file:
        existing = _embedded(path)
    else:
        return None
    _check_same_parameters(path, existing, metadata)
    if not (has_file and _is_intact(path, output, existing)):
        return None
    if not has_json:
        existing["file_sha256"] = video.file_sha256(path)
        output_files.write_json(json_path, existing)
    return existing


def _check_same_parameters(path: Path, existing: dict[str, Any], metadata: dict[str, Any]) -> None:
    if parameters_sha256(existing) == metadata["parameters_sha256"]:
        return
    names = (*identity_fields(metadata), *identity_fields(existing))
    name = next(name for name in names if existing.get(name) != metadata.get(name))
    before, now = existing.get(name), metadata.get(name)
    # The default number of threads depends on the number of ranks.
    same = f"`num_threads` {before} keeps it; " if name == "num_threads" else ""
    raise RequestError(
        f"{path.name!r} exists with another {name}: {before!r}, now {now!r}",
        same + _REPLACE_OR_KEEP,
        details={"path": str(path), "field": name, "before": before, "now": now},
    )


def _embedded(path: Path) -> dict[str, Any]:
    try:
        return check_clip_metadata(video.read_metadata(path), f"{path.name!r} is not a clip")
    except InputError as error:
        raise RequestError(
            f"{path.name!r} exists without a JSON, and svdpp did not write it",
            _REPLACE_OR_KEEP,
            details={"path": str(path)},
        ) from error


def _is_intact(path: Path, output: OutputConfig, existing: dict[str, Any]) -> bool:
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
            details={"path": str(path), "recorded_sha256": recorded},
        )
    return is_readable
