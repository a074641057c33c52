"""Families with experts in the real engine: all log-probabilities equal those of Transformers, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxbackend.hf.zoo import zoo_model
from tests.engine import tasks
from tests.engine.forks import Forks

TOLERANCE = 1e-4

FULL = (
    "qwen2_moe",
    "olmoe",
    "granitemoe",
    "granitemoeshared",
    "deepseek_v2",
    "glm4_moe",
    "ernie4_5_moe",
    "phimoe",
    "hunyuan_v1_moe",
    "dots1",
    "minimax_m2",
    "flex_olmo",
    "aria_text",
    "gemma4_text:moe",
    "minimax_m3_vl_text",
)


@pytest.mark.parametrize(
    "key",
    ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", *(pytest.param(key, marks=pytest.mark.full) for key in FULL)],
)
def test_log_probabilities_are_those_of_transformers(key: str, forks: Forks, tmp_path: Path) -> None:
    model = zoo_model(key)
    model.save_pretrained(tmp_path)
    done = forks.run(tasks.compare, str(tmp_path))
    assert done.served_by == "FxbackendForCausalLM"
    assert done.worst < TOLERANCE
    assert done.greedy
    assert done.plain == ()
    assert done.ops["vllm.Experts"] > 0
    assert not any(name.startswith("fxbackend.") for name in done.ops)


def test_experts_that_vllm_has_no_class_for_come_to_us(forks: Forks, tmp_path: Path) -> None:
    zoo_model("mellum").save_pretrained(tmp_path)
    done = forks.run(tasks.compare, str(tmp_path), model_impl="auto")
    assert done.served_by == "FxbackendForCausalLM" and done.worst < TOLERANCE


def test_two_tensor_parallel_ranks(forks: Forks, tmp_path: Path) -> None:
    zoo_model("gpt_oss").save_pretrained(tmp_path)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    done = forks.run(tasks.compare, str(tmp_path), tensor_parallel_size=2, environment=environment)
    assert done.worst < TOLERANCE and done.greedy and done.plain == ()
