"""Names of clips: derived from the inputs, unique, and stable when inputs are added."""

from __future__ import annotations

from pathlib import Path

import pytest

from svdpp.config import SvdSampling
from svdpp.driver.clip_names import NameTemplate, name_jobs
from svdpp.driver.run_job import RunJob, combine_jobs, job_key
from svdpp.errors import RequestError
from svdpp.media.images import MediaFile
from svdpp.media.inputs import ClipInput
from svdpp.media.video import MAX_NAME_BYTES


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
    assert [job.name for job in name_jobs(combine_jobs(inputs, [5]))] == [f"{n}_5" for n in names]


def test_names_that_are_too_long_differ_as_well() -> None:
    stem = "\u4f60" * 80
    inputs = [image(f"{folder}/{stem}{end}.jpg") for folder in "abc" for end in ("", "x")]
    for seed in (0, 2**63 - 1):
        names = {job.name for job in name_jobs(combine_jobs(inputs, [seed]))}
        assert len(names) == len(inputs)
        assert max(len(f"{name}.webp".encode()) for name in names) <= MAX_NAME_BYTES


def line(number: int, path: str, prompt: str | None = None, out: str = "") -> RunJob:
    return RunJob(made_from=image(path, prompt), seed=7, line=number, out=out)


def test_a_line_keeps_its_name_when_others_come_and_go() -> None:
    a, b, c = line(1, "x.jpg", "a"), line(2, "x.jpg", "b"), line(3, "x.jpg", "c")
    before = name_jobs([a, b])
    assert [job.name for job in before] == ["x_7", "x-2_7"]
    recorded = {job_key(job): [job.name] for job in before}
    assert [job.name for job in name_jobs([c, a, b], recorded=recorded)] == [
        "x-3_7",
        "x_7",
        "x-2_7",
    ]
    assert [job.name for job in name_jobs([b], recorded=recorded)] == ["x-2_7"]
    # Recorded names that do not fit the job, because they are forged or of another run, are
    # ignored.
    assert [job.name for job in name_jobs([b], recorded={job_key(b): ["../x"]})] == ["x_7"]
    equal = name_jobs([a, a], recorded={job_key(a): ["x_7", "x-2_7"]})
    assert [job.name for job in equal] == ["x_7", "x-2_7"]


def test_names_of_the_user_come_first() -> None:
    jobs = [line(1, "x.jpg"), line(2, "x.jpg", out="x_7"), line(3, "x.jpg", out="x-2_7")]
    assert [job.name for job in name_jobs(jobs)] == ["x-3_7", "x_7", "x-2_7"]
    with pytest.raises(RequestError, match=r"line 1: 'a' with seed 7 and line 2: 'b' .* 'y'"):
        name_jobs([line(1, "a", out="y"), line(2, "b", out="y")])


@pytest.mark.parametrize(
    ("template", "names"),
    [
        ("{stem}-{seed}-{index:04}", ["a-7-0001", "b-7-0002"]),
        ("{prompt}", ["a-cat", "a-cat-2"]),
        ("{line}_{size}_{steps}", ["1_1024x576_28", "2_1024x576_28"]),
        ("{{{stem}}}", ["{a}", "{b}"]),
    ],
)
def test_a_template_has_the_fields_of_its_job(template: str, names: list[str]) -> None:
    jobs = [line(1, "in/a.jpg", "A cat!"), line(2, "b.jpg", "a cat")]
    parsed = NameTemplate(template, SvdSampling())
    assert [job.name for job in name_jobs(jobs, template=parsed)] == names


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{sead}", r"unknown field \{sead\}"),
        ("{stem.__class__}", "unknown field"),
        ("{0}", "unknown field"),
        ("{stem", "is not a valid template"),
        ("{seed:x4}", "is not a valid template"),
        ("{seed:99999}", "is not allowed"),
        ("{stem!r}", "is not allowed"),
        ("x/{stem}", "names a folder"),
        ("clip", "contains no field"),
    ],
)
def test_a_wrong_template_is_refused(template: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        NameTemplate(template, SvdSampling())


def test_a_template_cannot_make_every_name() -> None:
    with pytest.raises(RequestError, match="unknown before the model is read: frames"):
        name_jobs([line(1, "a.jpg")], template=NameTemplate("{frames}", SvdSampling()))
    with pytest.raises(RequestError, match=r"makes the name '\.a'"):
        name_jobs([line(1, "a.jpg")], template=NameTemplate(".{stem}", SvdSampling()))


def test_a_name_is_one_valid_part_of_a_path() -> None:
    for stem in ("\u00e9" * 300, "\u4f60" * 300, "\udcff" * 300, "x" * 300):
        (job,) = name_jobs(combine_jobs([image(f"{stem}.jpg")], [2**63 - 1]))
        assert 170 < len(f"{job.name}.webp".encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES
        assert job.name.endswith("_9223372036854775807")
    (job,) = name_jobs(combine_jobs([image("a\0b\nc\rd.jpg")], [0]))
    assert job.name == "a_b_c_d_0"


@pytest.mark.slow
def test_a_hundred_thousand_equal_names_take_no_time() -> None:
    jobs = combine_jobs([text("a cat")] * 100_000, [0])
    assert len({job.name for job in name_jobs(jobs)}) == 100_000
