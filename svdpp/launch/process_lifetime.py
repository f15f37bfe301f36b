"""Lifetime of processes: environment and signals at the start, clean-up at the end.

Each process ends when its parent ends or when it gets a signal. Before it ends, it kills its child
processes and removes its temporary files.
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

# Constant of Linux, from <sys/prctl.h>
_PR_SET_PDEATHSIG = 1

_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})

_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"

# Environment variables that launchers set. Child processes must not inherit them, because a child
# with these variables would act as a rank that a launcher has started.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID")

# Lock that is held while a temporary folder is created. A process that is about to end acquires the
# lock before it removes its folders, and keeps it, so that no thread creates another folder.
_making_folder = threading.Lock()

# Lock that is held while Python chooses the temporary folder, for which it writes a test file into
# each candidate. A process that is about to end acquires the lock before it removes its folders,
# and keeps it, so that no test file remains. The lock is reentrant, because a signal handler may
# need the folder while the interrupted code holds the lock.
_choosing_folder = threading.RLock()
# Largest length of the temporary folder's path, in bytes. The path of a Unix socket has at most 107
# bytes (unix(7)), including the folder and file name that multiprocessing appends to this path.
_MAX_TEMP_DIR_BYTES = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
_SHORT_TEMP_DIRS = ("/tmp", "/var/tmp", "/dev/shm")

# --- start of a process: environment and signals ------------------------------------------------


def set_environment_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set svdpp's environment variables, such as OMP_WAIT_POLICY, unless the user has set them.

    Args:
        environment: Environment variables, which are changed in place. Child processes inherit
            them.
    """
    environment.update(_missing(environment))


@contextlib.contextmanager
def environment_defaults(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set svdpp's environment variables in the `with` block, for imports and new processes.

    The environment is restored after the block, because a user's program may depend on it.

    Args:
        more: Further variables, which replace existing ones; None: no further variables.
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
        # Without these variables, transformers and diffusers print messages while they are
        # imported.
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        # By default, importing torch creates a cache folder for Inductor. svdpp compiles nothing,
        # so the variable names a folder that exists anyway.
        "TORCHINDUCTOR_CACHE_DIR": _existing_temp_dir(),
        # By default, OpenMP threads spin after a parallel region. If the ranks share few cores,
        # the spinning would take most of the CPU time.
        "OMP_WAIT_POLICY": "passive",
        # Expandable segments reduce the fragmentation of GPU memory. Before torch 2.9, the name of
        # the variable was PYTORCH_CUDA_ALLOC_CONF.
        "PYTORCH_ALLOC_CONF": environment.get(
            "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
        ),
        # NCCL's watchdog would abort the neighbours of a failed rank before the parent can name the
        # failed rank.
        _NCCL_ERRORS: "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    existing = set(environment)
    if "TORCHELASTIC_RUN_ID" in environment and environment.get(_NCCL_ERRORS) == "1":
        # torchrun itself sets TORCH_NCCL_ASYNC_ERROR_HANDLING to 1. So the value 1 need not be the
        # user's choice, and is replaced by svdpp's value.
        existing.discard(_NCCL_ERRORS)
    return {name: value for name, value in values.items() if name not in existing}


def tune_gc() -> None:
    """Run Python's garbage collector less often, which makes imports and the exit a sixth faster.

    torch and diffusers create a million permanent objects, which each collection would visit.
    """
    gc.set_threshold(10_000, 20, 100)
    atexit.register(gc.freeze)


def start_helper(
    module: str, *arguments: object, variables: Mapping[str, str], stderr: int
) -> subprocess.Popen[bytes]:
    """Run a Python module in a new process and session, with this process's module search path.

    Args:
        module: Name of the module, as for `python -m`.
        arguments: Arguments of the module's command line.
        variables: Environment variables of the new process. Variables of launchers are left out.
        stderr: File descriptor for stderr of the new process, or a constant of `subprocess`.

    Returns:
        New process, whose stdout is a pipe.

    Raises:
        OSError: The process cannot be started.
    """
    kept = {name: value for name, value in variables.items() if name not in _LAUNCHER_VARIABLES}
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return subprocess.Popen(
        # Without the option -P, Python's -m would add the working folder to the module search path,
        # so that a user's file such as numpy.py would hide the library.
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
    """Block INT, TERM and HUP in this thread, and in processes that the `with` block starts.

    In the started processes, the signals stay blocked until these processes call `exit_on_signals`,
    because Ctrl-C during an import would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: Signal handler, as for `signal.signal`.
Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


def handle_signals(handler: Handler) -> dict[signal.Signals, Handler]:
    """Set the handler of the signals INT, TERM and HUP, and return the previous handlers by signal.

    Call this only in the main thread. If a previous handler raises `Interrupted` during this call,
    the exception is dropped, because the caller already handles an error.

    Args:
        handler: New signal handler, such as `signal.SIG_IGN` while an error is reported.
    """
    before: dict[signal.Signals, Handler] = {}
    # An old handler may raise `Interrupted` while the handlers are being set. It does so only once,
    # so the second attempt succeeds.
    for _ in range(2):
        with contextlib.suppress(Interrupted):
            for number in _SIGNALS:
                before.setdefault(number, signal.getsignal(number))
                signal.signal(number, handler)
            break
    return before


def ignore_signals() -> None:
    """Make this process and its children survive INT, TERM and HUP. Call this in the main thread.

    The signals are blocked, not ignored, because a program such as ffmpeg installs handlers for
    ignored signals.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


# --- end of a process: signals and child processes ----------------------------------------------


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal when its parent process ends.

    The kernel also sends the signal when only the thread that started this process ends. A process
    that survives the signal gets a new parent from the kernel (init or a subreaper), and gets the
    signal again when the new parent ends.

    Args:
        parent: Process id of the process that started this one. If that process has already ended,
            the signal is sent now. None: the current parent.
        number: Number of the signal.
    """
    if parent is None:
        parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent has ended before the prctl call
        os.kill(os.getpid(), number)


def kill_with_children(pids: Collection[int]) -> None:
    """Kill processes and their children, such as a running ffmpeg.

    Children are listed first, because a child gets another parent when its parent ends. Children
    are killed last, because a living parent would report a killed ffmpeg as a failed clip. A child
    that starts later ends by itself, because its input is closed.

    Args:
        pids: Process ids; processes that have ended are skipped.
    """
    for pid in [*pids, *children_of(pids)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants() -> None:
    """Kill all descendants of this process; call this directly before the process ends.

    From this call on, this thread keeps the GIL, so that no other thread can report a killed ffmpeg
    as a failed clip. (Python switches threads every 5 ms, and `os.kill` does not release the GIL.)
    """
    sys.setswitchinterval(1000)
    kill_with_children(children_of([os.getpid()]))


@functools.cache
def exit_on_signals(end: Callable[[int], NoReturn]) -> None:
    """Make INT, TERM and HUP end this process immediately. Call this once, in the main thread.

    `end` is called in a separate thread and not by a signal handler. Python runs signal handlers
    only between bytecodes of the main thread, and the main thread may be in a library call that
    waits for another host forever.

    Args:
        end: Function that gets the number of the signal, and ends the process.
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
    """Kill this process's descendants, then end this process by the given signal.

    The parent process then sees that the signal ended this process.

    Args:
        number: Number of the signal.
    """
    # C's `signal` is called, because Python's works only in the main thread.
    ctypes.CDLL(None).signal(number, signal.SIG_DFL.value)
    kill_descendants()
    while True:
        os.kill(os.getpid(), number)


def exit_with_signal_code(number: int) -> NoReturn:
    """Exit with the code that shells report for a process that a signal ended: 128 + `number`."""
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
    """Return the process ids of the children that the processes `pids` have now, from /proc."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # An OSError means that the process has ended meanwhile. In /proc/PID/stat, state and parent
        # follow the process name, which is in parentheses and can contain any character.
        with contextlib.suppress(OSError):
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            if parent in pids:
                children.append(int(stat.parent.name))
    return children


# --- temporary files ----------------------------------------------------------------------------


def temp_dir() -> str:
    """Return multiprocessing's temporary folder for this process; create it if needed.

    The folder is below TMPDIR. If TMPDIR is too long for the path of the fork server's socket, the
    folder is below the first of /tmp, /var/tmp and /dev/shm that is writable.

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
            # multiprocessing has no setting of its own: it asks tempfile for the folder.
            tempfile.tempdir = chosen
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
    """Return Python's folder for temporary files; `/tmp` if Python finds no writable folder."""
    with _choosing_folder:
        try:
            return tempfile.gettempdir()
        except OSError:  # `temp_dir` reports this error when a folder is needed
            return "/tmp"


def make_temp_folder(prefix: str) -> Path:
    """Create a temporary folder that only this user can open; `remove_temp_files` removes it.

    Args:
        prefix: Beginning of the folder's name.

    Raises:
        OutputError: No folder for temporary files can be written.
    """
    with _making_folder:
        within = temp_dir()
        with contextlib.suppress(FileExistsError):
            # The folder is created again if it is missing: in a server that runs for weeks, a
            # cleaner of /tmp may have removed it.
            os.mkdir(within, 0o700)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=within))


