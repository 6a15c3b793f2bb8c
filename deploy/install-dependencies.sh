#!/bin/sh
# Installs the Debian packages that resvisor needs, and only those that are missing.
#
#   deploy/install-dependencies.sh            to build resvisor and to run it (the same as --build)
#   deploy/install-dependencies.sh --run      only to run a resvisor that was built elsewhere
#   deploy/install-dependencies.sh --comfyui  to build it, and for the quick start with a ComfyUI of its own
#   deploy/install-dependencies.sh --tests    to build it, and to run tests/run.sh without ComfyUI
#   deploy/install-dependencies.sh --full-tests   the same with ComfyUI, whose page needs a browser
#
# As root it installs. As another user it names what is missing, in one line to give to root, and exits 1.
set -eu

build_packages="gcc libc6-dev cmake ninja-build pkg-config protobuf-c-compiler libprotobuf-c-dev libevent-dev
  libnanomsg-dev libyaml-dev libjansson-dev libxxhash-dev liburing-dev libpng-dev libwebp-dev libsndfile1-dev
  libopenblas-dev libmicrohttpd-dev libcurl4-openssl-dev libwslay-dev nettle-dev"
run_packages="libevent-core-2.1-7 libprotobuf-c1 libnanomsg5 libyaml-0-2 libjansson4 libxxhash0 liburing2 libpng16-16
  libwebp7 libwebpmux3 libsndfile1 libopenblas0 libmicrohttpd12 libcurl4 libwslay1 libnettle8"
comfyui_packages="python3 ca-certificates"
tests_packages="libcmocka-dev protobuf-compiler clang libclang-rt-dev $comfyui_packages curl"
browser_packages="chromium"

# The first Debian 12 build of libevent with its security fixes.
libevent_package=libevent-core-2.1-7
libevent_wanted=2.1.12-stable-8+deb12u1

usage() {
    sed -n '2,10s/^# \{0,1\}//p' "$0"
}

say() {
    printf 'install-dependencies: %s\n' "$*"
}

wanted=$build_packages
for argument in "$@"; do
    case $argument in
        --build) wanted=$build_packages ;;
        --run) wanted=$run_packages ;;
        --comfyui) wanted="$build_packages $comfyui_packages" ;;
        --tests) wanted="$build_packages $tests_packages" ;;
        --full-tests) wanted="$build_packages $tests_packages $browser_packages" ;;
        -h | --help)
            usage
            exit 0
            ;;
        *)
            say "unknown option '$argument'; allowed are --build, --run, --comfyui, --tests and --full-tests" >&2
            exit 2
            ;;
    esac
done
case $wanted in
    *python3*)
        # A Python of one's own will do as long as it can make a virtual environment.
        python3 -c 'import ensurepip, venv' >/dev/null 2>&1 || wanted="$wanted python3-venv"
        ;;
esac

if ! command -v dpkg-query >/dev/null 2>&1; then
    say "this system has no dpkg. Install what these Debian packages hold:" $wanted >&2
    exit 1
fi

# Word splitting of the package lists is meant, here and below.
installed=" $(dpkg-query -W -f='${Package}=${db:Status-Status} ' $wanted $libevent_package 2>/dev/null || true)"
missing=
for package in $wanted; do
    case $installed in
        *" $package=installed "*) ;;
        *) missing="$missing $package" ;;
    esac
done
# Old only if there is one: a fresh one comes with the packages above.
libevent_is_old() {
    version=$(dpkg-query -W -f='${Version}' $libevent_package 2>/dev/null) || return 1
    dpkg --compare-versions "$version" lt "$libevent_wanted"
}
if libevent_is_old; then
    if [ "$(id -u)" -eq 0 ]; then
        missing="$missing $libevent_package"
        case $wanted in *libevent-dev*) missing="$missing libevent-dev" ;; esac
    else
        say "note: $libevent_package is $version; ask root for $libevent_wanted or newer" >&2
    fi
fi

if [ -z "$missing" ]; then
    say "everything is there"
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    say "packages are missing, and only root can install them. Run as root:" >&2
    printf 'apt-get update && apt-get install -y --no-install-recommends%s\n' "$missing" >&2
    exit 1
fi

say "installing$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
install() {
    apt-get install -y -q --no-install-recommends $missing </dev/null >"$log" 2>&1
}
update() {
    apt-get update -q </dev/null >"$log" 2>&1
}
# The lists on the machine may be good enough; fetch new ones only if they are not.
if ! install || libevent_is_old; then
    if ! update; then
        cat "$log" >&2
        say "apt-get update failed (see above)" >&2
        exit 1
    fi
    if libevent_is_old; then
        missing="$missing $libevent_package"
        case $wanted in *libevent-dev*) missing="$missing libevent-dev" ;; esac
    fi
    if ! install; then
        cat "$log" >&2
        say "apt-get install failed (see above)" >&2
        exit 1
    fi
fi
if libevent_is_old; then
    say "note: these sources have $libevent_package $version only; $libevent_wanted has security fixes" >&2
fi
say "done"
