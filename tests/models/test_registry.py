"""Every family, cut after each step or shared by a CFG pair, gives the bits of the whole
`__call__`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

from svdpp.cli.models import describe
from svdpp.comm.packet import TensorSpec, check_tensors
from svdpp.config import ModelConfig
from svdpp.config.families.registry import FAMILY_SPECS
from svdpp.errors import ModelError, RequestError
from svdpp.models.base import LATENTS, STRUCTURE, AfterStep, Tensors
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.call import split_batch
from svdpp.models.engine.factory import load_engine_model
from svdpp.models.engine.model import EngineModel
from svdpp.plan.roles import Roles
from svdpp.verification.reference import Reference, stack_frames
from svdpp.worker.stage import expected_like
from svdpp.worker.tensor_files import solver_history
from tests.support.family_case import SIZES, STEPS
from tests.support.partners import Half, run_pair
from tests.support.range_checks import (
    TinyModel,
    assert_equal,
    check_every_cut,
    loaded,
    nothing,
    photograph,
    read_folder,
    whole_clip,
)
from tests.support.tiny_families import CASES, FIRST, KINDS, NOT_ALIKE, chosen, save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TinyModels = Callable[[str], TinyModel]

EULER = {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)}


def _takes_prompt(name: str) -> bool:
    return FAMILY_SPECS[CASES[name].family].takes_prompt


@pytest.mark.parametrize("name", chosen((*KINDS, "wan-modular"), NOT_ALIKE))
def test_every_cut_gives_the_bits_of_the_whole_call(tiny_models: TinyModels, name: str) -> None:
    tiny_model, case = tiny_models(name), CASES[name]
    request = tiny_model.request(negative_prompt=case.negative)
    reference = whole_clip(tiny_model.model, tiny_model.sampling, request, tiny_model.source)
    check_every_cut(tiny_model.rank_for, tiny_model.steps, reference, request, tiny_model.source)
    audio = reference[2]
    sound_decoders = {"audio_vae", "sound_tokenizer"}
    assert (audio is None) == sound_decoders.isdisjoint(
        tiny_model.checkpoint.spec.decode_components
    )
    if audio is not None:
        ours = tiny_model.decoder.audio
        assert ours is not None
        assert torch.equal(ours.samples, audio.samples)
        assert audio.samples.unique().numel() > 1
        assert ours.rate == audio.rate
    denoisers = {*tiny_model.checkpoint.spec.denoisers} & {
        *tiny_model.checkpoint.weighted_components
    }
    ends = tiny_model.rank_for(0, 1), tiny_model.rank_for(tiny_model.steps - 1, tiny_model.steps)
    assert {name for each in ends for name in loaded(each)} == denoisers


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", FIRST.values())
def test_every_cut_gives_the_bits_of_the_whole_call_in_bf16(
    tiny_models: TinyModels, name: str
) -> None:
    tiny_model = replace(tiny_models(name), model=replace(tiny_models(name).model, dtype="bf16"))
    request = tiny_model.request(negative_prompt=CASES[name].negative)
    reference = whole_clip(tiny_model.model, tiny_model.sampling, request, tiny_model.source)
    check_every_cut(tiny_model.rank_for, tiny_model.steps, reference, request, tiny_model.source)


@pytest.mark.parametrize("family", FAMILY_SPECS)
def test_what_models_calls_verified_has_a_case(family: str) -> None:
    verified = describe(family)["verified"]
    assert verified["cuts"] == "bitwise"
    assert family in FIRST  # other tests cut these cases after every step
    pairs = "bitwise" if FAMILY_SPECS[family].pairs_are_exact else "close"
    assert verified["pairs"] == (pairs if family in FIRST_PAIRED else "refused")


@pytest.mark.slow
def test_the_solver_history_at_the_end_of_a_stage_is_that_of_the_whole_call(
    tiny_models: TinyModels,
) -> None:
    """After each step, the solver's history equals that of the whole `__call__`.

    At the end of a stage of Helios, the next stage sets timesteps before the denoiser's next call,
    where svdpp cuts.
    """
    tiny_model, histories = tiny_models("helios-pyramid"), []
    Reference(tiny_model.checkpoint, tiny_model.model, "cpu", from_image=False).run(
        tiny_model.request(),
        None,
        tiny_model.sampling,
        before_steps=lambda: None,
        after_step=lambda _, tensors: histories.append(solver_history(tensors)),
    )
    packet = tiny_model.encode(tiny_model.request())
    for step, expected in enumerate(histories):
        packet = tiny_model.rank_for(step, step + 1).denoise(packet, step, step + 1, nothing)
        found = solver_history(packet)
        assert found.keys() & expected.keys()
        for name in found.keys() & expected.keys():
            assert torch.equal(found[name], expected[name]), (step, name)


@pytest.mark.parametrize("name", ["wan-last-image", "ltx-condition-last-image"])
def test_a_last_image_is_the_one_of_a_plain_call_of_diffusers(
    tiny_models: TinyModels, name: str
) -> None:
    tiny_model, case = tiny_models(name), CASES[name]
    request, source = tiny_model.request(), tiny_model.source
    assert isinstance(source, dict)
    ours = whole_clip(tiny_model.model, tiny_model.sampling, request, source)[1]
    pipe = diffusers.DiffusionPipeline.from_pretrained(tiny_model.checkpoint.folder)
    if isinstance(pipe, diffusers.LTXConditionPipeline):
        pair = [(source["image"], 0), (source["last_image"], tiny_model.sampling.frames - 1)]
        images: dict[str, Any] = {
            "conditions": [LTXVideoCondition(image=image, frame_index=at) for image, at in pair]
        }
    else:
        images = dict(source)
    options: dict[str, Any] = {**SIZES, **case.sampling, "prompt": request.prompt}
    generator = torch.Generator().manual_seed(request.seed)
    plain = pipe(**images, **options, generator=generator, output_type="pil").frames[0]
    assert np.array_equal(ours, stack_frames(plain))
    other = whole_clip(
        tiny_model.model, tiny_model.sampling, request, {**source, "last_image": photograph(2)}
    )[1]
    assert not np.array_equal(other, ours)


def test_references_are_those_of_a_plain_call_of_diffusers(tiny_models: TinyModels) -> None:
    tiny_model, case = tiny_models("wan-vace-references"), CASES["wan-vace-references"]
    request, source = tiny_model.request(), tiny_model.source
    assert isinstance(source, dict)
    ours = whole_clip(tiny_model.model, tiny_model.sampling, request, source)[1]
    plain = diffusers.DiffusionPipeline.from_pretrained(tiny_model.checkpoint.folder)(
        reference_images=[*source.values()],
        prompt=request.prompt,
        generator=torch.Generator().manual_seed(request.seed),
        output_type="pil",
        **{**SIZES, **case.sampling},
    )
    assert np.array_equal(ours, stack_frames(plain.frames[0]))
    turned = dict(zip(source, reversed(source.values()), strict=True))
    other = whole_clip(tiny_model.model, tiny_model.sampling, request, turned)[1]
    assert not np.array_equal(other, ours)


@pytest.mark.slow
@pytest.mark.full
def test_references_of_a_class_of_their_own_are_those_of_a_plain_call(
    tiny_models: TinyModels,
) -> None:
    tiny_model, case = tiny_models("minimax-h3-references"), CASES["minimax-h3-references"]
    request, source = tiny_model.request(), tiny_model.source
    assert isinstance(source, dict)
    ours = whole_clip(tiny_model.model, tiny_model.sampling, request, source)[1]
    pipe = diffusers.ModularPipeline.from_pretrained(
        tiny_model.checkpoint.folder, workflow="ref2va"
    )
    pipe.load_components()
    pipe.processor = tiny_model.encoder._pipe.processor  # diffusers' own one needs torchvision
    references = [MiniMaxH3ImageReference(image=image) for image in source.values()]
    plain = pipe(
        references=references,
        prompt=request.prompt,
        generator=torch.Generator().manual_seed(request.seed),
        num_inference_steps=tiny_model.steps + 1,
        **{name: case.sampling[name] for name in ("height", "width", "num_frames")},
    )
    assert np.array_equal(ours, stack_frames(plain.values["videos"][0]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("cosmos3-video", {"condition_frame_indexes_vision": (0, 1)}),
        ("cosmos3-sound-image", {"enable_sound": True}),
        ("cosmos3-image-distilled", {}),
    ],
)
def test_a_clip_of_cosmos_is_the_one_of_a_plain_call_of_diffusers(
    tiny_models: TinyModels, name: str, arguments: dict[str, Any]
) -> None:
    """A clip of Cosmos equals that of a plain script with diffusers.

    The script passes a longer video, of which diffusers uses only the first frames.
    """
    tiny_model, case = tiny_models(name), CASES[name]
    request, source = tiny_model.request(), tiny_model.source
    _, ours, audio = whole_clip(tiny_model.model, tiny_model.sampling, request, source)
    pipe = diffusers.ModularPipeline.from_pretrained(tiny_model.checkpoint.folder)
    pipe.load_components()
    given = {"video": [*source, *source]} if isinstance(source, list) else {"image": source}
    state = pipe(
        **{**case.sampling, **given, **arguments, "num_inference_steps": tiny_model.steps},
        prompt=request.prompt,
        generator=torch.Generator().manual_seed(request.seed),
    )
    assert np.array_equal(ours, stack_frames(state.get("videos")))
    if audio is not None:
        sound = state.get("sound").clamp(-1.0, 1.0) * 32767.0
        assert torch.equal(audio.samples, sound.to(torch.int16).T)
        assert audio.rate == state.get("sampling_rate")


REFUSALS = [
    (name, changes, words) for name, case in CASES.items() for changes, words in case.refused
]


@pytest.mark.parametrize(("name", "changes", "words"), REFUSALS)
def test_what_a_row_cannot_run_is_refused(
    tiny_models: TinyModels, name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        tiny_models(name).checkpoint.resolve_sampling(CASES[name].config(**changes))
    said = f"{caught.value.message} {caught.value.hint}"
    assert re.search(".*".join(map(re.escape, words.split(" ... "))), said)


def test_the_scheduler_of_another_pipeline_of_the_model_is_refused_by_name(tmp_path: Path) -> None:
    """A scheduler that only another pipeline of the model supports is refused.

    Diffusion forcing steps each frame separately, which Euler's scheduler cannot do.
    """
    folder = save_tiny("skyreels_v2_df", tmp_path, **EULER)
    with pytest.raises(ModelError, match="FlowMatchEulerDiscreteScheduler' is not supp") as caught:
        find_checkpoint(ModelConfig(name=str(folder)))
    assert caught.value.details["supported"] == ["UniPCMultistepScheduler"]
    assert "use_flow_sigmas=True" in caught.value.hint


def test_a_scheduler_of_another_family_of_the_pipeline_is_refused_with_that_family(
    tmp_path: Path,
) -> None:
    """A scheduler that fits another family with the same pipeline is refused; the hint has that
    family.

    The index of Helios-Distilled names the pipeline of Helios-Mid.
    """
    folder = save_tiny("helios_distilled", tmp_path)
    index = folder / "modular_model_index.json"
    values = json.loads(index.read_text())
    del values["_blocks_class_name"]
    index.write_text(json.dumps({**values, "_class_name": "HeliosPyramidPipeline"}))
    with pytest.raises(ModelError, match="HeliosDMDScheduler' is not supported") as caught:
        find_checkpoint(ModelConfig(name=str(folder)))
    assert caught.value.hint == "use `family` helios_distilled"
    assert read_folder(folder, "helios_distilled").scheduler_class == "HeliosDMDScheduler"


# --- negative controls: damage to any part of a packet changes the clip --------------------------

#: Pattern of the names of generator states in packets, and a different state.
_GENERATORS = re.compile(r"(^|\.)generators?(\.|$)")
_OTHER_GENERATOR = torch.Generator().manual_seed(9).get_state()

# The prompts have quotes, because HunyuanVideo-1.5 encodes quoted text separately.
SIGN, OTHER_SIGN = 'the sea, and a sign: "a cat"', 'a hill, and a sign: "a dog"'
#: Parts of a packet that no later step reads, with the reason why they are sent. `Case.unread` has
#: those of single cases.
UNREAD = {
    "timestep_list": "UniPC keeps timesteps of which only another solver reads more than one",
}

#: Unread parts in packets of modular pipelines, by full name.
UNREAD_OF_MODULAR = {
    **dict.fromkeys(
        (
            *("guider._timestep", "audio_guider._timestep"),
            *("_step", "_num_inference_steps", "_count_prepared"),
        ),
        "the pipeline gives these to the guider before each step",
    ),
    "num_inference_steps": "the scheduler gets it with its timesteps, and no step reads it",
}

#: Slow cases that CI leaves out, because another case has similar packets.
_LIKE_OTHERS_IN_CI = {
    *("cosmos3-distilled", "cosmos3-image-distilled", "cosmos3-sound", "cosmos3-video"),
    *("framepack-chunks", "framepack-last-image"),
    *("helios-distilled", "helios-image", "helios-video", "hunyuan-video-1.5-image"),
    *("ltx2", "ltx2-condition-last-image", "ltx2-in-context", "ltx2-in-context-first-image"),
    *("minimax-h3", "wan-replace"),
}
#: Words in the names of cases that differ from another case only in weights or guidance.
ALIKE = ("16", "5b", "euler", "order", "timestep", "unguided")
CONTROLLED = [
    case
    for case in chosen(
        ("wan", "ltx-image", "ltx-condition-image", "latte"),
        {
            "wan-modular-momentum",
            *(name for name in NOT_ALIKE if name in FIRST.values() or CASES[name].draws),
        }
        - _LIKE_OTHERS_IN_CI,
    )
    if not any(word in str(case.values[0]) for word in ALIKE)
]


@pytest.mark.parametrize("name", CONTROLLED)
def test_every_tensor_and_number_of_a_packet_is_needed(tiny_models: TinyModels, name: str) -> None:
    """Damage to any tensor or number of a packet changes the clip, so no unneeded part is sent.

    The generator's state matters only if later steps draw noise.
    """
    tiny_model, case = tiny_models(name), CASES[name]
    clip = tiny_model.request(SIGN, negative_prompt=OTHER_SIGN)
    packet = tiny_model.rank_for(0, 1).denoise(tiny_model.encode(clip), 0, 1, nothing)
    whole = _last(tiny_model, packet)
    frames = tiny_model.decoder.decode(whole)

    def damage_shows(damaged: Tensors) -> bool:
        """Return whether denoising a damaged packet gives another clip, or an error."""
        try:
            last = _last(tiny_model, damaged)
            if not torch.equal(last[LATENTS], whole[LATENTS]):
                return True
            return not torch.equal(tiny_model.decoder.decode(last), frames)
        except Exception:
            return True

    assert not damage_shows(dict(packet))
    assert any(_numbers(_structure(packet))) != case.is_stateless
    tensors = [each for each in packet if each != STRUCTURE and not _GENERATORS.search(each)]
    damaged = [*((each, _damaged(packet, each)) for each in tensors), *_other_states(packet)]
    unseen = [
        part
        for part, other in damaged
        if part not in {*case.unread, *(UNREAD_OF_MODULAR if tiny_model.is_modular else ())}
        and not any(known in part for known in UNREAD)
        and not damage_shows(other)
    ]
    assert unseen == []
    states = dict.fromkeys(filter(_GENERATORS.search, packet), _OTHER_GENERATOR)
    assert damage_shows({**packet, **states}) == case.draws


def _last(tiny_model: TinyModel, packet: Tensors) -> Tensors:
    return tiny_model.rank_for(1, tiny_model.steps).denoise(packet, 1, tiny_model.steps, nothing)


def _damaged(packet: Tensors, name: str) -> Tensors:
    tensor = packet[name]
    if tensor.is_floating_point():
        return {**packet, name: torch.full_like(tensor, torch.nan)}
    return {**packet, name: (tensor == 0).to(tensor.dtype)}


def _other_states(packet: Tensors) -> Iterator[tuple[str, Tensors]]:
    """Yield the name of each number of the schedulers' state, and a packet with another number."""
    for place, (key, _) in enumerate(_numbers(_structure(packet))):
        if key == "_begin_index":  # only the first step reads it
            continue
        structure = _structure(packet)
        [*_numbers(structure)][place][1]["value"] -= 1
        data = bytearray(json.dumps(structure).encode())
        yield key, {**packet, STRUCTURE: torch.frombuffer(data, dtype=torch.uint8)}


