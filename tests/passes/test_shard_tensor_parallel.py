"""Tensor parallelism: the ranks of a simulation together give the logits of one rank, and hold the checkpoint once."""

from __future__ import annotations

import pytest
import torch

from fxbackend.errors import PipelineError
from fxbackend.hf.tiny import tiny_model
from fxbackend.observers import VerifyEachPass
from fxbackend.passes.shard_tensor_parallel import ShardTensorParallel
from fxbackend.pipeline import Pipeline
from fxbackend.printer import program_text
from fxbackend.program import Program
from fxbackend.report import Report
from fxbackend.targets.simulation import run_ranks
from fxbackend.weights import Shard
from tests.programs import fused

LENGTH = 11


def shard(program: Program, world: int) -> list[Program]:
    return [Pipeline((ShardTensorParallel(world, rank),)).run(program, [VerifyEachPass()]) for rank in range(world)]


def blocks(program: Program) -> int:
    return program.history[-1].matches


def assert_ranks_equal_one(model_type: str, world: int, expected: int, **changes: object) -> Program:
    model = tiny_model(model_type, **changes)
    program = fused(model)
    ids = torch.randint(0, model.config.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(1))
    inputs = {"input_ids": ids, "positions": torch.arange(LENGTH)}
    with torch.no_grad():
        reference = model(ids[None], use_cache=False).logits[0]
    ranks = shard(program, world)
    for logits in run_ranks(ranks, inputs, model.state_dict()):
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)
    assert blocks(ranks[0]) == expected
    for slot in ranks[0].weights:
        if slot.shard is not None:
            whole = torch.arange(torch.Size(slot.shape).numel()).reshape(slot.shape)
            parts = [slot.shard.take(whole, rank, world).unique() for rank in range(world)]
            assert torch.equal(torch.cat(parts).unique(), whole.flatten()), (
                f"{slot.name} is not held whole by all ranks"
            )
    return ranks[0]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "granite", "gpt_neox", "starcoder2"])
def test_every_block_of_a_family_is_split(model_type: str, world: int) -> None:
    layers = 3 if model_type == "gemma2" else 2
    assert_ranks_equal_one(model_type, world, expected=2 * layers)


def test_one_rank_of_a_llama_block() -> None:
    model = tiny_model("llama", num_hidden_layers=1, attention_bias=False, mlp_bias=False)
    program = shard(fused(model), 2)[0]
    text = program_text(program, modules=False)
    assert "fxbackend.qkv(" in text and ", None, 64, 32, 32)" in text
    assert "f32[T, 2, 32]" in text and "f32[T, 4, 32]" not in text
    assert text.count("fxbackend.all_reduce") == 2
    assert program.weights.slots["model.layers.0.self_attn.qkv_proj.weight"].shard == Shard(0, (128, 64, 64), (1, 1, 1))
    assert program.weights.slots["model.layers.0.mlp.gate_up_proj.weight"].shard == Shard(0, (192, 192), (1, 1))
    assert program.weights.slots["model.layers.0.mlp.down_proj.weight"].shard == Shard(1, (192,), (1,))
    assert program.weights.slots["model.norm.weight"].shard is None


def test_the_report_says_what_a_rank_holds_and_what_it_costs() -> None:
    whole, rank = fused(tiny_model("llama")), shard(fused(tiny_model("llama")), 2)[0]
    one, two = Report.of(whole), Report.of(rank)
    assert one.rank_bytes == one.weight_bytes == two.weight_bytes and one.reductions == 0
    split = sum(slot.bytes for slot in rank.weights if slot.shard is not None)
    assert two.rank_bytes == two.weight_bytes - split // 2 and two.reductions == 4
    assert "rank 0 of 2:" in str(two) and "4 reductions" in str(two) and "rank" not in str(one).splitlines()[-1]


def test_key_heads_fewer_than_ranks_are_held_by_neighbours() -> None:
    rank = assert_ranks_equal_one("llama", 4, expected=4, num_key_value_heads=1)
    assert rank.weights.slots["model.layers.0.self_attn.qkv_proj.weight"].shard == Shard(0, (128, 32, 32), (1, 4, 4))


def test_a_bias_on_the_row_side_is_added_once() -> None:
    rank = assert_ranks_equal_one("starcoder2", 2, expected=4)
    (reduced, *_rest) = rank.calls(torch.ops.fxbackend.all_reduce.default)
    assert reduced.args[0].args[2] is None
    assert [user.target for user in reduced.users] == [torch.ops.aten.add.Tensor]


def test_heads_that_the_ranks_do_not_divide_stay_whole_and_say_so() -> None:
    rank = assert_ranks_equal_one("llama", 3, expected=2)  # 192 / 3 divides the gated unit, 4 heads do not
    reasons = [str(refusal) for refusal in rank.history[-1].refusals]
    assert reasons and all(
        "is not divided by 3" in reason or "cannot be dealt to 3 ranks" in reason for reason in reasons
    )


@pytest.mark.parametrize(("world", "kv_heads"), [(2, 2), (4, 2), (4, 4)])
def test_a_norm_over_the_full_width_of_q_gets_its_statistics_reduced(world: int, kv_heads: int) -> None:
    rank = assert_ranks_equal_one("olmo2", world, expected=4, num_key_value_heads=kv_heads)
    assert program_text(rank).count("fxbackend.all_reduce") == 2 * (2 + 2)  # per layer: q_norm, k_norm and two blocks
    assert rank.weights.slots["model.layers.0.self_attn.q_norm.weight"].shard == Shard(0, (128,), (1,))


def test_a_layer_norm_over_what_would_be_split_keeps_its_block_whole() -> None:
    rank = assert_ranks_equal_one("stablelm", 2, expected=2, qk_layernorm=True)
    reasons = [str(refusal) for refusal in rank.history[-1].refusals]
    assert reasons and all("stays whole on every rank" in reason for reason in reasons)


def test_one_rank_changes_nothing() -> None:
    program = fused(tiny_model("llama"))
    one = Pipeline((ShardTensorParallel(),)).run(program)
    assert program_text(one) == program_text(program)
    assert not any(slot.shard for slot in one.weights)


def test_a_rank_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(PipelineError, match="rank 2 is not one of 2"):
        Pipeline((ShardTensorParallel(2, 2),)).run(fused(tiny_model("llama")))


@pytest.mark.parametrize("model_type", ["bloom", "mpt"])
def test_each_rank_holds_the_slopes_of_its_own_heads(model_type: str) -> None:
    from fxbackend.hf.zoo import zoo_model

    model = zoo_model(model_type)
    program = fused(model)
    ids = torch.randint(70, 150, (LENGTH,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        reference = model(ids[None], use_cache=False).logits[0]
    ranks = shard(program, 2)
    assert blocks(ranks[0]) == 4
    for logits in run_ranks(ranks, {"input_ids": ids, "positions": torch.arange(LENGTH)}, model.state_dict()):
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)
