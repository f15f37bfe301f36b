"""Memory estimates from configs: exact for weights, close to torch's allocator for activations.

The estimates are compared with what torch's allocator allocates in a rank's encode, two steps and
decode, plus the tensors that the rank has received.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Thread
from typing import Any

import diffusers
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from svdpp.config import ModelConfig, SvdSampling
from svdpp.errors import ModelError, RequestError
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine import load
from svdpp.models.engine.factory import load_engine_model
from svdpp.models.engine.records import tensors_in
from svdpp.models.memory import FakeModel, FlopCounter, estimate
from svdpp.models.memory_tracker import MemoryTracker, convolution_backend
from svdpp.plan.roles import Roles
from tests.models.test_registry import TinyModels
from tests.support.allocations import allocated_peak
from tests.support.builders import edit_json
from tests.support.range_checks import (
    TinyModel,
    loaded,
    model_of,
    nothing,
    photograph,
    read_folder,
    source,
)
from tests.support.tiny_families import CASES, FIRST, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def num_bytes(modules: Iterable[torch.nn.Module]) -> int:
    """Return the bytes of all parameters and buffers of `modules`."""
    tensors = (each for module in modules for each in (*module.parameters(), *module.buffers()))
    return sum(tensor.nbytes for tensor in tensors)


def check_estimate(tiny_model: TinyModel, rel: dict[str, float], num_threads: int = 1) -> None:
    """Compare the memory estimate for a clip of two steps with what its ranks hold and allocate.

    `rel` is the relative tolerance for each part. The activations of other parts are not compared.
    """
    encoder, steps, decoder = tiny_model.encoder, tiny_model.rank_for(0, 2), tiny_model.decoder
    prepared = {} if tiny_model.source is None else encoder.prepare(tiny_model.source)
    request = tiny_model.request("a cat")
    packet = encoder.encode(prepared, request)
    last = {**packet, **steps.denoise(packet, 0, 2, nothing)}
    options: Any = {"device": "cpu", "num_threads": num_threads}
    estimated = estimate(tiny_model.checkpoint, tiny_model.model, tiny_model.sampling, **options)
    parts: Any = (
        ("encode", encoder, prepared, lambda: encoder.encode(prepared, request)),
        (
            "denoise",
            tiny_model.rank_for(0, 1),
            packet,
            lambda: steps.denoise(packet, 0, 2, nothing),
        ),
        ("decode", decoder, last, lambda: decoder.decode(last)),
    )
    for part, rank, received, work in parts:
        memory = getattr(estimated, part)
        assert memory.weight_bytes == num_bytes(loaded(rank).values()), part
        assert memory.activation_bytes > 0
        if part in rel:
            measured = allocated_peak(work) + sum(each.nbytes for each in tensors_in(received))
            print(part, memory.activation_bytes, measured, memory.activation_bytes / measured)
            assert memory.activation_bytes == pytest.approx(measured, rel=rel[part]), part


def demo(dtype: Any = "fp32", **changes: int) -> TinyModel:
    model = ModelConfig(name="demo", dtype=dtype)
    values = {"height": 64, "width": 64, "num_frames": 6, "decode_chunk_size": 6, **changes}
    sampling = SvdSampling(num_inference_steps=2, **values)
    return TinyModel(find_checkpoint(model), sampling, model, photograph())


def check_demo(threads: int, chunk: int) -> None:
    torch.set_num_threads(threads)
    rel = {"encode": 0.1, "denoise": 0.05, "decode": 0.05}
    check_estimate(demo(decode_chunk_size=chunk), rel, threads)


@pytest.mark.slow
def test_activation_bytes_match_torchs_allocator() -> None:
    check_demo(1, 6)


@pytest.mark.slow
@pytest.mark.full
def test_activation_bytes_of_several_threads_match_torchs_allocator() -> None:
    """Estimates are right for several threads too.

    The test runs in a new process. In this process, it would increase the peaks that later tests
    with one thread measure.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(check_demo, 2, 1).result()


@pytest.mark.slow
def test_a_half_precision_encode_includes_its_upcast_weights() -> None:
    tiny_model = demo("fp16", height=8, width=8)
    encode = estimate(
        tiny_model.checkpoint, tiny_model.model, tiny_model.sampling, device="cpu"
    ).encode
    assert encode.activation_bytes >= num_bytes([loaded(tiny_model.encoder)["vae"]])


