// Execute a plan: allocate, launch kernels and call operators of PyTorch.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include "plans.h"

namespace rooftop {

inline bool is_whole(const Tensor& source, const View& view) {
  return source.sizes() == at::IntArrayRef(view.sizes) && source.strides() == at::IntArrayRef(view.strides) &&
         !view.offset;
}

// The same memory as a tensor without history, with a version counter of its own.
inline Tensor unseen(const Tensor& source) {
  return Tensor(source.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
}

// Make a tensor in the memory of another tensor. Autograd and version counters do not see the new tensor.
inline Tensor part_of(const Tensor& source, const View& view) {
  if (view.sizes == ANY)
    return source.requires_grad() ? unseen(source) : source;
  if (is_whole(source, view) && !source.requires_grad()) return source;
  Tensor part = unseen(source);
  part.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes, view.strides, source.storage_offset() + view.offset);
  return part;
}

// Make a gradient in the memory of another tensor. If the gradient is the whole tensor, return that tensor object
// itself: autograd then sees that there are other references, and copies the gradient before it accumulates in place.
inline Tensor view_of(const Tensor& source, const View& view) {
  if (view.sizes == ANY) return source;
  if (is_whole(source, view)) return source;
  return source.as_strided(view.sizes, view.strides, source.storage_offset() + view.offset);
}

struct Made {
  Tensors memory;
  std::vector<Tensor> results;
};

inline void call_operator(const OperatorCall& call, Tensors& sources) {
  torch::jit::Stack stack = call.arguments;
  for (const auto& [place, view] : call.tensors) stack[place] = part_of(sources[view.source], view);
  for (const auto& [place, views] : call.lists) {
    c10::List<Tensor> list;
    for (const View& view : views) list.push_back(part_of(sources[view.source], view));
    stack[place] = list;
  }
  call.handle->callBoxed(stack);
  for (size_t i = 0; i < call.made.size(); ++i)
    if (call.made[i] >= 0 && !sources[call.made[i]].defined()) sources[call.made[i]] = stack[i].toTensor();
}

inline void launch(const Launch& step, const Tensors& sources, void* stream, const std::vector<int64_t>* counts) {
  if (!step.python.is_none()) {
    py::list given(sources.size());
    for (size_t i = 0; i < sources.size(); ++i)
      PyList_SET_ITEM(given.ptr(), i, checked(THPVariable_Wrap(sources[i])));
    const py::object numbers = counts ? py::object(py::cast(*counts)) : py::object();
    PyObject* done = checked(PyObject_CallFunctionObjArgs(step.python.ptr(), given.ptr(), numbers.ptr(), nullptr));
    Py_DECREF(done);
    return;
  }
  alignas(MAP_ALIGNMENT) char values[MOST_PARAMETER_BYTES];
  std::memcpy(values, step.parameters.data(), step.parameters.size());
  void* pointers[MOST_PARAMETERS];
  for (size_t i = 0; i < step.offsets.size(); ++i) pointers[i] = values + step.offsets[i];
  for (const Patch& patch : step.patches) {
    const char* address = static_cast<const char*>(sources[patch.source].const_data_ptr()) + patch.offset;
    std::memcpy(pointers[patch.parameter], &address, sizeof address);
  }
  for (const Patch& map : step.maps) {
    char* address = const_cast<char*>(static_cast<const char*>(sources[map.source].const_data_ptr())) + map.offset;
    if (const int error = driver().replace(pointers[map.parameter], address))
      driver_failed("a tensor descriptor", error);
  }
  for (const Number& each : step.numbers) {
    const int64_t value = each.formula.of(*counts);  // little-endian: the first bytes are the narrower number
    std::memcpy(pointers[each.parameter], &value, each.size);
  }
  LaunchConfig config = step.config;
  for (size_t i = 0; i < step.grid.size(); ++i) {
    const int64_t size = step.grid[i].of(*counts);
    if (size == 0) return;
    config.grid[i] = unsigned(size);
  }
  LaunchAttribute attributes[MOST_ATTRIBUTES];
  std::copy(step.attributes.begin(), step.attributes.end(), attributes);
  config.stream = stream;
  config.attributes = attributes;
  config.count = step.attributes.size();
  if (const int error = driver().launch(&config, step.function, pointers, nullptr))
    driver_failed(("launch of kernel " + step.name).c_str(), error);
}

// Zeroed counters of a stream, or separate counters of a captured launch. Returns an undefined tensor if no counters
// are available.
inline Tensor zeros(at::Device device, void* stream, int64_t count) {
  static std::unordered_map<std::string, Tensor> of_streams;  // counters by stream, never freed
  Facts key;
  put(key, device.type());
  put(key, device.index());
  put(key, stream);
  const bool captured = device.is_cuda() && is_true(python.captures);
  if (!captured)
    if (auto found = of_streams.find(key); found != of_streams.end() && found->second.numel() >= count)
      return found->second;
  py::object made = py::reinterpret_steal<py::object>(
      checked(PyObject_CallFunction(python.counters, "NL", THPDevice_New(device), (long long)count)));
  if (made.is_none()) return Tensor();
  const Tensor found = THPVariable_Unpack(made.ptr());
  return captured ? found : of_streams[key] = found;
}

// Execute a plan. Returns false if the current device is not the plan's device, or no counters are available.
inline bool run(const Plan& plan, const Tensors& tensors, Made& made, const std::vector<int64_t>& values) {
  void* stream = nullptr;
  if (plan.device.is_cuda()) {
    const auto index = plan.device.index();
    if (integer(PyObject_CallNoArgs(python.device)) != index) return false;
    if (driver().context) bind_context(index);
    PyObject* number = checked(PyLong_FromLong(index));
    PyObject* found = PyObject_CallOneArg(python.stream, number);
    Py_DECREF(number);
    stream = reinterpret_cast<void*>(integer(found));
  }
  Tensors sources = tensors;
  sources.reserve(tensors.size() + plan.memory.size());
  made.memory.reserve(plan.memory.size());
  for (const Memory& each : plan.memory) {
    Tensor memory;
    if (each.zeros == -2) {
    } else if (each.zeros >= 0) {
      memory = zeros(plan.device, stream, each.zeros);
      if (!memory.defined()) return false;
    } else if (!each.formulas.empty()) {
      std::vector<int64_t> sizes;
      int64_t elements = 1;
      for (const Formula& formula : each.formulas) {
        sizes.push_back(formula.of(values));
        if (sizes.back() <= 0 || sizes.back() > MOST_ELEMENTS / elements) return false;
        elements *= sizes.back();
      }
      memory = at::empty(sizes, at::TensorOptions().dtype(each.dtype).device(plan.device));
    } else {
      memory = at::empty_strided(each.sizes, each.strides, at::TensorOptions().dtype(each.dtype).device(plan.device));
    }
    made.memory.push_back(memory);
    sources.push_back(memory);
  }
  {
    const at::NoGradGuard no_gradients;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    for (const Launch& each : plan.launches)
      if (each.call) call_operator(*each.call, sources);
      else launch(each, sources, stream, plan.varies ? &values : nullptr);
  }
  for (size_t i = 0; i < made.memory.size(); ++i) made.memory[i] = sources[tensors.size() + i];
  const int count = int(tensors.size());
  for (const View& each : plan.results)
    made.results.push_back(each.source < 0       ? Tensor()
                           : each.source < count ? view_of(tensors[each.source], each)
                                                 : part_of(sources[each.source], each));
  ++calls_made;
  return true;
}

}  // namespace rooftop
