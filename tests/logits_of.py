"""Prints one hash of the logits per decode.

`logits_of.py LIBRARY_FOLDER MODEL N_PROMPT N_STEP THREADS`
A program of its own, because one process holds one libllama. Plain llama_decode, nothing of ours.
"""

from __future__ import annotations

import hashlib
import os
import sys


def main(folder: str, model_path: str, n_prompt: int, n_step: int, threads: int) -> None:
    os.environ["LLAMA_CPP_LIB_PATH"] = folder
    import llama_cpp as lib
    import numpy as np

    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(model_path.encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.n_ctx = n_prompt + n_step + 1
    params.n_threads = params.n_threads_batch = threads
    ctx = lib.llama_init_from_model(model, params)
    n_vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))

    tokens = [3 + i * i * 31 % (n_vocab - 3) for i in range(n_prompt)]
    for _ in range(n_step + 1):
        array = (lib.llama_token * len(tokens))(*tokens)
        if lib.llama_decode(ctx, lib.llama_batch_get_one(array, len(tokens))) != 0:
            sys.exit("llama_decode failed")
        row = lib.llama_get_logits_ith(ctx, -1)
        logits = np.ctypeslib.as_array(row, (n_vocab,))
        tokens = [int(logits.argmax())]
        print(tokens[0], hashlib.sha256(logits.tobytes()).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
