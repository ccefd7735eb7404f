"""Models of Hugging Face under every layout and wrapper give what one process gives.

Each case is a cell of the table in `docs/models.md`. Each rank imports their package, so all but a
few are slow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import parallelize
from meshwright.comm import communicator
from meshwright.data_parallel import (
    DistributedDataParallel,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
)
from meshwright.errors import PlanError
from meshwright.fsdp import FullyShardedDataParallel, ModuleWrapPolicy
from meshwright.pipelining import ScheduleGPipe, SplitPoint, pipeline
from meshwright.plan import PipelinePlan, Plan, TensorPlan, TrainPlan
from meshwright.testing import Ranks, Sample, assert_same_training, wrapped
from parity.models import GENERATES, PAGE, cells, lacks, table
from support.hugging_face import KINDS, blocks_of, model_of, sample_of
from support.internals.axes import Axes
from support.internals.composition import RULES, ModelCut, cut_model
from support.internals.reference import train_reference
from support.internals.testing import momentum

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
transformers = pytest.importorskip("transformers")

ROWS, NEW = 8, 5
CPU = torch.device("cpu")
Generate = Callable[..., Any]
TRAINED = cells(generates=False)


def test_the_page_shows_what_is_run() -> None:
    assert f"\n\n{table()}\n" in PAGE.read_text(encoding="utf-8"), table()


@pytest.mark.parametrize("name", KINDS)
def test_a_cell_is_left_out_for_what_the_model_lacks(name: str) -> None:
    kind = KINDS[name]
    made = getattr(transformers, kind.model)
    assert kind.writes is hasattr(made, "generate")
    assert kind.rules in RULES or made.config_class.model_type not in RULES


# ---------------------------------------------------------------------------------- training


def plan_of(**settings: object) -> Plan:
    return Plan(train=TrainPlan(clip_norm=0.5), **settings)  # pyrefly: ignore[bad-argument-type]


def sharded(name: str, model: nn.Module) -> nn.Module:
    for block in blocks_of(name, model):
        fully_shard(model.get_submodule(block))
    numbers = {parameter for parameter in model.parameters() if not parameter.dim()}
    return fully_shard(model, ignored_params=numbers)


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return model_of(name).double()


def example_of(sample: Sample) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    batch, target = sample.example_batch(ROWS, torch.Generator().manual_seed(0))
    assert isinstance(batch, dict)
    return batch, target.double()


def doubled(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v.double() if v.is_floating_point() else v for k, v in values.items()}


def body_pipeline(name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the microbatches, and gradients of this rank by first names in the model."""
    world, sample, model = communicator(), sample_of(name), built(name)
    batch, target = example_of(sample)
    batch = doubled(batch)
    names: dict[int, str] = {}
    first = {
        each: names.setdefault(id(parameter), each)
        for each, parameter in model.named_parameters(remove_duplicate=False)
    }
    blocks = blocks_of(name, model)
    half = {key: value[: ROWS // 2] for key, value in batch.items()}
    pipe = pipeline(model, (), half, split_spec={blocks[2]: SplitPoint.BEGINNING})
    stage = pipe.build_stage(world.rank, CPU)
    losses: list[torch.Tensor] = []
    schedule = ScheduleGPipe(stage, 2, loss_fn=sample.loss)
    ends = {"target": target, "losses": losses} if stage.is_last else {}
    schedule.step(return_outputs=False, **ends, **batch)
    named = stage.submod.named_parameters()
    found = {first[each]: p.grad for each, p in named if p.grad is not None}
    return [loss.item() for loss in losses], found


def check_pipeline(ranks: Ranks, name: str) -> None:
    sample = sample_of(name)
    expected = train_reference(
        built(name), [example_of(sample)], optimizer=momentum, loss=sample.loss
    )
    (_, early), (losses, late) = ranks(2, body_pipeline, name, timeout=200)
    assert sum(losses) / 2 == pytest.approx(expected.losses[0], rel=KINDS[name].tolerance)
    assert early.keys() | late.keys() == expected.gradients[0].keys()
    tolerance = KINDS[name].tolerance
    largest = max(gradient.abs().max().item() for gradient in expected.gradients[0].values())
    for found in (early, late):
        assert found
        for each, gradient in found.items():
            wanted = expected.gradients[0][each]
            torch.testing.assert_close(gradient, wanted, rtol=tolerance, atol=tolerance * largest)


@pytest.mark.few(1, slow=10)
@pytest.mark.parametrize(("name", "column"), TRAINED, ids=map("-".join, TRAINED))
def test_trains_as_one_process(ranks: Ranks, name: str, column: str) -> None:
    if column == "pipeline":
        check_pipeline(ranks, name)
        return
    layout = {
        "plan, pipeline": plan_of(
            axes=Axes.of({"pipeline": 2}), pipeline=PipelinePlan(schedule="1f1b", microbatches=2)
        ),
        "plan, tensor": plan_of(
            axes=Axes.of({"tensor": 2}), tensor=TensorPlan(rules=KINDS[name].rules)
        ),
        "fully_shard": wrapped(lambda model: sharded(name, model)),
    }[column]
    assert_same_training(
        sample_of(name),
        layout,
        world=2,
        steps=2,
        batch_size=ROWS,
        clip_norm=0.5,
        tolerance=KINDS[name].tolerance,
        ranks=partial(ranks, timeout=200),
    )


def test_a_module_that_no_graph_can_have_is_named() -> None:
    model = model_of("Mixtral")
    model.set_experts_implementation("eager")  # a loop over the experts that were chosen
    tensor = ModelCut(styles={}, widths={}, ranks=1)
    with pytest.raises(PlanError, match=r"in module 'model\.layers\.0\.mlp\.experts'"):
        cut_model(model, PipelinePlan(microbatches=2), 2, prompt_of("Mixtral", 0), tensor=tensor)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", "T5"])
def test_a_cache_that_stages_would_have_to_send_is_refused_with_its_mend(name: str) -> None:
    model = model_of(name, use_cache=True)  # as transformers has it by itself
    words = r"found a transformers\.cache_utils\.\w*Cache, .* make or load it with use_cache=False"
    tensor = ModelCut(styles={}, widths={}, ranks=1)
    example, _ = sample_of(name).example_batch(2, torch.Generator())
    with pytest.raises(PlanError, match=words) as refused:
        cut_model(model, PipelinePlan(microbatches=2), 2, example, tensor=tensor)
    assert f"expected {type(model).__name__} to return tensors" in str(refused.value)
    with pytest.raises(RuntimeError, match=words):
        pipeline(model, (), {**example})


# -------------------------------------------------------------------------------- generation


def prompt_of(name: str, share: int) -> dict[str, torch.Tensor]:
    batch = KINDS[name].inputs(2, torch.Generator().manual_seed(share))
    return doubled({key: batch[key] for key in ("input_ids", "input_features") if key in batch})


def written(name: str, generate: Generate, share: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids, and the logits of each new word, by which models are told apart."""
    found = generate(
        **prompt_of(name, share),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        use_cache=True,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found["sequences"], torch.stack(found["logits"])


def wrapper_of(name: str, model: nn.Module, **options: object) -> FullyShardedDataParallel:
    blocks = {type(model.get_submodule(block)) for block in blocks_of(name, model)}
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(blocks),
        **options,  # pyrefly: ignore[bad-argument-type]
    )


@contextlib.contextmanager
def generating(name: str, wrapper: str) -> Iterator[Generate]:
    """Make the ``generate`` of a wrapped model."""
    model = built(name).eval()
    if wrapper == "replicate":
        yield replicate(model).generate
    elif wrapper == "DistributedDataParallel":
        yield DistributedDataParallel(model).module.generate
    elif wrapper == "fully_shard":
        sharded(name, model)
        register_fsdp_forward_method(model, "generate")
        yield model.generate
    elif wrapper == "FullyShardedDataParallel":
        # Flat parameters do not mix frozen and others, of which Whisper has both.
        is_mixed = len({parameter.requires_grad for parameter in model.parameters()}) > 1
        outer = wrapper_of(name, model, use_orig_params=is_mixed)
        register_fsdp_forward_method(outer, "generate")
        yield outer.generate
    elif wrapper.startswith("summoned"):
        outer = wrapper_of(name, model, use_orig_params=True)
        recurse = wrapper == "summoned"
        with FullyShardedDataParallel.summon_full_params(outer, recurse, writeback=False):
            yield outer.generate
    else:
        plan = plan_of(axes=Axes.of({"tensor": 2}), tensor=TensorPlan(rules=KINDS[name].rules))
        sample = sample_of(name)
        example = doubled(example_of(sample)[0])
        trainable = parallelize(model, plan, optimizer=None, loss=sample.loss, example=example)
        yield trainable.module.generate


def body_generation(name: str, expected: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Under each wrapper the words of the plain model."""
    for wrapper in GENERATES:
        if lacks(name, wrapper, generates=True):
            continue
        share = 0 if wrapper == "plan, tensor" else communicator().rank
        try:
            with generating(name, wrapper) as generate:
                ids, logits = written(name, generate, share)
            assert torch.equal(ids, expected[share][0])
            torch.testing.assert_close(logits, expected[share][1])
        except Exception as error:
            error.add_note(f"generate() of {name} under {wrapper}")
            raise


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.writes])
def test_generates_the_words_of_the_plain_model(ranks: Ranks, name: str) -> None:
    plain = built(name).eval()
    expected = [written(name, plain.generate, share) for share in range(2)]
    assert not torch.allclose(expected[0][1], expected[1][1])
    ranks(2, body_generation, name, expected, timeout=200)
