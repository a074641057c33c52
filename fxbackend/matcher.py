"""The matcher: whether an expression stands at a node, with its captures, or why it does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from fxbackend.errors import MatchError
from fxbackend.pattern import Cast, Expression, Keep, Literal, OneOf, Op, Sequence, Shared, Var
from fxbackend.program import module_of

_CAST = torch.ops.aten.to.dtype
_NEAR = 3  # a miss is worth telling when at least this many nodes had matched


@dataclass(frozen=True)
class Miss:
    """The nearest miss at a node: where it stopped and why."""

    node: fx.Node
    reason: str
    depth: int


@dataclass
class Match:
    """A pattern that stands at `root`.

    Attributes:
        pattern: name of the variant.
        root: the node whose value the pattern is.
        nodes: all matched calls, root included.
        kept: names of captures that may have users outside.
        facts: values derived by `check` for `rewrite`.
    """

    pattern: str
    root: fx.Node
    captures: Mapping[str, object]
    nodes: frozenset[fx.Node]
    kept: frozenset[str]
    facts: dict[str, object] = field(default_factory=dict)
    _used: set[str] = field(default_factory=set)

    def node(self, name: str) -> fx.Node:
        """A captured node."""
        value = self.value(name)
        if not isinstance(value, fx.Node):
            raise MatchError(f"capture {name!r} is {value!r}, not a node.")
        return value

    def number(self, name: str) -> float:
        """A captured Python number."""
        value = self.value(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise MatchError(f"capture {name!r} is {value!r}, not a number.")
        return value

    def value(self, name: str) -> object:
        """A capture; asking for it counts as using it."""
        self._used.add(name)
        return self.captures[name]

    def has(self, name: str) -> bool:
        """Whether the variant that matched has this capture."""
        return name in self.captures

    @property
    def point(self) -> fx.Node:
        """Where the replacement is inserted: before the first kept value, else before the root."""
        kept = [self.captures[name] for name in self.kept]
        return min([self.root, *kept])  # type: ignore[type-var, return-value]

    def assert_all_used(self, pass_name: str) -> None:
        """Raises MatchError when check and rewrite left a capture unread: an operand would be dropped."""
        unread = sorted(set(self.captures) - self._used)
        if unread:
            raise MatchError(
                f"{pass_name}: captures {unread} of pattern {self.pattern!r} were neither used nor "
                f"proved away at {self.root.name} ({module_of(self.root)})."
            )


@dataclass(frozen=True)
class _State:
    captures: Mapping[str, object]
    nodes: frozenset[fx.Node]
    kept: frozenset[str]

    def bind(self, name: str, value: object) -> _State | None:
        if name in self.captures:
            known = self.captures[name]
            same = known is value if isinstance(value, fx.Node) else type(known) is type(value) and known == value
            return self if same else None
        return _State({**self.captures, name: value}, self.nodes, self.kept)

    def visit(self, node: fx.Node) -> _State:
        return _State(self.captures, self.nodes | {node}, self.kept)

    def keep(self, name: str) -> _State:
        return _State(self.captures, self.nodes, self.kept | {name})


class _Search:
    def __init__(self) -> None:
        self.best: Miss | None = None

    def miss(self, state: _State, at: object, reason: str, parent: fx.Node) -> None:
        depth = len(state.nodes)
        if self.best is None or depth > self.best.depth:
            self.best = Miss(at if isinstance(at, fx.Node) else parent, reason, depth)

    def walk(self, pattern: Expression, value: object, state: _State, parent: fx.Node) -> Iterator[_State]:
        if isinstance(pattern, Var):
            yield from self._var(pattern, value, state, parent)
        elif isinstance(pattern, Literal):
            if isinstance(value, fx.Node) or value != pattern.value:
                self.miss(state, value, f"expected {pattern.value!r}, found {value}", parent)
            else:
                yield state
        elif isinstance(pattern, Cast):
            # Through the cast first: the larger match, and the value in the dtype that it had.
            if isinstance(value, fx.Node) and value.target == _CAST:
                yield from self.walk(pattern.inner, value.args[0], state.visit(value), value)
            yield from self.walk(pattern.inner, value, state, parent)
        elif isinstance(pattern, Keep):
            bound = state.bind(pattern.name, value)
            if bound is None:
                self.miss(state, value, f"{pattern.name} is another value than before", parent)
            else:
                yield from self.walk(pattern.inner, value, bound.keep(pattern.name), parent)
        elif isinstance(pattern, Shared):
            for after in self.walk(pattern.inner, value, state, parent):
                yield _State(after.captures, state.nodes, after.kept)
        elif isinstance(pattern, OneOf):
            for option in pattern.options:
                yield from self.walk(option, value, state, parent)
        elif isinstance(pattern, Sequence):
            if not isinstance(value, (list, tuple)) or len(value) != len(pattern.items):
                self.miss(state, value, f"expected a list of {len(pattern.items)}", parent)
            else:
                yield from self._args(list(zip(pattern.items, value, strict=True)), state, parent)
        elif isinstance(pattern, Op):
            yield from self._op(pattern, value, state, parent)
        else:
            raise MatchError(f"{pattern!r} is not a pattern.")

    def _var(self, pattern: Var, value: object, state: _State, parent: fx.Node) -> Iterator[_State]:
        if pattern.kind == "slot" and not (isinstance(value, fx.Node) and value.op == "get_attr"):
            self.miss(state, value, f"{pattern.name} is {value}, which is not a weight", parent)
        elif pattern.kind == "number" and (isinstance(value, bool) or not isinstance(value, (int, float))):
            self.miss(state, value, f"{pattern.name} is {value}, which is not a number", parent)
        elif (bound := state.bind(pattern.name, value)) is None:
            self.miss(state, value, f"{pattern.name} is another value than before ({value})", parent)
        else:
            yield bound

    def _op(self, pattern: Op, value: object, state: _State, parent: fx.Node) -> Iterator[_State]:
        if not isinstance(value, fx.Node) or value.op != "call_function" or value.target not in pattern.targets:
            wanted = " or ".join(str(target) for target in pattern.targets)
            found = value.target if isinstance(value, fx.Node) else value
            self.miss(state, value, f"expected {wanted}, found {found}", parent)
            return
        if len(value.args) != len(pattern.args):
            self.miss(state, value, f"{value.target} has {len(value.args)} arguments, not {len(pattern.args)}", parent)
            return
        if dict(value.kwargs) != dict(pattern.keywords):
            self.miss(state, value, f"{value.target} has keywords {dict(value.kwargs)}", parent)
            return
        inside = state.visit(value)
        yield from self._args(list(zip(pattern.args, value.args, strict=True)), inside, value)
        if pattern.commutes:
            crossed: list[tuple[Expression, object]] = list(zip(pattern.args, reversed(value.args), strict=True))
            yield from self._args(crossed, inside, value)

    def _args(self, pairs: list[tuple[Expression, object]], state: _State, parent: fx.Node) -> Iterator[_State]:
        if not pairs:
            yield state
            return
        for after in self.walk(pairs[0][0], pairs[0][1], state, parent):
            yield from self._args(pairs[1:], after, parent)


def candidates(patterns: Mapping[str, Expression], root: fx.Node) -> Iterator[Match | Miss]:
    """Every way in which one of `patterns` stands at `root`, then the nearest miss if it came near enough to tell.

    A way in which an interior value has a user outside is a miss, which names the user.
    """
    if root.op != "call_function":
        return
    search = _Search()
    start = _State({}, frozenset(), frozenset())
    for name, pattern in patterns.items():
        for state in search.walk(pattern, root, start, root):
            escape = _escape(root, state)
            if escape is None:
                yield Match(name, root, state.captures, state.nodes, state.kept)
            elif search.best is None or len(state.nodes) >= search.best.depth:
                inner, user = escape
                reason = f"{inner.name} is used outside of the match by {user.name} ({module_of(user)})"
                search.best = Miss(inner, reason, len(state.nodes))
    if search.best is not None and search.best.depth >= _NEAR:
        yield search.best


def match(patterns: Mapping[str, Expression], root: fx.Node) -> Match | Miss | None:
    """The first of `candidates`."""
    return next(candidates(patterns, root), None)


def _escape(root: fx.Node, state: _State) -> tuple[fx.Node, fx.Node] | None:
    kept = {state.captures[name] for name in state.kept}
    for inner in state.nodes - {root} - kept:
        for user in inner.users:
            if user not in state.nodes:
                return inner, user
    return None
