"""One adapter around a vLLM layer per op of the dialect: what a lowered program calls.

An adapter takes plain arguments (sizes over all ranks, unless it says otherwise), computes what the op's reference
body says, and takes its weights through `load`, which leaves the slicing by rank to vLLM. Two vLLM layers write into
their operands (residual norm, rotary embedding); their adapters copy first unless `inplace` says that nothing else
reads those operands or the buffers behind them.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from vllm import ir
from vllm.config import CacheConfig, get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.attention import Attention as VllmAttention
from vllm.model_executor.layers.layernorm import GemmaRMSNorm
from vllm.model_executor.layers.layernorm import RMSNorm as VllmRMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import QuantizationConfig
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.attention.selector import get_attn_backend

from fxbackend.errors import LoweringError
from fxbackend.ops.norm import rms_norm

_QKV = ("q", "k", "v")
# Head sizes that some attention backend has; the CPU backend has these and no others.
_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


class Adapter(nn.Module):
    """What a lowered program calls in place of an op."""

    def load(self, name: str, value: torch.Tensor, section: int | None = None) -> None:
        """Fills a weight from a whole tensor, over all ranks."""
        raise LoweringError(f"{type(self).__name__} has no weight {name!r}.")


class Embedding(Adapter):
    """`embedding`: a vocabulary table split by rank, or any other table held whole (`replicated`)."""

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        replicated: bool = False,
        dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.layer = VocabParallelEmbedding(
            rows, width, params_dtype=dtype, quant_config=quant_config, prefix=prefix, disable_tp=replicated
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(ids)

    def load(self, name: str, value: torch.Tensor, section: int | None = None) -> None:
        """Fills the rank's rows from the whole table."""
        self.layer.weight_loader(getattr(self.layer, name), value)


class Linear(Adapter):
    """`linear`, held whole (`replicated`), split by output (`column`) or by input (`row`).

    Args:
        sections: output sizes of the projections stacked in the weight, for a `column` or `replicated` one.
        reduce: whether a `row` one sums over ranks itself. Otherwise it must have no bias, and the sum is the
            program's own `all_reduce`.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        mode: str = "replicated",
        sections: tuple[int, ...] = (),
        reduce: bool = True,
        dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        common = {
            "bias": bias,
            "params_dtype": dtype,
            "quant_config": quant_config,
            "prefix": prefix,
            "return_bias": False,
        }
        stacked = len(sections) > 1
        if stacked and sum(sections) != outputs:
            raise LoweringError(f"{prefix}: sections {sections} do not sum to {outputs} outputs.")
        self.layer: LinearBase
        if stacked and mode in ("column", "replicated"):
            self.layer = MergedColumnParallelLinear(inputs, list(sections), disable_tp=mode == "replicated", **common)
        elif mode == "replicated":
            self.layer = ReplicatedLinear(inputs, outputs, **common)
        elif mode == "column":
            self.layer = ColumnParallelLinear(inputs, outputs, **common)
        elif mode == "row" and not stacked:
            self.layer = RowParallelLinear(inputs, outputs, reduce_results=reduce, **common)
        else:
            raise LoweringError(f"{prefix}: no vLLM linear layer is split as {mode!r} with {len(sections)} sections.")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def load(self, name: str, value: torch.Tensor, section: int | None = None) -> None:
        """Fills `weight` or `bias`, or one section of it, from the whole tensor."""
        param = getattr(self.layer, name)
        if section is None or not isinstance(self.layer, MergedColumnParallelLinear):
            param.weight_loader(param, value)
        else:
            param.weight_loader(param, value, section)


class QKV(Adapter):
    """`qkv`: the stacked projection, split by heads; fewer key heads than ranks are held by several ranks each."""

    def __init__(
        self,
        inputs: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        v_head_size: int | None = None,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        replicated: bool = False,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.layer = QKVParallelLinear(
            inputs,
            head_size,
            heads,
            kv_heads,
            bias=bias,
            params_dtype=dtype,
            quant_config=quant_config,
            prefix=prefix,
            return_bias=False,
            disable_tp=replicated,
            v_head_size=v_head_size,
        )
        layer = self.layer
        self.sizes = [
            layer.num_heads * layer.head_size,
            layer.num_kv_heads * layer.head_size,
            layer.num_kv_heads * layer.v_head_size,
        ]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.layer(x).split(self.sizes, dim=-1)
        return q, k, v

    def load(self, name: str, value: torch.Tensor, section: int | None = None) -> None:
        """Fills q (section 0), k (1) or v (2), or all three from one stacked tensor."""
        param = getattr(self.layer, name)
        if section is None:
            param.weight_loader(param, value)
        else:
            param.weight_loader(param, value, _QKV[section])


class GLU(Adapter):
    """`glu`: the gated unit over a stacked `[gate, up]`."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        if activation == "silu":
            self.layer = SiluAndMul()
        elif activation in ("gelu", "gelu_tanh"):
            self.layer = GeluAndMul(approximate="tanh" if activation == "gelu_tanh" else "none")
        else:
            raise LoweringError(f"no vLLM gated unit has the activation {activation!r}.")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class _ReferenceRMSNorm(nn.Module):
    """The op's own body, for the forms that no vLLM layer has (an offset with the cast before the product)."""

    def __init__(self, width: int, eps: float, offset: float, cast: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.eps, self.offset, self.cast = eps, offset, cast
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype), requires_grad=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return rms_norm(x, self.weight, self.eps, self.offset, self.cast)
        total = x + residual
        return rms_norm(total, self.weight, self.eps, self.offset, self.cast), total


