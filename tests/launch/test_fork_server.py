"""The fork server ends with its starter, also while it imports modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.processes import is_there, wait_until

_START_AND_END = """
import os
from multiprocessing import forkserver
from svdpp.launch import fork_server, temp_folders
fork_server.start(["tests.launch.never_imported"])
print(forkserver._forkserver._forkserver_pid, flush=True)
temp_folders.remove_multiprocessing_folder()
os._exit(0)
"""


@pytest.mark.processes
def test_a_server_ends_if_its_starter_ended_before_its_first_import(tmp_path: Path) -> None:
    """By then it has another parent, and must not wait for that one to end."""
    for _ in range(3):
        output = tmp_path / "pid"
        with output.open("w") as file:
            # To a file, because the server would hold a pipe open as long as it runs.
            subprocess.run([sys.executable, "-c", _START_AND_END], stdout=file, check=True)
        pid = int(output.read_text())
        wait_until(lambda pid=pid: not is_there(pid), 30, f"server {pid} has ended")
