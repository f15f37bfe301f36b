"""Owns the comparison of the ranks' devices at their start: equal bits need equal devices."""

from __future__ import annotations

from typing import Any

from svdpp.errors import RequestError
from svdpp.worker.messages import Event, Started


class DeviceCheck:
    """An observer that collects the ranks' devices and compares them when all have started.

    Args:
        world_size: number of ranks.
        backend: of the transfers; NCCL does not allow two ranks on one GPU.
        allow_mixed: whether ranks may differ in what bits depend on.
    """

    def __init__(self, world_size: int, backend: str, *, allow_mixed: bool) -> None:
        self._world_size = world_size
        self._backend = backend
        self._allow_mixed = allow_mixed
        self._started: dict[int, Started] = {}
        self.is_mixed = False
        """Whether ranks differ in what bits depend on; known when all have started."""

    def __call__(self, rank: int, event: Event) -> None:
        """Takes one event.

        Raises:
            RequestError: the ranks' devices do not fit together.
        """
        if not isinstance(event, Started):
            return
        self._started[rank] = event
        if len(self._started) == self._world_size:
            self._check_own_gpus()
            self._check_conditions()

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

    def _check_conditions(self) -> None:
        first = self._started[0].conditions
        for rank, started in sorted(self._started.items()):
            for name, value in started.conditions.items():
                if value != first.get(name):
                    self._differ(rank, name, value, first.get(name))

    def _differ(self, rank: int, name: str, value: Any, first: Any) -> None:
        self.is_mixed = True
        if not self._allow_mixed:
            raise RequestError(
                f"rank {rank} has {name} {value}, rank 0 has {first}: their bits may differ",
                "use equal GPUs and versions, or --allow-mixed-devices, which marks the clips as "
                "unproven",
            )
