"""Lowers a part of a program to a graph module that calls vLLM's layers: one adapter per op of the dialect.

ATen ops stay as they are, and what they read of the weights becomes parameters and buffers. A dialect op whose operand
is computed (or split in a way that no vLLM layer has) is called by its plain torch body.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import fx, nn
from torch.fx.node import Argument, map_aggregate
from vllm.config import VllmConfig

from fxbackend.errors import LoweringError
from fxbackend.ops import OPS
from fxbackend.printer import node_text
from fxbackend.program import PassRecord, Program, Stage, module_of
from fxbackend.split import Part
from fxbackend.targets.vllm.layers import Adapter, Embedding
from fxbackend.targets.vllm.weights import Receiver
from fxbackend.weights import Shard, Slot

aten = torch.ops.aten
dialect = torch.ops.fxbackend

Builders = Mapping[object, Callable[["PartLowering", fx.Node], fx.Node]]


@dataclass
class Shared:
    """What the parts of one rank have in common.

    Attributes:
        program: at PARALLEL, of this rank.
        config: of the engine.
        receivers: what takes each weight slot.
        embeddings: adapters of vocabulary tables by slot name, for tied heads.
        plain: places where a dialect op is called by its plain torch body, for the report.
    """

    program: Program
    config: VllmConfig
    receivers: dict[str, list[Receiver]] = field(default_factory=dict)
    embeddings: dict[str, Embedding] = field(default_factory=dict)
    plain: list[fx.Node] = field(default_factory=list)

    @property
    def world(self) -> int:
        """Tensor-parallel ranks."""
        return self.program.facts.world_size

    @property
    def rank(self) -> int:
        """This one among the tensor-parallel ranks."""
        return self.program.facts.rank

    def receive(
        self, slot: Slot, load: Callable[[torch.Tensor, int | None], None], sections: tuple[int, ...] = ()
    ) -> None:
        """Lets `load` take the value of a slot."""
        self.receivers.setdefault(slot.name, []).append(Receiver(load, sections))

    def take(self, shard: Shard | None, value: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole value."""
        return value if shard is None else shard.take(value, self.rank, self.world)


class PartLowering:
    """Lowers one part; builders talk to it."""

    def __init__(self, shared: Shared, part: Part, builders: Builders):
        self.shared = shared
        self.part = part
        self.builders = builders
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}  # of the part -> lowered
        self._modules: dict[object, str] = {}
        self._paths: set[str] = set()

    def run(self) -> fx.GraphModule:
        """The lowered part of a program that `check` has seen."""
        for node in self.part.graph.nodes:
            if node in self.nodes or node.op == "get_attr":
                continue
            if node.target in self.builders:
                self.nodes[node] = self.builders[node.target](self, node)
            else:
                self.nodes[node] = self.copy(node)
        _sweep(self.graph)
        return fx.GraphModule(self.root, self.graph)

    def slot(self, operand: object) -> Slot | None:
        """The slot that an operand reads; None when it is no plain weight."""
        if isinstance(operand, fx.Node) and operand.op == "get_attr":
            return self.shared.program.weights.slots[str(operand.target)]
        return None

    def value(self, node: fx.Node) -> fx.Node:
        """The lowered value of a node of the part."""
        if node not in self.nodes:
            self.nodes[node] = self._weight(node)
        return self.nodes[node]

    def copy(self, node: fx.Node, target: Callable[..., object] | None = None) -> fx.Node:
        """The same call on lowered values; a view takes its token dimension from its operand."""
        new = self.graph.node_copy(node, self.value)
        if target is not None:
            new.target = target
        new.args, new.kwargs = map_aggregate((new.args, new.kwargs), _on_the_engines_device)
        if node.target is aten.reshape.default:
            sizes = list(new.args[1])  # type: ignore[arg-type]
            symbolic = [index for index, size in enumerate(sizes) if isinstance(size, fx.Node)]
            if len(symbolic) == 1 and -1 not in sizes:
                sizes[symbolic[0]] = -1
                new.args = (new.args[0], sizes)
        elif node.target is aten.sym_size.int:  # later stages get no ids
            positions = next((n for n in self.graph.find_nodes(op="placeholder") if n.target == "positions"), None)
            if positions is not None and new.args[0].target == "input_ids":  # type: ignore[union-attr]
                new.args = (positions, 0)
        return new

    def plain(self, node: fx.Node) -> fx.Node:
        """The op called by its plain torch body."""
        self.shared.plain.append(node)
        return self.copy(node, OPS[node.target].reference)  # type: ignore[index]

    def call(
        self,
        node: fx.Node,
        path: str,
        key: object,
        make: Callable[[str], Adapter],
        operands: Sequence[object],
        fill: Callable[[Adapter], None] | None = None,
    ) -> fx.Node:
        """A call of an adapter in place of `node`.

        Args:
            node: what it stands for.
            path: where the adapter lies in the module tree, if that place is free.
            key: nodes with the same key share one adapter.
            make: makes the adapter, given its path.
            operands: nodes of the part.
            fill: says where the adapter's weights come from.
        """
        if key not in self._modules:
            place = self._free(path)
            adapter = make(place)
            _add(self.root, place, adapter)
            self._modules[key] = place
            if fill is not None:
                fill(adapter)
        arguments = tuple(None if each is None else self.value(each) for each in operands)  # type: ignore[arg-type]
        new = self.graph.create_node("call_module", self._modules[key], arguments, name=node.name)
        new.meta = dict(node.meta)
        return new

    def function(self, node: fx.Node, target: Callable[..., object], *args: object) -> fx.Node:
        """A call of a function in place of `node`."""
        new = self.graph.create_node("call_function", target, args, name=node.name)  # type: ignore[arg-type]
        new.meta = dict(node.meta)
        return new

    def _free(self, path: str) -> str:
        wanted, number = path, 0
        while path in self._paths:
            number += 1
            path = f"{wanted}_{number}"
        self._paths.add(path)
        return path

    def _weight(self, node: fx.Node) -> fx.Node:
        """A weight that is read as it is: a parameter, or a buffer for a constant."""
        if node.op != "get_attr":
            raise LoweringError(f"{node_text(node)} in {module_of(node) or 'no module'} is used before it is computed.")
        slot, plan = self.shared.program.weights.slots[str(node.target)], self.shared.program.weights
        owner, _, name = slot.name.rpartition(".")
        path = self._free(f"{owner}.{name}_" if owner else f"{name}_")
        if slot.name in plan.constants:
            _register(self.root, path, plan.constants[slot.name].to(torch.empty(0).device))
        else:
            shape = slot.local_shape(self.shared.world)
            parameter = nn.Parameter(torch.empty(shape, dtype=slot.dtype), requires_grad=False)
            _register(self.root, path, parameter)
            self.shared.receive(slot, partial(_fill, self.shared, slot.shard, parameter))
        new = self.graph.create_node("get_attr", path, name=node.name)
        new.meta = dict(node.meta)
        return new


