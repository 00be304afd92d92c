#!/bin/sh
# Builds the agent as a static program: it runs in roots that have no C library, or another one.
#
# `+crt-static` is wanted for this one binary, and cargo has no setting for one package, so the flag
# goes to rustc for the final crate only (std and libc choose their linkage there). A target directory
# of its own keeps a plain `cargo build` from replacing the result. Prints the path.
set -eu
cd "$(dirname "$0")/../.."
target=${1:-target/aether-static}
cargo rustc --quiet --locked -p dsec-aether --bin dsec-aether --release --target-dir "$target" -- \
    -C target-feature=+crt-static
out=$target/release/dsec-aether
if readelf -lW "$out" | grep -q INTERP; then
    echo "$out asks for a dynamic loader" >&2
    exit 1
fi
echo "$out"
