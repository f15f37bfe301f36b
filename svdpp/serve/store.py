"""Files of the jobs, in a folder or in a bucket.

Servers that share no folder have a bucket, the store, and each works in a data folder of its own.
An object has the name that its file has there. It is put before a row of the queue names it, and no
other content gets the same name later.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from loguru import logger

from svdpp.errors import OutputError, RequestError, redact
from svdpp.media import output_files
from svdpp.serve.job import CLIPS_FOLDER, LATENTS_FOLDER, UPLOADS_FOLDER
from svdpp.serve.sqlite import (
    QUEUE_ID_FILE,
    BackendUnavailableError,
    StorageUnavailableError,
    disk_space,
)

#: Id of a job.
VIDEO_ID = re.compile(r"video_[0-9a-f]{32}")
#: Id of the file of a batch's lines.
LINES_ID = re.compile(r"file_[0-9a-f]{32}")
#: The names that servers and ranks give to files; others are left alone.
FILE_NAME = re.compile(
    rf"photos/(?P<photo>{VIDEO_ID.pattern})\.([a-z]{{3,4}}|[a-z]+_video)"
    rf"|photos/(?P<lines>{LINES_ID.pattern})\.jsonl"
    rf"|clips/(?P<clip>{VIDEO_ID.pattern})(-(?P<token>\d+))?\.mp4(\.json)?"
    rf"|latents/[0-9a-f]{{64}}_step\d{{1,6}}\.safetensors"
    rf"|[a-z]+/\.(upload-({VIDEO_ID.pattern}|{LINES_ID.pattern})-[0-9a-f]{{8}}|svdpp-[0-9a-f]{{8}}-\d+-[0-9a-f]{{8}}.*"
    rf"|fetched-[0-9a-f]{{16}})"
)
# Seconds between two probes of a store that answers; one that does not is probed each time.
_PROBE_SECONDS = 10.0
# Exceptions of mistakes in this program, which say nothing of the store.
_BUGS = (TypeError, AttributeError, NameError, LookupError, ArithmeticError, AssertionError)
# Errors of the folder's own disk, to which objects are fetched.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
# s3fs tries again by itself; with the tries of botocore beneath it would take minutes.
_S3 = {"connect_timeout": 3, "read_timeout": 15, "retries": {"max_attempts": 0}}


class FileStore:
    """Files of all servers: in the store of a URL, or without one in the folder alone.

    Any thread may call any method. After a failure all raise BackendUnavailableError at once, until
    `probe` finds that the store answers again.
    """

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.folder = folder.absolute()
        self.is_remote = url is not None
        self.unavailable_reason = ""
        """Reason why the store cannot be used now; empty if it can."""
        self._queue_id = ""
        self._has_queue_file: Callable[[], bool] = lambda: True
        self._lock = threading.Lock()
        self._next_probe_at = 0.0
        place = str(self.folder) if url is None else redact(url).partition("?")[0]
        self.name = f"the {'data folder' if url is None else 'store'} {place!r}"
        """Name of folder or store in messages."""
        if url is not None:
            self._filesystem, self._root = _open(url)

    def put(self, path: Path) -> None:
        """Put a file of the folder, if there is one, completely.

        Raises:
            StorageUnavailableError: The store does not answer, or the folder is not the queue's.
        """
        if not self.is_remote:
            self.check()
        if not (self.is_remote and path.exists()):
            return
        try:
            with self._errors():
                self._filesystem.put_file(str(path), self._object_path(path))
        except FileNotFoundError as error:
            if path.exists():  # else it was removed meanwhile
                raise self._unavailable(output_files.error_reason(error)) from error

    def fetch(self, path: Path) -> None:
        """Get a file that the folder lacks; one that the store lacks as well stays missing.

        Raises:
            StorageUnavailableError: The store does not answer, or the folder is not the queue's.
        """
        if not self.is_remote:
            self.check()
            return
        with self._lock, contextlib.suppress(FileNotFoundError):
            os.utime(path)  # it is evicted some time after its latest use
            return
        temporary = path.with_name(f".fetched-{secrets.token_hex(8)}")
        try:
            with self._errors():
                self._filesystem.get_file(self._object_path(path), str(temporary))
            with self.errors():
                output_files.fsync(temporary)
                os.replace(temporary, path)
        except FileNotFoundError:
            self._probe()  # perhaps the whole bucket is missing
        finally:
            temporary.unlink(missing_ok=True)

    def evict(self, path: Path, unused_since: float) -> None:
        """Remove a file from the folder alone, unless it was fetched after a unix time."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= unused_since:
                path.unlink()

    def remove(self, path: Path) -> None:
        """Remove a file, if it exists, from the folder and the store.

        Raises:
            StorageUnavailableError: The store does not answer, or the folder is not the queue's:
                what is missing there need not be missing.
        """
        self.check()
        path.unlink(missing_ok=True)
        self.remove_object(path)

    def discard(self, path: Path) -> None:
        """Remove a file that nobody needs; what cannot be removed now is a leftover."""
        output_files.remove(path)
        with contextlib.suppress(BackendUnavailableError):
            self.remove_object(path)

    def remove_object(self, path: Path) -> None:
        """Remove an object alone, if it exists.

        Raises:
            StorageUnavailableError: The store does not answer.
        """
        if self.is_remote:
            with contextlib.suppress(FileNotFoundError), self._errors():
                self._filesystem.rm_file(self._object_path(path))

    def objects(self, folder: str = "") -> dict[str, tuple[int, float]]:
        """Return size in bytes and unix time of each object, by its name, such as `clips/x.mp4`.

        Args:
            folder: Folder of the store to look in; empty: all.

        Raises:
            StorageUnavailableError: The store does not answer.
        """
        if not self.is_remote:
            return {}
        with self._errors():
            found = self._filesystem.find(self._object_path(self.folder / folder), detail=True)
        start = len(self._root) + 1
        return {name[start:]: (info["size"], _object_time(info)) for name, info in found.items()}

    def files(self) -> dict[str, tuple[int, float]]:
        """Return size and time of all files that servers share, as `objects` does."""
        return self.objects() if self.is_remote else self.local_files()

    def local_files(self) -> dict[str, tuple[int, float]]:
        """Return size and time of the files of the folder, as `objects` does.

        Raises:
            OutputError: The folder cannot be read.
        """
        found = {}
        with self.errors():
            for folder in (
                self.folder / name for name in (UPLOADS_FOLDER, CLIPS_FOLDER, LATENTS_FOLDER)
            ):
                is_there = folder.exists() and not folder.is_symlink()
                for path in folder.iterdir() if is_there else ():
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        info = path.lstat()
                        if stat.S_ISREG(info.st_mode):
                            found[f"{folder.name}/{path.name}"] = info.st_size, info.st_mtime
        return found

    def clips(self) -> list[str]:
        """Return the names of the clips in the folder, as `clips/NAME.mp4`."""
        found = ((name, FILE_NAME.fullmatch(name)) for name in self.local_files())
        return [name for name, match in found if match and match["clip"] and name.endswith(".mp4")]

    def errors(self) -> AbstractContextManager[None]:
        """Translate errors of the folder's disk to OutputError during the block."""
        return output_files.disk_errors(f"cannot read or write the files in {str(self.folder)!r}")

    def read_queue_id(self) -> str:
        """Return the id of the queue that the files belong to; empty if there is no mark.

        Raises:
            StorageUnavailableError: The store does not answer.
        """
        if not self.is_remote:
            with contextlib.suppress(OSError):
                return (self.folder / QUEUE_ID_FILE).read_text()
            return ""
        with contextlib.suppress(FileNotFoundError), self._errors(is_probe=True):
            found: bytes = self._filesystem.cat_file(self._object_path(self.folder / QUEUE_ID_FILE))
            return found.decode()
        return ""

    def write_queue_id(self, queue_id: str) -> None:
        """Mark the files as those of a queue.

        Raises:
            OutputError: The mark cannot be written.
        """
        output_files.write_text(self.folder / QUEUE_ID_FILE, queue_id)
        if self.is_remote:
            self.put(self.folder / QUEUE_ID_FILE)
            (self.folder / QUEUE_ID_FILE).unlink()

    def bind_to_queue(self, queue_id: str) -> None:
        """Treat a store without the mark of this queue as away from now on."""
        self._queue_id = queue_id

    def bind_to_file(self, is_there: Callable[[], bool]) -> None:
        """Treat the folder as away while `is_there` says that it lacks the queue's file."""
        self._has_queue_file = is_there

    @property
    def is_mounted(self) -> bool:
        """Whether the folder is the queue's, and not an empty place where its disk should be."""
        if self.is_remote:
            return self.folder.exists()
        return self._has_queue_file() and self._queue_id in ("", self.read_queue_id())

    @property
    def is_disk_low(self) -> bool:
        """Whether so little is free that no clip should be begun or taken."""
        try:
            free, low = disk_space(self.folder)
        except OSError:  # the folder is gone, or its disk
            return True
        return free < low

    def check(self) -> None:
        """Check that the files of the queue can be reached.

        Raises:
            StorageUnavailableError: The store does not answer, or the folder is not the queue's.
        """
        if self.unavailable_reason:
            raise StorageUnavailableError(self.unavailable_reason)
        if not self.is_mounted:
            raise StorageUnavailableError(
                f"{self.name} is not there, or is not that of the queue",
                "mount its disk again; the server goes on by itself",
            )

    def probe(self) -> None:
        """Check now and then that the store answers, and at each call while it does not.

        Raises:
            StorageUnavailableError: The store does not answer, or lacks the mark of the queue.
        """
        if self.unavailable_reason or time.monotonic() >= self._next_probe_at:
            self._probe()

    def _probe(self) -> None:
        if self.read_queue_id() != self._queue_id:
            raise self._unavailable("it has no mark of the queue")
        self._next_probe_at = time.monotonic() + _PROBE_SECONDS
        if self.unavailable_reason:
            self.unavailable_reason = ""
            logger.warning("the store is back")

    @contextlib.contextmanager
    def _errors(self, *, is_probe: bool = False) -> Iterator[None]:
        """Translate errors of the store; refuse other uses than a probe while it is away."""
        if not is_probe:
            self.check()
        try:
            yield
        except (FileNotFoundError, *_BUGS):
            raise
        except Exception as error:  # each backend has exceptions of its own
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                text = f"cannot write to {str(self.folder)!r}: {output_files.error_reason(error)}"
                raise OutputError(text, "its disk may be full") from error
            raise self._unavailable(output_files.error_reason(error)) from error

    def _unavailable(self, reason: str) -> StorageUnavailableError:
        text = redact(f"{self.name} cannot be used: {reason}")
        if not self.unavailable_reason:
            logger.error("{}: no clip is begun or taken", text)
        self.unavailable_reason = text
        return StorageUnavailableError(
            text, "check `files`, and the credentials for it", details={"reason": redact(reason)}
        )

    def _object_path(self, path: Path) -> str:
        """Return the path of the object of a file, or of the objects of a folder."""
        name = path.absolute().relative_to(self.folder).as_posix()
        return self._root if name == "." else f"{self._root}/{name}"


def _open(url: str) -> tuple[Any, str]:
    import fsspec  # of the extra

    if not url:
        raise RequestError("`files` is empty", "name a store, such as s3://bucket/prefix")
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if url.startswith(("s3:", "s3a:")):
        options["config_kwargs"] = _S3
    try:
        system, root = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise RequestError(f"`files` {redact(url)!r} cannot be opened: {error}") from error
    return system, root.rstrip("/")


def _object_time(info: Mapping[str, Any]) -> float:
    """Return the unix time of an object; infinity if the backend does not say so as S3 does."""
    put_at = info.get("LastModified")
    return float(put_at.timestamp()) if put_at else math.inf
