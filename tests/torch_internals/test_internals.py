"""Each private name of torch that the library uses is there, and does what it is used for."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE
from torch.distributed.fsdp.fully_sharded_data_parallel import FLAT_PARAM
from torch.nn.modules import module as of_all
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import CheckpointFunction

import meshwright
from meshwright.testing import Ranks
from support.internals.torch_internals import (
    autograd,
    distributed,
    modules,
    required,
    simulation,
    tensors,
    tracing,
    trees,
    variable_of,
)

ROOM = Path(meshwright.__file__).parent / "torch_internals"


def names() -> Iterator[tuple[str, str]]:
    """(file, dotted name) of whatever the room asks torch for by `required`."""
    for path in sorted(ROOM.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        constants = {
            node.targets[0].id: node.value.value
            for node in tree.body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "required":
                name = compile(ast.Expression(node.args[0]), "", "eval")
                if {"name", "_name"}.isdisjoint(name.co_names):  # those of tables follow
                    yield path.name, eval(name, constants)
    yield from (("autograd.py", f"torch._C._functions.{name}") for name in autograd.NODES)
    for functions, _ in modules.QUESTIONS.values():
        yield from (("modules.py", f"{modules.ASKING}.{each}") for each in functions)


_FUNCTIONAL = "torch.ops._c10d_functional"  # torch takes any name below torch.ops for a library
NAMES = [pytest.param(name, id=f"{file}:{name}") for file, name in names() if name != _FUNCTIONAL]


def test_the_names_are_found() -> None:
    assert len(NAMES) > 30


_OLD_JIT = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


@_OLD_JIT
@pytest.mark.parametrize("name", NAMES)
def test_a_torch_that_lacks_a_name_is_told_which(name: str) -> None:
    required(name, "works")
    owner, _, last = name.rpartition(".")
    with pytest.raises(ImportError, match=rf"has no {owner}\.{last}_, by which Meshwright works"):
        required(f"{owner}.{last}_", "works")


def test_a_missing_parent_is_named_too() -> None:
    with pytest.raises(ImportError, match=r"torch \S+ has no torch\._nothing\.at_all, by which"):
        required("torch._nothing.at_all", "works")


def test_a_missing_variable_is_named_with_its_function() -> None:
    def function(known: int) -> FrameType:
        return sys._getframe()

    frame = function(3)
    assert variable_of(frame, "known", "works") == 3
    told = rf"torch \S+ has no variable 'other' in {__name__}\.function, by which Meshwright works"
    with pytest.raises(ImportError, match=told):
        variable_of(frame, "other", "works")


@pytest.mark.parametrize("question", modules.QUESTIONS)
def test_functions_for_state_dicts_have_the_variables(question: str) -> None:
    functions, variables = modules.QUESTIONS[question]
    for name in functions:
        code = inspect.unwrap(required(f"{modules.ASKING}.{name}", "works")).__code__
        assert {*variables} <= {*code.co_varnames, *code.co_cellvars}


def test_a_torch_that_has_renamed_what_asks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two of it: a function, and a variable of one that asks."""
    asks = {"__name__": modules.ASKING, "asked": modules.asked}
    exec("def _verify_options(question): return asked(question)", asks)
    ask: Any = asks["_verify_options"]
    assert ask("anything") == ()
    assert ask("tensors") is None
    with pytest.raises(ImportError, match=rf"has no variable 'optims' in {modules.ASKING}\._v"):
        ask("optimizers")
    monkeypatch.setattr(modules, "QUESTIONS", {"tensors": (("_renamed",), ())})
    with pytest.raises(ImportError, match=rf"has no {modules.ASKING}._renamed, by which"):
        ask("tensors")
    assert modules.asked("tensors") is None


def in_backward(look: Callable[[], object]) -> object:
    """Return what ``look`` finds while the gradient of a product is computed."""
    found = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: found.append(look()))
    y.sum().backward()
    return found[0]


def test_a_backward_under_way_has_a_number() -> None:
    assert autograd.running_backward() == -1
    assert in_backward(autograd.running_backward) != -1


def test_a_backward_tells_whether_it_keeps_its_graph() -> None:
    assert in_backward(autograd.keeps_graph) is False


