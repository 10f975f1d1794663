"""Tiny random models and bundles for the tests, which libllama and ONNX Runtime really load."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import gguf
import numpy as np

from specee_pc import model_files

N_LAYER, N_EMBD, N_FF, N_HEAD, N_VOCAB = 6, 64, 128, 4, 320
K, RANK = 4, 8
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'forbidden' %}"
    "{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}<assistant>"
)


def write_model(
    path: Path, *, seed: int = 1, template: str | None = TEMPLATE, arch: str = "llama"
) -> Path:
    """A random GGUF with a byte vocabulary; the context length it names is 1024."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name("tiny")
    writer.add_context_length(1024)
    writer.add_embedding_length(N_EMBD)
    writer.add_block_count(N_LAYER)
    writer.add_feed_forward_length(N_FF)
    writer.add_head_count(N_HEAD)
    writer.add_head_count_kv(N_HEAD // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    writer.add_vocab_size(N_VOCAB)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokens += [f"t{i}" for i in range(N_VOCAB - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * N_VOCAB)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (N_VOCAB - 259)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if template is not None:
        writer.add_chat_template(template)

    def add(name: str, *shape: int) -> None:
        weights = 2.0 / np.sqrt(shape[-1]) * random.standard_normal(shape)
        if name == "output.weight":
            weights[:259] *= 0.1  # so that it writes words rather than stray bytes, and rarely ends
        writer.add_tensor(name, weights.astype(np.float32))

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(N_EMBD, dtype=np.float32))

    add("token_embd.weight", N_VOCAB, N_EMBD)
    ones("output_norm.weight")
    add("output.weight", N_VOCAB, N_EMBD)
    for i in range(N_LAYER):
        ones(f"blk.{i}.attn_norm.weight")
        ones(f"blk.{i}.ffn_norm.weight")
        add(f"blk.{i}.attn_q.weight", N_EMBD, N_EMBD)
        add(f"blk.{i}.attn_k.weight", N_EMBD // 2, N_EMBD)
        add(f"blk.{i}.attn_v.weight", N_EMBD // 2, N_EMBD)
        add(f"blk.{i}.attn_output.weight", N_EMBD, N_EMBD)
        add(f"blk.{i}.ffn_gate.weight", N_FF, N_EMBD)
        add(f"blk.{i}.ffn_up.weight", N_FF, N_EMBD)
        add(f"blk.{i}.ffn_down.weight", N_EMBD, N_FF)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_bundle(path: Path, model: Path, *, threshold: float = 0.5, seed: int = 1) -> Path:
    """A bundle of random predictors: about half of the tokens leave early, mostly wrongly."""
    random = np.random.default_rng(seed)
    path.mkdir()
    layers = (2, 4)
    translators: dict[str, np.ndarray] = {}
    for layer in layers:
        translators[f"layer_{layer}.v"] = np.zeros((RANK, N_EMBD), np.float16)
        translators[f"layer_{layer}.u"] = np.zeros((N_EMBD, RANK), np.float16)
        translators[f"layer_{layer}.b"] = np.zeros(N_EMBD, np.float16)
        weights = random.standard_normal((3 * K, 1)).astype(np.float32)
        (path / f"predictor_{layer}.onnx").write_bytes(write_predictor(weights))
    write_safetensors(path / "translators.safetensors", translators)
    lens = np.arange(3, N_VOCAB, dtype=np.int32)
    write_safetensors(path / "head.safetensors", {"lens_ids": lens})
    (path / "manifest.json").write_text(json.dumps(manifest(model, layers, threshold)))
    return path


def manifest(
    model: Path, layers: tuple[int, ...] = (2, 4), threshold: float = 0.5
) -> dict[str, object]:
    """The manifest of a bundle for a tiny model."""
    return {
        "format": 1,
        "model": {
            "sha256": model_files.sha256_of(model),
            "name": "tiny",
            "architecture": "llama",
            "n_layer": N_LAYER,
            "n_embd": N_EMBD,
            "n_vocab": N_VOCAB,
        },
        "k": K,
        "max_pending": 3,
        "probes": [
            {
                "layer": layer,
                "predictor": f"predictor_{layer}.onnx",
                "threshold_calibrated": threshold,
                "threshold_exact": threshold,
            }
            for layer in layers
        ],
        "calibration": {},
        "tools": {},
    }


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """https://github.com/huggingface/safetensors#format"""
    names = {"float16": "F16", "int32": "I32"}
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        span = [len(data), len(data) + len(raw)]
        dtype = names[str(tensor.dtype)]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": span}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_predictor(weights: np.ndarray) -> bytes:
    """ONNX bytes of p = sigmoid(features @ weights), encoded by hand after onnx.proto."""

    def varint(value: int) -> bytes:
        out = b""
        while value >= 0x80:
            out += bytes([value & 0x7F | 0x80])
            value >>= 7
        return out + bytes([value])

    def field(number: int, value: int | bytes | str) -> bytes:
        if isinstance(value, int):
            return varint(number << 3) + varint(value)
        raw = value.encode() if isinstance(value, str) else value
        return varint(number << 3 | 2) + varint(len(raw)) + raw

    def node(op: str, inputs: list[str], output: str) -> bytes:
        names = b"".join(field(1, name) for name in inputs)
        return field(1, names + field(2, output) + field(4, op))

    def value_info(name: str, columns: int) -> bytes:
        dims = field(1, field(2, "n")) + field(1, field(1, columns))
        tensor = field(1, 1) + field(2, dims)
        return field(1, name) + field(2, field(1, tensor))

    n_in = weights.shape[0]
    constant = field(1, n_in) + field(1, 1) + field(2, 1) + field(8, "w")
    constant += field(9, weights.astype("<f4").tobytes())
    graph = node("MatMul", ["features", "w"], "z") + node("Sigmoid", ["z"], "p")
    graph += field(2, "predictor") + field(5, constant)
    graph += field(11, value_info("features", n_in)) + field(12, value_info("p", 1))
    return field(1, 8) + field(7, graph) + field(8, field(1, "") + field(2, 13))
