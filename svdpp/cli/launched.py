"""Owns what a command does as a rank other than 0 of torchrun or srun: it serves, and is silent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from svdpp.cli.console import Console
from svdpp.errors import RankError, RequestError, SvdppError, error_to_dict
from svdpp.launch.world import find_world

if TYPE_CHECKING:
    from svdpp.driver.pipeline import Pipeline

# Rank 0 may have found the same mistake and never come to listen.
_REPORT_SECONDS = 5.0


def serve(
    pipeline: Pipeline, console: Console, answer: Callable[[bytes], bytes] = lambda _: b""
) -> None:
    """Works until rank 0 says that all is done. On rank 0's host rank 0 logs for all ranks there.

    Args:
        pipeline: of a member.
        console: told where nobody else can say why the process ends.
        answer: as `Pipeline.serve` has it.
    """
    from loguru import logger

    from svdpp.cli.log import EventLog

    world = find_world()
    assert world is not None
    log = logger.bind(rank=world.rank)
    if not world.on_first_host:
        pipeline.observe(EventLog(pipeline.config.plan))

    def say(sentence: str, is_loud: bool) -> None:
        log.error(sentence)
        if is_loud and world.local_rank == 0:
            console.error(RankError(sentence, "is its host down, or the network to it?"))

    pipeline.serve(say=say, answer=answer)


def is_told_elsewhere(error: BaseException) -> bool:
    """Whether rank 0 says to the user what keeps this process from working, or nobody need to.

    Tells rank 0, where this is another rank that could not begin.
    """
    try:
        world = find_world()
    except RequestError:
        return False
    if world is None or not world.is_member:
        return False
    if not isinstance(error, SvdppError) or isinstance(error, RankError):
        return not isinstance(error, Exception) or world.local_rank != 0
    from svdpp.launch.joined_rank import report_failure

    return report_failure(world, error_to_dict(error), timeout=_REPORT_SECONDS)
