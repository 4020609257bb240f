#!/usr/bin/env bash
# ssh_testbed.sh - a few "hosts" that ssh reaches, all on this machine, on loopback, without systemd.
#
#   ssh_testbed.sh install              install openssh-server and openssh-client (root; starts no service)
#   ssh_testbed.sh start   [DIR]        hosts w1, w2, ... = 127.0.0.1, 127.0.0.2, ...; repairs those that it finds
#   ssh_testbed.sh stop    [DIR]        end them, and all that was started on them
#   ssh_testbed.sh status  [DIR]        exit 0 only if every host answers
#   ssh_testbed.sh env     [DIR]        shell code:  eval "$(ssh_testbed.sh env)"; ssh -F "$SSH_TB_CONFIG" w2 hostname
#   ssh_testbed.sh clean   [DIR]        stop, then delete DIR
#   ssh_testbed.sh kill-host W [DIR]    the host crashes: SIGKILL all of it, what sessions have detached too
#   ssh_testbed.sh start-host W [DIR]   it boots again
#   ssh_testbed.sh freeze-host W [DIR]  the host hangs: SIGSTOP all of it (thaw-host: SIGCONT)
#   ssh_testbed.sh cut-host W [DIR]     its connections break: SIGKILL sshd's sessions, but nothing that they started
#   ssh_testbed.sh small-home W [DIR]   its home becomes an empty disk of 100 kB (large-home: as before; so does kill-host)
#
# DIR defaults to $SSH_TB_DIR, else ${TMPDIR:-/tmp}/ssh-testbed-<uid>. Keys, known_hosts and ssh_config are DIR's own:
# nothing in ~/.ssh or /etc/ssh is read or written. Who logs in is the user who has started it, by key only; his home on
# a host is DIR/host/W/home, or DIR/host/W/home/$TORC_TEST_HOME if the client has that variable, and a session begins
# there. ssh also passes on TORC_TEST_WORLD, a test's mark. /tmp and all else is shared.
#
# Where the kernel allows it (root, mostly), a host has a name of its own (UTS namespace), mounts of its own, and, but
# for the last one, a network of its own with nothing but a loopback interface: only what ssh forwards leads out. The
# last host, w4, shares this machine's network.
#
# Knobs, read by `start`: SSH_TB_HOSTS=4  SSH_TB_PORT=22022 (the next free one)  SSH_TB_ISOLATE=auto|none
set -euo pipefail
ME=$(basename "$0")
export PATH="$PATH:/usr/sbin:/sbin"
say() { printf '%s: %s\n' "$ME" "$*" >&2; }
die() { say "ERROR: $*"; exit 1; }

