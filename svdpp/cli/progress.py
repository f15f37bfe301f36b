"""Progress display of clips, settings of the log, and log records of the ranks' events."""

from __future__ import annotations

import contextlib
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Column
from rich.text import Text

from svdpp.cli.console import Console
from svdpp.config import ClipRequest
from svdpp.driver.trace import MeasuredCosts
from svdpp.errors import (
    OutputError,
    RankError,
    RequestError,
    one_line,
    pluralize,
    printable,
    redact,
)
from svdpp.launch.world import World
from svdpp.plan.actions import Action, Kind, Schedule
from svdpp.plan.costs import CostModel
from svdpp.plan.forecast import simulate_schedule, summarise
from svdpp.plan.layout import Layout
from svdpp.worker.messages import (
    ActionDone,
    CheckpointLost,
    ClipDone,
    ClipFailed,
    Event,
    Failed,
    Heartbeat,
    Joined,
    PromptTruncated,
    StepDone,
    TransferDone,
)

if TYPE_CHECKING:
    from loguru import Message, Record

    from svdpp.driver.pipeline import Pipeline

# Seconds between summary lines that are printed if there is no live display.
_LINE_SECONDS = 60.0
# Maximum bytes of a log file, and number of older log files that are kept, because a server may run
# for months.
_FILE_BYTES = 50_000_000
_OLD_FILES = 4
_FORMAT = "{time:HH:mm:ss.SSS} {level: <7} rank {extra[rank]} {message}"
# Minimum seconds between two warnings that latent checkpoints cannot be written: if a disk is full,
# all ranks report it repeatedly.
_WARNING_SECONDS = 3600.0
# Log level of transfers between ranks, which is between INFO and DEBUG.
_TRANSFER = "PACKET"
logger.level(_TRANSFER, no=15)
_ACTION_LABELS = {Kind.ENCODE: "encoding", Kind.DECODE: "decoding", Kind.FINISH: "writing"}


