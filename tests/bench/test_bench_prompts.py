from __future__ import annotations

from pathlib import Path

import pytest

from specee_pc.bench.prompts import PromptFileError, default_file, read_workload, read_workloads

GOOD = '{"turns": ["Hello", "and then"], "reference": ["Hi"]}\n'


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_the_first_turn_is_asked_and_the_stem_is_the_name(tmp_path: Path) -> None:
    file = write(tmp_path / "mt_bench.jsonl", GOOD + '\n{"turns": ["Für Elise"]}\r\n')
    workload = read_workload(file, None)
    assert (workload.name, workload.file) == ("mt_bench", "mt_bench.jsonl")
    assert [prompt.text for prompt in workload.prompts] == ["Hello", "Für Elise"]
    assert [prompt.where for prompt in workload.prompts] == ["mt_bench.jsonl:1", "mt_bench.jsonl:3"]


def test_a_limit_takes_the_first(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", GOOD * 3)
    assert len(read_workload(file, 2).prompts) == 2
    assert len(read_workload(file, 5).prompts) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        ("\n \n", "holds no prompts"),
        (GOOD + "{", r"p\.jsonl:2: not valid JSON"),
        (GOOD.encode() + b"\xff\n", r"p\.jsonl:2: not valid JSON"),
        (GOOD + "\n[1]", r"p\.jsonl:3: needs"),
        ('{"turn": ["x"]}', r"p\.jsonl:1: needs"),
        ('{"turns": "x"}', r"p\.jsonl:1: needs"),
        ('{"turns": []}', r"p\.jsonl:1: needs"),
        ('{"turns": [7]}', r"p\.jsonl:1: the first turn"),
        ('{"turns": [" "]}', r"p\.jsonl:1: the first turn"),
        ('{"turns": ["\\ud800"]}', r"p\.jsonl:1: the first turn has half"),
        ("[" * 100_000, r"p\.jsonl:1: not valid JSON"),
    ],
)
def test_a_bad_file_is_told_with_its_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(PromptFileError, match=message):
        read_workload(write(tmp_path / "p.jsonl", text), 1)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(PromptFileError, match="cannot be read"):
            read_workload(path, None)


def test_two_files_of_one_name_would_mix(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    files = [write(tmp_path / "x.jsonl", GOOD), write(tmp_path / "b" / "x.jsonl", GOOD)]
    with pytest.raises(PromptFileError, match="named x"):
        read_workloads(files, None)


def test_the_prompts_of_the_package_are_good_and_not_those_of_the_calibration() -> None:
    workload = read_workload(default_file(), None)
    texts = {prompt.text for prompt in workload.prompts}
    assert len(texts) == 12
    calibration = read_workload(default_file().parent / "calibration_prompts.jsonl", None)
    assert not texts & {prompt.text for prompt in calibration.prompts}