cmd=${1:-}; shift || true
W=
case $cmd in *-host | *-home) W=${1:?host name needed}; shift ;; esac
DIR=$(realpath -m -- "${1:-${SSH_TB_DIR:-${TMPDIR:-/tmp}/ssh-testbed-$(id -u)}}")
case $DIR in *[[:space:]%\"]*) die "DIR may not hold blanks, quotes or %: $DIR" ;; esac

# ---------------------------------------------------------------- processes
# A host is remembered as "pid starttime" of its listener in DIR/run/W.pid: a reused pid is never signalled.
p_start() { # starttime of a live process, else nothing; PID 1 may be slow to reap, so zombies count as gone
  local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
  s=${s##*) }; set -- $s
  [ "$1" = Z ] || [ "$1" = X ] || echo "${20}"
}
alive() {
  local pid st; { read -r pid st <"$DIR/run/$1.pid"; } 2>/dev/null || return 1
  [ -n "$pid" ] && [ -n "$st" ] && [ "$(p_start "$pid")" = "$st" ]
}
pid_of() { cut -d' ' -f1 "$DIR/run/$1.pid"; }
tree() { # the pids and all their descendants
  grep -H ^PPid: /proc/[0-9]*/status 2>/dev/null | awk -F'[/:[:blank:]]+' -v roots="$*" '
    BEGIN{n=split(roots,r);for(i=1;i<=n;i++)in_[r[i]]=1}
    {pp[$3]=$6} END{do{c=0;for(p in pp)if(!(p in in_)&&(pp[p] in in_)){in_[p]=1;c=1}}while(c);for(p in in_)if(p in pp)print p}'
}
# What sessions have started has SSH_TB_HOST=DIR:W in its environment (sshd_config's SetEnv), or, if it has cleared
# that, is still in the host's namespace. sshd itself has neither, perhaps.
session_pids() { # [W]
  local ns own
  { grep -lzE "^SSH_TB_HOST=$DIR:${1:-w[0-9]+}\$" /proc/[0-9]*/environ || true
    if [ -n "${1:-}" ] && alive "$1"; then
      ns=$(readlink "/proc/$(pid_of "$1")/ns/uts") own=$(readlink /proc/self/ns/uts)
      [ "$ns" = "$own" ] || find /proc/[0-9]*/ns/uts -maxdepth 0 -lname "uts:\\[${ns//[!0-9]/}\\]" || true
    fi; } 2>/dev/null | cut -d/ -f3 | sort -u | grep -vx $$ || true
}
host_pids() { { if alive "$1"; then tree "$(pid_of "$1")"; fi; session_pids "$1"; } | sort -u; }
sig() { local s=$1 p; shift; for p in "$@"; do kill "-$s" "$p" 2>/dev/null || true; done; }
live() { local p; for p in "$@"; do [ -z "$(p_start "$p")" ] || echo "$p"; done; }
freeze() { # the listener and sshd first, so that nobody is left to report, and again what was forked meanwhile
  local i; if alive "$1"; then sig STOP "$(pid_of "$1")"; fi
  for i in 1 2 3; do sig STOP $(host_pids "$1"); done
}
end_host() {
  local i pids
  freeze "$1"
  for i in 1 2 3 4 5; do
    pids=$(live $(host_pids "$1")); [ -n "$pids" ] || break
    sig KILL $pids
  done
  rm -f "$DIR/run/$1.pid"
}

# ---------------------------------------------------------------- packages
do_install() {
  local i log
  if command -v sshd >/dev/null && command -v ssh >/dev/null; then say "already installed"; return 0; fi
  [ "$(id -u)" = 0 ] || die "install needs root"
  made=
  if [ ! -e /usr/sbin/policy-rc.d ]; then # keeps the packages from starting a service
    printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d; chmod 755 /usr/sbin/policy-rc.d; made=1
    trap '[ -z "$made" ] || rm -f /usr/sbin/policy-rc.d' EXIT
  fi
  log=$(mktemp)
  for i in 1 2 3; do
    if { apt-get update && DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install -y --no-install-recommends \
         openssh-server openssh-client; } >"$log" 2>&1; then break; fi
    if [ "$i" = 3 ]; then tail -n 40 "$log" >&2; die "apt-get failed three times (log: $log)"; fi
    sleep $((i * 5))
  done
  rm -f "$log"
  say "installed $(ssh -V 2>&1)"
}

# ---------------------------------------------------------------- hosts
# Listens in this machine's network, and serves each connection by an sshd (-i, as inetd does) in the host's own one.
LISTENER='
import ctypes, fcntl, os, signal, socket, struct, subprocess, sys
name, address, port, isolation, *command = sys.argv[1:]
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((address, int(port)))
listener.listen(128)
if isolation != "none":
    libc = ctypes.CDLL(None, use_errno=True)
    NEWNS, NEWUTS, NEWNET = 0x20000, 0x4000000, 0x40000000
    if libc.unshare(NEWNS | NEWUTS | (NEWNET if isolation == "net" else 0)):
        sys.exit("unshare: " + os.strerror(ctypes.get_errno()))
    libc.mount(b"none", b"/", None, 0x84000, None)      # MS_REC | MS_SLAVE
    socket.sethostname(name)
    if isolation == "net":      # ifconfig lo up
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", 0x49, b""))
if command:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)      # reaps them
    while True:
        connection = listener.accept()[0]
        with connection:
            subprocess.Popen(command, stdin=connection, stdout=connection, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_DFL))
