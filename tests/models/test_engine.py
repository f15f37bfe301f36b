"""Engine: what it loads, keeps between clips, packs and refuses. The bits: test_registry.py."""

from __future__ import annotations

import inspect
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import diffusers
import pytest
import torch
from transformers import TokenizersBackend

from svdpp.config import ClipRequest
from svdpp.config.families.ltx import ltx_generator_device
from svdpp.errors import ModelError, NotFiniteError, RequestError
from svdpp.models.base import Tensors
from svdpp.models.checkpoint import find_checkpoint
from svdpp.models.engine.load import component_class
from svdpp.models.engine.model import EngineModel, call_arguments
from svdpp.models.engine.modular_blocks import leaf_blocks
from svdpp.models.engine.records import Packer, unpack, zeros_for
from svdpp.verification.reference import Reference
from svdpp.worker.tensor_files import tensor_sha256
from tests.models.test_registry import TinyModels
from tests.support.builders import edit_json
from tests.support.markdown_pages import code_blocks
from tests.support.range_checks import (
    TinyModel,
    assert_equal,
    model_of,
    nothing,
    ranks,
    read_folder,
    reference_clip,
)
from tests.support.tiny_families import CASES, FIRST, save_tiny_wan

pytestmark = pytest.mark.usefixtures("one_thread")

SVD, T2V, I2V, WAN_5B = "svd", "wan", "wan-2.1-image", "wan-5b-unguided"
LTX, LTX_TIMESTEP = "ltx", "ltx-timestep"
HUNYUAN, KANDINSKY = "hunyuan-video-image", "kandinsky5"
CPU = torch.device("cpu")
#: Cases in which `output_type="latent"` gives another latent than the last step, because the
#: pipeline changes the latent afterwards or has no callback.
CHANGED = (
    *("wan-5b-image", "wan-animate", "wan-replace", "kandinsky5-image", "ltx2", "framepack"),
    *("ltx2-condition-last-image", "ltx-condition", "ltx-condition-image", "ltx2-in-context"),
    *("ltx2-in-context-video", "ltx2-in-context-first-image", "kandinsky6"),
)
RECORDED = ("wan-5b-image", "hunyuan-video-1.5")


@pytest.fixture
def wan(tiny_models: TinyModels) -> TinyModel:
    """Tiny Wan model with two experts."""
    return tiny_models(T2V)


def encoder(tiny_model: TinyModel, **changes: Any) -> EngineModel:
    """Load a tiny model anew for the encoding rank, and return its `EngineModel`."""
    return ranks(tiny_model.checkpoint, replace(tiny_model.sampling, **changes))(0, 0)


def half_done(tiny_model: TinyModel) -> Tensors:
    return tiny_model.rank_for(0, 2).denoise(tiny_model.encode(tiny_model.request()), 0, 2, nothing)


# --- what is loaded and kept ---------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_weights_are_mapped_and_the_other_expert_is_not_opened(
    wan: TinyModel, tmp_path: Path, shard_size: str
) -> None:
    folder = save_tiny_wan(tmp_path / "wan", boundary_ratio=0.875, max_shard_size=shard_size)
    rank_for = ranks(read_folder(folder), wan.sampling)
    models = [rank_for(0, 0), rank_for(wan.steps - 1, wan.steps)]
    maps = Path("/proc/self/maps").read_text()
    mapped = {path for path in folder.glob("*/*.safetensors") if str(path) in maps}
    parts = ("text_encoder", "transformer_2")
    assert mapped == {path for part in parts for path in (folder / part).glob("*.safetensors")}
    num_files = len(list((folder / "transformer_2").glob("*.safetensors")))
    assert num_files > (shard_size == "20KB")
    del models


def test_a_fast_tokenizer_saved_by_transformers_5_is_loaded(wan: TinyModel, tmp_path: Path) -> None:
    folder = wan.checkpoint.folder
    tokenizer = TokenizersBackend.from_pretrained(folder / "tokenizer")
    pipe = diffusers.WanPipeline.from_pretrained(folder, tokenizer=tokenizer)
    pipe.save_pretrained(tmp_path)
    assert "TokenizersBackend" in (tmp_path / "model_index.json").read_text()
    ours = ranks(read_folder(tmp_path), wan.sampling)(0, 0)
    assert_equal(ours.encode({}, wan.request()), wan.encode(wan.request()))