def _numbers(structure: Any) -> Iterator[tuple[str, Any]]:
    """Yield each number in a packet's state of schedulers and guiders: its name and JSON node."""
    if "attributes" in structure:
        parts = structure["attributes"].values()
        states = [attributes for modules in parts for attributes in modules.values()]
    else:
        states = [state["items"] for state in structure["step"]["states"]]
    for attributes in states:
        for key, node in attributes.items():
            if isinstance(node.get("value"), int):
                yield key, node
            if node["kind"] == "object":  # such as the momentum of a guider
                yield from ((own, of_own) for own, of_own in node["items"] if "value" in of_own)


def _structure(packet: Tensors) -> Any:
    return json.loads(packet[STRUCTURE].numpy().tobytes())


# --- a CFG pair, one rank for each branch of the guidance, gives the bits of one rank -------------


def denoise_in_pair(
    models: list[EngineModel], packet: Tensors, start: int, end: int, kind: type[Half] = Half
) -> list[Tensors]:
    """Do steps on both ranks of a CFG pair, each in a thread; return both packets."""
    return run_pair(
        lambda partner: models[partner.branch].denoise(packet, start, end, nothing, partner), kind
    )


PAIRED = [
    name
    for name, case in CASES.items()
    if FAMILY_SPECS[case.family].branches and case.config().uses_guidance
]
MODULAR_PAIRED = [name for name in PAIRED if FAMILY_SPECS[CASES[name].family].modular]
FIRST_PAIRED = {CASES[name].family: name for name in reversed(PAIRED)}