def test_a_config_that_does_not_describe_the_weights_is_named(folder: Path) -> None:
    """A config that does not fit the weights is named, and the clip's size is not blamed.

    The config lacks a key, for which diffusers uses a default.
    """
    edit_json(folder / "unet/config.json", cross_attention_dim=None)
    checkpoint = read_folder(folder)
    sampling = checkpoint.resolve_sampling(SvdSampling(height=64, width=64, num_inference_steps=2))
    with pytest.raises(
        ModelError, match=r"unet/config.json does not describe the weights"
    ) as error:
        estimate(checkpoint, ModelConfig(name=str(folder)), sampling, device="cpu")
    assert error.value.details["shape"] != error.value.details["config_shape"]
    assert "size" not in error.value.hint


def test_a_failed_assertion_of_a_library_is_shown(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed `assert` in a library is shown as the cause, although it has no message.

    Components of diffusers check values by `assert`.
    """

    def decode(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(diffusers.AutoencoderKLTemporalDecoder, "decode", decode)
    checkpoint = read_folder(folder)
    sampling = checkpoint.resolve_sampling(SvdSampling(height=64, width=64, num_inference_steps=2))
    with pytest.raises(RequestError, match=r"cannot make a clip .* \(raise AssertionError\)"):
        estimate(checkpoint, ModelConfig(name=str(folder)), sampling, device="cpu")


def test_fake_models_change_nothing_that_other_threads_share(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fake model changes no setting of torch that other threads share.

    A user's program may compute at the same time. The model is Kandinsky's, whose text encoder
    creates nested models.
    """
    tiny_model, made = tiny_models("kandinsky5"), load.build_module
    seen, own = set(), set()

    def refuse(*_: object) -> None:
        raise AssertionError("the other threads of the process would compute otherwise")

    def build(cls: Any, folder: Path) -> Any:
        def look() -> None:
            linear = torch.nn.Linear(1, 1)
            seen.add((torch.get_default_dtype(), linear.weight.dtype, bool(linear.weight.any())))

        other = Thread(target=look)
        other.start()
        other.join()
        own.add((torch.zeros(1).dtype, (torch.arange(2) / 2).dtype, torch.zeros(1).float().dtype))
        return made(cls, folder)

    monkeypatch.setattr(load, "build_module", build)
    for name in ("set_default_dtype", "set_num_threads"):
        monkeypatch.setattr(torch, name, refuse)
    model = replace(tiny_model.model, dtype="bf16")
    FakeModel(tiny_model.checkpoint, model, tiny_model.sampling, workspace_threads=1)
    assert seen == {(torch.float32, torch.float32, True)}
    assert own == {(torch.bfloat16, torch.bfloat16, torch.float32)}


def test_flops_are_counted_without_hooks_of_other_threads() -> None:
    linear = torch.nn.Linear(2, 3)
    with FlopCounter() as counter:
        assert not torch.nn.modules.module._has_any_global_hook()
        linear(torch.zeros(5, 2))
    assert counter.total == 2 * 5 * 2 * 3


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (1, 1, 1), (3, 1, 1)])
def test_the_kernel_of_a_convolution_is_the_one_of_a_process_with_that_many_threads(
    kernel: tuple[int, ...],
) -> None:
    before, dims, names = torch.get_num_threads(), len(kernel), set()
    cases = product((1, 2, 16), (4, 64), (1, 2), (1, 4), (False, True), (torch.float32, torch.half))
    for batch, side, stride, groups, is_transposed, dtype in cases:
        with FakeTensorMode():
            tensor = torch.empty(batch, 8, *(side,) * dims, dtype=dtype)
            weight = torch.empty(8, 8 // groups, *kernel, dtype=dtype)
            ones = [1] * dims
            args = (tensor, weight, None, [stride] * dims, ones, ones, is_transposed)
            args = (*args, [0] * dims, groups)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                expected = torch._C._select_conv_backend(*args).name
                torch.set_num_threads(3 - threads)
                assert convolution_backend(args, threads) == expected, (args, threads)
                names.add(expected)
    torch.set_num_threads(before)
    assert "Mkldnn" in names


#: Height and width, frames, and prompt tokens of each case. None stands for a family without a
#: prompt.
SIZES = {
    "svd": (128, 4, None),
    "wan-image-bf16": (160, 13, 256),
    "ltx-image": (192, 17, 256),
    "ltx2": (64, 9, 256),
    "hunyuan-video-image": (128, 9, 420),
    "wan-animate": (96, 9, 256),
    "cogvideox-image": (96, 9, 64),
    "mochi": (128, 7, 256),
    "wan": (160, 13, 256),
    "wan-2.1-image": (160, 13, 256),
    "wan-5b-image": (192, 13, 256),
    "ltx-timestep": (192, 17, 256),
    "ltx-condition-image": (96, 9, 256),
    "wan-vace-image": (96, 9, 256),
    "skyreels-v2": (160, 13, 256),
    "framepack": (96, 37, 8),
}
IN_CI = {"svd", "wan-image-bf16", "ltx-image"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_CI else [pytest.mark.full])
        for name in {**SIZES, **dict.fromkeys(FIRST.values())}
    ],
)
def test_the_estimate_is_what_a_rank_receives_and_allocates(
    tiny_models: TinyModels, name: str
) -> None:
    case, tiny_model = CASES[name], tiny_models(name)
    more = {"num_inference_steps": case.config().with_few_steps(2, 1).num_inference_steps}
    if name in SIZES:
        side, frames, tokens = SIZES[name]
        more |= {"height": side, "width": side, "num_frames": frames}
        more |= {} if tokens is None else {"max_sequence_length": tokens}
    sampling = tiny_model.checkpoint.resolve_sampling(case.config(**more))
    image = source(sampling) if case.image else None
    rel = dict.fromkeys(("encode", "denoise", "decode"), 0.1) if name in SIZES else {}
    check_estimate(replace(tiny_model, sampling=sampling, source=image), rel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [100, 256, 1600])
