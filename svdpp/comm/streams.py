"""CUDA streams, and copies between device and host. On the CPU all of these are plain calls.

No other module creates a stream, waits for one, or reads a tensor on a device; a test lists the few
exceptions with their reasons. Three rules make the copies safe beside queued kernels:

- Memory that a side stream fills is allocated in that stream's context. The caching allocator ties
  a block to a stream, and queued kernels may still use a block of another stream.
- `record_stream` is called if a second stream uses such memory.
- Each thread that copies has one stream for its whole life. Memory is cached by stream, and streams
  that are created for each message would repeat after 32, the size of torch's pool.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

#: Event that a side stream waits for before it uses a tensor; None on the CPU.
Event = torch.cuda.Event | None


def use_device(device: torch.device) -> None:
    """Make `device` the current device of this thread. Each thread of a rank calls this first."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def single_thread_executor(name: str, device: torch.device) -> ThreadPoolExecutor:
    """Return an executor with one thread, called `name`, whose current device is `device`."""
    return ThreadPoolExecutor(
        max_workers=1, thread_name_prefix=name, initializer=use_device, initargs=(device,)
    )


def record_event(device: torch.device) -> Event:
    """Record an event after all work that this thread has queued on its current stream.

    Returns:
        Event; None on the CPU, where work is done when its call returns.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for_event(event: Event) -> None:
    """Wait until the device has reached an event; return at once on the CPU."""
    if event is not None:
        event.synchronize()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work that is queued on this thread's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class SideStream:
    """Stream beside the one that denoises, which one thread uses for its whole life."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def stream_context(self, after: Event = None) -> Iterator[None]:
        """Queue the work of the block on this stream, and wait for it at the end of the block.

        Args:
            after: Event that the work waits for; None: it begins at once.
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
            after: Event after which the tensor is complete; None: it is complete.

        Returns:
            Copy of the same shape and dtype; `tensor` itself if it is in host memory.
        """
        if tensor.is_cpu:
            return tensor
        with self.stream_context(after):
            host = self.host_buffer(tensor.shape, tensor.dtype)
            host.copy_(tensor, non_blocking=True)
        return host

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a tensor from host memory to the device, and wait for the copy.

        Args:
            host: Tensor of any shape and dtype, pinned, so that the copy needs no other buffer.

        Returns:
            Copy; `host` itself on the CPU. Call `record_stream` before another stream uses it.
        """
        if self._stream is None:
            return host
        with self.stream_context():
            tensor = torch.empty_like(host, device=self._device)
            tensor.copy_(host, non_blocking=True)
        return tensor

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return uint8 memory of shape (num_bytes,) on the device, for use in `stream_context`."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def host_buffer(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory, pinned if the device is a GPU."""
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)


def record_stream(tensor: torch.Tensor) -> None:
    """Tell the allocator that the current stream uses memory of another stream."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class AsyncFlag:
    """Point on a device's current stream, with a time and a flag that are read asynchronously.

    Args:
        device: Device whose current stream is used.
        flag: Bool tensor of one element on the device; None: only the time is recorded.
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
        """Wait until the device has reached this point.

        Returns:
            The flag that the device computed, such as whether all values are finite; True if none
            was recorded.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._host is None or bool(self._host)

    def seconds_since(self, before: AsyncFlag) -> float:
        """Return the device's seconds from the point `before` to this one.

        Args:
            before: Earlier point of the same device, which must have reached both.
        """
        if self._event is not None and before._event is not None:
            return float(before._event.elapsed_time(self._event)) / 1000
        return self._at - before._at
