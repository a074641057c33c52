"""Runs functions in children of one warmed process: torch, transformers and vLLM are imported once.

The warmed process is a program of its own (`python -m tests.engine.forks`), started with one OpenMP thread: a fork of a
process that runs threads may hang.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class ChildError(Exception):
    """What went wrong in a child, with the end of what it printed."""


class Forks:
    """The warmed process, seen from the tests."""

    def __init__(self) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("FXBACKEND_", "VLLM_"))}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.forks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=environment | ENVIRONMENT,
        )

    def run(
        self,
        function: Callable[..., Any],
        *args: object,
        timeout: float = 120,
        environment: Mapping[str, str] | None = None,
        **kwargs: object,
    ) -> Any:
        """The result of a function of a module, called in a child.

        Raises:
            ChildError: it raised, died, or took longer than `timeout` seconds.
        """
        request = (function.__module__, function.__name__, args, kwargs, dict(environment or {}), timeout)
        assert self._process.stdin is not None and self._process.stdout is not None
        _send(self._process.stdin, request)
        try:
            kind, value, text = _receive(self._process.stdout)
        except EOFError:
            self._log.seek(0)
            raise ChildError(f"the warmed process died:\n{self._log.read().decode()[-4000:]}") from None
        if kind == "error":
            raise ChildError(f"{value}\n--- end of its output ---\n{text}")
        return value

    def close(self) -> None:
        """Ends the warmed process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


def _send(stream: IO[bytes], value: object) -> None:
    data = pickle.dumps(value)
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    head = stream.read(8)
    if len(head) < 8:
        raise EOFError
    return pickle.loads(stream.read(struct.unpack("<Q", head)[0]))


def _serve() -> None:
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    import torch
    import transformers
    import vllm.entrypoints.llm
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import fxbackend.targets.vllm.model  # noqa: F401
    from fxbackend.hf import tiny

    torch.set_num_threads(1)
    for name in tiny.FAMILIES:
        tiny.tiny_config(name)
    transformers.logging.disable_progress_bar()
    gc.collect()
    gc.freeze()
    while True:
        try:
            request = _receive(requests)
        except EOFError:
            return
        _send(answers, _in_child(*request))


def _in_child(
    module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], environment: dict[str, str], timeout: float
) -> tuple[str, object, str]:
    with tempfile.TemporaryDirectory(prefix="fxbackend_child_") as folder:
        result, log = Path(folder, "result"), Path(folder, "log")
        child = os.fork()
        if child == 0:
            _child(module, name, args, kwargs, environment, result, log)
        status = _wait(child, timeout)
        text = log.read_text(errors="replace")[-6000:] if log.exists() else ""
        if status is None:
            return "error", f"{name} took longer than {timeout} s", text
        if not result.exists():
            return "error", f"{name} died with status {status}", text
        kind, value = pickle.loads(result.read_bytes())
        return kind, value, text


def _child(
    module: str,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    environment: dict[str, str],
    result: Path,
    log: Path,
) -> None:
    os.setsid()
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update(environment)
    try:
        answer: tuple[str, object] = ("value", getattr(importlib.import_module(module), name)(*args, **kwargs))
        data = pickle.dumps(answer)
    except BaseException:
        data = pickle.dumps(("error", traceback.format_exc()))
    result.with_suffix(".part").write_bytes(data)
    result.with_suffix(".part").rename(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _wait(child: int, timeout: float) -> int | None:
    """The status of a child, None when its time ran out; its whole session is ended in any case."""
    end = time.monotonic() + timeout
    status: int | None = None
    while time.monotonic() < end:
        done, code = os.waitpid(child, os.WNOHANG)
        if done:
            status = code
            break
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


if __name__ == "__main__":
    _serve()
