"""A response tells of how many tokens its answer had KV, where that is not all."""

from kvchat.chat.events import AnswerEnded
from kvchat.core.types import FinishReason, KvDropped, Timing, Usage
from kvchat.server.service import facts


def test_facts_have_the_kv_that_was_kept_where_some_was_dropped() -> None:
    dropped = KvDropped("SnapKV", 25, 100)
    for usage, expected in (
        (Usage(100), None),
        (Usage(100, dropped=dropped), {"method": "SnapKV", "num_kept": 25, "num_tokens": 100}),
    ):
        ended = AnswerEnded(0, 1, "Nine.", "", FinishReason.STOP, usage, Timing())
        assert facts(ended).get("kept_kv") == expected
        assert usage.as_dict().get("kept_kv") == expected
