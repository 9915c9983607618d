"""The recall suite is the same each time, fits its room, and asks for what the text says."""

import re
from pathlib import Path

import torch

from kvchat.bench.recall import NUM_FACTS, NUM_TEXTS, RecallText, recall, recall_texts
from support.assembled import assemble
from support.checkpoints import save_checkpoint, tiny_model
from support.stateful_models import STATEFUL, words


def encode(text: str) -> list[int]:
    """A tokenizer of words and marks: an id for each, and 1 at the beginning."""
    return [1, *(int.from_bytes(part.encode()) for part in re.findall(r"\s*\w+|\W", text))]


def decode(ids: list[int]) -> str:
    return "".join(i.to_bytes((i.bit_length() + 7) // 8).decode() for i in ids if i != 1)


def test_a_question_asks_for_what_the_text_says() -> None:
    texts = recall_texts(encode, 600)

    assert len(texts) == NUM_TEXTS
    assert texts == recall_texts(encode, 600)
    assert len({decode(text.ids) for text in texts}) == NUM_TEXTS
    for text in texts:
        assert 400 < text.num_tokens <= 600
        assert text.ids[0] == 1
        places = []
        for question, answer in zip(text.questions, text.answers, strict=True):
            assert question[0] != 1
            fact = decode(question).rpartition("? ")[2] + decode([answer])
            places.append(decode(text.ids).index(fact))
        assert len(places) == NUM_FACTS
        assert places == sorted(places)
        middle = len(decode(text.ids)) / 2
        assert abs(sum(place < middle for place in places) - NUM_FACTS / 2) <= 2


def test_a_tokenizer_of_letters_has_no_answers_to_choose_from() -> None:
    assert recall_texts(lambda text: [1, *text.encode()], 600) == []


def test_a_question_is_asked_behind_the_text_alone(tmp_path: Path) -> None:
    """Recurrent state that has read a question is not the next one's."""
    model_type, settings = STATEFUL["lfm2"]
    model = tiny_model(model_type, **settings)
    text = RecallText(words(90, seed=1), [words(5, seed=n) for n in range(2, 8)], list(range(30)))

    found = recall(assemble(save_checkpoint(tmp_path, model)), text)

    with torch.inference_mode():
        contexts = (torch.tensor([[*text.ids, *question]]) for question in text.questions)
        logits = [model(ids, use_cache=False).logits[0, -1] for ids in contexts]
    assert found == [int(row[text.answers].argmax()) for row in logits]
    assert len(set(found)) > 1
