"""Errors of run, simulate and verify before any work: message, exit code, empty stdout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from svdpp.cli.options.inputs import PromptOptions
from svdpp.cli.options.model import ModelOptions
from svdpp.cli.options.sampling import parse_seeds
from svdpp.driver.pipeline import Pipeline
from svdpp.errors import InputError, RequestError
from tests.cli.shell import DEMO, PHOTO, TINY, assert_error, svdpp_here
from tests.media.pictures import png


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SAMPLING = [
    (("--height", "100"), "--height must be a multiple of 8 from 8 to 4096, got 100"),
    (("--width", "0"), "--width must be a multiple of 8 from 8 to 4096, got 0"),
    (("--height", "-8"), "--height must be a multiple of 8 from 8 to 4096, got -8"),
    (("--frames", "0"), "--frames must be 1 to 1024, got 0"),
    (("--fps", "0"), "--fps must be 1 to 240 frames a second, got 0"),
    (("--motion-bucket-id", "2000"), "--motion-bucket-id must be 0 to 1023, got 2000"),
    (("--noise-aug-strength", "-1"), "--noise-aug-strength must be a finite number"),
    (("--max-guidance-scale", "nan"), "--max-guidance-scale must be a finite number"),
    (("--decode-chunk-size", "0"), "--decode-chunk-size must be 1 to 1024, got 0"),
    (("--decode-chunk-size", "two"), "--decode-chunk-size must be a number or auto, got 'two'"),
    (("--fit", "zoom"), "--fit must be crop, pad or stretch, got 'zoom'"),
    (("--dtype", "int8"), "--dtype must be one of fp32, fp16, bf16, got 'int8'"),
    (("--steps", "0"), "must be 1 to 1000, got 0"),
    (("--world", "3"), "the nearest step counts that can are 27 and 30"),
    (("--world", "29"), "29 ranks are more than 28 steps"),
    (("--world", "0"), "--world must be 1 to 65536, got 0"),
    (("--world", "-2"), "--world must be 1 to 65536, got -2"),
    (("--threads", "0"), "--threads must be 1 to "),
    (("--timeout", "0"), "--timeout must be above 0 and at most 604800 s, got 0.0"),
    (("--start-timeout", "nan"), "--start-timeout must be above 0 and at most 604800 s, got nan"),
    (("--seed", "-1"), "seed must be 0 to 2^63 - 1, got -1"),
    (("--seed", str(2**63)), "seed must be 0 to 2^63 - 1"),
    (("--device", "tpu"), "--device must be cpu, cuda or cuda:N, got 'tpu'"),
]


@pytest.mark.parametrize(("options", "words"), SAMPLING, ids=str)
@pytest.mark.parametrize("command", [("run", PHOTO), ("verify",)], ids=["run", "verify"])
def test_knobs_of_run_and_verify(
    command: tuple[str, ...], options: tuple[str, ...], words: str
) -> None:
    assert_error(svdpp_here(*command, *DEMO, *options), 2, words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--format", "avi"), "--format must be one of mp4, gif, webp, frames, got 'avi'"),
        (("--crf", "52"), "--crf must be 0 to 51, got 52"),
        (("--seed", "1", "--seeds", "2"), "--seed and --seeds contradict each other"),
        (("--overwrite", "--skip-existing"), "--overwrite and --resume contradict"),
        (("--seeds", "1,a"), "--seeds takes numbers and ranges such as 1-8 or 1,3,5-7, got '1,a'"),
        (("--seeds", ""), "--seeds takes numbers and ranges"),
        (("--seeds", "3-1"), "--seeds 3-1: a range rises"),
        (("--seeds", str(2**63)), "seed must be 0 to 2^63 - 1"),
        (("--model", "dummy"), "the dummy model makes no video files"),
    ],
    ids=str,
)
def test_options_of_run(options: tuple[str, ...], words: str) -> None:
    assert_error(svdpp_here("run", PHOTO, *DEMO, *options), 2, words)
    assert os.listdir() == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--world", "3"), "the nearest step counts that can are 27 and 30"),
        (("--world", "0"), "--world must be 1 to 65536, got 0"),
        (("--world", "40"), "40 ranks are more than 28 steps"),
        (("--clips", "0"), "--clips must be 1 to 100000, got 0"),
        (("--clips", "-3"), "--clips must be 1 to 100000, got -3"),
        (("--seed", "-1"), "seed must be 0 to 2^63 - 1, got -1"),
        (("--dtype", "int8"), "--dtype must be one of"),
        (("--device", "tpu"), "--device must be cpu, cuda or cuda:N"),
        (("--threads", "0"), "--threads must be 1 to "),
        (("--timeout", "-1"), "--timeout must be above 0 and at most 604800 s, got -1.0"),
        (("--steps", "0"), "must be 1 to 1000, got 0"),
        (("--latent-shape", "1", "4", "0", "8", "8"), "latent shape 1 4 0 8 8 needs 5 positive"),
        (("--latent-shape", "1", "4", "2", "-8", "8"), "latent shape 1 4 2 -8 8 needs 5 positive"),
        (("--latent-shape", "0", "4", "2", "8", "8"), "latent shape 0 4 2 8 8 needs 5 positive"),
    ],
    ids=str,
)
def test_options_of_simulate(
    options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from svdpp.driver import pipeline

    def go_on(*_: object) -> None:
        raise AssertionError("ranks would have been started")

    monkeypatch.setattr(pipeline.Pipeline, "__enter__", go_on)
    answer = svdpp_here("simulate", *options)

    assert_error(answer, 2, words)
    # simulate has no such options, so a message must not mention them.
    assert not [word for word in ("--frames", "--height", "--width") if word in answer.err]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--clips", "0"), "--clips must be 1 to 100000, got 0"),
        (("--tolerance", "-1"), "--tolerance must be 0 or more, got -1.0"),
        (("--tolerance", "nan"), "--tolerance must be 0 or more, got nan"),
        (("--inject-fault", "ulp"), "'ulp' is not a fault"),
        (("--inject-fault", "melt@rank0.clip0"), "'melt@rank0.clip0' is not a fault"),
        (("--model", "dummy", PHOTO), "the dummy model takes no images"),
    ],
    ids=str,
)
def test_options_of_verify(options: tuple[str, ...], words: str) -> None:
    assert_error(svdpp_here("verify", *DEMO, *options), 2, words)


@pytest.mark.parametrize("fault", ["ulp@rank9.clip0", "ulp@rank1.clip9"])
def test_a_fault_that_would_strike_nowhere_is_refused(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise `verify` would report equality although a fault was requested."""
    from svdpp.verification import verify

    def go_on(*_: object, **__: object) -> None:
        raise AssertionError("ranks would have been started")

    monkeypatch.setattr(verify, "run_pipelined", go_on)
    assert_error(svdpp_here("verify", *DEMO, "--world", "2", "--inject-fault", fault), 2, fault)


