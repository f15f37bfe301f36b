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
    """Read the latent checkpoint that an earlier run wrote after `start` steps."""
    RECV = "RECV"
    """Post the receive of the clip's packet; the action that uses the latent waits for it."""
    DENOISE = "DENOISE"
    """Do steps `start` to `end` of the clip."""
    SEND = "SEND"
    """Send the clip's packet to `peer` in the background."""
    DECODE = "DECODE"
    """Turn the final latent into frames."""
    FINISH = "FINISH"
    """Hash the result, write it in the background, and report the clip as finished. In a draft:
    write the fastest rank's result as the draft."""
    SEND_START = "SEND_START"
    """Draft: send `peer` the latent at step `end` that one long step from `start` reaches."""
    SEND_STATE = "SEND_STATE"
    """Draft: send `peer` the latent before step `start` and its derivative there."""
    SEND_RESULT = "SEND_RESULT"
    """Draft: send `peer` the final latent and its frames."""
    RECV_STATE = "RECV_STATE"
    """Draft: post the receive of what `peer` sends by SEND_STATE of step `start`."""
    RECV_RESULT = "RECV_RESULT"
    """Draft: post the receive of what `peer` sends by SEND_RESULT."""
    CORRECT = "CORRECT"
    """Draft: correct the latent at step `end` by the state of step `start` that `peer` sent."""
    COMPARE = "COMPARE"
    """Draft: compare the result of `peer` with those before it; write it if it ends the clip."""


class Action(NamedTuple):
    """One entry of a rank's list.

    Args:
        kind: what to do.
        clip: index of the clip, counted from the first one given to the pipeline.
        start: steps of the clip already done when the action begins; for CORRECT, the step whose
            state it corrects by.
        end: steps done when it ends; equal to `start` for all but DENOISE, SEND_START and CORRECT.
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


#: Actions that send a packet, and actions that post the receive of one.
SENDS = (Kind.SEND, Kind.SEND_START, Kind.SEND_STATE, Kind.SEND_RESULT)
RECEIVES = (Kind.RECV, Kind.RECV_STATE, Kind.RECV_RESULT)

_RANGES = (Kind.DENOISE, Kind.SEND_START, Kind.CORRECT)
_ARROWS = {
    **dict.fromkeys(SENDS, ">"),
    **dict.fromkeys((*RECEIVES, Kind.CORRECT, Kind.COMPARE), "<"),
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


def finish(clip: int, at: int) -> Action:
    """FINISH of `clip` with all `at` steps done."""
    return Action(Kind.FINISH, clip, at, at)


def send_start(clip: int, start: int, end: int, peer: int) -> Action:
    """SEND_START of `clip` from step `start` to step `end`, where rank `peer` begins."""
    return Action(Kind.SEND_START, clip, start, end, peer)


def send_state(clip: int, at: int, peer: int) -> Action:
    """SEND_STATE of `clip` before step `at`, to rank `peer`."""
    return Action(Kind.SEND_STATE, clip, at, at, peer)


def send_result(clip: int, at: int, peer: int) -> Action:
    """SEND_RESULT of `clip` with all `at` steps done, to rank `peer`."""
    return Action(Kind.SEND_RESULT, clip, at, at, peer)


def recv_state(clip: int, at: int, peer: int) -> Action:
    """RECV_STATE of `clip` before step `at`, from rank `peer`."""
    return Action(Kind.RECV_STATE, clip, at, at, peer)


def recv_result(clip: int, at: int, peer: int) -> Action:
    """RECV_RESULT of `clip` with all `at` steps done, from rank `peer`."""
    return Action(Kind.RECV_RESULT, clip, at, at, peer)


def correct(clip: int, begun: int, at: int, peer: int) -> Action:
    """CORRECT of `clip` at step `at`, by the state of step `begun` from rank `peer`."""
    return Action(Kind.CORRECT, clip, begun, at, peer)


def compare(clip: int, at: int, peer: int) -> Action:
    """COMPARE of `clip` with all `at` steps done: the result of rank `peer`."""
    return Action(Kind.COMPARE, clip, at, at, peer)
