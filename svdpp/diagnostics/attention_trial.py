"""Trial of attention backends in two processes, to find backends that are not deterministic."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from svdpp.config import DUMMY_MODEL, ModelConfig, PipelineConfig, SvdSampling
from svdpp.driver.supervisor import Supervisor
from svdpp.errors import RequestError, SvdppError, error_from_dict, error_to_dict
from svdpp.launch.worker_group import LaunchContext, start_ranks
from svdpp.models.base import DTYPES
from svdpp.worker.background import Reporter
from svdpp.worker.device import gpu_uuid
from svdpp.worker.messages import Event, Joined, Started
from svdpp.worker.rank import run_rank, wait_for_stop

_NUM_PROCESSES = 2
_DTYPES = ("fp32", "bf16")
#: Backend that is tried only if the configuration names it, because its first call imports torch's
#: compiler, which takes seconds.
_SLOW_BACKEND = "flex"


@dataclass(frozen=True, kw_only=True)
class BackendTrial:
    """Result of trying one attention backend on a device: whether equal inputs give equal bits."""

    name: str
    is_chosen: bool
    """Whether the configuration names this backend."""
    dtypes: tuple[str, ...] = ()
    """Dtypes in which the backend runs on the device."""
    other_bits_in: tuple[str, ...] = ()
    """Dtypes in which equal inputs gave different bits."""
    error: SvdppError | None = None
    """Error of the chosen backend, if it cannot be used on the device; None: it can be used."""


@dataclass(frozen=True, kw_only=True)
class _TrialSetup:
    config: PipelineConfig
    chosen: str | None
    chosen_dtype: str


def try_backends(config: PipelineConfig) -> list[BackendTrial]:
    """Try attention backends on a configuration's first device: do equal inputs give equal bits?

    Two processes compute the attention of the same inputs, several times each.

    Args:
        config: Configuration with the device, the threads, and the chosen backend.

    Returns:
        Trials in the order of diffusers' list. A backend that runs in no dtype is left out, except
        the chosen one.

    Raises:
        RankError: A process died or stalled.
    """
    trial_config = replace(
        config.single_rank(),
        world_size=_NUM_PROCESSES,
        device="cuda:0" if config.device == "cuda" else config.device,
        model=ModelConfig(name=DUMMY_MODEL),
        sampling=SvdSampling(num_inference_steps=_NUM_PROCESSES),
        expert_boundary=None,
    )
    setup = _TrialSetup(
        config=trial_config, chosen=config.model.attention_backend, chosen_dtype=config.model.dtype
    )
    results = _run_processes(setup)
    trials = (_trial_of(name, setup, [each[name] for each in results]) for name in results[0])
    return [trial for trial in trials if trial is not None]


def _run_processes(setup: _TrialSetup) -> list[Mapping[str, Any]]:
    """Run both processes of an attention trial; return their hashes or errors."""
    config = setup.config
    found: dict[int, Mapping[str, Any]] = {}

    def collect(rank: int, event: Event) -> None:
        if isinstance(event, Started):
            found[rank] = event.conditions

    group = start_ranks(
        _trial_main,
        setup,
        world_size=_NUM_PROCESSES,
        # any backend of torch.distributed will do, because the processes exchange no data
        backend="gloo",
        device=config.device,
        start_timeout=config.start_timeout_seconds,
    )
    supervisor = Supervisor(group, config, collect)
    try:
        supervisor.supervise(lambda: len(found) == _NUM_PROCESSES)
    finally:
        supervisor.kill()
    return [found[rank] for rank in sorted(found)]


def _trial_main(launch: LaunchContext, setup: _TrialSetup) -> None:
    def try_all(device: torch.device, reporter: Reporter) -> None:
        begun, name = time.monotonic(), str(device)
        reporter.device = name
        reporter.set_phase("trying attention backends")
        results = _try_all(name, setup)
        reporter.send(Started(device=name, uuid=gpu_uuid(name), conditions=results))
        reporter.send(Joined(device=name, load_seconds=time.monotonic() - begun))
        wait_for_stop(launch.channel)

    run_rank(launch, setup.config, try_all)


def _try_all(device: str, setup: _TrialSetup) -> dict[str, Any]:
    # This imports diffusers, which takes seconds; only the processes of the trial need it.
    from svdpp.models.engine.attention import attention_hashes, usable_backends

    results: dict[str, Any] = {}
    for name in usable_backends():
        if name == _SLOW_BACKEND and name != setup.chosen:
            continue
        results[name] = {}
        for dtype in dict.fromkeys((*_DTYPES, setup.chosen_dtype)):
            try:
                results[name][dtype] = attention_hashes(name, device, DTYPES[dtype])
            except RequestError as error:
                results[name][dtype] = error_to_dict(error)
    return results


def _trial_of(
    name: str, setup: _TrialSetup, results: Sequence[Mapping[str, Any]]
) -> BackendTrial | None:
    """Return the trial of an attention backend; None if it runs in no dtype and is not chosen.

    Args:
        name: Name of the backend.
        setup: Setup of the processes.
        results: For each process, the hashes or the error (a dict) by dtype.
    """
    is_chosen = name == setup.chosen
    first = results[0][setup.chosen_dtype]
    if is_chosen and not isinstance(first, list):
        return BackendTrial(name=name, is_chosen=True, error=error_from_dict(first))
    dtypes, other_bits_in = [], []
    for dtype in results[0]:
        found = [each[dtype] for each in results]
        if not all(isinstance(hashes, list) for hashes in found):
            continue
        dtypes.append(dtype)
        if len(set(chain(*found))) > 1:
            other_bits_in.append(dtype)
    if not dtypes:
        return None
    return BackendTrial(
        name=name,
        is_chosen=is_chosen,
        dtypes=tuple(dtypes),
        other_bits_in=tuple(other_bits_in),
    )
