// Repeat observed calls of public functions and operators without Python: allocations, launches and autograd
// (repeated_calls.py).
//
// *Facts* identify a call: each tensor's kind, shape, strides, dtype, device, alignment and requires_grad; the values
// of other arguments; and PyTorch's modes on this thread (grad mode, inference mode, autocast). If there is a `Plan`
// for the facts of a call, the plan lists the allocations and launches of the call. Otherwise the call runs in Python,
// which may add a plan for the next call to `Calls`.
//
// All functions, including backward nodes, run with the GIL held, so this code needs no locks.
//
// objects.h, driver.h: objects of Python, and the CUDA driver. facts.h, plans.h, running.h: what identifies a call,
// what a call does, and doing it again. recordings.h: autograd. calls.h, from_python.h: the interface to Python.

#include <memory>
#include <string>
#include <utility>

#include <pybind11/pybind11.h>

#include "calls.h"
#include "from_python.h"

namespace rooftop {
namespace {

constexpr size_t MOST_KNOWN = 4096;
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
}  // namespace rooftop

using namespace rooftop;

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
