"""`convert`: from whatever holds a model to a converted one. Imports little, so that `import fxbackend` is quick."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fxbackend.errors import InputError

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from fxbackend.converted import Converted
    from fxbackend.pipeline import Pipeline


def convert(
    model: PreTrainedModel | PretrainedConfig | str | Path,
    *,
    target: str = "reference",
    passes: Pipeline | None = None,
    dtype: str | torch.dtype | None = None,
    max_model_len: int | None = None,
    trust_remote_code: bool = False,
    dump: str | Path | None = None,
) -> Converted:
    """Captures a causal language model as one graph and rewrites it.

    Args:
        model: a loaded model (its class is built once more from its config for the capture, and its weights are used as
            they are), a config (nothing can be computed then), a model directory or id, or a directory that
            `Converted.save` wrote.
        target: what the result is called by; `reference` is plain torch. For the engine see `Converted.to_vllm`.
        passes: a `Pipeline` in place of the default one.
        dtype: of the activations; by default that of the model.
        max_model_len: positions a sequence may have; by default the config's `max_position_embeddings`.
        trust_remote_code: whether code that lies in the model directory may run.
        dump: directory to write every graph into, in place of the setting `FXBACKEND_DUMP`.

    Raises:
        FxBackendError: one sentence that names the place, the reason and what to do.
    """
    from fxbackend.targets import TARGETS

    if target not in TARGETS:
        raise InputError(f"no target {target!r}: use one of {', '.join(TARGETS)}, or Converted.to_vllm() for vLLM.")
    if isinstance(model, (str, Path)):
        from fxbackend import saved

        if saved.is_saved(Path(model)):
            return _reopen(Path(model), passes, dtype, max_model_len)
    return _convert(model, passes, dtype, max_model_len, trust_remote_code, dump)


def _convert(
    model: object,
    passes: Pipeline | None,
    dtype: str | torch.dtype | None,
    max_model_len: int | None,
    trust_remote_code: bool,
    dump: str | Path | None,
) -> Converted:
    from fxbackend.converted import Converted
    from fxbackend.dump import observers_from_settings
    from fxbackend.hf.source import open_source
    from fxbackend.pipelines import default_pipeline
    from fxbackend.report import Report

    source = open_source(model, dtype, trust_remote_code)
    captured, state = source.captured(max_model_len)
    observers = observers_from_settings(source.model_class.__name__, directory=None if dump is None else Path(dump))
    program = (default_pipeline() if passes is None else passes).run(captured, observers)
    return Converted(program, Report.of(program), source.config_data, state, source.directory, source.generation_data)


def _reopen(
    directory: Path, passes: Pipeline | None, dtype: str | torch.dtype | None, max_model_len: int | None
) -> Converted:
    """A saved program is final: it was rewritten for one dtype and one length."""
    from fxbackend import saved
    from fxbackend.converted import Converted
    from fxbackend.hf.checkpoint import Checkpoint
    from fxbackend.hf.source import read_dtype
    from fxbackend.report import Report
    from fxbackend.serialize import load_program

    config = saved.read_config(directory)
    program = load_program(directory)
    facts = program.facts
    wanted = (read_dtype(dtype) or facts.dtype, facts.max_model_len if max_model_len is None else max_model_len)
    if passes is not None or wanted != (facts.dtype, facts.max_model_len):
        raise InputError(
            f"{directory} holds a program saved for {facts.dtype} and "
            f"max_model_len={facts.max_model_len}: it is read as it is; convert the original "
            "model to change passes, dtype or length."
        )
    source = config["source_config"]
    return Converted(program, Report.of(program), source, Checkpoint.of(directory), directory)  # type: ignore[arg-type]
