// The CUDA driver. Its functions and types are declared here, so that no CUDA headers are needed.
#pragma once

#include <Python.h>
#include <dlfcn.h>

#include <unordered_map>

#include "objects.h"

namespace rooftop {

struct LaunchAttribute {  // CUlaunchAttribute
  int id;
  int padding;
  union {
    int allowed;
    unsigned cluster[3];
    char size[64];
  };
};
static_assert(sizeof(LaunchAttribute) == 72);
constexpr int COOPERATIVE = 2, CLUSTER_DIMENSION = 4, PROGRAMMATIC_STREAM_SERIALIZATION = 6;
constexpr size_t MOST_ATTRIBUTES = 3;

struct LaunchConfig {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned count;
};
static_assert(sizeof(LaunchConfig) == 56);

struct Driver {
  int (*launch)(const LaunchConfig*, void*, void**, void**) = nullptr;  // cuLaunchKernelEx
  int (*parameter)(void*, size_t, size_t*, size_t*) = nullptr;          // cuFuncGetParamInfo, since CUDA 12.4
  int (*kernel_parameter)(void*, size_t, size_t*, size_t*) = nullptr;   // cuKernelGetParamInfo, since CUDA 12.4
  int (*replace)(void*, void*) = nullptr;                               // cuTensorMapReplaceAddress
  int (*name)(int, const char**) = nullptr;                             // cuGetErrorName
  int (*context)(void**) = nullptr;                                     // cuCtxGetCurrent
  int (*device)(int*, int) = nullptr;                                   // cuDeviceGet
  int (*retain)(void**, int) = nullptr;                                 // cuDevicePrimaryCtxRetain
  int (*bind)(void*) = nullptr;                                         // cuCtxSetCurrent
};

inline const Driver& driver() {
  static const Driver found = [] {
    Driver driver;
    if (void* library = dlopen("libcuda.so.1", RTLD_LAZY)) {
      driver.launch = reinterpret_cast<decltype(driver.launch)>(dlsym(library, "cuLaunchKernelEx"));
      driver.parameter = reinterpret_cast<decltype(driver.parameter)>(dlsym(library, "cuFuncGetParamInfo"));
      driver.kernel_parameter =
          reinterpret_cast<decltype(driver.kernel_parameter)>(dlsym(library, "cuKernelGetParamInfo"));
      driver.replace = reinterpret_cast<decltype(driver.replace)>(dlsym(library, "cuTensorMapReplaceAddress"));
      driver.name = reinterpret_cast<decltype(driver.name)>(dlsym(library, "cuGetErrorName"));
      driver.context = reinterpret_cast<decltype(driver.context)>(dlsym(library, "cuCtxGetCurrent"));
      driver.device = reinterpret_cast<decltype(driver.device)>(dlsym(library, "cuDeviceGet"));
      driver.retain = reinterpret_cast<decltype(driver.retain)>(dlsym(library, "cuDevicePrimaryCtxRetain"));
      driver.bind = reinterpret_cast<decltype(driver.bind)>(dlsym(library, "cuCtxSetCurrent"));
    }
    return driver;
  }();
  return found;
}

[[noreturn]] inline void driver_failed(const char* what, int error) {
  const char* name = "unknown";
  driver().name(error, &name);
  PyErr_Format(PyExc_RuntimeError, "%s: the CUDA driver returned %s (%d)", what, name, error);
  throw PythonError();
}

// Make the device's CUDA context current, if this thread has none. The driver needs it, and a new thread whose memory
// comes from PyTorch's cache has called nothing of CUDA that would have made a context current.
inline void bind_context(int index) {
  void* current = nullptr;
  if (const int error = driver().context(&current)) driver_failed("the current context", error);
  if (current) return;
  static std::unordered_map<int, void*> retained;  // by device
  if (!retained.count(index)) {
    int device = 0;
    void* made = nullptr;
    if (const int error = driver().device(&device, index)) driver_failed("the current device", error);
    if (const int error = driver().retain(&made, device)) driver_failed("the device's context", error);
    retained[index] = made;
  }
  if (const int error = driver().bind(retained[index])) driver_failed("the device's context", error);
}

}  // namespace rooftop
