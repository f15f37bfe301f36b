"""Output of commands: results to stdout, remarks and errors to stderr.

No other module prints. Secrets and the home folder are redacted in all output except the lines of
results, which show paths as the user typed them. Control characters never reach a terminal.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from svdpp.cli.hints import keep_available
from svdpp.cli.option_names import option_names
from svdpp.errors import (
    Interrupted,
    RankError,
    SvdppError,
    error_to_dict,
    exit_code_of,
    one_line,
    printable,
    redact,
    redact_all,
    redaction,
    write_fields,
)

if TYPE_CHECKING:
    from svdpp.plan.forecast import Span

# Maximum width of a table, in characters.
_WIDEST = 1000
_COMMAND = re.compile("(svdpp|curl) ")
#: Maximum number of rows of a table that are printed.
MAX_ROWS = 100


class Stdout(RichConsole):
    """Console of rich for stdout. The command ends when the reader, such as `head`, has ended."""

    def on_broken_pipe(self) -> None:
        """End the command, because the program that reads stdout has ended.

        Rich calls this method when a write to stdout raises a `BrokenPipeError`.

        Raises:
            typer.Exit: Always, with the exit code of SIGPIPE.
        """
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE)


class _Stderr(RichConsole):
    """Console of rich for stderr. If the reader of stderr has ended, the command continues."""

    def on_broken_pipe(self) -> None:
        """Drop further output to stderr. Rich calls this after a `BrokenPipeError`."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


