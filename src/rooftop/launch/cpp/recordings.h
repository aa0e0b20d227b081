// How autograd records a call: its node, the saved tensors, and backward.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
#include <torch/csrc/dynamo/compiled_autograd.h>
#define COMPILED_AUTOGRAD  // accepts C++ nodes, by an interface of PyTorch 2.13 and later
#endif

#include "running.h"

namespace rooftop {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

using torch::autograd::Node;
using NodePointer = decltype(torch::autograd::Edge::function);  // std::shared_ptr or c10::intrusive_ptr

template <typename Pointer>
constexpr bool SHARED = std::is_same_v<Pointer, std::shared_ptr<Node>>;

template <typename Made, typename Pointer>
Pointer make_node() {
  if constexpr (SHARED<Pointer>) return Pointer(new Made(), [](auto* each) { deleteNode(each); });
  else return c10::make_intrusive<Made>();
}

template <typename Pointer, typename Made>
Pointer pointer_to(Made* node) {
  if constexpr (SHARED<Pointer>) return node->shared_from_this();
  else return Pointer::reclaim_copy(node);
}

inline bool has_sizes(const Tensor& tensor, const std::vector<int64_t>& sizes) {
  return sizes == ANY || tensor.sizes() == at::IntArrayRef(sizes);
}

struct Kept {
  int source;  // index among the call's tensors and, after them, its memory; -1: an empty tensor
  bool output; // whether it is a result with a gradient
  std::vector<int64_t> sizes;  // the sizes that the operator saw
  at::ScalarType dtype;
};

struct Recording {
  std::string name;
  int64_t number = 0;  // unique in this process
  std::vector<Kept> kept;
  std::vector<int> weak;                         // tensors of the call that backward uses if they still exist unchanged
  std::vector<int> edges;                        // tensors of the call, in the order of the operator's tensor arguments
  std::vector<std::vector<int64_t>> edge_sizes;  // sizes of these tensors
  std::vector<std::vector<int64_t>> slope_sizes; // sizes of the operator's results with gradients, in order
  std::vector<int> slopes;  // for each result of the call that has a gradient, its index in `slope_sizes`
  std::vector<int> watched;                      // the results with gradients, as indices of `Plan::results`
  std::vector<int> varying_kept, varying_slopes; // which size of each kept tensor and each slope varies; empty: none
  bool zeros;                                    // whether an undefined gradient counts as zeros
  py::object backward;  // (facts, kept, weak, wanted, slopes) to gradients of the operator's tensors; may add plans
  Known known;          // plans of backward, with a result for each edge
};

inline std::unordered_map<int64_t, std::weak_ptr<Recording>> recordings;  // by number

// A thread of autograd may free the last node of a graph without holding the GIL.
inline void delete_recording(Recording* recording) {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  recordings.erase(recording->number);
  delete recording;
}

inline py::list wrapped(const Tensors& tensors) {
  py::list list(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i)
    PyList_SET_ITEM(list.ptr(), i,
                    tensors[i].defined() ? checked(THPVariable_Wrap(tensors[i])) : py::none().release().ptr());
  return list;
}

// Compute the gradients of the operator's tensors in Python.
inline variable_list by_python(const Recording& how, const Facts& facts, const Tensors& kept, const Tensors& weak,
                        const std::vector<bool>& wanted, const Tensors& slopes) {
  const py::bytes key(facts);
  const py::object first = wrapped(kept), second = wrapped(weak), third = py::cast(wanted), fourth = wrapped(slopes);
  PyObject* answer = PyObject_CallFunctionObjArgs(how.backward.ptr(), key.ptr(), first.ptr(), second.ptr(), third.ptr(),
                                                  fourth.ptr(), nullptr);
  const py::object found = py::reinterpret_steal<py::object>(checked(answer));
  const py::sequence each(found);
  variable_list results(how.edges.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const py::object item = each[i];
    if (!item.is_none()) results[i] = THPVariable_Unpack(item.ptr());
  }
  return results;
}

// View gradients of the operator's tensors in the shapes of the call's tensors. (The operator's tensors are views of
// the call's tensors.)
inline variable_list shaped(const Recording& how, variable_list& results) {
  for (size_t i = 0; i < results.size(); ++i)
    if (results[i].defined() && !has_sizes(results[i], how.edge_sizes[i]))
      results[i] = results[i].reshape(how.edge_sizes[i]);
  return std::move(results);
}

// A weak reference to a tensor; undefined if the tensor no longer exists or was changed.
struct WeakTensor {
  c10::weak_intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl> pointer;
  uint32_t version;

  explicit WeakTensor(const Tensor& tensor) : pointer(tensor.getIntrusivePtr()), version(version_of(tensor)) {}

