"""`bench turns --endpoint`: what another turn costs at a server, by what the server tells."""

from contextlib import closing
from typing import Any

import pytest

from kvchat.bench.endpoint import EndpointSetup, run_turns
from kvchat.cli.bench import BenchRequest, run_bench
from kvchat.cli.build import open_host
from kvchat.cli.settings import resolve
from kvchat.core.errors import UsageError
from support.fake_llm_server import chunks, fake_server, models


def told(num_cached: int | None) -> Any:
    """Return an author that answers with two words, and counts a token for each character."""

    def author(path: str, body: Any) -> object:
        prompt = sum(len(message["content"]) for message in body["messages"])
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": 2}
        if num_cached is not None:
            cached = prompt - num_cached
            usage["prompt_tokens_details"] = {"cached_tokens": max(0, cached)}
        return chunks("ab", usage=usage)

    return author


def result_of(author: Any, url_settings: dict[str, object], tmp_path: Any) -> Any:
    with fake_server(author, {"/v1/models": models("m", "x", context_length=4096)}) as fake:
        flags = {"endpoint": fake.url, "incognito": True, **url_settings}
        with closing(open_host(resolve(flags, {}, tmp_path / "config.toml"))) as host:
            return run_turns(EndpointSetup(host, 1, True))


def test_tokens_and_times_are_those_that_the_server_tells(tmp_path: Any) -> None:
    result = result_of(told(10), {}, tmp_path)

    read, first = result.figures
    assert read.value <= 20 * 10  # ten of each prompt
    assert read.ratio == read.value / read.beside
    assert first.value > 0
    assert result.settings["server"].startswith("OpenAI-compatible at 127.0.0.1")


def test_a_server_that_tells_nothing_of_its_cache_gets_no_figure_for_it(tmp_path: Any) -> None:
    result = result_of(told(None), {}, tmp_path)

    assert len(result.figures) == 1
    assert "does not tell" in result.notes[0]


@pytest.mark.parametrize("scenarios", [("decode",), ("turns", "resume")])
def test_a_server_runs_no_other_scenario(scenarios: tuple[str, ...]) -> None:
    unset: dict[str, Any] = dict.fromkeys(
        ("model", "device_cache", "threads", "sessions", "gguf", "record")
    )
    request = BenchRequest(
        scenarios,
        shape="tiny",
        dtype="float32",
        weights="auto",
        device="auto",
        block_size=16,
        repeats=1,
        is_quick=True,
        endpoint="localhost:1",
        **unset,
    )

    with pytest.raises(UsageError, match="one scenario: turns"):
        run_bench(request)
