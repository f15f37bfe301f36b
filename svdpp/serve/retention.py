"""The removal of jobs with their files, and the files in the data folder that no job has.

The files of a job go before its row. If the server is killed in between, the row is still there to
be removed again; so what has no row was never meant to go, and is kept.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from loguru import logger

from svdpp.media import output_files
from svdpp.serve.database import LOST
from svdpp.serve.job import PHOTOS, clip_file
from svdpp.serve.queue import JobQueue

_ID = re.compile(r"video_[0-9a-f]{32}")
#: The names that servers and ranks give to files; others are left alone.
_OWN = re.compile(
    rf"photos/(?P<photo>{_ID.pattern})\.([a-z]{{3,4}}|[a-z]+_video)"
    rf"|clips/(?P<clip>{_ID.pattern})(-(?P<token>\d+))?\.mp4(\.json)?"
    rf"|latents/([0-9a-f]{{64}}/)?[0-9a-f]{{64}}_step\d{{1,6}}\.safetensors"
    rf"|[a-z]+/\.(upload-{_ID.pattern}-[0-9a-f]{{8}}|svdpp-[0-9a-f]{{8}}-\d+-[0-9a-f]{{8}}.*"
    rf"|fetched-[0-9a-f]{{16}})"
)
_LATENT = re.compile(r"latents/[^.]")
#: Between two looks for leftovers. A request that takes longer is refused.
LOOK_SECONDS = 3600.0
# Clips that wait or run for longer may have to begin again.
_LATENTS_SECONDS = 7 * 86400.0

#: Files of one look for leftovers: name, bytes and unix time.
Seen = set[tuple[str, tuple[int, float]]]


def sweep(
    queue: JobQueue,
    folder: Path,
    now: float,
    max_age_seconds: float | None,
    max_bytes: int | None,
) -> list[str]:
    """Remove jobs in final states, the first to finish first, until the rest is within the limits.

    The age counts from the final state; the bytes are those of all jobs, also of open ones. Returns
    the ids of the removed jobs.
    """
    sizes = Counter[str]() if max_bytes is None else _sizes(queue)
    excess = sizes.total() - (math.inf if max_bytes is None else max_bytes)
    oldest = -math.inf if max_age_seconds is None else now - max_age_seconds
    removed = []
    for id, finished_at in queue.finished(math.inf if excess > 0 else oldest).items():
        if (finished_at < oldest or excess > 0) and remove_job(queue, folder, id):
            excess -= sizes[id]
            removed.append(id)
    return removed


def remove_job(queue: JobQueue, folder: Path, id: str) -> bool:
    """Remove a job in a final state, files and row; False if there is no such job."""
    job = queue.get(id)
    if job is None or not job.state.is_final:
        return False
    with _errors(folder):
        uploads = [path.name for path in job.uploads_in(folder)]
        for path in _files(folder, id, uploads, job.token):
            queue.store.remove(path)
    is_removed = queue.remove(id)
    if is_removed:
        logger.info("{} is removed", id)
    return is_removed


def _sizes(queue: JobQueue) -> Counter[str]:
    sizes, ids = Counter[str](), queue.clips()
    for name, (num_bytes, _) in queue.store.files().items():
        if (found := _ID.search(name)) and found[0] in ids:
            sizes[found[0]] += num_bytes
    return sizes


def _files(folder: Path, id: str, uploads: Iterable[str], token: int) -> list[Path]:
    """All that a job may have, also the clips of servers that have lost it."""
    clips = [clip_file(folder, id, number) for number in range(min(token, 1), token + 1)]
    jsons = [Path(f"{clip}.json") for clip in clips]
    return [*clips, *jsons, *(folder / PHOTOS / name for name in uploads)]


def remove_leftovers(queue: JobQueue, before: Seen, in_use: Collection[str] = ()) -> Seen:
    """Remove what no job needs, and no job did at the look before; returns what this look sees.

    That is what servers that do not live any more have left: images of requests that have stored no
    job, clips that are not of their job's last claim, unfinished files. What is unchanged since the
    look before, `LOOK_SECONDS` ago, is not of a request or of a rank that is at work; so no clocks
    are compared. With a store, copies that were not used since then go as well.

    `in_use` are the ids of jobs whose files this server needs.
    """
    store = queue.store
    # Listed before the queue is asked: what is begun meanwhile is not among them.
    files = store.files()
    copies = store.local_files() if store.is_remote else {}
    clips = queue.clips()
    # A fleet may never be without a clip, which is when `Feeder` removes all latent checkpoints.
    oldest = time.time() - _LATENTS_SECONDS if queue.is_shared else -math.inf
    left: Seen = {
        (name, about)
        for name, about in files.items()
        if _is_leftover(name, about[1], clips, oldest)
    }
    unused: Seen = set()
    for name, about in copies.items():
        # What the store lacks is no copy: the folder may have had it before there was a store.
        is_copy = name in files and _OWN.fullmatch(name) is not None
        is_left = _is_leftover(name, about[1], clips, oldest, is_copy=True)
        if (is_copy or is_left) and not any(id in name for id in in_use):
            unused.add((name, about))
    with _errors(store.folder):
        for name, _ in left & before:
            store.remove(store.folder / name)
        for name, (_, used_at) in unused & before:
            store.evict(store.folder / name, used_at)
    return left | unused


def _is_leftover(
    name: str,
    written_at: float,
    clips: Mapping[str, int | None],
    oldest: float,
    *,
    is_copy: bool = False,
) -> bool:
    """Whether nobody needs a file, unless it is of a request or of a rank that is at work.

    Latent checkpoints are left once they are older than `oldest`.
    """
    own = _OWN.fullmatch(name)
    if own is None or (_LATENT.match(name) and written_at > oldest):
        return False
    if (id := own["clip"]) is None:
        return own["photo"] not in clips
    if id not in clips:
        return is_copy  # the last one of a clip is kept: the queue may be an older copy
    return own["token"] is not None and clips[id] != int(own["token"])


def set_strangers_aside(queue: JobQueue, folder: Path) -> list[Path]:
    """At the start of a server, move old images and clips of no job to `lost+found`.

    They are there if the queue's file was lost, or replaced by an older one. What was written
    within the last hour may be of a request, unless the queue is new. Only regular files with the
    names that a server gives are touched, and links are not followed. Returns the files at their
    new places.
    """
    if queue.store.is_remote:  # the folder has only copies
        return []
    files, ids = queue.store.files(), queue.clips()
    oldest = time.time() - LOOK_SECONDS if ids or queue.is_shared else math.inf
    strangers = [
        folder / name
        for name, (_, written_at) in sorted(files.items())
        if (own := _OWN.fullmatch(name))
        and (id := own["photo"] or own["clip"])
        and id not in ids
        and written_at <= oldest
    ]
    if not strangers:
        return []
    try:
        (folder / LOST).mkdir(mode=0o700, exist_ok=True)
        lost = Path(tempfile.mkdtemp(prefix=time.strftime("%Y-%m-%d-"), dir=folder / LOST))
        moved = [path.rename(lost / path.name) for path in strangers]
    except OSError as error:
        why = output_files.reason(error)
        logger.warning("files of no video stay where they are, such as {}: {}", strangers[0], why)
        return []
    logger.warning("files of no video in the queue, moved to {}: {}", lost, len(moved))
    return moved


def _errors(folder: Path) -> AbstractContextManager[None]:
    return output_files.disk_errors(f"cannot read or write the files in {str(folder)!r}")
