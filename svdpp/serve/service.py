"""What the routes do: the service between HTTP and the queue. It knows no HTTP itself."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from loguru import logger
from starlette.datastructures import UploadFile

from svdpp.config import PipelineConfig
from svdpp.config.limits import MAX_FRAMES, MAX_STEPS
from svdpp.errors import OutputError
from svdpp.media import output_files
from svdpp.media.image import MAX_PIXELS
from svdpp.plan.costs import Costs
from svdpp.serve.admission import Admission
from svdpp.serve.api_errors import ApiError
from svdpp.serve.auth import Owner
from svdpp.serve.capabilities import Capabilities
from svdpp.serve.engine import Engine
from svdpp.serve.events import Events
from svdpp.serve.form import VideoRequest
from svdpp.serve.guard import Limits
from svdpp.serve.job import CLIPS, LATENTS, PHOTOS, Job, JobState, new_id, seed_of
from svdpp.serve.metrics import Metrics
from svdpp.serve.photos import DecodeLimits, PhotoFolder, shown_name
from svdpp.serve.prover import Prover
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.retention import remove_job
from svdpp.serve.views import DeletedVideo, Video, video_of

# A client that waits longer may find many places free.
_MAX_RETRY = 600


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server is asked to be; `config` is of the pipeline, `folder` has all files."""

    config: PipelineConfig
    folder: Path
    sizes: tuple[tuple[int, int], ...]
    """Width and height of the frames that clients may request."""
    max_open: int
    """Jobs that may be queued or in progress."""
    max_steps: int = MAX_STEPS
    max_frames: int = MAX_FRAMES
    limits: Limits = field(default_factory=Limits)
    max_pixels: int = MAX_PIXELS
    """Of a photograph."""
    keep_seconds: float | None = None
    keep_bytes: int | None = None
    verifies_when_idle: bool = False
    costs: Costs | None = None
    """For ETAs before there is a measurement; None: until then there are no ETAs."""
    adopts: bool = False
    """Whether a folder that has other files becomes a data folder."""


