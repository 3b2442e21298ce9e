// Steps of several leaves through the handlers of stream_calls.cpp, on the late device.
//
//   late_device_steps DRIVER WAY
//
// This thread is XLA's: it puts kernels on a stream and calls the handlers between them.
// A thread of an engine gets gradients, others update. Ways are the functions at the end.
// Prints what is wrong.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#ifndef STREAM_CALLS
#define STREAM_CALLS "stream_calls.cpp"
#endif
#include STREAM_CALLS

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>

struct XLA_FFI_Error {
  std::string text;
};
struct XLA_FFI_ExecutionContext {
  void* stream;
};

namespace {

constexpr int num_leaves = 3, num_workers = 2;
constexpr std::uint32_t ok_status = 0, no_status = 77;

// ---- the model's own functions

void* (*new_stream)(int);
void (*put)(void*, void (*)(void*), void*);
void (*drain)(void*);
void (*hold_up)(void*, int);
void (*make_fail)(std::int64_t, int, int);
const char* (*failed_call)();
void (*limit_memory)(std::int64_t);
std::int64_t (*pinned)();
std::int64_t (*count)(const char*);
const char* (*faults)();

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
}

int num_wrong;
std::mutex guard;
void wrong(const std::string& text) {
  std::lock_guard locked(guard);
  if (++num_wrong <= 5) std::printf("wrong: %s\n", text.c_str());
}

// ---- XLA

XLA_FFI_Error* create(XLA_FFI_Error_Create_Args* given) {
  return new XLA_FFI_Error{given->message};
}
XLA_FFI_Error* stream_of(XLA_FFI_Stream_Get_Args* given) {
  given->stream = given->ctx->stream;
  return nullptr;
}

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);
struct Array {
  XLA_FFI_DataType dtype;
  void* data;
  std::int64_t count;
};

// Calls a handler as XLA does; returns its error's text.
std::string call(Handler* handler, void* stream, std::vector<Array> args,
                 std::vector<Array> rets, std::int64_t queue, std::int64_t port,
                 std::int64_t result_bytes) {
  XLA_FFI_Api api = {};
  api.XLA_FFI_Error_Create = create;
  api.XLA_FFI_Stream_Get = stream_of;
  std::vector<XLA_FFI_Buffer> buffers;
  buffers.reserve(args.size() + rets.size());
  std::vector<void*> given, wanted;
  for (auto* arrays : {&args, &rets})
    for (Array& one : *arrays) {
      buffers.push_back({sizeof(XLA_FFI_Buffer), nullptr, one.dtype, one.data, 1,
                         &one.count});
      (arrays == &args ? given : wanted).push_back(&buffers.back());
    }
  const char* names[] = {"port", "queue", "result_bytes", "site"};
  std::int64_t values[] = {port, queue, result_bytes, port + 100};
  XLA_FFI_ByteSpan spans[4], *places[4];
  XLA_FFI_Scalar scalars[4];
  XLA_FFI_AttrType types[4];
  void* attributes[4];
  for (int n = 0; n < 4; ++n) {
    spans[n] = {names[n], std::strlen(names[n])};
    places[n] = &spans[n];
    scalars[n] = {XLA_FFI_DataType_S64, &values[n]};
    types[n] = XLA_FFI_AttrType_SCALAR;
    attributes[n] = &scalars[n];
  }
  XLA_FFI_ExecutionContext context{stream};
  XLA_FFI_CallFrame frame = {};
  frame.api = &api;
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args.size = given.size();
  frame.args.args = given.data();
  frame.rets.size = wanted.size();
  frame.rets.rets = wanted.data();
  frame.attrs = {sizeof(XLA_FFI_Attrs), nullptr, 4, types, places, attributes};
  std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
  return error ? error->text : "";
}

// ---- a leaf on the device

struct Leaf {
  std::vector<float> gradient, update;
  std::vector<std::uint16_t> odd;    // an array whose bytes fill no place
  std::uint32_t step, status;
  Leaf(int number)
      : gradient(4000 + 3000 * number), update(gradient.size()), odd(33), step(0),
        status(no_status) {}
};

float gradient_of(int step, int leaf, int n) {
  return static_cast<float>((step * 31 + leaf * 7 + n) % 1000);
}
float update_of(float gradient) { return 2 * gradient + 1; }

struct Kernel {
  Leaf* leaf;
  int number, step;
  std::string error;  // of the handler before
};

