#!/bin/sh
# What only a GPU can prove about resvisor, as one table. Stands in the folder that tests/gpu/build.sh makes; needs a driver and
# nothing else.
#
#   sh run.sh [--device N] [--model SIZE] [--python PYTHON] [--comfyui DIR] [--workers N] [--tmp DIR]
#
#   --device N       the device's number (default 0)
#   --model SIZE     of the large model, such as 4GiB (default 2GiB); it must fit into the temporary folder and the device
#   --python PYTHON  one with torch for this device (default: python3, if it has it); else those rows are skipped
#   --comfyui DIR    a ComfyUI whose Python is found or given; else those rows are skipped
#   --workers N      how many share one model, 2 or more (default 4)
#   --tmp DIR        where models are made (default: $TMPDIR or /tmp)
#
# Takes under 6 minutes; what would take it over that is skipped, and says so. Each row has what was expected, what was seen, and
# ok, failed or skipped with its reason; a row that fails does not end the others. Exit code: 0 = no row failed, 1 = some did,
# 77 = there is nothing to test here.
set -u

here=$(cd "$(dirname "$0")" && pwd)
device=0
model_size=2GiB
python=
comfyui=
workers=4
tmp=${TMPDIR:-/tmp}
limit_s=350
begin=$(date +%s)
service=
client=
work=

while [ $# -gt 0 ]; do
    case $1 in
        --device | --model | --python | --comfyui | --workers | --tmp)
            [ $# -gt 1 ] || { echo "run.sh: $1 wants a value" >&2; exit 2; }
            case $1 in
                --device) device=$2 ;;
                --model) model_size=$2 ;;
                --python) python=$2 ;;
                --comfyui) comfyui=$2 ;;
                --workers) workers=$2 ;;
                --tmp) tmp=$2 ;;
            esac
            shift 2
            ;;
        -h | --help)
            sed -n '2,/^set -u$/s/^# \{0,1\}//p' "$0" | sed '$d'
            exit 0
            ;;
        *)
            echo "run.sh: unknown argument '$1'; --help says what is allowed" >&2
            exit 2
            ;;
    esac
done

# ---- the table -------------------------------------------------------------------------------------------------------

# row NAME EXPECTED SEEN ok|failed|skipped [REASON]
row() {
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "$4${5:+: $5}" | tr '\n' ' ' >>"$work/table"
    echo >>"$work/table"
    printf '  %-8s %s: %s%s\n' "${4}" "$1" "$3" "${5:+ ($5)}"
}

# check NAME EXPECTED SEEN COMMAND…: ok if the command succeeds.
check() {
    c_name=$1 c_expected=$2 c_seen=$3
    shift 3
    if "$@"; then row "$c_name" "$c_expected" "$c_seen" ok; else row "$c_name" "$c_expected" "$c_seen" failed; fi
}

skip() { row "$1" "$2" "-" skipped "$3"; }

# room SECONDS: is there so much time left?
room() { [ $(($(date +%s) - begin + $1)) -lt "$limit_s" ]; }
LATE="no time was left"

finish() {
    trap - EXIT INT TERM HUP
    [ -z "$client" ] || client_end
    [ -z "$service" ] || service_stop
    if [ -s "$work/table" ]; then
        printf '\n'
        { printf 'ROW\tEXPECTED\tSEEN\tRESULT\n'; cat "$work/table"; } | awk -F '\t' '
            { sub(/ $/, "", $4); line[NR] = $0; for (i = 1; i < 4; i++) { cell[NR, i] = $i; if (length($i) > wide[i]) wide[i] = length($i) } cell[NR, 4] = $4 }
            END { for (i = 1; i < 4; i++) if (wide[i] > 56) wide[i] = 56
                for (n = 1; n <= NR; n++) printf "%-*s | %-*s | %-*s | %s\n", wide[1], cell[n, 1], wide[2], cell[n, 2], wide[3], cell[n, 3], cell[n, 4] }'
        failed=$(awk -F '\t' '$4 ~ /^failed/' "$work/table" | wc -l)
        printf '\n%s: %d rows, %d ok, %d failed, %d skipped, in %d s\n' "$conditions" "$(wc -l <"$work/table")" \
            "$(awk -F '\t' '$4 ~ /^ok/' "$work/table" | wc -l)" "$failed" "$(awk -F '\t' '$4 ~ /^skipped/' "$work/table" | wc -l)" \
            $(($(date +%s) - begin))
        code=0
        [ "$failed" -eq 0 ] || code=1
    fi
    rm -rf "$work" "$sockets"
    exit "${code:-1}"
}

