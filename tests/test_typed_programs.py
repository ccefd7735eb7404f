"""`make check-programs` goes red on a program that a reader's type checker would reject."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import typed_programs

RIGHT = """\
import torch
from torch import nn

import meshwright as mw
from meshwright.data_parallel import FSDPModule, ReplicatedModule


class Net(nn.Linear):
    def own(self) -> int:
        return 1


number: int = mw.fully_shard(Net(2, 2)).own()
several = [Net(2, 2)]
numbers: list[int] = [net.own() for net in mw.fully_shard(several, reshard_after_forward=2)]
number = mw.replicate(Net(2, 2), bucket_cap_mb=3).own()
number = mw.parallelize_module(Net(2, 2), mw.init_device_mesh("cpu", (2,)), {}).own()
first, second = mw.fully_shard(Net(2, 2)), mw.replicate(Net(2, 2))
assert isinstance(first, FSDPModule) and isinstance(second, ReplicatedModule)
first.reshard()
with second.no_sync():
    pass
mw.DistributedDataParallel(Net(2, 2), None, None, 0, True, static_graph=True)
"""
WRONG = (
    "text: str = mw.fully_shard(Net(2, 2)).own()",
    "text = mw.replicate(Net(2, 2)).own()",
    "mw.replicate(Net(2, 2), bucket_cap=3)",
    'mw.DistributedDataParallel(Net(2, 2), None, None, 0, "yes")',
    'mw.fully_shard(Net(2, 2), mesh="data")',
)


@pytest.mark.slow
def test_checkers_find_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(RIGHT)
    wrong.write_text(RIGHT + "\n".join(WRONG) + "\n")
    command = [sys.executable, str(Path(typed_programs.__file__)), str(right), str(wrong)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "right.py" not in done.stdout
    said = done.stdout.split("\n")
    for number in range(len(RIGHT.splitlines()) + 1, len(wrong.read_text().splitlines()) + 1):
        lines = [line for line in said if f"wrong.py:{number}:" in line]
        assert len(lines) >= 2, f"line {number}: expected both checkers to find it, found {lines}"


def test_programs_are_whole() -> None:
    programs = dict(typed_programs.shown())
    assert {"readme_1.py", "tutorial_0.py", "tutorial_1.py", "example_own_loop.py"} <= {*programs}
    for name, program in programs.items():
        compile(program, name, "exec")
    assert "mw.fully_shard(layer)" in programs["readme_1.py"]
    assert "checkpoint.load(" in programs["tutorial_1.py"]
