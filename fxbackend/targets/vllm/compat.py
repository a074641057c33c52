"""Answers vLLM's own questions about a model before ours is asked for. All that we change in vLLM is changed here.

vLLM resolves an architecture in the parent process, before a worker builds any model. Four answers must be ours.

vLLM resolves an architecture in the parent, before a worker builds any model. Four answers must be ours there:
   registry, `TransformersForCausalLM` and `TransformersMoEForCausalLM` among them) is registered again, with our class.
   What vLLM had is kept.
2. *Is the Hugging Face class compatible?* vLLM refuses classes that do not declare the attention interface. We need no
   interface, so that one refusal is lifted while it asks, and only for models that come to us.
3. *Whose model is it?* Pooling models stay with vLLM, and so does, with `FXBACKEND_FALLBACK=1`, a model that cannot be
   converted. That is decided once, in the parent, when the config is complete, and travels inside the pickled config.
4. *Does it use latent attention?* Not with us: a program holds full attention, whatever the config names.

And one thing is added behind them: a compiled artifact of ours can be loaded where vLLM 0.32 cannot load its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.models import registry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

from fxbackend import settings
from fxbackend.errors import FxBackendError

logger = logging.getLogger("vllm.fxbackend")

GENERIC = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
PROGRAM = "FxbackendForCausalLM"
OURS = f"fxbackend.targets.vllm.model:{PROGRAM}"

_kept: dict[str, Any] = {}  # name -> what vLLM's registry held for it before us
_MARK = "_fxbackend_left"


def install() -> None:
    """Makes all changes; does nothing the second time."""
    if _kept:
        return
    models = registry.ModelRegistry.models
    _kept.update({name: entry for name, entry in models.items() if getattr(entry, "class_name", None) in GENERIC})
    for name in (*_kept, PROGRAM):
        registry.ModelRegistry.register_model(name, OURS)
        MODELS_CONFIG_MAP[name] = _hook(MODELS_CONFIG_MAP.get(name, VerifyAndUpdateConfig))
    kind = type(registry.ModelRegistry)
    for method, wrap in (
        ("_try_resolve_transformers", _lift_compatibility),
        ("inspect_model_cls", _inspect),
        ("resolve_model_cls", _resolve),
    ):
        original = getattr(kind, method, None)
        if original is None:
            raise FxBackendError(f"this vLLM has no {kind.__name__}.{method}; fxbackend is made for vLLM 0.32.")
        setattr(kind, method, wrap(original))
    torch.compiler.load_compiled_function = _loads(torch.compiler.load_compiled_function)


def left(model_config: Any) -> str | None:
    """Why a model stays with vLLM's own backend, or None when it is ours."""
    if getattr(model_config, "runner_type", None) == "pooling":
        return "it is a pooling model"
    return getattr(model_config, _MARK, None)


def _loads(original: Callable[..., Any]) -> Callable[..., Any]:
    """After loading, vLLM calls `finalize_loading`, which the plain function that inductor saves on a CPU lacks.

    There is nothing to finalize in one. Ours alone get it: their key holds the program, so that no artifact is that of
    another graph.
    """

    def load_compiled_function(file: Any, *, f_globals: dict[str, object] | None = None, **more: Any) -> Any:
        loaded = original(file, f_globals=f_globals, **more)
        if (f_globals or {}).get("__name__") == OURS.partition(":")[0]:
            compiled = loaded._artifacts.compiled_fn
            if not hasattr(compiled, "finalize_loading"):
                compiled.finalize_loading = lambda vllm_config: None
        return loaded

    return load_compiled_function


def _lift_compatibility(original: Callable[..., str | None]) -> Callable[..., str | None]:
    def try_resolve(self: Any, architecture: str, model_config: Any) -> str | None:
        if architecture == PROGRAM:
            return architecture
        if left(model_config) is None:
            with _every_class_is_compatible():
                name = original(self, architecture, model_config)
            if name in GENERIC:
                return name
        return original(self, architecture, model_config)

    return try_resolve


@contextmanager
def _every_class_is_compatible() -> Iterator[None]:
    base = registry.transformers.PreTrainedModel
    before = base.__dict__["is_backend_compatible"]
    base.is_backend_compatible = classmethod(lambda cls: True)
    try:
        yield
    finally:
        base.is_backend_compatible = before


def _inspect(original: Callable[..., tuple[Any, str]]) -> Callable[..., tuple[Any, str]]:
    def inspect_model_cls(self: Any, architectures: Any, model_config: Any) -> tuple[Any, str]:
        info, name = original(self, architectures, model_config)
        kept = _vllms_own(self, name, model_config)
        return (info if kept is None else kept.inspect_model_cls()), name

    return inspect_model_cls


def _resolve(original: Callable[..., tuple[Any, str]]) -> Callable[..., tuple[Any, str]]:
    def resolve_model_cls(self: Any, architectures: Any, model_config: Any) -> tuple[Any, str]:
        cls, name = original(self, architectures, model_config)
        kept = _vllms_own(self, name, model_config)
        return (cls if kept is None else kept.load_model_cls()), name

    return resolve_model_cls


def _vllms_own(models: Any, name: str, model_config: Any) -> Any | None:
    """The registry entry that vLLM had for `name`, if the model stays with vLLM."""
    return None if left(model_config) is None else _kept.get(models._normalize_arch(name, model_config))


def _hook(previous: type[VerifyAndUpdateConfig]) -> type[VerifyAndUpdateConfig]:
    """vLLM's own hook on a config that is complete, for a name that we serve."""

    class ServedConfig(previous):
        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            previous.verify_and_update_model_config(model_config)
            _decide(model_config)

    return ServedConfig


def _decide(model_config: Any) -> None:
    if left(model_config) is not None:
        return
    reason = _conversion_error(model_config) if settings.fallback() else None
    if reason is None:
        model_config.model_arch_config.is_deepseek_mla = False
        return
    logger.warning("fxbackend leaves this model to vLLM's own backend (FXBACKEND_FALLBACK=1): %s", reason)
    setattr(model_config, _MARK, reason)
    # Whatever was learnt of our class is asked again of vLLM's; that raises if vLLM cannot serve the model either.
    model_config._model_info, model_config._architecture = model_config.registry.inspect_model_cls(
        model_config.architectures, model_config
    )


def _conversion_error(model_config: Any) -> str | None:
    from fxbackend.targets.vllm.model import convert

    try:
        convert(model_config)
    except FxBackendError as error:
        return str(error)
    return None
