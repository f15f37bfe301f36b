"""Options of commands: values, environment variables, and their effect on a run."""

from __future__ import annotations

import ast
import io
import json
import shlex
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.cli.options.files import PromptOptions
from svdpp.cli.options.model import ModelOptions, parse_params, parse_seeds
from svdpp.cli.options.pipeline import PipelineOptions
from svdpp.config import DUMMY_MODEL, SAMPLING_CLASSES, Dtype, Lora, SvdSampling, parse_loras
from svdpp.config.cost_files import read_costs
from svdpp.driver import resolve
from svdpp.errors import InputError, RequestError
from svdpp.launch import worker_group as fork_server
from svdpp.media.images import MediaFile
from svdpp.plan.forecast import forecast_layout
from svdpp.plan.parallel import layout_options
from svdpp.worker.device import MemoryPressure
from tests.support.shell import (
    DEMO,
    PHOTO,
    ROOT,
    TINY,
    assert_error,
    parsed,
    svdpp_and_modules,
    svdpp_here,
)


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty folder, and without the memory estimate, which takes a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resolve, "estimate_ranks", lambda *_, **__: [])


def test_seeds() -> None:
    expected = {" 1 , 3,5-7": [1, 3, 5, 6, 7], "1-3,2-4,1": [1, 2, 3, 4], "4-4": [4]}
    assert {text: parse_seeds(text) for text in expected} == expected
    wrong = ("", "1,,2", "a", "1-", "-1", "1-2-3", "1.5", "٣", "1 2", "1\n2")
    for text in (*wrong, "3-1", "0-100000", str(2**63), "9" * 5000):
        with pytest.raises(RequestError) as caught:
            parse_seeds(text)
        assert caught.value.message.isprintable()


@pytest.mark.parametrize(
    ("text", "device", "family", "dtype"),
    [
        (None, "cpu", "wan", "fp32"),
        (None, "cuda", "svd", "fp16"),
        (None, "cuda:0", "ltx", "bf16"),
        (None, "cuda", None, "fp16"),
        ("bf16", "cpu", "svd", "bf16"),
    ],
)
def test_dtypes(text: Dtype | None, device: str, family: str | None, dtype: str) -> None:
    assert ModelOptions(model="demo", dtype=text).model_config(device, family).dtype == dtype


@pytest.mark.parametrize(
    ("text", "lora"),
    [
        ("fast.safetensors", Lora(name="fast.safetensors")),
        ("a/b/c:0.5", Lora(name="a/b/c", weight=0.5)),
        ("a:-1.5e-1:high", Lora(name="a", weight=-0.15, expert="high")),
        ("a:low", Lora(name="a", expert="low")),
        ("a:b:.5", Lora(name="a:b", weight=0.5)),
    ],
)
def test_a_lora_is_a_file_a_weight_and_an_expert(text: str, lora: Lora) -> None:
    assert ModelOptions(lora=[text]).model_config("cpu", "wan").loras == (lora,)


