"""Rank tasks: ranks that start for one function, report on it, and end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from svdpp.config import PipelineConfig
from svdpp.driver.supervisor import Observer, Supervisor
from svdpp.launch import process_group
from svdpp.launch.group import RankContext
from svdpp.launch.started import StartedGroup
from svdpp.worker.device import take_device
from svdpp.worker.memory import peak_bytes
from svdpp.worker.messages import Finished
from svdpp.worker.reporter import Reporter

#: Runs in a rank, under a run's settings. It takes the rank's context, device and reporter, the
#: configuration, and an argument. It reports `Joined` when it is ready.
RankTask = Callable[[RankContext, str, Reporter, PipelineConfig, Any], None]


def run_rank_task(
    task: RankTask,
    config: PipelineConfig,
    argument: Any,
    *,
    until: Callable[[], bool],
    observers: Sequence[Observer] = (),
    preload: Sequence[str] = (),
) -> None:
    """Starts the ranks of `config`, has each perform the task, and ends them.

    The task is a module-level function, so that another process can import it. `until` says,
    after each report, whether it is complete. The fork server imports `preload` once for all
    ranks.
    """
    process_group.check_devices(config.device, config.world_size)
    group = StartedGroup(
        _main,
        (task, config, argument),
        world_size=config.world_size,
        backend=process_group.choose_backend(config.device, config.world_size),
        device=config.device,
        preload=preload,
    )
    supervisor = Supervisor(group, config, *observers)
    try:
        supervisor.supervise(until)
    finally:
        supervisor.kill()


def _main(context: RankContext, call: tuple[RankTask, PipelineConfig, Any]) -> None:
    task, config, argument = call
    reporter = Reporter(context.channel)
    reporter.start()
    try:
        device = str(take_device(config, context.world))
        task(context, device, reporter, config, argument)
    except BaseException as error:
        reporter.failed(error)
        raise
    while context.channel.receive(1.0) is None:
        pass  # waits for the parent's Stop; if the parent dies, this process ends with it
    allocated, reserved = peak_bytes(device)
    reporter.send(Finished(allocated_bytes=allocated, reserved_bytes=reserved))
    reporter.stop()
    context.leave()
