"""Environment settings. The only module of the package that reads the environment.

| variable | default | meaning |
|---|---|---|
| `FXBACKEND_ENABLE` | `1` | `0` switches the vLLM plugin off |
| `FXBACKEND_FALLBACK` | `0` | `1` hands a model that cannot be converted to vLLM's own backend |
| `FXBACKEND_DUMP` | off | `1` dumps below `./fxbackend_dump`; any other value is the directory; empty or `0` is off |
"""

from __future__ import annotations

import os
from pathlib import Path

from fxbackend.errors import InputError

DEFAULT_DUMP_DIRECTORY = "fxbackend_dump"


def _flag(name: str, default: bool) -> bool:
    value = os.environ.get(name, "").strip()
    if value == "":
        return default
    if value not in ("0", "1"):
        raise InputError(f"{name}={value!r} is not a setting: use 0 or 1.")
    return value == "1"


def enabled() -> bool:
    """Whether the vLLM plugin registers anything (`FXBACKEND_ENABLE`)."""
    return _flag("FXBACKEND_ENABLE", True)


def fallback() -> bool:
    """Whether a model that cannot be converted goes to vLLM's own backend (`FXBACKEND_FALLBACK`)."""
    return _flag("FXBACKEND_FALLBACK", False)


def dump_directory() -> Path | None:
    """The directory to dump conversions into, or None when dumping is off (`FXBACKEND_DUMP`)."""
    value = os.environ.get("FXBACKEND_DUMP", "").strip()
    if value in ("", "0"):
        return None
    return Path(DEFAULT_DUMP_DIRECTORY if value == "1" else value)