def test_a_missing_tokenizer_is_named(tiny_models: TinyModels, tmp_path: Path) -> None:
    tiny_model = tiny_models(LTX)
    folder = Path(shutil.copytree(tiny_model.checkpoint.folder, tmp_path / "copy"))
    (folder / "tokenizer/tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer.json is missing"):
        ranks(read_folder(folder), tiny_model.sampling)(0, 0)


def test_a_modular_pipeline_runs_with_the_guider_of_its_checkpoint(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    original = tiny_models("hunyuan-video-1.5").checkpoint.folder
    folder = Path(shutil.copytree(original, tmp_path / "copy"))
    edit_json(folder / "guider/guider_config.json", guidance_rescale=0.5)
    checkpoint = read_folder(folder, "hunyuan_video_15_modular")
    case = CASES["hunyuan-video-1.5-modular"]
    tiny_model = TinyModel(checkpoint, case.config(), model_of(checkpoint), None)

    request, models = tiny_model.request(), [tiny_model.encoder, tiny_model.rank_for(0, 1)]
    tiny_model.encode(request)

    model = model_of(checkpoint)
    reference = Reference(find_checkpoint(model), model, "cpu", from_image=False)
    reference_clip(reference, tiny_model.sampling, request)
    guiders = [pipe.guider for pipe in (*(each._pipe for each in models), reference.pipe)]
    assert [guider.config.guidance_rescale for guider in guiders] == [0.5] * 3


def test_both_guiders_of_ltx2_get_their_parameters(tiny_models: TinyModels) -> None:
    tiny_model = tiny_models("ltx2-modular")
    video = {
        "guidance_scale": 2.0,
        "stg_scale": 0.5,
        "modality_scale": 1.5,
        "guidance_rescale": 0.1,
    }
    sound = {
        "guidance_scale": 4.0,
        "stg_scale": 0.6,
        "modality_scale": 2.5,
        "guidance_rescale": 0.2,
    }
    own = {f"audio_{name}": value for name, value in sound.items()}
    model = encoder(tiny_model, **video, **own, stg_block=0)

    model.encode({}, tiny_model.request())

    guiders = model._pipe.guider.config, model._pipe.audio_guider.config
    for config, expected in zip(guiders, (video, sound), strict=True):
        assert {name: config[name] for name in expected} == expected
    assert guiders[0]["spatio_temporal_guidance_blocks"] == [0]


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("hunyuan-video-1.5", "refused"),
        ("hunyuan-video-1.5-image", "needed"),
        ("hunyuan-video-1.5-modular", "refused"),
        ("hunyuan-video-1.5-modular-image", "optional"),
    ],
)
def test_a_checkpoint_without_image_encoder_takes_no_image(
    tiny_models: TinyModels, name: str, use: str
) -> None:
    folder = tiny_models(name).checkpoint.folder
    assert read_folder(folder, "hunyuan_video_15_modular").image_use == use


def test_the_end_of_a_long_prompt_is_named(wan: TinyModel) -> None:
    model = encoder(wan, max_sequence_length=16)
    assert model.truncated_text("the sea") == ""
    assert model.truncated_text("the sea at night " * 8).endswith("sea at night")


def test_an_image_and_a_timestep_need_a_generator_on_the_device(tiny_models: TinyModels) -> None:
    cases = (LTX_TIMESTEP, True, "cuda"), (LTX_TIMESTEP, False, "cpu"), (LTX, True, "cpu")
    for name, from_image, device in cases:
        sampling = replace(tiny_models(name).sampling, from_image=from_image)
        assert ltx_generator_device(tiny_models(name).checkpoint, sampling, "cuda") == device


# --- contents of packets -------------------------------------------------------------------------


