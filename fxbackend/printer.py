"""The text of a program: one line per value with its type and module path. Golden tests and dumps use it."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from fxbackend.program import Program, module_of

_DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.bool: "b8",
}


def type_text(value: object) -> str:
    """`f32[T, 64]` for a fake tensor; `T` stands for the token symbol."""
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(type_text(each) for each in value) + ")"
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(str(size) if isinstance(size, int) else _symbol(size) for size in value.shape)
        return f"{_DTYPES.get(value.dtype, str(value.dtype)[6:])}[{sizes}]"
    return _symbol(value) if isinstance(value, torch.SymInt) else type(value).__name__


def _symbol(size: torch.SymInt) -> str:
    text = str(size)
    for symbol in size.node.expr.free_symbols:
        text = text.replace(str(symbol), "T")
    return text


def target_text(target: object) -> str:
    """`aten.mul.Tensor`, `fxbackend.linear`, `getitem`."""
    if isinstance(target, torch._ops.OpOverload):
        text = str(target)
        return text.removesuffix(".default")
    if target is operator.getitem:
        return "getitem"
    return getattr(target, "__name__", str(target))


def _argument(value: object) -> str:
    if isinstance(value, fx.Node):
        return str(value.target) if value.op == "get_attr" else value.name
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(each) for each in value) + "]"
    if isinstance(value, torch.dtype):
        return _DTYPES.get(value, str(value))
    return repr(value)


def node_text(node: fx.Node) -> str:
    """One value: `fxv_3: f32[T, 64] = aten.mul.Tensor(fxv_1, 2.0)`."""
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    if node.op == "placeholder":
        return f"{node.name}: {type_text(node.meta.get('val'))} = input"
    arguments = [_argument(each) for each in node.args]
    arguments += [f"{key}={_argument(each)}" for key, each in node.kwargs.items()]
    return f"{node.name}: {type_text(node.meta.get('val'))} = {target_text(node.target)}({', '.join(arguments)})"


def lines(program: Program, modules: bool = True) -> Iterator[str]:
    """The lines of a program; weights are written by name where they are used."""
    for node in program.graph.nodes:
        if node.op == "get_attr":
            continue
        text = node_text(node)
        yield f"{text}  # {module_of(node)}" if modules and module_of(node) else text


def program_text(program: Program, modules: bool = True) -> str:
    """The whole program as text."""
    return "\n".join(lines(program, modules)) + "\n"


def op_counts(program: Program) -> dict[str, int]:
    """How often each op occurs, by its printed name."""
    counts: dict[str, int] = {}
    for node in program.graph.nodes:
        if node.op == "call_function":
            counts[target_text(node.target)] = counts.get(target_text(node.target), 0) + 1
    return dict(sorted(counts.items()))
