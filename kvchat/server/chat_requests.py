"""Begins the answer to a body in the form of OpenAI's chat completions, whichever interface it is
of, and reads how any such body wants its answer.
"""

from dataclasses import dataclass, replace

from kvchat.chat.answer_format import answer_format
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.fields import Fields
from kvchat.chat.incoming import IncomingChat, add_messages
from kvchat.chat.resent_chat import ResentChat
from kvchat.server.answering import Answer
from kvchat.server.bodies import Body
from kvchat.server.generation_fields import (
    asked_effort,
    chat_logprobs,
    foreign_format,
    num_samples,
    prompt_logprobs,
    require_tellable,
    sampling_options,
    stops,
    token_limit,
    with_endings,
    with_penalties,
)
from kvchat.server.offered_tools import OfferedTools
from kvchat.server.service import Service
from kvchat.server.tool_fields import openai_choice, read_tools, with_calls

SCHEMA_PATH = ("json_schema", "schema")
_LIMITS = ("max_completion_tokens", "max_tokens")


@dataclass(frozen=True, slots=True)
class BegunChat:
    """An answer that was begun, which the caller closes, and how it was asked for."""

    answer: Answer
    options: AskOptions
    offered: OfferedTools
    tells_logprobs: bool


async def begin_chat(service: Service, fields: Body, client: str) -> BegunChat:
    """Begin to answer a conversation for `client`; raises ApiError and FieldFault."""
    service.require_room(fields, "messages")
    chat, offered = await fields.read(read_chat)
    num_top = chat_logprobs(fields)
    num_of_prompt = prompt_logprobs(fields, num_top)
    choice, model = openai_choice(fields), service.host.model
    options = replace(
        answer_options(service, fields, _LIMITS, chat),
        client=client,
        max_calls=choice.max_calls,
        think=asked_effort(fields, model.format.switch, service.options.think),
        num_top_logprobs=num_top if num_top is not None else num_of_prompt,
        scores_prompt=num_of_prompt is not None,
    )
    require_tellable(service, chat, options)
    wanted = answer_format(fields, "response_format", SCHEMA_PATH) or foreign_format(fields)
    options = await with_calls(service, choice, chat.tools, options, wanted)
    answer = await service.answering.chat(chat, options)
    return BegunChat(answer, options, offered, num_top is not None)


def answer_options(
    service: Service, fields: Fields, limits: tuple[str, ...], chat: ResentChat | None = None
) -> AskOptions:
    """Return how to answer; the first of `limits` that is given limits the tokens.

    chat   the conversation, None for a text without a template
    """
    vocab_size = service.host.model.vocab_size
    options = sampling_options(fields, service.options)
    options = with_penalties(fields, options, vocab_size)
    options = with_endings(fields, options, vocab_size)
    if chat is None and fields.text("context_policy", "stop") != "stop":
        raise fields.fault("context_policy", "must be stop: a text has no oldest messages")
    limit = token_limit(fields, *limits, least=1 if chat is not None else 0)
    return replace(
        options,
        max_tokens=limit if limit is not None else options.max_tokens,
        stops=stops(fields, "stop") or options.stops,
        num_samples=num_samples(fields),
        is_one_shot=chat is None or len(chat.messages) == 1,
    )


def read_chat(fields: Fields) -> tuple[ResentChat, OfferedTools]:
    """Return the conversation of a request, and its tools."""
    chat = IncomingChat()
    add_messages(chat, fields)
    offered = read_tools(fields, is_nested=True).offered(openai_choice(fields).offered)
    read = chat.chat(offered.tools)
    # vLLM's names for what happens here whenever the last message is the assistant's.
    for name, continues in (("continue_final_message", True), ("add_generation_prompt", False)):
        if fields.raw(name) is continues and not read.is_continuation:
            raise fields.fault(name, "needs a last message of the assistant")
    return read, offered