def both_ranks(tiny_model: TinyModel, **changes: Any) -> list[EngineModel]:
    """Load and return the models of both ranks of a CFG pair, each with all roles."""
    experts = frozenset(range(tiny_model.checkpoint.num_experts))
    roles = Roles(encode=True, denoise=True, decode=True, experts=experts)
    sampling = replace(tiny_model.sampling, **changes)
    return [
        load_engine_model(tiny_model.checkpoint, tiny_model.model, sampling, "cpu", roles)
        for _ in range(2)
    ]


@pytest.mark.parametrize(
    "name",
    chosen(["latte"], FIRST.values(), [name for name in FIRST.values() if _takes_prompt(name)]),
)
def test_a_rank_takes_clips_whose_prompts_have_other_lengths(
    tiny_models: TinyModels, name: str
) -> None:
    """A rank accepts packets of clips with prompts of different lengths.

    Some pipelines shorten the embeddings to the prompt's tokens, so the sizes of packets differ.
    """
    tiny_model = tiny_models(name)
    packets = [tiny_model.encode(tiny_model.request(prompt)) for prompt in ("a", "a wave " * 12)]
    sent, first = (
        {name: TensorSpec.of(tensor) for name, tensor in packet.items()} for packet in packets
    )
    check_tensors(
        sent, {key: expected_like(key, sent.get(key), spec) for key, spec in first.items()}
    )


