"""DotProductAttention against the formula in FP64, sequence by sequence."""

from __future__ import annotations

import pytest
import torch

import hybridq
from attention_oracle import attention
from hybridq.nn import DotProductAttention
from hybridq.nn.autograd import plain_gemm
from hybridq.nn.modules import dot_product_attention

HEADS, GROUPS, FEATURES = 4, 2, 8
#: What FP32 sums of so few terms may differ by.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def _inputs(queries=9, keys=9, batch=2, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    shapes = ((queries, HEADS), (keys, GROUPS), (keys, GROUPS))
    return [torch.randn(n, batch, h, FEATURES, dtype=dtype).requires_grad_() for n, h in shapes]


def _compare(module, inputs, expected, close=CLOSE, extra=(), **call):
    """Compare result and gradients with a function of one sequence, of the same tensors."""
    y = module(*inputs, **call)
    dy = torch.randn_like(y)
    leaves = [*inputs, *extra]
    got = torch.autograd.grad(y, leaves, dy)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    want = expected(*wide)
    torch.testing.assert_close(y.double(), want, **close)
    for one, other in zip(got, torch.autograd.grad(want, wide, dy.double()), strict=True):
        torch.testing.assert_close(one.double(), other, **close)


def _each(sees, **options):
    """Return attention of `[length, batch, heads, features]`, each sequence by itself."""

    def run(q, k, v):
        made = [attention(q[:, b], k[:, b], v[:, b], sees, **options) for b in range(q.shape[1])]
        return torch.stack(made, 1)

    return run


MASKS = {
    "no_mask": lambda i, j, d: True,
    "causal": lambda i, j, d: j <= i,
    "causal_bottom_right": lambda i, j, d: j <= i + d,
}


@pytest.mark.parametrize("window", [None, (3, 0), (2, 1), (-1, 2)])
@pytest.mark.parametrize("keys", [9, 12])
@pytest.mark.parametrize("kind", MASKS)
def test_mask_types_and_windows(kind, keys, window):
    begin = 0 if kind == "causal" else keys - 9

    def sees(i, j):
        left, right = window or (-1, -1)
        ahead = j - i - begin
        inside = (left < 0 or ahead >= -left) and (right < 0 or ahead <= right)
        return MASKS[kind](i, j, begin) and inside

    module = DotProductAttention(HEADS, FEATURES, GROUPS, attn_mask_type=kind)
    _compare(module, _inputs(keys=keys), _each(sees), window_size=window)


def test_batch_first_is_the_same_in_another_layout():
    inputs = _inputs()
    module = DotProductAttention(HEADS, FEATURES, GROUPS)
    first = module(*inputs)
    other = module(*(one.transpose(0, 1) for one in inputs), qkv_format="bshd")
    assert torch.equal(first, other.transpose(0, 1))


@pytest.mark.parametrize("at_end", [False, True])
def test_the_diagonal_may_be_moved(at_end):
    module = DotProductAttention(HEADS, FEATURES, GROUPS)
    begin = 3 if at_end else 0
    expected = _each(lambda i, j: j <= i + begin)
    _compare(module, _inputs(keys=12), expected, bottom_right_diagonal=at_end)


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize(
    "kind", ["padding", "padding_causal", "padding_causal_bottom_right", "causal"]
)
def test_packed_sequences_see_themselves_alone(kind, is_padded, monkeypatch):
    if is_padded:  # as on a GPU and in compiled code
        monkeypatch.setattr(dot_product_attention, "alike", lambda *_: [])
    torch.manual_seed(1)
    of_queries, of_keys = [3, 0, 5, 1], [4, 2, 5, 3]
    q = torch.randn(sum(of_queries) + 2, HEADS, FEATURES, requires_grad=True)
    k, v = (torch.randn(sum(of_keys) + 1, GROUPS, FEATURES, requires_grad=True) for _ in range(2))
    starts = [
        torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32)
        for n in (of_queries, of_keys)
    ]

    def expected(q, k, v):
        made = []
        for n, m, i0, j0 in zip(of_queries, of_keys, *(s.tolist() for s in starts), strict=False):
            begin = m - n if kind.endswith("right") else 0
            made.append(
                attention(
                    *(q[i0 : i0 + n], k[j0 : j0 + m], v[j0 : j0 + m]),
                    lambda i, j, b=begin: kind == "padding" or j <= i + b,
                )
            )
        return torch.cat([*made, torch.zeros(2, HEADS * FEATURES, dtype=torch.float64)])

    module = DotProductAttention(HEADS, FEATURES, GROUPS, qkv_format="thd", attn_mask_type=kind)
    given = {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1]}
    _compare(module, [q, k, v], expected, **given)
    same = module(q, k, v, **given, max_seqlen_q=8, max_seqlen_kv=6)
    torch.testing.assert_close(same, module(q, k, v, **given), **CLOSE)


