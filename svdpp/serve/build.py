"""Putting a server together: what can be wrong is found before its ranks start."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from loguru import logger
from starlette.types import ASGIApp

from svdpp.config import PipelineConfig
from svdpp.config.limits import MAX_FRAMES, MAX_STEPS
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolved_for
from svdpp.media import output_files, video
from svdpp.media.image import MAX_PIXELS
from svdpp.plan.costs import Costs
from svdpp.serve.admission import Admission
from svdpp.serve.app import create_app
from svdpp.serve.auth import Keys
from svdpp.serve.capabilities import Capabilities
from svdpp.serve.engine import Engine
from svdpp.serve.events import Events
from svdpp.serve.guard import Limits
from svdpp.serve.job import CLIPS, LATENTS, PHOTOS, Job
from svdpp.serve.metrics import Metrics, Sources
from svdpp.serve.photos import DecodeLimits, PhotoFolder
from svdpp.serve.prover import Prover
from svdpp.serve.queue import JobQueue
from svdpp.serve.retention import set_strangers_aside
from svdpp.serve.server import Retention
from svdpp.serve.service import Service


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server is asked to be.

    Args:
        config: of the pipeline.
        folder: of the queue and all files.
        sizes: width and height of the frames that clients may request.
        max_open: jobs that may be queued or in progress.
        max_steps: of a clip.
        max_frames: of a clip.
        limits: of each request.
        max_pixels: of a photograph.
        retention: of finished jobs.
        verifies_when_idle: whether finished clips are verified without being asked for.
        costs: assumed before there is a measurement; None: published ones.
        adopts: whether a folder that has other files becomes a data folder.
    """

    config: PipelineConfig
    folder: Path
    sizes: tuple[tuple[int, int], ...]
    max_open: int
    max_steps: int = MAX_STEPS
    max_frames: int = MAX_FRAMES
    limits: Limits = field(default_factory=Limits)
    max_pixels: int = MAX_PIXELS
    retention: Retention = field(default_factory=Retention)
    verifies_when_idle: bool = False
    costs: Costs | None = None
    adopts: bool = False


def check_config(config: PipelineConfig, sizes: Iterable[tuple[int, int]] = ()) -> PipelineConfig:
    """Checks what could keep the ranks from starting; returns `config`, resolved.

    `sizes` are width and height of other frames that clients may request.
    """
    pipeline = Pipeline(config)
    config, checkpoint = pipeline.config, pipeline.checkpoint
    for width, height in sizes:
        resolved_for(replace(config.sampling, width=width, height=height), config, checkpoint)
    pipeline.check_memory()
    if not config.model.is_dummy:
        video.find_ffmpeg()
    return config


def build(settings: ServerSettings, keys: Keys | None) -> tuple[ASGIApp, Service]:
    """The application and its service, by a config of `check_config`; nothing is started."""
    folder = settings.folder.absolute()
    queue = JobQueue(folder, adopts=settings.adopts)
    try:
        service = _service(settings, folder, queue)
    except BaseException:
        queue.close()
        raise
    owner_of = None if keys is None else keys.find
    return create_app(service, limits=settings.limits, owner_of=owner_of), service


def _service(settings: ServerSettings, folder: Path, queue: JobQueue) -> Service:
    for name in (PHOTOS, CLIPS, LATENTS):
        output_files.check_writable(folder / name)
        (folder / name).mkdir(parents=True, exist_ok=True)
    queue.recover()
    set_strangers_aside(queue, folder)
    events = Events()
    metrics = Metrics(
        Sources(
            jobs=queue.counts,
            oldest_waiting=queue.oldest_waiting,
            restarts=lambda: engine.restarts,
            live_ranks=lambda: engine.live_ranks,
            subscribers=lambda: events.num_subscribers,
        )
    )

    def on_ended(job: Job) -> None:
        metrics.ended(job)
        prover.wake()

    engine = Engine(
        settings.config,
        queue,
        folder,
        events,
        describe=lambda job: service.video(job).model_dump(mode="json"),
        on_ended=on_ended,
        costs=settings.costs,
    )
    engine.observe(metrics)
    prover = Prover(
        queue,
        folder,
        lambda: engine.is_idle,
        when_idle=settings.verifies_when_idle,
        on_verdict=metrics.verified,
    )
    capabilities = Capabilities.of(
        settings.config.model.name,
        engine.checkpoint,
        sampling=settings.config.sampling,
        sizes=settings.sizes,
        max_steps=settings.max_steps,
        max_frames=settings.max_frames,
    )
    admission = Admission(engine.config, engine.checkpoint)
    hold(queue, capabilities, admission)
    service = Service(
        folder=folder,
        queue=queue,
        photos=PhotoFolder(folder / PHOTOS, DecodeLimits(max_pixels=settings.max_pixels)),
        engine=engine,
        events=events,
        metrics=metrics,
        capabilities=capabilities,
        admission=admission,
        prover=prover,
        max_open=settings.max_open,
        keep_seconds=settings.retention.age_seconds,
        cancel_seconds=settings.config.timeout_seconds + settings.config.start_timeout_seconds,
    )
    return service


def hold(queue: JobQueue, capabilities: Capabilities, admission: Admission) -> None:
    """Holds the jobs of earlier servers that this one would make by another model, or cannot make.

    They keep their places, and go on at the start of a server that can make them.
    """
    why_no_route = functools.cache(admission.why_no_route)
    own, weights = capabilities.model, capabilities.weights

    def why_not(job: Job) -> str | None:
        if (job.weights or job.model) == (weights or own):
            return why_no_route(job.sampling)
        model = job.model or f"of the family {job.sampling.family}"
        other = "other weights of it" if job.model == own else own
        return f"its model is {model}, and this server runs {other}"

    def judge(job: Job) -> Job:
        is_same_family = job.sampling.family == capabilities.sampling.family
        if not job.model and is_same_family:  # of an earlier svdpp
            job = replace(job, model=own, weights=weights)
        return replace(job, held=why_not(job))

    for reason, number in Counter(job.held for job in queue.hold(judge)).items():
        logger.warning("queued clips that wait for another start: {}, because {}", number, reason)
