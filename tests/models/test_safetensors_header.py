"""Headers are read as the safetensors library reads them; hostile files give a `ModelError`."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from svdpp.config import ModelConfig
from svdpp.errors import ModelError
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.files import read_safetensors_header


@pytest.mark.parametrize("part", ["unet", "vae", "image_encoder"])
def test_header_equals_that_of_the_library(part: str) -> None:
    checkpoint = find_checkpoint(ModelConfig(name="demo"))
    ((path, header),) = checkpoint.weight_files(part).items()
    with safe_open(path, "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        theirs = {key: (each.get_dtype(), tuple(each.get_shape())) for key, each in slices.items()}
    assert header == theirs


def header_or_none(path: Path, content: bytes) -> dict[str, Any] | None:
    """The header, or None for a `ModelError`. Any other exception fails the test."""
    path.write_bytes(content)
    try:
        return read_safetensors_header(path)
    except ModelError as error:
        message = error.message
    assert message.isprintable()
    assert len(message) < 400
    return None


def wrap(text: bytes, num_bytes: int = 0) -> bytes:
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


SIZES = st.one_of(st.integers(-2, 9), st.integers(), st.booleans(), st.floats(), st.none())
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F16", "X", "", 1, None]),
        "shape": st.lists(SIZES, max_size=3),
        "data_offsets": st.lists(SIZES, max_size=3),
    },
)
FUZZ = settings(
    max_examples=max(150, settings.default.max_examples),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(entries=st.dictionaries(st.text(max_size=20), st.one_of(ENTRIES, SIZES), max_size=4))
def test_any_json_gives_a_header_or_an_error(tmp_path: Path, entries: dict[str, Any]) -> None:
    header_or_none(tmp_path / "x.safetensors", wrap(json.dumps(entries).encode(), 8))


@pytest.mark.parametrize(
    "content",
    [
        wrap(b'{"a":' + b"[" * 100_000),
        wrap(b'{"a":' * 100_000),
        wrap(b'{"a":1' + b"0" * 9000 + b"}"),
        wrap(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8),
        wrap(b'{"a":{"dtype":"U8","shape":[' + b"281474976710655," * 9999 + b"1]}}"),
        wrap(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 99_999_999) + b"{}",
    ],
    ids=["deep list", "deep object", "huge number", "gap", "huge shape", "misfit", "2^63", "short"],
)
def test_hostile_header(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="is damaged or truncated") as caught:
        read_safetensors_header(path)
    assert len(caught.value.message) < 400


def test_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        read_safetensors_header(tmp_path / "absent.safetensors")