'
start_host() { # W
  local k=${1#w} isolation=$ISOLATE
  if alive "$1"; then return 0; fi
  mkdir -p "$DIR/host/$1/home"
  if [ "$isolation" = net ] && [ "$k" = "$HOSTS" ]; then isolation=uts; fi
  setsid "$PYTHON" -S -c "$LISTENER" "$1" "127.0.0.$k" "$PORT" "$isolation" "$SSHD" -i -e -f "$DIR/etc/sshd_$1" \
    >>"$DIR/log/$1.log" 2>&1 </dev/null 9>&- &
  echo "$! $(p_start $!)" >"$DIR/run/$1.pid"
}
answers() { timeout 10 ssh -F "$DIR/etc/ssh_config" -o BatchMode=yes "$1" true </dev/null >/dev/null 2>&1; }
wait_host() { # W
  local end=$(($(date +%s) + 20))
  until answers "$1"; do
    if ! alive "$1"; then tail -n 30 "$DIR/log/$1.log" >&2; die "$1 ended"; fi
    if [ "$(date +%s)" -ge "$end" ]; then tail -n 30 "$DIR/log/$1.log" >&2; die "no answer from $1"; fi
    sleep 0.1
  done
}
in_host() { local p; p=$(pid_of "$1"); shift; nsenter --target "$p" --mount -- "$@"; }
large_home() { in_host "$1" umount --lazy "$DIR/host/$1/home"; }
hosts() { seq -f 'w%g' "$HOSTS"; }

write_config() {
  local w k pam=no port=${SSH_TB_PORT:-22022} n=${SSH_TB_HOSTS:-4} isolate=net
  while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    port=$((port + 1)); [ "$port" -lt 32000 ] || die "no free port"
  done
  if [ "${SSH_TB_ISOLATE:-auto}" = none ] || ! "$PYTHON" -S -c "$LISTENER" probe 127.0.0.1 0 net 2>/dev/null; then isolate=none; fi
  [ -e "$DIR/etc/host_key" ] || ssh-keygen -q -t ed25519 -N '' -C testbed-host -f "$DIR/etc/host_key"
  [ -e "$DIR/etc/id" ] || ssh-keygen -q -t ed25519 -N '' -C testbed-user -f "$DIR/etc/id"
  if [ "$(id -u)" = 0 ]; then
    mkdir -p /run/sshd; chmod 755 /run/sshd # sshd's compiled-in directory for privilege separation
    case $(getent shadow "$(id -un)" | cut -d: -f2) in '!'*) pam=yes ;; esac # a locked account logs in only through PAM
  fi
  # sshd has started a shell, which has read .bashrc of $HOME, in the account's own home. The command runs in that shell.
  cat >"$DIR/etc/session" <<'EOF'
set -- "${SSH_ORIGINAL_COMMAND:-exec "$SHELL" -l}"
if [ -n "${TORC_TEST_HOME:-}" ]; then
  HOME=$HOME/$TORC_TEST_HOME
  [ ! -e "$HOME/.bashrc" ] || . "$HOME/.bashrc"
fi
cd "$HOME"
unset SSH_ORIGINAL_COMMAND OLDPWD
eval "$1"
EOF
  : >"$DIR/etc/known_hosts"; : >"$DIR/etc/ssh_config"
  for w in $(seq -f 'w%g' "$n"); do
    k=${w#w}
    cat >"$DIR/etc/sshd_$w" <<EOF
HostKey $DIR/etc/host_key
PidFile none
AuthorizedKeysFile $DIR/etc/id.pub
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
StrictModes no
UsePAM $pam
PrintMotd no
UseDNS no
KexAlgorithms curve25519-sha256
AcceptEnv TORC_TEST_WORLD TORC_TEST_HOME
SetEnv SSH_TB_HOST=$DIR:$w HOME=$DIR/host/$w/home
ForceCommand . $DIR/etc/session
EOF
    "$SSHD" -t -f "$DIR/etc/sshd_$w" || die "sshd refuses its configuration"
    echo "[127.0.0.$k]:$port $(cut -d' ' -f1,2 "$DIR/etc/host_key.pub")" >>"$DIR/etc/known_hosts"
    printf 'Host %s\n  HostName 127.0.0.%s\n' "$w" "$k" >>"$DIR/etc/ssh_config"
  done
  cat >>"$DIR/etc/ssh_config" <<EOF
Host w* 127.0.0.*
  Port $port
  User $(id -un)
  IdentityFile $DIR/etc/id
  IdentitiesOnly yes
  UserKnownHostsFile $DIR/etc/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  KexAlgorithms curve25519-sha256
  SendEnv TORC_TEST_WORLD TORC_TEST_HOME
EOF
  printf 'HOSTS=%q PORT=%q ISOLATE=%q SSHD=%q PYTHON=%q\n' "$n" "$port" "$isolate" "$SSHD" "$PYTHON" >"$DIR/etc/shape"
}

do_start() {
  local w running='' pids=() t0
  t0=$(date +%s.%N)
  SSHD=$(command -v sshd) && command -v ssh ssh-keygen >/dev/null || die "sshd, ssh or ssh-keygen not found: run '$ME install' first"
  PYTHON=$(python3 -c 'import sys; print(sys.executable)') || die "python3 not found"
  umask 077
  if [ -e "$DIR" ]; then [ -O "$DIR" ] || die "$DIR belongs to someone else"; fi
  mkdir -p "$DIR"/{etc,run,log,host}
  exec 9>"$DIR/.lock"; flock -w 60 9 || die "another $ME holds $DIR/.lock"
  for w in "$DIR"/run/w*.pid; do w=${w##*/}; if alive "${w%.pid}"; then running=1; fi; done
  [ -n "$running" ] && [ -e "$DIR/etc/shape" ] || write_config
  . "$DIR/etc/shape"
  for w in $(hosts); do
    if alive "$w"; then sig CONT $(host_pids "$w"); large_home "$w" 2>/dev/null || true; else start_host "$w"; fi
  done
  for w in $(hosts); do wait_host "$w" & pids+=($!); done
  for w in "${pids[@]}"; do wait "$w" || exit 1; done
  say "ready in $(awk -v a="$t0" -v b="$(date +%s.%N)" 'BEGIN{printf "%.1f",b-a}')s: w1..w$HOSTS port $PORT, isolate=$ISOLATE; ssh -F $DIR/etc/ssh_config w1"
}
do_stop() {
  local f
  [ -d "$DIR/run" ] || { say "nothing at $DIR"; return 0; }
  for f in "$DIR"/run/w*.pid; do f=${f##*/}; [ "$f" = 'w*.pid' ] || end_host "${f%.pid}"; done
  sig KILL $(session_pids)
  say "stopped"
}
do_status() {
  local w bad=0
  for w in $(hosts); do if alive "$w" && answers "$w"; then echo "up    $w $(pid_of "$w")"; else echo "DOWN  $w"; bad=1; fi; done
  return $bad
}
sshd_sessions() { # W
  local p l; l=$(pid_of "$1")
  for p in $(tree "$l"); do
    case $(cat "/proc/$p/comm" 2>/dev/null) in sshd*) echo "$p" ;; esac
  done
}

case $cmd in
  install | start | stop | clean) ;;
  status | env | *-host | *-home)
    [ -e "$DIR/etc/shape" ] || die "no testbed at $DIR (start it first)"
    . "$DIR/etc/shape"
    case $cmd in
      start-host) hosts | grep -qx "$W" || die "no host $W" ;;
      *-host | *-home) alive "$W" || die "no running $W" ;;
    esac ;;
