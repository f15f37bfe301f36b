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
    """Hash the result, write it in the background, and report the clip as finished."""


class Action(NamedTuple):
    """One entry of a rank's list.

    Args:
        kind: what to do.
        clip: index of the clip, counted from the first one given to the pipeline.
        start: steps of the clip already done when the action begins.
        end: steps done when it ends; equal to `start` for all but DENOISE.
        peer: the other rank of a RECV or SEND; -1 otherwise.
    """

    kind: Kind
    clip: int
    start: int
    end: int
    peer: int = -1

    def __str__(self) -> str:
        if self.kind is Kind.DENOISE:
            return f"DENOISE c{self.clip} {self.start}:{self.end}"
        if self.kind in (Kind.RECV, Kind.SEND):
            return f"{self.kind} c{self.clip} @{self.start} {_ARROWS[self.kind]}{self.peer}"
        return f"{self.kind} c{self.clip} @{self.start}"

    @staticmethod
    def parse(text: str) -> Action:
        """The action that `str()` wrote.

        Raises:
            ValueError: the text is no action.
        """
        match = _ACTION.fullmatch(text)
        if match is None or match["arrow"] != _ARROWS.get(match["hop"]):
            raise ValueError(f"not an action: {text!r}")
        if match["steps"]:
            return Action(Kind.DENOISE, int(match["clip"]), int(match["start"]), int(match["end"]))
        kind = Kind(match["hop"] or match["local"])
        peer = int(match["peer"]) if match["hop"] else -1
        return Action(kind, int(match["clip"]), int(match["at"]), int(match["at"]), peer)

    @property
    def is_compute(self) -> bool:
        """Whether the action keeps the rank's device busy."""
        return self.kind in (Kind.ENCODE, Kind.DENOISE, Kind.DECODE)


_ARROWS: dict[str | None, str] = {Kind.RECV: "<", Kind.SEND: ">"}
_ACTION = re.compile(
    r"(?:(?P<steps>DENOISE)|(?P<hop>RECV|SEND)|(?P<local>ENCODE|LOAD|DECODE|DELIVER)) "
    r"c(?P<clip>\d+) (?(steps)(?P<start>\d+):(?P<end>\d+)|@(?P<at>\d+))"
    r"(?(hop) (?P<arrow>[<>])(?P<peer>\d+))",
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
