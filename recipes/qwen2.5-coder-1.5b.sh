#!/bin/sh
# From an untouched base model to fast, balanced, quality, their sequential baseline and a report.
# Broken off anywhere, the same command goes on. It needs the extras train and plot.
#
#   DEVICE=cuda recipes/qwen2.5-coder-1.5b.sh     one GPU of 80 GB
#   DEVICE=cpu recipes/qwen2.5-coder-1.5b.sh      two cores, 16 GB of memory
#   SMOKE=1 DEVICE=cpu OUT=runs/smoke recipes/qwen2.5-coder-1.5b.sh     each step, on next to nothing
#
# PROMPTS is what the models are compared on, and never trained on: JSONL or AlpacaEval's JSON.
# JUDGE, an annotator of the package alpaca_eval, compares the answers with the baseline's. QUALITY
# is what stage 2 grades its samples by, such as "judge --judge-base-url URL --judge-model NAME".
# The likelihood runs everywhere, but agrees with people in only half of the pairs.
set -eu
cd "$(dirname "$0")/.."
: "${DEVICE:=cuda}" "${OUT:=runs/qwen2.5-coder-1.5b}" "${PROMPTS:=data/sync_prompts.jsonl}"
: "${MARKED=data/annotated_own.jsonl.gz}" "${LAUNCH:=pasta}" "${RANK:=8}" "${RATE:=3e-4}" "${PAIRS:=8}" "${QUALITY:=likelihood}"
if [ -z "${SMOKE:-}" ]; then
  : "${MODEL:=qwen2.5-coder-1.5b}"
  few='' steps='' own_tokens=1000 asked=320 samples=6 tokens=400
else
  : "${MODEL:=smollm2-135m}"
  MARKED='' few='--limit 4' steps='max_steps: 2,' own_tokens=48 asked=4 samples=4 tokens=48
fi
if [ "$DEVICE" = cpu ]; then
  export CUDA_VISIBLE_DEVICES=''
  : "${PACK:=1024}" "${PACKS:=4}" "${CACHE:=16384}" "${TOGETHER:=16}"
else
  : "${PACK:=4096}" "${PACKS:=1}" "${CACHE:=100000}" "${TOGETHER:=160}"
fi
engine="--device $DEVICE --cache-tokens $CACHE --max-concurrency $TOGETHER"
own() { echo "$OUT/own/$1/sequential-none/model_outputs.json"; }
step() { made=$1; shift; [ -e "$made" ] || "$@"; } # what a command makes appears whole or not at all
mkdir -p "$OUT"
cat > "$OUT/settings.yaml" <<END
sft: {epochs: 2, $steps learning_rate: $RATE, lora_rank: $RANK, warmup_steps: 15,
  max_tokens: 1024, pack_tokens: $PACK, packs_per_step: $PACKS}
preference: {rounds: 2, limit: $asked, samples: $samples, max_tokens: $tokens,
  pairs_per_step: $PAIRS, cache_tokens: $CACHE}
END
case $MODEL in */*) ;; *) pasta pull "$MODEL" ;; esac # others are folders or names on the hub

# The model's own answers. Those of the 1.5B model are marked already, by careful readers; those of
# another model are sampled here and marked by rules, and code stays plain. A longer answer than
# 1,000 tokens was cut.
if [ -z "$MARKED" ]; then
  for kind in open preference code; do
    step "$(own $kind)" pasta eval generate --model "$MODEL" $engine $few --max-tokens $own_tokens \
      --prompts data/${kind}_prompts.jsonl --method sequential=none --temperature 0.7 --out "$OUT/own/$kind"
  done
  step "$OUT/unmarked.jsonl" pasta data build --model "$MODEL" --max-total-tokens 1000 \
    "$(own open)" "$(own preference)" --out "$OUT/unmarked.jsonl"
  step "$OUT/by_rule.jsonl" pasta annotate --with structure --model "$MODEL" \
    "$OUT/unmarked.jsonl" "$OUT/by_rule.jsonl"
  MARKED="$OUT/by_rule.jsonl $(own code)"
fi
step "$OUT/rows.jsonl" pasta data build --model "$MODEL" --max-total-tokens 1000 --exclude "$PROMPTS" \
  $MARKED data/annotated_written.jsonl.gz --out "$OUT/rows.jsonl"

# Stage 1, and the baseline: the same rows with the tags taken out.
train="--model $MODEL --config $OUT/settings.yaml"
step "$OUT/sft/adapter" $LAUNCH train sft $train --data "$OUT/rows.jsonl" --out "$OUT/sft"
step "$OUT/sequential/adapter" $LAUNCH train sft $train --data "$OUT/rows.jsonl" --plain --out "$OUT/sequential"

# Stage 2: three weights of quality, over the same first samples.
first=''
for point in fast:0.5 balanced:2 quality:8; do
  out=$OUT/${point%:*}
  step "$out/adapter" $LAUNCH train preference $train --device "$DEVICE" --lambda "${point#*:}" \
    --prompts data/preference_prompts.jsonl --policy "$OUT/sft" --baseline "$OUT/sequential" \
    --quality $QUALITY --replay "$OUT/rows.jsonl" \
    ${first:+--samples-from "$first"} --out "$out"
  first=${first:-$out}
done

# Speed and, if there is a judge, quality.
pasta eval generate --model "$MODEL" $engine $few --prompts "$PROMPTS" --out "$OUT/eval" \
  --method "sequential=$OUT/sequential" --method sequential=none --method "pasta=$OUT/fast" \
  --method "pasta=$OUT/balanced" --method "pasta=$OUT/quality" ${SMOKE:+--max-tokens 48}
for name in ${JUDGE:+fast balanced quality}; do
  step "$OUT/eval/pasta-$name/$JUDGE/leaderboard.csv" alpaca_eval --annotators_config "$JUDGE" \
    --model_outputs "$OUT/eval/pasta-$name/model_outputs.json" \
    --reference_outputs "$OUT/eval/sequential-sequential/model_outputs.json"
done
pasta eval report "$OUT/eval/sequential-sequential" "$OUT/eval/sequential-none" "$OUT"/eval/pasta-* \
  --out "$OUT/report"
