"""Progress bar of `generate` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from svdpp.errors import pluralize
from svdpp.worker.messages import ClipDone, ClipFailed, Event, StepDone


class ProgressBar(Progress):
    """Progress bar of the steps of all clips; context manager and observer of a pipeline's events.

    Nothing is shown unless the console is a terminal.

    Args:
        num_steps: Number of steps of each clip, by the clip's index.
        done_steps: Number of these steps that an earlier run has done, by the clip's index.
        is_shown: Whether to show the bar on a terminal.
        console: Console of the bar. None: stderr.
    """

    def __init__(
        self,
        num_steps: Sequence[int],
        done_steps: Sequence[int],
        *,
        is_shown: bool = True,
        console: Console | None = None,
    ) -> None:
        console = Console(stderr=True) if console is None else console
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not (is_shown and console.is_terminal),
        )
        self._num_steps = list(num_steps)
        self._steps_left = [steps - done for steps, done in zip(num_steps, done_steps, strict=True)]
        self._finished_clips: set[int] = set()
        self._failed_clips: set[int] = set()
        self._bar = self.add_task("", total=sum(self._steps_left))
        self._show()

    def __call__(self, rank: int, event: Event) -> None:  # noqa: ARG002
        """Advance the progress bar if a rank reports a finished step or clip."""
        match event:
            # If two ranks share each step (`cfg_parallel` 2), both report the step. The minimum
            # counts the step only once.
            case StepDone():
                left = self._num_steps[event.clip] - event.step - 1
                self._steps_left[event.clip] = min(left, self._steps_left[event.clip])
            case ClipDone():
                self._finished_clips.add(event.clip)
                self._steps_left[event.clip] = 0
            case ClipFailed():
                self._failed_clips.add(event.clip)
                self._steps_left[event.clip] = 0
            case _:
                return
        self._show()

    def _show(self) -> None:
        text = f"{len(self._finished_clips)} of {pluralize(len(self._num_steps), 'clip')}"
        if self._failed_clips:
            text += f", {len(self._failed_clips)} failed"
        total = self.tasks[0].total or 0
        self.update(self._bar, description=text, completed=total - sum(self._steps_left))
