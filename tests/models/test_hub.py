"""Downloads from the Hugging Face hub, with huggingface_hub, a cache, and a local server."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest

from svdpp.config import (
    Denoiser,
    LtxSampling,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    SvdSampling,
    WanSampling,
)
from svdpp.driver.resolve import check_memory, resolve_config
from svdpp.errors import ModelError, RequestError
from svdpp.launch.world import World
from svdpp.models.checkpoint import Checkpoint, find_checkpoint
from svdpp.models.engine.factory import load_engine_model
from svdpp.models.hub import fetch_snapshot
from tests.models.test_checkpoint import error_of
from tests.support.gguf_writer import save_gguf
from tests.support.local_hub import COMMIT, TOKEN, Hub
from tests.support.shell import svdpp_here
from tests.support.tiny_families import save_tiny_wan

UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("status", "error_code", "message", "hint"),
    [
        (403, "GatedRepo", "accept its licence", "https://huggingface.co/org/tiny, then run: hf"),
        (404, "RepoNotFound", "nor a model on the hub", "hf auth login"),
        (404, "RevisionNotFound", "the hub answered 404", "check `revision`"),
        (401, "", "the hub answered 401", "hf auth login"),
    ],
)
def test_hub_answers_with_an_error(
    hub: type[Hub], status: int, error_code: str, message: str, hint: str
) -> None:
    hub.error = (status, error_code)
    error = error_of("org/tiny", revision="v9")
    assert message in error.message
    assert hint in error.hint
    assert error.details["status"] == status
    assert TOKEN not in error.message + error.hint


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        (OSError(28, "No space left on device", "/cache/blob"), "No space left on"),
        (RuntimeError(f"https://user:{TOKEN}@host"), "RuntimeError"),  # an error of hf_xet
    ],
)
def test_a_failure_while_downloading(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, cause: str
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    error = error_of(f"org/{TOKEN}")
    assert f"cannot be downloaded ({cause}" in error.message
    assert "HF_HOME" in error.hint
    assert TOKEN not in error.message + error.hint


def _files(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*")]


def _weights(names: Iterable[str]) -> set[str]:
    return {name for name in names if "safetensors" in name or name.endswith(".bin")}


@pytest.mark.slow
def test_a_denoiser_is_downloaded_in_place_of_the_models_own(
    hub: type[Hub], tmp_path: Path
) -> None:
    hub.folder = save_tiny_wan(tmp_path / "wan")
    save_gguf(hub.folder, hub.folder / "files" / "wan.gguf", "BF16")
    denoiser = Denoiser(name="org/tiny/files/wan.gguf")
    found = find_checkpoint(ModelConfig(name="org/tiny", denoisers=(denoiser,)))
    assert found.denoisers[0].denoiser.revision == COMMIT
    assert found.denoisers[0].denoiser.sha256 is not None
    assert "files/wan.gguf" in hub.requested
    assert {name.partition("/")[0] for name in _weights(hub.requested)} == {"text_encoder", "vae"}


@pytest.mark.slow
def test_only_configs_are_downloaded_without_weights(
    hub: type[Hub], tiny: Path, cache: Path
) -> None:
    hub.folder = tiny
    model = ModelConfig(name="org/tiny")
    found = find_checkpoint(model, weights=False)
    assert "unet/config.json" in hub.requested
    assert not _weights(hub.requested)
    assert not list(cache.rglob("*.safetensors"))
    assert found.revision == COMMIT
    assert found.resolve_sampling(SvdSampling()).num_frames == 4

    answer = svdpp_here("plan", "--memory", "--model", "org/tiny", "--local-files-only", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["costs"]["denoise_weights_gib"] > 0
    with pytest.raises(ModelError, match="not fully cached"):
        find_checkpoint(replace(model, local_files_only=True))


@pytest.mark.usefixtures("cache")
def test_a_plan_without_a_network_asks_for_configs_alone() -> None:
    """Without a network, `plan --memory` asks only for configs: a few megabytes, not 126 GB."""
    with pytest.raises(ModelError, match="not fully cached") as caught:
        find_checkpoint(ModelConfig(name="org/tiny", local_files_only=True), weights=False)
    assert "hf download org/tiny --include 'model_index.json'" in caught.value.hint
    assert "--include '*/config.json'" in caught.value.hint
    assert "*.safetensors" not in caught.value.hint


PARTS = ("text_encoder", "transformer", "transformer_2", "vae")
#: Configuration of four ranks. The first two of four steps belong to the first expert.
CONFIG = PipelineConfig(
    world_size=4,
    parallel=ParallelConfig(split="balanced"),
    model=ModelConfig(name="org/tiny"),
    sampling=WanSampling(num_inference_steps=4, height=32, width=32, num_frames=5),
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a hub repository: a tiny Wan, and files in other formats, as usual on a hub."""
    folder = tmp_path_factory.mktemp("wan") / "wan"
    save_tiny_wan(folder, boundary_ratio=0.875, max_shard_size="30KB")
    for path in list(folder.rglob("*.safetensors")):
        path.with_suffix(".bin").write_bytes(b"a pickle")
        path.with_suffix(".fp16.safetensors").write_bytes(b"another variant")
    (folder / "wan2.2.safetensors").write_bytes(b"all in one file")
    for name in ("pytorch_model.bin", "tokenization.py"):
        (folder / "tokenizer" / name).write_bytes(b"code")
    (folder / "README.md").write_text("about")
    return folder


