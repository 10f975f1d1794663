"""Recording: what a killed run left behind is cut off, and only what is missing is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from specee_pc.errors import FileAccessError, InvalidOption, SpeceeError
from specee_pc.fit.prompts import (
    MIN_PROMPTS,
    Batch,
    Part,
    Prompt,
    default_file,
    plan_batches,
    read_prompts,
)
from specee_pc.fit.recording import Key, Recording, layers_to_record

LAYERS = (2, 4)
PLAN = [Batch(Part.TRAIN, 0, ((1, 2), (3,)), 2, 0.0), Batch(Part.TEST, 2, ((4,),), 2, 0.0)]
KEY = Key("model", 3, LAYERS, "plan")


def write_rows(batch: Batch, layers: list[int], path: Path) -> int:
    row = (batch.first_id).to_bytes(4, "little") + bytes(KEY.row_type.itemsize - 4)
    with path.open("ab") as file:
        file.write(row * 3)
    return 3


def test_a_stopped_recording_resumes(tmp_path: Path) -> None:
    calls: list[int] = []

    def interrupted(batch: Batch, layers: list[int], path: Path) -> int:
        calls.append(batch.first_id)
        if batch.first_id == 2:
            path.open("ab").write(b"half a row")
            raise KeyboardInterrupt
        return write_rows(batch, layers, path)

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        Recording(tmp_path / "w", KEY, said.append).run(PLAN, interrupted, lambda n: None)
    assert calls == [0, 2]

    again = Recording(tmp_path / "w", KEY, said.append)
    assert again.n_rows == 3
    assert "resuming, 3 tokens" in said[-1]
    calls.clear()

    def counted(batch: Batch, layers: list[int], path: Path) -> int:
        calls.append(batch.first_id)
        return write_rows(batch, layers, path)

    again.run(PLAN, counted, lambda n: None)
    assert calls == [2]
    rows = again.load(PLAN)
    assert len(rows) == 6
    assert rows.prompt.tolist() == [0, 0, 0, 2, 2, 2]
    assert rows.of(Part.TEST).tolist() == [3, 4, 5]
    assert rows.states(4).shape == (6, 3)


def test_the_text_of_some_rows_is_theirs_alone(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "work", KEY, lambda line: None)
    recording.run(PLAN, write_rows, lambda n: None)
    rows = recording.load(PLAN)
    # The rows of a batch above are all of its first prompt.
    assert sorted(rows.text_of(rows.of(Part.TRAIN)).tolist()) == [0, 0, 0, 1, 2]
    assert sorted(rows.text_of(rows.of(Part.TEST)).tolist()) == [0, 0, 0, 4]


def test_another_model_starts_anew(tmp_path: Path) -> None:
    said: list[str] = []
    Recording(tmp_path, KEY, said.append).run(PLAN, write_rows, lambda n: None)
    other = Recording(tmp_path, Key("other", 3, LAYERS, "plan"), said.append)
    assert other.n_rows == 0
    assert "of another model" in said[-1]


def test_a_short_write_is_noticed(tmp_path: Path) -> None:
    recording = Recording(tmp_path, KEY, print)
    with pytest.raises(FileAccessError, match="disk full"):
        recording.run(PLAN, lambda b, n, p: 1 + write_rows(b, n, p), lambda n: None)


def test_nothing_recorded_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpeceeError, match="no tokens"):
        Recording(tmp_path, KEY, print).load(PLAN)


def test_layers_to_record() -> None:
    layers = layers_to_record(30)
    assert layers[-1] == 30
    assert set(range(18, 30)) <= set(layers)
    assert min(layers) >= 13


def test_prompts_are_split_by_prompt() -> None:
    prompts = [Prompt((f"prompt {i}",), ()) for i in range(200)]
    plan, n_long = plan_batches(prompts, lambda p: [1] * (600 if p.turns == ("prompt 7",) else 5))
    assert n_long == 1
    ids = [i for b in plan for i in range(b.first_id, b.first_id + len(b.prompts))]
    assert ids == list(range(199))
    assert {b.part for b in plan} == set(Part)
    assert all(b.temperature == 0 for b in plan if b.part in (Part.CALIBRATION, Part.TEST))
    with pytest.raises(InvalidOption, match=str(MIN_PROMPTS)):
        plan_batches(prompts[:10], lambda p: [1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 prompts"),
        ("{}\n" * 50, ":1: needs"),
        ('{"turns": ["a"]}\nnot json\n', ":2: not JSON"),
    ],
)
def test_bad_prompt_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidOption, match=message):
        read_prompts(file)


def test_the_embedded_prompts_are_many_and_different() -> None:
    prompts = read_prompts(default_file())
    assert len(prompts) >= 300
    assert len({p.turns for p in prompts}) == len(prompts)