# ---- numbers, JSON ---------------------------------------------------------------------------------------------------

now_ms() { awk '{ printf "%.0f", $1 * 1000 }' /proc/uptime; }
mib() { awk -v b="$1" 'BEGIN { printf "%.0f MiB", b / 1048576 }'; }
# rate BYTES MILLISECONDS
rate() { awk -v b="$1" -v t="$2" 'BEGIN { printf "%.2f GB/s", (t + 0 > 0) ? b / t / 1e6 : 0 }'; }
numbers() { grep -o "\"$1\": *-\{0,1\}[0-9]*" | sed 's/.*: *//'; }
number() { numbers "$1" | head -n 1; }
text() { grep -o "\"$1\": *\"[^\"]*\"" | head -n 1 | sed 's/^"[^"]*": *"//; s/"$//'; }
sum() { awk '{ s += $1 } END { printf "%.0f", s }'; }
# word KEY: of words KEY=VALUE
word() { tr ' ' '\n' | sed -n "s/^$1=//p" | head -n 1; }
# objects KEY VALUE: the flat JSON objects, one a line, in which KEY has that text
objects() { tr -d '\n' | tr '{}' '\n\n' | grep "\"$1\": *\"$2\""; }

# ---- resvisor --------------------------------------------------------------------------------------------------------

resvisor() { timeout 90 "$here/bin/resvisor" "$@"; }
memory() { timeout 100 "$here/bin/gpu-memory" "$@"; }
nvml_used() { memory used "$device" 2>/dev/null | word used; }

wait_for() {
    limit=$(($(now_ms) + $1 * 1000))
    shift
    until "$@"; do
        [ "$(now_ms)" -lt "$limit" ] || return 1
        sleep 0.1
    done
}

worker() { resvisor status --json 2>/dev/null | objects id "$1"; }
worker_is() { worker "$1" | text state | grep -q "^\($2\)\$"; }
# workers_ready TYPE COUNT: 0 = they are; they may also fail for good.
workers_ready() {
    i=0
    while [ "$i" -lt "$2" ]; do
        wait_for 60 worker_is "$1/$i" 'READY\|FAILED' && worker_is "$1/$i" READY || return 1
        i=$((i + 1))
    done
}
worker_is_new() { [ "$(worker "$1" | number pid)" != "$2" ] && worker_is "$1" READY; }
# One model on this device; where that reads the machine's memory, models lie on the host.
model() {
    resvisor models --json 2>/dev/null | objects name "$1" >"$work/model"
    grep "\"device\": *\"cuda" "$work/model" || head -n 1 "$work/model"
}
model_is() { model "$1" | text state | grep -q "^\($2\)\$"; }
read_so_far() { resvisor models --json 2>/dev/null | numbers read_bytes | sum; }
this_device() { resvisor devices --json 2>/dev/null | tr -d '\n' | sed 's/{ *"name"/\n&/g' | grep -F "$uuid" | head -n 1; }
device_is_settled() { this_device | text state | grep -q 'READY\|UNUSABLE\|LOST'; }
job_runs() { resvisor job "$1" --json 2>/dev/null | grep -q '"state": *"RUNNING"'; }

