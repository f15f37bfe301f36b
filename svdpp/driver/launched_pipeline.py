"""Owns the part of a pipeline for launched ranks: rank 0 joins the others, and they serve it."""

from __future__ import annotations

from collections.abc import Callable

from svdpp.driver.rank_launcher import RankLauncher
from svdpp.driver.supervisor import Observer
from svdpp.launch.world import World, is_member


class LaunchedPipeline:
    """The methods of `Pipeline` for ranks that torchrun or srun has started.

    Without a launcher, `serve`, `ask`, `gather` and `check_gathered` raise `ClosedError`.

    Args:
        launcher: starts or joins the pipeline's ranks.
    """

    def __init__(self, launcher: RankLauncher) -> None:
        self._launcher = launcher
        self._observers: tuple[Observer, ...] = ()

    @property
    def world(self) -> World | None:
        """What the launcher says of this process; None if it starts the ranks itself."""
        return self._launcher.world

    @property
    def is_member(self) -> bool:
        """Whether this process is a launched rank other than 0, and must call `serve`."""
        return is_member(self.world)

    @property
    def spans_hosts(self) -> bool:
        """Whether the ranks are on several hosts."""
        return self.world is not None and self.world.spans_hosts

    def observe(self, observer: Observer) -> None:
        """Calls `observer` with (rank, event) for every later event of the ranks.

        It runs in the pipeline's thread: it must be quick, and an exception in it ends the run. It
        may submit clips, but must not wait for any.
        """
        self._observers = (*self._observers, observer)

    def serve(
        self,
        *,
        say: Callable[[str, bool], None],
        answer: Callable[[bytes], bytes] = lambda _: b"",
    ) -> None:
        """Works as a rank other than 0 until rank 0 ends the work.

        Observers get the events of this rank only. If the run fails, the process ends here.

        Args:
            say: takes the last message of a process that ends, and whether no other process
                reports it.
            answer: answers rank 0's question about this host before the work begins.

        Raises:
            SvdppError: the work could not begin.
        """
        self._launcher.serve(self._observers, answer, say)

    def ask(self, question: bytes) -> dict[str, bytes]:
        """Asks one rank of each other host; returns the answers, by host. Call it before the block.

        Raises:
            SvdppError: a rank is missing, or was started with other settings.
        """
        return self._launcher.join().ask(question)

    def gather(self) -> None:
        """Joins the other launched ranks, which then wait for work. Call it before the block.

        From then on they end when rank 0 ends, and learn why.

        Raises:
            SvdppError: a rank is missing, or was started with other settings.
        """
        self._launcher.join()

    def check_gathered(self) -> None:
        """Checks that the ranks that `gather` joined are still alive. Call it before the block.

        Raises:
            RankError: a rank has ended.
        """
        self._launcher.join().check_connected()

    def dismiss(self, error: BaseException | None = None) -> None:
        """Ends the other launched ranks. Call it instead of the block.

        Args:
            error: the reason; None: there is no work.

        Raises:
            SvdppError: a rank is missing, or was started with other settings.
        """
        self._launcher.dismiss(error)
