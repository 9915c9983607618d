"""Where the KV of every turn of a conversation is, and what continuing from there costs."""

from dataclasses import dataclass

from kvchat.chat.conversation import Conversation
from kvchat.chat.engine_queries import EngineQueries
from kvchat.core.cost import Cost
from kvchat.core.types import Tier


@dataclass(frozen=True, slots=True)
class TurnCost:
    """One turn: the slowest tier that holds its KV, None if it has to be computed; and the cost of
    the next message after it.
    """

    tier: Tier | None
    cost: Cost


async def turn_costs(queries: EngineQueries, conversation: Conversation) -> dict[int, TurnCost]:
    """Return the costs of all turns by their ids; empty while they cannot be known.

    One lookup a branch: the turns on a path share its tokens.
    """
    leaves = [turn.turn_id for turn in conversation.leaves()]
    contexts = [conversation.context_ids(leaf) for leaf in leaves]
    places = await queries.locate(contexts) if contexts else None
    costs: dict[int, TurnCost] = {}
    for leaf, each in zip(leaves, places or (), strict=False):
        end = 0
        for turn in conversation.path(leaf):
            start, end = end, end + len(turn.token_ids)
            if turn.turn_id not in costs:
                costs[turn.turn_id] = TurnCost(each.tier_of(start, end), each.cost(end))
    return costs
