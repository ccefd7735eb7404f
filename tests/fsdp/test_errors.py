"""Refusals and warnings of `FullyShardedDataParallel`, one by one."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshwright.comm import communicator
from meshwright.fsdp import (
    CPUOffload,
    CustomPolicy,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ModuleWrapPolicy,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
    always_wrap_policy,
)
from meshwright.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817
from meshwright.mesh import init_device_mesh
from meshwright.testing import Ranks
from support.internals.data_parallel import synchronize
from support.internals.fsdp import (
    check_devices,
    check_parameters,
    choose_device,
    resolve_device_id,
    write_back,
)

HYBRID = ShardingStrategy.HYBRID_SHARD
LINEARS = ModuleWrapPolicy({nn.Linear})


def world() -> Any:
    return dist.group.WORLD


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))


def frozen() -> nn.Sequential:
    model = pair()
    model[0].bias.requires_grad_(False)
    return model


def scalar() -> nn.Module:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def integer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.count = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    return model


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


class Unready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 2, device="meta"))


def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def inner_no_sync() -> None:
    model = FSDP(pair(), auto_wrap_policy=LINEARS)
    with model.module[0].no_sync():
        pass


def inner_clip() -> None:
    FSDP(pair(), auto_wrap_policy=LINEARS).module[0].clip_grad_norm_(1.0)


def hook(state: object, whole: torch.Tensor, out: torch.Tensor) -> None: ...


def hook_twice() -> None:
    model = FSDP(pair())
    model.register_comm_hook(None, hook)
    model.register_comm_hook(None, hook)


def inner_hook() -> None:
    FSDP(pair(), auto_wrap_policy=LINEARS).module[0].register_comm_hook(None, hook)


def summon(**options: Any) -> None:
    with FSDP.summon_full_params(FSDP(pair()), **options):
        pass


def summon_whole() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = FSDP(pair(), sharding_strategy=ShardingStrategy.NO_SHARD)
    with FSDP.summon_full_params(model, offload_to_cpu=True):
        pass


def summon_twice() -> None:
    model = FSDP(pair())
    with FSDP.summon_full_params(model), FSDP.summon_full_params(model):
        pass


class Summoning(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with FSDP.summon_full_params(self.around[0]):
            return super().forward(x)


def summon_in_forward() -> None:
    inner = Summoning(2, 2)
    model = FSDP(inner)
    inner.around = [model]
    model(torch.ones(1, 2))


def settings(*configs: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        FSDP.set_state_dict_type(FSDP(pair()), StateDictType.FULL_STATE_DICT, *configs)


def local_with_mesh(*, optimizer: bool = False) -> None:
    model = FSDP(pair(), device_mesh=mesh(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    if optimizer:
        FSDP.optim_state_dict(model, torch.optim.SGD(model.parameters(), lr=0.1))
    else:
        model.state_dict()


def reshaped(*, gradient: bool) -> None:
    model = FSDP(nn.Linear(4, 4), use_orig_params=True)
    weight = model.module.weight
    if gradient:
        weight.grad = torch.ones_like(weight)
        weight.grad.data = torch.ones(3)
        weight.data = weight.data.clone()
    else:
        weight.data = torch.ones(4, 4)
    model(torch.ones(1, 4))


def heterogeneous(**options: Any) -> None:
    model = pair()
    model[0] = FSDP(model[0], **options)
    FSDP(model)(torch.ones(1, 2))


def other_environment() -> None:
    with pytest.MonkeyPatch.context() as patch:
        model = pair()
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
        model[0] = FSDP(model[0])
        patch.delenv("FSDP_USE_FULL_PREC_IN_EVAL")
        FSDP(model)(torch.ones(1, 2))


def moved_away(offload: CPUOffload | None) -> None:
    for use_orig_params in (True, False):
        model = FSDP(pair(), cpu_offload=offload, use_orig_params=use_orig_params)
        model(torch.ones(1, 2)).sum().backward()
        model.to("meta")
        try:
            model(torch.ones(1, 2))
        except RuntimeError:
            if not use_orig_params:
                raise
        else:
            raise InterruptedError("original parameters on meta were not noticed")


def changed_between(strategy: str, how: str, *, use_orig_params: bool) -> None:
    model = FSDP(
        pair(), sharding_strategy=ShardingStrategy[strategy], use_orig_params=use_orig_params
    )
    loss = model(torch.ones(1, 2)).sum()
    for parameter in model.parameters():
        if how == "in place":
            with torch.no_grad():
                parameter.add_(1.0)
        else:
            parameter.data = parameter.data.clone()
    loss.backward()


def twice_backward() -> None:
    model = FSDP(pair(), auto_wrap_policy=LINEARS)
    x = torch.ones(1, 2, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        with pytest.raises(RuntimeError, match="^FSDP does not support gradients of gradients"):
            torch.autograd.grad(model(x).sum(), x, create_graph=True)
        # The next iteration trains.
        model(x).sum().backward()
        model(x).sum().backward(create_graph=True)


def local_into_whole() -> None:
    model = FSDP(pair())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
        state = model.state_dict()
        whole = FSDP(pair(), sharding_strategy=ShardingStrategy.NO_SHARD)
    whole.load_state_dict(state)


def called_while_summoned(name: str) -> None:
    model = FSDP(pair())
    with FSDP.summon_full_params(model):
        if name == "apply":
            model.apply(lambda _: None)
        elif name == "no_sync":
            with model.no_sync():
                pass
        else:
            model.clip_grad_norm_(1.0)


def differing(**configs: Any) -> None:
    both = nn.Sequential(FSDP(pair()), FSDP(pair()))
    both[1]._state_dict_settings = StateDictSettings(**configs)
    FSDP.get_state_dict_type(both)


def shared_by_hand(*, use_orig_params: bool) -> None:
    model = pair()
    model[1].weight = model[0].weight
    FSDP(model[0], use_orig_params=use_orig_params)
    FSDP(model[1], use_orig_params=use_orig_params)


def ignore(**options: Any) -> None:
    FSDP(pair(), **options)


ERRORS: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (ValueError, "FSDP doesn't support scalar parameters. Change scale to", lambda: FSDP(scalar())),
    (ValueError, "Cannot flatten integer dtype tensors", lambda: FSDP(integer())),
    (ValueError, "Must flatten tensors with uniform dtype but got", lambda: FSDP(mixed())),
    (
        ValueError,
        "Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",
        lambda: FSDP(frozen()),
    ),
    (
        ValueError,
        "Cannot pass both process_group and device_mesh at the same time.",
        lambda: FSDP(pair(), process_group=world(), device_mesh=mesh(2)),
    ),
    (
        ValueError,
        "Expected process_group to be passed in as either None or "
        "Tuple[dist.ProcessGroup, dist.ProcessGroup] but got",
        lambda: FSDP(pair(), process_group=world(), sharding_strategy=HYBRID),
    ),
    (
        ValueError,
        "Manual wrapping with ShardingStrategy.HYBRID_SHARD requires explicit specification of "
        "process group or device_mesh.",
        lambda: FSDP(pair(), sharding_strategy=HYBRID),
    ),
    (
        ValueError,
        "Expected device_mesh to have ndim=2 but got",
        lambda: FSDP(pair(), sharding_strategy=HYBRID, device_mesh=mesh(2)),
    ),
    (
        ValueError,
        "Expected device_mesh to have ndim=1 but got",
        lambda: FSDP(pair(), device_mesh=mesh(1, 2)),
    ),
    (
        ValueError,
        "FSDP auto wrapping requires modules to not already have FSDP applied but found 0 in",
        lambda: FSDP(nn.Sequential(FSDP(pair())), auto_wrap_policy=LINEARS),
    ),
    (
        ValueError,
        "0 has both parameters with requires_grad=True and False.",
        lambda: FSDP(frozen(), auto_wrap_policy=LINEARS),
    ),
    (
        ValueError,
        "Parameter 'weight' is shared with a module that was wrapped before.",
        lambda: shared_by_hand(use_orig_params=False),
    ),
    (
        ValueError,
        "Parameter 'weight' is shared with a module that was wrapped before.",
        lambda: shared_by_hand(use_orig_params=True),
    ),
    (
        ValueError,
        "Expects one homogeneous value for limit_all_gathers but got",
        lambda: heterogeneous(limit_all_gathers=False),
    ),
    (
        ValueError,
        "Cannot pass both ignored_modules and ignored_states at the same time.",
        lambda: ignore(ignored_modules=[], ignored_states=[]),
    ),
    (
        ValueError,
        "ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
        "[<class 'int'>, <class 'str'>]",
        lambda: ignore(ignored_states=["1", 1]),
    ),
    (
        ValueError,
        "ignored_modules expects nn.Module list elements but got types [<class 'int'>]",
        lambda: ignore(ignored_modules=[1]),
    ),
    (
        ValueError,
        "`ignored_modules` should not include FSDP modules",
        lambda: ignore(ignored_modules=[FSDP(pair())]),
    ),
    (
        TypeError,
        "`ignored_modules` should be an iterable of `torch.nn.Module`s ",
        lambda: ignore(ignored_modules=1),
    ),
    (ValueError, "Expected 3 to be callable but got", lambda: FSDP(pair(), param_init_fn=3)),
    (
        ValueError,
        "The lambda_fn passed to CustomPolicy should return False/True or a kwarg dict, but it "
        "returned",
        lambda: FSDP(pair(), auto_wrap_policy=CustomPolicy(lambda _: 1)),
    ),
    (
        RuntimeError,
        "Cannot writeback when the parameter shape changes",
        lambda: reshaped(gradient=False),
    ),
    (RuntimeError, "`no_sync()` on inner FSDP instances is not supported.", inner_no_sync),
    (
        RuntimeError,
        "`clip_grad_norm_()` should only be called on the root FSDP instance",
        inner_clip,
    ),
    (
        AssertionError,
        "register_comm_hook can only be called on a root instance.",
        inner_hook,
    ),
    (AssertionError, "A communication hook is already registered", hook_twice),
    (
        ValueError,
        "The communication hook must be callable but got",
        lambda: FSDP(pair()).register_comm_hook(None, 3),
    ),
    (
        NotImplementedError,
        "writeback=True and rank0_only=True is not supported yet",
        lambda: summon(rank0_only=True),
    ),
    (
        NotImplementedError,
        "with_grads=True, use_orig_params=False, offload_to_cpu=False is not supported yet",
        lambda: summon(with_grads=True),
    ),
    (
        NotImplementedError,
        "offload_to_cpu=True and NO_SHARD is not supported yet",
        summon_whole,
    ),
    (
        AssertionError,
        "Cannot manually unshard parameters when already unsharding parameters",
        summon_twice,
    ),
    (
        AssertionError,
        "Cannot manually unshard parameters during forward/backward",
        summon_in_forward,
    ),
    (
        RuntimeError,
        "Expected state_dict_config of type",
        lambda: settings(ShardedOptimStateDictConfig()),
    ),
    (
        RuntimeError,
        "Expected optim_state_dict_config of type",
        lambda: settings(FullStateDictConfig(), ShardedOptimStateDictConfig()),
    ),
    (
        RuntimeError,
        "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
        "LOCAL_STATE_DICT.",
        local_with_mesh,
    ),
    (
        RuntimeError,
        "Cannot writeback when the gradient shape changes",
        lambda: reshaped(gradient=True),
    ),
    (
        ValueError,
        "Expects one homogeneous value for _use_orig_params but got",
        lambda: heterogeneous(use_orig_params=True),
    ),
    (
        ValueError,
        "Expects one homogeneous value for _use_full_prec_in_eval but got",
        other_environment,
    ),
    (
        RuntimeError,
        "An FSDP-managed module unexpectedly has parameters on meta",
        lambda: moved_away(None),
    ),
    (
        RuntimeError,
        "An FSDP-managed module with parameter CPU offloading enabled has parameters on meta",
        lambda: moved_away(CPUOffload(offload_params=True)),
    ),
    *(
        (
            AssertionError,
            "FSDP does not support changing the parameters between forward and backward for "
            f"ShardingStrategy.{strategy}",
            partial(changed_between, strategy, how, use_orig_params=use_orig_params),
        )
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP")
        for how in ("in place", "data")
        for use_orig_params in (False, True)
    ),
    (RuntimeError, "FSDP does not support gradients of gradients", twice_backward),
    (AssertionError, "FSDP does not support deepcopy", lambda: copy.deepcopy(FSDP(pair()))),
    (
        AssertionError,
        "FSDP does not support deepcopy",
        lambda: copy.deepcopy(nn.Sequential(FSDP(pair()))),
    ),
    (
        RuntimeError,
        "``local_state_dict`` can only be used when parameters are flatten and sharded.",
        local_into_whole,
    ),
    *(
        (ValueError, "expected to be in states", partial(called_while_summoned, name))
        for name in ("apply", "no_sync", "clip_grad_norm_")
    ),
    (
        AssertionError,
        "All FSDP modules must have the same type of state_dict_config.",
        lambda: differing(state_dict_config=LocalStateDictConfig()),
    ),
    (
        AssertionError,
        "All FSDP modules must have the same type of optim_state_dict_config.",
        lambda: differing(optim_state_dict_config=ShardedOptimStateDictConfig()),
    ),
    (
        AssertionError,
        "All FSDP modules must have the same state dict settings.",
        lambda: differing(state_dict_config=FullStateDictConfig(offload_to_cpu=True)),
    ),
    (
        RuntimeError,
        "Found state_dict_type LOCAL_STATE_DICT. DeviceMesh is not compatible with "
        "LOCAL_STATE_DICT.",
        lambda: local_with_mesh(optimizer=True),
    ),
    (
        ValueError,
        "Optimizer input should not be empty",
        lambda: legacy([]),
    ),
    (
        TypeError,
        "Optimizer input should be an iterable of Tensors or dicts",
        lambda: legacy([1]),
    ),
]


def legacy(optim_input: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        FSDP.shard_full_optim_state_dict({}, FSDP(pair()), optim_input)


def body_errors() -> None:
    for kind, text, call in ERRORS:
        with pytest.raises(kind) as caught:
            call()
        assert re.match(re.escape(text), str(caught.value)), str(caught.value)
    with pytest.raises(ValueError, match="wrapping such modules when use_orig_params=False"):
        FSDP(frozen(), auto_wrap_policy=LINEARS)


def test_errors(ranks: Ranks) -> None:
    ranks(2, body_errors)


def normed() -> FSDP:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    return FSDP(model, auto_wrap_policy=LINEARS, mixed_precision=precision)


def meta_failure() -> None:
    with pytest.raises(TypeError):
        FSDP(Unready())


WARNINGS: list[tuple[type[Warning], str, Callable[[], object]]] = [
    (
        UserWarning,
        "FSDP will not all-gather parameters for containers that do not implement forward: ",
        lambda: FSDP(nn.ModuleList(pair())),
    ),
    (
        FutureWarning,
        "The `NO_SHARD` sharding strategy is deprecated.",
        lambda: FSDP(pair(), sharding_strategy=ShardingStrategy.NO_SHARD),
    ),
    (
        UserWarning,
        "0 has both parameters with requires_grad=True and False.",
        lambda: FSDP(frozen(), auto_wrap_policy=LINEARS, use_orig_params=True),
    ),
    (
        UserWarning,
        "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the wrapped "
        "module has submodules of type:",
        normed,
    ),
    (
        UserWarning,
        "Unable to call `reset_parameters()` for module on meta device with error",
        meta_failure,
    ),
    (
        UserWarning,
        "offload_to_cpu=True and rank0_only=False may result in",
        lambda: summon(offload_to_cpu=True),
    ),
    (
        FutureWarning,
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are being deprecated.",
        lambda: FSDP.set_state_dict_type(FSDP(pair()), StateDictType.FULL_STATE_DICT),
    ),
]


def body_warnings() -> None:
    for kind, text, call in WARNINGS:
        with pytest.warns(kind, match="^" + re.escape(text)):
            call()
    with pytest.warns(UserWarning, match="These modules will be wrapped as separate FSDP"):
        normed()
    model = FSDP(pair())
    with pytest.warns(UserWarning, match=r"^Called FSDP.clip_grad_norm_\(\) on rank \d with no"):
        assert model.clip_grad_norm_(1.0) == 0.0
    top = pair()
    with pytest.warns(UserWarning, match="^Trying to ignore the top-level module"):
        FSDP(top, ignored_modules=[top])
    FSDP(pair(), cpu_offload=CPUOffload(True), auto_wrap_policy=always_wrap_policy)
    assert communicator().size == 2


def test_warnings(ranks: Ranks) -> None:
    ranks(2, body_warnings)


def body_alone() -> None:
    text = (
        "FSDP is switching to use `NO_SHARD` instead of ShardingStrategy.FULL_SHARD since the "
        "world size is 1."
    )
    with pytest.warns(UserWarning, match="^" + re.escape(text)):
        model = FSDP(nn.Linear(3, 2))
    assert model.sharding_strategy is ShardingStrategy.NO_SHARD
    model(torch.ones(1, 3)).sum().backward()
    torch.testing.assert_close(model._flat_param.grad, torch.ones(8))


def test_one_rank_does_not_shard(ranks: Ranks) -> None:
    ranks(1, body_alone)


CPU, GPU, OTHER = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("devices", "text"),
    [
        ([GPU, OTHER], "FSDP only supports single device modules but got params on"),
        ([CPU, GPU], "To support a module with both CPU and GPU params, please pass in device_id"),
        (
            [CPU, torch.device("xpu")],
            "FSDP does not support modules with different device types but got params on",
        ),
    ],
)
def test_devices_are_refused(devices: list[torch.device], text: str) -> None:
    with pytest.raises(RuntimeError, match="^" + text):
        check_devices(devices, None)


def test_devices_are_chosen() -> None:
    check_devices([CPU, GPU], GPU)
    assert choose_device([CPU], None, CPU, 0) == CPU
    assert choose_device([GPU], None, GPU, 0) == GPU
    with pytest.raises(ValueError, match="^Inconsistent compute device and `device_id` on rank 3"):
        choose_device([GPU], OTHER, GPU, 3)
    with pytest.warns(UserWarning, match="^The passed-in `module` is on CPU and will thus have"):
        assert choose_device([CPU], None, GPU, 0) == GPU


def test_one_unit_lies_on_one_device() -> None:
    named = [
        ("a", nn.Parameter(torch.ones(2))),
        ("b", nn.Parameter(torch.ones(2, device="meta"))),
    ]
    with pytest.raises(ValueError, match=r"^Must flatten tensors on the same device but got both"):
        check_parameters(named, use_orig_params=True)


def test_a_flat_parameter_elsewhere_is_refused() -> None:
    away = nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(RuntimeError, match="^Expected `FlatParameter` to be on the compute device"):
        write_back(away, torch.ones(2), "_flat_param")


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with pytest.warns(UserWarning, match="^FSDP got the argument `device_id` cuda"):
        assert resolve_device_id(torch.device("cuda")) == torch.device("cuda", 3)
    assert resolve_device_id(1) == torch.device("cuda", 1)


class OnGpu:
    """Stands for ranks that communicate on a GPU."""

    size = 2
    device = GPU
    is_on_host, is_alone = False, False


def test_states_on_the_cpu_are_not_sent_between_gpus() -> None:
    axis: Any = OnGpu()
    text = "^The module has CPU parameters or buffers when `sync_module_states=True`"
    with pytest.raises(ValueError, match=text):
        synchronize([("weight", torch.ones(2))], axis, None)
