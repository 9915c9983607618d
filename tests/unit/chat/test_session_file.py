"""The session file: what is written is read back, and damage costs its own line only."""

import json
import random
from math import inf, nan

import pytest

from kvchat.chat import session_file
from kvchat.chat.conversation import Conversation
from kvchat.chat.session_file import read_session
from kvchat.core.errors import ExitCode, StoreError
from kvchat.core.types import FinishReason
from support.turns import branching_conversation

NAME = "20250102-030405-abcd.jsonl"


def lines_of(conversation: Conversation) -> list[str]:
    """Write a conversation as a session does: answers grow, then end; the tip moves last."""
    lines = [session_file.header_line(conversation, "demo")]
    for turn in conversation.turns():
        half = len(turn.text) // 2
        begun = turn.with_ids(turn.token_ids[:1], turn.tokenizer)
        begun = type(turn)(**{**_fields(begun), "text": turn.text[:half]})
        lines.append(session_file.turn_line(begun))
        lines.append(session_file.more_line(turn.turn_id, turn.text[half:], turn.token_ids[1:]))
        if turn.finish is not None:
            lines.append(session_file.end_line(turn.turn_id, turn.finish, {"usage": {"a": 1}}))
    lines.append(session_file.title_line(conversation.title))
    lines.append(session_file.system_line(conversation.system))
    lines.append(session_file.tip_line(conversation.tip_id))
    return lines


def _fields(turn: object) -> dict[str, object]:
    return {name: getattr(turn, name) for name in type(turn).__dataclass_fields__}  # type: ignore[attr-defined]


def as_bytes(lines: list[str]) -> bytes:
    return "".join(lines).encode()


def assert_same(one: Conversation, other: Conversation) -> None:
    assert list(one.turns()) == list(other.turns())
    assert (one.session_id, one.created_s, one.system, one.title, one.tip_id) == (
        other.session_id,
        other.created_s,
        other.system,
        other.title,
        other.tip_id,
    )


def test_a_conversation_is_read_back_as_it_was_written() -> None:
    original = branching_conversation()

    read = read_session(as_bytes(lines_of(original)), NAME)

    assert_same(read.conversation, original)
    assert read.model == "demo"
    assert read.notes == ()
    read.conversation.check()


def test_every_line_is_one_line_of_ascii() -> None:
    for line in lines_of(branching_conversation()):
        assert line.endswith("\n")
        assert line.count("\n") == 1
        assert line.isascii()


def test_a_file_cut_anywhere_gives_what_was_whole_and_says_what_was_torn() -> None:
    """Power fails at any byte: every prefix of the file is a conversation, or has no header yet."""
    lines = lines_of(branching_conversation())
    data = as_bytes(lines)
    header = len(lines[0])
    for end in range(len(data) + 1):
        if end < header:
            with pytest.raises(StoreError, match="is not a kvchat session"):
                read_session(data[:end], NAME)
            continue
        read = read_session(data[:end], NAME)
        whole = data[: data.rfind(b"\n", 0, end) + 1]
        assert_same(read.conversation, read_session(whole, NAME).conversation)
        is_torn = not data[:end].endswith(b"\n")
        assert read.notes == (
            (f"The last line of {NAME} was torn and was dropped.",) if is_torn else ()
        )


def test_a_damaged_line_costs_its_turn_and_those_that_hang_on_it() -> None:
    lines = lines_of(branching_conversation())
    number = next(i for i, line in enumerate(lines) if '"id":4' in line)
    lines[number] = lines[number][:20] + "\x00\n"

    read = read_session(as_bytes(lines), NAME)

    assert [turn.turn_id for turn in read.conversation.turns()] == [1, 2, 3]
    assert read.conversation.tip_id == 3
    assert read.notes[0].startswith((f"Line {number + 1} of", f"Lines {number + 1}, "))
    read.conversation.check()


def test_many_damaged_lines_are_one_sentence() -> None:
    """A session of noise once said so line by line."""
    header, *rest = lines_of(branching_conversation())

    read = read_session(as_bytes([header, *["noise\n"] * len(rest)]), NAME)

    more = len(rest) - 3
    assert read.notes == (f"Lines 2, 3, 4 and {more} more of {NAME} are damaged and were skipped.",)


