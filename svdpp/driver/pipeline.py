"""`Pipeline`: Python API whose ranks start once and then make all submitted clips."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, overload

from svdpp.config import ClipRequest
from svdpp.config.limits import require
from svdpp.driver.clip_metadata import divides_batches
from svdpp.driver.clips import ClipFailure, ClipHandle, ClipResult
from svdpp.driver.ranks import PipelineRanks
from svdpp.driver.resolve import check_memory
from svdpp.errors import ClosedError, Interrupted, SvdppError, reraisable
from svdpp.launch.world import is_secondary_rank
from svdpp.plan.actions import Schedule
from svdpp.plan.forecast import Span, simulate_schedule
from svdpp.worker.messages import PrepareImage

#: Fields to add to each clip's JSON, one mapping for each clip; empty: no fields.
Metadata = Sequence[Mapping[str, Any]]


class Pipeline(PipelineRanks):
    """Context manager that starts ranks, which share the steps of every submitted clip.

    Inside the block, any thread may call any method. The pipeline's own thread handles the events
    of the ranks, so clips are made even if no thread waits for them. If a failure ends the run,
    `submit`, `run`, `results`, `close`, the handles of unfinished clips and the end of the block
    raise the error.

    The end of the block waits for all submitted clips. If an exception leaves the block, unfinished
    clips are dropped. A pipeline can be entered only once.

    Under torchrun or srun, the pipeline joins the launcher's ranks instead of starting ranks. Then
    only rank 0 uses the `with` block; the other ranks call `serve`.

    Args:
        config: Configuration to run. The model's defaults replace fields that are None.
        layout: `auto`: the layout with the best forecast, computed from the costs of the
            configuration (by default published costs). `data-parallel`: each rank makes whole
            clips. None or `pipeline`: the layout of the configuration.
        num_clips: Number of clips for the forecast, which `auto` needs.
        checkpoint: Checkpoint of the model; None: the pipeline reads the checkpoint's configs.
        tensor_folder: Folder in which the ranks store the latent of each transfer and the frames of
            each clip, for verification; None: no tensors are stored.
        latents_folder: Folder for latent checkpoints of requests with a `latents_key`. A checkpoint
            is kept until the clip is finished. Requests with `done_steps` resume from a checkpoint.
        profile_path: Path of the torch.profiler trace of one clip on rank 0; None: no trace.
        shared_paths: Paths of images and output folders. Ranks on several hosts start only if these
            paths and `latents_folder` exist on every host.
        history_clips: Limit for a pipeline that runs for days: `trace` keeps only this number of
            the latest clips, and `failures` this number of the latest failed clips. None: no limit.
        trace_clips: Number of the latest clips that `trace` keeps; None: `history_clips`.
        ranks_ignore_signals: Whether ranks that this process starts ignore INT, TERM and HUP. A
            service finishes its clips after such a signal, and the signal often reaches all
            processes.
        fault: Function that each rank calls first, with its rank number. Tests inject faults with
            it.
    """

    @property
    def failures(self) -> list[ClipFailure]:
        """Failed clips, in the order of their failures."""
        return self._clips.failures

    # --- submission of clips, and their results -------------------------------------------------

    @overload
    def submit(self, requests: ClipRequest, metadata: Metadata = ()) -> ClipHandle: ...

    @overload
    def submit(
        self, requests: Iterable[ClipRequest], metadata: Metadata = ()
    ) -> list[ClipHandle]: ...

    def submit(
        self, requests: ClipRequest | Iterable[ClipRequest], metadata: Metadata = ()
    ) -> ClipHandle | list[ClipHandle]:
        """Submit clips without waiting. The ranks make clips in the order of submission.

        Args:
            requests: One or several requests. If the ranks cannot make one of the clips, no clip is
                submitted.
            metadata: Fields to add to each clip's JSON.

        Returns:
            Handle of the clip, if `requests` is a single request; otherwise a list of handles, in
            the order of the requests.

        Raises:
            RequestError: The ranks cannot make one of the clips.
            ClosedError: The pipeline is not open.
            SvdppError: The run has ended because of this error.
        """
        if isinstance(requests, ClipRequest):
            return self._submit([requests], metadata, for_results=True)[0]
        return self._submit(requests, metadata, for_results=True)

    def run(self, requests: Iterable[ClipRequest], metadata: Metadata = ()) -> list[ClipResult]:
        """Submit clips, and wait until these clips are finished. Other clips may still be running.

        Args:
            requests: Requests of the clips.
            metadata: Fields to add to each clip's JSON.

        Returns:
            Results in the order of the requests. The method `results` does not yield them again.

        Raises:
            RequestError: The ranks cannot make one of the clips.
            ClosedError: The pipeline is not open.
            SvdppError: The run has ended with this error; or a clip failed, and this is the error
                of the first failed clip, raised when the other clips are finished.
        """
        self._clips.check_may_wait()
        handles = self._submit(requests, metadata, for_results=False)
        errors = [error for handle in handles if (error := handle.exception()) is not None]
        if errors:
            raise errors[0] if self.run_error is None else reraisable(self.run_error)
        return [handle.result() for handle in handles]

    def results(self) -> Iterator[ClipResult]:
        """Yield the result of each submitted clip as the clip finishes, until no clip is left.

        If several threads iterate, each result is yielded in only one of them. Results that a
        handle's `result` has returned are not yielded. Failed clips are not yielded either; their
        handles and `failures` have the errors.

        Raises:
            ClosedError: The pipeline is not open.
            SvdppError: The run has ended before all clips were finished.
        """
        self._check_open()
        return self._clips.results()

    def _submit(
        self, requests: Iterable[ClipRequest], metadata: Metadata, *, for_results: bool
    ) -> list[ClipHandle]:
        self._check_open()
        resolved = self._scheduler.resolve_requests(requests)
        num_steps = [
            self._scheduler.router.config_of(each).sampling.num_inference_steps for each in resolved
        ]
        metadata = metadata or [{}] * len(resolved)
        wrong = f"metadata must have one mapping for each clip: expected {len(resolved)}"
        require(
            len(metadata) == len(resolved),
            f"{wrong}, got {len(metadata)}",
            num_metadata=len(metadata),
            num_clips=len(resolved),
        )
        is_exact = self._repeats_bits and not self._is_mixed
        if not is_exact or divides_batches(self.config, self.checkpoint):
            metadata = [{**each, "exact": "unproven"} for each in metadata]
        with self._submit_lock:
            supervisor = self._check_open()
            first = self._clips.num_added
            messages = self._scheduler.messages(resolved, metadata, first)
            try:
                handles = self._clips.add(resolved, num_steps, for_results=for_results)
                assert not handles or handles[0].clip == first, "submit was called within submit"
                for rank, message in messages.items():
                    supervisor.send(rank, message)
            except BaseException as error:
                # If only some ranks got the clips, these ranks would wait forever for the other
                # ranks. So the run is ended.
                reason = f"only some of the ranks got the clips: {type(error).__name__}"
                supervisor.abort(SvdppError(reason))
                raise
        return handles

    def prepare_image(self, request: ClipRequest) -> None:
        """Ask the ranks to prepare an image for a clip that will be submitted later.

        This call does not wait. Each rank that encodes images prepares this image while it does
        other work, and then sends an `ImageReady` event.

        Args:
            request: Request for the clip, equal to the request that will be submitted.

        Raises:
            ClosedError: The pipeline is not open.
        """
        supervisor = self._check_open()
        message = PrepareImage(request=self._scheduler.resolve_request(request)).to_bytes()
        for rank, roles in enumerate(self.config.layout.roles):
            if roles.encode:
                supervisor.send(rank, message)

    # --- plan and forecast ----------------------------------------------------------------------

    def schedule(self, requests: Sequence[ClipRequest]) -> Schedule:
        """Return the action list of each rank for the first clips of the run.

        Args:
            requests: Requests of the clips, from clip 0 on.
        """
        return self._scheduler.router.schedule(
            list(map(self._scheduler.resolve_request, requests)), 0
        )

    def replayed(self, requests: Sequence[ClipRequest]) -> list[Span]:
        """Simulate the first clips of the run with measured costs; return the times of all actions.

        The simulation uses the mean costs that this run has measured so far. If the dummy model
        sleeps to imitate a real model, the simulation uses the costs of the configuration.

        Args:
            requests: Requests of the clips, from clip 0 on.

        Raises:
            RequestError: No step was measured.
        """
        costs = self.config.costs if self.config.model.dummy_sleeps else self.trace.costs()
        return simulate_schedule(self.schedule(requests), costs)

    # --- entry and exit of the `with` block -----------------------------------------------------

    def check_memory(self) -> None:
        """Raise an `OutOfMemoryError` if this host's ranks do not fit into its free memory.

        Entering the `with` block checks this too.

        Raises:
            OutOfMemoryError: The ranks need more memory than the host has free.
        """
        num_local = None if self.world is None else self.world.local_size
        check_memory(self.config, self.checkpoint, self.config.layout.roles[:num_local])

    def __enter__(self) -> Pipeline:
        if is_secondary_rank(self.world):
            assert self.world is not None, "only a launcher starts secondary ranks"
            raise ClosedError(
                "only rank 0 uses the pipeline in a with block: the other ranks call serve()",
                details={"entering_rank": 0, "rank": self.world.rank},
            )
        with self._submit_lock:
            if self._is_entered:
                raise ClosedError("a pipeline can be entered only once: create another one")
            self._is_entered = True
        self.check_memory()
        self._start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if error is not None:
            self._leave_by(error)
            return
        try:
            self.close()
        # `close` raises if an error has ended the run, or if a signal arrives while `close` waits.
        except BaseException as interruption:
            self._leave_by(interruption)
            raise

    def _leave_by(self, error: BaseException) -> None:
        failure = self._abort(error)
        if failure is None or failure in (error, error.__cause__):
            return
        if isinstance(error, Interrupted) and self.world is not None:
            # When another rank dies, the launcher interrupts rank 0. So the failure of the other
            # rank is the cause, and is raised instead of the interruption.
            raise reraisable(failure)
        error.add_note(f"The run had failed before: {failure}")

    def close(self, *, drain: bool = True) -> None:
        """End the ranks, as the end of the `with` block does; a second call does nothing.

        Args:
            drain: Whether to wait for all submitted clips first. Otherwise unfinished clips are
                dropped immediately, and their handles raise `ClosedError`.

        Raises:
            SvdppError: The run had failed before its last clip was finished.
        """
        if not drain:
            if (failure := self._abort(None)) is not None:
                raise reraisable(failure)
        elif self._supervisor is not None:
            self._clips.check_may_wait()
            with self._submit_lock:
                self._is_closing = True
            self._wait_for_end()
