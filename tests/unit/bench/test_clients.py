"""`bench clients`: its two kinds of load, and one run with a real server."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from kvchat.bench import clients
from kvchat.bench.clients import load_of_engine, load_of_server
from kvchat.bench.engines import new_engine, random_ids
from kvchat.bench.processes import ProcessFailed
from kvchat.bench.scenarios import scenario
from kvchat.bench.setup import BenchSetup
from kvchat.core.config import CacheConfig, ModelConfig
from kvchat.core.library_environment import set_for_libraries
from kvchat.core.text import Size
from kvchat.model.checkpoint.source import find_model
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.fake_llm_server import Refusal, chunks, fake_server

SMALL = CacheConfig(device_bytes=Size(num_bytes=64 << 20))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = never_stopping(tiny_model("llama", max_position_embeddings=4096))
    return str(save_checkpoint(tmp_path_factory.mktemp("clients"), model))


def prompts(num_clients: int, num_each: int) -> list[list[tuple[int, ...]]]:
    return [
        [tuple(random_ids(20, 200, seed=10 * client + n)) for n in range(num_each)]
        for client in range(num_clients)
    ]


def test_an_engine_answers_every_request_of_every_client(checkpoint: str) -> None:
    assembled = new_engine(find_model(checkpoint), ModelConfig(checkpoint), SMALL)

    load = load_of_engine(assembled, prompts(3, 2))

    assert len(load.first_s) == 6
    assert 0 < min(load.first_s) <= load.wall_s
    assert load.per_second == pytest.approx(6 / load.wall_s)


def test_a_client_sends_its_next_request_after_the_answer() -> None:
    with fake_server(lambda path, body: chunks("one", "two")) as fake:
        load = asyncio.run(load_of_server(fake.url, prompts(3, 2)))

    assert len(load.first_s) == len(fake.asked) == 6
    assert 0 < min(load.first_s) <= load.wall_s
    assert {len(asked.body["prompt"]) for asked in fake.asked} == {20}


def test_a_refused_request_is_no_figure() -> None:
    with (
        fake_server(lambda path, body: Refusal(503, {"error": "busy"})) as fake,
        pytest.raises(ProcessFailed, match="refused a request"),
    ):
        asyncio.run(load_of_server(fake.url, prompts(1, 1)))


def test_a_server_that_does_not_start_is_told(checkpoint, monkeypatch):
    command = (sys.executable, "-c", "raise SystemExit('no such thing')")
    monkeypatch.setattr(clients, "COMMAND", command)
    setup = BenchSetup(find_model(checkpoint), ModelConfig(checkpoint), SMALL, 1, True)

    result = scenario("clients")(setup)

    assert result.refusal == "a server did not start: no such thing"
    assert not result.figures


def test_the_peer_has_the_users_environment_and_not_that_of_libraries(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "KVCHAT_TEST_OF_LIBRARIES"
    program = tmp_path / "llama-server"
    program.write_text(f'#!/bin/sh\necho "it has [${name}]"\nexit 1\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    source = find_model(checkpoint)
    setup = BenchSetup(source, ModelConfig(checkpoint), SMALL, 1, True, gguf=tmp_path / "m.gguf")
    set_for_libraries(name, "1")
    try:
        with pytest.raises(ProcessFailed, match=r"it has \[\]"), clients._peer(setup):
            pass
    finally:
        os.unsetenv(name)


def test_a_real_server_is_measured_beside_the_engine(checkpoint: str) -> None:
    setup = BenchSetup(find_model(checkpoint), ModelConfig(checkpoint), SMALL, 1, True)

    result = scenario("clients")(setup)

    assert not result.refusal
    assert [figure.name for figure in result.figures] == [
        "1 client",
        "1 client: first text",
        "8 clients",
        "8 clients: first text",
    ]
    assert all(figure.value > 0 for figure in result.figures)
    assert result.notes == ("llama-server: not run; give the same model by --gguf",)
