"""Scenario `weights`: the effect of quantised weights on quality, speed and memory.

Quality is the perplexity of recorded conversations, computed in steps of a few tokens, because
decoding uses such steps; and how the predictions differ from those of the same model in float32.
Needs a model with a tokenizer. A GGUF file of the same model stands beside it, on the same tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from kvchat.bench.engines import complete, kv_of_a_text, new_engine
from kvchat.bench.measure import Sample
from kvchat.bench.peers import LlamaCpp, without_llama_cpp
from kvchat.bench.replay import longest
from kvchat.bench.report import Figure, Result, over
from kvchat.bench.setup import BenchSetup
from kvchat.chat.chat_model import read_chat_model, readopt
from kvchat.chat.session_file import read_session
from kvchat.core.errors import KvchatError, ModelError
from kvchat.core.types import rate
from kvchat.engine.assembly import AssembledEngine
from kvchat.model.batch import SequencePiece
from kvchat.model.checkpoint.source import ModelSource, find_model
from kvchat.model.packed.quantise import num_packed_bytes
from kvchat.model.paged_model import model_over
from kvchat.model.rounding import divergences

_FORMS = ("auto", "int8", "int4")
_CHUNK = 8
_NUM_TOKENS = 64
_PROMPT = 128
# Tokens whose predictions are compared with float32's. One takes 1 MB of a large vocabulary.
_COMPARED = 256


def run(setup: BenchSetup) -> Result:
    """Measure every weight format on the same texts."""
    settings = {"model": setup.source.name, "sessions": str(setup.sessions)}
    try:
        texts = recorded_texts(setup)
    except KvchatError as error:
        return Result("weights", settings, refusal=f"the model cannot chat: {error}")
    if not texts:
        return Result("weights", settings, refusal="there are no sessions; give some by --sessions")
    settings["tokens"] = str(sum(len(text) - 1 for text in texts))
    figures: list[Figure] = []
    notes = []
    first: dict[str, float] = {}
    exact = _exact(setup, texts)
    for form, source in _forms(setup):
        weights = form if source is setup.source else "auto"
        try:
            assembled = new_engine(source, replace(setup.model, weights=weights), setup.cache)
        except ModelError as error:
            notes.append(f"{form}: {error}")
            continue
        notes += [f"{form}: {note}" for note in assembled.loaded.notes if form in note]
        for name, (value, unit) in _measured(setup, assembled, texts).items():
            first.setdefault(name, value)
            figures.append(over(f"{form}: {name}", value, unit, ("auto", first[name]), "over auto"))
        figures += _agreement(form, assembled, texts, exact)
        if setup.gguf is not None and source is not setup.source:
            ours = next(f.value for f in figures if f.name == f"{form}: perplexity")
            figures += _beside_llama_cpp(setup.gguf, ours, _within(setup, assembled, texts))
    return Result("weights", settings, tuple(figures), notes=tuple(notes))


def _forms(setup: BenchSetup) -> list[tuple[str, ModelSource]]:
    """Return each form's name and the model it is of."""
    forms = [(form, setup.source) for form in _FORMS]
    if setup.gguf is not None:
        forms.append((setup.gguf.stem, find_model(str(setup.gguf))))
    return forms


def recorded_texts(setup: BenchSetup) -> list[list[int]]:
    """Return the tokens of the longest branch of every recorded conversation."""
    model = read_chat_model(setup.source)
    paths = sorted(setup.sessions.glob("*.jsonl")) if setup.sessions is not None else []
    return [text for text in (_text(path, model) for path in paths) if len(text) > 1]


def _text(path: Path, model: object) -> list[int]:
    conversation = read_session(path.read_bytes(), path.name).conversation
    readopt(conversation, model)  # type: ignore[arg-type]
    wanted = longest(conversation)
    branches = (conversation.context_ids(turn.turn_id) for turn in conversation.leaves())
    return next(list(ids) for ids in branches if len(ids) == wanted)


