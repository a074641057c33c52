"""Captures a causal language model, whole and once, as one flat graph of ATen ops before dispatch."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from fxbackend.errors import CaptureError, FxBackendError
from fxbackend.hf import expert_hooks, hooks
from fxbackend.program import Facts, Program, Stage, example_tokens, new_fake_mode, token_input
from fxbackend.weights import Piece, Slot, WeightPlan

_MODES = ("training", "gradient_checkpointing", "max_seq_len_cached", "name_or_path")
_HOST_READS = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")
_LARGE = 1 << 14  # elements
_LENGTH_DEPENDENT_ROPES = ("dynamic", "longrope")


def capture(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    facts: Facts,
    instance: PreTrainedModel | None = None,
    device: torch.device | str = "cpu",
) -> Program:
    """Captures `model_class(config)` with inputs `input_ids` and `positions` of shape `[1, tokens]`.

    Args:
        model_class: a causal language-model class of Transformers, or a user's own of the same kind.
        config: its config; it is copied.
        facts: as `read_facts` gives.
        instance: a loaded model, whose buffers are taken and whose parameters must be those of the rebuilt one.
        device: where the graph's tensors are to live.

    Raises:
        CaptureError: the forward specialises the token dimension, reads a value on the host, or calls an attention
            with an operand that is not mapped.
    """
    mode = new_fake_mode()
    fake = _build(model_class, config, facts.dtype, mode, device)
    real = instance if instance is not None else _buffers_only(model_class, config, facts.dtype)
    _same_modules(fake, instance)
    notes, frozen = _freeze_ropes(fake, lambda: _buffers_only(model_class, config, facts.dtype), facts.max_model_len)
    facts = dataclasses.replace(facts, notes=facts.notes + notes)
    graph, names, literals = _trace(fake, facts, mode, device)
    plan = _weight_plan(fake, real, frozen, device)
    for name, value in literals.items():
        plan.add_constant(name, _literal(name, value, fake, real).detach().clone())
    _name_inputs(graph, names)
    return Program(graph, plan, facts, Stage.CAPTURED, mode).copy()  # a graph that no module owns


def _literal(name: str, value: torch.Tensor, fake: PreTrainedModel, real: nn.Module) -> torch.Tensor:
    """A tensor that the forward makes of Python numbers, or one that a module keeps without registering it."""
    if not isinstance(value, FakeTensor):
        return value
    for path, module in fake.named_modules():
        for attribute, kept in vars(module).items():
            if kept is value:
                return getattr(real.get_submodule(path), attribute)
    raise CaptureError(
        f"{type(fake).__name__} reads a tensor ({name}, {list(value.shape)}) that is no parameter, no buffer and no "
        "attribute of a module, so that its value is not known: register it as a buffer."
    )


def _build(
    model_class: type[PreTrainedModel],
    config: PretrainedConfig,
    dtype: torch.dtype,
    mode: FakeTensorMode,
    device: torch.device | str,
) -> PreTrainedModel:
    config = copy.deepcopy(config)
    config.use_cache = False
    with (
        hooks.installed(lambda module: "", 1),
        expert_hooks.installed(lambda module: ""),
        mode,
        torch.device(device),
        no_init_weights(),
    ):
        model = _construct(model_class, config, dtype)
        model.tie_weights()  # part of the initialisation that was skipped
    if model.config._attn_implementation not in (hooks.IMPLEMENTATION, "eager"):
        raise CaptureError(f"{model_class.__name__} chose the attention {model.config._attn_implementation!r}.")
    return model.eval()


def _construct(model_class: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    def build(implementation: str) -> PreTrainedModel:
        return model_class._from_config(
            copy.deepcopy(config),
            attn_implementation=implementation,
            experts_implementation=hooks.IMPLEMENTATION,
            dtype=dtype,
        )

    if model_class._supports_attention_backend or model_class._can_set_attn_implementation():
        try:
            return build(hooks.IMPLEMENTATION)
        except KeyError as error:  # a class that keeps a table of attention classes of its own (GIT)
            if error.args != (hooks.IMPLEMENTATION,):
                raise
    return build("eager")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _buffers_only(model_class: type[PreTrainedModel], config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A second build with real buffers: rotary frequencies are in no checkpoint."""

    def build() -> PreTrainedModel:
        return model_class._from_config(copy.deepcopy(config), attn_implementation="eager", dtype=dtype).eval()

    with _parameters_on_meta(), torch.device("cpu"), no_init_weights():
        with _LargeOnMeta():
            model = build()
        return build() if any(buffer.is_meta for buffer in model.buffers()) else model


