#!/usr/bin/env bash
# Runs everything that needs a GPU from a bare checkout: correctness first, then times. JSON goes to $OUT (default:
# benchmarks/results). LIMIT_S is the seconds that each of the two timed parts may take.
set -u
cd "$(dirname "$0")/.."
export PYTHONPATH=src OUT="${OUT:-$PWD/benchmarks/results}"
mkdir -p "$OUT"
limit=(${LIMIT_S:+--limit "$LIMIT_S"})
failed=0
run() { echo "== $*"; "${PYTHON:-python}" -m "benchmarks.$@" || failed=1; }
run gpu --tiny                       # each kernel against its reference
run gpu_offload "${limit[@]}"        # tokens and formats against transformers, then the link, peers, a model that fits
run gpu "${limit[@]}"                # kernels' times beside rivals, and the table of inflection points
exit $failed
