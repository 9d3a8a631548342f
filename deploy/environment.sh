# Sourced by deploy/quickstart and tests/run: makes .venv in the repository, with what pyproject.toml pins.
# Sets nothing outside the repository. Usage: tidegate_environment ROOT [EXTRA]

tidegate_python() {  # prints a Python 3.11 that can make virtual environments, or says what to do
    local candidate
    for candidate in python3.11 python3 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            if ! "$candidate" -c 'import venv, ensurepip' 2>/dev/null; then
                echo "tidegate: $candidate cannot make virtual environments; on Debian or Ubuntu:" \
                    "apt-get install python3.11-venv" >&2
                return 1
            fi
            command -v "$candidate"
            return 0
        fi
    done
    echo "tidegate: Python 3.11 is needed and was not found on PATH. On Debian or Ubuntu:" \
        "apt-get install python3.11 python3.11-venv; elsewhere pyenv, conda or uv install it." >&2
    return 1
}

tidegate_stamp() {  # ROOT EXTRA: what the environment must have been made from
    printf '%s %s\n' "$(sha256sum <"$1/pyproject.toml" | cut -c1-64)" "${2:-serve}"
}

tidegate_ready() {  # ROOT EXTRA: the environment stands; one with the test tools also serves
    local stamp="$1/.venv/tidegate-stamp"
    [ -x "$1/.venv/bin/python" ] && [ -f "$stamp" ] || return 1
    [ "$(cat "$stamp")" = "$(tidegate_stamp "$1" "${2:-}")" ] || [ "$(cat "$stamp")" = "$(tidegate_stamp "$1" test)" ]
}

tidegate_environment() {  # ROOT [EXTRA]
    local root="$1" extra="${2:-}" python quiet="--quiet"
    if tidegate_ready "$root" "$extra"; then
        return 0
    fi
    exec 9<"$root"
    if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
        echo "tidegate: waiting for another process that makes $root/.venv" >&2
        flock 9
    fi
    if ! tidegate_ready "$root" "$extra"; then
        echo "Making $root/.venv from pyproject.toml …"
        rm -f "$root/.venv/tidegate-stamp"
        if ! "$root/.venv/bin/python" -c 'import pip, sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            python="$(tidegate_python)" || return 1
            "$python" -m venv --clear "$root/.venv" || return 1
            quiet=""
        fi
        if ! "$root/.venv/bin/python" -m pip install --disable-pip-version-check --no-input $quiet \
            -e "$root${extra:+[$extra]}" </dev/null; then
            echo "tidegate: pip could not install what pyproject.toml names; see above." \
                "Run this again once it can: what is already there is kept." >&2
            return 1
        fi
        tidegate_stamp "$root" "$extra" >"$root/.venv/tidegate-stamp"
    fi
    exec 9<&-
}
