"""`fxbackend.convert`: what it takes, how the result is called, saved and handed to the engine."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import fxbackend
from fxbackend import Converted, Pipeline, default_pipeline
from fxbackend.cli import main
from fxbackend.converted import flatten
from fxbackend.hf.tiny import save_tiny, tiny_config, tiny_model
from fxbackend.program import Stage
from tests.own_model import own_model

ROOT = Path(__file__).resolve().parent.parent


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(length))


def reference(model: PreTrainedModel, *args: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **more, use_cache=False).logits


def close(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=2e-5)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_model("mistral")  # a window of 5: padding that counts as tokens would show


@pytest.fixture(scope="module")
def converted(model: PreTrainedModel) -> Converted:
    return fxbackend.convert(model)


def test_a_batch_and_a_single_row(model: PreTrainedModel, converted: Converted) -> None:
    close(converted(ids(3, 11)), reference(model, ids(3, 11)))
    close(converted(ids(1, 9)[0]), reference(model, ids(1, 9)))
    assert converted(ids(1, 1)).shape == (1, 1, 199)
    assert converted.program.stage is Stage.FUSED
    assert converted.graph is converted.program.graph


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32])
def test_padding_is_not_computed(model: PreTrainedModel, converted: Converted, side: str, kind: torch.dtype) -> None:
    mask = torch.tensor([[1] * 12, [0] * 5 + [1] * 7, [0] * 11 + [1]])
    mask = mask if side == "left" else mask.flip(1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = reference(model, ids(3, 12), attention_mask=mask, position_ids=positions)
    got = converted(ids(3, 12), attention_mask=mask.to(kind))
    close(got[mask.bool()], expected[mask.bool()])
    assert not got[~mask.bool()].any()
    close(converted(ids(3, 12), positions, mask)[mask.bool()], expected[mask.bool()])


def test_positions_that_start_again_begin_a_sequence(model: PreTrainedModel, converted: Converted) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0], [4, 5, 6, 7, 8, 9, 10, 11]])
    close(converted(ids(2, 8), positions), reference(model, ids(2, 8), position_ids=positions))
    shared = torch.arange(3, 11)
    close(converted(ids(2, 8), shared), reference(model, ids(2, 8), position_ids=shared.unsqueeze(0)))


def test_rows_become_one_flat_row(converted: Converted) -> None:
    rows = flatten(
        torch.tensor([[7, 8, 9], [5, 6, 0]]), None, torch.tensor([[0, 1, 1], [1, 1, 0]]), converted.program.facts
    )
    assert rows.ids.tolist() == [8, 9, 5, 6]
    assert rows.positions.tolist() == [0, 1, 0, 1]
    assert rows.lengths == (2, 2)
    assert rows.index.tolist() == [1, 2, 3, 4]


def test_weights_in_hand_are_used_without_a_copy(model: PreTrainedModel, converted: Converted) -> None:
    values = converted._model.weights
    parameters = dict(model.named_parameters())
    for slot in converted.program.weights:
        if len(slot.pieces) == 1:
            assert values[slot.name].data_ptr() == parameters[slot.pieces[0].source].data_ptr()
    assert set(values) == set(converted.program.weights.slots)


def test_the_report_is_text_and_data(converted: Converted) -> None:
    report = converted.report
    assert "MistralForCausalLM" in str(report)
    assert {each.name: each.matches for each in report.passes}["attention"] == 2
    assert report.summary().startswith("MistralForCausalLM: ")
    assert report.ops["fxbackend.attention"] == 2


def test_a_users_own_class() -> None:
    model = own_model()
    close(fxbackend.convert(model)(ids(2, 9)), reference(model, ids(2, 9)))


def test_a_buffer_that_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = own_model("buffer")
    model.temperature.fill_(2.5)
    expected = reference(model, ids(1, 9))
    close(fxbackend.convert(model)(ids(1, 9)), expected)
    close(fxbackend.convert(with_own_code(model, tmp_path, monkeypatch), trust_remote_code=True)(ids(1, 9)), expected)


def with_own_code(model: PreTrainedModel, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that holds the code of the model's class."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(directory / "modules"))
    monkeypatch.syspath_prepend(str(directory / "modules"))
    folder = directory / "model"
    model.save_pretrained(folder)
    shutil.copy(ROOT / "tests" / "own_model.py", folder / "modeling_own.py")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_config_alone_has_a_graph_and_no_weights() -> None:
    converted = fxbackend.convert(tiny_config("llama"), dtype="bfloat16", max_model_len=48)
    assert converted.state is None
    assert converted.program.facts.dtype is torch.bfloat16
    assert [table.shape for table in converted.program.weights.constants.values()] == [(48, 32)]
    assert converted.report.ops["fxbackend.qkv"] == 2


@pytest.mark.parametrize("shard", ["5GB", "300KB"])
def test_a_directory(tmp_path: Path, shard: str) -> None:
    model = tiny_model("qwen3")  # tied
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "300KB")
    close(fxbackend.convert(tmp_path)(ids(2, 7)), reference(model, ids(2, 7)))


def rewrite(directory: Path, change: object) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(change(tensors), directory / "model.safetensors")  # type: ignore[operator]


def test_names_as_transformers_reads_them(tmp_path: Path) -> None:
    """A checkpoint without the prefix of the body, a buffer of old days, and the tied name instead of the other."""
    model = save_tiny("qwen3", tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        tensors["lm_head.weight"] = tensors.pop("embed_tokens.weight")
        return {**tensors, "layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}

    rewrite(tmp_path, change)
    close(fxbackend.convert(str(tmp_path))(ids(2, 7)), reference(model, ids(2, 7)))


def test_dtype_and_length(model: PreTrainedModel) -> None:
    converted = fxbackend.convert(model, dtype="bfloat16", max_model_len=20)
    assert converted.program.facts.max_model_len == 20
    half = tiny_model("mistral", dtype=torch.bfloat16)
    assert fxbackend.convert(half).program.facts.dtype is torch.bfloat16
    got, expected = converted(ids(1, 20)), reference(half, ids(1, 20))
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    "passes",
    [Pipeline(()), default_pipeline().until(Stage.CANONICAL), default_pipeline().without("fuse_qkv")],
    ids=["none", "canonical", "no_qkv"],
)
def test_any_pipeline_gives_the_same_logits(model: PreTrainedModel, passes: Pipeline) -> None:
    close(fxbackend.convert(model, passes=passes)(ids(2, 9)), reference(model, ids(2, 9)))


def test_save_and_read_back(tmp_path: Path, model: PreTrainedModel, converted: Converted) -> None:
    folder = tmp_path / "saved"
    converted.save(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["FxbackendForCausalLM"]
    expected = {
        "model_type": "fxbackend_program",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 199,
        "max_position_embeddings": 64,
        "dtype": "float32",
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    assert expected.items() <= config.items()
    assert config["source_config"]["model_type"] == "mistral"
    assert set(load_file(folder / "model.safetensors")) == {name for name, _ in model.named_parameters()}
    again = fxbackend.convert(folder)
    assert torch.equal(again(ids(2, 9)), converted(ids(2, 9)))
    assert again.report.ops == converted.report.ops
    assert [each.name for each in again.report.passes] == [each.name for each in converted.report.passes]
    again.save(tmp_path / "twice")
    assert (tmp_path / "twice" / "config.json").read_text() == (folder / "config.json").read_text()


def test_tied_weights_are_saved_once_and_the_tokenizer_goes_along(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text("{}")
    fxbackend.convert(tmp_path / "a").save(tmp_path / "b")
    names = set(load_file(tmp_path / "b" / "model.safetensors"))
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert {"tokenizer.json", "generation_config.json"} <= {path.name for path in (tmp_path / "b").iterdir()}


def test_to_vllm_launches_from_a_directory_that_lives_as_long(
    converted: Converted, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Engine:
        def __init__(self, directory: str, **arguments: object):
            self.directory, self.arguments = Path(directory), arguments

    launcher = types.ModuleType("launch")
    launcher.launch = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fxbackend.targets.vllm.launch", launcher)
    engine = converted.to_vllm(max_model_len=32)
    folder, arguments = engine.directory, engine.arguments  # type: ignore[attr-defined]
    # The dtype of the program, and no tokenizer with a model in hand.
    assert arguments == {"dtype": "float32", "max_model_len": 32, "skip_tokenizer_init": True}
    assert {"config.json", "program.json", "constants.safetensors", "model.safetensors"} <= {
        path.name for path in folder.iterdir()
    }
    del engine
    gc.collect()
    assert not folder.exists()


def test_import_is_quick() -> None:
    code = "import sys, fxbackend; fxbackend.convert; print(*({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True)
    assert done.stdout.strip() == ""


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config("llama").save_pretrained(tmp_path / "model")
    assert main(["convert", str(tmp_path / "model"), "--dump", str(tmp_path / "dump"), "--max-model-len", "32"]) == 0
    assert "fuse_qkv" in capsys.readouterr().out
    assert (tmp_path / "dump" / "001_LlamaForCausalLM" / "rank0" / "summary.txt").is_file()
    assert main(["graph", str(tmp_path / "model"), "--dtype", "bfloat16"]) == 0
    assert "= fxbackend.attention(" in capsys.readouterr().out
    assert main(["graph", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
