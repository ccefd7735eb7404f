"""The operators that stand for gradient reductions in graphs."""

from __future__ import annotations

import pytest
import torch

from meshwright.torch_internals.tensors import OpOverload
from support.internals.comm import marks


@pytest.mark.parametrize(
    "operator", [marks.GRAD_REDUCE, marks.AGREE, marks.DIVIDED, marks.with_kept, marks.deliver]
)
def test_no_operator_goes_into_a_cuda_graph(operator: OpOverload) -> None:
    assert torch.Tag.cudagraph_unsafe in operator.tags
