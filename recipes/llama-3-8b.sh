#!/bin/sh
# qwen2.5-coder-1.5b.sh with the names and sizes of Llama 3 8B, on eight GPUs of 80 GB that share
# both stages. Not tried yet. Nobody has marked answers of this model: rules mark all.
set -eu
: "${OUT:=runs/llama-3-8b}"
export OUT MODEL=meta-llama/Meta-Llama-3-8B-Instruct MARKED='' RANK=16 RATE=2e-4 PACK=4096 PACKS=8 PAIRS=8
export LAUNCH='accelerate launch --config_file configs/accelerate/ddp.yaml -m pasta_decoding'
exec sh "$(dirname "$0")/qwen2.5-coder-1.5b.sh"
