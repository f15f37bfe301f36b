"""Measures the cost of tracing: the same clips with and without `--trace` and `--log-file`.

Ranks report every step, action and transfer in any case. So the options add only work in the
parent: the records of the log, and the events of the trace, which it writes as they arrive.
There are three figures, because the first is only as good as the machine is quiet:

- the ratio of makespans, in alternating rounds (without, with, with, without), with the spread of
  equal rounds;
- the parent's processor time in the same rounds: the difference is what the options add to it;
- the cost of one event's whole path, measured alone in this process: created and sent by the rank;
  read, kept, logged and written to the trace by the parent. Multiplied by the number of events it
  is an upper bound of the share of the makespan, as if the parent ran on the busiest rank's core.

    python tests/bench/trace_cost.py [--world 2] [--clips 4] [--repeats 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from svdpp.cli.log import EventLog, open_log
from svdpp.config import ClipRequest, ModelConfig, PipelineConfig
from svdpp.diagnostics.chrome_trace import TraceFile
from svdpp.driver.pipeline import Pipeline
from svdpp.driver.trace import Trace
from svdpp.worker.messages import ActionDone, Event, StepDone, parse_event

_NUM_EVENTS = 20_000


class Round(NamedTuple):
    """The figures of one run."""

    makespan: float
    parent_seconds: float
    """Processor time of the parent, including its start and end."""
    num_events: int


def run_once(config: PipelineConfig, num_clips: int, folder: Path | None) -> Round:
    """One run with log and trace in `folder`, or without them."""
    num_events = 0
    begun = time.process_time()

    def count(rank: int, event: Event) -> None:  # noqa: ARG001
        nonlocal num_events
        num_events += 1

    if folder is None:
        open_log(verbosity=0, log_file=None)
    else:
        open_log(verbosity=1, write=lambda _: None, log_file=folder / "log.jsonl")
    pipeline = Pipeline(config)
    pipeline.observe(count)
    pipeline.observe(EventLog(config.layout))
    file = None if folder is None else TraceFile(folder / "trace.json", {})
    if file is not None:
        pipeline.observe(file)
    with pipeline:
        pipeline.run([ClipRequest(seed=seed) for seed in range(num_clips)])
    if file is not None:
        file.close()
    makespan = pipeline.trace.summary().makespan
    return Round(makespan, time.process_time() - begun, num_events)


def seconds_an_event(config: PipelineConfig, folder: Path) -> Iterator[tuple[str, float]]:
    """The processor seconds of one step's report, by part."""
    open_log(verbosity=1, write=lambda _: None, log_file=folder / "alone.jsonl")
    trace, log = Trace(config.world_size), EventLog(config.layout)
    file = TraceFile(folder / "alone.json", {})
    reader, writer = os.pipe()
    names = ("rank: make and send", "parent: read and keep", "parent: log", "parent: write trace")
    parts = dict.fromkeys(names, 0.0)
    for step in range(_NUM_EVENTS):
        begun = time.process_time()
        os.write(writer, StepDone(clip=step // 28, step=step % 28, seconds=0.25).to_bytes())
        sent = time.process_time()
        event = parse_event(os.read(reader, 4096))
        trace.add(0, event)
        traced = time.process_time()
        log(0, event)
        logged = time.process_time()
        file(0, event)
        if step % 14 == 13:  # the trace writes the steps of an action when that ends
            end = float(step)
            action = f"DENOISE c{step // 28} {step % 28 - 13}:{step % 28 + 1}"
            file(0, ActionDone(action=action, start=end - 13, end=end, waited=0.0))
        ends = (begun, sent, traced, logged, time.process_time())
        for part, start, end in zip(parts, ends, ends[1:], strict=False):
            parts[part] += end - start
    for part, seconds in parts.items():
        yield part, seconds / _NUM_EVENTS


def main() -> None:
    """Runs in turn, prints each round, the ratio with its noise, and the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--clips", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    config = PipelineConfig(world_size=arguments.world, model=ModelConfig(name="dummy"))
    print(f"torch {torch.__version__}, {arguments.world} ranks of 1 thread, dummy model")
    rounds: dict[bool, list[Round]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as name:
        run_once(config, 1, None)  # warm-up: imports
        for number in range(arguments.repeats):
            for traced in (False, True, True, False):
                done = run_once(config, arguments.clips, Path(name) if traced else None)
                rounds[traced].append(done)
                print(
                    f"round {number}, {'with' if traced else 'without'}: makespan "
                    f"{done.makespan:.2f} s, parent {done.parent_seconds:.3f} s",
                    flush=True,
                )
        costs = dict(seconds_an_event(config, Path(name)))
    (plain, plain_parent, _), (with_both, parent, num_events) = (
        [statistics.median(column) for column in zip(*rounds[traced], strict=True)]
        for traced in (False, True)
    )
    makespans = [each.makespan for each in rounds[False]]
    spread = (max(makespans) - min(makespans)) / plain
    print(f"makespans, with / without: {with_both / plain:.3f}; spread without: {spread:.1%}")
    print(f"parent's processor time: {(parent - plain_parent) / plain:+.3%} of the makespan")
    for part, seconds in costs.items():
        print(f"{part}: {seconds * 1e6:.1f} us an event")
    bound = num_events * sum(costs.values()) / plain
    print(f"{num_events:.0f} events; at most {bound:.3%} of the makespan, {plain:.2f} s")


if __name__ == "__main__":
    main()
