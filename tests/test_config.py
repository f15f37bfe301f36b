"""Configurations: values that are refused, with exit code 2, and the defaults of diffusers."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from functools import partial
from typing import Any

import pytest

from svdpp.config import (
    DEFAULT_NUM_STEPS,
    SAMPLING_CLASSES,
    ClipRequest,
    LatentSpec,
    ModelConfig,
    OutputConfig,
    Param,
    PipelineConfig,
    SvdSampling,
    configuration_fields,
    limits,
    params_of,
    sampling_of_model,
)
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.errors import RequestError, exit_code_of
from svdpp.plan.split import MAX_PLANNED_STEPS, MAX_RANKS
from tests.support.markdown_pages import table_rows
from tests.support.shell import ROOT

INF, NAN = math.inf, math.nan
THREADS = limits.max_threads()


def pipeline_config(**given: Any) -> PipelineConfig:
    """Return the configuration of a pipeline, by default with two ranks.

    `dtype` is set in the model's configuration, and a sampling parameter in `sampling`.
    """
    sampler = {field.name for field in dataclasses.fields(SvdSampling)} & given.keys()
    sampling = SvdSampling(**{name: given.pop(name) for name in sampler})
    model = ModelConfig(dtype=given.pop("dtype", "fp32"))
    return PipelineConfig(**{"world_size": 2, **given}, model=model, sampling=sampling)


# tests/cli/test_refused.py has more refused values, as command lines.
DEVICES = ("", "CPU", "cuda:", "cuda:x", "cuda:-1", "cuda:0:1", "cpu:0", "cuda0", "cuda:1024")
REFUSED = [
    (LatentSpec, {"shape": (1, 4, 8, 8)}, "latent shape 1 4 8 8 needs 5 positive sizes"),
    (LatentSpec, {"shape": (1, 14, 4, -8, 8)}, "latent shape 1 14 4 -8 8 needs 5 positive sizes"),
    (LatentSpec, {"shape": (1, 4, True, 8, 8)}, "in the order B C F H W"),
    (LatentSpec, {"shape": (1, 4, 2**12, 2**7, 2**8)}, "has more than 268435456 elements"),
    (ModelConfig, {"dtype": "float64"}, "`dtype` must be one of fp32, fp16, bf16, got 'float64'"),
    (ModelConfig, {"name": "  "}, "`model` is empty"),
    *[
        (SvdSampling, {name: value}, f"`{name}` must be ")
        for name, param in params_of(SvdSampling).items()
        for value in (param.lowest - 1, param.highest + 1, INF)
    ],
    (SvdSampling, {"width": 577}, "`width` must be a multiple of 8 from 8 to 4096, got 577"),
    (
        SvdSampling,
        {"min_guidance_scale": 2.0, "max_guidance_scale": 1.0},
        "`min_guidance_scale` 2.0 is above 1 but `max_guidance_scale` 1.0 is not",
    ),
    (SvdSampling, {"num_frames": 1}, "one frame uses only `min_guidance_scale`"),
    (pipeline_config, {"world_size": 3}, "28 steps cannot be split evenly over 3 ranks"),
    (
        pipeline_config,
        {"num_threads": 0},
        f"`num_threads` must be 1 to {THREADS} on this machine, got 0",
    ),
    (pipeline_config, {"num_threads": THREADS + 1}, f"must be 1 to {THREADS} on this machine, got"),
    *[
        (
            pipeline_config,
            {"device": device},
            f"`device` must be cpu, cuda or cuda:N, got {device!r}",
        )
        for device in DEVICES
    ],
    *[
        (
            pipeline_config,
            {name: value},
            f"`{name}` must be above 0 and at most 604800 s, got {value!r}",
        )
        for name in ("timeout_seconds", "start_timeout_seconds", "heartbeat_timeout_seconds")
        for value in (0.0, 604801, NAN)
    ],
    (OutputConfig, {"path": "x", "format": "avi"}, "`format` must be one of mp4, gif, webp, frame"),
    (OutputConfig, {"path": "x", "crf": 52}, "`crf` must be 0 to 51, got 52"),
    (ClipRequest, {"seed": 2**63}, f"`seed` must be 0 to {2**63 - 1}, got {2**63}"),
]


def _test_id(value: object) -> str:
    """Return the test id of a parameter, the same in every process, as pytest-xdist needs."""
    return getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("make", "given", "words"), REFUSED, ids=_test_id)
def test_what_cannot_be_done_is_refused(make: Any, given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError) as caught:
        make(**given)

    assert words in caught.value.message
    assert caught.value.field in {None, *configuration_fields()}
    assert exit_code_of(caught.value) == 2
    assert len(caught.value.message.splitlines()) == 1
    assert len(caught.value.hint.splitlines()) <= 1


@pytest.mark.parametrize(
    ("make", "name"),
    [
        *((SvdSampling, name) for name in (*params_of(SvdSampling), "fit")),
        *(
            (pipeline_config, name)
            for name in ("world_size", "num_threads", "device", "timeout_seconds")
        ),
        *((ModelConfig, name) for name in ("name", "dtype")),
        *((partial(OutputConfig, path="x"), name) for name in ("format", "crf")),
        (ClipRequest, "seed"),
    ],
    ids=_test_id,
)
def test_a_value_of_another_type_or_beyond_any_limit_is_refused(make: Any, name: str) -> None:
    """A value of a wrong type or far beyond a limit gives a RequestError.

    A clip's JSON or an HTTP request can have such values. They never give a TypeError or an
    OverflowError.
    """
    hostile: list[Any] = [10**400, -(10**5000), -1, 1e300, NAN, b"7", [7], {}, True]
    if name != "name":
        hostile.append("7" * 5000)
    for value in hostile:
        with pytest.raises(RequestError) as caught:
            make(**{name: value})
        assert len(caught.value.message) < 300
        assert caught.value.field == {"name": "model"}.get(name, name)


def test_the_parameters_of_a_family_keep_their_order_types_defaults_and_ranges() -> None:
    """A family's parameters keep their order, types, defaults and ranges.

    The JSON of these parameters identifies clips, for `--resume` and `verify`.
    """
    golden = json.loads((ROOT / "tests" / "golden" / "sampling.json").read_text())
    for family, known in golden.items():
        kind = SAMPLING_CLASSES[family]
        defaults = dataclasses.asdict(kind())
        # a clip's JSON does not have these two
        assert defaults.pop("has_last_image", False) is False
        assert defaults.pop("num_references", 0) == 0
        assert json.dumps(defaults) == json.dumps(known["defaults"])
        ranges = {name: [each.lowest, each.highest] for name, each in params_of(kind).items()}
        assert ranges == known["ranges"]


_MODELS_PAGE = (ROOT / "docs" / "models.md").read_text()
#: Families that take a last image, as the page of models lists them.
_ENDING_AT_AN_IMAGE = {
    cells[0].strip("`")
    for cells in table_rows(_MODELS_PAGE.partition("**A last image**")[2].partition("Refused")[0])
} - {"family"}
#: Largest number of references besides the image of a clip; 0 for all other families.
_REFERENCES = {
    "minimax_h3_references": 8,
    **dict.fromkeys(("wan_vace", "wan22_vace_modular"), 7),
    **dict.fromkeys(("wan_vace_control", "wan22_vace_control_modular"), 7),
}


@pytest.mark.parametrize("family", FAMILY_SPECS)
def test_images_that_a_family_does_not_take_are_refused(family: str) -> None:
    make: Any = partial(sampling_of_model, "a model", family, {})
    if family in _ENDING_AT_AN_IMAGE:
        assert make(has_last_image=True).has_last_image
    else:
        with pytest.raises(RequestError, match=f"the family {family} takes no `last_image`"):
            make(has_last_image=True)
    most = _REFERENCES.get(family, 0)
    assert make(num_references=most).num_references == most
    wrong = f"at most {most} `references` besides" if most else "takes no `references`"
    with pytest.raises(RequestError, match=wrong):
        make(num_references=most + 1)


def test_a_lowest_value_that_is_not_0_may_be_excluded() -> None:
    param = Param(name="x", lowest=2, highest=5, excludes_lowest=True, help="")
    param.check(2.5)
    for value, words in ((1, "`x` must be a finite number, 2 to 5, got 1"), (2, "above 2, got 2")):
        with pytest.raises(RequestError, match=words):
            param.check(value)


def test_frames_per_second_may_be_a_fraction_and_are_otherwise_whole() -> None:
    for kind in SAMPLING_CLASSES.values():
        assert (type(kind(fps=24.0).fps), kind(fps=23.976).fps) == (int, 23.976)
        assert isinstance(kind().fps, int)
    for fps in (0, 0.999, 240.001):
        with pytest.raises(
            RequestError, match=f"`fps` must be a finite number, 1 to 240, got {fps}"
        ):
            SvdSampling(fps=fps)


def test_other_fractions_are_never_whole_numbers_because_hashes_would_differ() -> None:
    assert type(SvdSampling(max_guidance_scale=3).max_guidance_scale) is float
    for kind in SAMPLING_CLASSES.values():
        if hasattr(kind(), "guidance_scale"):
            assert type(kind(guidance_scale=3).guidance_scale) is float


def test_a_clip_has_a_limit_of_pixels_whatever_its_frames() -> None:
    with pytest.raises(RequestError, match="29 frames of 2304 x 4096 are 273678336 pixels, more"):
        SvdSampling(height=2304, width=4096, num_frames=29)
    unresolved = SvdSampling(height=4096, width=4096)
    with pytest.raises(RequestError, match="25 frames of 4096 x 4096 are"):
        unresolved.with_model_defaults(model_frames=25)


def test_the_last_that_can_be_done_is_accepted() -> None:
    LatentSpec(shape=(1, 4, 2**12, 2**7, 2**7))
    SvdSampling(height=2304, width=4096, num_frames=25)
    SvdSampling(height=8, width=8, fps=1, motion_bucket_id=0, noise_aug_strength=0.0)
    SvdSampling(fps=240, motion_bucket_id=1023, min_guidance_scale=0.0, max_guidance_scale=0.0)
    SvdSampling(num_frames=1, max_guidance_scale=1.0)
    SvdSampling(num_frames=1, min_guidance_scale=1.5)
    pipeline_config(world_size=28, device="cuda:17", num_threads=THREADS)
    for crf, seed in ((0, 0), (51, 2**63 - 1)):
        OutputConfig(path="x", crf=crf)
        ClipRequest(seed=seed)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("exponent", [7, 8, 10, 11, 23, 24])
def test_guidance_that_rounds_to_one_is_refused(dtype: str, exponent: int) -> None:
    """A guidance scale is refused exactly if torch rounds it to 1 in the model's dtype."""
    import torch

    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    for scale in (1 + 2.0**-exponent, 1 + 1.5 * 2.0**-exponent):
        try:
            pipeline_config(max_guidance_scale=scale, dtype=dtype)
            refused = False
        except RequestError:
            refused = True
        assert refused == (torch.tensor(scale, dtype=types[dtype]).item() == 1), scale


