"""LoRAs in requests: named by the stem of a file in the server's folder, never by a path."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from svdpp.config import Lora, LtxSampling, ModelConfig, PipelineConfig, WanSampling
from svdpp.errors import RequestError
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.hashes import cached_sha256
from svdpp.models.lora_files import loras_in_folder
from svdpp.serve.auth import Owner
from svdpp.serve.batch_table import Batch, BatchState
from svdpp.serve.job import Job, JobState
from svdpp.serve.loras import LoraCatalog
from svdpp.serve.request_schema import Capabilities
from svdpp.serve.schemas import ApiError, to_api_error
from svdpp.serve.server import build, list_models
from svdpp.serve.service import Service
from svdpp.serve.settings import ServerSettings
from tests.serve.test_page import driver, opened
from tests.support.builders import save_tiny_lora
from tests.support.engines import job_of, taken
from tests.support.http_server import ServerHere, error_of, wait
from tests.support.shell import assert_error, svdpp_here
from tests.support.tiny_families import save_tiny_ltx, save_tiny_wan

__all__ = ["driver"]  # a fixture

CPU = ("--device", "cpu", "--world", "2", "--threads", "1", "--max-prompt-tokens", "8")
WAN = (*CPU, "--steps", "4", "--height", "32", "--width", "32", "--frames", "5")


@pytest.fixture(scope="module")
def ltx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_ltx(tmp_path_factory.mktemp("ltx"))


def capabilities_of(model: Path, folder: Path) -> Capabilities:
    config = ModelConfig(name=str(model), clip_loras=loras_in_folder(folder, 1))
    return Capabilities.of("ltx", find_checkpoint(config), sampling=LtxSampling(), sizes=())


def test_a_request_names_loras_that_the_server_has(ltx: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.safetensors" for name in ("slow", "style")}
    for seed, file in enumerate(files.values()):
        save_tiny_lora(ltx, file, seed=seed)
    hashes = {name: cached_sha256(file) for name, file in files.items()}
    server = capabilities_of(ltx, tmp_path)
    assert server.to_json()["loras"] == [
        {"name": name, "sha256": sha256} for name, sha256 in hashes.items()
    ]

    def found(value: Any) -> tuple[Lora, ...]:
        request = server.validate({"prompt": "sea", "lora": value})
        return server.loras.find(request.value("lora"))

    style = Lora(name="style", weight=0.8, sha256=hashes["style"])
    # A LoRA as vLLM-Omni's clients send it, in JSON or as a form field, and in the command line's
    # syntax.
    for value in ({"name": "style", "scale": 0.8}, '{"name": "style", "scale": 0.8}', "style:0.8"):
        assert found(value) == (style,)
    both = found(["style:0.8", {"name": "slow"}])
    assert both == (style, Lora(name="slow", sha256=hashes["slow"]))
    assert [file.path for file in server.loras.files(both)] == [files["style"], files["slow"]]
    assert [file.lora.weight for file in server.loras.files(both)] == [0.8, 1.0]

    assert server.loras.missing_reason(both) is None
    other = Lora(name="slow", sha256="0" * 64)  # the same name with another file
    assert server.loras.missing_reason([other]) is not None
    with pytest.raises(RequestError, match="this server does not have the job's LoRA slow"):
        server.loras.files([other])
    assert LoraCatalog().missing_reason(both) is not None

    # In a fleet, a request may name the LoRA of another server. Two servers may have different
    # files with the same name.
    shared = {"style": {hashes["style"]}, "far": {"1" * 64}, "both": {"2" * 64, "3" * 64}}
    assert server.loras.find("far:0.5", shared) == (Lora(name="far", weight=0.5, sha256="1" * 64),)
    with pytest.raises(RequestError, match="is not the same file on all servers") as refused:
        server.loras.find("both", shared)
    assert to_api_error(refused.value).hint == "name another LoRA, or leave lora out"
    assert refused.value.details["sha256"] == ["2" * 64, "3" * 64]
    with pytest.raises(RequestError, match="this fleet has no") as refused:
        server.loras.find("slow", shared, holder="this fleet")
    assert refused.value.details["known"] == ["both", "far", "style"]
    with pytest.raises(RequestError) as refused:
        server.loras.find("slow", {}, holder="this fleet")
    assert to_api_error(refused.value).hint == "leave lora out: this fleet offers none"

    for value, words in (
        ("styl", "this server has no LoRA 'styl'"),
        (str(files["style"]), "this server has no LoRA"),
        ({"name": "style", "path": "/etc"}, "lora has no field 'path'"),
        ({"name": "style", "scale": 1000}, "the weight of lora must be"),
        ({"name": "style", "expert": "low"}, "has one denoiser"),
        ("[", "is not JSON"),
    ):
        with pytest.raises(RequestError) as refused:
            found(value)
        error = to_api_error(refused.value)
        assert (error.status, error.details["field"]) == (422, "lora")
        assert words in error.message
        assert str(tmp_path) not in error.message or value == str(files["style"])
    with pytest.raises(RequestError) as refused:
        found("styl")
    assert refused.value.hint == "did you mean style?"
    assert refused.value.details["known"] == ["slow", "style"]


def test_a_server_without_loras_advises_clients_and_not_its_operator(tmp_path: Path) -> None:
    server = Capabilities(model="ltx", sampling=LtxSampling(), sizes=(), prompt_use="needed")
    assert server.to_json()["loras"] == []
    for name in ("lora", "denoiser", "attention_backend"):
        with pytest.raises(ApiError) as refused:
            server.validate({"prompt": "sea", name: "style"})
        assert refused.value.hint.startswith("leave the field out")
        assert "--" not in refused.value.hint
    with pytest.raises(RequestError, match=r"has no \*.safetensors files"):
        loras_in_folder(tmp_path, 1)
    with pytest.raises(RequestError, match="is not a folder"):
        loras_in_folder(tmp_path / "none", 1)


def test_loras_that_do_not_fit_are_named_at_the_start(ltx: Path, tmp_path: Path) -> None:
    """A LoRA that does not fit the model is refused before a rank starts.

    The error names a tensor that does not fit.
    """
    wan = save_tiny_wan(tmp_path / "wan")
    save_tiny_lora(wan, tmp_path / "loras" / "sea.safetensors", seed=1)
    options = ("--lora-dir", str(tmp_path / "loras"), "--data", str(tmp_path / "data"))
    answer = svdpp_here("serve", "--model", str(ltx), *CPU, *options, "--port", "0")
    assert_error(answer, 5, "the LoRA", "sea.safetensors", "tensor")
    answer = svdpp_here("serve", "--model", "demo", *CPU[:-2], *options, "--port", "0")
    assert_error(answer, 2, "takes no --lora")


@pytest.mark.slow
@pytest.mark.full
def test_clips_with_loras_that_requests_name_are_made_and_proven(
    driver: Any, tmp_path: Path
) -> None:
    model, loras = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875), tmp_path / "loras"
    for seed, part in enumerate(("transformer", "transformer_2")):
        save_tiny_lora(model, loras / f"{part}.safetensors", part=part, seed=seed)
    both = [{"name": "transformer", "scale": 0.5, "expert": "high"}, "transformer_2:low"]
    options = (*WAN, "--split", "balanced", "--model", str(model), "--lora-dir", str(loras))
    with ServerHere(tmp_path / "data", *options) as server:
        server.wait_ready()
        (shown,) = server.client.get("/v1/models").json()["data"]
        assert [each["name"] for each in shown["loras"]] == ["transformer", "transformer_2"]
        values = ({}, {"lora": json.dumps(both)}, {"lora": "transformer:0.25:high"}, {})
        ids = [server.add(photo=None, prompt="the sea", seed=7, **value)[0] for value in values]
        made = [server.wait_for(id, "completed") for id in ids]
        assert [len(video.get("lora", ())) for video in made] == [0, 2, 1, 0]
        assert made[1]["lora"][0]["scale"] == 0.5
        metadata = [server.client.get(f"/v1/videos/{id}/metadata").json() for id in ids]
        latents = [each["latents_sha256"] for each in metadata]
        assert latents[0] == latents[3]
        assert len(set(latents)) == 3
        for id in ids[1:3]:
            server.client.post(f"/v1/videos/{id}/verify")
        proofs = lambda: [server.video(id)["proof"] for id in ids[1:3]]  # noqa: E731
        wait(lambda: proofs() == ["equal", "equal"], lambda: f"{proofs()}")
        answer = server.client.post("/v1/videos", json={"prompt": "sea", "lora": "none:high"})
        error = error_of(answer, 422, "invalid_request")
        assert error["details"]["known"] == ["transformer", "transformer_2"]
        answer = server.client.post("/v1/videos", json={"prompt": "sea", "lora": "transformer"})
        assert "names no expert" in error_of(answer, 422, "invalid_request")["message"]
        _the_page_takes_loras(driver, server)


@contextmanager
def fleet_of_two(model: Path, loras: Path, folder: Path, database: str) -> Iterator[list[Service]]:
    """Yield two `Service`s of a fleet, without threads or ranks. Only the first one has LoRAs."""
    sampling = WanSampling(num_inference_steps=4, height=32, width=32, num_frames=5)
    with ExitStack() as opened:
        services = []
        for clip_loras in (loras_in_folder(loras, 1), ()):
            config = PipelineConfig(
                world_size=2,
                model=ModelConfig(name=str(model), clip_loras=clip_loras),
                sampling=sampling,
                device="cpu",
                num_threads=1,
            )
            settings = ServerSettings(
                config=config, folder=folder, sizes=((32, 32),), max_open=99, queue_url=database
            )
            _, service = build(settings, None)
            opened.callback(service.queue.close)
            services.append(service)
        for service in (*services, *services):  # twice, so that each service knows the other
            service.fleet._renew_claims()
        yield services


@pytest.mark.slow
def test_a_clip_waits_for_the_server_of_a_fleet_that_has_its_lora(
    tmp_path: Path, database: str
) -> None:
    """Clips with a LoRA wait for the server that has this LoRA.

    Any server accepts a request or batch with the LoRA, and any server turns the lines of a batch
    into jobs.
    """
    model, loras, owner = save_tiny_wan(tmp_path / "wan"), tmp_path / "loras", Owner("")
    save_tiny_lora(model, loras / "style.safetensors", seed=1)
    style = {"name": "style", "sha256": cached_sha256(loras / "style.safetensors")}
    with fleet_of_two(model, loras, tmp_path / "data", database) as (holder, other):

        def request(server: Service, lora: str) -> Job:
            fields = server.capabilities.validate({"prompt": "the sea", "lora": lora})
            return job_of(server.queue, server.submit(fields, owner, None).id)

        def batch(server: Service) -> Batch:
            lines = [
                {"custom_id": lora or "none", "method": "POST", "url": "/v1/videos"}
                | {"body": {"prompt": "the sea"} | ({"lora": lora} if lora else {})}
                for lora in ("style:0.5", "")
            ]
            source = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
            return server.batches.create(owner, None, source=source)

        assert list_models(other)["data"][0]["loras"] == [style]
        with pytest.raises(RequestError, match="this fleet has no LoRA 'styl'") as refused:
            request(other, "styl")
        assert refused.value.details["known"] == ["style"]
        job = request(other, "style:0.5")
        assert job.loras == (Lora(**style, weight=0.5),)
        assert other.queue.claim() is None
        assert other.video(job).held is None, "the other server has it"
        assert taken(holder.queue).id == job.id

        first, second = batch(other), batch(holder)
        assert first.loras == second.loras == {"style": style["sha256"]}
        holder.queue.release()  # the server ends before its batch becomes jobs
        other.fleet._renew_claims()
        other.batches._run_once()
        for each in (first, second):
            assert each.total == 2
            found = other.batches.get(each.id, owner)
            assert (found.state, found.stored) == (BatchState.IN_PROGRESS, 2), found.errors
        made = [taken(other.queue) for _ in range(2)]
        assert [job.custom_id for job in made] == ["none", "none"]
        assert other.queue.claim() is None
        waiting = other.queue.page(owner="", limit=9, states=[JobState.QUEUED])
        assert len(waiting) == 3
        reasons = {other.video(job).held for job in waiting}
        assert reasons == {"this server does not have the job's LoRA style"}
        assert list_models(other)["data"][0]["loras"] == []
        with pytest.raises(RequestError, match="this fleet has no LoRA 'style'"):
            request(other, "style")


def _the_page_takes_loras(driver: Any, server: ServerHere) -> None:
    """Check that the page has a field for a LoRA, and that a clip made again keeps its LoRA."""
    with contextmanager(opened)(driver, server) as page:
        page.wait(lambda: len(page.all(".card")) == 4)
        page.fill("prompt", "the sea")
        page.fill("lora", "transformer")
        page.one("#make").click()
        page.wait_text("#error-lora", "names no expert")
        page.fill("lora", "transformer:0.5:high")
        page.one("#make").click()
        page.wait(lambda: len(page.all(".card")) == 5)
        page.one(".card button[aria-label^=Make]").click()
        page.wait(lambda: len(page.all(".card")) == 6)
        page.one(".card details summary").click()
        page.wait_text(".card details", "transformer 0.5 high")
    again, first = server.client.get("/v1/videos?limit=2").json()["data"]
    assert again["lora"] == first["lora"] != []
