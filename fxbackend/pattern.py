"""Patterns written as the mathematics.

    x, weight, eps = var("x"), slot("weight"), number("eps")
    wide = cast(x)
    rms = weight * cast(wide * rsqrt(mean(wide ** 2) + eps))

Captures are named; the same name twice is the same value. `+` and `*` commute. A cast is invisible only where `cast`
is written (there may be one or none). `keep("sum", ...)` names an interior value that may have users outside the match,
because the rewrite replaces it as well, and `shared(...)` a part that stays in the graph; any other interior value with
an outside user refuses the match.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

aten = torch.ops.aten
Operand = "Expression | int | float"


class Expression:
    """A node of a pattern; combine with Python's operators."""

    def __add__(self, other: Expression | float) -> Expression:
        return Op((aten.add.Tensor,), (self, _lift(other)), commutes=True)

    __radd__ = __add__

    def __mul__(self, other: Expression | float) -> Expression:
        return Op((aten.mul.Tensor,), (self, _lift(other)), commutes=True)

    __rmul__ = __mul__

    def __sub__(self, other: Expression | float) -> Expression:
        return Op((aten.sub.Tensor,), (self, _lift(other)))

    def __truediv__(self, other: Expression | float) -> Expression:
        return Op((aten.div.Tensor,), (self, _lift(other)))

    def __pow__(self, other: Expression | float) -> Expression:
        return Op((aten.pow.Tensor_Scalar,), (self, _lift(other)))

    def __neg__(self) -> Expression:
        return Op((aten.neg.default,), (self,))

    def __or__(self, other: Expression) -> Expression:
        return OneOf((self, other))


@dataclass(frozen=True, eq=False)
class Var(Expression):
    """Captures any value. `kind` limits it: `any`, `slot` (a weight slot) or `number` (a Python number)."""

    name: str
    kind: str = "any"


@dataclass(frozen=True, eq=False)
class Literal(Expression):
    """A Python value that must be equal."""

    value: object


@dataclass(frozen=True, eq=False)
class Op(Expression):
    """A call of one of `targets`, with its arguments in order; trailing arguments that are not written must be
    absent. `keywords` must be equal to the call's."""

    targets: tuple[object, ...]
    args: tuple[Expression, ...]
    commutes: bool = False
    keywords: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, eq=False)
class Sequence(Expression):
    """A list argument, element by element (`cat`)."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, eq=False)
class Cast(Expression):
    """The value, or one cast (`aten.to.dtype`) of it."""

    inner: Expression


@dataclass(frozen=True, eq=False)
class Keep(Expression):
    """An interior value that is captured by name and may have users outside of the match."""

    name: str
    inner: Expression


@dataclass(frozen=True, eq=False)
class Shared(Expression):
    """A value that the match only looks at: it stays for its other users."""

    inner: Expression


@dataclass(frozen=True, eq=False)
class OneOf(Expression):
    """Alternatives, tried in order."""

    options: tuple[Expression, ...]


def _lift(value: Expression | object) -> Expression:
    return value if isinstance(value, Expression) else Literal(value)


def var(name: str) -> Var:
    """Captures any value (a node, or a Python value)."""
    return Var(name)


def slot(name: str) -> Var:
    """Captures a node that reads a weight slot."""
    return Var(name, "slot")


def number(name: str) -> Var:
    """Captures a Python number."""
    return Var(name, "number")


def op(target: object, *args: Expression | object, **keywords: object) -> Op:
    """A call of `target` (or of one of a tuple of targets)."""
    targets = target if isinstance(target, tuple) else (target,)
    return Op(targets, tuple(_lift(arg) for arg in args), keywords=tuple(sorted(keywords.items())))


def items(*values: Expression | object) -> Sequence:
    """A list argument."""
    return Sequence(tuple(_lift(value) for value in values))


def cast(inner: Expression) -> Cast:
    """`inner`, or one cast of it."""
    return Cast(inner)


def keep(name: str, inner: Expression) -> Keep:
    """`inner`, captured by name, with users outside allowed."""
    return Keep(name, inner)


def shared(inner: Expression) -> Shared:
    """`inner`, which stays in the graph for whoever else reads it (a table lookup that all layers share)."""
    return Shared(inner)


def rsqrt(x: Expression) -> Op:
    """`1 / sqrt(x)`."""
    return op(aten.rsqrt.default, x)


def mean(x: Expression) -> Op:
    """Mean over the last dimension, kept. Canonical graphs write the dimension as captured in `dims`."""
    return op(aten.mean.dim, x, Var("dims"), True)
