"""Owns printing: results to stdout, remarks to stderr. Nothing else in the program prints.

Everything but the lines of results, which name files as the user did, is redacted.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from svdpp.errors import Interrupted, RankError, SvdppError, error_to_dict, exit_code_of
from svdpp.redaction import redact, redact_all

_CLIP_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red", "white")


class Console:
    """One command's two streams.

    Args:
        as_json: stdout gets JSON alone.
        quiet: stderr gets errors alone.
        set_elsewhere: what sets an option that is not on the command line, by the option's name.
    """

    def __init__(
        self,
        *,
        as_json: bool = False,
        quiet: bool = False,
        set_elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._answered = False
        self._set_elsewhere = set_elsewhere or {}
        self.out = RichConsole(highlight=False, soft_wrap=True)
        self.err = RichConsole(stderr=True, highlight=False, soft_wrap=True)

    def result(self, text: str | Text | Table = "") -> None:
        """A line or table of the result, for people; nothing under `--json`."""
        if not self.as_json:
            self.out.print(text, markup=False)

    def json(self, value: Any) -> None:
        """The whole result as JSON; call once, under `--json`."""
        self._answered = True
        sys.stdout.write(json.dumps(redact_all(value), indent=2) + "\n")

    def info(self, text: str) -> None:
        """A remark on what is going on; folded for people, unless it names a command to copy."""
        if not self.quiet:
            folds = self.err.is_terminal and "svdpp " not in text
            self.err.print(redact(text), markup=False, soft_wrap=not folds)

    def infos(self, texts: Iterable[str]) -> None:
        """Several remarks."""
        for text in texts:
            self.info(text)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table of the result; the first column is aligned left, numbers right."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.result(table)

    def grid(self, lines: Iterable[str]) -> None:
        """A rank x time picture, each clip in its colour where the terminal has colours."""
        for line in lines:
            self.result(coloured_grid_line(line))

    def error(self, error: BaseException, *, debug: bool = False) -> None:
        """One sentence, a hint, the picture where there is one; the traceback with `debug`.

        Under `--json` stdout gets the error as well, unless it has a result already: that says
        itself what failed.
        """
        if isinstance(error, RankError) and error.picture:
            for line in error.picture.splitlines():
                self.err.print(coloured_grid_line(line))
        if debug:
            trace = error.trace if isinstance(error, RankError) else ""
            text = "".join(traceback.format_exception(error)) + trace
            self.err.print(redact(text), markup=False)
        if isinstance(error, (SvdppError, Interrupted)):
            message, hint = error.message, error.hint
        else:
            message = f"unexpected {type(error).__name__}: {error}"
            hint = "" if debug else "run again with --debug and report what it shows"
        hint = "; ".join(filter(None, [hint, *self._origins(f"{message} {hint}")]))
        self._sentence(message, hint)
        if self.as_json and not self._answered:
            self.json({"schema_version": 1, "error": _record(error, message, hint)})

    def _origins(self, text: str) -> list[str]:
        """For each option in `text` that is not on the command line, what sets it."""
        options = dict.fromkeys(re.findall(r"--[a-z-]+", text))
        where = self._set_elsewhere
        return [f"{name} is set by {where[name]}" for name in options if name in where]

    def _sentence(self, message: str, hint: str) -> None:
        self.err.print(Text.assemble(("error: ", "bold red"), redact(message)))
        if hint:
            self.err.print(Text.assemble(("hint: ", "bold"), redact(hint)))


def _record(error: BaseException, message: str, hint: str) -> dict[str, Any]:
    """An error as the answer of a command."""
    return {
        "type": error_to_dict(error)["type"] or type(error).__name__,
        "exit_code": exit_code_of(error),
        "message": message,
        "hint": hint,
        "details": error.details if isinstance(error, SvdppError) else {},
    }


def counted(number: int, noun: str) -> str:
    """A number with its noun, such as `1 clip` or `2 clips`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def coloured_grid_line(line: str) -> Text:
    """A line of the grid with each clip in a colour, idle time dim."""
    text = Text(line)
    begin, end = line.find("|") + 1, line.rfind("|")
    for index in range(begin, end):
        sign = line[index]
        if sign == ".":
            text.stylize("dim", index, index + 1)
        elif sign.isalnum():
            colour = _CLIP_COLOURS[int(sign, 36) % len(_CLIP_COLOURS)]
            text.stylize(colour, index, index + 1)
    return text
