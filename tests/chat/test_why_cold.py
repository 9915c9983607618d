"""What a chat that begins cold would have shared with an earlier one, and why it does not."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvchat.chat.chat_model import ChatModel, read_chat_model
from kvchat.chat.conversation import ROOT, Conversation, Role, Turn
from kvchat.chat.store import SessionStore
from kvchat.chat.why import Change, Reuse, beside_earlier, common_len, earlier
from kvchat.core.types import CachedTokens
from kvchat.model.checkpoint.source import find_model
from support.checkpoints import CHAT_TEMPLATE, byte_tokenizer

SYSTEM = "You count the ships of the harbour, and nothing else."
DATED = "It is {{ strftime_now('%d %b %Y') }}.\n" + CHAT_TEMPLATE
DAY_S = 86400.0


def model_with(directory: Path, template: str) -> ChatModel:
    directory.mkdir()
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "chat_template.jinja").write_text(template)
    return read_chat_model(find_model(str(directory)))


@pytest.fixture
def dated(tmp_path: Path) -> ChatModel:
    return model_with(tmp_path / "dated", DATED)


def begun(model: ChatModel, text: str, day: int, system: str | None = SYSTEM) -> Conversation:
    """Begin a conversation on a day."""
    conversation = Conversation(f"{day}", day * DAY_S, system)
    ids = model.user_ids(conversation, ROOT, text, system)
    turn = Turn(1, ROOT, Role.USER, text, ids, model.tokenizer.digest, day * DAY_S, system)
    conversation.add(turn)
    return conversation


def compared(
    model: ChatModel, now: Conversation, *others: Conversation, num_cached: int = 0
) -> Reuse:
    [turn] = now.path()
    alone = Reuse(turn.token_ids, (), Change.NEW, CachedTokens(device=num_cached))
    found = beside_earlier(alone, turn, model, others)
    assert found.ids == turn.token_ids
    return found


def test_the_date_is_what_two_beginnings_differ_in(dated: ChatModel) -> None:
    found = compared(
        dated, begun(dated, "hi", 20), begun(dated, "hello", 11), begun(dated, "ho", 10)
    )

    assert found.change is Change.CLOCK
    assert found.num_shared == len("It is "), "and then 21 was 12"
    assert list(found.before) == begun(dated, "hello", 11).context_ids()


def test_of_the_same_day_all_that_is_shared_is_there(dated: ChatModel) -> None:
    found = compared(dated, begun(dated, "hi", 20), begun(dated, "hello", 20))

    assert (found.change, found.before) == (Change.NEW, ())


def test_what_another_chat_of_today_had_read_has_cost_nothing(dated: ChatModel) -> None:
    """A day's second chat began warm, and was told that the date had cost it a system prompt."""
    today, yesterday = begun(dated, "hello", 20), begun(dated, "hello", 19)
    now = begun(dated, "hi", 20)
    num_shared = common_len(now.path()[0].token_ids, today.path()[0].token_ids)

    found = compared(dated, now, today, yesterday, num_cached=num_shared // 16 * 16)
    assert (found.change, found.before) == (Change.NEW, ())
    partly = compared(dated, now, today, yesterday, num_cached=16)
    assert partly.change is Change.CLOCK


def test_a_template_that_was_changed_is_told_from_a_clock(dated: ChatModel, tmp_path: Path) -> None:
    before = begun(dated, "hello", 20)
    other = model_with(tmp_path / "other", "Note. " + DATED)

    assert compared(other, begun(other, "hi", 20), before).change is Change.TEMPLATE
    assert compared(other, begun(other, "hi", 10), before).change is Change.TEMPLATE


def test_where_little_would_be_shared_nothing_is_said(dated: ChatModel) -> None:
    for system in (None, "Be brief."):
        before = begun(dated, "hello", 10, system)
        assert compared(dated, begun(dated, "hi", 20), before).change is Change.NEW
    other_tokenizer = begun(dated, "hello", 10)
    other_tokenizer.replace(replace(other_tokenizer.turn(1), tokenizer="another"))
    assert compared(dated, begun(dated, "hi", 20), other_tokenizer).change is Change.NEW


def test_what_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    store = SessionStore(tmp_path)
    for name in ("20260101-000000-aaaa", "20260102-000000-bbbb"):
        store.create(Conversation(name, 0.0), "").close()
    store.create(Conversation("20260103-000000-cccc", 0.0), "").close()
    [damaged] = tmp_path.glob("*bbbb*")
    damaged.write_text("no session")

    names = [each.session_id for each in earlier(store, "20260103-000000-cccc")]

    assert names == ["20260101-000000-aaaa"]
    assert list(earlier(None, "x")) == []
