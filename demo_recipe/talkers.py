"""What can be evaluated: anything that replies to chat histories, and a shipped model doing so."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from demo_recipe.optimiser import best_device
from demo_recipe.tokenizer import ChatTokenizer

BATCH_TOKENS = 24_576  # prompt tokens of one batch, padding included
MOST_ROWS = 128
MAX_NEW_TOKENS = 160

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: text, ids without the end token, and whether the model ended it itself."""

    text: str
    ids: list[int]
    is_finished: bool


class Talker(Protocol):
    """Replies to chat histories."""

    def reply(self, histories: Sequence[list[Message]]) -> list[Reply]:
        """One reply to each history, which ends with a user message."""


class ModelTalker:
    """Greedy replies of a shipped model, which transformers runs in float32.

    model   a `LlamaForCausalLM`; `tokenizer` makes its prompts
    """

    def __init__(self, model: Any, tokenizer: ChatTokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def load(cls, folder: Path) -> "ModelTalker":
        """A shipped model: a folder of transformers' files with the tokenizer."""
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return cls(model.to(best_device()), ChatTokenizer.load(folder))

    def reply(self, histories: Sequence[list[Message]]) -> list[Reply]:
        prompts = [self.tokenizer.prompt(history) for history in histories]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        replies: dict[int, Reply] = {}
        while order:  # the longest first, in batches of similar length
            count = max(1, min(MOST_ROWS, BATCH_TOKENS // len(prompts[order[-1]])))
            batch, order = order[-count:], order[:-count]
            rows = self._complete([prompts[index] for index in batch])
            replies.update(zip(batch, map(self._reply, rows), strict=True))
        return [replies[index] for index in range(len(prompts))]

    def _complete(self, prompts: list[list[int]]) -> list[list[int]]:
        """Generated ids of one batch; a row goes on behind its end token with padding."""
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.full((len(prompts), longest), self.tokenizer.pad_id)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        ids = ids.to(self.model.device)
        mask = (ids != self.tokenizer.pad_id).long()
        generated = self.model.generate(
            ids, attention_mask=mask, max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        rows: list[list[int]] = generated[:, longest:].tolist()
        return rows

    def _reply(self, row: list[int]) -> Reply:
        end = self.tokenizer.end_id
        ids = row[: row.index(end)] if end in row else row
        return Reply(self.tokenizer.decode(ids), ids, end in row)
