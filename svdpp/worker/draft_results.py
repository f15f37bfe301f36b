"""Owns what the last rank makes of all ranks' results of one clip: draft, agreement, exact clip."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from svdpp.config import DraftConfig, OutputConfig
from svdpp.media.distance import Distance, distance
from svdpp.models.base import Frames
from svdpp.plan.draft import DraftPlan
from svdpp.worker.clip_writer import ClipWriter, FinishedClip
from svdpp.worker.messages import ClipJob
from svdpp.worker.tensor_store import TensorStore


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one rank came to at the end of its walk.

    Args:
        rank: which one; 0 walked the exact path.
        latent: final.
        frames: None where results are not decoded.
        seconds: from the clip's encode until this result was at the last rank.
        compute_seconds: that ranks computed on this result's own path, from the encode on.
    """

    rank: int
    latent: torch.Tensor
    frames: Frames | None
    seconds: float
    compute_seconds: float = 0.0


class DraftResults:
    """Takes one clip's results as they come, from the fastest rank's to the exact one.

    A clip is called exact where it is rank 0's, and nowhere else.

    Args:
        job: the clip.
        begun_at: unix time in seconds at which its encode began.
        draft plan: who started where.
        draft: when an approximation is accepted.
        clip writer: takes what is to be written.
        tensor store: keeps every result, for verification; None keeps none.
    """

    def __init__(
        self,
        job: ClipJob,
        begun_at: float,
        draft_plan: DraftPlan,
        draft: DraftConfig,
        clip_writer: ClipWriter,
        tensor_store: TensorStore | None = None,
    ) -> None:
        self._job = job
        self._begun_at = begun_at
        self._draft_plan = draft_plan
        self._draft = draft
        self._clip_writer = clip_writer
        self._tensor_store = tensor_store
        self._results: list[Result] = []
        self._accepted: Future[bool] | None = None

    def add(self, result: Result) -> None:
        """Looks at one rank's result, and delivers what follows from it."""
        before = self._results[-1] if self._results else None
        self._results.append(result)
        self._keep(result)
        if self._accepted is not None and (result.rank or self._accepted.result()):
            return  # where it could not be written, the exact clip still may be
        if result.rank == 0:
            self._deliver_exact(result)
        elif before is None:
            self._deliver_draft(result, {}, is_draft=True)
        elif agreement := self._agreement(result, before):
            self._accepted = self._deliver_draft(result, agreement, is_draft=False)

    def _keep(self, result: Result) -> None:
        if self._tensor_store is None:
            return
        clip, draft_rank = self._job.clip, result.rank
        self._tensor_store.keep_latent(
            clip, self._draft_plan.num_steps, result.latent, draft_rank=draft_rank
        )
        if result.frames is not None:
            self._tensor_store.keep_frames(clip, result.frames, draft_rank=draft_rank)

    def _agreement(self, result: Result, before: Result) -> dict[str, Any]:
        """How two successive results agree; empty where that is not enough."""
        least = self._draft.accept_psnr_db
        between = None if least is None else _frames_apart(result, before)
        if least is None or between is None or between.whole.psnr_db < least:
            return {}
        agreement = {"with_rank": before.rank, **between.whole.to_json()}
        return {"accept_psnr_db": least, "agreement": agreement}

    def _deliver_draft(
        self, result: Result, more: dict[str, Any], *, is_draft: bool
    ) -> Future[bool]:
        """An approximation, under a name of its own; the clip's last word where it is accepted."""
        about = {"start_steps": list(self._draft_plan.start_steps), **self._about(result), **more}
        record = {**self._job.record, "exact": False, "draft": about}
        request = self._job.request
        if request.output is not None:
            output = request.output.draft
            request = replace(request, output=output)
            record["output"] = Path(output.path).name
        job = ClipJob(clip=self._job.clip, request=request, record=record)
        return self._put(job, result, is_draft=is_draft)

    def _deliver_exact(self, exact: Result) -> None:
        """Rank 0's result, with the distance of all others from it; takes the draft's place."""
        results = [{**self._about(each), **_apart(each, exact)} for each in self._results[:-1]]
        draft = {"start_steps": list(self._draft_plan.start_steps), "results": results}
        record = {**self._job.record, "exact": True, "draft": draft}
        request = self._job.request
        job = ClipJob(clip=self._job.clip, request=request, record=record)
        self._put(job, exact, replaces=request.output and request.output.draft)

    def _put(
        self,
        job: ClipJob,
        result: Result,
        *,
        is_draft: bool = False,
        replaces: OutputConfig | None = None,
    ) -> Future[bool]:
        return self._clip_writer.put(
            FinishedClip(
                job=job,
                latent=result.latent,
                frames=result.frames,
                begun_at=self._begun_at,
                compute_seconds=result.compute_seconds,
                is_draft=is_draft,
                replaces=replaces,
            )
        )

    def _about(self, result: Result) -> dict[str, Any]:
        return {
            "rank": result.rank,
            "rounds": self._draft_plan.rounds(result.rank),
            "num_steps": self._draft_plan.num_steps,
            "wall_seconds": round(result.seconds, 3),
        }


def _apart(result: Result, exact: Result) -> dict[str, Any]:
    """How far a result is from the exact one: its latent, and its frames as they are seen."""
    latents = (result.latent.double() - exact.latent.double()).abs().max()
    frames = _frames_apart(result, exact)
    seen = {} if frames is None else frames.to_json()
    return {"latent_max_abs_diff": float(latents), **seen}


def _frames_apart(ours: Result, theirs: Result) -> Distance | None:
    if ours.frames is None or theirs.frames is None:
        return None
    return distance(ours.frames, theirs.frames)