class Console:
    """Output of a command: results to stdout, remarks and errors to stderr.

    Args:
        as_json: Whether stdout gets only JSON.
        quiet: Whether stderr gets only errors.
        names: For each field that errors may name, the option as the user typed it; None: the
            usual names of the options.
        options: Options of the command, which hints may propose; None: all options.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        quiet: bool = False,
        names: Mapping[str, str] | None = None,
        options: Collection[str] | None = None,
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._has_printed_json = False
        self._names = dict(names or {})
        self._options = options
        self.out = Stdout(highlight=False, soft_wrap=True)
        self.err = _Stderr(stderr=True, highlight=False, soft_wrap=True)

    def result(self, text: str | Text | Table = "") -> None:
        """Print a line or table of a command's result, unless `--json` is given.

        Args:
            text: Text that is printed unchanged: unlike in errors, secrets and the home folder are
                not redacted. Empty: an empty line is printed.
        """
        if not self.as_json:
            is_shown = isinstance(text, str) and self.out.is_terminal
            self.out.print(printable(str(text)) if is_shown else text, markup=False)

    def prose(self, text: str, indent: str = "") -> None:
        """Print a paragraph of a command's result, unless `--json` is given.

        On a terminal, long lines are wrapped between words.

        Args:
            text: Paragraph of any length.
            indent: Indentation of the lines after the first.
        """
        width = self.out.width if self.out.is_terminal else _WIDEST
        how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        self.result(textwrap.fill(text, width, subsequent_indent=indent, **how))

    def json(self, value: Any) -> None:
        """Print the whole result as JSON if `--json` is given. A command calls this method once.

        Args:
            value: Plain values, in which secrets are redacted.
        """
        if not self.as_json:
            return
        self._has_printed_json = True
        try:
            for piece in _json_pieces(value):
                sys.stdout.write(piece)
            sys.stdout.flush()
        except BrokenPipeError:
            self.out.on_broken_pipe()

    def report(self, value: Mapping[str, Any]) -> None:
        """Print a command's whole result: as JSON with `--json`, else as lines and tables.

        Args:
            value: Values by name. A name ends with the unit of its value, such as `_seconds`.
        """
        self.json(value)
        self.show(value)

    def show(self, value: Mapping[str, Any]) -> None:
        """Print a part of a command's result as lines and tables, unless `--json` is given.

        Args:
            value: Values by name, as for `report`.
        """
        for name, each in value.items():
            if name != "schema_version" and not self.as_json:
                self._show(name, each)

    def _show(self, name: str, value: Any, indent: str = "") -> None:
        label = f"{indent}{_label(name)}"
        rows = value if isinstance(value, list) else []
        if isinstance(value, Mapping) and value:
            if not all(isinstance(each, Mapping) for each in value.values()):
                self.result(label)
                for key, each in value.items():
                    self._show(key, each, f"{indent}  ")
                return
            rows = [{name: key, **each} for key, each in value.items()]
        if not (rows and isinstance(rows[0], Mapping)):
            self.result(f"{label}: {_cell(name, value)}")
            return
        if isinstance(value, list):
            self.result(label)
        shown = [{_label(key): _cell(key, row[key]) for key in row} for row in rows[:MAX_ROWS]]
        self.table(shown, num_rows=len(rows))

    def info(self, *texts: str) -> None:
        """Print remarks to stderr, unless `--quiet` is given.

        On a terminal, long lines are wrapped between words. A remark with a command line is not
        wrapped, so that the command can be copied.

        Args:
            texts: Remarks; empty ones are skipped.
        """
        for text in () if self.quiet else filter(None, texts):
            folds = self.err.is_terminal and not _COMMAND.search(text)
            self.err.print(_sanitize(text), markup=False, soft_wrap=not folds)

    def table(self, rows: Sequence[Mapping[str, str]], num_rows: int | None = None) -> None:
        """Print the first `MAX_ROWS` rows of a table of the result, unless `--json` is given.

        Args:
            rows: Cells of each row by column; all rows have the same columns.
            num_rows: Number of all rows, if `rows` has only the first ones; None: `rows` has all of
                them.
        """
        table = Table(box=None, pad_edge=False, header_style="bold")
        shown = rows[:MAX_ROWS]
        for name in rows[0] if rows else ():
            is_text = not table.columns or any(row[name][:1].isalpha() for row in shown)
            table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
        for row in shown:
            table.add_row(*map(one_line, row.values()))
        # The table gets the width that it needs. On a narrow terminal, the terminal then wraps the
        # lines. At the terminal's width, rich would cut numbers off.
        if not self.as_json:
            Stdout(highlight=False, width=_WIDEST).print(table)
        num_rows = len(rows) if num_rows is None else num_rows
        if num_rows > MAX_ROWS:
            self.result(f"... and {num_rows - MAX_ROWS} more")

    def grid(self, spans: Sequence[Span], world_size: int) -> None:
        """Print a picture of the ranks' work over time, unless `--json` is given.

        Args:
            spans: Work of all ranks.
            world_size: Number of ranks.
        """
        from svdpp.plan.forecast import draw_grid

        width = max(20, self.out.width - len(f"rank {world_size - 1} ||"))
        for line in draw_grid(spans, world_size, width=width):
            self.result(line)

    def error(self, error: BaseException, *, debug: bool = False) -> None:
        """Print an error and its hint to stderr; with `--json`, also print the error as JSON.

        For a `RankError`, the drawing of the ranks' work over time comes first, if there is one.

        Args:
            error: Error to print. Exceptions other than SvdppError are printed as unexpected
                errors.
            debug: Whether to print the traceback too.
        """
        if isinstance(error, RankError) and error.grid:
            self.err.print(error.grid, markup=False)
        if debug:
            trace = error.trace if isinstance(error, RankError) else ""
            text = "".join(traceback.format_exception(error)) + trace
            self.err.print(_sanitize(text), markup=False)
        if isinstance(error, (SvdppError, Interrupted)):
            message, hint = error.message, error.hint
        else:
            message = f"unexpected {type(error).__name__}: {error}"
            hint = "" if debug else "run again with --debug and report what it shows"
        message, hint = self.write_fields(message), self.hint(hint)
        self.err.print(Text.assemble(("error: ", "bold red"), _sanitize(message)))
        if hint:
            self.err.print(Text.assemble(("hint: ", "bold"), _sanitize(hint)))
        # stdout must contain only one JSON value. If the JSON of a result was already printed, it
        # contains the error.
        if self.as_json and not self._has_printed_json:
            record = {
                "type": error_to_dict(error)["type"] or type(error).__name__,
                "exit_code": exit_code_of(error),
                **{"message": message, "hint": hint, "details": getattr(error, "details", {})},
                "field": getattr(error, "field", None),
            }
            self.json({"schema_version": 1, "error": record})

    def hint(self, text: str) -> str:
        """Return an error's hint, but drop each proposal that names an option the command lacks.

        Args:
            text: Proposals, separated by "; " or ", or ".
        """
        text = self.write_fields(text)
        return text if self._options is None else keep_available(text, self._options)

    def rename_fields(self, names: Mapping[str, str]) -> None:
        """Set how errors write the names of fields, and which options their hints may propose.

        Args:
            names: For each field, the option that errors write in its place, such as
                `--workload.frames` for `num_frames`. Hints propose these options and those of the
                command.
        """
        self._names = dict(names)
        self._options = {*(self._options or ()), *names.values()}

    def write_fields(self, text: str) -> str:
        """Return a message in which fields in backticks are replaced by options such as `--frames`.

        Args:
            text: Text with fields in backticks.
        """
        return write_fields(text, option_names() | self._names)

    def error_record(self, error: BaseException) -> dict[str, Any]:
        """Return an error as a dict for JSON, with options in place of the fields that it names.

        Args:
            error: Error of a clip or an input.
        """
        record = error_to_dict(error)
        return record | {name: self.write_fields(record[name]) for name in ("message", "hint")}


def _json_pieces(value: Any) -> Iterator[str]:
    """Yield a command's result as indented and redacted JSON, in pieces to save memory.

    Each element of a list with more than `MAX_ROWS` elements, such as clips, is a piece.
    """
    clean = redaction()
    long = (
        []
        if not isinstance(value, Mapping)
        else [
            name for name, each in value.items() if isinstance(each, list) and len(each) > MAX_ROWS
        ]
    )
    if not long:
        yield json.dumps(redact_all(value, clean), indent=2) + "\n"
        return
    start = "{\n"
    for name, each in value.items():
        yield f"{start}  {json.dumps(name)}: "
        start = ",\n"
        if name not in long:
            yield _indented(redact_all(each, clean), "  ")
            continue
        between = "[\n"
        for item in each:
            yield f"{between}    {_indented(redact_all(item, clean), '    ')}"
            between = ",\n"
        yield "\n  ]"
    yield "\n}\n"


def _indented(value: Any, indent: str) -> str:
    return json.dumps(value, indent=2).replace("\n", f"\n{indent}")


def _sanitize(text: str) -> str:
    return printable(redact(text))


def _label(name: str) -> str:
    """Return the label for a key of the JSON: `peak` for `peak_bytes`. `_cell` shows the unit."""
    for unit in ("_bytes", "_seconds", "_gib"):
        name = name.removesuffix(unit)
    return name.replace("_", " ") if name.islower() else name


def _cell(name: str, value: Any) -> str:
    """Return a value of the JSON as text for a table, with the unit that its key ends with."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        cells = [_cell(name, each) for each in value[:MAX_ROWS]]
        more = [f"and {len(value) - MAX_ROWS} more"] if len(value) > MAX_ROWS else []
        return ", ".join(cells + more) or "none"
    if value is None or value == {}:
        return "-"
    if name == "bubble":
        return f"{value:.0%}"
    if name.endswith("_bytes"):
        return f"{value / 2**30:.2f} GiB" if value >= 2**23 else f"{value / 2**10:.1f} KiB"
    unit = ""
    if name.endswith("_seconds"):
        unit = " s"
    elif name.endswith("_gib"):
        unit = " GiB"
    return f"{value:.4g}{unit}" if isinstance(value, float) else f"{value}{unit}"
