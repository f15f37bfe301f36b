"""Owns the start of the ranks: started by this process, or joined if a launcher started them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from svdpp.driver.rank_hooks import LaunchedRankHooks
from svdpp.driver.shared_settings import shared_settings, silence_limit
from svdpp.driver.supervisor import Observer
from svdpp.errors import ClosedError
from svdpp.launch import fork_server
from svdpp.launch.group import Group
from svdpp.launch.joined import JoinedGroup
from svdpp.launch.joined_rank import serve_joined
from svdpp.launch.started import StartedGroup
from svdpp.launch.world import World
from svdpp.worker.device import device_of
from svdpp.worker.rank import RankSetup, rank_main


class RankLauncher:
    """Starts or joins the ranks of one run.

    Args:
        setup: what every rank gets before it starts.
        backend: of the transfers.
        world: of this process; None if it starts the ranks.
        ignores_signals: see `StartedGroup`. A launcher's ranks ignore them only on rank 0's host.
    """

    def __init__(
        self, setup: RankSetup, backend: str, world: World | None, *, ignores_signals: bool = False
    ) -> None:
        self.world = world
        self._setup = setup
        self._backend = backend
        self._ignores_signals = ignores_signals
        self._joined: JoinedGroup | None = None

    def open(self) -> Group:
        """All ranks, started.

        Raises:
            SvdppError: a launched rank is missing, or was started with other settings.
        """
        if self.world is not None:
            group = self.join()
            group.begin(rank_main, self._setup)
            return group
        checkpoint = self._setup.checkpoint
        preload = fork_server.modules_for(None if checkpoint is None else checkpoint.family)
        return StartedGroup(
            rank_main,
            self._setup,
            world_size=self._setup.config.world_size,
            backend=self._backend,
            device=self._setup.config.device,
            preload=preload,
            ignores_signals=self._ignores_signals,
        )

    def join(self) -> JoinedGroup:
        """The launched ranks, waiting for work. Rank 0 calls it, once or more often.

        Raises:
            ClosedError: no launcher has started this process.
            SvdppError: a rank is missing, or was started with other settings.
        """
        world = self._launched_world()
        config = self._setup.config
        if self._joined is None:
            self._joined = JoinedGroup(
                world=world,
                backend=self._backend,
                shared_settings=shared_settings(config, self._setup.checkpoint),
                start_timeout=config.start_timeout_seconds,
                peer_timeout=silence_limit(config),
            )
        return self._joined

    def dismiss(self, error: BaseException | None) -> None:
        """Ends the other launched ranks, if they have joined or if there is no error.

        A rank that has not joined yet notices that rank 0 is gone.
        """
        if self._joined is not None or (self.world is not None and error is None):
            self.join().kill(error)

    def serve(
        self,
        observers: Sequence[Observer],
        answer: Callable[[bytes], bytes],
        say: Callable[[str, bool], None],
    ) -> None:
        """Works as a launched rank other than 0; see `LaunchedPipeline.serve`.

        Raises:
            ClosedError: no launcher has started this process.
            SvdppError: the work could not begin.
        """
        world, config = self._launched_world(), self._setup.config
        device = device_of(config, world)
        name = f"rank {world.rank} ({device} of {socket.gethostname()})"
        serve_joined(
            rank_main,
            self._setup,
            world=world,
            backend=self._backend,
            shared_settings=shared_settings(config, self._setup.checkpoint),
            start_timeout=config.start_timeout_seconds,
            peer_timeout=silence_limit(config),
            hooks=LaunchedRankHooks(name, world.rank, observers, answer, say),
            ignores_signals=self._ignores_signals and world.on_first_host,
        )

    def _launched_world(self) -> World:
        if self.world is None:
            raise ClosedError("no launcher has started this process: enter the pipeline's block")
        return self.world
