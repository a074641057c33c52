"""What the user hands to `convert`: a loaded model, a config, a directory or a model id; made into one thing here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from transformers import PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from fxbackend.errors import InputError, UnsupportedModelError
from fxbackend.hf.capture import capture
from fxbackend.hf.checkpoint import Checkpoint, adopt_buffers, check_shapes, check_ties, parameter_names
from fxbackend.hf.facts import causal_class, load_config, read_facts
from fxbackend.program import Program

_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
    "float": torch.float32,
}
_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")


@dataclass(frozen=True)
class Source:
    """A model before capture.

    Attributes:
        model_class: what is captured.
        config: its config.
        dtype: of the activations.
        instance: the model in hand, if that is what was given.
        directory: where files beside the weights lie, if that is what was given.
        state: the weights, a checkpoint's under the names of its files; None without any.
    """

    model_class: type[PreTrainedModel]
    config: PretrainedConfig
    dtype: torch.dtype
    instance: PreTrainedModel | None = None
    directory: Path | None = None
    state: Mapping[str, torch.Tensor] | None = None

    @property
    def config_data(self) -> dict[str, object]:
        """The config as JSON data."""
        return json.loads(self.config.to_json_string(use_diff=False))

    @property
    def generation_data(self) -> dict[str, object] | None:
        """The generation config of the model in hand as JSON data."""
        generation = getattr(self.instance, "generation_config", None)
        return None if generation is None else json.loads(generation.to_json_string())

    def captured(self, max_model_len: int | None) -> tuple[Program, Mapping[str, torch.Tensor] | None]:
        """The captured program, and the weights under the names of its plan.

        Raises:
            FxBackendError: the model cannot be captured, or its weights do not fit it.
        """
        facts = read_facts(self.config, self.model_class.__name__, self.dtype, max_model_len)
        program = capture(self.model_class, self.config, facts, self.instance)
        state = self.state
        if isinstance(state, Checkpoint):
            state = state.renamed(parameter_names(self.model_class, self.config, program.weights, state))
        if state is not None:
            program.weights.check(state)
            check_shapes(program.weights, state)
            check_ties(program.weights, state)
            adopt_buffers(program.weights, state)
        return program, state


def open_source(model: object, dtype: str | torch.dtype | None = None, trust_remote_code: bool = False) -> Source:
    """Makes a `Source` of a loaded model, a config, a directory or a model id.

    Raises:
        InputError: it is none of these, or cannot be read.
        UnsupportedModelError: an encoder-decoder, a quantised model, or a config without a causal language model.
    """
    wanted = read_dtype(dtype)
    if isinstance(model, PreTrainedModel):
        source = Source(type(model), model.config, wanted or model.dtype, instance=model, state=model.state_dict())
    elif isinstance(model, PretrainedConfig):
        source = Source(_causal(model, None), model, wanted or _config_dtype(model) or torch.float32)
    elif isinstance(model, (str, Path)):
        source = _from_files(model, wanted, trust_remote_code)
    else:
        raise InputError(
            f"cannot convert a {type(model).__name__}: give a PreTrainedModel, its config, or a model directory or id."
        )
    _refuse(source.config)
    return source


def read_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A dtype of activations by name; None and "auto" leave it to the model.

    Raises:
        InputError: no such dtype, or none that activations have.
    """
    if dtype is None or dtype == "auto":
        return None
    found = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise InputError(f"dtype={dtype!r} is no dtype of activations: use one of {', '.join(sorted(_DTYPES))}.")
    return found


def _from_files(model: str | Path, dtype: torch.dtype | None, trust_remote_code: bool) -> Source:
    config = load_config(model, trust_remote_code)
    directory = Path(model)
    if not directory.is_dir():
        directory = Path(snapshot_download(str(model), allow_patterns=list(_FILES)))
    state = Checkpoint.of(directory)
    dtype = dtype or _config_dtype(config) or (state.floating_dtype() if state else None) or torch.float32
    return Source(_causal(config, directory), config, dtype, directory=directory, state=state)


def _causal(config: PretrainedConfig, directory: Path | None) -> type[PreTrainedModel]:
    """The class in Transformers, or the one that the directory's own code holds (it was trusted with the config)."""
    remote = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if remote and directory is not None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return get_class_from_dynamic_module(remote, str(directory))
    return causal_class(config)


def _config_dtype(config: PretrainedConfig) -> torch.dtype | None:
    found = config.get_text_config(decoder=True).dtype or config.dtype
    return read_dtype(found)


def _refuse(config: PretrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"model type {config.model_type!r} is an encoder-decoder; fxbackend converts "
            "causal language models: give one of those."
        )
    if getattr(config, "quantization_config", None):
        raise UnsupportedModelError(
            f"this {config.model_type!r} model is quantised, which is not supported yet: give "
            "the model in float32, float16 or bfloat16."
        )
