"""Fixtures for all rows of the fault table: a folder, and the check that nothing is left."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.commands import Command
from tests.faults.processes import adopting_orphans

StartCommand = Callable[..., Command]


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short path: a socket's path is limited to 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start(home: Path) -> Iterator[StartCommand]:
    """Starts commands, and checks after the test that nothing of them is left."""
    commands: list[Command] = []

    def starter(*arguments: str, **options: Any) -> Command:
        commands.append(Command(home, *arguments, **options))
        return commands[-1]

    with adopting_orphans():
        try:
            yield starter
            for command in commands:
                command.assert_gone()
        finally:
            for command in commands:
                command.discard()
