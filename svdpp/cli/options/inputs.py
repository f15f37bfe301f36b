"""The options for a run's inputs: images, prompts and seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from svdpp.cli.options.declare import LAYOUT, PROMPTS, RECOVERY, VIDEO, argument
from svdpp.config.clip import check_prompt
from svdpp.config.files import read_small_file
from svdpp.config.limits import MAX_CLIPS, MAX_MEGAPIXELS
from svdpp.errors import InputError, RequestError

if TYPE_CHECKING:
    from svdpp.config import SamplingConfig
    from svdpp.media.image import Photo


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """The number of clips, if images and seeds do not determine it."""

    clips: int | None = LAYOUT.setting(
        "M", "Number of clips.", shown="2 for each rank", between=(1, MAX_CLIPS)
    )

    def at_least_one(self, default: int) -> int:
        """The number of clips."""
        return self.clips or max(1, default)


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Prompts, for models that take them."""

    prompt: str | None = PROMPTS.setting(
        "TEXT", "What happens in the clip; with an image or, for text to video, without."
    )
    prompts: Path | None = PROMPTS.setting(
        "FILE", "Several prompts, one in each line of a UTF-8 file."
    )
    negative_prompt: str | None = PROMPTS.setting("TEXT", "What must not be in the clip.")
    video: list[str] | None = PROMPTS.setting(
        "NAME=FILE",
        "A further video of each clip, repeatable; svdpp models FAMILY lists those that it takes.",
    )

    @property
    def has_prompt(self) -> bool:
        """Whether any prompt is given."""
        return self.prompt is not None or self.prompts is not None

    def videos(
        self, sampling: SamplingConfig, max_pixels: int = MAX_MEGAPIXELS * 10**6
    ) -> tuple[tuple[str, Photo], ...]:
        """The further videos by name; the frames that a clip takes are decoded."""
        from svdpp.media.inputs import read_video

        paths: dict[str, Path] = {}
        for text in self.video or ():
            name, _, path = text.partition("=")
            if not path:
                raise RequestError(f"--video takes NAME=FILE, got {text!r}")
            paths[name] = Path(path)
        sampling.check_videos(paths)
        read = [read_video(path, sampling.frames, max_pixels) for path in paths.values()]
        return tuple(zip(paths, read, strict=True))

    def all_prompts(self) -> list[str]:
        """The given prompts, in order; empty if there are none."""
        if self.prompts is None:
            return [] if self.prompt is None else [self.prompt]
        if self.prompt is not None:
            raise RequestError("--prompt and --prompts contradict each other", "use one of them")
        name, prompts = f"--prompts {str(self.prompts)!r}", []
        data = read_small_file(self.prompts, "--prompts")
        for number, line in enumerate(data.split(b"\n"), start=1):
            try:
                if prompt := line.decode().strip():
                    check_prompt("a prompt", prompt)
                    prompts.append(prompt)
            except UnicodeDecodeError as error:
                raise InputError(f"{name}, line {number}: not UTF-8 text") from error
            except RequestError as error:
                raise InputError(f"{name}, line {number}: {error}") from error
        if not prompts:
            raise InputError(f"{name} has no prompt", "write one prompt in each line")
        return prompts


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Which images are taken."""

    max_megapixels: int = VIDEO.setting(
        "N",
        f"Largest image, in millions of pixels, {MAX_MEGAPIXELS} at most.",
        default=24,
        between=(1, MAX_MEGAPIXELS),
    )

    @property
    def max_pixels(self) -> int:
        """The same in pixels."""
        return self.max_megapixels * 10**6


@dataclass(frozen=True, kw_only=True)
class InputOptions(ImageOptions):
    """Photographs and seeds; each combination of them, and of prompts, becomes a clip."""

    inputs: list[str] | None = argument(
        "INPUT...", "Images or videos: files, folders, quoted globs."
    )
    seeds: str | None = VIDEO.setting(
        "LIST", "Several seeds for each image, such as 1-8 or 1,3,5-7.", shown="--seed alone"
    )
    recursive: bool = VIDEO.switch("Include images in subfolders.", "--recursive", "-r")
    keep_going: bool = RECOVERY.switch(
        "If some images cannot be used, make the clips of the others; the exit code "
        "is the highest of all errors."
    )
