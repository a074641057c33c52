"""The model class that vLLM builds: a lowered program, compiled as one graph, and its head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.sequence import IntermediateTensors

from fxbackend.errors import UnsupportedModelError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


def convert(model_config: ModelConfig) -> None:
    """Converts the model of an engine config, on fake tensors and without weights.

    Raises:
        FxBackendError: the model cannot be converted; the message says where and why.
    """
    raise UnsupportedModelError("conversion is not wired to the engine yet.")


class FxbackendForCausalLM(nn.Module, SupportsPP):
    """A causal language model from the hub or from a saved program.

    Its name differs from vLLM's own generic class on purpose: vLLM compares names to decide on latent attention.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        convert(vllm_config.model_config)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings of tokens, for features of the engine that feed embeddings."""
        raise NotImplementedError

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None, inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        raise NotImplementedError

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """The head, for sampled rows only; None where the platform gathers logits on another rank."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Streams a checkpoint into the slots."""
        raise NotImplementedError