def _measured(
    setup: BenchSetup, assembled: AssembledEngine, texts: list[list[int]]
) -> dict[str, tuple[float, str]]:
    engine = assembled.engine
    prompt = texts[0][: min(_PROMPT, engine.max_context - _NUM_TOKENS)]

    def decode() -> float:
        return rate(_NUM_TOKENS - 1, complete(engine, prompt, _NUM_TOKENS).finished.timing.decode_s)

    decode()
    speed = Sample(tuple(decode() for _ in range(setup.repeats)))
    # Perplexity last: it rebinds the model's attention.
    return {
        "tokens a second": (speed.median, "tokens/s"),
        "weights": (_weight_bytes(assembled) / 2**20, "MiB"),
        "perplexity": (perplexity(assembled, _within(setup, assembled, texts)), ""),
    }


def _within(
    setup: BenchSetup, assembled: AssembledEngine, texts: list[list[int]]
) -> list[list[int]]:
    limit = setup.scaled(assembled.engine.max_context - _NUM_TOKENS)
    return [text[:limit] for text in texts]


def _beside_llama_cpp(gguf: Path, ours: float, texts: list[list[int]]) -> list[Figure]:
    """Return llama.cpp's perplexity of a file beside kvchat's of it."""
    if without_llama_cpp(gguf):
        return []
    theirs = LlamaCpp(gguf, torch.get_num_threads(), max(map(len, texts))).perplexity(texts)
    name = f"{gguf.stem}: perplexity by llama.cpp"
    return [over(name, theirs, "", ("kvchat", ours), "over kvchat")]


def _weight_bytes(assembled: AssembledEngine) -> int:
    module = assembled.loaded.module
    own = sum(parameter.nbytes for parameter in module.parameters())
    return own + num_packed_bytes(module)


def perplexity(assembled: AssembledEngine, texts: list[list[int]]) -> float:
    """Return e to the mean negative log-likelihood of every token but the first of each text."""
    total, count = 0.0, 0
    for text in texts:
        for loss in _losses(assembled, text):
            total, count = total + loss, count + 1
    return math.exp(total / count)


def _losses(assembled: AssembledEngine, text: list[int]) -> list[float]:
    losses: list[float] = []
    for logits in predictions(assembled, text):
        wanted = torch.tensor(text[len(losses) + 1 :][: len(logits)], device=logits.device)
        losses += torch.nn.functional.cross_entropy(logits, wanted, reduction="none").tolist()
    return losses


def predictions(assembled: AssembledEngine, text: list[int]) -> Iterator[torch.Tensor]:
    """Yield the logits after every token of a text but the last, a few rows at a time."""
    loaded, block_size = assembled.loaded, assembled.engine.cache.block_size
    blocks = range(1, 2 + len(text) // block_size)
    model = model_over(loaded, kv_of_a_text(assembled, len(blocks) + 1))
    state = model.new_state()
    for start in range(0, len(text) - 1, _CHUNK):
        ids = text[start : min(start + _CHUNK, len(text) - 1)]
        piece = SequencePiece(ids, start, blocks, len(ids), state)
        yield model.forward_pieces([piece], block_size)


def _exact(setup: BenchSetup, texts: list[list[int]]) -> list[torch.Tensor]:
    """Return what the model predicts in float32 after every token of the beginnings of texts."""
    in_float32 = replace(setup.model, dtype="float32", weights="auto")
    assembled = new_engine(setup.source, in_float32, setup.cache)
    room, exact = setup.scaled(_COMPARED), []
    for text in texts:
        if (start := text[: min(room, assembled.engine.max_context)])[1:]:
            exact.append(torch.cat(list(predictions(assembled, start))).cpu())
            room -= len(start)
    return exact


def _agreement(
    form: str, assembled: AssembledEngine, texts: list[list[int]], exact: list[torch.Tensor]
) -> list[Figure]:
    """Compare what a model predicts with what it predicts in float32, on the same tokens."""
    divergence, same, count = 0.0, 0, 0
    for text, own in zip(texts, exact, strict=False):
        other = torch.cat(list(predictions(assembled, text[: len(own) + 1]))).cpu()
        divergence += float(divergences(own, other).sum())
        same += int((own.argmax(-1) == other.argmax(-1)).sum())
        count += len(own)
    return [
        Figure(f"{form}: KL to float32", max(0.0, divergence / count), "nats"),
        Figure(f"{form}: top-1 as float32", 100 * same / count, "%"),
    ]
