#!/bin/sh
# Runs each fuzz target of a build tree for some seconds: sh tests/fuzz/run.sh BUILD_DIR [SECONDS]
#
# Two at a time. Targets start from tests/fuzz/corpus/TARGET where there is one. What breaks a target is left in
# BUILD_DIR/fuzz-findings/TARGET/, and its log is printed.
set -eu

if [ $# -lt 1 ]; then
    echo "usage: run.sh BUILD_DIR [SECONDS]" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
build=$1
seconds=${2:-10}
memory_mib=2048
at_once=2
findings=$build/fuzz-findings
export ASAN_OPTIONS="${ASAN_OPTIONS:-allocator_may_return_null=1}"
mkdir -p "$findings"

targets=$(find "$build" -type f -name 'fuzz_*' -perm -u+x ! -name '*.*' -exec basename {} \; | sort)
if [ -z "$targets" ]; then
    echo "fuzz: no target in $build" >&2
    exit 1
fi

run_one() {
    target=$1
    program=$(find "$build" -type f -name "$target" -perm -u+x | head -n 1)
    corpus=$findings/$target/corpus
    mkdir -p "$corpus"
    set -- "$corpus"
    if [ -d "$here/corpus/$target" ]; then
        set -- "$@" "$here/corpus/$target"
    fi
    rc=0
    "$program" -max_total_time="$seconds" -rss_limit_mb=$memory_mib -timeout=10 -print_final_stats=1 \
        -artifact_prefix="$findings/$target/" "$@" >"$findings/$target/log" 2>&1 || rc=$?
    echo "$rc" >"$findings/$target/rc"
}

running=0
for target in $targets; do
    mkdir -p "$findings/$target"
    rm -f "$findings/$target/rc"
    run_one "$target" &
    running=$((running + 1))
    if [ "$running" -ge "$at_once" ]; then
        wait
        running=0
    fi
done
wait

failures=0
for target in $targets; do
    rc=$(cat "$findings/$target/rc" 2>/dev/null || echo 1)
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$findings/$target/log")
    if [ "$rc" -eq 0 ]; then
        printf 'fuzz: %-24s ok, %s inputs in %s s\n' "$target" "${runs:-?}" "$seconds"
    else
        failures=$((failures + 1))
        tail -n 60 "$findings/$target/log"
        printf 'fuzz: %-24s FAILED (exit code %s), see %s\n' "$target" "$rc" "$findings/$target"
    fi
done
[ "$failures" -eq 0 ]
