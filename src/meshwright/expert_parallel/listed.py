"""`experts_of`: a list of experts as one module, whose parameters are those of all, stacked."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from meshwright.comm.dtensors.gather_dtensor import part_like, whole
from meshwright.comm.dtensors.unreadable import retire
from meshwright.expert_parallel.forms import experts


def experts_of(block: nn.Module) -> nn.Module:
    """Replace the one ``nn.ModuleList`` of ``block``, its experts, by a module, and return that.

    The block calls it with tokens (n, D), the indices of their experts (n, K) and their weights
    (n, K), and gets (n, D). Its parameters are new ones: those of all experts, stacked along dim 0.
    Those of the list raise from then on. State dicts have the names and shapes of the list; under
    `ExpertParallel` ``state_dict`` gathers them, on all ranks together.

    Raises ValueError unless all experts are alike, without buffers, and share no parameter.
    """
    lists = {name: part for name, part in block.named_children() if type(part) is nn.ModuleList}
    if len(lists) != 1:
        raise ValueError(
            f"expected a {type(block).__name__} with one nn.ModuleList, of experts, found "
            f"{sorted(lists) or 'none'}"
        )
    ((name, listed),) = lists.items()
    alike = {
        (
            type(each),
            *((key, p.shape, p.dtype, p.requires_grad) for key, p in each.named_parameters()),
            *_settings_of(each),
        )
        for each in listed
    }
    own = [p for each in listed for p in each.parameters()]
    if len(alike) != 1 or any(True for _ in listed.buffers()) or len({*own}) < len(own):
        raise ValueError(
            f"expected experts of '{name}' of one class and equal settings, with parameters of "
            f"their own of equal names, shapes and dtypes and without buffers, found {listed}"
        )
    made = experts(ListedExperts(listed))
    setattr(block, name, made)
    return made


def _settings_of(expert: nn.Module) -> Iterator[tuple[object, ...]]:
    """What an expert computes by, beside parameters: the first one's forward stands for all."""
    for path, part in expert.named_modules():
        yield path, type(part), part.extra_repr()
        for key, value in vars(part).items():
            if callable(value) or isinstance(value, bool | float | str):  # an int may count them
                yield path, key, getattr(value, "__qualname__", value)


class ListedExperts(nn.Module):
    """Experts that are alike, each on its tokens."""

    renames_state = True
    """Its hooks make other entries of its parameters in state dicts; fsdp/building.py reads it."""

    def __init__(self, listed: nn.ModuleList) -> None:
        super().__init__()
        self.num_experts = len(listed)
        each = [dict(part.named_parameters()) for part in listed]
        self.names = {name.replace(".", "__"): name for name in each[0]}
        for key, name in self.names.items():
            stacked = torch.stack([parameters[name].detach() for parameters in each])
            trains = each[0][name].requires_grad
            self.register_parameter(key, nn.Parameter(stacked, requires_grad=trains))
        vars(self)["form"] = copy.deepcopy(listed[0]).to("meta")  # no child: it has no parameters
        for path, given in listed.named_parameters():
            retire(given, path, "experts_of")
        self.register_state_dict_post_hook(_unstack)
        self.register_load_state_dict_pre_hook(_stack)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as that of nn.Module
        # torch's state dict functions look names of ``state_dict`` up, attribute by attribute.
        if name.isdigit() and int(name) < self.num_experts:
            return vars(self)["form"]
        return super().__getattr__(name)

    def forward(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Add up what the experts of each token return, weighed."""
        form = vars(self)["form"].train(self.training)
        parts = {name: getattr(self, key).unbind() for key, name in self.names.items()}
        found = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = (indices == expert).nonzero(as_tuple=True)
            if len(token):
                own = {name: part[expert] for name, part in parts.items()}
                y = functional_call(form, own, (x[token],)) * weights[token, slot, None]
                found = found.index_add(0, token, y.to(x.dtype))
        return found


def _unstack(module: ListedExperts, state: dict[str, Any], prefix: str, metadata: object) -> None:
    parts = {name: whole(state.pop(prefix + key)).unbind() for key, name in module.names.items()}
    for i in range(module.num_experts):
        state.update({f"{prefix}{i}.{name}": part[i] for name, part in parts.items()})


@torch.no_grad()  # loaded values may be views of parameters that were written to
def _stack(module: ListedExperts, state: dict[str, Any], prefix: str, *rest: object) -> None:
    for key, name in module.names.items():
        names = [f"{prefix}{i}.{name}" for i in range(module.num_experts)]
        if all(each in state for each in names):
            stacked, own = torch.stack([state.pop(each) for each in names]), getattr(module, key)
            state[prefix + key] = part_like(stacked, own)
