"""`ExpertParallel`: the style that splits a module of experts over an axis."""

from __future__ import annotations

from torch import nn

from meshwright.comm import Communicator
from meshwright.comm.dtensors.exchanging import exchange_over
from meshwright.expert_parallel.forms import check_keeps_all, checked_form
from meshwright.expert_parallel.layer import Exchange, ExpertLayer, ExpertSettings
from meshwright.expert_parallel.routing import record_routers
from meshwright.layout import Shard
from meshwright.mesh import DeviceMesh
from meshwright.tensor_parallel import ParallelStyle
from meshwright.tensor_parallel.layouts import Site
from meshwright.tensor_parallel.styles import distribute, guard_loading, shown


class ExpertParallel(ParallelStyle):
    """Splits the experts of a module over ranks, each of which has tokens of its own.

    The module is one of Hugging Face (``use_experts_implementation``), torchtitan's
    ``GroupedExperts``, or one that `experts` has marked. Its parameters are ``Shard(0)``; as many
    experts as ranks, or a multiple, are not needed. Outputs are those of one process with all
    tokens. A gradient of experts is the sum over the ranks of the axis; that of any other parameter
    is this rank's.

    ``exchange="tokens"``: a token travels once to each rank that has some of its experts, which
    adds up what they return. ``"pairs"``: it travels to each of its experts alone and is added up
    at home, which takes more bytes and gives the bits of one process.
    ``tensor_mesh``: ranks that have the same tokens and experts, as tensor parallelism has them.
    Each of them then computes a slice of the tokens; without it, all of them.
    ``own_auxiliary``: accept a Hugging Face model with ``output_router_logits``, whose auxiliary
    loss is of each rank's tokens alone.

    Raises ValueError for a module that is not known to hold experts or that drops tokens.
    """

    def __init__(
        self,
        *,
        exchange: Exchange = "tokens",
        tensor_mesh: DeviceMesh | None = None,
        own_auxiliary: bool = False,
    ) -> None:
        if exchange not in ("tokens", "pairs"):
            raise ValueError(f'expected exchange "tokens" or "pairs", found {exchange!r}')
        self.exchange: Exchange = exchange
        self.tensor_mesh = tensor_mesh
        self.own_auxiliary = own_auxiliary

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        site = self.site_of(module, device_mesh)
        form, number = checked_form(module, site.labels.name, site.axis.axis)
        for key in module._parameters:
            distribute(module, key, Shard(0), site, self.src_data_rank)
        guard_loading(module)
        exchange_over(module, device_mesh)
        slices = None
        # The gradient of a norm inside of the experts is not summed over slices.
        if self.tensor_mesh is not None and len([*module.parameters()]) == len(module._parameters):
            slices = self.site_of(module, self.tensor_mesh).axis
            _check_slices(site, slices)
        vars(module)["_meshwright_style"] = ExpertSettings(
            site, form, number, self.exchange, self.own_auxiliary, slices
        )
        own = type(module)
        module.__class__ = type(own.__name__, (ExpertLayer, own), {"__module__": own.__module__})
        return module

    def finish(self, root: nn.Module) -> None:
        """Have routers of models below ``root`` keep their logits, for `auxiliary_loss`.

        Raises ValueError where what is beside the experts, or their block, drops tokens.
        """
        for path, part in list(root.named_modules()):
            if path and isinstance(part, ExpertLayer):
                above = path.rpartition(".")[0]
                block, axis = root.get_submodule(above), part._meshwright_style.site.axis.axis
                check_keeps_all(block, above or type(root).__name__, axis)
                for key, beside in block.named_children():
                    check_keeps_all(beside, f"{above}.{key}".lstrip("."), axis)
        record_routers(root)

    def __repr__(self) -> str:
        return shown(self, "exchange", "tensor_mesh", "own_auxiliary")


def _check_slices(site: Site, slices: Communicator) -> None:
    """Raise ValueError for ``slices`` that have ranks of the exchange, beside this one."""
    if shared := {*slices.ranks} & {*site.axis.ranks} - {slices.ranks[slices.rank]}:
        raise ValueError(
            f"axis {site.axis.axis}: '{site.labels.name}' got a tensor_mesh whose ranks "
            f"{list(slices.ranks)} have the same tokens; ranks {sorted(shared)} of them hold other "
            "experts, and have tokens of their own. Give the mesh of tensor parallelism, or none"
        )
