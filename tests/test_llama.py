from __future__ import annotations

import itertools
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

from specee_pc import Llama, Stats
from specee_pc.errors import (
    BundleError,
    BundleModelMismatch,
    ContextFull,
    InvalidOption,
    ModelFileError,
    OnnxError,
    PromptTooLong,
    SpeceeError,
)

PROMPT = [1, 70, 75, 80, 85, 90, 95]
# An f32 KV cache: a random model amplifies f16's rounding until a batch and single tokens differ.
SETTINGS: dict[str, Any] = {
    "n_ctx": 256,
    "n_threads": 1,
    "n_threads_batch": 1,
    "type_k": 0,
    "type_v": 0,
}


def load(model: Path, bundle: Path | None, mode: str = "exact", **settings: Any) -> Llama:
    return Llama(model, mode=mode, bundle=bundle, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def off(tiny_model: Path) -> Iterator[Llama]:
    llm = load(tiny_model, None, "off")
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def exact(tiny_model: Path, tiny_bundle: Path) -> Iterator[Llama]:
    llm = load(tiny_model, tiny_bundle)
    yield llm
    llm.close()


def take(llm: Llama, prompt: list[int], n: int, **settings: Any) -> list[int]:
    return list(itertools.islice(llm.generate(prompt, **{"temp": 0.0, **settings}), n))


# ---- the text ----


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temp": 1.0},
        {"temp": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"repeat_penalty": 1.3, "presence_penalty": 0.5},
        {"temp": 1.5, "mirostat_mode": 2},
    ],
)
def test_exact_is_off_under_any_sampler(off: Llama, exact: Llama, settings: dict[str, Any]) -> None:
    exact.reset_stats()
    for seed, prompt in enumerate((PROMPT, [1, 200, 3, 17], PROMPT[:4])):
        off.set_seed(seed + 1)
        exact.set_seed(seed + 1)
        assert take(exact, prompt, 60, **settings) == take(off, prompt, 60, **settings)
    stats = exact.stats
    assert stats.n_token == 180 and stats.n_refuted > 0  # the random predictors did leave early
    assert stats.histogram[2] + stats.histogram[4] == stats.n_exit
    assert sum(stats.histogram) == 180


def test_off_is_llama_cpp(off: Llama, tiny_model: Path) -> None:
    import llama_cpp

    stock = llama_cpp.Llama(str(tiny_model), verbose=False, **SETTINGS)
    assert take(off, PROMPT, 60) == list(itertools.islice(stock.generate(PROMPT, temp=0.0), 60))
    assert off.n_tokens == stock.n_tokens
    assert off.input_ids[: off.n_tokens].tolist() == stock.input_ids[: stock.n_tokens].tolist()
    stock.close()


def test_a_prompt_longer_than_a_batch(tiny_model: Path, tiny_bundle: Path) -> None:
    prompt = [1, *(3 + i * 7 % 300 for i in range(150))]
    small = load(tiny_model, tiny_bundle, n_batch=32, n_ubatch=8)
    large = load(tiny_model, None, "off")
    assert take(small, prompt, 40) == take(large, prompt, 40)
    assert small.stats.n_prompt == 151
    small.close()
    large.close()


def test_calibrated_leaves_and_a_temperature_makes_it_exact(
    tiny_model: Path, tiny_bundle: Path, off: Llama
) -> None:
    llm = load(tiny_model, tiny_bundle, "calibrated")
    take(llm, PROMPT, 50)
    stats = llm.stats
    assert stats.mode == "calibrated" and 0 < stats.n_exit < 50 and stats.n_refuted == 0
    assert stats.mean_layers < tiny.N_LAYER
    for settings in ({"temp": 1.0}, {"repeat_penalty": 1.2}):
        llm.set_seed(3)
        off.set_seed(3)
        assert take(llm, PROMPT, 50, **settings) == take(off, PROMPT, 50, **settings)
    assert llm.stats.n_token == 150 and llm.stats.n_exit > stats.n_exit  # counts go on
    again = take(llm, PROMPT, 50)
    fresh = load(tiny_model, tiny_bundle, "calibrated")
    assert take(fresh, PROMPT, 50) == again
    fresh.close()
    llm.close()


# ---- prefixes, closing, state ----


