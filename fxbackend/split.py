"""Splits a program at its pipeline cuts and before the language-model head, into parts that a target runs apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fxbackend.errors import LoweringError
from fxbackend.program import Program, module_of

dialect = torch.ops.fxbackend


@dataclass(frozen=True)
class Part:
    """A piece of a program with its own graph.

    Attributes:
        graph: placeholders `inputs`, `get_attr` nodes for the weights that this part reads, one output: a tuple of
            `outputs`.
        inputs: `input_ids`, `positions`, and `hidden_0`, ... in a later stage; `hidden_states` in the head.
        outputs: the nodes of the result.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    outputs: tuple[fx.Node, ...]

    def slots(self) -> set[str]:
        """Names of the weight slots that this part reads."""
        return {str(node.target) for node in self.graph.find_nodes(op="get_attr")}


@dataclass(frozen=True)
class Parts:
    """All parts of a program: pipeline stages of the body, and the head (`lm_head` and what follows)."""

    stages: tuple[Part, ...]
    head: Part


def split(program: Program) -> Parts:
    """The parts of a program; without cuts there is one stage.

    Raises:
        LoweringError: the program has no `lm_head`, or more than one.
    """
    heads = program.calls(dialect.lm_head.default)
    if len(heads) != 1:
        raise LoweringError(f"a program is split before its lm_head, and this one has {len(heads)}.")
    hidden: fx.Node = heads[0].args[0]  # type: ignore[assignment]
    cuts: dict[int, list[fx.Node]] = {}
    for node in program.calls(dialect.stage_cut.default):
        cuts.setdefault(int(node.args[1]), []).append(node)  # type: ignore[arg-type]
    stages = []
    for index in range(len(cuts) + 1):
        entering = {node: f"hidden_{position}" for position, node in enumerate(cuts.get(index - 1, []))}
        leaving = [node.args[0] for node in cuts[index]] if index in cuts else [hidden]
        stages.append(_part(program, {**_inputs(program), **entering}, leaving))  # type: ignore[arg-type]
    return Parts(tuple(stages), _part(program, {hidden: "hidden_states"}, [program.output()]))


def _inputs(program: Program) -> dict[fx.Node, str]:
    return {node: name for name, node in program.inputs().items()}


def _part(program: Program, entering: Mapping[fx.Node, str], leaving: Sequence[fx.Node]) -> Part:
    needed: set[fx.Node] = set()
    pending = list(leaving)
    while pending:
        node = pending.pop()
        if node in needed or node in entering:
            continue
        if node.op == "placeholder":
            raise LoweringError(f"the part that makes {leaving[0].name} ({module_of(leaving[0])}) needs {node.name}.")
        needed.add(node)
        pending += node.all_input_nodes
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node, name in entering.items():
        mapping[node] = graph.placeholder(name)
        mapping[node].meta = dict(node.meta)
    for node in program.graph.nodes:
        if node in needed and node not in mapping:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
    outputs = tuple(mapping[node] for node in leaving)
    graph.output(outputs)
    return Part(graph, tuple(entering.values()), outputs)
