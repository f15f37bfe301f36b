"""Owns what is seen while a run goes on: a line a rank on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from types import TracebackType
from typing import Literal, NamedTuple

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from svdpp.cli.console import Console
from svdpp.driver.trace import MeanCosts
from svdpp.plan.actions import Action, Kind
from svdpp.plan.forecast import replay, summarise
from svdpp.plan.schedule import Schedule
from svdpp.worker.messages import (
    ClipDone,
    ClipFailed,
    DraftDone,
    DraftLost,
    Event,
    Heartbeat,
    Joined,
    StepDone,
)

_STATES = {
    Kind.ENCODE: "encoding",
    Kind.DECODE: "decoding",
    Kind.FINISH: "delivering",
    Kind.COMPARE: "reviewing",
}


_BAR_WIDTH = 20


class _Column(NamedTuple):
    """One column of the table of ranks; its least width keeps the others in their places."""

    name: str
    min_width: int
    justify: Literal["left", "right"] = "left"
    from_width: int = 0
    """Width of the terminal below which the column is left out."""


_COLUMNS = (
    _Column("rank", 6),
    _Column("bar", 0, from_width=72),
    _Column("steps", 7, "right"),
    _Column("clip", 7),
    _Column("state", 10, from_width=40),
    _Column("rate", 11, from_width=52),
)


class Progress:
    """A context manager that is also an observer of a pipeline's events.

    Args:
        console: the talk goes to its stderr; nothing is drawn when it is quiet.
        title: of the whole, such as `run` or `reference`.
        schedule: what will be done, for the time that is left.
    """

    def __init__(self, console: Console, title: str, schedule: Schedule) -> None:
        self._console = console
        self._title = title
        self._schedule = schedule
        self._num_clips = len({action.clip for actions in schedule for action in actions})
        self._rows = [_Row(rank, actions) for rank, actions in enumerate(schedule)]
        self._means = MeanCosts()
        self._reflow = _Reflow(console.err)
        self._settled: set[int] = set()
        self._done = 0
        self._failed = 0
        self._begun: float | None = None
        self._live: Live | None = None
        self._makespan: float | None = None
        self._next_forecast = 0.0

    def __enter__(self) -> Progress:
        if self._console.err.is_terminal and not self._console.quiet:
            self._live = Live(
                get_renderable=self._draw,
                console=self._console.err,
                refresh_per_second=5,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, rank: int, event: Event) -> None:
        """Takes one event of `rank`."""
        self._rows[rank].see(event)
        self._means.add(event)
        if isinstance(event, StepDone) and self._begun is None:
            self._begun = time.monotonic()
        if isinstance(event, ClipDone | ClipFailed) and event.clip not in self._settled:
            self._settled.add(event.clip)
            self._settle(event)
        if isinstance(event, DraftDone):
            self._talk_of_draft(event)
        if isinstance(event, DraftLost):
            why = event.error["message"]
            self._console.info(
                f"{self._title}: no draft of clip {event.clip} by rank {rank}: {why}"
            )

    def _settle(self, event: ClipDone | ClipFailed) -> None:
        if isinstance(event, ClipFailed):
            self._failed += 1
            why = event.error["message"]
            self._console.info(f"{self._title}: clip {event.clip} is lost: {why}")
            return
        self._done += 1
        if self._live is None:
            name = event.record.get("output") or f"clip {event.clip}"
            self._console.info(
                f"{self._title}: {self._done} of {self._num_clips} clips done, {name}"
            )

    def _talk_of_draft(self, done: DraftDone) -> None:
        draft, record = done.record["draft"], done.record
        name = record.get("output") or f"clip {done.clip}"
        self._console.info(
            f"{self._title}: draft after {record['wall_seconds']:.1f} s, {draft['rounds']} of "
            f"{draft['num_steps']} rounds: {name}"
        )

    def _draw(self) -> Group:
        table = Table.grid(padding=(0, 2))
        columns = [column for column in _COLUMNS if self._console.err.width >= column.from_width]
        for column in columns:
            table.add_column(no_wrap=True, min_width=column.min_width, justify=column.justify)
        # As many lines as fit beneath what the command has printed; the rest is counted.
        shown = max(1, self._console.err.height - 4)
        for row in self._rows[:shown]:
            cells = row.cells()
            table.add_row(*(cells[column.name] for column in columns))
        parts: list[Table | Text] = [table]
        if len(self._rows) > shown:
            parts.append(_rest(self._rows[shown:]))
        picture = Group(*parts, self._summary())
        self._reflow.before(picture)
        return picture

    def _summary(self) -> Text:
        text = f"{self._title}: {self._done} of {self._num_clips} clips"
        text += f", {self._failed} lost" if self._failed else ""
        if self._begun is None:
            return Text(f"{text}, starting ...", no_wrap=True)
        elapsed = time.monotonic() - self._begun
        left = self._seconds_left(elapsed)
        text += f", {_clock(elapsed)} elapsed"
        return Text(
            text + (f", about {_clock(left)} left" if left is not None else ""), no_wrap=True
        )

    def _seconds_left(self, elapsed: float) -> float | None:
        """The forecast's makespan at the costs measured so far, less the time gone by."""
        if len(self._rows) == 1:
            return self._rows[0].seconds_left(elapsed)
        if elapsed >= self._next_forecast:
            self._makespan = self._forecast_makespan()
            # A replay of many clips takes a while, on cores that CPU ranks compute on.
            spent = time.monotonic() - (self._begun or 0.0) - elapsed
            self._next_forecast = elapsed + max(1.0, 50 * spent)
        return None if self._makespan is None else max(0.0, self._makespan - elapsed)

    def _forecast_makespan(self) -> float | None:
        if not self._means.has_denoised:
            return None
        return summarise(replay(self._schedule, self._means.costs()), len(self._rows)).makespan


