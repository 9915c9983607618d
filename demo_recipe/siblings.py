"""What a second candidate at a drafted position could bring, beside a longer chain: an experiment.

Replays greedy speculation on recorded answers, from the draft's rank of each token that came. Knows
the draft and recorded sessions; runs no engine, and counts no time: compare shapes of equal rows,
for rows are what verifying costs.

    python -m demo_recipe.siblings [SESSIONS]
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from demo_recipe.checkpoint import load_network
from demo_recipe.network import Network, Rows
from demo_recipe.paths import HOME
from kvchat.chat.conversation import Role
from kvchat.chat.session_file import read_session


@dataclass(frozen=True, slots=True)
class Shape:
    """A draft: a chain of `length` tokens, and a second candidate beside its first `num_siblings`.

    A sibling has no successors: where it is right, what follows it is the bonus token.
    """

    length: int
    num_siblings: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the verifying step."""
        return 1 + self.length + self.num_siblings

    def __str__(self) -> str:
        return f"{self.length}+{self.num_siblings}"


SHAPES = (Shape(4), Shape(4, 1), Shape(5), Shape(4, 4), Shape(8))


def tokens_a_step(ranks: Sequence[int], shape: Shape) -> float:
    """Return how many of the answer's tokens a verifying step yields on average, bonus included.

    `ranks` are the draft's ranks of the answer's tokens, 0 for the one it thinks likeliest.
    """
    at = num_steps = 0
    while at < len(ranks):
        num_right = 0
        for depth, rank in enumerate(ranks[at : at + shape.length]):
            if rank == 0:
                num_right += 1
                continue
            num_right += rank == 1 and depth < shape.num_siblings
            break
        at += num_right + 1
        num_steps += 1
    return len(ranks) / num_steps


@torch.inference_mode()
def ranks_of(draft: Network, ids: Sequence[int], is_answer: Sequence[bool]) -> list[int]:
    """Return the draft's rank of every token of a context that is an answer's."""
    row = torch.tensor([list(ids)])
    places = torch.arange(len(ids))[None]
    rows = Rows(row, places, torch.ones_like(row), row, torch.ones(row.shape))
    logits = draft.logits(draft.hidden(rows, draft.model.embed_tokens.weight.dtype)[0, :-1])
    came = logits.gather(-1, row[0, 1:, None])
    ranks = (logits > came).sum(-1).tolist()
    return [rank for rank, counts in zip(ranks, is_answer[1:], strict=True) if counts]


def _recorded(path: Path) -> tuple[list[int], list[bool]]:
    turns = read_session(path.read_bytes(), path.stem).conversation.path()
    ids = [token for turn in turns for token in turn.token_ids]
    is_answer = [turn.role is Role.ASSISTANT for turn in turns for _ in turn.token_ids]
    return ids, is_answer


def main(sessions: Path) -> None:
    draft = load_network(HOME / "draft")
    rows = " ".join(f"{f'{shape} ({shape.num_rows})':>9}" for shape in SHAPES)
    print(f"{'':16} tokens  first second {rows}")  # noqa: T201
    for path in sorted(sessions.glob("*.jsonl")):
        ranks = ranks_of(draft, *_recorded(path))
        shares = [sum(rank == wanted for rank in ranks) / len(ranks) for wanted in (0, 1)]
        lengths = " ".join(f"{tokens_a_step(ranks, shape):9.2f}" for shape in SHAPES)
        print(f"{path.stem:16} {len(ranks):6} {shares[0]:6.1%} {shares[1]:6.1%} {lengths}")  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "sessions"))
