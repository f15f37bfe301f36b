"""The program in its own process: exit codes, stdout and stderr."""

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
from svdpp.cli.command import COMMANDS
from tests.cli.shell import (
    DEMO,
    PHOTO,
    TINY,
    assert_error,
    python,
    svdpp_alone,
    svdpp_and_modules,
    svdpp_here,
)

# --- light commands -----------------------------------------------------------------------------

HEAVY = {
    *("torch", "diffusers", "transformers", "accelerate", "safetensors", "huggingface_hub"),
    *("numpy", "PIL", "imageio_ffmpeg", "tqdm", "loguru", "pydantic", "yaml"),
}
#: Modules of svdpp that one command imports and others must not.
COMMAND_MODULES = {f"svdpp.cli.{name}" for name in COMMANDS}


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--help",), "Usage:"),
        (("--version",), f"svdpp {__version__}"),
        (("run", "--help"), "Usage:"),
        (("plan",), "per min"),
        (("plan", "--world", "4", "--clips", "3", "--json"), '"bubble"'),
    ],
    ids=str,
)
def test_light_commands_import_nothing_heavy(arguments: tuple[str, ...], word: str) -> None:
    answer, loaded = svdpp_and_modules(*arguments)

    assert answer.code == 0
    assert word in answer.out
    assert "svdpp" in loaded
    assert {name.partition(".")[0] for name in loaded} & HEAVY == set()
    assert loaded & COMMAND_MODULES == {
        f"svdpp.cli.{name}" for name in COMMANDS.keys() & {arguments[0]}
    }


def test_pure_rooms_import_the_standard_library_alone() -> None:
    code = (
        "import sys; before = set(sys.modules)\n"
        "import svdpp.config, svdpp.plan.forecast, svdpp.plan.choose\n"
        "names = {n.partition('.')[0] for n in set(sys.modules) - before}\n"
        "print(*(names - set(sys.stdlib_module_names)))"
    )

    assert python("-c", code).out.split() == ["svdpp"]


# --- exit codes ---------------------------------------------------------------------------------


def test_errors_as_json() -> None:
    wrong = svdpp_alone("plan", "--world", "7", "--steps", "25", "--json")
    usage = svdpp_alone("plan", "--wrold", "7", "--json")
    lost = svdpp_here("run", "nope.png", *DEMO, "--json")

    assert (wrong.code, usage.code, lost.code) == (2, 2, 7)
    assert json.loads(wrong.out) == {
        "schema_version": 1,
        "error": {
            "type": "RequestError",
            "exit_code": 2,
            "message": "25 steps cannot be split evenly over 7 ranks; the nearest step counts that "
            "can are 21 and 28",
            "hint": "use --steps 21 or --steps 28, or --world 5, or --split alternating",
            "details": {"steps": 25, "ranks": 7, "nearest": [21, 28]},
        },
    }
    for answer, words in ((usage, "no such option '--wrold'"), (lost, "'nope.png' does not exist")):
        assert_error(answer, answer.code, words)
        assert words in json.loads(answer.out)["error"]["message"]


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


@pytest.mark.parametrize("module", ["svdpp.cli.command", "svdpp.plan.forecast"])
def test_an_interrupt_while_modules_are_imported(module: str) -> None:
    """In its first quarter of a second, Python answers Ctrl-C with a traceback."""
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


# --- real ranks ---------------------------------------------------------------------------------


@pytest.mark.processes
def test_simulate_json() -> None:
    answer = svdpp_alone(
        *("simulate", "--world", "2", "--steps", "4", "--clips", "3", "--json", "-q"),
        *("--latent-shape", "1", "4", "2", "8", "8"),
    )

    assert (answer.code, answer.err) == (0, "")
    result = json.loads(answer.out)
    measured, forecast, ranks = (result.pop(name) for name in ("measured", "forecast", "ranks"))
    assert result == {
        "schema_version": 1,
        "num_steps": 4,
        "world_size": 2,
        "split": "uniform",
        "replicas": 1,
        "decoders": 1,
        "cfg_parallel": 1,
        "decode_ranks": 1,
        "model": "dummy",
        "dtype": "fp32",
        "backend": "gloo",
        "num_threads": result["num_threads"],
        "clips": 3,
    }
    for times in (measured, forecast):
        assert times.keys() == {
            *("makespan_seconds", "first_clip_seconds", "seconds_per_clip", "bubble"),
        }
        assert times["makespan_seconds"] >= times["first_clip_seconds"] > 0
        assert 0 <= times["bubble"] < 1
    assert [(rank["rank"], rank["start"], rank["end"]) for rank in ranks] == [(0, 0, 2), (1, 2, 4)]
    for rank in ranks:
        assert rank["steps_done"] == 2 * 3
        assert rank["compute_seconds"] > 0
        assert 0 <= rank["bubble"] <= 1


@pytest.mark.long
@pytest.mark.processes
def test_a_photograph_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    (tmp_path / f"{name}.jpg").write_bytes(Path(PHOTO).read_bytes())
    run = ("run", b"caf\xe9.jpg", *DEMO, *TINY, "--world", "2")
    strict = {"PYTHONIOENCODING": "utf-8:strict"}  # as in most locales
    answer = svdpp_alone(*run, cwd=tmp_path, env=strict)
    assert (answer.code, answer.out) == (0, f"out/{name}_0.mp4\n"), answer.err
    record = json.loads((tmp_path / f"out/{name}_0.mp4.json").read_text())
    assert (record["input"], record["output"]) == (f"../{name}.jpg", f"{name}_0.mp4")
    again = svdpp_alone(*run, "--resume", cwd=tmp_path, env=strict)
    assert again.out == f"out/{name}_0.mp4  (was finished)\n", again.err
