"""The batch axis goes; an op without a rule gets it back for its own length."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxbackend.passes.drop_batch_axis import DropBatchAxis
from fxbackend.testing import check_pass
from tests.small import SelfAttention, start

aten = torch.ops.aten


class Body(nn.Module):
    """Applies a function to the hidden states `[1, tokens, 8]`."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]):
        super().__init__()
        self.function = function
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.function(x)


def test_golden() -> None:
    program, state = start("drop_batch_axis", SelfAttention())
    # The attention has no rule: it keeps its axis between an unsqueeze and a squeeze.
    check_pass(
        program,
        DropBatchAxis(),
        state,
        matches=37,
        golden="""
        input_ids: i64[T] = input
        positions: i64[T] = input
        v0: T = aten.sym_size.int(input_ids, 0)
        v1: f32[T, 8] = aten.embedding(embed.weight, input_ids)
        v2: f32[T, 8] = aten.linear(v1, body.q_proj.weight)
        v3: f32[T, 4] = aten.linear(v1, body.k_proj.weight)
        v4: f32[T, 4] = aten.linear(v1, body.v_proj.weight)
        v5: f32[T, 2, 4] = aten.reshape(v2, [v0, 2, 4])
        v6: f32[2, T, 4] = aten.transpose.int(v5, 0, 1)
        v7: f32[T, 1, 4] = aten.reshape(v3, [v0, 1, 4])
        v8: f32[1, T, 4] = aten.transpose.int(v7, 0, 1)
        v9: f32[T, 1, 4] = aten.reshape(v4, [v0, 1, 4])
        v10: f32[1, T, 4] = aten.transpose.int(v9, 0, 1)
        v11: i64[T, 1] = aten.unsqueeze(positions, 1)
        v12: f32[T, 1] = aten.to.dtype(v11, f32)
        v13: f32[T, 2] = aten.mul.Tensor(v12, body.angles.inv_freq)
        v14: f32[T, 4] = aten.cat([v13, v13], 1)
        v15: f32[T, 4] = aten.cos(v14)
        v16: f32[T, 4] = aten.sin(v14)
        v17: f32[1, T, 4] = aten.unsqueeze(v15, 0)
        v18: f32[1, T, 4] = aten.unsqueeze(v16, 0)
        v19: f32[2, T, 4] = aten.mul.Tensor(v6, v17)
        v20: f32[2, T, 2] = aten.slice.Tensor(v6, 2, 0, 2)
        v21: f32[2, T, 2] = aten.slice.Tensor(v6, 2, 2, 4)
        v22: f32[2, T, 2] = aten.neg(v21)
        v23: f32[2, T, 4] = aten.cat([v22, v20], 2)
        v24: f32[2, T, 4] = aten.mul.Tensor(v23, v18)
        v25: f32[2, T, 4] = aten.add.Tensor(v19, v24)
        v26: f32[1, T, 4] = aten.mul.Tensor(v8, v17)
        v27: f32[1, T, 2] = aten.slice.Tensor(v8, 2, 0, 2)
        v28: f32[1, T, 2] = aten.slice.Tensor(v8, 2, 2, 4)
        v29: f32[1, T, 2] = aten.neg(v28)
        v30: f32[1, T, 4] = aten.cat([v29, v27], 2)
        v31: f32[1, T, 4] = aten.mul.Tensor(v30, v18)
        v32: f32[1, T, 4] = aten.add.Tensor(v26, v31)
        v33: f32[0] = aten.empty.memory_format([0], device=device(type='cpu'), pin_memory=False)
        v34: i64[1, 1, 1, 1] = fxbackend.attention_mask(v33, 'causal', 0)
        v35: f32[1, 2, T, 4] = aten.unsqueeze(v25, 0)
        v36: f32[1, 1, T, 4] = aten.unsqueeze(v32, 0)
        v37: f32[1, 1, T, 4] = aten.unsqueeze(v10, 0)
        v38: f32[1, T, 2, 4] = fxbackend.hf_attention(v35, v36, v37, v34, None, 0.5, 0.0, -1, 'body')
        v39: f32[T, 2, 4] = aten.squeeze.dim(v38, 0)
        v40: f32[T, 8] = aten.reshape(v39, [v0, 8])
        v41: f32[T, 8] = aten.linear(v40, body.o_proj.weight)
        v42: f32[T, 11] = aten.linear(v41, head.weight)
        return v42
    """,
    )


RULES = {
    "pointwise": lambda x: x.exp() * 2 + x,
    "cast": lambda x: x.double().float(),
    "mean": lambda x: x.mean(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "sums over several": lambda x: x.view(1, -1, 2, 4).sum((2, 3)).unsqueeze(-1),
    "cat": lambda x: torch.cat((x[..., 4:], x[..., :4]), -1),
    "stack": lambda x: torch.stack((x[..., ::2], x[..., 1::2]), -1).flatten(-2),
    "repeat": lambda x: x[..., :4].repeat_interleave(2, -1),
    "transpose": lambda x: x.view(1, -1, 2, 4).transpose(1, 2).exp().transpose(1, 2).reshape(x.shape),
    "expand": lambda x: x[..., :1].expand(1, x.shape[1], 8),
}


@pytest.mark.parametrize("name", RULES)
def test_rules(name: str) -> None:
    program, state = start("drop_batch_axis", Body(RULES[name]))
    after = check_pass(
        program, DropBatchAxis(), state, matches=len(program.calls(*{n.target for n in program.graph.nodes}))
    )
    assert not [node for node in after.calls(aten.unsqueeze.default, aten.squeeze.dim) if node.args[1] == 0]


WITHOUT = {
    "over the axis": lambda x: x.sum(0, keepdim=True),
    "moves the axis": lambda x: x.transpose(0, 1).exp().transpose(0, 1),
    "two rows": lambda x: torch.cat((x, x), 0).sum(0, keepdim=True),
    "makes and drops an axis": lambda x: x[0].unsqueeze(0),
    "sorted": lambda x: x.flip(-1),
    "matmul": lambda x: x @ torch.matmul(x.transpose(1, 2), x).exp(),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_an_op_without_a_rule_gets_its_axis_back(name: str) -> None:
    program, state = start("drop_batch_axis", Body(WITHOUT[name]))
    check_pass(
        program,
        DropBatchAxis(),
        state,
        matches=len(program.calls(*{n.target for n in program.graph.nodes})),
        tolerance=1e-3,
    )
