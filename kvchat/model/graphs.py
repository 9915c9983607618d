"""GraphRunner: runs small steps as captured graphs, and says why where it does not.

A decode of a few rows is hundreds of kernels that each take no longer than their launch; a graph
launches all of them at once, the sampler's too. Shapes are captured once they have been wanted,
each is compared with the step it was captured of, and whatever has no graph is left to the eager
forward pass. Knows shapes and when to capture; the device's way to capture is given.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeVar

import torch

from kvchat.core.stats import GraphStatus
from kvchat.model.batch import SequencePiece
from kvchat.model.cuda_graph import NotGraphable, trapping_host_reads
from kvchat.model.paged_model import PagedModel
from kvchat.model.step_buffers import StepBuffers, StepShape
from kvchat_kernels.sampler import RowDraw, sample_tokens
from kvchat_kernels.sending import on_device

_T = TypeVar("_T")
_log = logging.getLogger(__name__)

_ROW_BUCKETS = (1, 2, 4, 8, 16)
# A token alone, and verifications of up to 1, 2, 4, 8 and 16 drafts.
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
# A capture costs a few eager steps: it has to be for something that comes again.
_WANTED_OFTEN = 3
_MAX_FAILURES = 2
# A replay runs the kernels of the step it was captured of. Only sums whose order is left to chance
# may differ.
_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a captured step computes for each of its tokens, padding included.

    logits   [num_tokens, vocab_size] float32
    tokens   [num_tokens] int64, drawn from them; -1 where a logit is not a number
    """

    logits: torch.Tensor
    tokens: torch.Tensor


class Capturing(Protocol):
    """A device's way to capture a step."""

    def capture(self, step: Callable[[], _T]) -> Callable[[], _T]:
        """Return what runs `step` again, over whatever its tensors hold by then.

        What that returns holds until anything captured here is run again.
        """
        ...


class GraphRunner:
    """Runs steps of `model` by graphs. One thread owns it, and the model's pools with it.

    `scratch_block` of the pools belongs to it: padding writes there. No context is longer than
    `max_context` tokens.
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
    ) -> None:
        self._model = model
        self._capturing = capturing
        self._shapes = shapes
        self._clock = clock
        self._buffers = StepBuffers(shapes, block_size, max_context, scratch_block, model.device)
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
        """Return counts for people."""
        return GraphStatus(
            num_captured=len(self._replays),
            num_replayed=self._num_replayed,
            num_eager=self._num_eager,
            capture_s=self._capture_s,
            trouble=self._trouble,
        )

    def run(self, pieces: Sequence[SequencePiece]) -> torch.Tensor | None:
        """Run a step if there is a graph for it; None where it is to be run eagerly.

        Returns [num_rows, vocab_size] float32, the logits the pieces ask for, in order, owned by
        the caller.
        """
        best, captured = self._shapes_for(pieces)
        self._note(best, captured)
        if captured is None:
            return None
        return self._replay(captured, pieces, (), lambda output: output.logits)

    def draw(
        self, pieces: Sequence[SequencePiece], draws: Sequence[RowDraw | None]
    ) -> torch.Tensor | None:
        """Run a step as `run` does, and draw a token from each row of logits, in the same graph.

        `draws` say how, piece by piece; None for one that asks for no logits. Returns [num_rows]
        int64, owned by the caller, as `sample_tokens` does. Where there is no graph for it, `run`
        is to be asked, which takes that down.
        """
        best, captured = self._shapes_for(pieces)
        if captured is None:
            return None
        self._note(best, captured)
        return self._replay(captured, pieces, draws, lambda output: output.tokens)

    @torch.inference_mode()
    def _replay(
        self,
        shape: StepShape,
        pieces: Sequence[SequencePiece],
        draws: Sequence[RowDraw | None],
        take: Callable[[StepOutput], torch.Tensor],
    ) -> torch.Tensor | None:
        try:
            self._buffers.fill(pieces, shape, draws)
            rows = _wanted_rows(take(self._replays[shape]()), pieces)
        except Exception as error:  # the eager pass can still answer, or say what is wrong
            self._give_up(f"a replay failed: {_line(error)}")
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
        """Take in which shape was wanted, and which one there was."""
        if best is None or best == captured:
            return
        if self._captures(best):
            self._num_wanted[best] += 1
        self._num_eager += captured is None

    def _captures(self, shape: StepShape) -> bool:
        return shape not in self._refused and len(self._refused) < _MAX_FAILURES

    def capture_wanted(self) -> bool:
        """Capture one shape that was wanted a few times, if any; tell whether one was.

        Takes as long as a few steps: for a moment at which no request waits for a first token.
        """
        due = [shape for shape, count in self._num_wanted.items() if count >= _WANTED_OFTEN]
        if not due:
            return False
        # Of several the largest, in whose memory the others then find room.
        shape = max(due, key=lambda shape: shape.num_tokens)
        del self._num_wanted[shape]
        began_s = self._clock()
        try:
            self._replays[shape] = self._capture(shape)
        except NotGraphable as error:
            self._give_up(f"this model runs eagerly: {error}")
        except Exception as error:  # a model's own code and a driver can fail with anything
            self._refused.add(shape)
            self._trouble = f"no graph of {shape.num_tokens} rows: {_line(error)}"
            _log.warning("capture failed shape=%s", shape, exc_info=error)
            if len(self._refused) >= _MAX_FAILURES:
                self._num_wanted.clear()  # what has been captured goes on being replayed
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
        # Other tokens, positions, slots, lengths and ways to draw than at capture: none may have
        # been baked in.
        buffers.fill_for_check(shape)
        expected = self._model.forward(batch)
        output = replay()
        _require_equal(output.logits.clone(), expected)
        if not torch.equal(
            output.tokens, sample_tokens(output.logits, buffers.sampler_rows(shape))
        ):
            raise RuntimeError("a replay draws other tokens from its logits")
        return replay

    def _give_up(self, reason: str) -> None:
        """Run everything eagerly from now on."""
        _log.warning("graphs are off: %s", reason)
        self._trouble, self._is_off = reason, True
        self._replays.clear()
        self._num_wanted.clear()


def _wanted_rows(all_rows: torch.Tensor, pieces: Sequence[SequencePiece]) -> torch.Tensor:
    """Copy the rows that the pieces ask for out of those of all tokens, [num_tokens, ...]."""
    rows: list[int] = []
    start = 0
    for piece in pieces:
        end = start + len(piece.token_ids)
        rows.extend(range(end - piece.num_logit_rows, end))
        start = end
    if rows == list(range(len(rows))):
        return all_rows[: len(rows)].clone()
    return all_rows[on_device(rows, torch.int64, all_rows.device)]


def _require_equal(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise RuntimeError where a replay computes something else than the step it was made of."""
    difference = float((logits - expected).abs().max())
    largest = float(expected.abs().max())
    if not difference <= _TOLERANCE * largest:  # nor where it is no number
        raise RuntimeError(f"a replay differs by {difference:.3g} from logits of {largest:.3g}")


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
