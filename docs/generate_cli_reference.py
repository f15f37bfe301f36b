"""Write docs/cli.md from the commands, and two parts of other pages from the code.

The two parts are the table of families in docs/models.md and the list of files in
docs/architecture.md.

python docs/generate_cli_reference.py            write the pages
python docs/generate_cli_reference.py --check    change nothing; exit with 1 if a page is outdated
"""

from __future__ import annotations

import argparse
import ast
import difflib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from svdpp import errors
from svdpp.cli.app import COMMANDS, app, load_command
from svdpp.cli.command import show_all_options
from svdpp.cli.models import describe
from svdpp.cli.options.declare import PANELS, with_aliases
from svdpp.config import SAMPLING_CLASSES

TARGET = Path(__file__).resolve().parent / "cli.md"
MODELS = TARGET.with_name("models.md")
ARCHITECTURE = TARGET.with_name("architecture.md")
SOURCE = TARGET.parents[1] / "svdpp"
_TABLE = re.compile(r"(<!-- families, by `make docs` -->\n).*?(?=<!-- end -->)", re.DOTALL)
_FILES = re.compile(r"(<!-- files, by `make docs` -->\n).*?(?=<!-- end -->)", re.DOTALL)

#: Placeholder for a space at which a line must not be broken.
_SPACE = "\0"

_HEAD = (
    "<!-- Written by docs/generate_cli_reference.py (`make docs`); edit the commands instead. -->"
)


def main() -> int:
    """Write the three generated pages of the docs, or check them; return the exit code."""
    parser = argparse.ArgumentParser(description="Write pages from the commands and the specs.")
    parser.add_argument("--check", action="store_true", help="compare only; 1 where one is stale")
    pages = _pages()
    if parser.parse_args().check:
        stale = [_differs(page, wanted) for page, wanted in pages.items()]  # print every difference
        return int(any(stale))
    for page, wanted in pages.items():
        page.write_text(wanted, encoding="utf-8")
        print(f"wrote docs/{page.name}")
    return 0


def _pages() -> dict[Path, str]:
    models, architecture = (page.read_text(encoding="utf-8") for page in (MODELS, ARCHITECTURE))
    return {
        TARGET: reference(),
        MODELS: _TABLE.sub(lambda match: match[1] + families_table(), models),
        ARCHITECTURE: _FILES.sub(lambda match: match[1] + list_of_files(), architecture),
    }


def _differs(page: Path, wanted: str) -> bool:
    """Return whether a page of the docs differs from `wanted`, and print the differences."""
    found = page.read_text(encoding="utf-8") if page.exists() else ""
    if found == wanted:
        print(f"docs/{page.name} is up to date")
        return False
    lines = found.splitlines(keepends=True), wanted.splitlines(keepends=True)
    names = f"docs/{page.name}", "what make docs writes"
    sys.stderr.writelines(difflib.unified_diff(*lines, *names))
    print(f"docs/{page.name} is stale: run `make docs` and commit it", file=sys.stderr)
    return True


def families_table() -> str:
    """Return the table of model families in Markdown."""
    lines = ["| family | models | from | pipelines | schedulers |", "|---|---|---|---|---|"]
    for each in map(describe, SAMPLING_CLASSES):
        pipelines, schedulers = (
            ", ".join(f"`{name}`" for name in each[what]) or "none"
            for what in ("pipelines", "schedulers")
        )
        cells = (f"`{each['family']}`", each["title"], " or ".join(each["inputs"]))
        lines.append(f"| {' | '.join((*cells, pipelines, schedulers))} |")
    return "\n".join(lines) + "\n"


def list_of_files() -> str:
    """Return the modules and scripts of svdpp in Markdown, by folder, each with its first line."""
    lines: list[str] = []
    folders = {path.parent for path in SOURCE.rglob("*.py")} | {SOURCE / "serve" / "page"}
    for folder in sorted(folders, key=lambda folder: (folder != SOURCE, folder)):
        paths = [path for path in sorted(folder.iterdir()) if path.suffix in (".py", ".js")]
        texts = {path.name: _escaped(_first_line(path)) for path in paths}
        about = texts.pop("__init__.py", "Scripts of the page.")
        lines.append(f"\n**`{folder.relative_to(SOURCE.parent)}/`** {about}\n")
        lines += [f"- `{name}`: {text}" for name, text in texts.items()]
    return "\n".join(lines) + "\n\n"


