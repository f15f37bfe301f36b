"""`svdpp profile --draft`: measures start steps, and writes the best trade-offs to a file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from svdpp.cli.command_line import typed
from svdpp.cli.console import Console, counted
from svdpp.config import DEFAULT_MODEL, PipelineConfig
from svdpp.errors import RequestError
from svdpp.plan.draft_starts import DraftProfile, MeasuredStartSteps, best_trades, parse_start_steps
from svdpp.redaction import recorded_name, redact


def profile_draft(
    console: Console,
    config: PipelineConfig,
    inputs: Sequence[str],
    out: Path,
    *,
    seed: int,
    start_steps: str | None,
) -> None:
    """Measures drafts of up to `config.world_size` ranks, prints the result and writes it."""
    from svdpp.diagnostics.draft_sweep import measure_start_steps
    from svdpp.media import output_files
    from svdpp.media.examples import example_photos
    from svdpp.media.inputs import check_inputs

    if config.world_size < 2:
        raise RequestError("a draft needs 2 ranks or more", "use --world 2 or more")
    num_steps = config.sampling.num_inference_steps
    given = () if start_steps is None else (parse_start_steps(start_steps, num_steps, None),)
    found = check_inputs(list(inputs) or [str(path) for path in example_photos()])
    names = [photo.path.name for photo in found]
    console.info(
        f"{counted(num_steps, 'step')}, {counted(len(names), 'photograph')}: {', '.join(names)}"
    )
    paths = [photo.path for photo in found]
    measured = measure_start_steps(config, paths, seed=seed, start_steps=given)
    profile = DraftProfile(
        model=recorded_name(config.model.name),
        num_steps=num_steps,
        photographs=tuple(names),
        source=f"measured by: {redact(typed())}",
        choices=best_trades(measured),
    )
    output_files.write_json(out, profile.to_json())
    if console.as_json:
        console.json(profile.to_json())
    else:
        _print(console, profile.choices, num_steps)
    words = [*_given(config), "--steps", str(num_steps), "--draft-starts", str(out)]
    console.info(f"wrote {shlex.quote(str(out))}")
    console.info(f"next: svdpp run PHOTO --draft {shlex.join(words)}")


def _given(config: PipelineConfig) -> list[str]:
    """Model and device as options of `run`, without its defaults."""
    model = config.model
    named = {
        "model": None if model.name == DEFAULT_MODEL else model.name,
        "revision": model.revision,
        "variant": model.variant,
        "device": None if config.device == "cuda" else config.device,
    }
    return [word for name, value in named.items() if value for word in (f"--{name}", value)]


def _print(console: Console, choices: Sequence[MeasuredStartSteps], num_steps: int) -> None:
    rows = [
        (
            str(len(each.start_steps)),
            ",".join(map(str, each.start_steps)),
            f"{each.rounds} of {num_steps}",
            f"{num_steps / each.rounds:.2f}x",
            "equal" if each.psnr_db is None else f"{each.psnr_db:.1f} dB",
            str(each.max_levels),
        )
        for each in choices
    ]
    console.table(("ranks", "start steps", "rounds", "sooner", "distance", "levels"), rows)
    console.result(
        "distance: PSNR between the frames of draft and exact clip, for the worst photograph"
    )