DAMAGE = [
    "",
    "null",
    "[]",
    "{}",
    '{"type":"turn"}',
    '{"type":"turn","id":2,"parent":9,"role":"user","text":"","ids":[],"tokenizer":"","at":0}',
    '{"type":"turn","id":9,"parent":1,"role":"bot","text":"","ids":[],"tokenizer":"","at":0}',
    '{"type":"turn","id":1,"parent":0,"role":"user","text":"","ids":[],"tokenizer":"","at":0}',
    '{"type":"turn","id":9,"parent":1.0,"role":"user","text":"","ids":[],"tokenizer":"","at":0}',
    '{"type":"turn","id":true,"parent":0,"role":"user","text":"","ids":[],"tokenizer":"","at":0}',
    '{"type":"turn","id":9,"parent":1,"role":"user","text":"","ids":"12","tokenizer":"","at":0}',
    '{"type":"turn","id":9,"parent":1,"role":"user","text":"","ids":[-1],"tokenizer":"","at":0}',
    '{"type":"turn","id":9,"parent":1,"role":"user","text":"","ids":[4294967296],"at":0}',
    '{"type":"turn","id":9,"parent":1,"role":"user","text":"","ids":[Infinity],"at":0}',
    '{"type":"turn","id":9,"parent":1,"role":"user","text":"","ids":[],"tokenizer":"","at":[]}',
    '{"type":"more","id":1,"text":"x","ids":["a"]}',
    '{"type":"more","id":1,"text":5,"ids":[]}',
    '{"type":"more","id":77,"text":"x","ids":[]}',
    '{"type":"more","id":[1],"text":"x","ids":[]}',
    '{"type":"end","id":1,"finish":"bored"}',
    '{"type":"tip","id":12}',
    '{"type":"tip","id":{}}',
    '{"type":"title"}',
    '{"type":"system","system":5}',
    "[" * 100_000,
    '{"type":' + "1" * 5000 + "}",
    "\u2028",
]


@pytest.mark.parametrize("line", DAMAGE, ids=lambda line: line[:40] + f" {len(line)}")
def test_no_line_breaks_the_reading_or_what_was_read_before(line: str) -> None:
    """Token ids of the wrong kind, numbers out of range and deep nesting used to get through, to
    fail later or at once; a turn older than its parent made the whole session unreadable."""
    lines = lines_of(branching_conversation())

    read = read_session(as_bytes([*lines, line + "\n"]), NAME)

    assert_same(read.conversation, branching_conversation())
    assert len(read.notes) == 1
    assert f"Line {len(lines) + 1}" in read.notes[0]


def test_a_line_of_a_later_kvchat_is_passed_over_in_silence() -> None:
    lines = lines_of(branching_conversation())
    lines.insert(2, '{"type":"bookmark","id":1}\n')

    read = read_session(as_bytes(lines), NAME)

    assert read.notes == ()
    assert_same(read.conversation, branching_conversation())


@pytest.mark.parametrize(
    "data",
    [b"", b"\n", b"hello\n", b"{}\n", b'{"kvchat":"cache","version":1}\n', b"\xff\xfe\n", b"[1]\n"],
)
def test_a_foreign_file_is_no_session(data: bytes) -> None:
    with pytest.raises(StoreError, match="is not a kvchat session") as caught:
        read_session(data, NAME)
    assert caught.value.exit_code is ExitCode.STORE


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("version", (2, "1", None, 1.5), r"has the format .*Upgrade kvchat"),
        ("created", ("yesterday", None, inf, 1e300, nan), r"first line .* is damaged"),
        ("system", (7,), r"first line .* is damaged"),
    ],
)
def test_a_newer_format_is_not_guessed_at_and_nonsense_is_damaged(name, values, message):
    """A creation time beyond the calendar was taken, and ended the first question in a traceback:
    templates are told the date."""
    for value in values:
        header = {**json.loads(lines_of(branching_conversation())[0]), name: value}

        with pytest.raises(StoreError, match=message):
            read_session(json.dumps(header).encode() + b"\n", NAME)


def test_random_damage_never_raises_anything_but_a_store_error() -> None:
    rng = random.Random(6)
    data = as_bytes(lines_of(branching_conversation()))
    num_read = 0
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(damaged))
            action = rng.random()
            if action < 0.5:
                damaged[place] = rng.choice(b'0123456789-{}[]",:\n x\x00\xff')
            elif action < 0.8:
                del damaged[place : place + rng.randint(1, 30)]
            else:
                damaged[place:place] = damaged[place : place + rng.randint(1, 200)]
        try:
            read = read_session(bytes(damaged), NAME)
        except StoreError:
            continue
        read.conversation.check()
        num_read += 1
        for turn in read.conversation.turns():
            assert all(0 <= token < 2**31 for token in turn.token_ids)
        assert read.conversation.context_ids() is not None
    assert num_read > 500


