"""What a rank's heartbeats report, and of whose host its errors speak."""

from __future__ import annotations

import queue
from typing import cast
from unittest.mock import Mock

import pytest

from svdpp.errors import InputError
from svdpp.launch.group import Channel
from svdpp.plan.actions import Action
from svdpp.worker import reporter as module
from svdpp.worker.messages import ClipFailed, Heartbeat, parse_event
from svdpp.worker.reporter import Reporter


class _Channel:
    def __init__(self) -> None:
        self._sent: queue.Queue[bytes] = queue.Queue()

    def send(self, message: bytes) -> None:
        self._sent.put(message)

    def heartbeat(self) -> Heartbeat:
        event = parse_event(self._sent.get(timeout=60.0))
        assert isinstance(event, Heartbeat)
        return event


def _no_file(device: str) -> int:
    raise OSError(24, f"too many open files for {device}")


def test_memory_is_reported_once_the_rank_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat goes out even if memory cannot be read: without it the rank counts as dead."""
    channel = _Channel()
    reporter = Reporter(cast("Channel", channel))
    reporter.at(Action.parse("ENCODE c0 @0"))
    assert channel.heartbeat().memory_bytes is None
    reporter.measure_memory("cpu")
    reporter.at(Action.parse("DENOISE c0 0:2"))
    assert (channel.heartbeat().memory_bytes or 0) > 2**20
    monkeypatch.setattr(module, "bytes_in_use", _no_file)
    reporter.start()
    assert channel.heartbeat() == Heartbeat(action="DENOISE c0 0:2")
    reporter.stop()


@pytest.mark.parametrize(
    ("other_host", "message"), [("", "no such file"), ("host1", "on host1: no such file")]
)
def test_a_lost_clip_names_a_host_that_is_not_rank_0s(other_host: str, message: str) -> None:
    channel = Mock()
    Reporter(channel, other_host).clip_failed(3, InputError("no such file"))
    (sent,) = channel.send.call_args.args
    assert parse_event(sent) == ClipFailed(
        clip=3, error={"type": "InputError", "message": message, "hint": ""}
    )
