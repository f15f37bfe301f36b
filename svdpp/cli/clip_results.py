"""Result that `svdpp run` prints: a line for each clip, and an error if clips have failed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from svdpp.cli.console import Console
from svdpp.errors import error_from_dict, pluralize, worst_of


def print_clips(
    console: Console,
    folder: Path,
    skipped: Sequence[dict[str, Any]],
    made: Sequence[dict[str, Any]],
    failed: Sequence[dict[str, Any]],
) -> None:
    """Print the result of `svdpp run`: as JSON, or a line for each clip.

    Args:
        console: Console of the command.
        folder: Folder of the clips.
        skipped: Metadata of clips that were finished before the run.
        made: Metadata of clips that the run has made.
        failed: Entries for failed clips, each with `error` and `output`. `output` is None for an
            input for which no clip was made.
    """
    clips = [*skipped, *made, *failed]
    console.json({"schema_version": 1, "folder": str(folder), "clips": clips})
    for metadata in skipped:
        console.result(f"{folder / metadata['output']}  (was finished)")
    for metadata in made:
        console.result(f"{folder / metadata['output']}")
    for clip in failed:
        name = folder / clip["output"] if clip["output"] else "(no clip)"
        console.result(f"{name}  (failed: {clip['error']['message']})")


def raise_failed(failed: Sequence[dict[str, Any]], num_clips: int) -> None:
    """Raise the error with the highest exit code of a run's failed clips, if any failed.

    Args:
        failed: Entries as for `print_clips`.
        num_clips: Number of all clips, including the failed ones.

    Raises:
        SvdppError: A clip has failed.
    """
    if not failed:
        return
    errors = [error_from_dict(clip["error"]) for clip in failed]
    error = worst_of(errors, f"{len(failed)} of {pluralize(num_clips, 'clip')} failed")
    error.details |= {"lost": len(failed), "clips": num_clips}
    raise error
