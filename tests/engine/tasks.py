"""What runs inside a child of the warmed process: an engine, and Transformers beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from fxbackend.hf import tiny
from fxbackend.printer import op_counts
from fxbackend.report import Report

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

LENGTH = 64
# Blocks and batches so small that prompts are prefilled in chunks, and shared prefixes fill blocks of the cache.
ENGINE = {
    "model_impl": "transformers",
    "dtype": "float32",
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": LENGTH,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_logprobs": -1,
    "block_size": 32,
    "max_num_batched_tokens": 20,
    "enable_prefix_caching": True,
}
PROMPTS = ([5, 9, 33], list(range(3, 40)), [7, 8, 11] * 6)
AGAIN = (list(range(3, 37)) + [90, 91], list(range(3, 40)), [44])  # begin as prompts before them: cached prefixes


@dataclass
class Generated:
    """Tokens, how many of each prompt came from the cache, and log-probabilities `[rows, vocabulary]`.

    A request has a row per token but the first: those of the prompt (where they were asked for), then the new ones.
    """

    tokens: list[list[int]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    logprobs: list[torch.Tensor] = field(default_factory=list)


@dataclass
class Compared:
    """How far an engine and Transformers are apart.

    Attributes:
        worst: the largest difference of any log-probability of any token of the vocabulary, at any place.
        greedy: whether each generated token is the best one of Transformers.
        cached: tokens that came from the prefix cache.
        served_by: name of the model class in the engine.
        report: of the conversion, as text.
        plain: notes of the report on ops that have no layer.
        ops: how often each op occurs in the lowered program.
    """

    worst: float
    greedy: bool
    cached: int
    served_by: str
    report: str
    plain: tuple[str, ...]
    ops: dict[str, int]


def start(directory: str, **changes: object) -> LLM:
    """An engine on a directory."""
    from vllm import LLM

    if changes.get("enforce_eager", True):
        torch._dynamo.config.disable = True  # the kernel that ranks log-probabilities takes 3 s to compile
    return LLM(model=directory, **{**ENGINE, **changes})  # type: ignore[arg-type]


def generate(
    llm: LLM, prompts: Sequence[list[int]], count: int = 8, everything: bool = True, prompt_rows: bool = True
) -> Generated:
    """Greedy tokens, with the log-probabilities of the whole vocabulary where `everything` is asked for."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0,
        max_tokens=count,
        detokenize=False,
        ignore_eos=True,
        logprobs=-1 if everything else None,
        prompt_logprobs=-1 if everything and prompt_rows else None,
    )
    done = Generated()
    for output in llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False):
        done.tokens.append(list(output.outputs[0].token_ids))
        done.cached.append(output.num_cached_tokens or 0)
        if everything:
            done.logprobs.append(_rows(output))
    return done


def _rows(output: RequestOutput) -> torch.Tensor:
    rows = [row for row in output.prompt_logprobs or () if row is not None] + list(output.outputs[0].logprobs or ())
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])