def test_loras_of_a_clip_are_texts_or_objects_or_lists_of_both() -> None:
    first, second = Lora(name="a", weight=0.5), Lora(name="b", expert="low")
    given = [{"name": "a", "scale": 0.5}, {"name": "b", "expert": "low"}]
    for value in (given, ["a:0.5", given[1]], [{"name": "a", "weight": 0.5}, "b:low"]):
        assert parse_loras(value) == (first, second)
    assert parse_loras(given[0]) == parse_loras("a:.5") == (first,)
    assert parse_loras(None) == parse_loras([]) == ()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "`loras` 3 is not a LoRA"),
        ([["a"]], "is not a LoRA"),
        ({"scale": 1}, "has no name"),
        ({"name": "a", "scael": 1}, "has no field 'scael'"),
        ({"name": "a", "path": "/etc"}, "has no field 'path'"),
        (
            {"name": "a", "scale": 1, "weight": 1},
            "a LoRA has both scale and weight, which mean the same",
        ),
        ({"name": "a", "scale": "1"}, "the weight of `loras` must be"),
        ({"name": "a", "expert": "middle"}, "must be high or low"),
        ({"name": 1}, "`loras` must be str"),
        (["a"] * 17, "`loras` can have at most 16 LoRAs, got 17"),
    ],
)
def test_what_is_no_lora_of_a_clip_is_refused(value: object, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        parse_loras(value)


def test_what_is_no_lora_and_what_takes_none_is_refused() -> None:
    for text in ("", " ", "a:1000", "a:inf:low:1e999"):
        with pytest.raises(RequestError, match="lora"):
            ModelOptions(lora=[text]).model_config("cpu", "wan")
    with pytest.raises(RequestError, match="the dummy model takes no `loras`"):
        ModelOptions(model=DUMMY_MODEL, lora=["a"]).model_config("cpu", "svd")


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("stg_scal=1", "no parameter 'stg_scal'", "did you mean stg_scale?"),
        ("zzz=1", "no parameter 'zzz'", "svdpp models ltx2"),
        ("stg_scale", "NAME=VALUE", ""),
        ("stg_block=1.5", "stg_block must be a whole number", ""),
        ("stg_scale=x", "stg_scale must be a number", ""),
        ("guidance_rescale=1.5", "`guidance_rescale` must be", ""),
    ],
)
def test_parameters_have_names_types_and_limits(text: str, words: str, hint: str) -> None:
    taken = parse_params(["stg_scale=2", "stg_block=5"], "ltx2")
    assert taken == {"stg_scale": 2.0, "stg_block": 5}
    with pytest.raises(RequestError, match=words) as error:
        SAMPLING_CLASSES["ltx2"](**parse_params([text], "ltx2"))
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a cat\n\n" + b"x" * 20_001, "line 3: a prompt must be a string of at most 20000"),
        (b"a cat\nthe \xff sea\n", "line 2: it is not UTF-8"),
        (b"a\r\nb\n\na\0cat\n", "line 4: it has a null byte"),
        ("a cat\n".encode("utf-16-le"), "line 1: it has a null byte"),
        (b"\xff\xfea\0\n\0\0\0", "line 2: it has a null byte"),
        (b"\xff\xfea\0\n\0b", "line 2: it is not UTF-16-LE"),
        (
            b"\xff\xfe\0\0" + "a\n".encode("utf-32-le") + b"\xff\xff\xff\xff",
            "line 2: it is not UTF-32-LE",
        ),
        (b"# only a remark\n", "has no prompt"),
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


def test_a_dash_reads_prompts_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a cat\n# no\na dog")))
    inputs = PromptOptions(prompts=Path("-")).combined([None], SvdSampling())
    assert [each.prompt for each in inputs] == ["a cat", "a dog"]


def _plan(*options: str, **env: str) -> dict[str, Any]:
    answer = svdpp_here("plan", "--json", *options, env=env)
    assert answer.code == 0, answer
    result: dict[str, Any] = json.loads(answer.out)
    return result


def test_an_option_before_a_variable_before_what_is_built_in() -> None:
    assert _plan(SVDPP_MODEL="")["world_size"] == 4  # an empty variable counts as not set
    assert parsed("svdpp plan")["options"].device == "cuda"
    wrong = svdpp_here("run", PHOTO, *TINY, env={"SVDPP_MODEL": "dummy"})
    assert_error(wrong, 2, "the dummy model makes no video files")
    assert_error(svdpp_here("run", PHOTO, *DEMO, env={"SVDPP_LOG_FILE": "/dev/null/log"}), 8, "log")
    assert "layouts" not in _plan(SVDPP_COMPARE="1")  # this option has no variable
    assert _plan("--world", "14")["world_size"] == _plan("--gpus", "14")["world_size"] == 14


def test_env_shows_what_is_set_without_passwords() -> None:
    variables = {"SVDPP_FRAM": "2", "SVDPP_QUEUE": "postgresql://a:b@c/d"}
    answer = svdpp_here("env", "--json", env=variables)
    found = json.loads(answer.out)
    assert found["defaults"] == {"SVDPP_QUEUE": "postgresql://***@c/d"}
    assert found["without_effect"] == ["SVDPP_FRAM"]
    assert "a:b@" not in svdpp_here("env", env=variables).out


# --- what plan prints is what run does ----------------------------------------------------------


LAYOUT_NAMES = {option.name for option in layout_options().values()}
SHAPES = [
    "--gpus 7",
    "--gpus 8 --split alternating --decoders 2",
    "--gpus 8 --replicas 2",
    "--gpus 8 --layout auto",
    "--gpus 8 --layout data-parallel --cfg-parallel auto",
    "--gpus 8 --layout auto --cfg-parallel 2",
    "--gpus 5 --split balanced --costs svd-xt-h100-pcie",
]


