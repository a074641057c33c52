"""The engine's adapter of `moe`: filled whole or per expert, on one rank or split, in the layout of its kernel."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.model_executor.layers.fused_moe.activation import MoEActivation

from fxbackend.targets.vllm import experts
from fxbackend.targets.vllm.weights import Loader, Receiver
from fxbackend.weights import Piece, Shard, Slot, WeightPlan

dialect = torch.ops.fxbackend
COUNT, WIDTH, INNER, TOKENS = 3, 8, 6, 9
OAI = ("swiglu_oai", 1.702, 7.0)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def held(bias: bool = True) -> dict[str, torch.Tensor]:
    made = {"gate_up": rand(COUNT, 2 * INNER, WIDTH), "down": rand(COUNT, WIDTH, INNER)}
    return made | ({"gate_up_bias": rand(COUNT, 2 * INNER), "down_bias": rand(COUNT, WIDTH)} if bias else {})


def routed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, COUNT, (TOKENS, 2), generator=torch.Generator().manual_seed(2))
    return rand(TOKENS, WIDTH), ids, rand(TOKENS, 2).abs()


def fake_low(rank: int, world: int) -> SimpleNamespace:
    return SimpleNamespace(
        shared=SimpleNamespace(
            rank=rank, world=world, take=lambda shard, value: value if shard is None else shard.take(value, rank, world)
        )
    )


def filled(
    values: dict[str, torch.Tensor],
    gated: tuple[str, float, float],
    rank: int = 0,
    world: int = 1,
    per_expert: bool = False,
) -> experts.Experts:
    """An adapter that a loader filled."""
    adapter = experts.Experts(
        COUNT, WIDTH, INNER // world, biases=("gate_up_bias" in values, "down_bias" in values), gated=gated
    )
    shards = {
        "gate_up": Shard(1, (INNER, INNER), (1, 1)),
        "gate_up_bias": Shard(1, (INNER, INNER), (1, 1)),
        "down": Shard(2, (INNER,), (1,)),
        "down_bias": Shard(0, (COUNT,), (world,), first=True),
    }
    plan, receivers, tensors = WeightPlan(), {}, {}
    for name, value in values.items():
        pieces, sections, folded = (Piece(name),), (COUNT,), False
        if per_expert and name in ("gate_up", "down"):
            parts = [part for expert in value for part in (expert.chunk(2) if name == "gate_up" else (expert,))]
            pieces = tuple(Piece(f"{name}.{index}") for index in range(len(parts)))
            sections, folded = (parts[0].shape[0],) * len(parts), True
            tensors.update({piece.source: part for piece, part in zip(pieces, parts, strict=True)})
        else:
            tensors[name] = value
        slot = Slot(
            name, tuple(value.shape), value.dtype, pieces, sections, shards[name] if world > 1 else None, folded=folded
        )
        plan.add(slot)

        def load(value: torch.Tensor, section: int | None, name: str = name, slot: Slot = slot) -> None:
            experts._load(fake_low(rank, world), adapter, name, slot, value, section)

        receivers[name] = [Receiver(load, sections if folded else ())]
    loader = Loader(plan, receivers, {})
    loader.load(reversed(tensors.items()))
    assert not loader._waiting, "a tensor per expert is copied as it comes"
    return adapter


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("gated", [("silu", 0.0, 0.0), OAI])
def test_the_ranks_sum_to_the_op(gated: tuple[str, float, float], world: int, per_expert: bool) -> None:
    values, operands = held(), routed()
    expected = dialect.moe(*operands, *values.values(), *gated)
    parts = [filled(values, gated, rank, world, per_expert)(*operands) for rank in range(world)]
    torch.testing.assert_close(torch.stack(parts).sum(0), expected, atol=1e-5, rtol=1e-5)


def test_without_biases() -> None:
    values, operands = held(bias=False), routed()
    expected = dialect.moe(*operands, *values.values(), None, None, "gelu_tanh", 0.0, 0.0)
    torch.testing.assert_close(filled(values, ("gelu_tanh", 0.0, 0.0))(*operands), expected)


@pytest.mark.parametrize("gated", [("silu", 0.0, 0.7), ("swiglu_oai", 1.3, 0.9)])
def test_gates_without_a_fused_kernel_go_through_every_expert(gated: tuple[str, float, float]) -> None:
    values, (x, ids, weights) = held(), routed()
    ids[0, 1] = COUNT  # no expert
    expected = dialect.moe(x, ids, weights, *values.values(), *gated)
    found = experts.every_expert(x, ids, weights, *values.values(), gated)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert experts._kernel(gated) is None


class Gpu:
    """A platform that is none of a CPU."""

    @staticmethod
    def is_cpu() -> bool:
        return False


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("gated", [("silu", 0.0, 0.0), OAI])
def test_what_the_fused_kernel_is_given(
    gated: tuple[str, float, float], per_expert: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experts, "current_platform", Gpu)
    given = {}

    def kernel(
        x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, **more: object
    ) -> torch.Tensor:
        given.update(w1=w1, w2=w2, weights=weights, ids=ids, **more)
        return x

    monkeypatch.setattr(experts, "fused_experts", kernel)
    values, (x, ids, weights) = held(), routed()
    ids[0, 1] = COUNT
    filled(values, gated, per_expert=per_expert)(x, ids, weights.double())
    assert given["activation"] == (MoEActivation.SWIGLUOAI if gated == OAI else MoEActivation.SILU)
    order = [half * INNER + row for row in range(INNER) for half in (0, 1)] if gated == OAI else list(range(2 * INNER))
    assert torch.equal(given["w1"], values["gate_up"][:, order]) and torch.equal(given["w2"], values["down"])
    assert torch.equal(given["quant_config"].w1_bias, values["gate_up_bias"][:, order])
    assert torch.equal(given["quant_config"].w2_bias, values["down_bias"])
    assert given["weights"].dtype == torch.float32 and given["ids"].dtype == torch.int32
    assert given["weights"][0, 1] == 0 and int(given["ids"].max()) < COUNT


def test_the_op_is_opaque_to_the_compiler() -> None:
    adapter, operands = filled(held(), ("silu", 0.0, 0.0)), routed()
    compiled = torch.compile(adapter, fullgraph=True, backend="aot_eager", dynamic=True)
    torch.testing.assert_close(compiled(*operands), adapter(*operands))
