"""CUDA ranks are spawned and set their device first; the parent creates no CUDA context."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svdpp.media.inputs import example_photos

FAKE_GPU_BOX = Path(__file__).parent / "fake_gpu_box"
PHOTO = str(example_photos()[0])

pytestmark = pytest.mark.processes


def _python(record: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in processes that see two fake GPUs."""
    path = os.pathsep.join([str(FAKE_GPU_BOX), str(Path.cwd())])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "FAKE_GPU_RECORD": str(record)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        ("run", PHOTO, "--device", "cuda"),
        ("verify", "--device", "cuda"),
        pytest.param(("doctor", "--device", "cuda"), marks=pytest.mark.full),
        pytest.param(("run", PHOTO, "--device", "cuda:1"), marks=pytest.mark.full),
    ],
    ids=lambda command: command[0],
)
def test_cuda_ranks_are_not_forked(command: tuple[str, ...], tmp_path: Path) -> None:
    record = tmp_path / "record"
    out = () if command[0] == "verify" else ("--out", str(tmp_path / "out"))
    answer = _python(record, "-m", "svdpp", *command, "--gpus", "2", "--model", "demo", *out)
    assert "this is a fake GPU" in answer.stdout + answer.stderr, answer.stderr
    lines = [line.split(" ", 1) for line in record.read_text().splitlines()]
    ranks = {pid for pid, call in lines if call.startswith("sets cuda:")}
    assert ranks, "no rank set its device"
    assert "bad fork" not in {call for _, call in lines}
    assert "creates a context" not in {call for _, call in lines}
    for pid in ranks:
        first = next(call for other, call in lines if other == pid and "counts" not in call)
        assert first.startswith("sets cuda:")


@pytest.mark.long
def test_cuda_ranks_of_a_fork_server_fail(tmp_path: Path) -> None:
    """Shows that the test above can fail: importing diffusers initialises CUDA in the server."""
    record = tmp_path / "record"
    code = (
        "from svdpp.launch import fork_server\n"
        "fork_server.start_method = lambda device: 'forkserver'\n"
        "from svdpp.__main__ import main\n"
        "main()\n"
    )
    options = ["run", PHOTO, "--device", "cuda", "--gpus", "2", "--model", "demo"]
    _python(record, "-c", code, *options, "--out", str(tmp_path / "out"))
    assert "bad fork" in record.read_text()
