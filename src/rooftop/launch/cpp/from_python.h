// Read plans from the dicts that call_plans.py makes.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/ScalarOps.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "recordings.h"

namespace rooftop {

inline at::ScalarType dtype_of(py::handle dtype) { return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type; }

inline std::shared_ptr<OperatorCall> operator_of(const py::dict& given) {
  auto made = std::make_shared<OperatorCall>();
  const auto name = given["operator"].cast<std::pair<std::string, std::string>>();
  made->handle = c10::Dispatcher::singleton().findSchemaOrThrow(name.first.c_str(), name.second.c_str());
  const py::dict arguments = given["arguments"];
  const auto& schema = made->handle->schema();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const py::str key(argument.name());
    if (!arguments.contains(key)) {
      if (!argument.default_value()) throw py::value_error("an argument is missing");
      made->arguments.push_back(*argument.default_value());
      continue;
    }
    const py::object value = arguments[key];
    const bool filled = py::isinstance<py::list>(value) && py::len(value);
    const bool list = filled && py::isinstance<View>(value.cast<py::list>()[0]);
    if (py::isinstance<View>(value)) {
      made->tensors.emplace_back(i, value.cast<View>());
      made->arguments.emplace_back();
    } else if (list) {
      made->lists.emplace_back(i, value.cast<std::vector<View>>());
      made->arguments.emplace_back();
    } else if (argument.type()->kind() == c10::TypeKind::TensorType && PyNumber_Check(value.ptr()) &&
               !THPVariable_Check(value.ptr())) {  // an empty tensor is passed as it is
      Tensor number = at::scalar_to_tensor(torch::jit::toIValue(value, c10::NumberType::get()).toScalar());
      number.unsafeGetTensorImpl()->set_wrapped_number(true);  // so that no operand is promoted
      made->arguments.emplace_back(number);
    } else {
      made->arguments.push_back(torch::jit::toIValue(value, argument.type()));
    }
  }
  made->made = given["made"].cast<std::vector<int>>();
  return made;
}

inline Formula formula_of(std::vector<int64_t> code) {
  if (code.size() > MOST_CODE) throw py::value_error("a formula is too long");
  return {std::move(code)};
}

inline std::vector<Formula> formulas_of(const std::vector<std::vector<int64_t>>& codes) {
  std::vector<Formula> made;
  for (const auto& each : codes) made.push_back(formula_of(each));
  return made;
}

inline Launch launch_of(const py::dict& given) {
  Launch made;
  made.python = given["python"];
  if (given.contains("operator")) {
    made.call = operator_of(given);
    return made;
  }
  if (!made.python.is_none()) return made;
  const auto& cuda = driver();
  const auto parameter = given["in_all_contexts"].cast<bool>() ? cuda.kernel_parameter : cuda.parameter;
  if (!cuda.launch || !parameter || !cuda.name) throw py::value_error("the driver has no cuFuncGetParamInfo");
  made.function = reinterpret_cast<void*>(given["function"].cast<uintptr_t>());
  made.name = given["name"].cast<std::string>();
  made.owner = given["owner"];
  const auto grid = given["grid"].cast<std::vector<unsigned>>();
  const auto block = given["block"].cast<std::vector<unsigned>>();
  std::copy_n(grid.begin(), 3, made.config.grid);
  std::copy_n(block.begin(), 3, made.config.block);
  made.config.shared = given["shared"].cast<unsigned>();
  for (auto [name, id] : {std::pair("early", PROGRAMMATIC_STREAM_SERIALIZATION), std::pair("cooperative", COOPERATIVE)})
    if (given[name].cast<bool>()) {
      LaunchAttribute& attribute = made.attributes.emplace_back(LaunchAttribute{});
      attribute.id = id;
      attribute.allowed = 1;
    }
  if (py::object cluster = given["cluster"]; !cluster.is_none()) {
    LaunchAttribute& attribute = made.attributes.emplace_back(LaunchAttribute{});
    attribute.id = CLUSTER_DIMENSION;
    const auto sizes = cluster.cast<std::vector<unsigned>>();
    std::copy_n(sizes.begin(), 3, attribute.cluster);
  }
  made.parameters = given["parameters"].cast<std::string>();
  made.offsets = given["offsets"].cast<std::vector<int>>();
  const auto sizes = given["sizes"].cast<std::vector<size_t>>();
  made.grid = formulas_of(given["grid_formulas"].cast<std::vector<std::vector<int64_t>>>());
  for (auto each : given["numbers"].cast<std::vector<std::pair<int, std::vector<int64_t>>>>())
    made.numbers.push_back({each.first, sizes[each.first], formula_of(each.second)});
  for (auto each : given["patches"].cast<std::vector<std::tuple<int, int, int64_t>>>())
    made.patches.push_back({std::get<0>(each), std::get<1>(each), std::get<2>(each)});
  for (auto each : given["maps"].cast<std::vector<std::tuple<int, int, int64_t>>>())
    made.maps.push_back({std::get<0>(each), std::get<1>(each), std::get<2>(each)});
  if (sizes.size() > MOST_PARAMETERS || made.parameters.size() > MOST_PARAMETER_BYTES)
    throw py::value_error("a kernel has too many parameters");
  for (const Patch& map : made.maps) {  // check that the driver accepts the bytes as a tensor map
    alignas(MAP_ALIGNMENT) char bytes[TENSOR_MAP_BYTES];
    std::memcpy(bytes, made.parameters.data() + made.offsets[map.parameter], TENSOR_MAP_BYTES);
    if (!cuda.replace || cuda.replace(bytes, reinterpret_cast<void*>(uintptr_t(1) << 32)))
      throw py::value_error("no tensor map");
  }
  for (size_t i = 0; i <= sizes.size(); ++i) {
    size_t offset = 0, size = 0;
    const bool there = parameter(made.function, i, &offset, &size) == 0;
    if (there != (i < sizes.size()) || (there && size != sizes[i]))
      throw py::value_error("the kernel has other parameters");
  }
  return made;
}

