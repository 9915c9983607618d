"""Scenario `weights`: the effect of quantised weights on quality, speed and memory.

Quality is the perplexity of recorded conversations, computed in steps of a few tokens, because
decoding uses such steps. Needs a model with a tokenizer. A GGUF file of the same model stands
beside it, on the same tokens.
"""

import math
from dataclasses import replace
from pathlib import Path

import torch

from kvchat.bench.engines import complete, new_engine
from kvchat.bench.measure import Sample
from kvchat.bench.replay import longest
from kvchat.bench.report import Figure, Result
from kvchat.bench.setup import BenchSetup
from kvchat.chat.chat_model import read_chat_model, readopt
from kvchat.chat.session_file import read_session
from kvchat.core.errors import KvchatError, ModelError
from kvchat.core.types import rate
from kvchat.engine.assembly import AssembledEngine
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.paged_model import PagedModel
from kvchat.model.quantise import num_packed_bytes
from kvchat.model.source import ModelSource, find_model

_FORMS = ("auto", "int8", "int4")
_CHUNK = 8
_NUM_TOKENS = 64
_PROMPT = 128


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
    for form, source in _forms(setup):
        weights = form if source is setup.source else "auto"
        try:
            assembled = new_engine(source, replace(setup.model, weights=weights), setup.cache)
        except ModelError as error:
            notes.append(f"{form}: {error}")
            continue
        for name, (value, unit) in _measured(setup, assembled, texts).items():
            first.setdefault(name, value)
            figures.append(
                Figure(
                    f"{form}: {name}",
                    value,
                    unit,
                    first[name],
                    "auto",
                    value / first[name],
                    "over auto",
                )
            )
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
    limit = engine.max_context - _NUM_TOKENS
    prompt = texts[0][: min(_PROMPT, limit)]

    def decode() -> float:
        return rate(_NUM_TOKENS - 1, complete(engine, prompt, _NUM_TOKENS).finished.timing.decode_s)

    decode()
    speed = Sample(tuple(decode() for _ in range(setup.repeats)))
    kept = [text[: setup.scaled(limit)] for text in texts]
    # Perplexity last: it rebinds the model's attention.
    return {
        "tokens a second": (speed.median, "tokens/s"),
        "weights": (_weight_bytes(assembled) / 2**20, "MiB"),
        "perplexity": (perplexity(assembled, kept), ""),
    }


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
    loaded, pool = assembled.loaded, assembled.engine.cache.kv_pool
    block_size = pool.geometry.block_size
    blocks = range(1, 2 + len(text) // block_size)
    assert blocks[-1] < pool.num_blocks
    # Use the engine's own pool after clearing it; block 0 is the scratch block.
    assembled.engine.cache.clear()
    model = PagedModel(loaded, pool.layers)
    losses: list[float] = []
    for start in range(0, len(text) - 1, _CHUNK):
        ids = text[start : min(start + _CHUNK, len(text) - 1)]
        piece = SequencePiece(ids, start, blocks, len(ids))
        logits = model.forward(build_batch([piece], block_size, loaded.device))
        wanted = torch.tensor(text[start + 1 : start + 1 + len(ids)], device=loaded.device)
        losses += torch.nn.functional.cross_entropy(logits, wanted, reduction="none").tolist()
    return losses
