"""Owns what is seen while a run goes on: a line a rank on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from svdpp.cli.console import Console
from svdpp.plan.actions import Action, Kind
from svdpp.plan.forecast import replay, summarise
from svdpp.plan.schedule import Schedule
from svdpp.runtime.messages import Beat, ClipDone, ClipFailed, Event, Joined, StepDone
from svdpp.runtime.trace import Trace

_STATES = {Kind.ENCODE: "encoding", Kind.DECODE: "decoding", Kind.DELIVER: "delivering"}


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
        self._trace = Trace(len(schedule))
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
        self._trace.add(rank, event)
        if isinstance(event, StepDone) and self._begun is None:
            self._begun = time.monotonic()
        if isinstance(event, ClipDone):
            self._done += 1
            if self._live is None:
                name = event.record.get("output") or f"clip {event.clip}"
                self._console.talk(
                    f"{self._title}: {self._done} of {self._num_clips} clips done, {name}"
                )
        if isinstance(event, ClipFailed):
            self._failed += 1
            why = event.error["message"]
            self._console.talk(f"{self._title}: clip {event.clip} is lost: {why}")

    def _draw(self) -> Group:
        table = Table.grid(padding=(0, 2))
        # As many lines as fit beneath what the command has printed; the rest is counted.
        shown = max(1, self._console.err.height - 4)
        for row in self._rows[:shown]:
            table.add_row(*row.cells())
        parts: list[Table | Text] = [table]
        if len(self._rows) > shown:
            parts.append(Text(f"... and {len(self._rows) - shown} more ranks", style="dim"))
        parts.append(self._summary())
        return Group(*parts)

    def _summary(self) -> Text:
        text = f"{self._title}: {self._done} of {self._num_clips} clips"
        text += f", {self._failed} lost" if self._failed else ""
        if self._begun is None:
            return Text(f"{text}, starting ...")
        elapsed = time.monotonic() - self._begun
        text += f", {_clock(elapsed)} elapsed"
        left = self._seconds_left(elapsed)
        return Text(text + (f", about {_clock(left)} left" if left is not None else ""))

    def _seconds_left(self, elapsed: float) -> float | None:
        """The forecast's makespan at the costs measured so far, less the time gone by."""
        if elapsed >= self._next_forecast:
            self._makespan = self._forecast_makespan()
            # A replay of many clips takes a while, on cores that CPU ranks compute on.
            spent = time.monotonic() - (self._begun or 0.0) - elapsed
            self._next_forecast = elapsed + max(1.0, 50 * spent)
        return None if self._makespan is None else max(0.0, self._makespan - elapsed)

    def _forecast_makespan(self) -> float | None:
        if not any(span.action.kind is Kind.DENOISE for span in self._trace.spans):
            return None
        costs = self._trace.costs()
        return summarise(replay(self._schedule, costs), len(self._schedule)).makespan


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
            case Beat():
                self._see_beat(event)
            case _:
                pass

    def _see_beat(self, beat: Beat) -> None:
        if not beat.action:
            if self._state != "starting":
                self._state, self._clip = "idle", ""
            return
        action = Action.parse(beat.action)
        self._clip = f"clip {action.clip}"
        if beat.waiting:
            self._state = "waiting"
        elif action.kind in _STATES:
            self._state = _STATES[action.kind]

    def cells(self) -> tuple[Text | ProgressBar, ...]:
        rate = f"{self._seconds:.2f} s/step" if self._seconds else ""
        return (
            Text(f"rank {self._rank}"),
            ProgressBar(total=max(self._total, 1), completed=self._done, width=24),
            Text(f"{self._done}/{self._total}"),
            Text(self._clip),
            Text(self._state),
            Text(rate, style="dim"),
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
