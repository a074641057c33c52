"""The model class that vLLM builds: a lowered program, compiled as one graph, and its head."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import fx, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.sequence import IntermediateTensors

from fxbackend.dump import observers_from_settings
from fxbackend.errors import FxBackendError, InputError
from fxbackend.hf.checkpoint import Checkpoint
from fxbackend.hf.source import Source, open_source
from fxbackend.observers import Observer
from fxbackend.pipelines import default_pipeline, parallel_pipeline
from fxbackend.program import Program, shape_of, value_of
from fxbackend.report import Report
from fxbackend.saved import MODEL_TYPE
from fxbackend.serialize import load_program, program_hash
from fxbackend.split import split
from fxbackend.targets.vllm import layers
from fxbackend.targets.vllm.builders import BUILDERS
from fxbackend.targets.vllm.lowering import PartLowering, Shared, check, lowered_program, number_attentions
from fxbackend.targets.vllm.weights import Loader

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger("vllm.fxbackend")
dialect = torch.ops.fxbackend

_KEY = "fxbackend_program"  # in the engine's additional config, which is part of every key of its compile caches
_FORMATS = ("auto", "safetensors")


@dataclass(frozen=True)
class Conversion:
    """A model before it is cut for the ranks.

    Attributes:
        program: at FUSED, over all ranks.
        names: names of the plan by names of the checkpoint, None for what is skipped; others stay as they are.
    """

    program: Program
    names: Mapping[str, str | None]


def convert(model_config: ModelConfig, observers: Iterable[Observer] = (), load_format: str = "auto") -> Conversion:
    """Converts the model of an engine config, on fake tensors and without weights.

    Raises:
        FxBackendError: the model cannot be converted; the message says where and why.
    """
    if model_config.hf_config.model_type == MODEL_TYPE:
        program = _saved(model_config)  # vLLM reads the file of its constants as well
        conversion = Conversion(program, dict.fromkeys(program.weights.constants))
    else:
        with _float32():
            conversion = _from_source(model_config, tuple(observers), load_format)
    check(conversion.program, BUILDERS)
    return conversion


def _saved(model_config: ModelConfig) -> Program:
    program = load_program(model_config.model)
    facts, asked = program.facts, (model_config.dtype, model_config.max_model_len)
    if facts.dtype != asked[0] or facts.max_model_len < asked[1]:
        raise InputError(
            f"{model_config.model} holds a program saved for {facts.dtype} and max_model_len={facts.max_model_len}; "
            f"the engine was asked for {asked[0]} and max_model_len={asked[1]}: convert the model again for these."
        )
    return program


def _from_source(model_config: ModelConfig, observers: tuple[Observer, ...], load_format: str) -> Conversion:
    config, directory = model_config.hf_config, Path(model_config.model)
    if getattr(config, "auto_map", None):  # the class lies beside the weights
        source = open_source(model_config.model, model_config.dtype, model_config.trust_remote_code)
    else:
        source = open_source(config, model_config.dtype)
    checkpoint = Checkpoint.of(directory) if load_format in _FORMATS and _has_safetensors(directory) else None
    source = Source(source.model_class, config, model_config.dtype, directory=directory, state=checkpoint)
    captured, state = source.captured(model_config.max_model_len)
    names: dict[str, str | None] = dict.fromkeys(checkpoint or ())
    if isinstance(state, Checkpoint):
        names |= {inner: name for name, (_, inner) in state.places.items()}
    return Conversion(default_pipeline().run(captured, observers), names)


def _has_safetensors(directory: Path) -> bool:
    return directory.is_dir() and any(directory.glob("*.safetensors"))


@contextmanager
def _float32() -> Iterator[None]:
    """Forwards of Transformers make their constants in float32, while vLLM builds models under the model's dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "intermediate_tensors": 0})
class Decoder(nn.Module):
    """The body of this pipeline stage, compiled as one graph."""

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", body: fx.GraphModule, entering: tuple[str, ...], last: bool
    ) -> None:
        super().__init__()
        self.body, self.entering, self.last = body, entering, last

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        entering = [intermediate_tensors[name] for name in self.entering] if intermediate_tensors is not None else []
        results = self.body(input_ids, positions, *entering)
        if self.last:
            return results[0]
        return IntermediateTensors({f"hidden_{index}": value for index, value in enumerate(results)})


