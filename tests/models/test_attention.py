"""Ranks with an attention backend give the bits of diffusers' `__call__` with that backend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models import attention_dispatch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

from svdpp.config import ModelConfig, PipelineConfig, SvdSampling, WanSampling
from svdpp.driver.resolve import resolve_config
from svdpp.errors import RequestError
from svdpp.models import memory
from svdpp.models.engine.attention import (
    attention_conditions,
    check_attention_backend,
    usable_backends,
)
from svdpp.models.engine.factory import load_engine_model
from svdpp.models.engine.model import call_arguments
from svdpp.plan.roles import Roles
from svdpp.verification.reference import Reference, stack_frames
from svdpp.worker.device import conditions_of
from tests.models.test_registry import TinyModels
from tests.support.range_checks import (
    TinyModel,
    check_every_cut,
    ranks,
    reference_clip,
    whole_clip,
)
from tests.support.tiny_families import FIRST

pytestmark = pytest.mark.usefixtures("one_thread")

MATH = "_native_math"
FULL = (pytest.mark.slow, pytest.mark.full)
#: Families whose denoisers call torch's attention directly, and so ignore backends.
WITHOUT_BACKENDS = {"svd", "latte", "mochi", "allegro", "cogvideox", "cogvideox_v2v"}
HEADS = Roles(encode=True, denoise=True, decode=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Number of calls of each of diffusers' attention backends during the test, by name."""
    counts: dict[str, int] = {}

    def counted(name: AttentionBackendName, real: Callable[..., Any]) -> Callable[..., Any]:
        def backend(*args: Any, **kwargs: Any) -> Any:
            counts[name.value] = counts.get(name.value, 0) + 1
            return real(*args, **kwargs)

        return backend

    for name, real in _AttentionBackendRegistry._backends.items():
        monkeypatch.setitem(_AttentionBackendRegistry._backends, name, counted(name, real))
    return counts


@pytest.fixture(autouse=True)
def _default_backend_is_kept() -> Iterator[None]:
    """Check that a test does not change the process's default attention backend."""
    before = _AttentionBackendRegistry.get_active_backend()[0]
    yield
    assert _AttentionBackendRegistry.get_active_backend()[0] is before


def with_backend(tiny: TinyModel, name: str = MATH) -> ModelConfig:
    return replace(tiny.model, attention_backend=name)


@pytest.mark.parametrize(
    "name",
    [
        "wan",
        "wan-modular",
        *(pytest.param(name, marks=FULL) for name in ("ltx2", "hunyuan-video")),
        *(pytest.param(name, marks=FULL) for name in ("helios", "minimax-h3", "cosmos3")),
    ],
)
def test_every_cut_gives_the_bits_of_the_whole_call(
    tiny_models: TinyModels, calls: dict[str, int], name: str
) -> None:
    """A clip that is cut after any step has the bits of the whole `__call__` with the backend.

    LTX-2 computes attention also in its encode, on a rank without a denoiser.
    """
    tiny = tiny_models(name)
    model, request = with_backend(tiny), tiny.request()
    expected = whole_clip(model, tiny.sampling, request, tiny.source)
    assert calls.keys() == {MATH}
    calls.clear()
    rank_for = ranks(tiny.checkpoint, tiny.sampling, model=model)
    check_every_cut(rank_for, tiny.steps, expected, request, tiny.source)
    assert calls.keys() == {MATH}
    calls.clear()
    plain = whole_clip(tiny.model, tiny.sampling, request, tiny.source)
    assert calls.keys() == {"native"}
    assert not torch.equal(plain[0][-1], expected[0][-1])


@pytest.mark.parametrize("name", ["wan", pytest.param("ltx2", marks=FULL)])
def test_a_plain_script_with_the_backend_gives_the_same_bits(
    tiny_models: TinyModels, name: str
) -> None:
    """A plain diffusers script that sets the backend of the denoisers gives the same frames.

    In a script, LTX-2's text connectors use the denoiser's backend too.
    """
    tiny = tiny_models(name)
    request = tiny.request()
    ours = whole_clip(with_backend(tiny), tiny.sampling, request, tiny.source)[1]
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(tiny.checkpoint.folder)
    pipe.set_progress_bar_config(disable=True)
    arguments = call_arguments(pipe, tiny.checkpoint, tiny.sampling, request, tiny.source)
    try:
        for part in {*tiny.checkpoint.spec.denoisers} & {*tiny.checkpoint.weighted_components}:
            getattr(pipe, part).set_attention_backend(MATH)
        plain = pipe(**arguments, output_type="pil").frames[0]
    finally:
        _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    assert np.array_equal(ours, stack_frames(plain))


def test_models_of_one_process_keep_their_own_backends(
    tiny_models: TinyModels, calls: dict[str, int]
) -> None:
    """A model keeps its own backend, even after a model with another backend is loaded.

    This holds for models of ranks and for the reference.
    """
    tiny = tiny_models("wan")
    plain = Reference(tiny.checkpoint, tiny.model, "cpu", from_image=False)
    before = reference_clip(plain, tiny.sampling, tiny.request())
    Reference(tiny.checkpoint, with_backend(tiny), "cpu", from_image=False)
    load_engine_model(tiny.checkpoint, with_backend(tiny), tiny.sampling, "cpu", HEADS)
    after = reference_clip(plain, tiny.sampling, tiny.request())
    assert calls.keys() == {"native"}
    assert torch.equal(before[0][-1], after[0][-1])