def test_turns_reuse_the_prefix_and_equal_fresh_ones(
    tiny_model: Path, tiny_bundle: Path, exact: Llama
) -> None:
    text = list(PROMPT)
    exact.reset()
    for turn in range(4):
        exact.reset_stats()
        answer = take(exact, text, 15)
        # all but the newest token of the last answer is in the KV cache already
        assert exact.stats.n_prompt == (len(text) if turn == 0 else 4)
        fresh = load(tiny_model, tiny_bundle)
        assert take(fresh, text, 15) == answer
        fresh.close()
        text += [*answer, 100 + turn, 110, 120]


def test_the_same_prompt_again_gives_the_same_text(exact: Llama) -> None:
    first = take(exact, PROMPT, 20)
    assert take(exact, PROMPT, 20) == first
    assert take(exact, PROMPT[:3], 5) and take(exact, PROMPT, 20) == first


@pytest.mark.parametrize("n", range(1, 9))
def test_closing_early_keeps_what_was_taken(exact: Llama, off: Llama, n: int) -> None:
    for llm in (exact, off):
        llm.reset()
        tokens = llm.generate(PROMPT, temp=0.0)
        taken = list(itertools.islice(tokens, n))
        tokens.close()
        text = PROMPT + taken
        assert llm.input_ids[: llm.n_tokens].tolist() == text[:-1]
        llm.reset_stats()
        if llm is exact:
            after = take(llm, text, 20)
            assert llm.stats.n_prompt == 1
    assert after == take(off, PROMPT + taken, 20)


def test_tokens_can_be_sent_and_reset_can_be_left_out(exact: Llama, off: Llama) -> None:
    texts = []
    for llm in (exact, off):
        llm.reset()
        tokens = llm.generate(PROMPT, temp=0.0)
        text = [next(tokens), tokens.send([50, 51, 52]), next(tokens), next(tokens)]
        tokens.close()
        text += take(llm, [60, 61], 10, reset=False)
        texts.append((text, llm.input_ids[: llm.n_tokens].tolist()))
    assert texts[0] == texts[1]
    assert texts[0][1][len(PROMPT) + 1 : len(PROMPT) + 4] == [50, 51, 52]


def test_another_call_ends_a_generator(exact: Llama) -> None:
    tokens = exact.generate(PROMPT, temp=0.0)
    next(tokens)
    other = take(exact, PROMPT, 10)
    with pytest.raises(SpeceeError, match="ended by another call"):
        next(tokens)
    assert take(exact, PROMPT, 10) == other
    tokens = exact.generate(PROMPT, temp=0.0)
    next(tokens)
    newer = exact.generate(PROMPT, temp=0.0)
    begun = [next(newer)]
    tokens.close()  # must not disturb the newer one
    assert begun + list(itertools.islice(newer, 9)) == other


def test_save_and_load_state(exact: Llama) -> None:
    whole = take(exact, PROMPT, 30)
    exact.reset()
    tokens = exact.generate(PROMPT, temp=0.0)
    begun = list(itertools.islice(tokens, 10))
    state = exact.save_state()
    assert begun + list(itertools.islice(tokens, 20)) == whole  # saving disturbs nothing
    tokens.close()
    take(exact, [1, 9, 9], 5)
    exact.load_state(state)
    assert take(exact, PROMPT + begun, 20) == whole[10:]


def test_full_depth_calls_and_sessions_alternate(exact: Llama, off: Llama) -> None:
    import llama_cpp

    keep = llama_cpp.LogitsProcessorList([lambda ids, scores: scores])
    expected = take(off, PROMPT, 30)
    text: list[int] = []
    for n in range(3):
        text += take(exact, PROMPT + text, 5)
        text += take(exact, PROMPT + text, 5, logits_processor=keep)
        assert text == expected[: 10 * (n + 1)]
    exact.reset()
    exact.eval(PROMPT)
    assert exact.sample(temp=0.0) == expected[0]
    assert exact.n_tokens == len(PROMPT)
    assert take(exact, PROMPT, 30) == expected


def test_a_logits_processor_sees_every_token(exact: Llama, off: Llama) -> None:
    import llama_cpp

    seen: list[int] = []

    def ban(ids: Any, scores: Any) -> Any:
        seen.append(len(ids))
        scores[expected[0]] = -1e9
        return scores

    expected = take(off, PROMPT, 3)
    exact.reset_stats()
    processors = llama_cpp.LogitsProcessorList([ban])
    assert expected[0] not in take(exact, PROMPT, 3, logits_processor=processors)
    assert seen == [len(PROMPT) + i for i in range(3)]
    assert exact.stats.n_token == 3 and exact.stats.n_exit == 0


