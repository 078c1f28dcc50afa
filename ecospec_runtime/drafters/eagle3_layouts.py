"""The layouts in which EAGLE-3 heads are published, brought to one: flat settings, `midlayer.*` tensors, one layer-id meaning.

Flat (SafeAILab/EAGLE, SpecForge): settings at the top level of `config.json`, tensors `midlayer.*`. speculators
(vllm-project/speculators): the decoder layer's settings in `transformer_layer_config`, the rest at the top level, tensors
`layers.0.*`. What this loader does not compute is refused by name; what is legal but doubtful becomes a note.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ecospec_runtime.errors import UserError

IDS = "eagle_aux_hidden_state_layer_ids"
_OLD_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")  # fc_norm.0, .1, .2
# Tensors that carry nothing new: rotation tables, and the copies of the target's head that speculators trains against.
_IGNORED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
_TOP_LEVEL = ("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
              IDS, "eagle_config")  # fmt: skip
_ROPES = ("default", "linear", "llama3", "yarn")


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a config is in the speculators layout."""
    return "transformer_layer_config" in config or "speculators_model_type" in config


def flat_settings(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Settings of either layout as the flat layout has them. Raises UserError on a part that is not EAGLE-3's."""
    if not is_speculators(config):
        return config
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise UserError(f"{where}: transformer_layer_config is missing; this is not a complete speculators config")
    if (kind := config.get("speculators_model_type", "eagle3")) != "eagle3":
        raise UserError(f"{where}: speculators_model_type '{kind}' is not supported; only eagle3")
    algorithm = (config.get("speculators_config") or {}).get("algorithm", "eagle3")
    if algorithm != "eagle3":
        raise UserError(f"{where}: speculators_config.algorithm '{algorithm}' is not supported; only eagle3")
    return inner | {key: config[key] for key in _TOP_LEVEL if key in config}


def flat_tensors(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Tensors of either layout under the flat layout's names. Raises UserError if two of them mean the same."""
    flat: dict[str, Tensor] = {}
    for name, value in tensors.items():
        new = "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name
        for i, old in enumerate(_OLD_NORMS):
            new = f"fc_norm.{i}.weight" if new == f"{old}.weight" else new
        if new.endswith(_IGNORED):
            continue
        if new in flat:
            raise UserError(f"{where}: tensor {name} is there twice, under the names of two layouts; keep one")
        flat[new] = value
    return flat


def flag(settings: dict[str, Any], name: str, where: str) -> bool | None:
    """A switch at the top level or in `eagle_config`; None if neither says. Raises UserError if they differ or are no bool."""
    said = {
        value
        for part in (settings, settings.get("eagle_config") or {})
        if (value := part.get(name)) is not None  # null is what a tool writes for "not set"
    }
    if said - {True, False} or len(said) > 1:
        raise UserError(f"{where}: {name} is {sorted(map(str, said))}; it must be true or false, and one of them only")
    return said.pop() if said else None


def norm_flag(settings: dict[str, Any], name: str, present: bool, where: str) -> bool:
    """A switch that comes with a norm of its own. Raises UserError if it is off while the norm's weights are there."""
    said = flag(settings, name, where)
    if said is False and present:
        raise UserError(f"{where}: {name} is false, but the weights hold its norm; set it to how the head was trained")
    return bool(said) or present


def entering_layers(settings: dict[str, Any], target_type: str, layers: int, where: str) -> tuple[int, ...]:
    """Captured layers of flat settings as hidden states *entering* layers, for a target of `layers` layers.

    Ids in `eagle_config` mean layer *outputs* (SGLang, SpecForge), except for deepseek when the first id is not 1 and for
    gpt_oss when the largest equals the layer count; those at the top level are unshifted (vLLM, speculators). None given:
    2, n//2, n-3 (SafeAILab), even where two of them coincide. `layers` itself is what leaves the last layer.
    """
    nested = settings.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise UserError(f"{where}: eagle_config.use_aux_hidden_state is false; only heads on captured layers work")
    outputs, plain = (part.get(IDS) for part in (nested, settings))
    found = [tuple(plain)] if plain else []
    if outputs:
        shifted = not (
            (target_type.startswith("deepseek") and outputs[0] != 1)
            or (target_type == "gpt_oss" and max(outputs) == layers)
        )
        found.append(tuple(i + shifted for i in outputs))
    if len(set(found)) > 1:
        raise UserError(
            f"{where}: {IDS} says layers {found[0]} at the top level but {found[1]} in "
            "eagle_config (both as hidden states entering a layer); keep the one the head was trained with"
        )
    ids = found[0] if found else (2, layers // 2, layers - 3)
    if not all(type(i) is int and 0 <= i <= layers for i in ids):
        origin = "" if found else f" (the default, as the config has no {IDS})"
        raise UserError(f"{where}: captured layers {ids}{origin} are not all in 0..{layers} of the target")
    return ids


def refuse_unsupported(settings: dict[str, Any], tensors: dict[str, Tensor], where: str) -> None:
    """Raise UserError on settings that would change the arithmetic in a way this loader does not know."""
    more = next((name for name in tensors if name.startswith("layers.")), None)
    if settings.get("num_hidden_layers", 1) != 1 or more:
        count = settings.get("num_hidden_layers", 1)
        rest = f", and the weights hold {more}" if more else ""
        raise UserError(f"{where}: num_hidden_layers is {count}{rest}; only EAGLE-3 heads of one layer are supported")
    if settings.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where}: hidden_act '{settings['hidden_act']}' is not supported; only silu")
    if "sliding_attention" in (settings.get("layer_types") or ()):
        raise UserError(f"{where}: layer_types has sliding_attention; only full attention is supported")
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise UserError(f"{where}: partial_rotary_factor {settings['partial_rotary_factor']} is not supported; only 1")
    kind = rope(settings)["rope_type"]
    if kind not in _ROPES:
        raise UserError(f"{where}: rotary embedding of type '{kind}' is not supported; only {', '.join(_ROPES)}")


def rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings in one dict with `rope_type` and `rope_theta`, from `rope_parameters`, `rope_scaling`, `rope_theta`."""
    given = {**(settings.get("rope_scaling") or {}), **(settings.get("rope_parameters") or {})}
    renamed = {("rope_type" if key == "type" else key): value for key, value in given.items() if value is not None}
    return {"rope_type": "default", "rope_theta": settings.get("rope_theta") or 10000.0, **renamed}


def doubts(
    config: dict[str, Any], settings: dict[str, Any], ids: tuple[int, ...], biased: bool, target: Any
) -> list[str]:
    """One line for each thing about a head's config that loads and may still be wrong."""
    notes = []
    if len(set(ids)) < len(ids):
        said = (settings.get("eagle_config") or {}).get(IDS) or settings.get(IDS)
        reason = "as its config says" if said else "the default ids coincide on so few target layers"
        notes.append(f"captured layers {ids} hold one twice: {reason}; right only if it was trained so")
    if settings.get("attention_bias") and not biased:
        notes.append("attention_bias is true, but the weights hold no bias; none is added")
    if is_speculators(config) and config.get("norm_before_residual") is None:
        notes.append("norm_before_residual is missing: speculators reads false, as here, but vLLM reads true")
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    name, source = str(verifier.get("name_or_path") or ""), str(getattr(target, "source", "") or "")
    if name and source and name.rstrip("/").rsplit("/")[-1].lower() != source.rstrip("/").rsplit("/")[-1].lower():
        notes.append(f"made for {name}, and the target here is {source}; right only if they are the same model")
    return notes
