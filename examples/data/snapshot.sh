#!/usr/bin/env bash
# Writes snapshot.txt.gz: the project's sources and documents of one commit, separated by a line that holds a form feed
# alone. The sources themselves hold none, while they do speak of tokens such as <|endoftext|>.
# The file is committed, so that the quickstart trains on the same text everywhere; run this only to renew it.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=${1:-HEAD}
out=examples/data/snapshot.txt.gz
git ls-tree -r --name-only "$commit" | grep -E '^(crates/.*\.rs|docs/.*\.md|[A-Z]+\.md)$' | while read -r file; do
    if git show "$commit:$file" | grep -q $'\f'; then
        echo "$file holds a form feed, which separates documents here" >&2
        exit 1
    fi
    printf '// %s\n' "$file"
    git show "$commit:$file"
    printf '\f\n'
done | gzip -9n > "$out.tmp"
mv "$out.tmp" "$out"
