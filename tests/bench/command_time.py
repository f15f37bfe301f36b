"""Measures the start of the program: the CPU time of light commands against their libraries'.

    python tests/bench/command_time.py [--repeats 20]

Each command, and `import typer, rich.console` for comparison, runs several times, in turn. The
smallest CPU time (user and system) of each counts, because other load only adds to it. Bytecode is
cached, as for an installed program.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys

BASE = ("-c", "import typer, rich.console")
COMMANDS = (
    ("-m", "svdpp", "--help"),
    ("-m", "svdpp", "plan"),
    ("-m", "svdpp", "run", "--help"),
    ("-c", "import typer, rich.console, pydantic, typer._adapters"),
)


def seconds(arguments: tuple[str, ...]) -> float:
    """The CPU time of Python with `arguments`."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Prints the smallest CPU time of each command, and its ratio to the libraries' imports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    least = dict.fromkeys((BASE, *COMMANDS), float("inf"))
    for _ in range(repeats + 1):  # the first round fills the caches
        for arguments in least:
            least[arguments] = min(least[arguments], seconds(arguments))
    for arguments, taken in least.items():
        print(f"{taken * 1000:6.0f} ms  {taken / least[BASE]:5.2f}  python {' '.join(arguments)}")


if __name__ == "__main__":
    main()
