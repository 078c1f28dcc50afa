"""Train the reference target: a Qwen3-MoE of about 17 M parameters on Python source.

    python -m pipelines.reference.target --corpus runs/reference/corpus --out runs/reference/base --minutes 55

Writes a transformers folder (`config.json`, `model.safetensors` in bf16, tokenizer) and `training.json`. `--init DIR`
continues from an earlier run. Legend of shape suffixes: B sequences, T positions, N = B*T tokens, K top-k, E experts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from pipelines.reference.corpus import END_OF_TEXT, VOCABULARY
from pipelines.reference.muon import Muon

CONTEXT = 512
BALANCE = 0.03  # weight of the auxiliary loss
NOT_MATRICES = ("embed", "mlp.gate.", "mlp.router.", "bias")  # names of parameters that Muon is not for


def sorted_experts(self: nn.Module, hidden_ND: Tensor, index_NK: Tensor, weight_NK: Tensor) -> Tensor:
    """Experts function for training on a CPU: tokens sorted by expert, one matrix product per touched expert."""
    order = index_NK.flatten().argsort()
    token = order // index_NK.size(1)
    counts = torch.bincount(index_NK.flatten(), minlength=self.num_experts).tolist()
    gate_up, down = self.gate_up_proj, self.down_proj
    if self.is_transposed:
        gate_up, down = gate_up.mT, down.mT
    matrices = list(zip(gate_up.unbind(), down.unbind(), strict=True))
    biases = [(None, None)] * len(matrices)
    if self.has_bias:
        biases = list(zip(self.gate_up_proj_bias.unbind(), self.down_proj_bias.unbind(), strict=True))
    outputs = []
    for expert, x in enumerate(hidden_ND[token].split(counts)):
        if counts[expert]:
            (first, second), (bias, last) = matrices[expert], biases[expert]
            outputs.append(F.linear(self._apply_gate(F.linear(x, first, bias)), second, last))
    unsorted = torch.cat(outputs)[order.argsort()].view(*index_NK.shape, -1)
    return (unsorted * weight_NK[..., None]).sum(1).to(hidden_ND.dtype)


ALL_EXPERTS_FUNCTIONS.register("reference_sorted", sorted_experts)


def target_config() -> Qwen3MoeConfig:
    """Architecture of the reference target."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=256, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, num_experts=48, num_experts_per_tok=4, moe_intermediate_size=56, intermediate_size=512,
        norm_topk_prob=True, max_position_embeddings=4096, rope_theta=10000.0, tie_word_embeddings=True,
        output_router_logits=False, use_cache=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    config._experts_implementation = "reference_sorted"
    return config


class Windows(Dataset):  # type: ignore[type-arg]
    """Consecutive windows of `CONTEXT + 1` tokens from a token array, in a seeded order."""

    def __init__(self, path: Path, seed: int):
        self.ids = np.load(path, mmap_mode="r")
        self.order = np.random.default_rng(seed).permutation((len(self.ids) - 1) // CONTEXT)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, i: int) -> Tensor:
        start = int(self.order[i]) * CONTEXT
        return torch.from_numpy(self.ids[start : start + CONTEXT + 1].astype(np.int64))


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Switch-style auxiliary loss, per layer and then averaged: 1 when perfectly balanced."""
    losses = []
    for logits_NE in router_logits:
        probs_NE = logits_NE.float().softmax(-1)
        chosen = torch.bincount(probs_NE.topk(top_k).indices.flatten(), minlength=logits_NE.size(-1))
        share_E = chosen / chosen.sum()
        losses.append(logits_NE.size(-1) * (share_E * probs_NE.mean(0)).sum())
    return torch.stack(losses).mean()


def load_target(folder: Path) -> Any:
    """A saved target in float32, to be trained or learned from."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config._experts_implementation = "reference_sorted"
    return model


def fuse(model: Any) -> None:
    """Compile attention and norms of every layer."""
    torch._dynamo.config.recompile_limit = 64
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.input_layernorm, layer.post_attention_layernorm):
            module.forward = torch.compile(module.forward)


