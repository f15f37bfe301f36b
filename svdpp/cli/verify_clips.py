"""Owns proving finished clips from their JSON: each is computed anew on one device and compared."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from svdpp.cli.command import is_given
from svdpp.cli.console import Console
from svdpp.cli.verify_report import ClipProof, end_one, end_several
from svdpp.config import ClipRequest, ModelConfig, PipelineConfig
from svdpp.errors import InputError, ModelError, RequestError, SvdppError

if TYPE_CHECKING:
    from svdpp.worker.messages import Event

_HASHES = ("latents_sha256", "frames_sha256")
# Parameters of `verify` that are not answered by the clip's JSON.
_EFFECTIVE = frozenset(
    {
        *("inputs", "threads", "local_files_only", "timeout", "start_timeout"),
        *("as_json", "verbose", "quiet", "debug", "log_file"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line may say of the proof, where a JSON says the rest."""

    threads: int | None
    local_files_only: bool
    timeout: float
    start_timeout: float


@dataclass(frozen=True, kw_only=True)
class _Clip:
    """One finished clip, and how it is computed anew."""

    path: Path
    record: Mapping[str, Any]
    config: PipelineConfig
    request: ClipRequest


def are_clips(inputs: Sequence[str]) -> bool:
    """Whether `inputs` are clips' JSON; False where they are photographs.

    Raises:
        RequestError: they are some of both.
    """
    clips = [text for text in inputs if text.endswith(".json")]
    others = [text for text in inputs if not text.endswith(".json")]
    if clips and others:
        raise RequestError(
            f"{clips[0]!r} is a clip's JSON, {others[0]!r} is not: each is proved in its own way",
            "verify them by two commands",
        )
    return bool(clips)


def refuse_without_effect(context: typer.Context) -> None:
    """Refuses what was given beside a clip's JSON and says nothing of its proof.

    Raises:
        RequestError: naming all that has no effect.
    """
    given = {
        str(parameter.name): "/".join(name for name in parameter.opts if name.startswith("--"))
        for parameter in context.command.params
        if is_given(context, str(parameter.name)) and parameter.name not in _EFFECTIVE
    }
    if "report" in given:
        raise RequestError(
            "--report shows the frames of both sides, and a clip's JSON has their hash alone",
            "verify the photograph: svdpp verify PHOTO --report FILE.html",
        )
    if given:
        raise RequestError(
            f"{', '.join(given.values())} would have no effect: a clip's JSON says how it was "
            "made, and that is computed anew on one device",
            "leave out what has none; svdpp verify PHOTO runs the ranks, and takes it",
        )


def verify_clips(console: Console, inputs: Sequence[str], settings: Settings) -> None:
    """Proves every clip whose JSON `inputs` name, and prints what came of it.

    Raises:
        VerificationError: a clip differs.
        SvdppError: none differs, but one could not be computed anew: the worst such error.
    """
    from svdpp.driver.run_manifest import NAME

    paths = list(dict.fromkeys(path for text in inputs for path in _expand(text)))
    journals = [path for path in paths if path.name == NAME]
    if len(journals) == len(paths):
        raise InputError(
            f"{str(paths[0])!r} is a run's manifest, and no clip's JSON",
            "those are beside it, one for each clip that was made",
        )
    for path in journals:
        console.info(f"{path} is left out: a run's manifest, and no clip's JSON")
    proofs = []
    for proof in _prove([path for path in paths if path not in journals], settings, console):
        proofs.append(proof)
        if len(paths) > 1:
            console.result(str(proof))
    if len(paths) == 1:
        end_one(console, proofs[0])
    else:
        end_several(console, sorted(proofs, key=lambda proof: paths.index(proof.path)))


def _expand(text: str) -> Iterator[Path]:
    """The files that one input names: itself, or those that its pattern matches."""
    path = Path(text)
    if path.exists() or not any(char in text for char in "*?["):
        yield path
        return
    matches = sorted(glob.glob(text, recursive=True))
    if not matches:
        raise InputError(f"{text!r} matches no files")
    yield from map(Path, matches)


