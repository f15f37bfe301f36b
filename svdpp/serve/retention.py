"""Retention: removes jobs by age and size, and files that no job needs.

The files of a job go before its row. If the server is killed in between, the row is still there to
be removed again; so what has no row was never meant to go, and is kept.
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
#: Seconds between two looks for leftovers. A request that takes longer is refused.
ORPHAN_SCAN_SECONDS = 3600.0
# Clips that wait or run for longer may have to begin again.
_LATENTS_SECONDS = 7 * 86400.0

#: Files of one look for leftovers: name, bytes and unix time.
FileSnapshot = set[tuple[str, tuple[int, float]]]


def enforce_retention(
    queue: JobQueue, now: float, max_age_seconds: float | None, max_bytes: int | None
) -> list[str]:
    """Remove jobs in final states, the first to finish first; return the ids of the removed.

    A clip that a server compares with one device at this moment stays until a later call. One whose
    verification was requested and has not begun goes: it may never begin.

    Args:
        queue: Rows and files of the jobs.
        now: Unix time by the queue's clock.
        max_age_seconds: Seconds since the final state; None: no limit.
        max_bytes: Size of all jobs together, also of open ones; None: no limit.

    Raises:
        ClockError: The machine's clock and the queue's differ: nothing is removed.
        StorageUnavailableError: The files cannot be reached: no further job is removed.
    """
    queue.check_clock()
    sizes = Counter[str]() if max_bytes is None else _bytes_by_job(queue)
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
    """Remove a job in a final state, files and row; return False if there is no such job.

    Raises:
        StorageUnavailableError: The files cannot be reached; the row stays, so that they go later.
    """
    job = queue.get(id)
    if job is None or not job.state.is_final:
        return False
    store, folder = queue.store, queue.store.folder
    # Also the clips of servers that have lost it.
    tokens = range(min(job.fencing_token, 1), job.fencing_token + 1)
    clips = [replace(job, fencing_token=token).clip_path(folder) for token in tokens]
    with store.errors():
        for path in (*clips, *(Path(f"{clip}.json") for clip in clips), *job.upload_paths(folder)):
            store.remove(path)
    store.check()  # a file is missing also where the disk has gone meanwhile
    if is_removed := queue.remove(id):
        logger.info("{} is removed", id)
    return is_removed


def _bytes_by_job(queue: JobQueue) -> Counter[str]:
    sizes, ids = Counter[str](), queue.clips()
    for name, (num_bytes, _) in queue.store.files().items():
        if (found := VIDEO_ID.search(name)) and found[0] in ids:
            sizes[found[0]] += num_bytes
    return sizes


def remove_orphans(
    queue: JobQueue, before: FileSnapshot, in_use: Collection[str] = ()
) -> FileSnapshot:
    """Remove what no job needs, and no job did at the look before; return what this look sees.

    That is what servers that do not live any more have left: images of requests that have stored no
    job, clips that are not of their job's last claim, unfinished files. What is unchanged since the
    look before, `ORPHAN_SCAN_SECONDS` ago, is not of a request or of a rank that is at work; so no
    clocks are compared. With a store, copies that were not used since then go as well, but not
    those of the jobs `in_use` by this server.
    """
    store = queue.store
    # Listed before the queue is read, so that the files of newer jobs are not among them.
    files = store.files()
    copies = store.local_files() if store.is_remote else {}
    clips = queue.clips()
    lines = BatchTable(queue).file_ids()
    # `Dispatcher` removes all latent checkpoints once no clip is left; a fleet may always have one.
    oldest = _now_or_never(queue) - _LATENTS_SECONDS if queue.is_shared else -math.inf
    left: FileSnapshot = {file for file in files.items() if _is_orphan(file, clips, lines, oldest)}
    unused: FileSnapshot = {
        copy
        for copy in copies.items()
        # Only files that the store has are copies: the folder may be older than the store.
        if (copy[0] in files and FILE_NAME.fullmatch(copy[0]) and not _LATENT.match(copy[0]))
        or _is_orphan(copy, clips, lines, oldest, is_copy=True)
        if not any(id in copy[0] for id in in_use)
    }
    with store.errors():
        for name, _ in left & before:
            store.remove(store.folder / name)
        for name, (_, used_at) in unused & before:
            store.evict(store.folder / name, used_at)
    return left | unused


def _now_or_never(queue: JobQueue) -> float:
    """Return the unix time by the queue's clock, or minus infinity if the clocks differ."""
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
    """Whether no job needs a file; latent checkpoints written after `oldest` are always kept."""
    name, (_, written_at) = file
    match = FILE_NAME.fullmatch(name)
    if match is None or (_LATENT.match(name) and written_at > oldest):
        return False
    if match["lines"] is not None:
        return match["lines"] not in lines
    if (id := match["clip"]) is None:
        return match["photo"] not in clips
    if id not in clips:
        return is_copy  # the last one of a clip is kept: the queue may be an older copy
    return match["token"] is not None and clips[id] != int(match["token"])


def move_orphans_aside(queue: JobQueue) -> list[Path]:
    """Move images and clips of no job to `lost+found`, at the start of a server; say so in the log.

    Clips are there if the queue's file was lost, or replaced by an older one, or if a part of its
    log was lost: a row is removed after its clip, never before. Nobody but this server writes to
    the folder of a queue that is not shared, so that all files without a row are moved; in a shared
    one, those of the last hour may be of another server's request. Images alone are of requests
    that ended before their row was stored. Only regular files with the names that a server gives
    are touched. Returns the files at their new places.
    """
    if queue.store.is_remote:  # the folder has only copies
        return []
    folder, files, ids = queue.store.folder, queue.store.files(), queue.clips()
    orphans = {
        name: written_at
        for name, (_, written_at) in sorted(files.items())
        if (match := FILE_NAME.fullmatch(name))
        and (id := match["photo"] or match["clip"])
        and id not in ids
    }
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
        logger.error("files of no video stay, such as {}: {}", folder / min(orphans), error)
        return []
    logger.warning("files of no video in the queue, moved to {}: {}", lost, len(moved))
    if clips:
        newest = max(orphans[name] for name in clips)
        logger.error(
            "the queue has no rows for clips (number: {}), the newest of {}: a part of it is "
            "missing, or it is an older copy. Their requests are unknown; the clips are kept in {}",
            len(clips),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest)),
            lost,
        )
    return moved
