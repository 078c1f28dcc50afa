"""Which architectures of transformers work as targets: `ecospec-runtime architectures` tries each and prints the table.

Of every architecture a tiny random instance is saved, loaded as any target is, and decoded greedily through trees that
hold wrong siblings at every depth; it *works* if the text is the one of transformers' `generate(do_sample=False)` token
for token in float32 and the routing read is what its own routers chose. Anything else is *refused* when it is loaded.
Legend of shapes: n tokens of a pass, K top-k.
"""

from __future__ import annotations

import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from ecospec_runtime.config import GenerationConfig
from ecospec_runtime.console import check_writable, console, note
from ecospec_runtime.errors import UserError
from ecospec_runtime.sampling import Sampler
from ecospec_runtime.statistics import transformers_greedy
from ecospec_runtime.target import Target
from ecospec_runtime.verify import children_of, tree_mask, walk

VOCABULARY, PROMPT, TOKENS = 96, 11, 24
# Tiny sizes, each used where a configuration has a field of that name; windows are shorter than the prompt.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 8,
    "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2,
    "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "sliding_window": 6, "max_position_embeddings": 512,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_head_dim": 8,
    "linear_num_heads": 4, "index_head_dim": 16, "index_n_heads": 2, "mamba_num_heads": 8, "mamba_head_dim": 8,
    "ssm_state_size": 8, "n_groups": 2, "swa_head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "rel_extent": 8, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.25,
}  # fmt: skip
MLA: dict[str, Any] = {"num_key_value_heads": 4}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}

GEMMA4: dict[str, Any] = {
    "pad_token_id": 0, "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY,
    "global_head_dim": 8, "head_dim": 8, "num_key_value_heads": 2, "num_global_key_value_heads": 2,
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """One row to try: the model type, what its configuration needs beside `SIZES`, what is special about it."""

    model_type: str
    special: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)  # of a composite configuration, beside its text


