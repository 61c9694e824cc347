#!/usr/bin/env bash
# Trains with N processes on this machine, as on N hosts:
#
#   launch/local.sh N --config=configs/vit.py:b16 --workdir=DIR [--config.FIELD=VALUE ...]
#
# Signals are passed on to all processes. When one fails, the others stop and say why; those that
# are left after GRACE seconds (60) are killed. Exits with the first code that is not 0.
# PYTHON is the interpreter (python), MODULE what it runs (vit_jax.main, or vit_jax.evaluate).
set -um  # m: processes in groups of their own, so that a Ctrl-C reaches them once, from here

if ! [ "${1:-}" -ge 1 ] 2>/dev/null; then
  echo "usage: $0 NUMBER_OF_PROCESSES --config=... --workdir=..." >&2
  exit 2
fi
number=$1
shift
python=${PYTHON:-python}
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

running=()
name=()  # by process id
pass_on() { kill -s "$1" ${running[@]+"${running[@]}"} 2>/dev/null; }
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT
for ((i = 0; i < number; i++)); do
  "$python" -m "${MODULE:-vit_jax.main}" "$@" --coordinator="127.0.0.1:$port" --num_processes="$number" \
    --process_id="$i" &
  running+=($!)
  name[$!]="process $i of $number"
done

code=0
deadline=
killed=
while [ ${#running[@]} -gt 0 ]; do
  sleep 0.2
  left=()
  for pid in "${running[@]}"; do
    if kill -0 "$pid" 2>/dev/null; then
      left+=("$pid")
      continue
    fi
    wait "$pid"
    status=$?
    if [ $status = 137 ] && [ -z "$killed" ]; then
      echo "${name[$pid]} was killed by SIGKILL. If nobody did that, the machine had too little" \
        "memory for $number: see dmesg. The others stop." >&2
    elif [ $status = 134 ]; then
      echo "${name[$pid]} was ended by JAX, as another process was lost." >&2
    elif [ $status = 137 ]; then
      echo "${name[$pid]} was killed: it had not stopped ${GRACE:-60} s after another one." >&2
    fi
    if [ $code = 0 ] && [ $status != 0 ]; then
      code=$status
      deadline=$((SECONDS + ${GRACE:-60}))
    fi
  done
  running=(${left[@]+"${left[@]}"})
  if [ -n "$deadline" ] && [ $SECONDS -ge "$deadline" ]; then
    pass_on KILL
    killed=yes
  fi
done
exit $code
