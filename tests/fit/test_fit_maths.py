"""The maths of fit on data whose answer is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch")
import torch

from specee_pc.fit.export import check_onnx, onnx_model, safetensors
from specee_pc.fit.lens import candidates, lens_ids, lens_order
from specee_pc.fit.predictors import Examples, features, platt, train_predictor
from specee_pc.fit.thresholds import NEVER, choose_calibrated, error_bound, leave, loosest
from specee_pc.fit.translators import (
    HeadMetric,
    Pairs,
    Regression,
    Translator,
    distil,
    divergence,
)


def test_features_are_the_published_ones() -> None:
    first = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    then = torch.tensor([[4.0, 0.0, 0.0, 0.0]])
    x, softmax = features(first, None)
    p = np.exp([1, 2, 3, 4]) / np.exp([1, 2, 3, 4]).sum()
    assert np.allclose(x.numpy()[0], [1, 2, 3, 4, *p, *p], atol=1e-6)
    x, _ = features(then, softmax)
    q = np.exp([4, 0, 0, 0]) / np.exp([4, 0, 0, 0]).sum()
    assert np.allclose(x.numpy()[0], [4, 0, 0, 0, *q, *(q - p)], atol=1e-6)


def test_a_low_rank_map_is_recovered() -> None:
    generator = torch.Generator().manual_seed(1)
    n, d, r = 4000, 48, 5
    t = torch.randn(n, d, generator=generator)
    v, u = torch.randn(r, d, generator=generator), torch.randn(d, r, generator=generator) * 0.3
    b = torch.randn(d, generator=generator)
    final = t + (t @ v.T) @ u.T + b + 0.01 * torch.randn(n, d, generator=generator)
    head = torch.randn(200, d, generator=generator)
    solution = Regression(t[:3000], final[:3000], HeadMetric(head)).solve(1e-4)

    def error(rank: int) -> float:
        return float((solution.cut(rank).rounded()(t[3000:]) - final[3000:]).abs().mean())

    assert error(r) < 0.02
    assert error(r - 1) > 5 * error(r)


def test_distillation_comes_closer_to_what_full_depth_says() -> None:
    generator = torch.Generator().manual_seed(4)
    n, d, r = 3000, 24, 4
    t = torch.randn(n, d, generator=generator)
    v, u = torch.randn(r, d, generator=generator), torch.randn(d, r, generator=generator) * 0.3
    final = t + (t @ v.T) @ u.T
    rows = torch.randn(60, d, generator=generator) * 0.5
    start = Translator(v + 0.1, u, torch.full((d,), 0.2))
    shares: list[float] = []

    better = distil(
        start, Pairs(t[:2000], final[:2000]), Pairs(t[2000:2500], final[2000:2500]), rows,
        shares.append,
    )  # fmt: skip
    assert sum(shares) == pytest.approx(1)

    def excess(translator: Translator) -> float:
        fresh = slice(2500, None)
        least = divergence(final[fresh], final[fresh], rows)
        return float(divergence(translator(t[fresh]), final[fresh], rows) - least)

    with torch.no_grad():
        assert excess(better) < 0.8 * excess(start)

    # What cannot become better is left as it was.
    perfect = Translator(v, u, torch.zeros(d))
    kept = distil(
        perfect, Pairs(t[:300], final[:300]), Pairs(t[2000:], final[2000:]), rows, shares.append
    )
    assert torch.equal(kept.v, v) and torch.equal(kept.u, u)


def test_the_lens_knows_what_is_said_most() -> None:
    order = lens_order(torch.tensor([7, 7, 3]), torch.tensor([9]), 20)
    assert order[:4].tolist() == [7, 3, 9, 0]
    ids = lens_ids(order, 4)
    assert ids.tolist() == [0, 3, 7, 9]
    rows = torch.eye(4)
    assert candidates(torch.tensor([[0.0, 3.0, 5.0, 4.0]]), ids, rows, 3).tolist() == [[7, 9, 3]]


def simulated(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p, right [n, 2] of calibrated predictors, and prompts of 50 tokens."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(n, 2, generator=generator, dtype=torch.float64) ** 0.1
    right = torch.rand(n, 2, generator=generator) < p
    return p, right, torch.arange(n) // 50


@pytest.mark.parametrize("fidelity", [0.95, 0.99])
def test_thresholds_keep_the_promise_on_fresh_data(fidelity: float) -> None:
    broken = 0
    for seed in range(8):
        p, right, prompt = simulated(6000, seed)
        threshold = choose_calibrated(p, right, prompt, fidelity)
        assert threshold < 1
        fresh_p, fresh_right, _ = simulated(40_000, 1000 + seed)
        exits = leave(fresh_p, fresh_right, threshold)
        assert bool((exits.index < 2).any())
        broken += float(exits.wrong.double().mean()) > 1 - fidelity
    assert broken <= 2  # one in twenty is what 95 % confidence allows


def test_no_threshold_where_nothing_can_be_promised() -> None:
    p, _, prompt = simulated(2000, 3)
    never_right = torch.zeros_like(p, dtype=torch.bool)
    threshold = choose_calibrated(p, never_right, prompt, 0.99)
    assert float(leave(p, never_right, threshold).wrong.double().mean()) < 0.01
    assert (
        choose_calibrated(p[:40], torch.ones(40, 2, dtype=torch.bool), prompt[:40], 0.99) == NEVER
    )
    assert error_bound(torch.zeros(0, dtype=torch.bool), torch.zeros(0)) == 1.0


def test_leave_takes_the_first_probe_that_is_sure() -> None:
    p = torch.tensor([[0.9, 0.2], [0.2, 0.9], [0.1, 0.2], [0.8, 0.9]])
    right = torch.tensor([[False, True], [True, False], [False, False], [True, False]])
    exits = leave(p, right, 0.8)
    assert exits.index.tolist() == [0, 1, 2, 0]
    assert exits.wrong.tolist() == [True, True, False, False]


def test_the_loosest_threshold_keeps_the_share_of_errors() -> None:
    p, right, _ = simulated(4000, 5)
    threshold = loosest(p, right, 0.02)
    assert float(leave(p, right, threshold).wrong.double().mean()) <= 0.02
    assert float(leave(p, right, threshold - 0.05).wrong.double().mean()) > 0.02
    assert loosest(p, torch.zeros_like(right), 0.0) == NEVER


def test_a_predictor_learns_and_is_calibrated_and_survives_onnx() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6000, 12, generator=generator) * 3 + 1
    truth = torch.sigmoid(x[:, 0] - 1 + 0.5 * x[:, 4])
    y = (torch.rand(6000, generator=generator) < truth).float()
    predictor = train_predictor(
        Examples(x[:4000], y[:4000]), Examples(x[4000:5000], y[4000:5000]), n_hidden=32
    )
    with torch.no_grad():
        p = predictor(x[5000:])
    assert float((p - truth[5000:]).abs().mean()) < 0.06
    content = onnx_model(predictor)
    assert check_onnx(content, predictor, x[:16].numpy()) <= 1e-5


def test_platt_undoes_overconfidence() -> None:
    generator = torch.Generator().manual_seed(4)
    z = torch.randn(20_000, generator=generator) * 2
    y = (torch.rand(20_000, generator=generator) < torch.sigmoid(z)).float()
    slope, offset = platt(3 * z + 1, y)
    assert abs(slope - 1 / 3) < 0.03
    assert abs(offset + 1 / 3) < 0.1


def test_safetensors_are_read_back() -> None:
    import json
    import struct

    tensors: dict[str, npt.NDArray[np.generic]] = {
        "a": np.arange(6, dtype=np.float16).reshape(2, 3),
        "b": np.array([5], np.int32),
    }
    raw = safetensors(tensors)
    (size,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + size]), raw[8 + size :]
    for name, array in tensors.items():
        begin, end = header[name]["data_offsets"]
        assert header[name]["shape"] == list(array.shape)
        assert data[begin:end] == array.tobytes()
