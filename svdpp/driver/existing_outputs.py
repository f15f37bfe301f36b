"""Owns what earlier runs have left in the places of clips: finished ones, drafts, other things."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from svdpp.config import DraftConfig, OutputConfig
from svdpp.errors import InputError, RequestError
from svdpp.media import video
from svdpp.worker.clip_metadata import IDENTITY, parameters_sha256, read_clip_metadata, read_draft


def taken_places(output: OutputConfig, draft: DraftConfig | None) -> list[Path]:
    """Where something lies that a clip replaces only if the user says so.

    A draft that nobody has accepted, of a run that was killed, may go; so may the JSON of a clip
    that is gone, but no other JSON.
    """
    taken = [Path(output.path)]
    if not _is_clip_metadata(Path(output.json_path)):
        taken.append(Path(output.json_path))
    if draft is not None and not _is_leftover(output.draft):
        taken.append(Path(output.draft.path))
    return [path for path in taken if path.exists()]


def clip_as_asked(
    output: OutputConfig, record: dict[str, Any], draft: DraftConfig | None
) -> dict[str, Any] | None:
    """The record of a clip that is there, whole and as asked for; None where there is none.

    An approximation counts where one as good would be accepted again.

    Raises:
        RequestError: one was made with other parameters.
        InputError: what is beside it is no clip's JSON.
    """
    exact = _whole(output, record)
    if exact is not None or draft is None or _is_leftover(output.draft):
        return exact
    accepted = _whole(output.draft, record)
    if accepted is None or draft.accept_psnr_db is None:
        return None
    about = accepted.get("draft") or {}
    return accepted if about.get("accept_psnr_db", 0) >= draft.accept_psnr_db else None


def _is_leftover(output: OutputConfig) -> bool:
    """Whether it is an approximation that nobody has accepted."""
    about = read_draft(output)
    return about is not None and "accept_psnr_db" not in about


def _is_clip_metadata(path: Path) -> bool:
    try:
        read_clip_metadata(path)
    except InputError:
        return False
    return True


def _whole(output: OutputConfig, record: dict[str, Any]) -> dict[str, Any] | None:
    """The record beside `output`, where both are there and whole."""
    path, json_path = Path(output.path), Path(output.json_path)
    if not (path.exists() and json_path.exists()):
        return None
    there = read_clip_metadata(json_path)
    if parameters_sha256(there) != record["parameters_sha256"]:
        name = next(name for name in IDENTITY if there[name] != record[name])
        # On the CPU their default goes by the number of ranks.
        same = f"--threads {there[name]} keeps it; " if name == "num_threads" else ""
        raise RequestError(
            f"{path.name!r} exists with another {name}: {there[name]!r}, now {record[name]!r}",
            same + "--overwrite makes it anew; another --out folder keeps both",
        )
    try:
        frames = video.read_frames(path, output.format)
    except InputError:
        return None
    return there if len(frames) == record["num_frames"] else None