class TargetModule(L.LightningModule):
    """Next-token training with Muon on the matrices and AdamW on the rest; trapezoidal schedule over wall-clock time."""

    fused = True  # compile what lies between the matrix products: 1.2 times the speed, after a minute

    def __init__(self, model: Any, minutes: float, lr: float = 5e-3):
        super().__init__()
        self.model = model
        if self.fused:
            fuse(model)
        self.lr, self.seconds, self.started = lr, minutes * 60, time.monotonic()
        self.automatic_optimization = False
        self.seen = 0
        self.history: list[dict[str, float]] = []

    def progress(self) -> float:
        """Fraction of the time budget used, as rank 0 sees it."""
        elapsed = torch.tensor((time.monotonic() - self.started) / self.seconds)
        return min(1.0, float(self.trainer.strategy.broadcast(elapsed)))

    def losses(self, batch: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Loss of `[B, T + 1]` token ids, and its parts for the history."""
        out = self.model(input_ids=batch[:, :-1], output_router_logits=True)
        cross_entropy = F.cross_entropy(out.logits.flatten(0, 1), batch[:, 1:].flatten())
        balance = balance_loss(out.router_logits, self.model.config.num_experts_per_tok)
        return cross_entropy + BALANCE * balance, {"loss": cross_entropy.item(), "balance": balance.item()}

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """One optimizer step on `[B, T + 1]` token ids."""
        loss, parts = self.losses(batch)
        progress = self.progress()
        scale = min(1.0, (batch_idx + 1) / 20) * min(1.0, (1 - progress) / 0.4 + 0.01)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * scale
            optimizer.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
        self.seen += batch[:, 1:].numel() * self.trainer.world_size
        row = {"step": batch_idx, "progress": progress, "tokens": self.seen, "seconds": time.monotonic() - self.started}
        row |= parts
        self.history.append(row)
        if self.global_rank == 0 and batch_idx % 5 == 0:
            print({k: round(v, 4) for k, v in row.items()}, flush=True)
        if progress >= 1:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for attention and expert matrices, AdamW for embedding, router, norms and biases."""
        matrices, rest = [], []
        for name, p in self.model.named_parameters():
            (matrices if p.ndim >= 2 and not any(part in name for part in NOT_MATRICES) else rest).append(p)
        muon = Muon([{"params": matrices, "base_lr": self.lr}], lr=self.lr)
        adam = torch.optim.AdamW(
            [{"params": rest, "base_lr": self.lr}], lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        return [muon, adam]


def saved(name: str, value: Tensor) -> Tensor:
    """A weight as it is saved: in bf16, but for router biases, whose steps that would swallow."""
    return value.detach().to(torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16)


def save_target(model: Any, corpus: Path, out: Path) -> None:
    """Write the transformers folder: bf16 safetensors, config, tokenizer."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(corpus / "tokenizer.json"),
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
    )
    state = {k: saved(k, v) for k, v in model.state_dict().items() if k != "lm_head.weight"}
    copy = type(model)(model.config).to(torch.bfloat16)
    copy.load_state_dict(state, strict=False, assign=True)
    copy.tie_weights()
    copy.config.use_cache = True
    copy.save_pretrained(out)
    tokenizer.save_pretrained(out)


class Snapshots(Callback):
    """Write the model every `minutes` and at the end, so that a killed run leaves a usable one, with `training.json`:
    the recipe and the tokens of this run and of those that it continues (`init`)."""

    def __init__(self, write: Callable[[Any], None], args: argparse.Namespace, minutes: float = 5):
        """`write` saves the module's model in `args.out`."""
        self.write, self.out, self.every, self.last = write, args.out, minutes * 60, time.monotonic()
        earlier = args.init / "training.json" if args.init else None
        self.before: dict[str, Any] = {"recipes": [], "tokens": 0}
        if earlier and earlier.exists():
            self.before |= json.loads(earlier.read_text())
        self.recipe = {k: str(v) for k, v in vars(args).items()}

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        """Save when due, on rank 0."""
        if trainer.is_global_zero and time.monotonic() - self.last > self.every:
            self.save(module)

    def on_train_end(self, trainer: L.Trainer, module: Any) -> None:
        """Save the final weights."""
        if trainer.is_global_zero:
            self.save(module)

    def save(self, module: Any) -> None:
        """Write the model and the training history."""
        self.last = time.monotonic()
        self.write(module)
        record = {"recipes": [*self.before["recipes"], self.recipe], "tokens": self.before["tokens"] + module.seen,
                  "history": module.history[::9]}  # fmt: skip
        (self.out / "training.json").write_text(json.dumps(record))


def arguments(description: str, minutes: float, batch: int, lr: float, seed: int = 0) -> argparse.ArgumentParser:
    """Command line of a training run of the target, with its defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--init", type=Path, help="continue from this target")
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--batch", type=int, default=batch, help="sequences per process and step")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--seed", type=int, default=seed)
    return parser


def prepare(args: argparse.Namespace) -> None:
    """Threads and seed of a training run."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // args.processes))
    L.seed_everything(args.seed)


def train(args: argparse.Namespace, module: TargetModule) -> None:
    """Train as `arguments` say and write the target."""
    data = DataLoader(Windows(args.corpus / "train.npy", args.seed), batch_size=args.batch, drop_last=True)
    snapshots = Snapshots(lambda module: save_target(module.model, args.corpus, args.out), args)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.processes, strategy="ddp" if args.processes > 1 else "auto", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[snapshots],
    )  # fmt: skip
    trainer.fit(module, data)


def main() -> None:
    """Command line entry; see the module docstring."""
    args = arguments(str(__doc__).split("\n")[0], minutes=55, batch=16, lr=5e-3).parse_args()
    prepare(args)
    model = load_target(args.init) if args.init else Qwen3MoeForCausalLM(target_config())
    train(args, TargetModule(model, args.minutes, args.lr))


if __name__ == "__main__":
    main()
