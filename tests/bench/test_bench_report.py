from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from fake_worker import stats
from hypothesis import given
from hypothesis import strategies as st

from specee_pc.bench import report
from specee_pc.bench.output import Output
from specee_pc.bench.quality import Fidelity
from specee_pc.bench.report import Measured, Pair, Spread
from specee_pc.errors import FileAccessError, SpeceeError


def output(n_token: int, speed: float, tokens: list[int] | None = None, **more: Any) -> Output:
    tokens = tokens if tokens is not None else list(range(n_token))
    text = " ".join(map(str, tokens))
    return Output(tuple(tokens), text, 0.5, (len(tokens) - 1) / speed, **more)


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=9))
def test_a_spread_encloses_its_median(values: list[float]) -> None:
    spread = Spread.of(values)
    assert min(values) == spread.min <= spread.median <= spread.max == max(values)


def test_the_median_of_an_even_number_is_between() -> None:
    assert Spread.of([4.0, 1.0, 2.0, 3.0]) == Spread(1.0, 2.5, 4.0)
    assert Spread(9.0, 10.0, 11.0).width == pytest.approx(0.2)


def test_decoding_speed_is_without_the_first_token() -> None:
    assert Output((1, 2, 3), "", 9.0, 0.5).decode_tok_s == 4.0
    assert Output((1,), "", 9.0, 0.0).decode_tok_s is None


def test_ratios_are_formed_pair_by_pair() -> None:
    """Stock at 10, 20, 40 and the candidate at 20, 10, 80; the ratio of the medians would be 1."""
    one = Measured("exact", "w", "lens")
    for i, (stock, candidate) in enumerate([(10.0, 20.0), (20.0, 10.0), (40.0, 80.0)]):
        one.pairs.append(Pair(i, 0, 5, output(9, stock), output(9, candidate)))
    assert one.row()["speedup"] == {"min": 0.5, "median": 2.0, "max": 2.0}
    assert one.row()["decode_tok_s"] == {"min": 10.0, "median": 20.0, "max": 80.0}
    assert one.row()["prefill_tok_s"] == {"min": 10.0, "median": 10.0, "max": 10.0}


def test_answers_of_other_lengths_compare_by_their_speed() -> None:
    one = Measured("calibrated", "w")
    one.pairs.append(Pair(0, 0, 5, output(100, 10.0), output(3, 15.0)))
    assert one.row()["speedup"]["median"] == pytest.approx(1.5)
    assert one.row()["n_tokens"] == 3


def test_an_answer_of_one_token_has_no_speed() -> None:
    one = Measured("off", "w")
    one.pairs.append(Pair(0, 0, 5, output(1, 1.0), output(1, 1.0)))
    with pytest.raises(SpeceeError, match="nothing to time"):
        one.row()
    one.pairs.append(Pair(1, 0, 5, output(3, 2.0), output(3, 1.0)))
    one.pairs.append(Pair(2, 0, 5, output(1, 1.0), output(3, 1.0)))
    assert one.row()["speedup"] == {"min": 0.5, "median": 0.5, "max": 0.5}
    assert one.row()["n_prompts"] == 3


def test_identity_counts_prompts_whose_every_repeat_is_stocks() -> None:
    one, same, other = Measured("exact", "w"), [1, 2, 3], [1, 2, 4]
    for prompt, repeats in enumerate([[same, same], [same, other], [other, other]]):
        for repeat, tokens in enumerate(repeats):
            pair = Pair(prompt, repeat, 5, output(0, 1.0, same), output(0, 1.0, tokens))
            one.pairs.append(pair)
    assert one.row()["identical_outputs"] == 1
    assert one.row()["n_prompts"] == 3
    assert one.row()["n_tokens"] == 9
    assert one.unsteady_prompts() == [1]


def test_duplicates_are_counted_in_the_first_repeat() -> None:
    one = Measured("off", "w")
    for repeat in (0, 1):
        repeated = output(0, 1.0, [7, 7, 8, 9])
        one.pairs.append(Pair(0, repeat, 5, repeated, repeated))
    assert one.row()["duplicate_rate"] == 0.25


def test_a_session_tells_about_the_inside() -> None:
    """Two answers of 5 and 3 tokens; see stats() for what each says."""
    told = [
        output(5, 10.0, stats=stats(5), histogram=(0, 0, 0, 4, 1)),
        output(3, 10.0, stats=stats(3), histogram=(0, 0, 0, 2, 1)),
    ]
    inside = report.inside(told, "exact")
    assert inside["mean_layers"] == (4 + 3 * 4 + 4 + 3 * 2) / 8
    assert inside["exit_histogram"] == [0, 0, 0, 6, 2]
    assert inside["tokens_per_pass"] == (4 + 2) / 4  # without the two of the prompts
    assert inside["draft_acceptance"] == 6 / 8
    assert inside["time_share"]["layers"] == pytest.approx(0.02)
    assert inside["time_share"]["other"] == pytest.approx(0.4 + 0.2 - 6 * 0.02)
    assert report.inside(told, "calibrated")["draft_acceptance"] is None


def test_stock_tells_nothing_about_the_inside() -> None:
    assert set(report.inside([output(5, 10.0)], "stock").values()) == {None}


def test_unsteadiness_compares_the_same_work() -> None:
    """Prompts of 10 and 20 tok/s differ; each of them varies by a tenth between its repeats."""
    one = Measured("stock", "w")
    for prompt, speeds in enumerate([(9.5, 10.5), (19.0, 21.0)]):
        for repeat, speed in enumerate(speeds):
            one.pairs.append(Pair(prompt, repeat, 5, output(9, speed), output(9, speed)))
    assert one.unsteadiness() == pytest.approx(0.1)
    one.pairs = [pair for pair in one.pairs if pair.repeat == 0]
    assert one.unsteadiness() == pytest.approx(9.5 / 14.25)


def test_fidelity_is_in_the_row() -> None:
    one = Measured("exact", "w", fidelity=Fidelity(3, 4))
    one.pairs.append(Pair(0, 0, 5, output(9, 1.0), output(9, 1.0)))
    assert one.row()["fidelity"] == 0.75


# ---- files ----


def test_a_report_is_written_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: Path) -> None:
        raise OSError("disk full")

    file = tmp_path / "r.json"
    report.write(file, {"a": 1})
    assert json.loads(file.read_text()) == {"a": 1}
    with pytest.raises(ValueError, match="JSON compliant"):
        report.write(file, {"a": float("nan")})
    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", refuse)
        with pytest.raises(FileAccessError, match=r"r\.json: cannot be written: disk full"):
            report.write(file, {"a": 2})
    assert json.loads(file.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [file]


def test_an_unwritable_report_is_told_beforehand(tmp_path: Path) -> None:
    report.check_writable(tmp_path / "new.json")
    with pytest.raises(FileAccessError, match="cannot be written"):
        report.check_writable(tmp_path / "none" / "r.json")
    with pytest.raises(FileAccessError, match="not a regular file"):
        report.check_writable(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_no_place_for_a_report() -> None:
    with pytest.raises(FileAccessError, match="not a regular file"):
        report.check_writable(Path(os.devnull))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write all")
def test_a_read_only_folder_or_file_is_told_beforehand(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    file.write_text("{}")
    file.chmod(0o444)
    with pytest.raises(FileAccessError, match="read-only"):
        report.check_writable(file)
    tmp_path.chmod(0o555)
    with pytest.raises(FileAccessError, match="cannot be written"):
        report.check_writable(tmp_path / "new.json")
    tmp_path.chmod(0o755)
