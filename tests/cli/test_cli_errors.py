"""Errors of run, simulate and verify before any work: message, exit code, empty stdout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from svdpp.cli.options.files import PromptOptions
from svdpp.cli.options.model import ModelOptions, parse_seeds
from svdpp.config import Dtype, SvdSampling
from svdpp.errors import InputError, RequestError
from tests.cli.shell import DEMO, PHOTO, TINY, assert_error, svdpp_here
from tests.media.pictures import png

pytestmark = pytest.mark.usefixtures("elsewhere")


# --- inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("nope.png", ["error: 'nope.png' does not exist"]),
        ("text.png empty.png", ["'text.png' is not an image in PNG", "'empty.png' is empty"]),
        ("text.png nope.png", ["'text.png' is not an image", "'nope.png' does not exist"]),
    ],
)
def test_all_inputs_that_are_no_images_are_named(
    command: str, names: str, words: list[str]
) -> None:
    Path("text.png").write_text("hello")
    Path("empty.png").touch()
    answer = svdpp_here(command, *names.split(), *DEMO)
    assert answer.code == 7
    assert [word for word in words if word not in answer.err] == []


@pytest.mark.parametrize("line", ["run --seed", "serve --latent-shape 1"])
def test_an_option_without_its_value_leads_to_the_help_of_its_command(line: str) -> None:
    command, option, *_ = line.split()
    answer = svdpp_here(*line.split())

    assert_error(answer, 2, f"option '{option}' requires", f"svdpp {command} --help shows its")


def test_an_image_of_many_pixels_is_refused_with_the_option() -> None:
    Path("big.png").write_bytes(png(6000, 4001, 1, 0, bytes(751 * 4001)))
    answer = svdpp_here("run", "big.png", *DEMO)
    assert_error(answer, 7, "6000x4001 pixels, the limit is 24 million", "raise --max-megapixels")
    answer = svdpp_here("run", "big.png", *DEMO, "--max-megapixels", "60")
    assert_error(answer, 2, "--max-megapixels 60 is not in the range 1<=x<=50")


@pytest.mark.parametrize("what", ["", "folder", "*.png"])
def test_inputs_that_name_no_images(what: str) -> None:
    Path("folder").mkdir()
    assert_error(svdpp_here("run", what, *DEMO), 7, repr(what))


def test_prompts_for_a_model_that_takes_none() -> None:
    Path("two.txt").write_text("a sea\na wave\n")
    answer = svdpp_here("run", PHOTO, *DEMO, "--prompts", "two.txt")
    assert_error(answer, 2, "model 'demo' takes no prompt", "leave it out")


# --- outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mp4", "webp", "frames"])
def test_an_output_that_exists_is_left_alone(kind: str) -> None:
    there = Path("out/rocket_0" if kind == "frames" else f"out/rocket_0.{kind}")
    file = there / "mine.png" if kind == "frames" else there
    file.parent.mkdir(parents=True)
    file.write_bytes(b"mine")
    before = file.stat()
    answer = svdpp_here("run", PHOTO, *DEMO, *TINY, "--format", kind)

    assert_error(answer, 2, "1 output exists already", there.name, "--resume")
    assert file.read_bytes() == b"mine"
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert os.listdir("out") == [there.name]


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/svdpp", "/proc/1/svdpp"])
def test_an_out_that_cannot_be_written(out: str) -> None:
    Path("file").write_bytes(b"mine")
    assert_error(svdpp_here("run", PHOTO, *DEMO, *TINY, "--out", out), 8, repr(out))

    assert Path("file").read_bytes() == b"mine"


@pytest.mark.parametrize("command", [("run", PHOTO, *DEMO), ("simulate",), ("verify", *DEMO)])
def test_a_log_file_that_cannot_be_written(command: tuple[str, ...]) -> None:
    Path("file").touch()
    answer = svdpp_here(*command, "--log-file", "file/log")

    assert_error(answer, 8, "cannot write the log 'file/log'")


# --- seeds and dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ("5", [5]),
        ("1,3,5-7", [1, 3, 5, 6, 7]),
        (" 1 , 2 ", [1, 2]),
        ("1-3,2-4,1", [1, 2, 3, 4]),
        ("4-4", [4]),
        (str(2**63 - 1), [2**63 - 1]),
    ],
)
def test_seeds(seeds: str, expected: list[int]) -> None:
    assert parse_seeds(seeds) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "1,", ",1", "1,,2", "a", "1-", "-1", "1--2", "1-2-3", "1.5", "1e3", "0x1", "+1"),
        *("٣", "1 2", "1;2", "3-1", "0-100000", str(2**63), "9" * 20, "9" * 5000, "1\n2"),
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_texts_that_are_no_seeds(text: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_seeds(text)

    assert caught.value.message.isprintable()


@pytest.mark.timeout(60)  # a quadratic search takes hours
@pytest.mark.parametrize("text", ["0-99999", "0-99998,100000-199999", "0-99998,0-99999"])
def test_many_seeds_are_read_or_refused_at_once(text: str) -> None:
    try:
        seeds = parse_seeds(text)
    except RequestError:
        return
    assert len(seeds) == len(set(seeds))


@pytest.mark.parametrize(
    ("text", "device", "family", "dtype"),
    [
        (None, "cpu", "wan", "fp32"),
        (None, "cuda", "svd", "fp16"),
        (None, "cuda:0", "ltx", "bf16"),
        (None, "cuda", None, "fp16"),
        ("fp32", "cuda", "wan", "fp32"),
        ("bf16", "cpu", "svd", "bf16"),
    ],
)
def test_dtypes(text: Dtype | None, device: str, family: str | None, dtype: str) -> None:
    assert ModelOptions(model="demo", dtype=text).model_config(device, family).dtype == dtype


@pytest.mark.parametrize(
    "arguments", ["--help", "plan --help-all", "plan --world 14", "plan --world 14 --json"]
)
def test_a_reader_that_ends_early_is_no_error(arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "svdpp", *arguments.split()]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode in (128 + signal.SIGPIPE, -signal.SIGPIPE)
    assert "rror" not in done.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a cat\n\n" + b"x" * 20_001, "line 3: a prompt must be a text of at most 20000"),
        (b"a cat\nthe \xff sea\n", "line 2: not UTF-8 text"),
        (b"a\0cat\n", "line 1: a prompt must be"),
        (b"\n \n", "has no prompt"),
    ],
)
def test_a_wrong_prompt_is_named_by_file_line_and_option(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "prompts.txt").write_bytes(content)
    options = PromptOptions(prompts=tmp_path / "prompts.txt")
    with pytest.raises(InputError, match=r"--prompts '.*prompts.txt'.* " + message):
        options.combined([], SvdSampling())
