"""Fixtures for all tests: temporary files, the fork server, and a check of errors' `details`.

The session has its own folder for temporary files, which must be empty at the end.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import svdpp
from svdpp.errors import SvdppError
from svdpp.launch import fork_server, process_lifetime, worker_group
from tests.support.details import numbers_not_in_details

# Property tests have no time limit, because the machine may be loaded.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", settings.get_profile("unhurried"), max_examples=100_000)
settings.load_profile("unhurried")

# Seconds in which processes that were just killed may still remove their folders.
_GRACE_SECONDS = 10.0

#: Prefix of the paths of svdpp's modules. "svdpp" alone is not enough, because the checkout may
#: have this name too.
_PACKAGE = f"{Path(svdpp.__file__).parent}{os.sep}"

_GC_THRESHOLDS = gc.get_threshold()

_found_after: dict[str, str] = {}


def pytest_configure() -> None:
    # pytest keeps the folders of failed tests after the session, so they are not in the session's
    # folder.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="svdpp-")
    # pytest's workers share the cores, so threads that spin while they wait would slow down all of
    # them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # An import of diffusers creates the folder that this variable names.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
    process_lifetime.tune_gc()
    # The cache of file hashes is in multiprocessing's folder, which lasts as long as this process.
    os.environ["XDG_CACHE_HOME"] = util.get_temp_dir()
    # The session's folder is removed after multiprocessing's folder, which is inside, so this
    # finalizer has a lower priority.
    util.Finalize(None, shutil.rmtree, [folder], {"ignore_errors": True}, exitpriority=-200)


def pytest_collection_finish() -> None:
    gc.set_threshold(*_GC_THRESHOLDS)  # tests of memory need frequent collections


@pytest.fixture(scope="session", autouse=True)
def _fork_server_knows_svd() -> Iterator[None]:
    """Make the fork server import the modules for SVD, whichever test starts the server.

    All ranks of all tests share this server. Without the import in the server, each rank of SVD
    would import it again.
    """
    start = fork_server.start_fork_server
    with pytest.MonkeyPatch.context() as patch:
        modules = fork_server.modules_for("svd")
        for module in (fork_server, worker_group):
            patch.setattr(module, "start_fork_server", lambda _: start(modules))
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Give torch in this process one thread, as in a rank, because bits depend on the number."""
    import torch  # slow, and many tests do not need it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files() -> Iterator[None]:
    yield
    deadline = time.monotonic() + _GRACE_SECONDS
    while _leftover_files() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = {name: _found_after.get(name, "the last test") for name in _leftover_files()}
    assert not left, "left among the temporary files, and first seen after: " + str(left)


@pytest.fixture(autouse=True)
def _temporary_files_of_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in _leftover_files():
        _found_after.setdefault(name, request.node.nodeid)


def _leftover_files() -> list[str]:
    """Return the names of files that tests have left in the session's folder.

    The sockets of this process's fork server last as long as the process, and so does matplotlib's
    folder if the home is read-only. They are not returned.
    """
    own = util.get_temp_dir()
    lasting = (os.path.basename(own), "matplotlib-")
    runs = [name for name in os.listdir(own) if name.startswith("svdpp-")]
    # The folder is not read from TMPDIR, because a test may have changed that variable.
    return runs + [n for n in os.listdir(tempfile.gettempdir()) if not n.startswith(lasting)]


@pytest.fixture(autouse=True)
def _errors_have_their_numbers_in_details(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that each `SvdppError` raised in a test has the numbers of its message in `details`."""
    missing: list[str] = []
    construct = SvdppError.__init__

    def check(self: SvdppError, *args: object, **more: object) -> None:
        construct(self, *args, **more)  # type: ignore[arg-type]
        if numbers := numbers_not_in_details(self):
            frame = sys._getframe(1)
            while frame.f_code.co_name in ("__init__", "require") and frame.f_back is not None:
                frame = frame.f_back
            place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if place.startswith(_PACKAGE) and "error_from_dict" not in frame.f_code.co_name:
                missing.append(f"{place}: {', '.join(numbers)} of {self.message!r}")

    monkeypatch.setattr(SvdppError, "__init__", check)
    yield
    assert not missing, "numbers that are not in `details`:\n" + "\n".join(missing)
