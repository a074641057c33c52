"""Every adapter around a vLLM layer computes what the reference body of its op says."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import (
    CacheConfig,
    CompilationConfig,
    DeviceConfig,
    ModelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.parallel_state import (
    cleanup_dist_env_and_memory,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from fxbackend import ops
from fxbackend.errors import LoweringError
from fxbackend.targets.vllm import layers

TOKENS, WIDTH, BLOCK = 11, 64, 32


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmConfig]:
    """One rank of the engine's own parallel state, and the config its layers read: eager, so with vLLM's kernels."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder: Path = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": WIDTH,
                "intermediate_size": 128,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "num_hidden_layers": 1,
                "vocab_size": 100,
                "max_position_embeddings": 128,
                "head_dim": 32,
            }
        )
    )
    model = ModelConfig(model=str(folder), dtype="float32", max_model_len=128, skip_tokenizer_init=True)
    made = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=BLOCK),
        device_config=DeviceConfig("cpu"),
        compilation_config=CompilationConfig(mode=0, custom_ops=["all"]),
    )
    with set_current_vllm_config(made):
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield made
    cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def current(config: VllmConfig) -> Iterator[None]:
    """Seeds, forgets the attention layers of other tests, switches gradients off."""
    torch.manual_seed(0)
    config.compilation_config.static_forward_context.clear()
    with torch.no_grad():
        yield