def test_a_backward_tells_which_nodes_it_goes_through() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    assert y.grad_fn is not None
    accumulator = y.grad_fn.next_functions[0][0]
    found = []
    y.register_hook(lambda gradient: found.append(autograd.is_executed(accumulator)))
    y.sum().backward()
    torch.autograd.grad((y * 1).sum(), y)
    assert found == [True, False]


def test_what_is_put_at_the_end_of_a_backward_runs_there() -> None:
    order = []
    x = torch.ones(2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    y = x * 2
    y.register_hook(lambda _: autograd.at_end_of_backward(lambda: order.append("end")))
    y.sum().backward()
    assert order == ["gradient", "end"]


def test_the_engine_runs_a_backward() -> None:
    x = torch.ones(2, requires_grad=True)
    y = (x * 3).sum()
    (found,) = autograd.run_engine((y,), (torch.ones(()),), False, False, (x,), True)
    torch.testing.assert_close(found, torch.full((2,), 3.0))
    assert x.grad is None


def test_writes_in_the_block_are_not_counted() -> None:
    x = torch.ones(2)
    before = tensors.version_of(x)
    with autograd.keeps_versions(x):
        x.add_(1)
    assert tensors.version_of(x) == before
    x.add_(1)
    assert tensors.version_of(x) == tensors.writes_to(x) == before + 1
    assert tensors.writes_to("text") == 0


def test_a_profiler_is_seen() -> None:
    assert not autograd.is_profiled()
    with torch.profiler.profile(acc_events=True):
        assert autograd.is_profiled()


def test_a_transform_of_functions_is_seen() -> None:
    seen = []
    assert autograd.function_transforms() is None
    torch.func.vmap(lambda x: (seen.append(autograd.function_transforms()), x)[1])(torch.ones(2))
    assert seen[0] is not None


def test_hooks_of_tensors_are_read_and_given() -> None:
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    assert not autograd.backward_hooks_of(x)
    assert not autograd.after_hooks_of(x)
    x.register_hook(lambda gradient: gradient * 2)

    def add(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        leaf.grad += 1

    x.register_post_accumulate_grad_hook(add)
    autograd.set_backward_hooks(y, autograd.backward_hooks_of(x))
    autograd.set_after_hooks(y, autograd.after_hooks_of(x))
    y.sum().backward()
    torch.testing.assert_close(y.grad, torch.full((2,), 3.0))
    assert set(autograd.STATE_OF_TENSORS) <= set(dir(x))


def test_hooks_of_saved_tensors_are_seen() -> None:
    assert autograd.saved_tensor_hooks() is None
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert autograd.saved_tensor_hooks() is not None


def test_what_nodes_have_saved_is_read() -> None:
    x = torch.ones(2, requires_grad=True)
    product = x * torch.full((2,), 3.0)
    node: Any = product.grad_fn
    torch.testing.assert_close(autograd.saved(node, "other"), torch.full((2,), 3.0))
    assert autograd.input_metadata_of(node)[0].shape == [2]
    assert not autograd.may_be_packed(node, "other")
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert autograd.may_be_packed((x * torch.ones(2)).grad_fn, "other")
    recomputed: Any = CheckpointFunction.apply(lambda t: t * 2, True, x)
    assert autograd.function_class(recomputed.grad_fn) is CheckpointFunction


def test_users_of_memory_are_counted() -> None:
    x = torch.ones(2)
    before = tensors.storage_users(tensors.storage_id(x.untyped_storage()))
    view = x[:1]
    assert tensors.storage_users(tensors.storage_id(x.untyped_storage())) == before + 1
    assert tensors.is_view(view)
    assert not tensors.is_view(x)
    leaf = torch.ones(4, requires_grad=True)
    y = leaf * 2
    assert tensors.may_be_rewritten(y) and tensors.may_be_rewritten(y[:2])
    assert not tensors.may_be_rewritten(leaf[:2]) and not tensors.may_be_rewritten(y.split(2)[0])


def test_tensors_without_memory_are_seen() -> None:
    assert tensors.has_storage(torch.ones(1))
    assert not tensors.has_storage(torch.eye(2).to_sparse())


def test_modes_are_seen() -> None:
    class Mode(tensors.TorchDispatchMode):
        pass

    assert tensors.dispatch_depth() == tensors.function_depth() == 0
    with Mode() as mode:
        assert tensors.dispatch_depth() == 1
        assert tensors.dispatch_modes() == [mode]
        with tensors.without_dispatch():
            assert tensors.skips_dispatch_modes()
        assert not tensors.skips_dispatch_modes()
    with torch.overrides.BaseTorchFunctionMode() as other:
        assert tensors.function_modes() == [other]


def test_subclasses_are_made_and_passed_over() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any) -> Any:
            raise AssertionError("asked")

    made = tensors.make_subclass(Own, torch.ones(2))
    with tensors.without_function():
        assert made.sum() == 2
    with pytest.raises(AssertionError, match="asked"):
        made.sum()
    tensors.mark_parameter(made, is_parameter=True)
    assert tensors.memory_of(made) is made


def test_operators_on_lists_do_what_they_say() -> None:
    targets = [torch.zeros(2), torch.zeros(3)]
    tensors.foreach_copy_(targets, [torch.ones(2), torch.ones(3)])
    tensors.foreach_add_(targets, targets)
    tensors.foreach_mul_(targets, 2.0)
    assert [float(norm) for norm in tensors.foreach_norm(targets, float("inf"))] == [4.0, 4.0]
    tensors.foreach_zero_(targets)
    assert not any(map(torch.any, targets))
    chunks = tensors.join_in_chunks([torch.arange(4.0), torch.arange(2.0)], 0, 2)
    torch.testing.assert_close(chunks, torch.tensor([[0.0, 1.0, 0.0], [2.0, 3.0, 1.0]]))
    with pytest.raises(RuntimeError):
        tensors.assert_soon(torch.tensor(False))


def test_operations_of_a_group_are_launched_at_once() -> None:
    calls: list[str] = []
    group = SimpleNamespace(
        _start_coalescing=lambda device: calls.append(f"start on {device}"),
        _end_coalescing=lambda device: calls.append(f"end on {device}") or "the work",
    )
    assert all(hasattr(dist.ProcessGroup, name) for name in vars(group))
    with distributed.coalesced(group, torch.device("cpu")) as works:
        calls.append("operations")
        assert works == []
    assert works == ["the work"]
    with (
        pytest.raises(ValueError, match="planted"),
        distributed.coalesced(group, torch.device("cuda:0")),
    ):
        raise ValueError("planted")
    assert calls == ["start on cpu", "operations", "end on cpu", "start on cuda:0", "end on cuda:0"]


def body_groups() -> None:
    """Ranks with other numbers of groups, in a world that is bound to a device."""
    default, rank = distributed.default_group(), dist.get_rank()
    if rank == 0:
        dist.new_group([0], use_local_synchronization=True)
    default.bound_device_id = torch.device("cuda", 0)
    if rank != 1:
        with pytest.raises(RuntimeError):  # torch would split the backend of that device
            dist.new_group([0, 2], use_local_synchronization=True)
        made = distributed.make_group("the two", [0, 2], timedelta(seconds=30))
        assert dist.get_process_group_ranks(made) == [0, 2]
        total = torch.ones(1)
        dist.all_reduce(total, group=made)
        assert total == 2
    assert default.bound_device_id == torch.device("cuda", 0)
    default.bound_device_id = None


def test_a_group_is_made_by_its_own_ranks(ranks: Ranks) -> None:
    ranks(3, body_groups)


def test_schemas_of_operators_are_read() -> None:
    schema = tensors.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable
    assert tensors.any_schema_of(print) is None
    assert tensors.any_schema_of(tensors.to_copy_operator).name == "aten::_to_copy"
    assert "aten::_foreach_add.List" in tensors.operator_names()
    assert tensors.schema_of(tensors.number_operator).name == "aten::_local_scalar_dense"


def test_what_a_functional_call_lends_is_found() -> None:
    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found.append(modules.lent_now())
            return super().forward(x)

    found: list[object] = []
    module = Looks(2, 2)
    module(torch.ones(2))
    lent = dict(module.named_parameters())
    torch.func.functional_call(module, lent, (torch.ones(2),))
    assert found == [None, lent]


def test_hooks_and_calls_of_modules_are_read() -> None:
    module = nn.BatchNorm1d(2)
    module.register_forward_pre_hook(lambda *_: None)
    module.register_forward_hook(lambda *_: None)
    module.register_buffer("passing", torch.ones(1), persistent=False)
    assert len(modules.forward_pre_hooks_of(module)) == len(modules.forward_hooks_of(module)) == 1
    assert modules.non_persistent_buffers_of(module) == {"passing"}
    assert isinstance(module, modules.AnyBatchNorm)
    assert all(hasattr(module, name) for name in (*modules.HOOKS, *modules.STATE_HOOKS))
    with pytest.raises(ValueError, match="expected 2D or 3D"):
        modules.check_input_dim(module, torch.ones(1, 1, 1, 1))
    assert modules.compiled_call_of(module) is None
    modules.set_compiled_call(module, lambda *_: "compiled")
    assert module(torch.ones(2, 2)) == "compiled"
    assert modules.call_of(module)(torch.ones(2, 2)).shape == (2, 2)
    assert not modules.is_forward_compiled(module)


def test_hooks_of_all_modules_are_seen() -> None:
    def hook(*_: object) -> None: ...

    handles = [
        of_all.register_module_forward_pre_hook(hook),
        of_all.register_module_forward_hook(hook),
        of_all.register_module_full_backward_pre_hook(hook),
        of_all.register_module_full_backward_hook(hook),
    ]
    assert modules.HOOKS_OF_ALL.keys() == modules.HOOKS.keys()
    assert all(hook in hooks.values() for hooks in modules.HOOKS_OF_ALL.values())
    for handle in handles:
        handle.remove()
    assert not any(hook in hooks.values() for hooks in modules.HOOKS_OF_ALL.values())


def test_attention_is_initialized_by_its_own_method() -> None:
    assert callable(getattr(nn.MultiheadAttention(2, 1), modules.RESET_ATTENTION))


def test_places_of_wrapped_modules_have_the_names_that_torch_gives_them() -> None:
    linear = nn.Linear(2, 2)
    assert getattr(torch.compile(linear, backend="eager"), modules.COMPILED) is linear
    assert getattr(checkpoint_wrapper(linear), modules.CHECKPOINTED) is linear
    assert modules.WRAPPED == FSDP_WRAPPED_MODULE
    assert modules.FLAT == FLAT_PARAM
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(linear, ["weight"])
    assert getattr(linear, modules.IGNORED_NAMES) == ["weight"]


@_OLD_JIT
def test_what_torch_steps_in_the_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    parameter = nn.Parameter(torch.ones(1))
    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 1.0})
    assert len(vars(parameter)[modules.STEPPERS]) == 1
    (handle,) = modules.hooks_of_steppers().pop(parameter)
    handle.remove()
    monkeypatch.setattr(modules, "STEPPERS", "_renamed")
    with pytest.raises(ImportError, match=r"torch \S+ has no attribute _renamed of parameters"):
        modules.hooks_of_steppers()