# The latents of `helios-pyramid` grow during these steps.
@pytest.mark.parametrize(
    "name",
    chosen(
        [FIRST_PAIRED["wan"]],
        {*FIRST_PAIRED.values()} - {*MODULAR_PAIRED} | {"helios-pyramid"},
        PAIRED,
    ),
)
def test_a_pair_gives_the_packets_of_one_rank(tiny_models: TinyModels, name: str) -> None:
    tiny_model = tiny_models(name)
    models, packet = both_ranks(tiny_model), tiny_model.encode(tiny_model.request())
    alone = models[0].denoise(packet, 0, STEPS, nothing)

    middle = denoise_in_pair(models, packet, 0, 2)
    ends = denoise_in_pair(models, middle[1], 2, STEPS)

    assert_equal(*middle)
    assert_equal(*ends)
    if tiny_model.checkpoint.spec.pairs_are_exact:
        assert_equal(ends[0], alone)
    assert torch.allclose(ends[0][LATENTS], alone[LATENTS], atol=1e-3)
    # The shapes are known now, so no rank has to evaluate both branches.
    assert_equal(*denoise_in_pair(models, packet, 0, 1))


class PairModel:
    """Stand-in for a model that runs both ranks of a CFG pair, and checks for equal results."""

    def __init__(self, models: list[EngineModel]) -> None:
        self._models = models
        self.prepare, self.encode = models[0].prepare, models[0].encode
        self.decode, self.latent_spec = models[1].decode, models[1].latent_spec
        self.tensor_specs = models[1].tensor_specs

    def denoise(self, packet: Tensors, start: int, end: int, after_step: AfterStep) -> Tensors:
        callbacks = after_step, nothing

        def run(partner: Half) -> Tensors:
            model, callback = self._models[partner.branch], callbacks[partner.branch]
            return model.denoise(packet, start, end, callback, partner)

        first, second = run_pair(run)
        assert_equal(first, second)
        return first