PACKED = {
    "window": ({}, {"window_size": (2, 1)}),
    "slopes": ({}, {"core_attention_bias_type": "alibi", "alibi_slopes": True}),
    "learnable": ({"softmax_type": "learnable"}, {}),
    "again": ({}, {"checkpoint_core_attention": True}),
    "two_lengths": ({}, {"cu_seqlens_kv": torch.tensor([0, 3, 9, 15, 15, 18, 20])}),
}


@pytest.mark.parametrize("what", PACKED)
def test_packed_sequences_are_computed_without_padding(what, monkeypatch):
    torch.manual_seed(6)
    options, call = PACKED[what]
    starts = torch.tensor([0, 5, 8, 13, 13, 16, 20])
    call = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, **call}
    if "alibi_slopes" in call:
        call["alibi_slopes"] = torch.rand(6, HEADS)
    module = DotProductAttention(HEADS, FEATURES, GROUPS, qkv_format="thd", **options)
    leaves = [torch.randn(20, h, FEATURES, requires_grad=True) for h in (HEADS, GROUPS, GROUPS)]
    dy = torch.randn(20, HEADS * FEATURES)
    rows, plain = [], DotProductAttention.attend

    def counted(self, query, key, value, call):
        rows.append((query.shape[0] * query.shape[2], key.shape[0] * key.shape[2]))
        return plain(self, query, key, value, call)

    def results():
        y = module(*leaves, **call)
        return [y, *torch.autograd.grad(y, [*leaves, *module.parameters()], dy)]

    with monkeypatch.context() as patch:
        patch.setattr(DotProductAttention, "attend", counted)
        made = results()
    calls = 2 if what == "again" else 1
    assert [sum(one) for one in zip(*rows, strict=True)] == [20 * calls, 20 * calls]
    monkeypatch.setattr(dot_product_attention, "alike", lambda *_: [])
    for one, other in zip(made, results(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_rows_between_packed_sequences_are_zero_and_unseen():
    torch.manual_seed(2)
    starts = torch.tensor([0, 3, 5])
    places = torch.tensor([0, 4, 8])
    rows = [0, 1, 2, 4, 5]
    full = [torch.full((8, h, FEATURES), torch.nan) for h in (HEADS, GROUPS, GROUPS)]
    packed = [torch.randn(5, h, FEATURES) for h in (HEADS, GROUPS, GROUPS)]
    for one, other in zip(full, packed, strict=True):
        one[rows] = other
    module = DotProductAttention(HEADS, FEATURES, GROUPS, qkv_format="thd")
    given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    more = {"cu_seqlens_q_padded": places, "cu_seqlens_kv_padded": places}
    y = module(*full, **given, **more)
    assert torch.equal(y[rows], module(*packed, **given))
    assert y[[3, 6, 7]].eq(0).all()


@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_lengths_in_the_place_of_a_mask(kind):
    of_queries, of_keys = [9, 4], [7, 9]
    starts = [torch.tensor([0, *torch.tensor(n).cumsum(0)]) for n in (of_queries, of_keys)]

    def expected(q, k, v):
        made = []
        for b, (n, m) in enumerate(zip(of_queries, of_keys, strict=True)):
            begin = m - n if kind.endswith("right") else 0
            own = attention(
                *(q[:n, b], k[:m, b], v[:m, b]),
                lambda i, j, b=begin: kind == "padding" or j <= i + b,
            )
            made.append(torch.nn.functional.pad(own, (0, 0, 0, 9 - n)))
        return torch.stack(made, 1)

    module = DotProductAttention(HEADS, FEATURES, GROUPS, attn_mask_type=kind)
    _compare(module, _inputs(), expected, cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1])


def test_given_masks_hide_what_is_true():
    torch.manual_seed(3)
    hidden = torch.rand(2, 1, 9, 9) < 0.4
    hidden[..., 0] = False
    inputs = _inputs()
    module = DotProductAttention(HEADS, FEATURES, GROUPS, attn_mask_type="arbitrary")

    def expected(q, k, v):
        made = [
            attention(q[:, b], k[:, b], v[:, b], lambda i, j, b=b: not hidden[b, 0, i, j])
            for b in range(2)
        ]
        return torch.stack(made, 1)

    _compare(module, inputs, expected, attention_mask=hidden)
    keys = hidden[:, :, :1]
    pair = (torch.zeros_like(keys), keys)
    both = [module(*inputs, mask, attn_mask_type="padding") for mask in (keys, pair)]
    assert torch.equal(*both)


@pytest.mark.parametrize("bias", ["no_bias", "alibi"])
@pytest.mark.parametrize("window", [None, (2, 0), (1, 1)])
@pytest.mark.parametrize("kind", ["padding", "padding_causal", "padding_causal_bottom_right"])
def test_a_pair_of_masks_says_what_lengths_say(kind, window, bias):
    torch.manual_seed(3)
    sizes, lengths = (6, 9), torch.tensor([[6, 2], [9, 4]])
    query = torch.randn(6, 2, HEADS, FEATURES)
    key, value = torch.randn(2, 9, 2, GROUPS, FEATURES)
    module = DotProductAttention(HEADS, FEATURES, GROUPS, attn_mask_type=kind, window_size=window)
    starts = torch.nn.functional.pad(lengths.cumsum(1), (1, 0)).to(torch.int32)
    pair = [
        (torch.arange(size) >= own[:, None])[:, None, None]
        for size, own in zip(sizes, lengths, strict=True)
    ]
    own = {"core_attention_bias_type": bias}
    want = module(query, key, value, cu_seqlens_q=starts[0], cu_seqlens_kv=starts[1], **own)
    there = ~pair[0][:, 0, 0].T
    for given in (pair, tuple(pair)):
        torch.testing.assert_close(module(query, key, value, given, **own)[there], want[there])
    for wrong in ([pair[1]], [pair[0], ~pair[1][:, 0]], [pair[0], pair[1].float()]):
        with pytest.raises(ValueError, match="a pair of masks must be of the queries' padding"):
            module(query, key, value, wrong)


def test_cross_attention_takes_a_pair_of_masks():
    torch.manual_seed(3)
    shared = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    layer = hybridq.TransformerLayer(
        32, 64, 2, layer_type="decoder", enc_dec_attn_mask_type="padding_causal_bottom_right",
        **shared,
    )  # fmt: skip
    x, other = torch.randn(6, 2, 32), torch.randn(9, 2, 32)
    pair = (torch.zeros(2, 1, 1, 6) > 0, torch.zeros(2, 1, 1, 9) > 0)
    pair[0][1, ..., 2:], pair[1][1, ..., 4:] = True, True
    y = layer(x, encoder_output=other, enc_dec_attn_mask=pair)
    alone = layer(
        x[:2, 1:], encoder_output=other[:4, 1:],
        enc_dec_attn_mask=tuple(one[1:, ..., :n] for one, n in zip(pair, (2, 4), strict=True)),
    )  # fmt: skip
    torch.testing.assert_close(y[:2, 1:], alone)


@pytest.mark.parametrize("kind", ["causal", "no_mask"])
@pytest.mark.parametrize("when", ["pre_scale_bias", "post_scale_bias"])
def test_biases_and_their_gradients(when, kind):
    bias = torch.randn(1, HEADS, 9, 9, requires_grad=True)
    module = DotProductAttention(HEADS, FEATURES, GROUPS, attn_mask_type=kind, softmax_scale=0.3)

    def expected(q, k, v, bias):
        own = bias[0] * (0.3 if when == "pre_scale_bias" else 1.0)
        return _each(lambda i, j: kind == "no_mask" or j <= i, scale=0.3, bias=own)(q, k, v)

    given = {"core_attention_bias_type": when, "core_attention_bias": bias}
    _compare(module, _inputs(), expected, extra=[bias], **given)


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_has_the_papers_slopes(heads):
    torch.manual_seed(4)
    slopes = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3][:heads]
    q, k, v = (torch.randn(5, 1, heads, FEATURES) for _ in range(3))
    i = torch.arange(5)
    bias = torch.stack([-m * (i[:, None] - i).abs() for m in slopes])
    module = DotProductAttention(heads, FEATURES)
    want = _each(lambda i, j: j <= i, bias=bias)(q, k, v)
    for own in (None, torch.tensor(slopes), torch.tensor([slopes])):
        y = module(q, k, v, core_attention_bias_type="alibi", alibi_slopes=own)
        torch.testing.assert_close(y.double(), want, **CLOSE)


