"""The run manifest, `run.json`: the state of each clip of a run, kept current on disk."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from svdpp.config.limits import read_small_file
from svdpp.errors import InputError, OutputError, RequestError, redact_all
from svdpp.media import output_files
from svdpp.plan.actions import Action, Kind
from svdpp.worker.messages import ActionDone, ClipDone, ClipFailed, Event, Heartbeat

State = Literal["pending", "running", "done", "failed"]

SCHEMA_VERSION = 1
NAME = "run.json"

# Often enough to follow a run, seldom enough for a network folder.
_WRITE_SECONDS = 1.0
# Of the time, the share that writes of a long manifest may take.
_WRITE_SHARE = 0.02
# Far above the size of a manifest with the largest allowed number of clips.
_MAX_BYTES = 2**30
_SETTLED = ("done", "failed")


def read_manifest(path: Path) -> dict[str, Any]:
    """A run's manifest."""
    data = read_small_file(path, "run's manifest", _MAX_BYTES)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    if not (isinstance(content, dict) and {"schema_version", "clips"} <= content.keys()):
        hint = f"name a folder that svdpp run wrote, or its {NAME}"
        raise InputError(f"{str(path)!r} is not a run's manifest", hint)
    if content["schema_version"] != SCHEMA_VERSION:
        raise InputError(f"{str(path)!r}: schema_version must be {SCHEMA_VERSION}")
    return content


def check_replaceable(path: Path) -> None:
    """Refuses to replace a file that is not a run's manifest."""
    if not path.exists():
        return
    try:
        read_manifest(path)
    except InputError as error:
        raise RequestError(
            f"{str(path)!r} exists and is not a run's manifest",
            "--overwrite replaces it; another --out folder keeps it",
        ) from error


class RunManifest:
    """A context manager that is also an observer of a pipeline's events.

    A killed run leaves its last manifest behind, in which clips are still `running`. If the
    manifest cannot be written during the run, as on a full disk, the run goes on and tries again.

    `clips` are the pipeline's clips, by index; `before` those that were finished or lost before
    it began.
    """

    def __init__(
        self,
        path: Path,
        run: Mapping[str, Any],
        clips: Sequence[Mapping[str, Any]],
        before: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._path = path
        self._run = redact_all(run)
        self._clips = redact_all([{**clip, "state": "pending"} for clip in clips])
        self._before = redact_all(before)
        self._measured: Mapping[str, Any] | None = None
        self._next_write = 0.0
        self._changed = True

    def __enter__(self) -> RunManifest:
        self._write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        for clip in self._clips:
            if clip["state"] == "running":
                clip["state"] = "pending"  # no rank works on it any longer
                self._changed = True
        if self._changed and kind is None:
            self._write()
        elif self._changed:
            self._try_to_write()  # an error here would hide the one that ended the run

    def __call__(self, rank: int, event: Event) -> None:  # noqa: ARG002
        """Takes one event of a rank."""
        match event:
            case (
                Heartbeat(action=Action(kind=Kind.ENCODE | Kind.LOAD, clip=clip))
                | ActionDone(action=Action(kind=Kind.ENCODE | Kind.LOAD, clip=clip))
            ):
                self._set(clip, "running")
            case ClipDone():
                self._set(event.clip, "done", **how_made(event.metadata))
            case ClipFailed():
                self._set(event.clip, "failed", error=event.error)
            case _:
                pass
        if self._changed and time.monotonic() >= self._next_write:
            self._try_to_write()

    def measured(self, figures: Mapping[str, Any]) -> None:
        """Adds the figures of the run, for `svdpp report`; they are written on leaving."""
        self._measured = redact_all(figures)
        self._changed = True

    def _set(self, clip: int, state: State, **more: Any) -> None:
        if self._clips[clip]["state"] in (*_SETTLED, state):
            return
        self._clips[clip].update(state=state, **redact_all(more))
        self._changed = True

    def _try_to_write(self) -> None:
        with contextlib.suppress(OutputError):
            self._write()

    def _write(self) -> None:
        begun = time.monotonic()
        clips = [*self._before, *self._clips]
        content = {"schema_version": SCHEMA_VERSION, **self._run, "clips": clips}
        measured = {} if self._measured is None else {"measured": self._measured}
        try:
            output_files.write_json(self._path, {**content, **measured})
        except OutputError:  # on a full disk the states of the clips matter more
            if not measured:
                raise
            output_files.write_json(self._path, content)
        finally:
            seconds = time.monotonic() - begun
            self._next_write = begun + max(_WRITE_SECONDS, seconds / _WRITE_SHARE)
        self._changed = False


def how_made(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Fields from a finished clip's metadata: its host."""
    return {"host": metadata["host"]} if metadata.get("host") else {}
