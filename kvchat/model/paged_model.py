"""PagedModel: a loaded module bound to KV pools. It turns a ForwardBatch into logits."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kvchat.core.errors import UsageError
from kvchat.model.batch import ForwardBatch, SequencePiece, build_batch
from kvchat.model.cpu.compiled_step import CompiledStep
from kvchat.model.decoder.families import steps_one_by_one
from kvchat.model.hf.gathered import GatheredSteps
from kvchat.model.hf.module_adapter import (
    OWN_ATTENTION,
    bind,
    binding_to,
    paged_attention_function,
    replace_own_attention,
)
from kvchat.model.last_hidden import LastHidden
from kvchat.model.loader import LoadedModel
from kvchat.model.state import StateIo
from kvchat_kernels.kv_layer import KvLayer, PlainKv
from kvchat_kernels.state_buffer import StateBuffer

_PADDING_WARNING = "warn_if_padding_and_no_attention_mask"

# A pair of tensors is plain KV.
KvLayers = Sequence[KvLayer | tuple[torch.Tensor, torch.Tensor]]


class PagedModel:
    """Runs forward passes over paged KV.

    `pools[i]` is the KV of storing layer i: a KvLayer, or two tensors [num_blocks, block_size,
    num_kv_heads, dim] of plain KV. The caller owns it; every step writes to it. Fused layers run
    over any KvLayer, the compiled step over plain KV and CodedKv. The binding is stored on the
    modules, so only the newest PagedModel of a LoadedModel may run.

    `windowed` are the storing layers whose pools have window blocks: batches then say which.

    `keeps_rows` tells whether the module computes logits of the wanted rows only.

    `compiled` runs what steps it takes on a CPU; setting it to None leaves all to the modules.
    `hidden` collects the last hidden states of steps, where `keep_hidden` was called.
    """

    hidden: LastHidden | None = None

    def __init__(
        self, loaded: LoadedModel, pools: KvLayers, windowed: frozenset[int] = frozenset()
    ) -> None:
        assert len(pools) == len(loaded.spec.storing_layers)
        self.loaded = loaded
        self._module = loaded.module
        layers = [PlainKv(*pool) if isinstance(pool, tuple) else pool for pool in pools]
        self._gathered = None
        if loaded.spec.gathered is not None:
            self._gathered = GatheredSteps(self._module, loaded.spec, layers, windowed)
        else:
            self._bind(layers, windowed)
        self._storage = layers, windowed
        self._scoring: CompiledStep | None = None
        compiled = loaded.compiled
        self.compiled = None if compiled is None else compiled.step_over(layers, windowed)
        _disable_padding_check(self._module)
        parameters = inspect.signature(self._module.forward).parameters
        self.keeps_rows = "logits_to_keep" in parameters

    def _bind(self, layers: Sequence[KvLayer], windowed: frozenset[int]) -> None:
        """Bind every attention module to its layer's KV."""
        loaded, context = self.loaded, self.loaded.step
        for layer in loaded.spec.layers:
            module = self._module.get_submodule(layer.module_name)
            index = layer.pool_index
            has_window_blocks = index in windowed
            bind(
                module,
                binding_to(layer, layers[index], context, has_window_blocks=has_window_blocks),
            )
        own = OWN_ATTENTION.get(loaded.spec.model_type)
        if own is not None:
            replace_own_attention(self._module, own, paged_attention_function)

    def keep_hidden(self, before: tuple[int, ...] = ()) -> None:
        """From now on, collect the last hidden states of every step, or the streams before these
        layers; raises as LastHidden.
        """
        self.hidden = LastHidden(self._module, before)
        if self.compiled is not None and self.loaded.compiled is not None and before:
            self.compiled = self.loaded.compiled.step_over(*self._storage, before)
        self.collect_hidden(is_on=True)

    def scoring_step(self, first_heads: Mapping[str, int]) -> CompiledStep | None:
        """Return the compiled step that scores slots of these layers, compiled at the first call;
        None where no steps are compiled.
        """
        if self.compiled is None or self.loaded.compiled is None:
            return None
        if self._scoring is None:
            step_over = self.loaded.compiled.step_over
            self._scoring = step_over(*self._storage, first_heads=first_heads)
        return self._scoring

    def collect_hidden(self, *, is_on: bool) -> None:
        """Collect hidden states from now on, or none; after `keep_hidden`."""
        assert self.hidden is not None
        self.hidden.switch(is_on=is_on)
        if self.compiled is not None:
            self.compiled.watch = self.hidden.add_stream if is_on else None

    @contextmanager
    def head_inputs(self) -> Iterator[list[torch.Tensor]]:
        """Run the block's steps by the modules; yield a list that gets what the head reads of each
        step's wanted rows, [num_rows, width] float32 behind the last norm: a text's meaning.

        Raises UsageError for a model whose head is no module of its own.
        """
        head = self._module.get_output_embeddings()
        if not isinstance(head, nn.Module):
            raise UsageError("This model shows no hidden states, so it has no embeddings.")
        found: list[torch.Tensor] = []

        def collect(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
            rows = inputs[0]
            found.append(rows.detach().reshape(-1, rows.shape[-1]).float())
            # The logits are not read: one row is enough where the model picks rows itself.
            return (rows[..., :1, :], *inputs[1:]) if self.keeps_rows else None

        compiled, self.compiled = self.compiled, None
        hook = head.register_forward_pre_hook(collect)
        try:
            yield found
        finally:
            hook.remove()
            self.compiled = compiled

    @property
    def device(self) -> torch.device:
        return self.loaded.device

    @property
    def dtype(self) -> torch.dtype:
        return self.loaded.dtype

    def stopping(self, is_unwanted: Callable[[], bool]) -> AbstractContextManager[None]:
        """Ask `is_unwanted` before every product of the block's steps; StepAbandoned once it is
        true.

        On a GPU nothing is asked: it runs behind the host, which has passed the products already.
        """
        return self.loaded.step.stopping(is_unwanted)

    def new_state(self) -> StateBuffer | None:
        """Return the state of the empty context for a sequence's pieces; None without any."""
        return None

    def forward_pieces(self, pieces: Sequence[SequencePiece], block_size: int) -> torch.Tensor:
        """Run the new tokens of sequences as `forward`; return the rows that the pieces ask for."""
        return self.forward(build_batch(pieces, block_size, self.device))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one step: write the new tokens' KV and return the logits of `batch.logit_rows`.

        Returns [num_rows, vocab_size] float32, owned by the caller.
        """
        if self.compiled is not None:
            logits = self.compiled.logits(batch, self.loaded.step.check_if_asked)
            if logits is not None:
                return logits
        with self.loaded.step.running(batch):
            if self._gathered is not None:
                return self._gathered.logits(batch, self.keeps_rows)
            return self._logits(batch, position_ids=batch.positions[None], use_cache=False)

    def _logits(self, batch: ForwardBatch, **settings: Any) -> torch.Tensor:
        """Run the module's own forward with `settings`; return the logits of `batch.logit_rows`."""
        # Select rows by a tensor: with an integer, some models drop rows before attention.
        rows = {"logits_to_keep": batch.logit_rows} if self.keeps_rows else {}
        output = self._module(input_ids=batch.token_ids[None], **settings, **rows)
        logits = output.logits[0]
        if not self.keeps_rows:
            logits = logits[batch.logit_rows]
        return logits.float()


class StatefulModel(PagedModel):
    """A PagedModel with recurrent layers: it runs sequences with their states.

    A compiled step takes rows of several sequences, the modules one sequence at a time. It alone
    takes guesses (`SequencePiece.num_guesses`), of small steps.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pools: KvLayers,
        windowed: frozenset[int] = frozenset(),
        window_blocks: torch.Tensor | None = None,
    ) -> None:
        """`windowed` as of PagedModel, `window_blocks` as of `build_batch`. A model without
        attention uses no pool.
        """
        super().__init__(loaded, pools if loaded.spec.storing_layers else (), windowed)
        self._window_blocks = window_blocks
        self.state_io = StateIo(self._module, loaded.spec.state, loaded.dtype, loaded.device)
        self._takes_positions = "position_ids" in inspect.signature(self._module.forward).parameters
        self._steps_one_by_one = steps_one_by_one(loaded.spec.model_type)

    def new_state(self) -> StateBuffer:
        return self.state_io.new_buffer()

    @torch.inference_mode()
    def forward_pieces(self, pieces: Sequence[SequencePiece], block_size: int) -> torch.Tensor:
        """Run the new tokens of sequences: write their KV and advance their states.

        Returns [num_rows, vocab_size] float32, the rows that the pieces ask for, in order. If it
        raises, the state of a single piece is undefined, and so are those of several inside of
        `stopping`; otherwise those of several are as before.
        """
        if self.compiled is not None:
            states = [state_of(piece) for piece in pieces]
            batch = build_batch(pieces, block_size, self.device, self._window_blocks)
            check = self.loaded.step.check_if_asked
            guesses = [piece.num_guesses for piece in pieces]
            found = self.compiled.logits(batch, check, states, guesses)
            if found is not None:
                for piece, state in zip(pieces, states, strict=True):
                    state.num_tokens = piece.end
                return found
        if len(pieces) == 1:
            return self._forward_piece(pieces[0], block_size)
        before = [state_of(piece).copy() for piece in pieces]
        try:
            return torch.cat([self.forward_pieces([piece], block_size) for piece in pieces])
        except Exception:
            for piece, old in zip(pieces, before, strict=True):
                if piece.state is not None:
                    piece.state.become(old)
            raise

    def _forward_piece(self, piece: SequencePiece, block_size: int) -> torch.Tensor:
        """Run one sequence by the modules."""
        assert not piece.num_guesses
        state = state_of(piece)
        if not self._steps_one_by_one or not piece.start:
            return self._forward_part(piece, state, block_size)
        first_row = len(piece.token_ids) - piece.num_logit_rows
        rows = [
            self._forward_part(
                replace(
                    piece,
                    token_ids=[token],
                    start=piece.start + index,
                    num_logit_rows=int(index >= first_row),
                ),
                state,
                block_size,
            )
            for index, token in enumerate(piece.token_ids)
        ]
        return torch.cat(rows)

    def _forward_part(
        self, piece: SequencePiece, state: StateBuffer, block_size: int
    ) -> torch.Tensor:
        batch = build_batch([piece], block_size, self.device, self._window_blocks)
        settings: dict[str, Any] = {"use_cache": True}
        if self._takes_positions:
            settings["position_ids"] = batch.positions[None]
        # Kernels compute what of a prompt they can, where the self-test has not abandoned them.
        running = self.state_io.running(state, takes_kernels=self.compiled is not None)
        with self.loaded.step.running(batch), running as cache:
            settings[self.state_io.argument] = cache
            logits = self._logits(batch, **settings)
        state.num_tokens = piece.end
        return logits


def model_over(loaded: LoadedModel, pools: KvLayers) -> PagedModel:
    """Return a loaded model bound to KV, of the class that runs it; `pools` as of PagedModel."""
    return (StatefulModel if loaded.spec.state else PagedModel)(loaded, pools)


def state_of(piece: SequencePiece) -> StateBuffer:
    """Return the state that a piece continues."""
    assert piece.state is not None
    assert piece.state.num_tokens == piece.start
    return piece.state


def _disable_padding_check(module: nn.Module) -> None:
    """Disable transformers' padding warning, which reads each step's first and last token.

    Batches have no padding, and the read makes the host wait for the device.
    """
    for part in module.modules():
        if hasattr(part, _PADDING_WARNING):
            part.__dict__[_PADDING_WARNING] = lambda *_: None
