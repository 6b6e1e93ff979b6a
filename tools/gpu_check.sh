#!/usr/bin/env bash
# shellcheck disable=SC2329 # parts are called by name: bash gpu_check.sh --part NAME
# Checks pagedcache on a machine with a GPU and nvcc, without a network and without root.
#
#   tools/gpu_check.sh [--pycuda FILE] [--wheels FOLDER] [--limit SECONDS] [--keep FOLDER] [PART…]
#
#   --pycuda FILE     PyCUDA's wheel or sdist, where it is not installed (or PYCUDA_WHEEL=FILE)
#   --wheels FOLDER   wheels of what else is missing (or WHEELS=FOLDER), such as PyCUDA needs:
#                     pip download -d FOLDER --no-deps pytools platformdirs siphash24 mako
#   --limit SECONDS   for everything together (default 480)
#   --keep FOLDER     work there and leave it; default: a temporary folder
#   PART              only these of selftest, bench, tests, conformance, memcheck, racecheck and
#                     synccheck; what they need is built in any case
#
# Works on a copy of the checkout. PYTHON=… names the interpreter (default python3), which has NumPy,
# ml_dtypes, tqdm, Cython 3.1, setuptools 77, pytest and hypothesis, or finds them in --wheels. With
# PAGEDCACHE_CUDA_LIBRARY=FILE no library is built, else one for the GPUs that are here
# (PAGEDCACHE_CUDA_ARCH=native). BENCH_ARGS="…" replaces "store gather attend"; LEAST_PERCENT=85 is
# what store and gather must reach of a plain copy, LEAST_READ_PERCENT=80 what attend must of a read.
#
# Every part has a time limit, and a failure does not stop the next one. A table comes last; the
# exit status is 1 when anything failed.
set -uo pipefail

script=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$(basename "${BASH_SOURCE[0]}")
root=$(dirname "$(dirname "$script")")
SKIPPED=77

say() { printf '%s\n' "$*"; }

# ---- parts: each runs in a shell of its own, and its last line says how it ended -----------------

install() {
    "$PYTHON" -m pip install --quiet --no-index --no-deps --no-compile --upgrade \
        --target "$WORK/site" "$@"
}

part_pycuda() {
    local file=$PYCUDA_WHEEL wheels=()
    if [ -n "$WHEELS" ]; then
        mapfile -t wheels < <(find "$WHEELS" -name '*.whl' ! -iname 'pycuda-*')
        [ ${#wheels[@]} = 0 ] || install "${wheels[@]}" || return 1
        [ -n "$file" ] || file=$(find "$WHEELS" -iname 'pycuda-*.whl' | sort | tail -n 1)
        [ -n "$file" ] || file=$(find "$WHEELS" -iname 'pycuda-*.tar.gz' | sort | tail -n 1)
    fi
    if [ -n "$file" ]; then
        case $file in
            *.whl) ;;
            *)
                "$PYTHON" "$WORK/tree/tools/build_pycuda.py" --sdist "$file" \
                    --output "$WORK/pycuda" || return 1
                file=$(find "$WORK/pycuda" -iname 'pycuda-*.whl' | head -n 1)
                ;;
        esac
        install "$file" || return 1
    fi
    "$PYTHON" -c 'import pycuda, pycuda.driver as driver
driver.init()
names = [driver.Device(i).name() for i in range(driver.Device.count())]
print("PyCUDA", pycuda.VERSION_TEXT, "on", ", ".join(names))'
}

part_library() {
    if [ -n "${PAGEDCACHE_CUDA_LIBRARY:-}" ]; then
        say "$PAGEDCACHE_CUDA_LIBRARY was given"
        return "$SKIPPED"
    fi
    PAGEDCACHE_CUDA_ARCH=${PAGEDCACHE_CUDA_ARCH:-native} \
        "$PYTHON" "$WORK/tree/tools/build_cuda.py" -o "$WORK/libpagedcache_cuda.so"
}

part_modules() {
    cd "$WORK/tree" || return 1
    PAGEDCACHE_CUDA=off "$PYTHON" setup.py --quiet build_ext --inplace || return 1
    say "$(find pagedcache -name '*.so' ! -name 'libpagedcache*' | wc -l) modules"
}

part_selftest() { "$PYTHON" -m pagedcache selftest --device cuda; }

# pytest at the root of the copy; several processes share the GPU where pytest-xdist is installed.
in_tests() {
    cd "$WORK/tree" || return 1
    local side_by_side=()
    if "$PYTHON" -c 'import xdist' 2>/dev/null; then side_by_side=(-n "${JOBS:-4}"); fi
    "$@" "$PYTHON" -m pytest -q -p no:cacheprovider -rf "${side_by_side[@]}" "${FILES[@]}"
}

