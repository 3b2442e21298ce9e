// A dataflow region on one thread: every stage is a coroutine that runs until it would
// block on a stream.
//
// So streams are as short as on a card, memory does not grow with the subgroup, and an
// update in place meets its own writes. A region that would hang on a card is found here:
// when no stage can go on, the process stops and names the remaining ones.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ucontext.h>
#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace jaxinf {
namespace csim {

template <class... Values>
[[noreturn]] inline void stop(const char* format, Values... values) {
  std::fprintf(stderr, "jaxinf csim: ");
  std::fprintf(stderr, format, values...);
  std::abort();
}

// Flushes denormal operands and results to zero, like a card's operators.
class FlushToZero {
#if defined(__SSE__)
 public:
  FlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040u); }
  ~FlushToZero() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#endif
};

class Region {
 public:
  void stage(const char* name, std::function<void()> function) {
    stages_.emplace_back(new Stage{name, std::move(function)});
  }

  // Returns when every stage has returned. Other threads may run regions of their own.
  void run() {
    const FlushToZero section;  // coroutines inherit this floating-point mode
    Region* const outer = current();
    current() = this;
    for (auto& stage : stages_) prepare(*stage);
    for (std::size_t left = stages_.size(); left > 0;) {
      moved_ = false;
      for (auto& stage : stages_) {
        if (stage->done) continue;
        active_ = stage.get();
        swapcontext(&scheduler_, &stage->context);
        if (stage->done) --left, moved_ = true;
      }
      if (left > 0 && !moved_) report_deadlock();
    }
    current() = outer;
  }

  static void wait(const char* why) {
    Region* const region = current();
    if (!region) stop("%s outside a region\n", why);
    region->active_->waits_for = why;
    swapcontext(&region->active_->context, &region->scheduler_);
  }

  // Begins an iteration of the active stage's pipelined loop, and makes the late writes
  // that are due. A loop that stalls makes none, since its pipeline stands still, as on
  // a card.
  static void iteration() {
    Region* const region = current();
    if (!region) return;
    Stage& stage = *region->active_;
    ++stage.iterations;
    while (!stage.late.empty() && stage.late.front().first <= stage.iterations) {
      const std::function<void()> write = std::move(stage.late.front().second);
      stage.late.pop_front();
      write();
    }
  }

  // Writes after so many more iterations of the loop, or at its end.
  template <class Stream, class Value>
  static void write_late(Stream& stream, const Value& value, std::uint64_t cycles) {
    Region* const region = current();
    if (!region) return stream.write(value);
    Stage& stage = *region->active_;
    stage.late.emplace_back(stage.iterations + cycles,
                            [&stream, value] { stream.write(value); });
  }

  static void moved() {
    if (Region* const region = current()) region->moved_ = true;
  }

 private:
  static constexpr std::size_t stack_bytes = 512 << 10;

  struct Stage {
    const char* name;
    std::function<void()> function;
    const char* waits_for = "";
    bool done = false;
    std::uint64_t iterations = 0;
    std::deque<std::pair<std::uint64_t, std::function<void()>>> late{};
    std::unique_ptr<char[]> stack{};
    ucontext_t context{};
  };

  static Region*& current() {
    static thread_local Region* region = nullptr;
    return region;
  }

  static void enter() {
    Region* const region = current();
    Stage* const stage = region->active_;
    stage->function();
    for (auto& [due, write] : stage->late) write();
    stage->late.clear();
    stage->done = true;
    swapcontext(&stage->context, &region->scheduler_);
  }

  static void prepare(Stage& stage) {
    stage.stack.reset(new char[stack_bytes]);
    getcontext(&stage.context);
    stage.context.uc_stack.ss_sp = stage.stack.get();
    stage.context.uc_stack.ss_size = stack_bytes;
    stage.context.uc_link = nullptr;
    makecontext(&stage.context, &Region::enter, 0);
  }

  [[noreturn]] void report_deadlock() {
    for (auto& stage : stages_)
      if (!stage->done)
        std::fprintf(stderr, "jaxinf csim: %s: %s\n", stage->waits_for, stage->name);
    stop("no stage of the region can go on\n");
  }

  std::vector<std::unique_ptr<Stage>> stages_;
  Stage* active_ = nullptr;
  ucontext_t scheduler_{};
  bool moved_ = false;
};

}  // namespace csim
}  // namespace jaxinf
