#!/usr/bin/env bash
# Writes snapshot.txt.gz: the project's sources and documents of one commit, separated by <|endoftext|>.
# The file is committed, so that the quickstart trains on the same text everywhere; run this only to renew it.
set -euo pipefail
cd "$(dirname "$0")/../.."
commit=${1:-HEAD}
git ls-tree -r --name-only "$commit" | grep -E '^(crates/.*\.rs|docs/.*\.md|[A-Z]+\.md)$' | while read -r file; do
    printf '// %s\n' "$file"
    git show "$commit:$file"
    printf '<|endoftext|>'
done | gzip -9n > examples/data/snapshot.txt.gz
