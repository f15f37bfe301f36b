"""Retention: removes jobs by age and total size, and files that no job needs.

A job's files are removed before its row in the database. If the server is killed in between, the
row remains, and a later call removes the job. So removal never leaves a clip without a row. A clip
without a row shows that a part of the queue was lost, so the clip is not removed.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from loguru import logger

from svdpp.serve.batch_table import BatchTable
from svdpp.serve.clock import ClockError
from svdpp.serve.queue import JobQueue
from svdpp.serve.sqlite import LOST_AND_FOUND
from svdpp.serve.store import FILE_NAME, VIDEO_ID

_LATENT = re.compile(r"latents/[^.]")
#: Seconds between two searches for files that no job needs. A request that takes more than half of
#: this time to store its files and its job is rejected, because a search could remove the files.
ORPHAN_SCAN_SECONDS = 3600.0
# Age in seconds at which latent checkpoints are removed. If a clip whose checkpoint was removed is
# interrupted, the clip starts over from its first step.
_LATENTS_SECONDS = 7 * 86400.0

#: Files that one search found, each with name, size in bytes and unix time of the last change.
FileSnapshot = set[tuple[str, tuple[int, float]]]


def enforce_retention(
    queue: JobQueue, now: float, max_age_seconds: float | None, max_bytes: int | None
) -> list[str]:
    """Remove ended jobs that exceed the limits on age and bytes, oldest first; return their ids.

    A clip that a server is verifying now stays until a later call. A clip whose verification was
    requested but has not begun is removed, because the verification may never begin.

    Args:
        queue: Queue with the rows and files of the jobs.
        now: Unix time of the queue's clock.
        max_age_seconds: Maximum seconds since the job reached its final state; None: no limit.
        max_bytes: Maximum bytes of the files of all jobs, including open jobs; None: no limit.

    Raises:
        ClockError: The machine's clock and the queue's clock differ. Nothing is removed.
        StorageUnavailableError: The files cannot be reached. No further job is removed.
    """
    queue.check_clock()
    sizes = Counter[str]() if max_bytes is None else bytes_by_job(queue)
    excess = sizes.total() - (math.inf if max_bytes is None else max_bytes)
    oldest = -math.inf if max_age_seconds is None else now - max_age_seconds
    removed = []
    for id, finished_at in queue.finished(math.inf if excess > 0 else oldest).items():
        if not (finished_at < oldest or excess > 0):
            continue
        with queue.lock_clip(id) as is_held:
            if is_held and remove_job(queue, id):
                excess -= sizes[id]
                removed.append(id)
    return removed


def remove_job(queue: JobQueue, id: str) -> bool:
    """Remove the files and the row of a job in a final state; return False if no such job exists.

    Raises:
        StorageUnavailableError: The files cannot be reached. The row stays, so that a later call
            can remove the files.
    """
    job = queue.get(id)
    if job is None or not job.state.is_final:
        return False
    store, folder = queue.store, queue.store.folder
    # Earlier claims of the job, which were lost, may also have written a clip, so the files of all
    # claims are removed.
    tokens = range(min(job.fencing_token, 1), job.fencing_token + 1)
    clips = [replace(job, fencing_token=token).clip_path(folder) for token in tokens]
    metadata = [Path(f"{clip}.json") for clip in clips]
    with store.errors():
        for path in [*clips, *metadata, *job.upload_paths(folder)]:
            store.remove(path)
    # The files also look missing if the disk is not mounted. `check` raises an error in this case.
    store.check()
    if is_removed := queue.remove(id):
        logger.info("{} is removed", id)
    return is_removed


def bytes_by_job(queue: JobQueue) -> Counter[str]:
    """Return the total bytes of each job's files, by the id of the job."""
    sizes, ids = Counter[str](), queue.clip_tokens()
    for name, (num_bytes, _) in queue.store.files().items():
        if (found := VIDEO_ID.search(name)) and found[0] in ids:
            sizes[found[0]] += num_bytes
    return sizes


