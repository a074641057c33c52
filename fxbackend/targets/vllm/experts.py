"""`moe`: the routed experts of a layer, with ids and weights as the program's own router makes them.

On a GPU vLLM's fused kernel takes them. On a CPU its kernel knows softmax routing only, so the op's own body runs
there, as one opaque call that compiles. Every rank holds a slice of every expert; the sum over ranks is the program's
own.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import fx, nn
from vllm.model_executor.layers.fused_moe import fused_experts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import biased_moe_quant_config
from vllm.platforms import current_platform

from fxbackend.ops.experts import SWIGLU_OAI, gate
from fxbackend.program import module_of
from fxbackend.weights import Shard, Slot

if TYPE_CHECKING:
    from fxbackend.targets.vllm.lowering import PartLowering

_ACTIVATIONS = {"silu": MoEActivation.SILU, "gelu": MoEActivation.GELU, "gelu_tanh": MoEActivation.GELU_TANH}
_OAI = (SWIGLU_OAI, 1.702, 7.0)  # the one gate with a limit that the fused kernel has; it takes gate and up interleaved


class Experts(nn.Module):
    """`moe`. Sizes are those of one rank.

    Args:
        count: experts.
        width: of the hidden state.
        inner: of one expert, on this rank.
        biases: whether gate and up have one, and whether down has one.
        gated: activation, alpha and limit of the op.
    """

    def __init__(
        self,
        count: int,
        width: int,
        inner: int,
        *,
        biases: tuple[bool, bool],
        gated: tuple[str, float, float],
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gated = gated
        self.fused = not current_platform.is_cpu() and _kernel(gated) is not None
        self.interleaved = self.fused and gated == _OAI
        self.gate_up = _empty(count, 2 * inner, width, dtype=dtype)
        self.down = _empty(count, width, inner, dtype=dtype)
        self.gate_up_bias = _empty(count, 2 * inner, dtype=dtype) if biases[0] else None
        self.down_bias = _empty(count, width, dtype=dtype) if biases[1] else None

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        held = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        if self.fused:
            return _fused(x, ids, weights, *held, self.gated)
        if current_platform.is_cpu():
            return opaque(x, ids, weights, *held, *self.gated)
        return every_expert(x, ids, weights, *held, self.gated)

    def load(self, name: str, value: torch.Tensor, expert: int | None = None, half: int | None = None) -> None:
        """Copies this rank's part of a weight: of all experts, of one, or its gate (half 0) or other half (1)."""
        held = getattr(self, name).data
        if expert is not None:
            held, value = held[expert : expert + 1], value.unsqueeze(0)
        if not name.startswith("gate_up"):
            held.copy_(value)
            return
        if self.interleaved:
            pairs = held.unflatten(1, (-1, 2))
            halves = (pairs[:, :, 0], pairs[:, :, 1])
        else:
            halves = held.chunk(2, 1)
        for place, part in enumerate(value.chunk(2, 1)) if half is None else ((half, value),):
            halves[place].copy_(part)


def _empty(*shape: int, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


def _kernel(gated: tuple[str, float, float]) -> MoEActivation | None:
    """The activation of vLLM's fused kernel that is this gate; None when it has none."""
    return MoEActivation.SWIGLUOAI if gated == _OAI else _ACTIVATIONS.get(gated[0]) if not gated[2] else None


def opaque(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """The op itself, which the compiler does not look into: its body reads the ids on the host."""
    return torch.ops.fxbackend.moe(x, ids, weights, gate_up, down, gate_up_bias, down_bias, activation, alpha, limit)


def every_expert(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gated: tuple[str, float, float],
) -> torch.Tensor:
    """All tokens through all experts, for gates that the fused kernel lacks: slow, but no shape depends on ids."""
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, weights.dtype), device=x.device)
    for expert in range(down.shape[0]):
        bias, bias_down = (None if each is None else each[expert] for each in (gate_up_bias, down_bias))
        part = F.linear(gate(F.linear(x, gate_up[expert], bias), *gated), down[expert], bias_down)
        total = total + part * torch.where(ids == expert, weights, 0).sum(1, keepdim=True)
    return total.to(x.dtype)


def _fused(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    gated: tuple[str, float, float],
) -> torch.Tensor:
    """vLLM's fused kernel. An id that is no expert would leave its part of the sum as the memory happens to be."""
    count, activation = down.shape[0], _kernel(gated)
    assert activation is not None
    weights = weights.float().masked_fill(ids >= count, 0.0)
    biased = gate_up_bias is not None or down_bias is not None
    config = biased_moe_quant_config(gate_up_bias, down_bias) if biased else None
    return fused_experts(
        x.contiguous(),
        gate_up,
        down,
        weights,
        ids.clamp(max=count - 1).to(torch.int32),
        activation=activation,
        quant_config=config,
    )


def build(low: PartLowering, node: fx.Node) -> fx.Node:
    """The adapter in place of a `moe`, or the op itself where weights are computed."""
    x, ids, weights, *operands = node.args[:7]
    activation, alpha, limit = node.args[7:]
    slots = [low.slot(each) for each in operands]
    wanted = zip(operands, slots, strict=True)
    if any(each is not None and (slot is None or not slot.pieces) for each, slot in wanted):
        low.shared.plain.append(node)
        return low.copy(node, opaque)
    gate_up, down = slots[:2]
    assert gate_up is not None and down is not None
    count, width, inner = down.local_shape(low.shared.world)

    def make(_path: str) -> nn.Module:
        return Experts(
            count,
            width,
            inner,
            biases=(slots[2] is not None, slots[3] is not None),
            gated=(str(activation), float(alpha), float(limit)),  # type: ignore[arg-type]
            dtype=gate_up.dtype,
        )

    def fill(adapter: nn.Module) -> None:
        for name, slot in zip(("gate_up", "down", "gate_up_bias", "down_bias"), slots, strict=True):
            if slot is not None:
                sections = slot.sections if slot.folded else ()
                low.shared.receive(slot, partial(_load, low, adapter, name, slot), sections)

    key = ("moe", *(slot and slot.name for slot in slots), activation, alpha, limit)
    return low.call(node, module_of(node) or "experts", key, make, (x, ids, weights), fill)  # type: ignore[arg-type]


def _load(
    low: PartLowering, adapter: nn.Module, name: str, slot: Slot, value: torch.Tensor, section: int | None
) -> None:
    """Takes the packed weight of all experts, or (`section`) that of one expert, or a half of it."""
    if section is None:
        adapter.load(name, low.shared.take(slot.shard, value))  # type: ignore[operator]
        return
    parts = len(slot.sections) // slot.shape[0]
    expert, part = divmod(section, parts)
    if slot.shard is not None:
        several = slot.shard.dim == 1 and parts > 1
        length = slot.shard.sections[part : part + 1] if several else slot.shard.sections
        value = low.shared.take(Shard(slot.shard.dim - 1, length, (1,) * len(length)), value)
    adapter.load(name, value, expert, part if parts > 1 else None)  # type: ignore[operator]
