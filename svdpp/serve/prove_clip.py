"""The process that verifies one finished clip: `prove_clip JSON PHOTO ANSWER PARENT_PID`.

PHOTO is empty for a clip from text alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from svdpp.config import PipelineConfig
from svdpp.errors import OutOfMemoryError, SvdppError, error_to_dict
from svdpp.launch import environment
from svdpp.launch.gpus import free_bytes
from svdpp.launch.process_lifetime import end_with_parent

_NICE = 19


def main() -> None:
    """Verifies the clip and writes the answer, completely or not at all."""
    clip, photo, answer, parent = sys.argv[1:]
    end_with_parent(int(parent))
    os.nice(_NICE)
    environment.collect_rarely()
    path = Path(answer)
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(_verified(Path(clip), Path(photo) if photo else None)))
    unfinished.rename(path)


def _verified(clip: Path, photo: Path | None) -> dict[str, Any]:
    # Imported late: torch takes seconds, and by then the process has its low priority.
    from svdpp.verification.clip_proof import Settings, plan_proofs, prove

    try:
        groups, proofs = plan_proofs([clip], Settings(image=photo, local_files_only=True))
        for tasks in groups:
            _check_gpu(tasks[0].config)
            proofs += prove(tasks)
        (proof,) = proofs
        return {**proof.to_json(), "differences": proof.differences}
    except SvdppError as error:
        return {"equal": None, "error": error_to_dict(error)}


def _check_gpu(config: PipelineConfig) -> None:
    """Refuses a GPU on which the ranks leave too little: they must not run out of memory."""
    if config.device == "cpu":
        return
    from svdpp.diagnostics.memory_estimate import estimate_ranks

    (need,) = estimate_ranks(config)
    free = free_bytes(config.device)
    if need.total_bytes > free:
        raise OutOfMemoryError(
            f"the whole model needs about {need.total_bytes / 2**30:.1f} GiB on a GPU beside the "
            f"ranks, and {config.device} has {free / 2**30:.1f} GiB free"
        )


if __name__ == "__main__":
    main()
