"""Gives a session of tests its own folder for temporary files, which must be empty at the end."""

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

# Property tests measure no time, because the machine may be loaded.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", settings.get_profile("unhurried"), max_examples=100_000)
settings.load_profile("unhurried")

# Processes that have just been killed may still be removing their folders.
_GRACE_SECONDS = 10.0

#: Beginning of the product's own paths. The checkout may have the same name as the package.
_PACKAGE = f"{Path(svdpp.__file__).parent}{os.sep}"

_GC_THRESHOLDS = gc.get_threshold()

_found_after: dict[str, str] = {}


def pytest_configure() -> None:
    # pytest keeps the folders of failed tests, which are to outlive the session.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="svdpp-")
    # The workers of pytest share the cores: threads that spin while they wait slow all down.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Importing diffusers into this process creates the folder that this variable names.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", folder)
    process_lifetime.tune_gc()
    # multiprocessing's own folder, which lasts as long as this process. Hashes of files go there.
    os.environ["XDG_CACHE_HOME"] = util.get_temp_dir()
    # By a finalizer of lower priority than the one that removes that folder.
    util.Finalize(None, shutil.rmtree, [folder], {"ignore_errors": True}, exitpriority=-200)


def pytest_collection_finish() -> None:
    gc.set_threshold(*_GC_THRESHOLDS)  # tests of memory shall find little garbage


@pytest.fixture(scope="session", autouse=True)
def _fork_server_knows_svd() -> Iterator[None]:
    """All ranks that tests start share one fork server, whichever test starts it.

    Ranks of a server that has not imported SVD would each import it.
    """
    start = fork_server.start_fork_server
    with pytest.MonkeyPatch.context() as patch:
        modules = fork_server.modules_for("svd")
        for module in (fork_server, worker_group):
            patch.setattr(module, "start_fork_server", lambda _: start(modules))
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """As many threads in this process as a rank has: bits depend on their number."""
    import torch  # many tests need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files() -> Iterator[None]:
    yield
    deadline = time.monotonic() + _GRACE_SECONDS
    while _left() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = {name: _found_after.get(name, "the last test") for name in _left()}
    assert not left, "left among the temporary files, and first seen after: " + str(left)


@pytest.fixture(autouse=True)
def _temporary_files_of_a_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    for name in _left():
        _found_after.setdefault(name, request.node.nodeid)


def _left() -> list[str]:
    """What lies in the session's folder, beside what lasts as long as this process.

    That are the sockets of its own fork server and, if the home is read-only, matplotlib's folder.
    """
    own = util.get_temp_dir()
    lasting = (os.path.basename(own), "matplotlib-")
    runs = [name for name in os.listdir(own) if name.startswith("svdpp-")]
    # Not by the variable, which a test may have replaced.
    return runs + [n for n in os.listdir(tempfile.gettempdir()) if not n.startswith(lasting)]


@pytest.fixture(autouse=True)
def _errors_have_their_numbers_in_details(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that each error met by a test has the numbers of its sentence in `details`."""
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
