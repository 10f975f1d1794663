from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specee_pc import Stats
from specee_pc.chat_ui import Screen, escape, format_stats


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain äöü 漢字 🙂\n\tx", "plain äöü 漢字 🙂\n\tx"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("a\rb\bc\x7f\x9b", "a\\x0db\\x08c\\x7f\\x9b"),
        ("\u202eevil\u2066", "\\u202eevil\\u2066"),
        ("\ud800", "\\ud800"),
    ],
)
def test_escape(text: str, shown: str) -> None:
    assert escape(text) == shown


@given(st.text())
def test_nothing_controls_the_terminal(text: str) -> None:
    categories = {unicodedata.category(c) for c in escape(text) if c not in "\n\t"}
    assert not categories & {"Cc", "Cs"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_answers_are_escaped_on_a_terminal_only() -> None:
    for out, expected in ((Terminal(), "\\x1b[1m\n"), (io.StringIO(), "\x1b[1m\n")):
        screen = Screen(out, io.StringIO())
        screen.text("\x1b[1m")
        screen.end_answer()
        screen.end_answer()  # its line has ended already
        assert out.getvalue() == expected


def test_a_small_character_set_is_no_error() -> None:
    raw = io.BytesIO()
    screen = Screen(io.TextIOWrapper(raw, encoding="ascii"), io.StringIO())
    screen.text("naïve")
    assert raw.getvalue() == b"na?ve"


def test_stats_lines() -> None:
    histogram = [0] * 31
    histogram[21], histogram[30] = 4, 6
    stats = Stats(
        mode="exact",
        n_layer=30,
        n_prompt=12,
        n_token=10,
        n_exit=4,
        n_refuted=2,
        n_layer_sum=264,
        t_prompt_s=0.5,
        t_layers_s=1.5,
        t_total_s=2.0,
        histogram=tuple(histogram),
    )
    lines = format_stats(stats)
    assert lines[0].startswith("10 tokens, 5.0 tok/s, mode exact, mean layers 26.4 of 30")
    assert lines[1] == "exits: 4 (40% of the tokens), 2 refuted; tokens decided after layer 21: 4"
    assert lines[2] == "time: layers 75%, other 25%"
    assert format_stats(Stats(mode="off", n_layer=30)) == ["no tokens"]
