// Plans: the allocations and launches of a call, and where its results are.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include "driver.h"
#include "facts.h"

namespace rooftop {

namespace py = pybind11;

// A formula of sizes that vary from call to call (row_counts.py).
struct Formula {
  std::vector<int64_t> code;

  int64_t of(const std::vector<int64_t>& values) const {
    int64_t stack[64];
    int top = 0;
    for (size_t i = 0; i + 1 < code.size(); i += 2) {
      if (code[i] == 0) {
        stack[top++] = values[code[i + 1]];
      } else if (code[i] == 1) {
        stack[top++] = code[i + 1];
      } else {
        const int64_t right = stack[--top], left = stack[--top];
        int64_t made = 0;
        if (code[i] == 2) made = left + right;
        else if (code[i] == 3) made = left * right;
        else if (right) made = left / right - (left % right != 0 && (left < 0) != (right < 0));  // floors
        stack[top++] = made;
      }
    }
    return stack[0];
  }
};
constexpr size_t MOST_CODE = 128;  // the stack above suffices for this length

struct Condition {
  Formula formula;
  int kind;
  bool held;

  bool holds(const std::vector<int64_t>& values) const {
    const int64_t value = formula.of(values);
    return (kind == 0 ? value < 0 : kind == 1 ? value == 0 : value % 16 == 0) == held;
  }
};

struct Number {  // a parameter of a kernel
  int parameter;
  size_t size;
  Formula formula;
};

struct Memory {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  // The number of zeroed counters of the stream. -1: the plan allocates this memory. -2: an operator of PyTorch
  // allocates this memory, or nothing uses it.
  int64_t zeros = -1;
  std::vector<Formula> formulas;  // of varying sizes; such memory is contiguous
};

struct Patch {
  int parameter, source;
  int64_t offset;  // bytes
};

struct View {  // of a source
  int source;    // -1: None
  std::vector<int64_t> sizes, strides;
  int64_t offset;  // in elements, from the source's first
};

// A call of PyTorch's own operator.
struct OperatorCall {
  std::optional<c10::OperatorHandle> handle;
  std::vector<c10::IValue> arguments;
  std::vector<std::pair<size_t, View>> tensors;                // tensors by index of the argument
  std::vector<std::pair<size_t, std::vector<View>>> lists;     // lists of tensors, likewise
  std::vector<int> made;                                       // sources of its results
};

struct Launch {
  std::shared_ptr<OperatorCall> call;
  py::object python;  // (sources, numbers) launches the kernel; None: the driver launches it
  void* function = nullptr;  // a CUfunction, or a CUkernel, which is valid in all contexts
  std::string name;          // for errors
  py::object owner;          // the Python object that unloads the function when it is freed
  LaunchConfig config{};
  std::vector<LaunchAttribute> attributes;
  std::string parameters;          // bytes of the parameters, with 0 for pointers
  std::vector<int> offsets;        // offset of each parameter
  std::vector<Patch> patches;
  std::vector<Formula> grid;       // if sizes vary
  std::vector<Number> numbers;
  std::vector<Patch> maps;  // tensor maps (CUtensorMap) whose address is replaced
};

constexpr size_t TENSOR_MAP_BYTES = 128, MAP_ALIGNMENT = 64;
constexpr size_t MOST_PARAMETER_BYTES = 4096, MOST_PARAMETERS = 128;  // 4096 bytes is CUDA's limit

struct Recording;  // how autograd records a call

struct Plan {
  std::vector<Memory> memory;
  std::vector<Launch> launches;
  std::vector<View> results;  // views of the given tensors and, after them, the memory
  char kind = 't';           // 't': a tensor, '(': a tuple, '[': a list
  at::Device device = at::kCPU;
  std::shared_ptr<Recording> recording;
  bool varies = false;                // whether the plan also holds for other sizes
  std::vector<Condition> conditions;  // conditions on the sizes for which the plan holds
};
using Known = std::unordered_map<Facts, std::vector<std::shared_ptr<Plan>>>;

inline std::shared_ptr<Plan> find(const Known& known, const Facts& facts, const std::vector<int64_t>& values) {
  const auto found = known.find(facts);
  if (found == known.end()) return nullptr;
  for (const auto& plan : found->second)
    if (std::all_of(plan->conditions.begin(), plan->conditions.end(),
                    [&](const Condition& each) { return each.holds(values); }))
      return plan;
  return nullptr;
}

}  // namespace rooftop
