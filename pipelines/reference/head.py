"""Train the EAGLE-3 head of a reference target, with the unrolled-step loss ("training-time test").

    python -m pipelines.reference.head --corpus runs/reference/corpus --target runs/reference/target \
        --out runs/reference/head --minutes 30

Step 0 runs over every row of a window on the target's own features; step k feeds the head its pre-norm states of step k-1,
on chains that start at sampled rows. A chain's row sees the true rows up to its start and its own chain, exactly what it
will see when it drafts. Loss: cross-entropy against the target's distribution, weighted by `DECAY`^k; probability outside
the draft vocabulary is left out, so a position counts by the mass that the head can express. Writes the flat published
layout (`config.json`, `model.safetensors` in bf16) and `training.json`. `--own FILE` takes every other step on the target's
own text (see `own_text.py`). `--init DIR` continues from an earlier head.

Legend of shapes: B windows, T tokens, J = T - 1 rows, C chains, N = B*J or B*C, H hidden, V draft vocabulary, G key-value
heads, g query heads per key-value head, D head dim, k steps so far.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ecospec_runtime.drafters.eagle3 import Eagle3Head, HeadWeights, fill, rope_tables
from ecospec_runtime.drafters.eagle3_config import HeadConfig, checked_map, read_head_config, read_tensors
from pipelines.reference.muon import Muon
from pipelines.reference.target import CONTEXT, NOT_MATRICES, Snapshots, Windows, load_target, prepare

DRAFT_VOCABULARY = 2048
INTERMEDIATE = 512
DECAY = 0.9


def frequent_ids(path: Path, vocabulary: int, count: int = DRAFT_VOCABULARY) -> Tensor:
    """The `count` most frequent token ids of a token array, ascending."""
    counts = np.bincount(np.load(path, mmap_mode="r"), minlength=vocabulary)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))


def head_config(target: Any, own_embedding: bool = True) -> HeadConfig:
    """Architecture of a reference head: the target's heads, a dense MLP, an embedding of its own or the target's."""
    c = target.config
    n = c.num_hidden_layers
    return HeadConfig(
        hidden_size=c.hidden_size, target_hidden_size=c.hidden_size, heads=c.num_attention_heads,
        kv_heads=c.num_key_value_heads, head_dim=c.head_dim, intermediate_size=INTERMEDIATE, vocab_size=c.vocab_size,
        draft_vocab_size=DRAFT_VOCABULARY, aux_layers=(2, n // 2, n - 3), rope=dict(c.rope_parameters),
        max_positions=c.max_position_embeddings, eps=c.rms_norm_eps, own_embedding=own_embedding,
    )  # fmt: skip


def new_head(target: Any, ids_V: Tensor, own_embedding: bool = True) -> Eagle3Head:
    """A head whose layer starts as the identity and whose embedding and output matrix are the target's own rows."""
    head = Eagle3Head(head_config(target, own_embedding))
    for name, p in head.named_parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.02)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(p)
    with torch.no_grad():
        head.lm_head.weight.copy_(target.lm_head.weight[ids_V])
        head.norm.weight.copy_(target.model.norm.weight)
        if own_embedding:
            head.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    return head


def load_head(folder: Path, target: Any) -> tuple[Eagle3Head, Tensor]:
    """An earlier head in the flat layout, in float32, and its target ids."""
    tensors = read_tensors(folder)
    config = read_head_config(folder, SimpleNamespace(config=target.config), tensors)
    ids_V = checked_map(config, tensors, str(folder))
    head = Eagle3Head(config)
    fill(head, {k: v for k, v in tensors.items() if k not in ("d2t", "t2d")}, str(folder))
    return head, ids_V


