"""Pictures of the docs: each is in the gallery, under it the command that makes it."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from places import ROOT

DOCS = ROOT / "docs"
PICTURES = sorted((DOCS / "images").glob("*.png"))
#: A picture, and the command in the first line of the text below it.
SHOWN = re.compile(r"!\[[^\]]+\]\(images/([\w.-]+)\)\n\n`([^`]+)`")
COMMANDS = dict(SHOWN.findall((DOCS / "gallery.md").read_text()))


def test_the_gallery_has_every_picture_and_no_other() -> None:
    assert set(COMMANDS) == {picture.name for picture in PICTURES}


def test_pictures_of_pages_are_in_the_gallery() -> None:
    for page in DOCS.rglob("*.md"):
        for name in re.findall(r"!\[[^\]]*\]\((?:\.\./)*images/([\w.-]+)\)", page.read_text()):
            assert name in COMMANDS, page


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_is_one_of_the_tree(name: str) -> None:
    program, script, *_ = COMMANDS[name].split()
    assert program == "python" and (ROOT / script).is_file()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if number else pytest.mark.more)
        for number, name in enumerate(name for name in COMMANDS if "gallery.py" in COMMANDS[name])
    ],
)
def test_the_command_makes_the_picture(name: str, tmp_path) -> None:
    """Fonts differ between versions of matplotlib: most of the picture is the same."""
    command = COMMANDS[name].split()
    subprocess.run(
        [sys.executable, *command[1:], "--folder", tmp_path], cwd=ROOT, check=True, timeout=300
    )
    made, kept = (
        np.asarray(Image.open(path).convert("RGB")).astype(int)
        for path in (tmp_path / name, DOCS / "images" / name)
    )
    assert made.shape == kept.shape
    assert (np.abs(made - kept).max(-1) > 64).mean() < 0.05


@pytest.mark.more
def test_a_wrong_name_is_told() -> None:
    script = DOCS / "images" / "gallery.py"
    done = subprocess.run([sys.executable, script, "nothing"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "a name must be one of hybrid-tensor" in done.stderr
