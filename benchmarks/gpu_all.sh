#!/usr/bin/env bash
# Runs what needs a GPU from a bare checkout in under 9 minutes: stages in order of value, each with its seconds, JSON to
# $OUT (default: benchmarks/results). `gpu_all.sh all` gives the two long parts all the time that they ask for. Where two
# GPUs are there, ranks share a model on both, in 100 s more.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-$PWD/benchmarks/results}"
mkdir -p "$OUT"
failed=0
PYTHON="${PYTHON:-$(command -v python || echo python3)}"
run() {  # seconds, module, arguments
  local seconds=$1; shift
  echo "== $* ($seconds s)"
  timeout --kill-after=5 "$seconds" "$PYTHON" -m "benchmarks.$@" || { echo "== FAILED ($?): $*"; failed=1; }
}
if [ "${1:-}" = all ]; then
  run 300 gpu --tiny             # each kernel against its reference
  run 900 gpu_offload            # tokens and formats against transformers, then the link, peers, a model that fits
  run 900 gpu                    # kernels' times beside rivals, and the table of inflection points
  exit $failed
fi
run 70 gpu --tiny --limit 60 --json "$OUT/gpu-tiny.json" --ops linear_w4,linear_w8,linear_fp8,linear_nf4,experts,decode_attention,prefill_attention,attention_q,expanded_attention,sampling,kv_append_q
run 120 gpu --ops linear_w4,linear_w8,linear_fp8 --match '^M=(1|8|16|64|128) N=(4096 K=14336|28672)' --name packed --limit 110
run 80 gpu --ops experts,decode_attention,prefill_attention,attention_q,expanded_attention,sampling,dequantize_rows,kv_append_q --name cache --limit 70
more=0
[ "$(nvidia-smi --list-gpus 2>/dev/null | wc -l)" -lt 2 ] || more=100
run $((268 + more)) gpu_offload --parts tokens,ways,whole_steps,blocks,resident,ranks --match 'tokens|ways|whole_steps|planned|8B, 8 layers.*(inductor|graphs)|ranks' --limit $((258 + more))
exit $failed