// Kernels run on the device, in the order of the stream.
void make_gradient(void* given) {
  auto& kernel = *static_cast<Kernel*>(given);
  for (std::size_t n = 0; n < kernel.leaf->gradient.size(); ++n)
    kernel.leaf->gradient[n] = gradient_of(kernel.step, kernel.number, n);
  for (auto& value : kernel.leaf->odd) value = kernel.step;
  kernel.leaf->step = kernel.step;
}
void overwrite_gradient(void* given) {
  auto& kernel = *static_cast<Kernel*>(given);
  for (float& value : kernel.leaf->gradient) value = -1;
  for (auto& value : kernel.leaf->odd) value = 0xffff;
  kernel.leaf->step = 0xffff;
}
void check_update(void* given) {
  std::unique_ptr<Kernel> kernel(static_cast<Kernel*>(given));
  Leaf& leaf = *kernel->leaf;
  const std::string where =
      " of step " + std::to_string(kernel->step) + ", leaf " +
      std::to_string(kernel->number);
  if (kernel->error.empty() && leaf.status != ok_status && leaf.status != failed_status)
    wrong("the status" + where);
  if (kernel->error.empty() && leaf.status == ok_status)
    for (std::size_t n = 0; n < leaf.update.size(); ++n)
      if (leaf.update[n] != update_of(gradient_of(kernel->step, kernel->number, n))) {
        wrong("the update" + where);
        break;
      }
  leaf.status = no_status;
  for (float& value : leaf.update) value = NAN;
}

// ---- the engine

struct Gate {
  std::mutex guard;
  std::condition_variable changed;
  bool is_open = false;
  void open() {
    std::lock_guard locked(guard);
    is_open = true;
    changed.notify_all();
  }
  static void wait(void* given) {
    auto& gate = *static_cast<Gate*>(given);
    std::unique_lock locked(gate.guard);
    gate.changed.wait(locked, [&] { return gate.is_open; });
  }
};

struct Engine {
  std::int64_t queue;
  std::mutex guard;
  std::condition_variable changed;
  std::deque<Arrival> waiting;
  bool is_over = false, has_failed = false;
  std::string failure;
  std::vector<std::thread> threads;
  Gate updates;  // before each

  explicit Engine(std::int64_t limit, bool is_open = true)
      : queue(jaxinf_stream_open(limit)) {
    updates.is_open = is_open;
    for (int n = 0; n < num_workers; ++n) threads.emplace_back([this] { work(); });
    threads.emplace_back([this] { listen(); });
  }

  void listen() {
    Arrival found;
    while (!jaxinf_stream_next(queue, 0, &found)) {
      std::lock_guard locked(guard);
      if (found.failure[0]) {
        has_failed = true;
        failure = found.failure;
      }
      if (found.transfer)
        waiting.push_back(found);
      else
        jaxinf_stream_release(queue, nullptr);
      changed.notify_all();
    }
    std::lock_guard locked(guard);
    is_over = true;
    changed.notify_all();
  }

  void work() {
    std::unique_lock locked(guard);
    for (;;) {
      changed.wait(locked, [this] { return is_over || !waiting.empty(); });
      if (waiting.empty()) return;
      Arrival found = waiting.front();
      waiting.pop_front();
      const bool fails = has_failed;
      locked.unlock();
      Gate::wait(&updates);
      update(found, fails);
      jaxinf_stream_release(queue, found.transfer);
      locked.lock();
    }
  }

  // Writes update and status; a store that has failed only the status.
  static void update(const Arrival& found, bool fails) {
    if (!found.results) return;
    const int number = static_cast<int>(found.site - 100);
    const Leaf shape(number);
    const std::size_t size = shape.gradient.size();
    const auto* gradient = reinterpret_cast<const float*>(found.gradients);
    const char* odd = found.gradients + aligned(4 * size);
    std::uint32_t step;
    std::memcpy(&step, odd + aligned(2 * shape.odd.size()), sizeof step);
    auto* result = reinterpret_cast<float*>(found.results);
    if (!fails) {
      std::uint16_t last;
      std::memcpy(&last, odd + 2 * (shape.odd.size() - 1), sizeof last);
      if (last != step) wrong("an odd array that arrived");
      for (std::size_t n = 0; n < size; ++n) {
        if (gradient[n] != gradient_of(step, number, n)) {
          wrong("a gradient that arrived");
          break;
        }
      }
      for (std::size_t n = 0; n < size; ++n) result[n] = update_of(gradient[n]);
    }
    std::memcpy(found.results + aligned(4 * size), fails ? &failed_status : &ok_status,
                sizeof ok_status);
  }

