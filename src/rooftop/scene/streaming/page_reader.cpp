// Threads that read pages, and the planner that chooses the pages to read, without Python (see page_reader.py,
// loading.py, plans.py).
//
// Python threads that read pages take the GIL from the drawing thread several times per page, so they interrupt a frame,
// which takes about a millisecond, many times. The threads here never take the GIL.
//
// Path of a page: a request in the queue -> a reader thread reads it into a buffer and checks its checksum -> the copy
// thread copies it to the device, together with all other pages that are ready -> a result, which the frame's thread
// takes.

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/uio.h>
#include <unistd.h>

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

namespace py = pybind11;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

// ---- checksums: CRC-32 as in zlib ------------------------------------------------------------------------------------

struct Tables {
  uint32_t of[8][256];
  Tables() {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      uint32_t value = byte;
      for (int bit = 0; bit < 8; ++bit) value = value >> 1 ^ (value & 1 ? 0xedb88320u : 0);
      of[0][byte] = value;
    }
    for (uint32_t byte = 0; byte < 256; ++byte)
      for (int row = 1; row < 8; ++row) of[row][byte] = of[row - 1][byte] >> 8 ^ of[0][of[row - 1][byte] & 255];
  }
};

uint32_t crc_by_tables(const uint8_t* at, size_t size, uint32_t crc) {
  static const Tables tables;
  const auto& of = tables.of;
  for (; size >= 8; at += 8, size -= 8) {
    uint32_t low, high;
    std::memcpy(&low, at, 4);
    std::memcpy(&high, at + 4, 4);
    low ^= crc;
    crc = of[7][low & 255] ^ of[6][low >> 8 & 255] ^ of[5][low >> 16 & 255] ^ of[4][low >> 24] ^ of[3][high & 255] ^
          of[2][high >> 8 & 255] ^ of[1][high >> 16 & 255] ^ of[0][high >> 24];
  }
  for (; size; ++at, --size) crc = crc >> 8 ^ of[0][(crc ^ *at) & 255];
  return crc;
}

#if defined(__x86_64__)
// CRC by multiplication of polynomials, with the constants of Gopal et al., "Fast CRC Computation for Generic
// Polynomials Using PCLMULQDQ", Intel, 2009. `size` is at least 64 and a multiple of 16.
__attribute__((target("pclmul,sse4.1"))) uint32_t crc_by_products(const uint8_t* at, size_t size, uint32_t crc) {
  const auto load = [](const uint8_t* from) __attribute__((target("sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  };
  const auto fold = [](__m128i value, __m128i by, __m128i next) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x11), next), _mm_clmulepi64_si128(value, by, 0x00));
  };
  const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641), low = _mm_setr_epi32(~0, 0, ~0, 0);
  __m128i a = _mm_xor_si128(load(at), _mm_cvtsi32_si128(int(crc))), b = load(at + 16), c = load(at + 32), d = load(at + 48);
  for (at += 64, size -= 64; size >= 64; at += 64, size -= 64) {
    a = fold(a, by_64, load(at));
    b = fold(b, by_64, load(at + 16));
    c = fold(c, by_64, load(at + 32));
    d = fold(d, by_64, load(at + 48));
  }
  a = fold(fold(fold(a, by_16, b), by_16, c), by_16, d);
  for (; size >= 16; at += 16, size -= 16) a = fold(a, by_16, load(at));
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by_16, 0x10));
  a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low), _mm_set_epi64x(0, 0x0163cd6124), 0x00));
  b = _mm_clmulepi64_si128(_mm_and_si128(a, low), polynomial, 0x10);
  b = _mm_clmulepi64_si128(_mm_and_si128(b, low), polynomial, 0x00);
  return uint32_t(_mm_extract_epi32(_mm_xor_si128(a, b), 1));
}
#endif