def test_hooks_of_steps_are_forgotten() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.step()
    modules.forget_step_hooks(optimizer)
    optimizer.step()
    assert seen == ["before", "after"]
    handle = register_optimizer_step_pre_hook(print)
    assert print in modules.step_hooks_of_all.values()
    handle.remove()


@pytest.mark.parametrize("is_fused", [False, True])
def test_fused_optimizers_write_nothing_by_a_flag(is_fused: bool) -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=is_fused)
    assert modules.steps_by_flag(optimizer) == is_fused
    parameter.grad = torch.ones(2)
    if is_fused:
        modules.step_unless(torch.ones(()), optimizer)
        assert parameter.tolist() == [1, 1]
        modules.step_unless(torch.zeros(()), optimizer)
        assert parameter.tolist() != [1, 1]


def test_trees_go_apart_and_together() -> None:
    leaves, spec = trees.tree_flatten({"a": [1, (2, 3)]})
    assert leaves == trees.tree_leaves({"a": [1, (2, 3)]}) == [1, 2, 3]
    again = trees.treespec_loads(trees.treespec_dumps(spec))
    assert again == spec
    assert trees.tree_unflatten(trees.tree_map(str, leaves), again) == {"a": ["1", ("2", "3")]}


def test_no_backward_is_compiled_without_the_compiler() -> None:
    assert not tracing.is_backward_compiled()
    for name in tracing.COMPILER_MODULES:
        assert name.startswith("torch._")


