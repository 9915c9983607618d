"""A chat host on a tiny random checkpoint: the whole chat floor with a real engine below it."""

from collections.abc import Callable
from pathlib import Path

from kvchat.cache.disk.lookup import KvSettings
from kvchat.chat.answer_settings import AskOptions
from kvchat.chat.chat_model import read_chat_model
from kvchat.chat.events import AnswerEnded
from kvchat.chat.host import ChatHost
from kvchat.chat.reply import Reply
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.core.config import CacheConfig, EngineConfig, ModelConfig, SharedConfig
from kvchat.core.events import LoadProgress, ModelReady
from kvchat.core.text import Size
from kvchat.core.types import NO_MEMORY, Memory, SamplingParams
from kvchat.engine.assembly import build_engine
from kvchat.engine.engine import Engine
from kvchat.model.checkpoint.source import find_model

BLOCK_SIZE = 8
DISK = Size(num_bytes=1 << 30)
TINY_KV = KvSettings(BLOCK_SIZE, dtype="float32")
GREEDY = SamplingParams(temperature=0.0)


def answer_options(max_tokens: int = 12, **others: object) -> AskOptions:
    return AskOptions(sampling=GREEDY, max_tokens=max_tokens, **others)  # type: ignore[arg-type]


def tiny_host(
    directory: Path,
    store: SessionStore | None,
    before_step: Callable[[], None] = lambda: None,
    reuse: bool = True,
    kept: Path | None = None,
    memory: Memory = NO_MEMORY,
    device_bytes: int = 1 << 23,
    wanted: KvSettings = TINY_KV,
    shared: SharedConfig | None = None,
) -> ChatHost:
    """Start a host on a checkpoint; `before_step` runs on the engine's thread before each one.

    KV is kept on disk in `kept`; `memory` has what is measured and known of models. KV depends on
    the settings `wanted`. `shared` is where other machines' KV is.
    """
    source = find_model(str(directory))

    def build(progress: Callable[[LoadProgress], None]) -> tuple[Engine, ModelReady]:
        assembled = build_engine(
            source,
            ModelConfig(dtype=wanted.dtype, weights=wanted.weights),
            CacheConfig(
                wanted.block_size,
                Size(num_bytes=device_bytes),
                kv_dtype=wanted.kv_dtype,
                reuse=reuse,
                disk_bytes=DISK,
                directory=kept,
                shared=shared,
            ),
            EngineConfig(max_step_tokens=64),
            memory,
            progress,
        )
        run = assembled.engine._runner.run

        def paced(plan, *others):  # type: ignore[no-untyped-def]
            before_step()
            return run(plan, *others)

        assembled.engine._runner.run = paced  # type: ignore[method-assign]
        return assembled.engine, assembled.ready

    return ChatHost(read_chat_model(source), build, store)


def finish(reply: Reply) -> AnswerEnded:
    """Wait for a reply's only answer."""
    [ended] = [event for event in reply if isinstance(event, AnswerEnded)]
    return ended


def ask(session: ChatSession, text: str, max_tokens: int = 12) -> AnswerEnded:
    return finish(session.ask(text, answer_options(max_tokens)))
