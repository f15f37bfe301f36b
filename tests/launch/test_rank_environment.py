"""Default environment variables of ranks; values that the user has set stay."""

from __future__ import annotations

import os

import pytest

from svdpp.launch import environment


def test_defaults_do_not_replace_the_users_values() -> None:
    variables = {"DIFFUSERS_VERBOSITY": "info"}
    environment.set_defaults(variables)
    assert variables["DIFFUSERS_VERBOSITY"] == "info"
    assert variables["TRANSFORMERS_VERBOSITY"] == "error"
    assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


@pytest.mark.parametrize(
    ("torchrun", "value", "expected"),
    [(False, "1", "1"), (True, "1", "0"), (True, "3", "3"), (False, None, "0")],
)
def test_torchruns_own_default_gives_way(
    torchrun: bool, value: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    variables = {"TORCHELASTIC_RUN_ID": "none"} if torchrun else {}
    variables |= {} if value is None else {name: value}
    monkeypatch.setattr(os, "environ", dict(variables))
    with environment.defaults():
        assert os.environ[name] == expected
    assert os.environ == variables
    environment.set_defaults(variables)
    assert variables[name] == expected


def test_the_older_allocator_variable_is_used() -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    environment.set_defaults(variables)
    assert variables["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:128"
