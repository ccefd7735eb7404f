"""A model of transformers that receives weights generates what the trainer's model would."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from meshwright.comm import communicator
from meshwright.composition import parallelize
from meshwright.plan import Plan, TensorPlan
from meshwright.testing import Ranks
from meshwright.transfer import Publisher, Receiver
from support.hugging_face import GROUPED
from support.internals.axes import Axes

pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.slow,  # each rank imports their package
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

IDS = torch.arange(48).view(8, 6) % 31


def llama(seed: int, *, tied: bool) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(**{**GROUPED, "use_cache": True}, tie_word_embeddings=tied)
    config.pad_token_id = config.eos_token_id = None
    return LlamaForCausalLM(config)


def generated(model: torch.nn.Module) -> list[list[int]]:
    model.eval()
    return model.generate(IDS[:2], max_new_tokens=12, do_sample=False).tolist()


def loss_of(output: object, target: torch.Tensor) -> torch.Tensor:
    logits = output.logits if hasattr(output, "logits") else output
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("axes", [{"shard": 2}, {"tensor": 2}], ids=str)
def test_the_receiver_generates_the_same_tokens(
    ranks: Ranks, axes: dict[str, int], tied: bool
) -> None:
    def train(group: dist.ProcessGroup) -> list[list[list[int]]]:
        rules = TensorPlan(rules="llama" if "tensor" in axes else None)
        trainable = parallelize(
            llama(0, tied=tied),
            Plan(axes=Axes.of(axes), tensor=rules),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
            loss=loss_of,
            example={"input_ids": IDS},
            group=group,
        )
        publisher = Publisher(trainable)
        found: list[list[list[int]]] = []
        size, rank = trainable.data_size, trainable.data_rank
        for version in range(3):
            for _ in range(3):
                ids = IDS.chunk(size)[rank]
                trainable.step({"input_ids": ids}, ids.roll(-1, 1))
            publisher.publish(version)
            plain = llama(1, tied=tied)
            plain.load_state_dict(trainable.weights())
            found.append(generated(plain))
        return found

    def generate() -> list[list[list[int]]]:
        model = llama(2, tied=tied)
        receiver = Receiver(model)
        found: list[list[list[int]]] = []
        for version in range(3):
            receiver.receive(version)
            found.append(generated(model))
        return found

    def body() -> list[list[list[int]]]:
        group = dist.new_group([0, 1])
        return train(group) if communicator().rank < 2 else generate()

    *trained, received = ranks(3, body, timeout=300)
    assert trained[0] == trained[1] == received
    assert len({str(tokens) for tokens in received}) == 3
