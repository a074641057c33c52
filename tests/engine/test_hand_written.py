"""Models that the engine's own backends refuse, in the real engine: all log-probabilities as in Transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxbackend.hf.zoo import zoo_model
from tests.engine import tasks
from tests.engine.forks import Forks

# Attention by hand, ALiBi, learned positions with an offset, two attentions in one layer, heads of several linears.
DEFAULT = ("codegen", "gpt_neo", "gpt_neox_japanese", "mpt", "openai-gpt", "xglm", "bloom", "roberta", "diffllama")
FULL = (
    "gptj",
    "gpt2",
    "opt",
    "falcon",
    "falcon:alibi",
    "gpt_bigcode",
    "biogpt",
    "bert",
    "camembert",
    "granite_swa",
    "trocr",
    "electra",
)


@pytest.mark.parametrize("name", [*DEFAULT, *(pytest.param(name, marks=pytest.mark.full) for name in FULL)])
def test_log_probabilities_are_those_of_transformers(name: str, forks: Forks, tmp_path: Path) -> None:
    zoo_model(name).save_pretrained(tmp_path)
    done = forks.run(tasks.compare, str(tmp_path))
    assert done.served_by == "FxbackendForCausalLM"
    assert done.worst < 1e-4
    assert done.greedy