@pytest.mark.parametrize("options", SHAPES)
def test_what_plan_prints_is_what_run_does(options: str) -> None:
    printed = json.loads(svdpp_here("plan", *options.split(), "--clips", "20", "--json").out)
    asked = parsed(f"svdpp run photo.jpg --model demo --device cpu {options}")["options"]
    layout = asked.request(num_clips=20, from_image=True).resolve()[0].layout

    assert printed["costs"] == layout.costs.to_json()
    assert printed["layout"]["description"] == str(layout)
    assert [(rank["rank"], rank["start"], rank["end"]) for rank in printed["ranks"]] == [
        (share.rank, share.start, share.end) for share in layout.all_shares
    ]
    forecast = forecast_layout(layout, 20)
    assert printed["forecast"]["makespan_seconds"] == forecast.makespan
    assert printed["forecast"]["latency_seconds"] == forecast.latency


@pytest.mark.parametrize(
    ("device", "gpus", "given", "world_size", "split", "remark"),
    [
        ("cuda", 3, {"steps": 6}, 3, "uniform", ""),
        ("cuda", 1, {"steps": 6}, 1, "uniform", ""),
        ("cpu", 3, {"steps": 28}, 2, "uniform", ""),
        (
            "cuda",
            4,
            {"steps": 50},
            4,
            "balanced",
            "50 steps cannot be divided evenly between 4 GPUs; with --gpus 2 they can",
        ),
        ("cuda", 8, {"steps": 28}, 8, "balanced", "using --split balanced: 28 steps"),
        (
            "cpu",
            3,
            {"steps": 25, "layout": "pipeline"},
            2,
            "balanced",
            "25 steps cannot be divided evenly between 2 ranks",
        ),
        (
            "cuda",
            4,
            {"steps": 25, "decoders": 2},
            4,
            "balanced",
            "25 steps cannot be divided evenly between 3 stages; with --gpus 2 they can",
        ),
        (
            "cuda",
            8,
            {"steps": 30, "cfg_parallel": "2"},
            8,
            "balanced",
            "30 steps cannot be divided evenly between 4 stages; with --gpus 6 they can",
        ),
        (
            "cuda",
            4,
            {"steps": 28, "decoders": 2, "split": "uniform"},
            3,
            "uniform",
            "using 3 of 4 GPUs: 28 steps cannot be divided evenly between 3 stages",
        ),
        (
            "cuda",
            4,
            {"steps": 50, "split": "uniform"},
            2,
            "uniform",
            "using 2 of 4 GPUs: 50 steps cannot be divided",
        ),
        (
            "cuda",
            7,
            {"steps": 30, "cfg_parallel": "2"},
            6,
            "uniform",
            "6 of 7 GPUs: --cfg-parallel 2 needs an even",
        ),
        (
            "cuda",
            7,
            {"steps": 30, "cfg_parallel": "2", "split": "uniform"},
            6,
            "uniform",
            "6 of 7 GPUs: --cfg-parallel 2 needs an even",
        ),
        # These layouts do not need a number of ranks that divides the steps.
        ("cpu", 3, {"steps": 25, "split": "alternating"}, 2, "alternating", ""),
        ("cpu", 3, {"steps": 25, "layout": "data-parallel"}, 2, "uniform", ""),
    ],
)
def test_by_default_all_gpus_or_two_ranks(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    gpus: int,
    given: dict[str, Any],
    world_size: int,
    split: str,
    remark: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    parallel = {name: each for name, each in given.items() if name in LAYOUT_NAMES}
    others = {name: each for name, each in given.items() if name not in parallel}
    options = PipelineOptions(model="dummy", threads=1, parallel=parallel, **others)
    config, why = options.request(num_clips=4, device=device).resolve()
    assert (config.world_size, config.parallel.split) == (world_size, split)
    assert why.startswith(remark) or remark in why
    assert bool(why) == bool(remark)


def test_commands_agree_on_ranks_that_do_not_divide_the_steps() -> None:
    """By default, commands choose the balanced split if the ranks do not divide the steps.

    With `--gpus`, such a number of ranks is refused.
    """
    said = "using --split balanced: 25 steps cannot be divided evenly between"
    planned = svdpp_here("plan", "--steps", "25", "--json")
    assert json.loads(planned.out)["split"] == "balanced"
    assert planned.err.startswith(f"{said} 4 GPUs; with --gpus 1 they can\n")
    ran = svdpp_here("run", PHOTO, *DEMO, *TINY, "--steps", "25", "--dry-run")
    assert ran.err.startswith(f"{said} 2 ranks; with --gpus 1 they can\n")
    for command in ("plan", f"run {PHOTO} --model demo --device cpu", "simulate", "verify"):
        refused = svdpp_here(*command.split(), "--steps", "25", "--gpus", "2")
        assert_error(refused, 2, "25 steps cannot be split evenly over 2 ranks; the nearest")


# --- inputs and outputs of a run ----------------------------------------------------------------


def copy_photo(name: str) -> str:
    """Copy an example photo to the path `name`, and return the path."""
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(PHOTO, name)
    return name


def dry_run(*options: str) -> dict[str, Any]:
    answer = svdpp_here("run", *options, *DEMO, *TINY, "--dry-run", "--json", "-q")
    assert answer.code == 0, answer
    result: dict[str, Any] = json.loads(answer.out)
    return result


def output_names(*options: str) -> list[str]:
    """Return the output names of the clips that `svdpp run --dry-run` lists."""
    return [clip["output"] for clip in dry_run(*options)["clips"]]


def test_a_dry_run_shows_everything_and_makes_nothing() -> None:
    answer = svdpp_here("run", PHOTO, *DEMO, *TINY, "--seeds", "0-500", "--dry-run")
    result = dry_run(PHOTO, "--seeds", "1-2")

    assert answer.code == 0
    for words in ("501 clips of 2 frames, 32x32, 2 steps, on 2 cpu ranks", "\n... and 401 more\n"):
        assert words in answer.out
    assert list(Path().iterdir()) == []
    assert [clip["seed"] for clip in result["clips"]] == [1, 2]
    assert (result["layout"], result["world_size"]) == ("1 replica of 2 ranks, uniform", 2)


def test_lines_of_a_jobs_file_override_options() -> None:
    copy_photo("in/one.jpg")
    lines = '{"image": "one.jpg", "size": "64x32"}\n{"image": "one.jpg", "steps": 4, "seed": 3}\n'
    Path("in/jobs.jsonl").write_text(lines)
    result = dry_run("--jobs", "in/jobs.jsonl", "--seed", "5", "--name", "{index}-{stem}-{seed}")
    found = [(c["output"], c["size"], c["steps"], c["input"]) for c in result["clips"]]
    assert found == [
        ("1-one-5.mp4", "64x32", 2, "../in/one.jpg"),
        ("2-one-3.mp4", "32x32", 4, "../in/one.jpg"),
    ]
    assert result["layout"] == "1 replica of 2 ranks, alternating"
    assert 0 < result["clips"][0]["end_seconds"] <= result["forecast"]["total_seconds"]
    text = lines.replace("one.jpg", "in/one.jpg") + '{"image": "in/one.jpg", "steps": 0}\n'
    Path("more.jsonl").write_text(text)
    left = dry_run("--jobs", "more.jsonl", "--keep-going")
    assert (len(left["clips"]), [each["line"] for each in left["refused"]]) == (2, [3])
    for option, value in (("--seeds", "1-2"), ("--prompt", "x"), ("--prompts", "p.txt")):
        refused = svdpp_here("run", "--jobs", "in/jobs.jsonl", option, value, *DEMO)
        assert_error(refused, 2, f"--jobs and {option} contradict each other")
    Path("in/jobs.jsonl").write_text('{"image": "one.jpg", "steps": 3}\n')
    command = ("run", "--jobs", "in/jobs.jsonl", *DEMO, *TINY, "--gpus", "2")
    uneven = svdpp_here(*command, "--split", "uniform", "--dry-run")
    assert_error(uneven, 2, "3 steps cannot be split evenly over 2 ranks")
    assert_error(svdpp_here(*command[:3], *DEMO, "--out", "x.mp4", "--name", "{seed}"), 2, "--name")


def test_prompts_are_beside_their_images(tmp_path: Path) -> None:
    images = [
        MediaFile(Path(copy_photo(f"{tmp_path}/{name}.jpg")), "0" * 64, 64, 64) for name in "abc"
    ]
    (tmp_path / "a.txt").write_text("a wave\n breaks \n")
    options = PromptOptions(prompts=Path("same-stem"))
    with pytest.raises(InputError, match=r"2 prompts are missing:\n.*b\.txt'\n.*c\.txt'"):
        options.combined(images, SvdSampling())
    (found,) = options.combined(images[:1], SvdSampling())
    assert (found.media_file, found.prompt) == (images[0], "a wave breaks")
    (tmp_path / "b.txt").write_text(" ")
    with pytest.raises(InputError, match=r"b\.txt' has no prompt"):
        options.combined(images[1:2], SvdSampling())


def test_one_unreadable_photograph_names_the_option_that_leaves_it_out() -> None:
    copy_photo("photos/one.jpg")
    Path("photos/bad.png").write_text("x")
    answer = svdpp_here("run", "photos", *DEMO, *TINY)

    assert_error(
        answer, 7, "'photos/bad.png' is not an image", "use --keep-going to make the other"
    )
    assert output_names("photos", "--keep-going") == ["one_0.mp4"]
    assert "--keep-going" not in svdpp_here("run", "photos/bad.png", *DEMO, *TINY).err
    assert "--keep-going" not in svdpp_here("verify", "photos", *DEMO, *TINY).err


@pytest.mark.slow
def test_a_misspelt_photograph_is_refused_before_torch_is_imported() -> None:
    answer, loaded = svdpp_and_modules("run", "roket.jpg", *DEMO)

    assert_error(answer, 7, "'roket.jpg' does not exist")
    assert not loaded & {"torch", "diffusers"}


def test_names_of_clips() -> None:
    two = (PHOTO, copy_photo("b c.jpg"))
    assert output_names(*two) == ["rocket_0.mp4", "b c_0.mp4"]
    assert output_names(*two, "-o", "b c", "--format", "frames") == ["rocket_0", "b c_0"]
    assert output_names(PHOTO, "-o", "sea.mp4") == ["sea.mp4"]
    assert output_names(PHOTO, "-o", "deep/{sea}.GIF") == ["{sea}.gif"]
    Path("folder.mp4").mkdir()
    assert output_names(PHOTO, "-o", "folder.mp4") == ["rocket_0.mp4"]


# --- messages at the end of a run -----------------------------------------------------------------


@pytest.mark.slow
def test_a_gpu_that_ran_short_of_memory_is_said_once_for_all_parts_of_a_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """If a GPU ran short of memory, a run of several batches prints only one warning.

    The ranks are forked, so they inherit the patched `MemoryPressure`.
    """
    monkeypatch.setattr("svdpp.driver.run_plan.BATCH_SIZE", 2)
    monkeypatch.setattr(MemoryPressure, "has_occurred", lambda self: True)  # noqa: ARG005
    monkeypatch.setattr(fork_server, "start_method", lambda device: "fork")  # noqa: ARG005
    answer = svdpp_here("run", PHOTO, *DEMO, *TINY, "--seeds", "1-5", "--out", str(tmp_path))

    assert answer.code == 0, answer
    assert answer.out.split() == [f"{tmp_path}/rocket_{seed}.mp4" for seed in range(1, 6)]
    metadata = json.loads((tmp_path / "rocket_1.mp4.json").read_text())
    assert metadata["memory_pressure"] is True
    (warning,) = [line for line in answer.err.splitlines() if "warning" in line]
    assert "bits may differ" in warning
    assert "--decode-chunk-size" in warning
    assert "--gpus" in warning


NASTY = "$(touch x); 'a' b.jpg"


@pytest.mark.slow
def test_what_profile_and_run_suggest_next() -> None:
    costs = "my costs.json"
    profiled = svdpp_here(
        *("profile", "--model", "dummy", "--latent-shape", "1", "4", "2", "8", "8"),
        *("--device", "cpu", "--world", "1", "--repeats", "1", "--out", costs, "--json"),
    )
    assert profiled.code == 0, profiled
    measured = read_costs(costs)
    assert measured.to_json() == json.loads(profiled.out)
    assert (measured.decode_seconds, measured.transfer_seconds) == (0, 0)
    assert (measured.denoise_weights_gib, measured.decode_weights_gib) == (0, 0)
    line = profiled.err.splitlines()[-1]
    assert line == "next: svdpp plan --world 1 --costs 'my costs.json' --compare"
    assert svdpp_here(*shlex.split(line)[2:]).code == 0
    again = svdpp_here("profile", "--model", "dummy", "--device", "cpu", "--out", costs)
    assert_error(again, 2, "'my costs.json' exists already", "--overwrite replaces it")

    Path(NASTY).write_bytes(Path(PHOTO).read_bytes())
    made = svdpp_here("run", NASTY, *DEMO, *TINY, "--fit", "crop")
    assert made.code == 0, made
    line = made.err.splitlines()[-1]
    assert line.startswith("to verify a clip: svdpp verify ")
    assert shlex.split(line)[-1] == "out/$(touch x); 'a' b_0.mp4"
    assert not Path("x").exists()


def test_the_help_of_an_option_is_written_once() -> None:
    """No help text occurs twice, because an option of several commands is declared only once."""
    trees = (ast.parse(path.read_text()) for path in sorted((ROOT / "svdpp/cli").rglob("*.py")))
    keywords = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.keyword))
    texts = Counter(each.value.value for each in keywords if _is_help(each))
    assert [text for text, number in texts.items() if number > 1] == []


def _is_help(keyword: ast.keyword) -> bool:
    return keyword.arg == "help" and isinstance(keyword.value, ast.Constant)
