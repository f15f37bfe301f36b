"""Ranks on CUDA are started by spawn, take their device first, and the parent never touches one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svdpp.launch import fork_server
from svdpp.media.examples import example_photos

FAKE_GPU_BOX = Path(__file__).parent / "fake_gpu_box"
PHOTO = str(example_photos()[0])

pytestmark = pytest.mark.processes


def _svdpp(record: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in processes that seem to have two GPUs."""
    path = os.pathsep.join([str(FAKE_GPU_BOX), str(Path.cwd())])
    return subprocess.run(
        [sys.executable, "-m", "svdpp", *arguments],
        env={**os.environ, "PYTHONPATH": path, "FAKE_GPU_RECORD": str(record)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("run", PHOTO, "--device", "cuda")),
        pytest.param(("doctor", "--device", "cuda")),
        pytest.param(("verify", "--device", "cuda"), marks=pytest.mark.long),
        pytest.param(
            ("run", PHOTO, "--device", "cuda:1", "--decode-chunk-size", "auto"),
            marks=pytest.mark.long,
        ),
    ],
    ids=lambda command: command[0],
)
def test_ranks_on_cuda_can_use_it(command: tuple[str, ...], tmp_path: Path) -> None:
    record = tmp_path / "record"
    out = () if command[0] == "verify" else ("--out", str(tmp_path / "out"))
    answer = _svdpp(record, *command, "--gpus", "2", "--model", "demo", *out)
    assert "this is no GPU" in answer.stdout + answer.stderr, answer.stderr
    lines = [line.split(" ", 1) for line in record.read_text().splitlines()]
    took = {pid for pid, what in lines if what.startswith("takes cuda:")}
    assert took, "no rank came as far as its device"
    assert "bad fork" not in {what for _, what in lines}
    assert "creates a context" not in {what for _, what in lines}
    for pid in took:
        first = next(what for other, what in lines if other == pid and "counts" not in what)
        assert first.startswith("takes cuda:")


def test_a_fork_server_would_not_do(tmp_path: Path) -> None:
    """What the test above is for: importing diffusers initialises CUDA in the server."""
    record = tmp_path / "record"
    code = (
        "from svdpp.launch import fork_server\n"
        "fork_server.start_method = lambda device: 'forkserver'\n"
        "from svdpp.__main__ import main\n"
        "main()\n"
    )
    path = os.pathsep.join([str(FAKE_GPU_BOX), str(Path.cwd())])
    options = ["run", PHOTO, "--device", "cuda", "--gpus", "2", "--model", "demo"]
    subprocess.run(
        [sys.executable, "-c", code, *options, "--out", str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": path, "FAKE_GPU_RECORD": str(record)},
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert "bad fork" in record.read_text()


@pytest.mark.parametrize(
    ("device", "method"), [("cpu", "forkserver"), ("cuda", "spawn"), ("cuda:0", "spawn")]
)
def test_the_start_method_follows_the_device(device: str, method: str) -> None:
    assert fork_server.start_method(device) == method