def test_softmax_types_add_to_the_denominator():
    inputs = _inputs()
    plus_one = DotProductAttention(HEADS, FEATURES, GROUPS, softmax_type="off-by-one")
    _compare(plus_one, inputs, _each(lambda i, j: j <= i, extra=torch.ones(HEADS)))
    learns = DotProductAttention(HEADS, FEATURES, GROUPS, softmax_type="learnable")
    assert list(learns.state_dict()) == ["softmax_offset"]
    with torch.no_grad():
        learns.softmax_offset.copy_(torch.tensor([0.5, -1.0, 2.0, 0.0]))

    def expected(q, k, v, offset):
        return _each(lambda i, j: j <= i, extra=offset.exp())(q, k, v)

    _compare(learns, inputs, expected, extra=[learns.softmax_offset])


def test_checkpointed_attention_is_the_same_bit_for_bit():
    inputs = _inputs()
    module = DotProductAttention(HEADS, FEATURES, GROUPS, attention_dropout=0.5)
    results = []
    for again in (False, True):
        torch.manual_seed(5)
        y = module(*inputs, checkpoint_core_attention=again)
        results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], module.eval()(*inputs))


def test_dropout_is_drawn_in_the_trackers_context():
    forks = []

    class Tracker:
        def fork(self):
            forks.append(1)
            return torch.random.fork_rng()

    options = {"attention_dropout": 0.5, "get_rng_state_tracker": Tracker}
    DotProductAttention(HEADS, FEATURES, GROUPS, **options)(*_inputs())
    DotProductAttention(HEADS, FEATURES, GROUPS, **options, sequence_parallel=True)(*_inputs())
    assert forks == [1]


