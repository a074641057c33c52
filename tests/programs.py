"""Programs that several tests start from."""

from __future__ import annotations

import torch

from fxbackend.hf.capture import capture
from fxbackend.hf.facts import read_facts
from fxbackend.pipelines import default_pipeline
from fxbackend.program import Program


def captured(model: torch.nn.Module) -> Program:
    """The program of a tiny model as captured."""
    facts = read_facts(model.config, type(model).__name__, next(model.parameters()).dtype, None)
    return capture(type(model), model.config, facts, instance=model)


def fused(model: torch.nn.Module) -> Program:
    """The program of a tiny model at the end of the default pipeline."""
    return default_pipeline().run(captured(model))