# --- inputs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", "verify"])
@pytest.mark.parametrize("more", [(), ("--json",), ("-q",)], ids=str)
def test_a_missing_file(command: str, more: tuple[str, ...]) -> None:
    assert_error(
        svdpp_here(command, "nope.png", *DEMO, *more), 7, "error: 'nope.png' does not exist"
    )


@pytest.mark.parametrize("command", ["run", "verify"])
def test_a_text_file_named_png(command: str) -> None:
    Path("text.png").write_text("hello")
    assert_error(svdpp_here(command, "text.png", *DEMO), 7, "'text.png' is not an image in PNG")


def test_an_image_of_many_pixels_is_refused_with_the_option() -> None:
    Path("big.png").write_bytes(png(6000, 4001, 1, 0, bytes(751 * 4001)))
    answer = svdpp_here("run", "big.png", *DEMO)
    assert_error(answer, 7, "6000x4001 pixels, the limit is 24 million", "raise --max-megapixels")
    answer = svdpp_here("run", "big.png", *DEMO, "--max-megapixels", "60")
    assert_error(answer, 2, "--max-megapixels must be 1 to 50, got 60")


def test_two_missing_files_are_reported_at_once() -> None:
    answer = svdpp_here("run", "one.png", "two.png", *DEMO)

    assert answer.code == 7
    assert "'one.png' does not exist" in answer.err
    assert "'two.png' does not exist" in answer.err


def test_two_bad_images_are_reported_at_once() -> None:
    Path("text.png").write_text("hello")
    Path("empty.png").touch()
    answer = svdpp_here("run", "text.png", "empty.png", *DEMO)

    assert answer.code == 7
    assert "'text.png' is not an image" in answer.err
    assert "'empty.png' is empty" in answer.err


