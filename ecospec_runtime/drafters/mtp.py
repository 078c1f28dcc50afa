"""MTP / NextN layer: one more decoder layer of the target's own kind, used again on its own states below the root.

A row's x is `eh_proj(cat(enorm(embed(token)), hnorm(h)))`, the first h the target's last hidden state after its final norm.
The decoder layer and `shared_head.norm` give the next h; logits are the target's output matrix times it. This is
transformers' `MtpLayer`, which also runs here. (vLLM feeds the state before `shared_head.norm` on, SGLang the one after.)
Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2.

Legend of shapes: m and n rows, P committed rows, H hidden, V vocabulary, b nodes of a level, e nodes expanded so far.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, modeling_layers

from ecospec_kernels import dispatch
from ecospec_kernels.draft_propose.reference import Proposals
from ecospec_kernels.draft_tree.reference import Shape, grow, noise_of
from ecospec_kernels.mtp_layer.reference import MtpWeights
from ecospec_runtime import compute
from ecospec_runtime.cache import GrowingLayer, TargetCache, cache_argument
from ecospec_runtime.checkpoint import DTYPES, fingerprint, read_config
from ecospec_runtime.config import PoolConfig
from ecospec_runtime.drafters.base import TreeDrafter, shared_noise
from ecospec_runtime.drafters.mtp_layout import LayerNames, LayerReader, find_layer, stored_tensors
from ecospec_runtime.drafters.mtp_weights import direct_weights
from ecospec_runtime.errors import UserError, first_line
from ecospec_runtime.placement import whole_weight
from ecospec_runtime.pool import Pool
from ecospec_runtime.sampling import Sampler

_CHUNK = 512  # rows of one pass
_ROOM = 512  # rows of a new sequence's states
_FITS = ("model_type", "hidden_size", "vocab_size")
_ARITHMETIC = (  # settings that show in no tensor's shape
    "num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "n_group", "topk_group", "norm_topk_prob",
    "routed_scaling_factor", "rms_norm_eps", "rope_interleave", "hidden_act",
)  # fmt: skip


class MtpModule(nn.Module):
    """An `MtpLayer` with what `compute.install` asks of a model."""

    def __init__(self, layer: nn.Module, config: Any, dtype: torch.dtype):
        super().__init__()
        self.layer, self.config, self.dtype = layer, config, dtype

    def set_attn_implementation(self, name: str) -> None:
        """Select the attention function; the layer reads it from its config."""
        self.config._attn_implementation = name


@dataclass
class MtpSequence:
    """Committed rows of one sequence. The states' buffer grows by doubling."""

    cache: TargetCache
    states: Tensor  # [capacity, H] after `shared_head.norm`
    tokens: list[int] = field(default_factory=list)
    earlier: TargetCache = field(
        default_factory=TargetCache
    )  # first rows of `cache`, where a pool of an earlier row grows

    @property
    def length(self) -> int:
        """Number of committed rows."""
        return len(self.tokens)

    def append(self, tokens: list[int], states_nH: Tensor) -> None:
        """Note the rows that a pass has added to the cache."""
        rows, capacity = self.length + len(tokens), self.states.shape[0]
        if rows > capacity:
            self.states = F.pad(self.states, (0, 0, 0, max(rows, 2 * capacity) - capacity))
        self.states[self.length : rows] = states_nH
        self.tokens += tokens


