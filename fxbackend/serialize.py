"""A program as text of our own and back: JSON, with the constants in a safetensors file beside it.

The text holds no code: ops are named, and a name that this version does not know is an error. The fake values of the
nodes are not stored; loading runs the graph once on fake tensors with a token symbol of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import operator
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import fx

import fxbackend.ops  # noqa: F401  (registers the dialect before a file names its ops)
from fxbackend.errors import InputError
from fxbackend.printer import program_text
from fxbackend.program import Facts, PassRecord, Program, Refusal, Stage, example_tokens, new_fake_mode, token_input
from fxbackend.verify import verify
from fxbackend.weights import Piece, Shard, Slot, WeightPlan

FORMAT = 1
PROGRAM_FILE = "program.json"
CONSTANTS_FILE = "constants.safetensors"

_NAMESPACES = ("aten", "fxbackend", "prims")
_OPERATORS = (
    "getitem",
    "add",
    "sub",
    "mul",
    "floordiv",
    "truediv",
    "mod",
    "neg",
    "pow",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "and_",
    "or_",
)
_FUNCTIONS = {
    **{f"operator.{name}": getattr(operator, name) for name in _OPERATORS},
    **{f"torch.{name}": getattr(torch, name) for name in ("sym_int", "sym_float", "sym_max", "sym_min", "sym_not")},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    "torch.set_grad_enabled": torch._C._set_grad_enabled,
}
_FUNCTION_NAMES = {function: name for name, function in _FUNCTIONS.items()}
_META = ("module", "source", "made_by")


def to_text(program: Program) -> str:
    """The program as JSON text, without the values of its constants."""
    device = _device(program)
    data = {
        "format": FORMAT,
        "stage": program.stage.name,
        "facts": {**dataclasses.asdict(program.facts), "dtype": _dtype_name(program.facts.dtype)},
        "weights": _plan_data(program.weights),
        "history": [_record_data(record) for record in program.history],
        "nodes": [_node_data(node, device) for node in program.graph.nodes],
    }
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items() if key != "nodes")
    nodes = ",\n".join(f"  {json.dumps(node)}" for node in data["nodes"])  # type: ignore[attr-defined]
    return f'{{\n{head},\n "nodes": [\n{nodes}\n ]\n}}\n'


def from_text(text: str, constants: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> Program:
    """The program of a text that `to_text` made.

    Args:
        text: the JSON text.
        constants: a tensor for each constant that the text names.
        device: where the graph's tensors are to live; it takes the place of the device the text was written on.

    Raises:
        InputError: no such format, or an op that this version does not know.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"the saved program is no JSON ({error}): convert the model and save it anew.") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else None
        raise InputError(
            f"the saved program has format {found!r}, and this version of fxbackend reads format "
            f"{FORMAT}: convert the model again and save it with this version."
        )
    facts = Facts(**{**data["facts"], "dtype": _dtype(data["facts"]["dtype"]), "notes": tuple(data["facts"]["notes"])})
    plan = _plan(data["weights"], constants)
    loader = _Loader(plan, facts, torch.device(device))
    graph = loader.graph(data["nodes"])
    history = [_record(each) for each in data["history"]]
    program = Program(graph, plan, facts, Stage[data["stage"]], loader.mode, history)
    verify(program, inside=True)
    return program


def save_program(program: Program, directory: str | Path) -> None:
    """Writes `program.json` and `constants.safetensors` into a directory that exists."""
    folder = Path(directory)
    (folder / PROGRAM_FILE).write_text(to_text(program), encoding="utf-8")
    # Constants may be views of each other; the file holds each by itself.
    constants = {name: value.detach().cpu().contiguous().clone() for name, value in program.weights.constants.items()}
    save_file(constants, folder / CONSTANTS_FILE, metadata={"format": "pt"})


