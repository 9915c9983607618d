"""The key of a server: where it comes from, and the one that it makes on a shared machine."""

import os
import pwd
from pathlib import Path

import pytest

from kvchat.cli.server_key import KeyRequest, has_other_people, server_key
from kvchat.core.errors import UnreadableFile, UsageError

NO_KEY = KeyRequest()


class Told(list[str]):
    """What the user was told."""

    def key(
        self,
        request: KeyRequest = NO_KEY,
        state: Path | None = None,
        is_local: bool = True,
        is_shared: bool = True,
        is_terminal: bool = True,
        **environment: str,
    ) -> str | None:
        return server_key(
            request, environment, is_local, state, self.append, lambda: is_shared, is_terminal
        )


def test_on_a_machine_of_one_person_no_key_is_needed() -> None:
    assert Told().key(is_shared=False) is None


def test_on_a_shared_machine_a_key_is_made_once_and_its_place_is_told(tmp_path: Path) -> None:
    """Other people could list models, ask where a text is cached, pin and forget."""
    told, state = Told(), tmp_path / "state"

    key = told.key(state=state)

    path = state / "serve.key"
    assert key is not None
    assert len(key) >= 32
    assert path.read_text() == f"{key}\n"
    assert (path.stat().st_mode & 0o777, state.stat().st_mode & 0o777) == (0o600, 0o700)
    assert str(path) in told[0]
    assert key not in told[0]
    assert Told().key(state=state) == key, "clients keep what they were given"
    path.chmod(0o644)
    assert Told().key(state=state) == key
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_key_that_is_kept_nowhere_is_told() -> None:
    told = Told()

    key = told.key(state=None)

    assert key is not None
    assert key in told[0]


def test_a_key_that_is_kept_nowhere_is_not_written_to_a_log() -> None:
    """The log of a service that ran incognito held it."""
    told = Told()

    with pytest.raises(UsageError, match="kept nowhere"):
        told.key(state=None, is_terminal=False)

    assert told == []
    assert told.key(state=None, is_terminal=False, KVCHAT_API_KEY="open") == "open"


def test_a_link_in_the_place_of_the_key_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("known to others")
    (tmp_path / "serve.key").symlink_to(tmp_path / "theirs")
    told = Told()

    key = told.key(state=tmp_path)

    assert key is not None
    assert key in told[0]
    assert (tmp_path / "theirs").read_text() == "known to others"


def test_a_key_on_the_command_line_is_taken_with_a_warning() -> None:
    told = Told()

    assert told.key(KeyRequest("sesame"), KVCHAT_API_KEY="other") == "sesame"

    assert "--api-key-file" in told[0]
    assert "KVCHAT_API_KEY" in told[0]
    assert "sesame" not in told[0]


@pytest.mark.parametrize("is_local", [False, True])
def test_a_key_in_a_file_or_in_the_environment_is_taken_in_silence(tmp_path, is_local):
    (tmp_path / "key").write_text("sesame\n")
    told = Told()

    assert told.key(KeyRequest(file=tmp_path / "key"), is_local=is_local) == "sesame"
    assert told.key(KVCHAT_API_KEY="open", is_local=is_local) == "open"
    assert told == []


def test_everybody_of_this_machine_may_be_let_in_and_nobody_else() -> None:
    assert Told().key(KeyRequest(is_open=True), KVCHAT_API_KEY="open") is None
    with pytest.raises(UsageError, match="a key is needed"):
        Told().key(KeyRequest(is_open=True), is_local=False)


@pytest.mark.parametrize(
    ("content", "error"),
    [(None, UnreadableFile), (b"\n", UsageError), (b"a\nb", UsageError), (b"\xff", UnreadableFile)],
)
def test_a_bad_file_is_an_error(tmp_path, content, error):
    if content is not None:
        (tmp_path / "key").write_bytes(content)

    with pytest.raises(error):
        Told().key(KeyRequest(file=tmp_path / "key"))


def account(number: int, home: Path, shell: str = "/bin/bash") -> pwd.struct_passwd:
    return pwd.struct_passwd(("name", "x", number, number, "", str(home), shell))


def test_other_people_are_those_with_a_home_in_use_or_a_running_program(tmp_path: Path) -> None:
    own, other = os.getuid() + 5000, os.getuid() if os.getuid() >= 1000 else 1234
    used, unused = tmp_path / "used", tmp_path / "unused"
    for home, name in ((used, "thesis.tex"), (unused, ".bashrc")):
        home.mkdir()
        (home / name).touch()
        if os.getuid() == 0:
            os.chown(home, other, other)

    def others(*accounts: pwd.struct_passwd, active: tuple[int, ...] = ()) -> bool:
        return has_other_people(accounts, own, active, {".bashrc"})

    assert others(account(other, used))
    assert others(account(other, unused), active=(0, other))
    assert not others(account(other, unused), active=(0, own))
    assert not others(account(other, tmp_path / "missing"))
    assert not others(account(other, used, "/usr/sbin/nologin"))
    assert not others(account(other + 1, used)), "a home of another account is not its own"
    assert not others(account(own, used), account(0, used), account(65534, used))
    assert not others()