def test_the_reason_of_an_end_survives() -> None:
    for reason in FinishReason:
        conversation = branching_conversation()
        line = session_file.end_line(6, reason, {})
        read = read_session(as_bytes([*lines_of(conversation), line]), NAME)
        assert read.conversation.turn(6).finish is reason


def test_the_last_line_says_what_waits_and_a_turn_takes_its_message_off_the_list() -> None:
    original = branching_conversation()
    asked = next(turn for turn in original.turns() if turn.is_message)
    with_file = f"notes.txt:\n```\nx\n```\n\n{asked.text}"
    lines = lines_of(original)
    turn = json.loads(session_file.turn_line(asked))
    turn |= {"id": original.next_turn_id, "parent": 0, "text": with_file}

    waits = session_file.waiting_line(["later", asked.text, asked.text])
    lines += [session_file.waiting_line(["stale"]), waits, json.dumps(turn) + "\n"]

    conversation = read_session(as_bytes(lines), NAME).conversation
    assert conversation.waiting == ("later", asked.text)
    assert read_session(as_bytes([*lines, session_file.waiting_line([])]), NAME).notes == ()


def test_a_conversation_that_only_waits_is_listed_by_its_message() -> None:
    lines = [session_file.header_line(Conversation("", 1.0), "demo")]
    lines.append(session_file.waiting_line(["my name is Ada", "and more"]))

    summary = session_file.read_summary(as_bytes(lines), NAME)
    assert (summary.label, summary.num_turns) == ("my name is Ada", 0)


def test_only_the_message_that_is_sent_is_taken_off_the_list() -> None:
    """A turn of two lines took off another message that was its last line, and stayed itself.

    A copy that a summary makes of an earlier turn took off a message too.
    """
    original = branching_conversation()
    asked = next(turn for turn in original.turns() if turn.is_message)
    turn = json.loads(session_file.turn_line(asked))
    turn |= {"id": original.next_turn_id, "parent": 0, "text": "two lines\nyes"}
    copy = turn | {"id": turn["id"] + 1, "text": "yes", "copy_of": asked.turn_id}
    waits = session_file.waiting_line(["yes", "two lines\nyes"])
    lines = [*lines_of(original), waits, json.dumps(turn) + "\n", json.dumps(copy) + "\n"]

    assert read_session(as_bytes(lines), NAME).conversation.waiting == ("yes",)


def test_forgetting_a_turn_forgets_it_where_it_was_typed_ahead_and_nothing_else() -> None:
    """Everything that waited was forgotten with any turn."""
    original = branching_conversation()
    asked = next(turn for turn in original.turns() if turn.is_message)
    turn = json.loads(session_file.turn_line(asked))
    turn |= {"id": original.next_turn_id, "parent": 0, "text": "a secret"}
    waits = session_file.waiting_line(["a secret", "and more", "a secret"])
    lines = [*lines_of(original), waits, json.dumps(turn) + "\n"]

    data = session_file.without_turns(as_bytes(lines), {turn["id"]}, keeps_title=True)
    assert b"secret" not in data
    assert read_session(data, NAME).conversation.waiting == ("and more",)
    assert session_file.without_turns(data, set(), keeps_title=True) == data


@pytest.mark.parametrize("texts", ['"text"', "[1]", "null", "{}"])
def test_a_damaged_list_of_what_waits_costs_itself_only(texts: str) -> None:
    original = branching_conversation()
    lines = [*lines_of(original), f'{{"type":"waiting","texts":{texts}}}\n']

    read = read_session(as_bytes(lines), NAME)
    assert_same(read.conversation, original)
    assert read.conversation.waiting == ()
    assert len(read.notes) == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"type":"tip","id":%s}',
        '{"type":"turn","id":%s,"parent":0,"role":"user","text":"x"}',
        '{"type":"turn","id":9,"parent":%s,"role":"user","text":"x"}',
    ],
)
def test_a_number_of_thousands_of_digits_is_a_damaged_line(line: str) -> None:
    """One such line in one file ended `kvchat sessions` with an error."""
    data = as_bytes([*lines_of(branching_conversation()), line % ("7" * 4301) + "\n"])

    summary = session_file.read_summary(data, NAME)

    assert summary.label == read_session(data, NAME).conversation.label