def _norm_layer(
    width: int, eps: float, offset: float, cast: str, weighted: bool, dtype: torch.dtype | None
) -> nn.Module:
    """The vLLM norm that equals `rms_norm(eps, offset, cast)` in every dtype, or the reference body."""
    if not weighted:
        return VllmRMSNorm(width, eps, has_weight=False, dtype=dtype)
    if offset == 1.0 and cast == "after":
        return GemmaRMSNorm(width, eps)
    if offset == 0.0 and cast == "before":
        return VllmRMSNorm(width, eps, dtype=dtype)
    if offset == 0.0 and cast == "after":
        # The layer multiplies in the weight's dtype: a float32 weight gives Olmo2's order.
        return VllmRMSNorm(width, eps, dtype=torch.float32)
    return _ReferenceRMSNorm(width, eps, offset, cast, dtype)


class RMSNorm(Adapter):
    """`rms_norm`, over the last dimension of `[tokens, width]` or `[tokens, heads, width]`."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        offset: float = 0.0,
        cast: str = "before",
        weighted: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.layer = _norm_layer(width, eps, offset, cast, weighted, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def load(self, name: str, value: torch.Tensor, section: int | None = None) -> None:
        """Copies the weight; a norm is held whole by every rank."""
        getattr(self.layer, name).data.copy_(value)


class AddRMSNorm(RMSNorm):
    """`add_rms_norm`. In 16 bits vLLM normalises the sum before it is rounded, as its own models do."""

    def __init__(
        self,
        width: int,
        eps: float,
        *,
        offset: float = 0.0,
        cast: str = "before",
        weighted: bool = True,
        dtype: torch.dtype | None = None,
        inplace: bool = False,
    ) -> None:
        super().__init__(width, eps, offset=offset, cast=cast, weighted=weighted, dtype=dtype)
        self.functional = not inplace and isinstance(self.layer, VllmRMSNorm)

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        if not self.functional:
            return self.layer(x, residual)
        weight = self.layer.weight.data if self.layer.has_weight else None
        return ir.ops.fused_add_rms_norm(x, residual, weight, self.layer.variance_epsilon)


class Rope(Adapter):
    """`rope` and `rope_qk` over an evaluated table `[max_model_len, R]`, cos in the first half of a row, then sin."""

    def __init__(
        self, head_size: int, table: torch.Tensor, *, interleaved: bool = False, inplace: bool = False
    ) -> None:
        super().__init__()
        length, width = table.shape
        dtype = torch.get_default_dtype()
        self.inplace = inplace
        self.layer = RotaryEmbedding(head_size, width, length, 10000.0, not interleaved, dtype, init_cache=False)
        # vLLM would compute a table from the base; ours was evaluated from the model's own code.
        self.layer.register_buffer("cos_sin_cache", table.to(dtype), persistent=False)

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if not self.inplace:
            q, k = q.clone(), None if k is None else k.clone()
        if k is None:
            return self.layer(positions, q.flatten(1), None)[0].view(q.shape)
        q_out, k_out = self.layer(positions, q.flatten(1), k.flatten(1))
        return q_out.view(q.shape), k_out.view(k.shape)


def padded_head_size(size: int, has_sinks: bool = False, has_window: bool = False) -> int:
    """The smallest head size, `size` or larger, that the platform's attention has.

    Zeros appended to q and k leave every score as it is, and zeros appended to v are cut off again.
    """
    config = get_current_vllm_config()
    cache_dtype = config.cache_config.cache_dtype if config.cache_config is not None else "auto"
    for candidate in (size, *(each for each in _HEAD_SIZES if each > size)):
        try:
            backend = get_attn_backend(
                candidate, torch.get_default_dtype(), cache_dtype, has_sink=has_sinks, has_sliding_window=has_window
            )
        except ValueError:  # no backend of this platform has it
            continue
        if backend.supports_head_size(candidate):
            return candidate
    raise LoweringError(f"no attention backend of this platform has a head size of {size} or more.")


class Attention(Adapter):
    """`attention` over vLLM's paged KV cache. Head counts are those of one rank.

    Args:
        name: unique in the program, with the attention's number in it (`layers.3.attn`): it names the KV cache.
    """

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_size: int,
        v_head_size: int,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: bool = False,
        alibi_slopes: list[float] | None = None,
        cache_config: CacheConfig | None = None,
        quant_config: QuantizationConfig | None = None,
        name: str = "",
    ) -> None:
        super().__init__()
        self.heads, self.head_size, self.v_head_size = heads, head_size, v_head_size
        self.padded = padded_head_size(max(head_size, v_head_size), sinks, window > 0)
        extra: dict[str, object] = {"alibi_slopes": alibi_slopes} if alibi_slopes else {}
        if sinks:
            self.sinks = nn.Parameter(torch.empty(heads), requires_grad=False)
            extra["sinks"] = self.sinks
        if not window and cache_config is not None and cache_config.sliding_window is not None:
            # Without a window of its own, a layer takes the one that vLLM reads from the config for the whole model.
            cache_config = copy.copy(cache_config)
            cache_config.sliding_window = None
        self.layer = VllmAttention(
            heads,
            self.padded,
            scale,
            num_kv_heads=kv_heads,
            cache_config=cache_config,
            quant_config=quant_config,
            logits_soft_cap=softcap or None,
            per_layer_sliding_window=window or None,
            prefix=name,
            **extra,
        )

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.padded != self.head_size:
            q, k = (F.pad(x, (0, self.padded - self.head_size)) for x in (q, k))
        if self.padded != self.v_head_size:
            v = F.pad(v, (0, self.padded - self.v_head_size))
        out = self.layer(q.flatten(1), k.flatten(1), v.flatten(1)).view(-1, self.heads, self.padded)
        return out[..., : self.v_head_size]

    def load(self, name: str, value: torch.Tensor, section: int | None = None) -> None:
        """Fills the rank's sinks from those of all heads."""
        start = 0 if value.shape[0] == self.heads else get_tensor_model_parallel_rank() * self.heads
        self.sinks.data.copy_(value[start : start + self.heads])


