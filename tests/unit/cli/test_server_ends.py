"""A chat that uses the engine of a `kvchat serve`, and this server is killed: the chat goes on.

Before, every message failed from then on, and the user had to leave and start kvchat again.
"""

import re
import signal
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.fork_server import ForkedShell, ForkServer
from support.matrix import spread
from support.pty_screen import PtyScreen
from support.server_process import ServerProcess, served

HAS_ENDED = "The kvchat serve that this chat used has ended."
BROKE_OFF = "The answer broke off, as its server has ended."


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose answers end at the limit, minutes later."""
    model = never_stopping(tiny_model("llama", max_position_embeddings=32768))
    return str(save_checkpoint(tmp_path_factory.mktemp("endless"), model))


@pytest.fixture
def home(tmp_path: Path, fork_server: ForkServer) -> ForkedShell:
    return ForkedShell(tmp_path, server=fork_server)


@pytest.fixture
def server(home: ForkedShell, endless: str) -> Iterator[ServerProcess]:
    with served(home, "-m", endless) as server:
        yield server


def chat_of(home: ForkedShell, model: str, *arguments: str) -> PtyScreen:
    command = ["-m", model, "--temperature", "0", "--repetition-limit", "0", *arguments]
    assert home.server is not None
    chat = PtyScreen(home.server, "kvchat", command, environment=home.environment)
    return chat.wait_for("/help for help")


def test_an_idle_chat_goes_on_and_the_line_that_was_being_typed_is_kept(home, endless, server):
    with closing(chat_of(home, endless, "--max-tokens", "8")) as chat:
        chat.enter("one two three").wait_for("first token")
        chat.type("four fi")
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        chat.wait_for(HAS_ENDED)
        chat.enter("ve").wait_for(lambda text: text.count("first token") == 2)

        assert "❯ four five" in chat.text
        assert chat.text.count(HAS_ENDED) == 1
        assert chat.enter("/exit").finish() == 0


def test_a_chat_joins_the_server_that_has_come_instead(home, endless, server):
    """The second server used the first one's engine, and when that ended its own, for ever."""
    with closing(chat_of(home, endless, "--max-tokens", "8")) as chat:
        chat.enter("one two three").wait_for("first token")
        with served(home, "-m", endless) as successor:
            server.process.send_signal(signal.SIGKILL)
            server.process.wait()
            chat.wait_for(HAS_ENDED)
            chat.enter("four five").wait_for(lambda text: text.count("first token") == 2)

            assert successor.num_generated() == 8
            assert chat.enter("/exit").finish() == 0


@pytest.mark.parametrize("how", spread([signal.SIGKILL, signal.SIGTERM], [signal.SIGKILL]))
def test_half_an_answer_is_kept_and_can_be_continued(home, endless, server, how):
    with closing(chat_of(home, endless)) as chat:
        chat.enter("one two three").wait_for(lambda _: bool(re.search(r"\d tokens", chat.shown)))
        server.process.send_signal(how)
        server.process.wait()
        chat.wait_for(HAS_ENDED).wait_for(BROKE_OFF)  # until then /continue waits for the answer
        [session] = home.sessions
        half = session.stat().st_size
        chat.enter("/continue").wait_for(lambda _: session.stat().st_size > half + 2000)
        chat.type("\x1b").wait_for("first token")

        assert chat.enter("/exit").finish() == 0
