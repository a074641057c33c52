"""A user's own model class, in no hub: learned positions, packed q/k/v, gated residuals; and ways to misbehave."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class OwnConfig(PretrainedConfig):
    """`trick` names what the model does beside the usual; see `OwnAttention` and `OwnForCausalLM`."""

    model_type = "own_model"

    def __init__(
        self,
        trick: str = "",
        vocab_size: int = 97,
        hidden_size: int = 48,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        max_position_embeddings: int = 40,
        **more: object,
    ):
        self.trick = trick
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        super().__init__(**more)


def eager(
    module: nn.Module,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    s_aux: torch.Tensor | None = None,
    **_more: object,
) -> tuple[torch.Tensor, None]:
    """Attention with a column of sinks, as GPT-OSS has it."""
    scores = q @ k.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores + mask
    if s_aux is not None:
        scores = torch.cat([scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2), None


class OwnAttention(nn.Module):
    def __init__(self, config: OwnConfig):
        super().__init__()
        self.config = config
        self.heads = config.num_attention_heads
        self.width = config.hidden_size // self.heads
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if config.trick == "sinks" else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        q, k, v = (
            part.view(*x.shape[:2], self.heads, self.width).transpose(1, 2) for part in self.in_proj(x).chunk(3, -1)
        )
        more: dict[str, object] = {}
        if self.config.trick == "sinks":
            more["s_aux"] = self.sinks
        if self.config.trick == "keyword":
            more["temperature"] = x.mean()
        if self.config.trick == "bidirectional":
            more["is_causal"] = False
        attend: Callable[..., tuple[torch.Tensor, object]] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager
        )
        out, _ = attend(self, q, k, v, mask, scaling=0.3, **more)
        return self.out_proj(out.reshape(*x.shape[:2], -1))


class OwnBlock(nn.Module):
    def __init__(self, config: OwnConfig):
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.attention = OwnAttention(config)
        self.gate = nn.Parameter(torch.ones(config.hidden_size))
        self.mlp = nn.Sequential(nn.Linear(config.hidden_size, 64), nn.GELU(), nn.Linear(64, config.hidden_size))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + torch.tanh(self.gate) * self.attention(self.norm(x), mask)
        return x + self.mlp(x)


class OwnForCausalLM(PreTrainedModel):
    """The head multiplies by a number that no config of a hub knows."""

    config_class = OwnConfig
    _supports_attention_backend = True
    _supports_sdpa = True
    inner = 64  # a class attribute that a careless __init__ reads

    def __init__(self, config: OwnConfig):
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.places = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList([OwnBlock(config) for _ in range(config.num_hidden_layers)])
        if config.trick == "buffer":
            self.register_buffer("temperature", torch.ones(()))  # stored in checkpoints, trained elsewhere
        self.extra = nn.Linear(config.hidden_size, self.inner) if config.trick == "shape" else None
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **_more: object,
    ) -> CausalLMOutput:
        trick = self.config.trick
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        x = self.tokens(input_ids) + self.places(position_ids)
        if trick == "fixed":
            x = x + self.places.weight[:7]
        if trick == "branch" and input_ids.shape[1] > 20:
            x = x * 2
        if trick == "host":
            x = x * float(x.abs().max().item())
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=None,
            position_ids=position_ids,
        )
        for block in self.blocks:
            x = block(x, mask)
        if self.extra is not None:
            x = x + self.extra(x).mean(-1, keepdim=True)
        logits = self.head(x) * 0.37
        return CausalLMOutput(logits=logits * self.temperature if trick == "buffer" else logits)


def own_model(trick: str = "", **changes: object) -> OwnForCausalLM:
    """A small one with random parameters."""
    torch.manual_seed(0)
    config = OwnConfig(trick, **changes)  # type: ignore[arg-type]
    model = OwnForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + 0.05)
    return model
