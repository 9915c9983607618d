"""Two hundred clients at once that go at every stage of an answer, above a real engine."""

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvchat.chat.host import ChatHost
from support.asgi_client import Got, call, get
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.served import served_by
from support.tiny_host import tiny_host

# When a client goes: what it has got by then. None stays to the end.
_STAGES: dict[str, Callable[[Got], bool] | None] = {
    "while its request waits": lambda got: True,
    "once the response has begun": lambda got: got.status == 200,
    "at the first text": lambda got: got.body.count(b'"content":') > 1,
    "in the last piece": lambda got: b'"finish_reason":"' in got.body,
    "after the end": None,
}
_NUM_CLIENTS, _ANSWER_TOKENS = 200, 6


@pytest.fixture
def host(tmp_path: Path) -> Iterator[ChatHost]:
    model = never_stopping(tiny_model("llama"))
    host = tiny_host(save_checkpoint(tmp_path / "model", model), None, kept=tmp_path / "kv")
    host.wait_until_ready()
    yield host
    host.close()


def test_clients_that_go_at_any_stage_leave_nothing_behind(host: ChatHost) -> None:
    stages = list(_STAGES.values())

    async def ask(number: int) -> Got:
        stays = stages[number % len(stages)]
        body = {
            "model": "scripted",
            "messages": [{"role": "user", "content": f"Client number {number} of many."}],
            "max_tokens": _ANSWER_TOKENS,
            "stream": number % 10 != 0,  # of those whose request waits, half ask for a whole answer
        }
        leaves_after = stays or (lambda got: False)
        data = json.dumps(body).encode()
        return await call(app, "POST", "/v1/chat/completions", data, leaves_after=leaves_after)

    async def ask_all() -> list[Got]:
        return await asyncio.gather(*map(ask, range(_NUM_CLIENTS)))

    with served_by(host) as app:
        got = asyncio.run(ask_all())
        counts = get(app, "/metrics").body.decode()

    patient = got[len(stages) - 1 :: len(stages)]
    assert all(each.body.endswith(b"data: [DONE]\n\n") for each in patient)
    # A short answer may be whole before its client is seen to go.
    assert any(b"[DONE]" not in each.body for each in got[1 :: len(stages)])
    statuses = {each.status for each in got[:: 2 * len(stages)]}
    assert 499 in statuses
    assert statuses <= {200, 499}
    assert "kvchat_requests_running 0\n" in counts

    def check(engine) -> int:  # type: ignore[no-untyped-def]
        while engine.has_work:
            engine.step()
        engine.cache.check(tables=[])
        return len(engine.running())

    assert host._engine.call(check).result() == 0