@pytest.mark.parametrize("layout", ["sbhd", "thd"])
def test_bf16_is_rounded_once_and_compiles(layout):
    inputs = _inputs(dtype=torch.bfloat16)
    module = DotProductAttention(HEADS, FEATURES, GROUPS, qkv_format=layout)
    given = {}
    if layout == "thd":
        inputs = [one.detach().flatten(0, 1).requires_grad_() for one in inputs]
        starts = torch.tensor([0, 11, 18], dtype=torch.int32)
        given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 11}
        given["max_seqlen_kv"] = 11
    wide = [one.detach().float() for one in inputs]
    y = module(*inputs, **given)
    unit = 2.0**-7
    torch.testing.assert_close(y.float(), module(*wide, **given), rtol=unit, atol=unit)
    torch._dynamo.reset()
    graph = torch.compile(module, fullgraph=True, backend="aot_eager")
    made = graph(*inputs, **given)
    if layout == "thd":  # one padded batch with a mask there
        torch.testing.assert_close(made, y, rtol=unit, atol=unit)
    else:
        assert torch.equal(made, y)


def test_what_is_added_has_the_dtype_that_kernels_take(monkeypatch):
    seen = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def spy(query, key, value, mask, *rest, **options):
        seen.append((mask.dtype, query.dtype))
        return plain(query, key, value, mask, *rest, **options)

    monkeypatch.setattr(plain_gemm, "_is_slow", lambda *_: False)
    monkeypatch.setattr(plain_gemm.F, "scaled_dot_product_attention", spy)
    inputs = _inputs(dtype=torch.bfloat16)
    module = DotProductAttention(HEADS, FEATURES, GROUPS, softmax_type="learnable")
    module(*inputs, core_attention_bias_type="alibi").sum().backward()
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    assert inputs[0].grad.dtype == torch.bfloat16 and module.softmax_offset.grad.abs().sum() > 0


