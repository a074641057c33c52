"""Hugging Face causal language models as FX graphs, rewritten by small passes and served by vLLM."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fxbackend.convert import convert
from fxbackend.errors import FxBackendError

if TYPE_CHECKING:
    from fxbackend.converted import Converted
    from fxbackend.pass_base import Pass, PatternPass
    from fxbackend.pipeline import Pipeline
    from fxbackend.pipelines import default_pipeline
    from fxbackend.program import Program

# Imported when asked for: they need torch, and the plugin is loaded in every process of the engine.
_LATER = {
    "Converted": "fxbackend.converted",
    "Pass": "fxbackend.pass_base",
    "PatternPass": "fxbackend.pass_base",
    "Pipeline": "fxbackend.pipeline",
    "Program": "fxbackend.program",
    "default_pipeline": "fxbackend.pipelines",
}

__all__ = ["Converted", "FxBackendError", "Pass", "PatternPass", "Pipeline", "Program", "convert", "default_pipeline"]


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module 'fxbackend' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return __all__