uint32_t crc_of(const uint8_t* at, size_t size) {
  uint32_t crc = ~0u;
#if defined(__x86_64__)
  static const bool has_products = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (has_products && size >= 64) {
    const size_t part = size & ~size_t(15);
    crc = crc_by_products(at, part, crc);
    at += part, size -= part;
  }
#endif
  return ~crc_by_tables(at, size, crc);
}

// ---- the driver: declarations of the few functions in use, so that no CUDA headers are needed ------------------------

struct Driver {
  int (*context)(void**) = nullptr;                                   // cuCtxGetCurrent
  int (*enter)(void*) = nullptr;                                      // cuCtxSetCurrent
  int (*make_stream)(void**, unsigned) = nullptr;                     // cuStreamCreate
  int (*end_stream)(void*) = nullptr;                                 // cuStreamDestroy
  int (*make_event)(void**, unsigned) = nullptr;                      // cuEventCreate
  int (*end_event)(void*) = nullptr;                                  // cuEventDestroy
  int (*record)(void*, void*) = nullptr;                              // cuEventRecord
  int (*wait)(void*) = nullptr;                                       // cuEventSynchronize
  int (*copy)(uint64_t, const void*, size_t, void*) = nullptr;        // cuMemcpyHtoDAsync

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) throw std::runtime_error("the CUDA driver cannot be loaded");
    const auto find = [library](const char* name, auto& function) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (!function) throw std::runtime_error(std::string("the CUDA driver has no ") + name);
    };
    find("cuCtxGetCurrent", context);
    find("cuCtxSetCurrent", enter);
    find("cuStreamCreate", make_stream);
    find("cuStreamDestroy_v2", end_stream);
    find("cuEventCreate", make_event);
    find("cuEventDestroy_v2", end_event);
    find("cuEventRecord", record);
    find("cuEventSynchronize", wait);
    find("cuMemcpyHtoDAsync_v2", copy);
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// event flags: no timing, and a thread that waits for the event sleeps
constexpr unsigned NON_BLOCKING_STREAM = 1, SLEEPING_EVENT = 1 | 2;

void check(int code, const char* what) {
  if (code) throw std::runtime_error(std::string(what) + ": CUDA error " + std::to_string(code));
}

// ---- reading ---------------------------------------------------------------------------------------------------------

// Outcomes of a request, as in loading.py.
enum Outcome : int64_t { READ, UNREADABLE, CUT_OFF, CHANGED, NOT_COPIED };

struct Request {
  double rank, order;  // requests with the smallest values are read first
  int64_t page, slot, file, offset, length, checksum;
  bool operator<(const Request& other) const {  // reversed, because a priority queue returns its greatest element first
    if (rank != other.rank) return rank > other.rank;
    if (order != other.order) return order > other.order;
    return page > other.page;
  }
};
constexpr int TABLE_COLUMNS = 4, RESULT_COLUMNS = 4;

struct Result {
  int64_t page, held;  // held: number of bytes that were read
  int64_t outcome, code;
};

class Reader {
 public:
  // A forked process has none of the threads, so it must not join them or destroy the reader.
  struct Deleter {
    void operator()(Reader* reader) const {
      if (reader->process_ == getpid()) delete reader;
    }
  };

  // table: file, offset, length and checksum of each page.
  // staged: memory for `buffers` pages, from which pages are copied to the device.
  // slots: the memory of the pool.
  Reader(Array<int64_t> table, int threads, int buffers, uintptr_t staged, uintptr_t slots, int64_t page_bytes, bool on_gpu, int most_merged)
      : table_(table), staged_(reinterpret_cast<uint8_t*>(staged)), slots_(slots), page_bytes_(page_bytes), on_gpu_(on_gpu), most_merged_(most_merged) {
    for (int buffer = buffers; buffer--;) free_.push_back(buffer);
    if (on_gpu) {
      check(driver().context(&context_), "no context");
      check(driver().make_stream(&stream_, NON_BLOCKING_STREAM), "no stream");
      check(driver().make_event(&event_, SLEEPING_EVENT), "no event");
    }
    sigset_t all, before;  // block signals here, because only Python's threads can handle them
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    try {
      if (on_gpu) threads_.emplace_back([this] { copy_all(); });
      for (int k = 0; k < threads; ++k) threads_.emplace_back([this] { read_all(); });
    } catch (const std::system_error&) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      close();  // joins the threads that were started
      throw std::runtime_error("can't start new thread");
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    for (auto& thread : threads_) pthread_setname_np(thread.native_handle(), "rooftop-pages");
  }
  ~Reader() { close(); }

