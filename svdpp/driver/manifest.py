"""`RunManifest`: the file `run.json` with the state of each clip, updated during the run.

The table `clips.jsonl` is written together with the manifest.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from svdpp.config import PipelineConfig
from svdpp.config.limits import read_small_file
from svdpp.driver.clip_table import ClipTable
from svdpp.driver.file_thread import FileThread
from svdpp.driver.output_policy import MANIFEST
from svdpp.driver.run_plan import RunPlan
from svdpp.errors import InputError, OutputError, error_to_dict, redact_all
from svdpp.media import output_files
from svdpp.plan.actions import Action, Kind
from svdpp.worker.messages import ActionDone, ClipDone, ClipFailed, Event, Heartbeat

SCHEMA_VERSION = 1

# Minimum time in seconds between two writes of the manifest. The time is short enough for users who
# watch the run in the file, and long enough not to overload a network folder.
_WRITE_SECONDS = 1.0
# Maximum size, in bytes, of a `run.json` that svdpp reads. The file of a run with `MAX_CLIPS`
# clips is far smaller.
_MAX_BYTES = 2**30
# Timeout in seconds of the writes at the beginning and the end of a run. After this timeout, the
# output folder counts as unresponsive.
_LAST_WRITE_SECONDS = 20.0


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the content of a run's manifest (`run.json`).

    Raises:
        InputError: The file is missing, is not a manifest, or has another schema version.
    """
    data = read_small_file(path, "run's manifest", _MAX_BYTES)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if not (isinstance(content, dict) and {"schema_version", "clips"} <= content.keys()):
        hint = f"give an output folder of svdpp run, or give the {MANIFEST} in it"
        raise InputError(f"{str(path)!r} is not a run's manifest", hint)
    if content["schema_version"] != SCHEMA_VERSION:
        raise InputError(
            f"{str(path)!r}: schema_version must be {SCHEMA_VERSION}, "
            f"got {content['schema_version']!r}",
            details={"schema_version": content["schema_version"], "expected": SCHEMA_VERSION},
        )
    return content


def open_manifest(
    path: Path,
    config: PipelineConfig,
    clips: RunPlan,
    failed: Sequence[Mapping[str, Any]],
    table: Path,
) -> RunManifest:
    """Create the `RunManifest`, and the table of clips, of a run that is about to begin.

    The files are written when the manifest's `with` block is entered.

    Args:
        path: Path of `run.json`.
        config: Configuration of the pipeline.
        clips: Plan of the run: clips to make, and finished clips.
        failed: Entry of `run.json` for each input from which no clip can be made. In the entry,
            `output` is None, and `error` is the reason as a JSON object.
        table: Path of `clips.jsonl`.
    """
    run = {
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": config.model.name,
        "world_size": config.world_size,
        "device": config.device,
        "num_inference_steps": config.sampling.num_inference_steps,
    }
    before = [{**_entry(made), **_host(made), "state": "done"} for made in clips.skipped]
    before += [{**entry, "state": "failed"} for entry in failed]
    clip_table = ClipTable(table)
    rows: dict[int, str] = {
        index: clip_table.row_of_clip(index, job, made, "done")
        for (index, job), made in zip(clips.skipped_jobs, clips.skipped, strict=True)
    }
    begun = []
    for clip in clips.clips:
        (metadata,) = clips.metadata_of([clip])
        begun.append({**_entry(metadata), "from_step": clip.done_steps})
        rows[clip.index] = clip_table.row_of_clip(clip.index, clip.job, metadata, "pending")
    errors = [
        clip_table.row_of_error(entry["error"], entry["error"].get("details", {}).get("line"))
        for entry in failed
    ]
    clip_table.fill([rows[index] for index in sorted(rows)] + errors)
    indices = [clip.index for clip in clips.clips]
    return RunManifest(path, run, begun, before, clip_table, indices)


def _entry(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metadata[name] for name in ("output", "input", "seed", "parameters_sha256")}


