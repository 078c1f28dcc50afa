"""The target: any transformers MoE, reached through the library's own seams.

Routing is read by hooks on the experts modules, auxiliary hidden states by hooks on the decoder layers; hooks exist only
while they are asked for. Legend of shapes: n tokens of a pass, P cached tokens, H hidden, V vocabulary, L MoE layers,
K top-k, A auxiliary layers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ecospec_runtime.cache import TargetCache, cache_argument
from ecospec_runtime.checkpoint import fingerprint, load_model, read_config, resolve_folder
from ecospec_runtime.compute import begins, install
from ecospec_runtime.errors import UserError, first_line
from ecospec_runtime.placement import DeviceMap, Placement, forward_parameters, hardware, input_device, parse_placement
from ecospec_runtime.selfcheck import check

_LENGTH_DEPENDENT = ("dynamic", "longrope")  # types of rotary embeddings
EMBEDDING_TABLE = 1 << 23  # elements that may be copied for quick host-side look-ups: 32 MB


@dataclass
class TargetOutput:
    """What one pass returns."""

    logits: Tensor | None  # float32 [n, V]; [1, V] for the last row if only that was asked for
    hidden: Tensor  # [n, H] after the final norm
    aux: Tensor | None  # [n, A*H] hidden states entering the asked layers, concatenated in the asked order
    routing_layers: list[Tensor]  # per MoE layer [n, K], in the router's order; empty if not asked for
    weight_layers: list[Tensor]  # the experts' weights, as long as `Target.knows_weights`

    @property
    def routing(self) -> Tensor | None:
        """Expert ids `[n, L, K]` the pass used, or None if not asked for."""
        return torch.stack(self.routing_layers, dim=1) if self.routing_layers else None

    @property
    def routing_by_weight(self) -> Tensor | None:
        """`routing` with the experts of a token and layer by falling weight where weights are known; routers need not sort."""
        if self.routing is None or len(self.weight_layers) < len(self.routing_layers):
            return self.routing
        weights = torch.stack([layer.to(self.routing.device) for layer in self.weight_layers], dim=1)
        return self.routing.gather(-1, weights.argsort(dim=-1, descending=True, stable=True))


class Target:
    """A loaded target model with its tokenizer. One pass at a time; see `forward` and `commit`."""

    role = "target"  # what messages call it
    needs_experts = True  # False: a dense model will do, with no experts to record

    def __init__(self, model: Any, tokenizer: Any, source: str, folder: Path):
        self.model, self.tokenizer, self.source, self.folder = model.eval(), tokenizer, source, folder
        self.config: Any = model.config.get_text_config()
        self.architecture = type(model).__name__
        self.device, self.hardware = input_device(model), hardware(model)
        self.dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self._decoder = _decoder(model)
        self._layers = _decoder_layers(self._decoder, source)
        moe = self.needs_experts
        self.expert_modules = _experts_modules(self._decoder, self.architecture, source) if moe else []
        self.moe_layers = len(self.expert_modules)
        self.experts = _one({m.num_experts for m in self.expert_modules}, "expert counts", source) if moe else 0
        self._cache_name = cache_argument(model)
        if not self._cache_name:
            raise UserError(f"target {source}: {self.architecture}.forward takes no cache; it is not supported")
        self._windows = _sliding_windows(self.config, source)
        self._armed: tuple[tuple[int, ...], bool] = ((), False)
        self._handles: list[Any] = []
        self._aux: dict[int, Tensor] = {}
        self._routing: list[Tensor] = []
        self._weights: list[Tensor] = []
        self.knows_weights = True  # each expert id comes with its weight; False once seen otherwise
        self._hidden: Tensor | None = None
        self._decoder.register_forward_hook(self._record_hidden)
        self.top_k = self._probe()

    @classmethod
    def from_pretrained(
        cls, id_or_folder: str | Path, dtype: str = "auto", device: str | Placement | None = None, *,
        device_map: DeviceMap | None = None, tp: int = 1,
    ) -> Target:  # fmt: skip
        """Load a local folder or hub id. `dtype`: float32, bfloat16, auto (as saved) or mxfp4. Raises UserError.

        `device` (default: cpu), `device_map` and `tp` say where to, or a `Placement` as `device`; see
        `ecospec_runtime.placement.parse_placement`.
        """
        source = str(id_or_folder)
        placement = device if isinstance(device, Placement) else parse_placement(device, device_map, tp)
        folder = resolve_folder(source, "target")
        _check_causal(read_config(folder, "target").get("model_type"), source)
        model = load_model(folder, source, dtype, placement)
        install(model)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"target {source}: no usable tokenizer ({first_line(error)})") from None
        if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):  # what transformers makes of no files at all
            raise UserError(
                f"target {source}: no tokenizer in this folder; copy tokenizer.json and its companions into it"
            )
        return cls(model, tokenizer, source, folder)

    @property
    def layers(self) -> int:
        """Number of decoder layers; also the auxiliary layer id that means "output of the last layer, before the norm"."""
        return len(self._layers)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the weights, or of the base weights for a widened folder; see `checkpoint.fingerprint`."""
        return fingerprint(self.folder)

    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of the generation config, else of the config, as in transformers' `generate`."""
        for holder in (getattr(self.model, "generation_config", None), self.config):
            ids = getattr(holder, "eos_token_id", None)
            if ids is not None:
                found = tuple(ids) if isinstance(ids, list | tuple) else (ids,)
                if not all(type(i) is int for i in found):
                    raise UserError(
                        f"{self.role} {self.source}: eos_token_id {ids!r} of its configuration is not a token id"
                    )
                return found
        return ()

    def new_cache(self) -> TargetCache:
        """An empty cache for one sequence."""
        return TargetCache()

    def embed(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Input embedding rows `[n, H]` of the given token ids."""
        with torch.inference_mode():
            ids = torch.as_tensor(tokens, device=self.device)
            return self.model.get_input_embeddings()(ids)

    def embed_host(self, tokens: NDArray[np.int64]) -> NDArray[np.float32]:
        """`embed` as float32 numpy, for the predictor: from a table made once where the vocabulary is small."""
        if self._embedding_table is not None:
            return self._embedding_table[tokens]
        return self.embed(torch.from_numpy(tokens)).float().numpy(force=True)

    @cached_property
    def _embedding_table(self) -> NDArray[np.float32] | None:
        weight = self.model.get_input_embeddings().weight
        return (
            self.embed(torch.arange(len(weight))).float().numpy(force=True)
            if weight.numel() <= EMBEDDING_TABLE
            else None
        )

    @torch.inference_mode()
    def forward(
        self, tokens_n: Tensor, positions_n: Tensor, mask: Tensor | None, cache: TargetCache, *,
        aux_layers: tuple[int, ...] = (), routing: bool = False, logits: bool = True, last_only: bool = False,
    ) -> TargetOutput:  # fmt: skip
        """One pass over n tokens after the P committed rows of `cache`, which grows by n.

        `mask` is bool `[n, P + n]`, True where a token may look; None is a causal chain. `aux_layers` names hidden
        states *entering* layers. `logits` False skips them; `last_only` computes those of the last row. Raises
        UserError if the target produced NaN or Inf, naming the layer.
        """
        self.arm(aux_layers, routing)
        past, n = len(cache), tokens_n.shape[0]
        self._routing, self._weights = [], []
        attention = None
        if mask is not None:
            attention = self.masks(mask, positions_n, torch.cat([torch.arange(past, device=mask.device), positions_n]))
        keep = 0 if logits and not last_only else 1
        output = self.run(tokens_n, positions_n, attention, cache.inner, keep)
        if len(cache) != past + n:
            raise UserError(
                f"{self.role} {self.source}: {self.architecture} did not fill the cache; it is not supported"
            )
        hidden = self.take_hidden()
        if not torch.isfinite(hidden.sum(dtype=torch.float32)):
            self._locate(tokens_n, positions_n, attention, cache, past)
        used, weights, self._routing, self._weights = self._routing, self._weights, [], []
        values = output.logits[0].float() if logits else None
        if values is not None and torch.isnan(values.sum()):
            raise UserError(
                f"{self.role} {self.source}: NaN in the logits; check the weights of the output matrix (lm_head) or load with "
                "--dtype float32"
            )
        return TargetOutput(values, hidden, self.aux_states(aux_layers), used, weights)

    def run(self, tokens_n: Tensor, positions_n: Tensor, attention: Any, cache: Any, keep: int = 0) -> Any:
        """The model's own output for n tokens, through a cache of transformers' kind. The host does not wait for it."""
        return self.model(
            input_ids=tokens_n[None], position_ids=positions_n[None], attention_mask=attention, use_cache=True,
            logits_to_keep=keep, **{self._cache_name: cache},
        )  # fmt: skip

    def aux_states(self, aux_layers: tuple[int, ...]) -> Tensor | None:
        """Hidden states `[n, A*H]` of the model's last pass that `arm` asked for."""
        return torch.cat([self._aux[i].to(self.device) for i in aux_layers], dim=-1) if aux_layers else None

    def take_hidden(self) -> Tensor:
        """Hidden states `[n, H]` after the final norm of the model's last pass, once."""
        assert self._hidden is not None
        hidden, self._hidden = self._hidden[0].to(self.device), None
        return hidden

    def commit(self, cache: TargetCache, past: int, kept: list[int]) -> None:
        """Keep rows `past + kept` (ascending) of the last pass, drop its other rows."""
        with torch.inference_mode():
            cache.keep(past, kept)

    def masks(self, mask: Tensor, positions_n: Tensor, key_positions: Tensor) -> Tensor | dict[str, Tensor]:
        """Additive `[1, 1, n, keys]` of a bool mask, in the form the architecture takes: one, or one per layer type."""
        full = torch.zeros(mask.shape, dtype=self.dtype, device=mask.device)
        full.masked_fill_(~mask, torch.finfo(self.dtype).min)
        if not self._windows:
            return full[None, None]
        window: int = self.config.sliding_window
        far = positions_n[:, None] - key_positions[None] >= window
        start = positions_n.amin(0, keepdim=True) - (window - 1)  # a committed row's position is its place
        near = begins(full.masked_fill(far, torch.finfo(self.dtype).min)[None, None], start)
        return near if self._windows == "all" else {"full_attention": full[None, None], "sliding_attention": near}

    def arm(self, aux_layers: tuple[int, ...], routing: bool = False) -> None:
        """Install exactly the hooks that this and the following passes need."""
        if (aux_layers, routing) == self._armed:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._aux = {}
        for i in aux_layers:
            if not 0 <= i <= len(self._layers):
                raise UserError(f"auxiliary layer {i} is not in 0..{len(self._layers)} of target {self.source}")
            if i == len(self._layers):
                hook = self._layers[-1].register_forward_hook(_keep_output(self._aux, i))
            else:
                hook = self._layers[i].register_forward_pre_hook(_keep_input(self._aux, i), with_kwargs=True)
            self._handles.append(hook)
        if routing:
            for module in self.expert_modules:
                self._handles.append(module.register_forward_pre_hook(self._record_routing, with_kwargs=True))
        self._armed = (aux_layers, routing)

    def _record_routing(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index: Any = args[1] if len(args) > 1 else kwargs[forward_parameters(module)[1]]
        weights: Any = args[2] if len(args) > 2 else kwargs.get(forward_parameters(module)[2])
        self._routing.append(index.to(self.device))
        self.knows_weights &= isinstance(weights, Tensor) and weights.shape == index.shape
        if self.knows_weights:
            self._weights.append(weights)

    def _record_hidden(self, module: nn.Module, args: Any, output: Any) -> None:
        self._hidden = output[0]

    def _probe(self) -> int:
        """Prove on a few tokens that hooks, masks and cache work; returns top-k."""
        asked = getattr(self.config, "num_experts_per_tok", None)
        if isinstance(asked, int) and not 0 < asked <= self.experts:
            raise UserError(
                f"target {self.source}: config.json says num_experts_per_tok {asked}, the model has {self.experts} experts"
            )
        routing_layers = check(self)
        if len(routing_layers) != self.moe_layers:
            raise UserError(f"target {self.source}: {self.architecture} bypasses its experts modules; not supported")
        return _one({r.shape[-1] for r in routing_layers}, "top-k values", self.source)

    def _locate(self, tokens_n: Tensor, positions_n: Tensor, attention: Any, cache: TargetCache, past: int) -> None:
        """Repeat a pass that went wrong with a probe on every layer; raises UserError naming the first bad one."""
        cache.keep(past, [])
        bad: list[int] = []

        def probe(i: int) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                out = output if isinstance(output, Tensor) else output[0]
                if not bad and not torch.isfinite(out).all():
                    bad.append(i)

            return hook

        handles = [layer.register_forward_hook(probe(i)) for i, layer in enumerate(self._layers)]
        try:
            self.run(tokens_n, positions_n, attention, cache.inner)
        finally:
            for handle in handles:
                handle.remove()
        where = f"layer {bad[0]}" if bad else "the final norm"
        raise UserError(
            f"{self.role} {self.source}: NaN or Inf in the hidden states leaving {where}; check the weights of that layer "
            "(damaged or wrongly dequantised file?) or load with --dtype float32"
        )


def _keep_input(store: dict[int, Tensor], i: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        store[i] = (args[0] if args else kwargs["hidden_states"])[0]

    return hook


def _keep_output(store: dict[int, Tensor], i: int) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        store[i] = (output if isinstance(output, Tensor) else output[0])[0]

    return hook


def _check_causal(model_type: Any, source: str) -> None:
    """Refuse what transformers knows, but not as a causal language model, such as some models of images and text."""
    if model_type in CONFIG_MAPPING_NAMES and model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UserError(
            f"target {source}: transformers does not offer model_type {model_type} as a causal language model (it may be one of "
            "images and text); it is not supported"
        )


def _decoder(model: Any) -> Any:
    """The module that holds the decoder layers; some architectures give the model itself when asked."""
    decoder = model.get_decoder()
    return decoder if hasattr(decoder, "layers") else getattr(decoder, "model", decoder)


def _decoder_layers(decoder: nn.Module, source: str) -> nn.ModuleList:
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UserError(f"target {source}: {type(decoder).__name__} has no list of decoder layers; it is not supported")
    return layers


def _experts_modules(decoder: nn.Module, architecture: str, source: str) -> list[Any]:
    """Modules whose forward takes (hidden states, expert ids, weights), in layer order."""
    found, others = [], ""
    for module in decoder.modules():
        kind = type(module).__name__
        named = kind.endswith("Experts") and hasattr(module, "num_experts")
        if named and len(forward_parameters(module)) >= 3:
            found.append(module)
        elif not others and re.search(r"(Experts|MoE|Moe|MoeBlock)$", kind):
            others = kind
    if found:
        return found
    if others:
        raise UserError(
            f"target {source}: {architecture} is not in transformers' registry of experts: its {others} chooses experts "
            "where EcoSpec cannot read it; it is not supported"
        )
    raise UserError(
        f"target {source}: {architecture} has no experts modules; the target must be a mixture-of-experts model (a dense "
        "model gains nothing here)"
    )


def _one(values: set[int], what: str, source: str) -> int:
    if len(values) != 1:
        raise UserError(f"target {source}: its MoE layers have different {what} {sorted(values)}; it is not supported")
    return values.pop()


def _rope_types(config: Any) -> set[str]:
    """Types of rotary embeddings in a config: one for all layers or one for each type of them."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(part.get("rope_type") or part.get("type")) for part in parts}


def _sliding_windows(config: Any, source: str) -> str:
    """Which layers look through a sliding window: "" none, "all", or "some" (one mask per layer type).

    UserError for layers and rotary embeddings that speculation cannot be exact with.
    """
    for kind in _rope_types(config):
        if kind in _LENGTH_DEPENDENT:
            raise UserError(
                f"target {source}: rotary embeddings of type '{kind}' change with the length of a pass, so that a rejected token "
                "leaves traces; it is not supported"
            )
    types = set(getattr(config, "layer_types", None) or ())
    unknown = types - {"full_attention", "sliding_attention"}
    if unknown:
        raise UserError(
            f"target {source}: a rejected token cannot be taken out of layers of type {', '.join(sorted(unknown))}: they keep "
            "more than a key and a value per token; it is not supported"
        )
    if "sliding_attention" in types:
        return "some" if "full_attention" in types else "all"
    return "all" if not types and getattr(config, "sliding_window", None) else ""
