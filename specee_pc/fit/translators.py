"""Translators: from a layer's state to an estimate of the final normed state.

    t = rmsnorm(h_l) * output_norm.weight        the raw lens
    s = t + u (v t) + b                          v: [r, n_embd], u: [n_embd, r], b: [n_embd]

First a reduced-rank ridge regression in closed form (Izenman 1975), whose error is measured in the
metric of the LM head, so that what moves logits counts. The translators that are kept are then
distilled: trained on the Kullback-Leibler divergence to what full depth says, as the tuned lens is
(arXiv 2303.08112), over the lens vocabulary. Their probabilities become honest by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

RIDGES = (0.01, 0.1, 1.0)  # times the mean variance of an input
METRIC_RIDGE = 1e-3  # keeps directions that no head row uses from blowing up
DISTIL_EPOCHS = 4
DISTIL_BATCH = 256
DISTIL_RATE = 5e-4


@dataclass(frozen=True)
class Translator:
    """v: [r, n_embd], u: [n_embd, r], b: [n_embd], all f32."""

    v: torch.Tensor
    u: torch.Tensor
    b: torch.Tensor

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        """s [n, n_embd] of normed states t [n, n_embd]."""
        return torch.addmm(t + self.b, t @ self.v.T, self.u.T)

    @property
    def rank(self) -> int:
        return self.v.shape[0]

    @property
    def n_bytes(self) -> int:
        """As stored in the bundle, f16."""
        return 2 * (self.v.numel() + self.u.numel() + self.b.numel())

    def rounded(self) -> Translator:
        """What is left of it after a round trip through the bundle's f16."""
        return Translator(self.v.half().float(), self.u.half().float(), self.b.half().float())


class HeadMetric:
    """The metric of logits, ||x||^2 = x' G x with G the covariance of the head's rows: [n, n]."""

    def __init__(self, head: torch.Tensor) -> None:
        """head: [n_vocab, n_embd]. A constant added to all logits does not count."""
        n, n_embd = head.shape
        gram = torch.zeros((n_embd, n_embd), dtype=torch.float64)
        total = torch.zeros(n_embd, dtype=torch.float64)
        for block in torch.split(head, 8192):
            rows = block.float()
            gram += (rows.T @ rows).double()
            total += rows.double().sum(0)
        gram = gram / n - torch.outer(total / n, total / n)
        gram += METRIC_RIDGE * gram.trace() / n_embd * torch.eye(n_embd, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(gram)
        self.root = vectors @ torch.diag(values.sqrt()) @ vectors.T
        self.inverse_root = vectors @ torch.diag(values.rsqrt()) @ vectors.T


class Regression:
    """Ridge regressions of final - t on t for one layer, of any rank."""

    def __init__(self, t: torch.Tensor, final: torch.Tensor, metric: HeadMetric) -> None:
        """t, final: [n, n_embd] normed states of the training rows."""
        x, y = t.double(), (final - t).double()
        self.n_embd, self.metric = t.shape[1], metric
        self.mean_x, self.mean_y = x.mean(0), y.mean(0)
        x, y = x - self.mean_x, y - self.mean_y
        self.xx, self.xy = x.T @ x / len(x), x.T @ y / len(x)

    def solve(self, ridge: float) -> Solution:
        """The full-rank solution for a ridge, ready to be cut to a rank."""
        eye = torch.eye(self.n_embd, dtype=torch.float64)
        a = self.xx + ridge * self.xx.trace() / self.n_embd * eye
        w = torch.linalg.solve(a, self.xy) @ self.metric.root
        _, vectors = torch.linalg.eigh(w.T @ a @ w)
        return Solution(self, w, vectors.flip(1))


@dataclass(frozen=True)
class Solution:
    """w: [n_embd, n_embd] in the metric; directions: [n_embd, n_embd], the best first."""

    regression: Regression
    w: torch.Tensor
    directions: torch.Tensor

    def cut(self, rank: int) -> Translator:
        """The best translator of a rank."""
        p = self.directions[:, :rank]
        v, u = self.w @ p, self.regression.metric.inverse_root @ p
        scale = (v.norm(dim=0) / u.norm(dim=0)).clamp_min(1e-12).sqrt()  # both fit into f16
        v, u = v / scale, u * scale
        b = self.regression.mean_y - (self.regression.mean_x @ v) @ u.T
        return Translator(v.T.float().contiguous(), u.float().contiguous(), b.float())


@dataclass(frozen=True)
class Pairs:
    """Normed states t of a layer and final ones of the same tokens, [n, n_embd] each."""

    t: torch.Tensor
    final: torch.Tensor


def divergence(s: torch.Tensor, final: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of softmax(rows . s) under softmax(rows . final); rows: [m, n_embd].

    As a function of s it is the Kullback-Leibler divergence plus a constant.
    """
    with torch.no_grad():
        target = torch.softmax(final @ rows.T, dim=1)
    return -(target * torch.log_softmax(s @ rows.T, dim=1)).sum(1).mean()


def distil(
    start: Translator,
    train: Pairs,
    held_out: Pairs,
    rows: torch.Tensor,
    step: Callable[[float], None],
) -> Translator:
    """Refine a translator over some rows of the head [m, n_embd]; held_out picks the best epoch.

    step gets the share of the work that was done since the last call. Deterministic.
    """

    def loss_on_held_out() -> float:
        parts = zip(
            torch.split(held_out.t, DISTIL_BATCH),
            torch.split(held_out.final, DISTIL_BATCH),
            strict=True,
        )
        with torch.no_grad():
            sums = [float(divergence(now(t), final, rows)) * len(t) for t, final in parts]
        return sum(sums) / len(held_out.t)

    weights = [w.clone().requires_grad_() for w in (start.v, start.u, start.b)]
    now = Translator(*weights)
    best, best_loss = start, loss_on_held_out()
    optimizer = torch.optim.Adam(weights, DISTIL_RATE)
    generator = torch.Generator().manual_seed(0)
    n_steps, done = DISTIL_EPOCHS * -(-len(train.t) // DISTIL_BATCH), 0
    for _ in range(DISTIL_EPOCHS):
        for chosen in torch.split(torch.randperm(len(train.t), generator=generator), DISTIL_BATCH):
            optimizer.param_groups[0]["lr"] = DISTIL_RATE * (1 - done / n_steps)
            optimizer.zero_grad()
            loss = divergence(now(train.t[chosen]), train.final[chosen], rows)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
            step(1 / n_steps)
        if (loss_now := loss_on_held_out()) < best_loss:
            best, best_loss = Translator(*(w.detach().clone() for w in weights)), loss_now
    return best