class Progress(Bars):
    """Progress display of a command's clips: a context manager, and an observer of events.

    Args:
        console: Console of the command.
        title: First word of the lines, such as `run`.
        schedule: Actions of all `num_clips`, or of the first clips, for a forecast of the time
            left.
        labels: Names of the clips by index, such as their images; empty: `clip 1` and so on.
        num_clips: Number of all clips; None: as many as in `schedule`.
        costs: Assumed seconds of each kind of work, for kinds that are not measured yet. If a step
            takes twice its assumed seconds, the other assumed seconds are doubled, too. None: all
            work except steps is assumed to take no time until it is measured.
        ranks: Whether to show a line for each rank, and to print a line when a clip is finished.
            False: only a summary is shown.
    """

    def __init__(
        self,
        console: Console,
        title: str,
        schedule: Schedule,
        *,
        labels: Sequence[str] = (),
        num_clips: int | None = None,
        costs: CostModel | None = None,
        ranks: bool = True,
    ) -> None:
        self._remark_console, self._title, self._schedule = console, title, schedule
        self._has_ranks = ranks
        scheduled = len({action.clip for actions in schedule for action in actions})
        self.num_clips = scheduled if num_clips is None else num_clips
        self._labels = list(map(one_line, labels)) or [
            f"clip {clip + 1}" for clip in range(self.num_clips)
        ]
        self._costs = costs or CostModel()
        self._means = MeasuredCosts()
        self._ended_clips: set[int] = set()
        self.num_done = self.num_failed = 0
        self._has_lost_checkpoints = False
        self._started = time.monotonic()
        self._first_work_at: float | None = None
        self._ended: float | None = None
        self._makespan: float | None = None
        self._next_forecast = 0.0
        self._next_line = self._started + _LINE_SECONDS
        is_live = console.err.is_terminal and not console.err.is_dumb_terminal
        state = Column(no_wrap=True, overflow="ellipsis")
        super().__init__(  # comes last, because it calls `get_renderables`, which uses the fields
            TextColumn("{task.description}"),
            BarColumn(None, table_column=Column(ratio=1, max_width=20)),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}", markup=False, table_column=state),
            console=console.err,
            refresh_per_second=5 if ranks else 1,
            transient=True,
            disable=not is_live or console.quiet,
        )
        for rank, actions in enumerate(schedule if ranks else ()):
            steps = sum(one.end - one.start for one in actions if one.kind is Kind.DENOISE)
            total = round(self.num_clips / scheduled * steps)
            self.add_task(f"rank {rank}", total=total, state="starting")

    def __call__(self, rank: int, event: Event) -> None:
        """Show an event of a rank in the progress display.

        Args:
            rank: Rank that sent the event.
            event: Event of that rank.
        """
        if self._has_ranks:
            self._show(rank, event)
        self._means.add(event)
        match event:
            case StepDone() | Heartbeat(action=Action()):
                self._first_work_at = self._first_work_at or time.monotonic()
            case ClipDone() | ClipFailed() if event.clip not in self._ended_clips:
                self._ended_clips.add(event.clip)
                self._record_outcome(event)
            case PromptTruncated():
                self._print(
                    "warning: the model does not read the end of the prompt of "
                    f"{self._labels[event.clip]}: {event.text!r}"
                )
            case CheckpointLost() if not self._has_lost_checkpoints:
                self._has_lost_checkpoints = True
                self._print(f"{event.error['message']}: {event.error['hint']}")
            case _:
                pass
        self._print_summary()

    def _print_summary(self) -> None:
        """Print a summary of the clips every `_LINE_SECONDS` if there is no live display."""
        if self.disable and time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + _LINE_SECONDS
            self._remark_console.info(self._summary())

    @property
    def summary_line(self) -> str:
        """Summary line of the clips at the end of a command: their number, time and rate."""
        seconds = (self._ended or time.monotonic()) - (self._first_work_at or self._started)
        rate = f", {60 * self.num_done / seconds:.3g} a minute" if self.num_done else ""
        done = pluralize(self.num_done, "clip")
        return f"{self._title}: {done} in {_clock(seconds)}{rate}{self._lost}"

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yield the display's summary first, because on a small terminal rich cuts off the end."""
        yield Text(self._summary(), no_wrap=True, overflow="ellipsis")
        if self.tasks:
            yield self.make_tasks_table(self.tasks)

    def _show(self, rank: int, event: Event) -> None:
        task = self.tasks[rank]
        match event:
            case Joined():
                state = "ready"
            case StepDone():
                self.advance(task.id)
                state = f"{self._labels[event.clip]:.20}, step {event.step + 1}, "
                state += f"{event.seconds:.2f} s/step"
            case Heartbeat(action=None):
                is_loading = task.fields["state"] in ("starting", "loading")
                state = "loading" if is_loading else "idle"
            case Heartbeat(action=Action() as action) if (
                event.waiting or action.kind in _ACTION_LABELS
            ):
                word = "waiting" if event.waiting else _ACTION_LABELS[action.kind]
                state = f"{self._labels[action.clip]:.20}, {word}"
            case _:
                return
        self.update(task.id, state=state)

    def _record_outcome(self, event: ClipDone | ClipFailed) -> None:
        label = self._labels[event.clip]
        self._ended = time.monotonic()
        if isinstance(event, ClipFailed):
            self.num_failed += 1
            self._print(f"{label} failed: {event.error['message']}")
            return
        self.num_done += 1
        if self._has_ranks:
            metadata = event.metadata
            name = f" -> {metadata['output']}" if metadata.get("output") else ""
            took = f", {metadata['wall_seconds']:.1f} s" if "wall_seconds" in metadata else ""
            self._print(f"{self._counted}: {label}{name}{took}")

    def _print(self, text: str) -> None:
        self._remark_console.info(f"{self._title}: {text}")

    @property
    def _counted(self) -> str:
        return f"{self.num_done} of {pluralize(self.num_clips, 'clip')}"

    @property
    def _lost(self) -> str:
        return f", {self.num_failed} failed" if self.num_failed else ""

    def _summary(self) -> str:
        now = time.monotonic()
        elapsed = 0.0 if self._first_work_at is None else now - self._first_work_at
        how = f"{_clock(elapsed)} elapsed"
        if self._first_work_at is None:
            how = f"starting, {_clock(now - self._started)}"
        left = self._seconds_left(elapsed)
        about = "" if left is None else f", about {_clock(left)} left"
        return f"{self._title}: {self._counted}{self._lost}, {how}{about}"

    def _seconds_left(self, elapsed: float) -> float | None:
        """Return the forecast seconds until all clips are finished; None before the first step."""
        if self._makespan is None or elapsed >= self._next_forecast:
            begun = time.monotonic()
            self._makespan = self._forecast_makespan()
            # Forecasts take at most 2% of the run's time, because CPU ranks need the cores.
            self._next_forecast = elapsed + max(1.0, 50 * (time.monotonic() - begun))
        return None if self._makespan is None else max(0.0, self._makespan - elapsed)

    def _forecast_makespan(self) -> float | None:
        if not self._means.has_stepped:
            return None
        costs = self._means.costs_like(self._costs)
        try:
            of = summarise(simulate_schedule(self._schedule, costs), len(self._schedule))
        # the simulation raises an error until a transfer between hosts has been measured
        except (RequestError, ValueError):
            return None
        return of.makespan + (self.num_clips - of.clips) * of.seconds_per_clip


