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
    """Ranks that start for each of a bench's pipelines, and end with it.

    Args:
        pipelines: creates each pipeline when it is its turn.
    """

    end_together = False
    """Whether an error that ends one pipeline also ends all later ones."""

    def __init__(self, pipelines: Iterator[Pipeline]) -> None:
        self._pipelines = pipelines

    @contextlib.contextmanager
    def at_work(self, *observers: Observer) -> Iterator[Pipeline]:
        """Enters the next pipeline for a block."""
        pipeline = self._take()
        for observer in observers:
            pipeline.observe(observer)
        with pipeline:
            yield pipeline

    def check_alive(self, rank: int, event: Event) -> None:
        """Checks, as an observer of other work, ranks that live between two pipelines."""

    def _take(self) -> Pipeline:
        return next(self._pipelines)


class JoinedRanks(Ranks):
    """Launched ranks, from rank 0's view; the others call `serve_all` on the same pipelines.

    Between two pipelines rank 0 may do other work, such as measuring diffusers. Meanwhile the
    others wait for the next pipeline, connected to rank 0, and end if it ends. A context manager.

    Args:
        pipelines: in the same order on all ranks; creates each one when it is next. The last one
            does no work: the others wait in it for the end of the block.
    """

    end_together = True

    def __init__(self, pipelines: Iterator[Pipeline]) -> None:
        super().__init__(pipelines)
        self._next: Pipeline | None = None

    def __enter__(self) -> JoinedRanks:
        self._gather()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._next is not None:  # else a pipeline has failed and has ended the others
            self._next.dismiss(error)

    @contextlib.contextmanager
    def at_work(self, *observers: Observer) -> Iterator[Pipeline]:
        """See `Ranks`."""
        with super().at_work(*observers) as pipeline:
            yield pipeline
        self._gather()

    def check_alive(self, rank: int, event: Event) -> None:  # noqa: ARG002
        """See `Ranks`."""
        assert self._next is not None, "an earlier pipeline has failed"
        self._next.check_gathered()

    def _take(self) -> Pipeline:
        assert self._next is not None, "an earlier pipeline has failed"
        pipeline, self._next = self._next, None
        return pipeline

    def _gather(self) -> None:
        memory.reset_peak()
        pipeline = next(self._pipelines)
        pipeline.gather()
        self._next = pipeline


def serve_all(pipelines: Iterable[Pipeline], serve: Callable[[Pipeline], None]) -> None:
    """Serves `pipelines` as a launched rank other than 0; the process ends in the last one.

    Args:
        pipelines: the same as those of rank 0's `JoinedRanks`.
        serve: serves one pipeline.
    """
    for pipeline in pipelines:
        serve(pipeline)
        memory.reset_peak()
