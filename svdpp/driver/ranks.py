"""The ranks of a pipeline: how they start or join, what they must have in common, their devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from svdpp.config import SAMPLING_CLASSES, ModelConfig, PipelineConfig
from svdpp.driver.stalls import silence_limit
from svdpp.driver.supervisor import Observer
from svdpp.errors import ClosedError, RequestError
from svdpp.launch import fork_server, process_group
from svdpp.launch.connections import Terms
from svdpp.launch.group import Group
from svdpp.launch.joined import join_ranks
from svdpp.launch.started import start_ranks
from svdpp.launch.world import World, is_member
from svdpp.models.checkpoint import Checkpoint
from svdpp.worker.clip_metadata import versions
from svdpp.worker.joined_rank import serve_joined
from svdpp.worker.messages import Event, Started
from svdpp.worker.rank import RankSetup, rank_main

#: Fields of the configuration that ranks must agree on: all but those that may differ by host.
_SHARED_FIELDS = frozenset(
    {
        field.name
        for kind in (PipelineConfig, ModelConfig, *SAMPLING_CLASSES.values())
        for field in fields(kind)
    }
    - {"sampling", "loras", "local_files_only", "start_timeout_seconds"}
)


class PipelineRanks:
    """The ranks of one pipeline: started by this process, or joined if a launcher started them.

    Without a launcher, `serve` raises `ClosedError`.

    A launcher's ranks ignore signals (`start_ranks`) only on rank 0's host.
    """

    def __init__(
        self,
        setup: RankSetup,
        backend: str,
        world: World | None,
        *,
        ignores_signals: bool = False,
        shared_paths: Sequence[str] = (),
    ) -> None:
        self.world = world
        """What the launcher says of this process; None if it starts the ranks itself."""
        self.backend = backend
        self._setup = setup
        self._ignores_signals = ignores_signals
        config = setup.config
        self._devices = DeviceCheck(
            config.world_size, backend, allow_mixed=config.allow_mixed_devices
        )
        folders = [setup.latents_folder] if setup.latents_folder else []
        self._shared_paths = (*folders, *shared_paths)
        self._observers: tuple[Observer, ...] = ()

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

    def serve(self, *, say: Callable[[str, bool], None]) -> None:
        """Works as a rank other than 0 until rank 0 ends the work.

        Observers get the events of this rank only. If the run fails, the process ends here.

        `say` takes the last message of a process that ends, and whether no other process reports
        it.
        """
        world = self._launched_world()
        serve_joined(
            rank_main,
            self._setup,
            self._terms(),
            device=process_group.device_of_rank(self._setup.config.device, world),
            observers=self._observers,
            say=say,
            ignores_signals=self._ignores_signals and world.on_first_host,
        )

    def dismiss(self) -> None:
        """Ends the other launched ranks, which have no work. Call it instead of the block."""
        if self.world is not None:
            join_ranks(self._terms(), lambda _context, _setup: None, None).kill()

    def _open(self) -> Group:
        if self.world is not None:
            return join_ranks(self._terms(), rank_main, self._setup)
        checkpoint = self._setup.checkpoint
        preload = fork_server.modules_for(None if checkpoint is None else checkpoint.family)
        return start_ranks(
            rank_main,
            self._setup,
            world_size=self._setup.config.world_size,
            backend=self.backend,
            device=self._setup.config.device,
            preload=preload,
            ignores_signals=self._ignores_signals,
        )

    def _terms(self) -> Terms:
        config = self._setup.config
        return Terms(
            world=self._launched_world(),
            backend=self.backend,
            shared_settings=shared_settings(config, self._setup.checkpoint),
            shared_paths=self._shared_paths,
            start_timeout=config.start_timeout_seconds,
            peer_timeout=silence_limit(config),
        )

    def _launched_world(self) -> World:
        if self.world is None:
            raise ClosedError("no launcher has started this process: enter the pipeline's block")
        return self.world


def shared_settings(config: PipelineConfig, checkpoint: Checkpoint | None) -> dict[str, str]:
    """What must be equal on every rank, by name: options, versions, the model's weights.

    Each host has its own command line, so the ranks compare these when they join.
    """
    parts = {**vars(config), **vars(config.sampling), **vars(config.model)}
    parts["model"] = parts.pop("name")
    options = {
        name.removesuffix("_seconds").replace("_", " "): str(value)
        for name, value in parts.items()
        if name in _SHARED_FIELDS
    }
    # A commit identifies the weights of a hub model, a fingerprint those of a folder.
    weights = (checkpoint.revision, checkpoint.fingerprint) if checkpoint else (None, None)
    options["revision"], options["weights fingerprint"] = map(str, weights)
    options["LoRA"] = ", ".join(file.identity for file in checkpoint.loras) if checkpoint else ""
    return {**options, **{name: str(version) for name, version in versions().items()}}


class DeviceCheck:
    """An observer that collects the ranks' devices and compares them when all have started."""

    def __init__(self, world_size: int, backend: str, *, allow_mixed: bool) -> None:
        self._world_size = world_size
        self._backend = backend
        self._allow_mixed = allow_mixed
        self._started: dict[int, Started] = {}
        self.is_mixed = False
        """Whether ranks differ in what bits depend on; known when all have started."""

    def __call__(self, rank: int, event: Event) -> None:
        """Takes one event."""
        if not isinstance(event, Started):
            return
        self._started[rank] = event
        if len(self._started) == self._world_size:
            self._check_own_gpus()
            for rank, started in sorted(self._started.items()):
                for name, value in started.conditions.items():
                    if value != (first := self._started[0].conditions.get(name)):
                        self._differ(rank, name, value, first)

    def _check_own_gpus(self) -> None:
        owners: dict[str, int] = {}
        for rank, started in sorted(self._started.items()):
            if started.uuid is None or self._backend != "nccl":
                continue
            if (other := owners.setdefault(started.uuid, rank)) != rank:
                raise RequestError(
                    f"ranks {other} and {rank} have the same GPU ({started.uuid}), and NCCL allows "
                    "one rank per GPU",
                    "give each task its own GPU, or use --device cuda:0 to share one over gloo",
                )

    def _differ(self, rank: int, name: str, value: Any, first: Any) -> None:
        self.is_mixed = True
        if not self._allow_mixed:
            raise RequestError(
                f"rank {rank} has {name} {value}, rank 0 has {first}: their bits may differ",
                "use equal GPUs and versions, or --allow-mixed-devices, which marks the clips as "
                "unproven",
            )
