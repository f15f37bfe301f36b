"""Owns a pipeline's part under a launcher: rank 0 joins the other ranks, and they serve it."""

from __future__ import annotations

from collections.abc import Callable

from svdpp.driver.rank_launcher import RankLauncher
from svdpp.driver.supervisor import Observer


class LaunchedPipeline:
    """What `Pipeline` does with ranks that torchrun or srun have started.

    Args:
        launcher: of the pipeline's ranks.
    """

    def __init__(self, launcher: RankLauncher) -> None:
        self._launcher = launcher
        self._observers: tuple[Observer, ...] = ()

    @property
    def is_member(self) -> bool:
        """Whether this process is a rank other than 0 of a launcher's world, and has to `serve`."""
        return self._launcher.world is not None and self._launcher.world.is_member

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks are on other hosts than this one."""
        return self._launcher.world is not None and self._launcher.world.spans_hosts

    def observe(self, observer: Observer) -> None:
        """Has `observer` called with (rank, event) for every later event of the ranks.

        It runs in the pipeline's own thread: it must be quick, and an exception in it ends the run.
        It may submit clips, but not wait for any.
        """
        self._observers = (*self._observers, observer)

    def serve(
        self,
        *,
        say: Callable[[str, bool], None],
        answer: Callable[[bytes], bytes] = lambda _: b"",
    ) -> None:
        """Works as a rank other than 0 until rank 0 says that the work is done.

        Observers hear the events of this rank alone. If the run fails, the process ends here.

        Args:
            say: takes the last sentence of a process that ends, and whether it alone reports it.
            answer: answers what rank 0 asks about this host before the work begins.

        Raises:
            SvdppError: the work could not begin.
        """
        self._launcher.serve(self._observers, answer, say)

    def ask(self, question: bytes) -> dict[str, bytes]:
        """What one rank of each other host answers to `question`, by host; before the block.

        Raises:
            SvdppError: a rank is missing, or was started with other settings.
        """
        return self._launcher.join().ask(question)

    def gather(self) -> None:
        """Has a launcher's other ranks wait for this pipeline's work; before the block.

        From then on they end when rank 0 does, and know why.

        Raises:
            SvdppError: a rank is missing, or was started with other settings.
        """
        self._launcher.join()

    def check_gathered(self) -> None:
        """Checks that the ranks that `gather` found are still there; before the block.

        Raises:
            RankError: one of them is not.
        """
        self._launcher.join().check_connected()

    def dismiss(self, error: BaseException | None = None) -> None:
        """Ends a launcher's other ranks; instead of the block.

        Args:
            error: the reason; None: there is nothing to do.

        Raises:
            SvdppError: a rank is missing, or was started with other settings.
        """
        self._launcher.dismiss(error)
