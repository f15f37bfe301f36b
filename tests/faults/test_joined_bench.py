"""A bench on launched ranks: an error that ends rank 0 between two cases ends all ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.shell import ROOT
from tests.faults.processes import allowing_for_others, wait_until

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timing]

TINY = (
    *("--model.name=dummy", "--model.latent_shape=[1, 4, 2, 8, 8]", "--workload.clips=2"),
    *("--workload.steps=2", "--measure.repeats=1", "--measure.warmups=0"),
)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _start(rank: int, port: int, home: Path) -> subprocess.Popen[bytes]:
    """Starts ranks as srun does: no launcher ends the others, and rank 0 hosts the store."""
    environment = {
        **os.environ,
        **{"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(home)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"},
        **{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
    }
    with (home / f"said{rank}").open("wb") as said:
        return subprocess.Popen(
            [*(sys.executable, "-m", "svdpp", "bench", "smoke", *TINY), "--results", str(home)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment,
        )


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two ranks that have begun to measure."""
    port = _free_port()
    started = [_start(rank, port, tmp_path) for rank in range(2)]
    try:
        wait_until(lambda: list(tmp_path.glob("smoke/*/config.yaml")), 100, "the results' folder")
        yield started
    finally:
        for rank in started:
            rank.kill()
            rank.wait()


def _codes(ranks: list[subprocess.Popen[bytes]]) -> list[int]:
    return [rank.wait(allowing_for_others(40)) for rank in ranks]


def test_results_that_cannot_be_written_end_every_rank_by_the_same_code(
    ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    (config,) = tmp_path.glob("smoke/*/config.yaml")
    (config.parent / "rounds.jsonl").mkdir()  # where the first case's figures would be written
    assert _codes(ranks) == [8, 8]
    assert "error: rounds.jsonl cannot be written" in (tmp_path / "said0").read_text()
    assert (tmp_path / "said1").read_text() == "", "rank 0 has said it"


def test_a_rank_that_dies_while_diffusers_alone_is_measured_is_noticed(
    ranks: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    said = tmp_path / "said0"
    wait_until(lambda: "data parallel: " in said.read_text(), 100, "the last case before")
    ranks[1].kill()
    assert _codes(ranks) == [6, -9]
    assert "ended while it waited for work" in said.read_text()
