"""`OutputPolicy`: where a run writes its clips, how it encodes them, and which clips it keeps."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from svdpp.config import Encoding, OutputConfig, VideoFormat
from svdpp.driver.clip_table import CLIP_TABLE, read_names
from svdpp.errors import RequestError
from svdpp.media import video

#: Name of a run's manifest in the folder of its clips.
MANIFEST = "run.json"
_VIDEO_SUFFIXES = (".mp4", ".gif", ".webp", ".avi", ".m4v", ".mkv", ".mov", ".mpg", ".webm")


@dataclass(frozen=True, kw_only=True)
class OutputPolicy:
    """Policy of a run for the output folder, the names of the clips, and existing files.

    With `overwrite`, all existing clips are made again. With `resume`, finished clips are kept, and
    unfinished clips resume from their checkpoints in `latents_folder`. A run that a launcher has
    restarted (`is_restarted`) always resumes; if `overwrite` is set, the restarted run replaces
    only the clips that have other parameters than requested.
    """

    folder: Path
    single_clip: str = ""
    """Name of the run's only clip, without the suffix; empty if the run makes a folder of clips."""
    encoding: Encoding = field(default_factory=Encoding)
    overwrite: bool = False
    resume: bool = False
    replaces_changed: bool = False
    """Whether `resume` replaces a clip whose input or sampling parameters have changed, as in runs
    with a jobs file. False: such a clip is an error."""
    is_restarted: bool = False
    latents_folder: Path | None = None

    @staticmethod
    def at(
        out: Path,
        *,
        format: VideoFormat | None = None,
        encoding: Encoding | None = None,
        **more: Any,
    ) -> OutputPolicy:
        """Return the output policy for a path: a folder of clips, or the file of a single clip.

        Args:
            out: Path of a folder, or of a file with the suffix of a video format.
            format: Format of the clips; None: the format of the file's suffix, or mp4 for a folder.
            encoding: Encoding of the clips, apart from the format; None: the default encoding.
            more: Further fields of the policy.

        Raises:
            RequestError: The suffix contradicts the format, or the format is unknown.
        """
        suffix = out.suffix.lower()
        is_file = suffix in _VIDEO_SUFFIXES and not out.is_dir()
        formats = (format,) if format else ("mp4", "gif", "webp")
        if is_file and suffix[1:] not in formats:
            known = ", ".join(f".{name}" for name in formats)
            raise RequestError(
                f"unsupported output format: `out` {shlex.quote(str(out))} (supported: {known})",
                "use a supported suffix; leave the suffix out to name a folder",
                details={"path": str(out), "supported": list(formats)},
            )
        kind: Any = format or (suffix[1:] if is_file else "mp4")
        return OutputPolicy(
            folder=out.parent if is_file else out,
            single_clip=out.name[: -len(suffix)] if is_file else "",
            encoding=replace(encoding or Encoding(), format=kind),
            **more,
        )

    @cached_property
    def absolute_folder(self) -> Path:
        """Absolute path of the folder of the clips."""
        return self.folder.absolute()

    def file_name(self, name: str) -> str:
        """Return the name of a clip's file, such as `cat_1.mp4` for the clip `cat_1`."""
        return f"{name}{video.FORMAT_SUFFIXES[self.encoding.format]}"

    def output_of(self, name: str) -> OutputConfig:
        """Return the configuration of a clip's output file: path and encoding.

        Args:
            name: Name of the clip, without a suffix.
        """
        path = self.absolute_folder / self.file_name(name)
        return OutputConfig(path=str(path), **vars(self.encoding))

    @property
    def keeps_finished(self) -> bool:
        """Whether a run keeps clips that an earlier run made with the requested parameters."""
        return self.resume or self.is_restarted

    @property
    def manifest(self) -> Path:
        """Path of the run's manifest (`run.json`), in the folder of the clips."""
        return self._own_file(MANIFEST)

    @property
    def clip_table(self) -> Path:
        """Path of the table of the run's clips (`clips.jsonl`), in the folder of the clips."""
        return self._own_file(CLIP_TABLE)

    def _own_file(self, name: str) -> Path:
        return self.folder / (f"{self.single_clip}.{name}" if self.single_clip else name)

    @property
    def recorded_names(self) -> dict[str, list[str]]:
        """Names that an earlier run gave to clips, by `job_key`; empty if no clips are kept."""
        return read_names(self.clip_table) if self.keeps_finished else {}
