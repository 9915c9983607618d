"""Scenario `clients`: programs that ask at once, through `kvchat serve`.

1, 8 and 64 clients each send one request after another: random token ids, never the same twice,
and a streamed answer. Reports requests a second and the time to the first text, beside the same
requests in an engine of this process, which shows what HTTP costs, and beside llama.cpp's server
where `--gguf` names the model and `llama-server` is installed. Needs a model with a tokenizer; uses
the demo model if none is named. Random weights may say bytes that are no text: then the first text
comes late, with the end of the answer.
"""

import asyncio
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import torch

from kvchat.bench.engines import GREEDY, model_facts, new_engine, random_ids
from kvchat.bench.measure import Sample
from kvchat.bench.processes import COMMAND, ProcessFailed, engine_flags, private_home
from kvchat.bench.report import Figure, Result, compared
from kvchat.bench.setup import BenchSetup
from kvchat.core.errors import GenerationError
from kvchat.core.events import RequestFailed, SampleFinished, TokensGenerated
from kvchat.engine.assembly import AssembledEngine
from kvchat.engine.request import RequestSpec
from kvchat.model.checkpoint.source import ModelSource, find_model

_CLIENTS = (1, 8, 64)
# Requests of a client, so that a run takes about as long for any number of them.
_REQUESTS = {1: 8, 8: 2, 64: 1}
_PROMPT_TOKENS, _ANSWER_TOKENS = 128, 32
_DEMO = "demo"
# What requests call the model.
_NAME = "measured"
_START_S, _SILENCE_S, _STOP_S, _PAUSE_S = 600.0, 600.0, 20.0, 0.2
_READ_BYTES = 1 << 16
_LLAMA_SERVER = "llama-server"
_ADDRESS = re.compile(rb"(http://[^\s/]+)/v1")


@dataclass(frozen=True, slots=True)
class Load:
    """What clients measured: seconds to the first text of each request, and those of all."""

    first_s: tuple[float, ...]
    wall_s: float

    @property
    def per_second(self) -> float:
        return len(self.first_s) / self.wall_s

    @property
    def median_first_s(self) -> float:
        return statistics.median(self.first_s)


Prompts = Sequence[Sequence[tuple[int, ...]]]
"""For each client the prompts that it sends, one after another."""


def run(setup: BenchSetup) -> Result:
    """Measure numbers of clients at the servers and at an engine, in turns."""
    is_demo = setup.model.name == _DEMO
    source = find_model(_DEMO) if is_demo else setup.source
    assembled = new_engine(source, setup.model, setup.cache)
    loaded = assembled.loaded
    settings = {
        **model_facts(source, loaded),
        "prompt": _PROMPT_TOKENS,
        "answer": _ANSWER_TOKENS,
    }
    figures: list[Figure] = []
    try:
        with private_home() as home, _kvchat(setup, source, home) as url, _peer(setup) as peer:
            for count in _CLIENTS[: 2 if setup.is_quick else None]:
                figures += _measured(setup, assembled, url, peer.url, count)
    except ProcessFailed as failure:
        return Result("clients", settings, refusal=str(failure))
    return Result("clients", settings, tuple(figures), notes=(peer.note,))


def _measured(
    setup: BenchSetup, assembled: AssembledEngine, url: str, peer_url: str | None, count: int
) -> list[Figure]:
    """Return the figures of a number of clients; the first round is a warm-up."""
    vocab_size = assembled.loaded.spec.vocab_size
    ours: list[Load] = []
    engines: list[Load] = []
    peers: list[Load] = []
    for number in range(setup.repeats + 1):
        prompts = _prompts(setup, count, vocab_size, 1000 * count + number)
        ours.append(asyncio.run(load_of_server(url, prompts)))
        engines.append(load_of_engine(assembled, prompts))
        if peer_url is not None:
            peers.append(asyncio.run(load_of_server(peer_url, prompts)))
    clients = f"{count} client{'s' if count > 1 else ''}"
    beside = [(engines, "the engine alone", "0.97")]
    if peers:
        beside.append((peers, _LLAMA_SERVER, "1.0"))
    return [
        figure
        for theirs, name, must in beside
        for figure in (
            _rates(clients, ours, theirs, name, must),
            _first_texts(clients, ours, theirs, name),
        )
    ]


def _prompts(setup: BenchSetup, count: int, vocab_size: int, seed: int) -> Prompts:
    length = min(_PROMPT_TOKENS, setup.scaled(_PROMPT_TOKENS * 8))
    num_each = 1 if setup.is_quick else _REQUESTS[count]
    ids = random_ids(count * num_each * length, vocab_size, seed)
    prompts = [tuple(ids[at : at + length]) for at in range(0, len(ids), length)]
    return [prompts[at : at + num_each] for at in range(0, len(prompts), num_each)]


def _rates(
    clients: str, ours: Sequence[Load], theirs: Sequence[Load], beside: str, must: str
) -> Figure:
    mine, other = (Sample(tuple(load.per_second for load in runs[1:])) for runs in (ours, theirs))
    return compared(clients, mine, other, "requests/s", beside, "of that", must)


def _first_texts(clients: str, ours: Sequence[Load], theirs: Sequence[Load], beside: str) -> Figure:
    mine, other = (
        Sample(tuple(load.median_first_s for load in runs[1:])) for runs in (ours, theirs)
    )
    return compared(f"{clients}: first text", mine, other, "ms", beside, "of that")


