"""The start of ranks: CUDA's are spawned, the fork server of others ends with its starter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svdpp.launch.group import RankContext, start_ranks
from svdpp.media.inputs import example_photos
from tests.faults.processes import is_there, wait_until

FAKE_GPU_BOX = Path(__file__).parent / "fake_gpu_box"
PHOTO = str(example_photos()[0])

pytestmark = pytest.mark.processes


_START_AND_DIE = """
import os, signal
from multiprocessing import forkserver
from svdpp.launch import group
group.start_fork_server(["sleeps"])
print(forkserver._forkserver._forkserver_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_ends_if_its_starter_ended_before_its_first_import(tmp_path: Path) -> None:
    """By then it has another parent, and must not wait for that one to end. It leaves no file."""
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)")
    output, temporary = tmp_path / "pid", tmp_path / "t"
    temporary.mkdir()
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": path}
    for _ in range(3):
        with output.open("w") as file:
            # To a file, because the server would hold a pipe open as long as it runs.
            command = [sys.executable, "-c", _START_AND_DIE]
            subprocess.run(command, stdout=file, env=environment, check=False)
        pid = int(output.read_text())
        wait_until(lambda pid=pid: not is_there(pid), 30, f"server {pid} has ended")
        assert not os.listdir(temporary)


_START_IN_A_THREAD_AND_A_FOLDER_THAT_GO = """
import os, threading
from svdpp import Pipeline
from svdpp.launch import group
from tests.driver.dummies import clips, config

if __name__ == "__main__":
    os.mkdir("gone")
    os.chdir("gone")
    starter = threading.Thread(target=group.start_fork_server, args=[[group.RANK_MODULE]])
    starter.start()
    starter.join()
    os.chdir("..")
    os.rmdir("gone")
    with Pipeline(config(1, steps=1)) as pipeline:
        pipeline.run(clips(0))
"""


@pytest.mark.long
def test_a_server_outlives_the_thread_and_the_folder_it_was_started_in(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_START_IN_A_THREAD_AND_A_FOLDER_THAT_GO)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, timeout=600, check=True
    )


_START_RANKS = """
import os
from svdpp import ModelConfig, Pipeline, PipelineConfig, SvdSampling

if __name__ == "__main__":
    before = dict(os.environ)
    sampling = SvdSampling(height=64, width=64, num_frames=2, num_inference_steps=2)
    with Pipeline(PipelineConfig(world_size=1, model=ModelConfig(name="demo"), sampling=sampling)):
        assert dict(os.environ) == before
"""


def test_ranks_started_from_python(tmp_path: Path) -> None:
    """They leave no temporary files, and their threads do not spin while they wait."""
    script, temporary = tmp_path / "script.py", tmp_path / "t"
    script.write_text(_START_RANKS)
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.getcwd()}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "OMP_WAIT_POLICY"):  # the program has to set them
        environment.pop(name, None)
    environment |= {"OMP_DISPLAY_ENV": "verbose"}  # libgomp prints its settings as it is loaded
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not os.listdir(temporary)
    assert "GOMP_SPINCOUNT = '0'" in done.stderr, done.stderr


def _print_and_fail(context: RankContext, _argument: object) -> None:
    print(f"printed by rank {context.world.rank}")
    os.write(2, b"written without Python\n")
    raise ValueError("on purpose")


def test_the_output_of_ranks_is_kept_off_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    group = start_ranks(_print_and_fail, None, world_size=2, backend="gloo")
    assert not group.end(60)
    output = group.output_tail(1) or ""
    group.kill()
    assert group.exited() == {0: 1, 1: 1}
    assert "printed by rank 1" in output
    assert "written without Python" in output
    assert "ValueError: on purpose" in output
    captured = capfd.readouterr()
    assert "printed by" not in captured.out + captured.err


# --- ranks on CUDA ------------------------------------------------------------------------------


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
        "from svdpp.launch import group\n"
        "group.start_method = lambda device: 'forkserver'\n"
        "from svdpp.__main__ import main\n"
        "main()\n"
    )
    options = ["run", PHOTO, "--device", "cuda", "--gpus", "2", "--model", "demo"]
    _python(record, "-c", code, *options, "--out", str(tmp_path / "out"))
    assert "bad fork" in record.read_text()
