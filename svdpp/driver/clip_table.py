"""`ClipTable`: the file `clips.jsonl`, with one line for each clip: its request and result."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from svdpp.config import SAMPLING_CLASSES
from svdpp.config.limits import read_small_file
from svdpp.config.sampling import params_by_field
from svdpp.driver.run_job import RunJob, job_key
from svdpp.errors import InputError, redact_all, redaction
from svdpp.media import video

#: Name of the table's file in the output folder.
CLIP_TABLE = "clips.jsonl"

# Maximum size, in bytes, of a `clips.jsonl` that svdpp reads. The file of a run with `MAX_CLIPS`
# clips is far smaller.
_MAX_BYTES = 2**30
_REQUEST_FIELDS = (
    *("output", "input", "last_image", "references", "videos"),
    *("prompt", "negative_prompt", "lora", "seed"),
)
_RESULT_FIELDS = (
    *("parameters_sha256", "input_sha256", "latents_sha256", "frames_sha256", "audio_sha256"),
    *("file_sha256", "exact", "compute_seconds", "wall_seconds", "host"),
)


def read_names(path: Path) -> dict[str, list[str]]:
    """Return the names (without suffixes) of the clips in a run's `clips.jsonl`, by job hash.

    The job hash is the result of `job_key`: a hash of a job's inputs and parameters. Equal jobs
    have the same hash, so a hash can have several names.

    Args:
        path: Path of the table, which need not exist.

    Raises:
        InputError: The file cannot be read, or is not the table of a run.
    """
    if not path.exists():
        return {}
    data = read_small_file(path, "table of clips", _MAX_BYTES)
    names: dict[str, list[str]] = {}
    try:
        for line in data.splitlines():
            row = json.loads(line)
            # A row without an output is skipped: its input had an error.
            key, output = row["job"], row["output"]
            if {"index", "state"} <= row.keys() and isinstance(output, str):
                names.setdefault(str(key), []).append(_without_suffix(output))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        text = f"{str(path)!r} is not a table of clips that svdpp run wrote"
        raise InputError(text, details={"path": str(path)}) from error
    return names


def read_done(path: Path) -> dict[str, str]:
    """Return the finished clips in a run's `clips.jsonl`: a dict from file name to job hash.

    The job hash is the result of `job_key`: a hash of a job's inputs and parameters.

    Args:
        path: Path of the table, which need not exist.

    Raises:
        InputError: The file cannot be read, or is not the table of a run.
    """
    if not read_names(path):
        return {}
    rows = map(json.loads, read_small_file(path, "table of clips", _MAX_BYTES).splitlines())
    return {row["output"]: row["job"] for row in rows if row["state"] == "done"}


def _without_suffix(output: str) -> str:
    suffixes = [suffix for suffix in video.FORMAT_SUFFIXES.values() if suffix]
    ending = Path(output).suffix
    return output[: -len(ending)] if ending in suffixes else output


class ClipTable:
    """Rows of `clips.jsonl`, the JSON Lines table of a run, in the order of the jobs.

    The rows are held as text, because text needs little memory. `RunManifest` writes the file.

    Args:
        path: Path of `clips.jsonl`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows: list[str] = []
        self._clean: Callable[[str], str] = redaction()

    def fill(self, rows: Sequence[str]) -> None:
        """Replace all rows of the table. `RunManifest` writes them to `clips.jsonl` later.

        Args:
            rows: Rows as JSON text, from `row_of_clip` and `row_of_error`.
        """
        self._rows = list(rows)

    def row_of_clip(self, index: int, job: RunJob, metadata: Mapping[str, Any], state: str) -> str:
        """Return the row of `clips.jsonl` for a clip, as JSON text with a line end.

        Args:
            index: Position of the job among the jobs of the run, from 0.
            job: Job of the clip.
            metadata: JSON of the clip. It has hashes and times if the clip is finished.
            state: State of the clip, such as `pending` or `done`.
        """
        params = params_by_field(SAMPLING_CLASSES[metadata["family"]])
        return self._text(
            {
                **{"index": index, "line": job.line, "state": state},
                **{name: metadata[name] for name in _REQUEST_FIELDS if name in metadata},
                **{name: metadata[name] for name in ("width", "height", "fit")},
                **{field: metadata[param.name] for field, param in params.items()},
                **_results(metadata),
                "job": job_key(job),
            }
        )

    def row_of_error(self, error: Mapping[str, Any], line: int | None) -> str:
        """Return the row of `clips.jsonl` for an input from which no clip can be made.

        Args:
            error: Error of the input (an image, or a line of a jobs file), as a JSON object.
            line: Number of the line in the jobs file, from 1; None: the run has no jobs file.
        """
        row = {"index": None, "line": line, "state": "failed", "output": None, "error": error}
        return self._text({**row, "job": None})

    def update(self, index: int, state: str, result: Mapping[str, Any], **more: Any) -> None:
        """Update a clip's row of `clips.jsonl`: the state, and for a finished clip the results.

        Args:
            index: Position of the clip's job among the jobs of the run, from 0.
            state: New state.
            result: JSON of a finished clip, whose hashes and times are added to the row; empty for
                other states.
            more: Further fields of the row, such as `rank` and `error`.
        """
        row = json.loads(self._rows[index])
        self._rows[index] = self._text({**row, "state": state, **_results(result), **more})

    def mark_lost(self, output: str, error: Mapping[str, Any]) -> None:
        """Mark a finished clip as failed in `clips.jsonl`, because the clip's file is missing.

        Args:
            output: Name of the clip's file.
            error: Error as a JSON object.
        """
        for index, text in enumerate(self._rows):
            if json.loads(text)["output"] == output:
                self.update(index, "failed", {}, error=error)

    def text(self) -> str:
        """Return the content of `clips.jsonl`, one line for each clip."""
        return "".join(self._rows)

    def _text(self, row: Mapping[str, Any]) -> str:
        return json.dumps(redact_all(dict(row), self._clean)) + "\n"


def _results(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metadata[name] for name in _RESULT_FIELDS if name in metadata}
