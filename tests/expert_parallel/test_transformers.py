"""Unmodified models of Hugging Face, their experts split by the style in a loop of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.utils.checkpoint import checkpoint

from meshwright import comm
from meshwright.expert_parallel import counts_of
from meshwright.testing import Ranks, RanksFailed
from support.expert_parallel.hugging_face import (
    FIVE,
    check_gradients,
    close,
    import_folder,
    plain_and_split,
    share,
    tiny,
    trained,
    words,
)
from support.expert_parallel.wide import wide

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

LONG = 200
"""Seconds: the server of ranks imports a model's module first."""


@pytest.mark.few(2)
@pytest.mark.parametrize("folder", FIVE)
def test_a_model_trains_as_one_process(ranks: Ranks, folder: str) -> None:
    """Outputs, loss and the gradients of all parameters, whatever the config says of experts."""
    import_folder(folder)

    def body() -> None:
        one, many = plain_and_split(folder)
        ids = words()
        expected = trained(one, ids)
        assert many.get_experts_implementation()[""] != "eager"
        for _ in range(2):
            found = trained(many, share(ids), over=2)
            close(found, share(expected))
            check_gradients(one, many)
            many.zero_grad()
            many.set_experts_implementation("batched_mm")

    ranks(2, body, timeout=LONG)


# ------------------------------------------------------------------------- ways to run a model

slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers(ranks: Ranks, reentrant: bool) -> None:
    """Each token is counted once, though it travels twice."""
    import_folder("mixtral")

    def body() -> None:
        one, many = plain_and_split("mixtral")
        many.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for layer in many.model.layers:
            for part in layer.children():  # a backward pass leaves the mode
                part.forward = wide()(part.forward)
        ids = words()
        expected, found = trained(one, ids), trained(many, share(ids), over=2)
        close(found, share(expected))
        check_gradients(one, many)
        for counts in counts_of(many).values():
            assert int(counts.sum()) == 2 * ids.numel()

    ranks(2, body, timeout=LONG)


@slow
def test_compiled_with_graph_breaks_at_the_experts(ranks: Ranks) -> None:
    import_folder("mixtral")

    def body() -> None:
        one, many = plain_and_split("mixtral")
        compiled = torch.compile(many, backend="aot_eager")
        ids = words()
        expected = one(input_ids=ids, labels=ids)
        expected.loss.backward()
        for _ in range(2):
            many.zero_grad()
            found = compiled(input_ids=share(ids), labels=share(ids))
            (found.loss / 2).backward()
            # Casts to float32 are not widened here: graphs sum in another order.
            close(found.logits.detach(), share(expected.logits.detach()), by=1e-6)
            check_gradients(one, many, by=1e-6)

    ranks(2, body, timeout=2 * LONG)


@slow
def test_under_autocast(ranks: Ranks) -> None:
    import_folder("mixtral")

    def body() -> None:
        one, many = plain_and_split("mixtral", dtype=torch.float32)
        ids = words()
        with torch.autocast("cpu", torch.bfloat16):
            expected = one(input_ids=ids, labels=ids)
            found = many(input_ids=share(ids), labels=share(ids))
        expected.loss.backward()
        (found.loss / 2).backward()
        assert found.logits.dtype == expected.logits.dtype
        close(found.logits.detach().float(), share(expected.logits.detach().float()), by=0.02)
        check_gradients(one, many, by=0.05)

    ranks(2, body, timeout=LONG)


@slow
def test_generated_together(ranks: Ranks) -> None:
    """Each rank continues texts of its own; both take as many steps."""
    import_folder("mixtral")

    def body() -> None:
        one, many = plain_and_split("mixtral", use_cache=True)
        ids = share(words())
        how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
        expected, found = one.eval().generate(ids, **how), many.eval().generate(ids, **how)
        assert found.shape == (len(ids), ids.shape[1] + 5)
        assert torch.equal(found, expected)

    ranks(2, body, timeout=LONG)


@slow
def test_a_rank_that_generates_less_is_named(ranks: Ranks) -> None:
    import_folder("mixtral")

    def body() -> None:
        _, many = plain_and_split("mixtral", use_cache=True)
        length = 5 - comm.communicator().rank
        how = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": False}
        many.eval().generate(share(words()), **how)

    with pytest.raises(RanksFailed, match=r"experts counts.*rank 1 is done and leaves the run"):
        ranks(2, body, timeout=LONG)


