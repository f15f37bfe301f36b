"""The options `--trace` and `--profile`, and their files, also of a failed run."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from svdpp import __version__
from svdpp.cli.options.declare import DIAGNOSTICS
from svdpp.errors import OutputError, RequestError

if TYPE_CHECKING:
    from svdpp.diagnostics.chrome_trace import TraceFile
    from svdpp.driver.pipeline import Pipeline


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Traces of a run."""

    trace: Path | None = DIAGNOSTICS.setting(
        "FILE.json",
        "Write every action, step and transfer in Chrome's trace format, for ui.perfetto.dev.",
    )
    profile: Path | None = DIAGNOSTICS.setting(
        "FILE.json",
        "Profile one clip on rank 0 with torch.profiler, which slows it down, and write "
        "every kernel in Chrome's trace format.",
    )

    def check(self) -> None:
        """Checks the files before any work."""
        check_target("--trace", self.trace, ".json")
        check_target("--profile", self.profile, ".json")

    @property
    def paths(self) -> list[str]:
        """The requested files, quoted for a shell."""
        found = (self.trace, self.profile)
        return [shlex.quote(str(path)) for path in found if path is not None]

    @property
    def profile_path(self) -> str | None:
        """The profile for `Pipeline`; absolute, because a rank writes it."""
        return None if self.profile is None else str(self.profile.absolute())

    @contextlib.contextmanager
    def of(self, pipeline: Pipeline) -> Iterator[None]:
        """Completes the trace when the block ends, also after a failure; enter it first."""
        file = None if self.trace is None else _trace_file(pipeline, self.trace)
        try:
            yield
        except BaseException:
            with contextlib.suppress(OutputError):  # report the failure of the run
                if file is not None:
                    file.close()
            raise
        if file is not None:
            file.close()


def check_target(option: str, path: Path | None, *suffixes: str) -> None:
    """Checks before a long run that a file can be written at its end; None is no file."""
    from svdpp.media import output_files

    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise RequestError(f"{option} must end in {' or '.join(suffixes)}, got {str(path)!r}")
    output_files.check_writable(path.parent)
    output_files.check_free(str(path))


def _trace_file(pipeline: Pipeline, path: Path) -> TraceFile:
    from svdpp.diagnostics.chrome_trace import TraceFile

    config = pipeline.config
    about = {
        "svdpp": __version__,
        "world_size": config.world_size,
        "num_steps": config.sampling.num_inference_steps,
        "dtype": config.model.dtype,
        "device": config.device,
        "num_threads": config.num_threads,
        "backend": pipeline.backend,
    }
    file = TraceFile(path, about)
    pipeline.observe(file)
    return file