def test_functions_are_kept_out_of_graphs() -> None:
    seen: list[bool] = []

    @tracing.not_traced
    def apart(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return x

    @tracing.keep_result
    def constant() -> int:
        return 3

    @tracing.as_part_of_caller
    def inside(x: torch.Tensor) -> torch.Tensor:
        return x * constant()

    @tracing.never_first
    def never(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    compiled = torch.compile(lambda x: inside(apart(x)) + 1, backend="eager")
    torch.testing.assert_close(compiled(torch.ones(2)), torch.full((2,), 4.0))
    assert seen == [False]
    torch.testing.assert_close(never(torch.ones(2)), torch.full((2,), 2.0))


def test_functions_are_stood_in_for_within_a_block() -> None:
    seen: list[str] = []

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        seen.append(original.__name__)
        return original(*args, **kwargs)

    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, *_: Any) -> Any:
            raise AssertionError("asked")

    x = torch.ones(2, requires_grad=True)
    with (
        simulation.running_backward_by(run),
        simulation.wrapping_by(run),
        simulation.replaced(torch.UntypedStorage, "resize_", run),
    ):
        (x * 2).sum().backward()
        torch.autograd.grad((x * 2).sum(), x)
        torch.Tensor._make_wrapper_subclass(Own, (2,))
        torch.ones(2).untyped_storage().resize_(0)
    expected = ["_engine_run_backward"] * 2 + ["_make_wrapper_subclass", "resize_"]
    assert seen == expected
    (x * 2).sum().backward()
    torch.Tensor._make_wrapper_subclass(Own, (2,))
    assert seen == expected


def test_operators_run_unseen() -> None:
    seen = []

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append("function")
            return func(*args, **(kwargs or {}))

    class Operators(tensors.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append("operator")
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Functions(), Operators():
        with simulation.without_functions(), simulation.without_modes():
            x.add_(1)
        assert not seen
        x.add_(1)
    assert seen == ["function", "operator"]


def test_layers_are_computed_again_whatever_their_device_says() -> None:
    def compared() -> set[str]:
        checks: Any = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        return set(checks["default"](torch.ones(2)))

    assert compared() == {"shape", "dtype", "device"}
    with simulation.recomputing_on_any_device():
        assert compared() == {"shape", "dtype"}
    assert compared() == {"shape", "dtype", "device"}


def test_parts_of_a_sparse_tensor_are_found() -> None:
    indices, values = simulation.parts_of_sparse(torch.tensor([0.0, 2.0]).to_sparse())
    assert (indices.tolist(), values.tolist()) == ([[1]], [2.0])


def body_below() -> list[str]:
    """Functional collectives, which C++ makes, with and without a watch."""
    group = distributed.default_group()
    found: list[str] = []

    def seen(of: object, method: str, given: list[Any], go: Callable[[], Any]) -> object:
        assert of is group
        found.append(f"{method} {given[1]} {list(given[0].shape)}")
        return go()

    end = distributed.watch_functional_operators(seen)
    total = distributed.graph_operators.all_reduce(torch.ones(3), "sum", group.group_name)
    assert distributed.graph_operators.wait_tensor(total).tolist() == [2.0] * 3
    end()
    total = distributed.graph_operators.all_reduce(torch.ones(3), "sum", group.group_name)
    distributed.graph_operators.wait_tensor(total)
    return found


def test_calls_that_come_from_outside_of_python_are_seen(ranks: Ranks) -> None:
    assert ranks(2, body_below, backend="gloo") == [["allreduce sum [3]"]] * 2


@pytest.mark.slow
def test_the_first_strategy_loads_neither_checkpoints_nor_a_launcher() -> None:
    """torch's take half a second together, which most processes never use."""
    program = (
        "import sys\n"
        "from torch import nn\n"
        "from meshwright import comm\n"
        "from meshwright.data_parallel import fully_shard\n"
        "comm.connect('gloo')\n"
        "fully_shard(nn.Linear(2, 2))\n"
        "roots = 'torch.distributed.checkpoint', 'torch.distributed.elastic'\n"
        "print([name for name in sys.modules if name in roots])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "[]\n"
