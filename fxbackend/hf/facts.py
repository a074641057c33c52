"""Reads a model's config once: what conversion needs to know beside the graph, and what it refuses at the door."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from fxbackend.errors import InputError, UnsupportedModelError
from fxbackend.program import Facts

_DEFAULT_LENGTH = 2048
# What config classes call the number of positions; the same names as vLLM looks for.
_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "max_target_positions",
    "n_ctx",
    "model_max_length",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
_MODEL_ID = re.compile(r"[\w][\w.-]*(/[\w.-]+)?")


def load_config(source: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model directory or hub id.

    Raises:
        InputError: there is no such directory or id, or it needs code that was not trusted.
    """
    path = Path(source)
    if path.is_file():
        raise InputError(f"{path} is a file: give the directory that holds the model.")
    if not path.exists() and (isinstance(source, Path) or not _MODEL_ID.fullmatch(source)):
        raise InputError(f"{path}: no such directory; give a model directory or a model id.")
    if path.exists() and not (path / "config.json").is_file():
        raise InputError(f"{path} holds no config.json: give a directory saved with save_pretrained().")
    try:
        return AutoConfig.from_pretrained(str(source), trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise InputError(f"{source} carries its own code: pass trust_remote_code=True to run it.") from error
        raise InputError(f"{source} cannot be read as a model: {error}") from error
    except OSError as error:
        if path.exists():
            raise InputError(f"the config.json of {source} cannot be read: {error}") from error
        raise InputError(
            f"{source} is neither a directory with a config.json nor a model id that can be reached: {error}"
        ) from error


def causal_class(config: PretrainedConfig) -> type[torch.nn.Module]:
    """The causal language-model class of a config.

    Raises:
        UnsupportedModelError: an encoder-decoder, or a model type without such a class.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is an encoder-decoder; fxbackend converts causal language models."
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModelError(
            f"model type {config.model_type!r} has no causal language model in Transformers; "
            "pass the loaded model itself if the class is your own."
        )
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def read_facts(config: PretrainedConfig, architecture: str, dtype: torch.dtype, max_model_len: int | None) -> Facts:
    """The facts of a model; `max_model_len` defaults to the config's `max_position_embeddings`."""
    text = config.get_text_config(decoder=True)
    longest = max_model_len
    if longest is None:
        longest = next((size for name in _LENGTHS if (size := getattr(text, name, None) or 0) > 0), _DEFAULT_LENGTH)
    if longest < 1:
        raise InputError(f"max_model_len={longest} must be at least 1.")
    return Facts(architecture, config.model_type, dtype, int(longest), int(text.vocab_size))
