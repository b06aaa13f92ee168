# Sourced by the other scripts: makes `.venv`, installs the requirements of pyproject.toml into it, finds OpenBLAS.
# All messages go to stderr. `setup run` installs what serving needs; `setup dev` adds what the tests need.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
python=$venv/bin/python
needed="Python 3.11 to 3.15"
if [ "$(uname -s)" = Darwin ]; then needed="$needed for Apple silicon"; fi

say() { printf '%s\n' "$*" >&2; }

die() {
  say "error: $*"
  exit 1
}

# MLX has no wheels for Intel Macs, nor for an Intel Python in Rosetta.
is_supported() {
  "$@" -c 'import platform, sys
fits = sys.platform != "darwin" or platform.machine() == "arm64"
sys.exit(not (fits and (3, 11) <= sys.version_info < (3, 16)))' >/dev/null 2>&1 </dev/null
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.{15,14,13,12,11} python; do
    if command -v "$candidate" >/dev/null 2>&1 && is_supported "$candidate"; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  return 1
}

make_venv() {
  local base
  rm -rf "$venv"
  if command -v uv >/dev/null 2>&1 && uv venv --quiet --python "${PYTHON:->=3.11,<3.16}" "$venv" >&2 &&
    is_supported "$python"; then return; fi
  base=$(find_python) || die "$needed is required, but none was found." \
    "Install one (macOS: brew install python@3.12; Debian: apt-get install python3-venv), or set PYTHON to its path."
  "$base" -m venv --clear "$venv" >&2 || die "$base cannot make a virtual environment in $venv (Debian: apt-get install python3-venv)."
}

install_into_venv() {
  if command -v uv >/dev/null 2>&1; then
    uv pip install --quiet --python "$python" "$@" >&2 && return
    say "uv could not install the packages; trying pip."
  fi
  "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1 || die "There is no pip in $venv."
  local -a options=(--quiet --disable-pip-version-check)
  "$python" -m pip install "${options[@]}" --upgrade pip >&2 || say "pip could not be upgraded."  # a new one is twice as fast
  "$python" -m pip install "${options[@]}" --no-compile "$@" >&2
}

development_requirements() {
  "$python" -c 'import sys, tomllib; print("\n".join(tomllib.load(open(sys.argv[1], "rb"))["dependency-groups"]["dev"]))' \
    "$root/pyproject.toml"
}

# setup run|dev: does nothing if an earlier installation has finished and pyproject.toml has not changed since.
setup() {
  local wanted=$1 stamp requirement
  local -a requirements=()
  if [ "$(uname -s)" = Darwin ] && [ "$(uname -r | cut -d. -f1)" -lt 23 ]; then
    die "This is macOS $(sw_vers -productVersion), and MLX needs macOS 14 or later on Apple silicon."
  fi
  stamp="$root $(cksum <"$root/pyproject.toml")"
  if [ -d "$venv" ] && ! is_supported "$python"; then say "$venv has no working $needed; creating it again."; fi
  if is_supported "$python"; then
    [ "$(cat "$venv/.installed-dev" 2>/dev/null)" = "$stamp" ] && return
    [ "$wanted" = run ] && [ "$(cat "$venv/.installed-run" 2>/dev/null)" = "$stamp" ] && return
  else
    make_venv </dev/null
  fi
  if [ "$wanted" = dev ]; then
    while IFS= read -r requirement; do requirements+=("$requirement"); done < <(development_requirements)
  fi
  say "Installing the requirements of pyproject.toml into $venv (about a minute the first time) ..."
  install_into_venv --editable "$root" ${requirements[@]+"${requirements[@]}"} </dev/null ||
    die "The installation did not finish (see above). Check the connection to the package index, then run this again."
  find_openblas >/dev/null || install_openblas </dev/null
  printf '%s\n' "$stamp" >"$venv/.installed-$wanted"
}

find_openblas() {
  local library
  for library in /usr/lib/*/openblas-pthread/libblas.so.3 /usr/lib64/libopenblasp.so.0 /usr/lib/libopenblas.so.0 \
    /usr/lib/*/libopenblas.so.0; do
    if [ -e "$library" ]; then
      printf '%s\n' "$library"
      return
    fi
  done
  return 1
}

install_openblas() {
  [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 0
  say "Installing OpenBLAS (libopenblas0-pthread) ..."
  apt_install libopenblas0-pthread || say "apt-get could not install libopenblas0-pthread."
}

apt_install() {
  local -a options=(-q -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
  { apt-get "${options[@]}" update && DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" install -y \
    --no-install-recommends "$@"; } >/dev/null </dev/null
}

# Sets the array `runner` to the prefix of a command that makes MLX use OpenBLAS, since MLX's Linux wheels come with the
# reference BLAS. A Mac needs none: MLX uses Metal and Accelerate there.
prepare_runner() {
  local library
  runner=(env)
  [ "$(uname -s)" = Linux ] || return 0
  # Without these, glibc maps and clears new pages for every large array of MLX's CPU backend.
  runner+=(MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=8589934592)
  if library=$(find_openblas); then
    runner+=("LD_PRELOAD=$library${LD_PRELOAD:+:$LD_PRELOAD}")
  else
    say "note: OpenBLAS was not found, so matrix products are about 40 times slower on this CPU." \
      "Remedy: sudo apt-get install libopenblas0-pthread"
  fi
}
