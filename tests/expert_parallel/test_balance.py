"""Losses, counts and biases that balance experts, on two ranks, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import meshwright as mw
from meshwright import comm
from meshwright.expert_parallel import (
    ExpertParallel,
    auxiliary_loss,
    balance_experts,
    counts_of,
    z_loss,
)
from meshwright.mesh import DeviceMesh, init_device_mesh
from meshwright.tensor_parallel import ColwiseParallel
from meshwright.testing import Ranks
from support.expert_parallel.samples import FORMS, Block, D, alike, over
from support.expert_parallel.wide import wide

CLOSE = {"rtol": 1e-9, "atol": 1e-13}
PLAN = "model.layers.*.mlp.experts"
SIZES = [1, 3]
"""Rows of the batch that each rank reads."""
VOCABULARY, LENGTH = 31, 6
BIAS = "e_score_correction_bias"


def _trained(kind: Any, config: Any) -> Any:
    config._experts_implementation = "eager"  # of one process: its default knows no float64
    return kind(config).double().train()


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        initializer_range=0.3,
        use_cache=False,
    )
    return _trained(MixtralForCausalLM, config)


def deepseek() -> Any:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        first_k_dense_replace=0,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_mtp_layers=0,
        initializer_range=0.3,
        use_cache=False,
    )
    return _trained(DeepseekV3ForCausalLM, config)


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    """Rows of unequal lengths, padded."""
    ids = torch.randint(
        0, VOCABULARY, (sum(SIZES), LENGTH), generator=torch.Generator().manual_seed(seed)
    )
    lengths = torch.tensor([6, 4, 1, 5]).unsqueeze(1)
    return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < lengths).long()}


def part(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: x.split(SIZES)[comm.communicator().rank] for key, x in given.items()}


def mesh_of(first: int, second: int, name: str = "shard") -> DeviceMesh:
    return init_device_mesh("cpu", (first, second), mesh_dim_names=(name, "ep"))


def split(model: Any, mesh: DeviceMesh) -> Any:
    return mw.parallelize_module(model, mesh, {PLAN: ExpertParallel()})


def exchange_only(model: Any) -> Any:
    return split(model, mesh_of(1, 2)["ep"])


def replicated(model: Any) -> Any:
    return mw.replicate(split(model, mesh_of(1, 2)["ep"]))


def replicated_whole(model: Any) -> Any:
    """Replicas of all experts: the exchange has one rank."""
    return mw.replicate(split(model, mesh_of(2, 1)["ep"]))


def sharded(model: Any) -> Any:
    mesh = mesh_of(1, 2)
    split(model, mesh["ep"])
    dense = mesh["shard", "ep"]._flatten("dense")
    for layer in model.model.layers:
        mw.fully_shard(layer, mesh=dense)
    return mw.fully_shard(model, mesh=dense)


def sharded_as_one(model: Any) -> Any:
    """One unit, which is whole between forward and backward; all experts on each rank."""
    mesh = mesh_of(2, 1)
    split(model, mesh["ep"])
    return mw.fully_shard(model, mesh=mesh["shard", "ep"]._flatten("dense"))


LAYOUTS = [exchange_only, replicated, replicated_whole, sharded, sharded_as_one]


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The mean over ranks of gradients, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()
        found[name] = grad.detach().clone()
    return found


def summed(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().clone()
    comm.communicator().all_reduce(x).wait()
    return x


def backward(model: Any, loss: torch.Tensor, layout: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Backpropagate a loss whose mean over ranks is meant; the gradients of that mean."""
    size = comm.communicator().size
    if layout is not exchange_only:
        loss.backward()
        return gradients(model)
    (loss / size).backward()
    found = gradients(model)
    own = {name for name, p in model.named_parameters() if isinstance(p, DTensor)}
    return {name: grad if name in own else summed(grad) for name, grad in found.items()}


