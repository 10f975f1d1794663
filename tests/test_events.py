from __future__ import annotations

import pytest

from specee_pc import Stats


def test_figures_of_no_tokens() -> None:
    stats = Stats(mode="off", n_layer=30)
    assert (stats.tokens_per_second, stats.mean_layers, stats.exit_share) == (0.0, 0.0, 0.0)
    assert stats.time_shares == {}


def test_figures() -> None:
    stats = Stats(
        mode="exact",
        n_layer=30,
        n_token=10,
        n_exit=4,
        n_layer_sum=260,
        t_layers_s=1.0,
        t_head_s=0.5,
        t_completion_s=0.25,
        t_total_s=2.0,
    )
    assert stats.tokens_per_second == 5.0
    assert stats.mean_layers == 26.0
    assert stats.exit_share == 0.4
    shares = stats.time_shares
    assert shares["layers"] == 0.5 and shares["other"] == 0.125
    assert sum(shares.values()) == pytest.approx(1.0)
