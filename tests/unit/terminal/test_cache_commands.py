"""/cache, the disk tier in /stats, and what is said, once, when it got into trouble."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kvchat.chat.host import trouble_notice
from kvchat.core.stats import ModelDirStatus, StoredPack, StoreStatus, TierStatus, Verified
from kvchat.terminal import cache_lines
from kvchat.terminal.theme import ASCII_GLYPHS
from support.chat_screen import ChatScreen
from support.stored_packs import stored_packs

StartChat = Callable[..., ChatScreen]

_FAILED = "the disk cache failed: No space left on device."


def test_the_store_is_looked_after_from_within_a_chat(start_chat, tmp_path):
    store = stored_packs(tmp_path / "kv")
    chat = start_chat("--kept", str(store.directory), columns=160, rows=60)
    chat.enter("/cache").wait_for("used: 5 packs, 22 tokens").wait_for("last used 20")
    chat.enter("/cache tree").wait_for("├─ 6 tokens").wait_for("└─ 4 tokens")
    chat.enter("/cache path").wait_for(
        lambda text: text.replace("\n", "").count(str(store.directory)) >= 2
    )
    chat.enter("/cache verify").wait_for("5 packs read, none is damaged.")
    chat.enter("/cache gc").wait_for("There was nothing to free.")
    chat.enter("/cache melt").wait_for("melt is unknown here. /cache [status|tree|")
    chat.enter("/cache clear").wait_for("No word of a conversation is lost.").type("\r")
    chat.wait_for("Nothing is deleted.")
    assert list(store.directory.rglob("*.kv"))
    chat.enter("/cache clear").wait_for(lambda t: "No word" in t.rpartition("deleted.")[2])
    chat.type("yes")
    chat.type("\r").wait_for("KiB deleted.")
    assert not list(store.directory.rglob("*.kv"))


def test_a_chat_that_keeps_nothing_says_so(start_chat: StartChat) -> None:
    start_chat(columns=120).enter("/cache").wait_for("This chat keeps no KV on disk.")


def test_why_a_turn_was_read_is_told(start_chat: StartChat) -> None:
    chat = start_chat(columns=120)
    chat.enter("/cache why").wait_for("Nothing has been answered here yet.")
    chat.enter("hello").wait_for("tokens, ")
    chat.enter("/cache why").wait_for("tokens were there").wait_for("were read: new text.")
    chat.enter("/new").enter("/cache why")
    chat.wait_for(lambda text: text.count("Nothing has been answered here yet.") == 2)


def test_the_statistics_tell_of_the_disk(start_chat: StartChat) -> None:
    chat = start_chat(columns=140)
    chat.enter("hello").wait_for("tokens, ")
    chat.enter("/stats").wait_for("disk:   2 packs of this model; 3 MiB of 1 GiB used by all")


def test_trouble_is_told_once_a_sentence(start_chat: StartChat) -> None:
    chat = start_chat(columns=140)
    told = "The disk cache failed: No space left on device; the chat goes on without it."
    chat.enter(f"trouble {_FAILED}").wait_for(told)
    chat.enter("hello").wait_for("You said 'hello' (0).")
    chat.enter(f"trouble {_FAILED}").wait_for(lambda text: text.count("All the same.") == 2)
    chat.enter("trouble the disk is nearly full.")
    chat.wait_for("The disk cache: the disk is nearly full; the chat goes on.")

    assert chat.text.count(told) == 1
    chat.enter("/stats").wait_for("        the disk is nearly full.")


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (Verified(), "0 packs read, none is damaged."),
        (Verified(1), "1 pack read, none is damaged."),
        (Verified(2, 1), "2 packs sound, 1 damaged and gone now. Chats read again what they need."),
        (
            Verified(0, 0, 1),
            "0 packs sound, 1 damaged table gone with all it led to. "
            "Chats read again what they need.",
        ),
    ],
)
def test_what_verifying_found_is_one_line(found: Verified, line: str) -> None:
    assert cache_lines.verified_line(found) == line


def test_a_long_conversation_goes_straight_down() -> None:
    """Only branches are indented, and no depth is too much."""
    packs = [StoredPack(number - 1 if number else None, 16, 1024, 0.0) for number in range(3000)]
    packs += [StoredPack(0, 16, 1024, 0.0), StoredPack(None, 16, 1024, 0.0, is_orphan=True)]
    status = StoreStatus(Path("kv"), 0)

    lines = cache_lines.tree_lines([], ASCII_GLYPHS)
    assert lines == ["Nothing is kept."]
    [*chain, branch, orphan] = list(cache_lines.branch_lines(packs, ASCII_GLYPHS))
    assert chain[0] == "  |- 16 tokens, 1 KiB, at an unknown time"
    assert chain[1] == "  |  |- 16 tokens, 1 KiB, at an unknown time"
    assert chain[-1] == "  |  |  16 tokens, 1 KiB, at an unknown time"
    assert branch == "  |  `- 16 tokens, 1 KiB, at an unknown time"
    assert orphan == "  `- 16 tokens, 1 KiB, at an unknown time, its beginning is gone"
    assert cache_lines.status_lines(status, {})[1:] == [
        "0 B used: nothing is kept",
        "Chats keep nothing here: --disk-cache is 0.",
    ]


@pytest.mark.parametrize(
    ("width", "name"), [(80, "A conversation about the wea… and 1 more"), (56, "")]
)
def test_a_pack_of_the_tree_has_one_row(width: int, name: str) -> None:
    """At 80 columns each took two, and no eye could follow the branches."""
    names = ("A conversation about the weather in April", "Another")
    packs = [StoredPack(None, 64, 1024**2, 0.0, names=names)]
    [line] = cache_lines.branch_lines(packs, ASCII_GLYPHS, width)
    assert line == "  64 tokens, 1 MiB, at an unknown time" + (f", {name}" if name else "")
    assert len(line) <= width
    [narrow] = cache_lines.branch_lines(packs, ASCII_GLYPHS, 30)
    assert narrow == "  64 tokens, 1 MiB"


def test_a_file_of_a_model_is_named_without_its_directory() -> None:
    model_dir = ModelDirStatus("ab" * 16, 1, 16, 1024, 0.0, model="/home/ada/models/tiny.gguf")
    [line] = cache_lines.tree_lines([(model_dir, [])], ASCII_GLYPHS)
    assert line.startswith("tiny.gguf: 1 pack")


def test_kv_of_two_dtypes_of_one_model_is_told_apart() -> None:
    """Two lines of the same model differed in a digest only."""
    own, rounded = (
        ModelDirStatus("ab" * 16, 1, 16, 1024, 0.0, model="demo", kv_dtype=kv_dtype)
        for kv_dtype in ("", "int8")
    )

    [_, _, one, other, *_] = cache_lines.status_lines(
        StoreStatus(Path("kv"), 0, (own, rounded)), {}
    )
    assert one.startswith("  demo: 1 pack, 16 tokens")
    assert other.startswith("  demo, KV in int8: 1 pack, 16 tokens")


def test_models_run_otherwise_are_told_apart_by_what_differs() -> None:
    def lines(*runs: tuple[str, str, int]) -> list[str]:
        dirs = tuple(
            ModelDirStatus(
                "ab" * 16,
                1,
                16,
                1024,
                0.0,
                model="m",
                dtype=dtype,
                weights=weights,
                block_size=size,
            )
            for dtype, weights, size in runs
        )
        told = cache_lines.status_lines(StoreStatus(Path("kv"), 1, dirs), {})[2:]
        tree = cache_lines.tree_lines([(each, []) for each in dirs], ASCII_GLYPHS)
        assert [line.strip() for line in told] == tree
        return [line.partition(":")[0] for line in tree]

    assert lines(("bfloat16", "own", 16)) == ["m"]
    assert lines(("bfloat16", "own", 16), ("bfloat16", "int8", 16)) == ["m", "m, weights in int8"]
    assert lines(("bfloat16", "own", 16), ("float32", "own", 16)) == ["m, bfloat16", "m, float32"]
    assert lines(("bfloat16", "own", 16), ("bfloat16", "own", 8)) == [
        "m, blocks of 16 tokens",
        "m, blocks of 8 tokens",
    ]
    assert lines(("", "", 0), ("float32", "", 16)) == ["m", "m, float32, blocks of 16 tokens"]


def test_what_a_broken_table_says_cannot_act_on_a_terminal() -> None:
    evil = TierStatus(trouble="the disk cache failed: \x1b]0;owned\x07.")

    assert "\x1b" not in trouble_notice(evil.trouble)
    assert "\x1b" not in "".join(cache_lines.tier_lines(evil))


def test_a_store_that_could_not_be_opened_has_no_figures() -> None:
    [line] = cache_lines.tier_lines(TierStatus("disk", trouble=_FAILED))

    assert line == f"disk:   {_FAILED}"


def test_the_statistics_tell_of_what_was_quarantined() -> None:
    lines = cache_lines.tier_lines(TierStatus(num_packs=1, limit_bytes=1 << 30, num_quarantined=12))

    assert any("12 blocks of another model" in line for line in lines)
    assert not any("another model" in line for line in cache_lines.tier_lines(TierStatus()))