class MtpDrafter(TreeDrafter):
    """MTP layer ready to draft for the target whose embedding, final norm and output matrix it shares.

    See `drafters.base.Drafter` for the methods' contract.
    """

    kind = "mtp"
    features = "drafter_state"

    def __init__(self, module: MtpModule, target: Any, folder: Path, source: str):
        """`module` lies where the target's passes begin and end; its norm and output matrix may lie elsewhere."""
        decoder = target.model.get_decoder()
        self._module, self._target, self._folder, self._source = module, target, folder, source
        self._norm, self._embedding = decoder.norm, target.model.get_input_embeddings()
        self._head = target.model.get_output_embeddings()
        self._rotary = copy.deepcopy(decoder.rotary_emb)  # some kinds change with the positions they see
        self._cache_name = cache_argument(module.layer)
        self._direct = direct_weights(module.layer)
        self._device, self._dtype = target.device, module.dtype
        self._ids = np.arange(self._head.weight.shape[0])
        self.width: int = target.hidden_size
        self.aux_layers: tuple[int, ...] = (target.layers,)

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the weights of the folder that holds the layer: the target's own where it came with the target."""
        own = self._folder.samefile(self._target.folder)
        return str(self._target.fingerprint) if own else fingerprint(self._folder)

    def check(self, target: Any) -> None:
        """Raise UserError if `target` is of another kind or size than the one this layer was loaded for."""
        _check_same(self._target.config, target.config, self._source, _FITS)

    def start(self) -> MtpSequence:
        """An empty sequence."""
        return MtpSequence(TargetCache(), torch.zeros(_ROOM, self.width, dtype=self._dtype, device=self._device))

    @torch.inference_mode()
    def extend(self, sequence: MtpSequence, tokens_m: Tensor | Sequence[int], features_mF: Tensor) -> None:
        """Append m rows; row j pairs the features at position j with the token at position j + 1."""
        tokens = tokens_m.tolist() if isinstance(tokens_m, Tensor) else list(tokens_m)
        if len(tokens) != features_mF.shape[0]:
            raise ValueError(f"{len(tokens)} tokens but {features_mF.shape[0]} feature rows")
        if features_mF.shape[1] != self.width:
            raise ValueError(f"features are {features_mF.shape[1]} wide, the layer takes {self.width}")
        hidden = self._norm(features_mF.to(self._device, self._norm.weight.dtype)).to(self._device, self._dtype)
        for begin in range(0, len(tokens), _CHUNK):
            part, past = tokens[begin : begin + _CHUNK], sequence.length
            positions = torch.arange(past, past + len(part), device=self._device) + 1
            chain = torch.ones(len(part), len(part), dtype=torch.bool, device=self._device).tril()
            states = self._run(part, hidden[begin : begin + _CHUNK], positions, chain, sequence.cache)
            sequence.append(part, states)

    def pool(
        self, sequence: MtpSequence, root: int, config: PoolConfig, temperatures: tuple[float, ...], sampler: Sampler | None
    ) -> Pool:  # fmt: skip
        """The pool of row `root`; its rows leave the cache again."""
        cache = sequence.cache if root == sequence.length - 1 else sequence.earlier
        _rewind(cache, sequence.cache, root + 1)
        states, past = sequence.states, len(cache)
        noise = shared_noise(sampler, root, config.depth, self._ids, self._device)

        def propose(level: int, states_nH: Tensor) -> Proposals:
            width = min(config.width, len(self._ids))
            found: Proposals = dispatch.best_tokens(
                self._logits(states_nH), width, temperatures, noise_of(level, noise)
            )
            return found

        def step(level: int, ids_b: NDArray[np.int64], h_bH: Tensor, seen_be: NDArray[np.bool_]) -> Tensor:
            positions = torch.full((len(ids_b),), past + level, device=self._device)
            return self._run(ids_b, h_bH, positions, torch.from_numpy(seen_be).to(self._device), cache)

        try:
            tree = grow(
                states[root - 1] if root else torch.zeros_like(states[0]), states[root],
                Shape(config.depth, config.beam, config.width, config.min_reach), propose, step, self._ids,
            )  # fmt: skip
        finally:
            cache.keep(past, [])
        return Pool(root_token=sequence.tokens[root], temperatures=temperatures, **tree._asdict())

    def _run(
        self, tokens_n: Sequence[int] | NDArray[np.int64], h_nH: Tensor, positions_n: Tensor, seen_nk: Tensor,
        cache: TargetCache,
    ) -> Tensor:  # fmt: skip
        """The layer's states `[n, H]` for rows that join `cache`.

        `seen_nk`, bool: which of the last k rows, these last, a row may look at; it sees all rows before those.
        """
        n, k = seen_nk.shape
        ids = torch.as_tensor(tokens_n, device=self._device)
        embed = self._embedding(ids)[None].to(self._device, self._dtype)
        if self._direct is not None and n <= dispatch.MAX_ROWS and len(cache):
            return self._run_direct(self._direct, embed, h_nH, positions_n, seen_nk, cache)
        mask = torch.zeros(1, 1, n, len(cache) + n, dtype=self._dtype, device=self._device)
        mask[..., mask.shape[-1] - k :].masked_fill_(~seen_nk, torch.finfo(self._dtype).min)
        rope = tuple(part.to(self._device) for part in self._rotary(embed, positions_n[None]))
        states: Tensor = self._module.layer(
            embed, h_nH[None], position_embeddings=rope, attention_mask=mask,
            position_ids=positions_n[None], **{self._cache_name: cache.inner},
        )  # fmt: skip
        return states[0]

    def _run_direct(
        self, w: MtpWeights, embed: Tensor, h_nH: Tensor, positions_n: Tensor, seen_nk: Tensor, cache: TargetCache
    ) -> Tensor:  # fmt: skip
        """`_run` by the `mtp_layer` op."""
        n, k = seen_nk.shape
        cos, sin = (part[0].float() for part in self._rotary(embed, positions_n[None]))
        latent, key = (
            embed.new_empty(1, 1, n, width) for width in (len(w.latent_norm), cos.shape[1])
        )  # room, to be filled
        latents, keys = cache.inner.update(latent, key, 0)
        mask = torch.ones(n, latents.shape[2], dtype=torch.bool)
        mask[:, -k:] = seen_nk
        inputs = embed[0].float(), h_nH.float(), cos, sin
        return dispatch.mtp_layer(w, *inputs, latents[0, 0], keys[0, 0], mask, supported=True).to(self._dtype)

    def _logits(self, states_nH: Tensor) -> Tensor:
        """[n, V] of the target's output matrix."""
        logits: Tensor = self._head(states_nH.to(self._head.weight.dtype))
        return logits.to(self._device)


