"""The program: one flat FX graph, its weight plan and a few facts, at one stage of the pipeline."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, cast

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import fxbackend.ops  # noqa: F401  (registers the dialect before anything names its ops)
from fxbackend.errors import VerifyError
from fxbackend.weights import WeightPlan


class Stage(enum.IntEnum):
    """What a program speaks; see the table in docs/architecture.md."""

    CAPTURED = 0
    CANONICAL = 1
    SEMANTIC = 2
    FUSED = 3
    PARALLEL = 4
    LOWERED = 5


@dataclass(frozen=True)
class Facts:
    """What conversion needs to know of a model beside its graph; read once from the config.

    Attributes:
        architecture: name of the Hugging Face class, such as `LlamaForCausalLM`.
        model_type: `config.model_type`.
        dtype: dtype of the activations.
        max_model_len: how many positions a sequence may have; the height of every position table.
        vocab_size: width of the logits.
        world_size: tensor-parallel ranks this program is one of.
        rank: which of them.
        notes: sentences for the report (frozen rope frequencies and the like).
    """

    architecture: str
    model_type: str
    dtype: torch.dtype
    max_model_len: int
    vocab_size: int
    world_size: int = 1
    rank: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refusal:
    """A place that a pass looked at and left as it was."""

    node: str
    module: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} ({self.module or 'no module'}): {self.reason}"


@dataclass(frozen=True)
class PassRecord:
    """What one pass did: counts, time in milliseconds, refusals and the nearest misses."""

    name: str
    stage: Stage
    matches: int
    nodes_before: int
    nodes_after: int
    milliseconds: float
    changed: bool
    refusals: tuple[Refusal, ...] = ()
    near_misses: tuple[Refusal, ...] = ()


@dataclass
class Program:
    """A captured model on its way to a target.

    Attributes:
        graph: flat; placeholders `input_ids` and `positions`, `get_attr` nodes read weight slots, one output (logits).
            Every node carries `meta["val"]` (fake tensor or symbolic int) and `meta["module"]` (module path).
        weights: the plan that fills the slots.
        facts: see `Facts`.
        stage: what the graph speaks.
        fake_mode: the mode of the fake tensors in `meta["val"]`.
        history: one record per pass that ran.
    """

    graph: fx.Graph
    weights: WeightPlan
    facts: Facts
    stage: Stage
    fake_mode: FakeTensorMode
    history: list[PassRecord] = field(default_factory=list)

    def inputs(self) -> dict[str, fx.Node]:
        """The placeholders by name."""
        return {node.target: node for node in self.graph.find_nodes(op="placeholder")}

    def output(self) -> fx.Node:
        """The node whose value is the logits."""
        (out,) = self.graph.find_nodes(op="output")
        return cast(fx.Node, out.args[0])

    def calls(self, *targets: object) -> list[fx.Node]:
        """Call nodes of the given targets, in graph order."""
        return [node for node in self.graph.nodes if node.op == "call_function" and node.target in targets]

    def made_of_ids(self) -> set[fx.Node]:
        """Calls whose values hold something of the input ids, not of their number alone: the hidden states."""
        found = {self.inputs()["input_ids"]}
        for node in self.graph.nodes:
            counts = node.target is torch.ops.aten.sym_size.int
            if node.op == "call_function" and not counts and any(arg in found for arg in node.all_input_nodes):
                found.add(node)
        return {node for node in found if node.op == "call_function"}

    def copy(self) -> Program:
        """An independent copy: new graph and plan, shared fake values and constant tensors."""
        graph = fx.Graph()
        mapping: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            mapping[node] = graph.node_copy(node, lambda n: mapping[n])
        return Program(graph, self.weights.copy(), self.facts, self.stage, self.fake_mode, list(self.history))

    def run(self, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Runs the graph node by node on real tensors (the reference bodies of dialect ops).

        Args:
            inputs: a tensor for every placeholder.
            weights: a tensor for every slot, as `WeightPlan.materialise` gives.
        """
        return Evaluator(self.graph, inputs, weights).run()


