# Whether the CUDA backend is built, with which compiler and for which architectures.
#
#   PYENGINE_CUDA=AUTO  built when a CUDA compiler is found and a GPU is visible, for that GPU only (the default)
#                 ON    built for all architectures; an error where there is no compiler
#                 OFF   not built
#   PYENGINE_CUDA_ARCHITECTURES  other architectures than those, in CMake's words: "80-real;90-real;120"
#   PYENGINE_CUDA_WHEELS         folder of NVIDIA's compiler wheels: a site-packages, or the nvidia/cu13 in it
#
# The compiler is, in this order: CMAKE_CUDA_COMPILER, PYENGINE_CUDA_WHEELS, $CUDACXX, $CUDA_HOME, $CUDA_PATH, PATH,
# /usr/local/cuda, the wheels of the Python in use (Python_EXECUTABLE).
#
# Sets why_not: empty, or the reason why it is not built. And else nvcc, nvcc_version, host_compiler, link_flag,
# CMAKE_CUDA_ARCHITECTURES, CMAKE_CUDA_HOST_COMPILER.

set(why_not)
set(known_architectures 80 86 89 90 100 120)
set(oldest_architecture 80) # the kernels use cp.async and bf16 tensor cores
set(PYENGINE_CUDA "AUTO" CACHE STRING "Build the CUDA backend: AUTO, ON or OFF")
set(PYENGINE_CUDA_ARCHITECTURES "" CACHE STRING "GPU architectures, instead of those that PYENGINE_CUDA implies")
set(PYENGINE_CUDA_WHEELS "" CACHE PATH "Where NVIDIA's compiler wheels are installed: a site-packages, or the nvidia/cu13 in it")

set(install_words "install a CUDA toolkit 12.x or 13.x (and set CUDA_HOME or CUDACXX when it is not in /usr/local/cuda), or: "
                  "pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl")
string(CONCAT install_words ${install_words})

# Ends this file without the backend, or the whole run where the backend was asked for. A macro: it returns for this file.
macro(give_up reason)
  if(PYENGINE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "PYENGINE_CUDA is ON, but ${reason}.")
  endif()
  set(why_not "${reason}")
  return()
endmacro()

string(TOUPPER "${PYENGINE_CUDA}" PYENGINE_CUDA)
if(NOT PYENGINE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "PYENGINE_CUDA is '${PYENGINE_CUDA}'; it must be AUTO, ON or OFF.")
endif()
if(PYENGINE_CUDA STREQUAL "OFF")
  give_up("PYENGINE_CUDA is OFF")
endif()
if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  give_up("the CUDA backend is for Linux, this is ${CMAKE_SYSTEM_NAME}")
endif()