def has_mtp_layer(folder: Path, config: dict[str, Any], target: Any) -> bool:
    """Whether a folder with this `config.json` is meant as an MTP layer for the target; the headers of its files are read.

    A whole model that carries such a layer for itself may also draft as a language model, for a target of another size.
    """
    if folder.samefile(target.folder):
        return True
    names = layer_names(folder, config)
    fits = all(config.get(key) == getattr(target.config, key, None) for key in _FITS)
    return names is not None and (names.separate or fits)


def layer_names(folder: Path, config: dict[str, Any]) -> LayerNames | None:
    """The MTP layer in a folder with this `config.json`, if there is one; the headers of its files are read."""
    where = f"drafter {folder}"
    return find_layer(set(stored_tensors(folder, config, where, torch.float32)), config, where)


def load_mtp(folder: Path, source: str, target: Any, dtype: str = "auto") -> MtpDrafter:
    """Load the MTP layer in a target's own folder, or exported to one of its own. Raises UserError naming what is wrong.

    `dtype` auto is the target's. Embedding and output matrix are the target's: copies in its own checkpoint are not read,
    copies in a separate folder must be the same.
    """
    where, config = f"drafter {source}", read_config(folder, "drafter")
    if not hasattr(modeling_layers, "MtpLayer"):
        version = transformers.__version__
        raise UserError(f"{where}: transformers {version} has no MTP layers; install transformers 5.17 or newer")
    kept = target.dtype if dtype == "auto" else DTYPES[dtype]
    assert isinstance(kept, torch.dtype)
    tensors = stored_tensors(folder, config, where, kept)
    names = find_layer(set(tensors), config, where)
    if names is None:
        raise UserError(_nothing_found(where, config))
    settings = target.config
    if not folder.samefile(target.folder):  # its own sizes, the target's arithmetic
        settings = _read_settings(folder, where)
        _check_same(settings, target.config, where, (*_FITS, *_ARITHMETIC))
        settings._attn_implementation = target.config._attn_implementation
    reader = LayerReader(tensors, names, where)
    heads = {"embed_tokens.weight": target.model.get_input_embeddings(),
             "shared_head.head.weight": target.model.get_output_embeddings()}  # fmt: skip
    reader.check_shared(lambda name: whole_weight(heads[name]))
    module = _build(target, settings, where, kept, reader)
    compute.install(module, exact=False)
    drafter = MtpDrafter(module, target, folder, where)
    _draft_once(drafter, target, where)
    return drafter


def _nothing_found(where: str, config: dict[str, Any]) -> str:
    announced = config.get("num_nextn_predict_layers") or config.get("num_mtp_layers")
    if announced:
        return (
            f"{where}: config.json announces {announced} MTP layer, but no safetensors file here holds one (save_pretrained "
            "of transformers leaves it out); use the published checkpoint"
        )
    return (
        f"{where}: this is the target itself, which would only verify its own tokens at full price, and its safetensors files "
        "hold no MTP layer; use an EAGLE-3 head, a smaller model with the same tokenizer, or ngram"
    )


