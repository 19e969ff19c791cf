#!/usr/bin/env bash
# The prepared run, out of its pack: installs the wheels beside what this machine has, then runs the phases.
# Options are those of scripts/on-gpu: bash run --out results --phases ceilings,right
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
site="${TMPDIR:-/tmp}/paceline-on-gpu"
python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$here"/wheels/*.whl
export PYTHONPATH="$site:$here" PYTHONUNBUFFERED=1
exec python3 -P -m tools.gpu.run "$@"