def test_stopping_criteria_stop_where_upstream_does(tiny_model: Path, exact: Llama) -> None:
    import llama_cpp

    stock = llama_cpp.Llama(str(tiny_model), verbose=False, **SETTINGS)
    target = take(exact, PROMPT, 10)[6]
    criteria = llama_cpp.StoppingCriteriaList([lambda ids, scores: ids[-1] == target])
    stopped = [
        list(llm.generate(PROMPT, temp=0.0, stopping_criteria=criteria)) for llm in (exact, stock)
    ]
    assert stopped[0] == stopped[1] and stopped[0][-1] == target
    assert exact.n_tokens == stock.n_tokens
    stock.close()


# ---- completions ----


def complete(llm: Any, prompt: Any, **settings: Any) -> Any:
    """A completion or its chunks, without llama_cpp's unions of types."""
    return llm(prompt, **{"temperature": 0.0, **settings})


def test_completions_stream_what_they_return(exact: Llama) -> None:
    whole = complete(exact, "AB", max_tokens=20)
    chunks = list(complete(exact, "AB", max_tokens=20, stream=True))
    pieces = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert pieces and pieces.replace("\ufffd", "") in whole["choices"][0]["text"]
    assert whole["usage"]["completion_tokens"] == 20


def test_a_grammar_rules(exact: Llama) -> None:
    from llama_cpp.llama_grammar import LlamaGrammar

    grammar = LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    out = complete(exact, "AB", max_tokens=8, grammar=grammar)
    assert out["choices"][0]["text"] in ("yes", "no")


def test_pickling_keeps_the_settings(tiny_model: Path, tiny_bundle: Path) -> None:
    llm = load(tiny_model, tiny_bundle, "calibrated", max_pending=2)
    copy = pickle.loads(pickle.dumps(llm))
    assert copy.mode == "calibrated" and copy.bundle.path == tiny_bundle
    assert take(copy, PROMPT, 20) == take(llm, PROMPT, 20)
    copy.close()
    llm.close()
    llm.close()  # twice is fine


# ---- settings ----


def test_without_a_bundle_it_runs_at_full_depth_and_says_so(user: Path, tiny_model: Path) -> None:
    for bundle, reason in (("auto", "specee-pc fit"), (None, "no bundle was given")):
        llm = Llama(tiny_model, bundle=bundle, **SETTINGS)
        assert llm.mode == "off" and llm.notice is not None and reason in llm.notice
        assert take(llm, PROMPT, 5) and isinstance(llm.stats, Stats)
        assert llm.stats.notice == llm.notice and llm.stats.mean_layers == tiny.N_LAYER
        llm.close()