class LMHead(Adapter):
    """`lm_head`: logits of the whole vocabulary on every rank, None where the platform gathers on the first rank only.

    Args:
        tied: the embedding whose table this head reads; it then loads nothing itself.
    """

    def __init__(
        self,
        vocabulary: int,
        width: int,
        *,
        bias: bool = False,
        tied: Embedding | None = None,
        dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        with torch.device("meta" if tied is not None else torch.empty(0).device):
            self.layer = ParallelLMHead(vocabulary, width, params_dtype=dtype, quant_config=quant_config, prefix=prefix)
        if tied is not None:
            self.layer = self.layer.tie_weights(tied.layer)
        if bias:
            self.layer._register_bias()
        self.processor = LogitsProcessor(vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.processor(self.layer, x, self.layer.bias)

    def load(self, name: str, value: torch.Tensor, section: int | None = None) -> None:
        """Fills the rank's rows of `weight` or `bias` from the whole tensor."""
        param = getattr(self.layer, name)
        param.weight_loader(param, value)


def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """`all_reduce`: the sum over tensor-parallel ranks."""
    return tensor_model_parallel_all_reduce(x)


def all_gather(x: torch.Tensor, dim: int) -> torch.Tensor:
    """`all_gather`: the concatenation over tensor-parallel ranks along `dim`."""
    return tensor_model_parallel_all_gather(x, dim)
