"""Components of a modular pipeline that are in other repositories, on a local hub."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from svdpp.config import SAMPLING_CLASSES, ModelConfig, OutputConfig, PipelineConfig
from svdpp.config.pipeline import parameters_sha256
from svdpp.driver.clip_metadata import check_clip_metadata, clip_metadata
from svdpp.driver.ranks import shared_settings
from svdpp.driver.resolve import resolve_config
from svdpp.launch.world import World
from svdpp.media.inputs import ClipInput
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.models.engine.factory import load_engine_model
from svdpp.models.hub import fetch_snapshot
from svdpp.plan.roles import Roles
from svdpp.serve.request_schema import Capabilities
from tests.models.test_checkpoint import error_of
from tests.support.local_hub import COMMIT, TOKEN, Hub, commit_of
from tests.support.range_checks import loaded
from tests.support.shell import PYTHONPATH, assert_error, svdpp_here
from tests.support.tiny_families import save_tiny

INDEX = "modular_model_index.json"
PARTS = ("guider", "scheduler", "text_encoder", "tokenizer", "transformer", "vae")
WEIGHTED = ("text_encoder", "transformer", "vae")
SAMPLING = SAMPLING_CLASSES["wan_modular"](num_inference_steps=4, height=32, width=32, num_frames=5)
SIZES = ("--steps", "4", "--height", "32", "--width", "32", "--frames", "5")
ALL_ROLES = Roles(encode=True, denoise=True, decode=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny modular checkpoint, which has all its components in one folder."""
    folder = tmp_path_factory.mktemp("whole") / "wan"
    return save_tiny("wan_modular", folder, guider=diffusers.ClassifierFreeGuidance(stop=0.5))


