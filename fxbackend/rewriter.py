"""The gateway: the only code that edits the graph of a program, and its weight plan with it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import fx

from fxbackend.errors import PipelineError, VerifyError
from fxbackend.program import Program, Refusal, module_of
from fxbackend.weights import Shard, Slot, WeightPlan

Target = Callable[..., object]


class Rewriter:
    """Edits one program on behalf of one pass, and counts what it did.

    New nodes inherit module path and source line of the node they stand for, record the pass, get a value (by running
    the op on fake tensors) and a name of our own (`fxv_12`).
    """

    def __init__(self, program: Program, pass_name: str):
        self.program = program
        self.pass_name = pass_name
        self.matches = 0
        self.edits = 0
        self.refusals: list[Refusal] = []
        self.near_misses: list[Refusal] = []
        self._origin: fx.Node | None = None
        self._point: fx.Node | None = None
        self._slots = {str(node.target): node for node in self.graph.find_nodes(op="get_attr")}
        self._next = 1 + max((_number(node.name) for node in self.graph.nodes), default=0)

    @property
    def graph(self) -> fx.Graph:
        """The graph; read it, and edit it through this object only."""
        return self.program.graph

    @property
    def weights(self) -> WeightPlan:
        """The weight plan; edit it in the same method as the graph."""
        return self.program.weights

    @contextmanager
    def at(self, node: fx.Node, origin: fx.Node | None = None) -> Iterator[None]:
        """New nodes are inserted before `node` and inherit from `origin` (default: `node`)."""
        before = self._point, self._origin
        self._point, self._origin = node, origin or node
        try:
            yield
        finally:
            self._point, self._origin = before

    def call(self, target: Target, *args: object, **kwargs: object) -> fx.Node:
        """Inserts a call; returns the new node."""
        if self._point is None or self._origin is None:
            raise PipelineError(f"{self.pass_name} inserts a node outside of `with rw.at(node)`.")
        with self.graph.inserting_before(self._point):
            node = self.graph.create_node("call_function", target, args, kwargs, name=self._name())  # type: ignore[arg-type]
        node.meta = {key: self._origin.meta[key] for key in ("module", "source") if key in self._origin.meta}
        node.meta["made_by"] = self.pass_name
        self.infer(node)
        self.edits += 1
        return node

    def calls(self, target: Target, count: int, *args: object) -> tuple[fx.Node, ...]:
        """Inserts a call that returns a tuple of `count` values; returns a node per value."""
        node = self.call(target, *args)
        return tuple(self.call(operator.getitem, node, index) for index in range(count))

    def token_count(self, before: fx.Node) -> fx.Node:
        """The node that holds the number of tokens; made before `before` where there is none in front of it."""
        ids = self.program.inputs()["input_ids"]
        for user in ids.users:
            if user.target is torch.ops.aten.sym_size.int and user < before:
                return user
        with self.at(before):
            return self.call(torch.ops.aten.sym_size.int, ids, len(ids.meta["val"].shape) - 1)

    def slot(self, name: str) -> fx.Node:
        """The node that reads the weight slot `name`; one per slot, before the first call of the graph."""
        if name not in self._slots:
            slot = self.weights.slots[name]
            first = next(node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr"))
            with self.graph.inserting_before(first):
                node = self.graph.create_node("get_attr", name, name=self._name())
            node.meta["made_by"] = self.pass_name
            node.meta["module"] = name.rpartition(".")[0]
            with self.program.fake_mode:
                node.meta["val"] = torch.empty(slot.shape, dtype=slot.dtype, device=self._device())
            self._slots[name] = node
            self.edits += 1
        return self._slots[name]

    def add_slot(self, slot: Slot) -> fx.Node:
        """Adds a slot to the plan and returns the node that reads it."""
        self.weights.add(slot)
        return self.slot(slot.name)

    def stack(self, name: str, nodes: Iterable[fx.Node]) -> fx.Node:
        """Stacks the slots that `nodes` read along dimension 0 into a new slot; returns the node that reads it."""
        return self.add_slot(self.weights.stacked(name, [str(node.target) for node in nodes]))

    def add_constant(self, name: str, value: torch.Tensor) -> fx.Node:
        """Adds a constant to the plan and returns the node that reads it."""
        self.weights.add_constant(name, value)
        return self.slot(name)

    def replace(self, replacements: Mapping[fx.Node, fx.Node]) -> None:
        """Lets every user of each key use its value instead, then removes what has no user left."""
        for old, new in replacements.items():
            if old is new:
                continue
            old.replace_all_uses_with(new)
            self.edits += 1
        for old in replacements:
            self._erase_tree(old)

    def replace_after(self, old: fx.Node, new: fx.Node, point: fx.Node) -> None:
        """Lets the users of `old` that stand behind `point` use `new` instead."""
        old.replace_all_uses_with(new, delete_user_cb=lambda user: point < user and user is not new)
        self.edits += 1

    def set_args(self, node: fx.Node, *args: object, infer: bool = True) -> None:
        """Gives a node other arguments; infers its value anew, unless `infer_all` follows."""
        node.args = args  # type: ignore[assignment]
        node.meta["made_by"] = self.pass_name
        if infer:
            self.infer(node)
        self.edits += 1

    def reroute_after(self, old: fx.Node, new: fx.Node) -> None:
        """Lets the users of `old` that stand behind `new` read `new` instead."""
        for user in list(old.users):
            if user > new:
                user.replace_input_with(old, new)
        self.edits += 1

    def transpose_slot(self, node: fx.Node) -> None:
        """Turns the two-dimensional slot that `node` reads: its recipe transposes what it takes from the checkpoint."""
        slot = self.weights.slots[str(node.target)]
        pieces = tuple(dataclasses.replace(piece, transpose=not piece.transpose) for piece in slot.pieces)
        turned = self.weights.replace(slot.name, shape=slot.shape[::-1], pieces=pieces, sections=(slot.shape[1],))
        with self.program.fake_mode:
            node.meta["val"] = torch.empty(turned.shape, dtype=slot.dtype, device=self._device())
        self.edits += 1

    def turn_experts(self, node: fx.Node, transpose: bool, halves: bool) -> None:
        """Turns the slot of all experts that `node` reads: `[E, a, b]` becomes `[E, b, a]`; then its halves part."""
        slot = self.weights.slots[str(node.target)]
        (piece,) = slot.pieces
        shape = (slot.shape[0], slot.shape[2], slot.shape[1]) if transpose else slot.shape
        turned = self.weights.replace(
            slot.name, shape=shape, pieces=(dataclasses.replace(piece, transpose=transpose, halves=halves),)
        )
        with self.program.fake_mode:
            node.meta["val"] = torch.empty(turned.shape, dtype=slot.dtype, device=self._device())
        self.edits += 1

    def shard_slot(self, name: str, shard: Shard, world: int) -> None:
        """States the split of a slot; its node then has the shape that one rank holds."""
        slot = self.weights.replace(name, shard=shard)
        node = self._slots[name]
        with self.program.fake_mode:
            node.meta["val"] = torch.empty(slot.local_shape(world), dtype=slot.dtype, device=self._device())
        self.edits += 1

    def set_rank(self, rank: int, world: int) -> None:
        """Makes the program that of one tensor-parallel rank."""
        self.program.facts = dataclasses.replace(self.program.facts, rank=rank, world_size=world)

    def infer_all(self) -> None:
        """Infers the value of every call anew, in graph order (after shapes of weights changed)."""
        for node in self.graph.nodes:
            if node.op == "call_function":
                self.infer(node)

    def erase(self, node: fx.Node) -> None:
        """Removes a node that nothing uses."""
        if node.op == "get_attr":
            del self._slots[str(node.target)]
        self.graph.erase_node(node)
        self.edits += 1

    def sweep(self) -> None:
        """Removes every call that nothing uses, and every slot that nothing reads."""
        for node in reversed(list(self.graph.nodes)):
            if _is_dead(node):
                self.erase(node)
        for name in set(self.weights.slots) - set(self._slots):
            slot = self.weights.slots[name]
            self.weights.drop(name)
            kept = self.weights.sources()
            for piece in slot.pieces:
                if piece.source not in kept:
                    self.weights.ignored[piece.source] = "the graph does not read it"
            self.edits += 1

    def infer(self, node: fx.Node) -> None:
        """Computes a node's value from those of its arguments, on fake tensors."""
        args, kwargs = fx.node.map_arg(cast(Any, (node.args, node.kwargs)), lambda n: n.meta["val"])
        try:
            with self.program.fake_mode, torch.no_grad():
                node.meta["val"] = cast(Any, node.target)(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise VerifyError(
                f"{node.name} = {node.target} in {module_of(node) or 'no module'} has no value after {self.pass_name}: "
                f"{reason}"
            ) from error

    def matched(self) -> None:
        """Counts one rewritten place."""
        self.matches += 1

    def refuse(self, node: fx.Node, reason: str) -> None:
        """Records why a place that looked right was left as it was."""
        self.refusals.append(Refusal(node.name, module_of(node), reason))

    def near_miss(self, node: fx.Node, reason: str) -> None:
        """Records where the closest pattern stopped."""
        self.near_misses.append(Refusal(node.name, module_of(node), reason))

    def _erase_tree(self, node: fx.Node) -> None:
        pending = [node]
        while pending:
            each = pending.pop()
            if each._erased or not _is_dead(each):
                continue
            arguments = each.all_input_nodes
            self.erase(each)
            pending += arguments

    def _device(self) -> torch.device:
        return next(iter(self.graph.nodes)).meta["val"].device

    def _name(self) -> str:
        self._next += 1
        return f"fxv_{self._next - 1}"


def _is_dead(node: fx.Node) -> bool:
    """Whether nothing uses a call or a weight; a write to memory is used by whoever reads that memory."""
    if node.users or node.op not in ("call_function", "get_attr"):
        return False
    return not (isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable)


def _number(name: str) -> int:
    tail = name.removeprefix("fxv_")
    return int(tail) if tail != name and tail.isdigit() else 0
