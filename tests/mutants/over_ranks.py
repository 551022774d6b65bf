"""Mutants of what several ranks compute together: collectives, cut matrices, flat masters."""

from __future__ import annotations

from .record import Mutant, Rule

_COLLECTIVES = "docs/guides/collectives.md"
_PARALLEL = "docs/guides/tensor-parallel.md"
_FLAT = "docs/guides/flat-optimizers.md"

SUMS = Rule(
    "Quantized collectives",
    "decodes, adds in FP32 in the order of ranks, and rounds once",
    _COLLECTIVES,
)
DEALT_OUT = Rule(
    "Quantized collectives", "the tensor as one row, dealt out in whole blocks", _COLLECTIVES
)
SEEDS = Rule(
    "Quantized collectives",
    "ranks draw from their own generators and add their numbers, so that errors of ranks differ",
    _COLLECTIVES,
)
WHOLE = Rule(
    "The bits of the whole",
    "need the largest value of all ranks first: one reduction",
    _COLLECTIVES,
)
RESIDUALS = Rule(
    "Gradients", "keeps what rounding took from a tensor's message, in FP32", _COLLECTIVES
)
FINITE = Rule("Gradients", "Values that are not finite leave no residual", _COLLECTIVES)
SPLITS = Rule("Ranks that differ", "an error on every rank", _COLLECTIVES)
CUT_BLOCKS = Rule("The same bits", "of a block that a boundary cuts", _PARALLEL)
NEIGHBOURS = Rule(
    "The same bits", "multiplies zeros in the place of its neighbour's entries", _PARALLEL
)
REDUCED = Rule("The same bits", "One max-reduction over the group finds both", _PARALLEL)
PLACES = Rule("The same bits", "random bits belong to places in the whole matrix", _PARALLEL)
ALL_BLOCKS = Rule("What a range of values gives", "The amaxes of *all* blocks are reduced", _FLAT)
STAND_INS = Rule(
    "What a range of values gives", "codes; at most two blocks of a rank are cut", _FLAT
)
HALF_BYTES = Rule("Flat buffers", "4-bit codes lie two to a byte", _FLAT)
OVER_OTHERS = Rule("Flat buffers", "is reduced over as well, once for all parameters", _FLAT)

_TESTS = "tests/distributed/test_collectives.py::test_"
_CUT = "tests/shards/test_cut.py::test_"
_MASTERS = "tests/distributed/test_flat_masters.py::test_"