# The tests of storage, sequences and caches, on cuda:0 instead of the CPU.
part_conformance() {
    export PAGEDCACHE_TEST_DEVICE=cuda:0
    mapfile -t FILES < <(cd "$WORK/tree" && grep -lE 'cachekit|storagekit' tests/test_*.py)
    in_tests
}

part_tests() {
    FILES=(tests/cuda)
    in_tests
}

part_bench() {
    local words
    read -ra words <<<"${BENCH_ARGS:-store gather attend}"
    "$PYTHON" -m pagedcache bench --device cuda -o md "${words[@]}" | tee "$WORK/bench.md" ||
        return 1
    "$PYTHON" - "$WORK/bench.md" "${LEAST_PERCENT:-85}" "${LEAST_READ_PERCENT:-80}" <<'END'
import sys
from collections import defaultdict

least = {"store": float(sys.argv[2]), "gather": float(sys.argv[2]), "attend": float(sys.argv[3])}
shares, speeds = defaultdict(list), defaultdict(list)
for line in open(sys.argv[1], encoding="utf-8"):
    cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
    if len(cells) < 7 or cells[0] not in least or (cells[0] != "attend" and "decode" in cells[1]):
        continue
    key = cells[0], cells[2], cells[1] if cells[0] == "attend" else ""
    shares[key].append(float(cells[5]))
    speeds[key].append(float(cells[6]))
if not shares:
    sys.exit("no row of store, gather or attend was measured")
print("of the rate of a plain copy (attend: of a plain read), the slowest layout and dtype of each")
print("format, and tokens/s there (attend: keys/s):")
for key, values in shares.items():
    worst = min(range(len(values)), key=values.__getitem__)
    op, name, what = key
    low = "" if values[worst] >= least[op] else f"  below {least[op]:g} %"
    print(f"  {op:<6} {name:<8} {values[worst]:6.1f} % {1e9 / speeds[key][worst]:10.3g}/s  {what}{low}")
missed = sorted({f"{op} {name}" for (op, name, _), v in shares.items() if min(v) < least[op]})
print(f"too slow: {', '.join(missed)}" if missed else "all as fast as they must be")
sys.exit(1 if missed else 0)
END
}

# compute-sanitizer over the tests of the kernels alone. Errors of calls are the tests' own to judge.
sanitizer() {
    local log=$WORK/$1.log code found
    if ! command -v compute-sanitizer >/dev/null; then
        say "compute-sanitizer is not installed"
        return "$SKIPPED"
    fi
    FILES=("$WORK"/tree/tests/cuda/test_kernels*.py)
    in_tests compute-sanitizer --tool "$1" --error-exitcode 9 --target-processes all \
        --report-api-errors no
    code=$?
    if grep -q 'Device not supported' "$log"; then
        say "compute-sanitizer does not support this device here"
        return "$SKIPPED"
    fi
    found=$(grep -m 1 -E 'SUMMARY: [1-9][0-9]* (error|hazard)' "$log") && { say "$found"; return 1; }
    return "$code"
}

part_memcheck() { sanitizer memcheck; }
part_racecheck() { sanitizer racecheck; }
part_synccheck() { sanitizer synccheck; }

if [ "${1:-}" = --part ]; then
    "part_$2"
    exit
fi

# ---- the run -------------------------------------------------------------------------------------

export PYTHON=${PYTHON:-python3} PYCUDA_WHEEL=${PYCUDA_WHEEL:-} WHEELS=${WHEELS:-}
export PAGEDCACHE_TEST_PROFILE=${PAGEDCACHE_TEST_PROFILE:-short} PYTHONUNBUFFERED=1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
unset PAGEDCACHE_TEST_DEVICE PAGEDCACHE_TEST_INSTALLED PAGEDCACHE_CUDA PYTHONHOME

limit=480 keep="" chosen=()
while [ $# -gt 0 ]; do
    case $1 in
        --pycuda | --wheels | --limit | --keep)
            [ $# -gt 1 ] || { say "$1 needs a value" >&2; exit 2; }
            case $1 in
                --pycuda) PYCUDA_WHEEL=$2 ;;
                --wheels) WHEELS=$2 ;;
                --limit) limit=$2 ;;
                --keep) keep=$2 ;;
            esac
            shift 2
            ;;
        -h | --help) sed -n '3,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$script"; exit ;;
        selftest | bench | tests | conformance | memcheck | racecheck | synccheck)
            chosen+=("$1")
            shift
            ;;
        *) say "no part or option $1: see --help" >&2; exit 2 ;;
    esac
