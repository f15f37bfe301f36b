"""Demo models, and what `svdpp models` prints about them and about the families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from svdpp.cli.options import complete
from svdpp.config import DEMO_MODELS
from svdpp.config.families.registry import FAMILY_OF_PIPELINE, FAMILY_SPECS
from svdpp.media.video import read_frames
from tests.support.shell import PHOTO, ROOT, assert_error, svdpp_here

PROMPT = "a red circle moves right on a blue background"


def asked(name: str) -> dict[str, Any]:
    answer = svdpp_here("models", name, "--json")
    assert answer.code == 0, answer
    (about,) = json.loads(answer.out)["families"]
    return about


def test_the_list_names_a_model_for_each_family_in_80_columns() -> None:
    answer = svdpp_here("models")
    assert answer.code == 0, answer
    lines = answer.out.splitlines()
    assert max(map(len, lines)) <= 80
    for family, spec in FAMILY_SPECS.items():
        assert any(line.startswith(f"{family}: {spec.title[:20]}") for line in lines), family
        assert any(line.startswith(f"    --model {spec.example}") for line in lines), family
    # The examples of some families need --family, because their checkpoints belong to another
    # family by default.
    borrowed = [line for line in lines if " --family" in line]  # a long name has its own line
    by_name = [
        family
        for family, spec in FAMILY_SPECS.items()
        if any(FAMILY_OF_PIPELINE[alias] != family for alias in spec.aliases)
    ]
    assert len(borrowed) == len(by_name) > 0
    assert [name for name in DEMO_MODELS if f"    --model {name}" not in lines] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", DEMO_MODELS)
def test_a_demo_tells_its_own_defaults(name: str) -> None:
    about, demo = asked(name), DEMO_MODELS[name]
    told = {**about["defaults"], **{k: v["default"] for k, v in about["parameters"].items()}}
    assert {key: told[key] for key in demo.sampling} == demo.sampling
    assert (about["model"], about["license"]) == (name, demo.license)
    assert "example" not in about  # the family's example has another license
    clip = [PHOTO] if "text" not in about["inputs"] else ["--prompt", PROMPT]
    # There is no --device, because a demo needs no GPU.
    dry = svdpp_here("run", *clip, "--model", name, "--dry-run")
    assert dry.code == 0, dry
    sampling = about["defaults"]
    assert f"{sampling['width']}x{sampling['height']}" in dry.out + dry.err
    assert name in complete.models("d")
    assert name in complete.families_and_demos("d")


def test_demo_text_knows_the_words_that_it_lists() -> None:
    folder = ROOT / "svdpp/assets" / DEMO_MODELS["demo-text"].folder
    file = json.loads((folder / "tokenizer/tokenizer.json").read_text())
    known = {piece.removeprefix("\u2581") for piece, _ in file["model"]["vocab"]}
    about = asked("demo-text")
    words = {word for texts in about["words"].values() for text in texts for word in text.split()}
    assert {*words, *about["prompt"].split()} <= known
    assert "  colours: red, green, blue," in svdpp_here("models", "demo-text").out


def test_a_demo_refuses_what_the_other_one_takes() -> None:
    assert_error(svdpp_here("run", PHOTO, "--model", "demo-text"), 2, "takes no image")
    given = (PHOTO, "--prompt", "a red circle", "--model", "demo-text", "--device", "cpu")
    assert_error(svdpp_here("verify", *given), 2, "takes no image")
    frames = svdpp_here("run", "--prompt", PROMPT, "--model", "demo-text", "--frames", "8")
    assert_error(
        frames, 2, "--frames must be 16, the only number of frames that the model makes, got 8"
    )
    refused = svdpp_here("run", "--prompt", PROMPT, "--model", "demo")
    assert_error(refused, 2, "takes no prompt\nhint: leave it out, or try --model demo-text")


@pytest.mark.slow
@pytest.mark.full
def test_prompts_steer_the_clips_of_demo_text(tmp_path: Path) -> None:
    """The clips of demo-text show what their prompts say.

    Latte drops padding, so the embeddings of the two prompts have different sizes (10 and 9
    tokens).
    """
    (tmp_path / "prompts.txt").write_text(
        f"{PROMPT}\na yellow triangle falls on a black background\n"
    )
    run = ("run", "--model", "demo-text", "--device", "cpu", "--threads", "1", "--steps", "12")
    made = svdpp_here(*run, "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path))
    assert made.code == 0, made
    clips = [Path(line) for line in made.out.splitlines()]
    circle, triangle = (np.asarray(read_frames(clip, "mp4"), np.float32) for clip in clips)
    assert circle.shape == triangle.shape == (16, 64, 64, 3)
    assert np.mean((circle[..., 2] > 150) & (circle[..., 0] < 100)) > 0.6  # blue
    assert np.mean(triangle.max(-1) < 100) > 0.6  # black
    is_red = (circle[..., 0] > 150) & (circle[..., 2] < 100)
    columns = [np.nonzero(frame)[1].mean() for frame in is_red]
    rows = [np.nonzero(frame)[0].mean() for frame in triangle[..., 0] > 150]
    for places in (columns, rows):
        assert places[0] < 26 < 38 < places[-1]
    proven = svdpp_here("verify", *map(str, clips))
    assert proven.code == 0, proven
