"""Owns what earlier runs left in the places of clips: finished clips, drafts, files of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from svdpp.config import DraftConfig, OutputConfig
from svdpp.errors import InputError, RequestError
from svdpp.media import output_files, video
from svdpp.worker.clip_metadata import (
    IDENTITY,
    checked_clip_metadata,
    parameters_sha256,
    read_clip_metadata,
    read_draft,
)


def taken_places(output: OutputConfig, draft: DraftConfig | None) -> list[Path]:
    """The files that a clip would replace, and so replaces only with `--overwrite`.

    The clip's file and its JSON; with a draft, the draft's as well. A draft that was not accepted,
    left by a run that was killed, does not count.
    """
    places = [output]
    if draft is not None and not _is_leftover(output.draft):
        places.append(output.draft)
    paths = [Path(name) for place in places for name in (place.path, place.json_path)]
    return [path for path in paths if path.exists()]


def clip_as_asked(
    output: OutputConfig, metadata: dict[str, Any], draft: DraftConfig | None
) -> dict[str, Any] | None:
    """The JSON of a clip that is there, whole and as asked for; None where it has to be made.

    A draft counts if one of the same quality would be accepted again. A run that is killed between
    a file and its JSON leaves a clip without JSON: it is written now.

    Raises:
        RequestError: what is there is another clip, or was changed since svdpp wrote it.
        InputError: the JSON there is no clip's.
        OutputError: a JSON cannot be written.
    """
    exact = _whole(output, metadata)
    if exact is not None or draft is None or _is_leftover(output.draft):
        return exact
    accepted = _whole(output.draft, metadata)
    if accepted is None or draft.accept_psnr_db is None:
        return None
    about = accepted.get("draft") or {}
    return accepted if about.get("accept_psnr_db", 0) >= draft.accept_psnr_db else None


def _is_leftover(output: OutputConfig) -> bool:
    """Whether it is a draft that was not accepted."""
    about = read_draft(output)
    return about is not None and "accept_psnr_db" not in about


def _whole(output: OutputConfig, metadata: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON of `output`, if file and JSON are there, whole, and of this clip."""
    path, json_path = Path(output.path), Path(output.json_path)
    if json_path.exists():
        there = read_clip_metadata(json_path)
        _check_same(path, there, metadata)
        return there if path.exists() and _is_whole(path, output, there) else None
    if not path.exists():
        return None
    there = _embedded(path)
    _check_same(path, there, metadata)
    if not _is_whole(path, output, there):
        return None
    there["file_sha256"] = video.file_sha256(path)
    output_files.write_json(json_path, there)
    return there


def _check_same(path: Path, there: dict[str, Any], metadata: dict[str, Any]) -> None:
    if parameters_sha256(there) == metadata["parameters_sha256"]:
        return
    name = next(name for name in IDENTITY if there[name] != metadata[name])
    # The default number of threads depends on the number of ranks.
    same = f"--threads {there[name]} keeps it; " if name == "num_threads" else ""
    raise RequestError(
        f"{path.name!r} exists with another {name}: {there[name]!r}, now {metadata[name]!r}",
        same + "--overwrite replaces it; another --out folder keeps both",
    )


def _embedded(path: Path) -> dict[str, Any]:
    """The metadata inside a file that has no JSON.

    Raises:
        RequestError: it is no clip's.
    """
    try:
        return checked_clip_metadata(video.read_metadata(path), f"{path.name!r} is no clip")
    except InputError as error:
        raise RequestError(
            f"{path.name!r} exists, without a JSON, and is no clip of svdpp's",
            "--overwrite replaces it; another --out folder keeps both",
        ) from error


def _is_whole(path: Path, output: OutputConfig, there: dict[str, Any]) -> bool:
    """Whether the file is the one that its JSON is about; False if it is damaged.

    Raises:
        RequestError: it can be played, but is not the file that was written.
    """
    recorded = there["file_sha256"]
    try:
        if recorded is not None and video.file_sha256(path) == recorded:
            return True
        is_readable = bool(len(video.read_frames(path, output.format)) == there["num_frames"])
    except InputError:
        return False
    if recorded is not None and is_readable:
        raise RequestError(
            f"{path.name!r} is not the file that its JSON describes: it was changed or replaced",
            "--overwrite replaces it; another --out folder keeps both",
        )
    return is_readable