class Service:
    """One server: the queue, the engine and what clients may request. Any thread may call it.

    Nothing is started. `settings.config` is resolved.
    """

    def __init__(self, settings: ServerSettings, queue: JobQueue) -> None:
        config = settings.config
        self.queue = queue
        self.settings = settings
        self.folder = settings.folder.absolute()
        self._cancel_seconds = config.timeout_seconds + config.start_timeout_seconds
        self.is_closing = False
        """Whether new jobs are refused, because the server ends."""
        for name in (PHOTOS, CLIPS, LATENTS):
            output_files.check_writable(self.folder / name)
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.photos = PhotoFolder(
            self.folder / PHOTOS, DecodeLimits(max_pixels=settings.max_pixels)
        )
        self.events = Events()
        self.engine = Engine(
            config,
            queue,
            self.folder,
            self.events,
            describe=lambda job: self.video(job).model_dump(mode="json"),
            on_ended=self._on_ended,
            costs=settings.costs,
        )
        self.metrics = Metrics(queue, self.engine, self.events)
        self.engine.observe(self.metrics)
        self.prover = Prover(
            queue,
            self.folder,
            lambda: self.engine.is_idle,
            when_idle=settings.verifies_when_idle,
            on_verdict=self.metrics.verified,
        )
        self.capabilities = Capabilities.of(
            config.model.name,
            self.engine.checkpoint,
            sampling=config.sampling,
            sizes=settings.sizes,
            max_steps=settings.max_steps,
            max_frames=settings.max_frames,
        )
        self.admission = Admission(self.engine.config, self.engine.checkpoint)

    def _on_ended(self, job: Job) -> None:
        self.metrics.ended(job)
        self.prover.wake()

    # --- requests -------------------------------------------------------------------------------

    def _check_open(self, *, has_key: bool = False) -> None:
        """Refuses new jobs while the server ends, and while its disk or its queue is full.

        A request that `has_key` may be one that is stored already.
        """
        if self.is_closing:
            text = "the server is ending: it takes no more clips"
            hint = "what is queued goes on when it starts again"
            raise ApiError(503, "closing", text, hint, retry=30)
        if self.queue.is_disk_low:
            text = "the server's disk is nearly full: it takes no more clips"
            hint = "remove finished videos, by DELETE /v1/videos/{id}"
            raise ApiError(503, "disk_full", text, hint, retry=60)
        num_open = 0 if has_key else self.queue.num_open()
        if num_open >= self.settings.max_open:
            raise self._full({"open": num_open, "limit": self.settings.max_open})

    def why_not_ready(self) -> str | None:
        """Why requests are refused, or no rank can begin them; None if they are taken."""
        if self.engine.state != "ready" or self.is_closing:
            return "the ranks are not ready"
        if self.queue.is_disk_low:
            return "the disk is nearly full"
        try:
            self.queue.check_there()
            num_open = self.queue.num_open()
        except OutputError:
            return "the queue cannot be used"
        if num_open >= self.settings.max_open:
            return "the queue is full"
        return None

    def submit(self, request: VideoRequest, owner: Owner, idempotency_key: str | None) -> Video:
        """Checks and stores photograph and job durably; the same request may have created the job.

        The ETA of the answer is a promise, which is scored when the clip is completed.
        """
        self._check_open(has_key=idempotency_key is not None)
        prompts = {name: request.value(name) for name in ("prompt", "negative_prompt")}
        sampling = self.capabilities.sampling_of(request)
        self.admission.check(sampling)
        self.admission.check_inputs(sampling, image=request.photo is not None, **prompts)
        id = new_id()
        job = Job(
            id=id,
            owner=owner.name,
            model=self.capabilities.model,
            weights=self.capabilities.weights,
            seed=seed_of(request.seed, owner.name, idempotency_key),
            sampling=sampling,
            **({} if request.photo is None else self._keep(request.photo, id)),
            **prompts,
            created_at=time.time(),
            priority=request.priority,
            idempotency_key=idempotency_key,
        )
        stored = None
        try:
            stored = self.queue.add(
                job, max_open=self.settings.max_open, max_open_of_owner=owner.max_open
            )
        except QueueFullError as error:
            raise self._full(error.details) from error
        finally:
            if job.photo and (stored is None or stored.id != id):
                output_files.remove(self.photo_path(job))
        if stored.id == id:
            logger.info("{} is requested", id)
            self.engine.feeder.wake()
            estimate = self.engine.estimates.of(id)
            if estimate is not None and estimate.eta_seconds is not None:
                self.queue.set_promise(id, estimate.eta_seconds)
        return self.video(self.queue.get(stored.id) or stored)

    def _keep(self, upload: UploadFile, id: str) -> dict[str, Any]:
        name = shown_name(upload.filename)
        photo = self.photos.keep(upload.file, id, name)
        return {
            "photo": photo.path.name,
            "photo_name": name,
            "photo_sha256": photo.sha256,
            "photo_pixels": photo.width * photo.height,
        }

    def _full(self, details: Mapping[str, Any]) -> ApiError:
        """The refusal of a full queue, with the seconds until the next clip is finished."""
        seconds = min(_MAX_RETRY, max(1, math.ceil(self.engine.estimates.seconds_until_room())))
        whose = "of this key" if "owner" in details else "of this server"
        self.metrics.refused("queue_full")
        return ApiError(
            429,
            "queue_full",
            f"the queue {whose} is full: {details['open']} open, the limit is {details['limit']}",
            f"the next place is free in about {seconds} s",
            retry=seconds,
            open=details["open"],
            limit=details["limit"],
        )

    def delete(self, id: str, owner: Owner) -> DeletedVideo:
        """Removes a job with its files, and cancels it before if it is open."""
        job = self.cancel(id, owner)
        if job.proof == "running":
            self.prover.stop(id)
        remove_job(self.queue, self.folder, id)
        self.events.forget(id)
        return DeletedVideo(id=id, status=job.state)

    def cancel(self, id: str, owner: Owner) -> Job:
        """Cancels a job and waits for the ranks; one in a final state stays as it is."""
        job = self.job(id, owner)
        if not job.state.is_final and not self.engine.cancel(id, self._cancel_seconds):
            text = "the ranks have not let go of the video yet"
            hint = "it is cancelled as soon as they do, or when the server starts again"
            raise ApiError(503, "still_cancelling", text, hint, retry=30)
        return self.job(id, owner)

    def verify(self, id: str, owner: Owner) -> Video:
        """Has a completed clip verified."""
        job = self.completed(id, owner)
        if not self.prover.request(id):
            raise ApiError(409, "not_verifiable", "the video cannot be verified")
        return self.video(self.queue.get(id) or job)

    # --- views ----------------------------------------------------------------------------------

    def job(self, id: str, owner: Owner) -> Job:
        """The job of that id; one of another owner is not told from none."""
        job = self.queue.get(id)
        if job is None or job.owner != owner.name:
            raise ApiError(404, "video_not_found", f"there is no video {id[:60]!r}")
        return job

    def video(self, job: Job) -> Video:
        """The API's view of `job`. One that the ranks have and no rank has begun is queued."""
        if job.state.is_final:
            keeps = self.settings.keep_seconds is not None and job.finished_at is not None
            expires_at = (
                (job.finished_at or 0) + (self.settings.keep_seconds or 0) if keeps else None
            )
            return video_of(job, expires_at=expires_at)
        if job.held is not None:
            return video_of(job)
        estimate = self.engine.estimates.of(job.id)
        place = eta = None
        if estimate is not None:
            place, eta = estimate.place or 0, estimate.eta_seconds
        clip = self.engine.feeder.get(job.id)
        progress = None if clip is None else clip.progress
        if job.state is JobState.IN_PROGRESS and progress is not None and progress.rank is not None:
            done, rank = progress.steps_done, progress.rank
            return video_of(job, eta_seconds=eta, steps_done=done, rank=rank)
        # Of a clip that goes back to the queue, they are those of ranks that have ended.
        done = 0 if progress is None or progress.rank is not None else progress.steps_done
        job = replace(job, state=JobState.QUEUED, started_at=None)
        return video_of(job, eta_seconds=eta, place=place, steps_done=done)

    def videos(
        self,
        owner: Owner,
        *,
        limit: int,
        after: str | None,
        order: Literal["asc", "desc"],
        status: JobState | None,
    ) -> list[Video]:
        """The views of an owner's jobs by the time of their requests, after the job of an id."""
        begin = None if after is None else self.job(after, owner).created_at
        jobs = self.queue.page(
            owner=owner.name, limit=limit, after=after, order=order, state=status
        )
        if status in (JobState.QUEUED, JobState.IN_PROGRESS):
            # Of the few that the ranks have, those that none has begun are queued.
            held = [
                job
                for job in self.queue.running()
                if job.owner == owner.name
                and (begin is None or (job.created_at > begin) == (order == "asc"))
            ]
            waiting = jobs if status is JobState.QUEUED else []
            # By id, because one may have been taken in between.
            jobs = list({job.id: job for job in (*waiting, *held)}.values())
            jobs.sort(key=lambda job: job.created_at, reverse=order == "desc")
        views = [self.video(job) for job in jobs]
        return [view for view in views if status in (None, view.status)][:limit]

    def clip_path(self, job: Job) -> Path:
        """The file of a clip; it may not exist."""
        return self.folder / CLIPS / f"{job.id}.mp4"

    def photo_path(self, job: Job) -> Path:
        """The file of a clip's photograph; it may not exist."""
        return self.folder / PHOTOS / job.photo

    def completed(self, id: str, owner: Owner) -> Job:
        """The job of that id, if it is completed."""
        job = self.job(id, owner)
        if job.state is not JobState.COMPLETED:
            status = job.state if job.state.is_final else self.video(job).status
            raise ApiError(
                409,
                "not_completed",
                f"the video is {status}, not completed",
                "request it again" if job.state.is_final else "its status says how far it is",
                status=str(status),
            )
        return job