def finish(module: torch.nn.Module) -> None:
    """What the engine does to every layer once the weights are in."""
    for each in module.modules():
        method = getattr(each, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(each)


def test_embedding_equals_a_table_lookup() -> None:
    table, ids = torch.randn(100, WIDTH), torch.randint(0, 100, (TOKENS,))
    for replicated in (False, True):
        adapter = layers.Embedding(100, WIDTH, replicated=replicated)
        adapter.load("weight", table)
        finish(adapter)
        assert torch.equal(adapter(ids), ops.embedding(ids, table))


@pytest.mark.parametrize("mode", ["replicated", "column", "row"])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_product(mode: str, bias: bool) -> None:
    weight, offset, x = torch.randn(48, WIDTH), torch.randn(48), torch.randn(TOKENS, WIDTH)
    adapter = layers.Linear(WIDTH, 48, bias=bias, mode=mode)
    adapter.load("weight", weight)
    if bias:
        adapter.load("bias", offset)
    finish(adapter)
    torch.testing.assert_close(adapter(x), ops.linear(x, weight, offset if bias else None))


@pytest.mark.parametrize("mode", ["replicated", "column"])
def test_stacked_linear_is_filled_section_by_section(mode: str) -> None:
    parts, offsets = [torch.randn(32, WIDTH), torch.randn(16, WIDTH)], [torch.randn(32), torch.randn(16)]
    x = torch.randn(TOKENS, WIDTH)
    adapter = layers.Linear(WIDTH, 48, bias=True, mode=mode, sections=(32, 16))
    for section, (weight, offset) in enumerate(zip(parts, offsets, strict=True)):
        adapter.load("weight", weight, section)
        adapter.load("bias", offset, section)
    finish(adapter)
    torch.testing.assert_close(adapter(x), ops.linear(x, torch.cat(parts), torch.cat(offsets)))


def test_linear_refuses_what_vllm_cannot_split() -> None:
    with pytest.raises(LoweringError, match="'row' with 2 sections"):
        layers.Linear(WIDTH, 48, mode="row", sections=(24, 24))
    with pytest.raises(LoweringError, match="do not sum"):
        layers.Linear(WIDTH, 48, mode="column", sections=(24, 23))


@pytest.mark.parametrize("v_head_size", [32, 16])
@pytest.mark.parametrize("stacked", [False, True])
def test_qkv_equals_the_split_product(v_head_size: int, stacked: bool) -> None:
    sizes = [4 * 32, 2 * 32, 2 * v_head_size]
    weight, offset, x = torch.randn(sum(sizes), WIDTH), torch.randn(sum(sizes)), torch.randn(TOKENS, WIDTH)
    adapter = layers.QKV(WIDTH, 4, 2, 32, v_head_size, bias=True)
    if stacked:
        adapter.load("weight", weight)
        adapter.load("bias", offset)
    else:
        for section, (rows, values) in enumerate(zip(weight.split(sizes), offset.split(sizes), strict=True)):
            adapter.load("weight", rows, section)
            adapter.load("bias", values, section)
    finish(adapter)
    for ours, theirs in zip(adapter(x), ops.qkv(x, weight, offset, *sizes), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("activation", sorted(ops.ACTIVATIONS))
def test_glu_equals_the_gated_product(activation: str) -> None:
    x = torch.randn(TOKENS, 96)
    torch.testing.assert_close(layers.GLU(activation)(x), ops.glu(x, activation))


def test_glu_refuses_an_unknown_activation() -> None:
    with pytest.raises(LoweringError, match="relu2"):
        layers.GLU("relu2")


NORMS = [
    (0.0, "before", True),
    (0.0, "after", True),
    (1.0, "after", True),
    (1.0, "before", True),
    (0.0, "before", False),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("offset", "cast", "weighted"), NORMS)
@pytest.mark.parametrize("shape", [(TOKENS, WIDTH), (TOKENS, 4, WIDTH)])
def test_rms_norm_equals_the_reference_in_every_dtype(
    dtype: torch.dtype, offset: float, cast: str, weighted: bool, shape: tuple[int, ...]
) -> None:
    weight = torch.randn(WIDTH, dtype=dtype) if weighted else None
    x = torch.randn(shape, dtype=dtype) * 3
    adapter = layers.RMSNorm(WIDTH, 1e-5, offset=offset, cast=cast, weighted=weighted, dtype=dtype)
    if weight is not None:
        adapter.load("weight", weight)
    assert torch.equal(adapter(x), ops.rms_norm(x, weight, 1e-5, offset, cast))


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("offset", "cast", "weighted"), NORMS)
def test_add_rms_norm_equals_the_reference(offset: float, cast: str, weighted: bool, inplace: bool) -> None:
    weight = torch.randn(WIDTH) if weighted else None
    x, residual = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, WIDTH)
    before = x.clone(), residual.clone()
    adapter = layers.AddRMSNorm(WIDTH, 1e-5, offset=offset, cast=cast, weighted=weighted, inplace=inplace)
    if weight is not None:
        adapter.load("weight", weight)
    y, total = adapter(x, residual)
    y_reference, total_reference = ops.add_rms_norm(*before, weight, 1e-5, offset, cast)
    torch.testing.assert_close(y, y_reference)
    assert torch.equal(total, total_reference)
    if not inplace:
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_add_rms_norm_normalises_the_sum_before_it_is_rounded(dtype: torch.dtype) -> None:
    """The one known difference: vLLM keeps the float32 sum, Hugging Face rounds it first."""
    weight, x, residual = (torch.randn(shape, dtype=dtype) for shape in ((WIDTH,), (TOKENS, WIDTH), (TOKENS, WIDTH)))
    adapter = layers.AddRMSNorm(WIDTH, 1e-5, dtype=dtype)
    adapter.load("weight", weight)
    y, total = adapter(x, residual)
    wide = ops.rms_norm(x.float() + residual.float(), None, 1e-5, 0.0, "before").to(dtype) * weight
    assert torch.equal(y, wide)
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [32, 16, 12])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("kernel", [False, True])
def test_rope_equals_the_reference_over_any_table(interleaved: bool, rotated: int, inplace: bool, kernel: bool) -> None:
    table = torch.randn(128, rotated)
    positions = torch.randint(0, 128, (TOKENS,))
    both = torch.randn(TOKENS, 6 * 32)
    q, k = both[:, :128].view(TOKENS, 4, 32), both[:, 128:].view(TOKENS, 2, 32)
    q_reference, k_reference = ops.rope_qk(q, k, positions, table, interleaved)
    adapter = layers.Rope(32, table, interleaved=interleaved, inplace=inplace)
    if not kernel:  # the form that compiled graphs contain
        adapter.layer._forward_method = adapter.layer.forward_native
    before = both.clone()
    q_out, k_out = adapter(positions, q, k)
    torch.testing.assert_close(q_out, q_reference)
    torch.testing.assert_close(k_out, k_reference)
    assert torch.equal(both, before) is not (inplace and kernel)
    x = before[:, :128].view(TOKENS, 4, 32)
    x_reference = ops.rope(x, positions, table, interleaved)
    torch.testing.assert_close(adapter(positions, x), x_reference)


