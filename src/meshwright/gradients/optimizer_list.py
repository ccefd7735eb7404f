"""Several optimizers of one model as a single one, whose state has the names of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright.gradients.optimizers import declare_element_wise

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer | Sequence[Optimizer]]
"""Makes the optimizer, or several, of the parameters that it is given."""


@declare_element_wise  # each of the list is checked by itself
class OptimizerList(Optimizer):
    """``optimizers`` of different parameters, stepped in turn."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises ValueError for an empty list, and for a parameter that two of them have."""
        super().__init__([group for each in optimizers for group in each.param_groups], {})
        self.optimizers = tuple(optimizers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "optimizers" in vars(self):  # torch's constructor adds the first ones by this
            raise TypeError("no optimizer of the list would step it: give one the group when built")
        super().add_param_group(param_group)

    @property
    def state(self) -> dict[Any, Any]:  # pyrefly: ignore[bad-override]
        return {key: value for each in self.optimizers for key, value in each.state.items()}

    @state.setter
    def state(self, value: object) -> None:
        """Ignored: torch's constructor sets an empty one."""

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for each in self.optimizers:
            each.step()
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        groups = iter(state_dict["param_groups"])
        for each in self.optimizers:
            own = [next(groups) for _ in each.param_groups]
            numbers = {number for group in own for number in group["params"]}
            state = {n: value for n, value in state_dict["state"].items() if n in numbers}
            each.load_state_dict({"state": state, "param_groups": own})
        # Loading has given each new groups.
        self.param_groups = [group for each in self.optimizers for group in each.param_groups]


def as_one(made: Optimizer | Sequence[Optimizer]) -> Optimizer:
    """Return an optimizer unchanged, and the `OptimizerList` of several."""
    return OptimizerList(made) if isinstance(made, Sequence) else made


def each_of(made: Optimizer) -> tuple[Optimizer, ...]:
    """List the optimizers of an `OptimizerList`; any other is alone."""
    return made.optimizers if isinstance(made, OptimizerList) else (made,)
