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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from svdpp import errors
from svdpp.cli.app import app

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
    print(
        f"docs/{TARGET.name} is heartbeat_timeout: run `make docs` and commit it", file=sys.stderr
    )
    return 1


def reference() -> str:
    """The whole page in Markdown."""
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="svdpp", **root.context_settings)
    blocks = [_HEAD, *_command(root, context, level=1), *_exit_codes()]
    return "\n\n".join(blocks) + "\n"


def _command(command: Any, context: typer.Context, *, level: int) -> Iterator[str]:
    """One command's section, then those of its subcommands."""
    yield f"{'#' * level} `{context.command_path}`"
    if command.help:
        yield _escaped(inspect.cleandoc(command.help))
    parameters = command.get_params(context)
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    options = [one for one in parameters if one.param_type_name == "option" and not one.hidden]
    names = command.list_commands(context) if hasattr(command, "list_commands") else []
    children = [child for name in names if not (child := command.get_command(context, name)).hidden]
    words = [context.command_path, "[OPTIONS]", *map(_usage, arguments)]
    words += ["COMMAND [ARGS]..."] if children else []
    yield f"```console\n$ {' '.join(words)}\n```"
    if arguments:
        lines = [
            f"- `{one.metavar or one.name.upper()}`: {_help(one, context)}" for one in arguments
        ]
        yield "**Arguments**\n\n" + "\n".join(lines)
    yield from _panels(options, context)
    if children:
        lines = [
            f"- [`{child.name}`](#{_anchor(context, child)}): {_first_sentence(child.help or '')}"
            for child in children
        ]
        yield "**Commands**\n\n" + "\n".join(lines)
    for child in children:
        below = typer.Context(child, info_name=child.name, parent=context, **child.context_settings)
        yield from _command(child, below, level=level + 1)


def _panels(options: list[Any], context: typer.Context) -> Iterator[str]:
    """The options, under the titles that `--help` has them under."""
    panels: dict[str, list[str]] = {"Options": []}
    for option in options:
        # Short names first; Typer keeps those of --help in a set, without an order.
        flags = ", ".join(sorted(option.opts, key=lambda flag: flag.startswith("--")))
        name = f"{flags} {option.metavar or ''}".rstrip()
        title = getattr(option, "rich_help_panel", None) or "Options"
        panels.setdefault(title, []).append(f"- `{name}`: {_help(option, context)}")
    for title, lines in panels.items():
        if lines:
            yield f"**{title}**\n\n" + "\n".join(lines)


def _help(parameter: Any, context: typer.Context) -> str:
    """A parameter's help with its default, as Typer words them."""
    record = parameter.get_help_record(context)
    return _escaped(re.sub(r" +(?=\[)", " ", record[1] if record else parameter.help or ""))


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _anchor(context: typer.Context, child: Any) -> str:
    return f"{context.command_path} {child.name}".replace(" ", "-")


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
