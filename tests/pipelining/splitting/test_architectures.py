"""Unmodified models of Hugging Face, split into 2 and 4 stages: they give what eager gives.

Tiny configurations with random weights; nothing is fetched. Dropout is on, with the same numbers.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from meshwright.pipelining import Pipe, SplitPoint, pipeline
from support.hugging_face import KINDS, blocks_of, model_of

pytest.importorskip("transformers")


def loss(output: Any) -> torch.Tensor:
    """Something of all that the model gives."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return sum((leaf.square().sum() for leaf in leaves if leaf.requires_grad), torch.zeros(()))


def gradients(pipe: Pipe, alone: nn.Module) -> dict[str, torch.Tensor]:
    """Of the stages, by the first name in the model; those of holders are summed."""
    names: dict[int, str] = {}
    first = {
        name: names.setdefault(id(parameter), name)
        for name, parameter in alone.named_parameters(remove_duplicate=False)
    }
    found: dict[str, torch.Tensor] = {}
    for stage in range(pipe.num_stages):
        for name, parameter in pipe.get_stage_module(stage).named_parameters():
            if parameter.grad is not None:
                key = first[name]
                found[key] = found[key] + parameter.grad if key in found else parameter.grad
    return found


@pytest.mark.few(1, slow=7)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", KINDS)
def test_split(name: str) -> None:
    torch.manual_seed(0)
    alone: nn.Module = model_of(name, is_plain=True)
    arguments = KINDS[name].inputs(2, torch.Generator().manual_seed(0))
    model = copy.deepcopy(alone)
    torch.manual_seed(1)
    expected = alone(**arguments)
    loss(expected).backward()
    blocks = blocks_of(name, model)
    assert len(blocks) == 4
    for stages in (2, 4):
        spec = dict.fromkeys(blocks[:: 4 // stages][1:], SplitPoint.BEGINNING)
        pipe = pipeline(model, (), arguments, split_spec=spec)
        assert pipe.num_stages == stages
        for parameter in pipe.parameters():
            parameter.grad = None
        torch.manual_seed(1)
        found = fx.Interpreter(pipe.split_gm).run(*arguments.values())
        assert type(found) is type(expected)
        torch.testing.assert_close(dict(found), dict(expected))
        loss(found).backward()
        wanted = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        assert wanted
        torch.testing.assert_close(gradients(pipe, alone), wanted)
        for stage in range(stages):
            assert pipe.get_stage_module(stage).state_dict().keys() <= model.state_dict().keys()
