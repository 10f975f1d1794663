"""The bundle's files: safetensors and ONNX, written without a pickle anywhere."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from specee_pc.errors import OnnxError
from specee_pc.fit.predictors import Predictor

OPSET = 17
IR_VERSION = 8  # the one of opset 17's time: older ONNX Runtimes read it
TYPES = {"float16": "F16", "float32": "F32", "int32": "I32"}

Array = npt.NDArray[np.generic]


def safetensors(tensors: Mapping[str, Array]) -> bytes:
    """The bytes of a safetensors file: header length, JSON header, data in the same order.

    Format: https://github.com/huggingface/safetensors#format
    """
    header: dict[str, object] = {}
    data = b""
    for name, array in tensors.items():
        little = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
        begin = len(data)
        data += little.tobytes()
        header[name] = {
            "dtype": TYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [begin, len(data)],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data begins aligned
    return struct.pack("<Q", len(text)) + text + data


def onnx_model(predictor: Predictor) -> bytes:
    """The predictor as ONNX: "features" float32 [n, 3k] -> "p" float32 [n, 1], any n."""
    from onnx import TensorProto, checker, helper, numpy_helper

    n_in = predictor.w1.shape[1]
    weights = {
        "w1": predictor.w1,
        "b1": predictor.b1,
        "w2": predictor.w2,
        "b2": predictor.b2,
    }
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["features", "w1", "b1"], ["z1"], transB=1),
            helper.make_node("Relu", ["z1"], ["a1"]),
            helper.make_node("Gemm", ["a1", "w2", "b2"], ["z2"], transB=1),
            helper.make_node("Sigmoid", ["z2"], ["p"]),
        ],
        "predictor",
        [helper.make_tensor_value_info("features", TensorProto.FLOAT, ["n", n_in])],
        [helper.make_tensor_value_info("p", TensorProto.FLOAT, ["n", 1])],
        [
            numpy_helper.from_array(np.ascontiguousarray(value.numpy(), dtype=np.float32), name)
            for name, value in weights.items()
        ],
    )
    model = helper.make_model(
        graph,
        producer_name="specee_pc",
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    checker.check_model(model)
    content: bytes = model.SerializeToString()
    return content


def check_onnx(content: bytes, predictor: Predictor, x: npt.NDArray[np.float32]) -> float:
    """Largest difference between ONNX Runtime and the predictor on features x [n, 3k].

    Raises OnnxError above 1e-5.
    """
    import onnxruntime
    import torch

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    p = session.run(["p"], {"features": x})[0].reshape(-1)
    error = float(np.abs(p - predictor(torch.from_numpy(x)).numpy()).max())
    if not error <= 1e-5:
        raise OnnxError(f"ONNX Runtime differs from the fitted predictor by {error:.2e}")
    return error
