"""The store: what the servers of a fleet must all reach, in a bucket if they share no folder.

Each server then works in a data folder of its own. An object has the name that its file has there.
It is put before a row of the queue names it, and no other content gets the same name later.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from loguru import logger

from svdpp.errors import RequestError, redact
from svdpp.media import output_files
from svdpp.serve.database import AwayError, free_and_low
from svdpp.serve.job import CLIPS, LATENTS, PHOTOS

#: The name of the file, or object, that says which queue the files belong to.
MARK = "queue.id"

# Of a store that answers; one that does not is asked each time.
_LOOK_SECONDS = 10.0
# s3fs tries again by itself; with the tries of botocore beneath it would take minutes.
_S3 = {"connect_timeout": 3, "read_timeout": 15, "retries": {"max_attempts": 0}}


class FileStore:
    """The files of all servers: in the store of a URL, or without one in the data folder itself.

    Any thread may call any method. After a failure all raise AwayError at once, until `look` finds
    that the store answers again. Without a URL the methods change the folder alone.
    """

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.folder = folder.absolute()
        self.is_remote = url is not None
        self.why_away = ""
        """Why the store cannot be used now; empty if it can."""
        self._queue_id = ""
        self._using = threading.Lock()
        self._look_at = 0.0
        place = str(self.folder) if url is None else redact(url).partition("?")[0]
        self.name = f"the {'data folder' if url is None else 'store'} {place!r}"
        """In messages."""
        if url is not None:
            self._system, self._root = _open(url)

    # --- files of the folder ----------------------------------------------------------------------

    def put(self, path: Path, name: str = "") -> None:
        """Puts a file of the folder, if there is one, completely; `name` is another name for it."""
        if not (self.is_remote and path.exists()):
            return
        try:
            with self._errors():
                self._system.put_file(str(path), self._at(name or self._name(path)))
        except FileNotFoundError as error:
            if path.exists():  # else it was removed meanwhile
                raise self._away(output_files.reason(error)) from error

    def fetch(self, path: Path, name: str = "") -> None:
        """Gets a file that the folder lacks; one that the store lacks as well stays missing."""
        if not self.is_remote:
            return
        with self._using, contextlib.suppress(FileNotFoundError):
            os.utime(path)  # it is evicted some time after its latest use
            return
        temporary = path.with_name(f".fetched-{secrets.token_hex(8)}")
        try:
            with self._errors():
                self._system.get_file(self._at(name or self._name(path)), str(temporary))
                output_files.sync(temporary)
                os.replace(temporary, path)
        except FileNotFoundError:
            self._look()  # perhaps the whole bucket is missing
        finally:
            temporary.unlink(missing_ok=True)

    def evict(self, path: Path, unused_since: float) -> None:
        """Removes a file from the folder alone, unless it has been fetched since then."""
        with self._using, contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= unused_since:
                path.unlink()

    def remove(self, path: Path) -> None:
        """Removes a file, if it exists, from the folder and the store."""
        path.unlink(missing_ok=True)
        self.remove_object(self._name(path))

    def discard(self, path: Path) -> None:
        """Removes a file that nobody needs; what cannot be removed now is a leftover."""
        output_files.remove(path)
        with contextlib.suppress(AwayError):
            self.remove_object(self._name(path))

    # --- objects ----------------------------------------------------------------------------------

    def remove_object(self, name: str) -> None:
        """Removes an object, if it exists."""
        if self.is_remote:
            with contextlib.suppress(FileNotFoundError), self._errors():
                self._system.rm_file(self._at(name))

    def objects(self, folder: str = "") -> dict[str, tuple[int, float]]:
        """Bytes and unix time of every object in a folder of the store, or of all, by name."""
        if not self.is_remote:
            return {}
        with self._errors():
            found = self._system.find(self._at(folder), detail=True)
        start = len(self._at("")) + 1
        return {name[start:]: (about["size"], _time_of(about)) for name, about in found.items()}

    def files(self) -> dict[str, tuple[int, float]]:
        """The same of all that servers share: the objects, or the files of the folder."""
        return self.objects() if self.is_remote else self.local_files()

    def local_files(self) -> dict[str, tuple[int, float]]:
        """The same of the files of the folder."""
        found = {}
        with output_files.disk_errors(f"cannot read the files in {str(self.folder)!r}"):
            for folder in (self.folder / name for name in (PHOTOS, CLIPS, LATENTS)):
                is_there = folder.exists() and not folder.is_symlink()
                for path in folder.iterdir() if is_there else ():
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        about = path.lstat()
                        if stat.S_ISREG(about.st_mode):
                            found[f"{folder.name}/{path.name}"] = about.st_size, about.st_mtime
        return found

    def mark(self) -> str:
        """The id of the queue that the files belong to; empty if there is no mark."""
        if not self.is_remote:
            with contextlib.suppress(OSError):
                return (self.folder / MARK).read_text()
            return ""
        with contextlib.suppress(FileNotFoundError), self._errors(looks=True):
            found: bytes = self._system.cat_file(self._at(MARK))
            return found.decode()
        return ""

    def set_mark(self, queue_id: str) -> None:
        """Says that the files belong to a queue."""
        output_files.write_text(self.folder / MARK, queue_id)
        if self.is_remote:
            self.put(self.folder / MARK)
            (self.folder / MARK).unlink()

    # --- whether it can be used -------------------------------------------------------------------

    def belong_to(self, queue_id: str) -> None:
        """From now on, a store without the mark of this queue counts as away."""
        self._queue_id = queue_id

    @property
    def is_disk_low(self) -> bool:
        """Whether so little is free that no clip should be begun or taken.

        Also if the folder is not the queue's, because its disk is not mounted.
        """
        if not self.is_remote and self._queue_id and self.mark() != self._queue_id:
            return True
        try:
            free, low = free_and_low(self.folder)
        except OSError:  # the folder is gone, or its disk
            return True
        return free < low

    def check(self) -> None:
        """Raises AwayError while the store is away."""
        if self.why_away:
            raise AwayError(self.why_away)

    def look(self) -> None:
        """Looks from time to time whether the store answers, and at each call while it does not."""
        if self.why_away or time.monotonic() >= self._look_at:
            self._look()

    def _look(self) -> None:
        if self.mark() != self._queue_id:
            raise self._away("it has no mark of the queue")
        self._look_at = time.monotonic() + _LOOK_SECONDS
        if self.why_away:
            self.why_away = ""
            logger.warning("the store is back")

    @contextlib.contextmanager
    def _errors(self, *, looks: bool = False) -> Iterator[None]:
        """Refuses a use while the store is away, unless it `looks` whether it is.

        Translates what the backend raises, each of which has exceptions of its own.
        """
        if not looks:
            self.check()
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._away(output_files.reason(error)) from error

    def _away(self, reason: str) -> AwayError:
        text = redact(f"{self.name} cannot be used: {reason}")
        if not self.why_away:
            logger.error("{}: no clip is begun or taken", text)
        self.why_away = text
        return AwayError(text, "check --files, and the credentials for it")

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _name(self, path: Path) -> str:
        return path.absolute().relative_to(self.folder).as_posix()


def _open(url: str) -> tuple[Any, str]:
    import fsspec  # of the extra

    options = {"config_kwargs": _S3} if url.startswith(("s3:", "s3a:")) else {}
    try:
        system, root = fsspec.core.url_to_fs(
            url, use_listings_cache=False, skip_instance_cache=True, **options
        )
    except (ImportError, ValueError) as error:
        raise RequestError(f"--files {redact(url)!r} cannot be opened: {error}") from error
    return system, root.rstrip("/")


def _time_of(about: Mapping[str, Any]) -> float:
    """When an object was put; never, if the backend does not say so as that of S3 does."""
    put_at = about.get("LastModified")
    return float(put_at.timestamp()) if put_at else math.inf
