#!/usr/bin/env bash
# Everything that only a GPU can show, in one call of nine minutes: what the machine is, the tests marked `gpu`, the
# measurements of layers and steps (benchmarks/gpu/suite.py) and those of whole engines (benchmarks/gpu/engines.py).
#
#     benchmarks/gpu.sh [--wheels FOLDER] [--out FOLDER] [--seconds N] [--backend NAME]... [-- TESTS...]
#
# With names, only these backends are measured; with arguments after --, pytest gets these instead of all files.
# It needs no network and installs nothing into the machine's Python, which has to hold torch, triton, pytest with its
# plugins xdist and timeout, and what kvframe needs; whole models also need transformers. What is missing there can be
# brought as wheels; a folder `aot` beside them holds modules of FlashInfer that benchmarks/gpu/compile_ahead.py has
# compiled (aot/NAME/NAME.so), for compiling them takes minutes.
# All records go to one folder, benchmarks/results unless given: gpu.json, gpu.md, gpu_engines.json, gpu_engines.md,
# gpu_tests.json (which tests ran; the next run begins with the others), gpu_tests.txt and gpu_machine.txt. The last
# thing printed is one table of aims and figures.
set -u
seconds=520 # of the whole call: a third of them at most for tests, a third for layers, the rest for engines
LAST=20     # seconds that the last case may take, with all that is compiled for it
cd "$(dirname "$0")/.." || exit 2
root=$PWD wheels="" out="" python=${PYTHON:-python3} tests=() backends=()
while [ $# -gt 0 ]; do
    case $1 in
        --wheels) wheels=$(realpath "$2") || exit 2; shift 2 ;;
        --seconds) seconds=$2; shift 2 ;;
        --backend) backends+=(--backend "$2"); shift 2 ;;
        --) shift; tests=("$@"); break ;;
        --out) mkdir -p "$2" && out=$(realpath "$2") || exit 2; shift 2 ;;
        *) sed -n '2,16s/^# \{0,1\}//p' "benchmarks/gpu.sh"; [ "$1" = --help ]; exit $? ;;
    esac
done
processes() { # as many as there are cores, this many at most
    local cores
    cores=$(nproc)
    echo $((cores < $1 ? cores : $1))
}
out=${out:-$root/benchmarks/results}
mkdir -p "$out"
site=$(mktemp -d) || exit 2
trap 'rm -rf "$site"' EXIT
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false

if [ -n "$wheels" ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit 2
    [ -d "$wheels/aot" ] && mkdir -p "$site/flashinfer/data" && cp -r "$wheels/aot" "$site/flashinfer/data/"
fi
sources=$("$python" -m benchmarks.gpu.environment "$site") || exit 2
export PYTHONPATH="$site:$sources${PYTHONPATH:+:$PYTHONPATH}"

{
    nvidia-smi 2>&1 || echo "no nvidia-smi"
    "$python" -m torch.utils.collect_env 2>&1
    "$python" -m kvframe plugins 2>&1
} > "$out/gpu_machine.txt"

echo "== tests marked gpu"
# Only the files that have some: the others may need what the machine lacks. Most of their time goes to compiling kernels.
# The signal lets pytest say what failed, and what did not begin, before the time was over.
[ ${#tests[@]} -gt 0 ] || mapfile -t tests < <(grep -rl 'pytest[.]mark[.]gpu' --include='test_*.py' tests kernels plugins | sort)
PYTHONPATH="$root:$PYTHONPATH" OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 timeout -s INT -k 10 $((seconds / 3)) \
    "$python" -m pytest -p benchmarks.gpu.tested --gpu-record "$out/gpu_tests.json" -m gpu -q -rs --durations 20 \
    -n "$(processes 16)" --dist load --maxschedchunk 1 --continue-on-collection-errors \
    -W default -p no:cacheprovider --timeout 200 "${tests[@]}" 2>&1 | tee "$out/gpu_tests.txt" | tail -60
tested=${PIPESTATUS[0]}

echo "== layers and steps"
left=$((seconds * 2 / 3 - SECONDS))
timeout -k 5 "$left" "$python" -m benchmarks.gpu.suite --budget $((left - LAST)) --results "$out" "${backends[@]}"
measured=$?

echo "== engines"
left=$((seconds - SECONDS))
timeout -k 5 "$left" "$python" -m benchmarks.gpu.engines --budget $((left - 2 * LAST)) --results "$out"
served=$?

"$python" -m benchmarks.gpu.summary --results "$out"
echo "== tests: $tested (5: there are none, 2 or 124: out of time), layers: $measured, engines: $served; results in $out"
[ "$tested" -eq 0 ] && [ "$measured" -eq 0 ] && [ "$served" -eq 0 ]
