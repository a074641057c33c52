"""Families with experts against Transformers, by the reference bodies of the fused program, and on two ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from fxbackend.errors import CaptureError
from fxbackend.hf.expert_hooks import installed
from fxbackend.hf.hooks import IMPLEMENTATION
from fxbackend.hf.tiny import hf_logits
from fxbackend.hf.zoo import zoo_model
from fxbackend.observers import VerifyEachPass
from fxbackend.ops import sequences
from fxbackend.passes.shard_tensor_parallel import ShardTensorParallel
from fxbackend.pipeline import Pipeline
from fxbackend.pipelines import default_pipeline
from fxbackend.program import Program
from fxbackend.targets.simulation import run_ranks
from tests.programs import captured

dialect = torch.ops.fxbackend

# What each has beside experts and a softmax router.
TYPES = {
    "mixtral": "a tensor per expert named w1, w2, w3",
    "qwen2_moe": "a shared expert behind a gate of its own, dense layers",
    "qwen3_moe": "weights that are normalised or not",
    "olmoe": "norms over the full width of q and k",
    "gpt_oss": "biases, transposed and interleaved weights, a gate with a limit, sinks",
    "granitemoe": "a router that chooses before its softmax, multipliers",
    "granitemoeshared": "shared experts packed in one linear",
    "deepseek_v2": "latent attention with complex rotary embedding, groups",
    "deepseek_v3": "latent attention, a sigmoid router in groups with a bias that corrects the choice, a scale",
    "glm4_moe": "the same router without latent attention",
    "ernie4_5_moe": "a correction of the choice in float32",
    "phimoe": "a router that takes the best expert twice with a mask between",
    "hunyuan_v1_moe": "shared experts beside the routed ones",
    "dots1": "a sigmoid router",
    "minimax_m2": "a sigmoid router with w1, w2, w3",
    "flex_olmo": "norms after the blocks",
    "aria_text": "transposed weights",
    "gemma4_text:moe": "experts beside a dense block, gelu",
    "minimax_m3_vl_text": "the gate of GPT-OSS with its halves one behind the other",
    "mimo_v2_flash": "values narrower than queries",
}


def flat_logits(program: Program, model: nn.Module, ids: torch.Tensor, lengths: tuple[int, ...]) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in lengths])
    with sequences(lengths):
        return program.run({"input_ids": ids, "positions": positions}, program.weights.materialise(model.state_dict()))


def prompt(length: int = 23) -> torch.Tensor:
    return torch.randint(8, 190, (length,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("key", TYPES)
def test_logits(key: str) -> None:
    model = zoo_model(key)
    program = default_pipeline().run(captured(model), [VerifyEachPass()])
    calls = program.calls(dialect.moe.default)
    assert calls, "nothing was routed"
    ids = prompt()
    first, second = hf_logits(model, ids[:14]), hf_logits(model, ids[14:])
    found = flat_logits(program, model, ids, (14, 9))
    torch.testing.assert_close(found, torch.cat((first, second)), atol=1e-4, rtol=0)
    # The experts matter, and so does which of them is chosen.
    for node in calls:
        ids_of, count = node.args[1], node.args[4].meta["val"].shape[0]
        with program.graph.inserting_before(node):
            other = program.graph.call_function(torch.ops.aten.sub.Tensor, (count - 1, ids_of))
        node.args = (node.args[0], other, *node.args[2:])
    assert (flat_logits(program, model, ids, (14, 9)) - found).abs().max() > 1e-2


@pytest.mark.parametrize("key", ["mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3"])
def test_two_ranks_are_one(key: str) -> None:
    model = zoo_model(key)
    program = default_pipeline().run(captured(model))
    ranks = [Pipeline((ShardTensorParallel(2, rank),)).run(program, [VerifyEachPass()]) for rank in range(2)]
    ids = prompt(11)
    inputs = {"input_ids": ids, "positions": torch.arange(11)}
    for logits in run_ranks(ranks, inputs, model.state_dict()):
        torch.testing.assert_close(logits, hf_logits(model, ids), atol=1e-4, rtol=0)
    for node in ranks[1].calls(dialect.moe.default):
        assert [user.target for user in node.users] == [dialect.all_reduce.default]
        assert all(ranks[1].weights.slots[str(each.target)].shard is not None for each in node.args[3:5])


def test_an_inner_width_that_ranks_do_not_divide_stays_whole() -> None:
    model = zoo_model("mixtral", intermediate_size=33)
    program = default_pipeline().run(captured(model))
    split = Pipeline((ShardTensorParallel(2, 0),)).run(program, [VerifyEachPass()])
    reasons = [refusal.reason for refusal in split.history[-1].refusals]
    assert sum("inner width 33 of its experts is not divided by 2" in reason for reason in reasons) == 2


def test_half_precision() -> None:
    wide = zoo_model("mixtral")
    model = MixtralForCausalLM._from_config(wide.config, attn_implementation="eager", dtype=torch.bfloat16).eval()
    model.load_state_dict(wide.state_dict())
    start = captured(model)
    ids = prompt()
    inputs = {"input_ids": ids[None], "positions": torch.arange(len(ids))[None]}
    before = start.run(inputs, start.weights.materialise(model.state_dict()))[0]
    found = flat_logits(default_pipeline().run(start), model, ids, (len(ids),))
    assert (found - before).abs().max() <= 2 * ulp(before)
    # A router may choose another expert when its input is rounded otherwise, so the experts are compared alone.
    experts = model.model.layers[0].mlp.experts
    model.set_experts_implementation("batched_mm")  # sums the experts of a token at once, as the op does
    x, (weights, chosen) = torch.randn(9, 128).bfloat16(), torch.rand(9, 4).topk(2)
    expected = experts(x, chosen, weights).detach()
    alone = dialect.moe(x, chosen, weights, experts.gate_up_proj, experts.down_proj, None, None, "silu", 0.0, 0.0)
    assert (alone - expected).abs().max() <= ulp(expected)


def ulp(values: torch.Tensor) -> float:
    """The distance of neighbours in bfloat16 at the largest of the values."""
    return float(2.0 ** (values.abs().max().float().log2().floor() - 7))


# -- what the hook does not map ----------------------------------------------------------------------------------------


class OtherGate(MixtralExperts):
    """A gate that no op computes."""

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.sin(gate) * up


class CutGate(MixtralExperts):
    """DeepSeek V4's gate; the limit is far out."""

    def __init__(self, config: MixtralConfig):
        super().__init__(config)
        self.limit = 350.0

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def with_experts(kind: type[nn.Module]) -> type[MixtralForCausalLM]:
    class Changed(MixtralForCausalLM):
        def __init__(self, config: MixtralConfig):
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp.experts = kind(config)

    return Changed