# --- The GPU. nvidia-smi belongs to the driver; asked each time, for the answer changes with the machine.
if(PYENGINE_CUDA STREQUAL "AUTO")
  unset(nvidia_smi CACHE)
  find_program(nvidia_smi nvidia-smi PATHS /usr/lib/wsl/lib)
  set(gpu_lines)
  if(nvidia_smi)
    execute_process(COMMAND ${nvidia_smi} --query-gpu=compute_cap,driver_version --format=csv,noheader
                    OUTPUT_VARIABLE gpu_lines ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  unset(nvidia_smi CACHE)
  string(REGEX MATCHALL "[0-9]+\\.[0-9]+, *[0-9]+" gpu_lines "${gpu_lines}")
  set(gpu_architectures)
  foreach(line IN LISTS gpu_lines)
    string(REGEX MATCH "^([0-9]+)\\.([0-9]+), *([0-9]+)$" line "${line}")
    if(CMAKE_MATCH_1) # else the line is of another form
      list(APPEND gpu_architectures ${CMAKE_MATCH_1}${CMAKE_MATCH_2})
      set(driver ${CMAKE_MATCH_3})
    endif()
  endforeach()
  if(NOT gpu_architectures)
    give_up("no NVIDIA GPU is visible (nvidia-smi names none); PYENGINE_CUDA=ON builds it nevertheless")
  endif()
  list(REMOVE_DUPLICATES gpu_architectures)
endif()

# --- The compiler.
unset(PYENGINE_NVCC CACHE)
if(CMAKE_CUDA_COMPILER)
  find_program(PYENGINE_NVCC NAMES ${CMAKE_CUDA_COMPILER})
elseif(PYENGINE_CUDA_WHEELS)
  find_program(PYENGINE_NVCC nvcc PATHS ${PYENGINE_CUDA_WHEELS}/nvidia/cu13/bin ${PYENGINE_CUDA_WHEELS}/bin NO_DEFAULT_PATH)
  if(NOT PYENGINE_NVCC)
    give_up("PYENGINE_CUDA_WHEELS is '${PYENGINE_CUDA_WHEELS}', which has neither nvidia/cu13/bin/nvcc nor bin/nvcc")
  endif()
elseif(DEFINED ENV{CUDACXX})
  find_program(PYENGINE_NVCC NAMES $ENV{CUDACXX})
else()
  # All places where Python looks for packages, and its own site-packages even where an isolated build hides them.
  execute_process(COMMAND ${Python_EXECUTABLE} -c
                  "import sys, sysconfig; print(*sys.path[1:], *sysconfig.get_paths().values(), sep=';')"
                  OUTPUT_VARIABLE package_folders OUTPUT_STRIP_TRAILING_WHITESPACE)
  set(wheel_folders)
  foreach(folder IN LISTS package_folders)
    list(APPEND wheel_folders ${folder}/nvidia/cu13/bin)
  endforeach()
  set(home_folders)
  foreach(home IN ITEMS "$ENV{CUDA_HOME}" "$ENV{CUDA_PATH}")
    if(home)
      list(APPEND home_folders ${home}/bin)
    endif()
  endforeach()
  find_program(PYENGINE_NVCC nvcc HINTS ${home_folders} PATHS /usr/local/cuda/bin ${wheel_folders}
               NO_CMAKE_PATH NO_CMAKE_SYSTEM_PATH)
endif()
set(nvcc ${PYENGINE_NVCC})
unset(PYENGINE_NVCC CACHE)
if(NOT nvcc)
  give_up("no CUDA compiler was found: ${install_words}")
endif()
# Where nvcc looks for its parts: it follows links, and may be a script that calls another one.
execute_process(COMMAND ${nvcc} --dryrun -c some.cu OUTPUT_VARIABLE dry_run ERROR_VARIABLE dry_run)
if(dry_run MATCHES "#\\$ TOP=([^\n]+)")
  string(STRIP "${CMAKE_MATCH_1}" toolkit)
  get_filename_component(toolkit "${toolkit}" REALPATH)
else()
  get_filename_component(toolkit "${nvcc}" REALPATH)
  get_filename_component(toolkit ${toolkit} DIRECTORY)
  get_filename_component(toolkit ${toolkit} DIRECTORY)
endif()

execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE version_text ERROR_VARIABLE version_text RESULT_VARIABLE status)
if(NOT status EQUAL 0 OR NOT version_text MATCHES "release [0-9.]+, V([0-9.]+)")
  give_up("'${nvcc} --version' does not answer as NVIDIA's compiler does")
endif()
set(nvcc_version ${CMAKE_MATCH_1})
string(REGEX MATCH "^[0-9]+" nvcc_major ${nvcc_version})
if(nvcc_version VERSION_LESS 12.0)
  give_up("the CUDA compiler ${nvcc} is version ${nvcc_version}: ${install_words}")
endif()
execute_process(COMMAND ${nvcc} --list-gpu-code OUTPUT_VARIABLE code_text)
string(REGEX MATCHALL "sm_[0-9]+" compiler_architectures "${code_text}")
string(REPLACE "sm_" "" compiler_architectures "${compiler_architectures}")

