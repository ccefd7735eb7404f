"""Models of Hugging Face under `parallelize` on pairs of axes, and the example that trains one.

Nothing is fetched. Each rank imports their package, so these cases are slow.
`tests/parity/test_hugging_face_models.py` trains more models on one axis.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks, assert_same_training
from support.hugging_face import KINDS, sample_of
from support.internals.axes import Axes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
pytest.importorskip("transformers")


def check(ranks: Ranks, name: str, axes: tuple[str, str]) -> None:
    plan = Plan(
        axes=Axes.of(dict.fromkeys(axes, 2)),
        tensor=TensorPlan(rules=KINDS[name].rules if "tensor" in axes else None),
        train=TrainPlan(clip_norm=0.5),
        pipeline=PipelinePlan(schedule="1f1b", microbatches=2)
        if "pipeline" in axes
        else PipelinePlan(),
    )
    assert_same_training(
        sample_of(name), plan, world=4, batch_size=8, ranks=partial(ranks, timeout=200)
    )


TRACED = pytest.mark.devices("host", reason="torch.export sees cpu and cpu:0 as two devices")
PAIRS = (
    ("replicate", "shard"),
    ("replicate", "tensor"),
    ("shard", "tensor"),
    pytest.param(("pipeline", "replicate"), marks=TRACED),
    pytest.param(("pipeline", "shard"), marks=TRACED),
    pytest.param(("pipeline", "tensor"), marks=TRACED),
)


@pytest.mark.few(2, slow=2)
@pytest.mark.parametrize("axes", PAIRS, ids="-".join)
def test_a_llama_trains_on_pairs_of_axes_as_one_process(
    ranks: Ranks, axes: tuple[str, str]
) -> None:
    check(ranks, "Llama", axes)


@pytest.mark.parametrize("axes", [("shard", "tensor"), ("pipeline", "tensor")], ids="-".join)
def test_a_gpt2_trains_on_pairs_of_axes_as_one_process(ranks: Ranks, axes: tuple[str, str]) -> None:
    check(ranks, "GPT-2", axes)


EXAMPLES = Path(__file__).parents[2] / "examples"


def losses_of_example(processes: int, *arguments: str) -> list[float]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / "llama.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src")},
    )
    assert done.returncode == 0, done.stderr
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.M)]


@pytest.mark.soak
def test_the_example_trains_the_same_model_on_two_layouts(tmp_path: Path) -> None:
    alone = tmp_path / "alone.toml"
    alone.write_text("[train]\nclip_norm = 1.0\n")
    expected = losses_of_example(1, str(alone))
    assert len(expected) == 10
    assert expected[-1] < 0.9 * expected[0]
    plan = str(EXAMPLES / "llama.toml")
    for overrides in ((), ("axes.shard=1", "axes.pipeline=2", "pipeline.microbatches=4")):
        assert losses_of_example(4, plan, *overrides) == pytest.approx(expected, rel=1e-4)