def _first_line(path: Path) -> str:
    """Return the first line of a module's docstring, or of a script's first comment."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".js":
        return text.splitlines()[0].removeprefix("// ")
    return (ast.get_docstring(ast.parse(text)) or "").splitlines()[0]


def reference() -> str:
    """Return the whole page docs/cli.md: all commands, options and exit codes."""
    root = typer.main.get_command(app)
    blocks = [_HEAD, "# `svdpp`", _escaped(root.help or "")]
    blocks.append("```console\n$ svdpp COMMAND ...\n```")
    blocks.append(_list("Options", root.params))
    links = (f"- [`{name}`](#svdpp-{name}): {_escaped(text)}" for name, text in COMMANDS.items())
    blocks.append("**Commands**\n\n" + "\n".join(links))
    for name in COMMANDS:
        blocks += _command(load_command(name))
    return "\n\n".join([*blocks, *_exit_codes()]) + "\n"


def _command(command: TyperCommand) -> Iterator[str]:
    """Yield the Markdown blocks of one command's section: usage, description, options."""
    show_all_options(command)
    yield f"## `svdpp {command.name}`"
    yield _escaped(command.help or "")
    parameters: list[Any] = list(command.params)
    arguments = [one for one in parameters if one.param_type_name == "argument"]
    words = ["svdpp", command.name, "[OPTIONS]"]
    words += [f"{one.metavar}..." if one.nargs != 1 else one.metavar for one in arguments]
    yield f"```console\n$ {' '.join(map(str, words))}\n```"
    examples = [line.strip() for line in (command.epilog or "").splitlines()[1:]]
    yield "For example:\n\n```sh\n" + "\n".join(examples) + "\n```"
    if arguments:
        yield _list("Arguments", arguments)
    for panel in (*PANELS, "Options"):
        members = [one for one in parameters if one.rich_help_panel == panel]
        if members:
            yield _list(panel, members)


def _list(title: str, members: Iterable[Any]) -> str:
    lines = [_folded(f"- `{_names(each)}`: {_escaped(_described(each))}") for each in members]
    return f"**{title}**\n\n" + "\n".join(lines)


def _names(parameter: Any) -> str:
    """Return the names of a command's option and the placeholder of its value."""
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    names = ", ".join(sorted(with_aliases(parameter.opts), key=lambda name: name[:2] == "--"))
    return f"{names} {parameter.metavar or ''}".rstrip()


def _described(parameter: Any) -> str:
    """Return the help of a command's parameter with its default and its environment variable."""
    shown, default = parameter.show_default, parameter.default
    if not isinstance(shown, str):
        shown = str(default) if shown and default not in (None, False) else ""
    more = [f"default: {shown}"] if shown else []
    if parameter.envvar:
        more.append(f"variable: {parameter.envvar}")
    return f"{parameter.help}  [{'; '.join(more)}]" if more else parameter.help


def _folded(item: str) -> str:
    """Wrap a Markdown list item to lines of at most 120 characters. Code spans are not broken."""
    whole = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", _SPACE), item)
    lines = textwrap.wrap(
        whole, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace(_SPACE, " ")


def _first_sentence(text: str) -> str:
    first = inspect.cleandoc(text).split("\n\n")[0].replace("\n", " ")
    return _escaped(first)


def _escaped(text: str) -> str:
    """Escape angle brackets outside of code spans, because Markdown would read them as tags."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else part.replace("<", r"\<") for part in parts)


def _exit_codes() -> Iterator[str]:
    """Yield the heading and the table of exit codes, from the error classes."""
    rows: dict[int, tuple[str, list[str]]] = {0: ("done", [])}
    for error in _error_types(errors.SvdppError):
        _, details = rows.setdefault(error.exit_code, (error.meaning, []))
        if error is not errors.SvdppError:
            text = _first_sentence(error.__doc__ or "").removeprefix("Error for ")
            details.append(text[:1].upper() + text[1:])
    yield "## Exit codes"
    lines = ["| code | meaning | when |", "| --- | --- | --- |"]
    lines += [f"| {code} | {rows[code][0]} | {' '.join(rows[code][1])} |" for code in sorted(rows)]
    lines.append("| 128 + n | ended by signal n | Ctrl-C is 130, SIGTERM is 143. |")
    yield "\n".join(line.replace("|  |", "| |") for line in lines)


def _error_types(base: type[errors.SvdppError]) -> Iterator[type[errors.SvdppError]]:
    """Yield an error class of svdpp.errors and its subclasses, in the order of their definition."""
    yield base
    for error in base.__subclasses__():
        if error.__module__ == errors.__name__:
            yield from _error_types(error)


if __name__ == "__main__":
    sys.exit(main())
