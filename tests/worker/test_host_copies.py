"""Tensors are copied to the host by `streams` before they are hashed, compared or written.

CPU tensors of a special class take the place of GPU tensors. They refuse the same operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from svdpp.comm import streams
from svdpp.comm.packet import Packet
from svdpp.comm.transport import Transport
from svdpp.config import ClipRequest, LatentSpec, SvdSampling
from svdpp.models.base import LATENTS, Tensors
from svdpp.models.dummy import DummyModel
from svdpp.plan.actions import Action
from svdpp.verification import reference
from svdpp.verification.reference_setup import ReferenceSetup
from svdpp.worker import background, stage, tensor_files
from svdpp.worker.background import ClipWriter, LatentCheckpointWriter
from svdpp.worker.messages import CheckpointLost, ClipJob
from svdpp.worker.rank_context import RankContext
from svdpp.worker.tensor_files import LatentCheckpoints, TensorStore, tensor_sha256
from tests.support.dummies import config

CPU = torch.device("cpu")
SHAPE = (1, 4, 2, 8, 8)


class DeviceTensor(torch.Tensor):
    """Stand-in for a tensor on a GPU: a CPU tensor that cannot be converted to an array."""

    is_cpu = False  # type: ignore[assignment]

    def numpy(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    item = tolist = cpu = numpy  # type: ignore[assignment]


@pytest.fixture(autouse=True)
def _on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the dummy model return `DeviceTensor`s, and check that host copies are saved."""
    encode, decode, save = DummyModel.encode, DummyModel.decode, tensor_files.save

    def encode_there(model: DummyModel, *arguments: Any) -> Tensors:
        return {LATENTS: encode(model, *arguments)[LATENTS].as_subclass(DeviceTensor)}

    def decode_there(model: DummyModel, *arguments: Any) -> torch.Tensor:
        return decode(model, *arguments).as_subclass(DeviceTensor)

    def save_from_host(tensors: Tensors, **options: Any) -> bytes:
        assert {type(tensor) for tensor in tensors.values()} == {torch.Tensor}
        return save(tensors, **options)

    monkeypatch.setattr(DummyModel, "encode", encode_there)
    monkeypatch.setattr(DummyModel, "decode", decode_there)
    monkeypatch.setattr(tensor_files, "save", save_from_host)


@pytest.fixture(autouse=True)
def event(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mock]:
    """Stand-in for each recorded CUDA event. Check that every copy to the host waits for it."""
    marked = Mock(spec=["synchronize"])
    waited: list[object] = []

    @contextmanager
    def stream_context(_: streams.SideStream, after: object = None) -> Iterator[None]:
        waited.append(after)
        yield

    monkeypatch.setattr(streams.SideStream, "stream_context", stream_context)
    for module in (streams, reference, background):
        monkeypatch.setattr(module, "record_event", lambda _: marked)
    yield marked
    assert all(after is marked for after in waited)


def _model() -> DummyModel:
    return DummyModel(LatentSpec(shape=SHAPE), 2, CPU)


def test_the_tensors_of_these_tests_cannot_be_hashed() -> None:
    latent = _model().encode({}, ClipRequest(seed=0))[LATENTS]
    with pytest.raises(TypeError, match="cuda:0"):
        tensor_sha256(latent.double())


def test_the_reference(tmp_path: Path) -> None:
    setup = ReferenceSetup(
        config=config(1, steps=2),
        checkpoint=None,
        requests=(ClipRequest(seed=0),),
        steps=frozenset({1, 2}),
        folder=tmp_path,
        predictions=False,
    )
    reporter = Mock()
    reference.compute_all("cpu", reporter, setup)
    (done,) = reporter.send.call_args.args
    kept = TensorStore(tmp_path)
    assert done.metadata["latents_sha256"] == tensor_sha256(kept.load(0, "step2")[LATENTS])
    assert kept.has(0, "step1")


def test_a_rank(tmp_path: Path) -> None:
    """A rank copies to the host in its tensor store, its latent checkpoint and its clip writer."""
    reporter, written, kept = Mock(), Mock(), TensorStore(tmp_path)
    checkpoints = LatentCheckpoints(tmp_path / "checkpoints", {})
    context = RankContext(
        rank=0,
        device=CPU,
        transport=Mock(),
        reporter=reporter,
        clip_writer=ClipWriter(written, {}, CPU, kept),
        checkpoint_writer=LatentCheckpointWriter(checkpoints, CPU, reporter),
        tensor_store=kept,
    )
    rank = stage.PipelineStage(context, _model(), SvdSampling())
    texts = "ENCODE c0 @0", "DENOISE c0 0:1", "DENOISE c0 1:2", "DECODE c0 @2", "FINISH c0 @2"
    sent = "ENCODE c1 @0", "DENOISE c1 0:1", "SEND c1 @1 >1"
    requests = ClipRequest(seed=0), ClipRequest(seed=0, latents_key="0" * 64)
    jobs = tuple(ClipJob(clip=clip, request=request) for clip, request in enumerate(requests))
    actions = [*map(Action.parse, texts + sent)]
    rank.enqueue(actions, jobs)
    for action in actions:
        rank.run(action)
    rank.finish()
    for bad in (written.report_clip_failure, written.report_failure, reporter.report_failure):
        assert not bad.called, bad.call_args
    assert not any(isinstance(sent.args[0], CheckpointLost) for sent in reporter.send.mock_calls)
    (done,) = written.send.call_args.args
    assert done.metadata["latents_sha256"] == tensor_sha256(kept.load(0, "step2")[LATENTS])
    assert done.metadata["frames_sha256"]
    assert list((tmp_path / "checkpoints").glob("*.safetensors"))


@pytest.mark.parametrize(("backend", "payload"), [("gloo", torch.Tensor), ("nccl", DeviceTensor)])
def test_a_link(
    backend: str, payload: type[torch.Tensor], event: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link copies to the host only for gloo; for NCCL it waits for the tensors first.

    If the header were sent before the tensors exist, NCCL's receive kernel would spin until then.
    """
    sent: list[object] = []
    event.synchronize.side_effect = lambda: sent.append(event)
    for name in ("send", "isend"):
        monkeypatch.setattr(dist, name, lambda tensor, *_, **__: sent.append(type(tensor)))
    link = Transport(0, CPU, backend, Mock(), checksum=True)
    link.send(Packet(0, 1, 0.0, _model().encode({}, ClipRequest(seed=0))), 1)
    link.drain()
    before = [event] if backend == "nccl" else []
    assert sent == [*before, torch.Tensor, torch.Tensor, payload]  # header, metadata, payload
    link.close()
