// A block waits for its header while the divider works. csim has the divider's latency,
// so a stream that is too short hangs here as it would on a card.
#include "check.hpp"
#include "state_codecs.hpp"

#include <sys/wait.h>
#include <unistd.h>

using namespace jaxinf;

namespace {

constexpr Word num_elements = 5000;

// Sends blocks through `measure` and `quantise` over a stream of the given depth.
template <Word lanes, Word depth>
void run_blocks() {
  BeatsOf<lanes> values;
  hls::stream<BeatOf<lanes>, depth> waiting;
  BlockHeaders headers;
  Wides codes, scales;
  csim::Region region;
  region.stage("values", [&] {
    for (Word i = 0; i < num_beats<lanes>(num_elements); ++i) {
      BeatOf<lanes> beat;
      for (Word lane = 0; lane < lanes; ++lane) beat.lane[lane] = 0.25f * (i + lane + 1);
      values.write(beat);
    }
  });
  region.stage("measure",
               [&] { measure<lanes>(values, num_elements, waiting, headers, scales); });
  region.stage("quantise", [&] {
    quantise<0, lanes>(waiting, headers, num_elements, 1, 2, codes);
  });
  region.stage("codes", [&] {
    for (Word i = 0; i < ceil_div(num_elements, 64); ++i) codes.read();
  });
  region.stage("scales", [&] {
    for (Word i = 0; i < ceil_div(num_elements, 256 * 16); ++i) scales.read();
  });
  region.run();
}

template <class Function>
bool stops(Function function) {
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    function();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

template <Word lanes>
void check_lanes() {
  constexpr Word block = beats_a_block<lanes>(), enough = block + header_latency;
  CHECK(!stops(run_blocks<lanes, waiting_depth<lanes>()>), "%u lanes hang", lanes);
  CHECK(!stops(run_blocks<lanes, enough>), "%u lanes hang at depth %u", lanes, enough);
  CHECK(stops(run_blocks<lanes, block>), "%u lanes: a block alone is enough", lanes);
  CHECK(stops(run_blocks<lanes, enough - 2>), "%u lanes: depth %u is enough", lanes,
        enough - 2);
}

}  // namespace

int main() {
  check_lanes<4>();
  check_lanes<8>();
  check_lanes<16>();
  std::printf("latency: a block, and %u cycles of a divider\n", header_latency);
}
