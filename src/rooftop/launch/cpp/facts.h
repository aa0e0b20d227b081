// Facts: what identifies a call (see module.cpp).
#pragma once

#include <Python.h>

#include <cstdlib>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include "objects.h"

namespace rooftop {

using at::Tensor;
using Tensors = std::vector<Tensor>;

using Facts = std::string;

template <typename Value>
void put(Facts& facts, Value value) {
  facts.append(reinterpret_cast<const char*>(&value), sizeof value);
}

// Sizes that vary from call to call, such as the number of sites of a point cloud. Facts do not contain the values of
// these sizes, but only which of them are equal.
struct Varying {
  std::vector<int64_t> values;

  void put_size(Facts& facts, int64_t value) {
    size_t i = 0;
    while (i < values.size() && values[i] != value) ++i;
    if (i == values.size()) values.push_back(value);
    put(facts, char(i));
  }
};
constexpr int FIRST = 0, LAST = 1, ITSELF = 2, NONE = -1;  // which size of an argument varies; ITSELF: a number
constexpr int64_t MOST_ELEMENTS = 1 << 30;  // of a tensor whose size varies, for 32-bit offsets
inline const std::vector<int64_t> ANY{-1};  // stands for sizes that vary from call to call

// Add the facts of a tensor except its sizes and strides.
inline void put_kind(Facts& facts, char letter, const Tensor& tensor) {
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  put(facts, letter);
  put(facts, impl.key_set().raw_repr());
  put(facts, impl.dtype().id());
  put(facts, impl.device().index());
  put(facts, char(impl.requires_grad()));
  put(facts, char(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) & 15));
  put(facts, char(impl.dim()));
}

inline void put_tensor(Facts& facts, const Tensor& tensor) {
  put_kind(facts, 't', tensor);
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  facts.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
  facts.append(reinterpret_cast<const char*>(strides.data()), strides.size() * sizeof(int64_t));
}

// Add the facts of a tensor of which one size varies. Returns false if the call cannot be planned.
inline bool put_varying(Facts& facts, const Tensor& tensor, int which, Varying& varying) {
  const auto sizes = tensor.sizes();
  if (sizes.empty() || !tensor.is_contiguous() || tensor.numel() == 0 || tensor.numel() > MOST_ELEMENTS) return false;
  put_kind(facts, 'v', tensor);
  const size_t place = which == FIRST ? 0 : sizes.size() - 1;
  for (size_t i = 0; i < sizes.size(); ++i)
    if (i == place) varying.put_size(facts, sizes[i]);
    else put(facts, sizes[i]);
  return true;
}

inline bool is_plain(const Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && tensor.has_storage() && !tensor.is_meta() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

// Add the facts and the tensors of an argument. Returns false if the argument has an unsupported type or is a proxy.
inline bool put_argument(Facts& facts, Tensors& tensors, PyObject* each, Varying& varying, int which = NONE,
                         int depth = 0) {
  PyTypeObject* type = Py_TYPE(each);
  if (type == reinterpret_cast<PyTypeObject*>(THPVariableClass) || type == python.parameter) {
    const Tensor& tensor = THPVariable_Unpack(each);
    if (!is_plain(tensor)) return false;
    if (which == NONE) put_tensor(facts, tensor);
    else if (!put_varying(facts, tensor, which, varying)) return false;
    tensors.push_back(tensor);
  } else if (each == Py_None) {
    put(facts, 'n');
  } else if (each == Py_True || each == Py_False) {
    put(facts, each == Py_True ? '1' : '0');
  } else if (type == &PyLong_Type) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(each, &overflow);
    if (overflow || (which == ITSELF && value < 1)) return false;
    put(facts, which == ITSELF ? 'I' : 'i');
    if (which == ITSELF) varying.put_size(facts, value);
    else put(facts, value);
  } else if (type == &PyFloat_Type) {
    put(facts, 'f');
    put(facts, PyFloat_AS_DOUBLE(each));
  } else if (type == &PyUnicode_Type) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(each, &size);
    if (!text) {
      PyErr_Clear();
      return false;
    }
    put(facts, 's');
    put(facts, size);
    facts.append(text, size);
  } else if (THPDtype_Check(each)) {
    put(facts, 'd');
    put(facts, reinterpret_cast<THPDtype*>(each)->scalar_type);
  } else if (depth < 2 && (PyTuple_Check(each) || type == &PyList_Type)) {  // torch.Size is a tuple
    if (type == &PyList_Type) put(facts, '[');
    else if (type == &PyTuple_Type) put(facts, '(');
    else if (type == reinterpret_cast<PyTypeObject*>(&THPSizeType)) put(facts, '{');
    else return false;
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(each);
    put(facts, size);
    for (Py_ssize_t i = 0; i < size; ++i)
      if (!put_argument(facts, tensors, PySequence_Fast_GET_ITEM(each, i), varying, NONE, depth + 1)) return false;
  } else {
    return false;
  }
  return true;
}

inline uint64_t plain_keys = 0, inference_keys = 0;  // dispatch keys included on a thread where nothing watches calls

// Add PyTorch's modes on this thread. Returns false if a mode, transform or profiler must see the calls.
inline bool put_modes(Facts& facts) {
  if (teaching || in_python) return false;
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const bool inference = c10::InferenceMode::is_enabled();
  if (keys.included_.raw_repr() != (inference ? inference_keys : plain_keys)) return false;
  if (at::impl::PythonTorchFunctionTLS::stack_len() || PyList_GET_SIZE(python.counts)) return false;
  put(facts, char(inference | at::GradMode::is_enabled() << 1));
  put(facts, keys.excluded_.raw_repr());
  put(facts, at::autocast::get_autocast_dtype(at::kCUDA));
  put(facts, at::autocast::get_autocast_dtype(at::kCPU));
  const auto& context = at::globalContext();
  if (context.deterministicAlgorithms()) return false;  // PyTorch may fill new memory
  for (const auto backend : {at::Float32Backend::CUDA, at::Float32Backend::MKLDNN})
    for (const auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV})
      put(facts, context.float32Precision(backend, op));
  put(facts, char(context.userEnabledFlashSDP() | context.userEnabledMemEfficientSDP() << 1 |
                  context.userEnabledCuDNNSDP() << 2 | context.userEnabledCuDNN() << 3));
  const char* check = std::getenv("ROOFTOP_CHECK");
  facts.append(check ? check : "").push_back('\0');
  if (is_true(python.profiles)) return false;
  static PyObject* level = PyUnicode_InternFromString("_current_level");
  return integer(PyObject_GetAttr(python.forward_mode, level)) < 0 && !is_true(python.is_watched);
}

}  // namespace rooftop