def _on_the_engines_device(value: Argument) -> Argument:
    return torch.empty(0).device if isinstance(value, torch.device) else value


def _fill(
    shared: Shared, shard: Shard | None, parameter: nn.Parameter, value: torch.Tensor, section: int | None
) -> None:
    parameter.data.copy_(shared.take(shard, value))


def check(program: Program, builders: Builders) -> None:
    """Looks whether every op of the dialect has a builder.

    Raises:
        LoweringError: lists all that have none.
    """
    places = [node for node in program.graph.nodes if node.target in OPS and node.target not in builders]
    if places:
        listed = "; ".join(f"{node.name} in {module_of(node) or 'no module'}: {node_text(node)}" for node in places)
        raise LoweringError(f"the engine has no builder for: {listed}.")


def number_attentions(program: Program) -> int:
    """Writes on every attention its number in the program (a KV cache is named by it); returns how many there are."""
    attentions = program.calls(dialect.attention.default)
    for number, node in enumerate(attentions):
        node.meta["attention_number"] = number
    return len(attentions)


def lowered_program(shared: Shared, parts: Sequence[fx.GraphModule], started: float) -> Program:
    """The lowered parts as one program that can be printed and counted: each adapter is a call of its vLLM layer."""
    source = shared.program
    graph, results = fx.Graph(), []
    for part in parts:
        mapping: dict[fx.Node, fx.Node] = {}
        for node in part.graph.nodes:
            if node.op == "output":
                results = [mapping[each] for each in node.all_input_nodes]
                continue
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
            if node.op == "call_module":
                mapping[node].op = "call_function"
                mapping[node].target = _named(part.get_submodule(str(node.target)))
    graph.output(results[0] if len(results) == 1 else tuple(results))
    nodes = [node for part in parts for node in part.graph.nodes]
    record = PassRecord(
        "lower",
        Stage.LOWERED,
        matches=sum(node.op == "call_module" for node in nodes),
        nodes_before=len(source.graph.nodes),
        nodes_after=len(nodes),
        milliseconds=(time.perf_counter() - started) * 1e3,
        changed=True,
    )
    notes = tuple(
        f"{module_of(node)}: {OPS[node.target].name} is called by its plain torch body."  # type: ignore[index]
        for node in shared.plain
    )
    facts = dataclasses.replace(source.facts, notes=source.facts.notes + notes)
    return Program(graph, source.weights, facts, Stage.LOWERED, source.fake_mode, [*source.history, record])


def _named(adapter: nn.Module) -> Callable[..., object]:
    """Something that prints as the vLLM layer that an adapter holds."""

    def layer() -> None: ...

    layer.__name__ = f"vllm.{type(getattr(adapter, 'layer', adapter)).__name__}"
    return layer


def _add(root: nn.Module, path: str, module: nn.Module) -> None:
    """Puts a module at a path, over what may be an empty container there."""
    owner, name = _owner(root, path)
    before = owner._modules.get(name)
    owner.add_module(name, module)
    for child, value in before.named_children() if before is not None else ():
        module.add_module(child, value)


def _register(root: nn.Module, path: str, value: torch.Tensor) -> None:
    owner, name = _owner(root, path)
    if isinstance(value, nn.Parameter):
        owner.register_parameter(name, value)
    else:
        owner.register_buffer(name, value, persistent=False)


def _owner(root: nn.Module, path: str) -> tuple[nn.Module, str]:
    *names, last = path.split(".")
    for name in names:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root._modules[name]  # type: ignore[assignment]
    return root, last


def _sweep(graph: fx.Graph) -> None:
    """Removes what nothing reads (the token count, once the views do without it)."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users:
            graph.erase_node(node)
