"""Train the multi-token-prediction layer of a reference target, unrolled as it will draft.

    python -m pipelines.reference.mtp --corpus runs/reference/corpus --target runs/reference/deepseek-v3/target \
        --out runs/reference/deepseek-v3/model --minutes 20

The layer starts as a copy of the target's last one. Row j pairs the target's last hidden state (after the final norm) at
position j with token j + 1; step k feeds the layer its own normed states of step k - 1, on chains that start at sampled rows
and see the true rows up to there and themselves. Writes the target with this layer in its checkpoint under the names of
DeepSeek-V3 (`model.layers.<number of layers>.*`). Arguments and loss are those of `head.py`.

Shapes: B windows, T tokens, J = T - 1 rows, C chains, H hidden, V vocabulary, k steps so far.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_layers import MtpModel

from pipelines.reference.balance import BiasBalance
from pipelines.reference.head import DrafterModule, arguments, settings, train
from pipelines.reference.target import load_target, prepare, saved

NAMES = {"post_norm.": "shared_head.norm.", "mtp_block.": ""}  # transformers' prefixes to the published ones

TARGET_RECORD = "target-training.json"  # what the target's training wrote about itself; the layer's is training.json


def new_layer(target: Any) -> Any:
    """An MTP layer that starts as the target's last layer on the target's own state."""
    layer: Any = MtpModel(target, 1).layers[0]
    with torch.no_grad():
        layer.mtp_block.load_state_dict(target.model.layers[-1].state_dict())
        layer.post_norm.load_state_dict(target.model.norm.state_dict())
        width = layer.eh_proj.weight.size(0)
        layer.eh_proj.weight.copy_(torch.cat((torch.zeros(width, width), torch.eye(width)), dim=1))
    return layer


def published(layer: Any, index: int) -> dict[str, Tensor]:
    """The layer's weights in bf16 under the published names: one tensor per expert and projection."""
    out: dict[str, Tensor] = {}
    for name, value in layer.state_dict().items():
        for ours, theirs in NAMES.items():
            name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
        value = saved(name, value)
        prefix = f"model.layers.{index}.{name}"
        if not name.startswith("mlp.experts."):
            out[prefix] = value.contiguous()
            continue
        parts = {"down_proj": value}
        if name.endswith("gate_up_proj"):
            parts = dict(zip(("gate_proj", "up_proj"), value.chunk(2, dim=1), strict=True))
        for part, stacked in parts.items():
            for expert, matrix in enumerate(stacked.unbind()):
                out[f"model.layers.{index}.mlp.experts.{expert}.{part}.weight"] = matrix.contiguous()
    return out


def save_layer(layer: Any, target: Path, layers: int, out: Path) -> None:
    """Write the target's folder with the layer in its checkpoint."""
    out.mkdir(parents=True, exist_ok=True)
    for path in target.glob("*.json"):
        shutil.copyfile(path, out / (TARGET_RECORD if path.name == "training.json" else path.name))
    tensors = load_file(target / "model.safetensors") | published(layer, layers)
    temporary = out / "model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.rename(out / "model.safetensors")


class MtpModule(DrafterModule):
    """An MTP layer over the whole vocabulary."""

    def __init__(self, target: Any, layer: Any, **settings: Any):
        """`settings` are those of `DrafterModule`."""
        super().__init__(target, layer, **settings)
        self.bias = BiasBalance(layer)

    def losses(self, ids_BT: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See `DrafterModule.losses`."""
        target = self._frozen[0]
        with torch.no_grad():
            h_BTH = target.model(input_ids=ids_BT, use_cache=False).last_hidden_state
            probabilities = target.lm_head(h_BTH).softmax(-1)
        embed, rows, cache = target.model.embed_tokens(ids_BT), ids_BT.size(1) - 1, DynamicCache()
        state = self._step(embed[:, 1:], h_BTH[:, :-1], torch.arange(rows), None, cache)
        results = [self.compare(target.lm_head(state), probabilities[:, 1:])]
        starts = self.chain_starts(rows)
        state, own = state[:, starts], torch.eye(len(starts), dtype=torch.bool)
        seen = torch.arange(rows) <= starts[:, None]
        for k in range(1, self.steps + 1):
            seen = torch.cat((seen, own), dim=1)
            at = starts + k
            state = self._step(embed[:, at + 1], state, at, seen, cache)
            results.append(self.compare(target.lm_head(state), probabilities[:, at + 1]))
        return results

    def _step(self, embed: Tensor, h: Tensor, positions: Tensor, seen: Tensor | None, cache: DynamicCache) -> Tensor:
        """States `[B, rows, H]`; `seen` `[rows, rows in the cache and these]` says what each may look at, None a causal row."""
        mask = None if seen is None else torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)[None, None]
        rope = self._frozen[0].model.rotary_emb(embed, positions[None])
        out: Tensor = self.head(
            embed, h, position_embeddings=rope, attention_mask=mask, position_ids=positions[None], cache=cache
        )
        if torch.is_grad_enabled():
            self.bias.step()
        return out


def main() -> None:
    """Command line entry; see the module docstring."""
    parser: argparse.ArgumentParser = arguments(str(__doc__).split("\n")[0], minutes=20)
    args = parser.parse_args()
    if args.init:
        parser.error("--init: an MTP layer is trained in one run")
    prepare(args)
    target = load_target(args.target)
    if not getattr(target.config, "num_mtp_layers", 0):
        parser.error(f"--target: {type(target).__name__} has no multi-token-prediction layers")
    module = MtpModule(target, new_layer(target), **settings(args))
    layers = target.config.num_hidden_layers
    train(args, module, lambda module: save_layer(module.head, args.target, layers, args.out))


if __name__ == "__main__":
    main()
