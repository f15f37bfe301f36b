"""The removal of jobs with their files, and the files in the data folder that no job has.

The files of a job go before its row. If the server is killed in between, the row is still there to
be removed again; so what has no row was never meant to go, and is kept.
"""

from __future__ import annotations

import math
import re
import stat
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from loguru import logger

from svdpp.media import output_files
from svdpp.serve.database import LOST
from svdpp.serve.job import CLIPS, LATENTS, PHOTOS, Job, clip_file, new_id
from svdpp.serve.queue import JobQueue
from svdpp.serve.store import FileStore

#: The names that this server gives to files, in each folder.
_OWN = {
    PHOTOS: re.compile(r"(video_[0-9a-f]{32})\.([a-z]{3,4}|[a-z]+_video)"),
    CLIPS: re.compile(r"(video_[0-9a-f]{32})(-\d+)?\.mp4(\.json)?"),
}
_UPLOAD = re.compile(r"\.upload-[0-9a-f]+(-video_[0-9a-f]{32}(-[0-9a-f]{8})?)?")
_TEMPORARY = re.compile(r"\.svdpp-[0-9a-f]{8}-\d+-[0-9a-f]{8}.*")
_LATENT = re.compile(r"[0-9a-f]{64}_step\d{1,6}\.safetensors")
_ID_LENGTH = len(new_id())
_ID = re.compile(r"video_[0-9a-f]{32}")
#: The same of a folder whose files are copies of objects, and what is left of interrupted work.
_COPIES = {
    name: re.compile(rf"{own.pattern}|\.(fetched|published|upload|svdpp)-.*")
    for name, own in (*_OWN.items(), (LATENTS, _LATENT))
}
_LATENT_OBJECT = re.compile(rf"{_ID.pattern}/{_LATENT.pattern}")
#: A file that is younger may be of a request or of a rank of another host.
YOUNG_SECONDS = 3600.0
# Clips that wait or run for longer may have to begin again.
_LATENTS_SECONDS = 7 * 86400.0


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
    for name, num_bytes in _all_files(queue.store).items():
        if (found := _ID.search(name)) and found[0] in ids:
            sizes[found[0]] += num_bytes
    return sizes


def _all_files(store: FileStore) -> dict[str, int]:
    if store.is_remote:
        return {name: num_bytes for name, (num_bytes, _) in store.objects().items()}
    with _errors(store.folder):
        return {
            path.name: _num_bytes(path)
            for name, own in _OWN.items()
            for path in _regular_files(store.folder / name, own, math.inf)
        }


def remove_lost_clips(store: FileStore, job: Job, *, is_lost: bool) -> None:
    """Remove what the claims of a job before this one have written; with `is_lost`, also this."""
    for number in range(1, job.token + is_lost):
        clip = clip_file(store.folder, job.id, number)
        for path in (clip, Path(f"{clip}.json")):
            store.discard(path)


def _files(folder: Path, id: str, uploads: Iterable[str], token: int) -> list[Path]:
    """All that a job may have, also the clips of servers that have lost it."""
    clips = [clip_file(folder, id, number) for number in range(min(token, 1), token + 1)]
    jsons = [Path(f"{clip}.json") for clip in clips]
    return [*clips, *jsons, *(folder / PHOTOS / name for name in uploads)]


