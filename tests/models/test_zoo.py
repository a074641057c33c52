"""The zoo holds every causal type of Transformers, and a coverage run survives what happens to one of them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fxbackend import coverage
from fxbackend.cli import main
from fxbackend.coverage import Row
from fxbackend.errors import InputError
from fxbackend.hf.tiny import hf_logits
from fxbackend.hf.zoo import model_types, zoo_config, zoo_model
from fxbackend.hf.zoo_types import EXCLUDED, OVERRIDES, VARIANTS


def test_every_type_is_there_or_left_out_for_a_reason() -> None:
    types = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(model_types()) | EXCLUDED.keys() == types | VARIANTS.keys()
    assert not set(model_types()) & EXCLUDED.keys()
    assert all(EXCLUDED.values())
    assert {key.partition(":")[0] for key in (*VARIANTS, *OVERRIDES)} <= types


def test_every_config_is_tiny() -> None:
    for key in model_types():
        config = zoo_config(key).get_text_config(decoder=True)
        assert config.vocab_size <= 260, key
        assert getattr(config, "num_hidden_layers", 1) <= 16, key  # hrm_text runs two layers 8 times each


@pytest.mark.parametrize(
    "key", ["roberta", "bart", "mpt", "glm4_moe", "deepseek_v3", "gpt_oss", "emu3", "falcon:new", "jamba"]
)
def test_models_are_random_throughout(key: str) -> None:
    model = zoo_model(key)
    persistent = model.state_dict()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if name in persistent and value.is_floating_point():
            assert not bool(((value == 0) | (value == 1)).all()), name
    again = zoo_model(key).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in persistent.items())
    row = torch.arange(8, 25)
    logits = hf_logits(model, row)
    assert logits.std() > 0.3
    torch.testing.assert_close(hf_logits(model, row[:9]), logits[:9], rtol=1e-4, atol=1e-4)  # it is causal


def examined(key: str) -> Row:
    """Stands for a conversion."""
    match key:
        case "crash":
            os.abort()
        case "exit":
            os._exit(3)
        case "hang":
            time.sleep(60)
        case "seen":
            with Path(os.environ["SEEN"]).open("a") as file:
                file.write("x")
    return Row(key, "right", captured=True, converted=True, error=1e-6, scale=2.0)


def test_a_crash_and_a_hang_are_rows() -> None:
    rows = coverage.run(
        dict.fromkeys(("crash", "exit", "hang", "fine"), "") | {"left": "a reason"}, function=examined, timeout=1.0
    )
    assert [row.outcome for row in rows] == ["failed", "failed", "failed", "right", "excluded"]
    assert [row.reason for row in rows] == [
        "its process died of SIGABRT",
        "its process ended with status 3 and without an answer",
        "no answer within 1 s",
        "",
        "a reason",
    ]
    assert rows[3].relative == 5e-7
    assert coverage.totals(rows).startswith("4 models examined: 1 captured, 1 converted, 1 right")


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    output = tmp_path / "rows.jsonl"
    first = coverage.run({"seen": ""}, output, examined)
    second = coverage.run({"seen": "", "fine": ""}, output, examined)
    assert second[0] == first[0]
    assert (tmp_path / "seen").read_text() == "x"
    assert list(coverage.read(output)) == second
    output.write_text("{}\n")
    with pytest.raises(InputError, match=r"rows.jsonl:1 is no row"):
        coverage.run({"seen": ""}, output, examined)


def test_the_command_examines_writes_and_knows_its_types(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, page = tmp_path / "rows.jsonl", tmp_path / "coverage.md"
    assert main(["coverage", "llama", "gemma3", "axk2", "--output", str(output), "--markdown", str(page)]) == 0
    rows = {row.key: row for row in coverage.read(output)}
    assert rows["llama"].outcome == "right" and rows["llama"].relative is not None
    assert rows["axk2"].outcome == "refused" and rows["axk2"].reason
    assert rows["gemma3"].outcome == "excluded" and "gemma3_text" in rows["gemma3"].reason
    assert "2 models examined" in " ".join(capsys.readouterr().out.split())
    assert "| llama | right | yes | yes |" in page.read_text()
    assert main(["coverage", "lama"]) == 1
    assert "'lama' is no type of causal language model" in capsys.readouterr().err
