// Repeat observed calls of public functions and operators without Python: allocations, launches and autograd
// (repeated_calls.py).
//
// *Facts* identify a call: each tensor's kind, shape, strides, dtype, device, alignment and requires_grad; the values
// of other arguments; and PyTorch's modes on this thread (grad mode, inference mode, autocast). If there is a `Plan`
// for the facts of a call, the plan lists the allocations and launches of the call. Otherwise the call runs in Python,
// which may add a plan for the next call to `Calls`.
//
// All functions, including backward nodes, run with the GIL held, so this file needs no locks.

#include <Python.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SavedTensorHooks.h>
#include <ATen/ScalarOps.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/version.h>
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
#include <torch/csrc/dynamo/compiled_autograd.h>
#define COMPILED_AUTOGRAD  // accepts C++ nodes, by an interface of PyTorch 2.13 and later
#endif

namespace py = pybind11;
using at::Tensor;
using Tensors = std::vector<Tensor>;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

constexpr size_t MOST_KNOWN = 4096;

// ---- the driver -----------------------------------------------------------------------------------------------------
// Declarations of the driver's functions and types, so that this file needs no CUDA headers.

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

const Driver& driver() {
  static const Driver found = [] {
    Driver driver;
    if (void* library = dlopen("libcuda.so.1", RTLD_LAZY)) {
      driver.launch = reinterpret_cast<decltype(driver.launch)>(dlsym(library, "cuLaunchKernelEx"));
      driver.parameter = reinterpret_cast<decltype(driver.parameter)>(dlsym(library, "cuFuncGetParamInfo"));
      driver.kernel_parameter = reinterpret_cast<decltype(driver.kernel_parameter)>(dlsym(library, "cuKernelGetParamInfo"));
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

// ---- objects that Python passes once ------------------------------------------------------------------------------

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
} python;

bool teaching = false;     // true while Python observes a call; Python then makes all calls
bool in_python = false;    // true if the user requested that Python makes all calls
uint64_t calls_made = 0;  // calls made without Python, including backward

struct PythonError {};  // a Python exception is set

PyObject* checked(PyObject* made) {
  if (!made) throw PythonError();
  return made;
}

bool is_true(PyObject* callable) {
  PyObject* found = checked(PyObject_CallNoArgs(callable));
  const int truth = PyObject_IsTrue(found);
  Py_DECREF(found);
  if (truth < 0) throw PythonError();
  return truth;
}

long long integer(PyObject* owned) {
  const long long value = PyLong_AsLongLong(checked(owned));
  Py_DECREF(owned);
  if (value == -1 && PyErr_Occurred()) throw PythonError();
  return value;
}

// ---- facts ----------------------------------------------------------------------------------------------------------

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
const std::vector<int64_t> ANY{-1};         // stands for sizes that vary from call to call

void put_tensor(Facts& facts, const Tensor& tensor) {
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  put(facts, 't');
  put(facts, impl.key_set().raw_repr());
  put(facts, impl.dtype().id());
  put(facts, impl.device().index());
  put(facts, char(impl.requires_grad()));
  put(facts, char(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) & 15));
  const auto sizes = impl.sizes(), strides = impl.strides();
  put(facts, char(sizes.size()));
  facts.append(reinterpret_cast<const char*>(sizes.data()), sizes.size() * sizeof(int64_t));
  facts.append(reinterpret_cast<const char*>(strides.data()), strides.size() * sizeof(int64_t));
}

// Add the facts of a tensor of which one size varies. Returns false if the call cannot be planned.
bool put_varying(Facts& facts, const Tensor& tensor, int which, Varying& varying) {
  const at::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const auto sizes = impl.sizes();
  if (sizes.empty() || !tensor.is_contiguous() || tensor.numel() == 0 || tensor.numel() > MOST_ELEMENTS) return false;
  put(facts, 'v');
  put(facts, impl.key_set().raw_repr());
  put(facts, impl.dtype().id());
  put(facts, impl.device().index());
  put(facts, char(impl.requires_grad()));
  put(facts, char(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) & 15));
  put(facts, char(sizes.size()));
  const size_t place = which == FIRST ? 0 : sizes.size() - 1;
  for (size_t i = 0; i < sizes.size(); ++i)
    if (i == place) varying.put_size(facts, sizes[i]);
    else put(facts, sizes[i]);
  return true;
}

