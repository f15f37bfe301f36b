"""Leftover files are removed when their clip is finished, and again at the end of the run."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import torch

from svdpp.comm.packet import Packet
from svdpp.config import ClipRequest, OutputConfig
from svdpp.driver.clips import OpenClips
from svdpp.errors import ClosedError, InputError, error_to_dict
from svdpp.worker.messages import ClipDone, ClipFailed
from svdpp.worker.tensor_files import LatentCheckpoints, saved_steps

_DIES_WHILE_WRITING = """
import os, sys
from svdpp.media.output_files import atomic_output
with atomic_output(sys.argv[1], ".part") as temporary:
    temporary.write_text("half")
    os._exit(1)
"""


def _request(seed: int, output: Path | None = None) -> ClipRequest:
    key = hashlib.sha256(bytes([seed])).hexdigest()
    config = None if output is None else OutputConfig(path=str(output))
    return ClipRequest(seed=seed, latents_key=key, output=config)


def _keep(folder: Path, request: ClipRequest) -> None:
    assert request.latents_key is not None
    packet = Packet(request.seed, 7, 0.0, {"latents": torch.zeros(2)})
    LatentCheckpoints(folder, {}).save(request.latents_key, packet)


def _is_kept(folder: Path, request: ClipRequest) -> bool:
    assert request.latents_key is not None
    return bool(saved_steps(folder, request.latents_key))


def _clips(folder: Path | None, *requests: ClipRequest) -> OpenClips:
    """The first of them is finished, the second is lost, and the third is on its way."""
    clips = OpenClips(lambda _: None, latents_folder=None if folder is None else str(folder))
    clips.add(requests, [28] * len(requests), for_results=False)
    clips(0, ClipDone(clip=0, metadata={}))
    clips(0, ClipFailed(clip=1, error=error_to_dict(InputError("no"))))
    clips.end(ClosedError("the end"))
    return clips


def test_checkpoints_of_finished_clips_go_however_late_they_come(tmp_path: Path) -> None:
    finished, lost, unfinished = map(_request, range(3))
    for request in (finished, lost, unfinished):
        _keep(tmp_path, request)
    clips = _clips(tmp_path, finished, lost, unfinished)
    assert not _is_kept(tmp_path, finished)
    _keep(tmp_path, finished)  # by a rank with a slow disk
    clips.clean_up()
    assert not _is_kept(tmp_path, finished)
    assert _is_kept(tmp_path, lost)
    assert _is_kept(tmp_path, unfinished)


def test_half_written_files_go_from_the_folders_of_all_clips(tmp_path: Path) -> None:
    places = [tmp_path / name / "clip.mp4" for name in ("finished", "lost", "unfinished")]
    for place in places:
        subprocess.run([sys.executable, "-c", _DIES_WHILE_WRITING, str(place)], check=False)
        assert len(list(place.parent.iterdir())) == 1
    _clips(None, *(_request(seed, place) for seed, place in enumerate(places))).clean_up()
    assert [list(place.parent.iterdir()) for place in places] == [[], [], []]
