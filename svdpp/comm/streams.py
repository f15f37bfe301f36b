"""CUDA streams and every copy between a device and the host; on the CPU, plain calls.

No other module makes a stream, waits for one, or reads a tensor on a device; a test lists the few
exceptions with their reasons. Three rules make the copies safe beside queued kernels:

- Memory that a side stream fills is allocated in that stream's context: the caching allocator ties
  a block to a stream, and a block of another stream may still be in use by queued kernels.
- `record_stream` is called where a second stream uses such memory.
- Each thread that copies has one stream for its whole life: memory is cached per stream, and
  torch's pool of 32 streams would alias if one were made per message.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

#: Event that a side stream waits for before it touches a tensor; None on the CPU.
Event = torch.cuda.Event | None


def use_device(device: torch.device) -> None:
    """Make `device` the current one of this thread. Each thread of a rank calls it first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def single_thread_executor(name: str, device: torch.device) -> ThreadPoolExecutor:
    """Return a pool of one thread, called `name`, whose current device is `device`."""
    return ThreadPoolExecutor(
        max_workers=1, thread_name_prefix=name, initializer=use_device, initargs=(device,)
    )


def record_event(device: torch.device) -> Event:
    """Record an event behind all work that this thread has queued on its current stream so far.

    Returns:
        The event; None on the CPU, where work is done when its call returns.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for_event(event: Event) -> None:
    """Block this thread until the device has reached an event; return at once on the CPU."""
    if event is not None:
        event.synchronize()


def synchronize(device: torch.device) -> None:
    """Block until the device has done all that is queued on this thread's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class SideStream:
    """A stream beside the one that denoises, used by one thread for its whole life."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def stream_context(self, after: Event = None) -> Iterator[None]:
        """Queue the block's work on this stream; wait at the end of the block until it is done.

        Args:
            after: Event before which the work must not begin; None: it may begin at once.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            yield
            self._stream.synchronize()

    def to_host(self, tensor: torch.Tensor, after: Event = None) -> torch.Tensor:
        """Copy a tensor to host memory, pinned if the device is a GPU, and wait for the copy.

        Args:
            tensor: Tensor of any shape and dtype.
            after: Event behind which the tensor is complete; None: it is complete.

        Returns:
            The copy, of equal shape and dtype; `tensor` itself if it is in host memory.
        """
        if tensor.is_cpu:
            return tensor
        with self.stream_context(after):
            host = self.host_buffer(tensor.shape, tensor.dtype)
            host.copy_(tensor, non_blocking=True)
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of host memory to the device, and wait for the copy.

        Args:
            host: Tensor of any shape and dtype, pinned, so that the copy needs no other buffer.

        Returns:
            The copy; `host` itself on the CPU. Call `record_stream` before another stream uses it.
        """
        if self._stream is None:
            return host
        with self.stream_context():
            tensor = torch.empty_like(host, device=self._device)
            tensor.copy_(host, non_blocking=True)
        return tensor

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return (num_bytes,) uint8 on the device, for this stream to fill in `stream_context`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def host_buffer(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that is not set, pinned where a GPU copies to or from it."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)


def record_stream(tensor: torch.Tensor) -> None:
    """Tell the allocator that the caller's current stream uses memory of another stream."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class AsyncFlag:
    """A point on a device's current stream: its time and a flag, read without stopping the queue.

    Args:
        device: Device whose current stream the point is on.
        flag: Bool tensor of one element, on the device; None: there is no flag, only a time.
    """

    def __init__(self, device: torch.device, flag: torch.Tensor | None = None) -> None:
        self._event: torch.cuda.Event | None = None
        self._host: torch.Tensor | None = flag
        if device.type == "cuda":
            if flag is not None:
                self._host = torch.empty((), dtype=torch.bool, pin_memory=True)
                self._host.copy_(flag, non_blocking=True)
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._at = time.monotonic()

    def wait(self) -> bool:
        """Block until the device has reached this point; return the flag, True without one."""
        if self._event is not None:
            self._event.synchronize()
        return self._host is None or bool(self._host)

    def seconds_since(self, before: AsyncFlag) -> float:
        """Return the seconds of the device from the point `before` to this one.

        Args:
            before: Point of the same device; it must have reached both.
        """
        if self._event is not None and before._event is not None:
            return float(before._event.elapsed_time(self._event)) / 1000
        return self._at - before._at