def remove_leftovers(
    queue: JobQueue,
    folder: Path,
    requests: Collection[str] = (),
    in_use: Collection[str] = (),
) -> None:
    """Remove what servers that do not live any more have left, and claims that were lost.

    That is unfinished files, clips that are not of their job's last claim, and images of
    requests that have stored no job. `requests` are of this server, and go on. `in_use` are parts
    of the names of files that this server needs.
    """
    if queue.store.is_remote:
        # Listed before the queue is asked: what is begun meanwhile is not among them.
        objects = queue.store.objects()
        tokens = queue.clips()
        with _errors(folder):
            _evict(queue.store, [*requests, *in_use], objects, tokens)
        for name, (_, put_at) in objects.items():
            if _is_lost_object(name, time.time() - put_at, tokens):
                queue.store.remove_object(name)
        return
    others = queue.lives() - {queue.server}
    with _errors(folder):
        for name in (PHOTOS, CLIPS, LATENTS):
            output_files.remove_abandoned(folder / name)
            for path in _regular_files(folder / name, _TEMPORARY, time.time() - YOUNG_SECONDS):
                path.unlink(missing_ok=True)
        # A fleet may never be without a clip, which is when `Feeder` removes all.
        oldest = time.time() - _LATENTS_SECONDS if queue.is_shared else -math.inf
        for path in _regular_files(folder / LATENTS, _LATENT, oldest):
            path.unlink(missing_ok=True)
        for path in _regular_files(folder / PHOTOS, _UPLOAD, math.inf):
            server, id = f"{path.name}-".split("-")[1:3]
            if server in others or id in requests:
                continue
            with queue.without(id) as is_missing:
                for file in path.parent.glob(f"{id}.*") if id and is_missing else ():
                    file.unlink(missing_ok=True)
                # In the block, because a job whose mark is there would be stored after it.
                path.unlink(missing_ok=True)
        # Listed before the queue is asked: what is begun meanwhile is not among them.
        written = _regular_files(folder / CLIPS, _OWN[CLIPS], math.inf)
        tokens = queue.clips()
        for path in written:
            if _is_lost_clip(path.name, tokens):
                path.unlink(missing_ok=True)


def _evict(
    store: FileStore,
    in_use: Collection[str],
    objects: Collection[str],
    tokens: Mapping[str, int | None],
) -> None:
    """Remove the copies that were not used for an hour.

    A file that the store lacks is no copy: the folder may have had it before there was a store.
    """
    oldest = time.time() - YOUNG_SECONDS
    for name, own in _COPIES.items():
        for path in _regular_files(store.folder / name, own, oldest):
            is_needed = path.name[:_ID_LENGTH] in tokens and not _is_lost_clip(path.name, tokens)
            is_copy = not is_needed or f"{name}/{path.name}" in objects
            if is_copy and not any(part in path.name for part in in_use):
                store.evict(path, oldest)


def _is_lost_clip(name: str, tokens: Mapping[str, int | None]) -> bool:
    """Whether a file is of another claim than that whose clip its job has."""
    clip = _OWN[CLIPS].fullmatch(name)
    if clip is None or clip[2] is None or clip[1] not in tokens:
        return False
    return tokens[clip[1]] != int(clip[2][1:])


def _is_lost_object(name: str, seconds: float, tokens: Mapping[str, int | None]) -> bool:
    """Whether nobody needs an object of that age; those of other programs are left alone."""
    folder, _, rest = name.partition("/")
    if folder == PHOTOS and (photo := _OWN[PHOTOS].fullmatch(rest)):
        # `PhotoFolder.request` refuses what takes half as long
        return photo[1] not in tokens and seconds > YOUNG_SECONDS
    if folder == LATENTS and _LATENT_OBJECT.fullmatch(rest):
        return seconds > _LATENTS_SECONDS
    return folder == CLIPS and _is_lost_clip(rest, tokens)


def set_strangers_aside(queue: JobQueue, folder: Path) -> list[Path]:
    """At the start of a server, move the images and clips of no job to `lost+found`.

    They are there if the queue's file was lost, or replaced by an older one. Only regular files
    with the names that a server gives are touched, and links are not followed. Returns the files at
    their new places.
    """
    if queue.store.is_remote:  # the folder has only copies
        return []
    oldest = time.time() - YOUNG_SECONDS if queue.is_shared else math.inf
    ids = queue.clips()
    with _errors(folder):
        strangers = [
            path
            for name, own in _OWN.items()
            for path in _regular_files(folder / name, own, oldest)
            if path.name[:_ID_LENGTH] not in ids
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


def _num_bytes(path: Path) -> int:
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _regular_files(folder: Path, own: re.Pattern[str], oldest: float) -> list[Path]:
    """Those with a name of `own` that were written before `oldest`."""
    if folder.is_symlink() or not folder.exists():
        return []
    return [
        path
        for path in sorted(folder.iterdir())
        if own.fullmatch(path.name) and _is_older(path, oldest)
    ]


def _is_older(path: Path, oldest: float) -> bool:
    try:
        about = path.lstat()
    except FileNotFoundError:  # another thread, or server, has removed it
        return False
    return stat.S_ISREG(about.st_mode) and about.st_mtime <= oldest


def _errors(folder: Path) -> AbstractContextManager[None]:
    return output_files.disk_errors(f"cannot read or write the files in {str(folder)!r}")
