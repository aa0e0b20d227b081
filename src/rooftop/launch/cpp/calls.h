// The callable that takes the place of a Python function.
#pragma once

#include <Python.h>

#include <memory>
#include <vector>

#include <ATen/SavedTensorHooks.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>

#include "recordings.h"

namespace rooftop {

struct Calls {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* function;  // the Python function
  PyObject* miss;      // (facts, *arguments) calls the function, and may give this object a plan
  Known* known;
  std::vector<int>* varying;  // which size of each argument varies; a missing entry: none
};

// The result of the call if there is a plan for its facts; nullptr if Python has to make the call. `facts` becomes
// empty if no plan is possible.
inline PyObject* known_result(Calls* self, PyObject* const* given, size_t count, PyObject* names, Facts& facts,
                              Tensors& tensors) {
  facts.reserve(256);
  bool plain = put_modes(facts);
  Varying varying;
  const auto which = [&](size_t i) { return i < self->varying->size() ? (*self->varying)[i] : NONE; };
  const size_t all = count + (names ? PyTuple_GET_SIZE(names) : 0);
  for (size_t i = 0; plain && i < all; ++i) {
    if (i >= count) put(facts, 'k');  // distinguishes f("a", 1) from f(a=1)
    if (i >= count) plain = put_argument(facts, tensors, PyTuple_GET_ITEM(names, i - count), varying);
    plain = plain && put_argument(facts, tensors, given[i], varying, i < count ? which(i) : NONE);
  }
  if (!plain || tensors.empty()) {
    facts.clear();
    return nullptr;
  }
  const std::shared_ptr<Plan> plan = find(*self->known, facts, varying.values);
  if (!plan) return nullptr;
  const bool hooked = at::SavedTensorDefaultHooks::is_enabled() && at::SavedTensorDefaultHooks::get_hooks(false);
  Made made;
  if (!run(*plan, tensors, made, varying.values)) {
    facts.clear();
    return nullptr;
  }
  if (plan->recording) record(plan->recording, *plan, tensors, made, hooked);
  if (plan->kind == 't') return checked(THPVariable_Wrap(made.results[0]));
  const size_t size = plan->results.size();
  PyObject* results = checked(plan->kind == '[' ? PyList_New(size) : PyTuple_New(size));
  for (size_t i = 0; i < size; ++i) {
    const Tensor& each = made.results[i];
    PyObject* item = each.defined() ? THPVariable_Wrap(each) : Py_NewRef(Py_None);
    if (plan->kind == '[') PyList_SET_ITEM(results, i, item);
    else PyTuple_SET_ITEM(results, i, item);
  }
  return results;
}

inline PyObject* call(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  Calls* self = reinterpret_cast<Calls*>(object);
  const size_t count = PyVectorcall_NARGS(flags);
  HANDLE_TH_ERRORS
  try {
    Facts facts;
    Tensors tensors;
    if (PyObject* result = known_result(self, given, count, names, facts, tensors)) return result;
    if (facts.empty()) return PyObject_Vectorcall(self->function, given, flags, names);
    PyObject* key = checked(PyBytes_FromStringAndSize(facts.data(), facts.size()));
    std::vector<PyObject*> all{key};
    all.insert(all.end(), given, given + count + (names ? PyTuple_GET_SIZE(names) : 0));
    PyObject* result = PyObject_Vectorcall(self->miss, all.data(), count + 1, names);
    Py_DECREF(key);
    return result;
  } catch (PythonError&) {
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

inline int visit(PyObject* object, visitproc visit, void* arg) {
  Calls* self = reinterpret_cast<Calls*>(object);
  Py_VISIT(self->function);
  Py_VISIT(self->miss);
  return 0;
}

inline int clear(PyObject* object) {
  Calls* self = reinterpret_cast<Calls*>(object);
  Py_CLEAR(self->function);
  Py_CLEAR(self->miss);
  return 0;
}

inline void destroy(PyObject* object) {
  PyObject_GC_UnTrack(object);
  clear(object);
  delete reinterpret_cast<Calls*>(object)->known;
  delete reinterpret_cast<Calls*>(object)->varying;
  Py_TYPE(object)->tp_free(object);
}

inline PyTypeObject CallsType = {PyVarObject_HEAD_INIT(nullptr, 0)};

inline bool make_type() {
  CallsType.tp_name = "rooftop.Calls";
  CallsType.tp_doc = "Call a function, without Python if a plan is known for its arguments.";
  CallsType.tp_basicsize = sizeof(Calls);
  CallsType.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL;
  CallsType.tp_vectorcall_offset = offsetof(Calls, vectorcall);
  CallsType.tp_call = PyVectorcall_Call;
  CallsType.tp_traverse = visit;
  CallsType.tp_clear = clear;
  CallsType.tp_dealloc = destroy;
  return PyType_Ready(&CallsType) == 0;
}

inline Calls* calls_of(py::handle object) {
  if (Py_TYPE(object.ptr()) != &CallsType) throw py::type_error("expected calls made by make_calls");
  return reinterpret_cast<Calls*>(object.ptr());
}

inline py::object make_calls(py::object function, py::object miss, std::vector<int> varying) {
  Calls* self = PyObject_GC_New(Calls, &CallsType);
  if (!self) throw py::error_already_set();
  self->vectorcall = call;
  self->function = function.release().ptr();
  self->miss = miss.release().ptr();
  self->known = new Known();
  self->varying = new std::vector<int>(std::move(varying));
  PyObject_GC_Track(reinterpret_cast<PyObject*>(self));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

}  // namespace rooftop
