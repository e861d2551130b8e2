#!/usr/bin/env bash
# Installs a CUDA compiler where wheels are built: tools/install_cuda_toolkit.sh repository 12-8 | wheels FOLDER
#
#   repository 12-8   from NVIDIA's package repository, on a RHEL 8 family system as the manylinux_2_28 images are
#                     (x86_64 and aarch64); to /usr/local/cuda. Release wheels: code of toolkit 12 runs on drivers of the
#                     generations 12 and 13.
#   wheels FOLDER     NVIDIA's compiler wheels of CUDA 13, to FOLDER (then PYENGINE_CUDA_WHEELS=FOLDER); any Linux.
set -euo pipefail

usage() { sed -n '2,8s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -eq 2 ] || usage
case $1 in
    repository)
        case $(uname -m) in
            x86_64) repository=x86_64 ;;
            aarch64) repository=sbsa ;;
            *) echo "NVIDIA has no packages for $(uname -m)." >&2; exit 1 ;;
        esac
        command -v dnf >/dev/null || { echo "dnf is missing: this is for the RHEL 8 family only." >&2; exit 1; }
        dnf install -y -q dnf-plugins-core
        dnf config-manager --add-repo \
            "https://developer.download.nvidia.com/compute/cuda/repos/rhel8/$repository/cuda-rhel8.repo"
        # The compiler, the runtime with its static library and headers, the C++ headers: no driver, no cuBLAS.
        dnf install -y -q "cuda-nvcc-$2" "cuda-cudart-devel-$2" "cuda-cccl-$2"
        ln -sfn "/usr/local/cuda-${2/-/.}" /usr/local/cuda
        /usr/local/cuda/bin/nvcc --version
        ;;
    wheels)
        python3 -m pip install --quiet --disable-pip-version-check --target "$2" \
            'nvidia-cuda-nvcc==13.0.*' 'nvidia-cuda-crt==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-runtime==13.0.*' \
            'nvidia-cuda-cccl==13.0.*'
        "$2/nvidia/cu13/bin/nvcc" --version
        ;;
    *) usage ;;
esac
