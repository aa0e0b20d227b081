// Objects and flags that Python passes once, and errors of Python.
#pragma once

#include <Python.h>

#include <cstdint>

namespace rooftop {

struct Python {
  PyTypeObject* parameter = nullptr;  // torch.nn.Parameter
  PyObject* counts = nullptr;         // the list of active launch counters
  PyObject* is_watched = nullptr;     // whether Triton's hooks must see launches
  PyObject* profiles = nullptr;       // whether PyTorch's profiler is on
  PyObject* forward_mode = nullptr;   // module whose _current_level tells whether forward-mode AD is on
  PyObject* counters = nullptr;       // (device, count) to zeroed counters of the current stream, or None
  PyObject* device = nullptr;         // () to the current CUDA device's index; None without CUDA
  PyObject* stream = nullptr;         // (index) to the current stream of that CUDA device
  PyObject* captures = nullptr;       // () to whether the current stream is being captured
};
inline Python python;

inline bool teaching = false;    // true while Python observes a call; Python then makes all calls
inline bool in_python = false;   // true if the user requested that Python makes all calls
inline uint64_t calls_made = 0;  // calls made without Python, including backward

struct PythonError {};  // a Python exception is set

inline PyObject* checked(PyObject* made) {
  if (!made) throw PythonError();
  return made;
}

inline bool is_true(PyObject* callable) {
  PyObject* found = checked(PyObject_CallNoArgs(callable));
  const int truth = PyObject_IsTrue(found);
  Py_DECREF(found);
  if (truth < 0) throw PythonError();
  return truth;
}

inline long long integer(PyObject* owned) {
  const long long value = PyLong_AsLongLong(checked(owned));
  Py_DECREF(owned);
  if (value == -1 && PyErr_Occurred()) throw PythonError();
  return value;
}

}  // namespace rooftop
