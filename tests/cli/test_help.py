"""Help, its examples, and shell completion."""

from __future__ import annotations

import re

import pytest

from svdpp.cli.command import COMMANDS, command_named
from tests.cli.shell import parsed, python, svdpp_here


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_a_terminal_and_its_examples_are_command_lines(name: str) -> None:
    spec, answer = command_named(name), svdpp_here(name, "--help")

    assert answer.code == 0
    assert svdpp_here(name, "-h") == answer
    text, examples = answer.out.split("\n  Examples:\n")
    assert max(map(len, text.splitlines())) <= 80
    assert COMMANDS[name].split(":")[0] in " ".join(text.split())
    shown = re.findall(r"^ {2}(?:-\w, )?(--[a-z-]+)", text, re.M)
    assert (
        len(shown)
        == len(set(shown))
        == len(spec.get_params(spec.context_class(spec)))
        - len([one for one in spec.params if one.param_type_name == "argument"])
    )
    assert [line.strip() for line in examples.splitlines()] == list(spec.examples)
    assert 2 <= len(spec.examples) <= 3
    for example in spec.examples:
        assert example.split()[1] == name
        parsed(example)


def test_help_of_run_is_in_panels() -> None:
    text = svdpp_here("run", "--help").out
    titles = ["Arguments", "Video", "Prompts", "Model and precision", "Layout", "Recovery"]
    assert re.findall(r"^(\w.*):$", text, re.M) == [*titles, "Diagnostics"]


def test_spellings_of_diffusers_are_taken() -> None:
    values = parsed("svdpp run photo.jpg --num-inference-steps 25 --num-frames 14")

    assert (values["options"].steps, values["options"].num_frames) == (25, 14)


COMPLETE = """
import os, sys
from svdpp.cli.command import run_command_line
os.environ["_SVDPP_COMPLETE"] = "bash_complete"
for line in sys.stdin.read().splitlines():
    os.environ |= {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    assert run_command_line([]) == 0
    print("END", flush=True)
"""

COMPLETED = {
    "svdpp run --split ": "uniform balanced alternating",
    "svdpp simulate --split a": "alternating",
    "svdpp do": "doctor",
}


def test_a_shell_completes_choices() -> None:
    answer = python("-c", COMPLETE, stdin="\n".join(COMPLETED))

    assert answer.code == 0, answer
    given = [re.findall(r"^plain,(.*)", block, re.M) for block in answer.out.split("END\n")]
    found = {line: " ".join(words) for line, words in zip(COMPLETED, given, strict=False)}
    assert found == COMPLETED
