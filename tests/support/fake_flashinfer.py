"""FlashInfer without a GPU: the signatures of 0.7.2 that kvchat calls, computed by a formula.

`test_the_fake_has_the_signatures_of_the_real_package` compares them with the package where it is
installed. What the real kernels read without a check is checked here.
"""

from typing import Any

import torch


def attend_sequence(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    window_left: int,
    softcap: float,
) -> torch.Tensor:
    """Attend the last rows of one sequence, a row and a head at a time."""
    count, num_heads, _ = query.shape
    group = num_heads // keys.shape[1]
    out = torch.empty(count, num_heads, values.shape[2])
    for row in range(count):
        end = len(keys) - count + row + 1
        begin = 0 if window_left < 0 else max(0, end - 1 - window_left)
        for head in range(num_heads):
            scores = keys[begin:end, head // group].float() @ query[row, head].float() * scale
            if softcap > 0:
                scores = softcap * torch.tanh(scores / softcap)
            weights = torch.softmax(scores, 0)
            out[row, head] = weights @ values[begin:end, head // group].float()
    return out


class BatchPrefillWithPagedKVCacheWrapper:
    """Plans once for a step's sequences, then runs for each layer."""

    num_plans = 0

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: Any = "NHD",
        use_cuda_graph: Any = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: Any = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: Any = False,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"
        self._plan: dict[str, Any] | None = None

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: Any,
        num_kv_heads: Any,
        head_dim_qk: Any,
        page_size: Any,
        head_dim_vo: Any = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: Any = False,
        pos_encoding_mode: Any = "NONE",
        use_fp16_qk_reduction: Any = False,
        sm_scale: Any = None,
        window_left: Any = -1,
        logits_soft_cap: Any = None,
        rope_scale: Any = None,
        rope_theta: Any = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: Any = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: Any = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: Any = None,
        max_sequence_kv: Any = None,
        fixed_split_size: Any = None,
        disable_split_kv: Any = False,
        uniform_q_len: Any = None,
    ) -> None:
        indices = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(x.dtype == torch.int32 and x.dim() == 1 for x in indices)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert bool(((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all())
        assert causal
        type(self).num_plans += 1
        self._plan = {
            "rows": qo_indptr.tolist(),
            "pages": paged_kv_indptr.tolist(),
            "indices": paged_kv_indices.clone(),
            "last": paged_kv_last_page_len.tolist(),
            "shape": (num_qo_heads, num_kv_heads, head_dim_qk, page_size),
            "dtypes": (q_data_type, kv_data_type),
            "settings": (sm_scale, window_left, logits_soft_cap or 0.0),
        }

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        out: Any = None,
        lse: Any = None,
        return_lse: Any = False,
        lse_base: Any = "log2",
        lse_layout: Any = "NH",
        enable_pdl: Any = None,
        window_left: Any = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: Any = None,
        use_fp16_softmax: Any = None,
        uses_spcompress: Any = None,
    ) -> torch.Tensor:
        plan, (keys, values) = self._plan, paged_kv_cache
        assert plan is not None, "run before plan"
        assert (q.dtype, keys.dtype) == plan["dtypes"]
        assert (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1]) == plan["shape"]
        assert q.shape[0] == plan["rows"][-1]
        for index, last in enumerate(plan["last"]):
            first, end = plan["pages"][index : index + 2]
            pages = plan["indices"][first:end].long()
            length = (len(pages) - 1) * keys.shape[1] + last
            rows = slice(*plan["rows"][index : index + 2])
            own = (pool[pages].flatten(0, 1)[:length] for pool in (keys, values))
            out[rows] = attend_sequence(q[rows], *own, *plan["settings"]).to(out.dtype)
        return out


class _Decode:
    """The module `flashinfer.decode`."""

    @staticmethod
    def xqa_batch_decode_with_kv_cache(
        query: Any,
        kv_cache: Any,
        workspace_buffer: Any,
        block_tables: Any,
        seq_lens: Any,
        max_seq_len: Any,
        bmm1_scale: Any = 1.0,
        bmm2_scale: Any = 1.0,
        window_left: Any = -1,
        out: Any = None,
        sinks: Any = None,
        kv_layout: Any = "NHD",
        enable_pdl: Any = None,
        q_len_per_req: Any = 1,
        o_scale: Any = 1.0,
        mask: Any = None,
        kv_cache_sf: Any = None,
        q_cu_seq_lens: Any = None,
    ) -> torch.Tensor:
        keys = kv_cache[0]
        assert kv_layout == "NHD"
        assert query.is_contiguous()
        assert block_tables.is_contiguous()
        assert block_tables.dtype == torch.int32
        assert seq_lens.dtype == torch.uint32
        assert query.shape[0] == block_tables.shape[0] == len(seq_lens)
        assert max_seq_len <= block_tables.shape[1] * keys.shape[1]
        assert keys.shape[1] in (16, 32, 64, 128)
        assert workspace_buffer.numel() >= 16 << 20
        assert not workspace_buffer[: 8 << 20].any(), "semaphores that are not zero"
        for row, length in enumerate(seq_lens.tolist()):
            pages = block_tables[row, : -(-length // keys.shape[1])].long()
            own = (pool[pages].flatten(0, 1)[:length] for pool in kv_cache)
            settings = (bmm1_scale, window_left, 0.0)
            out[row : row + 1] = attend_sequence(query[row : row + 1], *own, *settings)
        return out


class FakeFlashInfer:
    """The package `flashinfer`."""

    BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper
    decode = _Decode
