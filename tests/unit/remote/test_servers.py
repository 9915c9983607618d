"""Finding out what a server is, and what is said if it is none."""

import httpx2
import pytest

from kvchat.core.errors import ModelError, UsageError
from kvchat.remote.address import address_of
from kvchat.remote.kinds import Kind
from kvchat.remote.servers import find_server, reason_of
from support.fake_llm_server import FakeServer, Refusal, fake_server, models

SECRET = "sk-secret-of-the-user"


def nothing(path: str, body: object) -> object:
    return Refusal(404, {"error": "nothing here"})


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8080", "http://localhost:8080"),
        ("http://localhost:8080/v1", "http://localhost:8080"),
        ("https://llm.example.org/api/v1/chat/completions/", "https://llm.example.org/api"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_an_address_is_taken_as_people_write_it(given: str, url: str) -> None:
    assert address_of(given).url == url


@pytest.mark.parametrize(
    "given",
    [
        *("", "http://", "ftp://x", "localhost:port", "localhost:99999", "a b://"),
        "\u0663G",
        "a\x01b",
    ],
)
def test_what_is_no_address_is_said(given: str) -> None:
    """A digit that no host's name may have was called a bug of kvchat's."""
    with pytest.raises(UsageError, match="must be an address"):
        address_of(given)


@pytest.mark.parametrize(
    ("url", "is_here"),
    [("localhost", True), ("127.3.2.1:1", True), ("[::1]", True), ("127.0.0.1.evil.org", False)],
)
def test_this_machine_is_told_from_others(url: str, is_here: bool) -> None:
    assert address_of(url).is_here is is_here


@pytest.mark.parametrize(
    ("gets", "kind", "files", "context"),
    [
        (
            {
                "/v1/models": models("m", "llamacpp", meta={"n_ctx": 64}),
                "/props": {
                    "default_generation_settings": {"n_ctx": 2048},
                    "model_path": "/models/m.gguf",
                },
            },
            Kind.LLAMA_CPP,
            "/models/m.gguf",
            2048,
        ),
        (
            {"/v1/models": models("m", "vllm", root="/models/m", max_model_len=4096)},
            Kind.VLLM,
            "/models/m",
            4096,
        ),
        (
            {
                "/v1/models": models("m", "sglang", max_model_len=512),
                "/get_model_info": {"model_path": "org/m"},
            },
            Kind.SGLANG,
            "org/m",
            512,
        ),
        ({"/v1/models": models("m", "tensorrt_llm")}, Kind.TENSORRT_LLM, "", None),
        (
            {
                "/v1/models": models("m", "m"),
                "/info": {
                    "model_id": "m",
                    "max_input_tokens": 3000,
                    "max_total_tokens": 4000,
                    "router": "text-generation-router",
                },
            },
            Kind.TGI,
            "",
            4000,
        ),
        ({"/v1/models": models("m", "m"), "/info": {"max_total_tokens": 9}}, Kind.OTHER, "", None),
        ({"/v1/models": models("m", "library"), "/api/version": {}}, Kind.OLLAMA, "", None),
        ({"/v1/models": models("m", "someone")}, Kind.OTHER, "", None),
        ({"/v1/models": models("m", "kvchat", root="demo")}, Kind.KVCHAT, "demo", None),
    ],
)
def test_a_server_is_known_by_what_it_says(gets, kind, files, context):
    with fake_server(nothing, gets) as fake:
        server = find_server(address_of(fake.url))

    assert (server.kind, server.files) == (kind, files)
    assert server.model == "m"
    assert server.knows_context is (context is not None)
    assert context is None or server.max_context == context


def test_ollama_gives_a_model_the_context_of_its_file() -> None:
    def shows(path: str, body: object) -> object:
        assert (path, body) == ("/api/show", {"model": "m"})
        return {"parameters": "stop   x\nnum_ctx   8192"}

    gets = {"/v1/models": models("m", "library"), "/api/version": {"version": "1"}}
    with fake_server(shows, gets) as fake:
        assert find_server(address_of(fake.url)).max_context == 8192


def test_a_model_that_ollama_has_loaded_has_the_context_that_it_got() -> None:
    """What its file asks for is not what it gets: OLLAMA_CONTEXT_LENGTH and memory decide, too."""
    loaded = {"name": "m", "model": "m", "digest": "5f", "size_vram": 1, "context_length": 4096}
    gets = {
        "/v1/models": models("m", "library"),
        "/api/version": {"version": "0.12.3"},
        "/api/ps": {"models": [{**loaded, "name": "o", "model": "o"}, loaded]},
    }
    with fake_server(nothing, gets) as fake:
        assert find_server(address_of(fake.url)).max_context == 4096


def test_ollamas_models_of_several_owners_are_ollamas() -> None:
    """It calls the namespace of a model's name its owner, "library" where the name has none."""
    entries = [{"id": "m", "owned_by": "library"}, {"id": "ada/m", "owned_by": "ada"}]
    gets = {"/v1/models": {"data": entries}, "/api/version": {"version": "0.12.3"}}
    with fake_server(nothing, gets) as fake:
        assert find_server(address_of(fake.url, model="ada/m")).kind is Kind.OLLAMA


@pytest.mark.parametrize("listed", [Refusal(500, "Internal Server Error"), models("x", "org")])
def test_transformers_serve_does_not_list_what_it_runs(listed: object) -> None:
    """It lists the Hugging Face cache, or fails where there is none."""
    paths = ("/v1/chat/completions", "/v1/models", "/load_model", "/reset", "/health")
    gets: dict[str, object] = {
        "/v1/models": listed,
        "/health": {"status": "ok"},
        "/openapi.json": {"openapi": "3.1.0", "paths": {path: {} for path in paths}},
    }
    with fake_server(nothing, gets) as fake:
        found = [find_server(address_of(fake.url, model=name)) for name in ("", "a/model")]

    assert [server.kind for server in found] == [Kind.TRANSFORMERS] * 2
    assert [server.model for server in found] == ["", "a/model"]


@pytest.mark.parametrize("refusal", [Refusal(401, ""), Refusal(302, "", (("Location", "/in"),))])
def test_a_gateway_may_refuse_what_is_asked_beyond_the_models(refusal: Refusal) -> None:
    """A key that was good for /v1/models "was refused", as it is for any unknown path there."""
    gets: dict[str, object] = {
        "/v1/models": models("m", "someone"),
        "/api/version": refusal,
        "/openapi.json": refusal,
    }
    with fake_server(nothing, gets) as fake:
        assert find_server(address_of(fake.url, SECRET)).kind is Kind.OTHER


def test_the_model_is_the_only_one_or_the_named_one() -> None:
    entries = [{"id": name, "owned_by": "x"} for name in ("one", "two")]
    with fake_server(nothing, {"/v1/models": {"data": entries}}) as fake:
        assert find_server(address_of(fake.url, model="two")).model == "two"
        with pytest.raises(ModelError, match=r"several models.*one, two"):
            find_server(address_of(fake.url))
        with pytest.raises(ModelError, match=r"no model three.*one, two"):
            find_server(address_of(fake.url, model="three"))


def test_names_of_one_model_are_no_choice() -> None:
    """A server with a further name for its model was not used by a chat beside it."""
    entries = [{"id": name, "owned_by": "kvchat", "root": "/m"} for name in ("one", "two")]
    with fake_server(nothing, {"/v1/models": {"data": entries}}) as fake:
        assert find_server(address_of(fake.url)).model == "one"


def test_a_server_that_lists_nothing_is_asked_for_the_named_model() -> None:
    with fake_server(nothing, {"/health": {}}) as fake:
        assert find_server(address_of(fake.url, model="x")).model == "x"


@pytest.mark.parametrize("content", ["text", [1], {"data": 3}, {"data": [{"id": 4}, "x"]}])
def test_a_server_of_another_kind_is_said(content: object) -> None:
    with (
        fake_server(nothing, {"/v1/models": Refusal(404, content)}) as fake,
        pytest.raises(ModelError, match="no model interface"),
    ):
        find_server(address_of(fake.url))


def test_a_refused_key_is_said_and_never_shown() -> None:
    gets: dict[str, object] = {"/v1/models": Refusal(401, {"error": "no"})}
    with fake_server(nothing, gets) as fake:
        address = address_of(fake.url, SECRET)
        with pytest.raises(ModelError, match="refuses this key") as caught:
            find_server(address)

    assert fake.asked[0].headers["Authorization"] == f"Bearer {SECRET}"
    assert SECRET not in repr(address) + str(caught.value)


def test_no_server_is_one_sentence() -> None:
    with fake_server(nothing) as fake:
        gone = fake.url
    with pytest.raises(ModelError, match=r"No server answers at 127\.0\.0\.1"):
        find_server(address_of(gone))


def test_a_password_in_the_address_is_not_shown() -> None:
    assert address_of("https://ada:secret@example.org:8443/x").shown == "example.org:8443"


def test_an_answer_without_end_is_not_read_to_its_end() -> None:
    def without_end() -> object:
        while True:
            yield "x" * (1 << 20)

    fake: FakeServer
    with (
        fake_server(nothing, {"/v1/models": without_end()}) as fake,
        pytest.raises(ModelError, match="no model interface"),
    ):
        find_server(address_of(fake.url))
    assert fake.is_abandoned.wait(60.0)


@pytest.mark.parametrize(
    "error",
    [
        httpx2.RemoteProtocolError(
            "peer closed connection without sending complete message body (incomplete chunked read)"
        ),
        httpx2.RemoteProtocolError("Server disconnected without sending a response."),
        httpx2.ReadError(""),
    ],
)
def test_a_server_that_goes_is_told_of_without_the_words_of_http(error: Exception) -> None:
    """Of a killed server the chat said "peer closed connection ... (incomplete chunked read)"."""
    assert reason_of(error) == "it closed the connection"
