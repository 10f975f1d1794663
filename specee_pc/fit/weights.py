"""What fit needs of a GGUF: final norm, LM head and how many bytes each part of a token reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specee_pc.errors import UnsupportedModel
from specee_pc.gguf_header import GgufHeader

BLOCK_ROWS = 8192  # of the head, dequantized at a time


@dataclass(frozen=True)
class Weights:
    """The end of the model, and sizes for the cost model.

    norm: [n_embd] f32, the weight of the final RMS norm. head: [n_vocab, n_embd] f16.
    eps: of the RMS norm. layer_bytes, head_bytes: what one token reads, in bytes.
    """

    norm: torch.Tensor
    head: torch.Tensor
    eps: float
    layer_bytes: float
    head_bytes: int

    @property
    def n_vocab(self) -> int:
        return self.head.shape[0]

    def normed(self, state: torch.Tensor) -> torch.Tensor:
        """rmsnorm(state) * norm, [..., n_embd] f32: what the head is applied to."""
        x = state.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.norm

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the head as f32."""
        return self.head[ids].float()


def read_weights(header: GgufHeader) -> Weights:
    """Read and dequantize the final norm and the head.

    Raises UnsupportedModel where the logits are not simply head . rmsnorm(state) * norm.
    """
    from gguf import GGUFReader

    _check_plain_head(header)
    reader = GGUFReader(str(header.path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    name = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    if name not in tensors or "output_norm.weight" not in tensors:
        raise UnsupportedModel(f"{header.path}: has no {name} or no output_norm.weight")
    layers = sum(int(t.n_bytes) for n, t in tensors.items() if n.startswith("blk."))
    return Weights(
        norm=torch.from_numpy(np.array(_dequantize(header.path, tensors["output_norm.weight"]))),
        head=_read_head(header.path, tensors[name]),
        eps=float(header.metadata[f"{header.architecture}.attention.layer_norm_rms_epsilon"]),
        layer_bytes=layers / header.n_layer,
        head_bytes=int(tensors[name].n_bytes),
    )


def _check_plain_head(header: GgufHeader) -> None:
    arch, path = header.architecture, header.path
    if header.n_shards > 1:
        raise UnsupportedModel(f"{path}: is split into {header.n_shards} files: merge them first")
    if f"{arch}.attention.layer_norm_rms_epsilon" not in header.metadata:
        raise UnsupportedModel(f"{path}: fit needs a final RMS norm; {arch} has another one")
    for tensor in ("output.bias", "output_norm.bias"):
        if tensor in header.tensors:
            raise UnsupportedModel(f"{path}: fit cannot handle a head with {tensor}")
    for key in ("final_logit_softcapping", "logit_scale"):
        if header.metadata.get(f"{arch}.{key}"):
            raise UnsupportedModel(f"{path}: fit cannot handle a head with {key}")


def _dequantize(path: Path, tensor: Any, rows: slice = slice(None)) -> npt.NDArray[np.float32]:
    from gguf.quants import dequantize

    try:
        values: npt.NDArray[np.float32] = dequantize(tensor.data[rows], tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise UnsupportedModel(f"{path}: {tensor.name} has type {kind}, unknown to fit") from None
    return values.astype(np.float32, copy=False)


def _read_head(path: Path, tensor: Any) -> torch.Tensor:
    n_embd, n_vocab = (int(n) for n in tensor.shape)
    head = torch.empty((n_vocab, n_embd), dtype=torch.float16)
    for begin in range(0, n_vocab, BLOCK_ROWS):
        rows = slice(begin, min(begin + BLOCK_ROWS, n_vocab))
        head[rows] = torch.from_numpy(_dequantize(path, tensor, rows).astype(np.float16))
    return head
