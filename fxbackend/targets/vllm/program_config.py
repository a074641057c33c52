"""The `config.json` of a saved program: what the engine reads of a class that is in no hub."""

from __future__ import annotations

from vllm.transformers_utils.config import AutoConfig, PreTrainedConfig

MODEL_TYPE = "fxbackend_program"


class ProgramConfig(PreTrainedConfig):
    """Holds the geometry that vLLM reads before a graph exists, under the names of a Llama config.

    The program lies beside it; whatever else the class's own config says is kept and read by nobody.
    """

    model_type = MODEL_TYPE


def register() -> None:
    """Makes `AutoConfig` know the model type."""
    AutoConfig.register(MODEL_TYPE, ProgramConfig, exist_ok=True)
