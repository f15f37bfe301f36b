"""Files of the jobs, in a data folder, and also in a bucket that several servers share.

The bucket is called the store. Each server that uses it works in a data folder of its own. An
object in the store has the same name as its file in the data folder. An object is stored before a
row of the queue names it. The content of an object never changes.
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

#: Pattern for the id of a job.
VIDEO_ID = re.compile(r"video_[0-9a-f]{32}")
#: Pattern for the id of an uploaded file with the lines of a batch.
LINES_ID = re.compile(r"file_[0-9a-f]{32}")
#: Names of the files that servers and ranks write. Files with other names are never removed.
FILE_NAME = re.compile(
    rf"photos/(?P<upload>{VIDEO_ID.pattern})\.[a-z]{{3,}}(_[a-z0-9]+)*"
    rf"|photos/(?P<lines>{LINES_ID.pattern})\.jsonl"
    rf"|clips/(?P<clip>{VIDEO_ID.pattern})(-(?P<token>\d+))?\.mp4(\.json)?"
    rf"|latents/[0-9a-f]{{64}}_step\d{{1,6}}\.safetensors"
    rf"|[a-z]+/\.(upload-({VIDEO_ID.pattern}|{LINES_ID.pattern})-[0-9a-f]{{8}}|svdpp-[0-9a-f]{{8}}-\d+-[0-9a-f]{{8}}.*"
    rf"|fetched-[0-9a-f]{{16}})"
)
# Seconds between two probes of a store that answers. A store that does not answer is probed at each
# call.
_PROBE_SECONDS = 10.0
# Exceptions that point to a bug in this program, not to a failure of the store.
_BUGS = (TypeError, AttributeError, NameError, LookupError, ArithmeticError, AssertionError)
# Error numbers that mean a failure of the local disk, and not of the store.
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
# Configuration of botocore, on which s3fs is built. Retries of botocore are turned off, because
# s3fs retries by itself. If both retried, a failure would be reported only after minutes.
_S3 = {"connect_timeout": 3, "read_timeout": 15, "retries": {"max_attempts": 0}}


class FileStore:
    """Files of the jobs: in a folder, or in a store that servers share, with copies in a folder.

    Any thread may call any method. After a failure of the store, methods that need the store raise
    StorageUnavailableError at once, until `probe` finds that the store answers again.

    Args:
        folder: Data folder of this server.
        url: URL of the store, such as `s3://bucket/prefix`; None: the files are only in the folder.
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
        """Name of the folder or store in messages."""
        if url is not None:
            self._filesystem, self._root = _open(url)

    def put(self, path: Path) -> None:
        """Copy a job's file from the folder to the store, completely or not at all.

        A missing file is ignored.

        Raises:
            StorageUnavailableError: The store does not answer, or the data folder does not belong
                to the queue, as when its disk is not mounted.
        """
        if not self.is_remote:
            self.check()
        if not (self.is_remote and path.exists()):
            return
        try:
            with self._errors():
                self._filesystem.put_file(str(path), self._object_path(path))
        except FileNotFoundError as error:
            if path.exists():  # if it does not exist, another thread has removed it
                raise self._unavailable(output_files.error_reason(error)) from error

    def fetch(self, path: Path) -> None:
        """Copy a job's file from the store to the folder, if only the store has it.

        Raises:
            StorageUnavailableError: The store does not answer, or the data folder does not belong
                to the queue, as when its disk is not mounted.
        """
        if not self.is_remote:
            self.check()
            return
        with self._lock, contextlib.suppress(FileNotFoundError):
            os.utime(path)  # marks the file as used now, for `evict`
            return
        temporary = path.with_name(f".fetched-{secrets.token_hex(8)}")
        try:
            with self._errors():
                self._filesystem.get_file(self._object_path(path), str(temporary))
            with self.errors():
                output_files.fsync(temporary)
                os.replace(temporary, path)
        except FileNotFoundError:
            self._probe()  # the probe raises an error if the whole bucket is missing
        finally:
            temporary.unlink(missing_ok=True)

    def evict(self, path: Path, unused_since: float) -> None:
        """Remove the folder's copy of a job's file, not the file in the store.

        Args:
            path: Path of the file.
            unused_since: Unix time; a file that was fetched later stays.
        """
        with self._lock, contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= unused_since:
                path.unlink()

    def remove(self, path: Path) -> None:
        """Remove a job's file, if it exists, from the folder and the store.

        Raises:
            StorageUnavailableError: The store does not answer, or the folder does not belong to the
                queue, as when its disk is not mounted. The file may then still exist on the disk.
        """
        self.check()
        path.unlink(missing_ok=True)
        self.remove_object(path)

    def discard(self, path: Path) -> None:
        """Remove a file that no job needs. If that fails, `remove_orphans` removes it later."""
        output_files.remove(path)
        with contextlib.suppress(BackendUnavailableError):
            self.remove_object(path)

    def remove_object(self, path: Path) -> None:
        """Remove an object from the store, if it exists; the folder's copy stays.

        Raises:
            StorageUnavailableError: The store does not answer.
        """
        if self.is_remote:
            with contextlib.suppress(FileNotFoundError), self._errors():
                self._filesystem.rm_file(self._object_path(path))

    def objects(self, folder: str = "") -> dict[str, tuple[int, float]]:
        """Return size in bytes and time of change of each object in the store, by object name.

        The times are unix times. Without a bucket, the dict is empty.

        Args:
            folder: Folder of the store to list; empty: all folders.

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
        """Return size in bytes and time of change of each file of the jobs, by the file's name.

        Without a bucket, these are the files in the folder. The names are such as `clips/x.mp4`,
        and the times are unix times.
        """
        return self.objects() if self.is_remote else self.local_files()

    def local_files(self) -> dict[str, tuple[int, float]]:
        """Return size in bytes and time of change of each file of the jobs in the data folder.

        The files are listed by name, such as `clips/x.mp4`. The times are unix times.

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
                    # Another thread may have removed the file.
                    with contextlib.suppress(FileNotFoundError):
                        info = path.lstat()
                        if stat.S_ISREG(info.st_mode):
                            found[f"{folder.name}/{path.name}"] = info.st_size, info.st_mtime
        return found

    def clips(self) -> list[str]:
        """Return the names of the clips in the data folder, such as `clips/NAME.mp4`."""
        found = ((name, FILE_NAME.fullmatch(name)) for name in self.local_files())
        return [name for name, match in found if match and match["clip"] and name.endswith(".mp4")]

    def errors(self) -> AbstractContextManager[None]:
        """Translate disk errors in the `with` block to an `OutputError` about the data folder."""
        return output_files.disk_errors(f"cannot read or write the files in {str(self.folder)!r}")

    def read_queue_id(self) -> str:
        """Return the id of the queue that the store's files belong to; empty if none is stored.

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
        """Write the queue's id to the store, to mark the files in the store as files of this queue.

        Raises:
            OutputError: The id cannot be written.
        """
        output_files.write_text(self.folder / QUEUE_ID_FILE, queue_id)
        if self.is_remote:
            self.put(self.folder / QUEUE_ID_FILE)
            (self.folder / QUEUE_ID_FILE).unlink()

    def bind_to_queue(self, queue_id: str) -> None:
        """Treat the files as unavailable, from now on, while the store or folder lacks this id.

        Args:
            queue_id: Id of the queue that the files belong to.
        """
        self._queue_id = queue_id

    def bind_to_file(self, is_there: Callable[[], bool]) -> None:
        """Treat the folder as unavailable, from now on, while it lacks the queue's SQLite file.

        Args:
            is_there: Function that returns whether the folder has the SQLite file of the queue.
        """
        self._has_queue_file = is_there

    @property
    def is_mounted(self) -> bool:
        """Whether the data folder belongs to the queue, and is not a disk's empty mount point."""
        if self.is_remote:
            return self.folder.exists()
        return self._has_queue_file() and self._queue_id in ("", self.read_queue_id())

    @property
    def is_disk_low(self) -> bool:
        """Whether the disk has too little free space to begin or accept a clip."""
        try:
            free, low = disk_space(self.folder)
        except OSError:  # the folder is gone, or its disk is not mounted
            return True
        return free < low

    def check(self) -> None:
        """Raise a `StorageUnavailableError` if the jobs' files cannot be reached.

        Raises:
            StorageUnavailableError: The store did not answer the last call, or the folder is not
                there or does not belong to the queue.
        """
        if self.unavailable_reason:
            raise StorageUnavailableError(self.unavailable_reason)
        if not self.is_mounted:
            raise StorageUnavailableError(
                f"{self.name} is not there, or does not belong to the queue",
                "mount the folder's disk again; the server then continues by itself",
            )

    def probe(self) -> None:
        """Raise an error unless the store answers. For 10 s after a success, do nothing.

        Raises:
            StorageUnavailableError: The store does not answer, or lacks the id of the queue.
        """
        if self.unavailable_reason or time.monotonic() >= self._next_probe_at:
            self._probe()

    def _probe(self) -> None:
        if self.read_queue_id() != self._queue_id:
            raise self._unavailable("the store lacks the id of the queue")
        self._next_probe_at = time.monotonic() + _PROBE_SECONDS
        if self.unavailable_reason:
            self.unavailable_reason = ""
            logger.warning("the store is available again")

    @contextlib.contextmanager
    def _errors(self, *, is_probe: bool = False) -> Iterator[None]:
        """Turn errors of the store in the `with` block into StorageUnavailableError.

        An error of the local disk, such as a full disk, becomes an OutputError. After an error of
        the store, all calls except probes fail at once, until a probe succeeds.

        Args:
            is_probe: Whether the block probes the store.
        """
        if not is_probe:
            self.check()
        try:
            yield
        except (FileNotFoundError, *_BUGS):
            raise
        # All exceptions are caught, because each backend of fsspec has exception types of its own.
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
                text = f"cannot write to {str(self.folder)!r}: {output_files.error_reason(error)}"
                raise OutputError(text, "the disk of the data folder may be full") from error
            raise self._unavailable(output_files.error_reason(error)) from error

    def _unavailable(self, reason: str) -> StorageUnavailableError:
        text = redact(f"{self.name} cannot be used: {reason}")
        if not self.unavailable_reason:
            logger.error("{}; until it can be used again, no clip is begun or accepted", text)
        self.unavailable_reason = text
        return StorageUnavailableError(
            text,
            "check the URL in `files`, and the credentials for the store",
            details={"reason": redact(reason)},
        )

    def _object_path(self, path: Path) -> str:
        """Return the path in the bucket for a file or a folder of the data folder."""
        name = path.absolute().relative_to(self.folder).as_posix()
        return self._root if name == "." else f"{self._root}/{name}"


def _open(url: str) -> tuple[Any, str]:
    import fsspec  # installed by the extra `fleet`

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
    """Return the unix time of a stored object's last change; infinity if it is not known."""
    put_at = info.get("LastModified")
    return float(put_at.timestamp()) if put_at else math.inf
