"""Pipeline cuts: the stages run one after the other give the logits of the whole, each with its own weights only."""

from __future__ import annotations

import pytest
import torch

from fxbackend.errors import PipelineError
from fxbackend.hf.tiny import tiny_model
from fxbackend.observers import VerifyEachPass
from fxbackend.passes.cut_pipeline import CutPipeline
from fxbackend.passes.shard_tensor_parallel import ShardTensorParallel
from fxbackend.pipeline import Pipeline
from fxbackend.printer import program_text
from fxbackend.split import Parts, split
from fxbackend.targets.simulation import run_stages
from tests.programs import fused


def cut(model: torch.nn.Module, layers: tuple[int, ...]) -> tuple[Parts, torch.Tensor, torch.Tensor]:
    program = Pipeline((CutPipeline(layers),)).run(fused(model), [VerifyEachPass()])
    parts = split(program)
    ids = torch.randint(0, model.config.vocab_size, (13,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference = model(ids[None], use_cache=False).logits[0]
    weights = program.weights.materialise(model.state_dict())
    logits = run_stages(parts, {"input_ids": ids, "positions": torch.arange(13)}, weights)
    return parts, logits, reference


@pytest.mark.parametrize("layers", [(2, 2), (1, 2, 1), (4,)])
@pytest.mark.parametrize(
    ("model_type", "crossing"), [("llama", 2), ("gemma", 2), ("phi", 1), ("gpt_neox", 1), ("cohere", 1)]
)
def test_stages_give_the_logits_of_the_whole(model_type: str, crossing: int, layers: tuple[int, ...]) -> None:
    parts, logits, reference = cut(tiny_model(model_type, num_hidden_layers=4), layers)
    torch.testing.assert_close(logits, reference, atol=1e-5, rtol=1e-5)
    assert [len(part.inputs) - 2 for part in parts.stages] == [0] + [crossing] * (len(layers) - 1)


def test_each_stage_holds_its_own_weights_only() -> None:
    parts, _logits, _reference = cut(tiny_model("llama", num_hidden_layers=4), (1, 2, 1))
    layers = [
        {name.split(".")[2] for name in part.slots() if name.startswith("model.layers.")} for part in parts.stages
    ]
    # The norm in front of a layer is fused with the sum that ends the layer before, so it stands on that stage.
    assert layers == [{"0", "1"}, {"1", "2", "3"}, {"3"}]
    assert all("input_layernorm" in name for name in parts.stages[0].slots() if name.startswith("model.layers.1."))
    assert "model.embed_tokens.weight" in parts.stages[0].slots()
    assert "model.embed_tokens.weight" not in parts.stages[1].slots() | parts.stages[2].slots()
    assert parts.head.slots() == {"lm_head.weight"}


def test_a_scaled_embedding_is_scaled_once() -> None:
    parts, _logits, _reference = cut(tiny_model("granite", num_hidden_layers=2), (1, 1))
    multipliers = [node.args[1] for node in parts.stages[1].graph.nodes if node.target is torch.ops.aten.mul.Tensor]
    assert 1.7 not in multipliers


def test_a_tied_embedding_is_read_by_the_first_stage_and_the_head() -> None:
    parts, _logits, _reference = cut(tiny_model("qwen3", tie_word_embeddings=True), (1, 1))
    assert "model.embed_tokens.weight" in parts.stages[0].slots() & parts.head.slots()


def test_cuts_and_shards_go_together() -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    both = Pipeline((ShardTensorParallel(2, 0), CutPipeline((2, 2)))).run(fused(model), [VerifyEachPass()])
    assert program_text(both).count("fxbackend.all_reduce") == 8
    assert program_text(both).count("fxbackend.stage_cut") == 2


def test_no_cut_without_stages() -> None:
    program = fused(tiny_model("llama"))
    assert program_text(Pipeline((CutPipeline((2,)),)).run(program)) == program_text(program)


@pytest.mark.parametrize("layers", [(1, 2), (2, 0), (1, 1, 1)])
def test_stages_that_do_not_fit_the_layers_are_an_error(layers: tuple[int, ...]) -> None:
    with pytest.raises(PipelineError, match="do not hold the 2 attentions"):
        Pipeline((CutPipeline(layers),)).run(fused(tiny_model("llama")))