def whole_logits(one: Any, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The router logits of each layer, of tokens that are no padding."""
    kept = given["attention_mask"].flatten().bool()
    output = one(**given, output_router_logits=True)
    return tuple(logits[kept] for logits in output.router_logits)


def check_losses(layout: Callable[..., Any]) -> None:
    one = mixtral()
    many = layout(copy.deepcopy(one))
    given = batch()
    with wide():
        output = one(**given, output_router_logits=True)
        squares = [logits.logsumexp(-1).square().mean() for logits in whole_logits(one, given)]
        expected = 0.3 * output.aux_loss, 0.2 * sum(squares)
        for loss, whole in zip((auxiliary_loss, z_loss), expected, strict=True):
            coefficient = 0.3 if loss is auxiliary_loss else 0.2
            one.zero_grad()
            many.zero_grad()
            logits = many(**part(given)).logits
            term = loss(many, coefficient)
            torch.testing.assert_close(summed(term) / 2, whole.detach(), **CLOSE)
            # All that a training loss would have a gradient of, so that every layer has one.
            found = backward(many, term + 0 * logits.sum(), layout)
            (whole + 0 * output.logits.sum()).backward(retain_graph=True)
            for name, parameter in one.named_parameters():
                torch.testing.assert_close(
                    found[name], parameter.grad, **CLOSE, msg=lambda text, n=name: f"{n}: {text}"
                )
            gate = found["model.layers.0.mlp.gate.weight"]
            assert gate.abs().max() > 1e-4


@pytest.mark.few(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_process(ranks: Ranks, layout: Callable[..., Any]) -> None:
    """Mutants auxiliary_not_attached, auxiliary_by_ranks, auxiliary_per_rank."""
    ranks(2, check_losses, layout)


def check_losses_of_a_rank() -> None:
    one = mixtral()
    many, mine = exchange_only(copy.deepcopy(one)), part(batch())
    with wide():
        expected = one(**mine, output_router_logits=True).aux_loss
        many(**mine)
        copy.deepcopy(many)  # without what the forward has left
        torch.testing.assert_close(auxiliary_loss(many, 0.5, "rank"), 0.5 * expected, **CLOSE)
        assert (auxiliary_loss(many, 0.5) - 0.5 * expected).abs() > 1e-4


def test_statistics_of_a_rank(ranks: Ranks) -> None:
    ranks(2, check_losses_of_a_rank)


# ---------------------------------------------------------------------------------- counts


def chosen(model: Any, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tokens of each expert in a forward of a plain model, without padding."""
    kept = given["attention_mask"].flatten().bool()
    found = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            found[name] = torch.bincount(inputs[1][kept].flatten(), minlength=4)

        return hook

    handles = [
        layer.mlp.experts.register_forward_pre_hook(note(f"model.layers.{i}.mlp.experts"))
        for i, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        model(**given)
    for handle in handles:
        handle.remove()
    return found


def same(found: dict[str, torch.Tensor], *expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected[0].keys()
    for name, counts in found.items():
        assert counts.tolist() == sum(each[name] for each in expected).tolist(), name


def loss_of(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**given).logits.square().mean()


def check_counts_of_padding(layout: Callable[..., Any]) -> None:
    one = mixtral()
    many = layout(copy.deepcopy(one))
    first, second = chosen(one, batch(1)), chosen(one, batch(2))
    assert sum(first["model.layers.0.mlp.experts"]) == 2 * 16  # of 24 tokens
    loss_of(many, part(batch(1))).backward()
    same(counts_of(many), first)
    mine = part(batch(2))
    many(mine["input_ids"], mine["attention_mask"])  # of the same step
    same(counts_of(many), first, second)
    many(part(batch(2))["input_ids"])
    padded = {"attention_mask": torch.ones(4, LENGTH)}
    same(counts_of(many), first, second, chosen(one, {**batch(2), **padded}))


@pytest.mark.parametrize("layout", [exchange_only, replicated_whole, sharded_as_one])
def test_padding_is_not_counted(ranks: Ranks, layout: Callable[..., Any]) -> None:
    """Mutant counts_of_padding."""
    ranks(2, check_counts_of_padding, layout)


def check_counts_in_evaluation() -> None:
    one = mixtral()
    many = replicated(copy.deepcopy(one))
    optimizer = torch.optim.SGD(many.parameters(), lr=0.1)
    expected = chosen(one, batch(1))
    loss_of(many, part(batch(1))).backward()
    many.eval()
    with torch.no_grad():
        many(**part(batch(2)))
    many(**part(batch(2)))
    many.train()
    same(counts_of(many), expected)
    optimizer.step()
    same(counts_of(many), expected)  # until the next forward
    one.load_state_dict({k: whole(v) for k, v in many.state_dict().items()})
    many(**part(batch(2)))
    same(counts_of(many), chosen(one, batch(2)))


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def test_evaluation_is_not_counted(ranks: Ranks) -> None:
    """Mutant counts_in_evaluation; a step of an optimizer begins a new step."""
    ranks(2, check_counts_in_evaluation)


def check_counts_recomputed() -> None:
    one = mixtral()
    expected = chosen(one, batch(1))
    for reentrant in (False, True):
        many = replicated(copy.deepcopy(one))
        many.activation_checkpointing_enable({"use_reentrant": reentrant})
        many.enable_input_require_grads()
        logits = many(**part(batch(1))).logits
        loss = logits.square().mean()
        if reentrant:
            with pytest.raises(ValueError, match="expected a forward of MixtralForCausalLM in tr"):
                auxiliary_loss(many)
        else:
            # Not in wide mode, which a recomputation would not be in.
            term, output = auxiliary_loss(many, 1.0), one(**batch(1), output_router_logits=True)
            close = {"rtol": 1e-6, "atol": 0, "check_dtype": False}
            torch.testing.assert_close(summed(term) / 2, output.aux_loss.detach(), **close)
            loss, before = loss + term, z_loss(many).detach()
        loss.backward()
        same(counts_of(many), expected)
        if not reentrant:
            assert torch.equal(z_loss(many), before)  # no logits are kept twice


def test_recomputation_is_not_counted(ranks: Ranks) -> None:
    """Mutant counts_recomputed."""
    ranks(2, check_counts_recomputed)


# ------------------------------------------------------------------------------------ bias


def biases(model: Any) -> list[torch.Tensor]:
    return [layer.mlp.gate.e_score_correction_bias for layer in model.model.layers]


def by_hand(counts: dict[str, torch.Tensor], rate: float) -> list[torch.Tensor]:
    return [rate * (c.double().mean() - c).sign() for c in counts.values()]


def train(model: Any, optimizer: Any, given: dict[str, torch.Tensor], tokens: int) -> None:
    optimizer.zero_grad()
    squares = model(**given).logits.square() * given["attention_mask"].unsqueeze(-1)
    (squares.sum() / tokens).backward()


def check_bias() -> None:
    plain = deepseek()
    one = split(copy.deepcopy(plain), mesh_of(2, 1)["ep"])  # each rank for itself
    many = replicated(copy.deepcopy(plain))
    many.activation_checkpointing_enable()
    steppers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in (one, many)]
    expected = by_hand(chosen(plain, batch(0)), 0.01)
    for step in range(50):
        given = batch(step)
        if step == 7:  # a step that is skipped
            train(many, steppers[1], part(batch(1000)), 1)
            balance_experts(many, rate=0.0)
        train(one, steppers[0], given, 16)
        train(many, steppers[1], part(given), 8)  # of which the mean over ranks is taken
        if step % 10 == 3:
            many.eval()(**part(batch(1000)))
            many.train()
        if step == 10:
            many.activation_checkpointing_disable()
        for model, stepper in zip((one, many), steppers, strict=True):
            stepper.step()
            balance_experts(model, rate=0.01)
        if not step:
            assert all(map(torch.equal, biases(many), expected))
    assert all(map(torch.equal, biases(many), biases(one)))
    assert all(len(bias.unique()) == 4 for bias in biases(many))


@pytest.mark.slow
def test_bias_has_the_same_bits_after_50_steps(ranks: Ranks) -> None:
    """With evaluation, recomputation and a step that is skipped, none of which counts."""
    ranks(2, check_bias, timeout=300)


def check_tensor() -> None:
    one = deepseek()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "tensor"))
    many = split(copy.deepcopy(one), mesh["ep"])
    mw.parallelize_module(many, mesh["tensor"], {"lm_head": ColwiseParallel()})
    expected = chosen(one, batch())
    many(**batch())
    same(counts_of(many), expected)
    balance_experts(many, rate=0.5)
    same(counts_of(many), expected)  # until the next forward
    assert all(map(torch.equal, biases(many), by_hand(expected, 0.5)))