def load_of_engine(assembled: AssembledEngine, prompts: Prompts) -> Load:
    """Run each client's requests in the engine itself; a client sends the next after an answer."""
    engine = assembled.engine
    waiting = [list(reversed(of_client)) for of_client in prompts]
    client_of: dict[int, int] = {}
    begun_s: dict[int, float] = {}
    first_s: dict[int, float] = {}
    start_s = time.perf_counter()

    def send(client: int) -> None:
        if waiting[client]:
            spec = RequestSpec(waiting[client].pop(), GREEDY, max_tokens=_ANSWER_TOKENS)
            number = engine.submit(spec)
            client_of[number], begun_s[number] = client, time.perf_counter()

    for client in range(len(prompts)):
        send(client)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, RequestFailed):
                raise GenerationError(f"A measured request failed: {event.error}")
            if isinstance(event, TokensGenerated | SampleFinished):  # an answer may be empty
                now_s = time.perf_counter()
                first_s.setdefault(event.request_id, now_s - begun_s[event.request_id])
            if isinstance(event, SampleFinished):
                send(client_of[event.request_id])
    return Load(tuple(first_s.values()), time.perf_counter() - start_s)


async def load_of_server(url: str, prompts: Prompts) -> Load:
    """Let the clients send their requests to `url`. Raises ProcessFailed if one is not answered.

    The clients share the cores with the server, so they do as little as they can: each request has
    a connection of its own, whose bytes are not parsed.
    """
    first_s: list[float] = []

    async def send_all(of_client: Sequence[tuple[int, ...]]) -> None:
        for prompt in of_client:
            first_s.append(await _first_text_s(url, prompt))

    start_s = time.perf_counter()
    try:
        await asyncio.gather(*map(send_all, prompts))
    except (OSError, TimeoutError) as error:
        raise ProcessFailed(f"{url} did not answer: {error!r}") from error
    return Load(tuple(first_s), time.perf_counter() - start_s)


async def _first_text_s(url: str, prompt: tuple[int, ...]) -> float:
    """Send one request and read its whole answer; return the seconds to its first text."""
    address = urlsplit(url)
    start_s = time.perf_counter()
    first_s: float | None = None
    said = b""
    async with asyncio.timeout(_SILENCE_S):
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(_request(address.netloc, prompt))
            while piece := await reader.read(_READ_BYTES):
                if first_s is None:
                    said += piece
                    if b"data:" in said:
                        first_s = time.perf_counter() - start_s
        finally:
            writer.close()
    if b" 200 " not in said[:16]:
        shown = said[:200].decode(errors="replace")
        raise ProcessFailed(f"{url} refused a request: {shown}")
    if first_s is None:
        raise ProcessFailed(f"{url} ended an answer without a word.")
    return first_s


def _request(host: str, prompt: tuple[int, ...]) -> bytes:
    body = {
        "model": _NAME,
        "prompt": list(prompt),
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data


# Servers


@dataclass(frozen=True, slots=True)
class _Peer:
    """A server to compare with; `url` is None if there is none. `note` says which, or why."""

    url: str | None
    note: str


@contextmanager
def _kvchat(
    setup: BenchSetup, source: ModelSource, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield the address of a new `kvchat serve` once it has loaded the model.

    It keeps nothing on the disk, as the engine that it is compared with.
    """
    own = ["--no-spec", "--incognito"]
    serve = ["serve", "--no-api-key", "--port", "0", "--name", _NAME]
    command = [*COMMAND, *engine_flags(setup, source), *own, *serve]
    with _process(command, environment) as (process, said):
        url = _kvchat_address(process, said)
        _wait_until_healthy(process, said, url)
        yield url


@contextmanager
def _peer(setup: BenchSetup) -> Iterator[_Peer]:
    """Yield llama.cpp's server on the same model."""
    gguf, program = setup.peers_gguf, shutil.which(_LLAMA_SERVER)
    if gguf is None or program is None:
        reason = "give the same model by --gguf" if gguf is None else "is not on the PATH"
        yield _Peer(None, f"{_LLAMA_SERVER}: not run; {reason}")
        return
    slots = max(_CLIENTS)
    context = slots * 2 * (_PROMPT_TOKENS + _ANSWER_TOKENS)
    threads = str(torch.get_num_threads())
    port = str(_free_port())
    command = [program, "-m", str(gguf), "--port", port, "-np", str(slots)]
    command += ["-c", str(context), "-t", threads, "-tb", threads, "--no-webui"]
    with _process(command, os.environ) as (process, said):
        url = f"http://127.0.0.1:{port}"
        _wait_until_healthy(process, said, url)
        yield _Peer(url, f"{_LLAMA_SERVER}: {gguf.name}, {slots} slots")


@contextmanager
def _process(
    command: Sequence[str], environment: Mapping[str, str]
) -> Iterator[tuple["subprocess.Popen[bytes]", Path]]:
    """Yield a running program and the file that it writes to; end it at the end."""
    with tempfile.TemporaryDirectory(prefix="kvchat-bench-") as directory:
        said = Path(directory, "said")
        with said.open("wb") as out:
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        try:
            yield process, said
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _kvchat_address(process: "subprocess.Popen[bytes]", said: Path) -> str:
    """Wait until the server says where it listens."""
    for _ in _until_started(process, said):
        if found := _ADDRESS.search(said.read_bytes()):
            return found[1].decode()
    raise AssertionError("_until_started ends by an exception")


def _wait_until_healthy(process: "subprocess.Popen[bytes]", said: Path, url: str) -> None:
    for _ in _until_started(process, said):
        with suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return


def _until_started(process: "subprocess.Popen[bytes]", said: Path) -> Iterator[None]:
    """Yield several times a second; raises ProcessFailed if the program ends or takes too long."""
    deadline_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        yield
        time.sleep(_PAUSE_S)
    last = (said.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    raise ProcessFailed(f"a server did not start: {last}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port
