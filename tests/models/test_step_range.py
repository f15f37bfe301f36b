"""A scheduler that shows a range of its timesteps, and the state that travels between ranks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from diffusers.guiders import ClassifierFreeGuidance

from svdpp.config import TensorSpec
from svdpp.errors import ModelError
from svdpp.models.family_config import SCHEDULERS
from svdpp.models.step_range import (
    _CLASSES,
    _DECLARED,
    check_pipeline,
    range_scheduler,
    read_state,
    state_spec,
)
from tests.models.tiny_families import LTX_EULER, WAN_UNIPC

STEPS = 6
SHAPE = (1, 2, 3)
UNIPC, EULER = "UniPCMultistepScheduler", "FlowMatchEulerDiscreteScheduler"
FULL_ORDER = {"lower_order_final": False, "final_sigmas_type": "sigma_min"}
ORDER_3 = {**WAN_UNIPC, "solver_order": 3}


def run(scheduler: Any, sample: torch.Tensor) -> torch.Tensor:
    """Denoises `sample` by a model that is a fixed function."""
    for t in scheduler.timesteps:
        sample = scheduler.step(torch.sin(3 * sample) + t / 1000, t, sample, return_dict=False)[0]
    return sample


@pytest.mark.parametrize(
    ("real", "config"),
    [
        (UniPCMultistepScheduler, WAN_UNIPC),
        (UniPCMultistepScheduler, ORDER_3),
        (UniPCMultistepScheduler, {**WAN_UNIPC, "use_karras_sigmas": True}),
        (UniPCMultistepScheduler, {**WAN_UNIPC, **FULL_ORDER}),
        (FlowMatchEulerDiscreteScheduler, {"shift": 3.0}),
    ],
)
def test_two_ranges_give_the_bits_of_one(real: Any, config: dict[str, Any]) -> None:
    whole = real(**config)
    whole.set_timesteps(STEPS, device="cpu")
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    expected = run(whole, noise)
    for cut in range(1, STEPS):
        first = range_scheduler(real.__name__, config, 0, cut)
        first.set_timesteps(STEPS, device="cpu")
        latent = run(first, noise)
        state = read_state(first)
        specs = state_spec(real.__name__, config, cut, TensorSpec(SHAPE, "fp32"))
        assert {name: tuple(tensor.shape) for name, tensor in state.items()} == {
            name: spec.shape for name, spec in specs.items()
        }
        second = range_scheduler(real.__name__, config, cut, STEPS, state)
        second.set_timesteps(STEPS, device="cpu")
        before = read_state(second)
        assert all(torch.equal(before[name], state[name]) for name in state)
        assert torch.equal(run(second, latent), expected)


@pytest.mark.parametrize(
    ("real", "config"),
    [(UniPCMultistepScheduler, WAN_UNIPC), (FlowMatchEulerDiscreteScheduler, {"shift": 2.0})],
)
def test_pipelines_see_the_real_class_and_its_signatures(real: Any, config: Any) -> None:
    scheduler = range_scheduler(real.__name__, config, 2, 4)
    assert isinstance(scheduler, real)
    assert scheduler.__class__.__name__ == real.__name__
    for name in ("set_timesteps", "step"):
        own = inspect.signature(getattr(scheduler, name))
        assert own == inspect.signature(getattr(real(), name))
    scheduler.set_timesteps(STEPS, device="cpu")
    plain = real(**config)
    plain.set_timesteps(STEPS, device="cpu")
    assert torch.equal(scheduler.timesteps, plain.timesteps[2:4])
    assert torch.equal(scheduler.sigmas, plain.sigmas)
    assert scheduler.begin_index == 2
    scheduler.set_begin_index(0)
    assert scheduler.begin_index == 2


def test_shift_by_the_size_of_the_clip_reaches_the_real_class() -> None:
    scheduler = range_scheduler(EULER, LTX_EULER, 1, 3)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=1.1, device="cpu")
    plain = FlowMatchEulerDiscreteScheduler(**LTX_EULER)
    plain.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=1.1, device="cpu")
    assert torch.equal(scheduler.timesteps, plain.timesteps[1:3])


@pytest.mark.parametrize("at", [0, STEPS])
def test_an_empty_range_has_no_timesteps(at: int) -> None:
    scheduler = range_scheduler(UNIPC, WAN_UNIPC, at, at)
    scheduler.set_timesteps(STEPS, device="cpu")
    assert len(scheduler.timesteps) == 0


def test_without_steps_there_is_no_state() -> None:
    assert state_spec(UNIPC, WAN_UNIPC, 0, TensorSpec(SHAPE, "fp32")) == {}


def test_a_missing_tensor_of_the_state_is_an_error() -> None:
    scheduler = range_scheduler(UNIPC, WAN_UNIPC, 1, 2, {})
    with pytest.raises(KeyError):
        scheduler.set_timesteps(STEPS, device="cpu")


def test_the_declared_schedulers_are_those_of_the_checkpoints() -> None:
    assert SCHEDULERS.keys() == _DECLARED.keys() == _CLASSES.keys()


# What is refused.


@pytest.mark.parametrize("real", [DPMSolverMultistepScheduler, DDIMScheduler])
def test_schedulers_without_declared_state_are_refused(real: type) -> None:
    with pytest.raises(ModelError, match=f"{real.__name__}.*not declared"):
        range_scheduler(real.__name__, {}, 0, 1)


@pytest.mark.parametrize(
    ("name", "key"),
    [(EULER, "stochastic_sampling"), (EULER, "use_beta_sigmas"), (UNIPC, "solver_p")],
)
def test_options_that_cannot_be_split_are_refused(name: str, key: str) -> None:
    with pytest.raises(ModelError, match=key):
        range_scheduler(name, {key: True}, 0, 1)


def test_a_config_that_diffusers_rejects_is_an_error() -> None:
    with pytest.raises(ModelError, match="cannot be created"):
        range_scheduler(UNIPC, {"solver_type": "none"}, 0, 1)


def wan_of(transformer: Any) -> WanPipeline:
    return WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, scheduler=None, transformer=transformer
    )


def test_caches_between_steps_are_refused() -> None:
    transformer = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, ffn_dim=8, num_layers=2, text_dim=8
    )
    check_pipeline(wan_of(transformer))
    transformer.enable_cache(FirstBlockCacheConfig(threshold=0.1))
    with pytest.raises(ModelError, match="transformer has the cache FirstBlockCacheConfig"):
        check_pipeline(wan_of(transformer))


def test_pipelines_without_the_callback_are_refused() -> None:
    class Plain(DiffusionPipeline):
        def __call__(self) -> None: ...

    with pytest.raises(ModelError, match="Plain has no callback_on_step_end"):
        check_pipeline(Plain())


def test_guiders_that_act_on_a_part_of_the_steps_are_refused() -> None:
    check_pipeline(wan_of(ClassifierFreeGuidance()))
    with pytest.raises(ModelError, match="ClassifierFreeGuidance"):
        check_pipeline(wan_of(ClassifierFreeGuidance(start=0.2)))
