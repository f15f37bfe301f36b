"""The values of options: seeds, precision, LoRAs, files of prompts, and a family's parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from svdpp.cli.options.files import PromptOptions
from svdpp.cli.options.model import ModelOptions, parse_params, parse_seeds
from svdpp.config import DUMMY_MODEL, SAMPLING_CLASSES, Dtype, Lora, SvdSampling
from svdpp.errors import InputError, RequestError


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ("5", [5]),
        ("1,3,5-7", [1, 3, 5, 6, 7]),
        (" 1 , 2 ", [1, 2]),
        ("1-3,2-4,1", [1, 2, 3, 4]),
        ("4-4", [4]),
        (str(2**63 - 1), [2**63 - 1]),
    ],
)
def test_seeds(seeds: str, expected: list[int]) -> None:
    assert parse_seeds(seeds) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "1,", ",1", "1,,2", "a", "1-", "-1", "1--2", "1-2-3", "1.5", "1e3", "0x1", "+1"),
        *("٣", "1 2", "1;2", "3-1", "0-100000", str(2**63), "9" * 20, "9" * 5000, "1\n2"),
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_texts_that_are_no_seeds(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_seeds(text)

    assert caught.value.message.isprintable()


@pytest.mark.timeout(60)  # a quadratic search takes hours
@pytest.mark.parametrize("text", ["0-99999", "0-99998,100000-199999", "0-99998,0-99999"])
def test_many_seeds_are_read_or_refused_at_once(text: str) -> None:
    try:
        seeds = parse_seeds(text)
    except RequestError:
        return
    assert len(seeds) == len(set(seeds))


@pytest.mark.parametrize(
    ("text", "device", "family", "dtype"),
    [
        (None, "cpu", "wan", "fp32"),
        (None, "cuda", "svd", "fp16"),
        (None, "cuda:0", "ltx", "bf16"),
        (None, "cuda", None, "fp16"),
        ("fp32", "cuda", "wan", "fp32"),
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
    ("content", "message"),
    [
        (b"a cat\n\n" + b"x" * 20_001, "line 3: a prompt must be a text of at most 20000"),
        (b"a cat\nthe \xff sea\n", "line 2: not UTF-8 text"),
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


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("stg_scal=1", "no parameter 'stg_scal'", "did you mean stg_scale?"),
        ("zzz=1", "no parameter 'zzz'", "svdpp models ltx2"),
        ("stg_scale", "NAME=VALUE", ""),
        ("stg_block=1.5", "stg_block must be a whole number", ""),
        ("stg_scale=x", "stg_scale must be a number", ""),
    ],
)
def test_wrong_parameters_are_refused(text: str, words: str, hint: str) -> None:
    with pytest.raises(RequestError, match=words) as error:
        parse_params([text], "ltx2")
    assert hint in error.value.hint


def test_parameters_have_the_types_and_limits_of_their_family() -> None:
    assert parse_params(["stg_scale=2", "stg_block=5"], "ltx2") == {
        "stg_scale": 2.0,
        "stg_block": 5,
    }
    kind: Any = SAMPLING_CLASSES["ltx2"]
    with pytest.raises(RequestError, match="--param guidance_rescale"):
        kind(guidance_rescale=1.5)
