"""Start and end of processes: fork server, ranks on CUDA, environment, and temporary files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from svdpp.launch import process_lifetime
from svdpp.launch.worker_group import LaunchContext, WorkerGroup, start_ranks
from svdpp.media.inputs import example_images
from tests.support.processes import is_there, wait_until

PHOTO = str(example_images()[0])

pytestmark = pytest.mark.slow


_START_AND_DIE = """
import os, signal
from multiprocessing import forkserver
from svdpp.launch import fork_server
fork_server.start_fork_server(["sleeps"])
print(forkserver._forkserver._forkserver_pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_server_ends_if_its_starter_ended_before_its_first_import(tmp_path: Path) -> None:
    """The fork server ends, and leaves no file, if its starter was killed before the first import.

    The server then has another parent, for whose end it must not wait.
    """
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(600)")
    output, temporary = tmp_path / "pid", tmp_path / "t"
    temporary.mkdir()
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": path}
    with output.open("w") as file:  # the running server would keep a pipe open
        command = [sys.executable, "-c", _START_AND_DIE]
        subprocess.run(command, stdout=file, env=environment, check=False)
    wait_until(lambda: not is_there(int(output.read_text())), 30, "end of the server")
    assert not os.listdir(temporary)


_START_IN_A_THREAD_AND_A_FOLDER_THAT_GO = """
import os, threading
from svdpp import ModelConfig, Pipeline, PipelineConfig, SvdSampling
from svdpp.launch import fork_server

if __name__ == "__main__":
    before = dict(os.environ)
    os.mkdir("gone")
    os.chdir("gone")
    modules = fork_server.modules_for("svd")
    starter = threading.Thread(target=fork_server.start_fork_server, args=[modules])
    starter.start()
    starter.join()
    os.chdir("..")
    os.rmdir("gone")
    sampling = SvdSampling(height=64, width=64, num_frames=2, num_inference_steps=2)
    with Pipeline(PipelineConfig(world_size=1, model=ModelConfig(name="demo"), sampling=sampling)):
        assert dict(os.environ) == before
"""


def test_ranks_started_from_python(tmp_path: Path) -> None:
    """Ranks outlive the thread and the folder in which the fork server was started.

    They leave no files, and do not spin while they wait.
    """
    script, temporary = tmp_path / "script.py", tmp_path / "t"
    script.write_text(_START_IN_A_THREAD_AND_A_FOLDER_THAT_GO)
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.getcwd()}
    for name in ("TORCHINDUCTOR_CACHE_DIR", "OMP_WAIT_POLICY"):  # svdpp has to set them itself
        environment.pop(name, None)
    environment |= {"OMP_DISPLAY_ENV": "verbose"}  # makes libgomp print its settings
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=600, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not os.listdir(temporary)
    assert "GOMP_SPINCOUNT = '0'" in done.stderr, done.stderr


def _print_and_fail(context: LaunchContext, _argument: object) -> None:
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


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("run", PHOTO, "--device", "cuda", "--out", "out"), marks=pytest.mark.full),
        pytest.param(("verify", "--device", "cuda"), marks=pytest.mark.full),
        pytest.param(("doctor", "--device", "cuda", "--out", "out"), marks=pytest.mark.full),
    ],
    ids=lambda command: command[0],
)
def test_cuda_ranks_are_not_forked(command: tuple[str, ...], tmp_path: Path) -> None:
    """Ranks on CUDA are not forked from a server.

    An import of diffusers initialises CUDA, and processes forked after that cannot use it.
    """
    record, box = tmp_path / "record", Path(__file__).parent / "fake_gpu_box"
    path = os.pathsep.join([str(box), os.getcwd()])
    answer = subprocess.run(
        [sys.executable, "-m", "svdpp", *command, "--gpus", "2", "--model", "demo"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "FAKE_GPU_RECORD": str(record)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert "this is a fake GPU" in answer.stdout + answer.stderr, answer.stderr
    lines = [line.split(" ", 1) for line in record.read_text().splitlines()]
    ranks = {pid for pid, call in lines if call.startswith("sets cuda:")}
    assert ranks, "no rank set its device"
    assert "bad fork" not in {call for _, call in lines}
    assert "creates a context" not in {call for _, call in lines}
    for pid in ranks:
        first = next(call for other, call in lines if other == pid and "counts" not in call)
        assert first.startswith("sets cuda:")


# --- environment variables, child processes and temporary files ---------------------------------

NCCL = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"DIFFUSERS_VERBOSITY": "info"}, "DIFFUSERS_VERBOSITY", "info"),
        ({}, "PYTORCH_ALLOC_CONF", "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split:128"}, "PYTORCH_ALLOC_CONF", "max_split:128"),
        ({NCCL: "1"}, NCCL, "1"),
        ({NCCL: "1", "TORCHELASTIC_RUN_ID": "x"}, NCCL, "0"),  # torchrun's value
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


def _run_code(folder: Path, code: str, *arguments: str) -> int:
    """Run Python code in a process with `folder` for temporary files; return its exit code."""
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
    process_lifetime.make_temp_folder("svdpp-test-")
