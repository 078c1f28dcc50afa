"""The predictor within a `DeviceStep`: the trunk by torch, the routing head by the `expert_predictor` op, down to bit sets.

Reads what `Predictor` reads, from the same folder, and gives its sets, up to ties within the rounding of a sum (onnxruntime
adds in another order). Fixed shapes, no wait for the device.

Legend of shapes: N rows (root first, then the pool's nodes), H target width, d drafter width, L MoE layers, E experts, W width
of the trunk, w int32 words of a set of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ecospec_kernels import dispatch
from ecospec_kernels.predict_pool.inputs import LOG_P_FLOOR, SCALAR_UNIT, SCALARS
from ecospec_kernels.predict_pool.reference import recorded
from ecospec_runtime.errors import UserError
from ecospec_runtime.predictor import WEIGHTS_FILE, PredictorManifest, PredictorShapes, same_drafter

if TYPE_CHECKING:
    from ecospec_runtime.drafters.base import Drafter
    from ecospec_runtime.drafters.eagle3_device import Drafted
    from ecospec_runtime.target import Target


class RoutingNetwork(nn.Module):
    """The routing half of a predictor: a two-layer trunk with a linear path around it, and a linear head."""

    def __init__(self, shapes: PredictorShapes, width: int):
        super().__init__()
        self.shapes = shapes
        self.inputs = nn.Linear(2 * shapes.hidden + shapes.state + SCALARS, width)
        self.middle = nn.Linear(width, width)
        self.routing = nn.Linear(width, shapes.layers * shapes.experts)

    def normalised(self, embedding_NH: Tensor, parent_NH: Tensor, state_Nd: Tensor, scalars_N4: Tensor) -> list[Tensor]:
        """The inputs as both halves want them."""
        wide = [F.layer_norm(x, x.shape[-1:]) for x in (embedding_NH, parent_NH, state_Nd)]
        return [*wide, scalars_N4 / SCALAR_UNIT]

    def trunk(self, normalised: list[Tensor]) -> Tensor:
        """What the head reads, `[N, W]`."""
        x_NW: Tensor = self.inputs(torch.cat(normalised, -1))
        return x_NW + F.silu(self.middle(F.silu(x_NW)))  # the linear path helps rare tokens


class DevicePredictor:
    """The `Predict` of a `DeviceEagle3`."""

    def __init__(self, network: RoutingNetwork, embed: Callable[[Tensor], Tensor], shrinkage: float = 0.0):
        """`embed` maps tokens `[N]` to the target's embeddings `[N, H]`; network and embeddings lie on one device."""
        shapes = network.shapes
        self.network, self.embed, self.top_k, self.shrinkage = network, embed, shapes.top_k, shrinkage
        self.bias_LE = network.routing.bias.detach().view(shapes.layers, shapes.experts)
        self.head_LEW = network.routing.weight.detach().view(*self.bias_LE.shape, -1)

    @classmethod
    def load(cls, folder: Path, manifest: PredictorManifest, target: Target, drafter: Drafter) -> DevicePredictor:
        """Load the weights of a bundle or predictor folder, whose manifest is given, onto the target's device.

        UserError if they are damaged or were made for other models.
        """
        path = folder / WEIGHTS_FILE
        same_drafter(drafter.fingerprint, "this step", manifest, folder)
        made, shapes = manifest.shapes, (target.hidden_size, drafter.width, target.moe_layers, target.experts)
        if shapes != (made.hidden, made.state, made.layers, made.experts):
            raise UserError(f"{folder}: made for {made}, not for hidden, state, layers and experts {shapes}: fit one")
        try:
            weights = {k: v for k, v in load_file(path).items() if not k.startswith("acceptance.")}
            network = RoutingNetwork(made, len(weights["middle.bias"]))
            network.load_state_dict(weights)
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:120]
            raise UserError(
                f"{path}: not the weights of a predictor ({reason}); run `ecospec-train fit` again"
            ) from error
        embed = target.model.get_input_embeddings()
        return cls(network.float().to(target.device).requires_grad_(False), embed, manifest.shrinkage)

    def __call__(self, root: Tensor, tree: Drafted) -> tuple[Tensor, Tensor]:
        """Experts of the nodes `[N - 1, L, w]` and of the root `[L, w]`."""
        embedding_NH = recorded(self.embed(torch.cat((root, tree.tokens))))
        parent_NH = F.pad(embedding_NH[tree.parents + 1], (0, 0, 1, 0))
        state_Nd = recorded(tree.states[F.pad(tree.state_rows, (1, 0))])
        hidden_NW = self.network.trunk(self.network.normalised(embedding_NH, parent_NH, state_Nd, scalars(tree)))
        masks = dispatch.expert_predictor(hidden_NW, self.head_LEW, self.bias_LE, self.top_k, self.shrinkage)
        return masks[1:], masks[0]


def scalars(tree: Drafted) -> Tensor:
    """`scalars_of` on the device."""
    log_p, rank, depth = (F.pad(column.float(), (1, 0)) for column in (tree.log_probs, tree.ranks, tree.depths))
    entropy = tree.entropies[F.pad(tree.state_rows, (1, 0))]
    finite = [x.nan_to_num(0.0, 0.0, LOG_P_FLOOR) for x in (log_p, rank, depth, entropy)]
    return torch.stack([finite[0].clamp(min=LOG_P_FLOOR), *finite[1:]], dim=1)
