"""CUDA streams, and copies between device and host. On the CPU, streams have no effect.

No other module creates a stream, waits for a stream, or reads the values of a tensor on a GPU. A
test lists the few exceptions with their reasons. Three rules make copies safe while kernels are
queued:

- Memory that a side stream fills is allocated in the context of that stream. The caching allocator
  ties each block to a stream. A freed block may still be in use by kernels that are queued on its
  stream, so no other stream may write to the block.
- `record_stream` is called if a second stream uses memory of a side stream.
- Each thread that copies has one stream for its whole life. If it used a new stream for each
  message, the allocator would cache memory for each stream, and after 32 streams (the size of
  torch's pool) two threads could get the same stream.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

#: CUDA event for which a side stream waits before it uses a tensor; None on the CPU.
Event = torch.cuda.Event | None


def use_device(device: torch.device) -> None:
    """Make `device` the current device of this thread. Each thread of a rank first calls this."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def single_thread_executor(name: str, device: torch.device) -> ThreadPoolExecutor:
    """Return an executor with one thread named `name`, whose current device is `device`."""
    return ThreadPoolExecutor(
        max_workers=1, thread_name_prefix=name, initializer=use_device, initargs=(device,)
    )


def record_event(device: torch.device) -> Event:
    """Record a CUDA event after all work that this thread has queued on its current stream.

    Returns:
        Event; None on the CPU, where work is complete when a call returns.
    """
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def wait_for_event(event: Event) -> None:
    """Block until the device has reached a CUDA event. On the CPU, return immediately."""
    if event is not None:
        event.synchronize()


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work on this thread's current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class SideStream:
    """CUDA stream for the copies of one thread, so that they overlap with denoising."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def stream_context(self, after: Event = None) -> Iterator[None]:
        """Queue the work of the `with` block on a side stream, and wait for it at the block's end.

        Args:
            after: Event for which the stream waits before this work; None: it does not wait.
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
            after: Event after which the tensor is complete; None: the tensor is complete already.

        Returns:
            Copy with the same shape and dtype, or `tensor` itself if it is in host memory already.
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
            host: Tensor of any shape and dtype. It should be pinned, so that CUDA needs no staging
                buffer.

        Returns:
            Copy on the device, or `host` itself if the device is a CPU. Call `record_stream` before
            another stream uses the copy.
        """
        if self._stream is None:
            return host
        with self.stream_context():
            tensor = torch.empty_like(host, device=self._device)
            tensor.copy_(host, non_blocking=True)
        return tensor

    def empty(self, num_bytes: int) -> torch.Tensor:
        """Return uninitialised uint8 memory of shape (num_bytes,) on the device.

        Call this method within `stream_context`.
        """
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def host_buffer(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised host memory, pinned if the device is a GPU.

        Args:
            shape: Shape of the buffer.
            dtype: Dtype of the buffer.
        """
        return torch.empty(shape, dtype=dtype, pin_memory=self._stream is not None)


def record_stream(tensor: torch.Tensor) -> None:
    """Tell torch's allocator that the current stream uses a tensor of another stream.

    The allocator then does not reuse the tensor's memory before the current stream is done with it.

    Args:
        tensor: Tensor of any shape and dtype; nothing is done for a tensor on a CPU.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class AsyncFlag:
    """Time stamp of the device, and optionally a bool tensor, whose values the host reads later.

    The constructor only queues the time stamp and the copy of the bool to the host on the current
    stream. It does not wait for the device; `wait` does.

    Args:
        device: Device whose current stream is used.
        flag: Bool tensor with one element, on the device; None: only the time is recorded.
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
        """Wait until the device has recorded an `AsyncFlag`'s time stamp, and return its flag.

        Returns:
            Value of the flag, such as whether all values are finite; True if no flag was recorded.
        """
        if self._event is not None:
            self._event.synchronize()
        return self._host is None or bool(self._host)

    def seconds_since(self, before: AsyncFlag) -> float:
        """Return the seconds from the time stamp of the flag `before` to that of this `AsyncFlag`.

        Args:
            before: Flag of the same device, with an earlier time stamp. The device must already
                have recorded both time stamps; see `wait`.
        """
        if self._event is not None and before._event is not None:
            return float(before._event.elapsed_time(self._event)) / 1000
        return self._at - before._at
