#!/usr/bin/env bash
# Runs a command with Docker Engine and Compose v2: tools/container_engine/with_engine.sh make stack-pages
#
# An engine that answers is used. Otherwise, as root on Debian, a private one is started. It listens on a socket in a
# directory of its own, sets no rule of a firewall, and has ended when this ends, with its containers and images. Debian
# 12 has no Compose v2: the programs are those of Debian 13, unpacked there. The system gets what they call: runc, tini,
# iptables, iproute2. Networks of its containers have no way out, so images are built on the host's network
# (BUILD_NETWORK). Beside another engine, also one without Compose v2, none is started: they would share containerd and
# the bridge docker0.
#
# Where an image of others cannot be pulled, one of Debian's packages stands for each of them (stand_ins.Dockerfile), in
# the variables that the compose file has for them.
#
# CHARONIA_ENGINE_DIR: a directory that keeps the private engine's programs, images and caches for the next time.
# Exit code: the command's; 69 where no engine or no images can be had, and the last line says why.
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,/^set/{/^#/s/^# \?//p}' "$0"; exit 64; }

HERE=$(cd "$(dirname "$0")" && pwd)
DIR=${CHARONIA_ENGINE_DIR:-$(mktemp -d "${TMPDIR:-/tmp}/charonia-engine.XXXXXX")}
mkdir -p "$DIR"
SUBNETS=172.29                                 # the private engine's networks are in this /16
STAND_IN=charonia-stand-in
declare -A STANDS_FOR=([PYTHON_IMAGE]=python [REDIS_IMAGE]=redis [HAPROXY_IMAGE]=haproxy [PROMETHEUS_IMAGE]=prometheus)
daemon=

say() { printf 'with_engine: %s\n' "$*" >&2; }
none() {
    say "$*"
    exit 69
}
answers() { docker compose version >/dev/null 2>&1 && docker version >/dev/null 2>&1; }

need() { # packages of this Debian; RUNLEVEL: no service is started
    local missing=() package
    for package; do
        dpkg-query -W -f='${db:Status-Status}\n' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return
    [ "$(id -u)" = 0 ] || none "only root can install ${missing[*]}"
    { apt-get update -q && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends \
        "${missing[@]}"; } > "$DIR/apt.log" 2>&1 < /dev/null || none "cannot install ${missing[*]}: $(tail -n 1 "$DIR/apt.log")"
}

mirror() { # of Debian, the one that apt already uses
    apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
        sed -n 's:^\(bookworm\|trixie\) \(.*[^/]\)/*$:\2:p' | head -n 1
}

alone() { # what there is of another engine is not to be changed, and at the end not to be taken for this one's
    local path taken
    for path in /run/docker.sock /var/run/docker.sock /run/containerd/containerd.sock /sys/class/net/docker0; do
        [ ! -e "$path" ] || none "there is $path, of another engine: give that one Compose v2, or remove it"
    done
    taken=$(ip -o -4 address show | awk -v of="$SUBNETS." 'index($4, of) == 1 {print $2 " has " $4}')
    [ -z "$taken" ] || none "the engine's addresses are taken: $taken"
}

unpack_engine() {
    [ ! -e "$DIR/programs/complete" ] || return 0
    local apt=$DIR/apt
    rm -rf "$apt" "$DIR/programs"
    mkdir -p "$apt"/{lists/partial,cache/archives/partial,sources,packages} "$DIR/programs"
    printf 'Types: deb\nURIs: %s\nSuites: trixie\nComponents: main\nSigned-By: %s\n' "$(mirror)" \
        /usr/share/keyrings/debian-archive-keyring.gpg > "$apt/sources/trixie.sources"
    local settings=(-qq -o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$apt/sources"
        -o "Dir::State::lists=$apt/lists" -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root)
    apt-get "${settings[@]}" update || none "the list of Debian 13's packages cannot be fetched"
    (cd "$apt/packages" && apt-get "${settings[@]}" download docker.io containerd docker-cli docker-compose docker-buildx) ||
        none "the engine's packages cannot be fetched"
    printf '%s\0' "$apt"/packages/*.deb | xargs -0 -P 2 -I @ dpkg-deb -x @ "$DIR/programs" || none "the engine cannot be unpacked"
    rm -rf "$apt"
    touch "$DIR/programs/complete"
}

mount_cgroups() { # where the system has not
    [ ! -e /sys/fs/cgroup/cgroup.controllers ] && ! grep -q '^cgroup .*\bdevices\b' /proc/mounts || return 0
    local one
    mount -t tmpfs -o mode=755 cgroup /sys/fs/cgroup || none "there are no cgroups, and none can be mounted"
    echo /sys/fs/cgroup >> "$DIR/mounted"
    for one in cpuset cpu cpuacct memory devices freezer blkio pids; do
        mkdir "/sys/fs/cgroup/$one"
        mount -t cgroup -o "$one" cgroup "/sys/fs/cgroup/$one" || continue # the kernel may lack it
        echo "/sys/fs/cgroup/$one" >> "$DIR/mounted"
    done
}

start_engine() {
    mkdir -p "$DIR"/{data,run,settings/cli-plugins}
    ln -sf "$DIR"/programs/usr/libexec/docker/cli-plugins/* "$DIR/settings/cli-plugins/"
    export DOCKER_HOST=unix://$DIR/docker.sock DOCKER_CONFIG=$DIR/settings BUILD_NETWORK=host
    export PATH=$DIR/programs/usr/bin:$DIR/programs/usr/sbin:$PATH:/usr/sbin:/sbin
    ! answers || none "an engine runs in $DIR already"
    # open files: a container gets what this process may have, as not every root may raise it
    dockerd -H "$DOCKER_HOST" --data-root "$DIR/data" --exec-root "$DIR/run" --pidfile "$DIR/docker.pid" \
        --iptables=false --ip6tables=false --ip-masq=false --ip-forward=false \
        --bip "$SUBNETS.250.1/24" --default-address-pool "base=$SUBNETS.0.0/17,size=24" \
        --default-ulimit "nofile=$(ulimit -Hn):$(ulimit -Hn)" > "$DIR/dockerd.log" 2>&1 < /dev/null 9>&- &
    daemon=$!
    local until=$((SECONDS + 120))
    until answers; do
        kill -0 "$daemon" 2>/dev/null && [ "$SECONDS" -lt "$until" ] || none "the engine does not start: $(tail -n 1 "$DIR/dockerd.log")"
        sleep 0.1
    done
}

clean_up() {
    trap '' INT TERM
    set +e
    if [ -n "$daemon" ]; then
        docker ps -aq | xargs -r docker rm -fv
        docker network prune -f
        kill "$daemon"
        wait "$daemon"
        ip -o -4 address show | awk -v of="$SUBNETS." 'index($4, of) == 1 {print $2}' | xargs -rn 1 ip link delete
        find /sys/fs/cgroup/docker /sys/fs/cgroup/*/docker -depth -type d -exec rmdir {} \;
        find /run/docker /run/containerd /run/runc -depth -type d -empty -delete
        grep -oE " $DIR/(data|run)/[^ ]*" /proc/mounts | sort -r | xargs -rn 1 umount
    fi > /dev/null 2>&1
    [ ! -e "$DIR/mounted" ] || { tac "$DIR/mounted" | xargs -n 1 umount; rm "$DIR/mounted"; }
    [ -n "${CHARONIA_ENGINE_DIR:-}" ] || rm -rf --one-file-system "$DIR"
}

have_images() { # of others, in the names of the compose file or of the variables
    local name image
    for name in "${!STANDS_FOR[@]}"; do
        image=${!name:-$(sed -n "s/.*\${$name:-\([^}]*\)}.*/\1/p" "$HERE/../../infra/docker-compose.yml" | head -n 1)}
        docker image inspect "$image" >/dev/null 2>&1 || timeout 300 docker pull -q "$image" >/dev/null 2> "$DIR/pull.log" || {
            say "$image cannot be pulled: $(tail -n 1 "$DIR/pull.log")"
            return 1
        }
    done
}

make_stand_ins() {
    docker image inspect "$STAND_IN" >/dev/null 2>&1 || make_debian
    local name image
    for name in "${!STANDS_FOR[@]}"; do
        image=$STAND_IN-${STANDS_FOR[$name]}
        docker build -q --target "${STANDS_FOR[$name]}" -t "$image" - < "$HERE/stand_ins.Dockerfile" >/dev/null || none "$image cannot be built"
        export "$name=$image"
    done
}

make_debian() { # it trusts whom the host trusts, as it is on the host's network that images are built
    need mmdebstrap ca-certificates
    local left_out=() path
    for path in doc man locale javascript nodejs; do left_out+=("--dpkgopt=path-exclude=/usr/share/$path/*"); done
    mmdebstrap --quiet --variant=essential --include=python3.11-venv,redis-server,haproxy,prometheus "${left_out[@]}" \
        --customize-hook='mkdir -p "$1/etc/ssl/certs" && cp /etc/ssl/certs/ca-certificates.crt "$1/etc/ssl/certs/"' \
        --customize-hook='printf "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n" > "$1/etc/pip.conf"' \
        bookworm - "$(mirror)" 2> "$DIR/debian.log" | docker import - "$STAND_IN" >/dev/null ||
        none "no image can be made of Debian's packages: $(tail -n 1 "$DIR/debian.log")"
}

trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if ! answers; then
    [ "$(id -u)" = 0 ] && command -v apt-get dpkg-query >/dev/null || none "no engine answers, and only root on Debian can start one"
    exec 9> /run/lock/charonia-engine # one at a time: networks have the same addresses
    flock -n 9 || { say "waits for another private engine to end"; flock 9; }
    need runc tini iptables iproute2
    alone
    unpack_engine
    mount_cgroups
    start_engine
    say "a private engine runs in $DIR"
fi
have_images || make_stand_ins
[ -z "$daemon" ] || docker run --rm "${PYTHON_IMAGE:-python:3.11-slim-bookworm}" python3 -c pass > "$DIR/run.log" 2>&1 ||
    none "containers do not run here: $(tail -n 1 "$DIR/run.log")"
"$@" 9>&-
