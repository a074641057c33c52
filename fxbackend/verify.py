"""What a program must hold at each stage; checked at every stage border, and after every pass in tests."""

from __future__ import annotations

import operator

import torch
from torch import fx

from fxbackend.errors import VerifyError
from fxbackend.ops import OPS
from fxbackend.printer import node_text
from fxbackend.program import Program, Stage, module_of
from fxbackend.rows import check_rows

aten = torch.ops.aten
dialect = torch.ops.fxbackend

_HOOKS = (dialect.hf_attention.default, dialect.attention_mask.default, dialect.hf_experts.default)
# Spellings that canonicalize removes; one left over would hide a value from every later pattern.
_NOT_CANONICAL = frozenset(
    {
        torch._C._set_grad_enabled,
        aten.dropout.default,
        aten.detach.default,
        aten.alias.default,
        aten.contiguous.default,
        aten.view.default,
        aten._unsafe_view.default,
        aten.chunk.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.unbind.int,
        aten.t.default,
        aten.to.device,
        aten._to_copy.default,
    }
)


def verify(program: Program, inside: bool = False) -> None:
    """Checks everything that `program.stage` promises.

    Args:
        program: the program.
        inside: the stage is not finished (more of its passes follow): what it adds to the stage before is not asked.

    Raises:
        VerifyError: the first broken promise, naming the node and its module path.
    """
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"the graph is not well formed: {error}") from error
    stage = Stage(max(program.stage - inside, 0))
    _signature(program, stage)
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            raise VerifyError(f"{_place(node)}: a program calls functions only.")
        if node.op != "output" and "val" not in node.meta:
            raise VerifyError(f"{_place(node)} has no value in meta['val'].")
        if node.op == "call_function":
            _allowed(node, stage)
    _weights(program, stage)
    if Stage.SEMANTIC <= stage < Stage.LOWERED:
        check_rows(program)


def _place(node: fx.Node) -> str:
    return f"{node_text(node)} in {module_of(node) or 'no module'}"


def _signature(program: Program, stage: Stage) -> None:
    names = list(program.inputs())
    if names != ["input_ids", "positions"]:
        raise VerifyError(f"inputs are {names}, not input_ids and positions.")
    rank = 2 if stage < Stage.CANONICAL else 1
    for name, node in program.inputs().items():
        shape = node.meta["val"].shape
        if len(shape) > rank or not isinstance(shape[-1], torch.SymInt):
            raise VerifyError(f"input {name} is {list(shape)}: the token dimension must be the last, and symbolic.")
        if shape[-1].node.maybe_as_int() is not None:
            raise VerifyError(f"the token dimension of {name} was specialised to {shape[-1]}.")
    tokens = program.inputs()["input_ids"].meta["val"].shape[-1]
    out = program.output().meta["val"]
    if not isinstance(out, torch.Tensor) or out.ndim not in (2, 3) or str(out.shape[-2]) != str(tokens):
        raise VerifyError(f"the output {node_text(program.output())} is not one row of logits per token.")


def _allowed(node: fx.Node, stage: Stage) -> None:
    target = node.target
    known = isinstance(target, torch._ops.OpOverload) or target in (operator.getitem, torch._C._set_grad_enabled)
    symbolic = isinstance(node.meta["val"], (torch.SymInt, torch.SymBool, torch.SymFloat))
    if not known and not symbolic:
        raise VerifyError(f"{_place(node)}: {target} is no ATen or dialect op.")
    if stage >= Stage.CANONICAL and target in _NOT_CANONICAL:
        raise VerifyError(f"{_place(node)}: canonicalize must have removed this spelling.")
    if stage >= Stage.CANONICAL and isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
        raise VerifyError(f"{_place(node)} writes to its operand; a canonical program is functional.")
    if stage >= Stage.SEMANTIC and target in _HOOKS:
        raise VerifyError(f"{_place(node)}: a call of Transformers' interface was not rewritten.")
    if stage is Stage.LOWERED and target in OPS:
        raise VerifyError(f"{_place(node)}: no dialect op may be left after lowering.")


def _weights(program: Program, stage: Stage) -> None:
    plan, world = program.weights, program.facts.world_size
    read = {str(node.target): node for node in program.graph.find_nodes(op="get_attr")}
    if unknown := sorted(set(read) - set(plan.slots)):
        raise VerifyError(f"the graph reads {unknown}, which the weight plan does not hold.")
    if stage >= Stage.CANONICAL and (unread := sorted(set(plan.slots) - set(read))):
        raise VerifyError(f"the weight plan holds {unread}, which the graph does not read.")
    for name, node in read.items():
        slot = plan.slots[name]
        if bool(slot.pieces) == (name in plan.constants):
            raise VerifyError(f"weight slot {name!r} must be filled by pieces or by a constant, and by one of them.")
        if tuple(node.meta["val"].shape) != slot.local_shape(world):
            raise VerifyError(
                f"weight slot {name!r} is {slot.local_shape(world)}, the graph says {tuple(node.meta['val'].shape)}."
            )
        if node.meta["val"].dtype != slot.dtype:
            raise VerifyError(f"weight slot {name!r} is {slot.dtype}, the graph says {node.meta['val'].dtype}.")