def test_defaults_are_those_of_diffusers_but_for_the_steps() -> None:
    from diffusers import StableVideoDiffusionPipeline

    parameters = inspect.signature(StableVideoDiffusionPipeline.__call__).parameters
    ours = dataclasses.asdict(SvdSampling())

    assert ours.pop("num_inference_steps") == DEFAULT_NUM_STEPS == 28
    assert ours.pop("family") == "svd"
    assert ours.pop("fit") == "stretch"  # diffusers has no other way
    assert ours == {name: parameters[name].default for name in ours}
    assert {name: type(value) for name, value in ours.items()} == {
        name: type(parameters[name].default) for name in ours
    }


SECURITY = (ROOT / "docs" / "security.md").read_text()


@pytest.mark.parametrize(
    ("family", "two_ranks", "three_ranks"),
    [
        *(("echo", 8, 8), ("framepack", 4, 12), ("helios", 4, 12)),
        *(("helios_pyramid", 12, 12), ("helios_distilled", 30, 15)),
    ],
)
def test_a_trial_has_a_number_of_steps_that_the_family_can_make(
    family: str, two_ranks: int, three_ranks: int
) -> None:
    """A trial has few steps, but a number that the family can make on the given number of ranks.

    Clips with default parameters have 4 chunks. Echo has a fixed number of steps.
    """
    spec = FAMILY_SPECS[family]
    for num_ranks, steps in ((2, two_ranks), (3, three_ranks)):
        sampling = spec.sampling().with_few_steps(2, num_ranks)
        assert sampling.num_inference_steps == steps
        spec.check_sampling(None, sampling)  # these checks need no checkpoint


def test_the_documentation_has_every_limit_and_its_value() -> None:
    rows = [row for row in table_rows(SECURITY) if row[-1].startswith("`MAX_")]
    documented = {name.strip("`"): float(value) for _, value, name in rows}
    known = {name: float(value) for name, value in vars(limits).items() if name.startswith("MAX_")}
    assert documented == known
    assert MAX_RANKS == MAX_PLANNED_STEPS == 65536
    assert limits.SMALL_FILE_BYTES == 1_000_000
