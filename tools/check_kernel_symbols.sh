#!/usr/bin/env bash
# check_kernel_symbols.sh BUILD_FOLDER: looks for symbols in the kernel objects that could leak code of a newer
# instruction set into the rest of the program.
#
# The linker keeps one copy of a weak symbol, whichever object it comes from; one compiled with AVX-512 flags would then
# run on machines without it. So a kernel object may define symbols of its own namespace only, none of them weak, and
# may need nothing but memcpy, memset and memmove.
set -euo pipefail

folder="${1:?usage: check_kernel_symbols.sh BUILD_FOLDER}"
mapfile -t objects < <(find "$folder" -name '*_kernel.cpp.o' | sort)
if [ "${#objects[@]}" -eq 0 ]; then
  echo "check_kernel_symbols: no kernel objects under $folder" >&2
  exit 2
fi
failed=0
for object in "${objects[@]}"; do
  # Local symbols (lower case) and data or code of our own namespaces are fine.
  foreign="$(nm -C "$object" | grep -vE ' [tbdr] | [TBDR] pyengine::cpu::(base|avx2|avx512|avx512bf16|neon)::' |
    grep -vE ' U (memcpy|memset|memmove|_GLOBAL_OFFSET_TABLE_|__stack_chk_fail)$' || true)"
  if [ -n "$foreign" ]; then
    echo "$object:" >&2
    echo "$foreign" >&2
    failed=1
  fi
done
echo "check_kernel_symbols: ${#objects[@]} objects, $([ "$failed" -eq 0 ] && echo clean || echo NOT CLEAN)"
exit "$failed"
