"""The comparison of one draft's results at the last rank, and the clips written from them."""

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
    """The result of one rank, on the host.

    Args:
        rank: 0 has the exact clip.
        latent: the final latent.
        frames: (F, H, W, 3) uint8; None if results are not decoded.
        seconds: from the clip's encode until this result reached the last rank.
        compute_seconds: the computing time behind this result, over all ranks, from the encode on.
        memory_pressure: see `Packet`.
    """

    rank: int
    latent: torch.Tensor
    frames: torch.Tensor | None
    seconds: float
    compute_seconds: float = 0.0
    memory_pressure: bool = False

    @property
    def pixels(self) -> Frames | None:
        """The frames as an array."""
        return None if self.frames is None else self.frames.numpy()


class DraftResults:
    """Compares the results of one clip, which arrive from the fastest rank's to the exact one.

    Only rank 0's result is exact.

    Args:
        job: the clip.
        begun_at: unix time in seconds at which its encode began.
        draft_plan: the start step of each rank.
        draft: the condition for accepting a draft.
        clip_writer: writes the clips.
        tensor_store: keeps every result for verification; None keeps none.
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
        """Compares one rank's result with those before, and writes a draft or the exact clip."""
        before = self._results[-1] if self._results else None
        self._results.append(result)
        self._keep(result)
        if self._accepted is not None and (result.rank or self._accepted.result()):
            return  # if the accepted draft could not be written, the exact clip still may be
        if result.rank == 0:
            self._write_exact(result)
        elif before is None:
            self._write_draft(result, {}, is_draft=True)
        elif agreement := self._agreement(result, before):
            self._accepted = self._write_draft(result, agreement, is_draft=False)

    def _keep(self, result: Result) -> None:
        if self._tensor_store is None:
            return
        clip, rank = self._job.clip, result.rank
        num_steps = self._draft_plan.num_steps
        self._tensor_store.keep_latent(clip, num_steps, result.latent, draft_rank=rank)
        if result.pixels is not None:
            self._tensor_store.keep_frames(clip, result.pixels, draft_rank=rank)

    def _agreement(self, result: Result, before: Result) -> dict[str, Any]:
        """The agreement of two successive results; empty if too poor to accept the draft."""
        least = self._draft.accept_psnr_db
        between = None if least is None else _frame_distance(result, before)
        if least is None or between is None or between.whole.psnr_db < least:
            return {}
        agreement = {"with_rank": before.rank, **between.whole.to_json()}
        return {"accept_psnr_db": least, "agreement": agreement}

    def _write_draft(
        self, result: Result, agreement: dict[str, Any], *, is_draft: bool
    ) -> Future[bool]:
        """Writes a draft under its own name; `is_draft` is False if it is accepted as the clip."""
        starts = list(self._draft_plan.start_steps)
        draft = {"start_steps": starts, **self._describe(result), **agreement}
        metadata = {**self._job.metadata, "exact": False, "draft": draft}
        request = self._job.request
        if request.output is not None:
            output = request.output.draft
            request = replace(request, output=output)
            metadata["output"] = Path(output.path).name
        job = ClipJob(clip=self._job.clip, request=request, metadata=metadata)
        return self._put(job, result, is_draft=is_draft)

    def _write_exact(self, exact: Result) -> None:
        """Writes rank 0's result and its distance from all others; replaces the draft."""
        others = self._results[:-1]
        results = [{**self._describe(each), **_distances(each, exact)} for each in others]
        draft = {"start_steps": list(self._draft_plan.start_steps), "results": results}
        metadata = {"exact": True, **self._job.metadata, "draft": draft}
        request = self._job.request
        job = ClipJob(clip=self._job.clip, request=request, metadata=metadata)
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
                ready=None,
                begun_at=self._begun_at,
                compute_seconds=result.compute_seconds,
                memory_pressure=result.memory_pressure,
                is_draft=is_draft,
                replaces=replaces,
            )
        )

    def _describe(self, result: Result) -> dict[str, Any]:
        return {
            "rank": result.rank,
            "rounds": self._draft_plan.rounds(result.rank),
            "num_steps": self._draft_plan.num_steps,
            "wall_seconds": round(result.seconds, 3),
        }


def _distances(result: Result, exact: Result) -> dict[str, Any]:
    """The distance of a result from the exact one: in latents and in 8-bit frames."""
    latents = (result.latent.double() - exact.latent.double()).abs().max()
    frames = _frame_distance(result, exact)
    return {"latent_max_abs_diff": float(latents), **({} if frames is None else frames.to_json())}


def _frame_distance(ours: Result, theirs: Result) -> Distance | None:
    if ours.pixels is None or theirs.pixels is None:
        return None
    return distance(ours.pixels, theirs.pixels)
