"""Small modules of experts, in the forms of Hugging Face, of torchtitan and of a user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

from meshwright import comm, parallelize_module
from meshwright.expert_parallel import ExpertParallel, experts
from meshwright.mesh import DeviceMesh, init_device_mesh

__all__ = ["FORMS", "Block", "D", "Fused", "Grouped", "Own", "alike", "expert_mesh", "over", "part"]

D, F = 6, 5


class Fused(nn.Module):
    """Experts as `use_experts_implementation` leaves them; its own forward is that of one process.

    ``kind``: "" as Mixtral has them, "gpt_oss", "no gate" or "post norm".
    """

    def __init__(self, experts: int, kind: str = "", d: int = D, f: int = F) -> None:
        super().__init__()
        oss = kind == "gpt_oss"
        self.kind, self.num_experts = kind, experts
        self.has_gate, self.has_bias = kind != "no gate", oss
        self.is_transposed, self.is_concatenated = oss, not oss
        self.has_post_expert_norm = kind == "post norm"
        self.config = SimpleNamespace(output_router_logits=False)
        self.act_fn = nn.SiLU()
        width = 2 * f if self.has_gate else f
        first = (experts, d, width) if oss else (experts, width, d)
        second = (experts, f, d) if oss else (experts, d, f)
        up = "gate_up_proj" if self.has_gate else "up_proj"
        self.register_parameter(up, nn.Parameter(torch.randn(first)))
        self.down_proj = nn.Parameter(torch.randn(second))
        if oss:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, width))
            self.down_proj_bias = nn.Parameter(torch.randn(experts, d))
        if self.has_post_expert_norm:
            self.post_expert_norm = nn.LayerNorm(d)

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "gpt_oss":
            gate, up = x[..., ::2].clamp(max=2.0), x[..., 1::2].clamp(-2.0, 2.0)
            return (up + 1) * gate * torch.sigmoid(gate * 1.7)
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def _one(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        up = self.gate_up_proj if self.has_gate else self.up_proj
        if self.is_transposed:
            x = self._apply_gate(x @ up[expert] + self.gate_up_proj_bias[expert])
            return x @ self.down_proj[expert] + self.down_proj_bias[expert]
        x = functional.linear(x, up[expert])
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        x = functional.linear(x, self.down_proj[expert])
        return self.post_expert_norm(x) if self.has_post_expert_norm else x

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        found = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = (top_k_index == expert).nonzero(as_tuple=True)
            y = self._one(hidden_states[token], expert) * top_k_weights[token, slot, None]
            found = found.index_add(0, token, y.to(found.dtype))
        return found


class Own(nn.Module):
    """A user's module of experts: it loops over the experts that have tokens."""

    def __init__(self, experts: int, d: int = D) -> None:
        super().__init__()
        self.num_experts = experts
        self.w, self.scale = (
            nn.Parameter(torch.randn(experts, d, d)),
            nn.Parameter(torch.randn(experts)),
        )

    def forward(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        found = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, slot = (indices == expert).nonzero(as_tuple=True)
            if len(token):
                y = (x[token] @ self.w[expert]).to(self.scale.dtype)
                y = torch.tanh(y * self.scale[expert])
                y = y * weights[token, slot, None]
                found = found.index_add(0, token, y.to(found.dtype))
        return found


class GroupedExperts(nn.Module):
    """As torchtitan has them: rows sorted by expert, and counts."""

    def __init__(self, experts: int, d: int = D, f: int = F) -> None:
        super().__init__()
        self.num_experts = experts
        self.w1, self.w3 = (nn.Parameter(torch.randn(experts, f, d)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(experts, d, f))

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        parts = x.split(num_tokens_per_expert.tolist())
        assert len(parts) == self.num_experts == len(self.w1)
        return torch.cat(
            [
                (functional.silu(rows @ w1.T) * (rows @ w3.T)) @ w2.T
                for rows, w1, w2, w3 in zip(parts, self.w1, self.w2, self.w3, strict=True)
            ]
        )


class Grouped(nn.Module):
    """A `GroupedExperts` behind the forward of the others."""

    def __init__(self, experts: int, d: int = D, f: int = F) -> None:
        super().__init__()
        self.num_experts, self.grouped = experts, GroupedExperts(experts, d, f)

    def forward(
        self, x: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        k = indices.shape[1]
        order = indices.flatten().argsort(stable=True)
        counts = torch.bincount(indices.flatten(), minlength=self.num_experts)
        rows = self.grouped(x[order // k], counts)
        back = torch.zeros_like(rows).index_copy(0, order, rows)
        return (back.view(len(x), k, x.shape[1]) * weights.unsqueeze(-1)).sum(1)


FORMS: dict[str, Callable[[int], nn.Module]] = {
    "mixtral": Fused,
    "gpt_oss": lambda number: Fused(number, "gpt_oss"),
    "no gate": lambda number: Fused(number, "no gate"),
    "post norm": lambda number: Fused(number, "post norm"),
    "own": lambda number: experts(Own(number)),
    "grouped": Grouped,
}


class Block(nn.Module):
    """A router and its experts, after and before dense layers."""

    def __init__(self, inside: nn.Module, k: int, *, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        number = inside.num_experts
        self.k, self.bias = k, bias
        self.up, self.router, self.experts = nn.Linear(D, D), nn.Linear(D, number), inside
        self.down = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        scores = self.router(x).softmax(-1)
        # What is routed where is a matter of the test: `bias` moves tokens to some experts.
        weights, indices = (scores if self.bias is None else scores + self.bias).topk(self.k)
        return self.down(x + self.experts(x, indices, weights))


def expert_mesh() -> DeviceMesh:
    """All ranks as the axis ``expert``."""
    return init_device_mesh("cpu", (comm.communicator().size,), mesh_dim_names=("expert",))


def alike(block: nn.Module) -> tuple[nn.Module, nn.Module]:
    """``block`` in float64 with the weights of rank 0, and a copy of it."""
    block = block.double()
    for parameter in block.parameters():
        comm.communicator().broadcast(parameter.detach()).wait()
    return block, copy.deepcopy(block)


def over(block: nn.Module, exchange: str = "tokens") -> nn.Module:
    """Split the experts of a `Block` over all ranks."""
    name = "experts.grouped" if isinstance(block.experts, Grouped) else "experts"
    return parallelize_module(block, expert_mesh(), {name: ExpertParallel(exchange=exchange)})


def part(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """This rank's tokens."""
    return x.split(sizes)[comm.communicator().rank]
