"""Published shapes of the three seed models, the sizes that are timed, and published figures of four chips."""

from __future__ import annotations

from typing import NamedTuple

from ecospec_kernels.expert_mlp.reference import SWIGLU, Gate

ROWS = (1, 4, 8, 16, 64)  # of a verification pass
CONTEXTS = (1024, 32768)  # cached tokens before it


class Model(NamedTuple):
    """What the ops see of a model; values of its published config.json."""

    name: str
    hidden: int
    experts: int
    top_k: int
    units: int  # of an expert
    layers: int  # with experts
    heads: int
    groups: int  # key-value heads
    width: int  # of a head's keys
    value_width: int
    vocabulary: int
    gate: Gate = SWIGLU
    transposed: bool = False  # experts stored [E, D, 2M] and [E, M, D], with biases
    sinks: bool = False
    window: int = 0  # keys that every other layer sees; 0: all
    routing_groups: tuple[int, int] = (1, 1)  # groups of experts, and of them those that a token may use


QWEN3 = Model("Qwen3-235B-A22B", 4096, 128, 8, 1536, 94, 64, 4, 128, 128, 151936)
GPT_OSS = Model(
    "GPT-OSS-120B", 2880, 128, 4, 2880, 36, 64, 8, 64, 64, 201088, Gate(True, 1.702, 7.0, 1.0), True, True, 128
)
# Attention in its latent form: 128 heads share one key of 512 + 64 numbers, whose first 512 are the value.
DEEPSEEK = Model("DeepSeek-V3.1", 7168, 256, 8, 2048, 58, 128, 1, 576, 512, 129280, routing_groups=(8, 4))
MODELS = (QWEN3, GPT_OSS, DEEPSEEK)
PREDICTOR_WIDTH = 512  # of the predictor's trunk for targets of this size


class Chip(NamedTuple):
    """Published peaks: memory, dense bf16 products, float32 on vector units; and what the estimate of `select_nodes` needs of one processor."""

    name: str
    bytes_per_second: float
    flops_per_second: float
    float32_per_second: float
    clock: float  # Hz
    cache: int  # first-level cache, bytes
    cache_rate: int  # bytes per clock that a processor loads from its caches
    popcounts: int  # per clock
    operations: int  # other integer operations per clock


# NVIDIA A100, H100 and H200 data sheets, CUDA C++ Programming Guide (throughput of native arithmetic instructions);
# AMD Instinct MI300X data sheet, CDNA 3 white paper. Clocks: A100 and MI300X the published boost, the others below it (1.98).
CHIPS = (
    Chip("A100 80GB", 2.04e12, 312e12, 19.5e12, 1.41e9, 192 << 10, 128, 16, 64),
    Chip("H100 SXM", 3.35e12, 989e12, 67e12, 1.7e9, 256 << 10, 128, 16, 64),
    Chip("H200", 4.8e12, 989e12, 67e12, 1.7e9, 256 << 10, 128, 16, 64),
    Chip("MI300X", 5.3e12, 1307e12, 163e12, 2.1e9, 32 << 10, 64, 64, 64),
)
