#!/usr/bin/env bash
# Makes or reuses .venv with exactly the pinned versions, and the few system packages that
# are needed. Run through `make setup`; safe to repeat, and quick when nothing has changed.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# redis-server keeps the sessions. gcc and OpenSSL's headers compile SGLang's page-key hash
# at its first start.
packages=()
command -v redis-server >/dev/null || packages+=(redis-server)
command -v g++ >/dev/null || packages+=(g++)
[ -e /usr/include/openssl/evp.h ] || packages+=(libssl-dev)
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing ${packages[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq >/dev/null && apt-get install -y -qq "${packages[@]}" >/dev/null ||
            die "apt-get could not install ${packages[*]}"
    else
        die "missing system packages; run: sudo apt-get install ${packages[*]}"
    fi
fi

python=""
for candidate in python3.11 python3.12 python3; do
    if command -v "$candidate" >/dev/null &&
        "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || die "Python 3.11 or newer with venv is needed; on Debian: sudo apt-get install python3 python3-venv"

hardware=cpu
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then hardware=gpu; fi
lists=(deploy/requirements/base.txt "deploy/requirements/$hardware.txt" deploy/requirements/dev.txt)
stamp=$(cat "${lists[@]}" pyproject.toml deploy/setup.sh | sha256sum | cut -c1-16)
if [ -x .venv/bin/baton ] && [ "$(cat .venv/baton-stamp 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

say "creating .venv with $($python --version) for $hardware (about 1.7 GB on cpu)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check --quiet)
if [ "$hardware" = cpu ]; then
    # --no-deps: SGLang asks for a CUDA build of torch and 11 GB beside it, none of which a
    # CPU needs. Every package that is needed is pinned in the lists.
    "${pip[@]}" install --no-deps -r deploy/requirements/base.txt -r deploy/requirements/dev.txt
    "${pip[@]}" install --no-deps -r deploy/requirements/cpu.txt || die "no CPU build of torch was found.
    Point pip at PyTorch's index of CPU wheels (pytorch.org, Get Started, compute platform CPU
    shows its address) and run make again:  PIP_EXTRA_INDEX_URL=<that address> make setup"
else
    "${pip[@]}" install -r deploy/requirements/gpu.txt
    "${pip[@]}" install --no-deps -r deploy/requirements/dev.txt
fi
"${pip[@]}" install --no-deps --no-build-isolation --editable .
# SGLang imports thousands of files; without bytecode its first start takes three times as long.
.venv/bin/python -m compileall -q -j 0 .venv/lib/python3*/site-packages/{sglang,transformers,torch} >/dev/null 2>&1 || true
printf '%s\n' "$stamp" >.venv/baton-stamp
say "done"
