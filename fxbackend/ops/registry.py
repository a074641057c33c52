"""One decorator makes a dialect op of a plain torch function: schema, shape rule and reference body at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

NAMESPACE = "fxbackend"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_Function = TypeVar("_Function", bound=Callable[..., object])


@dataclass(frozen=True)
class DialectOp:
    """A registered op: its name, overload and the plain function that is its meaning."""

    name: str
    overload: torch._ops.OpOverload
    reference: Callable[..., object]


OPS: dict[torch._ops.OpOverload, DialectOp] = {}


def dialect_op(shape: Callable[..., object] | None = None) -> Callable[[_Function], _Function]:
    """Registers the decorated function as `torch.ops.fxbackend.<its name>`.

    Args:
        shape: the shape rule, for bodies that look at values or are long (every fake op inside costs time at each
            inference); by default the body itself is run on fake tensors.
    """

    def register(function: _Function) -> _Function:
        name = function.__name__
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", shape or function, lib=_LIBRARY)
        overload = getattr(torch.ops.fxbackend, name).default
        OPS[overload] = DialectOp(name, overload, function)
        return function

    return register


def is_dialect(target: object) -> bool:
    """Whether an fx target is an op of the dialect."""
    return target in OPS
