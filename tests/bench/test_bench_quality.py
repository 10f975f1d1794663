from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specee_pc.bench.quality import (
    Fidelity,
    Judgement,
    Words,
    count_words,
    divergence,
    fidelity,
)

TOKENS = st.lists(st.integers(0, 3), max_size=8)


@pytest.mark.parametrize(
    ("stock", "emitted", "expected"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([], [], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
    ],
)
def test_divergence(stock: list[int], emitted: list[int], expected: int | None) -> None:
    assert divergence(stock, emitted) == expected


@given(TOKENS, TOKENS)
def test_divergence_is_the_end_of_the_common_prefix(a: list[int], b: list[int]) -> None:
    d = divergence(a, b)
    assert d == divergence(b, a)
    if d is None:
        assert a == b
    else:
        assert a[:d] == b[:d]
        assert a[d : d + 1] != b[d : d + 1]


def test_fidelity_is_judged_on_the_emitted_prefix_not_on_stocks_output() -> None:
    """Stock said 3 4 5; after the wrong 9, full depth says 6 (emitted) and then 8 (7 emitted).

    Comparing with stock's output position by position would give 2 of 5, and counting all that
    follows a divergence as wrong would, too.
    """
    judged = Judgement(greedy=(3, 6, 8), top1_logit=1.0, emitted_logit=0.5)
    assert fidelity([1, 2, 3, 4, 5], [1, 2, 9, 6, 7], judged) == Fidelity(3, 5)


def test_fidelity_does_not_reward_agreeing_with_stock_by_chance() -> None:
    """The last token equals stock's, but after another prefix full depth wants something else."""
    judged = Judgement(greedy=(2, 8), top1_logit=1.0, emitted_logit=0.5)
    assert fidelity([1, 2, 5], [1, 9, 5], judged) == Fidelity(1, 3)


def test_an_identical_output_needs_no_judgement() -> None:
    assert fidelity([1, 2, 3], [1, 2, 3], None).share == 1.0


def test_an_output_that_stops_early_has_only_right_tokens() -> None:
    assert fidelity([1, 2, 3], [1, 2], None) == Fidelity(2, 2)


@pytest.mark.parametrize("judged", [None, Judgement((3,), 0.0, 0.0), Judgement((3, 6, 8, 1), 0, 0)])
def test_a_verdict_for_each_token_is_needed(judged: Judgement | None) -> None:
    with pytest.raises(ValueError, match="for 3 tokens"):
        fidelity([1, 2, 3, 4, 5], [1, 2, 9, 6, 7], judged)


def test_fidelity_of_several_outputs_weighs_tokens() -> None:
    assert (Fidelity(1, 1) + Fidelity(0, 3)).share == 0.25
    assert Fidelity(0, 0).share is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Words(0, 0)),
        ("one two three", Words(0, 3)),
        ("Sar Sar, sar", Words(2, 3)),
        ("the\nthe cat", Words(1, 3)),
        ("a b a b", Words(0, 4)),
        ("- - -", Words(0, 0)),
        ("so -- so", Words(1, 2)),
    ],
)
def test_adjacent_repeated_words(text: str, expected: Words) -> None:
    assert count_words(text) == expected


def test_duplicate_rate() -> None:
    assert (count_words("no no") + count_words("a b")).duplicate_rate == 0.25
    assert count_words("").duplicate_rate == 0.0
