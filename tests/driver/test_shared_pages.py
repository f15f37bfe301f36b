"""Ranks of one host share the pages of an expert's files, measured at Wan 2.2 A14B's own width."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel

from svdpp.config import ClipRequest, ModelConfig, PipelineConfig, WanSampling
from svdpp.driver.pipeline import Pipeline
from svdpp.worker.messages import Event, Finished
from tests.cli.shell import python
from tests.driver.dummies import pids
from tests.models.tiny_families import save_tiny_wan

TRANSFORMERS = ("transformer", "transformer_2")
# As published, but for the number of layers (40) and the sizes that the tiny parts share with it.
_A14B = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "freq_dim": 256}
_TINY = {"in_channels": 4, "out_channels": 4, "text_dim": 16, "num_layers": 1}
# A rank's own memory: Python and the libraries, activations, and the time embedding, which
# diffusers loads in float32 (105 MiB).
_OWN_BYTES = 400 * 2**20


@pytest.mark.long
@pytest.mark.full
@pytest.mark.processes
def test_four_ranks_hold_one_copy_of_each_expert(tmp_path: Path) -> None:
    save_tiny_wan(tmp_path, boundary_ratio=0.875, dtype=torch.bfloat16)
    for part in TRANSFORMERS:
        _save_wide(tmp_path / part)
    config = PipelineConfig(
        world_size=4,
        split="balanced",
        model=ModelConfig(name=str(tmp_path), dtype="bf16"),
        sampling=WanSampling(num_inference_steps=4, height=32, width=32, num_frames=5),
    )
    estimated = _estimated(config)
    reported: dict[int, int] = {}

    def take(rank: int, event: Event) -> None:
        if isinstance(event, Finished):
            reported[rank] = event.reserved_bytes

    pipeline = Pipeline(config)
    pipeline.observe(take)
    with pipeline:
        held = [roles.experts for roles in pipeline.config.layout.roles]
        assert held == [{0}, {0}, {1}, {1}]
        pipeline.run(ClipRequest(seed=0, prompt="the sea at night"))
        ranks = [_smaps(pid, tmp_path) for pid in pids(pipeline)]
    gib = 2**30
    pss, rss = (sum((each[kind] for each in ranks), Counter()) for kind in ("Pss", "Rss"))
    sizes = {part: _file_bytes(tmp_path / part) for part in TRANSFORMERS}
    for part, size in sizes.items():
        print(
            f"{part}: {size / gib:.2f} GiB in files; ranks together: "
            f"PSS {pss[part] / gib:.2f}, RSS {rss[part] / gib:.2f} GiB"
        )
        assert pss[part] == pytest.approx(size, rel=0.02)
        assert rss[part] == pytest.approx(2 * size, rel=0.02)
    for rank, each in enumerate(ranks):
        own = each["Pss"]["own"]
        print(f"rank {rank}: {own / gib:.2f} GiB besides the experts' files")
        assert own < _OWN_BYTES
        assert [part in each["Rss"] for part in TRANSFORMERS] == [rank < 2, rank >= 2]
    for rank, told in enumerate(estimated):
        ratio = told / reported[rank]
        print(f"rank {rank}: peak {reported[rank] / gib:.2f} GiB, estimate / peak {ratio:.3f}")
        assert ratio == pytest.approx(1, abs=0.15)
    print(f"all ranks: PSS {sum(pss.values()) / gib:.2f}, RSS {sum(rss.values()) / gib:.2f} GiB")


def _estimated(config: PipelineConfig) -> list[int]:
    """The estimated peak of each rank; a new process has the libraries that a rank has."""
    code = (
        "import json, sys\n"
        "from svdpp.launch import environment\n"
        "environment.set_defaults()\n"
        "from svdpp.config import ModelConfig, PipelineConfig, WanSampling\n"
        "from svdpp.diagnostics.memory_estimate import estimate_ranks\n"
        "fields = json.loads(sys.argv[1])\n"
        "model, sampling = ModelConfig(**fields['model']), WanSampling(**fields['sampling'])\n"
        "config = PipelineConfig(world_size=4, split='balanced', model=model, sampling=sampling)\n"
        "print([each.total_bytes for each in estimate_ranks(config)])"
    )
    fields = json.dumps({"model": vars(config.model), "sampling": vars(config.sampling)})
    answer = python("-c", code, fields)
    assert answer.code == 0, answer.err
    found: list[int] = json.loads(answer.out.splitlines()[-1])
    return found


def _save_wide(folder: Path) -> None:
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    torch.set_default_dtype(torch.bfloat16)
    try:
        WanTransformer3DModel(**_A14B, **_TINY).save_pretrained(folder, max_shard_size="500MB")
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(list(folder.glob("*.safetensors"))) > 1


def _file_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _smaps(pid: int, folder: Path) -> dict[str, Counter[str]]:
    """PSS and RSS of a process in bytes: of each expert's files, and of everything else (`own`)."""
    found: dict[str, Counter[str]] = {"Pss": Counter(), "Rss": Counter()}
    part = "own"
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if match := re.match(r"(Pss|Rss): +(\d+) kB", line):
            found[match[1]][part] += int(match[2]) * 1024
        elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            name = Path(line.split(maxsplit=5)[-1]).parent
            part = name.name if name.parent == folder and name.name in TRANSFORMERS else "own"
    return found
