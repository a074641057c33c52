"""What cannot be converted or computed is one error that names the place, the reason and what to do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CLIPTextConfig, PreTrainedModel, T5Config, T5ForConditionalGeneration

import fxbackend
from fxbackend import Converted, FxBackendError, Pipeline, default_pipeline
from fxbackend.errors import CaptureError, InputError, PipelineError, UnsupportedModelError, WeightError
from fxbackend.hf.tiny import save_tiny, tiny_config, tiny_model
from fxbackend.passes.canonicalize import Canonicalize
from fxbackend.passes.fuse_qkv import FuseQkv
from fxbackend.program import Stage
from fxbackend.targets.reference import ReferenceModel
from tests.own_model import OwnForCausalLM, own_model
from tests.test_convert import with_own_code


def refuses(error: type[FxBackendError], says: str, model: object, **options: object) -> None:
    with pytest.raises(error, match=says) as caught:
        fxbackend.convert(model, **options)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 1000


# What is handed in.


def test_no_such_directory(tmp_path: Path) -> None:
    refuses(InputError, "no such directory.*give a model directory", tmp_path / "none")
    refuses(InputError, "no such directory.*give a model directory", "./none/of/these")
    (tmp_path / "file").write_text("")
    refuses(InputError, "is a file.*give the directory", tmp_path / "file")


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    refuses(InputError, r"no config.json: .*save_pretrained\(\)", tmp_path)


def test_a_config_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    refuses(InputError, "config.json .*cannot be read", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no_such_type"}')
    refuses(InputError, "no_such_type", tmp_path)


@pytest.mark.parametrize("thing", [None, 3, nn.Linear(2, 2), ["a"]])
def test_something_else(thing: object) -> None:
    refuses(InputError, "give a PreTrainedModel, its config, or a model directory", thing)


def test_an_encoder_decoder(tmp_path: Path) -> None:
    config = T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    config.save_pretrained(tmp_path)
    for model in (config, tmp_path, T5ForConditionalGeneration(config)):
        refuses(UnsupportedModelError, "'t5' is an encoder-decoder.*causal language models", model)


def test_a_quantised_model(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refuses(UnsupportedModelError, "quantised.*give the model in float32", tmp_path)


def test_a_config_without_a_causal_model() -> None:
    refuses(
        UnsupportedModelError,
        "'clip_text_model' has no causal language model.*the loaded model itself",
        CLIPTextConfig(),
    )


def test_remote_code_without_trust(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_own_code(own_model(), tmp_path, monkeypatch)
    refuses(InputError, "carries its own code: pass trust_remote_code=True", folder)


@pytest.mark.parametrize("dtype", ["float31", "int8", torch.int64, torch.float8_e4m3fn, "torch"])
def test_no_such_dtype(dtype: object) -> None:
    refuses(InputError, "no dtype of activations: use one of bfloat16, float", tiny_config("llama"), dtype=dtype)


def test_no_such_target_or_length() -> None:
    refuses(InputError, "no target 'tpu': use one of reference", tiny_config("llama"), target="tpu")
    refuses(InputError, "max_model_len=-1 must be at least 1", tiny_config("llama"), max_model_len=-1)
    refuses(InputError, "max_model_len=0 must be at least 1", tiny_config("llama"), max_model_len=0)


# Checkpoints.


def test_missing_and_unexpected_tensors_in_one_message(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.surplus.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    tensors["model.norm.bias"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    refuses(
        WeightError,
        "Missing: model.layers.1.mlp.up_proj.weight. Unexpected: model.layers.0.surplus.weight, "
        "model.norm.bias. Check that config.json and the weight files belong together",
        tmp_path,
    )


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64)
    save_file(tensors, tmp_path / "model.safetensors")
    refuses(WeightError, r"model.norm.weight is \(64,\) in the checkpoint, \(128,\) in the model", tmp_path)


def test_tied_names_with_different_values(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    refuses(WeightError, "ties lm_head.weight to model.embed_tokens.weight.*tie_word_embeddings", tmp_path)


def test_weights_in_another_format_or_lost(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("")
    refuses(InputError, r"pytorch_model.bin; .*save_pretrained\(\)", tmp_path)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(InputError, "names model-00001-of-00002.safetensors, which .* finish the download", tmp_path)


def test_calling_or_saving_without_weights(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    for model in (tiny_config("llama"), tmp_path):
        converted = fxbackend.convert(model)
        says = "without weights and cannot be {}: convert a loaded model, or a directory that holds its weights"
        with pytest.raises(InputError, match=says.format("called")):
            converted(torch.tensor([3, 4]))
        with pytest.raises(InputError, match=says.format("saved")):
            converted.save(tmp_path / "out")
        assert not (tmp_path / "out").exists()


# Models in hand.


def test_a_class_that_its_config_does_not_rebuild(monkeypatch: pytest.MonkeyPatch) -> None:
    model = own_model("shape")
    monkeypatch.setattr(OwnForCausalLM, "inner", 32)
    refuses(CaptureError, r"extra.weight \(64, 48\) in the model, \(32, 48\) rebuilt.*from the config alone", model)


def test_a_module_that_was_exchanged() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    refuses(CaptureError, "model.layers.1.mlp.act_fn is a .*exchanged or added", model)


@pytest.mark.parametrize("trick", ["fixed", "branch", "host", "keyword"])
def test_a_forward_that_no_graph_can_hold(trick: str) -> None:
    refuses(CaptureError, "must work for every|must do the same|must stay a tensor|does not map", own_model(trick))


# Pipelines.


def test_a_pipeline_in_the_wrong_order() -> None:
    with pytest.raises(PipelineError, match=r"'canonicalize' .* stands after 'fuse_qkv' .*: move it before"):
        Pipeline((FuseQkv(), Canonicalize()))
    with pytest.raises(PipelineError, match="more than once"):
        Pipeline((FuseQkv(), FuseQkv()))
    with pytest.raises(PipelineError, match="no pass 'nothing' in this pipeline"):
        default_pipeline().without("nothing")


def test_a_program_that_is_not_saved_yet_or_not_whole(tmp_path: Path) -> None:
    model = tiny_model("llama")
    early = fxbackend.convert(model, passes=default_pipeline().until(Stage.CANONICAL))
    with pytest.raises(InputError, match="without an attention op: to save it, convert with the default pipeline"):
        early.save(tmp_path / "early")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    with pytest.raises(InputError, match="not an empty directory"):
        fxbackend.convert(model).save(tmp_path / "full")


def test_a_saved_program_is_final(tmp_path: Path) -> None:
    fxbackend.convert(tiny_model("llama")).save(tmp_path)
    for options in ({"dtype": "bfloat16"}, {"max_model_len": 8}, {"passes": default_pipeline()}):
        refuses(InputError, "convert the original model", tmp_path, **options)
    (tmp_path / "config.json").write_text(tiny_config("llama").to_json_string())
    refuses(InputError, "save the program into a directory of its own", tmp_path)


# Calls.


@pytest.fixture(scope="module")
def converted() -> Converted:
    model: PreTrainedModel = tiny_model("llama")
    return fxbackend.convert(model, max_model_len=16)


IDS = torch.randint(3, 99, (2, 6))
MASK = torch.ones(2, 6, dtype=torch.long)


def masked(*columns: int) -> torch.Tensor:
    mask = MASK.clone()
    mask[1, list(columns)] = 0
    return mask


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"attention_mask": masked(2)}, "hole in row 1: the tokens of a row must be contiguous"),
        ({"attention_mask": masked(0, 5, 2)}, "hole in row 1"),
        ({"attention_mask": MASK[:, None, None, :]}, "mask of pairs of tokens cannot be unpadded"),
        ({"attention_mask": masked(0, 1, 2, 3, 4, 5)}, "hides every token of a row: leave that row out"),
        ({"attention_mask": MASK * 2}, "values other than 0"),
        ({"attention_mask": MASK * -1e9}, "values other than 0"),
        ({"attention_mask": MASK[:, :4]}, r"attention_mask has the shape \[2, 4\], and input_ids \[2, 6\]"),
        ({"position_ids": MASK[:, :4]}, r"position_ids has the shape \[2, 4\], and input_ids \[2, 6\]"),
        ({"position_ids": MASK.float()}, "position_ids is a torch.float32: give a tensor of integers"),
        ({"position_ids": MASK.cumsum(1) + 12}, r"position_ids holds 16, outside of max_model_len \(0 to 15\)"),
        ({"position_ids": MASK.cumsum(1) - 2}, "position_ids holds -1"),
        (
            {"input_ids": torch.zeros(1, 17, dtype=torch.long)},
            "17 tokens is longer than max_model_len=16.*a larger max",
        ),
        ({"input_ids": IDS.float()}, "input_ids is a torch.float32: give a tensor of integers"),
        ({"input_ids": [[1, 2]]}, "input_ids is a list: give a tensor of integers"),
        ({"input_ids": IDS[None]}, r"input_ids has the shape \[1, 2, 6\]: give \[batch, tokens\]"),
        ({"input_ids": IDS[:, :0]}, r"with tokens"),
        ({"input_ids": IDS + 199}, r"outside of the vocabulary \(0 to 198\)"),
        ({"input_ids": IDS - 100}, "outside of the vocabulary"),
    ],
)
def test_arguments_of_a_call(converted: Converted, arguments: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(InputError, match=says):
        converted(**{"input_ids": IDS, **arguments})


def test_padding_may_hold_anything(converted: Converted) -> None:
    ids = IDS.clone()
    ids[1, :2] = -100
    assert torch.equal(converted(ids, attention_mask=masked(0, 1)), converted(IDS, attention_mask=masked(0, 1)))


def test_the_reference_target_runs_whole_programs(converted: Converted) -> None:
    rank = dataclasses.replace(converted.program, facts=dataclasses.replace(converted.program.facts, world_size=2))
    with pytest.raises(FxBackendError, match="one of 2 ranks"):
        ReferenceModel(rank, converted.state or {})
