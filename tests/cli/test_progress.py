"""Progress of a run: display on a terminal, plain lines elsewhere, and the log."""

from __future__ import annotations

import fcntl
import io
import json
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from loguru import logger
from rich.console import Console as RichConsole

from svdpp.cli.console import Console
from svdpp.cli.options.files import LogOptions
from svdpp.cli.progress import EventLog, Progress, open_log
from svdpp.plan.costs import CostModel
from svdpp.plan.layout import Layout
from svdpp.worker.messages import (
    CheckpointLost,
    ClipDone,
    ClipFailed,
    Event,
    Heartbeat,
    Joined,
    StepDone,
    TransferDone,
)
from tests.support.dummies import HANG_SECONDS
from tests.support.shell import PYTHONPATH, ROOT

Events = Sequence[tuple[int, Event]]
LOST = {"type": "OutputError", "message": "it cannot be written", "hint": ""}


def show_progress(
    events: Events, *, term: str, decodes: bool = False, **about: Any
) -> tuple[Progress, list[str]]:
    """Display the progress of a run during `events`; return it and all lines that it wrote.

    `term` is the type of terminal; "none" stands for a file.
    """
    console, written = Console(), io.StringIO()
    how: dict[str, Any] = {"color_system": None, "width": 80, "height": 24}
    is_terminal = term != "none"
    console.err = RichConsole(
        file=written,
        force_terminal=is_terminal,
        legacy_windows=False,
        _environ={"TERM": term},
        **how,
    )
    layout = Layout(num_steps=28, world_size=2, decodes=decodes)
    with Progress(console, "run", layout.schedule(2), **about) as progress:
        for rank, event in events:
            progress(rank, event)
    text = written.getvalue()
    shown = text.rpartition("\x1b[?25h")[0] or text
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown).replace("\r", "\n")
    return progress, [line.rstrip() for line in plain.split("\n") if line.strip()]


def test_a_settled_clip_is_counted_once() -> None:
    no_folder = CheckpointLost(error={**LOST, "message": "none in 'D'", "hint": "so"})
    events: Events = (
        *((rank, no_folder) for rank in range(2)),
        (1, ClipDone(clip=0, metadata={"output": "a.mp4"})),
        (0, ClipFailed(clip=0, error=LOST)),
        (0, ClipDone(clip=1, metadata={"output": "b.mp4", "wall_seconds": 3.21})),
    )
    assert show_progress(events, term="none")[1] == [
        "run: none in 'D': so",
        "run: 1 of 2 clips: clip 1 -> a.mp4",
        "run: 2 of 2 clips: clip 2 -> b.mp4, 3.2 s",
    ]


EVENTS: Events = (
    (0, Joined(device="cpu", load_seconds=0.1)),
    (0, Heartbeat(action="ENCODE c0 @0")),
    (0, Heartbeat(action="DENOISE c0 0:14")),
    (0, StepDone(clip=0, step=0, seconds=2.0)),
    (0, StepDone(clip=0, step=1, seconds=2.0)),
    (1, Joined(device="cpu", load_seconds=0.1)),
    (1, Heartbeat(action="DENOISE c0 14:28", waiting=True)),
)


def test_a_terminal_shows_a_line_a_rank() -> None:
    labels = ["a-very-long-name-of-an-image-that-goes-on.jpg", "b.jpg"]
    lines = show_progress(EVENTS, term="xterm", labels=labels)[1][-3:]

    # Each of two clips has 28 steps, half of them on each rank. Two steps are done, and took 2 s
    # each.
    assert lines[0] == "run: 0 of 2 clips, 0:00 elapsed, about 1:24 left"
    long = "a-very-long-name-of-"
    assert re.fullmatch(rf"rank 0 +[━╸╺ ]* 2/28 {long}, step 2, 2.00 s/step", lines[1])
    assert re.fullmatch(rf"rank 1 +[━╸╺ ]*0/28 {long}, waiting", lines[2])
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize(
    ("about", "events", "said"),
    [
        # Nothing has been decoded yet. By the assumed costs, a decode takes as long as four steps.
        (
            {"decodes": True, "costs": CostModel(step_seconds=0.5, decode_seconds=2.0)},
            EVENTS,
            "run: 0 of 2 clips, 0:00 elapsed, about 1:40 left",
        ),
        ({}, EVENTS[:1], "run: 0 of 2 clips, starting, 0:00"),
        ({"ranks": False}, EVENTS, "run: 0 of 2 clips, 0:00 elapsed, about 1:24 left"),
    ],
)
def test_the_summary(about: dict[str, Any], events: Events, said: str) -> None:
    lines = show_progress(events, term="xterm", **about)[1]
    assert [line for line in lines if line.startswith("run: ")][-1] == said
    assert any("rank 0" in line for line in lines) == about.get("ranks", True)


