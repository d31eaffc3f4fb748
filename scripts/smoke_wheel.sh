#!/usr/bin/env bash
# Installs a wheel (and an sdist) into an environment that has nothing else, as a user does, and runs it from a directory that is not the
# checkout: first without vLLM, then with the stack of `make setup`: doctor, demo, the example files.
# `make dist` calls it; needs the package index, and ten minutes on two idle cores. Env: PYTHON, QLORA_RL_TORCH (setup.sh).
set -euo pipefail
wheel=$(realpath "${1:?usage: smoke_wheel.sh WHEEL [SDIST]}")
sdist=${2:+$(realpath "$2")}
root=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
export QLORA_RL_TORCH=${QLORA_RL_TORCH:-2.13.0+cpu}  # of the cpu extra; a plain torch brings gigabytes of CUDA

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unset PYTHONPATH
export QLORA_RL_CACHE=$work/cache
"$PYTHON" -m venv "$work/venv"
python=$work/venv/bin/python
pip() { "$python" -m pip --disable-pip-version-check -q "$@"; }
run() { "$work/venv/bin/qlora-rl" "$@"; }
is_installed() {
  local where
  where=$("$python" -c 'import qlora_rl; print(qlora_rl.__file__)')
  case $where in "$work"/venv/*) ;; *) echo "smoke: qlora_rl came from $where" >&2; exit 1 ;; esac
}
pip install "torch==$QLORA_RL_TORCH" 2>/dev/null || pip install "torch==$QLORA_RL_TORCH" --extra-index-url https://download.pytorch.org/whl/cpu
if [ -n "$sdist" ]; then
  pip install "$sdist"
  (cd "$work" && is_installed && run --version)
fi
pip install --force-reinstall --no-deps "$wheel"
pip install "$wheel"
pip check
cd "$work"
is_installed
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
"$python" - <<'PY'
import qlora_rl

missing = [name for name in qlora_rl.__all__ if not hasattr(qlora_rl, name)]
assert not missing, missing
print(f"smoke: {len(qlora_rl.__all__)} public names, without vLLM")
PY
if run doctor > doctor.txt; then echo "smoke: doctor does not miss vLLM" >&2; exit 1; fi
grep -q '^! vllm .*not installed' doctor.txt

(cd "$root" && VENV=$work/venv PACKAGE=$wheel QLORA_RL_STACK=cpu bash scripts/setup.sh)
is_installed
run doctor
run demo --steps 5 --quiet --out demo
cp -r "$root/examples" examples
"$python" examples/grpo.py --steps 2 --out example > example.txt
"$python" -m qlora_rl.demo.tiny_model tiny > /dev/null
for method in grpo async sft dpo kto distill; do
  run train "examples/$method.toml" --set base.model=tiny --set train.max_steps=2 --set "run.dir=$method"
  test -f "$method/adapter/adapter_model.safetensors"
done
echo "smoke: doctor, demo and examples, with $("$python" --version)"