getattr(process_lifetime, sys.argv[2])(15)
"""


@pytest.mark.parametrize(
    ("end", "code"), [("exit_by_signal", -15), ("exit_with_signal_code", 128 + 15)]
)
def test_a_process_that_ends_does_not_report_what_it_kills(
    tmp_path: Path, end: str, code: int
) -> None:
    report = tmp_path / "report"  # not in the folders that the process removes
    assert _run_code(tmp_path, _WRITER, str(report), end) == code
    assert not report.exists(), report.read_text()


_MAKER = """
import threading
from svdpp.launch import process_lifetime

def make():
    while True:
        process_lifetime.make_temp_folder("svdpp-test-")
        made.set()

made = threading.Event()
threading.Thread(target=make, daemon=True).start()
made.wait()
process_lifetime.exit_process(0)
"""

_PROBER = """
import os, threading, time
from svdpp.launch import process_lifetime

def unlink(path, **arguments):
    probing.set()
    time.sleep(0.3)
    real_unlink(path, **arguments)

probing, real_unlink = threading.Event(), os.unlink
os.unlink = unlink
threading.Thread(target=process_lifetime.{}, daemon=True).start()
probing.wait()
process_lifetime.exit_process(0)
"""

_CLEANED = """
import shutil
from multiprocessing import util
from svdpp.launch import process_lifetime

process_lifetime.make_temp_folder("svdpp-test-")
shutil.rmtree(util.get_temp_dir())
made = process_lifetime.make_temp_folder("svdpp-test-")
assert made.parent.stat().st_mode & 0o777 == 0o700
"""


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(_MAKER, id="a thread makes one"),
        pytest.param(_PROBER.format("temp_dir"), id="a thread looks for a folder"),
        pytest.param(
            _PROBER.format("set_environment_defaults"), id="a thread sets the environment"
        ),
        pytest.param(_CLEANED, id="a cleaner came"),
    ],
)
def test_a_process_leaves_no_temporary_files(tmp_path: Path, code: str) -> None:
    """A process that ends leaves no temporary file, even if a thread is creating one.

    Python itself writes a file to a temporary folder to test whether the folder can be used.
    """
    assert _run_code(tmp_path, code) == 0
    assert not list(tmp_path.iterdir())


# --- folders for temporary files ----------------------------------------------------------------

_ADDRESS = """
from multiprocessing import connection
from svdpp.launch import process_lifetime
folder = process_lifetime.make_temp_folder("svdpp-test-")
address = connection.arbitrary_address("AF_UNIX")
assert str(folder.parent) == address.rpartition("/")[0]
assert len(address) <= 107, address
print(folder)
"""


@pytest.mark.parametrize("length", [20, 85, 200])
def test_the_fork_servers_socket_fits_whatever_the_length_of_tmpdir(length: int) -> None:
    """The path of the fork server's socket has at most 107 bytes (unix(7)), for any TMPDIR."""
    with tempfile.TemporaryDirectory(prefix="x" * length, dir="/tmp") as place:
        environment = {**os.environ, "TMPDIR": place, "PYTHONPATH": os.getcwd()}
        command = [sys.executable, "-c", _ADDRESS]
        made = subprocess.check_output(command, env=environment, text=True).strip()
        assert made.startswith(place) == (length == 20)
        assert not os.path.exists(os.path.dirname(made))
        assert not os.listdir(place)


_DEFAULTS = """
import os
from svdpp.launch import process_lifetime
process_lifetime.set_environment_defaults()
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


def test_a_tmpdir_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    """If TMPDIR does not exist, TORCHINDUCTOR_CACHE_DIR is set to an existing folder.

    An import of torch would create the folder, or fail with a traceback.
    """
    environment = {**os.environ, "TMPDIR": str(tmp_path / "no"), "PYTHONPATH": os.getcwd()}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    command = [sys.executable, "-c", _DEFAULTS]
    named = subprocess.check_output(command, env=environment, text=True).strip()
    assert os.path.isdir(named)
    assert not (tmp_path / "no").exists()


_PRINTS = """
import os, sys, time
from pathlib import Path
from svdpp.launch import worker_group
worker_group._MAX_OUTPUT_BYTES, worker_group._OUTPUT_CHECK_SECONDS = 1000, 0.01
worker_group.redirect_output(Path("rank0.txt"))
for number in range(300):
    print(f"line {number:05} " + "x" * 100)
    time.sleep(0.002)
"""


def test_the_output_of_a_rank_is_bounded_and_its_end_kept(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.check_call([sys.executable, "-c", _PRINTS], cwd=tmp_path, env=environment)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 300 * 111 / 2
    tail = WorkerGroup([], tmp_path).output_tail(0)
    assert tail is not None
    assert tail.endswith("line 00299 " + "x" * 100 + "\n")
    numbers = [int(line.split()[1]) for line in tail.splitlines()[1:]]
    assert numbers == list(range(numbers[0], 300)), "nothing is missing between the files"
