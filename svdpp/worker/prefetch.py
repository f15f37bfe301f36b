"""Owns reading photographs one clip ahead, in a thread beside the denoising."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from PIL import Image

from svdpp.config import ClipRequest, SamplingConfig
from svdpp.errors import InputError
from svdpp.media import image as photos

#: Gives the bytes of a clip's photograph, which lies at that path on rank 0's host.
ReadPhoto = Callable[[int, Path], bytes]


def from_disk(clip: int, path: Path) -> bytes:  # noqa: ARG001
    """The photograph's bytes, on this host; InputError where they cannot be read."""
    return photos.read_bytes(path)


class PhotoReader:
    """Photographs in the order in which they will be asked for, never more than one waiting.

    Args:
        sampling: size and fit of what images become.
        read: gives the bytes of a clip's file; by default from this host's disk.
    """

    def __init__(self, sampling: SamplingConfig, read: ReadPhoto = from_disk) -> None:
        self._sampling = sampling
        self._read_bytes = read
        self._upcoming: deque[tuple[int, ClipRequest]] = deque()
        self._ahead: dict[int, Future[Image.Image | None]] = {}
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="photos")

    def expect(self, requests: Iterable[tuple[int, ClipRequest]]) -> None:
        """Takes note of clips that will be asked for, after those it knows of."""
        self._upcoming.extend(requests)
        if not self._ahead:
            self._read_next()

    def take(self, clip: int) -> Image.Image | None:
        """The photograph of `clip`, fitted; None where it has none. The next one is then read.

        Raises:
            InputError: it cannot be read, or is not the one that was checked at the door.
        """
        future = self._ahead.pop(clip)
        try:
            return future.result()
        finally:
            self._read_next()

    def close(self) -> None:
        """Ends the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read_next(self) -> None:
        if self._upcoming:
            clip, request = self._upcoming.popleft()
            self._ahead[clip] = self._pool.submit(self._read, clip, request)

    def _read(self, clip: int, request: ClipRequest) -> Image.Image | None:
        if request.image is None:
            return None
        path = Path(request.image)
        image, photo = photos.photo_of(self._read_bytes(clip, path), path)
        if request.image_sha256 not in (None, photo.sha256):
            raise InputError(f"{request.image!r} was changed after the run had begun")
        sampling = self._sampling
        return photos.fit_photo(image, sampling.width, sampling.height, sampling.fit)