# service_start CONFIGURATION [--set …]: 0 = ready, and the device has been tested.
service_start() {
    config=$1
    shift
    rm -f "$work/ready"
    mkfifo "$work/ready"
    "$here/bin/resvisor" start -c "$work/$config.yaml" --ready-fd 3 "$@" 3>"$work/ready" >"$work/log" 2>&1 </dev/null &
    service=$!
    line=
    read -r line <"$work/ready"
    [ "$line" = ready ] && wait_for 60 device_is_settled
}

service_stop() {
    resvisor stop >/dev/null 2>&1 || kill -TERM "$service" 2>/dev/null
    wait "$service" 2>/dev/null
    service=
}

# Why it is not as it should be: the last line of trouble.
service_log() { { grep -a ' warning \| error ' "$work/log" || tail -n 1 "$work/log"; } | tail -n 1 | cut -c 1-240; }

# client_start MODEL: a process of nobody's that holds it; sets said. client_ask: its next answer.
client_start() {
    rm -f "$work/ask" "$work/answer"
    mkfifo "$work/ask" "$work/answer"
    "$here/bin/gpu-client" "$1" "$uuid" <"$work/ask" >"$work/answer" 2>&1 &
    client=$!
    exec 4>"$work/ask" 5<"$work/answer"
    said=$(timeout 60 sh -c 'read -r line <&5; echo "$line"')
}
client_ask() {
    echo >&4
    timeout 60 sh -c 'read -r line <&5; echo "$line"'
}
client_end() {
    exec 4>&- 5<&-
    wait "$client" 2>/dev/null
    client=
}

submit() { resvisor submit "$@" --timeout 80; }
# picture TYPE FILE [--param …]
picture() {
    type=$1
    file=$2
    shift 2
    submit "$type" --param prompt="a red house by the sea" --param seed=7 --json --out "$file" "$@" >"$work/job.json" 2>&1
}

# The error of the last picture's job, as JSON.
picture_error() { tr -d '\n' <"$work/job.json" | grep -o '"error": *{.*'; }

# ---- rows ------------------------------------------------------------------------------------------------------------

rows_self_test() {
    "$here/libexec/resvisor/resvisor-device" --self-test >"$work/self-test" 2>&1
    awk -v uuid="$uuid" '$0 ~ /GPU-/ { mine = index($0, uuid) } mine && ($3 == "ok" || $3 == "failed" || $3 == "skipped")' \
        "$work/self-test" >"$work/rows"
    [ -s "$work/rows" ] || row "self-test" "rows" "$(tail -n 1 "$work/self-test")" failed
    while read -r backend test result value unit detail; do
        seen="$value $unit${detail:+ $detail}"
        reason=
        [ "$result" = ok ] || { reason=$detail && seen=-; }
        row "self-test: $backend $test" "ok" "$seen" "$result" "$reason"
    done <"$work/rows"
}

rows_devices() {
    found=$(this_device)
    check "resvisor devices: the device's state" "READY" "$(echo "$found" | text state) $(echo "$found" | text backend)" \
        [ "$(echo "$found" | text state)" = READY ]
    row "resvisor devices: the choice and its reason" "a backend and why" "$(echo "$found" | text reason | cut -c 1-120)" ok
}

rows_times() {
    memory times "$device" 16384 >"$work/times" 2>"$work/times.err"
    [ -s "$work/times" ] || skip "import + map by size" "flat" "$(head -n 1 "$work/times.err")"
    while read -r line; do
        size=$(echo "$line" | word mib)
        vmm=$(echo "$line" | word vmm)
        ipc=$(echo "$line" | word ipc)
        name="import + map of $size MiB, beside cudaIpcOpenMemHandle"
        case $vmm$ipc in
            *failed*) row "$name" "microseconds" "VMM $vmm, IPC $ipc" failed ;;
            --) skip "$name" "microseconds" "$(grep "$size MiB" "$work/times.err" | head -n 1)" ;;
            *) row "$name" "VMM does not grow with size" "VMM $vmm us, IPC $ipc us" ok ;;
        esac
    done <"$work/times"
}