# --- The architectures.
if(PYENGINE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES ${PYENGINE_CUDA_ARCHITECTURES})
elseif(PYENGINE_CUDA STREQUAL "AUTO")
  # A driver runs what toolkits of its own generation and older ones have built.
  if((nvcc_major EQUAL 12 AND driver LESS 525) OR (nvcc_major GREATER 12 AND driver LESS 580))
    give_up("the driver (${driver}) is older than the CUDA compiler (${nvcc_version}): a toolkit 12 needs driver 525, 13 needs 580")
  endif()
  set(CMAKE_CUDA_ARCHITECTURES)
  foreach(architecture IN LISTS gpu_architectures)
    if(architecture IN_LIST compiler_architectures AND NOT architecture LESS oldest_architecture)
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture}-real)
    endif()
  endforeach()
  if(NOT CMAKE_CUDA_ARCHITECTURES)
    string(REPLACE ";" ", " shown "${gpu_architectures}")
    give_up("the GPU's architecture (${shown}) is older than ${oldest_architecture}, or unknown to the compiler (${nvcc_version})")
  endif()
else()
  set(CMAKE_CUDA_ARCHITECTURES)
  foreach(architecture IN LISTS known_architectures)
    if(architecture IN_LIST compiler_architectures)
      list(APPEND CMAKE_CUDA_ARCHITECTURES ${architecture}-real)
      set(newest ${architecture})
    endif()
  endforeach()
  list(APPEND CMAKE_CUDA_ARCHITECTURES ${newest}-virtual) # PTX, for what comes after it
endif()
foreach(entry IN LISTS CMAKE_CUDA_ARCHITECTURES)
  string(REGEX REPLACE "[af]?-(real|virtual)$" "" architecture "${entry}")
  if(architecture MATCHES "^[0-9]+$" AND (architecture LESS oldest_architecture OR NOT architecture IN_LIST compiler_architectures))
    string(REPLACE ";" ", " shown "${compiler_architectures}")
    message(FATAL_ERROR "PYENGINE_CUDA_ARCHITECTURES has ${entry}: the kernels need ${oldest_architecture} or newer, and "
                        "the compiler (${nvcc_version}) knows ${shown}.")
  endif()
endforeach()

# --- Is the compiler whole, and does it take the host's compiler? Asked with a small program before CMake asks, whose
# own check would end the build of the CPU backend too.
if(NOT CMAKE_CUDA_HOST_COMPILER AND NOT DEFINED ENV{CUDAHOSTCXX})
  set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
endif()
set(host_compiler ${CMAKE_CUDA_HOST_COMPILER} $ENV{CUDAHOSTCXX})
list(GET host_compiler 0 host_compiler)
set(link_flag)
if(EXISTS ${toolkit}/lib/libcudart_static.a AND NOT EXISTS ${toolkit}/lib64)
  # The wheels have lib, where nvcc looks for lib64.
  set(link_flag "-L${toolkit}/lib")
endif()
set(probe ${CMAKE_CURRENT_BINARY_DIR}/probe)
file(WRITE ${probe}.cu "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <cuda_runtime.h>\n#include <string>\n"
                       "__global__ void probe() {}\nint count() { int n = 0; return cudaGetDeviceCount(&n) + n; }\n")
execute_process(COMMAND ${nvcc} -std=c++17 -ccbin ${host_compiler} -shared -Xcompiler -fPIC ${link_flag} ${probe}.cu -o ${probe}.so
                OUTPUT_VARIABLE probe_text ERROR_VARIABLE probe_text RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  string(STRIP "${probe_text}" probe_text)
  message(STATUS "${nvcc} says of a small program:\n${probe_text}")
  string(REGEX REPLACE "\n.*|[\\;$]" "" first_line "${probe_text}")
  give_up("the CUDA compiler ${nvcc} (${nvcc_version}, host compiler ${host_compiler}) does not compile a small program (${first_line}); a missing part may help: ${install_words}")
endif()
