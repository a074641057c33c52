"""Starts the engine on a directory from Python."""

from __future__ import annotations

from typing import Any

from vllm import LLM

from fxbackend.errors import InputError
from fxbackend.targets.vllm import plugin


def launch(directory: str, **engine_args: Any) -> LLM:
    """A `vllm.LLM` that serves a directory with fxbackend (a saved program, or a model of Transformers).

    Args:
        directory: what `Converted.save` or `save_pretrained` wrote.
        engine_args: of `vllm.LLM`. Without tokenizer files in the directory, `skip_tokenizer_init=True` is needed.

    Raises:
        InputError: an argument that would hand the model to another implementation.
    """
    if engine_args.get("model_impl", "transformers") not in ("auto", "transformers"):
        raise InputError(f"model_impl={engine_args['model_impl']!r} is not ours: leave it out.")
    plugin.register()
    return LLM(model=str(directory), **{"model_impl": "transformers", **engine_args})