@pytest.fixture
def wan(hub: type[Hub], repository: Path) -> type[Hub]:
    hub.folder = repository
    return hub


def _files_in_use(folder: Path, parts: Iterable[str]) -> set[str]:
    """Return the weight files that diffusers and transformers read for components."""
    paths = (path for part in parts for path in (folder / part).glob("*.safetensors*"))
    return {f"{path.parent.name}/{path.name}" for path in paths if ".fp16" not in path.name}


def _first_rank_on(host: int) -> World:
    """Return the `World` of the first rank on a host; there are two hosts with two ranks each."""
    return World(rank=2 * host, local_rank=0, size=4, local_size=2, host=host, num_hosts=2)


@pytest.mark.slow
@pytest.mark.parametrize(("host", "expected"), [(0, PARTS[:2]), (1, PARTS[2:])])
def test_a_host_downloads_what_its_ranks_need(
    wan: type[Hub], host: int, expected: tuple[str, ...]
) -> None:
    config, checkpoint = resolve_config(CONFIG, world=_first_rank_on(host))
    assert isinstance(checkpoint, Checkpoint)
    assert _weights(_files(checkpoint.folder)) == _files_in_use(wan.folder, expected)
    assert isinstance(config.sampling, WanSampling)
    roles = config.layout.roles[2 * host : 2 * host + 2]
    load_engine_model(checkpoint, config.model, config.sampling, "cpu", roles[0])
    check_memory(config, checkpoint, roles)

    resolve_config(config.single_rank())  # for the reference, or for a single host
    assert _weights(_files(checkpoint.folder)) == _files_in_use(wan.folder, PARTS)


def test_a_request_is_checked_before_a_weight_is_downloaded(wan: type[Hub]) -> None:
    with pytest.raises(RequestError, match="of the family wan, not ltx"):
        resolve_config(replace(CONFIG, sampling=LtxSampling(num_inference_steps=4)))
    assert wan.requested
    assert not _weights(wan.requested)
    assert not [name for name in wan.requested if name.endswith(".py")]


def test_a_cache_that_is_partly_filled_and_no_network(
    wan: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve_config(CONFIG, world=_first_rank_on(0))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    huggingface_hub.close_session()
    fetch_snapshot.cache_clear()  # as in a new process
    wan.requested.clear()
    resolve_config(CONFIG, world=_first_rank_on(0))
    with pytest.raises(ModelError) as caught:
        resolve_config(CONFIG, world=_first_rank_on(1))
    huggingface_hub.close_session()
    assert not wan.requested
    assert "not fully cached here (transformer_2, vae missing)" in caught.value.message
    command = "hf download org/tiny --include 'transformer_2/*' --include 'vae/*'"
    assert command in caught.value.hint
