"""The tutorial, followed by its words, where the wheel is installed and nothing else of ours is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.clients import needs
from support.docs.blocks import blocks
from support.docs.commands import lines
from support.wheel import environment, run

pytestmark = pytest.mark.slow


def written(page: str, language: str) -> list[str]:
    """The blocks of a page in ``language``."""
    return [block.code for block in blocks(f"docs/{page}") if block.language == language]


def commands(page: str) -> list[list[list[str]]]:
    """The words of each command, block by block."""
    return [[*lines(block)] for block in blocks(f"docs/{page}") if block.language == "bash"]


def test_the_tutorial_is_followed_by_its_words(tmp_path: Path) -> None:
    environment(tmp_path)
    one, several, sharded, planned, saved, resumed = written("tutorial.md", "python")[:6]
    alone, on_four, afterwards = commands("tutorial.md")[:3]

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


def test_a_mixture_of_experts_is_trained_by_the_words_of_the_tutorial(tmp_path: Path) -> None:
    needs("transformers", "peft")
    environment(tmp_path)
    made, *compared = written("tutorial.md", "python")[6:]
    (tmp_path / "model.py").write_text(made)
    run("python", "model.py", cwd=tmp_path)
    for name, text, words, code in zip(
        ("moe.toml", "lora.toml"),
        written("tutorial.md", "toml"),
        commands("tutorial.md")[3:],
        compared,
        strict=True,
    ):
        (tmp_path / name).write_text(text)
        trained, resumed = words
        assert name in trained and name in resumed
        assert "finished at step 20 of 20 on 4 ranks" in run(*trained, cwd=tmp_path)
        assert "finished at step 30 of 30 on 2 ranks" in run(*resumed, cwd=tmp_path)
        (tmp_path / "compare.py").write_text(code)
        said = run("python", "compare.py", cwd=tmp_path)
        assert said.strip().endswith("step 30: equal logits: True")
