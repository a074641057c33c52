"""What stands in Transformers' dispatch tables while a model is captured.

The attention hook leaves one `hf_attention` node per call, the mask hook one `attention_mask` node per mask. Neither
guesses: an operand or keyword that is not mapped is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    has_proxy_slot,
)
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import fxbackend.ops  # noqa: F401  (registers the ops that the hooks leave)
from fxbackend.errors import CaptureError
from fxbackend.program import operand

aten = torch.ops.aten
IMPLEMENTATION = "fxbackend"

# Keywords that say nothing about the result of the attention call itself.
_HARMLESS = {
    "position_ids": "positions are in q and k already, and sequence borders are the engine's",
    "cache_position": "there is no cache while a model is captured",
    "use_cache": "there is no cache while a model is captured",
    "return_dict": "how the caller packs its result",
    "logits_to_keep": "how the caller slices its logits",
    "output_hidden_states": "what else the caller returns",
}


@contextmanager
def installed(module_path: Callable[[torch.nn.Module], str], longest: int) -> Iterator[None]:
    """Puts the hooks into Transformers' tables, and takes them out again.

    Args:
        module_path: gives the path of a module in the model under capture.
        longest: up to how many positions a mask's rule is compared with the rule it is taken for.
    """

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None,
        is_causal: bool | None = None,
        **keywords: object,
    ) -> tuple[torch.Tensor, None]:
        path = module_path(module)
        for name, given in keywords.items():
            if name not in _HARMLESS and given is not None and given is not False:
                raise CaptureError(
                    f"the attention {path} is called with the keyword {name!r} "
                    f"({type(given).__name__}), which fxbackend does not map; it would be dropped."
                )
        # The module's own attribute says nothing beside a mask, as in eager attention (BigBird-Pegasus).
        causal = is_causal is not False and (attention_mask is not None or getattr(module, "is_causal", True))
        if not causal:
            raise CaptureError(f"the attention {path} is not causal (is_causal=False), which is not supported yet.")
        if dropout:
            raise CaptureError(f"the attention {path} drops weights (dropout={dropout}): call eval() on the model.")
        if not isinstance(sliding_window, (int, type(None))):
            raise CaptureError(f"the attention {path} has a sliding_window of type {type(sliding_window).__name__}.")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if isinstance(scale, torch.Tensor):
            raise CaptureError(f"the attention {path} has a scaling that is a tensor; only a number is mapped.")
        window = -1 if sliding_window is None else int(sliding_window)
        out = torch.ops.fxbackend.hf_attention(
            query, key, value, attention_mask, s_aux, float(scale), float(softcap or 0.0), window, path
        )
        return out, None

    def build_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., object] = masking_utils.causal_mask_function,
        attention_mask: torch.Tensor | None = None,
        device: torch.device | str = "cpu",
        **_options: object,
    ) -> torch.Tensor:
        # The options left over say how a mask is materialised (dtype, skip, vmap), not which tokens it hides.
        if q_offset or kv_offset or not (attention_mask is None or _all_ones(attention_mask)):
            raise CaptureError("a mask was built with a padding mask or an offset, which capture never passes.")
        try:
            kind, size = _rule(mask_function, longest)
        except (AssertionError, RuntimeError) as error:  # closures over traced values (chunked attention)
            kind, size = f"made of values that are not known while tracing ({type(error).__name__})", 0
        return torch.ops.fxbackend.attention_mask(torch.empty(0, device=device), kind, size)

    # Sequence borders are the engine's: what Transformers would read off the positions is not part of the model.
    find_packed = masking_utils.find_packed_sequence_indices
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, build_mask)
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(IMPLEMENTATION)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(IMPLEMENTATION)


def _all_ones(mask: torch.Tensor) -> bool:
    """Whether a traced mask was made as ones, which is what some models do when they are given none (BioGPT)."""
    mode = get_proxy_mode()
    if mode is None or not has_proxy_slot(mask, mode.tracer):
        return False
    node = get_proxy_slot(mask, mode.tracer).proxy.node
    while node.target in (aten.to.dtype, aten.to.device, aten._to_copy.default):
        node = operand(node, 0)
    return node.target in (aten.ones.default, aten.new_ones.default, aten.ones_like.default)


def _rule(function: Callable[..., object], longest: int) -> tuple[str, int]:
    """Which rule a mask function is, by evaluating it: `causal`, `sliding` with its window, or why it is neither."""
    with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
        last = _row(function, longest - 1, longest)
        window = int(last.sum())
        keys = torch.arange(longest)
        rows = {0, 1, 2, 3, longest // 2, longest - 2, longest - 1}
        rows |= {near for size in (window, longest - window) for near in (size - 1, size, size + 1, 2 * size + 3)}
        for query in sorted(row for row in rows if 0 <= row < longest):
            expected = (keys <= query) & (keys > query - window)
            if not torch.equal(_row(function, query, longest), expected):
                # No error yet: decoders of encoder-decoders build a mask for cross-attention that nothing uses.
                return f"neither causal nor a causal sliding window (row {query} of {longest} differs)", 0
    return ("causal", 0) if window == longest else ("sliding", window)


def _row(function: Callable[..., object], query: int, length: int) -> torch.Tensor:
    keys, zero = torch.arange(length), torch.zeros((), dtype=torch.int64)
    seen = function(zero, zero, torch.full((), query), keys)
    return torch.as_tensor(seen).expand(length)
