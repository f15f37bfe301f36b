"""The ranks of a bench's pipelines: started for each pipeline, or joined from a launcher."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType

from svdpp.driver.pipeline import Pipeline
from svdpp.driver.supervisor import Observer
from svdpp.worker import memory
from svdpp.worker.messages import Event


class Ranks:
    """The ranks of one pipeline after the other. A context manager.

    Launched ranks stay between two pipelines, where rank 0 may do other work, such as measuring
    diffusers. Meanwhile the others, which call `serve_all`, wait for the next pipeline, connected
    to rank 0, and end if it ends.

    Args:
        pipelines: creates each one when it is next, in the same order on all launched ranks. These
            wait in the last one for the end of the block.
        launched: whether a launcher started the ranks; else each pipeline starts its own.
    """

    def __init__(self, pipelines: Iterator[Pipeline], *, launched: bool = False) -> None:
        self.end_together = launched
        self._pipelines = pipelines
        self._next: Pipeline | None = None

    def __enter__(self) -> Ranks:
        self._gather()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._next is not None:  # else there are none, or a pipeline has failed with them
            self._next.dismiss(error)

    @contextlib.contextmanager
    def at_work(self, *observers: Observer) -> Iterator[Pipeline]:
        """Enters the next pipeline for a block."""
        pipeline = self._next if self.end_together else next(self._pipelines)
        assert pipeline is not None, "an earlier pipeline has failed"
        self._next = None
        for observer in observers:
            pipeline.observe(observer)
        with pipeline:
            yield pipeline
        self._gather()

    def check_alive(self, rank: int, event: Event) -> None:  # noqa: ARG002
        """Checks, as an observer of other work, launched ranks that wait for a pipeline."""
        if self._next is not None:
            self._next.check_gathered()

    def _gather(self) -> None:
        if self.end_together:
            memory.reset_peak()
            pipeline = next(self._pipelines)
            pipeline.gather()
            self._next = pipeline


def serve_all(pipelines: Iterable[Pipeline], serve: Callable[[Pipeline], None]) -> None:
    """Serves `pipelines` as a launched rank other than 0; the process ends in the last one.

    Args:
        pipelines: the same as those of rank 0's `Ranks`.
        serve: serves one pipeline.
    """
    for pipeline in pipelines:
        serve(pipeline)
        memory.reset_peak()
