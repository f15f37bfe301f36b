"""Owns putting a server together: what can be wrong is found before its ranks start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from svdpp.config import PipelineConfig
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.resolve import resolved_for
from svdpp.driver.supervisor import Observer
from svdpp.media import output_files, video
from svdpp.media.image import MAX_PIXELS
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.costs import Costs
from svdpp.serve.api import create_app
from svdpp.serve.engine import Engine
from svdpp.serve.events import Events
from svdpp.serve.gate import ClipGate
from svdpp.serve.guard import KeyCheck, Limits
from svdpp.serve.job import Job, JobState
from svdpp.serve.keys import Keys
from svdpp.serve.metrics import Metrics, Sources
from svdpp.serve.offer import Inputs, Offer
from svdpp.serve.owner import Owner
from svdpp.serve.proof import Prover
from svdpp.serve.retention import CLIPS, LATENTS, PHOTOS, remove_strangers
from svdpp.serve.server import Retention
from svdpp.serve.service import Service
from svdpp.serve.store import JobStore
from svdpp.serve.upload import DecodeLimits, PhotoFolder


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server is asked to be.

    Args:
        config: of the pipeline.
        folder: of the queue and all files.
        sizes: width and height of the frames that clients may request.
        max_open: jobs that may be queued or in progress.
        limits: of each request.
        max_pixels: of a photograph.
        retention: of finished jobs.
        verifies_when_idle: whether finished clips are verified without being asked for.
        costs: assumed before there is a measurement; None: published ones.
        observers: called with (rank, event) for what the ranks report.
    """

    config: PipelineConfig
    folder: Path
    sizes: tuple[tuple[int, int], ...]
    max_open: int
    limits: Limits = field(default_factory=Limits)
    max_pixels: int = MAX_PIXELS
    retention: Retention = field(default_factory=Retention)
    verifies_when_idle: bool = False
    costs: Costs | None = None
    observers: tuple[Observer, ...] = ()


def check_config(config: PipelineConfig, sizes: Iterable[tuple[int, int]] = ()) -> PipelineConfig:
    """Checks what could keep the ranks from starting; returns `config`, resolved.

    Args:
        config: of the pipeline.
        sizes: width and height of other frames that clients may request.

    Raises:
        RequestError: devices are missing, or the model cannot make frames of these sizes.
        ModelError: the model is missing or incomplete.
        OutOfMemoryError: the ranks do not fit.
        OutputError: ffmpeg is missing.
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
    """The application and its service; nothing is started.

    Args:
        settings: its config by `check_config`.
        keys: of the clients; None: there are none.

    Raises:
        RequestError: another server uses the folder.
        OutputError: the folder cannot be written.
    """
    folder = settings.folder.absolute()
    store = JobStore(folder)
    try:
        service = _service(settings, folder, store)
    except BaseException:
        store.close()
        raise
    owner_of = None if keys is None else _owner_check(keys)
    return create_app(service, limits=settings.limits, owner_of=owner_of), service


def _service(settings: ServerSettings, folder: Path, store: JobStore) -> Service:
    for name in (PHOTOS, CLIPS, LATENTS):
        output_files.check_writable(folder / name)
        (folder / name).mkdir(parents=True, exist_ok=True)
    store.recover()
    remove_strangers(store, folder)
    events = Events()
    metrics = Metrics(
        Sources(
            jobs=store.counts,
            oldest_waiting=lambda: _oldest_waiting(store),
            restarts=lambda: service.engine.restarts,
            live_ranks=lambda: service.engine.live_ranks,
            speeds=lambda: service.engine.speeds.read(),
            subscribers=lambda: events.num_subscribers,
        )
    )

    def describe(job: Job) -> dict[str, Any]:
        return service.video(job).model_dump(mode="json")

    def on_ended(job: Job) -> None:
        metrics.ended(job)
        service.prover.wake()

    engine = Engine(
        settings.config,
        store,
        folder,
        events,
        describe=describe,
        observers=[metrics, *settings.observers],
        on_ended=on_ended,
        costs=settings.costs,
    )
    service = Service(
        folder=folder,
        store=store,
        photos=PhotoFolder(folder / PHOTOS, DecodeLimits(max_pixels=settings.max_pixels)),
        engine=engine,
        events=events,
        metrics=metrics,
        offer=_offer(settings, engine.checkpoint),
        gate=ClipGate(engine.config, engine.checkpoint),
        prover=Prover(
            store,
            folder,
            lambda: engine.is_idle,
            when_idle=settings.verifies_when_idle,
            on_verdict=metrics.verified,
        ),
        max_open=settings.max_open,
        keep_seconds=settings.retention.age_seconds,
        cancel_seconds=settings.config.timeout_seconds + settings.config.start_timeout_seconds,
    )
    return service


def _oldest_waiting(store: JobStore) -> float | None:
    oldest = store.page(owner=None, limit=1, order="asc", state=JobState.QUEUED)
    return oldest[0].created_at if oldest else None


def _owner_check(keys: Keys) -> KeyCheck:
    def owner_of(text: str) -> Owner | None:
        key = keys.find(text)
        return None if key is None else Owner(key.name, key.max_open)

    return owner_of


def _offer(settings: ServerSettings, checkpoint: Checkpoint | None) -> Offer:
    name = settings.config.model.name
    if checkpoint is not None and checkpoint.fingerprint is not None:
        name = checkpoint.folder.name  # clients need not know where it is
    return Offer(
        model=name,
        sampling=settings.config.sampling,
        sizes=settings.sizes,
        drafts=settings.config.draft_on_request,
        inputs=Inputs.of(checkpoint),
    )