def _rest(rows: list[_Row]) -> Text:
    """The ranks for which there is no line."""
    states = Counter(row.activity for row in rows)
    counts = ", ".join(f"{count} {activity}" for activity, count in sorted(states.items()))
    return Text(f"... and {len(rows)} more ranks: {counts}", style="dim", no_wrap=True)


class _Reflow:
    """Clears what a terminal that became narrower has made of the picture that stood there.

    Rich goes up as many lines as it has printed. A terminal breaks those that are too long for its
    new width in two, so that the upper ones would stay for good.
    """

    def __init__(self, console: RichConsole) -> None:
        self._console = console
        self._width = 0
        self._lengths: list[int] = []

    def before(self, picture: Group) -> None:
        """Call with each picture before it is drawn in the place of the last."""
        width = self._console.width
        if width < self._width:
            # Where one line has become three, there are two more between the cursor and the top.
            more = sum(-(-length // width) - 1 for length in self._lengths if length)
            if more:
                self._console.file.write(f"\r\x1b[{more}A\x1b[J")
        lines = self._console.render_lines(picture, pad=False)
        self._width, self._lengths = width, list(map(Segment.get_line_length, lines))


class _Row:
    """One rank's line."""

    def __init__(self, rank: int, actions: tuple[Action, ...]) -> None:
        self._rank = rank
        self._total = sum(a.end - a.start for a in actions if a.kind is Kind.DENOISE)
        self._done = 0
        self._state = "starting"
        self._seconds = 0.0
        self._clip = ""

    def see(self, event: Event) -> None:
        match event:
            case Joined():
                self._state = "ready"
            case StepDone():
                self._done += 1
                self._state = f"step {event.step}"
                self._clip = f"clip {event.clip}"
                # A running mean that forgets, so that the rate is that of now.
                self._seconds = (
                    0.8 * self._seconds + 0.2 * event.seconds if self._seconds else event.seconds
                )
            case Heartbeat():
                self._see_heartbeat(event)
            case _:
                pass

    def _see_heartbeat(self, heartbeat: Heartbeat) -> None:
        if not heartbeat.action:
            if self._state != "starting":
                self._state, self._clip = "idle", ""
            return
        action = Action.parse(heartbeat.action)
        self._clip = f"clip {action.clip}"
        if heartbeat.waiting:
            self._state = "waiting"
        elif action.kind in _STATES:
            self._state = _STATES[action.kind]

    def seconds_left(self, elapsed: float) -> float | None:
        """What is left in proportion to the steps since the first one, `elapsed` seconds ago.

        Enough for a rank that does everything in turn; the oracle reports nothing but steps.
        """
        if self._done < 2:
            return None
        return elapsed * (self._total - self._done) / (self._done - 1)

    @property
    def activity(self) -> str:
        """The state without the number of the step."""
        return "denoising" if self._state.startswith("step") else self._state

    def cells(self) -> dict[str, Text | ProgressBar]:
        rate = f"{self._seconds:.2f} s/step" if self._seconds else ""
        return {
            "rank": Text(f"rank {self._rank}"),
            "bar": ProgressBar(total=max(self._total, 1), completed=self._done, width=_BAR_WIDTH),
            "steps": Text(f"{self._done}/{self._total}"),
            "clip": Text(self._clip),
            "state": Text(self._state),
            "rate": Text(rate, style="dim"),
        }


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
