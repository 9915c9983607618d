"""What can be evaluated: anything that replies to chat histories, and our own network doing so."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from demo_recipe.checkpoint import load_network
from demo_recipe.decode import Decoding, complete
from demo_recipe.network import Network
from demo_recipe.tokenizer import ChatTokenizer

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: text, ids without the end token, and whether the model ended it itself."""

    text: str
    ids: list[int]
    is_finished: bool


class Talker(Protocol):
    """Replies to chat histories; implemented by the network here and by kvchat's engine."""

    def reply(self, histories: Sequence[list[Message]]) -> list[Reply]:
        """One reply to each history, which ends with a user message."""


class NetworkTalker:
    """Greedy replies of a network."""

    def __init__(self, network: Network, tokenizer: ChatTokenizer) -> None:
        self.network, self.tokenizer = network, tokenizer
        self._how = Decoding(end_id=tokenizer.end_id)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> "NetworkTalker":
        """A shipped model or a checkpoint whose folder also holds the tokenizer."""
        return cls(load_network(folder).to(device), ChatTokenizer.load(folder))

    def reply(self, histories: Sequence[list[Message]]) -> list[Reply]:
        prompts = [self.tokenizer.prompt(history) for history in histories]
        return [
            Reply(self.tokenizer.decode(done.ids), done.ids, done.is_finished)
            for done in complete(self.network, prompts, self._how)
        ]
