# The executor cuda-image: wants nvcc and the static CUDA runtime, and is left out where they are not.
#
#   -DRESVISOR_CUDA_EXECUTOR=AUTO   built where nvcc is found (default); never with RESVISOR_CUDA=OFF
#   -DRESVISOR_CUDA_EXECUTOR=ON     an error where it is not
#   -DRESVISOR_CUDA_EXECUTOR=OFF    left out
set(RESVISOR_CUDA_EXECUTOR AUTO CACHE STRING "The executor cuda-image: AUTO, ON or OFF")
set_property(CACHE RESVISOR_CUDA_EXECUTOR PROPERTY STRINGS AUTO ON OFF)
# A100, H100 and H200, B200, GB10. Devices in between run the code of the next lower one of their generation; others
# compile the oldest one's PTX when it is loaded.
set(RV_CUDA_ARCHITECTURES 80 90 100 121)

set(RV_CUDA_EXECUTOR OFF)
set(RV_CUDA_COMPILED "" CACHE INTERNAL "What this nvcc can compile for")
if(RV_CUDA AND NOT RESVISOR_CUDA_EXECUTOR STREQUAL "OFF")
  get_target_property(folder rv_cuda_headers INTERFACE_INCLUDE_DIRECTORIES)
  find_program(RV_NVCC nvcc HINTS ${folder}/../bin ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin)
  find_library(RV_CUDART cudart_static HINTS ${folder}/../lib64 ${folder}/../lib ENV CUDA_HOME ENV CUDA_PATH
    PATH_SUFFIXES lib64 lib)
  if(RV_NVCC AND RV_CUDART AND EXISTS ${folder}/cuda_runtime_api.h)
    set(RV_CUDA_EXECUTOR ON)
  endif()
endif()
if(RESVISOR_CUDA_EXECUTOR STREQUAL "ON" AND NOT RV_CUDA_EXECUTOR)
  message(FATAL_ERROR "RESVISOR_CUDA_EXECUTOR is ON, but nvcc, libcudart_static.a or cuda_runtime_api.h is not found")
endif()
message(STATUS "Executor cuda-image: ${RV_CUDA_EXECUTOR}")
if(NOT RV_CUDA_EXECUTOR)
  return()
endif()

execute_process(COMMAND ${RV_NVCC} --list-gpu-code OUTPUT_VARIABLE known ERROR_QUIET)
set(oldest)
set(targets)
set(compiled)
foreach(architecture ${RV_CUDA_ARCHITECTURES})
  if(known MATCHES "sm_${architecture}[^0-9]")
    list(APPEND targets -gencode=arch=compute_${architecture},code=sm_${architecture})
    list(APPEND compiled ${architecture})
    if(NOT oldest)
      set(oldest ${architecture})
    endif()
  else()
    message(STATUS "Executor cuda-image: this nvcc cannot make code for sm_${architecture}")
  endif()
endforeach()
list(APPEND targets -gencode=arch=compute_${oldest},code=compute_${oldest})
set(RV_CUDA_COMPILED "${compiled}" CACHE INTERNAL "")

# By a command of its own, not as a language of CMake: looking for CUDA as a language takes seconds at each first
# configuration and wants a working linker for device code, which nothing here needs.
set(object ${CMAKE_CURRENT_BINARY_DIR}/cuda_kernels.o)
add_custom_command(OUTPUT ${object}
  COMMAND ${RV_NVCC} -std=c++17 -O2 -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics ${targets} -c
    ${CMAKE_CURRENT_SOURCE_DIR}/cuda_kernels.cu -o ${object}
  DEPENDS cuda_kernels.cu cuda_kernels.h cuda_elements.h VERBATIM)
set_source_files_properties(${object} PROPERTIES EXTERNAL_OBJECT ON GENERATED ON)
rv_executor(cuda-image PkgConfig::PNG cuda_image.c cuda_compute.c image_job.c ${object})
# The runtime's own names stay inside: the worker may load another runtime.
target_link_options(executor_cuda-image PRIVATE LINKER:--exclude-libs,libcudart_static.a)
if(NOT RESVISOR_SANITIZE)
  target_link_options(executor_cuda-image PRIVATE LINKER:--no-undefined) # the Toolkit's C++ must not come in
endif()
target_link_libraries(executor_cuda-image PRIVATE rv_cuda_headers ${RV_CUDART} ${CMAKE_DL_LIBS} pthread rt)
