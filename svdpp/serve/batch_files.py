"""Uploaded files with the lines of batches. Each line is a request for a clip."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from svdpp.serve.auth import Owner
from svdpp.serve.batch_table import BatchFile, BatchState, BatchTable
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.schemas import ApiError
from svdpp.serve.sqlite import BackendUnavailableError
from svdpp.serve.uploads import UploadStore, sanitize_filename

#: Maximum total size in bytes of the files that are stored for one API key.
MAX_FILE_BYTES_PER_KEY = 2**30


class BatchFiles:
    """Uploaded files with the lines of batches: their contents, and their rows in the database.

    Any thread may call any method.

    Args:
        queue: Queue of the jobs. The contents are in the store of this queue.
        table: Table with the rows of the files.
        uploads: Folder of uploaded files.
        check_accepts_jobs: Function that raises if the server accepts no jobs now.
    """

    def __init__(
        self,
        queue: JobQueue,
        table: BatchTable,
        uploads: UploadStore,
        check_accepts_jobs: Callable[[], None],
    ) -> None:
        self._store, self._now = queue.store, queue.now
        self._table = table
        self._uploads = uploads
        self._check_accepts_jobs = check_accepts_jobs

    def add(self, source: BinaryIO, name: str, owner: Owner) -> BatchFile:
        """Store an uploaded file of batch lines durably: the content first, then its row.

        Args:
            source: Open file with the content, which is read from the beginning.
            name: File name from the client.
            owner: Owner of the file.

        Raises:
            ApiError: The owner's files would have too many bytes, or the server accepts no jobs
                now.
            OutputError: The file cannot be stored.
        """
        self._check_accepts_jobs()
        id = f"file_{secrets.token_hex(16)}"
        sha256, size = self._uploads.save_lines(source, id)
        file = BatchFile(
            id=id,
            owner=owner.name,
            name=sanitize_filename(name),
            bytes=size,
            sha256=sha256,
            created_at=self._now(),
        )
        path = file.path(self._store.folder)
        try:
            self._store.put(path)
            self._table.add_file(file, MAX_FILE_BYTES_PER_KEY)
        except BackendUnavailableError:
            # The database may have stored the row before the failure, so the content is kept.
            raise
        except QueueFullError as error:
            self._store.discard(path)
            limit = MAX_FILE_BYTES_PER_KEY
            text = f"the files of this key would have more than {limit // 2**20} MiB"
            hint = (
                "remove some, by DELETE /v1/files/{id}, or wait until their batches are in progress"
            )
            raise ApiError(429, "too_many_files", text, hint, retry=60, **error.details) from error
        except BaseException:
            self._store.discard(path)
            raise
        return file

    def get(self, id: str, owner: Owner) -> BatchFile:
        """Return an owner's uploaded file of batch lines by the file's id.

        Raises:
            ApiError: The owner has no such file.
        """
        file = self._table.file(id)
        if file is None or file.owner != owner.name:
            hint = ""
            batch = self._table.find_by_file(id)
            if batch is not None and batch.owner == owner.name:
                hint = f"it was removed when {batch.id} no longer needed it"
            raise ApiError(404, "file_not_found", f"there is no file {id[:60]!r}", hint)
        return file

    def content(self, file: BatchFile) -> Path:
        """Return the path of a batch file's content. If necessary, fetch it from the store.

        Raises:
            ApiError: The content has been removed.
            StorageUnavailableError: The store does not answer.
        """
        path = file.path(self._store.folder)
        self._store.fetch(path)
        if not path.is_file():
            self._store.check()
            raise ApiError(404, "file_not_found", f"there is no file {file.id!r}")
        return path

    def remove(self, id: str, owner: Owner) -> None:
        """Remove an uploaded file of batch lines, unless a batch still needs the file.

        Raises:
            ApiError: The owner has no such file, or a batch with this file is still `validating`.
        """
        file = self.get(id, owner)
        batch = self._table.find_by_file(id)
        if batch is not None and batch.state is BatchState.VALIDATING and not batch.cancelled_at:
            text = f"{batch.id} still reads {id}"
            raise ApiError(409, "file_in_use", text, "cancel the batch first", id=batch.id)
        self.discard(file)

    def discard(self, file: BatchFile) -> None:
        """Remove the content of an uploaded file of batch lines, then its row.

        If the server dies in between, the row remains, and `remove_older` removes it later.
        """
        self._store.remove(file.path(self._store.folder))
        self._table.remove_file(file.id)

    def remove_older(self, before: float) -> None:
        """Remove batch files that were uploaded before `before`, unless a batch still needs them.

        A batch needs its file while the batch is `validating`.

        Args:
            before: Unix time in seconds.
        """
        for file in self._table.files_before(before):
            self.discard(file)
