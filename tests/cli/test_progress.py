"""What a script says while a model loads."""

import io

from kvchat.cli.progress import LoadingLine
from kvchat.core.events import LoadProgress, ModelReady


def test_what_is_odd_about_a_model_is_told_where_nobody_watches_it_load() -> None:
    """A draft of another vocabulary was left out without a word in scripts."""
    stderr, told = io.StringIO(), list[str]()
    loading = LoadingLine(stderr, is_quiet=False, tell=told.append)

    loading.show(LoadProgress("loading weights", 0.5))
    loading.show(
        ModelReady(
            name="m",
            identity="i",
            device="cpu",
            dtype="float32",
            context_limit=64,
            load_s=0.1,
            notes=("No draft: \x1b[2J has another vocabulary.", "Second."),
        )
    )

    assert stderr.getvalue() == "", "no terminal, no line that erases itself"
    assert len(told) == 2
    assert "\x1b" not in told[0]
    assert told[0].endswith("has another vocabulary.")