def test_bad_calls_are_told():
    q, k, v = _inputs()
    module = DotProductAttention(HEADS, FEATURES, GROUPS)
    bad = [
        ("query must be s b h d with 4 heads, got shape", (q[:, :, :2], k, v), {}),
        ("keys and values the same places", (q, k, v[:5]), {}),
        ("qkv_format must be one of", (q, k, v), {"qkv_format": "bhsd"}),
        ("'thd' needs cu_seqlens_q", (q[:, 0], k[:, 0], v[:, 0]), {"qkv_format": "thd"}),
        ("'causal' takes no attention_mask", (q, k, v, torch.ones(9, 9) > 0), {}),
        ("needs a core_attention_bias", (q, k, v), {"core_attention_bias_type": "pre_scale_bias"}),
        ("alibi_slopes go with 'alibi'", (q, k, v), {"alibi_slopes": torch.ones(4)}),
        (
            "cu_seqlens_q must begin at 0 and never fall",
            (q, k, v),
            {"cu_seqlens_q": torch.tensor([0, 4, 3]), "cu_seqlens_kv": torch.tensor([0, 4, 9])},
        ),
    ]
    for text, args, options in bad:
        with pytest.raises(ValueError, match=text):
            module(*args, **options)
    starts = torch.tensor([0, 4, 9])
    given = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "qkv_format": "thd"}
    rows = [one[:, 0] for one in (q, k, v)]
    with pytest.raises(ValueError, match="max_seqlen must be at least the longest sequence, 5"):
        module(*rows, **given, max_seqlen_q=4)
    with pytest.raises(ValueError, match="must end at or before the last row, 8, got 9"):
        module(rows[0][:8], *rows[1:], **given)
    for many in ([0, 9], [0, 2, 4, 9]):
        other = {**given, "cu_seqlens_kv": torch.tensor(many)}
        with pytest.raises(ValueError, match=r"as many sequences, got 2 and [13]"):
            module(*rows, **other)
    with pytest.raises(ValueError, match="softmax_type must be one of"):
        DotProductAttention(4, 8, softmax_type="sharp")
    assert repr(hybridq.nn.DotProductAttention(4, 8)).startswith("DotProductAttention(num_att")


def test_lengths_of_another_batch_are_told():
    """Those of one sequence would be taken for all, and longer ones cut."""
    q, k, v = (torch.randn(2, 5, 4, 8) for _ in range(3))
    core = DotProductAttention(4, 8, qkv_format="bshd", attn_mask_type="padding")
    layer = hybridq.nn.MultiheadAttention(32, 4, qkv_format="bshd", attn_mask_type="padding")
    calls = (lambda **given: core(q, k, v, **given), lambda **given: layer(q.flatten(2), **given))
    for call in calls:
        for many in ([0, 5], [0, 2, 4, 5]):
            starts = torch.tensor(many)
            with pytest.raises(
                ValueError, match=r"as many sequences as the batch has, 2, got [13]"
            ):
                call(cu_seqlens_q=starts, cu_seqlens_kv=starts)
        starts = torch.tensor([0, 3, 9])
        with pytest.raises(ValueError, match=r"cu_seqlens_kv must be .* at most 5 tokens, .* of 6"):
            call(cu_seqlens_q=torch.tensor([0, 3, 8]), cu_seqlens_kv=starts)
        with pytest.raises(ValueError, match=r"needs an attention_mask \(or cu_seqlens_q and"):
            call()


@pytest.mark.parametrize("batch", [1, 2])
def test_masks_and_biases_of_another_batch_are_told(batch):
    q = torch.randn(5, batch, 4, 8)
    module = DotProductAttention(4, 8, attn_mask_type="no_mask")
    many, heads = rf"as many sequences as the batch has, {batch}, or of 1", "must be of 4 heads"
    bad = [
        (many, {"core_attention_bias_type": "alibi", "alibi_slopes": torch.ones(3, 4)}),
        (
            many,
            {
                "core_attention_bias_type": "post_scale_bias",
                "core_attention_bias": torch.ones(3, 4, 5, 5),
            },
        ),
        (many, {"attention_mask": torch.ones(3, 1, 5, 5) < 0, "attn_mask_type": "arbitrary"}),
        (many, {"attention_mask": torch.ones(3, 1, 1, 5) < 0, "attn_mask_type": "padding"}),
        (heads, {"attention_mask": torch.ones(1, 3, 5, 5) < 0, "attn_mask_type": "arbitrary"}),
    ]
    for text, given in bad:
        with pytest.raises(ValueError, match=text):
            module(q, q, q, **given)
