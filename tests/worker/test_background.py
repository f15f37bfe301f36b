"""Background threads of a rank: heartbeats, reports, reading of images, and ordered calls."""

from __future__ import annotations

import queue
import threading
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from svdpp.comm import streams
from svdpp.config import ClipRequest, SamplingConfig, SvdSampling
from svdpp.errors import InputError
from svdpp.media import inputs as files
from svdpp.plan.actions import Action
from svdpp.worker import background
from svdpp.worker.background import BoundedExecutor, ImageReader, Reporter
from svdpp.worker.messages import ClipFailed, Heartbeat, parse

Sent = TypeVar("Sent")


def _next_event(sent: queue.Queue[bytes], kind: type[Sent]) -> Sent:
    """Return the next event of class `kind` that a rank's threads have sent."""
    while not isinstance(event := parse(sent.get(timeout=60.0)), kind):
        pass
    return event


def test_memory_is_reported_once_the_rank_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats have the memory in use as soon as the rank has a device.

    A heartbeat is sent even if memory cannot be read, because a rank without heartbeats counts as
    dead.
    """
    sent = queue.Queue[bytes]()
    reporter = Reporter(Mock(send=sent.put))
    reporter.set_position(Action.parse("ENCODE c0 @0"))
    assert _next_event(sent, Heartbeat).memory_bytes is None
    reporter.device = "cpu"
    reporter.set_position(Action.parse("DENOISE c0 0:2"))
    assert (_next_event(sent, Heartbeat).memory_bytes or 0) > 2**20
    monkeypatch.setattr(background, "bytes_in_use", Mock(side_effect=OSError("too many files")))
    reporter.start()
    assert _next_event(sent, Heartbeat) == Heartbeat(action="DENOISE c0 0:2")
    reporter.stop()


def test_a_lost_clip_names_a_host_that_is_not_rank_0s() -> None:
    channel = Mock()
    Reporter(channel, "host1").report_clip_failure(3, InputError("no such file"))
    (sent,) = channel.send.call_args.args
    error = {"type": "InputError", "message": "on host1: no such file", "hint": ""}
    assert parse(sent) == ClipFailed(clip=3, error=error)


def test_each_thread_beside_the_work_takes_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, took = torch.device("cuda:1"), dict[str, torch.device]()
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda d: took.update({threading.current_thread().name: d})
    )
    monkeypatch.setattr(background, "SideStream", Mock())
    executor, names = BoundedExecutor("writer", gpu, Mock()), list[str]()
    executor.submit(lambda: names.append(threading.current_thread().name))
    executor.finish()
    assert took == {names[0]: gpu}
    link = streams.single_thread_executor("to-1", gpu)
    assert took[link.submit(lambda: threading.current_thread().name).result()] == gpu


SAMPLING = SvdSampling(height=16, width=24, num_frames=2)
CPU = torch.device("cpu")


def _first_pixel(image: Image.Image, _: SamplingConfig) -> dict[str, torch.Tensor]:
    """Return the first pixel's colour, as a stand-in for a model's preparation of the image."""
    return {"pixel": torch.tensor(image.getpixel((0, 0)))}


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    made = [tmp_path / f"{shade}.png" for shade in (10, 20, 30)]
    for path in made:
        Image.new("RGB", (48, 32), (int(path.stem),) * 3).save(path)
    return made


def _requests(paths: list[Path]) -> list[tuple[int, ClipRequest]]:
    return [
        (clip, ClipRequest(seed=0, image=str(path), sampling=SAMPLING))
        for clip, path in enumerate(paths)
    ]


def test_photographs_are_read_in_order_one_ahead_and_no_more(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, read_bytes = list[str](), files.read_bytes
    monkeypatch.setattr(files, "read_bytes", lambda p: read.append(p.stem) or read_bytes(p))
    reader = ImageReader(_first_pixel, CPU)
    reader.enqueue(_requests(paths)[:2])
    reader.enqueue([_requests(paths)[2], (3, ClipRequest(seed=1, sampling=SAMPLING))])
    for clip, shades in enumerate((["10", "20"], ["10", "20", "30"], ["10", "20", "30"])):
        assert reader.take(clip)["pixel"].tolist() == [10 * clip + 10] * 3
        reader._thread.submit(int).result()  # wait for earlier calls
        assert read == shades
    assert reader.take(3) == {}
    reader.close()


def test_others_go_first_while_a_photograph_is_prepared_early(paths: list[Path]) -> None:
    may_end, prepared = threading.Event(), threading.Event()
    shades: list[object] = []

    def slow(image: Image.Image, sampling: SamplingConfig) -> dict[str, torch.Tensor]:
        shades.append(image.getpixel((0, 0)))
        assert image.getpixel((0, 0)) != (10, 10, 10) or may_end.wait(30)
        return _first_pixel(image, sampling)

    reader = ImageReader(slow, CPU)
    large, *small = (request for _, request in _requests(paths))
    reader.prepare_early(large, lambda _: prepared.set())
    reader.enqueue(enumerate(small))
    assert [reader.take(clip)["pixel"].tolist()[0] for clip in (0, 1)] == [20, 30]
    assert not prepared.is_set()
    may_end.set()
    assert prepared.wait(30)
    reader.enqueue([(2, replace(large, seed=5)), (3, replace(large, image=str(paths[1])))])
    assert [reader.take(clip)["pixel"].tolist()[0] for clip in (2, 3)] == [10, 20]
    assert shades.count((10, 10, 10)) == 1
    reader.close()


def test_an_early_image_that_cannot_be_prepared_has_no_time(paths: list[Path]) -> None:
    """A failure has no seconds, and `close` cancels what has not begun without a report."""
    seconds = queue.Queue[float | None]()
    has_begun, may_end = threading.Event(), threading.Event()

    def slow(image: Image.Image, sampling: SamplingConfig) -> dict[str, torch.Tensor]:
        has_begun.set()
        assert may_end.wait(30)
        return _first_pixel(image, sampling)

    reader = ImageReader(slow, CPU)
    first, second = (request for _, request in _requests(paths[:2]))
    reader.prepare_early(replace(first, image="gone.png"), seconds.put)
    assert seconds.get(timeout=30) is None
    reader.prepare_early(first, seconds.put)
    assert has_begun.wait(30)
    reader.prepare_early(second, seconds.put)
    reader.close()
    may_end.set()
    assert isinstance(seconds.get(timeout=30), float)
    reader._early_thread.shutdown(wait=True)
    assert seconds.empty()


def test_a_photograph_that_was_changed_spoils_no_other(paths: list[Path]) -> None:
    reader = ImageReader(_first_pixel, CPU)
    first, (_, second) = _requests(paths[:2])
    reader.enqueue([first, (1, replace(second, image_sha256="0" * 64)), (2, second)])
    assert reader.take(0)
    with pytest.raises(InputError, match="has changed since the run began"):
        reader.take(1)
    assert reader.take(2)
    reader.close()
