"""Owns `run.json`: what became of each clip of a run, true on disk at every moment."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from svdpp.errors import InputError, OutputError
from svdpp.media import output_files
from svdpp.plan.actions import Action, Kind
from svdpp.redaction import redact_all
from svdpp.worker.messages import ActionDone, ClipDone, ClipFailed, DraftDone, Event, Heartbeat

State = Literal["pending", "running", "done", "failed"]

SCHEMA_VERSION = 1
NAME = "run.json"

# Often enough to see where a run stands, seldom enough for a folder on a network.
_WRITE_SECONDS = 1.0
_SETTLED = ("done", "failed")
_BEGINNINGS = (Kind.ENCODE, Kind.LOAD)


def read_manifest(path: Path) -> dict[str, Any]:
    """A run's manifest.

    Raises:
        InputError: the file cannot be read, or is none.
    """
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{str(path)!r} is no run's manifest: {error}") from error
    if not (isinstance(content, dict) and {"schema_version", "clips"} <= content.keys()):
        raise InputError(f"{str(path)!r} is no run's manifest")
    if content["schema_version"] != SCHEMA_VERSION:
        raise InputError(f"{str(path)!r}: schema_version must be {SCHEMA_VERSION}")
    return content


def check_replaceable(path: Path) -> None:
    """Makes sure that a run does not replace a file of that name which is something else.

    Raises:
        OutputError: it would.
    """
    if not path.exists():
        return
    try:
        read_manifest(path)
    except InputError as error:
        raise OutputError(
            f"the run's manifest would replace {str(path)!r}, which is something else",
            "name another folder with --out",
        ) from error


class RunManifest:
    """A context manager that is also an observer of a pipeline's events.

    A run that is killed leaves its last manifest behind: what was running then still says so. A
    manifest that cannot be written, on a full disk, ends no run that could go on: it is tried
    again.

    Args:
        path: of the file, replaced whole each time.
        about: what the file says of the run beside its clips.
        clips: what the file says of each clip of the pipeline beside its state, by index.
        before: what it says of clips that were finished, or lost, before the pipeline began.

    Raises:
        OutputError: on entry or on leaving, where the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        about: Mapping[str, Any],
        clips: Sequence[Mapping[str, Any]],
        before: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._path = path
        self._about = dict(about)
        self._clips: list[dict[str, Any]] = [{**clip, "state": "pending"} for clip in clips]
        self._before = [dict(clip) for clip in before]
        self._written_at = 0.0
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
        if self._changed and kind is None:
            self._write()
        elif self._changed:
            self._try_to_write()  # the error that ended the run is the one to hear of

    def __call__(self, rank: int, event: Event) -> None:  # noqa: ARG002
        """Takes one event of a rank."""
        match event:
            case Heartbeat() if event.action:
                self._see_action(Action.parse(event.action))
            case ActionDone():
                self._see_action(Action.parse(event.action))
            case DraftDone():
                self._set(event.clip, "running", draft=event.record["output"])
            case ClipDone():
                self._set(event.clip, "done", **how_made(event.record))
            case ClipFailed():
                self._set(event.clip, "failed", error=event.error)
            case _:
                pass
        if self._changed and time.monotonic() - self._written_at >= _WRITE_SECONDS:
            self._try_to_write()

    def _see_action(self, action: Action) -> None:
        if action.kind in _BEGINNINGS and self._clips[action.clip]["state"] == "pending":
            self._set(action.clip, "running")

    def _set(self, clip: int, state: State, **more: Any) -> None:
        if self._clips[clip]["state"] in _SETTLED:
            return  # such as the exact path of an accepted draft, come to harm meanwhile
        self._clips[clip].pop("draft", None)  # it is there until the clip is
        self._clips[clip].update(state=state, **more)
        self._changed = True

    def _try_to_write(self) -> None:
        with contextlib.suppress(OutputError):
            self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        clips = [*self._before, *self._clips]
        record = {"schema_version": SCHEMA_VERSION, **self._about, "clips": clips}
        output_files.write_json(self._path, redact_all(record))
        self._changed = False


def how_made(record: Mapping[str, Any]) -> dict[str, Any]:
    """What a finished clip's own record adds: the host that has it, and that it is no exact one."""
    host = {"host": record["host"]} if record.get("host") else {}
    if record.get("exact", True):
        return host
    return {**host, "exact": False, "output": record["output"]}
