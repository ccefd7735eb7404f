"""The tutorial, followed by its words, where the wheel is installed and nothing else of ours is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.docs.blocks import blocks
from support.docs.commands import lines
from support.wheel import environment, run

pytestmark = pytest.mark.slow


def test_the_tutorial_is_followed_by_its_words(tmp_path: Path) -> None:
    environment(tmp_path)
    page = [*blocks("docs/tutorial.md")]
    codes = [block.code for block in page if block.language == "python"]
    one, several, sharded, planned, saved, resumed = codes
    commands = [[*lines(block)] for block in page if block.language == "bash"]
    alone, on_four, afterwards = commands

    def train(name: str, text: str) -> list[float]:
        """Save the file, start it as the page says, and read the losses that it prints."""
        (tmp_path / name).write_text(text)
        (words,) = alone if name == "one.py" else on_four
        assert words[-1] == name
        said = run(*words, cwd=tmp_path)
        return [float(loss) for loss in re.findall(r"loss (\d+\.\d{4})", said)]

    first = train("one.py", one)
    assert first[0] < 0.5
    found = [train("train.py", several)]
    (line,) = re.findall(r"^mw\.replicate\(model\).*\n", several, re.MULTILINE)
    found.append(train("train.py", several.replace(line, sharded) + saved + resumed))
    for words in afterwards:
        assert run(*words, cwd=tmp_path)
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    sizes = {"0": (512, 64), "2": (4096, 64), "4": (64, 1)}
    for layer, (weight, bias) in sizes.items():
        assert weights.pop(f"{layer}.weight").numel() == weight
        assert weights.pop(f"{layer}.bias").numel() == bias
    assert not weights
    # The ranks print the losses of their quarters: their mean is that of one process.
    assert all(len(losses) == 4 for losses in found)
    assert all(abs(sum(losses) / 4 - first[0]) < 1e-3 for losses in found)
    # With a plan each of them prints that of the batch.
    planned_losses = train("train.py", several.partition(line)[0] + planned)
    assert all(abs(loss - first[0]) < 1e-3 for loss in planned_losses)
    assert len(planned_losses) == 4