esac
case $cmd in
  install) do_install ;;
  start) do_start ;;
  stop) do_stop ;;
  status) do_status ;;
  env) printf 'export SSH_TB_DIR=%q SSH_TB_CONFIG=%q SSH_TB_HOSTS=%q SSH_TB_PORT=%q\n' "$DIR" "$DIR/etc/ssh_config" "$HOSTS" "$PORT" ;;
  clean) do_stop; case $DIR in / | /tmp | "$HOME") die "not deleting $DIR" ;; esac
         if [ -e "$DIR/etc/shape" ] || [ -e "$DIR/.lock" ]; then rm -rf "$DIR"; fi ;;
  kill-host) end_host "$W" ;;
  start-host) start_host "$W"; wait_host "$W" ;;
  freeze-host) freeze "$W" ;;
  thaw-host) sig CONT $(host_pids "$W") ;;
  cut-host) sig KILL $(sshd_sessions "$W") ;;
  small-home) [ "$ISOLATE" != none ] || die "$W has no mounts of its own here"
              in_host "$W" mount -t tmpfs -o mode=700,size=100k tmpfs "$DIR/host/$W/home" ;;
  large-home) large_home "$W" ;;
  *) sed -n '2,/^set -/p' "$0" | sed '$d' | sed 's/^# \{0,1\}//'; [ -z "$cmd" ] || [ "$cmd" = -h ] || [ "$cmd" = --help ] || exit 2 ;;
esac
