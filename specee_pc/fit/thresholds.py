"""Thresholds: where to leave so that the promised fidelity holds.

The calibrated threshold is found by learn-then-test (Angelopoulos, Bates, Candes, Jordan, Lei,
arXiv 2110.01052): thresholds are tried from the strictest on, each one is kept while an upper
confidence bound of its error is below what was promised, and the first failure ends the search. The
fixed order makes the whole search hold at the level of one test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

CONFIDENCE_Z = 1.645  # one-sided 95 %
CONFIDENCE = 0.95
NEVER = 2.0  # a threshold that no probability reaches
GRID = torch.sigmoid(torch.arange(9.0, -2.2, -0.05, dtype=torch.float64))  # 0.9999 down to 0.1


@dataclass(frozen=True)
class Exits:
    """What a chain of m probes does to n tokens.

    index: [n] which probe each token leaves at, m where none. wrong: [n] whether the exit's token
    is not what full depth says.
    """

    index: torch.Tensor
    wrong: torch.Tensor


def leave(p: torch.Tensor, right: torch.Tensor, threshold: float | torch.Tensor) -> Exits:
    """Leave at the first probe with p >= threshold.

    p, right: [n, m], ascending probes; right says whether the favourite is what full depth says.
    threshold: one for all probes, or [m].
    """
    hit = p >= threshold
    none = ~hit.any(1)
    index = torch.where(none, p.shape[1], hit.int().argmax(1))
    at = index.clamp_max(p.shape[1] - 1)[:, None]
    return Exits(index, ~right.gather(1, at).flatten() & ~none)


def error_bound(wrong: torch.Tensor, prompt: torch.Tensor) -> float:
    """Upper 95 % confidence bound of the share of wrong tokens; wrong, prompt: [n].

    The tokens of a prompt are not independent, so the bound is that of a ratio of sums over
    prompts; where errors are too rare for it, the binomial (Clopper-Pearson) bound is higher and
    is taken instead.
    """
    n = len(wrong)
    if n == 0:
        return 1.0
    ids, cluster = torch.unique(prompt, return_inverse=True)
    m = len(ids)
    tokens = torch.bincount(cluster, minlength=m).double()
    errors = torch.bincount(cluster, weights=wrong.double(), minlength=m)
    share = float(errors.sum()) / n
    if m < 2:
        return 1.0
    variance = float((errors - share * tokens).square().sum()) * m / (m - 1) / n**2
    return max(share + CONFIDENCE_Z * math.sqrt(variance), binomial_bound(int(errors.sum()), n))


def binomial_bound(k: int, n: int, confidence: float = CONFIDENCE) -> float:
    """Upper Clopper-Pearson bound of a share after k of n: the p for which P(X <= k) = 1 - c."""
    if k >= n:
        return 1.0
    i = torch.arange(k + 1, dtype=torch.float64)
    n_ = torch.tensor(float(n), dtype=torch.float64)
    log_choose = torch.lgamma(n_ + 1) - torch.lgamma(i + 1) - torch.lgamma(n_ - i + 1)
    low, high = k / n, 1.0
    for _ in range(60):
        p = (low + high) / 2
        log_pmf = log_choose + i * math.log(p) + (n - i) * math.log1p(-p) if p < 1 else -i - 1e9
        if float(torch.logsumexp(log_pmf, 0)) > math.log(1 - confidence):
            low = p
        else:
            high = p
    return high


def choose_calibrated(
    p: torch.Tensor, right: torch.Tensor, prompt: torch.Tensor, fidelity: float
) -> float:
    """The lowest threshold that is shown to keep the fidelity; NEVER when none is.

    p, right: [n, m] of the calibration part, all of its tokens; prompt: [n] whose they are.
    """
    chosen = NEVER
    for threshold in GRID.tolist():
        if error_bound(leave(p, right, threshold).wrong, prompt) > 1 - fidelity:
            break
        chosen = threshold
    return chosen


def loosest(p: torch.Tensor, right: torch.Tensor, wrong: float) -> float:
    """The lowest threshold of the grid with at most this share of wrong tokens; NEVER without one.

    An estimate for comparing probes: bisection, and no bound. p, right: [n, m].
    """
    grid = GRID.tolist()
    low, high = 0, len(grid)  # grid[:low] keeps the share, grid[high:] does not
    while low < high:
        middle = (low + high) // 2
        if float(leave(p, right, grid[middle]).wrong.double().mean()) <= wrong:
            low = middle + 1
        else:
            high = middle
    return grid[low - 1] if low else NEVER
