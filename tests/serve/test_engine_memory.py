"""The memory of a server does not grow with the number of clips that it has made."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from svdpp.serve.job import JobState
from tests.serve.engines import Serving, dummy_config, serving


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _make(service: Serving, seeds: range) -> None:
    """Makes clips, at most 20 of which are open; removes their rows, as the retention does."""
    for first in range(seeds.start, seeds.stop, 20):
        ids = service.add(*range(first, first + 20))
        jobs = service.wait_final(ids)
        assert {job.state for job in jobs} == {JobState.COMPLETED}
        for job_id in ids:
            service.store.remove(job_id)
    service.ended.clear()
    gc.collect()


@pytest.mark.full
@pytest.mark.long
@pytest.mark.processes
def test_memory_does_not_grow_with_the_number_of_clips(tmp_path: Path) -> None:
    with serving(tmp_path, dummy_config(2)) as service:
        _make(service, range(0, 200))
        processes = {"server": os.getpid(), **{f"rank {r}": p for r, p in enumerate(service.pids)}}
        before = {name: _resident(pid) for name, pid in processes.items()}
        _make(service, range(200, 2200))
        after = {name: _resident(pid) for name, pid in processes.items()}
        assert service.engine.restarts == 0
    growth = {name: after[name] / before[name] - 1 for name in processes}
    print({name: f"{100 * share:.2f} %" for name, share in growth.items()})
    # In a process without pytest the server grows by less than 1 %.
    assert growth.pop("server") < 0.03
    assert max(growth.values()) < 0.02, growth