def save_head(head: Eagle3Head, ids_V: Tensor, out: Path) -> None:
    """Write the flat published layout: `model.safetensors` in bf16 with d2t offsets and t2d, flat `config.json`."""
    out.mkdir(parents=True, exist_ok=True)
    c = head.config
    tensors = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    tensors["d2t"] = ids_V - torch.arange(len(ids_V))
    tensors["t2d"] = torch.zeros(c.vocab_size, dtype=torch.bool).index_fill_(0, ids_V, True)
    temporary = out / "model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.rename(out / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1,
        "hidden_size": c.hidden_size, "target_hidden_size": c.target_hidden_size,
        "intermediate_size": c.intermediate_size, "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim, "vocab_size": c.vocab_size, "draft_vocab_size": c.draft_vocab_size, "hidden_act": "silu",
        "rms_norm_eps": c.eps, "rope_theta": c.rope["rope_theta"], "max_position_embeddings": c.max_positions,
        "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        # ids as layer outputs here: output of layer i is what enters layer i + 1
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in c.aux_layers], "use_aux_hidden_state": True,
                         "norm_before_fc": False},
    }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2))


class Unroll:
    """Step 0 over all rows of a batch of windows, then chains; yields states and the window positions they predict.

    Row j pairs the features at position j with token j + 1 and predicts token j + 2, whose distribution the target gives
    at position j + 1.
    """

    def __init__(self, w: HeadWeights, embed_BTH: Tensor, features_BTF: Tensor, rope: tuple[Tensor, Tensor]):
        self.w, self.rope, self.embed = w, rope, embed_BTH
        self.batch, self.rows = embed_BTH.shape[0], embed_BTH.shape[1] - 1
        self.features = features_BTF[:, :-1]
        self.chain_keys: list[Tensor] = []  # per step [B, C, G, D]
        self.chain_values: list[Tensor] = []

    def first(self) -> Tensor:
        """States `[B, J, H]` of step 0: causal attention over the true rows."""
        cos, sin = (table[: self.rows] for table in self.rope)
        h = self.w.fuse(self.features)
        residual, q, k, v = self.w.layer.project(self.embed[:, 1:], h, (cos, sin))
        self.keys, self.values = k.transpose(1, 2), v.transpose(1, 2)  # [B, G, J, D]
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), self.keys, self.values, is_causal=True, enable_gqa=True
        )
        self.states = self.w.layer.finish(residual, attended.transpose(1, 2).flatten(2))
        return self.states

    def choose(self, starts_C: Tensor) -> None:
        """Start chains at these rows (the last start must leave room for every step)."""
        self.starts = starts_C
        self.h = self.states[:, starts_C]
        self.hidden_CJ = torch.arange(self.rows) > starts_C[:, None]

    def step(self, k: int) -> Tensor:
        """States `[B, C, H]` of step k of every chain: row start + k on the state of step k - 1."""
        w = self.w.layer
        groups = w.heads // w.kv_heads
        rows = self.starts + k
        rope = (self.rope[0][rows], self.rope[1][rows])
        residual, q, key, value = self.w.layer.project(self.embed[:, rows + 1], self.h, rope)
        self.chain_keys.append(key)
        self.chain_values.append(value)
        q = q.unflatten(2, (w.kv_heads, groups)).permute(0, 2, 1, 3, 4) * w.head_dim**-0.5  # [B, G, C, g, D]
        true = q.flatten(2, 3) @ self.keys.transpose(2, 3)
        true = true.unflatten(2, (-1, groups)).masked_fill(self.hidden_CJ[:, None], -torch.inf)  # [B, G, C, g, J]
        keys = torch.stack(self.chain_keys, dim=3).permute(0, 2, 1, 4, 3)  # [B, G, C, D, k]
        values = torch.stack(self.chain_values, dim=2).permute(0, 3, 1, 2, 4)  # [B, G, C, k, D]
        weights = torch.cat((true, q @ keys), dim=-1).softmax(-1)
        attended = (weights[..., : self.rows].flatten(2, 3) @ self.values).unflatten(2, (-1, groups))
        attended = attended + weights[..., self.rows :] @ values
        self.h = self.w.layer.finish(residual, attended.permute(0, 2, 1, 3, 4).flatten(2))
        return self.h


