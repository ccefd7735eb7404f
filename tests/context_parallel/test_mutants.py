"""Faults that other libraries have had with split sequences, each planted: a test sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from context_parallel import test_heads as of_heads
from context_parallel import test_own_loop as of_loops
from context_parallel import test_ring as of_ring
from context_parallel import test_trainable as of_plans
from meshwright.gradients import LossWindow
from meshwright.testing import Ranks
from support.internals.composition import WholeRun, context_rules, trainable
from support.internals.context_parallel import MaskWords, attention, heads, own_loop, ring
from support.mutants import Mutant, Patch, changed, parameters, said_of

Tensor = torch.Tensor


def of_hugging_face(folder: str, method: str, kind: str = "whole") -> Callable[[Any], None]:
    """A model of transformers, which is imported by those that run it alone."""

    def test(ranks: Any) -> None:
        from context_parallel import test_plans

        test_plans.check(ranks, folder, {"context": 2}, test_plans.METHODS[method], kind)

    return test


def of_positions(ranks: Any) -> None:
    from context_parallel import test_plans

    test_plans.test_positions_that_a_model_counts_itself_are_refused(ranks)


def in_new_plans(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """Have the ring plan each attention anew."""

    def both(patch: Patch) -> None:
        plant(patch)
        patch.setattr(ring, "_plan", ring._plan.__wrapped__)

    return both


# --------------------------------------------------------------------------------- the faults


def stale(real: Any, own: Any, step: int, pair: Any, direction: str) -> Any:
    """The backward computes with the keys of the first step."""
    arriving = real(own, step, pair, direction)

    def wait() -> Any:
        pairs = arriving()
        for group, arrived in zip(own.plan, pairs, strict=True):
            for x, mine in zip(arrived, pair, strict=True):
                at = torch.arange(x.shape[2]) % mine.shape[2]
                if direction == "backward":
                    x.copy_(mine[group.rows].index_select(2, at))
        return pairs

    return wait


def lost(real: Any, own: Any, *given: Any) -> Any:
    """Gradients of keys do not come back to their owners."""
    arriving = real(own, *given)

    def wait() -> Any:
        pairs = arriving()
        if given[-1].endswith("gradients"):
            for x in (x for pair in pairs for x in pair):
                x.zero_()
        return pairs

    return wait


def along_rows(real: Any, x: Tensor, count: int, size: int) -> Tensor:
    """Messages have rows where the others read positions."""
    found = real(x, count, size)
    return found.transpose(1, 2).reshape(found.shape)


def along_another(real: Any, x: Tensor, axis: Any, label: str, dim: int, total: int) -> Tensor:
    whole = real(x, axis, label, 0, len(x) * axis.size)
    shape = [*x.shape]
    shape[dim] = total
    return whole.reshape(shape)


def of_another(real: Any, x: Tensor, count: int) -> Tensor:
    """Heads are taken for those of the next rank."""
    return real(x.roll(1, 0), count)


def of_one_document(real: Any, places: Tensor) -> list[list[int]]:
    return [[places.shape[1]]] * len(places)


def across(real: Any, words: MaskWords, queries: Tensor, begins: Tensor, ends: Tensor) -> Any:
    return real(words, queries, torch.zeros_like(begins), ends)


def without_window(real: Any, *given: Any) -> MaskWords | None:
    words = real(*given)
    return words if words is None else replace(words, window=None)


def by_index(real: Any, words: MaskWords, queries: Tensor, *given: Tensor) -> Any:
    return real(words, torch.arange(len(queries), device=queries.device), *given)


def counted_twice(real: Any, window: LossWindow, loss: Any, *given: Any) -> None:
    real(window, loss if loss.is_mean else replace(loss, count=2 * loss.count), *given)


def halved(real: Any, *given: Any) -> Any:
    return real(*given) / 2


def halved_loss(real: Any, local: Any, target: object, axis: Any) -> Any:
    found = real(local, target, axis)
    return replace(found, total=found.total / axis.size)


def without_blind(real: Any, *given: Any, forward: bool) -> Any:
    return real(*given, forward=forward)[0], None


def added_up(real: Any, out: Tensor, lse: Tensor, y: Tensor, its_lse: Tensor) -> None:
    """A mean of the parts' outputs, whatever weight they have."""
    before = out.clone()
    is_first = (lse == -torch.inf).unsqueeze(-1)
    real(out, lse, y, its_lse)
    out.copy_(torch.where(is_first, out, (before + y) / 2))


