"""The page of a report: one file that parses, needs no network, and sorts in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import hybridq
from hybridq.report import PrecisionReport

#: Elements that have no end tag.
VOID = ("meta", "input", "line", "circle", "rect")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Page(HTMLParser):
    """Reads tables, checks that elements are closed in order, and collects references."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.rows: dict[str, list[list[str]]] = {}
        self._table = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.references += [str(given[key]) for key in ("src", "href") if key in given]
        if tag == "table":
            self._table = str(given["id"])
            self.rows[self._table] = []
        if tag == "tr" and "hidden" not in given:
            self.rows[self._table].append([])
        if tag == "td" and "hidden" not in given and self.rows[self._table]:
            self.rows[self._table][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["td"]:
            self.rows[self._table][-1][-1] += data


def made() -> PrecisionReport:
    torch.manual_seed(0)
    model = hybridq.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    with torch.no_grad():
        model[1].weight[3, 3] = float("nan")
    batch = torch.randn(32, 64)
    return hybridq.report(
        model, batch, ["nvfp4"], recipe="mxfp8", loss=lambda y: y.square().mean(), switch=True
    )


def test_a_page_is_one_file_with_all_rows(tmp_path: Path) -> None:
    found, path = made(), tmp_path / "report.html"
    found.to_html(path)
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open and not page.references
    assert not re.findall(r"https?://|@import|url\(", text)
    assert len(page.rows["slots"]) == 1 + len(found.slots)
    assert len(page.rows["products"]) == 1 + len(found.products)
    assert "first nan: 1, weight, rowwise" in text
    data = re.search(r"<script type='application/json' id='data'>(.*?)</script>", text, re.S)
    assert data is not None and json.loads(data.group(1)) == json.loads(found.to_json())


@pytest.mark.slow
def test_a_browser_sorts_and_filters(tmp_path: Path) -> None:
    """Headless Chromium runs the page's script: clicks of a head, and a choice of a format."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    found, path = made(), tmp_path / "report.html"
    found.to_html(path)
    text = path.read_text(encoding="utf-8")
    act = """<script>
      const head = document.querySelectorAll('#slots th')[5];
      head.click();
      const once = head.getAttribute('aria-sort');
      head.click();
      document.title = once + ' ' + head.getAttribute('aria-sort');
      const format = document.getElementById('format');
      format.value = 'nvfp4';
      format.dispatchEvent(new Event('input'));
    </script></body>"""
    path.write_text(text.replace("</body>", act), encoding="utf-8")
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'own'}")
    done = subprocess.run(
        [browser, *options, "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None and title.group(1) == "descending ascending"
    shown = Page(done.stdout).rows["slots"][1:]
    assert {cells[3] for cells in shown} == {"nvfp4"}
    errors = [float(cells[5]) for cells in shown if cells[5]]
    assert len(errors) > 5 and errors == sorted(errors)
    assert done.stdout.count("<circle") >= 4  # of the planes without a NaN