def compare(directory: str, **changes: object) -> Compared:
    """An engine on a tiny model against Transformers: mixed lengths in one batch, chunked prefill, cached prefixes."""
    llm = start(directory, **changes)
    first = generate(llm, PROMPTS)
    second = generate(llm, AGAIN, prompt_rows=False)
    model = reference(directory)
    worst, greedy = 0.0, True
    for prompts, done in ((PROMPTS, first), (AGAIN, second)):
        for prompt, tokens, rows in zip(prompts, done.tokens, done.logprobs, strict=True):
            expected = tiny.hf_logits(model, torch.tensor(prompt + tokens)).log_softmax(-1)
            worst = max(worst, float((expected[-1 - len(rows) : -1] - rows).abs().max()))
            greedy &= expected[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    served_by, report, ops = llm.apply_model(look)[0]
    plain = tuple(note for note in report.notes if "plain torch body" in note)
    return Compared(worst, greedy, sum(second.cached), served_by, str(report), plain, ops)


def look(model: Any) -> tuple[str, Report, dict[str, int]]:
    """What the engine's model says of itself, on one rank."""
    return type(model).__name__, model.fxbackend_report, op_counts(model.fxbackend_program)


def reference(directory: str) -> Any:
    """Transformers' model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()


def tokens(directory: str, count: int = 8, **changes: object) -> list[list[int]]:
    """Greedy tokens of the prompts."""
    return generate(start(directory, **changes), PROMPTS, count, everything=False).tokens


@dataclass
class Compiled:
    """A compiled engine: tokens, log-probabilities, and what the compilers counted."""

    tokens: list[list[int]]
    logprobs: list[torch.Tensor]
    key: str
    graphs: int
    breaks: int
    saved: int
    loaded: int


def compiled(directory: str, without: str | None = None, **changes: object) -> Compiled:
    """Runs compiled, with the default pipeline or that without one pass."""
    from vllm.compilation.counter import compilation_counter as counter

    with pipeline_without(without):
        llm = start(directory, enforce_eager=False, **changes)
    counts = torch._dynamo.utils.counters
    graphs = counts["stats"]["unique_graphs"]  # after the warm-up; the kernel that ranks log-probabilities comes later
    done = generate(llm, PROMPTS)
    return Compiled(
        done.tokens,
        done.logprobs,
        key(llm),
        graphs,
        len(counts["graph_break"]),
        counter.num_aot_artifacts_saved,
        counter.num_aot_artifacts_loaded,
    )


@contextmanager
def pipeline_without(name: str | None) -> Iterator[None]:
    """The engine converts without one pass."""
    from fxbackend.pipelines import default_pipeline
    from fxbackend.targets.vllm import model

    before = model.default_pipeline
    model.default_pipeline = lambda: default_pipeline() if name is None else default_pipeline().without(name)
    try:
        yield
    finally:
        model.default_pipeline = before


def key(llm: LLM) -> str:
    """What vLLM's cache of compiled code would call this engine."""
    from vllm.compilation.caching import aot_compile_hash_factors

    return str(aot_compile_hash_factors(llm.llm_engine.vllm_config))


def key_of(directory: str, without: str | None = None) -> str:
    """The same, without compiling."""
    with pipeline_without(without):
        return key(start(directory))


def served_by(directory: str, without: str | None = None, **changes: object) -> tuple[str, str, list[list[int]]]:
    """Name and module of the class that serves a directory, and greedy tokens."""
    with pipeline_without(without):
        llm = start(directory, **changes)
    name, module = llm.apply_model(name_of)[0]
    return name, module, generate(llm, PROMPTS, everything=False).tokens


def name_of(model: Any) -> tuple[str, str]:
    """Of a model's class."""
    return type(model).__name__, type(model).__module__


def error_of(directory: str, without: str | None = None, **changes: object) -> str:
    """What the start of an engine raises."""
    try:
        served_by(directory, without, **changes)
    except Exception as error:
        causes = []
        cause: BaseException | None = error
        while cause is not None:
            causes.append(f"{type(cause).__name__}: {cause}")
            cause = cause.__cause__ or cause.__context__
        return "\n".join(causes)
    return "no error"


def own_class(**changes: object) -> float:
    """A user's class that is in no hub, through `Converted.to_vllm`: the worst difference of log-probabilities."""
    import fxbackend
    from tests import own_model

    model = own_model.OwnForCausalLM(own_model.OwnConfig(head_dim=32, hidden_size=128, max_position_embeddings=LENGTH))
    tiny.randomise(model.eval())
    arguments = {name: value for name, value in ENGINE.items() if name != "model_impl"}
    torch._dynamo.config.disable = True
    done = generate(fxbackend.convert(model).to_vllm(**{**arguments, **changes}), PROMPTS)
    worst = 0.0
    for prompt, tokens, rows in zip(PROMPTS, done.tokens, done.logprobs, strict=True):
        expected = tiny.hf_logits(model, torch.tensor(prompt + tokens)).log_softmax(-1)[:-1]
        worst = max(worst, float((expected - rows).abs().max()))
    return worst


def saved(source: str, directory: str) -> None:
    """Converts a directory and saves the program."""
    import fxbackend

    fxbackend.convert(source, max_model_len=LENGTH).save(directory)


def peak(directory: str, **changes: object) -> int:
    """Bytes of memory that starting an engine takes at its peak, above what the process had before."""
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the high-water mark starts anew
    before = _resident("VmRSS")
    start(directory, **changes)
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(f"{name}:"))


# Layers of vLLM that compute; the linears are one kind, whichever way they would be split.
_KINDS = {
    "ReplicatedLinear": "linear",
    "RowParallelLinear": "linear",
    "QKVParallelLinear": "qkv",
    "MergedColumnParallelLinear": "gate_up",
    "RMSNorm": "norm",
    "RotaryEmbedding": "rope",
    "Attention": "attention",
    "SiluAndMul": "act_and_mul",
    "VocabParallelEmbedding": "embedding",
    "ParallelLMHead": "head",
}
_calls: dict[str, int] = {}


def layer_calls(directory: str, **changes: object) -> dict[str, int]:
    """How often each kind of layer of vLLM runs in one forward of the body."""
    llm = start(directory, **changes)
    llm.apply_model(_count)
    generate(llm, PROMPTS[:1], count=1, everything=False)
    return dict(sorted(_calls.items()))


def _count(model: Any) -> None:
    def hook(module: Any, _inputs: object, _output: object) -> None:
        kind = _KINDS[type(module).__name__]
        _calls[kind] = _calls.get(kind, 0) + 1

    for module in model.modules():
        if type(module).__name__ in _KINDS and type(module).__module__.startswith("vllm."):
            module.register_forward_hook(hook)


@dataclass
class Written:
    """A prompt, what was generated, and the log-probabilities of it by the engine and by Transformers."""

    tokens: list[int]
    greedy: bool
    worst: float
    cached: int


def written(directory: str, prompts: Sequence[str], count: int, **changes: object) -> list[Written]:
    """Greedy text of a real model, token by token against Transformers."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams

    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [tokenizer(prompt).input_ids for prompt in prompts]
    llm = start(directory, **{"max_model_len": 512, "max_logprobs": 1, **changes})
    params = SamplingParams(temperature=0, max_tokens=count, detokenize=False, ignore_eos=True, logprobs=1)
    outputs = llm.generate([{"prompt_token_ids": each} for each in ids], params, use_tqdm=False)
    model, done = reference(directory), []
    for prompt, output in zip(ids, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        expected = tiny.hf_logits(model, torch.tensor(prompt + tokens)).log_softmax(-1)[len(prompt) - 1 : -1]
        rows = zip(output.outputs[0].logprobs, tokens, strict=True)
        given = torch.tensor([row[token].logprob for row, token in rows])
        worst = float((expected[torch.arange(len(tokens)), tokens] - given).abs().max())
        done.append(Written(tokens, expected.argmax(-1).tolist() == tokens, worst, output.num_cached_tokens or 0))
    return done
