#!/bin/bash
# Times each variant of the scene renderer alone: bash scene_trials.sh OUT [VARIANT ...], from the repository's root.
# A variant is a value of ROOFTOP_SCENE_TRIAL; "base" is without any. All are compiled first, at once.
out=$1; shift; mkdir -p "$out"; python=${PYTHON:-python3}; export PYTHONPATH=src:benchmarks${PYTHONPATH:+:$PYTHONPATH}
[ $# = 0 ] && set -- base records records,pixels,scale signs records,covered records,flat records,early tiles records,tiles tiles,registers \
    scale words groups counters merge records,pixels,scale,tiles,groups,counters,merge records,covered,pixels,scale,tiles,groups,counters,merge base
of() { [ "$1" = base ] && echo "" || echo "$1"; }
run() { ROOFTOP_SCENE_TRIAL=$(of "$1") timeout "$2" $python benchmarks/scene_trials.py --meshes "$out" "${@:3}"; }
run base 120 --compile > "$out/compile.log" 2>&1   # also what all of them share
$python -c "import sys; sys.path.insert(0, 'benchmarks'); import pathlib, scene_trials as s; s.mesh(pathlib.Path('$out'), 6); s.mesh(pathlib.Path('$out'), 3)" >> "$out/compile.log" 2>&1
for v in "$@"; do run "$v" 150 --compile >> "$out/compile.log" 2>&1 & done; wait
n=0
for v in "$@"; do n=$((n + 1)); run "$v" 60 --out "$out/$(printf %02d $n)-$v.json" 2>> "$out/errors.log" | grep -v "^Module"; done
rm -f "$out"/*.rtg
