"""Runs the programs of all tensor-parallel ranks in one process, adding up at the collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fxbackend.errors import VerifyError
from fxbackend.program import Evaluator, Program
from fxbackend.split import Parts

dialect = torch.ops.fxbackend


def run_ranks(
    programs: Sequence[Program], inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """The output of every rank.

    Args:
        programs: one per rank, equal but for their rank.
        inputs: a tensor for every placeholder.
        state: the checkpoint; each rank takes its own part of it.
    """
    world = len(programs)
    evaluators = [
        Evaluator(program.graph, inputs, program.weights.materialise(state, rank, world))
        for rank, program in enumerate(programs)
    ]
    values: list[dict[fx.Node, object]] = [{} for _ in programs]
    with torch.no_grad():
        for nodes in zip(*(program.graph.nodes for program in programs), strict=True):
            if len({(node.op, node.target) for node in nodes if node.op != "output"}) > 1:
                raise VerifyError(f"the ranks' programs differ at {[node.name for node in nodes]}.")
            if nodes[0].op == "output":
                return [known[node.args[0]] for known, node in zip(values, nodes, strict=True)]  # type: ignore[misc]
            step(evaluators, values, nodes)
    raise VerifyError("the graph has no output.")


def run_stages(parts: Parts, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The logits, each pipeline stage and the head run apart with only the weights that it reads."""
    carried: dict[str, torch.Tensor] = {}
    for index, part in enumerate((*parts.stages, parts.head)):
        is_head = index == len(parts.stages)
        held = {name: weights[name] for name in part.slots()}
        results = Evaluator(part.graph, carried if is_head else {**inputs, **carried}, held).run()
        names = ["hidden_states"] if index == len(parts.stages) - 1 else [f"hidden_{n}" for n in range(len(results))]
        carried = dict(zip(names, results, strict=True))
        if is_head:
            return results[0]
    raise VerifyError("a program without a head has no logits.")


def step(evaluators: Sequence[Evaluator], values: Sequence[dict[fx.Node, object]], nodes: Sequence[fx.Node]) -> None:
    """One node on every rank."""
    if nodes[0].target is dialect.all_reduce.default:
        total = torch.stack([known[node.args[0]] for known, node in zip(values, nodes, strict=True)]).sum(0)  # type: ignore[index, misc]
        results = [total] * len(nodes)
    elif nodes[0].target is dialect.all_gather.default:
        parts = [known[node.args[0]] for known, node in zip(values, nodes, strict=True)]  # type: ignore[index]
        results = [torch.cat(parts, nodes[0].args[1])] * len(nodes)  # type: ignore[arg-type]
    else:
        results = [each.value(node, known) for each, known, node in zip(evaluators, values, nodes, strict=True)]  # type: ignore[misc]
    for known, node, result in zip(values, nodes, results, strict=True):
        known[node] = result