bool is_plain(const Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides() &&
         tensor.has_storage() && !tensor.is_meta() && !tensor.key_set().has(c10::DispatchKey::Python);
}

// Add the facts and the tensors of an argument. Returns false if the argument has an unsupported type or is a proxy.
bool put_argument(Facts& facts, Tensors& tensors, PyObject* each, Varying& varying, int which = NONE, int depth = 0) {
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

uint64_t plain_keys = 0, inference_keys = 0;  // dispatch keys included on a thread where nothing watches calls

// Add PyTorch's modes on this thread. Returns false if a mode, transform or profiler must see the calls.
bool put_modes(Facts& facts) {
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
    for (const auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV}) put(facts, context.float32Precision(backend, op));
  put(facts, char(context.userEnabledFlashSDP() | context.userEnabledMemEfficientSDP() << 1 | context.userEnabledCuDNNSDP() << 2 |
                  context.userEnabledCuDNN() << 3));
  const char* check = std::getenv("ROOFTOP_CHECK");
  put(facts, check ? *check : '\0');
  if (is_true(python.profiles)) return false;
  static PyObject* level = PyUnicode_InternFromString("_current_level");
  return integer(PyObject_GetAttr(python.forward_mode, level)) < 0 && !is_true(python.is_watched);
}

// ---- plans ----------------------------------------------------------------------------------------------------------

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

[[noreturn]] void driver_failed(const char* what, int error) {
  const char* name = "unknown";
  driver().name(error, &name);
  PyErr_Format(PyExc_RuntimeError, "%s: the CUDA driver returned %s (%d)", what, name, error);
  throw PythonError();
}

// Make the device's CUDA context current, if this thread has none. The driver needs it, and a new thread whose memory
// comes from PyTorch's cache has called nothing of CUDA that would have made a context current.
void bind_context(int index) {
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

std::shared_ptr<Plan> find(const Known& known, const Facts& facts, const std::vector<int64_t>& values) {
  const auto found = known.find(facts);
  if (found == known.end()) return nullptr;
  for (const auto& plan : found->second)
    if (std::all_of(plan->conditions.begin(), plan->conditions.end(), [&](const Condition& each) { return each.holds(values); }))
      return plan;
  return nullptr;
}

// Make a tensor in the memory of another tensor. Autograd and version counters do not see the new tensor.
Tensor part_of(const Tensor& source, const View& view) {
  if (view.sizes == ANY)
    return source.requires_grad() ? Tensor(source.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true))
                                  : source;
  if (source.sizes() == at::IntArrayRef(view.sizes) && source.strides() == at::IntArrayRef(view.strides) && !view.offset &&
      !source.requires_grad())
    return source;
  Tensor part(source.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
  part.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes, view.strides, source.storage_offset() + view.offset);
  return part;
}

// Make a gradient in the memory of another tensor. If the gradient is the whole tensor, return that tensor object
// itself: autograd then sees that there are other references, and copies the gradient before it accumulates in place.
Tensor view_of(const Tensor& source, const View& view) {
  if (view.sizes == ANY) return source;
  if (source.sizes() == at::IntArrayRef(view.sizes) && source.strides() == at::IntArrayRef(view.strides) && !view.offset)
    return source;
  return source.as_strided(view.sizes, view.strides, source.storage_offset() + view.offset);
}

struct Made {
  Tensors memory;
  std::vector<Tensor> results;
};

