"""The fork server ends with its starter, whatever it is at."""

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
def test_a_server_whose_starter_is_gone_before_its_first_import(tmp_path: Path) -> None:
    """Its kernel parent is somebody else by then, whose end it must not wait for."""
    for _ in range(3):
        output = tmp_path / "pid"
        with output.open("w") as file:
            # To a file: the server holds a pipe open for as long as it lives.
            subprocess.run([sys.executable, "-c", _START_AND_END], stdout=file, check=True)
        pid = int(output.read_text())
        wait_until(lambda pid=pid: not is_there(pid), 30, f"server {pid} has ended")
