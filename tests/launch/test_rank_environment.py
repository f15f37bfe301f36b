"""Default environment variables of ranks; values that the user has set stay."""

from __future__ import annotations

from svdpp.launch import environment


def test_defaults_do_not_replace_the_users_values() -> None:
    variables = {"DIFFUSERS_VERBOSITY": "info"}
    environment.set_defaults(variables)
    assert variables["DIFFUSERS_VERBOSITY"] == "info"
    assert variables["TRANSFORMERS_VERBOSITY"] == "error"
    assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_older_allocator_variable_is_used() -> None:
    variables = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    environment.set_defaults(variables)
    assert variables["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:128"