class OwnText:
    """The target's own text, drawn at random: an endless source of batches `[B, T + 1]` of as many tokens as it is asked for."""

    def __init__(self, path: Path, seed: int):
        self.ids, self.random = np.load(path, mmap_mode="r"), np.random.default_rng(seed)

    def batch(self, tokens: int) -> Tensor:
        """Windows of about `tokens` tokens in all."""
        rows = self.random.integers(len(self.ids), size=max(1, tokens // self.ids.shape[1]))
        return torch.from_numpy(self.ids[np.sort(rows)].astype(np.int64))


class DrafterModule(L.LightningModule):
    """A drafter that learns from a frozen target; trapezoidal schedule over wall-clock time. See `losses` of its kinds."""

    def __init__(
        self, target: Any, head: nn.Module, minutes: float, lr: float, steps: int, share: float, own: Path | None = None
    ):
        """`steps` unrolled steps after step 0, on a `share` of the rows as chain starts; every other batch is `own` text."""
        super().__init__()
        self.head = head
        self._frozen = (target.eval().requires_grad_(False),)  # in a tuple: not a submodule, not synchronised
        self.lr, self.seconds, self.steps, self.share = lr, minutes * 60, steps, share
        self.own_path = own
        self.own: OwnText | None = None
        self.started = time.monotonic()
        self.automatic_optimization = False
        self.seen = 0
        self.history: list[dict[str, float]] = []

    def losses(self, ids_BT: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Per unrolled step: cross-entropy per row and the share of rows whose best token is the target's best."""
        raise NotImplementedError

    def progress(self) -> float:
        """Fraction of the time budget used, as rank 0 sees it."""
        elapsed = torch.tensor((time.monotonic() - self.started) / self.seconds)
        return min(1.0, float(self.trainer.strategy.broadcast(elapsed)))

    def chain_starts(self, rows: int) -> Tensor:
        """Rows, ascending, at which chains start: the last leaves room for every step."""
        last = rows - self.steps
        return torch.randperm(last)[: max(1, int(last * self.share))].sort().values

    @staticmethod
    def compare(logits_V: Tensor, probabilities_V: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy of drafted against target distributions `[B, rows, V]`, and how often their best tokens agree."""
        loss = F.cross_entropy(logits_V.flatten(0, 1), probabilities_V.flatten(0, 1))
        with torch.no_grad():
            agree = (logits_V.argmax(-1) == probabilities_V.argmax(-1)).float().mean()
        return loss, agree

    def on_fit_start(self) -> None:
        """Open the own text; each process draws its own."""
        self.own = OwnText(self.own_path, self.global_rank) if self.own_path else None

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """One optimizer step on `[B, T + 1]` token ids, every other one of the target's own text."""
        own = self.own is not None and batch_idx % 2 == 1
        if self.own is not None and own:
            batch = self.own.batch(batch.numel())
        progress = self.progress()
        scale = min(1.0, (batch_idx + 1) / 20) * min(1.0, (1 - progress) / 0.5 + 0.01)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * scale
            optimizer.zero_grad()
        results = self.losses(batch[:, :-1])
        weights = torch.tensor([DECAY**k for k in range(len(results))])
        loss = (torch.stack([r[0] for r in results]) * weights).sum() / weights.sum()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
        self.seen += batch[:, 1:].numel() * self.trainer.world_size
        row = {"step": batch_idx, "own": own, "progress": progress, "loss": loss.item(), "tokens": self.seen,
               "seconds": time.monotonic() - self.started}  # fmt: skip
        row |= {f"agree_{k}": r[1].item() for k, r in enumerate(results)}
        self.history.append(row)
        if self.global_rank == 0 and batch_idx % 5 == 0:
            print({k: round(v, 4) for k, v in row.items()}, flush=True)
        if progress >= 1:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Muon for the layer's matrices, AdamW for embedding, output matrix, router, norms and biases."""
        matrices, rest = [], []
        for name, p in self.head.named_parameters():
            (rest if p.ndim < 2 or any(part in name for part in (*NOT_MATRICES, "lm_head")) else matrices).append(p)
        muon = Muon([{"params": matrices, "base_lr": self.lr}], lr=self.lr, weight_decay=0.01)
        groups = [{"params": rest, "base_lr": self.lr / 2}]
        adam = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), weight_decay=0.0)
        return [muon, adam]


class HeadModule(DrafterModule):
    """An EAGLE-3 head over a draft vocabulary."""

    head: Eagle3Head

    def __init__(self, target: Any, head: Eagle3Head, ids_V: Tensor, **settings: Any):
        """`settings` are those of `DrafterModule`."""
        super().__init__(target, head, **settings)
        self.ids, self._rope = ids_V, rope_tables(head.config, CONTEXT)

    @torch.no_grad()
    def teach(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """The target's features `[B, T, F]` and probabilities of draft tokens `[B, T, V]`."""
        target = self._frozen[0]
        out = target.model(input_ids=ids_BT, output_hidden_states=True, use_cache=False)
        features = torch.cat([out.hidden_states[i] for i in self.head.config.aux_layers], dim=-1)
        probabilities = target.lm_head(out.last_hidden_state).softmax(-1)[..., self.ids]
        return features, probabilities

    def losses(self, ids_BT: Tensor) -> list[tuple[Tensor, Tensor]]:
        """See `DrafterModule.losses`."""
        features, probabilities = self.teach(ids_BT)
        w = self.head.weights()
        embedding = self.head.embed_tokens if self.head.config.own_embedding else self._frozen[0].model.embed_tokens
        unroll = Unroll(w, embedding(ids_BT), features, self._rope)
        results = [self.compare(w.logits(unroll.first()), probabilities[:, 1:])]
        starts = self.chain_starts(unroll.rows)
        unroll.choose(starts)
        for k in range(1, self.steps + 1):
            results.append(self.compare(w.logits(unroll.step(k)), probabilities[:, starts + k + 1]))
        return results


def arguments(description: str, minutes: float) -> argparse.ArgumentParser:
    """Command line of a training run of a drafter, with its defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--own", type=Path, help="the target's own text, `own_text.py`'s output")
    parser.add_argument("--init", type=Path, help="continue from this drafter")
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--batch", type=int, default=4, help="windows per process and step")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="unrolled steps after the first")
    parser.add_argument("--share", type=float, default=0.5, help="share of rows that start a chain")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=1)
    return parser


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a `DrafterModule` on its command line."""
    return {name: getattr(args, name) for name in ("minutes", "lr", "steps", "share", "own")}


def train(args: argparse.Namespace, module: DrafterModule, write: Callable[[Any], None]) -> None:
    """Train as `arguments` say; `write` saves a module's drafter in `args.out`."""
    data = DataLoader(Windows(args.corpus / "train.npy", args.seed), batch_size=args.batch, drop_last=True)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.processes, strategy="ddp" if args.processes > 1 else "auto", max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Snapshots(write, args)],
    )  # fmt: skip
    trainer.fit(module, data)


def main() -> None:
    """Command line entry; see the module docstring."""
    parser = arguments(str(__doc__).split("\n")[0], minutes=30)
    parser.add_argument("--shared-embedding", action="store_true", help="a new head uses the target's embedding")
    args = parser.parse_args()
    prepare(args)
    target = load_target(args.target)
    if args.init:
        head, ids_V = load_head(args.init, target)
    else:
        ids_V = frequent_ids(args.corpus / "train.npy", target.config.vocab_size)
        head = new_head(target, ids_V, not args.shared_embedding)
    module = HeadModule(target, head, ids_V, **settings(args))
    train(args, module, lambda module: save_head(module.head, ids_V, args.out))


if __name__ == "__main__":
    main()