def run_attention(
    config: VllmConfig,
    adapter: layers.Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[int, ...],
    done: tuple[int, ...],
) -> torch.Tensor:
    """Runs a batch through the paged cache: first the `done` tokens of each sequence, then the rest."""
    name = adapter.layer.layer_name
    spec = adapter.layer.get_kv_cache_spec(config)
    blocks = [-(-length // BLOCK) for length in lengths]
    adapter.layer.kv_cache = torch.zeros(
        sum(blocks) + 1, adapter.layer.num_kv_heads, BLOCK, 2 * adapter.layer.head_size
    )
    table = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
    start = 1
    for row, count in enumerate(blocks):
        table[row, :count] = torch.arange(start, start + count)
        start += count
    builder = adapter.layer.get_attn_backend().get_builder_cls()(spec, [name], config, torch.device("cpu"))
    begins = [sum(lengths[:row]) for row in range(len(lengths))]
    out = torch.full((q.shape[0], q.shape[1], v.shape[2]), float("nan"))
    for first, last in ((tuple(0 for _ in lengths), done), (done, lengths)):
        spans = [(b + f, b + e, f) for b, f, e in zip(begins, first, last, strict=True)]
        counts = [end - begin for begin, end, _ in spans]
        if not all(counts):
            continue
        index = torch.cat([torch.arange(begin, end) for begin, end, _ in spans])
        slots = torch.cat(
            [
                table[row, position // BLOCK].long() * BLOCK + position % BLOCK
                for row, (begin, end, f) in enumerate(spans)
                for position in [torch.arange(f, f + end - begin)]
            ]
        )
        loc = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        metadata = builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=loc,
                query_start_loc_cpu=loc,
                seq_lens=torch.tensor(last, dtype=torch.int32),
                num_reqs=len(lengths),
                num_actual_tokens=len(index),
                max_query_len=max(counts),
                max_seq_len=max(last),
                block_table_tensor=table,
                slot_mapping=slots,
            ),
        )
        with set_forward_context({name: metadata}, config, slot_mapping={name: slots}):
            out[index] = adapter(q[index], k[index], v[index])
    return out


ATTENTIONS = [
    {"case": "full"},
    {"case": "window", "window": 5},
    {"case": "window of one block and more", "window": 33},
    {"case": "cap", "softcap": 2.0},
    {"case": "sinks", "sinks": True},
    {"case": "head size 20", "head_size": 20},
    {"case": "narrow values", "v_head_size": 16},
    {"case": "wide values", "v_head_size": 48},
    {"case": "all", "window": 7, "softcap": 3.0, "sinks": True, "head_size": 24, "v_head_size": 12},
]


@pytest.mark.parametrize("options", ATTENTIONS, ids=lambda each: each["case"])
@pytest.mark.parametrize("whole_model_window", [None, 4])
def test_attention_equals_the_reference_over_a_paged_cache(
    config: VllmConfig, options: dict[str, object], whole_model_window: int | None
) -> None:
    options = {key: value for key, value in options.items() if key != "case"}
    head_size, v_head_size = options.pop("head_size", 32), options.pop("v_head_size", None)
    v_head_size = v_head_size or head_size
    lengths, done = (40, 9, 70), (33, 8, 30)
    q = torch.randn(sum(lengths), 4, head_size) * 2
    k = torch.randn(sum(lengths), 2, head_size) * 2
    v = torch.randn(sum(lengths), 2, v_head_size)
    sinks = torch.randn(4) if options.get("sinks") else None
    cache_config = copy.copy(config.cache_config)
    cache_config.sliding_window = whole_model_window
    adapter = layers.Attention(
        4, 2, head_size, v_head_size, scale=0.3, cache_config=cache_config, name="layers.0.attn", **options
    )
    if sinks is not None:
        adapter.load("sinks", sinks)
    with ops.sequences(lengths):
        expected = ops.attention(q, k, v, sinks, 0.3, options.get("window", 0), options.get("softcap", 0.0))
    torch.testing.assert_close(run_attention(config, adapter, q, k, v, lengths, done), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_lm_head_equals_the_product_without_padding(tied: bool, bias: bool) -> None:
    table, offset, x = torch.randn(100, WIDTH), torch.randn(100), torch.randn(3, WIDTH)
    embedding = layers.Embedding(100, WIDTH)
    embedding.load("weight", table)
    head = layers.LMHead(100, WIDTH, bias=bias, tied=embedding if tied else None)
    if tied:
        assert head.layer.weight is embedding.layer.weight
    else:
        head.load("weight", table)
    if bias:
        head.load("bias", offset)
    finish(embedding)
    finish(head)
    torch.testing.assert_close(head(x), ops.lm_head(x, table, offset if bias else None))


def test_collectives_of_one_rank_are_the_identity() -> None:
    x = torch.randn(TOKENS, WIDTH)
    assert torch.equal(layers.all_reduce(x), x)
    assert torch.equal(layers.all_gather(x, 1), x)
