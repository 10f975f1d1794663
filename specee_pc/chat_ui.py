"""What chat draws: streamed text, with control characters made visible, and the figures."""

from __future__ import annotations

import sys
import unicodedata
from typing import TextIO

from specee_pc.events import Stats

HELP = "/clear starts anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer"

# Marks that reorder what a terminal shows, so that text may read as something else.
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def escape(text: str) -> str:
    """Text that a terminal only prints: control characters but newline and tab as \\x1b.

    A model could otherwise move the cursor, set the title or hide what it wrote.
    """
    return "".join(c if _is_plain(c) else _visible(c) for c in text)


def _is_plain(c: str) -> bool:
    return c in "\n\t" or (unicodedata.category(c) not in ("Cc", "Cs") and c not in _BIDI)


def _visible(c: str) -> str:
    return f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}"


class Screen:
    """Answers go to out, everything about them to err; what goes to a terminal is escaped."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out, self.err = out or sys.stdout, err or sys.stderr
        self._escape = self.out.isatty()
        self._at_line_start = True

    def text(self, piece: str) -> None:
        """A piece of an answer, shown at once."""
        if piece:
            self._write(escape(piece) if self._escape else piece)
            self._at_line_start = piece.endswith("\n")

    def end_answer(self) -> None:
        """End the answer's line, unless it ended itself."""
        if not self._at_line_start:
            self._write("\n")
        self._at_line_start = True

    def note(self, line: str) -> None:
        """A line about the answers."""
        print(escape(line), file=self.err, flush=True)

    def _write(self, text: str) -> None:
        try:
            self.out.write(text)
        except UnicodeEncodeError:  # a terminal of a small character set
            encoding = self.out.encoding or "ascii"
            self.out.write(text.encode(encoding, "replace").decode(encoding))
        self.out.flush()


def format_stats(stats: Stats) -> list[str]:
    """Speed, layers, exits and time shares of a session, as lines."""
    if not stats.n_token:
        return ["no tokens"]
    lines = [
        f"{stats.n_token} tokens, {stats.tokens_per_second:.1f} tok/s, mode {stats.mode}, "
        f"mean layers {stats.mean_layers:.1f} of {stats.n_layer}; "
        f"prompt {stats.n_prompt} tokens in {stats.t_prompt_s:.2f} s"
    ]
    if stats.mode != "off":
        refuted = f", {stats.n_refuted} refuted" if stats.mode == "exact" else ""
        layers = [f"{i}: {n}" for i, n in enumerate(stats.histogram[: stats.n_layer]) if n]
        at = f"; tokens decided after layer {', '.join(layers)}" if layers else ""
        lines.append(f"exits: {stats.n_exit} ({stats.exit_share:.0%} of the tokens){refuted}{at}")
    if shares := stats.time_shares:
        parts = (f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
        lines.append(f"time: {', '.join(parts)}")
    return lines
