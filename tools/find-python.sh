#!/bin/sh
# Create a virtual environment at $1 with the first Python >= 3.11 that runs.
for python in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11 python; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    if "$python" -m venv --clear "$1"; then exit 0; fi
    rm -rf "$1"
    echo "demur: $python cannot create a virtual environment; install its venv package" \
      "(on Debian: python3-venv) and run the command again" >&2
    exit 2
  fi
done
echo "demur: there is no Python >= 3.11 on the path; install one or name it with PYTHON=..." >&2
exit 2
