"""A process sets variables at its start, and kills its children and removes files at its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from svdpp.launch import process_lifetime
from tests.faults.processes import adopting_orphans, collected, wait_until

pytestmark = pytest.mark.processes


NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"DIFFUSERS_VERBOSITY": "info"}, "DIFFUSERS_VERBOSITY", "info"),
        ({}, "TRANSFORMERS_VERBOSITY", "error"),
        ({}, "PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split:128"}, "PYTORCH_ALLOC_CONF", "max_split:128"),
        ({NCCL: "1"}, NCCL, "1"),
        ({NCCL: "1", "TORCHELASTIC_RUN_ID": "x"}, NCCL, "0"),  # torchrun's own default
        ({NCCL: "3", "TORCHELASTIC_RUN_ID": "x"}, NCCL, "3"),
        ({}, NCCL, "0"),
    ],
)
def test_defaults_do_not_replace_the_users_values(
    given: dict[str, str], name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(given))
    with process_lifetime.environment_defaults():
        assert os.environ[name] == expected
    assert os.environ == given
    process_lifetime.set_environment_defaults(given)
    assert given[name] == expected


@pytest.mark.timing
def test_stopped_children_are_killed_and_their_parent_is_not_stopped_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A parent that is stopped first would stay stopped if this process were killed then."""
    list_children, states = process_lifetime._children, []

    def list_and_record(pids: Collection[int]) -> list[int]:
        states.extend(Path(f"/proc/{pid}/stat").read_text().split()[2] for pid in pids)
        return list_children(pids)

    monkeypatch.setattr(process_lifetime, "_children", list_and_record)
    with adopting_orphans():
        parent = subprocess.Popen(["sh", "-c", "sleep 600 & wait"])
        wait_until(lambda: bool(list_children([parent.pid])), 20, "its child")
        (child,) = list_children([parent.pid])
        os.kill(child, signal.SIGSTOP)
        process_lifetime.kill_with_children([parent.pid])
        assert parent.wait(20) == -signal.SIGKILL
        wait_until(lambda: collected([child]), 20, "the child's end")
    assert "T" not in states, states
    assert states


def _run(folder: Path, code: str, *arguments: str) -> int:
    """Runs a program whose temporary files lie in `folder`; returns its exit code."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment, timeout=60, check=False).returncode


_WRITER = """
import subprocess, sys, threading
from svdpp.launch import process_lifetime

def wait(child):
    child.stdout.read()
    open(sys.argv[1], "a").write("a thread noticed the end of a killed child")

for _ in range(100):  # so many that the kills take longer than Python lets a thread run
    child = subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE)
    threading.Thread(target=wait, args=[child], daemon=True).start()
for _ in range(20):
    process_lifetime.make_folder("svdpp-test-")
getattr(process_lifetime, sys.argv[2])(15)
"""


@pytest.mark.parametrize(
    ("end", "code"), [("exit_by_signal", -15), ("exit_with_signal_code", 128 + 15)]
)
def test_a_process_that_ends_does_not_report_what_it_kills(
    tmp_path: Path, end: str, code: int
) -> None:
    report = tmp_path / "report"  # beside its folders, which are its starter's to remove
    assert _run(tmp_path, _WRITER, str(report), end) == code
    assert not report.exists(), report.read_text()


_MAKER = """
import threading
from svdpp.launch import process_lifetime

def make():
    while True:
        process_lifetime.make_folder("svdpp-test-")
        made.set()

made = threading.Event()
threading.Thread(target=make, daemon=True).start()
made.wait()
process_lifetime.exit_process(0)
"""


_CLEANED = """
import shutil
from multiprocessing import util
from svdpp.launch import process_lifetime

process_lifetime.make_folder("svdpp-test-")
shutil.rmtree(util.get_temp_dir())
made = process_lifetime.make_folder("svdpp-test-")
assert made.parent.stat().st_mode & 0o777 == 0o700
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(_MAKER, id="a thread makes folders meanwhile"),
        pytest.param(_CLEANED, id="a cleaner has removed its folder before"),
    ],
)
def test_a_process_leaves_no_temporary_files(tmp_path: Path, code: str) -> None:
    assert _run(tmp_path, code) == 0
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_had_begun_to_remove_is_removed(tmp_path: Path) -> None:
    """As a rank whose server was killed begins to, until the fork server kills it."""
    for name in ("pymp-x-gone", "pymp-x"):
        (tmp_path / name / "svdpp-y").mkdir(parents=True)
        (tmp_path / name / "svdpp-y" / "rank0.txt").write_text("error")
    while not process_lifetime.remove_temp_folder(str(tmp_path / "pymp-x")):
        assert not list(tmp_path.glob("*-gone")), "the first call has removed it"
    assert not list(tmp_path.iterdir())
