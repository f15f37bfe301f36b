"""Jobs files in all spellings that users write, and the jobs of their lines."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import SvdSampling, WanSampling
from svdpp.config.families.minimax_h3 import MiniMaxH3ReferencesSampling
from svdpp.driver.job_files import JobFile, JobLine, read_job_file
from svdpp.driver.job_lines import MAX_PRINTED, JobLineReader, LineDefaults, raise_line_errors
from svdpp.driver.run_job import RunJob
from svdpp.errors import InputError, RequestError, SvdppError
from svdpp.media import images
from tests.support.shell import PHOTO

WAN = LineDefaults(
    model="wan",
    sampling=WanSampling(height=32, width=32, num_frames=5, num_inference_steps=4),
    image_use="optional",
    prompt_use="needed",
    seed=3,
    negative_prompt="blur",
)
SVD = LineDefaults(
    model="demo", sampling=SvdSampling(height=32, width=32, num_frames=2, num_inference_steps=4)
)


def parse(text: str, kind: str = "jsonl") -> list[JobLine | SvdppError]:
    return list(JobFile("clips", Path(), kind, text).lines())


def read(
    text: str, defaults: LineDefaults = WAN, kind: str = "jsonl"
) -> tuple[list[RunJob], list[str]]:
    file = JobFile("clips", Path(PHOTO).parent, kind, text)
    jobs, errors = JobLineReader(defaults, file).read(file.lines())
    return jobs, [error.message.removeprefix("clips, ") for error in errors]


ROWS = [{"prompt": "a cat, asleep", "seed": 7}, {"prompt": "a dog"}]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("jsonl", '# cats\n{"prompt": "a cat, asleep", "seed": 7}\n\n{"prompt": "a dog"}\r\n'),
        ("csv", 'prompt,seed\n"a cat, asleep",7\na dog,\n,\n'),
        ("csv", 'prompt; seed\r\n"a cat, asleep"; 7\r\na dog;\r\n'),
        ("csv", "sep=\t\nprompt\tseed\na cat, asleep\t7\na dog"),
        ("yaml", "- prompt: a cat, asleep\n  seed: 7\n# and\n- prompt: a dog\n"),
        ("yaml", "- &cat\n  prompt: a cat, asleep\n  seed: 7\n- prompt: a dog\n"),
    ],
)
def test_three_kinds_of_files_say_the_same(kind: str, text: str) -> None:
    lines = parse(text, kind)
    fields = [dict(line.fields) for line in lines if isinstance(line, JobLine)]
    if kind == "csv":
        fields[0]["seed"] = int(fields[0]["seed"])
    assert fields == ROWS
    jobs, errors = read(text, kind=kind)
    assert errors == []
    assert [(job.made_from.prompt, job.seed) for job in jobs] == [
        ("a cat, asleep", 7),
        ("a dog", 3),
    ]
    assert {job.made_from.negative_prompt for job in jobs} == {"blur"}


def test_a_yaml_clip_can_take_the_fields_of_another() -> None:
    lines = parse("- &base\n  prompt: a cat\n  seed: 7\n- <<: *base\n  seed: 8\n", "yaml")
    assert [line.fields for line in lines if isinstance(line, JobLine)][1] == {
        "prompt": "a cat",
        "seed": 8,
    }


def test_a_line_has_a_last_image_of_its_own() -> None:
    takes = replace(WAN, last_image_use="optional")
    name = Path(PHOTO).name
    text = f"prompt,image,last_image\nsea,{name},{name}\nsea,{name},\nsea,,{name}\nsea,{name},x"
    (both, one), errors = read(text, takes, kind="csv")
    assert both.made_from.last_image == both.made_from.media_file
    assert [job.sampling.has_last_image for job in (both, one) if job.sampling] == [True, False]
    assert both.request().last_image_sha256 is not None
    assert (one.request().last_image, one.made_from.last_image) == (None, None)
    first, missing = errors
    assert first.startswith("line 4, last_image: needs a first image, too")
    assert "line 5, last_image: " in missing
    assert "x' does not exist" in missing

    defaults = replace(takes, last_image=PHOTO)
    jobs, errors = read(f"prompt,image\nsea,{name}\nsea,", defaults, kind="csv")
    assert [job.made_from.last_image is None for job in jobs] == [False, True]
    needed = replace(takes, last_image_use="needed")
    assert read(f"prompt,image\nsea,{name}", needed, kind="csv")[1] == [
        "line 2, last_image: is missing"
    ]
    for defaults, hint in (
        (SVD, "these families take one: wan, ltx_condition"),
        (replace(WAN, last_image_reason="its denoiser embeds one"), "its denoiser embeds one"),
    ):
        file = JobFile("clips", Path(PHOTO).parent, "csv", f"last_image\n{name}")
        messages = {
            error.message: error for error in JobLineReader(defaults, file).read(file.lines())[1]
        }
        wrong = f"clips, line 2, last_image: model {defaults.model!r} takes no last image"
        assert messages[wrong].hint.startswith(hint)


REFERENCES = LineDefaults(
    model="h3",
    sampling=MiniMaxH3ReferencesSampling(height=32, width=32),
    prompt_use="needed",
)


def test_a_line_has_references_of_its_own() -> None:
    name = Path(PHOTO).name
    listed = f'{{"prompt": "sea", "image": "{name}", "references": ["{name}", "{name}"]}}'
    one = f'{{"prompt": "sea", "image": "{name}", "references": "{name}"}}'
    jobs, errors = read(f"{listed}\n{one}", REFERENCES)
    assert errors == []
    assert [len(job.made_from.references) for job in jobs] == [2, 1]
    assert [job.sampling.num_references for job in jobs if job.sampling] == [2, 1]
    assert jobs[0].request().references_sha256 == (jobs[0].made_from.references[0].sha256,) * 2

    defaults = replace(REFERENCES, references=(PHOTO,) * 3)
    table = f'prompt;image;references\nsea;{name};["{name}"]\nsea;{name};'
    jobs, errors = read(table, defaults, kind="csv")
    assert [len(job.made_from.references) for job in jobs] == [1, 3]


@pytest.mark.parametrize(
    ("references", "words"),
    [
        ('["x.jpg"]', "line 1, references: "),
        ('["a.jpg", 5]', "line 1, references: must be a list of files, got ['a.jpg', 5]"),
        ('"[1"', "line 1, references: must be a list of files, got '[1'"),
        (f"{['a.jpg'] * 9}".replace("'", '"'), "have at most 8 references besides their image"),
    ],
    ids=["missing", "number", "no JSON", "nine"],
)
def test_wrong_references_of_a_line_are_named(references: str, words: str) -> None:
    name = Path(PHOTO).name
    text = f'{{"prompt": "sea", "image": "{name}", "references": {references}}}'
    jobs, (error, *_) = read(text, REFERENCES)
    assert jobs == []
    assert words in error
    file = JobFile("clips", Path(PHOTO).parent, "jsonl", text)
    (refused,) = JobLineReader(SVD, file).read(file.lines())[1][-1:]
    assert "these families take references: wan_vace, wan_vace_control, " in refused.hint


def test_a_file_has_its_kind_by_its_suffix(tmp_path: Path) -> None:
    path = tmp_path / "clips.CSV"
    path.write_bytes("\ufeffprompt\nein Käfer\n".encode())
    (line,) = read_job_file(path).lines()
    assert isinstance(line, JobLine)
    assert line == JobLine(2, {"prompt": "ein Käfer"})
    path.write_bytes("prompt\nein Käfer\n".encode("latin-1"))
    with pytest.raises(InputError, match="line 2: it is not UTF-8"):
        read_job_file(path)
    for name, words in (("clips.json", "unknown format"), ("none.csv", "No such file")):
        (tmp_path / "clips.json").write_text("[]")
        with pytest.raises(InputError, match=words):
            read_job_file(tmp_path / name)


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("jsonl", '{"seed": 1, "seed": 2}', "line 1: is not JSON: the field 'seed' occurs twice"),
        ("jsonl", '{"seed": NaN}', "line 1: is not JSON: NaN is not a number"),
        ("jsonl", '{"seed": 1', "line 1: is not JSON: Expecting"),
        ("jsonl", "7", "line 1: must be an object, got 7"),
        ("jsonl", "[" * 100_000, "line 1: is not JSON"),
        ("csv", "seed,seed\n1,2\n", "line 1, seed: has the column seed twice"),
        ("csv", "seed\n1,2\n", "line 2: has 2 cells for 1 column: '2' has no column"),
        ("csv", 'seed\n"1"2\n', "line 2: is not CSV"),
        ("yaml", "prompt: a cat\n", "line 1: must be a list of clips"),
        ("yaml", "- seed: 1\n  seed: 2\n", "line 1, seed: has the field seed twice"),
        ("yaml", "- prompt: [a, b]\n", "line 1, prompt: must be a string or a number"),
        ("yaml", "- prompt: a: b\n", "line 1: is not YAML: mapping values are not allowed"),
        ("yaml", "- !!python/name:os.system\n", "line 1: must be fields with values"),
        ("yaml", "- seed: !!python/name:os.system x\n", "line 1, seed: is refused"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_line(kind: str, text: str, words: str) -> None:
    (error,) = parse(text, kind)
    assert isinstance(error, RequestError)
    assert error.message.startswith(f"clips, {words}")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "sead": 1}', "sead: is unknown"),
        ('{"prompt": "a", "seed": true}', "seed: must be a whole number, got true"),
        ('{"prompt": "a", "seed": -1}', "seed: must be 0 to 9223372036854775807, got -1"),
        ('{"prompt": "a", "steps": 1.5}', "steps: must be a whole number, got 1.5"),
        ('{"prompt": "a", "steps": [4]}', "steps: must be a whole number, got [4]"),
        (
            '{"prompt": "a", "steps": 4, "num_inference_steps": 4}',
            "num_inference_steps: is the same field as steps, which the line has too",
        ),
        ('{"prompt": "a", "frames": 6}', "frames: must be a multiple of 4 plus 1, got 6"),
        ('{"prompt": "a", "frames": 5, "seconds": 1}', "seconds: cannot be given with frames"),
        ('{"prompt": "a", "seconds": 1e9}', "seconds: must be above 0 and at most 1024"),
        ('{"prompt": "a", "size": "32"}', "size: must be WIDTHxHEIGHT, got '32'"),
        (
            '{"prompt": "a", "size": "32x32", "width": 32}',
            "size: cannot be given with width or height",
        ),
        ('{"prompt": "a", "width": 33}', "width: must be a multiple of"),
        ('{"prompt": "a", "fit": "squash"}', "fit: must be one of"),
        ('{"prompt": "a", "guidance_scale": "5,5"}', "guidance_scale: must be a number, got '5,5'"),
        ('{"prompt": 5}', "prompt: must be a string, got 5"),
        ('{"seed": 5}', "prompt: is missing"),
        ('{"prompt": "a", "image": 5}', "image: must be the name of a file, got 5"),
        ('{"prompt": "a", "image": "none.jpg"}', "image: "),
        ('{"prompt": "a", "out": "../up.mp4"}', "out: must be the name of a file, without folders"),
        ('{"prompt": "a", "out": ".hidden"}', "out: must be the name of a file"),
        (
            '{"prompt": "a", "out": "a.gif"}',
            "out: ends in .gif, but the format of the clips is mp4",
        ),
        ('{"prompt": "a", "priority": 5}', "priority: is only for servers"),
        ('{"prompt": "a", "motion_bucket_id": 5}', "motion_bucket_id: is unknown"),
    ],
)
def test_a_wrong_value_is_named_by_line_and_field(line: str, words: str) -> None:
    jobs, errors = read(line)
    assert jobs == []
    assert errors
    assert errors[0].startswith(f"line 1, {words}")


def test_families_refuse_what_they_do_not_take() -> None:
    _, errors = read('{"image": "rocket.jpg", "prompt": "a", "flow_shift": 5}', SVD)
    assert errors == [
        "line 1, prompt: model 'demo' takes no prompt",
        "line 1, flow_shift: is unknown",
    ]
    _, errors = read('{"seed": 1}', SVD)
    assert errors == ["line 1, image: is missing"]
    _, errors = read('{"image": "rocket.jpg", "prompt": "a"}', replace(WAN, image_use="refused"))
    assert errors == ["line 1, image: model 'wan' takes no image"]


def test_a_line_overrides_the_defaults_by_all_names_of_a_field() -> None:
    lines = [
        '{"prompt": "a"}',
        '{"prompt": "a", "num_frames": 9, "num_inference_steps": "8", "size": "64x48"}',
        '{"prompt": "a", "frames": 9, "steps": 8.0, "width": 64, "height": 48, "seed": null}',
        '{"prompt": "a", "seconds": 0.55, "fps": 16, "image": "rocket.jpg", "fit": "pad"}',
        '{"prompt": "a", "input_reference": "rocket.jpg"}',
    ]
    jobs, errors = read("\n".join(lines))
    assert errors == []
    assert jobs[0].sampling == WAN.sampling
    assert jobs[1].sampling is jobs[2].sampling  # shared, so that 100,000 lines need few objects
    wanted: dict[str, Any] = {"num_frames": 9, "num_inference_steps": 8, "width": 64, "height": 48}
    assert jobs[1].sampling == replace(WAN.sampling, **wanted)
    assert jobs[3].sampling == replace(
        WAN.sampling, num_frames=9, fps=16, from_image=True, fit="pad"
    )
    assert jobs[3].made_from.media_file == jobs[4].made_from.media_file is not None
    assert [job.line for job in jobs] == [1, 2, 3, 4, 5]


def test_an_image_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, read_bytes = [], images.read_bytes
    monkeypatch.setattr(images, "read_bytes", lambda path: reads.append(path) or read_bytes(path))
    jobs, errors = read('{"image": "rocket.jpg"}\n' * 3 + '{"image": "none.jpg"}\n' * 2, SVD)
    assert len(jobs) == 3
    assert [error.partition(":")[0] for error in errors] == ["line 4, image", "line 5, image"]
    assert [path.name for path in reads] == ["rocket.jpg", "none.jpg"]


def test_all_errors_are_raised_at_once(tmp_path: Path) -> None:
    shutil.copy(PHOTO, tmp_path)
    file = JobFile("clips", tmp_path, "jsonl", '{"image": "rocket.jpg", "sead": 1}\n' * 30)
    jobs, errors = JobLineReader(SVD, file).read(file.lines())
    with pytest.raises(RequestError) as caught:
        raise_line_errors(errors, file, len(jobs), "more")
    lines = caught.value.message.splitlines()
    assert lines[0] == "clips: 30 of 30 lines cannot be used:"
    assert lines[1] == "  line 1, sead: is unknown (did you mean seed?)"
    assert lines[1 + MAX_PRINTED :] == ["  and 10 more"]
    problems = caught.value.details["errors"]
    assert [problem["line"] for problem in problems] == [*range(1, 31)]
    assert {problem["field"] for problem in problems} == {"sead"}
    with pytest.raises(InputError, match=r"line 1, image: .*none.jpg' does not exist"):
        file = JobFile("clips", tmp_path, "jsonl", '{"image": "none.jpg"}')
        raise_line_errors(JobLineReader(SVD, file).read(file.lines())[1], file, 0)


def test_two_lines_cannot_have_one_name() -> None:
    _, errors = read('{"prompt": "a", "out": "x"}\n{"prompt": "b", "out": "x.mp4"}')
    assert errors == ["line 2, out: 'x' is also the name in line 1"]