  void load(const Array<int64_t>& pages, const Array<int64_t>& slots, double rank, const Array<double>& orders) {
    if (pages.size() != slots.size() || pages.size() != orders.size())
      throw std::invalid_argument("pages, slots and orders must have the same length");
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      for (py::ssize_t k = 0; k < pages.size(); ++k) {
        const int64_t* row = table_.data(pages.data()[k], 0);
        queue_.push({rank, orders.data()[k], pages.data()[k], slots.data()[k], row[0], row[1], row[2], row[3]});
      }
    }
    pages.size() == 1 ? work_.notify_one() : work_.notify_all();
  }

  // Wait for at least `least` results, and return all results. If a signal handler raises, no result is lost.
  Array<int64_t> take(size_t least) {
    std::vector<Result> found;
    for (bool enough = false; !enough;) {
      {
        const py::gil_scoped_release released;
        std::unique_lock<std::mutex> lock(mutex_);
        awaited_ = least;
        enough = arrived_.wait_for(lock, std::chrono::milliseconds(least ? 50 : 0), [&] { return done_.size() >= least; });
        awaited_ = 0;
        if (enough) {
          found.swap(done_);
          there_.store(false, std::memory_order_release);
        }
      }
      if (!enough && PyErr_CheckSignals()) throw py::error_already_set();
    }
    return as_rows(found);
  }

  // Return the available results without waiting, for the frame's thread.
  Array<int64_t> arrived() {
    if (!there_.load(std::memory_order_acquire)) return as_rows({});
    return take(0);
  }

  void close() {
    if (process_ != getpid()) return;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (leaving_) return;
      leaving_ = true;
    }
    work_.notify_all();
    checked_there_.notify_all();
    for (auto& thread : threads_) thread.join();
    if (on_gpu_) {
      driver().end_event(event_);
      driver().end_stream(stream_);
    }
  }

 private:
  struct Read {
    Request request;
    int buffer;
    Result result;
  };

  static Array<int64_t> as_rows(const std::vector<Result>& found) {
    static_assert(sizeof(Result) == RESULT_COLUMNS * sizeof(int64_t));
    const std::vector<py::ssize_t> shape = {py::ssize_t(found.size()), RESULT_COLUMNS};
    Array<int64_t> results(shape);
    if (!found.empty()) std::memcpy(results.mutable_data(), found.data(), found.size() * sizeof(Result));
    return results;
  }

  uint8_t* memory_of(int buffer) const { return staged_ + buffer * page_bytes_; }

  void read_all() {
#if defined(__linux__)
    const sched_param none = {};
    // SCHED_BATCH: a woken thread does not preempt the thread that wakes it
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &none);
#endif
    std::vector<Read> reads;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        work_.wait(lock, [this] { return leaving_ || (!queue_.empty() && !free_.empty()); });
        if (leaving_) return;
        take_some(reads);
      }
      read(reads);
      for (auto& each : reads) check_sum(each);
      if (!on_gpu_)
        for (auto& each : reads)
          if (each.result.outcome == READ)
            std::memcpy(reinterpret_cast<void*>(slots_ + each.request.slot * page_bytes_), memory_of(each.buffer), each.request.length);
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (on_gpu_)
          checked_.insert(checked_.end(), reads.begin(), reads.end());
        else
          finish(reads);
      }
      on_gpu_ ? checked_there_.notify_one() : work_.notify_all();
      reads.clear();
    }
  }

  // Take the next request. If the queue has enough requests for the other threads too, also take requests that follow
  // this request in the file.
  void take_some(std::vector<Read>& reads) {
    const size_t most = queue_.size() > 2 * threads_.size() ? most_merged_ : 1;
    while (reads.size() < most && !queue_.empty() && !free_.empty()) {
      const Request next = queue_.top();
      if (!reads.empty()) {
        const Request& last = reads.back().request;
        const int64_t gap = next.offset - last.offset - last.length;
        if (next.file != last.file || gap < 0 || gap >= int64_t(sizeof gap_)) return;
      }
      queue_.pop();
      reads.push_back({next, free_.back(), {next.page, 0, READ, 0}});
      free_.pop_back();
    }
  }

  void read(std::vector<Read>& reads) {
    if (reads.size() > 1) {
      iovec parts[64];
      int count = 0;
      int64_t expected = 0;
      for (size_t k = 0; k < reads.size(); ++k) {
        const Request& request = reads[k].request;
        if (k) {
          const Request& last = reads[k - 1].request;
          const size_t gap = request.offset - last.offset - last.length;
          if (gap) parts[count++] = {gap_, gap};
        }
        parts[count++] = {memory_of(reads[k].buffer), size_t(request.length)};
      }
      for (int k = 0; k < count; ++k) expected += parts[k].iov_len;
      if (preadv(int(reads[0].request.file), parts, count, reads[0].request.offset) == expected) {
        for (auto& each : reads) each.result.held = each.request.length;
        return;
      }
    }  // after a short read, read each page separately, to find the page that cannot be read
    for (auto& each : reads) {
      const Request& request = each.request;
      int64_t& held = each.result.held;
      for (held = 0; held < request.length;) {
        const ssize_t count = pread(int(request.file), memory_of(each.buffer) + held, request.length - held, request.offset + held);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) {
          each.result.outcome = count < 0 ? UNREADABLE : CUT_OFF;
          each.result.code = count < 0 ? errno : 0;
          break;
        }
        held += count;
      }
    }
  }

  void check_sum(Read& each) const {
    if (each.result.outcome == READ && crc_of(memory_of(each.buffer), each.request.length) != uint32_t(each.request.checksum))
      each.result.outcome = CHANGED;
  }

  // The copy thread: copy all pages that are ready, and wait once for all of them.
  void copy_all() {
    driver().enter(context_);
    std::vector<Read> reads;
    for (;;) {
      {
        std::unique_lock<std::mutex> lock(mutex_);
        checked_there_.wait(lock, [this] { return leaving_ || !checked_.empty(); });
        if (leaving_) return;
        reads.swap(checked_);
      }
      int code = 0;
      for (auto& each : reads)
        if (each.result.outcome == READ && !code)
          code = driver().copy(slots_ + each.request.slot * page_bytes_, memory_of(each.buffer), each.request.length, stream_);
      if (!code) code = driver().record(event_, stream_);
      if (!code) code = driver().wait(event_);
      for (auto& each : reads)
        if (code && each.result.outcome == READ) each.result.outcome = NOT_COPIED, each.result.code = code;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        finish(reads);
      }
      work_.notify_all();
      reads.clear();
    }
  }

  void finish(const std::vector<Read>& reads) {
    for (const auto& each : reads) {
      free_.push_back(each.buffer);
      done_.push_back(each.result);
    }
    there_.store(true, std::memory_order_release);
    if (awaited_ && done_.size() >= awaited_) arrived_.notify_all();
  }

  const Array<int64_t> table_;
  uint8_t* const staged_;
  const uintptr_t slots_;
  const int64_t page_bytes_;
  const bool on_gpu_;
  const size_t most_merged_;
  const pid_t process_ = getpid();
  void *context_ = nullptr, *stream_ = nullptr, *event_ = nullptr;
  char gap_[64];  // receives the bytes between pages of a file; its content is not used

  std::mutex mutex_;  // protects all members below
  std::condition_variable work_, checked_there_, arrived_;
  std::priority_queue<Request> queue_;
  std::vector<int> free_;      // free buffers
  std::vector<Read> checked_;  // pages that wait for the copy to the device
  std::vector<Result> done_;
  std::atomic<bool> there_{false};  // whether `done_` may have results
  size_t awaited_ = 0;
  bool leaving_ = false;
  std::vector<std::thread> threads_;
};