def load_program(directory: str | Path, device: torch.device | str = "cpu") -> Program:
    """Reads what `save_program` wrote.

    Raises:
        InputError: there is no program, or one of another version.
    """
    folder = Path(directory)
    for name in (PROGRAM_FILE, CONSTANTS_FILE):
        if not (folder / name).is_file():
            raise InputError(f"{folder} holds no {name}: give a directory written by Converted.save().")
    with safe_open(folder / CONSTANTS_FILE, framework="pt", device=str(device)) as file:
        constants = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    return from_text((folder / PROGRAM_FILE).read_text(encoding="utf-8"), constants, device)


def program_hash(program: Program) -> str:
    """A key for caches of compiled code: the graph's text, the weight plan and the facts, not the values of weights.

    It is the same in every process. Two pipelines on one model have different keys as soon as their graphs differ.
    """
    plan = program.weights
    layout = [(slot.name, slot.shape, _dtype_name(slot.dtype), str(slot.shard)) for slot in plan]
    parts = [
        str(FORMAT),
        program.stage.name,
        str(program.facts),
        program_text(program),
        str(plan),
        str(layout),
        str(sorted(plan.aliases.items())),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class _Loader:
    """Rebuilds a graph, and the fake value of each node with it."""

    def __init__(self, plan: WeightPlan, facts: Facts, device: torch.device):
        self.plan = plan
        self.facts = facts
        self.device = device
        self.mode = new_fake_mode()
        self.nodes: dict[str, fx.Node] = {}
        self.tokens: torch.Tensor | None = None

    def graph(self, rows: list[dict[str, object]]) -> fx.Graph:
        graph = fx.Graph()
        with torch.no_grad():
            for row in rows:
                self._node(graph, row)
        return graph

    def _node(self, graph: fx.Graph, row: dict[str, object]) -> None:
        op, name = str(row["op"]), str(row["name"])
        target = _target(str(row["target"])) if op == "call_function" else str(row["target"])
        args = tuple(self._argument(each) for each in row.get("args", ()))  # type: ignore[attr-defined]
        kwargs = {key: self._argument(each) for key, each in row.get("kwargs", {}).items()}  # type: ignore[attr-defined]
        node = graph.create_node(op, target, args, kwargs, name=name)  # type: ignore[arg-type]
        if node.name != name:
            node._rename(name)
        node.meta = {key: row[key] for key in _META if key in row}
        self.nodes[name] = node
        if op != "output":
            node.meta["val"] = self._value(node, row)

    def _value(self, node: fx.Node, row: dict[str, object]) -> object:
        if node.op == "placeholder":
            return self._input(str(node.target), int(row["rank"]))  # type: ignore[call-overload]
        if node.op == "get_attr":
            slot = self.plan.slots[str(node.target)]
            with self.mode:
                return torch.empty(slot.local_shape(self.facts.world_size), dtype=slot.dtype, device=self.device)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _input(self, name: str, rank: int) -> torch.Tensor:
        if self.tokens is None:
            shape = (1,) * (rank - 1) + (example_tokens(self.facts.max_model_len),)
            self.tokens = token_input(self.mode, name, shape, self.device)
            return self.tokens
        with self.mode:  # all inputs share one token symbol
            return torch.empty(self.tokens.shape, dtype=torch.int64, device=self.device)

    def _argument(self, value: object) -> object:
        if isinstance(value, list):
            return [self._argument(each) for each in value]
        if not isinstance(value, dict):
            return value
        ((kind, inner),) = value.items()
        if kind == "node":
            return self.nodes[inner]
        if kind == "tuple":
            return tuple(self._argument(each) for each in inner)
        if kind == "slice":
            return slice(*(self._argument(each) for each in inner))
        if kind == "device":
            return self.device if inner is None else torch.device(inner)
        simple = {
            "dtype": _dtype,
            "float": float,
            "complex": lambda pair: complex(*pair),
            "torch": lambda name: getattr(torch, name),
            "ellipsis": lambda _: ...,
        }
        if kind not in simple:
            raise InputError(
                f"the saved program holds a value of kind {kind!r}, which this version does not know: "
                "save it again with this version."
            )
        return simple[kind](inner)  # type: ignore[operator]


def _device(program: Program) -> torch.device:
    return next(iter(program.graph.nodes)).meta["val"].device


def _node_data(node: fx.Node, device: torch.device) -> dict[str, object]:
    row: dict[str, object] = {"name": node.name, "op": node.op}
    row["target"] = _target_name(node) if node.op == "call_function" else str(node.target)
    if node.op == "placeholder":
        row["rank"] = node.meta["val"].ndim
    else:
        row["args"] = [_argument_data(each, device) for each in node.args]
        if node.kwargs:
            row["kwargs"] = {key: _argument_data(each, device) for key, each in node.kwargs.items()}
    return row | {key: node.meta[key] for key in _META if node.meta.get(key)}


def _target_name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES:
        return f"{target.namespace}.{target._opname}.{target._overloadname}"
    if target in _FUNCTION_NAMES:
        return _FUNCTION_NAMES[target]
    raise InputError(
        f"{node.name} calls {target}, which the text form of a program has no name for: save the program "
        "at an earlier stage."
    )


def _target(name: str) -> object:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    namespace, _, rest = name.partition(".")
    op, _, overload = rest.rpartition(".")
    try:
        if namespace not in _NAMESPACES:
            raise AttributeError(name)
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except (AttributeError, RuntimeError) as error:
        raise InputError(
            f"the saved program calls {name!r}, which this version of fxbackend does not know: convert "
            "the model again and save it with this version."
        ) from error


def _argument_data(value: object, device: torch.device) -> object:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return {"tuple": [_argument_data(each, device) for each in value]}
    if isinstance(value, (list, torch.Size)):
        return [_argument_data(each, device) for each in value]
    if isinstance(value, slice):
        return {"slice": [_argument_data(each, device) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.dtype):
        return {"dtype": _dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": None if value == device else str(value)}
    if isinstance(value, (torch.memory_format, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if value is ...:
        return {"ellipsis": True}
    raise InputError(f"a value of type {type(value).__name__} has no text form; a pass must not put it into a graph.")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"{name!r} is no dtype of this version of torch.")
    return found


def _plan_data(plan: WeightPlan) -> dict[str, object]:
    slots = []
    for slot in plan:
        row = {**dataclasses.asdict(slot), "dtype": _dtype_name(slot.dtype)}
        slots.append(row)
    return {"slots": slots, "constants": sorted(plan.constants), "aliases": plan.aliases, "ignored": plan.ignored}


def _plan(data: dict[str, object], constants: Mapping[str, torch.Tensor]) -> WeightPlan:
    names = data["constants"]
    if missing := sorted(set(names) - set(constants)):  # type: ignore[call-overload]
        raise InputError(f"{CONSTANTS_FILE} holds no {missing}, which the saved program reads: save the program again.")
    plan = WeightPlan(aliases=dict(data["aliases"]), ignored=dict(data["ignored"]))  # type: ignore[call-overload]
    for row in data["slots"]:  # type: ignore[attr-defined]
        pieces = tuple(
            Piece(each["source"], each["narrow"] and tuple(each["narrow"]), each["transpose"], each["halves"])
            for each in row["pieces"]
        )
        split = row["shard"]
        shard = split and Shard(split["dim"], tuple(split["sections"]), tuple(split["replicate"]), split["first"])
        plan.add(
            Slot(
                row["name"],
                tuple(row["shape"]),
                _dtype(row["dtype"]),
                pieces,
                tuple(row["sections"]),
                shard,
                row["parameter"],
                row["folded"],
            )
        )
    plan.constants = {name: constants[name] for name in names}  # type: ignore[attr-defined]
    return plan


def _record_data(record: PassRecord) -> dict[str, object]:
    return {**dataclasses.asdict(record), "stage": record.stage.name}


def _record(data: dict[str, object]) -> PassRecord:
    places = {key: tuple(Refusal(**each) for each in data[key]) for key in ("refusals", "near_misses")}  # type: ignore[attr-defined]
    return PassRecord(**{**data, **places, "stage": Stage[str(data["stage"])]})  # type: ignore[arg-type]
