#!/bin/sh
# Puts all that tests/gpu/run.sh needs into one folder, which is then copied to a machine with a GPU: there a driver is enough.
#
#   sh tests/gpu/build.sh [FOLDER]        default: build/gpu in the sources; what is in it is replaced
#
# Wants what a build with tests wants (deploy/install-dependencies.sh --tests) and the CUDA Toolkit with nvcc; without nvcc the
# executor cuda-image is left out, and run.sh skips its rows. The machine with the GPU must have the same architecture and a
# glibc that is not older; run.sh says so if it is not so. Python with torch and a ComfyUI there are optional.
set -eu

root=$(cd "$(dirname "$0")/../.." && pwd)
folder=${1:-${RESVISOR_BUILD_DIR:-$root/build}/gpu}
build=${RESVISOR_BUILD_DIR:-$root/build}/gpu-build
limit_mib=64

# Libraries that are not part of glibc travel along and are found by RPATH, which counts for the libraries' libraries too; the
# environment stays as it is, for Python and ComfyUI.
places=
for place in ../lib/bundled ../../lib/bundled ../../bundled bundled; do
    places="$places:\$ORIGIN/$place"
done
flags="-Wl,--disable-new-dtags -Wl,-rpath,'${places#:}'"

cmake -S "$root" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DRESVISOR_CUDA=ON -DRESVISOR_TESTS=ON \
    -DCMAKE_EXE_LINKER_FLAGS="$flags" -DCMAKE_SHARED_LINKER_FLAGS="$flags" -DCMAKE_MODULE_LINKER_FLAGS="$flags"
executors="executor_image"
if ninja -C "$build" -t targets all | grep -q '^executor_cuda-image:'; then
    executors="$executors executor_cuda-image"
fi
cmake --build "$build" --target resvisor_program resvisor resvisor-worker resvisor-router resvisor-loader resvisor-device \
    resvisor-make-model gpu-memory gpu-client gpu-picture probe $executors

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/libexec/resvisor" "$folder/lib/bundled" "$folder/lib/resvisor/executors" \
    "$folder/lib/resvisor/python" "$folder/comfyui"
cp "$build/bin/resvisor" "$build/bin/resvisor-worker" "$build/tests/gpu-memory" "$build/tests/gpu-client" "$build/tests/gpu-picture" \
    "$build/tests/probe.so" "$folder/bin/"
for name in router loader device make-model; do
    cp "$build/libexec/resvisor/resvisor-$name" "$folder/libexec/resvisor/"
done
cp "$build/lib/libresvisor.so.1" "$folder/lib/"
for name in image cuda-image; do
    [ ! -f "$build/lib/resvisor/executors/$name.so" ] || cp "$build/lib/resvisor/executors/$name.so" "$folder/lib/resvisor/executors/"
done
find "$folder" -type f -exec strip --strip-unneeded {} +
cp -R "$root/worker/python/resvisor" "$folder/lib/resvisor/python/"
find "$folder" -name __pycache__ -type d -prune -exec rm -rf {} +
for name in story.py workflows.py tiny_models.py nodes; do
    cp -R "$root/deploy/comfyui/$name" "$folder/comfyui/"
done
cp "$root/tests/gpu/run.sh" "$root/tests/gpu/compare.py" "$folder/"

# What they load, but for glibc itself and what comes with the driver.
find "$folder/bin" "$folder/libexec" "$folder/lib" -type f ! -name '*.py' -exec ldd {} + 2>/dev/null |
    awk '$2 == "=>" && $3 ~ /^\// { print $3 }' | sort -u | while read -r library; do
    case $(basename "$library") in
        libc.so.* | libm.so.* | libdl.so.* | libpthread.so.* | librt.so.* | libresolv.so.* | ld-linux* | libresvisor.so.* | libcuda* | libnvidia*) ;;
        *) cp -L "$library" "$folder/lib/bundled/" ;;
    esac
done
find "$folder/lib/bundled" -type f -exec strip --strip-unneeded {} +

size_kib=$(du -sk "$folder" | cut -f 1)
echo "$folder: $((size_kib / 1024)) MiB"
if [ "$size_kib" -ge $((limit_mib * 1024)) ]; then
    echo "build.sh: it has $((size_kib / 1024)) MiB; at most $limit_mib MiB are allowed" >&2
    exit 1
fi
