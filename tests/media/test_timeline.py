"""The timeline picture shows every rank, clip and kind of action."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from PIL import Image

from svdpp.errors import RequestError
from svdpp.media.timeline import Panel, check_can_draw, draw_timeline
from svdpp.plan.forecast import Costs, Span, replay
from svdpp.plan.schedule import build_schedule
from svdpp.plan.split import split_steps
from tests.plan.plans import pipeline_routes


def _spans(world_size: int, num_clips: int) -> list[Span]:
    costs = Costs(step_seconds=1.1, encode_seconds=1.0, decode_seconds=4.5)
    routes = pipeline_routes(split_steps(28, world_size), range(num_clips))
    return replay(build_schedule(routes, world_size), costs)


def test_a_drawing_says_what_was_done_by_whom(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    import matplotlib as mpl

    path = tmp_path / "timeline.svg"
    spans = _spans(2, 3)
    with mpl.rc_context({"svg.fonttype": "none"}):
        draw_timeline([Panel("Measured", spans), Panel("Forecast", spans)], 2, path)
    words = re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())

    assert [words.count(word) for word in ("Measured", "Forecast")] == [1, 1]
    assert [words.count(word) for word in ("rank 0", "rank 1", "rank 2")] == [2, 2, 0]
    for word in ("encode", "denoise", "decode", "wait", "seconds; one colour a clip"):
        assert words.count(word) == 1


def test_equal_spans_give_an_equal_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        draw_timeline([Panel("Measured", _spans(4, 5))], 4, path)

    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert str(tmp_path) not in paths[0].read_text()


@pytest.mark.long
def test_twenty_eight_ranks_stay_within_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spans, path = _spans(28, 56), tmp_path / "timeline.png"
    draw_timeline([Panel("Measured", spans), Panel("Forecast", spans)], 28, path)

    with Image.open(path) as picture:
        assert picture.width == 1400
        assert picture.height < 1400


def test_without_matplotlib_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(RequestError) as caught:
        check_can_draw()

    assert "matplotlib" in caught.value.message
    assert caught.value.hint == "pip install 'svdpp[pictures]'"