@pytest.fixture(scope="module")
def changed(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of the checkpoint `whole` with other weights."""
    folder = Path(shutil.copytree(whole, tmp_path_factory.mktemp("changed") / "wan"))
    for path in folder.glob("*/*.safetensors"):
        tensors = {name: tensor * 0.5 for name, tensor in load_file(path).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def _set_source(folder: Path, part: str, **place: Any) -> None:
    """Set where the index of a modular checkpoint says that a component's files are."""
    index = json.loads((folder / INDEX).read_text())
    where = index[part][2]
    where |= {"pretrained_model_name_or_path": None, "subfolder": part, "revision": None}
    where |= place
    (folder / INDEX).write_text(json.dumps(index))


def _serve_copy(hub: type[Hub], whole: Path, folder: Path, **place: Any) -> None:
    """Serve a copy of a checkpoint on the local hub. Its components' source is set to `place`."""
    hub.folder = Path(shutil.copytree(whole, folder))
    for part in PARTS:
        _set_source(hub.folder, part, **place)


def _only_index(whole: Path, folder: Path) -> Path:
    folder.mkdir()
    shutil.copy(whole / INDEX, folder / INDEX)
    return folder


@pytest.fixture
def spread(hub: type[Hub], whole: Path, tmp_path: Path) -> type[Hub]:
    """Local hub with a model whose index names three other repositories for its components."""
    hub.folder = _only_index(whole, tmp_path / "tiny")
    vae = shutil.copytree(whole / "vae", tmp_path / "vae")  # a repository with the VAE at its root
    video, text = tmp_path / "video", tmp_path / "text"
    for part in ("guider", "scheduler", "transformer"):
        shutil.copytree(whole / part, video / part)
    shutil.copytree(whole / "text_encoder", text / "encoders" / "umt5")
    shutil.copytree(whole / "tokenizer", text / "words")
    (video / "README.md").write_text("about")
    (text / "encoders" / "code.py").write_text("code")
    hub.others |= {"org/vae": Path(vae), "org/video": video, "org/text@v1": text}
    hub.others["org/text"] = tmp_path / "empty"  # only the revision v1 has the files
    hub.others["org/text"].mkdir()
    _set_source(hub.folder, "vae", pretrained_model_name_or_path="org/vae", subfolder="")
    for part in ("guider", "scheduler", "transformer"):
        _set_source(hub.folder, part, repo="org/video")  # key of older indexes
    at = {"pretrained_model_name_or_path": "org/text", "revision": "v1"}
    _set_source(hub.folder, "text_encoder", **at, subfolder="encoders/umt5")
    _set_source(hub.folder, "tokenizer", **at, subfolder="words")
    return hub


#: Repository and commit of each component of `spread`.
PLACES = {
    "guider": f"org/video@{commit_of('org/video')}",
    "scheduler": f"org/video@{commit_of('org/video')}",
    "text_encoder": f"org/text@{commit_of('org/text@v1')}",
    "tokenizer": f"org/text@{commit_of('org/text@v1')}",
    "transformer": f"org/video@{commit_of('org/video')}",
    "vae": f"org/vae@{commit_of('org/vae')}",
}


def _weights(names: list[str]) -> set[str]:
    return {name for name in names if name.endswith(".safetensors")}


def _assert_loads(checkpoint: Checkpoint, sources: dict[str, Path]) -> None:
    """Check that a rank loads each component's weights from the given folder."""
    model = ModelConfig(name=checkpoint.name, family=checkpoint.family)
    parts = loaded(load_engine_model(checkpoint, model, SAMPLING, "cpu", ALL_ROLES))
    assert parts.keys() == sources.keys()
    for part, folder in sources.items():
        (path,) = folder.glob("*.safetensors")
        saved = load_file(path)
        own = [(name, each) for name, each in parts[part].named_parameters() if name in saved]
        assert own
        assert all(torch.equal(each, saved[name]) for name, each in own), part


def test_components_are_read_where_the_index_says(spread: type[Hub], whole: Path) -> None:
    configs = find_checkpoint(ModelConfig(name="org/tiny"), weights=False)
    assert not _weights(spread.requested)
    assert configs.external_components == PLACES
    checkpoint = find_checkpoint(ModelConfig(name="org/tiny"))
    assert (checkpoint.revision, checkpoint.fingerprint) == (COMMIT, None)
    assert checkpoint.external_components == PLACES
    assert {name for name in spread.requested if not name.startswith("org/")} == {INDEX}
    assert not [name for name in spread.requested if name.endswith((".py", ".md"))]
    _assert_loads(checkpoint, {part: whole / part for part in WEIGHTED})
    hashes = checkpoint.file_hashes()
    assert hashes == find_checkpoint(ModelConfig(name=str(whole))).file_hashes()


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (0, {"org/text/encoders/umt5/model", "org/video/transformer/diffusion_pytorch_model"}),
        (1, {"org/video/transformer/diffusion_pytorch_model", "org/vae/diffusion_pytorch_model"}),
    ],
)
def test_a_host_downloads_the_components_of_its_ranks(
    spread: type[Hub], host: int, expected: set[str]
) -> None:
    model = ModelConfig(name="org/tiny")
    config = PipelineConfig(world_size=2, model=model, sampling=SAMPLING)
    world = World(rank=host, local_rank=0, size=2, local_size=1, host=host, num_hosts=2)
    resolve_config(config, world=world)
    assert _weights(spread.requested) == {f"{name}.safetensors" for name in expected}


def test_an_entry_wins_over_the_own_folder_of_a_hub_model(
    hub: type[Hub], whole: Path, changed: Path, tmp_path: Path
) -> None:
    """In a hub model, an index entry for another repository wins over the model's own folder.

    diffusers does the same. An entry that names the model itself means its own folder.
    """
    _serve_copy(hub, whole, tmp_path / "tiny", pretrained_model_name_or_path="org/tiny")
    hub.others["org/other"] = changed
    _set_source(hub.folder, "vae", pretrained_model_name_or_path="org/other")
    checkpoint = find_checkpoint(ModelConfig(name="org/tiny"))
    assert checkpoint.external_components == {"vae": f"org/other@{commit_of('org/other')}"}
    _assert_loads(checkpoint, {part: whole / part for part in WEIGHTED} | {"vae": changed / "vae"})


def test_files_in_a_local_folder_win_over_its_entries(
    hub: type[Hub], whole: Path, changed: Path, tmp_path: Path
) -> None:
    """In a local folder, files in the folder win over index entries for other repositories.

    diffusers does the same. Such a folder is a copy of a repository.
    """
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    hub.others["org/other"] = changed
    for part in PARTS:
        _set_source(folder, part, pretrained_model_name_or_path="org/other", revision="v7")
    (folder / "vae").rename(folder / "decoder")
    _set_source(folder, "vae", repo="org/other", subfolder="decoder")
    checkpoint = find_checkpoint(ModelConfig(name=str(folder)))
    assert not hub.requested
    assert checkpoint.external_components == {}
    _assert_loads(checkpoint, {part: whole / part for part in WEIGHTED})
    before = checkpoint.fingerprint

    _set_source(folder, "vae", repo="org/other")  # not in this folder
    checkpoint = find_checkpoint(ModelConfig(name=str(folder)))
    assert checkpoint.external_components.keys() == {"vae"}
    assert checkpoint.fingerprint not in (None, before)
    _assert_loads(checkpoint, {part: whole / part for part in WEIGHTED} | {"vae": changed / "vae"})