void call_operator(const OperatorCall& call, Tensors& sources) {
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

void launch(const Launch& step, const Tensors& sources, void* stream, const std::vector<int64_t>* counts) {
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
    if (const int error = driver().replace(pointers[map.parameter], address)) driver_failed("a tensor descriptor", error);
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
Tensor zeros(at::Device device, void* stream, int64_t count) {
  static std::unordered_map<std::string, Tensor> of_streams;  // counters by stream, never freed
  Facts key;
  put(key, device.type());
  put(key, device.index());
  put(key, stream);
  const bool captured = device.is_cuda() && is_true(python.captures);
  if (!captured)
    if (auto found = of_streams.find(key); found != of_streams.end() && found->second.numel() >= count) return found->second;
  py::object made = py::reinterpret_steal<py::object>(
      checked(PyObject_CallFunction(python.counters, "NL", THPDevice_New(device), (long long)count)));
  if (made.is_none()) return Tensor();
  const Tensor found = THPVariable_Unpack(made.ptr());
  return captured ? found : of_streams[key] = found;
}

// Execute a plan. Returns false if the current device is not the plan's device, or no counters are available.
bool run(const Plan& plan, const Tensors& tensors, Made& made, const std::vector<int64_t>& values) {
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

// ---- autograd -------------------------------------------------------------------------------------------------------

using torch::autograd::Node;
using NodePointer = decltype(torch::autograd::Edge::function);  // std::shared_ptr or c10::intrusive_ptr: PyTorch's choice

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
  std::vector<int> slopes;                       // for each result of the call that has a gradient, its index in `slope_sizes`
  std::vector<int> watched;                      // the results with gradients, as indices of `Plan::results`
  std::vector<int> varying_kept, varying_slopes; // which size of each kept tensor and each slope varies; empty: none
  bool zeros;                                    // whether an undefined gradient counts as zeros
  py::object backward;  // (facts, kept, weak, wanted, slopes) to gradients of the operator's tensors; may add plans
  Known known;          // plans of backward, with a result for each edge
};

std::unordered_map<int64_t, std::weak_ptr<Recording>> recordings;  // by number

// A thread of autograd may free the last node of a graph without holding the GIL.
void delete_recording(Recording* recording) {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  recordings.erase(recording->number);
  delete recording;
}

py::list wrapped(const Tensors& tensors) {
  py::list list(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i)
    PyList_SET_ITEM(list.ptr(), i, tensors[i].defined() ? checked(THPVariable_Wrap(tensors[i])) : py::none().release().ptr());
  return list;
}

// Compute the gradients of the operator's tensors in Python.
variable_list by_python(const Recording& how, const Facts& facts, const Tensors& kept, const Tensors& weak,
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
variable_list shaped(const Recording& how, variable_list& results) {
  for (size_t i = 0; i < results.size(); ++i)
    if (results[i].defined() && how.edge_sizes[i] != ANY && results[i].sizes() != at::IntArrayRef(how.edge_sizes[i]))
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
  std::unordered_map<size_t, uint32_t> reshaped;  // saved results, without history and in another shape, and their numbers
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
      if (slope.defined() && how->slope_sizes[place] != ANY && slope.sizes() != at::IntArrayRef(how->slope_sizes[place]))
        slope = slope.reshape(how->slope_sizes[place]);
      if (slope.defined() && !how->varying_slopes.empty() && how->varying_slopes[place] != NONE) slope = slope.contiguous();
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
      if (how->kept[i].sizes != ANY && tensor.sizes() != at::IntArrayRef(how->kept[i].sizes)) tensor = tensor.view(how->kept[i].sizes);
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
  variable_list apply_with_saved(const variable_list& inputs, torch::dynamo::autograd::SwapSavedVariables& swap) override {
    using namespace torch::dynamo::autograd;
    for (SavedVariable& each : saved) swap.before(each);
    const NodePointer self = pointer_to<NodePointer>(this);
    Tensors kept;
    std::vector<bool> wanted;
    for (size_t i = 0; i < saved.size(); ++i) kept.push_back(saved[i].unpack(how->kept[i].output ? self : NodePointer()));
    for (size_t i = 0; i < how->edges.size(); ++i) wanted.push_back(task_should_compute_output(i));
    PackedArgs packed;
    packed.pack(how->number);
    packed.pack(kept);
    packed.pack(wanted);
    const auto args = packed.vec();
    std::vector<at::TypePtr> schema;
    for (const auto& each : args) schema.push_back(each.isTensor() ? at::TypePtr(at::TensorType::get()) : each.type());
    const auto metadata = IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(get_input_metadata(next_edges()));
    const auto& compiler = getPyCompilerInterface();
    const auto bound = compiler->bind_function(swap.get_py_compiler(), how->name, compiled_gradients, schema, true, false);
    variable_list results = compiler->call_function(swap.get_py_compiler(), "apply_functional", bound, inputs, args, metadata);
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
size_t result_of(const Plan& plan, const Kept& kept) {
  const auto found = std::find_if(plan.results.begin(), plan.results.end(), [&](const View& v) { return v.source == kept.source; });
  return found - plan.results.begin();
}

// Make autograd's node of a call. Hooks for saved tensors get tensors with the shapes that the operator saw, as from
// Python, because checkpointing compares the shapes of two calls.
void record(const std::shared_ptr<Recording>& how, const Plan& plan, const Tensors& tensors, const Made& made, bool hooked) {
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
    if (!hooked || each.sizes == ANY || tensor.sizes() == at::IntArrayRef(each.sizes)) {
      node->saved.emplace_back(tensor, each.output);
    } else if (!each.output) {
      node->saved.emplace_back(tensor.view(each.sizes), false);
    } else {
      node->reshaped[node->saved.size()] = tensor.output_nr();
      node->saved.emplace_back(tensor.detach().view(each.sizes), false);
    }
  }
  for (int place : how->weak) node->weak.push_back(place < 0 ? std::nullopt : std::make_optional(WeakTensor(tensors[place])));
}

// ---- the callable ---------------------------------------------------------------------------------------------------

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
PyObject* known_result(Calls* self, PyObject* const* given, size_t count, PyObject* names, Facts& facts, Tensors& tensors) {
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

PyObject* call(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
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

int visit(PyObject* object, visitproc visit, void* arg) {
  Calls* self = reinterpret_cast<Calls*>(object);
  Py_VISIT(self->function);
  Py_VISIT(self->miss);
  return 0;
}

int clear(PyObject* object) {
  Calls* self = reinterpret_cast<Calls*>(object);
  Py_CLEAR(self->function);
  Py_CLEAR(self->miss);
  return 0;
}

void destroy(PyObject* object) {
  PyObject_GC_UnTrack(object);
  clear(object);
  delete reinterpret_cast<Calls*>(object)->known;
  delete reinterpret_cast<Calls*>(object)->varying;
  Py_TYPE(object)->tp_free(object);
}

PyTypeObject CallsType = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool make_type() {
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

// ---- for Python -----------------------------------------------------------------------------------------------------

Calls* calls_of(py::handle object) {
  if (Py_TYPE(object.ptr()) != &CallsType) throw py::type_error("expected calls made by make_calls");
  return reinterpret_cast<Calls*>(object.ptr());
}

py::object make_calls(py::object function, py::object miss, std::vector<int> varying) {
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

at::ScalarType dtype_of(py::handle dtype) { return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type; }

std::shared_ptr<OperatorCall> operator_of(const py::dict& given) {
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
    const bool list = py::isinstance<py::list>(value) && py::len(value) && py::isinstance<View>(value.cast<py::list>()[0]);
    if (py::isinstance<View>(value)) {
      made->tensors.emplace_back(i, value.cast<View>());
      made->arguments.emplace_back();
    } else if (list) {
      made->lists.emplace_back(i, value.cast<std::vector<View>>());
      made->arguments.emplace_back();
    } else if (argument.type()->kind() == c10::TypeKind::TensorType && PyNumber_Check(value.ptr())) {
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

Formula formula_of(std::vector<int64_t> code) {
  if (code.size() > MOST_CODE) throw py::value_error("a formula is too long");
  return {std::move(code)};
}

std::vector<Formula> formulas_of(const std::vector<std::vector<int64_t>>& codes) {
  std::vector<Formula> made;
  for (const auto& each : codes) made.push_back(formula_of(each));
  return made;
}

Launch launch_of(const py::dict& given) {
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
    if (!cuda.replace || cuda.replace(bytes, reinterpret_cast<void*>(uintptr_t(1) << 32))) throw py::value_error("no tensor map");
  }
  for (size_t i = 0; i <= sizes.size(); ++i) {
    size_t offset = 0, size = 0;
    const bool there = parameter(made.function, i, &offset, &size) == 0;
    if (there != (i < sizes.size()) || (there && size != sizes[i]))
      throw py::value_error("the kernel has other parameters");
  }
  return made;
}

std::shared_ptr<Plan> plan_of(const py::dict& given) {
  auto plan = std::make_shared<Plan>();
  plan->device = reinterpret_cast<THPDevice*>(given["device"].cast<py::object>().ptr())->device;
  plan->varies = given["varies"].cast<bool>();
  for (auto each : given["conditions"].cast<std::vector<std::tuple<std::vector<int64_t>, int, bool>>>())
    plan->conditions.push_back({formula_of(std::get<0>(each)), std::get<1>(each), std::get<2>(each)});
  using Codes = std::vector<std::vector<int64_t>>;
  for (auto each : given["memory"].cast<std::vector<std::tuple<std::vector<int64_t>, std::vector<int64_t>, py::object, int64_t, Codes>>>())
    plan->memory.push_back({std::get<0>(each), std::get<1>(each), dtype_of(std::get<2>(each)), std::get<3>(each), formulas_of(std::get<4>(each))});
  for (auto each : given["launches"].cast<std::vector<py::dict>>()) plan->launches.push_back(launch_of(each));
  for (auto each : given["results"].cast<std::vector<std::tuple<int, std::vector<int64_t>, std::vector<int64_t>, int64_t>>>())
    plan->results.push_back({std::get<0>(each), std::get<1>(each), std::get<2>(each), std::get<3>(each)});
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

constexpr size_t MOST_PLANS = 64;  // for calls that differ only in varying sizes

// Add a plan. Returns true if all other plans were dropped first, because there were too many.
bool keep(Known& known, const std::string& facts, std::shared_ptr<Plan> plan) {
  const bool full = known.size() >= MOST_KNOWN;
  if (full) known.clear();
  auto& plans = known[facts];
  if (!plan->varies || plans.size() >= MOST_PLANS) plans.clear();
  plans.push_back(std::move(plan));
  return full;
}

struct PlanHandle {
  std::shared_ptr<Plan> plan;
};

// The handle by which the `backward` of a recording adds plans. The handle has a weak reference to the recording, since
// the recording refers to `backward`.
struct RecordingHandle {
  std::weak_ptr<Recording> recording;
};

void start(const py::dict& given) {
  python.parameter = reinterpret_cast<PyTypeObject*>(given["parameter"].cast<py::object>().release().ptr());
  for (auto [name, slot] : std::initializer_list<std::pair<const char*, PyObject**>>{
           {"counts", &python.counts}, {"is_watched", &python.is_watched}, {"profiles", &python.profiles},
           {"forward_mode", &python.forward_mode}, {"counters", &python.counters}, {"device", &python.device},
           {"stream", &python.stream}, {"captures", &python.captures}})
    *slot = given[name].cast<py::object>().release().ptr();
}

}  // namespace

PYBIND11_MODULE(ROOFTOP_MODULE, module) {
  if (!make_type()) throw py::error_already_set();
  py::class_<RecordingHandle>(module, "Recording");
  py::class_<PlanHandle>(module, "Plan")
      .def(py::init([](const py::dict& given) { return PlanHandle{plan_of(given)}; }))
      .def("recording", [](const PlanHandle& self) { return RecordingHandle{self.plan->recording}; });
  py::class_<View>(module, "Part").def(py::init([](int source, std::vector<int64_t> sizes, std::vector<int64_t> strides,
                                                   int64_t offset) { return View{source, sizes, strides, offset}; }));
  module.def("start", &start);
  module.def("note_keys", [](bool inference) {
    (inference ? inference_keys : plain_keys) = c10::impl::tls_local_dispatch_key_set().included_.raw_repr();
  });
  module.def("calls_made", [] { return calls_made; });
  module.def("set_teaching", [](bool now) { teaching = now; });
  module.def("set_in_python", [](bool now) { in_python = now; });
  module.def("make_calls", &make_calls);
  module.def("keep", [](py::handle calls, const std::string& facts, const PlanHandle& plan) {
    return keep(*calls_of(calls)->known, facts, plan.plan);
  });
  module.def("keep_backward", [](const RecordingHandle& forward, const std::string& facts, const PlanHandle& plan) {
    const auto recording = forward.recording.lock();
    return recording && keep(recording->known, facts, plan.plan);
  });
  module.def("forget", [](py::handle calls) { calls_of(calls)->known->clear(); });
}
