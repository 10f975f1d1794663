"""How good an output is next to stock's: identity, fidelity, repeated words. Pure functions."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from dataclasses import dataclass


def divergence(stock: Sequence[int], emitted: Sequence[int]) -> int | None:
    """Index of the first token where two outputs differ or one has ended; None: identical."""
    for i, (a, b) in enumerate(zip(stock, emitted, strict=False)):
        if a != b:
            return i
    return None if len(stock) == len(emitted) else min(len(stock), len(emitted))


@dataclass(frozen=True)
class Judgement:
    """Stock's verdict on an output from its first divergence on.

    greedy: the full-depth greedy token at each position from there to the end, given the emitted
    prefix; empty when the output ended there. The logits are stock's, at the divergence.
    """

    greedy: tuple[int, ...]
    top1_logit: float
    emitted_logit: float


@dataclass(frozen=True)
class Fidelity:
    """Emitted tokens, and how many of them full-depth greedy decoding picks after their prefix."""

    n_match: int
    n_token: int

    @property
    def share(self) -> float | None:
        """Teacher-forced fidelity, 0..1; None without tokens."""
        return self.n_match / self.n_token if self.n_token else None

    def __add__(self, other: Fidelity) -> Fidelity:
        return Fidelity(self.n_match + other.n_match, self.n_token + other.n_token)


def fidelity(stock: Sequence[int], emitted: Sequence[int], judged: Judgement | None) -> Fidelity:
    """Fidelity of one output. judged: from the first divergence on; None for an identical output.

    Up to the divergence the prefix is stock's own, so stock's tokens are the verdict. After it, a
    token counts if full depth picks it too, whatever stock's own output says there.
    """
    begin = divergence(stock, emitted)
    if begin is None:
        return Fidelity(len(emitted), len(emitted))
    verdicts = judged.greedy if judged is not None else ()
    if len(verdicts) != len(emitted) - begin:
        raise ValueError(f"{len(verdicts)} verdicts for {len(emitted) - begin} tokens")
    agreed = sum(a == b for a, b in zip(emitted[begin:], verdicts, strict=True))
    return Fidelity(begin + agreed, len(emitted))


@dataclass(frozen=True)
class Words:
    """Words of a text, and how many of them repeat the word before."""

    n_repeated: int
    n_word: int

    @property
    def duplicate_rate(self) -> float:
        """Adjacent repeated words / words, 0..1; 0.0 without words."""
        return self.n_repeated / self.n_word if self.n_word else 0.0

    def __add__(self, other: Words) -> Words:
        return Words(self.n_repeated + other.n_repeated, self.n_word + other.n_word)


def count_words(text: str) -> Words:
    """Count words, whatever their case and the punctuation around them: "Sar, sar" repeats."""
    stripped = (word.strip(string.punctuation).casefold() for word in text.split())
    words = [word for word in stripped if word]
    repeated = sum(a == b for a, b in itertools.pairwise(words))
    return Words(repeated, len(words))
