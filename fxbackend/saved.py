"""The directory that `Converted.save` writes: a `config.json` that vLLM reads, the program, and the weights once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from fxbackend.errors import InputError
from fxbackend.program import Program, shape_of
from fxbackend.serialize import PROGRAM_FILE, save_program

MODEL_TYPE = "fxbackend_program"
ARCHITECTURE = "FxbackendForCausalLM"
WEIGHTS_FILE = "model.safetensors"

dialect = torch.ops.fxbackend

# What belongs to the model and not to its graph: the tokenizer, and how to sample.
_TOKENIZER = ("tokenizer*", "vocab.*", "spiece.model", "*.tiktoken")
_COMPANIONS = (
    *_TOKENIZER,
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template*",
    "generation_config.json",
)
_FROM_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")


def is_saved(directory: Path) -> bool:
    """Whether a directory holds a saved program."""
    return (directory / "config.json").is_file() and (directory / PROGRAM_FILE).is_file()


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory holds the files of a tokenizer."""
    return any(any(directory.glob(pattern)) for pattern in _TOKENIZER)


def read_config(directory: Path) -> dict[str, object]:
    """The `config.json` of a saved program.

    Raises:
        InputError: it is that of something else.
    """
    data = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if data.get("model_type") != MODEL_TYPE:
        raise InputError(
            f"{directory} holds a {PROGRAM_FILE} and a config.json of model type "
            f"{data.get('model_type')!r}: save the program into a directory of its own."
        )
    return data


def config_data(program: Program, source: Mapping[str, object]) -> dict[str, object]:
    """What vLLM reads of a model before a graph exists, taken from the program; the model's own config lies inside.

    Raises:
        InputError: the program has no attention ops yet.
    """
    facts = program.facts
    attentions = program.calls(dialect.attention.default)
    if not attentions:
        raise InputError(
            f"the program is {facts.architecture} at stage {program.stage.name} without an attention op: "
            "to save it, convert with the default pipeline or one that goes on from it."
        )
    queries = [shape_of(node.args[0]) for node in attentions]  # type: ignore[arg-type]
    keys = [shape_of(node.args[1]) for node in attentions]  # type: ignore[arg-type]
    text = source.get("text_config") if isinstance(source.get("text_config"), dict) else source
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": str(facts.dtype).removeprefix("torch."),
        "hidden_size": _width(program),
        "num_hidden_layers": len(attentions),
        "num_attention_heads": max(int(shape[1]) for shape in queries),
        "num_key_value_heads": max(int(shape[1]) for shape in keys),
        "head_dim": max(int(shape[2]) for shape in queries),
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.max_model_len,
        **{key: text[key] if key in text else source.get(key) for key in _FROM_CONFIG},  # type: ignore[index, operator]
        "source_config": dict(source),
    }


def _width(program: Program) -> int:
    """Of the hidden state: what the head reads, where there is one, else what the embedding gives."""
    heads = program.calls(dialect.lm_head.default, dialect.linear.default)
    return int(shape_of(heads[-1].args[0])[-1])  # type: ignore[arg-type]


def write(
    directory: Path,
    program: Program,
    config: Mapping[str, object],
    state: Mapping[str, torch.Tensor],
    companions: Path | None,
    generation: Mapping[str, object] | None,
) -> None:
    """Writes a saved program into an empty or new directory.

    Args:
        directory: where to.
        program: what is saved.
        config: of the model that the program comes from.
        state: weights by checkpoint name; each that the program reads is written once.
        companions: a directory whose tokenizer files are copied.
        generation: the generation config, where no directory holds one.

    Raises:
        InputError: the directory holds something already.
    """
    data = config_data(program, config)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(f"{directory} is not an empty directory: nothing is overwritten, choose another one.")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    save_program(program, directory)
    names = {program.weights.aliases.get(name, name): name for name in state}
    weights = {source: state[names[source]].detach().contiguous() for source in program.weights.sources()}
    save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    for pattern in _COMPANIONS if companions is not None else ():
        for path in sorted(companions.glob(pattern)):  # type: ignore[union-attr]
            if path.is_file():
                shutil.copyfile(path, directory / path.name)
    if generation is not None and not (directory / "generation_config.json").exists():
        (directory / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
