"""GraphRunner: runs small steps as captured graphs and reports why a step has none.

A decode step of a few rows is hundreds of kernels, each as short as its own launch. A graph
launches all of them at once, including the sampler. A shape is captured after it was requested a
few times, and each graph is compared with the eager step it was captured from. A step without a
graph runs eagerly.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeVar

import torch

from kvchat.core.errors import in_one_line
from kvchat.core.stats import GraphStatus
from kvchat.model.batch import SequencePiece, rows_of_logits
from kvchat.model.gpu.cuda_graph import NotGraphable, trapping_host_reads
from kvchat.model.gpu.step_buffers import StepBuffers, StepShape
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.launch import on_device
from kvchat_kernels.sampler import RowDraw, sample_tokens

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_ROW_BUCKETS = (1, 2, 4, 8, 16)
# One token, and the verification of up to 1, 2, 4, 8 and 16 drafts.
_QUERY_BUCKETS = (1, 2, 3, 5, 9, 17)
_MAX_TOKENS = 64
SHAPES = tuple(
    sorted(
        (
            StepShape(num_rows, query_len)
            for num_rows, query_len in product(_ROW_BUCKETS, _QUERY_BUCKETS)
            if num_rows * query_len <= _MAX_TOKENS
        ),
        key=lambda shape: (shape.num_tokens, shape.query_len),
    )
)
# A capture costs a few eager steps, so only a shape that recurs is worth one.
_WANTED_OFTEN = 3
_MAX_FAILURES = 2
# The largest difference, relative to the largest logit. A replay runs the same kernels as the eager
# step; only sums in a nondeterministic order may differ.
_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The output of a captured step for each of its tokens, padding included.

    logits   [num_tokens, vocab_size] float32
    tokens   [num_tokens] int64, drawn from the logits; -1 where a logit is NaN
    """

    logits: torch.Tensor
    tokens: torch.Tensor


class Capturing(Protocol):
    """Captures a step on a device."""

    def capture(self, step: Callable[[], _T]) -> Callable[[], _T]:
        """Return a function that runs `step` again, on the current content of its tensors.

        Its output is valid until the next replay of any step captured here.
        """
        ...