class ServerProgress(Progress):
    """Progress display of clips that a server makes. The time left comes from the server.

    Args:
        console: Console of the command.
        title: Name of the command.
        labels: Names of the clips by index.
    """

    def __init__(self, console: Console, title: str, labels: Sequence[str]) -> None:
        # The ETA is set before the base class is initialised, which calls `get_renderables`.
        self._eta: tuple[float, float] | None = None
        super().__init__(console, title, (), labels=labels, num_clips=len(labels), ranks=False)

    def begin(self) -> None:
        """Record the time at which the server began its first clip, for the summary line."""
        self._first_work_at = self._first_work_at or time.monotonic()

    def set_eta(self, seconds: float | None) -> None:
        """Set the time until the server has finished the last clip, for the progress display.

        Args:
            seconds: Forecast of the server in seconds; None: unknown.
        """
        self._eta = None if seconds is None else (time.monotonic(), seconds)
        self._print_summary()

    def _record_outcome(self, event: ClipDone | ClipFailed) -> None:
        super()._record_outcome(event)
        if isinstance(event, ClipDone):
            self._print(f"{self._counted}: {event.metadata['output']}")

    def _seconds_left(self, elapsed: float) -> float | None:  # noqa: ARG002
        if self._eta is None:
            return None
        at, seconds = self._eta
        return max(0.0, seconds - (time.monotonic() - at))


def labels(requests: Sequence[ClipRequest]) -> list[str]:
    """Return the displayed name of each clip: its input's name, and the seed if seeds differ.

    Args:
        requests: Requests of the clips.
    """
    several = len({request.seed for request in requests}) > 1
    return [_name(each) + (f" seed {each.seed}" if several else "") for each in requests]


def _name(request: ClipRequest) -> str:
    if request.image is not None:
        return Path(request.image).name
    return "clip" if request.prompt is None else textwrap.shorten(request.prompt, 40)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"


def open_log(
    *,
    verbosity: int,
    log_file: Path | None,
    write: Callable[[str], Any] = sys.stderr.write,
    quiet: bool = False,
    warns: bool = False,
) -> None:
    """Configure a command's log: records on stderr, and more detailed records in a file.

    Args:
        verbosity: Level for stderr: 0 none, 1 ranks, transfers and clips, 2 also steps.
        log_file: Path of a file for JSON lines; None: no log file is written.
        write: Function that prints a record to stderr.
        quiet: Whether to ignore `warns`, so that nothing is printed at verbosity 0.
        warns: Whether to print warnings at verbosity 0.

    Raises:
        OutputError: The file cannot be written.
    """
    logger.remove()
    logger.configure(extra={"rank": "-"}, patcher=_redact)

    def sink(message: Message) -> None:
        # Lines after a record's first line are indented, so that a name with a line break cannot
        # look like a record.
        write(str(message).rstrip("\n").replace("\n", "\n    "))

    if verbosity > 0 or (warns and not quiet):
        level = ("WARNING", _TRANSFER, "DEBUG")[min(verbosity, 2)]
        # With `diagnose=False`, tracebacks do not show the values of variables, such as keys and
        # passwords.
        logger.add(sink, level=level, format=_FORMAT, colorize=False, diagnose=False)
    if log_file is not None:
        level = "DEBUG" if verbosity else "INFO"
        file = _LogFile(log_file, write)
        logger.add(file, level=level, serialize=True, format="{message}", diagnose=False)