  void close() {
    jaxinf_stream_close(queue);
    for (auto& thread : threads) thread.join();
  }
};

// ---- steps

struct Model {
  std::vector<Leaf> leaves;
  int num_starts = 0;
  Model() {
    for (int n = 0; n < num_leaves; ++n) leaves.emplace_back(n);
  }

  void start(Engine& engine, void* stream, int step, int number) {
    Leaf& leaf = leaves[number];
    auto* kernel = new Kernel{&leaf, number, step, ""};
    put(stream, make_gradient, kernel);
    ++num_starts;
    const std::int64_t size = leaf.gradient.size();
    const std::string error = call(
        jaxinf_stream_start, stream,
        {{XLA_FFI_DataType_F32, leaf.gradient.data(), size},
         {XLA_FFI_DataType_BF16, leaf.odd.data(), std::int64_t(leaf.odd.size())},
         {XLA_FFI_DataType_U32, &leaf.step, 1}},
        {{XLA_FFI_DataType_S32, &leaf.status, 1}}, engine.queue, number,
        aligned(4 * size) + alignment);
    if (!error.empty()) wrong("a start: " + error);
    put(stream, overwrite_gradient, kernel);
  }

  void finish(Engine& engine, void* stream, int step, int number) {
    Leaf& leaf = leaves[number];
    const std::string error =
        call(jaxinf_stream_finish, stream, {},
             {{XLA_FFI_DataType_F32, leaf.update.data(), std::int64_t(leaf.update.size())},
              {XLA_FFI_DataType_S32, &leaf.status, 1}},
             engine.queue, number, 0);
    if (!error.empty() && error.find("CUDA error") == std::string::npos)
      wrong("a finish: " + error);
    put(stream, check_update, new Kernel{&leaf, number, step, error});
  }

  void run(Engine& engine, const std::vector<void*>& streams, int num_steps) {
    for (int step = 1; step <= num_steps; ++step) {
      void* stream = streams[step % streams.size()];
      for (int n = num_leaves; n--;) start(engine, stream, step, n);
      for (int n = 0; n < num_leaves; ++n) finish(engine, stream, step, n);
    }
    for (void* stream : streams) drain(stream);
  }
};

constexpr std::int64_t unbounded = std::int64_t{1} << 40;

void expect(bool is_so, const char* what) {
  if (!is_so) wrong(what);
}

void end(Engine& engine) {
  engine.close();
  jaxinf_stream_destroy(engine.queue);
}

// XLA's thread is through with two steps before the device has begun.
void steps() {
  Engine engine(unbounded);
  Model model;
  Gate gate;
  void* stream = new_stream(0);
  put(stream, Gate::wait, &gate);
  const std::int64_t waits = count("cuEventSynchronize");
  for (int step = 1; step <= 2; ++step) {
    for (int n = num_leaves; n--;) model.start(engine, stream, step, n);
    for (int n = 0; n < num_leaves; ++n) model.finish(engine, stream, step, n);
  }
  gate.open();
  model.run(engine, {stream}, 40);
  expect(count("cuEventSynchronize") - waits == model.num_starts,
         "a transfer has one wait of the engine's, and no other");
  expect(count("cuMemcpyDtoHAsync") == 3 * model.num_starts, "copies to the host");
  expect(count("cuMemcpyHtoDAsync") == 2 * model.num_starts, "copies to the device");
  expect(count("cuStreamWaitValue32") == model.num_starts, "waits of the stream");
  expect(!engine.has_failed, "no failure");
  end(engine);
  expect(call(jaxinf_stream_start, stream, {}, {}, engine.queue, 0, 0) ==
             "jaxinf: the store is closed",
         "a closed queue refuses");
  expect(!pinned(), "all pinned memory is freed");
}

void soon() { std::this_thread::sleep_for(std::chrono::milliseconds(30)); }

// An update takes longer than all that the device has to do.
void complete() {
  Engine engine(unbounded, false);
  Model model;
  void* stream = new_stream(0);
  model.start(engine, stream, 1, 0);
  model.finish(engine, stream, 1, 0);
  soon();
  engine.updates.open();
  drain(stream);
  end(engine);
}

