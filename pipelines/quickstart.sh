#!/usr/bin/env bash
# `make quickstart`: a reference target through harvest, fit, profile, tune, export, bench and generate. One thread, so
# that figures do not depend on how many cores are idle. Leaves everything under runs/quickstart.
set -euo pipefail
VENV=${VENV:-.venv} MODEL=${MODEL:-pipelines/reference/model} RUN=${RUN:-runs/quickstart}
THREADS=${THREADS:-1} PROMPTS=${PROMPTS:-32} TOKENS=${TOKENS:-48} SCREEN=${SCREEN:-4}
TEXTS=${TEXTS:-400}  # prompts to learn from
SET=${SET:-}  # further key=value of the pipeline
DRAFTER="$MODEL/drafter"
[ -d "$DRAFTER" ] || DRAFTER="$MODEL/target"  # a layer in the target's checkpoint drafts
export OMP_NUM_THREADS=$THREADS TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
PYTHON="$VENV/bin/python"
export PATH="$(cd "$VENV/bin" && pwd):$PATH"
BUDGETS="2 3 4 6 8 12 24"
started=$SECONDS
step() { printf '\n== %s (%d s)\n' "$1" "$((SECONDS - started))"; }

mkdir -p "$RUN"
rm -rf "$RUN"/{target,traces*,predictor,policy,bundle,plots} "$RUN"/{profile,bench}.json

step "widen the reference target until experts are half of a plain step"
"$PYTHON" -m pipelines.reference.widen --source "$MODEL/target" --out "$RUN/target" --share 0.5

step "prompts of held-out packages: one set to learn from, another to be measured on"
"$PYTHON" -m pipelines.reference.corpus --prompts harvest --count "$TEXTS" --out "$RUN/harvest.jsonl"
"$PYTHON" -m pipelines.reference.corpus --prompts bench --count "$PROMPTS" --out "$RUN/bench.jsonl"

step "harvest, fit, profile, tune, export"
ecospec-train run pipelines/quickstart.yaml "target=$MODEL/target" "drafter=$DRAFTER" \
  "prompts=$RUN/harvest.jsonl" "out=$RUN" "profile.target=$RUN/target" $SET

step "bench: every policy on every prompt, interleaved"
policies=off
for acceptance in raw temperature; do
  for budget in $BUDGETS; do policies+=",confidence:budget=$budget,acceptance=$acceptance"; done
done
ecospec-runtime bench --bundle "$RUN/bundle" --target "$RUN/target" --prompts "$RUN/bench.jsonl" \
  --policies "$policies,ratio,prefix,utility,throughput,auto" --max-new-tokens "$TOKENS" --screen "$SCREEN" --temperature 0 --temperature 0.7 \
  --threads "$THREADS" --json "$RUN/bench.json" --plots "$RUN/plots" > "$RUN/bench.txt"

step "generate"
ecospec-runtime generate --bundle "$RUN/bundle" --target "$RUN/target" --threads "$THREADS" \
  --prompt "def fibonacci(n):" --max-new-tokens 64 --json "$RUN/generate.json"

step "done"
cat "$RUN/bench.txt"
echo "bundle: $RUN/bundle"
echo "bench:  $RUN/bench.json"