class Evaluator:
    """Evaluates nodes of a graph on real tensors; reads a weight at its first use, drops a value after its last."""

    def __init__(self, graph: fx.Graph, inputs: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]):
        self.graph = graph
        self.inputs = inputs
        self.weights = weights

    def run(self) -> torch.Tensor:
        """The value of the graph's output (a tuple where the output is one)."""
        values: dict[fx.Node, object] = {}
        last_use = {arg: node for node in self.graph.nodes for arg in node.all_input_nodes}
        with torch.no_grad():
            for node in self.graph.nodes:
                if node.op == "get_attr":
                    continue
                for arg in node.all_input_nodes:  # a weight is read right before its first use
                    if arg.op == "get_attr" and arg not in values:
                        values[arg] = self.value(arg, values)
                if node.op == "output":
                    return cast(torch.Tensor, fx.node.map_arg(node.args[0], lambda n: cast(Any, values[n])))
                values[node] = self.value(node, values)
                for arg in node.all_input_nodes:
                    if last_use[arg] is node:
                        del values[arg]
        raise VerifyError("the graph has no output.")

    def value(self, node: fx.Node, values: Mapping[fx.Node, object]) -> object:
        """The value of one node, given those of its arguments."""
        if node.op == "placeholder":
            return self.inputs[str(node.target)]
        if node.op == "get_attr":
            return self.weights[str(node.target)]
        args, kwargs = fx.node.map_arg(cast(Any, (node.args, node.kwargs)), lambda n: cast(Any, values[n]))
        return cast(Any, node.target)(*args, **kwargs)


def new_fake_mode() -> FakeTensorMode:
    """A fake mode with symbols of its own: guards learnt by another capture must not change this one."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False)


def example_tokens(longest: int) -> int:
    """The token count of examples: a prime that no width of a model is, below `longest`.

    Torch compares a symbolic size with a number by the example's value: a model with 7 heads would fix an example of 7
    tokens to 7, and a table of 64 rows would be cut short for one of 1009.
    """
    count = max(min(1009, longest - 1), 2)
    while any(count % divisor == 0 for divisor in range(2, int(count**0.5) + 1)):
        count -= 1
    return count


def token_input(mode: FakeTensorMode, name: str, shape: tuple[int, ...], device: torch.device | str) -> FakeTensor:
    """A fake int64 input whose last dimension is a fresh token symbol."""
    from torch._dynamo.source import ConstantSource

    kinds = [DimDynamic.STATIC] * (len(shape) - 1) + [DimDynamic.DYNAMIC]
    context: Any = StatelessSymbolicContext(dynamic_sizes=kinds, constraint_sizes=[None] * len(shape))
    example = torch.empty(shape, dtype=torch.int64, device="meta")
    with mode:
        fake = mode.from_tensor(example, symbolic_context=context, source=ConstantSource(name))
        return torch.empty(fake.shape, dtype=torch.int64, device=device)  # type: ignore[return-value]


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake value of a node that is a tensor.

    Raises:
        VerifyError: the node has no tensor value.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise VerifyError(f"{node.name} ({module_of(node)}) has no tensor value.")
    return value


def shape_of(node: fx.Node) -> tuple[int | torch.SymInt, ...]:
    """The shape of a node's value; the token dimension is a `SymInt`."""
    return sizes_of(value_of(node))


def sizes_of(value: torch.Tensor) -> tuple[int | torch.SymInt, ...]:
    """The shape of a fake tensor; torch's own annotation leaves out that a size may be a `SymInt`."""
    return tuple(value.shape)


def operand(node: fx.Node, index: int) -> fx.Node:
    """The argument of a call at a place where a node stands.

    Raises:
        VerifyError: the argument is no node.
    """
    value = node.args[index]
    if not isinstance(value, fx.Node):
        raise VerifyError(f"argument {index} of {node.name} ({module_of(node)}) is {value}, not a node.")
    return value


def operand_list(node: fx.Node, index: int) -> list[fx.Node]:
    """The argument of a call at a place where a list of nodes stands.

    Raises:
        VerifyError: the argument is no list of nodes.
    """
    value = node.args[index]
    nodes = [each for each in value if isinstance(each, fx.Node)] if isinstance(value, (list, tuple)) else []
    if not isinstance(value, (list, tuple)) or len(nodes) != len(value):
        raise VerifyError(f"argument {index} of {node.name} ({module_of(node)}) is {value}, not a list of nodes.")
    return nodes


def integer(node: fx.Node, index: int) -> int:
    """The argument of a call at a place where a plain number stands, such as a dimension.

    Raises:
        VerifyError: the argument is no integer.
    """
    value = node.args[index]
    if not isinstance(value, int):
        raise VerifyError(f"argument {index} of {node.name} ({module_of(node)}) is {value}, not an integer.")
    return value


def same_shape(left: fx.Node, right: fx.Node) -> bool:
    """Whether two values have one shape. Comparing symbols as integers would ask for their example values, by which the
    token dimension equals any width that happens to be the example's."""
    return [str(size) for size in shape_of(left)] == [str(size) for size in shape_of(right)]


def module_of(node: fx.Node) -> str:
    """The module path that a node comes from, such as `model.layers.0.mlp`."""
    return str(node.meta.get("module", ""))


def common_path(weights: Iterable[fx.Node]) -> str:
    """The deepest module path that holds all the slots that `weights` read."""
    parts = zip(*(str(node.target).split(".") for node in weights), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, parts))


def tensor_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The argument nodes of a node whose values are tensors."""
    return (arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor))