def _host(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {"host": metadata["host"]} if metadata.get("host") else {}


class RunManifest:
    """Context manager that observes the events of a pipeline and writes `run.json`.

    If the process is killed, `run.json` still has clips in the state `running`. If the run fails
    before a clip has begun, the `run.json` of the earlier run is restored. If a write fails during
    the run, the run continues, and the write is tried again. A separate thread writes the file,
    because the thread that handles the ranks' events must not block.

    Args:
        path: Path of `run.json`.
        run: Fields of `run.json` that describe the run as a whole.
        clips: Entry for each clip of the pipeline, by the clip's index.
        before: Entries of clips that were finished or failed before the run began.
        table: Table `clips.jsonl`, which is written with the manifest; None: there is no table.
        indices: Number of the row in the table for each clip of the pipeline, by the clip's index.

    Raises:
        OutputError: `run.json` cannot be written at the beginning or the end of the block.
    """

    def __init__(
        self,
        path: Path,
        run: Mapping[str, Any],
        clips: Sequence[Mapping[str, Any]],
        before: Sequence[Mapping[str, Any]] = (),
        table: ClipTable | None = None,
        indices: Sequence[int] = (),
    ) -> None:
        self._path = path
        self._table = table
        self._indices = indices
        self._content = redact_all({"schema_version": SCHEMA_VERSION, **run})
        self._clips = redact_all([{**clip, "state": "pending"} for clip in clips])
        self._content["clips"] = [*redact_all(before), *self._clips]
        self._next_write = 0.0
        self._changed = True
        self._has_begun = False
        self._earlier: dict[Path, str | None] = {}
        self._files = FileThread("manifest")
        self._writing: Future[None] | None = None

    def __enter__(self) -> RunManifest:
        for path in self._paths:
            self._earlier[path] = None
            with contextlib.suppress(OSError, ValueError):
                self._earlier[path] = path.read_text()
        self._write_at_once()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for index, clip in enumerate(self._clips):
            if clip["state"] == "running":
                clip["state"] = "pending"  # no rank works on the clip any more
                self._update_row(index, "pending", {})
                self._changed = True
        # If an error has ended the run, an error of this write is ignored, because it would hide
        # the error that ended the run.
        with contextlib.nullcontext() if kind is None else contextlib.suppress(OutputError):
            if kind is not None and not self._has_begun:
                self._restore()
            elif self._changed or self._writing is not None:
                self._write_at_once()

    def __call__(self, rank: int, event: Event) -> None:
        """Update the state of a clip in `run.json` and `clips.jsonl` from an event of a rank."""
        match event:
            case (
                Heartbeat(action=Action(kind=Kind.ENCODE | Kind.LOAD_CHECKPOINT, clip=clip))
                | ActionDone(action=Action(kind=Kind.ENCODE | Kind.LOAD_CHECKPOINT, clip=clip))
            ):
                self._set(clip, "running")
            case ClipDone():
                self._set(event.clip, "done", event.metadata, rank, **_host(event.metadata))
            case ClipFailed():
                self._set(event.clip, "failed", {}, rank, error=event.error)
            case _:
                pass
        if self._writing is not None and self._writing.done():
            self._changed |= self._writing.exception() is not None
            self._writing = None
        if self._changed and self._writing is None and time.monotonic() >= self._next_write:
            self._write()

    def set_measurements(self, metrics: Mapping[str, Any]) -> None:
        """Set the run's metrics in `run.json`, for `svdpp report`.

        The metrics are written at the end of the `with` block.

        Args:
            metrics: JSON values by name.
        """
        self._content["measured"] = redact_all(metrics)
        self._changed = True

    def mark_lost(self, output: str, error: OutputError) -> None:
        """Mark a finished clip as failed in `run.json`, because the clip's file was removed.

        Args:
            output: Name of the clip's file, as in the clip's entry of `run.json`.
            error: Error that names the missing file.
        """
        for clip in self._content["clips"]:
            if clip["output"] == output:
                clip.update(state="failed", error=redact_all(error_to_dict(error)))
                self._changed = True
        if self._table is not None:
            self._table.mark_lost(output, error_to_dict(error))

    def _set(
        self,
        clip: int,
        state: Literal["running", "done", "failed"],
        result: Mapping[str, Any] | None = None,
        rank: int | None = None,
        **more: Any,
    ) -> None:
        if self._clips[clip]["state"] in ("done", "failed", state):
            return
        self._clips[clip].update(state=state, **redact_all(more))
        about = more if rank is None else {**more, "rank": rank}
        self._update_row(clip, state, result or {}, **about)
        self._changed = self._has_begun = True

    def _update_row(self, clip: int, state: str, result: Mapping[str, Any], **more: Any) -> None:
        if self._table is not None:
            self._table.update(self._indices[clip], state, result, **more)

    @property
    def _paths(self) -> list[Path]:
        return [self._path] if self._table is None else [self._path, self._table.path]

    def _write(self) -> None:
        begun = time.monotonic()
        texts = [output_files.json_text(self._content)]
        if self._table is not None:
            texts.append(self._table.text())
        # For a large run, the JSON text takes long to build. A pause of 50 times this duration
        # keeps the cost below 2% of this thread's time.
        self._next_write = begun + max(_WRITE_SECONDS, 50 * (time.monotonic() - begun))
        self._changed = False
        files = dict(zip(self._paths, texts, strict=True))
        self._writing = self._files.submit(lambda: _replace_files(files))

    def _write_at_once(self) -> None:
        self._write()
        self._wait()

    def _restore(self) -> None:
        """Restore `run.json` and `clips.jsonl` of the earlier run, because no clip has begun."""
        earlier = self._earlier
        self._writing = self._files.submit(lambda: _replace_files(earlier))
        self._wait()

    def _wait(self) -> None:
        assert self._writing is not None
        writing, self._writing = self._writing, None
        try:
            writing.result(_LAST_WRITE_SECONDS)
        except TimeoutError:
            raise OutputError(
                f"{str(self._path)!r} cannot be written: its folder has not responded for "
                f"{_LAST_WRITE_SECONDS:.0f} s",
                details={"path": str(self._path), "timeout_seconds": _LAST_WRITE_SECONDS},
            ) from None


def _replace_files(texts: Mapping[Path, str | None]) -> None:
    """Write the given text to each file. A file whose text is None is removed."""
    for path, text in texts.items():
        if text is None:
            path.unlink(missing_ok=True)
        else:
            output_files.write_text(path, text)


def find_missing_outputs(
    folder: Path, clips: Sequence[Mapping[str, Any]]
) -> dict[str, OutputError]:
    """Return an error for each finished clip whose video or JSON is missing in the output folder.

    A user may have deleted files while the run was writing other files.

    Args:
        folder: Output folder of the run.
        clips: Metadata of the finished clips, in which `output` is the name of the video.

    Returns:
        Errors by `output`, in the order of `clips`.
    """
    try:
        there = set(os.listdir(folder))
    except OSError:
        there = set()
    missing = {}
    for name in (clip["output"] for clip in clips):
        if gone := [each for each in (name, f"{name}.json") if each not in there]:
            missing[name] = OutputError(
                f"{str(folder / gone[0])!r} is gone: the file was removed during the run",
                "the same command with `resume` makes the clip again",
                details={"path": str(folder / gone[0])},
            )
    return missing
