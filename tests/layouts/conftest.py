"""Fixtures over the table of layouts."""

from __future__ import annotations

import pytest

from hybridq import layouts
from layout_cases import CASES


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case).replace("/", "_"))
def case(request):
    """A layout, the name of a scheme of it, and a spec string that it holds."""
    name, scheme, spec = request.param
    return layouts.get(name), scheme, spec
