"""A deleted conversation is nowhere: every byte of every directory is searched for it.

`kvchat sessions rm` and /delete left the token ids of the text in cache.db, and the message in the
input history.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvchat.cache.disk.admin import StoreAdmin
from kvchat.cache.disk.memory import DiskMemory
from kvchat.chat.attachment import read_attachment
from kvchat.chat.controller import ChatController
from kvchat.chat.deletion import SavedPlaces
from kvchat.chat.host import ChatHost
from kvchat.chat.keeping import delete_conversation
from kvchat.chat.saved_chats import read_chats
from kvchat.chat.session import ChatSession
from kvchat.chat.store import SessionStore
from kvchat.chat.typed_lines import TypedLines
from kvchat.chat.why import common_len
from kvchat.cli import sessions
from kvchat.core.errors import GenerationError, StoreError, StoreInUse
from kvchat.terminal.command_runner import build_registry
from kvchat.terminal.commands_conversation import SessionPicker
from kvchat.terminal.completion import PrivateHistory
from kvchat.terminal.paint import Painter
from kvchat.terminal.script_commands import ScriptPage
from kvchat.terminal.status import StatsLevel
from kvchat.terminal.theme import Look
from support.checkpoints import never_stopping, save_checkpoint, tiny_model
from support.script_commands import SureCommands, carry_out
from support.template_zoo import CHATML
from support.tiny_host import BLOCK_SIZE, answer_options, finish
from support.tokenizer_zoo import byte_fallback
from support.traces import traces
from unit.terminal.conftest import BeginHost

SECRET = "Grimstad is empty on Sundays, says the naïve café owner."
DRAFT = "not even half of that was sent"


@dataclass
class Home:
    """The directories of one user, and the places in them."""

    root: Path
    places: SavedPlaces

    def chat(self, host: ChatHost, session: ChatSession | None = None) -> ChatController:
        return ChatController(
            host, lambda *_: host, session, answer_options(), kept=self.kv, places=self.places
        )

    @property
    def store(self) -> SessionStore:
        assert self.places.store is not None
        return self.places.store

    @property
    def kv(self) -> StoreAdmin:
        assert isinstance(self.places.kept, StoreAdmin)
        return self.places.kept

    def typed(self) -> list[str]:
        assert self.places.typed is not None
        return [line.text for line in self.places.typed.read()]


@pytest.fixture
def home(tmp_path: Path) -> Home:
    places = SavedPlaces(
        SessionStore(tmp_path / "data" / "sessions"),
        StoreAdmin(tmp_path / "cache" / "kv"),
        TypedLines(tmp_path / "state" / "history"),
    )
    return Home(tmp_path, places)


Start = Callable[..., ChatHost]


@pytest.fixture
def start(begin_host: BeginHost, tiny: Path, home: Home) -> Start:
    def begin(model: Path = tiny) -> ChatHost:
        memory = DiskMemory(home.root / "state")
        return begin_host(model, home.store, kept=home.kv.directory, memory=memory)

    return begin


def command(controller: ChatController, line: str) -> None:
    carry_out(controller, line, SureCommands)


def pick_and_delete(controller: ChatController, session_id: str) -> None:
    async def delete() -> None:
        page = ScriptPage(lambda text: None, Painter(Look(False, True)), 200)
        context = SureCommands(controller, page, build_registry(), StatsLevel.OFF)
        store = controller.places.store
        assert store is not None
        chats = read_chats(store, store.summaries())
        picker = SessionPicker(context, store, chats)
        [index] = [n for n, chat in enumerate(chats) if chat.summary.session_id == session_id]
        picker.delete(index)
        await asyncio.gather(*picker._deleting)

    asyncio.run(delete())


def remove_in_shell(controller: ChatController, session_id: str) -> None:
    controller.close_session()
    controller.host.close()
    sessions.remove(controller.places, [session_id])


def forget(controller: ChatController, session_id: str) -> None:
    command(controller, "/forget yes")


def delete_open(controller: ChatController, session_id: str) -> None:
    command(controller, "/delete")


def delete_another(controller: ChatController, session_id: str) -> None:
    controller.begin_new()
    finish(controller.ask("Hello."))
    command(controller, f"/delete {session_id}")


def delete_in_the_picker(controller: ChatController, session_id: str) -> None:
    controller.begin_new()
    pick_and_delete(controller, session_id)


WAYS = (forget, delete_open, delete_another, delete_in_the_picker, remove_in_shell)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_deleted_conversation_is_nowhere(home, start, way):
    controller = home.chat(start())
    finish(controller.ask("I like ships."))
    shared = controller.context_ids
    controller.begin_new()
    history = PrivateHistory(
        home.places.typed, lambda: controller.session.session_id if controller.session else None
    )
    history.append_string(SECRET)
    finish(controller.ask(SECRET))
    history.append_string(f"/btw {SECRET}")
    history.store_cleared(DRAFT)
    controller.keep_waiting([DRAFT])
    session_id = controller.require_session().session_id
    command(controller, "/pin")
    command(controller, "/rename The naïve café owner")
    ids = controller.require_conversation().path()[0].token_ids
    start_of_secret = common_len(ids, shared)
    secret_ids = ids[start_of_secret : start_of_secret + 30]
    found = traces(home.root, SECRET, secret_ids)
    assert {"data", "cache", "state"} <= {line.split("/")[0] for line in found}
    assert len(secret_ids) > 2 * BLOCK_SIZE

    way(controller, session_id)

    assert traces(home.root, SECRET, secret_ids) == []
    assert traces(home.root, DRAFT, ()) == []
    assert session_id not in home.store.ids()
    assert home.kv.verify().is_sound
    assert home.kv.status().num_tokens >= len(shared) - BLOCK_SIZE, "the other chat stays warm"


@pytest.fixture
def log(home: Home) -> Iterator[None]:
    """Write everything that kvchat logs into the state directory."""
    (home.root / "state").mkdir(exist_ok=True)
    handler = logging.FileHandler(home.root / "state" / "kvchat.log")
    logger = logging.getLogger("kvchat")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield
    logger.removeHandler(handler)
    handler.close()


@pytest.mark.parametrize("command_line", ["/forget yes", "/forget last yes"])
@pytest.mark.usefixtures("log")
def test_a_message_is_nowhere_with_its_files_and_the_commands_about_it(
    home: Home, start: Start, tmp_path_factory: pytest.TempPathFactory, command_line: str
) -> None:
    """/forget last left what /edit sent, and the names of files, in the input history."""
    place = tmp_path_factory.mktemp("files") / "merger-of-Grimstad.txt"
    place.write_text("Forty anvils, and not one more.")
    controller = home.chat(start())
    finish(controller.ask("I like ships."))
    session_id = controller.require_session().session_id
    history = PrivateHistory(home.places.typed, lambda: session_id)
    history.append_string(f"/file {place}")
    controller.attach(read_attachment(place))
    controller.keep_waiting([SECRET])
    finish(controller.ask("Not this."))
    controller.place.edited = controller.place.user_turn("")
    controller.attach(read_attachment(place))
    history.append_string(f"/edit 2 {SECRET}")
    finish(controller.ask(SECRET))
    ids = controller.require_conversation().path()[-2].token_ids[-40:-20]  # of the text alone
    secrets = (SECRET, place.name, "Forty anvils", "Not this")
    for secret in secrets:
        assert traces(home.root, secret, ids), secret

    command(controller, command_line)
    if "last" in command_line:  # the message that was edited is on a branch of its own
        [other] = controller.require_conversation().leaves()
        controller.place.move(other.turn_id)
        command(controller, command_line)

    for secret in secrets:
        assert traces(home.root, secret, ids) == [], secret


def test_what_was_evicted_before_it_was_deleted_is_nowhere(home: Home, start: Start) -> None:
    """SQLite leaves what is deleted in its pages, and no row says later that it is there."""
    controller = home.chat(start())
    finish(controller.ask("I like ships."))
    controller.begin_new()
    finish(controller.ask(SECRET))
    command(controller, "/pin")
    command(controller, "/unpin")
    ids = controller.require_conversation().path()[0].token_ids[8:-8]
    controller.close_session()
    controller.host.close()
    for status, _ in home.kv.tree():
        evict_all(home.kv.directory / status.identity)

    assert traces(home.kv.directory, SECRET, ids) == []


def evict_all(model_dir: Path) -> None:
    from kvchat.cache.disk.table import PackTable

    table = PackTable(model_dir, 1.0)
    table.remove(*[key for key, _ in table.rows()])
    table.shorten_log()
    table.close()


def forget_last_turns(controller: ChatController, session_id: str) -> None:
    command(controller, "/forget last yes")
    command(controller, "/forget last yes")


@pytest.mark.parametrize("way", [remove_in_shell, forget_last_turns], ids=lambda way: way.__name__)
def test_the_kv_of_all_models_that_went_on_with_it_is_deleted(home, start, tmp_path_factory, way):
    """Another tokenizer's ids of the text are nowhere in the session's turns."""
    other = tmp_path_factory.mktemp("other")
    save_checkpoint(other, never_stopping(tiny_model("llama", seed=5, vocab_size=400)), CHATML)
    byte_fallback().save(str(other / "tokenizer.json"))
    controller = home.chat(start())
    finish(controller.ask(SECRET))
    session_id = controller.require_session().session_id
    first_ids = controller.require_conversation().path()[0].token_ids[8:-8]
    controller.close_session()
    host = start(other)
    controller = home.chat(host, host.open_session(session_id))
    finish(controller.ask("And on Mondays?"))
    adopted_ids = controller.require_conversation().path()[0].token_ids[8:-8]
    assert adopted_ids != first_ids
    command(controller, "/pin")
    command(controller, "/unpin")
    kv = home.kv.directory
    assert traces(kv, SECRET, first_ids)
    assert traces(kv, SECRET, adopted_ids)

    way(controller, session_id)

    assert traces(home.root, SECRET, first_ids) == []
    assert traces(home.root, SECRET, adopted_ids) == []


def test_a_conversation_that_is_open_elsewhere_loses_nothing(home: Home, start: Start) -> None:
    controller = home.chat(start())
    finish(controller.ask(SECRET))
    session_id = controller.require_session().session_id
    command(controller, "/pin")
    before = home.kv.status().num_tokens

    with pytest.raises(StoreError, match="open in another kvchat"):
        sessions.remove(home.places, [session_id])

    assert home.kv.status().num_tokens == before
    assert home.store.ids() == [session_id]


def test_while_others_hold_the_kv_the_text_stays_to_delete_it_by(home, start, monkeypatch):
    controller = home.chat(start())
    finish(controller.ask(SECRET))
    session_id = controller.require_session().session_id
    controller.close_session()

    def held(*_: object) -> int:
        raise StoreInUse("Another process holds the disk cache.")

    with monkeypatch.context() as patch:
        patch.setattr(StoreAdmin, "forget", held)
        with pytest.raises(StoreInUse):
            asyncio.run(delete_conversation(controller, session_id))
    assert home.store.ids() == [session_id]

    asyncio.run(delete_conversation(controller, session_id))
    assert home.store.ids() == []


def test_a_running_server_lets_go_of_a_chat_that_runs_elsewhere_now(home, start):
    """It computed the chat before, and kept the KV in its memory when /delete ran in a terminal."""
    told: list[tuple[list[int], int]] = []
    places = replace(home.places, server=lambda: told.extend)
    controller = home.chat(start())
    finish(controller.ask(SECRET))
    session = controller.require_session()
    contexts = session.conversation.contexts()
    session_id = session.session_id
    controller.close_session()
    controller.host.close()

    places.delete([session_id])

    assert [ids for ids, _ in told] == contexts


def test_a_server_that_does_not_answer_keeps_no_text(home: Home, start: Start) -> None:
    """It may hold KV in memory: the user is told, and all the rest goes."""
    controller = home.chat(start())
    finish(controller.ask(SECRET))
    session_id = controller.require_session().session_id
    controller.close_session()
    controller.host.close()

    def silent(contexts: list[tuple[list[int], int]]) -> None:
        raise GenerationError("The server does not tell this.")

    with pytest.raises(StoreError, match=r"not all .* kept of it\. The server does not tell"):
        sessions.remove(replace(home.places, server=lambda: silent), [session_id])

    assert home.store.ids() == []
    assert home.kv.status().num_packs == 0
