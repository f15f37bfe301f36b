"""Messages between ranks and the parent: their JSON gives back what they were made from."""

from __future__ import annotations

import json
from typing import Any

import pytest

from svdpp.config import SAMPLING_CLASSES, ClipRequest
from svdpp.worker.messages import ClipBatch, ClipJob, parse


@pytest.mark.parametrize("family", [*SAMPLING_CLASSES])
def test_sampling_parameters_of_a_request_keep_their_class(family: str) -> None:
    sampling = SAMPLING_CLASSES[family](height=256, width=512)
    batch = ClipBatch(jobs=(ClipJob(clip=3, request=ClipRequest(seed=1, sampling=sampling)),))
    received = parse(batch.to_bytes())
    assert received == batch
    assert type(received.jobs[0].request.sampling) is SAMPLING_CLASSES[family]


@pytest.mark.parametrize(
    ("sampling", "fault"),
    [
        ({"family": "unknown"}, "`family` must be one of svd, wan, "),
        ({"height": 256}, "sampling parameters need a family"),
        ({"family": "svd", "height": "tall"}, "height"),
        ({"family": "svd", "hight": 256}, "hight"),
        ({"family": "svd", "height": 100_000}, "`height` must be a multiple of 8"),
    ],
)
def test_wrong_sampling_parameters_are_refused(sampling: dict[str, Any], fault: str) -> None:
    message = {"kind": "PrepareImage", "request": {"seed": 1, "sampling": sampling}}
    with pytest.raises(ValueError, match=fault):
        parse(json.dumps(message).encode())
