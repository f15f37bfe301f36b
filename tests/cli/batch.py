"""Runs many commands, each in a process forked from one that has imported everything.

    python -m tests.cli.batch < commands.json > answers.json

Starting Python and importing torch takes seconds, which a test of fifty commands cannot pay fifty
times. The CPU time of a forked process is that of the command alone.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from svdpp.launch import process_lifetime
from tests.cli.shell import Answer, python


@dataclass(frozen=True)
class Outcome:
    """The answer of a command, and its resources."""

    answer: Answer
    cpu_seconds: float
    peak_bytes: int
    """Largest resident memory, including the memory inherited from the parent."""


def run_batch(commands: Iterable[Sequence[str]], cwd: Path) -> list[Outcome]:
    """Runs each of `commands` (arguments of svdpp) in `cwd`, one after the other.

    File permissions apply to root too.
    """
    with TemporaryDirectory() as name:
        path = Path(name, "commands.json")
        path.write_text(json.dumps([list(command) for command in commands]))
        done = python("-m", "tests.cli.batch", str(path), cwd=cwd)
    assert done.code == 0, done
    return [
        Outcome(Answer(**each["answer"]), each["cpu_seconds"], each["peak_bytes"])
        for each in json.loads(done.out)
    ]


def _main(path: Path) -> None:
    import svdpp.cli.run
    import svdpp.driver.jobs
    import svdpp.driver.pipeline  # noqa: F401  what every run imports

    outcomes = [asdict(_run(command)) for command in json.loads(path.read_text())]
    json.dump(outcomes, sys.stdout)


def _run(arguments: list[str]) -> Outcome:
    with TemporaryDirectory() as name:
        streams = [Path(name, "out"), Path(name, "err")]
        child = os.fork()
        if child == 0:
            for descriptor, stream in enumerate(streams, start=1):
                os.dup2(os.open(stream, os.O_WRONLY | os.O_CREAT), descriptor)
            _command(arguments)
        _, status, usage = os.wait4(child, 0)
        out, err = (stream.read_text(errors="surrogateescape") for stream in streams)
    code, cpu_seconds = os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
    return Outcome(Answer(code, out, err), cpu_seconds, usage.ru_maxrss * 1024)


def _command(arguments: list[str]) -> None:
    from svdpp.__main__ import main

    code = 1
    try:
        _give_up_override()
        sys.argv = ["svdpp", *arguments]
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        process_lifetime.remove_multiprocessing_folder()
        os._exit(code)


def _give_up_override() -> None:
    """Root without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH (1, 2): capset(2), version 3."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None)
    libc.capget(header, sets)
    for index in (0, 1):  # effective and permitted, of the first 32 capabilities
        sets[index] &= ~0b110
    libc.capset(header, sets)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