def test_a_missing_file_does_not_hide_a_bad_image() -> None:
    Path("text.png").write_text("hello")
    answer = svdpp_here("run", "text.png", "nope.png", *DEMO)

    assert answer.code == 7
    assert "'nope.png' does not exist" in answer.err
    assert "'text.png' is not an image" in answer.err


@pytest.mark.parametrize("what", ["", "folder", "*.png"])
def test_inputs_that_name_no_images(what: str) -> None:
    Path("folder").mkdir()
    assert_error(svdpp_here("run", what, *DEMO), 7, repr(what))


ODD_NAMES = [
    "a b.png",
    "a\nb.png",
    "a\r\tb\x1b[31m.png",
    "é你😀.png",
    "-y.png",
    "--json.png",
    "[red]x.png",
    "{clip}%s.png",
    "'\".png",
    "\udcff.png",  # a byte that is not UTF-8
]


@pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
@pytest.mark.parametrize("exists", [False, True], ids=["missing", "no image"])
def test_odd_names_do_not_break_the_message(name: str, exists: bool) -> None:
    if exists:
        Path(name).write_text("hello")
    answer = svdpp_here("run", *DEMO, "--", name)

    assert_error(answer, 7, repr(name).encode("utf-8", "backslashreplace").decode())
    assert not [char for char in answer.err if not char.isprintable() and char != "\n"]


# --- models, devices, worlds --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["empty", "./empty"])
def test_a_model_of_an_empty_folder(name: str) -> None:
    Path("empty").mkdir()
    answer = svdpp_here("run", PHOTO, "--device", "cpu", "--model", name)

    assert_error(answer, 5, repr(name), "model_index.json")


def test_an_empty_model_name() -> None:
    assert_error(svdpp_here("run", PHOTO, "--device", "cpu", "--model", ""), 2, "--model is empty")


def test_nccl_cannot_carry_latents_of_the_cpu() -> None:
    answer = svdpp_here("run", PHOTO, *DEMO, env={"PIPELINE_BACKEND": "nccl"})

    assert_error(answer, 2, "PIPELINE_BACKEND=nccl")


TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("command", "env", "words"),
    [
        (("run", PHOTO, *DEMO, "--world", "4"), TORCHRUN, "--world 4 disagrees with torchrun's"),
        (("simulate", "--world", "4"), TORCHRUN, "--world 4 disagrees with torchrun's"),
        (("simulate",), {**TORCHRUN, "WORLD_SIZE": "3"}, "28 steps cannot be split evenly over 3"),
        (("verify", "--world", "4"), TORCHRUN, "--world 4 disagrees with torchrun's"),
        (("verify",), TORCHRUN, "MASTER_ADDR is not set"),
        (
            ("run", PHOTO, *DEMO, "--decode-chunk-size", "auto"),
            TORCHRUN,
            "auto is chosen before ranks start",
        ),
        (("run", PHOTO, *DEMO), {"RANK": "0"}, "incomplete torchrun environment"),
        (("run", PHOTO, *DEMO), {**TORCHRUN, "RANK": "x"}, "invalid torchrun environment"),
        (("run", PHOTO, *DEMO), {**TORCHRUN, "RANK": "2"}, "invalid torchrun environment"),
    ],
    ids=str,
)
def test_worlds_of_torchrun(command: tuple[str, ...], env: dict[str, str], words: str) -> None:
    assert_error(svdpp_here(*command, env=env), 2, words)


