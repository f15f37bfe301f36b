"""Hints of errors name only options that the command has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from svdpp.cli.app import COMMANDS, load_command
from svdpp.cli.console import Console
from svdpp.cli.hints import keep_available
from svdpp.cli.option_names import option_names
from svdpp.cli.options.declare import with_aliases
from svdpp.errors import fields_in
from tests.support.shell import ROOT, svdpp_here

_OTHER_PROGRAMS = re.compile(r"\b(hf|docker|pip|torchrun|srun) [^,;()]*")
_COMMAND = re.compile(r"\bsvdpp (\w+)([^,;()]*)")
# Matches an option, but not a field of a benchmark's configuration, such as --model.name.
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w.-])")


@cache
def _options(command: str) -> frozenset[str]:
    params = load_command(command).params
    return frozenset(option for one in params for option in with_aliases(one.opts))


@cache
def _hint_texts() -> frozenset[str]:
    """Return all strings in svdpp's source, except docstrings, that name an option or a field.

    Placeholders of f-strings are replaced by the number 7.
    """
    return frozenset(_texts())


def _texts() -> Iterator[str]:
    for path in sorted((ROOT / "svdpp").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        inner = {
            id(each) for node in nodes if isinstance(node, ast.JoinedStr) for each in node.values
        }
        others = {id(each) for node in nodes for each in _descriptions(node)}
        for node in nodes:
            if id(node) in others:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = [
                    str(one.value) if isinstance(one, ast.Constant) else "7" for one in node.values
                ]
                text = "".join(parts)
            elif isinstance(node, ast.Constant) and id(node) not in inner:
                text = str(node.value)
            else:
                continue
            if (" --" in text or fields_in(text)) and "\n" not in text:
                yield text


def _descriptions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of svdpp's source that are docstrings or descriptions in Markdown."""
    if isinstance(node, ast.Expr):
        yield node.value
    elif isinstance(node, ast.keyword) and node.arg in ("description", "help"):
        yield from ast.walk(node)
    elif isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == "description":
                yield from ast.walk(value)


def test_texts_name_fields_that_have_an_option() -> None:
    """Every field in backticks in a text has an option, whose name replaces it in the output."""
    assert {field for text in _hint_texts() for field in fields_in(text)} <= option_names().keys()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hint_names_only_options_of_the_command(command: str) -> None:
    """A hint, as the command prints it, names only options that the command has."""
    assert len(_hint_texts()) > 50
    console = Console(options=_options(command))
    for hint in _hint_texts():
        said = console.hint(hint)
        for other, words in _COMMAND.findall(said):
            assert {*_OPTION.findall(words)} <= (_options(other) if other in COMMANDS else set()), (
                said
            )
        own = _OTHER_PROGRAMS.sub("", _COMMAND.sub("", said))
        assert {*_OPTION.findall(own)} <= _options(command), said


@pytest.mark.parametrize(
    ("hint", "left"),
    [
        ("fewer --frames, a smaller --height, or --memory-opt", "fewer --frames"),
        ("use --steps 21 or --steps 28, or --frames 5", "use --frames 5"),
        ("--memory-opt; --frames 5 is another way", "--frames 5 is another way"),
        ("raise --memory-opt", ""),
        ("--memory-opt, which halves it, or fewer --frames", "fewer --frames"),
        ("svdpp plan --memory shows it", "svdpp plan --memory shows it"),
        ("wait, or try again", "wait, or try again"),
    ],
)
def test_proposals_are_left_out(hint: str, left: str) -> None:
    assert keep_available(hint, {"--frames"}) == left


def test_simulate_and_ranks_of_a_launcher_get_no_hint_that_they_would_refuse() -> None:
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    answer = svdpp_here("simulate", "--steps", "10", env=launched)
    assert answer.err.splitlines()[1] == (
        "hint: use --steps 9 or --steps 12, or --split alternating"
    )
    alone = svdpp_here("simulate", "--steps", "10", "--gpus", "3")
    assert "or --gpus 2, or --split alternating" in alone.err


def test_a_benchmark_names_the_fields_of_its_configuration() -> None:
    answer = svdpp_here("bench", "smoke", "--pipeline.world=3")
    assert "hint: use --workload.steps 3 or --workload.steps 6, or --pipeline.world 2" in answer.err