class _LargeOnMeta(TorchFunctionMode):
    """Lets a large `torch.empty` take no memory: parameters are made by it, and go to meta a moment later anyway.

    Once freed on the CPU, they would teach malloc to keep blocks of their size in its heap, and loading the checkpoint
    then took up to a fifth more memory than it needs.
    """

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if function is torch.empty and not kwargs.get("device"):
            like = function(*args, **{**kwargs, "device": "meta"})
            if like.numel() >= _LARGE:
                return like
        return function(*args, **kwargs)


def _same_modules(fake: PreTrainedModel, instance: PreTrainedModel | None) -> None:
    """The model in hand must be the one that its class builds from its config: modules, parameters, shapes."""
    if instance is None:
        return
    for one, other in ((fake, instance), (instance, fake)):
        types = {name: type(module).__name__ for name, module in other.named_modules()}
        for name, module in one.named_modules():
            if types.get(name) != type(module).__name__:
                raise CaptureError(
                    f"{type(instance).__name__} rebuilt from its config is not the model in hand: {name} is a "
                    f"{type(module).__name__} in one and {types.get(name, 'absent')} in the other. Modules that are "
                    "exchanged or added after the model was built are lost: __init__ must build them from the config."
                )
    rebuilt = {name: tuple(value.shape) for name, value in fake.named_parameters()}
    given = {name: tuple(value.shape) for name, value in instance.named_parameters()}
    if rebuilt != given:
        wrong = sorted(name for name in rebuilt.keys() | given.keys() if rebuilt.get(name) != given.get(name))
        raise CaptureError(
            f"{type(instance).__name__} rebuilt from its config is not the model in hand: "
            + ", ".join(
                f"{name} {given.get(name, 'absent')} in the model, {rebuilt.get(name, 'absent')} rebuilt"
                for name in wrong[:8]
            )
            + ". Its __init__ must make all parameters from the config alone."
        )
    for name, module in fake.named_modules():
        kept, held = _plain(module), _plain(instance.get_submodule(name))
        for attribute in kept.keys() & held.keys():
            if kept[attribute] != held[attribute]:
                raise CaptureError(
                    f"{type(instance).__name__} rebuilt from its config is not the model in hand: {name}.{attribute} "
                    f"is {held[attribute]!r} in the model and {kept[attribute]!r} rebuilt. Attributes that are "
                    "set after the model was built are lost: change the config instead."
                )


