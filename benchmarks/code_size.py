"""Print the size of the code: lines, files, functions, and the files that run for one clip.

    python -m benchmarks.code_size [--no-clip]

A file counts as run for a clip if any of its functions runs in any process of `svdpp run`, with the
demo model on two CPU ranks.
"""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.options import parser_of

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = _ROOT / "svdpp"

# Python runs this code at the start of every process. It writes each new file name at once, because
# ranks end without `atexit`. Code that runs during an import is not counted.
_TRACER = """
import os, sys, threading
seen, package = set(), os.environ["TRACED_PACKAGE"] + os.sep
def note(frame, event, arg):
    name = frame.f_code.co_filename
    if event != "call" or name in seen or not name.startswith(package):
        return
    caller = frame
    while caller is not None:
        if caller.f_code.co_name == "<module>" and caller.f_code.co_filename.startswith(package):
            if not caller.f_code.co_filename.endswith("__main__.py"):
                return
        caller = caller.f_back
    seen.add(name)
    with open(os.environ["TRACED_FILES"], "a") as file:
        file.write(name + os.linesep)
threading.setprofile(note)
sys.setprofile(note)
"""


def _functions() -> Iterator[tuple[int, str]]:
    """Yield the number of lines of each function of svdpp, and the function's location."""
    for path in _PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                yield length, f"{path.relative_to(_ROOT)}: {node.name}"


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _print_counts() -> None:
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in _PACKAGE.rglob("*.py"):
        part = path.relative_to(_PACKAGE).parts
        package = part[0] if len(part) > 1 else "(top)"
        lines[package] += _lines(path)
        files[package] += 1
    for package, count in lines.most_common():
        print(f"{package:14} {count:7,} lines {files[package]:4} files")
    print(f"{'svdpp':14} {lines.total():7,} lines {files.total():4} files")
    tests = [_lines(path) for path in (_ROOT / "tests").rglob("*.py")]
    print(f"{'tests':14} {sum(tests):7,} lines {len(tests):4} files")


def _print_functions() -> None:
    lengths = sorted(_functions())
    counts = [length for length, _ in lengths]
    ninth = statistics.quantiles(counts, n=10)[-1]
    longest, where = lengths[-1]
    median = statistics.median(counts)
    print(f"functions: median {median:g} lines, nine in ten at most {ninth:g}")
    print(f"longest function: {longest} lines, {where}")


def _print_files_of_a_clip() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_TRACER, encoding="utf-8")
        traced = folder / "files.txt"
        photo = _PACKAGE / "assets" / "photos" / "astronaut.jpg"
        options = "--device cpu --world 2 --model demo --steps 4"
        command = [sys.executable, "-m", "svdpp", "run", str(photo), *options.split()]
        paths = {"PYTHONPATH": name, "TRACED_PACKAGE": str(_PACKAGE), "TRACED_FILES": str(traced)}
        subprocess.run(
            [*command, "--out", str(folder / "out")],
            env={**os.environ, **paths},
            cwd=_ROOT,
            check=True,
            capture_output=True,
            timeout=600,
        )
        files = set(traced.read_text(encoding="utf-8").splitlines())
    print(f"files that run for a clip: {len(files)}, {sum(_lines(Path(f)) for f in files):,} lines")


if __name__ == "__main__":
    parser = parser_of(__doc__)
    parser.add_argument(
        "--no-clip", action="store_true", help="make no clip, and print only the counts"
    )
    asked = parser.parse_args()
    _print_counts()
    _print_functions()
    if not asked.no_clip:
        _print_files_of_a_clip()
