"""The prefetch of images and videos: read and prepared one clip ahead, or on request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import torch

from svdpp.comm import streams
from svdpp.config import ClipRequest, SamplingConfig
from svdpp.media.source import read_source
from svdpp.models.base import Prepared, Source

#: What a prepared image depends on.
_Image = tuple[tuple[Any, ...], SamplingConfig | None]


class PhotoReader:
    """Reads images in the order of `expect`, at most one ahead, and those of `prepare_early`.

    `prepare` is called in the thread. `sampling` is for clips whose
    requests have none.
    """

    def __init__(
        self,
        sampling: SamplingConfig,
        prepare: Callable[[Source, SamplingConfig], Prepared],
        device: torch.device,
    ) -> None:
        self._sampling = sampling
        self._prepare = prepare
        self._upcoming: deque[tuple[int, ClipRequest, Future[Prepared] | None]] = deque()
        self._ahead: dict[int, Future[Prepared]] = {}
        self._thread = streams.one_thread("photos", device)
        # At most one: if its clip never comes, the next one takes its place.
        self._early: dict[_Image, Future[Prepared]] = {}
        self._early_thread = streams.one_thread("early photos", device)

    def expect(self, requests: Iterable[tuple[int, ClipRequest]]) -> None:
        """Adds clips that `take` will be called for, in order."""
        for clip, request in requests:
            self._upcoming.append((clip, request, self._early.pop(_image_of(request), None)))
        if not self._ahead:
            self._read_next()

    def prepare_early(self, request: ClipRequest, done: Callable[[float], object]) -> None:
        """Prepares the image of a clip that `expect` gets later; `done` gets the seconds."""
        start = time.monotonic()
        future = self._early_thread.submit(self._read, request)
        self._early = {_image_of(request): future}
        future.add_done_callback(lambda _: done(time.monotonic() - start))

    def take(self, clip: int) -> Prepared:
        """The prepared image of `clip`, empty if it has none; starts reading the next."""
        future = self._ahead.pop(clip)
        try:
            return future.result()
        finally:
            self._read_next()

    def close(self) -> None:
        """Ends the threads."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._early_thread.shutdown(wait=False, cancel_futures=True)

    def _read_next(self) -> None:
        if self._upcoming:
            clip, request, early = self._upcoming.popleft()
            self._ahead[clip] = early or self._thread.submit(self._read, request)

    def _read(self, request: ClipRequest) -> Prepared:
        sampling = request.sampling or self._sampling
        source = read_source(request, sampling)
        return {} if source is None else self._prepare(source, sampling)


def _image_of(request: ClipRequest) -> _Image:
    return tuple(request.files.items()), request.sampling