def _plain(module: nn.Module) -> dict[str, int | float | str]:
    """The numbers and words that a module keeps, but for its mode and for what a rotary embedding has seen."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (int, float, str)) and not name.startswith("_") and name not in _MODES
    }


def _freeze_ropes(
    fake: PreTrainedModel, fresh: Callable[[], PreTrainedModel], longest: int
) -> tuple[tuple[str, ...], dict[str, torch.Tensor]]:
    """Ropes whose frequencies depend on the length read it on the host; they are frozen at `longest` positions.

    Returns:
        Sentences for the report, and the buffers as they are at that length. They are computed on a model of their own:
        one in hand may have seen longer rows, and must not be changed.
    """
    notes: list[str] = []
    buffers: dict[str, torch.Tensor] = {}
    modules = [
        (path, module)
        for path, module in fake.named_modules()
        if getattr(module, "rope_type", None) in _LENGTH_DEPENDENT_ROPES
    ]
    real = fresh() if modules else fake
    for path, module in modules:
        kind = module.rope_type
        rotary = real.get_submodule(path)
        rotary(torch.zeros(1, 1, dtype=torch.float32), torch.tensor([[longest - 1]]))
        module.rope_type = "default"
        module.attention_scaling = rotary.attention_scaling
        buffers |= {f"{path}.{name}": value for name, value in rotary.named_buffers()}
        notes.append(
            f"{path}: rope type {kind!r} depends on the length; its frequencies are those of "
            f"max_model_len={longest} tokens at every length."
        )
    return tuple(notes), buffers


def _trace(
    model: PreTrainedModel, facts: Facts, mode: FakeTensorMode, device: torch.device | str
) -> tuple[fx.Graph, list[str], dict[str, torch.Tensor]]:
    ids = token_input(mode, "input_ids", (1, example_tokens(facts.max_model_len)), device)
    with mode:
        positions = torch.empty(ids.shape, dtype=torch.int64, device=device)
    tensors = _tensors(model)
    paths = {module: path for path, module in model.named_modules()}

    def forward(ids: torch.Tensor, positions: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        state = dict(zip(tensors, values, strict=True))
        with _reparametrize_module(model, state, tie_weights=True):
            # No position_ids: the model's own default is the truth (RoBERTa counts from pad + 1), and the pass
            # `positions` finds what counts.
            result = model(input_ids=ids, use_cache=False)
        if getattr(result, "logits", None) is None:
            raise CaptureError(
                f"{type(model).__name__} returns no logits ({type(result).__name__}): hand in a model "
                "with a language-model head, such as a ...ForCausalLM."
            )
        return result.logits

    tracer = make_fx(forward, tracing_mode="real", pre_dispatch=True, record_stack_traces=False)
    try:
        with (
            hooks.installed(lambda m: paths.get(m, type(m).__name__), facts.max_model_len),
            expert_hooks.installed(lambda m: paths.get(m, type(m).__name__)),
            _module_paths(paths),
            _no_collection(),
            mode,
            torch.no_grad(),
            torch.device(device),
        ):
            module = tracer(ids, positions, *tensors.values())
    except FxBackendError:
        raise
    except Exception as error:
        if f"({ids.shape[-1]})" in str(error):  # two sizes that do not fit, and one of them is the token count
            raise CaptureError(
                f"{type(model).__name__} fixes the number of tokens: {_reason(error)}{_where(error)}, "
                f"where {ids.shape[-1]} is the token count. It must work for every number of tokens."
            ) from error
        raise CaptureError(
            f"{type(model).__name__} cannot be captured as one graph: {_reason(error)}{_where(error)}."
        ) from error
    tokens: object = ids.shape[-1]
    if not isinstance(tokens, torch.SymInt) or tokens.node.maybe_as_int() is not None:
        raise CaptureError(
            f"{type(model).__name__} fixes the number of tokens to {tokens}: its forward compares the "
            "token dimension with a constant. It must work for every number of tokens."
        )
    _no_host_reads(module.graph, model)
    _no_silent_guards(mode, model, str(tokens.node.expr), facts.max_model_len)
    constants = {str(node.target): getattr(module, str(node.target)) for node in module.graph.find_nodes(op="get_attr")}
    return module.graph, list(tensors), constants


def _no_host_reads(graph: fx.Graph, model: PreTrainedModel) -> None:
    """A value that was read on the host is a symbol of its own, on which the shapes behind it depend (JetMoE)."""
    for node in graph.nodes:
        if node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            place = (node.meta.get("custom") or {}).get("module", "")
            raise CaptureError(
                f"{type(model).__name__} cannot be captured as one graph: {place or 'its forward'} reads the "
                "value of a tensor on the host (item(), tolist()) and makes shapes of it, which no graph "
                "can hold; it must stay a tensor."
            )


def _no_silent_guards(mode: FakeTensorMode, model: PreTrainedModel, symbol: str, longest: int) -> None:
    """A branch on the token count was decided at trace time; it may not hold for another batch.

    One that holds for every row of 2 to `longest - 1` tokens is the slice of a mask or of a table of `longest` rows.
    The proof of row independence refuses the program if such a slice is still in it when masks and positions are
    rewritten.
    """
    guards = [
        str(guard.expr)
        for guard in mode.shape_env.guards  # type: ignore[union-attr]
        if symbol in str(guard.expr) and not _holds(guard.expr, longest)
    ]
    if guards:
        raise CaptureError(
            f"{type(model).__name__} branches on the number of tokens: {', '.join(guards[:4])} was "
            f"taken as true while tracing ({symbol} is the token count), and need not be for another "
            "batch. Its forward must do the same for every number of tokens."
        )


def _holds(expression: sympy.Basic, longest: int) -> bool:
    (symbol,) = expression.free_symbols
    return all(bool(expression.subs(symbol, length)) for length in range(2, longest))


def _reason(error: BaseException) -> str:
    if type(error).__name__ in _HOST_READS:
        return (
            "its forward reads the value of a tensor on the host (item(), tolist(), a branch on it), which no "
            "graph can hold; it must stay a tensor"
        )
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"


def _where(error: BaseException) -> str:
    """The innermost line of a modeling file in a traceback."""
    place, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if "modeling" in code.co_filename or code.co_name == "forward":
            function = getattr(code, "co_qualname", code.co_name)  # Python 3.11 knows the class
            place = f" (at {code.co_filename.rpartition('/')[2]}:{trace.tb_lineno}, in {function})"
        trace = trace.tb_next
    return place


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, each object once (a tied parameter under its first name)."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@contextmanager
def _no_collection() -> Iterator[None]:
    """Python's garbage collector costs a third of a capture."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def _module_paths(paths: dict[nn.Module, str]) -> Iterator[None]:
    """Lets every traced node carry the path of the innermost module that runs (`meta["custom"]["module"]`)."""
    stack: list[Callable[..., object]] = []

    def enter(module: nn.Module, _inputs: object) -> None:
        if module in paths:
            scope = fx_traceback.annotate({"module": paths[module]})
            scope.__enter__()
            stack.append(scope.__exit__)

    def leave(module: nn.Module, _inputs: object, _output: object) -> None:
        if module in paths:
            stack.pop()(None, None, None)

    handles = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    ]
    try:
        with fx_traceback.preserve_node_meta():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _weight_plan(
    fake: PreTrainedModel, real: nn.Module, frozen: dict[str, torch.Tensor], device: torch.device | str
) -> WeightPlan:
    plan = WeightPlan()
    first: dict[int, str] = {}
    for name, value in fake.named_parameters(remove_duplicate=False):
        if id(value) in first:
            plan.aliases[name] = first[id(value)]
            continue
        first[id(value)] = name
        shape = tuple(value.shape)
        plan.add(Slot(name, shape, value.dtype, (Piece(name),), shape[:1]))
    buffers = {**dict(real.named_buffers()), **frozen}
    persistent = set(real.state_dict())
    for name, _value in fake.named_buffers():
        plan.add_constant(name, buffers[name].detach().to(device, copy=True))
        if name in persistent:
            plan.ignored[name] = "a buffer; its value is computed from the config"
    return plan


def _name_inputs(graph: fx.Graph, names: list[str]) -> None:
    """Placeholders of parameters become `get_attr` nodes; the rest get names of our own."""
    placeholders = graph.find_nodes(op="placeholder")
    for node, name in zip(placeholders, ["input_ids", "positions", *names], strict=True):
        if name in ("input_ids", "positions"):
            node.target = name
            node._rename(name)
        else:
            node.op, node.target = "get_attr", name
    counter = 0
    for node in graph.nodes:
        custom = node.meta.get("custom") or {}
        node.meta = {"val": node.meta.get("val"), "module": custom.get("module", "")} if node.op != "output" else {}
        if node.op == "get_attr":
            node.meta["module"] = str(node.target).rpartition(".")[0]
        if node.op in ("call_function", "get_attr"):
            node._rename(f"fxv_{counter}")
            counter += 1
