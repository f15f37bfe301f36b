"""The life of processes: environment and signals at the start, clean-up at the end.

A process ends when its parent ends or a signal comes. It then kills its children and removes its
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

# A launcher's variables, which would make a child process one of its ranks.
_LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID")

# Held while a folder is made, and for ever once the folders of a process that ends are removed.
_making_folder = threading.Lock()

_choosing_folder = threading.RLock()  # a signal handler may need the folder meanwhile
# A socket's path has at most 107 bytes (unix(7)), of which multiprocessing adds these.
_MAX_TEMP_DIR_BYTES = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")
_SHORT_TEMP_DIRS = ("/tmp", "/var/tmp", "/dev/shm")

# --- the start ----------------------------------------------------------------------------------


def set_environment_defaults(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set each variable that the user has not set, for this process and its later children.

    Args:
        environment: Variables, changed in place.
    """
    environment.update(_missing(environment))


@contextlib.contextmanager
def environment_defaults(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set the defaults and `more` for libraries imported and processes started within the block.

    This process gets its own environment back: in a user's program it may compile or log.

    Args:
        more: Further variables, which replace those of the environment.
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
        # Transformers and diffusers print messages while they are imported.
        "TRANSFORMERS_VERBOSITY": "error",
        "DIFFUSERS_VERBOSITY": "error",
        # An import creates Inductor's cache folder. Nothing here compiles: one that exists will do.
        "TORCHINDUCTOR_CACHE_DIR": _existing_temp_dir(),
        # By default threads spin at the end of a parallel region: on few cores most of the time.
        "OMP_WAIT_POLICY": "passive",
        # Reduces fragmentation. The name before torch 2.9 is PYTORCH_CUDA_ALLOC_CONF.
        "PYTORCH_ALLOC_CONF": environment.get(
            "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
        ),
        # The parent names the rank that fails; NCCL's watchdog would first abort its neighbours.
        _NCCL_ERRORS: "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    existing = set(environment)
    if "TORCHELASTIC_RUN_ID" in environment and environment.get(_NCCL_ERRORS) == "1":
        existing.discard(_NCCL_ERRORS)  # torchrun exports 1 if the user has not set it
    return {name: value for name, value in values.items() if name not in existing}


def tune_gc() -> None:
    """Save a sixth of the time that the imports of torch and diffusers and their end take.

    They create a million objects that stay, which Python would search again and again for garbage.
    """
    gc.set_threshold(10_000, 20, 100)
    atexit.register(gc.freeze)


def start_helper(
    module: str, *arguments: object, variables: Mapping[str, str], stderr: int
) -> subprocess.Popen[bytes]:
    """Start a module in a session of its own, with this process's search path.

    Args:
        module: Name, as for `python -m`.
        arguments: Arguments of the module's command line.
        variables: Environment; those of a launcher are left out.
        stderr: Descriptor of the process's stderr, or a constant of `subprocess`.

    Returns:
        The process, with a pipe for its output.

    Raises:
        OSError: The process cannot be started.
    """
    kept = {name: value for name, value in variables.items() if name not in _LAUNCHER_VARIABLES}
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return subprocess.Popen(
        # `-P`, because `-m` adds the working folder to the path.
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
    """Block INT, TERM and HUP in this thread, and in the processes that it starts in the block.

    They stay blocked there until `exit_on_signals`: an import ended by Ctrl-C prints a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: A handler of signals, as `signal.signal` takes it.
Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None


def handle_signals(handler: Handler) -> dict[signal.Signals, Handler]:
    """Set the handler of INT, TERM and HUP in this process, and return those before.

    An `Interrupted` that the earlier handler raises meanwhile is dropped: the caller already
    handles an error, of which the signal is a consequence. Call it in the main thread.

    Args:
        handler: Handler as for `signal.signal`; `signal.SIG_IGN` while an error is reported.
    """
    before: dict[signal.Signals, Handler] = {}
    for _ in range(2):  # the handler of `Interrupted` lets itself be called once
        with contextlib.suppress(Interrupted):
            for number in _SIGNALS:
                before.setdefault(number, signal.getsignal(number))
                signal.signal(number, handler)
            break
    return before


def ignore_signals() -> None:
    """Make this process and those that it starts survive INT, TERM and HUP; for its main thread.

    They are blocked, because a program such as ffmpeg handles again what is only ignored.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)


# --- the end ------------------------------------------------------------------------------------


def end_with_parent(parent: int | None = None, number: int = signal.SIGKILL) -> None:
    """Make the kernel send this process a signal when the thread that started it ends.

    If the process goes on after that, the same holds for its next parent.

    Args:
        parent: Process id of the starter; None: the current parent, so that a starter which has
            already ended is not noticed.
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
    last, because a living parent would report their end as a failed clip. A child that starts in
    between ends by itself, because its input is closed.

    Args:
        pids: Process ids; those that have ended are skipped.
    """
    for pid in [*pids, *children_of(pids)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_descendants() -> None:
    """Kill this process's children and theirs. Call it directly before this process ends.

    This thread then keeps the GIL, which `os.kill` does not release, instead of for 5 ms: another
    thread could report a killed ffmpeg as a lost clip.
    """
    sys.setswitchinterval(1000)
    kill_with_children(children_of([os.getpid()]))


@functools.cache
def exit_on_signals(end: Callable[[int], NoReturn]) -> None:
    """Make INT, TERM and HUP end this process at once. Call it once, in the main thread.

    A thread calls `end`: Python's own handlers run only after a call into a library returns, and
    one that waits for another host may never return.

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
    """Kill this process's children, then end it by the signal, as its parent then sees.

    Args:
        number: Number of the signal.
    """
    # signal.signal works in the main thread only.
    ctypes.CDLL(None).signal(number, signal.SIG_DFL.value)
    kill_descendants()
    while True:
        os.kill(os.getpid(), number)


def exit_with_signal_code(number: int) -> NoReturn:
    """Call `exit_process` with the code that shells use for a signal, 128 + `number`."""
    exit_process(128 + number)


def exit_process(code: int) -> NoReturn:
    """Kill this process's children and exit, without waiting for threads that wait for ranks.

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
    """Return the process ids of the children of `pids`, as /proc shows them now."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended since
            # State and parent follow the name in parentheses, which can contain any character.
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            if parent in pids:
                children.append(int(stat.parent.name))
    return children


# --- temporary files ----------------------------------------------------------------------------


def temp_dir() -> str:
    """Return multiprocessing's folder of this process, which the first call creates.

    It is below TMPDIR, or the first of /tmp, /var/tmp and /dev/shm if TMPDIR is too long for the
    path of the fork server's socket.

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
            tempfile.tempdir = chosen  # multiprocessing takes no other name
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
    """Return Python's folder for temporary files, which exists even if that of TMPDIR does not."""
    try:
        return tempfile.gettempdir()
    except OSError:  # `temp_dir` says so when one is needed
        return "/tmp"


def make_folder(prefix: str) -> Path:
    """Create a folder that only this user can open; `remove_temp_files` removes it.

    Raises:
        OutputError: No folder for temporary files can be written.
    """
    with _making_folder:
        within = temp_dir()
        with contextlib.suppress(FileExistsError):
            os.mkdir(within, 0o700)  # a cleaner of /tmp removes it while a server runs for weeks
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
    """Remove multiprocessing's folder, with its sockets and what `make_folder` has created there.

    Python does so at a normal exit; this is for `os._exit`, and if the starter has been killed.
    """
    if "multiprocessing.util" in sys.modules:
        with contextlib.suppress(OSError):  # get_temp_dir creates the folder if there is none
            _making_folder.acquire(timeout=1)  # a signal handler's own thread may hold it
            remove_temp_folder(sys.modules["multiprocessing.util"].get_temp_dir())


def remove_temp_folder(folder: str) -> bool:
    """Remove multiprocessing's folder of a process that ends.

    This includes what another process has begun to remove before it was killed.

    Returns:
        Whether nothing of it is left.
    """
    gone = f"{folder}-gone"
    with contextlib.suppress(OSError):  # it is gone, or another process removes it
        # Others go on: by its name they could write into it meanwhile.
        os.rename(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)
    return not (os.path.exists(folder) or os.path.exists(gone))
