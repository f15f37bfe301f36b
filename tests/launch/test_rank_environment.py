"""What ranks find in their environment before they import torch; the user's own words stay."""

from __future__ import annotations

from svdpp.launch import environment


def test_defaults_are_set_and_the_users_stay() -> None:
    found = {"DIFFUSERS_VERBOSITY": "info"}
    environment.set_defaults(found)
    assert found["DIFFUSERS_VERBOSITY"] == "info"
    assert found["TRANSFORMERS_VERBOSITY"] == "error"
    assert found["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_allocators_older_name_counts() -> None:
    found = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}
    environment.set_defaults(found)
    assert found["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:128"
