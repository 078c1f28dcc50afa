"""Train a small reference of another architecture on what the first reference says.

    python -m pipelines.reference.distill --family pipelines/reference/families/gpt-oss.yaml --corpus runs/reference/corpus \
        --own runs/reference/own.npy --out runs/reference/gpt-oss/target

The student starts with the teacher's weights as far as they fit (see `inherit.py`) and learns the teacher's distribution and,
ever less, its hidden states. Every fourth step is on the teacher's own text. Where the router has a bias that balances the
load, it is moved (`balance.py`); elsewhere the auxiliary loss of `target.py` serves.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from pipelines.reference.balance import BiasBalance
from pipelines.reference.head import OwnText
from pipelines.reference.inherit import inherit
from pipelines.reference.target import (
    BALANCE,
    TargetModule,
    Windows,
    arguments,
    balance_loss,
    fuse,
    load_target,
    prepare,
    train,
)

TEACHER = Path("pipelines/reference/model/target")
OWN_EVERY = 4  # steps from one on the teacher's own text to the next
MEASURED = 16  # windows that decide what is inherited


def new_student(family: Path) -> Any:
    """A model of the architecture that a family's file describes, with random weights."""
    about = yaml.safe_load(family.read_text())
    config = AutoConfig.for_model(about["model_type"], **about["config"])
    config.use_cache = False
    config._experts_implementation = "reference_sorted"
    return AutoModelForCausalLM.from_config(config)


class DistillModule(TargetModule):
    """`TargetModule` that learns from a teacher of the same width and depth instead of the text."""

    def __init__(self, model: Any, teacher: Any, minutes: float, lr: float, own: Path):
        super().__init__(model, minutes, lr)
        if self.fused:
            fuse(teacher)
        self._frozen = (teacher.eval().requires_grad_(False),)  # in a tuple: not a submodule, not synchronised
        self.own_path, self.own = own, None
        self.steps = 0
        self.bias = BiasBalance(model)

    def on_fit_start(self) -> None:
        """Open the teacher's own text; each process draws its own."""
        self.own = OwnText(self.own_path, self.global_rank)

    def losses(self, batch: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy against the teacher, distance of the hidden states, balance."""
        self.steps += 1
        if self.own is not None and self.steps % OWN_EVERY == 0:
            batch = self.own.batch(batch.numel())
        ids_BT, teacher = batch[:, :-1], self._frozen[0]
        with torch.no_grad():
            taught = teacher.model(input_ids=ids_BT, output_hidden_states=True, use_cache=False)
            probabilities = teacher.lm_head(taught.last_hidden_state).softmax(-1).flatten(0, 1)
        biased = bool(self.bias.routers)
        out = self.model.model(
            input_ids=ids_BT, output_hidden_states=True, output_router_logits=not biased, use_cache=False
        )
        logits = self.model.lm_head(out.last_hidden_state).flatten(0, 1)
        cross_entropy = F.cross_entropy(logits, probabilities)
        apart = torch.stack(
            [
                (s - t).pow(2).sum() / t.pow(2).sum()
                for s, t in zip(out.hidden_states[1:], taught.hidden_states[1:], strict=True)
            ]
        ).mean()
        loss = cross_entropy + (1 - self.progress()) * apart
        if biased:
            loads = self.bias.step()
        else:
            auxiliary = balance_loss(out.router_logits, self.model.config.num_experts_per_tok)
            loss, loads = loss + BALANCE * auxiliary, auxiliary.item()
        with torch.no_grad():
            plain = F.cross_entropy(logits, batch[:, 1:].flatten()).item()
        return loss, {"loss": cross_entropy.item(), "text": plain, "apart": apart.item(), "balance": loads}


def main() -> None:
    """Command line entry; see the module docstring."""
    parser = arguments(str(__doc__).split("\n")[0], minutes=50, batch=8, lr=3e-3)
    parser.add_argument("--family", type=Path, required=True, help="YAML of the architecture")
    parser.add_argument("--teacher", type=Path, default=TEACHER)
    parser.add_argument("--own", type=Path, required=True, help="the teacher's own text, `own_text.py`'s output")
    args = parser.parse_args()
    prepare(args)
    teacher = load_target(args.teacher)
    if args.init:
        student = load_target(args.init)
    else:
        student = new_student(args.family)
        windows = Windows(args.corpus / "train.npy", args.seed)
        inherit(student, teacher, torch.stack([windows[-1 - i] for i in range(MEASURED)]))
    train(args, DistillModule(student, teacher, args.minutes, args.lr, args.own))


if __name__ == "__main__":
    main()
