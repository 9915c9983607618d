"""Metrics: counts for `GET /metrics`, in Prometheus' text format 0.0.4."""

from collections import Counter
from collections.abc import Iterator

from kvchat.core.types import Timing, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_MOST_CLIENTS = 1024
_TTFT_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counts since the server started. The event loop's thread alone uses it."""

    def __init__(self) -> None:
        self.num_running = 0
        self._requests: Counter[tuple[str, int]] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._num_generated = 0
        self._by_client: dict[str, int] = {}  # the tokens computed for each, the latest last
        self._ttft_counts = [0] * (len(_TTFT_BOUNDS_S) + 1)
        self._ttft_sum_s = 0.0

    def note_response(self, path: str, status: int) -> None:
        self._requests[path, status] += 1

    def num_computed(self, client: str) -> int:
        """Return how many tokens of prompts were computed for a client."""
        return self._by_client.get(client, 0)

    def note_answer(self, usage: Usage, timing: Timing, client: str) -> None:
        self._by_client[client] = self._by_client.pop(client, 0) + usage.prefilled_tokens
        if len(self._by_client) > _MOST_CLIENTS:
            del self._by_client[next(iter(self._by_client))]
        self._prompt_tokens.update(usage.cached.places)
        self._prompt_tokens["computed"] += usage.prefilled_tokens
        self._num_generated += usage.completion_tokens
        place = next(
            (i for i, bound in enumerate(_TTFT_BOUNDS_S) if timing.ttft_s <= bound),
            len(_TTFT_BOUNDS_S),
        )
        self._ttft_counts[place] += 1
        self._ttft_sum_s += timing.ttft_s

    def text(self) -> str:
        """Return all counts as Prometheus reads them."""
        return "".join(f"{line}\n" for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield "# HELP kvchat_requests_total Responses, by path and status."
        yield "# TYPE kvchat_requests_total counter"
        for (path, status), count in sorted(self._requests.items()):
            yield f'kvchat_requests_total{{path="{path}",status="{status}"}} {count}'
        yield "# HELP kvchat_requests_running Requests that are being answered."
        yield "# TYPE kvchat_requests_running gauge"
        yield f"kvchat_requests_running {self.num_running}"
        yield "# HELP kvchat_prompt_tokens_total Tokens of prompts, by where their KV came from."
        yield "# TYPE kvchat_prompt_tokens_total counter"
        for source in dict.fromkeys(("device", "host", "disk", "computed", *self._prompt_tokens)):
            count = self._prompt_tokens[source]
            yield f'kvchat_prompt_tokens_total{{source="{source}"}} {count}'
        yield "# HELP kvchat_generated_tokens_total Tokens of answers."
        yield "# TYPE kvchat_generated_tokens_total counter"
        yield f"kvchat_generated_tokens_total {self._num_generated}"
        yield "# HELP kvchat_ttft_seconds Seconds from a request to its first token."
        yield "# TYPE kvchat_ttft_seconds histogram"
        total = 0
        for bound, count in zip((*_TTFT_BOUNDS_S, "+Inf"), self._ttft_counts, strict=True):
            total += count
            yield f'kvchat_ttft_seconds_bucket{{le="{bound}"}} {total}'
        yield f"kvchat_ttft_seconds_sum {self._ttft_sum_s:.6f}"
        yield f"kvchat_ttft_seconds_count {total}"