ARCHITECTURES = (
    Architecture("qwen3_moe", "the first reference"),
    Architecture("gpt_oss", "transposed, interleaved, biased experts; sinks; alternating windows", {"num_key_value_heads": 2}),
    Architecture("deepseek_v3", "latent attention; dense first layer; shared expert; sigmoid routing, bias, groups", MLA),
    Architecture("deepseek_v2", "latent attention; softmax routing by groups", {**MLA, "topk_method": "group_limited_greedy"}),
    Architecture("mixtral", "every layer through a window"),
    Architecture("olmoe", "norms of queries and keys"),
    Architecture("flex_olmo", "norms after the sublayers"),
    Architecture("qwen2_moe", "shared expert with a gate; windows", {"use_sliding_window": True, **MIXED}),
    Architecture("phimoe", "sparse-mixer routing; windows"),
    Architecture("granitemoe", "multipliers"),
    Architecture("granitemoeshared", "shared expert"),
    Architecture("granitemoe_swa", "windows; layers without positions; sinks"),
    Architecture("ernie4_5_moe", "routing bias; dense first layer; shared expert"),
    Architecture("glm4_moe", "sigmoid routing, bias, groups"),
    Architecture("glm4_moe_lite", "latent attention", MLA),
    Architecture("minimax_m2", "sigmoid routing with bias"),
    Architecture("dots1", "as DeepSeek-V3; windows", MIXED),
    Architecture("exaone_moe", "windows; full layers without positions"),
    Architecture("hunyuan_v1_moe", "shared expert"),
    Architecture("hy_v3", "routing bias; dense first layer"),
    Architecture("afmoe", "gated attention; windows"),
    Architecture("aria_text", "shared experts", {"moe_topk": 2}),
    Architecture("axk1", "latent attention", MLA),
    Architecture("beam", "windows"),
    Architecture("cohere2_moe", "parallel blocks; windows; full layers without positions"),
    Architecture("flint", "windows"),
    Architecture("kolibri1", "windows"),
    Architecture("laguna", "gated attention; windows", MIXED),
    Architecture("mellum", "windows", MIXED),
    Architecture("mimo_v2_flash", "keys wider than values; windows with sinks", {"num_key_value_heads": 1}),
    Architecture("minimax_m3_vl_text", "clamped experts", {"dense_intermediate_size": 32}),
    Architecture("solar_open", "sigmoid routing with bias"),
    Architecture("gemma4_text", "dense and sparse blocks side by side; windows", GEMMA4),
    Architecture("axk2", "", MLA),
    Architecture("deepseek_v32", "", MLA),
    Architecture("deepseek_v4"),
    Architecture("glm_moe_dsa", "", MLA),
    Architecture("hy_v4"),
    Architecture("qwen3_next"),
    Architecture("qwen3_5_moe_text"),
    Architecture("kimi_linear"),
    Architecture("bailing_hybrid"),
    Architecture("lara_mini"),
    Architecture("jamba"),
    Architecture("nemotron_h"),
    Architecture("granitemoehybrid", "", {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_d_head": 8}),
    Architecture("minimax"),
    Architecture("lfm2_moe", "", {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1}),
    Architecture("inkling_text"),
    Architecture("zaya", "", {"num_experts_per_tok": 1, "router_hidden_size": 16}),
    Architecture("llama4_text", "", {"intermediate_size_mlp": 32, "attention_chunk_size": 6}),
    Architecture("llama4", "", {"intermediate_size_mlp": 32, "attention_chunk_size": 6}),
    Architecture("longcat_flash", "", {"zero_expert_num": 2, "expert_ffn_hidden_size": 16, "ffn_hidden_size": 32, "num_layers": 2}),
    Architecture("jetmoe"),
    Architecture("doge", "", {"is_moe": True, "num_experts": 16}),
    Architecture("qwen3_vl_moe", "", {}, {"vision_config": {**VISION, "deepstack_visual_indexes": [0]}}),
    Architecture("gemma4", "images and text, text alone given", GEMMA4, {"vision_config": {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 16, "position_embedding_size": 32}}),
    Architecture("glm4v_moe", "", {}, {"vision_config": VISION}),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What became of one architecture."""

    architecture: str  # class name
    model_type: str
    works: bool
    why: str  # what is special about it, or why it is refused


def configuration(entry: Architecture) -> Any:
    """The tiny configuration of an entry."""
    default = AutoConfig.for_model(entry.model_type)
    text = default.get_text_config()
    known = {name: value for name, value in SIZES.items() if _has(text, name)} | entry.changes
    if text is default:
        return AutoConfig.for_model(entry.model_type, **known)
    return AutoConfig.for_model(entry.model_type, text_config=known, **entry.parts)


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # a field that differs by layer
        return True


def save(entry: Architecture, folder: Path, seed: int = 0) -> str:
    """Save a random instance in float32 with a tokenizer of single letters; returns its class name.

    Weights that start as constants (norms, biases, sinks, routing corrections) get noise, so that they matter.
    """
    torch.manual_seed(seed)
    config = configuration(entry)
    try:
        model: Any = AutoModelForCausalLM.from_config(config)
    except ValueError:  # images and text: not offered as a causal language model
        model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            if weight.is_floating_point() and weight.numel() > 1 and bool((weight == weight.flatten()[0]).all()):
                spread = 0.5 if "correction" in name or "expert_bias" in name else 0.2
                weight += spread * torch.randn_like(weight)
    model.float().save_pretrained(folder)
    letters = {f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocab=letters, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t0").save_pretrained(folder)
    return type(model).__name__


def attempt(entry: Architecture) -> Result:
    """Build, load and decode one architecture."""
    with tempfile.TemporaryDirectory() as folder, _quiet():
        name = save(entry, Path(folder))
        try:
            target = Target.from_pretrained(folder, "float32")
        except UserError as error:
            why = str(error).removeprefix(f"target {folder}: ").removesuffix("; it is not supported")
            return Result(name, entry.model_type, False, why)
        prove(target)
        return Result(name, entry.model_type, True, entry.special)


def prove(target: Target, seed: int = 0) -> None:
    """AssertionError unless tree decoding gives `generate`'s text and routing is what the routers chose."""
    rng = random.Random(seed)
    prompt = [rng.randrange(1, VOCABULARY) for _ in range(PROMPT)]
    ids = torch.tensor([prompt])
    (reference,) = transformers_greedy(target, [prompt], TOKENS, ends=False)
    text, rejected = tree_text(target, prompt, reference, rng)
    assert text == reference, f"{target.architecture}: {text} is not transformers' {reference}"
    assert rejected >= TOKENS // 2
    with chosen_by_routers(target) as chosen:
        output = target.forward(ids[0], torch.arange(PROMPT), None, target.new_cache(), routing=True)
    if len(chosen) == target.moe_layers:
        for used, own in zip(output.routing_layers, chosen, strict=True):
            assert torch.equal(used, own), f"{target.architecture}: routing is not what the router chose"


def tree_text(target: Target, prompt: list[int], reference: list[int], rng: random.Random) -> tuple[list[int], int]:
    """Greedy text of the length of `reference` from trees that follow it for a while; also how many nodes were rejected.

    Each level of a tree holds a wrong token and, up to a random depth of 0 to 2, the right one; wrong ones have a child.
    """
    cache, sampler = target.new_cache(), Sampler(GenerationConfig())
    target.forward(torch.tensor(prompt[:-1]), torch.arange(len(prompt) - 1), None, cache, logits=False)
    text: list[int] = []
    rejected = 0
    while len(text) < len(reference):
        past = len(cache)
        tokens, parents, depths, row = [(prompt + text)[-1]], [], [0], 0
        for right in [*reference[len(text) : len(text) + rng.randrange(3)], None]:
            wrong = rng.choice([i for i in range(VOCABULARY) if i not in (right, reference[len(text)])])
            for token, parent in ((wrong, row), (wrong, len(tokens)), (right, row)):
                if token is not None:
                    tokens.append(token)
                    parents.append(parent)
                    depths.append(depths[parent] + 1)
            row = len(tokens) - 1
        output = target.forward(torch.tensor(tokens), torch.tensor(depths) + past, tree_mask(parents, past), cache)
        assert output.logits is not None
        outcome = walk(output.logits, children_of(tokens[1:], parents), sampler, past + 1, set(), False)
        target.commit(cache, past, outcome.rows)
        rejected += len(tokens) - len(outcome.rows)
        text += outcome.tokens
    return text[: len(reference)], rejected


@contextmanager
def chosen_by_routers(target: Target) -> Iterator[list[Tensor]]:
    """Collects the expert ids `[n, K]` that router modules return, in layer order; nothing from routers that return none."""
    chosen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for part in output if isinstance(output, tuple) else ():
            if isinstance(part, Tensor) and part.dtype == torch.long and part.shape[-1:] == (target.top_k,):
                chosen.append(part.reshape(-1, target.top_k))

    found = [m for m in target.model.modules() if re.search(r"Rout|Gate", type(m).__name__)]
    handles = [module.register_forward_hook(hook) for module in found]
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' reports on random models."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(before)
        if bars:
            transformers_logging.enable_progress_bar()


def attempt_all(entries: Iterable[Architecture] = ARCHITECTURES) -> Iterator[Result]:
    """Results in order, as they come."""
    for entry in entries:
        if entry.model_type in CONFIG_MAPPING:  # the others are of newer releases of transformers
            yield attempt(entry)


def markdown(results: Iterable[Result]) -> str:
    """The page of the docs."""
    rows = [f"| {r.architecture} | `{r.model_type}` | {_word(r)} | {r.why} |" for r in results]
    return (
        f"# Architectures\n\nWhat `ecospec-runtime architectures` found with transformers {transformers.__version__}: "
        "a tiny random instance of each\narchitecture is saved, loaded and decoded through draft trees. It **works** if the text "
        "is that of\n`generate(do_sample=False)` token for token in float32 and the routing read is what its routers chose; "
        "anything\nelse is refused when it is loaded, with the line shown. An architecture that is not listed is checked in the same "
        "way\nwhen it is loaded, on its own weights.\n\n"
        "| architecture | model_type | result | what is special, or why it is refused |\n|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )


def _word(result: Result) -> str:
    return "works" if result.works else "refused"


def report(names: list[str] | None = None, out: Path | None = None) -> None:
    """Try the architectures with these model types (default: all), print which work, and write the page `out`. Raises UserError."""
    check_writable(out)
    unknown = sorted(set(names or ()) - {entry.model_type for entry in ARCHITECTURES})
    if unknown:
        raise UserError(
            f"{', '.join(unknown)}: not a model type of the table; names are those of config.json's model_type"
        )
    results = []
    for result in attempt_all(entry for entry in ARCHITECTURES if not names or entry.model_type in names):
        results.append(result)
        if sys.stderr.isatty():
            note(f"{result.model_type}: {_word(result)}")
    table = Table("architecture", "model_type", "result", "what is special, or why it is refused")
    for result in results:
        table.add_row(
            result.architecture, result.model_type, _word(result), result.why, style="" if result.works else "dim"
        )
    console().print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(markdown(results), encoding="utf-8")