# --- outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mp4", "gif", "webp", "frames"])
@pytest.mark.parametrize("more", [(), ("--json",)], ids=str)
def test_an_output_that_exists_is_left_alone(kind: str, more: tuple[str, ...]) -> None:
    there = Path("out/rocket_0" if kind == "frames" else f"out/rocket_0.{kind}")
    file = there / "mine.png" if kind == "frames" else there
    file.parent.mkdir(parents=True)
    file.write_bytes(b"mine")
    before = file.stat()
    answer = svdpp_here("run", PHOTO, *DEMO, *TINY, "--format", kind, *more)

    assert_error(answer, 2, "1 output exists already", there.name, "--resume")
    assert file.read_bytes() == b"mine"
    assert (file.stat().st_mtime_ns, file.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert os.listdir("out") == [there.name]


def test_two_inputs_with_one_output() -> None:
    for folder in ("one", "two"):
        Path(folder).mkdir()
        Path(folder, "same.jpg").write_bytes(Path(PHOTO).read_bytes())
    answer = svdpp_here("run", "one/same.jpg", "two/same.jpg", *DEMO, *TINY)

    assert_error(answer, 2, "would both become 'same_0.mp4'")
    # Both have the name 'same.jpg', so the message needs their folders.
    assert "one/same.jpg" in answer.err
    assert "two/same.jpg" in answer.err


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/svdpp", "/proc/1/svdpp"])
def test_an_out_that_cannot_be_written(out: str) -> None:
    Path("file").write_bytes(b"mine")
    assert_error(svdpp_here("run", PHOTO, *DEMO, *TINY, "--out", out), 8, repr(out))

    assert Path("file").read_bytes() == b"mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_out_without_permission() -> None:
    Path("locked").mkdir(mode=0o500)
    assert_error(svdpp_here("run", PHOTO, *DEMO, "--out", "locked"), 8, "Permission denied")


@pytest.mark.parametrize("command", [("run", PHOTO, *DEMO), ("simulate",), ("verify", *DEMO)])
def test_a_log_file_that_cannot_be_written(command: tuple[str, ...]) -> None:
    Path("file").touch()
    answer = svdpp_here(*command, "--log-file", "file/log")

    assert_error(answer, 8, "cannot write the log 'file/log'")


# --- seeds and dtypes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seed", "seeds", "expected"),
    [
        (None, None, [0]),
        ("7", None, [7]),
        ("0", None, [0]),
        (str(2**63 - 1), None, [2**63 - 1]),
        (None, "5", [5]),
        (None, "1-3", [1, 2, 3]),
        (None, "1,3,5-7", [1, 3, 5, 6, 7]),
        (None, " 1 , 2 ", [1, 2]),
        (None, "7,1-3", [7, 1, 2, 3]),
        (None, "1-3,2-4,1", [1, 2, 3, 4]),
        (None, "4-4", [4]),
        (None, str(2**63 - 1), [2**63 - 1]),
    ],
)
def test_seeds(seed: str | None, seeds: str | None, expected: list[int]) -> None:
    assert parse_seeds(seed, seeds) == expected


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
        parse_seeds(None, text)

    assert caught.value.message.isprintable()


@pytest.mark.timeout(60)  # a quadratic search takes hours
@pytest.mark.parametrize("text", ["0-99999", "0-99998,100000-199999", "0-99998,0-99999"])
def test_many_seeds_are_read_or_refused_at_once(text: str) -> None:
    try:
        seeds = parse_seeds(None, text)
    except RequestError:
        return
    assert len(seeds) == len(set(seeds))


@pytest.mark.parametrize(
    ("text", "device", "family", "dtype"),
    [
        (None, "cpu", "wan", "fp32"),
        (None, "cuda", "svd", "fp16"),
        (None, "cuda:1", "svd", "fp16"),
        (None, "cuda", "wan", "bf16"),
        (None, "cuda:0", "ltx", "bf16"),
        (None, "cuda", None, "fp16"),
        ("float32", "cuda", "wan", "fp32"),
        ("bfloat16", "cpu", "svd", "bf16"),
        ("fp16", "cuda", "wan", "fp16"),
    ],
)
def test_dtypes(text: str | None, device: str, family: str | None, dtype: str) -> None:
    assert ModelOptions(model="demo", dtype=text).to_config(device, family).dtype == dtype


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
        options.all_prompts()


def test_files_of_another_kind_are_named_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4.json").write_text("[]")
    listed = svdpp_here("verify", str(tmp_path / "clip.mp4.json"))
    assert_error(listed, 7, "is not a clip's JSON: it is not an object\n")
    assert_error(svdpp_here("report", PHOTO), 7, "is not a run's manifest\n", "hint: name a folder")
    with pytest.raises(RequestError, match="Pipeline takes a PipelineConfig, got NoneType"):
        Pipeline(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["--gpus", "--world"])
def test_a_message_names_the_option_that_was_typed(name: str) -> None:
    answer = svdpp_here("run", PHOTO, *DEMO, f"{name}=0")
    assert_error(answer, 2, f"error: {name} must be 1 to 65536, got 0")
    assert_error(svdpp_here("plan", name, "29"), 2, f"or {name} 28 or fewer")
