"""Reads the safetensors files of a model directory: names, and one tensor at a time."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.initialization import no_init_weights

from fxbackend.errors import InputError, UnsupportedModelError, WeightError
from fxbackend.hf.expert_tensors import ExpertTensors
from fxbackend.weights import WeightPlan

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Buffers that old checkpoints hold and no model reads any more; Transformers skips them too.
_OBSOLETE = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


class Checkpoint(Mapping[str, torch.Tensor]):
    """Tensors by name. Files are mapped into memory, and a tensor is read when it is used."""

    def __init__(self, places: Mapping[str, tuple[Path, str]]):
        """Args:
        places: for every name the file, and the name in that file.
        """
        self.places = dict(places)
        self._files: dict[Path, safe_open] = {}

    @classmethod
    def of(cls, directory: Path) -> Checkpoint | None:
        """The checkpoint in a directory, None when it holds no weights.

        Raises:
            InputError: weights in another format than safetensors, or a file that the index names and is not there.
        """
        if (directory / INDEX_FILE).is_file():
            files = json.loads((directory / INDEX_FILE).read_text(encoding="utf-8"))["weight_map"]
            if lost := sorted({name for name in files.values() if not (directory / name).is_file()}):
                raise InputError(
                    f"{directory / INDEX_FILE} names {', '.join(lost)}, which {directory} does not hold: "
                    "finish the download or copy."
                )
            return cls({name: (directory / file, name) for name, file in files.items()})
        if (directory / SINGLE_FILE).is_file():
            with safe_open(directory / SINGLE_FILE, framework="pt") as file:
                return cls({name: (directory / SINGLE_FILE, name) for name in file.keys()})  # noqa: SIM118  (no mapping)
        if other := sorted(path.name for pattern in ("*.bin", "*.gguf", "*.pth") for path in directory.glob(pattern)):
            raise InputError(
                f"{directory} holds weights as {', '.join(other[:3])}; load the model with Transformers "
                "and save it with save_pretrained(), which writes safetensors."
            )
        return None

    def renamed(self, names: Mapping[str, str]) -> Checkpoint:
        """The same tensors under the names that `names` gives them; those it does not hold are left out."""
        return Checkpoint({new: self.places[old] for old, new in names.items()})

    def __getitem__(self, name: str) -> torch.Tensor:
        path, inner = self.places[name]
        if path not in self._files:
            self._files[path] = safe_open(path, framework="pt")
        return self._files[path].get_tensor(inner)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def floating_dtype(self) -> torch.dtype | None:
        """The dtype of the first floating tensor."""
        return next((tensor.dtype for tensor in self.values() if tensor.is_floating_point()), None)


def parameter_names(
    model_class: type[PreTrainedModel], config: PretrainedConfig, plan: WeightPlan, names: Iterable[str]
) -> dict[str, str]:
    """For every name of a checkpoint the name in the plan, by Transformers' own rules for the class.

    Covers renamed modules, a base-model prefix too many or too few, and buffers that Transformers skips (left out).
    Where the checkpoint holds a tensor per expert, the slots of `plan` are made of these instead of one packed tensor.

    Raises:
        UnsupportedModelError: Transformers converts the tensors themselves while it loads this class.
    """
    names = list(names)
    known = set(plan.sources()) | set(plan.aliases) | set(plan.ignored)
    if known.issuperset(names):
        return {name: name for name in names}
    with torch.device("meta"), no_init_weights():
        model = model_class._from_config(copy.deepcopy(config), attn_implementation="eager")
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if not isinstance(each, WeightRenaming)]
    skipped = re.compile("|".join((*_OBSOLETE, *(model._keys_to_ignore_on_load_unexpected or ()))))
    state = model.state_dict()
    result = {}
    experts = ExpertTensors()
    for name in names:
        new, converted = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if converted is not None and name not in known:
            converter = next(each for each in converters if converted in each.source_patterns)
            if not experts.add(name, new, converted, converter):
                raise UnsupportedModelError(
                    f"Transformers converts the checkpoint tensor {name!r} of "
                    f"{model_class.__name__} while loading it ({converter.operations}), which "
                    "is not supported yet; hand in the loaded model instead."
                )
            result[name] = name
        elif new in known or not skipped.search(name):
            result[name] = new
    experts.fill(plan)
    return result


def check_shapes(plan: WeightPlan, state: Mapping[str, torch.Tensor]) -> None:
    """Every tensor must have the shape of the parameter that a captured program names it for.

    Raises:
        WeightError: one message that lists every tensor that does not.
    """
    names = {plan.aliases.get(name, name): name for name in state}
    shapes = {}
    for slot in plan:
        for index, piece in enumerate(slot.pieces):  # a captured slot is one tensor, or one per expert
            wanted = slot.piece_shape(index) if slot.folded else slot.shape
            shapes[piece.source] = (tuple(state[names[piece.source]].shape), wanted)
    wrong = [
        f"{name} is {given} in the checkpoint, {wanted} in the model"
        for name, (given, wanted) in shapes.items()
        if given != wanted
    ]
    if wrong:
        raise WeightError(f"{'; '.join(wrong)}. Check that config.json and the weight files belong together.")


def check_ties(plan: WeightPlan, state: Mapping[str, torch.Tensor]) -> None:
    """Tied names that a checkpoint holds twice must hold the same values; Transformers would untie them.

    Raises:
        WeightError: they differ.
    """
    for alias, source in plan.aliases.items():
        if alias not in state or source not in state:
            continue
        one, other = state[alias], state[source]
        if one.data_ptr() != other.data_ptr() and not torch.equal(one, other):
            raise WeightError(
                f"the config ties {alias} to {source}, and the checkpoint holds both with different "
                "values: set tie_word_embeddings to false in config.json if they are meant to differ."
            )


def adopt_buffers(plan: WeightPlan, state: Mapping[str, torch.Tensor]) -> None:
    """Buffers that a checkpoint stores have its values, not those computed from the config."""
    for name, value in plan.constants.items():
        if name in plan.ignored and name in state and state[name].shape == value.shape:
            plan.constants[name] = state[name].detach().to(value.device, value.dtype, copy=True)
