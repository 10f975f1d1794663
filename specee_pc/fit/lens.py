"""The lens: the reduced vocabulary whose logits at the first probe layer name the candidates."""

from __future__ import annotations

import torch

SIZES = (1024, 2048, 4096, 8192, 16384)
BLOCK = 1024  # rows of states at a time: n_lens logits each


def lens_order(argmax: torch.Tensor, tokens: torch.Tensor, n_vocab: int) -> torch.Tensor:
    """All token ids, the most useful for the lens first: [n_vocab].

    argmax: what full depth said in the training rows, which counts most; tokens: other text of the
    kind (prompts, generated tokens), which breaks ties; then low ids come first, because byte pair
    vocabularies are numbered by frequency.
    """
    count = torch.bincount(argmax, minlength=n_vocab).double()
    text = torch.bincount(tokens, minlength=n_vocab).double()
    rank = torch.arange(n_vocab, dtype=torch.float64) / n_vocab
    weight = 1e6 * count + 1e3 * text.clamp_max(999) - rank
    return torch.argsort(weight, descending=True)


def lens_ids(order: torch.Tensor, n_lens: int) -> torch.Tensor:
    """The first n_lens ids of the order, ascending: [n_lens] int64."""
    return order[:n_lens].sort().values


def candidates(s: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, k: int) -> torch.Tensor:
    """The k best tokens of the lens for each translated state, best first: [n, k] token ids.

    s: [n, n_embd]; ids: [n_lens]; rows: [n_lens, n_embd], the head's rows of ids.
    """
    blocks = [(block @ rows.T).topk(k, dim=1).indices for block in torch.split(s, BLOCK)]
    return ids[torch.cat(blocks)]


def candidate_logits(s: torch.Tensor, chosen: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Logits [n, k] of the candidates [n, k] on translated states [n, n_embd]."""
    blocks = [
        torch.einsum("nd,nkd->nk", part, head[tokens].float())
        for part, tokens in zip(torch.split(s, BLOCK), torch.split(chosen, BLOCK), strict=True)
    ]
    return torch.cat(blocks)