rows_survive() {
    name="VMM memory after kill -9 of its maker"
    out=$(memory survive "$device" vmm 2>&1)
    case $? in
        77) skip "$name" "the same, also imported later" "$out" ;;
        *) check "$name" "the same, also imported later" "$out" [ "$out" = "before=1 after=1 imported_later=1" ] ;;
    esac
    out=$(memory survive "$device" ipc 2>&1)
    case $? in
        0) row "IPC memory after kill -9 of its maker" "not promised" "$out" ok ;;
        77) skip "IPC memory after kill -9 of its maker" "not promised" "$out" ;;
        *) row "IPC memory after kill -9 of its maker" "not promised" "$out" failed ;;
    esac
    name="the driver's memset through a read-only mapping"
    out=$(memory read-only "$device" 2>&1)
    case $? in
        77) skip "$name" "refused" "$out" ;;
        *) check "$name" "refused" "$out" [ "$(echo "$out" | word refused)" = 1 ] ;;
    esac
}

# Loads of the large model: cold, warm; what the bus and others do is beside it.
rows_load() {
    sync "$work/models/large.safetensors" 2>/dev/null
    dd if="$work/models/large.safetensors" iflag=nocache count=0 2>/dev/null
    for how in "from the disk" "from the page cache"; do
        resvisor unload large >/dev/null 2>&1
        if resvisor load large --device "$uuid" >"$work/load" 2>&1; then
            found=$(model large)
            row "load of $model_size to the device $how" "as fast as the slower of disk and bus" \
                "$(rate "$(echo "$found" | number bytes)" "$(echo "$found" | number load_ms)")" ok
        else
            row "load of $model_size to the device $how" "as fast as the slower of disk and bus" "$(head -n 1 "$work/load")" failed
        fi
        cat "$work/models/large.safetensors" >/dev/null
    done
    name="copies from pinned memory alone"
    out=$(memory pinned "$device" 256 2>&1)
    case $? in
        77) skip "$name" "the bus" "$out" ;;
        0) check "$name" "the bus" "$(rate "$(echo "$out" | word bytes_per_second)" 1000)" [ "$(echo "$out" | word same)" = 1 ] ;;
        *) row "$name" "the bus" "$out" failed ;;
    esac
}