def _of(slug: str, rule: Rule, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant("modules", slug, rule, f"src/hybridq/{file}.py", old, new, tests)


_CALLS = "distributed/collectives/calls"
_VALUES, _ROUNDING = (
    _TESTS + "two_ranks_are_one_process",
    _TESTS + "rounding_and_planes_of_two_ranks",
)

_QUANTIZED = (
    _of(
        "ranks-add-in-bf16",
        SUMS,
        _CALLS,
        "[own] * call.world, 0, torch.float32)",
        "[own] * call.world, 0, torch.bfloat16)",
        _VALUES,
    ),
    _of(
        "ranks-add-from-the-last",
        SUMS,
        _CALLS,
        "total = parts[0].clone()\n    for number in range(1, call.world):",
        "total = parts[-1].clone()\n    for number in range(call.world - 1):",
        _TESTS + "sums_are_in_the_order_of_ranks",
    ),
    _of(
        "a-sum-is-sent-unrounded",
        SUMS,
        _CALLS,
        "    total = total.to(dtype)\n",
        "",
        _VALUES,
    ),
    _of(
        "a-mean-is-a-sum",
        SUMS,
        _CALLS,
        "return total / call.world if call.is_mean else total",
        "return total",
        _VALUES,
    ),
    _of(
        "sums-are-dealt-out-inside-of-blocks",
        DEALT_OUT,
        _CALLS,
        "size = -(-count // (world * unit)) * unit",
        "size = -(-count // world)",
        _VALUES,
    ),
    _of(
        "gathered-parts-have-amaxes-of-their-own",
        WHOLE,
        _CALLS,
        "amax = group_amax(amax, call.name)",
        "amax = amax.clone()",
        _VALUES,
    ),
    _of(
        "ranks-round-alike",
        SEEDS,
        _CALLS,
        "own_seed = None if seed is None else seed + call.rank * call.world",
        "own_seed = seed",
        _ROUNDING,
    ),
    _of(
        "both-messages-round-alike",
        SEEDS,
        _CALLS,
        "second = None if seed is None else seed + call.world * call.world",
        "second = seed",
        _ROUNDING,
    ),
    _of(
        "sums-leave-no-residual",
        RESIDUALS,
        _CALLS,
        'wanted = total if flight.residual is None else flight.residual.added("reduced", total)',
        "wanted = total if flight.residual is None else total.float()",
        _ROUNDING,
    ),
    _of(
        "infinities-leave-residuals",
        FINITE,
        "distributed/collectives/error_feedback",
        ".nan_to_num_(0.0, 0.0, 0.0)",
        "",
        _ROUNDING,
    ),
    _of(
        "splits-are-compared-with-themselves",
        SPLITS,
        "shards/call_agreement",
        'if sender["splits"] and sender["splits"][0][j] != receiver["splits"][1][i]:',
        'if sender["splits"] and sender["splits"][0][j] != sender["splits"][0][j]:',
        _TESTS + "ranks_that_differ_all_raise",
    ),
)

_WHOLE = _CUT + "the_bytes_are_those_of_the_whole"
_CUTS = (
    _of(
        "cut-blocks-have-their-own-amax",
        CUT_BLOCKS,
        "shards/cut",
        "window.select(cut.dim, edge.at).copy_(values)",
        "window.select(cut.dim, edge.at).zero_()",
        _WHOLE,
    ),
    _of(
        "planes-of-two-directions-share-their-edges",
        CUT_BLOCKS,
        "shards/cut",
        "if len(needs) == 2 and not (needs[0].edges and needs[1].edges):",
        "if len(needs) == 2:",
        _CUT + "square_blocks_of_two_sizes",
    ),
    _of(
        "neighbours-codes-stay",
        NEIGHBOURS,
        "shards/cut",
        "        _clear(buffers[0], need, cut)",
        "        buffers[0].view(-1)",
        _CUT + "windows_multiply_as_the_whole",
    ),
    _of(
        "the-wrong-half-of-a-byte-is-cleared",
        NEIGHBOURS,
        "shards/cut",
        "before // per_byte).bitwise_and_(0xF0)",
        "before // per_byte).bitwise_and_(0x0F)",
        _WHOLE,
    ),
    _of(
        "parts-keep-their-amaxes",
        REDUCED,
        "shards/cut",
        'reduced = functional_all_reduce(bits, "max", cut.group).view(torch.float32)',
        'functional_all_reduce(bits, "max", cut.group)\n    reduced = bits.view(torch.float32)',
        _WHOLE,
    ),
    _of(
        "an-amax-group-is-forgotten-in-parts",
        REDUCED,
        "shards/cut",
        "stat = group_amax(stat, amax_group)",
        "stat = stat.clone()",
        _CUT + "an_amax_group_is_reduced_over_too",
    ),
    _of(
        "parts-draw-as-if-they-were-first",
        PLACES,
        "shards/cut",
        'place = {"row0": low} if cut.dim == 0 else {"col0": low}',
        'place = {"row0": 0} if cut.dim == 0 else {"col0": 0}',
        _CUT + "random_bits_are_those_of_the_place",
    ),
    _of(
        "pieces-draw-in-the-order-of-ranks",
        PLACES,
        "shards/cut",
        "row0 = (number * len(cut.sizes) + cut.rank) * length",
        "row0 = (cut.rank * cut.runs + number) * length",
        "tests/shards/test_token_gather.py::test_the_bytes_are_those_of_the_whole",
    ),
)

_EQUAL = _MASTERS + "planes_are_those_of_the_whole_master"
_FLAT_MASTERS = (
    _of(
        "blocks-of-a-range-are-the-first-ones",
        ALL_BLOCKS,
        "distributed/flat/flat_plane",
        "grid[low // height :][: blocks.shape[0]]",
        "grid[: blocks.shape[0]]",
        _EQUAL,
    ),
    _of(
        "rows-of-a-range-have-the-first-scales",
        ALL_BLOCKS,
        "distributed/flat/flat_plane",
        "stat = stat[low : low + window.shape[0]]",
        "stat = stat[: window.shape[0]]",
        _EQUAL,
    ),
    _of(
        "the-block-behind-a-range-is-its-own",
        STAND_INS,
        "distributed/flat/flat_plane",
        "flat[last:] = rest[last - tail * cols :]",
        "flat[last:] = 0.0 * rest[last - tail * cols :]",
        _EQUAL,
    ),
    _of(
        "the-block-before-a-range-is-its-own",
        STAND_INS,
        "distributed/flat/flat_plane",
        "flat[:first] = self._spread(maxima, low, low + head)[:first]",
        "flat[:first] = 0.0 * self._spread(maxima, low, low + head)[:first]",
        _EQUAL,
    ),
    _of(
        "infinite-amaxes-are-not-clamped",
        ALL_BLOCKS,
        "distributed/flat/flat_plane",
        "one_nan(amax.clamp(max=_FP32_MAX))",
        "one_nan(amax)",
        _MASTERS + "specials_kinds_state_and_faults",
    ),
    _of(
        "the-first-code-of-a-range-overwrites-its-byte",
        HALF_BYTES,
        "distributed/flat/code_bytes",
        "byte.copy_((byte & 0x0F) | (codes[:1] << 4))",
        "byte.copy_(codes[:1] << 4)",
        _MASTERS + "codes_in_flat_buffers",
    ),
    _of(
        "an-amax-group-is-forgotten-in-masters",
        OVER_OTHERS,
        "distributed/flat/master_weights",
        "found[number] = amax",
        "found[number] = found[number]",
        _MASTERS + "specials_kinds_state_and_faults",
    ),
)

OVER_RANKS = (*_QUANTIZED, *_CUTS, *_FLAT_MASTERS)
