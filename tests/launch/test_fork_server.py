"""The fork server ends with its starter and leaves nothing behind; ranks print to a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from svdpp.launch.group import RankContext, start_ranks
from tests.faults.processes import is_there, wait_until

_START_AND_DIE = """
import os, signal
from multiprocessing import forkserver
from svdpp.launch import fork_server
fork_server.start(["tests.launch.never_imported"])
print(forkserver._forkserver._forkserver_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_a_server_ends_if_its_starter_ended_before_its_first_import(tmp_path: Path) -> None:
    """By then it has another parent, and must not wait for that one to end. It leaves no file."""
    output, temporary = tmp_path / "pid", tmp_path / "t"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
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
from svdpp.launch import fork_server
from tests.driver.dummies import clips, config

if __name__ == "__main__":
    os.mkdir("gone")
    os.chdir("gone")
    starter = threading.Thread(target=fork_server.start, args=[[fork_server.RANK_MODULE]])
    starter.start()
    starter.join()
    os.chdir("..")
    os.rmdir("gone")
    with Pipeline(config(1, steps=1)) as pipeline:
        pipeline.run(clips(0))
"""


@pytest.mark.long
@pytest.mark.processes
def test_a_server_outlives_the_thread_and_the_folder_it_was_started_in(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_START_IN_A_THREAD_AND_A_FOLDER_THAT_GO)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "TMPDIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, timeout=600, check=True
    )


_START_RANKS = """
import os
from svdpp import Pipeline
from tests.models.builders import small_svd

if __name__ == "__main__":
    before = dict(os.environ)
    with Pipeline(small_svd(1)):
        assert dict(os.environ) == before
"""


@pytest.mark.processes
def test_ranks_started_from_python(tmp_path: Path) -> None:
    """They leave no temporary files, and their threads do not spin while they wait."""
    script, temporary = tmp_path / "script.py", tmp_path / "t"
    script.write_text(_START_RANKS)
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.getcwd()}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "OMP_WAIT_POLICY"):  # the program has to set them
        environment.pop(name, None)
    environment |= {"OMP_DISPLAY_ENV": "verbose"}  # libgomp prints its settings as it is loaded
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        timeout=600,
        check=True,
        capture_output=True,
        text=True,
    )
    assert not os.listdir(temporary)
    assert "GOMP_SPINCOUNT = '0'" in done.stderr, done.stderr


def _print_and_fail(context: RankContext, _argument: object) -> None:
    print(f"printed by rank {context.world.rank}")
    os.write(2, b"written without Python\n")
    raise ValueError("on purpose")


@pytest.mark.processes
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
