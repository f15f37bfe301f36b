"""Owns whose ranks a bench's pipelines run on: started anew for each, or a launcher's, in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Protocol

from svdpp.driver.pipeline import Pipeline
from svdpp.driver.supervisor import Observer
from svdpp.worker import peak_memory
from svdpp.worker.messages import Event


class Ranks(Protocol):
    """Who runs a bench's pipelines, one after the other."""

    end_together: bool
    """Whether what ends one pipeline ends all that were to follow."""

    def at_work(self, *observers: Observer) -> contextlib.AbstractContextManager[Pipeline]:
        """The next pipeline, entered."""

    def check_alive(self, rank: int, event: Event) -> None:
        """Observes what is measured without them, so as to see that they are still there."""


def serve_all(pipelines: Iterable[Pipeline], serve: Callable[[Pipeline], None]) -> None:
    """Takes part in `pipelines` as a launcher's rank other than 0; the process ends in the last.

    Args:
        pipelines: as rank 0 gives them to its `JoinedRanks`.
        serve: works as a member of one.
    """
    for pipeline in pipelines:
        serve(pipeline)
        peak_memory.reset_peak()


class StartedRanks:
    """Ranks that are started for each pipeline, and end with it.

    Args:
        pipelines: made when they are asked for.
    """

    end_together = False

    def __init__(self, pipelines: Iterator[Pipeline]) -> None:
        self._pipelines = pipelines

    @contextlib.contextmanager
    def at_work(self, *observers: Observer) -> Iterator[Pipeline]:
        """See `Ranks`."""
        pipeline = next(self._pipelines)
        for observer in observers:
            pipeline.observe(observer)
        with pipeline:
            yield pipeline

    def check_alive(self, rank: int, event: Event) -> None:
        """There are none between two pipelines."""


class JoinedRanks:
    """A launcher's ranks, seen from its rank 0; the others `serve` the same pipelines.

    Whatever rank 0 does between two pipelines, such as measuring diffusers alone, the others wait
    at its line for the next one: so they end with rank 0, by its code. A context manager.

    Args:
        pipelines: in the order that all ranks know, made when their turn is next. In the last one
            the others wait for the end of the block, and no more.
    """

    end_together = True

    def __init__(self, pipelines: Iterator[Pipeline]) -> None:
        self._pipelines = pipelines
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
        # Where a pipeline has failed it has ended the others itself.
        if self._next is not None:
            self._next.dismiss(error)

    @contextlib.contextmanager
    def at_work(self, *observers: Observer) -> Iterator[Pipeline]:
        """See `Ranks`."""
        assert self._next is not None, "an earlier pipeline has failed"
        pipeline, self._next = self._next, None
        for observer in observers:
            pipeline.observe(observer)
        with pipeline:
            yield pipeline
        self._gather()

    def check_alive(self, rank: int, event: Event) -> None:  # noqa: ARG002
        """See `Ranks`.

        Raises:
            RankError: one of them is not.
        """
        assert self._next is not None, "an earlier pipeline has failed"
        self._next.check_gathered()

    def _gather(self) -> None:
        peak_memory.reset_peak()
        pipeline = next(self._pipelines)
        pipeline.gather()
        self._next = pipeline
