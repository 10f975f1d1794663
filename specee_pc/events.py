"""What decoding reports: one TokenEvent per token, and the Stats of a session."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenEvent:
    """One emitted token.

    token: its id.
    n_layer: how many layers had run when it was decided; all of them without an exit.
    p: the predictor's probability at the exit, None for a token of full depth.
    """

    token: int
    n_layer: int
    p: float | None


@dataclass(frozen=True)
class Stats:
    """Counts and seconds since the model was loaded or reset_stats() was called.

    histogram[l] is how many emitted tokens were decided after l layers, l = 0..n_layer. An exit
    counts in exact mode once the full model has confirmed it. Seconds are wall time; t_layers_s is
    without t_completion_s, the pending tokens' share of the layer windows.
    """

    mode: str
    n_layer: int
    n_prompt: int = 0
    n_token: int = 0
    n_exit: int = 0
    n_refuted: int = 0
    n_pass: int = 0
    n_evaluated: int = 0
    n_completed: int = 0
    n_layer_sum: int = 0
    t_prompt_s: float = 0.0
    t_layers_s: float = 0.0
    t_head_s: float = 0.0
    t_probe_s: float = 0.0
    t_draft_s: float = 0.0
    t_completion_s: float = 0.0
    t_sampling_s: float = 0.0
    t_total_s: float = 0.0
    histogram: tuple[int, ...] = ()
    notice: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Decode speed, without the prompt; 0.0 before the first token."""
        return self.n_token / self.t_total_s if self.t_total_s > 0 else 0.0

    @property
    def mean_layers(self) -> float:
        """Mean of the layers that had run when a token was decided; 0.0 before the first token."""
        return self.n_layer_sum / self.n_token if self.n_token else 0.0

    @property
    def exit_share(self) -> float:
        """Share of the tokens that were decided by an exit, 0..1."""
        return self.n_exit / self.n_token if self.n_token else 0.0

    @property
    def time_shares(self) -> dict[str, float]:
        """Share of the decode time per part, 0..1; "other" is what no part accounts for.

        Empty before the first token.
        """
        if self.t_total_s <= 0:
            return {}
        seconds = {
            "layers": self.t_layers_s,
            "completion": self.t_completion_s,
            "head": self.t_head_s,
            "probe": self.t_probe_s,
            "draft": self.t_draft_s,
            "sampling": self.t_sampling_s,
        }
        shares = {name: s / self.t_total_s for name, s in seconds.items()}
        shares["other"] = max(0.0, 1.0 - sum(shares.values()))
        return shares