@contextlib.contextmanager
def temp_folder(prefix: str) -> Iterator[Path]:
    """Create a temporary folder, and remove it at the end of the `with` block.

    Args:
        prefix: Beginning of the folder's name.

    Raises:
        OutputError: No folder for temporary files can be written.
    """
    made = make_temp_folder(prefix)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def remove_temp_files() -> None:
    """Remove multiprocessing's temporary folder, with the sockets and folders in it.

    Python removes the folder at a normal exit, but not at `os._exit`, and not if the process that
    created it was killed. Call this directly before the process ends: afterwards other threads can
    create no temporary files.
    """
    # Another thread may be choosing a folder, for which Python writes a test file. Without this
    # wait, the process could end before the file is removed.
    _choosing_folder.acquire(timeout=1)
    if "multiprocessing.util" in sys.modules:
        # `get_temp_dir` may have to create the folder, and may fail.
        with contextlib.suppress(OSError):
            # In a signal handler, the interrupted code may hold the lock, and cannot release it
            # before the handler returns. So the wait has a timeout.
            _making_folder.acquire(timeout=1)
            remove_temp_folder(sys.modules["multiprocessing.util"].get_temp_dir())


def remove_temp_folder(folder: str) -> bool:
    """Remove multiprocessing's temporary folder of a process that is about to end.

    If another process was killed while it removed the folder, this function removes the rest.

    Returns:
        Whether the folder has been removed completely.
    """
    gone = f"{folder}-gone"
    # The folder is renamed first, so that processes that still run cannot write into it. An OSError
    # means that the folder does not exist, or that another process is removing it.
    with contextlib.suppress(OSError):
        os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)
    return not (os.path.exists(folder) or os.path.exists(gone))
