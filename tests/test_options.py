from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from specee_pc import options
from specee_pc.errors import InvalidOption, SpeceeError


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "fast"},
        {"max_tokens": 0},
        {"ctx": -1},
        {"threads": 0},
        {"threads": -1},
        {"threads": 513},
        {"threads": 2.0},
        {"threads": True},
    ],
)
def test_chat_refuses_impossible_settings(settings: dict[str, Any]) -> None:
    (name, value) = next(iter(settings.items()))
    with pytest.raises(InvalidOption) as e:
        options.ChatOptions(**settings)
    assert name.replace("_", "-") in str(e.value) and repr(value) in str(e.value)
    assert isinstance(e.value, SpeceeError) and isinstance(e.value, ValueError)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 1.1},
        {"min_p": -1.0},
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**32},
    ],
)
def test_sampling_refuses_impossible_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        options.SamplingOptions(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"limit": 0},
        {"repeats": 0},
        {"max_tokens": 0},
        {"threads": 0},
        {"modes": ()},
        {"modes": ("exact", "exact")},
        {"modes": ("exact", "stock")},
    ],
)
def test_bench_refuses_impossible_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        options.BenchOptions(**settings)


@pytest.mark.parametrize("settings", [{"fidelity": 1.0}, {"fidelity": 0.0}, {"threads": 0}])
def test_fit_refuses_impossible_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        options.FitOptions(Path("m.gguf"), **settings)


def test_defaults_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options.ChatOptions().mode == "exact"
    assert options.SamplingOptions().temperature == 0.0
    assert options.BenchOptions().modes == ("off", "exact", "calibrated")
    assert options.FitOptions(Path("m.gguf")).fidelity == 0.99
    options.check_threads("threads", options.default_threads())
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert options.default_threads() == 6
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert options.default_threads() == 8
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert options.default_threads() == 1