@slow
@pytest.mark.parametrize("folder", ["mixtral", "gpt_oss"])
def test_states_have_the_models_names_and_load_from_folders_both_ways(
    ranks: Ranks, folder: str, tmp_path: Path
) -> None:
    import_folder(folder)

    def body() -> None:
        one, many = plain_and_split(folder)
        of_one, of_many = one.state_dict(), many.state_dict()
        assert {key: x.shape for key, x in of_many.items()} == {
            key: x.shape for key, x in of_one.items()
        }
        options = StateDictOptions(full_state_dict=True)
        whole = get_model_state_dict(many, options=options)
        if comm.communicator().rank == 0:
            many.save_pretrained(tmp_path, state_dict=whole)
        comm.communicator().barrier()
        again = type(one).from_pretrained(tmp_path, dtype=torch.float64)
        loaded = again.state_dict()
        assert loaded.keys() == of_one.keys()
        with torch.no_grad():
            for parameter in many.parameters():
                parameter.zero_()
        set_model_state_dict(many, dict(loaded), options=options)
        found = get_model_state_dict(many, options=options)
        for key, x in of_one.items():
            assert torch.equal(loaded[key], x), key
            assert torch.equal(found[key], x), key

    ranks(2, body, timeout=LONG)


# -------------------------------------------------------------------------- who gets no tokens


@slow
@pytest.mark.parametrize("without", [(3,), (2, 3)], ids=["an expert", "all of the second rank's"])
def test_experts_without_tokens(ranks: Ranks, without: tuple[int, ...]) -> None:
    """Their gradients are zeros, and everything else is as in one process."""
    import_folder("deepseek_v3")

    def body() -> None:
        one, many = plain_and_split("deepseek_v3")
        for model in (one, many):
            model.model.layers[1].mlp.gate.e_score_correction_bias[list(without)] = -9.0
        ids = words()
        expected, found = trained(one, ids), trained(many, share(ids), over=2)
        close(found, share(expected))
        check_gradients(one, many)
        (counts,) = counts_of(many).values()
        assert [e for e, count in enumerate(counts.tolist()) if not count] == list(without)

    ranks(2, body, timeout=LONG)


@slow
@pytest.mark.parametrize("recomputed", [None, "reentrant", "not reentrant"])
@pytest.mark.parametrize("folder", ["mixtral", "gpt_oss"])
def test_a_rank_without_tokens(ranks: Ranks, folder: str, recomputed: str | None) -> None:
    """In the block of experts: attention of these models takes no batch of zero rows."""
    import_folder(folder)

    def body() -> None:
        one, many = (model.model.layers[0].mlp for model in plain_and_split(folder))
        x = torch.randn(4, 3, 32, dtype=torch.float64)
        whole = x.clone().requires_grad_()
        mine = x.split([4, 0])[comm.communicator().rank].clone().requires_grad_()

        def computed(block: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
            with wide():
                found = block(given)
            return found[0] if isinstance(found, tuple) else found

        expected = computed(one, whole)
        if recomputed is None:
            found = computed(many, mine)
        else:
            reentrant = recomputed == "reentrant"
            found = checkpoint(computed, many, mine, use_reentrant=reentrant)
        expected.square().sum().backward()
        found.square().sum().backward()
        check_gradients(one, many)
        assert whole.grad is not None
        assert mine.grad is not None
        close(mine.grad, whole.grad[: len(mine)])

    ranks(2, body, timeout=LONG)


# ---------------------------------------------------------------------------------- refusals


@slow
@pytest.mark.parametrize("by", ["config", "argument"])
def test_an_auxiliary_loss_of_each_ranks_tokens_is_refused(ranks: Ranks, by: str) -> None:
    import_folder("mixtral")

    def body() -> None:
        many = plain_and_split("mixtral", output_router_logits=by == "config")[1]
        ids = share(words())
        more = {"output_router_logits": True} if by == "argument" else {}
        text = (
            r"^axis expert: the model returns an auxiliary loss of its own "
            r"\(output_router_logits=True\), computed from this rank's tokens\. Set it to False "
            r'and give \[expert\] auxiliary and balance = "global", or set balance = "rank"$'
        )
        with pytest.raises(ValueError, match=text):
            many(input_ids=ids, labels=ids, **more)
        if by == "argument":
            many(input_ids=ids, labels=ids)

    ranks(2, body, timeout=LONG)


def test_a_tiny_model_is_the_same_on_every_call() -> None:
    """Ranks build theirs by themselves."""
    one, two = (tiny("mixtral").state_dict() for _ in range(2))
    assert all(torch.equal(one[key], x) for key, x in two.items())
