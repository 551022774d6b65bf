"""Mutants of the Python layers above the kernels: statistics, histories, groups."""

from __future__ import annotations

from . import rules
from .record import Mutant, Rule


def _of(slug: str, rule: Rule, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant("modules", slug, rule, f"src/hybridq/{file}.py", old, new, tests)


_STATISTICS = "tests/quantizers/test_statistics.py"
_GIVEN = "tests/nn/delayed_scaling/test_record_given.py"
_FLAT = "tests/distributed/test_flat_masters.py::test_"
_NAMES = "tests/distributed/test_distributed_checkpoint.py::test_"

MODULES = (
    _of(
        "statistics-draw-another-stream",
        rules.GROUP_AMAX,
        "quantizers/statistics",
        "(row=row.spec, row_stat=row_stat).row_alone()",
        "(row=row.spec, row_stat=row_stat, row_stream=0).row_alone()",
        _STATISTICS,
    ),
    _of(
        "operands-tell-statistics-no-stream",
        rules.GROUP_AMAX,
        "nn/autograd/slot_encoder",
        "with_statistics(rest, x,",
        "with_statistics(rest._replace(row_stream=0), x,",
        _STATISTICS,
    ),
    _of(
        "histories-under-a-checkpoint-wrapper",
        rules.HISTORY_NAMES,
        "distributed/scaling_history",
        '"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"',
        '"_orig_mod", "_fsdp_wrapped_module"',
        _NAMES + "histories_have_the_names_of_a_model_that_is_not_wrapped",
    ),
    _of(
        "keys-under-a-checkpoint-wrapper",
        rules.HISTORY_NAMES,
        "nn/delayed_scaling/state_dict",
        '_CHECKPOINTED: Final = "_checkpoint_wrapped_module"',
        '_CHECKPOINTED: Final = "_no_such_module"',
        _NAMES + "a_state_dict_with_histories_goes_through_checkpointing_wrappers",
    ),
    _of(
        "gathered-columns-record-the-rows",
        rules.RECORDED,
        "nn/autograd/slot_encoder",
        'own = found[:1] if plan.col_source == "original" else found[1:]',
        "own = found[:1]",
        _GIVEN,
    ),
    _of(
        "gathered-columns-record-nothing",
        rules.RECORDED,
        "nn/autograd/slot_encoder",
        "if with_col and plan.col_delay and not plan.shares_state:\n        own",
        "if not with_col and plan.col_delay and not plan.shares_state:\n        own",
        _GIVEN,
    ),
    _of(
        "every-product-accumulates",
        rules.ACCUMULATION,
        "kernels/operators/dense",
        "out if accumulate else None, out.dtype, precision",
        "out, out.dtype, precision",
        "tests/kernels/operators/test_dense.py::test_a_product_into_a_tensor_adds_only_where_it_is_told",
    ),
    _of(
        "groups-begin-at-the-first-token",
        rules.BY_GROUP,
        "kernels/ragged/group_loop",
        "made[g] = torch.maximum(high.abs().float(), low.abs().float())\n        begin = end",
        "made[g] = torch.maximum(high.abs().float(), low.abs().float())\n        begin = 0",
        "tests/kernels/ragged/test_sync_free_groups.py::"
        "test_the_largest_of_a_group_is_not_that_of_those_before_it",
    ),
    _of(
        "blocks-on-two-ranks-have-an-amax-on-each",
        rules.STAND_INS,
        "distributed/flat/flat_plane",
        "if self._block is not None and window.numel() != values.numel():",
        "if window.numel() < values.numel():",
        _FLAT + "planes_are_those_of_the_whole_master",
    ),
    _of(
        "codes-of-a-half-byte-overwrite-the-other-half",
        rules.HALF_BYTES,
        "distributed/flat/code_bytes",
        "byte.copy_((byte & 0xF0) | codes[-1:])",
        "byte.copy_(codes[-1:])",
        _FLAT + "codes_in_flat_buffers",
    ),
    _of(
        "a-byte-lies-on-two-ranks",
        rules.HALF_BYTES,
        "distributed/flat/flat_agreement",
        "if at % 2 and before != rank:",
        "if at % 2 and before < 0:",
        _FLAT + "specials_kinds_state_and_faults",
    ),
)
