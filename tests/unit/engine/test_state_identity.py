"""Recurrent state on the disk is met only by the code that computed it, and only whole.

No computed token verifies a restored state. So its identity names the code, and its records are
attacked here.
"""

import shutil
import sqlite3
from array import array
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.engine import kv_storage
from kvchat.engine.kv_storage import kv_geometry, kv_identity
from kvchat.model.checkpoint import identity
from kvchat.model.checkpoint.identity import sources_digest, state_code
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import LoadedModel, load_model
from support.checkpoints import save_checkpoint, tiny_model
from support.stateful_models import Chat, load_stateful, open_engine, words

Loaded = tuple[PreTrainedModel, LoadedModel]
Head = tuple[bytes, bytes, bytes]  # parent, checksum, ids
Rows = list[tuple[bytes, Head, bytes]]
_PROMPT = words(170, seed=3)


@pytest.fixture
def hybrid(tmp_path: Path) -> Loaded:
    return load_stateful("lfm2", tmp_path / "model")


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_stateful("lfm2", tmp_path_factory.mktemp("lfm2"))


def identity_of(loaded: LoadedModel) -> str:
    geometry = kv_geometry(loaded.spec, CacheConfig(), loaded.dtype)
    return kv_identity(loaded, geometry, "the same content").hex()


def test_state_has_the_identity_of_the_code_that_computes_it(hybrid, monkeypatch):
    loaded = hybrid[1]
    assert loaded.compiled is not None
    identities = [identity_of(loaded)]
    version = identity.metadata.version
    with monkeypatch.context() as patched:
        patched.setattr(
            identity.metadata,
            "version",
            lambda name: "5.0.0" if name == "transformers" else version(name),
        )
        identities.append(identity_of(loaded))
    with monkeypatch.context() as patched:
        patched.setattr(identity, "sources_digest", lambda paths: "other kernels")
        identities.append(identity_of(loaded))
    assert identity_of(loaded) == identities[0]

    loaded.compiled.abandon()
    identities.append(identity_of(loaded))
    identities.append(identity_of(replace(loaded, weights="int8")))

    assert len(set(identities)) == 5


def test_kv_of_attention_alone_outlives_the_code(tmp_path, monkeypatch):
    """It is verified by tokens computed again. A store of an earlier start is found again: this is
    the identity that its files have."""
    source = find_model(str(save_checkpoint(tmp_path, tiny_model("llama"))))
    loaded = load_model(source, ModelConfig(dtype="float32"), 128, lambda _: None)
    assert loaded.compiled is not None
    monkeypatch.setattr(kv_storage, "state_code", lambda is_compiled: ["another version"])
    loaded.compiled.abandon()

    assert identity_of(loaded) == "c563aaa5477bdc02e8d1556bf6bc0dca"


def test_a_changed_kernel_is_another_code(tmp_path: Path) -> None:
    one, other = tmp_path / "a.py", tmp_path / "b.py"
    one.write_text("x = 1\n")
    other.write_text("y = 2\n")
    digest = sources_digest([one, other])
    assert sources_digest([other, one]) == digest

    digests = {digest, sources_digest([one])}
    other.write_text("y = 3\n")
    digests.add(sources_digest([one, other]))
    # The same bytes, otherwise divided.
    one.write_text("x = 1\ny")
    other.write_text(" = 3\n")
    digests.add(sources_digest([one, other]))
    assert len(digests) == 4


def test_kernels_and_the_modules_around_them_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[str]] = []

    def noted(paths: Any) -> str:
        found.append({path.name for path in paths})
        return ""

    monkeypatch.setattr(identity, "sources_digest", noted)
    state_code(is_compiled=True)
    state_code(is_compiled=False)

    kernels = {"delta.py", "delta_rows.py", "mamba.py", "convolution.py", "code.py", "maths.py"}
    assert kernels <= found[0]
    assert not kernels & found[1]
    around = {"state.py", "step_recurrent.py", "recurrent_prefill.py", "families.py"}
    assert all(around <= names for names in found)


