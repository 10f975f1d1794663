"""Predictors: how likely the probe's favourite candidate is what full depth will say.

Features and network as in SpecEE (arXiv 2504.08850), with one network per probe layer; what it
says is then calibrated by Platt scaling, which is folded into its last layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

N_HIDDEN = 512
BATCH = 256
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1e-4
MAX_EPOCHS = 60
PATIENCE = 6  # epochs without a better validation loss


def features(
    logits: torch.Tensor, previous: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features [n, 3k] of the candidates' logits [n, k], and their softmax [n, k].

    previous: the softmax at the layer that was evaluated before; None at the first one, where the
    third block repeats the softmax.
    """
    softmax = torch.softmax(logits, dim=1)
    change = softmax if previous is None else softmax - previous
    return torch.cat([logits, softmax, change], dim=1), softmax


@dataclass(frozen=True)
class Predictor:
    """p = sigmoid(w2 . relu(w1 . features + b1) + b2): w1 [h, 3k], b1 [h], w2 [1, h], b2 [1]."""

    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """p [n] of features [n, 3k]."""
        hidden = torch.relu(torch.addmm(self.b1, x, self.w1.T))
        return torch.sigmoid(torch.addmm(self.b2, hidden, self.w2.T)).flatten()


@dataclass(frozen=True)
class Examples:
    """Features [n, 3k] with labels [n]: 1.0 where the favourite is right."""

    x: torch.Tensor
    y: torch.Tensor

    def __getitem__(self, rows: torch.Tensor) -> Examples:
        return Examples(self.x[rows], self.y[rows])


def train_predictor(
    train: Examples, held_out: Examples, n_hidden: int = N_HIDDEN, seed: int = 0
) -> Predictor:
    """Fit with Adam and binary cross entropy; held_out stops it early and calibrates it.

    The normalisation of the inputs ends up in the weights. Deterministic for a seed.
    """
    generator = torch.Generator().manual_seed(seed)
    mean, std = train.x.mean(0), train.x.std(0).clamp_min(1e-4)
    train = Examples((train.x - mean) / std, train.y)
    held_out = Examples((held_out.x - mean) / std, held_out.y)
    net = _new_net(train.x.shape[1], n_hidden, generator)
    optimizer = torch.optim.Adam(net.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    loss_of = nn.BCEWithLogitsLoss()
    best, best_state, waited = float("inf"), _copy(net), 0
    for _ in range(MAX_EPOCHS):
        for rows in torch.split(torch.randperm(len(train.y), generator=generator), BATCH):
            batch = train[rows]
            optimizer.zero_grad()
            loss_of(net(batch.x).flatten(), batch.y).backward()
            optimizer.step()
        with torch.no_grad():
            loss = float(loss_of(net(held_out.x).flatten(), held_out.y))
        waited += 1
        if loss < best - 1e-5:
            best, best_state, waited = loss, _copy(net), 0
        if waited > PATIENCE:
            break
    w1, b1, w2, b2 = best_state
    with torch.no_grad():
        z = Predictor(w1, b1, w2, b2)(held_out.x)
    slope, offset = platt(torch.logit(z, eps=1e-7), held_out.y)
    w1 = w1 / std
    return Predictor(w1, b1 - w1 @ mean, w2 * slope, b2 * slope + offset)


def _new_net(n_in: int, n_hidden: int, generator: torch.Generator) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(n_in, n_hidden), nn.ReLU(), nn.Linear(n_hidden, 1))
    with torch.no_grad():
        for weight in net.parameters():
            bound = (n_in if weight.shape[0] == n_hidden else n_hidden) ** -0.5
            weight.uniform_(-bound, bound, generator=generator)
    return net


def _copy(net: nn.Sequential) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in net.parameters()]


def platt(z: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Slope and offset for which sigmoid(slope * z + offset) is calibrated (Platt 1999).

    z, y: [n]. Newton's method on the log loss, with a small prior for slope 1 and offset 0 so that
    separable data ends in finite values.
    """
    x = torch.stack([z.double(), torch.ones_like(z).double()], dim=1)
    prior = torch.tensor([1.0, 0.0], dtype=torch.float64)
    weights = prior.clone()
    for _ in range(50):
        p = torch.sigmoid(x @ weights)
        gradient = x.T @ (p - y.double()) + (weights - prior)
        hessian = (x * (p * (1 - p))[:, None]).T @ x + torch.eye(2, dtype=torch.float64)
        step = torch.linalg.solve(hessian, gradient)
        step = step / max(1.0, float(step.abs().max()) / 0.5)  # a damped start cannot run away
        weights = weights - step
        if float(step.abs().max()) < 1e-9:
            break
    slope = max(float(weights[0]), 0.05)  # more confidence must never mean less
    return slope, float(weights[1])


def reliability(p: torch.Tensor, right: torch.Tensor, n_bins: int = 10) -> list[dict[str, float]]:
    """Equal-width bins of p with their count, mean p and share that was right; [n] each."""
    index = (p * n_bins).long().clamp(0, n_bins - 1)
    bins = []
    for i in range(n_bins):
        chosen = index == i
        if bool(chosen.any()):
            bins.append(
                {
                    "n": int(chosen.sum()),
                    "p": round(float(p[chosen].mean()), 4),
                    "right": round(float(right[chosen].float().mean()), 4),
                }
            )
    return bins