done
case $limit in '' | *[!0-9]*) say "--limit: $limit is no number of seconds" >&2; exit 2 ;; esac
for name in PYCUDA_WHEEL WHEELS; do
    value=${!name}
    [ -z "$value" ] && continue
    [ -e "$value" ] || { say "$name: there is no $value" >&2; exit 2; }
    export "$name=$(realpath "$value")"
done
command -v "$PYTHON" >/dev/null || { say "PYTHON: there is no $PYTHON" >&2; exit 2; }

if [ -n "$keep" ]; then
    mkdir -p "$keep" || exit 2
    WORK=$(cd "$keep" && pwd)
else
    WORK=$(mktemp -d) || exit 2
    trap 'rm -rf "$WORK"' EXIT
fi
export WORK
mkdir -p "$WORK/site" "$WORK/tree"
tar -C "$root" --exclude=./.git --exclude=./build --exclude=./dist --exclude=__pycache__ \
    --exclude='*.so' --exclude="./${WORK#"$root"/}" -cf - . | tar -C "$WORK/tree" -xf - ||
    { say "the checkout cannot be copied" >&2; exit 2; }
export PYTHONPATH="$WORK/tree:$WORK/site${PYTHONPATH:+:$PYTHONPATH}"

names=() results=() times=() details=()

note() { # NAME STATUS SECONDS DETAIL
    names+=("$1") results+=("$2") times+=("$3") details+=("$4")
    say "=== $1: $2 in $3 s"
}

# Runs one part within its time, its output going to a log. Prints status, seconds and last line.
watched() { # NAME SECONDS
    local began=$SECONDS code status left=$((limit - SECONDS)) allowed=$2 last
    [ "$allowed" -le "$left" ] || allowed=$left
    if [ "$allowed" -lt 5 ]; then
        printf 'skipped\t0\tno time is left\n'
        return
    fi
    timeout -k 5 "$allowed" bash "$script" --part "$1" >"$WORK/$1.log" 2>&1 </dev/null
    code=$?
    case $code in
        0) status=passed ;;
        "$SKIPPED") status=skipped ;;
        *) status=failed ;;
    esac
    last=$(grep -v '^[[:space:]]*$' "$WORK/$1.log" | tail -n 1 | cut -c 1-100)
    [ "$code" != 124 ] && [ "$code" != 137 ] || last="stopped after $allowed s: $last"
    printf '%s\t%s\t%s\n' "$status" $((SECONDS - began)) "$last"
}

run() { # NAME SECONDS
    wanted "$1" || return 0
    local answer
    say "=== $1"
    answer=$(watched "$1" "$2")
    cat "$WORK/$1.log" 2>/dev/null
    keep_answer "$1" "$answer"
}

keep_answer() { # NAME ANSWER
    local status seconds detail
    IFS=$'\t' read -r status seconds detail <<<"$2"
    note "$1" "$status" "$seconds" "$detail"
}

wanted() {
    [ ${#chosen[@]} = 0 ] && return
    local name
    for name in "${chosen[@]}"; do [ "$name" = "$1" ] && return; done
    return 1
}

nvidia-smi -L 2>/dev/null || say "nvidia-smi tells of no GPU"
"$PYTHON" --version

# What is compiled does not depend on each other.
builds=(pycuda library modules)
say "=== ${builds[*]}, side by side"
for name in "${builds[@]}"; do watched "$name" 240 >"$WORK/$name.answer" & done
wait
for name in "${builds[@]}"; do
    answer=$(<"$WORK/$name.answer")
    case $answer in passed*) ;; *) tail -n 40 "$WORK/$name.log" 2>/dev/null ;; esac
    keep_answer "$name" "$answer"
done
# Here, not by its part: the modules' part removes what it did not build itself.
mv "$WORK/libpagedcache_cuda.so" "$WORK/tree/pagedcache/" 2>/dev/null
"$PYTHON" -m pagedcache info || say "pagedcache cannot be started"

run selftest 60
run bench 180
run tests 120
run conformance 120
run memcheck 120
run racecheck 120
run synccheck 120

say
printf '%-12s %-8s %8s  %s\n' part result seconds detail
failed=0
for i in "${!names[@]}"; do
    printf '%-12s %-8s %8s  %s\n' "${names[$i]}" "${results[$i]}" "${times[$i]}" "${details[$i]}"
    [ "${results[$i]}" != failed ] || failed=1
done
grep -hE '^  (store|gather|attend) ' "$WORK/bench.log" 2>/dev/null
say "$SECONDS s in all"
exit "$failed"
