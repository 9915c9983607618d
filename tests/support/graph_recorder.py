"""Stands in for CUDA graphs where there is no GPU: a replay runs the recorded step again.

It does so over whatever the step's tensors hold by then, and over nothing else: no lengths, ids or
tables of a later step reach it by another way, as none reach a graph.
"""

from collections.abc import Callable

from kvchat.model.gpu.graphs import StepOutput

Step = Callable[[], StepOutput]


class Recorder:
    """Captures by remembering. All replays share one output, which the next overwrites."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0
        self._output: StepOutput | None = None

    def capture(self, step: Step) -> Step:
        step()
        self.num_captured += 1

        def replay() -> StepOutput:
            self.num_replayed += 1
            # What the last replay returned is gone, as it is on a GPU.
            if self._output is not None:
                self._output.logits.fill_(float("nan"))
                self._output.tokens.fill_(-7)
            self._output = step()
            return self._output

        return replay


class Broken(Recorder):
    """Fails to capture, or captures something that does not do as the step does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def capture(self, step: Step) -> Step:
        if self._how == "raises":
            self.num_captured += 1
            raise RuntimeError("operation not permitted when stream is capturing")
        if self._how == "same numbers for ever":
            once = step()
            frozen = StepOutput(once.logits.clone(), once.tokens.clone())
            return lambda: frozen
        replay = super().capture(step)
        num_left = [2]  # the proof, and one step more

        def fails_later() -> StepOutput:
            num_left[0] -= 1
            if num_left[0] < 0:
                raise RuntimeError("an illegal memory access was encountered")
            return replay()

        return fails_later