// Results of another stream's update do not overwrite those that are still to be copied.
void streams() {
  Engine engine(unbounded);
  Model one, other;
  void* late = new_stream(0);
  void* early = new_stream(0);
  hold_up(late, true);
  one.start(engine, late, 1, 0);
  one.finish(engine, late, 1, 0);
  const std::int64_t before = pinned();
  while (queues[engine.queue]->devices[0].held_bytes) soon();
  other.start(engine, early, 2, 0);
  expect(pinned() == before, "the memory of the first update is used again");
  soon();
  hold_up(late, false);
  other.finish(engine, early, 2, 0);
  for (void* stream : {late, early}) drain(stream);
  end(engine);
}

// Memory is freed when the last results have left.
void closing() {
  Engine engine(unbounded);
  Model model;
  void* stream = new_stream(0);
  hold_up(stream, true);
  model.start(engine, stream, 1, 0);
  model.finish(engine, stream, 1, 0);
  std::thread later([&] {
    soon();
    hold_up(stream, false);
  });
  end(engine);
  later.join();
  drain(stream);
  expect(!pinned(), "all pinned memory is freed");
}

// Gradients that wait take no more than the limit, which holds two of the longest.
void limit() {
  constexpr std::int64_t most = 2 * (4 * 10000 + 4096);
  Engine engine(most);
  Model model;
  model.run(engine, {new_stream(0)}, 15);
  expect(queues[engine.queue]->devices[0].landings.num_bytes <= most, "the limit");
  end(engine);
  expect(!pinned(), "all pinned memory is freed");
}

// Each call of the driver fails, alone or with all that follow. Nothing hangs, no wrong
// update looks right, and the engine hears of it, unless it does not matter.
void fail_in_turn(int code, bool lasts, std::map<std::string, int>& met) {
  for (std::int64_t turn = 1;; ++turn) {
    Engine engine(unbounded);
    Model model;
    void* stream = new_stream(0);
    make_fail(turn, code, lasts);
    model.run(engine, {stream}, 1);
    model.run(engine, {stream}, 1);  // with the memory of the first
    std::string before = failed_call();
    end(engine);
    const std::string name = failed_call();
    make_fail(0, 0, false);
    if (name.empty()) return;
    ++met[name];
    const bool is_tried_again = before == "cuMemHostAlloc" && code == 2 && !lasts;
    if (before == "cuCtxPopCurrent" || is_tried_again) before.clear();
    if (before.empty()) continue;
    const std::string shown = "CUDA error " + std::to_string(code);
    expect(engine.failure.find(shown) != std::string::npos,
           ("the engine hears of " + name).c_str());
  }
}

void failures() {
  std::map<std::string, int> met;
  fail_in_turn(700, false, met);
  fail_in_turn(2, false, met);
  fail_in_turn(700, true, met);
  for (const auto& one : met) std::printf("%s ", one.first.c_str());
  std::printf("\n");
}

void memory() {
  for (std::int64_t most : {0, 4096, 65536, 200000}) {
    Engine engine(unbounded);
    Model model;
    limit_memory(pinned() + most);
    model.run(engine, {new_stream(0)}, 2);
    end(engine);
    expect(engine.failure.find("pinned memory of ") == 0 &&
               engine.failure.find("out of memory (CUDA error 2)") != std::string::npos,
           "memory that is lacking");
  }
}

// A step that is given up: its updates end, and the next step's results are its own.
void forgotten() {
  Engine engine(unbounded);
  Model model;
  void* stream = new_stream(0);
  for (int step = 1; step <= 10; ++step)
    for (int n = num_leaves; n--;) model.start(engine, stream, step, n);
  model.run(engine, {stream}, 10);
  end(engine);
  expect(!pinned(), "all pinned memory is freed");
}

}  // namespace

int main(int, char** given) {
  char text[text_bytes];
  if (jaxinf_stream_load(given[1], text)) {
    std::printf("%s\n", text);
    return 1;
  }
  void* library = dlopen(given[1], RTLD_NOW);
  find(library, "late_device_stream", new_stream);
  find(library, "late_device_put", put);
  find(library, "late_device_drain", drain);
  find(library, "late_device_hold", hold_up);
  find(library, "late_device_fail", make_fail);
  find(library, "late_device_failed", failed_call);
  find(library, "late_device_limit", limit_memory);
  find(library, "late_device_pinned", pinned);
  find(library, "late_device_count", count);
  find(library, "late_device_faults", faults);
  const std::string way = given[2];
  if (way == "steps") steps();
  if (way == "complete") complete();
  if (way == "streams") streams();
  if (way == "closing") closing();
  if (way == "limit") limit();
  if (way == "failures") failures();
  if (way == "memory") memory();
  if (way == "forgotten") forgotten();
  std::printf("%s", faults());
  return num_wrong || *faults();
}