class FxbackendForCausalLM(nn.Module, SupportsPP):
    """A causal language model from the hub or from a saved program.

    Its name differs from vLLM's own generic class on purpose: vLLM compares names to decide on latent attention.

    Attributes:
        fxbackend_report: what the conversion did, on this rank.
        fxbackend_program: the lowered program, for printing.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config, parallel = vllm_config.model_config, vllm_config.parallel_config
        name = next(iter(config.architectures or ()), type(self).__name__)
        observers = observers_from_settings(name, parallel.rank, parallel.world_size)
        try:
            conversion = convert(config, observers, str(vllm_config.load_config.load_format))
        except FxBackendError as error:
            hint = "To let vLLM's own backend serve this model, set FXBACKEND_FALLBACK=1."
            raise type(error)(f"{error} {hint}") from error
        program = _parallel(conversion.program, observers)
        _set_geometry(config, conversion.program)
        lowered = self._build(vllm_config, prefix, program)
        for observer in observers:
            observer.before_pass(program, "lower")
            observer.after_pass(lowered, lowered.history[-1])
        self.loader = Loader(program.weights, self._receivers, conversion.names)
        self.fxbackend_program = lowered
        self.fxbackend_report = Report.of(lowered, parallel=program)
        if parallel.rank == 0:
            logger.info("fxbackend serves %s", self.fxbackend_report.summary())

    def _build(self, vllm_config: VllmConfig, prefix: str, program: Program) -> Program:
        started = time.perf_counter()
        parts, group = split(program), get_pp_group()
        stage = parts.stages[group.rank_in_group]
        shared = Shared(program, vllm_config)
        body = PartLowering(shared, stage, BUILDERS).run()
        self._entering = {
            str(node.target): value_of(node)
            for node in stage.graph.find_nodes(op="placeholder")
            if node.target not in ("input_ids", "positions")
        }
        _set_key(vllm_config, program, body)
        self.decoder = Decoder(
            vllm_config=vllm_config, prefix=prefix, body=body, entering=tuple(self._entering), last=group.is_last_rank
        )
        lowered = [body]
        if group.is_last_rank:
            head = PartLowering(shared, parts.head, BUILDERS).run()
            self.lm_head, self.tail = _head_and_tail(head)
            lowered.append(head)
        self._receivers = shared.receivers
        return lowered_program(shared, lowered, started)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens, for features of the engine that feed embeddings."""
        for module in self.decoder.body.modules():
            if isinstance(module, layers.Embedding):
                return module(input_ids)
        raise InputError("this pipeline stage has no vocabulary embedding.")

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """Buffers for what the stage before sends."""
        return IntermediateTensors(
            {
                name: torch.zeros((batch_size, *value.shape[1:]), dtype=value.dtype, device=device)
                for name, value in self._entering.items()
            }
        )

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """What the head reads, or what goes to the next stage."""
        if inputs_embeds is not None:
            raise InputError("prompts given as embeddings are not supported: give token ids.")
        return self.decoder(input_ids, positions, intermediate_tensors)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The head, for sampled rows only; None where the platform gathers logits on another rank."""
        logits = self.lm_head(hidden_states)
        if logits is None or self.tail is None:
            return logits
        return self.tail(hidden_states, logits)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Streams a checkpoint into the slots.

        Raises:
            WeightError: tensors are missing or unexpected; all of them are listed.
        """
        self.loader.load(weights)
        return {name for name, _ in self.named_parameters()}


def _parallel(program: Program, observers: list[Observer]) -> Program:
    """The program of this tensor-parallel rank, cut where vLLM splits its layers."""
    world, rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    stages = get_pp_group().world_size
    count = len(program.calls(dialect.attention.default))
    borders = [get_pp_indices(count, stage, stages) for stage in range(stages)]
    layers_per_stage = tuple(end - start for start, end in borders)
    program = parallel_pipeline(world, rank, layers_per_stage).run(program, observers)
    number_attentions(program)
    return program


def _set_key(config: VllmConfig, program: Program, body: fx.GraphModule) -> None:
    """Makes the keys of the engine's compile caches those of this very program, and of how it was lowered."""
    if not isinstance(config.additional_config, dict):
        raise InputError("additional_config must be a dict: the program's key is put into it.")
    parts = [program_hash(program), version("fxbackend"), body.code]
    for path, module in body.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, (bool, int, float, str, tuple))}
        parts.append(f"{path} {type(module).__qualname__} {sorted(plain.items())}")
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    config.additional_config = {**config.additional_config, _KEY: key}


def _set_geometry(config: ModelConfig, program: Program) -> None:
    """Heads and layers as the graph has them; vLLM read them off the config."""
    attentions = program.calls(dialect.attention.default)
    queries, keys = ([shape_of(node.args[index]) for node in attentions] for index in (0, 1))  # type: ignore[arg-type]
    if attentions:
        config.model_arch_config = dataclasses.replace(
            config.model_arch_config,
            total_num_attention_heads=max(int(shape[1]) for shape in queries),
            total_num_kv_heads=max(int(shape[1]) for shape in keys),
            head_size=max(int(shape[2]) for shape in queries),
            total_num_hidden_layers=len(attentions),
        )


def _head_and_tail(head: fx.GraphModule) -> tuple[nn.Module, fx.GraphModule | None]:
    """The vocabulary projection, and what follows it as a module of `(hidden_states, logits)`, None for nothing."""
    (call,) = (
        node
        for node in head.graph.nodes
        if node.op == "call_module" and isinstance(head.get_submodule(node.target), layers.LMHead)
    )
    projection = head.get_submodule(call.target)
    (out,) = head.graph.find_nodes(op="output")
    if out.all_input_nodes == [call]:
        return projection, None
    graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in head.graph.nodes:
        if node.op == "output":
            graph.output(mapping[node.all_input_nodes[0]])
        elif node is call:
            mapping[node] = graph.placeholder("logits")
        else:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
    return projection, fx.GraphModule(head, graph)