def _prove(paths: Iterable[Path], settings: Settings, console: Console) -> Iterator[ClipProof]:
    """All clips; those of one configuration together, so that it is loaded once."""
    groups: dict[PipelineConfig, list[_Clip]] = {}
    for path in paths:
        try:
            clip = _read(path, settings)
        except SvdppError as error:
            yield ClipProof(path=path, error=error)
        else:
            groups.setdefault(clip.config, []).append(clip)
    for config, clips in groups.items():
        yield from _recompute(config, clips, console)


def _read(path: Path, settings: Settings) -> _Clip:
    """What a clip's JSON says, checked before any work.

    Raises:
        ModelError: its folder of weights is gone, or holds others now.
        RequestError: it cannot be proved as it is asked for.
        InputError: it is no clip's JSON, or its photograph is another one now.
    """
    from svdpp.media.image import read_photo
    from svdpp.redaction import located_path
    from svdpp.worker.clip_metadata import read_clip_metadata

    record = read_clip_metadata(path)
    if record.get("exact") is False:
        raise RequestError(
            f"{path.name!r} is of a draft, which by its own word is not exact",
            "svdpp run without --draft-psnr makes the exact clip; "
            "verify --draft shows the distance",
        )
    if settings.threads not in (None, record["num_threads"]):
        raise RequestError(
            f"{path.name!r} was made with --threads {record['num_threads']}: with "
            f"{settings.threads} sums are rounded in another order, and the bits differ",
            "leave --threads out, and the clip's own number is used",
        )
    photo_path = located_path(record["input"], path.parent)
    _, photo = read_photo(photo_path)
    if photo.sha256 != record["input_sha256"]:
        raise InputError(f"{photo.path.name!r} is not the image that {path.name!r} was made from")
    request = ClipRequest(seed=record["seed"], image=str(photo_path))
    clip = _Clip(path=path, record=record, config=_config(record, settings), request=request)
    _check_weights(clip)
    return clip


def _check_weights(clip: _Clip) -> None:
    """Notices weights that were replaced under their folder's name."""
    from svdpp.models.checkpoint import find_checkpoint
    from svdpp.models.hub import show_name

    recorded = clip.record["weights_fingerprint"]
    if recorded is not None and find_checkpoint(clip.config.model).fingerprint != recorded:
        raise ModelError(
            f"model {show_name(clip.record['model'])} holds other weights now than "
            f"{clip.path.name!r} was made with",
            "put those back, or make the clip anew: svdpp run --overwrite",
        )


def _config(record: Mapping[str, Any], settings: Settings) -> PipelineConfig:
    from svdpp.worker.clip_metadata import recorded_sampling

    return PipelineConfig(
        world_size=1,
        model=ModelConfig(
            name=record["model"],
            revision=record["revision"],
            variant=record["variant"],
            local_files_only=settings.local_files_only,
            dtype=record["dtype"],
            memory_opt=record["memory_opt"],
            channels_last=record["channels_last"],
        ),
        sampling=recorded_sampling(dict(record)),
        device="cuda:0" if record["device"] == "cuda" else "cpu",
        num_threads=record["num_threads"],
        timeout_seconds=settings.timeout,
        start_timeout_seconds=settings.start_timeout,
    )


def _recompute(config: PipelineConfig, clips: Sequence[_Clip], console: Console) -> list[ClipProof]:
    """Computes `clips` one after the other; what ends that is the error of all that are left."""
    from svdpp.cli.progress import Progress
    from svdpp.plan.schedule import build_schedule, data_parallel_routes
    from svdpp.verification import reference
    from svdpp.worker.messages import ClipDone

    proofs = [ClipProof(path=clip.path) for clip in clips]

    def compare(rank: int, event: Event) -> None:  # noqa: ARG001
        if isinstance(event, ClipDone):
            recorded = clips[event.clip].record
            proofs[event.clip].checks = [
                {"what": name, "recorded": recorded[name], "recomputed": event.record[name]}
                for name in _HASHES
            ]

    routes = data_parallel_routes(config.sampling.num_inference_steps, 1, range(len(clips)))
    try:
        with Progress(console, "sequential", build_schedule(routes, 1)) as progress:
            requests = [clip.request for clip in clips]
            reference.run_reference(config, requests, observers=(progress, compare))
    except SvdppError as error:
        for proof in proofs:
            proof.error = None if proof.checks else error
    return proofs
