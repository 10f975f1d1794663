"""A worker without a model: answers as bench.worker does, from a script in its arguments.

Arguments: mode, a JSON object of settings, a log file. Each command it gets is a line in the log.
Settings, by mode: "tokens" (what it generates), "greedy" (its verdicts), "speed" (tokens a second),
"fail" ({command: "die" | "hang" | "garbage" | an error name}).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

BUILD = {"llama_cpp_commit": "abc", "flags": "-O3", "cpu_features": "", "compiler": "GNU"}
N_LAYER = 4


def stats(n: int) -> dict[str, Any]:
    """Of n tokens, all but the first after one exit each."""
    parts = ("layers", "head", "probe", "draft", "completion", "sampling", "prompt", "total")
    seconds = {f"t_{part}_s": 0.01 for part in parts}
    counts = {"n_token": n, "n_layer_sum": N_LAYER + 3 * (n - 1), "n_pass": 2}
    return {**counts, "n_exit": n - 1, "n_refuted": 1, "n_prompt": 3, **seconds}


def answer(mode: str, settings: dict[str, Any], command: dict[str, Any]) -> dict[str, Any]:
    """What the worker says."""
    do = command["do"]
    if do == "load":
        return {"build": None if mode == "stock" else {**BUILD, **settings.get("build", {})}}
    if do == "prompt_tokens":
        return {"tokens": [ord(c) for c in command["text"]]}
    if do == "open":
        contexts = {"n_ctx": command["n_ctx"], "system_info": "CPU : AVX2 = 1 | REPACK = 1 |"}
        exits = mode in ("exact", "calibrated")
        return {"exits": exits, "notice": settings.get("notice"), "settings": contexts}
    if do == "generate":
        tokens = settings["tokens"]
        output = {
            "tokens": tokens,
            "text": " ".join(map(str, tokens)),
            "prefill_s": 0.1,
            "decode_s": (len(tokens) - 1) / settings.get("speed", 10.0),
            "stats": {} if mode == "stock" else stats(len(tokens)),
            "histogram": [] if mode == "stock" else [0, 0, 0, len(tokens) - 1, 1],
        }
        return {"output": output, "peak_rss_bytes": 1 << 20, "cpu_s": 0.0}
    assert do == "judge"
    verdict = {"greedy": settings["greedy"], "top1_logit": 2.5, "emitted_logit": 2.25}
    return {"judgement": verdict}


def main() -> None:
    mode, settings, log = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    mine = settings.get(mode, {})
    with log.open("a") as file:
        file.write(f"{mode} starts {os.getpid()}\n")
    for line in sys.stdin:
        command = json.loads(line)
        with log.open("a") as file:
            file.write(f"{mode} {command['do']}\n")
        fail = mine.get("fail", {}).get(command["do"])
        if fail == "die":
            print("GGML_ASSERT(x) failed", file=sys.stderr, flush=True)
            os._exit(3)
        elif fail == "hang":
            time.sleep(600)
        elif fail == "garbage":
            print("llama says hello", flush=True)
        elif fail:
            print(json.dumps({"error": fail, "message": "the reason"}), flush=True)
        else:
            print(json.dumps(answer(mode, mine, command)), flush=True)


if __name__ == "__main__":
    main()