def test_the_bundle_beside_the_model_is_found(
    user: Path, tiny_model: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    model = Path(shutil.copy(tiny_model, tmp_path / "m.gguf"))
    shutil.copytree(tiny_bundle, tmp_path / "m.specee")
    llm = Llama(model, **SETTINGS)
    assert (llm.mode, llm.notice) == ("exact", None)
    llm.close()


def test_an_architecture_without_windows_runs_at_full_depth(
    user: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    model = tiny.write_model(tmp_path / "m.gguf", arch="baichuan")
    llm = Llama(model, bundle=None, **SETTINGS)
    assert llm.mode == "off" and llm.notice is not None and llm.notice.startswith("full depth: ")
    assert len(take(llm, PROMPT, 10)) == 10
    stats = llm.stats
    assert (stats.n_token, stats.n_prompt, stats.mean_layers) == (10, len(PROMPT), 6.0)
    assert stats.tokens_per_second > 0
    llm.close()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"n_threads": 0}, "n_threads must be a whole number, 1 to 512, not 0"),
        ({"n_threads": -1}, "n_threads"),
        ({"n_threads": 100_000}, "n_threads"),
        ({"n_threads_batch": 0}, "n_threads_batch"),
        ({"n_ctx": -1}, "n_ctx"),
        ({"n_ctx": 2**31 - 1}, "n_ctx 2147483647: its KV cache needs"),
        ({"n_batch": 0}, "n_batch"),
        ({"n_ubatch": -5}, "n_ubatch"),
        ({"mode": "fast"}, "mode must be one of exact, calibrated, off"),
        ({"max_pending": 65}, "max_pending"),
    ],
)
def test_impossible_settings(tiny_model: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        Llama(tiny_model, **{**SETTINGS, **settings})


def test_context_sizes_that_llama_cpp_rounds_up(tiny_model: Path) -> None:
    llm = load(tiny_model, None, "off", n_ctx=300)
    assert llm.n_ctx() == 512 and len(take(llm, [5] * 400, 100)) == 100
    llm.close()
    llm = load(tiny_model, None, "off", n_ctx=0)  # the model's own
    assert llm.n_ctx() == 1024
    llm.close()


# ---- bad files and prompts ----


def test_model_files_that_cannot_work(user: Path, tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such model file"):
        Llama(tmp_path / "none.gguf")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(tiny_model.read_bytes()[:-1])
    with pytest.raises(ModelFileError, match="truncated"):
        Llama(bad)
    bad.write_bytes(tiny_model.read_bytes().replace(b"blk.3.ffn_up", b"blk.3.ffn_xx"))
    with pytest.raises(ModelFileError, match=r"cannot load it: .*blk\.3\.ffn_up"):
        Llama(bad)
    bad.write_bytes(tiny_model.read_bytes().replace(b"llama", b"lamma"))
    with pytest.raises(ModelFileError, match=r"cannot load it: .*unknown model architecture"):
        Llama(bad)


def test_a_vocabulary_alone(tiny_model: Path) -> None:
    llm = Llama(tiny_model, vocab_only=True, **SETTINGS)
    assert llm.tokenize(b"A")
    with pytest.raises(InvalidOption, match="vocab_only"):
        next(llm.generate(PROMPT))
    llm.close()


def test_bundles_that_cannot_work(
    user: Path, tiny_model: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    other = tiny.write_model(tmp_path / "other.gguf", seed=5)
    with pytest.raises(BundleModelMismatch, match="fitted on another model"):
        load(other, tiny_bundle)
    with pytest.raises(BundleError, match="no such bundle"):
        load(tiny_model, tmp_path / "none.specee")
    bundle = tmp_path / "b.specee"
    shutil.copytree(tiny_bundle, bundle)
    (bundle / "predictor_4.onnx").write_bytes(b"nonsense")
    with pytest.raises(OnnxError, match=r"predictor_4\.onnx"):
        load(tiny_model, bundle)
    (bundle / "head.safetensors").write_bytes(b"nonsense")
    with pytest.raises(BundleError, match=r"head\.safetensors"):
        load(tiny_model, bundle)


@pytest.mark.parametrize("mode", ["off", "exact"])
def test_prompts_that_cannot_work(off: Llama, exact: Llama, mode: str) -> None:
    llm = off if mode == "off" else exact
    before = take(llm, PROMPT, 5)
    with pytest.raises(PromptTooLong, match="257 tokens, but the context holds 256"):
        next(llm.generate([3] * 257))
    with pytest.raises(PromptTooLong, match="256"):
        complete(llm, [3] * 256, max_tokens=1)
    with pytest.raises(PromptTooLong):
        list(llm.create_completion("A" * 1000, stream=True))
    with pytest.raises(InvalidOption, match="no tokens"):
        next(llm.generate([]))
    with pytest.raises(InvalidOption):
        next(llm.generate([1, tiny.N_VOCAB]))
    with pytest.raises(InvalidOption):
        next(llm.generate([1, -1]))
    assert take(llm, PROMPT, 5) == before


@pytest.mark.parametrize("mode", ["off", "exact"])
def test_a_full_context_ends_generation(off: Llama, exact: Llama, mode: str) -> None:
    llm = off if mode == "off" else exact
    prompt = [1, *([7, 8] * 120)]
    taken: list[int] = []
    with pytest.raises(ContextFull, match="256"):
        for token in llm.generate(prompt, temp=0.0):
            taken.append(token)
    assert len(taken) == 256 - len(prompt) + 1
    assert take(llm, PROMPT, 5) == take(off, PROMPT, 5)
    whole = complete(llm, prompt, max_tokens=None)
    assert whole["usage"]["total_tokens"] <= 256


# ---- SmolLM2 ----


@pytest.mark.model
def test_exact_is_off_on_smollm2(smollm2: Path) -> None:
    messages: Any = [{"role": "user", "content": "Explain in a few sentences why the sky is blue."}]
    texts = []
    for mode in ("off", "exact"):
        llm = Llama(smollm2, mode=mode, n_ctx=512)
        assert llm.mode == mode, llm.notice
        out: Any = llm.create_chat_completion(messages, max_tokens=64, temperature=0.0)
        texts.append(out["choices"][0]["message"]["content"])
        stats = llm.stats
        llm.close()
    assert texts[0] == texts[1] and len(texts[0]) > 50
    assert stats.n_exit > 0 and stats.mean_layers < 30
