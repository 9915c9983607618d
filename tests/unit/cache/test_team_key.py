"""Records of a shared store: only the team's key opens them, and only in their own place."""

from dataclasses import replace

import pytest

from kvchat.cache.shared.team_key import TeamKey
from kvchat.cache.tier import DamagedRecord, Layout
from kvchat.core.errors import UsageError

SECRET = "a secret of the team"
LAYOUT = Layout(b"an identity of 16", 4, 32)
KEY, OTHER_KEY = b"k" * 16, b"o" * 16
CONTENT = b"what a block holds" * 9


@pytest.mark.parametrize("encrypts", [True, False])
def test_a_record_opens_with_the_same_secret_in_the_same_place(encrypts: bool) -> None:
    sealed = TeamKey(SECRET, LAYOUT, encrypts).seal(b"kv", KEY, CONTENT)

    assert bytes(TeamKey(SECRET, LAYOUT).open(b"kv", KEY, sealed)) == CONTENT
    assert (CONTENT in sealed) is not encrypts


def refused(key: TeamKey, part: bytes, chain_key: bytes, sealed: bytes) -> bool:
    try:
        key.open(part, chain_key, sealed)
    except DamagedRecord:
        return True
    return False


@pytest.mark.parametrize("encrypts", [True, False])
def test_a_record_is_refused_elsewhere(encrypts: bool) -> None:
    own = TeamKey(SECRET, LAYOUT, encrypts)
    sealed = own.seal(b"kv", KEY, CONTENT)
    of_other_model = TeamKey(SECRET, replace(LAYOUT, identity=b"another identity"), encrypts)
    of_other_shape = TeamKey(SECRET, replace(LAYOUT, block_bytes=64), encrypts)

    assert refused(TeamKey("another team's key", LAYOUT, encrypts), b"kv", KEY, sealed)
    assert refused(own, b"kv", OTHER_KEY, sealed)
    assert refused(own, b"head", KEY, sealed)
    assert refused(of_other_model, b"kv", KEY, sealed)
    assert refused(of_other_shape, b"kv", KEY, sealed)


@pytest.mark.parametrize("encrypts", [True, False])
def test_a_changed_or_short_record_is_refused_wherever_it_was_changed(encrypts: bool) -> None:
    own = TeamKey(SECRET, LAYOUT, encrypts)
    sealed = own.seal(b"kv", KEY, CONTENT)

    for place in range(len(sealed)):
        changed = bytearray(sealed)
        changed[place] ^= 1
        assert refused(own, b"kv", KEY, bytes(changed)), place
        assert refused(own, b"kv", KEY, sealed[:place]), place


def test_an_encrypted_record_is_not_taken_for_a_signed_one() -> None:
    own = TeamKey(SECRET, LAYOUT)
    sealed = own.seal(b"kv", KEY, CONTENT)

    assert refused(own, b"kv", KEY, sealed.replace(b"kvchat1e", b"kvchat1s", 1))


def test_names_tell_nothing_without_the_secret_and_differ_by_model() -> None:
    own = TeamKey(SECRET, LAYOUT)

    assert own.name(KEY) == TeamKey(SECRET, LAYOUT, encrypts=False).name(KEY)
    assert own.name(KEY) != own.name(OTHER_KEY)
    assert own.name(KEY) != TeamKey("another team's key", LAYOUT).name(KEY)
    assert own.name(KEY) != TeamKey(SECRET, replace(LAYOUT, identity=b"another identity")).name(KEY)
    assert KEY.hex() not in own.name(KEY)


def test_a_short_secret_is_refused_with_a_way_to_make_one() -> None:
    with pytest.raises(UsageError) as refused_key:
        TeamKey("short", LAYOUT)

    assert "openssl" in (refused_key.value.hint or "")
