"""A policy of drafts for tests: it accepts every offer, whatever drafting costs."""

from collections.abc import Sequence

from kvchat.engine.draft_policy import AcceptedOffer, DraftPolicy, RequestOffers
from kvchat.engine.request import Request


class FixedDraftPolicy(DraftPolicy):
    """Accepts the first offer, for up to `num_tokens` tokens; `sources` are those accepted."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens = num_tokens
        self.sources: set[str] = set()

    def is_to_ask(self, request: Request) -> bool:
        return True

    def choose(
        self, asking: Sequence[RequestOffers], num_rows: int, num_others: int
    ) -> list[AcceptedOffer | None]:
        firsts = [ask.offers[0] for ask in asking]
        self.sources |= {offer.source for offer in firsts}
        return [AcceptedOffer(offer, min(offer.most, self._num_tokens)) for offer in firsts]

    def note_verified(self, request: Request, source: str, drafted: int, accepted: int) -> None:
        """Records nothing: no choice follows from it."""

    def plain_s(self, num_decoding: int) -> float | None:
        """Return None: no step counts as faster or slower than another."""
        return None