// ---- plans -----------------------------------------------------------------------------------------------------------

enum State : uint8_t { ABSENT, LOADING, ARRIVED, RESIDENT, LOST };  // as in slots.py

// The state of the pool, in the arrays of `Slots` in slots.py. `lacking`, `take`, `give_up` and `publish` do the same
// as the methods there.
class Books {
 public:
  Books(Array<int64_t> starts, Array<int64_t> needs, Array<bool> roots, Array<uint8_t> state, Array<int32_t> slot_of,
        Array<int32_t> dependents, Array<int64_t> page_in, Array<int64_t> free, Array<int64_t> free_count)
      : kept_{starts, needs, roots, state, slot_of, dependents, page_in, free, free_count},
        starts_(starts.data()), needs_(needs.data()), roots_(roots.data()), state_(state.mutable_data()),
        slot_of_(slot_of.mutable_data()), dependents_(dependents.mutable_data()), page_in_(page_in.mutable_data()),
        free_(free.mutable_data()), free_count_(free_count.mutable_data()), count_(page_in.size()), seen_(state.size()) {}

  // The pages to read so that `page` can be resident, in ascending order: the page itself and the pages that it needs,
  // directly or not, if they are absent or lost.
  const std::vector<int64_t>& lacking(int64_t page) {
    found_.clear();
    walked_.assign(1, page);
    seen_[page] = 1;
    for (size_t next = 0; next < walked_.size(); ++next) {
      const int64_t at = walked_[next];
      if (state_[at] == RESIDENT) continue;
      if (state_[at] == ABSENT || state_[at] == LOST) found_.push_back(at);
      for (int64_t k = starts_[at]; k < starts_[at + 1]; ++k)
        if (!seen_[needs_[k]]) seen_[needs_[k]] = 1, walked_.push_back(needs_[k]);
    }
    for (const int64_t each : walked_) seen_[each] = 0;
    std::sort(found_.begin(), found_.end());
    return found_;
  }

