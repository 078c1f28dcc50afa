"""EAGLE-3 heads in the layouts that people publish: the same head either way, the right target layers, lossless text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM

from ecospec_runtime.config import GenerationConfig, PoolConfig
from ecospec_runtime.drafters import load_drafter
from ecospec_runtime.drafters.eagle3_layouts import IDS, entering_layers
from ecospec_runtime.engine import Engine
from ecospec_runtime.errors import UserError
from ecospec_runtime.target import Target
from tests.heads import Edit, as_speculators, biases, edit_head, norms, wider
from tests.models import save_model, save_tiny_target, tiny_tokenizer

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tiny_target_dir: Path) -> Target:
    return Target.from_pretrained(tiny_target_dir, dtype="float32")


@pytest.fixture
def make(tiny_drafter_dir: Path, tmp_path: Path, target: Target) -> Make:
    """Returns a function that writes the tiny head, edited, in a layout; `top` are settings at the top level."""

    def write(layout: str, edit: Edit | None = None, **top: Any) -> Path:
        folder = edit_head(tiny_drafter_dir, tmp_path / f"{layout}-{len(list(tmp_path.iterdir()))}", edit or plain)
        if layout == "flat":
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | top))
            return folder
        shared = target.model.get_input_embeddings().weight.detach()
        return as_speculators(folder, folder.with_name(folder.name + "-saved"), shared, **top)

    return write


def plain(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """The head as it is."""


def everything(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Every switch that a head of one layer can have."""
    config |= {"norm_before_residual": True, "norm_output": True, "attention_bias": True}
    tensors |= {f"fc_norm.{i}.weight": norms(32, i) for i in range(3)}
    biases(tensors, "qkvo")