  static uint32_t version_of(const Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

  Tensor now() const {
    auto found = pointer.lock();
    const Tensor tensor = found ? Tensor(std::move(found)) : Tensor();
    return tensor.defined() && version_of(tensor) == version ? tensor : Tensor();
  }
};

struct Recorded : torch::autograd::Node {
  std::shared_ptr<Recording> how;
  std::vector<SavedVariable> saved;
  // the numbers of results that are saved in another shape and without history, by their index in `saved`
  std::unordered_map<size_t, uint32_t> reshaped;
  std::vector<std::optional<WeakTensor>> weak;
  bool released = false;

  std::string name() const override { return how->name; }

  void release_variables() override {
    std::lock_guard<std::mutex> lock(mutex_);
    saved.clear();
    released = true;
  }

  variable_list apply(variable_list&& given) override {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
    py::gil_scoped_acquire gil;
    try {
      return gradients(given);
    } catch (PythonError&) {
      python_error error;
      error.persist();
      throw error;
    }
  }

  variable_list gradients(const variable_list& given) {
    Tensors kept, slopes(how->slope_sizes.size());
    bool any = false;
    for (size_t i = 0; i < given.size(); ++i) {
      Tensor slope = given[i];
      const int place = how->slopes[i];
      if (!slope.defined() && how->zeros) slope = input_metadata(i).zeros_like();
      if (slope.defined() && !has_sizes(slope, how->slope_sizes[place]))
        slope = slope.reshape(how->slope_sizes[place]);
      if (slope.defined() && !how->varying_slopes.empty() && how->varying_slopes[place] != NONE)
        slope = slope.contiguous();
      any = any || slope.defined();
      slopes[place] = slope;
    }
    if (!any) return variable_list(how->edges.size());
    const NodePointer self = pointer_to<NodePointer>(this);
    for (size_t i = 0; i < saved.size(); ++i) {
      Tensor tensor = saved[i].unpack(how->kept[i].output ? self : NodePointer());
      if (const auto found = reshaped.find(i); found != reshaped.end()) {
        tensor = tensor.detach().view_symint(input_metadata(found->second).shape_as_dim_vector());
        torch::autograd::impl::set_gradient_edge(tensor, {self, found->second});
      }
      if (!has_sizes(tensor, how->kept[i].sizes)) tensor = tensor.view(how->kept[i].sizes);
      kept.push_back(tensor);
    }
    Facts facts;
    bool plain = !at::GradMode::is_enabled() && put_modes(facts);
    Tensors sources;
    Varying varying;
    for (const Tensors* each : {&kept, &slopes}) {
      const std::vector<int>& which = each == &kept ? how->varying_kept : how->varying_slopes;
      for (size_t i = 0; plain && i < each->size(); ++i) {
        Tensor tensor = (*each)[i];
        if (!tensor.defined()) {
          put(facts, 'n');
        } else if (is_plain(tensor)) {
          if (which.empty() || which[i] == NONE) put_tensor(facts, tensor);
          else plain = put_varying(facts, tensor, which[i], varying);
          sources.push_back(tensor);
        } else {
          plain = false;
        }
      }
    }
    for (size_t i = 0; i < how->edges.size(); ++i) put(facts, char(task_should_compute_output(i)));
    // If the graph is not kept, backward may change the tensors that the node saved.
    put(facts, char(torch::autograd::get_current_graph_task_keep_graph()));
    if (plain) {
      Made made;
      const std::shared_ptr<Plan> plan = find(how->known, facts, varying.values);  // a reference: others may drop it
      if (plan && run(*plan, sources, made, varying.values)) return shaped(*how, made.results);
    }
    std::vector<bool> wanted;
    for (size_t i = 0; i < how->edges.size(); ++i) wanted.push_back(task_should_compute_output(i));
    Tensors seen;
    for (const auto& each : weak) seen.push_back(each ? each->now() : Tensor());
    variable_list results = by_python(*how, plain ? facts : Facts(), kept, seen, wanted, slopes);
    return shaped(*how, results);
  }

#ifdef COMPILED_AUTOGRAD
  // For compiled autograd: collect all values on which the compiled backward depends, and the saved tensors.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const override {
    args.collect(how->name);
    args.collect(static_cast<uint64_t>(how->number));
    for (size_t i = 0; i < saved.size(); ++i) args.collect(saved[i], how->kept[i].output);
    args.collect(released);
  }