@pytest.mark.slow
@pytest.mark.full
def test_families_without_backends_are_refused(tiny_models: TinyModels) -> None:
    """Families whose denoisers ignore backends are refused.

    diffusers' `set_attention_backend` would have no effect on them, without any message.
    """
    refused = {}
    for family, name in FIRST.items():
        with suppress(RequestError):
            check_attention_backend(MATH, tiny_models(name).checkpoint)
            continue
        refused[family] = tiny_models(name).checkpoint
    assert refused.keys() == WITHOUT_BACKENDS
    for checkpoint in refused.values():
        with pytest.raises(RequestError, match="has no effect on model") as caught:
            check_attention_backend(MATH, checkpoint)
        assert caught.value.details["class"] == checkpoint.spec.denoiser


def resolve(model: ModelConfig, sampling: Any) -> None:
    resolve_config(PipelineConfig(world_size=1, model=model, sampling=sampling), weights="none")


def test_the_demo_model_is_refused_before_its_weights_are_read() -> None:
    with pytest.raises(
        RequestError, match="`attention_backend` has no effect on model 'demo': its "
    ):
        resolve(ModelConfig(name="demo", attention_backend="native"), SvdSampling())
    with pytest.raises(RequestError, match="the dummy model takes no `attention_backend`"):
        ModelConfig(name="dummy", attention_backend="native")


@pytest.mark.parametrize(
    ("name", "words", "hint"),
    [
        ("nativ", "diffusers has no `attention_backend` 'nativ'", "did you mean native?"),
        ("", "diffusers has no `attention_backend` ''", "diffusers has flash, flash_hub"),
        ("flash_hub", "flash_hub is refused: diffusers would download its kernels", "no code from"),
        ("sage", "sage cannot be used: Sage Attention .* missing package", "svdpp doctor"),
        ("xformers", "xformers cannot be used: .* missing package", "svdpp doctor"),
    ],
)
def test_backends_that_cannot_be_used_are_named(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, words: str, hint: str
) -> None:
    """Backends that cannot be used are refused with a reason, before any weight is read."""
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_SAGE_ATTN", False)
    monkeypatch.setattr(attention_dispatch, "_CAN_USE_XFORMERS_ATTN", False)
    tiny = tiny_models("wan")
    with pytest.raises(RequestError, match=words) as caught:
        resolve(with_backend(tiny, name), tiny.sampling)
    assert hint in caught.value.hint
    assert caught.value.details["attention_backend"] == name
    assert caught.value.exit_code == 2


def test_a_backend_of_the_environment_is_refused(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backend in DIFFUSERS_ATTN_BACKEND is refused, unless the model asks for the same one.

    diffusers would use it for all models, and no clip's JSON would have it.
    """
    tiny = tiny_models("wan")
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", MATH)
    for model in (tiny.model, with_backend(tiny, "native")):
        with pytest.raises(RequestError, match="DIFFUSERS_ATTN_BACKEND is '_native_math'") as error:
            resolve(model, tiny.sampling)
        assert "`attention_backend` has the same effect" in error.value.hint
    resolve(with_backend(tiny), tiny.sampling)
    monkeypatch.setenv("DIFFUSERS_ATTN_BACKEND", "native")
    resolve(tiny.model, tiny.sampling)


# --- bits of backends ----------------------------------------------------------------------------


def config_with(name: str | None, folder: Path) -> PipelineConfig:
    model = ModelConfig(name=str(folder), attention_backend=name)
    sampling = WanSampling(num_inference_steps=2, from_image=False)
    return PipelineConfig(world_size=1, model=model, sampling=sampling)


def test_the_conditions_have_the_backend_and_whether_it_repeats(tiny_models: TinyModels) -> None:
    checkpoint = tiny_models("wan").checkpoint
    with_name = conditions_of(config_with(MATH, checkpoint.folder), checkpoint, "cpu")
    without = conditions_of(config_with(None, checkpoint.folder), checkpoint, "cpu")
    added = {"attention_backend": MATH, "attention_repeats": True}
    assert with_name == {**without, **added}


def test_a_backend_that_does_not_repeat_its_bits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    backends, native = _AttentionBackendRegistry._backends, AttentionBackendName.NATIVE
    real, runs = backends[native], []

    def noisy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **more: Any) -> Any:
        runs.append(1)
        return real(query, key, value, **more) + 1e-6 * len(runs)

    monkeypatch.setitem(backends, native, noisy)
    found = attention_conditions("native", "cpu", torch.float32)
    assert found == {"attention_backend": "native", "attention_repeats": False}


def test_a_backend_that_does_not_run_on_the_device_is_named() -> None:
    with pytest.raises(RequestError, match="_native_cudnn does not run on cpu in bfloat16: ") as at:
        attention_conditions("_native_cudnn", "cpu", torch.bfloat16)
    assert at.value.details["dtype"] == "bfloat16"
    assert at.value.details["cause"] in at.value.message


def test_backends_of_the_hub_are_not_tried() -> None:
    usable = usable_backends()
    assert {"native", MATH} <= {*usable}
    assert not [name for name in usable if "hub" in name]


@pytest.mark.slow
@pytest.mark.full
def test_the_backend_that_holds_all_weights_of_the_attention_needs_more_memory(
    tiny_models: TinyModels,
) -> None:
    tiny = tiny_models("wan")
    sampling = replace(tiny.sampling, height=128, width=128)
    plain, math = (
        memory.estimate(tiny.checkpoint, model, sampling, device="cpu", num_threads=1)
        for model in (tiny.model, with_backend(tiny))
    )
    assert math.denoise.activation_bytes > 2 * plain.denoise.activation_bytes
    assert (math.encode, math.decode) == (plain.encode, plain.decode)
