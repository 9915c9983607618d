"""Each compiled CPU kernel against the formula it stands for, in torch."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.nn import functional
from transformers.activations import XIELUActivation

from kvchat_kernels.cpu import attention, gates, norms, products, rotation
from kvchat_kernels.cpu.maths import Stored, stored_as
from kvchat_kernels.cpu.program import Operation, Program
from kvchat_kernels.cpu.step import MAX_ROWS
from kvchat_kernels.linear import cpu as linear_cpu
from kvchat_kernels.linear.cpu import FloatProduct
from kvchat_kernels.paged_attention import AttentionSpan, PagedSequences
from support.attention_checks import POSITION_RULES, assert_exact, span_of
from support.cpu_tasks import attended, header, run_units
from support.paged_fixture import paged_problem, with_private_tables

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = 1e-5


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight


def test_a_joined_norm_is_that_of_both_rows_together() -> None:
    torch.manual_seed(0)
    one, other, weight, out = (torch.randn(*shape) for shape in ((3, 24), (3, 24), (48,), (3, 48)))
    task = norms.JoinedNormTask(
        one=one, other=3 * other, width=24, weight=weight, epsilon=EPSILON, out=out
    )

    run_units(Operation(norms.joined_norm_kernel(), task, header(3), None), 3, 1)

    assert torch.allclose(out, normed(torch.cat((one, 3 * other), dim=1), weight), atol=1e-5)


@pytest.mark.parametrize("norms_addend", [False, True])
@pytest.mark.parametrize("scales", [False, True])
def test_a_norm_adds_to_the_stream_first(scales: bool, norms_addend: bool) -> None:
    torch.manual_seed(0)
    stream, added, out = (torch.randn(3, 96) for _ in range(3))
    weight, own = torch.randn(96), torch.randn(96)
    expected = stream + 0.5 * (normed(added, own) if norms_addend else added)
    expected *= 3.0 if scales else 1.0
    task = norms.NormTask(
        stream=stream,
        addend=added,
        addend_weight=own,
        weight=weight,
        out=out,
        width=96,
        epsilon=EPSILON,
        factor=0.5,
        stream_factor=3.0,
    )
    form = norms.NormForm(adds=True, norms_addend=norms_addend, scales=scales)
    kernel = norms.norm_kernel(form)

    run_units(Operation(kernel, task, header(3), None), 3, 1)

    assert torch.allclose(stream, expected, atol=1e-5)
    assert torch.allclose(out, normed(expected, weight), atol=1e-5)


@pytest.mark.parametrize("adds", [False, True])
def test_a_centred_norm_is_torchs_layer_norm(adds: bool) -> None:
    torch.manual_seed(0)
    stream, added, out = (torch.randn(3, 96) for _ in range(3))
    stream += 30.0
    weight, bias = torch.randn(96), torch.randn(96)
    expected = stream + added if adds else stream.clone()
    task = norms.NormTask(
        stream=stream,
        addend=added,
        weight=weight,
        bias=bias,
        out=out,
        width=96,
        epsilon=EPSILON,
        factor=1.0,
    )
    kernel = norms.norm_kernel(norms.NormForm(adds, centres=True))

    run_units(Operation(kernel, task, header(3), None), 3, 1)

    assert torch.allclose(stream, expected, atol=1e-5)
    layer_norm = functional.layer_norm(expected.double(), (96,), weight.double(), bias.double())
    assert torch.allclose(out, layer_norm.float(), atol=1e-5)


GATES = {
    gates.Activation.SILU: functional.silu,
    gates.Activation.GELU: functional.gelu,
    gates.Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    gates.Activation.SIGMOID: functional.sigmoid,
}


@pytest.mark.parametrize("activation", GATES)
def test_gates_are_right_from_the_smallest_to_the_largest(activation: gates.Activation) -> None:
    width = 1032  # a unit and a bit
    gate = torch.linspace(-100, 100, width).repeat(2, 1)
    both, out = torch.cat((gate, torch.ones(2, width)), dim=1), torch.zeros(2, width)
    task = gates.GateTask(both=both, out=out, width=width)

    run_units(Operation(gates.gate_kernel(activation), task, header(2), None), 2, 1)

    assert torch.allclose(out, GATES[activation](gate), rtol=1e-5, atol=2e-6)


def test_a_side_input_is_taken_from_rows_of_all_layers() -> None:
    gate, sides, out = torch.randn(3, 40), torch.randn(3, 120), torch.zeros(3, 40)
    side = sides[:, 40:80]
    task = gates.SideTask(gate=gate, side=side, side_stride=sides.stride(0) * 4, out=out, width=40)
    kernel = gates.side_kernel(gates.Activation.GELU_TANH)

    run_units(Operation(kernel, task, header(3), None), 3, 1)

    expected = functional.gelu(gate, approximate="tanh") * side
    assert torch.allclose(out, expected, atol=1e-5)


def test_xielu_is_that_of_transformers() -> None:
    module = XIELUActivation(0.6, 0.9, dtype=torch.float32)
    positive, negative = (functional.softplus(part) for part in (module.alpha_p, module.alpha_n))
    x, out = torch.linspace(-30, 30, 1032).repeat(2, 1), torch.zeros(2, 1032)
    task = gates.GateTask(
        both=x,
        out=out,
        width=1032,
        positive=float(positive),
        negative=float(module.beta + negative),
        linear=float(module.beta),
        largest=float(module.eps),
    )
    kernel = gates.gate_kernel(gates.Activation.XIELU, is_gated=False)

    run_units(Operation(kernel, task, header(2), None), 2, 1)

    with torch.no_grad():
        assert torch.allclose(out, module(x), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_a_product_is_the_same_beside_others_to_the_bit(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernels = linear_cpu.compiled_calls()
    assert kernels is not None
    for num_out, num_in in ((67, 96), (3, 32), (29, 1056)):
        weight, x = torch.randn(num_out, num_in).to(dtype), torch.randn(MAX_ROWS + 7, num_in)
        alone = torch.cat([FloatProduct(weight, None)(row[None]) for row in x])
        for num_rows in (*range(2, 17), 63, 65, 70, MAX_ROWS + 7):
            out = torch.zeros(num_rows, num_out)
            kernels.multiply_floats(weight, None, x[:num_rows], out)
            assert torch.equal(out, alone[:num_rows]), (num_out, num_in, num_rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_are_multiplied_in_float32(dtype, monkeypatch):
    monkeypatch.setattr(linear_cpu, "is_fast_by_torch", lambda dtype: False)
    torch.manual_seed(0)
    for num_out, num_in, is_inference in ((5, 32, True), (70, 96, False), (33, 64, True)):
        weight, bias, x = (
            torch.randn(num_out, num_in),
            torch.randn(num_out),
            torch.randn(40, num_in),
        )
        product = FloatProduct(weight.to(dtype), bias.to(dtype))
        with torch.inference_mode(is_inference):
            out = product(x.to(dtype))

        exact = functional.linear(
            x.to(dtype).float(), weight.to(dtype).float(), bias.to(dtype).float()
        )
        assert (out - exact).norm() <= 2**-8 * exact.norm()


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_exact_to_float32(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    for num_out, num_in, chunk in ((67, 96, 20), (4, 32, 4), (3, 64, 4), (30, 1120, 16)):
        weights, bias = torch.randn(num_out, num_in).to(dtype), torch.randn(num_out)
        for num_rows in (1, 2, 3, 5, 9, 16, MAX_ROWS):
            x, out = torch.randn(num_rows, num_in), torch.zeros(num_rows, num_out + 5)
            task = products.ProductTask(
                weights=weights,
                num_out=num_out,
                num_in=num_in,
                x=x,
                x_stride=num_in * 4,
                out=out,
                out_stride=(num_out + 5) * 4,
                bias=bias,
                chunk=chunk,
            )
            kernel = products.product_kernel(stored_as(dtype), has_bias)  # type: ignore[arg-type]
            operation = Operation(kernel, task, header(num_rows), None)

            run_units(operation, -(-num_out // chunk), 1)

            exact = x.double() @ weights.double().t() + (bias if has_bias else 0.0)
            assert torch.allclose(out[:, :num_out].double(), exact, atol=2e-4)
            assert not out[:, num_out:].any(), "what lies beside it is not written"


@pytest.mark.parametrize(
    ("num_out", "row_bytes", "most_bytes"),
    [(256, 256, 1 << 15), (3072, 256, 3 << 15), (896, 952, 896 * 952 // 8), (32000, 1792, 1 << 18)],
)
def test_a_unit_is_an_eighth_of_a_matrix_within_limits(num_out, row_bytes, most_bytes):
    """Matrices of 64 KB were one unit each: two threads read prompts hardly faster than one."""
    rows = products.unit_rows(num_out, row_bytes)
    assert rows % products.WEIGHT_ROWS == 0
    assert most_bytes - products.WEIGHT_ROWS * row_bytes < rows * row_bytes <= most_bytes


@pytest.mark.parametrize("writes_kv", [False, True])
def test_values_are_normed_and_only_queries_where_kv_is_anothers(writes_kv: bool) -> None:
    """Gemma 4 norms V without weights, and some layers attend to the KV of an earlier one."""
    torch.manual_seed(0)
    heads = rotation.Heads(
        4, 2, 16, 24, 0, rotation.HeadNorm.HEAD, Stored.FLOAT, norms_value=writes_kv,
        writes_kv=writes_kv,
    )  # fmt: skip
    qkv = torch.randn(3, 4 * 16 + (2 * (16 + 24) if writes_kv else 0))
    before, query_norm, key_norm = qkv.clone(), torch.randn(16), torch.randn(16)
    keys, values = torch.zeros(5, 2, 16), torch.zeros(5, 2, 24)
    slots = torch.tensor([4, -1, 0])
    task = rotation.RotationTask(
        qkv=qkv,
        qkv_stride=qkv.stride(0) * 4,
        keys=keys,
        values=values,
        query_norm=query_norm,
        key_norm=key_norm,
        epsilon=EPSILON,
    )
    kernel = rotation.rotation_kernel(heads)

    run_units(Operation(kernel, task, header(3, slots), None), 3, 1)

    query = normed(before[:, :64].view(3, 4, 16), query_norm)
    assert torch.allclose(qkv[:, :64].view(3, 4, 16), query, atol=1e-5)
    expected_keys, expected_values = torch.zeros_like(keys), torch.zeros_like(values)
    if writes_kv:
        key, value = before[:, 64:].split((32, 48), dim=1)
        rows = [0, 2]
        expected_keys[[4, 0]] = normed(key.view(3, 2, 16), key_norm)[rows]
        expected_values[[4, 0]] = normed(value.view(3, 2, 24), torch.ones(24))[rows]
    assert torch.allclose(keys, expected_keys, atol=1e-5)
    assert torch.allclose(values, expected_values, atol=1e-5)


@pytest.mark.parametrize("norms_last", [False, True])
@pytest.mark.parametrize("turns_neighbours", [False, True])
@pytest.mark.parametrize("norm", rotation.HeadNorm)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_rotated_and_written(dtype, norm, turns_neighbours, norms_last):
    torch.manual_seed(0)
    num_rows, num_heads, num_kv_heads, key_dim, value_dim, rotated = 5, 4, 2, 32, 24, 16
    stored = stored_as(dtype)
    assert stored is not None
    heads = rotation.Heads(
        num_heads,
        num_kv_heads,
        key_dim,
        value_dim,
        rotated,
        norm,
        stored,
        turns_neighbours=turns_neighbours,
        norms_last=norms_last,
    )
    qkv = torch.randn(num_rows, (num_heads + num_kv_heads) * key_dim + num_kv_heads * value_dim)
    before = qkv.clone()
    angles = torch.rand(num_rows, rotated // 2) * 6
    cosines, sines = angles.cos(), angles.sin()
    keys = torch.zeros(12, num_kv_heads, key_dim, dtype=dtype)
    values = torch.zeros(12, num_kv_heads, value_dim, dtype=dtype)
    slots = torch.tensor([3, 9, -1, 11, 2])
    is_wide = norm is rotation.HeadNorm.ALL_HEADS
    query_norm = torch.randn(num_heads * key_dim if is_wide else key_dim)
    key_norm = torch.randn(num_kv_heads * key_dim if is_wide else key_dim)
    task = rotation.RotationTask(
        qkv=qkv,
        qkv_stride=qkv.stride(0) * 4,
        cosines=cosines,
        sines=sines,
        keys=keys,
        values=values,
        query_norm=query_norm,
        key_norm=key_norm,
        epsilon=EPSILON,
    )

    operation = Operation(rotation.rotation_kernel(heads), task, header(num_rows, slots), None)
    run_units(operation, num_rows, 1)

    def normed_heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if is_wide:
            return normed(x.flatten(1), weight).view(x.shape)
        return normed(x, weight) if norm is rotation.HeadNorm.HEAD else x

    def turned(x: torch.Tensor) -> torch.Tensor:
        turning, rest = x.tensor_split((rotated,), dim=-1)
        shape = (rotated // 2, 2) if turns_neighbours else (2, rotated // 2)
        first, second = turning.unflatten(-1, shape).unbind(-1 if turns_neighbours else -2)
        cos, sin = cosines[:, None], sines[:, None]
        parts = first * cos - second * sin, second * cos + first * sin
        joined = torch.stack(parts, -1 if turns_neighbours else -2).flatten(-2)
        return torch.cat((joined, rest), dim=-1)

    def expected(x: torch.Tensor, count: int, weight: torch.Tensor) -> torch.Tensor:
        x = x.view(num_rows, count, key_dim)
        return normed_heads(turned(x), weight) if norms_last else turned(normed_heads(x, weight))

    ends = num_heads * key_dim, (num_heads + num_kv_heads) * key_dim
    query, key, value = before.tensor_split(ends, dim=1)
    own_query = qkv[:, : ends[0]].view(num_rows, num_heads, key_dim)
    assert torch.allclose(own_query, expected(query, num_heads, query_norm), atol=1e-5)
    key = expected(key, num_kv_heads, key_norm)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.allclose(keys[slot].float(), key[row].to(dtype).float(), atol=1e-2)
            own_value = value[row].view(num_kv_heads, value_dim).to(dtype)
            assert torch.equal(values[slot], own_value), "rounded to the nearest, ties to even"
    assert not keys[[0, 1, 4]].any()


FORMS = {
    "plain": (AttentionSpan(None, None), None, False),
    "window": (AttentionSpan(100, None), None, False),
    "chunks": (AttentionSpan(None, 96), None, False),
    "softcap and sinks": (AttentionSpan(None, None), 20.0, True),
}


# Query heads, KV heads, dims of keys and values, tokens a block, dtype.
SHAPES = {
    "float32": (6, 2, 64, 48, 16, torch.float32),
    "bfloat16": (6, 2, 64, 48, 16, torch.bfloat16),
    "float16, a head each": (4, 4, 8, 136, 8, torch.float16),
    "groups of 7": (7, 1, 40, 16, 32, torch.bfloat16),
    "small blocks": (10, 2, 16, 24, 4, torch.bfloat16),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_the_formula(shape: str, form: str) -> None:
    """Two sequences, one of three parts; what no row may read is not a number."""
    torch.manual_seed(0)
    span, softcap, has_sinks = FORMS[form]
    num_heads, num_kv_heads, key_dim, value_dim, block, dtype = SHAPES[shape]
    num_blocks = 700 // block + 20
    keys = torch.randn(num_blocks * block, num_kv_heads, key_dim).to(dtype)
    values = torch.randn(num_blocks * block, num_kv_heads, value_dim).to(dtype)
    order = (torch.randperm(num_blocks - 1) + 1).int()
    counts = -(-700 // block), -(-37 // block)
    tables = torch.zeros(2, counts[0] + 1, dtype=torch.int32)
    tables[0, : counts[0]], tables[1, : counts[1]] = order[: sum(counts)].split(counts)
    sequences = PagedSequences((3, 2), (700, 37), tables, block)
    slots = [
        (table.long()[:, None] * block + torch.arange(block)).flatten()[:end]
        for table, end in zip(tables, sequences.context_lens, strict=True)
    ]
    unseen = torch.ones(num_blocks * block, dtype=torch.bool)
    unseen[torch.cat(slots)] = False
    keys[unseen] = values[unseen] = float("nan")
    query, sinks = torch.randn(5, num_heads * key_dim), torch.randn(num_heads)
    stored = stored_as(dtype)
    assert stored is not None
    made_for = attention.AttentionForm(
        num_heads, num_kv_heads, key_dim, value_dim, block, stored, softcap is not None, has_sinks
    )

    out = attended(
        made_for,
        span,
        sequences,
        query,
        (keys, values),
        softcap=softcap or 0.0,
        sinks=sinks if has_sinks else None,
    )

    row = 0
    lengths = zip(sequences.query_lens, sequences.context_lens, slots, strict=True)
    for count, end, own in lengths:
        group = num_heads // num_kv_heads
        key, value = (pool[own].float().repeat_interleave(group, 1) for pool in (keys, values))
        for position in range(end - count, end):
            scores = torch.einsum("hd,khd->hk", query[row].view(num_heads, -1), key) * 0.125
            if softcap is not None:
                scores = (scores / softcap).tanh() * softcap
            seen = torch.arange(end)
            hidden = (seen > position) | (seen < span.first_visible(position))
            scores[:, hidden] = float("-inf")
            if has_sinks:
                scores = torch.cat((scores, sinks[:, None]), dim=1)
            weights = scores.softmax(-1)[:, :end]
            expected = torch.einsum("hk,khd->hd", weights, value)
            assert torch.allclose(out[row], expected, atol=1e-5)
            row += 1


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", POSITION_RULES)
def test_spans_look_at_positions_where_a_table_has_its_own(name: str, block_size: int) -> None:
    """Holes of NaN, positions that jump, more rows than a job has, and a shared table beside."""
    case = replace(POSITION_RULES[name], key_dim=64, value_dim=48)
    lengths = (1, 257), (3, 700), (20, 90), (1, 33)
    problem = with_private_tables(paged_problem(case, lengths, block_size))
    form = attention.AttentionForm(
        case.num_heads,
        case.num_kv_heads,
        case.key_dim,
        case.value_dim,
        block_size,
        Stored.FLOAT,
        case.softcap is not None,
        case.has_sinks,
    )
    assert isinstance(problem.sequences, PagedSequences)

    out = attended(
        form,
        span_of(case),
        problem.sequences,
        problem.query.flatten(1),
        (problem.key_pool, problem.value_pool),
        softcap=case.softcap or 0.0,
        sinks=problem.sinks,
    )

    assert_exact(out, problem, case)


@pytest.mark.parametrize("span", [AttentionSpan(None, None), AttentionSpan(300, None)])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 7])
def test_attention_of_a_row_is_the_same_beside_others_to_the_bit(num_heads, span):
    """A tile is read for 4, 3, 2 or 1 pairs of a row and a head: which, depends on the rows."""
    torch.manual_seed(num_heads)
    count, end = 16, 601
    pools = tuple(torch.randn(608, 1, 32).bfloat16() for _ in range(2))
    tables = torch.arange(38).int()[None]
    query = torch.randn(count, num_heads * 32)
    stored = stored_as(torch.bfloat16)
    assert stored is not None
    form = attention.AttentionForm(num_heads, 1, 32, 32, 16, stored)

    together = [
        attended(
            form,
            span,
            PagedSequences((count,), (end,), tables, 16),
            query,
            (pools[0], pools[1]),
            num_threads=num_threads,
        )
        for num_threads in (1, 3)
    ]

    assert torch.equal(*together)
    for row in range(count):
        alone = PagedSequences((1,), (end - count + row + 1,), tables, 16)
        own = attended(form, span, alone, query[row : row + 1], (pools[0], pools[1]))
        assert torch.equal(own[0], together[0][row])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_operations_wait_for_those_before_them(num_threads: int) -> None:
    """Forty products one after another, each of the one before: any missed wait shows."""
    torch.manual_seed(0)
    weights = torch.linalg.qr(torch.randn(256, 256))[0].contiguous()
    rows = [torch.zeros(1, 256) for _ in range(41)]
    rows[0][:] = torch.randn(256)
    kernel = products.product_kernel(stored_as(torch.float32), False)  # type: ignore[arg-type]
    operations = []
    for x, out in pairwise(rows):
        task = products.ProductTask(
            weights=weights,
            num_out=256,
            num_in=256,
            x=x,
            x_stride=1024,
            out=out,
            out_stride=1024,
            chunk=8,
        )
        operations.append(Operation(kernel, task, header(1), 32))
    program = Program(operations)
    program.prepare()
    expected = rows[0].double()
    for _ in range(40):
        expected = expected @ weights.double().t()
    for _ in range(20):
        for out in rows[1:]:
            out.zero_()
        program.run(num_threads)
        assert torch.allclose(rows[-1].double(), expected, atol=1e-4)
