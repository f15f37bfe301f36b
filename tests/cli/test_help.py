"""Help, its examples, and shell completion."""

from __future__ import annotations

import copy
import itertools
import re
import shlex
from typing import Any

import pytest

from svdpp.cli.app import COMMANDS, command_named
from svdpp.cli.options.declare import HIDDEN_NAMES, PANELS
from tests.cli.shell import python, svdpp_here


def parsed(line: str) -> dict[str, Any]:
    """The arguments that a command line gives to its command's function, which is not called.

    Raises:
        click.ClickException: it is not a command line of svdpp.
        SvdppError: the values of an option group contradict each other.
    """
    program, name, *arguments = shlex.split(line)
    assert program == "svdpp"
    spec, calls = copy.copy(command_named(name)), []
    spec.function = lambda **values: calls.append(values)
    spec.main(arguments, standalone_mode=False)
    (values,) = calls
    return values


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal(name: str) -> None:
    short, whole = svdpp_here(name, "--help"), svdpp_here(name, "--help-all")

    assert (short.code, whole.code) == (0, 0)
    assert svdpp_here(name, "-h") == short
    assert len(short.out.splitlines()) <= 62
    for text in (short.out, whole.out):
        assert max(map(len, text.splitlines())) <= 80
        assert "<bool>" not in text
        assert "…" not in text
        assert not [name for name in HIDDEN_NAMES if name in text]
        assert COMMANDS[name].split(":")[0] in " ".join(text.split())
    for paragraph in short.out.partition("\n\n")[2].split("\n\n"):
        lines = paragraph.splitlines()
        if not lines[0].startswith(("Arguments", "Common", "More", "Examples", *PANELS)):
            # Text is filled: no line ends early if the next word fits.
            for line, after in itertools.pairwise(lines):
                assert len(line) + 1 + len(after.split()[0]) > 78


def test_help_of_run_shows_what_is_common_and_names_the_rest() -> None:
    short, whole = svdpp_here("run", "--help").out, svdpp_here("run", "--help-all").out

    common = short.partition("\nCommon:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^ {2,6}(?:-\w, )?(--[a-z-]+)", common, re.M) == [
        *("--out", "--gpus", "--model", "--seeds", "--layout", "--resume", "--overwrite"),
        *("--steps", "--frames", "--decode-chunk-size", "--help", "--help-all"),
    ]
    titles = [
        "Video",
        "Prompts",
        "Model and precision",
        "Layout",
        "Recovery",
        "Diagnostics",
    ]
    more = short.partition("described by --help-all:\n")[2].partition("\n\n")[0]
    assert re.findall(r"^ {2}(\w[\w ]*?) {2,}--", more, re.M) == titles
    assert [line[:-1] for line in whole.splitlines() if line[:-1] in titles] == titles
    shown = re.findall(r"^ {2,6}(?:-\w, )?(--[a-z-]+)", whole, re.M)
    assert len(shown) == len(set(shown)) > 45
    assert set(re.findall(r"--[a-z-]+", more)) < set(shown)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_documents_its_own_defaults(name: str) -> None:
    text = " ".join(svdpp_here(name, "--help-all").out.split())
    defaults = re.findall(r"\[default: ([^]]*)\]", text)

    assert "Default:" not in text
    assert len(defaults) == text.count("[default: ") > 0 or name in ("env", "models", "report")
    others = [other for other in COMMANDS if other not in (name, "run")]
    assert not [d for d in defaults for other in others if f"svdpp {other}" in d]


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_command_lines(name: str) -> None:
    spec = command_named(name)

    assert 2 <= len(spec.examples) <= 3
    for example in spec.examples:
        assert example.split()[1] == name
        assert f"\n  {example}\n" in svdpp_here(name, "--help").out
        parsed(example)


def test_diffusers_spellings_are_taken() -> None:
    values = parsed("svdpp run photo.jpg --num-inference-steps 25 --num-frames 14")

    assert (values["options"].steps, values["options"].num_frames) == (25, 14)


COMPLETE = """
import os, sys
from svdpp.cli.app import run_command_line
os.environ["_SVDPP_COMPLETE"] = "bash_complete"
for line in sys.stdin.read().splitlines():
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    assert run_command_line([]) == 0
    print("END", flush=True)
"""

COMPLETED = {
    "svdpp run --split ": "uniform balanced alternating",
    "svdpp run --layout ": "auto pipeline data-parallel",
    "svdpp run --format ": "mp4 gif webp frames",
    "svdpp run --dtype ": "fp32 fp16 bf16",
    "svdpp run --fit ": "crop pad stretch",
    "svdpp simulate --split a": "alternating",
    "svdpp do": "doctor",
}


def test_a_shell_completes_choices() -> None:
    answer = python("-c", COMPLETE, stdin="\n".join(COMPLETED))

    assert answer.code == 0, answer
    given = [re.findall(r"^plain,(.*)", block, re.M) for block in answer.out.split("END\n")]
    found = {line: " ".join(words) for line, words in zip(COMPLETED, given, strict=False)}
    assert found == COMPLETED
