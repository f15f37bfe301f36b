"""Lifetime of processes: environment and signals at the start, clean-up at the end.

A process ends when its parent ends or it gets a signal. It then kills its children and removes its
temporary files.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from svdpp.errors import Interrupted, OutputError

# Linux, <sys/prctl.h>
_PR_SET_PDEATHSIG = 1

_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})

_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

# Variables of a launcher, with which a child process would count as one of its ranks.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID")

# Held while a folder is created; and forever, once the folders of an ending process are removed.
_making_folder = threading.Lock()

# Held while Python looks for a folder, to which it writes a file; and forever, once the folders of
# an ending process are removed. Reentrant, because a signal handler may need the folder.
_choosing_folder = threading.RLock()
# The path of a socket has at most 107 bytes (unix(7)), including this part by multiprocessing.
_MAX_TEMP_DIR_BYTES = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
_SHORT_TEMP_DIRS = ("/tmp", "/var/tmp", "/dev/shm")

# --- the start ----------------------------------------------------------------------------------


def set_environment_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the default of each variable that the user has not set, also for later children.

    Args:
        environment: Environment variables, changed in place.
    """
    environment.update(_missing(environment))


@contextlib.contextmanager
def environment_defaults(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set the defaults and `more` during the block, for imports and new processes.

    The environment is restored, because a user's program may depend on it, to compile or to log.

    Args:
        more: Further variables, which replace those of the environment; None: none.
    """
    added = {**_missing(os.environ), **(more or {})}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _missing(environment: Mapping[str, str]) -> dict[str, str]:
    values = {
        # transformers and diffusers print messages while they are imported.
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        # An import creates Inductor's cache folder. Nothing is compiled, so an existing folder
        # does.
        "TORCHINDUCTOR_CACHE_DIR": _existing_temp_dir(),
        # By default threads spin after a parallel region, which takes most of the time on few
        # cores.
        "OMP_WAIT_POLICY": "passive",
        # Reduces fragmentation. The name before torch 2.9 is PYTORCH_CUDA_ALLOC_CONF.
        "PYTORCH_ALLOC_CONF": environment.get(
            "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
        ),
        # NCCL's watchdog would abort the neighbours before the parent can name the rank that
        # failed.
        _NCCL_ERRORS: "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    existing = set(environment)
    if "TORCHELASTIC_RUN_ID" in environment and environment.get(_NCCL_ERRORS) == "1":
        existing.discard(_NCCL_ERRORS)  # torchrun sets it to 1 if the user has not set it
    return {name: value for name, value in values.items() if name not in existing}


def tune_gc() -> None:
    """Search for garbage less often, which saves a sixth of the time of imports and of the exit.

    torch and diffusers create a million objects that stay, which each search would visit.
    """
    gc.set_threshold(10_000, 20, 100)
    atexit.register(gc.freeze)


def start_helper(
    module: str, *arguments: object, variables: Mapping[str, str], stderr: int
) -> subprocess.Popen[bytes]:
    """Run a Python module in a new process and session, with this process's search path.

    Args:
        module: Name of the module, as for `python -m`.
        arguments: Arguments of the module's command line.
        variables: Environment variables of the process; those of a launcher are left out.
        stderr: File descriptor of the process's stderr, or a constant of `subprocess`.

    Returns:
        Process whose stdout is a pipe.

    Raises:
        OSError: The process cannot be started.
    """
    kept = {name: value for name, value in variables.items() if name not in _LAUNCHER_VARIABLES}
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return subprocess.Popen(
        # `-P`, because `-m` alone would add the working folder to the search path.
        [sys.executable, "-P", "-m", module, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env={**kept, "PYTHONPATH": path},
        cwd="/",
        start_new_session=True,
    )


@contextlib.contextmanager
def signals_blocked() -> Iterator[None]:
    """Block INT, TERM and HUP in this thread, and in the processes that it starts meanwhile.

    In those they stay blocked until `exit_on_signals`, because Ctrl-C during an import would print
    a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: Signal handler, as for `signal.signal`.
Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


def handle_signals(handler: Handler) -> dict[signal.Signals, Handler]:
    """Set the handler of INT, TERM and HUP, and return the previous handlers by signal.

    Must be called in the main thread. If a previous handler raises `Interrupted` meanwhile, that is
    dropped: the caller already handles an error.

    Args:
        handler: Signal handler; `signal.SIG_IGN` while an error is reported.
    """
    before: dict[signal.Signals, Handler] = {}
    for _ in range(2):  # the handler that raises `Interrupted` does so only once
        with contextlib.suppress(Interrupted):
            for number in _SIGNALS:
                before.setdefault(number, signal.getsignal(number))
                signal.signal(number, handler)
            break
    return before


def ignore_signals() -> None:
    """Make this process and its children survive INT, TERM and HUP. For the main thread.

    The signals are blocked, not ignored, because a program such as ffmpeg installs handlers for
    ignored signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


# --- the end ------------------------------------------------------------------------------------


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when the thread that started it ends.

    If the process survives the signal, the same holds for its next parent.

    Args:
        parent: Process id of the starter, whose earlier end is then noticed. None: the current
            parent.
        number: Number of the signal.
    """
    if parent is None:
        parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the starter ended before the prctl call
        os.kill(os.getpid(), number)


def kill_with_children(pids: Collection[int]) -> None:
    """Kill processes and their children, such as a running ffmpeg.

    Children are listed first, because they get another parent when theirs ends. They are killed
    last, because a living parent would report their end as a failed clip. A child that is started
    in between ends by itself, because its input is closed.

    Args:
        pids: Process ids; processes that have ended are skipped.
    """
    for pid in [*pids, *children_of(pids)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants() -> None:
    """Kill this process's children and their children, directly before it ends.

    This thread keeps the GIL from then on (by default a thread gets it for 5 ms, and `os.kill` does
    not release it), because another thread could report a killed ffmpeg as a lost clip.
    """
    sys.setswitchinterval(1000)
    kill_with_children(children_of([os.getpid()]))


@functools.cache
def exit_on_signals(end: Callable[[int], NoReturn]) -> None:
    """Make INT, TERM and HUP end this process at once. Must be called once, in the main thread.

    `end` is called in a thread, because Python runs signal handlers only between bytecodes of the
    main thread: a call into a library that waits for another host may never return.

    Args:
        end: Function that gets the signal's number and does not return.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)

    def wait() -> None:
        while (number := os.read(reader, 1)[0]) not in _SIGNALS:
            pass
        end(number)

    threading.Thread(target=wait, name="signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def exit_by_signal(number: int) -> NoReturn:
    """Kill this process's descendants, then end it by the signal, so that its parent sees that.

    Args:
        number: Number of the signal.
    """
    # signal.signal works only in the main thread.
    ctypes.CDLL(None).signal(number, signal.SIG_DFL.value)
    kill_descendants()
    while True:
        os.kill(os.getpid(), number)


def exit_with_signal_code(number: int) -> NoReturn:
    """Exit with the code that shells use for a signal, 128 + `number`."""
    exit_process(128 + number)


def exit_process(code: int) -> NoReturn:
    """Kill this process's descendants and exit, without waiting for threads.

    Args:
        code: Exit code, 0 to 255.
    """
    remove_temp_files()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    kill_descendants()
    os._exit(code)


def children_of(pids: Collection[int]) -> list[int]:
    """Return the process ids of the present children of `pids`, from /proc."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            # State and parent follow the name, which is in parentheses and can have any character.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            if parent in pids:
                children.append(int(stat.parent.name))
    return children


# --- temporary files ----------------------------------------------------------------------------


def temp_dir() -> str:
    """Return the temporary folder that multiprocessing uses in this process; create it if needed.

    It is below TMPDIR. If TMPDIR is too long for the path of the fork server's socket, it is below
    the first of /tmp, /var/tmp and /dev/shm that can be written.

    Raises:
        OutputError: No folder for temporary files can be written.
    """
    from multiprocessing import util

    with _choosing_folder:
        before = tempfile.tempdir
        try:
            chosen = tempfile.gettempdir()
            if len(os.fsencode(chosen)) > _MAX_TEMP_DIR_BYTES:
                chosen = next(filter(_is_writable, _SHORT_TEMP_DIRS), chosen)
            tempfile.tempdir = chosen  # the only way to tell multiprocessing
            return util.get_temp_dir()
        except OSError as error:
            raise OutputError(
                f"no folder for temporary files can be written: {error.strerror or error}",
                "set TMPDIR to a folder that exists, on a disk with free space",
            ) from error
        finally:
            tempfile.tempdir = before


def _is_writable(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _existing_temp_dir() -> str:
    """Return Python's folder for temporary files; `/tmp` if it has none."""
    with _choosing_folder:
        try:
            return tempfile.gettempdir()
        except OSError:  # `temp_dir` reports it when a folder is needed
            return "/tmp"


def make_folder(prefix: str) -> Path:
    """Create a folder that only this user can open; `remove_temp_files` removes it.

    Raises:
        OutputError: No folder for temporary files can be written.
    """
    with _making_folder:
        within = temp_dir()
        with contextlib.suppress(FileExistsError):
            # A cleaner of /tmp may have removed it, in a server that runs for weeks.
            os.mkdir(within, 0o700)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=within))


@contextlib.contextmanager
def temp_folder(prefix: str) -> Iterator[Path]:
    """Create a folder and remove it at the end of the block.

    Raises:
        OutputError: No folder for temporary files can be written.
    """
    made = make_folder(prefix)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove_temp_files() -> None:
    """Remove multiprocessing's folder, with its sockets and the folders of `make_folder`.

    Python does so at a normal exit, but not at `os._exit`, or if the starter was killed. The caller
    ends the process next: other threads can create no more temporary files.
    """
    # Python writes a file to a folder to test it. A process that ended meanwhile would leave it.
    _choosing_folder.acquire(timeout=1)
    if "multiprocessing.util" in sys.modules:
        with contextlib.suppress(OSError):  # `get_temp_dir` may create the folder first
            _making_folder.acquire(timeout=1)  # the thread of a signal handler may hold it already
            remove_temp_folder(sys.modules["multiprocessing.util"].get_temp_dir())


def remove_temp_folder(folder: str) -> bool:
    """Remove multiprocessing's folder of an ending process.

    A removal that another process had begun before it was killed is completed.

    Returns:
        Whether the whole folder is removed.
    """
    gone = f"{folder}-gone"
    with contextlib.suppress(OSError):  # the folder is gone, or another process removes it
        # Renamed first, so that processes that still run cannot write into it.
        os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)
    return not (os.path.exists(folder) or os.path.exists(gone))
