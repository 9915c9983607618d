"""The shipped pair with penalties, biases, logprobs and formats in one batch, drafts or none.

What ends by itself under a format parses and is as the schema says, though the demo model has never
seen JSON.
"""

import json
from datetime import datetime

import pytest

from kvchat.chat.chat_model import ChatModel, read_chat_model
from kvchat.chat.grammar import json_grammar
from kvchat.chat.template import NewTurn
from kvchat.core.events import RequestEvent, RequestFailed, SampleFinished, TokensGenerated
from kvchat.core.types import FinishReason, SamplingParams
from kvchat.engine.request import RequestSpec
from kvchat.engine.speculation import Mode
from kvchat.model.checkpoint.source import DEMO, find_model
from support.assembled import assemble_demo_pair
from support.fixed_drafts import FixedDraftPolicy

NOW = datetime(2026, 1, 2)
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
PLAIN = SamplingParams(temperature=0.8, seed=3)
# The bias makes a token likely again and again, until the penalty outweighs it.
SPARSE = SamplingParams(temperature=0.0, frequency_penalty=2.0, logit_bias=((50, 25.0),))
BIASED = SamplingParams(temperature=0.0, logit_bias=((50, 4.0), (1274, -100.0)))
REPEATED = SamplingParams(temperature=3.0, seed=9, frequency_penalty=-2.0)


@pytest.fixture(scope="module")
def text_side() -> ChatModel:
    return read_chat_model(find_model(DEMO))


def requests(model: ChatModel) -> list[RequestSpec]:
    """Return free requests, and after them limited ones."""
    grammar = model.tokenizer.grammars.compile(json_grammar(SCHEMA), model.stop_token_ids)
    prompt = tuple(model.format.opening(NewTurn("What is a KV cache?", NOW)))
    free = [
        RequestSpec(prompt, sampling, 40, model.stop_token_ids, num_top_logprobs=2)
        for sampling in (PLAIN, SPARSE, BIASED, REPEATED)
    ]
    limited = [
        RequestSpec(
            prompt,
            SamplingParams(temperature=1.0, seed=seed),
            200,
            model.stop_token_ids,
            num_samples=3,
            new_constraint=grammar.constraint,
            num_top_logprobs=0,
        )
        for seed in range(3)
    ]
    return [*free, *limited]


def run(mode: Mode, specs: list[RequestSpec]) -> dict[tuple[int, int], list[RequestEvent]]:
    """Return the events of each sample of each request."""
    engine = assemble_demo_pair().engine
    engine.speculation.switch(mode)
    engine.speculation._policy = FixedDraftPolicy(4)
    numbers = [engine.submit(spec) for spec in specs]
    found: dict[tuple[int, int], list[RequestEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, RequestFailed), event.error
            if isinstance(event, TokensGenerated | SampleFinished):
                place = (numbers.index(event.request_id), event.sample)
                found.setdefault(place, []).append(event)
    engine.close()
    return found


def tokens_of(events: list[RequestEvent]) -> list[int]:
    return [t for e in events if isinstance(e, TokensGenerated) for t in e.token_ids]


def logprobs_of(events: list[RequestEvent]) -> list[float]:
    return [t.logprob for e in events if isinstance(e, TokensGenerated) for t in e.logprobs]


def ending(events: list[RequestEvent]) -> SampleFinished:
    [end] = [event for event in events if isinstance(event, SampleFinished)]
    return end


def test_a_mixed_batch_says_the_same_with_drafts_and_without(text_side: ChatModel) -> None:
    specs = requests(text_side)

    plain, drafted = run(Mode.OFF, specs), run(Mode.AUTO, specs)

    assert plain.keys() == drafted.keys()
    for place, events in plain.items():
        others = drafted[place]
        assert tokens_of(others) == tokens_of(events)
        assert logprobs_of(others) == pytest.approx(logprobs_of(events), abs=1e-3)
        assert len(logprobs_of(others)) == len(tokens_of(others))
        is_free = specs[place[0]].new_constraint is None
        assert (ending(others).usage.accepted_tokens > 0) == is_free
    texts = {tuple(tokens_of(events)) for (number, _), events in plain.items() if number < 4}
    assert len(texts) == 4, "penalties and biases changed nothing"


def test_answers_in_a_format_parse_and_are_as_the_schema_says(text_side: ChatModel) -> None:
    limited = requests(text_side)[4:]

    answers = run(Mode.OFF, limited).values()

    whole = [events for events in answers if ending(events).reason is FinishReason.STOP]
    assert len(whole) >= 6, "most answers end by themselves"
    for events in whole:
        value = json.loads(text_side.tokenizer.decode(tokens_of(events)))
        assert list(value) == ["city", "people"]
        assert isinstance(value["city"], str)
        assert len(value["city"]) <= 8
        assert type(value["people"]) is int
        assert 0 <= value["people"] <= 99