def test_the_temporary_memory_of_attention_counts(dtype: torch.dtype, num_tokens: int) -> None:
    """In half precision, the temporary memory depends on whether the CPU has AMX."""
    shape = (1, 2, num_tokens, 16)
    real = [torch.zeros(shape, dtype=dtype) for _ in range(3)]
    measured = allocated_peak(lambda: torch.nn.functional.scaled_dot_product_attention(*real))
    with FakeTensorMode():
        fake = [torch.zeros(shape, dtype=dtype) for _ in range(3)]
        with torch.no_grad(), MemoryTracker(fake, 1) as tracker:
            torch.nn.functional.scaled_dot_product_attention(*fake)
    assert tracker.peak_above_start == pytest.approx(measured, rel=0.05)


@pytest.mark.slow
@pytest.mark.full
def test_a_matrix_that_this_cpu_cannot_factorise_is_no_error(tmp_path: Path) -> None:
    """An estimate does not fail if this CPU cannot factorise Helios' matrix.

    With the default `gamma`, the matrix is singular except for rounding errors.
    """
    scheduler = diffusers.HeliosDMDScheduler(use_dynamic_shifting=True)
    checkpoint = read_folder(save_tiny("helios_distilled", tmp_path, scheduler=scheduler))
    case = CASES["helios-distilled"]
    sampling = checkpoint.resolve_sampling(case.config(num_frames=33, num_inference_steps=6))
    found = estimate(checkpoint, model_of(checkpoint), sampling, device="cpu")
    assert found.denoise.weight_bytes


@pytest.mark.slow
def test_weights_that_stay_in_float32_count_in_float32(tiny_models: TinyModels) -> None:
    """Weights that stay in float32 in a half-precision model count as float32.

    transformers keeps some weights of T5 in float32 (only for fp16), and diffusers some of Wan.
    """
    tiny_model = tiny_models("wan")
    model = replace(tiny_model.model, dtype="fp16")
    estimated = estimate(tiny_model.checkpoint, model, tiny_model.sampling, device="cpu")
    for part, component in (("encode", "text_encoder"), ("denoise", "transformer")):
        held = load_engine_model(
            tiny_model.checkpoint, model, tiny_model.sampling, "cpu", Roles(**{part: True})
        )
        module = loaded(held)[component]
        assert torch.float32 in {tensor.dtype for tensor in module.parameters()}
        assert getattr(estimated, part).weight_bytes == num_bytes([module])
