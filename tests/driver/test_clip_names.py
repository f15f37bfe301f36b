"""Each input of a run names its own clips."""

from __future__ import annotations

from pathlib import Path

import pytest

from svdpp.driver.clip_names import clip_names
from svdpp.media.inputs import ClipInput, MediaFile
from svdpp.media.video import clip_path


def image(path: str, prompt: str | None = None) -> ClipInput:
    return ClipInput(MediaFile(Path(path), "0" * 64, 64, 64), prompt)


def text(prompt: str) -> ClipInput:
    return ClipInput(prompt=prompt)


X = "x" * 48
LONG = X + " and then "


@pytest.mark.parametrize(
    ("inputs", "names"),
    [
        ([text("\u6d77\u4e0a"), text("\u5c71")], ["\u6d77\u4e0a", "\u5c71"]),
        ([text("!"), text("?")], ["prompt", "prompt-2"]),
        (
            [text(LONG + "a"), text(LONG + "b"), text(LONG)],
            [f"{'x' * 48}{n}" for n in ("", "-2", "-3")],
        ),
        ([text("a cat"), text("a cat")], ["a-cat", "a-cat-2"]),
        ([image("a.jpg"), image("a.png"), image("a-2.png")], ["a", "a-3", "a-2"]),
        ([image("one/a.jpg"), image("two/a.jpg")], ["a", "a-2"]),
        ([image("a.jpg", "a cat"), image("a.jpg", "a dog")], ["a-a-cat", "a-a-dog"]),
        ([image("a.jpg", "a cat"), image("b.jpg", "a cat")], ["a", "b"]),
    ],
)
def test_names_differ_and_say_what_a_clip_is_made_from(
    inputs: list[ClipInput], names: list[str]
) -> None:
    assert clip_names(inputs) == names


def test_names_that_are_too_long_differ_as_well() -> None:
    stem = "\u4f60" * 80
    inputs = [image(f"{folder}/{stem}{end}.jpg") for folder in "abc" for end in ("", "x")]
    names = clip_names(inputs)
    for seed in (0, 2**63 - 1):
        paths = {clip_path(Path("out"), name, seed, "mp4") for name in names}
        assert len(paths) == len(inputs)


def test_a_hundred_thousand_equal_names_take_no_time() -> None:
    assert len(set(clip_names([text("a cat")] * 100_000))) == 100_000
