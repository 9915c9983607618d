"""The official `openai` and `anthropic` packages, as programs use them, with `kvchat serve`."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.fork_server import ForkedShell, ForkServer
from support.server_process import ServerProcess, served

KEY = "a-key-of-the-test"
USER: Any = [{"role": "user", "content": "My dog is called Rex."}]
SHORT: Any = {"model": "demo", "temperature": 0}
PLAIN: Any = {"model": "demo", "extra_body": {"temperature": 0}}  # anthropic names no temperature


# In fixtures: each worker collects this file, and one runs it.
@pytest.fixture(scope="module")
def openai() -> Any:
    reason = "openai is not installed: pip install -e .[dev]"
    return pytest.importorskip("openai", reason=reason)


@pytest.fixture(scope="module")
def anthropic() -> Any:
    return pytest.importorskip("anthropic", reason="anthropic is not installed: the same")


@pytest.fixture(scope="module")
def server(tmp_path_factory, fork_server: ForkServer) -> Iterator[ServerProcess]:
    shell = ForkedShell(tmp_path_factory.mktemp("home"), server=fork_server)
    with served(shell, "-m", "demo", "--api-key", KEY) as server:
        yield server


@pytest.fixture
def of_openai(openai: Any, server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture
def of_anthropic(anthropic: Any, server: ServerProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0) as client:
        yield client


def test_openai_lists_models(of_openai: Any) -> None:
    assert "demo" in [model.id for model in of_openai.models.list()]
    assert of_openai.models.retrieve("demo").id == "demo"


def test_openai_chats_streamed_and_not(of_openai: Any) -> None:
    chat = of_openai.chat.completions
    whole = chat.create(messages=USER, max_tokens=40, **SHORT)
    options = {"include_usage": True}
    parts = list(
        chat.create(messages=USER, max_tokens=40, stream=True, stream_options=options, **SHORT)
    )

    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert whole.choices[0].message.content == text != ""
    assert whole.choices[0].finish_reason == "stop"
    assert parts[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert parts[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_openai_parses_an_answer_of_a_schema(of_openai: Any) -> None:
    from pydantic import BaseModel

    class Dog(BaseModel):
        is_large: bool

    made = of_openai.chat.completions.parse(
        messages=USER, response_format=Dog, max_tokens=60, **SHORT
    )

    assert isinstance(made.choices[0].message.parsed, Dog)


def test_openai_completes_text(of_openai: Any) -> None:
    made = of_openai.completions.create(prompt="One two", max_tokens=4, **SHORT)
    parts = of_openai.completions.create(prompt="One two", max_tokens=4, stream=True, **SHORT)

    assert "".join(part.choices[0].text for part in parts if part.choices) == made.choices[0].text


def test_openai_continues_a_stored_response(of_openai: Any) -> None:
    first = of_openai.responses.create(input="My dog is called Rex.", **SHORT)
    events = list(
        of_openai.responses.create(
            input="What is my dog called?", previous_response_id=first.id, stream=True, **SHORT
        )
    )

    done = events[-1]
    assert done.type == "response.completed"
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == done.response.output_text != ""
    assert done.response.usage.input_tokens_details.cached_tokens > 0
    assert of_openai.responses.retrieve(first.id).id == first.id
    of_openai.responses.delete(first.id)


def test_openai_raises_its_own_errors(openai: Any, of_openai: Any) -> None:
    create = of_openai.chat.completions.create
    with pytest.raises(openai.NotFoundError):
        create(model="another", messages=USER)
    with pytest.raises(openai.BadRequestError) as caught:
        create(messages=USER, model="demo", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        of_openai.with_options(api_key="wrong").chat.completions.create(messages=USER, **SHORT)


def test_anthropic_lists_models(of_anthropic: Any) -> None:
    assert "demo" in [model.display_name for model in of_anthropic.models.list()]
    assert of_anthropic.models.retrieve("demo").type == "model"


def test_anthropic_chats_streamed_and_not(of_anthropic: Any) -> None:
    messages = of_anthropic.messages
    whole = messages.create(messages=USER, max_tokens=40, system="Be brief.", **PLAIN)
    with messages.stream(messages=USER, max_tokens=40, system="Be brief.", **PLAIN) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()

    assert whole.content[0].text == text != ""
    assert whole.stop_reason == last.stop_reason == "end_turn"
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.cache_read_input_tokens > 0


def test_anthropic_counts_tokens(of_anthropic: Any) -> None:
    counted = of_anthropic.messages.count_tokens(messages=USER, model="demo").input_tokens
    usage = of_anthropic.messages.create(messages=USER, max_tokens=1, **PLAIN).usage

    told = (
        usage.input_tokens
        + (usage.cache_read_input_tokens or 0)
        + (usage.cache_creation_input_tokens or 0)
    )
    assert counted == told


def test_anthropic_raises_its_own_errors(anthropic: Any, of_anthropic: Any) -> None:
    with pytest.raises(anthropic.NotFoundError):
        of_anthropic.messages.create(messages=USER, max_tokens=1, model="another")
    with pytest.raises(anthropic.BadRequestError):
        of_anthropic.messages.create(messages=[], max_tokens=1, model="demo")
    with pytest.raises(anthropic.AuthenticationError):
        of_anthropic.with_options(api_key="wrong").messages.create(
            messages=USER, max_tokens=1, model="demo"
        )
