"""Owns the log: one redacted loguru record for each event of a rank."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from svdpp.errors import OutputError
from svdpp.plan.draft import DraftPlan
from svdpp.plan.layout import Layout
from svdpp.redaction import printable, redact
from svdpp.worker.messages import (
    ActionDone,
    CheckpointLost,
    ClipDone,
    ClipFailed,
    DraftDone,
    DraftLost,
    Event,
    Failed,
    Joined,
    PromptCut,
    StepDone,
    TransferDone,
)

if TYPE_CHECKING:
    from loguru import Message, Record

_FORMAT = "{time:HH:mm:ss.SSS} {level: <5} rank {extra[rank]} {message}"


def open_log(
    *,
    verbosity: int,
    log_file: Path | None,
    write: Callable[[str], Any] = sys.stderr.write,
    quiet: bool = False,
) -> None:
    """Sends records to stderr by verbosity, and all of them to a file of JSON lines.

    Without verbosity stderr gets only remarks, such as that a download begins.

    Raises:
        OutputError: the file cannot be written.
    """
    logger.remove()
    logger.configure(extra={"rank": "-"}, patcher=_redact)

    def sink(message: Message) -> None:
        # The lines of a traceback are indented, so that no name looks like another record.
        write(str(message).rstrip("\n").replace("\n", "\n    "))

    if verbosity > 0:
        level = "INFO" if verbosity == 1 else "DEBUG"
        logger.add(sink, level=level, format=_FORMAT, colorize=False)
    elif not quiet:
        logger.add(sink, level="INFO", filter=_is_remark, format="{message}", colorize=False)
    if log_file is not None:
        lines = _LogFile(log_file, write)
        logger.add(lines, level="DEBUG", serialize=True, format="{message}")


class _LogFile:
    """A sink for loguru; its own would print every record to stderr when the disk is full.

    A run must not fail because of its log: if the file cannot be written any more, this warns once.

    Args:
        path: appended to; parent folders are created.
        warn: takes the warning.

    Raises:
        OutputError: the file cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], Any]) -> None:
        self._path, self._warn = path, warn
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
        except OSError as error:
            raise OutputError(f"cannot write the log {str(path)!r}: {error.strerror}") from error

    def write(self, line: str) -> None:
        """Appends a line."""
        if self._file.closed:
            return
        try:
            self._file.write(line)
        except OSError as error:
            self.stop()
            reason = f"{str(self._path)!r} is no longer written: {error.strerror}"
            self._warn(f"warning: the log {redact(reason)}")

    def stop(self) -> None:
        """Closes the file; loguru calls it at the end."""
        with contextlib.suppress(OSError):  # closing writes the rest, which may fail again
            self._file.close()


def _is_remark(record: Record) -> bool:
    return "is_remark" in record["extra"]


def _redact(record: Record) -> None:
    record["message"] = printable(redact(record["message"]))
    record["file"].path = redact(record["file"].path)  # often below the home folder


# All ranks report a disk that is full; one warning is enough.
_WARNING_SECONDS = 3600.0


class EventLog:
    """Writes each event as one record.

    Args:
        plan: names each rank's share of the steps.
    """

    def __init__(self, plan: Layout | DraftPlan) -> None:
        self._shares = plan.all_shares
        self._next_warning = 0.0

    def __call__(self, rank: int, event: Event) -> None:
        """Takes one event of `rank`."""
        log = logger.bind(rank=rank)
        match event:
            case Joined():
                part = self._shares[rank]
                log.info(
                    "ready: steps {} to {} on {}, loaded in {:.2f} s",
                    *(part.start, part.end, event.device, event.load_seconds),
                )
            case TransferDone():
                arrow = "from" if event.direction == "recv" else "to"
                # A rank that lags makes its neighbour wait; the time of the link is separate.
                waited = f", waited {event.waited:.4f} s" if event.direction == "send" else ""
                log.info(
                    "{} clip {} at step {} {} rank {}: {} bytes in {:.4f} s{}",
                    *(event.direction, event.clip, event.next_step, arrow, event.peer),
                    *(event.num_bytes, event.seconds, waited),
                )
            case StepDone():
                log.debug("clip {} step {}: {:.4f} s", event.clip, event.step, event.seconds)
            case ActionDone():
                seconds = event.end - event.start
                log.debug("{}: {:.4f} s, waited {:.4f} s", event.action, seconds, event.waited)
            case ClipDone():
                log.info("clip {} is finished", event.clip)
            case DraftDone():
                rank_of = event.metadata["draft"]["rank"]
                log.info("clip {} has a draft, by rank {}", event.clip, rank_of)
            case DraftLost():
                log.warning("no draft of clip {} from here: {}", event.clip, event.error["message"])
            case PromptCut():
                # Prompts are private: a log may have other readers than their authors.
                log.warning(
                    "clip {}: the model does not read the last {} characters of its prompt",
                    *(event.clip, len(event.text)),
                )
            case CheckpointLost() if time.monotonic() >= self._next_warning:
                self._next_warning = time.monotonic() + _WARNING_SECONDS
                log.warning("{}: {}", event.error["message"], event.error["hint"])
            case ClipFailed():
                log.error("clip {} is lost: {}", event.clip, event.error["message"])
            case Failed():
                log.error("failed at {}: {}", event.action or "start", event.error["message"])
                log.debug("{}", event.traceback)
            case _:
                pass
