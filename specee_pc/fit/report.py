"""The calibration report: what came out on prompts that nothing was fitted on."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from specee_pc.fit.predictors import reliability
from specee_pc.fit.probes import Chain, Prober
from specee_pc.fit.thresholds import error_bound, leave, loosest

N_AGREEMENT = 1000  # tokens that go through the full head at every layer
N_BARE = 3000  # tokens of each part for the rule without predictors
BLOCK = 256


def top_k(state: torch.Tensor, head: torch.Tensor, k: int) -> torch.Tensor:
    """The k best tokens of the full head for states [n, n_embd]: [n, k]."""
    rows = head.float()
    return torch.cat([(part @ rows.T).topk(k, dim=1).indices for part in torch.split(state, BLOCK)])


def make_report(prober: Prober, chain: Chain, threshold: float, fidelity: float) -> dict[str, Any]:
    """Counts, agreement by layer, and fidelity and depth with the predictors and without them."""
    data, n_layer = prober.data, prober.n_layer
    test = data.test
    exits = leave(chain.p[test], chain.right[test], threshold)
    depth = torch.tensor([*chain.layers, n_layer])[exits.index]
    agreement, oracle = _agreement(prober)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "promised_fidelity": fidelity,
        "confidence": 0.95,
        "tokens": {
            name: len(getattr(data, name))
            for name in ("translate", "train", "validation", "calibration", "test")
        },
        "rank": prober.translators[chain.layers[0]].rank,
        "n_lens": len(chain.ids),
        "lens_coverage": _share(torch.isin(data.argmax[test], chain.ids)),
        "agreement": agreement,
        "oracle_layers": round(oracle, 2),
        "test": {
            "fidelity": round(1 - float(exits.wrong.double().mean()), 5),
            "fidelity_at_least": round(1 - error_bound(exits.wrong, data.prompt[test]), 5),
            "mean_layers": round(float(depth.double().mean()), 2),
            "left_early": _share(exits.index < len(chain.layers)),
            "expected_cost": round(
                prober.cost(chain, range(len(chain.layers)), threshold, test), 4
            ),
        },
        "bare_rule": _bare_rule(prober, chain, threshold),
        "reliability": {
            str(layer): reliability(chain.p[test, i], chain.right[test, i])
            for i, layer in enumerate(chain.layers)
        },
    }


def _share(hits: torch.Tensor) -> float:
    return round(float(hits.double().mean()), 4)


def _thin(rows: torch.Tensor, n: int) -> torch.Tensor:
    return rows[:: -(-len(rows) // n)]


def _agreement(prober: Prober) -> tuple[list[dict[str, Any]], float]:
    """How often each layer's best tokens hold the full depth's one, and the oracle's mean depth."""
    data, head = prober.data, prober.weights.head
    rows = _thin(data.test, N_AGREEMENT)
    truth = data.argmax[rows]
    first_right = torch.full((len(rows),), prober.n_layer)
    table: list[dict[str, Any]] = []
    for layer, translate in sorted(prober.translators.items(), reverse=True):
        t = data.normed[layer][rows]
        line: dict[str, Any] = {"layer": layer}
        for name, state in (("raw", t), ("translated", translate(t))):
            best = top_k(state, head, 8)
            line[name] = {
                "top1": _share(best[:, 0] == truth),
                "top8": _share((best == truth[:, None]).any(1)),
            }
        first_right = torch.where(best[:, 0] == truth, layer, first_right)
        table.append(line)
    return table[::-1], float(first_right.double().mean())


def _bare_rule(prober: Prober, chain: Chain, threshold: float) -> dict[str, float]:
    """Leave at the same layers when the translated top probability, of the full head, is high.

    With the fidelity that the predictors have on the calibration part. It is what a predictor must
    beat, although this rule would pay for a full head at every probe.
    """
    data = prober.data
    parts = [_thin(part, N_BARE) for part in (data.calibration, data.test)]
    head = prober.weights.head.float()
    ps, rights = [], []
    for part in parts:
        columns = [_top_probability(prober, head, layer, part) for layer in chain.layers]
        ps.append(torch.stack([p for p, _ in columns], 1))
        rights.append(torch.stack([right for _, right in columns], 1))
    wrong = leave(chain.p[parts[0]], chain.right[parts[0]], threshold).wrong
    bare = loosest(ps[0], rights[0], float(wrong.double().mean()))
    exits = leave(ps[1], rights[1], bare)
    depth = torch.tensor([*chain.layers, prober.n_layer])[exits.index]
    return {
        "threshold": round(bare, 4),
        "fidelity": round(1 - float(exits.wrong.double().mean()), 5),
        "mean_layers": round(float(depth.double().mean()), 2),
        "left_early": _share(exits.index < len(chain.layers)),
    }


def _top_probability(
    prober: Prober, head: torch.Tensor, layer: int, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest softmax probability of a layer's translated states, and whether it is right."""
    states = prober.translators[layer](prober.data.normed[layer][rows])
    ps, tokens = [], []
    for part in torch.split(states, BLOCK):
        best = (logits := part @ head.T).max(dim=1)
        ps.append((best.values - logits.logsumexp(1)).exp())
        tokens.append(best.indices)
    return torch.cat(ps), torch.cat(tokens) == prober.data.argmax[rows]
