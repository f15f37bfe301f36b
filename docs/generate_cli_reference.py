"""Writes docs/cli.md, the reference of the command line, from the commands themselves.

python docs/generate_cli_reference.py            writes it
python docs/generate_cli_reference.py --check    exit 1 where it is not what would be written
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from svdpp import errors
from svdpp.cli.app import COMMANDS, build_app
from svdpp.cli.command import Command
from svdpp.cli.help import described, panels_of, shown_names

TARGET = Path(__file__).resolve().parent / "cli.md"

_HEAD = (
    "<!-- Written by docs/generate_cli_reference.py (`make docs`); edit the commands instead. -->"
)


def main() -> int:
    """Writes the reference or checks it; the process exit code."""
    parser = argparse.ArgumentParser(description="Write docs/cli.md from the commands.")
    parser.add_argument("--check", action="store_true", help="compare only; 1 where it is stale")
    wanted = reference()
    if not parser.parse_args().check:
        TARGET.write_text(wanted, encoding="utf-8")
        print(f"wrote docs/{TARGET.name}")
        return 0
    found = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    if found == wanted:
        print(f"docs/{TARGET.name} is up to date")
        return 0
    lines = found.splitlines(keepends=True), wanted.splitlines(keepends=True)
    sys.stderr.writelines(difflib.unified_diff(*lines, "docs/cli.md", "what make docs writes"))
    print(f"docs/{TARGET.name} is stale: run `make docs` and commit it", file=sys.stderr)
    return 1


def reference() -> str:
    """The whole page in Markdown."""
    root = typer.main.get_command(build_app())
    context = typer.Context(root, info_name="svdpp", **root.context_settings)
    blocks = [_HEAD, "# `svdpp`", _escaped(inspect.cleandoc(root.help or ""))]
    blocks.append("```console\n$ svdpp COMMAND ...\n```")
    blocks.append(_list("Options", ((shown_names(one), one.help) for one in root.params)))
    links = (f"- [`{name}`](#svdpp-{name}): {_escaped(text)}" for name, text in COMMANDS.items())
    blocks.append("**Commands**\n\n" + "\n".join(links))
    for name in COMMANDS:
        command = root.get_command(context, name)  # type: ignore[attr-defined]
        blocks += _command(command, getattr(import_module(f"svdpp.cli.{name}"), name))
    return "\n\n".join([*blocks, *_exit_codes()]) + "\n"


def _command(command: Any, spec: Command) -> Iterator[str]:
    """One command's section."""
    yield f"## `svdpp {spec.name}`"
    yield _escaped(inspect.cleandoc(command.help))
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    words = ["svdpp", spec.name, "[OPTIONS]", *(one.metavar for one in arguments)]
    yield f"```console\n$ {' '.join(words)}\n```"
    yield "For example:\n\n```sh\n" + "\n".join(spec.examples) + "\n```"
    if arguments:
        yield _list("Arguments", ((one.metavar, described(one)) for one in arguments))
    for title, options in panels_of(command.params, spec.common).items():
        yield _list(title, ((shown_names(one), described(one)) for one in options))


def _list(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"- `{left}`: {_escaped(right)}" for left, right in rows]
    return f"**{title}**\n\n" + "\n".join(lines)


def _first_sentence(text: str) -> str:
    first = inspect.cleandoc(text).split("\n\n")[0].replace("\n", " ")
    return _escaped(first)


def _escaped(text: str) -> str:
    """`text` with angle brackets that Markdown would take for tags escaped, code left alone."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", r"\<") for part in parts)


def _exit_codes() -> Iterator[str]:
    """The table of exit codes, from the errors that carry them."""
    rows: dict[int, tuple[str, list[str]]] = {0: ("done", [])}
    for error in _error_types(errors.SvdppError):
        _, details = rows.setdefault(error.exit_code, (error.meaning, []))
        if error is not errors.SvdppError:
            details.append(_first_sentence(error.__doc__ or ""))
    yield "## Exit codes"
    lines = ["| code | meaning | when |", "| --- | --- | --- |"]
    lines += [f"| {code} | {rows[code][0]} | {' '.join(rows[code][1])} |" for code in sorted(rows)]
    lines.append("| 128 + n | ended by signal n | Ctrl-C is 130, SIGTERM is 143. |")
    yield "\n".join(line.replace("|  |", "| |") for line in lines)


def _error_types(base: type[errors.SvdppError]) -> Iterator[type[errors.SvdppError]]:
    """`base` and every error below it that svdpp.errors defines, in the order of that file."""
    yield base
    for error in base.__subclasses__():
        if error.__module__ == errors.__name__:
            yield from _error_types(error)


if __name__ == "__main__":
    sys.exit(main())