def norm_before_fc(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """One norm over the three captured states, instead of one for each."""
    tensors["input_norm.weight"] = norms(96, 11)


def older_names(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    """The norms of the captured states as older heads call them."""
    tensors |= {f"aux_norm_{name}.weight": norms(32, 12 + i) for i, name in enumerate(("low", "mid", "high"))}


@pytest.mark.parametrize("edit", [plain, everything, norm_before_fc, older_names, wider])
def test_a_head_drafts_the_same_pool_from_either_layout(make: Make, target: Target, edit: Edit) -> None:
    pools = []
    top = {"target_hidden_size": 32} if edit is wider else {}
    for folder in (make("flat", edit), make("speculators", edit, **top)):
        drafter: Any = load_drafter(folder, target)
        sequence = drafter.start()
        features = torch.randn(20, 96, generator=torch.Generator().manual_seed(3))
        drafter.extend(sequence, torch.arange(1, 21), features)
        pools.append(drafter.expand(sequence, 20, PoolConfig(depth=4, beam=3, width=5), (0.5,)))
    for name in ("tokens", "parents", "log_probs", "states", "entropies", "log_normalizers"):
        np.testing.assert_array_equal(getattr(pools[0], name), getattr(pools[1], name), err_msg=name)


def test_the_state_that_feeds_on_is_normed_only_where_the_head_says_so(make: Make, target: Target) -> None:
    def sharp(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["norm.weight"] = torch.full((32,), 3.0)

    for said, expected in ((True, True), (False, False)):
        drafter: Any = load_drafter(make("speculators", sharp, norm_output=said), target)
        sequence = drafter.start()
        drafter.extend(sequence, [5, 6], torch.randn(2, 96, generator=torch.Generator().manual_seed(4)))
        states = drafter.expand(sequence, 6, PoolConfig(depth=3, beam=2, width=3)).states
        size = np.sqrt(np.square(states).mean(-1))
        assert bool(np.allclose(size, 3.0, atol=1e-3)) is expected


@pytest.mark.parametrize(
    ("layout", "edit"),
    [
        ("flat", plain),
        ("flat", everything),
        ("speculators", plain),
        ("speculators", everything),
        ("speculators", wider),
    ],
)
def test_text_is_what_the_target_alone_generates(make: Make, target: Target, layout: str, edit: Edit) -> None:
    prompt = [12, 40, 7, 33, 58]
    out = target.model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), attention_mask=torch.ones(1, 5, dtype=torch.long), do_sample=False, max_new_tokens=40,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    top = {"target_hidden_size": 32} if edit is wider else {}
    drafter = load_drafter(make(layout, edit, **top), target)
    engine = Engine(target, drafter, pool=PoolConfig(depth=2, beam=4, width=16)).with_policy("confidence:budget=24")
    stream = engine.generate(prompt, GenerationConfig(max_new_tokens=40, eos_token_id=()))
    assert [token.id for token in stream] == out[0, 5:].tolist()
    assert stream.statistics.accepted > 0  # otherwise nothing was committed from a tree
    assert stream.statistics.verified > 10 * stream.statistics.accepted  # and most of it was rejected


# --- CASE 6 and CASE 10 in both layouts ---------------------------------------------------------------------------------


def _absolute(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["d2t"] = tensors["d2t"] + torch.arange(48)


def _inconsistent(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["t2d"] = tensors["t2d"].roll(1)


def _no_d2t(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del tensors["d2t"]


def _no_map(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del tensors["d2t"], tensors["t2d"]


def _larger(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["draft_vocab_size"] = 200


def _other_vocabulary(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["vocab_size"] = 128


def _two_layers(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["num_hidden_layers"] = 2


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_absolute, "d2t holds absolute ids"),
        (_inconsistent, "contradict"),
        (_no_d2t, "d2t is missing"),
        (_no_map, "d2t is missing"),
        (_larger, "draft vocabulary of 200 .* target's 96"),
        (_other_vocabulary, "128 tokens, the target has 96"),
        (_two_layers, "num_hidden_layers is 2"),
    ],
)
@pytest.mark.parametrize("layout", ["flat", "speculators"])
def test_faults_are_refused_in_either_layout(make: Make, target: Target, layout: str, edit: Edit, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_drafter(make(layout, edit), target)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("top", "message"),
    [
        ({"transformer_layer_config": None}, "transformer_layer_config is missing"),
        ({"speculators_model_type": "peagle", "architectures": ["Eagle3"]}, "'peagle' is not supported"),
        ({"speculators_config": {"algorithm": "dflash"}}, "'dflash' is not supported"),
        ({"norm_before_fc": True}, "input_norm.weight is missing"),
        ({"fc_norm": True}, "fc_norm.0.weight is missing"),
        ({"transformer_layer_config": {"hidden_size": 32}}, "'num_attention_heads' is missing"),
    ],
)
def test_faults_of_the_speculators_layout_are_named(
    make: Make, target: Target, top: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load_drafter(make("speculators", **top), target)


def test_copies_of_the_targets_own_weights_are_passed_over(make: Make, target: Target) -> None:
    def edit(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors |= {"verifier_norm.weight": torch.ones(32), "verifier_lm_head.weight": torch.ones(48, 32)}

    assert load_drafter(make("speculators", edit), target).kind == "eagle3"


def test_an_embedding_that_was_not_saved_is_the_targets(make: Make, target: Target, tmp_path: Path) -> None:
    saved = make("speculators")
    bare = edit_head(saved, tmp_path / "bare", lambda tensors, config: tensors.__delitem__("embed_tokens.weight"))
    heads: list[Any] = [load_drafter(folder, target) for folder in (saved, bare)]
    assert [head.config.own_embedding for head in heads] == [True, False]
    assert torch.equal(heads[0]._rows.embedding, heads[1]._rows.embedding)


def test_a_head_with_another_tokenizer_is_refused(make: Make, target: Target) -> None:
    folder = make("speculators")
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    assert load_drafter(folder, target).kind == "eagle3"
    text = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    text["model"]["vocab"] = dict(zip(vocabulary, [0, *reversed(range(1, len(vocabulary)))], strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(text))
    with pytest.raises(UserError, match=r"another tokenizer: .* 94 ids name other tokens"):
        load_drafter(folder, target)


def test_what_is_doubtful_is_noted(make: Make, target: Target) -> None:
    def notes(layout: str, **top: Any) -> str:
        drafter: Any = load_drafter(make(layout, **top), target)
        return " | ".join(drafter.notes)

    def verifier(name: str) -> dict[str, Any]:
        return {"speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": name}}}

    assert notes("flat") == notes("speculators") == ""
    assert notes("speculators", **verifier("org/Target")) == ""
    assert "made for org/other" in notes("speculators", **verifier("org/other"))
    assert "vLLM reads true" in notes("speculators", norm_before_residual=None)
    assert "attention_bias" in notes("flat", attention_bias=True)
    assert "(2, 3, 3) hold one twice: as its config says" in notes("flat", **{IDS: [2, 3, 3]})


# --- CASE 7: a target whose layer i emits the constant i -----------------------------------------------------------------

MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
       "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "first_k_dense_replace": 1}  # fmt: skip
SHAPE = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 7, "num_attention_heads": 4, "num_key_value_heads": 4,
         "intermediate_size": 32, "num_experts_per_tok": 2}  # fmt: skip


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    """Returns a function that gives a target of an architecture, 7 layers, whose layer i emits the constant i."""
    made: dict[str, Target] = {}

    def load(kind: str) -> Target:
        if kind in made:
            return made[kind]
        folder = tmp_path_factory.mktemp("targets") / kind
        if kind == "qwen3_moe":
            save_tiny_target(folder)
        else:
            model: Any
            if kind == "gpt_oss":
                model = GptOssForCausalLM(GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4))
            else:
                model = DeepseekV3ForCausalLM(DeepseekV3Config(**SHAPE, **MLA, moe_intermediate_size=16))
            save_model(folder, model)
        made[kind] = Target.from_pretrained(folder, dtype="float32")
        for i, layer in enumerate(made[kind].model.get_decoder().layers):
            layer.register_forward_hook(lambda module, args, output, i=i: torch.full_like(output, i))
        return made[kind]

    return load


def outputs(*ids: int) -> dict[str, Any]:
    """The settings of SpecForge and SGLang."""
    return {"eagle_config": {IDS: list(ids), "use_aux_hidden_state": True}}


CASES = [
    ("qwen3_moe", "flat", {}, (1, 2, 3)),  # SafeAILab: entering 2, n // 2, n - 3
    ("qwen3_moe", "flat", outputs(), (1, 2, 3)),  # an empty list is none
    ("qwen3_moe", "flat", outputs(1, 2, 3), (1, 2, 3)),  # SpecForge: outputs of 1, n // 2 - 1, n - 4
    ("qwen3_moe", "flat", outputs(0, 3, 6), (0, 3, 6)),  # 6: what leaves the last layer
    ("qwen3_moe", "flat", {IDS: [2, 4, 7]}, (1, 3, 6)),  # vLLM
    ("qwen3_moe", "speculators", {}, (1, 2, 3)),
    ("qwen3_moe", "speculators", {IDS: [1, 4, 6]}, (0, 3, 5)),
    ("qwen3_moe", "speculators", {IDS: [5, 2, 3]}, (4, 1, 2)),  # in the order given
    ("deepseek_v3", "flat", {}, (1, 2, 3)),
    ("deepseek_v3", "flat", outputs(1, 3, 5), (1, 3, 5)),  # SGLang adds one only if the first is 1
    ("deepseek_v3", "flat", outputs(2, 4, 6), (1, 3, 5)),
    ("deepseek_v3", "speculators", {IDS: [1, 3, 5]}, (0, 2, 4)),  # top level: never shifted
    ("gpt_oss", "flat", outputs(1, 3, 5), (1, 3, 5)),
    ("gpt_oss", "flat", outputs(2, 4, 7), (1, 3, 6)),  # SGLang adds none if the largest is the layer count
    ("gpt_oss", "speculators", {IDS: [2, 4, 7]}, (1, 3, 6)),
]


@pytest.mark.parametrize(("kind", "layout", "settings", "emitted"), CASES)
def test_each_formats_ids_capture_the_right_layers(
    make: Make, counting: Callable[[str], Target], kind: str, layout: str, settings: dict[str, Any],
    emitted: tuple[int, ...],
) -> None:  # fmt: skip
    target = counting(kind)
    drafter: Any = load_drafter(make(layout, **settings), target)
    tokens = torch.tensor([5, 6, 7])
    out = target.forward(tokens, torch.arange(3), None, target.new_cache(), aux_layers=drafter.aux_layers)
    assert out.aux is not None
    captured = out.aux.view(3, 3, 32)  # position, layer, state
    expected = torch.tensor(emitted, dtype=torch.float32)[None, :, None].expand(3, 3, 32)
    assert torch.equal(captured, expected)
    drafter.extend(drafter.start(), tokens, out.aux)  # and the head takes them


@pytest.mark.parametrize(
    ("layers", "ids"), [(7, (2, 3, 4)), (6, (2, 3, 3)), (5, (2, 2, 2)), (4, (2, 2, 1)), (3, (2, 1, 0))]
)
def test_default_layers_of_a_small_target_may_coincide(layers: int, ids: tuple[int, ...]) -> None:
    assert entering_layers({}, "qwen3_moe", layers, "config.json") == ids


def test_a_target_with_no_such_layers_is_named() -> None:
    with pytest.raises(UserError, match="the default, as the config has no"):
        entering_layers({}, "qwen3_moe", 2, "config.json")


def test_layers_that_coincide_draft_and_are_noted(make: Make, tmp_path: Path) -> None:
    target = Target.from_pretrained(save_tiny_target(tmp_path / "small", num_hidden_layers=5), dtype="float32")
    drafter: Any = load_drafter(make("flat"), target)
    assert "(2, 2, 2) hold one twice: the default ids coincide" in drafter.notes[0]
    engine = Engine(target, drafter)
    config = GenerationConfig(max_new_tokens=12, eos_token_id=())
    texts = [
        [t.id for t in each.generate([5, 6], config)] for each in (engine, engine.with_policy("confidence:budget=4"))
    ]
    assert texts[0] == texts[1]
