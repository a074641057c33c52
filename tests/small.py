"""Small modules that tests of passes are made of; they compute what layers of Transformers compute."""

from __future__ import annotations

import torch
from torch import nn

from fxbackend.pipelines import default_pipeline
from fxbackend.program import Program
from fxbackend.testing import Wrapped, before, program_of

State = dict[str, torch.Tensor]


class Body(nn.Module):
    """A body with the given submodules; tests subclass it and write `forward(x, positions)`."""

    def __init__(self, **modules: nn.Module):
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def start(
    pass_name: str, body: nn.Module, width: int = 8, out_width: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Program, State]:
    """The program of `body` in front of the pass `pass_name`, and the state dict of its model."""
    model = Wrapped(body, width, out_width)
    program = program_of(model, dtype=dtype)
    return before(default_pipeline(), pass_name, program), model.state_dict()


class Norm(nn.Module):
    """RMSNorm as Llama writes it."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.normed(x).to(x.dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """Llama's."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), dim=-1)


def rotate_neighbours(x: torch.Tensor) -> torch.Tensor:
    """Cohere's."""
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)


class Angles(nn.Module):
    """cos and sin `[1, tokens, width]` of the positions, each angle twice."""

    def __init__(self, width: int, interleaved: bool = False, base: float = 10.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** -(torch.arange(0, width, 2) / width))
        self.interleaved = interleaved

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None].float() * self.inv_freq
        angles = torch.repeat_interleave(angles, 2, dim=-1) if self.interleaved else torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class SelfAttention(nn.Module):
    """Two query heads on one key head of width 4, rotated; subclasses change a step."""

    def __init__(self, width: int = 8, bias: bool = False, base: float = 10.0):
        super().__init__()
        self.q_proj = nn.Linear(width, 8, bias)
        self.k_proj = nn.Linear(width, 4, bias)
        self.v_proj = nn.Linear(width, 4, bias)
        self.o_proj = nn.Linear(8, width, False)
        self.angles = Angles(4, base=base)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def rotate(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = (each.unsqueeze(1) for each in self.angles(q, positions))
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        mask = torch.ops.fxbackend.attention_mask(torch.empty(0), "causal", 0)
        return torch.ops.fxbackend.hf_attention(q, k, v, mask, None, 0.5, 0.0, -1, "body")

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.view(*x.shape[:2], -1, 4).transpose(1, 2) for each in self.project(x))
        q, k = self.rotate(q, k, positions)
        return self.o_proj(self.attend(q, k, v).reshape(*x.shape[:2], -1))
