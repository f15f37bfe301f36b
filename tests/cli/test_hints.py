"""Hints of errors name only options that the command has."""

from __future__ import annotations

import ast
import itertools
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
_SEPARATOR = re.compile("; |, or ")
_VERBS = {
    *("add", "ask", "check", "give", "leave", "lower", "make", "merge", "name", "put", "raise"),
    *("set", "start", "stop", "try", "unset", "use", "verify", "wait", "write"),
}


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
                text = _text_of(node)
            elif isinstance(node, ast.Constant) and id(node) not in inner:
                text = str(node.value)
            else:
                continue
            if (" --" in f" {text}" or fields_in(text)) and "\n" not in text:
                yield text


@cache
def _hints_of_errors() -> frozenset[str]:
    """Return the hints in svdpp's source: arguments of errors, and names that contain `hint`.

    Placeholders of f-strings are replaced by the number 7.
    """
    return frozenset(_hints())


def _hints() -> Iterator[str]:
    sources = sorted((ROOT / "svdpp").rglob("*.py"))
    nodes = [node for path in sources for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    hints = [hint for node in nodes if (hint := _hint_of(node)) is not None]
    # Constants such as `_LINK_HINT` or `_SMALLER`, which errors get as their hint
    names = {one.id for hint in hints for one in ast.walk(hint) if isinstance(one, ast.Name)}
    constants = {name for name in names if name.isupper()}
    for node in nodes:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        elif isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        else:
            continue
        for one in itertools.chain.from_iterable(map(ast.walk, targets)):
            if isinstance(one, ast.Name) and (one.id in constants or "hint" in one.id):
                hints.append(value)
    for hint in hints:
        inner = {
            id(each)
            for one in ast.walk(hint)
            if isinstance(one, ast.JoinedStr)
            for each in one.values
        }
        for one in ast.walk(hint):
            if isinstance(one, ast.JoinedStr):
                yield _text_of(one)
            elif isinstance(one, ast.Constant) and id(one) not in inner:
                yield str(one.value)


def _hint_of(node: ast.AST) -> ast.expr | None:
    """Return the hint in a call that raises an error or builds a hint, such as `require(...)`."""
    if not isinstance(node, ast.Call):
        return None
    for each in node.keywords:
        if each.arg in ("hint", "fix"):
            return each.value
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    place = {"ApiError": 3, "require": 2, "nearest": 2}.get(name, 1)
    is_of_hint = name in ("require", "nearest") or name.endswith("Error")
    return node.args[place] if is_of_hint and len(node.args) > place else None


def _text_of(text: ast.JoinedStr) -> str:
    parts = (str(one.value) if isinstance(one, ast.Constant) else "7" for one in text.values)
    return "".join(parts)


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


@pytest.mark.parametrize("command", COMMANDS)
def test_proposals_are_kept_or_dropped_whole(command: str) -> None:
    """The proposals that a command prints are complete, and in the order of the hint."""
    console = Console(options=_options(command))
    for hint in _hint_texts() | _hints_of_errors():
        proposals = iter(_SEPARATOR.split(console.write_fields(hint)))
        left = console.hint(hint)
        assert not left or all(each in proposals for each in _SEPARATOR.split(left)), left


def test_alternatives_in_hints_have_verbs() -> None:
    """Each proposal after ", or " begins with a verb, so that it can stand alone."""
    hints = _hints_of_errors()
    assert len(hints) > 200
    alternatives = {each for hint in hints for each in hint.split(", or ")[1:]}
    assert len(alternatives) > 30
    assert {each for each in alternatives if each.split(" ")[0] not in _VERBS} == set()


@pytest.mark.parametrize(
    ("hint", "left"),
    [
        (
            "use fewer --frames, or use a smaller --height, or use --memory-opt",
            "use fewer --frames",
        ),
        ("use --steps 21 or --steps 28, or use --frames 5", "use --frames 5"),
        ("use --steps 21 or --steps 28, or use --gpus 3", ""),
        ("use --memory-opt; --frames 5 is another way", "--frames 5 is another way"),
        ("raise --memory-opt", ""),
        ("use --frames-2 5", ""),
        ("use --memory-opt, which halves it, or use fewer --frames", "use fewer --frames"),
        ("use --family wan or ltx", ""),
        ("use --frames 5 or 9", "use --frames 5 or 9"),
        ("--model takes a folder, a hub id, demo or demo-text", ""),
        ("wait; to go on, run it with --resume", "wait"),
        (
            "use --frames 5, or use --steps 4; wait, or try again",
            "use --frames 5; wait, or try again",
        ),
        ("svdpp plan --memory shows it", "svdpp plan --memory shows it"),
        ("give --steps, as svdpp plan --memory shows", ""),
        ("wait, or try again", "wait, or try again"),
        ("", ""),
    ],
)
def test_proposals_are_left_out(hint: str, left: str) -> None:
    assert keep_available(hint, {"--frames"}) == left


def test_simulate_and_ranks_of_a_launcher_get_no_hint_that_they_would_refuse() -> None:
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3"}
    answer = svdpp_here("simulate", "--steps", "10", env=launched)
    assert answer.err.splitlines()[1] == (
        "hint: use --steps 9 or --steps 12, or use --split alternating"
    )
    alone = svdpp_here("simulate", "--steps", "10", "--gpus", "3")
    assert "or use --gpus 2, or use --split alternating" in alone.err


def test_a_benchmark_names_the_fields_of_its_configuration() -> None:
    answer = svdpp_here("bench", "smoke", "--pipeline.world=3")
    assert "use --workload.steps 3 or --workload.steps 6, or use --pipeline.world 2" in answer.err


def test_a_benchmark_names_its_own_options() -> None:
    answer = svdpp_here("bench", "smoke", "--targets.utilisation.min=0.5")
    assert answer.err.endswith("\nhint: give its peak in this dtype with --peak-tflops\n")
