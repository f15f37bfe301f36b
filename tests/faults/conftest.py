"""Commands of svdpp in new processes: start, events of their ranks, faults, and their end.

After each test, no process or temporary file of its commands may be left.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from svdpp.media.video import read_frames
from tests.support.processes import (
    MARK,
    adopting_orphans,
    allowing_for_others,
    collected,
    command_line,
    is_there,
    marked,
    process_ids,
    wait_until,
)
from tests.support.shell import DEMO, PHOTO, PYTHONPATH

WORLD_SIZE = 3
NUM_FRAMES = 2

#: Command that makes small clips of the dummy model, without pauses.
SIMULATE = (
    *("simulate", "--world", str(WORLD_SIZE), "--steps", "6", "--threads", "1"),
    *("--latent-shape", "1", "4", "2", "8", "8", "--clips", "4", "--quiet"),
)
#: Value of `stop` in a plan (see `tests.support.injected`): rank 1 hangs at clip 2, and the other
#: ranks wait for it.
STANDING = {"kind": "hang", "rank": 1, "clip": 2, "place": "step2"}
#: Command that makes four small clips of the demo model. The output folder has to be appended.
RUN = (
    *("run", PHOTO, *DEMO, "--world", str(WORLD_SIZE), "--steps", "3", "--threads", "1"),
    *("--frames", str(NUM_FRAMES), "--height", "64", "--width", "64", "--seeds", "0-3"),
    *("--skip-existing", "--quiet", "--out"),
)
_START_SECONDS = 300.0  # long enough for a loaded machine


class Command:
    """Process of a svdpp command into which a test injects faults, with its own temporary folder.

    Args:
        arguments: Arguments of `svdpp`. If `-m` is among them, they are arguments of Python, in
            which `{plan}` and `{home}` stand for the plan's file and the folder.
        out: Folder to which the command writes clips; None if it writes none.
        plan: Plan of `tests.support.injected`, without the key `events`. None runs `svdpp` without
            a fault.
    """

    def __init__(
        self, home: Path, *arguments: str, out: Path | None = None, plan: Any = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.home = Path(tempfile.mkdtemp(prefix="t", dir=home))
        self.out = out
        self._events = home / f"{self.mark}.events"
        self._stderr = home / f"{self.mark}.err"
        self._seen: set[int] = set()
        self._older = frozenset(process_ids())  # `pids` need not read these processes
        program = ["-m", "svdpp"]
        if plan is not None:
            plan_file = home / f"{self.mark}.json"
            plan_file.write_text(json.dumps({"events": str(self._events), **plan}))
            program = ["-m", "tests.support.injected", str(plan_file)]
            arguments = tuple(word.format(plan=plan_file, home=home) for word in arguments)
        environment = {
            **os.environ,
            **{"PYTHONPATH": PYTHONPATH, "TMPDIR": str(self.home), MARK: self.mark},
            **{"COLUMNS": "80", "TERM": "dumb", "HF_HUB_OFFLINE": "1"},
        }
        # An import of diffusers has set this variable here. It is removed, so that the test notices
        # the folder if the command creates one.
        environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, *(() if "-m" in arguments else program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env=environment,
                start_new_session=True,
            )

    @property
    def errors(self) -> str:
        return self._stderr.read_text()

    def event(self, **wanted: Any) -> None:
        """Wait for an event of a rank of the command that has the given values in its fields."""

        def is_heard() -> bool:
            has_ended = self.process.poll() is not None
            with contextlib.suppress(FileNotFoundError):
                written, _, _ = self._events.read_text().rpartition("\n")
                # The last line may be incomplete, so it is left out.
                events = map(json.loads, written.splitlines())
                if any(wanted.items() <= event.items() for event in events):
                    return True
            assert not has_ended, f"ended before {wanted}: {self.errors}"
            return False

        wait_until(is_heard, _START_SECONDS, f"{wanted} in {self.mark}")

    def pids(self) -> list[int]:
        found = marked(self.mark, self._older)
        self._seen.update(found)
        return found

    def process_with(self, words: str) -> int:
        """Wait for a process of the command whose command line contains `words`; return its id."""

        def there() -> list[int]:
            assert self.process.poll() is None, f"ended before {words!r}: {self.errors}"
            return [pid for pid in self.pids() if words in command_line(pid)]

        return wait_until(there, _START_SECONDS, words)[0]

    def signal(self, number: signal.Signals, *, group: bool = False) -> float:
        """Send a signal to the command or to its process group; return the monotonic time."""
        self.pids()
        now = time.monotonic()
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)
        return now

    def end(self, fault: float, bound: float) -> int:
        """Wait for the command's end, `bound` seconds after `fault` at most; return the exit
        code."""
        bound = allowing_for_others(bound)
        try:
            self.process.wait(max(0.0, fault + bound - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {bound} s: {self.errors}") from None
        print(f"{time.monotonic() - fault:.2f} s of {bound} s")
        return self.process.returncode

    def assert_gone(self, seconds: float = 1.0) -> None:
        """Check that the command left no process or temporary file, and only complete clips."""
        self._seen.update(self.pids())
        seconds = allowing_for_others(seconds)
        orphans = self._seen - {self.process.pid}
        who = lambda: str({pid: command_line(pid) for pid in filter(is_there, orphans)})  # noqa: E731
        wait_until(lambda: collected(orphans), seconds, who)
        assert not marked(self.mark)
        left = os.listdir(self.home)
        assert not left, left
        if self.out is not None and self.out.exists():
            left = [name for name in os.listdir(self.out) if name.startswith(".")]
            assert not left, left
            for clip in self.out.glob("*.mp4"):
                assert len(read_frames(clip, "mp4")) == NUM_FRAMES
                assert clip.with_suffix(".mp4.json").exists()

    def discard(self) -> None:
        """Kill the processes that a failed test's command has left."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


StartCommand = Callable[..., Command]


@pytest.fixture
def home() -> Iterator[Path]:
    """Folder with a short path, because the path of a socket may have at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(home: Path) -> Iterator[StartCommand]:
    """Function that starts a command of svdpp in a new process.

    After the test, check that nothing of the commands is left.
    """
    commands: list[Command] = []

    def starter(*arguments: str, **options: Any) -> Command:
        commands.append(Command(home, *arguments, **options))
        return commands[-1]

    with adopting_orphans():
        try:
            yield starter
            for command in commands:
                command.assert_gone()
        finally:
            for command in commands:
                command.discard()
