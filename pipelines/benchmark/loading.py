"""Peak memory of loading a target, over its weights' bytes in the dtype it is loaded in: `python -m pipelines.benchmark.loading`.

Each case loads a random checkpoint in the published layout in a process of its own. The peak is that of the resident set
while `Target.from_pretrained` runs, less what the process held before it: interpreter, libraries and compiled kernels,
which a target of a few kilobytes has brought in. Linux only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

BOUND = 1.15
# name -> (architecture, dtype on disk, quantised as, dtype asked for)
CASES: dict[str, tuple[str, torch.dtype, str, str]] = {
    "bfloat16": ("qwen3_moe", torch.bfloat16, "", "auto"),
    "float32": ("qwen3_moe", torch.float32, "", "auto"),
    "bfloat16 to float32": ("qwen3_moe", torch.bfloat16, "", "float32"),
    "float32 to bfloat16": ("qwen3_moe", torch.float32, "", "bfloat16"),
    "fp8 to bfloat16": ("qwen3_moe", torch.bfloat16, "fp8", "bfloat16"),
    "mxfp4 to bfloat16": ("gpt_oss", torch.bfloat16, "mxfp4", "bfloat16"),
    "mxfp4": ("gpt_oss", torch.bfloat16, "mxfp4", "mxfp4"),
}
WIDTH, EXPERTS, UNITS = 512, 32, 512
SHAPE = {"vocab_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
         "num_experts_per_tok": 4, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "moe_intermediate_size": UNITS, "intermediate_size": UNITS},
    "gpt_oss": {"num_local_experts": EXPERTS, "intermediate_size": UNITS},
}
LAYER = EXPERTS * 3 * UNITS * WIDTH * 2  # bytes of a layer's experts in bfloat16
CHILD = """
import gc, json, sys, torch
from ecospec_runtime.target import Target
def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
torch.set_num_threads(1)
Target.from_pretrained(sys.argv[3], sys.argv[2])
gc.collect()
before = status("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
target = Target.from_pretrained(sys.argv[1], sys.argv[2])
size = sum(p.nbytes for p in target.model.parameters())
print(json.dumps({"bytes": size, "peak": status("VmHWM") - before, "after": status("VmRSS") - before}))
"""


def write_checkpoint(
    folder: Path, family: str, layers: int, dtype: torch.dtype, quantized: str, width: int = WIDTH
) -> Path:
    """A random target of `layers` layers with a tokenizer of two tokens; `width` is that of its hidden states."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, **SHAPE, **FAMILIES[family], hidden_size=width, num_hidden_layers=layers, dtype=dtype
    )
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])), eos_token="a"
    ).save_pretrained(folder)
    if quantized:
        tensors = load_file(folder / "model.safetensors")
        change = as_fp8 if quantized == "fp8" else as_mxfp4
        save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        settings = json.loads((folder / "config.json").read_text())
        settings["quantization_config"] = {"quant_method": quantized, "weight_block_size": [128, 128]}
        (folder / "config.json").write_text(json.dumps(settings))
    return folder


def as_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Projections in FP8 with a scale per block of 128 x 128."""
    out = {}
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            out[name] = weight
            continue
        out[name] = (weight.float() * 1024).to(torch.float8_e4m3fn)
        out[f"{name}_scale_inv"] = torch.full([-(-n // 128) for n in weight.shape], 1 / 1024)
    return out


def as_mxfp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as random MXFP4 blocks."""
    out = {}
    for name, weight in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            out[name] = weight
            continue
        experts, columns, rows = weight.shape
        out[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        out[f"{name}_scales"] = torch.full((experts, rows, columns // 32), 119, dtype=torch.uint8)
    return out


def measure(name: str, megabytes: int) -> dict[str, Any]:
    """Bytes of the weights in memory, peak while loading and their ratio, for one case."""
    family, saved, quantized, dtype = CASES[name]
    folder = Path(tempfile.mkdtemp(prefix="ecospec-loading-"))
    try:
        write_checkpoint(folder, family, max(4, round(megabytes * 1e6 / LAYER)), saved, quantized)
        write_checkpoint(folder / "small", family, 1, saved, quantized, width=32)
        command = [sys.executable, "-c", CHILD, str(folder), dtype, str(folder / "small")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name}: loading failed\n{done.stderr}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(folder)
    return {"case": name, **result, "ratio": result["peak"] / result["bytes"]}


def main() -> None:
    """Print a table; exit code 1 if a case passes the bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=600, help="size of the experts in bfloat16")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print("| case | weights, MB | peak, MB | after, MB | peak / weights |\n|---|---|---|---|---|")
    rows = []
    for name in args.case or CASES:
        row = measure(name, args.megabytes)
        rows.append(row)
        sizes = " | ".join(f"{row[key] / 1e6:.0f}" for key in ("bytes", "peak", "after"))
        print(f"| {name} | {sizes} | {row['ratio']:.2f} |", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    if any(row["ratio"] > BOUND for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
