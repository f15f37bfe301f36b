"""The live picture of the ranks: one line each, as many as fit on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from rich.console import Console as RichConsole
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from svdpp.plan.actions import Action, Kind
from svdpp.plan.schedule import Schedule
from svdpp.worker.messages import Event, Heartbeat, Joined, StepDone

_STATES = {
    Kind.ENCODE: "encoding",
    Kind.DECODE: "decoding",
    Kind.FINISH: "writing",
}


class _Column(NamedTuple):
    """One column of the table; a minimum width keeps the columns from moving."""

    name: str
    min_width: int
    max_width: int | None = None
    justify: Literal["left", "right"] = "left"
    from_width: int = 0
    """Width of the terminal below which the column is left out."""


_COLUMNS = (
    _Column("rank", 6),
    _Column("bar", 0, from_width=72),
    _Column("steps", 7, justify="right"),
    _Column("clip", 7, max_width=20),
    _Column("state", 10, from_width=40),
    _Column("rate", 11, from_width=52),
)


class RankTable:
    """Draws the state of each rank.

    Args:
        schedule: each rank's actions.
        labels: of the clips, by index.
        times: how many times as many clips there are as in the schedule.
    """

    def __init__(self, schedule: Schedule, labels: Sequence[str], times: float = 1.0) -> None:
        self._rows = [_Row(rank, actions, labels, times) for rank, actions in enumerate(schedule)]

    def see(self, rank: int, event: Event) -> None:
        """Takes one event of `rank`."""
        self._rows[rank].see(event)

    def draw(self, console: RichConsole) -> list[Table | Text]:
        """One line for each rank that fits on the terminal, and counts for the others."""
        table = Table.grid(padding=(0, 2))
        columns = [column for column in _COLUMNS if console.width >= column.from_width]
        for column in columns:
            table.add_column(
                no_wrap=True,
                overflow="ellipsis",
                min_width=column.min_width,
                max_width=column.max_width,
                justify=column.justify,
            )
        shown = max(1, console.height - 4)
        for row in self._rows[:shown]:
            cells = row.cells(bar_width=20 if console.width >= 100 else 10)
            table.add_row(*(cells[column.name] for column in columns))
        return [table] if len(self._rows) <= shown else [table, self._rest(shown)]

    def _rest(self, shown: int) -> Text:
        """A summary of the ranks without a line."""
        states = Counter(row.activity for row in self._rows[shown:])
        counts = ", ".join(f"{count} {activity}" for activity, count in sorted(states.items()))
        text = f"... and {len(self._rows) - shown} more ranks: {counts}"
        return Text(text, style="dim", no_wrap=True, overflow="ellipsis")


class Reflow:
    """Clears the previous picture after the terminal became narrower.

    Rich moves the cursor up by the number of lines it printed. A narrower terminal folds long lines
    into several, so without this the upper ones would remain.
    """

    def __init__(self, console: RichConsole) -> None:
        self._console = console
        self._width = 0
        self._lengths: list[int] = []

    def before(self, picture: Group) -> None:
        """Clears folded lines; call before each picture is drawn."""
        width = self._console.width
        if width < self._width:
            # Each line that is folded into n lines adds n - 1 above the cursor.
            more = sum(-(-length // width) - 1 for length in self._lengths if length)
            if more:
                self._console.file.write(f"\r\x1b[{more}A\x1b[J")
        lines = self._console.render_lines(picture, pad=False)
        self._width, self._lengths = width, list(map(Segment.get_line_length, lines))


class _Row:
    """One rank's line."""

    def __init__(
        self, rank: int, actions: tuple[Action, ...], labels: Sequence[str], times: float
    ) -> None:
        self._rank = rank
        self._labels = labels
        self._total = round(times * sum(a.end - a.start for a in actions if a.kind is Kind.DENOISE))
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
                self._state = f"step {event.step + 1}"
                self._clip = self._labels[event.clip]
                # An exponential mean, so that the rate follows changes.
                self._seconds = (
                    0.8 * self._seconds + 0.2 * event.seconds if self._seconds else event.seconds
                )
            case Heartbeat():
                self._see_heartbeat(event)
            case _:
                pass

    def _see_heartbeat(self, heartbeat: Heartbeat) -> None:
        action = heartbeat.action
        if action is None:
            if self._state == "starting":
                self._state = "loading"
            elif self._state != "loading":
                self._state, self._clip = "idle", ""
            return
        self._clip = self._labels[action.clip]
        if heartbeat.waiting:
            self._state = "waiting"
        elif action.kind in _STATES:
            self._state = _STATES[action.kind]

    @property
    def activity(self) -> str:
        """The state without the number of the step."""
        return "denoising" if self._state.startswith("step") else self._state

    def cells(self, *, bar_width: int) -> dict[str, Text | ProgressBar]:
        rate = f"{self._seconds:.2f} s/step" if self._seconds else ""
        return {
            "rank": Text(f"rank {self._rank}"),
            "bar": ProgressBar(total=max(self._total, 1), completed=self._done, width=bar_width),
            "steps": Text(f"{self._done}/{self._total}"),
            "clip": Text(self._clip),
            "state": Text(self._state),
            "rate": Text(rate, style="dim"),
        }
