"""Service: operations on videos, which HTTP routes call. This module imports no HTTP library."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any, Literal

from loguru import logger

from svdpp.config import ClipRequest
from svdpp.config.pipeline import LAST_IMAGE, reference_names
from svdpp.driver.clips import ClipProgress
from svdpp.errors import OutputError
from svdpp.media import output_files
from svdpp.serve.auth import Owner
from svdpp.serve.batches import Batches
from svdpp.serve.clips import Admission
from svdpp.serve.clock import uptime
from svdpp.serve.engine import Engine
from svdpp.serve.fleet import Estimate, Fleet
from svdpp.serve.job import (
    CLIPS_FOLDER,
    LATENTS_FOLDER,
    UPLOADS_FOLDER,
    Job,
    JobState,
    new_id,
    seed_of,
)
from svdpp.serve.metrics import Metrics
from svdpp.serve.periodic_thread import PeriodicThread
from svdpp.serve.queue import JobQueue, QueueFullError
from svdpp.serve.request_files import RequestFiles
from svdpp.serve.request_schema import Capabilities, VideoRequest
from svdpp.serve.retention import ORPHAN_SCAN_SECONDS, FileSnapshot, remove_job, remove_orphans
from svdpp.serve.schemas import IMAGE_FIELD, ApiError, DeletedVideo, Video, video_from_job
from svdpp.serve.settings import ServerSettings
from svdpp.serve.sqlite import BackendUnavailableError
from svdpp.serve.subscribers import SubscriberCounts
from svdpp.serve.uploads import UploadStore
from svdpp.serve.verifier import Verifier
from svdpp.serve.webhooks import Webhooks

# Maximum seconds in a `Retry-After` header. A client that waited longer would miss free places in
# the queue.
_MAX_RETRY = 600
# Seconds between two searches for jobs that were deleted while a rank worked on them. When such a
# job ends on this server, its files are removed at once. The search finds deleted jobs that ended
# on another server or before a restart.
_REMOVAL_SECONDS = 30.0


class Service:
    """Operations on the videos of one server's queue and engine. Any thread may call any method.

    The constructor starts no thread and no rank.

    Args:
        settings: Settings of the server, with a resolved `config`.
        queue: Queue of the jobs.
    """

    def __init__(self, settings: ServerSettings, queue: JobQueue) -> None:
        config = settings.config
        self.queue = queue
        self.settings = settings
        self.folder = settings.folder.absolute()
        self.started_at = time.time()
        """Unix time at which the server started."""
        self.is_closing = False
        """Whether the server is ending, and so rejects new jobs."""
        self._create_folders()
        self.uploads = UploadStore(self.folder / UPLOADS_FOLDER, settings.max_pixels)
        self._request_files = RequestFiles(self.uploads, queue.store)
        self._orphans: FileSnapshot = set()
        self.subscribers = SubscriberCounts()
        self.engine = Engine(config, queue, on_changed=self._on_changed)
        for remark in self.engine.checkpoint.remarks if self.engine.checkpoint else ():
            logger.warning(remark)
        self.capabilities = Capabilities.of(
            config.model.name,
            self.engine.checkpoint,
            sampling=config.sampling,
            sizes=settings.sizes,
            max_steps=settings.max_steps,
            max_frames=settings.max_frames,
            is_shared=queue.is_shared,
        )
        self.admission = Admission(self.engine.config, self.engine.checkpoint)
        queue.model_key = self.capabilities.model_key
        queue.incompatible_reason = self._refusal_of
        self.fleet = Fleet(queue, self.engine, self.capabilities)
        self.metrics = Metrics(
            queue,
            self.engine,
            num_streams=lambda: self.subscribers.total,
            servers=self.fleet.servers,
            num_open_lines=lambda: self.batches.table.num_open_lines(),
        )
        self.engine.observe(self.metrics)
        self.verifier = Verifier(
            queue,
            lambda: self.engine.is_idle,
            when_idle=settings.verifies_when_idle,
            on_result=self.metrics.count_verification,
        )
        self.webhooks = Webhooks(
            queue, settings.callback_hosts, settings.callback_secrets, self.video
        )
        self.batches = self._build_batches()
        self.removal = PeriodicThread(
            "removal",
            self._remove_ended,
            _REMOVAL_SECONDS,
            error_message="files of removed clips could not be deleted",
        )
        """Thread that removes clips whose owners deleted them while ranks worked on the clips."""

    def _create_folders(self) -> None:
        """Create the folders for uploads, clips and latents. Only this user can read them."""
        for name in (UPLOADS_FOLDER, CLIPS_FOLDER, LATENTS_FOLDER):
            output_files.check_writable(self.folder / name)
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            # `chmod` is needed because earlier versions created the folders with other modes.
            (self.folder / name).chmod(0o700)

    def _build_batches(self) -> Batches:
        return Batches(
            self.queue,
            self.capabilities,
            uploads=self.uploads,
            request_files=self._request_files,
            keep_seconds=self.settings.keep_seconds,
            check_accepts_jobs=lambda: self.check_accepts_jobs(has_limit=False),
            new_job=self._new_job,
            cancel_job=self.engine.cancel,
            on_stored=self.engine.dispatcher.wake,
            on_cancelled=self._on_waiting_cancelled,
        )

    def _on_changed(self, job: Job) -> None:
        # In a fleet, each server counts only the jobs that it has ended itself, so that no job is
        # counted twice. A job that was cancelled while it was queued has no server, and is counted
        # by the server that cancelled it.
        if job.state.is_final and job.server in (None, self.queue.server):
            self.metrics.count_final_job(job)
            self.webhooks.thread.wake()
        if job.state.is_final and job.remove_requested:
            self.removal.wake()

    def _on_waiting_cancelled(self, number: int) -> None:
        self.metrics.count_cancelled(number)
        self.engine.dispatcher.wake()

    def _remove_ended(self) -> None:
        for id in self.queue.pending_removals():
            remove_job(self.queue, id)

    # --- requests that create or change jobs ----------------------------------------------------

    def check_accepts_jobs(self, *, has_limit: bool) -> None:
        """Raise an error unless the server accepts new jobs: it runs, and its disk is not full.

        Args:
            has_limit: Whether to raise an error also if the queue is full. False for batches, which
                have a limit of their own, and for a request with an idempotency key, which may
                repeat a stored request.

        Raises:
            ApiError: The server accepts no jobs now.
            OutputError: The queue or the files cannot be reached.
        """
        if self.is_closing:
            text = "the server is shutting down and accepts no more clips"
            hint = "queued clips continue after the next start of the server"
            raise ApiError(503, "closing", text, hint, retry=30)
        reason = self.queue.unavailable_reason
        if not self.queue.backend.is_there:
            raise BackendUnavailableError(reason)
        self.queue.store.check()
        if reason:
            text = "the server's disk is nearly full: no more clips are accepted"
            hint = "remove finished videos, by DELETE /v1/videos/{id}"
            raise ApiError(503, "disk_full", text, hint, retry=60)
        num_open = self.queue.num_open() if has_limit else 0
        if num_open >= self.settings.max_open:
            raise self._queue_full_error({"open": num_open, "limit": self.settings.max_open})

    def not_ready_reason(self) -> str | None:
        """Return why this server cannot accept requests or make clips now; None if it can."""
        if self.is_closing:
            return "the server is shutting down"
        if self.engine.state != "ready":
            return "the ranks are not ready"
        if reason := self.queue.unavailable_reason:
            return reason
        if self.queue.store.unavailable_reason:
            return "the store of files cannot be used"
        try:
            # `check` runs an UPDATE, because queries also succeed on a read-only database.
            if self.queue.is_shared:
                self.queue.backend.check()
            is_full = self.queue.num_open() >= self.settings.max_open
        except OutputError:
            return "the queue cannot be used"
        return "the queue is full" if is_full else None

    def submit(self, request: VideoRequest, owner: Owner, idempotency_key: str | None) -> Video:
        """Check a request for a clip, and store its files and its job durably; return the video.

        The ETA in the response is stored, too. Once the clip is completed, the ETA is compared with
        the actual time.

        Args:
            request: Request of one clip.
            owner: Owner of the new job.
            idempotency_key: Key that the client sends again when it repeats a request; None: the
                request is always a new one.

        Returns:
            Video of the new job, in the state `queued`; or the video of the owner's earlier request
            with the same idempotency key, in its current state.

        Raises:
            ApiError: The server accepts no jobs now, or does not make such clips.
            RequestError: A parameter or an input does not fit the model, or the idempotency key was
                used for another request.
            InputError: A file cannot be decoded, or exceeds a limit.
            DecoderBusyError: No decoder could start in time.
            OutOfMemoryError: The clip needs more memory than a device has.
            OutputError: The queue or the files cannot be reached.
        """
        self.check_accepts_jobs(has_limit=idempotency_key is None)
        job = self._new_job(request, owner, idempotency_key)
        job = replace(job, idempotency_key=idempotency_key)
        stored = self._store_job(job, request, owner)
        if stored.id == job.id:
            logger.info("{} is requested", job.id)
            self.engine.dispatcher.wake()
            # The job counts as stored even if its ETA cannot be stored.
            with contextlib.suppress(OutputError):
                estimate = self.fleet.estimates.estimate(job.id)
                if estimate is not None and estimate.eta_seconds is not None:
                    self.queue.set_eta(job.id, estimate.eta_seconds)
        try:
            return self.video(self.queue.get(stored.id) or stored)
        # The job is stored, but now the queue cannot be read. So the client gets the stored job,
        # without its ETA.
        except OutputError:
            return video_from_job(stored)

    def _new_job(
        self,
        request: VideoRequest,
        owner: Owner,
        seed_key: str | None,
        loras: Mapping[str, str] | None = None,
    ) -> Job:
        """Check the fields of a request, not its files' contents, and return a job for it.

        Args:
            request: Request of a clip.
            owner: Owner of the job.
            seed_key: Text from which the seed is derived if the request has no seed; None: the seed
                is random.
            loras: SHA-256 of the LoRA files to use, by the name of the LoRA, as recorded when a
                batch was checked. A LoRA that is missing here gets the file that the servers offer
                now. None: all LoRAs do.

        Raises:
            ApiError: The server does not make such clips, or sends no webhooks to the requested
                host.
            RequestError: A parameter or an input does not fit the model.
            OutOfMemoryError: The clip needs more memory than a device has.
        """
        if request.callback_url is not None:
            self.webhooks.check(request.callback_url)
        prompts = {name: request.value(name) for name in ("prompt", "negative_prompt")}
        sampling = self.capabilities.sampling_of(request)
        self.admission.check(sampling)
        files = request.files
        image = files.pop(IMAGE_FIELD, None)
        last_image = files.pop(LAST_IMAGE, None)
        names = reference_names(sampling.num_references)
        for name in names:
            del files[name]
        clip_request = ClipRequest(
            seed=0,
            image=None if image is None else IMAGE_FIELD,
            last_image=None if last_image is None else LAST_IMAGE,
            references=names,
            videos=dict.fromkeys(files, ""),
            **prompts,
        )
        self.admission.check_clip_inputs(sampling, clip_request)
        recorded = {name: {sha256} for name, sha256 in (loras or {}).items()}
        found_loras = self.capabilities.loras.find(
            request.value("lora"),
            self.fleet.lora_hashes() | recorded,
            holder="this fleet" if self.queue.is_shared else "this server",
        )
        return Job(
            id=new_id(),
            owner=owner.name,
            model=self.capabilities.model,
            weights=self.capabilities.weights,
            seed=seed_of(request.seed, owner.name, seed_key),
            sampling=sampling,
            loras=found_loras,
            **prompts,
            created_at=0.0,
            priority=request.priority,
            callback_url=request.callback_url,
        )

    def _find_stored(self, job: Job) -> Job | None:
        """Return a new job as stored in the queue; None: the queue lacks it or does not answer."""
        with contextlib.suppress(OutputError):
            return self.queue.get(job.id)
        return None

    def _store_job(self, job: Job, request: VideoRequest, owner: Owner) -> Job:
        """Store a job's files, then the job; remove the files if the job was not stored."""
        until = uptime() + ORPHAN_SCAN_SECONDS / 2
        with ExitStack() as uploads:
            values = self._request_files.save(request, job, uploads)
            job = replace(job, **values, created_at=self.queue.now())
            try:
                stored = self.queue.add(job, self.settings.max_open, owner.max_open, until=until)
            except QueueFullError as error:
                raise self._queue_full_error(error.details) from error
            except BackendUnavailableError:
                # The files are kept, because the database may have stored the job before the
                # failure.
                uploads.pop_all()
                if (existing := self._find_stored(job)) is None:
                    raise
                stored = existing
            if stored.id == job.id:
                uploads.pop_all()
        return stored

    def _queue_full_error(self, details: Mapping[str, Any]) -> ApiError:
        """Return the error for a full queue, with the seconds until it can take a new job."""
        seconds = min(_MAX_RETRY, max(1, math.ceil(self.fleet.estimates.seconds_until_slot())))
        scope = "of this key" if "owner" in details else "of this server"
        num_open, limit = details["open"], details["limit"]
        text = (
            f"the queue {scope} is full: {num_open} open (queued or running), the limit is {limit}"
        )
        hint = f"the next place is free in about {seconds} s"
        return ApiError(429, "queue_full", text, hint, retry=seconds, open=num_open, limit=limit)

    def remove_orphans(self) -> None:
        """Remove files that no job needs, if the previous call already found them unneeded.

        Files that are unneeded for the first time are kept, because they may belong to a request
        whose job is not stored yet.
        """
        in_use = [clip.job.id for clip in self.engine.dispatcher.clips()]
        in_use += [self.verifier.running] if self.verifier.running else []
        self._orphans = remove_orphans(self.queue, self._orphans, in_use)
        self.engine.dispatcher.has_latents = True
        self.engine.dispatcher.wake()

    def delete(self, id: str, owner: Owner) -> tuple[DeletedVideo, bool]:
        """Remove a job with its files; an open job is cancelled first.

        This call does not wait for ranks. A job in progress is hidden from its owner at once,
        durably. The job's files are removed when the job has ended.

        Args:
            id: Id of the job.
            owner: Owner of the job.

        Returns:
            Response for the client, and whether the files are already removed.

        Raises:
            ApiError: The owner has no such job.
            OutputError: The queue cannot be changed, or a file cannot be removed.
        """
        job = self.job(id, owner)
        if not (job.state.is_final or self.engine.cancel(id, removes=True)):
            return DeletedVideo(id=id, status=JobState.CANCELLED), False
        job = self.queue.get(id) or job
        if job.verification == "running":
            self.verifier.cancel(id)
        remove_job(self.queue, id)
        return DeletedVideo(id=id, status=job.state), True

    def cancel(self, id: str, owner: Owner) -> Job:
        """Cancel a job, and return it with its new state. A job in a final state does not change.

        The method does not wait for ranks. If ranks work on the clip, the returned job is still in
        progress; its state becomes CANCELLED once the ranks have dropped the clip.

        Args:
            id: Id of the job.
            owner: Owner of the job.

        Raises:
            ApiError: The owner has no such job.
            OutputError: The queue cannot be changed.
        """
        job = self.job(id, owner)
        if not job.state.is_final:
            self.engine.cancel(id)
        return self.job(id, owner)

    def verify(self, id: str, owner: Owner) -> Video:
        """Request a verification: make the clip again on one device, and compare it with the file.

        Raises:
            ApiError: The owner has no such completed clip, or the clip has no files.
        """
        job = self.completed(id, owner)
        if not self.verifier.request(id):
            raise ApiError(409, "not_verifiable", "the video cannot be verified")
        return self.video(self.queue.get(id) or job)

    # --- jobs as clients see them ---------------------------------------------------------------

    def job(self, id: str, owner: Owner) -> Job:
        """Return an owner's job by its id. A job of another owner counts as missing.

        Raises:
            ApiError: The owner has no such job, or only a newer svdpp can read it.
        """
        job = self.queue.get(id)
        if job is None and self.queue.is_unreadable(id, owner.name):
            text = "a newer server has accepted this video, and this server cannot read it"
            raise ApiError(
                503,
                "newer_video",
                text,
                "try again: another server may be able to read it",
                retry=10,
            )
        if job is None or job.owner != owner.name or job.remove_requested:
            raise ApiError(404, "video_not_found", f"there is no video {id[:60]!r}")
        return job

    def video(self, job: Job) -> Video:
        """Return the API's representation of a job, with status `queued` until a rank begins it."""
        if job.state.is_final:
            kept = self.settings.keep_seconds
            expires_at = None if kept is None else (job.finished_at or 0.0) + kept
            return video_from_job(job, expires_at=expires_at)
        if job.state is JobState.IN_PROGRESS and job.server != self.queue.server:
            eta = (
                self.fleet.estimates.remote_eta(job)
                if job.model_key == self.queue.model_key
                else None
            )
            return video_from_job(job, eta_seconds=eta, step=job.step)
        if (reason := self._incompatible_reason(job)) is not None:
            has_peers = bool(self.fleet.peers_for(job.model_key, job.loras))
            return video_from_job(job, held=None if has_peers else reason)
        estimate = self.fleet.estimates.estimate(job.id) or Estimate(0, None)
        clip, eta = self.engine.dispatcher.get(job.id), estimate.eta_seconds
        now = ClipProgress(0, 1) if clip is None else clip.progress
        if job.state is JobState.IN_PROGRESS and now.rank is not None:
            return video_from_job(job, eta_seconds=eta, step=now.steps_done, rank=now.rank)
        # No rank works on the clip now. If `now.rank` is not None, the ranks failed, and the clip
        # was queued again: `now` still describes the failed attempt, whose steps are lost.
        step = now.steps_done if now.rank is None else 0
        job = replace(job, state=JobState.QUEUED, started_at=None)
        return video_from_job(job, eta_seconds=eta, place=estimate.queue_position or 0, step=step)

    def _refusal_of(self, job: Job) -> str | None:
        """Return why this server cannot make the clip of a job; None if it can.

        The job must be for this server's model.
        """
        missing = self.capabilities.loras.missing_reason(job.loras)
        return missing or self.admission.no_route_reason(job.sampling)

    def _incompatible_reason(self, job: Job) -> str | None:
        """Return why this server cannot make the clip of a job; None if it can.

        The job may be for another model. In that case, the reason names both models.
        """
        if job.model_key == self.queue.model_key:
            return self._refusal_of(job)
        own_model = self.capabilities.model
        other = "other weights of it" if job.model == own_model else own_model
        return f"its model is {job.model}, and this server runs {other}"

    def videos(
        self,
        owner: Owner,
        *,
        limit: int,
        after: str | None,
        order: Literal["asc", "desc"],
        status: JobState | None,
        batch_id: str | None = None,
    ) -> list[Video]:
        """Return the API's representation of an owner's jobs, ordered by the time of request.

        Args:
            owner: Owner of the API key.
            limit: Maximum number of jobs.
            after: Id of the last job of the previous page; None: the first page.
            order: `asc`: the oldest first; `desc`: the newest first.
            status: State of the jobs; None: any state.
            batch_id: Id of the jobs' batch; None: any batch, or none.
        """
        if after is not None:
            self.job(after, owner)
        if batch_id is not None:
            self.batches.get(batch_id, owner)
        states = [] if status is None else [status]
        # A job that a server has claimed is IN_PROGRESS in the queue, but clients see it as queued
        # until a rank has begun it. So these jobs are fetched, too.
        if status is JobState.QUEUED:
            states.append(JobState.IN_PROGRESS)
        most = limit + (len(self.queue.running()) if JobState.IN_PROGRESS in states else 0)
        jobs = self.queue.page(
            owner=owner.name,
            limit=most,
            after=after,
            order=order,
            states=states,
            batch_id=batch_id,
        )
        views = (view for view in map(self.video, jobs) if status in (None, view.status))
        return list(islice(views, limit))

    def completed(self, id: str, owner: Owner) -> Job:
        """Return an owner's completed job by its id.

        Raises:
            ApiError: The owner has no such job, or the job is not completed.
        """
        job = self.job(id, owner)
        if job.state is not JobState.COMPLETED:
            status = job.state if job.state.is_final else self.video(job).status
            text = f"the video is {status}, not completed"
            hint = "request it again" if job.state.is_final else "its status shows the progress"
            raise ApiError(409, "not_completed", text, hint, status=str(status))
        return job
