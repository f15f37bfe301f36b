"""Owns the FLOPs of clips by their size, counted once each in a short-lived process."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import asdict, replace

from loguru import logger

from svdpp.config import ModelConfig, SamplingConfig
from svdpp.diagnostics.utilisation import PartFlops
from svdpp.serve.gate import shape_only
from svdpp.serve.helper_process import helper_command, helper_environment

_MAX_SIZES = 64
_SECONDS = 600.0

#: Counts FLOPs; None if that failed. It may take seconds.
Count = Callable[[ModelConfig, SamplingConfig], PartFlops | None]


def count_in_process(model: ModelConfig, sampling: SamplingConfig) -> PartFlops | None:
    """Counts in another process, of low priority: this one must not import diffusers."""
    # The ranks have loaded the model, so nothing needs to be downloaded.
    asked = {"model": asdict(replace(model, local_files_only=True)), "sampling": asdict(sampling)}
    try:
        done = subprocess.run(
            helper_command("svdpp.serve.count_flops", str(os.getpid())),
            input=json.dumps(asked).encode(),
            capture_output=True,
            timeout=_SECONDS,
            check=True,
            env=helper_environment(),
            cwd="/",
        )
        return PartFlops(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, subprocess.SubprocessError, LookupError, ValueError, TypeError) as error:
        logger.warning("the FLOPs of a clip could not be counted: {}", error)
        return None


class FlopCounts:
    """The FLOPs of clips, counted in the background the first time that they are asked for.

    Any thread may call it.

    Args:
        model: of the clips.
        count: does the counting, in a thread.
    """

    def __init__(self, model: ModelConfig, count: Count = count_in_process) -> None:
        self._model = model
        self._count = count
        self._lock = threading.Lock()
        self._known: dict[SamplingConfig, PartFlops | None] = {}
        self._is_counting = False

    def of(self, sampling: SamplingConfig) -> PartFlops | None:
        """The FLOPs of a clip of `sampling`; None if they are not known, or not yet."""
        if self._model.is_dummy:
            return None
        size = shape_only(sampling)
        with self._lock:
            if size in self._known or self._is_counting or len(self._known) >= _MAX_SIZES:
                return self._known.get(size)
            self._is_counting = True
        threading.Thread(target=self._learn, args=(size,), name="flops", daemon=True).start()
        return None

    def _learn(self, size: SamplingConfig) -> None:
        flops = self._count(self._model, size)
        with self._lock:
            self._known[size] = flops
            self._is_counting = False
