"""The advice of a report: what would help a run, by forecast, with the command to type."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from svdpp.config.limits import MAX_CLIPS
from svdpp.diagnostics.bottleneck import Finding, FindingKind
from svdpp.diagnostics.figures import RunFigures, head_rooms
from svdpp.errors import RequestError
from svdpp.plan.choose import choose_layout
from svdpp.plan.large_forecast import forecast_layout
from svdpp.plan.layout import Layout

#: A smaller gain is within the noise of a forecast.
WORTH_A_CHANGE = 1.05
# A larger decode chunk needs more memory: this share must be free.
_ROOM_FOR_A_CHUNK = 0.3
# A forecast of more clips takes longer, and says no more.
_CLIPS_PER_RANK = 16
_DEFAULTS = {"layout": "pipeline", "split": "uniform", "replicas": "1", "decoders": "1"}
# `--layout data-parallel` allows none of these.
_REFINEMENTS = {"split", "replicas", "decoders"}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One thing that would help."""

    text: str
    short: str = ""
    """The same for one line of a terminal; empty: `text` fits."""
    command: str = ""
    """To type; empty if no command of svdpp does it."""
    times_as_fast: float | None = None
    """By forecast; None if nothing forecasts it."""
    kinds: tuple[FindingKind, ...] = ()
    """The findings that it answers; empty: any."""


class Again(Protocol):
    """Builds the command that makes the same clips with other settings."""

    costs: str
    """The file with the measured costs."""

    def __call__(self, *changes: str) -> str:
        """The command with these changes."""
        ...

    def layout(self, layout: Layout) -> list[str]:
        """The changes to another layout."""
        ...

    def ranks(self, number: int) -> str:
        """The change to another number of ranks."""
        ...

    def threads(self, number: int) -> str:
        """The change to another number of threads for each rank."""
        ...

    def decode_chunk(self, frames: int | None) -> str:
        """The change to another decode chunk; None: the largest that fits; "" if it is that."""
        ...


class RunAgain:
    """The command for a run.

    Args:
        manifest: path of its manifest.
        options: of the run, by parameter, as in its manifest.
    """

    def __init__(self, manifest: str, options: Mapping[str, Any]) -> None:
        self.costs = manifest
        self._options = options

    def __call__(self, *changes: str) -> str:
        """See `Again`."""
        return " ".join(["svdpp run --from", shlex.quote(self.costs), *changes, "--out out-again"])

    def layout(self, layout: Layout) -> list[str]:
        """See `Again`."""
        if layout.replica_size == 1 and not self._options.keys() & _REFINEMENTS:
            return ["--layout data-parallel"]
        wanted = {
            "layout": "pipeline",
            "split": layout.split,
            "replicas": str(layout.replicas),
            "decoders": str(layout.decoders),
        }
        given = {**_DEFAULTS, **{name: str(value) for name, value in self._options.items()}}
        changes = [f"--{name} {value}" for name, value in wanted.items() if given[name] != value]
        return [*changes, f"--costs {shlex.quote(self.costs)}"]

    def ranks(self, number: int) -> str:
        """See `Again`."""
        return f"--world {number}"

    def threads(self, number: int) -> str:
        """See `Again`."""
        return f"--threads {number}"

    def decode_chunk(self, frames: int | None) -> str:
        """See `Again`."""
        if frames is None and self._options.get("decode_chunk_size") == "auto":
            return ""
        return f"--decode-chunk-size {frames or 'auto'}"


def advise(figures: RunFigures, findings: Sequence[Finding], again: Again) -> list[Advice]:
    """What would help, the most helpful by forecast first.

    Args:
        figures: what was measured.
        findings: of `find_limits`.
        again: builds commands.
    """
    kinds = {finding.kind for finding in findings}
    by_forecast: list[Advice] = []
    if figures.forecast.afterwards:
        by_forecast = [*_layout(figures, again), *_ranks(figures, again)]
    by_forecast.sort(key=lambda advice: -(advice.times_as_fast or 0))
    rules = [advice for advice in _rules(figures, again) if kinds & set(advice.kinds)]
    return [*by_forecast, *rules, *_free_cores(figures, again)]


# 1. By forecast.


def _layout(figures: RunFigures, again: Again) -> Iterator[Advice]:
    """The layout that finishes the same clips first on the same ranks."""
    best = _best(figures, figures.world_size)
    if best is None:
        return
    layout, times = best
    if times < WORTH_A_CHANGE:
        return
    fits = "; each device needs room for the whole model" if layout.replica_size == 1 else ""
    yield Advice(
        text=f"at the measured costs, {layout} would be {times:.2f} times as fast{fits}",
        short=f"{layout}, {times:.2f} times as fast",
        command=again(*again.layout(layout)),
        times_as_fast=times,
    )