def test_a_restart_without_the_compiled_step_computes_the_context_again(hybrid, tmp_path):
    reference, loaded = hybrid
    assert loaded.compiled is not None
    prompt = words(90, seed=1)
    for num_from_disk in (0, 80):
        chat = Chat(reference, open_engine(loaded, tmp_path / "kv"))
        [answer] = chat.ask(prompt)
        chat.engine.close()
        assert answer.num_from_disk == num_from_disk

    loaded.compiled.abandon()
    chat = Chat(reference, open_engine(loaded, tmp_path / "kv"))
    [answer] = chat.ask(prompt)
    chat.engine.close()

    assert answer.num_from_disk == 0
    assert answer.ids == chat.right_answer(prompt, answer.ids)


@pytest.fixture(scope="module")
def kept(lfm2: Loaded, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return a store with several states of a prompt, and the prompt's answer."""
    directory = tmp_path_factory.mktemp("kept")
    chat = Chat(lfm2[0], open_engine(lfm2[1], directory))
    chat.ask(_PROMPT[:60])
    [answer] = chat.ask(_PROMPT)
    chat.engine.close()
    assert answer.ids == chat.right_answer(_PROMPT, answer.ids)
    return directory, answer.ids


def _turned(rows: Rows) -> Rows:
    return [(key, head, rows[i - 1][2]) for i, (key, head, _) in enumerate(rows)]


def _moved(rows: Rows) -> Rows:
    return [(key, *rows[i - 1][1:]) for i, (key, *_) in enumerate(rows)]


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda rows: [(k, h, p[:-1]) for k, h, p in rows], id="cut by a byte"),
        pytest.param(lambda rows: [(k, h, p[: len(p) // 2]) for k, h, p in rows], id="half"),
        pytest.param(lambda rows: [(k, h, b"") for k, h, _ in rows], id="empty"),
        pytest.param(lambda rows: [(k, h, bytes(len(p))) for k, h, p in rows], id="zeros"),
        pytest.param(
            lambda rows: [(k, (*h[:2], h[2][:-1]), p) for k, h, p in rows], id="a head cut"
        ),
        pytest.param(_turned, id="the state of another position"),
        pytest.param(_moved, id="the records of another position"),
    ],
)
def test_a_state_that_is_not_the_contexts_own_is_a_miss(attack, lfm2, kept, tmp_path):
    shutil.copytree(kept[0], tmp_path, dirs_exist_ok=True)
    [table] = tmp_path.glob("*/cache.db")
    with closing(sqlite3.connect(table)) as connection:
        found = connection.execute("SELECT key, parent, checksum, ids, payload FROM Pack")
        rows: Rows = [
            (key, (parent, checksum, ids), payload)
            for key, parent, checksum, ids, payload in found
            if array("i", ids)[0] < 0
        ]
        assert len(rows) > 1
        changed = [(*head, payload, key) for key, head, payload in attack(rows)]
        change = "UPDATE Pack SET parent = ?, checksum = ?, ids = ?, payload = ? WHERE key = ?"
        connection.executemany(change, changed)
        connection.commit()

    chat = Chat(lfm2[0], open_engine(lfm2[1], tmp_path))
    [after] = chat.ask(_PROMPT)
    chat.engine.close()

    assert after.ids == kept[1]
    assert after.num_from_disk == 0


def test_two_engines_over_one_store_answer_as_one_does(hybrid, lfm2, tmp_path):
    """They keep states of the same contexts, of other ones, and forks of them, in turns."""
    assert identity_of(hybrid[1]) == identity_of(lfm2[1])
    chats = [Chat(lfm2[0], open_engine(each[1], tmp_path / "kv")) for each in (hybrid, lfm2)]
    context = words(75, seed=5)
    for turn in range(3):
        prompts = [[*context, *words(9 + each, seed=10 * turn + each)] for each in range(2)]
        for chat, prompt in zip(chats, prompts, strict=True):
            [answer] = chat.ask(prompt)
            assert answer.ids == chat.right_answer(prompt, answer.ids)
        context = [*prompts[turn % 2], *answer.ids]
    for chat in chats:
        chat.engine.close()

    again = Chat(lfm2[0], open_engine(lfm2[1], tmp_path / "kv"))
    for prompt in prompts:
        [answer] = again.ask(prompt)
        assert answer.ids == again.right_answer(prompt, answer.ids)
        assert answer.num_from_disk > 0
    again.engine.close()