def _read_settings(folder: Path, where: str) -> Any:
    """Config of a separate folder, read as transformers reads the target's."""
    try:
        return AutoConfig.from_pretrained(folder).get_text_config()
    except Exception as error:  # transformers and the hub's strict configurations have families of their own
        raise UserError(f"{where}: transformers cannot read config.json ({first_line(error)})") from None


def _check_same(config: Any, target: Any, where: str, keys: tuple[str, ...]) -> None:
    """Raise UserError, naming both values, on a setting that differs from the target's."""
    pairs = [(key, getattr(config, key, None), getattr(target, key, None)) for key in keys]
    ours, theirs = (getattr(each, "rope_parameters", None) or {} for each in (config, target))
    pairs += [(key, ours.get(key), theirs.get(key)) for key in ("rope_type", "rope_theta", "factor")]
    for key, value, expected in pairs:
        if value != expected:
            raise UserError(
                f"{where}: config.json says {key} {value}, the target has {expected}; this MTP layer belongs to another target"
            )


def _layer_config(config: Any, decoder: Any, where: str) -> Any:
    """The config for one decoder layer, number 0: full attention, mixture of experts."""
    if getattr(config, "num_mtp_layers", None) is not None:
        try:
            config = config.get_mtp_config()
        except ValueError as error:
            raise UserError(f"{where}: MTP with {config.model_type} is not supported ({first_line(error)})") from None
    else:
        config = copy.deepcopy(config)
        one = {"layer_types": ["full_attention"], "mlp_only_layers": [], "decoder_sparse_step": 1}
        for key in one.keys() & vars(config).keys():
            setattr(config, key, one[key])
    config.num_hidden_layers = 1
    plain = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
    kinds = set(getattr(config, "layer_types", None) or [plain])
    rotates = hasattr(decoder, "rotary_emb")
    if kinds != {"full_attention"} or not rotates or hasattr(config, "chain_hidden_post_norm"):
        raise UserError(f"{where}: MTP with {config.model_type} is not supported: its layers are of another kind")
    return config


def _build(target: Any, settings: Any, where: str, kept: torch.dtype, reader: LayerReader) -> MtpModule:
    """The layer that a config describes, with its weights in `kept`, where the target's passes begin and end."""
    decoder = target.model.get_decoder()
    config = _layer_config(settings, decoder, where)
    norm = next(kind for kind in type(decoder.norm).__mro__ if kind.__module__ != compute.__name__)
    last = decoder.layers[-1]
    try:
        with torch.device("meta"):
            layer = modeling_layers.MtpLayer(config, type(last), norm, 0)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{where}: MTP with {config.model_type} is not supported ({first_line(error)})") from None
    exact: set[str] = set()  # what transformers keeps in float32 whatever the model's type: routers
    if target.dtype != torch.float32:
        exact = {f"mtp_block.{name}" for name, value in last.state_dict().items() if value.dtype == torch.float32}
    device = target.device
    values = {
        name: torch.empty(value.shape, dtype=torch.float32 if name in exact else kept, device=device)
        for name, value in layer.state_dict().items()
    }
    reader.fill(values)
    layer.load_state_dict(values, assign=True)
    return MtpModule(layer.requires_grad_(False).eval(), config, kept)


def _draft_once(drafter: MtpDrafter, target: Any, where: str) -> None:
    """Raise UserError unless the layer runs outside its model; afterwards no step waits for kernels to be compiled."""
    sequence = drafter.start()
    try:
        drafter.extend(sequence, [0, 0], torch.zeros(2, drafter.width))
        drafter.expand(sequence, 0, PoolConfig(depth=3, beam=2, width=2))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        kind = target.config.model_type
        raise UserError(f"{where}: MTP with {kind} is not supported ({first_line(error)})") from None
    if len(sequence.cache) != 2:
        raise UserError(
            f"{where}: MTP with {target.config.model_type} is not supported: its layer does not fill a cache"
        )


def _rewind(cache: TargetCache, whole: TargetCache, rows: int) -> None:
    """Make `cache` hold the first `rows` rows of `whole`, from some number of them."""
    have = len(cache)
    if have > rows:
        cache.keep(rows, [])
    elif have < rows:
        layer = whole.inner.layers[0]
        assert isinstance(layer, GrowingLayer)
        cache.inner.update(layer.keys[:, :, have:rows], layer.values[:, :, have:rows], 0)
