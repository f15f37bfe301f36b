"""HTTP responses with files: ranges, conditions (RFC 9110) and file names (RFC 6266)."""

from __future__ import annotations

import asyncio
import mimetypes
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from svdpp.config import OutputConfig
from svdpp.config.families.registry import SAMPLING_CLASSES
from svdpp.config.limits import MAX_REFERENCES
from svdpp.config.pipeline import LAST_IMAGE, reference_names
from svdpp.media.video import write_clip
from svdpp.serve.files import PrivateFile, clip_name, input_name
from svdpp.serve.store import FILE_NAME
from tests.support.engines import new_job
from tests.support.http_server import error_of

CONTENT = bytes(range(100))
CHANGED = 1_700_000_000.0
BEFORE, SINCE = "Tue, 14 Nov 2023 22:13:19 GMT", "Tue, 14 Nov 2023 22:13:20 GMT"


@pytest.fixture
def file(tmp_path: Path) -> PrivateFile:
    path = tmp_path / "video_1.mp4"
    path.write_bytes(CONTENT)
    return PrivateFile(path, "Größe 2-seed7.mp4", "ab" * 32, CHANGED)


def answer_of(file: PrivateFile, **headers: str) -> httpx.Response:
    client = httpx.AsyncClient(transport=httpx.ASGITransport(file), base_url="http://localhost")
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return asyncio.run(client.get("/", headers=names))


@pytest.mark.parametrize(
    "text",
    [
        *("bytes=abc", "bytes=5-2", "bytes=", "bytes=-", "bytes=1-2,x", "items=0-5", "0-5"),
        *("bytes=1_0-", "bytes=,", f"bytes={'9' * 5000}-"),
    ],
)
def test_a_range_that_cannot_be_read_is_ignored(file: PrivateFile, text: str) -> None:
    answer = answer_of(file, range=text)
    assert (answer.status_code, answer.content) == (200, CONTENT)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("bytes=5-7", CONTENT[5:8]),
        ("Bytes = 98-", CONTENT[98:]),
        ("bytes=-3", CONTENT[-3:]),
        ("bytes=90-1000", CONTENT[90:]),
        ("bytes=200-300, 1-2", CONTENT[1:3]),  # only the second range exists
    ],
)
def test_a_range_is_sent(file: PrivateFile, text: str, content: bytes) -> None:
    answer = answer_of(file, range=text)
    assert (answer.status_code, answer.content) == (206, content)
    assert answer.headers["content-range"].endswith("/100")
    assert answer_of(file, range=text, if_range='"other"').content == CONTENT
    assert answer_of(file, range=text, if_range=f'"{"ab" * 32}"').content == content
    assert answer_of(file, range=text, if_range=SINCE).content == content


@pytest.mark.parametrize("text", ["bytes=100-", "bytes=-0", "bytes=500-600,700-"])
def test_a_range_beyond_the_file_is_refused_in_the_shape_of_the_api(
    file: PrivateFile, text: str
) -> None:
    answer = answer_of(file, range=text)
    error = error_of(answer, 416, "range_not_satisfiable")
    assert answer.headers["content-range"] == "bytes */100"
    assert error["details"] == {"bytes": 100}
    assert answer_of(file, range=text, if_range='"other"').status_code == 200


def test_a_client_that_has_the_file_gets_304(file: PrivateFile) -> None:
    tag = answer_of(file).headers["etag"]
    for headers in (
        {"if_none_match": tag},
        {"if_none_match": f'"x", W/{tag}'},
        {"if_none_match": "*"},
        {"if_modified_since": SINCE},
        {"if_none_match": tag, "range": "bytes=1-2"},
    ):
        answer = answer_of(file, **headers)
        assert (answer.status_code, answer.content) == (304, b""), headers
        assert answer.headers["etag"] == tag
        assert answer.headers["cache-control"].startswith("private")
    for headers in (
        {"if_none_match": '"x"', "if_modified_since": SINCE},
        {"if_modified_since": BEFORE},
        {"if_modified_since": "yesterday"},
    ):
        assert answer_of(file, **headers).content == CONTENT, headers


def test_a_file_has_a_readable_name(file: PrivateFile) -> None:
    assert answer_of(file).headers["content-disposition"] == (
        "inline; filename=\"Gr__e 2-seed7.mp4\"; filename*=UTF-8''Gr%C3%B6%C3%9Fe%202-seed7.mp4"
    )
    assert clip_name(new_job(seed=7, input_name="chelsea.png")) == "chelsea-seed7.mp4"
    job = new_job(seed=1, input_file="", input_name="", prompt='The "sea", at\nnight: 夜の海')
    assert clip_name(job) == "the-sea-at-night-夜の海-seed1.mp4"
    assert clip_name(new_job(input_file="", input_name="", prompt="...")) == "clip-seed1.mp4"
    job = new_job(id="video_1", input_file="video_1.gif", input_name="sea.html")
    assert input_name(job, Path("/photos/video_1.gif")) == "sea.gif"


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.webp", "a.bmp", "a.tif", "a.gif", "a.mp4"])
def test_a_further_input_is_named_by_its_field_and_its_kind(tmp_path: Path, name: str) -> None:
    made, kept = tmp_path / name, tmp_path / "video_1.reference_2"
    if name.endswith(".mp4"):
        write_clip(
            np.zeros((2, 16, 16, 3), np.uint8), OutputConfig(path=str(made)), fps=7, metadata={}
        )
    else:
        Image.new("RGB", (16, 16)).save(made)
    made.rename(kept)
    readable = input_name(new_job(id="video_1", input_file="video_1.png"), kept)
    assert readable == f"reference_2{Path(name).suffix}"
    answer = answer_of(PrivateFile(kept, readable, "ab" * 32, CHANGED))
    assert answer.headers["content-type"] == mimetypes.guess_type(name)[0]


def test_the_type_of_a_file_is_that_of_its_suffix(tmp_path: Path) -> None:
    """The content type follows the suffix of the stored file, not the file name that a client sent.

    A name that starts with `data:` is not read as a URL.
    """
    path = tmp_path / "video_1.png"
    path.write_bytes(CONTENT)
    job = new_job(id="video_1", input_file="video_1.png", input_name="data:text,cat.html")
    answer = answer_of(PrivateFile(path, input_name(job, path), "ab" * 32, CHANGED))
    assert answer.headers["content-type"] == "image/png"


def test_every_input_of_every_family_has_the_name_of_a_file_that_can_be_removed() -> None:
    videos = {name for each in SAMPLING_CLASSES.values() for name in each.videos}
    assert "pose_video" in videos
    for field in (LAST_IMAGE, *reference_names(MAX_REFERENCES), *videos):
        (path,) = new_job(further_inputs={field: ""}).further_paths(Path()).values()
        assert FILE_NAME.fullmatch(str(path)), path
