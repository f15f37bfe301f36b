"""Owns the removal of jobs: their rows and their files together.

The row goes first. If the server is killed in between, `remove_strangers` removes the files at its
next start.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from svdpp.errors import OutputError
from svdpp.media import output_files
from svdpp.serve.job import JobState
from svdpp.serve.store import JobStore

PHOTOS, CLIPS, LATENTS = "photos", "clips", "latents"


class _File(NamedTuple):
    path: Path
    num_bytes: int


def sweep(
    store: JobStore,
    folder: Path,
    now: float,
    max_age_seconds: float | None,
    max_bytes: int | None,
) -> list[str]:
    """Remove jobs in final states, the first to finish first, until the rest is within the limits.

    Args:
        store: the jobs.
        folder: the data folder.
        now: unix seconds.
        max_age_seconds: since a job reached its final state; None: no limit.
        max_bytes: of the files of all jobs, also of open ones; None: no limit.

    Returns:
        The ids of the removed jobs.

    Raises:
        OutputError: the folder or the queue cannot be read or written.
    """
    finished = store.finished()  # before the folders, so that all files of these jobs are seen
    files = _files_by_id(folder, store.photos())
    total = sum(file.num_bytes for id, own in files.items() if id for file in own)
    removed = []
    for job in finished:
        is_old = max_age_seconds is not None and now - job.finished_at > max_age_seconds
        if not is_old and (max_bytes is None or total <= max_bytes):
            continue
        own = files.get(job.id, [])
        if store.remove(job.id):
            _unlink(file.path for file in own)
            total -= sum(file.num_bytes for file in own)
            removed.append(job.id)
    return removed


def remove_job(store: JobStore, folder: Path, id: str) -> bool:
    """Remove a job in a final state, row and files; False if there is no such job.

    Raises:
        OutputError: the folder or the queue cannot be read or written.
    """
    files = _files_by_id(folder, store.photos()).get(id, [])
    if not store.remove(id):
        return False
    _unlink(file.path for file in files)
    return True


def remove_strangers(store: JobStore, folder: Path) -> list[Path]:
    """At the start of a server, remove the files of no job, and latents that no job needs.

    Args:
        store: the jobs, after `recover`.
        folder: the data folder.

    Returns:
        The removed files.

    Raises:
        OutputError: the folder or the queue cannot be read.
    """
    strangers = [file.path for file in _files_by_id(folder, store.photos()).get("", ())]
    # Latents are named by a hash of a clip's parameters; only open jobs can need them.
    counts = store.counts()
    if not counts[JobState.QUEUED] + counts[JobState.IN_PROGRESS]:
        strangers += [file.path for file in _files_in(folder / LATENTS)]
    _unlink(strangers)
    return strangers


def _files_by_id(folder: Path, photos: Mapping[str, str]) -> dict[str, list[_File]]:
    """The photographs and clips of each job; under an empty id, those of no job.

    Args:
        folder: the data folder.
        photos: of `JobStore.photos`, read before the folders: a later job's files are no job's.
    """
    ids = {photo: id for id, photo in photos.items()}
    files: defaultdict[str, list[_File]] = defaultdict(list)
    for file in _files_in(folder / PHOTOS):
        files[ids.get(file.path.name, "")].append(file)
    for file in _files_in(folder / CLIPS):
        id = file.path.name.partition(".")[0]
        files[id if id in photos else ""].append(file)
    return files


def _files_in(folder: Path) -> list[_File]:
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # renamed or removed meanwhile
                    size = entry.stat(follow_symlinks=False).st_size
                    found.append(_File(Path(entry.path), size))
    except FileNotFoundError:
        return []
    except OSError as error:
        what = f"cannot read the folder {str(folder)!r}: {output_files.reason(error)}"
        raise OutputError(what) from error
    return found


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        output_files.remove(path)  # what cannot be removed is a stranger at the next start