class DamagedHalf(Half):
    """`Partner` of a rank in a CFG pair. The second rank receives changed predictions."""

    def received(self, tensors: Tensors) -> Tensors:
        if self.branch == 0:
            return tensors
        return {name: tensor * 1.01 for name, tensor in tensors.items()}


# `ltx2-modular` evaluates the denoiser four times in a step.
@pytest.mark.parametrize("name", chosen(["wan-modular"], ["ltx2-modular"], MODULAR_PAIRED))
def test_a_modular_clip_of_a_pair_has_the_bits_of_the_whole_call(
    tiny_models: TinyModels, name: str
) -> None:
    tiny_model, models = tiny_models(name), both_ranks(tiny_models(name))
    request = tiny_model.request(negative_prompt=CASES[name].negative)
    reference = whole_clip(tiny_model.model, tiny_model.sampling, request, tiny_model.source)
    pair = PairModel(models)
    check_every_cut(lambda *_: pair, tiny_model.steps, reference, request, tiny_model.source)

    # The second step is used, because some guiders ignore the predictions of the first step.
    packet = models[0].denoise(tiny_model.encode(request), 0, 1, nothing)
    first, second = denoise_in_pair(models, packet, 1, 2, DamagedHalf)
    assert_equal(first, models[0].denoise(packet, 1, 2, nothing))
    assert not torch.equal(first[LATENTS], second[LATENTS])


