"""Options of a run's files: images, prompts and seeds, clips, log and trace."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from svdpp import __version__
from svdpp.cli.console import Console
from svdpp.cli.options.declare import (
    DIAGNOSTICS,
    LAYOUT,
    OUTPUT,
    PROMPTS,
    RECOVERY,
    VIDEO,
    argument,
    flag,
    in_range,
    option,
    path_option,
)
from svdpp.config import Encoding, VideoFormat
from svdpp.config.families.registry import LAST_IMAGE_FAMILIES, REFERENCE_FAMILIES
from svdpp.config.limits import (
    MAX_CLIPS,
    MAX_MEGAPIXELS,
    SMALL_FILE_BYTES,
    read_small_file,
    require,
)
from svdpp.config.pipeline import check_prompt
from svdpp.errors import InputError, OutputError
from svdpp.launch.world import World

if TYPE_CHECKING:
    from svdpp.config import SamplingConfig
    from svdpp.driver.output_policy import OutputPolicy
    from svdpp.driver.pipeline import Pipeline
    from svdpp.media.images import MediaFile
    from svdpp.media.inputs import ClipInput

#: Value of `--prompts` that reads each image's prompt from the text file beside it, such as cat.txt
#: for cat.jpg.
SAME_STEM = "same-stem"


def clips_option(help: str, default: str | bool) -> Any:
    """Return the option `--clips`, the number of clips, for a command's option group.

    Args:
        help: Help text.
        default: Default, in words; False: the help text already contains the default.
    """
    return option(
        panel=LAYOUT,
        metavar="M",
        help=help,
        show_default=default,
        callback=in_range(1, MAX_CLIPS),
        common=True,
    )


def out_option(help: str) -> Any:
    """Return the option `--out`, the folder or file of the output, for a command's option group.

    Args:
        help: Help text.
    """
    return path_option(
        "--out", "-o", panel=OUTPUT, metavar="PATH", help=help, show_default=False, common=True
    )


@dataclass(frozen=True, kw_only=True)
class ClipOptions:
    """Option `--clips`, the number of clips, if images and seeds do not determine it."""

    clips: Annotated[int | None, clips_option("Number of clips.", "2 for each rank")] = None


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Options of a clip's prompts, last image, reference images and further videos."""

    prompt: Annotated[
        str | None,
        option(
            panel=PROMPTS,
            metavar="TEXT",
            help="What happens in the clip.",
            common=True,
        ),
    ] = None
    prompts: Annotated[
        Path | None,
        path_option(
            panel=PROMPTS,
            metavar="FILE",
            help="File with a prompt in each line (- is stdin), or same-stem: cat.txt has "
            "cat.jpg's prompt.",
            common=True,
        ),
    ] = None
    negative_prompt: Annotated[
        str | None,
        option(panel=PROMPTS, metavar="TEXT", help="What must not be in the clip.", common=True),
    ] = None
    last_image: Annotated[
        Path | None,
        path_option(
            panel=PROMPTS,
            metavar="FILE",
            help="Image at which each clip ends, for models of the families "
            f"{', '.join(LAST_IMAGE_FAMILIES)}.",
        ),
    ] = None
    reference: Annotated[
        list[Path] | None,
        path_option(
            panel=PROMPTS,
            metavar="FILE",
            help="A further reference image for each clip, repeatable; INPUT is the first one. For "
            f"models of the families {', '.join(REFERENCE_FAMILIES)}.",
        ),
    ] = None
    video: Annotated[
        list[str] | None,
        option(
            panel=PROMPTS,
            metavar="NAME=FILE",
            help="A further input video of each clip, repeatable; svdpp models FAMILY lists the "
            "names that the family takes.",
        ),
    ] = None

    def combined(
        self,
        images: Sequence[MediaFile | None],
        sampling: SamplingConfig,
        max_pixels: int = MAX_MEGAPIXELS * 10**6,
        *,
        example: str | None = None,
    ) -> list[ClipInput]:
        """Return one input for each combination of an image and a prompt.

        Every input also has the files of `--last-image`, `--reference` and `--video`. With
        `--prompts same-stem`, each image has only the prompt in the text file beside it.

        Args:
            images: Images; None means a clip without an image.
            sampling: Sampling parameters of the clips.
            max_pixels: Maximum number of pixels of each last image, each reference image, and each
                frame of a video from `--video`.
            example: Prompt to use if the user gives no prompt; None: then clips have no prompt.

        Returns:
            Inputs in the order of the images, then of the prompts.

        Raises:
            RequestError: `--prompt` and `--prompts` are given, or `--video` is not NAME=FILE or
                names a video that the family does not take.
            InputError: A file cannot be read, or holds no valid prompt.
        """
        from svdpp.media.images import read_image
        from svdpp.media.inputs import ClipInput

        self.check_prompts()
        videos = self._videos(sampling, max_pixels)
        last_image = None
        if self.last_image is not None:
            last_image = read_image(self.last_image, max_pixels)[1]
        references = tuple(read_image(path, max_pixels)[1] for path in self.reference or ())
        if self.uses_captions:
            captions: list[str | None] = [*self._captions(images)]
            pairs = list(zip(images, captions, strict=True))
        else:
            prompts: list[str | None] = [*self._all_prompts()] or [example]
            pairs = [(image, prompt) for image in images for prompt in prompts]
        return [
            ClipInput(
                image,
                prompt,
                self.negative_prompt,
                videos,
                last_image,
                references=references,
            )
            for image, prompt in pairs
        ]

    @property
    def reference_paths(self) -> tuple[str, ...]:
        """Paths of the reference images, which every clip gets."""
        return tuple(map(str, self.reference or ()))

    def check_prompts(self) -> None:
        """Raise a `RequestError` if a prompt of the command line is too long or invalid Unicode.

        Raises:
            RequestError: A prompt is too long, or is not valid Unicode.
        """
        check_prompt("prompt", self.prompt)
        check_prompt("negative_prompt", self.negative_prompt)

    @property
    def uses_captions(self) -> bool:
        """Whether the prompt of each image is read from a text file beside the image."""
        return str(self.prompts) == SAME_STEM

    def _captions(self, images: Sequence[MediaFile | None]) -> list[str]:
        from svdpp.media.prompts import read_caption

        require(self.prompt is None, "--prompt and --prompts contradict each other")
        files = [image.path for image in images if image is not None]
        require(len(files) == len(images), "--prompts same-stem needs images", "name them as INPUT")
        captions = [read_caption(path) for path in files]
        missing = [
            str(path.with_suffix(".txt"))
            for path, text in zip(files, captions, strict=True)
            if text is None
        ]
        if missing:
            noun = "prompt is missing" if len(missing) == 1 else "prompts are missing"
            listed = "".join(f"\n  {name!r}" for name in missing)
            raise InputError(
                f"--prompts same-stem: {len(missing)} {noun}:{listed}",
                "put a text file with the prompt beside each image, such as cat.txt beside cat.jpg",
                details={"missing": missing, "num_missing": len(missing)},
            )
        return [text for text in captions if text is not None]

    def _videos(
        self, sampling: SamplingConfig, max_pixels: int
    ) -> tuple[tuple[str, MediaFile], ...]:
        from svdpp.media.video_frames import probe_video

        paths = {name: Path(path) for name, path in self.video_paths.items()}
        sampling.check_videos(paths)
        read = [probe_video(path, sampling.frames, max_pixels) for path in paths.values()]
        return tuple(zip(paths, read, strict=True))

    @property
    def video_paths(self) -> dict[str, str]:
        """Paths of the further videos, by the names in `--video NAME=FILE`.

        Raises:
            RequestError: `--video` is not NAME=FILE.
        """
        paths: dict[str, str] = {}
        for text in self.video or ():
            name, _, path = text.partition("=")
            require(bool(path), f"--video takes NAME=FILE, got {text!r}", value=text)
            paths[name] = path
        return paths

    def _all_prompts(self) -> list[str]:
        if self.prompts is None:
            return [] if self.prompt is None else [self.prompt]
        from svdpp.media.prompts import parse_prompts

        require(self.prompt is None, "--prompt and --prompts contradict each other")
        if str(self.prompts) == "-":
            data = sys.stdin.buffer.read(SMALL_FILE_BYTES + 1)
            limit = f"--prompts -: stdin has more than {SMALL_FILE_BYTES} bytes"
            require(len(data) <= SMALL_FILE_BYTES, limit, max_bytes=SMALL_FILE_BYTES)
        else:
            data = read_small_file(self.prompts, "--prompts")
        return parse_prompts(data, f"--prompts {str(self.prompts)!r}")


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Option for the largest number of pixels of an image."""

    max_megapixels: Annotated[
        int,
        option(
            panel=VIDEO,
            metavar="N",
            help=f"Largest image, in millions of pixels, {MAX_MEGAPIXELS} at most.",
            callback=in_range(1, MAX_MEGAPIXELS),
        ),
    ] = 24


@dataclass(frozen=True, kw_only=True)
class InputOptions(ImageOptions):
    """Options of inputs: images and seeds, whose combinations become clips; or a jobs file."""

    inputs: Annotated[
        list[str] | None, argument("INPUT", "Images or videos: files, folders, quoted globs.")
    ] = None
    seeds: Annotated[
        str | None,
        option(
            panel=VIDEO,
            metavar="LIST",
            help="Seeds for each image, such as 1-3,7.",
            common=True,
        ),
    ] = None
    jobs: Annotated[
        Path | None,
        path_option(
            panel=PROMPTS,
            metavar="FILE",
            help="Jobs file (.jsonl, .csv, .yaml): one clip a line.",
            common=True,
        ),
    ] = None
    keep_going: Annotated[
        bool,
        flag(
            "--keep-going",
            panel=RECOVERY,
            help="If some images or lines of --jobs cannot be used, make the clips of the others, "
            "and exit with the highest code of all errors.",
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Options of the output: folder and encoding of the clips, and treatment of existing files."""

    out: Annotated[Path, out_option("Output folder (default: out), or one clip's file.")] = Path(
        "out"
    )
    format: Annotated[
        VideoFormat | None,
        option(
            panel=OUTPUT,
            metavar="FORMAT",
            help="Format of the clips: mp4, gif, webp, or frames, a folder of PNG files.",
            show_default="the suffix of --out, else mp4",
        ),
    ] = None
    crf: Annotated[
        int,
        option(panel=OUTPUT, metavar="Q", help="H.264 quality of mp4, 0 (lossless) to 51 (worst)."),
    ] = 18
    name: Annotated[
        str | None,
        option(
            panel=OUTPUT,
            metavar="TEMPLATE",
            help="Name of each clip in the folder, such as {stem}-{seed}-{index:04}; also "
            "{prompt}, {line}, {size} and parameters.",
        ),
    ] = None
    resume: Annotated[
        bool,
        flag(
            "--resume",
            panel=OUTPUT,
            help="Keep finished clips and make the missing ones; with --jobs, also remake clips of "
            "changed lines.",
            common=True,
        ),
    ] = False
    overwrite: Annotated[
        bool, flag("--overwrite", panel=OUTPUT, help="Replace clips that exist.", common=True)
    ] = False
    latents_dir: Annotated[
        Path | None,
        path_option(
            panel=RECOVERY,
            metavar="DIR",
            help="Keep each transferred latent here until its clip is finished. --resume continues "
            "from it, with any number of ranks and the same --threads.",
            show_default="keep none",
        ),
    ] = None
    dry_run: Annotated[
        bool,
        flag(
            "--dry-run",
            panel=OUTPUT,
            help="Show names, layout and memory; make no clips.",
            common=True,
        ),
    ] = False

    def policy(self, *, is_restarted: bool, replaces_changed: bool = False) -> OutputPolicy:
        """Return a run's output policy: folder and format, and treatment of existing files.

        Args:
            is_restarted: Whether a launcher restarted the run, which then resumes.
            replaces_changed: Whether `--resume` makes a clip again if its parameters have changed.
                False: such a clip causes an error.

        Raises:
            RequestError: The suffix of `--out` contradicts `--format`, or a value is out of range.
        """
        from svdpp.driver.output_policy import OutputPolicy

        policy = OutputPolicy.at(
            self.out,
            format=self.format,
            encoding=Encoding(crf=self.crf),
            overwrite=self.overwrite,
            resume=self.resume,
            replaces_changed=replaces_changed,
            is_restarted=is_restarted,
            latents_folder=self.latents_dir,
        )
        wrong = "`name` is for a folder of clips, and `out` names a file"
        require(not (policy.single_clip and self.name), wrong, "leave one of them out")
        return policy


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """Options of the log: how much is printed on stderr, and the path of a log file."""

    verbose: Annotated[
        int,
        flag(
            "--verbose",
            "-v",
            panel=DIAGNOSTICS,
            help="Log to stderr when ranks are ready, each transfer and each finished clip; -vv "
            "adds each step.",
            show_default=False,
            count=True,
        ),
    ] = 0
    log_file: Annotated[
        Path | None,
        path_option(
            panel=DIAGNOSTICS,
            metavar="FILE",
            help="Append the log to this file as JSON lines; -v adds every transfer and step. At "
            "50 MB the file is renamed to FILE.1, and four old files are kept.",
            envvar="SVDPP_LOG_FILE",
            show_envvar=False,
        ),
    ] = None

    def open(self, console: Console, launched: World | None, *, warns: bool = False) -> None:
        """Open the log of a command: text on stderr, and JSON lines in the log file.

        Args:
            console: Console that prints the records.
            launched: Rank and world size from the launcher (torchrun or srun). Only the first rank
                of each host prints. None: no launcher started this process.
            warns: Whether warnings are printed even without `-v`.

        Raises:
            OutputError: The log file cannot be written.
        """
        from svdpp.cli.progress import open_log

        quiet = console.quiet or (launched is not None and launched.local_rank != 0)
        if quiet:
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        open_log(
            verbosity=self.verbose,
            log_file=self.log_file,
            write=lambda text: console.err.print(text, markup=False),
            quiet=quiet,
            warns=warns,
        )


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Option `--trace`, which writes a trace file of the run."""

    trace: Annotated[
        Path | None,
        path_option(
            panel=DIAGNOSTICS,
            metavar="FILE.json",
            help="Write every action, step and transfer in Chrome's trace format, for "
            "ui.perfetto.dev.",
        ),
    ] = None

    def check(self) -> None:
        """Raise an error if the trace file of `--trace` cannot be written, before any work.

        Raises:
            RequestError: The trace's name does not end in `.json`.
            OutputError: The trace's folder cannot be written, or the path is not a file.
        """
        from svdpp.media import output_files

        if self.trace is None:
            return
        is_json = self.trace.suffix.lower() == ".json"
        wrong = f"--trace must end in .json, got {str(self.trace)!r}"
        require(is_json, wrong, path=str(self.trace))
        output_files.check_writable(self.trace.parent)
        output_files.check_replaceable(str(self.trace))

    @property
    def paths(self) -> list[str]:
        """Paths of the requested trace files, quoted for a shell."""
        return [] if self.trace is None else [shlex.quote(str(self.trace))]

    @contextlib.contextmanager
    def write_trace(self, pipeline: Pipeline) -> Iterator[None]:
        """Write the trace of a pipeline during the `with` block; complete it even after an error.

        Args:
            pipeline: Pipeline whose `with` block is inside this one.
        """
        if self.trace is None:
            yield
            return
        from svdpp.diagnostics.chrome_trace import TraceFile

        config = pipeline.config
        about = {
            "svdpp": __version__,
            "world_size": config.world_size,
            "num_steps": config.sampling.num_inference_steps,
            "dtype": config.model.dtype,
            "device": config.device,
            "backend": pipeline.backend,
        }
        file = TraceFile(self.trace, about)
        pipeline.observe(file)
        try:
            yield
        except BaseException:
            # The error of the run is reported instead of the failure to write the trace.
            with contextlib.suppress(OutputError):
                file.close()
            raise
        file.close()
