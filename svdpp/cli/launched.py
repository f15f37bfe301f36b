"""A command's work as a rank other than 0 of torchrun or srun: it serves silently."""

from __future__ import annotations

from typing import TYPE_CHECKING

from svdpp.cli.console import Console
from svdpp.errors import RankError, RequestError, SvdppError, error_to_dict
from svdpp.launch.world import World, find_world, is_member

if TYPE_CHECKING:
    from svdpp.driver.pipeline import Pipeline

# Rank 0 may have failed with the same error before it could listen.
_REPORT_SECONDS = 5.0


def serve_member(pipeline: Pipeline, world: World, console: Console) -> None:
    """Works until rank 0 ends the run. Rank 0 logs for all ranks of its own host."""
    from loguru import logger

    from svdpp.cli.log import EventLog

    log = logger.bind(rank=world.rank)
    if not world.on_first_host:
        pipeline.observe(EventLog(pipeline.config.layout))

    def say(sentence: str, is_loud: bool) -> None:
        log.error(sentence)
        if is_loud and world.local_rank == 0:
            console.error(RankError(sentence, "is its host down, or the network to it?"))

    pipeline.serve(say=say)


def is_told_elsewhere(error: BaseException) -> bool:
    """Whether another process reports `error` to the user, or it needs no report.

    If this is a rank other than 0 that could not start, sends the error to rank 0.
    """
    try:
        launched = find_world()
    except RequestError:
        return False
    if not is_member(launched):
        return False
    if not isinstance(error, SvdppError) or isinstance(error, RankError):
        return not isinstance(error, Exception) or launched.local_rank != 0
    from svdpp.worker.joined_rank import report_failure

    return report_failure(launched, error_to_dict(error), timeout=_REPORT_SECONDS)
