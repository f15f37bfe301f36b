"""Command line as a process: imported modules, exit codes, stdout and stderr."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from svdpp import __version__
from svdpp.cli.app import COMMANDS
from tests.support.shell import (
    DEMO,
    PHOTO,
    TINY,
    assert_error,
    python,
    run_in_turn,
    svdpp_alone,
    svdpp_here,
)

# --- light commands -----------------------------------------------------------------------------

HEAVY = {
    *("torch", "diffusers", "transformers", "accelerate", "safetensors", "huggingface_hub"),
    *("numpy", "PIL", "imageio_ffmpeg", "tqdm", "loguru", "pydantic", "yaml"),
}
#: Modules that only their own command may import.
COMMAND_MODULES = {f"svdpp.cli.{name}" for name in COMMANDS}


#: Light commands: arguments, a word of the output, and the heavy or command modules that the
#: command may import in addition to the commands before it. Typer imports pydantic to convert the
#: option values of the last command.
LIGHT = (
    (("--help",), "Usage:", set()),
    (("--version",), f"svdpp {__version__}", set()),
    (("run", "--help"), "Usage:", {"svdpp.cli.run"}),
    (("serve", "--help"), "Usage:", {"svdpp.cli.serve"}),
    (("plan",), "per min", {"svdpp.cli.plan"}),
    (("plan", "--world", "4", "--clips", "3", "--json"), '"bubble"', {"pydantic"}),
)


def test_light_commands_import_nothing_heavy() -> None:
    """Light commands import no heavy package.

    One new process runs the commands one after the other, and lists the new modules after each.
    """
    answers = run_in_turn(*(arguments for arguments, _, _ in LIGHT))
    for (arguments, word, expected), (code, out, added) in zip(LIGHT, answers, strict=True):
        assert (code, word in out) == (0, True), arguments
        packages = {name.partition(".")[0] for name in added}
        assert packages & HEAVY | added & COMMAND_MODULES == expected, arguments
    assert "svdpp" in answers[0][2]


# --- exit codes ---------------------------------------------------------------------------------


def test_errors_as_json() -> None:
    wrong = svdpp_alone("plan", "--world", "7", "--steps", "25", "--json")
    assert wrong.code == 2
    assert json.loads(wrong.out) == {
        "schema_version": 1,
        "error": {
            "type": "RequestError",
            "exit_code": 2,
            "message": "25 steps cannot be split evenly over 7 ranks; the nearest step counts that "
            "can are 21 and 28",
            "hint": "use --steps 21 or --steps 28, or use --world 5, or use --split alternating",
            "field": "num_inference_steps",
            "details": {
                **{"field": "num_inference_steps", "steps": 25},
                **{"ranks": 7, "nearest": [21, 28]},
            },
        },
    }


INTERRUPTED_WHILE = """
import os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it

class Interrupter:
    at = sys.argv.pop(1)

    def find_spec(self, name, *_):
        if name == self.at:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
from svdpp.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["svdpp.cli.app", "svdpp.plan.forecast"])
def test_an_interrupt_while_modules_are_imported(module: str) -> None:
    """Ctrl-C during the imports ends the command with exit code 130 and without a traceback."""
    answer = python("-c", INTERRUPTED_WHILE, module, "plan")

    assert answer.code == 130
    assert answer.err in ("", "error: ended by SIGINT\n")


def test_what_was_not_foreseen_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(import_module("svdpp.cli.plan"), "show_layout", broken)
    answer = svdpp_here("plan")

    assert (answer.code, answer.out) == (1, "")
    assert answer.err == (
        "error: unexpected ZeroDivisionError: division by zero\n"
        "hint: run again with --debug and report what it shows\n"
    )
    assert "Traceback" in svdpp_here("plan", "--debug").err
    error = json.loads(svdpp_here("plan", "--json").out)["error"]
    assert (error["type"], error["exit_code"]) == ("ZeroDivisionError", 1)


@pytest.mark.slow
def test_plain_ascii_streams_are_no_error() -> None:
    env = {"PYTHONIOENCODING": "ascii"}
    answer = svdpp_alone("plan", env=env)
    assert (answer.code, "\x1b" in answer.out + answer.err) == (0, False)
    assert_error(svdpp_alone("run", *DEMO, "é.png", env=env), 7, r"\xe9.png")


@pytest.mark.parametrize("arguments", ["plan --help", "plan --world 14", "plan --json"])
def test_a_reader_that_ends_early_is_no_error(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "svdpp", *arguments.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode in (128 + signal.SIGPIPE, -signal.SIGPIPE)
    assert "rror" not in done.stderr


@pytest.mark.slow
@pytest.mark.full
def test_a_photograph_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / f"{name}.jpg").write_bytes(Path(PHOTO).read_bytes())
    run = ("run", b"caf\xe9.jpg", *DEMO, *TINY, "--world", "2")
    strict = {"PYTHONIOENCODING": "utf-8:strict"}  # the setting of most locales
    answer = svdpp_alone(*run, cwd=tmp_path, env=strict)
    assert (answer.code, answer.out) == (0, f"out/{name}_0.mp4\n"), answer.err
    record = json.loads((tmp_path / f"out/{name}_0.mp4.json").read_text())
    assert (record["input"], record["output"]) == (f"../{name}.jpg", f"{name}_0.mp4")
    again = svdpp_alone(*run, "--resume", cwd=tmp_path, env=strict)
    assert again.out == f"out/{name}_0.mp4  (was finished)\n", again.err