  int64_t take(int64_t page) {
    if (state_[page] == ABSENT) {
      const int64_t slot = free_[--*free_count_];
      slot_of_[page] = int32_t(slot), page_in_[slot] = page;
      for (int64_t k = starts_[page]; k < starts_[page + 1]; ++k) ++dependents_[needs_[k]];
    }
    state_[page] = LOADING;
    return slot_of_[page];
  }

  void give_up(int64_t page) {
    const int64_t slot = slot_of_[page];
    state_[page] = ABSENT, slot_of_[page] = -1, page_in_[slot] = -1;
    free_[(*free_count_)++] = slot;
    for (int64_t k = starts_[page]; k < starts_[page + 1]; ++k) --dependents_[needs_[k]];
  }

  // Do the same as `Slots.arrive(arriving)` and then `Slots.publish()`: return the pages that became resident,
  // in ascending order, and the other pages that have arrived.
  py::tuple publish(const Array<int64_t>& arriving, const Array<int64_t>& arrived) {
    std::vector<int64_t> waiting(arrived.data(), arrived.data() + arrived.size()), published;
    for (py::ssize_t k = 0; k < arriving.size(); ++k) {
      const int64_t page = arriving.data()[k];
      if (state_[page] != LOADING) throw std::logic_error("a page arrived that was not loading");
      state_[page] = ARRIVED, waiting.push_back(page);
    }
    std::sort(waiting.begin(), waiting.end());  // a page comes after the pages that it needs
    size_t kept = 0;
    for (const int64_t page : waiting) {
      bool fits = true;
      for (int64_t k = starts_[page]; k < starts_[page + 1]; ++k) fits &= state_[needs_[k]] == RESIDENT;
      if (fits)
        state_[page] = RESIDENT, published.push_back(page);
      else
        waiting[kept++] = page;
    }
    waiting.resize(kept);
    return py::make_tuple(as_array(published), as_array(waiting));
  }

