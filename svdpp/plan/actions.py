"""Owns the Action: one thing one rank does for one clip, one line of text each, both ways."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """What a rank can be told to do."""

    ENCODE = "ENCODE"
    """Read the clip's image, encode it, draw its noise: the latent before step 0."""
    LOAD = "LOAD"
    """Read the clip's packet that an earlier run kept after `start` steps."""
    RECV = "RECV"
    """Post the receive of the clip's packet; whatever uses the latent waits for it."""
    DENOISE = "DENOISE"
    """Steps `start` to `end` of the clip."""
    SEND = "SEND"
    """Hand the clip's packet to `peer` in the background."""
    DECODE = "DECODE"
    """Final latent to frames."""
    DELIVER = "DELIVER"
    """Hash the result, write it in the background, and report the clip as finished; in a draft
    wave, the fastest rank's result, which is not the clip yet."""
    LEAP = "LEAP"
    """Send `peer` the latent that step `start`'s derivative reaches in one long step to `end`."""
    TELL = "TELL"
    """Send `peer` the latent before step `start` and its derivative there; after the last step,
    the result."""
    HEAR = "HEAR"
    """Post the receive of what `peer` tells of step `start`; who uses it waits for it."""
    CORRECT = "CORRECT"
    """Mend the latent at step `end` by what `peer` told of step `start`, where the rank last
    began."""
    REVIEW = "REVIEW"
    """Compare the result of `peer` with those before it, and deliver it where it ends the clip."""


class Action(NamedTuple):
    """One entry of a rank's list.

    Args:
        kind: what to do.
        clip: index of the clip, counted from the first one given to the pipeline.
        start: steps of the clip already done when the action begins; for CORRECT, those done where
            the stretch began that it mends.
        end: steps done when it ends; equal to `start` for all but DENOISE, LEAP and CORRECT.
        peer: the other rank of an action that has one; -1 otherwise.
    """

    kind: Kind
    clip: int
    start: int
    end: int
    peer: int = -1

    def __str__(self) -> str:
        place = f"{self.start}:{self.end}" if self.kind in _RANGES else f"@{self.start}"
        arrow = f" {_ARROWS[self.kind]}{self.peer}" if self.kind in _ARROWS else ""
        return f"{self.kind} c{self.clip} {place}{arrow}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that `str()` wrote.

        Raises:
            ValueError: the text is no action.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(f"not an action: {text!r}")
        kind = Kind(match["kind"])
        has_range = kind in _RANGES
        forms = match["end"] is not None, match["at"] is None, match["arrow"]
        if forms != (has_range, has_range, _ARROWS.get(kind)):
            raise ValueError(f"not an action: {text!r}")
        start = int(match["start"])
        end = int(match["end"]) if has_range else start
        return Action(kind, int(match["clip"]), start, end, int(match["peer"] or -1))

    @property
    def is_compute(self) -> bool:
        """Whether the action keeps the rank's device busy."""
        return self.kind in (Kind.ENCODE, Kind.DENOISE, Kind.DECODE)


_RANGES = (Kind.DENOISE, Kind.LEAP, Kind.CORRECT)
_ARROWS = {
    **dict.fromkeys((Kind.SEND, Kind.LEAP, Kind.TELL), ">"),
    **dict.fromkeys((Kind.RECV, Kind.HEAR, Kind.CORRECT, Kind.REVIEW), "<"),
}
_ACTION = re.compile(
    rf"(?P<kind>{'|'.join(Kind)}) c(?P<clip>\d+) (?P<at>@)?(?P<start>\d+)(?::(?P<end>\d+))?"
    r"(?: (?P<arrow>[<>])(?P<peer>\d+))?",
    re.ASCII,
)


def encode(clip: int) -> Action:
    """ENCODE of `clip`."""
    return Action(Kind.ENCODE, clip, 0, 0)


def load(clip: int, at: int) -> Action:
    """LOAD of `clip` with `at` steps done."""
    return Action(Kind.LOAD, clip, at, at)


def recv(clip: int, at: int, peer: int) -> Action:
    """RECV of `clip` with `at` steps done, from rank `peer`."""
    return Action(Kind.RECV, clip, at, at, peer)


def denoise(clip: int, start: int, end: int) -> Action:
    """DENOISE of steps `start` to `end` (exclusive) of `clip`."""
    return Action(Kind.DENOISE, clip, start, end)


def send(clip: int, at: int, peer: int) -> Action:
    """SEND of `clip` with `at` steps done, to rank `peer`."""
    return Action(Kind.SEND, clip, at, at, peer)


def decode(clip: int, at: int) -> Action:
    """DECODE of `clip` with all `at` steps done."""
    return Action(Kind.DECODE, clip, at, at)


def deliver(clip: int, at: int) -> Action:
    """DELIVER of `clip` with all `at` steps done."""
    return Action(Kind.DELIVER, clip, at, at)


def leap(clip: int, start: int, end: int, peer: int) -> Action:
    """LEAP of `clip` from step `start` to step `end`, where rank `peer` begins."""
    return Action(Kind.LEAP, clip, start, end, peer)


def tell(clip: int, at: int, peer: int) -> Action:
    """TELL rank `peer` of `clip` at step `at`."""
    return Action(Kind.TELL, clip, at, at, peer)


def hear(clip: int, at: int, peer: int) -> Action:
    """HEAR from rank `peer` of `clip` at step `at`."""
    return Action(Kind.HEAR, clip, at, at, peer)


def correct(clip: int, begun: int, at: int, peer: int) -> Action:
    """CORRECT `clip` at step `at`, by what rank `peer` told of step `begun`."""
    return Action(Kind.CORRECT, clip, begun, at, peer)


def review(clip: int, at: int, peer: int) -> Action:
    """REVIEW the result of `clip` that rank `peer` has told, all `at` steps done."""
    return Action(Kind.REVIEW, clip, at, at, peer)
