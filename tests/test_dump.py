"""The dump: what lies where, and that nothing that lies there is touched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import fxbackend
from fxbackend import default_pipeline
from fxbackend.dump import new_folder, observers_from_settings
from fxbackend.hf.tiny import tiny_config
from fxbackend.program import Stage


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_a_conversion_leaves(tmp_path: Path) -> None:
    converted = fxbackend.convert(tiny_config("llama"), dump=tmp_path)
    folder = tmp_path / "001_LlamaForCausalLM" / "rank0"
    names = files(folder)
    assert {"000_captured.txt", "summary.txt", "weights.txt"} <= names
    changed = [f"{number:03d}_{each.name}" for number, each in enumerate(converted.report.passes, 1) if each.changed]
    assert {name.partition("/")[0] for name in names if "/" in name} == set(changed)
    fused = folder / changed[-1]
    assert {"before.txt", "after.txt", "diff.txt"} == files(fused)
    diff = (fused / "diff.txt").read_text()
    assert diff.startswith("--- before\n+++ after\n")
    assert any(line.startswith("+") and "fxbackend.rope_qk(" in line for line in diff.splitlines())
    assert (folder / changed[0] / "before.txt").read_text() == (folder / "000_captured.txt").read_text()
    assert "fuse_rope" in (folder / "summary.txt").read_text()
    assert str(converted.program.weights) + "\n" == (folder / "weights.txt").read_text()


def test_summary_lists_refusals_and_near_misses(tmp_path: Path) -> None:
    converted = fxbackend.convert(tiny_config("phi"), dump=tmp_path)
    text = (tmp_path / "001_PhiForCausalLM" / "rank0" / "summary.txt").read_text()
    for record in converted.report.passes:
        for miss in record.near_misses:
            assert f"{record.name} nearly matched {miss}" in text
        assert not record.refusals or f"{record.name} left " in text


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "007_Other").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        fxbackend.convert(tiny_config("llama"), passes=default_pipeline().until(Stage.CANONICAL), dump=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "007_Other",
        "notes.txt",
        "008_LlamaForCausalLM",
        "009_LlamaForCausalLM",
    }
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_conversions_that_start_at_once_have_numbers_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: new_folder(tmp_path, "AB"[number % 2]), range(24)))
    assert sorted(int(folder.parent.name[:3]) for folder in made) == list(range(1, 25))


def test_ranks_of_one_run_share_a_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda rank: new_folder(tmp_path, "A", rank, 4), (2, 0, 3, 1)))
    assert {folder.parent.name for folder in made} == {"001_A"}
    assert {folder.name for folder in made} == {"rank0", "rank1", "rank2", "rank3"}
    assert new_folder(tmp_path, "A", 0, 4).parent.name == "002_A"
    assert new_folder(tmp_path, "A", 1, 4).parent.name == "002_A"
    assert new_folder(tmp_path, "B", 1, 4).parent.name == "003_B"
    assert new_folder(tmp_path, "A").parent.name == "004_A"


@pytest.mark.parametrize(("value", "where"), [("", None), ("0", None), ("1", "fxbackend_dump"), ("other", "other")])
def test_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, where: str | None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FXBACKEND_DUMP", value)
    observers = observers_from_settings("A")
    assert [path.name for path in tmp_path.iterdir()] == ([where] if where else [])
    assert len(observers) == (1 if where else 0)


def test_two_runs_of_one_conversion_go_on_counting(tmp_path: Path) -> None:
    captured = fxbackend.convert(tiny_config("llama"), passes=fxbackend.Pipeline(())).program
    observers = observers_from_settings("A", directory=tmp_path)
    pipeline = default_pipeline()
    half = pipeline.until(Stage.CANONICAL)
    rest = fxbackend.Pipeline(pipeline.passes[len(half.passes) :])
    rest.run(half.run(captured, observers), observers)
    numbers = sorted(path.name for path in (tmp_path / "001_A" / "rank0").iterdir() if path.is_dir())
    assert int(numbers[-1][:3]) == len(pipeline.passes)
    assert len({name[:3] for name in numbers}) == len(numbers)
