"""Where each row of the specification of data parallelism is shown: texts, then behaviours.

A row names the test that shows it; here it is checked that the test exists and, for an error or a
warning, that its text is in that file. Rows that other libraries refuse and that work here stand
under "lifted".
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent.parent

# By place in the specification and test: the texts of errors and warnings.
TEXTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("5.1", "fsdp/test_errors.py::test_warnings"): (
        "FSDP will not all-gather parameters for",
        "The `NO_SHARD` sharding strategy is",
        "Both mixed precision and an",
        "Trying to ignore the top-level module",
        "Unable to call `reset_parameters()` for",
    ),
    ("5.1", "fsdp/test_errors.py::test_errors"): (
        "FSDP doesn't support scalar parameters.",
        "Cannot flatten integer dtype tensors",
        "Must flatten tensors with uniform dtype but",
        "Must flatten tensors with uniform",
        "FSDP only supports single device modules",
        "To support a module with both CPU and GPU",
        "FSDP does not support modules with",
        "Cannot pass both process_group and",
        "Expected process_group to be passed in as",
        "requires explicit specification of process",
        "Expected device_mesh to have ndim=2 but",
        "An FSDP-managed module with parameter CPU",
        "FSDP auto wrapping requires modules to not",
        "has both parameters with requires_grad=True",
        "Expects one homogeneous value for",
        "Cannot pass both ignored_modules and",
        "ignored_states expects all nn.Parameter or",
        "ignored_modules expects nn.Module list",
        "`ignored_modules` should not include FSDP",
        "`ignored_modules` should be an iterable of",
        "to be callable but got",
        "Cannot writeback when the parameter shape",
        "Cannot writeback when the gradient shape",
        "FSDP does not support changing the",
    ),
    ("5.1", "fsdp/test_errors.py::test_one_unit_lies_on_one_device"): (
        "Must flatten tensors on the same device but",
    ),
    ("5.1", "fsdp/test_errors.py::test_one_rank_does_not_shard"): (
        "FSDP is switching to use `NO_SHARD` instead",
    ),
    ("5.1", "fsdp/test_errors.py::test_a_device_without_an_index_is_the_current_one"): (
        "FSDP got the argument `device_id`",
    ),
    ("5.1", "fsdp/test_errors.py::test_devices_are_chosen"): (
        "Inconsistent compute device and `device_id`",
        "The passed-in `module` is on CPU and will",
    ),
    ("5.1", "fsdp/test_errors.py::test_states_on_the_cpu_are_not_sent_between_gpus"): (
        "The module has CPU parameters or buffers",
    ),
    ("5.10", "fsdp/test_errors.py::test_errors"): ("FSDP does not support gradients of",),
    ("5.4", "fsdp/test_errors.py::test_errors"): ("The lambda_fn passed to CustomPolicy should",),
    ("5.4", "fsdp/test_wrap.py::test_wrap_applies_what_enable_wrap_says"): (
        "You are already within an autowrap",
    ),
    ("5.5", "data_parallel/test_order.py::test_a_first_forward_that_differs_under_detail"): (
        "Forward order differs across ranks: rank",
    ),
    ("5.5", "data_parallel/test_order.py::test_an_equal_size_swap_is_found_and_both_units_named"): (
        ". Collectives are unchecked and may give",
    ),
    ("5.5", "data_parallel/test_order.py::test_later_forwards_warn_under_detail_and_train_on"): (
        "but trying to all-gather parameters for",
        "Expected to not all-gather any more",
    ),
    ("5.5", "data_parallel/test_order.py::test_a_unit_that_the_check_was_not_told_of"): (
        "a newly-added parameter since construction",
    ),
    ("5.6", "fsdp/test_errors.py::test_errors"): (
        "An FSDP-managed module unexpectedly has",
        "Expected state_dict_config of type",
        "Expected optim_state_dict_config of type",
        "All FSDP modules must have the same type of",
        "All FSDP modules must have the same type of",
        "All FSDP modules must have the same state",
        "writeback=True and rank0_only=True is not",
        "is not supported yet",
        "offload_to_cpu=True and NO_SHARD is not",
        "Cannot manually unshard parameters during",
        "Cannot manually unshard parameters when",
        "`no_sync()` on inner FSDP instances is not",
        "`clip_grad_norm_()` should only be called",
        "register_comm_hook can only be called on a",
        "A communication hook is already",
        "The communication hook must be callable but",
        "expected to be in states",
    ),
    ("5.6", "fsdp/test_errors.py::test_a_flat_parameter_elsewhere_is_refused"): (
        "Expected `FlatParameter` to be on the",
    ),
    ("5.6", "fsdp/test_errors.py::test_warnings"): (
        "FSDP.state_dict_type() and",
        "offload_to_cpu=True and rank0_only=False",
        "Called FSDP.clip_grad_norm_() on rank",
    ),
    ("5.6", "fsdp/test_state_dicts.py::test_settings_are_restored_and_checked"): (
        "should have the same state_dict_type",
    ),
    ("5.7", "fsdp/test_state_dicts.py::test_without_sharding_the_dict_is_full"): (
        "When using ``NO_SHARD`` for",
    ),
    ("5.7", "fsdp/test_errors.py::test_errors"): (
        "``local_state_dict`` can only be used when",
        "Found state_dict_type LOCAL_STATE_DICT.",
    ),
    ("5.8", "fsdp/test_interoperation.py::test_older_names"): (
        "full_optim_state_dict``is",
        "The `optim_input` argument is",
    ),
    ("5.8", "fsdp/test_optimizer_state.py::test_keys_and_errors"): (
        "Invalid parameter keys:",
        "Expected optim_state_key_type to be",
        "Differing optimizer state names for the",
        "Differing optimizer state types for",
        "All unflattened parameters comprising a",
        "Tensor optimizer state does not have same",
    ),
    ("5.8", "fsdp/test_errors.py::test_errors"): (
        "Optimizer input should not be empty",
        "Optimizer input should be an iterable of",
    ),
    ("6", "data_parallel/test_sharded_errors.py::test_every_row_of_errors"): (
        "fully_shard does not support containers",
        "Each distinct composable distributed API",
        "FSDP does not support deepcopy. Please use",
        "fully_shard expects a 1D or 2D DeviceMesh",
        "Please init the 2D mesh for HSDP with",
        "reshard_after_forward should be a bool or",
        "If passing reshard_after_forward as an int,",
        "FSDP does not support uneven sharding on",
        "Shard dim 2 is invalid",
        "FSDP parameters should be materialized on",
        "fully_shard doesn't support scalar",
        "FSDP parameters should be materialized from",
        "FSDP requires running forward through the",
        "FSDP requires a single root module but",
        "Expects FSDPModule but got",
        "max_input_buffers must be",
        "does not have a method",
    ),
    ("7.1", "data_parallel/test_replicated.py::test_seed"): ("Expected device_id to be int or",),
    ("7.1", "data_parallel/test_sharded_errors.py::test_every_row_of_errors"): (
        "Cannot apply `replicate()` on a Module",
        "Each distinct composable distributed API",
    ),
    ("7.1", "data_parallel/test_replicated.py::test_contract"): (
        "DDP does not support deepcopy.",
        "replicate expects a 1D DeviceMesh but",
    ),
    ("7.1", "data_parallel/test_distributed.py::test_composable_functions_keep_names"): (
        "implementations cannot modify FQNs",
        "cannot modify the order of FQNs",
    ),
    ("7.3", "data_parallel/test_join.py::test_join"): (
        "exhausted all inputs",
        "Detected at least one rank that",
    ),
    ("7.3", "data_parallel/test_distributed.py::test_distributed"): (
        "Cannot specify both process_group and",
        "Only 1D device mesh is supported, but",
        "DistributedDataParallel is not needed when",
        "Modules with uninitialized parameters can't",
        "device_ids can only be None or contain a",
        "DistributedDataParallel's input module must",
        "DistributedDataParallel device_ids and",
    ),
    ("7.3", "data_parallel/test_conformance.py::test_beside_torch"): (
        "Expected to have finished reduction in the",
    ),
    ("7.3", "data_parallel/test_reducer.py::test_models"): (
        "Expected to mark a variable ready only",
    ),
    ("7.3", "data_parallel/test_comm_hooks.py::test_power_sgd_refuses_an_early_start"): (
        "Expect `start_powerSGD_iter` > 1 if",
    ),
    ("7.3", "data_parallel/test_comm_hooks.py::test_what_cannot_be_a_hook_is_refused"): (
        "Communication hook must be callable.",
        "Communication hook: bucket annotation",
        "Communication hook: return annotation",
    ),
}

# By place in the specification: what happens, and where it is shown.
BEHAVIOURS: tuple[tuple[str, str, str], ...] = (
    (
        "seed 001",
        "test_invalid_first_iter_order",
        "fsdp/test_exec_order.py::test_invalid_first_iter_order",
    ),
    (
        "seed 001",
        "test_invalid_later_iter_order",
        "fsdp/test_exec_order.py::test_invalid_later_iter_order",
    ),
    ("seed 001", "test_train_eval", "fsdp/test_exec_order.py::test_train_eval"),
    (
        "seed 003",
        "manual wrap without policy",
        "fsdp/test_hybrid_shard.py::test_raises_manual_wrap_hybrid_shard_when_none_policy",
    ),
    (
        "seed 003",
        "hsdp_save_load_state_dict",
        "fsdp/test_hybrid_shard.py::test_hsdp_save_load_state_dict",
    ),
    (
        "seed 003",
        "hsdp_sync_module_state",
        "fsdp/test_hybrid_shard.py::test_hsdp_sync_module_state",
    ),
    (
        "seed 003",
        "invalid_pg_specification",
        "fsdp/test_hybrid_shard.py::test_invalid_pg_specification_raises",
    ),
    (
        "seed 003",
        "basic_setup: groups, counts",
        "fsdp/test_hybrid_shard.py::test_hybrid_basic_setup",
    ),
    ("seed 003", "parity", "fsdp/test_hybrid_shard.py::test_hybrid_parity"),
    ("seed 004", "all cases", "data_parallel/test_replicated.py::test_seed"),
    ("seed 004", "on four ranks", "data_parallel/test_replicated.py::test_seed_on_four_ranks"),
    (
        "3a",
        "all_reduce over one replica",
        "data_parallel/test_sharded_cases.py::test_a_replicating_axis_of_one_rank_still_reduces",
    ),
    (
        "3b",
        "no padding without original parameters",
        "fsdp/test_state_dicts.py::test_local_state_dicts_are_flat_shards",
    ),
    ("3c", "requires_grad flips", "data_parallel/test_sharded.py::test_freezing_between_steps"),
    (
        "3d",
        "a warning, then training",
        "data_parallel/test_order.py::test_later_forwards_warn_under_detail_and_train_on",
    ),
    (
        "3e",
        "a sharded dict in load_state_dict",
        "comm/test_dtensor.py::test_an_optimizer_loads_views_and_refuses_to_step",
    ),
    ("3f", "a local shard inside FULL", "fsdp/test_hybrid_shard.py::test_hsdp_sync_module_state"),
    ("3h", "no other reductions", "fsdp/test_collectives_in_order.py::test_collectives_one_by_one"),
    ("4.2", "every row trains as one process", "data_parallel/test_strategy_table.py::test_pairs"),
    ("4.3", "phases", "data_parallel/test_unit.py::test_the_phase_is_checked"),
    (
        "4.4",
        "an iteration after an exception",
        "data_parallel/test_sharded.py::test_the_iteration_after_an_exception_trains",
    ),
    (
        "4.4",
        "one rank raises alone",
        "data_parallel/test_one_rank_raises.py::test_every_rank_is_told_who_raised",
    ),
    ("4.4", "recomputed activations", "data_parallel/test_sharded.py::test_recomputed_activations"),
    (
        "4.4",
        "used on some ranks",
        "data_parallel/test_sharded_cases.py::test_a_parameter_unused_on_one_rank_counts_as_zero",
    ),
    ("4.4", "used on no rank", "fsdp/test_wrapper.py::test_gradients_that_no_rank_has_are_none"),
    (
        "4.4",
        "a unit that ran on some ranks only",
        "data_parallel/test_divergence.py::test_ranks_that_differ_are_named",
    ),
    (
        "4.5",
        "called twice, tied, converted",
        "data_parallel/test_odd_models.py::test_weights_are_those_of_one_process",
    ),
    ("4.8", "accumulation", "data_parallel/test_sharded.py::test_accumulation_equals_one_backward"),
    (
        "4.8",
        "sums that wait for the replicas",
        "data_parallel/test_sharded_cases.py::test_sums_may_wait_for_the_replicating_axis",
    ),
    (
        "4.9",
        "ranks change together",
        "data_parallel/test_order_of_units.py::test_ranks_that_change_together_are_silent",
    ),
    (
        "4.9",
        "an equal-size swap outside DETAIL",
        "data_parallel/test_order_of_units.py::test_an_equal_size_swap_is_found_outside_detail",
    ),
    (
        "4.9",
        "a rank that skips a unit",
        "data_parallel/test_order_of_units.py::test_a_rank_that_skips_a_unit_is_named_and_not_waited_for",
    ),
    (
        "4.10",
        "DTensors at rest",
        "data_parallel/test_sharded.py::test_parameters_are_dtensors_at_rest",
    ),
    (
        "4.10",
        "padding is reported",
        "data_parallel/test_sharded_meshes.py::test_padding_is_reported_when_a_unit_is_built",
    ),
    ("4.11", "arithmetic on views", "comm/test_dtensor.py::test_arithmetic_is_refused_by_name"),
    (
        "4.12",
        "functions of torch, both",
        "data_parallel/test_state_dict_functions.py::test_functions_of_torch",
    ),
    (
        "4.12",
        "functions of torch, facade",
        "fsdp/test_interoperation.py::test_functions_of_torch_for_models",
    ),
    ("4.12", "autocast, scaler", "data_parallel/test_sharded_modes.py::test_modes"),
    ("5.2", "attributes", "fsdp/test_wrapper.py::test_attributes"),
    ("5.3", "exact collectives", "fsdp/test_collectives_in_order.py::test_collectives_one_by_one"),
    ("5.3", "as many as torch", "fsdp/test_collectives_in_order.py::test_torch_issues_as_many"),
    ("5.4", "policies", "fsdp/test_wrap.py::test_policies"),
    ("5.6", "summon", "fsdp/test_wrapper.py::test_summoned_parameters_are_whole_and_written_back"),
    (
        "5.6",
        "settings restored after an exception",
        "fsdp/test_state_dicts.py::test_settings_are_restored_and_checked",
    ),
    ("5.6", "scaler", "fsdp/test_training.py::test_ranks_skip_a_step_together"),
    ("5.7", "FULL", "fsdp/test_state_dicts.py::test_full_state_dicts_are_those_of_the_module"),
    ("5.7", "SHARDED", "fsdp/test_state_dicts.py::test_sharded_state_dicts_round_trip"),
    ("5.7", "LOCAL at other sizes", "fsdp/test_states_at_other_sizes.py::test_local_state"),
    (
        "5.8",
        "odd optimizers at other sizes",
        "fsdp/test_states_at_other_sizes.py::test_training_goes_on",
    ),
    (
        "5.8",
        "one rank has it",
        "fsdp/test_optimizer_cases.py::test_one_rank_of_a_group_has_it_and_gives_it_to_the_others",
    ),
    ("5.9", "mixed precision", "fsdp/test_training.py::test_mixed_precision"),
    (
        "5.9",
        "full precision in eval",
        "fsdp/test_precision_and_offload.py::test_evaluation_may_be_in_full_precision",
    ),
    (
        "5.9",
        "offload",
        "fsdp/test_precision_and_offload.py::test_offload_on_a_cpu_trains_as_one_process",
    ),
    ("5.9", "meta", "fsdp/test_wrapper.py::test_meta_modules_are_materialised"),
    ("5.9", "ignored", "fsdp/test_wrapper.py::test_ignored_parameters_are_left_alone"),
    (
        "6",
        "every method",
        "data_parallel/test_sharded_methods.py::test_methods_of_a_sharded_module",
    ),
    (
        "6",
        "meshes and blocks, exact collectives",
        "data_parallel/test_sharded_collectives.py::test_collectives_one_by_one",
    ),
    ("6", "methods gather", "data_parallel/test_sharded.py::test_methods_gather_too"),
    ("7.1", "contract", "data_parallel/test_replicated.py::test_contract"),
    ("7.1", "exact collectives", "data_parallel/test_replicated.py::test_exact_collectives"),
    (
        "7.3",
        "options have effects",
        "data_parallel/test_options.py::test_each_option_has_its_effect",
    ),
    ("7.3", "uneven inputs", "data_parallel/test_join.py::test_uneven_inputs"),
    ("7.3", "uneven inputs, sharded", "data_parallel/test_sharded_join.py::test_uneven_inputs"),
    (
        "7.3",
        "hooks against formulas",
        "data_parallel/test_comm_hooks.py::test_hook_does_what_its_formula_says",
    ),
    ("7.3", "beside torch", "data_parallel/test_conformance.py::test_beside_torch"),
    (
        "11.7",
        "no DTensor operator in a step",
        "data_parallel/test_sharded.py::test_no_dtensor_operator_runs_in_a_step",
    ),
    ("11.9", "memory", "data_parallel/test_unit_memory.py::test_memory_of_a_step"),
    ("lifted", "no accelerator, no device_id", "fsdp/test_exec_order.py::test_train_eval"),
    (
        "lifted",
        "sync_module_states on a CPU",
        "fsdp/test_hybrid_shard.py::test_hsdp_sync_module_state",
    ),
    ("lifted", "hooks in hybrid strategies", "fsdp/test_wrapper.py::test_a_hook_reduces_gradients"),
    (
        "lifted",
        "shared over units, facade",
        "fsdp/test_wrap.py::test_shared_modules_are_wrapped_once",
    ),
    (
        "lifted",
        "shared over units, mixed dtypes",
        "data_parallel/test_sharded_errors.py::test_what_is_not_refused",
    ),
    (
        "lifted",
        "shared parameters are changed",
        "fsdp/test_wrapper.py::test_shared_parameters_may_be_changed",
    ),
    (
        "2",
        "an optimizer built before sharding",
        "data_parallel/test_one_rank_raises.py::test_an_optimizer_of_what_the_module_had_before",
    ),
    (
        "lifted",
        "some ranks have no gradient",
        "fsdp/test_wrapper.py::test_gradients_that_no_rank_has_are_none",
    ),
    (
        "lifted",
        "a comm hook on bf16",
        "data_parallel/test_comm_hooks.py::test_hook_of_replicate_waits_for_set_up",
    ),
    (
        "pain C1",
        "unused parameters without a flag",
        "data_parallel/test_reducer.py::test_parameters_unused_on_some_ranks",
    ),
    (
        "pain C2",
        "k forwards, recomputed",
        "data_parallel/test_reducer.py::test_activation_checkpoints",
    ),
    ("pain C4", "None or zeros", "data_parallel/test_options.py::test_each_option_has_its_effect"),
    (
        "pain D1",
        "any sharing graph",
        "data_parallel/test_sharded.py::test_a_parameter_shared_between_units_moves_up",
    ),
    (
        "pain D2",
        "frozen and trainable mixed",
        "data_parallel/test_sharded_cases.py::test_dtypes_and_frozen_parameters_mix",
    ),
    (
        "pain D5",
        "methods other than forward",
        "data_parallel/test_sharded.py::test_methods_gather_too",
    ),
    (
        "pain D7",
        "several forwards",
        "data_parallel/test_sharded.py::test_several_forwards_before_a_backward",
    ),
    (
        "pain D10",
        "from the meta device",
        "data_parallel/test_sharded.py::test_parameters_from_the_meta_device",
    ),
    ("pain D11", "recomputed", "data_parallel/test_sharded.py::test_recomputed_activations"),
)


@cache
def read(file: str) -> tuple[str, frozenset[str]]:
    """A test file as one line without the seams of strings, and the names of its functions."""
    text = (HERE / file).read_text(encoding="utf-8")
    names = frozenset(n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    seamless = re.sub(r'"\s*\n\s*f?r?"', "", text).replace("\\", "")
    return re.sub(r"\s+", " ", seamless), names


@pytest.mark.parametrize("test", sorted({key[1] for key in TEXTS} | {row[2] for row in BEHAVIOURS}))
def test_what_a_row_names_is_there(test: str) -> None:
    file, name = test.split("::")
    text, names = read(file)
    assert name in names
    for (_, shown_by), fragments in TEXTS.items():
        if shown_by == test:
            assert [fragment for fragment in fragments if fragment not in text] == []
