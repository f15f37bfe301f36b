"""Run svdpp's command line in this process or in a new one, without GPUs or network."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

import svdpp
from svdpp.cli.app import load_command, run_command_line
from svdpp.errors import fields_in

ROOT = Path(svdpp.__file__).parent.parent
#: PYTHONPATH for new processes: the checkout, and the PYTHONPATH of the tests' own process, which
#: `make test-jitter` sets.
PYTHONPATH = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
PHOTO = str(ROOT / "svdpp/assets/photos/rocket.jpg")

#: Options for `svdpp run` that select a small model that needs no download.
DEMO = ("--model", "demo", "--device", "cpu")
TINY = ("--steps", "2", "--frames", "2", "--height", "32", "--width", "32", "--threads", "1")

_UNSET = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PIPELINE_BACKEND"),
    *("SLURM_STEP_ID", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"),
    *("TERMINAL_WIDTH", "LINES"),
)
_SET = {"COLUMNS": "80", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TERM": "dumb"}


@dataclass(frozen=True)
class Answer:
    """Result of a command of svdpp: exit code, stdout and stderr."""

    code: int
    out: str
    err: str


def svdpp_here(*arguments: str, env: Mapping[str, str | None] | None = None) -> Answer:
    """Run a command of svdpp in this process, which is fast. The command must not start ranks."""
    settings = {**dict.fromkeys(_UNSET), **_SET, **(env or {})}
    with CliRunner().isolation(env=settings) as (out, err, _):
        code = run_command_line(arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        return Answer(code, out.getvalue().decode(), err.getvalue().decode())


def parsed(line: str) -> dict[str, Any]:
    """Parse a command line of svdpp, and return the arguments of the command's function."""
    program, name, *arguments = shlex.split(line)
    assert program == "svdpp"
    module, calls = import_module(f"svdpp.cli.{name}"), []
    (registered,) = module.app.registered_commands
    function = registered.callback.__wrapped__
    registered.callback.__wrapped__ = lambda **values: calls.append(values)
    try:
        load_command(name).main(arguments, standalone_mode=False)
    finally:
        registered.callback.__wrapped__ = function
    (values,) = calls
    return values


def svdpp_alone(
    *arguments: str | bytes, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Answer:
    """Run `python -m svdpp` in a new process, as a user would."""
    return python("-m", "svdpp", *arguments, env=env, cwd=cwd)


_LIST_MODULES = """
import sys
from svdpp.__main__ import main
try:
    main()
finally:
    print("MODULES", *sys.modules, file=sys.stderr)
"""


def svdpp_and_modules(*arguments: str) -> tuple[Answer, set[str]]:
    """Run `python -m svdpp` in a new process; return the result and the imported modules."""
    answer = python("-c", _LIST_MODULES, *arguments)
    err, _, modules = answer.err.rpartition("MODULES ")
    return replace(answer, err=err), set(modules.split())


_RUN_IN_TURN = """
import contextlib, io, json, sys
from svdpp.__main__ import main
before = set()
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    out, code = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as end:
            code = end.code
    after = set(sys.modules)
    print(json.dumps([code, out.getvalue(), sorted(after - before)]))
    before = after
"""


def run_in_turn(*commands: Sequence[str]) -> list[tuple[int, str, set[str]]]:
    """Run several commands of svdpp, one after the other, in one new process.

    Return the exit code, the stdout and the newly imported modules of each command.
    """
    answer = python("-c", _RUN_IN_TURN, json.dumps(commands))
    assert answer.code == 0, answer
    records = [json.loads(line) for line in answer.out.splitlines()]
    return [(code, out, set(added)) for code, out, added in records]


def python(
    *arguments: str | bytes,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str = "",
) -> Answer:
    """Run Python in a new process that can import svdpp from the checkout."""
    # svdpp sets these variables itself. They are removed, because conftest.py has set other values
    # in this process.
    unset = {*_UNSET, "TORCHINDUCTOR_CACHE_DIR", "OMP_WAIT_POLICY"}
    settings = {name: value for name, value in os.environ.items() if name not in unset}
    settings |= {**_SET, "PYTHONPATH": PYTHONPATH, **(env or {})}
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        cwd=cwd,
        env=settings,
        encoding="utf-8",
        errors="surrogateescape",
        input=stdin,
        timeout=600,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def assert_error(answer: Answer, code: int, *words: str) -> None:
    """Check the exit code of a command of svdpp, and the error that it printed.

    stderr must have one sentence, with all `words`, and at most one hint. stdout must be empty, or
    have the same error as JSON.
    """
    assert answer.code == code, answer
    if answer.out:
        record = json.loads(answer.out)
        assert record.keys() == {"schema_version", "error"}
        assert record["error"]["exit_code"] == code
        assert f"error: {record['error']['message']}\n" in answer.err
        assert not fields_in(f"{record['error']['message']} {record['error']['hint']}")
    for word in words:
        assert word in answer.err
    lines = answer.err.splitlines()
    assert lines[0].startswith("error: ")
    assert len(lines) == 1 or (len(lines) == 2 and lines[1].startswith("hint: ")), answer.err
    assert "unexpected" not in answer.err
    assert "Traceback" not in answer.err