class _LogFile(RotatingFileHandler):
    """Log file that warns once if it cannot be written.

    A file sink of loguru would warn at each record that cannot be written.
    """

    terminator = ""  # a serialized record has its own line break

    def __init__(self, path: Path, warn: Callable[[str], Any]) -> None:
        self._path, self._warn = path, warn
        bounds: dict[str, Any] = {"maxBytes": _FILE_BYTES, "backupCount": _OLD_FILES}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            super().__init__(path, encoding="utf-8", errors="backslashreplace", **bounds)
        except OSError as error:
            text = f"cannot write the log {str(path)!r}: {error.strerror}"
            raise OutputError(text, details={"path": str(path), "errno": error.errno}) from error

    def format(self, record: logging.LogRecord) -> str:
        """Return the message of a log record, which already contains the traceback."""
        return record.getMessage()

    def close(self) -> None:
        """Close the log file, even if its buffer cannot be written."""
        with contextlib.suppress(OSError):  # closing writes the buffer, and the disk may be full
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002
        """Print a warning the first time that a log record cannot be written.

        Args:
            record: Record that is lost.
        """
        error = redact(f"{str(self._path)!r}: {sys.exception()}")
        self._warn(f"warning: cannot write the log {error}")
        self._warn = lambda text: None  # noqa: ARG005


def _redact(record: Record) -> None:
    record["message"] = printable(redact(record["message"]))
    # The path of a source file often contains the home folder.
    record["file"].path = redact(record["file"].path)


class EventLog:
    """Observer that logs each event of a pipeline.

    Args:
        layout: Layout with the steps of each rank.
        name_of: Function that returns the name of a clip, given its index.
    """

    def __init__(self, layout: Layout, name_of: Callable[[int], str] = "clip {}".format) -> None:
        self._shares = layout.all_shares
        self._name_of = name_of
        self._next_warning = 0.0

    def __call__(self, rank: int, event: Event) -> None:
        """Write a log record about an event of a rank.

        Args:
            rank: Rank that sent the event.
            event: Event of that rank.
        """
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
                log.log(
                    _TRANSFER,
                    "{} {} at step {} {} rank {}: {} bytes in {:.4f} s, waited {:.4f} s",
                    *(event.direction, clip, event.next_step),
                    *("from" if event.direction == "recv" else "to", event.peer),
                    *(event.num_bytes, event.seconds, event.waited),
                )
            case StepDone():
                log.debug("{} step {}: {:.4f} s", clip, event.step, event.seconds)
            case ActionDone():
                seconds = event.end - event.start
                log.debug("{}: {:.4f} s, waited {:.4f} s", event.action, seconds, event.waited)
            case ClipDone():
                log.info("{} is finished", clip)
            case PromptTruncated():
                # The prompt's text is not logged, because prompts are private and others may read
                # the log.
                log.warning(
                    "{}: the model does not read the last {} characters of its prompt",
                    *(clip, len(event.text)),
                )
            case CheckpointLost() if time.monotonic() >= self._next_warning:
                self._next_warning = time.monotonic() + _WARNING_SECONDS
                log.warning("{}: {}", event.error["message"], event.error["hint"])
            case ClipFailed():
                log.error("{} failed: {}", clip, event.error["message"])
            case Failed():
                log.error("failed at {}: {}", event.action or "start", event.error["message"])
                log.info("{}", event.traceback)
            case _:
                pass


def serve_member(pipeline: Pipeline, world: World, console: Console) -> None:
    """Run a rank other than rank 0 in a process that a launcher has started.

    Args:
        pipeline: Pipeline of this rank.
        world: Rank and world size that the launcher (torchrun or srun) gives this process.
        console: Console that prints why the run ended, if no other process prints the reason. Only
            one rank of each host prints.
    """
    log = logger.bind(rank=world.rank)
    if not world.on_first_host:  # on the host of rank 0, rank 0 logs the events of all ranks
        pipeline.observe(EventLog(pipeline.config.layout))

    def say(sentence: str, is_loud: bool) -> None:
        log.error(sentence)
        if is_loud and world.local_rank == 0:
            console.error(RankError(sentence, "check whether the host or the network is down"))

    pipeline.serve(say=say)
