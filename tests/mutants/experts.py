"""Mutants of experts over ranks: who sends which tokens, and whose histories are whose."""

from __future__ import annotations

from .record import Mutant, Rule

_GUIDE = "docs/guides/expert-parallel.md"
SHARES = Rule(
    "With tensor parallelism",
    "each sends an equal share to the experts; what comes back is gathered",
    _GUIDE,
)
LOSSES = Rule(
    "With tensor parallelism",
    "gradients of experts are those of the mean over batches, whatever the two meshes are",
    _GUIDE,
)
COMPARED = Rule("With tensor parallelism", "other ones are an error on every rank", _GUIDE)
OWN = Rule(
    "With data parallelism", "the largest value over the ranks that have that expert", _GUIDE
)
IDLE = Rule(
    "Delayed scaling", "A group without tokens records nothing", "docs/guides/grouped-linear.md"
)

_FOLDING = "tests/expert_parallel/test_experts_folding.py::test_two_ranks_of_both"
_HISTORIES = (
    "tests/expert_parallel/test_experts_histories.py::test_histories_are_those_of_one_process"
)


def _of(slug: str, rule: Rule, file: str, old: str, new: str, test: str) -> Mutant:
    return Mutant("modules", slug, rule, f"src/hybridq/{file}.py", old, new, (test,))


EXPERTS = (
    _of(
        "every-rank-sends-the-first-share",
        SHARES,
        "expert_parallel/lanes",
        "start = lanes.first(x.shape[0])",
        "start = 0",
        _FOLDING,
    ),
    _of(
        "gradients-of-shares-stay-shares",
        SHARES,
        "expert_parallel/lanes",
        "return _All.apply(grad, ctx.lanes, ctx.rows), None",
        "return grad.new_zeros(ctx.rows, *grad.shape[1:]), None",
        _FOLDING,
    ),
    _of(
        "one-loss-counts-once-for-each-rank",
        LOSSES,
        "expert_parallel/ranks",
        "return self.mesh.size() / (1 if self.batch is None else self.batch.world)",
        "return float(self.mesh.size())",
        _FOLDING,
    ),
    _of(
        "tokens-of-a-batch-are-not-compared",
        COMPARED,
        "expert_parallel/exchange",
        "known == lanes or torch",
        "known != lanes or torch",
        _FOLDING,
    ),
    _of(
        "other-experts-share-their-amaxes",
        OWN,
        "expert_parallel/parallelize",
        'reduce_over(module, exchange.replicas or "", is_own=True)',
        "reduce_over(module, exchange.name, is_own=True)",
        _HISTORIES,
    ),
    _of(
        "idle-groups-record-zero",
        IDLE,
        "nn/autograd/grouped_tokens",
        "found = torch.where(sizes[:, None] > 0, found, -1.0)",
        "found = torch.where(sizes[:, None] > 0, found, 0.0)",
        "tests/nn/delayed_scaling/test_grouped_delayed.py"
        "::test_what_has_no_rows_keeps_its_histories",
    ),
)
