"""Fixtures for hosts, or the reason why this machine cannot provide them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.hosts import Hosts, NoHosts, made, made_far_apart

MakeHosts = Callable[[int], Hosts]


@pytest.fixture
def make_hosts(tmp_path: Path) -> Iterator[MakeHosts]:
    """Creates hosts on one network."""
    with contextlib.ExitStack() as stack:

        def make(num_hosts: int) -> Hosts:
            try:
                return stack.enter_context(made(num_hosts, tmp_path))
            except NoHosts as reason:
                pytest.skip(str(reason))

        yield make


@pytest.fixture
def far_apart(tmp_path: Path) -> Iterator[Hosts]:
    """Two hosts with 20 ms between them, each way, and every hundredth packet lost."""
    with contextlib.ExitStack() as stack:
        try:
            hosts = stack.enter_context(made_far_apart(tmp_path, delay=0.02, loss=0.01))
        except NoHosts as reason:
            pytest.skip(str(reason))
        yield hosts
