"""Policy trials a minute of exact replay, and its peak memory as the traces grow.

    python -m pipelines.benchmark.replay --traces DIR --predictor DIR --profile FILE [--positions 2000] [--copies 1 4]

A trial is what `ecospec-train tune` does with one policy: replay it over all positions, for `throughput` up to six times
to find its price. The policies are a fixed mix over every rule, acceptance kind and cut. Times are wall-clock and CPU time
of one thread. For each of `--copies` a process of its own scores and replays the positions repeated so many times; its peak
is that of the resident set beyond what it held with the predictor loaded and one position scored. Linux only.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ecospec_runtime.config import read_model
from ecospec_runtime.device_profile import DeviceProfile
from ecospec_runtime.errors import UserError
from ecospec_runtime.policies import parse_policies
from ecospec_runtime.predictor import Predictor
from ecospec_train.replay import ReplayRows, load_rows, replay, replay_at_best_price
from ecospec_train.traces import MANIFEST, Traces, read_manifest

BOUND = 60  # trials a minute
POLICIES = (
    "confidence:budget=2,confidence:budget=4,acceptance=temperature,confidence:budget=8,acceptance=head,"
    "confidence:budget=24,acceptance=logistic,depth=3,confidence:budget=12,acceptance=head,min_reach=0.05,"
    "ratio:budget=4,acceptance=raw,ratio:budget=4,acceptance=head,ratio:budget=9,epsilon=0.3,acceptance=logistic,depth=4,"
    "ratio:budget=6,epsilon=4,acceptance=head,min_reach=0.02,"
    "ratio:budget=16,capacity=12,penalty=2,acceptance=temperature,prefix:overlap=0.5,"
    "throughput:acceptance=raw,throughput:acceptance=head,throughput:acceptance=temperature,min_reach=0.1,"
    "throughput:acceptance=logistic,pause=0,depth=2,throughput:acceptance=head,depth=4,min_reach=0.05,"
    "throughput:acceptance=head,capacity=10,penalty=0.5,throughput:acceptance=temperature,node_experts=2,min_reach=0.02,"
    "throughput:acceptance=head,node_experts=1.5,pause=0,throughput:acceptance=logistic,node_experts=3,depth=3"
)


def main() -> None:
    """Parse, measure, print; exit code 1 if one core could not do `BOUND` trials a minute."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--predictor", type=Path, required=True)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--positions", type=int, default=2000)
    parser.add_argument("--copies", type=int, nargs="*", default=[1, 4], help="sizes for which memory is measured")
    parser.add_argument("--json", type=Path, help="write figures, and every trial's result")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    try:
        predictor = Predictor.from_folder(args.predictor, threads=1)
        profile = read_model(args.profile, DeviceProfile, "run `ecospec-train profile` again")
        if args.child:
            print(json.dumps(measure_memory(args.traces, predictor, profile)))
            return
        start = time.process_time()
        rows = load_rows(Traces(args.traces), predictor, max_positions=args.positions)
        print(
            f"{len(rows)} positions of {len(rows.prompts)} prompts; scoring took {time.process_time() - start:.1f} s CPU"
        )
        report = {"positions": len(rows), **measure_speed(rows, profile)}
        report["memory"] = [memory_of(args, copies) for copies in args.copies]
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
    for row in report["memory"]:
        print(f"{row['positions']:7d} positions: peak {row['peak_mb']:.0f} MB beyond the predictor")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(report["trials_per_cpu_minute"] < BOUND)


def measure_speed(rows: ReplayRows, profile: DeviceProfile) -> dict[str, Any]:
    """Time each policy's trial once; print one line for each and the rate over all."""
    trials, wall, cpu = [], 0.0, 0.0
    for spec in parse_policies(POLICIES):
        starts = time.perf_counter(), time.process_time()
        found, result = replay_at_best_price(spec, rows, profile)
        seconds, cpu_seconds = time.perf_counter() - starts[0], time.process_time() - starts[1]
        wall, cpu = wall + seconds, cpu + cpu_seconds
        trials.append({"policy": str(spec), "seconds": seconds, "cpu_seconds": cpu_seconds, "result": result.to_dict()})
        print(f"{seconds:6.2f} s  {cpu_seconds:6.2f} s CPU  {result.tokens_per_ms:.4f} tokens/ms  {found}", flush=True)
    rate, cpu_rate = 60 * len(trials) / wall, 60 * len(trials) / cpu
    print(f"{rate:.0f} trials a minute ({cpu_rate:.0f} by CPU time), {BOUND} wanted")
    return {"trials_per_minute": rate, "trials_per_cpu_minute": cpu_rate, "trials": trials}


def memory_of(args: argparse.Namespace, copies: int) -> dict[str, Any]:
    """Positions and peak in MB of a process that replays the first `positions` of the traces `copies` times over."""
    folder = Path(tempfile.mkdtemp(prefix="ecospec-replay-"))
    try:
        repeated(args.traces, folder, args.positions, copies)
        command = [sys.executable, "-m", "pipelines.benchmark.replay", "--child", "--traces", str(folder),
                   "--predictor", str(args.predictor), "--profile", str(args.profile)]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"replaying {copies} copies failed\n{done.stderr}")
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    finally:
        shutil.rmtree(folder)


def repeated(traces: Path, folder: Path, positions: int, copies: int) -> None:
    """Fill `folder` with traces whose shards are the first ones of `traces`, up to `positions` rows, `copies` times."""
    manifest = read_manifest(traces)
    count, shards = 0, []
    for shard in manifest.shards:
        if count < positions:
            shards.append(shard)
            count += shard.rows
    for path in traces.iterdir():
        if path.name != MANIFEST:
            (folder / path.name).symlink_to(path.resolve())
    manifest = manifest.model_copy(update={"shards": shards * copies})
    (folder / MANIFEST).write_text(manifest.model_dump_json())


def measure_memory(traces: Path, predictor: Predictor, profile: DeviceProfile) -> dict[str, Any]:
    """Peak of the resident set in MB while all rows of `traces` are scored and replayed with three policies."""
    rows = load_rows(Traces(traces), predictor, max_positions=1)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    rows = load_rows(Traces(traces), predictor)
    for spec in parse_policies("off,ratio:budget=4,throughput:acceptance=head"):
        replay(spec, rows, profile)
    return {"positions": len(rows), "peak_mb": (status("VmHWM") - before) / 1e6}


def status(key: str) -> int:
    """Bytes of a line of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


if __name__ == "__main__":
    main()