def test_values_come_back_with_their_order_in_memory() -> None:
    packer = Packer()
    tensor = torch.arange(12.0).view(3, 4).t()
    value = {"a": (tensor, None, [True, 2.5]), "b": tensor, "c": "text"}
    node = json.loads(json.dumps(packer.pack(value, "x")))
    assert list(packer.tensors) == ["x.a.0"]  # one tensor, although it is in two places
    back = unpack(node, packer.tensors, CPU)
    assert (back["a"][1:], back["c"]) == ((None, [True, 2.5]), "text")
    for each in (back["a"][0], back["b"]):
        assert torch.equal(each, tensor)
        assert each.stride() == tensor.stride()
    made = zeros_for(node["items"]["b"], CPU)  # placeholder for a pair's prediction
    assert (made.shape, made.stride()) == (tensor.shape, tensor.stride())
    with pytest.raises(ModelError, match=r"x\.a is a set"):
        packer.pack({"a": {1}}, "x")


@pytest.mark.parametrize("name", ["os:system", "diffusers:WanPipeline"])
def test_a_structure_names_no_class_but_outputs_of_the_libraries(name: str) -> None:
    with pytest.raises((ValueError, TypeError), match="class"):
        unpack({"kind": "output", "class": name, "items": {}}, {}, CPU)


# --- what is refused -----------------------------------------------------------------------------


def test_draws_from_the_global_generator_are_refused(
    wan: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = encoder(wan)
    encode_prompt = model._pipe.encode_prompt
    monkeypatch.setattr(
        model._pipe, "encode_prompt", lambda **options: (torch.rand(1), encode_prompt(**options))[1]
    )
    with pytest.raises(ModelError, match="from torch's global generator: clips are not repro"):
        model.encode({}, wan.request())


def test_a_pipeline_that_does_not_reach_the_step_is_refused(wan: TinyModel) -> None:
    with pytest.raises(ModelError, match="ends before step 9"):
        wan.rank_for(2, wan.steps).denoise(half_done(wan), 2, 9, nothing)


def test_frames_that_are_not_finite_are_an_error(wan: TinyModel) -> None:
    packet = wan.rank_for(2, wan.steps).denoise(half_done(wan), 2, wan.steps, nothing)
    packet["latents"][:] = torch.nan
    with pytest.raises(NotFiniteError, match="VAE"):
        wan.decoder.decode(packet)


def test_steps_of_an_expert_that_is_not_loaded_are_an_error(wan: TinyModel) -> None:
    packet, last = wan.encode(wan.request()), wan.steps - 1
    with pytest.raises(
        ValueError, match="step 0 needs transformer, which this rank has not loaded"
    ):
        wan.rank_for(last, wan.steps).denoise(packet, 0, 1, nothing)


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        (T2V, {"image": "x"}, "takes no image"),
        (I2V, {}, "needs an image"),
        (T2V, {"prompt": None}, "needs a prompt"),
        (T2V, {"prompt": " \n"}, "`prompt` is empty"),
        (WAN_5B, {"image": "x"}, "have from_image=False"),
        (WAN_5B, {"negative_prompt": "blurred"}, "`negative_prompt` has no effect"),
    ],
)
def test_wrong_inputs_are_refused(
    tiny_models: TinyModels, name: str, inputs: dict[str, Any], message: str
) -> None:
    tiny_model, request = (
        tiny_models(name),
        ClipRequest(**{"seed": 0, "prompt": "the sea", **inputs}),
    )
    with pytest.raises(RequestError, match=message):
        tiny_model.checkpoint.check_request(tiny_model.sampling, request)
    if request.negative_prompt:
        tiny_model.checkpoint.check_request(
            replace(tiny_model.sampling, guidance_scale=5.0), request
        )


INDEX, DENOISER = "model_index.json", "transformer/config.json"
SKIPS, GUIDER = "wan-modular-skipped-layers", "guider/guider_config.json"
MODULAR_INDEX = "modular_model_index.json"
ENCODER = "image_encoder/config.json"
SCHEDULER, NO_CODE = "scheduler/scheduler_config.json", "runs no code from a checkpoint"