class GraphRunner:
    """Runs steps of `model` as graphs. Not thread-safe: one thread owns it and the model's pools.

    It owns `scratch_block` of the pools; padding tokens write there. Contexts have at most
    `max_context` tokens. `window_blocks` as of `build_batch`.
    """

    def __init__(
        self,
        model: PagedModel,
        block_size: int,
        max_context: int,
        scratch_block: int,
        capturing: Capturing,
        shapes: Sequence[StepShape] = SHAPES,
        clock: Callable[[], float] = time.perf_counter,
        window_blocks: torch.Tensor | None = None,
    ) -> None:
        self._model = model
        self._capturing = capturing
        self._shapes = shapes
        self._clock = clock
        places = scratch_block, model.device, window_blocks
        self._buffers = StepBuffers(shapes, block_size, max_context, *places)
        self._replays: dict[StepShape, Callable[[], StepOutput]] = {}
        self._refused: set[StepShape] = set()
        self._num_wanted: Counter[StepShape] = Counter()
        self._was_tried = False
        self._trouble = ""
        self._is_off = False
        self._num_replayed = 0
        self._num_eager = 0
        self._capture_s = 0.0

    def status(self) -> GraphStatus:
        """Return counts, the capture time in seconds and the last problem, for display."""
        return GraphStatus(
            num_captured=len(self._replays),
            num_replayed=self._num_replayed,
            num_eager=self._num_eager,
            capture_s=self._capture_s,
            trouble=self._trouble,
        )

    def run(self, pieces: Sequence[SequencePiece]) -> torch.Tensor | None:
        """Run a step by its graph; return None if there is none and it must run eagerly.

        Returns [num_rows, vocab_size] float32: the logits the pieces ask for, in order, owned by
        the caller.
        """
        best, captured = self._shapes_for(pieces)
        self._note(best, captured)
        if captured is None:
            return None
        return self._replay(captured, pieces, (), lambda output: output.logits)

    def draw(
        self,
        pieces: Sequence[SequencePiece],
        draws: Sequence[RowDraw | None],
        fed: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Run a step as `run` does, and draw a token from each row of logits in the same graph.

        `draws` has one entry per piece, None for a piece without logits. `fed`, [num_pieces] int64
        on the device, has the token ids of pieces of one token each, where the host does not know
        them yet. Returns [num_rows] int64, as `sample_tokens` does, owned by the caller. Returns
        None if there is no graph, and does not count that; the caller then calls `run`, which
        counts the missing shape.
        """
        best, captured = self._shapes_for(pieces)
        if captured is None:
            return None
        self._note(best, captured)
        return self._replay(captured, pieces, draws, lambda output: output.tokens, fed)

    @torch.inference_mode()
    def _replay(
        self,
        shape: StepShape,
        pieces: Sequence[SequencePiece],
        draws: Sequence[RowDraw | None],
        take: Callable[[StepOutput], torch.Tensor],
        fed: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        try:
            self._buffers.fill(pieces, shape, draws, fed)
            rows = _wanted_rows(take(self._replays[shape]()), pieces)
        except Exception as error:  # the eager pass may still succeed, or raises the real error
            self._give_up(f"a replay failed: {in_one_line(error)}")
            self._num_eager += 1
            return None
        self._num_replayed += 1
        return rows

    def _shapes_for(
        self, pieces: Sequence[SequencePiece]
    ) -> tuple[StepShape | None, StepShape | None]:
        """Return the smallest shape that holds the pieces, and the smallest captured one."""
        if self._is_off or not self._buffers.has_room_for(pieces):
            return None, None
        lengths = [len(piece.token_ids) for piece in pieces]
        fitting = [shape for shape in self._shapes if shape.holds(lengths)]
        captured = next((shape for shape in fitting if shape in self._replays), None)
        return (fitting[0] if fitting else None), captured

    def _note(self, best: StepShape | None, captured: StepShape | None) -> None:
        """Count a requested shape that has no graph of its own."""
        if best is None or best == captured:
            return
        if self._captures(best):
            self._num_wanted[best] += 1
        self._num_eager += captured is None

    def _captures(self, shape: StepShape) -> bool:
        return shape not in self._refused and len(self._refused) < _MAX_FAILURES

    def capture_wanted(self) -> bool:
        """Capture one shape that was requested a few times; return whether there was one.

        Takes as long as a few steps, so call it when no request waits for its first token.
        """
        due = [shape for shape, count in self._num_wanted.items() if count >= _WANTED_OFTEN]
        if not due:
            return False
        # The largest first: the smaller graphs then reuse its memory.
        shape = max(due, key=lambda shape: shape.num_tokens)
        del self._num_wanted[shape]
        began_s = self._clock()
        try:
            self._replays[shape] = self._capture(shape)
        except NotGraphable as error:
            self._give_up(f"this model runs eagerly: {error}")
        except Exception as error:  # model code and drivers raise any type
            self._refused.add(shape)
            self._trouble = f"no graph of {shape.num_tokens} rows: {in_one_line(error)}"
            _log.warning("capture failed shape=%s", shape, exc_info=error)
            if len(self._refused) >= _MAX_FAILURES:
                self._num_wanted.clear()  # graphs captured earlier stay in use
        else:
            seconds = self._clock() - began_s
            self._capture_s += seconds
            _log.info("captured shape=%s seconds=%.3f", shape, seconds)
        return True

    @torch.inference_mode()
    def _capture(self, shape: StepShape) -> Callable[[], StepOutput]:
        buffers, batch = self._buffers, self._buffers.batch(shape)

        def step() -> StepOutput:
            logits = self._model.forward(batch)
            return StepOutput(logits, sample_tokens(logits, buffers.sampler_rows(shape)))

        buffers.fill((), shape)
        if not self._was_tried:
            with trapping_host_reads():
                step()
            self._was_tried = True
        replay = self._capturing.capture(step)
        # Check with other tokens, positions, slots, lengths and sampling settings than at capture:
        # the graph must not have frozen any of them.
        buffers.fill_for_check(shape)
        expected = self._model.forward(batch)
        output = replay()
        _require_equal(output.logits.clone(), expected)
        if not torch.equal(
            output.tokens, sample_tokens(output.logits, buffers.sampler_rows(shape))
        ):
            raise RuntimeError("a replay draws other tokens than sampling its logits eagerly")
        return replay

    def _give_up(self, reason: str) -> None:
        """Turn graphs off: run every later step eagerly."""
        _log.warning("graphs are off: %s", reason)
        self._trouble, self._is_off = reason, True
        self._replays.clear()
        self._num_wanted.clear()


def _wanted_rows(all_rows: torch.Tensor, pieces: Sequence[SequencePiece]) -> torch.Tensor:
    """Return a copy of the rows the pieces ask for, out of `all_rows` [num_tokens, ...]."""
    rows = rows_of_logits(pieces)
    if rows == list(range(len(rows))):
        return all_rows[: len(rows)].clone()
    return all_rows[on_device(rows, torch.int64, all_rows.device)]


def _require_equal(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise RuntimeError if a replay's logits differ from the eager step's."""
    difference = float((logits - expected).abs().max())
    largest = float(expected.abs().max())
    if not difference <= _TOLERANCE * largest:  # `not <=`, so that NaN fails too
        raise RuntimeError(f"a replay differs by {difference:.3g} from logits of {largest:.3g}")
