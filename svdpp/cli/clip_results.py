"""Result that `svdpp run` prints: a line for each clip, and an error if clips are lost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from svdpp.cli.console import Console, pluralize
from svdpp.errors import error_from_dict, worst_of


def print_clips(
    console: Console,
    folder: Path,
    skipped: Sequence[dict[str, Any]],
    made: Sequence[dict[str, Any]],
    lost: Sequence[dict[str, Any]],
) -> None:
    """Print the result as JSON, or a line for each clip.

    Args:
        console: Console of the command.
        folder: Folder of the clips.
        skipped: Metadata of clips that were finished before the run.
        made: Metadata of clips that the run has made.
        lost: Entries for lost clips, each with `error` and `output`. `output` is None for an input
            of which no clip was made.
    """
    clips = [*skipped, *made, *lost]
    console.json({"schema_version": 1, "folder": str(folder), "clips": clips})
    for metadata in skipped:
        console.result(f"{folder / metadata['output']}  (was finished)")
    for metadata in made:
        console.result(f"{folder / metadata['output']}")
    for clip in lost:
        name = folder / clip["output"] if clip["output"] else "(no clip)"
        console.result(f"{name}  (lost: {clip['error']['message']})")


def raise_lost(lost: Sequence[dict[str, Any]], num_clips: int) -> None:
    """Raise the error with the highest exit code, if clips are lost.

    Args:
        lost: Entries as for `print_clips`.
        num_clips: Number of all clips, including the lost ones.

    Raises:
        SvdppError: A clip is lost.
    """
    if not lost:
        return
    errors = [error_from_dict(clip["error"]) for clip in lost]
    error = worst_of(errors, f"{len(lost)} of {pluralize(num_clips, 'clip')} lost")
    error.details |= {"lost": len(lost), "clips": num_clips}
    raise error
