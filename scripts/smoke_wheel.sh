#!/usr/bin/env bash
# Installs a wheel into an environment that has nothing else, as a user does, and runs it from a directory that is not the checkout.
# vLLM is left out: none of this needs it. `make dist` calls it; needs the package index. Env: PYTHON.
set -euo pipefail
wheel=$(realpath "${1:?usage: smoke_wheel.sh WHEEL}")
PYTHON=${PYTHON:-python3}
TORCH=2.13.0+cpu         # of the cpu extra; a plain torch brings gigabytes of CUDA

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
"$PYTHON" -m venv "$work/venv"
pip() { "$work/venv/bin/python" -m pip --disable-pip-version-check -q "$@"; }
pip install "torch==$TORCH" 2>/dev/null || pip install "torch==$TORCH" --extra-index-url https://download.pytorch.org/whl/cpu
pip install "$wheel"
pip check
cd "$work"
where=$("$work/venv/bin/python" -c 'import qlora_rl; print(qlora_rl.__file__)')
case $where in "$work"/venv/*) ;; *) echo "smoke: qlora_rl came from $where" >&2; exit 1 ;; esac
run() { "$work/venv/bin/qlora-rl" "$@"; }
run --version
run --help > /dev/null
run train --example grpo > run.toml
grep -q '^\[base\]' run.toml
mkdir model
cat > model/config.json <<'JSON'
{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128,
 "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
JSON
run plan model --gpu-memory 8 --max-length 128 > plan.txt
grep -q peak plan.txt
"$work/venv/bin/python" - <<'PY'
import qlora_rl

missing = [name for name in qlora_rl.__all__ if not hasattr(qlora_rl, name)]
assert not missing, missing
print(f"smoke: {len(qlora_rl.__all__)} public names, without vLLM")
PY
