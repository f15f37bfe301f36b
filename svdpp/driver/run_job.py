"""`RunJob`: one requested clip, from a line of a jobs file or from an input and a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from svdpp.config import ClipRequest, SamplingConfig
from svdpp.media.inputs import ClipInput

#: Fields of `ClipRequest` that do not change the content of the clip: paths and finished steps.
_PATHS_AND_STEPS = (
    *("image", "last_image", "references", "videos"),
    *("output", "latents_key", "done_steps"),
)
#: Fields of `ClipRequest` that determine the content of the clip.
_CONTENT_FIELDS = tuple(
    each.name for each in fields(ClipRequest) if each.name not in _PATHS_AND_STEPS
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunJob:
    """Input, seed, parameters and name of one clip of a run."""

    made_from: ClipInput
    seed: int
    sampling: SamplingConfig | None = None
    """Sampling parameters of this clip, not yet resolved with the model's defaults; None: the
    parameters of the pipeline."""
    out: str = ""
    """File name that the user gave, without the suffix; empty: a name is made from the input."""
    name: str = ""
    """Unique file name of the clip, without the suffix; set by `name_jobs`."""
    line: int | None = None
    """Number of the line in the jobs file; None: the run has no jobs file."""

    def request(self) -> ClipRequest:
        """Return the request for a job's clip, without an output file."""
        request = self.made_from.request(self.seed)
        return request if self.sampling is None else replace(request, sampling=self.sampling)

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return f"{where}{self.made_from} with seed {self.seed}"


def combine_jobs(inputs: Iterable[ClipInput], seeds: Sequence[int]) -> list[RunJob]:
    """Return one job for each combination of an input and a seed.

    Args:
        inputs: Inputs of the clips.
        seeds: Seeds; each input gets one clip for each seed.
    """
    return [RunJob(made_from=made_from, seed=seed) for made_from in inputs for seed in seeds]


def job_key(job: RunJob) -> str:
    """Return a hash of a job's inputs and parameters, without names and paths of files.

    Args:
        job: Job, with resolved or unresolved parameters.

    Returns:
        Hash of 16 hex digits.
    """
    request = job.request()
    content = [(name, getattr(request, name)) for name in _CONTENT_FIELDS]
    return hashlib.sha256(repr(content).encode("utf-8", "surrogatepass")).hexdigest()[:16]