def test_a_pair_does_the_steps_of_modular_clips_without_guidance(tiny_models: TinyModels) -> None:
    """A pair does steps without guidance too, because guiders can stop the guidance after some
    steps.
    """
    tiny_model = tiny_models("wan-modular")
    unguided = both_ranks(tiny_model, guidance_scale=1.0)
    packet = tiny_model.encode(tiny_model.request())
    for packets in (
        denoise_in_pair(unguided, packet, 0, STEPS),
        denoise_in_pair(unguided, packet, 0, STEPS),
    ):
        for each in packets:
            assert_equal(each, unguided[0].denoise(packet, 0, STEPS, nothing))


def test_a_step_of_one_branch_is_refused(tiny_models: TinyModels) -> None:
    tiny_model = tiny_models(FIRST_PAIRED["wan"])
    unguided = both_ranks(tiny_model, guidance_scale=1.0, guidance_scale_2=None)
    with pytest.raises(ModelError, match="step 0 evaluates only one branch of the guidance"):
        denoise_in_pair(unguided, tiny_model.encode(tiny_model.request()), 0, 1)


def test_what_may_not_be_divided_is_refused() -> None:
    def denoiser(hidden_states: Any = None, **more: Any) -> None: ...

    spec = FAMILY_SPECS["ltx"]
    for name, size, words in (
        ("hidden_states", 4, "a batch of 4, but guidance has two branches"),
        ("mask", 2, "the family's spec does not say how to divide more"),
    ):
        with pytest.raises(ModelError, match=words):
            split_batch(0, spec, denoiser, (), {name: torch.ones(size, 4)})
