"""The clips of a run as data: those still to be made, and those that are finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from svdpp.config import ClipRequest, OutputConfig, PipelineConfig, SamplingConfig, VideoFormat
from svdpp.driver.clip_metadata import clip_metadata
from svdpp.driver.request_scheduler import RequestScheduler
from svdpp.driver.run_job import RunJob
from svdpp.media import video
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Schedule

if TYPE_CHECKING:
    from svdpp.driver.clips import ClipResult
    from svdpp.driver.pipeline import Pipeline

#: Clips that go to the ranks at once, and that a forecast replays: their actions need memory.
BATCH_SIZE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedClip:
    """A clip that is still to be made; small, because a run may have 100,000 of them."""

    index: int
    """Position of its job among those of the run."""
    job: RunJob
    sampling: SamplingConfig | None
    """Resolved parameters of the clip; None: the pipeline's."""
    latents_key: str | None = None
    done_steps: int = 0
    replaces: bool = False
    """Whether it takes the place of a finished clip with other parameters."""


class JobResolver:
    """Converter of jobs into requests and metadata of their clips.

    Args:
        config: Resolved configuration of the pipeline.
        checkpoint: Checkpoint of its model.
        folder: Folder of the clips.
        format: Format of the clips.
        crf: Quality of the clips.
    """

    def __init__(
        self,
        config: PipelineConfig,
        checkpoint: Checkpoint,
        *,
        folder: Path,
        format: VideoFormat = "mp4",
        crf: int = 18,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.folder = folder.absolute()
        self._format, self._crf = format, crf
        self._scheduler = RequestScheduler(config, checkpoint)
        self._resolved: dict[SamplingConfig, SamplingConfig | None] = {}

    def sampling_of(self, job: RunJob) -> SamplingConfig | None:
        """Return the resolved parameters of a job's clip; None: those of the pipeline.

        Raises:
            RequestError: The model cannot make such clips.
        """
        sampling = job.sampling
        if sampling is None:
            return None
        if sampling not in self._resolved:
            request = self._scheduler.resolve_request(ClipRequest(seed=0, sampling=sampling))
            self._resolved[sampling] = request.sampling
        return self._resolved[sampling]

    def output_of(self, job: RunJob) -> OutputConfig:
        """Return the file of a named job's clip."""
        path = self.folder / f"{job.name}{video.FORMAT_SUFFIXES[self._format]}"
        return OutputConfig(path=str(path), format=self._format, crf=self._crf)

    def config_of(self, sampling: SamplingConfig | None) -> PipelineConfig:
        """Return the configuration of clips with resolved parameters; None: the pipeline's."""
        if sampling is None:
            return self.config
        return self._scheduler.router.config_with(sampling)

    def metadata_of(self, job: RunJob, sampling: SamplingConfig | None) -> dict[str, Any]:
        """Return the request as the clip's JSON records it; see `clip_metadata`."""
        config, output = self.config_of(sampling), self.output_of(job)
        loras = self._scheduler.find_loras(job.made_from.loras)
        return clip_metadata(job.made_from, job.seed, output, config, self.checkpoint, loras)

    def request_of(self, clip: PlannedClip) -> ClipRequest:
        """Return the request of a planned clip."""
        loras = self._scheduler.find_loras(clip.job.made_from.loras)
        return replace(
            clip.job.request(),
            loras=tuple(file.lora for file in loras),
            sampling=clip.sampling,
            output=self.output_of(clip.job),
            latents_key=clip.latents_key,
            done_steps=clip.done_steps,
        )

    def schedule(self, clips: Sequence[PlannedClip]) -> Schedule:
        """Return each rank's actions for clips, of which the first is clip 0."""
        return self._scheduler.router.schedule([self.request_of(clip) for clip in clips], 0)


@dataclass
class RunPlan:
    """Clips still to be made, in the order of the ranks, and those that are finished already."""

    resolver: JobResolver
    clips: list[PlannedClip] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """JSON of the finished clips."""
    skipped_jobs: list[tuple[int, RunJob]] = field(default_factory=list)
    """Job of each finished clip, and its position among those of the run."""

    @property
    def requests(self) -> list[ClipRequest]:
        """Requests of the clips to be made; made anew at each use."""
        return self.requests_of(self.clips)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """Metadata of the clips to be made; made anew at each use, because they are large."""
        return self.metadata_of(self.clips)

    def requests_of(self, clips: Sequence[PlannedClip]) -> list[ClipRequest]:
        """Return the requests of some clips."""
        return [self.resolver.request_of(clip) for clip in clips]

    def metadata_of(self, clips: Sequence[PlannedClip]) -> list[dict[str, Any]]:
        """Return the metadata of some clips."""
        return [self.resolver.metadata_of(clip.job, clip.sampling) for clip in clips]


def submit_and_collect(pipeline: Pipeline, clips: RunPlan) -> Iterator[ClipResult]:
    """Submit the clips, the last ones while earlier ones are made.

    Args:
        pipeline: started.
        clips: to be made.

    Yields:
        Finished clips, in the order in which they end.
    """
    for first in range(0, len(clips.clips), BATCH_SIZE):
        batch = clips.clips[first : first + BATCH_SIZE]
        handles = pipeline.submit(clips.requests_of(batch), clips.metadata_of(batch))
        for result in pipeline.results():
            yield result
            if handles[0].done() and first + BATCH_SIZE < len(clips.clips):
                break
