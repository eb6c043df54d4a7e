#!/bin/sh
# Run `agl` with secrets out of files: NAME_FILE names the file whose content becomes NAME, so that no secret stands in
# a compose file, a command line or the description of a container.
set -eu
for name in PGPASSWORD AGL_STORE_TOKEN AGL_PROXY_API_KEY OPENAI_API_KEY ANTHROPIC_API_KEY; do
    eval "file=\${${name}_FILE:-}"
    if [ -n "$file" ]; then
        eval "$name=\$(cat \"\$file\"); export $name"
    fi
done
exec agl "$@"
