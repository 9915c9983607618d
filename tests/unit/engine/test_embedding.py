"""Embeddings: what transformers' own hidden states give, computed between the engine's steps."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from kvchat.core.config import CacheConfig
from kvchat.core.errors import ContextTooLong, UsageError
from kvchat.core.text import Size
from kvchat.core.types import Pooling
from kvchat.engine.embedding import Embedding
from kvchat.engine.engine import Engine
from kvchat.engine.request import RequestSpec
from support.assembled import assemble
from support.checkpoints import save_checkpoint, tiny_model
from support.remembering_model import GREEDY
from support.specimens import random_ids

FULL, WINDOWED, LEARNED, RECURRENT = "llama", "gemma3_text", "gpt2", "mamba"


def engine_of(model_type: str, path: Path) -> tuple[torch.nn.Module, Engine]:
    model = tiny_model(model_type)
    cache = CacheConfig(device_bytes=Size(num_bytes=8 << 20))
    checkpoint = save_checkpoint(path / model_type, model)
    return model, assemble(checkpoint, cache=cache, device="cpu").engine


def vector_of(embedding: Embedding) -> list[float]:
    while not embedding.step():
        pass
    embedding.close()
    return embedding.vector


@pytest.mark.parametrize("model_type", [FULL, WINDOWED, LEARNED])
def test_a_vector_is_the_mean_or_the_last_of_the_hidden_states(model_type, tmp_path, monkeypatch):
    monkeypatch.setattr("kvchat.engine.embedding._CPU_STEP_ROWS", 7)
    model, engine = engine_of(model_type, tmp_path)
    ids = random_ids(40, 1)
    with torch.inference_mode():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]

    for pooling, expected in ((Pooling.MEAN, hidden.mean(0)), (Pooling.LAST, hidden[-1])):
        got = torch.tensor(vector_of(engine.embedding(ids, pooling)))
        torch.testing.assert_close(got, normalize(expected, dim=0), atol=1e-4, rtol=1e-4)
    engine.close()


def test_an_answer_goes_on_between_the_steps_and_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr("kvchat.engine.embedding._CPU_STEP_ROWS", 4)
    _, engine = engine_of(FULL, tmp_path)
    ids, spec = random_ids(30, 2), RequestSpec(tuple(random_ids(20, 3)), GREEDY, max_tokens=8)

    def answer(embedding: Embedding | None) -> list[int]:
        engine.submit(spec)
        tokens: list[int] = []
        while engine.has_work:
            tokens += [t for e in engine.step() for t in getattr(e, "token_ids", ())]
            if embedding is not None and not embedding.vector:
                embedding.step()
        return tokens

    alone = answer(None)
    free = engine.cache.num_available
    embedding = engine.embedding(ids, Pooling.MEAN)
    beside = answer(embedding)
    between = vector_of(embedding) if not embedding.vector else embedding.vector
    embedding.close()

    assert beside == alone
    assert between == pytest.approx(vector_of(engine.embedding(ids, Pooling.MEAN)), abs=1e-5)
    assert engine.cache.num_available == free
    engine.cache.check([])
    engine.close()


def test_a_text_that_is_given_up_leaves_no_block_behind(tmp_path: Path) -> None:
    _, engine = engine_of(FULL, tmp_path)
    free = engine.cache.num_available

    embedding = engine.embedding(random_ids(300, 4), Pooling.MEAN)
    assert not embedding.step()
    embedding.close()
    embedding.close()

    assert engine.cache.num_available == free
    engine.close()


def test_what_has_no_embedding_says_so(tmp_path: Path) -> None:
    _, engine = engine_of(FULL, tmp_path)
    with pytest.raises(ContextTooLong, match="context holds"):
        engine.embedding([1] * (engine.max_context + 1), Pooling.MEAN)
    with pytest.raises(UsageError, match="token 1000000"):  # once an error of torch, or a dead GPU
        engine.embedding([1, 1_000_000], Pooling.MEAN)
    _, recurrent = engine_of(RECURRENT, tmp_path)
    with pytest.raises(UsageError, match="recurrent"):
        recurrent.embedding([1], Pooling.MEAN)
    engine.close()
    recurrent.close()
