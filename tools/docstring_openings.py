"""Count the docstrings and field notes of svdpp by first word, and list those that open badly.

    python -m tools.docstring_openings

A function's docstring should open with a verb, any other docstring with a noun. Openings such as
"What" or "Of" leave the reader to guess the noun. The exit code is 1 if more than ten docstrings
open badly.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[1]
_BAD = frozenset({"By", "From", "How", "None", "Of", "To", "What", "Where", "Who", "Why"})
_MAX_BAD = 10


class Docstring(NamedTuple):
    """Docstring of a function, class or module, or note below a field, with its file and line."""

    path: Path
    line: int
    text: str

    @property
    def first_word(self) -> str:
        """First word of the docstring, without surrounding punctuation."""
        words = self.text.split(maxsplit=1)
        return words[0].strip("\"'`*:,.;()") if words else ""


def find_docstrings(path: Path) -> Iterator[Docstring]:
    """Yield every docstring and field note of a file: each string that is a statement by itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield Docstring(path, node.lineno, text)


def main() -> int:
    """Print counts of docstrings by first word, and the bad ones; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--top", type=int, default=40, help="how many first words to print")
    top = parser.parse_args().top
    sources = sorted((_ROOT / "svdpp").rglob("*.py"))
    docstrings = [docstring for path in sources for docstring in find_docstrings(path)]
    counts = Counter(docstring.first_word for docstring in docstrings)
    for word, count in counts.most_common(top):
        print(f"{count:6,} {word}")
    bad = [docstring for docstring in docstrings if docstring.first_word in _BAD]
    for path, line, text in bad:
        print(f"{path.relative_to(_ROOT)}:{line}: {text.splitlines()[0]}")
    print(f"{len(bad)} of {len(docstrings)} docstrings open badly; at most {_MAX_BAD} may")
    return int(len(bad) > _MAX_BAD)


if __name__ == "__main__":
    sys.exit(main())
