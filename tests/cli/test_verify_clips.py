"""`svdpp verify CLIP...` finds every change of a clip, and prints what it has checked."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from svdpp.config.limits import max_threads
from svdpp.verification import clip_verification
from tests.support.shell import DEMO, PHOTO, TINY, assert_error, svdpp_here
from tests.support.tiny_families import save_tiny

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with an image and the results of `svdpp run`: two videos and one folder of frames."""
    folder = tmp_path_factory.mktemp("made")
    shutil.copy(PHOTO, folder / "rocket.jpg")
    run = ("run", "rocket.jpg", *DEMO, *TINY, "--world", "1", "-q")
    for more in (("--seeds", "0-1"), ("--format", "frames")):
        with contextlib.chdir(folder):
            answer = svdpp_here(*run, *more)
        assert answer.code == 0, answer
    return folder


@pytest.fixture
def out(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Output folder with three clips, which a test may change. Its parent is the working folder."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "out"


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_an_approximation_of_an_earlier_svdpp_is_refused_in_a_sentence(out: Path) -> None:
    _edit(out / "rocket_0.mp4.json", exact=False, draft={"rank": 1, "rounds": 2})
    answer = svdpp_here("verify", "out/rocket_0.mp4")
    assert_error(
        answer, 2, "an earlier svdpp made it by an approximation", "svdpp run makes an exact clip"
    )


def test_every_harm_to_a_clip_is_named(out: Path) -> None:
    """Every change of a clip is named: a deleted video, appended bytes, and edited metadata."""
    for name in ("deleted", "junk", "edited"):
        for end in (".mp4", ".mp4.json"):
            shutil.copy(out / f"rocket_0{end}", out / f"{name}{end}")
    (out / "deleted.mp4").unlink()
    with (out / "junk.mp4").open("ab") as file:
        file.write(b"junk")
    _edit(out / "edited.mp4.json", latents_sha256="0" * 64)
    answer = svdpp_here("verify", "out", "--json", "-q")
    assert answer.code == 3, answer
    proofs = json.loads(answer.out)
    assert (proofs["schema_version"], proofs["equal"]) == (2, False)
    verdicts = {
        Path(proof["clip"]).name: {check["what"]: check["equal"] for check in proof["checks"]}
        for proof in proofs["clips"]
    }
    whole = {"latent": True, "frames": True, "file": True}
    bad_file = {**whole, "file": False}
    assert verdicts == {
        "rocket_0": whole,
        "rocket_0.mp4": whole,
        "rocket_1.mp4": whole,
        "deleted.mp4": bad_file,
        "junk.mp4": bad_file,
        "edited.mp4": {"latent": False, "frames": True, "file": False},
    }
    details = {Path(proof["clip"]).name: proof["checks"][2]["detail"] for proof in proofs["clips"]}
    assert details["deleted.mp4"] == "there is no 'deleted.mp4'"
    assert "changed or replaced" in details["junk.mp4"]
    assert "the metadata in the file says latents_sha256" in details["edited.mp4"]
    assert "3 of 6 clips differ: 'deleted.mp4' is not as recorded: file (there is no" in answer.err


def test_one_clip_and_several_in_words(out: Path) -> None:
    answer = svdpp_here("verify", "out/rocket_0", "-q")
    assert answer.code == 0, answer
    *checks, verdict = answer.out.splitlines()
    whats = ("latent", "frames", "file")
    assert [line.split()[:2] for line in checks] == [[what, "equal"] for what in whats]
    assert checks[2].endswith("lossless: the pixels are the recorded frames, bit for bit")
    assert verdict == "bitwise equal: out/rocket_0"
    (out / "rocket_1.mp4").unlink()
    gone = svdpp_here("verify", "out/rocket_1.mp4", "-q")
    assert gone.code == 3
    assert "file   MISSING" in gone.out
    assert "DIFFERENT" not in gone.out
    said = "'rocket_1.mp4' is not as recorded: file (there is no 'rocket_1.mp4')"
    assert gone.err == f"error: {said}\n"

    _edit(out / "rocket_1.mp4.json", input="gone.jpg", input_sha256="0" * 64)
    several = svdpp_here("verify", "out/rocket_0", "out/rocket_1.mp4.json")
    assert several.code == 7
    assert several.out.splitlines()[0] == "bitwise equal: out/rocket_0"
    lost = "out/rocket_1.mp4.json: the image of 'rocket_1.mp4'"
    assert several.out.splitlines()[1].startswith(f"not verified: {lost}")
    assert "error: 1 of 2 clips not verified: the image of 'rocket_1.mp4' is not at" in several.err


def test_a_moved_clip_and_its_photograph(out: Path) -> None:
    """A moved clip needs its image. If the image is not found, `--image` gives its path."""
    elsewhere = out.parent / "elsewhere" / "deep"
    elsewhere.mkdir(parents=True)
    shutil.copy(out / "rocket_0.mp4", elsewhere / "mine.mp4")
    (out.parent / "rocket.jpg").rename(out.parent / "moved.jpg")
    lost = svdpp_here("verify", str(elsewhere / "mine.mp4"), "-q")
    assert_error(lost, 7, "the image of 'mine.mp4' is not at", "--image PATH")
    named = svdpp_here("verify", str(elsewhere / "mine.mp4"), "--image", "moved.jpg", "-q")
    assert named.code == 0, named
    assert "no sha256 of the file is recorded" in named.out
    refused = svdpp_here("verify", "moved.jpg", *DEMO, "--image", "moved.jpg")
    assert_error(refused, 2, "--image is for finished clips")


# --- metadata from untrusted sources ------------------------------------------------------------


@pytest.fixture
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a test fail if `svdpp verify` starts the reference in spite of invalid metadata."""
    monkeypatch.setattr(clip_verification, "run_reference", None)


# tests/test_config.py tests all limits.
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_inference_steps", 10**30, "--steps must be 1 to 1000"),
        ("num_threads", max_threads() + 1, "--threads must be 1 to"),
        (
            "device",
            "cuda",
            "was made on a CUDA device, but torch finds too few here: device cuda:0 requested, 0",
        ),
        ("model", "dummy", "its model is 'dummy', which writes no files"),
    ],
)
@pytest.mark.usefixtures("no_reference")
def test_metadata_beyond_the_limits_is_refused_before_any_work(
    out: Path, name: str, value: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    _edit(out / "rocket_0.mp4.json", **{name: value})
    assert_error(svdpp_here("verify", "out/rocket_0.mp4"), 2, words)


def invalid_metadata(record: dict[str, Any]) -> dict[str, str]:
    """Return invalid variants of a clip's metadata, as texts by the name of the defect."""
    texts = {
        "empty": "",
        "cut short": json.dumps(record)[:-9],
        "no object": "[1]",
        "null": "null",
        "deep": "[" * 100_000,
        "not UTF-8": "\udcff",
        "large": json.dumps({**record, "remark": "x" * 1_000_000}),
    }
    for name in ("input_sha256", "latents_sha256", "seed", "model", "height", "num_threads"):
        texts[f"without {name}"] = json.dumps({n: v for n, v in record.items() if n != name})
    for name, values in {
        "schema_version": (True, 1.0, "2", 3, None),
        "exact": ("false", 1, None),
        "input": (7, ["a"]),
        "input_sha256": ("", "0" * 64 + "\n", "G" * 64, 7),
        "file_sha256": ("", 7),
        "output": ("../x.mp4", "", 7, None),
        "seed": ("0", -1, None, 0.5, True, 2**63),
        "height": ("32", None, 32.5, True),
        "num_threads": ("1", None, True),
        "memory_opt": (0, "no", None),
        "dtype": ("int8", 7),
        "device": (7, None, "cuda:0"),
        "fit": (7, "zoom"),
        "versions": ([], {"torch": 2}),
    }.items():
        for value in values:
            texts[f"{name}={value!r}"] = json.dumps({**record, name: value})
    return texts


@pytest.mark.usefixtures("no_reference")
def test_verify_refuses_what_is_no_metadata(out: Path) -> None:
    """Any JSON file that is no valid metadata gives one sentence and exit code 7."""
    bad = []
    record = json.loads((out / "rocket_0.mp4.json").read_text())
    for what, text in invalid_metadata(record).items():
        Path("damaged.json").write_text(text, encoding="utf-8", errors="surrogateescape")
        result = svdpp_here("verify", "damaged.json")
        if result.code != 7 or result.out or len(result.err.splitlines()) > 2:
            bad.append(f"{what}: exit {result.code}: {result.err.splitlines()[0]}")
    assert not bad, "\n".join(bad)


@pytest.mark.usefixtures("no_reference")
def test_photographs_of_strangers_names(out: Path) -> None:
    for value in ("\0", "/dev/zero", "x" * 5000, "~/no.jpg"):
        _edit(out / "rocket_0.mp4.json", input=value, input_sha256="0" * 64)
        answer = svdpp_here("verify", "out/rocket_0.mp4")
        assert answer.code == 7, (value, answer)
        assert "unexpected" not in answer.err


@pytest.mark.slow
@pytest.mark.full
def test_a_clip_in_tiles_is_kept_and_verified_with_tiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clip that a CFG pair decodes in tiles can be resumed and verified.

    Without tiles, the same request gives a clip with other bits.
    """
    monkeypatch.chdir(tmp_path)
    model = str(save_tiny("wan", tmp_path / "wan"))
    sizes = ("--height", "16", "--width", "288", "--frames", "5", "--steps", "2")
    prompt = ("--prompt", "the sea", "--max-prompt-tokens", "8")
    pair = ("--world", "2", "--cfg-parallel", "2", "--device", "cpu", "--threads", "1")
    run = ("run", "--model", model, *prompt, *sizes, *pair)
    made = svdpp_here(*run, "--vae-tiling")
    assert made.code == 0, made
    facts = json.loads(Path("out/the-sea_0.mp4.json").read_text())
    assert (facts["vae_tiling"], facts["decode_ranks"]) == (True, 2)
    proof = svdpp_here("verify", "out/the-sea_0.mp4")
    assert proof.code == 0, proof
    kept = svdpp_here(*run, "--vae-tiling", "--resume")
    assert "(was finished)" in kept.out
    untiled = svdpp_here(*run, "--out", "untiled")
    assert untiled.code == 0, untiled
    other = json.loads(Path("untiled/the-sea_0.mp4.json").read_text())
    assert "vae_tiling" not in other
    assert other["parameters_sha256"] != facts["parameters_sha256"]
    assert other["latents_sha256"] == facts["latents_sha256"]
    assert other["frames_sha256"] != facts["frames_sha256"]


# --- clips of version 0.3 (3e3b864) -------------------------------------------------------------

CLIPS_OF_0_3 = Path(__file__).parents[1] / "golden/clips_of_0_3"
ON_CPU = ("--device", "cpu", "--threads", "1")
PROMPTED = ("--prompt", "the sea", "--max-prompt-tokens", "8", "--height", "32")


@pytest.mark.parametrize(
    ("family", "clip", "asked"),
    [
        ("svd", "rocket_0.mp4", ("rocket.jpg", "--height=64", "--width=64", "--frames=4")),
        ("wan", "the-sea_0.mp4", (*PROMPTED, "--width=32", "--frames=5")),
        pytest.param(
            "ltx",
            "the-sea_0.mp4",
            (*PROMPTED, "--width=64", "--frames=9"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_clip_of_version_0_3_is_kept_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, clip: str, asked: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    home = {"HOME": str(tmp_path)}  # the clip's JSON names the model as ~/wan
    Path("out").mkdir()
    shutil.copy(PHOTO, "rocket.jpg")
    for suffix in ("", ".json"):
        shutil.copy(CLIPS_OF_0_3 / f"{family}_0.mp4{suffix}", f"out/{clip}{suffix}")
    model = "demo" if family == "svd" else str(tmp_path / family)
    if family != "svd":
        experts = {"boundary_ratio": 0.875} if family == "wan" else {}
        save_tiny(family, tmp_path / family, **experts)
    run = ("run", *asked, "--model", model, "--steps", "4", "--world", "2", *ON_CPU)
    kept = svdpp_here(*run, "--resume", env=home)
    assert (kept.code, "(was finished)" in kept.out) == (0, True), kept

    # This CPU may give other bits than the one that made the clip in 0.3. So a clip is made here,
    # and `verify` must compute the hashes of that clip.
    made = svdpp_here(*run, "--out", "made", env=home)
    assert made.code == 0, made
    recorded, here = (
        json.loads(Path(folder, f"{clip}.json").read_text()) for folder in ("out", "made")
    )
    proof = svdpp_here("verify", f"out/{clip}", env=home)
    hashes = ("latents_sha256", "frames_sha256")
    assert all(here[each][:12] in proof.out for each in hashes)
    same_bits = all(here[each] == recorded[each] for each in hashes)
    assert proof.code == (0 if same_bits else 3), proof
    assert ("DIFFERENT" in proof.out) is not same_bits
