"""Images and videos of a request: a check that they can be decoded, and storage for the job."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from svdpp.errors import InputError
from svdpp.media.inputs import check_image_shapes, input_remarks
from svdpp.serve.job import Job
from svdpp.serve.request_schema import VideoRequest, field_of
from svdpp.serve.schemas import IMAGE_FIELD, write_request_fields
from svdpp.serve.store import FileStore
from svdpp.serve.uploads import DecodedImages, UploadStore, sanitize_filename


class RequestFiles:
    """Handler of a request's images and videos: checks that they can be decoded, and stores them.

    Args:
        uploads: Folder of uploaded files.
        store: Store of the jobs' files.
    """

    def __init__(self, uploads: UploadStore, store: FileStore) -> None:
        self._uploads = uploads
        self._store = store

    def check(self, request: VideoRequest, job: Job, decoded: DecodedImages) -> None:
        """Raise an `InputError` unless the images and videos of a request can be decoded.

        Args:
            request: Request of a clip.
            job: New job of the request.
            decoded: Cache with the properties (such as width and height) of files that were decoded
                before. These files are not decoded again. All other files are decoded and added to
                the cache.

        Raises:
            InputError: A file cannot be decoded, or exceeds a limit.
            DecoderBusyError: No decoder could start in time.
            OutputError: A file cannot be written, or the store does not answer.
        """
        for field_name, upload in request.files.items():
            name, frames = sanitize_filename(upload.filename), _video_frames(job, field_name)
            with self._errors_of(field_name):
                self._uploads.check(upload.file, job.id, name, frames, job.owner, decoded)

    @contextlib.contextmanager
    def _errors_of(self, field_name: str) -> Iterator[None]:
        """Add the name of a request field to an `InputError` that the `with` block raises.

        Args:
            field_name: Key of the file in `VideoRequest.files`, such as `reference_1`. The error
                gets the name of the request field, such as `references`.
        """
        try:
            yield
        except InputError as error:
            # If the disk is not mounted, files look missing. In this case `check` raises an error
            # about the disk, which replaces the error about the file.
            self._store.check()
            error.details["field"] = field_of(field_name)
            raise

    def save(
        self,
        request: VideoRequest,
        job: Job,
        uploads: ExitStack,
        decoded: DecodedImages | None = None,
    ) -> dict[str, Any]:
        """Store the images and videos of a request; return the fields of `Job` that record them.

        Args:
            request: Request of a clip.
            job: New job of the request.
            uploads: Stack to which this method adds a callback for each stored file. When the stack
                is closed, the callbacks remove the files.
            decoded: Cache with the properties (such as width and height) of files that were decoded
                before. These files are not decoded again. All other files are decoded and added to
                the cache. None: every file is decoded.

        Raises:
            InputError: A file cannot be decoded, or exceeds a limit.
            DecoderBusyError: No decoder could start in time.
            OutputError: A file cannot be stored.
        """
        values: dict[str, Any] = {"further_inputs": {}}
        named = []
        for field_name, upload in request.files.items():
            is_input = field_name == IMAGE_FIELD
            name = sanitize_filename(upload.filename)
            frames, further = _video_frames(job, field_name), "" if is_input else field_name
            with self._errors_of(field_name):
                file = self._uploads.save(
                    upload.file, job.id, name, frames, further, job.owner, decoded
                )
            uploads.callback(self._store.discard, file.path)
            # Errors and remarks must show the file name that the client sent, not the name of the
            # stored file.
            sent = replace(file, path=Path(name))
            with self._errors_of(field_name):
                check_image_shapes([sent], job.sampling)
            self._store.put(file.path)
            if is_input or not frames:
                named.append(sent)
            if is_input:
                values |= {"input_file": file.path.name, "input_name": name}
                values |= {"input_sha256": file.sha256, "input_pixels": file.width * file.height}
            else:
                values["further_inputs"][field_name] = file.sha256
        remarks = input_remarks(named, job.sampling)
        values["remarks"] = [write_request_fields(remark) for remark in remarks]
        return values


def _video_frames(job: Job, field_name: str) -> int:
    """Return how many frames of a field's video a clip uses; 0 if the field takes an image."""
    if field_name == IMAGE_FIELD:
        return job.sampling.video_frames or 0
    return job.sampling.frames if field_name in job.sampling.videos else 0