def test_ranks_of_one_sample_count_once(ranks: Ranks) -> None:
    """Mutant bias_sum_over_tensor."""
    ranks(2, check_tensor)


def check_others_whole() -> None:
    """Experts of one layer are split, and those of the other, as many, are not."""
    plain = deepseek()
    for name in ("0", "1"):
        many = copy.deepcopy(plain)
        own = many.model.layers.get_submodule("1" if name == "0" else "0").mlp.gate
        plan = {f"model.layers.{name}.mlp.experts": ExpertParallel()}
        mw.parallelize_module(many, mesh_of(1, 2)["ep"], plan)
        before = [bias.clone() for bias in biases(many)]
        many(**part(batch()))
        balance_experts(many, rate=0.5)
        kept = [torch.equal(*pair) for pair in zip(before, biases(many), strict=True)]
        assert kept == [name == "1", name == "0"]
        many.model.layers.get_submodule(name).mlp.gate.register_buffer(BIAS, None)
        with pytest.raises(ValueError, match="found none. Balance by auxiliary_loss instead"):
            balance_experts(many, rate=0.5)
        assert torch.equal(own.e_score_correction_bias, before[name == "0"])


def test_biases_of_experts_that_are_not_split_stay(ranks: Ranks) -> None:
    ranks(2, check_others_whole)