def _ranks(figures: RunFigures, again: Again) -> Iterator[Advice]:
    """More ranks if the machine has room for them; fewer if that costs nothing.

    None if the ranks differ: nobody has measured which of them another number would take.
    """
    world = figures.world_size
    if figures.costs.differ_by_rank:
        return
    more = min(2 * world, _most_ranks(figures))
    best = _best(figures, more) if more > world else None
    if best is not None and best[1] >= WORTH_A_CHANGE:
        yield Advice(
            text=f"{more} ranks, for which this machine has room, would be {best[1]:.2f} times as "
            f"fast, as {best[0]}",
            short=f"{more} ranks, {best[0]}, {best[1]:.2f} times as fast",
            command=again(again.ranks(more), *again.layout(best[0])),
            times_as_fast=best[1],
        )
    for fewer in sorted({1, world // 4, world // 2, world - 1} - {0, world}):
        best = _best(figures, fewer)
        if best is not None and best[1] >= 1 / WORTH_A_CHANGE:
            yield Advice(
                text=f"{fewer} of {world} ranks would do, as {best[0]}, {best[1]:.2f} times as "
                "fast",
                short=f"{fewer} of {world} ranks, {best[0]}, {best[1]:.2f} times as fast",
                command=again(again.ranks(fewer), *again.layout(best[0])),
                times_as_fast=best[1],
            )
            return


def _most_ranks(figures: RunFigures) -> int:
    if figures.device == "cpu":
        return figures.usable_cores // figures.num_threads
    return figures.num_devices if figures.device == "cuda" else 0


def _best(figures: RunFigures, world_size: int) -> tuple[Layout, float] | None:
    """The best layout on that many ranks, and how many times as fast as the run it would be.

    Both sides are forecasts, so that what no forecast knows of is in neither.
    """
    clips = min(figures.clips, _CLIPS_PER_RANK * figures.world_size)
    assert figures.forecast.afterwards is not None
    now = figures.forecast.afterwards * clips / figures.clips
    try:
        layout = choose_layout(
            num_steps=figures.num_steps,
            world_size=world_size,
            num_clips=clips,
            costs=figures.costs,
            decodes=figures.decodes,
        ).layout
        return layout, now / forecast_layout(layout, clips).makespan
    except (RequestError, ZeroDivisionError):
        return None


# 2. By rule.


def _rules(figures: RunFigures, again: Again) -> Iterator[Advice]:
    cores_each = max(1, figures.usable_cores // figures.world_size)
    if cores_each < figures.num_threads:
        threads = "1 thread" if cores_each == 1 else f"{cores_each} threads"
        yield Advice(
            text=f"{threads} a rank fit the cores; the clips get other bits",
            command=again(again.threads(cores_each)),
            kinds=("too_many_threads",),
        )
    yield Advice(
        short="end the other processes, or run at another time",
        text="end the other processes, or run at another time: the forecasts here assume that "
        "the ranks stay as slow as they were",
        kinds=("shared_cores", "busy_machine"),
    )
    yield Advice(
        text="cool the GPU or raise its power limit: svdpp cannot do either",
        kinds=("throttled",),
    )
    chunk, frames = figures.decode_chunk_size, figures.frames
    has_room = all(room.free_share >= _ROOM_FOR_A_CHUNK for room in head_rooms(figures))
    larger = again.decode_chunk(None)
    if 0 < chunk < frames and has_room and larger:
        yield Advice(
            short=f"decode more than {chunk} of {frames} frames at a time, for other bits",
            text=f"decode more than {chunk} of {frames} frames at a time, as memory allows; the "
            "clips get other bits",
            command=again(larger),
            kinds=("decode",),
        )
    if chunk > 1:
        yield Advice(
            text="decode fewer frames at a time; the clips get other bits",
            command=again(again.decode_chunk(chunk // 2)),
            kinds=("memory",),
        )
    yield Advice(
        short="copy the images to a local disk, or make them smaller",
        text="copy the photographs to a local disk, or make them smaller: a rank reads one ahead",
        kinds=("photographs",),
    )
    yield Advice(
        text="write to a faster disk: name a folder on it with --out",
        kinds=("disk",),
    )
    yield Advice(
        short="make more clips in one run",
        text="make more clips in one run: all ranks work only between the first clip and the last",
        command=f"svdpp plan --compare --clips {min(10 * figures.clips, MAX_CLIPS)} "
        f"--steps {figures.num_steps} --world {figures.world_size} "
        f"--costs {shlex.quote(again.costs)}",
        kinds=("few_clips",),
    )
    model = figures.model.get("name")
    named = f" --model {shlex.quote(model)}" if isinstance(model, str) else ""
    yield Advice(
        text="keep the ranks between runs: a service loads the model once",
        command=f"svdpp serve --gpus {figures.world_size} --device {figures.device}{named}",
        kinds=("start_up",),
    )


def _free_cores(figures: RunFigures, again: Again) -> Iterator[Advice]:
    """More threads, if the CPU ranks leave cores free."""
    if figures.device != "cpu":
        return
    each = figures.usable_cores // figures.world_size
    if each > figures.num_threads:
        yield Advice(
            text=f"{figures.usable_cores - figures.world_size * figures.num_threads} of "
            f"{figures.usable_cores} cores have no thread; the clips get other bits",
            command=again(again.threads(each)),
        )
