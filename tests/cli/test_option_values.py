"""The values of options: seeds, precision, LoRAs, prompts, parameters; variables that set them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from svdpp.cli.options.files import PromptOptions
from svdpp.cli.options.model import ModelOptions, parse_seeds
from svdpp.config import DUMMY_MODEL, Dtype, Lora, SvdSampling
from svdpp.errors import InputError, RequestError
from tests.cli.shell import assert_error, svdpp_here


def test_seeds() -> None:
    expected = {" 1 , 3,5-7": [1, 3, 5, 6, 7], "1-3,2-4,1": [1, 2, 3, 4], "4-4": [4]}
    assert {text: parse_seeds(text) for text in expected} == expected
    wrong = (
        "",
        ",",
        "1,",
        "1,,2",
        "a",
        "1-",
        "-1",
        "1-2-3",
        "1.5",
        "0x1",
        "+1",
        "٣",
        "1 2",
        "1\n2",
    )
    for text in (*wrong, "3-1", "0-100000", str(2**63), "9" * 5000):
        with pytest.raises(RequestError) as caught:
            parse_seeds(text)
        assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("text", "device", "family", "dtype"),
    [
        (None, "cpu", "wan", "fp32"),
        (None, "cuda", "svd", "fp16"),
        (None, "cuda:0", "ltx", "bf16"),
        (None, "cuda", None, "fp16"),
        ("bf16", "cpu", "svd", "bf16"),
    ],
)
def test_dtypes(text: Dtype | None, device: str, family: str | None, dtype: str) -> None:
    assert ModelOptions(model="demo", dtype=text).model_config(device, family).dtype == dtype


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("fast.safetensors", Lora(name="fast.safetensors")),
        ("a/b/c:0.5", Lora(name="a/b/c", weight=0.5)),
        ("a:-1.5e-1:high", Lora(name="a", weight=-0.15, expert="high")),
        ("a:low", Lora(name="a", expert="low")),
        ("a:b:.5", Lora(name="a:b", weight=0.5)),
    ],
)
def test_a_lora_is_a_file_a_weight_and_an_expert(text: str, lora: Lora) -> None:
    assert ModelOptions(lora=[text]).model_config("cpu", "wan").loras == (lora,)


def test_what_is_no_lora_and_what_takes_none_is_refused() -> None:
    for text in ("", " ", "a:1000", "a:inf:low:1e999"):
        with pytest.raises(RequestError, match="--lora"):
            ModelOptions(lora=[text]).model_config("cpu", "wan")
    with pytest.raises(RequestError, match="the dummy model takes no --lora"):
        ModelOptions(model=DUMMY_MODEL, lora=["a"]).model_config("cpu", "svd")


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("stg_scal=1", "no parameter 'stg_scal'", "did you mean stg_scale?"),
        ("zzz=1", "no parameter 'zzz'", "svdpp models ltx2"),
        ("stg_scale", "NAME=VALUE", ""),
        ("stg_block=1.5", "stg_block must be a whole number", ""),
        ("stg_scale=x", "stg_scale must be a number", ""),
        ("guidance_rescale=1.5", "--param guidance_rescale", ""),
    ],
)
def test_parameters_have_names_types_and_limits(text: str, words: str, hint: str) -> None:
    given = ModelOptions(param=["stg_scale=2", "stg_block=5"])
    taken: Any = given.sampling_config(family="ltx2")
    assert (taken.stg_scale, taken.stg_block) == (2.0, 5)
    with pytest.raises(RequestError, match=words) as error:
        ModelOptions(param=[text]).sampling_config(family="ltx2")
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a cat\n\n" + b"x" * 20_001, "line 3: a prompt must be a text of at most 20000"),
        (b"a cat\nthe \xff sea\n", "line 2: 'utf-8' codec can't decode"),
        (b"a\0cat\n", "line 1: a prompt must be"),
        (b"\n \n", "has no prompt"),
    ],
)
def test_a_wrong_prompt_is_named_by_file_line_and_option(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "prompts.txt").write_bytes(content)
    options = PromptOptions(prompts=tmp_path / "prompts.txt")
    with pytest.raises(InputError, match=r"--prompts '.*prompts.txt'.* " + message):
        options.combined([], SvdSampling())


def _plan(*options: str, **env: str) -> dict[str, Any]:
    answer = svdpp_here("plan", "--json", *options, env=env)
    assert answer.code == 0, answer
    result: dict[str, Any] = json.loads(answer.out)
    return result


def test_an_option_before_a_variable_before_what_is_built_in() -> None:
    assert _plan()["world_size"] == 4
    assert _plan(SVDPP_WORLD="7")["world_size"] == _plan(SVDPP_GPUS="7")["world_size"] == 7
    assert _plan("--gpus", "14", SVDPP_WORLD="7")["world_size"] == 14
    assert _plan("--world", "14", SVDPP_GPUS="7")["world_size"] == 14
    assert "layouts" in _plan(SVDPP_COMPARE="1")
    assert "layouts" not in _plan(SVDPP_COMPARE="off")
    assert "layouts" not in _plan(SVDPP_COMPARE="")  # as if it was not set


def test_env_shows_what_is_set_without_passwords() -> None:
    variables = {"SVDPP_FRAM": "2", "SVDPP_QUEUE": "postgresql://a:b@c/d"}
    answer = svdpp_here("env", "--json", env=variables)
    shown = {"SVDPP_FRAM": "2", "SVDPP_QUEUE": "postgresql://***@c/d"}
    assert json.loads(answer.out)["defaults"] == shown
    assert "a:b@" not in svdpp_here("env", env=variables).out


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("SVDPP_GPUS", "2.5", "'--gpus' / '--world': '2.5' is not a valid integer"),
        ("SVDPP_QUIET", "x", "'--quiet' / '-q': 'x' is not a valid boolean"),
        ("SVDPP_STEPS", "0", "--steps must be 1 to 1000, got 0"),
    ],
)
def test_a_wrong_value_of_a_variable(variable: str, value: str, sentence: str) -> None:
    assert_error(svdpp_here("plan", env={variable: value}), 2, sentence)
