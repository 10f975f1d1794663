"""One answer of a worker: its tokens, what they say, and how long they took."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Output:
    """One answer. prefill_s ends with the first token; decode_s is for those after it.

    stats: the fields of specee_stats, empty for stock; histogram as Stats.histogram.
    """

    tokens: tuple[int, ...]
    text: str
    prefill_s: float
    decode_s: float
    stats: dict[str, Any] = field(default_factory=dict)
    histogram: tuple[int, ...] = ()

    @property
    def decode_tok_s(self) -> float | None:
        """Tokens after the first, per second; None when there is none."""
        if len(self.tokens) < 2 or self.decode_s <= 0:
            return None
        return (len(self.tokens) - 1) / self.decode_s
