"""The check of existing outputs: finished clips, and files of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from svdpp.config import OutputConfig
from svdpp.errors import InputError, RequestError
from svdpp.media import output_files, video
from svdpp.worker.clip_metadata import (
    checked_clip_metadata,
    identity,
    parameters_sha256,
    read_clip_metadata,
)


def taken_places(output: OutputConfig) -> list[Path]:
    """The existing files that a clip would replace, which needs `--overwrite`.

    These are the clip's file and its JSON.
    """
    return [path for path in map(Path, (output.path, output.json_path)) if path.exists()]


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
        same + "--overwrite replaces it; another --out folder keeps both",
    )


def _embedded(path: Path) -> dict[str, Any]:
    try:
        return checked_clip_metadata(video.read_metadata(path), f"{path.name!r} is not a clip")
    except InputError as error:
        raise RequestError(
            f"{path.name!r} exists without a JSON, and svdpp did not write it",
            "--overwrite replaces it; another --out folder keeps both",
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
            "--overwrite replaces it; another --out folder keeps both",
        )
    return is_readable
