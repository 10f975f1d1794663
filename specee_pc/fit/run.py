"""The stages of fit, in order: record, translators, probes, thresholds, report, bundle."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import specee_pc
from specee_pc import bundle, model_files
from specee_pc.errors import BundleError, InternalError, SpeceeError
from specee_pc.fit.export import check_onnx, onnx_model, safetensors
from specee_pc.fit.lens import lens_ids, lens_order
from specee_pc.fit.model import open_model
from specee_pc.fit.predictors import N_HIDDEN
from specee_pc.fit.probes import Chain, Data, K, Prober
from specee_pc.fit.prompts import (
    MAX_PROMPT_TOKENS,
    N_PARALLEL,
    Part,
    Prompt,
    default_file,
    plan_batches,
    read_prompts,
)
from specee_pc.fit.recording import Key, Recording, Rows, layers_to_record
from specee_pc.fit.report import make_report, top_k
from specee_pc.fit.thresholds import NEVER, choose_calibrated
from specee_pc.fit.translators import (
    RIDGES,
    HeadMetric,
    Pairs,
    Regression,
    Translator,
    distil,
)
from specee_pc.fit.weights import Weights, read_weights
from specee_pc.gguf_header import GgufHeader, read_header
from specee_pc.options import FitOptions, default_threads

RANKS = (64, 128, 256)
RANK_TOLERANCE = 0.01  # of top-1 agreement, for the smaller rank
LENS_PARTS = (1 / 24, 1 / 12, 1 / 6)  # of the vocabulary, tried as the lens's
N_LENS_DISTIL = 4096  # most frequent tokens that distillation looks at
MIN_TOKENS = 2000  # held-out parts of fewer promise nothing
MIN_AGREEMENT = 0.9  # of recorded tokens with head . final state; roundings flip near-ties
MAX_PENDING = 3
# An exit that the full model refutes costs the work on the tokens after it, about a token; a
# confirmed one saves a fifth of one or so. It takes about five right ones to pay for a wrong one.
EXACT_THRESHOLD = 0.85


class Stages:
    """One progress bar with a time left, and how long every stage took."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description:<22}"), BarColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.seconds: dict[str, float] = {}

    def __enter__(self) -> Stages:
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def say(self, line: str) -> None:
        self._progress.console.print(line, markup=False, highlight=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[Callable[[float], None]]:
        """Yields a function that takes the share of the stage that was done since the last call."""
        task = self._progress.add_task(name, total=1.0)
        begin = time.perf_counter()
        done, shown = 0.0, 0.0

        def step(share: float) -> None:
            nonlocal done, shown
            done += share
            self._progress.advance(task, share)
            if not self._progress.console.is_terminal and done >= shown + 0.1:  # a log: some lines
                shown = done
                self.say(f"{name}: {done:.0%}")

        yield step
        self.seconds[name] = round(time.perf_counter() - begin, 1)
        self._progress.update(task, completed=1.0)
        if not self._progress.console.is_terminal:
            self.say(f"{name}: {self.seconds[name]} s")


def fit(options: FitOptions) -> None:
    """See specee_pc.fit.run_fit."""
    header = read_header(model_files.resolve(options.model))
    out = options.out or bundle.beside(header.path)
    if out.exists() and not out.is_dir():
        raise BundleError(f"{out}: is a file, not a bundle folder")
    threads = options.threads or default_threads()
    torch.set_num_threads(threads)
    prompts_file = options.prompts or default_file()
    prompts = read_prompts(prompts_file)
    weights = read_weights(header)

    with Stages() as stages:
        rows = record(header, weights, out, threads, prompts, stages)
        with stages.stage("translators") as step:
            data = split(rows, weights)
            translators = fit_translators(data, weights, step)
        # Only the translators' text: predictors must learn that some tokens are missing.
        seen = data.translate
        order = lens_order(rows.argmax[seen], rows.text_of(seen), weights.n_vocab)
        with stages.stage("probe layers") as step:
            sizes = sorted({max(K, round(share * weights.n_vocab)) for share in LENS_PARTS})
            prober = Prober(data, weights, translators, order)
            layers, n_lens = prober.best(options.fidelity, sizes, step)
        with stages.stage("distillation") as step:
            translators |= distil_translators(data, weights, translators, layers, order, step)
        with stages.stage("predictors"):
            prober = Prober(data, weights, translators, order)
            chain = prober.chain(layers, n_lens, N_HIDDEN)
        chosen = data.calibration
        threshold = choose_calibrated(
            chain.p[chosen], chain.right[chosen], data.prompt[chosen], options.fidelity
        )
        with stages.stage("report and bundle"):
            report = make_report(prober, chain, threshold, options.fidelity)
            report["seconds"] = dict(stages.seconds)
            report["prompts"] = {"file": prompts_file.name, "used": len(set(rows.prompt.tolist()))}
            files = bundle_files(header, chain, translators, threshold, report)
            bundle.write_atomically(out, files)
        if threshold == NEVER:
            stages.say(
                f"no threshold keeps a fidelity of {options.fidelity} on this model: "
                "calibrated mode will never leave early"
            )
        test = report["test"]
        stages.say(
            f"{out}: probes after layers {', '.join(map(str, layers))} of {header.n_layer}; "
            f"on prompts held out, fidelity {test['fidelity']:.4f}, "
            f"mean layers {test['mean_layers']:.1f}, {test['left_early']:.0%} leave early"
        )


def record(
    header: GgufHeader,
    weights: Weights,
    out: Path,
    threads: int,
    prompts: list[Prompt],
    stages: Stages,
) -> Rows:
    """Record what is missing and return all rows. Raises UnsupportedModel without layer windows."""
    with open_model(header.path, threads) as model:
        plan, n_long = plan_batches(prompts, model.tokenize)
        if n_long:
            stages.say(f"{n_long} prompts of more than {MAX_PROMPT_TOKENS} tokens are left out")
        sha256 = model_files.sha256_of(header.path)
        key = Key.of(sha256, weights.norm.shape[0], layers_to_record(header.n_layer), plan)
        recording = Recording(out.with_name(out.name + ".work"), key, stages.say)
        recording.check_space(plan)
        n_prompt = sum(len(batch.prompts) for batch in plan)
        with stages.stage("recording") as step:
            recording.run(plan, model.record, lambda n: step(n / n_prompt))
    stages.seconds["recording"] = round(recording.seconds, 1)
    rows = recording.load(plan)
    n_held = len(rows.of(Part.CALIBRATION))
    if n_held < MIN_TOKENS:
        raise SpeceeError(
            f"{n_held} tokens to calibrate on; a promise needs {MIN_TOKENS}: "
            "give more or longer prompts"
        )
    return rows


def split(rows: Rows, weights: Weights) -> Data:
    """Normed states of all recorded layers; the training part is halved by prompt.

    A predictor that is trained on the tokens of its translators learns to trust them too much.
    """
    normed = {layer: weights.normed(rows.states(layer)) for layer in rows.layers}
    sample = slice(None, None, max(1, len(rows) // 512))
    said = top_k(normed[max(normed)][sample], weights.head, 1).flatten()
    if float((said == rows.argmax[sample]).float().mean()) < MIN_AGREEMENT:
        raise InternalError("the recorded states do not lead to the recorded tokens")
    train = rows.of(Part.TRAIN)
    even = rows.prompt[train] // N_PARALLEL % 3 != 0
    greedy = rows.greedy
    calibration, test = rows.of(Part.CALIBRATION), rows.of(Part.TEST)
    return Data(
        normed=normed,
        argmax=rows.argmax,
        prompt=rows.prompt,
        translate=train[even],
        train=train[~even],
        validation=rows.of(Part.VALIDATION),
        calibration=calibration[greedy[calibration]],
        test=test[greedy[test]],
    )


def fit_translators(
    data: Data, weights: Weights, step: Callable[[float], None]
) -> dict[int, Translator]:
    """One per recorded layer. Rank and ridge are chosen at a middle layer on validation rows."""
    n_layer = max(data.normed)
    inner = [layer for layer in data.normed if layer < n_layer]
    metric = HeadMetric(weights.head)
    final = data.normed[n_layer][data.translate]
    rows, truth = data.validation[::4], data.argmax[data.validation[::4]]

    def regression(layer: int) -> Regression:
        return Regression(data.normed[layer][data.translate], final, metric)

    middle = inner[len(inner) // 2]
    at_middle = regression(middle)
    ranks = [rank for rank in RANKS if rank < at_middle.n_embd] or [at_middle.n_embd // 2]
    score: dict[tuple[int, float], float] = {}
    for ridge in RIDGES:
        solution = at_middle.solve(ridge)
        for rank in ranks:
            state = solution.cut(rank).rounded()(data.normed[middle][rows])
            hit = top_k(state, weights.head, 1).flatten() == truth
            score[rank, ridge] = float(hit.float().mean())
    step(0.2)
    best = max(score.values())
    rank, ridge = min(key for key, value in score.items() if value >= best - RANK_TOLERANCE)
    ridge = max((value, r) for (k, r), value in score.items() if k == rank)[1]
    translators = {}
    for layer in inner:
        translators[layer] = regression(layer).solve(ridge).cut(rank).rounded()
        step(0.8 / len(inner))
    return translators


def distil_translators(
    data: Data,
    weights: Weights,
    translators: dict[int, Translator],
    layers: list[int],
    order: torch.Tensor,
    step: Callable[[float], None],
) -> dict[int, Translator]:
    """The translators of the chosen layers, refined."""
    n_layer = max(data.normed)
    rows = weights.rows(lens_ids(order, min(N_LENS_DISTIL, weights.n_vocab)))

    def pairs(layer: int, chosen: torch.Tensor) -> Pairs:
        return Pairs(data.normed[layer][chosen], data.normed[n_layer][chosen])

    return {
        layer: distil(
            translators[layer],
            pairs(layer, data.translate),
            pairs(layer, data.validation),
            rows,
            lambda share: step(share / len(layers)),
        ).rounded()
        for layer in layers
    }


def bundle_files(
    header: GgufHeader,
    chain: Chain,
    translators: dict[int, Translator],
    threshold: float,
    report: dict[str, Any],
) -> dict[str, bytes]:
    """The content of the bundle's folder by file name."""
    tensors: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    probes = []
    for layer, predictor, x in zip(chain.layers, chain.predictors, chain.examples, strict=True):
        t = translators[layer]
        for name, value in (("v", t.v), ("u", t.u), ("b", t.b)):
            tensors[f"layer_{layer}.{name}"] = value.half().numpy()
        files[f"predictor_{layer}.onnx"] = onnx_model(predictor)
        check_onnx(files[f"predictor_{layer}.onnx"], predictor, x[:256].numpy())
        probes.append(
            {
                "layer": layer,
                "predictor": f"predictor_{layer}.onnx",
                "threshold_calibrated": threshold,
                "threshold_exact": EXACT_THRESHOLD,
            }
        )
    files["translators.safetensors"] = safetensors(tensors)
    files["head.safetensors"] = safetensors({"lens_ids": chain.ids.numpy().astype(np.int32)})
    manifest = {
        "format": bundle.FORMAT,
        "model": {
            "sha256": model_files.sha256_of(header.path),
            "name": header.name,
            "architecture": header.architecture,
            "n_layer": header.n_layer,
            "n_embd": header.n_embd,
            "n_vocab": header.n_vocab,
        },
        "k": K,
        "max_pending": MAX_PENDING,
        "probes": probes,
        "calibration": report,
        "tools": {
            "specee_pc": specee_pc.__version__,
            "torch": version("torch"),
            "onnx": version("onnx"),
            "numpy": version("numpy"),
        },
    }
    files[bundle.MANIFEST] = json.dumps(manifest, indent=1).encode()
    return files
