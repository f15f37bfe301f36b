"""What heartbeats and samples of a GPU report, and of whose host the errors of a rank speak."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import Mock

import pynvml
import pytest

from svdpp.errors import InputError
from svdpp.launch import gpus
from svdpp.plan.actions import Action
from svdpp.worker import reporter
from svdpp.worker import reporter as module
from svdpp.worker.messages import ClipFailed, GpuSample, Heartbeat, parse
from svdpp.worker.reporter import Reporter, read_sample

Sent = TypeVar("Sent")


def _next(sent: queue.Queue[bytes], kind: type[Sent]) -> Sent:
    """The next event of that kind."""
    while not isinstance(event := parse(sent.get(timeout=60.0)), kind):
        pass
    return event


def _no_file(device: str) -> int:
    raise OSError(24, f"too many open files for {device}")


def test_memory_is_reported_once_the_rank_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heartbeat goes out even if memory cannot be read: without it the rank counts as dead."""
    sent: queue.Queue[bytes] = queue.Queue()
    reporter = Reporter(Mock(send=sent.put))
    reporter.at(Action.parse("ENCODE c0 @0"))
    assert _next(sent, Heartbeat).memory_bytes is None
    reporter.measure_memory("cpu")
    reporter.at(Action.parse("DENOISE c0 0:2"))
    assert (_next(sent, Heartbeat).memory_bytes or 0) > 2**20
    monkeypatch.setattr(module, "bytes_in_use", _no_file)
    reporter.start()
    assert _next(sent, Heartbeat) == Heartbeat(action="DENOISE c0 0:2")
    reporter.stop()


@pytest.mark.parametrize(
    ("other_host", "message"), [("", "no such file"), ("host1", "on host1: no such file")]
)
def test_a_lost_clip_names_a_host_that_is_not_rank_0s(other_host: str, message: str) -> None:
    channel = Mock()
    Reporter(channel, other_host).clip_failed(3, InputError("no such file"))
    (sent,) = channel.send.call_args.args
    assert parse(sent) == ClipFailed(
        clip=3, error={"type": "InputError", "message": message, "hint": ""}
    )


def _stand_in(**changes: Any) -> Any:
    """A stand-in for the module `pynvml`, with one GPU."""

    def refuse(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    functions: dict[str, Any] = {
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=75, memory=20),
        "nvmlDeviceGetMemoryInfo": lambda _: SimpleNamespace(used=3 * 2**30, total=2**34),
        "nvmlDeviceGetPowerUsage": lambda _: 250_500,
        "nvmlDeviceGetTemperature": lambda _, sensor: 61 if sensor == 0 else 0,
        "nvmlDeviceGetClockInfo": lambda _, clock: 1410 if clock == 1 else 0,
        # Idle (bit 0) is no slowdown; the power cap (bit 2) is.
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0b101,
    }
    for name, value in changes.items():
        functions[name] = refuse if value is None else value
    return SimpleNamespace(**(vars(pynvml) | functions))


def _use(monkeypatch: pytest.MonkeyPatch, nvml: Any) -> None:
    @contextlib.contextmanager
    def opened() -> Iterator[Any]:
        yield nvml

    monkeypatch.setattr(gpus, "open_nvml", opened)
    monkeypatch.setattr(reporter, "SAMPLE_SECONDS", 0.01)


def test_a_sample_has_plain_units_and_survives_the_channel() -> None:
    sample = read_sample(_stand_in(), "GPU-1")
    assert (sample.utilisation, sample.watts) == (0.75, 250.5)
    assert (sample.memory_bytes, sample.celsius, sample.sm_mhz) == (3 * 2**30, 61, 1410)
    assert sample.throttled == 1
    assert parse(sample.to_bytes()) == sample
    assert sample.counters()["gpu power"] == {"W": 250.5}
    assert sample.counters()["gpu load"] == {"percent": 75.0}


def test_what_a_gpu_does_not_give_is_missing() -> None:
    nvml = _stand_in(nvmlDeviceGetPowerUsage=None, nvmlDeviceGetUtilizationRates=None)
    del nvml.nvmlDeviceGetClockInfo  # the module of an old driver
    sample = read_sample(nvml, "GPU-1")
    assert (sample.utilisation, sample.watts, sample.sm_mhz) == (None, None, None)
    assert "gpu power" not in sample.counters()
    assert sample.celsius == 61


def test_the_thread_samples_until_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _stand_in())
    sent: queue.Queue[bytes] = queue.Queue()
    reporter = _sampling("1", Mock(send=sent.put))
    found = [_next(sent, GpuSample) for _ in range(3)]
    reporter.stop()
    assert found[0].when < found[1].when < found[2].when
    for thread in _samplers():  # `stop` waits no longer than a sample takes
        thread.join(10)
    assert not _samplers()


@pytest.mark.parametrize("nvml", [None, _stand_in(nvmlDeviceGetHandleByUUID=None)])
def test_without_nvml_there_is_nothing(nvml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, nvml)
    channel = Mock()
    reporter = _sampling("GPU-1", channel)
    for thread in _samplers():
        thread.join(timeout=60)
    reporter.stop()
    kinds = {type(parse(call.args[0])) for call in channel.send.call_args_list}
    assert kinds == {Heartbeat}


def _sampling(uuid: str, channel: Any) -> Reporter:
    reporter = Reporter(channel)
    reporter.start()
    reporter.sample_gpu(uuid)
    return reporter


def _samplers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "sampler"]
