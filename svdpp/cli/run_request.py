"""The request of `svdpp run`: its options, checked and combined step by step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from svdpp.cli.options.inputs import InputOptions, PromptOptions
from svdpp.cli.options.outputs import OutputOptions
from svdpp.cli.options.sampling import parse_seeds
from svdpp.cli.request import PipelineOptions, PipelineRequest
from svdpp.config import PipelineConfig, PromptedSampling, SamplingConfig
from svdpp.errors import RequestError, SvdppError
from svdpp.launch.world import World, is_member

if TYPE_CHECKING:
    from collections.abc import Sequence

    from svdpp.driver.jobs import OutputPolicy
    from svdpp.driver.pipeline import Pipeline
    from svdpp.media.image import Photo
    from svdpp.media.inputs import ClipInput

# Clips whose measurements a run keeps in memory; about 10 MB, however long it is.
_TRACE_CLIPS = 1000

# Ratio of two aspect ratios whose difference is not visible.
_SAME_SHAPE = 1.05


@dataclass(frozen=True, kw_only=True)
class RunOptions(PipelineOptions, InputOptions, PromptOptions, OutputOptions):
    """The options of the pipeline, and those of its clips."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What `svdpp run` is asked for."""

    launched: World | None
    options: RunOptions

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of each image's clips."""
        seed, seeds = self.options.seed, self.options.seeds
        if None not in (seed, seeds):
            raise RequestError("--seed and --seeds contradict each other")
        return [seed or 0] if seeds is None else parse_seeds(seeds)

    @cached_property
    def device(self) -> str:
        """The name of the device, where `auto` is decided."""
        return self.options.device_name()

    @cached_property
    def policy(self) -> OutputPolicy:
        """Where clips are written, and what happens to existing files."""
        launched = self.launched
        return self.options.policy(is_restarted=launched is not None and launched.restarts > 0)

    def check(self) -> None:
        """Checks all that needs neither torch nor the contents of files, to answer quickly."""
        # These are checked when they are made.
        assert self.options.place()
        assert self._sampling
        assert self.seeds
        if self.options.is_dummy:
            raise RequestError(
                "the dummy model makes no video files",
                "use --model demo, or svdpp simulate, which runs the dummy model",
            )
        if self.options.dry_run and self.launched is not None:
            raise RequestError("--dry-run starts no ranks", "start it without torchrun or srun")
        if self.options.has_prompt and not isinstance(self._sampling, PromptedSampling):
            # Before the clips' names, which would be those of one image for each prompt.
            raise RequestError(f"model {self.options.model!r} takes no prompt", "leave it out")
        if not self.options.inputs and not self.options.has_prompt:
            raise RequestError(
                "INPUT is missing: name an image, or give a prompt to a model that takes one",
                "svdpp run photo.jpg",
            )

    def clip_inputs(self) -> tuple[list[ClipInput], list[SvdppError]]:
        """What clips are made from, and errors for inputs that make none; only rank 0 has them.

        Each image is combined with each prompt.
        """
        from svdpp.media.inputs import ClipInput

        if is_member(self.launched):
            return [], []
        found: Sequence[Photo | None] = [None]
        problems: list[SvdppError] = []
        if self.options.inputs:
            found, problems = self._images()
        prompts: list[str | None] = [*self.options.all_prompts()] or [None]
        videos = self.options.videos(self._sampling, self.options.max_pixels)
        inputs = [
            ClipInput(image, prompt, self.options.negative_prompt, videos)
            for image in found
            for prompt in prompts
        ]
        if not self.options.keep_going:
            return inputs, []
        from svdpp.driver.jobs import without_shared_names

        inputs, shared = without_shared_names(inputs, self.seeds, self.policy)
        return inputs, [*problems, *shared]

    def _images(self) -> tuple[list[Photo], list[SvdppError]]:
        from svdpp.media.inputs import raise_all, sift_inputs

        found, problems = sift_inputs(
            self.options.inputs or (),
            recursive=self.options.recursive,
            max_pixels=self.options.max_pixels,
            video_frames=self._sampling.video_frames,
        )
        if problems and not self.options.keep_going:
            raise_all(problems, "--keep-going makes the clips of the others" if found else "")
        return found, [*problems]

    def config(self, num_clips: int) -> tuple[PipelineConfig, str]:
        """The configuration, and a remark on the choice of the layout; "" for none."""
        return PipelineRequest(
            options=self.options,
            num_clips=None if self.launched else num_clips,
            launched=self.launched,
            device=self.device,
            from_image=bool(self.options.inputs),
        ).resolve()

    def stretched(self, found: Sequence[ClipInput]) -> str:
        """A remark on images of another shape than the frame's; "" if there are none."""
        config = self._sampling
        shape = config.width / config.height
        images = {photo.path: photo.width / photo.height for each in found if (photo := each.photo)}
        names = [
            path.name
            for path, own in images.items()
            if not 1 / _SAME_SHAPE <= own / shape <= _SAME_SHAPE
        ]
        if not names or config.fit != "stretch":
            return ""
        more = f" and {len(names) - 1} more are" if names[1:] else " is"
        return (
            f"fit: {names[0]!r}{more} stretched to {config.width}x{config.height}; "
            "--fit crop keeps proportions"
        )

    def pipeline(
        self,
        config: PipelineConfig,
        inputs: Sequence[ClipInput] = (),
        profile_path: str | None = None,
    ) -> Pipeline:
        """The pipeline of `config`, with the request's folders; rank 0 gives inputs and profile."""
        from svdpp.driver.pipeline import Pipeline

        latents = self.options.latents_dir
        files = [each.photo for each in inputs if each.photo]
        files += [video for _, video in (inputs[0].videos if inputs else ())]
        folders = {file.path.parent: file.path for file in files}
        shared = [self.options.place().folder, *folders.values()]
        return Pipeline(
            config,
            latents_folder=None if latents is None else str(latents.absolute()),
            shared_paths=[str(path.absolute()) for path in shared],
            profile_path=profile_path,
            trace_clips=_TRACE_CLIPS,
        )

    @cached_property
    def _sampling(self) -> SamplingConfig:
        return self.options.sampling_config(from_image=bool(self.options.inputs))
