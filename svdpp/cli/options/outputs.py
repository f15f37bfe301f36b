"""Owns the options about what is written: clips, what becomes of earlier ones, and pictures."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from svdpp.cli.options.declare import DIAGNOSTICS, RECOVERY, VIDEO, flag, option
from svdpp.config import OutputConfig

if TYPE_CHECKING:
    from svdpp.cli.trace_outputs import TraceOutputs
    from svdpp.driver.jobs import OutputPolicy


@dataclass(frozen=True, kw_only=True)
class FolderOptions:
    """Where clips go."""

    out: Annotated[
        Path,
        option(
            *("--out", "-o"),
            panel=VIDEO,
            metavar="DIR",
            help="Folder for the clips.",
        ),
    ] = Path("out")


@dataclass(frozen=True, kw_only=True)
class OverwriteOptions:
    """Whether files that are there already are replaced."""

    overwrite: Annotated[
        bool, flag("--overwrite", panel=RECOVERY, help="Replace clips that exist.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class OutputOptions(OverwriteOptions, FolderOptions):
    """Where clips go, how they are encoded, and what becomes of files that are there already."""

    format: Annotated[
        str,
        option(
            "--format",
            panel=VIDEO,
            metavar="mp4|gif|webp|frames",
            choices=("mp4", "gif", "webp", "frames"),
            help="Kind of output; frames: a folder of PNG files.",
        ),
    ] = "mp4"
    crf: Annotated[
        int,
        option(
            "--crf",
            panel=VIDEO,
            metavar="Q",
            help="H.264 quality of mp4, 0 (lossless) to 51 (worst).",
        ),
    ] = 18
    resume: Annotated[
        bool,
        flag(
            *("--resume", "--skip-existing"),
            panel=RECOVERY,
            help="Go on with an interrupted run: keep finished clips, go on with begun ones from "
            "--latents-dir, make the others.",
        ),
    ] = False
    latents_dir: Annotated[
        Path | None,
        option(
            "--latents-dir",
            panel=RECOVERY,
            metavar="DIR",
            help="Keep each latent that goes from rank to rank here until its clip is finished, so "
            "that --resume can go on from it, with any number of ranks of as many --threads.",
            default="keep none",
        ),
    ] = None

    def check(self) -> OutputConfig:
        """Format and quality, checked.

        Raises:
            RequestError: there is no such format or quality.
        """
        return OutputConfig(path=str(self.out), format=self.format, crf=self.crf)  # type: ignore[arg-type]

    def policy(self) -> "OutputPolicy":
        """Where clips go, and what becomes of files that are there.

        Raises:
            RequestError: there is no such format or quality.
        """
        from svdpp.cli.request import is_restarted
        from svdpp.driver.jobs import OutputPolicy

        checked = self.check()
        return OutputPolicy(
            folder=self.out,
            format=checked.format,
            crf=checked.crf,
            overwrite=self.overwrite,
            resume=self.resume,
            is_restarted=is_restarted(),
            latents_folder=self.latents_dir,
        )


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Pictures and traces of a run."""

    trace: Annotated[
        Path | None,
        option(
            "--trace",
            panel=DIAGNOSTICS,
            metavar="FILE.json",
            help="Write every action, step and transfer in Chrome's trace format, for "
            "ui.perfetto.dev.",
        ),
    ] = None
    timeline: Annotated[
        Path | None,
        option(
            "--timeline",
            panel=DIAGNOSTICS,
            metavar="FILE.svg|png",
            help="Draw ranks and time, measured and forecast. Needs matplotlib.",
        ),
    ] = None
    profile: Annotated[
        Path | None,
        option(
            "--profile",
            panel=DIAGNOSTICS,
            metavar="FILE.json",
            help="Look at one clip on rank 0 with torch.profiler, which slows it down, and write "
            "every kernel in Chrome's trace format.",
        ),
    ] = None

    def checked(self) -> "TraceOutputs":
        """The files, checked before any work.

        Raises:
            RequestError: a name is of no known format, or matplotlib is not installed.
            OutputError: one of them cannot be written.
        """
        from svdpp.cli.trace_outputs import TraceOutputs

        return TraceOutputs(trace=self.trace, timeline=self.timeline, profile=self.profile)