  // Do the same as `plans.rows_in_python`: fill the rows that tell the device where these pages are.
  void write_rows(const Array<int64_t>& pages, const Array<int64_t>& limits, Array<int64_t>& rows, int64_t slot_words) const {
    const py::ssize_t count = pages.size(), columns = rows.shape(1), limited = limits.shape(1);
    if (rows.shape(0) < count || columns != 2 + limited) throw std::invalid_argument("expected one row per page, of two numbers and the page's limits");
    int64_t* row = rows.mutable_data();
    for (py::ssize_t k = 0; k < rows.shape(0); ++k, row += columns) {
      const int64_t page = k < count ? pages.data()[k] : -1;
      row[0] = page;
      if (page < 0) continue;
      row[1] = state_[page] == RESIDENT ? slot_of_[page] * slot_words : -1;
      std::copy_n(limits.data() + page * limited, limited, row + 2);
    }
  }

  // Do the same as `plans.plan_in_python`: return the pages to evict, the pages to read, their slots, and their orders.
  py::tuple plan_some(const Array<int64_t>& pages, const Array<float>& pixels, int64_t most, const py::object& use, bool urgent, double margin) {
    std::vector<int64_t> given_up, loads, slots;
    std::vector<double> orders;
    std::unique_ptr<Victims> victims;
    for (py::ssize_t k = 0; k < pages.size(); ++k) {
      const std::vector<int64_t>& chain = lacking(pages.data()[k]);
      if (int64_t(chain.size()) > most - int64_t(loads.size())) break;
      int64_t missing = -*free_count_;
      for (const int64_t each : chain) missing += slot_of_[each] < 0;
      if (missing > 0) {
        if (!victims) victims = std::make_unique<Victims>(*this, use(), 2 * most);
        if (!victims->take(*this, missing, urgent ? pixels.data()[k] : 0.0f, margin, chain, given_up)) break;
      }
      for (const int64_t each : chain) loads.push_back(each), slots.push_back(take(each)), orders.push_back(-pixels.data()[k]);
    }
    return py::make_tuple(as_array(given_up), as_array(loads), as_array(slots), as_array(orders));
  }

 private:
  // Pages in the order of eviction, as in `plans._Victims`.
  struct Victims {
    Array<float> pixels;
    Array<int32_t> ages;
    std::vector<int64_t> pages;
    size_t next = 0;

    Victims(const Books& books, const py::object& use, size_t most)
        : pixels(use.attr("pixels").cast<Array<float>>()), ages(use.attr("ages").cast<Array<int32_t>>()) {
      const float* of = pixels.data();
      const int32_t* age = ages.data();
      for (int64_t slot = 0; slot < books.count_; ++slot) {
        const int64_t page = books.page_in_[slot];
        if (page >= 0 && books.state_[page] != LOADING && !books.dependents_[page] && !books.roots_[page]) pages.push_back(page);
      }
      // sort only the first `most` pages, and all pages with the same rank as the last of these
      if (pages.size() > most && most) {
        const auto worth = [&](int64_t page) { return double(std::min(of[page], 2147483648.0f)) - double(age[page]) * 4294967296.0; };
        std::vector<double> worths;
        for (const int64_t page : pages) worths.push_back(worth(page));
        std::nth_element(worths.begin(), worths.begin() + (most - 1), worths.end());
        const double last = worths[most - 1];
        pages.erase(std::remove_if(pages.begin(), pages.end(), [&](int64_t page) { return worth(page) > last; }), pages.end());
      }
      std::sort(pages.begin(), pages.end(), [&](int64_t a, int64_t b) {
        if (age[a] != age[b]) return age[a] > age[b];
        return of[a] != of[b] ? of[a] < of[b] : a > b;
      });
    }