def remove_orphans(
    queue: JobQueue, before: FileSnapshot, in_use: Collection[str] = ()
) -> FileSnapshot:
    """Remove files that no job needs, if the previous call returned them as unneeded already.

    Servers that were killed leave such files: images of requests without a job, clips from an
    earlier claim than the job's last one, and unfinished files. A file that has not changed since
    the previous search, `ORPHAN_SCAN_SECONDS` ago, does not belong to a request or rank that is
    still at work. The two searches are compared with each other, so a wrong clock does no harm.
    With a store, local copies that were not used since the previous search are removed too.

    Args:
        queue: Queue with the rows and files of the jobs.
        before: Unneeded files that the previous call returned.
        in_use: Ids of jobs whose local copies stay, because this server works on them.

    Returns:
        Unneeded files that this call found, as `before` of the next call.
    """
    store = queue.store
    # Files are listed before the queue is read. Otherwise a file of a job that is added in between
    # would look unneeded.
    files = store.files()
    copies = store.local_files() if store.is_remote else {}
    clips = queue.clip_tokens()
    lines = BatchTable(queue).file_ids()
    # `Dispatcher` removes all latent checkpoints once no clip is open. In a fleet, some clip may
    # always be open, so old checkpoints are removed by their age.
    oldest = _now_or_never(queue) - _LATENTS_SECONDS if queue.is_shared else -math.inf
    left: FileSnapshot = {file for file in files.items() if _is_orphan(file, clips, lines, oldest)}
    unused: FileSnapshot = set()
    for copy in copies.items():
        name = copy[0]
        if any(id in name for id in in_use):
            continue
        # A file in the folder is a copy only if the store has the file, too. Other files may be
        # originals from the time before the server used a store.
        is_copy = name in files and FILE_NAME.fullmatch(name) and not _LATENT.match(name)
        if is_copy or _is_orphan(copy, clips, lines, oldest, is_copy=True):
            unused.add(copy)
    with store.errors():
        for name, _ in left & before:
            store.remove(store.folder / name)
        for name, (_, used_at) in unused & before:
            store.evict(store.folder / name, used_at)
    return left | unused


def _now_or_never(queue: JobQueue) -> float:
    """Return the queue's unix time, from which callers compute the age of files.

    If the clocks of this machine and of the queue differ, return minus infinity. No file then
    counts as old.
    """
    try:
        queue.check_clock()
    except ClockError as error:
        logger.error("{}", error)
        return -math.inf
    return queue.now()


def _is_orphan(
    file: tuple[str, tuple[int, float]],
    clips: Mapping[str, int | None],
    lines: Collection[str],
    oldest: float,
    *,
    is_copy: bool = False,
) -> bool:
    """Whether no job needs a stored file.

    Args:
        file: Name, size in bytes and unix time of the last change.
        clips: Fencing token of each job's clip, by job id; see `JobQueue.clip_tokens`.
        lines: Ids of the batch files that are needed.
        oldest: Unix time; a latent checkpoint that was written later is needed.
        is_copy: Whether the file is a local copy of a file in the store.
    """
    name, (_, written_at) = file
    match = FILE_NAME.fullmatch(name)
    if match is None or (_LATENT.match(name) and written_at > oldest):
        return False
    if match["lines"] is not None:
        return match["lines"] not in lines
    if (id := match["clip"]) is None:
        return match["upload"] not in clips
    if id not in clips:
        # A clip without a row is kept: the queue may have been restored from a backup that is older
        # than the clip. A local copy is not needed, because the store has the clip.
        return is_copy
    return match["token"] is not None and clips[id] != int(match["token"])


def move_orphans_aside(queue: JobQueue) -> list[Path]:
    """Move images and clips that belong to no job to the folder `lost+found`, and log the moves.

    A server calls this at its start. A job's row is removed after its clip, so a clip without a row
    means that a part of the queue was lost: the database, a part of the log, or changes after a
    backup. An image without a row belongs to a request that ended before the row was stored.

    Files of the last hour stay, because they may belong to a request whose row is not stored yet.
    There is one exception for a queue that is not shared: if the queue has no rows at all, or a
    clip in its folder has no row, a part of the queue was lost, and files of any age are moved.
    Only regular files with names that match `store.FILE_NAME` are moved.

    Returns:
        New paths of the moved files.
    """
    if queue.store.is_remote:  # with a store, the local folder has only copies
        return []
    folder, files, ids = queue.store.folder, queue.store.files(), queue.clip_tokens()
    orphans: dict[str, float] = {}
    for name, (_, written_at) in sorted(files.items()):
        match = FILE_NAME.fullmatch(name)
        id = match and (match["upload"] or match["clip"])
        if id and id not in ids:
            orphans[name] = written_at
    clips = [name for name in orphans if name.endswith(".mp4")]
    if queue.is_shared or (ids and not clips):
        oldest = _now_or_never(queue) - ORPHAN_SCAN_SECONDS
        orphans = {name: at for name, at in orphans.items() if at <= oldest}
        clips = [name for name in clips if name in orphans]
    if not orphans:
        return []
    try:
        (folder / LOST_AND_FOUND).mkdir(mode=0o700, exist_ok=True)
        lost = Path(
            tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%d-"), dir=folder / LOST_AND_FOUND)
        )
        moved = [(folder / name).rename(lost / Path(name).name) for name in orphans]
    except OSError as error:
        logger.error(
            "files that belong to no video cannot be moved, such as {}: {}",
            folder / min(orphans),
            error,
        )
        return []
    logger.warning("files that belong to no video were moved to {} (number: {})", lost, len(moved))
    if clips:
        newest = max(orphans[name] for name in clips)
        logger.error(
            "the queue has no rows for clips (number: {}), the newest from {}: a part of the queue "
            "is missing, or the queue is an older copy. The clips are kept in {}",
            len(clips),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest)),
            lost,
        )
    return moved
