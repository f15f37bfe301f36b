"""Reader of jobs files in JSON Lines, CSV or YAML, in which each line describes one clip."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from svdpp.config.limits import JOBS_FILE_BYTES, detail_value, read_small_file, require, shown
from svdpp.errors import InputError, RequestError, SvdppError, first_line, pluralize
from svdpp.media.prompts import decode_text

#: Kind of a jobs file (`jsonl`, `csv` or `yaml`), by suffix.
_KINDS: Mapping[str, str] = {
    **{".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".tsv": "csv"},
    **{".yaml": "yaml", ".yml": "yaml"},
}
#: File name that means standard input, which must contain JSON Lines.
STDIN = "-"
_DELIMITERS = ",;\t"


@dataclass(frozen=True, slots=True)
class JobLine:
    """Fields of one line of a jobs file."""

    number: int
    """Number of the line in the file, from 1."""
    fields: Mapping[str, Any]
    """Values of the fields, by name. In CSV, all values are strings."""


@dataclass(frozen=True)
class JobFile:
    """Jobs file that has been read but not yet parsed; see `lines`."""

    name: str
    """Name of the file in messages."""
    folder: Path
    """Folder to which relative paths in the file refer."""
    kind: str
    """Format of the file: `jsonl`, `csv` or `yaml`."""
    text: str

    def lines(self) -> Iterator[JobLine | SvdppError]:
        """Yield the fields of each line of a jobs file, or an error if the line cannot be parsed.

        Blank lines are skipped. In JSON Lines and YAML, lines that begin with `#` are skipped too.
        """
        parse = {"jsonl": self._json_lines, "csv": self._csv_lines, "yaml": self._yaml_lines}
        return parse[self.kind]()

    def error(
        self, line: int, message: str, hint: str = "", field: str | None = None, **details: Any
    ) -> RequestError:
        """Return an error about a line of the jobs file.

        Args:
            line: Number of the line.
            message: Text after the name of the line in the error's message, such as "is not JSON".
            hint: Advice for the user.
            field: Name of the wrong field; None: the error is about the whole line.
            details: Values in the message, by name.
        """
        return RequestError(
            f"{self.line_label(line, field)}: {message}",
            hint,
            details={**details, "file": self.name, "line": line, "field": field},
        )

    def line_label(self, line: int, field: str | None = None) -> str:
        """Return the name of a jobs file's line or field in messages: `jobs.csv, line 3, seed`."""
        return f"{self.name}, line {line}" + ("" if field is None else f", {field}")

    # --- jobs files in JSON Lines -------------------------------------------------------------

    def _json_lines(self) -> Iterator[JobLine | SvdppError]:
        for number, line in enumerate(_split_lines(self.text), start=1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            try:
                value = json.loads(
                    text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant
                )
            except (ValueError, RecursionError) as error:
                hint = 'write one object per line, such as {"image": "cat.jpg", "seed": 7}'
                if number == 1 and text.startswith("["):
                    hint = f"convert the JSON list: jq -c '.[]' {self.name} > jobs.jsonl"
                problem = first_line(error)
                yield self.error(number, f"is not JSON: {problem}", hint, problem=problem)
                continue
            if not isinstance(value, dict):
                wrong = f"must be an object, got {shown(value)}"
                yield self.error(number, wrong, value=detail_value(value))
                continue
            yield JobLine(number, value)

    # --- jobs files in CSV --------------------------------------------------------------------

    def _csv_lines(self) -> Iterator[JobLine | SvdppError]:
        text, first = self.text, 0
        if separator := re.match(r"sep=(.)\r?\n", text):  # a first line for Excel, such as `sep=;`
            text, first = text[separator.end() :], 1
        head = text.lstrip().partition("\n")[0]
        delimiter = max(_DELIMITERS, key=head.count) if separator is None else separator[1]
        rows = csv.reader(
            _split_lines(text), delimiter=delimiter, skipinitialspace=True, strict=True
        )
        names: list[str] | None = None
        while True:
            number = first + rows.line_num + 1
            try:
                row = next(rows, None)
            except csv.Error as error:
                problem = first_line(error)
                yield self.error(number, f"is not CSV: {problem}", problem=problem)
                return
            if row is None:
                return
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if names is not None:
                yield self._csv_line(number, names, cells)
                continue
            names = [sys.intern(name) for name in cells]
            twice = sorted({name for name in names if name and names.count(name) > 1})
            if twice:
                yield self.error(number, f"has the column {twice[0]} twice", field=twice[0])
                return

    def _csv_line(self, number: int, names: list[str], cells: list[str]) -> JobLine | RequestError:
        beyond = [cell for cell in cells[len(names) :] if cell]
        unnamed = [cell for name, cell in zip(names, cells, strict=False) if cell and not name]
        if beyond or unnamed:
            cell = (beyond + unnamed)[0]
            return self.error(
                number,
                f"has {len(cells)} cells for {pluralize(len(names), 'column')}: "
                f"{shown(cell)} has no column",
                "put texts with separators into double quotes",
                cells=len(cells),
                columns=len(names),
            )
        fields = {name: cell for name, cell in zip(names, cells, strict=False) if cell}
        return JobLine(number, fields)

    # --- jobs files in YAML -------------------------------------------------------------------

    def _yaml_lines(self) -> Iterator[JobLine | SvdppError]:
        import yaml  # imported here, because YAML is rarely used

        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(self.text)
        try:
            root = loader.get_single_node()
            if root is None:
                return
            if not isinstance(root, yaml.SequenceNode):
                line = root.start_mark.line + 1
                hint = "each clip begins with a dash: - image: cat.jpg"
                yield self.error(line, "must be a list of clips", hint)
                return
            for node in root.value:
                yield self._yaml_line(loader, node)
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = getattr(error, "problem", None) or first_line(error)
            line = 1 if mark is None else mark.line + 1
            yield self.error(line, f"is not YAML: {problem}", problem=str(problem))
        except RecursionError:
            yield self.error(1, "is not a jobs file in YAML: its values are nested too deeply")
        finally:
            loader.dispose()

    def _yaml_line(self, loader: Any, node: Any) -> JobLine | RequestError:
        import yaml

        number = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            return self.error(number, "must be fields with values, such as image: cat.jpg")
        fields: dict[str, Any] = {}
        shared: dict[str, Any] = {}
        for key, value in node.value:
            name = sys.intern(str(key.value)) if isinstance(key, yaml.ScalarNode) else "?"
            if name == "<<" and isinstance(value, yaml.MappingNode):
                merged = self._yaml_line(loader, value)
                if isinstance(merged, SvdppError):
                    return merged
                shared = dict(merged.fields)
                continue
            if name in fields:
                return self.error(number, f"has the field {name} twice", field=name)
            if not isinstance(value, yaml.ScalarNode):
                wrong = "must be a string or a number"
                return self.error(value.start_mark.line + 1, wrong, field=name)
            try:
                fields[name] = loader.construct_object(value)
            except (ValueError, yaml.YAMLError) as error:
                problem = first_line(error)
                return self.error(number, f"is refused: {problem}", field=name, problem=problem)
        return JobLine(number, {**shared, **fields})


def read_job_file(path: Path) -> JobFile:
    """Read the text of a jobs file, without parsing it. The suffix determines the format.

    Standard input has the format of JSON Lines.

    Args:
        path: Path of the file; `-`: standard input.

    Raises:
        InputError: The file cannot be read, is too large, is not text, or has an unknown suffix.
    """
    if str(path) == STDIN:
        data = sys.stdin.buffer.read(JOBS_FILE_BYTES + 1)
        limit = f"--jobs -: stdin has more than {JOBS_FILE_BYTES} bytes"
        require(len(data) <= JOBS_FILE_BYTES, limit, max_bytes=JOBS_FILE_BYTES)
        return JobFile("stdin", Path(), "jsonl", decode_text(data, "stdin"))
    kind = _KINDS.get(path.suffix.lower())
    if kind is None:
        raise InputError(
            f"--jobs {str(path)!r} has an unknown format: the suffix must be one of "
            f"{', '.join(_KINDS)}",
            "to convert a JSON list to JSON Lines: jq -c '.[]' FILE > jobs.jsonl",
            details={"path": str(path), "suffixes": [*_KINDS]},
        )
    data = read_small_file(path, "--jobs", JOBS_FILE_BYTES)
    return JobFile(str(path), path.parent, kind, decode_text(data, f"--jobs {str(path)!r}"))


def _split_lines(text: str) -> Iterator[str]:
    """Yield the lines of a text, with line ends. `io.StringIO` would first copy the whole text."""
    start = 0
    while start < len(text):
        end = text.find("\n", start) + 1 or len(text)
        yield text[start:end]
        start = end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the field {shown(name)} occurs twice")
        fields[sys.intern(name)] = value
    return fields


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not a number")
