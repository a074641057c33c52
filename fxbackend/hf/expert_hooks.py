"""What stands in Transformers' table of experts implementations while a model is captured.

The hook leaves one `hf_experts` node per call. How the gate of an expert is computed is not read off the class: it is
evaluated on numbers and compared with what the dialect's op can do. What is not mapped is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fxbackend.errors import CaptureError
from fxbackend.hf.hooks import IMPLEMENTATION
from fxbackend.ops.experts import SWIGLU_OAI, gate
from fxbackend.ops.projection import ACTIVATIONS


@contextmanager
def installed(module_path: Callable[[nn.Module], str]) -> Iterator[None]:
    """Puts the hook into Transformers' table, and takes it out again.

    Args:
        module_path: gives the path of a module in the model under capture.
    """

    def route(
        module: nn.Module,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
        *more: object,
        **keywords: object,
    ) -> torch.Tensor:
        path = module_path(module)
        if more or keywords:
            raise CaptureError(
                f"the experts {path} are called with {len(more) + len(keywords)} more operands "
                f"({', '.join(keywords) or 'by place'}), which fxbackend does not map."
            )
        if not module.has_gate:
            raise CaptureError(
                f"the experts {path} ({type(module).__name__}) have no gate; only gated experts are mapped."
            )
        if top_k_index.ndim != 2 or top_k_index.shape != top_k_weights.shape:
            raise CaptureError(
                f"the experts {path} are called with ids of shape {list(top_k_index.shape)} and weights "
                f"of shape {list(top_k_weights.shape)}; both must be [tokens, experts per token]."
            )
        activation, alpha, limit = _gate_of(module, path)
        x = hidden_states.reshape(-1, hidden_states.shape[-1]) if hidden_states.ndim != 2 else hidden_states
        biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
        out = torch.ops.fxbackend.hf_experts(
            x,
            top_k_index,
            top_k_weights,
            module.gate_up_proj,
            module.down_proj,
            *biases,
            activation,
            alpha,
            limit,
            bool(module.is_transposed),
            not module.is_concatenated,
        )
        return out if hidden_states.ndim == 2 else out.reshape(hidden_states.shape)

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, route)
    try:
        yield
    finally:
        ALL_EXPERTS_FUNCTIONS._global_mapping.pop(IMPLEMENTATION)


def _gate_of(module: nn.Module, path: str) -> tuple[str, float, float]:
    """Activation, alpha and limit of the `gate` that equals the module's own at every probe.

    Numbers that a gate may be cut off at or scaled with are those that the module holds as attributes.
    """
    held = [float(value) for value in vars(module).values() if type(value) in (int, float)]
    numbers = sorted({value for value in held if 0 < value < 1e4})
    with disable_proxy_modes_tracing(), unset_fake_temporarily(), torch.device("cpu"), torch.no_grad():
        probe = _probe(numbers)
        one, two = probe.chunk(2, -1)
        stored = probe if module.is_concatenated else torch.stack((one, two), -1).flatten(-2)
        expected = module._apply_gate(stored)  # type: ignore[operator]
        for limit in (0.0, *numbers):
            for activation in ACTIVATIONS:
                if _same(gate(probe, activation, 0.0, limit), expected):
                    return activation, 0.0, limit
            for alpha in numbers:
                if _same(gate(probe, SWIGLU_OAI, alpha, limit), expected):
                    return SWIGLU_OAI, alpha, limit
    raise CaptureError(
        f"the gate of the experts {path} ({type(module).__name__}) is none that fxbackend maps: gates "
        f"are {', '.join(ACTIVATIONS)} or {SWIGLU_OAI} of one half times the other, with or without a "
        "limit."
    )


def _probe(numbers: list[float]) -> torch.Tensor:
    """Pairs `[gates, ups]` on a grid that reaches beyond every limit."""
    ends = [sign * number * part for number in numbers for part in (0.7, 1.4) for sign in (-1, 1)]
    values = torch.cat((torch.linspace(-9.3, 9.7, 21), torch.tensor([-40.0, 33.0, *ends]))).double()
    one, two = torch.meshgrid(values, values, indexing="ij")
    return torch.cat((one, two), -1)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-9, atol=1e-12)
