"""The command and the environment of the server's helper processes in Python."""

from __future__ import annotations

import os
import sys

# A launcher's, which would make the process one of its ranks.
_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID")


def helper_command(module: str, *arguments: str) -> list[str]:
    """The command that runs `module`; `-P`, because `-m` adds the working folder to the path."""
    return [sys.executable, "-P", "-m", module, *arguments]


def helper_environment() -> dict[str, str]:
    """This process's environment and search path, without a launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_LAUNCHERS}
    return {**kept, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