ring_numbers = partial(of_ring.test_ring_is_one_process, count=2)
head_numbers = partial(of_heads.test_heads_are_one_process, count=2)
loops = partial(
    of_loops.test_numbers_are_those_of_one_process, count=2, method="all-to-all", split="zigzag"
)
plans = partial(
    of_plans.test_trains_as_one_process,
    axes={"context": 2},
    loss=of_plans.counted,
    length=13,
    context={},
    train={},
)
REFUSED = "the model's outputs differ on the example, first in"
MUTANTS = {
    "stale_kv": Mutant(
        plant=changed(ring._Ring, "_send_keys", stale),
        seen_by=ring_numbers,
        sees="AssertionError: q of documents",
    ),
    "dkv_not_returned": Mutant(
        plant=changed(ring._Ring, "_exchange", lost),
        seen_by=ring_numbers,
        sees="AssertionError: k of documents",
    ),
    "gather_dim": Mutant(
        plant=changed(heads, "_by_rank", along_rows),
        seen_by=head_numbers,
        sees="AssertionError: output of documents",
    ),
    "gather_dim, unshard": Mutant(
        plant=changed(own_loop, "gathered", along_another), seen_by=loops
    ),
    "placement": Mutant(
        plant=changed(heads, "_all_heads", of_another),
        seen_by=head_numbers,
        sees="AssertionError: output of documents",
    ),
    "local_positions": Mutant(
        plant=changed(own_loop, "now_attending", lambda real: None), seen_by=loops
    ),
    "local_positions, plan": Mutant(
        plant=changed(own_loop, "now_attending", lambda real: None),
        seen_by=plans,
        sees=f"{REFUSED} 'layers.0.qkv'",
    ),
    "local_positions, Hugging Face": Mutant(
        plant=changed(attention.Attending, "check_positions", lambda real, *given: None),
        seen_by=of_positions,
        sees="DID NOT RAISE",
    ),
    "documents_leak": Mutant(
        plant=changed(own_loop, "document_lengths", of_one_document),
        seen_by=partial(of_loops.test_documents_are_kept_apart, method="all-to-all"),
        sees="AssertionError: tokens.weight: ",
    ),
    "documents_leak, ring": Mutant(
        plant=in_new_plans(changed(MaskWords, "seen_from", across)),
        seen_by=ring_numbers,
        sees="AssertionError: output of documents = ((13",
    ),
    "documents_leak, plan": Mutant(
        plant=changed(context_rules, "document_lengths", of_one_document),
        seen_by=of_hugging_face("qwen3", "ring", "packed"),
        sees="position_ids begin anew where the split knows no document",
    ),
    "mask_dropped": Mutant(
        plant=changed(attention, "words_of", without_window),
        seen_by=of_hugging_face("mistral", "ring"),
        sees=f"{REFUSED} 'model.layers.0.self_attn",
    ),
    "mask_dropped, heads": Mutant(
        plant=changed(attention, "words_of", without_window),
        seen_by=of_hugging_face("mistral", "all-to-all"),
        sees=f"{REFUSED} 'model.layers.0.self_attn",
    ),
    "head_tail_mask": Mutant(
        plant=in_new_plans(changed(MaskWords, "seen_from", by_index)),
        seen_by=ring_numbers,
        sees="AssertionError: output of documents",
    ),
    "head_tail_mask, heads": Mutant(
        plant=changed(heads, "_orders", lambda real, *given: None),
        seen_by=head_numbers,
        sees="AssertionError: output of documents",
    ),
    "tokens_counted_twice": Mutant(
        plant=changed(LossWindow, "add", counted_twice), seen_by=plans, sees="kind='loss'"
    ),
    "loss_by_context": Mutant(
        plant=changed(of_loops, "global_mean", halved),
        seen_by=loops,
        sees="AssertionError: tokens.weight: ",
    ),
    "loss_by_context, gradient": Mutant(
        plant=changed(LossWindow, "factor", halved), seen_by=plans, sees="kind='gradient'"
    ),
    "loss_by_context, evaluation": Mutant(
        plant=changed(trainable, "over_parts", halved_loss), seen_by=plans
    ),
    "shift_after_split": Mutant(
        plant=lambda patch: patch.setattr(context_rules, "LABELS", "no key"),
        seen_by=of_plans.test_batches_that_cannot_be_split_are_refused,
        sees="got an unexpected keyword argument 'labels'",
    ),
    "state_space": Mutant(
        plant=changed(WholeRun, "compare", lambda real, *given: None),
        seen_by=partial(
            of_plans.test_layers_that_mix_positions_are_refused_by_name,
            make=of_plans.Mixing,
            match="mixes positions without attention",
        ),
        sees="DID NOT RAISE",
    ),
    "ring_lse_lost": Mutant(
        plant=changed(ring._Part, "bias", without_blind),
        seen_by=ring_numbers,
        sees="AssertionError: output of documents",
    ),
    "ring_lse_lost, everywhere": Mutant(
        plant=changed(ring, "_merge", added_up),
        seen_by=ring_numbers,
        sees="AssertionError: output of documents",
    ),
}
QUICK = (*("stale_kv", "documents_leak", "loss_by_context, gradient", "ring_lse_lost"),)


def body_planted(name: str) -> str:
    return said_of(MUTANTS[name])


@pytest.mark.devices("host", reason="what sees a fault is itself run on devices")
@pytest.mark.parametrize("name", parameters(MUTANTS, QUICK))
def test_a_fault_is_seen(ranks: Ranks, name: str) -> None:
    mutant = MUTANTS[name]
    said = ranks(mutant.size, body_planted, name, timeout=200)
    assert any(mutant.sees in text for text in said), "\n".join(said)