def changed(kind: type[nn.Module]) -> nn.Module:
    return with_experts(kind)(zoo_model("mixtral").config).eval()


def test_a_gate_is_evaluated() -> None:
    calls = captured(changed(CutGate)).calls(dialect.hf_experts.default)
    assert [node.args[7:] for node in calls] == [("silu", 0.0, 350.0, False, False)] * 2


def test_a_gate_that_no_op_computes_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"the gate of the experts model.layers.0.mlp.experts \(OtherGate\) is none"):
        captured(changed(OtherGate))


def test_experts_without_a_gate_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"\(NemotronHExperts\) have no gate"):
        captured(zoo_model("nemotron_h"))


def test_operands_that_are_not_mapped_are_refused() -> None:
    x, ids, weights = torch.zeros(3, 128), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    experts = zoo_model("mixtral").model.layers[0].mlp.experts
    with installed(lambda module: "here"):
        route = ALL_EXPERTS_FUNCTIONS[IMPLEMENTATION]
        with pytest.raises(CaptureError, match=r"the experts here are called with 1 more operands \(scale\)"):
            route(experts, x, ids, weights, scale=2.0)
        with pytest.raises(CaptureError, match=r"ids of shape \[3, 2\] and weights of shape \[3, 4\]"):
            route(experts, x, ids, torch.zeros(3, 4))
    assert IMPLEMENTATION not in ALL_EXPERTS_FUNCTIONS
