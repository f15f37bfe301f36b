"""Faults for GPU tests, which watch or fill the device from inside a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.cuda import _gpu_trace, _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode

from svdpp.comm import streams
from tests.support.damage import Damage

MIB = 2**20
_kept: list[torch.Tensor] = []


def _take_what_is_free() -> None:
    """Allocate all free memory of this thread's GPU."""
    torch.cuda.empty_cache()
    size = torch.cuda.mem_get_info()[0]
    while size >= 4096:
        try:
            _kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except RuntimeError:  # both error types of torch for a lack of memory derive from it
            size //= 2


@dataclass(frozen=True)
class FullDevice(Damage):
    """Fault that fills the memory of a rank's GPU, when the rank reaches the fault's place.

    Args:
        caching: Whether torch's caching allocator is used. If False, all requests go to CUDA
            itself, whose error differs from the allocator's.
    """

    caching: bool = True

    def reach(self, rank: int, clip: int, place: str) -> None:
        if self.is_at(rank, clip, place):
            torch.cuda.caching_allocator_enable(self.caching)
            _take_what_is_free()


@dataclass(frozen=True)
class Fragmented(Damage):
    """Fault that fragments a GPU's memory: the allocator returns its cached blocks to CUDA."""

    def reach(self, rank: int, clip: int, place: str) -> None:
        if self.is_at(rank, clip, place):
            pieces = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
            _take_what_is_free()
            del pieces
            torch.empty(128 * MIB, dtype=torch.uint8, device="cuda")
            _kept.clear()


@dataclass(frozen=True)
class Watched(Damage):
    """Injected check of all ranks for races on the GPU by torch's CUDA Sanitizer.

    Each rank writes the races that it finds to its own file in `folder`.

    Args:
        planted: Whether to plant a race: copies do not wait for the kernels that write their
            source.
    """

    folder: str = ""
    planted: bool = False

    def reach(self, rank: int, clip: int, place: str) -> None:  # noqa: ARG002
        if place == "start":
            _watch(Path(self.folder) / f"rank{rank}")
            if self.planted:
                streams.record_event = lambda _: None


def _watch(path: Path) -> None:
    """Check all later operations of this process with torch's CUDA Sanitizer, in all threads.

    torch itself would enable the sanitizer only in the main thread. `path` gets a line `thread
    NAME` for each thread with operations, and a line that begins with `race` for each race.
    """
    handler = _Handler(path)
    _sanitizer.EventHandler = lambda: handler  # type: ignore[assignment, misc]
    _sanitizer.CUDASanitizerDispatchMode().__enter__()
    run = threading.Thread.run

    def run_watched(thread: threading.Thread) -> None:
        with _OtherThread(handler):
            run(thread)

    threading.Thread.run = run_watched  # type: ignore[method-assign]


class _Handler(_sanitizer.EventHandler):
    """CUDA Sanitizer's handler that serves one thread at a time, and writes races to a file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._lock, self._seen = path, threading.RLock(), set[str]()
        for name in [name for name in dir(self) if name.startswith("_handle_")]:
            setattr(self, name, self._one_at_a_time(getattr(self, name)))

    def _one_at_a_time(self, handle: Callable[..., Any]) -> Callable[..., Any]:
        def locked(*arguments: Any) -> Any:
            with self._lock:
                return handle(*arguments)

        return locked

    def _handle_kernel_launch(self, *arguments: Any) -> list[Any]:
        self._note(f"thread {threading.current_thread().name}")
        for error in super()._handle_kernel_launch(*arguments):
            access, before = error.current_access, error.previous_access
            self._note(f"race of {access.operator} with {before.operator}\n{error}")
        return []

    def _note(self, line: str) -> None:
        if line not in self._seen:
            self._seen.add(line)
            with self._path.open("a") as file:
                file.write(line + "\n")


class _OtherThread(_sanitizer.CUDASanitizerDispatchMode):
    def __init__(self, handler: _Handler) -> None:
        TorchDispatchMode.__init__(self)  # callbacks are registered already
        self.event_handler = handler


class HostWaits(TorchDispatchMode):
    """Counter of the operations that make a thread wait for the GPU.

    The thread is the one that creates the object. `for_queue` counts reads, blocking copies and
    synchronisations, which wait for all queued kernels. `for_events` counts waits for an event,
    which may already be complete.
    """

    def __init__(self) -> None:
        super().__init__()
        self.for_queue = self.for_events = 0
        self._thread = threading.get_ident()
        torch._C._activate_gpu_trace()
        _gpu_trace.register_callback_for_device_synchronization(self._waited)
        _gpu_trace.register_callback_for_stream_synchronization(self._waited)
        _gpu_trace.register_callback_for_event_synchronization(self._event_waited)

    def _waited(self, *_: int) -> None:
        self.for_queue += threading.get_ident() == self._thread

    def _event_waited(self, _: int) -> None:
        self.for_events += threading.get_ident() == self._thread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.for_queue
        result = func(*args, **(kwargs or {}))
        self.for_queue = max(self.for_queue, before + _waits_for_queue(func, args, kwargs, result))
        return result


def _waits_for_queue(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    aten = torch.ops.aten
    if func in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default):
        return bool(args[0].is_cuda)
    if func not in (aten.copy_.default, aten._to_copy.default):
        return False
    source = args[1] if func is aten.copy_.default else args[0]
    if source.is_cuda == result.is_cuda:
        return False
    on_host = result if source.is_cuda else source
    no_wait = (kwargs or {}).get("non_blocking") or args[2:] == (True,)
    return not (no_wait and on_host.is_pinned())


@dataclass(frozen=True)
class CountedWaits(Damage):
    """Injected counter of a rank's waits for the GPU, written to a file before each step."""

    def reach(self, rank: int, clip: int, place: str) -> None:
        if place == "load":
            _counters.append(HostWaits())
            _counters[0].__enter__()
        elif place.startswith("step") and (rank, clip) == (self.rank, self.clip):
            waits = _counters[0]
            with Path(self.until).open("a") as file:
                file.write(f"{place[4:]} {waits.for_queue} {waits.for_events}\n")


_counters: list[HostWaits] = []
