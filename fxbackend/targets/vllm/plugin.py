"""The entry point that vLLM calls in every process of the engine, before it resolves any model."""

from __future__ import annotations

from fxbackend import settings


def register() -> None:
    """Registers our model class and config, unless `FXBACKEND_ENABLE=0`. May be called any number of times.

    Cheap: the model class is registered by name and imported only when a model is built from it.
    """
    if not settings.enabled():
        return
    from fxbackend.targets.vllm import compat, program_config

    compat.install()
    program_config.register()
