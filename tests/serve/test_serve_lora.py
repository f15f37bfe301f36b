"""A LoRA for each expert, no guidance, four ranks of one step each: run, serve and verify."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from tests.cli.shell import svdpp_here
from tests.models.tiny_families import save_tiny_wan
from tests.models.tiny_loras import save_tiny_lora
from tests.serve.http_server import HANG_SECONDS, HttpServer, wait

pytestmark = [pytest.mark.processes, pytest.mark.long]

#: As in docs/lora.md.
FOUR_STEPS = ("--world", "4", "--steps", "4", "--guidance-scale", "1", "--param", "flow_shift=5")
SIZES = ("--frames", "5", "--height", "32", "--width", "32", "--max-prompt-tokens", "8")


def _metadata(clip: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(f"{clip}.json").read_text())
    return values


def test_run_and_serve_make_the_same_proven_clip_with_loras(tmp_path: Path) -> None:
    folder = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875)
    high = save_tiny_lora(folder, tmp_path / "high.safetensors", seed=1)
    low = save_tiny_lora(folder, tmp_path / "low.safetensors", part="transformer_2", seed=2)
    model = ("--model", str(folder), "--device", "cpu", "--threads", "1", *SIZES, *FOUR_STEPS)
    loras = ("--lora", f"{high}:high", "--lora", f"{low}:low")
    asked = ("--prompt", "the sea", "--seed", "7", "--out", str(tmp_path / "out"))

    ran = svdpp_here("run", *model, *loras, *asked)
    assert ran.code == 0, ran
    (made,) = (tmp_path / "out").glob("*.mp4")
    with HttpServer(tmp_path / "data", *model, *loras) as server:
        server.wait_ready()
        (id,) = server.add(photo=None, prompt="the sea", seed=7)
        server.wait_for(id, "completed")
        server.client.post(f"/v1/videos/{id}/verify")
        wait(lambda: server.video(id)["proof"] != "running", HANG_SECONDS, lambda: server.err)
        assert server.video(id)["proof"] == "equal", server.video(id)
    (served,) = (tmp_path / "data").rglob(f"{id}.mp4")

    first, second = _metadata(made), _metadata(served)
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (high, low)]
    assert [each["sha256"] for each in first["lora"]] == hashes
    assert second["lora"] == first["lora"]
    assert second["frames_sha256"] == first["frames_sha256"]
    proof = svdpp_here("verify", str(made), str(served))
    assert (proof.code, proof.out.count("bitwise equal: ")) == (0, 2), proof
    plain = svdpp_here("run", *model, *asked[:-1], str(tmp_path / "plain"))
    assert plain.code == 0, plain
    (without,) = (tmp_path / "plain").glob("*.mp4")
    assert _metadata(without)["frames_sha256"] != first["frames_sha256"]
