"""Which layers get a probe: the ones that are expected to save the most time.

The cost of a token is counted in bytes read, which is what decoding on a PC waits for: layers, LM
head, lens vocabulary, translators. The upper layers of a token that left are computed later in a
batch, at PENDING_COST of their price.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from specee_pc.fit.lens import candidate_logits, candidates, lens_ids
from specee_pc.fit.predictors import Examples, Predictor, features, train_predictor
from specee_pc.fit.thresholds import leave, loosest
from specee_pc.fit.translators import Translator
from specee_pc.fit.weights import Weights

K = 4  # candidates of a token, as in SpecEE
LENS_DEPTHS = (0.7, 0.8, 0.9)  # of the model, where a lens is tried
MARGIN = 0.7  # of the errors that may be made: calibration keeps the rest for sampling error
MAX_PROBES = 5
MIN_GAIN = 0.002  # of a token, for one more probe
N_HIDDEN_SEARCH = 64  # a small network ranks layers as well as the real one
PENDING_COST = 0.4  # of a layer's price in a batch of several tokens


@dataclass(frozen=True)
class Data:
    """Everything about the recorded tokens, n of them.

    normed: layer -> t [n, n_embd]; argmax, prompt: [n]; the rest are the indices of the tokens
    of each part.
    """

    normed: dict[int, torch.Tensor]
    argmax: torch.Tensor
    prompt: torch.Tensor
    translate: torch.Tensor
    train: torch.Tensor
    validation: torch.Tensor
    calibration: torch.Tensor
    test: torch.Tensor


@dataclass(frozen=True)
class Chain:
    """Probes in order, the first with the lens, and what they say of all n tokens.

    p, right: [n, m]; chosen: [n, K] candidates; logits: m of [n, K].
    """

    layers: tuple[int, ...]
    ids: torch.Tensor
    predictors: tuple[Predictor, ...]
    p: torch.Tensor
    right: torch.Tensor
    examples: tuple[torch.Tensor, ...]


class Prober:
    """Makes chains of probes on recorded data."""

    def __init__(
        self, data: Data, weights: Weights, translators: dict[int, Translator], order: torch.Tensor
    ) -> None:
        self.data, self.weights, self.translators, self.order = data, weights, translators, order
        self.n_layer = max(data.normed)
        self._states = {layer: t(data.normed[layer]) for layer, t in translators.items()}

    def chain(self, layers: Sequence[int], n_lens: int, n_hidden: int, seed: int = 0) -> Chain:
        """Train the predictors of these probe layers."""
        data = self.data
        ids = lens_ids(self.order, n_lens)
        chosen = candidates(self._states[layers[0]], ids, self.weights.rows(ids), K)
        softmax: torch.Tensor | None = None
        predictors, ps, rights, xs = [], [], [], []
        for layer in layers:
            logits = candidate_logits(self._states[layer], chosen, self.weights.head)
            x, softmax = features(logits, softmax)
            favourite = chosen.gather(1, logits.argmax(1, keepdim=True)).flatten()
            right = favourite == data.argmax
            y = right.float()
            predictor = train_predictor(
                Examples(x[data.train], y[data.train]),
                Examples(x[data.validation], y[data.validation]),
                n_hidden=n_hidden,
                seed=seed,
            )
            with torch.no_grad():
                ps.append(predictor(x))
            predictors.append(predictor)
            rights.append(right)
            xs.append(x)
        return Chain(
            tuple(layers),
            ids,
            tuple(predictors),
            torch.stack(ps, 1),
            torch.stack(rights, 1),
            tuple(xs),
        )

    def cost(
        self, chain: Chain, columns: Sequence[int], threshold: float, rows: torch.Tensor
    ) -> float:
        """Expected price of a token over that of full depth, of these probes of a chain alone."""
        picked = list(columns)
        exits = leave(chain.p[rows][:, picked], chain.right[rows][:, picked], threshold)
        depth = torch.tensor([*(chain.layers[i] for i in picked), self.n_layer])[exits.index]
        left = exits.index < len(picked)
        probed = (exits.index + 1).clamp_max(len(picked)).double()
        layer, head = self.weights.layer_bytes, self.weights.head_bytes
        lens = len(chain.ids) * head / self.weights.n_vocab
        translator = self.translators[chain.layers[0]].n_bytes
        price = (
            depth * layer
            + left * (self.n_layer - depth) * layer * PENDING_COST
            + ~left * head
            + lens
            + probed * translator
        )
        return float(price.double().mean()) / (self.n_layer * layer + head)

    def best(
        self, fidelity: float, sizes: Sequence[int], step: Callable[[float], None]
    ) -> tuple[list[int], int]:
        """The probe layers and the lens size with the lowest expected cost.

        The layers are searched with the middle size, the size with the layers found.
        """
        inner = sorted(self._states)
        depths = [share * self.n_layer for share in LENS_DEPTHS]
        firsts = sorted({min(inner, key=lambda n: abs(n - depth)) for depth in depths})
        share = 1 / (len(firsts) + 1)
        found = []
        for first in firsts:
            chain = self.chain(
                [n for n in inner if n >= first], sizes[len(sizes) // 2], N_HIDDEN_SEARCH
            )
            found.append(self._grow(chain, fidelity))
            step(share)
        layers = min(found)[1]
        costs = []
        for size in sizes:
            chain = self.chain(layers, size, N_HIDDEN_SEARCH)
            costs.append((self._cost_of(chain, list(range(len(layers))), fidelity), size))
            step(share / len(sizes))
        return layers, min(costs)[1]

    def _cost_of(self, chain: Chain, columns: list[int], fidelity: float) -> float:
        """Cost with the threshold that keeps the fidelity, on rows that predictors have seen.

        Few rows would rank the layers by their noise; all chains have the same advantage.
        """
        rows = torch.cat([self.data.train, self.data.validation])
        p, right = chain.p[rows][:, columns], chain.right[rows][:, columns]
        threshold = loosest(p, right, MARGIN * (1 - fidelity))
        return self.cost(chain, columns, threshold, rows)

    def _grow(self, chain: Chain, fidelity: float) -> tuple[float, list[int]]:
        """Add the probe that lowers the cost most, until none does."""
        columns = [0]
        cost = self._cost_of(chain, columns, fidelity)
        while len(columns) < MAX_PROBES:
            free = [i for i in range(len(chain.layers)) if i not in columns]
            if not free:
                break
            new, i = min((self._cost_of(chain, sorted([*columns, i]), fidelity), i) for i in free)
            if new > cost - MIN_GAIN and len(columns) > 1:
                break
            columns, cost = sorted([*columns, i]), new
        return cost, [chain.layers[i] for i in columns]