@pytest.mark.parametrize("term", ["none", "dumb"])
def test_elsewhere_every_clip_is_a_plain_line_and_the_closing_line_counts(term: str) -> None:
    made = ClipDone(clip=1, metadata={"output": "b_1.mp4", "wall_seconds": 9.96})
    progress, lines = show_progress(((1, ClipFailed(clip=0, error=LOST)), (1, made)), term=term)
    assert lines == [
        "run: clip 1 failed: it cannot be written",
        "run: 1 of 2 clips: clip 2 -> b_1.mp4, 10.0 s",
    ]
    assert re.fullmatch(r"run: 1 clip in 0:00, [\d.e+]+ a minute, 1 failed", progress.summary_line)


def test_elsewhere_a_line_now_and_then_shows_that_the_run_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("svdpp.cli.progress._LINE_SECONDS", 0.0)
    assert show_progress(EVENTS[:1], term="none")[1] == ["run: 0 of 2 clips, starting, 0:00"]


@pytest.mark.slow
def test_an_interrupt_leaves_a_clean_terminal() -> None:
    """After Ctrl-C, a real terminal shows one error at the start of a line, and the cursor."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = ("simulate", "--world", "2", "--steps", "4", "--clips", "500")
    running = subprocess.Popen(
        [sys.executable, "-m", "svdpp", *command, "--latent-shape", "1", "4", "2", "8", "8"],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "TERM": "xterm-256color"},
        cwd=ROOT,
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
    assert "\x1b[?25h" in last, "the cursor is shown again"
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


# --- the log ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def closed_log() -> Iterator[None]:
    yield
    logger.remove()


def test_the_files_of_a_long_life_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("svdpp.cli.progress._FILE_BYTES", 10_000)
    open_log(verbosity=0, log_file=tmp_path / "log", write=lambda _: None)
    for number in range(200):
        logger.info("clip {} is finished", number)

    files = ["log", "log.1", "log.2", "log.3", "log.4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert all(path.stat().st_size <= 10_000 for path in tmp_path.iterdir())
    last = (tmp_path / "log").read_text().splitlines()[-1]
    assert json.loads(last)["record"]["message"] == "clip 199 is finished"


def test_the_file_gets_json_lines_and_steps_only_with_v(tmp_path: Path) -> None:
    said: list[str] = []
    path = tmp_path / "new" / "run.jsonl"
    for verbosity in (0, 1):  # the second pass appends to the file
        open_log(verbosity=verbosity, log_file=path, write=said.append)
        logger.bind(rank=3).debug(f"a step, verbosity {verbosity}")
        logger.bind(rank=3).info("two\nlines")
    records = [json.loads(line)["record"] for line in path.read_text().splitlines()]

    messages = ["two\nlines", "a step, verbosity 1", "two\nlines"]
    assert [record["message"] for record in records] == messages
    assert {record["extra"]["rank"] for record in records} == {3}
    assert len(said) == 1  # stderr gets nothing without -v, and steps only with -vv


def test_a_full_disk_is_said_once_and_stops_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    open_log(verbosity=1, log_file=Path("/dev/full"), write=said.append)
    for _ in range(3):
        logger.info("still here")

    warnings = [line for line in said if "still here" not in line]
    full = "warning: cannot write the log '/dev/full': [Errno 28] No space left on device"
    assert (warnings, len(said)) == ([full], 4)
    assert capfd.readouterr().err == ""


def test_brackets_in_a_name_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    LogOptions(verbose=1).open(Console(), None)
    logger.info("'[/x] [b].jpg' is lost")
    assert capsys.readouterr().err.endswith(" rank - '[/x] [b].jpg' is lost\n")


def test_v_shows_ranges_and_transfers_and_vv_the_steps() -> None:
    said: dict[int, str] = {}
    for verbosity in (0, 1, 2):
        lines: list[str] = []
        open_log(verbosity=verbosity, log_file=None, write=lines.append)
        log = EventLog(Layout(num_steps=4, world_size=2))
        joined = Joined(device="cpu", load_seconds=0.1)
        transfer = TransferDone(
            direction="recv", clip=0, peer=0, next_step=2, num_bytes=8, seconds=0.1, end=1.0
        )
        for event in (joined, transfer, StepDone(clip=0, step=2, seconds=0.5)):
            log(1, event)
        said[verbosity] = "".join(lines)
    assert said[0] == ""
    assert "rank 1 ready: steps 2 to 4 on cpu" in said[1]
    assert "rank 1 recv clip 0 at step 2 from rank 0: 8 bytes" in said[1]
    assert "step 2: 0.5000 s" not in said[1]
    assert "rank 1 clip 0 step 2: 0.5000 s" in said[2]


def test_tracebacks_show_no_values_of_variables(tmp_path: Path) -> None:
    """Tracebacks do not show values of variables, which may be keys or URLs with passwords."""
    lines: list[str] = []
    open_log(verbosity=1, log_file=tmp_path / "log.jsonl", write=lines.append)
    url = "postgresql://svdpp:" + "pa55" + "w0rd@db/svdpp"
    try:
        url.index("absent")
    except ValueError as error:
        logger.opt(exception=error).error("it fails")
    finally:
        logger.remove()
    for text in ("\n".join(lines), (tmp_path / "log.jsonl").read_text()):
        assert "url.index" in text
        assert "w0rd" not in text