def test_the_variant_of_an_entry_is_read(
    hub: type[Hub], whole: Path, changed: Path, tmp_path: Path
) -> None:
    _serve_copy(hub, whole, tmp_path / "tiny")
    shutil.copy(
        changed / "vae/diffusion_pytorch_model.safetensors",
        hub.folder / "vae/diffusion_pytorch_model.fp16.safetensors",
    )
    _set_source(hub.folder, "vae", variant="fp16")
    for name in ("org/tiny", str(hub.folder)):
        checkpoint = find_checkpoint(ModelConfig(name=name))
        assert checkpoint.variant_of("vae") == "fp16"
        (path,) = checkpoint.weight_files("vae")
        assert path.name == "diffusion_pytorch_model.fp16.safetensors"
    assert "vae/diffusion_pytorch_model.safetensors" not in hub.requested


def test_a_requested_variant_replaces_that_of_an_entry(
    hub: type[Hub], whole: Path, changed: Path, tmp_path: Path
) -> None:
    """A requested variant replaces the variant of an index entry.

    Components that do not have the requested variant are read without one.
    """
    _serve_copy(hub, whole, tmp_path / "tiny")
    stem = hub.folder / "transformer" / "diffusion_pytorch_model"
    shutil.copy(f"{stem}.safetensors", f"{stem}.bf16.safetensors")
    hub.others["org/other"] = changed
    _set_source(hub.folder, "vae", repo="org/other", variant="fp8")
    checkpoint = find_checkpoint(ModelConfig(name="org/tiny", variant="bf16"))
    found = {part: checkpoint.variant_of(part) for part in WEIGHTED}
    assert found == {"text_encoder": None, "transformer": "bf16", "vae": None}


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ({"subfolder": "../other"}, "the subfolder of the vae is '../other'"),
        ({"subfolder": "/etc"}, "the subfolder of the vae is '/etc'"),
        ({"subfolder": ["vae"]}, "the subfolder of the vae is ['vae']"),
        ({"revision": "../main"}, "the revision of the vae is '../main'"),
        ({"revision": 3}, "the revision of the vae is 3"),
        ({"variant": "../fp16"}, "the variant of the vae is '../fp16'"),
        ({"repo": "/srv/models/vae"}, "the vae is at '/srv/models/vae', which is not a repository"),
        ({"repo": "vae"}, "the vae is at 'vae', which is not a repository"),
        ({"repo": "org/../vae"}, "the vae is at 'org/../vae', which is not a repository"),
        ({"repo": ["org/vae"]}, "the vae is at ['org/vae'], which is not a repository"),
        ({"repo": "svdpp/assets"}, "the vae is at 'svdpp/assets', which is not a repository"),
        ({"subfolder": "decoder"}, "decoder/config.json is missing"),
    ],
)
def test_places_that_svdpp_does_not_follow_are_refused(
    hub: type[Hub], whole: Path, tmp_path: Path, place: dict[str, Any], message: str
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    shutil.rmtree(folder / "vae")
    _set_source(folder, "vae", **place)
    assert message in error_of(folder).message
    assert not hub.requested


def test_a_folder_in_the_working_directory_is_not_read_for_a_repository(
    spread: type[Hub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder `org/vae` in the working directory is an error, because diffusers would read it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(spread.others["org/vae"], tmp_path / "org" / "vae")
    error = error_of("org/tiny")
    assert "the vae is in the repository 'org/vae', and the working directory" in error.message
    assert error.details["repository"] == "org/vae"


def test_a_component_of_another_revision_of_the_model(
    hub: type[Hub], whole: Path, changed: Path, tmp_path: Path
) -> None:
    _serve_copy(hub, whole, tmp_path / "tiny")
    hub.others["org/tiny@v2"] = changed
    _set_source(hub.folder, "vae", repo="org/tiny", revision="v2")
    checkpoint = find_checkpoint(ModelConfig(name="org/tiny"), weights=False)
    assert checkpoint.external_components == {"vae": f"org/tiny@{commit_of('org/tiny@v2')}"}
    assert (checkpoint.revision, checkpoint.folder.name) == (COMMIT, COMMIT)


@pytest.mark.parametrize(
    ("response", "message", "hint"),
    [
        ((403, "GatedRepo"), "accept its licence", "https://huggingface.co/org/vae, then run: hf"),
        ((401, "GatedRepo"), "accept its licence", "https://huggingface.co/org/vae, then run: hf"),
        ((401, ""), "the hub answered 401", "hf auth login"),
        ((404, "RepoNotFound"), "nor a model on the hub", "hf auth login"),
        ((404, "RevisionNotFound"), "the hub answered 404", "check `revision`"),
    ],
)
def test_an_error_of_the_hub_names_component_and_repository(
    spread: type[Hub], response: tuple[int, str], message: str, hint: str
) -> None:
    spread.errors["org/vae"] = response
    error = error_of("org/tiny")
    assert "vae of the repository 'org/vae': " in error.message
    assert message in error.message
    assert hint in error.hint
    assert error.details["components"] == ["vae"]
    assert error.details["status"] == response[0]
    assert TOKEN not in error.message + error.hint


def test_damaged_files_of_another_repository_are_named(spread: type[Hub]) -> None:
    weights = spread.others["org/vae"] / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    error = error_of("org/tiny")
    assert "vae of the repository org/vae: " in error.message
    assert "is damaged or truncated" in error.message
    command = "hf download org/vae diffusion_pytorch_model.safetensors --force-download"
    assert error.hint == command

    spread.others["org/text@v1"].joinpath("encoders/umt5/config.json").write_text("{")
    shutil.rmtree(Path(huggingface_hub.constants.HF_HUB_CACHE))
    fetch_snapshot.cache_clear()
    error = error_of("org/tiny")
    assert "encoders/umt5/config.json of org/text does not hold valid JSON" in error.message
    assert error.hint == "hf download org/text encoders/umt5/config.json --force-download"


def test_code_in_another_repository_is_refused(spread: type[Hub], cache: Path) -> None:
    """Code in a component's repository is refused.

    svdpp never downloads code, but another program may have put it into the cache.
    """
    find_checkpoint(ModelConfig(name="org/tiny"), weights=False)
    assert "org/text/encoders/umt5/config.json" in spread.requested
    snapshot = cache / "models--org--text" / "snapshots" / commit_of("org/text@v1")
    (snapshot / "encoders" / "umt5" / "modeling.py").write_text("code")
    error = error_of("org/tiny")
    assert "contains 'encoders/umt5/modeling.py of org/text'" in error.message


@pytest.mark.slow
@pytest.mark.usefixtures("spread")
def test_commands_without_a_network_name_the_repository(cache: Path) -> None:
    options = ("--model", "org/tiny", "--local-files-only")
    find_checkpoint(ModelConfig(name="org/tiny"), weights=False)
    fetch_snapshot.cache_clear()
    answer = svdpp_here("plan", "--memory", *options, *SIZES, "--json")
    assert answer.code == 0, answer.err
    error = error_of("org/tiny", local_files_only=True)
    assert "text_encoder of the repository 'org/text': not fully cached here" in error.message
    assert "hf download org/text --include 'encoders/umt5/*'" in error.hint

    shutil.rmtree(cache / "models--org--vae")
    fetch_snapshot.cache_clear()
    answer = svdpp_here("plan", "--memory", *options, *SIZES)
    assert_error(answer, 5, "vae of the repository 'org/vae': not fully cached here")
    assert "hf download org/vae --include '*.json'" in " ".join(answer.err.split())


def _metadata(checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    config = PipelineConfig(
        world_size=2, model=ModelConfig(name=checkpoint.name), sampling=SAMPLING
    )
    output, inputs = OutputConfig(path=str(folder / "a.mp4")), ClipInput(None, "a cat", None)
    metadata = clip_metadata(inputs, 0, output, config, checkpoint)
    hashes = {"latents_sha256": "0" * 64, "frames_sha256": "0" * 64}
    assert (
        parameters_sha256(check_clip_metadata({**metadata, **hashes}, "x"))
        == (metadata["parameters_sha256"])
    )
    return metadata


def test_the_commits_of_other_repositories_identify_clips_ranks_and_servers(
    spread: type[Hub], whole: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(whole / "vae", tmp_path / "moved"))
    spread.others["org/vae@v2"] = moved
    revisions = (("vae", commit_of("org/vae@v2")),)
    models = [ModelConfig(name="org/tiny", component_revisions=each) for each in ((), revisions)]
    found = [find_checkpoint(model, weights=False) for model in models]
    metadata = [_metadata(checkpoint, tmp_path) for checkpoint in found]
    assert metadata[0]["components"] == PLACES
    assert metadata[1]["components"] == PLACES | {"vae": f"org/vae@{commit_of('org/vae@v2')}"}
    assert [(each["model"], each["revision"]) for each in metadata] == [("org/tiny", COMMIT)] * 2
    assert metadata[0]["parameters_sha256"] != metadata[1]["parameters_sha256"]
    config = PipelineConfig(world_size=2, model=models[0], sampling=SAMPLING)
    settings = [shared_settings(config, checkpoint) for checkpoint in found]
    assert [name for name in settings[0] if settings[0][name] != settings[1][name]] == [
        "components"
    ]
    keys = [Capabilities.of("x", each, sampling=SAMPLING, sizes=()).model_key for each in found]
    assert keys[0] != keys[1]

    own = find_checkpoint(ModelConfig(name=str(whole)), weights=False)
    assert "components" not in _metadata(own, tmp_path)


#: Plain diffusers script, which prints the hash of a clip's frames.
SCRIPT = """
import diffusers, torch
from svdpp.config import SAMPLING_CLASSES, ClipRequest, ModelConfig
from svdpp.media.video import frames_sha256
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.model import call_arguments
from svdpp.verification.reference import stack_frames

torch.set_num_threads(1)
pipe = diffusers.ModularPipeline.from_pretrained("org/tiny")
pipe.load_components()
checkpoint = find_checkpoint(ModelConfig(name="org/tiny"), weights=False)
sizes = {"num_inference_steps": 4, "height": 32, "width": 32, "num_frames": 5}
sampling = checkpoint.resolve_sampling(SAMPLING_CLASSES["wan_modular"](**sizes))
arguments = call_arguments(pipe, checkpoint, sampling, ClipRequest(seed=5, prompt="a cat"), None)
print(frames_sha256(stack_frames(pipe(**arguments, output_type="pil").values["videos"][0])))
"""


@pytest.mark.slow
@pytest.mark.full
def test_a_run_has_the_bits_of_diffusers_and_is_verified(
    spread: type[Hub], changed: Path, cache: Path, tmp_path: Path
) -> None:
    """A run gives the bits of a diffusers script, and can be verified.

    The model's own folder has other weights of the VAE, which neither the run nor the script reads.
    """
    shutil.copytree(changed / "vae", spread.folder / "vae")
    env = {
        **os.environ,
        "PYTHONPATH": PYTHONPATH,
        "HF_HUB_CACHE": str(cache),
        "CUDA_VISIBLE_DEVICES": "",
    }
    online = {**env, "HF_ENDPOINT": spread.url, "HF_HUB_OFFLINE": "0"}

    def call(*arguments: str, env: dict[str, str]) -> str:
        command = [sys.executable, *arguments]
        result = subprocess.run(command, env=env, text=True, capture_output=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    expected = call("-c", SCRIPT, env=online).split()[-1]
    find_checkpoint(ModelConfig(name="org/tiny"))  # downloads the remaining files
    offline = {**env, "HF_HUB_OFFLINE": "1"}
    out = tmp_path / "out"
    call(
        *("-m", "svdpp", "run", "--model", "org/tiny", "--prompt", "a cat", "--seed", "5"),
        *("--gpus", "2", "--device", "cpu", *SIZES, "--threads", "1", "--out", str(out)),
        env=offline,
    )
    (path,) = out.glob("*.mp4.json")
    metadata = json.loads(path.read_text())
    assert metadata["frames_sha256"] == expected
    assert metadata["components"] == PLACES
    verified = call("-m", "svdpp", "verify", str(path), "--json", env=offline)
    assert json.loads(verified)["equal"] is True
    metadata["components"]["vae"] = f"org/vae@{'0' * 40}"
    path.write_text(json.dumps(metadata))
    command = [sys.executable, "-m", "svdpp", "verify", str(path)]
    result = subprocess.run(command, env=offline, text=True, capture_output=True, check=False)
    assert result.returncode == 5
    assert "vae of the repository 'org/vae'" in " ".join(result.stderr.split())
