"""Inputs that the tests of families share."""

from __future__ import annotations

import pytest

from tests.support.clip_inputs import Inputs, create_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Images, and videos of noise."""
    return create_inputs(tmp_path_factory.mktemp("inputs"))
