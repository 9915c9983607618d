"""HeadDrafter: drafts with a head of the model: the checkpoint's own for the next token (MTP), or
one of EAGLE-3.

The head runs one layer over pairs: a position's hidden state of the model, and the token that
follows it. Its KV is in a cache of its own, in memory only. A request whose hidden states are not
all known, as its KV was restored from the disk, gets drafts from those that are. While no guesses
are wanted nothing is computed, and only the newest hidden states are kept.

It draws with the target's noise, as ModelDrafter does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from kvchat.cache.block_manager import CacheManager
from kvchat.cache.block_table import BlockTable
from kvchat.cache.chain import KvChain
from kvchat.engine.drafters import DraftOrder, HiddenReader, Offer, WhenWritten
from kvchat.engine.request import Request, State
from kvchat.engine.runner import Runner, sampling_row
from kvchat.engine.sampler import sample
from kvchat.engine.step_threads import StepThreads
from kvchat.model.batch import SequencePiece
from kvchat.model.next_head import HeadModel

# At most this many pairs are computed with the first guess, others before it.
_MOST_ALONG = 17
# Where a head guesses badly its guesses are tried again after 32 tokens, 64, and so on: computing
# all pairs would take 0.02 of the time meanwhile. Of more than this only the newest stay.
_MOST_WAITING = 64
# The product with a large vocabulary is most of what a guess takes, and ids are in the order of
# how frequent their tokens were: a quarter of Qwen2.5's has 0.94 of English and code. Ids above
# those of this share of a request's newest tokens are not guessed.
_SHARE_OF_IDS, _NEWEST = 0.95, 256


@dataclass(slots=True)
class _HeadState:
    """One request's pairs of a position and the token after it.

    # [0, num_computed)          KV in the table
    # then num_hidden slots      of which the hidden states are known

    `first` positions before these have none, because their hidden states are not known: slot s is
    of position `first` + s. Nothing of such a context is entered in the tree. Hidden states are
    joined when they are wanted: in each step that would copy up to 0.7 MB for guesses not made.
    """

    table: BlockTable
    first: int
    num_computed: int
    parts: list[torch.Tensor] = field(default_factory=list)
    num_hidden: int = 0

    @property
    def end(self) -> int:
        """The position after the last one whose hidden state is known."""
        return self.first + self.num_computed + self.num_hidden

    @property
    def hidden(self) -> torch.Tensor:
        """The hidden states that are known, [num_hidden, width]; there is one at least."""
        if len(self.parts) > 1:
            self.parts = [torch.cat(self.parts)]
        return self.parts[0]

    def add(self, rows: torch.Tensor) -> None:
        """Note the hidden states of the next positions."""
        self.parts.append(rows)
        self.num_hidden += len(rows)

    def note_computed(self, num_pairs: int) -> None:
        """Note that the next pairs have KV."""
        rest = self.hidden[num_pairs:]
        self.parts = [rest] if len(rest) else []
        self.num_hidden = len(rest)
        self.num_computed += num_pairs

    def tokens(self, request: Request, num_pairs: int) -> list[int]:
        """Return the tokens of the next pairs to compute."""
        start = self.first + self.num_computed + 1
        return list(request.ids[start : start + num_pairs])


class HeadDrafter(HiddenReader):
    """Drafts with `model`, whose pools are those of `cache`; `name` is the drafter's."""

    def __init__(
        self,
        model: HeadModel,
        cache: CacheManager,
        max_context: int,
        threads: StepThreads | None = None,
        name: str = "mtp",
    ) -> None:
        self.name = name
        self.cache = cache
        self.chain = KvChain(cache)
        self._model = model
        self._runner = Runner(model, cache.block_size, threads=threads)
        self._max_context = min(max_context, cache.max_tokens)
        self._states: dict[Request, _HeadState] = {}

    def read_hidden(self, request: Request, rows: torch.Tensor) -> None:
        start = request.num_computed
        state = self._states.get(request)
        if state is None or state.end < start:
            if state is not None:
                self._leave(request)
            state = self._states[request] = self._begun(request, start)
        # A step that is run again has the same hidden states.
        new = rows[state.end - start :]
        if not len(new):
            return
        state.add(new)
        if request.is_decoding and state.num_hidden > _MOST_WAITING:
            self._leave(request)
            first, table = state.end - _MOST_ALONG, self.cache.match([-1])
            newest = self._states[request] = _HeadState(table, first, 0)
            newest.add(state.hidden[-_MOST_ALONG:].clone())

    def _begun(self, request: Request, start: int) -> _HeadState:
        """Return the state of a request whose hidden states are known from `start` on."""
        for other, state in self._states.items():
            # A sibling's last pair of the prompt has a token of its own: that pair is left out.
            is_sibling = other.request_id == request.request_id and not state.first
            if is_sibling and state.num_computed >= start - 1 > 0:
                return _HeadState(self.cache.fork(state.table, start - 1), 1, start - 1)
        table = self.cache.match([*request.ids[1 : start + 1], -1])
        return _HeadState(table, start - table.cached_len, table.cached_len)

    def offer(self, request: Request, most: int) -> Offer | None:
        state = self._states.get(request)
        most = min(most, self._model.most_guesses, self._max_context - len(request.ids))
        if state is None or most < 1 or state.end != len(request.ids) - 1:
            return None
        return Offer("head", most, is_free=False) if state.num_hidden else None

    def catch_up(self, wanted: Sequence[DraftOrder]) -> None:
        for request, state in ((want.request, self._states[want.request]) for want in wanted):
            if state.num_hidden > _MOST_ALONG:
                self._read(request, state, state.num_hidden - 1)

    def propose(self, wanted: Sequence[DraftOrder]) -> list[Sequence[int]]:
        drafts: dict[Request, list[int]] = {}
        for want in wanted:
            state = self._states[want.request]
            end = state.num_computed + state.num_hidden + want.num_tokens - 1
            if self.cache.reserve(state.table, state.num_computed, end):
                drafts[want.request] = []
        due = [want.request for want in wanted if want.request in drafts]
        self._model.guess_below(max(map(self._most_ids, due), default=0))
        hidden = self._draft_first(due, drafts) if due else {}
        for length in range(1, max(want.num_tokens for want in wanted)):
            due = [w.request for w in wanted if w.num_tokens > length and w.request in drafts]
            hidden = self._draft_one_more(due, drafts, hidden) if due else {}
        for request in drafts:
            state = self._states[request]
            self.cache.rewind(state.table, state.num_computed)
        return [drafts.get(want.request, []) for want in wanted]

    def _most_ids(self, request: Request) -> int:
        """Return the id below which all of the request's next tokens are guessed."""
        newest = sorted(request.ids[-_NEWEST:])
        vocab_size = self._model.loaded.spec.vocab_size
        return max(vocab_size // 4, newest[int(_SHARE_OF_IDS * (len(newest) - 1))] + 1)

    def _draft_first(
        self, due: Sequence[Request], drafts: dict[Request, list[int]]
    ) -> dict[Request, torch.Tensor]:
        """Compute the pairs that are known, and draw a token after the last of each request.

        Returns the head's own hidden states there.
        """
        pieces, given = [], []
        for request in due:
            state = self._states[request]
            tokens = state.tokens(request, state.num_hidden)
            blocks = state.table.blocks
            pieces.append(SequencePiece(tokens, state.num_computed, blocks, num_logit_rows=1))
            given.append(state.hidden)
        found = self._drawn(pieces, given, due, drafts)
        for request in due:
            state = self._states[request]
            self._note_computed(request, state, state.num_hidden)
        return found

    def _draft_one_more(
        self,
        due: Sequence[Request],
        drafts: dict[Request, list[int]],
        hidden: dict[Request, torch.Tensor],
    ) -> dict[Request, torch.Tensor]:
        """Draw a token after each request's newest draft, from the head's own hidden state."""
        pieces = []
        for request in due:
            state, drafted = self._states[request], drafts[request]
            start = state.num_computed + len(drafted) - 1
            pieces.append(SequencePiece([drafted[-1]], start, state.table.blocks, 1))
        return self._drawn(pieces, [hidden[request] for request in due], due, drafts)

    def _drawn(
        self,
        pieces: Sequence[SequencePiece],
        given: Sequence[torch.Tensor],
        due: Sequence[Request],
        drafts: dict[Request, list[int]],
    ) -> dict[Request, torch.Tensor]:
        logits, hidden = self._run(pieces, given)
        device = self._runner.device
        tokens = sample(logits, [sampling_row(r, drafts[r], device) for r in due])
        for request, token in zip(due, tokens, strict=True):
            drafts[request].append(token)
        ends = accumulate(len(piece.token_ids) for piece in pieces)
        return {r: hidden[end - 1 : end] for r, end in zip(due, ends, strict=True)}

    def _run(
        self, pieces: Sequence[SequencePiece], given: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits that the pieces ask for, and the head's hidden states of all rows."""
        assert self._model.hidden is not None
        self._model.hidden.clear()
        self._model.give(torch.cat(list(given)) if given[1:] else given[0])
        logits = self._runner.run_pieces(pieces)
        return logits, self._model.hidden.take()

    def _note_computed(self, request: Request, state: _HeadState, num_pairs: int) -> None:
        state.note_computed(num_pairs)
        if not state.first:
            self.cache.commit(state.table, request.ids[1:], state.num_computed)

    def update(self, requests: Sequence[Request], seconds: float) -> None:
        running = {request for request in requests if request.state is State.RUNNING}
        for request, state in list(self._states.items()):
            if request not in running:
                is_near = not state.first and state.num_hidden <= _MOST_ALONG
                if request.state is State.FINISHED and is_near:
                    self._read(request, state, state.num_hidden)  # for the next turn
                self._leave(request)
                continue
            if request.is_decoding or self._read(request, state, state.num_hidden - 1):
                continue
            self._leave(request)

    def _read(self, request: Request, state: _HeadState, most: int) -> bool:
        """Compute pairs whose tokens are known, at most so many; false if there is no room."""
        start = state.num_computed
        tokens = state.tokens(request, most)
        if not tokens:
            return True
        if not self.cache.reserve(state.table, start, start + len(tokens)):
            return False
        piece = SequencePiece(tokens, start, state.table.blocks, num_logit_rows=0)
        self._run([piece], [state.hidden[: len(tokens)]])
        self._note_computed(request, state, len(tokens))
        return True

    def _leave(self, request: Request) -> None:
        """Drop a request's state; the KV of whole contexts stays cached."""
        state = self._states.pop(request)
        num_kept = 0 if state.first else state.num_computed
        self.cache.release(state.table, request.ids[1 : 1 + num_kept])

    def forget(self, contexts: Sequence[tuple[Sequence[int], int]]) -> WhenWritten:
        pairs = [(tuple(ids[1:]), max(0, num_kept - 1)) for ids, num_kept in contexts]
        return self.chain.forget(pairs)

    def close(self) -> None:
        for request in list(self._states):
            self._leave(request)
        self.chain.close()
