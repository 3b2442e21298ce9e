// Streams keep order and hold no more than their depth; a region that hangs reports it.
#include "check.hpp"

#include <sys/wait.h>
#include <unistd.h>

using namespace jaxinf;

namespace {

void check_order() {
  Words first, second;
  int longest = 0;
  csim::Region region;
  region.stage("count", [&] {
    for (Word i = 0; i < 10000; ++i) first.write(i);
  });
  region.stage("double", [&] {
    for (Word i = 0; i < 10000; ++i) {
      longest = first.size() > longest ? first.size() : longest;
      second.write(2 * first.read());
    }
  });
  region.stage("check", [&] {
    for (Word i = 0; i < 10000; ++i) CHECK(second.read() == 2 * i, "value %u", i);
  });
  region.run();
  CHECK(longest == 2, "a stream of depth 2 held %d values", longest);
}

// Each stage waits for the other's first value.
void hang() {
  Words there, back;
  csim::Region region;
  region.stage("there", [&] { there.write(back.read()); });
  region.stage("back", [&] { back.write(there.read()); });
  region.run();
}

void leave_a_value() {
  Words stream;
  stream.write(1);
}

template <class Function>
void check_stops(Function function, const char* what) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    function();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "%s goes unnoticed", what);
}

}  // namespace

int main() {
  check_order();
  check_stops(hang, "a deadlock");
  check_stops(leave_a_value, "a value that nobody reads");
  std::printf("region: order, depth, deadlock, left-over values\n");
}