loader_pid() {
    for pid in $(cat /proc/"$service"/task/*/children 2>/dev/null); do
        [ "$(cat "/proc/$pid/comm" 2>/dev/null)" != resvisor-loader ] || { echo "$pid" && return 0; }
    done
    return 1
}
loader_runs() { loader_pid >/dev/null; }

rows_loader_killed() {
    resvisor unload large >/dev/null 2>&1
    before=$(nvml_used)
    resvisor load large --device "$uuid" >"$work/load" 2>&1 &
    load=$!
    name="kill -9 of the loader in a load"
    if wait_for 10 loader_runs && kill -9 "$(loader_pid)" 2>/dev/null; then
        wait "$load"
        rc=$?
        if [ "$rc" -eq 0 ]; then
            skip "$name" "a typed error, memory comes back" "the load ended before it could be killed"
        else
            after=$(nvml_used)
            wait_for 10 sh -c '[ "${1:-0}" -le $(("${2:-0}" + 67108864)) ]' - "${after:-0}" "${before:-0}"
            row "$name" "a typed error, memory comes back" "$(grep -a "^resvisor:" "$work/load" | head -n 1 | cut -c 1-100); NVML $(mib "${before:-0}") before, $(mib "${after:-0}") after" ok
        fi
    else
        wait "$load"
        skip "$name" "a typed error, memory comes back" "the load ended before it could be killed"
    fi
    resvisor load large --device "$uuid" >"$work/load" 2>&1
    check "the next load" "RESIDENT" "$(model large | text state)" model_is large RESIDENT
}

rows_supervisor_killed() {
    name="a client's memory after kill -9 of loader and supervisor"
    client_start image
    case $said in
        attached*) ;;
        *) row "$name" "every byte is the same" "$said" failed && client_end && return ;;
    esac
    check "a client's memory when the loader has ended" "every byte is the same" "$said" [ "$(client_ask)" = same ]
    kill -9 "$(resvisor status --json | tr -d '\n' | grep -o '"supervisor":.*' | number pid)"
    wait "$service"
    rc=$?
    service=
    seen=$(client_ask)
    case $said in
        *cuda-ipc*) skip "$name" "every byte is the same" "not promised with cuda-ipc; seen: $seen" ;;
        *) check "$name" "every byte is the same" "$seen; the keeper ended with $rc" [ "$seen" = same ] ;;
    esac
    client_end
}

rows_holder_killed() {
    name="kill -9 of the holder of a device with cuda-ipc"
    expected="its models are gone, then load again"
    if ! service_start alone --set "devices.$uuid.backend=cuda-ipc"; then
        row "$name" "$expected" "$(service_log)" failed
    elif [ "$(this_device | text backend)" != cuda-ipc ]; then
        skip "$name" "$expected" "$(this_device | text reason | cut -c 1-120)"
    else
        client_start image
        answer=$(client_ask)
        check "a client on cuda-ipc" "every byte is the same" "$said, $answer" [ "$answer" = same ]
        kill -9 "$(this_device | number holder_pid)"
        gone=no
        wait_for 20 model_is image 'ABSENT\|FAILED' && gone=yes
        client_end
        wait_for 60 device_is_settled
        resvisor load image --device "$uuid" >"$work/load" 2>&1
        check "$name" "$expected" "gone: $gone; then $(model image | text state)" [ "$gone$(model image | text state)" = yesRESIDENT ]
    fi
    [ -z "$service" ] || service_stop
}

# The picture by kernels on pool memory, beside the CPU's; a store by a kernel; both leave the pool as it was.
rows_pictures() {
    if [ "$kernels" != yes ] || [ ! -f "$here/lib/resvisor/executors/cuda-image.so" ]; then
        for name in "a picture by kernels on pool memory" "a kernel's store through a read-only mapping" \
            "another worker during that fault" "the pool after that fault"; do
            skip "$name" "see tests/gpu" "$no_kernels"
        done
        return
    fi
    if picture cpu "$work/cpu.png" && picture gpu "$work/gpu.png"; then
        out=$("$here/bin/gpu-picture" "$work/cpu.png" "$work/gpu.png" 2>&1)
        check "a picture by kernels on pool memory" "at most 2 of 255 from the CPU's" "$out" [ "$(echo "$out" | word most)" -le 2 ]
    else
        row "a picture by kernels on pool memory" "at most 2 of 255 from the CPU's" "$(picture_error | text message)" failed
        return
    fi
    client_start image
    submit gpu --id bystander --param prompt=x --param steps=8 --param fault=slow:500 --wait >"$work/bystander" 2>&1 &
    bystander=$!
    wait_for 20 job_runs bystander
    if [ "$(model image | text backend)" = cuda-vmm ]; then
        picture gpu "$work/store.png" --param fault=write-weights
        rc=$?
        check "a kernel's store through a read-only mapping" "the job fails with a device error" \
            "exit code $rc, $(picture_error | text name): $(picture_error | text message | cut -c 1-80)" \
            [ "$rc$(picture_error | text name)" = 5device ]
    else
        skip "a kernel's store through a read-only mapping" "the job fails with a device error" "this backend has no read-only mapping"
    fi
    wait "$bystander"
    rc=$?
    check "another worker during that fault" "its job ends well" "exit code $rc" [ "$rc" -eq 0 ]
    answer=$(client_ask)
    check "the pool after that fault" "every byte is the same" "$said, $answer" [ "$answer" = same ]
    client_end
    picture gpu "$work/again.png"
    out=$("$here/bin/gpu-picture" "$work/gpu.png" "$work/again.png" 2>&1)
    check "the picture after that fault" "the same" "$out" [ "$(echo "$out" | word most)" = 0 ]
}

# $1 workers on the large model: sets used (by NVML) and bytes (the pool's on the device).
measure_workers() {
    used=
    service_start many --set "types.many.workers=$1" || return 1
    workers_ready many "$1" || return 1
    used=$(nvml_used)
    bytes=$(this_device | number pool_bytes)
}

rows_sharing() {
    name="$workers workers on one model: the device's memory"
    expected="1.0 x the model, and a context each"
    idle=$(nvml_used)
    if ! measure_workers 1; then
        row "$name" "$expected" "one worker: $(service_log)" failed
    elif one=$used && service_stop; ! measure_workers "$workers"; then
        row "$name" "$expected" "$workers workers: $(service_log)" failed
    elif [ -z "$used" ] || [ "${bytes:-0}" -eq 0 ]; then
        skip "$name" "$expected" "nobody tells how much is used: $(memory used "$device" 2>&1 | tail -n 1)"
        rows_worker_killed
    else
        holders=0
        [ "$(this_device | text backend)" != cuda-ipc ] || holders=1 # it has a context too
        seen=$(awk -v idle="${idle:-0}" -v one="$one" -v all="$used" -v n="$workers" -v pool="$bytes" -v more="$holders" 'BEGIN {
            context = (all - one) / (n - 1); share = (all - idle - (n + more) * context) / pool
            printf "%.2f x of %.0f MiB, %.0f MiB per context", share, pool / 1048576, context / 1048576
            exit !(share > 0.9 && share < 1.15 && context < pool / 2) }')
        check "$name" "$expected" "$seen" [ $? -eq 0 ]
        rows_worker_killed
    fi
    [ -z "$service" ] || service_stop
}

rows_worker_killed() {
    victim=$(worker many/0 | number pid)
    before=$(read_so_far)
    start=$(now_ms)
    kill -9 "$victim"
    if wait_for 60 worker_is_new many/0 "$victim"; then
        took=$(($(now_ms) - start))
        check "kill -9 of a worker" "ready again, 0 bytes read" "$took ms, $(($(read_so_far) - before)) bytes read" \
            [ "$(read_so_far)" = "$before" ]
    else
        row "kill -9 of a worker" "ready again, 0 bytes read" "$(service_log)" failed
    fi
}

rows_torch() {
    if ! "$python" -c 'import torch; raise SystemExit(not torch.cuda.is_available())' 2>/dev/null; then
        skip "torch on pool memory" "bit-equal to its own load" "${python:-no Python} has no torch that sees a GPU"
        return
    fi
    for allocator in native cudaMallocAsync; do
        PYTHONPATH=$here/lib/resvisor/python RESVISOR_LIBRARY=$here/lib/libresvisor.so.1 PYTORCH_CUDA_ALLOC_CONF=backend:$allocator \
            timeout 90 "$python" "$here/compare.py" "$work/models/large.safetensors" "cuda:$device" >"$work/torch" 2>"$work/torch.err" ||
            row "torch, allocator $allocator" "it ends well" "$(tail -n 1 "$work/torch.err")" failed
        while IFS="$(printf '\t')" read -r name result seen; do
            row "$name ($allocator)" "see tests/gpu/compare.py" "$seen" "$result"
        done <"$work/torch"
    done
}

rows_comfyui() {
    name="ComfyUI --gpu-only: image, video, image"
    expected="0 bytes read, the same picture"
    if [ -z "$comfyui" ]; then
        skip "$name" "$expected" "no --comfyui DIR was given"
    elif ! room 60; then
        skip "$name" "$expected" "$LATE"
    elif [ "$kernels" != yes ]; then
        skip "$name" "$expected" "$no_kernels"
    else
        timeout $((limit_s - ($(date +%s) - begin))) "$python" "$here/comfyui/story.py" --resvisor "$here/bin/resvisor" \
            --comfyui "$comfyui" --python "$python" --tiny 1 --gpu-only --out "$work/comfyui" >"$work/story" 2>&1
        rc=$?
        grep -v '^$' "$work/story" | sed 's/^/    /'
        check "$name" "$expected" "$(grep -a 'last image read\|FAILED' "$work/story" | tail -n 1 | cut -c 1-140)" [ "$rc" -eq 0 ]
    fi
}

# ---- the run ---------------------------------------------------------------------------------------------------------

work=$(mktemp -d "$tmp/resvisor-gpu.XXXXXX") || exit 2
sockets=$(mktemp -d /tmp/rv-gpu.XXXXXX) || exit 2 # paths of sockets must be short
: >"$work/table"
conditions="nothing"
trap finish EXIT
trap 'exit 1' INT TERM HUP
export RESVISOR_RUNTIME_DIR="$sockets/run"
unset RESVISOR_CONFIG

if ! version=$("$here/bin/resvisor" version 2>&1); then
    echo "run.sh: the programs do not run here: $version" >&2
    code=77
    exit
fi
if ! found=$(memory list 2>&1) || [ -z "$(echo "$found" | grep "^device=$device ")" ]; then
    echo "run.sh: no device $device: $found" >&2
    code=77
    exit
fi
found=$(echo "$found" | grep "^device=$device ")
uuid=$(echo "$found" | word uuid)
product=$(echo "$found" | sed 's/.* name=//')
conditions="$product, compute capability $(echo "$found" | word capability), driver $(echo "$found" | word driver), $(uname -sr)"
kernels=yes
no_kernels="there is no executor cuda-image in this folder"
case $product in
    Fake*)
        kernels=no
        no_kernels="the double of the driver runs no kernels"
        ;;
esac
if [ -z "$python" ]; then
    python=$(command -v python3 || echo python3)
fi
echo "$(echo "$version" | head -n 1), $conditions"
echo "$found"

mkdir "$work/models"
make_model() { "$here/libexec/resvisor/resvisor-make-model" "$@" >>"$work/make-model" 2>&1; }
make_model image --bytes 64MiB --dtype BF16 "$work/models/image.safetensors" &&
    make_model text-encoder --bytes 32MiB --dtype F32 "$work/models/text-encoder.safetensors" &&
    make_model plain --bytes "$model_size" --dtype BF16 "$work/models/large.safetensors" ||
    { echo "run.sh: the models were not made: $(tail -n 1 "$work/make-model")" >&2; code=1; exit; }
executor=cuda-image
[ -f "$here/lib/resvisor/executors/cuda-image.so" ] || executor=$here/bin/probe.so # the others read by the CPU
cat >"$work/alone.yaml" <<YAML
model_folders: [models]
models: {image: image.safetensors, text-encoder: text-encoder.safetensors, large: large.safetensors}
YAML
{
    cat "$work/alone.yaml"
    echo "types: {many: {executor: $executor, models: [image, text-encoder, large], device: $uuid}}"
} >"$work/many.yaml"
{
    cat "$work/alone.yaml"
    echo "types:"
    echo "  gpu: {executor: $executor, models: [image, text-encoder], device: $uuid, workers: 2}"
    echo "  cpu: {executor: image, models: [image, text-encoder], device: host}"
} >"$work/two.yaml"

rows_self_test
if room 100; then rows_times; else skip "import + map by size" "flat" "$LATE"; fi
rows_survive
if service_start two && workers_ready gpu 2; then
    rows_devices
    if room 60; then rows_load; else skip "load" "GB/s" "$LATE"; fi
    rows_loader_killed
    rows_pictures
    if room 60; then rows_torch; else skip "torch on pool memory" "bit-equal" "$LATE"; fi
    rows_supervisor_killed
else
    row "resvisor starts, two workers on the device" "ready" "$(service_log)" failed
fi
[ -z "$service" ] || service_stop
if room 40; then rows_holder_killed; else skip "kill -9 of the holder" "loads again" "$LATE"; fi
if room 40; then rows_sharing; else skip "$workers workers on one model" "1.0 x" "$LATE"; fi
rows_comfyui