  // The compiled backward calls `compiled_gradients`, with tensors of its graph in place of the saved tensors.
  variable_list apply_with_saved(const variable_list& inputs,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    for (SavedVariable& each : saved) swap.before(each);
    const NodePointer self = pointer_to<NodePointer>(this);
    Tensors kept;
    std::vector<bool> wanted;
    for (size_t i = 0; i < saved.size(); ++i)
      kept.push_back(saved[i].unpack(how->kept[i].output ? self : NodePointer()));
    for (size_t i = 0; i < how->edges.size(); ++i) wanted.push_back(task_should_compute_output(i));
    PackedArgs packed;
    packed.pack(how->number);
    packed.pack(kept);
    packed.pack(wanted);
    const auto args = packed.vec();
    std::vector<at::TypePtr> schema;
    for (const auto& each : args) schema.push_back(each.isTensor() ? at::TypePtr(at::TensorType::get()) : each.type());
    using Metadata = std::vector<std::optional<torch::autograd::InputMetadata>>;
    const auto metadata = IValuePacker<Metadata>::pack(get_input_metadata(next_edges()));
    const auto& compiler = getPyCompilerInterface();
    PyObject* const traced = swap.get_py_compiler();
    const auto bound = compiler->bind_function(traced, how->name, compiled_gradients, schema, true, false);
    variable_list results = compiler->call_function(traced, "apply_functional", bound, inputs, args, metadata);
    for (SavedVariable& each : saved) swap.after(each);
    return results;
  }

  static variable_list compiled_gradients(const variable_list& given, const std::vector<c10::IValue>& args) {
    torch::dynamo::autograd::PackedArgs packed(args);
    const auto number = packed.unpack<int64_t>();
    Tensors kept = packed.unpack<Tensors>();
    const auto wanted = packed.unpack<std::vector<bool>>();
    const py::gil_scoped_acquire gil;
    const auto found = recordings.find(number);
    const auto how = found == recordings.end() ? nullptr : found->second.lock();
    TORCH_CHECK(how, "the call that this backward belongs to was forgotten: run its forward again");
    Tensors slopes(how->slope_sizes.size());
    for (size_t i = 0; i < given.size(); ++i) {
      const std::vector<int64_t>& sizes = how->slope_sizes[how->slopes[i]];
      if (given[i].defined()) slopes[how->slopes[i]] = sizes == ANY ? given[i] : given[i].reshape(sizes);
    }
    for (size_t i = 0; i < kept.size(); ++i)
      if (how->kept[i].sizes != ANY) kept[i] = kept[i].view(how->kept[i].sizes);
    try {
      variable_list results = by_python(*how, Facts(), kept, Tensors(how->weak.size()), wanted, slopes);
      return shaped(*how, results);
    } catch (PythonError&) {
      python_error error;
      error.persist();
      throw error;
    }
  }
#endif
};

// The index of the plan's result that is this kept tensor; the number of results if there is none.
inline size_t result_of(const Plan& plan, const Kept& kept) {
  const auto found = std::find_if(plan.results.begin(), plan.results.end(),
                                  [&](const View& view) { return view.source == kept.source; });
  return found - plan.results.begin();
}

// Make autograd's node of a call. Hooks for saved tensors get tensors with the shapes that the operator saw, as from
// Python, because checkpointing compares the shapes of two calls.
inline void record(const std::shared_ptr<Recording>& how, const Plan& plan, const Tensors& tensors, const Made& made,
                   bool hooked) {
  const NodePointer pointer = make_node<Recorded, NodePointer>();
  auto* node = static_cast<Recorded*>(pointer.get());
  node->how = how;
  for (int edge : how->edges)
    node->add_next_edge(tensors[edge].requires_grad() ? torch::autograd::impl::gradient_edge(tensors[edge])
                                                      : torch::autograd::Edge());
  for (int place : how->watched) torch::autograd::set_history(made.results[place], pointer);
  const int count = int(tensors.size());
  for (const Kept& each : how->kept) {
    if (each.source < 0) {
      node->saved.emplace_back(at::empty(each.sizes, at::TensorOptions().dtype(each.dtype).device(plan.device)), false);
      continue;
    }
    const size_t result = result_of(plan, each);
    const Tensor& tensor = each.source < count             ? tensors[each.source]
                           : result < plan.results.size() ? made.results[result]
                                                           : made.memory[each.source - count];
    if (!hooked || has_sizes(tensor, each.sizes)) {
      node->saved.emplace_back(tensor, each.output);
    } else if (!each.output) {
      node->saved.emplace_back(tensor.view(each.sizes), false);
    } else {
      node->reshaped[node->saved.size()] = tensor.output_nr();
      node->saved.emplace_back(tensor.detach().view(each.sizes), false);
    }
  }
  for (int place : how->weak)
    node->weak.push_back(place < 0 ? std::nullopt : std::make_optional(WeakTensor(tensors[place])));
}

}  // namespace rooftop
