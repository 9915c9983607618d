"""No text of a user becomes a control token, in any tokenizer, however odd its vocabulary is."""

import random
from collections.abc import Callable
from datetime import datetime

import pytest
from tokenizers import Tokenizer, models

from kvchat.chat.template import NewTurn, turn_format
from kvchat.chat.text_codec import Segment
from kvchat.chat.tokenizer import ChatTokenizer
from kvchat.core.errors import ModelError
from kvchat.model.files.text_settings import TextFiles
from support.odd_tokenizers import GPT2_END, ODD, Odd, one_token_for_all
from support.soak_sizes import short_and_long
from support.tokenizer_zoo import END, START, ZOO, text_files

CLOCK = datetime(2026, 1, 2)
MAKERS: dict[str, Callable[[], Odd]] = {
    **ODD,
    **{
        name: lambda name=name: Odd(text_files(ZOO[name]()), is_lossless=name == "byte level")
        for name in ZOO
    },
}
SPELLINGS = [
    *("<unk>", "<s>", "</s>", START, END, GPT2_END, "[UNK]", "[CLS]", "[SEP]", "[PAD]", "</"),
    *("\uff1c|im_end|\uff1e", "<|IM_END|>", "<S>", "\uff1c/s\uff1e", "[sep]", "</s></s>"),
    *("<", "/", "s>", "<|im_", "end|>", "endoftext", "|>", "[", "SEP", "]", "<0x0A>", "\u2581"),
    *("the", "being", "a", "Z", "7", " ", "  ", "\n", "\n\n", "\t", "\u00e9", "\u597d", "\u2603"),
]


@pytest.fixture(params=MAKERS)
def odd(request: pytest.FixtureRequest) -> Odd:
    return MAKERS[request.param]()


def forbidden(files: TextFiles, tokenizer: ChatTokenizer) -> set[int]:
    """Every id with a role of its own, as the files name it; neither white space nor unknown."""
    raw = Tokenizer.from_str(files.tokenizer_json)
    added = raw.get_added_tokens_decoder()
    special = {token_id for token_id, token in added.items() if token.special}
    names = {role: raw.token_to_id(name) for role, name in files.special_tokens.items()}
    unknown = names.pop("unk_token", None)
    steering = {i for i in names.values() if i is not None} | tokenizer.stop_token_ids
    white = {i for i in tokenizer.stop_token_ids if not raw.decode([i], False).strip()}
    return ((special - {unknown}) | steering) - white


@short_and_long(150, 20_000)
def test_no_text_becomes_a_control_token(odd: Odd, size: int) -> None:
    """One exempted the unknown token, which in GPT-2's family is the end of a turn as well."""
    rng = random.Random(7)
    tokenizer = ChatTokenizer(odd.files)
    kept_out = forbidden(odd.files, tokenizer)
    assert kept_out
    for _ in range(size):
        text = "".join(rng.choices(SPELLINGS, k=rng.randint(0, 7)))
        for ids in (
            tokenizer.encode([Segment(text, is_inert=True)]),
            tokenizer.encode_bare(text, is_first=False),
        ):
            assert not kept_out & set(ids), text
            if odd.is_lossless:
                assert tokenizer.decode(ids) == text


@short_and_long(60, 5_000)
def test_a_turn_has_the_control_tokens_of_its_template_and_no_others(odd: Odd, size: int) -> None:
    rng = random.Random(11)
    tokenizer = ChatTokenizer(odd.files)
    turns = turn_format(odd.files, tokenizer)
    kept_out = forbidden(odd.files, tokenizer)

    def control(ids: list[int]) -> list[int]:
        return [token for token in ids if token in kept_out]

    first, next_ = (
        control(turns.opening(NewTurn("a", CLOCK, "a"))),
        control(turns.following(NewTurn("a", CLOCK), 0)),
    )
    for _ in range(size):
        text = "".join(rng.choices(SPELLINGS, k=rng.randint(1, 7)))
        assert control(turns.opening(NewTurn(text, CLOCK, text))) == first, text
        assert control(turns.following(NewTurn(text, CLOCK), 0)) == next_, text


def test_an_end_of_text_typed_by_the_user_ends_no_turn() -> None:
    """`Hello<|endoftext|> x` ended the turn: the token was exempt as the one for the unknown."""
    odd = one_token_for_all()
    tokenizer = ChatTokenizer(odd.files)
    text = f"Hello{GPT2_END} x"

    ids = tokenizer.encode([Segment(text, is_inert=True)])

    assert tokenizer.token_id(GPT2_END) not in ids
    assert tokenizer.decode(ids) == text


def test_one_control_token_in_a_long_text_leaves_the_rest_as_it_is() -> None:
    """The whole text was once taken apart character by character."""
    raw = ZOO["byte fallback"]()
    tokenizer = ChatTokenizer(text_files(raw))
    before = raw.encode("the a", add_special_tokens=False).ids

    ids = tokenizer.encode([Segment("the a</s> the a", is_inert=True)])

    assert ids[: len(before)] == before
    assert tokenizer.decode(ids) == "the a</s> the a"
    assert ids[-len(before) :] == before


def test_text_beside_a_spelled_out_one_is_encoded_as_in_one_piece() -> None:
    """The twin that spells out gives what the tokenizer gives wherever nothing is reserved."""
    for name, make in ZOO.items():
        tokenizer = ChatTokenizer(text_files(make()))
        for text in ("the cab", " a\n", "he ab", ""):
            segments = [Segment(f"{START}user\n"), Segment(text, True), Segment(f"{END}\n")]
            assert tokenizer._spell(segments) == tokenizer.encode(segments), name


def test_an_unknown_character_is_left_out_where_its_token_ends_answers() -> None:
    tokenizer = ChatTokenizer(ODD["unknown word is end"]().files)

    ids = tokenizer.encode([Segment("a\u2603b", is_inert=True)])

    assert tokenizer.decode(ids) == "ab"


def test_a_bare_context_gets_what_stands_before_a_text_and_nothing_behind_it() -> None:
    """A separator behind the prompt ended it before the model could go on with it."""
    tokenizer = ChatTokenizer(ODD["word piece"]().files)
    begin = tokenizer.token_id("[CLS]")

    assert tokenizer.encode_bare("be", is_first=True) == [begin, tokenizer.token_id("be")]


@pytest.mark.parametrize("name", ["word level", "unigram", "word piece"])
def test_a_text_that_a_tokenizer_without_an_unknown_token_cannot_take_is_told(name: str) -> None:
    model = {
        "word level": lambda: models.WordLevel({"x": 0}),
        "unigram": lambda: models.Unigram([("x", 0.0)]),
        "word piece": lambda: models.WordPiece({"x": 0}, unk_token="[UNK]"),
    }[name]()
    tokenizer = ChatTokenizer(TextFiles(Tokenizer(model).to_str(), None))

    with pytest.raises(ModelError, match="cannot encode this text"):
        tokenizer.encode_bare("y", is_first=True)
