"""The log: one redacted loguru record for each event of a rank."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from svdpp.cli.console import Console
from svdpp.errors import OutputError, RankError
from svdpp.launch.world import World
from svdpp.plan.layout import Layout
from svdpp.redaction import printable, redact
from svdpp.worker.messages import (
    ActionDone,
    CheckpointLost,
    ClipDone,
    ClipFailed,
    Event,
    Failed,
    Joined,
    PromptCut,
    StepDone,
    TransferDone,
)

if TYPE_CHECKING:
    from loguru import Message, Record

    from svdpp.driver.pipeline import Pipeline

# A file of a server that runs for months: at most this size, and so many older ones beside it.
_FILE_BYTES = 50_000_000
_OLD_FILES = 4

_FORMAT = "{time:HH:mm:ss.SSS} {level: <5} rank {extra[rank]} {message}"


def open_log(
    *,
    verbosity: int,
    log_file: Path | None,
    write: Callable[[str], Any] = sys.stderr.write,
    quiet: bool = False,
    warns: bool = False,
) -> None:
    """Sends records to stderr by verbosity, and more of them to a file of JSON lines.

    Without verbosity stderr gets nothing, but with `warns` warnings; the file has no transfers and
    steps.
    """
    logger.remove()
    logger.configure(extra={"rank": "-"}, patcher=_redact)

    def sink(message: Message) -> None:
        # The lines of a traceback are indented, so that no name looks like another record.
        write(str(message).rstrip("\n").replace("\n", "\n    "))

    if verbosity > 0:
        level = "INFO" if verbosity == 1 else "DEBUG"
        logger.add(sink, level=level, format=_FORMAT, colorize=False)
    elif warns and not quiet:
        form = "{time:HH:mm:ss} {level: <7} {message}"
        logger.add(sink, level="WARNING", format=form, colorize=False)
    if log_file is not None:
        level = "DEBUG" if verbosity else "INFO"
        logger.add(_LogFile(log_file, write), level=level, serialize=True, format="{message}")


class _LogFile(RotatingFileHandler):
    """The file; loguru's own would print every record to stderr when the disk is full.

    A run must not fail because of its log: if the file cannot be written, this warns once.
    """

    terminator = ""  # a serialized record ends its line itself

    def __init__(self, path: Path, warn: Callable[[str], Any]) -> None:
        self._path, self._warn = path, warn
        bounds: dict[str, Any] = {"maxBytes": _FILE_BYTES, "backupCount": _OLD_FILES}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path, encoding="utf-8", errors="backslashreplace", **bounds)
        except OSError as error:
            raise OutputError(f"cannot write the log {str(path)!r}: {error.strerror}") from error

    def format(self, record: logging.LogRecord) -> str:
        """The text alone: it has the exception already."""
        return record.getMessage()

    def close(self) -> None:
        """Closes the file."""
        with contextlib.suppress(OSError):  # it writes the rest, which may fail again
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002
        """Says the first time why a record was not written."""
        error = redact(f"{str(self._path)!r}: {sys.exception()}")
        self._warn(f"warning: cannot write the log {error}")
        self._warn = lambda text: None  # noqa: ARG005


def _redact(record: Record) -> None:
    record["message"] = printable(redact(record["message"]))
    record["file"].path = redact(record["file"].path)  # often below the home folder


# All ranks report a disk that is full; one warning is enough.
_WARNING_SECONDS = 3600.0


class EventLog:
    """Writes each event as one record."""

    def __init__(self, layout: Layout, name_of: Callable[[int], str] = "clip {}".format) -> None:
        self._shares = layout.all_shares
        self._name_of = name_of
        self._next_warning = 0.0

    def __call__(self, rank: int, event: Event) -> None:
        """Takes one event of `rank`."""
        log = logger.bind(rank=rank)
        clip = self._name_of(event.clip) if hasattr(event, "clip") else ""
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
                log.debug(
                    "{} {} at step {} {} rank {}: {} bytes in {:.4f} s{}",
                    *(event.direction, clip, event.next_step, arrow, event.peer),
                    *(event.num_bytes, event.seconds, waited),
                )
            case StepDone():
                log.debug("{} step {}: {:.4f} s", clip, event.step, event.seconds)
            case ActionDone():
                seconds = event.end - event.start
                log.debug("{}: {:.4f} s, waited {:.4f} s", event.action, seconds, event.waited)
            case ClipDone():
                log.info("{} is finished", clip)
            case PromptCut():
                # Prompts are private: a log may have other readers than their authors.
                log.warning(
                    "{}: the model does not read the last {} characters of its prompt",
                    *(clip, len(event.text)),
                )
            case CheckpointLost() if time.monotonic() >= self._next_warning:
                self._next_warning = time.monotonic() + _WARNING_SECONDS
                log.warning("{}: {}", event.error["message"], event.error["hint"])
            case ClipFailed():
                log.error("{} is lost: {}", clip, event.error["message"])
            case Failed():
                log.error("failed at {}: {}", event.action or "start", event.error["message"])
                log.info("{}", event.traceback)
            case _:
                pass


def serve_member(pipeline: Pipeline, world: World, console: Console) -> None:
    """Works as another rank of a launcher; rank 0 logs for all ranks of its own host."""
    log = logger.bind(rank=world.rank)
    if not world.on_first_host:
        pipeline.observe(EventLog(pipeline.config.layout))

    def say(sentence: str, is_loud: bool) -> None:
        log.error(sentence)
        if is_loud and world.local_rank == 0:
            console.error(RankError(sentence, "is its host down, or the network to it?"))

    pipeline.serve(say=say)