    bool take(Books& books, int64_t count, float wanted, double margin, const std::vector<int64_t>& chain, std::vector<int64_t>& given_up) {
      std::vector<int64_t> found;
      size_t at = next;
      for (; int64_t(found.size()) < count && at < pages.size(); ++at) {
        const int64_t page = pages[at];
        if (ages.data()[page] == 0 && float(pixels.data()[page] * float(margin)) >= wanted) break;
        // whether this plan has reserved or evicted the page
        const bool taken = books.state_[page] == ABSENT || books.state_[page] == LOADING;
        if (!books.dependents_[page] && !taken && !books.is_kept(page, chain)) found.push_back(page);
      }
      if (int64_t(found.size()) < count) return false;
      next = at;
      for (const int64_t page : found) books.give_up(page), given_up.push_back(page);
      return true;
    }
  };

  // Whether a list of pages contains this page or a page that needs it directly.
  bool is_kept(int64_t page, const std::vector<int64_t>& chain) const {
    for (const int64_t each : chain)
      if (each == page || std::binary_search(needs_ + starts_[each], needs_ + starts_[each + 1], page)) return true;
    return false;
  }

  template <class T>
  static Array<T> as_array(const std::vector<T>& values) {
    return Array<T>(std::vector<py::ssize_t>{py::ssize_t(values.size())}, values.data());
  }

  const std::vector<py::array> kept_;
  const int64_t *const starts_, *const needs_;
  const bool* const roots_;
  uint8_t* const state_;
  int32_t *const slot_of_, *const dependents_;
  int64_t *const page_in_, *const free_, *const free_count_;
  const int64_t count_;
  std::vector<uint8_t> seen_;  // for each page, whether `lacking` has seen it; all 0 between calls
  std::vector<int64_t> walked_, found_;
};

}  // namespace

PYBIND11_MODULE(ROOFTOP_MODULE, module) {
  module.def("crc_of", [](const py::bytes& data) {
    const std::string bytes = data;
    return crc_of(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  });
  py::class_<Reader, std::unique_ptr<Reader, Reader::Deleter>>(module, "Reader")
      .def(py::init([](Array<int64_t> table, int threads, int buffers, uintptr_t staged, uintptr_t slots, int64_t page_bytes, bool on_gpu,
                       int most_merged) {
        if (table.ndim() != 2 || table.shape(1) != TABLE_COLUMNS)
          throw std::invalid_argument("the table must have four columns: file, offset, length and checksum");
        return std::unique_ptr<Reader, Reader::Deleter>(
            new Reader(table, threads, buffers, staged, slots, page_bytes, on_gpu, most_merged));
      }))
      .def("load", &Reader::load)
      .def("arrived", &Reader::arrived)
      .def("take", &Reader::take)
      .def("close", &Reader::close, py::call_guard<py::gil_scoped_release>());
  py::class_<Books>(module, "Books")
      .def(py::init<Array<int64_t>, Array<int64_t>, Array<bool>, Array<uint8_t>, Array<int32_t>, Array<int32_t>, Array<int64_t>,
                    Array<int64_t>, Array<int64_t>>(),
           py::arg().noconvert(), py::arg().noconvert(), py::arg().noconvert(), py::arg().noconvert(), py::arg().noconvert(),
           py::arg().noconvert(), py::arg().noconvert(), py::arg().noconvert(), py::arg().noconvert())
      .def("plan_some", &Books::plan_some)
      .def("publish", &Books::publish)
      .def("write_rows", &Books::write_rows, py::arg(), py::arg().noconvert(), py::arg().noconvert(), py::arg());
}
