"""Faults that other libraries have had with experts, each planted on every rank: a test sees it.

A test that needs two ranks runs in them, first without the fault.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from data_parallel.sharded_modules import test_over_experts as of_shards
from expert_parallel import test_balance as of_balance
from expert_parallel import test_checkpoints as of_checkpoints
from expert_parallel import test_refusals as of_refusals
from expert_parallel import test_slices as of_slices
from expert_parallel import test_training as of_training
from matrix.test_mutations import unsummed
from meshwright import comm, parallelize_module
from meshwright.composition import parallelize
from meshwright.expert_parallel import ExpertParallel
from meshwright.mesh import init_device_mesh
from meshwright.plan import ExpertPlan, Plan, TrainPlan
from meshwright.tensor_parallel import PrepareModuleInput, PrepareModuleOutput
from meshwright.testing import Ranks
from support.expert_parallel.samples import FORMS, Block, D, alike
from support.internals.axes import Axes
from support.internals.checkpoint import restoring
from support.internals.composition import expert_rules
from support.internals.data_parallel import ParameterGroup, _Lent
from support.internals.expert_parallel import balance, exchange, forms, layer, routing, style
from support.internals.gradients import norm
from support.internals.reference import first_difference, record, train_reference
from support.internals.tensor_parallel import functions
from support.mutants import Mutant, Patch, changed, parameters, said_of, trains

# ----------------------------------------------------------------- tests that no other file has


class Shown(of_balance.Known):
    """Returns the logits of its router, too, for one process to compute losses of."""

    def forward(self, x: torch.Tensor) -> Any:
        logits: list[torch.Tensor] = []
        handle = self.router.register_forward_hook(lambda *call: logits.append(call[2]))
        y = super().forward(x)
        handle.remove()
        return y, logits[0]


def squares(output: Any, target: torch.Tensor) -> torch.Tensor:
    return (output[0] - target).square().mean()


def balanced(output: Any, target: torch.Tensor) -> torch.Tensor:
    p = output[1].softmax(-1)
    f = p.topk(2).indices.flatten().bincount(minlength=4) / len(p)
    z = output[1].logsumexp(-1).square().mean()
    return squares(output, target) + 0.3 * 4 * (f * p.mean(0)).sum() + 0.1 * z


def body_accumulates() -> None:
    torch.manual_seed(0)
    one, model = alike(Shown())
    x, y = torch.randn(2, 3, 24, D, dtype=torch.float64)
    momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    plan = Plan(
        axes=Axes.of({"expert": 2}),
        expert=ExpertPlan(balance="global", auxiliary=0.3, z_loss=0.1),
        train=TrainPlan(accumulate=3),
    )
    laid = parallelize(model, plan, optimizer=momentum, loss=squares, example=x[0])
    shares = [
        tuple(each.chunk(2)[laid.data_rank] for each in pair) for pair in zip(x, y, strict=True)
    ]
    # The third parts of both shares are a microbatch.
    whole = [t.unflatten(1, (2, 3, 4)).transpose(1, 2).flatten(1, 3) for t in (x, y)]
    expected = train_reference(
        one, list(zip(*whole, strict=True)), optimizer=momentum, loss=balanced, accumulate=3
    )
    difference = first_difference(record(laid, shares), expected, 1e-9)
    assert difference is None, difference


def test_losses_of_accumulated_batches(ranks: Ranks) -> None:
    """They are those of each microbatch, of all ranks, and of any size."""
    ranks(2, body_accumulates)


def body_between_sequences() -> None:
    torch.manual_seed(0)
    one, many = alike(Block(FORMS["own"](4), 2))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("expert", "tensor"))
    parallelize_module(many, mesh["expert"], {"experts": ExpertParallel()})
    to = PrepareModuleInput(
        input_layouts=Shard(0), desired_input_layouts=Replicate(), use_local_output=True
    )
    back = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(0))
    for edge in (to, back):
        parallelize_module(many, mesh["tensor"], edge)
    x, weigh = torch.randn(2, 6, D, dtype=torch.float64)
    part = [each.chunk(2)[comm.communicator().rank] for each in (x, weigh)]
    (one(x) * weigh).sum().backward()
    (many(part[0]) * part[1]).sum().backward()
    wrong = []
    for (name, found), expected in zip(many.named_parameters(), one.parameters(), strict=True):
        grad = found.grad.full_tensor() if isinstance(found.grad, DTensor) else found.grad
        if not torch.allclose(grad, expected.grad, rtol=1e-9, atol=1e-12):
            wrong.append(name)
    assert wrong == []


def test_a_block_between_parts_of_sequences(ranks: Ranks) -> None:
    """Gradients of a router, and of all beside it, are whole on each rank of axis tensor."""
    ranks(2, body_between_sequences)


def goes_on(_: Ranks) -> None:
    """Go on with two ranks from a checkpoint of one process, and save again."""
    world = comm.communicator()
    with tempfile.TemporaryDirectory() as own:
        folder = Path(world.gather_values(own, label="folder")[0])
        start = of_checkpoints.begin(folder / "one")
        path = of_checkpoints.body_goes_on(start, folder / "two", {"expert": 2})
        world.gather_values(0, label="both have saved")
        of_checkpoints.same(path, start)
        world.gather_values(0, label="both have read")


# --------------------------------------------------------------------------------- the faults


def times_exchange(real: Any, group: ParameterGroup, *given: Any, **options: Any) -> Any:
    moves = real(group, *given, **options)
    if group.axes.exchange is not None:
        group._factor *= group.axes.exchange.size
    return moves


def on_the_first_rank(real: Any, group: Any, over: Any) -> bool:
    is_of_experts = any(axis.axis == "expert" for axis in group.communicators)
    return over.rank == 0 if is_of_experts else real(group, over)


def not_biases(real: Any, tensor: torch.Tensor) -> Any:
    return () if isinstance(tensor, DTensor) and tensor.ndim < 3 else real(tensor)


def own_part(
    real: Any, axis: Any, label: str, dim: int, total: int, x: torch.Tensor
) -> torch.Tensor:
    """In a backward zeros elsewhere, as the gradient of a slice has them in one process."""
    whole = real(axis, label, dim, total, x)
    if not label.endswith(" backward"):
        return whole
    mine = torch.zeros_like(whole)
    functions.own_part(mine, axis, dim).copy_(functions.own_part(whole, axis, dim))
    return mine


def without_weights(real: Any, way: Any, tensors: Sequence[torch.Tensor], **options: Any) -> Any:
    first, *rest = tensors
    return real(way, (first, *(each.detach() for each in rest)), **options)


def bias_twice(real: Any, *given: Any) -> torch.Tensor:
    *most, leaves = given
    return real(*most, leaves | {"down_proj_bias": 2 * leaves["down_proj_bias"]})


def others_results(real: Any, route: Any, tensors: Any, label: str) -> Any:
    is_forward = label.endswith("combine forward")
    return real(route, [x.roll(1, 0) for x in tensors] if is_forward else tensors, label)


def others_rows(real: Any, route: Any, tensors: Any, label: str) -> Any:
    rows, *rest = real(route, tensors, label)
    return [rows.roll(1, 0) if label.endswith("dispatch forward") else rows, *rest]


def stays_away(
    real: Any, x: torch.Tensor, axis: Any, going: list[int], coming: list[int], label: str
) -> torch.Tensor:
    found = x.new_zeros((sum(coming), *x.shape[1:]))
    return real(x, axis, going, coming, label) if len(x) else found


def scaled_again(real: Any, own: nn.Module, *given: Any) -> torch.Tensor:
    scale = given[-1]
    return real(own, *given) if scale is None else real(own, *given) * scale.unsqueeze(-1)


@torch.no_grad()
def turned_round(real: Any, reader: Any, tensors: Any) -> None:
    real(reader, tensors)
    for each in tensors.values():
        if isinstance(each, DTensor) and each.ndim == 3:
            each.to_local().copy_(each.to_local().flip(0))


def times_tokens(real: Any, model: nn.Module, *given: Any) -> torch.Tensor:
    return real(model, *given) * len(vars(model)[routing.ROUTING].logits[0].kept)


def in_recomputation(real: Any, *given: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "running_backward", lambda: -1)
        real(*given)


def in_evaluation(real: Any, part: nn.Module, *given: Any) -> None:
    was, part.training = part.training, True
    real(part, *given)
    part.training = was


def accepted(patch: Patch) -> None:
    for room in (forms, style):
        patch.setattr(room, "check_keeps_all", lambda *given: None)


numbers = of_training.test_numbers_are_those_of_one_process
slices = partial(of_slices.test_slices_are_one_process, form="own", exchange="tokens", count=2)
losses = partial(of_balance.test_losses_are_those_of_one_process, layout=of_balance.replicated)
MUTANTS = {
    "experts_mean_by_holders": Mutant(
        plant=changed(_Lent, "_shared", lambda real, lent, gradient: gradient),
        seen_by=partial(trains, axes="expert=2"),
        sees="the gradient of '1.experts.w'",
    ),
    "experts_mean_by_holders, shards": Mutant(
        plant=changed(ParameterGroup, "reduce", times_exchange),
        seen_by=partial(
            of_shards.test_experts_on_a_mesh_of_their_own_have_the_divisor_of_all, layout=(1, 2)
        ),
        sees="experts.up: Tensor-likes",
    ),
    "norm_per_expert_group": Mutant(
        plant=unsummed("all_reduce", "gradient norm"),
        seen_by=partial(trains, axes="expert=2"),
        sees="the norm of all gradients",
    ),
    "norm_undercount": Mutant(
        plant=changed(norm, "_counts_here", on_the_first_rank),
        seen_by=partial(trains, axes="expert=2,tensor=2", is_clipped=True),
        sees="the norm of all gradients",
        size=4,
    ),
    "norm_counts_bias_wrong": Mutant(
        plant=changed(norm, "spread_of", not_biases),
        seen_by=partial(trains, axes="expert=2", is_clipped=True),
        sees="the norm of all gradients",
    ),
    "router_gradient_of_sentinels": Mutant(
        plant=changed(layer, "moved", without_weights),
        seen_by=partial(numbers, form="mixtral", exchange="tokens"),
        sees="close(mine.grad",
    ),
    "router_not_reduced": Mutant(
        plant=changed(functions, "_gather", own_part),
        seen_by=test_a_block_between_parts_of_sequences,
        sees="'router.weight', 'router.bias'",
    ),
    "router_not_reduced, slices": Mutant(
        plant=changed(functions, "_gather", own_part), seen_by=slices, sees="close(mine.grad"
    ),
    "experts_not_reduced, slices": Mutant(
        plant=changed(functions, "_sum", lambda real, axis, label, x: x),
        seen_by=slices,
        sees="experts.w: Tensor-likes",
    ),
    "bias_times_tensor": Mutant(
        plant=changed(layer, "fused_experts", bias_twice),
        seen_by=partial(numbers, form="gpt_oss", exchange="tokens"),
    ),
    "combine_index": Mutant(
        plant=changed(exchange.Route, "summed", others_results),
        seen_by=partial(numbers, form="mixtral", exchange="tokens"),
    ),
    "dispatch_corrupts": Mutant(
        plant=changed(exchange.Route, "spread", others_rows),
        seen_by=partial(numbers, form="own", exchange="pairs"),
    ),
    "empty_rank": Mutant(
        plant=changed(exchange, "exchanged", stays_away),
        seen_by=partial(numbers, form="mixtral", exchange="tokens"),
        sees="MismatchError",
    ),
    "auxiliary_not_attached": Mutant(
        plant=changed(
            balance, "_statistics", lambda real, calls: [x.detach() for x in real(calls)]
        ),
        seen_by=losses,
    ),
    "auxiliary_by_ranks": Mutant(
        plant=changed(balance, "_size", lambda real, axes: 1), seen_by=losses
    ),
    "auxiliary_per_rank": Mutant(
        plant=changed(balance, "_summed", lambda real, counts, axes: counts), seen_by=losses
    ),
    "sequence_auxiliary_by_batch": Mutant(
        plant=changed(expert_rules, "auxiliary_loss", times_tokens),
        seen_by=test_losses_of_accumulated_batches,
        sees="kind='loss'",
    ),
    "counts_of_padding": Mutant(
        plant=changed(routing, "kept_of", lambda real, part, rows: torch.ones(len(rows)).long()),
        seen_by=partial(of_balance.test_padding_is_not_counted, layout=of_balance.exchange_only),
        sees="AssertionError: model.layers.0.mlp.experts",
    ),
    "counts_in_evaluation": Mutant(
        plant=changed(layer, "count_tokens", in_evaluation),
        seen_by=of_balance.test_evaluation_is_not_counted,
        sees="AssertionError: model.layers.0.mlp.experts",
    ),
    "counts_recomputed": Mutant(
        plant=changed(layer, "count_tokens", in_recomputation),
        seen_by=of_balance.test_recomputation_is_not_counted,
        sees="AssertionError: model.layers.0.mlp.experts",
    ),
    "bias_sum_over_tensor": Mutant(
        plant=changed(balance, "_data_axes", lambda real, layers: (comm.communicator(),)),
        seen_by=of_balance.test_ranks_of_one_sample_count_once,
        sees="AssertionError: model.layers.0.mlp.experts",
    ),
    "scale_twice": Mutant(
        plant=changed(layer.ExpertLayer, "_computed", scaled_again),
        seen_by=partial(numbers, form="mixtral", exchange="tokens"),
    ),
    "capacity_by_rank": Mutant(
        plant=accepted,
        seen_by=partial(
            of_refusals.test_a_module_that_drops_tokens,
            key="capacity_factor",
            value=1.25,
            where="experts",
        ),
        sees="DID NOT RAISE",
    ),
    "expert_order": Mutant(
        plant=changed(restoring, "fill", turned_round), seen_by=goes_on, sees="state.1.experts.w"
    ),
}


QUICK = (
    *("norm_per_expert_group", "norm_counts_bias_wrong", "router_not_reduced", "combine_index"),
    "sequence_auxiliary_by_batch",
)


def body_planted(name: str) -> str:
    return said_of(MUTANTS[name])


@pytest.mark.devices("host", reason="what sees a fault is itself run on devices")
@pytest.mark.parametrize("name", parameters(MUTANTS, QUICK))
def test_a_fault_is_seen(ranks: Ranks, name: str) -> None:
    mutant = MUTANTS[name]
    said = ranks(mutant.size, body_planted, name, timeout=200)
    assert any(mutant.sees in text for text in said), "\n".join(said)
