"""Errors of the framework. Each carries one sentence that names the place, the reason and what to do."""

from __future__ import annotations


class FxBackendError(Exception):
    """Base of all errors that fxbackend raises on purpose."""


class InputError(FxBackendError):
    """What the user handed in cannot be used as it is (no such directory, a padding mask with holes, ...)."""


class CaptureError(FxBackendError):
    """A model could not be captured as one graph, or only by specialising something in silence."""


class UnsupportedModelError(FxBackendError):
    """A model was captured, but something in it has no place in the target yet."""


class MatchError(FxBackendError):
    """A pattern is malformed, or a rewrite neither used nor proved away one of its captures."""


class PipelineError(FxBackendError):
    """Passes stand in an order that their stages forbid, or a pass broke its contract."""


class VerifyError(FxBackendError):
    """A program does not hold what its stage promises."""


class WeightError(FxBackendError):
    """A checkpoint and a weight plan do not fit together."""


class LoweringError(FxBackendError):
    """A program cannot be expressed in the target's vocabulary."""
