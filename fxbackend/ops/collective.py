"""What ranks say to each other. The reference bodies are those of a single rank."""

from __future__ import annotations

import torch

from fxbackend.ops.registry import dialect_op


@dialect_op()
def all_reduce(x: torch.Tensor) -> torch.Tensor:
    """`y = sum over ranks of x`: any shape, the same on every rank."""
    return x.clone()


@dialect_op()
def all_gather(x: torch.Tensor, dim: int, world: int) -> torch.Tensor:
    """`y = concat over ranks of x along dim`: the length of `dim` times `world`."""
    return torch.cat([x] * world, dim)


@dialect_op()
def stage_cut(x: torch.Tensor, stage: int) -> torch.Tensor:
    """`y = x`, sent from pipeline stage `stage` to the next; a graph holds one per value that crosses a cut."""
    return x.clone()