@pytest.mark.parametrize(
    ("name", "file", "changes", "message"),
    [
        (T2V, INDEX, {"boundary_ratio": None}, "boundary_ratio is None"),
        (T2V, INDEX, {"transformer_2": [None, None]}, "transformer_2 is missing"),
        ("wan22-modular", MODULAR_INDEX, {"boundary_ratio": 1.5}, "boundary_ratio is 1.5"),
        ("wan22-modular", MODULAR_INDEX, {"transformer_2": None}, "transformer_2 is missing"),
        ("wan-modular", MODULAR_INDEX, {"boundary_ratio": 0.9}, "the model has two experts"),
        ("wan-modular", MODULAR_INDEX, {"expand_timesteps": True}, "only for Wan 2.2 5B"),
        ("wan-modular", MODULAR_INDEX, {"_blocks_class_name": "Other"}, "blocks 'Other' are not"),
        *(
            ("wan-modular", MODULAR_INDEX, changes, NO_CODE)
            for changes in (
                {"auto_map": {"ModularPipelineBlocks": "block.Blocks"}},
                {"vae": ["block", "AutoencoderKLWan", {"subfolder": "vae"}]},
            )
        ),
        *(
            (name, MODULAR_INDEX, {"guider": ["diffusers", "X", {}]}, "entry for guider")
            for name in ("ltx2-modular", "helios")
        ),
        ("wan-modular", MODULAR_INDEX, {"guider": [None, None, {}]}, "of guider names no class"),
        *(
            (*(name, index), {"guider": ["diffusers", guider, *place]}, "guider is of class")
            for name, index, guider, place in (
                ("wan-modular", MODULAR_INDEX, "PerturbedAttentionGuidance", [{}]),
                ("hunyuan-video-1.5", INDEX, "AdaptiveProjectedGuidance", []),
            )
        ),
        ("wan-modular-momentum", GUIDER, {"enabled": False}, "enabled is False but must be True"),
        (
            *("wan22-modular-momentum", "guider_2/guider_config.json"),
            {"use_original_formulation": True},
            "gives the guidance scale another meaning",
        ),
        (SKIPS, GUIDER, {"skip_layer_guidance_layers": [0]}, "diffusers fails in"),
        (SKIPS, GUIDER, {"skip_layer_config": None}, "must name layers of the denoiser"),
        (SKIPS, GUIDER, {"skip_layer_config": [{"indices": [2]}]}, "by indices from 0 to 1"),
        *(
            (
                SKIPS,
                GUIDER,
                {"skip_layer_config": {"indices": [0], key: value}},
                f"{key} in skip_layer_config must be {allowed}: ",
            )
            for key, value, allowed in (
                *(("skip_attention", False, True), ("skip_ff", False, True)),
                *(("skip_attention_scores", True, False), ("fqn", "layers", "auto or blocks")),
            )
        ),
        (
            *(SKIPS, GUIDER),
            {"skip_layer_config": {"indices": [0], "dropout": 0.5}},
            "dropout in skip_layer_config must be 1.0",
        ),
        (
            *("wan-modular", MODULAR_INDEX),
            {"vae": ["diffusers", "AutoencoderKLWan", {"subfolder": "../other"}]},
            "the subfolder of the vae is '../other'",
        ),
        ("cosmos3", MODULAR_INDEX, {"enable_safety_checker": True}, "of the safety checker"),
        (
            *("cosmos3-distilled", MODULAR_INDEX, {"distilled_sigmas": [1.0, 0.5]}),
            "distilled_sigmas is [1.0, 0.5], but svdpp runs only models with 4 noise levels",
        ),
        (
            *("hunyuan-video-1.5-modular", MODULAR_INDEX),
            {"guider": ["diffusers", "SkipLayerGuidance", {"subfolder": "guider"}]},
            "the guider is of class 'SkipLayerGuidance'",
        ),
        (
            T2V,
            INDEX,
            {"scheduler": ["diffusers", "EulerScheduler"]},
            "tests cover this family only with",
        ),
        (T2V, DENOISER, {"num_layers": 10**6}, "num_layers"),
        (T2V, DENOISER, {"pos_embed_seq_len": 514}, "a first and a last image"),
        (
            T2V,
            "text_encoder/config.json",
            {"quantization_config": {}},
            "runs no weights that are quantised",
        ),
        (T2V, "vae/config.json", {"auto_map": {"AutoModel": "x.y"}}, NO_CODE),
        (T2V, SCHEDULER, {"solver_p": {"a": 1}}, "solver_p"),
        *(
            (LTX, INDEX, {"_class_name": name}, f"the pipeline is '{name}', which svdpp does not")
            for name in (
                *("LTXLatentUpsamplePipeline", "LTX2LatentUpsamplePipeline"),
                *("LTX2DFRTemporalRefinePipeline", "Kandinsky6SRPipeline", "AnimateDiffPipeline"),
                *("CosmosTextToWorldPipeline", "Cosmos2VideoToWorldPipeline"),
                *("Cosmos2_5_PredictBasePipeline", "ConsisIDPipeline", "EasyAnimatePipeline"),
            )
        ),
        *(
            ("wan-modular", MODULAR_INDEX, {"_class_name": name}, f"pipeline is '{name}', which")
            for name in (
                *("WanAnimate2ModularPipeline", "WanAnimate2DistilledModularPipeline"),
                "LTX25ModularPipeline",
            )
        ),
        *(
            (name, "vae/config.json", {"decoder_inject_noise": [True]}, "global generator")
            for name in (LTX, "ltx2")
        ),
        (
            "ltx2",
            "vae/config.json",
            {"timestep_conditioning": True},
            "timestep_conditioning is true",
        ),
        (
            *("ltx2-condition-last-image", INDEX),
            {"audio_scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]},
            "gives the sound a schedule of its own",
        ),
        (
            *("sana-video", INDEX, {"vae": ["diffusers", "AutoencoderKLLTX2Video"]}),
            "the vae is of class 'AutoencoderKLLTX2Video'",
        ),
        (LTX, SCHEDULER, {"stochastic_sampling": True}, "global generator"),
        (HUNYUAN, DENOISER, {"image_condition_type": "latent_concat"}, "first four frames"),
        (KANDINSKY, DENOISER, {"attention_type": "nabla"}, "sparse attention"),
        (SVD, INDEX, {"_class_name": ["a", "B"]}, "the pipeline is ['a', 'B'], which"),
        (SVD, INDEX, {"vae": [None, None]}, "the component vae is missing"),
        (SVD, INDEX, {"vae": "x\n\x1b[2J" * 999}, "the vae is of class"),
        (SVD, INDEX, {"unet": ["diffusers", "UNet2DModel"]}, "the unet is of class 'UNet2DModel'"),
        (SVD, ENCODER, {"attn_implementation": "x/kernel"}, "the key 'attn_implementation'"),
        (SVD, ENCODER, {"image_size": 336}, "image_size is 336 but must be 224"),
        (SVD, SCHEDULER, {"num_train_timesteps": 10**9}, "num_train_timesteps is 1000000000"),
    ],
)
def test_wrong_configs_are_refused(
    tiny_models: TinyModels,
    tmp_path: Path,
    name: str,
    file: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    folder = Path(shutil.copytree(tiny_models(name).checkpoint.folder, tmp_path / "copy"))
    edit_json(folder / file, **changes)
    with pytest.raises(ModelError) as error:
        read_folder(folder)
    said = error.value.message
    assert message in said
    assert f": {file}: " in said or ": scheduler/" in said
    assert said.isprintable()
    assert len(said) < 400


def test_sound_needs_a_denoiser_that_makes_it(tiny_models: TinyModels, tmp_path: Path) -> None:
    whole = tiny_models("cosmos3-sound").checkpoint.folder
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    edit_json(folder / DENOISER, sound_gen=False)
    with pytest.raises(ModelError, match="sound_gen is False but must be True, to make sound"):
        read_folder(folder, "cosmos3_sound")
    assert read_folder(folder).family == "cosmos3"
    edit_json(folder / DENOISER, sound_gen=True)
    assert read_folder(folder, "cosmos3_sound").family == "cosmos3_sound"
    edit_json(folder / MODULAR_INDEX, sound_tokenizer=[None, None, {}])
    with pytest.raises(ModelError, match="the component sound_tokenizer is missing"):
        read_folder(folder, "cosmos3_sound")


def test_a_modular_vace_with_one_expert_is_for_another_family(tiny_models: TinyModels) -> None:
    folder = tiny_models("wan-vace").checkpoint.folder
    for family in ("wan22_vace_modular", "wan22_vace_control_modular"):
        with pytest.raises(ModelError, match="the expert transformer_2 is missing") as caught:
            read_folder(folder, family)
        assert caught.value.hint.endswith("`family` wan_vace")


def test_a_kandinsky_6_without_types_of_tokens_takes_no_image(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    whole = tiny_models("kandinsky6").checkpoint.folder
    folder = Path(shutil.copytree(whole, tmp_path / "copy"))
    assert read_folder(folder).image_use == "optional"
    for changes in ({"visual_token_type_num_embeddings": 0}, {"visual_cond": False}):
        edit_json(folder / DENOISER, **changes)
        assert read_folder(folder).image_use == "refused"


def test_a_model_that_embeds_its_guidance_takes_no_negative_prompt(tiny_models: TinyModels) -> None:
    tiny_model = tiny_models("hunyuan-video")
    assert tiny_model.sampling.guidance_scale > 1
    with pytest.raises(RequestError, match="`negative_prompt` has no effect"):
        tiny_model.checkpoint.check_request(
            tiny_model.sampling, tiny_model.request(negative_prompt="blurred")
        )


def test_no_prompt_reaches_a_loader_of_images(tiny_models: TinyModels) -> None:
    """A prompt that is a URL or a path is read as a text.

    A processor of text and images would take such a prompt for an image, and fetch the URL or
    open the path.
    """
    tiny_model = tiny_models(KANDINSKY)
    for prompt in ("http://127.0.0.1:9/a.png", __file__, "the sea at night"):
        tiny_model.encode(tiny_model.request(prompt))
        assert tiny_model.encoder.truncated_text(prompt) == ""
    short = encoder(tiny_model, max_sequence_length=8)
    assert short.truncated_text("the sea at night") == "at night"


@pytest.mark.parametrize("name", FIRST.values())
def test_small_checkpoints_have_the_classes_of_published_ones(
    tiny_models: TinyModels, name: str
) -> None:
    """Components of tiny checkpoints have the classes that diffusers' pipeline names, or
    subclasses.
    """
    checkpoint, case = tiny_models(name).checkpoint, CASES[name]
    pipeline = getattr(diffusers, checkpoint.spec.pipeline(case.image))
    if checkpoint.spec.modular is None:
        annotations = inspect.get_annotations(pipeline.__init__, eval_str=True)
        annotations.pop("return", None)
    else:
        pipe, annotations = pipeline(), {}
        for leaf, _ in leaf_blocks(pipe._blocks):
            for each in leaf.expected_components:
                # a union, because the blocks of Wan 2.2 VACE name two classes of denoisers
                if each.name in pipe.pretrained_component_names:
                    known = annotations.get(each.name, each.type_hint)
                    annotations[each.name] = known | each.type_hint
    (path,) = checkpoint.folder.glob("*model_index.json")
    index = json.loads(path.read_text())
    for part, annotation in annotations.items():
        named = [each.__name__ for each in get_args(annotation) or [annotation]]
        if (part in checkpoint.spec.components) and index[part][1] is not None:
            found = {each.__name__ for each in component_class(part, index[part][1]).__mro__}
            assert found.intersection(named) or "AutoTokenizer" in named, part


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in RECORDED else [pytest.mark.slow, pytest.mark.full])
        for name in dict.fromkeys((*RECORDED, *FIRST.values(), *CHANGED))
    ],
)
def test_the_script_of_the_manual_gives_the_recorded_hash(
    tiny_models: TinyModels, name: str
) -> None:
    tiny_model, page = tiny_models(name), Path("docs/verification.md").read_text()
    blocks = code_blocks(page, "python")
    (script,) = [block.text for block in blocks if "def latents_sha256" in block.text]
    known: dict[str, Any] = {}
    exec(script, known)
    request = tiny_model.request()
    reference = Reference(
        find_checkpoint(tiny_model.model),
        tiny_model.model,
        "cpu",
        from_image=tiny_model.source is not None,
    )
    given = (reference.pipe, tiny_model.checkpoint, tiny_model.sampling, request, tiny_model.source)
    latents, _, _ = reference_clip(reference, tiny_model.sampling, request, tiny_model.source)
    ours = tensor_sha256(latents[-1])
    assert known["latents_sha256"](reference.pipe, **call_arguments(*given)) == ours
    if tiny_model.is_modular:
        return  # some modular pipelines ignore `output_type`
    plain = reference.pipe(**call_arguments(*given), output_type="latent", return_dict=False)[0]
    is_changed = isinstance(plain, list) or tensor_sha256(plain) != ours
    assert is_changed == (name in CHANGED)