# -------------------------------------------------------------------------------- refusals


class Router(nn.Module):
    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(D, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inside(x)


class Known(Block):
    """A user's model that says what its routers are."""

    _can_record_outputs = {"router_logits": Router}  # noqa: RUF012 - as in transformers

    def __init__(self) -> None:
        super().__init__(FORMS["own"](4), 2)
        self.router = Router()

    def forward(self, x: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        return super().forward(x)


def check_own_model() -> None:
    torch.manual_seed(0)
    one, many = alike(Known())
    x = torch.randn(8, D, dtype=torch.float64)
    comm.communicator().broadcast(x).wait()
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]])
    logits = one.router(one.up(x))[mask.flatten().bool()]
    p = logits.softmax(-1)
    f = torch.bincount(p.topk(2).indices.flatten(), minlength=4).double() / 6
    over(many)
    rank = comm.communicator().rank
    many(x.chunk(2)[rank], mask[rank : rank + 1])
    found = summed(auxiliary_loss(many, 1.0)) / 2
    torch.testing.assert_close(found, 4 * (f * p.mean(0)).sum().detach(), **CLOSE)
    assert counts_of(many)["experts"].tolist() == (6 * f).tolist()
    with pytest.raises(ValueError, match=r"a Router of Known routes 4 tokens, .* shape \(1, 3\)"):
        many(x.chunk(2)[rank], mask[:1, :3])
    many.eval()(x)
    with pytest.raises(ValueError, match="expected a forward of Known in training"):
        z_loss(many)


def test_own_models_say_what_their_routers_are(ranks: Ranks) -> None:
    ranks(2, check_own_model)


def check_refusals() -> None:
    with pytest.raises(ValueError, match='balance "global" or "rank", found \'none\''):
        auxiliary_loss(nn.Linear(1, 1), balance="none")
    with pytest.raises(ValueError, match="no module of Linear is split by ExpertParallel"):
        auxiliary_loss(nn.Linear(1, 1))
    block = over(alike(Block(FORMS["own"](4), 2))[1])
    with pytest.raises(ValueError, match="no module of Block is known to be a router"):
        auxiliary_loss(block)
    with pytest.raises(ValueError, match="beside the experts of Block, found none. Balance by aux"):
        balance_experts(block)

    model = exchange_only(mixtral())
    with pytest.raises(ValueError, match="expected a forward of MixtralForCausalLM in training"):
        auxiliary_loss(model)
    mine = part(batch())
    with pytest.raises(ValueError, match=r"axis ep: the model returns an auxiliary loss of its ow"):
        model(**mine, output_router_logits=True)

    style = ExpertParallel(own_auxiliary=True)
    model = mw.parallelize_module(mixtral(), mesh_of(1, 2)["ep"], {PLAN: style})
    with wide():
        model(**mine, output_router_logits=True)
        with pytest.raises(ValueError, match="auxiliary_loss of MixtralModel: it adds an aux"):
            auxiliary_loss(model, balance="rank")

        model = exchange_only(deepseek())
        model(**mine)
        assert z_loss(model).isfinite()
        with pytest.raises(ValueError, match="auxiliary_loss of DeepseekV3Model: it has none"):
            auxiliary_loss(model)
        for layer in model.model.layers:
            layer.mlp.gate.bfloat16()
        with pytest.raises(ValueError, match=r"ForCausalLM, found torch.bfloat16. Keep"):
            balance_experts(model)


def test_what_is_refused(ranks: Ranks) -> None:
    ranks(2, check_refusals, timeout=180)