inline std::shared_ptr<Plan> plan_of(const py::dict& given) {
  auto plan = std::make_shared<Plan>();
  plan->device = reinterpret_cast<THPDevice*>(given["device"].cast<py::object>().ptr())->device;
  plan->varies = given["varies"].cast<bool>();
  for (auto each : given["conditions"].cast<std::vector<std::tuple<std::vector<int64_t>, int, bool>>>())
    plan->conditions.push_back({formula_of(std::get<0>(each)), std::get<1>(each), std::get<2>(each)});
  using Sizes = std::vector<int64_t>;
  using Codes = std::vector<std::vector<int64_t>>;
  for (auto& [sizes, strides, dtype, zeros, codes] :
       given["memory"].cast<std::vector<std::tuple<Sizes, Sizes, py::object, int64_t, Codes>>>())
    plan->memory.push_back({sizes, strides, dtype_of(dtype), zeros, formulas_of(codes)});
  for (auto each : given["launches"].cast<std::vector<py::dict>>()) plan->launches.push_back(launch_of(each));
  for (auto& [source, sizes, strides, offset] :
       given["results"].cast<std::vector<std::tuple<int, Sizes, Sizes, int64_t>>>())
    plan->results.push_back({source, sizes, strides, offset});
  plan->kind = given["kind"].cast<std::string>()[0];
  if (py::object how = given["recording"]; !how.is_none()) {
    std::shared_ptr<Recording> made(new Recording(), delete_recording);
    static int64_t count = 0;
    made->number = ++count;
    recordings[made->number] = made;
    made->name = how["name"].cast<std::string>();
    for (auto each : how["kept"].cast<std::vector<std::tuple<int, bool, std::vector<int64_t>, py::object>>>())
      made->kept.push_back({std::get<0>(each), std::get<1>(each), std::get<2>(each), dtype_of(std::get<3>(each))});
    made->weak = how["weak"].cast<std::vector<int>>();
    made->edges = how["edges"].cast<std::vector<int>>();
    made->edge_sizes = how["edge_sizes"].cast<std::vector<std::vector<int64_t>>>();
    made->slope_sizes = how["slope_sizes"].cast<std::vector<std::vector<int64_t>>>();
    made->slopes = how["slopes"].cast<std::vector<int>>();
    made->watched = how["watched"].cast<std::vector<int>>();
    made->varying_kept = how["varying_kept"].cast<std::vector<int>>();
    made->varying_slopes = how["varying_slopes"].cast<std::vector<int>>();
    made->zeros = how["zeros"].cast<bool>();
    made->backward = how["backward"];
    plan->recording = made;
  }
  return plan;
}

}  // namespace rooftop
