"""The progress display of a run: on a terminal, without one, and switched off."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console as RichConsole

from svdpp.cli.console import Console
from svdpp.cli.progress import Progress
from svdpp.plan.costs import Costs
from svdpp.plan.layout import Layout
from svdpp.worker.messages import (
    CheckpointLost,
    ClipDone,
    ClipFailed,
    Event,
    Heartbeat,
    Joined,
    StepDone,
)
from tests.cli.shell import PYTHONPATH, ROOT
from tests.driver.dummies import HANG_SECONDS

_SHOW_CURSOR = "\x1b[?25h"


def _console(*, terminal: bool, quiet: bool = False) -> Console:
    console = Console(quiet=quiet)
    console.err = RichConsole(
        file=io.StringIO(),
        force_terminal=terminal,
        color_system=None,
        width=80,
        height=24,
        legacy_windows=False,
    )
    return console


def _progress(
    console: Console,
    world_size: int = 2,
    num_clips: int = 2,
    *,
    decodes: bool = False,
    **about: Any,
) -> Progress:
    layout = Layout(num_steps=28, world_size=world_size, decodes=decodes)
    schedule = layout.schedule(num_clips)
    return Progress(console, "run", schedule, **about)


def _shown(console: Console, *more: Event, **about: Any) -> Progress:
    """The progress after `EVENTS` and `more`."""
    with _progress(console, **about) as progress:
        for rank, event in (*EVENTS, *((1, event) for event in more)):
            progress(rank, event)
    return progress


def _written(console: Console) -> str:
    assert isinstance(console.err.file, io.StringIO)
    return console.err.file.getvalue()


def _picture(text: str) -> list[str]:
    """The lines of the last display."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text.rpartition("\x1b[?25h")[0])
    return [line.rstrip() for line in plain.replace("\r", "\n").split("\n") if line.strip()]


def _summary(console: Console) -> str:
    """The summary of the last display."""
    return [
        line for line in _picture(_written(console)) if re.match("run: .*(elapsed|starting)", line)
    ][-1]


def test_a_settled_clip_is_counted_once() -> None:
    console = _console(terminal=False)
    lost = {"type": "OutputError", "message": "it cannot be written", "hint": ""}
    with _progress(console) as progress:
        for rank in range(2):
            progress(rank, CheckpointLost(error={**lost, "message": "none in 'D'", "hint": "so"}))
        progress(1, ClipDone(clip=0, metadata={"output": "a.mp4"}))
        progress(0, ClipFailed(clip=0, error=lost))
        progress(0, ClipDone(clip=1, metadata={"output": "b.mp4", "wall_seconds": 3.21}))
    assert _written(console).splitlines() == [
        "run: none in 'D': so",
        "run: 1 of 2 clips: clip 1 -> a.mp4",
        "run: 2 of 2 clips: clip 2 -> b.mp4, 3.2 s",
    ]


EVENTS: tuple[tuple[int, Event], ...] = (
    (0, Joined(device="cpu", load_seconds=0.1)),
    (0, Heartbeat(action="ENCODE c0 @0")),
    (0, Heartbeat(action="DENOISE c0 0:14")),
    (0, StepDone(clip=0, step=0, seconds=2.0)),
    (0, StepDone(clip=0, step=1, seconds=2.0)),
    (1, Joined(device="cpu", load_seconds=0.1)),
    (1, Heartbeat(action="DENOISE c0 14:28", waiting=True)),
)


def test_a_terminal_shows_a_line_a_rank() -> None:
    console = _console(terminal=True)
    _shown(console, labels=["a-very-long-name-of-an-image-that-goes-on.jpg", "b.jpg"])
    lines = _picture(_written(console))[-3:]

    # Two clips of two halves of 14 steps each; two steps have taken 2 s each.
    assert lines[0] == "run: 0 of 2 clips, 0:00 elapsed, about 1:24 left"
    long = "a-very-long-name-of-"
    assert re.fullmatch(rf"rank 0 +[━╸╺ ]* 2/28 {long}, step 2, 2.00 s/step", lines[1])
    assert re.fullmatch(rf"rank 1 +[━╸╺ ]*0/28 {long}, waiting", lines[2])
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize(
    ("about", "events", "said"),
    [
        # What is not measured weighs as in the assumed costs: a decode takes as long as four steps.
        (
            {"decodes": True, "costs": Costs(step_seconds=0.5, decode_seconds=2.0)},
            None,
            "run: 0 of 2 clips, 0:00 elapsed, about 1:40 left",
        ),
        ({}, 1, "run: 0 of 2 clips, starting, 1 of 2 ranks ready, 0:00"),
        ({"ranks": False}, None, "run: 0 of 2 clips, 0:00 elapsed, about 1:24 left"),
    ],
)
def test_the_summary(about: dict[str, Any], events: int | None, said: str) -> None:
    console = _console(terminal=True)
    with _progress(console, **about) as progress:
        for rank, event in EVENTS[:events]:
            progress(rank, event)
    assert _summary(console) == said
    assert ("rank 0" in _written(console)) == about.get("ranks", True)


def test_elsewhere_every_clip_is_a_plain_line_and_the_closing_line_counts() -> None:
    lost = {"type": "OutputError", "message": "it cannot be written", "hint": ""}
    made = ClipDone(clip=1, metadata={"output": "b_1.mp4", "wall_seconds": 9.96})
    console, dumb = _console(terminal=False), _console(terminal=True)
    dumb.err = RichConsole(
        file=io.StringIO(), force_terminal=True, width=80, _environ={"TERM": "dumb"}
    )
    for each in (console, dumb):
        progress = _shown(each, ClipFailed(clip=0, error=lost), made)
        assert _written(each).splitlines() == [
            "run: clip 1 is lost: it cannot be written",
            "run: 1 of 2 clips: clip 2 -> b_1.mp4, 10.0 s",
        ]
        assert re.fullmatch(r"run: 1 clip in 0:00, [\d.e+]+ a minute, 1 lost", progress.closing)


@pytest.mark.processes
def test_an_interrupt_leaves_a_clean_terminal() -> None:
    """Ctrl-C in a real terminal of 80 columns: one sentence at the start of a line, the cursor."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = ("simulate", "--world", "2", "--steps", "4", "--clips", "5000")
    running = subprocess.Popen(
        [sys.executable, "-m", "svdpp", *command, "--latent-shape", "1", "4", "2", "8", "8"],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "TERM": "xterm-256color"},
        cwd=Path(ROOT),
    )
    os.close(child)
    try:
        text = _read_until(parent, r"about \d+:\d\d left")
        running.send_signal(signal.SIGINT)
        text += _read_until(parent, "SIGINT")
        assert running.wait(HANG_SECONDS) == 130
    finally:
        running.kill()
        running.wait()
        os.close(parent)
    last = text.rpartition("\x1b[?25l")[2]
    assert _SHOW_CURSOR in last
    cleared, _, sentence = last.rpartition("\x1b[2K")
    assert "rank 0" in cleared
    assert re.sub(r"\x1b\[[0-9;]*m", "", sentence).strip() == "error: ended by SIGINT"


def _read_until(terminal: int, pattern: str) -> str:
    text = ""
    deadline = time.monotonic() + HANG_SECONDS
    while not re.search(pattern, text):
        left = deadline - time.monotonic()
        assert left > 0, text
        if select.select([terminal], [], [], left)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
    return text
