"""`RunPlan`: the clips of a run that still must be made, and the clips that are finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from svdpp.config import ClipRequest, PipelineConfig, SamplingConfig
from svdpp.driver.clip_metadata import clip_metadata
from svdpp.driver.output_policy import OutputPolicy
from svdpp.driver.request_scheduler import RequestScheduler
from svdpp.driver.run_job import RunJob
from svdpp.models.checkpoint import Checkpoint
from svdpp.plan.actions import Schedule

if TYPE_CHECKING:
    from svdpp.driver.clips import ClipResult
    from svdpp.driver.pipeline import Pipeline

#: Largest number of clips that are submitted at once, or that a forecast simulates. More clips
#: would need more memory for their actions.
BATCH_SIZE = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedClip:
    """Clip that still must be made. It has few fields, because a run may have 100,000 clips."""

    index: int
    """Position of the clip's job among the jobs of the run, from 0."""
    job: RunJob
    sampling: SamplingConfig | None
    """Resolved sampling parameters of the clip; None: the parameters of the pipeline."""
    latents_key: str | None = None
    done_steps: int = 0
    replaces: bool = False
    """Whether the clip replaces a finished clip that has other parameters."""


class JobResolver:
    """Converter of jobs into the requests and the metadata of their clips.

    Args:
        config: Resolved configuration of the pipeline.
        checkpoint: Checkpoint of the pipeline's model.
        policy: Policy of the run for the output folder and existing files.
    """

    def __init__(
        self, config: PipelineConfig, checkpoint: Checkpoint, policy: OutputPolicy
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.policy = policy
        self._scheduler = RequestScheduler(config, checkpoint)

    def sampling_of(self, job: RunJob) -> SamplingConfig | None:
        """Return the resolved sampling parameters of a job; None: the parameters of the pipeline.

        Raises:
            RequestError: The model cannot make clips with these parameters.
        """
        return None if job.sampling is None else self._scheduler.resolve_sampling(job.sampling)

    def config_of(self, sampling: SamplingConfig | None) -> PipelineConfig:
        """Return the pipeline's configuration with the given sampling parameters.

        Args:
            sampling: Resolved sampling parameters; None: those of the pipeline.
        """
        if sampling is None:
            return self.config
        return self._scheduler.router.config_with(sampling)

    def metadata_of(self, job: RunJob, sampling: SamplingConfig | None) -> dict[str, Any]:
        """Return the fields of a clip's JSON that are known before the clip is made."""
        config, output = self.config_of(sampling), self.policy.output_of(job.name)
        loras = self._scheduler.find_loras(job.made_from.loras)
        return clip_metadata(job.made_from, job.seed, output, config, self.checkpoint, loras)

    def request_of(self, clip: PlannedClip) -> ClipRequest:
        """Return the request for a planned clip."""
        loras = self._scheduler.find_loras(clip.job.made_from.loras)
        return replace(
            clip.job.request(),
            loras=tuple(file.lora for file in loras),
            sampling=clip.sampling,
            output=self.policy.output_of(clip.job.name),
            latents_key=clip.latents_key,
            done_steps=clip.done_steps,
        )

    def schedule(self, clips: Sequence[PlannedClip]) -> Schedule:
        """Return the action list of each rank for these clips, whose indices start at 0."""
        return self._scheduler.router.schedule([self.request_of(clip) for clip in clips], 0)


@dataclass
class RunPlan:
    """Clips that still must be made, in the order of submission, and finished clips."""

    resolver: JobResolver
    clips: list[PlannedClip] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """JSON of the finished clips."""
    skipped_jobs: list[tuple[int, RunJob]] = field(default_factory=list)
    """For each finished clip: the position of its job among the run's jobs, from 0, and the job."""

    @property
    def requests(self) -> list[ClipRequest]:
        """Requests for the clips that the run still must make. Each access creates new objects."""
        return self.requests_of(self.clips)

    @property
    def metadata(self) -> list[dict[str, Any]]:
        """Metadata of the clips that the run still must make. Each access creates large objects."""
        return self.metadata_of(self.clips)

    def requests_of(self, clips: Sequence[PlannedClip]) -> list[ClipRequest]:
        """Return the requests for the given planned clips."""
        return [self.resolver.request_of(clip) for clip in clips]

    def metadata_of(self, clips: Sequence[PlannedClip]) -> list[dict[str, Any]]:
        """Return the metadata of the given planned clips."""
        return [self.resolver.metadata_of(clip.job, clip.sampling) for clip in clips]


def submit_and_collect(pipeline: Pipeline, clips: RunPlan) -> Iterator[ClipResult]:
    """Submit clips in batches, and yield their results as the clips finish.

    The next batch is submitted before the current batch is finished, so that no rank is idle.

    Args:
        pipeline: Pipeline whose ranks have started.
        clips: Plan with the clips to make.

    Yields:
        Results of finished clips, in the order in which the clips finish.
    """
    for first in range(0, len(clips.clips), BATCH_SIZE):
        batch = clips.clips[first : first + BATCH_SIZE]
        handles = pipeline.submit(clips.requests_of(batch), clips.metadata_of(batch))
        for result in pipeline.results():
            yield result
            if handles[0].done() and first + BATCH_SIZE < len(clips.clips):
                break
