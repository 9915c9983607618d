"""A model over a table that lacks tokens, beside the shared table of the same context.

The oracle is a plain cache of transformers from which the same tokens were removed, with explicit
positions and masks. Called where Triton interprets, on a CPU and on a CUDA device.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from kvchat.core.config import ModelConfig
from kvchat.model.batch import SequencePiece, build_batch
from kvchat.model.checkpoint.source import find_model
from kvchat.model.loader import LoadedModel, load_model
from kvchat.model.paged_model import PagedModel
from kvchat_kernels.slot_positions import EMPTY, SlotPositions
from support.architectures import GATHERED, SUPPORTED
from support.checkpoints import save_checkpoint, tiny_model

BLOCK = 8
NUM_READ = 58
# Within a block, two whole blocks, parts of two blocks, and some in the windows of later tokens.
DROPPED = frozenset({3, 4, 5, *range(8, 24), *range(30, 38), 52, 53, 55})
KEPT = [position for position in range(NUM_READ) if position not in DROPPED]
# Its table: the blocks that hold any of KEPT, and the positions of their slots.
KEPT_BLOCKS = sorted({position // BLOCK for position in KEPT})
_FIRST = [
    position if position in KEPT else EMPTY
    for index in KEPT_BLOCKS
    for position in range(index * BLOCK, min((index + 1) * BLOCK, NUM_READ))
]
KEPT_SLOTS = SlotPositions(tuple(_FIRST), NUM_READ)
# The text goes on two positions later, in chunks and single tokens.
NEXT, STEPS = 60, (5, 1, 17, 1)
MODELS = {
    **{name: SUPPORTED[name] for name in ("llama", "mistral, window", "gemma2, softcap")},
    **{name: SUPPORTED[name] for name in ("gpt_oss, sinks", "gemma3, mixed windows")},
    "llama4, chunks": (
        "llama4_text",
        {**GATHERED["llama4, temperature tuning"][1], "attn_temperature_tuning": False},
    ),
}


def random_ids(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


READ, MORE = random_ids(NUM_READ, 1), random_ids(sum(STEPS), 2)


@dataclass(frozen=True)
class Logits:
    """Of each token of MORE, after all of READ and after what is left of it; [tokens, vocab]."""

    shared: torch.Tensor
    private: torch.Tensor


def check_private_table(
    name: str, directory: Path, device: str = "cpu", by_modules: bool = False, start: int = NEXT
) -> None:
    """Logits over both tables are those of the oracle; the private one goes on at `start`."""
    model_type, settings = MODELS[name]
    reference = tiny_model(model_type, **settings)
    source = find_model(str(save_checkpoint(directory, reference)))
    config = ModelConfig(device=device, dtype="float32")
    loaded = load_model(source, config, 128, lambda _: None)

    ours = paged_logits(loaded, by_modules, start)

    for found, kept, next_position in (
        (ours.shared, list(range(NUM_READ)), NUM_READ),
        (ours.private, KEPT, start),
    ):
        expected = plain_logits(reference, kept, next_position)
        assert (found.cpu() - expected).abs().max() < 1e-4 * expected.abs().max()
    assert (ours.shared - ours.private).abs().max() > 0.1, "the dropped tokens made no difference"


@torch.inference_mode()
def plain_logits(reference: PreTrainedModel, kept: list[int], start: int) -> torch.Tensor:
    """Return the logits of MORE, from position `start` on, over these tokens of READ."""
    cache = thinned_cache(reference, kept)
    known, logits, first = list(kept), [], 0
    for count in STEPS:
        positions = list(range(start + first, start + first + count))
        known += positions
        output = reference(
            torch.tensor([MORE[first : first + count]]),
            position_ids=torch.tensor([positions]),
            attention_mask=_masks(reference, positions, known),
            past_key_values=cache,
        )
        logits.append(output.logits[0])
        first += count
    return torch.cat(logits)


def thinned_cache(
    reference: PreTrainedModel, kept: list[int], read: list[int] = READ
) -> DynamicCache:
    """Return a cache that has read some ids and then lost all of them but these places."""
    cache = DynamicCache()
    reference(torch.tensor([read]), past_key_values=cache)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    return cache


def greedy_over(
    reference: PreTrainedModel, cache: DynamicCache, next_ids: list[int], start: int, count: int
) -> list[int]:
    """Return the greedy answer to `next_ids`, which stand at the positions from `start` on."""
    tokens: list[int] = []
    while len(tokens) < count:
        positions = torch.arange(start, start + len(next_ids))[None]
        output = reference(torch.tensor([next_ids]), position_ids=positions, past_key_values=cache)
        start, next_ids = start + len(next_ids), [int(output.logits[0, -1].argmax())]
        tokens += next_ids
    return tokens


def _masks(
    reference: PreTrainedModel, queries: list[int], keys: list[int]
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return the model's masks over positions; a dict where its kinds of layers have two."""
    config = reference.config
    query, key = torch.tensor(queries)[:, None], torch.tensor(keys)[None]
    window, chunk = (
        getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")
    )
    masks = {"full_attention": query >= key}
    if window is not None:
        masks["sliding_attention"] = masks["full_attention"] & (query - key < window)
    if chunk is not None:
        masks["chunked_attention"] = masks["full_attention"] & (query // chunk == key // chunk)
    lowest = torch.finfo(torch.float32).min
    added = {
        name: torch.zeros(mask.shape).masked_fill_(~mask, lowest)[None, None]
        for name, mask in masks.items()
    }
    if config.model_type == "mistral":
        return added["sliding_attention"]
    return added if len(added) > 1 else added["full_attention"]


def paged_logits(loaded: LoadedModel, by_modules: bool, start: int) -> Logits:
    """Return the logits of MORE over both tables, which run in the same steps.

    The private table has copies of the blocks with holes, and shares the others. Slots without a
    token are NaN.
    """
    shared = list(range(1, 13))
    copies = {index: 13 + number for number, index in enumerate((0, 3, 4, 6, 7))}
    private = [copies.get(index, shared[index]) for index in KEPT_BLOCKS] + [18, 19, 20]
    pools = [
        tuple(
            torch.full((21, BLOCK, layer.num_kv_heads, dim), float("nan"), device=loaded.device)
            for dim in (layer.key_dim, layer.value_dim)
        )
        for layer in loaded.spec.storing_layers
    ]
    model = PagedModel(loaded, pools)  # type: ignore[arg-type]
    if by_modules:
        model.compiled = None
    else:
        assert loaded.device.type != "cpu" or model.compiled is not None
    model.forward(build_batch([SequencePiece(READ, 0, shared, 1)], BLOCK, loaded.device))
    for pool in (pool for pair in pools for pool in pair):
        for index, copy in copies.items():
            pool[copy] = pool[shared[index]]
        for slot, position in enumerate(KEPT_SLOTS.first):
            if position == EMPTY:
                pool[private[slot // BLOCK], slot % BLOCK] = float("nan")
    own = replace(KEPT_SLOTS, next_position=start)
    rows: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    done = 0
    for count in STEPS:
        ids = MORE[done : done + count]
        pieces = [
            SequencePiece(ids, NUM_READ + done, shared, count),
            SequencePiece(ids, start + done, private, count, table_positions=own),
        ]
        logits = model.forward(build_batch(pieces, BLOCK, loaded.device))
        for of_table, part in zip(rows, logits.split(count), strict=True):
            of_table.append(part)
        done += count
    return Logits(torch.cat(rows[0]), torch.cat(rows[1]))
