"""Owns the log: one loguru record for each event of a rank, bound to that rank, and redacted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from svdpp.errors import OutputError
from svdpp.plan.layout import Layout
from svdpp.redaction import redact
from svdpp.runtime.messages import (
    ActionDone,
    ClipDone,
    ClipFailed,
    Event,
    Failed,
    HopDone,
    Joined,
    StepDone,
)

if TYPE_CHECKING:
    from loguru import Message, Record

_FORMAT = "{time:HH:mm:ss.SSS} {level: <5} rank {extra[rank]} {message}"


def open_log(
    *, verbosity: int, log_file: Path | None, write: Callable[[str], Any] = sys.stderr.write
) -> None:
    """Sets where records go: stderr by verbosity, and a file of JSON lines with everything.

    Raises:
        OutputError: the file cannot be written.
    """
    logger.remove()
    logger.configure(extra={"rank": "-"}, patcher=_redact)
    if verbosity > 0:
        level = "INFO" if verbosity == 1 else "DEBUG"

        def sink(message: Message) -> None:
            write(str(message).rstrip("\n"))

        logger.add(sink, level=level, format=_FORMAT, colorize=False)
    if log_file is not None:
        try:
            logger.add(log_file, level="DEBUG", serialize=True, format="{message}")
        except OSError as error:
            raise OutputError(
                f"cannot write the log {str(log_file)!r}: {error.strerror}"
            ) from error


def _redact(record: Record) -> None:
    record["message"] = redact(record["message"])
    record["file"].path = redact(record["file"].path)  # of the program: often below the home


class EventLog:
    """Writes each event as one record.

    Args:
        layout: of which each rank's share is named when it is ready.
    """

    def __init__(self, layout: Layout) -> None:
        self._shares = layout.all_shares

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
            case HopDone():
                arrow = "from" if event.direction == "recv" else "to"
                log.info(
                    "{} clip {} at step {} {} rank {}: {} bytes in {:.4f} s",
                    *(event.direction, event.clip, event.next_step, arrow, event.peer),
                    *(event.num_bytes, event.seconds),
                )
            case StepDone():
                log.debug("clip {} step {}: {:.4f} s", event.clip, event.step, event.seconds)
            case ActionDone():
                seconds = event.end - event.start
                log.debug("{}: {:.4f} s, waited {:.4f} s", event.action, seconds, event.waited)
            case ClipDone():
                log.info("clip {} is finished", event.clip)
            case ClipFailed():
                log.error("clip {} is lost: {}", event.clip, event.error["message"])
            case Failed():
                log.error("failed at {}: {}", event.action or "start", event.error["message"])
                log.debug("{}", event.traceback)
            case _:
                pass
